"""The shape of a table, how it moved between two tables, and the shape of a position scheme, as numbers."""

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

from embedlayer.analysis.rows import Rows
from embedlayer.errors import ShapeError, SizeError
from embedlayer.positions.position import AdditivePosition, Position
from embedlayer.tables.dense import TableLike
from embedlayer.data.tokenizer import fingerprint, token_text

CHUNK_ROWS = 8192
"""Rows widened to float64 at a time."""


@dataclass(frozen=True)
class Pca:
    """Principal components of N rows of width D: `coordinates = (rows - mean) @ components.T`.

    Attributes:
        coordinates: Where each row lies along the C components, `(N, C)`.
        components: Orthonormal directions `(C, D)`, widest first.
        explained_variance_ratio: Share of the total variance along each, `(C,)`; zeros where nothing varies.
        mean: The mean row, `(D,)`.
    """

    coordinates: Float[Tensor, "N C"]
    components: Float[Tensor, "C D"]
    explained_variance_ratio: Float[Tensor, " C"]
    mean: Float[Tensor, " D"]


@torch.no_grad()
def pca(rows: TableLike, num_components: int = 2) -> Pca:
    """Exact principal components: the eigenvectors of the covariance, in float64.

    A component's sign is free; here its entry of largest size is positive, so that the same table always gives the
    same picture. Memory beyond the result is `D x D` and a chunk of rows.

    Args:
        rows: N rows of width D, or a table, which is read by chunks.
        num_components: Directions to keep, C, at most D.

    Raises:
        SizeError: No rows, or `num_components` outside 1..D.
        ShapeError: Rows hold NaN or infinity.
    """
    table = Rows(rows)
    count, width = table.vocab_size, table.embed_dim
    if count < 1:
        raise SizeError(f"PCA needs at least one row; found {count} rows of width {width}.")
    if not 1 <= num_components <= width:
        raise SizeError(f"Rows of width {width} have 1 to {width} components; asked for {num_components}.")
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
    return Pca(
        coordinates=coordinates * (moments.variances[:num_components] > 0),
        components=components,
        explained_variance_ratio=moments.variances[:num_components] / _positive(moments.variances.sum()),
        mean=moments.mean,
    )


class _Moments(NamedTuple):
    """Mean and spread of N rows: variances widest first `(D,)`, and their directions `(D, D)`, one a row."""

    total: int
    mean: Tensor
    variances: Tensor
    directions: Tensor


def _moments(chunks: "Chunks") -> _Moments:
    """Of all rows, in two passes: the mean, then the scatter about it."""
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
    """Rows in float64, a chunk at a time, as often as they are asked for."""

    def __init__(self, rows: Rows, *, sound_only: bool) -> None:
        self.rows = rows
        self.sound_only = sound_only

    def __iter__(self) -> Iterator[Float[Tensor, "rows D"]]:
        for _, chunk in self.rows.chunks(CHUNK_ROWS):
            wide = chunk.double()
            yield wide[(wide != 0).any(1) & wide.isfinite().all(1)] if self.sound_only else wide


def _wide(rows: Rows, *, sound_only: bool = False) -> Chunks:
    return Chunks(rows, sound_only=sound_only)


def _positive(value: Tensor) -> Tensor:
    return value.clamp_min(torch.finfo(torch.float64).tiny)


