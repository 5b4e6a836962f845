"""Weights of tokens: what is refused where, and what a weighted loss costs; values are in `tests/laws`."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from covering import cases, some
from kernel_paths import capturing, cpu_taken_for_cuda
from kinds import EMBED_DIM, UNTIED_HEADS
from torch import Tensor

import embedlayer as el
from benchmarks.operator_counter import OperatorCounter
from embedlayer.heads import DraftHead
from embedlayer.kernels import kernels_disabled

N, V, D = 12, 40, 6
BAD = (torch.inf, -torch.inf, torch.nan)


def batch(rows: int = V) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight = torch.randn(2, N // 2, D, requires_grad=True), torch.randn(rows, D, requires_grad=True)
    targets = torch.randint(0, rows, (2, N // 2))
    targets[0, 1] = -100
    return hidden, weight, targets, torch.randn(2, N // 2)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "shape": (lambda weights: weights[:1], r"float32 of shape \(1, 6\) on cpu\."),
    "flat": (torch.Tensor.flatten, r"float32 of shape \(12,\)"),
    "integers": (torch.Tensor.long, r"int64 of shape \(2, 6\)"),
    "booleans": (torch.Tensor.bool, r"bool of shape \(2, 6\)"),
    "another device": (lambda weights: weights.to("meta"), r"on meta\."),
    "with gradient": (torch.Tensor.requires_grad_, r"with gradient: pass weights\.detach\(\)"),
}


def test_what_is_no_weight_of_each_target_is_refused_by_name(unchecked: None) -> None:
    for change, found in REFUSED.values():
        hidden, weight, targets, weights = batch()
        with pytest.raises(el.ShapeError, match=rf"token_weights must be floats \(2, 6\) on cpu .*{found}"):
            el.linear_cross_entropy(hidden, weight, targets, token_weights=change(weights))


def assert_refused(value: float, call: Callable[..., object]) -> None:
    hidden, weight, targets, weights = batch()
    weights[1, 3] = value
    with pytest.raises(el.SizeError, match=f"token_weights: {value} at row 1, column 3 is not finite in float32"):
        call(hidden, weight, targets, token_weights=weights)


@cases("value, reduction, path", BAD, ["mean", "sum", "none"], ["plain", "chunked", "CUDA"], pairs=["reduction, path"])
def test_an_infinite_weight_that_counts_is_refused_where_the_host_reads_values(value, reduction, path) -> None:
    if path != "CUDA":
        assert_refused(value, lambda *inputs, **more: el.linear_cross_entropy(*inputs, impl=path, **more))
        return
    for triton in (False, True):
        with cpu_taken_for_cuda(triton=triton):
            assert_refused(value, lambda *inputs, **more: el.linear_cross_entropy(*inputs, impl="chunked", **more))


@pytest.mark.parametrize("impl", some(["chunked"], ["plain", "chunked"]))
def test_it_is_refused_in_a_compiled_graph_on_the_cpu(unchecked: None, impl) -> None:
    def call(*inputs: Tensor, **more: Tensor) -> Tensor:
        return el.linear_cross_entropy(*inputs, impl=impl, **more)

    assert_refused(torch.inf, torch.compile(call, backend="aot_eager", fullgraph=True))


def test_a_weight_that_the_dtype_of_the_loss_cannot_hold_is_refused() -> None:
    hidden, weight, targets, weights = batch()
    weights = weights.double()
    weights[1, 3] = 1e300
    with pytest.raises(el.SizeError, match="token_weights: inf at row 1, column 3 is not finite in float32"):
        el.linear_cross_entropy(hidden, weight, targets, token_weights=weights)
    assert el.linear_cross_entropy(hidden.double(), weight.double(), targets, token_weights=weights).isfinite()


@cases("value, reduction, path", BAD, ["mean", "none"], ["chunked", "plain", "compiled"])
def test_where_the_host_never_waits_the_loss_is_nan(unchecked: None, value, reduction, path) -> None:
    hidden, weight, targets, weights = batch()
    weights[1, 3], weights[0, 1] = value, torch.nan

    def call(hidden: Tensor, weight: Tensor) -> Tensor:
        options = {"reduction": reduction, "impl": "plain" if path == "plain" else "chunked"}
        return el.linear_cross_entropy(hidden, weight, targets, token_weights=weights, drop_ignored=False, **options)

    for triton in (False, True):
        with cpu_taken_for_cuda(triton=triton and path != "compiled"):
            run = torch.compile(call, backend="aot_eager", fullgraph=True) if path == "compiled" else call
            loss = run(hidden, weight)
            assert loss.isnan().nonzero().tolist() == ([[1, 3]] if reduction == "none" else [[]])
            (grad,) = torch.autograd.grad(loss.sum(), hidden)
            assert grad.isnan().all(-1).nonzero().tolist() == [[1, 3]]
    assert torch.func.vmap(lambda h, t, w: el.linear_cross_entropy(h, weight, t, token_weights=w))(
        hidden, targets, weights
    ).isnan().tolist() == [False, True]


@cases("reduction, triton", ["mean", "sum", "none"], [False, True])
def test_weights_add_no_wait(reduction, triton) -> None:
    pytest.importorskip("triton")
    hidden, weight = (torch.empty(rows, D, device="meta").requires_grad_() for rows in (N, V))
    targets, weights = torch.empty(N, dtype=torch.long, device="meta"), torch.empty(N, device="meta")

    def waits(**options: Any) -> int:
        with nullcontext() if triton else kernels_disabled(), OperatorCounter() as count:
            options |= {"token_weights": weights, "impl": "chunked"}
            el.linear_cross_entropy(hidden, weight, targets, **options).sum().backward()
        return len(count.waits)

    assert waits(reduction=reduction, drop_ignored=True) == 1
    assert waits(reduction=reduction, drop_ignored=False) == 0
    with capturing():
        assert waits(reduction=reduction) == 0


@pytest.mark.parametrize("outside", ["ignore", "count"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_draft_head_weighs_the_targets_that_it_has(outside, reduction) -> None:
    whole = UNTIED_HEADS["untied"]().double()  # the draft head refers to it and does not register it
    head = DraftHead(whole, range(5, 30))
    hidden, targets = torch.randn(9, EMBED_DIM, dtype=torch.float64, requires_grad=True), torch.randint(5, 30, (9,))
    targets[2], targets[4] = -100, 40  # the second is a token outside of the draft vocabulary
    counts = (targets >= 0) & (targets < 30)
    weights = torch.randn(9).half().masked_fill(~counts, torch.inf)
    ours = head.loss(hidden, targets, outside=outside, reduction=reduction, token_weights=weights)
    losses = -head(hidden).log_softmax(-1).gather(-1, (targets - 5).clamp(0, 24).unsqueeze(-1)).squeeze(-1)
    losses = losses.where(counts, 0) * weights.where(counts, 0)
    divisor = counts.sum() + (outside == "count") if reduction == "mean" else 1
    plain = losses if reduction == "none" else losses.sum() / divisor
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), hidden) for each in (ours, plain)))
