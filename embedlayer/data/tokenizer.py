"""Tokenizers: trained here, or read from the files that models come with.

Everything is a plain `tokenizers.Tokenizer`; this module only knows how to make one, how to find one on a disk, and
how to show its pieces to people.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from embedlayer.errors import FileError, SizeError, TextError, TokenIdError, TokenizerError
from embedlayer.io.files import write_text

TokenizerKind = Literal["bpe", "wordpiece", "unigram", "word", "byte"]

END_OF_TEXT = "<|endoftext|>"
"""GPT-2's mark between documents, and the special token that `train_tokenizer` adds."""

_ENDS_OF_TEXT = (END_OF_TEXT, "</s>", "[SEP]", "<eos>", "<|end_of_text|>", "<|eot_id|>")
_KNOWN_SPECIALS = (END_OF_TEXT, "<s>", "<pad>", "</s>", "<unk>", "<mask>")
MAX_TOKEN_IDS = 1 << 24
"""No vocabulary is larger: a greater ID is a damaged file, and a table for it would fill the memory."""

_LONGEST_PATH = 4096
_PATH = re.compile(r"(?:~|\.{1,2})?/\S*\w\S*|[A-Za-z]:\\\S+|\S+\.(?:txt|md|jsonl?|csv|tsv|gz|zip|parquet)")
_LLAMA2C = ("tokenizer.bin", "tok[0-9]*.bin")
_WORDS = r"\w+(?:['’]\w+)*|[^\w\s]"


