"""Find rows whose norms are apart from all others, as rows that were multiplied by a factor are.

The norms of the rows of a trained table can differ by a factor of ten, so a limit on the norm itself says little. What
a table does not have by chance is a gap: no norm in a wide range, and a group of rows beyond it.

Let `x_1 >= x_2 >= ...` be the logarithms of the norms, or of their inverses for the shortest rows. If their tail falls
exponentially (norms then have a Pareto tail), the difference of two neighbours in this order exceeds `g` with the
probability

    P(x_k - x_(k+1) > g) = exp(-k g / s),

where `s` is the scale of the tail. It is the mean excess over the last of the `TAIL` rows that follow the gap (Hill's
estimate), so a heavy tail is expected to have wider gaps.

Reference: Hill, A simple general approach to inference about the tail of a distribution, 1975.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

FACTOR = 2.0  # smallest ratio of the norms at both ends of a gap
CHANCE = 1e-6  # largest probability of such a gap by chance; about `MOST` of the rows are tested
MOST = 0.1  # largest share of the rows beyond a gap

TAIL = 100
FEWEST = 64


@dataclass(frozen=True)
class NormOutliers:
    """Rows whose norms are beyond a gap.

    Attributes:
        ids: IDs of the rows, ascending.
        low: Smallest norm of these rows.
        high: Largest norm of these rows.
        nearest: Norm of the other row at the gap: the largest of the others if these rows are long, else the smallest.
        median: Median norm of the other rows.
        log10_chance: Logarithm to base 10 of the probability of so wide a gap, see this module's docstring.
    """

    ids: tuple[int, ...]
    low: float
    high: float
    nearest: float
    median: float
    log10_chance: float

    @property
    def are_long(self) -> bool:
        """Return whether these rows are longer than all others, not shorter."""
        return self.low > self.nearest


@torch.no_grad()
def norm_outliers(norms: Float[Tensor, " V"], usable: Bool[Tensor, " V"] | None = None) -> tuple[NormOutliers, ...]:
    """Return the rows that are longer than all others by a gap, and those that are shorter: none, one or two groups."""
    chosen = norms > 0 if usable is None else usable & (norms > 0)
    ids = torch.nonzero(chosen & norms.isfinite())[:, 0]
    if len(ids) < FEWEST:
        return ()
    logs = norms[ids].double().log()
    groups = (_beyond_gap(sign * logs) for sign in (1.0, -1.0))
    return tuple(_described(norms.double(), ids, *group) for group in groups if group is not None)


def _beyond_gap(logs: Float[Tensor, " N"]) -> tuple[Int[Tensor, " K"], Int[Tensor, " M"], float] | None:
    """Return the indices of the values beyond a gap and of the others, largest first, and log10 of the chance."""
    values, order = logs.sort(descending=True)
    most = min(int(MOST * len(values)), len(values) - TAIL // 2)
    counts = torch.arange(1, most + 1)
    last = (counts + TAIL).clamp_max(len(values) - 1)
    sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
    scale = (sums[last] - sums[counts]) / (last - counts) - values[last]
    gaps = values[counts - 1] - values[counts]
    chance = -counts * gaps / scale.clamp_min(1e-12)
    wide = torch.nonzero((gaps >= math.log(FACTOR)) & (chance <= math.log(CHANCE)))[:, 0]
    if not len(wide):
        return None
    place = int(wide[-1])
    return order[: place + 1], order[place + 1 :], float(chance[place]) / math.log(10)


def _described(
    norms: Float[Tensor, " V"], ids: Int[Tensor, " N"], inside: Tensor, others: Tensor, log10_chance: float
) -> NormOutliers:
    """Return a group of rows with its norms; `inside` and `others` are indices into `ids`, nearest to the gap first."""
    own, rest = norms[ids[inside]], norms[ids[others]]
    return NormOutliers(
        ids=tuple(ids[inside].sort().values.tolist()),
        low=float(own.min()),
        high=float(own.max()),
        nearest=float(rest[0]),
        median=float(rest.median()),
        log10_chance=log10_chance,
    )
