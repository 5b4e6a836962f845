"""Triton kernel of the input of K streams: look-up, sum of K rows, and the check of the IDs of each stream.

`embedlayer.tables.sums.sum_vectors` defines the numbers. A program has one sum and a part of its width.
"""

import triton
import triton.language as tl

from embedlayer.kernels.gpu.launch import Launch, Variant

INTEGERS = ("sums", "units", "columns", "streams", "rows", "shared", "ignored", "length")


@triton.jit
def _row_of(ids, starts, i, k, mask, columns, rows, shared):
    """Return the row of the IDs at the places `i`, which are of stream `k`, and which of them are outside of it."""
    index = tl.load(ids + i, mask=mask, other=0)
    row, outside = index, (index < 0) | (index >= rows)
    if starts is not None:
        start = tl.load(starts + k)
        limit = tl.load(starts + k + 1, mask=k + 1 < columns, other=rows) - start
        is_shared = (index == shared) & (index >= 0)
        row = tl.where(is_shared, index, index + start)
        outside = ((index < 0) | (index >= limit)) & (is_shared == 0)
    return row, outside


@triton.jit
def _record(ids, starts, record, n, k, columns, streams, rows, shared, length, SCANNED: tl.constexpr):
    """Record the ID of sum `n` and stream `k`, which is outside, if no ID before it is and the record is empty."""
    place = n * columns + k
    begin, first = n * 0, place
    while (begin <= n) & (first == place):
        for at in range(streams):
            i = (begin + tl.arange(0, SCANNED)) * columns + at
            _, outside = _row_of(ids, starts, i, at, i < place, columns, rows, shared)
            first = tl.minimum(first, tl.min(tl.where((i < place) & outside, i, place), 0))
        begin += SCANNED
    if tl.load(record, mask=first == place, other=0) < 0:
        tl.store(record, place)
        tl.store(record + 1, tl.load(ids + place))
        tl.store(record + 2, tl.cast(length, tl.int64))


@triton.jit(do_not_specialize=INTEGERS)
def sum_streams(
    x, ids, starts, record, kept_ids, factors, out,
    sums, units, columns, streams, rows, shared, ignored, length, UNIT: tl.constexpr, WIDTH: tl.constexpr,
    SCANNED: tl.constexpr,
):  # fmt: skip
    """Store the sums of `x[ids[n, k] + starts[k]]` over the first `streams` of K columns, in order, `(sums, D)`.

    D is `units * UNIT`, K is `columns`; `sums` is read by the grid alone. Each sum is rounded to the dtype of `x`.

    - `x`: `(rows, D)`. An ID outside of its stream adds nothing and is recorded in `record`, `(3,)`: its flat place
      among the K columns, its value, and `length`. `starts` are the first rows of the streams, `(K,)`, or `None` for
      IDs that are rows. The ID `shared`, or none with -1, is the row `shared` in each stream.
    - `kept_ids`: rows, `(sums, streams)`, 0 for those outside; `factors`: 1 for each row, 0 for those outside and for
      the row `ignored`.
    """
    stride = (units * UNIT).to(tl.int64)
    n = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = j < units * UNIT
    total = tl.zeros((WIDTH,), tl.float32)
    for k in range(streams):
        row, is_bad = _row_of(ids, starts, n * columns + k, k, True, columns, rows, shared)
        row = tl.where(is_bad, 0, row)
        value = tl.load(x + row * stride + j, mask=inside & (is_bad == 0), other=0.0).to(tl.float32)
        total = tl.where(k == 0, value, (total + value).to(out.dtype.element_ty).to(tl.float32))
        if tl.program_id(1) == 0:
            tl.store(kept_ids + n * streams + k, row)
            counts = (is_bad == 0) & (row != ignored)
            tl.store(factors + n * streams + k, counts.to(tl.float32).to(factors.dtype.element_ty))
            if is_bad:
                _record(ids, starts, record, n, k, columns, streams, rows, shared, length, SCANNED)
    tl.store(out + n * stride + j, total.to(out.dtype.element_ty), mask=inside)


LAUNCHES = {
    "sum_streams": Launch(
        sum_streams,
        grid=lambda a: (a["sums"], -(-a["units"] * a["UNIT"] // a["WIDTH"])),
        types={
            **dict.fromkeys(("x", "factors", "out"), "*z"),
            **dict.fromkeys(("ids", "starts", "record", "kept_ids"), "*i64"),
            **dict.fromkeys(INTEGERS, "i32"),
        },
        blocks={"WIDTH": 1024, "SCANNED": 128},
        register_limit=128,
        wide=("x", "out"),
        reads=("ids",),
        writes=("out", "kept_ids", "factors"),
        gathered={"x": lambda a: a["kept_ids"].numel() * a["units"] * a["UNIT"]},
        variants={
            "streams": Variant({"UNIT": 8}),
            "rows": Variant({"starts": None, "UNIT": 8}),
            "any width": Variant({"UNIT": 1}),
        },
    ),
}
"""How the kernel is launched."""
