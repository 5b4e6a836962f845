"""Tables that are only looked up: they work everywhere that does not read all rows, and are refused elsewhere."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedlayer import (
    CheckpointError,
    DeltaEmbedding,
    OutputHead,
    QuantizedEmbedding,
    SizeError,
    TokenTable,
    TransformerEmbedding,
    param_groups,
)
from embedlayer.analysis import table_geometry
from embedlayer.tables import LookupTable


class HashedTable(LookupTable):
    """Several tokens share a row: a table with fewer rows than tokens."""

    def __init__(self, vocab_size: int, num_rows: int, embed_dim: int, scale: float | None = None) -> None:
        super().__init__()
        self.vocab_size, self.num_rows, self.embed_dim = vocab_size, num_rows, embed_dim
        self.padding_idx, self.scale = None, scale
        self.weight = nn.Parameter(torch.randn(num_rows, embed_dim))

    def look_up(self, ids: Tensor) -> Tensor:
        return F.embedding(ids * 7919 % self.num_rows, self.weight)

    def rows(self, start: int, stop: int) -> Tensor:
        return self.look_up(torch.arange(start, stop))


def test_a_table_that_is_only_looked_up_has_no_second_direction() -> None:
    assert not {"logits", "loss", "token_log_probs", "raw_logits", "as_linear"} & set(dir(LookupTable))
    assert issubclass(TokenTable, LookupTable)


def test_it_is_the_input_of_a_transformer_and_is_saved_with_it(tmp_path) -> None:
    table, ids = HashedTable(50, 13, 8, scale=2.0), torch.tensor([[1, 49, 7]])
    layer = TransformerEmbedding(50, 8, 16, dropout=0.0, position="sinusoidal", table=table)
    expected = 2.0 * table.weight[ids * 7919 % 13] + layer.position.waves[:3]
    torch.testing.assert_close(layer(ids), expected)
    with torch.no_grad():  # the fused path
        torch.testing.assert_close(layer(ids), expected)
    layer.save_pretrained(tmp_path)
    again = TransformerEmbedding.from_pretrained(tmp_path)
    assert type(again.table) is HashedTable
    assert torch.equal(again.table.weight, table.weight)


def test_what_reads_rows_accepts_it() -> None:
    table = HashedTable(50, 13, 8)
    rows = table.rows(0, 50).detach()
    assert f"{table_geometry(table)}" == f"{table_geometry(rows)}"
    assert torch.equal(QuantizedEmbedding.from_table(table).packed, QuantizedEmbedding.from_table(rows).packed)
    assert param_groups(nn.Sequential(table))[0]["name"] == "tables"


def test_a_head_cannot_be_tied_to_it(unchecked: None) -> None:
    table = HashedTable(50, 13, 8)
    for refuse in (OutputHead, lambda table: DeltaEmbedding(table, [1])):
        with pytest.raises(SizeError, match="can only be looked up"):
            refuse(table)


def test_a_table_that_does_not_store_an_argument_says_so_when_it_is_saved() -> None:
    class Nameless(HashedTable):
        def __init__(self, vocab_size: int, buckets: int, embed_dim: int) -> None:
            super().__init__(vocab_size, buckets, embed_dim)

    with pytest.raises(CheckpointError, match=r"set self\.buckets, or define config"):
        _ = Nameless(50, 13, 8).config
