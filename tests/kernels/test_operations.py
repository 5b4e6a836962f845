"""The list of operations has every kernel; `embedlayer doctor` shows which implementation each operation takes."""

from importlib import import_module
from operator import attrgetter

import pytest
from package_modules import package_modules

from embedlayer.kernels.kernel import Kernel
from embedlayer.kernels.operations import OPERATIONS


def test_the_list_has_every_kernel_with_a_definition() -> None:
    pytest.importorskip("triton")
    from embedlayer.kernels.gpu.launch import MODULES, launch_table

    values = [value for module in package_modules() for value in vars(module).values()]
    values += [value for each in values if isinstance(each, dict) for value in each.values()]
    kernels = sorted((each for each in values if isinstance(each, Kernel)), key=lambda each: each.has_triton)
    on_cpu = {f"{each.module}.{each.name}": each.has_triton for each in kernels}
    for operation in OPERATIONS:
        module, _, name = operation.definition.partition(":")
        attrgetter(name)(import_module(f"embedlayer.{module}"))
    on_gpu = [f"{module}.{name}" for module in MODULES for name in launch_table(module)]
    assert sorted(name for each in OPERATIONS for name in each.gpu) == sorted(on_gpu)
    assert {name for each in OPERATIONS for name in each.cpu} == on_cpu.keys()
    for operation in OPERATIONS:
        assert not operation.cpu or any(on_cpu[name] for name in operation.cpu) == bool(operation.gpu)
