"""A table of every kind, made into another kind or edited, keeps its scale, padding, size and type."""

import copy
from collections.abc import Callable

import torch
from covering import looped
from kinds import EMBED_DIM, TABLES, VOCAB_SIZE

import embedlayer as el
from embedlayer import DeltaEmbedding, FactorizedEmbedding, QuantizedEmbedding, TokenTable
from embedlayer.compress.convert import compress_table

DTYPES = (torch.float32, torch.bfloat16)
SOURCES: dict[str, Callable[[], TokenTable]] = {
    **TABLES,
    "delta over rounded scale": lambda: DeltaEmbedding(TABLES["dense, rounded scale"](), [7, 48, 49]),
    "int8 of rounded scale": lambda: QuantizedEmbedding.from_table(TABLES["dense, rounded scale"]()),
    "delta over int8 of rounded scale": lambda: DeltaEmbedding(SOURCES["int8 of rounded scale"](), [7, 48, 49]),
}


def read_back(table: TokenTable, folder) -> TokenTable:
    table.save_pretrained(folder)
    return type(table).from_pretrained(folder)


CONVERSIONS: dict[str, Callable[[TokenTable, object], TokenTable]] = {
    "int8": lambda table, _: QuantizedEmbedding.from_table(table, 8),
    "int4": lambda table, _: compress_table(table, "int4-g8"),
    "low rank": lambda table, _: FactorizedEmbedding.from_table(table, EMBED_DIM),
    "low rank by name": lambda table, _: compress_table(table, "rank=8"),
    "delta": lambda table, _: DeltaEmbedding(table, [3, 49]),
    "delta, then int8": lambda table, _: QuantizedEmbedding.from_table(DeltaEmbedding(table, [3])),
    "copy": lambda table, _: copy.deepcopy(table),
    "description": lambda table, _: type(table).from_config(table.config).to(table.rows(0, 1).dtype),
    "file": read_back,
}


def facts(table: TokenTable) -> tuple:
    rows = table.rows(0, 1)
    return table.vocab_size, table.embed_dim, table.padding_idx, rows.dtype, rows.device


@looped("name, to, dtype", SOURCES, CONVERSIONS, DTYPES, pairs=["to, dtype"])
def test_a_conversion_keeps_scale_padding_size_and_type(name, to, dtype, tmp_path) -> None:
    table = SOURCES[name]().to(dtype)
    expected, factor = facts(table), table.factor
    other = CONVERSIONS[to](table, tmp_path)
    assert facts(other) == expected
    assert (other.factor is None) == (factor is None)
    if factor is not None:
        assert float(other.factor) == float(factor)


@looped("name, dtype", [name for name in TABLES if name.startswith(("dense", "row", "factor"))], DTYPES)
def test_an_edit_of_the_vocabulary_keeps_scale_padding_row_and_type(name, dtype) -> None:
    table = TABLES[name]().to(dtype)
    for parameter in table.parameters():  # the padding row too
        parameter.data[:VOCAB_SIZE].normal_()
    factor, (_, *expected), row = table.factor, facts(table), table.rows(0, 1).clone()
    receipt = el.vocab.edit_vocabulary(table, add=3, remove=[7, 9])
    assert facts(table) == (VOCAB_SIZE + 1, *expected)
    assert torch.equal(table.rows(0, 1), row)
    assert table.factor == factor
    receipt.undo(table)
    assert facts(table) == (VOCAB_SIZE, *expected)
    assert table.factor == factor
