"""Kernels on rows of a table: sums of gradients, pending updates and an optimizer's step, in one pass each.

`embedlayer.row_sparse.gradient`, `embedlayer.row_sparse.pending_updates` and `embedlayer.optim.row_optimizer` define
them.

`rows` are distinct row numbers in ascending order, `(U,)`. `order` has the places of IDs in a batch, sorted by row, and
`offsets`, `(U + 1,)`, the start of each row's places in it and the end of the last. `value_steps` and `moment_steps`,
`(V,)`, are the last steps that a row's values and moments include; kernels set them. `weight` is `(V, D)`, as are the
moments `exp_avg` and `exp_avg_sq`; with one second moment a row they are `(V, D)`, or `(0, D)` for none, and `(V, 1)`.
A `seed` of -1 rounds to nearest, others stochastically.
"""

import math
from typing import Any

import numpy as np

from embedlayer.kernels.cpu.numbers import (
    as_computed,
    empty_computed,
    kernel,
    narrow,
    narrow_at_random,
    reordering,
    row_key,
    widen,
)

CENTRES = (1.0, 30.0, 300.0, 1000.0)
"""Values of `s / e_1` at which rules of two nodes are exact, tried in turn."""

MOST_TERMS = 4096
"""Terms of a row's sum up to which a kernel computes its rule."""

MOST_DIVISIONS = 1 << 16
"""Terms that are computed one by one for the numbers of a row to which its rule does not apply; else another path."""

TINY = 1.2e-38
HUGE = 3e38


@kernel
def segments_of_equal_ids(
    start: int, stop: int, ids: Any, drop: int, rows: Any, order: Any, offsets: Any, found: Any
) -> None:
    """Sort IDs by a stable radix sort, and list the distinct ones with the places of each; one item.

    - `rows`: result; memory for N numbers, as for `order`, and for N + 1 in `offsets`.
    - `drop`: ID to leave out; -1 for none.
    - `found`: number of distinct IDs, or -1 where an ID is negative, as the other results then are invalid; and number
      of places.
    """
    if stop <= start:
        return
    kept = 0
    largest: Any = 0
    keys, others = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    places, next_places = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    for n in range(len(ids)):
        key = np.int64(ids[n])
        if key < 0:
            found[0] = -1
            return
        if key != drop:
            keys[kept], places[kept] = key, n
            largest = key if key > largest else largest
            kept += 1
    bits = 0
    while largest >> bits:
        bits += 1
    passes = (bits + 10) // 11
    width = (bits + max(passes, 1) - 1) // max(passes, 1)
    ends, mask = np.empty(1 << width, np.int64), (1 << width) - 1
    for turn in range(passes):
        shift, total = turn * width, 0
        ends[:] = 0
        for n in range(kept):
            ends[(keys[n] >> shift) & mask] += 1
        for digit in range(len(ends)):
            total += ends[digit]
            ends[digit] = total - ends[digit]
        for n in range(kept):
            digit = (keys[n] >> shift) & mask
            others[ends[digit]], next_places[ends[digit]] = keys[n], places[n]
            ends[digit] += 1
        keys, others = others, keys
        places, next_places = next_places, places
    distinct = 0
    for n in range(kept):
        order[n] = places[n]
        if n == 0 or keys[n] != keys[n - 1]:
            rows[distinct], offsets[distinct] = keys[n], n
            distinct += 1
    offsets[distinct] = kept
    found[0], found[1] = distinct, kept


@kernel
def copy_to_places(values: Any, places: Any, out: Any) -> None:
    for place in places:
        target = out[place]
        for i in range(len(values)):  # a loop: assigning a row calls a slower copy
            target[i] = values[i]


@kernel
def gather_segments(start: int, stop: int, rows: Any, order: Any, offsets: Any, table: Any, out: Any) -> None:
    """Copy rows of a table to the places of their IDs in a batch; an item is a distinct row."""
    for n in range(start, stop):
        copy_to_places(table[rows[n]], order[offsets[n] : offsets[n + 1]], out)


@kernel
def sum_segments(start: int, stop: int, values: Any, order: Any, offsets: Any, out: Any) -> None:
    """Sum the vectors of each segment, one after another in the order of `order`."""
    width = values.shape[1]
    total = empty_computed(width, values[0, 0])
    for segment in range(start, stop):
        first, end = offsets[segment], offsets[segment + 1]
        summed, values_of = out[segment], values[order[first]]
        if end - first == 1:
            for i in range(width):
                summed[i] = values_of[i]
            continue
        for i in range(width):
            total[i] = widen(values_of[i])
        for n in range(first + 1, end):
            values_of = values[order[n]]
            for i in range(width):
                total[i] += widen(values_of[i])
        for i in range(width):
            summed[i] = narrow(total[i], values_of[i])


