"""Kernels of rows that a `Codec` describes: their numbers, and products of few tokens with them.

`embedlayer.formats.codec.Codec.decode` defines the numbers, bit for bit: each step is rounded, and no product and sum
are contracted. A row is computed in passes over a buffer that stays in the cache.
"""

from typing import Any

import numpy as np

from embedlayer.kernels.cpu.numbers import exact, half, narrow, number_of, reduction, word_at

ROWS_AT_ONCE = 8
"""Rows that are computed at once; their numbers stay in the cache."""


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
    for first in range(start, stop, ROWS_AT_ONCE):
        rows = min(ROWS_AT_ONCE, stop - first)
        _decode_rows(first, rows, codes, levels, scale, scale_levels, zero, bias, sizes, unpacked, numbers)
        for n in range(rows):
            row, to = numbers[n], out[first + n]
            for i in range(len(to)):
                to[i] = narrow(row[i], to[0])


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
    for first in range(start, stop, ROWS_AT_ONCE):
        rows = min(ROWS_AT_ONCE, stop - first)
        _decode_rows(first, rows, codes, levels, scale, scale_levels, zero, bias, sizes, unpacked, numbers)
        multiply(numbers, x, out[first : first + rows])


@reduction
def multiply(rows: Any, x: Any, out: Any) -> None:
    """Write the products of rows `(R, D)` and tokens `(N, D)` to `out`, `(r, N)`, for its first r rows."""
    for r in range(len(out)):
        row = rows[r]
        for n in range(len(x)):
            token, total = x[n], np.float32(0)
            for i in range(len(token)):
                total += row[i] * token[i]
            out[r, n] = total


@exact
def _buffers(width: int, row_bytes: int) -> Any:
    """Allocate numbers of some rows, and their codes: packed, with 8 bytes of padding, and one code in each byte."""
    packed = np.zeros(row_bytes + 8, np.uint8)
    return np.empty((ROWS_AT_ONCE, width), np.float32), (packed, np.empty((ROWS_AT_ONCE, width + 7 & -8), np.uint8))


