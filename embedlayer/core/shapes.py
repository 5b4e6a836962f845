"""Shape letters of all signatures, type aliases for tensors of IDs, positions and vectors, and the dtype of sums.

| letter | means | also called |
|---|---|---|
| `V` | vocabulary: tokens that have a row | vocab_size, num_embeddings |
| `D` | width of a row and of the residual stream | embed_dim, d_model, n_embd, hidden_size |
| `B` | batch | |
| `T` | positions in a sequence | seq_len, context |
| `H` | query heads | num_heads |
| `G` | key/value heads, `G <= H` | num_kv_heads |
| `K` | width of one head | head_dim |
| `R` | rank of a factorisation | |

A suffix on a variable repeats its shape: `q_BHTK` is `(B, H, T, K)`. jaxtyping checks the shapes in signatures in
every test run; at run time they cost nothing.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

Ids = Int[Tensor, "*ids"]
"""Token IDs: int32 or int64, of any shape; in a layer the last dimension is the sequence."""

Vectors = Float[Tensor, "*ids D"]
"""One vector for each ID."""


@runtime_checkable
class Encoded(Protocol):
    """Protocol of a text that a tokenizer has encoded: any object with a list `ids`, such as `tokenizers.Encoding`."""

    @property
    def ids(self) -> list[int]:
        """Return the token IDs of the text, in order."""
        ...


IdsLike = Ids | int | NDArray[np.integer[Any]] | Encoded | Sequence[Any]
"""Token IDs, or what `embedlayer.core.index_checks.as_ids` turns into them."""

Positions = Int[Tensor, "*rows T"]
"""Position of each token: `(T,)` or `(1, T)` for all sequences alike, `(B, T)` for each its own.

Rotary positions with several axes also take `(A, B, T)`, one position for each axis.
"""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of a dtype are summed and updated: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
