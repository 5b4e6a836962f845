"""Layouts of the stored rows of a quantised table: how the bytes of a group of columns become numbers."""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from embedlayer.core.errors import SizeError
from embedlayer.core.torch_state import is_exporting, is_transformed
from embedlayer.kernels.cpu import quantized as kernels
from embedlayer.kernels.kernel import Kernel
from embedlayer.saving import Described

BLOCK = 32
"""Columns of a block of GGUF's types Q4_0 and Q8_0."""


class RowLayout(Described, ABC):
    """Abstract base class of layouts. A group of columns is stored as codes and a header: its step, or step and offset.

    Attributes:
        has_torch_kernels: Whether PyTorch's quantised embedding-bag kernels read the layout.
    """

    has_torch_kernels: bool = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def type_name(self, bits: int) -> str:
        """Return the name of a table of this layout, as `embedlayer.compress.compress_table` takes it: `"int4"`."""

    @abstractmethod
    def group_size(self, bits: int, embed_dim: int, requested: int | None) -> int:
        """Check the requested number of columns in a group, and return the number that is stored."""

    @abstractmethod
    def header(self, bits: int) -> tuple[torch.dtype, int]:
        """Return the data type and the number of the floating-point numbers in the header of a group."""

    @abstractmethod
    def largest(self, bits: int) -> float:
        """Return the largest absolute value that every number of a group may have."""

    @abstractmethod
    def has_row_scale(self, bits: int) -> bool:
        """Return whether each row has a float32 scale beside its bytes."""

    @abstractmethod
    def decode(self, groups: UInt8[Tensor, "N bytes"], bits: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the uint8 codes `(N, group_size)` and the float32 steps and offsets `(N, 1)` of N stored groups."""

    @abstractmethod
    def encode(
        self, codes: UInt8[Tensor, "N group_size"], step: Tensor, offset: Tensor, bits: int
    ) -> UInt8[Tensor, "N bytes"]:
        """Return the bytes of N groups, the inverse of `decode`. Steps and offsets are in the header's data type."""

    @abstractmethod
    def kernel(self, row_format: "RowFormat") -> tuple[Kernel, tuple[int, ...]]:
        """Return the compiled kernel that dequantises rows, and the numbers that it needs to know about the layout."""


class RowFormat(NamedTuple):
    """Sizes of a stored row of a quantised table: its groups of columns, one after the other."""

    # If `group_size` does not divide `embed_dim`, the last group is filled up with columns that are never read.

    bits: int
    embed_dim: int
    group_size: int
    layout_index: int = 0  # place in `LAYOUTS`: custom operators take numbers only

    # no properties: graphs of torch 2.9 read none of a named tuple
    def layout(self) -> RowLayout:
        return LAYOUTS[self.layout_index]

    def groups(self) -> int:
        """Return the number of groups in a row, G."""
        return math.ceil(self.embed_dim / self.group_size)

    def code_bytes(self) -> int:
        """Return the number of bytes that the codes of one group take."""
        return self.group_size * self.bits // 8

    def group_bytes(self) -> int:
        """Return the number of bytes of a stored group, codes and header."""
        dtype, count = self.layout().header(self.bits)
        return self.code_bytes() + count * dtype.itemsize

    def row_bytes(self) -> int:
        """Return the number of bytes of a stored row, which is the width of `QuantizedEmbedding.packed`."""
        return self.groups() * self.group_bytes()

    def decode(self, packed: UInt8[Tensor, "N bytes"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the codes, steps and offsets of all groups of N stored rows, as `RowLayout.decode` does."""
        return self.layout().decode(packed.reshape(packed.shape[0] * self.groups(), self.group_bytes()), self.bits)


class FusedRows(RowLayout):
    """The default layout: the codes of a group, then its step and its offset."""

    # The rows of FBGEMM's `FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf`, as of PyTorch's `embedding_bag_4bit_prepack`.

    has_torch_kernels: bool = True

    def type_name(self, bits: int) -> str:
        return f"int{bits}"

    def group_size(self, bits: int, embed_dim: int, requested: int | None) -> int:
        """Return the requested size, or for `None` that of a whole row, with 4 bits rounded up to an even number."""
        if requested is None:
            return math.ceil(embed_dim * bits / 8) * 8 // bits
        if not 1 <= requested <= embed_dim or requested * bits % 8:
            even = " and even, two codes to a byte" if bits == 4 else ""
            raise SizeError(f"group_size must be from 1 to embed_dim {embed_dim}{even}, not {requested}.")
        return requested

    def header(self, bits: int) -> tuple[torch.dtype, int]:
        """Return the type of step and offset: float32 with 8 bits, float16 with 4."""
        return (torch.float32 if bits == 8 else torch.float16), 2

    def largest(self, bits: int) -> float:
        return torch.finfo(torch.float32).max

    def has_row_scale(self, bits: int) -> bool:
        """Return whether step and offset are relative to the largest absolute value of a row: with 4 bits."""
        return bits == 4

    def decode(self, groups: UInt8[Tensor, "N bytes"], bits: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, steps and offsets. With 4 bits a byte is two codes of adjacent columns, the first one low."""
        dtype, count = self.header(bits)
        code_bytes = groups.shape[1] - count * dtype.itemsize
        codes = groups[:, :code_bytes]
        step, offset = floats(groups[:, code_bytes:], dtype).split(1, dim=1)
        if bits == 4:
            codes = torch.stack([codes % 16, codes // 16], dim=-1).flatten(1)
        return codes, step, offset

    def encode(
        self, codes: UInt8[Tensor, "N group_size"], step: Tensor, offset: Tensor, bits: int
    ) -> UInt8[Tensor, "N bytes"]:
        if bits == 4:
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        return torch.cat([codes, torch.cat([step, offset], dim=1).view(torch.uint8)], dim=1)

    def kernel(self, row_format: RowFormat) -> tuple[Kernel, tuple[int, ...]]:
        """Return the kernel of these bits, the group size, and the bytes of a group."""
        return FUSED_KERNELS[row_format.bits], (row_format.group_size, row_format.group_bytes())


class GGUFBlocks(RowLayout):
    """Blocks of 32 columns with one float16 scale and no offset, byte for byte as GGUF stores the types Q4_0 and Q8_0.

    With 4 bits `value_j = step * (code_j - 8)`; byte i has the codes of columns i, low, and i + 16, high. With 8 bits
    `value_j = step * code_j` with signed codes. In memory codes are shifted to `0..2^bits - 1`, so the offset is
    `-2^(bits - 1) * step`; a step may be negative. Zero is always one of the levels. Sums and products are exact in
    float32: all readers get the same bits.

    A row has `18 D / 32` bytes with 4 bits and `34 D / 32` with 8. Other programs read a table only if D is a multiple
    of 32.

    Example:
        >>> table = QuantizedEmbedding(100, 64, bits=4, layout=GGUFBlocks())
        >>> table.packed.shape, table.row_scale
        (torch.Size([100, 36]), None)

    Reference: `block_q4_0` and `block_q8_0` of ggml-common.h in llama.cpp. We differ in the scale, which minimises the
    squared error of a block.
    """

    def type_name(self, bits: int) -> str:
        """Return `"q8_0"` or `"q4_0"`."""
        return f"q{bits}_0"

    def group_size(self, bits: int, embed_dim: int, requested: int | None) -> int:
        """Return 32."""
        if requested not in (None, BLOCK):
            raise SizeError(f"GGUFBlocks has groups of {BLOCK} columns, not of {requested}: leave group_size out.")
        return BLOCK

    def header(self, bits: int) -> tuple[torch.dtype, int]:
        """Return the type of the scale, float16."""
        return torch.float16, 1

    def largest(self, bits: int) -> float:
        """Return the largest float16 number times `2^(bits - 1) - 1`."""
        return torch.finfo(torch.float16).max * ((1 << (bits - 1)) - 1)

    def has_row_scale(self, bits: int) -> bool:
        """Return `False`: the scale of a block is absolute."""
        return False

    def decode(self, groups: UInt8[Tensor, "N bytes"], bits: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes shifted to `0..2^bits - 1`, steps, and the offsets that undo the shift."""
        step, codes = floats(groups[:, :2], torch.float16), groups[:, 2:]
        codes = torch.cat([codes % 16, codes // 16], dim=1) if bits == 4 else codes ^ 128
        return codes, step, -float(1 << (bits - 1)) * step

    def encode(
        self, codes: UInt8[Tensor, "N group_size"], step: Tensor, offset: Tensor, bits: int
    ) -> UInt8[Tensor, "N bytes"]:
        """Return the bytes of N blocks. The offset is not stored."""
        codes = codes[:, : BLOCK // 2] | codes[:, BLOCK // 2 :] << 4 if bits == 4 else codes ^ 128
        return torch.cat([step.view(torch.uint8), codes], dim=1)

    def kernel(self, row_format: RowFormat) -> tuple[Kernel, tuple[int, ...]]:
        """Return the kernel of blocks, and the bits of a code."""
        return kernels.dequantise_blocks, (row_format.bits,)


LAYOUTS: tuple[RowLayout, ...] = (FusedRows(), GGUFBlocks())
"""The layouts, in the order of `RowFormat.layout_index`."""

FUSED_KERNELS = {8: kernels.dequantise_8_bits, 4: kernels.dequantise_4_bits}


def row_format_of(bits: int, embed_dim: int, group_size: int | None, layout: RowLayout | None = None) -> RowFormat:
    """Return the sizes of a stored row for these options of a `QuantizedEmbedding`."""
    if bits not in FUSED_KERNELS:
        raise SizeError(f"bits must be 8 or 4, not {bits}.")
    kinds = [type(each) for each in LAYOUTS]
    if layout is not None and type(layout) not in kinds:
        raise SizeError(f"layout must be one of {', '.join(f'{each.__name__}()' for each in kinds)}, not {layout!r}.")
    index = 0 if layout is None else kinds.index(type(layout))
    return RowFormat(bits, embed_dim, LAYOUTS[index].group_size(bits, embed_dim, group_size), index)


def floats(stored: UInt8[Tensor, "N bytes"], dtype: torch.dtype) -> Float[Tensor, "N numbers"]:
    """Reinterpret little-endian bytes as finite numbers of `dtype`, and return them in float32."""
    # Exports and transforms compute it from sign, exponent and fraction: ONNX cannot reinterpret bytes, nor can `vmap`.
    stored = stored.clone(memory_format=torch.contiguous_format)  # aligned: a slice of one row need not be
    if not is_exporting() and not is_transformed(stored):
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
