"""K streams in one table: equal to K added modules."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from embedlayer import ShapeError, SizeError, TokenIdError
from embedlayer.tables import StreamTable, TokenEmbedding

SIZES, WIDTH = (9, 5, 12), 8


def modules(dtype: torch.dtype = torch.float32, **options: object) -> list[nn.Embedding]:
    return [nn.Embedding(size, WIDTH, dtype=dtype, **options) for size in SIZES]


def ids_of(*shape: int) -> Tensor:
    return torch.stack([torch.randint(size, shape) for size in SIZES], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("streams", [None, 1, 2])
def test_it_equals_k_added_modules(dtype: torch.dtype, streams: int | None) -> None:
    tables, ids = modules(dtype), ids_of(4, 7)
    tables[1].padding_idx = 3
    table = StreamTable.from_tables(tables)
    out = table(ids, streams=streams)
    expected = sum(each(ids[..., k]) for k, each in enumerate(tables[:streams]))
    assert torch.equal(out, expected)
    cotangent = torch.randn_like(out)
    out.backward(cotangent)
    expected.backward(cotangent)
    for k, each in enumerate(tables):
        rows, grad = table.stream(k), torch.zeros_like(each.weight) if each.weight.grad is None else each.weight.grad
        tolerance = {} if dtype.itemsize > 2 else {"rtol": 0.02, "atol": 0.02}  # torch rounds each sum to 16 bits
        torch.testing.assert_close(table.rows.weight.grad[rows.start : rows.stop], grad, **tolerance)


def test_a_shared_padding_row_is_not_shifted() -> None:
    rows = nn.Embedding(sum(SIZES) + 1, WIDTH, padding_idx=sum(SIZES))
    nn.init.normal_(rows.weight)
    table = StreamTable(rows, SIZES, shared_padding_idx=26)
    ids = torch.tensor([[1, 26, 11], [26, 26, 26]])
    expected = rows(torch.tensor([[1, 26, 25], [26, 26, 26]]))
    assert torch.equal(table(ids), expected[:, 0] + expected[:, 1] + expected[:, 2])
    assert torch.equal(table.look_up(ids[:, 1], 1), expected[:, 1])


def test_an_id_outside_its_own_stream_is_named_with_stream_row_and_column() -> None:
    table, ids = StreamTable.from_tables(modules()), torch.zeros(2, 4, 3, dtype=torch.long)
    ids[1, 2, 1] = 5
    message = "token id 5 at row 1, column 2, stream 1, is outside this stream of 5 rows"
    with pytest.raises(TokenIdError, match=message):
        table(ids)
    with pytest.raises(TokenIdError, match=message):
        table.look_up(ids[..., 1], 1)


REFUSED: list[tuple[Callable[[], object], type[Exception]]] = [
    (lambda: StreamTable.from_tables(modules())(torch.zeros(2, 4).long()), ShapeError),
    (lambda: StreamTable.from_tables(modules())(torch.zeros(2, 3)), ShapeError),
    (lambda: StreamTable.from_tables(modules())(ids_of(2), streams=4), SizeError),
    (lambda: StreamTable.from_tables(modules()).stream(3), SizeError),
    (lambda: StreamTable(TokenEmbedding(20, WIDTH), (9, 5)), SizeError),
    (lambda: StreamTable.of_equal_sizes(TokenEmbedding(20, WIDTH), 3), SizeError),
    (lambda: StreamTable(TokenEmbedding(20, WIDTH), ()), SizeError),
    (lambda: StreamTable(TokenEmbedding(15, WIDTH), (9, 5), shared_padding_idx=3), SizeError),
    (lambda: StreamTable.from_tables([nn.Embedding(3, 4), nn.Embedding(3, 5)]), SizeError),
    (lambda: StreamTable.from_tables([nn.Embedding(3, 4), nn.Embedding(3, 4).requires_grad_(False)]), SizeError),
    (lambda: StreamTable.from_tables([nn.Embedding(3, 4, 0), nn.Embedding(3, 4), nn.Embedding(3, 4, 0)]), SizeError),
]


def test_bad_input_is_refused(unchecked: None) -> None:
    for call, error in REFUSED:
        with pytest.raises(error):
            call()


def test_streams_of_equal_sizes_divide_a_table_and_offsets_stay_whole_numbers() -> None:
    table = StreamTable.of_equal_sizes(TokenEmbedding(20, WIDTH), 4).bfloat16()
    assert table.sizes == (5, 5, 5, 5)
    assert table.offsets.tolist() == [0, 5, 10, 15]
