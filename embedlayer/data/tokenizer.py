"""Train tokenizers, read them from the files of models, and print their tokens.

Every tokenizer is a plain `tokenizers.Tokenizer`.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from embedlayer.command_name import command_line
from embedlayer.data.bert_tokenizers import bert_tokenizer, wordpiece_tokenizer
from embedlayer.data.bpe_files import END_OF_TEXT, bpe_rules, bpe_tokenizer, byte_level_alphabet, component_types
from embedlayer.data.llama2c_files import read as read_llama2c
from embedlayer.data.sentencepiece_files import convert as read_sentencepiece
from embedlayer.data.sentencepiece_files import reads_vocabulary
from embedlayer.data.tokenizer_calls import (
    build_tokenizer,
    cut_pre_tokens,
    pre_tokens,
    pure_tokenizer,
    tokenizer_errors,
)
from embedlayer.data.tokenizer_config import StatedTokenizer, read_stated
from embedlayer.data.unigram import train_subwords
from embedlayer.errors import CheckpointError, SizeError, TextError, TokenIdError, TokenizerError
from embedlayer.families.tokenizers import REFUSED_CLASSES
from embedlayer.families.unread_tokenizers import MARIAN, TIKTOKEN, UNREAD_TOKENIZERS, UnreadTokenizer
from embedlayer.io.files import is_gguf, read_bytes, read_json, write_text

TokenizerKind = Literal["bpe", "wordpiece", "unigram", "word", "byte"]

_ENDS_OF_TEXT = (END_OF_TEXT, "</s>", "[SEP]", "<eos>", "<|end_of_text|>", "<|eot_id|>")
MAX_TOKEN_IDS = 1 << 24
"""Largest table size. A file with a higher ID is damaged, and its table would fill the memory."""

_LONGEST_PATH = 4096
_LONGEST_LINE = 4096
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
_PATH = re.compile(r"(?:~|\.{1,2})?/\S*\w\S*|[A-Za-z]:\\\S+|\S+\.(?:txt|md|jsonl?|csv|tsv|gz|zip|parquet)")
_LLAMA2C = ("tokenizer.bin", "tok[0-9]*.bin")
_FILES = (("tokenizer.json",), ("vocab.json", "encoder.json"), ("*.model",), ("vocab.txt",), _LLAMA2C, ("*.gguf",))
_WORDS = r"\w+(?:['’]\w+)*|[^\w\s]"


def train_tokenizer(
    texts: Iterable[str] | str,
    kind: TokenizerKind = "bpe",
    *,
    vocab_size: int = 4096,
    special_tokens: Sequence[str] = (END_OF_TEXT,),
    min_frequency: int | None = None,
) -> Tokenizer:
    """Train a tokenizer. Equal texts give equal `tokenizer.json` files, byte for byte.

    | kind | a token is | decoding returns |
    |---|---|---|
    | `"bpe"` | bytes merged by frequency, as in GPT-2 | every text exactly |
    | `"wordpiece"` | a word or, marked `##`, the rest of one, as in (cased) BERT | words, spaces guessed |
    | `"unigram"` | a subword of the most likely split (SentencePiece) | the text, runs of white space as one space |
    | `"word"` | a whole word or a punctuation mark | words, spaces guessed |
    | `"byte"` | one byte: its ID is its value | every text exactly |

    Args:
        texts: One string or an iterable of strings, not paths; `read_text_chunks(path)` reads a file. The iterable is
            read once; `"wordpiece"` keeps its strings in memory. For training, `"bpe"` and `"wordpiece"` cut text
            without spaces, such as DNA, every 10,000 characters; it is encoded whole.
        kind: See the table. `"unigram"` needs the `spm` extra.
        vocab_size: Largest number of entries, including special tokens. A small text gives fewer. `"byte"` always
            has 256 and the special tokens.
        special_tokens: Tokens that are never split. An unknown token is added for the kinds that need one: `"[UNK]"`
            for `"wordpiece"`, `"<unk>"` for `"unigram"` and `"word"`.
        min_frequency: Fewest occurrences of a merged pair, or of a whole word; by default 2, and 1 for `"word"`.
            `"unigram"` and `"byte"` have no such limit.

    Raises:
        SizeError: `vocab_size` is too small for the special tokens and the smallest alphabet.
        TextError: The texts are empty, are not strings, or are a path.
        TokenizerError: `kind` is unknown, or `min_frequency` is passed for a kind without one.
        MissingExtraError: `"unigram"` needs `pip install 'embedlayer[spm]'`.

    Example:
        >>> tokenizer = train_tokenizer("I love dogs", kind="word")
        >>> tokenizer.encode("dogs love").tokens
        ['dogs', 'love']
        >>> train_tokenizer((), kind="byte").encode("Hi").ids
        [72, 105]
    """
    if kind not in get_args(TokenizerKind):
        raise TokenizerError(
            f"There is no tokenizer kind {kind!r}. Choose one of {', '.join(get_args(TokenizerKind))}."
        )
    if min_frequency is not None and kind in ("unigram", "byte"):
        raise TokenizerError(f"A {kind} tokenizer has no min_frequency ({min_frequency} was passed). Leave it out.")
    specials = list(dict.fromkeys(special_tokens))
    texts = _checked_texts(texts)
    if kind == "byte":
        next(texts, None)  # nothing is learned, and a path is refused all the same
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
    texts = _require_words(texts)
    if min_frequency is None:
        min_frequency = 1 if kind == "word" else 2
    return train(texts, vocab_size, specials, min_frequency)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer from the files of a model.

    - `tokenizer.json`, or another file with the same content.
    - `vocab.json` and `merges.txt`, or GPT-2's `encoder.json` and `vocab.bpe`; pass either one. Both may have a common
      prefix (`gpt2-encoder.json` and `gpt2-vocab.bpe`). The rules are those of the tokenizer class that the
      `tokenizer_config.json` beside them names, or that the model type of `config.json` has. With nothing beside them
      they are GPT-2's, if all entries are written in its alphabet of bytes.
    - BERT's `vocab.txt`, with `do_lower_case`, `strip_accents` and `tokenize_chinese_chars` of the
      `tokenizer_config.json` beside it. Without `do_lower_case`, text is lower-cased if a file names BERT's class, or
      if no entry except the bracketed ones has an upper-case letter.
    - SentencePiece's `.model`, BPE or Unigram, with the `spm` extra. The files beside it state the class, which decides
      the IDs: those of XLM-RoBERTa are shifted by one, those of M2M-100 are in a `vocab.json`. The subwords of sample
      texts are compared with SentencePiece; a model with others is refused. Unlike in SentencePiece, `</s>` in a text
      is the control symbol.
    - llama2.c's `tokenizer.bin` (`tok512.bin`).
    - A GGUF file of llama.cpp, with the `gguf` extra.
    - A folder with one of these, searched for in this order.

    Beside these vocabularies, settings and special tokens of `tokenizer_config.json` and `special_tokens_map.json` are
    read too, and its added tokens or those of `added_tokens.json`.

    Raises:
        FileError: There is no such file, or it cannot be read.
        TokenizerError: The file is damaged, incomplete or of an unknown format, the rules of its class are not
            known, or the folder has several tokenizers.
        MissingExtraError: A `.model` needs `pip install 'embedlayer[spm]'`, and a `.gguf` `'embedlayer[gguf]'`.
    """
    path = Path(path)
    if path.is_dir():
        found = tokenizer_file(path)
        if found is None or unread_tokenizer(found) is not None:
            stated = read_stated(path)
            if stated.kind in REFUSED_CLASSES:
                raise stated.refuse_class(path)
        if found is None:
            raise TokenizerError(
                f"{path} has no tokenizer: none of tokenizer.json, vocab.json with merges.txt, encoder.json with "
                f"vocab.bpe, a SentencePiece .model, vocab.txt, llama2.c's tokenizer.bin, or a GGUF file."
            )
        path = found
    tokenizer = _read_tokenizer(path)
    try:
        table_size(tokenizer)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    return tokenizer


