"""Statistics and divergences on CUDA, with Triton kernels in their interpreter: no worse than on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import assert_no_worse
from covering import cases
from kernel_paths import cpu_taken_for_cuda
from torch import Tensor

from embedlayer.kernels.gpu.launch import launches_observed
from embedlayer.losses import (
    ForwardKL,
    JensenShannon,
    LinearLogits,
    ReverseKL,
    divergence,
    token_statistics,
    uncomputed_logits,
)

TARGETS = torch.arange(18).view(2, 9).mul(16).masked_fill(torch.arange(9) == 3, -100)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"softcap": 4.0, "logit_scale": 0.5, "padding_idx": 1, "mask_padding": True},
]
CAPPED = {"softcap": 4.0, "temperature": 2.0}


def statistics(h: Tensor, w: Tensor, b: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
    found = token_statistics(LinearLogits(h, w, bias=b, **options), TARGETS, top_k=5)
    return tuple(x for x in found if isinstance(x, Tensor) and x.is_floating_point())


def of_kind(kind: Any) -> Callable[..., tuple[Tensor, ...]]:
    def compute(h: Tensor, w: Tensor, b: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
        options = CAPPED if options else {}
        teacher = LinearLogits(h.detach().roll(1, -1), w.detach().roll(3, 0), bias=b.detach(), **options)
        return (divergence(LinearLogits(h, w, bias=b, **options), teacher, kind, labels=TARGETS, reduction="none"),)

    return compute


WORK: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "statistics": statistics,
    **{type(kind).__name__: of_kind(kind) for kind in (ForwardKL(), ReverseKL(), JensenShannon(0.3))},
}


@cases("name, options, dtype", WORK, OPTIONS, [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_no_worse_than_on_the_cpu(name, options, dtype, monkeypatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(uncomputed_logits, "FEW_LOGITS", {"cuda": 0})
    parts = [torch.randn(2, 9, 16).to(dtype), torch.randn(300, 16).to(dtype), torch.randn(300).to(dtype)]

    def run(dtype: torch.dtype) -> list[Tensor]:
        leaves = [part.to(dtype).requires_grad_() for part in parts]
        results = WORK[name](*leaves, options)
        factors = [torch.linspace(0.5, 1.5, each.numel()).view(each.shape) for each in results]
        total = sum((each * factor).sum() for each, factor in zip(results, factors, strict=True))
        return [*results, *torch.autograd.grad(total, leaves)]

    exact, plain = run(torch.float64), run(dtype)
    launched: list[str] = []
    with cpu_taken_for_cuda(triton=True), launches_observed(lambda each: launched.append(each.name)):
        fast = run(dtype)
    assert launched
    for ours, slow, right in zip(fast, plain, exact, strict=True):
        assert ours.dtype == slow.dtype
        slack = 4 * torch.finfo(slow.dtype).eps * right.abs().max().item()
        assert_no_worse(ours, slow, right, slack=slack)
