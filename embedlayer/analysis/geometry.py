"""Measure the geometry of a table, align and compare two tables, and compute the values of a position scheme."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.analysis.row_reader import RowReader
from embedlayer.data.tokenizer import word_tokenizer
from embedlayer.errors import ShapeError, SizeError
from embedlayer.positions.position import AdditivePosition, Position
from embedlayer.tables.conversions import TableLike
from embedlayer.vocab.tokenizer_match import common_tokens

CHUNK_ROWS = 8192
"""Rows widened to float64 at a time."""

TURNED, GREW = 2e-6, 5e-4
"""A row moved if 1 minus the cosine of its two rows, or the change of its norm beside the median, is larger than this.

Rounding to bfloat16 causes less."""


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
        skip_nonfinite: Leave out rows that hold NaN or infinity; their coordinates are NaN. By default such rows are an
            error.

    Raises:
        SizeError: There are no rows to measure, or `num_components` is outside 1..D.
        ShapeError: Rows hold NaN or infinity, and `skip_nonfinite` is false.
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
    """The mean of rows `(D,)`, their principal directions `(D, D)`, and the variance along each of these `(D,)`.

    Directions are unit vectors, one per row, and the largest variance is first.
    """

    mean: Tensor
    variances: Tensor
    directions: Tensor


def _moments(rows: RowReader, kept: Bool[Tensor, " V"]) -> _Moments:
    """Compute the mean of the kept rows and their variance along each principal direction, in float64.

    The table is read twice: once for the mean, then for the scatter about it. Variances that rounding alone explains
    are 0.

    Args:
        rows: The table.
        kept: Mask of the rows to measure, `(V,)`.
    """
    count, largest, total = int(kept.sum()), 0.0, torch.zeros(rows.embed_dim, dtype=torch.float64)
    for chunk in rows.wide_chunks(kept, CHUNK_ROWS):
        total = total.to(chunk) + chunk.sum(0)
        largest = max(largest, float(chunk.abs().max())) if len(chunk) else largest
    mean = total / max(1, count)
    width = mean.shape[-1]
    scatter = mean.new_zeros(width, width)
    for chunk in rows.wide_chunks(kept, CHUNK_ROWS):
        centred = chunk - mean
        scatter += centred.T @ centred
    variances, directions = torch.linalg.eigh(scatter)
    variances, directions = variances.flip(0).clamp_min(0.0), directions.flip(1).T  # eigh: narrowest first, in columns
    # equal rows differ from their mean by rounding alone, which must not be mistaken for a direction
    rounding = count * width * (1e-15 * largest) ** 2
    return _Moments(mean, variances.where(variances > rounding, 0.0) / max(1, count), directions)


@torch.no_grad()
def variance_shares(table: TableLike) -> Float[Tensor, " D"]:
    """Compute the share of the variance along each principal component, in descending order, in float64 on the CPU.

    Rows are read in chunks; rows that are not finite are left out. All shares are 0 if the rows are equal.

    Args:
        table: A `LookupTable`, or a plain tensor `(V, D)`.
    """
    rows = RowReader(table)
    return _shares(_moments(rows, rows.norms().isfinite()).variances).cpu()


def _shares(values: Float[Tensor, " D"]) -> Float[Tensor, " D"]:
    """Return float64 values divided by their sum; zeros if all values are 0."""
    return values / values.sum().clamp_min(torch.finfo(torch.float64).tiny)


@dataclass(frozen=True)
class TableGeometry:
    """Measures of how the rows of a table are spread over their D dimensions.

    Zero rows and rows with NaN are left out.

    Attributes:
        rows: Number of rows measured, N.
        embed_dim: Width of a row, D.
        spectrum: Variance along each principal direction, largest first, `(D,)`.
        effective_rank: `exp(-sum p ln p)`, with `p` the singular values of the centred rows over their sum: 1 if all
            rows are on a line, D if the variance is equal in every direction. Reference: Roy and Vetterli, 2007.
        isotropy: `min Z(c) / max Z(c)` with `Z(c) = sum exp(c . row)` over rows, for unit eigenvectors `c` of
            `rows.T @ rows`: 1 if no direction is preferred, near 0 if one is. It depends on the norms of the rows.
            Reference: Mu and Viswanath, 2018.
        mean_cosine: Mean cosine of two different rows: 0 if their directions are spread evenly.
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
        """Return the share of the total variance along each principal direction, `(D,)`."""
        return _shares(self.spectrum)

    def directions_for(self, share: float) -> int:
        """Return how many principal directions, largest variance first, together hold a share of the variance.

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
        table: A `LookupTable`, or a plain tensor `(V, D)`.

    Raises:
        ShapeError: A plain tensor is not `(V, D)`.
        SizeError: Every row is zero or holds NaN.

    Example:
        >>> even = table_geometry(torch.cat([torch.eye(4), -torch.eye(4)]))
        >>> round(even.effective_rank, 6), round(even.isotropy, 6), round(even.mean_cosine, 3)
        (4.0, 1.0, -0.143)
    """
    rows = RowReader(table)
    norms = rows.norms()
    kept = norms > 0
    if not kept.any():
        raise SizeError(f"All {len(rows)} rows of this table are zero or hold NaN, so it has no geometry.")
    moments = _moments(rows, kept)
    shares = _shares(moments.variances.sqrt())
    units = torch.zeros_like(moments.mean)
    for chunk in rows.wide_chunks(kept, CHUNK_ROWS):
        units += F.normalize(chunk, dim=1, eps=0.0).sum(0)
    count = int(kept.sum())
    pairs = max(1, count * (count - 1))
    return TableGeometry(
        rows=count,
        embed_dim=rows.embed_dim,
        spectrum=moments.variances,
        effective_rank=float(torch.special.entr(shares).sum().exp()),
        isotropy=_isotropy(rows, kept, moments),
        mean_cosine=(float(units @ units) - count) / pairs,
        mean_norm=float(torch.linalg.vector_norm(moments.mean) / norms[kept].mean()),
    )


