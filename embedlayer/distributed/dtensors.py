"""DTensors of rows or logits that are sharded over a mesh. torch's own module is imported when one is built.

That import takes a second, and a program with one process never needs it.
"""

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def as_dtensor(part: Tensor, mesh: DeviceMesh, size: int, dim: int = 0) -> "DTensor":
    """Return a DTensor that is sharded in one dimension, whose shard on this rank is `part`, without a copy.

    Args:
        part: The shard.
        mesh: The ranks.
        size: Size of the sharded dimension over all ranks.
        dim: The sharded dimension, 0 or 1.
    """
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((*part.shape[:dim], size, *part.shape[dim + 1 :]))
    stride = (size, 1) if dim else part.stride()
    return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor is a DTensor, which has a method `to_local`."""
    return hasattr(tensor, "to_local")


def to_local(tensor: Tensor) -> Tensor:
    """Return the shard of this rank if `tensor` is a DTensor, and `tensor` itself if it is not."""
    return cast("DTensor", tensor).to_local() if is_dtensor(tensor) else tensor


def rows_of_this_rank(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the rows that this rank stores of a DTensor, which is first sharded by rows over the mesh if it is not."""
    from torch.distributed.tensor import Shard

    return cast("DTensor", tensor).redistribute(mesh, [Shard(0)]).to_local()
