"""Find under-trained rows by their direction.

A token that never occurs in training still gets a gradient at every step: the softmax of the output head pushes all
unused rows in the same direction, and weight decay shrinks them. The shared direction soon exceeds the noise of the
initialisation, so unused rows form a narrow cone. Rows of tokens that occur leave it. Norms do not show this: in a tied
table unused rows can have the largest norms. No list of suspicious tokens is needed. The method:

1. In a sample of the table, find the directions with the highest density of rows.
2. Count rows by their angle to such a direction. It is the axis of a cone if the count per degree falls to a tenth of
   its peak and rises again at larger angles, where the other tokens are. Clusters of related words have no such gap.
3. The axis becomes the mean direction of the inner half of the cone. The edge is the angle at which the count falls to
   a tenth of the peak. Rows inside the edge are under-trained. The search is repeated among the other rows; a cone that
   overlaps an earlier one is dropped, since it holds rows that training has begun to move out of that cone.

Rows without any gradient are not found: unused rows of an untied input table keep the noise of their initialisation.
The rows of the untied head show them; pass those to `table_health`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from embedlayer.analysis.row_reader import RowReader
from embedlayer.tables.dense import TableLike

WIDEST = 45.0
"""Largest angle from the axis, in degrees, at which a cone may be densest: two rows there have a cosine of 0.5."""

FALL = 10.0
"""A cone ends at the angle where the density of rows is below its peak by this factor."""

RISE = 3.0
"""Beyond the edge the density must rise again by this factor over its minimum."""

FEWEST = 16
"""Least number of rows in a cone; fewer may be related tokens, such as the ten digits of a small vocabulary."""

FEWEST_SAMPLED = 6
"""Least number of a cone's rows in the sample of a large table."""

MOST_CONES = 8
SAMPLE, SEEDS = 16384, 4096
NEIGHBOURS = (8, 64)
TRIES = 12


@dataclass(frozen=True)
class Cone:
    """A set of rows with nearly the same direction; unused rows form one, as the docstring of this module explains.

    Attributes:
        axis: Unit vector `(D,)`: the mean direction of the half of the cone's rows that are nearest to it.
        rows: Number of rows in the cone.
        median_angle: Median angle between the axis and these rows, in degrees.
        edge_angle: Angle to the axis at which the cone ends, in degrees; rows at smaller angles are in the cone.
        mean_cosine: Mean cosine of two different rows of the cone.
    """

    axis: Float[Tensor, " D"]
    rows: int
    median_angle: float
    edge_angle: float
    mean_cosine: float


@dataclass(frozen=True)
class UnderTrained:
    """The under-training score of each row, and the cones (narrow sets of directions) that unused rows form.

    Attributes:
        scores: One score per row, `(V,)`, from -1 to 1: 1 on the axis of the nearest cone, 0 at its edge, -1 opposite
            to it. If no cone was found, rows nearest to the direction with most rows score highest, but never above 0.
            Zero rows and rows with NaN score -1; `table_health` lists them separately.
        cones: The cones that were found, largest first; empty if the table has none.
    """

    scores: Float[Tensor, " V"]
    cones: tuple[Cone, ...]

    @property
    def threshold(self) -> float:
        """Return 0: rows with a higher score are inside a cone, because the edge of a cone scores 0."""
        return 0.0

    @property
    def flagged(self) -> Bool[Tensor, " V"]:
        """Return a mask `(V,)` of the under-trained rows: those with a score above `threshold`."""
        return self.scores > self.threshold

    def explain(self) -> str:
        """Return the reason why rows are flagged, one line of text per cone, or why no row is flagged."""
        if not self.cones:
            return (
                f"No rows form a narrow cone around one direction with a gap to the other rows, so no row is flagged. "
                f"A cone needs {FEWEST} rows or more within {WIDEST:.0f} degrees of its axis."
            )
        return "\n".join(
            f"{cone.rows:,} rows are within {cone.edge_angle:.0f} degrees of one direction, half of them within "
            f"{max(cone.median_angle, 0.1):.1f} degrees; their mean cosine is {cone.mean_cosine:.2f}. At that edge the "
            f"density of rows is less than a tenth of its peak, and beyond it the density rises again."
            for cone in self.cones
        )


