"""DTensors of rows or logits that are sharded over a mesh. torch's own module is imported when one is built or read.

That import takes a second, and a program with one process never needs it.
"""

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from embedlayer.core.collectives import SINGLE_PROCESS, Collectives, ProcessGroup
from embedlayer.core.errors import SizeError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def as_dtensor(part: Tensor, mesh: DeviceMesh, size: int, dim: int = 0) -> "DTensor":
    """Return a DTensor that is sharded in one dimension, whose shard on this rank is `part`, without a copy.

    `size` is that of the sharded dimension, 0 or 1, over all ranks.
    """
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((*part.shape[:dim], size, *part.shape[dim + 1 :]))
    stride = (size, 1) if dim else part.stride()
    return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor is a DTensor, which has a method `to_local`."""
    return hasattr(tensor, "to_local")


def has_fsdp_modules(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called on a module or on one of its submodules, which then have `unshard`."""
    return any(hasattr(part, "unshard") and hasattr(part, "reshard") for part in module.modules())


def to_local(tensor: Tensor) -> Tensor:
    """Return the shard of this rank if `tensor` is a DTensor, and `tensor` itself if it is not."""
    return cast("DTensor", tensor).to_local() if is_dtensor(tensor) else tensor


def placements_of(tensor: Tensor) -> tuple[object, ...] | None:
    """Return the placements of a DTensor, and `None` for another tensor."""
    return tuple(cast("DTensor", tensor).placements) if is_dtensor(tensor) else None


def rank_of(tensor: Tensor) -> int | None:
    """Return the rank whose shard a DTensor has, which after `torch.load` is the one that saved it.

    The result is `None` in a process outside of its mesh.
    """
    mesh = cast("DTensor", tensor).device_mesh
    coordinate = mesh.get_coordinate()
    return None if coordinate is None else int(mesh.mesh[tuple(coordinate)])


def rows_of_this_rank(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the rows that this rank stores of a DTensor, which is first sharded by rows over the mesh if it is not."""
    from torch.distributed.tensor import Shard

    return cast("DTensor", tensor).redistribute(mesh, [Shard(0)]).to_local()


def row_collectives(tensor: Tensor) -> Collectives:
    """Return the ranks over which the rows of a DTensor are sharded; a single process if each rank has all rows.

    Raises:
        SizeError: The DTensor is sharded otherwise than by rows over one dimension of its mesh, or its shard is on
            another device than the mesh.
    """
    if not is_dtensor(tensor):
        return SINGLE_PROCESS
    from torch.distributed.tensor import Replicate, Shard

    rows = cast("DTensor", tensor)
    mesh, placements = rows.device_mesh, rows.placements
    sharded = [dim for dim, placement in enumerate(placements) if type(placement) is not Replicate]
    if len(sharded) > 1 or any(placements[dim] != Shard(0) for dim in sharded):
        raise SizeError(
            f"A DTensor with the placements {tuple(placements)} cannot be edited, only one whose rows are sharded over "
            f"one dimension of the mesh (Shard(0)): edit the model before it is sharded."
        )
    if to_local(tensor.detach()).device.type not in (mesh.device_type, "meta"):
        raise SizeError("The shards are on the CPU and the mesh is not (CPU offloading): edit before fully_shard.")
    return ProcessGroup(mesh.get_group(sharded[0]), mesh.device_type) if sharded else SINGLE_PROCESS


def dtensor_like(tensor: Tensor, local: Tensor, num_rows: int) -> "DTensor":
    """Return a DTensor with the mesh and placements of another and `num_rows` rows, whose shard is `local`, not copied.

    `num_rows` counts over all ranks.
    """
    from torch.distributed.tensor import DTensor

    like, shape = cast("DTensor", tensor), torch.Size((num_rows, *tensor.shape[1:]))
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=tensor.stride()
    )


def check_replaceable(parameter: Tensor) -> None:
    """Raise a `SizeError` if hooks or a loss refer to a parameter, so that its number of rows cannot change."""
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise SizeError("A sharded parameter has gradient hooks, which an edit would lose: remove them before it.")
    other = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, other)
    except RuntimeError as error:
        raise SizeError(
            f"A sharded parameter is in use, by a loss that was not deleted or by a weak reference, and cannot get "
            f"another number of rows: delete what refers to it ({error})."
        ) from error
    torch.utils.swap_tensors(parameter, other)


def replace_dtensor(parameter: Tensor, tensor: Tensor) -> None:
    """Replace the values of a DTensor parameter by those of another DTensor; the parameter stays the same object.

    With the same number of rows they are copied in place. With another number the parameter takes over `tensor`, and
    `check_replaceable` must have passed.
    """
    if tensor.shape == parameter.shape:
        to_local(parameter.detach()).copy_(to_local(tensor))
        torch.autograd.graph.increment_version(parameter)  # a loss that still exists must not be differentiated
        return
    new = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        vars(new).setdefault(name, value)
    torch.utils.swap_tensors(parameter, new)
