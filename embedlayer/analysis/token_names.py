"""Find the row of a token that is named by its text, its ID, or its bytes."""

import json
import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from tokenizers import Tokenizer, models

from embedlayer.analysis.token_classes import ids_by_text, token_texts
from embedlayer.core.errors import UnknownTokenError
from embedlayer.tokenization.bytes import decode_readable
from embedlayer.tokenization.tokenizer_calls import encode
from embedlayer.tokenization.words import unknown_word

Token: TypeAlias = str | int | bytes | np.integer[Any]  # a token by its text, its ID, or its bytes
LISTED = 8  # most tokens that an error lists


class TokenNames:
    """The names of the rows of a table, see `TokenVectors.id_of`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, count: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.count = count

    def id_of(self, token: Token) -> int:
        """Return the ID of a token named by its text, its ID, or its bytes."""
        if isinstance(token, str | bytes):
            return self._of_text(token if isinstance(token, str) else decode_readable(token))
        index = operator.index(token)
        if not 0 <= index < self.vocab_size:
            raise UnknownTokenError(
                f"Token id {index} is outside this table of {self.vocab_size} rows (0..{self.vocab_size - 1})."
            )
        return index

    def _of_text(self, text: str) -> int:
        """Return the ID of the token with a text, by the rules of `id_of`."""
        has_all_words = self._is_of_words and unknown_word(self.tokenizer, text) is None
        encoding = encode(self.tokenizer if has_all_words else self._encoder, text)
        if len(encoding.ids) == 1:
            entry = self.tokenizer.id_to_token(encoding.ids[0])
            # Unigram writes an unknown word itself as the text of the unknown token
            if entry == encoding.tokens[0] and entry != getattr(self.tokenizer.model, "unk_token", None):
                return int(encoding.ids[0])
        literal = self.tokenizer.token_to_id(text)
        if literal is None:
            literal = self._by_readable_text.get(text)
        if literal is not None:
            return int(literal)
        if self._is_of_words and text:
            raise UnknownTokenError(
                f"{text!r} is not among the {self.count:,} tokens.\n"
                f"Ask for a token that is, by text or ID (in a command such as '#0')."
            )
        if len(encoding.ids) > 1:
            respaced = text.lstrip(" ") if text.startswith(" ") else f" {text}"
            raise UnknownTokenError(
                f"{text!r} is {len(encoding.ids)} tokens to this tokenizer: {_listing(encoding.tokens)}.\n"
                f"Ask for one of them, by text or ID ({_listing(encoding.ids)}; in a command "
                f'"#{encoding.ids[0]}"); spaces count, so {respaced!r} may be one token.'
            )
        raise UnknownTokenError(
            f"{text!r} is not in this tokenizer's vocabulary of {self.count} tokens: it is read as "
            f"{encoding.tokens[0]!r}.\nAsk for a token that is, by text or ID (in a command such as '#0')."
            if encoding.ids
            else f"{text!r} has no tokens to this tokenizer. Ask for a token by text or ID."
        )

    @cached_property
    def _is_of_words(self) -> bool:
        """Return whether the tokens are whole words as they are, such as those of a file of vectors."""
        is_plain = isinstance(self.tokenizer.model, models.WordLevel) and self.tokenizer.normalizer is None
        return is_plain and not self.tokenizer.get_added_tokens_decoder()

    @cached_property
    def _encoder(self) -> Tokenizer:
        """Return the tokenizer that encodes the texts passed to `id_of`."""
        if isinstance(self.tokenizer.model, models.BPE):  # leaves out what it does not know
            return self.tokenizer
        content = json.loads(self.tokenizer.to_str())
        model, unknown = content["model"], self.vocab_size
        if model["type"] in ("WordLevel", "WordPiece") and model["unk_token"] not in model["vocab"]:
            model["vocab"][model["unk_token"]] = unknown
        elif model["type"] == "Unigram" and model["unk_id"] is None:
            model["unk_id"] = len(model["vocab"])
            model["vocab"].append(["<unknown>", 0.0])
        else:
            return self.tokenizer
        return Tokenizer.from_str(json.dumps(content))

    @cached_property
    def _by_readable_text(self) -> dict[str, int]:
        """Return text -> ID for each readable text that exactly one token has."""
        return ids_by_text(token_texts(self.tokenizer))


def _listing(values: Sequence[object]) -> str:
    """Return the first `LISTED` values as text for an error message, with `...` if there are more."""
    shown = ", ".join(repr(value) for value in values[:LISTED])
    return f"{shown}, ..." if len(values) > LISTED else shown
