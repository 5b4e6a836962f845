"""DTensor: rows and logits that are sharded over a mesh.

`core.partitioned` has what the layer itself asks of such tensors. torch's module is imported when one is built or read:
that import takes a second, and a program with one process never needs it.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from embedlayer.core.collectives import SINGLE_PROCESS, Collectives
from embedlayer.core.errors import CheckpointError, SizeError
from embedlayer.core.partitioned import is_sharded, local_shard, sharding_of
from embedlayer.core.torch_state import distinguish_numbers_of_rows

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor as DTensor


def as_dtensor(part: Tensor, mesh: DeviceMesh, size: int, dim: int = 0) -> "DTensor":
    """Return a DTensor that is sharded in one dimension, whose shard on this rank is `part`, without a copy."""
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((*part.shape[:dim], size, *part.shape[dim + 1 :]))
    stride = (size, 1) if dim else part.stride()
    return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)


def row_collectives(tensor: Tensor) -> Collectives:
    """Return the ranks over which the rows of a DTensor are sharded; a single process if each rank has all rows."""
    if not is_sharded(tensor):
        return SINGLE_PROCESS
    rows = cast("DTensor", tensor)
    ranks = _ranks_with_shards(rows, _sharded_dims(rows, 0))
    stored, own = local_slices(tensor)[0], ranks.partition(len(tensor))
    if (stored.start, stored.stop) != (own.start, own.stop):
        raise SizeError(
            f"This rank stores rows {stored.start} to {stored.stop - 1} of a DTensor {rows.placements}, and an edit "
            f"expects {own.start} to {own.stop - 1}: edit the model before it is sharded."
        )
    return ranks


def shard_collectives(tensor: Tensor) -> Collectives:
    """Return the ranks that together have all rows and columns of a DTensor; see `row_collectives`."""
    if not is_sharded(tensor):
        return SINGLE_PROCESS
    rows = cast("DTensor", tensor)
    return _ranks_with_shards(rows, sorted([*_sharded_dims(rows, 0), *_sharded_dims(rows, 1)]))


def local_slices(tensor: Tensor) -> list[slice]:
    """Return which part of a DTensor this rank stores, one slice for each dimension."""
    [chunk] = cast("DTensor", tensor).__create_chunk_list__()
    return [slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]


def _sharded_dims(tensor: "DTensor", axis: int) -> list[int]:
    """Return the dimensions of the mesh over which one axis of a DTensor is sharded, 0 for rows or 1 for columns."""
    sharded = {dim: each for dim, each in enumerate(tensor.placements) if not each.is_replicate()}
    axes = {dim: getattr(each, "dim", None) for dim, each in sharded.items()}
    if any(axes[dim] not in (0, 1) or (axes[dim] == 1 and hasattr(sharded[dim], "split_factor")) for dim in sharded):
        raise SizeError(
            f"A DTensor with the placements {tensor.placements} cannot be edited, only one that is sharded by rows "
            f"(Shard(0)) or columns (Shard(1)): edit the model before it is sharded."
        )
    if local_shard(tensor.detach()).device.type not in (tensor.device_mesh.device_type, "meta"):
        raise SizeError("The shards are on the CPU and the mesh is not (CPU offloading): edit before sharding.")
    return [dim for dim in sharded if axes[dim] == axis]


def _ranks_with_shards(tensor: "DTensor", dims: Sequence[int]) -> Collectives:
    """Return the ranks that differ from this one in some dimensions of the mesh, and how they share the rows."""
    mesh, placements = tensor.device_mesh, tensor.placements
    if not dims:
        return SINGLE_PROCESS
    # FSDP2 splits the blocks of tensor parallelism, whose dimension comes after its own (_StridedShard).
    order = sorted(_sharded_dims(tensor, 0), key=lambda dim: hasattr(placements[dim], "split_factor"))
    steps = {dim: math.prod(mesh.size(later) for later in dims if later > dim) for dim in dims}
    levels = tuple((mesh.size(dim), steps[dim]) for dim in order) or ((1, 1),)  # without a split each rank has all rows
    group = _group_over(mesh, dims)
    return Collectives(group, mesh.device_type, levels=() if len(dims) == len(order) == 1 else levels)


def mesh_collectives(tensor: Tensor) -> Collectives:
    """Return all ranks of the mesh of a DTensor, those with replicas included; a single process for another tensor."""
    if not is_sharded(tensor):
        return SINGLE_PROCESS
    mesh = cast("DTensor", tensor).device_mesh
    return Collectives(_group_over(mesh, range(mesh.ndim)), mesh.device_type)


def create_groups(module: nn.Module) -> None:
    """Create the process groups of the functions above for the parameters of a module; all ranks must call this."""
    for parameter in module.parameters():
        if is_sharded(parameter):
            tensor = cast("DTensor", parameter)
            axes = [getattr(placement, "dim", None) for placement in tensor.placements]
            for wanted in ((0,), (0, 1), (0, 1, None)):
                if dims := [dim for dim, axis in enumerate(axes) if axis in wanted]:
                    _group_over(tensor.device_mesh, dims)


def _group_over(mesh: DeviceMesh, dims: Sequence[int]) -> dist.ProcessGroup | None:
    """Return the group of the ranks that differ from this one only in some dimensions of a mesh, or `None`."""
    # a group that torch does not have is created, once: all of its ranks must make the call
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    coordinate = cast("list[int]", mesh.get_coordinate())
    place = tuple(slice(None) if dim in dims else coordinate[dim] for dim in range(mesh.ndim))
    ranks = tuple(sorted(mesh.mesh[place].flatten().tolist()))
    world = cast("dist.ProcessGroup", dist.group.WORLD)
    if len(ranks) == dist.get_world_size():
        return None
    groups = _groups.setdefault(world, {})
    if ranks not in groups:
        groups[ranks] = cast("dist.ProcessGroup", dist.new_group([*ranks], use_local_synchronization=True))
    return groups[ranks]


_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups over several dimensions of a mesh, by their ranks, for as long as the default group exists."""


