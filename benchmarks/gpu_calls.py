"""Hot paths on a GPU beside their peers: what `python -m benchmarks gpu` measures in processes of their own.

A time is that of calls one after another, without waits between them: a call takes as long as its kernels, or as the
host needs to launch them. Memory is what the peak of a call adds, gradients included, inputs not.
"""

import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Row, spread
from benchmarks.hot_paths import (
    DIA,
    DIA_WIDTH,
    FEW_TOKENS,
    PASSES,
    PATHS,
    TOKENS,
    VOCAB_SIZE,
    WIDTH,
    Call,
    HotPath,
    codes,
    ids,
    numbers,
    trained,
)
from benchmarks.predictions import CARDS
from embedlayer.kernels import kernels_disabled

DEVICE = "cuda"
ROUNDS = 5
ROUND_MS = 20.0
"""A round repeats a call for about this long."""

Builder = Callable[[], Call]


def version_of(package: str) -> str:
    """Return the version of a package, or that it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def three_products() -> Call:
    """Build the matrix products that no exact loss can do without, with nothing between them."""
    hidden, weight = numbers(TOKENS, WIDTH, trained=False), numbers(VOCAB_SIZE, WIDTH, trained=False)

    def call() -> list[Tensor]:
        logits = hidden @ weight.T
        return [logits @ weight, logits.T @ hidden]

    return call


def loss_by(loss: Callable[[Tensor, Tensor, Tensor], Any]) -> Builder:
    """Return a builder of another loss of hidden states, rows and targets, with gradients."""

    def build() -> Call:
        hidden, weight, targets = numbers(TOKENS, WIDTH), numbers(VOCAB_SIZE, WIDTH), ids(TOKENS)
        return trained([hidden, weight], lambda: loss(hidden, weight, targets))

    return build


def of_torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.linear_cross_entropy(hidden, weight, targets, options=nn.LinearCrossEntropyOptions())


def of_liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Any:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(hidden, weight, targets)


def of_cut_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Any:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, targets, impl="cce")


def look_up(training: bool) -> Builder:
    """Return a builder of a look-up in `nn.Embedding`, in training with its gradient."""

    def build() -> Call:
        table, tokens = nn.Embedding(VOCAB_SIZE, WIDTH, dtype=torch.bfloat16), ids(1, TOKENS)
        return trained([table.weight], lambda: table(tokens)) if training else torch.no_grad()(lambda: table(tokens))

    return build


def input_embedding(training: bool) -> Builder:
    """Return a builder of GPT-2's input embedding, operation by operation."""

    def build() -> Call:
        rows, positions = nn.Embedding(50_257, 768), nn.Embedding(1024, 768)
        dropout, tokens, places = nn.Dropout(0.1).train(training), ids(8, 1024), torch.arange(1024)

        def embed() -> Any:
            return dropout(rows(tokens) + positions(places))

        return trained([rows.weight, positions.weight], embed) if training else torch.no_grad()(embed)

    return build


def rotation(training: bool) -> Builder:
    """Return a builder of the rotation by transformers, of the same queries and keys."""

    def build() -> Call:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        q, k = numbers(1, 32, TOKENS, 128, trained=training), numbers(1, 8, TOKENS, 128, trained=training)
        cos, sin = (numbers(1, TOKENS, 128, trained=False) for _ in range(2))
        rotate = partial(apply_rotary_pos_emb, q, k, cos, sin)
        return trained([q, k], rotate) if training else rotate

    return build


def step(optimizer_of: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], *, sparse: bool = False) -> Builder:
    """Return a builder of a training step of `nn.Embedding`: look-up, backward pass and an optimizer's step."""

    def build() -> Call:
        table, tokens, grad = nn.Embedding(VOCAB_SIZE, WIDTH, sparse=sparse), ids(2307), torch.randn(2307, WIDTH)
        optimizer = optimizer_of(table.parameters())

        def call() -> None:
            table(tokens).backward(grad)
            optimizer.step()
            optimizer.zero_grad()

        return call

    return build


def sum_of_look_ups() -> Call:
    """Build the sum of Dia's nine streams by nine modules `nn.Embedding`."""
    tables = nn.ModuleList(nn.Embedding(size, DIA_WIDTH, dtype=torch.bfloat16) for size in DIA)
    tokens = codes(FEW_TOKENS)
    return trained(list(tables.parameters()), lambda: sum(table(tokens[:, k]) for k, table in enumerate(tables)))


