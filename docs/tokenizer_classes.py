"""Write the tokenizer classes that are read, and those that are refused: `python docs/tokenizer_classes.py --write`."""

import sys
from collections.abc import Iterable
from pathlib import Path

from embedlayer.families import tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tables import between_markers, write_between_markers

PAGE = Path(__file__).resolve().parent / "checkpoints.md"
READ = {
    "read from `vocab.json` and `merges.txt`": tokenizers.BPE_CLASSES,
    "read from `vocab.txt`": tokenizers.WORDPIECE_CLASSES,
    "read from a SentencePiece model": tokenizers.SENTENCEPIECE_CLASSES,
}


def _row(what: str, names: Iterable[str]) -> str:
    """Return one row of the table, the classes in alphabetical order."""
    marked = [f"{name}*" if name in tokenizers.CONVERTED_CLASSES else name for name in sorted(names, key=str.lower)]
    return f"| {what} | {', '.join(marked)} |\n"


def table() -> str:
    """Return the table."""
    refused: dict[str, list[str]] = {}
    for name, reason in tokenizers.REFUSED_CLASSES.items():
        refused.setdefault(reason, []).append(name)
    rows = [_row(what, names) for what, names in READ.items()]
    rows += [_row(f"refused: it {reason}", names) for reason, names in refused.items()]
    return "| | classes, without `Tokenizer` |\n|---|---|\n" + "".join(rows)


def page() -> str:
    """Return the text of the page with the table of today."""
    return between_markers(PAGE, "tokenizer classes", table())


if __name__ == "__main__":
    if "--write" in sys.argv:
        write_between_markers(PAGE, "tokenizer classes", table())
    else:
        print(table())