def train_tokenizer(
    texts: Iterable[str] | str,
    kind: TokenizerKind = "bpe",
    *,
    vocab_size: int = 4096,
    special_tokens: Sequence[str] = (END_OF_TEXT,),
    min_frequency: int | None = None,
) -> Tokenizer:
    """Learn a vocabulary from text. The same texts give the same `tokenizer.json`, byte for byte.

    | kind | a token is | decoding gives back |
    |---|---|---|
    | `"bpe"` | bytes merged by frequency, as in GPT-2 | every text exactly |
    | `"wordpiece"` | a word or, marked `##`, the rest of one, as in (cased) BERT | words, spaces guessed |
    | `"unigram"` | the likeliest pieces, as in SentencePiece | the text with white space runs as one space |
    | `"word"` | a whole word or a punctuation mark | words, spaces guessed |
    | `"byte"` | one byte: its ID is its value | every text exactly |

    Args:
        texts: One text, or any number of them: the text itself, not a path; `read_text_chunks(path)` reads a file. Read
            once, except that `"wordpiece"` holds them in memory.
        kind: See above.
        vocab_size: Most entries wanted, special tokens included. Little text gives fewer. `"byte"` always has 256
            and the special tokens.
        special_tokens: Kept whole, never split. An unknown token is added for the kinds that need one: `"[UNK]"`
            for `"wordpiece"`, `"<unk>"` for `"unigram"` and `"word"`.
        min_frequency: How often a pair (or a whole word) must occur; by default 2, and 1 for `"word"`. The kinds
            `"unigram"` and `"byte"` have no such limit.

    Raises:
        SizeError: `vocab_size` is too small for the special tokens and the smallest alphabet.
        TextError: The texts hold nothing to learn from, or are not text, or a path instead of a text.
        TokenizerError: An unknown kind, or an option that the kind does not have.

    Example:
        >>> tokenizer = train_tokenizer("I love dogs", kind="word")
        >>> tokenizer.encode("dogs love").tokens
        ['dogs', 'love']
        >>> train_tokenizer((), kind="byte").encode("Hi").ids
        [72, 105]
    """
    if kind not in get_args(TokenizerKind):
        raise TokenizerError(
            f"No tokenizer kind is called {kind!r}. Choose one of {', '.join(get_args(TokenizerKind))}."
        )
    if min_frequency is not None and kind in ("unigram", "byte"):
        raise TokenizerError(f"A {kind} tokenizer has no min_frequency ({min_frequency} was given). Leave it out.")
    specials = list(dict.fromkeys(special_tokens))
    texts = _texts(texts)
    if kind == "byte":
        next(iter(texts), None)  # nothing is learned, and a path is refused all the same
        return _byte_tokenizer(specials)

    train = {"bpe": _train_bpe, "wordpiece": _train_wordpiece, "unigram": _train_unigram, "word": _train_word}[kind]
    unknown = {"bpe": None, "wordpiece": "[UNK]", "unigram": "<unk>", "word": "<unk>"}[kind]
    if unknown is not None and unknown not in specials:
        specials.append(unknown)
    smallest = len(specials) + (256 if kind == "bpe" else 1)
    if vocab_size < smallest:
        raise SizeError(
            f"vocab_size {vocab_size} is too small for a {kind} tokenizer with {len(specials)} special tokens: "
            f"it needs {smallest} or more."
        )
    texts = _nonempty(texts)
    if min_frequency is None:
        min_frequency = 1 if kind == "word" else 2
    return train(texts, vocab_size, specials, min_frequency)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer in any form that models come with.

    - `tokenizer.json`, or any other file with the same content.
    - GPT-2's `encoder.json` and `vocab.bpe`, or `vocab.json` and `merges.txt`; name either one. A common prefix
      (`gpt2-encoder.json` and `gpt2-vocab.bpe`) is fine.
    - BERT's `vocab.txt`. It is lower-casing if `tokenizer_config.json` beside it says so (`do_lower_case`), and
      otherwise if no entry but the bracketed ones holds an upper-case letter.
    - SentencePiece's `.model`, BPE or Unigram, with the `spm` extra. The result is compared with SentencePiece on
      sample text and refused where the two differ. Unlike in SentencePiece, control symbols such as `</s>` in a text
      are read as such.
    - llama2.c's `tokenizer.bin` (`tok512.bin`).
    - A folder with one of these, searched for in this order.

    Beside a GPT-2, BERT or SentencePiece vocabulary, `added_tokens.json` is read too, as transformers writes it.

    Raises:
        FileError: There is no such file, or it cannot be read.
        TokenizerError: It is damaged, incomplete, of no known form, or a folder with several of one form.
        MissingExtraError: A `.model` needs `pip install 'embedlayer[spm]'`.
    """
    path = Path(path)
    if path.is_dir():
        path = _only_tokenizer_in(path)
    tokenizer = _loaded(path)
    try:
        table_size(tokenizer)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    return tokenizer


def _loaded(path: Path) -> Tokenizer:
    if path.suffix == ".model":
        return _add_tokens_beside(path, _load_sentencepiece(path))
    if path.suffix == ".bin":
        return _load_llama2c(path)
    pair = _bpe_pair(path)
    if path.suffix == ".json":
        content = _read_json(path)
        if isinstance(content.get("model"), dict):
            return _built(path, lambda: Tokenizer.from_str(json.dumps(content)))
        pair = pair or (path, _beside(path))
    if pair is not None:
        return _add_tokens_beside(path, _load_bpe(*pair))
    if path.suffix == ".txt":
        return _add_tokens_beside(path, _load_vocab_txt(path))
    raise TokenizerError(
        f"{path} has no known tokenizer form. Give a tokenizer.json, encoder.json with vocab.bpe, vocab.json with "
        f"merges.txt, a BERT vocab.txt, a SentencePiece .model, or llama2.c's tokenizer.bin."
    )


def save_tokenizer(tokenizer: Tokenizer, path: str | Path) -> None:
    """Write a `tokenizer.json`, wholly or not at all.

    Raises:
        FileError: The file cannot be written.
    """
    write_text(path, tokenizer.to_str(pretty=True))


def as_tokenizer(tokenizer: object) -> Tokenizer:
    """The `tokenizers.Tokenizer` that is given, or that a fast tokenizer of transformers wraps.

    Raises:
        TokenizerError: It is neither.
    """
    for candidate in (tokenizer, getattr(tokenizer, "backend_tokenizer", None), getattr(tokenizer, "_tokenizer", None)):
        if isinstance(candidate, Tokenizer):
            return candidate
    raise TokenizerError(
        f"A {type(tokenizer).__name__} is not a tokenizer that embedlayer knows. Give a tokenizers.Tokenizer (see "
        f"load_tokenizer and train_tokenizer) or a fast tokenizer of transformers."
    )


def end_of_text_id(tokenizer: Tokenizer) -> int | None:
    """ID of the token that stands between documents: the first there is of `<|endoftext|>`, `</s>`, `[SEP]`, `<eos>`...

    Example:
        >>> end_of_text_id(train_tokenizer((), kind="byte"))
        256
    """
    ids = (tokenizer.token_to_id(token) for token in _ENDS_OF_TEXT)
    return next((token_id for token_id in ids if token_id is not None), None)


def table_size(tokenizer: Tokenizer) -> int:
    """Return the rows that a table needs for this tokenizer: its highest ID and one. IDs may have gaps.

    Raises:
        TokenizerError: The highest ID is `MAX_TOKEN_IDS` or more.

    Example:
        >>> table_size(train_tokenizer((), kind="byte"))
        257
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    if size > MAX_TOKEN_IDS:
        name = next(entry for entry, token_id in vocabulary.items() if token_id == size - 1)
        raise TokenizerError(
            f"{name!r} has the ID {size - 1:,}, and the tokenizer {len(vocabulary):,} entries: a table would need "
            f"{size:,} rows. IDs are below {MAX_TOKEN_IDS:,}; correct this one, the file is damaged."
        )
    return size


