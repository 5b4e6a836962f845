"""Rows of a trainable table and of its optimizer state in the files of a folder, safe against killed processes.

```
DIR/
  table.json                  sizes and options of the table
  weight.safetensors          the rows
  exp_avg.0.safetensors       one file for each array of optimizer state
  undo.log                    old contents of the rows that changed since the last checkpoint
  open.json                   exists while a process has the folder open, and after it was killed
```

Rows are changed in the files themselves, through shared memory maps. What a process has written there survives its end,
because the pages belong to the system. Before a row is changed for the first time after a checkpoint, its old contents
go to the log; `RowFolder.resume` writes them back.
"""

import base64
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from embedlayer.errors import CheckpointError, FileError, SizeError, StaleRowsError
from embedlayer.io.files import JsonObject, create_folder, file_errors, read_fields, read_json, write_json
from embedlayer.io.json_fields import Count, Range, check_fields
from embedlayer.io.locks import LOCK, FileLock
from embedlayer.io.mapped_rows import MappedRows, ResidentLimit
from embedlayer.io.safetensors_files import (
    CHUNK_BYTES,
    DTYPE_NAMES,
    DTYPES,
    create_tensor_file,
    is_plain_name,
    read_header,
)
from embedlayer.io.undo_log import LogContent, UndoLog, read_log, roll_back
from embedlayer.tables.row_storage import RowStorage

FORMAT_VERSION = 1
TABLE, WEIGHT, LOG, OPEN = "table.json", "weight.safetensors", "undo.log", "open.json"
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


class StateFields(TypedDict):
    """Type of an array of optimizer state in a log's state: its file, number of columns and data type."""

    file: str
    width: int | None
    dtype: str


