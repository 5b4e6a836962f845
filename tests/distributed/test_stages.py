"""Tied ends over pipeline stages against one process, with the schedules of `torch.distributed.pipelining`."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from covering import LONG
from processes import PRELOADED, on_ranks
from safetensors import safe_open
from sharded_tensors import full
from together import together
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from embedlayer import FactorizedEmbedding, OutputHead, RowAdamW, RowSparseEmbedding, TokenEmbedding, clip_grad_norm_
from embedlayer.core.errors import PeerError, SizeError, StaleRowsError, VocabularyError
from embedlayer.distributed import (
    distributed_data_parallel,
    distributed_state,
    load_distributed_state,
    register_fsdp_methods,
    shard_table,
    tie_stages,
)
from embedlayer.tables.table import TokenTable
from embedlayer.vocab import RandomInit
from embedlayer.vocab.operations import edit_vocabulary

PRELOADED += [
    *("embedlayer.integrations.fsdp", "embedlayer.distributed.state", "embedlayer.vocab.operations"),
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining"),
]

V, D, TEXTS, MICROBATCHES, STEPS, LAYERS = 23, 4, 8, 4, 2, 4
SCHEDULES = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
}
OPTIMIZERS = {"RowAdamW": RowAdamW, "AdamW": torch.optim.AdamW}


class Way(NamedTuple):
    """How a model is trained: schedule, optimizer, table, batches of a step, and data parallelism of the stages."""

    schedule: str = "1F1B"
    optimizer: str = "RowAdamW"
    table: str = "dense"
    batches: int = 1
    data: str = "none"


def table_of(kind: str) -> TokenTable:
    options: dict[str, Any] = {"padding_idx": 0, "dtype": torch.float64}
    return FactorizedEmbedding(V, D, 2, **options) if kind == "factorized" else TokenEmbedding(V, D, **options)


class Model(nn.Module):
    """A table, layers, a norm and a tied head; or those of the layers `first` to `last - 1`."""

    def __init__(self, kind: str = "dense", first: int = 0, last: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = table_of(kind)
        layers = {str(number): nn.Linear(D, D, dtype=torch.float64) for number in range(LAYERS)}
        self.is_first, self.is_last = first == 0, last == LAYERS
        if self.is_first or self.is_last:
            self.table = table
        self.layers = nn.ModuleDict({name: layer for name, layer in layers.items() if first <= int(name) < last})
        if self.is_last:
            self.norm = nn.RMSNorm(D, dtype=torch.float64)
            self.head = OutputHead(self.table, bias=True, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x) if self.is_first else x
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return self.norm(x) if self.is_last else x


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, targets = torch.randint(0, V, (2, TEXTS, 5), generator=torch.Generator().manual_seed(step))
    return ids, targets


class Alone:
    """One process that has the whole model."""

    def __init__(self, way: Way) -> None:
        self.way, self.model = way, Model(way.table)
        self.optimizer = OPTIMIZERS[way.optimizer](self.model.parameters(), lr=0.05)

    def train(self, start: int = 0) -> list[float]:
        """Return the losses of each step, and its gradient norm."""
        numbers = []
        for step in range(start, start + STEPS):
            for number in range(self.way.batches):
                ids, targets = batch_of(10 * step + number)
                loss = self.model.head.loss(self.model(ids), targets) / self.way.batches
                loss.backward()
                numbers.append(float(loss.detach()))
            numbers.append(float(clip_grad_norm_(self.model.parameters(), 0.1)))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return numbers


class Pipelined:
    """The stages of this rank, on a mesh with the dimensions `dp` and `pp`."""

    def __init__(self, way: Way, ranks: int = 2) -> None:
        self.way = way
        torch.set_default_dtype(torch.float64)  # torch 2.9 starts with 8 bytes sent into one number of this dtype
        self.mesh = init_device_mesh("cpu", (dist.get_world_size() // ranks, ranks), mesh_dim_names=("dp", "pp"))
        pipeline = self.mesh["pp"]
        rank, per_rank = pipeline.get_local_rank(), 1 if way.schedule in ("GPipe", "1F1B") else 2
        count = ranks * per_rank
        numbers = range(rank, count, ranks)
        size = LAYERS // count
        self.parts = [Model(way.table, number * size, (number + 1) * size) for number in numbers]
        with torch.no_grad():
            for parameter in self.parts[-1].table.parameters() if rank == ranks - 1 else ():
                parameter.fill_(7)  # what tie_stages overwrites
        if way.data == "shard_table":
            for part in self.parts:
                if hasattr(part, "table"):
                    part.table = shard_table(part.table, self.mesh["dp"])
                if part.is_last:
                    part.head = OutputHead(part.table, bias=True, dtype=torch.float64)
        if way.data == "fully_shard":
            for part in self.parts:
                for each in [*([part.table] if hasattr(part, "table") else []), part]:
                    fully_shard(each, mesh=self.mesh["dp"])
                register_fsdp_methods(part)
        self.tied = tie_stages(self.parts if per_rank > 1 else self.parts[0], pipeline)
        modules: list[nn.Module] = list(self.parts)
        if way.data in ("distributed_data_parallel", "shard_table"):
            modules = [distributed_data_parallel(part, process_group=self.mesh.get_group("dp")) for part in self.parts]
        stages = [
            PipelineStage(module, number, count, torch.device("cpu"), group=pipeline.get_group())
            for module, number in zip(modules, numbers, strict=True)
        ]
        schedule: Any = SCHEDULES[way.schedule]
        self.schedule = schedule(stages if per_rank > 1 else stages[0], MICROBATCHES, self.loss, scale_grads=False)
        self.parameters = [parameter for part in self.parts for parameter in part.parameters()]
        self.optimizer = OPTIMIZERS[way.optimizer](self.parameters, lr=0.05)

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The share of a microbatch in the mean loss of a step."""
        return self.parts[-1].head.loss(hidden, targets) / (MICROBATCHES * self.way.batches)

    def train(self, start: int = 0) -> list[float]:
        numbers: list[float] = []
        replica, replicas = self.mesh["dp"].get_local_rank(), self.mesh["dp"].size()
        for step in range(start, start + STEPS):
            for number in range(self.way.batches):
                ids, targets = (each.tensor_split(replicas)[replica] for each in batch_of(10 * step + number))
                losses: list[torch.Tensor] = []
                arguments = (ids,) if self.parts[0].is_first else ()
                last = {"target": targets, "losses": losses} if self.parts[-1].is_last else {}
                self.schedule.step(*arguments, **last)
                mean = torch.stack(losses).sum().detach() if losses else torch.zeros((), dtype=torch.float64)
                dist.all_reduce(mean)
                numbers.append(float(mean / replicas))
            self.tied.sum_gradients()
            norm = clip_grad_norm_(self.parameters, 0.1, pp_mesh=self.mesh["pp"])
            numbers.append(float(norm))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return numbers

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters of this rank by name, whole."""
        states = [distributed_state(part, self.optimizer)["model"] for part in self.parts]
        return {name: full(value).clone() for state in states for name, value in state.items()}


def trained(ways: tuple[Way, ...], ranks: int = 2) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    results = []
    for way in ways:
        run = Pipelined(way, ranks)
        results.append((run.train(), run.tensors))
    return results


WAYS = (
    Way("1F1B", "AdamW", "factorized", 2),
    Way("interleaved", "RowAdamW", "factorized", 2),
    Way("zero bubble", "RowAdamW", "dense", 1),
    Way("GPipe", "AdamW", "dense", 2),
)


def require_equal(way: Way, results: list[Any]) -> None:
    alone = Alone(way)
    numbers = alone.train()
    expected = dict(alone.model.named_parameters())
    names = set()
    for found, tensors in results:
        assert found == pytest.approx(numbers, rel=1e-9), way
        names |= tensors.keys()
        for name, tensor in tensors.items():
            assert torch.allclose(tensor, expected[name], rtol=1e-9, atol=1e-12), (way, name)
    assert names == expected.keys()
    copies = [{n: t for n, t in tensors.items() if "table" in n} for _, tensors in results]
    copies = [each for each in copies if each]
    assert len(copies) > 1
    assert all(torch.equal(each[name], copies[0][name]) for each in copies for name in copies[0])


def test_two_stages_train_as_one_process() -> None:
    for way, *results in zip(WAYS, *together(2, CALLS, (trained, WAYS)), strict=True):
        require_equal(way, results)


@pytest.mark.parametrize(
    ("way", "stages"),
    [
        pytest.param(Way(optimizer="AdamW"), 4, id="four stages, two without the table"),
        pytest.param(Way(optimizer="AdamW", data="fully_shard"), 2, id="fully_shard"),
        pytest.param(Way(data="distributed_data_parallel"), 2, id="distributed_data_parallel", marks=LONG),
        pytest.param(Way(data="shard_table"), 2, id="shard_table", marks=LONG),
    ],
)
def test_four_ranks_train_as_one_process(way, stages) -> None:
    results = on_ranks(4, trained, (way,), stages)
    require_equal(way, [result for (result,) in results])


EDIT: dict[str, Any] = {"add": 2, "remove": [3, 7]}


def state_of(run: Any) -> tuple[dict[str, Any], list[Any]]:
    """The state of all parts for `dcp`, and that of each part, which shares its tensors."""
    parts = run.parts if isinstance(run, Pipelined) else [run.model]
    states = [distributed_state(part, run.optimizer) for part in parts]
    keys = ("model", "optimizer")
    return {key: {name: each for state in states for name, each in state[key].items()} for key in keys}, states


def load(run: Any, folder: str, **options: Any) -> None:
    whole, states = state_of(run)
    dcp.load(whole, storage_reader=dcp.HuggingFaceStorageReader(folder), **options)
    for part, state in zip(run.parts if isinstance(run, Pipelined) else [run.model], states, strict=True):
        load_distributed_state(part, run.optimizer, state)


def save(run: Any, folder: str) -> None:
    dcp.save(state_of(run)[0], storage_writer=dcp.HuggingFaceStorageWriter(folder, save_distributed=True))


SAVED = [Way(), Way("interleaved", "AdamW", "factorized")]


def first_half(folder: str) -> None:
    for number, way in enumerate(SAVED):
        run = Pipelined(way)
        run.train()
        save(run, f"{folder}/{number}")


def second_half(folder: str) -> list[Any]:
    """Go on from the checkpoint, then edit both copies, save and train on; and undo the edit of an earlier load."""
    results = []
    for number, way in enumerate(SAVED):
        run = Pipelined(way)
        load(run, f"{folder}/{number}")
        numbers = run.train(STEPS)
        part = run.parts[0 if run.parts[0].is_first else -1]
        before = run.tensors
        receipt = edit_vocabulary(part, **EDIT, optimizer=run.optimizer)
        receipt.undo(part, optimizer=run.optimizer)
        assert all(torch.equal(tensor, before[name]) for name, tensor in run.tensors.items())
        torch.manual_seed(1)
        edit_vocabulary(part, **EDIT, optimizer=run.optimizer)
        edited = run.tensors
        save(run, f"{folder}/{number}-edited")
        results.append((numbers, edited, run.train(2 * STEPS), run.tensors))
    return results


def test_a_checkpoint_of_two_stages_has_one_table_and_goes_on_edited_or_not_as_one_process(tmp_path) -> None:
    on_ranks(2, first_half, str(tmp_path))
    both = on_ranks(2, second_half, str(tmp_path))
    for number, way in enumerate(SAVED):
        alone, never_stopped = Alone(way), Alone(way)
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            load(alone, f"{tmp_path}/{number}", no_dist=True)
        never_stopped.train()
        numbers = never_stopped.train(STEPS)
        assert alone.train(STEPS) == pytest.approx(numbers, rel=1e-9)
        torch.manual_seed(1)
        edit_vocabulary(alone.model, **EDIT, optimizer=alone.optimizer)
        expected = {name: each.detach().clone() for name, each in alone.model.named_parameters()}
        after = alone.train(2 * STEPS)
        trained_on = dict(alone.model.named_parameters())
        for found, edited, found_after, tensors in (rank[number] for rank in both):
            assert found == pytest.approx(numbers, rel=1e-9)
            assert found_after == pytest.approx(after, rel=1e-9)
            for name in tensors:
                assert torch.allclose(edited[name], expected[name], rtol=1e-9, atol=1e-12), name
                assert torch.allclose(tensors[name], trained_on[name], rtol=1e-9, atol=1e-12), name
        ends = [{n: t for n, t in rank[number][3].items() if "table" in n} for rank in both]
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
        for folder in (f"{tmp_path}/{number}", f"{tmp_path}/{number}-edited"):
            names = [name for file in Path(folder).glob("*.safetensors") for name in tensor_names(file)]
            assert (
                len(names) == len(set(names)) == len(state_of(alone)[0]["model"]) + len(state_of(alone)[0]["optimizer"])
            )


def tensor_names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


class LookedUp(nn.Module):
    """A stage that looks a table up, as the first stages of an encoder and of a decoder do."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = RowSparseEmbedding(V, D, dtype=torch.float64, **options)


