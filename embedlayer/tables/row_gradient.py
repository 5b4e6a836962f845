"""The gradient of a row-sparse table: the rows of a batch, and zero everywhere else.

torch's clipping and loss scaling work on it, although torch implements few of their functions for sparse tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedlayer.errors import ShapeError

Number = float | Tensor

run_as_stored: Callable[..., Any] = nn.Parameter.__torch_function__
"""Run a torch function without any `__torch_function__`: `run_as_stored(function, types, args, kwargs)`."""


class RowSparseGradient(Tensor):
    """A sparse COO tensor `(V, D)` with the functions that `torch.nn.utils` calls on gradients.

    `clip_grad_norm_`, `clip_grad_value_`, `get_total_norm` and `clip_grads_with_norm_` give the result that they give
    for the dense gradient: a row that is absent is zero, adds nothing to a norm and stays zero. Everything else is
    torch's own function for sparse tensors, or torch's own error.

    Reference: https://docs.pytorch.org/docs/stable/notes/extending.html, "Subclassing torch.Tensor".
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` on the stored rows where torch has no version of it for sparse tensors."""
        if any(not issubclass(cls, kind) for kind in types):
            return NotImplemented  # the other class decides what happens first, such as applying pending updates
        result = run_as_stored(ON_ROWS.get(func, func), types, args, kwargs or {})
        if type(result) is Tensor and result.layout is torch.sparse_coo:
            return with_torch_functions(result)  # a copy, a scaled gradient
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy it, as of torch's own tensors once in a structure."""
        copy: Tensor = memo.setdefault(id(self), self.clone())
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save it as a sparse tensor of torch, so that `torch.load` needs no class of ours."""
        return run_as_stored(Tensor.detach, (), (self,), {}).__reduce_ex__(protocol)


def row_gradient(parameter: Tensor, grad: Tensor, *, drop: int | None = None) -> Tensor:
    """Return `coalesced(grad)` as it is stored in `parameter.grad`: torch's clipping takes it.

    Rows that are divided among ranks stay a sparse tensor that torch refuses: it would clip by this rank's norm alone.
    """
    rows = coalesced(grad, drop=drop)
    return rows if hasattr(parameter, "shard_group") else with_torch_functions(rows)


def coalesced(grad: Tensor, *, drop: int | None = None) -> Tensor:
    """Return the gradient with each row once, in order; equal rows are summed in the order of the batch.

    Args:
        grad: `(V, D)`: sparse COO with rows in any order, or dense, of which the rows that are not zero are taken.
        drop: A row to leave out.
    """
    if grad.layout is not torch.sparse_coo:
        rows = (grad != 0).any(1).nonzero().squeeze(1)
        values = grad.index_select(0, rows)
    else:
        rows, values = grad._indices()[0], grad._values()
        if not (
            rows[1:] > rows[:-1]
        ).all():  # not `is_coalesced()`: autograd forgets that flag when it stores a gradient
            ids, order = torch.sort(rows, stable=True)
            rows, counts = torch.unique_consecutive(ids, return_counts=True)
            values = F.embedding_bag(order, values, counts.cumsum(0) - counts, mode="sum")
    if drop is not None:
        kept = rows != drop
        if not kept.all():
            rows, values = rows[kept], values[kept]
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, grad.shape, is_coalesced=True, check_invariants=False)


def with_torch_functions(grad: Tensor) -> RowSparseGradient:
    """Turn a sparse COO tensor, in place, into one that torch's clipping takes."""
    grad.__class__ = RowSparseGradient  # as torch.nn.UninitializedParameter becomes a Parameter; sparse has no views
    assert isinstance(grad, RowSparseGradient)
    return grad


def row_sparse(grad: Tensor) -> Tensor:
    """Return `grad`, which must be row-sparse.

    Raises:
        ShapeError: It is dense.
    """
    if grad.layout is not torch.sparse_coo:
        raise ShapeError(
            f"A dense gradient {tuple(grad.shape)} arrived at a row-sparse table: something read all rows with "
            f"gradients on (a tied head, logits(), loss(), or weight itself). Read it under torch.no_grad(), give the "
            f"model a head of its own, or build the table with row_sparse=False."
        )
    return grad


def vector_norm(grad: Tensor, ord: float = 2, *dims: Any, **options: Any) -> Tensor:
    """Compute `torch.linalg.vector_norm`; rows that are absent count as zeros."""
    values = grad
    if grad.layout is torch.sparse_coo and not dims and not options.keys() - {"dtype"}:
        values = grad.to_dense() if ord < 0 else coalesced(grad)._values()  # zeros decide a norm of negative order
        values = values if values.numel() else values.new_zeros(1)
    norm: Tensor = torch.linalg.vector_norm(values, ord, *dims, **options)
    return norm


def foreach_norm(grads: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Compute `torch._foreach_norm`: the norm of each."""
    return [vector_norm(grad, ord, dtype=dtype) for grad in grads]


def foreach_mul_(grads: Sequence[Tensor], factors: Number | Sequence[Number]) -> None:
    """Compute `torch._foreach_mul_`: scale each in place."""
    each = factors if isinstance(factors, Sequence) else [factors] * len(grads)
    for grad, factor in zip(grads, each, strict=True):
        grad.mul_(factor)


def clamp_(grad: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """Compute `Tensor.clamp_`; rows that are absent stay zero.

    Raises:
        ShapeError: Zero is outside the range, so every row of the table would get a gradient.
    """
    if grad.layout is not torch.sparse_coo:
        return grad.clamp_(min, max)
    if (min is not None and min > 0) or (max is not None and max < 0):
        raise ShapeError(
            f"Clamping a row-sparse gradient {tuple(grad.shape)} to {min}..{max} would give every row a gradient. "
            f"The range must contain 0, or the table must be built with row_sparse=False."
        )
    grad.copy_(coalesced(grad))  # equal rows are summed first
    grad._values().clamp_(min, max)
    return grad


def foreach_clamp_min_(grads: Sequence[Tensor], smallest: float) -> None:
    """Compute `torch._foreach_clamp_min_`."""
    for grad in grads:
        clamp_(grad, min=smallest)


def foreach_clamp_max_(grads: Sequence[Tensor], largest: float) -> None:
    """Compute `torch._foreach_clamp_max_`."""
    for grad in grads:
        clamp_(grad, max=largest)


ON_ROWS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.linalg.vector_norm: vector_norm,
    torch._foreach_norm: foreach_norm,
    torch._foreach_mul_: foreach_mul_,
    Tensor.clamp_: clamp_,
    torch._foreach_clamp_min_: foreach_clamp_min_,
    torch._foreach_clamp_max_: foreach_clamp_max_,
}
"""What `torch.nn.utils` calls on gradients and torch does not implement for sparse ones."""
