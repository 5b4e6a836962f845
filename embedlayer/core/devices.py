"""The kind of device of a tensor. Each choice between code for CPUs and code for GPUs asks here and nowhere else.

So the tests can take the CUDA branch of every choice on a machine without a GPU: `TAKEN_AS["meta"] = "cuda"` counts
operators, launches and waits on tensors without memory; `TAKEN_AS["cpu"] = "cuda"` runs Triton's interpreter.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

TAKEN_AS: dict[str, str] = {}
"""Types of devices that are taken as another type; only tests write it."""


def device_kind(x: Tensor | torch.device) -> str:
    """Return the type of the device of a tensor, `"cpu"`, `"cuda"`, ..., or the type as which tests take it."""
    kind = x.type if isinstance(x, torch.device) else x.device.type
    return TAKEN_AS.get(kind, kind)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of `torch.autocast` on the device of a tensor, or `None` where it is off."""
    kind = device_kind(x)
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def autocast(x: Tensor | torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    kind = device_kind(x)
    return nullcontext() if kind == "meta" else torch.autocast(kind, dtype, enabled=dtype is not None)


class HostCopy:
    """A copy of a tensor's numbers to the host, which begins at once and is waited for when the numbers are read."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._copied = numbers, None
        self._values: Any = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            # so the host waits only for kernels before the copy
            self._copied = torch.cuda.current_stream(numbers.device).record_event()

    def tolist(self) -> Any:
        """Wait until the numbers are copied, and return them as `Tensor.tolist` does."""
        if self._values is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._values = self._numbers.tolist()
        return self._values
