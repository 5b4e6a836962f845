"""What all cases share: fair timing, memory in a process of its own, a table, a line of JSON, a row of CSV.

A case is a module of this folder with a `CASE`. Its `run` gives rows: plain mappings with one competitor each, whose
unit stands in the name (`time_ms`, `peak_mib`).
"""

import csv
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles

Value = str | int | float | bool
Row = dict[str, Value]

RESULTS = Path(__file__).parent / "results"
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""glibc then returns freed blocks to the system at once, so that a peak is memory in use, and repeats itself."""
SETTLED_MS = 200
"""A call that takes this long is hardly slower for what ran before it: less than one percent."""
SLOW_MS = 10_000
"""A call that takes this long is not repeated."""


@dataclass(frozen=True)
class Case:
    """What is measured, and how."""

    title: str
    run: Callable[[], list[Row]]


def time_alternately(
    competitors: Mapping[str, Callable[[], object]], *, rounds: int = 5, warmup: int = 1
) -> dict[str, Row]:
    """Milliseconds that each competitor takes; they run in turns, so that a busy machine is unfair to none.

    In its turn a competitor is called twice, and the second call counts. The first one finds the caches full of what
    the garbage collector and the competitor before have touched, and that one's threads still spinning; both can double
    a millisecond. It counts where it takes longer than `SETTLED_MS`, and is the only one. A competitor that takes
    `SLOW_MS` or more is called once in all.

    Returns:
        For each, the median `time_ms` with its 20th and 80th percentile.
    """
    samples: dict[str, list[float]] = {name: [] for name in competitors}
    for turn in range(warmup + rounds):
        for name, run in competitors.items():
            if samples[name] and samples[name][0] >= SLOW_MS:
                continue
            gc.collect()
            elapsed = milliseconds(run)
            if elapsed < SETTLED_MS:
                elapsed = milliseconds(run)
            if turn >= warmup or elapsed >= SLOW_MS:
                samples[name].append(elapsed)
    return {name: spread(times) for name, times in samples.items()}


def milliseconds(run: Callable[[], object]) -> float:
    """Milliseconds that one call takes."""
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def run_apart(code: str, *arguments: str, environment: Mapping[str, str] | None = None) -> dict[str, Value]:
    """Run Python code in a fresh process and give the JSON object that it prints last, with `peak_mib` measured there.

    The code calls `benchmarks.harness.tell(...)` at its end.
    """
    paths = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
        env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    if done.returncode:
        raise RuntimeError(f"The measured process failed:\n{done.stderr}")
    told: dict[str, Value] = json.loads(done.stdout.splitlines()[-1])
    return told


def added_mib_apart(code: str, *arguments: str) -> float:
    """Run Python code that tells `added_mib` in a fresh process, and give that number."""
    return float(run_apart(code, *arguments, environment=RETURN_MEMORY)["added_mib"])


def step_mib_apart(benchmark: str, place: int, competitor: str) -> float:
    """Give `peak_added(SETTINGS[place], competitor)` of a benchmark, a module, in a fresh process."""
    code = f"from {benchmark} import SETTINGS, peak_added; from benchmarks.harness import tell"
    return added_mib_apart(f"{code}; tell(added_mib=peak_added(SETTINGS[{place}], {competitor!r}))")


def added_mib(run: Callable[[], object]) -> float:
    """Run a function, and give the mebibytes that its peak adds to what this process already holds (on Linux)."""
    gc.collect()
    before = _resident_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run()
    return round((_resident_kib("VmHWM") - before) / 1024, 1)


def tell(**facts: Value) -> None:
    """In a process started by `run_apart`: report facts, and the most memory this process ever had (on Linux).

    `ru_maxrss` would be at least the memory of the process that started this one.
    """
    print(json.dumps({**facts, "peak_mib": round(_resident_kib("VmHWM") / 1024, 1)}))


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keep the machine busy inside a `with` block: start processes that do nothing but loop."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def report(name: str, title: str, rows: list[Row], *, save: bool, busy: int = 0) -> None:
    """Print the table and the line of JSON; with `save`, append the rows to the case's CSV.

    Args:
        name: Name of the case.
        title: Title of the table.
        rows: What was measured.
        save: Whether to append the rows to the CSV.
        busy: Number of looping processes that ran beside the measurement.
    """
    from rich.console import Console
    from rich.table import Table

    columns = _columns(rows)
    same = [column for column in columns if len(rows) > 1 and len({row.get(column) for row in rows}) == 1]
    varying = [column for column in columns if column not in same]
    table = Table(*varying, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(_shown(row.get(column, "")) for column in varying))
    console = Console(soft_wrap=False)
    console.width = max(console.width, 120)
    console.print(table)
    if same:
        console.print("In all rows: " + ", ".join(f"{column} {_shown(rows[0][column])}" for column in same))
    surroundings = {"busy_processes": busy, "run": datetime.now(UTC).isoformat(timespec="seconds"), **environment()}
    if save:
        _append(RESULTS / f"{name}.csv", [{**surroundings, **row} for row in rows])
    print(json.dumps({"case": name, "rows": rows, **surroundings}), flush=True)


def environment() -> Row:
    """What a reader must know to judge a number."""
    import torch

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "tokenizers": version("tokenizers"),
        "numba": _version("numba"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "triton": _version("triton"),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def spread(times: list[float]) -> Row:
    """Median `time_ms` with its 20th and 80th percentile."""
    fifths = quantiles(times, n=5, method="inclusive") if len(times) > 1 else times * 4
    return {"time_ms": round(median(times), 3), "p20_ms": round(fifths[0], 3), "p80_ms": round(fifths[-1], 3)}


def _resident_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def _columns(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def _shown(value: Value) -> str:
    return f"{value:,.{1 if abs(value) >= 10 else 2}f}" if isinstance(value, float) else str(value)


def _append(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(exist_ok=True)
    older = list(csv.DictReader(path.open(newline=""))) if path.exists() else []
    rows = [*older, *rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=_columns(rows), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines: Iterator[str] = iter(cpuinfo.read_text().splitlines() if cpuinfo.exists() else ())
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or platform.machine()
