"""The records of operations by the names of their kernels."""

from typing import Any

from embedlayer.cli.operations import OPERATIONS
from embedlayer.kernels.gpu.launch import launch
from embedlayer.kernels.operation import Operation


def operation_of(kernel: str) -> Operation:
    """Return the operation that launches a Triton kernel, such as `"rotate"`, or runs `"rotary.rotate_half_split"`."""
    return next(each for each in OPERATIONS for names in each.kernels.values() if kernel in names)


def launch_kernel(name: str, **arguments: Any) -> None:
    """Launch a Triton kernel of the package."""
    launch(operation_of(name).gpu(), name, **arguments)
