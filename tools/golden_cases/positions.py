"""Every position scheme: what is added, rotated and biased, with gradients, and the configuration."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from kinds import EMBED_DIM, MAX_SEQ_LEN, NUM_HEADS, POSITIONS

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the cases of this area."""
    for name in POSITIONS:
        for dtype in DTYPES:
            yield f"{name}, {str(dtype).removeprefix('torch.')}", partial(_applied, name, dtype)


def _applied(name: str, dtype: torch.dtype) -> object:
    """Return what a scheme adds, rotates and biases at the first positions, and the gradients."""
    scheme = POSITIONS[name]()
    x = torch.randn(2, MAX_SEQ_LEN - 2, EMBED_DIM).to(dtype).requires_grad_()
    q, k = (torch.randn(2, NUM_HEADS, 8, EMBED_DIM // NUM_HEADS).to(dtype).requires_grad_() for _ in range(2))
    axes = (3, 2, 8) if name.startswith(("rotary, axes", "rotary, channel", "rotary, axial")) else (8,)
    positions = torch.arange(8).expand(axes)
    added = scheme.add(x, torch.arange(MAX_SEQ_LEN - 2))
    rotated = scheme.rotate(q, k, positions)
    bias = scheme.bias(torch.arange(3), torch.arange(8))
    results = [each for each in (added, *rotated, bias) if isinstance(each, torch.Tensor)]
    loss = sum((each.float() ** 2 * torch.linspace(0, 1, each.shape[-1])).sum() for each in results)
    leaves = [x, q, k, *scheme.parameters()]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else None
    return {"results": results, "gradients": gradients, "config": scheme.config, "repr": repr(scheme)}
