"""Whether Triton kernels may compute with some tensors. Where they may not, torch operators compute."""

import logging
import os
import sysconfig
from functools import cache
from pathlib import Path
from shutil import which
from subprocess import SubprocessError

import torch
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.torch_state import has_memory, is_ordinary_or_fake
from embedlayer.kernels.gpu.launch import Launch, launch

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Floating-point dtypes of Triton kernels."""

OLDEST_TRITON = (3, 5)
"""The oldest release that compiles the kernels as the tests check it; torch 2.9 for CUDA comes with it."""

log = logging.getLogger("embedlayer")


def triton_refusal(*tensors: Tensor | None) -> str:
    """Return why Triton kernels may not compute with `tensors`, or an empty string if they may; `None` is skipped.

    They must be ordinary or fake tensors, and strided, all on one CUDA device. The first call for a device compiles a
    small kernel and waits. Where Triton is missing, too old or cannot compile, one line in the log says so.
    """
    present = [x for x in tensors if x is not None]
    devices = {x.device for x in present}
    if len(devices) > 1 or device_kind(present[0]) != "cuda":
        return "the tensors are not on one CUDA device"
    for x in present:
        is_number = x.dtype in FLOATS or not (x.dtype.is_floating_point or x.dtype.is_complex)
        if not (is_number and x.layout is torch.strided and is_ordinary_or_fake(x)):
            return f"no Triton kernel takes {type(x).__name__} of {x.dtype}"
    return _installation_failure() or (_compilation_failure(devices.pop()) if all(map(has_memory, present)) else "")


@cache
def _installation_failure() -> str:
    """Return why no kernel can run in this process, or an empty string; logged when it is found."""
    if torch.version.hip is not None:
        return _logged("the kernels are for CUDA, and this torch is for ROCm")
    advice = f"on Linux: pip install torch=={torch.__version__.partition('+')[0]} triton"
    try:
        import triton
    except (ImportError, OSError, RuntimeError) as error:
        missing = isinstance(error, ModuleNotFoundError)
        return _logged(f"Triton {'is not installed' if missing else f'cannot be imported ({error})'}; {advice}")
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        return _logged(f"Triton {triton.__version__} is older than {'.'.join(map(str, OLDEST_TRITON))}; {advice}")
    return ""


@cache
def _compilation_failure(device: torch.device) -> str:
    """Launch a small kernel on a device once; return why it could not be compiled, or an empty string."""
    import triton
    import triton.language as tl

    @triton.jit
    def store_one(x):
        tl.store(x, 1.0)

    one = Launch(store_one, lambda a: (1,), types={"x": "*fp32"}, blocks={}, wide=(), reads=(), writes=("x",))
    try:
        launch({"store_one": one}, "store_one", x=torch.zeros(1, device=device))
    except (triton.TritonError, RuntimeError, OSError, SubprocessError) as error:
        compiler = os.environ.get("CC") or which("gcc") or which("clang")
        has_both = compiler and Path(sysconfig.get_path("include"), "Python.h").exists()
        advice = "; Triton needs a C compiler and Python's headers, on Debian: apt-get install gcc python3-dev"
        return _logged(f"{type(error).__name__}: {error}".splitlines()[0] + ("" if has_both else advice))
    return ""


def _logged(reason: str) -> str:
    """Log why kernels are off, and return the reason."""
    log.warning("Triton kernels are off, torch operators are used instead: %s", reason)
    return reason
