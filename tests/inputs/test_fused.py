"""Scale, positions and dropout in one pass, against the operations one by one."""

import math

import pytest
import torch
from torch import Tensor

from embedlayer import (
    DecoderLM,
    LearnedPositionalEmbedding,
    RotaryEmbedding,
    RowAdamW,
    TokenEmbedding,
    TokenIdError,
    TransformerEmbedding,
)
from embedlayer.inputs import fused
from embedlayer.inputs.fused import gather_scale_add_drop, plain_scale_add_drop, scale_add_drop
from embedlayer.kernels.input import StoredRows


@pytest.fixture(params=[1 << 17, 50], ids=["one block", "small blocks"])
def block_size(request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "BLOCK_NUMEL", request.param)
    monkeypatch.setattr(fused, "CLAIMED_NUMEL", request.param)


pytestmark = pytest.mark.usefixtures("both_paths")


SHAPES = [((3, 5, 8), (5, 8)), ((3, 5, 8), (1, 5, 8)), ((3, 5, 8), (3, 5, 8)), ((5, 7), (5, 7)), ((2, 4, 6, 8), (6, 8))]


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize(("shape", "addend_shape"), SHAPES)
@pytest.mark.parametrize("scale", [None, 3.0])
@pytest.mark.parametrize("with_addend", [True, False])
def test_without_dropout_values_and_gradients_are_those_of_the_definition(
    shape, addend_shape, scale, with_addend
) -> None:
    results = []
    for way in (scale_add_drop, plain_scale_add_drop):
        torch.manual_seed(1)
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        addend = torch.randn(addend_shape, dtype=torch.float64, requires_grad=True) if with_addend else None
        y = way(x * 1.0, scale, addend, 0.0)
        y.backward(torch.randn_like(y))
        results.append([y.detach(), x.grad, addend.grad if addend is not None else x.grad])
    for ours, plain in zip(*results, strict=True):
        assert torch.allclose(ours, plain, rtol=1e-14, atol=1e-14)


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("dropout", [0.1, 0.5, 1.0])
def test_dropout_keeps_its_share_and_the_mean_and_sends_gradients_where_it_let_values_through(dropout) -> None:
    x = torch.ones(20, 60, 50, requires_grad=True)
    addend = torch.ones(60, 50, requires_grad=True)
    y = scale_add_drop(x * 1.0, 2.0, addend, dropout)
    share = y.eq(0).double().mean().item()
    assert share == pytest.approx(dropout, abs=5 * math.sqrt(dropout * (1 - dropout) / y.numel()) + 1e-5)
    for value in y.detach().unique().tolist():
        assert value == 0 or value == pytest.approx(3 / (1 - dropout), rel=1e-4)
    y.sum().backward()
    kept = y.detach() / 3
    assert torch.allclose(x.grad, 2 * kept)
    assert torch.allclose(addend.grad, kept.sum(0))


def test_which_numbers_are_dropped_looks_random_along_every_direction() -> None:
    """Neighbours at any of the first distances are dropped together as often as chance has it."""
    torch.manual_seed(3)
    y = scale_add_drop(torch.ones(1, 4000, 128), None, None, 0.25).eq(0).double().flatten()
    expected, spread = 0.0625, 5 * math.sqrt(0.0625 * 0.9375 / len(y))
    for distance in (1, 2, 3, 4, 8, 64, 128, 256):
        together = (y[distance:] * y[:-distance]).mean().item()
        assert together == pytest.approx(expected, abs=spread)
    by_place = scale_add_drop(torch.ones(1, 4000, 128), None, None, 0.25).eq(0).double()[0]
    assert (by_place.mean(0) - 0.25).abs().max() < 5 * math.sqrt(0.25 * 0.75 / 4000)


