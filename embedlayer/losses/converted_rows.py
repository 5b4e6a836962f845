"""Products with rows of another dtype than that of the hidden states: converted a block at a time, never as a whole."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embedlayer.core.block_sizes import CONVERTED_ROWS, block_size
from embedlayer.core.devices import autocast, autocast_dtype, device_kind
from embedlayer.core.errors import ShapeError
from embedlayer.core.torch_state import fusible, has_memory, is_transformed, plain_operators_only

Result = TypeVar("Result")


def check_dtypes(hidden: Tensor, dtype: torch.dtype, head_dtype: torch.dtype | None) -> None:
    """Check that hidden states have the dtype of the rows, unless `head_dtype` or autocast decides."""
    if hidden.dtype != dtype and head_dtype is None and autocast_dtype(hidden) is None:
        raise ShapeError(
            f"hidden is {hidden.dtype} and the rows {dtype}: pass head_dtype=torch.float32, or convert one of them."
        )


class ConvertedRows:
    """Rows in the dtype of their products, some at a time."""

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
