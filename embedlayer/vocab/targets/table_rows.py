"""Rows of a whole table in place of those of a file: rows that are equal keep their bytes, and others are quantised."""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Int
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.core.block_sizes import TABLE_ROWS
from embedlayer.tables.lookup import LookupTable
from embedlayer.vocab.map import NEW, RowTensor


def token_sources(old: Tokenizer, new: Tokenizer, old_rows: int, rows: int) -> Int[Tensor, " rows"]:
    """Return for each row of a table the row of the same token in a file, or `NEW` if the file has no such token.

    Tokens are compared by their names in the vocabulary. Rows without a token, in both, are compared by their numbers.

    Args:
        old: Tokenizer of the file.
        new: Tokenizer of the table.
        old_rows: Number of rows in the file.
        rows: Number of rows of the table.
    """
    old_ids, new_ids = (each.get_vocab(with_added_tokens=True) for each in (old, new))
    sources = torch.arange(rows)
    sources[sources >= old_rows] = NEW
    sources[torch.isin(sources, torch.tensor([*old_ids.values()]))] = NEW
    for name, token_id in new_ids.items():
        if token_id < rows:
            source = old_ids.get(name, NEW)
            sources[token_id] = source if source < old_rows else NEW
    return sources


def unchanged_rows(old: RowTensor, source: Tensor | LookupTable, sources: Int[Tensor, " N"]) -> Bool[Tensor, " N"]:
    """Return for each row of a table whether it equals the row of the same token in a file, in the dtype of the table.

    Args:
        old: The rows of the file.
        source: The N rows of the table.
        sources: For each of them the row of the same token in the file, or `NEW`.
    """
    unchanged = []
    for start, rows in _chunks(source, len(sources)):
        places = sources[start : start + len(rows)]
        stored = old.local.index_select(0, places.clamp(min=0))
        numbers = stored.to(rows.dtype) if old.decode is None else old.decode(stored, rows.dtype)
        unchanged.append((numbers == rows).all(1) & (places != NEW))
    return torch.cat(unchanged)


def written_rows(
    old: RowTensor, source: Tensor | LookupTable, sources: Int[Tensor, " N"], unchanged: Bool[Tensor, " N"]
) -> Tensor:
    """Return the rows of a table as a file stores them: those of the file where they are unchanged, else encoded.

    The arguments are those of `unchanged_rows`, and its result. Of `old` only the form counts if no row is unchanged.
    """
    new = old.local.new_empty((len(sources), *old.local.shape[1:]))
    if unchanged.any():
        new[unchanged] = old.local.index_select(0, sources[unchanged])
    for start, rows in _chunks(source, len(sources)):
        changed = (~unchanged[start : start + len(rows)]).nonzero().squeeze(1)
        if len(changed):
            new[start + changed] = rows[changed].to(new.dtype) if old.encode is None else old.encode(rows[changed])
    return new


def _chunks(source: Tensor | LookupTable, size: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows of a table on the CPU, a chunk at a time, each with the number of its first row."""
    step = TABLE_ROWS["cpu"]
    for start in range(0, size, step):
        stop = min(start + step, size)
        rows = source.rows(start, stop) if isinstance(source, LookupTable) else source[start:stop]
        yield start, rows.detach().cpu()
