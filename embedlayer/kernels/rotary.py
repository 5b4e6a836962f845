"""Operators on CUDA that compute the tables of rotary angles, and rotate queries and keys together.

`embedlayer.positions.rotary.rotation.rotate_head` and `embedlayer.positions.rotary.embedding.rotary_angles` are the
definitions. Each operator is one launch. In graphs of `torch.compile` the definitions are used: inductor computes each
of them in one pass as well, and fuses the rotation with what precedes it, such as the norms of queries and keys.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.kernels.gpu.launch import launch, launch_table
from embedlayer.kernels.kernel import Kernel, operator

ROTATE = Kernel("rotary", "rotate_half_split", has_triton=True)


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


LAYOUT = "SymInt pairs, SymInt distance, SymInt first, bool own_angles"


def rotates_together(heads: Sequence[Tensor], cos: Tensor, sin: Tensor, factor: Tensor | None) -> bool:
    """Return whether `rotate_together` computes with these tensors: all on CUDA, with shapes that are not broadcast."""
    q = heads[0]
    return (
        device_kind(q) == "cuda"
        and ROTATE.applies(*heads, cos, sin, factor)
        and q.dim() in (3, 4)
        and all(x.shape[:-3] == q.shape[:-3] and x.shape[-2:] == q.shape[-2:] for x in heads)
        and cos.dim() <= q.dim()
        and cos.shape[-2] == q.shape[-2]
        and (cos.dim() == 3 or cos.shape[0] in (1, q.shape[0]))
    )


@operator(
    f"(Tensor[] heads, Tensor cos, Tensor sin, Tensor? factor, {LAYOUT}, bool inverse) -> Tensor[]",
)
def rotate_together(
    heads: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    factor: Tensor | None,
    pairs: int,
    distance: int,
    first: int,
    own_angles: bool,
    inverse: bool,
) -> list[Tensor]:
    """Rotate the pairs of queries and keys in one launch.

    - `heads`: queries `(B, H, T, K)` or `(H, T, K)`, and keys that differ in the number of heads only; or one of them.
    - `cos`: cosine of each rotated channel's angle, `(1, T, 2 * P)`, or `(B, 1, T, 2 * P)` for a B of 1 too.
    - `sin`: sine of the same angles, negated for the first channel of each pair.
    - `factor`: factor of each query, with one column in place of those of `cos`, or `None`.
    - `inverse`: whether to compute the backward pass: the transposed matrix of each pair, so the negative angles.

    Returns:
        Rotated queries and keys, whose memory has the order of dimensions of the arguments.
    """
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
    unit, block, tokens = math.gcd(8, *strides.values()), _power_of_2(pairs), math.prod(sequences) * length
    counts = {f"{name}_heads": tensors[name].shape[-3] if name in tensors else 0 for name in ("q", "k")}
    tiles = -(-tokens * block // launch_table("rotary")["rotate"].blocks["TILE"])
    launch(
        "rotary",
        "rotate",
        **dict.fromkeys(("q", "k", "q_out", "k_out")) | tensors,
        cos=cos.contiguous(),
        sin=sin.contiguous(),
        factor=None if factor is None else factor.contiguous(),
        **{name: stride // unit for name, stride in strides.items()},
        **counts,
        span=min(MOST_HEADS, max(1, tiles * sum(counts.values()) // PROGRAMS)),
        tokens=tokens,
        length=length,
        angle_length=length if cos.dim() == 4 and cos.shape[0] > 1 else 0,
        WIDTH=width,
        PAIRS=pairs,
        DISTANCE=distance,
        FIRST=first,
        OWN=own_angles,
        INVERSE=inverse,
        UNIT=unit,
        BLOCK=block,
    )
    return results


@operator(
    f"(Tensor positions, Tensor increments, Tensor? axis, {LAYOUT}, float scale) -> (Tensor, Tensor)",
)
def rotary_tables(
    positions: Tensor,
    increments: Tensor,
    axis: Tensor | None,
    pairs: int,
    distance: int,
    first: int,
    own_angles: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines for `rotate_together` in one launch, `(..., T, 2 * P)` each.

    - `positions`: positions, `(..., T)`; with `axis` `(A, ..., T)`.
    - `increments`: phase of each pair per position, in units of 2^-53 rotations, `(P,)`.
    - `axis`: axis of each pair, or of each channel with `own_angles`; `None` for a single axis.
    """
    shape = positions.shape if axis is None else positions.shape[1:]
    cos, sin = (positions.new_empty(*shape, 2 * pairs, dtype=torch.float32) for _ in range(2))
    launch(
        "rotary",
        "angle_tables",
        positions=positions.contiguous(),
        increments=increments,
        axis=axis,
        cos=cos,
        sin=sin,
        tokens=math.prod(shape),
        scale=scale,
        PAIRS=pairs,
        DISTANCE=distance,
        OWN=own_angles and axis is not None,
        BLOCK=_power_of_2(pairs),
    )
    return cos, sin


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
