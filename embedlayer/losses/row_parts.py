"""Parts of one weight that several heads read, and its gradient, which their passes write into one tensor."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.core.torch_state import PLAIN_TYPES, fusible, is_transformed

NewGradient = Callable[[torch.dtype], Tensor]
"""Function that allocates the gradient of a part of a weight, in a dtype."""


class RowPart(NamedTuple):
    """Hold some rows of a weight, a view, and what allocates their gradient; `None` for memory of its own."""

    rows: Float[Tensor, "N *D"]
    new_gradient: NewGradient | None = None

    # no property: graphs of torch 2.9 read none of a named tuple
    def transposed(self) -> "RowPart":
        """Return the part transposed, and its gradient too."""
        allocate = self.new_gradient
        return RowPart(self.rows.mT, None if allocate is None else lambda dtype: allocate(dtype).mT)


def row_parts(weight: Float[Tensor, "N *D"], ranges: Sequence[tuple[int, int]]) -> list[RowPart]:
    """Return `weight[start:stop]` for disjoint ranges of rows, as views whose gradients are one tensor."""
    # Of slices, autograd would add one gradient of the weight's size for each; of `weight.split` it copies them.
    bounds = sorted({0, len(weight), *(bound for each in ranges for bound in each)})
    sizes = [stop - start for start, stop in pairwise(bounds)]
    is_fused = weight.requires_grad and torch.is_grad_enabled() and fusible(weight)
    is_fused = is_fused and type(weight) in PLAIN_TYPES  # no DTensor, whose parts are none of it
    if is_fused:
        gradient = _JoinedGradient(weight.shape, sizes, weight.device)
        views: tuple[Tensor, ...] = _Parts.apply(weight, gradient)  # type: ignore[no-untyped-call]
    else:
        views = torch.split(weight, sizes)
    places = {start: place for place, start in enumerate(bounds)}
    parts = []
    for start, _ in ranges:
        place = places[start]
        parts.append(RowPart(views[place], partial(gradient.part, place) if is_fused else None))
    return parts


class _JoinedGradient:
    """The gradient of a weight whose parts several passes compute, each in its place."""

    # A part whose place is taken already, as in a second backward pass, has memory of its own.

    def __init__(self, shape: torch.Size, sizes: list[int], device: torch.device) -> None:
        self.shape, self.sizes, self.device = shape, sizes, device
        self._whole: Tensor | None = None
        self._free: set[int] = set()

    def part(self, place: int, dtype: torch.dtype) -> Tensor:
        if self._whole is None:
            self._whole = torch.empty(self.shape, dtype=dtype, device=self.device)
            self._free = set(range(len(self.sizes)))
        if place not in self._free or self._whole.dtype != dtype:
            return torch.empty(self.sizes[place], *self.shape[1:], dtype=dtype, device=self.device)
        self._free.remove(place)
        return self._parts(self._whole)[place]

    def _parts(self, whole: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of a gradient of the weight, as views."""
        return torch.split(whole, self.sizes)

    def joined(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Return the gradient of the weight from those of the parts; `None` is 0."""
        whole, self._whole = self._whole, None
        first = next(each for each in grads if each is not None)
        if whole is None or whole.dtype != first.dtype or torch.is_grad_enabled() or is_transformed(first):
            sized = zip(grads, self.sizes, strict=True)
            return torch.cat([first.new_zeros(n, *self.shape[1:]) if x is None else x for x, n in sized])
        for part, grad in zip(self._parts(whole), grads, strict=True):
            if grad is None:
                part.zero_()
            elif grad.data_ptr() != part.data_ptr() or grad.stride() != part.stride():
                part.copy_(grad)
        return whole


class _Parts(torch.autograd.Function):
    """Split a weight into views of consecutive rows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: _JoinedGradient) -> tuple[Tensor, ...]:
        ctx.gradient = gradient
        ctx.set_materialize_grads(False)
        return tuple(part.detach() for part in torch.split(weight, gradient.sizes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        return None if all(each is None for each in grads) else ctx.gradient.joined(grads), None
