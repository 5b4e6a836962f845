"""Training on divided tables, saved by some processes and continued by others, beside one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from embedlayer import OutputHead, RowAdamW, TokenEmbedding, clip_grad_norm_
from embedlayer.distributed.sharded import shard_table
from embedlayer.distributed.state import distributed_state, load_distributed_state

V, D, TOKENS, STEPS = 29, 4, 12, 6


def model_of(row_sparse: bool) -> nn.ModuleDict:
    torch.manual_seed(0)
    table = TokenEmbedding(V, D, padding_idx=1, row_sparse=row_sparse, dtype=torch.float64)
    rows = TokenEmbedding(V, D, padding_idx=1, dtype=torch.float64)
    mixing = nn.Linear(D, D, dtype=torch.float64)
    return nn.ModuleDict({"table": table, "mixing": mixing, "rows": rows})


def optimizer_of(model: nn.ModuleDict) -> RowAdamW:
    return RowAdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def train(model, optimizer, steps, *, rank=0, ranks=1) -> list[float]:
    norms = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids, targets = torch.randint(0, V, (2, TOKENS), generator=generator).tensor_split(ranks, dim=1)[rank]
        optimizer.zero_grad()
        hidden = model["mixing"](model["table"](ids))
        OutputHead(model["rows"]).loss(hidden, targets).backward()
        if ranks > 1:
            for parameter in model["mixing"].parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks
        norms.append(float(clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
    return norms


def divided(row_sparse: bool):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = model_of(row_sparse)
    for name in ("table", "rows"):
        model[name] = shard_table(model[name], mesh)
    return model, optimizer_of(model)


def first_half(folder: str) -> list[list[float]]:
    norms = []
    for row_sparse in (False, True):
        model, optimizer = divided(row_sparse)
        norms.append(train(model, optimizer, range(STEPS), rank=dist.get_rank(), ranks=dist.get_world_size()))
        dcp.save(distributed_state(model, optimizer), checkpoint_id=f"{folder}/{row_sparse}")
    return norms


def second_half(folder: str) -> list[torch.Tensor]:
    rows = []
    for row_sparse in (False, True):
        model, optimizer = divided(row_sparse)
        state = distributed_state(model, optimizer)
        dcp.load(state, checkpoint_id=f"{folder}/{row_sparse}")
        load_distributed_state(model, optimizer, state)
        train(model, optimizer, range(STEPS, 2 * STEPS), rank=dist.get_rank(), ranks=dist.get_world_size())
        rows += [model["table"].rows(0, V), model["rows"].rows(0, V), model["mixing"].weight.detach()]
    return rows


@pytest.mark.filterwarnings("ignore")
def test_two_processes_save_and_three_go_on_as_one_process_would(tmp_path: Path) -> None:
    norms = on_ranks(2, first_half, str(tmp_path))
    found = on_ranks(3, second_half, str(tmp_path))
    for place, row_sparse in enumerate((False, True)):
        model = model_of(row_sparse)
        optimizer = optimizer_of(model)
        assert norms[0][place] == pytest.approx(train(model, optimizer, range(STEPS)), rel=1e-9)
        alone = model_of(row_sparse)
        resumed = optimizer_of(alone)
        state = distributed_state(alone, resumed)
        dcp.load(state, checkpoint_id=str(tmp_path / str(row_sparse)), no_dist=True)
        load_distributed_state(alone, resumed, state)
        for each, its in ((model, optimizer), (alone, resumed)):
            train(each, its, range(STEPS, 2 * STEPS))
            theirs = [each["table"].rows(0, V), each["rows"].rows(0, V), each["mixing"].weight]
            for ours, expected in zip(found[0][3 * place : 3 * place + 3], theirs, strict=True):
                assert torch.allclose(ours, expected, rtol=1e-9, atol=1e-12)
