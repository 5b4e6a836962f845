"""Compare two tokenizers: which tokens of one are the same as tokens of the other, and how both split a text."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from embedlayer.core.errors import TextError
from embedlayer.tokenization.alignment import align_tokens
from embedlayer.tokenization.bytes import TokenBytes
from embedlayer.tokenization.ids import EQUIVALENT, USUAL_NAMES, end_of_text_id
from embedlayer.tokenization.spans import TokenSpans, chunk_spans
from embedlayer.tokenization.tokenizer_calls import ANCHOR_CHARS

_NAMES_BY_ROLE = tuple(
    names[:1] + USUAL_NAMES.get(EQUIVALENT.get(role, ""), ()) + names[1:]
    for role, names in USUAL_NAMES.items()
    if role not in ("cls_token", "sep_token")
)
"""The usual names of the special token of each role; GPT-2's single one begins and ends a text."""


def match_tokenizers(old: object, new: object) -> tuple[int | None, ...]:
    """Return for each ID of the new tokenizer the old tokenizer's ID of the same token, or `None`.

    Two tokens are the same if they encode the same bytes of a text, however a tokenizer writes them. GPT-2's `Ġdog`,
    SentencePiece's `▁dog` and BERT's `dog` all encode " dog"; `Ċ` and `<0x0A>` encode a line feed.

    - A token that continues a word (`##dog`) never matches one that starts a word (`dog`).
    - A token that ends a word (`dog</w>`) matches only in a tokenizer that also marks the ends of words.
    - If both tokenizers write spaces in the same way, tokens with equal names match first. Added tokens with equal
      names and other bytes, such as LLaMA's `<x>` with its space, match if no token has the same bytes.
    - A special token matches the one with the same name, special or not, or else the one with the same role. The end
      of a text comes first, and is the token that `end_of_text_id` finds: GPT-2's `<|endoftext|>` matches `</s>` and
      not `<s>`.

    Args:
        old: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
        new: The same, for the new tokenizer.

    Raises:
        TokenizerError: An argument is no tokenizer.

    Example:
        >>> text = "I love dogs, I love cats"
        >>> old, new = train_tokenizer(text, kind="word"), train_tokenizer(text, vocab_size=270)
        >>> sources = match_tokenizers(old, new)
        >>> [(new.id_to_token(i), old.id_to_token(j)) for i, j in enumerate(sources) if j is not None]
        [('<|endoftext|>', '<|endoftext|>'), (',', ','), ('Ġlove', 'love')]
    """
    theirs, ours = TokenBytes(old), TokenBytes(new)
    same = theirs.convention == ours.convention or {theirs.convention, ours.convention} == {"word", "wordpiece"}
    common = {token_id: theirs.vocabulary[name] for token_id, name in ours.entries.items() if name in theirs.vocabulary}
    # A token that one tokenizer lists as special always matches its name: there are files in which `<start_of_turn>` is
    # an ordinary entry. Otherwise added tokens match only added tokens, and if the tokenizers write spaces in different
    # ways, only added tokens match by name.
    by_name = {
        token_id: old_id
        for token_id, old_id in common.items()
        if token_id in ours.special
        or old_id in theirs.special
        or ((same or token_id in ours.added) and (old_id in theirs.added) == (token_id in ours.added))
    }
    matches = _equal_roles(theirs, ours, set(by_name.values())) | by_name
    respelled = {i for i in by_name.keys() & ours.added if ours.readings(i) != theirs.readings(by_name[i])}
    for token_id in ours.entries.keys() - ours.special - (matches.keys() - respelled):
        position = ours.word_position(token_id)
        for old_id in (theirs.by_bytes.get(readings) for readings in ours.readings(token_id)):
            if old_id is not None and (position is None or theirs.word_position(old_id) in (None, position)):
                matches[token_id] = old_id
                break
    return tuple(matches.get(token_id) for token_id in range(max(ours.entries, default=-1) + 1))


def common_tokens(old: object, new: object) -> list[tuple[int, int]]:
    """Return the tokens that two tokenizers have in common, one to one: old ID and new ID of each, by new ID.

    These are the matches of `match_tokenizers`, with at most one new token for each old one. Of several new tokens that
    match one old token, a token with the same name wins, then one that is no byte-fallback token (`A` before `<0x41>`),
    then the lowest ID. If both tokenizers have byte-fallback tokens, these match only each other. Of an edited
    tokenizer and its original, each old token therefore matches itself, and a new token matches none.
    """
    theirs, ours = TokenBytes(old), TokenBytes(new)
    have_bytes = {"sentencepiece"} == {theirs.convention, ours.convention} and theirs.single_bytes and ours.single_bytes
    chosen: dict[int, tuple[tuple[bool, bool], int]] = {}
    for token_id, source in enumerate(match_tokenizers(old, new)):
        if source is None or not ours.entries[token_id]:
            continue
        is_byte = ours.is_byte(token_id)
        if have_bytes and is_byte != theirs.is_byte(source):
            continue
        rank = (ours.entries[token_id] != theirs.entries[source], is_byte)
        if source not in chosen or rank < chosen[source][0]:
            chosen[source] = rank, token_id
    return sorted(((source, token_id) for source, (_, token_id) in chosen.items()), key=lambda pair: pair[1])


def _equal_roles(old: TokenBytes, new: TokenBytes, taken: set[int]) -> dict[int, int]:
    """Return the old ID of each new ID of a token without text that has the same role, such as the end of a text.

    The usual names state the role of a token: `</s>` and `<|endoftext|>` both end a text. Old IDs in `taken` are not
    matched again. Several new tokens of one role get the same old ID.
    """
    ends = end_of_text_id(new.tokenizer), end_of_text_id(old.tokenizer)
    matches: dict[int, int] = {}
    if ends[0] in new.special and ends[1] in old.special and ends[1] not in taken:
        matches[ends[0]] = ends[1]
    for names in _NAMES_BY_ROLE:
        candidates = [old.vocabulary[name] for name in names if old.vocabulary.get(name) in old.special]
        free = [token_id for token_id in candidates if token_id not in taken]
        for name in names:
            token_id = new.vocabulary.get(name)
            if token_id in new.special and free:
                matches.setdefault(token_id, free[0])
    return matches


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
