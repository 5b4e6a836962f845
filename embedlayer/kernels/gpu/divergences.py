"""Triton kernels over blocks of logits of two heads: both softmaxes, divergences from their mixture, and gradients.

`embedlayer.losses.divergences` defines them, as those of `embedlayer.kernels.cpu.softmax`. A block is `(R, C)`: R
rows of the vocabulary by C tokens. A program has consecutive tokens, which it loads 128 bits at a time, and a part of
the rows. No two programs write to the same memory.

These kernels share arguments:

- `s`, `t`: logits of student and teacher as stored, `(R, C)`.
- `s_bias`, `t_bias`: bias of each row that the logits do not contain yet, float32, `(R,)`, or `None`.
- `rows`, `units`: R, and C / UNIT; so Triton knows that C is divisible by 8 where `UNIT` is 8.
- `beta`: weight of the teacher in the mixture of both distributions.
- `KIND`: a `DivergenceKind`.
"""

import torch
import triton
import triton.language as tl

from embedlayer.kernels.cpu import softmax
from embedlayer.kernels.gpu.launch import Launch, Variant
from embedlayer.kernels.gpu.softmax import _tiles_by_parts

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The maximum of no logits: finite, so that it can be subtracted."""

FORWARD, REVERSE = tl.constexpr(softmax.FORWARD), tl.constexpr(softmax.REVERSE)


@triton.jit
def _logits(z, bias, i, c, rows, stride, inside):
    """Return the logits of a few rows in float32 with their bias; -inf outside of the block."""
    x = tl.load(z + i[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + i, mask=i < rows, other=0.0)[:, None]
    return tl.where(inside, x, float("-inf"))


@triton.jit
def _added(x, top, sums):
    """Add one logit to a maximum and a sum of exponentials.

    One of two exponentials, of the factor of the sum and of the logit, is always 1. NaN leaves the maximum as it is.

    Returns:
        Maximum, factor of the sum, exponential of the logit, and sum.
    """
    is_higher = x > top
    e = tl.exp(-tl.abs(x - top))
    fade = tl.where(is_higher, e, 1.0)
    power = tl.where(is_higher, 1.0, e)
    return tl.where(is_higher, x, top), fade, power, sums * fade + power


@triton.jit
def _faded(number, fade):
    """Return a mean times the factor of its sum, 0 where that is 0: the mean may be infinite."""
    return tl.where(fade == 0, 0.0, number * fade)


@triton.jit(do_not_specialize=("rows", "units"))
def divergence(
    s, t, s_bias, t_bias, found, rows, units,
    KIND: tl.constexpr, UNIT: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Store totals of both softmaxes over `PART` rows, `(parts, 5, C)`.

    These are maximum and sum of exponentials of student and teacher; and the sum of `p (t - s)` for `FORWARD`, that of
    `q (s - t)` for `REVERSE`, where q and p are the exponentials. Each lane keeps totals of the logits that it reads.
    """
    tokens = units * UNIT
    stride = tokens.to(tl.int64)
    part = tl.program_id(1)
    c = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    kept = c < tokens
    s_top, t_top = tl.full((ROWS, TOKENS), LOWEST, tl.float32), tl.full((ROWS, TOKENS), LOWEST, tl.float32)
    s_sums, t_sums = tl.zeros((ROWS, TOKENS), tl.float32), tl.zeros((ROWS, TOKENS), tl.float32)
    mean = tl.zeros((ROWS, TOKENS), tl.float32)
    stop = tl.minimum((part + 1) * PART, rows)
    for start in range(part * PART, stop, ROWS):
        i = start + tl.arange(0, ROWS)
        inside = (i < stop)[:, None] & kept[None, :]
        x = _logits(s, s_bias, i, c, rows, stride, inside)
        y = _logits(t, t_bias, i, c, rows, stride, inside)
        s_top, s_fade, q, s_sums = _added(x, s_top, s_sums)
        t_top, t_fade, p, t_sums = _added(y, t_top, t_sums)
        if KIND == FORWARD:
            mean = _faded(mean, t_fade) + tl.where(p == 0, 0.0, p * (y - x))
        elif KIND == REVERSE:
            mean = _faded(mean, s_fade) + tl.where(q == 0, 0.0, q * (x - y))
    s_most, t_most = tl.max(s_top, 0), tl.max(t_top, 0)
    s_fade, t_fade = tl.exp(s_top - s_most[None, :]), tl.exp(t_top - t_most[None, :])
    place = found + part * (5 * stride) + c
    tl.store(place, s_most, mask=kept)
    tl.store(place + stride, tl.sum(s_sums * s_fade, 0), mask=kept)
    tl.store(place + 2 * stride, t_most, mask=kept)
    tl.store(place + 3 * stride, tl.sum(t_sums * t_fade, 0), mask=kept)
    if KIND == FORWARD:
        tl.store(place + 4 * stride, tl.sum(_faded(mean, t_fade), 0), mask=kept)
    elif KIND == REVERSE:
        tl.store(place + 4 * stride, tl.sum(_faded(mean, s_fade), 0), mask=kept)


