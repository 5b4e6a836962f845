"""Buffers that are computed from a module's arguments: rotary frequencies, ALiBi slopes, sinusoids.

They are not learned, so they are not saved. They are exact, so `.to(torch.bfloat16)`, `.half()`, construction on the
meta device and `to_empty` must not change them. All of these call `Module._apply`, and `ComputedBuffers` computes the
buffers again there, on the device that the module was moved to.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn


class ComputedBuffers(nn.Module, ABC):
    """Abstract: a module with non-persistent buffers, `buffer_values()`, that stay exact after casts and moves."""

    @abstractmethod
    def buffer_values(self) -> dict[str, Tensor]:
        """Return the buffers by name, computed on the CPU from the constructor's arguments."""

    def recompute_buffers(self, device: torch.device | str | None = None) -> None:
        """Compute the buffers and register them on `device`. Call this once at the end of `__init__`.

        Args:
            device: Device of the buffers; the default device if `None`.
        """
        with torch.device("cpu"):
            tensors = self.buffer_values()
        device = torch.get_default_device() if device is None else device
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ComputedBuffers":
        """Move or cast the module as in torch, and compute its buffers again."""
        names = self._non_persistent_buffers_set
        unknown = [buffer for name, buffer in self._buffers.items() if name in names and buffer is not None]
        unknown = [buffer for buffer in unknown if buffer.is_meta]

        def moved(tensor: Tensor) -> Tensor:
            """Apply `fn`, also to computed buffers on the meta device."""
            return apply_or_allocate(fn, tensor) if any(tensor is each for each in unknown) else fn(tensor)

        super()._apply(moved if unknown else fn, recurse)  # type: ignore[no-untyped-call]
        computed = [buffer for name, buffer in self._buffers.items() if name in names and buffer is not None]
        if computed:
            self.recompute_buffers(computed[0].device)
        return self


def apply_or_allocate(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return `fn(tensor)`; for a tensor on the meta device that `fn` cannot copy, `fn` of an uninitialized tensor.

    Use it for tensors that are computed again afterwards.

    Args:
        fn: Function that `Module._apply` was called with.
        tensor: A computed buffer.
    """
    try:
        return fn(tensor)
    except NotImplementedError:  # torch: there is nothing to copy out of the meta device
        if not tensor.is_meta:
            raise
        return fn(torch.empty_like(tensor, device="cpu"))


def recompute_all_buffers(module: nn.Module, device: torch.device | str) -> None:
    """Compute the buffers of a module and its submodules on `device`, after construction on the meta device."""
    for part in module.modules():
        if isinstance(part, ComputedBuffers):
            part.recompute_buffers(device)
