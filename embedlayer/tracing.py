"""Checks whether the running code is exported, or transformed by `torch.func`.

Fused functions and custom operators are faster than plain PyTorch, but they cannot be batched, differentiated forwards
or exported. Under a transform or an export the plain definition is used instead; these functions decide. Torch has no
public function for some of the checks, so its private ones are used here and nowhere else. So this is also where a
release of torch that is not supported is refused: every table, position scheme, head and loss imports this module.
"""

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from embedlayer.errors import check_release

check_release("torch", torch.__version__)


def transforms_active() -> bool:
    """Return whether a `torch.func` transform (`grad`, `vmap`, `jvp`, ...) is running.

    `torch.autograd.Function.apply` makes the same check.
    """
    active: bool = torch._C._are_functorch_transforms_active()
    return active


def is_exporting() -> bool:
    """Return whether `torch.export` is running, as `torch.compiler.is_exporting` does.

    In graphs of `torch.compile` torch 2.11 takes that function for `True`.
    """
    return torch.compiler._is_exporting_flag


def plain_operators_only() -> bool:
    """Return whether custom operators must not be used: in `torch.export`, and under a `torch.func` transform.

    Values of tensors cannot be read there, so a check of values cannot raise an error.
    """
    return is_exporting() or transforms_active()


def is_transformed(*tensors: Tensor | None) -> bool:
    """Return whether a `torch.func` transform is running, or a tensor takes part in an older form of one.

    These forms are tensors with a tangent (`torch.autograd.forward_ad`), and batched gradients
    (`torch.autograd.grad(..., is_grads_batched=True)`). Under `torch.compile` only `torch.func` is checked.

    Args:
        *tensors: Tensors to check; `None` is skipped.
    """
    if torch.compiler.is_compiling():
        return transforms_active()
    return transforms_active() or any(
        forward_ad.unpack_dual(x).tangent is not None or torch._C._functorch.is_legacy_batchedtensor(x)
        for x in tensors
        if x is not None
    )


outside_of_graphs = _disable_dynamo
"""Decorate a function such that a graph of `torch.compile` ends before each call of it, and the next begins after it.

Unlike `torch.compiler.disable`, the decorator does not import the compiler; the first call does.
"""


def fusible(*tensors: Tensor | None) -> bool:
    """Return whether a fused function may compute with `tensors`: in eager mode and without transforms.

    Args:
        *tensors: Inputs of the function; `None` is skipped.

    Example:
        >>> fusible(torch.ones(3))
        True
        >>> torch.func.vmap(lambda x: x + fusible(x))(torch.zeros(3))
        tensor([0., 0., 0.])
    """
    return not torch.compiler.is_compiling() and not is_transformed(*tensors)


def is_dispatch_mode_active() -> bool:
    """Return whether a `TorchDispatchMode` is active, such as `FakeTensorMode` or a counter of operators.

    It sees every operator. Code that computes without operators would go unnoticed, and fake tensors have no memory.
    """
    active: int = torch._C._len_torch_dispatch_stack()
    return active > 0


def has_more_than(x: Tensor, numel: int) -> bool:
    """Return whether `x` has more than `numel` elements; `False` in a graph whose dynamic shapes leave it open.

    The comparison adds no guard to the graph.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # 0.3 s, which only graphs need

    return statically_known_true(x.numel() > numel)


def is_function_mode_active() -> bool:
    """Return whether a `TorchFunctionMode` is active, such as a default device. It sees every torch function."""
    active: int = torch._C._len_torch_function_stack()
    return active > 0
