"""Model and optimizer as a state for `torch.distributed.checkpoint`: N processes save, M processes load.

With torch's writer of safetensors no file is a pickle:

    dcp.save(
        distributed_state(model, optimizer), storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True)
    )
    state = distributed_state(model, optimizer)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    load_distributed_state(model, optimizer, state)

Both are in `torch.distributed.checkpoint`. Use a new folder for each save: torch reads the shards of an earlier save in
the folder as parts of this one. (torch's default storage works as well; its `.metadata` is a pickle.)
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
    """Return `{"model": ..., "optimizer": ...}` by the names of the unsharded model; DTensors where rows are sharded.

    Pending updates of rows are applied first, as in `state_dict()`. Moments that do not exist yet are created as zeros.
    """
    optimizer.apply_pending_updates()
    moments: dict[str, Tensor] = {}
    for name, parameter, table in trained_parameters(model):
        state = optimizer.moments(parameter)
        moments[f"{name}.step"] = state["step"]
        for key in MOMENTS:
            moments[f"{name}.{key}"] = state[key] if table is None else table.as_dtensor(state[key])
    return {"model": model.state_dict(), "optimizer": moments}


def load_distributed_state(model: nn.Module, optimizer: RowAdamW, state: dict[str, dict[str, Any]]) -> None:
    """Load a `distributed_state` into which a checkpoint was read, in place.

    Raises:
        KeyError: A moment of a parameter is missing in `state`.
    """
    model.load_state_dict(state["model"])
    for name, parameter, _ in trained_parameters(model):
        for key, value in optimizer.moments(parameter).items():
            found = state["optimizer"][f"{name}.{key}"]
            value.copy_(to_local(found))
        if is_row_sparse(parameter):
            parameter.pending_updates.detach()  # type: ignore[attr-defined]


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ShardedTable | None]]:
    """Yield each trained parameter with its name in the unsharded model, and its `ShardedTable` or `None`."""
    tables = list(sharded_tables(model))
    named = {
        parameter: ".".join(filter(None, (prefix, name)))
        for prefix, table in tables
        for name, parameter in table.local.named_parameters()
    }
    table_of = {parameter: table for _, table in tables for _, parameter in table.sharded_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield named.get(parameter, name), parameter, table_of.get(parameter)


def sharded_tables(model: nn.Module) -> Iterator[tuple[str, ShardedTable]]:
    """Yield each sharded table with its name in the unsharded model: that of the head for an untied head."""
    for name, module in model.named_modules():
        if isinstance(module, ShardedTable):
            yield name.removesuffix(".rows"), module


def to_local(tensor: Tensor) -> Tensor:
    """Return the shard of this rank if `tensor` is a DTensor, else `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
