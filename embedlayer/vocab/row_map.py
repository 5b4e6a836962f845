"""Row maps: which old row each new row of a vocabulary is, and the function that applies a map to named tensors.

The terms of this package:

- A **request** (`EditRequest`) says which tokens to add, remove, keep, merge or reorder, and how new rows are
  initialised. It does not depend on a model.
- A **row map** (`RowMap`) says that new row `i` is old row `sources[i]`, or is initialised. The same map moves the
  rows of the table, of the LM head, of its bias and of the optimizer's moments, and gives the new token IDs.
- An **edit** (`RowEdit`) is a row map with the values of the initialised rows, ready for one set of tensors.
  `apply_row_map` applies it to a mapping from names to `RowTensor`s. It returns new tensors and changes nothing. Live
  modules (`live_modules`) and folders (`checkpoint_folders`, `run_folders`) only read the mapping and write the result.
- A **receipt** (`Receipt`) records the row map, the rows that the edit dropped, and fingerprints of all tensors.
- An **undo** is the edit whose row map is the inverse one, and whose initialised rows are the dropped rows of the
  receipt. The same functions apply it. The fingerprints show that its result equals the tensors before the edit.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from embedlayer.block_sizes import TABLE_ROWS, block_size
from embedlayer.collectives import SINGLE_PROCESS, Collectives, RowPartition
from embedlayer.distributed.dtensors import dtensor_like, is_dtensor, to_local
from embedlayer.errors import CheckpointError, ShapeError, SizeError, TokenIdError
from embedlayer.families.records import End
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
        SizeError: `sources` is empty.

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
            raise TokenIdError(
                f"The row map names old rows {int(low)} to {int(high)}, and there are {old_size} old rows "
                f"(0..{old_size - 1})."
            )
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
        tensor, device = to_local(tensor.detach()), tensor.device
        moved = tensor.new_empty((len(new), *tensor.shape[1:]))
        rows_at_once = max(
            block_size(TABLE_ROWS, device.type) // collectives.size, 1
        )  # all ranks may request rows of one rank
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
        """Return which rows of a tensor this rank stores, before and after the row map; see `apply` for the arguments.

        Raises:
            SizeError: A rank would store no row.
        """
        old_rows = len(tensor) if is_dtensor(tensor) else self.old_size
        return collectives.partition(old_rows), collectives.partition(self.size + padding)


def local_rows(rows: Tensor, partition: RowPartition) -> Tensor:
    """Return the position on this rank of each of `rows` that this rank stores; the others are left out.

    Args:
        rows: Row numbers in the whole tensor.
        partition: The rows that this rank stores.
    """
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
            `"per_layer"` for a per-layer table's, or `None` for zeros, as in the optimizer's state.
        padding: Number of zero rows that follow the rows of the tokens after the edit. If it is negative, so many rows
            are cut off: the undo of an edit that completed a table.
        collectives: The ranks over which the rows are sharded.
        encode: For rows that are stored as bytes: function that returns the bytes of new rows; else `None`.
        decode: For rows that are stored as bytes: function that returns the numbers of stored rows; else `None`.
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
    decode: Callable[[Tensor], Tensor] | None = None
    new_values: Callable[[int], Tensor] | None = None
    missing_row: int | None = None
    axis: int = 0
    parameter: str = ""
    state_of: Callable[[Tensor], Tensor] | None = None

    def to_rows(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the layout of `tensor`, as its gradient, with the tokens first: `(V,)` of `(1, V)`."""
        if self.axis == 0:
            return tensor
        rows = tensor.movedim(self.axis, 0)
        return rows.flatten() if rows[:1].numel() == 1 else rows

    def from_rows(self, rows: Tensor) -> Tensor:
        """Return rows in the layout of `tensor`: the inverse of `to_rows`, for another number of tokens too."""
        if self.axis == 0:
            return rows
        others = [*self.tensor.shape]
        del others[self.axis]
        return rows.reshape(len(rows), *others).movedim(0, self.axis).contiguous()

    def completing(self, row_map: "RowMap") -> "RowMap":
        """Return the row map in which tokens that the tensor lacks have `missing_row` as their old row.

        If the tensor lacks no token, the result is `row_map` itself.
        """
        if self.missing_row is None or len(self.tensor) >= row_map.old_size:
            return row_map
        count = len(self.tensor)
        return RowMap(torch.where(row_map.sources < count, row_map.sources, self.missing_row), count)

    @property
    def local(self) -> Tensor:
        """Return the rows that this rank stores, without gradient: the shard of a DTensor, else `to_rows(tensor)`."""
        return self.to_rows(to_local(self.tensor.detach()))

    def partitions(self, row_map: RowMap) -> tuple[RowPartition, RowPartition]:
        """Return which rows this rank stores before and after an edit; see `RowMap.partitions`."""
        return row_map.partitions(self.tensor, self.padding, self.collectives)

    def with_rows(self, local: Tensor, row_map: RowMap) -> Tensor:
        """Return the tensor after an edit, from the rows of this rank: a DTensor if the tensor is one."""
        if is_dtensor(self.tensor):
            return dtensor_like(self.tensor, local, row_map.size + self.padding)
        return self.from_rows(local)


