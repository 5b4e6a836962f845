"""A GPU: rates of the card, the tests marked `gpu`, and the hot paths beside their peers and their predictions.

Every file of tests and every group of calls runs in a process of its own, and each row is printed when it is measured:
a failure, also one after which a process can use CUDA no more, becomes the row of its call and leaves the others.
Times are of calls one after another without waits between them, so a call takes as long as its kernels or as the host
needs to launch them. Memory is what the peak of a call adds, gradients included, inputs not.

Without a CUDA device nothing is measured.
"""

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.harness import Case, Row, spread
from benchmarks.hot_paths import PATHS, TOKENS, VOCAB_SIZE, WIDTH, Call, HotPath, ids, numbers, trained
from benchmarks.predictions import CARDS
from embedlayer.kernels import kernels_disabled

ROOT = Path(__file__).parents[1]
SECONDS = 480
"""The whole command takes no longer: what is left then gets rows that say so."""
SECONDS_OF_A_CALL = 60
"""A call that gives no row for so long is stopped."""
ROUND_MS = 20.0
"""A round repeats a call for about this long."""
ROUNDS = 5
FILES_AT_ONCE = 4

Competitors = dict[str, Callable[[], Call]]


# What is measured beside ours: by the name of the hot path, each competitor's builder.


def three_products() -> Call:
    """Build the matrix products that no exact loss can do without, with nothing between them."""
    hidden, weight = numbers(TOKENS, WIDTH, trained=False), numbers(VOCAB_SIZE, WIDTH, trained=False)

    def call() -> None:
        logits = hidden @ weight.T
        del_hidden, del_weight = logits @ weight, logits.T @ hidden
        del del_hidden, del_weight

    return call


def loss_by(loss: Callable[..., Any]) -> Callable[[], Call]:
    """Return a builder of another library's loss of hidden states, rows and targets, with gradients."""

    def build() -> Call:
        hidden, weight, targets = numbers(TOKENS, WIDTH), numbers(VOCAB_SIZE, WIDTH), ids(TOKENS)
        return trained([hidden, weight], lambda: loss(hidden, weight, targets))

    return build


def liger(*arguments: Any) -> Any:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(*arguments)


def cut_cross_entropy(*arguments: Any) -> Any:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(*arguments, impl="cce")


def plain_look_up() -> Call:
    table, tokens = nn.Embedding(VOCAB_SIZE, WIDTH, dtype=torch.bfloat16), ids(1, TOKENS)
    return trained([table.weight], lambda: table(tokens))


def textbook_embedding(training: bool) -> Callable[[], Call]:
    """Return a builder of GPT-2's input embedding, operation by operation."""

    def build() -> Call:
        rows, positions = nn.Embedding(50_257, 768), nn.Embedding(1024, 768)
        dropout, tokens, places = nn.Dropout(0.1).train(training), ids(8, 1024), torch.arange(1024)
        if training:
            return trained([rows.weight, positions.weight], lambda: dropout(rows(tokens) + positions(places)))
        return torch.no_grad()(lambda: dropout(rows(tokens) + positions(places)))

    return build


def rotary_of_transformers(training: bool) -> Callable[[], Call]:
    """Return a builder of the rotation by transformers, of the same queries and keys."""

    def build() -> Call:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        q, k = numbers(1, 32, TOKENS, 128, trained=training), numbers(1, 8, TOKENS, 128, trained=training)
        cos, sin = (numbers(1, TOKENS, 128, trained=False) for _ in range(2))
        rotate: Call = lambda: apply_rotary_pos_emb(q, k, cos, sin)  # noqa: E731
        return trained([q, k], rotate) if training else rotate

    return build


def dense_step(sparse: bool) -> Callable[[], Call]:
    """Return a builder of a training step of `nn.Embedding`, by torch's fused AdamW or its SparseAdam."""

    def build() -> Call:
        table, tokens = nn.Embedding(VOCAB_SIZE, WIDTH, sparse=sparse), ids(2307)
        parameters = list(table.parameters())
        optimizer: torch.optim.Optimizer = (
            torch.optim.SparseAdam(parameters, lr=1e-3)
            if sparse
            else torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        )
        grad = torch.randn(2307, WIDTH)

        def call() -> None:
            table(tokens).backward(grad)
            optimizer.step()
            optimizer.zero_grad()

        return call

    return build


def dense_logits() -> Call:
    hidden, weight = numbers(1, WIDTH, trained=False), numbers(VOCAB_SIZE, WIDTH, trained=False)
    return torch.no_grad()(lambda: hidden @ weight.T)


