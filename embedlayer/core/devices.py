"""The kind of device of a tensor. Each choice between code for CPUs and code for GPUs asks here and nowhere else.

So the tests can take the CUDA branch of every choice on a machine without a GPU: `TAKEN_AS["meta"] = "cuda"` counts
operators, launches and waits on tensors without memory; `TAKEN_AS["cpu"] = "cuda"` runs Triton's interpreter.
"""

import torch
from torch import Tensor

TAKEN_AS: dict[str, str] = {}
"""Types of devices that are taken as another type; only tests write it."""


def device_kind(x: Tensor | torch.device) -> str:
    """Return the type of the device of a tensor, `"cpu"`, `"cuda"`, ..., or the type as which tests take it.

    Args:
        x: A tensor, or a device.

    Example:
        >>> device_kind(torch.zeros(2))
        'cpu'
    """
    kind = x.type if isinstance(x, torch.device) else x.device.type
    return TAKEN_AS.get(kind, kind)
