"""What `EmbeddingMonitor` adds to a training step of both ends, 50,257 x 768, 2,048 Zipf tokens.

A step is the look-up, the LM head's loss over the vocabulary, the backward pass and the optimizer; there are no blocks
between the ends, which would make the monitor's share smaller. One tied table with torch's fused AdamW, and a
row-sparse table with an untied head and `RowAdamW`, which has the cheapest step.

`added_at_10` is `(9 * counted + read) / (10 * alone) - 1` of the medians: what a monitor with `every=10` adds.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.harness import Case, Row, time_alternately
from benchmarks.row_adamw import zipf
from embedlayer.heads.output import OutputHead
from embedlayer.optim.row_adamw import RowAdamW
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.row_sparse import RowSparseEmbedding
from embedlayer.training.monitor import EmbeddingMonitor

VOCAB_SIZE, EMBED_DIM, TOKENS, BATCHES, ROUNDS = 50_257, 768, 2048, 16, 3
ALONE, COUNTED, READ = "without a monitor", "counted", "read"


class Ends(nn.Module):
    """Table and head, with the hidden states of tokens between them."""

    def __init__(self, *, row_sparse: bool) -> None:
        super().__init__()
        self.table = (RowSparseEmbedding if row_sparse else TokenEmbedding)(VOCAB_SIZE, EMBED_DIM, init_std=0.02)
        untied = OutputHead(vocab_size=VOCAB_SIZE, embed_dim=EMBED_DIM)
        self.head = untied if row_sparse else OutputHead(self.table)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of the next token."""
        loss: Tensor = self.head.loss(self.table(ids[:-1]).tanh(), ids[1:])
        return loss


def steps_of(model: Ends, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> dict[str, Callable[[], None]]:
    """A step on the next batch, without a monitor, with one that counts, and with one that reads."""
    turns = iter(range(1 << 30))
    counting, reading = (EmbeddingMonitor(model, optimizer, every=every) for every in (1 << 30, 1))

    def step(ids: Tensor) -> None:
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    def watched(monitor: EmbeddingMonitor) -> None:
        ids = batches[next(turns) % len(batches)]
        with monitor.step(ids[:-1]):
            step(ids)

    return {
        ALONE: lambda: step(batches[next(turns) % len(batches)]),
        COUNTED: lambda: watched(counting),
        READ: lambda: watched(reading),
    }


def run() -> list[Row]:
    torch.manual_seed(0)
    batches = list(torch.multinomial(zipf(VOCAB_SIZE), BATCHES * (TOKENS + 1), replacement=True).split(TOKENS + 1))
    rows: list[Row] = []
    for row_sparse, name in ((False, "tied, AdamW(fused)"), (True, "row-sparse and untied, RowAdamW")):
        model = Ends(row_sparse=row_sparse)
        parameters = list(model.parameters())
        optimizer = RowAdamW(parameters, lr=1e-3) if row_sparse else torch.optim.AdamW(parameters, fused=True)
        times = time_alternately(steps_of(model, optimizer, batches), rounds=ROUNDS)
        alone, counted, read = (float(times[each]["time_ms"]) for each in (ALONE, COUNTED, READ))
        rows += [
            {
                "competitor": each,
                "optimizer": name,
                "vocab_size": VOCAB_SIZE,
                "embed_dim": EMBED_DIM,
                "tokens": TOKENS,
                "dtype": "float32",
                **times[each],
                "added_at_10": round((9 * counted + read) / (10 * alone) - 1, 4),
            }
            for each in times
        ]
    return rows


CASE = Case("EmbeddingMonitor beside a training step of both ends", run)
