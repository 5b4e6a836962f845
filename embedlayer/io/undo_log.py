"""A log of the old contents of rows, by which files are rolled back to a checkpoint after a crash.

Before rows of a set of arrays are changed for the first time after a checkpoint, their contents are appended to the
log. A killed process leaves a log whose last block may be incomplete; the rows of that block were not changed yet. So
writing complete blocks back restores the arrays.

The file is a sequence of blocks: one `HEAD` with the state at the last checkpoint as JSON, then `ROWS` with the numbers
and old contents of rows. A `NEXT` has the state at a later checkpoint, of which this log does not know whether
everything else was saved. What follows it is relative to that state, so the arrays can be rolled back to each state of
the log.
"""

import json
import os
import struct
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from embedlayer.core.errors import CheckpointError, FileError
from embedlayer.io.files import JsonObject, file_errors, replace_file, require_file
from embedlayer.io.json_fields import parse_json
from embedlayer.io.system_calls import flush

HEAD, ROWS, NEXT = b"HEAD", b"ROWS", b"NEXT"
BLOCK_BYTES = 1 << 24
"""Most bytes of rows in one block, unless a single row is larger."""

_START = struct.Struct("<4sIQQ")  # kind, checksum, rows in the block, bytes after this
_END = struct.Struct("<4sI")  # "DONE", checksum


class Block(NamedTuple):
    """A complete block of rows in a log."""

    num_rows: int
    start: int  # offset of the row numbers, which the rows of each array follow
    stop: int  # offset of the end mark


class LoggedCheckpoint(NamedTuple):
    """A checkpoint in a log."""

    state: JsonObject
    start: int
    rows: list[Block]  # rows that were changed after it and before the next checkpoint, in order


