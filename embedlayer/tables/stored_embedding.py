"""The table of a checkpoint that another library quantised: codes and scales, dequantised only where they are used."""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from embedlayer.core.block_sizes import NUMBERS, block_size
from embedlayer.core.devices import device_kind
from embedlayer.core.errors import SizeError
from embedlayer.formats.stored import StoredFormat, StoredRows
from embedlayer.tables.conversions import TableLike, source_of_rows
from embedlayer.tables.dense_table import describe_options
from embedlayer.tables.packed_rows import PackedRows


class StoredEmbedding(PackedRows):
    """A frozen table in the codes of another library: `out[..., :] = scale * dequantise(stored rows of ids)`.

    `embedlayer.load` returns it for the table or the untied head of a checkpoint that MLX, compressed-tensors, ModelOpt
    or another library of `embedlayer.formats.recognition.FORMATS` quantised. Looked-up rows equal the library's own
    dequantisation bit for bit. The stored tensors are mapped to the file: a look-up reads those of the requested rows,
    and `logits` and losses dequantise a block of rows at a time. Logits are those of the stored weights:
    a program that also quantises the hidden states (`input_scale`) computes slightly other ones. To train some
    rows, use `DeltaEmbedding(table, token_ids)`; to train all, copy them:
    `TokenEmbedding.from_pretrained(table.rows(0, table.vocab_size))`.

    The constructor creates stored tensors of zeros.

    Args:
        vocab_size: Number of tokens, V.
        stored_format: Format of the stored rows, with their width D.
        padding_idx: Padding token, or `None`.
        scale: Factor on every looked-up row: a number, `"sqrt_dim"` for sqrt(D), or `None` for 1.
        round_scale: Whether to round the scale to the dtype of the vectors, as Gemma does.
        dtype: Data type of the vectors; `None` for that of the format. `.to(dtype)` changes it and not the stored
            tensors.
        device: Device of the stored tensors.

    Example:
        >>> from embedlayer.formats.mlx import MLXAffineRows
        >>> table = StoredEmbedding(100, MLXAffineRows(64, 4, 32, "BF16"))
        >>> table(torch.tensor([[1, 2, 3]])).shape, table.parts.weight.shape
        (torch.Size([1, 3, 64]), torch.Size([100, 8]))
    """

    def __init__(
        self,
        vocab_size: int,
        stored_format: StoredFormat,
        *,
        padding_idx: int | None = None,
        scale: float | Literal["sqrt_dim"] | None = None,
        round_scale: bool = False,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            vocab_size,
            stored_format.embed_dim,
            padding_idx=padding_idx,
            scale=scale,
            round_scale=round_scale,
            dtype=dtype or stored_format.dtype,
            device=device,
        )
        self.stored_format = stored_format
        rows = {name: (vocab_size, *part.shape) for name, part in stored_format.row_parts.items()}
        shapes = rows | {name: part.shape for name, part in stored_format.shared_parts.items()}
        kinds = stored_format.row_parts | stored_format.shared_parts
        self.parts = StoredParts(
            {name: torch.zeros(shape, dtype=kinds[name].dtype, device=device) for name, shape in shapes.items()}
        )

    @classmethod
    @torch.no_grad()
    def from_table(
        cls,
        table: TableLike,
        stored_format: StoredFormat,
        *,
        padding_idx: int | None = None,
        scale: float | Literal["sqrt_dim"] | None = None,
    ) -> "StoredEmbedding":
        """Quantise a table as the library of a format does, a block of rows at a time. Spare rows are left out.

        Args:
            table: A table, which keeps its scale and padding, or a plain tensor or NumPy array, `(V, D)`.
            stored_format: A format whose rows share no numbers.
            padding_idx: For a plain tensor: padding token, whose row keeps its values.
            scale: For a plain tensor: as in the constructor.

        Raises:
            SizeError: The rows of the format share numbers, or no function quantises to it.
            CheckpointError: A row holds NaN, infinity or a number too large for the format.

        Example:
            >>> from embedlayer.formats.mlx import MLXAffineRows
            >>> table = StoredEmbedding.from_table(torch.randn(100, 64), MLXAffineRows(64, 4, 64, "F32"))
            >>> table.nbytes
            4000
        """
        source, padding_idx = source_of_rows(table, padding_idx, scale)
        name, width = stored_format.name, stored_format.embed_dim
        if width != source.embed_dim:
            raise SizeError(f"The table has width {source.embed_dim}, and {name} is of width {width}.")
        if stored_format.shared_parts or not stored_format.can_quantise:
            raise SizeError(f"No table is quantised to {name}: rows share scales, or no function quantises them.")
        first = source.rows(0, 1)
        quantised = cls(
            source.vocab_size,
            stored_format,
            padding_idx=padding_idx,
            scale=source.scale,
            round_scale=isinstance(source.factor, Tensor),
            dtype=first.dtype,
            device=first.device,
        )
        stored = quantised.stored_rows
        step = max(1, block_size(NUMBERS, device_kind(first)) // source.embed_dim)
        for start in range(0, source.vocab_size, step):
            rows = source.rows(start, min(start + step, source.vocab_size))
            for name, part in stored.quantised(rows).rows.items():
                stored.rows[name][start : start + step] = part
        return quantised

    @property
    def stored_rows(self) -> StoredRows:
        """Return the tensors that store the rows, which are buffers of `parts`, and their format."""
        parts, record = self.parts.tensors, self.stored_format
        rows, shared = ({name: parts[name] for name in names} for names in (record.row_parts, record.shared_parts))
        return StoredRows(record, rows, shared)

    @property
    def stored_type(self) -> str:
        """Return library and name of the format, such as `"MLX affine"`."""
        return self.stored_format.name

    def extra_repr(self) -> str:
        """Return the sizes, the format and the options that are set, for `print`."""
        options = f"{describe_options(self)}, dtype={self.dtype_name}"
        return f"{self.vocab_size}, {self.embed_dim}, {self.stored_type}{options}"


class StoredParts(nn.Module):
    """The stored tensors of a table as buffers, under the names that they have in the format."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self._buffers.items() if tensor is not None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StoredParts":
        """Move the tensors, as in torch; a function that casts sees their bytes, which it leaves as they are."""

        def moved(tensor: Tensor) -> Tensor:
            """Return `fn(tensor)` for whole numbers; for others the same applied to their bytes."""
            if not tensor.is_floating_point():
                return fn(tensor)
            return fn(tensor.reshape(-1).view(torch.uint8)).view(tensor.dtype).view(tensor.shape)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """Return names, dtypes and shapes of the tensors, for `print`."""
        kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self.tensors.items()}
        return ", ".join(f"{name} {kinds[name]} {list(tensor.shape)}" for name, tensor in self.tensors.items())
