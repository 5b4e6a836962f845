"""A training step of a token table: look-up, backward, optimizer; 2,048 Zipf tokens.

`RowAdamW` beside what it equals, `nn.Embedding` with torch's fused AdamW, and beside what it must not be slower than,
`nn.Embedding(sparse=True)` with `SparseAdam`, which ends elsewhere. The run is 10,000 steps old when it is measured:
every row was touched before, after gaps as a Zipf stream makes them, the longest thousands of steps. Gradients of a row
are normally distributed, so its second moments spread over many orders of magnitude.

`apply_pending_every=1` applies the updates of all rows after each step, for readers that keep tensors of the weight.
Other betas, and the first 50 steps of a run, need more terms for a row with pending updates.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.harness import Case, Row, time_alternately
from embedlayer.optim.row_adamw import RowAdamW
from embedlayer.optim.row_optimizer import RowOptimizer
from embedlayer.row_sparse.history import StepHistory
from embedlayer.tables.row_sparse import RowSparseEmbedding

TOKENS = 2048
AGE = 10_000
FRESH_BATCHES = 64
WARMUP = 2


OURS, DENSE, SPARSE = "embedlayer RowAdamW", "nn.Embedding, AdamW(fused)", "nn.Embedding(sparse), SparseAdam"
LATER, YOUNG = "later steps", "first 50 steps"
BETAS, LOW_BETAS = (0.9, 0.999), (0.9, 0.95)


@dataclass(frozen=True)
class Competitor:
    """An optimizer, and the part of a run in which it is measured."""

    name: str
    what: str = LATER
    betas: tuple[float, float] = BETAS
    apply_pending_every: int | None = None


ROW = (Competitor(OURS), Competitor(OURS, betas=LOW_BETAS), Competitor(OURS, YOUNG))
CURRENT = Competitor(f"{OURS}(apply_pending_every=1)", apply_pending_every=1)
PEERS = (Competitor(DENSE), Competitor(SPARSE))


@dataclass(frozen=True)
class Setting:
    """A table, and who is measured on it."""

    model: str
    vocab_size: int
    embed_dim: int
    competitors: tuple[Competitor, ...] = (*ROW, *PEERS)
    rounds: int = 15
    tokens_of: int | None = None
    """Draw the batches as from a vocabulary of this size, so that tables of different sizes see the same ones."""


SETTINGS = (
    Setting("GPT-2", 50_257, 768, (*ROW, CURRENT, *PEERS)),
    Setting("Llama 3.2 1B", 128_256, 2048),
    Setting("V alone", 32_000, 256, (Competitor(OURS),), rounds=25, tokens_of=32_000),
    Setting("V alone", 512_000, 256, (Competitor(OURS),), rounds=25, tokens_of=32_000),
)


def zipf(vocab_size: int) -> Tensor:
    """Chance of each token."""
    chances = 1 / torch.arange(1, vocab_size + 1, dtype=torch.float64)
    return chances / chances.sum()


def aged(
    setting: Setting, build: Callable[[list[nn.Parameter]], RowOptimizer]
) -> tuple[RowSparseEmbedding, RowOptimizer]:
    """A table and its optimizer after `AGE` steps: moments of random gradients, rows as far behind as they would be."""
    table = RowSparseEmbedding(setting.vocab_size, setting.embed_dim)
    optimizer = build(list(table.parameters()))
    step_of(table, optimizer, [torch.zeros(1, dtype=torch.long)])()
    state = optimizer.state[table.weight]
    state["step"].fill_(AGE)
    moments = tuple(state[name] for name in optimizer.row_state.layout(table.weight))
    for first in moments[:-1]:
        first.normal_(std=1e-5)
    moments[-1].normal_(std=7e-5).square_()
    pending, betas = table.pending_updates, optimizer.betas_of(optimizer.param_groups[0])
    per_step = -torch.expm1(TOKENS * torch.log1p(-zipf(setting.tokens_of or setting.vocab_size)))
    gaps = torch.full((setting.vocab_size,), AGE - 1.0, dtype=torch.float64)
    gaps[: len(per_step)] = torch.distributions.Geometric(per_step.clamp(max=1 - 1e-9)).sample().clamp(max=AGE - 1)
    assert pending is not None
    history = StepHistory(0, betas)
    for step in range(AGE):
        history.record(1e-3 * (1 + math.cos(math.pi * step / AGE / 2)) / 2, 1e-2)
    value_steps = (AGE - gaps).int()
    tensors = {"value_steps": value_steps, "moment_steps": value_steps, "history": torch.from_numpy(history.lines)}
    pending.load_state(table.weight, moments, tensors, {"start": 0, "betas": list(history.betas)})
    return table, optimizer


def step_of(table: nn.Embedding, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> Callable[[], None]:
    """One step on the next batch."""
    turns = iter(range(1 << 30))
    upstream = torch.full((TOKENS, table.embedding_dim), 1e-3)

    def step() -> None:
        ids = batches[next(turns) % len(batches)]
        table(ids).backward(upstream[: len(ids)])
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps_of(competitor: Competitor, setting: Setting, batches: list[Tensor]) -> Callable[[], None]:
    """One step of a competitor on the next batch."""
    sizes = (setting.vocab_size, setting.embed_dim)
    if competitor.name == DENSE:
        dense = nn.Embedding(*sizes)
        return step_of(dense, torch.optim.AdamW(dense.parameters(), betas=competitor.betas, fused=True), batches)
    if competitor.name == SPARSE:
        sparse = nn.Embedding(*sizes, sparse=True)
        return step_of(sparse, torch.optim.SparseAdam(sparse.parameters(), betas=competitor.betas), batches)
    if competitor.what == LATER:
        betas, every = competitor.betas, competitor.apply_pending_every
        return step_of(*aged(setting, lambda p: RowAdamW(p, lr=1e-3, betas=betas, apply_pending_every=every)), batches)
    table = RowSparseEmbedding(*sizes)
    step = step_of(table, RowAdamW(table.parameters(), lr=1e-3, betas=competitor.betas), batches)
    for _ in range(50 - 2 * (setting.rounds + WARMUP)):  # so that the last one measured is step 50
        step()
    return step


def measure(setting: Setting) -> list[Row]:
    torch.manual_seed(0)
    chances = zipf(setting.tokens_of or setting.vocab_size)
    batches = list(torch.multinomial(chances, FRESH_BATCHES * TOKENS, replacement=True).split(TOKENS))
    steps = {str(each): steps_of(each, setting, batches) for each in setting.competitors}
    times = time_alternately(steps, rounds=setting.rounds, warmup=WARMUP)
    fastest = float(times[str(Competitor(OURS))]["time_ms"])
    return [
        {
            "competitor": each.name,
            "what": each.what,
            "model": setting.model,
            "vocab_size": setting.vocab_size,
            "embed_dim": setting.embed_dim,
            "betas": " ".join(map(str, each.betas)),
            "tokens": TOKENS,
            "dtype": "float32",
            **times[str(each)],
            "times_ours": round(float(times[str(each)]["time_ms"]) / fastest, 2),
        }
        for each in setting.competitors
    ]


def run() -> list[Row]:
    return [row for setting in SETTINGS for row in measure(setting)]


CASE = Case("One step of a token table: look-up, backward, optimizer", run)
