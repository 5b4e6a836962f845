"""A training step in which 200 rows of a frozen table learn: ours, PEFT's trainable tokens, and training all rows.

PEFT is its `TrainableTokensLayer`, all rows are an `nn.Embedding`, and every optimizer is torch's fused AdamW. A step
is look-up, backward and optimizer; with both ends also the tied head's loss. Time is measured in this process, in
turns; memory in a process for each competitor, as what its first step, optimizer state included, adds to the table that
is already there.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Case, Row, added_mib, step_mib_apart, time_alternately
from embedlayer.heads.output import OutputHead
from embedlayer.tables.delta import DeltaEmbedding
from embedlayer.tables.dense import TokenEmbedding

ROWS = 200
OURS = "embedlayer"


@dataclass(frozen=True)
class Setting:
    """A table of which the last rows are new, and tokens in a step; one in ten is a new one."""

    model: str
    vocab_size: int
    embed_dim: int
    tokens: int
    both_ends: bool = False
    rounds: int = 3


SETTINGS = (
    Setting("GPT-2", 50_257, 768, tokens=2048),
    Setting("Llama 3.2 1B", 128_256, 2048, tokens=2048, rounds=2),
    Setting("GPT-2", 50_257, 768, tokens=128, both_ends=True, rounds=2),
)
Ends = tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]


def ours(weight: Tensor) -> Ends:
    table = DeltaEmbedding.last(TokenEmbedding.from_pretrained(weight), ROWS)
    return table, OutputHead(table).loss


def peft(weight: Tensor) -> Ends:
    """PEFT's layer around an `nn.Embedding`, and the one that it puts around a tied `nn.Linear`."""
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer

    table = TrainableTokensLayer(nn.Embedding.from_pretrained(weight), "default")
    table.update_layer("default", token_indices=list(range(len(weight) - ROWS, len(weight))))
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    head = TrainableTokensLayer(linear, "default", tied_adapter=table)
    return table, lambda hidden, targets: F.cross_entropy(head(hidden), targets)


def all_rows(weight: Tensor) -> Ends:
    table = nn.Embedding.from_pretrained(weight, freeze=False)
    return table, lambda hidden, targets: F.cross_entropy(hidden @ table.weight.T, targets)


COMPETITORS = {OURS: ours, "peft": peft, "all rows": all_rows}


def step_of(setting: Setting, ends: Ends) -> Callable[[], None]:
    table, loss = ends
    trained = [parameter for parameter in table.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    torch.manual_seed(0)
    ids = torch.randint(0, setting.vocab_size - ROWS, (setting.tokens,))
    ids[::10] = torch.randint(setting.vocab_size - ROWS, setting.vocab_size, ids[::10].shape)
    upstream = torch.full((setting.tokens, setting.embed_dim), 1e-3)

    def run() -> None:
        vectors = table(ids)
        if setting.both_ends:
            loss(vectors, ids.roll(-1)).backward()
        else:
            vectors.backward(upstream)
        optimizer.step()
        optimizer.zero_grad()

    return run


def weight_of(setting: Setting) -> Tensor:
    return torch.full((setting.vocab_size, setting.embed_dim), 0.01)


def peak_added(setting: Setting, name: str) -> float:
    """Mebibytes that one step of a competitor adds to this process."""
    step_of(Setting("warm-up", 300, 16, 32, setting.both_ends), COMPETITORS[name](torch.zeros(300, 16)))()
    return added_mib(step_of(setting, COMPETITORS[name](weight_of(setting))))


def competitors() -> list[str]:
    try:
        import peft  # noqa: F401
    except ImportError:
        print("No row for PEFT: pip install peft", file=sys.stderr)
        return [name for name in COMPETITORS if name != "peft"]
    return list(COMPETITORS)


def measure(place: int, setting: Setting) -> list[Row]:
    names, weight = competitors(), weight_of(setting)
    steps = {name: step_of(setting, COMPETITORS[name](weight)) for name in names}
    times = time_alternately(steps, rounds=setting.rounds)
    steps.clear()
    base = float(times[OURS]["time_ms"])
    return [
        {
            "competitor": name,
            "model": setting.model,
            "vocab_size": setting.vocab_size,
            "embed_dim": setting.embed_dim,
            "ends": "both, tied" if setting.both_ends else "in",
            "tokens": setting.tokens,
            "dtype": "float32",
            **spread,
            "times_ours": round(float(spread["time_ms"]) / base, 2),
            "added_mib": step_mib_apart(__name__, place, name),
        }
        for name, spread in times.items()
    ]


def run() -> list[Row]:
    return [row for place, setting in enumerate(SETTINGS) for row in measure(place, setting)]


CASE = Case("One step of a table of which 200 rows learn", run)
