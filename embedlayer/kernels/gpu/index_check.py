"""Triton kernel that checks token IDs or positions, and the record of the first bad one that look-up kernels share.

`embedlayer.core.index_checks.clamp_and_record` defines both. The record is written without atomics: a program that has
a bad index reads the indices from the first one on until one is bad. Only the program that has this one reads and
writes the record. So there is one writer, and the result does not depend on the order of the programs. A call without
bad indices reads no index twice and the record never.
"""

import torch
import triton
import triton.language as tl

from embedlayer.kernels.gpu.launch import Launch

INTEGERS = ("count", "rows", "length")


@triton.jit
def record_first_bad(indices, record, first, stop, rows, offset, length, SCANNED: tl.constexpr):
    """Record the first bad index of the call if this program has it and the record is empty.

    A program calls it if one of its indices is bad, in one of several programs that have the same indices. An index is
    bad if `indices[place] + offset` is not in `0 .. rows - 1`. The program has the places `first` to `stop - 1` of
    `indices`. `record` has the flat place, the index with the offset, and `length`, the size of the last dimension of
    the indices; see `embedlayer.kernels.index_check.IndexCheck`. `SCANNED` indices are read at a time.
    """
    end = tl.cast(stop, tl.int64)
    start = end * 0
    place = end
    while (start < end) & (place == end):
        i = start + tl.arange(0, SCANNED)
        row = tl.load(indices + i, mask=i < end, other=0).to(tl.int64) + offset
        is_bad = (i < end) & ((row < 0) | (row >= rows))
        place = tl.min(tl.where(is_bad, i, end), 0)
        start += SCANNED
    if tl.load(record, mask=(place >= first) & (place < end), other=0) < 0:
        tl.store(record, place)
        tl.store(record + 1, tl.load(indices + place).to(tl.int64) + offset)
        tl.store(record + 2, tl.cast(length, tl.int64))


@triton.jit(do_not_specialize=INTEGERS)
def clamp_and_record(indices, record, clamped, outside, count, rows, length, SIZE: tl.constexpr):
    """Store the row numbers `indices`, clamped to `0 .. rows - 1`, and which of them were not in that range.

    All have `count` numbers; `outside` is boolean.
    """
    first = tl.program_id(0).to(tl.int64) * SIZE
    i = first + tl.arange(0, SIZE)
    inside = i < count
    row = tl.load(indices + i, mask=inside, other=0)
    is_bad = inside & ((row < 0) | (row >= rows))
    tl.store(clamped + i, tl.minimum(tl.maximum(row, 0), rows - 1), mask=inside)
    tl.store(outside + i, is_bad, mask=inside)
    if tl.max(is_bad.to(tl.int32), 0) > 0:
        stop = tl.minimum(first + SIZE, tl.cast(count, tl.int64))
        record_first_bad(indices, record, first, stop, rows, 0, length, SIZE)


LAUNCHES = {
    "clamp_and_record": Launch(
        clamp_and_record,
        grid=lambda a: (-(-a["count"] // a["SIZE"]),),
        types={
            **dict.fromkeys(("indices", "clamped"), "*z"),
            "record": "*i64",
            "outside": "*i1",
            **dict.fromkeys(INTEGERS, "i32"),
        },
        blocks={"SIZE": 512},
        wide=(),
        reads=("indices",),
        writes=("clamped", "outside"),
        dtypes=(torch.int64, torch.int32),
    ),
}
"""How each kernel is launched."""
