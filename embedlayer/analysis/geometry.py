"""Geometry of a table, alignment and movement between two tables, and the values of a position scheme."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.analysis.row_reader import RowReader
from embedlayer.data.tokenizer import fingerprint, token_text
from embedlayer.errors import ShapeError, SizeError
from embedlayer.positions.position import AdditivePosition, Position
from embedlayer.tables.dense import TableLike

CHUNK_ROWS = 8192
"""Rows widened to float64 at a time."""


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
def principal_components(rows: TableLike, num_components: int = 2) -> PrincipalComponents:
    """Compute exact principal components: the eigenvectors of the covariance, in float64.

    The sign of a component is arbitrary; here its entry of largest size is positive, so the same table always gives the
    same coordinates. Memory beyond the result is `D x D` and a chunk of rows.

    Args:
        rows: A table, or N plain rows of width D.
        num_components: Number of components, C, at most D.

    Raises:
        SizeError: There are no rows, or `num_components` is outside 1..D.
        ShapeError: Rows hold NaN or infinity.
    """
    table = RowReader(rows)
    count, width = table.vocab_size, table.embed_dim
    if count < 1:
        raise SizeError(f"PCA needs at least one row; found {count} rows of width {width}.")
    if not 1 <= num_components <= width:
        raise SizeError(f"Rows of width {width} have 1 to {width} components; num_components is {num_components}.")
    broken = torch.nonzero(~torch.cat([chunk.isfinite().all(dim=1) for _, chunk in table.chunks(CHUNK_ROWS)]))[:, 0]
    if len(broken):
        raise ShapeError(
            f"{len(broken)} of {count} rows hold NaN or infinity, the first is row {int(broken[0])}; "
            f"PCA needs finite numbers. Leave those rows out."
        )
    moments = _moments(_wide(table))
    directions = moments.directions[:num_components]
    largest = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True))
    components = directions * largest.sign()
    coordinates = torch.cat([(chunk - moments.mean) @ components.T for chunk in _wide(table)])
    return PrincipalComponents(
        coordinates=coordinates * (moments.variances[:num_components] > 0),
        components=components,
        explained_variance_ratio=moments.variances[:num_components] / _positive(moments.variances.sum()),
        mean=moments.mean,
    )


class _Moments(NamedTuple):
    """Mean and variance of N rows: variances `(D,)` in descending order, and their directions `(D, D)`, one per row."""

    total: int
    mean: Tensor
    variances: Tensor
    directions: Tensor


def _moments(chunks: "Chunks") -> _Moments:
    """Compute mean and principal variances of all rows in two passes: the mean, then the scatter about it."""
    count, largest, total = 0, 0.0, torch.zeros(())
    for chunk in chunks:
        count += len(chunk)
        total = total.to(chunk) + chunk.sum(0)
        largest = max(largest, float(chunk.abs().max())) if len(chunk) else largest
    mean = total / max(1, count)
    width = mean.shape[-1]
    scatter = mean.new_zeros(width, width)
    for chunk in chunks:
        centred = chunk - mean
        scatter += centred.T @ centred
    variances, directions = torch.linalg.eigh(scatter)
    variances, directions = variances.flip(0).clamp_min(0.0), directions.flip(1).T  # eigh: narrowest first, in columns
    # equal rows differ from their mean by rounding alone, which must not be mistaken for a direction
    rounding = count * width * (1e-15 * largest) ** 2
    return _Moments(count, mean, variances.where(variances > rounding, 0.0) / max(1, count), directions)


class Chunks:
    """Iterable over the rows of a table in float64, a chunk at a time; it can be iterated several times."""

    def __init__(self, rows: RowReader, *, sound_only: bool) -> None:
        self.rows = rows
        self.sound_only = sound_only

    def __iter__(self) -> Iterator[Float[Tensor, "rows D"]]:
        for _, chunk in self.rows.chunks(CHUNK_ROWS):
            wide = chunk.double()
            yield wide[(wide != 0).any(1) & wide.isfinite().all(1)] if self.sound_only else wide


def _wide(rows: RowReader, *, sound_only: bool = False) -> Chunks:
    return Chunks(rows, sound_only=sound_only)


def _positive(value: Tensor) -> Tensor:
    return value.clamp_min(torch.finfo(torch.float64).tiny)


@dataclass(frozen=True)
class TableGeometry:
    """How the rows of a table use the dimensions of their space. Zero rows and rows with NaN are left out.

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
        """Share of the total variance along each principal direction, `(D,)`."""
        return self.spectrum / _positive(self.spectrum.sum())

    def directions_for(self, share: float) -> int:
        """Return the number of principal directions that together hold a share of the variance.

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
    chunks = _wide(rows, sound_only=True)
    if not any(len(chunk) for chunk in chunks):
        raise SizeError(f"All {len(rows)} rows of this table are zero or hold NaN, so it has no geometry.")
    moments = _moments(chunks)
    widths = moments.variances.sqrt()
    shares = widths / _positive(widths.sum())
    units = torch.zeros_like(moments.mean)
    lengths = 0.0
    for chunk in chunks:
        norms = torch.linalg.vector_norm(chunk, dim=1, keepdim=True)
        units += (chunk / norms).sum(0)
        lengths += float(norms.sum())
    count = moments.total
    pairs = max(1, count * (count - 1))
    return TableGeometry(
        rows=count,
        embed_dim=rows.embed_dim,
        spectrum=moments.variances,
        effective_rank=float(torch.special.entr(shares).sum().exp()),
        isotropy=_isotropy(chunks, moments),
        mean_cosine=(float(units @ units) - count) / pairs,
        mean_norm=float(torch.linalg.vector_norm(moments.mean)) * count / lengths,
    )


def _isotropy(chunks: Chunks, moments: _Moments) -> float:
    """Return `min Z(c) / max Z(c)` over both signs of the eigenvectors of the rows' second moments."""
    second = moments.directions.T @ (moments.variances[:, None] * moments.directions)
    second += moments.mean[:, None] * moments.mean
    directions = torch.linalg.eigh(second).eigenvectors
    logs = torch.full((2, len(directions)), -math.inf, dtype=torch.float64, device=directions.device)
    for chunk in chunks:
        if len(chunk):
            products = chunk @ directions
            both = torch.stack([products.logsumexp(0), (-products).logsumexp(0)])
            logs = torch.logaddexp(logs, both)
    return float((logs.min() - logs.max()).exp())


