"""Kernels over blocks of logits: totals of softmaxes, and gradients by the logits, each in one pass.

`embedlayer.losses.objective.Objective.terms` and `dlogits_` define them. A block is `(R, C)`: R rows of the vocabulary
by C tokens, vocabulary first. Loops run over tokens, so no sum over rows is reordered for the vector unit. Logits may
be stored without their bias, in bfloat16. All sums use the dtype of `found` or `factors`: float32 or float64.

Requests are pairs of a row and a token, sorted by row: of the logits whose value is returned, or that get a gradient.
"""

from typing import Any

import numpy as np
from numba import njit

from embedlayer.kernels.numbers import exp, kernel, narrow, widen

PART = 256
"""Rows whose totals are summed on their own: rounding errors grow with the number of terms of a sum."""

TILE = 256
"""Tokens whose logits are read at a time."""

ROWS = 16
"""Rows read at a time: with `TILE` tokens they stay in the first level of the cache."""

FORWARD, REVERSE, JENSEN_SHANNON = 0, 1, 2
"""Kinds of divergence."""

inlined = njit(inline="always")


@inlined
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


@inlined
def _read(z: Any, bias: Any, first: Any, count: Any, left: Any, values: Any, top: Any, base: Any, factor: Any) -> Any:
    """Read `count` rows of logits into `values`; update maxima, and return how many tokens are read.

    Args:
        z: Logits as stored.
        bias: Bias of each row, or nothing.
        first: First row.
        count: Number of rows.
        left: First token.
        values: Result.
        top: Maximum of each token so far; updated.
        base: Number to subtract before the exponential: `top`, or 0 where it is -inf. Updated.
        factor: Result: what sums of exponentials are multiplied by, as `base` has grown.
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
    start: int, stop: int, z: Any, bias: Any, first_id: int, rows: Any, places: Any, selected: Any, found: Any,
    extended: bool,
) -> None:  # fmt: skip
    """Compute statistics over `PART` rows each, for the parts `start` to `stop - 1` of a block.

    Args:
        start: First part.
        stop: Last part + 1.
        z: Logits, `(R, C)`.
        bias: Bias of each row that the logits do not contain yet, `(R,)` or `(0,)`.
        first_id: ID of the first row.
        rows: IDs of the requests.
        places: Places of the requests in `selected`.
        selected: Result: requested logits, of `(K, C)`.
        found: Result, `(parts, 6, C)`: maximum, log of the sum of exponentials, that sum, sum of logits, mean of logits
            minus maximum under the softmax, log of the sum of squared exponentials.
        extended: Whether to compute the last three.
    """
    tokens = z.shape[1]
    zero = found.dtype.type(0)
    values = np.empty((ROWS, TILE), found.dtype)
    base, factor = np.empty(TILE, found.dtype), np.empty(TILE, found.dtype)
    one, two, three = np.empty(TILE, found.dtype), np.empty(TILE, found.dtype), np.empty(TILE, found.dtype)
    for part in range(start, stop):
        begin, end = part * PART, min((part + 1) * PART, z.shape[0])
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

    They are `e (f₀ + f₁ x + f₂ e) + f₃` for `x = z - top` and `e = exp(x)`, plus the gradients of requests.

    Args:
        start: First row.
        stop: Last row + 1.
        z: Logits, `(R, C)`; overwritten.
        bias: As in `statistics`, as for the next three.
        first_id: ID of the first row.
        rows: IDs of the requests.
        places: Place of each request; modulo C it is the token.
        by_request: Gradient of each request.
        factors: `top`, f₀, f₁, f₂ and f₃, `(5, C)`.
        bias_grad: Gradients of the bias, to which the sum of each row is added; `(R,)` or `(0,)`.
    """
    tokens = z.shape[1]
    out = np.empty(tokens, factors.dtype)
    top, f0, f1, f2, f3 = factors[0], factors[1], factors[2], factors[3], factors[4]
    place = _first_request(rows, first_id + start)
    for r in range(start, stop):
        row = z[r]
        b = bias[r] if len(bias) else factors.dtype.type(0)
        for c in range(tokens):
            x = widen(row[c]) + b - top[c]
            e = exp(x)
            out[c] = e * (f0[c] + f1[c] * max(x, factors.dtype.type(-1000)) + f2[c] * e) + f3[c]
        while place < len(rows) and rows[place] == first_id + r:
            out[places[place] % tokens] += by_request[place]
            place += 1
        for c in range(tokens):
            row[c] = narrow(out[c], row[c])
        if len(bias_grad):
            bias_grad[r] += _sum(out)


@inlined
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
def add_bfloat16(start: int, stop: int, total: Any, residual: Any, addend: Any, last: bool) -> None:
    """Add the rows `start` to `stop - 1` of `addend` to sums of which `total` and `residual` are the halves.

    Args:
        start: First row.
        stop: Last row + 1.
        total: High 16 bits, `(R, D)`.
        residual: Low 16 bits, `(R, D)`.
        addend: Numbers in bfloat16, `(R, D)`.
        last: Whether to round the sums to `total`.
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
