"""Errors of what a head over bfloat16 rows computes, with and without `head_dtype`, against float64.

The reference are the same stored numbers, multiplied and reduced in float64. Beside the head stands an untied float32
copy of its rows, what TRL's `cast_lm_head_to_fp32` makes. Nothing is timed. The real table is that of stories260K,
whose model reads a text in bfloat16; without the folder of shared data there is no row for it.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Case, Row
from embedlayer.kernels.kernel import kernels_disabled
from embedlayer.losses import ForwardKL, LinearLogits, divergence, linear_cross_entropy, token_statistics
from embedlayer.models.llama import load_llama
from embedlayer.tokenization.read import load_tokenizer

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
TOKENS = 384


class Inputs(NamedTuple):
    """Hidden states of a student and a teacher, `(N, D)`, rows `(V, D)` of both, and targets `(N,)`."""

    hidden: Tensor
    teacher: Tensor
    weight: Tensor
    targets: Tensor

    def on(self, device: str) -> "Inputs":
        """The same on a device."""
        return Inputs(*(each.to(device) for each in self))

    def converted(self, states: torch.dtype, rows: torch.dtype) -> "Inputs":
        """The same with other dtypes of hidden states and rows."""
        return Inputs(self.hidden.to(states), self.teacher.to(states), self.weight.to(rows), self.targets)


class Results(NamedTuple):
    """What is compared: nats of each token, and gradients of the mean loss."""

    log_probs: Tensor
    entropy: Tensor
    divergence: Tensor
    hidden_gradient: Tensor
    rows_gradient: Tensor


def computed(inputs: Inputs, **options: Any) -> Results:
    """The results of one implementation."""
    hidden, teacher, weight, targets = inputs
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    with torch.no_grad():
        found = token_statistics(hidden, weight, targets, statistics=("log_probs", "entropy"), **options)
        student, of_teacher = (LinearLogits(states, weight, **options) for states in (hidden, teacher))
        kl = divergence(student, of_teacher, ForwardKL(), reduction="none")
    loss = linear_cross_entropy(hidden, weight, targets, chunk_bytes=2**22, **options)  # in several chunks
    of_hidden, of_rows = torch.autograd.grad(loss, [hidden, weight])
    return Results(cast(Tensor, found.log_probs), cast(Tensor, found.entropy), kl, of_hidden, of_rows)


def reference(inputs: Inputs) -> Results:
    """The definition, in float64."""
    hidden, teacher, weight, targets = inputs.converted(torch.float64, torch.float64)
    hidden.requires_grad_()
    weight.requires_grad_()
    log_p = F.log_softmax(hidden @ weight.T, dim=-1)
    log_q = F.log_softmax(teacher @ weight.detach().T, dim=-1)
    gradients = torch.autograd.grad(F.nll_loss(log_p, targets), [hidden, weight], retain_graph=True)
    with torch.no_grad():
        kl = (log_q.exp() * (log_q - log_p)).sum(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return Results(log_p.gather(-1, targets[:, None])[:, 0], entropy, kl, *gradients)


def synthetic(largest: float) -> Inputs:
    """Rows of a large table whose largest logit is `largest`, as bfloat16 numbers."""
    torch.manual_seed(0)
    weight = torch.randn(50_257, 768)
    hidden, teacher = torch.randn(2, TOKENS, 768)
    hidden = hidden * largest / (hidden @ weight.T).amax()
    teacher = hidden + 0.1 * hidden.std() * teacher
    return Inputs(hidden, teacher, weight, torch.randint(0, len(weight), (TOKENS,))).converted(
        torch.bfloat16, torch.bfloat16
    )


def stories() -> Inputs:
    """The table of stories260K, and what its last block gives for a text; both in bfloat16."""
    model = load_llama(SHARED / "models" / "stories260K.safetensors").bfloat16()
    tokenizer = load_tokenizer(SHARED / "models" / "tok512.bin")
    text = (SHARED / "models" / "stories260K.md").read_text().partition("-t 0.0\n")[2].partition("\n```")[0]
    ids = torch.tensor(tokenizer.encode(text).ids)[: TOKENS + 1]
    with torch.no_grad():
        hidden, teacher = (model.hidden(each)[0] for each in (ids[None, :-1], ids[None, 1:]))
    weight: Tensor = model.head.weight
    return Inputs(hidden, teacher, weight.detach(), ids[1:])


SOURCES: dict[str, Callable[[], Inputs]] = {
    "stories260K": stories,
    **{f"synthetic, logits up to {size}": lambda size=size: synthetic(size) for size in (10, 20, 50)},  # type: ignore[misc]
}
NARROW, WIDE = torch.bfloat16, torch.float32
IN_FLOAT32 = {"head_dtype": WIDE}
VARIANTS: dict[str, tuple[torch.dtype, torch.dtype, bool, dict[str, Any]]] = {
    "bfloat16": (NARROW, NARROW, True, {}),
    "bfloat16, without kernels": (NARROW, NARROW, False, {}),
    'bfloat16, impl="plain"': (NARROW, NARROW, True, {"impl": "plain"}),
    "head_dtype=torch.float32": (NARROW, NARROW, True, IN_FLOAT32),
    "head_dtype=torch.float32, without kernels": (NARROW, NARROW, False, IN_FLOAT32),
    "head_dtype=torch.float32, float32 hidden states": (WIDE, NARROW, True, IN_FLOAT32),
    "untied float32 copy, float32 hidden states": (WIDE, WIDE, True, {}),
}
"""Dtypes of hidden states and of rows, whether compiled kernels run, and options."""


def largest(found: Tensor, expected: Tensor) -> float:
    return float(f"{(found.double() - expected).abs().amax().item():.2g}")


def relative(found: Tensor, expected: Tensor) -> float:
    return float(f"{((found.double() - expected).norm() / expected.norm()).item():.2g}")


def measured(inputs: Inputs, source: str) -> Iterator[Row]:
    """A row for each implementation, on the device of the inputs."""
    expected = reference(inputs)
    logits = (inputs.hidden.double() @ inputs.weight.double().T).abs().amax().item()
    for name, (states, weight, has_kernels, options) in VARIANTS.items():
        context: AbstractContextManager[object] = nullcontext() if has_kernels else kernels_disabled()
        with context:
            found = computed(inputs.converted(states, weight), **options)
        errors = {key: largest(*pair) for key, *pair in zip(Results._fields, found, expected, strict=True)}
        yield {
            "competitor": name,
            "source": source,
            "tokens": len(inputs.targets),
            "vocab_size": len(inputs.weight),
            "embed_dim": inputs.weight.shape[1],
            "largest_logit": math.floor(logits * 10) / 10,
            "log_probs_nats": errors["log_probs"],
            "entropy_nats": errors["entropy"],
            "divergence_nats": errors["divergence"],
            "hidden_gradient": relative(found.hidden_gradient, expected.hidden_gradient),
            "rows_gradient": relative(found.rows_gradient, expected.rows_gradient),
        }


def run() -> list[Row]:
    rows: list[Row] = []
    for source, make in SOURCES.items():
        if source == "stories260K" and not SHARED.is_dir():
            print(f"No row for {source}: there is no {SHARED}", file=sys.stderr)
            continue
        rows += measured(make().on("cuda" if torch.cuda.is_available() else "cpu"), source)
    return rows


CASE = Case("Errors of a head over bfloat16 rows against float64", run)
