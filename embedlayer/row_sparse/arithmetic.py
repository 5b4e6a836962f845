"""Arithmetic on some rows of a table, in chunks that fit the cache, for `PendingUpdates` and `RowAdamW`."""

import torch
from torch import Tensor

from embedlayer.core.block_sizes import NUMBERS, block_size
from embedlayer.core.devices import device_kind


def rows_at_once(table: Tensor) -> int:
    """Return how many rows of `table` to process at once so that a chunk fits the CPU cache; at least 1."""
    return max(1, block_size(NUMBERS, device_kind(table)) // table.shape[1])


def chunk_slices(rows: Tensor, size: int) -> list[slice]:
    """Return the slices that split the row numbers `rows` into chunks of `size`; the last chunk may be smaller."""
    return [slice(low, low + size) for low in range(0, len(rows), max(size, 1))]


def compute_dtype(table: Tensor) -> torch.dtype:
    """Return the dtype in which updates of `table` are computed: float64 for a float64 table, else float32."""
    return torch.float64 if table.dtype == torch.float64 else torch.float32


def tolerance_of(table: Tensor) -> float:
    """Return the relative error that `StepHistory.skipped_steps` may have, for a table of this dtype."""
    return 1e-12 if table.dtype == torch.float64 else 1e-7


def empty_rows(table: Tensor, rows: int, *, width: int | None = None) -> Tensor:
    """Allocate a buffer `(rows, width)`, or `(rows, D)`, in the dtype in which updates of `table` are computed."""
    return table.new_empty((rows, table.shape[1] if width is None else width), dtype=compute_dtype(table))


def gather_rows(table: Tensor, rows: Tensor, buffer: Tensor) -> Tensor:
    """Copy the rows `rows` of `table` into the start of `buffer`, converted to its dtype, and return that part."""
    values = buffer[: len(rows)]
    if values.dtype == table.dtype:
        return torch.index_select(table, 0, rows, out=values)
    return values.copy_(table.index_select(0, rows))


def square_root(squares: Tensor, *, out: Tensor) -> Tensor:
    return torch.rsqrt(squares, out=out).reciprocal_()


def apply_skipped_steps_(
    p: Tensor, m: Tensor, root: Tensor, decay: Tensor, terms: list[Tensor], buffer: Tensor
) -> None:
    """Apply the AdamW steps that rows skipped: `p = p * decay - m * sum_q weight_q / (root + node_q)`, in place."""
    weights, nodes = terms[: len(terms) // 2], terms[len(terms) // 2 :]
    total = torch.add(root, nodes[0], out=buffer)
    torch.div(weights[0], total, out=total)
    for weight, node in zip(weights[1:], nodes[1:], strict=True):
        total.addcdiv_(weight, root + node)
    p.mul_(decay).addcmul_(m, total, value=-1)
