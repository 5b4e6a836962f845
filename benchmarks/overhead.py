"""What a call costs beside the same operations written in plain PyTorch, from one token up; and a patched model.

Each competitor is called in turns, as often as fills a few milliseconds, on one thread.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import embedlayer as el
from benchmarks.harness import Case, Row, Value, milliseconds, time_alternately

TOKENS = (1, 128, 2048, 8192)
SIZES = ((256, 64), (1000, 64), (50_257, 64), (1000, 1024), (50_257, 1024))
"""Rows and width of the tables."""

ROWS_STEPPED, IDS_STEPPED = (1000, 128_256), (32, 2048)
"""Rows of a row-sparse table, and IDs of a step."""

LENGTH = 8192
FILLED_MS = 4.0
"""Milliseconds that the calls of one turn take, at least."""

Calls = tuple[Callable[[], object], Callable[[], object]]


class Setting(NamedTuple):
    """The sizes of a call, and whether its gradients are computed."""

    tokens: int
    vocab_size: int
    embed_dim: int
    trained: bool


def look_up(setting: Setting) -> Calls:
    """Return a look-up of ours and of torch, with a scale."""
    ids = torch.randint(setting.vocab_size, (1, setting.tokens))
    ours = el.TokenEmbedding(setting.vocab_size, setting.embed_dim, scale="sqrt_dim")
    plain, scale = nn.Embedding(setting.vocab_size, setting.embed_dim), math.sqrt(setting.embed_dim)
    return (lambda: ours(ids)), (lambda: plain(ids) * scale)


def input_embedding(setting: Setting) -> Calls:
    """Return an input embedding of ours, and the operations one after another."""
    ids = torch.randint(setting.vocab_size, (1, setting.tokens))
    ours = el.TransformerEmbedding(setting.vocab_size, setting.embed_dim, LENGTH).eval()
    table, position = nn.Embedding(setting.vocab_size, setting.embed_dim), nn.Embedding(LENGTH, setting.embed_dim)
    dropout, scale = nn.Dropout(0.1).eval(), math.sqrt(setting.embed_dim)
    return (lambda: ours(ids)), lambda: dropout(table(ids) * scale + position.weight[: ids.shape[1]])


def head(setting: Setting) -> Calls:
    """Return the logits of a tied head of ours, and of a tied `nn.Linear`."""
    hidden = torch.randn(1, setting.tokens, setting.embed_dim)
    table = el.TokenEmbedding(setting.vocab_size, setting.embed_dim)
    ours, plain = el.OutputHead(table), nn.Linear(setting.embed_dim, setting.vocab_size, bias=False, device="meta")
    plain.weight = table.weight
    return (lambda: ours(hidden)), lambda: plain(hidden)


def rotary(setting: Setting) -> Calls:
    """Return a rotation of ours of four heads, and the formula of transformers' models."""
    q, k = (torch.randn(1, 4, setting.tokens, setting.embed_dim) for _ in range(2))
    positions = torch.arange(setting.tokens)
    ours = el.RotaryEmbedding(setting.embed_dim)
    frequencies = 10_000.0 ** (-torch.arange(0, setting.embed_dim, 2) / setting.embed_dim)

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def plain() -> object:
        angles = positions[:, None] * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return rotated(q, angles.cos(), angles.sin()), rotated(k, angles.cos(), angles.sin())

    return (lambda: ours.rotate(q, k, positions)), plain


LAYERS: Mapping[str, Callable[[Setting], Calls]] = {
    "TokenEmbedding": look_up,
    "TransformerEmbedding": input_embedding,
    "OutputHead": head,
    "RotaryEmbedding.rotate": rotary,
}


def settings(name: str) -> Iterator[Setting]:
    """Yield the sizes that a layer is measured with; many logits and long rotations are left out."""
    for vocab_size, embed_dim in SIZES:
        for tokens in TOKENS:
            if name == "OutputHead" and tokens * vocab_size * embed_dim > 1 << 33:
                continue
            if name == "RotaryEmbedding.rotate" and (vocab_size != 1000 or tokens > 2048):
                continue
            for trained in (False, True):
                is_large = vocab_size * embed_dim > 1 << 22  # whose backward pass fills a gradient with zeros
                if not trained or not (is_large or name in ("OutputHead", "RotaryEmbedding.rotate")):
                    yield Setting(tokens, vocab_size, embed_dim, trained)