@dataclass(frozen=True)
class FrequencyBand:
    """The norms of rows whose tokens are about equally frequent.

    Attributes:
        low: Fewest occurrences of a token of the band.
        high: Most occurrences.
        rows: Number of tokens.
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
    """Return the norms of rows in bands of token frequency: 0, 1, then bands that grow by a factor of four.

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
    norms = torch.cat([torch.linalg.vector_norm(chunk.double(), dim=1).cpu() for _, chunk in rows.chunks()])
    counts = counts.cpu()
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
        scale: Scalar factor.
        residual: `|scale before rotation - after|^2 / |after|^2`: 0 if the second table is the first one rotated.
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
        pairs: Row of `before` and row of `after` for each shared token, `(N, 2)`, see `shared_tokens`; `None` pairs
            equal IDs, and then both tables need equally many rows.

    Raises:
        ShapeError: The tables differ in length without `pairs`, or pairs are outside them.
        SizeError: No pair has two usable rows.

    Reference: Schonemann, 1966: `U V^T` of the singular value decomposition of `before^T after`.

    Example:
        >>> rows, rotation = torch.randn(50, 4), torch.linalg.qr(torch.randn(4, 4)).Q
        >>> found = align_tables(rows, 3 * rows @ rotation)
        >>> torch.allclose(found.rotation.float(), rotation, atol=1e-5), round(found.scale, 4), round(found.residual, 4)
        (True, 3.0, 0.0)
    """
    two = _Pairs(before, after, pairs)
    products = torch.zeros(two.before.embed_dim, two.after.embed_dim, dtype=torch.float64)
    lengths = torch.zeros(2, dtype=torch.float64)
    for left, right in two.chunks():
        sound = _sound(left) & _sound(right)
        left, right = left[sound], right[sound]
        products += left.T @ right
        lengths += torch.stack([left.square().sum(), right.square().sum()])
    if not lengths.min() > 0:
        raise SizeError("No pair has two usable rows to align: each has a row that is zero or holds NaN.")
    left_vectors, widths, right_vectors = torch.linalg.svd(products, full_matrices=False)
    rotation = left_vectors @ right_vectors
    rotated = float(lengths[0])
    if rotation.shape[1] < rotation.shape[0]:  # a rotation into fewer dimensions loses a part of each row
        rotated = sum(
            float((left[_sound(left) & _sound(right)] @ rotation).square().sum()) for left, right in two.chunks()
        )
    total = float(widths.sum())
    scale = total / rotated
    residual = max(0.0, 1 - total * total / (rotated * float(lengths[1])))
    return TableAlignment(rotation, scale, residual)


class MovedRow(NamedTuple):
    """The row of one token in two tables.

    Attributes:
        before: Its ID in the first table.
        after: Its ID in the second table.
        cosine: Cosine of its two rows, the first one rotated by the alignment: 1 if the direction is unchanged.
        norm_before: Norm of its first row.
        norm_after: Norm of its second row.
    """

    before: int
    after: int
    cosine: float
    norm_before: float
    norm_after: float


@dataclass(frozen=True)
class RowMovement:
    """The change of each row from one table to another.

    Attributes:
        pairs: Row of the first and row of the second table, `(N, 2)`.
        cosines: Cosine of the two rows, `(N,)`; NaN if one is zero or holds NaN.
        norms: Norms of the two rows, `(N, 2)`.
    """

    pairs: Int[Tensor, "N 2"]
    cosines: Float[Tensor, " N"]
    norms: Float[Tensor, "N 2"]

    def most(self, count: int = 10) -> list[MovedRow]:
        """Return the rows with the lowest cosine to their earlier row; equal cosines by ID."""
        return self._listed(self.cosines.nan_to_num(nan=math.inf).argsort(stable=True), count)

    def least(self, count: int = 10) -> list[MovedRow]:
        """Return the rows with the highest cosine to their earlier row; equal cosines by ID."""
        return self._listed(self.cosines.nan_to_num(nan=-math.inf).argsort(descending=True, stable=True), count)

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
        pairs: Row of `before` and row of `after` for each shared token, `(N, 2)`; `None` pairs equal IDs.

    Raises:
        ShapeError: The tables differ in length without `pairs`, or in width without an alignment, or pairs are outside
            them.

    Example:
        >>> row_movement(torch.eye(3), torch.tensor([[2.0, 0, 0], [0, 1, 0], [0, 1, 1]])).most(1)
        [MovedRow(before=2, after=2, cosine=0.707..., norm_before=1.0, norm_after=1.414...)]
    """
    two = _Pairs(before, after, pairs)
    if alignment is None and two.before.embed_dim != two.after.embed_dim:
        raise ShapeError(
            f"Rows of width {two.before.embed_dim} and {two.after.embed_dim} cannot be compared as they are: pass "
            f"alignment=align_tables(before, after)."
        )
    cosines, norms = [], []
    for left, right in two.chunks():
        rotated = left if alignment is None else left @ alignment.rotation
        lengths = torch.stack([torch.linalg.vector_norm(side, dim=1) for side in (left, right)], dim=1)
        scale = torch.linalg.vector_norm(rotated, dim=1) * lengths[:, 1]
        cosines.append(((rotated * right).sum(1) / scale.where(scale > 0, math.nan)).clamp(-1.0, 1.0))
        norms.append(lengths)
    if not cosines:
        return RowMovement(two.pairs, torch.zeros(0), torch.zeros(0, 2))
    return RowMovement(two.pairs, torch.cat(cosines), torch.cat(norms))