@reordering
def two_nodes(count: int, nodes: Any, weights: Any, centre: float, places: Any) -> Any:
    """Compute the Gauss rule of two nodes in `u = centre / (node + centre)`, and bounds of its relative error.

    - `nodes`: nodes of the sum, the one of the first skipped step first.
    - `centre`: value of s at which the rule is exact.
    - `places`: memory for `count` numbers.

    Returns:
        Both nodes, both weights, the bound for `s >= centre`, and the bound for `0 <= s < centre`, which is valid
        where `centre` is at most the first node. `embedlayer.row_sparse.history` derives the bounds.
    """
    for j in range(count):
        places[j] = centre / (nodes[j] + centre)
    start = places[0]
    total = first = second = third = 0.0
    for j in range(count):
        off = places[j] - start
        term = weights[j]
        total += term
        term *= off
        first += term
        term *= off
        second += term
        third += term * off
    total = max(total, 1e-300)
    mean, second, third = first / total, second / total, third / total
    variance = max(second - mean * mean, 1e-15 * second + 1e-300)
    skew = (third - mean * (3 * second - 2 * mean * mean)) / (2 * variance)
    half = math.sqrt(variance + skew * skew)
    part = 0.5 * (1 + skew / half)
    low = min(max(mean + skew - half + start, 1e-9), start)
    high = min(max(mean + skew + half + start, 1e-9), start)
    missed = 0.0
    for j in range(count):
        product = (places[j] - low) * (places[j] - high)
        missed += weights[j] * product * product * (nodes[j] + centre)
    missed /= centre * max(total * (mean + start), 1e-300)
    above = missed * 4 / (27 * low * low * high)
    below = missed / ((1 - low) * (1 - high)) ** 2
    return centre / low - centre, centre / high - centre, total * part, total * (1 - part), above, below


