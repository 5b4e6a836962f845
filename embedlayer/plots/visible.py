"""Tokens as one can see them."""

import unicodedata
from collections.abc import Iterator

VISIBLE = {" ": "·", "\n": "⏎", "\t": "⇥"}


def visible_text(text: str) -> str:
    """A token as one can see it: a space is `·`, a newline `⏎`, a tab `⇥`, other unseen characters their escape.

    Example:
        >>> visible_text(" first")
        '·first'
    """
    return "".join(mark or character for character, mark in visible_characters(text))


def visible_characters(text: str) -> Iterator[tuple[str, str | None]]:
    """Each character, and what stands for it where it cannot be seen by itself."""
    for character in text:
        category = unicodedata.category(character)
        if character in VISIBLE:
            yield character, VISIBLE[character]
        elif category in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}:
            yield character, character.encode("unicode_escape").decode("ascii")
        else:
            yield character, None
