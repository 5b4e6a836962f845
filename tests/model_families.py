"""The families of transformers that the library takes, as docs/families.md lists them."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
KINDS = {"causal": "Causal", "masked": "Masked", "seq2seq": "Sequence", "image-text": "Language models of vision"}
"""Kind of `examples/tiny_models.py` -> start of the title of its table."""


def families() -> list[tuple[str, str]]:
    """Every kind and model type on the page of families that is read and compared."""
    found, kind = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            kind = next((name for name, title in KINDS.items() if line[3:].startswith(title)), "")
        row = re.match(r"\| `([\w.-]+)` \| equal \|", line)
        if kind and row:
            found.append((kind, row[1]))
    return found
