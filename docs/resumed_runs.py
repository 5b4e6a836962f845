"""The tables of resumed runs and of what is supported in many-machines.md: `python docs/resumed_runs.py --write`.

Every way of dividing a model is trained on four ranks, saved by `distributed_state`, edited, saved again, and undone;
what was saved first is loaded on two ranks and on one into fresh objects, and trained on. A cell says that the losses
are those of one process that never stopped and the edited state that of one process, bit for bit; or has the number of
the sentence that refuses the way before any training.
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
import torch.nn.functional as F
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
from embedlayer.vocab import MeanNoiseInit, Receipt, edit_vocabulary

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]
from processes import on_ranks  # noqa: E402
from tables import write_between_markers  # noqa: E402

PAGE = ROOT / "docs" / "many-machines.md"
V, D, STEPS, RANKS = 23, 4, 2, 4
GOES_ON = "goes on"
EDIT: dict[str, Any] = {"add": 6, "remove": [1, 9, 21], "init": MeanNoiseInit()}
EDITED_SIZE = V + 3


class Way(NamedTuple):
    """How the rest of the model is divided, what its table is, whether the head is tied to it, and the optimizer."""

    division: str
    table: str
    head: str
    optimizer: str


REPLICAS, TWO_DIMENSIONS = "fully_shard, replicas", "fully_shard, parallelize_module"
DIVISIONS = ("distributed_data_parallel", "fully_shard", REPLICAS, "parallelize_module", TWO_DIMENSIONS)
LOGITS = "RowwiseParallel, head ColwiseParallel"
BY_COLUMNS = "ColwiseParallel, head RowwiseParallel"
TABLES = ("whole", "whole, row-sparse", "shard_table", "shard_table, row-sparse", "RowwiseParallel", LOGITS, BY_COLUMNS)
HEADS = ("tied", "untied")
OPTIMIZERS = {"RowAdamW": el.RowAdamW, "AdamW": torch.optim.AdamW}
WAYS = [
    way
    for way in itertools.starmap(Way, itertools.product(DIVISIONS, TABLES, HEADS, OPTIMIZERS))
    if "wiseParallel" not in way.table or way.division in ("parallelize_module", TWO_DIMENSIONS)
]


class Model(nn.Module):
    """A table, two linear layers and a head."""

    def __init__(self, way: Way, *, single: bool, vocab_size: int = V) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"init_std": 1.0, "dtype": torch.float64}
        kind = el.RowSparseEmbedding if "row-sparse" in way.table else el.TokenEmbedding
        table: el.TokenTable = kind(vocab_size, D, **options)
        rows: el.TokenTable = el.TokenEmbedding(vocab_size, D, **options)
        if "shard_table" in way.table and not single:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            table, rows = shard_table(table, mesh), shard_table(rows, mesh)
        self.table = table
        self.mixing = nn.Sequential(nn.Linear(D, 8, dtype=torch.float64), nn.Linear(8, D, dtype=torch.float64))
        self.computes_logits = way.table in (LOGITS, BY_COLUMNS)
        if way.head == "tied":
            self.head = el.OutputHead(table)
        elif self.computes_logits:  # a head with a weight of its own, which `parallelize_module` can shard
            self.head = el.OutputHead(vocab_size=vocab_size, embed_dim=D, dtype=torch.float64)
        else:
            self.head = el.OutputHead(rows)
            self.rows = rows

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of texts, `(B, T)`."""
        hidden, targets = self.mixing(self.table(ids[:, :-1])), ids[:, 1:]
        if self.computes_logits:
            return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())
        return self.head.loss(hidden, targets)


