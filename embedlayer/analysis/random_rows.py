"""Find rows that cannot be told from random directions, such as rows that were added and never trained.

The rows of a trained table prefer some directions: their second moment `S = D mean(u u^T)`, `u` a row of length 1, is
far from the identity. A row of independent random numbers prefers none. Two measures show the difference:

- The **noise share** `u^T (S + I)^-1 u`: the share of a row's squared length that a Wiener filter, for a signal with
  second moment `S` and as much isotropic noise, attributes to noise. The row itself is left out of `S`.
- The **nearest cosine**, the largest cosine with another row. It shows tables whose directions are spread evenly but
  whose rows are related. It is only searched for rows whose noise share is as of random rows.

Both are measured for random directions (`PROBES` of them) in the same table. A row is distinct from random rows if one
measure is beyond a threshold that random rows exceed with a probability of `CHANCE`. Of the other rows, those that are
as random are told from those that are in doubt: let `p` be the share of random rows that differ more from the typical
random row, in the direction of trained rows. Random rows have all `p` alike; trained rows that look random have small
ones. The share of random rows follows from the number of rows with large `p` (Storey 2002). Rows are called random from
the least `p` on at which that share explains their number, but for few (`DOUBTFUL`).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.analysis.geometry import chance_nearest_cosine
from embedlayer.analysis.row_reader import RowReader, drawn_ids

CHANCE = 0.002  # share of random rows that are called distinct
LEVELS = (CHANCE, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3)  # thresholds of `p` that are tried, least first
ENDS = (0.5, 0.8)  # the share of random rows follows from the rows with larger `p`: the smaller result
UNTRAINED = 0.9  # if so large a share of the rows is not distinct, all of these are called random
DOUBTFUL, DOUBTFUL_OF_RANDOM = 0.005, 0.1
"""Rows that are called random although the share of random rows does not explain them are at most this share of all
rows, and this share of the random rows."""

FEWEST = 64
"""Least number of rows that are judged."""

MOST_BY_CHANCE = 0.98  # rows of a table in which random directions are as near to one another as this are not judged

PROBES = 8192
SAMPLED = 1 << 16  # rows from which the second moment is computed, at most
COLUMNS = 512  # dimensions of a wider table that are used
CANDIDATES = (512, 1 << 14)  # least and largest number of rows among which the nearest one is searched
SEARCHED = 1 << 14  # the search ends after so many rows if no more of them than `CHANCE` have a near row
PRODUCTS = 1 << 36  # multiplications of that search, about
COSINES_AT_ONCE = 1 << 22
NO_SIGNAL = 1e-6  # a direction with at most this share of the largest second moment is outside the span of the rows


class Thresholds(NamedTuple):
    """Limits of the two measures: a row beyond one of them differs from random rows.

    Attributes:
        noise_share: A smaller noise share differs.
        nearest: A larger nearest cosine differs.
    """

    noise_share: float
    nearest: float


NO_ROW = Thresholds(math.inf, -math.inf)  # no row is within them


@dataclass(frozen=True)
class RandomRows:
    """Which rows of a table cannot be told from random directions.

    Attributes:
        noise_shares: Noise share of each row, `(V,)`; NaN for rows that were not judged.
        nearest: Nearest cosine of each row whose noise share is not below `distinct.noise_share`, else NaN. In a large
            table it is the largest of a sample of rows.
        distinct: Thresholds beyond which a row is distinct from random rows.
        random: Thresholds up to which a row is called random. They equal `distinct` unless trained rows look random,
            too; rows between both are in doubt.
        share: Estimated share of the judged rows that are random.
    """

    noise_shares: Float[Tensor, " V"]
    nearest: Float[Tensor, " V"]
    distinct: Thresholds
    random: Thresholds
    share: float

    @property
    def is_judged(self) -> Bool[Tensor, " V"]:
        """Return a mask of the rows that were judged."""
        return self.noise_shares.isfinite()

    @property
    def is_distinct(self) -> Bool[Tensor, " V"]:
        """Return a mask of the rows that differ from random rows."""
        return (self.noise_shares < self.distinct.noise_share) | (self.nearest > self.distinct.nearest)

    @property
    def is_random(self) -> Bool[Tensor, " V"]:
        """Return a mask of the rows that cannot be told from random ones."""
        return (self.noise_shares >= self.random.noise_share) & ~(self.nearest > self.random.nearest)


@torch.no_grad()
def random_rows(rows: RowReader, usable: Bool[Tensor, " V"], strangers: Bool[Tensor, " V"] | None) -> RandomRows:
    """Compare each usable row of a table with random directions. The work is of order `V D^2`.

    `usable` are the rows that are neither zero nor hold NaN or infinity. `strangers` are rows that are known not to
    come from the training of the table: their nearest cosine is not measured, because random numbers may be those from
    which another row was trained. No row is judged in a table of fewer than `FEWEST` usable rows, or so narrow that
    random directions have near neighbours.
    """
    count, unknown = int(usable.sum()), torch.full((len(rows),), math.nan)
    if count < FEWEST or not chance_nearest_cosine(count, rows.embed_dim) < MOST_BY_CHANCE:
        nothing = Thresholds(math.nan, math.nan)
        return RandomRows(unknown, unknown, nothing, nothing, math.nan)
    generator = torch.Generator().manual_seed(0)
    columns = torch.randperm(rows.embed_dim, generator=generator)[:COLUMNS].sort().values
    sample = drawn_ids(usable, SAMPLED, generator)
    filter_, span = _wiener_filter(rows, sample, columns)
    probes = F.normalize(torch.randn(PROBES, len(columns), generator=generator) @ span, dim=1)
    null_noise = _noise_of(probes, filter_)
    ordered_noise = null_noise.sort().values
    parts = []
    for _, chunk in rows.chunks():
        wide = chunk.to("cpu", torch.float32)
        wide = wide if len(columns) == rows.embed_dim else wide[:, columns]
        parts.append(_noise_of(wide, filter_) / torch.linalg.vector_norm(wide, dim=1).square_())
    noise = torch.cat(parts)
    # a row of the sample is a part of the filter, which its share leaves out
    in_sample = torch.zeros_like(usable).index_fill_(0, sample, True)
    leverage = noise * len(columns) / len(sample)
    noise = torch.where(in_sample, noise / (1 - leverage).clamp_min(1e-6), noise).where(usable, math.nan)
    left = torch.nonzero(noise >= _quantile(ordered_noise, CHANCE / 2))[:, 0]
    # rows that do not come from their training: another row may have started from their numbers
    searchable = left if strangers is None else left[~strangers[left]]
    most = PRODUCTS // (max(1, len(left)) * len(columns))
    candidates = sample[: min(CANDIDATES[1], max(CANDIDATES[0], most))]
    others = _units(rows, candidates, columns)
    nearest = unknown.clone()
    place = torch.full((len(rows),), -1).index_copy_(0, candidates, torch.arange(len(candidates)))
    null_nearest = _nearest(probes, others, torch.full((PROBES,), -1))
    ordered = null_nearest.sort().values
    beyond = searched = 0
    for some in searchable[torch.randperm(len(searchable), generator=generator)].split(1 << 12):
        nearest[some] = _nearest(_units(rows, some, columns), others, place[some])
        beyond += int((nearest[some] > _quantile(ordered, 1 - CHANCE / 2)).sum())
        searched += len(some)
        if searched >= SEARCHED and beyond <= CHANCE * searched:
            break  # the nearest cosine tells no more than the noise share
    shares = _more_typical(noise[left], nearest[left], ordered_noise, ordered)
    null_shares = _more_typical(null_noise, null_nearest, ordered_noise, ordered)
    level, share = _level(shares, null_shares, count)
    distinct, random = (
        Thresholds(_quantile(ordered_noise, each / 2), _quantile(ordered, 1 - each / 2)) if each else NO_ROW
        for each in (CHANCE, level)
    )
    return RandomRows(noise, nearest, distinct, random, share)


def _level(shares: Float[Tensor, " L"], null_shares: Float[Tensor, " P"], count: int) -> tuple[float | None, float]:
    """Return the least of `LEVELS` from which on rows are called random, and the share of the rows that are random.

    `shares` has the values `p` of the rows that are not distinct, and `count` is the number of all rows. The level is
    `None` if trained rows look so random that no row can be called random.
    """

    def tail(values: Tensor, least: float, number: int) -> float:
        return int((values >= least).sum()) / number

    share = min(1.0, *(tail(shares, end, count) / tail(null_shares, end, len(null_shares)) for end in ENDS))
    if tail(shares, CHANCE, count) >= UNTRAINED:
        return CHANCE, share
    most = DOUBTFUL + DOUBTFUL_OF_RANDOM * share
    for level in LEVELS:
        if tail(shares, level, count) - share * tail(null_shares, level, len(null_shares)) <= most:
            return level, share
    return None, share


def _more_typical(
    noise: Float[Tensor, " N"], nearest: Float[Tensor, " N"], null_noise: Tensor, null_nearest: Tensor
) -> Float[Tensor, " N"]:
    """Return `p` of each row: twice the smaller share of random rows that are beyond it, at most 1.

    The random rows beyond it are those with a smaller noise share, and those with a larger nearest cosine. `null_noise`
    and `null_nearest` are sorted.
    """
    below = torch.searchsorted(null_noise, noise) / len(null_noise)
    above = 1 - torch.searchsorted(null_nearest, nearest.nan_to_num(-1.0), right=True) / len(null_nearest)
    return (2 * torch.minimum(below, above)).clamp_max(1.0)


def _quantile(ordered: Float[Tensor, " P"], share: float) -> float:
    """Return the value below which a share of some ordered values are."""
    return float(ordered[min(len(ordered) - 1, round(share * len(ordered)))])


def _wiener_filter(
    rows: RowReader, sample: Int[Tensor, " N"], columns: Int[Tensor, " C"]
) -> tuple[Float[Tensor, "C C"], Float[Tensor, "C C"]]:
    """Return `(S + I)^-1` of the second moment of a sample, and the projection on the span of its rows."""
    width = len(columns)
    moment = torch.zeros(width, width, dtype=torch.float64)
    for some in sample.split(1 << 13):
        units = _units(rows, some, columns)
        moment += (units.T @ units).double()
    values, vectors = torch.linalg.eigh(moment * (width / len(sample)))
    spanned = vectors[:, values > NO_SIGNAL * values[-1]]
    return ((vectors / (values.clamp_min(0.0) + 1)) @ vectors.T).float(), (spanned @ spanned.T).float()


def _noise_of(units: Float[Tensor, "N C"], filter_: Float[Tensor, "C C"]) -> Float[Tensor, " N"]:
    """Return `u^T F u` of each vector."""
    shares: Tensor = (units @ filter_).mul_(units).sum(1)
    return shares


def _nearest(
    units: Float[Tensor, "N C"], others: Float[Tensor, "M C"], places: Int[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """Return the largest cosine of each unit vector with other ones, its own place (-1 for none) left out."""
    nearest = []
    step = max(1, COSINES_AT_ONCE // len(others))
    for some, own in zip(units.split(step), places.split(step), strict=True):
        cosines = some @ others.T
        known = torch.nonzero(own >= 0)[:, 0]
        cosines[known, own[known]] = -1.0
        nearest.append(cosines.amax(1))
    return torch.cat(nearest)


def _units(rows: RowReader, ids: Int[Tensor, " N"], columns: Int[Tensor, " C"]) -> Float[Tensor, "N C"]:
    """Return some columns of some rows, each row normalised to length 1."""
    return F.normalize(rows.take(ids)[:, columns].float(), dim=1)
