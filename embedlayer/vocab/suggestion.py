"""Which tokens to add to a tokenizer, or to remove from it, for a text; with what that saves on held-out text."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from embedlayer.core.errors import SizeError, TextError, VocabularyError
from embedlayer.core.formatting import short_repr
from embedlayer.data.memmap import IdArray
from embedlayer.io.files import JsonObject
from embedlayer.tokenization.bytes import TokenBytes, token_text
from embedlayer.tokenization.ids import table_size, unknown_id
from embedlayer.tokenization.tokenizer_calls import as_tokenizer, encode, encode_batch, normalized
from embedlayer.vocab.bpe_merges import BPEMerges, cheapest_leaves, continue_merges, cut_words
from embedlayer.vocab.new_tokens import AddedMerge
from embedlayer.vocab.token_usage import text_chunks
from embedlayer.vocab.tokenizer_edit import edit_tokenizer, required_tokens, tokenizer_data

Texts = Path | str | Iterable[str | Path]
"""One text or several (`str`), or files and folders with text (`Path`), also mixed."""

HELD_OUT = 0.1
"""Share of the bytes of a text that is held out."""

MERGES_HEADER = "#version: 0.2"
"""First line of a list of merges, as in the `merges.txt` of GPT-2."""

_MOST_HELD_OUT = 1 << 24
_AT_ONCE = 32


@dataclass(frozen=True)
class EncodedSize:
    """Store the size of a text and the number of tokens that encode it.

    Attributes:
        num_bytes: Number of UTF-8 bytes.
        num_tokens: Number of tokens, without special tokens around the text.
        num_unknown: How many of them are the unknown token.
    """

    num_bytes: int
    num_tokens: int
    num_unknown: int

    @property
    def bytes_per_token(self) -> float:
        """Return the mean number of bytes that a token encodes; `num_bytes` if there is no token."""
        return self.num_bytes / max(self.num_tokens, 1)


@dataclass(frozen=True)
class TokenScore:
    """Store what one suggested token changes on held-out text.

    Attributes:
        text: Text of the token.
        subwords: Texts of the tokens that encode it without the suggestion; after a removal, those that then do.
        count: How often the token encodes a part of the held-out text.
    """

    text: str
    subwords: tuple[str, ...]
    count: int

    @property
    def saved(self) -> int:
        """Return how many tokens fewer the held-out text has with this token than without it.

        It is 0 for a word that was one unknown token.
        """
        return self.count * (len(self.subwords) - 1)


@dataclass(frozen=True)
class TokenSuggestion:
    """Store suggested tokens, and the size of held-out text before and after they are added or removed.

    Attributes:
        tokens: For `edit_tokenizer(add=...)`: an `AddedMerge` each for BPE, else texts. Of `suggest_removals`, for
            `edit_tokenizer(remove=...)`: entries of the vocabulary.
        scores: What each of the tokens changes, in the same order.
        requested: How many tokens were requested; the text may yield fewer.
        before: Size of the held-out text, encoded with the old tokenizer.
        after: The same text, encoded with the edited tokenizer.
    """

    __repr__ = short_repr

    tokens: tuple[str | AddedMerge, ...]
    scores: tuple[TokenScore, ...]
    requested: int
    before: EncodedSize
    after: EncodedSize

    def lines(self) -> list[str]:
        """Return the lines of a file for `embedlayer vocab add --terms`, or for `remove --tokens`.

        Merges are written as in a `merges.txt`: first `#version: 0.2`, then the two parts of each with a space between.
        Texts are one a line, as they are (`--as-is`). `read_terms` reads the lines back.
        """
        merges = [f"{token.left} {token.right}" for token in self.tokens if isinstance(token, AddedMerge)]
        return [MERGES_HEADER, *merges] if merges else [str(token) for token in self.tokens]


def read_terms(lines: Sequence[str]) -> list[str | AddedMerge]:
    """Return the tokens that the lines of a file name: texts, or after the line `#version: ...` merges."""
    filled = [line for line in lines if line.strip()]
    if not filled or not filled[0].startswith(MERGES_HEADER.split()[0]):
        return list(filled)
    merges: list[str | AddedMerge] = []
    for line in filled[1:]:
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise VocabularyError(f"{line!r} is no merge of two tokens, as after {filled[0]!r}.")
        merges.append(AddedMerge(*parts))
    return merges


def suggest_tokens(
    tokenizer: object, texts: Texts, *, count: int = 500, held_out: Texts | None = None
) -> TokenSuggestion:
    """Return the tokens that shorten the encoding of a text most, and what they save on a held-out part of it.

    What is suggested depends on the kind of tokenizer:

    - **BPE**: the next merges of its training, continued on the text; see `AddedMerge`. Merges join tokens inside a
      pre-token only, and never special or added tokens. Each merge comes after those of its parts.
    - **Unigram**: runs of its subwords inside a pre-token, found by the same merges, by the tokens that they save.
    - **WordPiece and word tokenizers**: whole words, by the tokens that they save. A word that is unknown so far counts
      as one of as many subwords as it has characters.

    About a tenth of the text is held out, in pieces spread over the text, at most 16 MiB. The suggestion does not
    depend on it. Memory use grows with the number of different words, not with the size of the text.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
        texts: One text or several (`str`), or files and folders with text (`Path`), also mixed; read once.
        count: Largest number of tokens.
        held_out: Other text of the same kind to measure on, which is kept in memory; then all of `texts` is trained on.

    Raises:
        TextError: The text is too short to hold out a part, an item is neither a text nor a path, a file is not plain
            text, or the first text looks like the path of a file.
        FileError: A file cannot be read.
        VocabularyError: No pair of tokens and no word occurs twice.
        TokenizerError: `tokenizer` is no tokenizer, or cannot be written as a `tokenizer.json`.

    Example:
        >>> tokenizer = train_tokenizer("I love dogs, I love cats", vocab_size=270)
        >>> suggestion = suggest_tokens(tokenizer, "The other otters love otters. " * 200, count=3)
        >>> suggestion.tokens[0], suggestion.scores[2].text
        (AddedMerge(left='e', right='r'), ' ot')
        >>> round(suggestion.before.bytes_per_token, 2), round(suggestion.after.bytes_per_token, 2)
        (1.15, 1.76)

    Reference:
        See `embedlayer.vocab.bpe_merges`.
    """
    old, parts = _opened(tokenizer, count), _Parts(share=HELD_OUT if held_out is None else 0.0)
    data = tokenizer_data(old.tokenizer)
    kind = data["model"]["type"]
    training = parts.training(text_chunks(texts, old.tokenizer))
    tokens: Sequence[str | AddedMerge]
    if kind in ("BPE", "Unigram"):
        tokens = _merged_tokens(old, data, training, count)
    else:
        tokens = _whole_words(old, training, count)
    measured = parts.require_held_out() if held_out is None else [*text_chunks(held_out, old.tokenizer)]
    if not tokens:
        raise VocabularyError(f"No candidate occurs twice in {parts.num_bytes:,} bytes: pass more text.")
    edit = edit_tokenizer(old.tokenizer, add=tokens)
    edited, unknown = TokenBytes(edit.tokenizer), _unknown(old, data)
    before, counts = _counted(measured, old.tokenizer), _counted(measured, edited.tokenizer)
    new_ids = [token_id for token_id, source in enumerate(edit.sources) if source is None]
    subwords = _subwords(old, tokens)
    scores = [
        TokenScore(token_text(edit.tokenizer, token_id), each, int(counts[token_id]))
        for token_id, each in zip(new_ids, subwords, strict=True)
    ]
    sizes = _size(measured, before, unknown, old), _size(measured, counts, unknown, edited)
    return TokenSuggestion(tuple(tokens), tuple(scores), count, *sizes)


def suggest_removals(
    tokenizer: object, texts: Texts, *, count: int = 500, held_out: Texts | None = None
) -> TokenSuggestion:
    """Return the tokens of a BPE tokenizer whose removal lengthens the encoding of a text least, the cheapest first.

    Only leaves are suggested: tokens from which no merge builds a longer one, or only merges of tokens that are
    suggested too. So no other token is lost. Special and added tokens, single bytes and letters, and tokens that the
    tokenizer itself needs are not suggested.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
        texts: As for `suggest_tokens`. The tokens are chosen by the text that is not held out.
        count: Largest number of tokens.
        held_out: As for `suggest_tokens`.

    Raises:
        VocabularyError: The tokenizer has no merges, or no token may be removed. All other errors are those of
            `suggest_tokens`.

    Example:
        >>> tokenizer = train_tokenizer("I love dogs, I love cats", vocab_size=261)
        >>> suggestion = suggest_removals(tokenizer, "I love cats, not dogs. " * 300, count=2)
        >>> [score.text for score in suggestion.scores], suggestion.after.num_tokens - suggestion.before.num_tokens
        ([' love', ' lo'], 44)
    """
    old, parts = _opened(tokenizer, count), _Parts(share=HELD_OUT if held_out is None else 0.0)
    data = tokenizer_data(old.tokenizer)
    if data["model"]["type"] != "BPE" or not data["model"]["merges"]:
        raise VocabularyError(f"This {data['model']['type']} tokenizer has no merges. Use trim_vocabulary instead.")
    merges = BPEMerges(data["model"])
    counts = _counted(parts.training(text_chunks(texts, old.tokenizer)), old.tokenizer)
    measured = parts.require_held_out() if held_out is None else [*text_chunks(held_out, old.tokenizer)]
    kept = {old.entries[i] for i in old.added | old.single_bytes | required_tokens(data, old).keys()}
    kept |= {entry for entry in old.vocabulary if not _fits_a_line(entry)}
    used = {old.entries[i]: int(counts[i]) for i in np.flatnonzero(counts).tolist()}
    leaves = cheapest_leaves(merges, used, count, kept=kept)
    if not leaves:
        raise VocabularyError("The tokenizer needs all of its tokens: none is a leaf that may be removed.")
    edited, unknown = TokenBytes(edit_tokenizer(old.tokenizer, remove=leaves).tokenizer), _unknown(old, data)
    before, after = _counted(measured, old.tokenizer), _counted(measured, edited.tokenizer)
    scores = []
    for leaf in leaves:
        token_id = old.vocabulary[leaf]
        subwords = tuple(token_text(edited.tokenizer, i) for i in edited.encode(old.readings(token_id)[0]))
        scores.append(TokenScore(token_text(old.tokenizer, token_id), subwords, int(before[token_id])))
    sizes = _size(measured, before, unknown, old), _size(measured, after, unknown, edited)
    return TokenSuggestion(tuple(leaves), tuple(scores), count, *sizes)


# The text


class _Parts:
    """Split the chunks of a text into a part to train on and a part that is held out, a share of the bytes."""

    def __init__(self, share: float) -> None:
        self.held_out: list[str] = []
        self.num_bytes = self._held = 0
        self._share = share

    def training(self, chunks: Iterable[str]) -> Iterator[str]:
        """Yield the chunks that are not held out; the others are stored in `held_out`."""
        for chunk in chunks:
            size = len(chunk.encode())
            self.num_bytes += size
            if self._held + size > self._share * self.num_bytes:
                yield chunk
                continue
            self.held_out.append(chunk)
            self._held += size
            if self._held > _MOST_HELD_OUT:
                yield from self.held_out[1::2]
                self.held_out = self.held_out[::2]
                self._held = sum(len(each.encode()) for each in self.held_out)
                self._share /= 2

    def require_held_out(self) -> list[str]:
        """Return the chunks that are held out, after all chunks were read; without one, raise a `TextError`."""
        if not self.held_out:
            raise TextError(f"{self.num_bytes:,} bytes of text are too few to hold out a tenth.")
        return self.held_out


def _opened(tokenizer: object, count: int) -> TokenBytes:
    """Return the tokens of a tokenizer; raise a `SizeError` if the requested number of tokens is below 1."""
    if count < 1:
        raise SizeError(f"count is {count}; it must be 1 or more, the number of tokens to suggest.")
    return TokenBytes(as_tokenizer(tokenizer))


def _counted(chunks: Iterable[str], tokenizer: Tokenizer) -> IdArray:
    """Encode chunks of text, each by itself, and return how often each token ID occurs, `(V,)`."""
    rest, counts = iter(chunks), np.zeros(table_size(tokenizer), dtype=np.int64)
    while block := list(itertools.islice(rest, _AT_ONCE)):
        for encoding in encode_batch(tokenizer, block):
            counts += np.bincount(np.array(encoding.ids, dtype=np.int64), minlength=len(counts))
    return counts


def _size(chunks: Iterable[str], counts: IdArray, unknown: str | None, tokens: TokenBytes) -> EncodedSize:
    """Return the size of a text from its token counts, `(V,)`."""
    num_unknown = 0 if unknown is None else int(counts[tokens.vocabulary[unknown]])
    return EncodedSize(sum(len(chunk.encode()) for chunk in chunks), int(counts.sum()), num_unknown)


def _unknown(old: TokenBytes, data: JsonObject) -> str | None:
    """Return the name of the unknown token, or `None` if there is none; `data` is the tokenizer's `tokenizer.json`."""
    token_id = unknown_id(old.tokenizer)
    return None if token_id is None else old.entries.get(token_id)