class Run:
    """A model, wrapped as its way says, and its optimizer.

    Args:
        way: The way.
        single: Whether one process has the whole model.
    """

    def __init__(self, way: Way, *, single: bool = False, vocab_size: int = V) -> None:
        self.way, self.model = way, Model(way, single=single, vocab_size=vocab_size)
        self.wrapped: Any = self.model
        self.texts = slice(None)
        if not single:
            self.divide()
        self.optimizer = OPTIMIZERS[way.optimizer](self.model.parameters(), lr=0.05)

    def divide(self) -> None:
        """Divide the model over the ranks."""
        ranks = dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("outer", "inner"))
        every = init_device_mesh("cpu", (ranks,))
        division, table = self.way.division, self.way.table
        self.texts = slice(dist.get_rank(), None, ranks)
        if division == "distributed_data_parallel":
            self.wrapped = distributed_data_parallel(self.model)
        if "parallelize_module" in division:
            plan: dict[str, Any] = {"mixing.0": ColwiseParallel(), "mixing.1": RowwiseParallel()}
            by_rows, by_columns = (
                RowwiseParallel(input_layouts=Replicate()),
                ColwiseParallel(output_layouts=Replicate()),
            )
            if table == BY_COLUMNS:
                plan |= {"table": by_columns, "head": by_rows}
            elif "Rowwise" in table:
                plan |= {name: by_rows for name in ("table", "rows") if hasattr(self.model, name)}
                plan |= {"head": by_columns} if table == LOGITS else {}
            self.texts = slice(None)
            parallelize_module(self.model, mesh["inner"] if division == TWO_DIMENSIONS else every, plan)
        if "fully_shard" in division:
            over = {REPLICAS: mesh, TWO_DIMENSIONS: mesh["outer"]}.get(division, every)
            self.wrapped = fully_shard(self.model, mesh=over, ignored_params=sharded_parameters(self.model))
        if division == TWO_DIMENSIONS:
            self.texts = slice(mesh.get_local_rank("outer"), None, ranks // 2)

    def train(self, start: int) -> list[float]:
        """Train some steps, and return the mean loss over all ranks of each."""
        losses = []
        for step in range(start, start + STEPS):
            ids = torch.randint(0, V, (RANKS, 9), generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            loss = self.wrapped(ids[self.texts])
            loss.backward()
            self.optimizer.step()
            mean = loss.detach().clone()
            if dist.is_initialized():
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            losses.append(mean.item())
        return losses

    def edit(self) -> Receipt:
        """Add and remove tokens, with their rows, gradients and moments."""
        torch.manual_seed(7)  # whole tables are drawn on each rank, sharded ones by the first
        return edit_vocabulary(self.model, **EDIT, optimizer=self.optimizer)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters and moments by name."""
        state = distributed_state(self.model, self.optimizer)
        return {f"{part} {name}": value for part, values in state.items() for name, value in values.items()}

    def save(self, folder: str) -> None:
        """Save model and optimizer."""
        dcp.save(distributed_state(self.model, self.optimizer), checkpoint_id=folder)

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
        except (el.EmbedLayerError, RuntimeError, NotImplementedError) as error:
            results.append(" ".join(re.sub(r" \((\d+, )+\d+\)", "", str(error)).split()))
            continue
        run.save(f"{folder}/{WAYS.index(way)}")
        receipt = run.edit()
        run.save(f"{folder}/{WAYS.index(way)}-edited")
        receipt.undo(run.model, optimizer=run.optimizer)
        if way.division == "distributed_data_parallel":  # it is to be wrapped again after an edit
            run.divide()
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
        alone, editor = Run(way, single=True), Run(way, single=True)
        edited = Run(way, single=True, vocab_size=EDITED_SIZE)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            for run, name in ((alone, ""), (editor, ""), (edited, "-edited")):
                run.load(f"{folder}/{WAYS.index(way)}{name}", single=True)
        editor.edit()
        different = [name for name, value in edited.tensors().items() if not torch.equal(value, editor.tensors()[name])]
        sides = [*(rank[ways.index(way)] for rank in before), *(expected[:STEPS] + rank[place] for rank in after)]
        sides.append(expected[:STEPS] + alone.train(STEPS))
        close = all(
            math.isclose(loss, other, rel_tol=1e-6)
            for side in sides
            for loss, other in zip(side, expected, strict=True)
        )
        outcomes[way] = GOES_ON if close else f"differs: {sides} from {expected}"
        outcomes[way] = f"differs after an edit: {different}" if close and different else outcomes[way]
    return outcomes


class Law(NamedTuple):
    """What is compared with one process, or refused by name, on how many ranks, and by which test."""

    division: str
    supported: str
    refused: str
    ranks: str
    test: str


LAWS = (
    Law(
        "`shard_table`, `RowAdamW`",
        "training, clipping, saving, loading, edits",
        "a `MappedEmbedding` in `distributed_state`",
        "2, then 3 and 1",
        "tests/distributed/test_state.py",
    ),
    Law(
        "`fully_shard`, and `RowwiseParallel` alone",
        "edits and undo between steps, by the same objects",
        "gradients that are not reduced, hooks on a parameter whose rows change, `train_only_new`",
        "2",
        "tests/vocab/test_fsdp_edits.py",
    ),
    Law(
        "two dimensions of a mesh: `fully_shard` with `parallelize_module` or replicas; three: with both",
        "edits and undo of rows and columns on all ranks or none; saved on 2 x 2, loaded on 4 x 1, 1 x 4, 1",
        "placements that are no shards of rows or columns, a rank without a row, `dp_mesh_dims`",
        "4",
        "tests/vocab/test_mesh_edits.py",
    ),
    Law(
        "stages with one table: `tie_stages`, also with `distributed_data_parallel`, `fully_shard`, `shard_table`",
        "training by GPipe, 1F1B and interleaved schedules, clipping, saving, loading, edits on all stages or none",
        "steps and clipping before the gradients are summed, copies of different bits",
        "2 and 4, then 1",
        "tests/distributed/test_stages.py",
    ),
    Law(
        "shares of a sequence: `share_of`, contiguous and zigzag",
        "input embedding, halo of n-grams and convolution, loss and training with gathered keys and values",
        "lengths that the ranks do not divide",
        "2 and 4",
        "tests/distributed/test_sequence.py",
    ),
    Law(
        "DeepSpeed's ZeRO-3",
        "reading what `GatheredParameters` has gathered",
        "edits, `patch`, optimizers, clipping, sharding, the monitor, `distributed_state`",
        "1",
        "tests/core/test_partitioned.py",
    ),
)
"""Rows of the table of what is supported, beside those of `WAYS`, which `support` reads from their results."""


def support(results: Mapping[Way, str]) -> str:
    """Return the table of what is supported, refused, and tested on how many ranks."""
    laws = []
    for division in DIVISIONS:
        tables = {way.table: [] for way in WAYS if way.division == division}
        for way, outcome in results.items():
            tables.get(way.table, []).extend([outcome] if way.division == division else [])
        works = [table for table, outcomes in tables.items() if GOES_ON in outcomes]
        laws.append(
            Law(
                f"`{division}`",
                "training, edits and undo, saving, loading; table " + ", or ".join(f"`{table}`" for table in works),
                ", or ".join(f"`{table}`" for table in tables if table not in works),
                f"{RANKS}, then 2 and 1",
                "tests/distributed/test_resume.py",
            )
        )
    lines = ["| model divided by | equal to one process | refused by name | ranks | test |", "|---" * 5 + "|"]
    return "\n".join([*lines, *(f"| {' | '.join((*law[:4], f'`{law.test}`'))} |" for law in (*laws, *LAWS)), ""])


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
        results = measured(WAYS, temporary)
    print(markdown(results), support(results), sep="\n")
    if "--write" in sys.argv:
        write_between_markers(PAGE, "resumed-runs", markdown(results))
        write_between_markers(PAGE, "support", support(results))
