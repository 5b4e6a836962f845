"""What one pass over the vocabulary gives, with gradients: ours, plain PyTorch, TRL's, Liger's, and the floor.

The floor is the matrix products that a pass needs, with nothing between them, in the fastest of three shapes: all
tokens at once, chunks of tokens by all rows, chunks of tokens by blocks of rows. Log-probabilities with any gradient
need four (logits, logits again in the backward pass, two gradients), the mean of a divergence four (two heads, two
gradients), a divergence with any gradient six, the largest logits one. Before a competitor is timed, its gradients are
compared with those of the plain formulation. Time is measured in this process, in turns; memory in a process for each
competitor, as what its peak adds to inputs that are already there.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Case, Row, added_mib_apart, time_alternately
from embedlayer import token_log_probs
from embedlayer.losses import (
    ForwardKL,
    JensenShannon,
    LinearLogits,
    ReverseKL,
    divergence,
    token_statistics,
)
from embedlayer.losses.chunk_size import tokens_per_chunk
from embedlayer.losses.divergences import Divergence
from embedlayer.losses.options import Reduction

MEMORY = """
import sys
from benchmarks.harness import added_mib, tell
from benchmarks.head_outputs import SETTINGS, WARM_UP, inputs, libraries, step
work, name, place = sys.argv[1:]
if name == "embedlayer":
    step(libraries()[name][work], inputs(WARM_UP))()
tell(added_mib=added_mib(step(libraries()[name][work], inputs(SETTINGS[int(place)]))))
"""

TOP_K = 20
TILE = 32768
"""Rows in a tile of TRL's, as its trainers pass it."""

LOG_PROBS, ENTROPY, TOP = "log-probs", "log-probs and entropy", f"top-{TOP_K} logits"
EACH = "reverse KL of each token"
KINDS: dict[str, tuple[float, Divergence]] = {
    "forward KL": (0.0, ForwardKL()),
    "reverse KL": (1.0, ReverseKL()),
    "Jensen-Shannon": (0.5, JensenShannon(0.5)),
}
"""Divergences, with TRL's `beta`, whose mean is computed."""


class Floor(NamedTuple):
    """Which matrix products a pass needs.

    Attributes:
        heads: Number of heads whose logits are computed.
        again: Whether they are computed again in the backward pass.
        gradients: Whether the gradients of hidden states and rows are computed.
    """

    heads: int
    again: bool
    gradients: bool

    def products(self) -> int:
        """Return the number of matrix products."""
        return self.heads * (1 + self.again) + 2 * self.gradients


FLOORS = {
    LOG_PROBS: Floor(1, again=True, gradients=True),
    ENTROPY: Floor(1, again=True, gradients=True),
    **dict.fromkeys(KINDS, Floor(2, again=False, gradients=True)),
    EACH: Floor(2, again=True, gradients=True),
    TOP: Floor(1, again=False, gradients=False),
}


@dataclass(frozen=True)
class Setting:
    """The head of a model, and the sequences in a step; `embed_dim` may be a share of the model's, as `model` says."""

    model: str
    sequences: int
    length: int
    vocab_size: int
    embed_dim: int
    rounds: int = 2


SETTINGS = (
    Setting("gpt2", sequences=4, length=256, vocab_size=50257, embed_dim=768),
    Setting("llama-3-8b, width / 16", sequences=2, length=256, vocab_size=128256, embed_dim=256, rounds=3),
)

WARM_UP = Setting("warm-up", sequences=2, length=300, vocab_size=200, embed_dim=64)
"""Enough logits for compiled kernels, whose compiler's own memory is no cost of a step."""


