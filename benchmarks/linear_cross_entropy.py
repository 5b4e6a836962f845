"""The loss of a vocabulary head, forward and backward: ours, the definition, torch's own, Apple's, and the floor.

The floor is the three matrix products that no exact way can do without (logits, gradient of `hidden`, gradient of
`weight`), with nothing between them. Time is measured in this process, in turns; memory in a process for each
competitor, as what its peak adds to inputs that are already there. Liger's kernels run on a GPU only: no row.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Case, Row, added_mib, step_mib_apart, time_alternately
from embedlayer.losses.linear import linear_cross_entropy
from embedlayer.losses.options import Impl
from embedlayer.losses.rows import product_dtype


@dataclass(frozen=True)
class Setting:
    """The head of a model, and tokens in a step; `embed_dim` is a share of a larger model's where `model` says so.

    `slow` leaves out torch's own chunks, which took 18 s here for 256 tokens in bfloat16.
    """

    model: str
    tokens: int
    vocab_size: int
    embed_dim: int
    dtype: torch.dtype = torch.float32
    rounds: int = 3
    warmup: int = 1
    slow: bool = False


SETTINGS = (
    Setting("gpt2", tokens=2048, vocab_size=50257, embed_dim=768, rounds=2),
    Setting("llama-3-8b, width / 16", tokens=256, vocab_size=128256, embed_dim=256, rounds=5, slow=True),
    Setting("gpt2", tokens=256, vocab_size=50257, embed_dim=768, dtype=torch.bfloat16, rounds=9, slow=True),
    Setting("gpt2", tokens=2048, vocab_size=50257, embed_dim=768, dtype=torch.bfloat16, slow=True),
    Setting("embedlayer demo", tokens=1024, vocab_size=4096, embed_dim=192, rounds=5),
    Setting("embedlayer demo, few tokens", tokens=64, vocab_size=512, embed_dim=192, rounds=15),
)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(impl: Impl) -> Loss:
    return lambda hidden, weight, targets: linear_cross_entropy(hidden, weight, targets, impl=impl)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.T, targets)


def losses() -> dict[str, Loss]:
    """What a step can call, by the name of its row."""
    found: dict[str, Loss] = {
        "embedlayer chunked": ours("chunked"),
        "plain F.cross_entropy": plain,
        "torch F.linear_cross_entropy": torch_own,
    }
    try:
        from cut_cross_entropy import linear_cross_entropy as apple
    except ImportError:
        print("No row for cut-cross-entropy: pip install cut-cross-entropy triton", file=sys.stderr)
    else:
        found["cut-cross-entropy torch_compile"] = lambda hidden, weight, targets: apple(
            hidden, weight, targets, impl="torch_compile"
        )
    return found


def torch_own(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.linear_cross_entropy(hidden, weight, targets, options=torch.nn.LinearCrossEntropyOptions())


def inputs(setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(setting.tokens, setting.embed_dim).to(setting.dtype).requires_grad_()
    weight = torch.randn(setting.vocab_size, setting.embed_dim).mul_(0.02).to(setting.dtype).requires_grad_()
    return hidden, weight, torch.randint(0, setting.vocab_size, (setting.tokens,))


def step(loss: Loss, hidden: Tensor, weight: Tensor, targets: Tensor) -> Callable[[], object]:
    def run() -> None:
        hidden.grad = weight.grad = None
        loss(hidden, weight, targets).backward()

    return run


def products(hidden: Tensor, weight: Tensor) -> Callable[[], object]:
    @torch.no_grad()
    def run() -> None:
        logits = hidden @ weight.T
        hidden.grad, weight.grad = logits @ weight, logits.T @ hidden

    return run


def peak_added(setting: Setting, name: str) -> float:
    """Mebibytes that one step of a competitor adds to this process, which has done nothing like it before."""
    hidden, weight, targets = inputs(setting)
    run = products(hidden, weight) if name == "three products" else step(losses()[name], hidden, weight, targets)
    if "torch_compile" in name or "embedlayer" in name:  # the compiler's own memory is no cost of a step
        small = Setting("warm-up", 600 if "embedlayer" in name else 16, 32, setting.embed_dim, setting.dtype)
        step(losses()[name], *inputs(small))()
    return added_mib(run)


def measure(place: int, setting: Setting) -> list[Row]:
    hidden, weight, targets = inputs(setting)
    names = losses()
    if setting.slow:
        del names["torch F.linear_cross_entropy"]
    competitors = {name: step(loss, hidden, weight, targets) for name, loss in names.items()}
    competitors["three products"] = products(hidden, weight)
    times = time_alternately(competitors, rounds=setting.rounds, warmup=setting.warmup)
    base = float(times["plain F.cross_entropy"]["time_ms"])
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


def takes_minutes(setting: Setting) -> bool:
    """Whether a call of a peer takes minutes, as bfloat16 on a CPU without instructions for it."""
    return setting.tokens > 256 and product_dtype(setting.dtype, "cpu") != setting.dtype


def run() -> list[Row]:
    chosen = [(place, setting) for place, setting in enumerate(SETTINGS) if not takes_minutes(setting)]
    if len(chosen) < len(SETTINGS):
        print("No rows for 2,048 tokens in bfloat16: this CPU has no instructions for it.", file=sys.stderr)
    return [row for place, setting in chosen for row in measure(place, setting)]


CASE = Case("Loss of a vocabulary head, forward and backward; memory that a step adds", run)
