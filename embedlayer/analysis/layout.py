"""Compute 2-D coordinates of a table's rows that keep nearest neighbours close: a small version of UMAP.

Principal components show a few percent of the variance of a table. This layout pulls each row towards its nearest
neighbours by cosine similarity, along the edges of a k-nearest-neighbour graph, and pushes it away from random rows.
The picture shows which rows are neighbours. Distances between groups have no meaning.

Reference: McInnes, Healy and Melville, "UMAP", 2018. Where we differ: rows start at their first two principal
components; each round draws edges at random by their weight and moves all rows at once; above `EXACT_ROWS` rows the
graph is approximate. The neighbour lists of the map are always exact.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.analysis.geometry import principal_components
from embedlayer.analysis.nearest import NeighborGraph, nearest_rows, neighbor_graph
from embedlayer.analysis.row_reader import RowReader
from embedlayer.tables.conversions import TableLike

EXACT_ROWS = 8192
NEIGHBORS = 15
NEGATIVE_SAMPLES = 5

SEARCHING, MOVING = "searching neighbours", "moving rows"  # stages of the computation, as `on_progress` receives them

OnProgress = Callable[[str, float], None]
"""Function of a stage and the share of it that is done, from 0 to 1. It may raise an exception to end the work."""

_A, _B = 1.577, 0.895  # the curve 1 / (1 + a d^2b) for a least distance of 0.1


class NeighborLayout(NamedTuple):
    """The 2-D coordinates of a table's rows, and how exact the neighbours behind them were.

    Attributes:
        places: Coordinates `(V, 2)`; NaN for rows that were left out.
        recall: Share of the true nearest neighbours in the graph that the layout used; 1 if it was exact.
    """

    places: Float[Tensor, "V 2"]
    recall: float


@torch.no_grad()
def neighbor_layout(
    table: TableLike, *, keep: Bool[Tensor, " V"] | None = None, rounds: int | None = None
) -> NeighborLayout:
    """Compute 2-D coordinates of a table's rows in which nearest neighbours by cosine are close: the explorer's map.

    The same rows always get the same coordinates. `plots.table_map` draws them.

    Args:
        table: A table, an `nn.Embedding`, or rows `(V, D)`. Zero rows have no direction, so their place means
            nothing.
        keep: Which rows to place, `(V,)`; `None` for all that are finite. The others get NaN and have no influence.
        rounds: How many times all rows are moved; `None` for 200 times, and fewer for large tables.

    Example:
        >>> neighbor_layout(TokenEmbedding(100, 16), rounds=5).places.shape
        torch.Size([100, 2])
    """
    rows = RowReader(table).take(torch.arange(RowReader(table).vocab_size))
    finite = rows.isfinite().all(1)
    coordinates = principal_components(rows, min(2, rows.shape[1]), skip_nonfinite=True).coordinates
    start = F.pad(coordinates.float(), (0, 2 - coordinates.shape[1]))
    return compute_layout(rows, start, keep=finite if keep is None else keep & finite, rounds=rounds)


@torch.no_grad()
def compute_layout(
    rows: Float[Tensor, "V D"],
    start: Float[Tensor, "V 2"],
    *,
    keep: Bool[Tensor, " V"] | None = None,
    rounds: int | None = None,
    on_progress: OnProgress = lambda stage, share: None,
) -> NeighborLayout:
    """Compute 2-D coordinates of rows in which nearest neighbours by cosine are close.

    The same rows and first coordinates `start` always give the same result; `start` is scaled such that its largest
    number is 10. Fewer than 4 rows are not moved. Zero rows and rows with NaN have no direction, so their place means
    nothing. `on_progress` is called with the stage and its share that is done.
    """
    if keep is not None and not keep.all():
        part = compute_layout(rows[keep], start[keep], rounds=rounds, on_progress=on_progress)
        places = torch.full((len(rows), 2), math.nan)
        places[keep] = part.places
        return NeighborLayout(places, part.recall)
    start = start.float().nan_to_num()
    start = start / start.abs().max().clamp_min(1e-30) * 10 if len(start) else start
    if len(rows) < 4:
        return NeighborLayout(start, 1.0)
    rounds = rounds or max(60, min(200, 4_000_000 // len(rows)))
    random = torch.Generator().manual_seed(0)
    rows, count = rows.float().nan_to_num(posinf=0.0, neginf=0.0), min(NEIGHBORS, len(rows) - 1)
    on_progress(SEARCHING, 0.0)
    if len(rows) > EXACT_ROWS:
        graph = neighbor_graph(rows, count, random, on_progress=lambda share: on_progress(SEARCHING, share))
    else:
        graph = NeighborGraph(*nearest_rows(rows, torch.arange(len(rows)), count), 1.0)
    weights = edge_weights(graph.cosines)
    sources = torch.arange(len(rows))[:, None].expand_as(graph.ids)
    places = start + 1e-3 * torch.randn(start.shape, generator=random)
    for done in range(rounds):
        on_progress(MOVING, done / rounds)
        chosen = torch.rand(weights.shape, generator=random) < weights
        _move(places, sources[chosen], graph.ids[chosen], 1 - done / rounds, random)
    return NeighborLayout(places, graph.recall)


def _move(
    places: Float[Tensor, "V 2"],
    heads: Int[Tensor, " E"],
    tails: Int[Tensor, " E"],
    rate: float,
    random: torch.Generator,
) -> None:
    """Move all rows once, in place: one round of the layout.

    The two ends of each edge are pulled together, and its head is pushed away from random rows.
    """
    apart = places.index_select(0, heads) - places.index_select(0, tails)
    squared = apart.square().sum(1, keepdim=True)
    pull = -2 * _A * _B * squared.clamp_min(1e-8) ** (_B - 1) / (1 + _A * squared**_B)
    step = (pull * apart).clamp_(-4, 4)
    moved = torch.zeros_like(places).index_add_(0, heads, step).index_add_(0, tails, step, alpha=-1)
    for _ in range(NEGATIVE_SAMPLES):
        strangers = torch.randint(len(places), heads.shape, generator=random)
        apart = places.index_select(0, heads) - places.index_select(0, strangers)
        squared = apart.square().sum(1, keepdim=True)
        push = 2 * _B / ((0.001 + squared) * (1 + _A * squared**_B))
        moved.index_add_(0, heads, (push * apart).clamp_(-4, 4))
    places += rate * moved.clamp_(-12, 12)


def edge_weights(cosines: Float[Tensor, "V K"]) -> Float[Tensor, "V K"]:
    """Return the probability that an edge of the neighbour graph pulls its two rows together in a round, `(V, K)`.

    `cosines` are nearest first. The edge to the nearest neighbour has probability 1. For further neighbours it falls
    with the distance, at a rate of each row such that its K probabilities sum to `log2 K`, as in UMAP, or to the number
    of neighbours at the smallest distance if that is larger.
    """
    distances = 1 - cosines
    beyond = distances - distances[:, :1]
    wanted = math.log2(max(2, cosines.shape[1]))
    low, high = torch.zeros(len(cosines), 1), torch.full((len(cosines), 1), 4.0)
    for _ in range(24):
        middle = (low + high) / 2
        too_wide = torch.exp(-beyond / middle.clamp_min(1e-6)).sum(1, keepdim=True) > wanted
        low, high = torch.where(too_wide, low, middle), torch.where(too_wide, middle, high)
    return torch.exp(-beyond / high.clamp_min(1e-6))
