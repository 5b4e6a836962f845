"""Tensors of sharded models: whole ones, those of this rank, and edits that must give those of a whole model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


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


def state_of(
    model: nn.Module, optimizer: Optimizer | None = None, *, is_whole: bool = True, grads: bool = True
) -> dict[str, Tensor]:
    """Return copies of parameters, moments and gradients, whole or those of this rank, and all sizes."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # what a call has gathered
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        own = {"": parameter, **({} if optimizer is None else optimizer.state[parameter])}
        if grads and parameter.grad is not None:
            own["grad"] = parameter.grad
        own = gathered(parameter, own) if is_whole else {key: local(value) for key, value in own.items()}
        state |= {f"{name} {key}": value for key, value in own.items()}
    for name, module in model.named_modules():
        sizes = [getattr(module, size, None) for size in ("vocab_size", "num_rows", "out_features", "padding_idx")]
        state[f"{name} sizes"] = torch.tensor([-1 if size is None else size for size in sizes])
    return state


def edit_both(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer | None],
    options: dict[str, Any],
    case: str = "",
    *,
    is_undone: bool = True,
) -> Any:
    """Edit a sharded model and a whole one with the same bits; the sharded one twice if the edit is undone.

    Returns:
        The receipt of the sharded model.
    """
    from embedlayer.vocab import edit_vocabulary

    (model, whole), (optimizer, its) = models, optimizers
    before, parameters = state_of(whole, its, grads=False), [*model.parameters()]
    torch.manual_seed(7)
    expected = edit_vocabulary(whole, **options, optimizer=its)
    for is_last in (False, True)[not is_undone :]:
        torch.manual_seed(7 + dist.get_rank())  # rank 0's numbers count
        receipt = edit_vocabulary(model, **options, optimizer=optimizer)
        assert receipt.origins == expected.origins
        if not is_last:  # not the gradients of removed rows
            receipt.undo(model, optimizer=optimizer)
            assert_same(state_of(model, optimizer, grads=False), before, f"{case}, undone")
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True)), case
    assert_same(state_of(model, optimizer), state_of(whole, its), case)
    return receipt


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], case: str = "") -> None:
    """Check that two states have the same bits under the same names."""
    assert one.keys() == other.keys(), case
    different = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    assert different == [], (case, different)