def dtensor_like(tensor: Tensor, local: Tensor, num_rows: int) -> "DTensor":
    """Return a DTensor with the mesh and placements of another and `num_rows` rows; its shard is `local`."""
    from torch.distributed.tensor import DTensor

    like, shape = cast("DTensor", tensor), torch.Size((num_rows, *tensor.shape[1:]))
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=tensor.stride()
    )


def rows_on(mesh: DeviceMesh, rows: Tensor, name: str) -> Tensor:
    """Return this rank's rows of a saved DTensor after sharding them over another mesh; all ranks must call this."""
    from torch.distributed.tensor import Shard

    saved = cast("DTensor", rows)
    coordinate = saved.device_mesh.get_coordinate()  # after `torch.load`, of the rank that saved it
    rank = None if coordinate is None else int(saved.device_mesh.mesh[tuple(coordinate)])
    if rank != dist.get_rank():
        raise CheckpointError(
            f"{name} has the rows of rank {rank}, which called torch.save, and this is rank {dist.get_rank()}: save "
            f"and load with embedlayer.distributed.distributed_state."
        )
    return local_shard(saved.redistribute(mesh, [Shard(0)]))


def shard_of_rows(weight: Tensor) -> tuple[int, Tensor]:
    """Return the first row of this rank's shard of a DTensor, and the shard; it must be sharded by rows alone."""
    from torch.distributed.tensor import Replicate, Shard

    placements = cast("DTensor", weight).placements
    if any(each not in (Shard(0), Replicate()) for each in placements):
        raise SizeError(f"A weight with the placements {placements} is not sharded by rows.")
    return local_slices(weight)[0].start, local_shard(weight.detach())


def placed_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with the placements of another if both are DTensors, such as a gradient with its parameter's."""
    if sharding_of(tensor) == sharding_of(like):
        return tensor
    return cast("DTensor", tensor).redistribute(placements=cast("DTensor", like).placements)


def check_replaceable(parameter: Tensor) -> None:
    """Raise a `SizeError` if hooks or a loss refer to a parameter, so that its number of rows cannot change."""
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise SizeError("A sharded parameter has gradient hooks, which an edit would lose: remove them before it.")
    other = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, other)
    except RuntimeError as error:
        raise SizeError(
            f"A sharded parameter is in use, by a loss or weak reference: delete what refers to it ({error})."
        ) from error
    torch.utils.swap_tensors(parameter, other)


def replace_dtensor(parameter: Tensor, tensor: Tensor) -> None:
    """Replace the values of a DTensor parameter by those of another DTensor; the parameter stays the same object."""
    if tensor.shape == parameter.shape:
        local_shard(parameter.detach()).copy_(local_shard(tensor))
        torch.autograd.graph.increment_version(parameter)  # a loss that still exists must not be differentiated
        return
    distinguish_numbers_of_rows()
    new = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        vars(new).setdefault(name, value)
    torch.utils.swap_tensors(parameter, new)
