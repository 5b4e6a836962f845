"""Kernels of rows that a `Codec` or `SuperBlocks` describes: their numbers, and products of few tokens with them.

`embedlayer.formats.codec.Codec.decode` defines the numbers, bit for bit: each step is rounded, and no product and sum
are contracted. A row is computed in passes over a buffer that stays in the cache; a pass reads or writes one array
besides it, so its instructions are those of vectors.
"""

from typing import Any

import numpy as np

from embedlayer.kernels.cpu.numbers import exact, half, narrow, number_of, prefetch, reduction, rounded, word_at

AHEAD = 4
"""Rows between the one that is loaded into the cache and the one that is computed."""


@exact
def decode(start: int, stop: int, ids: Any, stored: Any, sizes: Any, out: Any) -> None:
    """Write the numbers of the rows of the IDs at places `start` to `stop - 1`; without IDs, of the rows themselves.

    Args:
        start: First place.
        stop: Last place + 1.
        ids: IDs that were checked, `(N,)`, or an empty array.
        stored: Packed codes, uint8, `(V, bytes)`. Number of each code, float32; with codes of 4 bits whose numbers are
            not whole, the two numbers of each byte, as uint64. Scales, `(V, G)` or `(1, G)`: float32, bfloat16 as
            uint16, the bits of float16 as int16, or codes, uint8. Number of each code of a scale, float32. Integers
            that are subtracted from levels, and numbers that are added, like scales; without rows if there are none.
            Factor of products, float32, `(1,)`. An element of the type to which numbers are rounded.
        sizes: Bits of a code; columns of a group; and for levels `(code ^ flip) - middle` these two, else a `flip` of
            -1.
        out: Result, `(N, D)`.
    """
    buffers = _buffers(out.shape[1], stored[0].shape[1])
    for n in range(start, stop):
        _decode_row(_row(ids, n, stored[0]), stored, sizes, buffers)
        _store(buffers[0][0], out[n])


@exact
def logits(start: int, stop: int, x: Any, stored: Any, sizes: Any, out: Any) -> None:
    """Multiply the rows `start` to `stop - 1` by few tokens.

    Args:
        start: First row.
        stop: Last row + 1.
        x: Hidden states, float32, `(N, D)`.
        stored: See `decode`.
        sizes: See `decode`.
        out: Products, float32, `(V, N)`.
    """
    buffers = _buffers(x.shape[1], stored[0].shape[1])
    for n in range(start, stop):
        _decode_row(n, stored, sizes, buffers)
        multiply(buffers[0], x, out[n : n + 1])


@exact
def decode_super_blocks(start: int, stop: int, ids: Any, packed: Any, bits: int, out: Any) -> None:
    """Write numbers as `decode` does, of rows in blocks of 256 columns: GGUF's `Q4_K`, `Q5_K` and `Q6_K`.

    Args:
        start: First place.
        stop: Last place + 1.
        ids: IDs that were checked, `(N,)`, or an empty array.
        packed: Stored rows, uint8, `(V, bytes)`.
        bits: Bits of a code: 4, 5 or 6.
        out: Result, `(N, D)`.
    """
    buffers = _buffers(out.shape[1], 0)
    for n in range(start, stop):
        _decode_blocks(packed[_row(ids, n, packed)], bits, buffers)
        _store(buffers[0][0], out[n])


@exact
def logits_of_super_blocks(start: int, stop: int, x: Any, packed: Any, bits: int, out: Any) -> None:
    """Multiply rows as `logits` does; `packed` and `bits` are those of `decode_super_blocks`."""
    buffers = _buffers(x.shape[1], 0)
    for n in range(start, stop):
        _decode_blocks(packed[n], bits, buffers)
        multiply(buffers[0], x, out[n : n + 1])


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
def _row(ids: Any, n: int, codes: Any) -> int:
    """Return the row of a place, and load one that is read soon."""
    if len(ids) == 0:
        return n
    prefetch(codes[ids[min(n + AHEAD, len(ids) - 1)]])
    return int(ids[n])


