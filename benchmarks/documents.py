"""A training step on windows that know documents, beside one on plain windows.

Two trainers of equal models take their steps in turns: windows are cut, the loss and its gradients computed, and the
weights updated. The documents have random lengths around a mean, with a long tail, as pages of the web have.
"""

from dataclasses import dataclass

import numpy as np
import torch

import embedlayer as el
from benchmarks.harness import Case, Row, time_alternately

STEPS, DOCUMENTS = 2, 4000


@dataclass(frozen=True)
class Setting:
    """Sizes of a model and its windows, and the mean length of a document."""

    model: str
    vocab_size: int
    embed_dim: int
    layers: int
    heads: int
    batch_size: int
    max_length: int
    position: str = "rotary"
    mean_length: int = 300


SETTINGS = (
    Setting("default of train", 4096, 192, 4, 6, 8, 128),
    Setting("default of train", 4096, 192, 4, 6, 8, 128, position="alibi"),
    Setting("longer windows", 4096, 256, 4, 4, 2, 1024),
)


def corpus_of(setting: Setting) -> el.TokenCorpus:
    """A corpus of random IDs."""
    random = np.random.default_rng(0)
    lengths = 1 + random.lognormal(np.log(setting.mean_length) - 0.5, 1.0, DOCUMENTS).astype(np.int64)
    ids = random.integers(0, setting.vocab_size, int(lengths.sum())).astype(np.uint16)
    ends = np.cumsum(lengths)
    return el.TokenCorpus(
        ids,
        ends - lengths,
        np.stack([ends, ends], axis=1),
        vocab_size=setting.vocab_size,
        tokenizer_fingerprint="synthetic",
    )


def trainer_of(setting: Setting, corpus: el.TokenCorpus, *, documents: bool) -> el.Trainer:
    torch.manual_seed(0)
    model = el.DecoderLM(
        el.TokenEmbedding(setting.vocab_size, setting.embed_dim, scale="sqrt_dim"),
        setting.position,  # type: ignore[arg-type]
        num_layers=setting.layers,
        num_heads=setting.heads,
    )
    options = el.TrainingOptions(
        steps=10**6,
        batch_size=setting.batch_size,
        max_length=setting.max_length,
        log_every=STEPS,
        validate_every=10**6,
        validation_tokens=1,
        documents=documents,
    )
    return el.Trainer(model, *corpus.split(0.1), options)


def measure(setting: Setting) -> list[Row]:
    corpus = corpus_of(setting)
    runs = {
        "plain windows": trainer_of(setting, corpus, documents=False).run(),
        "documents": trainer_of(setting, corpus, documents=True).run(),
    }
    for run in runs.values():
        next(run)  # the line before the first step
    times = time_alternately({name: run.__next__ for name, run in runs.items()}, rounds=9)
    plain = float(times["plain windows"]["time_ms"])
    return [
        {**vars(setting), "steps": STEPS, "competitor": name, **spread, "of_plain": float(spread["time_ms"]) / plain}
        for name, spread in times.items()
    ]


def run() -> list[Row]:
    return [row for setting in SETTINGS for row in measure(setting)]


CASE = Case("Training steps on windows that know documents", run)
