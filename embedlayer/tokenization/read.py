"""Read tokenizers from the files of models, as plain `tokenizers.Tokenizer` objects, and save them."""

import re
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from embedlayer.core.errors import TokenizerError
from embedlayer.families.tokenizers import (
    MARIAN,
    REFUSED_CLASSES,
    SENTENCEPIECE_CLASSES,
    TIKTOKEN,
    UNREAD_TOKENIZERS,
    SentencePieceRules,
    UnreadTokenizer,
)
from embedlayer.io.files import is_gguf, read_bytes, write_text
from embedlayer.tokenization.ids import table_size
from embedlayer.tokenization.sentencepiece_files import read_llama2c, read_sentencepiece
from embedlayer.tokenization.tokenizer_calls import build_tokenizer, tokenizer_errors
from embedlayer.tokenization.tokenizer_config import TokenizerConfig, read_json_file, read_tokenizer_config
from embedlayer.tokenization.vocabulary_files import bpe_rules, bpe_tokenizer, wordpiece_tokenizer

_LONGEST_LINE = 4096
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
_LLAMA2C = ("tokenizer.bin", "tok[0-9]*.bin")
_FILES = (("tokenizer.json",), ("vocab.json", "encoder.json"), ("*.model",), ("vocab.txt",), _LLAMA2C, ("*.gguf",))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer from the files of a model.

    - `tokenizer.json`, or another file with the same content.
    - `vocab.json` and `merges.txt`, or GPT-2's `encoder.json` and `vocab.bpe`; pass either one. Both may have a common
      prefix (`gpt2-encoder.json` and `gpt2-vocab.bpe`). The rules are those of the tokenizer class that the
      `tokenizer_config.json` beside them names, or that the model type of `config.json` has. With nothing beside them
      they are GPT-2's, if all entries are written in its alphabet of bytes.
    - SentencePiece's `.model`, BPE or Unigram, with the `spm` extra. The files beside it state the class, which decides
      the IDs: those of XLM-RoBERTa are shifted by one, those of M2M-100 are in a `vocab.json`. The subwords of sample
      texts are compared with SentencePiece; a model with others raises a `TokenizerError`. Unlike in SentencePiece,
      `</s>` in a text is the control symbol.
    - BERT's `vocab.txt`, with `do_lower_case`, `strip_accents` and `tokenize_chinese_chars` of the
      `tokenizer_config.json` beside it. Without `do_lower_case`, text is lower-cased if a file names the class, or if
      no file does and no entry except the bracketed ones has an upper-case letter.
    - llama2.c's `tokenizer.bin` (`tok512.bin`).
    - A GGUF file of llama.cpp, with the `gguf` extra.
    - A folder with one of these, searched for in this order.

    Beside `vocab.json`, `.model` and `vocab.txt`, the settings and special tokens in `tokenizer_config.json` and
    `special_tokens_map.json` are read too, and the added tokens in the first or in `added_tokens.json`.

    Raises:
        FileError: There is no such file, or it cannot be read.
        TokenizerError: The file is damaged, incomplete or of an unknown format, the rules of its class are not
            known, or the folder has several tokenizers.
        CheckpointError: A GGUF file is damaged.
        MissingExtraError: A `.model` needs `pip install 'embedlayer[spm]'`, and a `.gguf` `'embedlayer[gguf]'`.
    """
    path = Path(path)
    if path.is_dir():
        file = tokenizer_file(path)
        if file is None or unread_tokenizer(file) is not None:
            config = read_tokenizer_config(path)
            if config.kind in REFUSED_CLASSES:
                raise config.refuse_class(path)
        if file is None:
            raise TokenizerError(f"{path} has no tokenizer, such as tokenizer.json; see load_tokenizer for all files.")
        path = file
    tokenizer = _read_tokenizer(path)
    try:
        table_size(tokenizer)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    return tokenizer


def _read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer from one file. Its name and content show which format of `load_tokenizer` it has."""
    unread = unread_tokenizer(path)
    if unread is not None:
        advice = f"Put the model's tokenizer.json into {path.parent}; many models publish one."
        if unread.copied_to:
            advice = f"Copy it to {path.with_name(unread.copied_to.replace('*', path.stem))}."
        raise TokenizerError(f"{path} is {unread.what}, which is not read. {advice}")
    if is_gguf(path):
        from embedlayer.io.gguf_files import read_gguf  # imports torch
        from embedlayer.tokenization.gguf_tokenizers import tokenizer_of

        return tokenizer_of(read_gguf(path).metadata, path)
    if path.suffix == ".bin":
        return _build_checked(path, lambda: read_llama2c(path))
    pair = _bpe_pair(path)
    is_vocabulary = path.suffix == ".json"
    if is_vocabulary:
        content = read_json_file(path)
        if isinstance(content.get("model"), dict):
            return _build_checked(path, lambda: build_tokenizer(content))
    config = read_tokenizer_config(path.parent)
    if config.kind in REFUSED_CLASSES:
        raise config.refuse_class(path)
    rules = SENTENCEPIECE_CLASSES.get(config.kind or "", SentencePieceRules())
    if path.suffix == ".model" or (is_vocabulary and rules.reads_vocabulary):
        model = path if path.suffix == ".model" else _find_beside(path, "SentencePiece model", "*.model")
        return _build_checked(model, lambda: read_sentencepiece(model, config))
    if pair is None and is_vocabulary:
        pair = path, _find_beside(path, "merges", "*.bpe", "*merges.txt")
    if pair is not None:
        return _load_bpe(*pair, config)
    if path.suffix == ".txt":
        lines = _read_text(path).removesuffix("\n").split("\n")
        vocabulary = {line.removesuffix("\r"): token_id for token_id, line in enumerate(lines)}
        return _build_checked(path, lambda: wordpiece_tokenizer(vocabulary, config, path))
    raise TokenizerError(f"{path} has no known tokenizer format; see load_tokenizer.")


