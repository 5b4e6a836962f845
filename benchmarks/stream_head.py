"""The loss of K heads with its gradients: in one pass over the rows of each, beside all logits and `F.cross_entropy`.

All logits are one product where all streams have one hidden state (MusicGen, Dia), and one batched product where each
has its own (the depth decoder of CSM). `one loss a stream` calls `linear_cross_entropy` with a slice of the rows for
each stream, so that each slice sends back a gradient of all rows. Memory is what the peak of a step adds to its inputs.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Case, Row, added_mib_apart, time_alternately
from embedlayer import OutputHead
from embedlayer.heads import StackedRows, StreamHead
from embedlayer.losses import linear_cross_entropy

MEMORY = """
import sys
from benchmarks.harness import added_mib, tell
from benchmarks.stream_head import SETTINGS, WARM_UP, steps
name, place = sys.argv[1:]
steps(WARM_UP)[name]()
tell(added_mib=added_mib(steps(SETTINGS[int(place)])[name]))
"""

OURS = "StreamHead"


class Setting(NamedTuple):
    """K streams of V tokens at N positions; with `is_depth` each has a hidden state of its own and rows `(D, V)`."""

    model: str
    streams: int
    stream_size: int
    embed_dim: int
    tokens: int
    is_depth: bool = False


SETTINGS = (
    Setting("MusicGen small", streams=4, stream_size=2048, embed_dim=1024, tokens=1024),
    Setting("Dia", streams=9, stream_size=1028, embed_dim=2048, tokens=512),
    Setting("CSM, depth decoder", streams=31, stream_size=2051, embed_dim=1024, tokens=256, is_depth=True),
)

WARM_UP = Setting("warm-up", streams=2, stream_size=300, embed_dim=64, tokens=600)


def steps(setting: Setting) -> dict[str, Callable[[], None]]:
    """Return a step of each competitor by its name: the loss and its gradients."""
    torch.manual_seed(0)
    _, streams, size, width, tokens, is_depth = setting
    rows = StackedRows(streams, size, width, transposed=True) if is_depth else OutputHead(width, streams * size)
    head = StreamHead(rows, None if is_depth else streams, hidden_per_stream=is_depth)
    weight: Tensor = rows.weight
    hidden = torch.randn(tokens, streams, width) if is_depth else torch.randn(tokens, width)
    hidden, targets = hidden.requires_grad_(), torch.randint(0, size, (tokens, streams))

    def all_logits() -> Tensor:
        logits = torch.bmm(hidden.transpose(0, 1), weight).transpose(0, 1) if is_depth else F.linear(hidden, weight)
        return F.cross_entropy(logits.reshape(-1, size), targets.flatten())

    def one_loss_a_stream() -> Tensor:
        parts = []
        for k in range(streams):
            rows = weight[k].T if is_depth else weight[k * size : (k + 1) * size]
            parts.append(linear_cross_entropy(hidden[:, k] if is_depth else hidden, rows, targets[:, k]))
        return torch.stack(parts).mean()

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            loss().backward()
            weight.grad = hidden.grad = None

        return run

    losses: dict[str, Callable[[], Tensor]] = {OURS: lambda: head.loss(hidden, targets).loss}
    losses |= {"all logits": all_logits, "one loss a stream": one_loss_a_stream}
    first, *others = (torch.autograd.grad(loss(), [hidden, weight]) for loss in losses.values())
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-3, atol=1e-6)
    return {name: step(loss) for name, loss in losses.items()}


def run() -> list[Row]:
    rows = []
    for place, setting in enumerate(SETTINGS):
        times = time_alternately(steps(setting), rounds=5)
        base = float(times["all logits"]["time_ms"])
        for name, spread in times.items():
            row: Row = {"competitor": name, **setting._asdict(), "dtype": "float32", **spread}
            row["times_all_logits"] = round(float(spread["time_ms"]) / base, 2)
            rows.append({**row, "added_mib": added_mib_apart(MEMORY, name, str(place))})
            print(setting.model, name, row["times_all_logits"], file=sys.stderr)
    return rows


CASE = Case("The loss of K heads", run)
