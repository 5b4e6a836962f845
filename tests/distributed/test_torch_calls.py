"""Calls of torch, accelerate and Lightning on our tables: right on all ranks, or refused.

Two processes train a table, sharded over them or whole on both, beside a linear layer that both have, once on their own
halves of a batch and once in one process on all of it.
"""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import LONG, covering
from processes import on_ranks
from together import together
from torch import nn
from torch.distributed.checkpoint import state_dict as state_dicts
from torch.distributed.device_mesh import init_device_mesh

import embedlayer as el
from embedlayer.distributed import distributed_data_parallel, shard_table

V, D, STEPS = 21, 4, 3
IDS = torch.randint(0, V, (2, 5), generator=torch.Generator().manual_seed(0))
CLIPS = ("torch", "accelerate", "Lightning", "ours")


class Model(nn.Module):
    def __init__(self, *, row_sparse: bool, sharded: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = (el.RowSparseEmbedding if row_sparse else el.TokenEmbedding)(V, D, init_std=1.0)
        self.table = shard_table(table, init_device_mesh("cpu", (2,))) if sharded else table
        self.linear = nn.Linear(D, D)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.table(ids)).square().sum((1, 2)).mean()


def accelerator() -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def wrapped(name: str, model: nn.Module, *, sharded: bool) -> Any:
    """The model as the documentation says to wrap it."""
    if name == "accelerate" and sharded:
        return accelerator().prepare_model(distributed_data_parallel(model), evaluation_mode=True)
    if name == "accelerate":
        return accelerator().prepare(model)
    return distributed_data_parallel(model) if sharded else nn.parallel.DistributedDataParallel(model)


def clipped(name: str, optimizer: torch.optim.Optimizer, norm_type: float) -> torch.Tensor:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if name == "accelerate":
        return accelerator().clip_grad_norm_(parameters, 0.1, norm_type)
    if name == "Lightning":  # `clip_grad_by_norm` of its precision plugins
        return nn.utils.clip_grad_norm_((parameter for parameter in parameters), 0.1, norm_type)
    return (el if name == "ours" else nn.utils).clip_grad_norm_(parameters, 0.1, norm_type)


def trained(
    name: str, norm_type: float, row_sparse: bool, sharded: bool, *, single: bool = False
) -> list[torch.Tensor]:
    model = Model(row_sparse=row_sparse, sharded=sharded and not single)
    parallel = model if single else wrapped(name, model, sharded=sharded)
    optimizer: Any = el.RowAdamW(model.parameters(), lr=0.1)
    if name == "accelerate" and not single:
        optimizer = accelerator().prepare(optimizer)
    norms = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        ids = IDS if single else IDS[dist.get_rank() :][:1]
        if name == "torch" and not single:  # accumulated over two parts, of which the second is reduced
            with parallel.no_sync():
                (parallel(ids) / 4).backward()
            (parallel(ids) * 3 / 4).backward()
        else:
            parallel(ids).backward()
        norms.append(clipped("ours" if single else name, optimizer, norm_type))
        optimizer.step()
    return [*norms, model.table.rows(0, V).detach().clone(), model.linear.weight.detach()]


def trained_in_all_ways(ways: tuple[Any, ...]) -> list[list[torch.Tensor]]:
    return [trained(*way) for way in ways]


WAYS = list(itertools.product(CLIPS, (2.0, math.inf), (False, True), (False, True)))
ALWAYS = covering(WAYS, [(0, 3), (1, 2, 3)])


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(tuple(way for way in WAYS if way in ALWAYS), id="covering"),
        pytest.param(tuple(way for way in WAYS if way not in ALWAYS), id="the others", marks=LONG),
    ],
)
def test_clipping_is_by_the_norm_of_all_ranks(ways) -> None:
    pytest.importorskip("accelerate")
    expected = [trained(*way, single=True) for way in ways]
    for results in on_ranks(2, trained_in_all_ways, ways):
        for result, tensors in zip(results, expected, strict=True):
            torch.testing.assert_close(result, tensors, rtol=1e-5, atol=1e-6)


def scaled_step(row_sparse: bool) -> tuple[float, torch.Tensor, torch.Tensor]:
    """The scale, the rows and the weight after a step in which a row of the second rank has an infinite gradient."""
    model = Model(row_sparse=row_sparse, sharded=True)
    parallel = distributed_data_parallel(model)
    optimizer, scaler = el.RowAdamW(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(parallel(IDS[dist.get_rank() :][:1])).backward()
    if dist.get_rank() == 1:
        grad = model.table.weight.grad
        (grad._values() if grad.is_sparse else grad)[0] = math.inf
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), model.table.rows(0, V).detach(), model.linear.weight.detach()


