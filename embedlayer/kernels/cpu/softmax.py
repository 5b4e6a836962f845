"""Kernels over blocks of logits: totals of softmaxes, and gradients by the logits, each in one pass.

`embedlayer.losses.objective.Objective.terms` and `dlogits_` define them. A block is `(R, C)`: R rows of the vocabulary
by C tokens, vocabulary first. Loops run over tokens, so no sum over rows is reordered for the vector unit. Logits may
be stored without their bias, in bfloat16. All sums use the dtype of `found` or `factors`: float32 or float64.

Requests are pairs of a row and a token, sorted by row: of the logits whose value is returned, or that get a gradient.
`rows` has their IDs, and `places` their places in the flattened `selected`, `(K, C)`; modulo C a place is the token.

`z` are logits, `s` the student's and `t` the teacher's. A bias is what the logits of each row do not contain yet,
`(R,)`, or `(0,)` for none; the sum of each row's gradients is added to `bias_grad`, `(R,)` or `(0,)`. `first_id` is the
ID of the first row, a part has `part_rows` rows, and `beta` is the weight of the teacher in the mixture m.
"""

from typing import Any

import numpy as np

from embedlayer.kernels.cpu.numbers import as_computed, exp, kernel, log, narrow, widen

TILE = 256
"""Tokens whose logits are read at a time."""

ROWS = 16
"""Rows read at a time: with `TILE` tokens they stay in the first level of the cache."""

NO_ID = 2**52
"""Token ID of no logit: larger than every token ID; a float64 can hold it."""

MISSING = -(2**63)
"""Key of no logit; see `embedlayer.kernels.gpu.largest`."""

FORWARD, REVERSE = 1, 2
"""Divergences of which `divergence` and `divergence_gradient` compute the mean of a difference of logits."""


@kernel
def _first_request(rows: Any, row: Any) -> Any:
    """Return the place of the first request whose row is `row` or a later one."""
    low, high = 0, len(rows)
    while low < high:
        middle = (low + high) // 2
        if rows[middle] < row:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def _read(z: Any, bias: Any, first: Any, count: Any, left: Any, values: Any, top: Any, base: Any, factor: Any) -> Any:
    """Read `count` rows of logits into `values`; update maxima, and return how many tokens are read.

    - `left`: first token.
    - `top`: maximum of each token so far; updated.
    - `base`: number to subtract before the exponential: `top`, or 0 where it is -inf. Updated.
    - `factor`: result: what sums of exponentials are multiplied by, as `base` has grown.
    """
    size = min(TILE, z.shape[1] - left)
    high, below, scale = top[left : left + size], base[:size], factor[:size]
    for i in range(count):
        row, to = z[first + i, left : left + size], values[i, :size]
        b = bias[first + i] if len(bias) else high.dtype.type(0)
        for c in range(size):
            x = widen(row[c]) + b
            to[c] = x
            high[c] = x if x > high[c] else high[c]
    for c in range(size):
        finite = high[c] if high[c] > -np.inf else high.dtype.type(0)
        scale[c] = exp(min(below[c] - finite, high.dtype.type(0)))
        below[c] = finite
    return size


