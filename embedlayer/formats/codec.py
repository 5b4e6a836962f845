"""The codec of stored rows: packed codes, the numbers that codes stand for, and the scales of groups of columns."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device="cpu")
"""Numbers of the 16 codes of FP4: a sign, two bits of exponent and one of fraction, low bits last."""

_E2M3 = torch.tensor(
    [code / 8 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 1) for code in range(32)],
    device="cpu",
)

E2M3 = torch.cat([_E2M3, -_E2M3])
"""Numbers of the 64 codes of FP6 E2M3."""

E4M3 = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).to(torch.float32)
"""Numbers of the 256 codes of FP8 E4M3."""

E8M0 = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e8m0fnu).to(torch.float32)
"""Numbers of the 256 codes of E8M0: powers of two, from 2^-127; the last one is NaN."""


def unsigned(bits: int) -> Float[Tensor, " levels"]:
    """Return the numbers of codes from 0: `0, 1, ..., 2^bits - 1`."""
    return torch.arange(2.0**bits, device="cpu")


def shifted(bits: int) -> Float[Tensor, " levels"]:
    """Return the numbers of codes to which `2^(bits - 1)` was added: `-2^(bits - 1), ..., 2^(bits - 1) - 1`."""
    return unsigned(bits) - 2.0 ** (bits - 1)


def signed(bits: int) -> Float[Tensor, " levels"]:
    """Return the numbers of codes in two's complement: `0, ..., 2^(bits - 1) - 1, -2^(bits - 1), ..., -1`."""
    return shifted(bits).roll(2 ** (bits - 1))


class Codec(NamedTuple):
    """N rows of D numbers as a compiled kernel reads them: `number = (levels[code] - zero) * scale * factor + bias`.

    `scale`, `zero` and `bias` are those of the group of the column: column j belongs to group `j // group_size`. The
    tensors are views of the stored ones wherever these have a row per token; none is a copy in floating point. They may
    have any strides, also 0 for a number that all rows share, but bytes of a row are adjacent.

    Each step is computed in float32. Scales that are numbers, their products and the result are rounded to `rounding`.
    `decode` is the definition.

    Attributes:
        codes: Codes, uint8, `(N, bytes)`: the codes of a row follow each other, low bits first.
        bits: Bits of a code, 1 to 8.
        levels: Number of each code, float32, `(2^bits,)`.
        scale: Scale of each group, `(N, G)`: float32, bfloat16 or float16, or uint8 with `scale_levels`.
        group_size: Columns of a group; the last group of a row may be cut short.
        embed_dim: Columns of a row, D.
        rounding: Data type to which numbers are rounded: float32, bfloat16 or float16.
        scale_levels: Number of each code of a scale, float32, `(256,)`; `None` where scales are numbers.
        zero: Integer that is subtracted from the level, `(N, G)`, of any data type; `None` for 0.
        bias: Number that is added to the product, `(N, G)`, of the data type of `scale`; `None` for 0.
        factor: Factor of all products.
    """

    codes: UInt8[Tensor, "N bytes"]
    bits: int
    levels: Float[Tensor, " levels"]
    scale: Tensor
    group_size: int
    embed_dim: int
    rounding: torch.dtype
    scale_levels: Tensor | None = None
    zero: Tensor | None = None
    bias: Tensor | None = None
    factor: float = 1.0

    def scales(self) -> Float[Tensor, "N G"]:
        """Return the scales in float32."""
        if self.scale_levels is None:
            return self.scale.to(self.rounding).to(torch.float32)
        return self.scale_levels.to(self.scale.device)[self.scale.int()]

    def whole_numbers(self) -> tuple[int, int] | None:
        """Return `flip` and `middle` if the levels are `(code ^ flip) - middle`, as of integers; else `None`."""
        half = 1 << (self.bits - 1)
        for numbers, flip, middle in ((unsigned, 0, 0), (shifted, 0, half), (signed, half, half)):
            if self.levels.device.type == "cpu" and torch.equal(self.levels, numbers(self.bits)):
                return flip, middle
        return None

    def decode(self) -> Float[Tensor, "N D"]:
        """Return the numbers of all rows in the data type `rounding`, by plain operators."""
        codes = unpack(self.codes, self.bits, self.embed_dim)
        integers = None if torch.compiler.is_compiling() else self.whole_numbers()  # a graph cannot ask for values
        if integers is None:
            numbers = self.levels.to(codes.device)[codes.int()]
        else:  # no copy to the device, for which the host would wait
            numbers = (codes ^ integers[0]).to(torch.float32) - integers[1]
        if self.zero is not None:
            numbers = numbers - self._of_columns(self.zero)
        numbers = (numbers * self._of_columns(self.scales())).to(self.rounding)
        if self.factor != 1:
            numbers = numbers.to(torch.float32) * self.factor
        if self.bias is not None:
            numbers = numbers.to(torch.float32) + self._of_columns(self.bias)
        return numbers.to(self.rounding)

    def _of_columns(self, numbers: Tensor) -> Float[Tensor, "N D"]:
        return numbers.to(torch.float32).repeat_interleave(self.group_size, dim=1)[:, : self.embed_dim]


