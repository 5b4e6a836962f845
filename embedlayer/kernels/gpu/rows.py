"""Triton kernels on rows of a table: sums of gradients of equal rows, pending updates, and an optimizer's step.

`embedlayer.row_sparse.gradient`, `embedlayer.row_sparse.pending_updates` and `embedlayer.row_sparse.storage` define
them. The rows of a batch are sorted, and a program has one place among them: it works if it is the first of its row,
and ends otherwise. So a row has one program, and no two programs write to the same memory. A program writes the steps
of its row behind a barrier, as all of its threads read them before.

The host knows the learning rate of each step and sends it to the record of the steps, `(S + 1, 3)`, float64. Line i has
what `StepHistory.lines` has of step `start + i`. Line 0, of which nothing else is read, begins with the binary
logarithms of `beta1 / sqrt(beta2)` and of `beta2`. From the record a program computes the rule of its row: what the
steps since its last update amount to. So the host reads nothing.
"""

import math
from collections.abc import Callable

import triton
import triton.language as tl

from embedlayer.kernels.gpu.launch import Arguments, Grid, Launch, Variant

NUMBERS = tl.constexpr(3)
TO_BINARY = tl.constexpr(1 / math.log(2))
TOLERANCE = tl.constexpr(1e-7)
LEAST, MOST = tl.constexpr(1.2e-38), tl.constexpr(3e38)
TINY = tl.constexpr(1e-300)

ROW_FACTOR, GOLDEN = tl.constexpr(0xD1B54A32D192ED03), tl.constexpr(0x9E3779B97F4A7C15)
FIRST_64, SECOND_64 = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
COLUMN_FACTOR, FIRST_32, SECOND_32 = tl.constexpr(0x9E3779B9), tl.constexpr(0x85EBCA6B), tl.constexpr(0xC2B2AE35)


@triton.jit
def _is_first(rows, n, row):
    """Return whether place n is the first of its row in the sorted rows."""
    return (n == 0) | (tl.load(rows + tl.maximum(n - 1, 0)) != row)


