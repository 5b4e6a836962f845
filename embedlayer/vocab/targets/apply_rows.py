"""Apply an edit to named tensors: what every target has in common, and what the edit of a target changed.

Rows of a whole table can also replace those of a file: rows that are equal keep their bytes, others are quantised.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.core.block_sizes import TABLE_ROWS
from embedlayer.core.collectives import SINGLE_PROCESS, Collectives
from embedlayer.core.errors import CheckpointError, ShapeError
from embedlayer.families.left_out_files import FileRule
from embedlayer.tables.lookup import LookupTable
from embedlayer.vocab.edit import ModelEdit
from embedlayer.vocab.map import NEW, RowMap, RowTensor, local_rows, row_fingerprint


class StoredTypes(NamedTuple):
    """How a GGUF file or a folder stores the rows of a tensor before and after an edit.

    Attributes:
        old_type: The type before the edit, such as `"Q4_K"` or `"MLX (bits 4, group_size 64, scale_dtype BF16)"`.
        new_type: The type after it. If it is `old_type`, kept rows have the same bytes; else all rows are requantised.
        largest_change: Largest absolute change of a number in a kept row; numbers that are not finite are left out.
    """

    old_type: str
    new_type: str
    largest_change: float

    @property
    def is_requantised(self) -> bool:
        """Return whether kept rows were written in another type, so that their numbers changed."""
        return self.old_type != self.new_type

    def __str__(self) -> str:
        if not self.is_requantised:
            return f"{self.new_type}, unchanged bit for bit"
        return f"{self.old_type} -> {self.new_type}, numbers changed by up to {self.largest_change:.3g}"


@dataclass(frozen=True)
class EditResult:
    """Store what an edit changed in a folder or a file."""

    edit: ModelEdit
    left_out: dict[str, FileRule] = field(default_factory=dict)
    stored: dict[str, StoredTypes] = field(default_factory=dict)
    extra_space_decoded: tuple[int, ...] = ()


def apply_row_map(
    tensors: Mapping[str, RowTensor], edit: ModelEdit, collectives: Collectives = SINGLE_PROCESS
) -> dict[str, Tensor]:
    """Return new tensors whose rows are moved and initialised as an edit says; the old tensors are not changed."""
    # All ranks in `collectives` must call this. In `tensors` a parameter must come before its optimizer's state, and a
    # table or head before its bias. Initialised rows get rank 0's values.
    row_map, undoes, result = edit.row_map, edit.undoes, dict[str, Tensor]()
    if undoes is not None:
        with collectives.all_or_none():
            if different := sorted(undoes.before.keys() ^ tensors.keys()):
                raise CheckpointError(f"Edit and undo differ in {different[:4]}: pass the edited model and optimizer.")
    for name, rows in tensors.items():
        after = rows.partitions(row_map)[1]
        old = rows.tensor if rows.axis == 0 else rows.local
        new = None if edit.written is None else edit.written(rows)
        if new is None:
            new = rows.completing(row_map).apply(old, padding=rows.padding, collectives=rows.collectives)
        if undoes is not None:
            places = local_rows(row_map.initialised, after)
            new.index_copy_(0, places.to(new.device), undoes.dropped_rows[name].to(new.device, new.dtype))
        elif rows.new_values is not None:
            _fill(new, rows, row_map, [rows.new_values(len(row_map.initialised))], collectives)
        elif edit.values is not None and rows.state_of is not None:
            places = local_rows(row_map.initialised, after).to(new.device)
            if len(places):
                started = rows.state_of(result[rows.parameter].index_select(0, places))
                new.index_copy_(0, places, started.to(new.device, new.dtype))
        elif edit.values is not None and rows.end is not None and len(row_map.initialised):
            _fill(new, rows, row_map, edit.values(rows), collectives)
        result[name] = new
    if undoes is not None:
        with collectives.all_or_none():
            if different := sorted(name for name in result if undoes.before[name] != row_fingerprint(result[name])):
                raise CheckpointError(f"Kept rows of {different[:4]} changed after the edit: undo before that.")
    return result


def _fill(new: Tensor, old: RowTensor, row_map: RowMap, chunks: Iterable[Tensor], everyone: Collectives) -> None:
    """Write initialised rows into `new` in place, with the values of rank 0; all ranks must call this."""
    done, partition = 0, old.partitions(row_map)[1]
    for values in chunks:
        values = everyone.broadcast(values.detach().to(new.device, new.dtype).contiguous())
        rows, done = row_map.initialised[done : done + len(values)], done + len(values)
        places, is_local = partition.local(rows)
        new.index_copy_(0, places[is_local].to(new.device), values[is_local.to(new.device)][..., old.columns])
    if done != len(row_map.initialised):
        raise ShapeError(f"A RowInit computed {done} rows for {len(row_map.initialised)} new tokens.")


def token_sources(old: Tokenizer, new: Tokenizer, old_rows: int, rows: int) -> Int[Tensor, " rows"]:
    """Return for each row of a table the row of the same token in a file, or `NEW` if the file has no such token."""
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
    """Return for each row of a table whether it equals the row of the same token in a file."""
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
    """Return the rows of a table as a file stores them: those of the file where they are unchanged, else encoded."""
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
