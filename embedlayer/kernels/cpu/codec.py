"""Kernels of rows that a `Codec` describes: their numbers, and products of few tokens with them.

`embedlayer.formats.codec.Codec.decode` defines the numbers, bit for bit: each step is rounded, and no product and sum
are contracted. Some rows are computed at once, in passes over a buffer that stays in the cache. No function is called
for a single row: passing arrays takes as long as computing one.

Numbers of groups and results are passed as bytes, with the indices of their types in `NUMBER_TYPES`: a kernel is
compiled once for all formats.
"""

from typing import Any

import numpy as np

from embedlayer.kernels.cpu.numbers import exact, half, narrow, prefetch, reduction, rounded, widen, word_at
from embedlayer.kernels.kernel import NUMBER_TYPES

FLOAT32, BFLOAT16, FLOAT16, CODES, INT8, INT16 = range(len(NUMBER_TYPES))
NUMBERS_AT_ONCE = 1 << 14
"""Numbers of the rows that are computed at once, at least one row."""


@exact
def read_rows(start: int, stop: int, ids: Any, x: Any, stored: Any, sizes: Any, out: Any, out_type: int) -> None:
    """Write the numbers of the rows of the IDs at places `start` to `stop - 1`; without IDs, of the rows themselves.

    With tokens, write the products of these rows and the tokens. One function does both: it is compiled once.

    - `ids`: IDs that were checked, `(N,)`, or an empty array.
    - `x`: hidden states of few tokens, float32, `(T, D)`; none for the numbers.
    - `stored`: packed codes, uint8, `(V, bytes)`. Number of each code, float32; for codes of 4 bits whose numbers are
      not whole, the two numbers of each byte. Bytes of scales of all rows or of one that all share. Number of each code
      of a scale, float32. Bytes of integers that are subtracted from levels, and of numbers that are added, like
      scales; without rows if there are none. Factor of products, float32, `(1,)`.
    - `sizes`: bits of a code; columns of a group; groups of a row; for levels `(code ^ flip) - middle` these two, else
      a `flip` of -1; types of scales and of what is added, and of what is subtracted; and type to which numbers are
      rounded.
    - `out`: bytes of the numbers, `(N, D)`, or of the products, `(N, T)`.
    - `out_type`: type of the numbers, float32 or bfloat16; of products float32.
    """
    codes, levels, scale, scale_levels, zero, bias, factor = stored
    bits, group_size, groups, flip, middle, scale_type, zero_type, rounding = sizes
    buffers, width = _buffers(x.shape[1], codes.shape[1]), x.shape[1]
    numbers, order, _, packed, unpacked = buffers
    scales, of_groups = np.empty((len(numbers), groups), np.float32), np.empty((len(numbers), groups), np.float32)
    for first in range(start, stop, len(numbers)):
        places = _places(first, stop, ids, codes, buffers)
        if bits == 4 and flip < 0:
            _look_up(places, codes, levels.view(np.int64), numbers.view(np.int64))
        elif bits == 8:
            _write_levels(places, codes, levels, flip, middle, numbers)
        else:
            if bits == 4:
                _unpack_pairs(places, codes, unpacked.view(np.uint16))
            else:
                _unpack(places, codes, bits, packed, unpacked.view(np.uint64))
            _write_levels(order[: len(places)], unpacked, levels, flip, middle, numbers)
        rows = numbers[: len(places)]
        _read_groups(places, scale, scale_type, scale_levels, scales)
        if scale_type != CODES:
            _round(scales, rounding)
        _read_groups(places, zero, zero_type, scale_levels, of_groups)
        _multiply_groups(rows, scales, of_groups, len(zero) > 0, group_size, width)
        if len(bias) > 0 or factor[0] != 1:
            _round(rows, rounding)
            _read_groups(places, bias, scale_type, scale_levels, of_groups)
            _add_groups(rows, of_groups, len(bias) > 0, factor[0], group_size, width)
        if rounding != out_type:  # else they are rounded when they are stored
            _round(rows, rounding)
        _store(numbers, x, out[first : first + len(places)], out_type)