@exact
def _decode_rows(
    first: int,
    rows: int,
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
    """Write the numbers of `rows` rows from row `first` on in float32, in passes over all of them."""
    bits, group_size, rounding, flip, middle = sizes
    some = codes[first : first + rows]
    if bits == 4:
        _unpack_pairs(some, unpacked[1])
    elif bits != 8:
        _unpack(some, bits, unpacked[0], unpacked[1])
    if bits != 8:
        some = unpacked[1][:rows]
    _look_up(some, levels, flip, middle, numbers)
    _multiply_groups(first, rows, scale, scale_levels, zero, group_size, numbers)
    _round(rows, numbers, rounding)
    if len(bias) > 0:
        _add_groups(first, rows, bias, scale_levels, group_size, numbers)
        _round(rows, numbers, rounding)


@exact
def _unpack_pairs(rows: Any, to: Any) -> None:
    """Write codes of 4 bits to bytes of their own."""
    pairs = to.view(np.uint16)
    for n in range(len(rows)):
        row, pair = rows[n], pairs[n]
        for i in range(min(len(row), len(pair))):
            byte = np.uint16(row[i])
            pair[i] = np.uint16((byte & np.uint16(15)) | (byte & np.uint16(0xF0)) << np.uint16(4))


@exact
def _unpack(rows: Any, bits: int, packed: Any, to: Any) -> None:
    """Write the codes of rows to bytes of their own: 8 codes are `bits` bytes of a word, low bits first.

    A word is spread in three steps: into two halves of 4 codes, then four of 2, then eight of 1.
    """
    width = np.uint64(bits)
    one = np.uint64((np.uint64(1) << width) - np.uint64(1))
    two = np.uint64(one | one << width)
    four = np.uint64(two | two << np.uint64(2) * width)
    two, one = np.uint64(two * np.uint64(0x100000001)), np.uint64(one * np.uint64(0x1000100010001))
    for n in range(len(rows)):
        row, words = rows[n], to[n].view(np.uint64)
        packed[: len(row)] = row
        for block in range(len(words)):
            word = word_at(packed, block * bits)
            word = (word & four) | ((word >> np.uint64(4) * width) & four) << np.uint64(32)
            word = (word & two) | ((word >> np.uint64(2) * width) & two) << np.uint64(16)
            words[block] = (word & one) | ((word >> width) & one) << np.uint64(8)


@exact
def _look_up(rows: Any, levels: Any, flip: int, middle: int, numbers: Any) -> None:
    """Write the level of each code; whole numbers are computed, which is faster."""
    flipped, less = np.uint8(max(flip, 0)), np.float32(middle)
    for n in range(len(rows)):
        codes, to = rows[n], numbers[n]
        if flip < 0:
            for i in range(len(to)):
                to[i] = levels[codes[i]]
        else:
            for i in range(len(to)):
                to[i] = np.float32(codes[i] ^ flipped) - less


@exact
def _multiply_groups(
    first: int, rows: int, scale: Any, scale_levels: Any, zero: Any, group_size: int, numbers: Any
) -> None:
    """Subtract the integer of its group from each level, and multiply it by the scale of the group."""
    for n in range(rows):
        row = numbers[n]
        scales, zeros = scale[min(first + n, len(scale) - 1)], zero[min(first + n, len(zero) - 1)]
        for group in range(len(scales)):
            to = row[group * group_size : min((group + 1) * group_size, len(row))]
            step = number_of(scales[group], scale_levels)
            less = np.float32(zeros[group]) if len(zero) > 0 else np.float32(0)
            for i in range(len(to)):
                to[i] = (to[i] - less) * step


@exact
def _add_groups(first: int, rows: int, bias: Any, scale_levels: Any, group_size: int, numbers: Any) -> None:
    """Add the number of its group to each product."""
    for n in range(rows):
        row, biases = numbers[n], bias[min(first + n, len(bias) - 1)]
        for group in range(len(biases)):
            to = row[group * group_size : min((group + 1) * group_size, len(row))]
            more = number_of(biases[group], scale_levels)
            for i in range(len(to)):
                to[i] += more


@exact
def _round(rows: int, numbers: Any, rounding: int) -> None:
    """Round float32 numbers in place to bfloat16 for 1 and to float16 for 2; leave them as they are for 0."""
    if rounding != 0:
        for n in range(rows):
            to = numbers[n]
            if rounding == 1:
                for i in range(len(to)):
                    to[i] = _bfloat16(to[i])
            else:
                for i in range(len(to)):
                    to[i] = _float16(to[i])


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


@exact
def unpack_super_blocks(start: int, stop: int, packed: Any, bits: int, codes: Any, scale: Any, bias: Any) -> None:
    """Write codes, scales and biases of rows in blocks of 256 columns: GGUF's `Q4_K`, `Q5_K` and `Q6_K`.

    `embedlayer.formats.gguf` defines them in torch operators.

    Args:
        start: First row.
        stop: Last row + 1.
        packed: Stored rows, uint8, `(N, bytes)`.
        bits: Bits of a code: 4, 5 or 6.
        codes: Codes, uint8, `(N, D)`; with 6 bits 32 was added.
        scale: Scales of groups, float32, `(N, D / 32)`, with 6 bits `(N, D / 16)`.
        bias: Numbers that are added, like `scale`; with 6 bits not written.
    """
    block_bytes = packed.shape[1] // (codes.shape[1] // 256)
    for n in range(start, stop):
        for place in range(codes.shape[1] // 256):
            block = packed[n, place * block_bytes : (place + 1) * block_bytes]
            to = codes[n, 256 * place : 256 * place + 256]
            if bits == 6:
                _unpack_6_bits(block, to, scale[n, 16 * place : 16 * place + 16])
            else:
                eight = slice(8 * place, 8 * place + 8)
                _unpack_5_bits(block, bits, to, scale[n, eight], bias[n, eight])


@exact
def _unpack_5_bits(block: Any, bits: int, codes: Any, scale: Any, bias: Any) -> None:
    """Unpack a block of `Q4_K`, or with a fifth bit of `Q5_K`."""
    step = half(np.uint16(block[0]) | np.uint16(block[1]) << np.uint16(8))
    less = half(np.uint16(block[2]) | np.uint16(block[3]) << np.uint16(8))
    for i in range(4):
        a, b, c = block[4 + i], block[8 + i], block[12 + i]
        scale[i], bias[i] = step * np.float32(a & 63), -(less * np.float32(b & 63))
        scale[i + 4] = step * np.float32((c & 15) | ((a >> 2) & 48))
        bias[i + 4] = -(less * np.float32((c >> 4) | ((b >> 2) & 48)))
    lows, high = block[len(block) - 128 :], block[16:48]
    for group in range(8):
        low, to = lows[32 * (group // 2) : 32 * (group // 2) + 32], codes[32 * group : 32 * group + 32]
        shift, more = np.uint8(4 * (group % 2)), np.uint8(group)
        if bits == 4:
            for i in range(len(to)):
                to[i] = np.uint8(low[i] >> shift) & np.uint8(15)
        else:
            for i in range(len(to)):
                fifth = np.uint8(np.uint8(high[i] >> more) & np.uint8(1)) << np.uint8(4)
                to[i] = np.uint8(np.uint8(low[i] >> shift) & np.uint8(15)) | np.uint8(fifth)


@exact
def _unpack_6_bits(block: Any, codes: Any, scale: Any) -> None:
    """Unpack a block of `Q6_K`."""
    step = half(np.uint16(block[208]) | np.uint16(block[209]) << np.uint16(8))
    for i in range(16):
        scale[i] = step * np.float32(np.int8(block[192 + i]))
    for group in range(8):
        side, part = group // 4, group % 4
        first, last = 64 * side + 32 * (part % 2), 128 + 32 * side
        low, high, to = block[first : first + 32], block[last : last + 32], codes[32 * group : 32 * group + 32]
        shift, more = np.uint8(4 * (part // 2)), np.uint8(2 * part)
        for i in range(len(to)):
            highest = np.uint8(np.uint8(high[i] >> more) & np.uint8(3)) << np.uint8(4)
            to[i] = np.uint8(np.uint8(low[i] >> shift) & np.uint8(15)) | np.uint8(highest)