# Candidates


def _merged_tokens(old: TokenBytes, data: JsonObject, chunks: Iterable[str], count: int) -> Sequence[str | AddedMerge]:
    """Return the suggested merges of a BPE tokenizer, in their order, or the suggested texts for a Unigram one."""
    apart = {old.entries[i] for i in old.added} | {name for name in (_unknown(old, data),) if name is not None}
    apart |= {entry for entry, i in old.vocabulary.items() if old.is_byte(i) or not _fits_a_line(entry)}
    words = _word_counts(old, chunks, apart)
    is_bpe = data["model"]["type"] == "BPE"
    pairs, used = continue_merges(
        words,
        count if is_bpe else 2 * count,
        join=lambda pair: AddedMerge(*pair).name(old.prefix),
        taken=old.vocabulary,
    )
    if is_bpe:
        return [AddedMerge(left, right) for left, right in pairs]
    texts = {left + right: (left + right).replace("▁", " ") for left, right in pairs}
    saved = {text: used[entry] * (len(old.encode(text.encode())) - 1) for entry, text in texts.items()}
    return sorted((text for text in saved if saved[text] > 0), key=lambda text: (-saved[text], text))[:count]


def _word_counts(old: TokenBytes, chunks: Iterable[str], apart: set[str]) -> Counter[tuple[str, ...]]:
    """Count the runs of two tokens or more inside which tokens may be merged."""
    entries = old.entries
    runs = Counter(tuple(ids) for ids, _ in _pre_tokens(old, chunks) if len(ids) > 1)
    spaces = {name: (text[:1].isspace(), text.isspace()) for i, name in entries.items() for text in old.readings(i)[:1]}
    splits = len({*encode(old.tokenizer, "a b").word_ids}) > 1
    counts = Counter[tuple[str, ...]]()
    for run, number in runs.items():
        names = [entries[i] for i in run]
        for part in cut_words(
            names, apart, lambda a, b: not splits and spaces[b][0] and not (spaces[a][1] and spaces[b][1])
        ):
            counts[tuple(part)] += number
    return counts