@exact
def _store(numbers: Any, to: Any) -> None:
    """Write float32 numbers in the type of `to`."""
    for i in range(len(to)):
        to[i] = narrow(numbers[i], to[0])


@exact
def _buffers(width: int, row_bytes: int) -> Any:
    """Allocate the numbers of a row, and its codes: packed, with 8 bytes of padding, and one code in each byte.

    Returns:
        Numbers as a matrix `(1, D)`, and padded as uint64; packed codes; and codes as uint8, uint16 and uint64.
    """
    padded = width + 7 & -8
    numbers, codes = np.empty(padded, np.float32), np.empty(max(padded, 256), np.uint8)
    views = codes.view(np.uint16), codes[:padded].view(np.uint64)
    return numbers[:width].reshape(1, width), numbers.view(np.uint64), np.zeros(row_bytes + 8, np.uint8), codes, *views


@exact
def _decode_row(n: int, stored: Any, sizes: Any, buffers: Any) -> None:
    """Write the numbers of a row in float32."""
    codes, levels, scale, scale_levels, zero, bias, factor, like = stored
    bits, group_size, flip, middle = sizes
    row, numbers = codes[n], buffers[0][0]
    if bits == 4 and flip < 0:
        _look_up(row, levels, buffers[1])
    else:
        if bits == 4:
            _unpack_pairs(row, buffers[4])
        elif bits != 8:
            _unpack(row, bits, buffers[2], buffers[5])
        if bits != 8:
            row = buffers[3]
        if flip < 0:
            _look_up(row, levels, numbers)
        else:
            _whole_numbers(row, flip, middle, numbers)
    scales, zeros, biases = scale[min(n, len(scale) - 1)], zero[min(n, len(zero) - 1)], bias[min(n, len(bias) - 1)]
    less, more, last = np.float32(0), np.float32(-0.0), factor[0]
    for group in range(len(scales)):
        to = numbers[group * group_size : min((group + 1) * group_size, len(numbers))]
        step = number_of(scales[group], scale_levels)
        if scale.itemsize > 1:
            step = rounded(step, like[0])
        if len(zero) > 0:
            less = np.float32(zeros[group])
        if len(bias) > 0 or last != 1:
            if len(bias) > 0:
                more = number_of(biases[group], scale_levels)
            for i in range(len(to)):
                to[i] = rounded(rounded((to[i] - less) * step, like[0]) * last + more, like[0])
        else:
            for i in range(len(to)):
                to[i] = rounded((to[i] - less) * step, like[0])


@exact
def _unpack_pairs(row: Any, to: Any) -> None:
    """Write codes of 4 bits to bytes of their own, two at once."""
    for i in range(min(len(row), len(to))):
        byte = np.uint16(row[i])
        to[i] = np.uint16((byte & np.uint16(15)) | (byte & np.uint16(0xF0)) << np.uint16(4))


@exact
def _unpack(row: Any, bits: int, packed: Any, words: Any) -> None:
    """Write the codes of a row to bytes of their own: 8 codes are `bits` bytes of a word, low bits first.

    A word is spread in three steps: into two halves of 4 codes, then four of 2, then eight of 1.
    """
    width = np.uint64(bits)
    one = np.uint64((np.uint64(1) << width) - np.uint64(1))
    two = np.uint64(one | one << width)
    four = np.uint64(two | two << np.uint64(2) * width)
    two, one = np.uint64(two * np.uint64(0x100000001)), np.uint64(one * np.uint64(0x1000100010001))
    for i in range(len(row)):  # an assignment to a slice is slower
        packed[i] = row[i]
    for block in range(len(words)):
        words[block] = word_at(packed, block * bits)
    for block in range(len(words)):
        word = words[block]
        word = (word & four) | ((word >> np.uint64(4) * width) & four) << np.uint64(32)
        word = (word & two) | ((word >> np.uint64(2) * width) & two) << np.uint64(16)
        words[block] = (word & one) | ((word >> width) & one) << np.uint64(8)