@kernel
def statistics(
    start: int, stop: int, part_rows: int, z: Any, bias: Any, first_id: int, rows: Any, places: Any, selected: Any,
    found: Any, extended: bool,
) -> None:  # fmt: skip
    """Compute statistics over a few rows each, for the parts `start` to `stop - 1` of a block.

    - `found`: result, `(parts, 6, C)`: maximum, log of the sum of exponentials, that sum, sum of logits, mean of logits
      minus maximum under the softmax, log of the sum of squared exponentials.
    - `extended`: whether to compute the last three; otherwise they are 0.
    """
    tokens = z.shape[1]
    zero = found.dtype.type(0)
    values = np.empty((ROWS, TILE), found.dtype)
    base, factor = np.empty(TILE, found.dtype), np.empty(TILE, found.dtype)
    one, two, three = np.empty(TILE, found.dtype), np.empty(TILE, found.dtype), np.empty(TILE, found.dtype)
    for part in range(start, stop):
        begin, end = part * part_rows, min((part + 1) * part_rows, z.shape[0])
        top, log_sum, sums = found[part, 0], found[part, 1], found[part, 2]
        total, mean, squares = found[part, 3], found[part, 4], found[part, 5]
        top[:] = -np.inf
        found[part, 1:] = zero
        for left in range(0, tokens, TILE):
            base[:] = zero
            for first in range(begin, end, ROWS):
                count = min(ROWS, end - first)
                size = _read(z, bias, first, count, left, values, top, base, factor)
                below, scale, a, b, d = base[:size], factor[:size], one[:size], two[:size], three[:size]
                a[:] = zero
                if extended:
                    b[:] = zero
                    d[:] = zero
                    for i in range(count):
                        row, t = values[i, :size], total[left : left + size]
                        for c in range(size):
                            x = row[c] - below[c]
                            e = exp(x)
                            a[c] += e
                            b[c] += e * max(x, found.dtype.type(-1000))
                            d[c] += e * e
                            t[c] += row[c]
                    to_mean, to_squares = mean[left : left + size], squares[left : left + size]
                    to = sums[left : left + size]
                    for c in range(size):
                        fallen = np.log(scale[c]) if scale[c] > 0 else zero
                        to_mean[c] = scale[c] * (to_mean[c] + fallen * to[c]) + b[c]
                        to_squares[c] = scale[c] * scale[c] * to_squares[c] + d[c]
                        to[c] = to[c] * scale[c] + a[c]
                else:
                    for i in range(count):
                        row = values[i, :size]
                        for c in range(size):
                            a[c] += exp(row[c] - below[c])
                    to = sums[left : left + size]
                    for c in range(size):
                        to[c] = to[c] * scale[c] + a[c]
        for c in range(tokens):
            log_sum[c] = np.log(sums[c])
            if extended:
                mean[c] /= sums[c] if sums[c] != 0 else found.dtype.type(1)
                squares[c] = np.log(squares[c])
        for place in range(_first_request(rows, first_id + begin), _first_request(rows, first_id + end)):
            row = rows[place] - first_id
            b = bias[row] if len(bias) else zero
            selected[places[place]] = widen(z[row, places[place] % tokens]) + b


@kernel
def statistics_gradient(
    start: int, stop: int, z: Any, bias: Any, first_id: int, rows: Any, places: Any, by_request: Any, factors: Any,
    bias_grad: Any,
) -> None:  # fmt: skip
    """Replace the logits of the rows `start` to `stop - 1` by gradients.

    They are `e f₀ (f₁ + f₂ x) + e² f₃ + f₄` for `x = z - top` and `e = exp(x)`, plus the gradients of requests.

    - `factors`: `top`, and f₀ to f₄, `(6, C)`.
    """
    tokens = z.shape[1]
    out = np.empty(tokens, factors.dtype)
    top, f0, f1, f2, f3, f4 = factors[0], factors[1], factors[2], factors[3], factors[4], factors[5]
    place = _first_request(rows, first_id + start)
    for r in range(start, stop):
        row = z[r]
        b = bias[r] if len(bias) else factors.dtype.type(0)
        for c in range(tokens):
            x = widen(row[c]) + b - top[c]
            e = exp(x)
            slope = f1[c] + f2[c] * max(x, factors.dtype.type(-1000))
            out[c] = e * f0[c] * slope + (e * e * f3[c] + f4[c])
        while place < len(rows) and rows[place] == first_id + r:
            out[places[place] % tokens] += by_request[place]
            place += 1
        for c in range(tokens):
            row[c] = narrow(out[c], row[c])
        if len(bias_grad):
            bias_grad[r] += _sum(out)


@kernel
def _sum(numbers: Any) -> Any:
    """Return the sum of an array, which is overwritten: halves are added to each other."""
    size = len(numbers)
    while size > 1:
        half = (size + 1) // 2
        left, right = numbers[:half], numbers[half:size]
        for c in range(size - half):
            left[c] += right[c]
        size = half
    return numbers[0] if len(numbers) else numbers.dtype.type(0)


@kernel
def largest(
    start: int, stop: int, lanes: int, z: Any, bias: Any, first_id: int, seen: int, thresholds: Any, values: Any,
    ids: Any,
) -> None:  # fmt: skip
    """Update the K largest logits of the tokens in the tiles `start` to `stop - 1` with the rows of a block.

    Few rows at a time are compared with the smallest of the K by their maximum only.

    - `lanes`: tokens of a tile.
    - `seen`: number of rows of earlier blocks, whose IDs are lower.
    - `thresholds`: smallest of the K logits, `(C,)`; -inf while there are fewer.
    - `values`: the logits, largest first, `(C, K)`; of equal ones that with the lowest ID is first. NaN is largest.
    - `ids`: their IDs, `(C, K)`.
    """
    kept = values.shape[1]
    zero = thresholds.dtype.type(0)
    high = np.empty(lanes, thresholds.dtype)
    for tile in range(start, stop):
        left = tile * lanes
        size = min(lanes, z.shape[1] - left)
        for first in range(0, z.shape[0], ROWS):
            count = min(ROWS, z.shape[0] - first)
            high[:] = -np.inf
            for i in range(count):
                row, b = z[first + i, left : left + size], bias[first + i] if len(bias) else zero
                for c in range(size):
                    x, most = widen(row[c]) + b, high[c]
                    high[c] = most if most >= x or most != most else x
            for c in range(size):
                if high[c] <= thresholds[left + c] and seen + first >= kept:
                    continue
                best, best_ids = values[left + c], ids[left + c]
                for i in range(count):
                    x = widen(z[first + i, left + c]) + (bias[first + i] if len(bias) else zero)
                    place = min(seen + first + i, kept)
                    if place == kept:
                        last = best[kept - 1]
                        if not (x > last or (x != x and last == last)):
                            continue
                        place -= 1
                    while place > 0 and (x > best[place - 1] or (x != x and best[place - 1] == best[place - 1])):
                        best[place], best_ids[place] = best[place - 1], best_ids[place - 1]
                        place -= 1
                    best[place], best_ids[place] = x, first_id + first + i
                thresholds[left + c] = best[kept - 1]