def _pre_tokens(old: TokenBytes, chunks: Iterable[str]) -> Iterator[tuple[list[int], str]]:
    """Yield the token IDs of each pre-token of chunks of text, and its text."""
    rest = iter(chunks)
    while block := list(itertools.islice(rest, _AT_ONCE)):
        for chunk, encoding in zip(block, encode_batch(old.tokenizer, block, offsets=True), strict=True):
            ids, spans = encoding.ids, encoding.offsets
            words = np.array([-1 if word is None else word for word in encoding.word_ids])
            ends = (np.flatnonzero(words[1:] != words[:-1]) + 1).tolist()
            for begin, end in itertools.pairwise([0, *ends, len(ids)] if ids else ()):
                yield ids[begin:end], chunk[spans[begin][0] : spans[end - 1][1]]


def _whole_words(old: TokenBytes, chunks: Iterable[str], count: int) -> list[str]:
    """Return the words of a text that would save the most tokens as single tokens of a WordPiece or word tokenizer."""
    unknown = unknown_id(old.tokenizer)
    counts, costs = Counter[str](), dict[str, int]()
    for ids, word in _pre_tokens(old, chunks):
        if len(ids) > 1 or ids[0] == unknown:
            counts[word] += 1
            costs[word] = len(word) if unknown in ids else len(ids)
    saved = Counter[str]()
    for word, number in counts.items():
        entry = normalized(old.tokenizer, word).strip()
        if number > 1 and entry and entry not in old.vocabulary and _fits_a_line(entry) and entry == entry.split()[0]:
            saved[entry] += number * max(costs[word] - 1, 1)
    return sorted(saved, key=lambda word: (-saved[word], word))[:count]


def _subwords(old: TokenBytes, tokens: Sequence[str | AddedMerge]) -> list[tuple[str, ...]]:
    """Return the texts of the old tokens that each new token replaces. A merge comes after those of its parts."""
    built: dict[str, tuple[str, ...]] = {}
    subwords = []
    for token in tokens:
        if isinstance(token, AddedMerge):
            left, right = (built.get(part, (part,)) for part in (token.left, token.right))
            names = built[token.name(old.prefix)] = left + right
            ids: Sequence[int] = [old.vocabulary[name] for name in names]
        else:
            ids = old.encode(token.encode())
        subwords.append(tuple(token_text(old.tokenizer, i) for i in ids))
    return subwords


def _fits_a_line(text: str) -> bool:
    """Return whether a text is one line of a file that is read back unchanged."""
    return text.splitlines() == [text] and text.strip() != ""
