"""The bytes of a text that each token of a tokenizer encodes, in one form for all conventions.

| convention | " dog" is | "dog" is | a line feed is |
|---|---|---|---|
| byte-level BPE (GPT-2, LLaMA-3) | `Ġdog` | `dog` | `Ċ` |
| SentencePiece (LLaMA-2, T5) | `▁dog` | `dog` | `<0x0A>` |
| WordPiece (BERT) | `dog` | `##dog` | not encoded |
| whole words | `dog` | `dog` | not encoded |
"""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from tokenizers import Tokenizer

from embedlayer.data.tokenizer import as_tokenizer, byte_level_alphabet, component_types, table_size, without_truncation
from embedlayer.errors import VocabularyError
from embedlayer.vocab.token_selection import Token

WordPosition = Literal["start", "inside", "end"]
"""Where in a word a token occurs."""

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_IDEOGRAPH = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]")


class TokenBytes:
    """Find the tokens of a tokenizer by the bytes that they encode.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.

    Attributes:
        convention: `"byte-level"`, `"sentencepiece"`, `"wordpiece"` or `"word"`.
        vocabulary: ID of each token by its name in the vocabulary, added tokens included.
        entries: Name of each token in the vocabulary, by its ID.
        added: IDs of the added tokens, special or not.
        special: IDs of the special tokens.

    Example:
        >>> tokens = TokenBytes(train_tokenizer("I love dogs, I love cats", vocab_size=270))
        >>> tokens.find(" love") == tokens.find("Ġlove")
        True
        >>> tokens.readings(tokens.find("Ġlove"))
        (b' love',)
    """

    def __init__(self, tokenizer: object) -> None:
        self.tokenizer = without_truncation(as_tokenizer(tokenizer))
        self.convention = _convention(self.tokenizer)
        self.prefix: str = getattr(self.tokenizer.model, "continuing_subword_prefix", None) or ""
        self.suffix: str = getattr(self.tokenizer.model, "end_of_word_suffix", None) or ""
        self.vocabulary: dict[str, int] = self.tokenizer.get_vocab(with_added_tokens=True)
        self.entries = {token_id: entry for entry, token_id in self.vocabulary.items()}
        self.added = frozenset(self.tokenizer.get_added_tokens_decoder())
        self.special = frozenset(i for i, t in self.tokenizer.get_added_tokens_decoder().items() if t.special)

    def readings(self, token_id: int) -> tuple[bytes, ...]:
        """Return the byte strings that a token may add to a text, the most likely first.

        Only tokens of whole words have two: with and without a space before the word, which these tokens do not encode.

        Raises:
            KeyError: There is no such token.
        """
        entry = self.entries[token_id]
        if token_id in self.added:
            return (entry.encode(),)
        entry = entry.removesuffix(self.suffix) or entry
        if self.convention == "byte-level":
            try:
                return (bytes(map(byte_level_alphabet().__getitem__, entry)),)
            except KeyError:  # a name that no text is encoded with
                return (entry.encode(),)
        if self.convention == "sentencepiece":
            byte = _BYTE.fullmatch(entry)
            return (bytes.fromhex(byte[1]) if byte else entry.replace("▁", " ").encode(),)
        if self._continues_word(entry):
            return (entry.removeprefix(self.prefix).encode(),)
        after_space, without = b" " + entry.encode(), entry.encode()
        spaced = entry[:1].isalnum() and not _IDEOGRAPH.match(entry)
        return (after_space, without) if spaced else (without, after_space)

    def _continues_word(self, entry: str) -> bool:
        """Return whether a vocabulary entry starts with the prefix that continues a word, such as `##`."""
        return self.prefix != "" and entry.startswith(self.prefix) and entry != self.prefix

    def word_position(self, token_id: int) -> WordPosition | None:
        """Return whether a token is at the `"start"`, `"inside"` or at the `"end"` of a word, or `None` if unknown.

        - Start: `Ġdog`, `▁dog`, and `dog` in a vocabulary with `##dog`.
        - Inside: `##dog`, and `dog` in a vocabulary with `Ġdog`.
        - End: `dog</w>`, which may also be the whole word.

        Added tokens, punctuation and ideographs have no position. In a vocabulary with `##`, punctuation and ideographs
        have one too.
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
        """Return a dictionary from bytes to the ID of the token that has these bytes as a reading; see `readings`.

        Several tokens may have the same reading. Ordinary tokens with it as their first reading win. Then come byte
        tokens of SentencePiece, added tokens, and second readings; within each kind, the lowest ID wins. Special
        tokens are left out.
        """
        found: dict[bytes, int] = {}
        ids = sorted(self.entries.keys() - self.added)
        readings = {token_id: self.readings(token_id) for token_id in ids if not self.is_byte(token_id)}
        for token_id, likely in readings.items():
            found.setdefault(likely[0], token_id)
        for token_id in [*(i for i in ids if self.is_byte(i)), *sorted(self.added - self.special)]:
            found.setdefault(self.readings(token_id)[0], token_id)
        for token_id, likely in readings.items():
            found.setdefault(likely[-1], token_id)
        return found

    def is_byte(self, token_id: int) -> bool:
        """Return whether a token is a single byte of SentencePiece, such as `<0x0A>`."""
        return self.convention == "sentencepiece" and _BYTE.fullmatch(self.entries[token_id]) is not None

    @property
    def single_bytes(self) -> frozenset[int]:
        """Return the IDs of the tokens that stand for one byte each; a full set of them can encode any text.

        The result includes the tokens for a byte at the end of a word (CLIP). It is empty for a tokenizer without
        such tokens.
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
        """Return the ID of a token, which may be an ID, a vocabulary entry (`Ġdog`), or the token's text (` dog`).

        Raises:
            VocabularyError: There is no such token.
        """
        if isinstance(token, int):
            if token not in self.entries:
                raise VocabularyError(
                    f"The tokenizer has no token {token}: its IDs are 0..{table_size(self.tokenizer) - 1}."
                )
            return token
        token_id = self.vocabulary.get(token, self.by_bytes.get(token.encode()))
        if token_id is None:
            spaced = self.by_bytes.get(b" " + token.encode())
            hint = f" There is {' ' + token!r}, with a space in front." if spaced is not None else ""
            raise VocabularyError(
                f"The tokenizer has no token {token!r}: it encodes that as {self.tokenizer.encode(token).tokens}."
                f"{hint} Pass a token as written in its vocabulary, its text, or its ID."
            )
        return token_id

    def encode(self, content: bytes) -> tuple[int, ...]:
        """Return the IDs with which the tokenizer encodes `content`, without special tokens.

        If `content` is not UTF-8, each byte is encoded alone, and bytes without a token are left out.
        """
        try:
            text = content.decode()
        except UnicodeDecodeError:
            found = (self.by_bytes.get(bytes([byte])) for byte in content)
            return tuple(token_id for token_id in found if token_id is not None)
        if self.convention == "sentencepiece":
            # the model alone: the steps before it would put a space in front
            space = self.by_bytes.get(b" ")
            mark = "▁" if space is None or self.is_byte(space) else self.entries[space]
            ids = [token.id for token in self.tokenizer.model.tokenize(text.replace(" ", mark))]
            if self.special.isdisjoint(ids):
                return tuple(ids)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return tuple(token_id for token_id in ids if token_id not in self.special)


def spell(tokenizer: object, tokens: Sequence[str]) -> list[tuple[int, ...]]:
    """Return, for each text, the IDs of the tokens that the tokenizer encodes the text with.

    For a new token these are its present subwords.

    A text that is a token already usually has the ID of that token. The tokenizer is not changed.

    Example:
        >>> tokenizer = train_tokenizer("I love dogs, I love cats", vocab_size=270)
        >>> [[tokenizer.id_to_token(i) for i in ids] for ids in spell(tokenizer, [" lovedogs"])]
        [['Ġlove', 'd', 'o', 'g', 's']]
    """
    vocabulary = TokenBytes(tokenizer)
    return [vocabulary.encode(token.encode()) for token in tokens]


def _convention(tokenizer: Tokenizer) -> str:
    """Return the name of a tokenizer's way to write spaces and bytes; see `TokenBytes.convention`."""
    steps = component_types(tokenizer.decoder) | component_types(tokenizer.pre_tokenizer)
    kind = type(tokenizer.model).__name__
    if "ByteLevel" in steps:
        return "byte-level"
    return {"WordPiece": "wordpiece", "WordLevel": "word"}.get(kind, "sentencepiece")
