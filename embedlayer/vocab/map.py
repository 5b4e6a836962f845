"""Row maps: which old row each new row of a vocabulary is, and the tensors whose rows a map moves.

The three nouns of this package, and how they come together:

- A **map** says where each row comes from: new row `i` is old row `sources[i]`, or is initialised (`RowMap`). The same
  map moves the rows of the table, of the LM head, of its bias and of the optimizer's moments, and gives the new token
  IDs. A `TokenMap` says the same of tokens, from which the `RowMap` of tables with spare rows follows.
- An **edit** is what is requested (`EditRequest`): which tokens change, and how new rows are initialised. It does not
  depend on a model. For one model it becomes a `ModelEdit`, which `targets.apply_rows` applies to named tensors. There
  is one function for each target: `apply_to_module`, `apply_to_checkpoint`, `apply_to_run` and `apply_to_gguf`.
- A **receipt** (`Receipt`) is what happened: the row map, and which tokens are new, removed or merged. That of a live
  module also has the rows that the edit dropped, and fingerprints of all tensors. The undo of such an edit is the edit
  whose row map is the inverse one, and whose initialised rows are the dropped rows. `apply_to_module` applies it, and
  the fingerprints show that its result equals the tensors before the edit.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from embedlayer.core.block_sizes import TABLE_ROWS, block_size
from embedlayer.core.collectives import SINGLE_PROCESS, Collectives, RowPartition
from embedlayer.core.devices import device_kind
from embedlayer.core.errors import SizeError, TokenIdError
from embedlayer.core.partitioned import is_sharded, local_shard
from embedlayer.families.field_types import End
from embedlayer.formats.stored import StoredRows
from embedlayer.integrations.dtensor import dtensor_like, local_slices, shard_collectives
from embedlayer.io.safetensors_files import byte_chunks

NEW = -1
"""In `sources`: a row that is initialised."""

DROPPED = -1
"""In `new_ids`: an old row that is not kept."""


class RowMap:
    """Map new rows to old rows: new row `i` is old row `sources[i]`, or is initialised if that is -1.

    Args:
        sources: Old row of each new row, `(N,)` int64, or `NEW` (-1).
        old_size: Number of rows before the edit.

    Attributes:
        new_ids: New row of each old row, `(old_size,)` int64, or -1 if the old row is dropped. If an old row is
            copied to several new rows, the first of these.

    Raises:
        TokenIdError: A source is not an old row.

    Example:
        >>> row_map = RowMap(torch.tensor([2, 0, NEW]), old_size=3)
        >>> row_map.apply(torch.tensor([[1.0], [2.0], [3.0]])).flatten()
        tensor([3., 1., 0.])
        >>> row_map.new_ids.tolist(), row_map.dropped.tolist(), row_map.initialised.tolist()
        ([1, -1, 0], [1], [2])
    """

    def __init__(self, sources: Tensor, old_size: int) -> None:
        if not len(sources):
            raise SizeError("No token would be left: keep at least one.")
        low, high = torch.aminmax(sources)
        if low < NEW or high >= old_size:
            raise TokenIdError(f"The row map names rows {int(low)} to {int(high)}; old rows are 0..{old_size - 1}.")
        self.sources = sources
        self.old_size = old_size
        places = torch.where(sources == NEW, old_size, sources)
        first = torch.full((old_size + 1,), len(sources))  # of two copies of a row, the first has the old ID
        first.scatter_reduce_(0, places, torch.arange(len(sources)), "amin")
        self.new_ids = torch.where(first == len(sources), DROPPED, first)[:old_size]

    @property
    def size(self) -> int:
        """Return the number of rows after the edit, N."""
        return len(self.sources)

    @property
    def initialised(self) -> Tensor:
        """Return the row numbers of the new rows that have no old row, `(initialised rows,)` int64, ascending."""
        return (self.sources == NEW).nonzero().squeeze(1)

    @property
    def dropped(self) -> Tensor:
        """Return the row numbers of the old rows that no new row is taken from, `(dropped rows,)` int64, ascending."""
        return (self.new_ids == DROPPED).nonzero().squeeze(1)

    def token_ids(self, merged: Mapping[int, int]) -> Tensor:
        """Return a copy of `new_ids` in which each merged token has the new ID of the token that replaces it.

        Args:
            merged: From the old ID of each merged token to the new ID of its replacement.

        Returns:
            The new ID of each old ID, `(old_size,)` int64, or -1 for a removed token.
        """
        ids = self.new_ids.clone()
        ids[list(merged)] = torch.tensor([*merged.values()], dtype=ids.dtype)
        return ids

    def inverse(self) -> "RowMap":
        """Return the row map that undoes this one; it initialises the rows that this map drops."""
        return RowMap(self.new_ids, self.size)

    def apply(self, tensor: Tensor, *, padding: int = 0, collectives: Collectives = SINGLE_PROCESS) -> Tensor:
        """Return a copy of a tensor with new row `i` from old row `sources[i]`; initialised and padding rows are zero.

        If the rows are sharded, all ranks must call this: each rank requests its new rows from the ranks that store
        them.

        Args:
            tensor: `(old_size, ...)`, the rows of this rank, or a DTensor. Further rows are padding and are ignored.
            padding: Number of zero rows to append.
            collectives: The ranks over which the rows are sharded.

        Returns:
            `(N + padding, ...)`, or those of these rows that this rank stores, with the dtype and device of `tensor`.
        """
        old, new = self.partitions(tensor, padding, collectives)
        sources = F.pad(self.sources, (0, padding), value=NEW)
        tensor, device = local_shard(tensor.detach()), tensor.device
        moved = tensor.new_empty((len(new), *tensor.shape[1:]))
        # all ranks may request rows of one rank
        rows_at_once = max(block_size(TABLE_ROWS, device_kind(device)) // collectives.size, 1)
        for first in range(0, new.rows_per_rank, rows_at_once):
            wanted = [sources[new.slice_of(rank)][first:][:rows_at_once] for rank in range(collectives.size)]
            requested = [ids[(ids >= old.start) & (ids < old.stop)] - old.start for ids in wanted]
            places = (wanted[collectives.rank] != NEW).nonzero().squeeze(1)
            ranks = old.rank_of(wanted[collectives.rank][places])
            received = collectives.all_to_all(
                tensor.index_select(0, torch.cat(requested).to(device)),
                [len(ids) for ids in requested],
                torch.bincount(ranks, minlength=collectives.size).tolist(),
            )
            moved.index_copy_(0, (places[torch.argsort(ranks, stable=True)] + first).to(device), received)
        initialised = (sources[new.start : new.stop] == NEW).nonzero().squeeze(1)
        return moved.index_fill_(0, initialised.to(device), 0)

    def partitions(
        self, tensor: Tensor, padding: int = 0, collectives: Collectives = SINGLE_PROCESS
    ) -> tuple[RowPartition, RowPartition]:
        """Return which rows of a tensor this rank stores, before and after the row map; see `apply`."""
        old_rows = len(tensor) if is_sharded(tensor) else self.old_size
        return collectives.partition(old_rows), collectives.partition(self.size + padding)


def local_rows(rows: Tensor, partition: RowPartition) -> Tensor:
    """Return the position on this rank of each of `rows` that this rank stores; the others are left out."""
    numbers, is_local = partition.local(rows)
    return numbers[is_local]


def row_fingerprint(tensor: Tensor) -> str:
    """Return a hash of a tensor's values, dtype and shape, as hexadecimal text; the tensor is read in chunks."""
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    for chunk in byte_chunks(tensor):
        digest.update(chunk.numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True)