@dataclass(frozen=True)
class TableGeometry:
    """How the rows of a table fill their space. Rows that are zero or hold NaN are left out.

    Attributes:
        rows: Rows that were measured, N.
        embed_dim: Their width, D.
        spectrum: Variance along each principal direction, widest first, `(D,)`.
        effective_rank: `exp(-sum p ln p)`, `p` the singular values of the centred rows over their sum: from 1, all
            rows on a line, to D, equally wide in every direction. Source: Roy and Vetterli, 2007.
        isotropy: `min Z(c) / max Z(c)`, `Z(c) = sum exp(c . row)` over rows, for unit eigenvectors `c` of
            `rows.T @ rows`: 1 where no direction is preferred, near 0 where one is. It depends on the rows' lengths.
            Source: Mu and Viswanath, 2018.
        mean_cosine: Mean cosine of two different rows: 0 where they point everywhere alike.
        mean_norm: Length of the mean row over the mean length of a row: what all rows have in common.
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
        """How many principal directions hold this share of the variance.

        Example:
            >>> measured = table_geometry(torch.diag(torch.tensor([3.0, 1.0, 1.0])) - 1 / 3)
            >>> measured.directions_for(0.5), measured.directions_for(1.0)
            (1, 2)
        """
        reached = self.explained_variance_ratio.cumsum(0) < share - 1e-12
        return min(self.embed_dim, int(reached.sum()) + 1)


@torch.no_grad()
def table_geometry(table: TableLike) -> TableGeometry:
    """Spectrum, effective rank, isotropy and mean cosine of a table, exactly, over all rows, in float64.

    Four passes by chunks; the work is of order `V D^2`, the memory `D x D`.

    Args:
        table: A `TokenTable`, or a plain tensor `(V, D)`.

    Raises:
        ShapeError: A plain tensor that is not `(V, D)`.
        SizeError: No row has a length.

    Example:
        >>> even = table_geometry(torch.cat([torch.eye(4), -torch.eye(4)]))
        >>> round(even.effective_rank, 6), round(even.isotropy, 6), round(even.mean_cosine, 3)
        (4.0, 1.0, -0.143)
    """
    rows = Rows(table)
    chunks = _wide(rows, sound_only=True)
    if not any(len(chunk) for chunk in chunks):
        raise SizeError(f"None of the {len(rows)} rows of this table has a length: all are zero or hold NaN.")
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
    """`min Z(c) / max Z(c)` over the eigenvectors of the rows' second moments, both signs of each."""
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
    """Lengths of the rows of tokens that are about as frequent.

    Attributes:
        low: Fewest occurrences of its tokens.
        high: Most occurrences.
        rows: How many tokens.
        p10: A tenth of the lengths are below.
        median: Half are.
        p90: Nine tenths are.
    """

    low: int
    high: int
    rows: int
    p10: float
    median: float
    p90: float


def norms_by_frequency(table: TableLike, counts: Int[Tensor, " V"]) -> list[FrequencyBand]:
    """Lengths of rows by how often their tokens occur: never, once, then by powers of four.

    Args:
        table: A `TokenTable`, or a plain tensor `(V, D)`.
        counts: How often each token occurs.

    Raises:
        ShapeError: There is not one count for each row.

    Example:
        >>> rows = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
        >>> [(band.low, band.high, band.median) for band in norms_by_frequency(rows, torch.tensor([0, 7, 9]))]
        [(0, 0, 1.0), (7, 7, 2.0), (9, 9, 3.0)]
    """
    rows = Rows(table)
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
class Alignment:
    """The rotation that lays one table over another: `scale * before @ rotation` is nearest to `after`.

    Attributes:
        rotation: `(D, E)`, from the width of the one to that of the other; its shorter side is orthonormal.
        scale: Factor that goes with it.
        residual: Share of `after` that is left over, `|scale before rotation - after|^2 / |after|^2`: 0 where the two
            are one table turned.
    """

    rotation: Float[Tensor, "D E"]
    scale: float
    residual: float


