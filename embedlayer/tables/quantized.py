"""The quantised table: rows of 8-bit or 4-bit integer codes with scales, dequantised only where they are used.

`embedlayer.formats.quantized.dequantise` is the definition in plain PyTorch. On the CPU a compiled kernel returns the
same numbers in one pass, and reads the bytes of the requested rows only. PyTorch's own kernels for such rows do so
where it cannot be compiled.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from embedlayer.core.block_sizes import NUMBERS, block_size
from embedlayer.core.devices import autocast_dtype, device_kind
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.index_checks import as_ids, length_of
from embedlayer.core.shapes import Ids, Vectors
from embedlayer.core.torch_state import fusible, is_current, is_transformed, plain_operators_only
from embedlayer.formats.compiled import CLAIMED_NUMEL, FEW_TOKENS, tokens_first
from embedlayer.formats.layouts import GGUFBlocks, RowFormat, RowLayout, row_format_of
from embedlayer.formats.quantized import QuantizedRows, dequantise, quantise
from embedlayer.formats.rounding import CovarianceRounding, unit_rows
from embedlayer.formats.stored import StoredRows
from embedlayer.kernels.gpu.availability import FLOATS
from embedlayer.kernels.kernel import Kernel
from embedlayer.kernels.quantized import DEQUANTISE, LOGITS, logits_of_few_tokens, read_quantized_rows
from embedlayer.losses.chunk_size import MAX_CHUNK_TOKENS
from embedlayer.losses.rows import write_product
from embedlayer.tables.conversions import TableLike, source_of_rows
from embedlayer.tables.dense_table import describe_options
from embedlayer.tables.lookup import LookupTable
from embedlayer.tables.packed_rows import PackedRows
from embedlayer.tables.table import TokenTable, check_width

ROWS_OF_A_PRODUCT = 1024
"""Least rows in a block that is multiplied by a `(D, D)` matrix: with fewer, reading the matrix takes the time."""

PRODUCTS = dict(zip(DEQUANTISE.cpu, LOGITS.cpu, strict=True))
"""The kernel that multiplies rows, by the one that dequantises them."""


class QuantizedEmbedding(PackedRows, checks_ids=True):
    """A frozen table of integer codes: `out[..., j] = scale * row_scale * (step_g * code_j + offset_g)`.

    Each group g of columns, by default the whole row, has a step and an offset. Codes are in `0..2^bits - 1`. With 8
    bits, step and offset are float32 and there is no `row_scale`. With 4 bits they are float16, relative to the largest
    absolute value of the row, which is its float32 `row_scale`; so no range overflows, and a constant row is exact.

    A look-up reads the bytes of the requested rows. `logits` and `loss` dequantise a block of rows at a time, so the
    whole table is in memory as floating point only under `torch.func` and in exports. A kernel multiplies few tokens by
    the stored bytes: on the CPU up to 8 in float32, and on CUDA without rounding rows to `dtype`. Gradients of the
    hidden state are exact; the codes have no gradient.

    Bytes of a row of width D in groups of g (one group: g = D), against 4 D in float32:

    | bits | bytes | D = 384 | in groups of 32 |
    |---|---|---|---|
    | 8 | `D + 8 D / g` | 392, 25.5 % | 480, 31.3 % |
    | 4 | `D / 2 + 4 D / g + 4` | 200, 13.0 % | 244, 15.9 % |
    | 8, `GGUFBlocks` | `D + 2 D / 32` | only in groups | 408, 26.6 % |
    | 4, `GGUFBlocks` | `D / 2 + 2 D / 32` | only in groups | 216, 14.1 % |

    The constructor creates rows of zeros. Use `from_table` to quantise another table.

    Args:
        vocab_size: Number of tokens, V.
        embed_dim: Width of a row, D.
        bits: Bits of a code, 8 or 4.
        group_size: Columns that share a step and an offset; `None` for a whole row. With 4 bits an even number.
        layout: Layout of the stored bytes; `None` for the one above. `GGUFBlocks()` are blocks of 32 columns with one
            float16 scale, GGUF's Q4_0 and Q8_0, without `row_scale`.
        padding_idx: Padding token, or `None`.
        scale: Factor on every looked-up row: a number, `"sqrt_dim"` for sqrt(D), or `None` for 1.
        round_scale: Whether to round the scale to the dtype of the vectors, as Gemma does.
        dtype: Data type of the vectors; `None` for torch's default. `.to(dtype)` changes it and not the stored codes.
        device: Device of the rows.

    Example:
        >>> table = QuantizedEmbedding.from_table(TokenEmbedding(100, 64), bits=4, group_size=32)
        >>> table(torch.tensor([[1, 2, 3]])).shape, table.packed.shape, table.nbytes
        (torch.Size([1, 3, 64]), torch.Size([100, 40]), 4400)

    Reference: the bytes are those of FBGEMM's `FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf` and of its 8-bit version,
    which PyTorch's `quantized::embedding_bag_4bit_prepack` writes. We differ in steps and offsets, which minimise the
    squared error, in groups, and in `row_scale`.
    """

    packed: Tensor
    """Stored rows, uint8, `(V, row bytes)`: codes (with 4 bits two in a byte, the first one low), step and offset of
    each group."""

    row_scale: Tensor | None
    """Scale of each row with 4 bits, float32, `(V,)`; `None` with 8 bits and in `GGUFBlocks`."""

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        bits: int = 8,
        *,
        group_size: int | None = None,
        layout: RowLayout | None = None,
        padding_idx: int | None = None,
        scale: float | Literal["sqrt_dim"] | None = None,
        round_scale: bool = False,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        row_format = row_format_of(bits, embed_dim, group_size, layout)
        super().__init__(
            vocab_size,
            embed_dim,
            padding_idx=padding_idx,
            scale=scale,
            round_scale=round_scale,
            dtype=dtype,
            device=device,
        )
        self.bits, self.group_size, self.layout = bits, group_size, layout
        self.row_format = row_format
        packed = torch.zeros(vocab_size, row_format.row_bytes(), dtype=torch.uint8, device=device)
        self.register_buffer("packed", packed)
        scaled = row_format.layout().has_row_scale(bits)
        row_scale = torch.zeros(vocab_size, dtype=torch.float32, device=device) if scaled else None
        self.register_buffer("row_scale", row_scale)

    @classmethod
    @torch.no_grad()
    def from_table(
        cls,
        table: TableLike,
        bits: int = 8,
        *,
        group_size: int | None = None,
        layout: RowLayout | None = None,
        symmetric: bool = False,
        clip: bool = True,
        rounding: CovarianceRounding | None = None,
        padding_idx: int | None = None,
        scale: float | Literal["sqrt_dim"] | None = None,
        dtype: torch.dtype | None = None,
    ) -> "QuantizedEmbedding":
        """Quantise a table, a block of rows at a time. Spare rows, which are never looked up, are left out.

        Args:
            table: A table, which keeps its scale and padding, or a plain tensor or NumPy array, `(V, D)`.
            bits: Bits of a code, 8 or 4.
            group_size: Columns that share a step and an offset; `None` for a whole row.
            layout: As in the constructor.
            symmetric: Whether the levels (the numbers that codes stand for) are symmetric around zero, and zero is one
                of them, as always with `GGUFBlocks`. By default they run from the smallest to the largest number of a
                group.
            clip: Whether outliers may be clipped to reduce the squared error of a group: each of 9 ranges is refined by
                least squares, and the best one is taken. Without clipping and `rounding`, the error of a number is at
                most half the step of its group, with 4 bits and no `GGUFBlocks` plus 2^-11 of the largest number of the
                row.
            rounding: `CovarianceRounding()` for codes that keep more nearest neighbours; `None` for the nearest levels.
            padding_idx: For a plain tensor: padding token, whose row keeps its values.
            scale: For a plain tensor: as in the constructor.
            dtype: Data type of the vectors; `None` for that of the table.

        Raises:
            ShapeError: A plain tensor is not `(V, D)`, or a row holds NaN, infinity or a number above the range of the
                layout.

        Example:
            >>> seeded = torch.manual_seed(0)
            >>> table = TokenEmbedding(1000, 64)
            >>> error = [(QuantizedEmbedding.from_table(table, bits)(ids) - table(ids)).norm() / table(ids).norm()
            ...          for bits in (8, 4) for ids in [torch.arange(1000)]]
            >>> [f"{e:.1%}" for e in error]
            ['0.5%', '8.2%']
        """
        source, padding_idx = source_of_rows(table, padding_idx, scale)
        first = source.rows(0, 1)
        quantised = cls(
            source.vocab_size,
            source.embed_dim,
            bits,
            group_size=group_size,
            layout=layout,
            padding_idx=padding_idx,
            scale=source.scale,
            round_scale=isinstance(source.factor, Tensor),
            dtype=first.dtype if dtype is None else dtype,
            device=first.device,
        )
        largest = quantised.row_format.layout().largest(bits)
        weights = None if rounding is None else _weights(source, rounding, first.device)
        at_least = 1 if rounding is None else ROWS_OF_A_PRODUCT
        for start, stop in _blocks(source.vocab_size, source.embed_dim, first.device, at_least=at_least):
            rows = source.rows(start, stop).to(torch.float32)
            sound = (rows.abs() <= largest).all(dim=1)
            if not sound.all():
                row = start + int((~sound).nonzero()[0])
                raise ShapeError(f"Row {row} holds NaN, or numbers above {largest:.3g}, which no code can represent.")
            packed, row_scale = quantise(
                rows, quantised.row_format, symmetric=symmetric, clip=clip, rounding=rounding, weights=weights
            )
            quantised.packed[start:stop] = packed
            if quantised.row_scale is not None and row_scale is not None:
                quantised.row_scale[start:stop] = row_scale
        return quantised

    @property
    def stored_rows(self) -> StoredRows:
        """Return the bytes of the rows and their scales, which are buffers of this table, and their format."""
        parts = {"packed": self.packed} | ({} if self.row_scale is None else {"row_scale": self.row_scale})
        return StoredRows(QuantizedRows.of(self.row_format), parts, {})

    @property
    def stored_type(self) -> str:
        """Return `"int8"` or `"int4"`; with `layout=GGUFBlocks()` GGUF's name, `"Q8_0"` or `"Q4_0"`."""
        name = self.row_format.layout().type_name(self.row_format.bits)
        return name.upper() if isinstance(self.layout, GGUFBlocks) else name

    rows = PackedRows.rows  # beside `raw_logits` and `look_up`: a class that overrides one of them is recognised
    rows_as, vectors_as = PackedRows.rows_as, PackedRows.vectors_as

    def look_up(self, ids: Ids) -> Vectors:
        """Return the dequantised vectors of `ids` without `scale`, `(...)` to `(..., D)`; on CUDA in one launch."""
        ids = ids if isinstance(ids, Tensor) else as_ids(ids, beside=self)
        by_kernel = device_kind(ids) != "cpu" and is_current(type(self), "look_up", "dequantised")
        if not by_kernel or not _applies_on_cuda(self.dtype, ids, self.packed, self.row_scale):
            return super().look_up(ids)
        self.index_check.require_integers(ids)
        record, places = self.index_check.record_on(ids.device), ids.reshape(-1).long().contiguous()
        arguments = record, length_of(ids), self.row_format, self.dtype
        vectors: Tensor = read_quantized_rows(places, self.packed, self.row_scale, *arguments)
        return vectors.view(*ids.shape, self.embed_dim)

    def raw_logits(
        self, hidden: Float[Tensor, "*batch D"], start: int = 0, stop: int | None = None
    ) -> Float[Tensor, "*batch N"]:
        """Return `hidden @ rows(start, stop).T`: logits before scale, bias and soft cap.

        Rows are dequantised block by block to the dtype of `hidden`, and again in the backward pass. Under autocast,
        `hidden` is cast to autocast's dtype. See `TokenTable.raw_logits` for the arguments.
        """
        if (narrow := autocast_dtype(hidden)) is not None and hidden.dtype != torch.float64:
            hidden = hidden.to(narrow)
        check_width(hidden, self.embed_dim)
        is_eager = fusible(hidden)
        if not is_eager and (plain_operators_only() or is_transformed(hidden)):
            rows = self.rows_as(start, self.vocab_size if stop is None else stop, hidden.dtype)
            return F.linear(hidden, rows.to(hidden.dtype))
        buffers: Any = self._buffers
        packed, row_scale = buffers["packed"][start:stop], buffers["row_scale"]
        row_scale = None if row_scale is None else row_scale[start:stop]
        x, logits = hidden.reshape(-1, self.embed_dim), None
        if is_eager and x.shape[0] <= FEW_TOKENS and not (x.requires_grad and torch.is_grad_enabled()):
            logits = _logits_in_one_pass(x, packed, row_scale, self.row_format)  # without the operator around it
        logits = times_rows(x, packed, row_scale, self.row_format, True) if logits is None else logits
        return logits.view(*hidden.shape[:-1], packed.shape[0])

    def dequantised(self, ids: Int[Tensor, " N"], dtype: torch.dtype | None = None) -> Float[Tensor, "N D"]:
        """Return the vectors of IDs that were checked, without `scale`: those of `dequantise`, by the fastest way."""
        dtype = self.dtype if dtype is None else dtype
        buffers: Any = self._buffers
        packed, row_scale = buffers["packed"], buffers["row_scale"]
        if torch.compiler.is_compiling() and not plain_operators_only() and device_kind(ids) == "cpu":
            vectors: Tensor = rows_of(ids, packed, row_scale, self.row_format, dtype)
            return vectors
        return dequantised_rows(ids, packed, row_scale, self.row_format, dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedEmbedding":
        """Move or cast the table, as in torch. A cast changes `dtype`, the type of the vectors, and not `row_scale`."""
        stored = self.row_scale
        super()._apply(fn, recurse)
        if stored is not None and self.row_scale is not None and self.row_scale.dtype != stored.dtype:
            self.row_scale = stored.to(self.row_scale.device)  # moved, never rounded
        return self

    def extra_repr(self) -> str:
        """Return the sizes and the options that are set, for `print`: `"100, 64, bits=4, dtype=float32"`."""
        group = "" if self.group_size is None else f", group_size={self.group_size}"
        group += "" if self.layout is None else f", layout={self.layout}"
        options = f"{group}{describe_options(self)}, dtype={self.dtype_name}"
        return f"{self.vocab_size}, {self.embed_dim}, bits={self.row_format.bits}{options}"


def gguf_blocks(table: TokenTable) -> UInt8[Tensor, "V bytes"]:
    """Return the rows of a table of the layout `GGUFBlocks` as the blocks that GGUF files store, without a copy.

    Their type is Q4_0 or Q8_0 by the table's bits; `gguf.quants.dequantize` returns `table.rows(0, V)` of a float32
    table bit for bit.

    Returns:
        Bytes, uint8, `(V, 18 D / 32)` with 4 bits, `(V, 34 D / 32)` with 8.

    Example:
        >>> gguf_blocks(QuantizedEmbedding(100, 64, bits=8, layout=GGUFBlocks())).shape
        torch.Size([100, 68])
    """
    if not isinstance(table, QuantizedEmbedding) or not isinstance(table.layout, GGUFBlocks):
        raise SizeError("Only GGUF blocks can be written: QuantizedEmbedding.from_table(table, layout=GGUFBlocks()).")
    if table.embed_dim % table.row_format.group_size:
        raise SizeError(f"Width {table.embed_dim} must be a multiple of GGUF's {table.row_format.group_size}.")
    return table.packed


def _weights(source: LookupTable, rounding: CovarianceRounding, device: torch.device) -> Float[Tensor, "D D"]:
    """Return the weights of `rounding` for the rows of `source`, from sums over all of its rows."""
    width = source.embed_dim
    moment = torch.zeros(width, width, dtype=torch.float64, device=device)
    total = torch.zeros(width, dtype=torch.float64, device=device)
    for start, stop in _blocks(source.vocab_size, width, device, at_least=ROWS_OF_A_PRODUCT):
        rows = unit_rows(source.rows(start, stop).to(torch.float32))
        moment += rows.T @ rows
        total += rows.sum(0)
    return rounding.weights(moment / source.vocab_size, total / source.vocab_size)


def dequantised_rows(
    ids: Int[Tensor, " N"] | None, packed: Tensor, row_scale: Tensor | None, row_format: RowFormat, dtype: torch.dtype
) -> Float[Tensor, "N D"]:
    """Dequantise the stored rows of the given IDs in one pass, or with `dequantise` where no kernel can run."""
    kind = device_kind(packed)
    if kind == "cuda" and _applies_on_cuda(dtype, ids, packed, row_scale):
        places = None if ids is None else ids.long().contiguous()
        vectors: Tensor = read_quantized_rows(places, packed, row_scale, None, 1, row_format, dtype)
        return vectors
    if ids is None:
        ids = torch.arange(len(packed), device=packed.device)
    if kind != "cpu" or plain_operators_only():
        chosen = None if row_scale is None else row_scale.index_select(0, ids)
        return dequantise(packed.index_select(0, ids), chosen, row_format).to(dtype)
    if ids.numel() == 0:
        return torch.empty(0, row_format.embed_dim, dtype=dtype)
    if dtype == torch.float16:
        return dequantised_rows(ids, packed, row_scale, row_format, torch.float32).to(dtype)
    by_kernel = _in_one_pass(ids, packed, row_scale, row_format, dtype)
    if by_kernel is not None:
        return by_kernel
    if dtype == torch.float32:
        return _with_torch_kernels(ids, packed, row_scale, row_format)
    vectors = torch.empty(len(ids), row_format.embed_dim, dtype=dtype)
    for start, stop in _blocks(len(ids), row_format.embed_dim, ids.device):
        vectors[start:stop] = _with_torch_kernels(ids[start:stop], packed, row_scale, row_format)
    return vectors


def _applies_on_cuda(dtype: torch.dtype, *tensors: Tensor | None) -> bool:
    """Return whether Triton kernels read the stored rows among `tensors`, and compute in this dtype."""
    is_on_cuda = "cuda" in [device_kind(x) for x in tensors if x is not None]
    return is_on_cuda and dtype in FLOATS and DEQUANTISE.applies(*tensors)


def _in_one_pass(
    ids: Tensor, packed: Tensor, row_scale: Tensor | None, row_format: RowFormat, dtype: torch.dtype
) -> Tensor | None:
    """Dequantise the rows of `ids` with a compiled kernel; the result is `None` if it cannot run."""
    kernel, sizes = _kernel_of(row_format)
    if DEQUANTISE.refusal(ids, packed, row_scale):
        return None
    count = ids.shape[0]
    vectors = torch.empty(count, row_format.embed_dim, dtype=dtype, device=ids.device)
    stored = (ids.long().contiguous(), packed.contiguous(), *([] if row_scale is None else [row_scale.contiguous()]))
    block = max(1, CLAIMED_NUMEL // row_format.embed_dim)
    return vectors if kernel.run(count, *stored, sizes, vectors, block=block) else None


def _logits_in_one_pass(x: Tensor, packed: Tensor, row_scale: Tensor | None, row_format: RowFormat) -> Tensor | None:
    """Compute `x @ rows.T` for few float32 tokens on the CPU with a compiled kernel; `None` if it cannot run."""
    kernel, sizes = _kernel_of(row_format)
    if x.dtype != torch.float32 or device_kind(x) != "cpu" or LOGITS.refusal(x, packed, row_scale):
        return None
    stored = (packed.contiguous(), *([] if row_scale is None else [row_scale.contiguous()]))
    count = packed.shape[0]
    out = torch.empty(count, x.shape[0])
    product, block = PRODUCTS[kernel], max(1, CLAIMED_NUMEL // row_format.embed_dim)
    return tokens_first(out) if product.run(count, x.contiguous(), *stored, sizes, out, block=block) else None


@cache
def _kernel_of(row_format: RowFormat) -> tuple[Kernel, tuple[int, ...]]:
    return row_format.layout().kernel(row_format)


def _with_torch_kernels(ids: Tensor, packed: Tensor, row_scale: Tensor | None, row_format: RowFormat) -> Tensor:
    """Dequantise the rows of `ids` on the CPU to float32, `(N, D)`, with PyTorch's quantised embedding-bag kernels."""
    if not row_format.layout().has_torch_kernels:
        return dequantise(packed.index_select(0, ids), row_scale, row_format)
    operators: Any = torch.ops.quantized
    ids = ids.contiguous()  # the kernels refuse strided ones
    weights = None if row_scale is None else row_scale.index_select(0, ids)
    if row_format.groups() > 1:
        ids = (ids.unsqueeze(1) * row_format.groups() + torch.arange(row_format.groups())).flatten()
        weights = None if weights is None else weights.repeat_interleave(row_format.groups())
    bags = torch.arange(len(ids), dtype=ids.dtype)
    fused = packed.view(len(packed) * row_format.groups(), -1)
    if row_format.bits == 8:
        vectors = operators.embedding_bag_byte_rowwise_offsets(fused, ids, bags)
    else:
        vectors = operators.embedding_bag_4bit_rowwise_offsets(fused, ids, bags, per_sample_weights=weights)
    numbers: Tensor = vectors.view(-1, row_format.groups() * row_format.group_size)
    return numbers[:, : row_format.embed_dim].contiguous()


@torch.library.custom_op("embedlayer::quantized_rows", mutates_args=())
def rows_of(
    ids: Tensor, packed: Tensor, row_scale: Tensor | None, row_format: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Run `dequantised_rows` as a custom operator, so that a compiled graph on the CPU has one node for it."""
    return dequantised_rows(ids, packed, row_scale, RowFormat(*row_format), dtype)


@rows_of.register_fake
def _(ids: Tensor, packed: Tensor, row_scale: Tensor | None, row_format: Sequence[int], dtype: torch.dtype) -> Tensor:
    return packed.new_empty(ids.shape[0], RowFormat(*row_format).embed_dim, dtype=dtype)


@torch.library.custom_op("embedlayer::times_quantized_rows", mutates_args=())
def times_rows(
    x: Tensor, packed: Tensor, row_scale: Tensor | None, row_format: Sequence[int], transposed: bool
) -> Tensor:
    """Multiply `x` by the dequantised rows, a block of rows at a time, as a custom operator with a gradient."""
    form, vocab_size = RowFormat(*row_format), len(packed)
    of_blocks = packed.nbytes + 2 * vocab_size * form.embed_dim * x.itemsize
    is_few = transposed and len(x) * packed.nbytes <= of_blocks
    if is_few and _applies_on_cuda(x.dtype, x, packed, row_scale):
        return logits_of_few_tokens(x, packed, row_scale, form)
    if transposed and len(x) <= FEW_TOKENS and (logits := _logits_in_one_pass(x, packed, row_scale, form)) is not None:
        return logits
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    result = x.new_empty(len(x), vocab_size) if transposed else x.new_zeros(len(x), form.embed_dim, dtype=wide)
    at_least = max(MAX_CHUNK_TOKENS["cpu"], 2 * NUMBERS["cpu"] // form.embed_dim)  # as in `times_stored_rows`
    for start, stop in _blocks(vocab_size, form.embed_dim, x.device, at_least=at_least):
        scales = None if row_scale is None else row_scale[start:stop]
        rows = dequantised_rows(None, packed[start:stop], scales, form, x.dtype)
        if transposed:
            torch.mm(x, rows.T, out=result[:, start:stop])
        else:
            write_product(result, x[:, start:stop], rows, add=True)
    return result.to(x.dtype)


@times_rows.register_fake
def _(x: Tensor, packed: Tensor, row_scale: Tensor | None, row_format: Sequence[int], transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], len(packed) if transposed else RowFormat(*row_format).embed_dim)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save in the autograd context `ctx` those `inputs` of `times_rows` that `_backward` reads."""
    _, packed, row_scale, ctx.row_format, ctx.transposed = inputs
    ctx.save_for_backward(packed, *([] if row_scale is None else [row_scale]))


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the five arguments of `times_rows`: that of `x`, and `None` for the others."""
    packed, row_scale = (*ctx.saved_tensors, None)[:2]
    return times_rows(gradient, packed, row_scale, ctx.row_format, not ctx.transposed), *[None] * 4


times_rows.register_autograd(_backward, setup_context=_keep)


def _blocks(count: int, width: int, device: torch.device, *, at_least: int = 1) -> Iterator[tuple[int, int]]:
    """Yield `(start, stop)` of consecutive blocks that cover `count` rows of `width` numbers."""
    step = max(1, at_least, block_size(NUMBERS, device_kind(device)) // width)
    return ((start, min(start + step, count)) for start in range(0, count, step))
