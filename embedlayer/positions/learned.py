"""Learned positions: one trained row per position (GPT-2, BERT)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.bounds import Bounds
from embedlayer.errors import SizeError
from embedlayer.files import JsonObject
from embedlayer.positions.position import AdditivePosition
from embedlayer.shapes import Positions


class LearnedPositionalEmbedding(AdditivePosition, nn.Embedding):
    """One learned row per position: `add(x, positions) = x + weight[positions]`.

    It is an `nn.Embedding` (parameter `weight`, `(max_seq_len, D)`).

    Args:
        max_seq_len: Rows, the longest sequence.
        embed_dim: Width of a row, D.
        init_std: Standard deviation of the normal initialisation.
        device: Where to put the rows.
        dtype: In which type.

    Raises:
        SizeError: A size is below 1.

    Example:
        >>> LearnedPositionalEmbedding(16, 8)(torch.zeros(1, 3).long()).shape
        torch.Size([3, 8])

    Reference: Radford et al., GPT-2, 2019 (`wpe`).
    """

    def __init__(
        self,
        max_seq_len: int,
        embed_dim: int,
        *,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if max_seq_len < 1 or embed_dim < 1:
            raise SizeError(f"max_seq_len and embed_dim must be at least 1, not {max_seq_len} and {embed_dim}.")
        self.init_std = init_std
        nn.Embedding.__init__(self, max_seq_len, embed_dim, device=device, dtype=dtype)
        self.max_seq_len = max_seq_len
        self.bounds = Bounds(max_seq_len, "position")

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments."""
        return {"max_seq_len": self.max_seq_len, "embed_dim": self.embedding_dim, "init_std": self.init_std}

    def reset_parameters(self) -> None:
        """Draw the rows from N(0, init_std^2)."""
        nn.init.normal_(self.weight, std=self.init_std)

    def vectors(self, positions: Positions) -> Float[Tensor, "*rows T D"]:
        """`weight[positions]`."""
        positions, outside = self.bounds(positions)
        rows = F.embedding(positions, self.weight)
        return rows if outside is None else rows.masked_fill(outside.unsqueeze(-1), 0)

    def check(self) -> None:
        """Wait for the device and raise the error of a position past the table since the last check."""
        self.bounds.check()
