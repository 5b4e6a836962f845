"""The bytes of a text that each token of a tokenizer encodes, in one form for all conventions.

| convention | " dog" is | "dog" is | a line feed is |
|---|---|---|---|
| byte-level BPE (GPT-2, LLaMA-3) | `Ġdog` | `dog` | `Ċ` |
| SentencePiece (LLaMA-2, T5) | `▁dog` | `dog` | `<0x0A>` |
| WordPiece (BERT) | `dog` | `##dog` | not encoded |
| whole words | `dog` | `dog` | not encoded |
"""

import re
from collections.abc import Callable
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from tokenizers import Tokenizer

from embedlayer.core.errors import TokenIdError, VocabularyError
from embedlayer.tokenization.ids import USUAL_NAMES, table_size, unknown_id
from embedlayer.tokenization.tokenizer_calls import as_tokenizer, encode, normalized, pure_tokenizer, tokens_of_word
from embedlayer.tokenization.vocabulary_files import byte_level_alphabet, component_types

Token = str | int
"""A token, by its text or its ID."""

WordPosition = Literal["start", "inside", "end"]
"""Where in a word a token occurs."""

BYTE_ENTRY = re.compile(r"<0x([0-9A-F]{2})>")
"""A vocabulary entry for one byte."""

_IDEOGRAPH = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]")


class BytesById(NamedTuple):
    """The bytes of each token of a tokenizer, by token ID; V is the highest ID plus 1.

    Attributes:
        encoded: The bytes that each token encodes: its shortest reading, and `b""` for an ID without a token.
        lengths: Their lengths in bytes.
        begins_with_space: Whether the first byte is a space.
        takes_space: Whether the token has a second reading with a space in front, as a word of WordPiece has.
        exists: Whether there is a token with this ID.
        added: Whether it is an added token, special or not.
        special: Whether it is one of `TokenBytes.special`.
        unknown: Whether it is the unknown token, which replaces text that the tokenizer cannot encode.
    """

    encoded: list[bytes]
    lengths: Int[np.ndarray, " V"]
    begins_with_space: Bool[np.ndarray, " V"]
    takes_space: Bool[np.ndarray, " V"]
    exists: Bool[np.ndarray, " V"]
    added: Bool[np.ndarray, " V"]
    special: Bool[np.ndarray, " V"]
    unknown: Bool[np.ndarray, " V"]


