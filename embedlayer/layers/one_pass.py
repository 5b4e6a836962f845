"""Scale, positions and dropout in one pass over the vectors that were just looked up.

Written one after the other, `dropout(scale * x + positions)` goes through memory four times, and most of its time is
spent on drawing a random number for each element. Here a piece that fits the cache is scaled, moved and thinned out
while it is there, in place, and dropout draws 16 bits an element: its share is a whole number of 65536ths. The random
bits are not kept: the backward pass draws them again from the generator's saved state.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.tracing import fusible

PIECE = 1 << 20
"""Numbers in a piece: few enough for the cache, and so many that threads seldom wait for each other."""


def scale_add_drop(
    x: Float[Tensor, "*batch T D"],
    scale: float | Tensor | None,
    addend: Float[Tensor, "*rows T D"] | None,
    dropout: float,
) -> Float[Tensor, "*batch T D"]:
    """`dropout(scale * x + addend)`; `x` may be overwritten.

    Args:
        x: Vectors that nobody else reads: a fresh look-up.
        scale: Factor, or `None` for none.
        addend: One vector for each position, or `None` for none.
        dropout: Share of the numbers that become 0; the others grow by `1 / (1 - dropout)`.

    On a CPU in eager mode it is one pass; elsewhere it is left to the compiler, by `plain_scale_add_drop`.
    """
    fits = x.dim() in (2, 3) and (addend is None or addend.dim() <= x.dim()) and not isinstance(scale, Tensor)
    if x.device.type != "cpu" or not fits or not fusible(x, addend):
        return plain_scale_add_drop(x, scale, addend, dropout)
    if scale is None and addend is None and dropout == 0:
        return x
    result: Tensor = _OnePass.apply(  # type: ignore[no-untyped-call]
        x, None if addend is None else addend.to(x.dtype), 1.0 if scale is None else scale, dropout
    )
    return result


def gather_scale_add(
    ids: Int[Tensor, "*batch T"],
    rows: Float[Tensor, "N D"],
    scale: float | Tensor | None,
    addend: Float[Tensor, "*rows T D"],
) -> Float[Tensor, "*batch T D"]:
    """`scale * rows[ids] + addend` without gradients: on a CPU in eager mode, in one pass over the result.

    Args:
        ids: Checked token IDs.
        rows: What they are looked up in.
        scale: Factor, or `None` for none.
        addend: One vector for each position.
    """
    fits = ids.dim() in (1, 2) and addend.dim() <= ids.dim() + 1
    if isinstance(scale, Tensor) or not fits or ids.device.type != "cpu" or not fusible(rows, addend):
        return plain_scale_add_drop(F.embedding(ids, rows), scale, addend, 0.0)
    result = rows.new_empty((*ids.shape, rows.shape[-1]))
    columns, addend = ids.unsqueeze(-1), addend.to(rows.dtype)
    for piece in _pieces(result):
        part = piece.of(result)
        torch.index_select(rows, 0, piece.of(columns).squeeze(-1), out=part)
        _scale_add(part, piece.of(addend), 1.0 if scale is None else scale)
    return result


def plain_scale_add_drop(
    x: Float[Tensor, "*batch T D"],
    scale: float | Tensor | None,
    addend: Float[Tensor, "*rows T D"] | None,
    dropout: float,
) -> Float[Tensor, "*batch T D"]:
    """The definition of `scale_add_drop`, operation by operation."""
    x = x if scale is None else scale * x
    x = x if addend is None else x + addend.to(x.dtype)
    return F.dropout(x, dropout) if dropout else x


class _Thinner:
    """Zeros and ones for a piece at a time, a share `threshold / 65536` of them zeros."""

    def __init__(self, dropout: float, pieces: "list[_Piece]", like: Tensor, state: Tensor | None = None) -> None:
        size = max((piece.size for piece in pieces), default=0)
        self.threshold = round(dropout * (1 << 16))
        kept = (1 << 16) - self.threshold
        self.growth = (1 << 16) / kept if kept else 0.0
        self.generator = None if state is None else torch.Generator().set_state(state)
        self.bits = torch.empty(math.ceil(size / 4), dtype=torch.int64)
        self.ones = like.new_empty(size)

    def ones_for(self, piece: Tensor) -> Tensor:
        """As many zeros and ones as `piece` has numbers, in memory that the next call overwrites."""
        count = piece.numel()
        words = self.bits[: math.ceil(count / 4)].random_(-(1 << 63), None, generator=self.generator)
        ones = self.ones[:count]
        torch.ge(words.view(torch.int16)[:count], self.threshold - (1 << 15), out=ones)
        return ones.view_as(piece)


class _OnePass(torch.autograd.Function):
    """In place on `x`; keeps the generator's state and no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, addend: Tensor | None, scale: float, dropout: float) -> Tensor:
        ctx.scale, ctx.dropout = scale, dropout
        ctx.addend_shape = None if addend is None else addend.shape
        ctx.state = torch.get_rng_state() if dropout and any(ctx.needs_input_grad[:2]) else None
        ctx.mark_dirty(x)
        if not dropout:
            return _scale_add(x, addend, scale)
        pieces = list(_pieces(x))
        thinner = _Thinner(dropout, pieces, x)
        grown = None if addend is None else addend * thinner.growth
        for piece in pieces:
            part = _scale_add(piece.of(x), None if grown is None else piece.of(grown), scale * thinner.growth)
            part.mul_(thinner.ones_for(part))
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_addend = ctx.needs_input_grad[:2]
        if ctx.dropout and not torch.is_grad_enabled() and fusible(grad):
            return _thinned(ctx, grad)
        if ctx.dropout:  # create_graph=True or batched gradients: operations that can be transformed themselves
            ones = torch.empty(grad.shape, dtype=grad.dtype)
            pieces = list(_pieces(ones))
            thinner = _Thinner(ctx.dropout, pieces, ones, ctx.state)
            for piece in pieces:
                piece.of(ones).copy_(thinner.ones_for(piece.of(ones)))
            grad = grad * (ones * thinner.growth)
        grad_addend = grad.sum_to_size(ctx.addend_shape) if needs_addend else None
        return grad * ctx.scale if needs_x else None, grad_addend, None, None


