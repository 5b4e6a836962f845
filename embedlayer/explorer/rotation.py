"""Rotations of pairs of channels as numbers, read from the results of any scheme that rotates queries and keys."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.positions.position import Position
from embedlayer.positions.rotary.embedding import RotaryEmbedding

HEAD_DIM = 64  # width of a head for a scheme that has none of its own
PROBED = 4  # positions at which the pairs of an unknown scheme are searched

TOLERANCE = 1e-4


class PairRotation(NamedTuple):
    """What a scheme does to queries and keys, `(a, b) -> (a cos - b sin, a sin + b cos)` for each pair of channels."""

    channels: Int[Tensor, "P 2"]
    queries: Float[Tensor, "T columns"]
    keys: Float[Tensor, "T columns"]

    @property
    def angles(self) -> Float[Tensor, "T P"]:
        """Return the angle of each pair, in radians from -pi to pi."""
        return torch.atan2(self.queries[:, 1:-1:2], self.queries[:, :-1:2])


def width_of(position: Position) -> int:
    """Return the width of a head that a scheme rotates: its own `head_dim`, or `HEAD_DIM`."""
    return getattr(position, "head_dim", None) or HEAD_DIM


def pair_rotation(position: Position, positions: Int[Tensor, " T"]) -> PairRotation | None:
    """Return the rotation of each pair at some positions; `None` for a scheme that does not rotate pairs."""
    # The scheme rotates a vector with a 1 in the first channel of each pair; random vectors show whether it does more.
    width = width_of(position)
    pairs = position.pair_channels() if isinstance(position, RotaryEmbedding) else _pairs(position, width)
    if pairs is None:
        return None
    pairs = pairs.to(positions.device)
    others = torch.ones(width, dtype=torch.bool, device=positions.device).index_fill_(0, pairs.flatten(), False)
    probe = others.float().index_fill_(0, pairs[:, 0], 1.0)
    rotation = PairRotation(
        pairs, *(_columns(rotated, pairs, others) for rotated in _rotated(position, probe[None], positions))
    )
    generator = torch.Generator().manual_seed(0)
    trial = torch.randn(1, width, generator=generator).to(positions.device)
    results = _rotated(position, trial, positions)
    for result, columns in zip(results, (rotation.queries, rotation.keys), strict=True):
        if not torch.allclose(result[0], _applied(trial[0], pairs, columns), rtol=TOLERANCE, atol=TOLERANCE):
            return None
    return rotation


def _rotated(
    position: Position, vectors: Float[Tensor, "N K"], positions: Int[Tensor, " T"]
) -> tuple[Float[Tensor, "N T K"], Float[Tensor, "N T K"]]:
    """Return some vectors as queries and as keys at each position."""
    heads = vectors[None, :, None].expand(1, -1, len(positions), -1)
    queries, keys = position.rotate(heads, heads, positions)
    return queries[0], keys[0]


def _pairs(position: Position, width: int) -> Int[Tensor, "P 2"] | None:
    """Return the pairs of channels that a scheme mixes; `None` if it mixes more than two."""
    device = position.device
    queries, keys = _rotated(position, torch.eye(width, device=device), torch.arange(PROBED, device=device))
    mixed = (queries.abs() + keys.abs()).amax(1) > 0
    mixed.fill_diagonal_(False)
    mixed |= mixed.T.clone()
    if int(mixed.sum(1).amax()) > 1:
        return None
    return mixed.triu().nonzero()


def _columns(rotated: Float[Tensor, "1 T K"], pairs: Int[Tensor, "P 2"], others: Tensor) -> Float[Tensor, "T columns"]:
    """Return cosine and sine of each pair and the factor of the other channels, from a rotated probe."""
    rest = rotated[0][:, others][:, :1] if bool(others.any()) else torch.ones_like(rotated[0][:, :1])
    return torch.cat([rotated[0][:, pairs].flatten(1), rest], dim=1)


def _applied(
    vector: Float[Tensor, " K"], pairs: Int[Tensor, "P 2"], columns: Float[Tensor, "T columns"]
) -> Float[Tensor, "T K"]:
    """Return a vector at each position, rotated by the numbers of `PairRotation`."""
    first, second = vector[pairs[:, 0]], vector[pairs[:, 1]]
    cos, sin = columns[:, :-1:2], columns[:, 1:-1:2]
    result = columns[:, -1:] * vector
    result[:, pairs[:, 0]] = first * cos - second * sin
    result[:, pairs[:, 1]] = first * sin + second * cos
    return result
