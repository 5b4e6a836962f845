"""Model and optimizer in the terms of `torch.distributed.checkpoint`: any number of processes saves, any other loads.

With torch's writer of safetensors nothing is pickled, neither in the files nor beside them:

    dcp.save(
        distributed_state(model, optimizer), storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True)
    )
    state = distributed_state(model, optimizer)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    load_distributed_state(model, optimizer, state)

Both are in `torch.distributed.checkpoint`. Give each save a folder of its own: a shard of another save that is left in
the folder is read as a part of this one. (torch's default storage works as well; its `.metadata` is a pickle.)
Between loading and saving, `edit_vocabulary(model, ..., optimizer=optimizer)` changes the vocabulary.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedlayer.distributed.sharded import ShardedTable
from embedlayer.optim.row_adamw import RowAdamW, is_row_sparse

MOMENTS = ("exp_avg", "exp_avg_sq")


def distributed_state(model: nn.Module, optimizer: RowAdamW) -> dict[str, dict[str, Any]]:
    """`{"model": ..., "optimizer": ...}`: plain tensors, and DTensors of what is divided, by the names of whole tables.

    Rows that are behind are brought up to date, as in `state_dict()`. Moments that do not exist yet are made, as zeros.
    """
    optimizer.flush()
    moments: dict[str, Tensor] = {}
    for name, parameter, table in trained_parameters(model):
        state = optimizer.moments(parameter)
        moments[f"{name}.step"] = state["step"]
        for key in MOMENTS:
            moments[f"{name}.{key}"] = state[key] if table is None else table.as_dtensor(state[key])
    return {"model": model.state_dict(), "optimizer": moments}


def load_distributed_state(model: nn.Module, optimizer: RowAdamW, state: dict[str, dict[str, Any]]) -> None:
    """Continue from a `distributed_state` into which a checkpoint was read.

    Raises:
        KeyError: Something is missing.
    """
    model.load_state_dict(state["model"])
    for name, parameter, _ in trained_parameters(model):
        for key, value in optimizer.moments(parameter).items():
            found = state["optimizer"][f"{name}.{key}"]
            value.copy_(to_local(found))
        if is_row_sparse(parameter):
            parameter.row_ledger.detach()  # type: ignore[attr-defined]


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ShardedTable | None]]:
    """Each trained parameter, its name in an undivided model, and the table whose rows it is a part of, if any."""
    tables = list(sharded_tables(model))
    named = {
        parameter: ".".join(filter(None, (prefix, name)))
        for prefix, table in tables
        for name, parameter in table.local.named_parameters()
    }
    owners = {parameter: table for _, table in tables for _, parameter in table.sharded_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield named.get(parameter, name), parameter, owners.get(parameter)


def sharded_tables(model: nn.Module) -> Iterator[tuple[str, ShardedTable]]:
    """Each divided table, and its name in an undivided model: a free head's rows are those of the head."""
    for name, module in model.named_modules():
        if isinstance(module, ShardedTable):
            yield name.removesuffix(".rows"), module


def to_local(tensor: Tensor) -> Tensor:
    """Return the shard of this rank if `tensor` is a DTensor, else `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
