"""Gradient clipping by the norm of dense, row-sparse and sharded gradients together."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from embedlayer.collectives import ProcessGroup
from embedlayer.tables.sparse_gradient import coalesced, row_gradient, with_torch_functions


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients in place by `min(1, max_norm / (norm + 1e-6))`, where `norm` is that of all of them.

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

    Reference: `torch.nn.utils.clip_grad_norm_`, which returns the same for row-sparse tables in one process. Before
    torch 2.14 it refuses the sparse gradients of `nn.Embedding(sparse=True)`. It does not sum over the rows of other
    ranks: row-sparse gradients of a sharded table are an error there, and dense ones are clipped by the norm of a rank.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    replicated: list[Tensor] = []
    of_fsdp: list[Tensor] = []
    sharded: list[Tensor] = []
    group, device = None, None
    for parameter in parameters:
        if hasattr(parameter, "shard_group"):
            group, device = parameter.shard_group, parameter.device
        if parameter.grad is None:
            continue
        if parameter.grad.layout is torch.sparse_coo:
            parameter.grad = row_gradient(parameter, parameter.grad)
        is_sharded, is_of_fsdp = hasattr(parameter, "shard_group"), hasattr(parameter.grad, "full_tensor")
        (sharded if is_sharded else of_fsdp if is_of_fsdp else replicated).append(parameter)
    if group is None:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    def norm_of(some: list[Tensor]) -> Tensor:
        """Return the norm of the gradients of some parameters; of sharded ones, the norm of this rank's rows."""
        grads = [_rows_of_rank(parameter.grad) for parameter in some if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole.to(device)  # without gradients the norm is a scalar on the CPU

    first, second, rows = norm_of(replicated), norm_of(of_fsdp), norm_of(sharded)
    all_reduce = ProcessGroup(group).all_reduce
    if math.isinf(norm_type):
        total = torch.maximum(torch.maximum(first, second), all_reduce(rows, "max"))
    else:
        total = (first**norm_type + second**norm_type + all_reduce(rows**norm_type)) ** (1 / norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"The norm of the gradients is {float(total)}, so they cannot be clipped to {max_norm:g}.")
    every = [_local(parameter) for parameter in replicated + of_fsdp + sharded]
    torch.nn.utils.clip_grads_with_norm_(every, max_norm, total, foreach)
    return total


def _rows_of_rank(grad: Tensor) -> Tensor:
    """Return a gradient whose norm torch can take, in the same memory: that of a sharded table as one of its own."""
    return with_torch_functions(coalesced(grad)) if grad.layout is torch.sparse_coo else grad


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
