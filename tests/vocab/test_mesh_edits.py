"""Edits of models over several dimensions of a mesh, and their checkpoints on other meshes, against one process.

`distributed/test_resume.py` has the same law for training on, over all ways of dividing a model.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import PRELOADED, on_ranks
from sharded_tensors import assert_same, edit_both, full, local, sharded_like, state_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import embedlayer as el
from embedlayer.distributed import distributed_state, load_distributed_state
from embedlayer.kernels import kernels_disabled
from embedlayer.vocab import MeanNoiseInit, RandomInit, edit_vocabulary

PRELOADED += ["torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
PRELOADED += ["embedlayer.vocab.operations", "transformers.models.llama.modeling_llama"]

V, D, RANKS = 29, 7, 4
EDITS: tuple[dict[str, Any], ...] = (
    {"add": 6, "remove": [1, 9, 28], "init": MeanNoiseInit(), "init_head": RandomInit()},
    {"keep": range(0, 28, 2)},
    {"remove": [3], "add": 1, "pad_to_multiple_of": 12},
)
AFTER = 32  # tokens after the first edit
IDS = torch.arange(8).view(2, 4)
BY_ROWS: dict[str, Any] = {"table": RowwiseParallel(input_layouts=Replicate())}
HEAD: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}


class Ends(nn.Module):
    """A table, a linear layer that is not sharded by `parallelize_module`, and a head."""

    def __init__(self, table: el.TokenTable, head: el.OutputHead | None = None) -> None:
        super().__init__()
        self.table, self.mixing = table, nn.Linear(D, D)
        self.head = head or el.OutputHead(vocab_size=table.vocab_size, embed_dim=D, bias=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.mixing(self.table(ids))).flatten(0, 1), ids.flatten())


def tied(size: int) -> Ends:
    table = el.TokenEmbedding(size, D, padding_idx=0)
    return Ends(table, el.OutputHead(table, bias=True))


def padded(size: int) -> Ends:
    return Ends(el.TokenEmbedding(size, D, padding_idx=0))


KINDS: dict[str, tuple[Callable[[int], Ends], dict[str, Any]]] = {
    "rows": (padded, BY_ROWS | HEAD),
    "columns": (
        lambda size: Ends(el.TokenEmbedding(size, D)),
        {"table": ColwiseParallel(output_layouts=Replicate()), "head": RowwiseParallel(input_layouts=Replicate())},
    ),
    # torch 2.9 looks up in one of two tables of this size only, if one has a padding row and the other has none
    "table alone": (padded, BY_ROWS),
    "tied": (tied, BY_ROWS | HEAD),
}
"""A model with a number of tokens, and how tensor parallelism shards it."""
MESHES: dict[str, dict[str, int]] = {
    "two dimensions": {"dp": 2, "tp": 2},
    "four by one": {"dp": 4, "tp": 1},
    "one by four": {"dp": 1, "tp": 4},
    "replicas": {"replicas": 2, "dp": 2},
    "replicas of two dimensions": {"replicas": 2, "dp": 1, "tp": 2},
}
CASES: dict[str, dict[str, tuple[int, ...]]] = {
    "two dimensions": {"rows": (0, 1), "columns": (0,)},
    "replicas": {"tied": (2,)},
    "replicas of two dimensions": {"table alone": (0,)},
}
"""Each edit and each way that rows are divided; several edits in a row for the first kind."""


@cache
def mesh_of(mesh_name: str) -> DeviceMesh:
    sizes = MESHES[mesh_name]
    return init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))


def shard(model: nn.Module, kind: str, mesh_name: str) -> nn.Module:
    mesh = mesh_of(mesh_name)
    if "tp" in MESHES[mesh_name]:
        parallelize_module(model, mesh["tp"], KINDS[kind][1])
    if data := tuple(name for name in MESHES[mesh_name] if name != "tp"):
        fully_shard(model, mesh=mesh[data])
    return model


def made(kind: str, mesh_name: str) -> tuple[Any, Any, Any, Any]:
    """A sharded model with moments and gradients, its optimizer, and a whole one with the same bits."""
    models: list[Any] = []
    for is_sharded in (True, False):
        torch.manual_seed(0)
        model = KINDS[kind][0](V)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter)
        sharded = shard(model, kind, mesh_name) if is_sharded else model
        # One operator on DTensors in place of seven; it takes no plain tensors beside them.
        optimizer = torch.optim.AdamW(sharded.parameters(), 0.05, fused="dp" in MESHES[mesh_name])
        for parameter in model.parameters():
            values = local(parameter)
            state = {"exp_avg": values / 2, "exp_avg_sq": values.square(), "grad": values * 3}
            state = {key: sharded_like(parameter, value) for key, value in state.items()}
            parameter.grad = state.pop("grad")
            optimizer.state[parameter] = {"step": torch.tensor(1.0), **state}
        if is_sharded and "dp" in MESHES[mesh_name]:
            with torch.no_grad():
                sharded(IDS)  # at the first call FSDP takes the sizes
            sharded.reshard()  # what the call has gathered
        models += [model, optimizer]
    return (*models,)


@kernels_disabled()
def edits(folder: str) -> None:
    others = iter(["four by one", "one by four"])
    for mesh_name, kinds in CASES.items():
        for kind, numbers in kinds.items():
            goes_on = len(numbers) > 1  # edited again after an undo
            model, optimizer, whole, its = made(kind, mesh_name)
            before = state_of(whole, its, grads=False)
            for number in numbers:
                case, is_undone = f"{mesh_name}, {kind}, {number}", goes_on and number == 0
                receipt = edit_both((model, whole), (optimizer, its), EDITS[number], case, is_undone=is_undone)
                if mesh_name == "two dimensions" and number == 0:
                    move_to_another_mesh(kind, next(others), model, optimizer, f"{folder}/{kind}")
            losses = []
            for each, steps in ((model, optimizer), (whole, its)):
                losses.append(each(IDS))
                losses[-1].backward()
                if goes_on:
                    steps.step()
                losses[-1].detach_()
            torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-5)
            ours, theirs = state_of(model, optimizer), state_of(whole, its)
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
            if not goes_on:
                receipt.undo(model, optimizer=optimizer)
                assert_same(state_of(model, optimizer, grads=False), before, f"{mesh_name}, {kind}, undone")


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str, **options: Any) -> None:
    state = distributed_state(model, optimizer)
    dcp.load(state, checkpoint_id=folder, **options)
    load_distributed_state(model, optimizer, state)


def move_to_another_mesh(
    kind: str, mesh_name: str, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str
) -> None:
    dcp.save(distributed_state(model, optimizer), checkpoint_id=folder)
    saved = state_of(model, optimizer, grads=False)
    if dist.get_rank() == 0:
        torch.save(saved, f"{folder}.pt")
    other = shard(KINDS[kind][0](AFTER), kind, mesh_name)
    its = torch.optim.AdamW(other.parameters(), fused=True)
    load(other, its, folder)
    assert_same(state_of(other, its, grads=False), saved, f"{kind} on {mesh_name}")


def refusals() -> list[str]:
    refusal_of_one_mesh_for_all_dimensions()
    messages = []
    for mesh_name in ("two dimensions", "replicas"):
        model, optimizer, *_ = made("rows", mesh_name)
        before = state_of(model, optimizer, is_whole=False)
        is_last = dist.get_rank() == RANKS - 1  # of another replica than rank 0
        cases: list[tuple[type[Exception], dict[str, Any]]] = [
            (el.EmbedLayerError, {"remove": [V if is_last else 5]}),
            (el.PeerError, {"remove": [6 if is_last else 5]}),
            (el.SizeError, {"keep": [0, 2] if mesh_name == "two dimensions" else [0]}),
            (el.SizeError, {"add": 1, "optimizer": torch.optim.AdamW([nn.Parameter(torch.ones(1))])}),
        ]
        for error, options in cases:
            with pytest.raises(error) as caught:
                edit_vocabulary(model, **{"optimizer": optimizer, **options})
            messages.append(f"{type(caught.value).__name__}: {caught.value}")
            assert_same(state_of(model, optimizer, is_whole=False), before, messages[-1])
    return messages


def refusal_of_one_mesh_for_all_dimensions() -> None:
    dims = getattr(torch.distributed.fsdp, "DataParallelMeshDims", None)
    if dims is None:  # before torch 2.12
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = padded(V)
    for part in model.modules():
        for name, parameter in part.named_parameters(recurse=False):
            placements = [Replicate(), Shard(0) if part is model.get_submodule("table") else Replicate()]
            setattr(part, name, nn.Parameter(distribute_tensor(parameter, mesh, placements)))
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims(shard="dp"))
    before = {name: full(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(el.SizeError, match="it was called with dp_mesh_dims. Edit the model before fully_shard"):
        edit_vocabulary(model, add=1)
    edit_vocabulary(model, add=1, remove=[5])
    edited = {name: full(parameter) for name, parameter in model.named_parameters()}
    assert torch.equal(edited["table.weight"][5 : V - 1], before["table.weight"][6:])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_models_over_dimensions_of_a_mesh_are_edited_saved_and_moved_as_whole_ones(tmp_path) -> None:
    on_ranks(RANKS, edits, str(tmp_path))
    for name in CASES["two dimensions"]:
        model = KINDS[name][0](AFTER)
        optimizer = torch.optim.AdamW(model.parameters())
        load(model, optimizer, str(tmp_path / name), no_dist=True)
        saved = torch.load(f"{tmp_path / name}.pt", weights_only=True)
        assert_same(state_of(model, optimizer, grads=False), saved, name)


def test_a_refusal_on_one_rank_changes_nothing_on_any_rank_of_the_mesh() -> None:
    messages = on_ranks(RANKS, refusals)
    reason = messages[3][0].partition(": ")[2]
    assert messages[0][0] == f"PeerError: Rank 3 refused, so nothing was changed on any: {reason}"
    for first, last in zip(messages[0], messages[3], strict=True):
        assert first == last or "Rank 3 refused" in first, first
    assert sum("leave no row for one of 4 ranks" in each for each in messages[0]) == 1
