"""`embedlayer doctor`: what computes each operation here, why, and what to install."""

import sys
from typing import Any

import pytest
import torch
from commands import answer, printed
from kernel_paths import machine_unknown

from embedlayer.cli import doctor
from embedlayer.cli.operations import OPERATIONS
from embedlayer.core.devices import TAKEN_AS

numba, triton = pytest.importorskip("numba"), pytest.importorskip("triton")

ON_CPU = [each.what for each in OPERATIONS if each.cpu]
ON_CUDA = [each.what for each in OPERATIONS if each.launches]


@pytest.fixture(autouse=True)
def unknown():
    with machine_unknown():
        yield


@pytest.fixture
def two_gpus(monkeypatch) -> None:
    """Two equal devices, whose tensors are on meta and are taken for tensors on CUDA."""
    monkeypatch.setitem(TAKEN_AS, "meta", "cuda")
    devices = [torch.device("cpu"), torch.device("meta", 0), torch.device("meta", 1)]
    monkeypatch.setattr(doctor, "usable_devices", lambda: devices)


def answers() -> dict[str, dict[str, dict[str, Any]]]:
    """Return what computes each operation, by operation and device."""
    return {each["operation"]: each["on"] for each in answer("doctor")["operations"]}


def by_kernels(device: str, compiler: str) -> list[str]:
    """Return the operations that kernels compute on a device."""
    return [what for what, on in answers().items() if on[device]["implementation"] == compiler]


def test_on_a_cpu_numba_computes_what_has_a_kernel() -> None:
    result = answer("doctor")
    assert [each["operation"] for each in result["operations"]] == [each.what for each in OPERATIONS]
    cpu = result["devices"][0]
    assert (cpu["device"], cpu["dtypes"], cpu["failure"]) == ("cpu", ["float32", "float64", "bfloat16"], "")
    assert result["versions"]["torch"] == torch.__version__
    assert result["versions"]["numba"] == numba.__version__
    for operation, each in zip(OPERATIONS, result["operations"], strict=True):
        on_cpu = each["on"]["cpu"]
        assert on_cpu["kernels"] == [kernel.label for kernel in operation.cpu]
        assert (on_cpu["implementation"] == "numba") == (on_cpu["reason"] == "") == bool(operation.cpu)


@pytest.mark.usefixtures("two_gpus")
def test_on_cuda_triton_computes_what_has_a_kernel() -> None:
    assert by_kernels("meta:0", "Triton") == by_kernels("meta:1", "Triton") == ON_CUDA
    assert by_kernels("cpu", "numba") == ON_CPU
    _, gpu, _ = answer("doctor")["devices"]
    assert gpu["dtypes"] == ["float32", "bfloat16", "float16"]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_fit_their_terminal_and_equal_devices_share_a_column(width, monkeypatch) -> None:
    monkeypatch.setattr("embedlayer.cli.printing.WIDTH_IN_FILES", width)
    text = printed("doctor")
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "meta:0-1" in text
    joined = " ".join(text.split())
    cells = {
        each.what: ("numba" if each.cpu else "torch", "Triton" if each.launches else "torch") for each in OPERATIONS
    }
    for place, what in enumerate(cells):
        start = f"{cells[what][0]} {cells[what][1]} {what.replace('`', '')}"
        assert start in joined, OPERATIONS[place]
    assert f"cpu, {len(OPERATIONS) - len(ON_CPU)} of {len(OPERATIONS)} operations:" in text


MISSING = {
    "numba": (lambda patch: patch.setitem(sys.modules, "numba", None), "cpu", "pip install 'embedlayer[fast]'"),
    "old numba": (lambda patch: patch.setattr(numba, "__version__", "0.9.1"), "cpu", "pip install -U 'embedlayer"),
    "Triton": (lambda patch: patch.setitem(sys.modules, "triton", None), "meta:0", "pip install torch=="),
    "old Triton": (lambda patch: patch.setattr(triton, "__version__", "3.1.0"), "meta:0", "3.1.0 is older than 3.5"),
    "ROCm": (lambda patch: patch.setattr(torch.version, "hip", "6.4"), "meta:0", "this torch is for ROCm"),
}
"""What is changed, the device whose kernels are off then, and a part of what is said."""


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_named_once_for_all_its_operations(name, monkeypatch) -> None:
    change, device, words = MISSING[name]
    change(monkeypatch)
    result = answer("doctor")
    compiler = "numba" if device == "cpu" else "Triton"
    reasons = {each["on"][device]["reason"] for each in result["operations"]}
    assert {each["on"][device]["implementation"] for each in result["operations"]} == {"torch"}
    (advice,) = result["advice"]
    assert reasons == {advice, f"there is no kernel for {TAKEN_AS.get(device.partition(':')[0], device)}"}
    assert words in advice
    assert (result["versions"][compiler] is None) == (name == compiler)
    text = printed("doctor")
    assert text.count(advice) == 1
    assert "; no kernels" in " ".join(text.split())


@pytest.mark.usefixtures("two_gpus")
def test_a_device_that_cannot_be_used_is_named(monkeypatch) -> None:
    zeros = torch.zeros

    def full(*sizes: int, device: torch.device | None = None, **options: Any) -> torch.Tensor:
        if device == torch.device("meta", 1):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nMore.")
        return zeros(*sizes, device=device, **options)

    monkeypatch.setattr(torch, "zeros", full)
    (advice,) = answer("doctor")["advice"]
    assert advice == "meta:1 cannot be used: CUDA out of memory. Tried to allocate 2.00 MiB."
    assert {on["meta:1"]["implementation"] for on in answers().values()} == {None}
    assert by_kernels("meta:0", "Triton") == ON_CUDA
    assert f"meta:1, {len(OPERATIONS)} of {len(OPERATIONS)} operations:\n    {advice}\n" in printed("doctor")


@pytest.mark.parametrize(("cuda", "words"), [(None, "is built without CUDA"), ("12.8", "torch finds no GPU of NVIDIA")])
def test_a_driver_without_a_gpu_for_torch_is_named(cuda, words, tmp_path, monkeypatch) -> None:
    def no_device() -> None:
        raise RuntimeError("The driver is too old.\nMore.")

    (tmp_path / "nvidia-smi").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", no_device)
    monkeypatch.setattr(doctor, "usable_devices", lambda: [torch.device("cpu")])
    (advice,) = answer("doctor")["advice"]
    assert words in advice
    assert cuda is None or advice.endswith(": The driver is too old.")
    assert advice in printed("doctor")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert answer("doctor")["advice"] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_takes_the_kernels_of_triton() -> None:
    _, gpu, *_ = answer("doctor")["devices"]
    assert (gpu["device"], gpu["name"], gpu["failure"]) == ("cuda:0", torch.cuda.get_device_name(0), "")
    assert by_kernels("cuda:0", "Triton") == ON_CUDA
