"""Several mapped arrays as one: everything that windows ask of it, against the one array that it stands for."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedlayer.core.errors import SizeError
from embedlayer.data.memmap import ConcatenatedArray

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def in_parts(lengths: list[int]) -> tuple[ConcatenatedArray, np.ndarray]:
    whole = np.random.default_rng(0).integers(0, 60_000, sum(lengths)).astype(np.uint16)
    return ConcatenatedArray(np.split(whole, np.cumsum(lengths)[:-1])), whole


@given(LENGTHS, st.integers(-60, 60), st.integers(-60, 60))
def test_elements_and_slices_are_those_of_the_whole(lengths, begin, stop):
    parts, whole = in_parts(lengths)
    assert [int(parts[place]) for place in range(len(parts))] == whole.tolist()
    assert (len(parts), parts.shape, parts.ndim) == (len(whole), whole.shape, 1)
    assert (parts.dtype, parts.nbytes) == (whole.dtype, whole.nbytes)
    assert np.array_equal(parts[begin:stop], whole[begin:stop])
    assert np.array_equal(parts[begin:], whole[begin:])
    assert np.array_equal(np.asarray(parts[:stop], dtype=np.int64), whole[:stop].astype(np.int64))
    assert parts[-1] == whole[-1]
    assert parts.tolist() == whole.tolist()
    with pytest.raises(IndexError):
        parts[len(whole)]


@given(LENGTHS, st.integers(1, 20), st.data())
def test_windows_are_those_of_the_whole_across_the_ends_of_parts(lengths, length, data):
    parts, whole = in_parts([*lengths, 20])
    starts = np.array(data.draw(st.lists(st.integers(0, len(whole) - length), max_size=8)), dtype=np.int64)
    expected = np.lib.stride_tricks.sliding_window_view(whole, length)[starts]
    assert np.array_equal(parts.windows(starts, length), expected)
    assert parts.windows(starts, length).dtype == whole.dtype


def test_slices_are_views():
    parts, _ = in_parts([5, 5, 5])
    assert np.shares_memory(parts[3:12].arrays[1], parts.arrays[1])
    assert isinstance(parts[6:8], np.ndarray)
    assert np.shares_memory(parts[6:8], parts.arrays[1])


def test_what_would_copy_unasked_is_refused():
    parts, _ = in_parts([5, 5])
    with pytest.raises(SizeError):
        parts[::2]
    with pytest.raises(ValueError, match="only by copying"):
        parts.__array__(copy=False)  # which NumPy 2 calls for np.asarray(parts, copy=False)


def test_mapped_parts_travel_as_file_names(tmp_path):
    whole = np.arange(20_000, dtype="<u2")
    whole[:12_000].tofile(tmp_path / "a")
    whole[12_000:].tofile(tmp_path / "b")
    files = [(tmp_path / "a", 12_000), (tmp_path / "b", 8000)]
    parts = ConcatenatedArray([np.memmap(file, "<u2", "r", shape=(count,)) for file, count in files])
    packed = pickle.dumps(parts[100:-100])
    assert len(packed) < 1000
    again = pickle.loads(packed)
    assert all(isinstance(part, np.memmap) for part in again.arrays)
    assert np.array_equal(again, whole[100:-100])
