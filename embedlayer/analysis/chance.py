"""What measures of a table would be by chance: for rows of independent normal numbers, in a table of the same size.

| measure | how its value by chance is computed |
|---|---|
| mean cosine | exact: its expectation is 0; the standard deviation is that of a mean over uncorrelated pairs |
| cosine with the nearest row | exact: the median of the largest of N - 1 cosines of random directions |
| effective rank | the Marchenko-Pastur law, exact in the limit of large tables; within 1 % from 64 dimensions on |
| isotropy | measured in a seeded table of normal numbers with the same variance, of at most `NUMBERS` numbers |
| equal and nearly equal rows | none: the probability is below 1e-9 for every table of 8 dimensions or more |
"""

import math
from dataclasses import dataclass

import torch

from embedlayer.analysis.geometry import TableGeometry, table_geometry

NUMBERS = 1 << 24  # a table of more numbers is represented by its number of rows that has so many
STEPS = 20_000  # points of the numerical integrals


@dataclass(frozen=True)
class ChanceGeometry:
    """Measures of a table of independent normal numbers of the same size; see this module's docstring.

    Attributes:
        effective_rank: Effective rank.
        isotropy: Isotropy.
        isotropy_rows: Number of rows of the random table in which the isotropy was measured.
        mean_cosine: Expected mean cosine of two different rows: 0.
        mean_cosine_deviation: Standard deviation of that mean.
        nearest_cosine: Median cosine of a row with its nearest other row.
    """

    effective_rank: float
    isotropy: float
    isotropy_rows: int
    mean_cosine: float
    mean_cosine_deviation: float
    nearest_cosine: float


def chance_nearest_cosine(rows: int, embed_dim: int, place: int = 1) -> float:
    """Return the median cosine of a random direction with the nearest of `rows - 1` others; NaN below 2 rows."""
    if rows < 2:
        return math.nan
    if embed_dim == 1:
        return 1.0 if rows > 2 else 0.0
    angles = (torch.arange(STEPS, dtype=torch.float64) + 0.5) * (math.pi / STEPS)
    density = ((embed_dim - 2) * angles.sin().log()).exp()
    near = density.cumsum(0) / density.sum()  # probability of a smaller angle
    wanted = -math.expm1(-math.log(2) / (rows - 1)) if place == 1 else min(1.0, (place - 1 / 3) / (rows - 2 / 3))
    return math.cos(float(angles[int((near < wanted).sum().clamp_max(STEPS - 1))]))


def chance_effective_rank(rows: int, embed_dim: int) -> float:
    """Return the effective rank of `rows` centred rows of independent normal numbers, by the Marchenko-Pastur law."""
    count, other = sorted((max(1, rows - 1), embed_dim))
    ratio = count / other
    low, high = (1 - ratio**0.5) ** 2, (1 + ratio**0.5) ** 2
    turn = (torch.arange(STEPS, dtype=torch.float64) + 0.5) * (math.pi / STEPS)
    variance = (low + high) / 2 - (high - low) / 2 * turn.cos()
    weight = turn.sin().square() / variance  # density times the derivative of `variance`
    weight = weight / weight.sum()
    width = variance.clamp_min(0.0).sqrt()
    share = width / (weight * width).sum()
    return count * math.exp(-float((weight * torch.xlogy(share, share)).sum()))


def chance_geometry(measured: TableGeometry) -> ChanceGeometry:
    """Return what the measures of a table would be by chance; see this module's docstring.

    The isotropy of a table without variance is 1.

    Example:
        >>> chance = chance_geometry(table_geometry(torch.randn(2000, 32)))
        >>> chance.mean_cosine, round(chance.effective_rank)
        (0.0, 32)
    """
    rows, width = measured.rows, measured.embed_dim
    drawn_rows = max(1, min(rows, NUMBERS // width))
    scale = float(measured.spectrum.mean().sqrt())
    drawn = scale * torch.randn(drawn_rows, width, generator=torch.Generator().manual_seed(0))
    return ChanceGeometry(
        effective_rank=chance_effective_rank(rows, width),
        isotropy=table_geometry(drawn).isotropy if scale else 1.0,
        isotropy_rows=drawn_rows,
        mean_cosine=0.0,
        mean_cosine_deviation=math.sqrt(2 / (max(1, rows) * max(1, rows - 1) * width)),
        nearest_cosine=chance_nearest_cosine(rows, width),
    )