def _read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer from one file. Its name and content show which format of `load_tokenizer` it has.

    Raises:
        FileError: The file cannot be read.
        TokenizerError: The format is unknown, or the file is damaged.
        MissingExtraError: The file needs the `spm` extra.
    """
    unread = unread_tokenizer(path)
    if unread is not None:
        raise unread_error(path, unread)
    if is_gguf(path):
        from embedlayer.data.gguf_tokenizers import read as read_gguf_tokenizer  # imports torch

        return read_gguf_tokenizer(path)
    if path.suffix == ".bin":
        return _build_checked(path, lambda: read_llama2c(path))
    pair = _bpe_pair(path)
    is_vocabulary = path.suffix == ".json"
    if is_vocabulary:
        content = _read_json(path)
        if isinstance(content.get("model"), dict):
            return _build_checked(path, lambda: build_tokenizer(content))
    stated = read_stated(path.parent)
    if stated.kind in REFUSED_CLASSES:
        raise stated.refuse_class(path)
    if path.suffix == ".model" or (is_vocabulary and reads_vocabulary(stated)):
        model = path if path.suffix == ".model" else _find_beside(path, "SentencePiece model", "*.model")
        return _build_checked(model, lambda: read_sentencepiece(model, stated))
    if pair is None and is_vocabulary:
        pair = path, _find_beside(path, "merges", "*.bpe", "*merges.txt")
    if pair is not None:
        return _load_bpe(*pair, stated)
    if path.suffix == ".txt":
        return _load_vocab_txt(path, stated)
    raise TokenizerError(
        f"{path} has no known tokenizer format. Pass a tokenizer.json, encoder.json with vocab.bpe, vocab.json with "
        f"merges.txt, a BERT vocab.txt, a SentencePiece .model, llama2.c's tokenizer.bin, or a GGUF file."
    )


def save_tokenizer(tokenizer: Tokenizer, path: str | Path) -> None:
    """Write a tokenizer to the file `path` in the format of `tokenizer.json`, atomically.

    Raises:
        FileError: The file cannot be written.
    """
    write_text(path, tokenizer.to_str(pretty=True))


def as_tokenizer(tokenizer: object) -> Tokenizer:
    """Return a `tokenizers.Tokenizer`: the argument itself, or the one in a fast tokenizer of transformers.

    Raises:
        TokenizerError: The argument is neither of the two.
    """
    for candidate in (tokenizer, getattr(tokenizer, "backend_tokenizer", None), getattr(tokenizer, "_tokenizer", None)):
        if isinstance(candidate, Tokenizer):
            return candidate
    raise TokenizerError(
        f"A {type(tokenizer).__name__} is not a tokenizer that embedlayer knows. Pass a tokenizers.Tokenizer (see "
        f"load_tokenizer and train_tokenizer) or a fast tokenizer of transformers."
    )


def word_tokenizer(tokens: Sequence[str]) -> Tokenizer:
    """Return a tokenizer of whole words whose vocabulary is the token of each row; a file of vectors has no other.

    It gives a duplicate token the ID of its first row. It splits text at white space, except inside of the longest
    token that matches at a word, such as "new york". It does not split text if a token starts or ends with white space,
    as those of subword tokenizers do. It has no unknown token: a row `<unk>` is the row of this text alone.

    Example:
        >>> word_tokenizer(["dog", "cat", "dog"]).encode("cat dog").ids
        [1, 0]
    """
    ids: dict[str, int] = {}
    for row, token in enumerate(tokens):
        # tokenizers takes no lone surrogates
        ids.setdefault(token if token.isascii() else token.encode(errors="replace").decode(), row)
    absent = "<unk>"
    while absent in ids:  # the model requires a name, and would return its row for every unknown word
        absent += "_"
    built = Tokenizer(models.WordLevel(ids, unk_token=absent))
    if all(token == token.strip() for token in ids):
        phrases = sorted((token for token in ids if len(token.split()) > 1), key=len, reverse=True)
        either = "|".join([*(rf"{re.escape(phrase)}(?!\S)" for phrase in phrases), r"\S+"])
        split = pre_tokenizers.Split(Regex(rf"(?<!\S)(?:{either})"), "removed", invert=True)
        built.pre_tokenizer = split if phrases else pre_tokenizers.WhitespaceSplit()
    return built


def unknown_word(tokenizer: Tokenizer, text: str) -> str | None:
    """Return the first word of a text that a tokenizer of whole words has no token for; `None` if it has them all.

    The tokenizer is one of `word_tokenizer`, or another `WordLevel` one without a normalizer and added tokens.

    Example:
        >>> unknown_word(word_tokenizer(["dog", "cat"]), "cat bird")
        'bird'
    """
    return next((word for word in pre_tokens(tokenizer, text) if tokenizer.token_to_id(word) is None), None)


def end_of_text_id(tokenizer: Tokenizer) -> int | None:
    """Return the ID of the end-of-text token, which separates documents; `None` if the tokenizer has none.

    It is the first existing token of `<|endoftext|>`, `</s>`, `[SEP]`, `<eos>`, `<|end_of_text|>`, `<|eot_id|>`.

    Example:
        >>> end_of_text_id(train_tokenizer((), kind="byte"))
        256
    """
    ids = (tokenizer.token_to_id(token) for token in _ENDS_OF_TEXT)
    return next((token_id for token_id in ids if token_id is not None), None)


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """Return the ID of the unknown token, which replaces text that the model cannot encode, or `None` if there is none.

    Example:
        >>> unknown_id(train_tokenizer("One word and another word.", "word"))
        1
    """
    model: Any = tokenizer.model
    if isinstance(model, models.Unigram):  # it has the ID alone, and no attribute for it
        found: int | None = json.loads(tokenizer.to_str())["model"]["unk_id"]
        return found
    name = getattr(model, "unk_token", None)
    return None if name is None else tokenizer.token_to_id(name)


def table_size(tokenizer: Tokenizer) -> int:
    """Return the number of rows that a table needs for this tokenizer: its highest ID plus 1. IDs may have gaps.

    Raises:
        TokenizerError: The highest ID is `MAX_TOKEN_IDS` or more.

    Example:
        >>> table_size(train_tokenizer((), kind="byte"))
        257
    """
    entries = tokenizer.get_vocab_size()
    if entries <= MAX_TOKEN_IDS and all(tokenizer.id_to_token(index) is not None for index in range(entries)):
        return entries  # as many IDs as entries, so there is no higher one
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
    """Return an error message if the IDs of a tokenizer exceed the rows of a table, else `None`. Nothing is raised.

    Args:
        tokenizer: The tokenizer; it may have fewer IDs than the table has rows.
        rows: Number of rows of the table.
        where: Path or name of the tokenizer for the message, or `None`. The advice names the path of a folder.

    Example:
        >>> print(missing_rows_message(train_tokenizer((), kind="byte"), 200, "run"))
        The tokenizer of run gives IDs up to 256 and the table has 200 rows: 57 tokens have none. They do not belong \
