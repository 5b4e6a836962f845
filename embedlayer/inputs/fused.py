"""Look-up, scale, position addition and dropout of an input embedding in one pass over memory.

As separate operations, `dropout(scale * rows[ids] + positions)` reads and writes all vectors five times, and dropout
spends most of its time on drawing random numbers one after another. Here a compiled kernel gathers, scales, adds and
masks one vector at a time, on a CPU and on CUDA (`embedlayer.kernels.input`). Without kernels, torch operators on a CPU
do the same with blocks of vectors that fit its cache.

Dropout draws 16 random bits for each element, so its probability is rounded to a multiple of 1/65536. The bits are a
function of a seed and of the element's place (`random_words`), and the seed is drawn from torch's default generator. So
the mask is not stored: the backward pass computes it again. It is the same with and without kernels on a CPU, and with
kernels on CUDA. The masks of `torch.nn.functional.dropout` and of compiled graphs are other ones.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.core.devices import device_kind
from embedlayer.core.torch_state import fusible, has_hooks, has_memory, is_capturing
from embedlayer.kernels import input as kernels
from embedlayer.kernels.index_check import IndexCheck
from embedlayer.kernels.input import (
    INPUT_EMBEDDING,
    Dropout,
    StoredRows,
    gather_rows,
    look_up_applies,
    plain_scale_add_drop,
    scale_applies,
)
from embedlayer.kernels.kernel import NO_ROWS
from embedlayer.kernels.operation import Operation
from embedlayer.positions.position import AdditivePosition, Position
from embedlayer.row_sparse.gradient import Segments, finished_gradient, segments_of_equal_ids, untouched_zeros
from embedlayer.row_sparse.hooks import applied_rows
from embedlayer.row_sparse.storage import raw_weight
from embedlayer.tables.lookup import LookupTable

BACKWARD = Operation(
    "backward pass of the look-up of the input: gradients of rows and positions",
    plain_scale_add_drop,
    cpu=[kernels.sum_masked_segments],
)

CLAIMED_NUMEL = 1 << 15  # elements that a thread of a kernel claims at once

BLOCK_NUMEL = 1 << 20
"""Elements in a block of torch operators: few enough for the CPU cache, enough to keep all threads busy."""


CALL = {"__call__": nn.Module.__call__}
SKIPPED_METHODS: tuple[tuple[type, dict[str, Callable[..., Any]]], ...] = (
    (nn.Dropout, {**CALL, "forward": nn.Dropout.forward}),
    (LookupTable, {**CALL, "forward": LookupTable.forward}),
    (AdditivePosition, {**CALL, "forward": AdditivePosition.forward, "add": AdditivePosition.add}),
    (Position, {"add": Position.add}),
)
"""Methods of a part of an input embedding that a fused computation replaces, saved at import to detect changes."""


def may_skip_call(*parts: Callable[..., Any]) -> bool:
    """Return whether a fused computation may replace the calls of tables, position schemes and dropout modules."""
    called: list[nn.Module] = []
    for part in parts:
        kind, own = type(part), vars(part)
        methods = None
        for base, replaced in SKIPPED_METHODS:
            if base in kind.__mro__:  # without the functions that `isinstance` calls
                methods = replaced
                break
        if methods is None:
            return False
        for name, method in methods.items():
            if name in own or getattr(kind, name, None) is not method:
                return False
        if isinstance(part, nn.Module) and "__call__" in methods:
            called.append(part)
    return not has_hooks(*called)


def scale_add_drop(
    x: Float[Tensor, "*batch T D"],
    scale: float | Tensor | None,
    addend: Float[Tensor, "*rows T D"] | StoredRows | None,
    dropout: float,
) -> Float[Tensor, "*batch T D"]:
    """Compute `dropout(scale * x + addend)` of fresh vectors that nothing else reads; may overwrite `x`."""
    kind = device_kind(x)
    if kind == "cuda" and look_up_applies(x):
        return _on_cuda(x, tuple(x.shape), scale, addend, dropout)
    addend = gather_rows(addend) if isinstance(addend, StoredRows) else addend
    if kind != "cpu" or isinstance(scale, Tensor):
        return plain_scale_add_drop(x, scale, addend, dropout)
    if not dropout and addend is not None:  # one rounding, as in the kernel
        return torch.add(addend.to(x.dtype), x, alpha=1.0 if scale is None else scale)
    if not dropout or not _fits(x.shape, addend) or not fusible(x, addend):
        return plain_scale_add_drop(x, scale, addend, dropout)
    addend = None if addend is None else addend.to(x.dtype)
    result: Tensor = _ScaleAddDrop.apply(x, addend, 1.0 if scale is None else scale, dropout)  # type: ignore[no-untyped-call]
    return result


def gather_scale_add_drop(
    stored: StoredRows,
    scale: float | Tensor | None,
    addend: Float[Tensor, "*rows T D"] | StoredRows | None,
    dropout: float,
) -> Float[Tensor, "*batch T D"] | None:
    """Compute `dropout(scale * weight[ids] + addend)`; return `None` where looking the rows up first is faster."""
    ids, weight, check, padding_idx, sparse = stored
    shape = (*ids.shape, weight.shape[1])
    if device_kind(ids) == "cuda":
        return _on_cuda(stored, shape, scale, addend, dropout)
    rows = raw_weight(weight) if sparse else weight
    added = gather_rows(addend) if isinstance(addend, StoredRows) else addend
    added = None if added is None else added.to(rows.dtype)
    if isinstance(scale, Tensor) or not _fits(shape, added):
        return None
    by_kernel = INPUT_EMBEDDING.applies(ids, rows, added)
    if not by_kernel and (torch.is_grad_enabled() or not fusible(weight, added)):
        return None
    result: Tensor = _GatherScaleAddDrop.apply(  # type: ignore[no-untyped-call]
        weight, added, ids, 1.0 if scale is None else scale, dropout, padding_idx, sparse, check, by_kernel
    )
    return result


def _on_cuda(
    source: Tensor | StoredRows,
    shape: tuple[int, ...],
    scale: float | Tensor | None,
    addend: Tensor | StoredRows | None,
    dropout: float,
) -> Tensor:
    """Compute `dropout(scale * source + addend)` on CUDA, in one launch if a kernel takes its arguments."""
    rows = source.weight if isinstance(source, StoredRows) else source
    if isinstance(addend, StoredRows) and addend.weight.dtype != rows.dtype:
        addend = gather_rows(addend)
    if isinstance(addend, Tensor):
        addend = addend.to(rows.dtype).contiguous()
    if not _fits(shape, addend) or not scale_applies(scale, rows, addend if isinstance(addend, Tensor) else None):
        vectors = gather_rows(source) if isinstance(source, StoredRows) else source
        added = gather_rows(addend) if isinstance(addend, StoredRows) else addend
        return plain_scale_add_drop(vectors, scale, added, dropout)
    if isinstance(source, Tensor) and scale is None and addend is None and dropout == 0:
        return source
    if dropout and has_memory(rows) and is_capturing(rows):
        return F.dropout(gather_rows(source, scale=scale, addend=addend), dropout)
    return gather_rows(source, scale=scale, addend=addend, dropout=Dropout.drawn(dropout))


def dropout_step(module: Callable[..., Any], x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
    in_graph = DROPOUT.applies_in_graph(x)
    if in_graph and type(module) is nn.Dropout and module.training and module.p > 0 and may_skip_call(module):
        dropped: Tensor = dropout(x, torch.randint(1 << 62, (), device=x.device), module.p)
    else:
        dropped = module(x)
    return dropped


def plain_dropout(x: Tensor, seed: Tensor, probability: float) -> Tensor:
    """Set elements of `x` to 0 by the mask of a seed, and multiply the others by `1 / (1 - probability)`."""
    drawn, vectors = Dropout.drawn(probability, int(seed)), x.reshape(-1, x.shape[-1])
    return (vectors * drawn.growth * drawn.mask(0, len(vectors), vectors)).view(x.shape)


DROPOUT = Operation("dropout in graphs of `torch.compile`", plain_dropout, cpu=[kernels.gather_scale_add_drop])


@DROPOUT.operator(transposed=())
def dropout(x: Tensor, seed: Tensor, probability: float) -> Tensor:
    """Compute `plain_dropout`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if has_memory(x):
        drawn, vectors = Dropout.drawn(probability, int(seed)), (-1, x.shape[-1])
        source, target = x.contiguous().view(vectors), out.view(vectors)
        _compute(source, None, target, 1.0, None, drawn, by_kernel=True)
    return out


