"""How the rows of new tokens are initialised.

An initialisation is an object: `MeanInit()`, `MeanNoiseInit()`, `SubwordMeanInit()`, `CopyInit(of=...)`,
`RandomInit()`, `VectorsInit(tensor)`. It reads the old rows and computes the new rows in chunks, so the table is never
copied. An untied head is initialised from its own rows.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.tokenization.bytes import TokenBytes
from embedlayer.vocab.init.old_rows import DeadRows, LiveRows, OldRows

TOKENS_AT_ONCE = 1024
SHOWN_IDS = 16
"""Most old IDs that the text of a `RowOrigin` lists."""


@dataclass(frozen=True)
class NewToken:
    """Describe a token that gets a new row.

    Attributes:
        text: The token as written in the new tokenizer's vocabulary.
        old_ids: The IDs with which the old tokenizer encodes the token's text; empty if unknown.
    """

    text: str
    old_ids: tuple[int, ...] = ()


def spell_new_tokens(old: object, new: object, ids: Iterable[int]) -> list[NewToken]:
    """Return tokens of the new tokenizer, each with the IDs with which the old tokenizer encodes its text."""
    theirs, ours = TokenBytes(old), TokenBytes(new)
    return [NewToken(ours.entries[i], () if i in ours.special else theirs.encode(ours.readings(i)[0])) for i in ids]


@dataclass(frozen=True)
class RowOrigin:
    """Describe how one new row was computed; `str` of it is, for example, `subword mean of 5, 7`.

    Attributes:
        method: `"mean"`, `"mean+noise"`, `"subword mean"`, `"copy"`, `"random"`, `"given"`, `"OMP"`, `"FOCUS"`,
            `"WECHSEL"`, or `"trained from "` and one of these.
        old_ids: The old rows that the row was computed from; empty if these are all live rows, or none. The text lists
            the first 16.
    """

    method: str
    old_ids: tuple[int, ...] = ()

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.old_ids[:SHOWN_IDS]))
        more = f" and {len(self.old_ids) - SHOWN_IDS} more" if len(self.old_ids) > SHOWN_IDS else ""
        return f"{self.method} of {shown}{more}" if self.old_ids else self.method


SOURCES = {
    "mean": "the mean of all rows",
    "mean+noise": "the mean of all rows with noise",
    "subword mean": "the mean of their subwords",
    "copy": "a copy of another row",
    "random": "random numbers",
    "given": "given values",
}
"""Method of a row's origin -> where the row came from, for people; other methods are names."""


def count_origins(origins: Iterable[str]) -> str:
    """Return how many rows came from where, the most frequent first, from texts of `RowOrigin`."""
    trained = "trained from "
    counts: Counter[str] = Counter()
    for origin in origins:
        method = origin.removeprefix(trained).partition(" of ")[0]
        counts[(trained if origin.startswith(trained) else "from ") + SOURCES.get(method, method)] += 1
    return ", ".join(f"{count:,} {source}" for source, count in counts.most_common())


@dataclass(frozen=True)
class NewRows:
    """Store the rows of new tokens, and how each row was computed.

    Attributes:
        values: `(k, D)`, with the dtype and device of the old rows.
        origins: How each row was computed, in the order of the rows.
    """

    values: Float[Tensor, "k D"]
    origins: tuple[RowOrigin, ...]


Tokens = Sequence[NewToken]
Generator = torch.Generator | None
"""Generator of random values; `None` for torch's default one."""

ComputedRows = tuple[Tensor, Sequence[RowOrigin]]
"""Rows, `(k, D)`, of any dtype and on any device, and how each was computed."""


