"""Find what all rows of a table share: an offset, one dimension or direction that dominates, constant columns, scale.

Cosines of rows that share a large part show that part and hide the rest. So a table in which the shared part dominates
is reported as such, and its rows are judged without it (`without_shared_part`): the mean row is subtracted, and each
dimension is divided by its standard deviation.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from embedlayer.analysis.row_reader import RowReader, drawn_ids
from embedlayer.tables.conversions import TableLike

MOST_OFFSET = 0.9  # share of the squared length of all rows from which on the mean row dominates
MOST_VARIANCE = 0.5  # share of the variance from which on one dimension, or one direction, dominates
LEAST_SCALE, MOST_SCALE = 1e-6, 1e4  # range of the root mean square of the numbers of a usable table
CONSTANT = 1e-12  # a column is constant if its variance is at most this share of its mean square

NO_VARIANCE = 1e-10
"""A direction holds no variance if it has at most this share of the largest one: rounding to float32 causes less."""

LEAST_RANK = 0.5  # a table has few directions if its rank is below this share of the largest possible one

SAMPLED, FEWEST = 1024, 32


@dataclass(frozen=True)
class SharedVariance:
    """What the rows of a table share; zero rows and rows with NaN or infinity are left out.

    `scale` and the shares are NaN without rows, and the shares of the variance also if nothing varies.

    Attributes:
        rows: Number of rows that were measured, N.
        scale: Root mean square of their numbers.
        offset_share: Share of their squared length that the mean row holds, `N |mean|^2 / sum |row|^2`.
        dimension: Dimension with the largest variance.
        dimension_share: Its share of the variance.
        component_share: Share of the variance of the first principal component, of at most `SAMPLED` rows. That of all
            rows, with unused ones, is the first `explained_variance_ratio` of `TableGeometry`.
        constant: Columns in which all rows have the same number.
        rank: Number of directions with variance among the sampled rows.
        most_rank: The largest possible `rank`: the number of dimensions that are not constant, or that of the sampled
            rows less 1 if this is smaller.
    """

    rows: int
    scale: float
    offset_share: float
    dimension: int
    dimension_share: float
    component_share: float
    constant: tuple[int, ...]
    rank: int
    most_rank: int

    @property
    def is_measured(self) -> bool:
        """Return whether there are enough rows to say what they share; else nothing is said to dominate."""
        return self.rows >= FEWEST and self.most_rank > 1

    @property
    def is_out_of_range(self) -> bool:
        """Return whether the scale of the numbers is outside `LEAST_SCALE..MOST_SCALE`."""
        return self.rows > 0 and not LEAST_SCALE <= self.scale <= MOST_SCALE

    @property
    def has_dominant_dimension(self) -> bool:
        """Return whether one dimension holds more than `MOST_VARIANCE` of the variance."""
        return self.is_measured and self.dimension_share > MOST_VARIANCE

    @property
    def has_dominant_offset(self) -> bool:
        """Return whether the mean row holds more than `MOST_OFFSET` of the squared length of all rows."""
        return self.is_measured and self.offset_share > MOST_OFFSET

    @property
    def has_few_directions(self) -> bool:
        """Return whether the rows span less than `LEAST_RANK` of the dimensions that they could span."""
        return self.is_measured and self.rank < LEAST_RANK * self.most_rank

    def faults(self) -> Iterator[str]:
        """Yield one sentence for each fault, with its evidence."""
        if self.is_out_of_range:
            yield (
                f"The scale is out of range: the root mean square of the numbers is {self.scale:.2g}, and that of "
                f"usable tables is {LEAST_SCALE:.0e} to {MOST_SCALE:.0e}."
            )
        if self.is_measured and self.constant:
            named = ", ".join(map(str, self.constant[:5])) + ", ..." * (len(self.constant) > 5)
            columns = "1 column is" if len(self.constant) == 1 else f"{len(self.constant):,} columns are"
            yield f"{columns} constant, the same number in all rows (dimension {named})."
        if self.has_dominant_dimension:
            yield (
                f"Dimension {self.dimension} alone holds {100 * self.dimension_share:.0f} % of the variance: cosines "
                f"compare little else."
            )
        elif self.is_measured and self.component_share > MOST_VARIANCE:
            yield (
                f"One direction holds {100 * self.component_share:.0f} % of the variance: cosines compare little else."
            )
        if self.has_dominant_offset:
            yield (
                f"One offset that all rows share holds {100 * self.offset_share:.0f} % of their squared length: "
                f"cosines compare little else until the mean row is subtracted."
            )


@torch.no_grad()
def shared_variance(rows: RowReader, usable: Bool[Tensor, " V"]) -> SharedVariance:
    """Measure what the usable rows of a table share, in two passes over the table."""
    count, width = int(usable.sum()), rows.embed_dim
    if not count:
        return SharedVariance(0, math.nan, math.nan, 0, math.nan, math.nan, (), 0, 0)
    mean = rows.total(usable) / count
    variance = rows.total(usable, lambda chunk: (chunk.cpu() - mean).square_()) / count
    length, total = mean.square() + variance, float(variance.sum())
    constant = variance <= CONSTANT * length
    sample = rows.take(drawn_ids(usable, SAMPLED)).double()
    sample = sample - sample.mean(0)
    sample = sample / sample.abs().max().clamp_min(1e-300)
    gram = sample @ sample.T if len(sample) < width else sample.T @ sample
    spectrum = torch.linalg.eigvalsh(gram).clamp_min(0.0)
    largest, whole = float(spectrum[-1]), float(spectrum.sum())
    return SharedVariance(
        rows=count,
        scale=math.sqrt(float(length.mean())),
        offset_share=float(mean.square().sum() / length.sum()),
        dimension=int(variance.argmax()),
        dimension_share=float(variance.max()) / total if total else math.nan,
        component_share=largest / whole if whole else math.nan,
        constant=tuple(torch.nonzero(constant)[:, 0].tolist()),
        rank=int((spectrum > NO_VARIANCE * largest).sum()) if largest else 0,
        most_rank=min(len(sample) - 1, int((~constant).sum())),
    )


@torch.no_grad()
def without_shared_part(table: TableLike, shared: SharedVariance) -> TableLike:
    """Return the table in which rows are judged: the same table, or a float32 copy without the part that dominates.

    Of a table with a dominant offset or constant columns, the mean row (of these columns) is subtracted. With a
    dominant dimension, each dimension is divided by its standard deviation, and otherwise by the scale of the table.
    Zero rows stay zero, and constant columns become 0. A table of too few rows to measure is returned as it is.
    """
    changes = (shared.has_dominant_offset, shared.has_dominant_dimension, shared.is_out_of_range, shared.constant)
    if not shared.is_measured or not any(changes):
        return table
    rows = RowReader(table)
    values = torch.cat([chunk.cpu().double() for _, chunk in rows.chunks()])
    usable = values.isfinite().all(1) & values.any(1)
    mean, deviation = values[usable].mean(0), values[usable].std(0)
    subtracted = torch.full((rows.embed_dim,), shared.has_dominant_offset)
    subtracted[list(shared.constant)] = True
    values[usable] -= mean.where(subtracted, 0.0)
    values[usable] /= deviation.where(deviation > 0, 1.0) if shared.has_dominant_dimension else shared.scale
    values[:, list(shared.constant)] = 0.0
    return values.float()