class _ScaleAddDrop(torch.autograd.Function):
    """Overwrite `x` with `dropout(scale * x + addend)`; see `scale_add_drop`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, addend: Tensor | None, scale: float, dropout: float) -> Tensor:
        ctx.scale, ctx.dropout = scale, Dropout.drawn(dropout)
        ctx.addend_shape = None if addend is None else addend.shape
        ctx.mark_dirty(x)
        _compute(x, None, x, scale, addend, ctx.dropout, by_kernel=INPUT_EMBEDDING.applies(x, addend))
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grown = _masked(grad, ctx.dropout)
        grad_addend = grown.sum_to_size(ctx.addend_shape) if ctx.needs_input_grad[1] else None
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grown if ctx.scale == 1 else grown * ctx.scale
        return grad_x, grad_addend, None, None


class _GatherScaleAddDrop(torch.autograd.Function):
    """Compute `dropout(scale * weight[ids] + addend)`; see `gather_scale_add_drop`."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        addend: Tensor | None,
        ids: Tensor,
        scale: float,
        dropout: float,
        padding_idx: int | None,
        sparse: bool,
        check: IndexCheck,
        by_kernel: bool,
    ) -> Tensor:
        check.require_integers(ids)
        ids = ids.long().contiguous()
        if sparse:  # before updates are applied; `_compute` checks the others
            check(ids)
        ctx.save_for_backward(ids)
        ctx.shape, ctx.addend_shape = weight.shape, None if addend is None else addend.shape
        ctx.scale, ctx.padding_idx, ctx.sparse = scale, padding_idx, sparse
        ctx.dropout = Dropout.drawn(dropout)
        with applied_rows(weight, ids) if sparse else nullcontext(weight) as rows:
            out = rows.new_empty((*ids.shape, rows.shape[-1]))
            _compute(rows, ids, out, scale, addend, ctx.dropout, by_kernel=by_kernel, check=check)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        grad_weight = grad_addend = None
        if not torch.is_grad_enabled() and BACKWARD.applies(grad):
            grad = grad.contiguous()
            if ctx.needs_input_grad[0]:
                grad_weight = _table_gradient(ctx, ids, grad)
            if ctx.needs_input_grad[1]:
                grad_addend = _addend_gradient(ctx, grad)
        if (grad_weight is None) == ctx.needs_input_grad[0] or (grad_addend is None) == ctx.needs_input_grad[1]:
            grown = _masked(grad, ctx.dropout)
            padding_idx = -1 if ctx.padding_idx is None else ctx.padding_idx
            if ctx.needs_input_grad[0]:
                grad_weight = torch.ops.aten.embedding_backward(
                    grown * ctx.scale, ids, ctx.shape[0], padding_idx, False, ctx.sparse
                )
            if ctx.needs_input_grad[1]:
                grad_addend = grown.sum_to_size(ctx.addend_shape)
        return grad_weight, grad_addend, None, None, None, None, None, None, None


