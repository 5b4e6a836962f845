"""Measure the geometry of a table: principal components, spectrum, isotropy, norms, and what these are by chance."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.analysis.row_reader import RowReader, row_ids
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.tables.conversions import TableLike

CHUNK_ROWS = 8192  # rows widened to float64 at a time

NUMBERS = 1 << 24  # the chance of a table of more numbers is that of its number of rows that has so many
STEPS = 20_000  # points of the numerical integrals


@dataclass(frozen=True)
class PrincipalComponents:
    """Principal components of N rows of width D: `coordinates = (rows - mean) @ components.T`.

    Attributes:
        coordinates: Coordinates of each row along the C components, `(N, C)`.
        components: Orthonormal directions `(C, D)`, largest variance first.
        explained_variance_ratio: Share of the total variance along each component, `(C,)`; zeros if nothing varies.
        mean: The mean row, `(D,)`.
    """

    coordinates: Float[Tensor, "N C"]
    components: Float[Tensor, "C D"]
    explained_variance_ratio: Float[Tensor, " C"]
    mean: Float[Tensor, " D"]


@torch.no_grad()
def principal_components(
    rows: TableLike, num_components: int = 2, *, skip_nonfinite: bool = False
) -> PrincipalComponents:
    """Compute exact principal components: the eigenvectors of the covariance, in float64.

    The sign of a component is arbitrary; here its entry of largest size is positive, so the same table always gives the
    same coordinates. Memory beyond the result is `D x D` and a chunk of rows.

    Args:
        rows: A table, or N plain rows of width D.
        num_components: Number of components, C, at most D.
        skip_nonfinite: Leave out rows that hold NaN or infinity; their coordinates are NaN. By default such rows raise
            a `ShapeError`.

    Raises:
        ShapeError: A tensor or array is not `(V, D)` of floats; or rows hold NaN or infinity, and `skip_nonfinite` is
            false.
    """
    table = RowReader(rows)
    width, finite = table.embed_dim, table.norms().isfinite()
    if not 1 <= num_components <= width:
        raise SizeError(f"Rows of width {width} have 1 to {width} components; num_components is {num_components}.")
    if not (skip_nonfinite or finite.all()):
        broken = row_ids(~finite)
        found = f"{len(broken)} of {len(table)} rows hold NaN or infinity, the first is row {broken[0]}"
        raise ShapeError(f"{found}: pass skip_nonfinite=True to leave them out.")
    mean, variances, directions = _moments(table, finite)
    directions = directions[:num_components]
    largest = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True))
    components = directions * largest.sign()
    coordinates = components.new_full((len(table), num_components), math.nan)
    coordinates[finite] = torch.cat([(chunk - mean) @ components.T for chunk in table.wide_chunks(finite, CHUNK_ROWS)])
    return PrincipalComponents(
        coordinates=coordinates * (variances[:num_components] > 0),
        components=components,
        explained_variance_ratio=_shares(variances)[:num_components],
        mean=mean,
    )


def _moments(
    rows: RowReader, mask: Bool[Tensor, " V"]
) -> tuple[Float[Tensor, " D"], Float[Tensor, " D"], Float[Tensor, "D D"]]:
    """Return the mean of the kept rows, and the variances along their principal directions and these, in float64.

    The table is read twice: once for the mean, then for the scatter about it. Directions are unit vectors, one per row,
    and the largest variance is first. Variances that rounding explains are 0.
    """
    count, largest, total = int(mask.sum()), 0.0, torch.zeros(rows.embed_dim, dtype=torch.float64)
    for chunk in rows.wide_chunks(mask, CHUNK_ROWS):
        total = total.to(chunk) + chunk.sum(0)
        largest = max(largest, float(chunk.abs().max())) if len(chunk) else largest
    mean = total / max(1, count)
    width = mean.shape[-1]
    scatter = mean.new_zeros(width, width)
    for chunk in rows.wide_chunks(mask, CHUNK_ROWS):
        centred = chunk - mean
        scatter += centred.T @ centred
    variances, directions = torch.linalg.eigh(scatter)
    variances, directions = variances.flip(0).clamp_min(0.0), directions.flip(1).T  # eigh: narrowest first, in columns
    # equal rows differ from their mean by rounding alone, which must not be mistaken for a direction
    rounding = count * width * (1e-15 * largest) ** 2
    return mean, variances.where(variances > rounding, 0.0) / max(1, count), directions


@torch.no_grad()
def variance_shares(table: TableLike) -> Float[Tensor, " D"]:
    """Compute the share of the variance along each principal component, in descending order, in float64 on the CPU."""
    rows = RowReader(table)
    return _shares(_moments(rows, rows.norms().isfinite())[1]).cpu()


def _shares(values: Float[Tensor, " D"]) -> Float[Tensor, " D"]:
    """Return float64 values divided by their sum; zeros if all values are 0."""
    return values / values.sum().clamp_min(torch.finfo(torch.float64).tiny)


@dataclass(frozen=True)
class TableGeometry:
    """Measures of how the rows of a table are spread over their D dimensions.

    Zero rows and rows with NaN or infinity are left out.

    Attributes:
        rows: Number of rows measured, N.
        embed_dim: Width of a row, D.
        spectrum: Variance along each principal direction, largest first, `(D,)`.
        effective_rank: `exp(-sum p ln p)`, with `p` the singular values of the centred rows over their sum: 1 if all
            rows are on a line, D if the variance is equal in every direction. Reference: Roy and Vetterli, 2007.
        isotropy: `min Z(c) / max Z(c)` with `Z(c) = sum exp(c . row)` over rows, for unit eigenvectors `c` of
            `rows.T @ rows` and their negatives: 1 if no direction is preferred, near 0 if one is. It depends on the
            norms of the rows.
            Reference: Mu and Viswanath, 2018.
        mean_cosine: Mean cosine of two different rows: about 0 if their directions are spread evenly; 0 for one row.
        mean_norm: Norm of the mean row over the mean norm of a row: the share that all rows have in common.
    """

    rows: int
    embed_dim: int
    spectrum: Float[Tensor, " D"]
    effective_rank: float
    isotropy: float
    mean_cosine: float
    mean_norm: float

    @property
    def explained_variance_ratio(self) -> Float[Tensor, " D"]:
        """Return the share of the total variance along each principal direction, `(D,)`; zeros if nothing varies."""
        return _shares(self.spectrum)

    def directions_for(self, share: float) -> int:
        """Return how many principal directions, largest variance first, together hold a share of the variance.

        The result is at least 1, and D if nothing varies.

        Example:
            >>> measured = table_geometry(torch.diag(torch.tensor([3.0, 1.0, 1.0])) - 1 / 3)
            >>> measured.directions_for(0.5), measured.directions_for(1.0)
            (1, 2)
        """
        reached = self.explained_variance_ratio.cumsum(0) < share - 1e-12
        return min(self.embed_dim, int(reached.sum()) + 1)


@torch.no_grad()
def table_geometry(table: TableLike) -> TableGeometry:
    """Compute spectrum, effective rank, isotropy and mean cosine of a table, exactly, over all rows, in float64.

    The table is read four times in chunks. The work is of order `V D^2`, the memory `D x D`.

    Args:
        table: A `LookupTable`, an `nn.Embedding`, or a tensor or array `(V, D)`.

    Raises:
        SizeError: There are no rows, or every row is zero or holds NaN or infinity.

    Example:
        >>> even = table_geometry(torch.cat([torch.eye(4), -torch.eye(4)]))
        >>> round(even.effective_rank, 6), round(even.isotropy, 6), round(even.mean_cosine, 3)
        (4.0, 1.0, -0.143)
    """
    rows = RowReader(table)
    norms = rows.norms()
    usable = norms > 0
    if not usable.any():
        raise SizeError(f"All {len(rows)} rows of this table are zero or hold NaN, so it has no geometry.")
    mean, variances, directions = _moments(rows, usable)
    shares = _shares(variances.sqrt())
    second = directions.T @ (variances[:, None] * directions) + mean[:, None] * mean
    eigenvectors = torch.linalg.eigh(second).eigenvectors
    units = torch.zeros_like(mean)
    # `c` of the isotropy runs over the unit eigenvectors of `rows.T @ rows` and their negatives
    partition = torch.full((2, rows.embed_dim), -math.inf).to(mean)  # ln Z(c) and ln Z(-c)
    for chunk in rows.wide_chunks(usable, CHUNK_ROWS):
        units += F.normalize(chunk, dim=1, eps=0.0).sum(0)
        if len(chunk):
            products = chunk @ eigenvectors
            partition = torch.logaddexp(partition, torch.stack([products.logsumexp(0), (-products).logsumexp(0)]))
    count = int(usable.sum())
    pairs = max(1, count * (count - 1))
    return TableGeometry(
        rows=count,
        embed_dim=rows.embed_dim,
        spectrum=variances,
        effective_rank=float(torch.special.entr(shares).sum().exp()),
        isotropy=float((partition.min() - partition.max()).exp()),
        mean_cosine=(float(units @ units) - count) / pairs,
        mean_norm=float(torch.linalg.vector_norm(mean) / norms[usable].mean()),
    )


@dataclass(frozen=True)
class FrequencyBand:
    """A band of tokens that are about equally frequent, and the distribution of the norms of their rows.

    Attributes:
        low: Smallest number of occurrences of a token of the band.
        high: Largest number of occurrences of a token of the band.
        rows: Number of tokens in the band.
        p10: 10th percentile of the norms.
        median: Median of the norms.
        p90: 90th percentile of the norms.
    """

    low: int
    high: int
    rows: int
    p10: float
    median: float
    p90: float


def norms_by_frequency(table: TableLike, counts: Int[Tensor, " V"]) -> list[FrequencyBand]:
    """Return the distribution of row norms in each band of token frequency, rarest tokens first.

    The bands are 0, 1, 2 to 7, 8 to 31 occurrences and so on, by a factor of four. Bands without tokens and rows with
    NaN or infinity are left out.

    Args:
        table: A `LookupTable`, an `nn.Embedding`, or a tensor or array `(V, D)`.
        counts: Number of occurrences of each token, `(V,)`.

    Raises:
        ShapeError: A tensor or array is not `(V, D)` of floats; or the number of counts differs from the number of
            rows, or is 0.

    Example:
        >>> rows = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
        >>> [(band.low, band.high, band.median) for band in norms_by_frequency(rows, torch.tensor([0, 7, 9]))]
        [(0, 0, 1.0), (7, 7, 2.0), (9, 9, 3.0)]
    """
    rows = RowReader(table)
    norms, counts = rows.norms(), counts.cpu()
    bands = []
    edges, most = [0, 1, 2], int(counts.max())
    while edges[-1] <= most:
        edges.append(4 * edges[-1])
    for low, high in pairwise(edges):
        inside = (counts >= low) & (counts < high) & norms.isfinite()
        if inside.any():
            tenth, median, ninetieth = norms[inside].quantile(torch.tensor([0.1, 0.5, 0.9]).double()).tolist()
            times = counts[inside]
            bands.append(FrequencyBand(int(times.min()), int(times.max()), len(times), tenth, median, ninetieth))
    return bands


@dataclass(frozen=True)
class ChanceGeometry:
    """Measures of a table of independent normal numbers of the same size.

    | measure | how its value by chance is computed |
    |---|---|
    | mean cosine | exact: its expectation is 0; the standard deviation is that of a mean over uncorrelated pairs |
    | cosine with the nearest row | exact: the median of the largest of N - 1 cosines of random directions |
    | effective rank | the Marchenko-Pastur law, exact in the limit of large tables; within 1 % from 64 dimensions on |
    | isotropy | measured in a seeded table of normal numbers with the same variance, of at most `NUMBERS` numbers |
    | equal and nearly equal rows | none: the probability is below 1e-9 for every table of 8 dimensions or more |

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
    """Return the median cosine of a random direction with the nearest of `rows - 1` others; NaN below 2 rows.

    With `place` 8, the cosine with the 8th nearest; the median of the order statistic is then approximated, within 1 %.
    """
    if rows < 2:
        return math.nan
    if embed_dim == 1:
        return 1.0 if rows > 2 else 0.0
    # the angle has the density sin(angle)^(D - 2), and the largest of N cosines is below c with P(cosine < c)^N
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
    """Return what the measures of a table would be by chance: for independent normal numbers, as many and as wide.

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
