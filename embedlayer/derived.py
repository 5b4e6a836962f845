"""Tensors that follow from a module's arguments: angle frequencies, slopes, sinusoids, counters.

They are not learned, so they are not saved; and they are exact, so `.to(torch.bfloat16)`, `.half()`, a birth on the
meta device and `to_empty` must leave them right. Each of these goes through `Module._apply`; there the tensors are
made again from the arguments, on the device that the module has moved to.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Derived(nn.Module, ABC):
    """Abstract: a module whose `derived()` tensors are non-persistent buffers that no cast or move can harm."""

    @abstractmethod
    def derived(self) -> dict[str, Tensor]:
        """The tensors by name, computed on the CPU from the constructor's arguments."""

    def derive(self, device: torch.device | str | None = None) -> None:
        """Make the buffers again on `device`. Call it once at the end of `__init__`."""
        with torch.device("cpu"):
            tensors = self.derived()
        device = torch.get_default_device() if device is None else device
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Derived":
        names = self._non_persistent_buffers_set
        unknown = [buffer for name, buffer in self._buffers.items() if name in names and buffer is not None]
        unknown = [buffer for buffer in unknown if buffer.is_meta]

        def moved(tensor: Tensor) -> Tensor:
            return applied(fn, tensor) if any(tensor is each for each in unknown) else fn(tensor)

        super()._apply(moved if unknown else fn, recurse)  # type: ignore[no-untyped-call]
        derived = [buffer for name, buffer in self._buffers.items() if name in names and buffer is not None]
        if derived:
            self.derive(derived[0].device)
        return self


def applied(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return `fn(tensor)`, of a tensor whose numbers are computed afterwards: it may leave the meta device without any.

    Args:
        fn: What `Module._apply` is called with.
        tensor: A derived tensor.
    """
    try:
        return fn(tensor)
    except NotImplementedError:  # torch: there is nothing to copy out of the meta device
        if not tensor.is_meta:
            raise
        return fn(torch.empty_like(tensor, device="cpu"))


def derive_all(module: nn.Module, device: torch.device | str) -> None:
    """Make the derived tensors of a module and all inside it on `device`, after a birth on the meta device."""
    for part in module.modules():
        if isinstance(part, Derived):
            part.derive(device)