@torch.no_grad()
def align(before: TableLike, after: TableLike, *, pairs: Int[Tensor, "N 2"] | None = None) -> Alignment:
    """Orthogonal Procrustes: turn one table so that its rows come to lie on those of another.

    Two models trained apart may hold the same table in other directions, so their rows can only be compared after
    this. Two moments of one training need it not. Rows that are zero or hold NaN are left out.

    Args:
        before: The table to turn.
        after: The table to turn it to; its width may differ.
        pairs: Row of `before`, row of `after`, for each token that both have (see `shared_tokens`); by default rows of
            equal ID, and then both must have as many.

    Raises:
        ShapeError: Tables of different lengths without `pairs`, or pairs outside them.
        SizeError: No rows to go by.

    Source: Schonemann, 1966: `U V^T` of the singular value decomposition of `before^T after`.

    Example:
        >>> rows, turn = torch.randn(50, 4), torch.linalg.qr(torch.randn(4, 4)).Q
        >>> found = align(rows, 3 * rows @ turn)
        >>> torch.allclose(found.rotation.float(), turn, atol=1e-5), round(found.scale, 4), round(found.residual, 4)
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
        raise SizeError("There are no two rows to align by: all pairs have a row that is zero or holds NaN.")
    left_vectors, widths, right_vectors = torch.linalg.svd(products, full_matrices=False)
    rotation = left_vectors @ right_vectors
    turned = float(lengths[0])
    if rotation.shape[1] < rotation.shape[0]:  # turning into fewer directions loses a part of each row
        turned = sum(
            float((left[_sound(left) & _sound(right)] @ rotation).square().sum()) for left, right in two.chunks()
        )
    total = float(widths.sum())
    scale = total / turned
    residual = max(0.0, 1 - total * total / (turned * float(lengths[1])))
    return Alignment(rotation, scale, residual)


class Moved(NamedTuple):
    """A token's row in two tables.

    Attributes:
        before: Its ID in the first.
        after: Its ID in the second.
        cosine: Of its two rows, the first one turned: 1 where it points as before.
        norm_before: Length of the first.
        norm_after: Length of the second.
    """

    before: int
    after: int
    cosine: float
    norm_before: float
    norm_after: float


@dataclass(frozen=True)
class Movement:
    """What became of each row from one table to another.

    Attributes:
        pairs: Row of the one, row of the other, `(N, 2)`.
        cosines: Cosine of the two, `(N,)`; NaN where one is zero or holds NaN.
        norms: Their lengths, `(N, 2)`.
    """

    pairs: Int[Tensor, "N 2"]
    cosines: Float[Tensor, " N"]
    norms: Float[Tensor, "N 2"]

    def most(self, count: int = 10) -> list[Moved]:
        """The rows that point least as they did; equals in the order of their IDs."""
        return self._listed(self.cosines.nan_to_num(nan=math.inf).argsort(stable=True), count)

    def least(self, count: int = 10) -> list[Moved]:
        """The rows that point most as they did."""
        return self._listed(self.cosines.nan_to_num(nan=-math.inf).argsort(descending=True, stable=True), count)

    def _listed(self, order: Int[Tensor, " N"], count: int) -> list[Moved]:
        order = order[~self.cosines[order].isnan()][:count]
        cells = zip(self.pairs[order].tolist(), self.cosines[order].tolist(), self.norms[order].tolist(), strict=True)
        return [Moved(one, other, cosine, *norms) for (one, other), cosine, norms in cells]


@torch.no_grad()
def moved_most(
    before: TableLike,
    after: TableLike,
    *,
    alignment: Alignment | None = None,
    pairs: Int[Tensor, "N 2"] | None = None,
) -> Movement:
    """How far each row has turned from one table to another; `.most(20)` lists those that turned most.

    Args:
        before: The earlier table.
        after: The later one.
        alignment: What `align` gives, for tables of two trainings; `None` where both have the same directions.
        pairs: See `align`.

    Raises:
        ShapeError: The tables differ in length without `pairs`, or in width without an alignment, or pairs lie outside
            them.

    Example:
        >>> moved_most(torch.eye(3), torch.tensor([[2.0, 0, 0], [0, 1, 0], [0, 1, 1]])).most(1)
        [Moved(before=2, after=2, cosine=0.707..., norm_before=1.0, norm_after=1.414...)]
    """
    two = _Pairs(before, after, pairs)
    if alignment is None and two.before.embed_dim != two.after.embed_dim:
        raise ShapeError(
            f"Rows of width {two.before.embed_dim} and {two.after.embed_dim} cannot be compared as they are: give "
            f"alignment=align(before, after)."
        )
    cosines, norms = [], []
    for left, right in two.chunks():
        turned = left if alignment is None else left @ alignment.rotation
        lengths = torch.stack([torch.linalg.vector_norm(side, dim=1) for side in (left, right)], dim=1)
        scale = torch.linalg.vector_norm(turned, dim=1) * lengths[:, 1]
        cosines.append(((turned * right).sum(1) / scale.where(scale > 0, math.nan)).clamp(-1.0, 1.0))
        norms.append(lengths)
    if not cosines:
        return Movement(two.pairs, torch.zeros(0), torch.zeros(0, 2))
    return Movement(two.pairs, torch.cat(cosines), torch.cat(norms))


def shared_tokens(before: Tokenizer, after: Tokenizer) -> Int[Tensor, "N 2"]:
    """The tokens that two tokenizers have in common, by their readable text: ID in the one, ID in the other.

    A text that several tokens of one have is left out. Of equal tokenizers every token is paired with itself.
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
    """Two tables and which row of the one belongs to which of the other."""

    def __init__(self, before: TableLike, after: TableLike, pairs: Tensor | None) -> None:
        self.before, self.after = Rows(before), Rows(after)
        if pairs is None:
            if len(self.before) != len(self.after):
                raise ShapeError(
                    f"The tables have {len(self.before)} and {len(self.after)} rows: give pairs, such as "
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
        """The rows of both, side by side, in float64."""
        for part in self.pairs.split(CHUNK_ROWS):
            if len(part):
                yield self.before.take(part[:, 0]).double(), self.after.take(part[:, 1]).double()


def _sound(rows: Float[Tensor, "rows D"]) -> Tensor:
    return (rows != 0).any(1) & rows.isfinite().all(1)


class PositionPicture(NamedTuple):
    """What a position scheme does, as a matrix to draw.

    Attributes:
        values: One row per position or distance, one column per dimension, pair or head, `(T, C)`.
        title: What is shown.
        row_label: What a row is.
        column_label: What a column is.
        value_label: What a number is.
    """

    values: Float[Tensor, "T C"]
    title: str
    row_label: str
    column_label: str
    value_label: str


@torch.no_grad()
def position_values(position: Position, length: int) -> PositionPicture | None:
    """What a scheme looks like over `length` positions, read through the hook by which it speaks.

    | hook | rows | columns | value |
    |---|---|---|---|
    | `add` | positions | dimensions | what is added to a token's vector |
    | `rotate` | positions | pairs of dimensions | cosine of the angle by which the pair is turned |
    | `bias` | distances to the key | heads | what is added to the score |

    Args:
        position: Any scheme. One with a `max_seq_len` is shown up to it.
        length: Positions to show, T.

    Returns:
        The picture, or `None` for a scheme that leaves everything as it is.

    Raises:
        SizeError: `length` is below 1.
    """
    if length < 1:
        raise SizeError(f"A picture needs at least one position; asked for {length}.")
    length = min(length, getattr(position, "max_seq_len", None) or length)
    if isinstance(position, AdditivePosition):
        return _added(position, length)
    if type(position).rotate is not Position.rotate:
        return _turned(position, length)
    if type(position).bias is not Position.bias:
        return _biased(position, length)
    return None


def _device(position: Position) -> torch.device:
    tensor = next(iter(position.parameters()), next(iter(position.buffers()), None))
    return torch.device("cpu") if tensor is None else tensor.device


def _added(position: AdditivePosition, length: int) -> PositionPicture:
    values = position.vectors(torch.arange(length, device=_device(position)))
    return PositionPicture(values.float().cpu(), "Position vectors", "position", "dimension", "added to the token")


def _turned(position: Position, length: int) -> PositionPicture:
    """Turn each unit vector: where it stays is its cosine, where it goes is its partner, in any layout of pairs."""
    device, width = _device(position), cast(int, position.head_dim)
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
    device = _device(position)
    keys = torch.arange(length, device=device)[None]
    bias_BHQK = position.bias(keys[:, -1:], keys)
    assert bias_BHQK is not None  # its scheme overrides this hook
    values = bias_BHQK[0, :, 0].flip(1).T
    return PositionPicture(
        values.float().cpu(), "Bias on attention scores", "distance back to the key", "head", "added to the score"
    )
