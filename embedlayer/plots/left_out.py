"""What a figure cannot show, written below it: rows that are left out, and outliers that are drawn at its edge."""

from typing import Any

import numpy as np

from embedlayer.core.formatting import count_of
from embedlayer.plots.style import MUTED, Figure

FENCE = 10.0  # a value is an outlier if it is more than this many interquartile ranges outside the quartiles

LEAST_SPREAD = 1e-3
"""Least interquartile range, as a share of the larger quartile: numbers that differ by rounding have no outliers."""

MOST_OUTLIERS = 0.05
"""Largest share of the values that are outliers; one value always may be. If there are more, none is."""

CAPTION_SIZE = 8.5


def caption(figure: Figure, *sentences: str) -> None:
    """Write sentences below a figure, one a line; empty ones are skipped. A second call replaces those of the first."""
    text = "\n".join(filter(None, sentences))
    if text or figure.get_supxlabel():
        figure.supxlabel(text, x=0.012, ha="left", fontsize=CAPTION_SIZE, color=MUTED, linespacing=1.4)


def left_out(count: int, what: str, why: str) -> str:
    """Return "3 rows left out: NaN or infinity."; `""` for a count of 0."""
    return f"{count_of(count, what)} left out: {why}." if count else ""


def with_missing(label: str, count: int) -> str:
    """Return the label of a line with the number of its values that are left out, as "training (3 not finite)"."""
    return f"{label} ({count:,} not finite)" if count else label


def usual_range(values: Any) -> tuple[float, float]:
    """Return the lowest and the highest value without outliers; values that are not finite are ignored.

    A few outliers would squash all other values of a figure. See `FENCE` and `MOST_OUTLIERS`. If both quartiles are
    equal, no value is an outlier.

    Args:
        values: NumPy array `(N,)`. Without a finite value, the result is `(0.0, 0.0)`.

    Example:
        >>> usual_range(np.array([1.0, 2.0, 3.0, 4.0, 1000.0]))
        (1.0, 4.0)
    """
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0, 0.0
    low, high = np.quantile(finite, [0.25, 0.75])
    reach = FENCE * max(high - low, LEAST_SPREAD * max(abs(low), abs(high)))
    inside = finite[(finite >= low - reach) & (finite <= high + reach)]
    if low == high or finite.size - inside.size > max(1.0, MOST_OUTLIERS * finite.size):
        inside = finite
    return float(inside.min()), float(inside.max())
