"""Convert SentencePiece's `.model` files to `tokenizers.Tokenizer` objects.

SentencePiece itself reads the subwords. Its Python API does not return the kind of the model and the normaliser, so
these fields are read from the file, a protocol buffer. SentencePiece's own `sentencepiece_model_pb2` cannot be used:
after its import, transformers cannot import its copy of that module.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from embedlayer.errors import TokenizerError, require
from embedlayer.io.files import read_bytes

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of subwords, which GGUF files have too."""

_UNIGRAM, _BPE = 1, 2
_PROBE = (
    "The quick brown fox, aged 12, can't jump over 3.14 lazy dogs!",
    "  Two spaces  in  front and between,\nlines\tand tabs.  ",
    "Ünïcödé ﬁne print: naïve café, 日本語のテキスト, Привет мир, ½ ™ 🙂👩‍💻",
    "def f(x):\n    return x**2  # code",
    "",
)


def convert(path: Path) -> Tokenizer:
    """Read a SentencePiece `.model` file and return a tokenizer that gives the same IDs.

    The IDs of some sample texts are compared with those by SentencePiece.

    Raises:
        FileError: The file cannot be read.
        TokenizerError: The file is not a SentencePiece model, or the tokenizer would give other IDs.
        MissingExtraError: The `spm` extra is not installed.
    """
    sentencepiece = require("sentencepiece", extra="spm")
    raw = read_bytes(path)
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=raw)
        kinds = [dict(_fields(entry)).get(3, 1) for number, entry in _fields(raw) if number == 1]
        symbols = [processor.id_to_piece(i) for i, kind in enumerate(kinds) if kind == USER_DEFINED]
        tokenizer = _tokenizer(processor, raw, kinds)
    except (RuntimeError, IndexError, struct.error) as error:
        raise TokenizerError(f"{path} is not a whole SentencePiece model ({error}): it is damaged.") from error
    _check_same_ids(path, tokenizer, processor, [*_PROBE, *(f"a {symbol} b{symbol}c" for symbol in symbols[:4])])
    return tokenizer


def _tokenizer(processor: Any, raw: bytes, kinds: Sequence[int]) -> Tokenizer:
    """Build the tokenizer for a SentencePiece model.

    Args:
        processor: The loaded model, a `SentencePieceProcessor`.
        raw: Bytes of the model's file, for the fields that `processor` does not return.
        kinds: Kind of each subword.

    Raises:
        TokenizerError: The model is neither BPE nor Unigram.
    """
    fields = dict(_fields(raw))
    trainer, normalizer = dict(_fields(fields.get(2, b""))), dict(_fields(fields.get(3, b"")))
    kind = trainer.get(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise TokenizerError("It holds a word or character model; only BPE and Unigram models can be converted.")
    adds_space = bool(normalizer.get(3, 1))
    return sentencepiece_tokenizer(
        [(processor.id_to_piece(i), processor.get_score(i)) for i in range(len(processor))],
        kinds,
        processor.unk_id(),
        is_unigram=kind == _UNIGRAM,
        normalizer=sentencepiece_normalizer(
            normalizer.get(2, b""),
            adds_space=adds_space,
            trims=bool(normalizer.get(4, 1)),
            space=SPACE if normalizer.get(5, 1) else " ",
        ),
        adds_space=adds_space,
        normalizes_symbols=not adds_space,
    )


def sentencepiece_tokenizer(
    subwords: Sequence[tuple[str, float]],
    kinds: Sequence[int],
    unknown: int,
    *,
    is_unigram: bool,
    normalizer: normalizers.Normalizer,
    adds_space: bool,
    normalizes_symbols: bool,
) -> Tokenizer:
    """Build a tokenizer from the content of a SentencePiece model.

    Args:
        subwords: Subword and score of each ID.
        kinds: Kind of each subword: `NORMAL`, `UNKNOWN`, `CONTROL`, `USER_DEFINED`, `UNUSED` or `BYTE`.
        unknown: ID of unknown text.
        is_unigram: Whether the model is Unigram, not BPE.
        normalizer: What changes a text before it is split.
        adds_space: Whether the normaliser puts a space before the text, which decoding removes.
        normalizes_symbols: Whether user-defined symbols are found in the normalised text.
    """
    byte_fallback = BYTE in kinds
    if is_unigram:
        tokenizer = Tokenizer(models.Unigram(list(subwords), unknown, byte_fallback))
    else:
        merged = [i for i, kind in enumerate(kinds) if kind not in (BYTE, CONTROL)]
        tokenizer = Tokenizer(bpe_of_scores(subwords, merged, subwords[unknown][0], byte_fallback=byte_fallback))
    tokenizer.normalizer = normalizer
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if adds_space else []))
    controls = [subword for (subword, _), kind in zip(subwords, kinds, strict=True) if kind in (CONTROL, UNKNOWN)]
    symbols = [subword for (subword, _), kind in zip(subwords, kinds, strict=True) if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in controls])
    tokenizer.add_tokens([AddedToken(text, normalized=normalizes_symbols, special=False) for text in symbols])
    return tokenizer