@kernel
def apply_pending(
    start: int,
    stop: int,
    rows: Any,
    value_steps: Any,
    moment_steps: Any,
    lines: Any,
    masses: Any,
    fading: Any,
    spreading: Any,
    sizes: Any,
    rates: Any,
    weight: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    seed: int,
    decay_moments: bool,
    outcome: Any,
) -> None:
    """Apply the pending updates of distinct rows in place.

    `StepHistory.skipped_steps` describes the rule.

    - `lines`: record of the steps.
    - `masses`: `lines[0]`, divided by the product of the weight-decay factors of all steps up to each.
    - `fading`: `(beta1 / sqrt(beta2)) ** j` for j from 1.
    - `spreading`: `beta2 ** (-j / 2)` for j from 1.
    - `sizes`: step before the record, number of recorded steps, number of terms that are not negligible, and whether
      the decay is weak; otherwise rows are left out.
    - `rates`: `beta1`, `beta2` and the tolerance.
    - `outcome`: zeros for all rows; set to 1 for a row that was updated, and to 2 for one that this kernel cannot
      update, which stays unchanged.
    """
    before, size, reach, weak = sizes
    beta1, beta2, tolerance = rates
    step, ratio, width = before + size, beta1 / math.sqrt(beta2), weight.shape[1]
    longest = min(reach, MOST_TERMS)
    nodes, weights, scratch = np.empty(longest), np.empty(longest), np.empty(longest)
    like = exp_avg[0, 0]
    roots, sums, values = empty_computed(width, like), empty_computed(width, like), empty_computed(width, like)
    where = np.empty(width, np.int64)
    for place_of_row in range(start, stop):
        row = rows[place_of_row]
        at, at_moments = value_steps[row], moment_steps[row]
        p, m, v = weight[row], exp_avg[row], exp_avg_sq[row]
        if at < step:
            place, lag = at - before, at - at_moments
            terms = step - at
            if terms > reach:
                terms = reach
            if terms > longest or not weak:
                outcome[place_of_row] = 2
                continue
            rate, epsilon = masses[place + 1 : place + 1 + terms], lines[1, place + 1 : place + 1 + terms]
            for j in range(terms):
                weights[j] = rate[j] * fading[j]
                nodes[j] = epsilon[j] * spreading[j]
            left = math.exp(lines[2, size])
            spread, scale = 1.0, left
            if lag > 0:
                spread, scale = beta2 ** (-0.5 * lag), left * ratio**lag
            node1 = node2 = 1.0
            weight1 = weight2 = limit = 0.0
            if terms <= 2:
                node1, weight1 = nodes[0], weights[0]
                if terms == 2:
                    node2, weight2 = nodes[1], weights[1]
            else:
                limit = np.inf
                for centre in CENTRES:
                    threshold = centre * nodes[0]
                    rule = two_nodes(terms, nodes, weights, threshold, scratch)
                    node1, node2, weight1, weight2, above, below = rule
                    if above <= tolerance:
                        limit = threshold
                        if centre == 1.0 and below <= tolerance:
                            limit = 0.0
                        break
            if scale == 0:
                spread, limit = 1.0, 0.0
            least = as_computed(min(max((limit * spread) ** 2, TINY), HUGE), like)
            few = 0
            if limit > 0:
                for i in range(width):
                    few += widen(v[i]) < least and widen(m[i]) != 0
                if few * terms > MOST_DIVISIONS:
                    outcome[place_of_row] = 2
                    continue
                if few:
                    few = 0
                    for i in range(width):
                        if widen(v[i]) < least and widen(m[i]) != 0:
                            where[few], roots[few] = i, math.sqrt(widen(v[i]))
                            few += 1
                    sums[:few] = 0
                    for j in range(terms):
                        node, mass = as_computed(nodes[j] * spread, like), as_computed(weights[j] * scale, like)
                        for k in range(few):
                            sums[k] += mass / (roots[k] + node)
                    for k in range(few):
                        values[k] = widen(p[where[k]])
            decay = as_computed(math.exp(lines[2, size] - lines[2, place]), like)
            n1, n2 = as_computed(node1 * spread, like), as_computed(node2 * spread, like)
            w1, w2 = as_computed(weight1 * scale, like), as_computed(weight2 * scale, like)
            key = row_key(seed, step, row)
            for i in range(width):
                root = math.sqrt(widen(v[i]))
                total = w1 / (root + n1) + w2 / (root + n2)
                p[i] = narrow_at_random(widen(p[i]) * decay - widen(m[i]) * total, p[i], key, i)
            for k in range(few):
                i = where[k]
                p[i] = narrow_at_random(values[k] * decay - widen(m[i]) * sums[k], p[i], key, i)
            value_steps[row], outcome[place_of_row] = step, 1
        if decay_moments and 0 < at_moments < step:
            fade1 = as_computed(beta1 ** (step - at_moments), like)
            fade2 = as_computed(beta2 ** (step - at_moments), like)
            for i in range(width):
                m[i] = narrow(widen(m[i]) * fade1, m[i])
                v[i] = narrow(widen(v[i]) * fade2, v[i])
            moment_steps[row] = step


@reordering
def sum_of_terms(count: int, rates: Any, fading: Any, nodes: Any, spreading: Any, spread: float, root: float) -> float:
    """Return the sum over the skipped steps j of `rates[j] * fading[j] / (root + nodes[j] * spreading[j] * spread)`."""
    total = 0.0
    for j in range(count):
        total += rates[j] * fading[j] / (root + nodes[j] * spreading[j] * spread)
    return total


@kernel
def apply_pending_rowwise(
    start: int,
    stop: int,
    rows: Any,
    value_steps: Any,
    moment_steps: Any,
    lines: Any,
    masses: Any,
    fading: Any,
    spreading: Any,
    sizes: Any,
    rates: Any,
    weight: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    seed: int,
    decay_moments: bool,
    outcome: Any,
) -> None:
    """Apply the pending updates of distinct rows with one second moment each in place; see `apply_pending`.

    A row has one sum, which is computed term by term.
    """
    before, size, reach, weak = sizes
    beta1, beta2, _ = rates
    step, ratio, width, moves = before + size, beta1 / math.sqrt(beta2), weight.shape[1], len(exp_avg) > 0
    like = weight[0, 0]
    for place_of_row in range(start, stop):
        row = rows[place_of_row]
        at, at_moments = value_steps[row], moment_steps[row]
        p = weight[row]
        if at < step:
            if moves and not weak:
                outcome[place_of_row] = 2
                continue
            place, lag = at - before, at - at_moments
            decay = as_computed(math.exp(lines[2, size] - lines[2, place]), like)
            key = row_key(seed, step, row)
            if moves:
                terms = min(step - at, reach)
                spread, scale = beta2 ** (-0.5 * lag), math.exp(lines[2, size]) * ratio**lag
                first, last = place + 1, place + 1 + terms
                root = math.sqrt(exp_avg_sq[row, 0])
                nodes = lines[1, first:last]
                summed = 0.0
                if scale > 0:
                    summed = scale * sum_of_terms(terms, masses[first:last], fading, nodes, spreading, spread, root)
                total, m = as_computed(summed, like), exp_avg[row]
                for i in range(width):
                    p[i] = narrow_at_random(widen(p[i]) * decay - widen(m[i]) * total, p[i], key, i)
            else:
                for i in range(width):
                    p[i] = narrow_at_random(widen(p[i]) * decay, p[i], key, i)
            value_steps[row], outcome[place_of_row] = step, 1
        if decay_moments and 0 < at_moments < step:
            exp_avg_sq[row, 0] *= beta2 ** (step - at_moments)
            if moves:
                fade, m = as_computed(beta1 ** (step - at_moments), like), exp_avg[row]
                for i in range(width):
                    m[i] = narrow(widen(m[i]) * fade, m[i])
            moment_steps[row] = step