def missing_rows_message(tokenizer: Tokenizer, rows: int, where: object = None) -> str | None:
    """Return the sentence that says that a table has no row for some of a tokenizer's IDs; `None` if it has all.

    Args:
        tokenizer: It may have fewer IDs than there are rows.
        rows: Rows of the table.
        where: What both belong to, for the sentence.

    Example:
        >>> print(missing_rows_message(train_tokenizer((), kind="byte"), 200, "run"))
        The tokenizer of run gives IDs up to 256 and the table has 200 rows: 57 tokens have none. They do not belong \
together: use the tokenizer that the model was trained with, or add rows with embedlayer.add_tokens.
    """
    size = table_size(tokenizer)
    if size <= rows:
        return None
    return (
        f"The tokenizer{'' if where is None else f' of {where}'} gives IDs up to {size - 1} and the table has {rows} "
        f"rows: {size - rows} tokens have none. They do not belong together: use the tokenizer that the model was "
        f"trained with, or add rows with embedlayer.add_tokens."
    )


def require_rows(tokenizer: Tokenizer, rows: int, where: object = None) -> None:
    """Refuse a tokenizer with IDs outside the table of so many rows that `where` names.

    Raises:
        TokenizerError: It has such.

    Example:
        >>> require_rows(train_tokenizer((), kind="byte"), 257, "run")
    """
    mismatch = missing_rows_message(tokenizer, rows, where)
    if mismatch is not None:
        raise TokenizerError(mismatch)


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """What a token stands for, for people to read.

    A space in front is a space, byte-level letters are the characters they stand for, bytes that are only a part of
    a character are shown as `<0xE2>`. Special tokens and WordPiece's `##` stay as they are.

    Raises:
        TokenIdError: The tokenizer has no such ID.

    Example:
        >>> tokenizer = train_tokenizer("I love dogs, I love cats", vocab_size=270)
        >>> token_text(tokenizer, tokenizer.encode("I love").ids[-1])
        ' love'
    """
    piece = tokenizer.id_to_token(token_id) if token_id >= 0 else None
    if piece is None:
        raise TokenIdError(f"The tokenizer has no token {token_id}: its IDs are 0..{table_size(tokenizer) - 1}.")
    steps = component_types(tokenizer.decoder) | component_types(tokenizer.pre_tokenizer)
    if "ByteLevel" in steps:
        letters = byte_level_alphabet()
        if all(letter in letters for letter in piece):
            return _readable(bytes(letters[letter] for letter in piece))
    elif steps & {"Metaspace", "ByteFallback", "Replace"}:
        byte = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
        return _readable(bytes.fromhex(byte[1])) if byte else piece.replace("▁", " ")
    return piece


