"""Matrix products of hidden states and rows: in which dtype, and with rows that are converted a block at a time.

Products of float16 are float32, and so are products of bfloat16 on a CPU without instructions for it. On CUDA products
of both are summed into float32 results without being rounded (`out_dtype` of torch). A product of float16 numbers may
exceed 65,504, the largest of them, so it is not rounded to float16. Products of bfloat16 have the range of float32. On
a CPU without instructions torch multiplies narrow matrices by plain loops: 6 to 115 times as slow as float32 products
of converted copies (AVX2, 256 x 768 by 2,048 x 768 and its gradients). All sum in float32. With `head_dtype` products
are float32 whatever is multiplied. Logits of bfloat16 are rounded to it once, also where their products are float32.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
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
