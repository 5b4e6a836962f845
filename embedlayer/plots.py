"""Pictures of a table, its positions and its training (extra `plots`).

Each function returns a `matplotlib.figure.Figure` of its own: no pyplot, no current figure, nothing left behind in
matplotlib's settings. Save one with `figure.savefig(path)`, or put it into a page with `svg(figure)`.

Colours are told apart with any kind of colour vision, and in grey. Texts and lines use a few fixed colours, so that
a page can swap them for its own (`THEME`), and a picture can follow a dark page.
"""

import io
import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from embedlayer.errors import ShapeError, require

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

INK, MUTED, GRID, PAPER = "#1f2a37", "#5f6b7a", "#e3e7ec", "#fefefe"
BLUE, ORANGE = "#2867b2", "#d9700f"

THEME = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper", BLUE: "--blue", ORANGE: "--orange"}
"""The colours of texts and lines, and the CSS variable a page may put in their place."""

POINT_COLOURS = ["#3568ae", "#8d8ba0", "#e5862c"]
"""Low to high, for points: middling tones that stand out from a white page and from a black one."""

STYLE: dict[str, Any] = {
    "figure.dpi": 100,
    "figure.facecolor": PAPER,
    "figure.constrained_layout.use": True,
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
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "embedlayer",
}

WIDE_FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "PingFang SC", "Hiragino Sans", "Microsoft YaHei", "Malgun Gothic",
    "WenQuanYi Zen Hei", "Arial Unicode MS", "Noto Sans Arabic", "Noto Sans Devanagari", "Noto Sans Hebrew",
)  # fmt: skip
"""Fonts for what DejaVu Sans lacks, used where they are installed."""


