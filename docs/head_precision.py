"""Write the measured errors of head outputs into docs/losses.md: `python docs/head_precision.py --write`.

The numbers are the last rows of benchmarks/results/head_precision.csv, which `python -m benchmarks head_precision
--save` appends to.
"""

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tables import between_markers, markdown_table, write_between_markers

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "losses.md"
RESULTS = ROOT / "benchmarks" / "results" / "head_precision.csv"
COLUMNS = {
    "log_probs_nats": "log-probs",
    "entropy_nats": "entropy",
    "divergence_nats": "forward KL",
    "hidden_gradient": "gradient of hidden states",
    "rows_gradient": "gradient of rows",
}


def tables() -> str:
    """Return a table for each source of logits, with a row for each implementation."""
    latest: dict[str, dict[str, dict[str, str]]] = {}
    with RESULTS.open(newline="") as file:
        for row in csv.DictReader(file):
            where = row["gpu"] or f"{row['device']}, {row['instructions']}"
            latest.setdefault(f"{row['source']}, on {where}", {})[row["competitor"]] = row
    return "\n".join(
        f"**{source}: {next(iter(rows.values()))['tokens']} tokens, largest logit "
        f"{next(iter(rows.values()))['largest_logit']}**\n\n"
        + markdown_table(
            [
                {"head": name, **{title: f"{float(row[key]):.1e}" for key, title in COLUMNS.items()}}
                for name, row in rows.items()
            ]
        )
        for source, rows in latest.items()
    )


def page() -> str:
    """Return the text of the page with the results of today."""
    return between_markers(PAGE, "precision", tables())


if __name__ == "__main__":
    if "--write" in sys.argv:
        write_between_markers(PAGE, "precision", tables())
    else:
        print(tables())
