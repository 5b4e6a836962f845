"""Heat maps and curves of position schemes, and the steps of a text through the input embedding."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.analysis.position_pictures import PositionPicture, position_values
from embedlayer.checkpoints.layer import EmbeddingLayer
from embedlayer.core.errors import ShapeError, SizeError, require
from embedlayer.core.formatting import visible_text
from embedlayer.core.shapes import Ids
from embedlayer.inputs.embedding import TransformerEmbedding
from embedlayer.lessons.book import GPTEmbedding
from embedlayer.models.decoder import DecoderLM
from embedlayer.plots.style import (
    DASHES,
    HOLE,
    LINES,
    MUTED,
    PAPER,
    Axes,
    Figure,
    colorbar,
    new_figure,
    numbers,
    with_missing,
)
from embedlayer.positions.position import Position

Layer = TransformerEmbedding | GPTEmbedding | DecoderLM | EmbeddingLayer
MOST_TOKENS = 64

MOST_CELLS = 400  # largest number of rows or columns with at least a pixel for each cell


def position_heatmap(
    positions: Position | Float[Tensor, "T C"],
    *,
    length: int = 64,
    title: str | None = None,
    value_label: str | None = None,
    row_label: str | None = None,
    column_label: str | None = None,
) -> Figure:
    """Draw a matrix as colours: white is 0, red positive, blue negative, grey not finite.

    The colour range is symmetric. A few outliers (at most 1 % of the numbers) may lie outside the range; the colour bar
    then has arrows.

    Args:
        positions: A scheme, drawn by its effect (`analysis.position_values`: added vectors, cosines of angles, or
            biases), or a matrix with one row per position and one column per dimension, pair or head.
        length: Number of positions of a scheme to show, T.
        title: Title of the figure; `None` for one that names the effect of the scheme, and likewise for the labels.
        value_label: Label of the colour bar.
        row_label: Label of the rows.
        column_label: Label of the columns.

    Example:
        >>> figure = position_heatmap(SinusoidalPositionalEmbedding(128, 64), length=50)
    """
    picture = picture_of(positions, length)
    with new_figure(7.2, 4.4, title=picture.title if title is None else title) as (figure, axes):
        image = draw_matrix(axes, picture.values)
        axes.set(xlabel=column_label or picture.column_label, ylabel=row_label or picture.row_label)
        axes.locator_params(integer=True)
        colorbar(figure, image, axes, label=with_hole(value_label or picture.value_label, picture.values))
    return figure


def compare_positions(
    schemes: Mapping[str, Position | Float[Tensor, "_ _"]], *, length: int = 64, title: str = "Schemes side by side"
) -> Figure:
    """Draw one heat map for each of several schemes, each with its own range of colours.

    Args:
        schemes: Schemes by name, up to about four, each as in `position_heatmap`.
        length: Number of positions to show.
        title: Title of the figure.

    Example:
        >>> learned, fixed = LearnedPositionalEmbedding(50, 32), SinusoidalPositionalEmbedding(50, 32)
        >>> figure = compare_positions({"learned": learned, "sinusoidal": fixed})
    """
    with new_figure(7.2, 4.0, title=title, panels=(1, len(schemes))) as (figure, grid):
        for axes, (name, scheme) in zip(grid, schemes.items(), strict=True):
            picture = picture_of(scheme, length)
            image = draw_matrix(axes, picture.values)
            axes.set_title(name, fontweight="normal", fontsize=10)
            axes.set(xlabel=picture.column_label, ylabel=picture.row_label)
            axes.locator_params(integer=True, nbins=6)
            colorbar(figure, image, axes, label=with_hole(picture.value_label, picture.values))
    return figure


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
    if any(len(group) > len(LINES) for group in dimensions):
        raise SizeError(f"A panel shows at most {len(LINES)} dimensions; found {dimensions}.")
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


def token_path(
    steps: Mapping[str, Float[Tensor, "T _"]],
    tokens: Sequence[str],
    *,
    dimensions: int = 24,
    title: str = "From the table to the first block",
) -> Figure:
    """Draw the vector of each token after each step of the input embedding, one heat map for each step.

    Each heat map has its own colour range, whose end is written below it.

    Args:
        steps: Vectors after each step, by name: `path_steps(layer, ids)`.
        tokens: Text of each token, T.
        dimensions: Number of columns to show, from the first.
        title: Title of the figure.

    Example:
        >>> layer = TransformerEmbedding(100, 32, max_seq_len=16)
        >>> figure = token_path(path_steps(layer, torch.tensor([5, 2, 7])), ["I", " love", " dogs"])
    """
    for name, vectors in steps.items():
        if len(vectors) != len(tokens):
            raise ShapeError(f"Step {name!r} has {len(vectors)} vectors for {len(tokens)} tokens.")
    shown = {name: vectors[:, :dimensions] for name, vectors in steps.items()}
    width = next(iter(steps.values())).shape[1]
    height = 1.7 + 0.22 * max(len(tokens), 3)
    with new_figure(7.2, height, title=title, panels=(1, len(shown)), sharey=True) as (figure, strips):
        for axes, (name, vectors) in zip(strips, shown.items(), strict=True):
            limit = limit_of(vectors)
            image = draw_matrix(axes, vectors / limit, limit=1.0)
            axes.set_title(name, fontweight="normal", fontsize=9.5, loc="center", pad=5)
            axes.set_xlabel(f"± {limit:.2g}", fontsize=9)
            axes.locator_params(axis="x", integer=True, nbins=4)
            axes.tick_params(length=0)
        strips[0].set_yticks(range(len(tokens)), [visible_text(token) for token in tokens])
        first = "" if width <= dimensions else f" (the first {dimensions} of {width})"
        figure.supxlabel(f"dimension{first}", fontsize=9.5, color=MUTED)
        bar = colorbar(figure, image, list(strips), label=with_hole("of the step's range", *shown.values()))
        bar.set_yticks([-1, 0, 1], ["−", "0", "+"])
    return figure


@torch.no_grad()
def path_steps(layer: Layer, ids: Ids) -> dict[str, Float[Tensor, "T _"]]:
    """Return the vectors of one text after each step of a layer, under a short name of the step.

    The steps are those of `layer.trace(ids)` without dropout and without steps that add nothing. Position vectors that
    are added to the rows themselves have a step of their own. The last step is the input of the first block.

    Args:
        layer: A `TransformerEmbedding`, `GPTEmbedding`, `DecoderLM` or `EmbeddingLayer`.
        ids: Token IDs of one text, `(T,)`.

    Raises:
        TokenIdError: An ID is outside the table.
        PositionError: The text is longer than the positions cover.

    Example:
        >>> list(path_steps(TransformerEmbedding(100, 16, max_seq_len=8), torch.tensor([3, 1])))
        ['row', '× 4', 'position', 'row × 4 + position']
    """
    if ids.dim() != 1:
        raise ShapeError(f"The path of one text needs ids of shape (T,), not {tuple(ids.shape)}.")
    steps: dict[str, Tensor] = {}
    previous = ""
    for step in layer.trace(ids):
        if step.name == "look_up":
            steps["row"] = step.vectors
        elif step.name == "scale":
            factor = layer.tok_emb.factor if isinstance(layer, GPTEmbedding) else layer.table.factor
            steps[f"× {float(factor or 1.0):.4g}"] = step.vectors
        elif step.name == "position" and step.added is not None and previous in ("look_up", "scale"):
            name = " ".join([*steps, "+ position"])
            steps |= {"position": step.added, name: step.vectors}
        elif step.name != "dropout" and (step.added is not None or step.name in ("norm", "project")):
            steps[STEP_LABELS[step.name]] = step.vectors
        previous = step.name
    return steps


STEP_LABELS = {
    "types": "+ type",
    "position": "+ position",
    "injections": "+ injections",
    "project": "projected",
    "norm": "LayerNorm",
}


def picture_of(positions: Position | Float[Tensor, "T C"], length: int) -> PositionPicture:
    """Return the matrix to draw for a scheme, with its labels; a tensor is returned as it is, with general labels."""
    if isinstance(positions, Tensor):
        return PositionPicture(positions, "Positions", "position", "dimension", "value")
    picture = position_values(positions, length)
    if picture is None:
        raise SizeError(f"{type(positions).__name__} neither adds vectors, rotates nor has a bias: nothing to draw.")
    return picture


def limit_of(values: Float[Tensor, "..."]) -> float:
    """Return the end of a colour range for the values: the largest finite absolute value, or 1.

    A few outliers would make all other numbers pale: if the largest value is more than twice the 99th percentile, the
    range ends at that percentile, unless it is 0.
    """
    sizes = values.detach()[values.isfinite()].abs().double().cpu()
    if not sizes.numel():
        return 1.0
    largest, most = float(sizes.max()), float(sizes.kthvalue(math.ceil(0.99 * sizes.numel())).values)
    return (most if 0 < 2 * most < largest else largest) or 1.0


def draw_matrix(axes: Axes, values: Float[Tensor, "N C"], *, limit: float | None = None) -> Any:
    """Draw a matrix as a heat map, one cell for each number, and return matplotlib's image.

    Pixels of a matrix with more than `MOST_CELLS` rows or columns show the mean of the cells that they cover. Cells
    that are not finite are grey. If a value is outside the range, a colour bar of the image has arrows.
    """
    limit = limit_of(values) if limit is None else limit
    colours = require("matplotlib", extra="plots").colormaps["RdBu_r"].with_extremes(bad=HOLE)
    matrix = numbers(values)
    matrix[~np.isfinite(matrix)] = math.nan
    smoothing = "nearest" if max(matrix.shape) <= MOST_CELLS else "antialiased"  # no cell between two pixels is lost
    image = axes.imshow(
        matrix,
        cmap=colours,
        vmin=-limit,
        vmax=limit,
        aspect="auto",
        interpolation=smoothing,
        interpolation_stage="data",
        rasterized=True,
    )
    if np.nanmax(np.abs(matrix), initial=0.0) > 1.0001 * limit:  # by more than rounding
        image.cmap.colorbar_extend = "both"  # type: ignore[assignment]  # declared as bool
    axes.set_facecolor(PAPER)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    return image


def with_hole(label: str, *values: Float[Tensor, "..."]) -> str:
    """Return the label of a colour bar, with the note "(grey: not finite)" if one of the values is not finite."""
    whole = all(bool(matrix.isfinite().all()) for matrix in values)
    return label if whole else f"{label} (grey: not finite)"
