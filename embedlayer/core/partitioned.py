"""What the layer itself must know of parameters that are divided between processes by torch or DeepSpeed.

A DTensor has the shape of all rows, and a rank stores a shard of it; FSDP2 gathers the shards for calls of a module. A
parameter that ZeRO-3 has partitioned has the shape `(0,)` except while DeepSpeed gathers it; each process has a part of
its numbers in `ds_tensor`, and its shape is `ds_shape`. `integrations.dtensor`, `fsdp` and `deepspeed` have the rest.

Reference: deepspeed/runtime/zero/partition_parameters.py, DeepSpeed 0.19.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from embedlayer.core.errors import SizeError, StaleRowsError


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is stored on the ranks of a mesh; a replicated DTensor is one too."""
    return hasattr(tensor, "to_local")


def local_shard(tensor: Tensor) -> Tensor:
    """Return the shard of this rank, which shares memory with `tensor`; `tensor` itself if it is not sharded."""
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return local


def whole(tensor: Any) -> Tensor:
    """Return all of a sharded tensor; `tensor` itself if it is not sharded."""
    value: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return value


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


@contextmanager
def gathered_weights(module: Any) -> Iterator[None]:
    """Context manager: gather the weights of a module that FSDP2 has freed after its forward pass."""
    if not hasattr(module, "unshard"):
        raise StaleRowsError("The head was resharded after its forward pass: see docs/errors.md, Divided weights.")
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


GATHERING_HOOKS = "torch.distributed.fsdp."
"""Start of the name of the modules whose hooks gather weights for a call, and change nothing that it computes."""


def gathers_weights(module: nn.Module) -> bool:
    """Return whether FSDP2 shards the parameters of a module, and gathers them for its calls."""
    return getattr(module, "_is_fsdp_managed_module", False)


def refuse_partitioned(parameters: Iterable[tuple[str, Tensor | None]], action: str, *, gathered: bool = True) -> None:
    """Raise a `SizeError` if DeepSpeed's ZeRO-3 has partitioned one of the named parameters."""
    for name, parameter in parameters:
        if not hasattr(parameter, "ds_id"):
            continue
        each: Any = parameter
        if gathered and each.shape == each.ds_shape:
            continue
        remedy = "in deepspeed.zero.GatheredParameters([parameter])" if gathered else "before deepspeed.initialize"
        raise SizeError(
            f"DeepSpeed's ZeRO-3 has partitioned {name or 'this parameter'} {tuple(each.ds_shape)}, which {action} "
            f"here only whole: do it {remedy}, or shard the model with FSDP2 (fully_shard) instead."
        )
