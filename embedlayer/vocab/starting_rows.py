"""What the rows of new tokens start from.

A start is an object: `Mean()`, `MeanNoise()`, `SubwordMean()`, `Copy(of=...)`, `Random()`, `Vectors(tensor)`. It reads
the old rows a block at a time, and makes new ones a block at a time, so the table is never copied; an untied head gets its
own rows from the head's.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.errors import ShapeError, SizeError, VocabularyError
from embedlayer.tables.table import ROWS_AT_ONCE

TOKENS_AT_ONCE = 1024
Entry = TypeVar("Entry")


@runtime_checkable
class Rows(Protocol):
    """What a start reads: a `TokenTable`, or `HeadRows` of an untied head."""

    @property
    def vocab_size(self) -> int:
        """Rows, V."""

    @property
    def embed_dim(self) -> int:
        """Width, D."""

    @property
    def padding_idx(self) -> int | None:
        """Row that is zero, or `None`."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop - 1`, as stored."""

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows by ID, `(k,)` to `(k, D)`, as stored."""


@dataclass(frozen=True)
class HeadRows:
    """The rows of an untied head, `(V, D)`, read like a table's."""

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

    def look_up(self, ids: Int[Tensor, " k"]) -> Float[Tensor, "k D"]:
        """Rows by ID."""
        return self.weight.index_select(0, ids)


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
    def blocks(
        self, old: Rows, tokens: Sequence[NewToken], generator: torch.Generator | None = None
    ) -> Iterator[NewRows]:
        """The rows of some new tokens in their order, a few at a time.

        Args:
            old: The rows there are; spare rows behind `vocab_size` are not read. They may be divided among processes,
                of which each then makes all new rows: what is read must not differ between them, nor its order.
            tokens: The new tokens.
            generator: For starts that draw; torch's default one if `None`.
        """

    def rows(self, old: Rows, tokens: Sequence[NewToken], generator: torch.Generator | None = None) -> NewRows:
        """All of `blocks` together."""
        blocks = [_finished(old, _empty(old, torch.float64), []), *self.blocks(old, tokens, generator)]
        return NewRows(torch.cat([new.values for new in blocks]), tuple(o for new in blocks for o in new.origins))


@dataclass(frozen=True)
class Mean(StartingRows):
    """Every new row is the mean of the live rows.

    Live is what was trained: not the padding row, not a row of zeros, not one with a number that is not finite, and
    not one of `dead`.

    Args:
        dead: More rows that do not count, by ID, or a function that marks them.

    Example:
        >>> old = HeadRows(torch.tensor([[1.0, 3.0], [3.0, 5.0], [0.0, 0.0]]))
        >>> Mean().rows(old, [NewToken("new")]).values
        tensor([[2., 4.]])
    """

    dead: Dead = ()

    def blocks(
        self, old: Rows, tokens: Sequence[NewToken], generator: torch.Generator | None = None
    ) -> Iterator[NewRows]:
        """The mean, once for each token."""
        live = _LiveRows(old, self.dead)
        for some in _some(tokens):
            yield _finished(old, live.mean.expand(len(some), -1), [Origin("mean")] * len(some))


@dataclass(frozen=True)
class MeanNoise(StartingRows):
    """Drawn from the normal distribution that the live rows have: `N(mean, scale^2 * covariance)`.

    A draw is `mean + scale / sqrt(n) * sum over live rows of g * (row - mean)` with standard normal numbers g: exactly
    that distribution, without a D x D matrix.

    Args:
        scale: 1 for rows as far from the mean as trained ones are.
        dead: As in `Mean`.

    Reference: Hewitt, Initializing New Word Embeddings for Pretrained Language Models, 2021. We differ from
    transformers, which multiplies the covariance by 1e-9, so that all new rows are the mean, and counts padding rows.
    """

    scale: float = 1.0
    dead: Dead = ()

    def blocks(
        self, old: Rows, tokens: Sequence[NewToken], generator: torch.Generator | None = None
    ) -> Iterator[NewRows]:
        """One draw for each token."""
        live = _LiveRows(old, self.dead)
        factor = self.scale / math.sqrt(live.count)
        mean = live.mean.float()
        for some in _some(tokens):
            noise = torch.zeros(len(some), old.embed_dim)
            for rows in live.blocks():
                noise += torch.randn(len(noise), len(rows), generator=generator) @ (rows.float() - mean)
            yield _finished(old, mean + factor * noise, [Origin("mean+noise")] * len(some))


