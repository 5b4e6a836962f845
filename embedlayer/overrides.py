"""Checks whether a fused path may replace the public calls that it computes.

A fused path computes the same numbers as a few public calls. It may be taken only where nothing could observe the
difference: each of these methods is the one that the fused path was written for, and the modules have no hooks.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling `module` runs more than its `forward`: its own hooks, global hooks, or `module.compile()`.

    Torch has no public function for this, so the private names of torch are here and nowhere else. They are those that
    `nn.Module.__call__` reads to decide whether it can call `forward` directly.
    """
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_forward_hooks
        or torch_module._global_backward_pre_hooks
        or torch_module._global_backward_hooks
        or module._compiled_call_impl is not None
    )


def is_unchanged(module: object, **methods: Callable[..., Any]) -> bool:
    """Return whether the methods of `module` are still the given functions.

    For example, `is_unchanged(head, forward=OutputHead.forward)` is `False` if a subclass overrides `forward`, or if
    another function was assigned to it in the class or the instance (accelerate does so). It is also `False` if `head`
    has no such method.

    Args:
        module: The module or other object.
        **methods: The expected function of each method, by the method's name.
    """
    kind, own = type(module), vars(module)
    return all(name not in own and getattr(kind, name, None) is method for name, method in methods.items())


def is_current(kind: type, shortcut: str, definition: str) -> bool:
    """Return whether a fast method of a class still computes what the plain method computes.

    This is `False` for a subclass that overrides the plain method and inherits the fast one.

    Args:
        kind: The class.
        shortcut: Name of the fast method.
        definition: Name of the plain method, which defines the result.

    Example:
        >>> class Doubled(TokenEmbedding):
        ...     def rows(self, start, stop):
        ...         return 2 * super().rows(start, stop)
        >>> is_current(TokenEmbedding, "as_linear", "rows"), is_current(Doubled, "as_linear", "rows")
        (True, False)
    """
    return issubclass(_defining(kind, shortcut), _defining(kind, definition))


def _defining(kind: type, name: str) -> type:
    """Return the first class in `kind.__mro__` whose own body defines the attribute `name`."""
    return next(part for part in kind.__mro__ if name in vars(part))
