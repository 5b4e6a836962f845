"""What the rows of new tokens start from.

A start is an object: `Mean()`, `MeanNoise()`, `SubwordMean()`, `Copy(of=...)`, `Random()`, `Vectors(tensor)`. It reads
the old rows a block at a time, so the table is never copied; a free head gets its own rows from the head's.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from embedlayer.errors import ShapeError, SizeError, VocabularyError
from embedlayer.tables.table import ROWS_AT_ONCE


@runtime_checkable
class Rows(Protocol):
    """What a start reads: a `TokenTable`, or `HeadRows` of a free head."""

    vocab_size: int
    embed_dim: int
    padding_idx: int | None

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop - 1`, as stored."""
        ...


@dataclass(frozen=True)
class HeadRows:
    """The rows of a free head, `(V, D)`, read like a table's."""

    weight: Tensor
    padding_idx: int | None = None

    @property
    def vocab_size(self) -> int:
        """Rows, V."""
        return self.weight.shape[0]

    @property
    def embed_dim(self) -> int:
        """Width, D."""
        return self.weight.shape[1]

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Rows `start` to `stop - 1`: a view."""
        return self.weight[start:stop]


Dead = Sequence[int] | Callable[[Rows], Bool[Tensor, " V"]]
"""Rows that were never trained: their IDs, or a function that marks them."""


@dataclass(frozen=True)
class NewToken:
    """A token that gets a row.

    Attributes:
        text: As it stands in the new tokenizer.
        pieces: The old IDs that the old tokenizer writes it with.
    """

    text: str
    pieces: tuple[int, ...] = ()


@dataclass(frozen=True)
class Origin:
    """Where a new row came from.

    Attributes:
        start: What it is: `"mean"`, `"mean+noise"`, `"subword mean"`, `"copy"`, `"random"` or `"given"`.
        rows: The old rows that it was made from, where these are few; a mean over all live rows names none.
    """

    start: str
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class NewRows:
    """The rows of the new tokens.

    Attributes:
        values: `(k, D)`, in the old rows' type and on their device.
        origins: Where each came from.
    """

    values: Float[Tensor, "k D"]
    origins: tuple[Origin, ...]


class StartingRows(ABC):
    """Abstract: how the rows of new tokens are made."""

    @abstractmethod
    def rows(self, old: Rows, tokens: Sequence[NewToken], generator: torch.Generator | None = None) -> NewRows:
        """The rows of some new tokens.

        Args:
            old: The rows there are; spare rows behind `vocab_size` are not read.
            tokens: The new tokens.
            generator: For starts that draw; torch's default one if `None`.
        """


@dataclass(frozen=True)
class Mean(StartingRows):
    """Every new row is the mean of the live rows.

    Live is what was trained: not the padding row, not a row of zeros, not one with a number that is not finite, and
    not one of `dead`.
    """

    dead: Dead = ()

    def rows(self, old: Rows, tokens: Sequence[NewToken], generator: torch.Generator | None = None) -> NewRows:
        """The mean, once for each token."""
        mean = _Live(old, self.dead).mean
        return _finished(old, mean.expand(len(tokens), -1), [Origin("mean")] * len(tokens))


@dataclass(frozen=True)
class MeanNoise(StartingRows):
    """Drawn from the normal distribution that the live rows have: `N(mean, scale^2 * covariance)`.

    A draw is `mean + scale / sqrt(n) * sum over live rows of g * (row - mean)` with standard normal numbers g: exactly
    that distribution, and no D x D matrix.

    Reference: Hewitt, Initializing New Word Embeddings for Pretrained Language Models, 2021. We differ from
    transformers, which multiplies the covariance by 1e-9 (all new rows are then the mean) and counts padding rows.
    """

    scale: float = 1.0
    dead: Dead = ()

    def rows(self, old: Rows, tokens: Sequence[NewToken], generator: torch.Generator | None = None) -> NewRows:
        """One draw for each token."""
        live = _Live(old, self.dead)
        noise = torch.zeros(len(tokens), old.embed_dim, dtype=torch.float64)
        for rows in live.blocks():
            draws = torch.randn(len(tokens), len(rows), generator=generator, dtype=torch.float64)
            noise += draws @ (rows - live.mean)
        values = live.mean + self.scale / live.count**0.5 * noise
        return _finished(old, values, [Origin("mean+noise")] * len(tokens))


@dataclass(frozen=True)
class SubwordMean(StartingRows):
    """Each new row is the mean of the rows of the pieces that wrote its text before.

    Pieces whose rows are dead do not count; where none is left, the row is the mean of the live rows.
    """

    dead: Dead = ()

    def rows(self, old: Rows, tokens: Sequence[NewToken], generator: torch.Generator | None = None) -> NewRows:
        """The mean of its pieces, for each token."""
        live = _Live(old, self.dead)
        pieces = [tuple(piece for piece in token.pieces if live.mask[piece]) for token in tokens]
        values = [_picked(old, ids).mean(0) if ids else live.mean for ids in pieces]
        origins = [Origin("subword mean", ids) if ids else Origin("mean") for ids in pieces]
        return _finished(old, _stacked(values, old), origins)


@dataclass(frozen=True)
class Copy(StartingRows):
    """Each new row is a copy of an old one.

    Args:
        of: The old ID, or one for each new token.
    """

    of: int | Sequence[int]

    def rows(self, old: Rows, tokens: Sequence[NewToken], generator: torch.Generator | None = None) -> NewRows:
        """The copies."""
        ids = (self.of,) * len(tokens) if isinstance(self.of, int) else tuple(self.of)
        if len(ids) != len(tokens):
            raise SizeError(
                f"Copy(of=...) names {len(ids)} rows for {len(tokens)} new tokens. Give one, or one for each."
            )
        return _finished(old, _picked(old, ids), [Origin("copy", (token_id,)) for token_id in ids])


@dataclass(frozen=True)
class Random(StartingRows):
    """Drawn from `N(0, std^2)`.

    Args:
        std: Standard deviation; `None` for that of the numbers in the live rows.
    """

    std: float | None = None
    dead: Dead = ()

    def rows(self, old: Rows, tokens: Sequence[NewToken], generator: torch.Generator | None = None) -> NewRows:
        """One draw for each token."""
        std = _Live(old, self.dead).std if self.std is None else self.std
        values = std * torch.randn(len(tokens), old.embed_dim, generator=generator, dtype=torch.float64)
        return _finished(old, values, [Origin("random")] * len(tokens))


@dataclass(frozen=True)
class Vectors(StartingRows):
    """The rows as given, `(k, D)`."""

    values: Float[Tensor, "k D"]

    def rows(self, old: Rows, tokens: Sequence[NewToken], generator: torch.Generator | None = None) -> NewRows:
        """The given rows."""
        if self.values.shape != (len(tokens), old.embed_dim):
            raise ShapeError(
                f"The given rows are {tuple(self.values.shape)}; {len(tokens)} new tokens of a table of width "
                f"{old.embed_dim} need {(len(tokens), old.embed_dim)}."
            )
        return _finished(old, self.values, [Origin("given")] * len(tokens))


class _Live:
    """The rows of a table that were trained, and what they have in common; all in float64 on the CPU."""

    def __init__(self, old: Rows, dead: Dead) -> None:
        self.old = old
        self.mask = self._marked(dead)
        self.count = int(self.mask.sum())
        if self.count == 0:
            raise VocabularyError(
                f"None of the {old.vocab_size} rows counts as trained: all are zero, padding, not finite, or given as "
                f"dead. Start the new rows from Vectors(...) or Random(std=...)."
            )

    def _marked(self, dead: Dead) -> Bool[Tensor, " V"]:
        if callable(dead):
            mask = ~dead(self.old).cpu()
        else:
            mask = torch.ones(self.old.vocab_size, dtype=torch.bool)
            mask[torch.tensor(list(dead), dtype=torch.int64)] = False
        if self.old.padding_idx is not None:
            mask[self.old.padding_idx] = False
        for start, rows in _blocks(self.old):
            mask[start : start + len(rows)] &= rows.isfinite().all(1).cpu() & rows.any(1).cpu()
        return mask

    def blocks(self) -> Iterator[Float[Tensor, "n D"]]:
        """The live rows, a block at a time."""
        for start, rows in _blocks(self.old):
            yield rows.double().cpu()[self.mask[start : start + len(rows)]]

    @property
    def mean(self) -> Float[Tensor, " D"]:
        """Their mean."""
        total = torch.zeros(self.old.embed_dim, dtype=torch.float64)
        for rows in self.blocks():
            total += rows.sum(0)
        return total / self.count

    @property
    def std(self) -> float:
        """Root mean square deviation of their numbers from the mean row."""
        mean, total = self.mean, 0.0
        for rows in self.blocks():
            total += float((rows - mean).square().sum())
        return math.sqrt(total / self.count / self.old.embed_dim)


def _blocks(old: Rows) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, old.vocab_size, ROWS_AT_ONCE):
        yield start, old.rows(start, min(start + ROWS_AT_ONCE, old.vocab_size)).detach()


def _picked(old: Rows, ids: Sequence[int]) -> Float[Tensor, "k D"]:
    for token_id in ids:
        if not 0 <= token_id < old.vocab_size:
            raise VocabularyError(f"There is no old row {token_id}: the IDs are 0..{old.vocab_size - 1}.")
    return _stacked([old.rows(token_id, token_id + 1)[0].detach().double().cpu() for token_id in ids], old)


def _stacked(rows: list[Tensor], old: Rows) -> Float[Tensor, "k D"]:
    return torch.stack(rows) if rows else torch.zeros(0, old.embed_dim, dtype=torch.float64)


def _finished(old: Rows, values: Tensor, origins: Sequence[Origin]) -> NewRows:
    like = old.rows(0, 1)
    return NewRows(values.to(like.device, like.dtype, copy=True), tuple(origins))
