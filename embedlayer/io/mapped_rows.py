"""Rows of a file in a memory map: read and write single rows of files that are larger than memory.

Pages of a mapped file that a process has read or written count as its resident memory, although the system may drop
them at any time. `ResidentLimit` gives them back in time, so that look-ups in a file of any size need little memory.
"""

import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from embedlayer.core.errors import CheckpointError
from embedlayer.io.files import file_errors, flush_to_disk, require_file

RESIDENT_BYTES = 1 << 27
"""Default of `ResidentLimit`: 128 MiB."""

UNLIMITED_PART = 16
"""A file of at most the 16th part of the machine's memory needs no limit."""

_FEWEST_ITEMS, _MOST_ITEMS = 16, 4096
_BYTES_AROUND = 1 << 16
"""Bytes that Linux maps at most around an address that is read, if it has them in memory."""


class ResidentLimit:
    """Keep the resident memory of mapped files near a limit: above it, release their pages.

    Nothing is lost: what was read stays in the system's page cache, and what was written reaches the file from there.
    """

    def __init__(self, max_bytes: int | None = RESIDENT_BYTES) -> None:
        self.max_bytes = max_bytes
        self.maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._items = 64
        self._before = self._last = _resident_file_bytes()
        self._assumed = 0

    def chunks(self, items: int) -> Iterator[slice]:
        """Yield slices that cover `items` rows in turn. After each, which the caller reads, the limit is kept."""
        start = 0
        while start < items:
            stop = items if self.max_bytes is None else min(start + self._items, items)
            yield slice(start, stop)
            self.keep(stop - start)
            start = stop

    def keep(self, items: int) -> None:
        """Release the pages of all files of this limit if the resident memory has grown by more than `max_bytes`.

        The growth is that since the last release. `items` is the number of rows that were read or written since the
        last call: it determines the length of later `chunks` and, where the system does not tell the resident memory,
        the growth that is assumed, 64 KiB a row.
        """
        if self.max_bytes is None:
            return
        now = _resident_file_bytes()
        if now is None:  # not Linux: the most that may have been added
            added = items * _BYTES_AROUND
            self._assumed += added
            grown = self._assumed
        else:
            added, grown = now - (self._last or 0), now - (self._before or 0)
            self._last = now
        if 3 * added > self.max_bytes:
            self._items = max(self._items // 2, _FEWEST_ITEMS)
        elif items >= self._items and 8 * added < self.max_bytes:
            self._items = min(2 * self._items, _MOST_ITEMS)
        if grown > self.max_bytes:
            self.release()

    def release(self) -> None:
        """Release the pages of all files of this limit."""
        for each in self.maps:
            if hasattr(mmap, "MADV_DONTNEED"):
                each.madvise(mmap.MADV_DONTNEED)
        self._before = self._last = _resident_file_bytes()
        self._assumed = 0


class MappedRows:
    """Rows of equal size that follow each other in a file, in a shared memory map of the file.

    `words` are the rows as integers of the largest size that fits them, `(N, row bytes / size)`, over the mapped
    memory; writing to them ends the process unless the map is writable. The file is not read ahead (`MADV_RANDOM`),
    because rows are looked up in any order.
    """

    def __init__(
        self,
        path: Path | str,
        start: int,
        num_rows: int,
        row_bytes: int,
        *,
        writable: bool = False,
        limit: ResidentLimit | None = None,
    ) -> None:
        self.path = Path(path)
        self.num_rows, self.row_bytes, self.start = num_rows, row_bytes, start
        self.limit = ResidentLimit() if limit is None else limit
        self._map: mmap.mmap | None = None
        size = num_rows * row_bytes
        before = start % mmap.ALLOCATIONGRANULARITY
        require_file(path)
        with file_errors(f"{'write' if writable else 'read'} {path}"):
            descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
            try:
                self.inode, length = os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size
                if length < start + size:
                    raise CheckpointError(f"{path} is cut short: it has {length:,} bytes, and needs {start + size:,}.")
                if size:
                    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
                    self._map = mmap.mmap(descriptor, before + size, access=access, offset=start - before)
            finally:
                os.close(descriptor)
        word = next(each for each in (8, 4, 2, 1) if row_bytes % each == 0 and start % each == 0)
        shape = (num_rows, row_bytes // word)
        memory: Any = np.zeros(shape if self._map is None else 0, f"i{word}")
        if self._map is not None:
            if hasattr(mmap, "MADV_RANDOM"):
                self._map.madvise(mmap.MADV_RANDOM)
            self.limit.maps.add(self._map)
            mapped = np.frombuffer(self._map, np.uint8)  # of a type that is read-only, about which torch warns
            place, kind = (mapped.ctypes.data + before, False), f"=i{word}" if word > 1 else "|i1"
            interface = {"data": place, "shape": shape, "typestr": kind, "version": 3}
            memory = SimpleNamespace(bytes=mapped, __array_interface__=interface)
        self.words = torch.from_numpy(np.asarray(memory))
        self._start = self.words.data_ptr()

    @property
    def is_mapped(self) -> bool:
        """Return whether `words` are still in the file: `share_memory_()` moves a tensor's memory elsewhere."""
        return self.words.data_ptr() == self._start

    def view(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return a tensor over the mapped memory; raise a `CheckpointError` if the rows are not aligned for it."""
        if self.start % dtype.itemsize:
            raise CheckpointError(f"The rows of {self.path} start at byte {self.start}, not aligned for {dtype}.")
        return self.words.view(dtype).view(shape)

    def read(self, rows: Int[Tensor, " N"], out: UInt8[Tensor, "N B"] | None = None) -> UInt8[Tensor, "N B"]:
        """Return copies of rows as bytes, `(N, row bytes)`, in `out` or in new memory."""
        rows, order = torch.sort(rows)
        size = (len(rows), self.words.shape[1])
        out = self.words.new_empty(size) if out is None else out.view(self.words.dtype)
        for chunk in self.limit.chunks(len(rows)):
            out.index_copy_(0, order[chunk], self.words.index_select(0, rows[chunk]))
        return out.view(torch.uint8)

    def read_slice(self, start: int, stop: int) -> UInt8[Tensor, "N B"]:
        """Return a copy of rows `start` to `stop - 1` as bytes, `(stop - start, row bytes)`."""
        out = self.words.new_empty((stop - start, self.words.shape[1]))
        step = max(self.limit.max_bytes or RESIDENT_BYTES, 1) // 4 // max(self.row_bytes, 1) + 1
        address = self.words.data_ptr() - self.start % mmap.ALLOCATIONGRANULARITY  # of the mapped memory
        for low in range(start, stop, step):
            high = min(low + step, stop)
            if self._map is not None and hasattr(mmap, "MADV_WILLNEED"):
                first = (self.words[low].data_ptr() - address) // mmap.PAGESIZE * mmap.PAGESIZE
                self._map.madvise(mmap.MADV_WILLNEED, first, (high - low) * self.row_bytes)
            out[low - start : high - start] = self.words[low:high]
            self.limit.keep(high - low)
        return out.view(torch.uint8)

    def flush(self) -> None:
        """Write all changed pages to the disk, and wait for it; a `FileError` says that the disk reports an error."""
        with file_errors(f"write {self.path} to the disk"):
            if self._map is not None:
                self._map.flush()
                flush_to_disk(self.path)


def default_resident_bytes(nbytes: int) -> int | None:
    """Return the limit of resident memory for a file of `nbytes` bytes that is only read.

    It is `None`, no limit, for at most a 16th of the machine's memory, else `RESIDENT_BYTES`. Above the limit, pages
    that are in memory must be mapped again, which takes longer than reading rows from them.
    """
    memory = machine_bytes()
    return None if memory is not None and UNLIMITED_PART * nbytes <= memory else RESIDENT_BYTES


def machine_bytes() -> int | None:
    """Return the bytes of this machine's memory; `None` where the system does not say."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _resident_file_bytes() -> int | None:
    """Return the bytes of mapped files that are resident in this process; `None` where Linux's `/proc` is missing."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[2]) * mmap.PAGESIZE
    except OSError:
        return None
