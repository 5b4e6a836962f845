"""Sinusoidal positions: fixed waves of many lengths (the original Transformer)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from embedlayer.bounds import Bounds
from embedlayer.derived import Derived
from embedlayer.errors import SizeError
from embedlayer.files import JsonObject
from embedlayer.positions.position import AdditivePosition
from embedlayer.shapes import Positions


def sinusoids(positions: Float[Tensor, " T"], embed_dim: int, base: float = 10000.0) -> Float[Tensor, "T D"]:
    """`PE(p, 2i) = sin(p / base^(2i/D))`, `PE(p, 2i+1) = cos(p / base^(2i/D))`, in the dtype of `positions`.

    For any offset k, `PE(p + k)` is one fixed linear map of `PE(p)`: each sin/cos pair turns by the angle
    `k / base^(2i/D)`. An odd width ends on a sine.

    Reference: Vaswani et al., Attention is all you need, 2017, section 3.5.
    """
    exponents = torch.arange(0, embed_dim, 2, dtype=positions.dtype) / embed_dim
    angles = positions.unsqueeze(-1) * base**-exponents
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :embed_dim]


class SinusoidalPositionalEmbedding(AdditivePosition, Derived):
    """Fixed sinusoids: `add(x, positions) = x + sinusoids(positions)`, no parameters.

    The rows are computed in float64 and kept in float32, also in a model of bfloat16.

    Args:
        max_seq_len: Rows made, the longest sequence. A larger number changes no row.
        embed_dim: Width of a row, D; it may be odd.
        base: The longest wave has 2 pi base positions.

    Raises:
        SizeError: A size is below 1.

    Example:
        >>> SinusoidalPositionalEmbedding(50, 4).vectors(torch.tensor([0]))
        tensor([[0., 1., 0., 1.]])
    """

    waves: Float[Tensor, "max_seq_len D"]

    def __init__(self, max_seq_len: int, embed_dim: int, *, base: float = 10000.0) -> None:
        super().__init__()
        if max_seq_len < 1 or embed_dim < 1:
            raise SizeError(f"max_seq_len and embed_dim must be at least 1, not {max_seq_len} and {embed_dim}.")
        self.max_seq_len = max_seq_len
        self.embed_dim = embed_dim
        self.base = base
        self.bounds = Bounds(max_seq_len, "position")
        self.derive()

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments."""
        return {"max_seq_len": self.max_seq_len, "embed_dim": self.embed_dim, "base": self.base}

    def derived(self) -> dict[str, Tensor]:
        """The rows of all positions."""
        positions = torch.arange(self.max_seq_len or 0, dtype=torch.float64)
        return {"waves": sinusoids(positions, self.embed_dim, self.base).float()}

    def vectors(self, positions: Positions) -> Float[Tensor, "*rows T D"]:
        """`sinusoids(positions)`."""
        positions, outside = self.bounds(positions)
        rows = F.embedding(positions, self.waves)
        return rows if outside is None else rows.masked_fill(outside.unsqueeze(-1), 0)

    def check(self) -> None:
        """Wait for the device and raise the error of a position past `max_seq_len` since the last check."""
        self.bounds.check()
