"""The table of a GGUF file: rows in the file's own blocks, which are dequantised only where they are used."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.computed_buffers import ComputedBuffers
from embedlayer.errors import CheckpointError, SizeError
from embedlayer.index_checks import IndexCheck
from embedlayer.io.files import JsonObject
from embedlayer.io.gguf_files import dequantise, row_bytes
from embedlayer.shapes import Ids, Vectors
from embedlayer.tables.dense import resolve_scale
from embedlayer.tables.lookup import check_sizes
from embedlayer.tables.quantized import DTYPES
from embedlayer.tables.table import TokenTable

_NUMBERS_AT_ONCE = 1 << 20


class GGUFEmbedding(TokenTable, ComputedBuffers):
    """A frozen table whose rows are stored in blocks of GGUF files: `out[..., :] = scale * dequantise(packed[ids])`.

    `embedlayer.load("model.gguf")` returns it for a quantised table. Its bytes are mapped to the file: a look-up reads
    those of the requested rows, and `logits` those of a few thousand rows at a time. The package `gguf` dequantises
    them on the CPU. To train the rows, copy them: `TokenEmbedding.from_pretrained(table.rows(0, table.vocab_size))`.

    Args:
        vocab_size: Number of tokens, V.
        embed_dim: Width of a row, D.
        block_type: Name of the type of the blocks, such as `"Q4_K"` or `"Q8_0"`.
        padding_idx: Row that is zero; `None` for no such row.
        scale: Factor on every looked-up row: a number, `"sqrt_dim"` for sqrt(D), or `None` for 1.
        round_scale: Whether to round the scale to the dtype of the vectors, as Gemma does.
        dtype: Data type of the vectors; `None` for float32. `.to(dtype)` changes it and not the blocks.
        device: Device of the stored bytes.

    Raises:
        SizeError: A size is below 1, `padding_idx` is not a token, or the width is no whole number of blocks.
        MissingExtraError: The `gguf` extra is not installed.

    Example:
        >>> table = GGUFEmbedding(100, 64, "Q8_0")
        >>> table(torch.tensor([[1, 2, 3]])).shape, table.packed.shape
        (torch.Size([1, 3, 64]), torch.Size([100, 68]))
    """

    packed: Tensor
    """Stored rows, uint8, `(V, row bytes)`."""

    example: Tensor
    embed_scale: float | Tensor | None

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        block_type: str,
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
        self.block_type = block_type
        self.scale = resolve_scale(scale, embed_dim)
        self.round_scale = round_scale
        self.index_check = IndexCheck(vocab_size, "token id")
        try:
            width = row_bytes(block_type, embed_dim)
        except CheckpointError as error:
            raise SizeError(str(error)) from error
        self.register_buffer("packed", torch.zeros(vocab_size, width, dtype=torch.uint8, device=device))
        dtype = DTYPES.get(dtype) if isinstance(dtype, str) else dtype or torch.float32
        if dtype not in DTYPES.values():
            raise SizeError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype}.")
        self.register_buffer("example", torch.empty(0, dtype=dtype), persistent=False)
        if not round_scale:
            self.embed_scale = self.scale
        self.recompute_buffers(self.packed.device)

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type of the vectors that look-ups return."""
        return self.example.dtype

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all stored rows."""
        return self.packed.nbytes

    @property
    def config(self) -> JsonObject:
        """Return the constructor's arguments as JSON."""
        return {
            "vocab_size": self.vocab_size,
            "embed_dim": self.embed_dim,
            "block_type": self.block_type,
            "padding_idx": self.padding_idx,
            "scale": self.scale,
            "round_scale": self.round_scale,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def buffer_values(self) -> dict[str, Tensor]:
        """Return the buffers that are not saved: `example`, which `.to(dtype)` casts, and a rounded `embed_scale`."""
        tensors = {"example": torch.empty(0, dtype=self.dtype)}
        if self.round_scale:
            tensors["embed_scale"] = torch.tensor(1.0 if self.scale is None else self.scale, dtype=self.dtype)
        return tensors

    def look_up(self, ids: Ids) -> Vectors:
        """Return the dequantised vectors of `ids` without `scale`, `(...)` to `(..., D)`."""
        ids, outside = self.index_check(ids)
        vectors = self._dequantised(ids.reshape(-1)).view(*ids.shape, self.embed_dim)
        return vectors if outside is None else vectors.masked_fill(outside.unsqueeze(-1), 0)

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Dequantise rows `start` to `stop - 1`, and return them without `scale`, `(stop - start, D)`.

        Bounds are handled like those of a slice.
        """
        start, stop, _ = slice(start, stop).indices(self.vocab_size)
        return self._dequantised(torch.arange(start, max(start, stop), device=self.packed.device))

    def _dequantised(self, ids: Int[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """Return the vectors of IDs that were checked, without `scale`, a few rows at a time."""
        vectors = torch.empty((len(ids), self.embed_dim), dtype=self.dtype, device=self.packed.device)
        step = max(1, _NUMBERS_AT_ONCE // self.embed_dim)
        for start in range(0, len(ids), step):
            stored = self.packed.index_select(0, ids[start : start + step])
            vectors[start : start + step] = dequantise(stored, self.block_type)
        return vectors

    def requires_grad_(self, requires_grad: bool = True) -> "GGUFEmbedding":
        """Return the table unchanged for `requires_grad=False`, and refuse `True`: blocks have no gradient.

        Raises:
            SizeError: `requires_grad` is true.
        """
        if requires_grad:
            raise SizeError(
                "A GGUFEmbedding has no trainable numbers. Copy its rows: "
                "TokenEmbedding.from_pretrained(table.rows(0, table.vocab_size))."
            )
        return self

    def extra_repr(self) -> str:
        """Return sizes and type of the blocks for `print`."""
        return f"{self.vocab_size}, {self.embed_dim}, {self.block_type}"
