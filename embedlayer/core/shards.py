"""Tensors of which each rank of a mesh stores a shard (torch's DTensors): what the layer itself asks of them.

`integrations.dtensor` and `integrations.fsdp` have everything else that the package knows of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is stored on the ranks of a mesh; a replicated DTensor is one too."""
    return hasattr(tensor, "to_local")


def local_shard(tensor: Tensor) -> Tensor:
    """Return the shard of this rank, which shares memory with `tensor`; `tensor` itself if it is not sharded."""
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return local


def sharding_of(tensor: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the mesh and the placements of a sharded tensor, `None` for any other."""
    return (tensor.device_mesh, tuple(tensor.placements)) if is_sharded(tensor) else None


def zero_sharded_rows_(weight: Any, rows: Sequence[int]) -> None:
    """Set rows of a sharded weight `(V, D)` to zero in place, by their numbers in the whole weight."""
    from torch.distributed.tensor import DTensor, Replicate

    chosen = torch.zeros(weight.shape[0], 1, dtype=torch.bool, device=weight.device)
    chosen[list(rows)] = True
    everywhere = [Replicate()] * weight.device_mesh.ndim
    mask = DTensor.from_local(chosen, weight.device_mesh, everywhere, run_check=False)
    weight.copy_(weight.masked_fill(mask, 0))  # torch 2.9 has no `masked_fill_` of a DTensor


def gathers_weights(module: nn.Module) -> bool:
    """Return whether FSDP2 shards the parameters of a module, and gathers them for its calls."""
    return getattr(module, "_is_fsdp_managed_module", False)
