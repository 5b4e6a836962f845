"""Bags of tokens: the mean of the rows of each, as static embeddings of texts are trained and used.

`Bag` beside `nn.EmbeddingBag`: forward; forward and backward with dense gradients; and a step of training with
row-sparse gradients, by `RowAdamW` beside `SparseAdam`, which has other results. Sizes are those of sentence-
transformers' static-retrieval-mrl-en-v1 and of model2vec's potion-base-8M; texts have 1 to 64 tokens with the
frequencies of Zipf's law.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.harness import Case, Row, time_alternately
from benchmarks.row_adamw import zipf
from embedlayer.optim.row_adamw import RowAdamW
from embedlayer.tables.bag import Bag
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.row_sparse import RowSparseEmbedding

OURS, THEIRS = "embedlayer Bag", "nn.EmbeddingBag"
FORWARD, BACKWARD, STEP = "forward", "forward and backward", "row-sparse training step"
LONGEST, BATCHES = 64, 16


@dataclass(frozen=True)
class Setting:
    """A table, and the number of texts in a batch."""

    model: str
    vocab_size: int
    embed_dim: int
    texts: int


SETTINGS = (
    Setting("static-retrieval-mrl-en-v1", 30_522, 1024, 512),
    Setting("potion-base-8M", 29_528, 256, 512),
)


def batches_of(setting: Setting) -> list[tuple[Tensor, Tensor]]:
    """IDs and offsets of some batches."""
    batches = []
    for _ in range(BATCHES):
        lengths = torch.randint(1, LONGEST + 1, (setting.texts,))
        ids = torch.multinomial(zipf(setting.vocab_size), int(lengths.sum()), replacement=True)
        batches.append((ids, lengths.cumsum(0) - lengths))
    return batches


def call_of(
    bag: nn.Module, what: str, optimizer: torch.optim.Optimizer | None, batches: list[tuple[Tensor, Tensor]]
) -> Callable[[], None]:
    """Return a function that runs one call on the next batch."""
    turns = iter(range(1 << 30))

    def run() -> None:
        ids, offsets = batches[next(turns) % len(batches)]
        with torch.set_grad_enabled(what != FORWARD):
            out = bag(ids, offsets)
        if what != FORWARD:
            out.backward(torch.full_like(out, 1e-3))
        if optimizer is not None:
            optimizer.step()
        bag.zero_grad(set_to_none=True)

    return run


def measure(setting: Setting, what: str) -> list[Row]:
    torch.manual_seed(0)
    batches, sparse = batches_of(setting), what == STEP
    theirs = nn.EmbeddingBag(setting.vocab_size, setting.embed_dim, sparse=sparse)
    ours = Bag((RowSparseEmbedding if sparse else TokenEmbedding)(setting.vocab_size, setting.embed_dim))
    ours.load_state_dict(theirs.state_dict())
    bags = {OURS: (ours, RowAdamW(ours.parameters(), lr=1e-3) if sparse else None)}
    peer = torch.optim.SparseAdam(theirs.parameters(), lr=1e-3) if sparse else None
    calls = {name: call_of(bag, what, each, batches) for name, (bag, each) in bags.items()}
    name = f"{THEIRS}(sparse=True), SparseAdam" if sparse else THEIRS
    calls[name] = call_of(theirs, what, peer, batches)
    times = time_alternately(calls, rounds=15, warmup=2)
    return [
        {
            "competitor": f"{each}, RowAdamW" if sparse and each == OURS else each,
            "what": what,
            "model": setting.model,
            "vocab_size": setting.vocab_size,
            "embed_dim": setting.embed_dim,
            "texts": setting.texts,
            "dtype": "float32",
            **times[each],
            "times_theirs": round(float(times[each]["time_ms"]) / float(times[name]["time_ms"]), 2),
        }
        for each in calls
    ]


def run() -> list[Row]:
    return [row for setting in SETTINGS for what in (FORWARD, BACKWARD, STEP) for row in measure(setting, what)]


CASE = Case("Bags of tokens: the mean of the rows of each text", run)
