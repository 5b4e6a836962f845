"""A rotary scheme of each kind, queries and keys for it, and what its Triton kernels must fulfil."""

import copy
from unittest.mock import patch

import torch
from interpreted import interpreted
from kernel_records import launch_kernel, operation_of
from torch import Tensor

from embedlayer import Position, RotaryEmbedding
from embedlayer.kernels import kernels_disabled
from embedlayer.kernels.gpu.launch import launches_observed
from embedlayer.positions import (
    AlternatingAxes,
    AxialAxes,
    ChannelAxes,
    ChunkedAxes,
    DynamicNTKScaling,
    InterleavedAxes,
    LogQueryScaling,
    NTKAlphaScaling,
    PowerQueryScaling,
    QueryScaledPosition,
)
from embedlayer.positions.rotary import rotation
from embedlayer.positions.rotary.rotation import rotate_channels

HEAD = 24
MIXED = torch.randint(0, 50, (3, 2, 7), generator=torch.Generator().manual_seed(0))
"""Positions on three axes, `(A, B, T)`."""

SCHEMES: dict[str, Position] = {
    "plain": RotaryEmbedding(HEAD),
    "chunked": RotaryEmbedding(HEAD, axes=ChunkedAxes((2, 4, 6))),
    "chunked, dynamic": RotaryEmbedding(HEAD, axes=ChunkedAxes((2, 4, 6)), scaling=DynamicNTKScaling(2.0, 8)),
    "interleaved": RotaryEmbedding(HEAD, axes=InterleavedAxes((6, 3, 3)), rotary_dim=HEAD),
    "alternating": RotaryEmbedding(HEAD, axes=AlternatingAxes((4, 4, 4)), interleaved=True),
    "channels": RotaryEmbedding(HEAD, axes=ChannelAxes((2, 4, 6))),
    "axial": RotaryEmbedding(HEAD, axes=AxialAxes(3), reversed=True),
    "axial, alternating": RotaryEmbedding(HEAD, axes=AxialAxes(3, alternating=True), interleaved=True),
    "axial, within": RotaryEmbedding(
        HEAD + 2, rotary_dim=HEAD, trailing=True, axes=AxialAxes(3, pairs_within_axis=True)
    ),
    "axial, shared": RotaryEmbedding(HEAD, axes=AxialAxes(3, shared_frequencies=True, last_axis_first=True)),
    "query scaling": RotaryEmbedding(HEAD, query_scaling=LogQueryScaling(0.5, 3, offset=1)),
    "reversed, trailing": RotaryEmbedding(HEAD, rotary_dim=16, trailing=True, reversed=True, interleaved=True),
    "alpha": RotaryEmbedding(HEAD, scaling=NTKAlphaScaling(1000.0)),
    "query-scaled": QueryScaledPosition(PowerQueryScaling(0.1, 3)),
}
ON_AXES = [name for name, position in SCHEMES.items() if getattr(position, "axes", None) is not None]
ROTATED = [name for name, position in SCHEMES.items() if isinstance(position, RotaryEmbedding)]

SIZES = {"small": (2, 7, 4, 2), "several programs": (1, 150, 9, 1)}
"""Sequences, tokens, query heads and key heads."""


