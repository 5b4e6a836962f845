"""Similarity matrices: cosines of tokens, cosines of positions, and scores without positions."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.analysis.nearest import cosines_with
from embedlayer.analysis.vectors import Token, TokenVectors
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.formatting import visible_text
from embedlayer.plots.heatmaps import draw_matrix, limit_of, picture_of, with_hole
from embedlayer.plots.style import (
    BLUE,
    INK,
    MUTED,
    PAPER,
    Axes,
    Figure,
    caption,
    colorbar,
    left_out,
    new_figure,
    numbers,
)
from embedlayer.positions.position import AdditivePosition, Position
from embedlayer.tables.conversions import TableLike
from embedlayer.tokenization.bytes import token_text

MOST_ROWS = 2048  # largest number of rows in a matrix of all pairs; a figure has no pixels for more
MOST_NUMBERS = 12  # largest number of rows with a number in each cell
MOST_LABELS = 128  # largest number of rows with labels: the figure is as large as they need
LABEL_HEIGHT, SMALL_LABEL_HEIGHT = 0.165, 0.125  # inches that a label of 9.5 points and one of 7.5 points need
TITLE_LENGTH = 48  # characters of a panel's title that fit above it


def cosines(rows: Float[Tensor, "N D"]) -> Float[Tensor, "N N"]:
    """Compute `cos(row i, row j)` in float64; 0 if one of the rows is zero, NaN if one is not finite."""
    if len(rows) > MOST_ROWS:
        raise SizeError(f"{len(rows):,} rows have {len(rows) ** 2:,} pairs; choose at most {MOST_ROWS:,} rows.")
    wide = rows.detach().cpu().double()
    return cosines_with(wide, wide)


def similarity_matrix(
    rows: Float[Tensor, "N D"],
    labels: Sequence[str] = (),
    *,
    row_label: str = "row",
    title: str = "Cosine of each pair",
) -> Figure:
    """Draw the cosine of each pair of rows, from -1 (blue) over 0 (white) to 1 (red), for few rows also as numbers.

    Args:
        rows: At most 2,048 rows.
        labels: A text for each row, or nothing. The figure grows with their number; above 128 rows it says that they
            are left out.
        row_label: Axis label, used without `labels`.
        title: Title of the figure.

    Example:
        >>> figure = similarity_matrix(torch.eye(3), ["x", "y", "z"])
    """
    if labels and len(labels) != len(rows):
        raise ShapeError(f"Labels must be one for each of the {len(rows)} rows, not {len(labels)}.")
    values = cosines(rows)
    side = _side_of(labels, 4.6)
    with new_figure(2.6 + side, 1.0 + side, title=title) as (figure, axes):
        image = _square(axes, values, limit=1.0, labels=labels, side=side)
        is_labelled = 0 < len(labels) <= MOST_LABELS
        axes.set(xlabel="" if is_labelled else row_label, ylabel="" if is_labelled else row_label)
        colorbar(figure, image, axes, label=with_hole("cosine", values))
        caption(figure, _labels_left_out(labels))
    return figure


def token_similarity(
    table: TableLike, tokenizer: Tokenizer, tokens: Sequence[Token], *, title: str = "Cosines of tokens"
) -> Figure:
    """Draw the cosine of each pair of some tokens' rows as a heat map.

    Args:
        table: A table, or a tensor or array `(V, D)`; only the rows of `tokens` are read.
        tokenizer: Tokenizer of the table.
        tokens: Tokens by text, ID or bytes, as in `TokenVectors`.
        title: Title of the figure.

    Raises:
        UnknownTokenError: A text is not a single token of the vocabulary, or an ID is outside the table.
        TokenizerError: The tokenizer has IDs outside the table, or is of another kind.

    Example:
        >>> figure = token_similarity(model.table, tokenizer, ["a", "b"])
    """
    vectors = TokenVectors(table, tokenizer)
    ids = [vectors.id_of(token) for token in tokens]
    names = [token_text(tokenizer, index) for index in ids]
    return similarity_matrix(torch.stack([vectors[index] for index in ids]), names, title=title)


def position_similarity(
    positions: Position | Float[Tensor, "T D"], *, length: int = 64, title: str = "Cosines of positions"
) -> Figure:
    """Draw the cosine of each pair of positions, and the mean cosine at each distance.

    The figure states the mean cosine of neighbours: 0.966 for sinusoids of width 64, 0.884 for width 8.

    Args:
        positions: A scheme that adds vectors, or one row for each position.
        length: Number of positions of a scheme to show, at most 2,048.
        title: Title of the figure.

    Example:
        >>> figure = position_similarity(SinusoidalPositionalEmbedding(64, 8))
    """
    if isinstance(positions, Position) and not isinstance(positions, AdditivePosition):
        raise SizeError(f"{type(positions).__name__} adds no vectors: see rotary_scores and attention_bias.")
    values = cosines(picture_of(positions, length).values)
    means = torch.tensor([float(values.diagonal(distance).nanmean()) for distance in range(len(values))])
    ratios = {"width_ratios": [1.15, 1]}
    with new_figure(7.2, 3.9, title=title, panels=(1, 2), gridspec_kw=ratios) as (figure, (left, right)):
        figure.set_layout_engine("constrained", wspace=0.06)
        image = _square(left, values, limit=1.0)
        left.set(xlabel="position", ylabel="position")
        left.locator_params(integer=True)
        colorbar(figure, image, left, label=with_hole("cosine", values), shrink=0.9)
        right.plot(range(len(means)), numbers(means), color=BLUE)
        right.axhline(0, color=MUTED, linewidth=0.8)
        right.set(xlabel="distance (positions)", ylabel="mean cosine at this distance")
        right.set_ylim(min([0.0, *means.nan_to_num().tolist()]) - 0.05, 1.1)
        right.locator_params(axis="x", integer=True)
        if len(means) > 1 and means[1].isfinite():
            right.plot([1], [float(means[1])], "o", color=BLUE, markersize=5)
            right.set_title(f"neighbours: {means[1]:.3f}", fontweight="normal", fontsize=9.5, pad=4)
    return figure


def attention_orders(
    vectors: Float[Tensor, "T D"],
    order: Sequence[int],
    labels: Sequence[str],
    *,
    title: str = "Scores without positions move with their tokens",
) -> Figure:
    """Draw the scores `x_i · x_j` of the same vectors in two orders: the same numbers at permuted places.

    Args:
        vectors: One vector for each token, such as rows of a table.
        order: Indices of the tokens in the other order.
        labels: Text of each token.
        title: Title of the figure.

    Example:
        >>> figure = attention_orders(torch.randn(3, 8), [2, 0, 1], ["the", "cat", "sat"])
    """
    if sorted(order) != list(range(len(vectors))) or len(order) > MOST_ROWS:
        raise SizeError(f"order must be a permutation of 0..{len(vectors) - 1} (at most {MOST_ROWS:,}), not {order}.")
    if len(labels) != len(vectors):
        raise ShapeError(f"Labels must be one for each of the {len(vectors)} tokens, not {len(labels)}.")
    x = vectors.detach().cpu().double()
    scores = [x @ x.T, x[list(order)] @ x[list(order)].T]
    limit = limit_of(scores[0])
    side = _side_of(labels, 2.2)
    with new_figure(2.8 + 2 * side, 1.5 + side, title=title, panels=(1, 2)) as (figure, pair):
        for axes, values, places in zip(pair, scores, (range(len(x)), order), strict=True):
            names = [labels[place] for place in places]
            image = _square(axes, values, limit=limit, labels=names, side=side)
            text = " ".join(visible_text(name.strip()) for name in names)
            text = text if len(text) <= TITLE_LENGTH else text[: TITLE_LENGTH - 4] + " ..."
            axes.set_title(text, fontweight="normal", fontsize=10)
            axes.set(xlabel="key", ylabel="query")
        colorbar(figure, image, list(pair), label=with_hole("score (q · k)", *scores), shrink=0.9)
        caption(figure, _labels_left_out(labels))
    return figure


def _side_of(labels: Sequence[str], least: float) -> float:
    """Return the side of a matrix in inches that its labels need, at least `least`, and this for too many labels."""
    return max(least, SMALL_LABEL_HEIGHT * len(labels)) if len(labels) <= MOST_LABELS else least


def _labels_left_out(labels: Sequence[str]) -> str:
    """Say that there are too many labels; `""` if they are drawn."""
    is_many = len(labels) > MOST_LABELS
    return left_out(len(labels), "label", f"they are readable up to {MOST_LABELS} rows") if is_many else ""


def _square(
    axes: Axes, values: Float[Tensor, "N N"], *, limit: float, labels: Sequence[str] = (), side: float = 0.0
) -> object:
    """Draw a square matrix as a heat map, and return its image; with a side, labels and numbers where they fit."""
    image = draw_matrix(axes, values, limit=limit)
    axes.set_aspect("equal")
    axes.tick_params(length=0)
    axes.locator_params(integer=True)
    if 0 < len(labels) <= MOST_LABELS:
        names, size = [visible_text(label) for label in labels], 9.5 if LABEL_HEIGHT * len(labels) <= side else 7.5
        upright = max(map(len, names)) * len(names) > 13 * side
        axes.set_xticks(range(len(names)), names, rotation=90 if upright else 0, fontsize=size)
        axes.set_yticks(range(len(names)), names, fontsize=size)
    if side and len(values) <= MOST_NUMBERS:
        for i, row in enumerate(values.tolist()):
            for j, value in enumerate(row):
                colour = PAPER if abs(value) > 0.65 * limit else INK
                text = f"{value:.3g}" if limit > 10 else f"{value:.2f}"
                axes.text(j, i, text.replace("-", "−"), ha="center", va="center", fontsize=7.5, color=colour)
    return image
