"""Apply an edit to named tensors: what every target has in common, and what the edit of a target changed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from embedlayer.census.files import FileRule
from embedlayer.core.collectives import SINGLE_PROCESS, Collectives
from embedlayer.core.errors import CheckpointError, ShapeError
from embedlayer.io.files import JsonObject
from embedlayer.vocab.edit import ModelEdit
from embedlayer.vocab.map import RowMap, RowTensor, local_rows, row_fingerprint


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
class ModelResult:
    """Store what an edit changed in one model; except for `settings`, keys are the names of the model's tensors.

    Attributes:
        edit: The edit that was applied.
        tensors: The new tensors.
        dropped_rows: The rows that the edit dropped and that this rank stored, on the CPU.
        before: Fingerprints of the old tensors, as `row_fingerprint` returns them.
        after: Fingerprints of the new tensors.
        settings: Sizes and IDs of the modules before the edit, by name. For a checkpoint only the numbers of rows of
            per-layer tables that lacked tokens; for a GGUF file empty.
    """

    edit: ModelEdit
    tensors: dict[str, Tensor] = field(default_factory=dict)
    dropped_rows: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    settings: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class EditResult:
    """Store what an edit changed in its target: a live module, a folder or a file.

    Attributes:
        models: The result for each model: the key is "" for a module, layer, checkpoint or file, and `"run/"` for the
            model of a run.
        changed: For a folder: names of the files that the edit changes, adds or removes, without weights.
        left_out: For a folder: the files that hold values by token and cannot be edited, by path, each with its rule.
            They are not in the copy.
        stored: For a GGUF file, and for quantised rows of a folder: from the name of each edited tensor to how its rows
            are stored.
        extra_space_decoded: For a GGUF file: new IDs of the added tokens around which text gets an extra space when it
            is decoded from the file.
    """

    models: dict[str, ModelResult]
    changed: list[str] = field(default_factory=list)
    left_out: dict[str, FileRule] = field(default_factory=dict)
    stored: dict[str, StoredTypes] = field(default_factory=dict)
    extra_space_decoded: tuple[int, ...] = ()


def apply_row_map(
    tensors: Mapping[str, RowTensor], edit: ModelEdit, collectives: Collectives = SINGLE_PROCESS
) -> ModelResult:
    """Return new tensors whose rows are moved and initialised as an edit says; the old tensors are not changed.

    If rows are sharded, all ranks in `collectives` must call this. Initialised rows get the values that rank 0
    computes. A parameter must come before its optimizer's state in `tensors`, and a table or head before its bias.

    Raises:
        CheckpointError: For an undo: the edit changed other tensors than these, the result does not have the expected
            fingerprints, or the rows to restore are missing or have another shape.
        ShapeError: `edit.values` computes too few rows, or raises it.
        PeerError: Another rank raised an error.
        SizeError: A rank would store no row.
    """
    row_map, result = edit.row_map, ModelResult(edit)
    with collectives.all_or_none():
        result.before.update({name: row_fingerprint(rows.local) for name, rows in tensors.items()})
        _check_names(edit.after, tensors)
        if edit.restored_rows is not None:
            _check_restored_rows(tensors, edit, edit.restored_rows)
    for name, rows in tensors.items():
        before, after = rows.partitions(row_map)
        old = rows.tensor if rows.axis == 0 else rows.local
        new = None if edit.written is None else edit.written(rows)
        if new is None:
            new = rows.completing(row_map).apply(old, padding=rows.padding, collectives=rows.collectives)
        if edit.restored_rows is not None:
            places = local_rows(row_map.initialised, after)
            new.index_copy_(0, places.to(new.device), edit.restored_rows[name].to(new.device, new.dtype))
        elif rows.new_values is not None:
            _fill(new, rows, row_map, [rows.new_values(len(row_map.initialised))], collectives)
        elif edit.values is not None and rows.state_of is not None:
            places = local_rows(row_map.initialised, after).to(new.device)
            if len(places):
                started = rows.state_of(result.tensors[rows.parameter].index_select(0, places))
                new.index_copy_(0, places, started.to(new.device, new.dtype))
        elif edit.values is not None and rows.end is not None and len(row_map.initialised):
            _fill(new, rows, row_map, edit.values(rows), collectives)
        dropped = local_rows(row_map.dropped, before)
        if rows.missing_row is not None:
            dropped = dropped[dropped < len(rows.local)]
        result.tensors[name] = new
        result.dropped_rows[name] = rows.local.index_select(0, dropped.to(new.device)).cpu()
        result.after[name] = row_fingerprint(new)
    with collectives.all_or_none():
        _check_fingerprints(edit.after, result.after)
    return result


def _fill(new: Tensor, old: RowTensor, row_map: RowMap, chunks: Iterable[Tensor], everyone: Collectives) -> None:
    """Write initialised rows into `new` in place, with the values of rank 0; all ranks must call this.

    `new` is the tensor after the edit, or the rows and columns of this rank; each rank writes only these. `old` is the
    tensor before it. `chunks` has the values of all initialised rows of the map, in chunks of consecutive rows.

    Raises:
        ShapeError: There are too few values.
    """
    done, partition = 0, old.partitions(row_map)[1]
    for values in chunks:
        values = everyone.broadcast(values.detach().to(new.device, new.dtype).contiguous())
        rows, done = row_map.initialised[done : done + len(values)], done + len(values)
        places, is_local = partition.local(rows)
        new.index_copy_(0, places[is_local].to(new.device), values[is_local.to(new.device)][..., old.columns])
    if done != len(row_map.initialised):
        raise ShapeError(
            f"{done} rows were computed for {len(row_map.initialised)} new tokens: a RowInit must compute one for each."
        )


def _check_restored_rows(tensors: Mapping[str, RowTensor], edit: ModelEdit, restored: Mapping[str, Tensor]) -> None:
    """Check for an undo that the receipt has the dropped rows of every tensor, in the right shape.

    The row map of `edit`, the undo, initialises the rows that the edit dropped, which `restored` has by the names of
    tensors.
    """
    for name, rows in tensors.items():
        count = len(local_rows(edit.row_map.initialised, rows.partitions(edit.row_map)[1]))
        saved, wanted = restored.get(name), (count, *rows.local.shape[1:])
        if saved is None or tuple(saved.shape) != wanted:
            raise CheckpointError(
                f"The receipt has {'no rows' if saved is None else tuple(saved.shape)} of {name} where the dropped "
                f"rows are {wanted}: it is damaged. Nothing was changed."
            )


def _check_names(expected: Mapping[str, str] | None, tensors: Mapping[str, RowTensor]) -> None:
    """Check for an undo that the tensors are those that the edit changed. `None` skips the check."""
    if expected is None:
        return
    missing = next((name for name in sorted(expected.keys() - tensors.keys()) if name.startswith("optimizer.")), None)
    if missing is not None:
        raise CheckpointError(
            f"The edit also changed the optimizer's state ({missing}): pass that optimizer, undo(..., optimizer=...), "
            f"with the state that it had after the edit. Nothing was changed."
        )
    different = sorted(expected.keys() ^ tensors.keys())
    if different and all(name.startswith("optimizer.") for name in different):
        raise CheckpointError(
            f"The optimizer got its state after the edit ({', '.join(different[:4])}), so the receipt has no rows of "
            f"it. If it trained new rows alone, undo without optimizer=..., and build a new optimizer. Nothing was "
            f"changed."
        )
    if different:
        raise CheckpointError(
            f"The receipt belongs to another model: only one of them has {', '.join(different[:4])}. Nothing was "
            f"changed."
        )


def _check_fingerprints(expected: Mapping[str, str] | None, fingerprints: Mapping[str, str]) -> None:
    """Check that tensors have the expected fingerprints, which are hashes by `row_fingerprint`.

    They are by names of tensors; `None` skips the check.
    """
    different = [] if expected is None else sorted(name for name in expected if expected[name] != fingerprints[name])
    if different:
        raise CheckpointError(
            f"The receipt belongs to another result: rows of {', '.join(different[:4])} that the edit kept hold other "
            f"values. Undo an edit before kept rows are trained or edited again; new rows may have been trained "
            f"(add_tokens(train_only_new=True)). Nothing was changed."
        )
