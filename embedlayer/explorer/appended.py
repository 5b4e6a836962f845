"""Tokens that the user of the page appends to a text, one after the other."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from embedlayer.data.tokenizer import without_truncation


def longer_text(
    tokenizer: Tokenizer | None, text: str, appended: Sequence[int], *, add_special_tokens: bool = False
) -> tuple[str, tuple[int, ...]]:
    """Return the text with as many of the appended tokens as possible, and the IDs of the others.

    Tokens become text only if the tokenizer splits the longer text into the same tokens, and if it is one line, as the
    page's text field is. So a special token stays appended, as do a part of a character, a token that would be merged
    with the one before, and a line break with all that follows it.

    Args:
        tokenizer: Tokenizer of the model; without one, all tokens stay appended.
        text: The text.
        appended: IDs of the tokens that follow it.
        add_special_tokens: Whether the tokenizer adds the tokens that start or end a text.

    Example:
        >>> tokenizer = train_tokenizer("dogs love cats", kind="word")
        >>> longer_text(tokenizer, "dogs", [tokenizer.token_to_id("love")])
        ('dogs love', ())
    """
    if tokenizer is None or not appended:
        return text, tuple(appended)
    unlimited = without_truncation(tokenizer)
    start = unlimited.encode(text, add_special_tokens=add_special_tokens).ids
    known = unlimited.decode(start)
    for count in range(len(appended), 0, -1):
        ids = [*start, *appended[:count]]
        longer = text + unlimited.decode(ids).removeprefix(known)
        if longer.isprintable() and unlimited.encode(longer, add_special_tokens=add_special_tokens).ids == ids:
            return longer, tuple(appended[count:])
    return text, tuple(appended)
