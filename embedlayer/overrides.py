"""Whether a faster computation may take the place of the calls that it stands for.

A fused path computes the same numbers as a few public calls. It may be taken only where nobody could notice: where each
of these methods is the one that the fused path was written for, and no hook waits for the call.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling `module` runs anything beside its `forward`: hooks of its own or of all modules.

    torch has no public way to ask this, so all private names of torch that it takes are here. They are those that
    `nn.Module.__call__` itself reads: to find out whether it can call `forward` directly, and for `Module.compile`.
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
    """Return whether each method, by its name, is the given function and nothing else.

    It is not where a subclass overrides the method, where somebody assigned another one to the class or to the
    instance (as accelerate does with `forward`), and where `module` has no such method.
    """
    kind, own = type(module), vars(module)
    return all(name not in own and getattr(kind, name, None) is method for name, method in methods.items())


def is_current(kind: type, shortcut: str, definition: str) -> bool:
    """Return whether the method `shortcut` of a class still gives what its method `definition` gives.

    The class that defines the shortcut knew the definition. A subclass that overrides the definition alone has left the
    shortcut behind.

    Example:
        >>> class Doubled(TokenEmbedding):
        ...     def rows(self, start, stop):
        ...         return 2 * super().rows(start, stop)
        >>> is_current(TokenEmbedding, "as_linear", "rows"), is_current(Doubled, "as_linear", "rows")
        (True, False)
    """
    return issubclass(_defining(kind, shortcut), _defining(kind, definition))


def _defining(kind: type, name: str) -> type:
    return next(part for part in kind.__mro__ if name in vars(part))
