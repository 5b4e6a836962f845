"""Gradient clipping by the norm of dense, row-sparse and sharded gradients together."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from embedlayer.collectives import Collectives, ProcessGroup
from embedlayer.tables.sparse_gradient import coalesced, with_torch_functions


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients in place by `min(1, max_norm / (norm + 1e-6))`, where `norm` is taken over all of them
    together.

    The rows of a sharded table (`embedlayer.distributed.ShardedTable`) count on all ranks: with such a table every rank
    must call this function. The gradients of all other parameters must be the same on every process, as with
    `DistributedDataParallel`, or DTensors.

    Args:
        parameters: Parameters; those without a gradient are skipped.
        max_norm: Largest norm after clipping.
        norm_type: Order of the norm, as in `torch.linalg.vector_norm`; 2 for the Euclidean norm.
        error_if_nonfinite: Whether to raise an error if the norm is infinite or NaN.
        foreach: As in torch.

    Returns:
        The norm before clipping, a scalar.

    Raises:
        RuntimeError: `error_if_nonfinite` is set and the norm is not finite.

    Example:
        >>> table = TokenEmbedding(100, 8, row_sparse=True)
        >>> table(torch.tensor([1, 2])).sum().backward()
        >>> clip_grad_norm_(table.parameters(), max_norm=1.0)
        tensor(4.)

    Reference: `torch.nn.utils.clip_grad_norm_`, which returns the same for row-sparse tables in one process. It refuses
    the sparse gradients of `nn.Embedding(sparse=True)`, and does not sum over the rows of other ranks.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    replicated: list[Tensor] = []
    sharded: list[Tensor] = []
    group, device = None, None
    for parameter in parameters:
        if hasattr(parameter, "shard_group"):
            group, device = parameter.shard_group, parameter.device
        if parameter.grad is None:
            continue
        if parameter.grad.layout is torch.sparse_coo:
            parameter.grad = with_torch_functions(coalesced(parameter.grad))
        (sharded if hasattr(parameter, "shard_group") else replicated).append(parameter)
    if group is None:
        return torch.nn.utils.clip_grad_norm_(replicated, max_norm, norm_type, error_if_nonfinite, foreach)
    total = total_norm(replicated, sharded, norm_type, ProcessGroup(group), device, foreach)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"The norm of the gradients is {float(total)}, so they cannot be clipped to {max_norm:g}.")
    torch.nn.utils.clip_grads_with_norm_([_local(each) for each in replicated + sharded], max_norm, total, foreach)
    return total


def total_norm(
    replicated: list[Tensor],
    sharded: list[Tensor],
    norm_type: float,
    collectives: Collectives,
    device: Any,
    foreach: bool | None,
) -> Tensor:
    """Return the norm of the gradients of all parameters together, over all ranks, a scalar. All ranks must call it.

    Args:
        replicated: Parameters whose gradients are the same on every rank, or DTensors of `fully_shard`.
        sharded: Rows of sharded tables that this rank stores.
        norm_type: Order of the norm, such as 2 or infinity.
        collectives: Reduces the norm of the sharded rows over the ranks.
        device: Device of the result.
        foreach: As in torch.
    """
    whole = [parameter for parameter in replicated if not hasattr(parameter.grad, "full_tensor")]
    of_fsdp = [parameter for parameter in replicated if hasattr(parameter.grad, "full_tensor")]
    grads = ([each.grad for each in part if each.grad is not None] for part in (whole, of_fsdp, sharded))
    norms = [torch.nn.utils.get_total_norm(each, norm_type, foreach=foreach) for each in grads]
    totals = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms)
    first, second, part = (norm.to(device) for norm in totals)  # without gradients the norm is a scalar on the CPU
    if math.isinf(norm_type):
        return torch.maximum(torch.maximum(first, second), collectives.all_reduce(part, "max"))
    power = collectives.all_reduce(part**norm_type)
    total: Tensor = (first**norm_type + second**norm_type + power) ** (1 / norm_type)
    return total


def _local(parameter: Tensor) -> Tensor:
    """Return a tensor whose `grad` is this rank's part of the gradient, for a parameter with a DTensor gradient.

    The part shares memory with the gradient, so clipping it in place clips the gradient. Any other parameter is
    returned unchanged.
    """
    if not hasattr(parameter.grad, "to_local"):
        return parameter
    shard: Tensor = parameter.grad.to_local()  # type: ignore[union-attr]
    local = shard.detach()
    local.grad = shard
    return local
