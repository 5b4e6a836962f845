"""Rotation of channel pairs by position angles: the definition `apply_rotary`, and ways that are faster.

As one expression over all heads, four products and two sums go through memory ten times. `rotate_channels` computes one
product and one sum, a compiled kernel needs one pass, and without kernels interleaved pairs are complex numbers. On
CUDA `rotate_heads` rotates queries and keys in one launch.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.shapes import wide_dtype
from embedlayer.core.torch_state import fusible, has_more_than
from embedlayer.kernels.kernel import Kernel
from embedlayer.kernels.rotary import RotaryLayout, rotate_together, rotates_together
from embedlayer.positions.rotary.query import scale_queries

ROTATE_HALF_SPLIT = Kernel("rotary", "rotate_half_split")
ROTATE_INTERLEAVED = Kernel("rotary", "rotate_interleaved")

LARGE_NUMEL = 1 << 19
"""Elements above which a kernel costs less than the few operations of `rotate_channels`."""

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
    cos: Float[Tensor, "*rows T half"], sin: Float[Tensor, "*rows T half"], distance: int
) -> tuple[Float[Tensor, "*rows T channels"], Float[Tensor, "*rows T channels"]]:
    """Repeat the cosine and the sine of each pair for both channels; the sine of the first channel is negated."""
    if distance == cos.shape[-1]:
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    cos, sin = (each.unflatten(-1, (each.shape[-1] // distance, distance)) for each in (cos, sin))
    return torch.cat([cos, cos], dim=-1).flatten(-2), torch.cat([-sin, sin], dim=-1).flatten(-2)


def rotate_channels(
    x: Float[Tensor, "*batch T K"],
    cos: Float[Tensor, "*#batch T channels"],
    sin: Float[Tensor, "*#batch T channels"],
    *,
    distance: int,
) -> Float[Tensor, "*batch T K"]:
    """Compute `x * cos + partner(x) * sin`, where `partner` exchanges the two channels of each pair.

    They are `distance` apart, as in a `RotaryLayout`.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        rotated = rotate_channels(x[..., :rotary_dim], cos, sin, distance=distance)
        return torch.cat([rotated, x[..., rotary_dim:]], dim=-1)
    if 2 * distance == rotary_dim:
        first, second = x.chunk(2, dim=-1)
        partner = torch.cat([second, first], dim=-1)
    else:
        partner = x.unflatten(-1, (-1, 2, distance)).flip(-2).flatten(-3)
    same = x.dtype == cos.dtype
    result: Tensor = torch.addcmul(x * cos, partner, sin) if same else (x * cos + partner * sin).to(x.dtype)
    return result


def rotate_heads(
    heads: Sequence[Tensor],
    cos: Float[Tensor, "*rows T channels"],
    sin: Float[Tensor, "*rows T channels"],
    factor: Float[Tensor, "*rows T 1"] | None,
    layout: RotaryLayout,
) -> tuple[Tensor, ...]:
    """Rotate queries and keys, or one of them alone, and multiply the first of them by a factor."""
    if device_kind(heads[0]) == "cuda" and rotates_together(heads, cos, sin, factor):
        results: tuple[Tensor, ...] = _RotateHeads.apply(cos, sin, factor, layout, False, *heads)  # type: ignore[no-untyped-call]
        return results
    return _rotate_each(heads, cos, sin, factor, layout)


def _rotate_each(
    heads: Sequence[Tensor], cos: Tensor, sin: Tensor, factor: Tensor | None, layout: RotaryLayout
) -> tuple[Tensor, ...]:
    is_compiling = torch.compiler.is_compiling()
    first, *others = map(partial(rotate_head, cos=cos, sin=sin, layout=layout, is_compiling=is_compiling), heads)
    return (first if factor is None else scale_queries(first, factor), *others)


def rotate_head(
    x: Float[Tensor, "*batch T K"],
    cos: Float[Tensor, "*rows T channels"],
    sin: Float[Tensor, "*rows T channels"],
    layout: RotaryLayout,
    is_compiling: bool,
) -> Float[Tensor, "*batch T K"]:
    """Rotate the channels of queries or keys that a layout rotates; the others stay those of `x`.

    This is `rotate_channels`, or for large tensors on a CPU a faster way.
    """
    if layout.first:
        rest = layout._replace(first=0)
        rotated = rotate_head(x[..., layout.first :], cos, sin, rest, is_compiling)
        return torch.cat([x[..., : layout.first], rotated], dim=-1)
    interleaved = layout.distance == 1
    if layout.own_angles or layout.distance not in (1, layout.pairs):
        return rotate_channels(x, cos, sin, distance=layout.distance)
    kernel = ROTATE_INTERLEAVED if interleaved else ROTATE_HALF_SPLIT
    if is_compiling:
        if kernel.applies_in_graph(x) and has_more_than(x, LARGE_NUMEL):
            in_one_pass: Tensor = rotate_in_graph(x, *_pair_angles(cos, sin, interleaved=interleaved), interleaved)
            return in_one_pass
    elif x.numel() > (SMALL_INTERLEAVED_NUMEL if interleaved else LARGE_NUMEL):
        if kernel.applies(x, cos, sin):
            if x.numel() > LARGE_NUMEL:
                return fused_apply_rotary(x, *_pair_angles(cos, sin, interleaved=interleaved), interleaved=interleaved)
        elif (
            interleaved
            and x.dtype == cos.dtype
            and x.dtype in (torch.float32, torch.float64)
            and device_kind(x) == "cpu"
            and fusible(x, cos, sin)
        ):
            return _rotate_complex(x, *_pair_angles(cos, sin, interleaved=True))
    return rotate_channels(x, cos, sin, distance=layout.distance)


