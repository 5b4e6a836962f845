"""Gradient clipping by the norm of dense, row-sparse and sharded gradients together, also over pipeline stages."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from embedlayer.core.collectives import Collectives
from embedlayer.core.errors import SizeError
from embedlayer.core.partitioned import is_sharded, local_shard, refuse_partitioned, sharding_of, whole
from embedlayer.row_sparse.gradient import norm_over, row_gradient, with_torch_functions


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pp_mesh: DeviceMesh | None = None,
) -> Tensor:
    """Scale all gradients in place by `min(1, max_norm / (norm + 1e-6))`, where `norm` is that of all of them.

    Equal rows of a sparse gradient are summed first.

    The rows of a sharded table (`embedlayer.distributed.ShardedTable`) count on all ranks: with such a table every rank
    must call this function. The gradients of all other parameters must be the same on every process, as with
    `DistributedDataParallel`, or DTensors, of one mesh or several.

    Args:
        parameters: Parameters; those without a gradient are skipped.
        max_norm: Largest norm after clipping.
        norm_type: Order of the norm, as in `torch.linalg.vector_norm`; 2 for the Euclidean norm.
        error_if_nonfinite: Whether to raise an error if the norm is infinite or NaN.
        foreach: As in `torch.nn.utils.clip_grad_norm_`.
        pp_mesh: The ranks of a pipeline, whose stages have different parameters: the norm is that of all stages, where
            parameters that `embedlayer.distributed.tie_stages` has tied count once, and every rank must call. `None` if
            this process has all parameters.

    Returns:
        The norm before clipping, a scalar; 0 without gradients. As in torch it is a DTensor if all gradients are
        DTensors with the same mesh and placements. With `pp_mesh` it is a plain tensor in float64.

    Raises:
        RuntimeError: `error_if_nonfinite` is set and the norm is not finite.
        SizeError: A parameter is tied to those of other pipeline stages, and `pp_mesh` is `None`; or DeepSpeed's ZeRO-3
            has partitioned a parameter, so that its engine clips (`gradient_clipping`).
        StaleRowsError: The gradient of a tied parameter was not summed over the stages.

    Example:
        >>> table = RowSparseEmbedding(100, 8)
        >>> table(torch.tensor([1, 2])).sum().backward()
        >>> clip_grad_norm_(table.parameters(), max_norm=1.0)
        tensor(4.)

    Reference: `torch.nn.utils.clip_grad_norm_`, which returns the same for row-sparse and sharded tables. It refuses
    DTensors beside plain gradients, or of several meshes, and before torch 2.14 the sparse gradients of
    `nn.Embedding(sparse=True)`.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    refuse_partitioned((("a parameter", each) for each in parameters), "has a gradient", gathered=False)
    parts: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout is torch.sparse_coo:
            parameter.grad = row_gradient(parameter, parameter.grad)
        elif parameter.grad is not None and hasattr(parameter, "shard_group"):
            with_torch_functions(parameter.grad, parameter)
        if parameter.grad is not None and _counts(parameter, pp_mesh):
            parts.setdefault(sharding_of(parameter.grad), []).append(parameter)  # one reduction for each mesh
    total: Tensor
    if len(parts) < 2 and pp_mesh is None:
        total = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        return total
    norms: list[Tensor] = []
    for part in parts.values():
        grads = [parameter.grad for parameter in part if parameter.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
        norms.append(whole(norm))  # of all ranks
    if pp_mesh is not None and not norms:
        norms = [torch.zeros((), device=pp_mesh.device_type)]
    total = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]), norm_type)
    if pp_mesh is not None:
        ranks = Collectives(pp_mesh.get_group(), pp_mesh.device_type)
        total = norm_over(ranks, total.double(), norm_type)  # one dtype, for one factor on all stages
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"The norm of the gradients is {float(total)}, so they cannot be clipped to {max_norm:g}.")
    every = [_local(parameter) for parameter in parameters if parameter.grad is not None]
    torch.nn.utils.clip_grads_with_norm_(every, max_norm, total, foreach)
    return total


def _counts(parameter: Any, pp_mesh: DeviceMesh | None) -> bool:
    """Return whether the gradient of a parameter counts in the norm: that of a tied one does on its first stage."""
    if not hasattr(parameter, "stage_copy"):
        return True
    copy = parameter.stage_copy
    if pp_mesh is None:
        raise SizeError(
            f"{copy.name} is on several pipeline stages, and this one's norm alone would scale each copy by another "
            f"factor: pass clip_grad_norm_(..., pp_mesh=mesh), the mesh of tie_stages."
        )
    copy.require_summed()
    first: bool = copy.ranks.is_first
    return first


def _local(parameter: Tensor) -> Tensor:
    """Return a tensor whose `grad` is this rank's part of the gradient, for a parameter with a DTensor gradient.

    The part shares memory with the gradient, so clipping it in place clips the gradient.
    """
    if parameter.grad is None or not is_sharded(parameter.grad):
        return parameter
    shard = local_shard(parameter.grad)
    local = shard.detach()
    local.grad = shard
    return local
