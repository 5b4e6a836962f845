"""Matrix products of bfloat16 and float16, in float32 on a CPU that has no instructions for them.

There torch multiplies such matrices by plain loops: 6 to 115 times as slow as float32 products of converted copies
(AVX2, 256 x 768 by 2,048 x 768 and its gradients). Both sum in float32.
"""

from functools import cache

import torch
from torch import Tensor


def product_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """Return the dtype in which matrices are multiplied on a device: their own, or float32 where that is faster.

    Args:
        dtype: Dtype of the matrices.
        device: Type of the device, `"cpu"`.
    """
    is_narrow = dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if device == "cpu" and is_narrow and not _cpu_multiplies(dtype) else dtype


def matrix_product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b` in the dtype `product_dtype` of `b`; float32 of narrower matrices is not rounded again."""
    dtype = product_dtype(b.dtype, b.device.type)
    return a.to(dtype) @ b.to(dtype)


def write_product(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """Compute `out = a @ b`, or `out += a @ b`, as `matrix_product` does; `a` and `out` may have another dtype."""
    if out.dtype == product_dtype(b.dtype, b.device.type):
        out.addmm_(a.to(out.dtype), b.to(out.dtype), beta=1 if add else 0)
    elif add:
        out.add_(matrix_product(a, b))
    else:
        out.copy_(matrix_product(a, b))


@cache
def _cpu_multiplies(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies matrices of a narrow dtype by instructions of this CPU, as far as it says."""
    name = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    supported = getattr(torch.ops.mkldnn, name, None)
    return supported is None or bool(supported())
