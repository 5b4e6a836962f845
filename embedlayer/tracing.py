"""Whether the code that runs now is being exported, or transformed by `torch.func` and its relatives.

Fused functions and custom operators are faster than the definitions in plain PyTorch, and they are opaque: they cannot
be batched, differentiated forwards or translated to another format. Where one of these is asked for, the definition is
used instead. These functions decide. Nothing else in the package asks torch for its transforms, for some of which it
has no public question.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def transforms_active() -> bool:
    """Return whether a `torch.func` transform (`grad`, `vmap`, `jvp`, ...) is running.

    It is the question that `torch.autograd.Function.apply` asks.
    """
    active: bool = torch._C._are_functorch_transforms_active()
    return active


def plain_operators_only() -> bool:
    """Return whether custom operators must not be used: in `torch.export`, and under a `torch.func` transform.

    Data cannot be read there either, so nothing can be raised that depends on it.
    """
    return torch.compiler.is_exporting() or transforms_active()


def is_transformed(*tensors: Tensor | None) -> bool:
    """Return whether a `torch.func` transform is running, or one of the tensors stands for more than its values.

    It may carry a tangent (`torch.autograd.forward_ad`), or be a batch of gradients
    (`torch.autograd.grad(..., is_grads_batched=True)`).
    """
    if torch.compiler.is_compiling():
        return transforms_active()
    return transforms_active() or any(
        forward_ad.unpack_dual(x).tangent is not None or torch._C._functorch.is_legacy_batchedtensor(x)
        for x in tensors
        if x is not None
    )


def fusible(*tensors: Tensor | None) -> bool:
    """Return whether a fused function may compute with `tensors`: in eager mode, where no transform can see it.

    Example:
        >>> fusible(torch.ones(3))
        True
        >>> torch.func.vmap(lambda x: x + fusible(x))(torch.zeros(3))
        tensor([0., 0., 0.])
    """
    return not torch.compiler.is_compiling() and not is_transformed(*tensors)
