"""Clusters of points in the plane by density, and the words that name a cluster of tokens.

The points are counted in a grid, and the counts are smoothed by a Gaussian. Each cell belongs to the peak that is
reached by moving to the densest neighbouring cell again and again. Two peaks are merged if the density on the way
between them stays at or above `SHALLOW` times the density of the lower one. This is a watershed of the density, close
to mean shift: Comaniciu and Meer, "Mean Shift", 2002.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.analysis.row_reader import RowReader
from embedlayer.tables.conversions import TableLike

GRID = 256  # cells of the grid along each side
SHALLOW = 0.8  # peaks are merged if the density between them is at least this share of that of the lower peak

NARROWEST, WIDEST, WIDER = 1.5, 64.0, 1.25  # standard deviation of the smoothing in cells, and the factor between tries

NAMES, SHORTEST_WORD = 5, 3
TYPICAL = 0.25  # share of the words of a cluster, those nearest to its mean direction, among which names are chosen
FEWEST_TYPICAL = 12


@dataclass(frozen=True)
class PlaneClusters:
    """C clusters of N points in the plane."""

    of: Int[Tensor, " N"]  # number of each point's cluster; -1 for a point in none
    sizes: list[int]  # largest first
    peaks: Float[Tensor, "C 2"]  # coordinates of the densest place


@torch.no_grad()
def plane_clusters(places: Float[Tensor, "N 2"], *, most: int, smallest: int = 8) -> PlaneClusters:
    """Cluster points in the plane by density: the narrowest smoothing that gives at most `most` clusters.

    If even the widest smoothing gives more, the largest `most` clusters are kept. The same points always get the same
    clusters. Points with NaN or infinity, and groups of fewer than `smallest` points, are in no cluster.
    """
    known = torch.nonzero(places.isfinite().all(1))[:, 0]
    of = torch.full((len(places),), -1)
    if not len(known):
        return PlaneClusters(of, [], torch.empty(0, 2))
    points = places[known].float()
    low = points.amin(0)
    side = float((points.amax(0) - low).max().clamp_min(1e-12)) / GRID
    columns, lines = ((points - low) / side).long().clamp_(0, GRID - 1).unbind(1)
    cells = lines * GRID + columns
    counts = torch.zeros(GRID * GRID).index_add_(0, cells, torch.ones(len(cells))).view(GRID, GRID)
    width = NARROWEST
    while True:
        peaks, peak_of, sizes = _peak_of_cells(counts, width)[cells].unique(return_inverse=True, return_counts=True)
        if int((sizes >= smallest).sum()) <= most or width > WIDEST:
            break
        width *= WIDER
    order = [int(peak) for peak in sizes.argsort(descending=True, stable=True) if sizes[peak] >= smallest][:most]
    number = torch.full((len(peaks),), -1)
    number[order] = torch.arange(len(order))
    of[known] = number[peak_of]
    chosen = peaks[order]
    centres = torch.stack([chosen % GRID, chosen // GRID], 1) + 0.5
    return PlaneClusters(of, [int(sizes[peak]) for peak in order], low + centres * side)


def _peak_of_cells(counts: Float[Tensor, "G G"], width: float) -> Int[Tensor, " C"]:
    """Return the cell of the peak that each cell belongs to, after a Gaussian smoothing by `width` cells.

    Peaks that no valley separates are merged.
    """
    density = _smoothed(counts, width)
    # move to the densest neighbour, again and again
    _, following = F.max_pool2d(density[None, None], 3, stride=1, padding=1, return_indices=True)
    peak: Tensor = following.flatten()
    while not torch.equal(peak[peak], peak):
        peak = peak[peak]
    heights = density.flatten().tolist()
    merged: dict[int, int] = {}

    def top(cell: int) -> int:  # the highest peak that a peak was merged with
        while cell in merged:
            cell = merged[cell]
        return cell

    for pair, saddle in _saddles(density, peak):
        low, high = sorted(map(top, pair), key=lambda cell: (heights[cell], -cell))
        if low != high and saddle >= SHALLOW * heights[low]:
            merged[low] = high
    target = torch.arange(len(peak))
    for cell in merged:
        target[cell] = top(cell)
    return target[peak]


def _smoothed(counts: Float[Tensor, "G G"], width: float) -> Float[Tensor, "G G"]:
    """Return counts smoothed by a Gaussian of standard deviation `width`, in cells."""
    reach = int(3 * width) + 1
    weights = torch.exp(-(torch.arange(-reach, reach + 1) ** 2) / (2 * width**2))
    weights /= weights.sum()
    across = F.conv2d(counts[None, None], weights.view(1, 1, 1, -1), padding=(0, reach))
    smoothed: Tensor = F.conv2d(across, weights.view(1, 1, -1, 1), padding=(reach, 0))[0, 0]
    return smoothed


def _saddles(density: Float[Tensor, "G G"], peak: Int[Tensor, " C"]) -> list[tuple[tuple[int, int], float]]:
    """Return for each pair of adjacent peaks the largest density on the border between them, largest first."""
    G, owner = len(density), peak.view(density.shape)
    saddles: dict[tuple[int, int], float] = {}
    for down, right in ((0, 1), (1, 0), (1, 1)):
        one, other = owner[: G - down, : G - right], owner[down:, right:]
        height = torch.minimum(density[: G - down, : G - right], density[down:, right:])
        border = (one != other) & (height > 0)
        for first, second, saddle in zip(*(each[border].tolist() for each in (one, other, height)), strict=True):
            pair = (min(first, second), max(first, second))
            saddles[pair] = max(saddles.get(pair, 0.0), saddle)
    return sorted(saddles.items(), key=lambda each: (-each[1], each[0]))


@torch.no_grad()
def typical_tokens(
    table: TableLike,
    of: Int[Tensor, " V"],
    texts: Sequence[str],
    *,
    frequency: Int[Tensor, " V"] | None = None,
) -> list[list[int]]:
    """Return the IDs of the tokens that name each cluster, at most `NAMES`, most frequent first.

    Of the words of a cluster, those nearest to its mean direction are candidates, and the most frequent of them are
    chosen; the mean direction of the whole table is subtracted first. A cluster without words is named by other tokens.
    Without `frequency`, the occurrences of each token, lower IDs count as more frequent.
    """
    rows, clusters = RowReader(table), int(of.max()) + 1 if len(of) else 0
    weight = -torch.arange(len(of), dtype=torch.float64) if frequency is None else frequency.double()
    every = torch.cat([F.normalize(chunk.float().cpu(), dim=1).sum(0, keepdim=True) for _, chunk in rows.chunks()])
    common = every.nan_to_num(posinf=0.0, neginf=0.0).sum(0) / max(1, len(of))
    named = []
    for cluster in range(clusters):
        members = torch.nonzero(of == cluster)[:, 0]
        units = F.normalize(rows.take(members).float(), dim=1) - common
        typical = F.normalize(units, dim=1) @ F.normalize(units.mean(0), dim=0)
        names = [len(text) >= SHORTEST_WORD and text.isalpha() for text in (texts[i].strip() for i in members.tolist())]
        words = torch.tensor(names) if any(names) else torch.ones(len(members), dtype=torch.bool)
        chosen = torch.nonzero(words)[:, 0]
        chosen = chosen[typical[chosen].argsort(descending=True, stable=True)]
        chosen = members[chosen[: max(FEWEST_TYPICAL, int(TYPICAL * len(chosen)))]]
        distinct: dict[str, int] = {}  # no two texts are equal but for case, white space or a final "s"
        for token in chosen[weight[chosen].argsort(descending=True, stable=True)].tolist():
            bare = texts[token].strip().casefold()
            if bare and len(distinct) < NAMES:
                distinct.setdefault(bare.removesuffix("s") or bare, token)
        named.append([*distinct.values()])
    return named
