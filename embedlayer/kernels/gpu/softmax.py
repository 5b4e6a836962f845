"""Triton kernels over blocks of logits: totals of softmaxes, and gradients by the logits.

`embedlayer.losses.objective.Objective.terms` and `dlogits_` define them, as those of `embedlayer.kernels.cpu.softmax`.
A block is `(R, C)`, R rows of the vocabulary by C tokens: a program has consecutive tokens, which it loads 128 bits at
a time, and a part of the rows. No two programs write to the same memory, so the results do not depend on their order.

Logits are read as the matrix product wrote them, and finished in registers: `scale`, `bias`, soft cap and masked row,
as `embedlayer.losses.blocks.BlockFinishing` defines them. These kernels share arguments:

- `z`: logits as stored, `(R, C)`.
- `bias`: bias of each row, float32, `(R,)`, or `None`.
- `rows`, `units`: R, and C / UNIT; so Triton knows that C is divisible by 8 where `UNIT` is 8.
- `first_id`: token ID of the first row.
- `scale`, `softcap`, `bound`, `masked`: see `BlockFinishing`; `masked` is the row in this block. `None` is for none.
"""

import torch
import triton
import triton.language as tl

from embedlayer.kernels.cpu import softmax
from embedlayer.kernels.gpu.launch import Arguments, Grid, Launch, Variant

INTEGERS = ("rows", "units", "first_id", "masked", "parts")

