"""What the rooms Map and Health show of each token."""

from collections.abc import Mapping
from typing import Any

from embedlayer.explorer.source import Source

Params = Mapping[str, str]


def texts(source: Source, params: Params) -> Any:
    """The readable text of each row, and which are special."""
    return {"texts": source.tokens, "special": source.special}