@triton.jit(do_not_specialize=("places", "units", "drop"))
def sum_equal_rows(
    rows, order, values, sums, places, units, drop,
    UNIT: tl.constexpr, SEVERAL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the sum of the vectors of equal rows at the first place of the row, and zeros at its other places.

    `rows` are N sorted row numbers, `order` has their places in `values`, `(N, D)`; N is `places`, and D is
    `units * UNIT`. The sums of the row `drop`, such as the padding row, are zeros too. A program has one place and
    `COLUMNS` columns. Vectors are added in float32, in the order of the batch.
    """
    width = units * UNIT
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(rows + n)
    total = tl.zeros((COLUMNS,), tl.float32)
    k = n
    is_next = _is_first(rows, n, row) & (row != drop)
    while is_next:
        some = k + tl.arange(0, SEVERAL)
        inside = some < places
        equal = tl.load(rows + some, mask=inside, other=-1) == row
        place = tl.load(order + some, mask=inside & equal, other=0)
        used = (inside & equal)[:, None] & (i < width)[None, :]
        x = tl.load(values + place[:, None] * width + i[None, :], mask=used, other=0.0)
        total += tl.sum(x.to(tl.float32), 0)
        k += SEVERAL
        is_next = (k < places) & (tl.load(rows + tl.minimum(k, places - 1)) == row)
    tl.store(sums + n * width + i, total.to(sums.dtype.element_ty), mask=i < width)


@triton.jit
def _terms(record, place, count, j, log_ratio, log_beta2, log_decay):
    """Return the weights and the nodes of the skipped steps `j`, counted from 0, of a row updated at line `place`.

    They are those of `embedlayer.row_sparse.history`, in float64. `log_decay` is the logarithm of the weight decay of
    all steps up to the last one. From `count` on weights are 0.
    """
    here = j < count
    line = record + (place + 1 + tl.where(here, j, 0)) * NUMBERS
    rate = tl.load(line, mask=here, other=0.0)
    node = tl.load(line + 1, mask=here, other=1.0)
    decay = tl.load(line + 2, mask=here, other=0.0)
    power = tl.cast(j + 1, tl.float64)
    weight = rate * tl.exp2(power * log_ratio + (log_decay - decay) * TO_BINARY)
    return weight, tl.where(weight > 0.0, node * tl.exp2(-0.5 * power * log_beta2), 1.0)


@triton.jit
def _rule(record, place, count, log_ratio, log_beta2, log_decay, TERMS: tl.constexpr):
    """Return a rule of two nodes for the sum over the skipped steps: both nodes, both weights, and its limit.

    From the limit on, which may be infinite, it is right for all roots. `embedlayer.kernels.cpu.rows` computes the same
    rules, and `embedlayer.row_sparse.history` derives them. Arguments are those of `_terms`, and `TERMS`, how many are
    computed at once.
    """
    _, first = _terms(record, place, count, 0, log_ratio, log_beta2, log_decay)
    node1, weight1 = tl.full((), 1.0, tl.float64), tl.full((), 0.0, tl.float64)
    node2, weight2, limit = node1, weight1, tl.full((), float("inf"), tl.float64)
    for attempt in range(4):
        if limit == float("inf"):
            factor = tl.where(attempt == 0, 1.0, tl.where(attempt == 1, 30.0, tl.where(attempt == 2, 300.0, 1000.0)))
            centre = factor * first
            start = centre / (first + centre)
            sum0 = tl.zeros((TERMS,), tl.float64)
            sum1, sum2, sum3, sum4 = sum0, sum0, sum0, sum0
            for base in range(0, count, TERMS):
                j = base + tl.arange(0, TERMS)
                term, node = _terms(record, place, count, j, log_ratio, log_beta2, log_decay)
                off = centre / (node + centre) - start
                sum0 += term
                term *= off
                sum1 += term
                term *= off
                sum2 += term
                sum3 += term * off
            total = tl.maximum(tl.sum(sum0, 0), TINY)
            mean, second, third = tl.sum(sum1, 0) / total, tl.sum(sum2, 0) / total, tl.sum(sum3, 0) / total
            variance = tl.maximum(second - mean * mean, 1e-15 * second + TINY)
            skew = (third - mean * (3.0 * second - 2.0 * mean * mean)) / (2.0 * variance)
            half = tl.sqrt(variance + skew * skew)
            part = 0.5 * (1.0 + skew / half)
            low = tl.minimum(tl.maximum(mean + skew - half + start, 1e-9), start)
            high = tl.minimum(tl.maximum(mean + skew + half + start, 1e-9), start)
            for base in range(0, count, TERMS):
                j = base + tl.arange(0, TERMS)
                term, node = _terms(record, place, count, j, log_ratio, log_beta2, log_decay)
                off = centre / (node + centre)
                product = (off - low) * (off - high)
                sum4 += term * product * product * (node + centre)
            missed = tl.sum(sum4, 0) / (centre * tl.maximum(total * (mean + start), TINY))
            below = (1.0 - low) * (1.0 - high)
            is_right_below = (attempt == 0) & (missed <= below * below * TOLERANCE)
            is_right_above = 4.0 * missed <= 27.0 * low * low * high * TOLERANCE
            limit = tl.where(is_right_above, tl.where(is_right_below, 0.0, centre), limit)
            node1, node2 = centre / low - centre, centre / high - centre
            weight1, weight2 = total * part, total * (1.0 - part)
    return node1, node2, weight1, weight2, limit


@triton.jit
def _row_key(row, step, seed_high, seed_low):
    """Return the hash of `embedlayer.row_sparse.stochastic_rounding.round_rows`; the seed has 31 low bits."""
    seed = (tl.cast(seed_high, tl.uint64) << 31) + tl.cast(seed_low, tl.uint64)
    z = row.to(tl.uint64) * ROW_FACTOR + tl.cast(step, tl.uint64) * GOLDEN + seed
    z = (z ^ (z >> 30)) * FIRST_64
    z = (z ^ (z >> 27)) * SECOND_64
    return (z ^ (z >> 31)).to(tl.uint32) | 1


@triton.jit
def _rounded_at_random(x, key, i):
    """Return float32 numbers of the columns `i` rounded to bfloat16 by `StochasticRounding`."""
    h = key + i.to(tl.uint32) * COLUMN_FACTOR
    h = (h ^ (h >> 16)) * FIRST_32
    h = (h ^ (h >> 13)) * SECOND_32
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + (h >> 16)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.where((bits & 0x7F800000) != 0x7F800000, rounded, x.to(tl.bfloat16))


@triton.jit(
    do_not_specialize=("units", "stop_row", "first_row", "start", "step", "most_terms", "seed_high", "seed_low")
)
def update_rows(
    rows, gradients, record, value_steps, moment_steps, weight, exp_avg, exp_avg_sq, units, stop_row, first_row, start,
    step, most_terms, seed_high, seed_low, add1, add2, factor, addend, update,
    DECAY: tl.constexpr, ROWWISE: tl.constexpr, UNIT: tl.constexpr, TERMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Apply the pending updates of rows in place, then step those that have gradients.

    A program has one place of a row. Rows outside of the table are left out.

    - `rows`: sorted row numbers, or `None` for the rows `first_row` to `stop_row - 1`.
    - `gradients`: sum of the gradients of a row at its first place, `(places, D)`; `None` for no step.
    - `record`, `start`, `most_terms`: the steps, as this module describes them; the step of line 0; and the number of
      skipped steps after which others are negligible.
    - `value_steps`, `moment_steps`: last steps that values and moments of each row include, `(V,)`.
    - `step`: number of the step; of the last one if no step is made.
    - `weight`, `exp_avg`, `exp_avg_sq`: `(V, D)`, with rows up to `stop_row - 1`; D is `units * UNIT`. `exp_avg` may be
      `None`; `exp_avg_sq` is `(V, 1)` if `ROWWISE`.
    - `seed_high`, `seed_low`: halves of the seed of stochastic rounding; `None` to round to nearest.
    - `add1` to `update`: the numbers of `StepRates`.
    - `DECAY`: whether the moments decay up to the last step without a step of their own.
    """
    width = units * UNIT
    row = tl.program_id(0).to(tl.int64) + first_row
    is_mine = row < stop_row
    n = tl.program_id(0).to(tl.int64)
    if rows is not None:
        row = tl.load(rows + n).to(tl.int64)
        is_mine = _is_first(rows, n, row) & (row >= 0) & (row < stop_row)
    last = step
    if gradients is not None:
        last = step - 1
    at = tl.load(value_steps + row, mask=is_mine, other=last)
    at_moments = tl.load(moment_steps + row, mask=is_mine, other=0)
    is_behind = at < last
    has_work = is_behind
    if DECAY:
        has_work = is_behind | ((at_moments > 0) & (at_moments < last))
    if gradients is not None:
        has_work = is_mine
    if has_work:
        log_ratio, log_beta2 = tl.load(record), tl.load(record + 1)
        line = (at - start).to(tl.int64)
        log_decay = tl.load(record + (last - start).to(tl.int64) * NUMBERS + 2)
        decay = tl.exp2((log_decay - tl.load(record + line * NUMBERS + 2)) * TO_BINARY).to(tl.float32)
        count = tl.minimum(last - at, most_terms)
        lag = (at - at_moments).to(tl.float64)
        scale = tl.where(lag > 0.0, tl.exp2(tl.where(lag > 0.0, lag, 1.0) * log_ratio), 1.0)
        spread = tl.where(scale > 0.0, tl.exp2(-0.5 * lag * log_beta2), 1.0)
        n1, w1 = tl.full((), 1.0, tl.float32), tl.full((), 0.0, tl.float32)
        n2, w2, least, summed = n1, w1, w1, w1
        if exp_avg is not None:
            if ROWWISE:
                if is_behind:
                    root = tl.sqrt(tl.load(exp_avg_sq + row).to(tl.float64))
                    sums = tl.zeros((TERMS,), tl.float64)
                    for base in range(0, count, TERMS):
                        j = base + tl.arange(0, TERMS)
                        term, node = _terms(record, line, count, j, log_ratio, log_beta2, log_decay)
                        sums += term / (root + node * spread)
                    summed = (tl.sum(sums, 0) * scale).to(tl.float32)
            else:
                if is_behind:
                    node1, node2, weight1, weight2, limit = _rule(
                        record, line, count, log_ratio, log_beta2, log_decay, TERMS
                    )
                    n1, n2 = (node1 * spread).to(tl.float32), (node2 * spread).to(tl.float32)
                    w1, w2 = (weight1 * scale).to(tl.float32), (weight2 * scale).to(tl.float32)
                    limit = tl.where(scale > 0.0, limit * spread, 0.0)
                    least = tl.where(limit > 0.0, tl.minimum(tl.maximum(limit * limit, LEAST), MOST), 0.0)
                    least = least.to(tl.float32)
        since = (step - at_moments).to(tl.float64)
        fade2 = tl.exp2(since * log_beta2)
        fade1 = (tl.exp2(since * log_ratio) * tl.exp2(0.5 * since * log_beta2)).to(tl.float32)
        fade2 = fade2.to(tl.float32)
        rate = update
        if ROWWISE:
            second = tl.load(exp_avg_sq + row).to(tl.float32)
            if gradients is not None:
                squares = tl.zeros((COLUMNS,), tl.float32)
                for base in range(0, width, COLUMNS):
                    i = base + tl.arange(0, COLUMNS)
                    g = tl.load(gradients + n * width + i, mask=i < width, other=0.0).to(tl.float32)
                    squares += g * g
                second = second * fade2 + add2 * (tl.sum(squares, 0) / width)
                rate = update / (tl.sqrt_rn(second) + addend)
            if DECAY:
                second = second * fade2
        if seed_high is not None:
            key = _row_key(row, step, seed_high, seed_low)
        for base in range(0, width, COLUMNS):
            i = base + tl.arange(0, COLUMNS)
            inside = i < width
            here = row * width + i
            p = tl.load(weight + here, mask=inside, other=0.0).to(tl.float32)
            if exp_avg is not None:
                m = tl.load(exp_avg + here, mask=inside, other=0.0).to(tl.float32)
            if not ROWWISE:
                v = tl.load(exp_avg_sq + here, mask=inside, other=0.0).to(tl.float32)
            if exp_avg is not None:
                total = tl.zeros((COLUMNS,), tl.float32) + summed
                if not ROWWISE:
                    root = tl.sqrt_rn(v)
                    total = w1 / (root + n1) + w2 / (root + n2)
                    if least > 0.0:
                        is_low = (v < least) & (m != 0.0) & inside
                        if tl.max(is_low.to(tl.int32), 0) > 0:
                            exact = tl.zeros((COLUMNS,), tl.float32)
                            for j in range(count):
                                term, node = _terms(record, line, count, j, log_ratio, log_beta2, log_decay)
                                exact += (term * scale).to(tl.float32) / (root + (node * spread).to(tl.float32))
                            total = tl.where(is_low, exact, total)
                p = p * decay - m * total
            else:
                p = p * decay
            if gradients is not None:
                g = tl.load(gradients + n * width + i, mask=inside, other=0.0).to(tl.float32)
                m = g if exp_avg is None else m * fade1 + g * add1
                if ROWWISE:
                    p = p * factor - rate * m
                else:
                    v = v * fade2 + g * g * add2
                    p = p * factor - rate * m / (tl.sqrt_rn(v) + addend)
            elif DECAY:
                if exp_avg is not None:
                    m = m * fade1
                if not ROWWISE:
                    v = v * fade2
            if seed_high is None:
                tl.store(weight + here, p.to(weight.dtype.element_ty), mask=inside)
            else:
                tl.store(weight + here, _rounded_at_random(p, key, i), mask=inside)
            if (gradients is not None) | DECAY:
                if exp_avg is not None:
                    tl.store(exp_avg + here, m.to(exp_avg.dtype.element_ty), mask=inside)
                if not ROWWISE:
                    tl.store(exp_avg_sq + here, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
        tl.debug_barrier()
        tl.store(value_steps + row, step)
        if (gradients is not None) | DECAY:
            tl.store(moment_steps + row, tl.where((at_moments > 0) | (not DECAY), step, 0))
            if ROWWISE:
                tl.store(exp_avg_sq + row, second)


def _by_rows(a: Arguments) -> Grid:
    """Return the number of programs of a kernel over rows: places of sorted rows, or rows from the first on."""
    return (a["stop_row"] - a["first_row"] if a["rows"] is None else len(a["rows"]),)


def _of_each_row(**times: int) -> dict[str, Callable[[Arguments], int]]:
    """Return how many numbers of some tensors a launch reads and writes, from how often it accesses each row."""

    def numbers(name: str, often: int) -> Callable[[Arguments], int]:
        return lambda a: 0 if a[name] is None else often * _by_rows(a)[0] * a[name][:1].numel()

    return {name: numbers(name, often) for name, often in times.items()}


TABLE = {
    "rows": "*i64",
    "gradients": "*z",
    "record": "*fp64",
    **dict.fromkeys(("value_steps", "moment_steps"), "*i32"),
    **dict.fromkeys(("weight", "exp_avg", "exp_avg_sq"), "*z"),
    **dict.fromkeys(("units", "stop_row", "first_row", "start", "step", "most_terms", "seed_high", "seed_low"), "i32"),
    **dict.fromkeys(("add1", "add2", "factor", "addend", "update"), "fp32"),
}
ROWWISE_TABLE = {**TABLE, "exp_avg": "*fp32", "exp_avg_sq": "*fp32"}
NO_STEP = dict.fromkeys(("gradients", "add1", "add2", "factor", "addend", "update"))
TO_NEAREST = dict.fromkeys(("seed_high", "seed_low"))
ALL_ROWS = {"rows": None, "DECAY": True}
BLOCKS = {"TERMS": 128, "COLUMNS": 512}
ROWWISE_BLOCKS = {"TERMS": 128, "COLUMNS": 1024}
READ = _of_each_row(value_steps=2, moment_steps=1, weight=2, exp_avg=1, exp_avg_sq=1)
WRITTEN = _of_each_row(value_steps=2, moment_steps=2, weight=2, exp_avg=2, exp_avg_sq=2)

LAUNCHES = {
    "sum_equal_rows": Launch(
        sum_equal_rows,
        grid=lambda a: (a["places"], -(-a["units"] * a["UNIT"] // a["COLUMNS"])),
        types={
            **dict.fromkeys(("rows", "order"), "*i64"),
            **dict.fromkeys(("values", "sums"), "*z"),
            **dict.fromkeys(("places", "units", "drop"), "i32"),
        },
        blocks={"SEVERAL": 4, "COLUMNS": 512},
        wide=("values", "sums"),
        reads=("rows", "order", "values"),
        writes=("sums",),
        register_limit=128,
        variants={"wide": Variant({"UNIT": 8}), "odd": Variant({"UNIT": 1})},
    ),
    "apply_pending": Launch(
        update_rows,
        grid=_by_rows,
        types=TABLE,
        blocks=BLOCKS,
        wide=("weight", "exp_avg", "exp_avg_sq"),
        reads=("rows",),
        writes=(),
        gathered=READ,
        register_limit=128,
        variants={
            "look-up": Variant({**NO_STEP, **TO_NEAREST, "DECAY": False, "ROWWISE": False, "UNIT": 8}),
            "rounded at random": Variant({**NO_STEP, "DECAY": False, "ROWWISE": False, "UNIT": 8}),
            "all rows": Variant({**NO_STEP, **TO_NEAREST, **ALL_ROWS, "ROWWISE": False, "UNIT": 8}),
            "odd": Variant({**NO_STEP, **TO_NEAREST, "DECAY": False, "ROWWISE": False, "UNIT": 1}),
        },
    ),
    "apply_pending_rowwise": Launch(
        update_rows,
        grid=_by_rows,
        types=ROWWISE_TABLE,
        blocks=ROWWISE_BLOCKS,
        wide=("weight", "exp_avg"),
        reads=("rows",),
        writes=(),
        gathered=READ,
        register_limit=128,
        variants={
            "look-up": Variant({**NO_STEP, **TO_NEAREST, "DECAY": False, "ROWWISE": True, "UNIT": 8}),
            "all rows": Variant({**NO_STEP, **ALL_ROWS, "ROWWISE": True, "UNIT": 8}),
            "no first moments": Variant(
                {**NO_STEP, **TO_NEAREST, "exp_avg": None, "DECAY": False, "ROWWISE": True, "UNIT": 8}
            ),
        },
    ),
    "adamw_step": Launch(
        update_rows,
        grid=_by_rows,
        types=TABLE,
        blocks=BLOCKS,
        wide=("weight", "exp_avg", "exp_avg_sq", "gradients"),
        reads=("rows", "gradients"),
        writes=(),
        gathered=WRITTEN,
        register_limit=128,
        variants={
            "plain": Variant({**TO_NEAREST, "DECAY": False, "ROWWISE": False, "UNIT": 8}),
            "rounded at random": Variant({"DECAY": False, "ROWWISE": False, "UNIT": 8}),
            "odd": Variant({**TO_NEAREST, "DECAY": False, "ROWWISE": False, "UNIT": 1}),
        },
    ),
    "rowwise_step": Launch(
        update_rows,
        grid=_by_rows,
        types=ROWWISE_TABLE,
        blocks=ROWWISE_BLOCKS,
        wide=("weight", "exp_avg", "gradients"),
        reads=("rows", "gradients"),
        writes=(),
        gathered=WRITTEN,
        register_limit=128,
        variants={
            "plain": Variant({**TO_NEAREST, "DECAY": False, "ROWWISE": True, "UNIT": 8}),
            "rounded at random": Variant({"DECAY": False, "ROWWISE": True, "UNIT": 8}),
            "no first moments": Variant({**TO_NEAREST, "exp_avg": None, "DECAY": False, "ROWWISE": True, "UNIT": 8}),
        },
    ),
}
"""How each kernel is launched."""
