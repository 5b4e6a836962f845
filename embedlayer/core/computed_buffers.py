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
    """Abstract base of modules whose buffers are computed from constructor arguments and are never saved.

    A subclass defines `buffer_values`, and calls `recompute_buffers` at the end of `__init__`. After each cast or move
    of the module the buffers are computed again. So `.half()` does not round them, and `to_empty` does not lose them.
    """

    @abstractmethod
    def buffer_values(self) -> dict[str, Tensor]:
        """Return the value of each buffer by the buffer's name, computed on the CPU from the constructor's arguments.

        A subclass defines this. The dtypes of the values stay those of the buffers, whatever the module is cast to.
        """

    def recompute_buffers(self, device: torch.device | str | None = None) -> None:
        """Compute the buffers with `buffer_values`, and register them as non-persistent buffers on `device`.

        A subclass calls this at the end of `__init__`. `None` is torch's default device.
        """
        with torch.device("cpu"):
            tensors = self.buffer_values()
        device = torch.get_default_device() if device is None else device
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ComputedBuffers":
        """Cast or move the module by `fn` as torch does, then compute its buffers again on their new device."""
        names = self._non_persistent_buffers_set
        unknown = [buffer for name, buffer in self._buffers.items() if name in names and buffer is not None]
        unknown = [buffer for buffer in unknown if buffer.is_meta]

        def moved(tensor: Tensor) -> Tensor:
            """Return `fn(tensor)`; for computed buffers on the meta device, call `apply_or_allocate`."""
            return apply_or_allocate(fn, tensor) if any(tensor is each for each in unknown) else fn(tensor)

        super()._apply(moved if unknown else fn, recurse)  # type: ignore[no-untyped-call]
        computed = [buffer for name, buffer in self._buffers.items() if name in names and buffer is not None]
        if computed:
            self.recompute_buffers(computed[0].device)
        return self


def apply_or_allocate(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return `fn(tensor)`, or a tensor with arbitrary values if `fn` cannot copy a tensor on the meta device."""
    try:
        return fn(tensor)
    except NotImplementedError:  # torch: there is nothing to copy out of the meta device
        if not tensor.is_meta:
            raise
        return fn(torch.empty_like(tensor, device="cpu"))


def recompute_all_buffers(module: nn.Module, device: torch.device | str) -> None:
    """Call `recompute_buffers(device)` of every `ComputedBuffers` in a module, the module itself included."""
    for part in module.modules():
        if isinstance(part, ComputedBuffers):
            part.recompute_buffers(device)