RowValues = Callable[[RowTensor], Iterable[Tensor]]
"""Computes the initialised rows of a tensor, the same on all ranks, in chunks of consecutive rows."""


@dataclass(frozen=True)
class RowEdit:
    """Describe an edit, or the undo of an edit, that `apply_row_map` can apply to named tensors.

    A fingerprint is the hash that `row_fingerprint` returns.

    Attributes:
        row_map: The old row of each new row.
        values: For an edit: function that yields the initialised rows of a tensor whose `end` is not `None`.
        restored_rows: For an undo: from each tensor's name to the initialised rows that this rank stores.
        after: For an undo: from each tensor's name to the expected fingerprint of the result. The rows that the undo
            drops are not compared: rows that an edit added may have been trained since.
    """

    row_map: RowMap
    values: RowValues | None = None
    restored_rows: Mapping[str, Tensor] | None = None
    after: Mapping[str, str] | None = None


@dataclass(frozen=True)
class RowResult:
    """Store the result of an edit of named tensors; the keys of each dictionary are the tensors' names.

    Attributes:
        tensors: The new tensors.
        dropped_rows: The rows that the edit dropped and that this rank stored, on the CPU.
        before: Fingerprints of the old tensors, as `row_fingerprint` returns them.
        after: Fingerprints of the new tensors.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    dropped_rows: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)


def apply_row_map(
    tensors: Mapping[str, RowTensor], edit: RowEdit, collectives: Collectives = SINGLE_PROCESS
) -> RowResult:
    """Return new tensors whose rows are moved and initialised as an edit says; the old tensors are not changed.

    If rows are sharded, all ranks must call this.

    Args:
        tensors: The tensors by name.
        edit: The old row of each new row, and the values of initialised rows.
        collectives: All ranks that apply the edit. Initialised rows get the values that rank 0 computes.

    Raises:
        CheckpointError: For an undo: the edit changed other tensors than these, the result does not have the expected
            fingerprints, or the rows to restore are missing or have another shape.
        ShapeError: `edit.values` computes too few or too many rows.
        PeerError: Another rank raised an error.
    """
    row_map, result = edit.row_map, RowResult()
    with collectives.all_or_none():
        result.before.update({name: row_fingerprint(rows.local) for name, rows in tensors.items()})
        _check_names(edit.after, tensors)
        if edit.restored_rows is not None:
            _check_restored_rows(tensors, edit, edit.restored_rows)
    for name, rows in tensors.items():
        before, after = rows.partitions(row_map)
        old = rows.tensor if rows.axis == 0 else rows.local
        new = rows.completing(row_map).apply(old, padding=rows.padding, collectives=rows.collectives)
        if edit.restored_rows is not None:
            places = local_rows(row_map.initialised, after)
            new.index_copy_(0, places.to(new.device), edit.restored_rows[name].to(new.device, new.dtype))
        elif rows.new_values is not None:
            _fill(new, row_map, after, [rows.new_values(len(row_map.initialised))], collectives)
        elif edit.values is not None and rows.state_of is not None:
            places = local_rows(row_map.initialised, after).to(new.device)
            if len(places):
                started = rows.state_of(result.tensors[rows.parameter].index_select(0, places))
                new.index_copy_(0, places, started.to(new.device, new.dtype))
        elif edit.values is not None and rows.end is not None and len(row_map.initialised):
            _fill(new, row_map, after, edit.values(rows), collectives)
        dropped = local_rows(row_map.dropped, before)
        if rows.missing_row is not None:
            dropped = dropped[dropped < len(rows.local)]
        result.tensors[name] = new
        result.dropped_rows[name] = rows.local.index_select(0, dropped.to(new.device)).cpu()
        result.after[name] = row_fingerprint(new)
    with collectives.all_or_none():
        _check_fingerprints(edit.after, result.after)
    return result


def _fill(
    new: Tensor, row_map: RowMap, partition: RowPartition, chunks: Iterable[Tensor], everyone: Collectives
) -> None:
    """Write initialised rows into `new` in place, with the values of rank 0; all ranks must call this.

    Args:
        new: The tensor to write to, or the rows of this rank. Each rank writes only the rows that it stores.
        row_map: The row map, which says which rows are initialised.
        partition: The rows that this rank stores after the edit.
        chunks: The values of all initialised rows, in chunks of consecutive rows.
        everyone: The ranks that receive the values of rank 0.

    Raises:
        ShapeError: `chunks` has too few or too many rows.
    """
    done = 0
    for values in chunks:
        values = everyone.broadcast(values.detach().to(new.device, new.dtype).contiguous())
        rows, done = row_map.initialised[done : done + len(values)], done + len(values)
        places, is_local = partition.local(rows)
        new.index_copy_(0, places[is_local].to(new.device), values[is_local.to(new.device)])
    if done != len(row_map.initialised):
        raise ShapeError(
            f"{done} rows were computed for {len(row_map.initialised)} new tokens: a RowInit must compute one for each."
        )


def _check_restored_rows(tensors: Mapping[str, RowTensor], edit: RowEdit, restored: Mapping[str, Tensor]) -> None:
    """Check for an undo that the receipt has the dropped rows of every tensor, in the right shape.

    Args:
        tensors: The tensors by name, before the undo.
        edit: The undo, whose row map initialises the rows that the edit dropped.
        restored: From each tensor's name to the dropped rows of the receipt.

    Raises:
        CheckpointError: Rows of a tensor are missing or have another shape.
    """
    for name, rows in tensors.items():
        count = len(local_rows(edit.row_map.initialised, rows.partitions(edit.row_map)[1]))
        found, wanted = restored.get(name), (count, *rows.local.shape[1:])
        if found is None or tuple(found.shape) != wanted:
            raise CheckpointError(
                f"The receipt has {'no rows' if found is None else tuple(found.shape)} of {name} where the dropped "
                f"rows are {wanted}: it is damaged. Nothing was changed."
            )


def _check_names(expected: Mapping[str, str] | None, tensors: Mapping[str, RowTensor]) -> None:
    """Check for an undo that the tensors are those that the edit changed.

    Args:
        expected: The edited tensors, by name; `None` skips the check.
        tensors: The tensors by name.

    Raises:
        CheckpointError: A tensor is missing or unexpected.
    """
    if expected is None:
        return
    missing = next((name for name in sorted(expected.keys() - tensors.keys()) if name.startswith("optimizer.")), None)
    if missing is not None:
        raise CheckpointError(
            f"The edit also changed the optimizer's state ({missing}): pass that optimizer, undo(..., optimizer=...), "
            f"with the state that it had after the edit. Nothing was changed."
        )
    if different := sorted(expected.keys() ^ tensors.keys()):
        raise CheckpointError(
            f"The receipt belongs to another model: only one of them has {', '.join(different[:4])}. Nothing was "
            f"changed."
        )


def _check_fingerprints(expected: Mapping[str, str] | None, found: Mapping[str, str]) -> None:
    """Check that tensors have the expected fingerprints, which are hashes by `row_fingerprint`.

    Args:
        expected: From each tensor's name to the expected fingerprint; `None` skips the check.
        found: From each edited tensor's name to its fingerprint.

    Raises:
        CheckpointError: A tensor has other values.
    """
    different = [] if expected is None else sorted(name for name in expected if expected[name] != found[name])
    if different:
        raise CheckpointError(
            f"The receipt belongs to another result: rows of {', '.join(different[:4])} that the edit kept hold other "
            f"values. Undo an edit before kept rows are trained or edited again; new rows may have been trained "
            f"(add_tokens(train_only_new=True)). Nothing was changed."
        )