def fingerprint(tokenizer: Tokenizer) -> str:
    """A short name for exactly this tokenizer: equal for two that give the same IDs by the same rules.

    Truncation and padding, which belong to a use and not to the tokenizer, do not count.

    Example:
        >>> fingerprint(train_tokenizer((), kind="byte")) == fingerprint(train_tokenizer((), kind="byte"))
        True
    """
    return hashlib.sha256(without_truncation(tokenizer).to_str().encode()).hexdigest()[:16]


def without_truncation(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer without the truncation and padding that some `tokenizer.json` files switch on.

    It is a copy where something had to be switched off, and else the tokenizer itself.
    """
    if tokenizer.truncation is None and tokenizer.padding is None:
        return tokenizer
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def raise_if_path(text: str) -> None:
    """Refuse a path where a `str` is the text itself: the name of a file that exists, or what can only be a path.

    A text that is so misread passes with a line break behind it.

    Raises:
        TextError: It is a path.

    Example:
        >>> raise_if_path("I love dogs. and/or cats")
    """
    if len(text) > _LONGEST_PATH or not text.isprintable():
        return
    exists = os.path.isfile(text) or ("/" in text and text.strip("/.~") != "" and os.path.exists(text))
    if exists or _PATH.fullmatch(text):
        raise TextError(
            f"{text!r} is a str, and so the text itself, but {'names a file' if exists else 'looks like a path'}. Give "
            f"pathlib.Path({text!r}) where a path can be given, or what it holds: embedlayer.data.corpus."
            f"read_text_chunks({text!r}). If it is the text, add a line break."
        )


# Training


def _texts(texts: object) -> Iterable[str]:
    """Return an iterable of texts; a path is refused, also in the first place of a list."""
    if isinstance(texts, str):
        texts = [texts]
    if isinstance(texts, Path | bytes) or not isinstance(texts, Iterable):
        raise TextError(
            f"A tokenizer is trained on text: a str or any number of them, not {type(texts).__name__}. For a file, "
            f"give embedlayer.data.corpus.read_text_chunks(path)."
        )
    return _checked_texts(texts)


def _checked_texts(texts: Iterable[object]) -> Iterator[str]:
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise TextError(
                f"Text {place} is {type(text).__name__}, not str. Decode bytes; for files, give the pieces that "
                f"embedlayer.data.corpus.read_text_chunks(path) reads."
            )
        if place == 0:
            raise_if_path(text)
        yield text


def _nonempty(texts: Iterable[str]) -> Iterator[str]:
    """The texts as they come; at the end, an error if there was nothing but white space."""
    found = False
    for text in texts:
        found = found or not (text == "" or text.isspace())
        yield text
    if not found:
        raise TextError("There is no text to train a tokenizer on: all of it is empty. Give at least a few words.")


def _byte_tokenizer(specials: list[str]) -> Tokenizer:
    letters = sorted(byte_level_alphabet(), key=byte_level_alphabet().__getitem__)
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    return tokenizer


def _train_bpe(texts: Iterable[str], vocab_size: int, specials: list[str], min_frequency: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _train_wordpiece(texts: Iterable[str], vocab_size: int, specials: list[str], min_frequency: int) -> Tokenizer:
    texts = list(texts)
    # The trainer numbers the letters that continue a word in the order of a randomly seeded hash table, and ties
    # between pairs are broken by these numbers. So learn the letters first, and hand them back sorted.
    alphabet = _wordpiece_vocabulary(texts, 0, specials, min_frequency)
    continuing = sorted(letter for letter in alphabet if letter.startswith("##") and letter not in specials)
    vocabulary = _wordpiece_vocabulary(texts, vocab_size, specials + continuing, min_frequency)
    tokenizer = _bert_tokenizer(vocabulary, lowercase=False)
    tokenizer.add_special_tokens(specials)
    return tokenizer


def _wordpiece_vocabulary(texts: list[str], vocab_size: int, first: list[str], min_frequency: int) -> dict[str, int]:
    tokenizer = _bert_tokenizer({"[UNK]": 0}, lowercase=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=first, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.get_vocab()


def _bert_tokenizer(vocabulary: dict[str, int], *, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _train_unigram(texts: Iterable[str], vocab_size: int, specials: list[str], _: int) -> Tokenizer:
    from embedlayer.data.unigram import train_subwords

    normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    words: Counter[str] = Counter()
    for text in texts:
        words.update(normalizer.normalize_str(text).split())
    subwords = train_subwords(words, vocab_size - len(specials))
    entries = [(special, 0.0) for special in specials]
    entries += [(subword, score) for subword, score in subwords if subword not in specials]
    tokenizer = Tokenizer(models.Unigram(entries, unk_id=specials.index("<unk>"), byte_fallback=False))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(specials)
    return tokenizer


def _train_word(texts: Iterable[str], vocab_size: int, specials: list[str], min_frequency: int) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(vocab={"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="##", cleanup=False),
            decoders.Fuse(),
            decoders.Replace(Regex(r" (?=[.,;:!?)\]}…%])"), ""),
            decoders.Replace(Regex(r"(?<=[(\[{]) "), ""),
        ]
    )
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


# Reading


def _only_tokenizer_in(folder: Path) -> Path:
    """The file to read in a folder: a plain name before a prefixed one, in the order that `load_tokenizer` states."""
    for names in (("tokenizer.json",), ("vocab.json", "encoder.json"), ("*.model",), ("vocab.txt",), _LLAMA2C):
        for pattern in (*names, *(f"*{name.lstrip('*')}" for name in names)):
            found = sorted(file for file in folder.glob(pattern) if not file.name.startswith("."))
            if len(found) > 1:
                listed = ", ".join(file.name for file in found)
                raise TokenizerError(f"{folder} holds several tokenizers ({listed}). Name the file that you mean.")
            if found:
                return found[0]
    raise TokenizerError(
        f"{folder} holds no tokenizer: none of tokenizer.json, vocab.json with merges.txt, encoder.json with "
        f"vocab.bpe, a SentencePiece .model, vocab.txt, or llama2.c's tokenizer.bin."
    )


def _bpe_pair(path: Path) -> tuple[Path, Path] | None:
    """Vocabulary and merges, whichever of the two is given; `None` if the name belongs to no such pair."""
    for vocabulary, merges in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        for ending in (vocabulary, merges):
            if path.name.endswith(ending):
                prefix = path.name.removesuffix(ending)
                return path.with_name(prefix + vocabulary), path.with_name(prefix + merges)
    return None


def _beside(path: Path) -> Path:
    merges = [file for pattern in ("*.bpe", "*merges.txt") for file in sorted(path.parent.glob(pattern))]
    if len(merges) != 1:
        raise TokenizerError(
            f"{path} is a vocabulary without its merges: {len(merges)} files beside it look like merges. "
            f"Name the two vocab.json and merges.txt, or encoder.json and vocab.bpe."
        )
    return merges[0]


def _load_bpe(vocabulary: Path, merges: Path) -> Tokenizer:
    """GPT-2's two files: byte-level BPE."""
    vocab = _read_json(vocabulary)
    if not all(type(token_id) is int for token_id in vocab.values()):
        raise TokenizerError(f"{vocabulary} is not a vocabulary: it should map each token to its ID.")
    lines = [line for line in _read_text(merges).split("\n") if line and not line.startswith("#version")]
    pairs = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]

    for pair in pairs:
        if not all(piece in vocab for piece in (*pair, "".join(pair))):
            raise TokenizerError(f"{merges} merges {pair}, which {vocabulary} does not know. Use files of one model.")

    def build() -> Tokenizer:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        tokenizer.add_special_tokens([token for token in _KNOWN_SPECIALS if token in vocab])
        return tokenizer

    return _built(merges, build)


