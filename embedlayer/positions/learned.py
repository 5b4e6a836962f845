"""Learned positions: one trained row per position (GPT-2, BERT; with an offset OPT, BART)."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.bounds import Bounds
from embedlayer.errors import SizeError
from embedlayer.io.files import JsonObject
from embedlayer.normal import draw_
from embedlayer.positions.position import AdditivePosition
from embedlayer.shapes import Positions


class LearnedPositionalEmbedding(AdditivePosition, nn.Embedding):
    """One learned row per position: `add(x, positions) = x + weight[positions + offset]`.

    It is an `nn.Embedding` (parameter `weight`, `(max_seq_len + offset, D)`).

    Args:
        max_seq_len: Longest sequence; rows of the table beyond the offset.
        embed_dim: Width of a row, D.
        offset: Rows in front of position 0 (2 in OPT, BART, mBART, Pegasus-X and others). Positions down to `-offset`
            reach them: OPT gives padding position -1.
        init_std: Standard deviation of the normal initialisation.
        device: Where to put the rows.
        dtype: In which type.

    Raises:
        SizeError: A size is below 1, or the offset below 0.

    Example:
        >>> position = LearnedPositionalEmbedding(16, 8)
        >>> torch.equal(position(torch.arange(5, 8)), position.weight[5:8])
        True

    Reference: Radford et al., GPT-2, 2019 (`wpe`); transformers/models/opt/modeling_opt.py
    (`OPTLearnedPositionalEmbedding`).
    """

    def __init__(
        self,
        max_seq_len: int,
        embed_dim: int,
        *,
        offset: int = 0,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if max_seq_len < 1 or embed_dim < 1:
            raise SizeError(f"max_seq_len and embed_dim must be at least 1, not {max_seq_len} and {embed_dim}.")
        if offset < 0:
            raise SizeError(f"offset must be at least 0, not {offset}: it is a number of rows.")
        self.init_std = init_std
        nn.Embedding.__init__(self, max_seq_len + offset, embed_dim, device=device, dtype=dtype)
        self.max_seq_len = max_seq_len
        self.offset = offset
        self.bounds = Bounds(max_seq_len, "position", offset=offset)

    @property
    def embed_dim(self) -> int:
        """Width of a row, D."""
        return self.embedding_dim

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments."""
        return {
            "max_seq_len": self.max_seq_len,
            "embed_dim": self.embed_dim,
            "offset": self.offset,
            "init_std": self.init_std,
        }

    def reset_parameters(self) -> None:
        """Draw the rows from N(0, init_std^2)."""
        draw_(self.weight, std=self.init_std)

    def stored(self, length: int) -> Float[Tensor, "T D"] | None:
        """Rows of `weight`."""
        return self.weight[self.offset : self.offset + length] if length <= (self.max_seq_len or 0) else None

    def vectors(self, positions: Positions) -> Float[Tensor, "*rows T D"]:
        """`weight[positions + offset]`."""
        places, outside = self.bounds(positions)
        rows = F.embedding(places, self.weight)
        return rows if outside is None else rows.masked_fill(outside.unsqueeze(-1), 0)

    @torch.no_grad()
    def resize(
        self, new_len: int, method: Literal["interpolate", "extend"] = "interpolate"
    ) -> "LearnedPositionalEmbedding":
        """A table for another longest sequence, made from this one, which stays as it is.

        Args:
            new_len: Longest sequence of the new table.
            method: `"interpolate"`: position p is read at `p (old - 1) / (new - 1)`, between two rows, so that the ends
                stay in place and text of the old length is stretched. `"extend"`: rows of the old positions are kept
                bit for bit, and further ones drawn from N(0, init_std^2); a smaller table keeps the first ones.

        Returns:
            The new table, in the same dtype, on the same device. Rows in front of position 0 are copied.

        Raises:
            SizeError: `new_len` is below 1, or the method is neither.

        Reference: Dosovitskiy et al., An image is worth 16x16 words, 2021, section 3.2 (interpolation).
        """
        if method not in ("interpolate", "extend"):
            raise SizeError(f"method must be 'interpolate' or 'extend', not {method!r}.")
        resized = LearnedPositionalEmbedding(
            new_len,
            self.embedding_dim,
            offset=self.offset,
            init_std=self.init_std,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        front, rows = self.weight[: self.offset], self.weight[self.offset :]
        if method == "interpolate":
            size, wide = (new_len, self.embedding_dim), rows.to(torch.promote_types(rows.dtype, torch.float32))
            rows = F.interpolate(wide[None, None], size, mode="bilinear", align_corners=True)[0, 0].to(rows.dtype)
        kept = torch.cat([front, rows[:new_len]])
        resized.weight[: len(kept)] = kept
        resized.weight.requires_grad_(self.weight.requires_grad)
        return resized

    def check(self) -> None:
        """Wait for the device and raise the error of a position past the table since the last check."""
        self.bounds.check()