@dataclass(frozen=True)
class SubwordMean(StartingRows):
    """Each new row is the mean of the rows of the pieces that wrote its text before.

    Pieces whose rows are not live do not count. Where none is left, and for special tokens, whose text means nothing,
    the row is the mean of the live rows.

    Args:
        dead: As in `Mean`.

    Example:
        >>> old = HeadRows(torch.tensor([[1.0, 3.0], [3.0, 5.0], [9.0, 9.0]]))
        >>> new = SubwordMean().rows(old, [NewToken("ab", pieces=(0, 1))])
        >>> new.values, new.origins
        (tensor([[2., 4.]]), (Origin(start='subword mean', rows=(0, 1)),))
    """

    dead: Dead = ()

    def blocks(
        self, old: Rows, tokens: Sequence[NewToken], generator: torch.Generator | None = None
    ) -> Iterator[NewRows]:
        """The mean of its pieces, for each token."""
        live = _LiveRows(old, self.dead)
        for some in _some(tokens):
            rows = dict(live.among({piece for token in some for piece in token.pieces}))
            pieces = [tuple(piece for piece in token.pieces if piece in rows) for token in some]
            means = [torch.stack([rows[piece] for piece in ids]).mean(0) if ids else live.mean for ids in pieces]
            origins = [Origin("subword mean", ids) if ids else Origin("mean") for ids in pieces]
            yield _finished(old, torch.stack(means), origins)


@dataclass(frozen=True)
class Copy(StartingRows):
    """Each new row is a copy of an old one.

    Args:
        of: An old ID, or one for each new token.
    """

    of: int | Sequence[int]

    def blocks(
        self, old: Rows, tokens: Sequence[NewToken], generator: torch.Generator | None = None
    ) -> Iterator[NewRows]:
        """The copies."""
        ids = (self.of,) * len(tokens) if isinstance(self.of, int) else tuple(self.of)
        if len(ids) != len(tokens):
            raise SizeError(
                f"Copy(of=...) names {len(ids)} rows for {len(tokens)} new tokens. Give one, or one for each."
            )
        live = _LiveRows(old, ())
        for some in _some(ids):
            yield _finished(old, live.picked(some), [Origin("copy", (token_id,)) for token_id in some])


@dataclass(frozen=True)
class Random(StartingRows):
    """Drawn from `N(0, std^2)`.

    Args:
        std: Standard deviation; `None` for the root mean square distance of the live rows' numbers from their mean.
        dead: As in `Mean`.
    """

    std: float | None = None
    dead: Dead = ()

    def blocks(
        self, old: Rows, tokens: Sequence[NewToken], generator: torch.Generator | None = None
    ) -> Iterator[NewRows]:
        """One draw for each token."""
        std = _LiveRows(old, self.dead).std if self.std is None else self.std
        for some in _some(tokens):
            values = std * torch.randn(len(some), old.embed_dim, generator=generator)
            yield _finished(old, values, [Origin("random")] * len(some))


@dataclass(frozen=True, eq=False)
class Vectors(StartingRows):
    """The rows as given.

    Args:
        values: `(k, D)`, one for each new token.
    """

    values: Float[Tensor, "k D"]

    def blocks(
        self, old: Rows, tokens: Sequence[NewToken], generator: torch.Generator | None = None
    ) -> Iterator[NewRows]:
        """The given rows."""
        if self.values.shape != (len(tokens), old.embed_dim):
            raise ShapeError(
                f"The given rows are {tuple(self.values.shape)}; {len(tokens)} new tokens of a table of width "
                f"{old.embed_dim} need {(len(tokens), old.embed_dim)}."
            )
        for values in self.values.detach().split(TOKENS_AT_ONCE) if tokens else ():
            yield _finished(old, values, [Origin("given")] * len(values))


