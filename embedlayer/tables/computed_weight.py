"""The `weight` of rows that no parameter stores, for code of other libraries that reads the weight of a table or head.

Trained rows over a frozen table, rows with PEFT's adapters, factors and codes are no matrix `(V, D)`. Other code asks
for its shape, dtype or device, multiplies by it, or passes it to an autograd function of its own.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import resolve_name

from embedlayer.core.block_sizes import TABLE_ROWS, block_size
from embedlayer.core.devices import device_kind
from embedlayer.core.errors import ShapeError, StaleRowsError
from embedlayer.core.formatting import a_or_an
from embedlayer.core.torch_state import (
    WITHOUT_VALUES,
    DisableTorchFunctionSubclass,
    make_wrapper_subclass,
    outside_of_graphs,
    transforms_active,
    tree_leaves,
)
from embedlayer.losses.rows import check_dtypes, one_index, row_within
from embedlayer.tables.table import TokenTable


class ComputedWeight(Tensor):
    """The rows of a table as a tensor `(V, D)` without memory, whose rows are computed when something reads them."""

    table: TokenTable
    sizes: Any
    is_transposed: bool
    is_detached: bool

    def __new__(
        cls, table: TokenTable, sizes: Any, *, is_transposed: bool = False, is_detached: bool = False
    ) -> "ComputedWeight":
        rows, width = sizes.shape if isinstance(sizes, Tensor) else (sizes.vocab_size, sizes.embed_dim)
        shape, strides = ((width, rows), (1, width)) if is_transposed else ((rows, width), (width, 1))
        weight: ComputedWeight = make_wrapper_subclass(
            cls, shape, strides=strides, dtype=sizes.dtype, device=sizes.device
        )
        weight.table, weight.sizes = table, sizes
        weight.is_transposed, weight.is_detached = is_transposed, is_detached
        weight._is_param = not is_transposed  # what `isinstance(weight, nn.Parameter)` reads
        return weight

    def is_of(self, other: object) -> bool:
        """Return whether another weight is computed by the same table."""
        return isinstance(other, ComputedWeight) and other.table is self.table

    def detached(self) -> "ComputedWeight":
        """Return the same weight without a place in the autograd graph."""
        return ComputedWeight(self.table, self.sizes, is_transposed=self.is_transposed, is_detached=True)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WITHOUT_VALUES:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        rule = RULES.get(func)
        result = None if rule is None else rule(*args, **kwargs)
        if result is None:
            raise _refusal(resolve_name(func) or repr(func), (args, kwargs))
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):  # of a tensor that autograd saves
            return args[0].detached()
        raise _refusal(str(func), (args, kwargs))


@outside_of_graphs
def computed_weight(
    table: TokenTable, tensors: Iterable[Tensor], sizes: Tensor | TokenTable | None = None
) -> ComputedWeight:
    """Return the rows of a table as a tensor, in the autograd graph behind those of `tensors` that are trained."""
    sizes = table if sizes is None else sizes
    if transforms_active():  # whose gradients follow the rules below, and no function of autograd
        return ComputedWeight(table, sizes)
    with torch.enable_grad():
        weight: ComputedWeight = _Weight.apply(table, sizes, *tensors)  # type: ignore[no-untyped-call]
        return weight


class ComputedRows(TokenTable):
    """Abstract: a table that stores its rows as something else than a matrix `(V, D)`."""

    @property
    def weight(self) -> Tensor:
        """Return the rows as a tensor without memory, for code that reads the weight of an `nn.Embedding`.

        `weight[ids]`, `F.linear(hidden, weight)` and `hidden @ weight.T` have the values and gradients of this table.
        Functions that need the whole matrix raise a `ShapeError`.
        """
        return computed_weight(self, self.parameters())


class _Weight(torch.autograd.Function):
    """Create the weight in the autograd graph; `backward` computes the gradients of what the rows are computed from."""

    @staticmethod
    def forward(ctx: Any, table: TokenTable, sizes: Any, *tensors: Tensor) -> ComputedWeight:
        ctx.table, ctx.tensors, ctx.versions = table, tensors, _versions(tensors)
        return ComputedWeight(table, sizes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if _versions(ctx.tensors) != ctx.versions:
            raise StaleRowsError(f"Rows of this {type(ctx.table).__name__} changed: call backward before step().")
        trained = [each for each in ctx.tensors if each.requires_grad]
        sums: list[Tensor | None] = [None for _ in trained]
        size = block_size(TABLE_ROWS, device_kind(grad))
        for start in range(0, len(grad), size):
            part = grad[start : start + size]
            with torch.enable_grad():
                rows = _rows(ctx.table, start, start + len(part))
            if rows.requires_grad:
                more = torch.autograd.grad(rows, trained, part.to(rows.dtype), allow_unused=True)
                pairs = zip(sums, more, strict=True)
                sums = [new if old is None else old if new is None else old + new for old, new in pairs]
        gradients = iter(sums)
        return (None, None, *(next(gradients) if each.requires_grad else None for each in ctx.tensors))


class _Transposed(torch.autograd.Function):
    """Transpose a weight without memory."""

    @staticmethod
    def forward(ctx: Any, weight: ComputedWeight) -> ComputedWeight:
        ctx.set_materialize_grads(False)
        options = {"is_transposed": not weight.is_transposed, "is_detached": weight.is_detached}
        return ComputedWeight(weight.table, weight.sizes, **options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.t()


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return how often each tensor was written in place, as torch counts it."""
    return [0 if each.is_inference() else each._version for each in tensors]