together: use the tokenizer that the model was trained with, or give the table 57 more rows without it: \
embedlayer.vocab.add_tokens(model, 57).
    """
    size = table_size(tokenizer)
    if size <= rows:
        return None
    what = (
        f"The tokenizer{'' if where is None else f' of {where}'} gives IDs up to {size - 1} and the table has {rows} "
        f"rows: {size - rows} tokens have none."
    )
    if added_without_rows(tokenizer, rows):
        is_folder = isinstance(where, Path) and where.is_dir()
        line = command_line("vocab", "add", where, "-o", "...")
        line = line if is_folder else "embedlayer vocab add DIR -o OUT for a folder"
        return (
            f"{what} They were added to the tokenizer alone. Give them rows: {line}, or "
            f"embedlayer.vocab.add_tokens(model, [], tokenizer=tokenizer)."
        )
    return (
        f"{what} They do not belong together: use the tokenizer that the model was trained with, or give the table "
        f"{size - rows} more rows without it: embedlayer.vocab.add_tokens(model, {size - rows})."
    )


def added_without_rows(tokenizer: Tokenizer, rows: int) -> list[int]:
    """Return the IDs of `rows` and more, if all of them are added tokens of the tokenizer; else an empty list.

    So is a tokenizer that was extended while the table was not. A tokenizer of another model has other tokens there.

    Example:
        >>> tokenizer = train_tokenizer((), kind="byte")
        >>> added_without_rows(tokenizer, 256), added_without_rows(tokenizer, 255)
        ([256], [])
    """
    missing = sorted(token_id for token_id in tokenizer.get_vocab(with_added_tokens=True).values() if token_id >= rows)
    return missing if {*missing} <= tokenizer.get_added_tokens_decoder().keys() else []


def require_rows(tokenizer: Tokenizer, rows: int, where: object = None) -> None:
    """Raise an error if the IDs of a tokenizer exceed the rows of a table.

    Args:
        tokenizer: The tokenizer; it may have fewer IDs than the table has rows.
        rows: Number of rows of the table.
        where: Path or name of the tokenizer for the message, or `None`.

    Raises:
        TokenizerError: The tokenizer has an ID of `rows` or more.

    Example:
        >>> require_rows(train_tokenizer((), kind="byte"), 257, "run")
    """
    if mismatch := missing_rows_message(tokenizer, rows, where):
        raise TokenizerError(mismatch)


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of one token as a person would write it.

    Byte-level letters and `▁` become the characters that they encode. Bytes of an incomplete character become
    `<0xE2>`. Special tokens and WordPiece's `##` are unchanged.

    Raises:
        TokenIdError: The tokenizer has no such ID.

    Example:
        >>> tokenizer = train_tokenizer("I love dogs, I love cats", vocab_size=270)
        >>> token_text(tokenizer, tokenizer.encode("I love").ids[-1])
        ' love'
    """
    subword = tokenizer.id_to_token(token_id) if token_id >= 0 else None
    if subword is None:
        raise TokenIdError(f"The tokenizer has no token {token_id}: its IDs are 0..{table_size(tokenizer) - 1}.")
    return entry_reader(tokenizer)(subword)