def loss_of_all_logits() -> Call:
    """Build the loss of Dia's nine streams from one product."""
    hidden, weight, targets = numbers(FEW_TOKENS, DIA_WIDTH), numbers(sum(DIA), DIA_WIDTH), codes(FEW_TOKENS)
    return trained(
        [hidden, weight], lambda: F.cross_entropy((hidden @ weight.T).view(-1, DIA[0]).float(), targets.flatten())
    )


def logits_of_a_token() -> Call:
    hidden, weight = numbers(1, WIDTH, trained=False), numbers(VOCAB_SIZE, WIDTH, trained=False)
    return lambda: hidden @ weight.T


def model_without_blocks() -> Call:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=VOCAB_SIZE, hidden_size=WIDTH, num_hidden_layers=0, num_attention_heads=32)
    model: Any = LlamaForCausalLM(config)
    model, tokens = model.to(torch.bfloat16), ids(1, TOKENS)
    return trained(list(model.parameters()), lambda: model(tokens, labels=tokens).loss)


LIGER = f"Liger {version_of('liger-kernel')}"
CUT_CROSS_ENTROPY = f"cut-cross-entropy {version_of('cut-cross-entropy')}, leaves small gradients out"
TRANSFORMERS = f"transformers {version_of('transformers')}"

PEERS: Mapping[str, Mapping[str, Builder]] = {
    "loss": {
        "three products": three_products,
        "F.cross_entropy of bfloat16 logits": loss_by(lambda x, rows, targets: F.cross_entropy(x @ rows.T, targets)),
        "F.cross_entropy of float32 logits": loss_by(
            lambda x, rows, targets: F.cross_entropy((x @ rows.T).float(), targets)
        ),
        "F.linear_cross_entropy": loss_by(of_torch),
        LIGER: loss_by(of_liger),
        CUT_CROSS_ENTROPY: loss_by(of_cut_cross_entropy),
    },
    "look-up": {"nn.Embedding": look_up(training=True)},
    "look-up, int8": {"nn.Embedding": look_up(training=False)},
    "GPT-2 input embedding, evaluation": {"operation by operation": input_embedding(training=False)},
    "GPT-2 input embedding, training": {"operation by operation": input_embedding(training=True)},
    "loss of nine streams of few tokens": {"all logits": loss_of_all_logits},
    "sum of nine streams": {"nine modules nn.Embedding": sum_of_look_ups},
    "rotary": {TRANSFORMERS: rotation(training=False)},
    "rotary, training": {TRANSFORMERS: rotation(training=True)},
    "row-sparse step": {
        "nn.Embedding, fused AdamW": step(partial(torch.optim.AdamW, lr=1e-3, fused=True)),
        "nn.Embedding, SparseAdam": step(partial(torch.optim.SparseAdam, lr=1e-3), sparse=True),
    },
    "logits of one token, int8": {"product with bfloat16 rows": logits_of_a_token},
    "patched transformers model without blocks": {TRANSFORMERS: model_without_blocks},
}
"""Competitors of hot paths, by the names of the paths; each path is also measured by torch operators."""


RATES = "rates of the card"
OURS, BY_OPERATORS = "embedlayer", "embedlayer by torch operators"
KERNELS, IN_A_GRAPH, PREDICTED = "kernels of embedlayer", "embedlayer in a CUDA graph", "predicted"
BY_NAME = {path.name: path for path in PATHS}
CASES = [RATES, *(path.name for path in PATHS if path not in PASSES), *(path.name for path in PASSES)]
"""Names of what is measured, in this order: paths of which most launch few kernels, then passes over the vocabulary."""