class SuperBlocks(NamedTuple):
    """Rows in GGUF's blocks of 256 columns as a compiled kernel reads them: `Q4_K`, `Q5_K` or `Q6_K`.

    The package `gguf` defines the numbers.

    Attributes:
        codes: Blocks of a row, uint8, `(N, bytes)`.
        bits: Bits of a code: 4, 5 or 6.
        embed_dim: Columns of a row, D.
    """

    codes: UInt8[Tensor, "N bytes"]
    bits: int
    embed_dim: int


class BlockFloats(NamedTuple):
    """A format of small floating-point codes in groups, each with a scale that is itself a code."""

    bits: int
    levels: Tensor
    group_size: int
    scale_levels: Tensor

    def codec(
        self, codes: Tensor, scales: Tensor, embed_dim: int, rounding: torch.dtype, divisor: Tensor | None = None
    ) -> Codec:
        """Return rows of packed codes as a compiled kernel reads them."""
        levels = self.scale_levels if divisor is None else self.scale_levels.to(divisor.device) / divisor
        stored = codes.view(torch.uint8), scales.view(torch.uint8)
        return Codec(stored[0], self.bits, self.levels, stored[1], self.group_size, embed_dim, rounding, levels)

    def encode(self, numbers: Float[Tensor, "N D"], *, ties_to_even: bool = True) -> UInt8[Tensor, "N bytes"]:
        """Return packed codes of the nearest levels of numbers."""
        largest = float(self.levels[self.levels.isfinite()].max())
        numbers = numbers.clamp(-largest, largest)
        if self.bits == 8:
            return numbers.to(torch.float8_e4m3fn).view(torch.uint8)
        half = len(self.levels) // 2
        middles = ((self.levels[: half - 1] + self.levels[1:half]) / 2).to(numbers.device)
        codes = torch.bucketize(numbers.abs(), middles)
        sign = numbers.signbit()
        if ties_to_even:
            codes = codes.where(codes % 2 == 0, torch.bucketize(numbers.abs(), middles, right=True))
        else:
            sign &= codes != 0
        return pack((codes + half * sign).to(torch.uint8), self.bits)


BLOCK_FLOATS = {
    "nvfp4": BlockFloats(4, E2M1, 16, E4M3),
    "mxfp4": BlockFloats(4, E2M1, 32, E8M0),
    "mxfp6": BlockFloats(6, E2M3, 32, E8M0),
    "mxfp8": BlockFloats(8, E4M3, 32, E8M0),
}
"""Formats of floating-point codes in groups, by name.

Reference: OCP Microscaling Formats (MX) Specification 1.0, and NVIDIA's NVFP4.
"""


def rounding_range(levels: Float[Tensor, " levels"]) -> tuple[float, float]:
    """Return the smallest and the largest level, each moved outwards by half the distance to the next one."""
    ordered = levels[levels.isfinite()].sort().values.tolist()
    return ordered[0] - (ordered[1] - ordered[0]) / 2, ordered[-1] + (ordered[-1] - ordered[-2]) / 2


def pack(codes: UInt8[Tensor, "N count"], bits: int, dtype: torch.dtype = torch.uint8) -> Shaped[Tensor, "N words"]:
    """Return rows of codes packed as `unpack` reads them, the last word of a row filled up with zeros."""
    count, per_block = codes.shape[1], 8 // bits if 8 % bits == 0 else 8  # codes in a whole number of bytes
    wide = codes if 8 % bits == 0 else codes.long()
    places = bits * torch.arange(per_block, dtype=wide.dtype, device=codes.device)
    blocks = F.pad(wide, (0, -count % per_block)).unflatten(1, (-1, per_block)) << places
    packed = blocks.sum(-1, dtype=wide.dtype)
    if 8 % bits:
        packed = (packed.unsqueeze(-1) >> 8 * torch.arange(bits, device=codes.device)).to(torch.uint8).flatten(1)
    size = -(-count * bits // 8)
    words: Tensor = packed.new_zeros(packed.shape[0], -(-size // dtype.itemsize) * dtype.itemsize)
    words[:, :size] = packed[:, :size]
    return words.view(dtype)


def unpack(codes: UInt8[Tensor, "N bytes"], bits: int, count: int) -> UInt8[Tensor, "N count"]:
    """Return the first `count` codes of packed rows: code i has the bits from `i * bits` on, low bits first."""
    if bits == 8:
        return codes[:, :count]
    starts = torch.arange(0, 8 if 8 % bits == 0 else 8 * bits, bits, device=codes.device)
    if 8 % bits == 0:
        words = codes.unsqueeze(-1) >> starts.to(torch.uint8)
    else:
        blocks = F.pad(codes, (0, -codes.shape[1] % bits)).unflatten(1, (-1, bits)).int()  # 8 codes in `bits` bytes
        following = (starts // 8 + 1).clamp(max=bits - 1)  # the last code ends with its byte
        words = (blocks[..., starts // 8] | blocks[..., following] << 8) >> starts % 8
    unpacked: Tensor = (words & (1 << bits) - 1).to(torch.uint8).flatten(1)[:, :count]
    return unpacked