def entry_reader(tokenizer: Tokenizer) -> Callable[[str], str]:
    """Return the function from an entry of the vocabulary to its text as in `token_text`, for many entries at once."""
    steps = component_types(tokenizer.decoder) | component_types(tokenizer.pre_tokenizer)
    letters = byte_level_alphabet()

    def of_byte_letters(entry: str) -> str:
        is_written = all(letter in letters for letter in entry)
        return _decode_readable(bytes(letters[letter] for letter in entry)) if is_written else entry

    def of_marked_spaces(entry: str) -> str:
        byte = re.fullmatch(r"<0x([0-9A-F]{2})>", entry)
        return _decode_readable(bytes.fromhex(byte[1])) if byte else entry.replace("▁", " ")

    if "ByteLevel" in steps:
        return of_byte_letters
    return of_marked_spaces if steps & {"Metaspace", "ByteFallback", "Replace"} else str


def row_texts(tokenizer: Tokenizer, rows: int) -> list[str]:
    """Return the text of the token of each row, see `token_text`; `""` for a row without a token.

    Example:
        >>> row_texts(word_tokenizer(["dog", "cat"]), 3)
        ['dog', 'cat', '']
    """
    read = entry_reader(tokenizer)
    entries = (tokenizer.id_to_token(row) for row in range(rows))
    return ["" if entry is None else read(entry) for entry in entries]


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return a digest of a tokenizer, 16 hexadecimal digits, which is equal for equal `tokenizer.json` content.

    Truncation, padding and dropout are ignored, as they are where texts are encoded.

    Example:
        >>> fingerprint(train_tokenizer((), kind="byte")) == fingerprint(train_tokenizer((), kind="byte"))
        True
    """
    return hashlib.sha256(pure_tokenizer(tokenizer).to_str().encode()).hexdigest()[:16]


def raise_if_path(text: str) -> None:
    """Raise an error if a string that should be a text is probably a path.

    It is if a file of that name exists, or if it looks like a path, such as `corpus.txt`. A text with a line break is
    never refused.

    Raises:
        TextError: The string is probably a path.

    Example:
        >>> raise_if_path("I love dogs. and/or cats")
    """
    if len(text) > _LONGEST_PATH or not text.isprintable():
        return
    exists = os.path.isfile(text) or ("/" in text and text.strip("/.~") != "" and os.path.exists(text))
    if exists or _PATH.fullmatch(text):
        raise TextError(
            f"{text!r} is a str, which is read as text, but {'names a file' if exists else 'looks like a path'}. Pass "
            f"pathlib.Path({text!r}) where a path is accepted, or its content: embedlayer.data.corpus."
            f"read_text_chunks({text!r}). If it is the text, add a line break."
        )


# Training


def _checked_texts(texts: object) -> Iterator[str]:
    """Yield the strings of `texts`, the training text of `train_tokenizer`, and check each of them.

    Args:
        texts: A string, or an iterable of strings; anything else is an error.

    Raises:
        TextError: `texts` or an element has another type, or the first string is probably a path.
    """
    if isinstance(texts, str):
        texts = [texts]
    if isinstance(texts, Path | bytes) or not isinstance(texts, Iterable):
        raise TextError(
            f"A tokenizer is trained on a str or an iterable of str, not {type(texts).__name__}. For a file, "
            f"pass embedlayer.data.corpus.read_text_chunks(path)."
        )
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise TextError(
                f"Text {place} is {type(text).__name__}, not str. Decode bytes; for a file, pass "
                f"embedlayer.data.corpus.read_text_chunks(path)."
            )
        if place == 0:
            raise_if_path(text)
        yield text


def _require_words(texts: Iterable[str]) -> Iterator[str]:
    """Yield `texts` unchanged; raise an error after the last one if all of them are empty or white space.

    Raises:
        TextError: No text has a word.
    """
    found = False
    for text in texts:
        found = found or not (text == "" or text.isspace())
        yield text
    if not found:
        raise TextError("There is no text to train a tokenizer on: all of it is empty. Pass at least a few words.")


def _byte_level(model: models.BPE, *, use_regex: bool = True) -> Tokenizer:
    """Return a tokenizer around a BPE model of which the entries are written in `byte_level_alphabet`.

    Args:
        model: The model.
        use_regex: Whether text is split into words as in GPT-2 before the model is applied.
    """
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_tokenizer(specials: list[str]) -> Tokenizer:
    """Return a tokenizer with one token per byte, of which the ID is the value of the byte.

    Args:
        specials: Special tokens, which get the IDs from 256 on.
    """
    letters = sorted(byte_level_alphabet(), key=byte_level_alphabet().__getitem__)
    bytes_alone = models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[])
    tokenizer = _byte_level(bytes_alone, use_regex=False)
    tokenizer.add_special_tokens(specials)
    return tokenizer


def _train_bpe(texts: Iterable[str], vocab_size: int, specials: list[str], min_frequency: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer as in GPT-2.

    Args:
        texts: The training text.
        vocab_size: Largest number of entries, including special tokens and the 256 bytes.
        specials: Special tokens, which get the first IDs.
        min_frequency: Fewest occurrences of a pair that is merged.
    """
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(cut_pre_tokens(texts, tokenizer.pre_tokenizer), trainer)
    return tokenizer