MISSING = tl.constexpr(softmax.MISSING)
LARGEST_ID = tl.constexpr(0xFFFFFFFF)
NAN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def order_of(x):
    """Return integers in the order of float32 numbers; 0.0 and -0.0 are equal, and NaN is largest."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, tl.where(bits < 0, bits ^ NAN, bits), NAN)


@triton.jit
def key_of(order, number):
    """Return the key of an integer of `order_of`, and of the number of a row; see `embedlayer.kernels.gpu.largest`."""
    return (order.to(tl.int64) << 32) + (tl.cast(number, tl.int64) ^ LARGEST_ID)


@triton.jit
def _finished(x, i, bias, rows, scale, softcap, bound, masked):
    """Finish stored logits of the rows `i`, whose shape broadcasts to that of `x`, in float32."""
    x = x.to(tl.float32) * scale
    if bias is not None:
        x += tl.load(bias + i, mask=(i >= 0) & (i < rows), other=0.0)
    if softcap is not None:
        small = tl.exp(-2.0 * tl.abs(x) / softcap)  # tanh by the exponential of a number that is not positive
        size = bound * (1.0 - small) / (1.0 + small)
        x = tl.where(x < 0, -size, size)
    if masked is not None:
        x = tl.where(i == masked, float("-inf"), x)
    return x


@triton.jit
def _unfinished(g, x, i, softcap, bound, masked):
    """Return the gradients by the scaled logits of the rows `i`, from those by the finished logits `x`."""
    if softcap is not None:
        share = x / bound
        g = g * ((1.0 - share * share) * (bound / softcap))
    if masked is not None:
        g = tl.where(i == masked, 0.0, g)
    return g


@triton.jit(do_not_specialize=INTEGERS)
def statistics(
    z, bias, found, lane_keys, part_keys, rows, units, parts, scale, softcap, bound, masked,
    SUM: tl.constexpr, MEAN: tl.constexpr, SQUARES: tl.constexpr,
    UNIT: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Store totals over `PART` rows: maximum, sum of exponentials, and on request three more, `(parts, numbers, C)`.

    These are the sum of logits, the sum of `e (x - maximum)`, and the sum of `e²`, for `e = exp(x - maximum)`. Each
    lane keeps totals of the logits that it has read. A logit costs one exponential: of minus its distance from the
    maximum so far, which is the factor of the totals if the logit is larger, and else of the logit.

    `lane_keys`, `(parts * ROWS, C)`, and `part_keys`, `(C, parts)`, or `None`: the keys of the largest logits that each
    lane and all lanes of a program have read, with the number of their row; `MISSING` if there is none.
    """
    tokens = units * UNIT
    stride = tokens.to(tl.int64)
    part = tl.program_id(1)
    c = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    top = tl.full((ROWS, TOKENS), float("-inf"), tl.float32)
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    plain, mean, squares = sums, sums, sums
    best, best_row = tl.full((ROWS, TOKENS), -NAN - 1, tl.int32), tl.full((ROWS, TOKENS), -1, tl.int32)
    stop = min((part + 1) * PART, rows)
    for start in range(part * PART, stop, ROWS):
        i = start + tl.arange(0, ROWS)[:, None]
        inside = (i < stop) & (c < tokens)[None, :]
        x = tl.load(z + i * stride + c[None, :], mask=inside, other=0.0)
        x = _finished(x, i, bias, rows, scale, softcap, bound, masked)
        if lane_keys is not None:
            order = tl.where(inside, order_of(x), -NAN - 1)
            best_row = tl.where(order > best, i, best_row)
            best = tl.maximum(order, best)
        if SUM:
            plain += tl.where(inside, x, 0.0)
        x = tl.where(inside, x, float("-inf"))
        is_higher = x > top
        above = tl.where(x == float("-inf"), -1000.0, x - top)
        e = tl.exp(-tl.abs(above))
        if MEAN:
            fallen = tl.where(top == float("-inf"), 0.0, above)
            mean = tl.where(is_higher, e * (mean - fallen * sums), mean + e * tl.maximum(above, -1000.0))
        if SQUARES:
            squares = tl.where(is_higher, squares * (e * e) + 1.0, squares + e * e)
        sums = tl.where(is_higher, sums * e + 1.0, sums + e)
        top = tl.where(is_higher, x, top)
    most = tl.max(top, 0)
    shift = top - tl.where(most == float("-inf"), 0.0, most)[None, :]
    fade = tl.exp(shift)
    kept = c < tokens
    place = found + part * ((2 + SUM + MEAN + SQUARES) * stride) + c
    tl.store(place, most, mask=kept)
    tl.store(place + tokens, tl.sum(sums * fade, 0), mask=kept)
    place += 2 * tokens
    if SUM:
        tl.store(place, tl.sum(plain, 0), mask=kept)
        place += tokens
    if MEAN:
        fallen = tl.where(top == float("-inf"), 0.0, shift)
        tl.store(place, tl.sum(fade * (mean + fallen * sums), 0), mask=kept)
        place += tokens
    if SQUARES:
        tl.store(place, tl.sum(fade * fade * squares, 0), mask=kept)
    if lane_keys is not None:
        key = tl.where(best_row < 0, MISSING, key_of(best, best_row))
        lane = part * ROWS + tl.arange(0, ROWS)[:, None]
        tl.store(lane_keys + lane * stride + c[None, :], key, mask=kept[None, :])
        tl.store(part_keys + c * tl.cast(parts, tl.int64) + part, tl.max(key, 0), mask=kept)


