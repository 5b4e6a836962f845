"""The table of a GGUF file: rows in the file's own blocks, which are dequantised only where they are used."""

from typing import Literal

import torch
from torch import Tensor

from embedlayer.core.errors import CheckpointError, SizeError
from embedlayer.formats.gguf import GGUFRows
from embedlayer.formats.stored import StoredRows
from embedlayer.tables.packed_rows import PackedRows


class GGUFEmbedding(PackedRows):
    """A frozen table whose rows are stored in blocks of GGUF files: `out[..., :] = scale * dequantise(packed[ids])`.

    `embedlayer.load("model.gguf")` returns it for a quantised table, except for Q4_0 and Q8_0, which are tables of the
    kind `QuantizedEmbedding`. Its bytes are mapped to the file: a look-up reads those of the requested rows, and
    `logits` those of a few thousand rows at a time. The package `gguf` dequantises them on the CPU; a table on an
    accelerator waits for it. To train some rows, use `DeltaEmbedding(table, token_ids)`; to train all, copy them:
    `TokenEmbedding.from_pretrained(table.rows(0, table.vocab_size))`.

    Args:
        vocab_size: Number of tokens, V.
        embed_dim: Width of a row, D.
        block_type: Name of the type of the blocks, such as `"Q4_K"` or `"Q8_0"`.
        padding_idx: Padding token, or `None`.
        scale: Factor on every looked-up row: a number, `"sqrt_dim"` for sqrt(D), or `None` for 1.
        round_scale: Whether to round the scale to the dtype of the vectors, as Gemma does.
        dtype: Data type of the vectors; `None` for float32. `.to(dtype)` changes it and not the blocks.
        device: Device of the stored bytes.

    Raises:
        MissingExtraError: The extra `gguf` is not installed.

    Example:
        >>> table = GGUFEmbedding(100, 64, "Q8_0")
        >>> table(torch.tensor([[1, 2, 3]])).shape, table.packed.shape
        (torch.Size([1, 3, 64]), torch.Size([100, 68]))
    """

    packed: Tensor
    """Stored rows, uint8, `(V, row bytes)`."""

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
        try:
            stored_format = GGUFRows(embed_dim, block_type)
        except CheckpointError as error:
            raise SizeError(str(error)) from error
        super().__init__(
            vocab_size,
            embed_dim,
            padding_idx=padding_idx,
            scale=scale,
            round_scale=round_scale,
            dtype=dtype or torch.float32,
            device=device,
        )
        self.stored_format = stored_format
        self.block_type = block_type
        shape = (vocab_size, *stored_format.row_parts["packed"].shape)
        self.register_buffer("packed", torch.zeros(shape, dtype=torch.uint8, device=device))

    @property
    def stored_rows(self) -> StoredRows:
        """Return the blocks of all rows, which are the buffer `packed`, and their type."""
        return StoredRows(self.stored_format, {"packed": self.packed}, {})

    @property
    def stored_type(self) -> str:
        """Return `block_type`."""
        return self.block_type

    def extra_repr(self) -> str:
        """Return sizes and type of the blocks for `print`."""
        return f"{self.vocab_size}, {self.embed_dim}, {self.block_type}"
