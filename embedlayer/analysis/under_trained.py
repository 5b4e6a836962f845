"""Rows that training has hardly reached, found by where they point.

A token that never occurs is still pushed, at every step, by the softmax of a head that reads the same table, and its
row decays: all such rows are moved alike. What they have in common soon outweighs the noise that each began with, so
they point nearly the same way: a tight cone. Tokens that do occur are pulled apart. Norms do not show this (in a tied
table the untouched rows can have the highest of all), and no list of suspicious tokens is needed. The rule:

1. Find the directions around which rows crowd most, in a sample of the table.
2. Count rows by their angle to such a direction. A cone is there if the count per degree falls to a tenth of its peak
   and rises again further out, where the other tokens are. Groups of like meaning thin out without such a gap.
3. The cone's axis is the mean direction of its inner half; its edge is the angle at which the count has fallen to a
   tenth of the peak. What lies inside is under-trained. The next cone is looked for among the rest; one that overlaps
   an earlier one holds rows that training has begun to pull out of it, and is none.

It finds no rows that were never pushed at all: those of an untied input table keep the noise that they began with,
which points nowhere. The rows of their free head are pushed; `health` looks at those, if it is given them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from embedlayer.analysis.rows import Rows
from embedlayer.tables.dense import TableLike

WIDEST = 45.0
"""Degrees from the axis at which a cone may be densest: beyond, two of its rows are less than half alike."""

FALL = 10.0
"""A cone ends where rows are this many times rarer than at its densest angle."""

RISE = 3.0
"""And further out they must be this many times denser again than where they are rarest."""

FEWEST = 16
"""Rows in a cone: fewer cannot be told from tokens of like meaning, such as the ten digits of a small vocabulary."""

FEWEST_SAMPLED = 6
"""Of these in the sample, where it is a small part of the table."""

MOST_CONES = 8
SAMPLE, SEEDS = 16384, 4096
NEIGHBOURS = (8, 64)
TRIES = 12


@dataclass(frozen=True)
class Cone:
    """Rows that point the same way.

    Attributes:
        axis: Unit vector `(D,)`, the mean direction of the inner half.
        size: Rows inside the edge.
        angle: Median angle of these rows to the axis, in degrees.
        edge: Angle at which the cone ends, in degrees.
        similarity: Mean cosine of two different rows inside.
    """

    axis: Float[Tensor, " D"]
    size: int
    angle: float
    edge: float
    similarity: float


@dataclass(frozen=True)
class UnderTrained:
    """How little each row has learned.

    Attributes:
        scores: `(V,)`, from -1 to 1: 1 on the axis of the nearest cone, 0 at its edge, -1 opposite to it. Without a
            cone, what lies nearest to the most crowded direction scores highest, and nothing is above 0. Rows without a
            direction (zero, NaN) score -1: `health` lists them apart.
        cones: What was found, largest first; none in a table whose rows are all trained, or none.
    """

    scores: Float[Tensor, " V"]
    cones: tuple[Cone, ...]

    @property
    def threshold(self) -> float:
        """The score above which a row lies inside a cone: 0, the cone's edge."""
        return 0.0

    @property
    def flagged(self) -> Bool[Tensor, " V"]:
        """The rows inside a cone."""
        return self.scores > self.threshold

    def explain(self) -> str:
        """Why rows are flagged, or why none are, in sentences."""
        if not self.cones:
            return (
                f"No rows crowd around one direction with a gap to the rest, so none are called under-trained. "
                f"Looked for {FEWEST} or more rows within {WIDEST:.0f} degrees of an axis."
            )
        return "\n".join(
            f"{cone.size:,} rows lie within {cone.edge:.0f} degrees of one direction, half of them within "
            f"{max(cone.angle, 0.1):.1f}; two of them have a cosine of {cone.similarity:.2f} on average. Beyond the "
            f"edge rows are less than a tenth as dense, and further out denser again."
            for cone in self.cones
        )