def _isotropy(rows: RowReader, kept: Bool[Tensor, " V"], moments: _Moments) -> float:
    """Return the isotropy of the kept rows: `min Z(c) / max Z(c)` with `Z(c)` the sum of `exp(c . row)` over the rows.

    `c` runs over the unit eigenvectors of `rows.T @ rows` and over their negatives.

    Args:
        rows: The table.
        kept: Mask of the rows to measure.
        moments: The `_moments` of these rows, from which the eigenvectors are computed.
    """
    second = moments.directions.T @ (moments.variances[:, None] * moments.directions)
    second += moments.mean[:, None] * moments.mean
    directions = torch.linalg.eigh(second).eigenvectors
    logs = torch.full((2, len(directions)), -math.inf, dtype=torch.float64, device=directions.device)
    for chunk in rows.wide_chunks(kept, CHUNK_ROWS):
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
        table: A `LookupTable`, or a plain tensor `(V, D)`.
        counts: Number of occurrences of each token, `(V,)`.

    Raises:
        ShapeError: The number of counts differs from the number of rows, or is 0.

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
            found = counts[inside]
            bands.append(FrequencyBand(int(found.min()), int(found.max()), len(found), tenth, median, ninetieth))
    return bands


@dataclass(frozen=True)
class TableAlignment:
    """The rotation that aligns one table with another: `scale * before @ rotation` is nearest to `after`.

    Attributes:
        rotation: `(D, E)`, from the width of the first table to that of the second; its shorter side is orthonormal.
        scale: Factor on the rotated rows, one number for the whole table.
        residual: `|scale before rotation - after|^2 / |after|^2`: 0 if `after` is `before` rotated and scaled.
    """

    rotation: Float[Tensor, "D E"]
    scale: float
    residual: float


@torch.no_grad()
def align_tables(before: TableLike, after: TableLike, *, pairs: Int[Tensor, "N 2"] | None = None) -> TableAlignment:
    """Align two tables by orthogonal Procrustes: find the rotation that maps the rows of one onto those of another.

    Two models trained from different seeds may store equivalent tables in rotated coordinates, so their rows are
    comparable only after alignment. Two checkpoints of one training need no alignment. Zero rows and rows with NaN are
    left out.

    Args:
        before: The table to rotate.
        after: The table to align it with; its width may differ.
        pairs: ID in `before` and ID in `after` of each shared token, `(N, 2)`, see `shared_tokens`; `None` pairs equal
            IDs, and then both tables need equally many rows.

    Raises:
        ShapeError: The tables differ in length and `pairs` is `None`, or an ID in `pairs` is outside its table.
        SizeError: Every pair has a row that is zero or holds NaN.

    Reference: Schonemann, 1966: `U V^T` of the singular value decomposition of `before^T after`.

    Example:
        >>> rows, rotation = torch.randn(50, 4), torch.linalg.qr(torch.randn(4, 4)).Q
        >>> found = align_tables(rows, 3 * rows @ rotation)
        >>> torch.allclose(found.rotation.float(), rotation, atol=1e-5), round(found.scale, 4), round(found.residual, 4)
        (True, 3.0, 0.0)
    """
    tables, pairs = paired(before, after, pairs)
    norms = torch.stack([table.norms()[ids] for table, ids in zip(tables, pairs.T, strict=True)])
    usable = (norms > 0).all(0)
    squares, pairs = norms[:, usable].square().sum(1), pairs[usable]
    if not len(pairs):
        raise SizeError("No pair has two usable rows to align: each has a row that is zero or holds NaN.")
    products = torch.zeros(tables[0].embed_dim, tables[1].embed_dim, dtype=torch.float64)
    for left, right in _pair_chunks(tables, pairs):
        products += left.T @ right
    left_vectors, widths, right_vectors = torch.linalg.svd(products, full_matrices=False)
    rotation = left_vectors @ right_vectors
    rotated = float(squares[0])
    if rotation.shape[1] < rotation.shape[0]:  # a rotation into fewer dimensions loses a part of each row
        rotated = sum(float((left @ rotation).square().sum()) for left, _ in _pair_chunks(tables, pairs))
    total = float(widths.sum())
    scale = total / rotated
    residual = max(0.0, 1 - total * total / (rotated * float(squares[1])))
    return TableAlignment(rotation, scale, residual)


