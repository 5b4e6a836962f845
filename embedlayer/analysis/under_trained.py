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
4. Clusters of trained rows can have such gaps, too. What distinguishes unused rows is that few other rows are as close
   to one another as they are. The nearest neighbours of rows inside are therefore compared with those of rows outside,
   and a cone with peers of the same tightness is no evidence. What cannot be told is listed as undecided, with the
   reason, and no row of it is flagged. Where the number of occurrences of each token is known, it decides.

Rows without any gradient form no cone: unused rows of an untied input table keep the noise of their initialisation.
`analysis.random_rows` finds them, and the rows of the untied head show them; pass those to `table_health`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.analysis.geometry import chance_nearest_cosine
from embedlayer.analysis.nearest import nearest_rows
from embedlayer.analysis.row_reader import RowReader, drawn_ids
from embedlayer.core.errors import ShapeError
from embedlayer.tables.conversions import TableLike

WIDEST = 45.0
"""Largest angle from the axis, in degrees, at which a cone may be densest: two rows there have a cosine of 0.5."""

FALL = 10.0  # a cone ends at the angle where the density of rows is below its peak by this factor
RISE = 3.0  # beyond the edge the density must rise again by this factor over its minimum
FEWEST = 16  # least number of rows in a cone; fewer may be related tokens, such as the ten digits of a small vocabulary
FEWEST_SAMPLED = 6  # least number of a cone's rows in the sample of a large table

CONTRAST = 1.4
"""Rows outside must be less similar to their neighbours than rows inside by this factor, see `Cone.contrast`."""

CLEAR_CONTRAST = 3.0
"""The contrast of a cone that is accepted although the other rows are clustered, or most rows are in it."""

CLUSTERED = 0.33
"""The other rows are clustered if the noise of the closest of them is below its value by chance by this factor."""

FEW_CONES = 2  # more cones than this are clusters: unused rows form one, and rows that a resize added may form a second
CROWDED = 0.05  # the rows outside are judged by so large a share of them: by those most similar to their neighbours

PEER_SHARE = 0.25
"""A cone of similar tightness is a peer of another one if it has at least this share of the other's rows."""

NEAREST = 8
JUDGED, JUDGED_INSIDE = 512, 64
"""The neighbours of so many rows of the table, and of so many of each cone, are searched."""

