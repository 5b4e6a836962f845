"""Learned positions: one trained row per position (GPT-2, BERT; with an offset OPT, BART)."""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.core.errors import SizeError
from embedlayer.core.initialization import init_normal_
from embedlayer.core.shapes import Positions
from embedlayer.kernels.index_check import IndexCheck
from embedlayer.kernels.input import StoredRows, gather_rows, rows_on_cuda
from embedlayer.positions.position import AdditivePosition

TableMethod = Literal["interpolate", "extend", "repeat"]
"""How `LearnedPositionalEmbedding.resize` computes further rows."""


class LearnedPositionalEmbedding(AdditivePosition, nn.Embedding):  # type: ignore[misc]  # from_pretrained is ours
    """One learned row per position: `add(x, positions) = x + weight[positions + offset]`.

    It is an `nn.Embedding` (parameter `weight`, `(max_seq_len + offset, D)`).

    Args:
        max_seq_len: Longest sequence; the table has `max_seq_len + offset` rows.
        embed_dim: Width of a row, D.
        offset: Rows before position 0 (2 in OPT, BART, mBART, Pegasus-X and others), for positions `-offset .. -1`.
            OPT gives padding position -1.
        init_std: Standard deviation of the normal initialisation.
        device: Device of the rows.
        dtype: Dtype of the rows.

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
        if offset < 0:
            raise SizeError(f"offset must be at least 0, not {offset}: it is a number of rows.")
        self.init_std = init_std
        nn.Embedding.__init__(self, max_seq_len + offset, embed_dim, device=device, dtype=dtype)
        self.max_seq_len = max_seq_len
        self.embed_dim = embed_dim
        self.offset = offset
        self.index_check = IndexCheck(max_seq_len, "position", offset=offset)

    def reset_parameters(self) -> None:
        """Draw all rows again, in place, from N(0, init_std²)."""
        init_normal_(self.weight, std=self.init_std)

    def stored(self, length: int) -> Float[Tensor, "T D"] | None:
        """Return the rows of positions `0 .. length - 1`, which are `weight` or a view; `None` beyond `max_seq_len`."""
        if length > (self.max_seq_len or 0):
            return None
        stored = self._parameters.get("weight")
        weight = self.weight if stored is None else stored  # a parametrization computes it at each read
        is_whole = not self.offset and length == weight.shape[0]  # a slice would copy the gradient
        return weight if is_whole else weight[self.offset : self.offset + length]

    def stored_look_up(self, positions: Positions) -> StoredRows | None:
        """Return the look-up `weight[positions + offset]` where a kernel on CUDA makes it."""
        return rows_on_cuda(positions, self.weight, self.index_check)

    def vectors(self, positions: Positions) -> Float[Tensor, "*rows T D"]:
        """Return the row of each position, `weight[positions + offset]`.

        Raises:
            PositionError: On the CPU, a position is outside `-offset .. max_seq_len - 1`. On an accelerator its vector
                is zero, and the next `index_check.check()` raises the error.
        """
        if (stored := self.stored_look_up(positions)) is not None:
            return gather_rows(stored)
        index, outside = self.index_check(positions)
        rows = F.embedding(index, self.weight)
        return rows if outside is None else rows.masked_fill(outside.unsqueeze(-1), 0)

    @torch.no_grad()
    def resize(self, new_len: int, method: TableMethod = "interpolate") -> "LearnedPositionalEmbedding":
        """Return a new table for another longest sequence; this table does not change.

        Args:
            new_len: Longest sequence of the new table.
            method: `"interpolate"`: the new row p is read at `p (old - 1) / (new - 1)` between two old rows, so the
                first and the last row stay the same; a single row is the first. `"extend"`: old rows are copied bit for
                bit, and further rows are drawn from N(0, init_std²); a smaller table keeps the first rows. `"repeat"`:
                old rows are copied bit for bit, and row p is row `p mod old` (Longformer).

        Returns:
            The new table, in the same dtype and on the same device. Rows before position 0 are copied.

        Reference: Dosovitskiy et al., An image is worth 16x16 words, 2021, section 3.2 (interpolation); Beltagy et al.,
        Longformer, 2020, section 5 (repetition).
        """
        if method not in get_args(TableMethod):
            raise SizeError(f"method must be one of {', '.join(get_args(TableMethod))}, not {method!r}.")
        device, dtype = self.weight.device, self.weight.dtype
        resized = LearnedPositionalEmbedding(
            new_len, self.embed_dim, offset=self.offset, init_std=self.init_std, device=device, dtype=dtype
        )
        front, rows = self.weight[: self.offset], self.weight[self.offset :]
        if method == "interpolate":
            size, wide = (new_len, self.embedding_dim), rows.to(torch.promote_types(rows.dtype, torch.float32))
            rows = F.interpolate(wide[None, None], size, mode="bilinear", align_corners=True)[0, 0].to(rows.dtype)
        if method == "repeat":
            rows = rows[torch.arange(new_len, device=device) % len(rows)]
        old_rows = torch.cat([front, rows[:new_len]])
        resized.weight[: len(old_rows)] = old_rows
        resized.weight.requires_grad_(self.weight.requires_grad)
        return resized
