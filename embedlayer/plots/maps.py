"""Scatter plot of all rows of a table."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor, nn

from embedlayer.analysis.geometry import principal_components
from embedlayer.analysis.layout import NeighborLayout
from embedlayer.analysis.nearest import nearest_rows
from embedlayer.analysis.row_reader import RowReader
from embedlayer.core.errors import ShapeError
from embedlayer.core.formatting import count_of, visible_text
from embedlayer.plots.heatmaps import with_hole
from embedlayer.plots.labels import write_labels
from embedlayer.plots.style import (
    BLUE,
    INK,
    Figure,
    caption,
    colorbar,
    left_out,
    new_figure,
    numbers,
    point_colours,
    usual_range,
)
from embedlayer.tables.conversions import as_rows
from embedlayer.tables.lookup import LookupTable
from embedlayer.tokenization.bytes import row_texts
from embedlayer.tokenization.ids import require_rows
from embedlayer.tokenization.tokenizer_calls import as_tokenizer

NAMED_ROWS = 2048  # largest number of whole words among which hubs are searched

_TITLES = ("The rows in a layout that keeps neighbours close", "The rows along their first two principal components")


@torch.no_grad()
def table_map(
    table: LookupTable | nn.Embedding | Float[Tensor, "N 2"],
    tokenizer: object = None,
    *,
    labels: Mapping[int, str] | None = None,
    layout: NeighborLayout | None = None,
    explained_variance_ratio: Float[Tensor, " C"] | None = None,
    values: Float[Tensor, " N"] | None = None,
    value_label: str = "",
    max_labels: int = 40,
    title: str | None = None,
) -> Figure:
    """Draw all rows of a table as points, and label some of them.

    Points are drawn in a random order, always the same one, so that no part of the IDs covers the others. Outliers (see
    `style.usual_range`) are drawn at the edge, as diamonds. The figure says how many there are, how many rows are
    left out because they are not finite, and how many of the passed labels are left out.

    Args:
        table: A table, drawn along its first two principal components, or two coordinates for each row, such as
            `principal_components(rows).coordinates`.
        tokenizer: Used for labels if `labels` is `None`: whole words, hubs first (nearest neighbours of most others).
        labels: Text by row index, in order of priority. A label is left out if it would overlap an earlier one, or if
            no installed font has its characters.
        layout: Coordinates to draw in place of the principal components of a table: `analysis.neighbor_layout(table)`,
            the explorer's map. Which rows are neighbours has a meaning, distances between groups have none.
        explained_variance_ratio: Share of the variance along each axis, for the axis labels; computed for a table.
        values: One number for each row, shown as colour, or `None`. Outliers have the colours at the ends of the bar.
        value_label: Label of the colour bar.
        max_labels: Largest number of labels.
        title: Title of the figure; `None` for one that names the coordinates.

    Raises:
        ShapeError: A label's index is outside the rows, `values` or `layout` does not have one entry for each row, or a
            layout is passed beside coordinates.
        TokenizerError: `tokenizer` is no tokenizer, or has IDs outside the table.

    Example:
        >>> figure = table_map(TokenEmbedding(100, 16), labels={7: "seven", 8: "eight"})
    """
    table = as_rows(table)
    passed_labels = len(labels or {})
    if isinstance(table, LookupTable):
        if labels is None and tokenizer is not None:
            labels = _words(table, as_tokenizer(tokenizer))
        if layout is None:
            found = principal_components(table, min(2, table.embed_dim), skip_nonfinite=True)
            explained_variance_ratio = found.explained_variance_ratio.cpu()
            coordinates = F.pad(found.coordinates, (0, 2 - found.coordinates.shape[1])).cpu()
        elif len(layout.places) != table.vocab_size:
            raise ShapeError(f"The layout has {len(layout.places)} places, and the table {table.vocab_size} rows.")
        else:
            coordinates = layout.places
    elif layout is not None:
        raise ShapeError("A layout has the coordinates of a table's rows: pass the table, not other coordinates.")
    else:
        coordinates = table
    count = len(coordinates)
    if values is not None and len(values) != count:
        raise ShapeError(f"values must be one for each of the {count} rows, not {len(values)}.")
    points = numbers(coordinates)
    has_place = np.isfinite(points).all(1)
    points[~has_place] = np.nan
    (left, right), (bottom, top) = usual_range(points[:, 0]), usual_range(points[:, 1])
    clipped = points.clip((left, bottom), (right, top))
    is_outside = has_place & (clipped != points).any(1)
    points = clipped
    order = np.random.default_rng(0).permutation(count)
    inside, outside_rows = order[(has_place & ~is_outside)[order]], order[is_outside[order]]
    if title is None:
        title = _TITLES[layout is None]
    with new_figure(7.2, _height_for(points), title=title) as (figure, axes):
        size, opacity = max(3.0, min(20.0, 24000 / max(count, 1))), max(0.25, min(0.8, 2500 / max(count, 1)))
        look: dict[str, Any] = {"alpha": opacity, "linewidths": 0, "rasterized": True}
        dots = axes.scatter(*points[inside].T, s=size, **look, **_colours(values, inside))
        if len(outside_rows):
            look = {"marker": "D", "linewidths": 0.8, "edgecolors": INK, "clip_on": False, "zorder": 2.2}
            axes.scatter(*points[outside_rows].T, s=24, **look, **_colours(values, outside_rows))
        axes.margins(0.06)
        axes.set_aspect("equal", adjustable="datalim")
        axes.locator_params(nbins=6)
        for axis, name, share in zip(
            (axes.xaxis, axes.yaxis),
            ("first component", "second component"),
            (None, None) if explained_variance_ratio is None else explained_variance_ratio.tolist(),
            strict=False,
        ):
            if layout is None:
                axis.set_label_text(name if share is None else f"{name} ({100 * share:.3g} % of the variance)")
        if values is not None:
            colorbar(figure, dots, axes, label=with_hole(value_label, values), shrink=0.6)
        edge = f"{count_of(len(outside_rows), 'row')} far outside drawn at the edge (diamonds)."
        notes = [left_out(int((~has_place).sum()), "row", "NaN or infinity"), edge if len(outside_rows) else ""]
        caption(figure, *notes, " " if passed_labels else "")  # space for a line that is known after the labels
        texts = {index: visible_text(text) for index, text in (labels or {}).items()}
        written = write_labels(figure, axes, points, texts, most=max_labels, mark=True)
        caption(figure, *notes, left_out(max(0, passed_labels - len(written)), "label", "no free place"))
    return figure


def _colours(values: Float[Tensor, " N"] | None, rows: Any) -> dict[str, Any]:
    """Return options of `axes.scatter` that colour some rows by their values: blue without values."""
    if values is None:
        return {"color": BLUE}
    every = numbers(values)
    low, high = usual_range(every)
    colours = point_colours()
    is_below, is_above = bool((every < low).any()), bool((every > high).any())
    if is_below or is_above:
        colours.colorbar_extend = "both" if is_below and is_above else "min" if is_below else "max"
    return {"c": every[rows], "cmap": colours, "vmin": low, "vmax": high, "plotnonfinite": True}


def _words(table: LookupTable, tokenizer: Tokenizer) -> dict[int, str]:
    """Return up to `NAMED_ROWS` whole words of a tokenizer as ID -> text, hubs first.

    If there are more words, they are taken at equal intervals of the IDs, so that rare words are among them. Words have
    3 letters or more, and begin with a space if any token does.
    """
    require_rows(tokenizer, table.vocab_size)
    texts = row_texts(tokenizer, table.vocab_size)
    begin = " " if any(len(text) > 3 and text.startswith(" ") for text in texts) else ""
    named = [(index, text.strip()) for index, text in enumerate(texts) if text.startswith(begin)]
    whole = [(index, text) for index, text in named if text.isalpha() and len(text) > 2]
    words = whole[:: math.ceil(len(whole) / NAMED_ROWS) or 1]
    rows = RowReader(table).take(torch.tensor([index for index, _ in words], dtype=torch.int64))
    # k-occurrence: how many of the other words have this one among their ten nearest rows
    near = nearest_rows(rows, torch.arange(len(words)), min(10, max(1, (len(words) - 1) // 2))).ids
    hubs = torch.bincount(near[near >= 0], minlength=len(words)).argsort(descending=True, stable=True)
    return dict(words[place] for place in hubs.tolist())


def _height_for(points: Any) -> float:
    """Return the height of a figure in inches, from 3.8 to 6.2, for points that have the same scale on both axes."""
    points = points[np.isfinite(points).all(1)]
    if not len(points):
        return 5.0
    across, along = points.max(0) - points.min(0)
    return float(min(6.2, max(3.8, 6.2 * along / across))) if across > 0 and math.isfinite(along / across) else 5.0
