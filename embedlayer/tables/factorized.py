"""The factorised table: narrow rows and one projection to the full width, as in ALBERT."""

import math
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from embedlayer.core.block_sizes import TABLE_ROWS, block_size
from embedlayer.core.devices import device_kind
from embedlayer.core.errors import SizeError
from embedlayer.core.initialization import NormalLinear
from embedlayer.core.shapes import Ids, Vectors
from embedlayer.core.torch_state import calls_forward, recompute_weights
from embedlayer.io.files import JsonObject
from embedlayer.losses.definition import transformed_states
from embedlayer.losses.rows import linear
from embedlayer.tables.computed_weight import ComputedRows
from embedlayer.tables.conversions import TableLike, source_of_rows
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.dense_table import resolve_init_std, resolve_scale
from embedlayer.tables.lookup import check_sizes


class FactorizedEmbedding(ComputedRows, checks_ids=True):
    """A table of low rank, E = E1 E2: `out[..., :] = scale * E1[ids] @ E2`, with V R + R D numbers instead of V D.

    E1 is `inner.weight`, `(V, R)`, and E2 is `projection.weight.T`, `(R, D)`. At the output the same factors are used:
    `logits = (hidden @ E2.T) @ E1.T`, so rows are compared at width R.

    Args:
        vocab_size: Number of tokens, V.
        embed_dim: Width of a vector, D.
        rank: Width of a stored row, R.
        padding_idx: Token whose row of E1 is initialised to zero and gets no gradient; `None` for no such row.
        scale: Factor on every looked-up vector: a number, `"sqrt_dim"` for sqrt(D), or `None` for 1.
        init_std: Standard deviation of the entries of E1 E2: a number, or `"1/sqrt_dim"` for 1 / sqrt(D).
        pad_to_multiple_of: Store spare zero rows in E1, so that their number is a multiple of this; `None` for no spare
            rows.
        device: Device of the factors.
        dtype: Data type of the factors.

    Example:
        >>> table = FactorizedEmbedding(30000, 768, 128)
        >>> sum(p.numel() for p in table.parameters())  # instead of 23,040,000
        3938304

    Reference: Lan et al., ALBERT, 2020, section 3.1. We differ: no bias on the projection, so a padding row of
    zeros gives zeros.
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
        padding_idx = check_sizes(padding_idx=padding_idx, vocab_size=vocab_size, embed_dim=embed_dim, rank=rank)
        if rank > embed_dim:
            raise SizeError(f"rank {rank} exceeds embed_dim {embed_dim}: a TokenEmbedding is smaller and stores more.")
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
        # std 1/sqrt(R) keeps the size of the inner rows
        self.projection = NormalLinear(rank, embed_dim, init_std=1 / math.sqrt(rank), device=device, dtype=dtype)

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens, V."""
        return self.inner.vocab_size

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        self.inner.vocab_size = size

    @property
    def num_rows(self) -> int:
        """Return the number of rows of E1, the `(num_rows, R)` factor, spare rows included."""
        return self.inner.num_rows

    @num_rows.setter
    def num_rows(self, size: int) -> None:
        self.inner.num_rows = size

    @classmethod
    @torch.no_grad()
    def from_table(
        cls,
        table: TableLike,
        rank: int,
        counts: Shaped[Tensor, " V"] | None = None,
        *,
        padding_idx: int | None = None,
        scale: float | Literal["sqrt_dim"] | None = None,
    ) -> "FactorizedEmbedding":
        """Factorise a table into E1 E2 of rank R with the least weighted squared error.

        The error is `sum over v of counts[v] * |row_v - row'_v|^2`, where `row'_v` is row v of E1 E2. It is least for
        the R leading eigenvectors Q, `(D, R)`, of the Gram matrix `sum over v of counts[v] row_v row_v^T`: E1 = E Q and
        E2 = Q^T. The error is then the sum of the other eigenvalues. Without counts this is the truncated singular
        value decomposition. The table is read a block of rows at a time; besides E1 only a D x D matrix in float64 is
        allocated.

        Args:
            table: A table, which keeps its scale and padding, or a plain tensor or NumPy array, `(V, D)`.
            rank: Width of a stored row, R.
            counts: Weight of each token, such as how often it occurs, `(V,)`; only ratios matter. `None` for equal
                weights. A token with weight 0 does not influence Q.
            padding_idx: For a plain tensor: as in the constructor; the row keeps its values.
            scale: For a plain tensor: as in the constructor.

        Raises:
            ShapeError: Counts or rows have another shape, or rows are no floats or contain NaN or infinity.

        Example:
            >>> dense = TokenEmbedding.from_pretrained(torch.randn(100, 4) @ torch.randn(4, 16))
            >>> narrow = FactorizedEmbedding.from_table(dense, rank=4)
            >>> torch.allclose(narrow.rows(0, 100), dense.rows(0, 100), atol=1e-4)
            True

        Reference: Eckart and Young, The approximation of one matrix by another of lower rank, 1936.
        """
        source, padding_idx = source_of_rows(table, padding_idx, scale)
        vocab_size, embed_dim = source.vocab_size, source.embed_dim
        scale = None if source.factor is None else float(source.factor)

        kind = source.rows(0, 1)
        size = block_size(TABLE_ROWS, device_kind(kind))

        with torch.device("meta"):
            factors = cls(vocab_size, embed_dim, rank, padding_idx=padding_idx, scale=scale, dtype=kind.dtype)
        factors = factors.to_empty(device=kind.device)
        if counts is not None and (counts.shape != (vocab_size,) or counts.min() < 0):
            raise SizeError(
                f"counts are {vocab_size} numbers from 0 on; found {list(counts.shape)} from {counts.min()}."
            )
        weights = None if counts is None else counts.double() / counts.double().sum()
        gram = torch.zeros(embed_dim, embed_dim, dtype=torch.float64, device=kind.device)
        for start in range(0, vocab_size, size):
            rows = source.rows(start, min(start + size, vocab_size)).double()
            weighted = rows if weights is None else rows * weights[start : start + len(rows), None].to(rows.device)
            gram.addmm_(weighted.T, rows)
        leading = torch.linalg.eigh(gram).eigenvectors[:, embed_dim - rank :].flip(1)
        factors.projection.weight.copy_(leading)
        for start in range(0, vocab_size, size):
            rows = source.rows(start, min(start + size, vocab_size)).double()
            factors.inner.weight[start : start + len(rows)] = (rows @ leading).to(kind.dtype)
        return factors

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type of the factors."""
        return self.inner.dtype

    @property
    def config(self) -> JsonObject:
        """Return the constructor's arguments as JSON."""
        return {
            "vocab_size": self.vocab_size,
            "embed_dim": self.embed_dim,
            "rank": self.rank,
            "padding_idx": self.padding_idx,
            "scale": self.scale,
            "init_std": self.init_std,
            "pad_to_multiple_of": self.inner.config["pad_to_multiple_of"],
        }

    def look_up(self, ids: Ids) -> Vectors:
        """Return `E1[ids] @ E2` without `scale`: `(...)` to `(..., D)`. See `LookupTable.look_up` for the errors."""
        vectors: Tensor = self.projection(self.inner(ids))
        return vectors

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Return rows `start` to `stop - 1` of the product E1 E2, `(stop - start, D)`, without `scale`."""
        rows: Tensor = self.projection(self.inner.rows(start, stop))
        return rows

    def as_linear(self, hidden: Float[Tensor, "*batch D"]) -> tuple[Tensor, Tensor]:
        """Return `(hidden @ E2.T, E1)`: their product `(hidden @ E2.T) @ E1.T` is the raw logits of all rows.

        The shapes are `(..., R)` and `(num_rows, R)`.

        If another module replaced the projection, as PEFT does, or it has hooks, its output for the unit vectors is
        used as E2.
        """
        inner, projection = self.inner, self.projection
        if inner._parameters.get("weight") is None:
            recompute_weights(inner)
        narrow = inner.weight
        if type(projection) is NormalLinear and calls_forward(projection, NormalLinear.forward):
            wide = projection.weight.T
        else:
            wide = projection(torch.eye(self.rank, dtype=narrow.dtype, device=narrow.device))
        return transformed_states(lambda states: linear(states, wide), hidden), narrow

    def extra_repr(self) -> str:
        """Return the number of tokens, the width and the rank, for `print`: `"30000, 768, rank=128"`."""
        return f"{self.vocab_size}, {self.embed_dim}, rank={self.rank}"
