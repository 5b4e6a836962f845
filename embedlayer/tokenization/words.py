"""Tokenizers of whole words, for files of vectors, which have no other."""

import re
from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from embedlayer.tokenization.tokenizer_calls import pre_tokens


def word_tokenizer(tokens: Sequence[str]) -> Tokenizer:
    """Return a tokenizer of whole words whose vocabulary is the token of each row; a file of vectors has no other.

    A duplicate token has the ID of its first row. Text is split at white space, except inside the longest token that
    matches at a word, such as "new york"; it is not split if a token starts or ends with white space, as those of
    subword tokenizers do. There is no unknown token, so a text with another word cannot be encoded: a row `<unk>` is
    the row of this text only.
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
    """Return the first word of a text that a tokenizer of whole words has no token for; `None` if it has them all."""
    return next((word for word in pre_tokens(tokenizer, text) if tokenizer.token_to_id(word) is None), None)