@torch.no_grad()
def under_trained_scores(table: TableLike) -> UnderTrained:
    """Score each row by its angle to the cones of unused rows: above 0 the row is under-trained.

    Training pushes the rows of tokens that never occur in one direction, so that they form a narrow cone (see the
    docstring of this module).
    The method works for tied tables and for output heads. The table is read a few times in chunks, and a sample of
    16,384 rows is kept in memory. The sample is the same in every call.

    Args:
        table: A `LookupTable`, or a plain tensor `(V, D)`.

    Raises:
        ShapeError: A plain tensor is not `(V, D)`.

    Example:
        >>> words = torch.randn(400, 32)
        >>> unused = torch.randn(32) + 0.1 * torch.randn(100, 32)
        >>> found = under_trained_scores(torch.cat([words, unused]))
        >>> int(found.flagged[:400].sum()), int(found.flagged[400:].sum())
        (0, 100)
    """
    rows = RowReader(table)
    free = rows.norms() > 0
    cones: list[Cone] = []
    sample = _sample(rows, free)
    fewest = max(FEWEST_SAMPLED, FEWEST * len(sample) // max(1, int(free.sum())))
    densities = _densities(sample)
    best: Tensor | None = None
    while len(cones) < MOST_CONES:
        found = None
        present = sample.any(dim=1)
        for candidate in _candidates(sample, densities):
            best = candidate if best is None else best
            axis = _refined_axis(sample, present, candidate, fewest)
            found = None if axis is None else _measure_cone(rows, axis, free)
            if found is not None and not any(_overlap(found[0], cone) for cone in cones):
                break
            found = None
        if found is None:
            break
        cone, inside = found
        cones.append(cone)
        free &= ~inside
        inside_cone = sample @ cone.axis > _cosine(cone.edge_angle)
        densities[inside_cone[: len(densities)]] = -torch.inf
        sample = sample.masked_fill(inside_cone[:, None], 0.0)  # a zero row has cosine 0 with every row
    edges = [(cone.axis, _cosine(cone.edge_angle)) for cone in cones]
    if best is not None and not cones:
        edges = [(best, 1.0)]
    return UnderTrained(_scores(rows, edges), tuple(sorted(cones, key=lambda cone: -cone.rows)))


def _sample(rows: RowReader, usable: Bool[Tensor, " V"]) -> Float[Tensor, "M D"]:
    """Return at most `SAMPLE` usable rows of a table, each normalised to length 1, as float32 on the CPU.

    The rows and their random order are the same in every call.

    Args:
        rows: The table.
        usable: Mask of the rows to sample from.
    """
    ids = torch.nonzero(usable)[:, 0]
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))[:SAMPLE]
    return F.normalize(rows.take(ids[order]).float(), dim=1)


def _densities(sample: Float[Tensor, "M D"]) -> Float[Tensor, "S K"]:
    """Measure how dense the sample is around each of its first `SEEDS` rows.

    Args:
        sample: Unit rows `(M, D)`.

    Returns:
        One line per seed row: its cosines with its 8th and with its 64th nearest row, `(S, 2)`. A larger cosine means
        more rows nearby. A sample of 64 rows or fewer has one column, one of 8 rows or fewer none.
    """
    places = torch.tensor([count for count in NEIGHBOURS if count < len(sample)], dtype=torch.int64)
    if not len(places):
        return torch.empty(0, 0)
    parts = [
        (seeds @ sample.T).topk(int(places[-1]) + 1, dim=1).values[:, places] for seeds in sample[:SEEDS].split(256)
    ]
    return torch.cat(parts)


def _candidates(sample: Float[Tensor, "M D"], densities: Float[Tensor, "S K"]) -> Iterator[Float[Tensor, " D"]]:
    """Yield unit vectors in whose direction many rows of the sample point, the densest direction first.

    A candidate starts at the seed row with the highest density. It is then moved to the mean of its nearest rows, three
    times. Seeds near a candidate give no further ones.

    Args:
        sample: Unit rows `(M, D)`.
        densities: Densities around the first S rows of the sample, from `_densities`.
    """
    seeds = sample[: len(densities)]
    for column in range(densities.shape[1]):
        left = densities[:, column].clone()
        for _ in range(TRIES):
            seed = int(left.argmax())
            if left[seed] < _cosine(WIDEST) ** 2 / 2:  # two rows of the widest cone have a cosine of cos(45)^2
                break
            axis = seeds[seed]
            for _ in range(3):
                axis = _mean_direction(sample[(sample @ axis).topk(NEIGHBOURS[column] + 1).indices])
            yield axis
            left[seeds @ axis > 0.7] = -torch.inf
            left[seed] = -torch.inf


