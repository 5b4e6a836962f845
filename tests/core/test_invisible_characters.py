"""Tokens as one can see them."""

import pytest

from embedlayer.core import visible_characters, visible_text


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" a", "·a"),
        ("\n\t", "⏎⇥"),
        ("\x00\x7f", r"\x00\x7f"),
        ("\u202e", r"\u202e"),
        ("\ud800", r"\ud800"),
        ("🏳\ufe0f", r"🏳\ufe0f"),
        ("é日", "é日"),
    ],
)
def test_unseen_characters_become_visible(token, shown):
    assert visible_text(token) == shown


def test_characters_say_which_of_them_are_marks():
    assert list(visible_characters("a ·")) == [("a", None), (" ", "·"), ("·", None)]