@torch.no_grad()
def under_trained_scores(table: TableLike) -> UnderTrained:
    """How little each row has learned: its angle to the cone of rows that were only ever pushed, never told apart.

    Works for tied tables and for output heads, and wherever unused rows were moved alike. Memory beyond the scores is a
    sample of 16,384 rows; the table is read a few times by chunks. The sample is the same in every call.

    Args:
        table: A `LookupTable`, or a plain tensor `(V, D)`.

    Raises:
        ShapeError: A plain tensor that is not `(V, D)`.

    Example:
        >>> words = torch.randn(400, 32)
        >>> unused = torch.randn(32) + 0.1 * torch.randn(100, 32)
        >>> found = under_trained_scores(torch.cat([words, unused]))
        >>> int(found.flagged[:400].sum()), int(found.flagged[400:].sum())
        (0, 100)
    """
    rows = Rows(table)
    free = _have_a_direction(rows)
    cones: list[Cone] = []
    sample = _sample(rows, free)
    fewest = max(FEWEST_SAMPLED, FEWEST * len(sample) // max(1, int(free.sum())))
    crowding = _crowding(sample)
    best: Tensor | None = None
    while len(cones) < MOST_CONES:
        found = None
        present = sample.any(dim=1)
        for candidate in _candidates(sample, crowding):
            best = candidate if best is None else best
            axis = _grown(sample, present, candidate, fewest)
            found = None if axis is None else _measured(rows, axis, free)
            if found is not None and not any(_overlap(found[0], cone) for cone in cones):
                break
            found = None
        if found is None:
            break
        cone, inside = found
        cones.append(cone)
        free &= ~inside
        gone = sample @ cone.axis > _cosine(cone.edge)
        crowding[gone[: len(crowding)]] = -torch.inf
        sample = sample.masked_fill(gone[:, None], 0.0)  # a row without direction is near nothing
    edges = [(cone.axis, _cosine(cone.edge)) for cone in cones]
    if best is not None and not cones:
        edges = [(best, 1.0)]
    return UnderTrained(_scores(rows, edges), tuple(sorted(cones, key=lambda cone: -cone.size)))


def _have_a_direction(rows: Rows) -> Bool[Tensor, " V"]:
    parts = [torch.linalg.vector_norm(chunk.float(), dim=1).cpu() for _, chunk in rows.chunks()]
    norms = torch.cat(parts) if parts else torch.empty(0)
    return (norms > 0) & norms.isfinite()


def _sample(rows: Rows, usable: Bool[Tensor, " V"]) -> Float[Tensor, "M D"]:
    """Unit rows, all or as many as are looked at, in an order that has nothing to do with their IDs."""
    ids = torch.nonzero(usable)[:, 0]
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))[:SAMPLE]
    return F.normalize(rows.take(ids[order]).float(), dim=1)


def _crowding(sample: Float[Tensor, "M D"]) -> Float[Tensor, "S K"]:
    """For the first rows of the sample: the cosine of the 8th and of the 64th nearest row."""
    places = torch.tensor([count for count in NEIGHBOURS if count < len(sample)], dtype=torch.int64)
    if not len(places):
        return torch.empty(0, 0)
    parts = [
        (seeds @ sample.T).topk(int(places[-1]) + 1, dim=1).values[:, places] for seeds in sample[:SEEDS].split(256)
    ]
    return torch.cat(parts)


def _candidates(sample: Float[Tensor, "M D"], crowding: Float[Tensor, "S K"]) -> Iterator[Float[Tensor, " D"]]:
    """Directions around which rows crowd, from the most crowded on, each moved to the middle of its crowd."""
    seeds = sample[: len(crowding)]
    for column in range(crowding.shape[1]):
        left = crowding[:, column].clone()
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


def _grown(
    sample: Float[Tensor, "M D"], present: Bool[Tensor, " M"], axis: Float[Tensor, " D"], fewest: int
) -> Float[Tensor, " D"] | None:
    """The axis of the cone around a direction, among what is present of the sample; `None` if there is no cone."""
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