@triton.jit(do_not_specialize=(*INTEGERS, "parts", "requests"))
def merge(
    found, z, bias, ids, totals, selected, parts, requests, rows, units, first_id, scale, softcap, bound, masked,
    SUM: tl.constexpr, MEAN: tl.constexpr, SQUARES: tl.constexpr,
    UNIT: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Merge the totals of all parts that `statistics` stored, and read the requested logits.

    `totals` is `(6, C)`: maximum, log of the sum of exponentials, that sum, sum of logits, mean of logits minus
    maximum under the softmax, log of the sum of squared exponentials. Of the last three, those that are not requested
    are not written. `selected` is `(K, C)`, for `ids`: 0 where the ID is no row of the block.
    """
    tokens = units * UNIT
    stride = tokens.to(tl.int64)
    c = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    kept = c < tokens
    top = tl.full((PARTS, TOKENS), float("-inf"), tl.float32)
    sums = tl.zeros((PARTS, TOKENS), tl.float32)
    plain, mean, squares = sums, sums, sums
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = (part < parts)[:, None] & kept[None, :]
        place = found + part[:, None] * ((2 + SUM + MEAN + SQUARES) * stride) + c[None, :]
        part_top = tl.load(place, mask=inside, other=float("-inf"))
        part_sums = tl.load(place + tokens, mask=inside, other=0.0)
        higher = tl.maximum(top, part_top)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade, part_fade = tl.exp(top - base), tl.exp(part_top - base)
        place += 2 * tokens
        if SUM:
            plain += tl.load(place, mask=inside, other=0.0)
            place += tokens
        if MEAN:
            fallen = tl.where(top == float("-inf"), 0.0, top - base)
            part_fallen = tl.where(part_top == float("-inf"), 0.0, part_top - base)
            part_mean = tl.load(place, mask=inside, other=0.0)
            mean = fade * (mean + fallen * sums) + part_fade * (part_mean + part_fallen * part_sums)
            place += tokens
        if SQUARES:
            squares = fade * fade * squares + part_fade * part_fade * tl.load(place, mask=inside, other=0.0)
        sums = fade * sums + part_fade * part_sums
        top = higher
    most = tl.max(top, 0)
    shift = top - tl.where(most == float("-inf"), 0.0, most)[None, :]
    fade = tl.exp(shift)
    whole = tl.sum(sums * fade, 0)
    to = totals + c
    tl.store(to, most, mask=kept)
    tl.store(to + tokens, tl.log(whole), mask=kept)
    tl.store(to + 2 * tokens, whole, mask=kept)
    if SUM:
        tl.store(to + 3 * tokens, tl.sum(plain, 0), mask=kept)
    if MEAN:
        fallen = tl.where(top == float("-inf"), 0.0, shift)
        mean_sum = tl.sum(fade * (mean + fallen * sums), 0)
        tl.store(to + 4 * tokens, mean_sum / tl.where(whole == 0, 1.0, whole), mask=kept)
    if SQUARES:
        tl.store(to + 5 * tokens, tl.log(tl.sum(fade * fade * squares, 0)), mask=kept)
    if ids is not None:
        for k in range(requests):
            row = tl.load(ids + k * stride + c, mask=kept, other=-1) - first_id
            is_here = kept & (row >= 0) & (row < rows)
            x = tl.load(z + tl.where(is_here, row, 0) * stride + c, mask=is_here, other=0.0)
            x = _finished(x, row, bias, rows, scale, softcap, bound, masked)
            tl.store(selected + k * stride + c, tl.where(is_here, x, 0.0), mask=kept)


@triton.jit
def _store_factors(factors, c, kept, stride, level, whole, offset, slope, squares, plain):
    """Store the factors of `statistics_gradient` of the tokens `c`, where `kept`."""
    to = factors + c
    tl.store(to, tl.where(level > float("-inf"), level, 0.0), mask=kept)
    tl.store(to + stride, 1.0 / whole, mask=kept)
    tl.store(to + 2 * stride, offset, mask=kept)
    tl.store(to + 3 * stride, slope, mask=kept)
    tl.store(to + 4 * stride, squares, mask=kept)
    tl.store(to + 5 * stride, plain, mask=kept)


@triton.jit(do_not_specialize=("tokens",))
def statistics_factors(
    top, sums, mean, log_squares, by_log_sum, by_mean, by_squares, by_sum, factors, tokens, TOKENS: tl.constexpr
):  # fmt: skip
    """Store the factors of `statistics_gradient`, `(6, C)`, from totals and their gradients; `None` for no gradient."""
    c = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    stride = tokens.to(tl.int64)
    kept = c < tokens
    level = tl.load(top + c, mask=kept, other=0.0)
    whole = tl.load(sums + c, mask=kept, other=1.0)
    zero = tl.zeros((TOKENS,), tl.float32)
    offset, slope, squares, plain = zero, zero, zero, zero
    if by_log_sum is not None:
        offset = tl.load(by_log_sum + c, mask=kept, other=0.0)
    if by_mean is not None:
        slope = tl.load(by_mean + c, mask=kept, other=0.0)
        offset += slope * (1.0 - tl.load(mean + c, mask=kept, other=0.0))
    if by_squares is not None:
        size = tl.exp(-tl.load(log_squares + c, mask=kept, other=0.0))
        squares = 2.0 * tl.load(by_squares + c, mask=kept, other=0.0) * size
    if by_sum is not None:
        plain = tl.load(by_sum + c, mask=kept, other=0.0)
    _store_factors(factors, c, kept, stride, level, whole, offset, slope, squares, plain)


@triton.jit
def _gradient(x, top, f0, f1, f2, f3, f4, MEAN: tl.constexpr, SQUARES: tl.constexpr):
    """Return `e f0 (f1 + f2 x) + e² f3 + f4` for `x` minus `top` and `e = exp(x)`."""
    x = x - top
    e = tl.exp(x)
    slope = f0 * (f1 + f2 * tl.maximum(x, -1000.0)) if MEAN else f0 * f1
    g = e * slope
    if SQUARES:
        g += e * e * f3
    return g + f4


@triton.jit(do_not_specialize=INTEGERS)
def statistics_gradient(
    z, bias, ids, by_request, factors, row_sums, rows, units, first_id, scale, softcap, bound, masked,
    MEAN: tl.constexpr, SQUARES: tl.constexpr,
    UNIT: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Replace logits by gradients: `e f₀ (f₁ + f₂ x) + e² f₃ + f₄`, plus that of one requested logit of each token.

    These are gradients by the finished logits; they are stored times the derivative of the finishing, as those by `z`.
    `factors` is `(6, C)`: `top`, and f₀ to f₄, as in `embedlayer.kernels.cpu.softmax.statistics_gradient`. `ids` and
    `by_request` are `(1, C)`, or `None`. `row_sums` is `(programs along the tokens, R)`: the sums of gradients over the
    tokens of each program, before they are multiplied by `scale`; or `None`.
    """
    tokens = units * UNIT
    stride = tokens.to(tl.int64)
    c = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    kept = c < tokens
    top = tl.load(factors + c, mask=kept, other=0.0)[None, :]
    f0 = tl.load(factors + stride + c, mask=kept, other=0.0)[None, :]
    f1 = tl.load(factors + 2 * stride + c, mask=kept, other=0.0)[None, :]
    f4 = tl.load(factors + 5 * stride + c, mask=kept, other=0.0)[None, :]
    f2, f3 = f4, f4
    if MEAN:
        f2 = tl.load(factors + 3 * stride + c, mask=kept, other=0.0)[None, :]
    if SQUARES:
        f3 = tl.load(factors + 4 * stride + c, mask=kept, other=0.0)[None, :]
    if ids is not None:
        requested = tl.load(ids + c, mask=kept, other=-1) - first_id
        requested = tl.where((requested >= 0) & (requested < rows), requested, -1).to(tl.int32)[None, :]
        more = tl.load(by_request + c, mask=kept, other=0.0)[None, :]
    part = tl.program_id(1)
    stop = min((part + 1) * PART, rows)
    for start in range(part * PART, stop, ROWS):
        i = start + tl.arange(0, ROWS)[:, None]
        inside = (i < stop) & kept[None, :]
        place = z + i * stride + c[None, :]
        x = tl.load(place, mask=inside, other=0.0)
        x = _finished(x, i, bias, rows, scale, softcap, bound, masked)
        g = _gradient(x, top, f0, f1, f2, f3, f4, MEAN, SQUARES)
        if ids is not None:
            g += tl.where(i == requested, more, 0.0)
        g = _unfinished(g, x, i, softcap, bound, masked)
        if row_sums is not None:
            to = row_sums + tl.program_id(0) * rows.to(tl.int64) + i
            tl.store(to, tl.sum(tl.where(inside, g, 0.0), 1, keep_dims=True), mask=i < stop)
        tl.store(place, (g * scale).to(z.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("tokens", "rows", "first_id", "masked", "requests"))
def requested_gradient(
    z, ids, by_request, values, factors, of_bias, requests, rows, tokens, first_id, scale, softcap, bound, masked,
    MEAN: tl.constexpr, SQUARES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Store the gradients at K requested logits of each token, over those that `statistics_gradient` stored there.

    They are computed again from `values`, the requested logits, so that all terms of a sum are added in float32. IDs
    that a token requests more than once get the same number at each. All of `ids`, `by_request`, `values` are
    `(K, C)`; so is `of_bias`, or `None`: what each request adds to the gradient of the bias, 0 outside of the block.
    """
    c = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    k = tl.program_id(1)
    stride = tokens.to(tl.int64)
    kept = c < tokens
    row = tl.load(ids + k * stride + c, mask=kept, other=-1) - first_id
    is_here = kept & (row >= 0) & (row < rows)
    x = tl.load(values + k * stride + c, mask=kept, other=0.0)
    more = tl.zeros((TOKENS,), tl.float32)
    for other in range(requests):
        is_same = tl.load(ids + other * stride + c, mask=kept, other=-1) - first_id == row
        more += tl.where(is_same, tl.load(by_request + other * stride + c, mask=kept, other=0.0), 0.0)
    top = tl.load(factors + c, mask=kept, other=0.0)
    f0 = tl.load(factors + stride + c, mask=kept, other=0.0)
    f1 = tl.load(factors + 2 * stride + c, mask=kept, other=0.0)
    f2 = tl.load(factors + 3 * stride + c, mask=kept, other=0.0)
    f3 = tl.load(factors + 4 * stride + c, mask=kept, other=0.0)
    f4 = tl.load(factors + 5 * stride + c, mask=kept, other=0.0)
    g = _gradient(x, top, f0, f1, f2, f3, f4, MEAN, SQUARES) + more
    g = _unfinished(g, x, row, softcap, bound, masked) * scale
    tl.store(z + tl.where(is_here, row, 0) * stride + c, g.to(z.dtype.element_ty), mask=is_here)
    if of_bias is not None:
        own = tl.load(by_request + k * stride + c, mask=kept, other=0.0)
        own = tl.where(is_here, _unfinished(own, x, row, softcap, bound, masked), 0.0)
        tl.store(of_bias + k * stride + c, own, mask=kept)


@triton.jit(do_not_specialize=("tokens", "results", "vocab_size"))
def cross_entropy(
    ids, top, log_sum, sums, selected, logit_sum, weights, losses, by_selected, factors, total,
    tokens, results, vocab_size, label_smoothing, z_loss, TOKENS: tl.constexpr,
):  # fmt: skip
    """Store the loss of each token, its gradient by the target's logit, and the factors of the other gradients.

    `embedlayer.losses.statistics.CrossEntropy` defines the loss. The gradients are those of the losses times
    `weights`. `logit_sum` is `None` without label smoothing. `factors` is `(6, C)`, as `statistics_factors` stores it.
    A target outside the vocabulary has the gradient 0 and the loss NaN, or 0 if it is -1. `total` is the sum of the
    first `results` losses times their weights: one program has all tokens.
    """
    weighted = tl.zeros((TOKENS,), tl.float32)
    for start in range(0, tokens, TOKENS):
        c = start + tl.arange(0, TOKENS)
        kept = c < tokens
        target = tl.load(ids + c, mask=kept, other=0)
        is_token = (target >= 0) & (target < vocab_size)
        highest = tl.load(top + c, mask=kept, other=0.0)
        level = tl.load(log_sum + c, mask=kept, other=0.0)
        whole = tl.load(sums + c, mask=kept, other=1.0)
        chosen = tl.load(selected + c, mask=kept, other=0.0)
        loss = -(chosen - highest - level)
        lse = highest + level
        weight = tl.where(is_token, tl.load(weights + c, mask=kept, other=0.0), 0.0)
        zero = tl.zeros((TOKENS,), tl.float32)
        plain = zero
        if logit_sum is not None:
            mean = tl.load(logit_sum + c, mask=kept, other=0.0) / vocab_size
            loss = (1.0 - label_smoothing) * loss + label_smoothing * (highest - mean + level)
            plain = -label_smoothing / vocab_size * weight
        loss = tl.where(is_token, loss + z_loss * lse * lse, tl.where(target == -1, 0.0, float("nan")))
        tl.store(losses + c, loss, mask=kept)
        weighted += tl.where(c < results, loss * weight, 0.0)
        tl.store(by_selected + c, -(1.0 - label_smoothing) * weight, mask=kept)
        offset = weight * (1.0 + 2.0 * z_loss * lse)
        _store_factors(factors, c, kept, tokens.to(tl.int64), highest, whole, offset, zero, zero, plain)
    tl.store(total, tl.sum(weighted, 0))


@triton.jit(do_not_specialize=("tokens", "length", "vocab_size", "ignore_index", "other"))
def check_targets(
    targets, weights, record, ids, mask, is_bad, factors, numbers, is_empty, tokens, length, vocab_size, ignore_index,
    other, MEAN: tl.constexpr, CODED: tl.constexpr, READ: tl.constexpr, RECORD: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Store the targets with `other` for those that do not count, which count, and the factors of a sum or mean.

    A factor is times the weight of the target, NaN if it is infinite; `weights` is `None` for 1. One program has all
    targets, so that it knows how many count and which is the first bad one. `numbers` is what the host reads: a copy of
    `record`, how many targets are neither tokens nor ignored, with weights how many that are not ignored have one that
    is not finite, and how many do not count; `is_empty` is whether none counts. With `READ` bad targets count and are
    unchanged. Otherwise they do not count, `is_bad` marks them, and the first one is recorded if `record` is empty; see
    `embedlayer.core.index_checks.target_record`. With `CODED` bad ones are stored as V and ignored ones as -1, for
    `cross_entropy`, and `is_bad` marks both.
    """
    first = tl.zeros((TOKENS,), tl.int32) + tokens
    value = tl.zeros((TOKENS,), tl.int64)
    ignored, bad = tl.zeros((TOKENS,), tl.int32), tl.zeros((TOKENS,), tl.int32)
    infinite = tl.zeros((TOKENS,), tl.int32)
    for start in range(0, tokens, TOKENS):
        c = start + tl.arange(0, TOKENS)
        inside = c < tokens
        target = tl.load(targets + c, mask=inside, other=ignore_index)
        counts = target != ignore_index
        outside = counts & ((target < 0) | (target >= vocab_size))
        ignored += (inside & (target == ignore_index)).to(tl.int32)
        bad += outside.to(tl.int32)
        if weights is not None:
            is_finite = tl.abs(tl.load(weights + c, mask=inside, other=0.0)) < float("inf")
            infinite += (counts & (is_finite == 0)).to(tl.int32)
        if not READ:
            counts = counts & (target >= 0) & (target < vocab_size)
            is_first = outside & (first == tokens)
            value = tl.where(is_first, target, value)
            first = tl.where(is_first, c, first)
            tl.store(is_bad + c, (counts == 0) if CODED else outside, mask=inside)
        left = tl.where(outside, vocab_size, -1) if CODED else other
        tl.store(ids + c, tl.where(counts, target, left), mask=inside)
        tl.store(mask + c, counts, mask=inside)
    left_out, wrong = tl.sum(ignored, 0), tl.sum(bad, 0)
    i = tl.arange(0, RECORD)
    recorded = tl.load(record + i)
    if not READ:
        left_out += wrong
        place = tl.min(first, 0)
        value = tl.sum(tl.where(first == place, value, 0), 0)
        found = tl.where(i == 0, place, tl.where(i == 1, value, tl.where(i == 2, length, vocab_size)))
        is_new = (place < tokens) & (tl.sum(tl.where(i == 0, recorded, 0), 0) < 0)
        recorded = tl.where(is_new, found, recorded)
        tl.store(record + i, recorded)
    tl.store(numbers + i, recorded)
    tl.store(numbers + RECORD, wrong)
    if weights is None:
        tl.store(numbers + RECORD + 1, left_out)
    else:
        tl.store(numbers + RECORD + 1, tl.sum(infinite, 0))
        tl.store(numbers + RECORD + 2, left_out)
    tl.store(is_empty, left_out == tokens)
    count = tl.maximum(tokens - left_out, 1).to(tl.float32)
    factor = 1.0
    if MEAN:
        factor = tl.math.div_rn(1.0, count)
    for start in range(0, tokens, TOKENS):
        c = start + tl.arange(0, TOKENS)
        target = tl.load(targets + c, mask=c < tokens, other=ignore_index)
        counts = target != ignore_index
        if not READ:
            counts = counts & (target >= 0) & (target < vocab_size)
        own = factor
        if weights is not None:
            own = tl.load(weights + c, mask=c < tokens, other=0.0)
            own = tl.where(tl.abs(own) < float("inf"), own, float("nan"))
            if MEAN:
                own = tl.math.div_rn(own, tl.zeros((TOKENS,), tl.float32) + count)
        tl.store(factors + c, tl.where(counts, own, 0.0), mask=c < tokens)


def _tiles(a: Arguments) -> int:
    """Return the number of programs along the tokens."""
    tokens: int = a["units"] * a["UNIT"] if "units" in a else a["tokens"]
    return -(-tokens // int(a["TOKENS"]))


def _tiles_by_parts(a: Arguments) -> Grid:
    return _tiles(a), -(-a["rows"] // a["PART"])


FINISHING = {"bias": "*fp32", "scale": "fp32", "softcap": "fp32", "bound": "fp32", "masked": "i32"}
UNFINISHED = {"bias": None, "softcap": None, "bound": None, "masked": None}
"""Values of the arguments of logits that need no finishing but the scale."""

WITHOUT_KEYS = {"lane_keys": None, "part_keys": None}

BLOCK = {"z": "*z", "rows": "i32", "units": "i32", **FINISHING}

FEW: dict[str, bool] = {"SUM": False, "MEAN": False, "SQUARES": False}
ALL: dict[str, bool] = {"SUM": True, "MEAN": True, "SQUARES": True}

STATISTICS = {**BLOCK, "found": "*fp32", "lane_keys": "*i64", "part_keys": "*i64", "parts": "i32"}

CHECKS: dict[str, dict[str, bool | None]] = {
    "recorded": {"weights": None, "MEAN": True, "CODED": True, "READ": False},
    "plain": {"weights": None, "MEAN": True, "CODED": False, "READ": False},
    "read": {"weights": None, "is_bad": None, "MEAN": True, "CODED": False, "READ": True},
    "sum": {"weights": None, "is_bad": None, "MEAN": False, "CODED": False, "READ": True},
    "weighted": {"is_bad": None, "MEAN": True, "CODED": False, "READ": True},
    "weighted, recorded": {"MEAN": False, "CODED": True, "READ": False},
}

LAUNCHES = {
    "statistics": Launch(
        statistics,
        grid=_tiles_by_parts,
        types=STATISTICS,
        blocks={"PART": 256, "ROWS": 4, "TOKENS": 256},
        wide=("z",),
        reads=("z", "bias"),
        writes=("found",),
        variants={
            "loss": Variant({**UNFINISHED, **FEW, **WITHOUT_KEYS, "UNIT": 8}),
            "finished": Variant({**FEW, **WITHOUT_KEYS, "UNIT": 8}),
            "odd": Variant({**UNFINISHED, **FEW, **WITHOUT_KEYS, "UNIT": 1}),
            "all": Variant({**ALL, **WITHOUT_KEYS, "UNIT": 8}, registers=192),
        },
    ),
    "statistics_and_keys": Launch(
        statistics,
        grid=_tiles_by_parts,
        types=STATISTICS,
        blocks={"PART": 256, "ROWS": 8, "TOKENS": 128},
        wide=("z",),
        reads=("z", "bias"),
        writes=("found", "lane_keys", "part_keys"),
        variants={
            "largest": Variant({**UNFINISHED, **FEW, "UNIT": 8}),
            "all": Variant({**ALL, "UNIT": 8}, registers=192),
        },
    ),
    "merge": Launch(
        merge,
        grid=lambda a: (_tiles(a),),
        types={
            **BLOCK,
            **dict.fromkeys(("found", "totals", "selected"), "*fp32"),
            "ids": "*i64",
            **dict.fromkeys(("parts", "requests", "first_id"), "i32"),
        },
        blocks={"PARTS": 32, "TOKENS": 32},
        wide=(),
        reads=("found", "ids"),
        writes=("totals", "selected"),
        gathered={"z": "selected"},
        variants={
            "loss": Variant({**UNFINISHED, **FEW, "UNIT": 8}),
            "all": Variant({**ALL, "UNIT": 1}, registers=192),
        },
    ),
    "statistics_factors": Launch(
        statistics_factors,
        grid=lambda a: (_tiles(a),),
        types={name: "*fp32" for name in statistics_factors.arg_names if name not in ("tokens", "TOKENS")}
        | {"tokens": "i32"},
        blocks={"TOKENS": 128},
        wide=(),
        reads=("top", "sums", "mean", "log_squares", "by_log_sum", "by_mean", "by_squares", "by_sum"),
        writes=("factors",),
        dtypes=(torch.float32,),
    ),
    "statistics_gradient": Launch(
        statistics_gradient,
        grid=_tiles_by_parts,
        types={
            **BLOCK,
            "ids": "*i64",
            **dict.fromkeys(("by_request", "factors", "row_sums"), "*fp32"),
            "first_id": "i32",
        },
        blocks={"PART": 256, "ROWS": 4, "TOKENS": 256},
        wide=("z",),
        reads=("z", "bias", "ids", "by_request", "factors"),
        writes=("z", "row_sums"),
        variants={
            "loss": Variant({**UNFINISHED, "row_sums": None, "MEAN": False, "SQUARES": False, "UNIT": 8}),
            "finished": Variant({"MEAN": False, "SQUARES": False, "UNIT": 8}),
            "odd": Variant({**UNFINISHED, "row_sums": None, "MEAN": False, "SQUARES": False, "UNIT": 1}),
            "all": Variant({"MEAN": True, "SQUARES": True, "UNIT": 8}, registers=192),
        },
    ),
    "requested_gradient": Launch(
        requested_gradient,
        grid=lambda a: (_tiles(a), a["requests"]),
        types={
            **{name: kind for name, kind in BLOCK.items() if name not in ("bias", "units")},
            "ids": "*i64",
            **dict.fromkeys(("by_request", "values", "factors", "of_bias"), "*fp32"),
            **dict.fromkeys(("requests", "tokens", "first_id"), "i32"),
        },
        blocks={"TOKENS": 128},
        wide=(),
        reads=("ids", "by_request", "values", "factors"),
        writes=("of_bias",),
        gathered={"z": "values"},
        variants={"all": Variant({"MEAN": True, "SQUARES": True})},
    ),
    "cross_entropy": Launch(
        cross_entropy,
        grid=lambda a: (1,),
        types={
            "ids": "*i64",
            **dict.fromkeys(("top", "log_sum", "sums", "selected", "logit_sum", "weights"), "*fp32"),
            **dict.fromkeys(("losses", "by_selected", "factors", "total"), "*fp32"),
            **dict.fromkeys(("tokens", "results", "vocab_size"), "i32"),
            **dict.fromkeys(("label_smoothing", "z_loss"), "fp32"),
        },
        blocks={"TOKENS": 1024},
        wide=(),
        reads=("ids", "top", "log_sum", "sums", "selected", "logit_sum", "weights"),
        writes=("losses", "by_selected", "factors", "total"),
        dtypes=(torch.float32,),
    ),
    "check_targets": Launch(
        check_targets,
        grid=lambda a: (1,),
        types={
            **dict.fromkeys(("targets", "record", "ids", "numbers"), "*i64"),
            **dict.fromkeys(("mask", "is_bad", "is_empty"), "*i1"),
            **dict.fromkeys(("weights", "factors"), "*fp32"),
            **dict.fromkeys(("tokens", "length", "vocab_size", "ignore_index", "other"), "i32"),
        },
        blocks={"RECORD": 4, "TOKENS": 1024},
        wide=(),
        reads=("targets", "targets", "weights", "weights", "record"),
        writes=("ids", "mask", "is_bad", "factors", "numbers", "is_empty"),
        variants={
            name: Variant(constants, registers=192)  # there is one program
            for name, constants in CHECKS.items()
        },
        dtypes=(torch.float32,),
    ),
}
"""How each kernel is launched."""