def _add_tokens_beside(path: Path, tokenizer: Tokenizer) -> Tokenizer:
    """Add the tokens of `added_tokens.json` in the same folder, if there is one, to a tokenizer read from `path`."""
    file = path.with_name("added_tokens.json")
    if not file.is_file():
        return tokenizer
    added = _read_json(file)
    if not all(type(token_id) is int for token_id in added.values()):
        raise TokenizerError(f"{file} is not a list of added tokens: it should map each token to its ID.")
    for token, token_id in sorted(added.items(), key=lambda item: item[1]):
        tokenizer.add_tokens([AddedToken(token, normalized=False)])
        if tokenizer.token_to_id(token) != token_id:
            raise TokenizerError(
                f"{file} gives {token!r} the ID {token_id}, but after the tokens of {path.name} its ID is "
                f"{tokenizer.token_to_id(token)}. Use the tokenizer.json of the model."
            )
    return tokenizer


def _load_vocab_txt(path: Path) -> Tokenizer:
    """BERT's list of pieces, one a line."""
    entries = _read_text(path).removesuffix("\n").split("\n")
    vocabulary = {entry.removesuffix("\r"): token_id for token_id, entry in enumerate(entries)}
    if "[UNK]" not in vocabulary:
        raise TokenizerError(f"{path} is not a BERT vocabulary: it has no [UNK]. Give vocab.txt with one piece a line.")
    tokenizer = _built(path, lambda: _bert_tokenizer(vocabulary, lowercase=_lowercases(path, vocabulary)))
    tokenizer.add_special_tokens(
        [entry for entry in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if entry in vocabulary]
    )
    if "[CLS]" in vocabulary and "[SEP]" in vocabulary:
        tokenizer.post_processor = processors.BertProcessing(
            ("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"])
        )
    return tokenizer


