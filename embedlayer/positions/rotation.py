"""Rotation of channel pairs by position angles: the definition `apply_rotary`, and a version that is fast on a CPU.

As one expression over all heads, four products and two sums go through memory ten times. A compiled kernel needs one
pass. Without it the fast version rotates a few heads at a time, which stay in the CPU cache; interleaved pairs are read
as complex numbers, with one product each.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.kernels.kernel import Kernel
from embedlayer.torch_state import fusible, has_more_than

ROTATE_HALF_SPLIT = Kernel("rotary", "rotate_half_split")
ROTATE_INTERLEAVED = Kernel("rotary", "rotate_interleaved")

BLOCK_NUMEL = 1 << 19
"""Elements rotated at a time: few enough for the CPU cache, enough to keep all threads busy."""

CLAIMED_NUMEL = 1 << 16
"""Elements that a thread of a kernel rotates at a time."""

SMALL_INTERLEAVED_NUMEL = 1 << 13
"""Elements up to which exchanging neighbouring channels costs less than building complex numbers."""


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


def channel_tables(
    cos: Float[Tensor, "*rows T half"],
    sin: Float[Tensor, "*rows T half"],
    *,
    interleaved: bool = False,
    shares: int = 1,
) -> tuple[Float[Tensor, "*rows T channels"], Float[Tensor, "*rows T channels"]]:
    """Repeat the cosine and the sine of each pair for both channels; the sine of the first channel is negated.

    `rotate_channels` then needs one product and one sum for all channels.

    Args:
        cos: Cosine of each pair's angle.
        sin: Sine of the same angles.
        interleaved: As in `apply_rotary`.
        shares: Number of equal shares of the channels, each with half-split pairs of its own.
    """
    if interleaved:
        return cos.repeat_interleave(2, dim=-1), torch.stack([-sin, sin], dim=-1).flatten(-2)
    if shares == 1:
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    cos, sin = (each.unflatten(-1, (shares, -1)) for each in (cos, sin))
    return torch.cat([cos, cos], dim=-1).flatten(-2), torch.cat([-sin, sin], dim=-1).flatten(-2)


def rotate_channels(
    x: Float[Tensor, "*batch T K"],
    cos: Float[Tensor, "*#batch T channels"],
    sin: Float[Tensor, "*#batch T channels"],
    *,
    interleaved: bool = False,
    shares: int = 1,
) -> Float[Tensor, "*batch T K"]:
    """Compute `x * cos + partner(x) * sin`, where `partner` exchanges the two channels of each pair.

    With the tables of `channel_tables` this is `apply_rotary`. It also takes an angle for each channel, which is a
    rotation only where both channels of a pair have the same one.

    Args:
        x: Queries or keys.
        cos: Cosine of each channel's angle.
        sin: Sine of each channel's angle, negated for the first channel of each pair.
        interleaved: As in `apply_rotary`.
        shares: As in `channel_tables`.

    Returns:
        `(..., T, K)`; channels beyond those of the tables are those of `x`.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        rotated = rotate_channels(x[..., :rotary_dim], cos, sin, interleaved=interleaved, shares=shares)
        return torch.cat([rotated, x[..., rotary_dim:]], dim=-1)
    if interleaved:
        partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    elif shares > 1:
        partner = x.unflatten(-1, (shares, 2, -1)).flip(-2).flatten(-3)
    else:
        first, second = x.chunk(2, dim=-1)
        partner = torch.cat([second, first], dim=-1)
    same = x.dtype == cos.dtype
    result: Tensor = torch.addcmul(x * cos, partner, sin) if same else (x * cos + partner * sin).to(x.dtype)
    return result


def rotate_pairs(
    x: Float[Tensor, "*batch T K"],
    cos: Float[Tensor, "*#batch T channels"],
    sin: Float[Tensor, "*#batch T channels"],
    *,
    interleaved: bool = False,
) -> Float[Tensor, "*batch T K"]:
    """Compute `rotate_channels` for tables of `channel_tables`, faster for large `x` on a CPU in eager mode.

    Small tensors take `rotate_channels`, whose few operations cost least: a decoding step has one token. In graphs of
    `torch.compile`, large tensors of fixed shape are rotated by a custom operator, which takes half the time of
    inductor's code.
    """
    if torch.compiler.is_compiling():
        if _kernel(interleaved).applies_in_graph(x) and has_more_than(x, BLOCK_NUMEL):
            in_one_pass: Tensor = rotate_in_graph(x, *_pair_angles(cos, sin, interleaved=interleaved), interleaved)
            return in_one_pass
        return rotate_channels(x, cos, sin, interleaved=interleaved)
    small = x.numel() <= (SMALL_INTERLEAVED_NUMEL if interleaved else BLOCK_NUMEL)
    if small or (x.numel() <= BLOCK_NUMEL and _kernel(interleaved).applies(x, cos, sin)):
        return rotate_channels(x, cos, sin, interleaved=interleaved)
    return fused_apply_rotary(x, *_pair_angles(cos, sin, interleaved=interleaved), interleaved=interleaved)


def _kernel(interleaved: bool) -> Kernel:
    """Return the kernel of a layout of pairs."""
    return ROTATE_INTERLEAVED if interleaved else ROTATE_HALF_SPLIT


