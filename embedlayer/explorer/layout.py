"""A picture in which neighbours stay together: a small layout of UMAP's kind.

Principal components of a table show a few percent of what its rows differ by. Here each row is drawn to those that it
is most alike, by attraction along the edges of a graph of nearest neighbours, and pushed off random others. Who is near
whom can be read from the picture; how far groups lie from one another cannot.

Source: McInnes, Healy and Melville, "UMAP", 2018. Where we differ: rows start at their two widest components; edges are
drawn anew at random in each round, by their weight, and all move at once; above `EXACT_ROWS` rows neighbours are looked
for in the nearest cells only. The map's own lists of neighbours are always exact.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

EXACT_ROWS = 8192
NEIGHBORS = 15
PUSHES = 5
CELLS_SEARCHED = 24
REFINEMENTS = 6
NUMBERS_AT_ONCE = 1 << 22

_A, _B = 1.577, 0.895  # the curve 1 / (1 + a d^2b) for a least distance of 0.1


@torch.no_grad()
def lay_out(rows: Float[Tensor, "V D"], start: Float[Tensor, "V 2"], *, rounds: int | None = None) -> Tensor:
    """Places of the rows in the plane, `(V, 2)`: the same for the same rows.

    Args:
        rows: The rows; zero rows and rows with NaN have no direction and stay among the others where they start.
        start: Where they start, `pca(rows).coordinates`.
        rounds: How often all move; by default 200, and fewer for large tables.
    """
    start = start.float().nan_to_num()
    start = start / start.abs().max().clamp_min(1e-30) * 10
    if len(rows) < 4:
        return start
    rounds = rounds or max(60, min(200, 4_000_000 // len(rows)))
    random = torch.Generator().manual_seed(0)
    units = F.normalize(rows.float().nan_to_num(posinf=0.0, neginf=0.0), dim=1)
    ids, cosines = nearest(units, min(NEIGHBORS, len(rows) - 1), random)
    weights = edge_weights(cosines)
    sources = torch.arange(len(rows))[:, None].expand_as(ids)
    places = start + 1e-3 * torch.randn(start.shape, generator=random)
    for turn in range(rounds):
        chosen = torch.rand(weights.shape, generator=random) < weights
        _move(places, sources[chosen], ids[chosen], 1 - turn / rounds, random)
    return places


def nearest(
    units: Float[Tensor, "V D"], count: int, random: torch.Generator
) -> tuple[Int[Tensor, "V K"], Float[Tensor, "V K"]]:
    """The `count` rows nearest to each, and their cosines; above `EXACT_ROWS` rows, nearly so.

    A large table is cut into about sqrt(V) cells by k-means; the neighbours of a cell's rows are
    looked for in the `CELLS_SEARCHED` cells whose centres are nearest to its own.
    """
    ids = torch.zeros(len(units), count, dtype=torch.int64)
    cosines = torch.full((len(units), count), -1.0)
    if len(units) <= EXACT_ROWS:
        blocks = [(block, torch.arange(len(units))) for block in torch.arange(len(units)).split(512)]
    else:
        blocks = _blocks(units, random)
    for members, candidates in blocks:
        products = units[members] @ units[candidates].T
        products[members[:, None] == candidates] = -2.0
        best = products.topk(min(count, len(candidates)))
        ids[members, : best.indices.shape[1]] = candidates[best.indices]
        cosines[members, : best.indices.shape[1]] = best.values
    return ids, cosines


def edge_weights(cosines: Float[Tensor, "V K"]) -> Float[Tensor, "V K"]:
    """How likely each edge is to pull: 1 to the nearest, falling with distance so that a row's add up to log2 K."""
    distances = 1 - cosines
    beyond = distances - distances[:, :1]
    wanted = math.log2(max(2, cosines.shape[1]))
    low, high = torch.zeros(len(cosines), 1), torch.full((len(cosines), 1), 4.0)
    for _ in range(24):
        middle = (low + high) / 2
        too_wide = torch.exp(-beyond / middle.clamp_min(1e-6)).sum(1, keepdim=True) > wanted
        low, high = torch.where(too_wide, low, middle), torch.where(too_wide, middle, high)
    return torch.exp(-beyond / high.clamp_min(1e-6))


def _blocks(units: Float[Tensor, "V D"], random: torch.Generator) -> list[tuple[Int[Tensor, " M"], Int[Tensor, " N"]]]:
    """Rows of each cell, in pieces, with the rows among which their neighbours are looked for."""
    centres = units[torch.randperm(len(units), generator=random)[: int(len(units) ** 0.5)]]
    step = max(1, NUMBERS_AT_ONCE // len(centres))
    for _ in range(REFINEMENTS):
        cell = torch.cat([(chunk @ centres.T).argmax(1) for chunk in units.split(step)])
        centres = F.normalize(torch.zeros_like(centres).index_add_(0, cell, units), dim=1)
    order = cell.argsort(stable=True)
    cells = order.split(torch.bincount(cell, minlength=len(centres)).tolist())
    near = (centres @ centres.T).topk(min(CELLS_SEARCHED, len(centres))).indices
    found = []
    for own, members in zip(near.tolist(), cells, strict=True):
        candidates = torch.cat([cells[other] for other in own])
        found += [(piece, candidates) for piece in members.split(max(1, NUMBERS_AT_ONCE // max(1, len(candidates))))]
    return [(members, candidates) for members, candidates in found if len(members)]


def _move(
    places: Float[Tensor, "V 2"],
    ones: Int[Tensor, " E"],
    others: Int[Tensor, " E"],
    rate: float,
    random: torch.Generator,
) -> None:
    """One round, in place: both ends of each edge pulled together, and the first pushed off random rows."""
    apart = places.index_select(0, ones) - places.index_select(0, others)
    squared = apart.square().sum(1, keepdim=True)
    pull = -2 * _A * _B * squared.clamp_min(1e-8) ** (_B - 1) / (1 + _A * squared**_B)
    step = (pull * apart).clamp_(-4, 4)
    moved = torch.zeros_like(places).index_add_(0, ones, step).index_add_(0, others, step, alpha=-1)
    for _ in range(PUSHES):
        strangers = torch.randint(len(places), ones.shape, generator=random)
        apart = places.index_select(0, ones) - places.index_select(0, strangers)
        squared = apart.square().sum(1, keepdim=True)
        push = 2 * _B / ((0.001 + squared) * (1 + _A * squared**_B))
        moved.index_add_(0, ones, (push * apart).clamp_(-4, 4))
    places += rate * moved.clamp_(-12, 12)
