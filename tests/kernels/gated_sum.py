"""An accelerated operation in one file, the example of CONTRIBUTING.md: `a + sigmoid(gate) * b`."""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.kernels.cpu.numbers import kernel, narrow, widen
from embedlayer.kernels.gpu.launch import Launch, launch
from embedlayer.kernels.operation import Operation


def gated_sum(a: Tensor, gate: Tensor, b: Tensor) -> Tensor:
    """Return `a + sigmoid(gate) * b`, for tensors of one shape and dtype."""
    return a + torch.sigmoid(gate) * b


@kernel
def add_gated(start: int, stop: int, a: Any, gate: Any, b: Any, out: Any) -> None:
    """Compute the numbers `start` to `stop - 1`; all arrays are `(N,)`."""
    for i in range(start, stop):
        out[i] = narrow(widen(a[i]) + widen(b[i]) / (1 + math.exp(-widen(gate[i]))), out[i])


@cache
def triton_kernels() -> Mapping[str, Launch]:
    """Return the Triton kernel and how it is launched."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=("count",))
    def add_gated_on_gpu(a, gate, b, out, count, SIZE: tl.constexpr):
        i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        x = tl.load(a + i, mask=i < count, other=0.0).to(tl.float32)
        g = tl.load(gate + i, mask=i < count, other=0.0).to(tl.float32)
        y = tl.load(b + i, mask=i < count, other=0.0).to(tl.float32)
        tl.store(out + i, (x + tl.sigmoid(g) * y).to(out.dtype.element_ty), mask=i < count)

    of_numbers = Launch(
        add_gated_on_gpu,
        grid=lambda a: (-(-a["count"] // a["SIZE"]),),
        types={**dict.fromkeys(("a", "gate", "b", "out"), "*z"), "count": "i32"},
        blocks={"SIZE": 1024},
        wide=(),
        reads=("a", "gate", "b"),
        writes=("out",),
    )
    return {"add_gated_on_gpu": of_numbers}


GATED_SUM = Operation(
    "gated sum of two tensors", gated_sum, cpu=[add_gated], gpu=triton_kernels, launches=["add_gated_on_gpu"]
)


@GATED_SUM.operator()
def gated_sum_in_one_pass(a: Tensor, gate: Tensor, b: Tensor) -> Tensor | None:
    """Compute `gated_sum` by a kernel; the result is contiguous."""
    a, gate, b = a.contiguous(), gate.contiguous(), b.contiguous()
    out = torch.empty_like(a)
    if device_kind(a) == "cuda":
        launch(triton_kernels(), "add_gated_on_gpu", a=a, gate=gate, b=b, out=out, count=out.numel())
        return out
    return out if add_gated.run(out.numel(), *(x.view(-1) for x in (a, gate, b, out)), block=1 << 15) else None