def measure_all(names: Iterable[str]) -> None:
    """Measure cases, and print a line of JSON where a case begins and one for each row."""
    torch.manual_seed(0)
    gc.collect()
    gc.freeze()  # what was imported; each collection would take longer than most calls
    for name in names:
        start = time.monotonic()
        print(json.dumps({"begins": name}), flush=True)
        for row in rates() if name == RATES else measured(BY_NAME[name]):
            print(json.dumps({"case": name, **row}), flush=True)
        settle()
        print(f"{name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


def measured(path: HotPath) -> Iterator[Row]:
    """Yield a row for each competitor of a path, or its error, and one for the prediction."""
    if path.ranks > torch.cuda.device_count() > 0:
        yield {"setting": path.setting, "error": f"left out: it needs {path.ranks} devices"}
        return
    builders = {OURS: path.build, BY_OPERATORS: by_torch_operators(path.build), **PEERS.get(path.name, {})}
    rows: dict[str, Row] = {}
    calls: dict[str, Call] = {}
    for competitor, build in builders.items():
        rows[competitor] = {"setting": path.setting, "competitor": competitor}
        try:
            with torch.device(DEVICE):
                call = build()
            call()
            rows[competitor]["added_gib"] = added_gib(call)
            calls[competitor] = call
        except Exception as error:  # noqa: BLE001 - a peer may raise anything
            yield {**rows[competitor], "error": line_of(error)}
        settle()  # after an error of CUDA itself the process ends here
    for competitor, times in time_on_gpu(calls).items():
        yield {**rows[competitor], **times}
    prediction = predicted(path)
    yield {"setting": path.setting, "competitor": PREDICTED, **prediction}
    further: dict[str, Callable[[Call], Row]] = {KERNELS: of_kernels}
    if prediction["waits"] == 0:
        further[IN_A_GRAPH] = lambda call: time_on_gpu({OURS: captured(call)})[OURS]
    for competitor, measure in further.items() if OURS in calls else ():
        row: Row = {"setting": path.setting, "competitor": competitor}
        try:
            yield {**row, **measure(calls[OURS])}
        except Exception as error:  # noqa: BLE001 - such as a refusal to be captured
            yield {**row, "error": line_of(error)}
            torch.rand(1, device=DEVICE)  # after an error of CUDA or of its generator the process ends here


def by_torch_operators(build: Builder) -> Builder:
    """Return a builder of the same call without kernels of this package."""

    def build_call() -> Call:
        with kernels_disabled():
            call = build()

        def without_kernels() -> None:
            with kernels_disabled():
                call()

        return without_kernels

    return build_call


def captured(call: Call) -> Call:
    """Return the replay of a CUDA graph of a call. After an error of CUDA in it a process can measure nothing more."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def rates() -> Iterator[Row]:
    """Yield the rate of a copy of 4 GiB, read and written, and those of products of random bfloat16 numbers."""
    with torch.device(DEVICE):
        source = torch.randint(256, (2**32,), dtype=torch.uint8)
        target = torch.empty_like(source)
    times = time_on_gpu({"copy": partial(target.copy_, source)})["copy"]
    yield {"competitor": "copy", **times, "tb_per_s": round(2 * source.nbytes / float(times["time_ms"]) / 1e9, 3)}
    del source, target
    for m, k, n in ((8192, 8192, 8192), (TOKENS, WIDTH, VOCAB_SIZE)):
        with torch.device(DEVICE):
            one, other = numbers(m, k, trained=False), numbers(n, k, trained=False)
        times = time_on_gpu({"product": partial(torch.matmul, one, other.T)})["product"]
        rate = 2 * m * k * n / float(times["time_ms"]) / 1e9
        yield {"competitor": f"product, {m:,} x {k:,} x {n:,}", **times, "tflops": round(rate, 1)}


def settle() -> None:
    """Wait for the device, and free what is no longer used."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


def added_gib(call: Call) -> float:
    """Return the memory that the peak of a call adds, in GiB."""
    settle()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**30, 4)


def time_on_gpu(calls: Mapping[str, Call]) -> dict[str, Row]:
    """Return the median time of each call with its 20th and 80th percentile; the calls take turns."""
    repeats = {name: max(1, round(ROUND_MS / milliseconds(call, 2))) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            samples[name].append(milliseconds(call, repeats[name]))
    return {name: spread(times) for name, times in samples.items()}


def milliseconds(call: Call, repeats: int) -> float:
    """Return the time of a call that is repeated."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    gc.collect()
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / repeats


def of_kernels(call: Call) -> Row:
    """Return the number of kernels that a call launches and their time together; the slowest are printed."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    times = Counter[str]()
    of_device = [event for event in trace.events() or () if event.device_type.name == "CUDA"]
    kernels = [event for event in of_device if not event.name.startswith("Mem")]  # no copies and fills
    for event in kernels:
        times[event.name] += event.time_range.elapsed_us() / 1000
    for name, time_ms in times.most_common(8):
        print(f"    {time_ms:9.3f} ms  {name[:100]}", file=sys.stderr)
    return {"kernels": len(kernels), "time_ms": round(sum(times.values()), 3)}


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
