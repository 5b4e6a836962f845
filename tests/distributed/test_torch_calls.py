"""Calls of torch on a sharded table are those of the whole table on all ranks, or refuse by name.

Two processes train a table sharded over them beside a linear layer that both have, once on their own halves of a batch
and once in one process on all of it.
"""

import math
import os

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch import nn
from torch.distributed.checkpoint import state_dict as state_dicts
from torch.distributed.device_mesh import init_device_mesh

import embedlayer as el
from embedlayer.distributed import distributed_data_parallel, shard_table

V, D = 21, 4
IDS = torch.randint(0, V, (2, 5), generator=torch.Generator().manual_seed(0))
CLIPS = ("torch", "accelerate", "ours")


class Model(nn.Module):
    def __init__(self, *, row_sparse: bool, sharded: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = el.TokenEmbedding(V, D, init_std=1.0, row_sparse=row_sparse)
        self.table = shard_table(table, init_device_mesh("cpu", (2,))) if sharded else table
        self.linear = nn.Linear(D, D)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.table(ids)).square().sum()


def clipped(name: str, model: nn.Module, norm_type: float) -> torch.Tensor:
    if name == "ours":
        return el.clip_grad_norm_(model.parameters(), 0.1, norm_type)
    if name == "torch":
        return nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
    from accelerate import Accelerator

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # read, and not used: the ranks have met
    return Accelerator(cpu=True).clip_grad_norm_(model.parameters(), 0.1, norm_type)


def trained(name: str, norm_type: float, row_sparse: bool, sharded: bool) -> list[torch.Tensor]:
    model = Model(row_sparse=row_sparse, sharded=sharded)
    parallel = distributed_data_parallel(model) if sharded else model
    optimizer = el.RowAdamW(model.parameters(), lr=0.1)
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        (parallel(IDS[dist.get_rank()]) if sharded else model(IDS) / 2).backward()
        norms.append(clipped(name, model, norm_type))
        optimizer.step()
    return [*norms, model.table.rows(0, V).detach(), model.linear.weight.detach()]


def trained_in_all_ways() -> list[list[torch.Tensor]]:
    return [trained(*way, sharded=True) for way in WAYS]


WAYS = [
    (name, norm_type, row_sparse) for name in CLIPS for norm_type in (2.0, math.inf) for row_sparse in (False, True)
]


def test_clipping_is_by_the_norm_of_all_ranks() -> None:
    pytest.importorskip("accelerate")
    expected = [trained("ours", *way[1:], sharded=False) for way in WAYS]
    for results in on_ranks(2, trained_in_all_ways):
        for result, tensors in zip(results, expected, strict=True):
            torch.testing.assert_close(result, tensors, rtol=1e-5, atol=1e-6)


def scaled_step(row_sparse: bool) -> tuple[float, torch.Tensor, torch.Tensor]:
    """The scale, the rows and the weight after a step in which a row of the second rank has an infinite gradient."""
    model = Model(row_sparse=row_sparse, sharded=True)
    parallel = distributed_data_parallel(model)
    optimizer, scaler = el.RowAdamW(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(parallel(IDS[dist.get_rank()])).backward()
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
    for scale, rows, weight in on_ranks(2, scaled_step, row_sparse):
        assert scale == 2.0
        assert torch.equal(rows, start.table.rows(0, V))
        assert torch.equal(weight, start.linear.weight)


def wrapped() -> str:
    model = Model(row_sparse=False, sharded=True)
    with pytest.raises(el.SizeError) as raised:
        nn.parallel.DistributedDataParallel(model)
    assert torch.equal(model.table.rows(0, V), Model(row_sparse=False, sharded=False).table.weight)
    distributed_data_parallel(model)
    with pytest.raises(el.SizeError):
        nn.parallel.DistributedDataParallel(model)
    return str(raised.value)


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
    return sorted(state_dicts.get_model_state_dict(model))


def test_torchs_states_of_optimizers_are_refused() -> None:
    for names in on_ranks(2, refused_states):
        assert names == ["linear.bias", "linear.weight", "table.weight"]


def test_plain_data_parallelism_is_refused_before_it_overwrites_rows() -> None:
    for message in on_ranks(2, wrapped):
        assert "embedlayer.distributed.distributed_data_parallel(model)" in message
