"""Rows of a trainable table and of its optimizer state in the files of a folder, safe against killed processes.

```
DIR/
  table.json                  sizes and options of the table
  weight.safetensors          the rows
  state/exp_avg.0.safetensors one file for each array of optimizer state; other files in state/ are deleted
  undo.log                    old contents of the rows that changed since the last checkpoint
  open.json                   exists while a process has the folder open, and after it was killed
  closed.json                 size of the log, in a folder that was closed
```

Rows are changed in the files themselves, through shared memory maps. What a process has written there survives its end,
because the pages belong to the system. Before a row is changed for the first time after a checkpoint, its old contents
go to the log; `RowFolder.resume` writes them back.

A checkpoint begins with its number and state in the log, and is completed by an empty log. In between, and after an
error in between, the caller may have saved this number or not. So the rows can be rolled back to both checkpoints until
a later one is completed, and no number is given out twice.
"""

import base64
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from math import prod
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from embedlayer.errors import CheckpointError, FileError, SizeError, StaleRowsError
from embedlayer.forks import BackgroundThread, lock_held_at_forks
from embedlayer.io.files import JsonObject, create_folder, file_errors, read_fields, write_json
from embedlayer.io.json_fields import Count, Range, Step, check_fields
from embedlayer.io.locks import LOCK, FileLock
from embedlayer.io.mapped_rows import MappedRows, ResidentLimit
from embedlayer.io.safetensors_files import CHUNK_BYTES, DTYPE_NAMES, DTYPES, create_tensor_file, read_header
from embedlayer.io.undo_log import LogContent, UndoLog, check_rows, read_log, roll_back
from embedlayer.io.weight_files import is_plain_name
from embedlayer.row_sparse.storage import RowStorage

FORMAT_VERSION = 1
TABLE, WEIGHT, LOG, STATE = "table.json", "weight.safetensors", "undo.log", "state"
OPEN, CLOSED = "open.json", "closed.json"
RESIDENT_BYTES = 1 << 30
"""Default of the resident memory of a trainable table: 1 GiB."""


class TableFields(TypedDict):
    """Type of the content of `table.json`."""

    format_version: int
    vocab_size: Annotated[int, Range(1)]
    embed_dim: Annotated[int, Range(1)]
    dtype: str
    padding_idx: int | None
    scale: float | None
    init_std: float


class OpenFields(TypedDict):
    """Type of the content of `open.json`: where and since when the folder is open, and the largest number given out."""

    inode: int
    boot: str
    last_number: Count


class ClosedFields(TypedDict):
    """Type of the content of `closed.json`: bytes of the log."""

    log_bytes: Count


class StateFields(TypedDict):
    """Type of an array of optimizer state in a log's state: its file, number of columns and data type."""

    file: str
    width: int | None
    dtype: str


class PendingUpdatesFields(TypedDict):
    """Type of the JSON values that a checkpoint stores for the pending updates of one row-sparse table.

    The tensors of the pending updates are stored separately.
    """

    start: NotRequired[Step]
    betas: NotRequired[list[Annotated[float, Range(0, 1)]]]
    applied_step: NotRequired[Step]
    rounding_seed: NotRequired[Count]


class CheckpointFields(TypedDict):
    """Type of the state that a log has for a checkpoint.

    `last_number` is the largest that was given out to a checkpoint. `arrays` are those that existed then, by name.
    `updates` are the numbers of the pending updates, and `tensors` their small tensors.
    """

    generation: Count
    last_number: Count
    arrays: JsonObject
    updates: NotRequired[PendingUpdatesFields]
    tensors: NotRequired[JsonObject]


