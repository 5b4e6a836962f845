"""The list of operations has every kernel, and says which implementation each operation takes."""

import re
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from embedlayer.core.devices import TAKEN_AS
from embedlayer.kernels import kernels_disabled
from embedlayer.kernels.kernel import Kernel
from embedlayer.kernels.operations import OPERATIONS

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "".join(file.read_text() for file in (ROOT / "embedlayer").rglob("*.py"))
CALLS = re.findall(r'Kernel\(\s*"(\w+)",\s*"(\w+)"(,\s*has_triton=True)?', SOURCE)


def test_the_list_has_every_kernel_with_a_definition_and_checks() -> None:
    pytest.importorskip("triton")
    from embedlayer.kernels.gpu.launch import MODULES, launch_table

    for operation in OPERATIONS:
        module, _, name = operation.definition.partition(":")
        attrgetter(name)(import_module(f"embedlayer.{module}"))
        assert operation.checks
        assert all((ROOT / "tests" / file).exists() for file in operation.checks), operation
    on_gpu = [f"{module}.{name}" for module in MODULES for name in launch_table(module)]
    assert sorted(name for each in OPERATIONS for name in each.gpu) == sorted(on_gpu)
    assert {name for each in OPERATIONS for name in each.cpu} == {f"{module}.{name}" for module, name, _ in CALLS}


@pytest.mark.parametrize("operation", [each for each in OPERATIONS if each.cpu], ids=lambda each: each.what)
def test_the_kernels_of_an_operation_run_on_cuda_if_the_list_has_some_for_it(operation) -> None:
    with_triton = {f"{module}.{name}" for module, name, has_triton in CALLS if has_triton}
    assert set(operation.cpu) & with_triton == (set(operation.cpu) if operation.gpu else set())


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
    assert operation.refusal(x) == ("" if has_kernels else f"the operation has no kernel for {kind}")
    with kernels_disabled():
        assert operation.refusal(x)
