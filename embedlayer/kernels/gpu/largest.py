"""Triton kernels that find the K largest logits of each token in a block, exactly, without another read of the block.

A logit and the number of its row are one 64-bit key: the logit in the high half, as an integer with the same order, and
the number below it, such that the key is larger for a lower number. So the largest keys are the largest logits, of
equal ones those with the lowest IDs, and no two keys of a token are equal. NaN is largest.

The kernel `statistics` stores the largest key of the rows that each of its lanes has read, which are every `ROWS`th row
of a part, and of all rows of a part. The K largest logits are in the K parts whose largest keys are largest, and in the
K groups of rows of these parts: a key elsewhere is smaller than K others. So only members of these groups are read.
"""

import torch
import triton
import triton.language as tl

from embedlayer.kernels.cpu import softmax as cpu_softmax
from embedlayer.kernels.gpu import softmax
from embedlayer.kernels.gpu.launch import Arguments, Grid, Launch, Variant
from embedlayer.kernels.gpu.softmax import LARGEST_ID, MISSING, NAN, _finished, key_of, order_of

NO_ID = tl.constexpr(cpu_softmax.NO_ID)


@triton.jit
def _number(key):
    """Return the number of the row, or the token ID, of a key."""
    return (key & LARGEST_ID) ^ LARGEST_ID


@triton.jit(do_not_specialize=("tokens", "first_token", "chosen_parts", "pairs"))
def keys_of_lanes(
    lane_keys, chosen, keys, tokens, first_token, chosen_parts, pairs,
    PART: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Store the keys of the groups of some parts, which differ from token to token.

    `chosen` has the keys of parts, `(T, chosen_parts)` for T tokens from `first_token` on; T times `chosen_parts` is
    `pairs`. `lane_keys` is `(parts * ROWS, C)`, C is `tokens`, and the result is `keys`, `(T, chosen_parts * ROWS)`.
    """
    stride = tokens.to(tl.int64)
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    kept = pair < pairs
    lane = tl.arange(0, ROWS)[None, :]
    group = _number(tl.load(chosen + pair, mask=kept, other=0))[:, None] // PART * ROWS + lane
    token = (first_token + pair // chosen_parts)[:, None]
    key = tl.load(lane_keys + group * stride + token, mask=kept[:, None], other=0)
    tl.store(keys + pair[:, None] * ROWS + lane, key, mask=kept[:, None])


@triton.jit(do_not_specialize=("rows", "tokens", "first_token", "chosen_groups", "pairs", "first_id", "masked"))
def member_keys(
    z, bias, chosen, keys, rows, tokens, first_token, chosen_groups, pairs, first_id, scale, softcap, bound, masked,
    PART: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Store the keys of the logits of some groups of rows, which differ from token to token, with their token IDs.

    `chosen` has the keys of groups, `(T, chosen_groups)`, and the result is `keys`, with `PART / ROWS` times as many
    columns; `MISSING` for rows outside of the block and in place of a group that is `MISSING`. The others are arguments
    of `keys_of_lanes`, and those of `embedlayer.kernels.gpu.softmax`.
    """
    stride = tokens.to(tl.int64)
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    kept = pair < pairs
    group = tl.load(chosen + pair, mask=kept, other=MISSING)[:, None]
    best_row = _number(group)
    member = tl.arange(0, PART // ROWS)[None, :]
    i = best_row // PART * PART + best_row % ROWS + member * ROWS
    inside = (group != MISSING) & (i < rows)
    token = (first_token + pair // chosen_groups)[:, None]
    x = tl.load(z + tl.where(inside, i, 0) * stride + token, mask=inside, other=0.0)
    x = _finished(x, i, bias, rows, scale, softcap, bound, masked)
    key = tl.where(inside, key_of(order_of(x), first_id + i), MISSING)
    tl.store(keys + pair[:, None] * (PART // ROWS) + member, key, mask=kept[:, None])


@triton.jit(do_not_specialize=("count",))
def logits_of_keys(keys, values, ids, count, SIZE: tl.constexpr):
    """Store the logits and the token IDs of keys, all `(count,)`; -inf and `NO_ID` for `MISSING`."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    kept = i < count
    key = tl.load(keys + i, mask=kept, other=0)
    order = (key >> 32).to(tl.int32)
    x = tl.where(order < 0, order ^ NAN, order).to(tl.float32, bitcast=True)
    tl.store(values + i, tl.where(key == MISSING, float("-inf"), x), mask=kept)
    tl.store(ids + i, tl.where(key == MISSING, NO_ID, _number(key)), mask=kept)


@triton.jit(do_not_specialize=("count",))
def keys_of_logits(values, ids, keys, count, SIZE: tl.constexpr):
    """Store the keys of logits and their token IDs, all `(count,)`; `MISSING` for `NO_ID`."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    kept = i < count
    number = tl.load(ids + i, mask=kept, other=0)
    key = key_of(order_of(tl.load(values + i, mask=kept, other=0.0)), number)
    tl.store(keys + i, tl.where(number == NO_ID, MISSING, key), mask=kept)


def _elements(a: Arguments) -> Grid:
    """Return the number of programs of a kernel over single numbers."""
    return (-(-a["count"] // a["SIZE"]),)


def _pairs(a: Arguments) -> Grid:
    """Return the number of programs of a kernel over pairs of a token and a group."""
    return (-(-a["pairs"] // a["PAIRS"]),)


GROUPS = {name: softmax.LAUNCHES["statistics_and_keys"].blocks[name] for name in ("PART", "ROWS")}
CHOSEN = {"chosen": "*i64", "keys": "*i64", **dict.fromkeys(("tokens", "first_token", "pairs"), "i32")}
LOGITS = {"keys": "*i64", "values": "*fp32", "ids": "*i64", "count": "i32"}

LAUNCHES = {
    "statistics_and_keys": softmax.LAUNCHES["statistics_and_keys"],
    "keys_of_lanes": Launch(
        keys_of_lanes,
        grid=_pairs,
        types={**CHOSEN, "lane_keys": "*i64", "chosen_parts": "i32"},
        blocks={**GROUPS, "PAIRS": 128},
        wide=(),
        reads=("chosen",),
        writes=("keys",),
        gathered={"lane_keys": "keys"},
        dtypes=(torch.float32,),
    ),
    "member_keys": Launch(
        member_keys,
        grid=_pairs,
        types={
            **CHOSEN,
            **softmax.FINISHING,
            "z": "*z",
            **dict.fromkeys(("rows", "chosen_groups", "first_id"), "i32"),
        },
        blocks={**GROUPS, "PAIRS": 32},
        wide=(),
        reads=("chosen",),
        writes=("keys",),
        gathered={"z": "keys"},
        variants={"plain": Variant(softmax.UNFINISHED), "finished": Variant({})},
    ),
    "logits_of_keys": Launch(
        logits_of_keys,
        grid=_elements,
        types=LOGITS,
        blocks={"SIZE": 1024},
        wide=(),
        reads=("keys",),
        writes=("values", "ids"),
        dtypes=(torch.float32,),
    ),
    "keys_of_logits": Launch(
        keys_of_logits,
        grid=_elements,
        types=LOGITS,
        blocks={"SIZE": 1024},
        wide=(),
        reads=("values", "ids"),
        writes=("keys",),
        dtypes=(torch.float32,),
    ),
}
"""How each kernel is launched."""