class CheckpointFields(TypedDict):
    """Type of the state that a log has for a checkpoint.

    `arrays` are those that existed then, by name. `updates` are the numbers of the pending updates, and `tensors` their
    small tensors.
    """

    generation: Count
    arrays: JsonObject
    updates: NotRequired[JsonObject]
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
        generation: Number of the last checkpoint; 0 after creation.
        weight: The rows over the mapped memory, `(V, D)`.
        updates: Numbers and tensors of the pending updates at the last checkpoint, after `resume`; else `None`.
    """

    def __init__(self, path: Path, fields: TableFields, lock: FileLock, *, max_resident_bytes: int | None) -> None:
        self.path, self.fields = path, fields
        self.limit = ResidentLimit(max_resident_bytes)
        self.generation = 0
        self.updates: tuple[JsonObject, dict[str, Tensor]] | None = None
        self._lock, self._process = lock, os.getpid()
        self._log: UndoLog | None = None
        self._arrays: dict[str, tuple[StateFields, MappedRows, Tensor]] = {}
        self._restored: set[str] = set()
        self._logged: list[Tensor] = []
        self._saving = False
        self._threads: ThreadPoolExecutor | None = None
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
        path = create_folder(path)
        if taken := [name for name in (TABLE, WEIGHT) if (path / name).exists()]:
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
                folder._begin(UndoLog.create(path / LOG, {"generation": 0, "arrays": {}}), 0)
                write_json(path / TABLE, {**fields})  # last: a folder with it is complete
            except BaseException:
                for name in (WEIGHT, LOG, OPEN):
                    (path / name).unlink(missing_ok=True)
                raise
        except BaseException:
            lock.release()
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
        path = Path(path)
        fields = read_table_fields(path)
        lock = _lock_of(path)
        try:
            _check_mark(path)
            content = read_log(path / LOG)
            state = _state_at(path, content, generation)
            folder = cls(path, fields, lock, max_resident_bytes=max_resident_bytes)
            folder._open_arrays(state["arrays"])
            folder._mark_open()
            if state is content.head:
                roll_back(path / LOG, content, folder._logged)
            folder._begin(UndoLog.create(path / LOG, state), state["generation"])
            if "updates" in state:
                tensors = {name: _decode(each) for name, each in state["tensors"].items()}
                folder.updates = state["updates"], tensors
        except BaseException:
            lock.release()
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
            check_fields(fields, StateFields, self.path / LOG)
            if not is_plain_name(fields["file"]):
                raise CheckpointError(f"{self.path / LOG} names the file {fields['file']!r}, which is not beside it.")
            info = read_header(self.path / fields["file"]).tensors.get(name)
            shape, dtype = self.shape(fields["width"]), fields["dtype"]
            if info is None or info.shape != shape or info.dtype != dtype:
                raise CheckpointError(
                    f"{self.path / fields['file']} is not the state {name} {shape} of this table: the files do not "
                    f"belong together. Restore a copy of the folder."
                )
            mapped = info.map_rows(writable=True, limit=self.limit)
            self._arrays[name] = fields, mapped, mapped.view(DTYPES[dtype], *shape)
            self._restored.add(name)
        self._logged = [self._weight.words, *(self._arrays[name][1].words for name in arrays)]

    def _begin(self, log: UndoLog, generation: int) -> None:
        """Start a generation: with an empty log no row is logged yet. Files that it does not name are deleted."""
        if self._log is not None:
            self._log.close()
        self._log, self.generation = log, generation
        self._bits = np.zeros((self.fields["vocab_size"] + 7) // 8, np.uint8)
        self._logged = [self._weight.words, *(mapped.words for _, mapped, _ in self._arrays.values())]
        named = {WEIGHT, *(fields["file"] for fields, _, _ in self._arrays.values())}
        for file in self.path.glob("*.*.safetensors"):
            if file.name not in named and file.name.split(".")[1].isdigit():
                file.unlink()

    def _mark_open(self) -> None:
        """Write `open.json`: the folder is open, in this file system and since this start of the machine."""
        write_json(self.path / OPEN, {"inode": self._weight.inode, "boot": _boot_id()})

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
        serial = next(n for n in range(1 << 30) if not (self.path / f"{name}.{n}.safetensors").exists())
        file = f"{name}.{serial}.safetensors"
        info = create_tensor_file(self.path / file, name, self.shape(width), dtype)
        mapped = info.map_rows(writable=True, limit=self.limit)
        fields: StateFields = {"file": file, "width": width, "dtype": DTYPE_NAMES[dtype]}
        self._arrays[name] = fields, mapped, mapped.view(dtype, *self.shape(width))
        return self._arrays[name][2]

    def place(self, weight: Tensor, name: str, value: Tensor) -> Tensor:
        """Return a state tensor over a mapped file with the numbers of `value`, which are copied in chunks."""
        found = self._arrays.get(name)
        if found is not None and found[2].data_ptr() == value.data_ptr():
            self._restored.discard(name)
            return found[2]
        self._restored.discard(name)
        state = self.new_state(weight, name, None if value.dim() == 1 else value.shape[1], value.dtype)
        for chunk in self._chunks(state):
            state[chunk] = value[chunk]
        return state

    def before_write(self, rows: Tensor) -> None:
        """Append the old contents of those rows to the log that are not in it yet.

        Raises:
            FileError: The disk is full, the folder is closed, or this is a process that was forked after opening it.
            StaleRowsError: A checkpoint is being saved.
        """
        if not len(rows):
            return
        self.check_open()
        if self._saving:
            raise StaleRowsError(
                f"Rows of {self.path} are about to change inside `with table.checkpoint():`, and the checkpoint would "
                f"not contain the change. Make steps, look-ups with gradients and apply_pending_updates() before it."
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

        Inside the block the caller saves everything else with that number. If the block raises an error, the last
        checkpoint stays.

        Args:
            updates: Function that returns the numbers and the small tensors of the pending updates; the numbers are
                empty before the first step.

        Raises:
            FileError: The disk is full, or the folder is closed. The last checkpoint stays.
            StaleRowsError: Checkpoints are nested.
        """
        self.check_open()
        if self._saving:
            raise StaleRowsError(f"A checkpoint of {self.path} is being saved already.")
        assert self._log is not None
        numbers, tensors = updates()
        arrays = {name: fields for name, (fields, _, _) in self._arrays.items()}
        state: JsonObject = {"generation": self.generation + 1, "arrays": arrays}
        if numbers:
            state["updates"] = numbers
            state["tensors"] = {name: _encode(each) for name, each in tensors.items() if name not in arrays}
        size = self._log.size
        self._log.append_next(state)
        self._saving = True
        try:
            yield self.generation + 1
        except BaseException:
            self._log.cut(size)
            raise
        finally:
            self._saving = False
        self._begin(UndoLog.create(self.path / LOG, state), self.generation + 1)

    def close(self) -> None:
        """Write everything to the disk, and give the folder free. The tensors can still be read. May be repeated.

        Raises:
            FileError: The disk reports an error.
        """
        if self._log is None or os.getpid() != self._process:
            return
        for mapped in (self._weight, *(mapped for _, mapped, _ in self._arrays.values())):
            mapped.flush()
        self._log.close()
        self._log = None
        with file_errors(f"write {self.path}"):
            (self.path / OPEN).unlink(missing_ok=True)
        self._lock.release()
        _open_folders.pop(_key(self.path), None)

    def restored(self, name: str) -> Tensor:
        """Return the stored entries of a state after `resume`, as the next `new_state` will return them.

        Raises:
            CheckpointError: There are none.
        """
        if name not in self._restored:
            raise CheckpointError(f"{self.path / LOG} is damaged: it has no state {name}.")
        return self._arrays[name][2]

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
        if os.getpid() != self._process:
            raise FileError(
                f"The mapped table {self.path} belongs to process {self._process}, from which this one was forked. "
                f"Only that process may train it."
            )

    def prefetch(self, rows: Tensor) -> None:
        """Read rows in another thread and forget them, so that their pages are in memory afterwards."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "embedlayer-prefetch")
        self._threads.submit(lambda: [each.index_select(0, rows).size() for each in self._logged])

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
        CheckpointError: Rows were changed after the last checkpoint.
    """
    FileLock(path / LOCK, f"The mapped table {path}").check_unlocked()
    if _key(path) in _open_folders or read_log(path / LOG).rows:
        raise CheckpointError(
            f"Rows of {path} were changed after its last checkpoint, some perhaps in part. Open it with "
            f"MappedEmbedding.resume, which rolls them back, and close it."
        )


def _state_at(path: Path, content: LogContent, generation: int | None) -> JsonObject:
    """Return the state of a checkpoint that a log can restore.

    Args:
        path: The folder.
        content: What its log says.
        generation: Number of the checkpoint; `None` for the last that was completed.

    Raises:
        CheckpointError: The log has no such checkpoint, or is damaged.
    """
    states = [content.head] if content.following is None else [content.head, content.following]
    for state in states:
        check_fields(state, CheckpointFields, path / LOG)
        if generation in (None, state["generation"]):
            return state
    known = " or ".join(str(state["generation"]) for state in states)
    raise CheckpointError(
        f"{path} can be resumed at checkpoint {known}, not at {generation}: it keeps the last checkpoint only. Use the "
        f"checkpoint of the model that was saved with it."
    )


def _check_mark(path: Path) -> None:
    """Raise an error if a folder was open when it was copied, or when the machine went down.

    Raises:
        CheckpointError: One of these is the case.
    """
    if not (path / OPEN).exists():
        return
    mark = read_json(path / OPEN)
    copied = mark.get("inode") != os.stat(path / WEIGHT).st_ino
    if not copied and mark.get("boot") == _boot_id():
        return
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
