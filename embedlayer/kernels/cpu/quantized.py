"""Kernels that dequantise stored rows, or multiply them by few tokens; `formats.quantized.dequantise` defines them.

`packed` are all stored rows, uint8, and `ids` row numbers that were checked, `(N,)`; numbers are written to `out`,
`(N, D)`.

A product dequantises some rows into a buffer that stays in the cache, by the kernel of their look-up, so the whole rows
are never written to memory.
"""

from typing import Any

import numpy as np

from embedlayer.kernels.cpu.codec import multiply
from embedlayer.kernels.cpu.numbers import half, kernel, multiply_add, narrow, prefetch

AHEAD = 4
"""Rows between the one that is loaded into the cache and the one that is computed."""

ROWS_AT_ONCE = 16
"""Rows in the buffer of a product."""


@kernel
def dequantise_8_bits(start: int, stop: int, ids: Any, packed: Any, row_format: Any, out: Any) -> None:
    """Dequantise the stored rows of the IDs at places `start` to `stop - 1` to the rows of `out` at these places.

    - `row_format`: group size, and bytes of a group: its codes and its float32 step and offset.
    """
    group_size, group_bytes = row_format
    width = out.shape[1]
    for n in range(start, stop):
        prefetch(packed[ids[min(n + AHEAD, len(ids) - 1)]])
        row, to = packed[ids[n]], out[n]
        for group in range((width + group_size - 1) // group_size):
            first, place = group * group_size, group * group_bytes
            columns = min(group_size, width - first)
            step = _float32(row[place + group_size : place + group_size + 4])
            offset = _float32(row[place + group_size + 4 : place + group_size + 8])
            codes, numbers = row[place : place + columns], to[first : first + columns]
            for i in range(columns):
                numbers[i] = narrow(multiply_add(np.float32(codes[i]), step, offset), to[0])


@kernel
def dequantise_4_bits(start: int, stop: int, ids: Any, packed: Any, row_scale: Any, row_format: Any, out: Any) -> None:
    """Dequantise as `dequantise_8_bits` does, from codes of 4 bits, two in a byte.

    - `row_scale`: scale of each stored row, float32.
    - `row_format`: group size, and bytes of a group: its codes and its float16 step and offset.
    """
    group_size, group_bytes = row_format
    width = out.shape[1]
    pairs = np.empty(packed.shape[1], np.uint16)
    unpacked = pairs.view(np.uint8)
    for n in range(start, stop):
        prefetch(packed[ids[min(n + AHEAD, len(ids) - 1)]])
        row, to, scale = packed[ids[n]], out[n], row_scale[ids[n]]
        for i in range(len(pairs)):
            byte = np.uint16(row[i])
            pairs[i] = np.uint16((byte & np.uint16(15)) | (byte & np.uint16(0xF0)) << np.uint16(4))
        for group in range((width + group_size - 1) // group_size):
            first, place = group * group_size, group * group_bytes
            columns, header = min(group_size, width - first), place + group_size // 2
            step = scale * _float16(row[header : header + 2])
            offset = scale * _float16(row[header + 2 : header + 4])
            codes, numbers = unpacked[2 * place : 2 * place + columns], to[first : first + columns]
            for i in range(columns):
                numbers[i] = narrow(multiply_add(np.float32(codes[i]), step, offset), to[0])


@kernel
def dequantise_blocks(start: int, stop: int, ids: Any, packed: Any, row_format: Any, out: Any) -> None:
    """Dequantise as `dequantise_8_bits` does, from blocks of 32 codes behind a float16 scale (GGUF's Q4_0 and Q8_0).

    - `row_format`: bits of a code, 4 or 8, as the only entry of a tuple.
    """
    bits, width = row_format[0], out.shape[1]
    block_bytes, unpacked = 2 + 4 * bits, np.empty((width + 31) // 32 * 32, np.uint8)
    middle = np.float32(1 << (bits - 1))
    for n in range(start, stop):
        prefetch(packed[ids[min(n + AHEAD, len(ids) - 1)]])
        row, to = packed[ids[n]], out[n]
        _codes_of_blocks(row, bits, unpacked)
        for block in range(len(unpacked) // 32):
            first, place = 32 * block, block_bytes * block
            numbers = to[first : min(first + 32, width)]
            codes, step = unpacked[first : first + 32], _float16(row[place : place + 2])
            for i in range(len(numbers)):
                numbers[i] = narrow(step * (np.float32(codes[i]) - middle), to[0])


@kernel
def _codes_of_blocks(row: Any, bits: int, to: Any) -> None:
    """Write the codes of a row of blocks, shifted to `0..2^bits - 1`, to bytes of their own."""
    for block in range(len(to) // 32):
        if bits == 8:
            codes, numbers = row[34 * block + 2 : 34 * block + 34], to[32 * block : 32 * block + 32]
            for i in range(len(numbers)):
                numbers[i] = np.uint8(codes[i] ^ np.uint8(128))
        else:
            codes, numbers = row[18 * block + 2 : 18 * block + 18], to[32 * block : 32 * block + 16]
            high = to[32 * block + 16 : 32 * block + 32]
            for i in range(len(numbers)):
                numbers[i] = np.uint8(codes[i] & np.uint8(15))
                high[i] = np.uint8(codes[i] >> np.uint8(4))


@kernel
def logits_of_8_bits(start: int, stop: int, x: Any, packed: Any, row_format: Any, out: Any) -> None:
    """Multiply the stored rows `start` to `stop - 1` by few tokens.

    - `x`: hidden states, float32, `(N, D)`.
    - `out`: products, float32, `(V, N)`.
    """
    rows = np.empty((ROWS_AT_ONCE, x.shape[1]), np.float32)
    for first in range(start, stop, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, stop)
        dequantise_8_bits(0, last - first, np.arange(first, last), packed, row_format, rows)
        multiply(rows, x, out[first:last])


@kernel
def logits_of_4_bits(start: int, stop: int, x: Any, packed: Any, row_scale: Any, row_format: Any, out: Any) -> None:
    """Multiply as `logits_of_8_bits` does, by the rows of `dequantise_4_bits`; `row_scale` is the scale of each."""
    rows = np.empty((ROWS_AT_ONCE, x.shape[1]), np.float32)
    for first in range(start, stop, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, stop)
        dequantise_4_bits(0, last - first, np.arange(first, last), packed, row_scale, row_format, rows)
        multiply(rows, x, out[first:last])


@kernel
def logits_of_blocks(start: int, stop: int, x: Any, packed: Any, row_format: Any, out: Any) -> None:
    """Multiply as `logits_of_8_bits` does, by the rows of `dequantise_blocks`."""
    rows = np.empty((ROWS_AT_ONCE, x.shape[1]), np.float32)
    for first in range(start, stop, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, stop)
        dequantise_blocks(0, last - first, np.arange(first, last), packed, row_format, rows)
        multiply(rows, x, out[first:last])


@kernel
def _float32(stored: Any) -> Any:
    """Return the number that four little-endian bytes are, at any address."""
    low = np.uint32(np.uint32(stored[0]) | np.uint32(stored[1]) << np.uint32(8))
    high = np.uint32(np.uint32(stored[2]) | np.uint32(stored[3]) << np.uint32(8))
    return np.uint32(low | np.uint32(high << np.uint32(16))).view(np.float32)


@kernel
def _float16(stored: Any) -> Any:
    """Return the float16 number that two little-endian bytes are, as float32."""
    return half(np.uint16(stored[0]) | np.uint16(stored[1]) << np.uint16(8))