def _rows(table: TokenTable, start: int, stop: int) -> Tensor:
    """Return rows `start` to `stop - 1` of a table; the padding row gets no gradient, as in products with it."""
    rows, fixed = table.rows(start, stop), row_within(table.padding_idx, start, stop)
    if fixed is None or not rows.requires_grad:
        return rows
    return rows.index_copy(0, one_index(fixed, rows), rows[fixed : fixed + 1].detach())


def _refusal(name: str, arguments: Any) -> ShapeError:
    """Return, without raising it, the error for a function that cannot read the weight among its arguments."""
    table = next(each.table for each in tree_leaves(arguments) if isinstance(each, ComputedWeight))
    way = "call head(hidden), F.linear(hidden, weight) or weight[start:stop], or patch_trainer(trainer)"
    return ShapeError(f"{name} reads the weight of {a_or_an(table)}, which stores no such matrix: {way}.")


def _is_readable(weight: object, *, is_transposed: bool = False) -> TypeGuard[ComputedWeight]:
    """Return whether a value is a weight, or a transposed one, whose rows are those of the logits of its table."""
    if not isinstance(weight, ComputedWeight) or weight.is_transposed != is_transposed:
        return False
    return type(weight.table).logits is TokenTable.logits


# What functions return that have a rule; `None` for arguments without one


def _products(hidden: Tensor, weight: ComputedWeight) -> Tensor:
    """Return `hidden @ rows.T`."""
    check_dtypes(hidden, weight.dtype, None)
    table = weight.table
    if not weight.is_detached or not torch.is_grad_enabled():
        return table.raw_logits(hidden)
    size, parts = block_size(TABLE_ROWS, device_kind(hidden)), []
    for start in range(0, table.vocab_size, size):
        with torch.no_grad():
            rows = table.rows(start, min(start + size, table.vocab_size))
        parts.append(F.linear(hidden, rows))
    return torch.cat(parts, dim=-1)


def _linear(input: Any, weight: Any, bias: Tensor | None = None) -> Tensor | None:
    if not _is_readable(weight) or isinstance(input, ComputedWeight):
        return None
    products = _products(input, weight)
    return products if bias is None else products + bias.to(products.dtype)


def _matmul(input: Any, other: Any, out: Tensor | None = None) -> Tensor | None:
    """Return `input @ weight.T`."""
    if not _is_readable(other, is_transposed=True) or isinstance(input, ComputedWeight) or out is not None:
        return None
    return _products(input, other)


def _transposed(weight: ComputedWeight, *dims: int) -> ComputedWeight | None:
    if dims and {each % 2 for each in dims} != {0, 1}:
        return None
    result: ComputedWeight = _Transposed.apply(weight)  # type: ignore[no-untyped-call]
    return result


def _indexed(weight: Any, key: Any) -> Tensor | None:
    """Return `weight[key]`: a row, or rows of a range or of token IDs, or columns of them."""
    first, *columns = key if isinstance(key, tuple) else (key,)
    if not _is_readable(weight) or not all(isinstance(each, int | slice) for each in columns):
        return None
    with torch.set_grad_enabled(torch.is_grad_enabled() and not weight.is_detached):
        if isinstance(first, slice) and first.step in (None, 1):
            start, stop, _ = first.indices(len(weight))
            rows = _rows(weight.table, start, max(start, stop))
        elif isinstance(first, int) and not isinstance(first, bool):
            row = range(len(weight))[first]
            rows = _rows(weight.table, row, row + 1)[0]
        elif isinstance(first, Tensor) and first.dtype in (torch.int64, torch.int32):
            rows = weight.table.look_up(first)
        else:
            return None
    return rows[(..., *columns)] if columns else rows


def _embedding(
    input: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    return None if max_norm is not None or scale_grad_by_freq or sparse else _indexed(weight, input)


def _converted(convert: Callable[..., Tensor], weight: ComputedWeight, *args: Any, **kwargs: Any) -> Tensor | None:
    """Return the weight itself if a conversion changes neither its dtype nor its device."""
    like = torch.empty(0, dtype=weight.dtype, device=weight.device)
    converted = convert(like, *args, **kwargs)
    return weight if (converted.dtype, converted.device) == (like.dtype, like.device) else None


def _shown(weight: ComputedWeight, **_: Any) -> str:
    """Return what `print` shows."""
    return f"ComputedWeight({', '.join(map(str, weight.shape))}, rows of {a_or_an(weight.table)})"


RULES: Mapping[Any, Callable[..., Any]] = {
    F.linear: _linear,
    **dict.fromkeys([torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__], _matmul),
    **dict.fromkeys([torch.t, torch.transpose, Tensor.t, Tensor.transpose], _transposed),
    **dict.fromkeys([cast(Any, Tensor.T).__get__, cast(Any, Tensor.mT).__get__], _transposed),
    Tensor.__getitem__: _indexed,
    F.embedding: _embedding,
    **{each: partial(_converted, each) for each in (Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16)},
    **{each: partial(_converted, each) for each in (Tensor.double, Tensor.cpu, Tensor.cuda, Tensor.contiguous)},
    **dict.fromkeys([torch.detach, Tensor.detach, cast(Any, Tensor.data).__get__], ComputedWeight.detached),
    Tensor.__repr__: _shown,
}
"""Function -> what it returns for a computed weight; `None` for arguments that need all its numbers."""
