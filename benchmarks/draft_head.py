"""A head over 16,384 of 50,257 tokens: a training step and one token, beside the columns selected from all logits.

`untied` is `DraftHead.untied()`, which has a copy of the rows. The columns of all logits are the plain definition.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Case, Row, time_alternately
from embedlayer.heads.draft import DraftHead
from embedlayer.heads.output import OutputHead
from embedlayer.tables.dense import TokenEmbedding

VOCAB_SIZE, EMBED_DIM, DRAFT_VOCAB_SIZE, TOKENS = 50_257, 768, 16_384, 1024
OURS = "draft head"


def run() -> list[Row]:
    torch.manual_seed(0)
    head = OutputHead(TokenEmbedding(VOCAB_SIZE, EMBED_DIM))
    ids = torch.randperm(VOCAB_SIZE)[:DRAFT_VOCAB_SIZE].sort().values
    draft = DraftHead(head, ids)
    untied, one = draft.untied(), torch.randn(1, EMBED_DIM)
    hidden = torch.randn(TOKENS, EMBED_DIM, requires_grad=True)
    targets = ids[torch.randint(0, DRAFT_VOCAB_SIZE, (TOKENS,))]
    drafts = draft.to_draft(targets)

    def step(loss: Tensor) -> None:
        loss.backward()
        head.weight.grad = untied.weight.grad = hidden.grad = None

    steps = {
        OURS: lambda: step(draft.loss(hidden, targets)),
        "untied": lambda: step(untied.loss(hidden, drafts)),
        "selected columns": lambda: step(F.cross_entropy(head(hidden)[:, ids], drafts)),
    }
    tokens = {
        OURS: torch.no_grad()(lambda: draft(one)),
        "untied": torch.no_grad()(lambda: untied(one)),
        "selected columns": torch.no_grad()(lambda: head(one)[:, ids]),
    }
    return [
        {
            "competitor": name,
            "what": what,
            "vocab_size": VOCAB_SIZE,
            "draft_vocab_size": DRAFT_VOCAB_SIZE,
            "embed_dim": EMBED_DIM,
            "tokens": count,
            "dtype": "float32",
            **spread,
            "times_ours": round(float(spread["time_ms"]) / float(times[OURS]["time_ms"]), 2),
        }
        for what, count, times in (
            ("loss and its gradients", TOKENS, time_alternately(steps, rounds=3)),
            ("logits of one token", 1, time_alternately(tokens, rounds=10)),
        )
        for name, spread in times.items()
    ]


CASE = Case("A head over some rows", run)
