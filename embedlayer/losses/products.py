"""Matrix products of bfloat16 and float16: float32 for float16, and for bfloat16 on a CPU without instructions for it.

A product of float16 numbers may exceed 65,504, the largest of them, so it is not rounded to float16. Products of
bfloat16 have the range of float32. On a CPU without instructions torch multiplies narrow matrices by plain loops: 6 to
115 times as slow as float32 products of converted copies (AVX2, 256 x 768 by 2,048 x 768 and its gradients). All sum in
float32.
"""

from functools import cache

import torch
from torch import Tensor


def product_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """Return the dtype of the products of matrices on a device: their own, or float32.

    Args:
        dtype: Dtype of the matrices.
        device: Type of the device, `"cpu"`.
    """
    is_slow = dtype == torch.bfloat16 and device == "cpu" and not _cpu_multiplies_bfloat16()
    return torch.float32 if is_slow or dtype == torch.float16 else dtype


def matrix_product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b` in the dtype `product_dtype` of `b`; float32 of narrower matrices is not rounded again.

    On CUDA float16 matrices are multiplied as they are and summed in float32; `a` is rounded to float16 first.
    """
    dtype = product_dtype(b.dtype, b.device.type)
    if b.dtype == torch.float16 and b.is_cuda:
        return torch.mm(a.half(), b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def write_product(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """Compute `out = a @ b`, or `out += a @ b`, as `matrix_product` does; `a` and `out` may have another dtype."""
    if out.dtype == product_dtype(b.dtype, b.device.type) and not (b.dtype == torch.float16 and b.is_cuda):
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
