"""What tests skip for older releases is what these releases really lack."""

import re
import subprocess
import tomllib
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from packaging.version import Version
from releases import LACKING, LACKING_KINDS, LACKING_TYPES, has
from tiny_models import FURTHER_KINDS, KINDS, OTHER_KINDS, model_types

from embedlayer.core.errors import TESTED
from embedlayer.families import TRANSFORMERS_VERSION

ROOT = Path(__file__).parents[1]


def installed_types() -> set[tuple[str, str]]:
    """Return all pairs of a kind and a model type."""
    return {(kind, name) for kind in (*KINDS, *FURTHER_KINDS, *OTHER_KINDS) for name in model_types(kind)}


def test_nothing_is_skipped_with_the_pinned_releases() -> None:
    if Version(torch.__version__) < Version("2.13") or Version(transformers.__version__) < Version(
        TRANSFORMERS_VERSION
    ):
        pytest.skip("older than the pinned releases")
    assert [name for name in LACKING if not has(name)] == []
    assert {*transformers.CONFIG_MAPPING} >= LACKING_TYPES
    assert {(kind, name) for kind, names in LACKING_KINDS.items() for name in names} <= installed_types()


def test_the_oldest_releases_lack_what_is_listed() -> None:
    if (torch.__version__.partition("+")[0], transformers.__version__) != ("2.9.1", "5.6.0"):
        pytest.skip("not the oldest releases")
    assert [name for name in LACKING if has(name)] == []
    assert not LACKING_TYPES & {*transformers.CONFIG_MAPPING}
    assert not {(kind, name) for kind, names in LACKING_KINDS.items() for name in names} & installed_types()


def test_the_library_of_compressed_tensors_cannot_be_installed_beside_the_oldest_torch() -> None:
    needed = metadata.requires("compressed-tensors") if has("compressed_tensors") else None
    if needed is None:
        pytest.skip("it is not installed")
    (torch_bound,) = (each for each in map(Requirement, needed) if each.name == "torch" and each.marker is None)
    assert not torch_bound.specifier.contains(pins("constraints-oldest.txt")["torch"])


def pins(file: str) -> dict[str, str]:
    """Return the version of each package in a file of constraints."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    return {name.replace("-", "_"): version for name, _, version in (line.partition("==") for line in lines)}


def test_the_page_of_versions_names_the_tested_releases() -> None:
    page = (ROOT / "docs" / "versions.md").read_text()
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    table = {name.lower(): versions for name, *versions in rows}
    del table["python"]
    oldest, pinned = pins("constraints-oldest.txt"), pins("constraints.txt")
    assert {name: row[0] for name, row in table.items()} == {key: oldest[key] for key in oldest if key != "mlx_lm"}
    assert {name: row[2] for name, row in table.items()} == {key: pinned[key] for key in table}
    for name, tested in TESTED.items():
        assert [Version(each).release[:2] for each in tested] == [Version(each).release[:2] for each in table[name][:2]]


def test_the_oldest_releases_are_the_lower_bounds_of_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    written = [*project["dependencies"], *chain(*(extras[name] for name in extras if name != "recipes"))]
    bounds = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?>=([\d.]+)", line)[0] for line in written if ">=" in line)
    for name, version in pins("constraints-oldest.txt").items():
        bound = bounds[name if name in bounds else name.replace("_", "-")]
        assert f"{version}.".startswith(f"{bound}."), name


def test_make_installs_the_oldest_releases_and_the_newest() -> None:
    make = lambda target: subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True).stdout  # noqa: E731
    oldest, newest = make("test-oldest"), make("test-newest")
    assert "constraints-oldest.txt constraints.txt" in oldest
    assert "--constraint .venv-oldest/constraints.txt --editable '.[test]'" in oldest
    assert "--upgrade-strategy eager --editable '.[dev]'" in newest
    assert "--constraint" not in newest