def _pair_angles(cos: Tensor, sin: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each pair's angle from the tables of `channel_tables`, as views."""
    if interleaved:
        return cos[..., ::2], sin[..., 1::2]
    half = cos.shape[-1] // 2
    return cos[..., :half], sin[..., half:]


def fused_apply_rotary(
    x: Float[Tensor, "*batch T K"],
    cos: Float[Tensor, "*rows T half"],
    sin: Float[Tensor, "*rows T half"],
    *,
    interleaved: bool = False,
) -> Float[Tensor, "*batch T K"]:
    """Compute `apply_rotary(x, cos, sin)`, faster on a CPU in eager mode.

    There it rotates in one pass, or a few heads at a time, which stay in the CPU cache. In all other cases it calls
    `apply_rotary`.
    """
    fits = x.dim() in (3, 4) and cos.dim() <= x.dim() and x.numel() > 0 and x.device.type == "cpu"
    fits = fits and (_kernel_fits(x, cos, sin) or _blocks_fit(x, cos, interleaved=interleaved))
    if not fits or not fusible(x, cos, sin):
        return apply_rotary(x, cos, sin, interleaved=interleaved)
    result: Tensor = _ApplyRotary.apply(x, cos, sin, interleaved)  # type: ignore[no-untyped-call]
    return result


@torch.library.custom_op("embedlayer::apply_rotary", mutates_args=())
def rotate_in_graph(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Run `fused_apply_rotary` as one node of a compiled graph; its arguments are the same."""
    return fused_apply_rotary(x, cos, sin, interleaved=interleaved)


@rotate_in_graph.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return torch.empty_like(x)


def _keep_angles(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the angles among the `inputs` of `rotate_in_graph` in the autograd context `ctx`."""
    _, cos, sin, ctx.interleaved = inputs
    ctx.save_for_backward(cos, sin)


def _rotate_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments of `rotate_in_graph`: the gradient is rotated by the negative angles."""
    cos, sin = ctx.saved_tensors
    return rotate_in_graph(grad, cos, -sin, ctx.interleaved), None, None, None


rotate_in_graph.register_autograd(_rotate_back, setup_context=_keep_angles)


class _ApplyRotary(torch.autograd.Function):
    """Rotate the pairs of `x` by angles given as cosines and sines; see `apply_rotary`.

    The backward pass rotates the gradient by the negative angles.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        out = torch.empty_like(x)
        if _kernel_fits(x, cos, sin) and _rotate_in_one_pass(x, cos, sin, out, interleaved=interleaved):
            return out
        if not _blocks_fit(x, cos, interleaved=interleaved):
            return apply_rotary(x, cos, sin, interleaved=interleaved)
        if interleaved and 2 * cos.shape[-1] == x.shape[-1]:
            return torch.view_as_real(_as_complex(x) * torch.complex(cos, sin)).flatten(-2)
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


def _kernel_fits(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether the kernel may rotate `x`: the angles have the dtype that it computes with."""
    computed = torch.float64 if x.dtype == torch.float64 else torch.float32
    return cos.dtype == sin.dtype == computed and ROTATE_HALF_SPLIT.applies(x, cos, sin)


def _blocks_fit(x: Tensor, cos: Tensor, *, interleaved: bool) -> bool:
    """Return whether torch operators may rotate `x` in blocks, in place: nothing has to be converted or copied."""
    complex_pairs = x.shape[-1] % 2 == 0 and cos.dtype != torch.bfloat16  # there are no complex bfloat16 numbers
    return x.dtype == cos.dtype and (complex_pairs or not interleaved)


def _rotate_in_one_pass(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, interleaved: bool) -> bool:
    """Write `x` with rotated pairs to `out` by a compiled kernel, and return whether it could be compiled.

    Args:
        x: Queries or keys, `(B, H, T, K)` or `(H, T, K)`.
        cos: Cosines, `(T, half)`, or with dimensions of size 1 or B and 1 before it.
        sin: Sines, likewise.
        out: Tensor of the shape of `x` without gaps in its memory; it is overwritten.
        interleaved: As in `apply_rotary`.
    """
    if out.stride(-1) != 1:
        return False
    x, cos, sin = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, cos, sin))
    width, pairs = x.shape[-1], cos.shape[-1]
    cos, sin = (each.expand(*x.shape[:-1], pairs) for each in (cos, sin))
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    x, cos, sin, out = (each if each.dim() == 4 else each.unsqueeze(0) for each in (x, cos, sin, out))
    order = sorted(range(3), key=out.stride, reverse=True)  # vectors are visited in the order of memory
    x, cos, sin, out = (each.permute(*order, 3) for each in (x, cos, sin, out))
    return _kernel(interleaved).run(
        x.numel() // width,
        *(_memory(x), x.stride()[:3], _memory(cos), _memory(sin), cos.stride()[:3]),
        *(out.view(-1, width), (*out.shape[1:3], pairs)),
        block=max(1, CLAIMED_NUMEL // width),
    )


def _memory(x: Tensor) -> Tensor:
    """Return the memory of `x`, from its first number to its last, as a one-dimensional tensor."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.detach().as_strided((last + 1,), (1,))


def _rotate_interleaved(x: Tensor, rotation: Tensor, out: Tensor) -> None:
    """Write `x`, with each pair of channels (2i, 2i + 1) rotated, to `out`.

    A pair is read as one complex number and multiplied by `rotation`.

    Args:
        x: Channels to rotate, `(..., 2 * half)`.
        rotation: `cos + i sin` of each pair's angle, complex, `(..., half)`.
        out: Tensor of the shape of `x`; it is overwritten.
    """
    torch.mul(_as_complex(x), rotation, out=_as_complex(out))


def _as_complex(x: Tensor) -> Tensor:
    """Return the pairs of channels (2i, 2i + 1) as complex numbers, as a view of `x` where its strides allow that."""
    # a complex view needs unit stride within a pair and even strides and offset elsewhere
    viewable = x.stride(-1) == 1 and all(stride % 2 == 0 for stride in x.stride()[:-1]) and x.storage_offset() % 2 == 0
    return torch.view_as_complex((x if viewable else x.contiguous()).unflatten(-1, (-1, 2)))


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
