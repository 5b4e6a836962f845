"""Kernels of rows that a `Codec` describes: their numbers, and products of few tokens with them.

`embedlayer.formats.codec.Codec.decode` defines the numbers, bit for bit: each step is rounded, and no product and sum
are contracted. A row is computed in passes over a buffer that stays in the cache.
"""

from typing import Any

import numpy as np

from embedlayer.kernels.cpu.numbers import exact, narrow, number_of, reduction, word_at


@exact
def decode(
    start: int,
    stop: int,
    codes: Any,
    levels: Any,
    scale: Any,
    scale_levels: Any,
    zero: Any,
    bias: Any,
    sizes: Any,
    out: Any,
) -> None:
    """Write the numbers of the rows `start` to `stop - 1`.

    Args:
        start: First row.
        stop: Last row + 1.
        codes: Packed codes, uint8, `(N, bytes)`.
        levels: Number of each code, float32, `(2^bits,)`.
        scale: Scales, `(N, G)` or `(1, G)`: float32, bfloat16 as uint16, the bits of float16 as int16, or codes, uint8.
        scale_levels: Number of each code of a scale, float32.
        zero: Integers that are subtracted from levels, like `scale`; without rows if there are none.
        bias: Numbers that are added, like `scale`; without rows if there are none.
        sizes: Bits of a code; columns of a group; 0, 1 or 2 to round to float32, bfloat16 or float16; and for levels
            `(code ^ flip) - middle` these two, else a `flip` of -1.
        out: Result, `(N, D)`.
    """
    numbers, unpacked = _buffers(out.shape[1], codes.shape[1])
    for n in range(start, stop):
        _decode_row(n, codes, levels, scale, scale_levels, zero, bias, sizes, unpacked, numbers)
        to = out[n]
        for i in range(len(to)):
            to[i] = narrow(numbers[i], to[0])


@exact
def logits(
    start: int,
    stop: int,
    x: Any,
    codes: Any,
    levels: Any,
    scale: Any,
    scale_levels: Any,
    zero: Any,
    bias: Any,
    sizes: Any,
    out: Any,
) -> None:
    """Multiply the rows `start` to `stop - 1` by few tokens.

    Args:
        start: First row.
        stop: Last row + 1.
        x: Hidden states, float32, `(N, D)`.
        codes: See `decode`, as for the arguments up to `sizes`.
        levels: Number of each code.
        scale: Scales of groups.
        scale_levels: Number of each code of a scale.
        zero: Integers of groups that are subtracted.
        bias: Numbers of groups that are added.
        sizes: Sizes of a row.
        out: Products, float32, `(V, N)`.
    """
    numbers, unpacked = _buffers(x.shape[1], codes.shape[1])
    for row in range(start, stop):
        _decode_row(row, codes, levels, scale, scale_levels, zero, bias, sizes, unpacked, numbers)
        for n in range(len(x)):
            out[row, n] = dot(numbers, x[n])


@reduction
def dot(a: Any, b: Any) -> Any:
    """Return the sum of the products of two vectors, added in any order."""
    total = np.float32(0)
    for i in range(len(b)):
        total += a[i] * b[i]
    return total


@exact
def _buffers(width: int, row_bytes: int) -> Any:
    """Return room for the numbers of a row, and for its codes: packed, with 8 bytes more, and one to a byte."""
    return np.empty(width, np.float32), (np.zeros(row_bytes + 8, np.uint8), np.empty(width + 8, np.uint8))


@exact
def _decode_row(
    n: int,
    codes: Any,
    levels: Any,
    scale: Any,
    scale_levels: Any,
    zero: Any,
    bias: Any,
    sizes: Any,
    unpacked: Any,
    numbers: Any,
) -> None:
    """Write the numbers of row `n` in float32."""
    bits, group_size, rounding, flip, middle = sizes
    row = codes[n]
    if bits != 8:
        _unpack(row, bits, unpacked[0], unpacked[1])
        row = unpacked[1]
    _look_up(row, levels, flip, middle, numbers)
    scales, zeros = scale[min(n, len(scale) - 1)], zero[min(n, len(zero) - 1)]
    for group in range(len(scales)):
        some = numbers[group * group_size : min((group + 1) * group_size, len(numbers))]
        step = number_of(scales[group], scale_levels)
        less = np.float32(zeros[group]) if len(zero) > 0 else np.float32(0)
        for i in range(len(some)):
            some[i] = (some[i] - less) * step
    _round(numbers, rounding)
    if len(bias) > 0:
        biases = bias[min(n, len(bias) - 1)]
        for group in range(len(scales)):
            some = numbers[group * group_size : min((group + 1) * group_size, len(numbers))]
            more = number_of(biases[group], scale_levels)
            for i in range(len(some)):
                some[i] += more
        _round(numbers, rounding)


@exact
def _unpack(row: Any, bits: int, packed: Any, to: Any) -> None:
    """Write the codes of a row to bytes of their own: 8 codes are `bits` bytes of a word, low bits first."""
    packed[: len(row)] = row
    mask = np.uint64((1 << bits) - 1)
    for block in range(len(to) // 8):
        word, eight = word_at(packed, block * bits), to[8 * block : 8 * block + 8]
        for i in range(8):
            eight[i] = np.uint8((word >> np.uint64(bits * i)) & mask)


@exact
def _look_up(codes: Any, levels: Any, flip: int, middle: int, numbers: Any) -> None:
    """Write the level of each code; whole numbers are computed, which is faster."""
    if flip < 0:
        for i in range(len(numbers)):
            numbers[i] = levels[codes[i]]
    else:
        flipped, less = np.uint8(flip), np.float32(middle)
        for i in range(len(numbers)):
            numbers[i] = np.float32(codes[i] ^ flipped) - less


@exact
def _round(numbers: Any, rounding: int) -> None:
    """Round float32 numbers in place to bfloat16 for 1 and to float16 for 2; leave them as they are for 0."""
    if rounding == 1:
        for i in range(len(numbers)):
            numbers[i] = _bfloat16(numbers[i])
    if rounding == 2:
        for i in range(len(numbers)):
            numbers[i] = _float16(numbers[i])


@exact
def _bfloat16(number: Any) -> Any:
    """Return the bfloat16 number nearest to a float32 one, as float32."""
    return np.uint32(np.uint32(narrow(number, np.uint16(0))) << np.uint32(16)).view(np.float32)


@exact
def _float16(number: Any) -> Any:
    """Return the float16 number nearest to a float32 one, ties to even, as float32.

    Adding and subtracting a number whose last bit is that of the result rounds a number to it: below 2^-14 all float16
    numbers have the same last bit, above it is 2^-10 of the power of two.
    """
    bits = np.float32(number).view(np.uint32)
    power = max(np.uint32(bits & np.uint32(0x7F800000)).view(np.float32), np.float32(2.0**-14))
    bound, size = power * np.float32(1.5 * 2.0**13), np.uint32(bits & np.uint32(0x7FFFFFFF)).view(np.float32)
    rounded = (size + bound) - bound
    rounded = rounded if size < np.float32(65520) else (size if size != size else np.float32(np.inf))
    return np.uint32(np.float32(rounded).view(np.uint32) | np.uint32(bits & np.uint32(0x80000000))).view(np.float32)
