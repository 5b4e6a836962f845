"""Model and optimizer as a state for `torch.distributed.checkpoint`: N processes save, M processes load.

With torch's writer of safetensors no file is a pickle:

    dcp.save(
        distributed_state(model, optimizer), storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True)
    )
    state = distributed_state(model, optimizer)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    load_distributed_state(model, optimizer, state)

Writer and reader are in `torch.distributed.checkpoint`. Use a new folder for each save: torch would read the shards of
an earlier save in the folder as parts of this one. (torch's default storage works as well; its `.metadata` is a
pickle.) Between loading and saving, `edit_vocabulary(model, ..., optimizer=optimizer)` may change the vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from embedlayer.core.errors import SizeError
from embedlayer.core.partitioned import local_shard
from embedlayer.distributed.sharded import trained_parameters
from embedlayer.distributed.stages import require_equal_copies, stage_copies
from embedlayer.optim.row_optimizer import RowOptimizer, is_row_sparse
from embedlayer.row_sparse.storage import RowsInMemory


def distributed_state(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return the state of model and optimizer as `{"model": {...}, "optimizer": {...}}`, for `dcp.save` and `dcp.load`.

    The names of the tensors are those of the unsharded model. Tensors with sharded rows are DTensors. Pending updates
    of rows are applied first, which changes the model. Moments that do not exist yet are created as zeros. A tensor of
    `tie_stages` is stored once: all stages have it under one name.

    Args:
        model: The model; parts of it may be sharded by `shard_table`, FSDP2 or tensor parallelism.
        optimizer: The optimizer of its parameters, ours or one of torch.

    Raises:
        SizeError: The model has a trained `MappedEmbedding`, into whose files `dcp.load` would read without its log.
        PeerError: The copies of a table on several pipeline stages differ.
    """
    for name, parameter, _ in trained_parameters(model):
        if is_row_sparse(parameter) and not isinstance(parameter.pending_updates.storage, RowsInMemory):  # type: ignore[attr-defined]
            raise SizeError(
                f"{name} has its rows in a folder of their own: save them with MappedEmbedding.checkpoint(), and the "
                f"rest of the model with its number."
            )
    if isinstance(optimizer, RowOptimizer):
        optimizer.apply_pending_updates()
    moments: dict[str, Tensor] = {}
    for name, parameter, table in trained_parameters(model):
        state = _moments(optimizer, parameter)
        for copy in stage_copies([parameter]):
            require_equal_copies(copy, state)
        for key, value in state.items():
            moments[f"{name}.{key}"] = value if table is None or key == "step" else table.as_dtensor(value)
    return {"model": model.state_dict(), "optimizer": moments}


def load_distributed_state(model: nn.Module, optimizer: Optimizer, state: dict[str, dict[str, Any]]) -> None:
    """Copy `state`, into which `dcp.load` read a checkpoint, to the model and the optimizer, in place.

    Args:
        model: The model, sharded as when `distributed_state` created `state`.
        optimizer: The optimizer of its parameters.
        state: The result of `distributed_state`, after `dcp.load`.

    Raises:
        KeyError: A moment of a parameter is missing in `state`.
        CheckpointError: The state is that of another rule or table.
    """
    model.load_state_dict(state["model"])
    for name, parameter, table in trained_parameters(model):
        moments = {key: state["optimizer"][f"{name}.{key}"] for key in _moments(optimizer, parameter)}
        if table is not None:  # those of other sharded parameters are DTensors, as the parameters are
            moments = {key: local_shard(value) for key, value in moments.items()}
        if isinstance(optimizer, RowOptimizer):
            optimizer.load_moments(parameter, moments)
        else:
            optimizer.state[parameter].update(moments)


def _moments(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's state of a parameter by key, created as zeros before the first step."""
    if isinstance(optimizer, RowOptimizer):
        return optimizer.moments(parameter)
    if not optimizer.state[parameter]:
        _create_state(optimizer)
    return {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}


def _create_state(optimizer: Optimizer) -> None:
    """Create the state of parameters that have none: by a step with zero gradients and without a learning rate."""
    groups = optimizer.param_groups
    new = [each for group in groups for each in group["params"] if each.requires_grad and not optimizer.state[each]]
    others = [each for group in groups for each in group["params"]]
    grads, rates = [each.grad for each in others], [group["lr"] for group in groups]
    try:
        for each in others:
            each.grad = None
        for each in new:
            each.grad = torch.zeros_like(each)
        for group in groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        optimizer.step()
    finally:
        for each, grad in zip(others, grads, strict=True):
            each.grad = grad
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
    for each in new:
        if isinstance(step := optimizer.state[each].get("step"), Tensor):
            step.zero_()