@triton.jit(do_not_specialize=("parts", "tokens"))
def merge(found, totals, parts, tokens, KIND: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr):
    """Merge the totals of all parts that `divergence` stored, into `(7, C)`.

    These are maximum, log of the sum of exponentials, and that sum, of student and teacher; mean of the difference of
    `FORWARD` or `REVERSE`, which is not written for `JENSEN_SHANNON`.
    """
    stride = tokens.to(tl.int64)
    c = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    kept = c < tokens
    s_top, t_top = tl.full((PARTS, TOKENS), LOWEST, tl.float32), tl.full((PARTS, TOKENS), LOWEST, tl.float32)
    s_sums, t_sums = tl.zeros((PARTS, TOKENS), tl.float32), tl.zeros((PARTS, TOKENS), tl.float32)
    mean = tl.zeros((PARTS, TOKENS), tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = (part < parts)[:, None] & kept[None, :]
        place = found + part[:, None] * (5 * stride) + c[None, :]
        top = tl.load(place, mask=inside, other=LOWEST)
        s_higher = tl.maximum(s_top, top)
        s_fade, s_share = tl.exp(s_top - s_higher), tl.exp(top - s_higher)
        s_sums = s_sums * s_fade + tl.load(place + stride, mask=inside, other=0.0) * s_share
        top = tl.load(place + 2 * stride, mask=inside, other=LOWEST)
        t_higher = tl.maximum(t_top, top)
        t_fade, t_share = tl.exp(t_top - t_higher), tl.exp(top - t_higher)
        t_sums = t_sums * t_fade + tl.load(place + 3 * stride, mask=inside, other=0.0) * t_share
        if KIND == FORWARD:
            more = tl.load(place + 4 * stride, mask=inside, other=0.0)
            mean = _faded(mean, t_fade) + _faded(more, t_share)
        elif KIND == REVERSE:
            more = tl.load(place + 4 * stride, mask=inside, other=0.0)
            mean = _faded(mean, s_fade) + _faded(more, s_share)
        s_top, t_top = s_higher, t_higher
    s_most, t_most = tl.max(s_top, 0), tl.max(t_top, 0)
    s_fade, t_fade = tl.exp(s_top - s_most[None, :]), tl.exp(t_top - t_most[None, :])
    s_whole, t_whole = tl.sum(s_sums * s_fade, 0), tl.sum(t_sums * t_fade, 0)
    to = totals + c
    tl.store(to, tl.where(s_whole == 0, float("-inf"), s_most), mask=kept)
    tl.store(to + stride, tl.log(s_whole), mask=kept)
    tl.store(to + 2 * stride, s_whole, mask=kept)
    tl.store(to + 3 * stride, tl.where(t_whole == 0, float("-inf"), t_most), mask=kept)
    tl.store(to + 4 * stride, tl.log(t_whole), mask=kept)
    tl.store(to + 5 * stride, t_whole, mask=kept)
    if KIND == FORWARD:
        whole = tl.where(t_whole == 0, 1.0, t_whole)
        tl.store(to + 6 * stride, tl.sum(_faded(mean, t_fade), 0) / whole, mask=kept)
    elif KIND == REVERSE:
        whole = tl.where(s_whole == 0, 1.0, s_whole)
        tl.store(to + 6 * stride, tl.sum(_faded(mean, s_fade), 0) / whole, mask=kept)


@triton.jit
def _log_mixture(q, p, beta):
    """Return `log((1 - beta) q + beta p)`, or the log of the least normal number."""
    return tl.log(tl.maximum((1.0 - beta) * q + beta * p, 1.2e-38))


@triton.jit(do_not_specialize=("rows", "units"))
def jensen_shannon(
    s, t, s_bias, t_bias, levels, found, rows, units, beta,
    UNIT: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Store the parts of both divergences from the mixture m that `PART` rows add, `(parts, 2, C)`.

    These are the sums of `q (log q - log m)` and of `p (log p - log m)`. `levels` is `(4, C)`: maximum, and log of the
    sum of exponentials, of student and teacher.
    """
    tokens = units * UNIT
    stride = tokens.to(tl.int64)
    part = tl.program_id(1)
    c = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    kept = c < tokens
    s_top = tl.load(levels + c, mask=kept, other=0.0)[None, :]
    s_log = tl.load(levels + stride + c, mask=kept, other=0.0)[None, :]
    t_top = tl.load(levels + 2 * stride + c, mask=kept, other=0.0)[None, :]
    t_log = tl.load(levels + 3 * stride + c, mask=kept, other=0.0)[None, :]
    from_s, from_t = tl.zeros((ROWS, TOKENS), tl.float32), tl.zeros((ROWS, TOKENS), tl.float32)
    stop = tl.minimum((part + 1) * PART, rows)
    for start in range(part * PART, stop, ROWS):
        i = start + tl.arange(0, ROWS)
        inside = (i < stop)[:, None] & kept[None, :]
        log_q = _logits(s, s_bias, i, c, rows, stride, inside) - s_top - s_log
        log_p = _logits(t, t_bias, i, c, rows, stride, inside) - t_top - t_log
        q, p = tl.exp(log_q), tl.exp(log_p)
        log_m = _log_mixture(q, p, beta)
        from_s += tl.where(q == 0, 0.0, q * (log_q - log_m))
        from_t += tl.where(p == 0, 0.0, p * (log_p - log_m))
    place = found + part * (2 * stride) + c
    tl.store(place, tl.sum(from_s, 0), mask=kept)
    tl.store(place + stride, tl.sum(from_t, 0), mask=kept)


@triton.jit(do_not_specialize=("rows", "units"))
def divergence_gradient(
    s, t, s_bias, t_bias, factors, row_sums, rows, units, beta,
    KIND: tl.constexpr, UNIT: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Replace the logits of the student in `PART` rows by gradients.

    The formulas are those of `embedlayer.kernels.cpu.softmax.divergence_gradient`, from `factors`, `(6, C)`. `row_sums`
    is `(programs along the tokens, R)`: the sums of gradients over the tokens of each program; or `None`.
    """
    tokens = units * UNIT
    stride = tokens.to(tl.int64)
    part = tl.program_id(1)
    c = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    kept = c < tokens
    s_top = tl.load(factors + c, mask=kept, other=0.0)[None, :]
    t_top = tl.load(factors + stride + c, mask=kept, other=0.0)[None, :]
    f0 = tl.load(factors + 2 * stride + c, mask=kept, other=0.0)[None, :]
    f1 = tl.load(factors + 3 * stride + c, mask=kept, other=0.0)[None, :]
    if KIND != FORWARD:
        f2 = tl.load(factors + 4 * stride + c, mask=kept, other=0.0)[None, :]
    if KIND == 0:
        f3 = tl.load(factors + 5 * stride + c, mask=kept, other=0.0)[None, :]
    stop = tl.minimum((part + 1) * PART, rows)
    for start in range(part * PART, stop, ROWS):
        i = start + tl.arange(0, ROWS)
        inside = (i < stop)[:, None] & kept[None, :]
        x = _logits(s, s_bias, i, c, rows, stride, inside)
        y = _logits(t, t_bias, i, c, rows, stride, inside)
        if KIND == FORWARD:
            g = tl.exp(x - s_top) * f0 + tl.exp(y - t_top) * f1
        elif KIND == REVERSE:
            q = tl.exp(x - s_top)
            g = tl.where(q == 0, q * f2, q * f2 * (f0 + f1 * (x - y)))
        else:
            log_q, log_p = x - s_top - f2, y - t_top - f3
            q, p = tl.exp(log_q), tl.exp(log_p)
            g = tl.where(q == 0, 0.0, q * f0 * (log_q - _log_mixture(q, p, beta) + f1))
        if row_sums is not None:
            to = row_sums + tl.program_id(0) * tl.cast(rows, tl.int64) + i
            tl.store(to, tl.sum(tl.where(inside, g, 0.0), 1), mask=i < stop)
        tl.store(s + i[:, None] * stride + c[None, :], g.to(s.dtype.element_ty), mask=inside)


BLOCK = {"s": "*z", "t": "*z", "s_bias": "*fp32", "t_bias": "*fp32", "rows": "i32", "units": "i32"}
BLOCKS = {"PART": 256, "ROWS": 4, "TOKENS": 256}
PLAIN = {"s_bias": None, "t_bias": None, "UNIT": 8}
INPUTS = ("s", "t", "s_bias", "t_bias")

KINDS = {"jensen_shannon": {"KIND": 0}, "forward": {"KIND": softmax.FORWARD}, "reverse": {"KIND": softmax.REVERSE}}

LAUNCHES = {
    "divergence": Launch(
        divergence,
        grid=_tiles_by_parts,
        types={**BLOCK, "found": "*fp32"},
        blocks=BLOCKS,
        wide=("s", "t"),
        reads=INPUTS,
        writes=("found",),
        variants={name: Variant({**PLAIN, **kind}) for name, kind in KINDS.items()}
        | {"biases": Variant({"UNIT": 8, "KIND": 1}), "odd": Variant({**PLAIN, "UNIT": 1, "KIND": 1})},
    ),
    "merge": Launch(
        merge,
        grid=lambda a: (-(-a["tokens"] // a["TOKENS"]),),
        types={"found": "*fp32", "totals": "*fp32", "parts": "i32", "tokens": "i32"},
        blocks={"PARTS": 32, "TOKENS": 32},
        wide=(),
        reads=("found",),
        writes=("totals",),
        variants={name: Variant(kind) for name, kind in KINDS.items()},
        dtypes=(torch.float32,),
    ),
    "jensen_shannon": Launch(
        jensen_shannon,
        grid=_tiles_by_parts,
        types={**BLOCK, "levels": "*fp32", "found": "*fp32", "beta": "fp32"},
        blocks=BLOCKS,
        wide=("s", "t"),
        reads=(*INPUTS, "levels"),
        writes=("found",),
        variants={
            "plain": Variant(PLAIN),
            "biases": Variant({"UNIT": 8}),
            "odd": Variant({**PLAIN, "UNIT": 1}),
        },
    ),
    "divergence_gradient": Launch(
        divergence_gradient,
        grid=_tiles_by_parts,
        types={**BLOCK, "factors": "*fp32", "row_sums": "*fp32", "beta": "fp32"},
        blocks=BLOCKS,
        wide=("s", "t"),
        reads=(*INPUTS, "factors"),
        writes=("s", "row_sums"),
        variants={name: Variant({**PLAIN, "row_sums": None, **kind}) for name, kind in KINDS.items()}
        | {
            "biases": Variant({"UNIT": 8, "KIND": 1}),
            "odd": Variant({**PLAIN, "row_sums": None, "UNIT": 1, "KIND": 1}),
        },
    ),
}
"""How each kernel is launched."""
