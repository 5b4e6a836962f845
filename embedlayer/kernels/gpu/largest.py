"""Triton kernels that find the K largest logits of each token in a block, exactly.

Groups have `GROUP` rows, and groups of groups `GROUP` groups. Each of several stages looks at the members of the K best
groups alone. A logit of another group is smaller than K maxima, or equal to some of them and behind them.

A logit and its token ID are one 64-bit key: the logit in the high half, as an integer with the same order, and the ID
below it, such that the key is larger for a lower ID. So the largest keys are the largest logits, of equal ones those
with the lowest IDs, and no two keys are equal. NaN is largest. The keys of groups have the number of the group.
"""

import torch
import triton
import triton.language as tl

from embedlayer.kernels import largest
from embedlayer.kernels.gpu.launch import Arguments, Launch, Variant
from embedlayer.kernels.gpu.softmax import FINISHING, UNFINISHED, _finished

GROUP, MISSING, NO_ID = tl.constexpr(largest.GROUP), tl.constexpr(largest.MISSING), tl.constexpr(largest.NO_ID)
LARGEST_ID = tl.constexpr(0xFFFFFFFF)
NAN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _order(x):
    """Return integers in the order of float32 numbers; 0.0 and -0.0 are equal, and NaN is largest."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, tl.where(bits < 0, bits ^ NAN, bits), NAN)


@triton.jit
def _key(order, number):
    """Return the key of an integer of `_order`, and of a token ID or the number of a group, both of 64 bits."""
    return (order.to(tl.int64) << 32) + (LARGEST_ID - tl.cast(number, tl.int64))


@triton.jit
def _number(key):
    """Return the token ID, or the number of the group, of a key."""
    return LARGEST_ID - (key & LARGEST_ID)


@triton.jit(do_not_specialize=("rows", "units", "parts", "masked"))
def group_maxima(
    z, bias, maxima, keys, rows, units, parts, scale, softcap, bound, masked, UNIT: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Store the maximum of each group of rows, and the key of the maximum of each group of groups.

    `maxima` is `(groups, C)`, integers of `_order`. `keys` is `(C, parts)`, for as many groups of groups. The other
    arguments are those of `embedlayer.kernels.gpu.softmax`.
    """
    tokens = units * UNIT
    stride = tokens.to(tl.int64)
    part = tl.program_id(1)
    c = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    kept = c < tokens
    most = tl.full((TOKENS,), -NAN - 1, tl.int32)
    for group in range(part * GROUP, tl.minimum((part + 1) * GROUP, tl.cdiv(rows, GROUP))):
        i = group * GROUP + tl.arange(0, GROUP)[:, None]
        inside = (i < rows) & kept[None, :]
        x = tl.load(z + i * stride + c[None, :], mask=inside, other=0.0)
        x = _finished(x, i, bias, rows, scale, softcap, bound, masked)
        high = tl.max(tl.where(inside, _order(x), -NAN - 1), 0)
        tl.store(maxima + group * stride + c, high, mask=kept)
        most = tl.maximum(most, high)
    tl.store(keys + c * tl.cast(parts, tl.int64) + part, _key(most, part), mask=kept)


@triton.jit(do_not_specialize=("size", "tokens", "first_token", "chosen_groups", "pairs", "first_id", "masked"))
def member_keys(
    source, bias, chosen, keys, size, tokens, first_token, chosen_groups, pairs, first_id,
    scale, softcap, bound, masked, IS_ORDER: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Store the keys of the members of some groups, which differ from token to token.

    `source` has the members, `(size, C)`: logits as stored, or integers of `_order` with `IS_ORDER`. `chosen` has the
    keys of groups, `(T, chosen_groups)` for T tokens from `first_token` on; T times `chosen_groups` is `pairs`. The
    result is `keys`, `(T, chosen_groups * GROUP)`. `first_id` is the number of the first member. The other arguments
    are those of `embedlayer.kernels.gpu.softmax`.
    """
    stride = tokens.to(tl.int64)
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    kept = pair < pairs
    group = _number(tl.load(chosen + pair, mask=kept, other=0))
    i = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = kept[:, None] & (i < size)
    token = first_token + pair // chosen_groups
    x = tl.load(source + i * stride + token[:, None], mask=inside, other=0)
    if not IS_ORDER:
        x = _order(_finished(x, i, bias, size, scale, softcap, bound, masked))
    key = tl.where(inside, _key(x, first_id + i), MISSING)
    tl.store(keys + pair[:, None] * GROUP + tl.arange(0, GROUP)[None, :], key, mask=kept[:, None])


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
    key = _key(_order(tl.load(values + i, mask=kept, other=0.0)), number)
    tl.store(keys + i, tl.where(number == NO_ID, MISSING, key), mask=kept)


def _elements(arguments: Arguments) -> tuple[int]:
    """Return the number of programs of a kernel over single numbers."""
    return (-(-arguments["count"] // arguments["SIZE"]),)


MEMBERS = {
    "source": "*z",
    "chosen": "*i64",
    "keys": "*i64",
    **FINISHING,
    **dict.fromkeys(("size", "tokens", "first_token", "chosen_groups", "pairs", "first_id"), "i32"),
}

LAUNCHES = {
    "group_maxima": Launch(
        group_maxima,
        grid=lambda a: (-(-a["units"] * a["UNIT"] // a["TOKENS"]), a["parts"]),
        types={
            "z": "*z",
            "maxima": "*i32",
            "keys": "*i64",
            **FINISHING,
            **dict.fromkeys(("rows", "units", "parts"), "i32"),
        },
        blocks={"TOKENS": 128},
        wide=("z",),
        reads=("z", "bias"),
        writes=("maxima", "keys"),
        variants={
            "plain": Variant({**UNFINISHED, "UNIT": 8}),
            "finished": Variant({"UNIT": 8}),
            "odd": Variant({**UNFINISHED, "UNIT": 1}),
        },
    ),
    "member_keys": Launch(
        member_keys,
        grid=lambda a: (-(-a["pairs"] // a["PAIRS"]),),
        types=MEMBERS,
        blocks={"PAIRS": 64},
        wide=(),
        reads=("bias", "chosen"),
        writes=("keys",),
        gathered={"source": "keys"},
        variants={
            "plain": Variant({**UNFINISHED, "IS_ORDER": False}),
            "finished": Variant({"IS_ORDER": False}),
        },
    ),
    "group_keys": Launch(
        member_keys,
        grid=lambda a: (-(-a["pairs"] // a["PAIRS"]),),
        types={**MEMBERS, "source": "*i32"},
        blocks={"PAIRS": 64},
        wide=(),
        reads=("chosen",),
        writes=("keys",),
        gathered={"source": "keys"},
        variants={"all": Variant({**UNFINISHED, "scale": None, "IS_ORDER": True})},
        dtypes=(torch.float32,),
    ),
    "logits_of_keys": Launch(
        logits_of_keys,
        grid=_elements,
        types={"keys": "*i64", "values": "*fp32", "ids": "*i64", "count": "i32"},
        blocks={"SIZE": 1024},
        wide=(),
        reads=("keys",),
        writes=("values", "ids"),
        dtypes=(torch.float32,),
    ),
    "keys_of_logits": Launch(
        keys_of_logits,
        grid=_elements,
        types={"keys": "*i64", "values": "*fp32", "ids": "*i64", "count": "i32"},
        blocks={"SIZE": 1024},
        wide=(),
        reads=("values", "ids"),
        writes=("keys",),
        dtypes=(torch.float32,),
    ),
}
"""How each kernel is launched."""