def _lowercases(path: Path, vocabulary: Iterable[str]) -> bool:
    config = path.with_name("tokenizer_config.json")
    if config.is_file():
        stated = _read_json(config).get("do_lower_case")
        if isinstance(stated, bool):
            return stated
    return not any(entry != entry.lower() for entry in vocabulary if not re.fullmatch(r"\[.*\]", entry))


def _load_sentencepiece(path: Path) -> Tokenizer:
    from embedlayer.data.sentencepiece_files import convert

    return _built(path, partial(convert, path))


def _load_llama2c(path: Path) -> Tokenizer:
    from embedlayer.data.llama2c_files import read

    return _built(path, partial(read, path))


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise FileError(f"Cannot read the tokenizer file {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text ({error}): it is damaged or another kind of file.") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{path} is not JSON ({error}): it is damaged or another kind of file.") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} holds a JSON {type(content).__name__}: it is not a tokenizer.")
    return content


def _built(path: Path, build: Callable[[], Tokenizer]) -> Tokenizer:
    """What `build` gives; whatever the tokenizers library says against it becomes our error."""
    try:
        return build()
    except (TokenizerError, ImportError, FileError):
        raise
    except Exception as error:
        raise TokenizerError(f"{path} does not make a tokenizer: {error}. It is damaged or incomplete.") from error


# Showing


def component_types(component: Any) -> set[str]:
    """Type names in a decoder or pre-tokenizer, nested ones included; the whole tokenizer is never serialised."""
    if component is None:
        return set()
    return set(re.findall(r'"type":\s*"(\w+)"', component.__getstate__().decode()))


def _readable(raw: bytes) -> str:
    """UTF-8, where each byte that belongs to no whole character is shown as `<0xE2>`."""
    return re.sub(
        "[\udc80-\udcff]",
        lambda lone: f"<0x{ord(lone[0]) - 0xDC00:02X}>",
        raw.decode("utf-8", errors="surrogateescape"),
    )


@cache
def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
