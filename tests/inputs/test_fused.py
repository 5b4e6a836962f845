"""An input embedding in one pass, against the operations one by one, in any number of dimensions and of blocks.

`tests/kernels/cpu/test_input.py` has the laws of the masks.
"""

import math

import pytest
import torch
from torch import Tensor

from embedlayer import (
    DecoderLM,
    FactorizedEmbedding,
    LearnedPositionalEmbedding,
    LookupTable,
    Position,
    RotaryEmbedding,
    RowAdamW,
    RowSparseEmbedding,
    SinusoidalPositionalEmbedding,
    TokenEmbedding,
    TokenIdError,
    TransformerEmbedding,
)
from embedlayer.inputs import embed

pytestmark = pytest.mark.usefixtures("both_paths")

TABLES = {
    "dense": lambda width, scale: TokenEmbedding(11, width, scale=scale),
    "row-sparse": lambda width, scale: RowSparseEmbedding(11, width, scale=scale),
    "factorised": lambda width, scale: FactorizedEmbedding(11, width, 4, scale=scale),
}
POSITIONS = [
    lambda width: Position(),
    lambda width: LearnedPositionalEmbedding(700, width),
    lambda width: SinusoidalPositionalEmbedding(700, width),
]
MANY = (2, 700, 1024)
"""Numbers of more elements than one block has."""


def vectors_and_gradients(vectors: Tensor, table: LookupTable, position: Position) -> list[Tensor]:
    """Return vectors and the gradients of all parameters, which are removed."""
    torch.manual_seed(1)
    vectors.backward(torch.randn_like(vectors))
    parameters = [*table.parameters(), *position.parameters()]
    gradients = [each.grad.to_dense() for each in parameters if each.grad is not None]
    for each in parameters:
        each.grad = None
    return [vectors.detach(), *gradients]


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("sizes", [(3, 5, 8), (1, 5, 8), (5, 7), (2, 4, 6, 8), MANY])
def test_without_dropout_vectors_and_gradients_are_those_of_the_definition(kind, sizes) -> None:
    *shape, width = sizes
    ids = torch.randint(0, 11, shape)
    for make_position in POSITIONS if sizes != MANY else POSITIONS[1:2]:
        for scale in (None, 3.0) if sizes != MANY else (3.0,):
            table, position = TABLES[kind](width, scale).double(), make_position(width).double()
            for positions in (None, torch.randint(0, 700, shape)):
                found = vectors_and_gradients(embed(ids, table, position, positions), table, position)
                used = torch.arange(shape[-1]) if positions is None else positions
                x = table.look_up(ids) * (scale or 1.0)
                plain = x + position(used) if position.hook == "add" else x
                expected = vectors_and_gradients(plain, table, position)
                with torch.no_grad():
                    expected.append(plain)
                    found.append(embed(ids, table, position, positions))
                for ours, theirs in zip(found, expected, strict=True):
                    assert torch.allclose(ours, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("dropout", [0.1, 0.5, 1.0])
def test_dropout_keeps_its_share_and_sends_gradients_where_it_let_values_through(kind, dropout) -> None:
    layer = TransformerEmbedding(11, 64, 60, dropout, table=TABLES[kind](64, 2.0))
    ids = torch.randint(0, 11, (20, 60))
    y = layer(ids)
    share, spread = y.eq(0).double().mean().item(), 5 * math.sqrt(dropout * (1 - dropout) / y.numel())
    assert share == pytest.approx(dropout, abs=spread + 1e-5)
    mask = y.detach().ne(0) / max(1 - dropout, 1e-9)
    whole = layer.eval()(ids)
    torch.testing.assert_close(y, mask * whole, rtol=1e-4, atol=1e-6)
    upstream = torch.randn_like(y)
    gradients = [torch.autograd.grad(each, [*layer.parameters()], upstream) for each in (y, mask * whole)]
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours.to_dense(), plain.to_dense(), rtol=1e-3, atol=1e-4)


def test_the_seed_decides_and_is_used_up() -> None:
    layer, ids = TransformerEmbedding(11, 40, 30, 0.5, table=TABLES["factorised"](40, None)), torch.arange(11)
    torch.manual_seed(5)
    first, second = layer(ids), layer(ids)
    torch.manual_seed(5)
    assert torch.equal(layer(ids), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_first_and_second_derivatives_are_right(dropout) -> None:
    layer = TransformerEmbedding(4, 3, 2, dropout, table=FactorizedEmbedding(4, 3, 2, scale=1.5)).double()
    names, values = zip(*layer.named_parameters(), strict=True)

    def seeded(*values: Tensor) -> Tensor:
        torch.manual_seed(7)
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (torch.tensor([[0, 3]]),))

    assert torch.autograd.gradcheck(seeded, values)
    assert torch.autograd.gradgradcheck(seeded, values)


def test_a_rotary_model_drops_too_and_a_table_is_never_written_to() -> None:
    table = TokenEmbedding(50, 16)
    before = table.weight.detach().clone()
    model = DecoderLM(table, RotaryEmbedding(8), num_layers=1, num_heads=2, dropout=0.5)
    ids = torch.randint(0, 50, (2, 7))
    assert not torch.equal(model(ids), model(ids))
    with torch.no_grad():
        TransformerEmbedding(50, 16, 9, position=LearnedPositionalEmbedding(9, 16), table=table)(ids)
    assert torch.equal(table.weight, before)


def test_a_bad_id_is_named_in_evaluation_and_rows_that_are_behind_are_caught_up() -> None:
    layer = TransformerEmbedding(11, 8, 5, 0.0, table=RowSparseEmbedding(11, 8)).eval()
    optimizer = RowAdamW(layer.parameters(), lr=0.1, weight_decay=0.5)
    for ids in (torch.arange(5), torch.tensor([1]), torch.tensor([1])):
        layer(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        seen = layer(torch.arange(5))
        assert torch.equal(seen, layer(torch.arange(5)))
    assert torch.allclose(seen, layer(torch.arange(5)))
    with torch.no_grad(), pytest.raises(TokenIdError):
        layer(torch.tensor([[1, 2, 3], [1, 2, 11]]))
