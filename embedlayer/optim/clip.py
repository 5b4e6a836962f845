"""The gradients of a model, kept to a length: dense and row-sparse together."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from embedlayer.tables.row_gradient import coalesced, with_torch_functions


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients by `min(1, max_norm / (norm + 1e-6))`, where `norm` is taken over all of them together.

    Rows that are divided among processes (`embedlayer.distributed.ShardedTable`) count on each; gradients of all other
    parameters are taken to be the same on every process, as `DistributedDataParallel` makes them, or are DTensors.

    Args:
        parameters: Whose gradients; dense, row-sparse, or none.
        max_norm: The length that they shall not exceed.
        norm_type: 2 for the Euclidean norm; any other that `torch.linalg.vector_norm` knows.
        error_if_nonfinite: Raise if the norm is infinite or no number.
        foreach: As in torch.

    Returns:
        The norm before clipping.

    Raises:
        RuntimeError: `error_if_nonfinite`, and the norm is not finite.

    Reference: `torch.nn.utils.clip_grad_norm_`. It gives the same, also for row-sparse tables; it refuses the sparse
    gradients of `nn.Embedding(sparse=True)` and does not know of rows on other ranks.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    shared: list[Tensor] = []
    divided: list[Tensor] = []
    group, device = None, None
    for parameter in parameters:
        if hasattr(parameter, "shard_group"):
            group, device = parameter.shard_group, parameter.device
        if parameter.grad is None:
            continue
        if parameter.grad.layout is torch.sparse_coo:
            parameter.grad = with_torch_functions(coalesced(parameter.grad))
        (divided if hasattr(parameter, "shard_group") else shared).append(parameter)
    if group is None:
        return torch.nn.utils.clip_grad_norm_(shared, max_norm, norm_type, error_if_nonfinite, foreach)
    total = norm_over_all(gradients_of(shared), gradients_of(divided), norm_type, group, device, foreach)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"The norm of the gradients is {float(total)}, so they cannot be clipped to {max_norm:g}.")
    torch.nn.utils.clip_grads_with_norm_([_here(each) for each in shared + divided], max_norm, total, foreach)
    return total


def gradients_of(holders: list[Tensor]) -> list[Tensor]:
    """Those that there are."""
    return [holder.grad for holder in holders if holder.grad is not None]


def norm_over_all(
    shared: list[Tensor], divided: list[Tensor], norm_type: float, group: Any, device: Any, foreach: bool | None
) -> Tensor:
    """The norm of gradients that every process has, whole or as DTensors, and of those of divided rows."""
    whole = [grad for grad in shared if not hasattr(grad, "full_tensor")]
    of_fsdp = [grad for grad in shared if hasattr(grad, "full_tensor")]
    norms = [torch.nn.utils.get_total_norm(each, norm_type, foreach=foreach) for each in (whole, of_fsdp, divided)]
    totals = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms)
    first, second, part = (norm.to(device) for norm in totals)  # of no gradients it is a number on the CPU
    if math.isinf(norm_type):
        torch.distributed.all_reduce(part, torch.distributed.ReduceOp.MAX, group)
        return torch.maximum(torch.maximum(first, second), part)
    power: Tensor = part**norm_type
    torch.distributed.all_reduce(power, group=group)
    total: Tensor = (first**norm_type + second**norm_type + power) ** (1 / norm_type)
    return total


def _here(holder: Tensor) -> Tensor:
    """What holds the part that is here of a gradient that `fully_shard` has divided."""
    if not hasattr(holder.grad, "to_local"):
        return holder
    part: Tensor = holder.grad.to_local()  # type: ignore[union-attr]
    here = part.detach()
    here.grad = part
    return here
