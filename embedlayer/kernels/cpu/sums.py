"""Kernel of sums of rows, forward and backward; `embedlayer.tables.sums.sum_vectors` defines them."""

from typing import Any

from embedlayer.kernels.cpu.numbers import as_computed, empty_computed, exact, narrow, rounded, widen


@exact
def sum_rows(
    start: int, stop: int, rows: Any, ids: Any, bounds: Any, weights: Any, places: Any, rounding: Any, out: Any
) -> None:
    """Write `sum of weights[i] * rows[ids[i]]` over `i` in `bounds[n] : bounds[n + 1]`, for `n` in `start : stop`.

    Terms are added one after another. Four rows are read at once: the processor foresees accesses in each of them, and
    their sum stays in a register.

    - `rows`: rows, `(V, D)`.
    - `ids`: row of each term, `(M,)`, which was checked.
    - `bounds`: first term of each sum, and the end of the last, `(N + 1,)`.
    - `weights`: factor of each term, `(M,)`; `(0,)` for 1.
    - `places`: row of `out` that gets each sum, `(N,)`; `(0,)` for `out[n]`.
    - `rounding`: an array with an element of the type to which each product and sum is rounded: that of the rows, as
      torch's operators round, or the one that is computed with.
    - `out`: sums, `(N, D)`; only the rows `places` are written. No terms give 0.
    """
    width, like, is_weighted = out.shape[1], rounding[0], len(weights) > 0
    total = empty_computed(width, like)
    for n in range(start, stop):
        i, end, to = bounds[n], bounds[n + 1], out[places[n] if len(places) > 0 else n]
        total[:] = as_computed(-0.0 if i < end else 0.0, like)  # -0 + x is x for each x
        while i + 4 <= end:
            a, b, c, d = rows[ids[i]], rows[ids[i + 1]], rows[ids[i + 2]], rows[ids[i + 3]]
            if is_weighted:
                u, v, w, x = widen(weights[i]), widen(weights[i + 1]), widen(weights[i + 2]), widen(weights[i + 3])
                for j in range(width):
                    t = rounded(total[j] + rounded(u * widen(a[j]), like), like)
                    t = rounded(t + rounded(v * widen(b[j]), like), like)
                    t = rounded(t + rounded(w * widen(c[j]), like), like)
                    total[j] = rounded(t + rounded(x * widen(d[j]), like), like)
            else:
                for j in range(width):
                    t = rounded(rounded(total[j] + widen(a[j]), like) + widen(b[j]), like)
                    total[j] = rounded(rounded(t + widen(c[j]), like) + widen(d[j]), like)
            i += 4
        while i < end:
            a, u = rows[ids[i]], widen(weights[i]) if is_weighted else as_computed(1.0, like)
            for j in range(width):
                total[j] = rounded(total[j] + rounded(u * widen(a[j]), like), like)
            i += 1
        for j in range(width):
            to[j] = narrow(total[j], to[0])
