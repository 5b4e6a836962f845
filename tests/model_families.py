"""The families of transformers that the library takes, as docs/families.md lists them."""

import re
from functools import cache
from pathlib import Path

import pytest
from tiny_models import LAYERS, SIZES

PAGE = Path(__file__).parents[1] / "docs" / "families.md"


def few_layers(patch: pytest.MonkeyPatch) -> None:
    """Build tiny models with two layers from now on, which not every type allows."""
    patch.setattr("tiny_models.SIZES", {key: 2 if n == LAYERS else n for key, n in SIZES.items()})


@cache
def page_rows() -> dict[tuple[str, str], dict[str, str]]:
    """Return the rows of the page's tables by kind and model type; of a type without a vocabulary, the result alone."""
    from all_families import TITLES

    kinds = {title: kind for kind, title in TITLES.items()}
    rows: dict[tuple[str, str], dict[str, str]] = {}
    kind, header = "", list[str]()
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            kind = kinds.get(line.removeprefix("## "), "")
        if line.startswith("Without a vocabulary: "):
            rows |= {(kind, name): {"result": "no vocabulary"} for name in re.findall("`(.+?)`", line)}
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells[:1] == ["model type"]:
            header = cells
        elif kind and cells and not cells[0].startswith("---"):
            rows[kind, cells[0].strip("`")] = dict(zip(header, cells, strict=True))
    return rows


def families() -> list[tuple[str, str]]:
    """Every language model on the page of families that is read and compared, by kind and model type."""
    from tiny_models import KINDS

    return [case for case, row in page_rows().items() if row["result"] == "equal" and case[0] in KINDS]
