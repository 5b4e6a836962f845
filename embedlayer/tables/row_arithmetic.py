"""Arithmetic on some rows of a table, in chunks that fit the cache, for `PendingUpdates` and `RowAdamW`."""

import torch
from torch import Tensor

NUMBERS_AT_ONCE = 1 << 18
"""Numbers in a chunk of rows: few enough for the cache, and enough to keep threads busy."""


def rows_at_once(table: Tensor) -> int:
    """Return the number of rows in a chunk that fits the cache."""
    return max(1, NUMBERS_AT_ONCE // table.shape[1])


def chunk_slices(rows: Tensor, size: int) -> list[slice]:
    """Return the slices that split `rows` into chunks of `size`.

    Example:
        >>> chunk_slices(torch.arange(7), 3)
        [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None)]
    """
    return [slice(low, low + size) for low in range(0, len(rows), max(size, 1))]


def compute_dtype(table: Tensor) -> torch.dtype:
    """Return the dtype of updates: float64 for a float64 table, else float32."""
    return torch.float64 if table.dtype == torch.float64 else torch.float32


def empty_rows(table: Tensor, rows: int) -> Tensor:
    """Allocate a buffer for `rows` rows of `table`, `(rows, D)`, in `compute_dtype(table)`."""
    return table.new_empty((rows, table.shape[1]), dtype=compute_dtype(table))


def gather_rows(table: Tensor, rows: Tensor, buffer: Tensor) -> Tensor:
    """Copy `table[rows]` into the start of `buffer`, in its dtype, and return that part of `buffer`."""
    values = buffer[: len(rows)]
    if values.dtype == table.dtype:
        return torch.index_select(table, 0, rows, out=values)
    return values.copy_(table.index_select(0, rows))


def square_root(squares: Tensor, *, out: Tensor) -> Tensor:
    """Write the square root of `squares` to `out`. On a CPU the reciprocal of `rsqrt` is faster than `sqrt`."""
    return torch.rsqrt(squares, out=out).reciprocal_()


def apply_skipped_steps_(
    p: Tensor, m: Tensor, root: Tensor, decay: Tensor, terms: list[Tensor], buffer: Tensor
) -> None:
    """Apply AdamW steps without gradient to rows in place: `p = p * decay - m * sum_q weight_q / (root + node_q)`.

    Args:
        p: Values, `(U, D)`, written in place.
        m: First moments, `(U, D)`.
        root: Square roots of the second moments, `(U, D)`.
        decay: Factor of the weight decay of all steps, `(U, 1)`.
        terms: All weights, then all nodes, each `(U, 1)`; see `embedlayer.tables.lazy_adam`.
        buffer: Memory as large as `p`, overwritten.
    """
    weights, nodes = terms[: len(terms) // 2], terms[len(terms) // 2 :]
    total = torch.add(root, nodes[0], out=buffer)
    torch.div(weights[0], total, out=total)
    for weight, node in zip(weights[1:], nodes[1:], strict=True):
        total.addcdiv_(weight, root + node)
    p.mul_(decay).addcmul_(m, total, value=-1)
