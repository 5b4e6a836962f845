"""Tokens that the user of the page appends to a text, one after the other."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from embedlayer.explorer.text_ids import Vocabulary, text_ids
from embedlayer.tokenization.tokenizer_calls import decode


def longer_text(
    vocabulary: Vocabulary, text: str, appended: Sequence[int], vocab_size: int, *, add_special_tokens: bool = False
) -> tuple[str, tuple[int, ...]]:
    """Return the text with as many of the appended tokens as possible, and the IDs of the others.

    Tokens become text only if the longer text is split into the same tokens, and if it is one line, as the page's text
    field is. So a special token stays appended, as do a part of a character, a token that would be merged with the one
    before, and a line break with all that follows it.

    Example:
        >>> tokenizer = train_tokenizer("dogs love cats", kind="word")
        >>> longer_text(tokenizer, "dogs", [tokenizer.token_to_id("love")], vocab_size=9)
        ('dogs love', ())
    """
    if not appended:
        return text, ()

    def ids_of(some: str) -> list[int]:
        """Return the IDs of a text."""
        return text_ids(vocabulary, some, vocab_size, add_special_tokens=add_special_tokens).ids

    start = ids_of(text)
    for count in range(len(appended), 0, -1):
        longer = text + _text_after(vocabulary, start, appended[:count])
        if longer.isprintable() and ids_of(longer) == [*start, *appended[:count]]:
            return longer, tuple(appended[count:])
    return text, tuple(appended)


def _text_after(vocabulary: Vocabulary, start: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of `ids` where it follows that of `start`."""
    if isinstance(vocabulary, Tokenizer):
        return decode(vocabulary, [*start, *ids]).removeprefix(decode(vocabulary, start))
    return "".join(f" #{number}" if vocabulary is None else f" {vocabulary.names[number]}" for number in ids)
