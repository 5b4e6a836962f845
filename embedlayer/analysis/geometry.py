"""The shape of a table, and of a position scheme, as numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from embedlayer.errors import ShapeError, SizeError
from embedlayer.positions.position import AdditivePosition, Position

CHUNK_ROWS = 8192
"""Rows widened to float64 at a time."""


@dataclass(frozen=True)
class Pca:
    """Principal components of N rows of width D: `coordinates = (rows - mean) @ components.T`.

    Attributes:
        coordinates: Where each row lies along the C components, `(N, C)`.
        components: Orthonormal directions `(C, D)`, widest first.
        explained_variance_ratio: Share of the total variance along each, `(C,)`; zeros where nothing varies.
        mean: The mean row, `(D,)`.
    """

    coordinates: Float[Tensor, "N C"]
    components: Float[Tensor, "C D"]
    explained_variance_ratio: Float[Tensor, " C"]
    mean: Float[Tensor, " D"]


@torch.no_grad()
def pca(rows: Float[Tensor, "N D"], num_components: int = 2) -> Pca:
    """Exact principal components: the eigenvectors of the covariance, in float64.

    A component's sign is free; here its entry of largest size is positive, so that the same table always gives the
    same picture. Memory beyond the result is `D x D` and a chunk of rows.

    Args:
        rows: N rows of width D.
        num_components: Directions to keep, C, at most D.

    Raises:
        SizeError: No rows, or `num_components` outside 1..D.
        ShapeError: Rows hold NaN or infinity.
    """
    count, width = rows.shape
    if count < 1:
        raise SizeError(f"PCA needs at least one row; found {count} rows of width {width}.")
    if not 1 <= num_components <= width:
        raise SizeError(f"Rows of width {width} have 1 to {width} components; asked for {num_components}.")
    broken = torch.nonzero(~torch.cat([chunk.isfinite().all(dim=1) for chunk in _chunks(rows)]))[:, 0]
    if len(broken):
        raise ShapeError(
            f"{len(broken)} of {count} rows hold NaN or infinity, the first is row {int(broken[0])}; "
            f"PCA needs finite numbers. Leave those rows out."
        )
    mean = sum((chunk.double().sum(0) for chunk in _chunks(rows)), rows.new_zeros(width, dtype=torch.float64))
    mean = mean / count
    scatter = rows.new_zeros(width, width, dtype=torch.float64)
    for chunk in _chunks(rows):
        centred = chunk.double() - mean
        scatter += centred.T @ centred
    variances, directions = torch.linalg.eigh(scatter)
    variances, directions = variances.flip(0).clamp_min(0.0), directions.flip(1).T  # eigh: narrowest first, in columns
    # equal rows differ from their mean by rounding alone, which must not be mistaken for a direction
    rounding = count * width * (1e-15 * float(rows.abs().max())) ** 2
    variances = variances.where(variances > rounding, 0.0)
    components = directions[:num_components]
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
    components = components * largest.sign()
    coordinates = torch.cat([(chunk.double() - mean) @ components.T for chunk in _chunks(rows)])
    return Pca(
        coordinates=coordinates * (variances[:num_components] > 0),
        components=components,
        explained_variance_ratio=variances[:num_components]
        / variances.sum().clamp_min(torch.finfo(torch.float64).tiny),
        mean=mean,
    )


def _chunks(rows: Float[Tensor, "N D"]) -> Iterator[Float[Tensor, "rows D"]]:
    return (rows[start : start + CHUNK_ROWS] for start in range(0, len(rows), CHUNK_ROWS))


class PositionPicture(NamedTuple):
    """What a position scheme does, as a matrix to draw.

    Attributes:
        values: One row per position or distance, one column per dimension, pair or head, `(T, C)`.
        title: What is shown.
        row_label: What a row is.
        column_label: What a column is.
        value_label: What a number is.
    """

    values: Float[Tensor, "T C"]
    title: str
    row_label: str
    column_label: str
    value_label: str


@torch.no_grad()
def position_values(position: Position, length: int) -> PositionPicture | None:
    """What a scheme looks like over `length` positions, read through the hook by which it speaks.

    | hook | rows | columns | value |
    |---|---|---|---|
    | `add` | positions | dimensions | what is added to a token's vector |
    | `rotate` | positions | pairs of dimensions | cosine of the angle by which the pair is turned |
    | `bias` | distances to the key | heads | what is added to the score |

    Args:
        position: Any scheme. One with a `max_seq_len` is shown up to it.
        length: Positions to show, T.

    Returns:
        The picture, or `None` for a scheme that leaves everything as it is.

    Raises:
        SizeError: `length` is below 1.
    """
    if length < 1:
        raise SizeError(f"A picture needs at least one position; asked for {length}.")
    length = min(length, getattr(position, "max_seq_len", None) or length)
    if isinstance(position, AdditivePosition):
        return _added(position, length)
    if type(position).rotate is not Position.rotate:
        return _turned(position, length)
    if type(position).bias is not Position.bias:
        return _biased(position, length)
    return None


def _device(position: Position) -> torch.device:
    tensor = next(iter(position.parameters()), next(iter(position.buffers()), None))
    return torch.device("cpu") if tensor is None else tensor.device


def _added(position: AdditivePosition, length: int) -> PositionPicture:
    values = position.vectors(torch.arange(length, device=_device(position)))
    return PositionPicture(values.float().cpu(), "Position vectors", "position", "dimension", "added to the token")


def _turned(position: Position, length: int) -> PositionPicture:
    """Turn each unit vector: where it stays is its cosine, where it goes is its partner, in any layout of pairs."""
    device, width = _device(position), cast(int, position.head_dim)
    places = torch.arange(max(length, 2), device=device)  # at position 0 alone nothing moves, so no pair shows
    units_BKTK = torch.eye(width, device=device)[None, :, None].expand(1, width, len(places), width).contiguous()
    turned_KTK = F.normalize(position.rotate(units_BKTK, units_BKTK.clone(), places[None])[0][0], dim=-1)
    cosines_KT = turned_KTK.diagonal(dim1=0, dim2=2).T
    moved_KK = turned_KTK.abs().sum(1).fill_diagonal_(0.0)
    partners = moved_KK.argmax(1).where(moved_KK.amax(1) > 0, torch.arange(width, device=device))
    firsts = torch.arange(width, device=device) <= partners
    return PositionPicture(
        cosines_KT[firsts, :length].T.float().cpu(),
        "Rotation by position",
        "position",
        "pair of dimensions",
        "cosine of the angle",
    )


def _biased(position: Position, length: int) -> PositionPicture:
    device = _device(position)
    keys = torch.arange(length, device=device)[None]
    bias_BHQK = position.bias(keys[:, -1:], keys)
    assert bias_BHQK is not None  # its scheme overrides this hook
    values = bias_BHQK[0, :, 0].flip(1).T
    return PositionPicture(
        values.float().cpu(), "Bias on attention scores", "distance back to the key", "head", "added to the score"
    )
