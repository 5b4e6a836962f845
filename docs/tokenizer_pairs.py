"""Write the table of pairs of tokenizers into docs/two-tokenizers.md: `python docs/tokenizer_pairs.py --write`.

The numbers are the last rows of benchmarks/results/tokenizer_pairs.csv, which `python -m benchmarks tokenizer_pairs
--save` appends to.
"""

import csv
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tables import between_markers, markdown_table, write_between_markers

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "two-tokenizers.md"
RESULTS = ROOT / "benchmarks" / "results" / "tokenizer_pairs.csv"
COLUMNS: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "pair": ("competitor", str),
    "one-to-one chunks": ("one_to_one", lambda value: f"{float(value):.1%}"),
    "bytes not in exact chunks": ("inexact", lambda value: f"{float(value):.1%}"),
    "MB/s, both sides, without encoding": ("mb_per_s", lambda value: f"{float(value):.1f}"),
    "share of the time of encoding": ("of_encoding", lambda value: f"{float(value):.0%}"),
}
"""Title of each column -> column of the results, and how its values are shown."""


def table() -> str:
    """Return a row for each pair, and what they were measured on."""
    with RESULTS.open(newline="") as file:
        rows = {row["competitor"]: row for row in csv.DictReader(file)}
    measured = next(iter(rows.values()))
    shown = [{title: show(row[name]) for title, (name, show) in COLUMNS.items()} for row in rows.values()]
    return (
        f"{int(measured['bytes']):,} bytes of `{measured['text']}`; {measured['device']}, CPU time, tokenizers "
        f"{measured['tokenizers']}\n\n{markdown_table(shown)}"
    )


def page() -> str:
    """Return the text of the page with the results of today."""
    return between_markers(PAGE, "tokenizer pairs", table())


if __name__ == "__main__":
    if "--write" in sys.argv:
        write_between_markers(PAGE, "tokenizer pairs", table())
    else:
        print(table())