@kernel
def divergence(
    start: int, stop: int, part_rows: int, s: Any, t: Any, s_bias: Any, t_bias: Any, found: Any, kind: int
) -> None:
    """Compute the softmaxes of two heads over a few rows each, for the parts `start` to `stop - 1` of a block.

    - `found`: result, `(parts, 7, C)`: maximum, log of the sum of exponentials, and that sum, of student and teacher;
      mean of a difference.
    - `kind`: `FORWARD` for the mean of t - s under the teacher's softmax, `REVERSE` for that of s - t under the
      student's; 0 for neither, where the mean is 0.
    """
    tokens = s.shape[1]
    zero = found.dtype.type(0)
    of_s, of_t = np.empty((ROWS, TILE), found.dtype), np.empty((ROWS, TILE), found.dtype)
    s_base, t_base = np.empty(TILE, found.dtype), np.empty(TILE, found.dtype)
    s_factor, t_factor = np.empty(TILE, found.dtype), np.empty(TILE, found.dtype)
    one, two, three = np.empty(TILE, found.dtype), np.empty(TILE, found.dtype), np.empty(TILE, found.dtype)
    for part in range(start, stop):
        begin, end = part * part_rows, min((part + 1) * part_rows, s.shape[0])
        totals = found[part]
        totals[:] = zero
        totals[0], totals[3] = -np.inf, -np.inf
        for left in range(0, tokens, TILE):
            s_base[:] = zero
            t_base[:] = zero
            for first in range(begin, end, ROWS):
                count = min(ROWS, end - first)
                size = _read(s, s_bias, first, count, left, of_s, totals[0], s_base, s_factor)
                _read(t, t_bias, first, count, left, of_t, totals[3], t_base, t_factor)
                a, b, d = one[:size], two[:size], three[:size]
                a[:] = zero
                b[:] = zero
                d[:] = zero
                below_s, below_t = s_base[:size], t_base[:size]
                for i in range(count):
                    x, y = of_s[i, :size], of_t[i, :size]
                    for c in range(size):
                        q, p = exp(x[c] - below_s[c]), exp(y[c] - below_t[c])
                        a[c] += q
                        b[c] += p
                        weight = p if kind == FORWARD else q
                        d[c] += zero if weight == zero or kind == 0 else weight * (y[c] - x[c])
                to_s, to_t = totals[2, left : left + size], totals[5, left : left + size]
                to_mean, by_s, by_t = totals[6, left : left + size], s_factor[:size], t_factor[:size]
                for c in range(size):
                    to_s[c] = to_s[c] * by_s[c] + a[c]
                    to_t[c] = to_t[c] * by_t[c] + b[c]
                    to_mean[c] = to_mean[c] * (by_t[c] if kind == FORWARD else by_s[c]) + d[c]
        for c in range(tokens):
            totals[1, c], totals[4, c] = np.log(totals[2, c]), np.log(totals[5, c])
            share = totals[5, c] if kind == FORWARD else -totals[2, c]
            totals[6, c] = totals[6, c] / share if share != zero else zero


