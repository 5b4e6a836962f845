"""Which tokens must be kept so that a corpus is encoded as before: for texts, files, a `TokenCorpus`, or IDs."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from embedlayer.core.errors import TextError, VocabularyError
from embedlayer.data.corpus import TokenCorpus
from embedlayer.data.memmap import IdArray
from embedlayer.data.readers.sources import find_text_files
from embedlayer.data.text_chunks import encode_chunks, read_text_chunks, split_text
from embedlayer.io.files import JsonObject
from embedlayer.tokenization.bytes import TokenBytes
from embedlayer.tokenization.ids import end_of_text_id, table_size, unknown_id
from embedlayer.tokenization.tokenizer_calls import as_tokenizer, encode, encode_batch, fingerprint, normalized
from embedlayer.tokenization.train import raise_if_path
from embedlayer.vocab.tokenizer_edit import required_tokens, tokenizer_data, with_parts

Corpus = TokenCorpus | Path | str | Iterable[str | Path]
"""A corpus of token IDs, one text or several (`str`), or files and folders with text (`Path`), also mixed."""

_TEXTS_AT_ONCE = 256
_LONGEST_UNCUT = 1 << 14


def used_tokens(tokenizer: object, corpus: Corpus, *, min_count: int = 1, keep_special: bool = True) -> set[int]:
    """Return the IDs of all tokens that must be kept so that a corpus is still encoded as the same tokens.

    The result can be passed as `edit_tokenizer(tokenizer, keep=...)`. It contains the tokens that occur, and:

    - the shorter tokens from which BPE merges build these tokens;
    - the tokens that WordPiece tries in words that it cannot encode;
    - the token with the lowest score of a Unigram model, which determines the score of the unknown token;
    - the tokens that the tokenizer itself uses: the unknown token, the padding token, and those of its post-processor;
    - the tokens of single bytes, so that every other text can still be encoded; without these and without an unknown
      token, those of single characters.

    A `TokenCorpus`, the files that it was built from, and their text give the same set. Memory use does not grow with
    the size of the corpus.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
        corpus: A `TokenCorpus`, texts (`str`), files and folders (`Path`), or a mixture of texts and paths. An
            iterator is consumed.
        min_count: A token that occurs less often is kept only if another reason above applies. Above 1, texts with
            such rare tokens are encoded differently afterwards.
        keep_special: Keep all special and added tokens, even if they do not occur.

    Raises:
        VocabularyError: The corpus contains none of the tokens, or a `TokenCorpus` was built with another tokenizer.
            Or a `TokenCorpus` contains words that WordPiece cannot encode: only a text shows the tokens that it tries.
        TokenIdError: A `TokenCorpus` holds an ID that the tokenizer does not have.
        TextError: An item is neither a text nor a path, a file is not plain text, or the first text looks like the path
            of a file.
        FileError: A file cannot be read.
        TokenizerError: `tokenizer` is no tokenizer, or has parts written in Python.

    Example:
        >>> tokenizer = train_tokenizer("I love dogs, I love cats", kind="word")
        >>> sorted(tokenizer.id_to_token(i) for i in used_tokens(tokenizer, "I love, love dogs"))
        [',', '<unk>', '<|endoftext|>', 'I', 'dogs', 'love']
    """
    tokenizer = as_tokenizer(tokenizer)
    data, old = tokenizer_data(tokenizer), TokenBytes(tokenizer)
    unknown = unknown_id(old.tokenizer)
    if isinstance(corpus, TokenCorpus):
        counts, tried = _counts_of_ids(corpus, tokenizer, data, unknown), set[str]()
    else:
        counts, tried = _counts_of_texts(corpus, old, data, unknown)
    used = {int(token_id) for token_id in np.flatnonzero(counts >= min_count)}
    if used <= {unknown}:
        raise VocabularyError(f"No token occurs {min_count} times in {counts.sum():,} IDs: pass more text.")
    used |= {old.vocabulary[subword] for subword in tried}
    return with_required_tokens(tokenizer, used, keep_special=keep_special)


def with_required_tokens(tokenizer: object, ids: Iterable[int], *, keep_special: bool = True) -> set[int]:
    """Return the given token IDs and all IDs that must be kept with them; `used_tokens` lists the reasons.

    One reason is missing: the tokens that WordPiece tries in words that it cannot encode. Only a text shows these.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
        ids: The IDs to keep, such as those that a corpus contains.
        keep_special: Keep all special and added tokens.

    Raises:
        KeyError: For a BPE tokenizer: an ID has no token.
        TokenizerError: `tokenizer` is no tokenizer, or has parts written in Python.
    """
    data, old = tokenizer_data(as_tokenizer(tokenizer)), TokenBytes(tokenizer)
    needed = required_tokens(data, old).keys() | old.single_bytes | _letters(old, data)
    return with_parts({*ids} | needed | (old.added if keep_special else set()), old, data)


def _letters(old: TokenBytes, data: JsonObject) -> set[int]:
    """Return the IDs of all one-character tokens if only they allow every text to be encoded; else an empty set."""
    if data["model"]["type"] not in ("BPE", "Unigram") or unknown_id(old.tokenizer) is not None or old.single_bytes:
        return set()
    return {
        token_id
        for entry, token_id in old.vocabulary.items()
        if len(entry.removeprefix(old.prefix).removesuffix(old.suffix)) == 1
    }


def _counts_of_ids(corpus: TokenCorpus, tokenizer: Tokenizer, data: JsonObject, unknown: int | None) -> IdArray:
    """Return how often each token ID occurs in a corpus of token IDs, `(V,)`."""
    if corpus.tokenizer_fingerprint != fingerprint(tokenizer):
        raise VocabularyError("The corpus was built with another tokenizer: build it again with this one.")
    counts = corpus.counts(table_size(tokenizer))
    if data["model"]["type"] == "WordPiece" and unknown is not None and counts[unknown]:
        raise VocabularyError(f"The corpus has {counts[unknown]:,} unknown words of WordPiece: pass its texts.")
    return counts


def _counts_of_texts(
    texts: Path | str | Iterable[str | Path], old: TokenBytes, data: JsonObject, unknown: int | None
) -> tuple[IdArray, set[str]]:
    """Encode texts, and return how often each token ID occurs, `(V,)`, and the subwords that WordPiece did not find."""
    tokenizer, tried = old.tokenizer, set[str]()
    counts = np.zeros(table_size(tokenizer), dtype=np.int64)
    is_wordpiece = data["model"]["type"] == "WordPiece" and unknown is not None
    for text, ids in _encoded(texts, tokenizer, counts):
        counts += np.bincount(ids, minlength=len(counts))
        if is_wordpiece and unknown in ids:
            encoding = encode(tokenizer, text)
            spans = (span for i, span in zip(encoding.ids, encoding.offsets, strict=True) if i == unknown)
            for word in {text[start:end] for start, end in spans}:
                tried.update(_tried(normalized(tokenizer, word), data["model"]))
    return counts, tried


def _encoded(
    texts: Path | str | Iterable[str | Path], tokenizer: Tokenizer, counts: IdArray
) -> Iterator[tuple[str, IdArray]]:
    """Yield `(text, token IDs)` for each chunk of the texts and files, and count the separators between files."""
    # The caller must add the yielded IDs to `counts` before the next chunk: they show which files have tokens.
    rest, files = _checked(texts), 0
    while block := list(islice(rest, _TEXTS_AT_ONCE)):
        short = [text for text in block if isinstance(text, str) and len(text) <= _LONGEST_UNCUT]
        encodings = encode_batch(tokenizer, short)
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


def text_chunks(texts: Path | str | Iterable[str | Path], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the texts, and the text of the files and folders, in chunks of some thousand characters."""
    for item in _checked(texts):
        if isinstance(item, str):
            yield from split_text([item], tokenizer)
        else:
            for file in find_text_files([item]):
                yield from read_text_chunks(file, tokenizer=tokenizer)


def _checked(texts: Path | str | Iterable[str | Path]) -> Iterator[str | Path]:
    """Yield texts and paths one by one; a single text or path is yielded alone."""
    given: Any = [texts] if isinstance(texts, str | Path | bytes) or not isinstance(texts, Iterable) else texts
    first = True
    for item in given:
        if not isinstance(item, str | Path):
            raise TextError(f"A corpus consists of texts (str) and paths (Path), not of {type(item).__name__}.")
        if first and isinstance(item, str):
            raise_if_path(item)
            first = False
        yield item


def _tried(word: str, model: JsonObject) -> list[str]:
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