LEAST_NOISE = 1e-3  # smallest `noise` of a cone: float32 cosines near 1 do not resolve less

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
        outside_cosine: Mean cosine of a row of the cone and a row outside; NaN if there is none.
        peak: Largest number of rows per degree of the angle to the axis, inside.
        valley: Smallest number of rows per degree in the gap between the cone and the other rows.
        noise: Noise of a row relative to what it shares with its neighbours, `sqrt((1 - c) / c)` with `c` the cosine
            with its 8th nearest row of the table; the median over the cone.
        contrast: `noise` of the closest `CROWDED` of the rows outside over that of the cone: how much more similar
            to their neighbours the rows of the cone are. Clusters of equal tightness have about 1; NaN without rows
            outside.
        never_occur: Share of the cone's tokens that never occur in the training text; `None` if that is unknown.
        doubt: Why the rows may be no unused ones; `""` for a cone whose rows are flagged.
    """

    axis: Float[Tensor, " D"]
    rows: int
    median_angle: float
    edge_angle: float
    mean_cosine: float
    outside_cosine: float = math.nan
    peak: float = math.nan
    valley: float = math.nan
    noise: float = math.nan
    contrast: float = math.nan
    never_occur: float | None = None
    doubt: str = ""

    def describe(self) -> str:
        """Return what was measured as one line of text."""
        occur = "" if self.never_occur is None else f" {100 * self.never_occur:.0f} % of them never occur in the text."
        contrast = "" if math.isnan(self.contrast) else f" Contrast {self.contrast:.1f} (clusters have 1)."
        return (
            f"{self.rows:,} rows are within {self.edge_angle:.0f} degrees of one direction, half of them within "
            f"{max(self.median_angle, 0.1):.1f} degrees. Their mean cosine is {self.mean_cosine:.2f} with one another "
            f"and {self.outside_cosine:.2f} with other rows. The gap around them: {self.peak:,.0f} rows per degree at "
            f"the peak, {self.valley:.1f} beyond the edge.{contrast}{occur}"
        )


@dataclass(frozen=True)
class UnderTrained:
    """The under-training score of each row, and the cones (narrow sets of directions) that unused rows form.

    Attributes:
        scores: One score per row, `(V,)`, from -1 to 1: 1 on the axis of the nearest cone, 0 at its edge, -1 opposite
            to it. If `cones` is empty, rows nearest to the direction with most rows score highest, but never above 0;
            without such a direction all score -1. Rows of undecided cones score at most 0. Zero rows and rows with NaN
            score -1; `table_health` lists them separately.
        is_undecided: Mask of the rows in a cone of `undecided`, `(V,)`.
        cones: The cones of unused rows, largest first; empty if the table has none.
        undecided: Other cones, largest first, whose `doubt` says why they may be clusters of trained rows; their rows
            are not flagged.
    """

    scores: Float[Tensor, " V"]
    is_undecided: Bool[Tensor, " V"]
    cones: tuple[Cone, ...]
    undecided: tuple[Cone, ...] = ()

    @property
    def threshold(self) -> float:
        """Return 0: rows with a higher score are inside a cone, because the edge of a cone scores 0."""
        return 0.0

    @property
    def flagged(self) -> Bool[Tensor, " V"]:
        """Return a mask `(V,)` of the under-trained rows: those with a score above `threshold`."""
        return self.scores > self.threshold

    def explain(self) -> str:
        """Return the reason why rows are flagged, one line of text per cone, or why no row is flagged.

        A last line tells of the undecided cones.
        """
        lines = [cone.describe() for cone in self.cones]
        if not self.cones and not self.undecided:
            lines.append(
                f"No rows form a narrow cone around one direction with a gap to the other rows, so no row is flagged. "
                f"A cone needs {FEWEST} rows or more within {WIDEST:.0f} degrees of its axis."
            )
        if self.undecided:
            count, first = len(self.undecided), self.undecided[0]
            rows = sum(cone.rows for cone in self.undecided)
            groups = "one group" if count == 1 else f"{count} groups"
            lines.append(
                f"Cannot tell: {rows:,} other rows form {groups} that may be clusters of trained tokens, so no row of "
                f"them is flagged. {'It' if count == 1 else 'The largest'}: {first.doubt} {first.describe()}"
            )
        return "\n".join(lines)


@torch.no_grad()
def under_trained_scores(table: TableLike, counts: Int[Tensor, " V"] | None = None) -> UnderTrained:
    """Score each row by its angle to the cones of unused rows: above 0 the row is under-trained.

    Training pushes the rows of tokens that never occur in one direction, so that they form a narrow cone (see the
    docstring of this module).
    The method works for tied tables and for output heads. The table is read a few times in chunks, and a sample of
    16,384 rows is kept in memory. The sample is the same in every call.

    Args:
        table: A `LookupTable`, an `nn.Embedding`, or a tensor or array `(V, D)`.
        counts: Number of occurrences of each token in the training text, `(V,)`; `None` if that is unknown. It decides
            about a cone if nearly all or few of its tokens never occur.

    Example:
        >>> words = torch.randn(400, 32)
        >>> unused = torch.randn(32) + 0.1 * torch.randn(100, 32)
        >>> scored = under_trained_scores(torch.cat([words, unused]))
        >>> int(scored.flagged[:400].sum()), int(scored.flagged[400:].sum())
        (0, 100)
    """
    rows = RowReader(table)
    if counts is not None and len(counts) != len(rows):
        raise ShapeError(f"{len(rows)} rows need as many counts; found {len(counts)}.")
    usable = rows.norms() > 0
    cones, best = _find_cones(rows, usable)
    accepted, undecided = _judged(rows, usable, cones, counts)
    edges = [(cone.axis, _cosine(cone.edge_angle)) for cone in accepted]
    if best is not None and not accepted:
        edges = [(best, 1.0)]  # a cone without width
    scores = _scores(rows, edges)
    is_undecided = torch.zeros(len(rows), dtype=torch.bool)
    for cone, inside in cones:
        if not any(cone.axis is other.axis for other in accepted):
            is_undecided |= inside
    scores[is_undecided] = scores[is_undecided].clamp_max(0.0)  # some are also near the edge of an accepted cone
    order = (tuple(sorted(each, key=lambda cone: -cone.rows)) for each in (accepted, undecided))
    return UnderTrained(scores, is_undecided, *order)


def _find_cones(
    rows: RowReader, usable: Bool[Tensor, " V"]
) -> tuple[list[tuple[Cone, Bool[Tensor, " V"]]], Float[Tensor, " D"] | None]:
    """Find narrow cones of rows with a gap around them, clusters of trained rows included.

    Return each cone with the mask of its rows, and the direction with the highest density of rows; `None` if no
    direction is dense.
    """
    free = usable.clone()
    cones: list[tuple[Cone, Tensor]] = []
    sample = F.normalize(rows.take(drawn_ids(free, SAMPLE)).float())
    fewest = max(FEWEST_SAMPLED, FEWEST * len(sample) // max(1, int(free.sum())))
    densities = _densities(sample)
    best: Tensor | None = None
    while len(cones) < MOST_CONES:
        measured = None
        present = sample.any(dim=1)
        for candidate in _candidates(sample, densities):
            best = candidate if best is None else best
            axis = _refined_axis(sample, present, candidate, fewest)
            measured = None if axis is None else _measure_cone(rows, axis, free)
            if measured is not None and not any(
                float(measured[0].axis @ cone.axis) > _cosine(min(180.0, measured[0].edge_angle + cone.edge_angle))
                for cone, _ in cones
            ):
                break  # it overlaps no earlier cone
            measured = None
        if measured is None:
            break
        cone, inside = measured
        cones.append(measured)
        free &= ~inside
        inside_cone = sample @ cone.axis > _cosine(cone.edge_angle)
        densities[inside_cone[: len(densities)]] = -torch.inf
        sample = sample.masked_fill(inside_cone[:, None], 0.0)  # a zero row has cosine 0 with every row
    return cones, best


def _densities(sample: Float[Tensor, "M D"]) -> Float[Tensor, "S K"]:
    """Measure how dense the sample is around each of its first `SEEDS` rows.

    Return the cosines of each with its 8th and with its 64th nearest row: a larger cosine means more rows nearby. A
    small sample has one column, or none.
    """
    near = [count for count in NEIGHBOURS if count < len(sample)]
    if not near:
        return torch.empty(0, 0)
    seeds = sample[:SEEDS].split(256)
    return torch.cat([(each @ sample.T).topk(near[-1] + 1, dim=1).values[:, near] for each in seeds])


def _scores(rows: RowReader, edges: list[tuple[Float[Tensor, " D"], float]]) -> Float[Tensor, " V"]:
    """Return the under-training score of each row: its largest score over the cones, -1 without a cone.

    With the cosine `edge` of a cone's edge angle and the cosine `cos` of the row with its axis, the score is
    `(cos - edge) / (1 - edge)` inside the cone and `(cos - edge) / (1 + edge)` outside. Zero rows and rows with NaN
    score -1. An `edge` of 1 is a cone without width: no score is above 0.
    """
    scores = torch.full((len(rows),), -1.0, dtype=torch.float64)
    for axis, edge in edges:
        excess = _cosines(rows, axis) - edge
        excess = excess / torch.where(excess > 0, 1 - edge, 1 + edge).clamp_min(1e-12)
        scores = torch.maximum(scores, excess.nan_to_num(nan=-1.0).clamp(-1.0, 1.0 if edge < 1 else 0.0))
    return scores.float()


def _judged(
    rows: RowReader,
    usable: Bool[Tensor, " V"],
    cones: list[tuple[Cone, Bool[Tensor, " V"]]],
    counts: Int[Tensor, " V"] | None,
) -> tuple[list[Cone], list[Cone]]:
    """Return the cones of unused rows, and the cones that may be clusters of trained rows, with the reason."""
    if not cones:
        return [], []
    generator = torch.Generator().manual_seed(0)
    places = drawn_ids(usable, JUDGED, generator)
    noises = _noises(rows, places)
    total = rows.total(usable, F.normalize)
    measured = []
    for cone, inside in cones:
        own, others = rows.total(inside, F.normalize), int(usable.sum()) - cone.rows
        noise = float(_noises(rows, drawn_ids(inside, JUDGED_INSIDE, generator)).median())
        outside_cosine = float(own @ (total - own)) / (cone.rows * others) if others else math.nan
        absent = None if counts is None else float((counts.cpu()[inside] == 0).double().mean())
        measured.append((replace(cone, noise=noise, outside_cosine=outside_cosine, never_occur=absent), inside))
    by_chance = float(_noise(torch.tensor(chance_nearest_cosine(int(usable.sum()), rows.embed_dim, NEAREST))))
    explained = torch.zeros_like(usable)  # rows of cones that are accepted already
    accepted, undecided = [], []
    for cone, inside in sorted(measured, key=lambda each: each[0].noise):
        outside = noises[~(explained | inside)[places]]
        contrast = float(outside.quantile(CROWDED)) / cone.noise if len(outside) else math.nan
        peers = sum(  # other cones about as tight, with enough rows to count
            other.axis is not cone.axis
            and max(cone.noise, other.noise) < CONTRAST * min(cone.noise, other.noise)
            and other.rows >= PEER_SHARE * cone.rows
            for other, _ in measured
        )
        cone = replace(cone, contrast=contrast)
        is_clustered = contrast * cone.noise < CLUSTERED * by_chance
        cone = replace(cone, doubt=_doubt(cone, peers, cone.rows / int(usable.sum()), is_clustered=is_clustered))
        if cone.doubt:
            undecided.append(cone)
        else:
            accepted.append(cone)
            explained |= inside
    if len(accepted) > FEW_CONES:
        clear = [cone for cone in accepted if cone.contrast >= CLEAR_CONTRAST or _is_confirmed(cone)][:1]
        doubt = f"There are {len(accepted)} such groups, and unused rows form one or two."
        undecided += [replace(cone, doubt=doubt) for cone in accepted if cone not in clear]
        accepted = clear
    return accepted, undecided


def _doubt(cone: Cone, peers: int, share: float, *, is_clustered: bool) -> str:
    """Return why a cone may be a cluster of trained rows, as a sentence; `""` if its rows are unused."""
    if cone.never_occur is not None and (cone.never_occur < 0.5 or _is_confirmed(cone)):
        return "" if _is_confirmed(cone) else "Most of its tokens occur in the training text."
    if peers:
        return f"{'Another group is' if peers == 1 else f'{peers} other groups are'} about as narrow."
    if not cone.contrast >= CONTRAST:
        return f"At least {100 * CROWDED:.0f} % of the other rows are about as close to their neighbours."
    if cone.contrast >= CLEAR_CONTRAST:
        return ""
    if share > 0.5:
        return "It holds most rows of the table."
    return "The other rows form clusters, too." if is_clustered else ""


def _is_confirmed(cone: Cone) -> bool:
    """Return whether nearly all tokens of a cone are known never to occur in the training text."""
    return cone.never_occur is not None and cone.never_occur >= 0.9


def _noises(rows: RowReader, ids: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Return for each row `sqrt((1 - c) / c)`, with `c` its cosine with its 8th nearest row of the table.

    If rows share a direction and have noise of their own, this is about the ratio of the noise to the shared part.
    """
    return _noise(nearest_rows(rows.table, ids, NEAREST).cosines[:, -1].double())


