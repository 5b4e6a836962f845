"""Counts and classes as short text."""

import re
from pathlib import Path

import pytest

from embedlayer.core.formatting import format_bytes, format_parameters


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 KiB"), (2**31, "2.0 GiB")])
def test_bytes_are_binary(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(("count", "text"), [(64, "64"), (64_000, "64.0 K"), (2_101_346_304, "2.1 B")])
def test_parameters_are_decimal(count, text):
    assert format_parameters(count) == text


def test_no_message_writes_an_article_before_the_name_of_a_class_itself():
    """`a_or_an` chooses between "a" and "an"."""
    written = re.compile(r"\ban? (\"\s+f\")?\{[^{}]*__name__\}")
    package = Path(__file__).parents[2] / "embedlayer"
    assert not [file for file in package.rglob("*.py") if written.search(file.read_text())]
