"""Vectors as colours: what a position scheme does, schemes side by side, and a text's way through the layer."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.analysis.geometry import PositionPicture, position_values
from embedlayer.checkpoints.layer import EmbeddingLayer
from embedlayer.errors import ShapeError, SizeError, require
from embedlayer.layers.input import GPTEmbedding, TransformerEmbedding, embed
from embedlayer.models.decoder import DecoderLM
from embedlayer.plots.style import HOLE, MUTED, PAPER, colorbar, entitle, new_figure, numbers, panels
from embedlayer.plots.visible import visible_text
from embedlayer.positions.position import AdditivePosition, Position, positions_of
from embedlayer.shapes import Ids
from embedlayer.tables.lookup import LookupTable

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

Layer = TransformerEmbedding | GPTEmbedding | DecoderLM | EmbeddingLayer
MOST_TOKENS = 64


def position_heatmap(
    positions: Position | Float[Tensor, "T C"],
    *,
    length: int = 64,
    title: str | None = None,
    value_label: str | None = None,
    row_label: str | None = None,
    column_label: str | None = None,
) -> "matplotlib.figure.Figure":
    """A matrix as colours: white is 0, red above, blue below, equally far both ways; grey is not a number.

    Where less than 1 % of the numbers are outliers, the colours end before them, and arrows on their scale say so.

    Args:
        positions: A scheme, shown by what it does (`analysis.geometry.position_values`: vectors added, cosines of
            angles, biases), or one row per position and one column per dimension, pair or head.
        length: Positions of a scheme to show, T.
        title: The figure's title.
        value_label: What a number is, beside the colours.
        row_label: What a row is.
        column_label: What a column is.

    Raises:
        SizeError: The scheme does nothing (NoPE).

    Example:
        >>> figure = position_heatmap(SinusoidalPositionalEmbedding(128, 64), length=50)
    """
    picture = picture_of(positions, length)
    with new_figure(7.2, 4.4) as figure:
        axes = panels(figure)[0, 0]
        image = draw_matrix(axes, picture.values)
        axes.set(xlabel=column_label or picture.column_label, ylabel=row_label or picture.row_label)
        axes.set_title(picture.title if title is None else title)
        axes.locator_params(integer=True)
        colorbar(figure, image, axes, label=with_hole(value_label or picture.value_label, picture.values))
    return figure


def compare_positions(
    schemes: Mapping[str, Position | Float[Tensor, "_ _"]],
    *,
    length: int = 64,
    title: str = "Schemes side by side",
) -> "matplotlib.figure.Figure":
    """What several schemes do, one heat map each, each with its own range of colours.

    Args:
        schemes: Up to four by name, each as in `position_heatmap`.
        length: Positions to show.
        title: The figure's title.

    Raises:
        SizeError: No scheme or more than four, or one that does nothing.

    Example:
        >>> learned, fixed = LearnedPositionalEmbedding(50, 32), SinusoidalPositionalEmbedding(50, 32)
        >>> figure = compare_positions({"learned": learned, "sinusoidal": fixed})
    """
    if not 1 <= len(schemes) <= 4:
        raise SizeError(f"A picture has room for 1 to 4 schemes; found {len(schemes)}.")
    with new_figure(7.2, 4.0) as figure:
        entitle(figure, title)
        for axes, (name, scheme) in zip(panels(figure, 1, len(schemes))[0], schemes.items(), strict=True):
            picture = picture_of(scheme, length)
            image = draw_matrix(axes, picture.values)
            axes.set_title(name, fontweight="normal", fontsize=10)
            axes.set(xlabel=picture.column_label, ylabel=picture.row_label)
            axes.locator_params(integer=True, nbins=6)
            colorbar(figure, image, axes, label=with_hole(picture.value_label, picture.values))
    return figure


def token_path(
    steps: Mapping[str, Float[Tensor, "T _"]],
    tokens: Sequence[str],
    *,
    dimensions: int = 24,
    title: str = "From the table to the first block",
) -> "matplotlib.figure.Figure":
    """Each token's vector after each step of the layer. Under a step stands the number that its strongest colour is.

    Args:
        steps: Name of a step to the vectors after it: `path_steps(layer, ids)`.
        tokens: Text of each token, T.
        dimensions: Columns to show, the first ones.
        title: The figure's title.

    Raises:
        ShapeError: Steps and tokens differ in length.
        SizeError: No step, no token, or more than 64 tokens.

    Example:
        >>> layer = TransformerEmbedding(100, 32, max_seq_len=16)
        >>> figure = token_path(path_steps(layer, torch.tensor([5, 2, 7])), ["I", " love", " dogs"])
    """
    if not steps or not 1 <= len(tokens) <= MOST_TOKENS:
        raise SizeError(
            f"The path needs a step and 1 to {MOST_TOKENS} tokens; found {len(steps)} and {len(tokens)}. "
            f"Show a part of a longer text."
        )
    for name, vectors in steps.items():
        if len(vectors) != len(tokens):
            raise ShapeError(f"Step {name!r} has {len(vectors)} vectors for {len(tokens)} tokens.")
    shown = {name: vectors[:, :dimensions] for name, vectors in steps.items()}
    width = next(iter(steps.values())).shape[1]
    with new_figure(7.2, 1.7 + 0.22 * max(len(tokens), 3)) as figure:
        entitle(figure, title)
        strips = panels(figure, 1, len(shown), sharey=True)[0]
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
    """The vectors of one text after each step of a layer: row, scale, positions and what they are added to, norm.

    Steps that a layer does not have are left out. The last one is what enters the first block, without dropout.

    Args:
        layer: A `TransformerEmbedding`, `GPTEmbedding` or `DecoderLM`, or what `embedlayer.load` gives.
        ids: Token IDs of one text, `(T,)`.

    Raises:
        TokenIdError, PositionError: As the layer itself.

    Example:
        >>> list(path_steps(TransformerEmbedding(100, 16, max_seq_len=8), torch.tensor([3, 1])))
        ['row', '× 4', 'position', 'row × 4 + position']
    """
    if ids.dim() != 1:
        raise ShapeError(f"The path of one text needs ids of shape (T,), not {tuple(ids.shape)}.")
    if isinstance(layer, EmbeddingLayer):
        return _checkpoint_steps(layer, ids)
    table, position = (
        (layer.tok_emb, layer.pos_emb) if isinstance(layer, GPTEmbedding) else (layer.table, layer.position)
    )
    steps = _row_steps(table, ids)
    if isinstance(position, AdditivePosition):
        steps["position"] = position.vectors(positions_of(ids))
        name = "row" if table.factor is None else f"row {_times(table)}"
        steps[f"{name} + position"] = embed(ids, table, position)
    return steps


def _row_steps(table: LookupTable, ids: Ids) -> dict[str, Float[Tensor, "T _"]]:
    steps = {"row": table.look_up(ids)}
    if table.factor is not None:
        steps[_times(table)] = table(ids)
    return steps


def _times(table: LookupTable) -> str:
    assert table.factor is not None
    return f"× {float(table.factor):.4g}"


STEP_NAMES = {"types": "+ type", "project": "projected", "position": "+ position", "norm": "LayerNorm"}


def _checkpoint_steps(layer: EmbeddingLayer, ids: Ids) -> dict[str, Float[Tensor, "T _"]]:
    """What the layer gives if its recipe stops after each of its steps."""
    steps: dict[str, Tensor] = _row_steps(layer.table, ids)
    part = copy.copy(layer)
    for end, step in enumerate(layer.recipe, start=1):
        part.recipe = layer.recipe[:end]
        if step == "position" and not isinstance(layer.position, AdditivePosition):
            continue
        steps[STEP_NAMES[step]] = part.input(ids)
    return steps


def picture_of(positions: Position | Float[Tensor, "T C"], length: int) -> PositionPicture:
    """What to draw of a scheme, or of numbers as they are.

    Raises:
        SizeError: The scheme does nothing.
    """
    if isinstance(positions, Tensor):
        return PositionPicture(positions, "Positions", "position", "dimension", "value")
    picture = position_values(positions, length)
    if picture is None:
        raise SizeError(
            f"{type(positions).__name__} leaves everything as it is: there is nothing to draw. "
            f"Choose a scheme that adds, rotates or gives a bias."
        )
    return picture


def limit_of(values: Float[Tensor, "..."]) -> float:
    """How far the colours reach: the largest finite size, or 1 where there is none.

    A few outliers would leave the rest pale: if the largest is over twice what 99 % of the sizes stay under, it is that
    99th percentile, and larger numbers have its colour.
    """
    sizes = values.detach()[values.isfinite()].abs().double().cpu()
    if not sizes.numel():
        return 1.0
    largest, most = float(sizes.max()), float(sizes.kthvalue(math.ceil(0.99 * sizes.numel())).values)
    return (most if 0 < 2 * most < largest else largest) or 1.0


def draw_matrix(axes: "matplotlib.axes.Axes", values: Float[Tensor, "N C"], *, limit: float | None = None) -> Any:
    """A matrix as colours, white at 0, one cell a number; its colour bar has arrows if there are numbers beyond it."""
    limit = limit_of(values) if limit is None else limit
    colours = require("matplotlib", extra="plots").colormaps["RdBu_r"].with_extremes(bad=HOLE)
    matrix = numbers(values)
    matrix[~np.isfinite(matrix)] = math.nan
    image = axes.imshow(
        matrix, cmap=colours, vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest", rasterized=True
    )
    if np.nanmax(np.abs(matrix), initial=0.0) > 1.0001 * limit:  # by more than rounding
        image.cmap.colorbar_extend = "both"  # type: ignore[assignment]  # declared as bool
    axes.set_facecolor(PAPER)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image


def with_hole(label: str, *values: Float[Tensor, "..."]) -> str:
    """The label, and what grey means where there is some."""
    whole = all(bool(matrix.isfinite().all()) for matrix in values)
    return label if whole else f"{label} (grey: not finite)"