class TokenBytes:
    """Find the tokens of a tokenizer by the bytes of text that they encode.

    A byte string that a token can add to a text is called a reading of the token: ` dog` for GPT-2's `Ġdog`.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers. It is not changed.

    Attributes:
        tokenizer: The same tokenizer without truncation, padding and BPE dropout.
        convention: How tokens write spaces and bytes: `"byte-level"` (`Ġdog`), `"sentencepiece"` (`▁dog`, `<0x0A>`),
            `"wordpiece"` (`##dog`) or `"word"` (whole words).
        prefix: Prefix of tokens that continue a word, such as `##`, or "".
        suffix: Suffix of tokens that end a word, such as `</w>`, or "".
        vocabulary: From the name of each token in the vocabulary to its ID, added tokens included.
        entries: From the ID of each token to its name in the vocabulary.
        added: IDs of the added tokens, special or not.
        unknown: ID of the unknown token, or `None`.
        special: IDs of the tokens that encode no text: special tokens, added tokens with the usual name of a role, such
            as `</s>`, and the unknown token.

    Raises:
        TokenizerError: `tokenizer` is no tokenizer.

    Example:
        >>> tokens = TokenBytes(train_tokenizer("I love dogs, I love cats", vocab_size=270))
        >>> tokens.find(" love") == tokens.find("Ġlove")
        True
        >>> tokens.readings(tokens.find("Ġlove"))
        (b' love',)
    """

    def __init__(self, tokenizer: object) -> None:
        self.tokenizer = pure_tokenizer(as_tokenizer(tokenizer))
        steps = component_types(self.tokenizer.decoder) | component_types(self.tokenizer.pre_tokenizer)
        kind = type(self.tokenizer.model).__name__
        conventions = {"WordPiece": "wordpiece", "WordLevel": "word"}
        self.convention = "byte-level" if "ByteLevel" in steps else conventions.get(kind, "sentencepiece")
        self.prefix: str = getattr(self.tokenizer.model, "continuing_subword_prefix", None) or ""
        self.suffix: str = getattr(self.tokenizer.model, "end_of_word_suffix", None) or ""
        self.vocabulary: dict[str, int] = self.tokenizer.get_vocab(with_added_tokens=True)
        self.entries = {token_id: entry for entry, token_id in self.vocabulary.items()}
        self._writes_spaces = self.convention == "word" and any(e[0] in " ▁" for e in self.vocabulary if len(e) > 1)
        added = self.tokenizer.get_added_tokens_decoder()
        self.added = frozenset(added)
        self.unknown = unknown_id(self.tokenizer)
        names = {name for names in USUAL_NAMES.values() for name in names}
        special = {token_id for token_id, token in added.items() if token.special or token.content in names}
        self.special = frozenset(special if self.unknown is None else special | {self.unknown})
        self._normalized = frozenset(token_id for token_id, token in added.items() if token.normalized)

    def readings(self, token_id: int) -> tuple[bytes, ...]:
        """Return the byte strings that a token can add to a text, the most likely first.

        Most tokens have one. Tokens that start a word in a WordPiece or word vocabulary have two, with and without a
        space before the word, because such a vocabulary does not encode spaces: `b" dog"` and `b"dog"` for `dog`. A
        word vocabulary with an entry that starts with a space or `▁`, as a file of vectors can have, encodes spaces.
        An added token that is found in the normalised text has the space that the normalizer puts in front of it: with
        LLaMA's `Prepend("▁")`, `<x>` is found as `▁<x>`.

        Raises:
            KeyError: There is no token with this ID.
        """
        entry = self.entries[token_id]
        if token_id in self.added:
            if token_id in self._normalized - self.special:
                text = normalized(self.tokenizer, entry)
                text = text.replace("▁", " ") if self.convention == "sentencepiece" else text
                entry = text if text == f" {entry}" else entry
            return (entry.encode(),)
        entry = entry.removesuffix(self.suffix) or entry
        if self.convention == "byte-level":
            raw = _byte_level_bytes(entry)
            return (entry.encode() if raw is None else raw,)  # None: a name that no text is encoded with
        if self.convention == "sentencepiece":
            return (_marked_bytes(entry),)
        if self._continues_word(entry):
            return (entry.removeprefix(self.prefix).encode(),)
        after_space, without = b" " + entry.encode(), entry.encode()
        if self._writes_spaces:
            return (entry.replace("▁", " ").encode(),)
        spaced = entry[:1].isalnum() and not _IDEOGRAPH.match(entry)
        return (after_space, without) if spaced else (without, after_space)

    def _continues_word(self, entry: str) -> bool:
        """Return whether a vocabulary entry continues a word: a prefix such as `##` and more characters."""
        return self.prefix != "" and entry.startswith(self.prefix) and entry != self.prefix

    def word_position(self, token_id: int) -> WordPosition | None:
        """Return where in a word a token occurs: `"start"`, `"inside"` or `"end"`; `None` if that is unknown.

        - Start: `Ġdog`, `▁dog`, and `dog` in a vocabulary with `##dog` or of whole words.
        - Inside: `##dog`, and `dog` in a vocabulary with `Ġdog`.
        - End: `dog</w>`, which may also be the whole word.

        Added tokens have no position. Punctuation and ideographs have one only in a vocabulary with a prefix such as
        `##`.

        Raises:
            KeyError: There is no token with this ID.
        """
        if token_id in self.added:
            return None
        entry = self.entries[token_id]
        if self.convention == "wordpiece" or (self.convention == "sentencepiece" and self.prefix):
            return "inside" if self._continues_word(entry) else "start"
        text = self.readings(token_id)[0].decode(errors="replace")
        letters = text.removeprefix(" ")
        if not letters[:1].isalnum() or _IDEOGRAPH.match(letters):
            return None
        if self.suffix:
            return "end" if entry.endswith(self.suffix) else None
        return "start" if text.startswith(" ") else "inside"

    @cached_property
    def by_bytes(self) -> dict[bytes, int]:
        """Return a dictionary from byte strings to the ID of the token that has the byte string as a reading.

        `readings` explains readings. If several tokens have the same one, the first of these kinds is in the
        dictionary:

        1. ordinary tokens whose first reading it is;
        2. byte tokens of SentencePiece, such as `<0x0A>`;
        3. added tokens that are not special;
        4. ordinary tokens whose second reading it is.

        Within a kind it is the token with the lowest ID. Special tokens are not in the dictionary.
        """
        ids_by_bytes: dict[bytes, int] = {}
        ids = sorted(self.entries.keys() - self.added - self.special)
        readings = {token_id: self.readings(token_id) for token_id in ids if not self.is_byte(token_id)}
        for token_id, likely in readings.items():
            ids_by_bytes.setdefault(likely[0], token_id)
        for token_id in [*(i for i in ids if self.is_byte(i)), *sorted(self.added - self.special)]:
            ids_by_bytes.setdefault(self.readings(token_id)[0], token_id)
        for token_id, likely in readings.items():
            ids_by_bytes.setdefault(likely[-1], token_id)
        return ids_by_bytes

    @cached_property
    def by_id(self) -> BytesById:
        """Return the bytes of all tokens as arrays over their IDs."""
        size = max(self.entries, default=-1) + 1
        readings = [self.readings(token_id) if token_id in self.entries else (b"",) for token_id in range(size)]
        encoded = [min(each, key=len) for each in readings]
        unknown = () if self.unknown is None else (self.unknown,)
        return BytesById(
            encoded,
            np.array([len(each) for each in encoded], dtype=np.int64),
            np.array([each[:1] == b" " for each in encoded], dtype=bool),
            np.array([len(each) == 2 for each in readings], dtype=bool),
            *(np.isin(np.arange(size), [*ids]) for ids in (self.entries, self.added, self.special, unknown)),
        )

    @cached_property
    def puts_space(self) -> bool:
        """Return whether the tokenizer puts a space in front of a text, as SentencePiece does."""
        ids = encode(self.tokenizer, "a").ids
        return bool(ids) and self.readings(ids[0])[0].startswith(b" ") and not self.by_id.takes_space[ids[0]]

    def is_byte(self, token_id: int) -> bool:
        """Return whether a token ID is that of a SentencePiece token for a single byte, such as `<0x0A>`."""
        return self.convention == "sentencepiece" and BYTE_ENTRY.fullmatch(self.entries[token_id]) is not None

    @property
    def single_bytes(self) -> frozenset[int]:
        """Return the IDs of the tokens that encode a single byte; a tokenizer with all 256 can encode any text.

        The tokens for a byte that continues or ends a word are included (`a</w>` of CLIP). The set is empty for
        WordPiece and word tokenizers, and may be incomplete for others.
        """
        names = [f"<0x{byte:02X}>" for byte in range(256)] if self.convention == "sentencepiece" else []
        if self.convention == "byte-level":
            names = [
                f"{prefix}{letter}{suffix}"
                for prefix in {"", self.prefix}
                for letter in byte_level_alphabet()
                for suffix in {"", self.suffix}
            ]
        return frozenset(self.vocabulary[name] for name in names if name in self.vocabulary)

    def find(self, token: Token) -> int:
        """Return the ID of a token that is named by its ID, its vocabulary entry (`Ġdog`), or its text (` dog`).

        A string that is an entry is not read as a text.

        Raises:
            VocabularyError: There is no such token.
        """
        if isinstance(token, int):
            if token not in self.entries:
                last = table_size(self.tokenizer) - 1
                raise VocabularyError(f"The tokenizer has no token {token}: its IDs are 0..{last}.")
            return token
        token_id = self.vocabulary.get(token, self.by_bytes.get(token.encode()))
        if token_id is None:
            spaced = self.by_bytes.get(b" " + token.encode())
            hint = f" There is {' ' + token!r}, with a space in front." if spaced is not None else ""
            encoded = encode(self.tokenizer, token, add_special_tokens=True).tokens
            raise VocabularyError(
                f"The tokenizer has no token {token!r}: it encodes that as {encoded}.{hint} An ID is written as #304."
            )
        return token_id

    def encode(self, content: bytes) -> tuple[int, ...]:
        """Return the IDs with which the tokenizer encodes a byte string; special tokens are left out.

        If `content` is not valid UTF-8, each byte is encoded by itself, and bytes without a token are left out.
        """
        try:
            text = content.decode()
        except UnicodeDecodeError:
            single = (self.by_bytes.get(bytes([byte])) for byte in content)
            return tuple(token_id for token_id in single if token_id is not None)
        if self.convention == "sentencepiece":
            # the model alone: the steps before it would put a space in front
            space = self.by_bytes.get(b" ")
            mark = "▁" if space is None or self.is_byte(space) else self.entries[space]
            ids = [token.id for token in tokens_of_word(self.tokenizer, text.replace(" ", mark))]
            if self.special.isdisjoint(ids):
                return tuple(ids)
        ids = encode(self.tokenizer, text).ids
        return tuple(token_id for token_id in ids if token_id not in self.special)


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of one token as a person would write it.

    Byte-level letters and `▁` become the characters that they encode. Bytes of an incomplete character become `<0xE2>`.
    Added tokens and WordPiece's `##` are unchanged.
    """
    subword = tokenizer.id_to_token(token_id) if token_id >= 0 else None
    if subword is None:
        raise TokenIdError(f"The tokenizer has no token {token_id}: its IDs are 0..{table_size(tokenizer) - 1}.")
    return entry_reader(tokenizer)(subword)


def entry_reader(tokenizer: Tokenizer) -> Callable[[str], str]:
    """Return the function from an entry of the vocabulary to its text as in `token_text`, for many entries at once."""
    steps = component_types(tokenizer.decoder) | component_types(tokenizer.pre_tokenizer)
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}

    if "ByteLevel" in steps:
        bytes_of = _byte_level_bytes
    elif steps & {"Metaspace", "ByteFallback", "Replace"}:
        bytes_of = _marked_bytes
    else:
        return str
    return lambda entry: entry if entry in added or (raw := bytes_of(entry)) is None else decode_readable(raw)


def row_texts(tokenizer: Tokenizer, rows: int) -> list[str]:
    """Return the text of the token of each row, see `token_text`; `""` for a row without a token."""
    read = entry_reader(tokenizer)
    entries = (tokenizer.id_to_token(row) for row in range(rows))
    return ["" if entry is None else read(entry) for entry in entries]


def decode_readable(raw: bytes) -> str:
    """Decode UTF-8; a byte that is not part of a whole character is shown as `<0xE2>`."""
    return re.sub(
        "[\udc80-\udcff]",
        lambda lone: f"<0x{ord(lone[0]) - 0xDC00:02X}>",
        raw.decode("utf-8", errors="surrogateescape"),
    )


def _marked_bytes(entry: str) -> bytes:
    """Return the bytes of an entry of SentencePiece."""
    byte = BYTE_ENTRY.fullmatch(entry)
    return bytes.fromhex(byte[1]) if byte else entry.replace("▁", " ").encode()


def _byte_level_bytes(entry: str) -> bytes | None:
    """Return the bytes of an entry of byte-level BPE; `None` if it has other letters, as added tokens do."""
    try:
        return bytes(map(byte_level_alphabet().__getitem__, entry))
    except KeyError:
        return None
