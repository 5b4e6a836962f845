"""Rotation of channel pairs by position angles: the definition `apply_rotary`, and ways that are faster.

As one expression over all heads, four products and two sums go through memory ten times. `rotate_channels` computes one
product and one sum, a compiled kernel needs one pass, and without kernels interleaved pairs are complex numbers. On
CUDA `rotate_heads` rotates queries and keys in one launch; in graphs of `torch.compile` it does not: inductor fuses the
rotation with what precedes it, such as the norms of queries and keys.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.shapes import wide_dtype
from embedlayer.core.torch_state import fusible, has_more_than
from embedlayer.kernels.cpu.rotary import rotate_half_split, rotate_interleaved
from embedlayer.kernels.gpu.launch import imported_launches, launch
from embedlayer.kernels.operation import Operation
from embedlayer.positions.rotary.query import scale_queries

LARGE_NUMEL = 1 << 19
"""Elements above which a kernel costs less than the few operations of `rotate_channels`."""

CLAIMED_NUMEL = 1 << 16
"""Elements that a thread of a kernel rotates at a time."""

SMALL_INTERLEAVED_NUMEL = 1 << 13
"""Elements up to which exchanging neighbouring channels costs less than building complex numbers."""


PROGRAMS = 1024
"""Programs that keep a GPU busy: with fewer ones, each rotates one head only."""

MOST_HEADS = 8
"""Heads that a program rotates at most by the angles that it has read."""


class RotaryLayout(NamedTuple):
    """Say which channels of a head are rotated, and which two are a pair.

    Attributes:
        pairs: Number of pairs, P; `2 * P` adjacent channels are rotated.
        distance: From the first channel of a pair to the second: 1 for interleaved pairs, P for half-split ones, and
            less for half-split pairs within equal shares of the channels.
        first: First rotated channel: 0, or that from which the last `2 * P` channels of a head begin.
        own_angles: Whether the two channels of a pair have angles of their own.
    """

    pairs: int
    distance: int
    first: int = 0
    own_angles: bool = False


def apply_rotary(
    x: Float[Tensor, "*batch T K"],
    cos: Float[Tensor, "*#batch T half"],
    sin: Float[Tensor, "*#batch T half"],
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


rotary_launches = partial(imported_launches, "embedlayer.kernels.gpu.rotary")

ROTATE = Operation(
    "rotation of queries or keys, and its backward pass", apply_rotary, cpu=[rotate_half_split, rotate_interleaved]
)
ROTATE_TOGETHER = Operation(
    "rotation of queries and keys together, and its backward pass",
    apply_rotary,
    gpu=rotary_launches,
    launches=["rotate"],
)


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
    interleaved, is_large = layout.distance == 1, False
    if layout.own_angles or layout.distance not in (1, layout.pairs):
        return rotate_channels(x, cos, sin, distance=layout.distance)
    if is_compiling:
        is_large = ROTATE.applies_in_graph(x) and has_more_than(x, LARGE_NUMEL)
    elif x.numel() > (SMALL_INTERLEAVED_NUMEL if interleaved else LARGE_NUMEL):
        by_kernel = ROTATE.applies(x, cos, sin)
        is_large = by_kernel and x.numel() > LARGE_NUMEL
        is_real = x.dtype == cos.dtype and x.dtype in (torch.float32, torch.float64) and device_kind(x) == "cpu"
        if interleaved and not by_kernel and is_real and fusible(x, cos, sin):
            return _rotate_complex(x, *_pair_angles(cos, sin, interleaved=True))
    if is_large:
        in_one_pass: Tensor = rotate_in_one_pass(x, *_pair_angles(cos, sin, interleaved=interleaved), interleaved)
        return in_one_pass
    return rotate_channels(x, cos, sin, distance=layout.distance)


class _RotateHeads(torch.autograd.Function):
    """Compute `rotate_heads` or its backward pass, which is the same with the transposed matrix of each pair."""

    @staticmethod
    def forward(
        ctx: Any, cos: Tensor, sin: Tensor, factor: Tensor | None, layout: RotaryLayout, inverse: bool, *heads: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin, factor)
        ctx.layout, ctx.inverse = layout, inverse
        return tuple(rotate_together(list(heads), cos, sin, factor, layout, inverse))

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


@ROTATE.operator(transposed=(2,))
def rotate_in_one_pass(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor | None:
    """Compute `apply_rotary` by a compiled kernel."""
    has_fitting_shapes = x.dim() in (3, 4) and cos.dim() <= x.dim() and x.numel() > 0
    out = torch.empty_like(x)
    if not has_fitting_shapes or not cos.dtype == sin.dtype == wide_dtype(x.dtype) or out.stride(-1) != 1:
        return None
    x, cos, sin = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, cos, sin))
    width, pairs = x.shape[-1], cos.shape[-1]
    cos, sin = (each.expand(*x.shape[:-1], pairs) for each in (cos, sin))
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    views = [each if each.dim() == 4 else each.unsqueeze(0) for each in (x, cos, sin, out)]
    order = sorted(range(3), key=views[-1].stride, reverse=True)  # vectors are visited in the order of memory
    x, cos, sin, to = (each.permute(*order, 3) for each in views)
    is_done = (rotate_interleaved if interleaved else rotate_half_split).run(
        x.numel() // width,
        *(_memory(x), x.stride()[:3], _memory(cos), _memory(sin), cos.stride()[:3]),
        *(to.view(-1, width), (*to.shape[1:3], pairs)),
        block=max(1, CLAIMED_NUMEL // width),
    )
    return out if is_done else None


def _memory(x: Tensor) -> Tensor:
    """Return the memory of `x`, from its first number to its last, as a one-dimensional tensor."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.detach().as_strided((last + 1,), (1,))