def shared_tokens(before: Tokenizer, after: Tokenizer) -> Int[Tensor, "N 2"]:
    """Return the tokens that two tokenizers share, by their readable text: pairs of IDs `(N, 2)`.

    A text that several tokens of one tokenizer have is left out. If the tokenizers are equal, every token pairs with
    itself.
    """
    ids = [sorted(set(one.get_vocab(with_added_tokens=True).values())) for one in (before, after)]
    if ids[0] == ids[1] and fingerprint(before) == fingerprint(after):
        return torch.tensor(ids[0], dtype=torch.int64)[:, None].expand(-1, 2)
    one, other = (_ids_by_text(tokenizer, own) for tokenizer, own in zip((before, after), ids, strict=True))
    found = [[token, other[text]] for text, token in one.items() if text in other]
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 2)


def _ids_by_text(tokenizer: Tokenizer, ids: list[int]) -> dict[str, int]:
    found: dict[str, int] = {}
    several: set[str] = set()
    for token in ids:
        text = token_text(tokenizer, token)
        if found.setdefault(text, token) != token:
            several.add(text)
    return {text: token for text, token in found.items() if text not in several}


class _Pairs:
    """Two tables and the pairs of rows to compare; raises ShapeError if a pair is outside a table."""

    def __init__(self, before: TableLike, after: TableLike, pairs: Tensor | None) -> None:
        self.before, self.after = RowReader(before), RowReader(after)
        if pairs is None:
            if len(self.before) != len(self.after):
                raise ShapeError(
                    f"The tables have {len(self.before)} and {len(self.after)} rows: pass pairs, such as "
                    f"shared_tokens(tokenizer, other_tokenizer)."
                )
            pairs = torch.arange(len(self.before))[:, None].expand(-1, 2)
        sizes = torch.tensor([len(self.before), len(self.after)])
        if bool(((pairs < 0) | (pairs >= sizes)).any()):
            raise ShapeError(
                f"A pair of rows lies outside the tables of {len(self.before)} and {len(self.after)} rows."
            )
        self.pairs = pairs

    def chunks(self) -> Iterator[tuple[Float[Tensor, "rows D"], Float[Tensor, "rows E"]]]:
        """Yield the paired rows of both tables in float64, a chunk at a time."""
        for part in self.pairs.split(CHUNK_ROWS):
            if len(part):
                yield self.before.take(part[:, 0]).double(), self.after.take(part[:, 1]).double()