def _train_wordpiece(texts: Iterable[str], vocab_size: int, specials: list[str], min_frequency: int) -> Tokenizer:
    """Train a WordPiece tokenizer as in cased BERT.

    Args:
        texts: The training text, which is kept in memory.
        vocab_size: Largest number of entries, including special tokens.
        specials: Special tokens, `[UNK]` among them, which get the first IDs.
        min_frequency: Fewest occurrences of a pair that is merged.
    """
    texts = list(cut_pre_tokens(texts, bert_tokenizer({"[UNK]": 0}, lowercase=False).pre_tokenizer))
    # The trainer numbers the letters that continue a word in the order of a randomly seeded hash table, and ties
    # between pairs are broken by these numbers. So learn the letters first, and hand them back sorted.
    alphabet = _wordpiece_vocabulary(texts, 0, specials, min_frequency)
    continuing = sorted(letter for letter in alphabet if letter.startswith("##") and letter not in specials)
    vocabulary = _wordpiece_vocabulary(texts, vocab_size, specials + continuing, min_frequency)
    tokenizer = bert_tokenizer(vocabulary, lowercase=False)
    tokenizer.add_special_tokens(specials)
    return tokenizer


def _wordpiece_vocabulary(texts: list[str], vocab_size: int, first: list[str], min_frequency: int) -> dict[str, int]:
    """Run the WordPiece trainer of the `tokenizers` library once, and return the ID of each entry of the vocabulary.

    Args:
        texts: The training text.
        vocab_size: Largest number of entries; single characters are kept beyond it.
        first: Entries that get the first IDs, in this order.
        min_frequency: Fewest occurrences of a pair that is merged.
    """
    tokenizer = bert_tokenizer({"[UNK]": 0}, lowercase=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=first, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.get_vocab()


def _train_unigram(texts: Iterable[str], vocab_size: int, specials: list[str], _: int) -> Tokenizer:
    """Train a Unigram tokenizer as in SentencePiece; text is NFKC-normalised.

    Args:
        texts: The training text.
        vocab_size: Largest number of entries, including special tokens.
        specials: Special tokens, `<unk>` among them, which get the first IDs.
        _: `min_frequency` of the other kinds; not used.
    """
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
    """Train a tokenizer of which the tokens are whole words and punctuation marks.

    Args:
        texts: The training text.
        vocab_size: Largest number of entries, including special tokens.
        specials: Special tokens, `<unk>` among them, which get the first IDs.
        min_frequency: Fewest occurrences of a word in the vocabulary.
    """
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


def tokenizer_file(folder: Path) -> Path | None:
    """Return the path of the tokenizer file in a folder; formats are tried in the order of `load_tokenizer`.

    A plain name such as `vocab.json` is found before a name with a prefix such as `gpt2-vocab.json`. Hidden files are
    ignored. If there is no such file, the result is one of a kind that is not read, or `None`.

    Raises:
        TokenizerError: The folder has several tokenizer files of the first format that is found.
    """
    for names in _FILES:
        if names is not _FILES[0] and (folder / MARIAN.pattern).exists():
            return folder / MARIAN.pattern  # beside a vocab.json
        for pattern in (*names, *(f"*{name.lstrip('*')}" for name in names)):
            found = _visible(folder, pattern)
            if len(found) > 1:
                listed = ", ".join(file.name for file in found)
                raise TokenizerError(f"{folder} has several tokenizers ({listed}). Pass the path of one file.")
            if found:
                return found[0]
    return next((file for kind in UNREAD_TOKENIZERS for file in _visible(folder, kind.pattern)), None)


def _visible(folder: Path, pattern: str) -> list[Path]:
    """Return the paths of the files in a folder whose names fit a glob pattern, sorted, without hidden files."""
    return sorted(file for file in folder.glob(pattern) if not file.name.startswith("."))


def unread_tokenizer(path: Path) -> UnreadTokenizer | None:
    """Return which kind of tokenizer file that is not read a file is, by its name or first line; `None` for others.

    Raises:
        FileError: The file cannot be read.
    """
    if path.suffix == ".model" and _TIKTOKEN_LINE.match(read_bytes(path)[:_LONGEST_LINE]):
        return TIKTOKEN
    return next((kind for kind in UNREAD_TOKENIZERS if path.match(kind.pattern)), None)


def unread_error(path: Path, kind: UnreadTokenizer) -> TokenizerError:
    """Return, without raising it, the error for a tokenizer file of a kind that is not read."""
    if kind.copied_to:
        remedy = f"Copy it to {path.with_name(kind.copied_to.replace('*', path.stem))}."
    else:
        remedy = f"Put the model's tokenizer.json into {path.parent}; many models publish one."
    return TokenizerError(f"{path} is {kind.what}, which is not read. {remedy}")


def _bpe_pair(path: Path) -> tuple[Path, Path] | None:
    """Return the paths of the two files of a BPE tokenizer, `(vocabulary, merges)`, from the path of either.

    The names are `encoder.json` and `vocab.bpe`, or `vocab.json` and `merges.txt`, with any common prefix; it is not
    checked whether the files exist. `None` if `path` has none of these names.
    """
    for vocabulary, merges in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        for ending in (vocabulary, merges):
            if path.name.endswith(ending):
                prefix = path.name.removesuffix(ending)
                return path.with_name(prefix + vocabulary), path.with_name(prefix + merges)
    return None


def _find_beside(path: Path, what: str, *patterns: str) -> Path:
    """Return the path of the only file of some patterns in the folder of the vocabulary file `path`.

    Args:
        path: The vocabulary.
        what: What the file is, for the message.
        patterns: Patterns of its name.

    Raises:
        TokenizerError: The folder has no such file, or several.
    """
    found = [file for pattern in patterns for file in sorted(path.parent.glob(pattern))]
    if len(found) != 1:
        raise TokenizerError(
            f"{path} is a vocabulary without its {what}: {len(found)} files of its folder are named "
            f"{' or '.join(patterns)}. Copy the files of the model into one folder, with their names."
        )
    return found[0]


def _load_bpe(vocabulary: Path, merges: Path, stated: StatedTokenizer) -> Tokenizer:
    """Read a BPE tokenizer from its two files, by the rules that the files beside them state.

    Args:
        vocabulary: JSON file with the ID of each subword.
        merges: Text file with one merge, two subwords, in each line.
        stated: What the files beside them state.

    Raises:
        FileError: A file cannot be read.
        TokenizerError: A file is damaged, a merge has a subword that the vocabulary lacks, or the rules are not known.
    """
    vocab = _read_json(vocabulary)
    if not all(type(token_id) is int for token_id in vocab.values()):
        raise TokenizerError(f"{vocabulary} is not a vocabulary: it should map each token to its ID.")
    lines = [line for line in _read_text(merges).split("\n") if line and not line.startswith("#version")]
    pairs = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]

    for pair in pairs:
        if not all(subword in vocab for subword in (*pair, "".join(pair))):
            raise TokenizerError(
                f"{merges} merges {pair}, which are not in {vocabulary}. Use two files of the same model."
            )

    rules = bpe_rules(vocab, vocabulary, stated)
    return _build_checked(merges, lambda: bpe_tokenizer(vocab, pairs, rules, stated, vocabulary))


