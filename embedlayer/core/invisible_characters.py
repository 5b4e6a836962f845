"""Visible forms of invisible characters in tokens."""

import re
import unicodedata
from collections.abc import Iterator

VISIBLE = {" ": "·", "\n": "⏎", "\t": "⇥"}

_IGNORABLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Letters and marks that have no form of their own, such as variation selectors: Default_Ignorable_Code_Point."""


def visible_text(text: str) -> str:
    """Return a text with invisible characters replaced: space by `·`, newline by `⏎`, tab by `⇥`, others by escapes.

    Example:
        >>> visible_text(" first")
        '·first'
    """
    return "".join(mark or character for character, mark in visible_characters(text))


def visible_characters(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield `(character, visible form)` for each character; the form is `None` if the character is visible itself."""
    for character in text:
        category = unicodedata.category(character)
        if character in VISIBLE:
            yield character, VISIBLE[character]
        elif category in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"} or _IGNORABLE.match(character):
            yield character, character.encode("unicode_escape").decode("ascii")
        else:
            yield character, None
