"""Tensors of sharded models: whole ones, those of this rank, and ones that are sharded as a parameter is."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return a copy of the values of this rank."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


@torch.no_grad()
def full(tensor: Tensor) -> Tensor:
    """Return a copy of the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    if not any(hasattr(placement, "split_factor") for placement in tensor.placements):
        return tensor.full_tensor().clone()
    # `full_tensor` of torch 2.9 joins rows that are split over two dimensions in the wrong places, if not equally
    [chunk] = tensor.__create_chunk_list__()
    parts: list[Any] = [(chunk.offsets, tensor.to_local())]
    for group in tensor.device_mesh.get_all_groups():
        lists: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(lists, parts, group=group)
        parts = [part for each in lists for part in each]
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for offsets, part in parts:
        whole[tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))] = part
    return whole


def sharded_like(parameter: Tensor, values: Tensor) -> Tensor:
    """Return a tensor with these values on this rank, sharded as a parameter is; it may have further axes at the end.

    On ranks where the parameter is a plain tensor, so is the result.
    """
    if not isinstance(parameter, DTensor):
        return values
    shape = torch.Size([*parameter.shape, *values.shape[parameter.dim() :]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(values, parameter.device_mesh, parameter.placements, shape=shape, stride=stride)


def gathered(parameter: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the whole tensors of a parameter's state: one all-gather for all that are sharded as it is."""
    alike = {key: value for key, value in state.items() if value.shape == parameter.shape}
    for key, value in alike.items():
        assert getattr(value, "placements", None) == getattr(parameter, "placements", None), key
        assert value.dtype == parameter.dtype, key
    together = full(sharded_like(parameter, torch.stack([local(value) for value in alike.values()], -1)))
    others = {key: full(value) for key, value in state.items() if key not in alike}
    return dict(zip(alike, together.unbind(-1), strict=True)) | others


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], case: str = "") -> None:
    """Check that two states have the same bits under the same names."""
    assert one.keys() == other.keys(), case
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == [], case
