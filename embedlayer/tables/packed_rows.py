"""The base of tables that store rows as bytes, which are dequantised only where they are used."""

from abc import abstractmethod
from typing import Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.core.computed_buffers import ComputedBuffers
from embedlayer.core.errors import SizeError
from embedlayer.core.shapes import Ids, Vectors
from embedlayer.core.torch_state import is_current
from embedlayer.kernels.index_check import IndexCheck
from embedlayer.tables.dense import resolve_scale
from embedlayer.tables.lookup import check_sizes
from embedlayer.tables.table import TokenTable

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
"""Data types of vectors, by name."""


class PackedRows(TokenTable, ComputedBuffers, checks_ids=True):
    """Abstract base class of frozen tables of bytes: `out[..., :] = scale * dequantise(packed[ids])`.

    The arguments are those of `GGUFEmbedding` and `QuantizedEmbedding`; `row_bytes` is the number of bytes of a stored
    row. A `dtype` of `None` is that of torch's default.

    Raises:
        SizeError: A size is below 1, `padding_idx` is not a token, `scale` is another string, or `dtype` is not one of
            `DTYPES`.
    """

    packed: Tensor
    """Stored rows, uint8, `(V, row bytes)`."""

    example: Tensor
    embed_scale: float | Tensor | None

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        row_bytes: int,
        *,
        padding_idx: int | None = None,
        scale: float | Literal["sqrt_dim"] | None = None,
        round_scale: bool = False,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.padding_idx = check_sizes(padding_idx=padding_idx, vocab_size=vocab_size, embed_dim=embed_dim)
        self.vocab_size = self.num_rows = vocab_size
        self.embed_dim = embed_dim
        self.scale = resolve_scale(scale, embed_dim)
        self.round_scale = round_scale
        self.index_check = IndexCheck(vocab_size, "token id")
        self.register_buffer("packed", torch.zeros(vocab_size, row_bytes, dtype=torch.uint8, device=device))
        self.register_buffer("example", torch.empty(0, dtype=_dtype_of(dtype)), persistent=False)
        if not round_scale:
            self.embed_scale = self.scale
        self.recompute_buffers(self.packed.device)

    @abstractmethod
    def dequantised(self, ids: Int[Tensor, " N"], dtype: torch.dtype | None = None) -> Float[Tensor, "N D"]:
        """Return the vectors of IDs that were checked, without `scale`, in a dtype; `None` is that of the table."""

    @property
    @abstractmethod
    def stored_type(self) -> str:
        """Return the name of the type of the stored rows, such as `"int8"`, or GGUF's name: `"Q8_0"`."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type of the vectors that look-ups return. The stored bytes have another one."""
        return self.example.dtype

    def buffer_values(self) -> dict[str, Tensor]:
        """Return the buffers that are not saved: `example` and, with `round_scale`, the scalar `embed_scale`.

        Both have the dtype of the vectors. `example` is empty and exists only so that `.to(dtype)` has a floating-point
        tensor to cast.
        """
        tensors = {"example": torch.empty(0, dtype=self.dtype)}
        if self.round_scale:
            tensors["embed_scale"] = torch.tensor(1.0 if self.scale is None else self.scale, dtype=self.dtype)
        return tensors

    def look_up(self, ids: Ids) -> Vectors:
        """Return the dequantised vectors of `ids` without `scale`, `(...)` to `(..., D)`."""
        ids, outside = self.index_check(ids)
        vectors = self.dequantised(ids.reshape(-1)).view(*ids.shape, self.embed_dim)
        return vectors if outside is None else vectors.masked_fill(outside.unsqueeze(-1), 0)

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Dequantise rows `start` to `stop - 1`, `(stop - start, D)`, not yet multiplied by the table's factor `scale`.

        Bounds are handled like those of a slice.
        """
        return self.dequantised(self._places(start, stop))

    def rows_as(self, start: int, stop: int, dtype: torch.dtype) -> Float[Tensor, "N D"]:
        """Return rows for products in `dtype`, dequantised to it; see `TokenTable.rows_as`."""
        if not is_current(type(self), "rows_as", "rows"):
            return self.rows(start, stop)
        return self.dequantised(self._places(start, stop), dtype)

    def vectors_as(self, ids: Ids, dtype: torch.dtype) -> Vectors:
        """Return vectors for products in `dtype`, dequantised to it; see `TokenTable.rows_as`."""
        if not is_current(type(self), "vectors_as", "look_up"):
            return self.look_up(ids)
        return self.dequantised(ids.reshape(-1), dtype).view(*ids.shape, self.embed_dim)

    def _places(self, start: int, stop: int) -> Int[Tensor, " N"]:
        """Return the IDs `start` to `stop - 1`, with the bounds of a slice."""
        start, stop, _ = slice(start, stop).indices(self.vocab_size)
        return torch.arange(start, max(start, stop), device=self.packed.device)

    def requires_grad_(self, requires_grad: bool = True) -> "PackedRows":
        """Return the table unchanged for `requires_grad=False`, and refuse `True`: stored bytes have no gradient.

        Raises:
            SizeError: `requires_grad` is true.
        """
        if requires_grad:
            raise SizeError(
                f"A {type(self).__name__} is frozen: its codes are integers and have no gradient.\n"
                "Train the rows in floating point, TokenEmbedding.from_pretrained(table.rows(0, table.vocab_size), "
                "freeze=False), and quantise the result."
            )
        return self


def _dtype_of(dtype: torch.dtype | str | None) -> torch.dtype:
    """Return the dtype of vectors that the constructor's argument `dtype` means.

    A name such as `"bfloat16"` gives that dtype, and `None` gives torch's default. One that is not in `DTYPES` is a
    `SizeError`.
    """
    resolved = torch.get_default_dtype() if dtype is None else DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if resolved not in DTYPES.values():
        raise SizeError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype}.")
    return cast(torch.dtype, resolved)