def _sound(rows: Float[Tensor, "rows D"]) -> Tensor:
    return (rows != 0).any(1) & rows.isfinite().all(1)


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
    | `rotate` | positions | channel pairs | the cosine of the rotation angle |
    | `bias` | distances to the key | heads | the number added to the attention score |

    Args:
        position: Any scheme. One with a `max_seq_len` is evaluated up to it.
        length: Number of positions, T.

    Returns:
        The values, or `None` for a scheme without an effect.

    Raises:
        SizeError: `length` is below 1.
    """
    if length < 1:
        raise SizeError(f"position_values needs a length of at least 1; found {length}.")
    length = min(length, getattr(position, "max_seq_len", None) or length)
    if isinstance(position, AdditivePosition):
        return _added(position, length)
    if position.hook == "rotate":
        return _turned(position, length)
    return _biased(position, length) if position.hook == "bias" else None


def _added(position: AdditivePosition, length: int) -> PositionPicture:
    """Return the vectors that an additive scheme adds at positions `0 .. length - 1`."""
    values = position.vectors(torch.arange(length, device=position.device))
    return PositionPicture(values.float().cpu(), "Position vectors", "position", "dimension", "added to the token")


def _turned(position: Position, length: int) -> PositionPicture:
    """Return the cosine of each channel pair's rotation angle at positions `0 .. length - 1`.

    Each unit vector is rotated: its own channel then holds the cosine, and the other nonzero channel is its partner.
    """
    device, width = position.device, cast(int, position.head_dim)
    places = torch.arange(max(length, 2), device=device)  # at position 0 alone nothing moves, so no pair shows
    units_BKTK = torch.eye(width, device=device)[None, :, None].expand(1, width, len(places), width).contiguous()
    turned_KTK = F.normalize(position.rotate(units_BKTK, units_BKTK.clone(), places[None])[0][0], dim=-1)
    cosines_KT = turned_KTK.diagonal(dim1=0, dim2=2).T
    moved_KK = turned_KTK.abs().sum(1).fill_diagonal_(0.0)
    partners = moved_KK.argmax(1).where(moved_KK.amax(1) > 0, torch.arange(width, device=device))
    firsts = torch.arange(width, device=device) <= partners
    return PositionPicture(
        cosines_KT[firsts, :length].T.float().cpu(),
        "Rotation by position",
        "position",
        "pair of dimensions",
        "cosine of the angle",
    )


def _biased(position: Position, length: int) -> PositionPicture:
    """Return the bias of each head on a key `0 .. length - 1` positions before the query."""
    keys = torch.arange(length, device=position.device)[None]
    bias_BHQK = position.bias(keys[:, -1:], keys)
    assert bias_BHQK is not None  # its scheme overrides this hook
    values = bias_BHQK[0, :, 0].flip(1).T
    return PositionPicture(
        values.float().cpu(), "Bias on attention scores", "distance back to the key", "head", "added to the score"
    )
