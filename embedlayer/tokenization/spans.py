"""Which bytes of a text each token encodes: of a text, with any tokenizer; of token IDs alone, where these have bytes.

A text may be cut after a token, at any byte from the end of the token to the start of the next one. For byte-level BPE
and SentencePiece with byte fallback that is one place; for tokenizers that drop white space it is an interval.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from tokenizers import Encoding
from torch import Tensor

from embedlayer.core.errors import ShapeError, SizeError, TokenIdError, TokenizerError
from embedlayer.core.formatting import short_repr
from embedlayer.core.index_checks import as_ids
from embedlayer.core.shapes import IdsLike
from embedlayer.tokenization.bytes import TokenBytes
from embedlayer.tokenization.tokenizer_calls import ANCHOR_CHARS, encode_batch

_Numbers = NDArray[np.int64]
_Flags = NDArray[np.bool_]

_Spans = tuple[_Numbers, _Numbers, _Flags, _Flags]
"""First byte and end of each token, whether its bytes are those of the text, and whether a cut is after it."""

NO_CUT = -1
"""Value of `TokenSpans.cut_ends` where a text cannot be cut after a token."""


@dataclass(frozen=True)
class TokenSpans:
    """The bytes of one or several texts that each token encodes; offsets are in bytes of the text in UTF-8.

    Attributes:
        ids: Token IDs, `(T,)` or `(B, T)`; shorter sequences of a batch are padded.
        starts: First byte of each token, 0 for padding.
        ends: First byte behind each token. Equal to `starts` for a token of no bytes: a special token that is not in
            the text, padding, or a space that the tokenizer puts in front of a text.
        exact: Whether the bytes of the text are those that the token encodes. Not the unknown token, the text of a
            special token, nor text that the tokenizer changes before it splits it.
        in_text: Whether the token is part of the text: `False` for padding, and for special tokens that are not in it.
        cut_ends: Last byte at which the text can be cut after the token, from `ends` on; `NO_CUT` inside of a group of
            tokens for one stretch of text that cannot be divided among them, and after a token without bytes.
        stops: Number of bytes of the text that the tokens encode or drop: all of them, unless tokens were left out at
            its end.
        texts: The text of each row.
    """

    __repr__ = short_repr

    ids: Int[Tensor, "*rows T"]
    starts: Int[Tensor, "*rows T"]
    ends: Int[Tensor, "*rows T"]
    exact: Bool[Tensor, "*rows T"]
    in_text: Bool[Tensor, "*rows T"]
    cut_ends: Int[Tensor, "*rows T"]
    stops: Int[Tensor, "*rows"]
    texts: tuple[bytes, ...]


def token_spans(
    tokenizer: object,
    source: str | Sequence[str] | IdsLike,
    *,
    mask: Bool[Tensor, "*rows T"] | Int[Tensor, "*rows T"] | None = None,
    add_special_tokens: bool = False,
    max_tokens: int | None = None,
    pad_id: int = 0,
) -> TokenSpans:
    """Return which bytes of a text each of its tokens encodes.

    Of a text these are, in this order:

    - The bytes of the tokens, one after the other, if they join to the text. A space that the tokenizer puts in front
      of the text stands for no bytes of it.
    - Else those by the tokenizer's offsets. Tokens whose offsets overlap, such as the byte tokens of one character, are
      divided by their bytes where these join to the text, and are one group that cannot be divided elsewhere. A token
      that begins with a space, and a word of a tokenizer that drops spaces, take one dropped space before them.

    Of token IDs alone they are the bytes of the tokens one after the other, which define the text. A special token has
    no bytes; where the tokenizer puts a space in front of texts, the space after special tokens stands for no bytes.

    Args:
        tokenizer: A `TokenBytes`, which is read once for many calls; a `tokenizers.Tokenizer`; or a fast tokenizer of
            transformers.
        source: A text, a list of texts, or token IDs, `(T,)` or `(B, T)`.
        mask: Of IDs: `True`, or the number of the document, at tokens and 0 at padding.
        add_special_tokens: Of texts: add the special tokens of the tokenizer's template, such as `[CLS]`.
        max_tokens: Of texts: leave out the tokens behind this number. The text is encoded whole, so the others are its
            first tokens.
        pad_id: Of texts: the ID that fills up shorter sequences of a batch.

    Raises:
        ShapeError: `source` is neither text nor integers, or `mask` has another shape.
        SizeError: An option does not apply to the source, or `max_tokens` is negative.
        TokenizerError: `tokenizer` is no tokenizer, or cannot encode a text; or the bytes of IDs are not known without
            the text: words with or without a space, or an unknown token.
        TokenIdError: There is no token with an ID.

    Example:
        >>> spans = token_spans(train_tokenizer("hello hello hello", vocab_size=300), "hello hello")
        >>> spans.starts.tolist(), spans.ends.tolist()
        ([0, 5], [5, 11])
    """
    tokens = tokenizer if isinstance(tokenizer, TokenBytes) else TokenBytes(tokenizer)
    texts = [source] if isinstance(source, str) else source
    if isinstance(texts, list | tuple) and texts and all(isinstance(text, str) for text in texts):
        if mask is not None:
            raise SizeError("mask belongs to token IDs; sequences of texts are padded here, see TokenSpans.in_text.")
        if max_tokens is not None and max_tokens < 0:
            raise SizeError(f"max_tokens must not be negative; found {max_tokens}.")
        encodings = encode_batch(tokens.tokenizer, texts, offsets=True, add_special_tokens=add_special_tokens)
        rows = [
            _row_of_text(tokens, encoding, text.encode(), add_special_tokens).first(max_tokens)
            for encoding, text in zip(encodings, texts, strict=True)
        ]
        return _joined(rows, () if isinstance(source, str) else (len(rows),), pad_id)
    if add_special_tokens or max_tokens is not None:
        raise SizeError("add_special_tokens and max_tokens belong to texts; here are token IDs, which are used as is.")
    ids = as_ids(source, beside=torch.empty(0))
    if mask is not None and mask.shape != ids.shape:
        raise ShapeError(f"mask must have the shape of the IDs, {tuple(ids.shape)}; found {tuple(mask.shape)}.")
    is_token = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    size = math.prod(ids.shape[:-1])
    all_ids, flags = (each.cpu().numpy().reshape(size, ids.shape[-1]) for each in (ids.long(), is_token))
    rows = [_row_of_ids(tokens, all_ids[row], flags[row], row) for row in range(size)]
    return _joined(rows, ids.shape[:-1], pad_id, width=ids.shape[-1])


def chunk_spans(tokens: TokenBytes, chunk: str, before: str) -> TokenSpans:
    """Return the spans of a chunk of a text that is cut where its IDs do not change; offsets are those in the chunk.

    `chunk` is one of `data.read_text_chunks` for this tokenizer. `before` is the text before it, or its last
    `ANCHOR_CHARS` characters; `""` for the first chunk.
    """
    anchor = before[-ANCHOR_CHARS:]
    if not anchor:
        return token_spans(tokens, chunk)
    spans, size, num_bytes = (
        token_spans(tokens, anchor + chunk),
        len(token_spans(tokens, anchor).ids),
        len(anchor.encode()),
    )
    starts, ends, cut_ends = (each[size:] for each in (spans.starts, spans.ends, spans.cut_ends))
    return TokenSpans(
        ids=spans.ids[size:],
        starts=(starts - num_bytes).clamp(min=0),
        ends=(ends - num_bytes).clamp(min=0),
        exact=spans.exact[size:],
        in_text=spans.in_text[size:],
        cut_ends=torch.where(cut_ends == NO_CUT, NO_CUT, (cut_ends - num_bytes).clamp(min=0)),
        stops=spans.stops - num_bytes,
        texts=(chunk.encode(),),
    )


class _Row(NamedTuple):
    """The fields of `TokenSpans` for one text."""

    ids: _Numbers
    starts: _Numbers
    ends: _Numbers
    exact: _Flags
    in_text: _Flags
    cut_ends: _Numbers
    stop: int
    text: bytes

    def first(self, tokens: int | None) -> "_Row":
        """Return the row without the tokens behind a number of them."""
        if tokens is None:
            return self
        left_out = self.starts[tokens:][self.in_text[tokens:]]
        ids, starts, ends, cut_ends = (each[:tokens] for each in (self.ids, self.starts, self.ends, self.cut_ends))
        stop = int(left_out[0]) if len(left_out) else self.stop
        return _Row(ids, starts, ends, self.exact[:tokens], self.in_text[:tokens], cut_ends, stop, self.text)


def _joined(rows: Sequence[_Row], shape: Sequence[int], pad_id: int, width: int | None = None) -> TokenSpans:
    """Return rows as padded tensors; `shape` is that of the batch."""
    width = max((len(row.ids) for row in rows), default=0) if width is None else width

    def padded(fields: Iterable[NDArray[Any]], padding: int) -> Tensor:
        values = np.full((len(rows), width), padding, dtype=bool if padding is False else np.int64)
        for filled, field in zip(values, fields, strict=True):
            filled[: len(field)] = field
        return torch.from_numpy(values).reshape(*shape, width)

    return TokenSpans(
        ids=padded((row.ids for row in rows), pad_id),
        starts=padded((row.starts for row in rows), 0),
        ends=padded((row.ends for row in rows), 0),
        exact=padded((row.exact for row in rows), False),
        in_text=padded((row.in_text for row in rows), False),
        cut_ends=padded((row.cut_ends for row in rows), NO_CUT),
        stops=torch.tensor([row.stop for row in rows], dtype=torch.int64).reshape(tuple(shape)),
        texts=tuple(row.text for row in rows),
    )


def _row_of_ids(tokens: TokenBytes, ids: _Numbers, is_token: _Flags, row: int) -> _Row:
    """Return the spans of token IDs in the text that their bytes join to; `row` is the number for errors."""
    known = tokens.by_id
    wrong = np.flatnonzero(is_token & ((ids < 0) | (ids >= len(known.exists))))
    if not len(wrong):
        indices = np.where(is_token, ids, 0)
        wrong = np.flatnonzero(is_token & ~known.exists[indices])
    if len(wrong):
        raise TokenIdError(f"The tokenizer has no token {ids[wrong[0]]}, the ID at row {row}, column {wrong[0]}.")
    special = known.special[indices]
    encodes_all = len(tokens.single_bytes) >= 256 and not tokens.suffix
    in_text = is_token & ~special if encodes_all else is_token & (~special | known.unknown[indices])
    lost = np.flatnonzero(in_text & (known.takes_space[indices] | (known.unknown[indices] & (not encodes_all))))
    if len(lost) or (tokens.suffix and in_text.any()):
        name = tokens.entries[int(ids[lost[0]])] if len(lost) else tokens.suffix
        kind = f"{type(tokens.tokenizer.model).__name__} ({tokens.convention})"
        raise TokenizerError(
            f"Only the text has the bytes of {name!r}, a token of a {kind}: token_spans(tokenizer, text)."
        )
    follows_text = np.concatenate([[False], in_text[:-1]])
    put = in_text & ~follows_text & known.begins_with_space[indices] & tokens.puts_space
    lengths = np.where(in_text, known.lengths[indices] - put, 0)
    encoded = [known.encoded[index] for index in indices[in_text].tolist()]
    for place in np.flatnonzero(put[in_text]):
        encoded[place] = encoded[place][1:]
    text = b"".join(encoded)
    ends = np.cumsum(lengths)
    cut_ends = np.where(lengths > 0, ends, NO_CUT)
    return _Row(ids, ends - lengths, ends, in_text, in_text, cut_ends, len(text), text)


def _row_of_text(tokens: TokenBytes, encoding: Encoding, text: bytes, has_template: bool) -> _Row:
    """Return the spans of the tokens of an encoded text; with `has_template` the tokens of the template are marked."""
    ids = np.array(encoding.ids, dtype=np.int64)
    in_text = np.array(encoding.special_tokens_mask) == 0 if has_template else np.ones(len(ids), dtype=bool)
    own = ids[in_text]
    known = tokens.by_id
    joined = b"".join([known.encoded[token_id] for token_id in own.tolist()])
    put = len(joined) - len(text)  # 1 for a space that the tokenizer puts in front of the text
    if joined == text or (put == 1 and joined[:1] == b" " and joined.endswith(text)):
        ends = np.cumsum(known.lengths[own]) - put
        starts = np.maximum(ends - known.lengths[own], 0)
        exact, is_cut = np.ones(len(own), dtype=bool), ends > starts
    else:
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)[in_text]
        if not text.isascii():
            first_bytes = np.flatnonzero(np.frombuffer(text, dtype=np.uint8) & 0xC0 != 0x80)
            offsets = np.append(first_bytes, len(text))[offsets]
        starts, ends, exact, is_cut = _spans_by_offsets(tokens, own, offsets, text)
    exact &= ~(known.special | known.unknown)[own]
    cut_ends = np.where(is_cut, np.append(starts[1:], len(text))[: len(own)], NO_CUT)
    if in_text.all():
        return _Row(ids, starts, ends, exact, in_text, cut_ends, len(text), text)
    # A token of the template has no bytes: it begins and ends where the token of the text before it ends.
    before = np.concatenate([[0], ends])[np.cumsum(in_text)]

    def spread(values: NDArray[Any], others: NDArray[Any] | int) -> NDArray[Any]:
        spread_values = np.empty(len(ids), dtype=values.dtype)
        spread_values[:] = others
        spread_values[in_text] = values
        return spread_values

    fields = spread(starts, before), spread(ends, before), spread(exact, 0), in_text, spread(cut_ends, NO_CUT)
    return _Row(ids, *fields, len(text), text)


def _spans_by_offsets(tokens: TokenBytes, ids: _Numbers, offsets: _Numbers, text: bytes) -> _Spans:
    """Return the spans of tokens by their offsets, in groups whose offsets overlap; see `token_spans`."""
    if not len(ids):
        return ids, ids, np.zeros(0, dtype=bool), np.zeros(0, dtype=bool)
    known, content = tokens.by_id, np.frombuffer(text + b"\0", dtype=np.uint8)
    reach = np.maximum.accumulate(offsets[:, 1])
    is_first = np.concatenate([[True], offsets[1:, 0] >= reach[:-1]])
    is_last = np.append(is_first[1:], True)
    firsts, group = np.flatnonzero(is_first), np.cumsum(is_first) - 1
    ends = reach[is_last]
    ends_before = np.concatenate([[0], ends[:-1]])
    starts = np.maximum(np.minimum.reduceat(offsets[:, 0], firsts), ends_before)
    lengths = known.lengths[ids]
    joined_lengths = np.add.reduceat(lengths, firsts)

    heads = ids[firsts]
    extra = joined_lengths - (ends - starts)
    is_after_space = (starts > ends_before) & (content[starts - 1] == ord(" "))
    opens = (starts == ends_before) & ((starts == 0) | known.added[ids[firsts - 1]])
    one_more = (extra == 1) & known.begins_with_space[heads]
    encodes_space = one_more & is_after_space
    is_put = one_more & opens & ~encodes_space
    takes_space = (extra == 0) & known.takes_space[heads] & is_after_space
    # A group is divided by the bytes of its tokens if these join to its text: as they are, with a dropped space before
    # it, or less a space that the tokenizer puts in front of the text or after an added token.
    is_candidate = encodes_space | is_put | (extra == 0)

    joined = np.frombuffer(b"".join([known.encoded[token_id] for token_id in ids.tolist()]), dtype=np.uint8)
    joined_starts = np.cumsum(joined_lengths) - joined_lengths
    group_of_byte = np.repeat(np.arange(len(firsts)), joined_lengths)
    places = np.arange(len(joined)) + np.repeat(starts - encodes_space - is_put - joined_starts, joined_lengths)
    differs = content[np.clip(places, 0, len(text))] != joined
    differs[joined_starts[is_put]] = False
    joins = is_candidate & (np.bincount(group_of_byte[differs], minlength=len(firsts)) == 0)

    starts = starts - (joins & (encodes_space | takes_space))
    lengths = lengths.copy()
    lengths[firsts] += (joins & takes_space).astype(np.int64) - (joins & is_put)
    within = np.cumsum(lengths)
    within -= np.repeat((within - lengths)[firsts], np.diff(np.append(firsts, len(ids))))
    exact = joins[group]
    token_ends = np.where(exact, starts[group] + within, ends[group])
    token_starts = np.where(exact, token_ends - lengths, starts[group])
    return token_starts, token_ends, exact, (token_ends > token_starts) & (exact | is_last)
