"""Positions that speak inside attention: biases per head, rotated scores, and the angles behind them."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.analysis.geometry import position_values
from embedlayer.errors import ShapeError, SizeError
from embedlayer.plots.labels import SIDES, write_labels
from embedlayer.plots.style import (
    BLUE,
    GRID,
    MUTED,
    ORANGE,
    colorbar,
    entitle,
    new_figure,
    numbers,
    panels,
    point_colours,
)
from embedlayer.positions.position import Position
from embedlayer.positions.rotary import RotaryEmbedding

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure


@torch.no_grad()
def attention_bias(
    position: Position, *, length: int = 64, title: str = "Bias on attention scores, head by head"
) -> "matplotlib.figure.Figure":
    """What a scheme adds to the scores of keys further back (ALiBi, T5), and the factor on their weight.

    Left, the bias b of each head; right, `e^b`: before normalisation a key's attention weight is multiplied by it.

    Args:
        position: A scheme that overrides `bias`.
        length: Distances to show, 0 to `length - 1`.
        title: The figure's title.

    Raises:
        SizeError: The scheme gives no bias.

    Example:
        >>> figure = attention_bias(AlibiBias(8))
    """
    if type(position).bias is Position.bias:
        raise SizeError(f"{type(position).__name__} gives no bias: choose AlibiBias or RelativePositionBias.")
    picture = position_values(position, length)
    assert picture is not None  # it has a bias
    biases = picture.values.double()
    heads = biases.shape[1]
    colours = point_colours()([head / max(1, heads - 1) for head in range(heads)])
    with new_figure(7.2, 3.9) as figure:
        entitle(figure, title)
        pair = panels(figure, 1, 2)[0]
        for axes, values, label in zip(
            pair, (biases, biases.exp()), ("added to the score", "factor on the weight"), strict=True
        ):
            for head in range(heads):
                axes.plot(numbers(values[:, head]), color=colours[head], linewidth=1.5)
            axes.set(xlabel="distance back to the key (positions)", ylabel=label)
            axes.margins(x=0.02, y=0.05)
            axes.locator_params(axis="x", integer=True, nbins=6)
            if len(values) > 1:
                axes.set_xlim(right=1.22 * (len(values) - 1))
        for axes, values in zip(pair, (biases, biases.exp()), strict=True):
            _name_ends(figure, axes, values)
    return figure


def _name_ends(figure: "matplotlib.figure.Figure", axes: "matplotlib.axes.Axes", values: Float[Tensor, "T H"]) -> None:
    """Name the heads where their lines end, as many as find room."""
    ends = torch.tensor([[len(values) - 1.0, end] for end in values[-1].tolist()])
    labels = {head: f"head {head}" for head in range(len(ends))}
    write_labels(figure, axes, numbers(ends), labels, most=16, sides=SIDES[:1], color=MUTED)


@torch.no_grad()
def rotary_scores(
    position: Position,
    *,
    length: int = 128,
    q: Float[Tensor, " K"] | None = None,
    k: Float[Tensor, " K"] | None = None,
    starts: Sequence[int] = (0, 1000),
    title: str = "Rotated scores depend on the distance only",
) -> "matplotlib.figure.Figure":
    """The score of one query and one key over their distance, with the key at several places: the curves coincide.

    Args:
        position: A scheme that rotates.
        length: Distances to show, 0 to `length - 1`.
        q: The query before it is rotated; all channels `1 / sqrt(K)` if `None`.
        k: The key before it is rotated; as the query if `None`.
        starts: Where the key stands; the query stands a distance further on.
        title: The figure's title.

    Raises:
        SizeError: The scheme does not rotate, or `starts` is empty.
        ShapeError: `q` and `k` differ in width, or from the scheme's heads.

    Example:
        >>> figure = rotary_scores(RotaryEmbedding(64))
    """
    scores = scores_by_distance(position, length, q, k, starts)
    with new_figure(7.2, 3.9) as figure:
        axes = panels(figure)[0, 0]
        axes.axhline(0, color=MUTED, linewidth=0.8)
        looks = [(BLUE, 5.0, 0.35, "-"), (ORANGE, 1.4, 1.0, (0, (4, 2)))]
        for number, (start, curve) in enumerate(zip(starts, scores, strict=True)):
            colour, width, alpha, dashes = looks[min(number, 1)]
            label = f"key at position {start:,}"
            axes.plot(numbers(curve), color=colour, linewidth=width, alpha=alpha, linestyle=dashes, label=label)
        axes.set(xlabel="distance from query to key (positions)", ylabel="score (q · k)")
        axes.set_title(title)
        axes.margins(x=0.01, y=0.08)
        axes.locator_params(axis="x", integer=True)
        axes.legend(loc="upper right")
    return figure


def scores_by_distance(
    position: Position,
    length: int,
    q: Float[Tensor, " K"] | None,
    k: Float[Tensor, " K"] | None,
    starts: Sequence[int],
) -> Float[Tensor, "S T"]:
    """`rotate(q, start + d) . rotate(k, start)` for each start and each distance d below `length`."""
    if type(position).rotate is Position.rotate or not starts:
        raise SizeError(f"{type(position).__name__} rotates nothing, or no start was given: choose RotaryEmbedding.")
    width = int(getattr(position, "head_dim", 0))
    device = _device(position)
    q = torch.full((width,), width**-0.5, device=device) if q is None else q
    k = q if k is None else k
    if len(q) != width or len(k) != width:
        raise ShapeError(f"q and k must have the {width} channels of a head, not {len(q)} and {len(k)}.")
    curves = []
    for start in starts:
        places = torch.arange(start, start + length, device=device)
        turned_q, turned_k = position.rotate(q.expand(1, 1, length, -1), k.expand(1, 1, length, -1), places[None])
        curves.append(turned_q[0, 0] @ turned_k[0, 0, 0])
    return torch.stack(curves)


@torch.no_grad()
def rotary_angles(
    position: RotaryEmbedding,
    *,
    pairs: Sequence[int] | None = None,
    length: int = 12,
    title: str = "How far rotary positions turn their pairs",
) -> "matplotlib.figure.Figure":
    """Where position 0, 1, 2, ... turns a pair that starts on the right: fast pairs tell neighbours apart, slow ones
    tell far places apart.

    Args:
        position: Rotary positions.
        pairs: Which pairs of channels, up to six; by default spread over all.
        length: Positions to show.
        title: The figure's title.

    Raises:
        SizeError: A pair that is not there, none, or more than six.

    Example:
        >>> figure = rotary_angles(RotaryEmbedding(64))
    """
    turning = position.rotary_dim // 2
    if pairs is None:
        pairs = sorted({round(turn * (turning - 1) / 4) for turn in range(5)})
    if not 1 <= len(pairs) <= 6 or not all(0 <= pair < turning for pair in pairs):
        raise SizeError(f"Choose 1 to 6 of the {turning} pairs (0..{turning - 1}), not {list(pairs)}.")
    places = torch.arange(length, device=_device(position))
    cos, sin = position.cos_sin(places)
    frequencies = position.frequencies(length)
    radius = 1.25 * position.attention_scaling
    with new_figure(7.2, 0.8 + 6.6 / max(4, len(pairs))) as figure:
        entitle(figure, title)
        clocks = panels(figure, 1, len(pairs))[0]
        for axes, pair in zip(clocks, pairs, strict=True):
            around = torch.linspace(0, 2 * math.pi, 181)
            axes.plot(
                *(numbers(position.attention_scaling * wave) for wave in (around.cos(), around.sin())), color=GRID
            )
            x, y = numbers(cos[:, pair]), numbers(sin[:, pair])
            shades = point_colours()([place / max(1, length - 1) for place in range(length)])
            for place in range(length):
                axes.plot([0, x[place]], [0, y[place]], color=shades[place], linewidth=0.9, alpha=0.7)
            dots = axes.scatter(x, y, c=range(length), cmap=point_colours(), s=22, linewidths=0, zorder=3)
            axes.set(xlim=(-radius, radius), ylim=(-radius, radius), xticks=[], yticks=[], aspect="equal")
            axes.set_title(f"pair {pair}", fontweight="normal", fontsize=10, loc="center", pad=2)
            period = 2 * math.pi / float(frequencies[pair]) if frequencies[pair] else math.inf
            axes.set_xlabel(f"one rotation in\n{_count(period)} positions", fontsize=8.5)
            for spine in axes.spines.values():
                spine.set_visible(False)
        bar = colorbar(figure, dots, list(clocks), label="position")
        bar.set_yticks(range(0, length, math.ceil(length / 5)))
    return figure


def _device(position: Position) -> torch.device:
    return next((tensor.device for tensor in (*position.parameters(), *position.buffers())), torch.device("cpu"))


def _count(value: float) -> str:
    return (
        "infinitely many" if math.isinf(value) else f"{value:.1f}" if value < 100 else f"{float(f'{value:.3g}'):,.0f}"
    )
