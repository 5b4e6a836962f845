"""What functions take as a table, and its conversion to one: tables, modules of torch, tensors and arrays."""

from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from embedlayer.core.errors import SizeError
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.dense_table import has_sparse_gradients, tensor_of
from embedlayer.tables.lookup import LookupTable
from embedlayer.tables.table import TokenTable

TableLike: TypeAlias = LookupTable | nn.Embedding | Tensor | npt.NDArray[Any]
"""Argument of functions that only read rows: a table, a plain `nn.Embedding`, or the rows `(V, D)`."""


def as_lookup_table(table: LookupTable | nn.Embedding) -> LookupTable:
    """Return a `LookupTable` unchanged, and a plain `nn.Embedding` as a dense table over the same weight."""
    if isinstance(table, LookupTable):
        return table
    if isinstance(table, nn.Embedding) and has_sparse_gradients(table):
        from embedlayer.tables.row_sparse import RowSparseEmbedding  # which few programs need

        return RowSparseEmbedding.from_embedding(table)
    if isinstance(table, nn.Embedding):
        return TokenEmbedding.from_embedding(table)
    raise SizeError(f"A table is needed here; found {type(table).__name__}: pass a TokenEmbedding.")


def as_table(table: LookupTable | nn.Embedding, *, registered: bool = True) -> TokenTable:
    """Return a `TokenTable` unchanged, and a plain `nn.Embedding` as a `TokenEmbedding` over the same weight."""
    if isinstance(table, nn.Embedding) and not isinstance(table, LookupTable) and not registered:
        raise SizeError("A head cannot be tied to an nn.Embedding: tie it to TokenEmbedding.from_embedding(embedding).")
    rows = as_lookup_table(table)
    if not isinstance(rows, TokenTable):
        raise SizeError(f"A {type(rows).__name__} can only be looked up: pass a TokenTable, or untie the head.")
    return rows


def as_rows(table: TableLike) -> LookupTable | Tensor:
    """Convert a table, or an array of its rows, to a `LookupTable` or a tensor that rows can be read from."""
    return tensor_of(table) if isinstance(table, Tensor | np.ndarray) else as_lookup_table(table)


def source_of_rows(
    table: TableLike, padding_idx: int | None, scale: float | Literal["sqrt_dim"] | None
) -> tuple[LookupTable, int | None]:
    """Return `(table, padding_idx)` for a conversion to another kind of table, from a table or from plain rows."""
    rows = as_rows(table)
    if isinstance(rows, Tensor):
        return TokenEmbedding.from_pretrained(rows, scale=scale), padding_idx
    return rows, rows.padding_idx