class MovedRow(NamedTuple):
    """The rows of one token in two tables.

    Attributes:
        before: ID of the token in the first table.
        after: ID of the token in the second table.
        cosine: Cosine of the two rows, after the alignment if there is one: 1 if the direction is unchanged.
        norm_before: Norm of the row in the first table.
        norm_after: Norm of the row in the second table.
    """

    before: int
    after: int
    cosine: float
    norm_before: float
    norm_after: float


@dataclass(frozen=True)
class RowMovement:
    """How the direction of each row differs between two tables.

    Attributes:
        pairs: IDs of each pair of rows: in the first and in the second table, `(N, 2)`.
        cosines: Cosine of the two rows, `(N,)`, after the alignment if there is one; NaN if one is zero or holds NaN.
        norms: Norm of the row in the first and in the second table, `(N, 2)`.
    """

    pairs: Int[Tensor, "N 2"]
    cosines: Float[Tensor, " N"]
    norms: Float[Tensor, "N 2"]

    @property
    def scale(self) -> float:
        """Return the median ratio of a row's norm in the second table to that in the first; NaN without rows.

        Weight decay and long training change all norms by a common factor. A row's own ratio is compared with this one.
        """
        ratios = self.norms[:, 1] / self.norms[:, 0]
        ratios = ratios[ratios.isfinite() & (ratios > 0)]
        return float(ratios.median()) if len(ratios) else math.nan

    @property
    def has_moved(self) -> Bool[Tensor, " N"]:
        """Return which rows moved by more than rounding: their direction, or their norm beside that of the others."""
        ratios = self.norms[:, 1] / self.norms[:, 0] / self.scale
        return (self.cosines < 1 - TURNED) | ((ratios - 1).abs() > GREW)

    def among(self, chosen: Bool[Tensor, " N"]) -> "RowMovement":
        """Return the movement of the chosen pairs alone, in their order."""
        return RowMovement(self.pairs[chosen], self.cosines[chosen], self.norms[chosen])

    def most(self, count: int = 10) -> list[MovedRow]:
        """Return the `count` rows whose direction changed most, lowest cosine first.

        Cosines that are equal to four decimals are ordered by the change of the norm, the largest first, and then as
        in `pairs`. Rows with a NaN cosine are left out.
        """
        return self._listed(self._order(descending=False), count)

    def least(self, count: int = 10) -> list[MovedRow]:
        """Return the `count` rows whose direction changed least, highest cosine first.

        Cosines that are equal to four decimals are ordered by the change of the norm, the smallest first, and then as
        in `pairs`. Rows with a NaN cosine are left out.
        """
        return self._listed(self._order(descending=True), count)

    def _order(self, *, descending: bool) -> Int[Tensor, " N"]:
        """Return the order of the pairs by cosine, and by the change of the norm among equal ones."""
        ratios = (
            (self.norms[:, 1] / self.norms[:, 0]).log().sub(math.log(self.scale)) if len(self.pairs) else self.cosines
        )
        by_norm = (
            ratios.double().abs().nan_to_num(nan=0.0).round(decimals=4).argsort(descending=not descending, stable=True)
        )
        cosines = self.cosines[by_norm].round(decimals=4)
        return by_norm[cosines.argsort(descending=descending, stable=True)]

    def _listed(self, order: Int[Tensor, " N"], count: int) -> list[MovedRow]:
        order = order[~self.cosines[order].isnan()][:count]
        cells = zip(self.pairs[order].tolist(), self.cosines[order].tolist(), self.norms[order].tolist(), strict=True)
        return [MovedRow(one, other, cosine, *norms) for (one, other), cosine, norms in cells]