def sentencepiece_normalizer(charsmap: bytes, *, adds_space: bool, trims: bool, space: str) -> normalizers.Normalizer:
    """Return the normaliser that changes a text as SentencePiece does before it splits the text.

    Args:
        charsmap: Compiled character map of the model, such as NFKC; may be empty.
        adds_space: Whether a space is put before the text.
        trims: Whether spaces at both ends are removed, and runs of spaces become one.
        space: Character that replaces each space: `▁`, or a space to keep them.
    """
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if trims:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if adds_space:
        steps.append(normalizers.Prepend(space))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", space)])


def bpe_of_scores(
    entries: Sequence[tuple[str, float]], merged: Iterable[int], unknown: str, *, byte_fallback: bool
) -> models.BPE:
    """Return a BPE model that merges like SentencePiece, which has scores of subwords instead of a list of merges.

    SentencePiece merges the two neighbours whose merged subword has the best score. A list of all merges of two
    entries into one, in the order of the merged subwords' scores, is equivalent.

    Args:
        entries: Subword and score of each ID.
        merged: IDs of the subwords that a merge may give.
        unknown: Subword for unknown characters.
        byte_fallback: Whether unknown characters are encoded as bytes.
    """
    ids = {subword: token_id for token_id, (subword, _) in enumerate(entries)}
    merges = []
    for token_id in sorted(merged, key=lambda token_id: (-entries[token_id][1], token_id)):
        subword = entries[token_id][0]
        splits = ((subword[:cut], subword[cut:]) for cut in range(1, len(subword)))
        known = [(left, right) for left, right in splits if left in ids and right in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)


def _check_same_ids(path: Path, tokenizer: Tokenizer, processor: Any, texts: Sequence[str]) -> None:
    """Raise an error unless a converted tokenizer gives sample texts the same IDs as SentencePiece.

    Args:
        path: File of the model, for the error message.
        tokenizer: The converted tokenizer.
        processor: The loaded model, a `SentencePieceProcessor`.
        texts: Sample texts.

    Raises:
        TokenizerError: The IDs of a text differ.
    """
    for text in texts:
        ours, theirs = tokenizer.encode(text, add_special_tokens=False).ids, processor.encode(text)
        if ours != theirs:
            raise TokenizerError(
                f"{path} uses rules of SentencePiece that the tokenizers library does not have: {text!r} becomes "
                f"{ours} where SentencePiece gives {theirs}. Use the model's tokenizer.json if it has one."
            )


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Parse a protocol buffer message, and yield the number and the value of each of its fields.

    A value is an integer, or bytes for strings, nested messages and fixed-size numbers.

    Raises:
        struct.error, IndexError: The message is damaged.
    """
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire not in (1, 2, 5):
            raise struct.error(f"unknown wire type {wire}")
        size, at = _varint(message, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Decode the variable-length integer of a protocol buffer that starts at offset `at`.

    Returns:
        The integer, and the offset after it.

    Raises:
        IndexError: The message ends inside the integer.
    """
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
