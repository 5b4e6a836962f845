"""The table of resumed runs in many-machines.md: `python docs/resumed_runs.py --write`.

Every way of dividing a model is trained on four ranks, saved by `distributed_state`, loaded on two ranks and on one
into fresh objects, and trained on. A cell says that the losses are those of one process that never stopped, or has the
number of the sentence that refuses the way before any training.
"""

import itertools
import math
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import embedlayer as el
from embedlayer.distributed import (
    distributed_data_parallel,
    distributed_state,
    load_distributed_state,
    shard_table,
    sharded_parameters,
)

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]
from processes import on_ranks  # noqa: E402
from tables import write_between_markers  # noqa: E402

PAGE = ROOT / "docs" / "many-machines.md"
V, D, STEPS, RANKS = 22, 4, 2, 4
GOES_ON = "goes on"


class Way(NamedTuple):
    """How the rest of the model is divided, what its table is, whether the head is tied to it, and the optimizer."""

    division: str
    table: str
    head: str
    optimizer: str


DIVISIONS = ("distributed_data_parallel", "fully_shard", "parallelize_module")
TABLES = ("whole", "whole, row-sparse", "shard_table", "shard_table, row-sparse", "RowwiseParallel")
HEADS = ("tied", "untied")
OPTIMIZERS = {"RowAdamW": el.RowAdamW, "AdamW": torch.optim.AdamW}
WAYS = [
    way
    for way in itertools.starmap(Way, itertools.product(DIVISIONS, TABLES, HEADS, OPTIMIZERS))
    if way.table != "RowwiseParallel" or way.division == "parallelize_module"
]


