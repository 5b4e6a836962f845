"""Kernels on rows of a table: sums of gradients, pending updates and AdamW's step, in one pass each.

`embedlayer.tables.sparse_gradient`, `embedlayer.tables.pending_updates` and `embedlayer.optim.row_adamw` define them.
"""

from typing import Any

from embedlayer.kernels.numbers import empty_computed, kernel, narrow, widen


@kernel
def sum_segments(start: int, stop: int, values: Any, order: Any, offsets: Any, out: Any) -> None:
    """Sum the vectors of each segment, one after another in the order of `order`.

    Args:
        start: First segment.
        stop: Last segment + 1.
        values: Vectors, `(N, D)`.
        order: Places in `values`, segment by segment.
        offsets: Start of each segment in `order`, and the end of the last.
        out: Sums, `(U, D)`.
    """
    width = values.shape[1]
    total = empty_computed(width, values[0, 0])
    for segment in range(start, stop):
        first, end = offsets[segment], offsets[segment + 1]
        summed, values_of = out[segment], values[order[first]]
        if end - first == 1:
            for i in range(width):
                summed[i] = values_of[i]
            continue
        for i in range(width):
            total[i] = widen(values_of[i])
        for n in range(first + 1, end):
            values_of = values[order[n]]
            for i in range(width):
                total[i] += widen(values_of[i])
        for i in range(width):
            summed[i] = narrow(total[i], values_of[i])
