"""The table that comes with the package, for a first look without a model of one's own: 4,000 words of MiniLM."""

from pathlib import Path

from embedlayer.opening.opened_model import OpenedModel
from embedlayer.opening.readers import open_model

WORD_TABLE = Path(__file__).with_name("words")  # folder of the saved table; its README.md says where the rows come from

TITLE = "4,000 words of MiniLM"


def open_word_table() -> OpenedModel:
    """Open the table of 4,000 words, `(4007, 384)`, with its tokenizer.

    Raises:
        CheckpointError: The source is damaged, or has no token table; the other errors are those of `open_model`.

    Example:
        >>> open_word_table().encode("the queen")
        [2, 904]
    """
    opened = open_model(WORD_TABLE, parts="table")
    opened.title, opened.source = TITLE, ""  # a page that is exported names no folder of this machine
    return opened