class RowInit(ABC):
    """Base class of initialisations, which compute the rows of new tokens from the old rows of the same table or head.

    An old row is live if it is not dead (see below), is not the padding row, is not all zero, and has only finite
    values. Means and standard deviations are those of the live rows.

    Attributes:
        dead: IDs of old rows that were never trained and therefore are not read, or a function that marks these rows.
        of_other_widths: Initialisation of further tables whose rows have another width, such as a per-layer table;
            `None` if this one computes rows of any width.
    """

    dead: DeadRows
    of_other_widths: ClassVar["RowInit | None"] = None

    @abstractmethod
    def compute(self, live: "LiveRows", tokens: Tokens, chunk: slice, generator: Generator) -> ComputedRows:
        """Compute the rows of the new tokens `tokens[chunk]`.

        Args:
            live: Reader of the old rows. If the rows are sharded, every rank calls `compute`, and all ranks must read
                the same rows.
            tokens: All new tokens.
            chunk: Slice of `tokens` to compute rows for.
            generator: Generator of random values; `None` for torch's default one.

        Returns:
            The rows, `(k, D)`, of any dtype and on any device; and how each row was computed.
        """

    def chunks(self, old: OldRows, tokens: Tokens, generator: Generator = None) -> Iterator[NewRows]:
        """Yield the rows of new tokens in the order of `tokens`, `TOKENS_AT_ONCE` (1024) tokens at a time.

        The arguments are those of `rows`. The rows have the dtype and device of the old rows.
        """
        live, like = LiveRows(old, self.dead), old.rows(0, 1)
        for first in range(0, len(tokens), TOKENS_AT_ONCE):
            values, origins = self.compute(live, tokens, slice(first, first + TOKENS_AT_ONCE), generator)
            yield NewRows(values.detach().to(like.device, like.dtype, copy=True), tuple(origins))

    def rows(self, old: OldRows, tokens: Tokens, generator: Generator = None) -> NewRows:
        """Return the rows of new tokens, in the order of `tokens`.

        Args:
            old: The old rows, those of `vocab_size` tokens; padding rows after these are not read.
            tokens: The new tokens.
            generator: Generator of random values; `None` for torch's default one.

        Raises:
            VocabularyError: `dead` names a row that does not exist, or an initialisation that reads live rows finds
                none. All other errors are those of the class.
        """
        chunks = [NewRows(old.rows(0, 0).detach(), ()), *self.chunks(old, tokens, generator)]
        return NewRows(torch.cat([new.values for new in chunks]), tuple(o for new in chunks for o in new.origins))


@dataclass(frozen=True)
class MeanInit(RowInit):
    """Set every new row to the mean of the live rows, which are the trained ones; see `RowInit`.

    Args:
        dead: IDs of old rows that are not read; see `RowInit`.

    Example:
        >>> from embedlayer.vocab.init.old_rows import WeightRows
        >>> old = WeightRows(torch.tensor([[1.0, 3.0], [3.0, 5.0], [0.0, 0.0]]))
        >>> MeanInit().rows(old, [NewToken("new")]).values
        tensor([[2., 4.]])
    """

    dead: DeadRows = ()

    def compute(self, live: "LiveRows", tokens: Tokens, chunk: slice, generator: Generator) -> ComputedRows:
        """Return the mean of the live rows (`LiveRows`), once for each token of the chunk; see `RowInit.compute`."""
        count = len(tokens[chunk])
        return live.mean.expand(count, -1), [RowOrigin("mean")] * count


@dataclass(frozen=True)
class MeanNoiseInit(RowInit):
    """Draw new rows from `N(mean, scale^2 * covariance)`, with the mean and covariance of the live rows.

    A draw is `mean + scale / sqrt(n) * sum over the n live rows of g * (row - mean)`, with a standard normal number
    g for each live row. It has exactly that distribution, and no D x D matrix is computed. `RowInit` defines live rows.

    Args:
        scale: Factor of the standard deviation. With 1 new rows are as far from the mean as live rows.
        dead: IDs of old rows that are not read; see `RowInit`.

    Reference: Hewitt, Initializing New Word Embeddings for Pretrained Language Models, 2021. This class
    differs from transformers, which multiplies the covariance by 1e-9, so that all new rows are the mean, and
    which includes padding rows in the mean and covariance.
    """

    scale: float = 1.0
    dead: DeadRows = ()

    def compute(self, live: "LiveRows", tokens: Tokens, chunk: slice, generator: Generator) -> ComputedRows:
        """Return a row drawn from the normal distribution for each token of the chunk; see `RowInit.compute`."""
        count, mean = len(tokens[chunk]), live.mean.float()
        noise = torch.zeros(count, len(mean))
        for rows in live.chunks():
            noise += torch.randn(count, len(rows), generator=generator) @ (rows.float() - mean)
        return mean + self.scale / math.sqrt(live.count) * noise, [RowOrigin("mean+noise")] * count