class RowFolder(RowStorage):
    """The rows of a table and of its optimizer state, in the files of a folder that this process trains.

    Create one with `RowFolder.create` or `RowFolder.resume`.

    Args:
        path: The folder.
        fields: Content of its `table.json`.
        lock: The acquired lock of the folder.
        max_resident_bytes: Limit of resident memory of all its files; `None` for no limit.

    Attributes:
        fields: Sizes and options of the table.
        weight: The rows over the mapped memory, `(V, D)`.
        updates: Numbers and tensors of the pending updates at the last checkpoint, after `resume`; else `None`.
        lock: Lock of the rows and their state. The table's `PendingUpdates`, once there is one, has the same lock.
    """

    def __init__(self, path: Path, fields: TableFields, lock: FileLock, *, max_resident_bytes: int | None) -> None:
        self.path, self.fields = path, fields
        self.limit = ResidentLimit(max_resident_bytes)
        self.lock = lock_held_at_forks()
        self.updates: tuple[JsonObject, dict[str, Tensor]] | None = None
        self._lock, self._process = lock, os.getpid()
        self._log: UndoLog | None = None
        self._arrays: dict[str, tuple[StateFields, MappedRows, Tensor]] = {}
        self._restored: set[str] = set()
        self._logged: list[Tensor] = []
        self._kept: set[str] = set()  # files of the arrays of all checkpoints in the log
        self._last_number = 0
        self._saving = False
        self._thread = BackgroundThread("embedlayer-prefetch")
        info = read_header(path / WEIGHT).tensors.get("weight")
        dtype = DTYPES[fields["dtype"]]
        if info is None or info.shape != self.shape(fields["embed_dim"]) or info.torch_dtype != dtype:
            raise CheckpointError(
                f"{path / WEIGHT} is not the table of {fields['vocab_size']:,} x {fields['embed_dim']:,} "
                f"{fields['dtype']} numbers that {path / TABLE} describes: the files do not belong together."
            )
        self._weight = info.map_rows(writable=True, limit=self.limit)
        self.weight = self._weight.view(dtype, *info.shape)

    @classmethod
    def create(
        cls,
        path: Path | str,
        fields: TableFields,
        initialize: Callable[[Tensor], object],
        *,
        max_resident_bytes: int | None,
    ) -> "RowFolder":
        """Create the files of a table in a folder, and open them.

        Args:
            path: The folder, created if missing.
            fields: Sizes and options of the table.
            initialize: Function that writes the first rows into a tensor of zeros, `(V, D)`.
            max_resident_bytes: As in the constructor.

        Raises:
            FileError: The folder holds a table already or cannot be written, or the table does not fit on the disk.
        """
        path = create_folder(Path(path).absolute())
        if taken := [name for name in (TABLE, WEIGHT, STATE) if (path / name).exists()]:
            raise FileError(
                f"{path} already holds {taken[0]}: continue with MappedEmbedding.resume, or choose another folder."
            )
        lock = _lock_of(path)
        try:
            shape = (fields["vocab_size"], fields["embed_dim"])
            create_tensor_file(path / WEIGHT, "weight", shape, DTYPES[fields["dtype"]])
            try:
                folder = cls(path, fields, lock, max_resident_bytes=max_resident_bytes)
                folder._mark_open()
                initialize(folder.weight)
                folder.limit.release()
                folder._begin({"generation": 0, "arrays": {}})
                write_json(path / TABLE, {**fields})  # last: a folder with it is complete
            except BaseException:
                for name in (WEIGHT, LOG, OPEN):
                    (path / name).unlink(missing_ok=True)
                raise
        except BaseException:
            _unlock(lock)
            raise
        return folder

    @classmethod
    def resume(cls, path: Path | str, generation: int | None = None, *, max_resident_bytes: int | None) -> "RowFolder":
        """Open the files of a table as they were at a checkpoint: what was changed since is rolled back.

        Args:
            path: The folder.
            generation: Number of the checkpoint; `None` for the last that was completed.
            max_resident_bytes: As in the constructor.

        Raises:
            FileError: The folder is missing, read-only or in use.
            CheckpointError: The folder was copied while it was open, its files are damaged or do not belong together,
                or it is not at this generation.
        """
        path = Path(path).absolute()
        fields = read_table_fields(path)
        lock = _lock_of(path)
        try:
            content, last_number = _read_content(path)
            place = _place_in_log(path, content, generation)
            state = content.checkpoints[place].state
            folder = cls(path, fields, lock, max_resident_bytes=max_resident_bytes)
            folder._open_arrays(state["arrays"])
            folder._last_number = last_number
            folder._roll_back(content, place)
            folder._begin(state)
            if "updates" in state:
                tensors = {name: _decode(each) for name, each in state["tensors"].items()}
                folder.updates = state["updates"], tensors
        except BaseException:
            _unlock(lock)
            raise
        return folder

    def shape(self, width: int | None) -> tuple[int, ...]:
        """Return the shape of an array with `width` numbers, or for `None` one number, for each row."""
        rows = self.fields["vocab_size"]
        return (rows,) if width is None else (rows, width)

    def _open_arrays(self, arrays: JsonObject) -> None:
        """Map the arrays of a checkpoint's state, which the next `new_state` of each name returns.

        Raises:
            FileError: A file is missing or read-only.
            CheckpointError: A file has another size, shape or data type.
        """
        for name, fields in arrays.items():
            if not is_plain_name(fields["file"]):
                raise CheckpointError(f"{self.path / LOG} names the file {fields['file']!r}, which is not beside it.")
            file = self.path / STATE / fields["file"]
            info = read_header(file).tensors.get(name)
            shape, dtype = self.shape(fields["width"]), fields["dtype"]
            if info is None or info.shape != shape or info.dtype != dtype:
                raise CheckpointError(
                    f"{file} is not the state {name} {shape} of this table: the files do not belong together. Restore "
                    f"a copy of the folder."
                )
            mapped = info.map_rows(writable=True, limit=self.limit)
            self._arrays[name] = fields, mapped, mapped.view(DTYPES[dtype], *shape)
            self._restored.add(name)

    def _roll_back(self, content: LogContent, place: int) -> None:
        """Roll the files back to a checkpoint in their log, from the last one to this, and mark the folder as open.

        A checkpoint that was passed is removed from the log before rows of an earlier one are written back. So the
        process may be killed in between, and the log still says what the rows are.

        Args:
            content: What the log says.
            place: Place of the checkpoint in `content.checkpoints`.

        Raises:
            FileError: A file cannot be read or written.
            CheckpointError: The log is of arrays of other sizes. Then nothing is changed.
        """
        path, passed = self.path / LOG, content.checkpoints[place:]
        arrays = [self._arrays_after(state) for state, _, _ in passed]
        for (_, _, blocks), logged in zip(passed, arrays, strict=True):
            check_rows(path, blocks, self.fields["vocab_size"], sum(width for _, width in logged))
        self._mark_open()
        log = UndoLog(path, content.size)
        for (_, start, blocks), logged in zip(reversed(passed), reversed(arrays), strict=True):
            roll_back(path, blocks, logged)
            if start != passed[0].start:
                log.cut(start)
        log.close()

    def _arrays_after(self, state: JsonObject) -> list[tuple[Tensor | None, int]]:
        """Return the arrays of which rows were logged after a checkpoint, as `roll_back` takes them.

        Args:
            state: State of the checkpoint. Its arrays are `None` where this folder has no such file open.
        """
        arrays: list[tuple[Tensor | None, int]] = [(self._weight.words, self._weight.row_bytes)]
        for name, fields in state["arrays"].items():
            found = self._arrays.get(name)
            words = found[1].words if found is not None and found[0] == fields else None
            arrays.append((words, (fields["width"] or 1) * DTYPES[fields["dtype"]].itemsize))
        return arrays

    def _begin(self, state: JsonObject) -> None:
        """Complete a checkpoint: an empty log with its state replaces the old one. Files without use are deleted.

        Raises:
            FileError: The log cannot be written. Then the old log stays in use.
        """
        log = UndoLog.create(self.path / LOG, {**state, "last_number": self._last_number})
        if self._log is not None:
            self._log.close()
        self._log, self._kept = log, set()
        self._keep_state()
        for file in (self.path / STATE).glob("*"):
            if file.name not in self._kept:
                file.unlink()

    def _keep_state(self) -> None:
        """Start to log rows relative to the present contents: no row is logged yet."""
        self._bits = np.zeros((self.fields["vocab_size"] + 7) // 8, np.uint8)
        self._logged = [self._weight.words, *(mapped.words for _, mapped, _ in self._arrays.values())]
        self._kept |= {fields["file"] for fields, _, _ in self._arrays.values()}

    def _mark_open(self) -> None:
        """Write `open.json`: the folder is open, in this file system and since this start of the machine."""
        mark: OpenFields = {"inode": self._weight.inode, "boot": _boot_id(), "last_number": self._last_number}
        write_json(self.path / OPEN, {**mark})
        (self.path / CLOSED).unlink(missing_ok=True)

    # RowStorage

    def new_state(self, weight: Tensor, name: str, width: int | None, dtype: torch.dtype) -> Tensor:
        """Return a state tensor over a mapped file: zeros in a new file, or after `resume` the stored entries, once.

        Raises:
            FileError: The file does not fit on the disk, or the folder is closed.
        """
        self.check_open()
        found = self._arrays.get(name)
        if name in self._restored and found is not None:
            self._restored.remove(name)
            if found[2].shape == self.shape(width) and found[2].dtype == dtype:
                return found[2]
        folder = create_folder(self.path / STATE)
        file = next(each for n in count() if not (folder / (each := f"{name}.{n}.safetensors")).exists())
        info = create_tensor_file(folder / file, name, self.shape(width), dtype)
        mapped = info.map_rows(writable=True, limit=self.limit)
        if found is not None and found[0]["file"] not in self._kept:
            (folder / found[0]["file"]).unlink()  # of a step that failed, or of an optimizer that was replaced
        fields: StateFields = {"file": file, "width": width, "dtype": DTYPE_NAMES[dtype]}
        self._arrays[name] = fields, mapped, mapped.view(dtype, *self.shape(width))
        return self._arrays[name][2]

    def place(self, weight: Tensor, name: str, value: Tensor) -> Tensor:
        """Return a state tensor over a mapped file with the numbers of `value`, which are copied in chunks."""
        found = self._arrays.get(name)
        if found is not None and found[2].data_ptr() == value.data_ptr():
            return found[2]
        state = self.new_state(weight, name, None if value.dim() == 1 else value.shape[1], value.dtype)
        for chunk in self._chunks(state):
            state[chunk] = value[chunk]
        return state

    def before_write(self, rows: Tensor) -> None:
        """Append the old contents of those rows to the log that are not in it yet.

        Raises:
            FileError: The disk is full, the folder is closed, this is a process that was forked after opening it, or
                the rows are in shared memory in place of their file.
            StaleRowsError: A checkpoint is being saved.
        """
        if not len(rows):
            return
        self.check_open()
        if not (self._weight.is_mapped and all(mapped.is_mapped for _, mapped, _ in self._arrays.values())):
            raise FileError(
                f"Rows or state of {self.path} were moved to shared memory, by share_memory_() or by sending them to "
                f"another process, so their file would miss all later changes. Call table.close(), continue with "
                f"MappedEmbedding.resume, and send a copy: table.rows(0, table.vocab_size).clone()."
            )
        if self._saving:
            raise StaleRowsError(
                f"Rows of {self.path} are about to change inside `with table.checkpoint():`, and the checkpoint would "
                f"not contain the change. Make steps, look-ups with gradients and optimizer.apply_pending_updates() "
                f"before it."
            )
        assert self._log is not None
        numbers = rows.to("cpu", torch.int64).numpy()
        places, masks = numbers >> 3, np.left_shift(1, numbers & 7, dtype=np.int64).astype(np.uint8)
        new = (self._bits[places] & masks) == 0
        if new.any():
            numbers = np.sort(numbers[new])
            self._log.append_rows(torch.from_numpy(numbers), self._logged)
            places, starts = np.unique(numbers >> 3, return_index=True)
            bits = np.left_shift(1, numbers & 7, dtype=np.int64).astype(np.uint8)
            self._bits[places] |= np.bitwise_or.reduceat(bits, starts)
        self.limit.keep(len(numbers))

    # the rest of a folder's life

    @contextmanager
    def checkpoint(self, updates: Callable[[], tuple[JsonObject, dict[str, Tensor]]]) -> Iterator[int]:
        """Context manager: make the present contents the next checkpoint, and yield its number.

        Inside the block the caller saves everything else with that number. If the block raises an error, both this
        checkpoint and the last one can be resumed, until a later one is completed.

        Args:
            updates: Function that returns the numbers and the small tensors of the pending updates; the numbers are
                empty before the first step.

        Raises:
            FileError: The disk is full, or the folder is closed. The last checkpoint can be resumed, and after the
                block this one too.
            StaleRowsError: Checkpoints are nested.
        """
        with self.lock:  # not while the caller saves: rows cannot change meanwhile
            state = self._append_checkpoint(updates)
            self._saving = True
        try:
            yield self._last_number
        except BaseException:
            self._saving = False
            raise
        with self.lock:
            self._saving = False
            self._begin(state)

    def _append_checkpoint(self, updates: Callable[[], tuple[JsonObject, dict[str, Tensor]]]) -> JsonObject:
        """Append the next checkpoint to the log and return its state; see `checkpoint`.

        Raises:
            FileError: The disk is full, or the folder is closed.
            StaleRowsError: Checkpoints are nested.
        """
        self.check_open()
        if self._saving:
            raise StaleRowsError(f"A checkpoint of {self.path} is being saved already.")
        assert self._log is not None
        numbers, tensors = updates()
        arrays = {name: fields for name, (fields, _, _) in self._arrays.items()}
        number = self._last_number + 1
        state: JsonObject = {"generation": number, "last_number": number, "arrays": arrays}
        if numbers:
            state["updates"] = numbers
            state["tensors"] = {name: _encode(each) for name, each in tensors.items() if name not in arrays}
        self._log.append_next(state)
        self._last_number = number
        self._keep_state()
        return state

    def close(self) -> None:
        """Write everything to the disk, and release the folder's lock. The tensors can still be read. May be repeated.

        Raises:
            FileError: The disk reports an error.
        """
        if os.getpid() != self._process:
            return
        with self.lock:
            log, self._log = self._log, None
        if log is None:
            return
        try:
            for mapped in (self._weight, *(mapped for _, mapped, _ in self._arrays.values())):
                mapped.flush()
            log.flush()
            closed: ClosedFields = {"log_bytes": log.size}
            write_json(self.path / CLOSED, {**closed})
            with file_errors(f"write {self.path}"):
                (self.path / OPEN).unlink(missing_ok=True)
        finally:
            log.close()
            _unlock(self._lock)

    def restored(self, name: str) -> Tensor:
        """Return the stored entries of a state after `resume`, as the next `new_state` will return them.

        Raises:
            CheckpointError: There are none.
        """
        if name not in self._restored:
            raise CheckpointError(f"{self.path / LOG} is damaged: it has no state {name}.")
        return self._arrays[name][2]

    def forget_restored(self) -> None:
        """Let each later `new_state` create a file: what was stored belongs to the optimizer that has taken it."""
        self._restored.clear()

    def name_of(self, state: Tensor) -> str | None:
        """Return the name of a state tensor that is stored in this folder; `None` for any other tensor."""
        return next((name for name, (_, _, each) in self._arrays.items() if each.data_ptr() == state.data_ptr()), None)

    def log_all_rows(self) -> None:
        """Prepare for a write to all rows: append the old contents of all to the log."""
        for chunk in self._chunks(self.weight):
            self.before_write(torch.arange(chunk.start, chunk.stop))

    def fill(self, new_rows: Callable[[slice], Tensor]) -> None:
        """Write all rows in chunks, each logged before it changes.

        Args:
            new_rows: Function that returns the new contents of a slice of rows.
        """
        for chunk in self._chunks(self.weight):
            with self.lock:
                self.before_write(torch.arange(chunk.start, chunk.stop))
                self.weight[chunk] = new_rows(chunk)

    def _chunks(self, array: Tensor) -> Iterator[slice]:
        """Yield slices of the rows of an array, of at most `CHUNK_BYTES` each, and keep the resident limit."""
        rows = max(CHUNK_BYTES // max(prod(array.shape[1:]) * array.itemsize, 1), 1)
        for start in range(0, len(array), rows):
            yield slice(start, min(start + rows, len(array)))
            self.limit.keep(rows)

    def check_open(self) -> None:
        """Raise an error unless this process may write to the files.

        Raises:
            FileError: The folder is closed, or was opened by another process before a fork.
        """
        if self._log is None:
            raise FileError(f"The mapped table {self.path} is closed: open it again with MappedEmbedding.resume.")
        self.check_process()

    def check_process(self) -> None:
        """Raise an error in a process that was forked after it opened the folder: the rows change without its record.

        Raises:
            FileError: This is such a process, and the folder was open at the fork.
        """
        if self._log is not None and os.getpid() != self._process:
            raise FileError(
                f"The mapped table {self.path} belongs to process {self._process}, from which this one was forked. "
                f"Only that process may train it and read its rows."
            )

    def prefetch(self, rows: Tensor) -> None:
        """Read rows in another thread and forget them, so that their pages are in memory afterwards."""
        self._thread.submit(lambda: [each.index_select(0, rows).size() for each in self._logged])

    def __reduce_ex__(self, protocol: Any) -> str:
        self.refuse_copy()
        return ""

    def refuse_copy(self) -> None:
        """Raise the error for a copy of this object.

        Raises:
            SizeError: Always.
        """
        raise SizeError(
            f"The mapped table {self.path} cannot be copied or pickled: a copy would write to the same files. For a "
            f"copy in memory call TokenEmbedding.from_pretrained(table.rows(0, table.vocab_size).clone())."
        )


_open_folders: "weakref.WeakValueDictionary[tuple[int, int], FileLock]" = weakref.WeakValueDictionary()
"""Locks of the folders that this process trains, by device and inode of the folder."""


def _key(path: Path) -> tuple[int, int]:
    """Return what identifies a folder, under any of its names: its device and inode."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _lock_of(path: Path) -> FileLock:
    """Acquire the lock of a folder and return it.

    Raises:
        FileError: This or another process trains the table already, or the folder cannot be written.
    """
    if _key(path) in _open_folders:
        raise FileError(
            f"The mapped table {path} is open in this process already: two tables would change the same rows. Use that "
            f"one, or close it first."
        )
    lock = FileLock(path / LOCK, f"The mapped table {path}")
    with file_errors(f"train the mapped table {path}"):
        lock.acquire()
    _open_folders[_key(path)] = lock
    return lock


def _unlock(lock: FileLock) -> None:
    """Release the lock of a folder that this process trains. The folder may have been deleted."""
    lock.release()
    for key in [key for key, each in _open_folders.items() if each is lock]:
        del _open_folders[key]


def read_table_fields(path: Path) -> TableFields:
    """Read and check the `table.json` of a folder.

    Raises:
        FileError: The folder holds no complete table.
        CheckpointError: The file is damaged.
    """
    if not (path / TABLE).exists():
        found = " Its creation did not end: delete the folder." if (path / WEIGHT).exists() else ""
        raise FileError(f"{path} holds no mapped table: create one with MappedEmbedding.create.{found}")
    fields = read_fields(path / TABLE, TableFields, version=FORMAT_VERSION)
    if fields["dtype"] not in DTYPES:
        raise CheckpointError(f"{path / TABLE} has the unknown dtype {fields['dtype']!r}.")
    return fields  # type: ignore[return-value]  # checked


def check_at_rest(path: Path) -> None:
    """Raise an error if the rows in a folder are not those of a checkpoint, and so are not for reading.

    Raises:
        FileError: A process is training them.
        CheckpointError: Rows lack optimizer steps, or were changed after the last checkpoint.
    """
    if _key(path) in _open_folders:
        raise FileError(f"The mapped table {path} is trained in this process: close it first, or look rows up in it.")
    FileLock(path / LOCK, f"The mapped table {path}").check_unlocked()
    content, _ = _read_content(path)
    state = content.checkpoints[-1].state
    updates, tensors = state.get("updates"), state.get("tensors", {})
    if updates and updates.get("applied_step", 0) < updates["start"] + _decode(tensors["history"]).shape[1]:
        raise CheckpointError(
            f"Rows of {path} lack optimizer steps, which training applies when they are looked up. Open it with "
            f"MappedEmbedding.resume, call apply_pending_updates(), make a checkpoint, and close it."
        )
    if content.checkpoints[-1].rows:
        raise CheckpointError(
            f"Rows of {path} were changed after its last checkpoint, some perhaps in part. Open it with "
            f"MappedEmbedding.resume, which rolls them back, and close it."
        )


def _read_content(path: Path) -> tuple[LogContent, int]:
    """Return what the log of a folder says, and the largest number that was given out to a checkpoint.

    Raises:
        FileError: A file cannot be read.
        CheckpointError: The folder was copied while it was open, was open when the machine stopped, or the log is
            damaged or has another size than when the folder was closed.
    """
    numbers, size = [0], None
    if (path / OPEN).exists():
        numbers.append(_check_mark(path)["last_number"])
    elif (path / CLOSED).exists():
        size = read_fields(path / CLOSED, ClosedFields)["log_bytes"]
    content = read_log(path / LOG, size=size)
    for state, _, _ in content.checkpoints:
        check_fields(state, CheckpointFields, path / LOG)
        for fields in state["arrays"].values():
            check_fields(fields, StateFields, path / LOG)
        numbers.append(state["last_number"])
    return content, max(numbers)


def _place_in_log(path: Path, content: LogContent, generation: int | None) -> int:
    """Return the place in a log of a checkpoint that it can restore.

    Args:
        path: The folder.
        content: What its log says.
        generation: Number of the checkpoint; `None` for the last that was completed.

    Raises:
        CheckpointError: The log has no such checkpoint.
    """
    generations = [state["generation"] for state, _, _ in content.checkpoints]
    if generation is None:
        return 0
    if generation in generations:
        return generations.index(generation)
    raise CheckpointError(
        f"{path} can be resumed at checkpoint {' or '.join(map(str, generations))}, not at {generation}: it keeps the "
        f"last checkpoint only. Use the checkpoint of the model that was saved with it."
    )


def _check_mark(path: Path) -> JsonObject:
    """Return the content of `open.json`, of a folder whose process was killed.

    Raises:
        CheckpointError: The folder was open when it was copied, or when the machine stopped.
    """
    mark = read_fields(path / OPEN, OpenFields)
    copied = mark["inode"] != os.stat(path / WEIGHT).st_ino
    if not copied and mark["boot"] == _boot_id():
        return mark
    how = "copied while a process had it open" if copied else "open when the machine stopped"
    advice = (
        "Copy the original again after close()."
        if copied
        else "Rows that were not on the disk yet may be lost: restore a copy of the folder."
    )
    raise CheckpointError(
        f"{path} was {how}, so its rows and its log may not belong together. {advice} If you know that no process "
        f"was writing and that the system had written everything to the disk, delete {path / OPEN} and resume."
    )


def _boot_id() -> str:
    """Return what identifies the present start of the machine; an empty string where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _encode(tensor: Tensor) -> JsonObject:
    """Return a small tensor as JSON, bit for bit."""
    flat = tensor.detach().cpu().contiguous()
    data = flat.flatten().view(torch.uint8).numpy().tobytes()
    return {"dtype": DTYPE_NAMES[flat.dtype], "shape": list(flat.shape), "data": base64.b64encode(data).decode()}


def _decode(value: JsonObject) -> Tensor:
    """Return the tensor that `_encode` wrote."""
    data, dtype = bytearray(base64.b64decode(value["data"])), DTYPES[value["dtype"]]
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(value["shape"])
