"""Triton kernels that read the stored rows of a quantised table: look-up, and logits of few tokens.

`embedlayer.formats.quantized.dequantise` defines the numbers of a row. A program reads chunks of `COLUMNS` columns,
each within one group. No two programs write to the same memory. These kernels share arguments:

- `packed`: stored rows, uint8, `(V, row bytes)`; `row_scale`: scale of each row, float32, `(V,)`, or `None`.
- `rows`: V.
- `width_units`, `group_units`: D and the columns of a group, divided by `UNIT`. If this is `COLUMNS`, groups are whole
  chunks, D is a multiple of the group size, and `packed` begins at a multiple of 16 bytes. If it is 1, none of it is
  known: headers may be at any address.
- `BITS`, `BLOCKS`: bits of a code, 8 or 4, and whether rows are `GGUFBlocks` or `FusedRows`.
"""

from typing import Any

import triton
import triton.language as tl

from embedlayer.kernels.gpu.index_check import record_first_bad
from embedlayer.kernels.gpu.launch import Arguments, Grid, Launch, Variant

INTEGERS = ("rows", "width_units", "group_units", "tokens", "length")

TWO_TO_23 = tl.constexpr(0x4B000000)
"""Bits of 2^23 in float32; a code in the lowest of them adds its value."""


@triton.jit
def _number(at, mask, SIZE: tl.constexpr, UNIT: tl.constexpr):
    """Load little-endian numbers of `SIZE` bytes, float32 or float16, as float32."""
    if UNIT > 1:
        kind: tl.constexpr = tl.float32 if SIZE == 4 else tl.float16
        number = tl.load(at.to(tl.pointer_type(kind)), mask=mask, other=0.0).to(tl.float32)
    else:
        bits = tl.load(at, mask=mask, other=0).to(tl.int32) | tl.load(at + 1, mask=mask, other=0).to(tl.int32) << 8
        if SIZE == 4:
            bits |= tl.load(at + 2, mask=mask, other=0).to(tl.int32) << 16
            bits |= tl.load(at + 3, mask=mask, other=0).to(tl.int32) << 24
            number = bits.to(tl.float32, bitcast=True)
        else:
            number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _sizes(width, group_size, BITS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the numbers of groups and of chunks of a group, and the bytes of the codes of a group and of a group."""
    code_bytes = group_size * BITS // 8
    return tl.cdiv(width, group_size), tl.cdiv(group_size, COLUMNS), code_bytes, code_bytes + (2 if BLOCKS else BITS)


@triton.jit(do_not_specialize=INTEGERS)
def look_up(
    ids, packed, row_scale, out, record, rows, width_units, group_units, length,
    BITS: tl.constexpr, BLOCKS: tl.constexpr, UNIT: tl.constexpr,
    CHUNKS: tl.constexpr, COLUMNS: tl.constexpr, SCANNED: tl.constexpr,
):  # fmt: skip
    """Store the numbers of a row for each ID, `(N, D)`: those of `dequantise`, bit for bit.

    Without `ids` they are all rows. A bad ID gives zeros, and the first one is recorded if `record` is not `None`; see
    `embedlayer.kernels.gpu.index_check`.
    """
    n = tl.program_id(0).to(tl.int64)
    row = n
    if ids is not None:
        row = tl.load(ids + n).to(tl.int64)
    is_bad = (row < 0) | (row >= rows)
    row = tl.where(is_bad, 0, row)
    SIZE: tl.constexpr = 4 if BITS == 8 and not BLOCKS else 2
    width, group_size = width_units * UNIT, group_units * UNIT
    groups, chunks, code_bytes, group_bytes = _sizes(width, group_size, BITS, BLOCKS, COLUMNS)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)[:, None]
    group = chunk // chunks
    place = chunk % chunks * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    column = group * group_size + place
    inside = column < width
    if UNIT == 1:
        inside = inside & (place < group_size)
    stored = inside & (is_bad == 0)
    at = packed + row * (groups * group_bytes) + group * group_bytes + tl.zeros_like(place)
    header = at if BLOCKS else at + code_bytes
    step = _number(header, stored, SIZE, UNIT)
    byte = place
    if BITS == 4:
        byte = place % 16 if BLOCKS else place // 2
    code = tl.load(at + byte + (SIZE if BLOCKS else 0), mask=stored, other=0)
    if BITS == 4:
        code = (code >> (4 * (place // 16 if BLOCKS else place % 2)).to(tl.uint8)) & 15
    if BLOCKS:
        if BITS == 8:
            code ^= 128
        number = step * (code.to(tl.float32) - 2.0 ** (BITS - 1))
    else:
        number = step * code.to(tl.float32) + _number(header + SIZE, stored, SIZE, UNIT)
    if row_scale is not None:
        number *= tl.load(row_scale + row)
    number = tl.where(stored, number, 0.0)
    tl.store(out + n * width + column, number.to(out.dtype.element_ty), mask=inside)
    if record is not None:
        reports = is_bad & (tl.program_id(1) == 0)
        if reports:
            record_first_bad(ids, record, n, n + 1, rows, 0, length, SCANNED)


@triton.jit(do_not_specialize=INTEGERS)
def logits(
    x, packed, row_scale, out, tokens, rows, width_units, group_units,
    BITS: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr, WORD: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the products of tokens and rows, `(tokens, V)`, for `x`, `(tokens, D)`; sums are in float32.

    A program has `ROWS` rows and one token, whose logits do not depend on the others. Programs of the same rows follow
    each other and share them in the cache. A lane has the `WORD` bytes at one place of each row. It multiplies codes,
    then the sum by the step of the group; with `WHOLE` a row is one group, and the sum is that of all its codes.
    """
    BYTES: tl.constexpr = COLUMNS * BITS // 8
    WORDS: tl.constexpr = BYTES // WORD
    CHUNKS: tl.constexpr = LANES // WORDS
    CODES: tl.constexpr = 8 * WORD // BITS
    CENTRE: tl.constexpr = 2 ** (BITS - 1)
    SIZE: tl.constexpr = 4 if BITS == 8 and not BLOCKS else 2
    token = (tl.program_id(0) % tokens).to(tl.int64)
    i = tl.program_id(0) // tokens * ROWS + tl.arange(0, ROWS)
    is_row = (i < rows)[:, None, None]
    width, group_size = width_units * UNIT, group_units * UNIT
    groups, chunks, code_bytes, group_bytes = _sizes(width, group_size, BITS, BLOCKS, COLUMNS)
    row = packed + (i.to(tl.int64) * (groups * group_bytes))[:, None, None]
    word = tl.arange(0, WORDS)[None, None, :]
    sums = tl.zeros((ROWS, CHUNKS, WORDS), tl.float32)
    factors = tl.zeros((1, CHUNKS, WORDS), tl.float32)
    for start in range(0, groups * chunks, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)[None, :, None]
        group, part = chunk // chunks, chunk % chunks
        is_chunk = group < groups
        at = row + group * group_bytes + tl.zeros_like(word)
        byte = part * BYTES + word * WORD
        stored = is_row & is_chunk
        if UNIT == 1:
            stored = stored & (byte < code_bytes)
        codes = at + byte + (SIZE if BLOCKS else 0)
        if WORD > 1:
            codes = codes.to(tl.pointer_type(tl.int32 if WORD == 4 else tl.uint16))
        words = tl.load(codes, mask=stored, other=0).to(tl.int32)
        if BLOCKS and BITS == 8:
            words ^= 0x8080
        product = tl.zeros_like(sums)
        if not WHOLE:
            factors = tl.zeros_like(factors)
        for j in tl.static_range(CODES):
            place = part * COLUMNS + word * CODES + j
            if BLOCKS and BITS == 4:
                place = word * WORD + j // 2 + j % 2 * 16
            column = group * group_size + place
            has_column = is_chunk
            if UNIT == 1:
                has_column = (column < width) & (place < group_size)
            factor = tl.load(x + token * width + column, mask=has_column, other=0.0).to(tl.float32)
            code = (words >> BITS * j) & (2**BITS - 1) | TWO_TO_23  # as the low bits of a float32: conversions are slow
            product += (code.to(tl.float32, bitcast=True) - (8388608.0 + CENTRE)) * factor
            factors += factor
        if WHOLE:
            sums += product
        else:
            header = at if BLOCKS else at + code_bytes
            step = _number(header, stored, SIZE, UNIT)
            sums += step * product
            if not BLOCKS:
                sums += (_number(header + SIZE, stored, SIZE, UNIT) + CENTRE * step) * factors
    total = tl.sum(tl.sum(sums, 2), 1)
    if WHOLE:
        header = packed + i.to(tl.int64) * group_bytes + code_bytes
        step, offset = _number(header, i < rows, SIZE, UNIT), _number(header + SIZE, i < rows, SIZE, UNIT)
        total = step * total + (offset + CENTRE * step) * tl.sum(tl.sum(factors, 2), 1)
    if row_scale is not None:
        total *= tl.load(row_scale + i, mask=i < rows, other=0.0)
    tl.store(out + token * rows + i, total.to(out.dtype.element_ty), mask=i < rows)


def _chunks_of_rows(a: Arguments) -> Grid:
    """Return the programs of a look-up: IDs, by blocks of chunks of a row."""
    group_size = a["group_units"] * a["UNIT"]
    chunks = -(-a["width_units"] // a["group_units"]) * -(-group_size // a["COLUMNS"])
    return len(a["out"]), -(-chunks // a["CHUNKS"])


def _blocks_of_rows(a: Arguments) -> Grid:
    """Return the programs of the logits: blocks of rows, and of each all tokens."""
    return (a["tokens"] * -(-a["rows"] // a["ROWS"]),)


INT8, INT4 = {"row_scale": None, "BITS": 8, "BLOCKS": False}, {"BITS": 4, "BLOCKS": False}
Q8_0, Q4_0 = ({"row_scale": None, "BITS": bits, "BLOCKS": True} for bits in (8, 4))
FORMATS: dict[str, dict[str, Any]] = {"int8": INT8, "int4": INT4, "q8_0": Q8_0, "q4_0": Q4_0}
TYPES = {
    **dict.fromkeys(("x", "out"), "*z"),
    **dict.fromkeys(("ids", "record"), "*i64"),
    "packed": "*u8",
    "row_scale": "*fp32",
    **dict.fromkeys(INTEGERS, "i32"),
}


def _of_kernel(kernel: Any) -> dict[str, str]:
    return {name: kind for name, kind in TYPES.items() if name in kernel.arg_names}


LAUNCHES = {
    "look_up": Launch(
        look_up,
        grid=_chunks_of_rows,
        types=_of_kernel(look_up),
        blocks={"CHUNKS": 32, "COLUMNS": 32, "SCANNED": 256},
        wide=("out",),
        reads=("ids",),
        writes=("out",),
        gathered={"packed": lambda a: len(a["out"]) * a["packed"].shape[1], "row_scale": lambda a: len(a["out"])},
        variants={
            **{name: Variant({**constants, "UNIT": 32}) for name, constants in FORMATS.items()},
            **{f"{name}, odd": Variant({**constants, "UNIT": 1}) for name, constants in FORMATS.items()},
        },
        fp_fusion=False,
    ),
    "logits": Launch(
        logits,
        grid=_blocks_of_rows,
        types=_of_kernel(logits),
        blocks={"ROWS": 8, "LANES": 32, "COLUMNS": 32},
        wide=(),
        reads=("x", "packed", "row_scale"),
        writes=("out",),
        variants={
            name: Variant({**FORMATS[name.split(",")[0]], "UNIT": unit, "WORD": word, "WHOLE": "whole" in name}, 32)
            for names, unit, word in (
                (("int8", "int8, whole", "int4", "int4, whole"), 32, 4),
                (("q8_0", "q4_0"), 32, 2),
                (("int8, odd", "int4, odd", "q8_0, odd", "q4_0, odd"), 1, 1),
            )
            for name in names
        },
        warps=1,
    ),
}
"""How each kernel is launched."""