@pytest.mark.parametrize("row_sparse", [False, True])
def test_an_infinity_on_one_rank_makes_all_skip_the_step(row_sparse) -> None:
    start = Model(row_sparse=row_sparse, sharded=False)
    for scale, rows, weight in together(2, CALLS, (scaled_step, row_sparse)):
        assert scale == 2.0
        assert torch.equal(rows, start.table.rows(0, V))
        assert torch.equal(weight, start.linear.weight)


def refused_states() -> list[str]:
    model = Model(row_sparse=False, sharded=True)
    for optimizer in (el.RowAdamW(model.parameters()), torch.optim.AdamW(model.parameters())):
        for call in (
            lambda: state_dicts.get_state_dict(model, optimizer),  # noqa: B023
            lambda: state_dicts.get_optimizer_state_dict(model, optimizer),  # noqa: B023
            lambda: state_dicts.set_state_dict(model, optimizer, model_state_dict={}, optim_state_dict={}),  # noqa: B023
            lambda: state_dicts.set_optimizer_state_dict(model, optimizer, {"state": {}}),  # noqa: B023
        ):
            with pytest.raises(el.SizeError, match="distributed_state.*get_model_state_dict is right"):
                call()
    rows = el.RowAdamW(model.parameters())
    states = [rows.state_dict()]
    dist.broadcast_object_list(states, src=0)  # as a file of rank 0 that all load
    if dist.get_rank():
        with pytest.raises(el.CheckpointError, match="rows of rank 0 alone, and here are those of rank 1"):
            rows.load_state_dict(states[0])
    rows.load_state_dict(rows.state_dict())
    return sorted(state_dicts.get_model_state_dict(model))


def test_torchs_states_of_optimizers_are_refused() -> None:
    for names in together(2, CALLS, (refused_states,)):
        assert names == ["linear.bias", "linear.weight", "table.weight"]


CALLS = ((scaled_step, False), (scaled_step, True), (refused_states,))


def refused_calls(folder: str) -> dict[str, str]:
    """What each call says that would overwrite rows, or save those of one rank; afterwards the rows are as before."""
    from safetensors.torch import save_model
    from torch.distributed._composable import replicate
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = Model(row_sparse=False, sharded=True)
    state = f"{folder}/state.pt"
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), state)
    dist.barrier()
    adamw: Any = torch.optim.AdamW
    replicated = replicate(model)
    calls = {
        "DistributedDataParallel": lambda: nn.parallel.DistributedDataParallel(model),
        "DistributedDataParallel after ours": lambda: nn.parallel.DistributedDataParallel(
            distributed_data_parallel(model)
        ),
        "replicate": lambda: replicated(IDS),
        "FullyShardedDataParallel": lambda: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
        "ZeroRedundancyOptimizer": lambda: ZeroRedundancyOptimizer(model.parameters(), adamw),
        "PeriodicModelAverager": lambda: PeriodicModelAverager(period=2).average_parameters(model.parameters()),
        "accelerate": lambda: accelerator().prepare(model),
        "accelerate, of ours": lambda: accelerator().prepare(distributed_data_parallel(model)),
        "save_model of accelerate": lambda: accelerator().save_model(model, folder),
        "save_state of accelerate": lambda: prepared(model).save_state(folder),
        "save_model of safetensors": lambda: save_model(model, f"{folder}/model.safetensors"),
    }
    if dist.get_rank() == 1:
        calls["a state that rank 0 saved"] = lambda: model.load_state_dict(torch.load(state, weights_only=False))
    said = {}
    for name, call in calls.items():
        with pytest.raises(el.EmbedLayerError) as raised:
            call()
        said[name] = str(raised.value)
    assert torch.equal(model.table.rows(0, V), Model(row_sparse=False, sharded=False).table.weight)
    return said


def prepared(model: nn.Module) -> Any:
    found = accelerator()
    found.prepare_model(distributed_data_parallel(model), evaluation_mode=True)
    return found


def test_calls_that_would_overwrite_rows_or_save_those_of_one_rank_are_refused(tmp_path) -> None:
    pytest.importorskip("accelerate")
    wrapped = ("replicate", "accelerate", "accelerate, of ours", "DistributedDataParallel")
    advice = dict.fromkeys((*wrapped, "DistributedDataParallel after ours"), "distributed_data_parallel(model)")
    advice |= {"FullyShardedDataParallel": "Use fully_shard(model, "}
    advice |= dict.fromkeys(("ZeroRedundancyOptimizer", "PeriodicModelAverager"), "an optimizer of their own")
    for results in on_ranks(2, refused_calls, str(tmp_path)):
        for name, said in results.items():
            assert advice.get(name, "embedlayer.distributed.distributed_state") in said, name
