"""Kernels of the input embedding, forward and backward; `embedlayer.inputs.fused` defines them."""

from typing import Any

import numpy as np

from embedlayer.kernels.cpu.numbers import as_computed, empty_computed, kernel, multiply_add, narrow, prefetch, widen

AHEAD = 4
"""Rows between the one that is loaded into the cache and the one that is computed."""

APART = 16
"""Vectors that are summed on their own: rounding errors grow with the number of terms of a sum."""


@kernel
def gather_scale_add_drop(
    start: int,
    stop: int,
    rows: Any,
    ids: Any,
    size: int,
    bad: Any,
    scale: float,
    addend: Any,
    dropout: Any,
    growth: float,
    out: Any,
) -> None:
    """Compute `dropout(scale * rows[ids] + addend)` for the tokens `start` to `stop - 1`.

    - `size`: number of rows. An ID outside `0 .. size - 1` sets `bad[0]` to 1, and its vector is not written.
    - `addend`: vectors to add, `(A, D)`: token n gets the one at `n % A`. `(0, D)` for none.
    - `dropout`: seed and threshold of the mask, as in `drop`; threshold 0 for no dropout.
    - `growth`: factor on everything that is not dropped.
    - `out`: result, `(tokens, D)`, which may be `rows`.
    """
    width, (seed, threshold) = out.shape[1], dropout
    factor, grow = as_computed(scale * growth, rows[0, 0]), as_computed(growth, rows[0, 0])
    words = np.empty((width + 3) // 4, np.uint64)
    for n in range(start, stop):
        if ids[n] < 0 or ids[n] >= size:
            bad[0] = 1
            continue
        prefetch(rows[ids[min(n + AHEAD, len(ids) - 1)]])
        row, to = rows[ids[n]], out[n]
        if len(addend) > 0:
            added = addend[n % len(addend)]
            for i in range(width):
                to[i] = narrow(multiply_add(factor, widen(row[i]), grow * widen(added[i])), to[0])
        else:
            for i in range(width):
                to[i] = narrow(factor * widen(row[i]), to[0])
        if threshold > 0:
            draw_bits(words, seed, n)
            drop(to, words, threshold)


@kernel
def draw_bits(words: Any, seed: int, token: int) -> None:
    """Draw the random bits of one token; `embedlayer.core.numbers.random_words` defines them."""
    first = np.uint64(seed) + np.uint64(token * len(words)) * np.uint64(0x9E3779B97F4A7C15)
    for i in range(len(words)):
        a = first + np.uint64(i) * np.uint64(0x9E3779B97F4A7C15)
        b = (a ^ (a >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        c = (b ^ (b >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        words[i] = c ^ (c >> np.uint64(31))


@kernel
def drop(vector: Any, words: Any, threshold: int) -> None:
    """Multiply by 0 each number whose 16 bits, a signed integer, are below `threshold - 2^15`."""
    bits, least = words.view(np.int16), np.int32(threshold - (1 << 15))
    zero, one = as_computed(0.0, vector[0]), as_computed(1.0, vector[0])
    for i in range(len(vector)):
        vector[i] = narrow(widen(vector[i]) * (one if np.int32(bits[i]) >= least else zero), vector[0])


@kernel
def sum_masked_segments(
    start: int, stop: int, grad: Any, order: Any, offsets: Any, places: Any, factor: float, dropout: Any, out: Any
) -> None:
    """Sum `factor * mask * grad` over the tokens of each segment, in the order of `order`, `APART` at a time.

    - `order`: tokens, segment by segment.
    - `offsets`: start of each segment in `order`, and the end of the last.
    - `places`: row of `out` that gets the sum of each segment.
    - `dropout`: seed and threshold of the mask, as in `gather_scale_add_drop`.
    - `out`: sums; only the rows `places` are written.
    """
    width, (seed, threshold) = grad.shape[1], dropout
    words = np.empty((width + 3) // 4, np.uint64)
    bits, least = words.view(np.int16), np.int32(threshold - (1 << 15))
    total, part = empty_computed(width, grad[0, 0]), empty_computed(width, grad[0, 0])
    zero, one, factor_of = as_computed(0.0, grad[0, 0]), as_computed(1.0, grad[0, 0]), as_computed(factor, grad[0, 0])
    for segment in range(start, stop):
        total[:] = zero
        part[:] = zero
        for k in range(offsets[segment], offsets[segment + 1]):
            token = order[k]
            prefetch(grad[order[min(k + AHEAD, len(order) - 1)]])
            values = grad[token]
            if threshold > 0:
                draw_bits(words, seed, token)
                for i in range(width):
                    part[i] += widen(values[i]) * (one if np.int32(bits[i]) >= least else zero)
            else:
                for i in range(width):
                    part[i] += widen(values[i])
            if (k + 1 - offsets[segment]) % APART == 0:
                for i in range(width):
                    total[i] += part[i]
                    part[i] = zero
        for i in range(width):
            total[i] += part[i]
        to = out[places[segment]]
        for i in range(width):
            to[i] = narrow(factor_of * total[i], to[0])
