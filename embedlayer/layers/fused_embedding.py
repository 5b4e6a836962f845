"""Scale, position addition and dropout of looked-up vectors in one pass over memory.

As separate operations, `dropout(scale * x + positions)` reads and writes all vectors four times, and dropout spends
most of its time on drawing one random number for each element. Here each block of vectors fits the CPU cache and is
scaled, added to and masked in place. Dropout draws 16 random bits for each element, so its probability is rounded to a
multiple of 1/65536. The mask is not stored: the backward pass draws it again from the saved state of the generator.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.tracing import fusible

BLOCK_NUMEL = 1 << 20
"""Elements in a block: few enough for the CPU cache, enough to keep all threads busy."""


def scale_add_drop(
    x: Float[Tensor, "*batch T D"],
    scale: float | Tensor | None,
    addend: Float[Tensor, "*rows T D"] | None,
    dropout: float,
) -> Float[Tensor, "*batch T D"]:
    """Compute `dropout(scale * x + addend)`; may overwrite `x`.

    On a CPU in eager mode this is one pass over `x` in place. Elsewhere `plain_scale_add_drop` computes it.

    Args:
        x: Freshly looked-up vectors `(T, D)` or `(B, T, D)` that no other code reads.
        scale: Factor, or `None` for 1.
        addend: One vector for each position, or `None`.
        dropout: Probability of setting an element to 0; other elements are multiplied by `1 / (1 - dropout)`.

    Returns:
        A tensor of the shape of `x`. Without dropout it differs from `plain_scale_add_drop` by one rounding at most,
        because multiplication and addition are one operation.
    """
    fits = x.dim() in (2, 3) and (addend is None or addend.dim() <= x.dim()) and not isinstance(scale, Tensor)
    if x.device.type != "cpu" or not fits or not fusible(x, addend):
        return plain_scale_add_drop(x, scale, addend, dropout)
    if scale is None and addend is None and dropout == 0:
        return x
    result: Tensor = _ScaleAddDrop.apply(  # type: ignore[no-untyped-call]
        x, None if addend is None else addend.to(x.dtype), 1.0 if scale is None else scale, dropout
    )
    return result


def gather_scale_add(
    ids: Int[Tensor, "*batch T"],
    rows: Float[Tensor, "N D"],
    scale: float | Tensor | None,
    addend: Float[Tensor, "*rows T D"],
) -> Float[Tensor, "*batch T D"]:
    """Compute `scale * rows[ids] + addend` without gradients; on a CPU in eager mode in one pass over the result.

    Args:
        ids: Token IDs, already checked to be in `0 .. N - 1`.
        rows: The rows of the table, `(N, D)`.
        scale: Factor, or `None` for 1.
        addend: One vector for each position.

    Returns:
        A new tensor, `(..., T, D)`.
    """
    fits = ids.dim() in (1, 2) and addend.dim() <= ids.dim() + 1
    if isinstance(scale, Tensor) or not fits or ids.device.type != "cpu" or not fusible(rows, addend):
        return plain_scale_add_drop(F.embedding(ids, rows), scale, addend, 0.0)
    result = rows.new_empty((*ids.shape, rows.shape[-1]))
    columns, addend = ids.unsqueeze(-1), addend.to(rows.dtype)
    for target, block_ids, block_addend in _blocks(result, columns, addend):
        torch.index_select(rows, 0, block_ids.squeeze(-1), out=target)
        _scale_add_(target, block_addend, 1.0 if scale is None else scale)
    return result


def plain_scale_add_drop(
    x: Float[Tensor, "*batch T D"],
    scale: float | Tensor | None,
    addend: Float[Tensor, "*rows T D"] | None,
    dropout: float,
) -> Float[Tensor, "*batch T D"]:
    """Compute `dropout(scale * x + addend)` by separate PyTorch operations: the definition of `scale_add_drop`.

    Its arguments are those of `scale_add_drop`; `x` is not changed.
    """
    x = x if scale is None else scale * x
    x = x if addend is None else x + addend.to(x.dtype)
    return F.dropout(x, dropout) if dropout else x


class _DropoutMask:
    """Draw dropout masks of zeros and ones, one block at a time, in reused buffers.

    Args:
        dropout: Probability of a 0, rounded to a multiple of 1/65536.
        like: Tensor that is masked in blocks. Masks have its dtype, and buffers the size of its largest block.
        state: State of a CPU generator to draw from; `None` to draw from the default generator.

    Attributes:
        growth: Factor of the elements that are kept, `1 / (1 - dropout)`; 0 if `dropout` is 1.
    """

    def __init__(self, dropout: float, like: Tensor, state: Tensor | None = None) -> None:
        size = max((block.numel() for (block,) in _blocks(like)), default=0)
        self.threshold = round(dropout * (1 << 16))
        kept = (1 << 16) - self.threshold
        self.growth = (1 << 16) / kept if kept else 0.0
        self.generator = None if state is None else torch.Generator().set_state(state)
        self.bits = torch.empty(math.ceil(size / 4), dtype=torch.int64)
        self.ones = torch.empty(size, dtype=like.dtype, device=like.device)

    def draw(self, values: Tensor) -> Tensor:
        """Draw a mask of the shape of `values`, and return it; it is overwritten by the next call."""
        count = values.numel()
        words = self.bits[: math.ceil(count / 4)].random_(-(1 << 63), None, generator=self.generator)
        ones = self.ones[:count]
        torch.ge(words.view(torch.int16)[:count], self.threshold - (1 << 15), out=ones)
        return ones.view_as(values)


class _ScaleAddDrop(torch.autograd.Function):
    """Autograd function that overwrites `x` with `dropout(scale * x + addend)`.

    It saves the state of the default generator instead of the dropout mask.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, addend: Tensor | None, scale: float, dropout: float) -> Tensor:
        ctx.scale, ctx.dropout = scale, dropout
        ctx.addend_shape = None if addend is None else addend.shape
        ctx.state = torch.get_rng_state() if dropout and any(ctx.needs_input_grad[:2]) else None
        ctx.mark_dirty(x)
        if not dropout:
            return _scale_add_(x, addend, scale)
        mask = _DropoutMask(dropout, x)
        grown = None if addend is None else addend * mask.growth
        for values, block_addend in _blocks(x, grown):
            _scale_add_(values, block_addend, scale * mask.growth).mul_(mask.draw(values))
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_addend = ctx.needs_input_grad[:2]
        if ctx.dropout and not torch.is_grad_enabled() and fusible(grad):
            return _masked_gradients(ctx, grad)
        if ctx.dropout:  # create_graph=True or batched gradients: use operations that can be differentiated again
            ones = torch.empty(grad.shape, dtype=grad.dtype)
            mask = _DropoutMask(ctx.dropout, ones, ctx.state)
            for (block,) in _blocks(ones):
                block.copy_(mask.draw(block))
            grad = grad * (ones * mask.growth)
        grad_addend = grad.sum_to_size(ctx.addend_shape) if needs_addend else None
        return grad * ctx.scale if needs_x else None, grad_addend, None, None