def _measured(
    rows: Rows, axis: Float[Tensor, " D"], free: Bool[Tensor, " V"]
) -> tuple[Cone, Bool[Tensor, " V"]] | None:
    """The cone around an axis, over all rows, and which rows are in it."""
    cosines, edge = _seen_from(rows, axis, free)
    if edge is None:
        return None
    inner = cosines.topk(max(1, int((cosines > _cosine(edge)).sum()) // 2)).indices
    axis = F.normalize(_sum_of_units(rows, torch.zeros_like(free).index_fill_(0, inner, True)), dim=0).float()
    cosines, edge = _seen_from(rows, axis, free)
    if edge is None:
        return None
    inside = cosines > _cosine(edge)
    count = int(inside.sum())
    total = float(_sum_of_units(rows, inside).square().sum())
    angle = math.degrees(math.acos(min(1.0, float(cosines[inside].median()))))
    similarity = (total - count) / (count * (count - 1))  # |sum of units|^2 = count + the cosines of all pairs
    return Cone(axis, count, angle, edge, min(1.0, similarity)), inside


def _seen_from(
    rows: Rows, axis: Float[Tensor, " D"], free: Bool[Tensor, " V"]
) -> tuple[Float[Tensor, " V"], float | None]:
    """Cosines of the free rows with an axis (-2 for the others), and the edge of the cone around it."""
    cosines = _cosines(rows, axis).where(free, -2.0)
    return cosines, _edge(cosines[free], FEWEST)


def _overlap(cone: Cone, earlier: Cone) -> bool:
    """Whether a cone is what an earlier one left over: rows that training has begun to pull out of it."""
    between = math.degrees(math.acos(max(-1.0, min(1.0, float(cone.axis @ earlier.axis)))))
    return between < cone.edge + earlier.edge


def _edge(cosines: Float[Tensor, " N"], fewest: int) -> float | None:
    """Degrees from an axis at which the cone around it ends, by the rows' cosines with it; `None` if there is none."""
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
    padded = F.pad(counts[None, None], (len(weights) // 2,) * 2, mode="replicate")
    smooth: Tensor = F.conv1d(padded, weights.to(counts)[None, None])[0, 0]
    return smooth


def _scores(rows: Rows, edges: list[tuple[Tensor, float]]) -> Float[Tensor, " V"]:
    """The largest of the scores by each axis: `(cos - edge) / (1 -+ edge)` above and below the edge's cosine."""
    scores = torch.full((len(rows),), -1.0, dtype=torch.float64)
    for axis, edge in edges:
        excess = _cosines(rows, axis) - edge
        excess = excess / torch.where(excess > 0, 1 - edge, 1 + edge).clamp_min(1e-12)
        scores = torch.maximum(scores, excess.nan_to_num(nan=-1.0).clamp(-1.0, 1.0 if edge < 1 else 0.0))
    return scores.float()


def _cosines(rows: Rows, axis: Float[Tensor, " D"]) -> Float[Tensor, " V"]:
    """Cosine of each row with a direction; NaN for rows without one.

    In float64: near the axis a cosine in float32 is 1 but for its last digits, which differ from machine to machine.
    """
    axis = F.normalize(axis.double(), dim=0)
    parts = []
    for _, chunk in rows.chunks():
        wide = chunk.double()
        norms = torch.linalg.vector_norm(wide, dim=1)
        parts.append((wide @ axis.to(wide.device) / norms.where(norms > 0, torch.nan)).cpu())
    return torch.cat(parts).nan_to_num(nan=torch.nan, posinf=torch.nan, neginf=torch.nan).clamp(-1.0, 1.0)


def _sum_of_units(rows: Rows, chosen: Bool[Tensor, " V"]) -> Float[Tensor, " D"]:
    total = torch.zeros(rows.embed_dim, dtype=torch.float64)
    for start, chunk in rows.chunks():
        here = chosen[start : start + len(chunk)]
        if here.any():
            total += F.normalize(chunk[here.to(chunk.device)].double(), dim=1).sum(0).cpu()
    return total


def _mean_direction(units: Float[Tensor, "N D"]) -> Float[Tensor, " D"]:
    return F.normalize(units.sum(0), dim=0)


def _cosine(degrees: float) -> float:
    return math.cos(math.radians(degrees))
