"""Text that people read."""

import re
from pathlib import Path


def test_no_message_writes_an_article_before_the_name_of_a_class_itself():
    """`a_or_an` chooses between "a" and "an"."""
    written = re.compile(r"\ban? (\"\s+f\")?\{[^{}]*__name__\}")
    package = Path(__file__).parents[2] / "embedlayer"
    assert not [file for file in package.rglob("*.py") if written.search(file.read_text())]
