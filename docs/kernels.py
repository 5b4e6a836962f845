"""Write the tables of docs/kernels.md: `python docs/kernels.py --write`.

The operations are those of `embedlayer.cli.operations`. Each line of the table of targets is the ratio of two rows
of one run, with what it is meant to reach. It shows the median over all runs in `benchmarks/results/`, the lowest and
the highest, idle and beside two looping processes. The times until a kernel is ready are from the last run of
`python -m benchmarks kernels --save`. The predictions are computed now, as `python -m benchmarks predictions` does.
What was measured on a GPU is from the last run of `python -m benchmarks gpu --save`; beside a peer, from the last run
that had this peer.
"""

import csv
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from embedlayer.cli.operations import OPERATIONS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "kernels.md"
RESULTS = ROOT / "benchmarks" / "results"
BUSY = 2

Conditions = Mapping[str, str]
"""Values by column that pick one row of each run."""


@dataclass(frozen=True)
class Target:
    """A ratio of two rows of a run.

    Attributes:
        work: What is measured.
        beside: What it is compared with, in words.
        case: Name of the case, whose CSV has the rows.
        ours: Conditions of our row.
        theirs: Conditions of the other row.
        idle: What the ratio is meant to reach on an idle machine; `None` for nothing.
        busy: The same beside two looping processes.
        faster: Whether the ratio is theirs by ours, how many times faster ours is; otherwise ours by theirs.
        column: Column that is compared.
    """

    work: str
    beside: str
    case: str
    ours: Conditions
    theirs: Conditions
    idle: float | None = None
    busy: float | None = None
    faster: bool = False
    column: str = "time_ms"

    def ratios(self, busy: int) -> list[float]:
        """Return the ratio of each run with this number of looping processes."""
        runs: dict[str, dict[bool, float]] = {}
        for row in rows_of(self.case):
            if row["busy_processes"] == str(busy) and row[self.column]:
                for is_ours, conditions in ((True, self.ours), (False, self.theirs)):
                    if all(row[column] == value for column, value in conditions.items()):
                        runs.setdefault(row["run"], {})[is_ours] = float(row[self.column])
        found = [(run[True], run[False]) for run in runs.values() if len(run) == 2]
        return [theirs / ours if self.faster else ours / theirs for ours, theirs in found]

    def line(self) -> str:
        """Return the line of the table."""
        cells = [self.work, self.beside]
        for busy, goal in ((0, self.idle), (BUSY, self.busy)):
            ratios = self.ratios(busy)
            cells += [self._goal(goal), self._reached(ratios, goal)]
        return "| " + " | ".join(cells) + " |"

    def _goal(self, goal: float | None) -> str:
        return "" if goal is None else f"{'at least' if self.faster else 'at most'} {goal:g}x"

    def _reached(self, ratios: list[float], goal: float | None) -> str:
        if not ratios:
            return "not measured" if goal is not None else ""
        found = median(ratios)
        missed = goal is not None and (found < goal if self.faster else found > goal)
        text = f"{found:.3g}x"
        runs = f"{min(ratios):.3g} to {max(ratios):.3g}, {len(ratios)} runs" if len(ratios) > 1 else "1 run"
        return f"{f'**{text}**' if missed else text} ({runs})"


def rows_of(case: str) -> list[dict[str, str]]:
    """Return the rows of a case's CSV that belong to a run with a time."""
    path = RESULTS / f"{case}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row.get("run")]


def row_step(
    competitor: str, vocab_size: int = 50_257, what: str = "later steps", betas: str = "0.9 0.999"
) -> Conditions:
    """Pick a row of the case row_adamw."""
    return {"competitor": competitor, "vocab_size": str(vocab_size), "what": what, "betas": betas}


def embedding(competitor: str, what: str) -> Conditions:
    """Pick a row of the case input_embedding."""
    return {"competitor": competitor, "what": what, "setting": "GPT-2: (8, 1024) ids, 50,257 x 768, dropout 0.1"}


def rotary(competitor: str, dtype: str = "float32") -> Conditions:
    """Pick a row of the case rotary."""
    return {"competitor": competitor, "what": "whole call", "dtype": dtype}


def loss(competitor: str, tokens: int = 2048, dtype: str = "float32", instructions: str = "") -> Conditions:
    """Pick a row of the case linear_cross_entropy, from machines with these instructions if they are named."""
    conditions = {"competitor": competitor, "model": "gpt2", "tokens": str(tokens), "dtype": dtype}
    return {**conditions, "instructions": instructions} if instructions else conditions


