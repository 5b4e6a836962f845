"""A row of a weight that is multiplied as it is and not trained, such as that of the padding token under an LM head."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.core.errors import ShapeError
from embedlayer.core.partitioned import is_sharded
from embedlayer.core.torch_state import PLAIN_TYPES, fusible, is_exporting, is_transformed
from embedlayer.losses.converted_rows import linear


def with_fixed_row(weight: Float[Tensor, "V D"], row: int | None) -> Float[Tensor, "V D"]:
    """Return a weight, as another tensor of the same memory, through which one row gets no gradient."""
    # No effect in compiled graphs and under `torch.func` transforms: use `linear_with_fixed_row` there.
    if row is None or not (weight.requires_grad and torch.is_grad_enabled() and fusible(weight)):
        return weight
    result: Tensor = _FixedRow.apply(weight, row)  # type: ignore[no-untyped-call]
    return result


def linear_with_fixed_row(
    hidden: Float[Tensor, "*batch D"],
    weight: Float[Tensor, "V D"],
    row: int | None,
    bias: Float[Tensor, " V"] | None = None,
) -> Float[Tensor, "*batch V"]:
    """Compute `hidden @ weight.T + bias` as `linear`, of which one row of the weight gets no gradient."""
    check_rows_are_whole(hidden, weight)
    if row is None or is_exporting() or fusible(weight):
        return linear(hidden, with_fixed_row(weight, row), bias)
    products = with_fixed_product(linear(hidden, weight), hidden, weight[row : row + 1], row)
    return products if bias is None else products + bias


def check_rows_are_whole(hidden: Tensor, weight: Tensor) -> None:
    """Check that a weight is not sharded, or the hidden states are DTensors too, as under `ColwiseParallel`."""
    if type(weight) not in PLAIN_TYPES and is_sharded(weight) and not is_sharded(hidden):
        raise ShapeError(
            f"The weight {tuple(weight.shape)} is sharded and hidden is not: see docs/errors.md, Divided weights."
        )


def with_fixed_product(
    products: Float[Tensor, "*batch V"], hidden: Float[Tensor, "*batch D"], vector: Float[Tensor, "1 D"], row: int
) -> Float[Tensor, "*batch V"]:
    """Return a copy of the products of hidden states and rows, in which one row counts as a constant."""
    own = linear(hidden, vector.detach()).to(products.dtype)
    return products.index_copy(-1, one_index(row, products), own)


def one_index(index: int, like: Tensor) -> Tensor:
    """Return an index as a tensor `(1,)` on the device of `like`; unlike `torch.tensor`, without waiting for it."""
    return torch.full((1,), index, device=like.device)


def row_within(row: int | None, start: int, stop: int) -> int | None:
    """Return a row number counted from `start`; `None` for `None`, and for a row outside `start` to `stop - 1`."""
    return row - start if row is not None and start <= row < stop else None


class _FixedRow(torch.autograd.Function):
    """Return the weight as another tensor of the same memory; `backward` sets one row of the gradient to zero."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, row: int) -> Tensor:
        ctx.row = row
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if type(grad) is Tensor and not torch.is_grad_enabled() and not is_transformed(grad):
            grad[ctx.row] = 0  # in place: the products with this tensor computed it for nothing else
            return grad, None
        own = slice(ctx.row, ctx.row + 1)
        return grad.slice_scatter(torch.zeros_like(grad[own]), 0, own.start, own.stop), None
