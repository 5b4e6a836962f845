"""Reading rows by chunks."""

import pytest
import torch

from embedlayer.analysis.row_reader import RowReader
from embedlayer.core.errors import ShapeError
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.factorized import FactorizedEmbedding


@pytest.mark.parametrize(
    "table",
    [
        TokenEmbedding(23, 6, scale="sqrt_dim", pad_to_multiple_of=8),
        FactorizedEmbedding(23, 6, rank=2),
        TokenEmbedding(23, 6, row_sparse=True, dtype=torch.bfloat16),
    ],
)
def test_chunks_and_chosen_rows_are_the_rows_of_any_table(table) -> None:
    rows = RowReader(table)
    whole = table.rows(0, 23).detach()
    torch.testing.assert_close(torch.cat([chunk for _, chunk in rows.chunks(rows_at_once=5)]), whole)
    torch.testing.assert_close(rows.take(torch.tensor([22, 0, 7])), whole[[22, 0, 7]].float())
    for kept in (torch.ones(23, dtype=torch.bool), torch.arange(23) % 7 > 2, torch.arange(23) > 12):
        chosen = torch.cat(list(rows.wide_chunks(kept, 5)))
        assert chosen.dtype == torch.float64
        torch.testing.assert_close(chosen, whole[kept].double())
    assert rows.take(torch.tensor([], dtype=torch.int64)).shape == (0, 6)
    assert not any(chunk.requires_grad for _, chunk in rows.chunks())
    assert (len(rows), rows.embed_dim) == (23, 6)


def test_a_plain_tensor_is_a_table_if_it_has_two_dimensions_of_floats() -> None:
    assert [start for start, _ in RowReader(torch.zeros(7, 2)).chunks(3)] == [0, 3, 6]
    assert list(RowReader(torch.zeros(0, 2)).chunks()) == []
    for wrong in (torch.zeros(3), torch.zeros(3, 2, dtype=torch.int64)):
        with pytest.raises(ShapeError, match=r"must be \(V, D\)"):
            RowReader(wrong)
