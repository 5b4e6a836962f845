"""The files of constraints, the bounds of the project file and the page of versions name the same releases."""

import re
import subprocess
import tomllib
from importlib import metadata
from itertools import chain

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from releases import ROOT, has, pins

from embedlayer.core.errors import TESTED


def test_the_library_of_compressed_tensors_cannot_be_installed_beside_the_oldest_torch() -> None:
    needed = metadata.requires("compressed-tensors") if has("compressed_tensors") else None
    if needed is None:
        pytest.skip("it is not installed")
    (torch_bound,) = (each for each in map(Requirement, needed) if each.name == "torch" and each.marker is None)
    assert not torch_bound.specifier.contains(pins("constraints-oldest.txt")["torch"])


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
