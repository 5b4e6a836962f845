"""Measure the geometry of a table: principal components, spectrum, isotropy, and norms by frequency."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.analysis.row_reader import RowReader
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.tables.conversions import TableLike

CHUNK_ROWS = 8192  # rows widened to float64 at a time


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
    """
    table = RowReader(rows)
    width, finite = table.embed_dim, table.norms().isfinite()
    if not len(table) or (skip_nonfinite and not finite.any()):
        raise SizeError(f"PCA needs at least one row of finite numbers; found {len(table)} rows of width {width}.")
    if not 1 <= num_components <= width:
        raise SizeError(f"Rows of width {width} have 1 to {width} components; num_components is {num_components}.")
    if not (skip_nonfinite or finite.all()):
        broken = torch.nonzero(~finite)[:, 0]
        raise ShapeError(
            f"{len(broken)} of {len(table)} rows hold NaN or infinity, the first is row {int(broken[0])}; "
            f"PCA needs finite numbers. Pass skip_nonfinite=True to leave those rows out."
        )
    moments = _moments(table, finite)
    directions = moments.directions[:num_components]
    largest = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True))
    components = directions * largest.sign()
    coordinates = components.new_full((len(table), num_components), math.nan)
    coordinates[finite] = torch.cat(
        [(chunk - moments.mean) @ components.T for chunk in table.wide_chunks(finite, CHUNK_ROWS)]
    )
    return PrincipalComponents(
        coordinates=coordinates * (moments.variances[:num_components] > 0),
        components=components,
        explained_variance_ratio=_shares(moments.variances)[:num_components],
        mean=moments.mean,
    )


class _Moments(NamedTuple):
    """The mean of rows `(D,)`, their principal directions `(D, D)`, and the variance along each of these `(D,)`."""

    mean: Tensor
    variances: Tensor
    directions: Tensor


def _moments(rows: RowReader, mask: Bool[Tensor, " V"]) -> _Moments:
    """Compute the mean of the kept rows and their variance along each principal direction, in float64."""
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
    return _Moments(mean, variances.where(variances > rounding, 0.0) / max(1, count), directions)


@torch.no_grad()
def variance_shares(table: TableLike) -> Float[Tensor, " D"]:
    """Compute the share of the variance along each principal component, in descending order, in float64 on the CPU."""
    rows = RowReader(table)
    return _shares(_moments(rows, rows.norms().isfinite()).variances).cpu()


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

    The table is read five times in chunks. The work is of order `V D^2`, the memory `D x D`.

    Args:
        table: A `LookupTable`, an `nn.Embedding`, or a tensor or array `(V, D)`.

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
    moments = _moments(rows, usable)
    shares = _shares(moments.variances.sqrt())
    units = torch.zeros_like(moments.mean)
    for chunk in rows.wide_chunks(usable, CHUNK_ROWS):
        units += F.normalize(chunk, dim=1, eps=0.0).sum(0)
    count = int(usable.sum())
    pairs = max(1, count * (count - 1))
    return TableGeometry(
        rows=count,
        embed_dim=rows.embed_dim,
        spectrum=moments.variances,
        effective_rank=float(torch.special.entr(shares).sum().exp()),
        isotropy=_isotropy(rows, usable, moments),
        mean_cosine=(float(units @ units) - count) / pairs,
        mean_norm=float(torch.linalg.vector_norm(moments.mean) / norms[usable].mean()),
    )


def _isotropy(rows: RowReader, mask: Bool[Tensor, " V"], moments: _Moments) -> float:
    """Return the isotropy of the kept rows: `min Z(c) / max Z(c)` where `Z(c)` sums `exp(c . row)`."""
    second = moments.directions.T @ (moments.variances[:, None] * moments.directions)
    second += moments.mean[:, None] * moments.mean
    directions = torch.linalg.eigh(second).eigenvectors
    logs = torch.full((2, len(directions)), -math.inf, dtype=torch.float64, device=directions.device)
    for chunk in rows.wide_chunks(mask, CHUNK_ROWS):
        if len(chunk):
            products = chunk @ directions
            both = torch.stack([products.logsumexp(0), (-products).logsumexp(0)])
            logs = torch.logaddexp(logs, both)
    return float((logs.min() - logs.max()).exp())


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

    Example:
        >>> rows = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
        >>> [(band.low, band.high, band.median) for band in norms_by_frequency(rows, torch.tensor([0, 7, 9]))]
        [(0, 0, 1.0), (7, 7, 2.0), (9, 9, 3.0)]
    """
    rows = RowReader(table)
    if len(counts) != len(rows) or not len(rows):
        raise ShapeError(f"{len(rows)} rows need as many counts, at least one; found {len(counts)}.")
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
