"""Memory-mapped arrays: several of them as one, and pickled by file name instead of by content."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from embedlayer.core.errors import FileError, SizeError
from embedlayer.io.files import require_file

IdArray = npt.NDArray[np.integer[Any]]


class MemmapSlice(NamedTuple):
    """Location of a memory-mapped array in its file, with which another process can map the same array."""

    filename: str
    dtype: np.dtype[Any]
    offset: int
    length: int

    @classmethod
    def of(cls, ids: IdArray) -> "MemmapSlice | None":
        """Return the file and byte range that the array `ids` maps."""
        root: Any = ids
        while isinstance(root.base, np.ndarray):
            root = root.base
        if not isinstance(root, np.memmap) or root.filename is None or not ids.flags.c_contiguous:
            return None
        offset = root.offset + ids.ctypes.data - root.ctypes.data
        return cls(str(root.filename), ids.dtype, offset, len(ids))

    def open(self) -> IdArray:
        """Map this part of the file into memory, read-only, and return it as an array."""
        if Path(self.filename).exists():  # else the error below says so
            require_file(self.filename)
        try:
            return np.memmap(self.filename, self.dtype, "r", self.offset, (self.length,))
        except OSError as error:
            raise cannot_map(self.filename, error) from error


def cannot_map(path: str | Path, error: OSError) -> FileError:
    """Create, but do not raise, the error for a file that cannot be opened or mapped into memory."""
    return FileError(
        f"Cannot map {path}: {error.strerror or error}. If too many files are open, one for each shard of a corpus, "
        f"raise the limit (ulimit -n) or build the corpus in fewer shards."
    )


class ConcatenatedArray:
    """Several one-dimensional arrays of one dtype that are read as one array, without a copy.

    It has a length, elements, slices without steps (views), and `windows` over array boundaries. For everything else,
    convert it with `np.asarray`, which copies. Memory-mapped arrays are pickled as file names.

    Args:
        arrays: The arrays, in order: at least one, and none is empty.

    Example:
        >>> ids = ConcatenatedArray([np.array([1, 2, 3]), np.array([4, 5])])
        >>> len(ids), int(ids[3]), np.asarray(ids[1:4]).tolist()
        (5, 4, [2, 3, 4])
    """

    ndim = 1

    def __init__(self, arrays: Sequence[IdArray]) -> None:
        self.arrays = list(arrays)
        self._ends = np.cumsum([len(array) for array in self.arrays])
        self.dtype: np.dtype[Any] = self.arrays[0].dtype
        self.shape = (len(self),)
        self.nbytes = len(self) * self.dtype.itemsize

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        """Return an element, or a view of a slice without a step.

        The view is a NumPy array if the slice is empty or inside one of the arrays, else a `ConcatenatedArray`.

        Raises:
            IndexError: The index is out of range.
        """
        if not isinstance(index, slice):
            at = range(len(self))[index]
            array = int(np.searchsorted(self._ends, at, side="right"))
            return self.arrays[array][at - self._ends[array]]
        begin, stop, step = index.indices(len(self))
        if step != 1:
            raise SizeError(f"A corpus in shards has slices without steps only. Use np.asarray(ids)[{index}].")
        first, last = np.searchsorted(self._ends, [begin, max(begin, stop - 1)], side="right").tolist()
        if begin >= stop:
            return self.arrays[0][:0]
        starts = self._ends - [len(array) for array in self.arrays]
        views = [self.arrays[k][max(begin - starts[k], 0) : stop - starts[k]] for k in range(first, last + 1)]
        return views[0] if len(views) == 1 else ConcatenatedArray(views)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("The shards of a corpus become one array only by copying.")
        whole = np.concatenate(self.arrays)
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def tolist(self) -> list[int]:
        """Return all elements as a list of Python integers."""
        return [token for array in self.arrays for token in array.tolist()]

    def windows(self, starts: npt.NDArray[np.int64], length: int) -> IdArray:
        """Return copies of windows, `self[s : s + length]` for each start `s`; a window may span several arrays.

        Every window must end within the concatenation.
        """
        rows = np.empty((len(starts), length), self.dtype)
        first = np.searchsorted(self._ends, starts, side="right")
        inside = starts + length <= self._ends[first]
        for number in np.unique(first[inside]):
            array, here = self.arrays[number], inside & (first == number)
            places = starts[here] - (self._ends[number] - len(array))
            rows[here] = np.lib.stride_tricks.sliding_window_view(array, length)[places]
        for row in np.flatnonzero(~inside):
            rows[row] = self[int(starts[row]) : int(starts[row]) + length]
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return {"arrays": [MemmapSlice.of(array) or array for array in self.arrays]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays: list[IdArray | MemmapSlice] = state["arrays"]
        self.__init__([array.open() if isinstance(array, MemmapSlice) else array for array in arrays])  # type: ignore[misc]
