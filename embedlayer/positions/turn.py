"""Turning pairs of channels: `apply_rotary`, and the same a few heads at a time.

Written as one expression over all heads, the four products and two sums go through memory ten times, and fresh results
cost page faults besides. Interleaved pairs are complex numbers where they lie: one product in place of six operations.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.tracing import fusible

PIECE = 1 << 19
"""Numbers in a piece: few enough for the cache, and so many that threads seldom wait for each other."""


def apply_rotary(
    x: Float[Tensor, "*batch T K"],
    cos: Float[Tensor, "*#batch T half"],
    sin: Float[Tensor, "*#batch T half"],
    *,
    interleaved: bool = False,
) -> Float[Tensor, "*batch T K"]:
    """Turn each pair of the first `2 * half` channels: `(a, b) -> (a cos - b sin, b cos + a sin)`.

    Pair i is channels `(i, i + half)`, or `(2i, 2i + 1)` when interleaved. Further channels pass through.
    """
    rotary_dim = 2 * cos.shape[-1]
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    pair = -1 if interleaved else -2
    a, b = turned.unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(pair)
    result = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=pair).flatten(-2).to(x.dtype)
    return torch.cat([result, rest], dim=-1) if rest.shape[-1] else result


def turn(
    x: Float[Tensor, "*batch T K"],
    cos: Float[Tensor, "*rows T half"],
    sin: Float[Tensor, "*rows T half"],
    *,
    interleaved: bool = False,
) -> Float[Tensor, "*batch T K"]:
    """`apply_rotary(x, cos, sin)`, on a CPU in eager mode by pieces that fit the cache; elsewhere as it stands."""
    fits = x.dtype == cos.dtype and x.dim() in (3, 4) and cos.dim() <= x.dim() and x.numel() > 0
    fits = fits and x.device.type == "cpu" and not (interleaved and x.shape[-1] % 2)
    if not fits or not fusible(x, cos, sin):
        return apply_rotary(x, cos, sin, interleaved=interleaved)
    result: Tensor = _Turn.apply(x, cos, sin, interleaved)  # type: ignore[no-untyped-call]
    return result


class _Turn(torch.autograd.Function):
    """The gradient is turned back: by the same angles, the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rotary_dim, half = 2 * cos.shape[-1], cos.shape[-1]
        if rotary_dim < x.shape[-1]:
            out[..., rotary_dim:] = x[..., rotary_dim:]
        source, target = x[..., :rotary_dim], out[..., :rotary_dim]
        if interleaved:
            _turn_pairs(source, torch.complex(cos, sin), target)
            return out
        for a, b, c, s in _pieces(source, target, cos, sin):
            torch.mul(a[..., :half], c, out=b[..., :half]).addcmul_(a[..., half:], s, value=-1)
            torch.mul(a[..., half:], c, out=b[..., half:]).addcmul_(a[..., :half], s)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return turn(grad, cos, -sin, interleaved=ctx.interleaved), None, None, None


def _turn_pairs(x: Tensor, factor: Tensor, out: Tensor) -> None:
    pairs, turned = (torch.view_as_complex(part.unflatten(-1, (-1, 2))) for part in (_aligned(x), out))
    torch.mul(pairs, factor, out=turned)


def _aligned(x: Tensor) -> Tensor:
    """`x`, or a copy where its strides do not let pairs be seen as complex numbers."""
    fits = x.stride(-1) == 1 and all(stride % 2 == 0 for stride in x.stride()[:-1]) and x.storage_offset() % 2 == 0
    return x if fits else x.contiguous()


def _pieces(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Heads of one row at a time, with the angles of that row."""
    heads = max(1, PIECE // max(x.shape[-1] * x.shape[-2], 1))
    rows = [(x, out)] if x.dim() == 3 else list(zip(x, out, strict=True))
    for row, (a, b) in enumerate(rows):
        c, s = (part if part.dim() < 4 else part[row if len(part) > 1 else 0] for part in (cos, sin))
        for head in range(0, len(a), heads):
            yield a[head : head + heads], b[head : head + heads], c, s
