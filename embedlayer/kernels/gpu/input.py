"""Triton kernel of the input embedding: look-up, scale, added rows, dropout and the checks of IDs and positions.

`embedlayer.inputs.fused.plain_scale_add_drop` defines the numbers, and `embedlayer.core.numbers.random_words` the bits
of dropout, so the mask of a seed is that of the CPU. A program has one token and a part of its width. No two programs
write to the same memory, so the result does not depend on their order.

The kernel `positions_of_mask` computes the positions of tokens from a mask; `embedlayer.positions.position` defines it.
"""

import torch
import triton
import triton.language as tl

from embedlayer.kernels.gpu.index_check import record_first_bad
from embedlayer.kernels.gpu.launch import Arguments, Grid, Launch, Variant

INTEGERS = (
    "tokens", "units", "rows", "offset", "length", "ignored", "addends", "places_count", "places_offset",
    "places_length", "seed", "threshold",
)  # fmt: skip


@triton.jit
def _hashed(a):
    """Hash unsigned numbers of 64 bits by the finaliser of SplitMix64."""
    a = (a ^ (a >> 30)) * 0xBF58476D1CE4E5B9
    a = (a ^ (a >> 27)) * 0x94D049BB133111EB
    return a ^ (a >> 31)


@triton.jit(do_not_specialize=INTEGERS)
def gather_scale_add_drop(
    x, ids, record, kept_ids, factor, addend, places, places_record, kept_places, out,
    tokens, units, rows, offset, length, ignored, addends, places_count, places_offset, places_length, scale, seed,
    threshold, growth, UNIT: tl.constexpr, WORDS: tl.constexpr, SCANNED: tl.constexpr,
):  # fmt: skip
    """Store `dropout(factor * scale * x[ids + offset] + addend[places + places_offset])` of each token.

    D is `units * UNIT`; `tokens` is read by the grid alone. Numbers are computed in float32.

    - `x`: `(R, D)`. A row outside `0 .. rows - 1` gives zeros and is recorded in `record`, with the last dimension
      `length`; see `record_first_bad`. `kept_ids` are the rows with `ignored` for those outside. Without `ids` token n
      has row n.
    - `factor`: one number, or `None` for 1.
    - `addend`: `(addends, D)`, or `None`. Token n has row `n % addends`, or with `places`, `(places_count,)`, the row
      `places[n % places_count] + places_offset`. One outside is treated as a row of `x`; `kept_places` has -1 for it.
    - `seed`, `threshold`, `growth`: see `embedlayer.kernels.input.Dropout`; a `threshold` of `None` is no dropout.
    """
    width = units * UNIT
    stride = width.to(tl.int64)
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * (4 * WORDS) + tl.arange(0, 4 * WORDS)
    inside = i < width
    is_first = tl.program_id(1) == 0
    if ids is not None:
        row = tl.load(ids + n) + offset
        is_bad = (row < 0) | (row >= rows)
        value = tl.load(x + tl.where(is_bad, 0, row) * stride + i, mask=inside & (is_bad == 0), other=0.0)
        if is_first:
            tl.store(kept_ids + n, tl.where(is_bad, ignored, row))
        if is_first & is_bad:
            record_first_bad(ids, record, n, n + 1, rows, offset, length, SCANNED)
    else:
        value = tl.load(x + n * stride + i, mask=inside, other=0.0)
    value = value.to(tl.float32) * scale
    if factor is not None:
        value *= tl.load(factor).to(tl.float32)
    if addend is not None:
        if places is not None:
            at = n % places_count
            place = tl.load(places + at) + places_offset
            is_far = (place < 0) | (place >= addends)
            added = tl.load(addend + tl.where(is_far, 0, place) * stride + i, mask=inside & (is_far == 0), other=0.0)
            is_first = is_first & (n < places_count)
            if is_first:
                tl.store(kept_places + n, tl.where(is_far, -1, place))
            if is_first & is_far:
                record_first_bad(places, places_record, n, n + 1, addends, places_offset, places_length, SCANNED)
        else:
            added = tl.load(addend + n % addends * stride + i, mask=inside, other=0.0)
        value += added.to(tl.float32)
    if threshold is not None:
        word = n * ((width + 3) // 4) + tl.program_id(1) * WORDS + tl.arange(0, WORDS)
        bits = _hashed(seed + word.to(tl.uint64) * 0x9E3779B97F4A7C15)  # four elements of 16 bits
        bits = (bits[:, None] >> (16 * tl.arange(0, 4)).to(tl.uint64)[None, :]) & 0xFFFF
        is_kept = (bits.to(tl.int32) ^ 0x8000) >= threshold  # the bits are a signed number, from -2^15 on
        value *= tl.where(tl.reshape(is_kept, (4 * WORDS,)), growth, 0.0)
    tl.store(out + n * stride + i, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=("length", "offset", "padding_position"))
def positions_of_mask(mask, positions, length, offset, padding_position, SIZE: tl.constexpr):
    """Store the positions of the tokens of one row of a mask in their documents; both are `(rows, length)`.

    A program has one row. A document begins where a number is above all before it; its first token has the position
    `offset`, and padding, where the number is 0, has `padding_position`.
    """
    row = tl.program_id(0).to(tl.int64) * length
    texts, top, begin = tl.cast(0, tl.int64), tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    for first in range(0, length, SIZE):
        c = first + tl.arange(0, SIZE)
        number = tl.load(mask + row + c, mask=c < length, other=0).to(tl.int64)
        before = tl.load(mask + row + c - 1, mask=(c < length) & (c > first), other=0).to(tl.int64)
        is_text = (number != 0).to(tl.int64)
        place = texts + tl.cumsum(is_text, 0) - 1
        is_first = number > tl.maximum(tl.associative_scan(before, 0, _larger), top)
        begins = tl.where((number != 0) & is_first, place, 0)
        position = place - tl.maximum(tl.associative_scan(begins, 0, _larger), begin) + offset
        tl.store(positions + row + c, tl.where(number != 0, position, padding_position), mask=c < length)
        texts += tl.sum(is_text, 0)
        top, begin = tl.maximum(top, tl.max(number, 0)), tl.maximum(begin, tl.max(begins, 0))


def _token_and_part(a: Arguments) -> Grid:
    """Return the number of programs along the tokens and along the width."""
    return (a["tokens"], -(-a["units"] * a["UNIT"] // (4 * a["WORDS"])))


NO_IDS = dict.fromkeys(("ids", "record", "kept_ids"))
NO_PLACES = dict.fromkeys(("places", "places_record", "kept_places"))
NO_DROPOUT = dict.fromkeys(("seed", "threshold"))

LAUNCHES = {
    "gather_scale_add_drop": Launch(
        gather_scale_add_drop,
        grid=_token_and_part,
        types={
            **dict.fromkeys(("x", "factor", "addend", "out"), "*z"),
            **dict.fromkeys(("ids", "record", "kept_ids", "places", "places_record", "kept_places"), "*i64"),
            **dict.fromkeys(INTEGERS, "i32"),
            "seed": "i64",
            **dict.fromkeys(("scale", "growth"), "fp32"),
        },
        blocks={"WORDS": 256, "SCANNED": 256},
        wide=("x", "addend", "out"),
        reads=("ids", "places"),
        writes=("out", "kept_ids", "kept_places"),
        gathered={"x": "out", "addend": "out"},
        variants={
            "look-up": Variant({**NO_PLACES, **NO_DROPOUT, "factor": None, "addend": None, "UNIT": 8}),
            "positions": Variant({**NO_PLACES, **NO_DROPOUT, "factor": None, "UNIT": 8}),
            "dropout": Variant({**NO_PLACES, "factor": None, "UNIT": 8}),
            "places": Variant({"UNIT": 8}),
            "any width": Variant({"UNIT": 1}),
            "backward": Variant({**NO_IDS, **NO_PLACES, "addend": None, "UNIT": 8}),
        },
    ),
    "positions_of_mask": Launch(
        positions_of_mask,
        grid=lambda a: (a["positions"].numel() // max(a["length"], 1),),
        types={
            "mask": "*z",
            "positions": "*i64",
            **dict.fromkeys(("length", "offset", "padding_position"), "i32"),
        },
        blocks={"SIZE": 512},
        wide=(),
        reads=("mask",),
        writes=("positions",),
        dtypes=(torch.int64, torch.int32, torch.bool),
    ),
}
"""How each kernel is launched."""
