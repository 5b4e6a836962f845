"""Write the tables of pairs of tokenizers into docs/two-tokenizers.md: `python docs/tokenizer_pairs.py --write`.

The numbers are the last rows of benchmarks/results/tokenizer_pairs.csv and draft_maps.csv, to which
`python -m benchmarks tokenizer_pairs draft_maps --save` appends.
"""

import csv
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tables import between_markers, markdown_table, write_between_markers

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "two-tokenizers.md"
RESULTS = ROOT / "benchmarks" / "results"
COLUMNS: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "pair": ("competitor", str),
    "one-to-one chunks": ("one_to_one", lambda value: f"{float(value):.1%}"),
    "bytes not in exact chunks": ("inexact", lambda value: f"{float(value):.1%}"),
    "MB/s, both sides, without encoding": ("mb_per_s", lambda value: f"{float(value):.1f}"),
    "share of the time of encoding": ("of_encoding", lambda value: f"{float(value):.0%}"),
}
"""Title of each column -> column of the results, and how its values are shown."""


def pairs() -> str:
    """Return a row for each pair, and what they were measured on."""
    rows = {row["competitor"]: row for row in _results("tokenizer_pairs.csv")}
    measured = next(iter(rows.values()))
    shown = [{title: show(row[name]) for title, (name, show) in COLUMNS.items()} for row in rows.values()]
    return (
        f"{int(measured['bytes']):,} bytes of `{measured['text']}`; {measured['device']}, CPU time, tokenizers "
        f"{measured['tokenizers']}\n\n{markdown_table(shown)}"
    )


def drafts() -> str:
    """Return a row for each draft and target: the pairs, those of other bytes and the coverage of both rules."""
    rows = {(row["draft"], row["target"], row["competitor"]): row for row in _results("draft_maps.csv")}
    shown = []
    for draft, target in dict.fromkeys(key[:2] for key in rows):
        line = {"draft": draft, "target": target}
        for rule in ("embedlayer", "transformers"):
            row = rows[draft, target, rule]
            line |= {f"pairs, {rule}": f"{int(row['pairs']):,}", f"of other bytes, {rule}": row["wrong"]}
            line |= {f"share of the draft's tokens, {rule}": f"{float(row['coverage']):.1%}"}
        shown.append(line)
    measured = next(iter(rows.values()))
    return f"The tokens of the same text; transformers {measured['transformers']}\n\n{markdown_table(shown)}"


def _results(name: str) -> list[dict[str, str]]:
    """Return the rows of a file of results."""
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


TABLES = {"tokenizer pairs": pairs, "draft maps": drafts}
"""Name of each place of the page -> what it shows."""


def page() -> str:
    """Return the text of the page with the results of today."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        text = between_markers(PAGE, name, table(), text)
    return text


if __name__ == "__main__":
    for name, table in TABLES.items():
        if "--write" in sys.argv:
            write_between_markers(PAGE, name, table())
        else:
            print(table())