def test_the_seed_decides_and_is_used_up() -> None:
    def drawn() -> Tensor:
        return scale_add_drop(torch.ones(2, 30, 40), None, None, 0.5)

    torch.manual_seed(5)
    first, second = drawn(), drawn()
    torch.manual_seed(5)
    assert torch.equal(drawn(), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_first_and_second_derivatives_are_right(dropout, monkeypatch) -> None:
    monkeypatch.setattr(fused, "BLOCK_NUMEL", 3)
    monkeypatch.setattr(fused, "CLAIMED_NUMEL", 3)
    x = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)
    addend = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def seeded(x: Tensor, addend: Tensor) -> Tensor:
        torch.manual_seed(7)
        return scale_add_drop(x * 1.0, 1.5, addend, dropout)

    assert torch.autograd.gradcheck(seeded, (x, addend))
    assert torch.autograd.gradgradcheck(seeded, (x, addend))


@pytest.mark.parametrize("row_sparse", [False, True])
def test_a_layer_in_training_drops_the_share_it_was_given(row_sparse) -> None:
    table = TokenEmbedding(50, 64, scale="sqrt_dim", row_sparse=row_sparse)
    layer = TransformerEmbedding(50, 64, 16, 0.25, table=table)
    ids = torch.randint(0, 50, (40, 16))
    y = layer(ids)
    assert y.eq(0).double().mean().item() == pytest.approx(0.25, abs=0.02)
    kept = y != 0
    assert torch.allclose(y[kept], (layer.eval()(ids) / 0.75)[kept], rtol=1e-4)
    y.sum().backward()
    grads = table.weight.grad.to_dense()
    assert grads.ne(0).any()


def test_a_rotary_model_drops_too_and_a_table_is_never_written_to() -> None:
    table = TokenEmbedding(50, 16)
    before = table.weight.detach().clone()
    model = DecoderLM(table, RotaryEmbedding(8), num_layers=1, num_heads=2, dropout=0.5)
    ids = torch.randint(0, 50, (2, 7))
    assert not torch.equal(model(ids), model(ids))
    with torch.no_grad():
        TransformerEmbedding(50, 16, 9, position=LearnedPositionalEmbedding(9, 16), table=table)(ids)
    assert torch.equal(table.weight, before)


def test_compiled_it_is_the_definition(unchecked: None) -> None:
    layer = TransformerEmbedding(50, 16, 9, 0.0).train()
    ids = torch.randint(0, 50, (2, 7))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(ids), layer(ids))


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("shape", [(3, 5), (1, 5), (5,), (2, 3, 5)])
@pytest.mark.parametrize("scale", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_gradients_rows_are_gathered_scaled_and_moved_at_once(shape, scale, dtype) -> None:
    ids, rows = torch.randint(0, 11, shape), torch.randn(11, 8, dtype=dtype)
    for addend in (torch.randn(5, 8), torch.randn(*shape, 8)):
        with torch.no_grad():
            ours = gather_scale_add_drop(StoredRows(ids, rows), scale, addend, 0.0)
            plain = plain_scale_add_drop(rows[ids], scale, addend, 0.0)
        assert ours.dtype == dtype
        slack = 2e-2 if dtype == torch.bfloat16 else 1e-6
        assert torch.allclose(ours, plain, rtol=slack, atol=slack)


def test_a_bad_id_is_named_in_evaluation_and_rows_that_are_behind_are_caught_up() -> None:
    layer = TransformerEmbedding(11, 8, 5, 0.0, table=TokenEmbedding(11, 8, row_sparse=True)).eval()
    optimizer = RowAdamW(layer.parameters(), lr=0.1, weight_decay=0.5)
    for ids in (torch.arange(5), torch.tensor([1]), torch.tensor([1])):
        layer(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        seen = layer(torch.arange(5))
        assert torch.equal(seen, layer(torch.arange(5)))
    assert torch.allclose(seen, layer(torch.arange(5)))
    with torch.no_grad(), pytest.raises(TokenIdError, match="token id 11 at row 1, column 2"):
        layer(torch.tensor([[1, 2, 3], [1, 2, 11]]))