def save_tokenizer(tokenizer: Tokenizer, path: str | Path) -> None:
    """Write a tokenizer to the file `path` in the format of `tokenizer.json`, atomically.

    Raises:
        FileError: The file cannot be written.
    """
    write_text(path, tokenizer.to_str(pretty=True))


def tokenizer_file(folder: Path) -> Path | None:
    """Return the path of the tokenizer file in a folder; formats are tried in the order of `load_tokenizer`.

    A plain name such as `vocab.json` comes before a name with a prefix such as `gpt2-vocab.json`; hidden files are
    ignored. Without a file that is read, the result is one of a kind that is not read, or `None`. Marian's
    `source.spm`, which is not read, comes before all formats but `tokenizer.json`.
    """
    for names in _FILES:
        if names is not _FILES[0] and (folder / MARIAN.pattern).exists():
            return folder / MARIAN.pattern  # beside a vocab.json
        for pattern in (*names, *(f"*{name.lstrip('*')}" for name in names)):
            files = _visible(folder, pattern)
            if len(files) > 1:
                listed = ", ".join(file.name for file in files)
                raise TokenizerError(f"{folder} has several tokenizers ({listed}). Pass the path of one file.")
            if files:
                return files[0]
    return next((file for kind in UNREAD_TOKENIZERS for file in _visible(folder, kind.pattern)), None)


def _visible(folder: Path, pattern: str) -> list[Path]:
    """Return the paths of the files in a folder whose names fit a glob pattern, sorted, without hidden files."""
    return sorted(file for file in folder.glob(pattern) if not file.name.startswith("."))


def unread_tokenizer(path: Path) -> UnreadTokenizer | None:
    """Return which kind of tokenizer file that is not read a file is, by its name or first line; `None` for others."""
    if path.suffix == ".model" and _TIKTOKEN_LINE.match(read_bytes(path)[:_LONGEST_LINE]):
        return TIKTOKEN
    return next((kind for kind in UNREAD_TOKENIZERS if path.match(kind.pattern)), None)


def _bpe_pair(path: Path) -> tuple[Path, Path] | None:
    """Return the paths of the two files of a BPE tokenizer, `(vocabulary, merges)`, from the path of either."""
    for vocabulary, merges in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        for ending in (vocabulary, merges):
            if path.name.endswith(ending):
                prefix = path.name.removesuffix(ending)
                return path.with_name(prefix + vocabulary), path.with_name(prefix + merges)
    return None


def _find_beside(path: Path, what: str, *patterns: str) -> Path:
    """Return the path of the only file in the folder of the vocabulary file `path` that fits a glob pattern."""
    files = [file for pattern in patterns for file in sorted(path.parent.glob(pattern))]
    if len(files) != 1:
        raise TokenizerError(
            f"{path} is without its {what}: {len(files)} files beside it are named {' or '.join(patterns)}."
        )
    return files[0]


def _load_bpe(vocabulary: Path, merges: Path, config: TokenizerConfig) -> Tokenizer:
    """Read a BPE tokenizer from its two files, by the rules that the files beside them state."""
    vocab = read_json_file(vocabulary)
    if not all(type(token_id) is int for token_id in vocab.values()):
        raise TokenizerError(f"{vocabulary} is not a vocabulary: it should map each token to its ID.")
    lines = [line for line in _read_text(merges).split("\n") if line and not line.startswith("#version")]
    pairs = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    for pair in pairs:
        if not all(subword in vocab for subword in (*pair, "".join(pair))):
            raise TokenizerError(f"{merges} merges {pair}, which are not in {vocabulary}: they are of two models.")
    rules = bpe_rules(vocab, vocabulary, config)
    return _build_checked(merges, lambda: bpe_tokenizer(vocab, pairs, rules, config, vocabulary))


def _read_text(path: Path) -> str:
    """Return the content of a text file; raise a `TokenizerError` if it is not UTF-8."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text ({error}): it is damaged or another kind of file.") from error


def _build_checked(path: Path, build: Callable[[], Tokenizer]) -> Tokenizer:
    """Return `build()`, a tokenizer; replace exceptions by a `TokenizerError` that names the file."""
    try:
        with tokenizer_errors("be built"):
            return build()
    except TokenizerError as error:
        if str(path) in str(error):
            raise
        raise TokenizerError(f"{path} is not a valid tokenizer: {error}") from error