def _refined_axis(
    sample: Float[Tensor, "M D"], present: Bool[Tensor, " M"], axis: Float[Tensor, " D"], fewest: int
) -> Float[Tensor, " D"] | None:
    """Return the axis of the cone around a direction, or `None` if the sample shows no cone there.

    The axis is moved to the mean direction of the cone's inner half until it settles, at most eight times.

    Args:
        sample: Unit rows `(M, D)`; rows of earlier cones are zero.
        present: Mask of the sample's rows that are not in an earlier cone.
        axis: First direction `(D,)`.
        fewest: Least number of rows in a cone.
    """
    for _ in range(8):
        cosines = sample @ axis
        edge = _edge(cosines[present], fewest)
        if edge is None:
            return None
        count = int((cosines > _cosine(edge)).sum())
        middle = _mean_direction(sample[cosines.topk(max(1, count // 2)).indices])
        settled = bool(middle @ axis > 1 - 1e-7)
        axis = middle
        if settled:
            break
    return axis


def _measure_cone(
    rows: RowReader, axis: Float[Tensor, " D"], free: Bool[Tensor, " V"]
) -> tuple[Cone, Bool[Tensor, " V"]] | None:
    """Measure the cone around an axis over all rows of the table.

    Args:
        rows: The table.
        axis: Estimate of the axis, `(D,)`. The returned cone has a new axis: the mean direction of its inner half.
        free: Mask of the usable rows that are not in an earlier cone.

    Returns:
        The cone and the mask of its rows, or `None` if the rows form no cone.
    """
    cosines, edge = _cosines_and_edge(rows, axis, free)
    if edge is None:
        return None
    inner = cosines.topk(max(1, int((cosines > _cosine(edge)).sum()) // 2)).indices
    axis = F.normalize(_sum_of_units(rows, torch.zeros_like(free).index_fill_(0, inner, True)), dim=0).float()
    cosines, edge = _cosines_and_edge(rows, axis, free)
    if edge is None:
        return None
    inside = cosines > _cosine(edge)
    count = int(inside.sum())
    total = float(_sum_of_units(rows, inside).square().sum())
    angle = math.degrees(math.acos(min(1.0, float(cosines[inside].median()))))
    similarity = (total - count) / (count * (count - 1))  # |sum of units|^2 = count + the cosines of all pairs
    return Cone(axis, count, angle, edge, min(1.0, similarity)), inside


def _cosines_and_edge(
    rows: RowReader, axis: Float[Tensor, " D"], free: Bool[Tensor, " V"]
) -> tuple[Float[Tensor, " V"], float | None]:
    """Return the cosines of rows with an axis, and the angle at which the cone around the axis ends.

    Args:
        rows: The table.
        axis: Direction `(D,)`.
        free: Mask of the usable rows that are not in an earlier cone; the cosine of all other rows is -2.

    Returns:
        The cosines `(V,)`, and the angle in degrees or `None` without a cone.
    """
    cosines = _cosines(rows, axis).where(free, -2.0)
    return cosines, _edge(cosines[free], FEWEST)


def _overlap(cone: Cone, earlier: Cone) -> bool:
    """Return whether the angle between the axes of two cones is below the sum of their edge angles."""
    return float(cone.axis @ earlier.axis) > _cosine(min(180.0, cone.edge_angle + earlier.edge_angle))


def _edge(cosines: Float[Tensor, " N"], fewest: int) -> float | None:
    """Return the angle in degrees at which the cone around an axis ends, or `None` if there is no cone.

    Rows are counted for each degree of their angle to the axis. The cone ends where this count falls to a tenth of its
    peak. There is no cone if the peak is at `WIDEST` degrees or more, or if the count does not rise again beyond the
    end.

    Args:
        cosines: Cosine of each row with the axis.
        fewest: Least number of rows in a cone.
    """
    degrees = torch.rad2deg(cosines.double().clamp(-1.0, 1.0).arccos()).long().clamp_max(179)
    counts = torch.bincount(degrees, minlength=180).double()
    density = _smoothed(counts, torch.tensor([0.25, 0.5, 0.25]))
    peaks = density.cummax(0)
    ends = torch.nonzero((density * FALL < peaks.values) & (counts.cumsum(0) - counts >= fewest))
    if not len(ends) or int(peaks.indices[ends[0, 0]]) >= WIDEST:
        return None
    edge = int(ends[0, 0])
    beyond = _smoothed(counts, torch.full((5,), 0.2))[edge:]
    rises = bool((beyond > RISE * beyond.cummin(0).values + 1.0).any())  # 1 row per degree may be chance
    return float(edge) if rises else None


def _smoothed(counts: Float[Tensor, " N"], weights: Float[Tensor, " K"]) -> Float[Tensor, " N"]:
    """Return the counts smoothed by a convolution with `weights`, an odd number of them that sum to 1.

    The result is as long as `counts`, because the first and the last count are repeated beyond the ends.
    """
    padded = F.pad(counts[None, None], (len(weights) // 2,) * 2, mode="replicate")
    smooth: Tensor = F.conv1d(padded, weights.to(counts)[None, None])[0, 0]
    return smooth


def _scores(rows: RowReader, edges: list[tuple[Tensor, float]]) -> Float[Tensor, " V"]:
    """Return the under-training score of each row: its largest score over the cones, -1 without a cone.

    Let `edge` be the cosine of the cone's edge angle, and `cos` the row's cosine with the cone's axis. The score is
    `(cos - edge) / (1 - edge)` inside the cone and `(cos - edge) / (1 + edge)` outside. Zero rows and rows with NaN
    score -1.

    Args:
        rows: The table.
        edges: Axis and `edge` of each cone. An `edge` of 1 is a cone without width: no score is above 0.
    """
    scores = torch.full((len(rows),), -1.0, dtype=torch.float64)
    for axis, edge in edges:
        excess = _cosines(rows, axis) - edge
        excess = excess / torch.where(excess > 0, 1 - edge, 1 + edge).clamp_min(1e-12)
        scores = torch.maximum(scores, excess.nan_to_num(nan=-1.0).clamp(-1.0, 1.0 if edge < 1 else 0.0))
    return scores.float()


def _cosines(rows: RowReader, axis: Float[Tensor, " D"]) -> Float[Tensor, " V"]:
    """Return the cosine of each row with a direction, in float64; NaN for zero rows and rows with NaN.

    In float32, cosines near 1 differ between machines in their last digits. A matrix product is used, seven times as
    fast as the sums per row of `nearest.cosines_with`, because ties do not matter here.
    """
    axis = F.normalize(axis.double(), dim=0)
    parts = []
    for _, chunk in rows.chunks():
        wide = chunk.double()
        norms = torch.linalg.vector_norm(wide, dim=1)
        parts.append((wide @ axis.to(wide.device) / norms.where(norms > 0, torch.nan)).cpu())
    return torch.cat(parts).nan_to_num(nan=torch.nan, posinf=torch.nan, neginf=torch.nan).clamp(-1.0, 1.0)


def _sum_of_units(rows: RowReader, chosen: Bool[Tensor, " V"]) -> Float[Tensor, " D"]:
    """Return the sum of the chosen rows, each normalised to length 1, in float64."""
    total = torch.zeros(rows.embed_dim, dtype=torch.float64)
    for start, chunk in rows.chunks():
        here = chosen[start : start + len(chunk)]
        if here.any():
            total += F.normalize(chunk[here.to(chunk.device)].double(), dim=1).sum(0).cpu()
    return total


def _mean_direction(units: Float[Tensor, "N D"]) -> Float[Tensor, " D"]:
    """Return the unit vector in the direction of the mean of some unit rows."""
    return F.normalize(units.sum(0), dim=0)


def _cosine(degrees: float) -> float:
    """Return the cosine of an angle in degrees."""
    return math.cos(math.radians(degrees))
