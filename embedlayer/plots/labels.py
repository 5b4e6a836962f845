"""Labels of points without overlap: a label is written on a free side of its point, or left out."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.analysis.nearest import nearest_rows
from embedlayer.core.errors import require
from embedlayer.plots.style import BACKING, INK, Axes, Figure, font_families

FONT_SIZE = 8.5


class Box(NamedTuple):
    """A rectangle in a figure, in any unit; its sides are parallel to the axes."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: "Box") -> bool:
        """Return whether this rectangle and `other` overlap; a common edge is no overlap."""
        beside = self.right <= other.left or other.right <= self.left
        return not (beside or self.top <= other.bottom or other.top <= self.bottom)

    def contains(self, other: "Box") -> bool:
        """Return whether `other` is completely inside this rectangle."""
        across = self.left <= other.left and other.right <= self.right
        return across and self.bottom <= other.bottom and other.top <= self.top


class Side(NamedTuple):
    """The side of a point on which its label is written."""

    across: int
    along: int

    def box(self, point: tuple[float, float], size: tuple[float, float], gap: float) -> Box:
        """Return the rectangle that a label covers on this side of a point."""
        left = point[0] + self.across * gap + (self.across - 1) / 2 * size[0]
        bottom = point[1] + self.along * gap + (self.along - 1) / 2 * size[1]
        return Box(left, bottom, left + size[0], bottom + size[1])


SIDES = tuple(Side(*side) for side in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1)))
"""Sides of a point, in order of preference."""


def place_labels(
    wanted: Iterable[tuple[tuple[float, float], tuple[float, float]]],
    area: Box,
    *,
    gap: float = 4.0,
    sides: tuple[Side, ...] = SIDES,
) -> Iterator[tuple[int, Side]]:
    """Choose for each label the first side of its point where it overlaps no other label and no labelled point."""
    named: list[Box] = []
    dots: list[Box] = []
    for number, (point, size) in enumerate(wanted):
        dot = Side(0, 0).box(point, (gap, gap), 0.0)
        if not area.contains(dot) or any(box.overlaps(dot) for box in named):
            continue
        for side in sides:
            box = side.box(point, size, gap)
            if area.contains(box) and not any(box.overlaps(other) for other in named + dots):
                named.append(box)
                dots.append(dot)
                yield number, side
                break


def write_labels(
    figure: Figure,
    axes: Axes,
    points: Any,
    labels: Mapping[int, str],
    *,
    most: int,
    mark: bool = False,
    sides: tuple[Side, ...] = SIDES,
    **style: Any,
) -> list[int]:
    """Write labels beside their points where they fit, and return the indices of the labelled points."""
    backend = require("matplotlib.backends.backend_agg", extra="plots")
    fonts = require("matplotlib.font_manager", extra="plots")
    renderer = backend.FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    font = fonts.FontProperties(family=font_families(), size=FONT_SIZE)
    known = {code for family in font_families() for code in fonts.get_font(fonts.findfont(family)).get_charmap()}
    wanted = [index for index, text in labels.items() if text and known.issuperset(map(ord, text))]
    pixels = axes.transData.transform(points).tolist()

    def sizes() -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
        """Yield the coordinates of the point and the `(width, height)` of each label, in pixels."""
        for index in wanted:
            width, height, _ = renderer.get_text_width_height_descent(labels[index], font, False)
            yield (pixels[index][0], pixels[index][1]), (width + 4, height + 4)

    gap = 4 * figure.dpi / 72
    window = axes.get_window_extent(renderer)
    written: list[int] = []
    for number, side in place_labels(sizes(), Box(*map(float, window.extents)), gap=gap - 2, sides=sides):
        if len(written) == most:
            break
        axes.annotate(
            labels[wanted[number]],
            points[wanted[number]],
            xytext=(4 * side.across, 4 * side.along),
            textcoords="offset points",
            ha=("right", "center", "left")[side.across + 1],
            va=("top", "center", "bottom")[side.along + 1],
            fontsize=FONT_SIZE,
            bbox=BACKING,
            zorder=3,
            in_layout=False,
            **style,
        )
        written.append(wanted[number])
    if mark and written:
        axes.scatter(points[written, 0], points[written, 1], s=7, color=INK, linewidths=0, zorder=2.5)
    return written


def hubs(rows: Float[Tensor, "N D"], neighbors: int = 10) -> Int[Tensor, " N"]:
    """Return the indices of all rows in descending order of k-occurrence, hubs first."""
    count = len(rows)
    if count < 2:
        return torch.arange(count)
    near = nearest_rows(rows.detach(), torch.arange(count), min(neighbors, max(1, (count - 1) // 2))).ids
    return torch.bincount(near[near >= 0], minlength=count).argsort(descending=True, stable=True)