def _scale_add(x: Tensor, addend: Tensor | None, scale: float) -> Tensor:
    """`scale * x + addend`, in place."""
    return x.mul_(scale) if addend is None else torch.add(addend, x, alpha=scale, out=x)


def _thinned(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients where dropout let numbers through, in one pass."""
    pieces = list(_pieces(grad))
    thinner = _Thinner(ctx.dropout, pieces, grad, ctx.state)
    grad_x = torch.empty_like(grad, memory_format=torch.contiguous_format)
    grad_addend = grad.new_zeros(ctx.addend_shape) if ctx.needs_input_grad[1] else None
    for piece in pieces:
        part, target = piece.of(grad), piece.of(grad_x)
        torch.mul(part, thinner.ones_for(part).mul_(thinner.growth), out=target)
        if grad_addend is not None:
            piece.of(grad_addend).add_(target)
        if ctx.scale != 1:
            target.mul_(ctx.scale)
    return grad_x if ctx.needs_input_grad[0] else None, grad_addend, None, None


class _Piece(NamedTuple):
    """Tokens `start` to `stop - 1` of row `row`."""

    row: int
    start: int
    stop: int
    width: int

    @property
    def size(self) -> int:
        return (self.stop - self.start) * self.width

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of a `(B, T, D)` tensor, or of one that all rows share: `(1, T, D)` or `(T, D)`."""
        if tensor.dim() == 3:
            tensor = tensor[self.row if len(tensor) > 1 else 0]
        return tensor[self.start : self.stop]


def _pieces(x: Tensor) -> Iterator[_Piece]:
    *rows, length, width = x.shape
    tokens = max(1, PIECE // max(width, 1))
    for row in range(rows[0] if rows else 1):
        for start in range(0, length, tokens):
            yield _Piece(row, start, min(start + tokens, length), width)