def look_up(competitor: str) -> Conditions:
    """Pick a row of the case quantized."""
    return {"competitor": competitor, "what": "look-up"}


OURS, DENSE, SPARSE = "embedlayer RowAdamW", "nn.Embedding, AdamW(fused)", "nn.Embedding(sparse), SparseAdam"
TEXTBOOK, CHUNKED, PLAIN = "textbook", "embedlayer chunked", "plain F.cross_entropy"
SIZES = {50_257: "50,257 x 768", 128_256: "128,256 x 2,048"}

TARGETS = [
    *(
        Target(f"row step, {SIZES[size]}", "dense fused AdamW", "row_adamw", row_step(OURS, size),
               row_step(DENSE, size), idle=idle, busy=10, faster=True)
        for size, idle in ((50_257, 20), (128_256, 40))
    ),
    *(
        Target(f"row step, {SIZES[size]}", "SparseAdam, which ends elsewhere", "row_adamw", row_step(OURS, size),
               row_step(SPARSE, size), idle=0.7, busy=1)
        for size in SIZES
    ),
    Target("row step with betas (0.9, 0.95), 128,256 x 2,048", "betas (0.9, 0.999)", "row_adamw",
           row_step(OURS, 128_256, betas="0.9 0.95"), row_step(OURS, 128_256), idle=1.3),
    Target("row step among the first 50, 50,257 x 768", "later steps", "row_adamw",
           row_step(OURS, what="first 50 steps"), row_step(OURS), idle=1.3),
    Target("input embedding, evaluation", "`F.embedding` alone", "input_embedding",
           embedding("embedlayer", "evaluation"), embedding("F.embedding alone", "evaluation"), idle=1.45),
    Target("input embedding, training, forward", "textbook code", "input_embedding",
           embedding("embedlayer", "training, forward"), embedding(TEXTBOOK, "training, forward"),
           idle=12, faster=True),
    Target("input embedding, training, forward and backward", "textbook code", "input_embedding",
           embedding("embedlayer", "training, forward and backward"),
           embedding(TEXTBOOK, "training, forward and backward"), idle=3, faster=True),
    Target("rotary, half-split, (1, 32, 1024, 128)", "transformers", "rotary",
           rotary("embedlayer"), rotary("transformers"), idle=3, faster=True),
    Target("the same in bfloat16", "transformers", "rotary",
           rotary("embedlayer", "bfloat16"), rotary("transformers", "bfloat16"), faster=True),
    Target("loss, 2,048 tokens, float32", "its three products", "linear_cross_entropy",
           loss(CHUNKED), loss("three products"), idle=1.15),
    Target("loss, 2,048 tokens, float32", "plain logits", "linear_cross_entropy", loss(CHUNKED), loss(PLAIN), idle=1),
    Target("loss, 2,048 tokens, float32, memory", "plain logits", "linear_cross_entropy",
           loss(CHUNKED), loss(PLAIN), idle=0.25, column="peak_mib"),
    *(
        Target(f"loss, {tokens:,} tokens, bfloat16, {instructions}", "plain logits", "linear_cross_entropy",
               loss(CHUNKED, tokens, "bfloat16", instructions), loss(PLAIN, tokens, "bfloat16", instructions), idle=1)
        for tokens, instructions in ((256, "AVX512"), (2048, "AVX512"), (256, "AVX2"))
    ),
    Target("look-up, int8", "`nn.Embedding`, float32", "quantized",
           look_up("embedlayer int8"), look_up("nn.Embedding float32"), idle=0.6),
]  # fmt: skip


def operations() -> str:
    """Return the table of operations."""
    lines = ["| operation | definition | CPU kernels | GPU kernels |", "|---|---|---|---|"]
    for each in OPERATIONS:
        kernels = (", ".join(f"`{name}`" for name in names) for names in each.kernels.values())
        lines.append("| " + " | ".join([each.what, f"`{each.definition_name}`", *kernels]) + " |")
    return "\n".join(lines) + "\n"


def targets() -> str:
    """Return the table of targets."""
    head = "| work | beside | idle: goal | idle: reached | busy: goal | busy: reached |\n|---|---|---|---|---|---|\n"
    return head + "".join(f"{target.line()}\n" for target in TARGETS)


