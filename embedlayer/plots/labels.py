"""Labels of points without overlap: a label is written on a free side of its point, or left out."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embedlayer.core.errors import require
from embedlayer.plots.style import BACKING, INK, Axes, Figure, font_families

FONT_SIZE = 8.5

SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
"""Sides of a point on which its label may be written, across and along, in order of preference."""


def write_labels(
    figure: Figure,
    axes: Axes,
    points: Any,
    labels: Mapping[int, str],
    *,
    most: int,
    mark: bool = False,
    sides: Sequence[tuple[int, int]] = SIDES,
    **style: Any,
) -> list[int]:
    """Write labels beside their points where they fit, and return the indices of the labelled points.

    A label is written on the first side of its point where it overlaps no other label and no labelled point.

    The figure must be complete except for these labels: its layout is computed here. `labels` are in order of priority;
    texts that no installed font can write are left out. `mark` draws the labelled points again in a dark colour.
    """
    backend = require("matplotlib.backends.backend_agg", extra="plots")
    fonts = require("matplotlib.font_manager", extra="plots")
    renderer = backend.FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    font = fonts.FontProperties(family=font_families(), size=FONT_SIZE)
    known = {code for family in font_families() for code in fonts.get_font(fonts.findfont(family)).get_charmap()}
    pixels = axes.transData.transform(points)
    low, high = axes.get_window_extent(renderer).get_points()
    gap = 4 * figure.dpi / 72 - 2
    dots, named = np.empty((0, 2, 2)), np.empty((0, 2, 2))  # rectangles of labelled points and of labels, in pixels
    written: list[int] = []
    for index, text in labels.items():
        dot = pixels[index] + np.array([[-gap / 2], [gap / 2]])
        is_shown = bool(text) and known.issuperset(map(ord, text)) and _is_inside(dot, low, high)
        if len(written) == most or not is_shown or _overlaps(dot, named):
            continue
        size = np.add(renderer.get_text_width_height_descent(text, font, False)[:2], 4)
        for side in sides:
            corner = pixels[index] + np.multiply(side, gap) + np.subtract(side, 1) / 2 * size
            box = np.stack([corner, corner + size])
            if not _is_inside(box, low, high) or _overlaps(box, named) or _overlaps(box, dots):
                continue
            named, dots = np.append(named, box[None], 0), np.append(dots, dot[None], 0)
            axes.annotate(
                text,
                points[index],
                xytext=(4 * side[0], 4 * side[1]),
                textcoords="offset points",
                ha=("right", "center", "left")[side[0] + 1],
                va=("top", "center", "bottom")[side[1] + 1],
                fontsize=FONT_SIZE,
                bbox=BACKING,
                zorder=3,
                in_layout=False,
                **style,
            )
            written.append(index)
            break
    if mark and written:
        axes.scatter(points[written, 0], points[written, 1], s=7, color=INK, linewidths=0, zorder=2.5)
    return written


def _is_inside(box: Any, low: Any, high: Any) -> bool:
    """Return whether a rectangle `(corner, opposite corner)` is completely in an area."""
    return bool((box[0] >= low).all() and (box[1] <= high).all())


def _overlaps(box: Any, others: Any) -> bool:
    """Return whether a rectangle overlaps one of several; a common edge is no overlap."""
    return bool(((box[0] < others[:, 1]) & (box[1] > others[:, 0])).all(1).any())
