"""Products with the rows of a weight: their dtype, a row without gradient, parts with one gradient, padded tokens.

Products of float16 are float32, and so are products of bfloat16 on a CPU without instructions for it. On CUDA products
of both are summed into float32 results without being rounded (`out_dtype` of torch). A product of float16 numbers may
exceed 65,504, the largest of them, so it is not rounded to float16. Products of bfloat16 have the range of float32. On
a CPU without instructions torch multiplies narrow matrices by plain loops: 6 to 115 times as slow as float32 products
of converted copies (AVX2, 256 x 768 by 2,048 x 768 and its gradients). All sum in float32. With `head_dtype` products
are float32 whatever is multiplied. Logits of bfloat16 are rounded to it once, also where their products are float32.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embedlayer.core.block_sizes import CONVERTED_ROWS, block_size
from embedlayer.core.devices import autocast, autocast_dtype, device_kind
from embedlayer.core.errors import ShapeError
from embedlayer.core.partitioned import is_sharded
from embedlayer.core.torch_state import (
    PLAIN_TYPES,
    fusible,
    has_memory,
    is_exporting,
    is_transformed,
    plain_operators_only,
)
from embedlayer.losses.chunk_size import INVARIANT_MULTIPLES

Result = TypeVar("Result")


def check_dtypes(hidden: Tensor, dtype: torch.dtype, head_dtype: torch.dtype | None) -> None:
    """Check that hidden states have the dtype of the rows, unless `head_dtype` or autocast decides."""
    if hidden.dtype != dtype and head_dtype is None and autocast_dtype(hidden) is None:
        raise ShapeError(
            f"hidden is {hidden.dtype} and the rows {dtype}: pass head_dtype=torch.float32, or convert one of them."
        )


def product_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """Return the dtype of the products of matrices on a device: their own, or float32."""
    is_slow = dtype == torch.bfloat16 and device == "cpu" and not _cpu_multiplies_bfloat16()
    return torch.float32 if is_slow or dtype == torch.float16 else dtype


def matrix_product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b` in the dtype `product_dtype` of `b`; float32 of narrower matrices is not rounded again."""
    dtype = product_dtype(b.dtype, device_kind(b))
    return a.to(dtype) @ b.to(dtype)


def has_wide_products(dtype: torch.dtype, device: str) -> bool:
    """Return whether matrices of a dtype are multiplied as they are, and the products summed into float32 results."""
    return device == "cuda" and dtype in (torch.float16, torch.bfloat16) and torch.version.hip is None