@torch.no_grad()
def row_movement(
    before: TableLike,
    after: TableLike,
    *,
    alignment: TableAlignment | None = None,
    pairs: Int[Tensor, "N 2"] | None = None,
) -> RowMovement:
    """Measure how far the direction of each row changed between two tables; `.most(20)` lists the largest changes.

    Args:
        before: The earlier table.
        after: The later table.
        alignment: The result of `align_tables` for tables of two trainings; `None` compares rows as they are.
        pairs: ID in `before` and ID in `after` of each shared token, `(N, 2)`; `None` pairs equal IDs.

    Raises:
        ShapeError: The tables differ in length and `pairs` is `None`, or in width and `alignment` is `None`; or an ID
            in `pairs` is outside its table.

    Example:
        >>> row_movement(torch.eye(3), torch.tensor([[2.0, 0, 0], [0, 1, 0], [0, 1, 1]])).most(1)
        [MovedRow(before=2, after=2, cosine=0.707..., norm_before=1.0, norm_after=1.414...)]
    """
    tables, pairs = paired(before, after, pairs)
    if alignment is None and tables[0].embed_dim != tables[1].embed_dim:
        raise ShapeError(
            f"Rows of width {tables[0].embed_dim} and {tables[1].embed_dim} cannot be compared as they are: pass "
            f"alignment=align_tables(before, after)."
        )
    cosines, norms = [torch.empty(0, dtype=torch.float64)], [torch.empty(0, 2, dtype=torch.float64)]
    for left, right in _pair_chunks(tables, pairs):
        rotated = left if alignment is None else left @ alignment.rotation
        lengths = torch.stack([torch.linalg.vector_norm(side, dim=1) for side in (left, right)], dim=1)
        scale = torch.linalg.vector_norm(rotated, dim=1) * lengths[:, 1]
        cosines.append(((rotated * right).sum(1) / scale.where(scale > 0, math.nan)).clamp(-1.0, 1.0))
        norms.append(lengths)
    return RowMovement(pairs, torch.cat(cosines), torch.cat(norms))


def shared_tokens(before: Tokenizer | Sequence[str], after: Tokenizer | Sequence[str]) -> Int[Tensor, "N 2"]:
    """Return the tokens that two vocabularies have in common, one to one: ID in `before` and in `after`, `(N, 2)`.

    Tokens are matched by `vocab.tokenizer_match.common_tokens`: equal tokens first, and only then tokens that encode
    the same bytes of a text (`Ġdog` of GPT-2 and `▁dog` of LLaMA-2). No token is in two pairs. If the vocabularies are
    equal, every token pairs with itself.

    Args:
        before: The first tokenizer, or the text of each row; `""` for a row without a token. Of several rows with one
            text, the first is taken.
        after: The second tokenizer, or its texts.

    Example:
        >>> shared_tokens(["a", " dog", "dogs", ""], ["dogs", "a"]).tolist()
        [[2, 0], [0, 1]]
    """
    if not isinstance(before, Tokenizer) and not isinstance(after, Tokenizer) and list(before) == list(after):
        ids = torch.tensor([row for row, text in enumerate(before) if text], dtype=torch.int64)
        return ids[:, None].expand(-1, 2)
    one, other = (each if isinstance(each, Tokenizer) else word_tokenizer(each) for each in (before, after))
    return torch.tensor(common_tokens(one, other), dtype=torch.int64).reshape(-1, 2)


def paired(
    before: TableLike, after: TableLike, pairs: Int[Tensor, "N 2"] | None
) -> tuple[tuple[RowReader, RowReader], Int[Tensor, "N 2"]]:
    """Return readers of both tables, and the pairs of row IDs to compare, `(N, 2)`.

    Args:
        before: The first table.
        after: The second table.
        pairs: ID in the first and ID in the second table of each pair; `None` pairs equal IDs.

    Raises:
        ShapeError: The tables differ in length and `pairs` is `None`, or an ID in `pairs` is outside its table.
    """
    tables = RowReader(before), RowReader(after)
    sizes = torch.tensor([len(table) for table in tables])
    if pairs is None:
        if sizes[0] != sizes[1]:
            raise ShapeError(
                f"The tables have {sizes[0]} and {sizes[1]} rows: pass pairs, such as "
                f"shared_tokens(tokenizer, other_tokenizer)."
            )
        pairs = torch.arange(len(tables[0]))[:, None].expand(-1, 2)
    if bool(((pairs < 0) | (pairs >= sizes)).any()):
        raise ShapeError(f"A pair of rows is outside the tables of {sizes[0]} and {sizes[1]} rows.")
    return tables, pairs