@exact
def _look_up(codes: Any, levels: Any, to: Any) -> None:
    """Write the level of each code."""
    for i in range(min(len(codes), len(to))):
        to[i] = levels[codes[i]]


@exact
def _whole_numbers(codes: Any, flip: int, middle: int, to: Any) -> None:
    """Write the level of each code as of integers, which is faster."""
    flipped, less = np.uint8(flip), np.float32(middle)
    for i in range(len(to)):
        to[i] = np.float32(codes[i] ^ flipped) - less


@exact
def _decode_blocks(row: Any, bits: int, buffers: Any) -> None:
    """Write the numbers of a row of super-blocks in float32."""
    numbers, codes = buffers[0][0], buffers[3]
    count = len(numbers) // 256
    size = len(row) // count
    for place in range(count):
        block, to = row[place * size : (place + 1) * size], numbers[256 * place : 256 * place + 256]
        if bits == 6:
            _decode_6_bits(block, codes, to)
        else:
            _decode_5_bits(block, bits, codes, to)


@exact
def _decode_5_bits(block: Any, bits: int, codes: Any, numbers: Any) -> None:
    """Write the numbers of a block of `Q4_K`, or with a fifth bit of `Q5_K`.

    The scales and minima of 8 groups are 6 bits each: four bytes have the low bits of four scales, four those of
    minima, with the high bits of the others; four bytes have the low bits of these.
    """
    step = half(np.uint16(block[0]) | np.uint16(block[1]) << np.uint16(8))
    least = half(np.uint16(block[2]) | np.uint16(block[3]) << np.uint16(8))
    lows, high = block[len(block) - 128 :], block[16:48]
    for group in range(8):
        a, b, c = block[4 + group % 4], block[8 + group % 4], block[12 + group % 4]
        scale, minimum = a & 63, b & 63
        if group >= 4:
            scale, minimum = (c & 15) | ((a >> 2) & 48), (c >> 4) | ((b >> 2) & 48)
        low, to = lows[32 * (group // 2) : 32 * (group // 2) + 32], numbers[32 * group : 32 * group + 32]
        shift, place = np.uint8(4 * (group % 2)), np.uint8(group)
        for i in range(len(low)):
            codes[i] = np.uint8(low[i] >> shift) & np.uint8(15)
        if bits == 5:
            for i in range(len(high)):
                codes[i] |= np.uint8(np.uint8(np.uint8(high[i] >> place) & np.uint8(1)) << np.uint8(4))
        _multiply(codes, step * np.float32(scale), np.float32(0), least * np.float32(minimum), to)


@exact
def _decode_6_bits(block: Any, codes: Any, numbers: Any) -> None:
    """Write the numbers of a block of `Q6_K`: 128 bytes of low bits, 64 of high bits, 16 scales and a factor of these."""
    step = half(np.uint16(block[208]) | np.uint16(block[209]) << np.uint16(8))
    for group in range(8):
        side, part = group // 4, group % 4
        first, last = 64 * side + 32 * (part % 2), 128 + 32 * side
        low, high = block[first : first + 32], block[last : last + 32]
        shift, place = np.uint8(4 * (part // 2)), np.uint8(2 * part)
        for i in range(len(low)):
            codes[i] = np.uint8(low[i] >> shift) & np.uint8(15)
        for i in range(len(high)):
            codes[i] |= np.uint8(np.uint8(np.uint8(high[i] >> place) & np.uint8(3)) << np.uint8(4))
        for i in range(2):
            scale, to = step * np.float32(np.int8(block[192 + 2 * group + i])), numbers[32 * group + 16 * i :]
            _multiply(codes[16 * i :], scale, np.float32(32), np.float32(0), to[:16])


@exact
def _multiply(codes: Any, scale: Any, middle: Any, minimum: Any, to: Any) -> None:
    """Write `scale * (code - middle) - minimum`."""
    for i in range(len(to)):
        to[i] = scale * (np.float32(codes[i]) - middle) - minimum
