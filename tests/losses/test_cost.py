"""What a loss costs: matrix products, and memory on CPUs and on CUDA."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from covering import cases, covering, some
from kernel_paths import cpu_taken_for_cuda
from kinds import EMBED_DIM, TABLES, TIED_HEADS, UNTIED_HEADS, VOCAB_SIZE
from memory import Products, Shapes
from small_blocks import small_blocks
from torch import Tensor

import embedlayer as el
from benchmarks.operator_counter import OperatorCounter
from embedlayer.heads import DraftHead
from embedlayer.kernels import kernels_disabled
from embedlayer.losses import (
    BlockLogits,
    ForwardKL,
    JensenShannon,
    LinearLogits,
    ReverseKL,
    divergence,
    token_statistics,
)

Head = el.OutputHead | DraftHead
HEADS: dict[str, Callable[[], Head]] = {
    **UNTIED_HEADS,
    **{name: lambda table=table: el.OutputHead(TABLES[table]()) for name, table in TIED_HEADS.items()},
    "draft": lambda: DraftHead(UNTIED_HEADS["untied"](), range(5, 30)),
}


def products(head: Any, states: list[Tensor], targets: Tensor, **options: object) -> Products:
    """Count the products of a loss and its backward pass, of one depth or of several."""
    with Products(VOCAB_SIZE) as count:
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


@pytest.mark.usefixtures("both_paths")
@cases("needed, path", ["neither", "hidden", "weight", "both"], ["cpu", "cuda", "cuda, not dropped"])
def test_products_are_those_of_tokens_that_count_and_of_requested_gradients(needed, path) -> None:
    """On CUDA too, if the host may wait; with `drop_ignored=False` products of all tokens are computed."""
    hidden, weight, targets = torch.randn(50, 8), torch.randn(30, 8), torch.randint(0, 30, (50,))
    targets[6:] = -100
    hidden.requires_grad_(needed in ("hidden", "both"))
    weight.requires_grad_(needed in ("weight", "both"))
    options = {"drop_ignored": False} if "not" in path else {}
    with small_blocks(rows=6), nullcontext() if path == "cpu" else cpu_taken_for_cuda(), Products(8) as count:
        loss = el.linear_cross_entropy(hidden, weight, targets, impl="chunked", **options)
        assert loss.requires_grad == (needed != "neither")
        if loss.requires_grad:
            loss.backward()
    each = {"neither": 1, "hidden": 2, "weight": 2, "both": 3}[needed]
    tokens = 50 if options else 6
    if path != "cpu":  # a multiple of 16
        tokens += -tokens % 16
    assert count.numbers == each * tokens * 30 * 8


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_compiled_graph_has_one_pass_with_its_gradients(unchecked: None, reduction) -> None:
    hidden, weight = torch.randn(12, 6, requires_grad=True), torch.randn(40, 6, requires_grad=True)
    targets, weights = torch.randint(0, 40, (12,)), torch.randn(12)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        options = {"token_weights": weights, "reduction": reduction, "impl": "chunked"}
        return el.linear_cross_entropy(hidden, weight, targets, **options)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    counts = []
    for function in (loss, compiled):
        function(hidden, weight).sum().backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            function(hidden, weight).sum().backward()
        counts.append(
            sum(each.count for each in profile.key_averages() if each.key.startswith(("aten::mm", "aten::addmm")))
        )
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_of_tokens_by_vocabulary_is_made_and_one_of_the_table(reduction) -> None:
    tokens, vocab, width = 80, 150, 64
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,))
    with Shapes() as shapes, small_blocks(tokens=64, rows=6):
        options = {"impl": "chunked", "chunk_bytes": 2**14, "reduction": reduction}
        el.linear_cross_entropy(hidden, weight, targets, **options).sum().backward()
    assert not shapes.largest(tokens * vocab)
    fresh = [
        name for name, numel in shapes.numels if numel == vocab * width and name.startswith(("empty", "new_", "zeros"))
    ]
    assert len(fresh) == 1


@pytest.mark.parametrize("way", ["loss", "logits"])
def test_a_padding_row_allocates_no_second_gradient_of_the_rows(way) -> None:
    hidden, targets, counts = torch.randn(3, 8), torch.tensor([0, 4, 3]), []
    for padding_idx in (None, 4):
        head = el.OutputHead(el.TokenEmbedding(1000, 8, padding_idx))
        with Shapes() as shapes:
            loss = head.loss(hidden, targets, impl="chunked") if way == "loss" else head(hidden).square().sum()
            loss.backward()
        views = ("detach", "select", "fill_")  # of the gradient that is there
        counts.append(sum(numel >= 8000 and not name.startswith(views) for name, numel in shapes.numels))
    assert counts[0] == counts[1]


GIB = 2**30
V, D = 128_256, 4096
TOKENS = {True: 5000, False: 1100}
"""With kernels the logits of all tokens take more than 1 GiB, in 2 bytes too; without, in float32 with gradients."""
Output = Callable[..., Tensor]


def statistics(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor, **options) -> Tensor:
    wanted = ("log_probs", "entropy", "sum_squared_probs", "is_argmax")
    found = token_statistics(hidden, weight, targets, statistics=wanted, top_k=64, bias=bias, **options)
    assert found.log_probs is not None
    assert found.entropy is not None
    assert found.sum_squared_probs is not None
    return torch.stack([found.log_probs, found.entropy, found.sum_squared_probs, found.top_logits[..., 3]])


def of_teacher(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor, kind=None, **options) -> Tensor:
    student = LinearLogits(hidden, weight, bias=bias, softcap=30.0)
    return divergence(student, LinearLogits(hidden.detach(), weight.detach()), kind, labels=targets, **options)


def loss(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options) -> Tensor:
    return el.linear_cross_entropy(hidden, weight, targets, bias=bias, **options)


OUTPUTS: dict[str, Output] = {
    "loss": lambda *inputs, **options: loss(*inputs[:3], **options),
    "loss, bias, soft cap": lambda *inputs, **options: loss(*inputs, softcap=30.0, z_loss=1e-4, **options),
    "loss, label smoothing": lambda *inputs, **options: loss(*inputs, label_smoothing=0.1, **options),
    "loss, none": lambda *inputs, **options: loss(*inputs, reduction="none", **options),
    "statistics": statistics,
    **{
        f"{type(kind).__name__}, {reduction}": lambda *inputs, kind=kind, reduction=reduction, **options: of_teacher(
            *inputs, kind=kind, reduction=reduction, **options
        )
        for kind in (ForwardKL(), ReverseKL(), JensenShannon(0.3))
        for reduction in ("mean", "none")
    },
}


@cache
def peak_bytes(name: str, dtype: torch.dtype, *, kernels: bool, **options: object) -> int:
    """The most bytes at once in forward and backward, without the gradients of hidden states, which are float32 first.

    Rows need no gradient: the sums of it would hide the memory of a chunk.
    """
    tokens = TOKENS[kernels]
    shapes = {"hidden": (tokens, D), "weight": (V, D), "bias": (V,)}
    inputs = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    hidden, weight, bias = inputs["hidden"].requires_grad_(), inputs["weight"], inputs["bias"].requires_grad_()
    targets = torch.empty(tokens, dtype=torch.long, device="meta")
    with OperatorCounter() as count, nullcontext() if kernels else kernels_disabled():
        OUTPUTS[name](hidden, weight, targets, bias, **{"drop_ignored": True, **options}).sum().backward()
    return count.memory.peak - 4 * hidden.numel()


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OF_OTHER_LINES = ["loss, bias, soft cap", "loss, none", "statistics", "ReverseKL, mean", "JensenShannon, none"]
ALWAYS = covering(product(OF_OTHER_LINES, DTYPES, [True, False]))


@pytest.mark.parametrize(("name", "dtype", "kernels"), some(ALWAYS, product(OUTPUTS, DTYPES, [True, False])))
def test_blocks_and_work_space_stay_within_1_gib(name, dtype, kernels) -> None:
    assert peak_bytes(name, dtype, kernels=kernels) <= GIB + 2**23


@pytest.mark.parametrize(("name", "dtype", "kernels"), some(ALWAYS, product(OUTPUTS, DTYPES, [True, False])))
def test_where_ignored_targets_are_not_dropped_hidden_states_are_copied_once_more(name, dtype, kernels) -> None:
    dropped = peak_bytes(name, dtype, kernels=kernels)
    computed = peak_bytes(name, dtype, kernels=kernels, drop_ignored=False)
    heads = 1 if name.startswith(("loss", "statistics")) else 2
    assert computed <= dropped + heads * TOKENS[kernels] * D * dtype.itemsize + 2**23


@pytest.mark.parametrize(
    ("name", "kernels"), some(covering(product(OF_OTHER_LINES, [True, False])), product(OUTPUTS, [True, False]))
)
def test_a_byte_budget_bounds_what_a_pass_allocates(name, kernels) -> None:
    assert peak_bytes(name, torch.bfloat16, kernels=kernels, chunk_bytes=2**29) <= 2**29 + 2**25


@cases("name, options", ["statistics", "of_teacher"], [{}, {"chunk_bytes": 2**29}])
def test_blocks_that_a_function_computes_stay_within_it_too(name, options) -> None:
    rows = 16_384
    hidden = torch.empty(4000, 64, device="meta").requires_grad_()
    targets = torch.empty(4000, dtype=torch.long, device="meta")
    weight, bias = torch.empty(rows, 64, device="meta"), torch.empty(rows, device="meta")
    with OperatorCounter() as count:
        student, teacher = (
            BlockLogits(each, lambda states, a, b: states @ weight[a:b].T, rows, 8192, softcap=30.0, bias=bias)
            for each in (hidden, hidden.detach())
        )
        if name == "statistics":
            found = token_statistics(student, targets, top_k=5, drop_ignored=True, **options)
            assert found.log_probs is not None
            assert found.entropy is not None
            result = found.entropy + found.log_probs + found.top_logits.sum(-1)
        else:
            result = divergence(student, teacher, JensenShannon(0.3), labels=targets, drop_ignored=True, **options)
        result.sum().backward()
    assert count.memory.peak <= options.get("chunk_bytes", GIB) + 4 * 2 * hidden.numel() + 2**25


def test_one_chunk_of_bfloat16_logits_is_all_that_the_loss_needs_beside_its_gradients() -> None:
    tokens = 2 * D
    hidden, weight = (torch.empty(n, D, dtype=torch.bfloat16, device="meta").requires_grad_() for n in (tokens, V))
    targets = torch.empty(tokens, dtype=torch.long, device="meta")
    with OperatorCounter() as count:
        el.linear_cross_entropy(hidden, weight, targets, drop_ignored=True)
    assert count.memory.peak <= 2 * tokens * V + 2 * weight.numel() + 4 * hidden.numel() + 2**25
