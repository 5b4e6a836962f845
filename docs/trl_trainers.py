"""Write the measured steps of TRL's trainers into docs/using-it-with.md: `python docs/trl_trainers.py --write`.

The numbers are the last rows of benchmarks/results/trl_trainers.csv, which `python -m benchmarks trl_trainers --save`
appends to.
"""

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tables import between_markers, markdown_table, write_between_markers

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "using-it-with.md"
RESULTS = ROOT / "benchmarks" / "results" / "trl_trainers.csv"


def tables() -> str:
    """Return the table of the last rows, and what they have in common."""
    with RESULTS.open(newline="") as file:
        latest = {(row["trainer"], row["competitor"]): row for row in csv.DictReader(file)}
    lines = []
    for trainer in dict.fromkeys(name for name, _ in latest):
        ours, plain = latest[trainer, "embedlayer"], latest[trainer, "TRL"]
        share = float(ours["peak_mib"]) / float(plain["peak_mib"])
        cells = {"trainer": trainer, "TRL": cell(plain), "with `patch_trainer`": cell(ours)}
        lines.append({**cells, "times TRL": ours["times_plain"], "memory of TRL": f"{share:.2f}"})
    one = next(iter(latest.values()))
    sizes = f"{int(one['tokens']):,} tokens, {int(one['vocab_size']):,} x {one['embed_dim']}, {one['dtype']}"
    return f"**{sizes}, one layer, TRL {one['trl']}, threads: {one['threads']}**\n\n{markdown_table(lines)}"


def cell(row: dict[str, str]) -> str:
    """Return time and added memory of a competitor."""
    return f"{float(row['time_ms']):,.0f} ms, {float(row['peak_mib']):,.0f} MiB"


def page() -> str:
    """Return the text of the page with the results of today."""
    return between_markers(PAGE, "trl", tables())


if __name__ == "__main__":
    if "--write" in sys.argv:
        write_between_markers(PAGE, "trl", tables())
    else:
        print(tables())
