"""Position schemes inside attention: biases of the heads, rotated scores, and rotation angles."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.analysis.position_pictures import position_values
from embedlayer.core.errors import SizeError
from embedlayer.plots.labels import SIDES, write_labels
from embedlayer.plots.style import (
    BLUE,
    GRID,
    MUTED,
    ORANGE,
    Figure,
    caption,
    colorbar,
    left_out,
    new_figure,
    numbers,
    point_colours,
)
from embedlayer.positions.position import Position
from embedlayer.positions.rotary.embedding import RotaryEmbedding


@torch.no_grad()
def attention_bias(
    position: Position, *, length: int = 64, title: str = "Bias on attention scores, head by head"
) -> Figure:
    """Draw the bias on attention scores over the distance to the key, for each head (ALiBi, T5).

    Left, the bias b of each head; right, `e^b`, the factor on an attention weight before normalisation.

    Args:
        position: A scheme that overrides `bias`.
        length: Number of distances to show, from 0.
        title: Title of the figure.

    Example:
        >>> figure = attention_bias(AlibiBias(8))
    """
    if position.hook != "bias":
        raise SizeError(f"{type(position).__name__} has no bias: choose AlibiBias or RelativePositionBias.")
    picture = position_values(position, length)
    assert picture is not None  # it has a bias
    biases = picture.values.double()
    heads = biases.shape[1]
    colours = point_colours()([head / max(1, heads - 1) for head in range(heads)])
    drawn = {"added to the score": biases, "factor on the weight": biases.exp()}
    with new_figure(7.2, 3.9, title=title, panels=(1, 2)) as (figure, pair):
        for axes, (label, values) in zip(pair, drawn.items(), strict=True):
            for head in range(heads):
                axes.plot(numbers(values[:, head]), color=colours[head], linewidth=1.5)
            axes.set(xlabel="distance back to the key (positions)", ylabel=label)
            axes.margins(x=0.02, y=0.05)
            axes.locator_params(axis="x", integer=True, nbins=6)
            if len(values) > 1:
                axes.set_xlim(right=1.3 * (len(values) - 1))
        labels = {head: f"head {head}" for head in range(heads)}
        labelled: set[int] = set()
        for axes, values in zip(pair, drawn.values(), strict=True):
            ends = np.array([[len(values) - 1.0, end] for end in values[-1].tolist()])
            labelled.update(write_labels(figure, axes, ends, labels, most=16, sides=SIDES[:1], color=MUTED))
        caption(figure, left_out(heads - len(labelled), "label", "no free place beside the curve"))
    return figure


@torch.no_grad()
def rotary_scores(
    position: Position,
    *,
    length: int = 128,
    q: Float[Tensor, " K"] | None = None,
    k: Float[Tensor, " K"] | None = None,
    starts: Sequence[int] = (0, 1000),
    title: str = "Rotated scores depend on the distance only",
) -> Figure:
    """Draw the score of one query and one key over their distance, for several positions of the key.

    The curves coincide, because rotated scores depend only on the distance.

    Args:
        position: A scheme that rotates.
        length: Number of distances to show, from 0.
        q: The query before rotation, `(K,)`; all channels `1 / sqrt(K)` if `None`.
        k: The key before rotation, `(K,)`; equal to the query if `None`.
        starts: Positions of the key; the query is at the key's position plus the distance.
        title: Title of the figure.

    Example:
        >>> figure = rotary_scores(RotaryEmbedding(64))
    """
    width = int(getattr(position, "head_dim", 0))
    if position.hook != "rotate" or not width:
        raise SizeError(f"{type(position).__name__} does not rotate: choose RotaryEmbedding.")
    device = position.device
    q = torch.full((width,), width**-0.5, device=device) if q is None else q
    k = q if k is None else k
    queries, keys = (vector.expand(1, 1, length, -1) for vector in (q, k))
    with new_figure(7.2, 3.9, title=title) as (figure, axes):
        axes.axhline(0, color=MUTED, linewidth=0.8)
        looks = [(BLUE, 5.0, 0.35, "-"), (ORANGE, 1.4, 1.0, (0, (4, 2)))]
        for number, start in enumerate(starts):
            rotated_q, rotated_k = position.rotate(queries, keys, torch.arange(start, start + length, device=device))
            scores = rotated_q[0, 0] @ rotated_k[0, 0, 0]
            colour, linewidth, alpha, dashes = looks[min(number, 1)]
            label = f"key at position {start:,}"
            axes.plot(numbers(scores), color=colour, linewidth=linewidth, alpha=alpha, linestyle=dashes, label=label)
        axes.set(xlabel="distance from query to key (positions)", ylabel="score (q · k)")
        axes.margins(x=0.01, y=0.08)
        axes.locator_params(axis="x", integer=True)
        axes.legend(loc="upper right")
    return figure


@torch.no_grad()
def rotary_angles(
    position: RotaryEmbedding,
    *,
    pairs: Sequence[int] | None = None,
    length: int = 12,
    title: str = "Angles of rotary positions",
) -> Figure:
    """Draw the rotation angle of some channel pairs at positions 0, 1, 2, ..., each pair as the hands of a clock.

    Fast pairs have different angles at neighbouring positions; slow pairs only at distant ones.

    Args:
        position: Rotary positions.
        pairs: Indices of pairs of channels, up to about six; `None` for five that are spread over all pairs.
        length: Number of positions to show.
        title: Title of the figure.

    Example:
        >>> figure = rotary_angles(RotaryEmbedding(64))
    """
    count = position.rotary_dim // 2
    if pairs is None:
        pairs = sorted({round(quarter * (count - 1) / 4) for quarter in range(5)})
    cos, sin = position.cos_sin(torch.arange(length, device=position.device))
    frequencies = position.frequencies(length)
    scaling = position.attention_scaling
    height = 0.8 + 6.6 / max(4, len(pairs))
    with new_figure(7.2, height, title=title, panels=(1, len(pairs))) as (figure, clocks):
        for axes, pair in zip(clocks, pairs, strict=True):
            around = torch.linspace(0, 2 * math.pi, 181)
            axes.plot(*(numbers(scaling * wave) for wave in (around.cos(), around.sin())), color=GRID)
            x, y = numbers(cos[:, pair]), numbers(sin[:, pair])
            shades = point_colours()([place / max(1, length - 1) for place in range(length)])
            for place in range(length):
                axes.plot([0, x[place]], [0, y[place]], color=shades[place], linewidth=0.9, alpha=0.7)
            dots = axes.scatter(x, y, c=range(length), cmap=point_colours(), s=22, linewidths=0, zorder=3)
            limits = (-1.25 * scaling, 1.25 * scaling)
            axes.set(xlim=limits, ylim=limits, xticks=[], yticks=[], aspect="equal")
            axes.set_title(f"pair {pair}", fontweight="normal", fontsize=10, loc="center", pad=2)
            period = 2 * math.pi / abs(float(frequencies[pair])) if frequencies[pair] else math.inf
            cycle = f"{period:.1f}" if period < 100 else f"{float(f'{period:.3g}'):,.0f}"
            cycle = "infinitely many" if math.isinf(period) else cycle
            axes.set_xlabel(f"one rotation in\n{cycle} positions", fontsize=8.5)
            axes.spines[:].set_visible(False)
        bar = colorbar(figure, dots, list(clocks), label="position")
        bar.set_yticks(range(0, length, math.ceil(length / 5)))
    return figure
