"""The kernels of the input embedding: the numbers and gradients of the definition, with one mask on both paths."""

import math
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from kernel_paths import runs_of_kernels
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embedlayer import QuantizedEmbedding, RowSparseEmbedding, TokenEmbedding, TransformerEmbedding
from embedlayer.kernels import kernels_disabled
from embedlayer.lessons.book import GPTEmbedding


@pytest.fixture
def runs(kernels) -> Iterator[list[str]]:
    """The names of kernels that ran."""
    with runs_of_kernels() as names:
        yield names


@pytest.fixture
def path(request, both_paths) -> Iterator[None]:
    """Compute by kernels, at least one of which must run; or without."""
    with runs_of_kernels() as names:
        yield
    assert ("gather_scale_add_drop" in names) == (both_paths == "kernels")


ADDENDS = {
    "none": None,
    "(T, D)": {},
    "(1, T, D)": {"positions": torch.tensor([[4, 0, 1, 1, 8, 3]])},
    "(B, T, D)": {"positions": torch.arange(18).view(3, 6) % 9},
}


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("addend", ADDENDS)
@pytest.mark.parametrize(("dropout", "scale", "padding_idx", "sparse", "width"), [
    (0.0, 3.0, None, False, 8),
    (0.25, None, 2, True, 7),
    (0.25, 3.0, 0, False, 33),
    (0.875, 0.5, None, True, 64),
])  # fmt: skip
def test_values_and_gradients_are_those_of_the_definition(
    dtype, addend, dropout, scale, padding_idx, sparse, width
) -> None:
    options = ADDENDS[addend]
    kind = RowSparseEmbedding if sparse else TokenEmbedding
    table = kind(11, width, padding_idx, scale=scale, init_std=1.0, dtype=dtype)
    layer = TransformerEmbedding(11, width, 9, dropout, table=table, position="none" if options is None else "learned")
    layer.to(dtype)
    ids, upstream = torch.randint(0, 11, (3, 6), dtype=torch.int32), torch.randn(3, 6, width).to(dtype)
    leaves = list(layer.parameters())
    y = layer(ids, **(options or {}))
    found = [y, *torch.autograd.grad(y, leaves, upstream)]
    factors = (y != 0).double() / (1 - dropout)  # rows of padding are zero too
    positions = torch.arange(6) if not options else options["positions"]

    def plain(dtype: torch.dtype) -> list[Tensor]:
        weight, *learned = (each.detach().to(dtype).requires_grad_() for each in leaves)
        x = F.embedding(ids, weight, padding_idx) * (scale or 1.0)
        x = (x + learned[0][positions] if learned else x) * factors.to(dtype)
        return [x, *torch.autograd.grad(x, [weight, *learned], upstream.to(dtype))]

    for ours, theirs, exact in zip(found, plain(dtype), plain(torch.float64), strict=True):
        error, own = ((each.to_dense().double() - exact).abs().max() for each in (ours, theirs))
        assert error <= 1.5 * own + 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_every_bfloat16_is_read_exactly_and_rounded_as_torch_does(runs) -> None:
    weight = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16).view(-1, 16)
    for scale in (None, 3.0, 1 / 3):
        layer = TransformerEmbedding(
            4096, 16, 4096, 0.0, position="none", table=TokenEmbedding.from_pretrained(weight, scale=scale)
        )
        expected = weight if scale is None else weight.float().mul(scale).bfloat16()
        torch.testing.assert_close(layer(torch.arange(4096)), expected, rtol=0, atol=0, equal_nan=True)
    assert "gather_scale_add_drop" in runs


def test_the_gradient_of_positions_over_many_sequences_is_as_exact_as_that_of_torch(runs) -> None:
    layer = TransformerEmbedding(11, 64, 5, dropout=0.0)
    upstream = torch.randn(300, 5, 64)
    layer(torch.randint(0, 11, (300, 5))).backward(upstream)
    exact = upstream.double().sum(0)
    own_error = (upstream.sum(0) - exact).norm()
    assert (layer.position.weight.grad - exact).norm() <= 1.1 * own_error
    assert "sum_masked_segments" in runs


@pytest.mark.parametrize("kind", ["dense", "row-sparse", "quantised"])
def test_one_seed_gives_one_mask_with_and_without_kernels(kind, runs) -> None:
    table = (RowSparseEmbedding if kind == "row-sparse" else TokenEmbedding)(50, 30)
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


def layer_of_ones(dropout: float) -> TransformerEmbedding:
    return TransformerEmbedding(
        1, 130, 500, dropout, position="none", table=TokenEmbedding.from_pretrained(torch.ones(1, 130), freeze=False)
    )


@pytest.mark.usefixtures("path")
def test_masks_of_consecutive_calls_tokens_and_columns_are_independent() -> None:
    """Two places are dropped together as often as chance has it, and the rate is right in each column and token."""
    p, ids = 0.25, torch.zeros(2, 500, dtype=torch.long)
    layer = layer_of_ones(p)
    first, second = (layer(ids).eq(0).double() for _ in range(2))
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
    layer = TransformerEmbedding(50, 16, 12, 0.5, table=(RowSparseEmbedding if row_sparse else TokenEmbedding)(50, 16))
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
    assert all(map(torch.equal, *grads))


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
    table = RowSparseEmbedding(6, 5, 0)
    upstream = torch.randn(2, 3, 5) * 1000
    layer = TransformerEmbedding(6, 5, 3, 0.0, position="none", table=table)
    layer(torch.tensor([[4, 2, 4], [0, 4, 2]])).backward(upstream)
    assert table.weight.grad._indices().tolist() == [[2, 4]]
    flat = upstream.view(6, 5)
    assert torch.equal(table.weight.grad._values(), torch.stack([flat[1] + flat[5], flat[0] + flat[2] + flat[4]]))
    assert "sum_masked_segments" in runs


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
    layer.zero_grad()
    layer.tok_emb.weight.requires_grad_(False)
    layer(ids).sum().backward()
    assert layer.tok_emb.weight.grad is None
    assert torch.equal(layer.pos_emb.weight.grad, torch.full((6, 8), 3.0))
    kernels = [name for name in runs if name != "segments_of_equal_ids"]
    assert kernels == ["gather_scale_add_drop", *["sum_masked_segments"] * 4, "gather_scale_add_drop", kernels[-1]]


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0,)])
def test_no_tokens_have_no_vectors_and_zero_gradients(shape, runs) -> None:
    layer = TransformerEmbedding(20, 8, 6, 0.5)
    y = layer(torch.empty(shape, dtype=torch.int64))
    assert y.shape == (*shape, 8)
    y.sum().backward()
    assert layer.table.weight.grad.eq(0).all()
    assert runs


def test_dropout_of_a_compiled_layer_has_its_rate_and_passes_gradients_by_its_mask(runs, unchecked) -> None:
    layer, ids = layer_of_ones(0.25), torch.zeros(3, 40, dtype=torch.long)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.manual_seed(4)
    first, second = compiled(ids), compiled(ids)
    torch.manual_seed(4)
    assert torch.equal(compiled(ids), first)
    assert not torch.equal(first, second)
    assert ((first == 0) | ((first - 4 / 3).abs() < 1e-4)).all()
    assert (first == 0).float().mean().item() == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / first.numel()))
    first.sum().backward()
    torch.testing.assert_close(layer.table.weight.grad[0], first.sum((0, 1)))
    assert set(runs) == {"gather_scale_add_drop"}
    layer.eval()
    assert torch.equal(compiled(ids), torch.ones(3, 40, 130))