@kernel
def jensen_shannon(
    start: int, stop: int, part_rows: int, s: Any, t: Any, s_bias: Any, t_bias: Any, levels: Any, found: Any,
    beta: float,
) -> None:  # fmt: skip
    """Compute the two divergences from the mixture over a few rows each, for the parts `start` to `stop - 1`.

    - `levels`: maximum, and log of the sum of exponentials, of student and teacher, `(4, C)`.
    - `found`: result, `(parts, 2, C)`: sum of q (log q - log m), and sum of p (log p - log m).
    """
    tokens = s.shape[1]
    zero, weight = found.dtype.type(0), as_computed(beta, found[0, 0, 0])
    s_top, s_log, t_top, t_log = levels[0], levels[1], levels[2], levels[3]
    for part in range(start, stop):
        to_s, to_t = found[part, 0], found[part, 1]
        to_s[:] = zero
        to_t[:] = zero
        for r in range(part * part_rows, min((part + 1) * part_rows, s.shape[0])):
            b = s_bias[r] if len(s_bias) else zero
            d = t_bias[r] if len(t_bias) else zero
            x, y = s[r], t[r]
            for c in range(tokens):
                log_q = widen(x[c]) + b - s_top[c] - s_log[c]
                log_p = widen(y[c]) + d - t_top[c] - t_log[c]
                q, p = exp(log_q), exp(log_p)
                log_m = log(max((found.dtype.type(1) - weight) * q + weight * p, found.dtype.type(1.2e-38)))
                to_s[c] += zero if q == zero else q * (log_q - log_m)
                to_t[c] += zero if p == zero else p * (log_p - log_m)


@kernel
def divergence_gradient(
    start: int, stop: int, s: Any, t: Any, s_bias: Any, t_bias: Any, factors: Any, s_bias_grad: Any, kind: int,
    beta: float,
) -> None:  # fmt: skip
    """Replace the logits of the student in the rows `start` to `stop - 1` by gradients.

    With x and y the logits minus the first and second row of factors, and f₀ to f₃ the others, these are

    - `exp(x) f₀ + exp(y) f₁` for `FORWARD`,
    - `exp(x) f₂ (f₀ + f₁ (s - t))` for `REVERSE`,
    - `exp(log q) f₀ (log q - log m + f₁)` otherwise, with `log q = x - f₂`, `log p = y - f₃` and the mixture m.

    - `factors`: numbers of each token, `(6, C)`.
    - `kind`: `FORWARD`, `REVERSE`, or 0 for Jensen-Shannon.
    """
    tokens = s.shape[1]
    zero, weight = factors.dtype.type(0), as_computed(beta, factors[0, 0])
    out = np.empty(tokens, factors.dtype)
    s_top, t_top, f0, f1, f2, f3 = factors[0], factors[1], factors[2], factors[3], factors[4], factors[5]
    for r in range(start, stop):
        b = s_bias[r] if len(s_bias) else zero
        d = t_bias[r] if len(t_bias) else zero
        x, y = s[r], t[r]
        if kind == FORWARD:
            for c in range(tokens):
                q, p = exp(widen(x[c]) + b - s_top[c]), exp(widen(y[c]) + d - t_top[c])
                out[c] = q * f0[c] + p * f1[c]
        elif kind == REVERSE:
            for c in range(tokens):
                one, other = widen(x[c]) + b, widen(y[c]) + d
                q = exp(one - s_top[c])
                out[c] = q * f2[c] if q == zero else q * f2[c] * (f0[c] + f1[c] * (one - other))
        else:
            for c in range(tokens):
                log_q = widen(x[c]) + b - s_top[c] - f2[c]
                log_p = widen(y[c]) + d - t_top[c] - f3[c]
                q, p = exp(log_q), exp(log_p)
                log_m = log(max((factors.dtype.type(1) - weight) * q + weight * p, factors.dtype.type(1.2e-38)))
                out[c] = zero if q == zero else q * f0[c] * (log_q - log_m + f1[c])
        for c in range(tokens):
            x[c] = narrow(out[c], x[c])
        if len(s_bias_grad):
            s_bias_grad[r] += _sum(out)


@kernel
def add_bfloat16(start: int, stop: int, total: Any, residual: Any, addend: Any, last: bool) -> None:
    """Add the rows `start` to `stop - 1` of `addend` to float32 sums whose halves are `total` and `residual`.

    - `total`: high 16 bits, `(R, D)`.
    - `residual`: low 16 bits, `(R, D)`.
    - `addend`: numbers in bfloat16 or float32, `(R, D)`.
    - `last`: whether to round the sums to the nearest bfloat16 in `total`, and leave `residual` as it is.
    """
    for r in range(start, stop):
        high, low, more = total[r], residual[r], addend[r]
        if last:
            for c in range(len(high)):
                bits = np.uint32(np.uint32(np.uint32(high[c]) << np.uint32(16)) | np.uint32(low[c]))
                high[c] = narrow(bits.view(np.float32) + widen(more[c]), high[c])
        else:
            for c in range(len(high)):
                bits = np.uint32(np.uint32(np.uint32(high[c]) << np.uint32(16)) | np.uint32(low[c]))
                bits = np.float32(bits.view(np.float32) + widen(more[c])).view(np.uint32)
                high[c] = np.uint16(bits >> np.uint32(16))
                low[c] = np.uint16(bits & np.uint32(0xFFFF))