def _noise(cosines: Tensor) -> Tensor:
    """Return `sqrt((1 - c) / c)` of cosines, which are limited to where float32 is exact enough for it."""
    cosines = cosines.clamp(1e-3, 1.0)
    return ((1 - cosines) / cosines).sqrt().clamp_min(LEAST_NOISE)


def _candidates(sample: Float[Tensor, "M D"], densities: Float[Tensor, "S K"]) -> Iterator[Float[Tensor, " D"]]:
    """Yield unit vectors in whose direction many rows of the sample point, the densest direction first.

    Density is measured over the 8 nearest rows, and after at most `TRIES` candidates over the 64 nearest. A candidate
    starts at the seed row with the highest density, and is moved to the mean of its nearest rows, three times. Seeds
    near a candidate give no further ones.
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
                axis = F.normalize(sample[(sample @ axis).topk(NEIGHBOURS[column] + 1).indices].sum(0), dim=0)
            yield axis
            left[seeds @ axis > 0.7] = -torch.inf
            left[seed] = -torch.inf


def _refined_axis(
    sample: Float[Tensor, "M D"], present: Bool[Tensor, " M"], axis: Float[Tensor, " D"], fewest: int
) -> Float[Tensor, " D"] | None:
    """Return the axis of the cone around a direction, or `None` if the sample shows no cone there.

    The axis is moved to the mean direction of the cone's inner half until it settles, at most eight times.
    """
    for _ in range(8):
        cosines = sample @ axis
        gap = _gap(cosines[present], fewest)
        if gap is None:
            return None
        count = int((cosines > _cosine(gap[0])).sum())
        middle = F.normalize(sample[cosines.topk(max(1, count // 2)).indices].sum(0), dim=0)
        settled = bool(middle @ axis > 1 - 1e-7)
        axis = middle
        if settled:
            break
    return axis


def _measure_cone(
    rows: RowReader, axis: Float[Tensor, " D"], free: Bool[Tensor, " V"]
) -> tuple[Cone, Bool[Tensor, " V"]] | None:
    """Measure the cone around an axis over all rows of the table."""
    for is_refined in (False, True):
        cosines = _cosines(rows, axis).where(free, -2.0)
        gap = _gap(cosines[free], FEWEST)
        if gap is None:
            return None
        edge, peak, valley = gap
        inside = cosines > _cosine(edge)
        count = int(inside.sum())
        if not is_refined:  # the axis becomes the mean direction of the inner half
            inner = torch.zeros_like(free).index_fill_(0, cosines.topk(max(1, count // 2)).indices, True)
            axis = F.normalize(rows.total(inner, F.normalize), dim=0).float()
    total = float(rows.total(inside, F.normalize).square().sum())
    angle = math.degrees(math.acos(min(1.0, float(cosines[inside].median()))))
    similarity = (total - count) / (count * (count - 1))  # |sum of units|^2 = count + the cosines of all pairs
    return Cone(axis, count, angle, edge, min(1.0, similarity), peak=peak, valley=valley), inside


def _gap(cosines: Float[Tensor, " N"], fewest: int) -> tuple[float, float, float] | None:
    """Find the gap between the cone around an axis and the other rows; `None` if there is no cone.

    Rows are counted for each degree of their angle to the axis. The cone ends where this count falls to a tenth of its
    peak, with at least `fewest` rows inside. There is no cone if the peak is at `WIDEST` degrees or more, or if the
    count does not rise again beyond the end. Return the angle at which the gap begins, in degrees, and the rows per
    degree at the peak inside and in the gap.
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
    rises = beyond > RISE * beyond.cummin(0).values + 1.0  # 1 row per degree may be chance
    if not rises.any():
        return None
    valley = float(beyond[: int(rises.double().argmax()) + 1].min())
    return float(edge), float(peaks.values[edge]), valley


def _smoothed(counts: Float[Tensor, " N"], weights: Float[Tensor, " K"]) -> Float[Tensor, " N"]:
    """Return the counts smoothed by a convolution with `weights`, an odd number of them that sum to 1."""
    padded = F.pad(counts[None, None], (len(weights) // 2,) * 2, mode="replicate")
    smooth: Tensor = F.conv1d(padded, weights.to(counts)[None, None])[0, 0]
    return smooth


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


def _cosine(degrees: float) -> float:
    return math.cos(math.radians(degrees))
