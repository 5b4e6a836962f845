"""The factorised table: narrow rows and one projection to the full width (ALBERT)."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.errors import SizeError
from embedlayer.files import JsonObject
from embedlayer.shapes import Ids, Vectors
from embedlayer.tables.dense import TokenEmbedding, resolve_init_std, resolve_scale
from embedlayer.tables.table import TokenTable, check_sizes


class FactorizedEmbedding(TokenTable):
    """A table of low rank, E = E1 E2: `out[..., :] = scale * E1[ids] @ E2`, with V R + R D numbers instead of V D.

    The same two factors serve the way out: `logits = (hidden @ E2.T) @ E1.T`, so the narrow product comes last.

    Args:
        vocab_size: Tokens, V.
        embed_dim: Width of a vector, D.
        rank: Width of a stored row, R.
        padding_idx: Token whose row is zero and stays zero; `None` for no such row.
        scale: Factor on every looked-up vector: a number, `"sqrt_dim"`, or `None` for none.
        init_std: Standard deviation of the entries of E1 E2: a number, or `"1/sqrt_dim"`.
        pad_to_multiple_of: Store spare zero rows in E1 up to this multiple.
        device: Where to put the factors.
        dtype: In which type.

    Raises:
        SizeError: A size is below 1, or the rank exceeds the width.

    Example:
        >>> table = FactorizedEmbedding(30000, 768, 128)
        >>> sum(p.numel() for p in table.parameters())  # instead of 23,040,000
        3938304

    Reference: Lan et al., ALBERT, 2020, section 3.1. We differ: no bias on the projection, so the padding row is zero.
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        rank: int,
        *,
        padding_idx: int | None = None,
        scale: float | Literal["sqrt_dim"] | None = None,
        init_std: float | Literal["1/sqrt_dim"] = 0.02,
        pad_to_multiple_of: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(padding_idx=padding_idx, vocab_size=vocab_size, embed_dim=embed_dim, rank=rank)
        if rank > embed_dim:
            raise SizeError(f"rank {rank} exceeds embed_dim {embed_dim}: a TokenEmbedding is smaller and holds more.")
        self.vocab_size = vocab_size
        self.embed_dim = embed_dim
        self.rank = rank
        self.padding_idx = padding_idx
        self.scale = resolve_scale(scale, embed_dim)
        self.init_std = resolve_init_std(init_std, embed_dim)
        self.inner = TokenEmbedding(
            vocab_size,
            rank,
            padding_idx=padding_idx,
            init_std=self.init_std,
            pad_to_multiple_of=pad_to_multiple_of,
            device=device,
            dtype=dtype,
        )
        self.num_rows = self.inner.num_rows
        self.projection = nn.Linear(rank, embed_dim, bias=False, device=device, dtype=dtype)
        nn.init.normal_(self.projection.weight, std=1 / math.sqrt(rank))

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments."""
        inner = self.inner.config
        return {
            "vocab_size": self.vocab_size,
            "embed_dim": self.embed_dim,
            "rank": self.rank,
            "padding_idx": self.padding_idx,
            "scale": self.scale,
            "init_std": self.init_std,
            "pad_to_multiple_of": inner["pad_to_multiple_of"],
        }

    def look_up(self, ids: Ids) -> Vectors:
        """`E1[ids] @ E2`: `(..., T)` to `(..., T, D)`."""
        vectors: Tensor = self.projection(self.inner.look_up(ids))
        return vectors

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Rows `start` to `stop - 1` of E1 E2, without `scale`."""
        return F.linear(self.inner.rows(start, stop), self.projection.weight)

    def as_linear(self, hidden: Float[Tensor, "*batch D"]) -> tuple[Tensor, Tensor]:
        """`hidden @ E2.T` and `E1`: the narrow rows are compared with a narrowed hidden state."""
        return F.linear(hidden, self.projection.weight.T), self.inner.weight

    def check(self) -> None:
        """Wait for the device and raise the error of a bad ID that was looked up since the last check."""
        self.inner.check()

    def extra_repr(self) -> str:
        """Sizes, for `print`."""
        return f"{self.vocab_size}, {self.embed_dim}, rank={self.rank}"
