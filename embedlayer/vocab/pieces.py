"""What the entries of a tokenizer stand for, as bytes: one language for every convention.

| convention | " dog" is | "dog" is | a line feed is |
|---|---|---|---|
| byte-level BPE (GPT-2, LLaMA-3) | `Ġdog` | `dog` | `Ċ` |
| SentencePiece (LLaMA-2, T5) | `▁dog` | `dog` | `<0x0A>` |
| WordPiece (BERT) | `dog` | `##dog` | not there |
| whole words | `dog` | `dog` | not there |
"""

import re
from collections.abc import Sequence
from typing import Literal

from tokenizers import Tokenizer

from embedlayer.data.tokenizer import as_tokenizer, byte_level_alphabet, component_types, table_size, without_truncation
from embedlayer.errors import VocabularyError

Token = str | int
"""An entry, by its ID or its text."""

Place = Literal["start", "inside", "end"]
"""Where in a word an entry stands."""

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_IDEOGRAPH = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]")


class Pieces:
    """The entries of a tokenizer, found by what they stand for.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.

    Attributes:
        convention: `"byte-level"`, `"sentencepiece"`, `"wordpiece"` or `"word"`.
        vocabulary: ID of each entry, added tokens included.
        added: IDs of the added tokens, special or not.

    Example:
        >>> pieces = Pieces(train_tokenizer("I love dogs, I love cats", vocab_size=270))
        >>> pieces.find(" love") == pieces.find("Ġlove")
        True
        >>> pieces.meanings(pieces.find("Ġlove"))
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
        self._by_meaning: dict[bytes, int] | None = None

    def meanings(self, token_id: int) -> tuple[bytes, ...]:
        """Return what an entry stands for: the bytes it adds to a text, most likely reading first.

        Only words have two readings: after a space, which they do not write, or without one.
        """
        entry = self.entries[token_id]
        if token_id in self.added:
            return (entry.encode(),)
        entry = entry.removesuffix(self.suffix) or entry
        if self.convention == "byte-level":
            try:
                return (bytes(map(byte_level_alphabet().__getitem__, entry)),)
            except KeyError:  # not an entry that text is written with
                return (entry.encode(),)
        if self.convention == "sentencepiece":
            byte = _BYTE.fullmatch(entry)
            return (bytes.fromhex(byte[1]) if byte else entry.replace("▁", " ").encode(),)
        if self.prefix and entry.startswith(self.prefix) and entry != self.prefix:
            return (entry.removeprefix(self.prefix).encode(),)
        after_space, without = b" " + entry.encode(), entry.encode()
        spaced = entry[:1].isalnum() and not _IDEOGRAPH.match(entry)
        return (after_space, without) if spaced else (without, after_space)

    def place(self, token_id: int) -> Place | None:
        """Return where in a word an entry stands, as far as its convention says so; `None` where it does not.

        `Ġdog`, `▁dog` and, beside `##dog`, `dog` start a word; `##dog` and, beside `Ġdog`, `dog` continue one;
        `dog</w>` ends one, and may also be all of it. Marks and ideographs stand anywhere, except that a convention
        with `##` tells them apart too.
        """
        if token_id in self.added:
            return None
        entry = self.entries[token_id]
        if self.convention == "wordpiece" or (self.convention == "sentencepiece" and self.prefix):
            return "inside" if self.prefix and entry.startswith(self.prefix) and entry != self.prefix else "start"
        text = self.meanings(token_id)[0].decode(errors="replace")
        letters = text.removeprefix(" ")
        if not letters[:1].isalnum() or _IDEOGRAPH.match(letters):
            return None
        if self.suffix:
            return "end" if entry.endswith(self.suffix) else None
        return "start" if text.startswith(" ") else "inside"

    @property
    def by_meaning(self) -> dict[bytes, int]:
        """ID of the entry that stands for these bytes; a likelier reading and an ordinary entry go first."""
        if self._by_meaning is None:
            found: dict[bytes, int] = {}
            ids = sorted(self.entries.keys() - self.added)
            ordinary = [token_id for token_id in ids if not self.is_byte(token_id)]
            readings = {token_id: self.meanings(token_id) for token_id in ordinary}
            for token_id, meanings in readings.items():
                found.setdefault(meanings[0], token_id)
            for token_id in [*(i for i in ids if self.is_byte(i)), *sorted(self.added - self.special)]:
                found.setdefault(self.meanings(token_id)[0], token_id)
            for token_id, meanings in readings.items():
                found.setdefault(meanings[-1], token_id)
            self._by_meaning = found
        return self._by_meaning

    def is_byte(self, token_id: int) -> bool:
        """Whether an entry is one byte of SentencePiece's, such as `<0x0A>`."""
        return self.convention == "sentencepiece" and _BYTE.fullmatch(self.entries[token_id]) is not None

    @property
    def single_bytes(self) -> frozenset[int]:
        """IDs of the entries that write single bytes, and with them any text; also those that end a word (CLIP)."""
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
        """ID of an entry: by its ID, as it stands in the vocabulary (`Ġdog`), or by what it stands for (` dog`).

        Raises:
            VocabularyError: There is no such entry.
        """
        if isinstance(token, int):
            if token not in self.entries:
                raise VocabularyError(
                    f"The tokenizer has no token {token}: its IDs are 0..{table_size(self.tokenizer) - 1}."
                )
            return token
        token_id = self.vocabulary.get(token, self.by_meaning.get(token.encode()))
        if token_id is None:
            spaced = self.by_meaning.get(b" " + token.encode())
            hint = f" There is {' ' + token!r}, with a space in front." if spaced is not None else ""
            raise VocabularyError(
                f"The tokenizer has no token {token!r}: it reads that as {self.tokenizer.encode(token).tokens}.{hint} "
                f"Give a token as it stands in its vocabulary, the text it stands for, or its ID."
            )
        return token_id

    def spell(self, meaning: bytes) -> tuple[int, ...]:
        """The entries that this tokenizer writes some bytes with; none of them is a special token."""
        try:
            text = meaning.decode()
        except UnicodeDecodeError:
            found = (self.by_meaning.get(bytes([byte])) for byte in meaning)
            return tuple(token_id for token_id in found if token_id is not None)
        if self.convention == "sentencepiece":
            # the model alone: the steps before it would put a space in front
            ids = [token.id for token in self.tokenizer.model.tokenize(text.replace(" ", self._space))]
            if self.special.isdisjoint(ids):
                return tuple(ids)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return tuple(token_id for token_id in ids if token_id not in self.special)

    @property
    def _space(self) -> str:
        """How SentencePiece's entries write a space."""
        space = self.by_meaning.get(b" ")
        return "▁" if space is None or self.is_byte(space) else self.entries[space]


def spell(tokenizer: object, tokens: Sequence[str]) -> list[tuple[int, ...]]:
    """For each token, the entries that a tokenizer without it writes it with.

    Example:
        >>> tokenizer = train_tokenizer("I love dogs, I love cats", vocab_size=270)
        >>> [[tokenizer.id_to_token(i) for i in ids] for ids in spell(tokenizer, [" lovedogs"])]
        [['Ġlove', 'd', 'o', 'g', 's']]
    """
    pieces = Pieces(tokenizer)
    return [pieces.spell(token.encode()) for token in tokens]


def _convention(tokenizer: Tokenizer) -> str:
    steps = component_types(tokenizer.decoder) | component_types(tokenizer.pre_tokenizer)
    kind = type(tokenizer.model).__name__
    if "ByteLevel" in steps:
        return "byte-level"
    if kind in ("WordPiece", "WordLevel"):
        return {"WordPiece": "wordpiece", "WordLevel": "word"}[kind]
    return "sentencepiece"
