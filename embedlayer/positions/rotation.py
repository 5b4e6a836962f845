"""Rotation of channel pairs by position angles: the definition `apply_rotary`, and a version that is fast on a CPU.

As one expression over all heads, four products and two sums go through memory ten times. The fast version rotates a few
heads at a time, which stay in the CPU cache; interleaved pairs are read as complex numbers, with one product each.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.tracing import fusible

BLOCK_NUMEL = 1 << 19
"""Elements rotated at a time: few enough for the CPU cache, enough to keep all threads busy."""


def apply_rotary(
    x: Float[Tensor, "*batch T K"],
    cos: Float[Tensor, "*#batch T half"],
    sin: Float[Tensor, "*#batch T half"],
    *,
    interleaved: bool = False,
) -> Float[Tensor, "*batch T K"]:
    """Rotate each pair of the first `2 * half` channels: `(a, b) -> (a cos - b sin, b cos + a sin)`.

    Args:
        x: Queries or keys.
        cos: Cosine of each pair's angle at each position.
        sin: Sine of the same angles.
        interleaved: Pair i is channels `(2i, 2i + 1)`; otherwise `(i, i + half)`.

    Returns:
        `(..., T, K)`; channels from `2 * half` on are those of `x`.
    """
    rotary_dim = 2 * cos.shape[-1]
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    pair = -1 if interleaved else -2
    a, b = rotated.unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(pair)
    result = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=pair).flatten(-2).to(x.dtype)
    return torch.cat([result, rest], dim=-1) if rest.shape[-1] else result


def apply_rotary_by_channel(
    x: Float[Tensor, "*batch T K"],
    cos: Float[Tensor, "*#batch T rotary_dim"],
    sin: Float[Tensor, "*#batch T rotary_dim"],
) -> Float[Tensor, "*batch T K"]:
    """Compute `(a cos s - b sin s, b cos t + a sin t)` for each half-split pair, with an angle for each channel.

    Args:
        x: Queries or keys.
        cos: Cosines: `cos s` of the first channels of all pairs, then `cos t` of the second channels.
        sin: Sines of the same angles.

    Returns:
        `(..., T, K)`; channels from `rotary_dim` on are those of `x`.
    """
    rotary_dim = cos.shape[-1]
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    a, b = rotated.chunk(2, dim=-1)
    result = (rotated * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)
    return torch.cat([result, rest], dim=-1) if rest.shape[-1] else result


def apply_rotary_within_axes(
    x: Float[Tensor, "*batch T K"],
    cos: Float[Tensor, "*#batch T half"],
    sin: Float[Tensor, "*#batch T half"],
    num_axes: int,
) -> Float[Tensor, "*batch T K"]:
    """Compute `apply_rotary` for each of `num_axes` equal shares of the channels; pairs are half-split in each share.

    Args:
        x: Queries or keys.
        cos: Cosine of each pair's angle, those of the first share first.
        sin: Sine of the same angles.
        num_axes: Number of shares.

    Returns:
        `(..., T, K)`; channels from `2 * half` on are those of `x`.
    """
    rotary_dim = 2 * cos.shape[-1]
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    shares, cosines, sines = (each.unflatten(-1, (num_axes, -1)) for each in (rotated, cos, sin))
    result = apply_rotary(shares, cosines, sines).flatten(-2)
    return torch.cat([result, rest], dim=-1) if rest.shape[-1] else result


def fused_apply_rotary(
    x: Float[Tensor, "*batch T K"],
    cos: Float[Tensor, "*rows T half"],
    sin: Float[Tensor, "*rows T half"],
    *,
    interleaved: bool = False,
) -> Float[Tensor, "*batch T K"]:
    """Compute `apply_rotary(x, cos, sin)`, faster on a CPU in eager mode.

    There it rotates a few heads at a time, which stay in the CPU cache. In all other cases it calls `apply_rotary`.
    """
    fits = x.dtype == cos.dtype and x.dim() in (3, 4) and cos.dim() <= x.dim() and x.numel() > 0
    fits = fits and x.device.type == "cpu" and not (interleaved and x.shape[-1] % 2)
    if not fits or not fusible(x, cos, sin):
        return apply_rotary(x, cos, sin, interleaved=interleaved)
    result: Tensor = _ApplyRotary.apply(x, cos, sin, interleaved)  # type: ignore[no-untyped-call]
    return result


class _ApplyRotary(torch.autograd.Function):
    """Rotate the pairs of `x` by angles given as cosines and sines; see `apply_rotary`.

    The backward pass rotates the gradient by the negative angles.
    """

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
            _rotate_interleaved(source, torch.complex(cos, sin), target)
            return out
        for a, b, c, s in _blocks(source, target, cos, sin):
            torch.mul(a[..., :half], c, out=b[..., :half]).addcmul_(a[..., half:], s, value=-1)
            torch.mul(a[..., half:], c, out=b[..., half:]).addcmul_(a[..., :half], s)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return fused_apply_rotary(grad, cos, -sin, interleaved=ctx.interleaved), None, None, None


def _rotate_interleaved(x: Tensor, rotation: Tensor, out: Tensor) -> None:
    """Write `x`, with each pair of channels (2i, 2i + 1) rotated, to `out`.

    A pair is read as one complex number and multiplied by `rotation`.

    Args:
        x: Channels to rotate, `(..., 2 * half)`.
        rotation: `cos + i sin` of each pair's angle, complex, `(..., half)`.
        out: Tensor of the shape of `x`; it is overwritten.
    """
    # a complex view needs unit stride within a pair and even strides and offset elsewhere
    viewable = x.stride(-1) == 1 and all(stride % 2 == 0 for stride in x.stride()[:-1]) and x.storage_offset() % 2 == 0
    pairs, rotated = (
        torch.view_as_complex(tensor.unflatten(-1, (-1, 2))) for tensor in (x if viewable else x.contiguous(), out)
    )
    torch.mul(pairs, rotation, out=rotated)


def _blocks(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield blocks of a few heads of one sequence: (input, output, cosines, sines).

    All four are views, so writing to the second one writes to `out`.

    Args:
        x: Queries or keys, with or without a batch dimension.
        out: Output of the shape of `x`.
        cos: Cosines, of one sequence or of each.
        sin: Sines, likewise.
    """
    heads = max(1, BLOCK_NUMEL // max(x.shape[-1] * x.shape[-2], 1))
    sequences = [(x, out)] if x.dim() == 3 else list(zip(x, out, strict=True))
    for number, (a, b) in enumerate(sequences):
        c, s = (table if table.dim() < 4 else table[number if len(table) > 1 else 0] for table in (cos, sin))
        for head in range(0, len(a), heads):
            yield a[head : head + heads], b[head : head + heads], c, s