@dataclass(frozen=True)
class SubwordMeanInit(RowInit):
    """Set each new row to the mean of the old rows of the subwords that encoded the token's text before the edit.

    Only live rows, which `RowInit` defines, count. A token without a live subword, such as a new special token, gets
    the mean of all live rows.

    Args:
        dead: IDs of old rows that are not read; see `RowInit`.

    Example:
        >>> from embedlayer.vocab.init.old_rows import WeightRows
        >>> old = WeightRows(torch.tensor([[1.0, 3.0], [3.0, 5.0], [9.0, 9.0]]))
        >>> new = SubwordMeanInit().rows(old, [NewToken("ab", old_ids=(0, 1))])
        >>> new.values, str(new.origins[0])
        (tensor([[2., 4.]]), 'subword mean of 0, 1')
    """

    dead: DeadRows = ()

    def compute(self, live: "LiveRows", tokens: Tokens, chunk: slice, generator: Generator) -> ComputedRows:
        """Return for each token of the chunk the mean of its live subword rows, or of all live rows if it has none.

        See `RowInit.compute` for the arguments.
        """
        rows = dict(live.select({old_id for token in tokens[chunk] for old_id in token.old_ids}))
        old_ids = [tuple(old_id for old_id in token.old_ids if old_id in rows) for token in tokens[chunk]]
        means = [torch.stack([rows[old_id] for old_id in ids]).mean(0) if ids else live.mean for ids in old_ids]
        return torch.stack(means), [RowOrigin("subword mean", ids) if ids else RowOrigin("mean") for ids in old_ids]


@dataclass(frozen=True)
class CopyInit(RowInit):
    """Set each new row to a copy of an old row.

    Args:
        of: The ID of one old row for all new tokens, or one ID for each new token.

    Raises:
        SizeError: When rows are computed: the number of IDs is not the number of new tokens.
        VocabularyError: When rows are computed: there is no old row with that ID.
    """

    of: int | Sequence[int]
    dead: DeadRows = field(default=(), init=False, repr=False)

    def compute(self, live: "LiveRows", tokens: Tokens, chunk: slice, generator: Generator) -> ComputedRows:
        """Return a copy of the old row that `of` names, for each new token of the chunk; see `RowInit.compute`.

        Any old row can be copied, the padding row and rows of zeros or NaN too: those that are not live (`LiveRows`).

        Raises:
            VocabularyError: There is no old row with an ID of `of`.
        """
        ids = [self.of] * len(tokens) if isinstance(self.of, int) else list(self.of)
        if len(ids) != len(tokens):
            raise SizeError(f"CopyInit(of=...) needs one ID, or one for each of {len(tokens)} tokens, not {len(ids)}.")
        return live.look_up(ids[chunk]), [RowOrigin("copy", (token_id,)) for token_id in ids[chunk]]


@dataclass(frozen=True)
class RandomInit(RowInit):
    """Draw each value of the new rows from a normal distribution with mean zero, `N(0, std^2)`.

    Args:
        std: Standard deviation; `None` for that of the live rows: the root mean square of the differences between their
            values and their mean row. `RowInit` defines live rows.
        dead: IDs of old rows that are not read; see `RowInit`.
    """

    std: float | None = None
    dead: DeadRows = ()

    def compute(self, live: "LiveRows", tokens: Tokens, chunk: slice, generator: Generator) -> ComputedRows:
        """Return a random row from `N(0, std^2)` for each token of the chunk; see `RowInit.compute`."""
        count, std = len(tokens[chunk]), live.std if self.std is None else self.std
        return std * torch.randn(count, live.old.embed_dim, generator=generator), [RowOrigin("random")] * count


@dataclass(frozen=True, eq=False)
class VectorsInit(RowInit):
    """Set the new rows to the rows of a tensor that the caller passes.

    A per-layer table, whose rows have another width, is initialised by `SubwordMeanInit`.

    Args:
        values: `(k, D)`, one row for each new token in the order of the new IDs.

    Raises:
        ShapeError: When rows are computed: `values` does not have one row of width D for each new token.
    """

    values: Float[Tensor, "k D"]
    dead: DeadRows = field(default=(), init=False, repr=False)
    of_other_widths: ClassVar[RowInit | None] = SubwordMeanInit()

    def compute(self, live: "LiveRows", tokens: Tokens, chunk: slice, generator: Generator) -> ComputedRows:
        """Return the rows of `values` for the tokens of the chunk; see `RowInit.compute`."""
        wanted = (len(tokens), live.old.embed_dim)
        if self.values.shape != wanted:
            raise ShapeError(f"VectorsInit has rows {tuple(self.values.shape)}; the new tokens need {wanted}.")
        return self.values[chunk], [RowOrigin("given")] * len(tokens[chunk])
