"""A GPU: rates of the card, the tests marked `gpu`, and the hot paths beside their peers and their predictions.

Every file of tests and every group of calls runs in a process of its own, and each row is printed when it is measured:
a failure, also one after which a process can use CUDA no more, becomes the row of its call and leaves the others.
`benchmarks.gpu_calls` measures the calls. Without a CUDA device nothing is measured.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import chain
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

import torch

from benchmarks.gpu_calls import CASES, RATES
from benchmarks.harness import Case, Row

ROOT = Path(__file__).parents[1]
SECONDS = 360
"""The whole command takes no longer; what is left then gets rows that say so."""
SECONDS_OF_TESTS = 150
SECONDS_OF_A_CALL = 60
"""A call that gives no row for so long is stopped."""
FILES_AT_ONCE = 8
MEASURE = ("-c", "import sys; from benchmarks.gpu_calls import measure_all; measure_all(sys.argv[1:])")


def measured(names: Sequence[str], deadline: float, program: Sequence[str] = MEASURE) -> Iterator[Row]:
    """Yield the rows of cases from a process that measures them; after a failure another goes on with the next case.

    Args:
        names: Names of the cases.
        deadline: Time of `time.monotonic()` at which the rest is left out.
        program: Arguments of Python, before the names.
    """
    while names and time.monotonic() < deadline:
        name, reason = names[0], ""
        with subprocess.Popen(
            [sys.executable, *program, *names], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
        ) as process:
            for line in lines_of(process, deadline):
                if line is None:
                    reason = "stopped: it took too long"
                    process.kill()
                elif line.startswith('{"begins"'):
                    name = json.loads(line)["begins"]
                elif line.startswith("{"):
                    yield json.loads(line)
        if process.returncode == 0:
            return
        yield {"case": name, "error": reason or f"the process ended with {process.returncode}"}
        names = names[names.index(name) + 1 :]
    for name in names:
        yield {"case": name, "error": "left out: no time"}


def lines_of(process: "subprocess.Popen[str]", deadline: float) -> Iterator[str | None]:
    """Yield the lines that a process prints, or `None` at the end if the next one takes too long."""
    queue: Queue[str | None] = Queue()

    def read() -> None:
        for line in process.stdout or ():
            queue.put(line)
        queue.put(None)

    Thread(target=read, daemon=True).start()
    while True:
        try:
            line = queue.get(timeout=max(1.0, min(SECONDS_OF_A_CALL, deadline - time.monotonic())))
        except Empty:
            yield None
            return
        if line is None:
            return
        yield line


def files_of_tests() -> list[Path]:
    """Return the files with tests that are marked `gpu`."""
    marks = re.compile(r"mark\.gpu|GPU_BACKENDS")
    return [file for file in sorted(ROOT.glob("tests/**/test_*.py")) if marks.search(file.read_text(encoding="utf-8"))]


def tested(files: Iterable[Path], deadline: float) -> Iterator[Row]:
    """Yield a row for each file of tests, several at a time."""
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        jobs = [pool.submit(test, file, deadline) for file in files]
        yield from (job.result() for job in as_completed(jobs))


def test(file: Path, deadline: float) -> Row:
    """Run the tests of a file that are marked `gpu`, and print what pytest says if not all of them passed.

    Returns:
        The number of tests by outcome, the reasons of those that were skipped, and the names of those that failed.
    """
    name, start = str(file.relative_to(ROOT)), time.monotonic()
    options = ["-m", "gpu", "-n", "0", "-v", "-ra", "--tb=short", "-p", "no:cacheprovider"]
    with tempfile.TemporaryFile("w+") as output:
        try:
            code: int | str = subprocess.run(
                [sys.executable, "-m", "pytest", *options, name],
                cwd=ROOT,
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=max(1.0, deadline - start),
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = "no time"
        output.seek(0)
        text = output.read()
    outcomes = Counter(re.findall(r"^tests/\S+::.* (PASSED|FAILED|SKIPPED|ERROR|XFAIL)\b", text, flags=re.M))
    listed = re.findall(r"^(?:SKIPPED|FAILED|ERROR|XFAIL) .*", text, flags=re.M)
    row: Row = {"case": "pytest -m gpu", "setting": name, "seconds": round(time.monotonic() - start, 1)}
    row |= {column: outcomes[kind] for kind, column in OUTCOMES.items()}
    row |= {"not_passed": "; ".join(listed)} if listed else {}
    if code not in (0, NO_TESTS):
        print(text, flush=True)
        row["error"] = f"pytest ended with {code}"
    return row


OUTCOMES = {"PASSED": "passed", "FAILED": "failed", "SKIPPED": "skipped", "ERROR": "errors", "XFAIL": "xfailed"}
"""Columns of the numbers of tests, by pytest's words for their outcomes."""

NO_TESTS = 5
"""Exit status of pytest where no test is marked."""


def environment() -> dict[str, str]:
    """Return the environment of processes that import this package from its folder."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}


def run() -> list[Row]:
    if not torch.cuda.is_available():
        print("gpu: nothing is measured, because torch finds no CUDA device here.")
        return []
    start = time.monotonic()
    rows: list[Row] = []
    for row in chain(
        measured([RATES], start + SECONDS),
        tested(files_of_tests(), start + SECONDS_OF_TESTS),  # they compile the kernels, for the calls too
        measured([name for name in CASES if name != RATES], start + SECONDS),
    ):
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


CASE = Case("A GPU: its rates, tests, and calls beside peers and predictions", run)