def loss_curve(
    metrics: Sequence[Mapping[str, Any]], *, baseline: float | None = None, title: str = "Loss"
) -> "matplotlib.figure.Figure":
    """Training and validation loss over steps.

    Args:
        metrics: Lines of a run's `metrics.jsonl`: `step`, `loss` and, on some, `validation_loss`, in nats per token.
            A value that is missing, `None` or not finite is left out.
        baseline: A loss to compare with, drawn as a labelled line: `ln V`, what knowing nothing costs.
        title: The figure's title.
    """
    with _figure(7.2, 3.9) as (figure, axes):
        for key, label, colour, style in (
            ("loss", "training", BLUE, {"marker": ""}),
            ("validation_loss", "validation", ORANGE, {"marker": "o", "markersize": 4}),
        ):
            steps, losses = _series(metrics, key)
            if len(steps) == 1:
                style = {"marker": "o", "markersize": 5}
            if steps:
                axes.plot(steps, losses, color=colour, label=label, **style)
        axes.set(xlabel="step", ylabel="loss (nats per token)")
        axes.set_title(title)
        axes.grid(visible=False, axis="x")
        axes.margins(x=0.02, y=0.08)
        if baseline is not None:
            axes.axhline(baseline, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
            axes.annotate(
                f"ln V = {baseline:.2f}, knowing nothing",
                (1, baseline),
                xycoords=("axes fraction", "data"),
                xytext=(-2, 4),
                textcoords="offset points",
                ha="right",
                color=MUTED,
            )
        if axes.get_legend_handles_labels()[1]:
            axes.legend(loc="lower right", bbox_to_anchor=(1.01, 1.0), ncols=2, borderaxespad=0.2, handlelength=1.4)
    return figure


def optimizer_paths(
    values: Mapping[str, Sequence[float]], *, touched: Sequence[int] = (), title: str = "Who ends where"
) -> "matplotlib.figure.Figure":
    """One number of a table over the steps, under one optimizer and others that are compared with it.

    Args:
        values: For each optimizer, the number after each step; the first one is a broad band behind the others.
        touched: Steps at which the row had a gradient, marked at the foot.
        title: The figure's title.
    """
    looks = [(MUTED, 6.0, 0.35, "-"), (BLUE, 1.6, 1.0, "-"), (ORANGE, 1.6, 1.0, (0, (5, 2)))]
    with _figure(7.2, 3.9) as (figure, axes):
        for (name, numbers), (colour, width, alpha, style) in zip(values.items(), looks, strict=False):
            steps = range(1, len(numbers) + 1)
            axes.plot(steps, numbers, color=colour, linewidth=width, alpha=alpha, linestyle=style, label=name)
        across = axes.get_xaxis_transform()
        axes.plot(touched, [0.02] * len(touched), "|", color=INK, markersize=9, transform=across, label="gradient")
        axes.set(xlabel="step", ylabel="one number of a rare row")
        axes.set_title(title)
        axes.margins(x=0.02, y=0.1)
        axes.legend(loc="best")
    return figure


def table_map(
    coordinates: Float[Tensor, "N 2"],
    labels: Mapping[int, str] | None = None,
    *,
    explained_variance_ratio: Float[Tensor, " C"] | None = None,
    values: Float[Tensor, " N"] | None = None,
    value_label: str = "",
    max_labels: int = 40,
    title: str = "The table, seen along its two widest directions",
) -> "matplotlib.figure.Figure":
    """All rows of a table as points, some of them named.

    Args:
        coordinates: Two numbers per row, such as `pca(rows).coordinates`.
        labels: Row index to text, the most wanted first. A label that would cover one placed before it, or that no
            installed font can write, is left out.
        explained_variance_ratio: Share of the variance along each axis, for the axes' names.
        values: A number per row, shown as colour.
        value_label: What `values` are.
        max_labels: Labels to place at most.
        title: The figure's title.

    Raises:
        ShapeError: A label's index is outside the rows.
    """
    count = len(coordinates)
    outside = [index for index in labels or {} if not 0 <= index < count]
    if outside:
        raise ShapeError(f"Label for row {outside[0]}, but there are {count} rows (0..{count - 1}).")
    points = coordinates.detach().double().cpu().numpy()
    with _figure(7.2, _height_for(points)) as (figure, axes):
        colour: dict[str, Any] = {"color": BLUE}
        if values is not None:
            colours = require("matplotlib.colors", extra="plots")
            shades = colours.LinearSegmentedColormap.from_list("points", POINT_COLOURS)
            colour = {"c": values.detach().double().cpu().numpy(), "cmap": shades, "plotnonfinite": True}
        size, opacity = max(3.0, min(20.0, 24000 / max(count, 1))), max(0.25, min(0.8, 2500 / max(count, 1)))
        dots = axes.scatter(points[:, 0], points[:, 1], s=size, alpha=opacity, linewidths=0, rasterized=True, **colour)
        axes.set_title(title)
        axes.margins(0.06)
        axes.set_aspect("equal", adjustable="datalim")
        axes.locator_params(nbins=6)
        for axis, name, share in zip(
            (axes.xaxis, axes.yaxis),
            ("first component", "second component"),
            (None, None) if explained_variance_ratio is None else explained_variance_ratio.tolist(),
            strict=False,
        ):
            axis.set_label_text(name if share is None else f"{name} ({100 * share:.3g} % of the variance)")
        if values is not None:
            _colorbar(figure, dots, axes, label=value_label, shrink=0.6)
        _place_labels(figure, axes, points, labels or {}, max_labels)
    return figure


def position_heatmap(
    values: Float[Tensor, "T C"],
    *,
    title: str,
    value_label: str,
    row_label: str = "position",
    column_label: str = "dimension",
) -> "matplotlib.figure.Figure":
    """A matrix as colours: white is 0, red above, blue below, equally far both ways.

    Args:
        values: One row per position, one column per dimension, pair or head; see `position_values`.
        title: The figure's title.
        value_label: What a number is, beside the colours.
        row_label: What a row is.
        column_label: What a column is.
    """
    matrix = values.detach().double().cpu().numpy()
    finite = values[values.isfinite()].abs()
    limit = float(finite.max()) if finite.numel() else 0.0
    with _figure(7.2, 4.4) as (figure, axes):
        limit = limit or 1.0
        image = axes.imshow(
            matrix, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest", rasterized=True
        )
        axes.set(xlabel=column_label, ylabel=row_label)
        axes.set_title(title)
        axes.grid(visible=False)
        axes.locator_params(integer=True)
        _colorbar(figure, image, axes, label=value_label)
        for spine in axes.spines.values():
            spine.set_visible(False)
    return figure


def norm_histogram(
    norms: Float[Tensor, " N"], *, title: str = "Length of the rows", bins: int = 60
) -> "matplotlib.figure.Figure":
    """How many rows have which length, and the median.

    Args:
        norms: `|row|` for each row; values that are not finite are left out.
        title: The figure's title.
        bins: Bars.
    """
    finite = norms.detach().double().cpu()
    finite = finite[finite.isfinite()]
    with _figure(7.2, 3.6) as (figure, axes):
        axes.set(xlabel="length of the row (L2 norm)", ylabel="rows")
        axes.set_title(title)
        axes.grid(visible=False, axis="x")
        axes.locator_params(axis="y", integer=True)
        if finite.numel():
            axes.hist(finite.numpy(), bins=bins, color=BLUE, edgecolor=PAPER, linewidth=0.6)
            median = float(finite.median())
            axes.axvline(median, color=ORANGE, linewidth=1.6)
            axes.annotate(
                f"median {median:.3g}",
                (median, 1),
                xycoords=("data", "axes fraction"),
                xytext=(5, -4),
                textcoords="offset points",
                va="top",
                color=ORANGE,
                bbox=_backing(),
            )
    return figure


def svg(figure: "matplotlib.figure.Figure", *, prefix: str) -> str:
    """A figure as an SVG element to stand in an HTML page.

    Texts stay texts, what is rasterised stays pixels, and the colours of `THEME` become `var(--name, colour)`.

    Args:
        figure: From one of the functions here.
        prefix: Put before each id, so that several figures can share a page.
    """
    matplotlib = require("matplotlib", extra="plots")
    out = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(
            out,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", out.getvalue(), flags=re.DOTALL)
    root, rest = re.fullmatch(r".*?(<svg\b[^>]*>)(.*)", text.strip(), flags=re.DOTALL).groups()  # type: ignore[union-attr]
    return re.sub(r' (?:width|height)="[^"]*"', "", root) + re.sub("<[^>]*>", lambda tag: _themed(tag[0], prefix), rest)


def _themed(tag: str, prefix: str) -> str:
    """One tag of an SVG, its ids and colours made fit for a page; texts between tags are not ours to change."""
    tag = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", tag)
    for colour, name in THEME.items():
        tag = tag.replace(colour, f"var({name}, {colour})")
    return tag


def visible_text(text: str) -> str:
    """A token as one can see it: a space is `·`, a newline `⏎`, a tab `⇥`, other unseen characters their escape.

    Example:
        >>> visible_text(" first")
        '·first'
    """
    return "".join(mark or character for character, mark in visible_characters(text))


def visible_characters(text: str) -> Iterator[tuple[str, str | None]]:
    """Each character, and what stands for it where it cannot be seen by itself."""
    for character in text:
        category = unicodedata.category(character)
        if character in VISIBLE:
            yield character, VISIBLE[character]
        elif category in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}:
            yield character, character.encode("unicode_escape").decode("ascii")
        else:
            yield character, None


VISIBLE = {" ": "·", "\n": "⏎", "\t": "⇥"}


@contextmanager
def _figure(width: float, height: float) -> "Iterator[tuple[matplotlib.figure.Figure, matplotlib.axes.Axes]]":
    """A figure of so many inches with one pair of axes, in the style of all figures here."""
    matplotlib = require("matplotlib", extra="plots")
    figures = require("matplotlib.figure", extra="plots")
    with matplotlib.rc_context({**STYLE, "font.family": _font_families()}):
        figure = figures.Figure(figsize=(width, height))
        yield figure, figure.add_subplot()


def _font_families() -> list[str]:
    manager = require("matplotlib.font_manager", extra="plots").fontManager
    installed = {font.name for font in manager.ttflist}
    return ["DejaVu Sans", *(name for name in WIDE_FONTS if name in installed)]


def _height_for(points: Any) -> float:
    """Inches that suit the points' own shape, as both axes have one scale."""
    if not len(points):
        return 5.0
    across, along = points.max(0) - points.min(0)
    return float(min(6.2, max(3.8, 6.2 * along / across))) if across > 0 and math.isfinite(along / across) else 5.0


def _series(metrics: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    found = [(line["step"], line[key]) for line in metrics if line.get(key) is not None and math.isfinite(line[key])]
    return [step for step, _ in found], [loss for _, loss in found]


def _colorbar(
    figure: "matplotlib.figure.Figure", artist: Any, axes: "matplotlib.axes.Axes", *, label: str, shrink: float = 1.0
) -> None:
    bar = figure.colorbar(artist, ax=axes, shrink=shrink, aspect=28, pad=0.02, label=label)
    bar.ax.yaxis.labelpad = 8
    bar.outline.set_visible(False)
    if bar.solids is not None:
        bar.solids.set(alpha=1.0, rasterized=True)


def _backing() -> dict[str, Any]:
    """A patch of paper behind a text, so that it can be read over points and bars."""
    return {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.72, "boxstyle": "square,pad=0.1"}


def _place_labels(
    figure: "matplotlib.figure.Figure",
    axes: "matplotlib.axes.Axes",
    points: Any,
    labels: Mapping[int, str],
    max_labels: int,
) -> None:
    """Write labels beside their points, each where it covers no other and stays inside; else not at all."""
    backend = require("matplotlib.backends.backend_agg", extra="plots")
    renderer = backend.FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    room = axes.get_window_extent(renderer)
    taken: list[Any] = []
    places = [
        (4, 0, "left", "center"),
        (-4, 0, "right", "center"),
        (0, 4, "center", "bottom"),
        (0, -4, "center", "top"),
    ]
    can_write = _writer()
    for index, text in labels.items():
        if len(taken) >= max_labels:
            return
        shown = visible_text(text)
        if not shown or not can_write(shown):
            continue
        for dx, dy, across, along in places:
            label = axes.annotate(
                shown, points[index], xytext=(dx, dy), textcoords="offset points", ha=across, va=along,
                fontsize=8.5, bbox=_backing(), zorder=3,
            )  # fmt: skip
            box = label.get_window_extent(renderer).padded(2)
            inside = room.x0 <= box.x0 and box.x1 <= room.x1 and room.y0 <= box.y0 and box.y1 <= room.y1
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            label.remove()


def _writer() -> Any:
    """A test of whether the installed fonts have every character of a text."""
    manager = require("matplotlib.font_manager", extra="plots")
    families = _font_families()
    maps = [manager.get_font(manager.findfont(family)).get_charmap() for family in families]
    return lambda text: all(any(ord(character) in glyphs for glyphs in maps) for character in text)