def _fits(shape: tuple[int, ...], addend: Tensor | StoredRows | None) -> bool:
    """Return whether vectors `(B, T, D)` or `(T, D)` of this shape can take `addend` in one pass."""
    if len(shape) not in (2, 3):
        return False
    if addend is None:
        return True
    added = (*addend.ids.shape, addend.weight.shape[1]) if isinstance(addend, StoredRows) else tuple(addend.shape)
    return added in (tuple(shape), tuple(shape[-2:]), (1, *shape[-2:]))


def _compute(
    rows: Tensor,
    ids: Tensor | None,
    out: Tensor,
    scale: float,
    addend: Tensor | None,
    dropout: Dropout,
    *,
    by_kernel: bool,
    check: IndexCheck | None = None,
) -> None:
    """Write the vectors to `out`; `check` raises the error of bad IDs, which the kernel finds as it reads the rows."""
    width = out.shape[-1]
    if by_kernel and out.is_contiguous():
        places = torch.arange(out.numel() // max(width, 1), device=out.device) if ids is None else ids.view(-1)
        added = NO_ROWS[out.dtype] if addend is None else addend.detach().contiguous().view(-1, width)
        gathered, bad = rows.detach().contiguous().view(-1, width), np.zeros(1, np.uint8)
        size = gathered.shape[0] if check is None else check.size
        if kernels.gather_scale_add_drop.run(
            *(places.shape[0], gathered, places, size, bad, float(scale), added),
            *(dropout[:2], dropout.growth, out.view(-1, width)),
            block=max(1, CLAIMED_NUMEL // max(1, width)),
        ):
            if check is not None and bad[0]:
                check(ids)
            return
    if check is not None:
        check(ids)
    factor, grown = scale * dropout.growth, addend
    if addend is not None and dropout.threshold:
        grown = addend * dropout.growth
    source = rows if ids is None else ids.unsqueeze(-1)
    for first, (target, of_source, block_addend) in _blocks(out, source, grown):
        if ids is not None:
            torch.index_select(rows, 0, of_source.squeeze(-1), out=target)
        elif target.data_ptr() != of_source.data_ptr():
            target.copy_(of_source)
        if block_addend is not None:
            torch.add(block_addend, target, alpha=factor, out=target)
        elif factor != 1:
            target.mul_(factor)
        if dropout.threshold:
            target.mul_(dropout.mask(first, len(target), target))


def _masked(grad: Tensor, dropout: Dropout) -> Tensor:
    """Return `grad` times the dropout mask and the factor of kept elements; differentiable where that is needed."""
    if not dropout.threshold:
        return grad
    if not torch.is_grad_enabled() and fusible(grad):
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        _compute(grad, None, out, 1.0, None, dropout, by_kernel=INPUT_EMBEDDING.applies(grad))
        return out
    tokens, width = grad.shape[:-1].numel(), grad.shape[-1]
    ones = dropout.mask(0, tokens, grad.new_empty((0, width))).view(grad.shape)
    return grad * (ones * dropout.growth)


def _table_gradient(ctx: Any, ids: Tensor, grad: Tensor) -> Tensor | None:
    """Return the gradient of the weight, each row once; `None` if the kernel cannot run."""
    segments = segments_of_equal_ids(ids.view(-1), drop=ctx.padding_idx)
    rows = len(segments.rows)
    if not ctx.sparse:
        dense = untouched_zeros(ctx.shape, grad.dtype)
        return dense if _sum_masked(ctx, grad, segments, segments.rows, ctx.scale, dense) else None
    values = grad.new_empty((rows, grad.shape[-1]))
    if not _sum_masked(ctx, grad, segments, torch.arange(rows, device=ids.device), ctx.scale, values):
        return None
    return finished_gradient(segments.rows, values, ctx.shape, ctx.padding_idx)


def _addend_gradient(ctx: Any, grad: Tensor) -> Tensor | None:
    """Return the gradient of the addend, the sum over all sequences; `None` if the kernel cannot run."""
    out = grad.new_empty(ctx.addend_shape)
    tokens = grad.shape[:-1].numel()
    vectors = out.view(-1, grad.shape[-1])
    each = tokens // max(1, len(vectors))
    places = torch.arange(len(vectors), device=grad.device)
    order = torch.arange(tokens, device=grad.device).view(each, len(vectors)).T.reshape(-1)
    segments = Segments(places, order, torch.arange(len(vectors) + 1, device=grad.device) * each)
    return out if _sum_masked(ctx, grad, segments, places, 1.0, vectors) else None


def _sum_masked(ctx: Any, grad: Tensor, segments: Segments, places: Tensor, scale: float, out: Tensor) -> bool:
    """Write the sum of the masked gradients of each segment times `scale` to `out[places]`, in one pass over `grad`."""
    _, order, offsets = segments
    return kernels.sum_masked_segments.run(
        *(len(places), grad.view(-1, grad.shape[-1]), order, offsets, places, scale * ctx.dropout.growth),
        *(ctx.dropout[:2], out),
        block=max(1, CLAIMED_NUMEL * len(places) // max(1, grad.numel())),
    )


def _blocks(x: Tensor, *others: Tensor | None) -> Iterator[tuple[int, list[Any]]]:
    """Divide the tokens of `x` into blocks, and yield the first token and the views of each block."""
    *batch, length, width = x.shape
    tokens = max(1, BLOCK_NUMEL // max(width, 1))
    for sequence in range(batch[0] if batch else 1):
        of_sequence = [y[sequence % len(y)] if y is not None and y.dim() == 3 else y for y in (x, *others)]
        for start in range(0, length, tokens):
            block = [None if y is None else y[start : start + tokens] for y in of_sequence]
            yield sequence * length + start, block
