"""The values of a position scheme as a matrix to draw."""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from embedlayer.core.errors import SizeError
from embedlayer.positions.position import AdditivePosition, Position


class PositionPicture(NamedTuple):
    """The values of a position scheme as a matrix to draw.

    Attributes:
        values: One row per position or distance, one column per dimension, channel pair or head, `(T, C)`.
        title: Title of the picture.
        row_label: What a row is, such as "position".
        column_label: What a column is.
        value_label: What a value is.
    """

    values: Float[Tensor, "T C"]
    title: str
    row_label: str
    column_label: str
    value_label: str


@torch.no_grad()
def position_values(position: Position, length: int) -> PositionPicture | None:
    """Return the values of a position scheme over `length` positions, read through the hook that the scheme overrides.

    | hook | rows | columns | value |
    |---|---|---|---|
    | `add` | positions | dimensions | the number added to a token's vector |
    | `rotate`, with a `head_dim` | positions | channel pairs | the cosine of the rotation angle |
    | `bias` | distances to the key | heads | the number added to the attention score |

    Args:
        position: Any scheme.
        length: Number of positions, T; fewer if the scheme has a smaller `max_seq_len`.

    Returns:
        The values, or `None` for a scheme that is in no line of the table.
    """
    if length < 1:
        raise SizeError(f"position_values needs a length of at least 1; found {length}.")
    length = min(length, getattr(position, "max_seq_len", None) or length)
    if isinstance(position, AdditivePosition):
        values = position.vectors(torch.arange(length, device=position.device))
        return PositionPicture(values.float().cpu(), "Position vectors", "position", "dimension", "added to the token")
    if position.hook == "rotate" and getattr(position, "head_dim", None) is not None:
        return _rotation_cosines(position, length)
    return _bias_by_distance(position, length) if position.hook == "bias" else None


def _rotation_cosines(position: Position, length: int) -> PositionPicture:
    """Return the cosine of each channel pair's rotation angle at positions `0 .. length - 1`."""
    device, width = position.device, cast(int, position.head_dim)
    places = torch.arange(max(length, 2), device=device)  # at position 0 alone nothing moves, so no pair shows
    units_BKTK = torch.eye(width, device=device)[None, :, None].expand(1, width, len(places), width).contiguous()
    rotated_KTK = F.normalize(position.rotate(units_BKTK, units_BKTK.clone(), places[None])[0][0], dim=-1)
    cosines_KT = rotated_KTK.diagonal(dim1=0, dim2=2).T
    moved_KK = rotated_KTK.abs().sum(1).fill_diagonal_(0.0)
    partners = moved_KK.argmax(1).where(moved_KK.amax(1) > 0, torch.arange(width, device=device))
    firsts = torch.arange(width, device=device) <= partners
    return PositionPicture(
        cosines_KT[firsts, :length].T.float().cpu(),
        "Rotation by position",
        "position",
        "pair of dimensions",
        "cosine of the angle",
    )


def _bias_by_distance(position: Position, length: int) -> PositionPicture:
    """Return the bias of each head on keys `0 .. length - 1` positions before the query, one row per distance."""
    keys = torch.arange(length, device=position.device)[None]
    bias_BHQK = position.bias(keys[:, -1:], keys)
    assert bias_BHQK is not None  # its scheme overrides this hook
    values = bias_BHQK[0, :, 0].flip(1).T
    return PositionPicture(
        values.float().cpu(), "Bias on attention scores", "distance back to the key", "head", "added to the score"
    )
