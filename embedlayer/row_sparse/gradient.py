"""Gradients that torch's clipping and loss scaling take: sparse ones of row-sparse tables, and those of a rank's rows.

Torch implements few of the functions that `torch.nn.utils` and `GradScaler` call for sparse tensors; they are here. Of
a sharded table torch sees the rows of one rank alone; here their norm, and whether a number is not finite, are those of
all ranks.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedlayer.core.collectives import Collectives
from embedlayer.core.devices import device_kind
from embedlayer.core.errors import ShapeError
from embedlayer.core.torch_state import (
    foreach_clamp_max_,
    foreach_clamp_min_,
    foreach_norm,
    sparse_indices,
    sparse_values,
    torch_foreach_mul_,
    unscale_all_,
)
from embedlayer.kernels.cpu import rows as row_kernels
from embedlayer.kernels.gpu.launch import columns_of, imported_launches, launch
from embedlayer.kernels.operation import Operation

CACHE_LINE = 64  # bytes

NUMBERS_IN_BLOCK = 1 << 16  # numbers in the rows that a thread of a kernel claims at once

Number = float | Tensor

call_plain: Callable[..., Any] = nn.Parameter.__torch_function__
"""Call a torch function without any `__torch_function__`: `call_plain(function, types, args, kwargs)`."""


class TableGradient(Tensor):
    """The gradient of a table that the functions of `torch.nn.utils` and `GradScaler` take as they should.

    A `RowSparseGradient`, or a dense gradient of the rows that one rank stores of a sharded table.
    """

    shard_group: Any = None
    is_sharded = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the torch function `func`, or our replacement in `ON_GRADIENTS`."""
        if any(not issubclass(kind, TableGradient) and not issubclass(cls, kind) for kind in types):
            return NotImplemented  # the other class decides what happens first, such as applying pending updates
        result = call_plain(ON_GRADIENTS.get(func, func), types, args, kwargs or {})
        if type(result) is Tensor and result.layout is torch.sparse_coo:  # a copy, a scaled gradient
            gradient = with_torch_functions(result)
            gradient.is_sharded = any(isinstance(each, TableGradient) and each.is_sharded for each in args)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a copy, and record it in `memo`, so that a deep-copied structure has one copy of each gradient."""
        copy: Tensor = memo.setdefault(id(self), self.clone())
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor, so that `torch.load` needs no class of this library."""
        return call_plain(Tensor.detach, (), (self,), {}).__reduce_ex__(protocol)


class RowSparseGradient(TableGradient):
    """A sparse COO gradient `(V, D)` of a row-sparse table that the functions of `torch.nn.utils` can clip."""

    summed: tuple[Tensor, int | None] | None = None
    """Row numbers in ascending order, and the row that they leave out, of values that are sums; see `is_summed`."""

    def is_summed(self, drop: int | None = None) -> bool:
        """Return whether `summed` is still true, for a gradient without the row `drop`; such as after scaling."""
        if self.summed is None:
            return False
        (summed, dropped), rows = self.summed, rows_and_values(self)[0]
        is_same = summed.untyped_storage()._cdata == rows.untyped_storage()._cdata and summed.shape == rows.shape
        return is_same and (drop is None or drop == dropped)


def row_gradient(parameter: Tensor, grad: Tensor, *, drop: int | None = None) -> RowSparseGradient:
    """Return a gradient of the weight `parameter` as a sparse gradient with each row once, in ascending order."""
    gradient = coalesced(grad, drop=drop)
    if gradient is grad:
        return gradient
    with_torch_functions(gradient, parameter)
    if device_kind(grad) == "cpu":  # not by a look-up, which has checked its IDs
        rows = rows_and_values(gradient)[0]
        if len(rows) and not (rows[0] >= 0 and rows[-1] < grad.shape[0]):
            raise ShapeError(f"A gradient {tuple(grad.shape)} has rows {int(rows[0])} to {int(rows[-1])}.")
    return gradient