def compilation() -> str:
    """Return the table of the times until a kernel is ready."""
    rows = rows_of("kernels")
    times = {(row["kernel"], row["dtype"], row["what"]): float(row["time_ms"]) for row in rows}
    lines = ["| kernel | dtype | compiled | read from the cache |", "|---|---|---|---|"]
    for kernel, dtype in dict.fromkeys((row["kernel"], row["dtype"]) for row in rows if row["run"] == rows[-1]["run"]):
        cells = [f"{times[kernel, dtype, what]:,.0f} ms" for what in ("compiled", "read from the cache")]
        lines.append(f"| `{kernel}` | {dtype} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def predictions() -> str:
    """Return the table of predicted times and memory."""
    from benchmarks.predictions import CARDS, run

    times = [(card.name, card.column) for card in CARDS]
    heads = ["call", "sizes", "kernels", "waits", "GB moved", "GiB added", *(f"{name}, ms" for name, _ in times)]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in run():
        counts = [f"{row[name]:,}" for name in ("kernels", "waits")]
        sizes = [f"{row[name]:.3g}" for name in ("moved_gb", "added_gib", *(column for _, column in times))]
        lines.append(f"| {' | '.join([str(row['call']), str(row['setting']), *counts, *sizes])} |")
    return "\n".join(lines) + "\n"


def gpu_runs() -> list[dict[str, dict[str, dict[str, str]]]]:
    """Return for each run on a GPU, the last one at the end, its rows by case and competitor."""
    runs: dict[str, dict[str, dict[str, dict[str, str]]]] = {}
    for row in rows_of("gpu"):
        runs.setdefault(row["run"], {}).setdefault(row["case"], {})[row["competitor"]] = row
    return list(runs.values())


def measured() -> str:
    """Return the table of times and memory that were measured on a GPU, beside those that were predicted for it."""
    from benchmarks.gpu_calls import BY_OPERATORS, IN_A_GRAPH, KERNELS, OURS, PREDICTED, RATES

    runs = gpu_runs()
    by_call = runs[-1]
    first = next(iter(by_call[RATES].values()))
    lines = [f"{first['gpu']}, torch {first['torch']}, Triton {first['triton']}, {first['date']}:", ""]
    for name, row in by_call[RATES].items():
        rate = f"{row['tflops']} TFLOP/s in bfloat16" if row["tflops"] else f"{row['tb_per_s']} TB/s read and written"
        lines.append(f"- {name}: {rate}")
    heads = ["call", "sizes", "ms", "predicted ms", "kernels alone", "in a CUDA graph", "by torch operators"]
    heads += ["kernels", "predicted kernels", "GiB added", "predicted GiB"]
    lines += ["", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    cells = [(name, "time_ms") for name in (OURS, PREDICTED, KERNELS, IN_A_GRAPH, BY_OPERATORS)]
    cells += [(KERNELS, "kernels"), (PREDICTED, "kernels"), (OURS, "added_gib"), (PREDICTED, "added_gib")]
    for call, found in by_call.items():
        if OURS in found:
            numbers = [number(found.get(competitor, {}).get(column, "")) for competitor, column in cells]
            lines.append(f"| {call} | {found[OURS]['setting']} | {' | '.join(numbers)} |")
    heads = ["call", "beside", "ms", "GiB added", "ours, ms", "GiB added", "date"]
    lines += ["", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    peers: dict[str, dict[str, str]] = {call: {} for call in by_call}
    for run in runs:
        for call in [call for call, found in run.items() if call in by_call and OURS in found]:
            ours = run[call][OURS]
            for competitor, row in run[call].items():
                if competitor not in dict(cells) and row["time_ms"]:
                    both = [number(each[column]) for each in (row, ours) for column in ("time_ms", "added_gib")]
                    peers[call][competitor] = f"| {call} | {competitor} | {' | '.join(both)} | {row['date']} |"
    lines += [line for found in peers.values() for line in found.values()]
    return "\n".join(lines) + "\n"


def number(text: str) -> str:
    """Return a number of a CSV file with three digits, or nothing."""
    return f"{float(text):.3g}" if text else ""


TABLES = {
    "operations": operations,
    "targets": targets,
    "compilation": compilation,
    "predictions": predictions,
    "measured": measured,
}


def with_table(text: str, name: str) -> str:
    """Return the text of the page with one table as it is today."""
    start, end = f"<!-- {name}: made by `python docs/kernels.py --write` -->\n", f"<!-- end of {name} -->"
    head, tail = text.index(start) + len(start), text.index(end)
    return text[:head] + TABLES[name]() + text[tail:]


if __name__ == "__main__":
    if "--write" in sys.argv:
        for name in TABLES:
            PAGE.write_text(with_table(PAGE.read_text(), name))
    else:
        print(*(table() for table in TABLES.values()), sep="\n")
