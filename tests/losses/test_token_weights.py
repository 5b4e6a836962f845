"""Weights of tokens: what is refused where, and what a weighted loss costs; values are in `tests/laws`."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from covering import cases, some
from kernel_paths import cpu_taken_for_cuda
from kinds import EMBED_DIM, TABLES, TIED_HEADS, UNTIED_HEADS, VOCAB_SIZE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import embedlayer as el
from benchmarks.operator_counter import OperatorCounter
from embedlayer.heads.draft import DraftHead
from embedlayer.kernels import kernels_disabled
from embedlayer.losses import counted_tokens, operators
from embedlayer.losses.vocabulary_pass import VocabularyPass

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


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_weight_of_each_target_is_refused_by_name(unchecked: None, name) -> None:
    hidden, weight, targets, weights = batch()
    change, found = REFUSED[name]
    with pytest.raises(el.ShapeError, match=rf"token_weights must be floats of shape \(2, 6\) on cpu, .*{found}"):
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
def test_weights_add_no_wait(reduction, triton, monkeypatch) -> None:
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
    monkeypatch.setattr(counted_tokens, "is_capturing", lambda x: True)
    assert waits(reduction=reduction) == 0


HEADS: dict[str, Callable[[], el.OutputHead | DraftHead]] = {
    **UNTIED_HEADS,
    **{name: lambda table=table: el.OutputHead(TABLES[table]()) for name, table in TIED_HEADS.items()},
    "draft": lambda: DraftHead(UNTIED_HEADS["untied"](), range(5, 30)),
}


class Products(TorchDispatchMode):
    """Count matrix products by their names, and the numbers that dense ones over the vocabulary multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.numbers = Counter[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if "mm" in name:
            left, right = args[-2:]
            self.numbers += left.numel() * right.shape[-1] * (VOCAB_SIZE in (*left.shape, *right.shape))
        if "mm" in name or name in ("times_quantized_rows", "times_stored_rows"):
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def products(head: Any, states: list[Tensor], targets: Tensor, **options: object) -> Products:
    """Count the products of a loss and its backward pass, of one depth or of several."""
    with Products() as count:
        if len(states) > 1:
            head.multi_token_loss(states, targets, impl="chunked", **options).loss.sum().backward()
        else:
            head.loss(states[0], targets, impl="chunked", **options).sum().backward()
    return count


@cases("name, depths, reduction", HEADS, [1, 2], ["mean", "sum", "none"])
def test_weights_add_no_matrix_product(name, depths, reduction) -> None:
    head, depths = HEADS[name](), 1 if name == "draft" else depths
    states = [torch.randn(2, 6, EMBED_DIM, requires_grad=True) for _ in range(depths)]
    targets, weights = torch.randint(5, 30, (2, 6)), torch.randn(2, 6)
    count = products(head, states, targets, reduction=reduction)
    assert products(head, states, targets, reduction=reduction, token_weights=weights).calls == count.calls
    assert count.calls
    if name == "untied":
        tokens = 12 if depths == 1 else 2 * (5 + 4)
        assert count.numbers == (4 if reduction == "none" else 3) * tokens * VOCAB_SIZE * EMBED_DIM


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_compiled_graph_has_one_pass_with_its_gradients(unchecked: None, reduction, monkeypatch) -> None:
    hidden, weight, targets, weights = batch()
    passes: list[None] = []

    class CountedPass(VocabularyPass):
        def __init__(self, *arguments: Any) -> None:
            passes.append(None)
            super().__init__(*arguments)

    def call(*inputs: Tensor) -> Tensor:
        return el.linear_cross_entropy(*inputs, token_weights=weights, impl="chunked", reduction=reduction)

    monkeypatch.setattr(operators, "VocabularyPass", CountedPass)
    torch.compile(call, backend="aot_eager", fullgraph=True)(hidden, weight, targets).sum().backward()
    assert len(passes) == 1 + (reduction == "none")


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


@cases("impl, compiled", ["plain", "chunked"], [False, True])
def test_under_autocast_weights_count_in_float32(unchecked: None, impl, compiled) -> None:
    hidden, weight, targets, weights = batch()
    weights[0, 1] = torch.nan

    def call(token_weights: Tensor | None) -> Tensor:
        return el.linear_cross_entropy(
            hidden,
            weight,
            targets,
            token_weights=token_weights,
            reduction="none" if token_weights is None else "mean",
            impl=impl,
        )

    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    with torch.autocast("cpu", torch.bfloat16):
        loss, losses = run(weights.half()), call(None)
    expected = (losses * weights.half().nan_to_num(0.0)).sum() / 11
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(each, [hidden, weight]) for each in (loss, expected)), rtol=2e-2, atol=1e-3
    )