def sparse_steps() -> tuple[torch.Tensor, list[float]]:
    mesh, stage, norms = init_device_mesh("cpu", (2,)), LookedUp(), []
    tied, optimizer = tie_stages(stage, mesh), RowAdamW(stage.parameters(), lr=0.05)
    for step in range(STEPS):
        stage.table(batch_of(step)[dist.get_rank()]).square().sum().backward()
        tied.sum_gradients()
        norms.append(float(clip_grad_norm_(stage.parameters(), 0.1, pp_mesh=mesh)))
        optimizer.step()
        optimizer.zero_grad()
    return stage.table.rows(0, V), norms


def test_row_sparse_gradients_of_two_looked_up_copies_are_summed() -> None:
    alone, expected = LookedUp(), []
    optimizer = RowAdamW(alone.parameters(), lr=0.05)
    for step in range(STEPS):
        sum(alone.table(ids).square().sum() for ids in batch_of(step)).backward()
        expected.append(float(clip_grad_norm_(alone.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    (first, norms), (second, _) = together(2, CALLS, (sparse_steps,))
    assert norms == pytest.approx(expected, rel=1e-9)
    assert torch.equal(first, second)
    assert torch.allclose(first, alone.table.rows(0, V), rtol=1e-9)


def message_of(error: type[Exception], function: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(error) as caught:
        function(*arguments, **options)
    return str(caught.value)


def refusals() -> dict[str, str]:
    """What is refused before training, by name."""
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    of_layers = nn.ModuleDict({"layers": nn.ModuleDict({"0": nn.Linear(2, 2)})})
    with torch.device("meta"):
        on_meta = LookedUp()
    moved = LookedUp()
    tied = tie_stages(moved, mesh)
    fully_shard(moved, mesh=mesh)
    return {
        "layers of one name": message_of(SizeError, tie_stages, of_layers, mesh),
        "no table": message_of(SizeError, tie_stages, nn.ModuleDict({str(rank): LookedUp()}), mesh),
        "another kind": message_of(PeerError, tie_stages, LookedUp().float() if rank else LookedUp(), mesh),
        "two copies on a rank": message_of(SizeError, tie_stages, [LookedUp(), LookedUp()], mesh),
        "meta": message_of(SizeError, tie_stages, on_meta, mesh),
        "fully_shard after it": message_of(SizeError, tied.sum_gradients),
    }


def test_stages_that_cannot_be_tied_are_refused_by_name_on_all_ranks() -> None:
    for found in together(2, CALLS, (refusals,)):
        for name, words in {
            "layers of one name": "Ranks 0 and 1 both have layers.0.weight",
            "no table": "No table is on several pipeline stages",
            "another kind": "torch.float32",
            "two copies on a rank": "table.weight",
            "meta": "table.weight is on the meta device",
            "fully_shard after it": "table.weight was replaced",
        }.items():
            assert words in found[name]


def misuse() -> dict[str, str]:
    """What goes wrong in a loop that sums too late, twice or not at all, or edits one copy alone."""
    mesh, rank, stage = init_device_mesh("cpu", (2,)), dist.get_rank(), Model()
    stage.layers.clear()
    if rank:
        del stage.norm, stage.head
    tied = tie_stages(stage, mesh)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.05)

    def backward() -> None:
        stage.table(batch_of(rank)[0]).sum().backward()

    backward()
    found = {
        "clip": message_of(StaleRowsError, clip_grad_norm_, stage.parameters(), 1.0, pp_mesh=mesh),
        "clip of one stage": message_of(SizeError, clip_grad_norm_, stage.parameters(), 1.0),
        "step": message_of(StaleRowsError, optimizer.step),
    }
    tied.sum_gradients()
    found["backward"] = message_of(StaleRowsError, backward)
    before = stage.table.weight.detach().clone()
    clip_grad_norm_(stage.parameters(), 1.0, pp_mesh=mesh)
    optimizer.step()
    optimizer.zero_grad()
    distributed_state(stage, optimizer)
    assert not torch.equal(before, stage.table.weight)
    before = stage.table.weight.detach().clone()
    found["edit of one"] = message_of(PeerError, edit_vocabulary, stage, add=1, remove=[rank + 3], optimizer=optimizer)
    torch.manual_seed(rank)
    error = VocabularyError if rank else PeerError
    found["error on one"] = message_of(error, edit_vocabulary, stage, remove=[V if rank else 3], optimizer=optimizer)
    found["other draws"] = message_of(PeerError, edit_vocabulary, stage, add=1, init=RandomInit(), optimizer=optimizer)
    assert torch.equal(before, stage.table.weight)
    with torch.no_grad():
        stage.table.weight[3] += rank
    found["state"] = message_of(PeerError, distributed_state, stage, optimizer)
    return found


def test_copies_cannot_come_apart_unnoticed() -> None:
    for found in together(2, CALLS, (misuse,)):
        for name, words in {
            "clip": "The gradient of table.weight is that of one pipeline stage",
            "step": "The gradient of table.weight is that of one pipeline stage",
            "clip of one stage": "pp_mesh=mesh",
            "backward": "summed over the pipeline stages already",
            "edit of one": "the edited rows",
            "other draws": "the edited rows (if new rows are drawn",
            "state": "table.weight on the pipeline stages of ranks 0 and 1 differ (rows)",
        }.items():
            assert words in found[name]


CALLS = ((trained, WAYS), (sparse_steps,), (refusals,), (misuse,))
"""What runs by default on two ranks, which start once."""