def rows_in_block(table: Tensor) -> int:
    """Return how many rows of a matrix a thread of a kernel claims at once; at least 1."""
    return max(1, NUMBERS_IN_BLOCK // max(1, table.shape[1]))


class Segments(NamedTuple):
    """The places of equal IDs in a batch of N IDs, of which U are distinct."""

    rows: Tensor
    order: Tensor
    offsets: Tensor


def segments_of_equal_ids(ids: Tensor, *, drop: int | None = None, by_kernel: bool | None = None) -> Segments:
    """Return the distinct IDs of a batch, and the places in the batch where each of them is.

    `by_kernel` is what the caller knows: whether kernels may run, and the IDs are on the CPU; `None` to ask.
    """
    if SEGMENTS_OF_EQUAL_IDS.applies(ids) if by_kernel is None else by_kernel:
        count, counts, left_out = ids.shape[0], np.zeros(2, np.int64), -1 if drop is None else drop
        found = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count + 1, np.int64)
        if row_kernels.segments_of_equal_ids.run(1, ids.contiguous(), left_out, *found, counts, block=1):
            distinct, places = counts.tolist()
            if distinct >= 0:
                parts = found[0][:distinct], found[1][:places], found[2][: distinct + 1]
                return Segments(*map(torch.from_numpy, parts))
    ids, order = torch.sort(ids.long(), stable=True)
    if drop is not None:
        others = ids != drop
        ids, order = ids[others], order[others]
    rows, counts = torch.unique_consecutive(ids, return_counts=True)
    return Segments(rows, order, F.pad(counts.cumsum(0), (1, 0)))


def sum_segments(values: Tensor, segments: Segments, *, by_kernel: bool) -> Tensor:
    """Sum the vectors `values`, `(N, D)`, of each segment, and return the sums, `(U, D)`, in new memory."""
    rows, order, offsets = segments
    if by_kernel:
        out = values.new_empty((rows.shape[0], values.shape[1]))
        if row_kernels.sum_segments.run(
            rows.shape[0], values.contiguous(), order, offsets, out, block=rows_in_block(out)
        ):
            return out
    return F.embedding_bag(order, values, offsets[:-1], mode="sum")


row_launches = partial(imported_launches, "embedlayer.kernels.gpu.rows")

SEGMENTS_OF_EQUAL_IDS = Operation(
    "places of equal IDs in a batch", segments_of_equal_ids, cpu=[row_kernels.segments_of_equal_ids]
)
SUM_SEGMENTS = Operation(
    "sums of the gradients of equal IDs",
    sum_segments,
    cpu=[row_kernels.sum_segments],
    gpu=row_launches,
    launches=["sum_equal_rows"],
)


@SUM_SEGMENTS.operator()
def sum_equal_rows(rows: Tensor, order: Tensor, values: Tensor, drop: int | None) -> Tensor:
    """Return the sum of the vectors of equal rows at the first place of each row, and zeros elsewhere, `(N, D)`.

    - `rows`: sorted row numbers, int64, `(N,)`.
    - `order`: their places in `values`, `(N,)`.
    - `drop`: row whose sum is 0, or `None`.
    """
    sums = values.new_empty(values.shape)
    arguments = {"rows": rows, "order": order, "values": values.contiguous(), "sums": sums, "places": len(rows)}
    launch(row_launches(), "sum_equal_rows", **arguments, **columns_of(sums), drop=-1 if drop is None else drop)
    return sums