def write_product(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """Compute `out = a @ b`, or `out += a @ b`, as `matrix_product` does; `a` and `out` may have another dtype."""
    if out.dtype == torch.float32 and has_wide_products(b.dtype, device_kind(b)):
        if add:
            torch.addmm(out, a.to(b.dtype), b, out_dtype=torch.float32, out=out)
        else:
            torch.mm(a.to(b.dtype), b, out_dtype=torch.float32, out=out)
    elif out.dtype == product_dtype(b.dtype, device_kind(b)):
        out.addmm_(a.to(out.dtype), b.to(out.dtype), beta=1 if add else 0)
    elif add:
        out.add_(matrix_product(a, b))
    else:
        out.copy_(matrix_product(a, b))


@cache
def _cpu_multiplies_bfloat16() -> bool:
    """Return whether torch multiplies matrices of bfloat16 by instructions of this CPU, as far as it says."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is None or bool(supported())


class ConvertedRows:
    """Rows in the dtype of their products, some at a time."""

    # Converted rows are in one buffer, which the next call overwrites; rows that have the dtype already are views.

    def __init__(self, rows: Float[Tensor, "V D"], dtype: torch.dtype) -> None:
        self.rows, self.dtype = rows, dtype
        self._size = block_size(CONVERTED_ROWS, device_kind(rows))
        self._buffer: Tensor | None = None

    @property
    def are_stored(self) -> bool:
        """Return whether the rows have the dtype of the products."""
        return self.rows.dtype == self.dtype

    def parts(self, start: int, stop: int) -> Iterator[slice]:
        size = max(stop - start, 1) if self.are_stored else self._size
        return (slice(first, min(first + size, stop)) for first in range(start, stop, size))

    def __getitem__(self, part: slice) -> Float[Tensor, "N D"]:
        rows = self.rows[part]
        if self.are_stored:
            return rows
        if self._buffer is None or len(self._buffer) < len(rows):
            self._buffer = torch.empty_like(rows, dtype=self.dtype)
        return self._buffer[: len(rows)].copy_(rows)


def linear(
    hidden: Float[Tensor, "*batch D"], weight: Float[Tensor, "V D"], bias: Float[Tensor, " V"] | None = None
) -> Float[Tensor, "*batch V"]:
    """Compute `hidden @ weight.T + bias` in the dtype of the hidden states, or of autocast if it is active."""
    if hidden.dtype == weight.dtype or autocast_dtype(hidden) is not None:
        return F.linear(hidden, weight, bias)
    if plain_operators_only() or is_transformed(hidden, weight):
        products = F.linear(hidden, weight.to(hidden.dtype))
    elif _overwrites(hidden, weight):
        rows, flat = ConvertedRows(weight.detach(), hidden.dtype), hidden.reshape(-1, hidden.shape[-1])
        products = hidden.new_empty(len(flat), len(weight))
        for part in rows.parts(0, len(weight)):
            torch.mm(flat, rows[part].T, out=products[:, part])
        products = products.view(*hidden.shape[:-1], len(weight))
    else:
        size = block_size(CONVERTED_ROWS, device_kind(weight))
        again = partial(checkpoint, _converted, use_reentrant=False, preserve_rng_state=False)
        compute = _converted if torch.compiler.is_compiling() else again
        products = torch.cat([compute(hidden, rows) for rows in weight.split(size)], dim=-1)
    return products if bias is None else products + bias


def _converted(hidden: Tensor, rows: Tensor) -> Tensor:
    """Return `hidden @ rows.T` in the dtype of the hidden states."""
    return F.linear(hidden, rows.to(hidden.dtype))


def _overwrites(*tensors: Tensor) -> bool:
    """Return whether results may be written in place: autograd records nothing, and all have memory of their own."""
    is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return not is_recorded and fusible(*tensors) and all(has_memory(x) for x in tensors)


def in_head_dtype(
    function: Callable[[Tensor], Result], hidden: Float[Tensor, "*batch D"], head_dtype: torch.dtype | None
) -> Result:
    """Return `function(hidden)`: with `head_dtype` of hidden states of this dtype, and without autocast."""
    if head_dtype is None:
        return function(hidden)
    with autocast(hidden, None):
        return function(hidden.to(head_dtype))


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


def padded_states(rows: Tensor, multiple: int) -> Tensor:
    """Return a row of each token, `(N, ...)`, followed by rows of zeros up to a number of rows that is a multiple."""
    # Above a multiple of 1 all results are contiguous: products of rows with other strides are rounded differently.
    padding = -len(rows) % multiple
    if padding:
        return torch.cat([rows, rows.new_zeros(padding, *rows.shape[1:])])
    return rows if multiple == 1 else rows.contiguous()


def padded_tokens(hidden: Tensor) -> Tensor:
    """Return hidden states `(..., D)` as `(N, D)`, padded to a multiple of tokens; see `batch_invariance`."""
    return padded_states(hidden.reshape(-1, hidden.shape[-1]), INVARIANT_MULTIPLES[-1])


def own_tokens(states: Tensor, hidden: Tensor) -> Tensor:
    """Return the results `(..., R)` of hidden states `(..., D)` from those of `padded_tokens`, `(N, R)`."""
    shape = hidden.shape[:-1]
    return states[: shape.numel()].view(*shape, states.shape[-1])
