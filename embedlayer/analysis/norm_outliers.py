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
from jaxtyping import Bool, Float
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


@torch.no_grad()
def norm_outliers(norms: Float[Tensor, " V"], usable: Bool[Tensor, " V"]) -> tuple[NormOutliers, ...]:
    """Return the rows that are longer than all others by a gap, and those that are shorter: none, one or two groups.

    Norms that are zero, NaN or infinite are left out. `usable` is the mask of the rows to look at; with fewer than
    `FEWEST` of them there is no outlier.
    """
    ids = torch.nonzero(usable & (norms > 0) & norms.isfinite())[:, 0]
    if len(ids) < FEWEST:
        return ()
    lengths, groups = norms[ids].double(), []
    for sign in (1.0, -1.0):  # the longest rows, then the shortest
        values, order = (sign * lengths.log()).sort(descending=True)
        most = min(int(MOST * len(values)), len(values) - TAIL // 2)
        counts = torch.arange(1, most + 1)
        last = (counts + TAIL).clamp_max(len(values) - 1)
        sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
        scale = (sums[last] - sums[counts]) / (last - counts) - values[last]
        gaps = values[counts - 1] - values[counts]
        chance = -counts * gaps / scale.clamp_min(1e-12)
        wide = torch.nonzero((gaps >= math.log(FACTOR)) & (chance <= math.log(CHANCE)))[:, 0]
        if len(wide):
            inside, others = order.tensor_split([int(wide[-1]) + 1])
            groups.append(
                NormOutliers(
                    ids=tuple(ids[inside].sort().values.tolist()),
                    low=float(lengths[inside].min()),
                    high=float(lengths[inside].max()),
                    nearest=float(lengths[others[0]]),
                    median=float(lengths[others].median()),
                    log10_chance=float(chance[wide[-1]]) / math.log(10),
                )
            )
    return tuple(groups)