def unpatched_model() -> Call:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=VOCAB_SIZE, hidden_size=WIDTH, num_hidden_layers=0, num_attention_heads=32)
    model: Any = LlamaForCausalLM(config)
    model, tokens = model.to(torch.bfloat16), ids(1, TOKENS)
    return trained(list(model.parameters()), lambda: model(tokens, labels=tokens).loss)


PEERS: Mapping[str, Competitors] = {
    "loss": {
        "three products": three_products,
        "plain logits": loss_by(lambda hidden, weight, targets: F.cross_entropy(hidden @ weight.T, targets)),
        "torch F.linear_cross_entropy": loss_by(
            lambda *inputs: F.linear_cross_entropy(*inputs, options=nn.LinearCrossEntropyOptions())
        ),
        "Liger": loss_by(lambda hidden, weight, targets: liger(hidden, weight, targets)),
        "cut-cross-entropy": loss_by(cut_cross_entropy),
    },
    "look-up": {"nn.Embedding": plain_look_up},
    "look-up, int8": {"nn.Embedding, forward": lambda: torch.no_grad()(plain_forward())},
    "GPT-2 input embedding, evaluation": {"nn.Embedding, operation by operation": textbook_embedding(False)},
    "GPT-2 input embedding, training": {"nn.Embedding, operation by operation": textbook_embedding(True)},
    "rotary": {"transformers": rotary_of_transformers(False)},
    "rotary, training": {"transformers": rotary_of_transformers(True)},
    "row-sparse step": {"nn.Embedding, fused AdamW": dense_step(False), "nn.Embedding, SparseAdam": dense_step(True)},
    "logits of one token, int8": {"bfloat16 rows": dense_logits},
    "patched transformers model without blocks": {"transformers": unpatched_model},
}
"""Competitors of hot paths, by the names of the paths; beside each path its own torch operators are measured too."""


def plain_forward() -> Call:
    table, tokens = nn.Embedding(VOCAB_SIZE, WIDTH, dtype=torch.bfloat16), ids(1, TOKENS)
    return lambda: table(tokens)


def by_torch_operators(build: Callable[[], Call]) -> Callable[[], Call]:
    """Return a builder of the same call without kernels of this package."""

    def build_call() -> Call:
        with kernels_disabled():
            call = build()

        def without_kernels() -> None:
            with kernels_disabled(), torch.autograd.set_multithreading_enabled(False):  # backward passes in this thread
                call()

        return without_kernels

    return build_call


# In a process of its own: measure some cases, and print each row.

CARD = "rates of the card"
BY_NAME = {path.name: path for path in PATHS}


def measure(name: str) -> Iterator[Row]:
    """Yield the rows of a case, which have a competitor each, or an error."""
    if name == CARD:
        yield from rates()
        return
    path = BY_NAME[name]
    builders = {"embedlayer": path.build, "embedlayer by torch operators": by_torch_operators(path.build)}
    builders |= PEERS.get(name, {})
    common: Row = {"case": name, "setting": path.setting}
    calls: dict[str, Call] = {}
    added: dict[str, float] = {}
    for competitor, build in builders.items():
        try:
            with torch.device("cuda"):
                call = build()
            for _ in range(3):
                call()
            added[competitor] = added_gib(call)
            calls[competitor] = call
        except Exception as error:  # noqa: BLE001 - a peer may raise anything
            yield {**common, "competitor": competitor, "error": line_of(error)}
        torch.cuda.synchronize()  # after an error of CUDA itself the process ends here
        gc.collect()
        torch.cuda.empty_cache()
    for competitor, times in time_on_gpu(calls).items():
        yield {**common, "competitor": competitor, **times, "added_gib": added[competitor]}
    yield {**common, "competitor": "predicted", **predicted(path)}