def _pair_chunks(
    tables: tuple[RowReader, RowReader], pairs: Int[Tensor, "N 2"]
) -> Iterator[tuple[Float[Tensor, "rows D"], Float[Tensor, "rows E"]]]:
    """Yield the rows of both tables for consecutive pairs, in float64 on the CPU, a chunk of pairs at a time.

    Args:
        tables: The two tables.
        pairs: ID in the first and ID in the second table, one line per pair.
    """
    for part in pairs.split(CHUNK_ROWS):
        yield tables[0].take(part[:, 0]).double(), tables[1].take(part[:, 1]).double()


class PositionPicture(NamedTuple):
    """The values of a position scheme as a matrix to draw.

    Attributes:
        values: One row per position or distance, one column per dimension, channel pair or head, `(T, C)`.
        title: Title of the picture.
        row_label: Label of the rows.
        column_label: Label of the columns.
        value_label: Label of the values.
    """

    values: Float[Tensor, "T C"]
    title: str
    row_label: str
    column_label: str
    value_label: str


@torch.no_grad()
def position_values(position: Position, length: int) -> PositionPicture | None:
    """Return the values of a position scheme over `length` positions, read through the hook that the scheme overrides.

    | hook | rows | columns | value |
    |---|---|---|---|
    | `add` | positions | dimensions | the number added to a token's vector |
    | `rotate`, with a `head_dim` | positions | channel pairs | the cosine of the rotation angle |
    | `bias` | distances to the key | heads | the number added to the attention score |

    Args:
        position: Any scheme.
        length: Number of positions, T; fewer if the scheme has a smaller `max_seq_len`.

    Returns:
        The values, or `None` for a scheme without an effect.

    Raises:
        SizeError: `length` is below 1.
    """
    if length < 1:
        raise SizeError(f"position_values needs a length of at least 1; found {length}.")
    length = min(length, getattr(position, "max_seq_len", None) or length)
    if isinstance(position, AdditivePosition):
        values = position.vectors(torch.arange(length, device=position.device))
        return PositionPicture(values.float().cpu(), "Position vectors", "position", "dimension", "added to the token")
    if position.hook == "rotate" and getattr(position, "head_dim", None) is not None:
        return _rotation_cosines(position, length)
    return _bias_by_distance(position, length) if position.hook == "bias" else None


def _rotation_cosines(position: Position, length: int) -> PositionPicture:
    """Return the cosine of each channel pair's rotation angle at positions `0 .. length - 1`.

    The angles are measured, so any scheme that rotates works. Each unit vector of a head is rotated as a query. The
    channel that was 1 then holds the cosine, and the other nonzero channel is its partner in the pair.
    """
    device, width = position.device, cast(int, position.head_dim)
    places = torch.arange(max(length, 2), device=device)  # at position 0 alone nothing moves, so no pair shows
    units_BKTK = torch.eye(width, device=device)[None, :, None].expand(1, width, len(places), width).contiguous()
    rotated_KTK = F.normalize(position.rotate(units_BKTK, units_BKTK.clone(), places[None])[0][0], dim=-1)
    cosines_KT = rotated_KTK.diagonal(dim1=0, dim2=2).T
    moved_KK = rotated_KTK.abs().sum(1).fill_diagonal_(0.0)
    partners = moved_KK.argmax(1).where(moved_KK.amax(1) > 0, torch.arange(width, device=device))
    firsts = torch.arange(width, device=device) <= partners
    return PositionPicture(
        cosines_KT[firsts, :length].T.float().cpu(),
        "Rotation by position",
        "position",
        "pair of dimensions",
        "cosine of the angle",
    )


def _bias_by_distance(position: Position, length: int) -> PositionPicture:
    """Return the bias of each head on keys `0 .. length - 1` positions before the query, one row per distance."""
    keys = torch.arange(length, device=position.device)[None]
    bias_BHQK = position.bias(keys[:, -1:], keys)
    assert bias_BHQK is not None  # its scheme overrides this hook
    values = bias_BHQK[0, :, 0].flip(1).T
    return PositionPicture(
        values.float().cpu(), "Bias on attention scores", "distance back to the key", "head", "added to the score"
    )
