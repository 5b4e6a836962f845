"""A training step through the head and the loss of a transformers model: patched beside plain.

The model is GPT-2 without blocks, so that a step is its last norm, its LM head and its own loss. Time is measured in
this process, in turns; memory in a process for each competitor, as what the peak of a step adds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Case, Row, added_mib, step_mib_apart, time_alternately
from embedlayer import patch

NAMES = ("embedlayer patched", "plain transformers")


@dataclass(frozen=True)
class Setting:
    """Sizes of a head, and the number of tokens in a step."""

    model: str
    tokens: int
    vocab_size: int
    embed_dim: int
    dtype: torch.dtype = torch.float32
    rounds: int = 2


SETTINGS = (
    Setting("gpt2", tokens=2048, vocab_size=50257, embed_dim=768),
    Setting("gpt2", tokens=256, vocab_size=50257, embed_dim=768, rounds=3),
)


def step(setting: Setting, name: str) -> Callable[[], object]:
    """Return a function that runs one training step of a competitor."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=setting.vocab_size, n_embd=setting.embed_dim, n_positions=setting.tokens, n_layer=0, n_head=12
    )
    model: Any = GPT2LMHeadModel(config)
    model.to(setting.dtype)
    if name == NAMES[0]:
        patch(model)
    hidden = torch.randn(1, setting.tokens, setting.embed_dim).to(setting.dtype).requires_grad_()
    labels: Tensor = torch.randint(0, setting.vocab_size, (1, setting.tokens))

    def run() -> None:
        model.zero_grad()
        model(inputs_embeds=hidden, labels=labels, use_cache=False).loss.backward()

    return run


def peak_added(setting: Setting, name: str) -> float:
    """Mebibytes that the first step of a competitor adds to this process."""
    return added_mib(step(setting, name))


def measure(place: int, setting: Setting) -> list[Row]:
    times = time_alternately({name: step(setting, name) for name in NAMES}, rounds=setting.rounds)
    base = float(times[NAMES[1]]["time_ms"])
    return [
        {
            "model": setting.model,
            "competitor": name,
            "tokens": setting.tokens,
            "vocab_size": setting.vocab_size,
            "embed_dim": setting.embed_dim,
            "dtype": str(setting.dtype).removeprefix("torch."),
            **spread,
            "times_plain": round(float(spread["time_ms"]) / base, 2),
            "peak_mib": step_mib_apart(__name__, place, name),
        }
        for name, spread in times.items()
    ]


def run() -> list[Row]:
    return [row for place, setting in enumerate(SETTINGS) for row in measure(place, setting)]


CASE = Case("Head and loss of a transformers model in a training step; memory that a step adds", run)