class Inputs(NamedTuple):
    """Inputs of a step: student `(N, D)` and `(V, D)` with gradients, teacher, tokens `(N,)`, `advantages` `(B,)`."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    tokens: Tensor
    advantages: Tensor

    def weighted(self, *values: Tensor) -> Tensor:
        """Return a loss whose gradient for each value of a token is the advantage of its sequence, divided by N."""
        advantages = self.advantages.repeat_interleave(len(self.tokens) // len(self.advantages))
        return torch.stack([(value * advantages).mean() for value in values]).sum()


Works = dict[str, Callable[[Inputs], Tensor]]
"""Loss of a step by the name of the work."""


def inputs(setting: Setting) -> Inputs:
    torch.manual_seed(0)
    tokens = setting.sequences * setting.length
    hidden, teacher_hidden = (torch.randn(tokens, setting.embed_dim) for _ in range(2))
    weight, teacher_weight = (torch.randn(setting.vocab_size, setting.embed_dim).mul_(0.02) for _ in range(2))
    targets = torch.randint(0, setting.vocab_size, (tokens,))
    advantages = torch.randn(setting.sequences)
    return Inputs(hidden.requires_grad_(), weight.requires_grad_(), teacher_hidden, teacher_weight, targets, advantages)


def ours() -> Works:
    def entropy(x: Inputs) -> Tensor:
        found = token_statistics(x.hidden, x.weight, x.tokens, statistics=("log_probs", "entropy"))
        assert found.log_probs is not None
        assert found.entropy is not None
        return x.weighted(found.log_probs, found.entropy)

    def top(x: Inputs) -> Tensor:
        found = token_statistics(x.hidden.detach(), x.weight.detach(), statistics=(), top_k=TOP_K)
        assert found.top_logits is not None
        return found.top_logits

    def divergence_of(kind: Divergence, x: Inputs, reduction: Reduction = "mean") -> Tensor:
        student, teacher = LinearLogits(x.hidden, x.weight), LinearLogits(x.teacher_hidden, x.teacher_weight)
        return divergence(student, teacher, kind, reduction=reduction)

    return {
        LOG_PROBS: lambda x: x.weighted(token_log_probs(x.hidden, x.weight, x.tokens)),
        ENTROPY: entropy,
        **{name: partial(divergence_of, kind) for name, (_, kind) in KINDS.items()},
        EACH: lambda x: x.weighted(divergence_of(ReverseKL(), x, "none")),
        TOP: top,
    }


def works_of(
    log_probs: Callable[[Inputs], Tensor],
    log_probs_and_entropy: Callable[[Inputs], tuple[Tensor, ...]],
    divergence_of: Callable[[float, Inputs], Tensor],
) -> Works:
    """Return works from functions that compute values of each token, `(N,)`; the divergence takes TRL's beta."""

    def mean_of(beta: float, x: Inputs) -> Tensor:
        return divergence_of(beta, x).mean()

    return {
        LOG_PROBS: lambda x: x.weighted(log_probs(x)),
        ENTROPY: lambda x: x.weighted(*log_probs_and_entropy(x)),
        **{name: partial(mean_of, beta) for name, (beta, _) in KINDS.items()},
        EACH: lambda x: x.weighted(divergence_of(1.0, x)),
    }


def plain() -> Works:
    def log_probs(x: Inputs) -> Tensor:
        return (x.hidden @ x.weight.T).log_softmax(-1).gather(-1, x.tokens[:, None]).squeeze(-1)

    def log_probs_and_entropy(x: Inputs) -> tuple[Tensor, ...]:
        logps = (x.hidden @ x.weight.T).log_softmax(-1)
        return logps.gather(-1, x.tokens[:, None]).squeeze(-1), -(logps.exp() * logps).sum(-1)

    def divergence_of(beta: float, x: Inputs) -> Tensor:
        log_q = (x.hidden @ x.weight.T).log_softmax(-1)
        log_p = (x.teacher_hidden @ x.teacher_weight.T).log_softmax(-1)
        if beta in (0, 1):
            return kl(log_q, log_p) if beta == 0 else kl(log_p, log_q)
        log_m = torch.logaddexp(log_q + math.log(1 - beta), log_p + math.log(beta))
        return beta * kl(log_m, log_p) + (1 - beta) * kl(log_m, log_q)

    def kl(log_q: Tensor, log_p: Tensor) -> Tensor:
        return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)

    top: Works = {TOP: lambda x: (x.hidden.detach() @ x.weight.detach().T).topk(TOP_K).values}
    return works_of(log_probs, log_probs_and_entropy, divergence_of) | top


def trl_of_logits() -> Works:
    from trl.experimental.gkd import GKDTrainer
    from trl.trainer.utils import selective_log_softmax, selective_log_softmax_and_entropy

    def log_probs(x: Inputs) -> Tensor:
        found: Tensor = selective_log_softmax(x.hidden @ x.weight.T, x.tokens)
        return found

    def log_probs_and_entropy(x: Inputs) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = selective_log_softmax_and_entropy(x.hidden @ x.weight.T, x.tokens)
        return found

    def divergence_of(beta: float, x: Inputs) -> Tensor:
        logits = x.hidden @ x.weight.T, x.teacher_hidden @ x.teacher_weight.T
        found: Tensor = GKDTrainer.generalized_jsd_loss(*logits, beta=beta, reduction="none")
        return found.sum(-1)

    return works_of(log_probs, log_probs_and_entropy, divergence_of)


def trl_in_tiles() -> Works:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    def scores(outputs: tuple[str, ...], x: Inputs) -> tuple[Tensor, ...]:
        found = ChunkedLogProbFunction.apply(x.hidden, x.weight, None, x.tokens, 1.0, TILE, None, 1.0, outputs)
        return tuple(found[: 1 + len(outputs)])

    def divergence_of(beta: float, x: Inputs) -> Tensor:
        teacher = x.teacher_hidden, x.teacher_weight, None
        found: Tensor = ChunkedDivergenceFunction.apply(x.hidden, x.weight, None, *teacher, beta)[0]
        return found

    return works_of(lambda x: scores((), x)[0], partial(scores, ("entropy",)), divergence_of)


def liger() -> Works:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss, LigerFusedLinearJSDLoss

    def log_probs(x: Inputs) -> Tensor:
        # In the first step of a policy the ratio is 1, and the gradient is that of the weighted log-probabilities.
        loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="bnpo")
        tokens = x.tokens.view(len(x.advantages), -1)
        hidden = x.hidden.view(*tokens.shape, -1)
        found: Tensor = loss(hidden, x.weight, tokens, torch.ones_like(tokens), -x.advantages)[0]
        return found

    def divergence_of(beta: float, x: Inputs) -> Tensor:
        loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=False)
        found: Tensor = loss(x.hidden, x.weight, x.teacher_hidden, x.teacher_weight, x.tokens)
        return found

    return {LOG_PROBS: log_probs, **{name: partial(divergence_of, beta) for name, (beta, _) in KINDS.items()}}


