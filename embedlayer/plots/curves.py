"""Curves of single dimensions over positions."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from torch import Tensor

from embedlayer.core.errors import SizeError
from embedlayer.plots.heatmaps import picture_of
from embedlayer.plots.style import LINES, MUTED, Figure, new_figure, numbers, with_missing
from embedlayer.plots.training import DASHES
from embedlayer.positions.position import Position


def dimension_curves(
    positions: Position | Float[Tensor, "T C"],
    dimensions: Sequence[Sequence[int]] = ((0, 1), (10, 11), (30, 31)),
    *,
    length: int = 50,
    title: str = "Single dimensions over positions",
) -> Figure:
    """Draw columns of a scheme as curves over positions, one panel for each group of columns.

    Args:
        positions: As in `position_heatmap`. The legend says how many numbers of a column are not finite.
        dimensions: Columns of each panel, up to four; by default three sin/cos pairs of a width of at least 32.
        length: Number of positions of a scheme to show.
        title: Title of the figure.

    Example:
        >>> figure = dimension_curves(SinusoidalPositionalEmbedding(64, 64))
    """
    picture = picture_of(positions, length)
    values = numbers(picture.values)
    width = values.shape[1]
    if not dimensions or not all(1 <= len(group) <= len(LINES) for group in dimensions):
        raise SizeError(
            f"Each panel shows 1 to {len(LINES)} dimensions, and there must be a panel; found {dimensions}."
        )
    outside = [column for group in dimensions for column in group if not 0 <= column < width]
    if outside:
        raise SizeError(f"{picture.column_label} {outside[0]} is outside the {width} columns (0..{width - 1}).")
    height, shape = 0.9 + 1.15 * len(dimensions), (len(dimensions), 1)
    with new_figure(7.2, height, panels=shape, sharex=True, sharey=True) as (figure, strips):
        strips[0].set_title(title)
        for axes, group in zip(strips, dimensions, strict=True):
            axes.axhline(0, color=MUTED, linewidth=0.8)
            for column, colour, dashes in zip(group, LINES, DASHES, strict=False):
                missing = int((~np.isfinite(values[:, column])).sum())
                label = with_missing(f"{picture.column_label} {column}", missing)
                axes.plot(values[:, column], color=colour, linestyle=dashes, marker="o", markersize=2.4, label=label)
            axes.grid(visible=False, axis="x")
            axes.margins(x=0.01, y=0.12)
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.8)
        strips[-1].set_xlabel(picture.row_label)
        strips[-1].locator_params(axis="x", integer=True)
        figure.supylabel(picture.value_label, fontsize=9.5, color=MUTED)
    return figure