class _LiveRows:
    """The rows of a table that were trained, and what they have in common; means are float64 on the CPU."""

    def __init__(self, old: Rows, dead: Dead) -> None:
        self.old = old
        self.named = torch.zeros(old.vocab_size, dtype=torch.bool)
        if callable(dead):
            self.named |= dead(old).cpu()
        else:
            for token_id in dead:
                self._check(token_id)
                self.named[token_id] = True
        if old.padding_idx is not None:
            self.named[old.padding_idx] = True

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self.old.vocab_size:
            raise VocabularyError(f"There is no old row {token_id}: the IDs are 0..{self.old.vocab_size - 1}.")

    def among(self, ids: Iterable[int]) -> Iterator[tuple[int, Float[Tensor, " D"]]]:
        """Those IDs that are live, with their rows."""
        wanted = sorted(set(ids))
        rows = self.picked(wanted)
        live = _trained(rows) & ~self.named[torch.tensor(wanted, dtype=torch.int64)]
        return ((token_id, row) for token_id, row, lives in zip(wanted, rows, live.tolist(), strict=True) if lives)

    def picked(self, ids: Sequence[int]) -> Float[Tensor, "k D"]:
        """Some rows, live or not."""
        for token_id in ids:
            self._check(token_id)
        if not ids:
            return _empty(self.old, torch.float64)
        with torch.no_grad():
            return self.old.look_up(torch.tensor(ids, device=self.old.rows(0, 1).device)).double().cpu()

    def blocks(self) -> Iterator[Float[Tensor, "n D"]]:
        """The live rows, a block at a time."""
        for start in range(0, self.old.vocab_size, ROWS_AT_ONCE):
            rows = self.old.rows(start, min(start + ROWS_AT_ONCE, self.old.vocab_size)).detach().cpu()
            yield rows[_trained(rows) & ~self.named[start : start + len(rows)]]

    @cached_property
    def _count_and_mean(self) -> tuple[int, Tensor]:
        count, total = 0, torch.zeros(self.old.embed_dim, dtype=torch.float64)
        for rows in self.blocks():
            count += len(rows)
            total += rows.sum(0, dtype=torch.float64)
        if count == 0:
            raise VocabularyError(
                f"None of the {self.old.vocab_size} rows counts as trained: each is zero, padding, not finite, or "
                f"given as dead. Start the new rows from Vectors(...) or Random(std=...)."
            )
        return count, total / count

    @property
    def count(self) -> int:
        """How many there are."""
        return self._count_and_mean[0]

    @property
    def mean(self) -> Float[Tensor, " D"]:
        """Their mean."""
        return self._count_and_mean[1]

    @property
    def std(self) -> float:
        """Root mean square distance of their numbers from the mean row's."""
        total = sum(float((rows - self.mean).square().sum()) for rows in self.blocks())
        return math.sqrt(total / self.count / self.old.embed_dim)


def _some(tokens: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    return (tokens[start : start + TOKENS_AT_ONCE] for start in range(0, len(tokens), TOKENS_AT_ONCE))


def _trained(rows: Float[Tensor, "n D"]) -> Bool[Tensor, " n"]:
    return rows.isfinite().all(1) & rows.any(1)


def _empty(old: Rows, dtype: torch.dtype) -> Float[Tensor, "0 D"]:
    return torch.zeros(0, old.embed_dim, dtype=dtype)


def _finished(old: Rows, values: Tensor, origins: Sequence[Origin]) -> NewRows:
    like = old.rows(0, 1)
    return NewRows(values.to(like.device, like.dtype, copy=True), tuple(origins))
