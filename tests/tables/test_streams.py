"""K streams in one table: equal to K added modules."""

import pytest
import torch
from torch import Tensor, nn

from embedlayer import ShapeError, SizeError, TokenIdError
from embedlayer.tables import QuantizedEmbedding, StreamTable, TokenEmbedding

SIZES, WIDTH = (9, 5, 12), 8


def modules(dtype: torch.dtype = torch.float32, **options: object) -> list[nn.Embedding]:
    return [nn.Embedding(size, WIDTH, dtype=dtype, **options) for size in SIZES]


def ids_of(*shape: int) -> Tensor:
    return torch.stack([torch.randint(size, shape) for size in SIZES], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("streams", [None, 1, 2])
def test_it_equals_k_added_modules(dtype: torch.dtype, streams: int | None) -> None:
    tables, ids = modules(dtype), ids_of(4, 7)
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


def test_one_stream_is_looked_up_alone() -> None:
    tables = modules()
    table, ids = StreamTable.from_tables(tables), torch.tensor([[0, 4], [2, 2]])
    assert torch.equal(table.look_up(ids, 1), tables[1](ids))
    assert [table.stream(k) for k in range(3)] == [range(9), range(9, 14), range(14, 26)]


def test_a_shared_padding_row_is_not_shifted() -> None:
    rows = nn.Embedding(sum(SIZES) + 1, WIDTH, padding_idx=sum(SIZES))
    nn.init.normal_(rows.weight)
    table = StreamTable(rows, SIZES, shared_padding_idx=26)
    ids = torch.tensor([[1, 26, 11], [26, 26, 26]])
    expected = rows(torch.tensor([[1, 26, 25], [26, 26, 26]]))
    assert torch.equal(table(ids), expected[:, 0] + expected[:, 1] + expected[:, 2])
    assert torch.equal(table.look_up(ids[:, 1], 1), expected[:, 1])


def test_quantised_rows_are_a_table_of_streams_too() -> None:
    rows = QuantizedEmbedding.from_table(torch.randn(sum(SIZES), WIDTH), 8, scale=2.0)
    table, ids = StreamTable(rows, SIZES), ids_of(5)
    numbers = (ids + table.offsets).unbind(-1)
    first, second, third = (rows.look_up(each) for each in numbers)
    assert torch.equal(table(ids), 2.0 * ((first + second) + third))


def test_an_id_outside_its_own_stream_is_named_with_stream_row_and_column() -> None:
    table, ids = StreamTable.from_tables(modules()), torch.zeros(2, 4, 3, dtype=torch.long)
    ids[1, 2, 1] = 5
    message = "token id 5 at row 1, column 2, stream 1, is outside this stream of 5 rows"
    with pytest.raises(TokenIdError, match=message):
        table(ids)
    with pytest.raises(TokenIdError, match=message):
        table.look_up(ids[..., 1], 1)


def test_bad_input_is_refused(unchecked: None) -> None:
    table = StreamTable.from_tables(modules())
    with pytest.raises(ShapeError, match=r"IDs of 3 streams are \(..., 3\), the streams last; found \(2, 4\)"):
        table(torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ShapeError, match="must be int64 or int32"):
        table(torch.zeros(2, 3))
    with pytest.raises(SizeError, match=r"streams=4 is none of 1..3"):
        table(ids_of(2), streams=4)
    with pytest.raises(SizeError, match="Stream 3 is none of the 3 streams"):
        table.stream(3)
    with pytest.raises(SizeError, match="need a table of 14 rows; found 20"):
        StreamTable(TokenEmbedding(20, WIDTH), (9, 5))
    with pytest.raises(SizeError, match="3 streams of equal sizes do not divide a table of 20 rows"):
        StreamTable.of_equal_sizes(TokenEmbedding(20, WIDTH), 3)
    with pytest.raises(SizeError, match="at least one stream"):
        StreamTable(TokenEmbedding(20, WIDTH), ())
    with pytest.raises(SizeError, match="The shared padding row is the last one, 14; found 3"):
        StreamTable(TokenEmbedding(15, WIDTH), (9, 5), shared_padding_idx=3)
    with pytest.raises(SizeError, match="one width, dtype"):
        StreamTable.from_tables([nn.Embedding(3, 4), nn.Embedding(3, 5)])
    with pytest.raises(SizeError, match="2 of these 3 have one each"):
        StreamTable.from_tables([nn.Embedding(3, 4, padding_idx=0), nn.Embedding(3, 4), nn.Embedding(3, 4, 0)])


def test_it_is_saved_and_loaded(tmp_path) -> None:
    table = StreamTable.from_tables(modules())
    table.save_pretrained(tmp_path)
    again, ids = StreamTable.from_pretrained(tmp_path), ids_of(4)
    assert torch.equal(again(ids), table(ids))
    assert again.sizes == SIZES
