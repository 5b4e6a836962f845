"""The training recipes: each script of `before` and its version with embedlayer in `after` have the same losses."""

import csv
import difflib
import importlib.util
import logging
import os
import re
import runpy
from pathlib import Path
from statistics import median
from unittest import mock

import pytest
import torch
from launches import SECONDS, started, torchrun
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "examples" / "recipes"
NAMES = sorted(file.stem for file in (RECIPES / "before").glob("*.py"))
PAGE = (ROOT / "docs" / "recipes.md").read_text()
MAX_LINES = 40
TOLERANCE = 1e-4
"""Largest difference of two losses; the sums of a loss without logits have another order."""

READS_OF_LOGITS = "embedlayer.heads.logit_source"
"""The logger that names the function which reads the logits of a patched model."""

PEERS = [
    "ignore:.*pin_memory:UserWarning",  # torch's DataLoader where there is no GPU, of every Trainer
    "ignore:.*isinstance.treespec, LeafSpec:FutureWarning",  # Lightning's use of torch's pytree
    "ignore:.*does not have many workers",  # Lightning's advice on its loader
    "ignore:.*`tensorboardX` has been removed:UserWarning",  # Lightning's advice on its logger
    "ignore:.*gradient_checkpointing` is deprecated:FutureWarning",  # transformers says so of TRL's defaults
]
"""Warnings of the libraries, which both versions of a recipe get."""


def lines(version: str, name: str) -> list[str]:
    return [line for line in (RECIPES / version / f"{name}.py").read_text().splitlines() if line.strip()]


def changed_lines(name: str) -> int:
    """Return the number of lines of the new version that the old one lacks, without imports."""
    difference = difflib.ndiff(lines("before", name), lines("after", name))
    added = [line.removeprefix("+ ") for line in difference if line.startswith("+ ")]
    return sum(not re.match(r"(import|from) ", line) for line in added)


def require(name: str) -> None:
    """Skip a test of a recipe that imports a package which is not installed."""
    for package in re.findall(r"^(?:import|from) (\w+)", (RECIPES / "before" / f"{name}.py").read_text(), flags=re.M):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; `make course` installs it")


def test_each_recipe_has_two_versions_of_few_lines() -> None:
    assert sorted(file.stem for file in (RECIPES / "after").glob("*.py")) == NAMES
    for name in NAMES:
        assert max(len(lines(version, name)) for version in ("before", "after")) <= MAX_LINES, name
        assert "embedlayer" not in (RECIPES / "before" / f"{name}.py").read_text(), name


def test_the_page_shows_each_recipe_and_states_how_many_lines_change() -> None:
    shown = re.findall(r"literalinclude\} \.\./examples/recipes/before/(\w+)\.py", PAGE)
    changes = re.findall(
        r"literalinclude\} \.\./examples/recipes/after/(\w+)\.py\n:diff: \.\./examples/recipes/before/(\w+)\.py", PAGE
    )
    assert changes == [(name, name) for name in shown]
    assert sorted(shown) == NAMES
    stated = re.findall(r"^\| \[.*?\]\(#.*?\) \|.*\| (\d+) \|$", PAGE, flags=re.M)
    assert stated == [str(changed_lines(name)) for name in shown]
    assert max(map(int, stated)) <= 4


def test_the_memory_on_the_page_is_in_the_results() -> None:
    with (ROOT / "benchmarks" / "results" / "patched.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == "gpt2" and row["tokens"] == "2048"]
    ours, theirs = (
        round(median(float(row["peak_mib"]) for row in rows if row["competitor"] == name))
        for name in ("embedlayer patched", "plain transformers")
    )
    assert f"adds {ours:,} MiB in place of {theirs:,} MiB" in PAGE


@pytest.fixture
def in_folder(tmp_path, monkeypatch) -> Path:
    """Run in an empty folder and without a model hub; undo what trainers write to the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with mock.patch.dict(os.environ), torch.random.fork_rng():
        yield tmp_path


def trained(version: str, name: str, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run a script; return its losses, and the tensors that it saved last, or else the state of its model."""
    names = runpy.run_path(str(RECIPES / version / f"{name}.py"), run_name="__main__")
    saved = [file for file in sorted(folder.glob("out/*/model.safetensors")) if file.parent.name != "bert"]
    return names["losses"], load_file(saved[-1]) if saved else names["model"].state_dict()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name.startswith(("sentence", "transformers")) else name
        for name in NAMES
        if name != "fsdp2_script"
    ],
)
@pytest.mark.filterwarnings(*PEERS)
def test_both_versions_have_the_same_losses(name, in_folder, capsys, caplog, unchecked) -> None:
    require(name)
    losses, saved = trained("before", name, in_folder)
    with caplog.at_level(logging.INFO, READS_OF_LOGITS):
        ours, ours_saved = trained("after", name, in_folder)
    assert READS_OF_LOGITS not in [record.name for record in caplog.records]
    assert ours == pytest.approx(losses, abs=TOLERANCE)
    assert losses[-1] < losses[0] - 0.5
    assert capsys.readouterr().out.count(f"loss {losses[0]:.4f} -> ") == 2
    if name == "nanogpt_loop":  # one tensor for the tied weights
        assert torch.equal(saved.pop("lm_head.weight"), saved["wte.weight"])
    torch.testing.assert_close(ours_saved, saved, atol=10 * TOLERANCE, rtol=0)


def losses_of_ranks(output: str) -> list[list[float]]:
    found = sorted(re.findall(r"rank (\d): loss ([\d.]+) -> ([\d.]+)", output))
    assert [rank for rank, *_ in found] == ["0", "1"], output
    return [[float(first), float(last)] for _, first, last in found]


@pytest.mark.long
def test_both_versions_have_the_same_losses_under_fsdp() -> None:
    command = [[*torchrun(2), RECIPES / version / "fsdp2_script.py"] for version in ("before", "after")]
    results = []
    with started(*command[0]) as before, started(*command[1]) as after:
        for process in (before, after):
            output, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, errors
            results.append(losses_of_ranks(output))
    for theirs, ours in zip(*results, strict=True):
        assert ours == pytest.approx(theirs, abs=2 * TOLERANCE)  # printed with four decimals
        assert theirs[1] < theirs[0] - 0.5
