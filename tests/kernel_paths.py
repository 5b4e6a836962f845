"""How tests choose what computes: torch operators where numba is missing, and the branch for CUDA on the CPU."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from interpreted import Run, interpreted
from kernel_records import operation_of
from torch import Tensor

from embedlayer.core.devices import TAKEN_AS
from embedlayer.core.index_checks import target_record
from embedlayer.kernels import kernel, kernels_disabled
from embedlayer.kernels.gpu import availability
from embedlayer.kernels.gpu.launch import launches_observed
from embedlayer.losses import rows, targets

GPU_BACKENDS = ["triton", pytest.param("cuda", marks=pytest.mark.gpu)]
"""What runs Triton kernels, for `running_on`: the interpreter, and a GPU where there is one."""


@contextmanager
def running_on(backend: str) -> Iterator[None]:
    """Run kernels by numba on the CPU, Triton's in its interpreter (`"triton"`) or on a GPU (`"cuda"`).

    On a GPU tensors that are made inside the block are there, and memory that is allocated and not written is NaN, as
    in the interpreter. Skips where what is needed is missing.
    """
    if backend == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("triton" if backend == "cuda" else backend)
    if backend == "cuda":
        with torch.device("cuda"), _filled_memory():
            yield
            torch.cuda.synchronize()
    elif backend == "triton":
        with interpreted():
            yield
    else:
        yield
        assert kernel._failure.reason is None


@contextmanager
def _filled_memory() -> Iterator[None]:
    """Fill memory that is allocated with NaN, or with the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*deterministic")  # of operators that have no such algorithm
            torch.use_deterministic_algorithms(True, warn_only=True)
            yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def runs_of_kernels() -> Iterator[list[str]]:
    """Collect the names of CPU kernels that run in the block."""
    names, run = list[str](), kernel.Kernel.run

    def counted(self: kernel.Kernel, *arguments: Any, **options: Any) -> bool:
        names.append(self.name)
        return run(self, *arguments, **options)

    with patch.object(kernel.Kernel, "run", counted):
        yield names


@contextmanager
def launched_kernels() -> Iterator[list[str]]:
    """Collect the names of Triton kernels that are launched in the block."""
    names = list[str]()
    with launches_observed(lambda each: names.append(each.name)):
        yield names


def compilation_failure() -> str | None:
    """Return why a kernel could not be compiled in this process, or `None`."""
    return kernel._failure.reason


@contextmanager
def without_numba() -> Iterator[None]:
    """Compute as where numba is not installed."""
    with patch.object(kernel._failure, "reason", "numba is not installed"):
        yield


@contextmanager
def bfloat16_instructions(present: bool) -> Iterator[None]:
    """Compute as on a CPU that has, or has not, instructions for products of bfloat16."""
    with patch.object(rows, "_cpu_multiplies_bfloat16", lambda: present):
        yield


def capturing() -> AbstractContextManager[Any]:
    """Compute losses as while a CUDA graph is captured: no value can be read."""
    return patch.object(targets, "is_capturing", lambda x: True)


@contextmanager
def machine_unknown() -> Iterator[None]:
    """Forget in the block, and after it, what is known of this machine: whether kernels can be compiled."""
    checks = availability._installation_failure, availability._compilation_failure
    with (
        patch.object(kernel._failure, "reason", None),
        patch.object(operation_of("softmax.add_bfloat16").cpu[0], "_compiled", set()),
    ):
        for check in checks:
            check.cache_clear()
        yield
    for check in checks:
        check.cache_clear()


@contextmanager
def cpu_taken_for_cuda(*, triton: bool = False) -> Iterator[Run | None]:
    """Take CPU tensors for CUDA tensors; no target may be recorded at the end.

    Args:
        triton: Whether Triton kernels run, in Triton's interpreter; by default torch operators compute.

    Yields:
        What kernels did in the interpreter.
    """
    with (
        patch.dict(TAKEN_AS, cpu="cuda"),
        wide_products(),
        patch.object(availability, "_compilation_failure", lambda device: ""),
        interpreted() if triton else kernels_disabled() as run,
    ):
        yield run
        record = target_record(torch.device("cpu"))
        assert record.tolist() == [-1] * 4


BRANCHES = ("cpu", "cuda", "triton")
"""Code for CPUs, and that for CUDA by torch operators or by Triton kernels, for `on_branch`."""


def on_branch(branch: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function computes on one of `BRANCHES`, with CPU tensors."""
    with nullcontext() if branch == "cpu" else cpu_taken_for_cuda(triton=branch == "triton"):
        return function(*arguments)


@contextmanager
def wide_products() -> Iterator[None]:
    """Sum products of float16 and bfloat16 into float32 results, of copies; torch does it on CUDA alone."""
    with patch.object(torch, "mm", _wide(torch.mm)), patch.object(torch, "addmm", _wide(torch.addmm)):
        yield


def _wide(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a product that takes `out_dtype` on the CPU."""

    def with_out_dtype(*matrices: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        if out_dtype is None:
            return product(*matrices, out=out)
        assert matrices[-1].dtype == matrices[-2].dtype != out_dtype
        assert out is None or out.dtype == out_dtype
        return product(*(each.to(out_dtype) for each in matrices), out=out)

    return with_out_dtype
