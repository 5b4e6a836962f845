"""Write bytes and times of row state into docs/row-sparse-training.md: `python docs/row_state.py --write`.

The bytes are those of `EmbeddingPlan`. The times are medians over the rows of benchmarks/results/row_state.csv, which
`python -m benchmarks row_state --save` appends to.
"""

import csv
import sys
from pathlib import Path
from statistics import median

from embedlayer.analysis.embedding_plan import EmbeddingPlan

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tables import between_markers, write_between_markers

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "row-sparse-training.md"
RESULTS = ROOT / "benchmarks" / "results" / "row_state.csv"
WIDTH = 512
RULES = {
    "`RowAdamW`": ("RowAdamW", {}),
    "`RowwiseSecondMoment()`": ("RowAdamW, RowwiseSecondMoment()", {"row_state": "rowwise_fp32"}),
    "`RowwiseSecondMoment(torch.bfloat16)`": (
        "RowAdamW, RowwiseSecondMoment(bfloat16)",
        {"row_state": "rowwise_bf16"},
    ),
    "`RowwiseSecondMoment(None)`": ("RowAdamW, RowwiseSecondMoment(None)", {"row_state": "rowwise"}),
    "`RowAdagrad`": ("RowAdagrad", {"optimizer": "adagrad"}),
}


def row_bytes(options: dict[str, str]) -> int:
    """Return the bytes of state of one row of width `WIDTH`."""
    sizes = [EmbeddingPlan(rows, WIDTH, tied=False, row_sparse=True, **options).optimizer_bytes for rows in (1, 2)]
    dense = {name: value for name, value in options.items() if name == "optimizer"}
    return sizes[1] - sizes[0] - EmbeddingPlan(1, WIDTH, **dense).optimizer_bytes


def times() -> dict[tuple[str, str], str]:
    """Return the median time of each rule and table over all runs, in milliseconds."""
    found: dict[tuple[str, str], list[float]] = {}
    with RESULTS.open(newline="") as file:
        for row in csv.DictReader(file):
            sizes = f"{int(row['vocab_size']):,} x {int(row['embed_dim']):,}"
            found.setdefault((row["competitor"], sizes), []).append(float(row["time_ms"]))
    return {key: f"{median(runs):.3g} ms" for key, runs in found.items()}


def table() -> str:
    """Return the table."""
    measured = times()
    sizes = list(dict.fromkeys(key[1] for key in measured))
    head = ["rule", f"bytes a row at D = {WIDTH}", f"of Adam's {8 * WIDTH:,}", *(f"step, {each}" for each in sizes)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for rule, (name, options) in RULES.items():
        size = row_bytes(options)
        cells = [rule, f"{size:,}", f"{size / (8 * WIDTH):.3g}", *(measured[name, each] for each in sizes)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the text of the page with the results of today."""
    return between_markers(PAGE, "row state", table())


if __name__ == "__main__":
    if "--write" in sys.argv:
        write_between_markers(PAGE, "row state", table())
    else:
        print(table())
