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

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedlayer.core.errors import CheckpointError, FileError, SizeError, StaleRowsError
from embedlayer.core.forks import BackgroundThread, lock_held_at_forks
from embedlayer.io.files import JsonObject, create_folder, file_errors, named_path, visible_names, write_json
from embedlayer.io.locks import FileLock
from embedlayer.io.mapped_rows import MappedRows, ResidentLimit
from embedlayer.io.safetensors_files import CHUNK_BYTES, DTYPE_NAMES, DTYPES, create_tensor_file, read_header
from embedlayer.io.system_calls import boot_id
from embedlayer.io.undo_log import LogContent, UndoLog, check_rows, roll_back
from embedlayer.io.weight_files import is_plain_name
from embedlayer.row_sparse.storage import RowStorage
from embedlayer.tables.stored.folder_files import (
    CLOSED,
    LOG,
    OPEN,
    STATE,
    TABLE,
    WEIGHT,
    ClosedFields,
    OpenFields,
    StateFields,
    TableFields,
    decode_tensor,
    encode_tensor,
    lock_folder,
    read_content,
    read_table_fields,
    unlock_folder,
)


class RowFolder(RowStorage):
    """The rows of a table and of its optimizer state, in the files of a folder that this process trains."""

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
            sizes = f"{fields['vocab_size']:,} x {fields['embed_dim']:,} {fields['dtype']}"
            raise CheckpointError(f"{path / WEIGHT} is not the table of {sizes} numbers that {TABLE} describes.")
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
        """Create the files of a table in a folder, and open them."""
        path = create_folder(named_path(path).absolute())
        if names := visible_names(path):
            raise FileError(f"{path} holds {names[0]} already: call MappedEmbedding.resume, or choose another folder.")
        lock = lock_folder(path)
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
            unlock_folder(lock)
            raise
        return folder

    @classmethod
    def resume(cls, path: Path | str, generation: int | None = None, *, max_resident_bytes: int | None) -> "RowFolder":
        """Open the files of a table as they were at a checkpoint: what was changed since is rolled back."""
        path = Path(path).absolute()
        fields = read_table_fields(path)
        lock = lock_folder(path)
        try:
            content, last_number = read_content(path)
            generations = [each.state["generation"] for each in content.checkpoints]
            if generation not in (None, *generations):
                kept = " or ".join(map(str, generations))
                raise CheckpointError(f"{path} keeps checkpoint {kept}, not {generation}: load that model.")
            place = 0 if generation is None else generations.index(generation)
            state = content.checkpoints[place].state
            folder = cls(path, fields, lock, max_resident_bytes=max_resident_bytes)
            for name, array in state["arrays"].items():
                if not is_plain_name(array["file"]):
                    raise CheckpointError(f"{path / LOG} names the file {array['file']!r}, which is not beside it.")
                file = path / STATE / array["file"]
                info = read_header(file).tensors.get(name)
                shape, dtype = folder.shape(array["width"]), array["dtype"]
                if info is None or info.shape != shape or info.dtype != dtype:
                    raise CheckpointError(f"{file} is not the state {name} {shape} of this table: restore a copy.")
                mapped = info.map_rows(writable=True, limit=folder.limit)
                folder._arrays[name] = array, mapped, mapped.view(DTYPES[dtype], *shape)
                folder._restored.add(name)
            folder._last_number = last_number
            folder._roll_back(content, place)
            folder._begin(state)
            if "updates" in state:
                tensors = {name: decode_tensor(each) for name, each in state["tensors"].items()}
                folder.updates = state["updates"], tensors
        except BaseException:
            unlock_folder(lock)
            raise
        return folder

    def shape(self, width: int | None) -> tuple[int, ...]:
        """Return the shape of an array with `width` numbers, or for `None` one number, for each row."""
        rows = self.fields["vocab_size"]
        return (rows,) if width is None else (rows, width)

    def _roll_back(self, content: LogContent, place: int) -> None:
        """Roll the files back to a checkpoint in their log, from the last one to this, and mark the folder as open."""
        path, passed = self.path / LOG, content.checkpoints[place:]
        arrays: list[list[tuple[Tensor | None, int]]] = []  # whose old rows the log has, with the bytes of a row
        for state, _, _ in passed:
            arrays.append([(self._weight.words, self._weight.row_bytes)])
            for name, fields in state["arrays"].items():
                own = self._arrays.get(name)
                words = own[1].words if own is not None and own[0] == fields else None
                arrays[-1].append((words, (fields["width"] or 1) * DTYPES[fields["dtype"]].itemsize))
        for (_, _, blocks), logged in zip(passed, arrays, strict=True):
            check_rows(path, blocks, self.fields["vocab_size"], sum(width for _, width in logged))
        self._mark_open()
        log = UndoLog(path, content.size)
        for (_, start, blocks), logged in zip(reversed(passed), reversed(arrays), strict=True):
            roll_back(path, blocks, logged)
            if start != passed[0].start:
                log.cut(start)
        log.close()

    def _begin(self, state: JsonObject) -> None:
        """Complete a checkpoint: an empty log with its state replaces the old one. Files without use are deleted."""
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
        mark: OpenFields = {"inode": self._weight.inode, "boot": boot_id(), "last_number": self._last_number}
        write_json(self.path / OPEN, {**mark})
        (self.path / CLOSED).unlink(missing_ok=True)

    # RowStorage

    def new_state(self, weight: Tensor, name: str, width: int | None, dtype: torch.dtype) -> Tensor:
        """Return a state tensor over a mapped file: zeros in a new file, or after `resume` the stored entries, once."""
        self.check_open()
        array = self._arrays.get(name)
        if name in self._restored and array is not None:
            self._restored.remove(name)
            if array[2].shape == self.shape(width) and array[2].dtype == dtype:
                return array[2]
        folder = create_folder(self.path / STATE)
        file = next(each for n in count() if not (folder / (each := f"{name}.{n}.safetensors")).exists())
        info = create_tensor_file(folder / file, name, self.shape(width), dtype)
        mapped = info.map_rows(writable=True, limit=self.limit)
        if array is not None and array[0]["file"] not in self._kept:
            (folder / array[0]["file"]).unlink()  # of a step that failed, or of an optimizer that was replaced
        fields: StateFields = {"file": file, "width": width, "dtype": DTYPE_NAMES[dtype]}
        self._arrays[name] = fields, mapped, mapped.view(dtype, *self.shape(width))
        return self._arrays[name][2]

    def place(self, weight: Tensor, name: str, value: Tensor) -> Tensor:
        """Return a state tensor over a mapped file with the numbers of `value`, which are copied in chunks."""
        array = self._arrays.get(name)
        if array is not None and array[2].data_ptr() == value.data_ptr():
            return array[2]
        state = self.new_state(weight, name, None if value.dim() == 1 else value.shape[1], value.dtype)
        for chunk in self._chunks(state):
            state[chunk] = value[chunk]
        return state

    def before_write(self, rows: Tensor) -> None:
        """Append the old contents of those rows to the log that are not in it yet."""
        if not len(rows):
            return
        self.check_open()
        if not (self._weight.is_mapped and all(mapped.is_mapped for _, mapped, _ in self._arrays.values())):
            raise FileError(f"{self.path} is in shared memory. See docs/errors.md, Mapped tables in other processes.")
        if self._saving:
            raise StaleRowsError(f"Rows of {self.path} cannot change inside `with table.checkpoint():`.")
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
        """Context manager: make the present contents the next checkpoint, and yield its number."""
        with self.lock:  # not while the caller saves: rows cannot change meanwhile
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
                state["tensors"] = {name: encode_tensor(each) for name, each in tensors.items() if name not in arrays}
            self._log.append_next(state)
            self._last_number = number
            self._keep_state()
            self._saving = True
        try:
            yield self._last_number
        except BaseException:
            self._saving = False
            raise
        with self.lock:
            self._saving = False
            self._begin(state)

    def close(self) -> None:
        """Write everything to the disk, and release the folder's lock. The tensors can still be read."""
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
            unlock_folder(self._lock)

    def restored(self, name: str) -> Tensor:
        """Return the stored entries of a state after `resume`, as the next `new_state` will return them."""
        if name not in self._restored:
            raise CheckpointError(f"{self.path / LOG} is damaged: it has no state {name}.")
        return self._arrays[name][2]

    def forget_restored(self) -> None:
        """Let each later `new_state` create a file: what was stored belongs to the optimizer that has taken it."""
        self._restored.clear()

    def name_of(self, state: Tensor) -> str | None:
        return next((name for name, (_, _, each) in self._arrays.items() if each.data_ptr() == state.data_ptr()), None)

    def log_all_rows(self) -> None:
        """Prepare for a write to all rows: append the old contents of all to the log."""
        for chunk in self._chunks(self.weight):
            self.before_write(torch.arange(chunk.start, chunk.stop))

    def fill(self, new_rows: Callable[[slice], Tensor]) -> None:
        """Write all rows in chunks, each logged before it changes. `new_rows` returns the new rows of a slice."""
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
        """Raise an error unless this process may write to the files."""
        if self._log is None:
            raise FileError(f"The mapped table {self.path} is closed: open it again with MappedEmbedding.resume.")
        self.check_process()

    def check_process(self) -> None:
        """Raise an error in a process forked after the folder was opened: rows change without its record."""
        if self._log is not None and os.getpid() != self._process:
            raise FileError(f"{self.path} belongs to process {self._process}, from which this one was forked.")

    def prefetch(self, rows: Tensor) -> None:
        """Read rows in another thread and forget them, so that their pages are in memory afterwards."""
        self._thread.submit(lambda: [each.index_select(0, rows).size() for each in self._logged])

    def __reduce_ex__(self, protocol: Any) -> str:
        self.refuse_copy()
        return ""

    def refuse_copy(self) -> None:
        """Raise the `SizeError` for a copy of this object."""
        raise SizeError(f"{self.path} cannot be copied. See docs/errors.md, Mapped tables in other processes.")
