"""Compare two tokenizers: the tokens that both have, and how they split a text."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from embedlayer.core.errors import TextError
from embedlayer.tokenization.alignment import align_tokens
from embedlayer.tokenization.bytes import TokenBytes
from embedlayer.tokenization.spans import TokenSpans, chunk_spans
from embedlayer.tokenization.tokenizer_calls import ANCHOR_CHARS
from embedlayer.tokenization.tokenizer_match import match_tokenizers


@dataclass(frozen=True)
class ComparedTokenizer:
    """One of two compared tokenizers.

    Attributes:
        num_tokens: Number of its tokens, added tokens too.
        shared: Share of them that the other tokenizer has too; see `match_tokenizers`.
        text_tokens: Number of tokens of the text; `None` without a text.
        bytes_per_token: Bytes of the text for each of them; `None` without a text, and of a text without tokens.
        coverage: Share of the tokens of the text that the other tokenizer has too; `None` likewise.
    """

    num_tokens: int
    shared: float
    text_tokens: int | None = None
    bytes_per_token: float | None = None
    coverage: float | None = None


@dataclass(frozen=True)
class TokenizerComparison:
    """What two tokenizers have in common. What is about a text is `None` without one.

    Attributes:
        a: The first tokenizer.
        b: The second one.
        num_bytes: Bytes of the text in UTF-8.
        num_chunks: Number of the smallest chunks of tokens that encode the same bytes; see `align_tokens`.
        one_to_one: Share of the chunks that are one token on each side; `None` also without chunks.
        inexact: Share of the bytes that are not in exact chunks: bytes that a tokenizer drops or changes, unknown
            tokens, and what they share a chunk with.
    """

    a: ComparedTokenizer
    b: ComparedTokenizer
    num_bytes: int | None = None
    num_chunks: int | None = None
    one_to_one: float | None = None
    inexact: float | None = None


def compare_tokenizers(a: object, b: object, text: str | Iterable[str] | None = None) -> TokenizerComparison:
    """Return the tokens that two tokenizers have in common, and how both split a text.

    Args:
        a: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
        b: The same for the second tokenizer.
        text: Text that is encoded with both and aligned; or the chunks of a text of any length, from
            `data.read_text_chunks(file, tokenizer=(a, b))`, which are encoded one after another. The numbers are equal.

    Raises:
        TokenizerError: An argument is no tokenizer, or cannot encode the text.
        TextError: The text is empty.

    Example:
        >>> text = "I love dogs, I love cats"
        >>> words, letters = train_tokenizer(text, vocab_size=270), train_tokenizer((), kind="byte")
        >>> comparison = compare_tokenizers(words, letters, text)
        >>> comparison.a.text_tokens, comparison.b.text_tokens, comparison.num_chunks
        (16, 24, 16)
    """
    tokens = TokenBytes(a), TokenBytes(b)
    matches = [
        {token for token, match in enumerate(match_tokenizers(other.tokenizer, one.tokenizer)) if match is not None}
        for one, other in (tokens, tokens[::-1])
    ]
    if text is None:
        a_side, b_side = (_compared(*each) for each in zip(tokens, matches, strict=True))
        return TokenizerComparison(a_side, b_side)
    num_bytes, num_chunks, num_single, num_exact = 0, 0, 0, 0
    counts = [[0, 0], [0, 0]]  # of each side, its tokens and those that are matched
    for spans in _spans_of_parts(tokens, [text] if isinstance(text, str) else text):
        alignment = align_tokens(*spans)
        num_bytes += len(spans[0].texts[0])
        num_chunks += int(alignment.num_chunks)
        num_single += int(alignment.single.sum())
        num_exact += int(alignment.num_bytes[alignment.exact].sum())
        for count, matched, side in zip(counts, matches, spans, strict=True):
            ids = side.ids.tolist()
            count[0] += len(ids)
            count[1] += sum(token_id in matched for token_id in ids)
    if not num_bytes:
        raise TextError("The text is empty: there is nothing to compare. Pass a text of some hundred words.")
    a_side, b_side = (_compared(*each, num_bytes) for each in zip(tokens, matches, counts, strict=True))
    return TokenizerComparison(
        a_side,
        b_side,
        num_bytes,
        num_chunks,
        one_to_one=num_single / num_chunks if num_chunks else None,
        inexact=1 - num_exact / num_bytes,
    )


def _spans_of_parts(
    tokens: tuple[TokenBytes, TokenBytes], chunks: Iterable[str]
) -> Iterator[tuple[TokenSpans, TokenSpans]]:
    """Yield the spans of both tokenizers in parts of a text, whose chunks are those of the whole text.

    A part is one or more of the passed chunks. Each part but the last ends where both tokenizers end a token and have
    dropped no bytes, so that the whole text has a common cut there.
    """
    part = before = ""
    for chunk in chunks:
        part += chunk
        first, second = (chunk_spans(each, part, before) for each in tokens)
        if all(len(each.ids) and each.ends[-1] == each.cut_ends[-1] for each in (first, second)):
            yield first, second
            part, before = "", (before + part)[-ANCHOR_CHARS:]
    if part:
        yield first, second


def _compared(
    tokens: TokenBytes, matched: set[int], count: Sequence[int] | None = None, num_bytes: int = 0
) -> ComparedTokenizer:
    """Return one side of a comparison; `count` has its tokens of a text of `num_bytes`, and how many are matched."""
    own = len(tokens.entries), len(matched) / len(tokens.entries) if tokens.entries else 0.0
    if count is None:
        return ComparedTokenizer(*own)
    text_tokens, text_matched = count
    if not text_tokens:
        return ComparedTokenizer(*own, 0)
    return ComparedTokenizer(*own, text_tokens, num_bytes / text_tokens, text_matched / text_tokens)
