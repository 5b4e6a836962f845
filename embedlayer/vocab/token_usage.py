"""Which tokens must be kept so that a corpus is encoded as before: for texts, files, a `TokenCorpus`, or IDs."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from embedlayer.data.corpus import IdArray, TokenCorpus, encode_chunks, find_text_files, read_text_chunks, split_text
from embedlayer.data.tokenizer import as_tokenizer, end_of_text_id, fingerprint, raise_if_path, table_size
from embedlayer.errors import TextError, VocabularyError
from embedlayer.vocab.token_bytes import TokenBytes
from embedlayer.vocab.tokenizer_edit import (
    Data,
    normalized,
    required_tokens,
    tokenizer_data,
    unknown_token,
    with_parts,
)

Corpus = TokenCorpus | Path | str | Iterable[str | Path]
"""A corpus of token IDs, one text or several (`str`), or files and folders with text (`Path`), also mixed."""

_TEXTS_AT_ONCE = 256
_LONGEST_UNCUT = 1 << 14


def used_tokens(tokenizer: object, corpus: Corpus, *, min_count: int = 1, keep_special: bool = True) -> set[int]:
    """Return all IDs that must be kept so that a corpus is encoded as the same tokens.

    The result can be passed as `edit_tokenizer(tokenizer, keep=...)`. It contains the tokens that occur, and:

    - the tokens that BPE builds these tokens from;
    - the tokens that WordPiece tries in words that it cannot encode;
    - the token with the lowest score of a Unigram model, which determines the score of the unknown token;
    - the tokens that the tokenizer needs;
    - single bytes, so that every other text can still be encoded.

    A `TokenCorpus`, its files and their text return the same set. Memory does not grow with the corpus.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
        corpus: A `TokenCorpus`, texts (`str`), files and folders (`Path`), or a mixture of texts and files. An
            iterator is consumed: it is read once.
        min_count: How often a token must occur to be kept for its own sake. Above 1, texts with rarer tokens are
            encoded differently afterwards.
        keep_special: Keep all special and added tokens, even if they do not occur.

    Raises:
        VocabularyError: The corpus contains none of the tokens, or a `TokenCorpus` was built with another tokenizer.
            Or a `TokenCorpus` contains words that WordPiece cannot encode: only a text shows the tokens that it tries.
        TextError: An item is neither a text nor a path, or is a path as a `str`.
        FileError: A file cannot be read.

    Example:
        >>> tokenizer = train_tokenizer("I love dogs, I love cats", kind="word")
        >>> sorted(tokenizer.id_to_token(i) for i in used_tokens(tokenizer, "I love, love dogs"))
        [',', '<unk>', '<|endoftext|>', 'I', 'dogs', 'love']
    """
    tokenizer = as_tokenizer(tokenizer)
    data, old = tokenizer_data(tokenizer), TokenBytes(tokenizer)
    unknown = unknown_token(data, old)
    if isinstance(corpus, TokenCorpus):
        counts, tried = _counts_of_ids(corpus, tokenizer, data, unknown), set[str]()
    else:
        counts, tried = _counts_of_texts(corpus, old, data, unknown)
    used = {int(token_id) for token_id in np.flatnonzero(counts >= min_count)}
    if used <= {unknown}:
        raise VocabularyError(
            f"The texts hold none of the tokenizer's tokens{f' {min_count} times' if min_count > 1 else ''}: "
            f"{counts.sum():,} IDs were read, and nothing would be left. Pass text in the language of the model."
        )
    return _with_required(used | {old.vocabulary[subword] for subword in tried}, old, data, keep_special=keep_special)


def with_required_tokens(tokenizer: object, ids: Iterable[int], *, keep_special: bool = True) -> set[int]:
    """Return the given IDs and all IDs that must be kept together with them; see `used_tokens` for the reasons.

    The tokens that WordPiece tries in words that it cannot encode are not included: only a text shows these tokens.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
        ids: The IDs to keep, such as those that a corpus contains.
        keep_special: Keep all special and added tokens.
    """
    data = tokenizer_data(as_tokenizer(tokenizer))
    return _with_required({*ids}, TokenBytes(tokenizer), data, keep_special=keep_special)


def _with_required(ids: set[int], old: TokenBytes, data: Data, *, keep_special: bool) -> set[int]:
    """Return `ids` and all IDs that must be kept together with them; see `used_tokens`."""
    needed = required_tokens(data, old).keys() | old.single_bytes | _letters(old, data)
    return with_parts(ids | needed | (old.added if keep_special else set()), old, data)


def _letters(old: TokenBytes, data: Data) -> set[int]:
    """Return the IDs of all one-character tokens if some text could not be encoded without them; else an empty set.

    That is so for BPE and Unigram models that have neither an unknown token nor tokens of single bytes.
    """
    if data["model"]["type"] not in ("BPE", "Unigram") or unknown_token(data, old) is not None or old.single_bytes:
        return set()
    return {
        token_id
        for entry, token_id in old.vocabulary.items()
        if len(entry.removeprefix(old.prefix).removesuffix(old.suffix)) == 1
    }


def _counts_of_ids(corpus: TokenCorpus, tokenizer: Tokenizer, data: Data, unknown: int | None) -> IdArray:
    """Return how often each ID occurs in a corpus of token IDs, `(V,)`.

    A WordPiece corpus with the unknown token is refused. Only its text shows which subwords were tried for
    such words, and these must be kept too.

    Args:
        corpus: The corpus.
        tokenizer: The tokenizer that the corpus must have been built with.
        data: The tokenizer's JSON.
        unknown: ID of the unknown token, or `None`.

    Raises:
        VocabularyError: The corpus is of another tokenizer, or contains words that WordPiece cannot encode.
    """
    if corpus.tokenizer_fingerprint != fingerprint(tokenizer):
        raise VocabularyError("The corpus was built with another tokenizer: build it again with this one.")
    counts = corpus.counts(table_size(tokenizer))
    if data["model"]["type"] == "WordPiece" and unknown is not None and counts[unknown]:
        raise VocabularyError(
            f"The corpus contains {counts[unknown]:,} words that WordPiece could not encode. The tokens that it tried "
            f"must be kept, and only the text shows them: pass the texts or their paths instead of the corpus. Without "
            f"them, edit_vocabulary(keep=with_required_tokens(tokenizer, ids)) keeps IDs, and may split some of these "
            f"words."
        )
    return counts


def _counts_of_texts(
    texts: Path | str | Iterable[str | Path], old: TokenBytes, data: Data, unknown: int | None
) -> tuple[IdArray, set[str]]:
    """Return how often each ID occurs in texts, `(V,)`, and the subwords that WordPiece tries in vain.

    These are the names of the subwords that match the start of a word which WordPiece cannot encode.
    """
    tokenizer, tried = old.tokenizer, set[str]()
    counts = np.zeros(table_size(tokenizer), dtype=np.int64)
    is_wordpiece = data["model"]["type"] == "WordPiece" and unknown is not None
    for text, ids in _encoded(texts, tokenizer, counts):
        counts += np.bincount(ids, minlength=len(counts))
        if is_wordpiece and unknown in ids:
            encoding = tokenizer.encode(text, add_special_tokens=False)
            spans = (span for i, span in zip(encoding.ids, encoding.offsets, strict=True) if i == unknown)
            for word in {text[start:end] for start, end in spans}:
                tried.update(_tried(normalized(tokenizer, word), data["model"]))
    return counts, tried


def _encoded(
    texts: Path | str | Iterable[str | Path], tokenizer: Tokenizer, counts: IdArray
) -> Iterator[tuple[str, IdArray]]:
    """Yield each chunk of the texts with its IDs.

    The consumer must add the IDs to `counts` before asking for the next chunk: that shows which files have tokens. At
    the end, one end-of-text ID between each two files is added to `counts` in place.

    Raises:
        TextError: An item is neither a text nor a path, or is a path as a `str`.
        FileError: A file cannot be read.
    """
    given: Any = [texts] if isinstance(texts, str | Path | bytes) or not isinstance(texts, Iterable) else texts
    rest, files, first = iter(given), 0, True
    while block := list(islice(rest, _TEXTS_AT_ONCE)):
        for text in block:
            if not isinstance(text, str | Path):
                raise TextError(f"A corpus consists of texts (str) and paths (Path), not of {type(text).__name__}.")
        short = [text for text in block if isinstance(text, str) and len(text) <= _LONGEST_UNCUT]
        if first and short:
            raise_if_path(short[0])
            first = False
        encodings = tokenizer.encode_batch_fast(short, add_special_tokens=False)
        yield from ((text, np.array(each.ids, dtype=np.int64)) for text, each in zip(short, encodings, strict=True))
        for text in block:
            if isinstance(text, str) and len(text) > _LONGEST_UNCUT:
                yield from encode_chunks(split_text([text], tokenizer), tokenizer)
        for source in [file for path in block if isinstance(path, Path) for file in find_text_files([path])]:
            before = int(counts.sum())
            yield from encode_chunks(read_text_chunks(source, tokenizer=tokenizer), tokenizer)
            files += int(counts.sum()) > before
    separator = end_of_text_id(tokenizer)
    if separator is not None and files > 1:
        counts[separator] += files - 1


def _tried(word: str, model: Data) -> list[str]:
    """Return the subwords that WordPiece finds from the start of a word before it fails to encode the rest."""
    prefix, subwords, start = model["continuing_subword_prefix"], [], 0
    if len(word) > model["max_input_chars_per_word"]:
        return []
    while start < len(word):
        ends = range(len(word), start, -1)
        candidates = (prefix * (start > 0) + word[start:end] for end in ends)
        subword = next((each for each in candidates if each in model["vocab"]), None)
        if subword is None:
            break
        subwords.append(subword)
        start += len(subword) - len(prefix) * (start > 0)
    return subwords