class Model(nn.Module):
    """A table, two linear layers and a head."""

    def __init__(self, way: Way, *, single: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"init_std": 1.0, "dtype": torch.float64, "row_sparse": "row-sparse" in way.table}
        table: el.TokenTable = el.TokenEmbedding(V, D, **options)
        rows: el.TokenTable = el.TokenEmbedding(V, D, **{**options, "row_sparse": False})
        if "shard_table" in way.table and not single:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            table, rows = shard_table(table, mesh), shard_table(rows, mesh)
        self.table = table
        self.mixing = nn.Sequential(nn.Linear(D, 8, dtype=torch.float64), nn.Linear(8, D, dtype=torch.float64))
        self.head = el.OutputHead(table if way.head == "tied" else rows)
        if way.head == "untied":
            self.rows = rows

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of texts, `(B, T)`."""
        return self.head.loss(self.mixing(self.table(ids[:, :-1])), ids[:, 1:])


class Run:
    """A model, wrapped as its way says, and its optimizer.

    Args:
        way: The way.
        single: Whether one process has the whole model.
    """

    def __init__(self, way: Way, *, single: bool = False) -> None:
        self.model = Model(way, single=single)
        self.wrapped: Any = self.model
        self.has_all_texts = single or way.division == "parallelize_module"
        mesh = None if single else init_device_mesh("cpu", (dist.get_world_size(),))
        if mesh is not None and way.division == "distributed_data_parallel":
            self.wrapped = distributed_data_parallel(self.model)
        elif mesh is not None and way.division == "fully_shard":
            self.wrapped = fully_shard(self.model, mesh=mesh, ignored_params=sharded_parameters(self.model))
        elif mesh is not None:
            plan: dict[str, Any] = {"mixing.0": ColwiseParallel(), "mixing.1": RowwiseParallel()}
            if way.table == "RowwiseParallel":
                names = ("table", "rows") if way.head == "untied" else ("table",)
                plan |= {name: RowwiseParallel(input_layouts=Replicate()) for name in names}
            parallelize_module(self.model, mesh, plan)
        self.optimizer = OPTIMIZERS[way.optimizer](self.model.parameters(), lr=0.05)

    def train(self, start: int) -> list[float]:
        """Train some steps, and return the mean loss over all ranks of each."""
        losses = []
        for step in range(start, start + STEPS):
            ids = torch.randint(0, V, (RANKS, 9), generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            texts = ids if self.has_all_texts else ids[dist.get_rank() :: dist.get_world_size()]
            loss = self.wrapped(texts)
            loss.backward()
            self.optimizer.step()
            mean = loss.detach().clone()
            if not self.has_all_texts:
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            losses.append(mean.item())
        return losses

    def load(self, folder: str, *, single: bool = False) -> None:
        """Load what `saved` wrote."""
        state = distributed_state(self.model, self.optimizer)
        dcp.load(state, checkpoint_id=folder, no_dist=single)
        load_distributed_state(self.model, self.optimizer, state)


def saved(folder: str, ways: list[Way]) -> list[list[float] | str]:
    """Return the losses before and after each save, or the sentence that refuses the way; of one of four ranks."""
    results: list[list[float] | str] = []
    for way in ways:
        before: list[float] = []
        try:
            run = Run(way)
            before = run.train(0)
        except (el.EmbedLayerError, RuntimeError) as error:
            results.append(" ".join(re.sub(r" \((\d+, )+\d+\)", "", str(error)).split()))
            continue
        dcp.save(distributed_state(run.model, run.optimizer), checkpoint_id=f"{folder}/{WAYS.index(way)}")
        results.append([*before, *run.train(STEPS)])
    return results


def resumed(folder: str, ways: list[Way]) -> list[list[float]]:
    """Return the losses of each way in fresh objects that loaded its save; of one of two ranks."""
    results = []
    for way in ways:
        run = Run(way)
        run.load(f"{folder}/{WAYS.index(way)}")
        results.append(run.train(STEPS))
    return results


def measured(ways: Iterable[Way], folder: str) -> dict[Way, str]:
    """Return for each way `GOES_ON`, the sentence that refuses it, or what differs."""
    ways = list(ways)
    before = on_ranks(RANKS, saved, folder, ways)
    found = dict(zip(ways, before[0], strict=True))
    going = [way for way in ways if not isinstance(found[way], str)]
    after = on_ranks(2, resumed, folder, going)
    outcomes = {way: str(found[way]) for way in ways}
    for place, way in enumerate(going):
        whole = Run(way, single=True)
        expected = [*whole.train(0), *whole.train(STEPS)]
        alone = Run(way, single=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            alone.load(f"{folder}/{WAYS.index(way)}", single=True)
        sides = [*(rank[ways.index(way)] for rank in before), *(expected[:STEPS] + rank[place] for rank in after)]
        sides.append(expected[:STEPS] + alone.train(STEPS))
        close = all(
            math.isclose(loss, other, rel_tol=1e-6)
            for side in sides
            for loss, other in zip(side, expected, strict=True)
        )
        outcomes[way] = GOES_ON if close else f"differs: {sides} from {expected}"
    return outcomes


COLUMNS = list(itertools.product(HEADS, OPTIMIZERS))


def markdown(results: Mapping[Way, str]) -> str:
    """Return the table, and below it the numbered reasons."""
    reasons = list(dict.fromkeys(text for text in results.values() if text != GOES_ON))
    titles = [f"{head}, {optimizer}" for head, optimizer in COLUMNS]
    lines = [f"| rest of the model | table | {' | '.join(titles)} |", "|---" * (2 + len(COLUMNS)) + "|"]
    for division, table in dict.fromkeys((way.division, way.table) for way in WAYS):
        cells = [results[Way(division, table, *column)] for column in COLUMNS]
        shown = [cell if cell == GOES_ON else str(reasons.index(cell) + 1) for cell in cells]
        lines.append(f"| {division} | {table} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)), ""])


def read_results() -> dict[Way, str]:
    """Return what `markdown` made the table and the reasons of, from the text of the page."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- resumed-runs:")
    part = rest.partition("<!-- end of resumed-runs -->")[0]
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", part, re.MULTILINE))
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")][1:]
    return {
        Way(division, table, *column): cell if cell == GOES_ON else reasons[cell]
        for division, table, *cells in rows
        for column, cell in zip(COLUMNS, cells, strict=True)
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        text = markdown(measured(WAYS, temporary))
    print(text)
    if "--write" in sys.argv:
        write_between_markers(PAGE, "resumed-runs", text)
