"""Align two tables, and measure how far each row moved between them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.analysis.row_reader import RowReader
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.tables.conversions import TableLike
from embedlayer.tokenization.comparison import common_tokens
from embedlayer.tokenization.vocabulary_files import word_tokenizer

PAIRS_AT_ONCE = 8192  # pairs of rows widened to float64 at a time

TURNED, GREW = 2e-6, 5e-4
"""A row moved if 1 minus the cosine of its two rows, or the change of its norm beside the median, is larger than this.

Rounding to bfloat16 causes less."""


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
        ShapeError: The tables differ in length and `pairs` is `None`, an ID in `pairs` is outside its table, or a
            tensor or array is not `(V, D)` of floats.
        SizeError: No pair has two rows that are finite and not zero.

    Reference: Schonemann, 1966: `U V^T` of the singular value decomposition of `before^T after`.

    Example:
        >>> rows, rotation = torch.randn(50, 4), torch.linalg.qr(torch.randn(4, 4)).Q
        >>> fit = align_tables(rows, 3 * rows @ rotation)
        >>> torch.allclose(fit.rotation.float(), rotation, atol=1e-5), round(fit.scale, 4), round(fit.residual, 4)
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
        """Return which rows moved by more than rounding: their direction, or their norm beside that of the others.

        A row that is zero in one table only has moved; a row with NaN, or zero in both, has not.
        """
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
        return self._ranked(count, descending=False)

    def least(self, count: int = 10) -> list[MovedRow]:
        """Return the `count` rows whose direction changed least, highest cosine first.

        Cosines that are equal to four decimals are ordered by the change of the norm, the smallest first, and then as
        in `pairs`. Rows with a NaN cosine are left out.
        """
        return self._ranked(count, descending=True)

    def _ranked(self, count: int, *, descending: bool) -> list[MovedRow]:
        """Return `count` rows by their cosine, and by the change of the norm among equal ones."""
        ratios = (self.norms[:, 1] / self.norms[:, 0]).log().sub(math.log(self.scale))
        changes = ratios.double().abs().nan_to_num(nan=0.0).round(decimals=4)
        by_norm = changes.argsort(descending=not descending, stable=True)
        cosines = self.cosines[by_norm].round(decimals=4)
        order = by_norm[cosines.argsort(descending=descending, stable=True)]
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
        ShapeError: The tables differ in length and `pairs` is `None`, or in width and `alignment` is `None`; an ID in
            `pairs` is outside its table; or a tensor or array is not `(V, D)` of floats.

    Example:
        >>> row_movement(torch.eye(3), torch.tensor([[2.0, 0, 0], [0, 1, 0], [0, 1, 1]])).most(1)
        [MovedRow(before=2, after=2, cosine=0.707..., norm_before=1.0, norm_after=1.414...)]
    """
    tables, pairs = paired(before, after, pairs)
    if alignment is None and tables[0].embed_dim != tables[1].embed_dim:
        widths = f"{tables[0].embed_dim} and {tables[1].embed_dim}"
        raise ShapeError(f"Rows of width {widths} need a rotation: pass alignment=align_tables(before, after).")
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

    Tokens are matched by `tokenization.comparison.common_tokens`: equal tokens first, and only then tokens that
    encode the same bytes of a text (`Ġdog` of GPT-2 and `▁dog` of LLaMA-2). No token is in two pairs. If the
    vocabularies are equal, every token pairs with itself.

    Args:
        before: The first tokenizer, or the text of each row; `""` for a row without a token. Of several rows with one
            text, the first is taken, unless both arguments are equal lists.
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
    """Return readers of both tables, and the pairs of row IDs to compare, `(N, 2)`; equal IDs if `pairs` is `None`."""
    tables = RowReader(before), RowReader(after)
    sizes = torch.tensor([len(table) for table in tables])
    if pairs is None:
        if sizes[0] != sizes[1]:
            raise ShapeError(f"The tables have {sizes[0]} and {sizes[1]} rows: pass pairs=shared_tokens(one, other).")
        pairs = torch.arange(len(tables[0]))[:, None].expand(-1, 2)
    if bool(((pairs < 0) | (pairs >= sizes)).any()):
        raise ShapeError(f"A pair of rows is outside the tables of {sizes[0]} and {sizes[1]} rows.")
    return tables, pairs


def _pair_chunks(
    tables: tuple[RowReader, RowReader], pairs: Int[Tensor, "N 2"]
) -> Iterator[tuple[Float[Tensor, "rows D"], Float[Tensor, "rows E"]]]:
    """Yield the rows of both tables for consecutive pairs, in float64 on the CPU, a chunk of pairs at a time."""
    for part in pairs.split(PAIRS_AT_ONCE):
        yield tables[0].take(part[:, 0]).double(), tables[1].take(part[:, 1]).double()