def rotates_together(heads: Sequence[Tensor], cos: Tensor, sin: Tensor, factor: Tensor | None) -> bool:
    """Return whether `rotate_together` computes with these tensors: all on CUDA, with shapes that are not broadcast."""
    q = heads[0]
    return (
        device_kind(q) == "cuda"
        and ROTATE_TOGETHER.applies(*heads, cos, sin, factor)
        and q.dim() in (3, 4)
        and all(x.shape[:-3] == q.shape[:-3] and x.shape[-2:] == q.shape[-2:] for x in heads)
        and cos.dim() <= q.dim()
        and cos.shape[-2] == q.shape[-2]
        and (cos.dim() == 3 or cos.shape[0] in (1, q.shape[0]))
    )


@ROTATE_TOGETHER.operator()
def rotate_together(
    heads: list[Tensor], cos: Tensor, sin: Tensor, factor: Tensor | None, layout: Sequence[int], inverse: bool
) -> list[Tensor]:
    """Rotate the pairs of queries and keys in one launch.

    - `heads`: queries `(B, H, T, K)` or `(H, T, K)`, and keys that differ in the number of heads only; or one of them.
    - `cos`: cosine of each rotated channel's angle, `(1, T, 2 * P)`, or `(B, 1, T, 2 * P)` for a B of 1 too.
    - `sin`: sine of the same angles, negated for the first channel of each pair.
    - `factor`: factor of each query, with one column in place of those of `cos`, or `None`.
    - `layout`: numbers of a `RotaryLayout`.
    - `inverse`: whether to compute the backward pass: the transposed matrix of each pair, so the negative angles.

    Returns:
        Rotated queries and keys, whose memory has the order of dimensions of the arguments.
    """
    pairs, distance, first, own_angles = layout
    heads = [x if x.stride(-1) == 1 else x.contiguous() for x in heads]
    results = [torch.empty_like(x) for x in heads]
    results = [x if x.stride(-1) == 1 else x.contiguous() for x in results]
    *sequences, _, length, width = heads[0].shape
    tensors = dict(zip(("q", "k"), heads, strict=False)) | dict(zip(("q_out", "k_out"), results, strict=False))
    strides = {
        f"{name}_{axis}": tensors[name].stride(place) if name in tensors and tensors[name].dim() >= -place else 0
        for name in ("q", "k", "q_out", "k_out")
        for axis, place in (("batch", -4), ("head", -3), ("token", -2))
    }
    unit, block, tokens = math.gcd(8, *strides.values()), power_of_2(pairs), math.prod(sequences) * length
    counts = {f"{name}_heads": tensors[name].shape[-3] if name in tensors else 0 for name in ("q", "k")}
    tiles = -(-tokens * block // rotary_launches()["rotate"].blocks["TILE"])
    angles: dict[str, Tensor | None] = {"cos": cos.contiguous(), "sin": sin.contiguous()}
    angles["factor"] = None if factor is None else factor.contiguous()
    sizes = {name: stride // unit for name, stride in strides.items()} | counts
    sizes |= {"span": min(MOST_HEADS, max(1, tiles * sum(counts.values()) // PROGRAMS)), "tokens": tokens}
    sizes |= {"length": length, "angle_length": length if cos.dim() == 4 and cos.shape[0] > 1 else 0}
    sizes |= {"WIDTH": width, "PAIRS": pairs, "DISTANCE": distance, "FIRST": first, "UNIT": unit, "BLOCK": block}
    missing = {name: None for name in ("q", "k", "q_out", "k_out") if name not in tensors}
    launch(rotary_launches(), "rotate", **tensors, **missing, **angles, **sizes, OWN=bool(own_angles), INVERSE=inverse)
    return results


def power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