def rates() -> Iterator[Row]:
    """Yield the rate of a copy of 4 GiB, read and written, and those of products of random bfloat16 numbers."""
    source = torch.randint(256, (2**32,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = time_on_gpu({"copy": lambda: target.copy_(source)})["copy"]
    yield {"case": CARD, "competitor": "copy", **times, "tb_per_s": round(2 * 2**32 / float(times["time_ms"]) / 1e9, 3)}
    del source, target
    for m, k, n in ((8192, 8192, 8192), (TOKENS, WIDTH, VOCAB_SIZE)):
        with torch.device("cuda"):
            one, other = numbers(m, k, trained=False), numbers(n, k, trained=False)
        times = time_on_gpu({"product": partial(torch.matmul, one, other.T)})["product"]
        rate = 2 * m * k * n / float(times["time_ms"]) / 1e9
        yield {"case": CARD, "competitor": f"product, {m} x {k} x {n}", **times, "tflops": round(rate, 1)}


def added_gib(call: Call) -> float:
    """Return the memory that the peak of a call adds, in GiB."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**30, 4)


def time_on_gpu(calls: Mapping[str, Call]) -> dict[str, Row]:
    """Return the median time of each call with its 20th and 80th percentile; the calls take turns."""

    def milliseconds(call: Call, repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / repeats

    for call in calls.values():
        milliseconds(call, 2)
    repeats = {name: max(1, round(ROUND_MS / milliseconds(call, 2))) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            gc.collect()
            samples[name].append(milliseconds(call, repeats[name]))
    return {name: {**spread(times), "repeats": repeats[name]} for name, times in samples.items()}


def predicted(path: HotPath) -> Row:
    """Return the counts of a path, the memory that it adds, and its time if the figures of this card are known."""
    count = path.count()
    row: Row = {"kernels": len(count.launches), "waits": len(count.waits), "moved_gb": round(count.bytes / 1e9, 3)}
    row["added_gib"] = round(count.memory.peak / 2**30, 4)
    card = next((card for card in CARDS if card.name in torch.cuda.get_device_name()), None)
    return row if card is None else {"time_ms": round(card.milliseconds(count), 3), **row}


def line_of(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def measure_all(names: Iterable[str]) -> None:
    """Measure cases, and print a line of JSON where a case begins and one for each row."""
    torch.manual_seed(0)
    for name in names:
        print(json.dumps({"begins": name}), flush=True)
        for row in measure(name):
            print(json.dumps(row), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


# In the process of the command.


def measured(names: list[str], deadline: float) -> Iterator[Row]:
    """Yield the rows of cases from processes that measure them; another process goes on after a case that failed."""
    code = "import sys; from benchmarks.gpu import measure_all; measure_all(sys.argv[1:])"
    while names and time.monotonic() < deadline:
        name, reason = names[0], ""
        with subprocess.Popen(
            [sys.executable, "-c", code, *names], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
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
    """Yield the lines that a process prints, or `None` if the next one takes too long."""
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
    """Yield a row for each file of tests, several at a time, with the numbers of its tests by outcome."""
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        jobs = [pool.submit(test, file, deadline) for file in files]
        yield from (job.result() for job in as_completed(jobs))


def test(file: Path, deadline: float) -> Row:
    """Run the tests of a file that are marked `gpu`, print what failed or was skipped, and count them by outcome."""
    name, start = str(file.relative_to(ROOT)), time.monotonic()
    options = ["-m", "gpu", "-n", "0", "-v", "--tb=short", "-p", "no:cacheprovider"]
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
    outcomes = re.findall(r"^tests/.*::.* (PASSED|FAILED|SKIPPED|ERROR|XFAIL)\b", text, flags=re.M)
    if code != 0 or "SKIPPED" in outcomes:
        print(text, flush=True)
    row: Row = {"case": "pytest -m gpu", "setting": name, "seconds": round(time.monotonic() - start, 1)}
    row |= {kind.lower(): outcomes.count(kind) for kind in ("PASSED", "FAILED", "SKIPPED", "ERROR", "XFAIL")}
    return row if code == 0 else {**row, "error": f"pytest ended with {code}"}


def environment() -> dict[str, str]:
    """Return the environment of processes that import this package from its folder."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}


def card() -> Row:
    """Return what a reader must know of the GPU and of the libraries for it."""
    found: Row = {"gpu": torch.cuda.get_device_name(), "gpu_gib": round(torch.cuda.mem_get_info()[1] / 2**30, 1)}
    for package in ("triton", "transformers", "liger-kernel", "cut-cross-entropy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found


def run() -> list[Row]:
    if not torch.cuda.is_available():
        print("gpu: nothing is measured, because torch finds no CUDA device here.")
        return []
    start = time.monotonic()
    rows: list[Row] = []
    common = card()
    for row in chain(
        measured([CARD], start + SECONDS),
        tested(files_of_tests(), start + SECONDS / 2),
        measured(list(BY_NAME), start + SECONDS),
    ):
        print(json.dumps(row), flush=True)
        rows.append({**row, **common})
    return rows


CASE = Case("A GPU: its rates, tests, and calls beside peers and predictions", run)
