"""The input of K streams: a `StreamTable` beside K look-ups that are added, and beside `nn.EmbeddingBag`.

The sizes are those of the models; all competitors read the same rows. A gradient is new in each step, as after
`zero_grad`. "Row-sparse" is a backward pass with sparse gradients, as they arrive at an optimizer: those of
`nn.Embedding(sparse=True)` repeat rows, ours and those of K `RowSparseEmbedding()` have each row once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.harness import Case, Row, time_alternately
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.streams import StreamTable

LOOK_UPS = "K look-ups"


@dataclass(frozen=True)
class Setting:
    """Sizes of the streams of a model, and tokens in a step."""

    model: str
    sizes: tuple[int, ...]
    embed_dim: int
    tokens: int


SETTINGS = (
    Setting("MusicGen small", (2049,) * 4, 1024, tokens=1024),
    Setting("Moshi", (2049,) * 16 + (32_001,), 4096, tokens=128),
    Setting("CSM 1B", (2051,) * 32, 2048, tokens=256),
    Setting("Dia 1.6B", (1028,) * 9, 2048, tokens=1024),
    Setting("Higgs Audio v2", (1026,) * 8, 3072, tokens=512),
)
WORK = ("forward", "forward and backward", "row-sparse")


Competitor = tuple[nn.Module, Callable[[Tensor], Tensor]]


def table_over(rows: Tensor, *, sparse: bool) -> TokenEmbedding:
    return TokenEmbedding.from_embedding(nn.Embedding.from_pretrained(rows, False, sparse=sparse))


def added(modules: list[nn.Module]) -> Competitor:
    """Return K modules, and the function that adds their results."""

    def run(ids: Tensor) -> Tensor:
        sums: Tensor = modules[0](ids[:, 0])
        for k in range(1, len(modules)):
            sums = sums + modules[k](ids[:, k])
        return sums

    return nn.ModuleList(modules), run


def competitors(setting: Setting, rows: Tensor, *, sparse: bool) -> dict[str, Competitor]:
    """Return for each competitor its module and the function of IDs `(N, K)`, all over the memory of `rows`."""
    table = StreamTable(table_over(rows, sparse=sparse), setting.sizes)
    parts = rows.split(setting.sizes)
    bag = nn.EmbeddingBag.from_pretrained(rows, False, mode="sum", sparse=sparse)
    found: dict[str, Competitor] = {
        "embedlayer": (table, table),
        LOOK_UPS: added([nn.Embedding.from_pretrained(each, False, sparse=sparse) for each in parts]),
        "nn.EmbeddingBag": (bag, lambda ids: bag(ids + table.offsets)),
    }
    if sparse:
        found["K row-sparse look-ups"] = added([table_over(each, sparse=True) for each in parts])
    return found


def measure(setting: Setting, work: str) -> list[Row]:
    torch.manual_seed(0)
    rows = torch.empty(sum(setting.sizes), setting.embed_dim).normal_(std=0.02)
    ids = torch.stack([torch.randint(size, (setting.tokens,)) for size in setting.sizes], -1)
    upstream = torch.full((setting.tokens, setting.embed_dim), 1e-3)

    def step(module: nn.Module, function: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def run() -> None:
            with torch.set_grad_enabled(work != "forward"):
                sums = function(ids)
            if work != "forward":
                sums.backward(upstream)
                module.zero_grad()

        return run

    steps = {name: step(*each) for name, each in competitors(setting, rows, sparse=work == "row-sparse").items()}
    times = time_alternately(steps, rounds=5)
    base = float(times[LOOK_UPS]["time_ms"])
    return [
        {
            "competitor": name,
            "model": setting.model,
            "streams": len(setting.sizes),
            "embed_dim": setting.embed_dim,
            "tokens": setting.tokens,
            "dtype": "float32",
            "work": work,
            **spread,
            "times_look_ups": round(float(spread["time_ms"]) / base, 2),
        }
        for name, spread in times.items()
    ]


def run() -> list[Row]:
    return [row for setting in SETTINGS for work in WORK for row in measure(setting, work)]


CASE = Case("The input of K streams, beside K look-ups that are added", run)
