"""Style of all figures: colours, fonts, empty figures, captions, and SVG for web pages.

A caption says what a figure cannot show: rows that are left out, and outliers that are drawn at its edge.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from embedlayer.core.errors import require
from embedlayer.core.formatting import count_of

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

Axes: TypeAlias = "matplotlib.axes.Axes"
Figure: TypeAlias = "matplotlib.figure.Figure"  # types of matplotlib, which is imported only when a figure is drawn

INK, MUTED, GRID, PAPER = "#1f2a37", "#5f6b7a", "#e3e7ec", "#fefefe"
BLUE, ORANGE, GREEN, PURPLE = "#2867b2", "#d9700f", "#304818", "#a878f0"

LINES = (BLUE, ORANGE, GREEN, PURPLE)
"""Colours of lines, in order of use; they are distinct with any kind of colour vision."""

HOLE = "#b4bac3"
"""Colour of heat map cells that are not finite: a grey that is not in the colour map."""

THEME = {
    INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper",
    BLUE: "--blue", ORANGE: "--orange", GREEN: "--green", PURPLE: "--purple",
}  # fmt: skip
"""Colours of texts and lines, and the CSS variables that replace them in `svg`."""

POINT_COLOURS = ["#3568ae", "#8d8ba0", "#e5862c"]
"""Colours from low to high, for points and ordered lines, with contrast to white and to black pages."""

STYLE: dict[str, Any] = {
    "figure.dpi": 100,
    "figure.facecolor": PAPER,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.09,
    "figure.constrained_layout.h_pad": 0.09,
    "savefig.facecolor": PAPER,
    "savefig.dpi": 200,
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,
    "axes.facecolor": PAPER,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "embedlayer",
}

DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.4)), (0, (6, 1.5, 1, 1.5)))
"""Dash patterns of lines, which distinguish them without colours."""

WIDE_FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "PingFang SC", "Hiragino Sans", "Microsoft YaHei", "Malgun Gothic",
    "WenQuanYi Zen Hei", "Arial Unicode MS", "Noto Sans Arabic", "Noto Sans Devanagari", "Noto Sans Hebrew",
)  # fmt: skip
"""Fonts for characters that DejaVu Sans does not have, used if they are installed."""

BACKING: dict[str, Any] = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.72, "boxstyle": "square,pad=0.1"}
"""Box behind a text that is drawn over lines or points."""


@contextmanager
def new_figure(
    width: float, height: float, *, title: str = "", panels: tuple[int, int] | None = None, **options: Any
) -> "Iterator[tuple[matplotlib.figure.Figure, Any]]":
    """Yield a figure with empty axes; inside the `with` block the style of all figures applies."""
    matplotlib = require("matplotlib", extra="plots")
    from embedlayer.plots.notebook_figure import NotebookFigure

    with matplotlib.rc_context({**STYLE, "font.family": font_families()}):
        figure = NotebookFigure(figsize=(width, height))
        grid = figure.subplots(*(panels or (1, 1)), squeeze=False, **options).flatten()
        for axes in grid:
            keep_ticks(axes)
        if panels is None:
            grid[0].set_title(title)
        elif title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=STYLE["axes.titlesize"], fontweight="bold")
        yield figure, grid[0] if panels is None else grid


def keep_ticks(axes: Axes) -> None:
    """Set the tick style of the axes now, so that ticks that matplotlib adds when it draws have it too."""
    axes.tick_params(labelsize=9, labelcolor=MUTED, color=GRID, grid_color=GRID, grid_linewidth=0.8)


def font_families() -> list[str]:
    """Return names of font families: DejaVu Sans, which matplotlib contains, and the installed ones of `WIDE_FONTS`."""
    manager = require("matplotlib.font_manager", extra="plots").fontManager
    installed = {font.name for font in manager.ttflist}
    return ["DejaVu Sans", *(name for name in WIDE_FONTS if name in installed)]


def numbers(values: Tensor) -> Any:
    """Copy a tensor of any dtype and device to a NumPy array in float64."""
    return values.detach().cpu().to(torch.float64, copy=True).numpy()


def point_colours() -> Any:
    """Return matplotlib's colour map from `POINT_COLOURS`, with grey for values that are not finite."""
    colours = require("matplotlib.colors", extra="plots")
    return colours.LinearSegmentedColormap.from_list("points", POINT_COLOURS).with_extremes(bad=HOLE)


def colorbar(figure: Figure, artist: Any, axes: Any, *, label: str, shrink: float = 1.0) -> Axes:
    """Add a colour bar with a label to a figure, and return the axes of the bar."""
    bar = figure.colorbar(artist, ax=axes, shrink=shrink, aspect=28, pad=0.02, label=label)
    bar.ax.yaxis.labelpad = 8
    keep_ticks(bar.ax)
    bar.outline.set_visible(False)
    if bar.solids is not None:
        bar.solids.set(alpha=1.0, rasterized=True)
    return bar.ax


def svg(figure: Figure, *, prefix: str) -> str:
    """Return a figure as an SVG element for an HTML page.

    Texts remain text, rasterised parts remain pixels, and the colours of `THEME` become `var(--name, colour)`. The page
    decides on the size: the element has a `viewBox`, but neither width nor height.

    Args:
        figure: A figure from a function of `embedlayer.plots`.
        prefix: Prefix of each id, so that one page can contain several figures.

    Example:
        >>> from embedlayer.plots import norm_histogram
        >>> svg(norm_histogram(TokenEmbedding(100, 16)), prefix="norms")[:4]
        '<svg'
    """
    matplotlib = require("matplotlib", extra="plots")
    out = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", out.getvalue(), flags=re.DOTALL)
    root, rest = re.fullmatch(r".*?(<svg\b[^>]*>)(.*)", text.strip(), flags=re.DOTALL).groups()  # type: ignore[union-attr]
    # only inside tags: a prefix before each id and reference to one, and CSS variables for colours
    parts = re.split("(<[^>]*>)", rest)
    for place in range(1, len(parts), 2):
        parts[place] = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", parts[place])
        for colour, name in THEME.items():
            parts[place] = parts[place].replace(colour, f"var({name}, {colour})")
    return re.sub(r' (?:width|height)="[^"]*"', "", root) + "".join(parts)


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
