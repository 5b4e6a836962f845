"""The kernels of the input embedding: the numbers and gradients of the definition, with one mask on both paths."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from covering import LONG
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from embedlayer import QuantizedEmbedding, TokenEmbedding, TransformerEmbedding
from embedlayer.core.numbers import random_words
from embedlayer.inputs import fused
from embedlayer.inputs.fused import dropout_step, gather_scale_add_drop, plain_scale_add_drop, scale_add_drop
from embedlayer.kernels.input import StoredRows
from embedlayer.kernels.kernel import Kernel, kernels_disabled
from embedlayer.lessons.book import GPTEmbedding


@pytest.fixture
def runs(monkeypatch, kernels) -> list[str]:
    """The names of kernels that ran."""
    found: list[str] = []
    run = Kernel.run

    def counted(self: Kernel, *arguments, **options) -> bool:
        found.append(self.name)
        return run(self, *arguments, **options)

    monkeypatch.setattr(Kernel, "run", counted)
    return found


@pytest.fixture
def path(request, both_paths, monkeypatch) -> Iterator[None]:
    """Compute by kernels, at least one of which must run; or without."""
    if both_paths == "kernels":
        runs = request.getfixturevalue("runs")
        yield
        assert runs
    else:
        monkeypatch.setattr(Kernel, "run", None)
        yield


def mask(dropout: float, shape: tuple[int, ...]) -> Tensor:
    """Return the factors 0 and 1 / (1 - dropout) that the present seed gives, in float64, from the definition."""
    threshold = round(dropout * 65536)
    seed = int(torch.empty((), dtype=torch.int64).random_(-(1 << 63), None))
    *tokens, width = shape
    words = math.ceil(width / 4)
    bits = random_words(seed, 0, math.prod(tokens) * words).view(torch.int16).view(-1, 4 * words)[:, :width]
    return (bits.long() + 32768 >= threshold).double().view(shape) * 65536 / (65536 - threshold)


Compute = Callable[[Tensor, Tensor | None], Tensor]


def results(compute: Compute, weight: Tensor, addend: Tensor | None, upstream: Tensor) -> list[Tensor]:
    """Return value and gradients, dense and in float64."""
    leaves = [each.detach().clone().requires_grad_() for each in (weight, addend) if each is not None]
    torch.manual_seed(5)
    value = compute(leaves[0], leaves[1] if addend is not None else None)
    value.backward(upstream.to(value.dtype))
    return [each.detach().to_dense().double() for each in (value, *(leaf.grad for leaf in leaves))]


ADDENDS = [None, (6,), (1, 6), (3, 6)]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("addend", ADDENDS)
@pytest.mark.parametrize(("dropout", "scale", "padding_idx", "sparse", "width"), [
    (0.0, 3.0, None, False, 8),
    (0.25, None, 2, True, 7),
    (0.25, 3.0, 0, False, 33),
    (0.9, 0.5, None, True, 64),
])  # fmt: skip
def test_values_and_gradients_are_those_of_the_definition(
    dtype, addend, dropout, scale, padding_idx, sparse, width
) -> None:
    weight = torch.randn(11, width, dtype=dtype)
    ids = torch.randint(0, 11, (3, 6), dtype=torch.int32)
    added = None if addend is None else torch.randn(*addend, width, dtype=dtype)
    upstream = torch.randn(3, 6, width).to(dtype).double()

    def fused(weight: Tensor, addend: Tensor | None) -> Tensor:
        return gather_scale_add_drop(StoredRows(ids, weight, padding_idx, sparse), scale, addend, dropout)

    def plain(weight: Tensor, addend: Tensor | None) -> Tensor:
        x = torch.nn.functional.embedding(ids, weight, padding_idx)
        x = plain_scale_add_drop(x, scale, addend, 0.0)
        return x * mask(dropout, x.shape).to(x.dtype) if dropout else x

    def errors(found: list[Tensor]) -> list[float]:
        return [(each - right).abs().max().item() for each, right in zip(found, exact, strict=True)]

    exact = results(plain, weight.double(), None if added is None else added.double(), upstream)
    found, usual = (errors(results(way, weight, added, upstream)) for way in (fused, plain))
    for ours, theirs, right in zip(found, usual, exact, strict=True):
        largest = right.abs().max().item()
        if dtype == torch.float64:
            assert ours <= 1e-12 * max(1.0, largest)
        else:
            assert ours <= 1.5 * theirs + torch.finfo(dtype).eps * largest


def test_the_gradient_of_positions_over_many_sequences_is_as_exact_as_that_of_torch(runs) -> None:
    layer = TransformerEmbedding(11, 64, 5, dropout=0.0)
    ids = torch.randint(0, 11, (300, 5))
    upstream = torch.randn(300, 5, 64)
    layer(ids).backward(upstream)
    exact = upstream.double().sum(0)
    own_error = (upstream.sum(0) - exact).norm()
    assert (layer.position.weight.grad - exact).norm() <= 1.1 * own_error
    assert "sum_masked_segments" in runs


@pytest.mark.parametrize("kind", ["dense", "row-sparse", "quantised"])
def test_one_seed_gives_one_mask_with_and_without_kernels(kind, runs) -> None:
    table = TokenEmbedding(50, 30, row_sparse=kind == "row-sparse")
    layer = TransformerEmbedding(
        50, 30, 16, 0.3, table=QuantizedEmbedding.from_table(table) if kind == "quantised" else table
    )
    ids, found = torch.randint(0, 50, (4, 16)), []
    for context in (nullcontext, kernels_disabled):
        torch.manual_seed(3)
        with context():
            found.append(layer(ids) == 0)
    assert torch.equal(*found)
    assert found[0].any()
    assert "gather_scale_add_drop" in runs


@pytest.mark.usefixtures("path")
def test_masks_of_consecutive_calls_tokens_and_columns_are_independent() -> None:
    """Two places are dropped together as often as chance has it, and the rate is right in each column and token."""
    p, shape = 0.25, (2, 500, 130)
    first, second = (scale_add_drop(torch.ones(shape), None, None, p).eq(0).double() for _ in range(2))
    pairs = {
        "calls": (first, second),
        "sequences": (first[0], first[1]),
        "tokens": (first[:, 1:], first[:, :-1]),
        "columns": (first[..., 1:], first[..., :-1]),
        "words": (first[..., 4:], first[..., :-4]),
    }
    for name, (a, b) in pairs.items():
        spread = 5 * math.sqrt(p**2 * (1 - p**2) / a.numel())
        assert (a * b).mean().item() == pytest.approx(p**2, abs=spread), name
    for dim in (0, 1, 2):
        rates = first.transpose(0, dim).flatten(1).mean(1)
        assert (rates - p).abs().max() < 5 * math.sqrt(p * (1 - p) * len(rates) / first.numel())


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("row_sparse", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_the_same_mask_again(row_sparse, reentrant) -> None:
    table = TokenEmbedding(50, 16, row_sparse=row_sparse)
    layer = TransformerEmbedding(50, 16, 12, 0.5, table=table)
    ids, grads = torch.randint(0, 50, (4, 12)), []
    for recomputed in (False, True):
        torch.manual_seed(2)
        carrier = torch.zeros((), requires_grad=True)  # re-entrant checkpoints need an input with a gradient

        def run(carrier: Tensor) -> Tensor:
            return (layer(ids) + carrier).square()

        y = checkpoint(run, carrier, use_reentrant=reentrant) if recomputed else run(carrier)
        y.sum().backward()
        grads.append([each.grad.to_dense() for each in layer.parameters()])
        layer.zero_grad()
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("path")
def test_a_restored_generator_gives_the_mask_again_and_evaluation_draws_nothing() -> None:
    layer = TransformerEmbedding(50, 16, 12, 0.5)
    ids = torch.randint(0, 50, (4, 12))
    state = torch.get_rng_state()
    first = layer(ids)
    torch.set_rng_state(state)
    assert torch.equal(layer(ids), first)
    state = torch.get_rng_state()
    with torch.no_grad():
        layer.eval()(ids)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_first_and_second_derivatives_of_a_layer_are_right(dropout) -> None:
    layer = TransformerEmbedding(4, 2, 3, dropout).double()
    ids = torch.tensor([[0, 3, 0], [2, 2, 0]])

    def seeded(weight: Tensor, positions: Tensor) -> Tensor:
        torch.manual_seed(7)
        keys = {"table.weight": weight, "position.weight": positions}
        return torch.func.functional_call(layer, keys, (ids,)).square()

    inputs = [layer.table.weight.detach().requires_grad_(), layer.position.weight.detach().requires_grad_()]
    assert torch.autograd.gradcheck(seeded, inputs)
    assert torch.autograd.gradgradcheck(seeded, inputs)


def test_a_sparse_gradient_has_each_row_once_in_ascending_order_and_sums_in_batch_order(runs) -> None:
    ids = torch.tensor([[4, 2, 4], [0, 4, 2]])
    weight = torch.randn(6, 5, requires_grad=True)
    upstream = torch.randn(2, 3, 5) * 1000
    gather_scale_add_drop(StoredRows(ids, weight, 0, True), None, None, 0.0).backward(upstream)
    assert weight.grad._indices().tolist() == [[2, 4]]
    flat = upstream.view(6, 5)
    assert torch.equal(weight.grad._values(), torch.stack([flat[1] + flat[5], flat[0] + flat[2] + flat[4]]))
    assert "sum_masked_segments" in runs


@pytest.mark.parametrize("block", [1, 1 << 20])
@pytest.mark.parametrize("sparse", [False, True])
def test_results_depend_neither_on_blocks_nor_on_threads(block, sparse, monkeypatch, runs) -> None:
    weight, addend = torch.randn(20, 40), torch.randn(9, 40)
    ids, upstream = torch.randint(0, 20, (5, 9)), torch.randn(5, 9, 40)

    def compute(weight: Tensor, addend: Tensor | None) -> Tensor:
        return gather_scale_add_drop(StoredRows(ids, weight, None, sparse), 2.0, addend, 0.3)

    expected = results(compute, weight, addend, upstream)
    monkeypatch.setattr(fused, "CLAIMED_NUMEL", block)
    torch.set_num_threads(3)
    for found, right in zip(results(compute, weight, addend, upstream), expected, strict=True):
        assert torch.equal(found, right)


def test_expanded_gradients_hooks_and_a_second_backward_pass_work(runs) -> None:
    layer = GPTEmbedding(20, 8, 6)
    seen: list[Tensor] = []
    layer.tok_emb.weight.register_hook(seen.append)
    ids = torch.randint(0, 20, (3, 6))
    y = layer(ids)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    counts = ids.flatten().bincount(minlength=20).float()
    assert torch.equal(layer.tok_emb.weight.grad, 2 * counts.unsqueeze(1).expand(20, 8))
    assert torch.equal(layer.pos_emb.weight.grad, torch.full((6, 8), 6.0))
    assert len(seen) == 2
    assert [name for name in runs if name != "segments_of_equal_ids"] == [
        "gather_scale_add_drop",
        *(["sum_masked_segments"] * 4),
    ]


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0,)])
def test_no_tokens_have_no_vectors_and_zero_gradients(shape, runs) -> None:
    layer = TransformerEmbedding(20, 8, 6, 0.5)
    y = layer(torch.empty(shape, dtype=torch.int64))
    assert y.shape == (*shape, 8)
    y.sum().backward()
    assert layer.table.weight.grad.eq(0).all()
    assert runs


def test_a_gradient_that_needs_no_weight_is_not_computed(runs) -> None:
    layer = GPTEmbedding(20, 8, 6)
    layer.tok_emb.weight.requires_grad_(False)
    layer(torch.randint(0, 20, (3, 6))).sum().backward()
    assert layer.tok_emb.weight.grad is None
    assert torch.equal(layer.pos_emb.weight.grad, torch.full((6, 8), 3.0))


@pytest.mark.parametrize("shape", [(3, 40, 30), pytest.param((50,), marks=LONG), pytest.param((0, 8), marks=LONG)])
def test_dropout_in_a_graph_has_its_rate_and_passes_gradients_by_its_mask(shape, runs, unchecked) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def dropped(x: Tensor) -> Tensor:
        return dropout_step(dropout, x)

    dropout, x = nn.Dropout(0.25), torch.ones(shape, requires_grad=True)
    torch.manual_seed(4)
    first, second = dropped(x), dropped(x)
    torch.manual_seed(4)
    assert torch.equal(dropped(x), first)
    assert not x.numel() or not torch.equal(first, second)
    assert ((first == 0) | ((first - 4 / 3).abs() < 1e-4)).all()
    spread = 5 * math.sqrt(0.25 * 0.75 / max(1, x.numel()))
    assert not x.numel() or (first == 0).float().mean().item() == pytest.approx(0.25, abs=spread)
    first.sum().backward()
    assert torch.equal(x.grad, first)
    dropout.eval()
    assert torch.equal(dropped(x), x)
    assert runs


def test_a_compiled_layer_in_training_runs_the_kernel(runs, unchecked) -> None:
    layer = TransformerEmbedding(50, 16, 12, 0.5)
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.randint(0, 50, (4, 12)))
    y.sum().backward()
    assert runs == ["gather_scale_add_drop"] * 2
    assert torch.allclose(layer.position.weight.grad, y.ne(0).sum(0) * 2.0)
