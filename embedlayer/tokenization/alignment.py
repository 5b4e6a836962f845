"""Two tokenizers on one text: the smallest chunks of two token sequences that encode the same bytes.

A cut belongs to both sequences where the intervals at which they can be cut meet; see `TokenSpans.cut_ends`. Chunks are
what lies between such cuts, so none can be divided.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from embedlayer.core.errors import ShapeError, TextError
from embedlayer.core.formatting import short_repr
from embedlayer.tokenization.spans import NO_CUT, TokenSpans

Side = Literal["a", "b"]
"""One of two aligned token sequences, in the order in which they were passed."""

_Numbers = NDArray[np.int64]


class AlignedSide(NamedTuple):
    """The chunks of one of two aligned token sequences.

    Attributes:
        chunk_of: Number of the chunk of each token; -1 for tokens of the remainder, for special tokens that are not in
            the text, and for padding.
        first_tokens: Place of the first token of each chunk in the sequence; 0 for the padding of chunks.
        num_tokens: Number of tokens of each chunk; 0 for the padding of chunks.
    """

    chunk_of: Int[Tensor, "*rows T"]
    first_tokens: Int[Tensor, "*rows C"]
    num_tokens: Int[Tensor, "*rows C"]

    @property
    def tokens_before(self) -> Int[Tensor, "*rows C"]:
        """Return the place of the token before each chunk, whose hidden state predicts it; -1 if there is none."""
        return self.first_tokens - 1


@dataclass(frozen=True)
class TokenAlignment:
    """The smallest chunks of two token sequences that encode the same bytes of a text, or of each text of a batch.

    C is the largest number of chunks of a row; rows with fewer are padded.

    Attributes:
        num_chunks: Number of chunks of each row.
        starts: First byte of each chunk in the text.
        ends: First byte behind each chunk. Bytes that neither sequence encodes may be between two chunks.
        exact: Whether all tokens of the chunk, on both sides, encode exactly its bytes. The probability of another
            chunk is that of other bytes: one with an unknown token, a special token's text, or changed text.
        a: Chunks and tokens of the first sequence.
        b: Chunks and tokens of the second sequence.
        remainder: Number of bytes of each text behind its last chunk: those of sequences that end earlier, and those
            that only one of them encodes.
    """

    __repr__ = short_repr

    num_chunks: Int[Tensor, "*rows"]
    starts: Int[Tensor, "*rows C"]
    ends: Int[Tensor, "*rows C"]
    exact: Bool[Tensor, "*rows C"]
    a: AlignedSide
    b: AlignedSide
    remainder: Int[Tensor, "*rows"]

    @property
    def single(self) -> Bool[Tensor, "*rows C"]:
        """Return whether a chunk is one token on each side."""
        return (self.a.num_tokens == 1) & (self.b.num_tokens == 1)

    @property
    def num_bytes(self) -> Int[Tensor, "*rows C"]:
        """Return the number of bytes of each chunk; 0 for the padding of chunks."""
        return self.ends - self.starts

    def sum(self, log_probs: Float[Tensor, "*rows T"], side: Side) -> Float[Tensor, "*rows C"]:
        """Return the sum of the log-probabilities of the tokens of each chunk: the log-probability of the chunk.

        Those of tokens that belong to no chunk are left out. Differentiable.

        Args:
            log_probs: Log-probability of each token of the sequence given the tokens before it, in nats; 0 for a first
                token that is not predicted.
            side: `"a"` or `"b"`: the sequence.

        Raises:
            ShapeError: `log_probs` does not have the shape of the sequence.

        Example:
            >>> text, words = "hello hello", train_tokenizer("hello hello hello", vocab_size=300)
            >>> alignment = align_tokens(token_spans(words, text), token_spans(train_tokenizer((), "byte"), text))
            >>> alignment.sum(torch.full((11,), -0.5), "b")
            tensor([-2.5000, -3.0000])
        """
        chunk_of = (self.a if side == "a" else self.b).chunk_of
        if log_probs.shape != chunk_of.shape:
            shape, found = tuple(chunk_of.shape), tuple(log_probs.shape)
            raise ShapeError(f"log_probs of side {side!r} must have the shape of its tokens, {shape}, not {found}.")
        size = self.starts.shape[-1]
        index = torch.where(chunk_of < 0, size, chunk_of).to(log_probs.device)
        sums = log_probs.new_zeros(*log_probs.shape[:-1], size + 1)
        return sums.scatter_add(-1, index, log_probs)[..., :size]

    def bits_per_byte(self, log_probs: Float[Tensor, "*rows T"], side: Side) -> Float[Tensor, ""]:
        """Return the mean bits with which a model predicts a byte: `-sum(log_probs) / (ln 2 * bytes)`.

        Both are taken over the exact chunks, so the results of both sides are of the same bytes. NaN without any.
        """
        exact = self.exact.to(log_probs.device)
        num_bytes = int(self.num_bytes[self.exact].sum())
        return -self.sum(log_probs, side)[exact].sum() / (math.log(2) * num_bytes if num_bytes else math.nan)


def align_tokens(a: TokenSpans, b: TokenSpans, *, truncated: bool = False) -> TokenAlignment:
    """Return the smallest chunks of two token sequences of one text that encode the same bytes.

    Args:
        a: What `token_spans` returns for the first tokenizer, of a text or a batch of texts, or of token IDs.
        b: The same for the second tokenizer.
        truncated: Align the sequences as far as both go, where tokens were left out at the end of one of them. Their
            chunks are the first ones of the whole text.

    Raises:
        ShapeError: One has another batch size than the other.
        TextError: The texts of a row differ; or a sequence ends before its text, or before that of the other one, and
            `truncated` is not set.

    Example:
        >>> text, words = "hello hello", train_tokenizer("hello hello hello", vocab_size=300)
        >>> alignment = align_tokens(token_spans(words, text), token_spans(train_tokenizer((), "byte"), text))
        >>> alignment.num_bytes.tolist(), alignment.b.num_tokens.tolist(), alignment.single.tolist()
        ([5, 6], [5, 6], [False, False])
    """
    shape = a.ids.shape[:-1]
    if shape != b.ids.shape[:-1]:
        raise ShapeError(f"The sequences are of batches of different sizes: {tuple(shape)} and {tuple(b.stops.shape)}.")
    sizes = np.array([len(_text_of_both(a, b, row, truncated)) for row in range(len(a.texts))], dtype=np.int64)
    bases = np.cumsum(sizes + 1) - sizes - 1  # rows one after another: their intervals do not meet
    sides = [_FlatSide.of(spans, bases) for spans in (a, b)]
    lasts = _common_cuts(*sides)
    chunk_rows = sides[0].rows[lasts[0]]
    num_chunks = np.bincount(chunk_rows, minlength=len(sizes))
    aligned = [side.chunks(last) for side, last in zip(sides, lasts, strict=True)]
    starts = np.minimum(aligned[0].starts, aligned[1].starts)
    ends = np.maximum(aligned[0].ends, aligned[1].ends)
    exact = np.logical_and.reduce(
        [each.exact & (each.starts == starts) & (each.covered == ends - starts) for each in aligned]
    )
    first_chunks = np.cumsum(num_chunks) - num_chunks
    columns = np.arange(len(chunk_rows)) - first_chunks[chunk_rows]
    width = int(num_chunks.max(initial=0))

    def by_row(values: NDArray[np.generic]) -> Tensor:
        padded = np.zeros((len(sizes), width), dtype=values.dtype)
        padded[chunk_rows, columns] = values
        return torch.from_numpy(padded).reshape(*shape, width)

    remainder = sizes.copy()
    if len(chunk_rows):
        cut_ends = np.minimum(*(side.cut_ends[last] for side, last in zip(sides, lasts, strict=True)))
        has_chunks = num_chunks > 0
        last_chunks = (first_chunks + num_chunks - 1)[has_chunks]
        remainder[has_chunks] -= cut_ends[last_chunks] - bases[chunk_rows[last_chunks]]

    def aligned_side(spans: TokenSpans, side: _FlatSide, each: _Chunks) -> AlignedSide:
        chunk_of = np.full(spans.ids.numel(), -1, dtype=np.int64)
        is_chunked = each.chunk_of >= 0
        chunk_of[side.places[is_chunked]] = columns[each.chunk_of[is_chunked]]
        first_tokens = side.places[each.firsts] % max(spans.ids.shape[-1], 1)
        return AlignedSide(
            torch.from_numpy(chunk_of).reshape(spans.ids.shape), by_row(first_tokens), by_row(each.num_tokens)
        )

    return TokenAlignment(
        num_chunks=torch.from_numpy(num_chunks).reshape(shape),
        starts=by_row(starts - bases[chunk_rows]),
        ends=by_row(ends - bases[chunk_rows]),
        exact=by_row(exact),
        a=aligned_side(a, sides[0], aligned[0]),
        b=aligned_side(b, sides[1], aligned[1]),
        remainder=torch.from_numpy(remainder).reshape(shape),
    )


def _text_of_both(a: TokenSpans, b: TokenSpans, row: int, truncated: bool) -> bytes:
    """Return the text of a row, the longer one of two that were truncated; raise a `TextError` if they do not agree."""
    texts = a.texts[row], b.texts[row]
    longer, shorter = sorted(texts, key=len, reverse=True)
    if not longer.startswith(shorter):
        place = next(at for at, (one, other) in enumerate(zip(*texts, strict=False)) if one != other)
        parts = [text[max(place - 10, 0) : place + 10] for text in texts]
        raise TextError(f"The two texts of row {row} differ from byte {place} on: {parts[0]!r} and {parts[1]!r}.")
    for name, spans in (("a", a), ("b", b)):
        stop = int(spans.stops.reshape(-1)[row])
        if not truncated and stop < len(longer):
            raise TextError(
                f"Sequence {name!r} of row {row} ends at byte {stop:,} of {len(longer):,}: pass truncated=True."
            )
    return longer


class _Chunks(NamedTuple):
    """The tokens of one sequence in N chunks."""

    chunk_of: _Numbers  # chunk of each token, -1 for the remainder
    firsts: _Numbers  # first token of each chunk
    num_tokens: _Numbers
    starts: _Numbers  # first byte of each chunk
    ends: _Numbers  # last byte of each chunk + 1
    covered: _Numbers  # bytes that its tokens encode
    exact: NDArray[np.bool_]  # all of its tokens are exact


class _FlatSide(NamedTuple):
    """The N tokens of all texts of a batch that are in the texts, one text after another."""

    places: _Numbers  # place of each token in the flattened IDs
    rows: _Numbers
    starts: _Numbers  # first byte of each token, counted over all texts
    ends: _Numbers
    cut_ends: _Numbers  # last byte of the cut after it; `NO_CUT` without one
    exact: NDArray[np.bool_]

    @classmethod
    def of(cls, spans: TokenSpans, bases: _Numbers) -> "_FlatSide":
        """Return the tokens of spans; `bases` is where each text begins if all are counted."""
        places = np.flatnonzero(spans.in_text.numpy())
        rows = places // max(spans.ids.shape[-1], 1)
        starts, ends, cut_ends = (
            each.numpy().reshape(-1)[places] for each in (spans.starts, spans.ends, spans.cut_ends)
        )
        base = bases[rows]
        cut_ends = np.where(cut_ends == NO_CUT, NO_CUT, cut_ends + base)
        return cls(places, rows, starts + base, ends + base, cut_ends, spans.exact.numpy().reshape(-1)[places])

    def chunks(self, lasts: _Numbers) -> _Chunks:
        """Return the chunks that end with the tokens `lasts`."""
        count = len(lasts)
        chunk_of = np.searchsorted(lasts, np.arange(len(self.places)))
        is_chunked = chunk_of < count
        is_chunked[is_chunked] = self.rows[lasts[chunk_of[is_chunked]]] == self.rows[is_chunked]
        chunk_of = np.where(is_chunked, chunk_of, -1)
        tokens, chunks = np.flatnonzero(is_chunked), chunk_of[is_chunked]
        firsts = tokens[np.searchsorted(chunks, np.arange(count))] if count else lasts
        widths = (self.ends - self.starts)[tokens]
        return _Chunks(
            chunk_of,
            firsts,
            np.bincount(chunks, minlength=count),
            self.starts[firsts],
            self.ends[lasts],
            np.bincount(chunks, weights=widths, minlength=count).astype(np.int64),
            np.bincount(chunks[~self.exact[tokens]], minlength=count) == 0,
        )


def _common_cuts(a: _FlatSide, b: _FlatSide) -> tuple[_Numbers, _Numbers]:
    """Return the tokens of both sides after which both are cut: the most pairs of intervals that meet, in order."""
    # The intervals of a side are disjoint. Of the pairs that meet, the first is a common cut, and after it each first
    # pair whose intervals both come after those of the last common cut.
    tokens = [np.flatnonzero(side.cut_ends != NO_CUT) for side in (a, b)]
    (a_starts, a_ends), (b_starts, b_ends) = (
        (side.ends[places], side.cut_ends[places]) for side, places in zip((a, b), tokens, strict=True)
    )
    low, high = np.searchsorted(b_ends, a_starts), np.searchsorted(b_starts, a_ends, side="right")
    of_a = np.repeat(np.arange(len(low)), high - low)
    of_b = np.arange(len(of_a)) - np.repeat(np.cumsum(high - low) - high, high - low)
    is_common = np.append(True, (np.diff(of_a) > 0) & (np.diff(of_b) > 0))[: len(of_a)]
    following = np.maximum(np.searchsorted(of_a, of_a, side="right"), np.searchsorted(of_b, of_b, side="right"))
    pairs = np.flatnonzero(is_common)
    while len(pairs):  # one round for each pair of the longest chain in which each interval meets the next one
        pairs = following[pairs]
        pairs = pairs[pairs < len(of_a)]
        pairs = pairs[~is_common[pairs]]
        is_common[pairs] = True
    return tokens[0][of_a[is_common]], tokens[1][of_b[is_common]]
