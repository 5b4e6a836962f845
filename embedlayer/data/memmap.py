"""Arrays that lie on a disk: several read as one, and sent to another process by name instead of by content."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from embedlayer.errors import FileError, SizeError

IdArray = npt.NDArray[np.integer[Any]]


class MemmapSlice:
    """Where a memory-mapped array lies, to map it again instead of copying it to another process."""

    def __init__(self, filename: str, dtype: np.dtype[Any], offset: int, length: int) -> None:
        self.place = filename, dtype, offset, length

    @classmethod
    def of(cls, ids: IdArray) -> "MemmapSlice | None":
        """The place of `ids`, a mapped array or a slice of one; `None` for an array that lies elsewhere."""
        root: Any = ids
        while isinstance(root.base, np.ndarray):
            root = root.base
        if not isinstance(root, np.memmap) or root.filename is None or not ids.flags.c_contiguous:
            return None
        offset = root.offset + ids.ctypes.data - root.ctypes.data
        return cls(str(root.filename), ids.dtype, offset, len(ids))

    def open(self) -> IdArray:
        """Map the array.

        Raises:
            FileError: The file cannot be read, or this process has too many files open.
        """
        filename, dtype, offset, length = self.place
        try:
            return np.memmap(filename, dtype=dtype, mode="r", offset=offset, shape=(length,))
        except OSError as error:
            raise cannot_map(filename, error) from error


def cannot_map(path: str | Path, error: OSError) -> FileError:
    """What is said of a file that cannot be mapped or read on the way to it."""
    return FileError(
        f"Cannot map {path}: {error.strerror or error}. If too many files are open, one for each part of a corpus, "
        f"raise the limit (ulimit -n) or build the corpus in fewer parts."
    )


class ConcatenatedArray:
    """One-dimensional arrays of one dtype, read as the array that they are when put one after the other.

    It knows what windows need: a length, an element, a slice (a view, nothing is copied), and `windows`, across the
    ends of parts too. For everything else `np.asarray` copies. Mapped parts travel to another process as file names.

    Args:
        parts: The arrays, none of them empty, at least one.

    Example:
        >>> ids = ConcatenatedArray([np.array([1, 2, 3]), np.array([4, 5])])
        >>> len(ids), int(ids[3]), np.asarray(ids[1:4]).tolist()
        (5, 4, [2, 3, 4])
    """

    ndim = 1

    def __init__(self, parts: Sequence[IdArray]) -> None:
        self.parts = list(parts)
        self._ends = np.cumsum([len(part) for part in self.parts])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of one ID, as of an array."""
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int]:
        """`(N,)`, as of an array."""
        return (len(self),)

    @property
    def nbytes(self) -> int:
        """Bytes of all IDs."""
        return len(self) * self.dtype.itemsize

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        """An ID, or for a slice without steps a view: an array if it lies in one part, and else `ConcatenatedArray`."""
        if not isinstance(index, slice):
            at = range(len(self))[index]
            part = int(np.searchsorted(self._ends, at, side="right"))
            return self.parts[part][at - self._ends[part]]
        begin, stop, step = index.indices(len(self))
        if step != 1:
            raise SizeError(f"A corpus in parts is sliced without steps; step {step} is np.asarray(ids)[{index}].")
        first, last = np.searchsorted(self._ends, [begin, max(begin, stop - 1)], side="right").tolist()
        if begin >= stop:
            return self.parts[0][:0]
        starts = self._ends - [len(part) for part in self.parts]
        views = [self.parts[k][max(begin - starts[k], 0) : stop - starts[k]] for k in range(first, last + 1)]
        return views[0] if len(views) == 1 else ConcatenatedArray(views)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("The parts of a corpus become one array only by copying.")
        whole = np.concatenate(self.parts)
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def tolist(self) -> list[int]:
        """All IDs as Python's numbers."""
        return [token for part in self.parts for token in part.tolist()]

    def tobytes(self) -> bytes:
        """All IDs as they lie in memory."""
        return b"".join(part.tobytes() for part in self.parts)

    def windows(self, starts: npt.NDArray[np.int64], length: int) -> IdArray:
        """`self[s : s + length]` for each start, `(len(starts), length)`."""
        rows = np.empty((len(starts), length), self.dtype)
        first = np.searchsorted(self._ends, starts, side="right")
        inside = starts + length <= self._ends[first]
        for number in np.unique(first[inside]):
            part, here = self.parts[number], inside & (first == number)
            places = starts[here] - (self._ends[number] - len(part))
            rows[here] = np.lib.stride_tricks.sliding_window_view(part, length)[places]
        for row in np.flatnonzero(~inside):
            rows[row] = self[int(starts[row]) : int(starts[row]) + length]
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return {"parts": [MemmapSlice.of(part) or part for part in self.parts]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        parts: list[IdArray | MemmapSlice] = state["parts"]
        self.__init__([part.open() if isinstance(part, MemmapSlice) else part for part in parts])  # type: ignore[misc]