class UndoLog:
    """Log of the old contents of rows, to which this process appends.

    `size` is the number of bytes of its complete blocks; what follows them is removed before the next write.
    """

    def __init__(self, path: Path | str, size: int) -> None:
        self.path, self.size = Path(path), size
        self._incomplete = True  # whether something may follow the complete blocks
        require_file(path)
        with file_errors(f"write {path}"):
            self._descriptor = os.open(path, os.O_RDWR)
        self.close = weakref.finalize(self, os.close, self._descriptor)

    @classmethod
    def create(cls, path: Path | str, head: JsonObject) -> "UndoLog":
        """Replace the log at `path`, atomically, by an empty one for the state `head`, and return it."""
        block = b"".join(_block(HEAD, 0, json.dumps(head).encode(), ()))
        with replace_file(path) as partial:
            partial.write_bytes(block)
        return cls(path, len(block))

    def append_rows(self, rows: Tensor, arrays: Sequence[Tensor]) -> None:
        """Append the present contents of rows. When the call returns, they survive the end of this process.

        `rows` are row numbers, int64, and `arrays` have an entry of integers for each row. After an error, contents of
        some of the rows may be in the log.
        """
        row_bytes = 8 + sum(each[:1].nbytes for each in arrays)
        for some in rows.split(max(BLOCK_BYTES // row_bytes, 1)) if len(rows) else ():
            contents = [each.index_select(0, some) for each in arrays]
            numbers = some.contiguous().numpy()
            self._append(_block(ROWS, len(some), numbers, [each.numpy() for each in contents]))

    def append_next(self, state: JsonObject) -> None:
        """Append the state at a checkpoint of which the rest is about to be saved elsewhere."""
        self._append(_block(NEXT, 0, json.dumps(state).encode(), ()))

    def cut(self, size: int) -> None:
        """Remove everything after the first `size` bytes."""
        with file_errors(f"write {self.path}"):
            os.ftruncate(self._descriptor, size)
        self.size = size

    def flush(self) -> None:
        """Write the complete blocks to the disk, and wait for it. What follows them is removed."""
        self.cut(self.size)
        with file_errors(f"write {self.path} to the disk"):
            flush(self._descriptor)

    def _append(self, views: list[memoryview]) -> None:
        """Write the parts of a block at the end of the complete blocks; on any error the block is not in the log."""
        if self._incomplete:
            self.cut(self.size)
        end, descriptor, self._incomplete = self.size, self._descriptor, True
        try:
            with file_errors(f"write {self.path}", " No row was changed. Free some space, and repeat the step."):
                while views:
                    written = write_at(descriptor, views, end)
                    end += written
                    while views and written >= len(views[0]):
                        written -= len(views.pop(0))
                    if written:
                        views[0] = views[0][written:]
        except FileError:
            self.cut(self.size)
            raise
        self.size, self._incomplete = end, False


def write_at(descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
    """Write buffers at an offset of an open file, and return how many bytes were written, as `os.pwritev` does."""
    if hasattr(os, "pwritev"):
        return os.pwritev(descriptor, parts, offset)
    return os.pwrite(descriptor, parts[0], offset)


def read_log(path: Path | str, *, size: int | None = None) -> tuple[list[LoggedCheckpoint], int]:
    """Read the checkpoints of a log, without the contents of rows, and the bytes of its complete blocks.

    The checkpoints are the last one that was completed, then later ones that may not have been. `size` is the number of
    bytes of the file. `None` if its process may have been killed: then an incomplete last block is ignored.
    """
    path = Path(path)
    with file_errors(f"read {path}"), path.open("rb") as file:
        length = os.fstat(file.fileno()).st_size
        if size is not None and length != size:
            sizes = f"has {length:,} bytes and had {size:,} when the table was closed"
            raise CheckpointError(f"{path} {sizes}: restore a copy of the folder.")
        checkpoints: list[LoggedCheckpoint] = []
        place = 0
        while place + _START.size <= length:
            file.seek(place)
            kind, checksum, count, nbytes = _START.unpack(file.read(_START.size))
            start, stop = place + _START.size, place + _START.size + nbytes
            if kind not in (HEAD, ROWS, NEXT):
                raise _damaged(path, place)
            if stop + _END.size > length:  # the process was killed while it wrote this block
                break
            if count * 8 > nbytes:
                raise _damaged(path, place)
            checked = file.read(8 * count if kind == ROWS else nbytes)
            file.seek(stop)
            found, end = _checksum(kind, count, nbytes, checked), file.read(_END.size)
            if checksum != found or end != _END.pack(b"DONE", checksum) or (kind == HEAD) != (place == 0):
                raise _damaged(path, place)
            if kind == ROWS:
                checkpoints[-1].rows.append(Block(count, start, stop))
            else:
                state = parse_json(checked, path)
                if not isinstance(state, dict):
                    raise _damaged(path, place)
                checkpoints.append(LoggedCheckpoint(state, place, []))
            place = stop + _END.size
    if not checkpoints:
        raise CheckpointError(f"{path} is not an undo log of a mapped table, or is cut short: copy the folder again.")
    return checkpoints, place


def check_rows(path: Path | str, blocks: Sequence[Block], num_rows: int, row_bytes: int) -> None:
    """Check that blocks are those of rows of arrays of these sizes."""
    with file_errors(f"read {path}"), Path(path).open("rb") as file:
        for block in blocks:
            wrong = block.stop - block.start != block.num_rows * (8 + row_bytes)
            rows = torch.empty(0) if wrong else _row_numbers(file, block)
            if wrong or int(rows.min()) < 0 or int(rows.max()) >= num_rows:
                raise _damaged(Path(path), block.start)


def roll_back(path: Path | str, blocks: Sequence[Block], arrays: Sequence[tuple[Tensor | None, int]]) -> None:
    """Write logged rows back to the arrays. It may be repeated, for instance after the process was killed in it.

    `blocks` are blocks of rows that `check_rows` accepts, in the order of the log; the last one is written back first.
    `arrays` are those of `append_rows`, in the same order, with the bytes of a row of each. The arrays are changed; for
    `None` the contents are skipped.
    """
    with file_errors(f"read {path}"), Path(path).open("rb") as file:
        for block in reversed(blocks):
            rows = _row_numbers(file, block)
            for array, width in arrays:
                old = file.read(width * block.num_rows)
                if array is not None:
                    stored = torch.frombuffer(bytearray(old), dtype=array.dtype)
                    array.index_copy_(0, rows, stored.view(block.num_rows, *array.shape[1:]))


def _row_numbers(file: BinaryIO, block: Block) -> Tensor:
    """Read the row numbers of a block, `(U,)`; the file is then at the contents of the rows."""
    file.seek(block.start)
    return torch.frombuffer(bytearray(file.read(8 * block.num_rows)), dtype=torch.int64)


def _damaged(path: Path, place: int) -> CheckpointError:
    """Create, but do not raise, the error for a log with a wrong block at an offset."""
    return CheckpointError(f"{path} is damaged at byte {place:,}: restore a copy of the folder.")


def _checksum(kind: bytes, count: int, nbytes: int, checked: bytes | memoryview) -> int:
    """Return the CRC-32 of a block's fields and of its JSON or row numbers."""
    return zlib.crc32(checked, zlib.crc32(_START.pack(kind, 0, count, nbytes)))


def _block(kind: bytes, rows: int, checked: Any, arrays: Sequence[NDArray[Any]]) -> list[memoryview]:
    """Return the parts of a block: its fields, JSON or row numbers, the rows of each array, and its end mark."""
    views = [memoryview(each).cast("B") for each in (checked, *arrays) if len(each)]
    nbytes = sum(each.nbytes for each in views)
    checksum = _checksum(kind, rows, nbytes, views[0])
    fields, end = _START.pack(kind, checksum, rows, nbytes), _END.pack(b"DONE", checksum)
    return [memoryview(fields), *views, memoryview(end)]