@kernel
def adamw_step(
    start: int,
    stop: int,
    rows: Any,
    gradients: Any,
    value_steps: Any,
    moment_steps: Any,
    step: int,
    rates: Any,
    weight: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    seed: int,
    missed: Any,
) -> None:
    """Make AdamW's step on rows with a gradient, in place.

    - `rates`: `beta1`, `beta2`, and the numbers of `StepRates`.
    - `missed`: set to 1 for rows with pending updates, which stay unchanged; else to 0.
    """
    beta1, beta2, addend1, addend2, factor, addend, update = rates
    like = exp_avg[0, 0]
    add1, add2 = as_computed(addend1, like), as_computed(addend2, like)
    left, eps, rate = as_computed(factor, like), as_computed(addend, like), as_computed(update, like)
    for n in range(start, stop):
        row = rows[n]
        missed[n] = value_steps[row] != step - 1
        if missed[n]:
            continue
        p, m, v, g = weight[row], exp_avg[row], exp_avg_sq[row], gradients[n]
        fade1 = as_computed(beta1 ** (step - moment_steps[row]), like)
        fade2 = as_computed(beta2 ** (step - moment_steps[row]), like)
        key = row_key(seed, step, row)
        for i in range(len(p)):
            slope = widen(g[i])
            first = widen(m[i]) * fade1 + slope * add1
            second = widen(v[i]) * fade2 + slope * slope * add2
            number = widen(p[i]) * left - rate * first / (math.sqrt(second) + eps)
            p[i] = narrow_at_random(number, p[i], key, i)
            m[i], v[i] = narrow(first, m[i]), narrow(second, v[i])
        value_steps[row] = moment_steps[row] = step


@reordering
def sum_of_squares(numbers: Any) -> Any:
    total = as_computed(0.0, numbers[0])
    for i in range(len(numbers)):
        number = widen(numbers[i])
        total += number * number
    return total


@kernel
def rowwise_step(
    start: int,
    stop: int,
    rows: Any,
    gradients: Any,
    value_steps: Any,
    moment_steps: Any,
    step: int,
    rates: Any,
    weight: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    seed: int,
    missed: Any,
) -> None:
    """Make the step of a rule with one second moment a row on rows with a gradient, in place; see `adamw_step`."""
    beta1, beta2, addend1, addend2, factor, addend, update = rates
    like, width, moves = weight[0, 0], weight.shape[1], len(exp_avg) > 0
    add1, left = as_computed(addend1, like), as_computed(factor, like)
    for n in range(start, stop):
        row = rows[n]
        missed[n] = value_steps[row] != step - 1
        if missed[n]:
            continue
        p, g, key = weight[row], gradients[n], row_key(seed, step, row)
        second = exp_avg_sq[row, 0] * beta2 ** (step - moment_steps[row]) + addend2 * sum_of_squares(g) / width
        rate = as_computed(update / (math.sqrt(second) + addend), like)
        if moves:
            m, fade = exp_avg[row], as_computed(beta1 ** (step - moment_steps[row]), like)
            for i in range(width):
                first = widen(m[i]) * fade + widen(g[i]) * add1
                p[i] = narrow_at_random(widen(p[i]) * left - rate * first, p[i], key, i)
                m[i] = narrow(first, m[i])
        else:
            for i in range(width):
                p[i] = narrow_at_random(widen(p[i]) * left - rate * widen(g[i]), p[i], key, i)
        exp_avg_sq[row, 0] = second
        value_steps[row] = moment_steps[row] = step