def _scale_add_(x: Tensor, addend: Tensor | None, scale: float) -> Tensor:
    """Overwrite `x` with `scale * x + addend`, and return `x`; `None` as `addend` adds nothing."""
    return x.mul_(scale) if addend is None else torch.add(addend, x, alpha=scale, out=x)


def _masked_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Compute what `_ScaleAddDrop.backward` returns, in one pass over `grad`, with the dropout mask drawn again.

    Args:
        ctx: Context of `_ScaleAddDrop`.
        grad: Gradient of the result.

    Returns:
        The gradients of `x` and `addend`, each `None` if it is not needed, and `None` for the other two arguments.
    """
    mask = _DropoutMask(ctx.dropout, grad, ctx.state)
    grad_x = torch.empty_like(grad, memory_format=torch.contiguous_format)
    grad_addend = grad.new_zeros(ctx.addend_shape) if ctx.needs_input_grad[1] else None
    for values, target, block_addend in _blocks(grad, grad_x, grad_addend):
        torch.mul(values, mask.draw(values).mul_(mask.growth), out=target)
        if block_addend is not None:
            block_addend.add_(target)
        if ctx.scale != 1:
            target.mul_(ctx.scale)
    return grad_x if ctx.needs_input_grad[0] else None, grad_addend, None, None


def _blocks(x: Tensor, *others: Tensor | None) -> Iterator[list[Any]]:
    """Divide the tokens of `x` into blocks, and yield the views of each block in `x` and in the other tensors.

    A block of `x` has at most `BLOCK_NUMEL` elements, but at least one token, and never spans two sequences.

    Args:
        x: Vectors, `(B, T, D)` or `(T, D)`.
        others: Tensors with the same tokens, `(B, T, ...)`. `(T, ...)` or `(1, T, ...)` is for tokens that are the same
            in all sequences. `None` is yielded as `None`.
    """
    *batch, length, width = x.shape
    tokens = max(1, BLOCK_NUMEL // max(width, 1))
    for sequence in range(batch[0] if batch else 1):
        of_sequence = [y[sequence % len(y)] if y is not None and y.dim() == 3 else y for y in (x, *others)]
        for start in range(0, length, tokens):
            yield [None if y is None else y[start : start + tokens] for y in of_sequence]
