"""The list of operations has every kernel, and says which implementation each operation takes."""

from importlib import import_module
from operator import attrgetter

import pytest
import torch
from package_modules import package_modules

from embedlayer.core.devices import TAKEN_AS
from embedlayer.kernels import kernels_disabled
from embedlayer.kernels.kernel import Kernel
from embedlayer.kernels.operations import OPERATIONS


@pytest.fixture(scope="module")
def triton_by_name() -> dict[str, bool]:
    """Return the CPU kernels that modules of the package run, by name, and whether Triton kernels do the same."""
    values = [value for module in package_modules() for value in vars(module).values()]
    values += [value for each in values if isinstance(each, dict) for value in each.values()]
    kernels = [each for each in values if isinstance(each, Kernel)]
    return {f"{each.module}.{each.name}": each.has_triton for each in sorted(kernels, key=lambda each: each.has_triton)}


def test_the_list_has_every_kernel_with_a_definition(triton_by_name) -> None:
    pytest.importorskip("triton")
    from embedlayer.kernels.gpu.launch import MODULES, launch_table

    for operation in OPERATIONS:
        module, _, name = operation.definition.partition(":")
        attrgetter(name)(import_module(f"embedlayer.{module}"))
    on_gpu = [f"{module}.{name}" for module in MODULES for name in launch_table(module)]
    assert sorted(name for each in OPERATIONS for name in each.gpu) == sorted(on_gpu)
    assert {name for each in OPERATIONS for name in each.cpu} == triton_by_name.keys()


@pytest.mark.parametrize("operation", [each for each in OPERATIONS if each.cpu], ids=lambda each: each.what)
def test_the_list_has_kernels_for_cuda_where_some_may_run(operation, triton_by_name) -> None:
    assert any(triton_by_name[name] for name in operation.cpu) == bool(operation.gpu)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "other"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.what)
def test_an_operation_takes_what_its_kernel_says(operation, kind, monkeypatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setitem(TAKEN_AS, "meta", kind)
    x = torch.zeros(3, device="cpu" if kind == "cpu" else "meta")
    has_kernels = bool({"cpu": operation.cpu, "cuda": operation.gpu}.get(kind))
    assert bool(operation.kernels(x)) == has_kernels
    for name in operation.cpu:
        assert Kernel(*name.split("."), has_triton=bool(operation.gpu)).applies(x) == has_kernels
    assert operation.refusal(x) == ("" if has_kernels else f"there is no kernel for {kind}")
    with kernels_disabled():
        assert operation.refusal(x)
