"""The launcher of Triton kernels: what observers see, and that tensors without memory are launched on nothing."""

import pytest
import torch
from kernel_records import launch_kernel, operation_of

from embedlayer.cli.operations import OPERATIONS
from embedlayer.kernels.gpu.launch import Launched, launches_observed

triton = pytest.importorskip("triton")


def factors_of(top: torch.Tensor) -> dict[str, object]:
    """Return the arguments of a kernel that has few."""
    names = ("mean", "log_squares", "by_log_sum", "by_mean", "by_squares", "by_sum")
    arguments = {"top": top, "sums": top, "factors": top.new_empty(6, len(top)), "tokens": len(top)}
    return {**dict.fromkeys(names), **arguments}


def test_observers_see_launches_on_tensors_without_memory() -> None:
    seen: list[Launched] = []
    top = torch.empty(300, device="meta")
    with launches_observed(seen.append):
        launch_kernel("statistics_factors", **factors_of(top))
    launch_kernel("statistics_factors", **factors_of(top))
    ((module, name, grid, arguments, moved),) = seen
    assert (module, name, grid) == ("softmax", "statistics_factors", (3,))
    assert arguments["top"] is top
    assert moved == 4 * 300 * (2 + 6)


def test_an_empty_grid_launches_nothing() -> None:
    seen: list[Launched] = []
    with launches_observed(seen.append):
        launch_kernel("statistics_factors", **factors_of(torch.empty(0)))
    assert not seen


@pytest.mark.parametrize("operation", [each for each in OPERATIONS if each.launches], ids=lambda each: each.what)
def test_a_launch_has_a_type_for_each_argument(operation) -> None:
    for entry in map(operation.gpu().get, operation.launches):
        names = set(entry.kernel.arg_names)
        assert {*entry.types, *entry.blocks, *entry.reads, *entry.writes, *entry.gathered, *entry.wide} <= names
        for variant in entry.variants:
            for dtype in entry.dtypes:
                types, constants = entry.signature(variant, dtype)
                assert list(types) == list(entry.kernel.arg_names)
                assert {name for name, kind in types.items() if kind == "constexpr"} == set(constants)


class DeviceOfThisTest:
    """Stand for a GPU of Triton's: kernels are compiled for it, and never launched."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> object:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)


def test_a_launch_compiles_what_its_data_say(monkeypatch) -> None:
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    entry = operation_of("statistics_factors").gpu()["statistics_factors"]
    types, _ = entry.signature("all", torch.float32)
    tensors = {name: MockTensor(torch.float32) for name in types if types[name].startswith("*")}
    monkeypatch.setattr(driver, "_active", DeviceOfThisTest())
    compiled = entry.kernel.warmup(**tensors, tokens=16, **entry.blocks, **entry.options, grid=(1,))
    assert compiled.src.signature == types
    aligned = {types[entry.kernel.arg_names[place]] for (place,), hints in compiled.src.attrs.items() if hints}
    assert aligned == {"*fp32"}  # and no integer is specialised
    assert (compiled.metadata.num_warps, compiled.metadata.num_stages) == (entry.warps, entry.stages)
    assert compiled.metadata.enable_fp_fusion == entry.fp_fusion