def _load_vocab_txt(path: Path, stated: StatedTokenizer) -> Tokenizer:
    """Read a WordPiece tokenizer from BERT's `vocab.txt`, which has one subword a line.

    Args:
        path: The file.
        stated: What the files beside it state.

    Raises:
        FileError: The file cannot be read.
        TokenizerError: The file has no `[UNK]`, or is damaged, or the files beside it state other rules than BERT's.
    """
    entries = _read_text(path).removesuffix("\n").split("\n")
    vocabulary = {entry.removesuffix("\r"): token_id for token_id, entry in enumerate(entries)}
    return _build_checked(path, lambda: wordpiece_tokenizer(vocabulary, stated, path))


def _read_text(path: Path) -> str:
    """Return the content of a UTF-8 text file.

    Raises:
        FileError: The file cannot be read.
        TokenizerError: The file is not UTF-8.
    """
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text ({error}): it is damaged or another kind of file.") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file and return the object in it as a dictionary.

    Raises:
        FileError: The file cannot be read.
        TokenizerError: The file is not a JSON object.
    """
    try:
        return read_json(path)
    except CheckpointError as error:
        raise TokenizerError(str(error)) from error


def _build_checked(path: Path, build: Callable[[], Tokenizer]) -> Tokenizer:
    """Return `build()`, a tokenizer; replace nearly every exception by a `TokenizerError` that names the file.

    Args:
        path: File from which the tokenizer is built, for the error message.
        build: Function without arguments that returns the tokenizer.

    Raises:
        TokenizerError: `build` raised this error, which is not changed; or any exception that is not named below, of
            the `tokenizers` library for example, which is replaced: the file is damaged or incomplete.
        FileError, ImportError: `build` raised this error (a `MissingExtraError` is an `ImportError`); it is not
            changed.
    """
    try:
        with tokenizer_errors("be built"):
            return build()
    except TokenizerError as error:
        if str(path) in str(error):
            raise
        raise TokenizerError(f"{path} is not a valid tokenizer: {error}") from error


# Showing


def _decode_readable(raw: bytes) -> str:
    """Decode UTF-8; a byte that is not part of a whole character is shown as `<0xE2>`."""
    return re.sub(
        "[\udc80-\udcff]",
        lambda lone: f"<0x{ord(lone[0]) - 0xDC00:02X}>",
        raw.decode("utf-8", errors="surrogateescape"),
    )