def sort_rows(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the IDs of a batch of any shape as sorted row numbers, `(N,)`, and their order."""
    rows, order = torch.sort(ids.flatten().long(), stable=True)
    return rows, order


def sums_on_device(values: Tensor) -> bool:
    """Return whether `summed_gradient` takes vectors: they are on a CUDA device, and Triton kernels apply to them."""
    return device_kind(values) == "cuda" and SUM_SEGMENTS.applies(values)


def summed_gradient(
    places: tuple[Tensor, Tensor], values: Tensor, shape: tuple[int, ...], drop: int | None
) -> RowSparseGradient:
    """Return a sparse COO gradient of vectors `values`, `(N, D)`, with sums of equal rows, without a wait."""
    sums = sum_equal_rows(*places, values.reshape(-1, shape[1]), drop)
    return _summed(places[0], sums, shape, drop, distinct=False)


def finished_gradient(rows: Tensor, values: Tensor, shape: tuple[int, ...], drop: int | None) -> RowSparseGradient:
    """Return a sparse COO gradient of sums, of which `rows` are distinct, in ascending order and without `drop`."""
    return _summed(rows, values, shape, drop, distinct=True)


def _summed(
    rows: Tensor, values: Tensor, shape: tuple[int, ...], drop: int | None, *, distinct: bool
) -> RowSparseGradient:
    grad = torch.sparse_coo_tensor(rows.unsqueeze(0), values, shape, is_coalesced=distinct, check_invariants=False)
    gradient = with_torch_functions(grad)
    assert isinstance(gradient, RowSparseGradient)
    gradient.summed = rows, drop
    return gradient


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros whose memory the system provides at the first write; NumPy requests large pages for it."""
    if dtype == torch.bfloat16:
        return untouched_zeros(shape, torch.int16).view(dtype)
    number = torch.empty(0, dtype=dtype).numpy().dtype
    memory = np.zeros(math.prod(shape) + CACHE_LINE // number.itemsize, number)
    start = -memory.ctypes.data % CACHE_LINE // number.itemsize
    return torch.from_numpy(memory[start : start + math.prod(shape)].reshape(shape))


def coalesced(grad: Tensor, *, drop: int | None = None) -> RowSparseGradient:
    """Return a gradient as a sparse one with each row once, in ascending order: `grad` if it is one, or a new one."""
    if isinstance(grad, RowSparseGradient) and grad.is_summed(drop):
        return grad
    shape = (grad.shape[0], grad.shape[1])
    if grad.layout is not torch.sparse_coo:
        rows = (grad != 0).any(1).nonzero().squeeze(1)
        if drop is not None:
            rows = rows[rows != drop]
        return finished_gradient(rows, grad.index_select(0, rows), shape, drop)
    rows, values = rows_and_values(grad)
    if sums_on_device(values):
        return summed_gradient(sort_rows(rows), values, shape, drop)
    by_kernel = device_kind(values) == "cpu" and values.dim() == 2 and SUM_SEGMENTS.applies(values)
    segments = segments_of_equal_ids(rows, drop=drop, by_kernel=by_kernel or None)
    return finished_gradient(segments.rows, sum_segments(values, segments, by_kernel=by_kernel), shape, drop)


def differentiable_rows(grad: Tensor, *, drop: int | None = None) -> Tensor:
    """Return a sparse COO gradient without the row `drop`, with the graph by which it can be differentiated."""
    if drop is None:
        return grad
    grad = grad.coalesce()
    rows, values = grad.indices(), grad.values()
    others = rows[0] != drop
    return torch.sparse_coo_tensor(rows[:, others], values[others], grad.shape, is_coalesced=True)


def with_torch_functions(grad: Tensor, parameter: Tensor | None = None) -> TableGradient:
    """Turn a gradient into one that torch's clipping and loss scaling take, in place, and return it."""
    # as torch.nn.UninitializedParameter becomes a Parameter; sparse has no views
    grad.__class__ = RowSparseGradient if grad.layout is torch.sparse_coo else TableGradient
    assert isinstance(grad, TableGradient)
    if parameter is not None and hasattr(parameter, "shard_group"):
        grad.shard_group, grad.is_sharded = parameter.shard_group, True
    return grad


def rows_and_values(grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows `(U,)` of a sparse COO gradient and their values `(U, D)` as plain tensors, without a copy."""
    values = call_plain(sparse_values, (), (grad,), {})
    return call_plain(sparse_indices, (), (grad,), {})[0], values


def require_row_sparse(grad: Tensor) -> Tensor:
    """Return the gradient of a row-sparse table unchanged, after checking that it is sparse."""
    if grad.layout is not torch.sparse_coo:
        raise ShapeError(
            f"A dense gradient {tuple(grad.shape)} arrived at a row-sparse table: something read all rows with "
            f"gradients on. Read them under torch.no_grad(), use a TokenEmbedding, or see docs/errors.md, Dense "
            f"gradients of a row-sparse table."
        )
    return grad


def vector_norm(grad: Tensor, ord: float = 2, *dims: Any, **options: Any) -> Tensor:
    """Compute `torch.linalg.vector_norm` also for a sparse gradient, whose absent rows count as zeros."""
    values = grad
    is_whole = not dims and not options.keys() - {"dtype"}
    if is_whole and grad.layout is torch.sparse_coo:
        values = grad.to_dense() if ord < 0 else sparse_values(coalesced(grad))  # zeros decide a norm of negative order
        values = values if values.numel() else values.new_zeros(1)
    norm: Tensor = torch.linalg.vector_norm(values, ord, *dims, **options)
    if not (is_whole and isinstance(grad, TableGradient) and grad.is_sharded):
        return norm
    if grad.shard_group is None:
        raise ShapeError(
            f"A gradient {tuple(grad.shape)} with the rows of one rank alone has no norm of all ranks: take that of "
            f"parameter.grad itself, call embedlayer.clip_grad_norm_, or take that of grad.to_dense() for this rank."
        )
    return norm_over(Collectives(grad.shard_group), norm, ord)


def norm_over(ranks: Collectives, norm: Tensor, ord: float) -> Tensor:
    """Return the norm of order `ord` of numbers divided over ranks; `norm` is that of this rank's."""
    if math.isinf(ord):
        return ranks.all_reduce(norm, "max" if ord > 0 else "min")
    total: Tensor = ranks.all_reduce(norm) if ord == 0 else ranks.all_reduce(norm**ord) ** (1 / ord)
    return total


def unscale_(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply gradients in place, and set `found_inf` to 1 if one is not finite, for `GradScaler`."""
    unscale_all_(list(grads), found_inf, inv_scale)
    group = next((each.shard_group for each in grads if isinstance(each, TableGradient) and each.is_sharded), None)
    if group is not None:
        Collectives(group).all_reduce(found_inf, "max")


def values_of_rows(grad: Tensor) -> Tensor:
    """Return the values of a sparse gradient, `(U, D)`, as `Tensor._values` does, for `GradScaler` to unscale them."""
    values: Tensor = sparse_values(grad)
    is_sharded = isinstance(grad, TableGradient) and grad.is_sharded
    return with_torch_functions(values, grad) if is_sharded else values


def mul_(grad: Tensor, factor: Number) -> Tensor:
    """Multiply a gradient in place, as `Tensor.mul_` does, and return it."""
    if grad.layout is torch.sparse_coo and (not isinstance(factor, Tensor) or factor.dim() == 0):
        sparse_values(grad).mul_(factor)  # torch would replace its row numbers too
        return grad
    return grad.mul_(factor)


def foreach_mul_(grads: Sequence[Tensor], factors: Number | Sequence[Number]) -> None:
    """Multiply each gradient in place, as `torch._foreach_mul_` does; torch has none for sparse tensors."""
    each = factors if isinstance(factors, Sequence) else [factors] * len(grads)
    for grad, factor in zip(grads, each, strict=True):
        mul_(grad, factor)


def clamp_(grad: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """Clamp the values of a gradient to `min..max` in place, as `Tensor.clamp_` does, and return it."""
    if grad.layout is not torch.sparse_coo:
        return grad.clamp_(min, max)
    if (min is not None and min > 0) or (max is not None and max < 0):
        raise ShapeError(
            f"Clamping a row-sparse gradient {tuple(grad.shape)} to {min}..{max} would give every row a gradient: the "
            f"range must contain 0."
        )
    if (summed := coalesced(grad)) is not grad:  # equal rows are summed first
        grad.copy_(summed)
    sparse_values(grad).clamp_(min, max)
    return grad


ON_GRADIENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.linalg.vector_norm: vector_norm,
    foreach_norm: lambda grads, *args, **options: [vector_norm(grad, *args, **options) for grad in grads],
    torch_foreach_mul_: foreach_mul_,
    Tensor.mul_: mul_,
    Tensor.clamp_: clamp_,
    foreach_clamp_min_: lambda grads, least: [clamp_(grad, min=least) for grad in grads],
    foreach_clamp_max_: lambda grads, most: [clamp_(grad, max=most) for grad in grads],
    unscale_all_: unscale_,
    sparse_values: values_of_rows,
}
"""Functions that `torch.nn.utils` and `GradScaler` call on gradients, and what they are for a `TableGradient`."""