def libraries() -> dict[str, Works]:
    """Return the works of each library that is installed, by the name of its row."""
    found = {"plain PyTorch": plain(), "embedlayer": ours()}
    try:
        found |= {"TRL, all logits": trl_of_logits(), "TRL, tiles": trl_in_tiles()}
    except ImportError:
        print("No row for TRL: pip install 'trl>=1.16'", file=sys.stderr)
    try:
        found["Liger, chunks"] = liger()
    except ImportError:
        print("No row for Liger: pip install --no-deps liger-kernel", file=sys.stderr)
    return found


def step(compute: Callable[[Inputs], Tensor], x: Inputs) -> Callable[[], Tensor]:
    """Return a function that computes the result of a work, and its gradients if it has any."""

    def run() -> Tensor:
        x.hidden.grad = x.weight.grad = None
        result = compute(x)
        if result.requires_grad:
            result.backward()
        return result

    return run


def products(floor: Floor, x: Inputs, tokens: int, rows: int) -> Callable[[], object]:
    """Return a function that computes matrix products for `tokens` by `rows` logits at a time, in the same memory."""
    heads = [(x.hidden, x.weight), (x.teacher_hidden, x.teacher_weight)][: floor.heads]

    @torch.no_grad()
    def run() -> None:
        buffer = torch.empty(rows * tokens)
        hidden_grad, weight_grad = torch.empty_like(x.hidden), torch.empty_like(x.weight)
        for number in range(1 + floor.again):
            for start in range(0, len(x.hidden), tokens):
                here = slice(start, start + tokens)
                for first in range(0, len(x.weight), rows):
                    block = slice(first, first + rows)
                    shape = len(x.weight[block]), len(x.hidden[here])
                    logits = buffer[: math.prod(shape)].view(shape)
                    for hidden, weight in heads:
                        torch.mm(weight[block], hidden[here].T, out=logits)
                    if floor.gradients and number == floor.again:
                        hidden_grad[here].addmm_(logits.T, x.weight[block], beta=int(first > 0))
                        weight_grad[block].addmm_(logits, x.hidden[here], beta=int(start > 0))

    return run


def check(label: str, run: Callable[[], Tensor], x: Inputs, expected: dict[str, Tensor]) -> None:
    """Compare the gradients of a step, or its result where it has none, with those of the first that is checked.

    Raises:
        RuntimeError: They differ by more than 0.001 of the largest number.
    """
    result = run()
    grads = {"gradient of hidden": x.hidden.grad, "gradient of weight": x.weight.grad}
    for name, value in (grads if result.requires_grad else {"result": result}).items():
        assert value is not None
        first = expected.setdefault(name, value)
        worst = float((value - first).abs().max() / first.abs().max())
        if not worst < 1e-3:
            raise RuntimeError(f"{label}: the {name} differs by {worst:.2g} of its largest number.")


def measure(place: int, setting: Setting, work: str) -> list[Row]:
    x = inputs(setting)
    runs = {name: step(works[work], x) for name, works in libraries().items() if work in works}
    expected: dict[str, Tensor] = {}
    for name, run_once in runs.items():
        check(f"{name}, {work}", run_once, x, expected)
    expected.clear()
    floor, (tokens, width), rows = FLOORS[work], x.hidden.shape, setting.vocab_size
    shapes = (tokens, rows), (tokens_per_chunk(tokens, rows, width, "cpu", 4), rows), (min(tokens, 512), 2048)
    floors = {f"{floor.products()} products of {a} x {b}": products(floor, x, a, b) for a, b in shapes}
    times = time_alternately(runs | floors, rounds=setting.rounds, warmup=0)
    fastest = min(float(times[name]["time_ms"]) for name in floors)
    memory = {name: added_mib_apart(MEMORY, work, name, str(place)) for name in runs}
    rows_of_table: list[Row] = []
    for name, spread in times.items():
        time_ms = float(spread["time_ms"])
        row: Row = {
            "model": setting.model,
            "work": work,
            "competitor": name,
            "tokens": tokens,
            "vocab_size": rows,
            "embed_dim": width,
            "dtype": "float32",
            **spread,
            "times_products": round(time_ms / fastest, 2),
            "times_plain": round(time_ms / float(times["plain PyTorch"]["time_ms"]), 2),
        }
        if name in memory:
            row |= {"peak_mib": memory[name], "memory_share": round(memory[name] / memory["plain PyTorch"], 2)}
        rows_of_table.append(row)
    return rows_of_table


def run() -> list[Row]:
    return [row for place, setting in enumerate(SETTINGS) for work in FLOORS for row in measure(place, setting, work)]


CASE = Case("What one pass over the vocabulary gives, with gradients; memory that a step adds", run)
