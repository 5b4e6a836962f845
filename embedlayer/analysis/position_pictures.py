"""The values of a position scheme as a matrix to draw."""

from typing import NamedTuple

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
    device, width = position.device, getattr(position, "head_dim", None)
    if position.hook == "rotate" and width is not None:
        # rotate each unit vector: a pair of channels moves into one another, at an angle with this cosine
        places = torch.arange(max(length, 2), device=device)  # at position 0 alone nothing moves, so no pair shows
        units_BKTK = torch.eye(width, device=device)[None, :, None].expand(1, width, len(places), width).contiguous()
        rotated_KTK = F.normalize(position.rotate(units_BKTK, units_BKTK.clone(), places[None])[0][0], dim=-1)
        moved_KK = rotated_KTK.abs().sum(1).fill_diagonal_(0.0)
        partners = moved_KK.argmax(1).where(moved_KK.amax(1) > 0, torch.arange(width, device=device))
        firsts = torch.arange(width, device=device) <= partners
        values = rotated_KTK.diagonal(dim1=0, dim2=2).T[firsts, :length].T
        labels = ("Rotation by position", "position", "pair of dimensions", "cosine of the angle")
        return PositionPicture(values.float().cpu(), *labels)
    if position.hook == "bias":
        keys = torch.arange(length, device=device)[None]
        bias_BHQK = position.bias(keys[:, -1:], keys)
        assert bias_BHQK is not None  # its scheme overrides this hook
        values = bias_BHQK[0, :, 0].flip(1).T  # one row for each distance
        labels = ("Bias on attention scores", "distance back to the key", "head", "added to the score")
        return PositionPicture(values.float().cpu(), *labels)
    return None
