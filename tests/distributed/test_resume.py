"""A run that `distributed_state` saved goes on in fresh objects, on as many ranks or on one, as if it had not ended.

A law over how the model is divided, what its table is, and the optimizer.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import embedlayer as el
from embedlayer.distributed import (
    distributed_data_parallel,
    distributed_state,
    load_distributed_state,
    shard_table,
    sharded_parameters,
)

V, D, STEPS = 22, 4, 3
WAYS = [
    *itertools.product(("ddp", "fsdp"), ("whole", "sharded"), (False, True), ("RowAdamW", "AdamW")),
]
"""How the rest of the model is divided, how the table is, whether the head is tied to it, and the optimizer."""


class Model(nn.Module):
    def __init__(self, *, sharded: bool, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        table: el.TokenTable
        rows: el.TokenTable
        table, rows = (el.TokenEmbedding(V, D, init_std=1.0, dtype=torch.float64) for _ in range(2))
        if sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            table, rows = shard_table(table, mesh), shard_table(rows, mesh)
        self.table, self.mixing = table, nn.Linear(D, D, dtype=torch.float64)
        self.head = el.OutputHead(table if tied else rows)
        if not tied:
            self.rows = rows

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head.loss(self.mixing(self.table(ids[:-1])), ids[1:])


def built(way: tuple[str, str, bool, str], *, single: bool) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    division, rows, tied, kind = way
    model = Model(sharded=rows == "sharded" and not single, tied=tied)
    wrapped: Any = model
    if not single and division == "ddp":
        wrapped = distributed_data_parallel(model)
    elif not single:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        wrapped = fully_shard(model, mesh=mesh, ignored_params=sharded_parameters(model))
    optimizer = {"RowAdamW": el.RowAdamW, "AdamW": torch.optim.AdamW}[kind](model.parameters(), lr=0.05)
    return model, wrapped, optimizer


def train(wrapped: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, single: bool) -> list[float]:
    losses = []
    for step in steps:
        ids = torch.randint(0, V, (2, 9), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        parts = ids if single else ids[dist.get_rank() :: dist.get_world_size()]
        loss = torch.stack([wrapped(row) for row in parts]).mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if not single:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(mean.item())
    return losses


def saved_and_resumed(folder: str) -> list[list[float]]:
    """The losses of each way before and after the save, in the same objects and in fresh ones."""
    found = []
    for number, way in enumerate(WAYS):
        model, wrapped, optimizer = built(way, single=False)
        before = train(wrapped, optimizer, range(STEPS), single=False)
        dcp.save(distributed_state(model, optimizer), checkpoint_id=f"{folder}/{number}")
        after = train(wrapped, optimizer, range(STEPS, 2 * STEPS), single=False)
        model, wrapped, optimizer = built(way, single=False)
        state = distributed_state(model, optimizer)
        dcp.load(state, checkpoint_id=f"{folder}/{number}")
        load_distributed_state(model, optimizer, state)
        found.append([*before, *after, *train(wrapped, optimizer, range(STEPS, 2 * STEPS), single=False)])
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_saved_run_goes_on_in_fresh_objects_on_two_ranks_and_on_one(tmp_path: Path) -> None:
    results = on_ranks(2, saved_and_resumed, str(tmp_path))
    for number, way in enumerate(WAYS):
        _, wrapped, optimizer = built(way, single=True)
        expected = train(wrapped, optimizer, range(2 * STEPS), single=True)
        model, wrapped, optimizer = built(way, single=True)
        state = distributed_state(model, optimizer)
        dcp.load(state, checkpoint_id=str(tmp_path / str(number)), no_dist=True)
        load_distributed_state(model, optimizer, state)
        alone = train(wrapped, optimizer, range(STEPS, 2 * STEPS), single=True)
        for losses in (*(result[number] for result in results), [*expected, *alone]):
            want = [*expected, *expected[STEPS:]]
            assert all(math.isclose(loss, other, rel_tol=1e-6) for loss, other in zip(losses, want, strict=True)), way