class RowTensor:
    """Describe a tensor that has one row for each token.

    Attributes:
        tensor: The tensor, the rows of this rank, or a DTensor. Padding rows may follow the rows of the tokens.
        axis: The axis of the tokens in `tensor`: 0 for rows, 1 for columns and for a bias `(1, V)`. The rows are those
            of `to_rows(tensor)`.
        end: Which initialisation computes new rows: `"table"` for the input table's, `"head"` for the output head's,
            `"per_layer"` for a per-layer table's, or `None` for none: new rows are those of `new_values` or `state_of`,
            or zero.
        padding: Number of zero rows that follow the rows of the tokens after the edit. If it is negative, so many rows
            are cut off: the undo of an edit that completed a table.
        collectives: The ranks over which the rows are sharded.
        encode: For rows that are stored as bytes: function that returns the bytes of new rows; else `None`.
        decode: For rows that are stored as bytes: function that returns the numbers of stored rows, in float32 or in a
            dtype that is its second argument; else `None`.
        new_values: For a tensor of numbers that no initialisation computes, such as compressed token IDs: function that
            returns the values of so many new tokens; else `None`.
        missing_row: Row that the model reads for tokens which the tensor lacks (Gemma 3n's per-layer table). An edit
            completes such a tensor: these tokens get copies of that row. `None` if every token has a row.
        parameter: For the state of an optimizer: name of the parameter, whose new rows determine those of the state.
        state_of: For the state of an optimizer: function that returns the state of so many new rows of the parameter.
    """

    tensor: Tensor
    end: End | None = None
    padding: int = 0
    collectives: Collectives = SINGLE_PROCESS
    encode: Callable[[Tensor], Tensor] | None = None
    decode: Callable[..., Tensor] | None = None
    new_values: Callable[[int], Tensor] | None = None
    missing_row: int | None = None
    axis: int = 0
    parameter: str = ""
    state_of: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def of_stored(cls, stored: StoredRows, end: End | None) -> "RowTensor":
        """Return the bytes of stored rows; new rows are quantised with the numbers that all rows share."""
        return cls(
            stored.row_bytes,
            end,
            encode=lambda values: stored.quantised(values.to(stored.device)).row_bytes,
            decode=lambda row_bytes, dtype=torch.float32: stored.of_bytes(row_bytes).dequantise(dtype),
        )

    def to_rows(self, tensor: Tensor) -> Tensor:
        """Return the argument with the axis of the tokens first; of `(1, V)` the result is `(V,)`.

        The argument has the layout of the attribute `tensor`: it is that tensor, a part of it, or its gradient.
        """
        if self.axis == 0:
            return tensor
        rows = tensor.movedim(self.axis, 0)
        return rows.flatten() if rows[:1].numel() == 1 else rows

    def completing(self, row_map: "RowMap") -> "RowMap":
        """Return the row map in which tokens that the tensor lacks have `missing_row` as their old row.

        If the tensor lacks no token, the result is `row_map` itself.
        """
        if self.missing_row is None or len(self.tensor) >= row_map.old_size:
            return row_map
        count = len(self.tensor)
        return RowMap(torch.where(row_map.sources < count, row_map.sources, self.missing_row), count)

    @property
    def readers(self) -> Collectives:
        """Return the ranks that together have all rows, and all columns if these are sharded too."""
        return shard_collectives(self.tensor) if is_sharded(self.tensor) else self.collectives

    @property
    def columns(self) -> slice:
        """Return which columns this rank stores: all, unless the tensor is a DTensor that is sharded by columns."""
        if self.axis or not is_sharded(self.tensor) or self.tensor.dim() < 2:
            return slice(None)
        return local_slices(self.tensor)[1]

    @property
    def row_shape(self) -> list[int]:
        """Return the shape of one row, with the columns of all ranks."""
        return [size for axis, size in enumerate(self.tensor.shape) if axis != self.axis]

    @property
    def local(self) -> Tensor:
        """Return the rows that this rank stores, without gradient: the shard of a DTensor, else `to_rows(tensor)`."""
        return self.to_rows(local_shard(self.tensor.detach()))

    def partitions(self, row_map: RowMap) -> tuple[RowPartition, RowPartition]:
        """Return which rows this rank stores before and after an edit; see `RowMap.partitions`."""
        return row_map.partitions(self.tensor, self.padding, self.collectives)

    def with_rows(self, local: Tensor, row_map: RowMap) -> Tensor:
        """Return the tensor after an edit, from the rows of this rank: a DTensor if the tensor is one."""
        if is_sharded(self.tensor):
            return dtensor_like(self.tensor, local, row_map.size + self.padding)
        if self.axis == 0:
            return local
        return local.reshape(len(local), *self.row_shape).movedim(0, self.axis).contiguous()


RowValues = Callable[[RowTensor], Iterable[Tensor]]
"""Computes the initialised rows of a tensor, the same on all ranks, in chunks of consecutive rows."""