class _RotateHeads(torch.autograd.Function):
    """Compute `rotate_heads` or its backward pass, which is the same with the transposed matrix of each pair."""

    @staticmethod
    def forward(
        ctx: Any, cos: Tensor, sin: Tensor, factor: Tensor | None, layout: RotaryLayout, inverse: bool, *heads: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin, factor)
        ctx.layout, ctx.inverse = layout, inverse
        return tuple(rotate_together(list(heads), cos, sin, factor, *layout, inverse))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cos, sin, factor = ctx.saved_tensors
        if rotates_together(grads, cos, sin, factor):
            results = _RotateHeads.apply(cos, sin, factor, ctx.layout, not ctx.inverse, *grads)  # type: ignore[no-untyped-call]
            return None, None, None, None, None, *results
        # Batched gradients: the gradient of the operators has batching rules that the operators lack.
        with torch.enable_grad():
            inputs = _zeros_like(grads)
            outputs = _rotate_each(inputs, cos, sin, factor, ctx.layout)
            if ctx.inverse:
                by_inputs = _zeros_like(grads)
                outputs, inputs = torch.autograd.grad(outputs, inputs, by_inputs, create_graph=True), by_inputs
        results = torch.autograd.grad(outputs, inputs, grads, create_graph=torch.is_grad_enabled())
        return None, None, None, None, None, *results


def _zeros_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros in the shapes of tensors, without a batch dimension that these hide, that require gradients."""
    return [torch.zeros(x.shape, dtype=x.dtype, device=x.device, requires_grad=True) for x in tensors]


def _pair_angles(cos: Tensor, sin: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each pair's angle from the tables of `channel_tables`, as views."""
    if interleaved:
        return cos[..., ::2], sin[..., 1::2]
    half = cos.shape[-1] // 2
    return cos[..., :half], sin[..., half:]


def _rotate_complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute `apply_rotary(x, cos, sin, interleaved=True)` as one product of complex numbers for each pair."""
    rotated, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    # a complex view needs unit stride within a pair and even strides and offset elsewhere
    is_view = x.stride(-1) == 1 and all(stride % 2 == 0 for stride in x.stride()[:-1]) and x.storage_offset() % 2 == 0
    pairs = torch.view_as_complex((rotated if is_view else rotated.contiguous()).unflatten(-1, (-1, 2)))
    result = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
    return torch.cat([result, rest], dim=-1) if rest.shape[-1] else result


def fused_apply_rotary(
    x: Float[Tensor, "*batch T K"],
    cos: Float[Tensor, "*rows T half"],
    sin: Float[Tensor, "*rows T half"],
    *,
    interleaved: bool = False,
) -> Float[Tensor, "*batch T K"]:
    """Compute `apply_rotary(x, cos, sin)` in one pass by the kernel, or by `apply_rotary` where no kernel applies."""
    kernel = ROTATE_INTERLEAVED if interleaved else ROTATE_HALF_SPLIT
    fits = (
        x.dim() in (3, 4) and cos.dim() <= x.dim() and x.numel() > 0 and cos.dtype == sin.dtype == wide_dtype(x.dtype)
    )
    if not fits or not kernel.applies(x, cos, sin):
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
    """Rotate the pairs of `x` by angles given as cosines and sines; see `apply_rotary`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        out = torch.empty_like(x)
        is_computed = _rotate_in_one_pass(x, cos, sin, out, interleaved=interleaved)
        return out if is_computed else apply_rotary(x, cos, sin, interleaved=interleaved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return fused_apply_rotary(grad, cos, -sin, interleaved=ctx.interleaved), None, None, None


def _rotate_in_one_pass(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, interleaved: bool) -> bool:
    """Write `x` with rotated pairs to `out` by a compiled kernel, and return whether it could be compiled."""
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
    return (ROTATE_INTERLEAVED if interleaved else ROTATE_HALF_SPLIT).run(
        x.numel() // width,
        *(_memory(x), x.stride()[:3], _memory(cos), _memory(sin), cos.stride()[:3]),
        *(out.view(-1, width), (*out.shape[1:3], pairs)),
        block=max(1, CLAIMED_NUMEL // width),
    )


def _memory(x: Tensor) -> Tensor:
    """Return the memory of `x`, from its first number to its last, as a one-dimensional tensor."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.detach().as_strided((last + 1,), (1,))
