"""Write the measured cost of head outputs into docs/losses.md: `python docs/head_outputs.py --write`.

The numbers are the last rows of benchmarks/results/head_outputs.csv, which `python -m benchmarks head_outputs --save`
appends to.
"""

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tables import between_markers, write_between_markers

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "losses.md"
RESULTS = ROOT / "benchmarks" / "results" / "head_outputs.csv"
OURS = "embedlayer"


def latest() -> dict[str, dict[str, dict[str, dict[str, str]]]]:
    """Return the last row of each model, work and competitor; of the matrix products the fastest shape."""
    found: dict[str, dict[str, dict[str, dict[str, str]]]] = {}
    with RESULTS.open(newline="") as file:
        for row in csv.DictReader(file):
            sizes = f"{int(row['tokens']):,} tokens, {int(row['vocab_size']):,} x {row['embed_dim']}"
            title = f"{row['model']}: {sizes}, {row['dtype']}, threads: {row['threads']}"
            found.setdefault(title, {}).setdefault(row["work"], {})[row["competitor"]] = row
    for works in found.values():
        for rows in works.values():
            shapes = [name for name in rows if "products" in name]
            fastest = min((rows.pop(name) for name in shapes), key=lambda row: float(row["time_ms"]))
            rows["products alone"] = {**fastest, "competitor": fastest["competitor"].partition(" ")[0]}
    return found


def table(works: dict[str, dict[str, dict[str, str]]]) -> str:
    """Return one table: a row for each work, with times, memory, and our share of products and of plain PyTorch."""
    names = list(dict.fromkeys(name for rows in works.values() for name in rows if name != "products alone"))
    names.sort(key=lambda name: name != OURS)
    head = ["result", "products alone", OURS, "times products", "times plain", "memory of plain", *names[1:]]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for work, rows in works.items():
        ours, floor = rows[OURS], rows["products alone"]
        shares = [f"{float(ours[name]):.2f}" for name in ("times_products", "times_plain", "memory_share")]
        others = [cell(rows[name]) if name in rows else "" for name in names[1:]]
        products = f"{floor['competitor']}: {float(floor['time_ms']):,.0f} ms"
        lines.append("| " + " | ".join([work, products, cell(ours), *shares, *others]) + " |")
    return "\n".join(lines) + "\n"


def cell(row: dict[str, str]) -> str:
    """Return time and added memory of a competitor."""
    return f"{float(row['time_ms']):,.0f} ms, {float(row['peak_mib']):,.0f} MiB"


def tables() -> str:
    """Return a table for each model."""
    return "\n".join(f"**{title}**\n\n{table(works)}" for title, works in latest().items())


def page() -> str:
    """Return the text of the page with the results of today."""
    return between_markers(PAGE, "cost", tables())


if __name__ == "__main__":
    if "--write" in sys.argv:
        write_between_markers(PAGE, "cost", tables())
    else:
        print(tables())
