"""The quantised table: rows of 8-bit or 4-bit whole numbers with their scales, looked up and multiplied as they are.

`dequantise` is the definition, in a few lines of plain PyTorch. On the CPU the same numbers come out of PyTorch's own
kernels for such rows, which read a row's bytes and nothing else.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from embedlayer.bounds import Bounds
from embedlayer.derived import Derived
from embedlayer.errors import ShapeError, SizeError
from embedlayer.io.files import JsonObject
from embedlayer.shapes import Ids, Vectors
from embedlayer.tables.dense import TableLike, as_rows, require_rows, resolve_scale
from embedlayer.tables.table import TokenTable, check_sizes, check_width
from embedlayer.tracing import is_transformed, plain_operators_only

HEADER = {8: torch.float32, 4: torch.float16}
"""Type of a group's scale and offset, by its bits."""

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
DTYPES["float64"] = torch.float64
"""Types in which vectors can come out, by name."""

NUMBERS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Numbers that are made or read at a time: few enough to stay in a core's cache, or to be one launch of many."""

SHRINKS = (1.0, 0.9, 0.8, 0.7, 0.6)
REFITS = 4


class Layout(NamedTuple):
    """How a row is stored: `groups` times (codes, scale, offset), each group of `group_size` columns.

    The last group may have columns that are not there; nobody reads them.
    """

    bits: int
    embed_dim: int
    group_size: int

    @property
    def groups(self) -> int:
        """Groups in a row, G."""
        return math.ceil(self.embed_dim / self.group_size)

    @property
    def code_bytes(self) -> int:
        """Bytes of a group's codes."""
        return self.group_size * self.bits // 8

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of `packed`."""
        return self.groups * (self.code_bytes + 2 * HEADER[self.bits].itemsize)


class QuantizedEmbedding(TokenTable, Derived):
    """A frozen table of whole numbers: `out[..., j] = scale * row_scale * (step_g * code_j + offset_g)`.

    Each group g of columns, by default the whole row, has a step and an offset. `code` runs from 0 to 2^bits - 1. With
    8 bits step and offset are float32 and there is no `row_scale`; with 4 bits they are float16, relative to the row's
    largest number, which is its `row_scale` in float32, so that no range is too wide or too fine and a constant row
    is exact. Look-up reads the bytes of the rows asked for; `logits` and `loss` make a block of rows at a time. The
    table is never held in floating point. Gradients to the hidden state are exact; the codes have none.

    Bytes of a row of width D in groups of g (one group: g = D), against 4 D in float32:

    | bits | bytes | D = 384 | in groups of 32 |
    |---|---|---|---|
    | 8 | `D + 8 D / g` | 392, 25.5 % | 480, 31.3 % |
    | 4 | `D / 2 + 4 D / g + 4` | 200, 13.0 % | 244, 15.9 % |

    A new one has zero rows: make it of another table with `from_table`.

    Args:
        vocab_size: Rows of the table, V.
        embed_dim: Width of a row, D.
        bits: Of a code, 8 or 4.
        group_size: Columns that share a step and an offset; `None` for a whole row. With 4 bits an even number.
        padding_idx: Row that is exactly zero; `None` for no such row.
        scale: Factor on every looked-up row: a number, `"sqrt_dim"`, or `None` for none.
        round_scale: Round the scale to the type of the vectors, as Gemma does.
        dtype: Type of the vectors, which `.to(dtype)` changes; what is stored stays as it is.
        device: Where to put the rows.

    Raises:
        SizeError: A size is below 1, or an option is not one of those above.

    Example:
        >>> table = QuantizedEmbedding.from_table(TokenEmbedding(100, 64), bits=4, group_size=32)
        >>> table(torch.tensor([[1, 2, 3]])).shape, table.packed.shape, table.nbytes
        (torch.Size([1, 3, 64]), torch.Size([100, 40]), 4400)

    Reference: the rows are those of FBGEMM's `FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf` and its 8-bit brother, as
    PyTorch's `quantized::embedding_bag_4bit_prepack` writes them. We differ: steps and offsets minimise the squared
    error of what is stored, groups, and `row_scale`.
    """

    packed: Tensor
    """`(V, row bytes)`: uint8, each group's codes (with 4 bits two in a byte, the first one low), step and offset."""

    row_scale: Tensor | None
    """`(V,)` in float32 with 4 bits, whatever the type of the vectors."""

    example: Tensor
    embed_scale: float | Tensor | None

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        bits: int = 8,
        *,
        group_size: int | None = None,
        padding_idx: int | None = None,
        scale: float | Literal["sqrt_dim"] | None = None,
        round_scale: bool = False,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        padding_idx = check_sizes(padding_idx=padding_idx, vocab_size=vocab_size, embed_dim=embed_dim)
        self.vocab_size = self.num_rows = vocab_size
        self.embed_dim = embed_dim
        self.padding_idx = padding_idx
        self.scale = resolve_scale(scale, embed_dim)
        self.round_scale = round_scale
        self.group_size = group_size
        self.layout = layout_of(bits, embed_dim, group_size)
        self.bounds = Bounds(vocab_size, "token id")
        self.register_buffer("packed", torch.zeros(vocab_size, self.layout.row_bytes, dtype=torch.uint8, device=device))
        row_scale = torch.zeros(vocab_size, dtype=torch.float32, device=device) if bits == 4 else None
        self.register_buffer("row_scale", row_scale)
        self.register_buffer("example", torch.empty(0, dtype=_dtype_of(dtype)), persistent=False)
        if not round_scale:
            self.embed_scale = self.scale
        self.derive(self.packed.device)

    @classmethod
    def from_table(
        cls,
        table: TableLike,
        bits: int = 8,
        *,
        group_size: int | None = None,
        symmetric: bool = False,
        clip: bool = True,
        padding_idx: int | None = None,
        scale: float | Literal["sqrt_dim"] | None = None,
        dtype: torch.dtype | None = None,
    ) -> "QuantizedEmbedding":
        """Quantise a table of any kind, a block of rows at a time. Its spare rows are left out.

        Args:
            table: A table, whose scale and padding are kept, or a plain tensor or NumPy array.
            bits: Of a code, 8 or 4.
            group_size: Columns that share a step and an offset; `None` for a whole row.
            symmetric: Levels around zero, which is one of them: `code - 2^(bits-1)` is from `-n` to `n` and the offset
                says nothing. By default levels lie between the group's smallest and largest number.
            clip: Let outliers be clipped where that makes the squared error of the group smaller: the best of 5
                ranges, and rounds of rounding to the levels and of least squares for step and offset. Without, no
                number is off by more than half its group's step (and with 4 bits 2^-11 of the row's largest number).
            padding_idx: Of a plain tensor: row that becomes zero.
            scale: Of a plain tensor: as in the constructor.
            dtype: Type of the vectors; that of the table's rows if `None`.

        Raises:
            ShapeError: A plain tensor that is not `(V, D)`, or rows with numbers that are NaN or infinite.
            SizeError: `bits` or `group_size` are not possible.

        Example:
            >>> seeded = torch.manual_seed(0)
            >>> table = TokenEmbedding(1000, 64)
            >>> error = [(QuantizedEmbedding.from_table(table, bits)(ids) - table(ids)).norm() / table(ids).norm()
            ...          for bits in (8, 4) for ids in [torch.arange(1000)]]
            >>> [f"{e:.1%}" for e in error]
            ['0.5%', '8.3%']
        """
        table = as_rows(table)
        if isinstance(table, Tensor):
            require_rows(table)
            (vocab_size, embed_dim), round_scale = table.shape, False
        else:
            vocab_size, embed_dim = table.vocab_size, table.embed_dim
            padding_idx, scale = table.padding_idx, table.scale
            round_scale = isinstance(table.factor, Tensor)
        first = _rows(table, 0, min(1, vocab_size))
        quantised = cls(
            vocab_size,
            embed_dim,
            bits,
            group_size=group_size,
            padding_idx=padding_idx,
            scale=scale,
            round_scale=round_scale,
            dtype=first.dtype if dtype is None else dtype,
            device=first.device,
        )
        padding_idx = quantised.padding_idx
        for start, stop in _blocks(vocab_size, embed_dim, first.device):
            rows = _rows(table, start, stop).to(torch.float32)
            _refuse_unsound(rows, start)
            if padding_idx is not None and start <= padding_idx < stop:
                rows = rows.clone()
                rows[padding_idx - start] = 0
            packed, row_scale = quantise(rows, quantised.layout, symmetric=symmetric, clip=clip)
            quantised.packed[start:stop] = packed
            if quantised.row_scale is not None:
                assert row_scale is not None
                quantised.row_scale[start:stop] = row_scale
        return quantised

    def reset_parameters(self) -> None:
        """Set all rows to zero, as in a new table: their numbers come from `from_table` or a saved state."""
        self.packed.zero_()
        if self.row_scale is not None:
            self.row_scale.zero_()

    @property
    def dtype(self) -> torch.dtype:
        """Type of the vectors."""
        return self.example.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored: codes, steps, offsets and row scales."""
        return self.packed.nbytes + (0 if self.row_scale is None else self.row_scale.nbytes)

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments."""
        return {
            "vocab_size": self.vocab_size,
            "embed_dim": self.embed_dim,
            "bits": self.layout.bits,
            "group_size": self.group_size,
            "padding_idx": self.padding_idx,
            "scale": self.scale,
            "round_scale": self.round_scale,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def derived(self) -> dict[str, Tensor]:
        """The type of the vectors, and the rounded scale where there is one."""
        tensors = {"example": torch.empty(0, dtype=self.dtype)}
        if self.round_scale:
            tensors["embed_scale"] = torch.tensor(1.0 if self.scale is None else self.scale, dtype=self.dtype)
        return tensors

    def look_up(self, ids: Ids) -> Vectors:
        """Return `dequantise(packed[ids])`: `(...)` to `(..., D)`."""
        ids, outside = self.bounds(ids)
        vectors = self._dequantised(ids.reshape(-1)).view(*ids.shape, self.embed_dim)
        return vectors if outside is None else vectors.masked_fill(outside.unsqueeze(-1), 0)

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Rows `start` to `stop - 1`, without `scale`: made anew on each call."""
        start, stop, _ = slice(start, stop).indices(self.vocab_size)
        return self._dequantised(torch.arange(start, max(start, stop), device=self.packed.device))

    def products(
        self, hidden: Float[Tensor, "*batch D"], start: int = 0, stop: int | None = None
    ) -> Float[Tensor, "*batch N"]:
        """`hidden @ rows(start, stop).T`, a block of rows at a time, which the backward pass makes again.

        Raises:
            ShapeError: `hidden` has another width or type than the vectors.
        """
        device = hidden.device.type
        if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
            hidden = hidden.to(torch.get_autocast_dtype(device))
        elif hidden.dtype != self.dtype:
            raise ShapeError(
                f"hidden is {hidden.dtype} and this table gives {self.dtype}: bring them to one type with .to(dtype), "
                f"or use torch.autocast."
            )
        check_width(hidden, self.embed_dim)
        if plain_operators_only() or is_transformed(hidden):
            return F.linear(hidden, self.rows(start, self.vocab_size if stop is None else stop).to(hidden.dtype))
        packed = self.packed[start:stop]
        row_scale = None if self.row_scale is None else self.row_scale[start:stop]
        found: Tensor = times_rows(hidden.reshape(-1, self.embed_dim), packed, row_scale, *self.layout, True)
        return found.view(*hidden.shape[:-1], len(packed))

    def _dequantised(self, ids: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and not plain_operators_only() and ids.device.type == "cpu":
            vectors: Tensor = rows_of(ids, self.packed, self.row_scale, *self.layout, self.dtype)
            return vectors
        return dequantised_rows(ids, self.packed, self.row_scale, self.layout, self.dtype)

    def check(self) -> None:
        """Wait for the device and raise the error of a bad ID that was looked up since the last check."""
        self.bounds.check()

    def requires_grad_(self, requires_grad: bool = True) -> "QuantizedEmbedding":
        """Refuse to train: there is nothing in a quantised table that could have a gradient.

        Raises:
            SizeError: `requires_grad` is true.
        """
        if requires_grad:
            raise SizeError(
                "A quantised table is frozen: its codes are whole numbers and have no gradient.\n"
                "Train the rows in floating point, TokenEmbedding.from_pretrained(table.rows(0, table.vocab_size), "
                "freeze=False), and quantise the result."
            )
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedEmbedding":
        stored = self.row_scale
        super()._apply(fn, recurse)
        if stored is not None and self.row_scale is not None and self.row_scale.dtype != stored.dtype:
            self.row_scale = stored.to(self.row_scale.device)  # moved, never rounded
        return self

    def extra_repr(self) -> str:
        """Sizes and options, for `print`."""
        parts = [f"{self.vocab_size}, {self.embed_dim}, bits={self.layout.bits}"]
        parts += [f"group_size={self.group_size}"] if self.group_size is not None else []
        parts += [f"padding_idx={self.padding_idx}"] if self.padding_idx is not None else []
        parts += [f"scale={self.scale:.6g}"] if self.scale is not None else []
        parts += ["rounded"] if self.round_scale else []
        return ", ".join([*parts, f"dtype={str(self.dtype).removeprefix('torch.')}"])


def dequantise(
    packed: UInt8[Tensor, "N bytes"], row_scale: Float[Tensor, " N"] | None, layout: Layout
) -> Float[Tensor, "N D"]:
    """Stored rows to numbers: `row_scale * (step * code + offset)`, in float32. The definition."""
    groups = packed.reshape(packed.shape[0] * layout.groups, layout.row_bytes // layout.groups)
    codes, header = groups[:, : layout.code_bytes], groups[:, layout.code_bytes :]
    header = header.clone(memory_format=torch.contiguous_format)  # aligned: a slice of one row need not be
    step, offset = _floats(header, HEADER[layout.bits]).split(1, dim=1)
    if layout.bits == 4:
        codes = torch.stack([codes % 16, codes // 16], dim=-1).flatten(1)
    numbers: Tensor = (step * codes + offset).view(packed.shape[0], layout.groups * layout.group_size)
    numbers = numbers[:, : layout.embed_dim]
    return numbers if row_scale is None else row_scale.unsqueeze(1) * numbers


def _floats(stored: UInt8[Tensor, "N bytes"], dtype: torch.dtype) -> Float[Tensor, "N numbers"]:
    """Return the finite numbers of `dtype` that these bytes are, little-endian, in float32.

    Exported graphs work them out from sign, exponent and fraction: ONNX has no operator that reinterprets bytes.
    """
    if not torch.compiler.is_exporting():
        return stored.view(dtype).to(torch.float32)
    bytes_each, fraction_bits = dtype.itemsize, {torch.float32: 23, torch.float16: 10}[dtype]
    exponents = 2 ** (8 * bytes_each - 1 - fraction_bits)
    places = torch.tensor([256**place for place in range(bytes_each)], device=stored.device)
    codes = (stored.unflatten(-1, (-1, bytes_each)).long() * places).sum(-1)
    fraction, exponent = codes % 2**fraction_bits, codes // 2**fraction_bits % exponents
    whole = fraction + torch.where(exponent > 0, 2**fraction_bits, 0)  # below exponent 1 numbers are subnormal
    lowest = 2 - exponents // 2 - fraction_bits
    powers = torch.tensor([2.0 ** (lowest + max(at - 1, 0)) for at in range(exponents)], device=stored.device)
    size = whole.to(torch.float32) * powers[exponent]
    return torch.where(codes < exponents * 2**fraction_bits, size, -size)


def quantise(
    rows: Float[Tensor, "N D"], layout: Layout, *, symmetric: bool = False, clip: bool = True
) -> tuple[UInt8[Tensor, "N bytes"], Float[Tensor, " N"] | None]:
    """Rows in float32 to what is stored: `packed`, and with 4 bits `row_scale`; `from_table` explains the options."""
    row_scale = None
    if layout.bits == 4:
        row_scale = rows.abs().amax(dim=1)
        rows = rows / row_scale.where(row_scale > 0, 1.0).unsqueeze(1)
    missing = layout.groups * layout.group_size - layout.embed_dim
    rows = torch.cat([rows, rows[:, -1:].expand(-1, missing)], dim=1)
    grid = _fitted(rows.view(-1, layout.group_size), layout.bits, symmetric=symmetric, clip=clip)
    codes = grid.codes(rows.view(-1, layout.group_size)).to(torch.uint8)
    if layout.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    header = torch.cat([grid.step, grid.offset], dim=1).to(HEADER[layout.bits]).view(torch.uint8)
    return torch.cat([codes, header], dim=1).view(len(rows), layout.row_bytes), row_scale


class _Grid(NamedTuple):
    """The levels of each group: `step * code + offset` for `lowest <= code <= highest`; all of `(N, 1)`."""

    step: Tensor
    offset: Tensor
    bits: int
    symmetric: bool

    def codes(self, x: Tensor) -> Tensor:
        """The nearest levels, as floats."""
        codes = ((x - self.offset) / self.step.where(self.step > 0, 1.0)).round_()
        return codes.clamp_(1 if self.symmetric else 0, 2**self.bits - 1).masked_fill_(self.step == 0, 0)

    def error(self, x: Tensor) -> Tensor:
        """Squared error of each group, `(N, 1)`."""
        return torch.addcmul(self.offset, self.codes(x), self.step).sub_(x).square_().sum(dim=1, keepdim=True)

    def where(self, chosen: Tensor, other: "_Grid") -> "_Grid":
        """This one where `chosen`, else the other."""
        step, offset = self.step.where(chosen, other.step), self.offset.where(chosen, other.offset)
        return self._replace(step=step, offset=offset)

    def as_stored(self) -> "_Grid":
        """Rounded to the type of the header."""
        step, offset = (part.to(HEADER[self.bits]).to(torch.float32) for part in (self.step, self.offset))
        return self._replace(step=step, offset=offset)

    def refitted(self, x: Tensor) -> "_Grid":
        """Step and offset of least squared error for the codes of now; as it is where all codes are one."""
        codes = self.codes(x)
        if self.symmetric:
            centre = 2 ** (self.bits - 1)
            codes -= centre
            step = (codes * x).sum(1, keepdim=True) / codes.square().sum(1, keepdim=True)
            offset = -centre * step
        else:
            middle, mean = codes.mean(1, keepdim=True), x.mean(1, keepdim=True)
            codes -= middle
            step = (codes * (x - mean)).sum(1, keepdim=True) / codes.square().sum(1, keepdim=True)
            offset = mean - step * middle
        return self._replace(step=step, offset=offset).where((step > 0) & step.isfinite(), self)


def _fitted(x: Tensor, bits: int, *, symmetric: bool, clip: bool) -> _Grid:
    """The levels of each group of numbers, as they are stored."""
    if symmetric:
        whole = x.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
        centre = torch.zeros_like(whole)
    else:
        low, high = x.amin(dim=1, keepdim=True), x.amax(dim=1, keepdim=True)
        whole = high / (2**bits - 1) - low / (2**bits - 1)  # their difference may be too large a number
        centre = low / 2 + high / 2
    levels = 2 ** (bits - 1) if symmetric else (2**bits - 1) / 2

    def shrunk(factor: float) -> _Grid:
        return _Grid(factor * whole, centre - factor * whole * levels, bits, symmetric)

    unclipped = shrunk(1.0).as_stored()
    if not clip:
        return unclipped
    best, least = unclipped, unclipped.error(x)
    for factor in SHRINKS:
        grid = shrunk(factor).refitted(x)
        error = grid.error(x)
        best, least = grid.where(error < least, best), error.minimum(least)
    for _ in range(REFITS):
        best = best.refitted(x)
    best = best.as_stored()
    return best.where(best.error(x) < unclipped.error(x), unclipped)


def dequantised_rows(
    ids: Int[Tensor, " N"], packed: Tensor, row_scale: Tensor | None, layout: Layout, dtype: torch.dtype
) -> Float[Tensor, "N D"]:
    """`dequantise(packed[ids])` in another type, for IDs that are in the table."""
    if packed.device.type != "cpu" or plain_operators_only():
        chosen = None if row_scale is None else row_scale.index_select(0, ids)
        return dequantise(packed.index_select(0, ids), chosen, layout).to(dtype)
    if ids.numel() == 0:
        return torch.empty(0, layout.embed_dim, dtype=dtype)
    if dtype == torch.float32:
        return _kernel(ids, packed, row_scale, layout)
    vectors = torch.empty(len(ids), layout.embed_dim, dtype=dtype)
    for start, stop in _blocks(len(ids), layout.embed_dim, ids.device):
        vectors[start:stop] = _kernel(ids[start:stop], packed, row_scale, layout)
    return vectors


def _kernel(ids: Tensor, packed: Tensor, row_scale: Tensor | None, layout: Layout) -> Tensor:
    """PyTorch's kernel for fused rows, a bag for each ID or, in groups, for each of its groups."""
    operators: Any = torch.ops.quantized
    ids = ids.contiguous()  # the kernels refuse strided ones
    weights = None if row_scale is None else row_scale.index_select(0, ids)
    if layout.groups > 1:
        ids = (ids.unsqueeze(1) * layout.groups + torch.arange(layout.groups)).flatten()
        weights = None if weights is None else weights.repeat_interleave(layout.groups)
    bags = torch.arange(len(ids), dtype=ids.dtype)
    fused = packed.view(len(packed) * layout.groups, -1)
    if layout.bits == 8:
        found = operators.embedding_bag_byte_rowwise_offsets(fused, ids, bags)
    else:
        found = operators.embedding_bag_4bit_rowwise_offsets(fused, ids, bags, per_sample_weights=weights)
    numbers: Tensor = found.view(-1, layout.groups * layout.group_size)
    return numbers[:, : layout.embed_dim].contiguous()


@torch.library.custom_op("embedlayer::quantized_rows", mutates_args=())
def rows_of(
    ids: Tensor,
    packed: Tensor,
    row_scale: Tensor | None,
    bits: int,
    embed_dim: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """`dequantised_rows`: what a compiled graph calls on the CPU."""
    return dequantised_rows(ids, packed, row_scale, Layout(bits, embed_dim, group_size), dtype)


@rows_of.register_fake
def _(
    ids: Tensor,
    packed: Tensor,
    row_scale: Tensor | None,
    bits: int,
    embed_dim: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    return packed.new_empty(len(ids), embed_dim, dtype=dtype)


@torch.library.custom_op("embedlayer::times_quantized_rows", mutates_args=())
def times_rows(
    x: Tensor,
    packed: Tensor,
    row_scale: Tensor | None,
    bits: int,
    embed_dim: int,
    group_size: int,
    transposed: bool,
) -> Tensor:
    """`x @ rows.T` of `(N, D)` or, not transposed, `x @ rows` of `(N, V)`, a block of rows at a time."""
    layout, vocab_size = Layout(bits, embed_dim, group_size), len(packed)
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    result = x.new_empty(len(x), vocab_size) if transposed else x.new_zeros(len(x), embed_dim, dtype=wide)
    at_least = max(len(x), 2 * NUMBERS_AT_ONCE["cpu"] // embed_dim)  # a product pays for larger blocks
    for start, stop in _blocks(vocab_size, embed_dim, x.device, at_least=at_least):
        ids = torch.arange(start, stop, device=packed.device)
        rows = dequantised_rows(ids, packed, row_scale, layout, x.dtype)
        if transposed:
            result[:, start:stop] = x @ rows.T
        else:
            result += x[:, start:stop] @ rows
    return result.to(x.dtype)


@times_rows.register_fake
def _(
    x: Tensor,
    packed: Tensor,
    row_scale: Tensor | None,
    bits: int,
    embed_dim: int,
    group_size: int,
    transposed: bool,
) -> Tensor:
    return x.new_empty(len(x), len(packed) if transposed else embed_dim)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, packed, row_scale, *ctx.rest = inputs
    ctx.has_row_scale = row_scale is not None
    ctx.save_for_backward(packed, *([row_scale] if ctx.has_row_scale else []))


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    packed, row_scale = (*ctx.saved_tensors, None)[:2]
    *layout, transposed = ctx.rest
    return times_rows(gradient, packed, row_scale, *layout, not transposed), *[None] * 6


times_rows.register_autograd(_backward, setup_context=_keep)


def layout_of(bits: int, embed_dim: int, group_size: int | None) -> Layout:
    """The layout of a row, checked.

    Raises:
        SizeError: `bits` is not 8 or 4, or `group_size` is below 1, wider than a row, or odd with 4 bits.
    """
    if bits not in HEADER:
        raise SizeError(f"bits must be 8 or 4, not {bits}.")
    if group_size is None:
        return Layout(bits, embed_dim, math.ceil(embed_dim * bits / 8) * 8 // bits)
    if not 1 <= group_size <= embed_dim or group_size * bits % 8:
        even = " and even, two codes to a byte" if bits == 4 else ""
        raise SizeError(f"group_size must be from 1 to embed_dim {embed_dim}{even}, not {group_size}.")
    return Layout(bits, embed_dim, group_size)


def _dtype_of(dtype: torch.dtype | str | None) -> torch.dtype:
    found = torch.get_default_dtype() if dtype is None else DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise SizeError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype}.")
    return cast(torch.dtype, found)


def _blocks(count: int, width: int, device: torch.device, *, at_least: int = 1) -> Iterator[tuple[int, int]]:
    """First and last row of blocks of about `NUMBERS_AT_ONCE` numbers."""
    step = max(1, at_least, NUMBERS_AT_ONCE.get(device.type, NUMBERS_AT_ONCE["cuda"]) // width)
    return ((start, min(start + step, count)) for start in range(0, count, step))


@torch.no_grad()
def _rows(table: TokenTable | Tensor, start: int, stop: int) -> Tensor:
    rows = table[start:stop] if isinstance(table, Tensor) else table.rows(start, stop)
    return rows.detach()


def _refuse_unsound(rows: Tensor, start: int) -> None:
    sound = rows.isfinite().all(dim=1)
    if not sound.all():
        unsound = (~sound).nonzero()
        raise ShapeError(
            f"Row {start + int(unsound[0])} holds NaN, infinity or a number too large for float32, which no code "
            f"stands for: mend it first, for instance set it to zero."
        )