def heads(position: Position, size: str = "small", *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return queries and keys of one of `SIZES`, the same ones at each call."""
    width, (rows, length, *counts) = getattr(position, "head_dim", HEAD), SIZES[size]
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(rows, count, length, width, generator=generator, device="cpu") for count in counts)
    return q.to(torch.get_default_device(), dtype), k.to(torch.get_default_device(), dtype)


def positions_for(name: str) -> Tensor:
    """Return positions of the small queries and keys, on several axes if the scheme has them."""
    return MIXED if name in ON_AXES else MIXED[0]


def rotated(position: Position, q: Tensor, k: Tensor, positions: Tensor, grads: list[Tensor]) -> list[Tensor]:
    """Return rotated queries and keys, and the gradients of both."""
    q, k = (x.detach().requires_grad_() for x in (q, k))
    results = position.rotate(q, k, positions)
    return [*results, *torch.autograd.grad(results, (q, k), grads)]


def assert_rotation_is_no_worse_than_by_operators(
    name: str, dtype: torch.dtype, size: str = "small", positions: str = "each sequence"
) -> None:
    """Triton kernels miss the float64 answer by what torch operators in float32 miss it by, and by rounding.

    Args:
        name: Key of `SCHEMES`.
        dtype: Dtype of queries and keys.
        size: Key of `SIZES`.
        positions: `"each axis"`, `"each sequence"`, or `"all alike"`.
    """
    position = copy.deepcopy(SCHEMES[name]).to(torch.get_default_device())
    q, k = heads(position, size, dtype=dtype)
    rows, length, *_ = SIZES[size]
    at = torch.randint(0, 4000, (3, rows, length), device="cpu").to(q.device)
    at = {"each axis": at if name in ON_AXES else at[0], "each sequence": at[0], "all alike": at[0, 0]}[positions]
    grads = [torch.randn_like(x) for x in (q, k)]
    launched: list[str] = []
    with launches_observed(lambda each: launched.append(each.name)):
        ours = rotated(position, q, k, at, grads)
    assert launched[-3:] == ["angle_tables", "rotate", "rotate"]
    exact = rotated(position, q.double(), k.double(), at, [each.double() for each in grads])
    with kernels_disabled():
        plain = rotated(position, q.float(), k.float(), at, [each.float() for each in grads])
    for found, slow, right in zip(ours, plain, exact, strict=True):
        assert found.dtype == dtype
        rounding = torch.finfo(dtype).eps * right.abs() + torch.finfo(dtype).smallest_normal
        assert ((found.double() - right).abs() <= 1.5 * (slow.double() - right).abs().max() + rounding).all()


def assert_little_more_than_queries_and_keys_is_moved(interleaved: bool) -> None:
    """A rotation reads and writes at most 1.3 times of what queries and keys take."""
    position = RotaryEmbedding(128, interleaved=interleaved)
    q, k = (torch.randn(1, 20, count, 128).bfloat16().transpose(1, 2) for count in (32, 8))
    stated: list[int] = []
    with interpreted() as run, patch.object(rotation, "PROGRAMS", 1):
        prepared = position.prepare(torch.arange(20))
        run.launches.clear()
        with launches_observed(lambda each: stated.append(each.bytes)):
            position.rotate(q, k, prepared)
    (moved,) = (each.read.total() + each.written.total() for each in run.launches)
    assert moved <= 1.3 * 2 * (q.nbytes + k.nbytes)
    assert 0.8 * sum(stated) <= moved <= 1.2 * sum(stated)


def assert_far_heads_are_rotated_as_near_ones(tokens_first: bool, blocks: list[Tensor]) -> None:
    """The last program rotates heads whose numbers are beyond 2^31.

    Args:
        tokens_first: Whether memory is `(T, H, K)`, and otherwise `(H, T, K)`.
        blocks: Result of `far_blocks`; some of their numbers are overwritten.
    """
    x, out = (block.view(block.shape[0], -1, 8) for block in blocks)
    if tokens_first:
        x, out = x.transpose(0, 1), out.transpose(0, 1)
    count, length, width = x.shape
    cos, sin = torch.randn(2, length, width)
    sin[:, 4:], cos[:, 4:] = -sin[:, :4], cos[:, :4]
    strides = {
        f"{name}_{axis}": stride
        for name, y in (("q", x), ("k", x), ("q_out", out), ("k_out", out))
        for axis, stride in zip(("batch", "head", "token"), (0, *y.stride()), strict=False)
    }
    tile = operation_of("rotate").gpu()["rotate"].blocks["TILE"] // 4
    last = slice((length - 1) // tile * tile, None)
    x[-1, last] = torch.randn(length - last.start, width).bfloat16()
    with interpreted() as run:
        run.programs = lambda grid: [(grid[0] - 1,)]
        launch_kernel(
            "rotate",
            **operation_of("rotate").gpu()["rotate"].variants["alone"].constants
            | {"WIDTH": 8, "PAIRS": 4, "DISTANCE": 4, "BLOCK": 4},
            **{name: stride // 8 for name, stride in strides.items()},
            q=x,
            q_out=out,
            cos=cos,
            sin=sin,
            q_heads=count,
            k_heads=0,
            span=1,
            tokens=length,
            length=length,
            angle_length=0,
        )
    expected = rotate_channels(x[-1, last], cos[last], sin[last], distance=4)
    torch.testing.assert_close(out[-1, last], expected, rtol=2.0**-7, atol=1e-6)