def repeated(call: Callable[[], object], setting: Setting) -> Callable[[], int]:
    """Return a function that calls `call`, and its backward pass if it is trained, for `FILLED_MS` milliseconds."""

    def once() -> None:
        result: Any = call()
        if setting.trained:
            result.backward(torch.ones_like(result))

    return filled(once, gradients=setting.trained)


def filled(once: Callable[[], object], *, gradients: bool) -> Callable[[], int]:
    """Return a function that calls `once` for `FILLED_MS` milliseconds, and returns how often."""
    with torch.set_grad_enabled(gradients):
        once()  # the first calls allocate
        times = max(1, math.ceil(FILLED_MS / max(1e-3, min(milliseconds(once) for _ in range(3)))))

    def run() -> int:
        with torch.set_grad_enabled(gradients):
            for _ in range(times):
                once()
        return times

    return run


def beside_torch(layer: str, setting: Setting, times: Mapping[str, Mapping[str, Value]]) -> list[Row]:
    """Return a row for each competitor, with its time as a multiple of torch's."""
    base = float(times["torch"]["time_ms"])
    return [
        {
            "competitor": who,
            **setting._asdict(),
            "layer": layer,
            **spread,
            "times_plain": round(float(spread["time_ms"]) / base, 2),
        }
        for who, spread in times.items()
    ]


def per_call(runs: Mapping[str, Callable[[], int]]) -> dict[str, dict[str, Value]]:
    """Return the time of one call of each competitor, measured in turns."""
    counts = {who: run() for who, run in runs.items()}
    spreads = time_alternately(runs, rounds=5)
    return {
        who: {unit: round(float(value) / counts[who], 5) for unit, value in spread.items()}
        for who, spread in spreads.items()
    }


def measure_layer(name: str, setting: Setting) -> list[Row]:
    """Return a row for ours and one for torch's."""
    calls = zip(("embedlayer", "torch"), LAYERS[name](setting), strict=True)
    return beside_torch(name, setting, per_call({who: repeated(call, setting) for who, call in calls}))


def row_step(table: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting) -> Callable[[], None]:
    """Return a training step of a table alone: look-up, backward pass, step and `zero_grad`, with IDs that change."""
    batches = itertools.cycle([torch.randint(setting.vocab_size, (1, setting.tokens)) for _ in range(8)])

    def step() -> None:
        table(next(batches)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_row_step(setting: Setting) -> list[Row]:
    """Return rows for a step of `RowAdamW`, and for one of SparseAdam, which leaves the other rows as they are."""
    table = el.RowSparseEmbedding(setting.vocab_size, setting.embed_dim)
    plain = nn.Embedding(setting.vocab_size, setting.embed_dim, sparse=True)
    steps = {
        "embedlayer": row_step(table, el.RowAdamW(table.parameters()), setting),
        "torch": row_step(plain, torch.optim.SparseAdam(list(plain.parameters())), setting),
    }
    return beside_torch(
        "RowAdamW, step", setting, per_call({who: filled(step, gradients=True) for who, step in steps.items()})
    )


def small_llama(patched: bool) -> Any:
    """Return a LLaMA of four blocks of width 128, with 4,096 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    if patched:
        el.patch(model)
    return model


def measure_model() -> list[Row]:
    """Return rows for a step of training of 256 tokens, and for generating 32 tokens."""
    ids = torch.randint(4096, (1, 256))
    models = {"embedlayer": small_llama(patched=True), "torch": small_llama(patched=False)}

    def step(model: Any) -> Callable[[], object]:
        def run() -> None:
            model.zero_grad()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

        return run

    def generate(model: Any) -> Callable[[], object]:
        return lambda: model.generate(
            ids[:, :16], max_new_tokens=32, min_new_tokens=32, do_sample=False, pad_token_id=0
        )

    rows: list[Row] = []
    for name, job, tokens in (("LLaMA, training step", step, 256), ("LLaMA, generate", generate, 32)):
        times = time_alternately({who: job(model) for who, model in models.items()}, rounds=15)
        rows += beside_torch(name, Setting(tokens, 4096, 128, trained=job is step), times)
    return rows


def run() -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [row for name in LAYERS for setting in settings(name) for row in measure_layer(name, setting)]
        for vocab_size, tokens in itertools.product(ROWS_STEPPED, IDS_STEPPED):
            rows += measure_row_step(Setting(tokens, vocab_size, 64, trained=True))
        return rows + measure_model()
    finally:
        torch.set_num_threads(threads)


CASE = Case("Calls beside the same operations in plain PyTorch, from one token up, on one thread", run)