@exact
def read_super_blocks(start: int, stop: int, ids: Any, x: Any, packed: Any, bits: int, out: Any, out_type: int) -> None:
    """Write numbers or products as `read_rows` does, of blocks of 256 columns: GGUF's `Q4_K`, `Q5_K` and `Q6_K`.

    `packed` are stored rows, uint8, `(V, bytes)`, with codes of 4, 5 or 6 bits; the other arguments are as there.
    """
    buffers = _buffers(x.shape[1], 0)
    for first in range(start, stop, len(buffers[0])):
        places = _places(first, stop, ids, packed, buffers)
        _decode_blocks(places, packed, bits, buffers[0])
        _store(buffers[0], x, out[first : first + len(places)], out_type)


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
    """Allocate memory for the rows that are computed at once; columns are padded to a multiple of 8.

    Returns:
        Numbers, float32, `(R, D)`; the integers from 0 to R - 1; places of rows; packed codes of a row, with 8 bytes of
        padding; and codes, a byte for each, `(R, D)`.
    """
    rows, padded = max(1, NUMBERS_AT_ONCE // width), width + 7 & -8
    numbers, codes = np.empty((rows, padded), np.float32), np.empty((rows, padded), np.uint8)
    order = np.empty(rows, np.int64)
    for row in range(rows):
        order[row] = row
    return numbers, order, np.empty(rows, np.int64), np.empty(row_bytes + 8, np.uint8), codes


@exact
def _places(first: int, stop: int, ids: Any, codes: Any, buffers: Any) -> Any:
    """Return the rows that are computed at once from place `first` on, and load those after them into the cache."""
    places, count = buffers[2][: stop - first], len(ids) if len(ids) > 0 else len(codes)
    for n in range(len(places)):
        following = min(first + len(places) + n, count - 1)
        if len(ids) > 0:
            places[n], following = ids[first + n], ids[following]
        else:
            places[n] = first + n
        prefetch(codes[following])
    return places


@exact
def _store(rows: Any, x: Any, out: Any, out_type: int) -> None:
    """Write float32 numbers, or their products with tokens, to the bytes of numbers of a type."""
    if len(x) > 0:
        multiply(rows, x, out.view(np.float32))
    elif out_type == BFLOAT16:
        _narrow_rows(rows, out.view(np.uint16))
    else:
        _narrow_rows(rows, out.view(np.float32))


@exact
def _narrow_rows(rows: Any, out: Any) -> None:
    for n in range(len(out)):
        row, to = rows[n], out[n]
        for i in range(len(to)):
            to[i] = narrow(row[i], to[0])


@exact
def _read_groups(places: Any, stored: Any, number_type: int, levels: Any, to: Any) -> None:
    """Write the numbers of the groups of some rows, or of the only row, in float32; nothing if none are stored."""
    for r in range(len(places) if len(stored) > 0 else 0):
        row, numbers = stored[min(places[r], len(stored) - 1)], to[r]
        for group in range(len(numbers)):
            if number_type == CODES:
                numbers[group] = levels[row[group]]
            elif number_type == INT8:
                numbers[group] = np.float32(np.int8(row[group]))
            elif number_type == FLOAT32:
                low = np.uint32(row[4 * group]) | np.uint32(row[4 * group + 1]) << np.uint32(8)
                high = np.uint32(row[4 * group + 2]) | np.uint32(row[4 * group + 3]) << np.uint32(8)
                numbers[group] = np.uint32(low | high << np.uint32(16)).view(np.float32)
            else:
                bits = np.uint16(np.uint16(row[2 * group]) | np.uint16(row[2 * group + 1]) << np.uint16(8))
                if number_type == BFLOAT16:
                    numbers[group] = widen(bits)
                elif number_type == FLOAT16:
                    numbers[group] = half(bits)
                else:
                    numbers[group] = np.float32(np.int16(bits))


@exact
def _round(rows: Any, number_type: int) -> None:
    if number_type == BFLOAT16:
        _round_rows(rows, np.uint16(0))
    elif number_type == FLOAT16:
        _round_rows(rows, np.int16(0))


@exact
def _round_rows(rows: Any, like: Any) -> None:
    for r in range(len(rows)):
        row = rows[r]
        for i in range(len(row)):
            row[i] = rounded(row[i], like)


@exact
def _multiply_groups(rows: Any, scales: Any, zeros: Any, has_zeros: bool, group_size: int, width: int) -> None:
    """Subtract the integer of its group from each level, and multiply it by the scale of the group."""
    for r in range(len(rows)):
        row, less = rows[r], np.float32(0)
        for group in range(scales.shape[1]):
            to, step = row[group * group_size : min((group + 1) * group_size, width)], scales[r, group]
            if has_zeros:
                less = zeros[r, group]
            for i in range(len(to)):
                to[i] = (to[i] - less) * step


@exact
def _add_groups(rows: Any, biases: Any, has_biases: bool, factor: float, group_size: int, width: int) -> None:
    """Multiply each product by a factor, and add the number of its group."""
    for r in range(len(rows)):
        row, more = rows[r], np.float32(-0.0)
        for group in range(biases.shape[1]):
            to = row[group * group_size : min((group + 1) * group_size, width)]
            if has_biases:
                more = biases[r, group]
            for i in range(len(to)):
                to[i] = to[i] * factor + more


@exact
def _unpack_pairs(places: Any, codes: Any, unpacked: Any) -> None:
    """Write codes of 4 bits to bytes of their own, two at once."""
    for n in range(len(places)):
        row, to = codes[places[n]], unpacked[n]
        for i in range(min(len(row), len(to))):
            byte = np.uint16(row[i])
            to[i] = np.uint16((byte & np.uint16(15)) | (byte & np.uint16(0xF0)) << np.uint16(4))


@exact
def _unpack(places: Any, codes: Any, bits: int, packed: Any, unpacked: Any) -> None:
    """Write the codes of rows to bytes of their own: 8 codes are `bits` bytes of a word, low bits first."""
    width = np.uint64(bits)
    one = np.uint64((np.uint64(1) << width) - np.uint64(1))
    two = np.uint64(one | one << width)
    four = np.uint64(two | two << np.uint64(2) * width)
    two, one = np.uint64(two * np.uint64(0x100000001)), np.uint64(one * np.uint64(0x1000100010001))
    for n in range(len(places)):
        row, words = codes[places[n]], unpacked[n]
        for i in range(len(row)):  # an assignment to a slice takes longer
            packed[i] = row[i]
        for block in range(len(words)):
            words[block] = word_at(packed, block * bits)
        for block in range(len(words)):
            word = words[block]
            word = (word & four) | ((word >> np.uint64(4) * width) & four) << np.uint64(32)
            word = (word & two) | ((word >> np.uint64(2) * width) & two) << np.uint64(16)
            words[block] = (word & one) | ((word >> width) & one) << np.uint64(8)


@exact
def _write_levels(places: Any, codes: Any, levels: Any, flip: int, middle: int, numbers: Any) -> None:
    """Write the level of each code, a byte; whole numbers are computed, which is faster."""
    if flip < 0:
        _look_up(places, codes, levels, numbers)
        return
    flipped, less = np.uint8(flip), np.float32(middle)
    for n in range(len(places)):
        row, to = codes[places[n]], numbers[n]
        for i in range(min(len(row), len(to))):
            to[i] = np.float32(row[i] ^ flipped) - less


@exact
def _look_up(places: Any, codes: Any, levels: Any, numbers: Any) -> None:
    """Write the entry of each byte in a table."""
    for n in range(len(places)):
        row, to = codes[places[n]], numbers[n]
        for i in range(min(len(row), len(to))):
            to[i] = levels[row[i]]


@exact
def _decode_blocks(places: Any, packed: Any, bits: int, numbers: Any) -> None:
    """Write the numbers of some rows of super-blocks in float32."""
    count = numbers.shape[1] // 256
    size = packed.shape[1] // count
    for n in range(len(places)):
        for place in range(count):
            block, to = (
                packed[places[n], place * size : (place + 1) * size],
                numbers[n, 256 * place : 256 * place + 256],
            )
            if bits == 6:
                _decode_6_bits(block, to)
            else:
                _decode_5_bits(block, bits, to)


@exact
def _decode_5_bits(block: Any, bits: int, numbers: Any) -> None:
    """Write the numbers of a block of `Q4_K`, or with a fifth bit of `Q5_K`.

    The scales and minima of 8 groups are 6 bits each: four bytes have the low bits of four scales, four those of
    minima, with the high bits of the others; four bytes have the low bits of these.
    """
    step = half(np.uint16(block[0]) | np.uint16(block[1]) << np.uint16(8))
    less = half(np.uint16(block[2]) | np.uint16(block[3]) << np.uint16(8))
    lows, high = block[len(block) - 128 :], block[16:48]
    for group in range(8):
        low, to = lows[32 * (group // 2) : 32 * (group // 2) + 32], numbers[32 * group : 32 * group + 32]
        a, b, c = block[4 + group % 4], block[8 + group % 4], block[12 + group % 4]
        scale, minimum = step * np.float32(a & 63), less * np.float32(b & 63)
        if group > 3:
            scale = step * np.float32((c & 15) | ((a >> 2) & 48))
            minimum = less * np.float32((c >> 4) | ((b >> 2) & 48))
        shift, more = np.uint8(4 * (group % 2)), np.uint8(group)
        if bits == 4:
            for i in range(len(to)):
                to[i] = scale * np.float32(np.uint8(low[i] >> shift) & np.uint8(15)) - minimum
        else:
            for i in range(len(to)):
                fifth = np.uint8(np.uint8(high[i] >> more) & np.uint8(1)) << np.uint8(4)
                code = np.uint8(np.uint8(low[i] >> shift) & np.uint8(15)) | np.uint8(fifth)
                to[i] = scale * np.float32(code) - minimum


@exact
def _decode_6_bits(block: Any, numbers: Any) -> None:
    """Write the numbers of a block of `Q6_K`: 128 bytes of low bits, 64 of high bits, 16 scales and their factor."""
    step = half(np.uint16(block[208]) | np.uint16(block[209]) << np.uint16(8))
    for group in range(16):
        side, part, start = group // 8, group // 2 % 4, 16 * (group % 2)
        first, last = 64 * side + 32 * (part % 2) + start, 128 + 32 * side + start
        low, high, to = block[first : first + 16], block[last : last + 16], numbers[16 * group : 16 * group + 16]
        shift, more = np.uint8(4 * (part // 2)), np.uint8(2 * part)
        scale = step * np.float32(np.int8(block[192 + group]))
        for i in range(len(to)):
            highest = np.uint8(np.uint8(high[i] >> more) & np.uint8(3)) << np.uint8(4)
            code = np.uint8(np.uint8(low[i] >> shift) & np.uint8(15)) | np.uint8(highest)
            to[i] = scale * (np.float32(code) - np.float32(32))
