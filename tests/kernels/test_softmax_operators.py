"""Operators over blocks of logits: torch's rules of custom operators, and what a dispatch mode sees."""

from typing import Any

import pytest
import torch
from interpreted import interpreted
from torch.utils._python_dispatch import TorchDispatchMode

from embedlayer.core.devices import TAKEN_AS
from embedlayer.kernels.gpu.launch import launches_observed
from embedlayer.kernels.softmax import Finishing, Requests, check_targets, softmax_gradient, softmax_statistics


class Names(TorchDispatchMode):
    """Record the operators of this package that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "embedlayer":
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


def arguments(device: str, tokens: int = 6) -> tuple[list[Any], list[Any]]:
    """Return the arguments of both operators for a block."""
    z, bias = torch.randn(9, tokens, device=device), torch.randn(9, device=device)
    ids = torch.randint(0, 9, (1, tokens), device=device)
    requests = Requests.of([ids])
    statistics = [z, bias, *requests, 0, True, True, True, False, *Finishing()]
    request, factors = torch.randn(1, tokens, device=device), torch.rand(6, tokens, device=device)
    by_request = request if requests.places is None else request.flatten()
    gradient = [z, bias, *requests, 0, by_request, request, factors, torch.zeros(9, device=device), True, True, True]
    return statistics, [*gradient, *Finishing()]


@pytest.mark.usefixtures("kernels")
def test_the_operators_keep_torchs_rules() -> None:
    statistics, gradient = arguments("cpu")
    for name, inputs in (("softmax_statistics", statistics), ("softmax_gradient", gradient)):
        operator = getattr(torch.ops.embedlayer, name).default
        torch.library.opcheck(operator, tuple(inputs), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.usefixtures("kernels")
def test_an_operator_computes_what_its_function_computes() -> None:
    statistics, gradient = arguments("cpu")
    for found, expected in zip(
        torch.ops.embedlayer.softmax_statistics(*statistics), softmax_statistics(*statistics), strict=True
    ):
        assert torch.equal(found, expected)
    again = [x.clone() if isinstance(x, torch.Tensor) else x for x in gradient]
    assert torch.ops.embedlayer.softmax_gradient(*again) is None
    assert softmax_gradient(*gradient)
    assert torch.equal(again[0], gradient[0])


def test_on_cuda_a_dispatch_mode_sees_the_operator_and_observers_its_launches(monkeypatch) -> None:
    pytest.importorskip("triton")
    statistics, gradient = arguments("meta")
    monkeypatch.setitem(TAKEN_AS, "meta", "cuda")
    statistics[2:5] = gradient[2:5] = Requests.of([statistics[2]])
    launched: list[str] = []
    with launches_observed(lambda each: launched.append(each.name)), Names() as names:
        totals, selected, *_ = softmax_statistics(*statistics)
        assert softmax_gradient(*gradient)
    assert names.seen == ["softmax_statistics", "softmax_gradient"]
    assert launched == ["statistics", "merge", "statistics_gradient"]
    assert totals.shape == (1, 6, 6)
    assert selected.shape == (1, 6)


@pytest.mark.parametrize("size", [(3, 7), (1300,)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("lowest", [-4, -3])
def test_one_launch_finds_ignored_and_bad_targets_and_has_numbers_for_the_host(size, weighted, lowest) -> None:
    pytest.importorskip("triton")
    targets = torch.randint(-4, 14, size) if lowest == -4 else torch.full(size, -3)
    weights = torch.randn(size).masked_fill(torch.rand(size) < 0.3, torch.inf) if weighted else torch.ones(size)
    record = torch.tensor([5, 6, 7, 8])
    with interpreted() as run:
        ids, mask, _, factors, numbers, is_empty = check_targets(
            targets, weights.half() if weighted else None, record, 10, -3, 0, True, True
        )
    assert [each.name for each in run.launches] == ["check_targets"]
    kept = targets != -3
    assert torch.equal(mask, kept)
    assert torch.equal(is_empty, ~kept.any())
    assert torch.equal(ids, targets.where(kept, 0))
    expected = weights.half().float().where(kept, 0) / kept.sum().clamp(min=1)
    torch.testing.assert_close(factors, expected.masked_fill(expected.isinf(), torch.nan), equal_nan=True)
    bad = (kept & ((targets < 0) | (targets >= 10))).sum()
    infinite = [(kept & weights.isinf()).sum()] * weighted
    assert numbers.tolist() == [*record.tolist(), bad, *infinite, (~kept).sum()]
    empty = torch.full_like(record, -1)
    for before in (record, empty):
        with interpreted():
            inputs = targets, weights.half() if weighted else None, before
            *_, numbers, _ = check_targets(*inputs, 10, -3, 0, True, False)
        assert numbers.tolist() == [*before.tolist(), bad, *infinite, (~kept).sum() + bad]
    assert empty.tolist()[2:] == ([size[-1], 10] if bad else [-1, -1])
