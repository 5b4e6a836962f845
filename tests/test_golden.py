"""Results in float64 that do not change from one commit to the next, and the comparison of two commits.

`python tests/test_golden.py` writes the references, for a change of results that is wanted.
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from golden import difference, leaves, result_of

REFERENCES = Path(__file__).with_name("golden.json")
SAMPLE = {
    "heads": ("loss", "statistics", "divergence", "logits", "second derivatives"),
    "training": ("AdamW", "Adagrad"),
    "positions": ("",),
}
"""Area -> the starts of the names of its cases that are compared here, of those that compute in float64."""

TOLERANCE = 1e-9


def sample() -> dict[str, Callable[[], object]]:
    """Return the cases that are compared with committed references."""
    return {
        f"{area}, {name}": case
        for area, starts in SAMPLE.items()
        for name, case in importlib.import_module(f"golden_cases.{area}").cases()
        if name.startswith(starts) and ("float64" in name or name == "second derivatives")
        if "float32" not in name and "batch-invariant" not in name  # which some processors refuse
    }


def reduced(name: str, case: Callable[[], object]) -> list[float | str | None]:
    """Return two sums of the float64 numbers of a result, or the class of its error."""
    result = result_of(name, case)
    if isinstance(result, Exception):
        return [type(result).__name__]
    tensors = [leaf for _, leaf in leaves(result) if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64]
    numbers = torch.cat([leaf.flatten() for leaf in tensors]).nan_to_num(7.0, 8.0, 9.0)
    return [float(numbers.abs().sum()), float(numbers @ torch.linspace(-1, 1, len(numbers), dtype=torch.float64))]


@pytest.mark.parametrize("area", SAMPLE)
def test_results_in_float64_are_those_of_the_references(area: str) -> None:
    references = {name: value for name, value in json.loads(REFERENCES.read_text()).items() if name.startswith(area)}
    cases = {name: case for name, case in sample().items() if name.startswith(area)}
    assert references.keys() == cases.keys()
    for name, case in cases.items():
        expected = references[name]
        if not isinstance(expected[0], str):
            expected = pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
        assert reduced(name, case) == expected, name


def test_results_differ_in_their_last_bits_or_by_more() -> None:
    x = torch.tensor([1.0, -2.0, float("nan"), float("inf")])
    assert difference(x, x.clone()) == ("equal", "")
    assert difference(x[:2], x[:2].nextafter(torch.tensor(0.0)))[0] == "last bits"
    assert difference(x[:2], x[:2] * 1.001)[0] == "more"
    assert difference(x, x.nan_to_num())[0] == "more"
    assert difference(x, x.double())[0] == "more"
    assert difference(torch.tensor(0.0), torch.tensor(-0.0))[0] == "last bits"
    assert difference("a", "b")[0] == "more"
    assert difference(1, 1.0)[0] == "more"


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "tools"))
    REFERENCES.write_text(json.dumps({name: reduced(name, case) for name, case in sample().items()}, indent=0) + "\n")
