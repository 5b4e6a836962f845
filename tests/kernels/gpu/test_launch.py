<<<<<<< HEAD
"""The launcher of Triton kernels: what observers see, and that tensors without memory are launched on nothing."""

import pytest
import torch

from embedlayer.kernels.gpu.launch import MODULES, Launched, launch, launch_table, launches_observed

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
        launch("softmax", "statistics_factors", **factors_of(top))
    launch("softmax", "statistics_factors", **factors_of(top))
    ((module, name, grid, arguments, moved),) = seen
    assert (module, name, grid) == ("softmax", "statistics_factors", (3,))
    assert arguments["top"] is top
    assert moved == 4 * 300 * (2 + 6)


def test_an_empty_grid_launches_nothing() -> None:
    seen: list[Launched] = []
    with launches_observed(seen.append):
        launch("softmax", "statistics_factors", **factors_of(torch.empty(0)))
    assert not seen


@pytest.mark.parametrize("module", MODULES)
def test_the_launch_table_has_a_type_for_each_argument(module) -> None:
    for entry in launch_table(module).values():
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


def test_a_launch_compiles_what_the_launch_table_says(monkeypatch) -> None:
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    entry = launch_table("softmax")["statistics_factors"]
    types, _ = entry.signature("all", torch.float32)
    tensors = {name: MockTensor(torch.float32) for name in types if types[name].startswith("*")}
    monkeypatch.setattr(driver, "_active", DeviceOfThisTest())
    compiled = entry.kernel.warmup(**tensors, tokens=16, **entry.blocks, **entry.options, grid=(1,))
    assert compiled.src.signature == types
    aligned = {types[entry.kernel.arg_names[place]] for (place,), hints in compiled.src.attrs.items() if hints}
    assert aligned == {"*fp32"}  # and no integer is specialised
    assert (compiled.metadata.num_warps, compiled.metadata.num_stages) == (entry.warps, entry.stages)
    assert compiled.metadata.enable_fp_fusion == entry.fp_fusion
=======
"""What the compiler makes of each entry of the launch tables, for each GPU, on any machine."""

from collections.abc import Iterator

import pytest
import torch
from compiled_code import ARCHITECTURES, compiled_code
from covering import LONG

from embedlayer.kernels.gpu.launch import MODULES, launch_table

pytestmark = pytest.mark.usefixtures("triton")


@pytest.fixture(scope="module")
def triton() -> None:
    pytest.importorskip("triton")


def one_form_of_each_kernel(module: str) -> Iterator[tuple[str, str, torch.dtype]]:
    """Yield the first form of each kernel, in bfloat16 where it has this dtype."""
    kernels = []
    for name, entry in launch_table(module).items():
        if entry.kernel not in kernels:
            kernels.append(entry.kernel)
            yield name, next(iter(entry.variants)), torch.bfloat16 if torch.bfloat16 in entry.dtypes else entry.dtypes[0]


def all_forms(module: str) -> Iterator[tuple[str, str, torch.dtype]]:
    """Yield all forms of all kernels."""
    for name, entry in launch_table(module).items():
        for variant in entry.variants:
            for dtype in entry.dtypes:
                yield name, variant, dtype


def problems(module: str, name: str, variant: str, dtype: torch.dtype, architecture: int) -> list[str]:
    """Return what is wrong with the machine code of one form of a kernel."""
    entry = launch_table(module)[name]
    form, code = entry.variants[variant], compiled_code(module, name, variant, dtype, architecture)
    assert code.tiles
    assert {each.pointer for each in code.accesses if each.pointer} <= set(entry.types)
    found = []
    if (code.stack, code.local, code.spills) != (0, 0, 0):
        found.append(f"{code.stack} bytes of stack, {code.local} of local memory, {code.spills} spills")
    if code.registers * entry.warps > 4 * form.registers:
        found.append(f"{code.registers} registers, at most {form.registers * 4 // entry.warps}")
    if form.constants.get("UNIT") != 1:
        found += code.narrow_accesses(entry.wide)
    return [f"{module}.{name}, {variant}, {dtype}, sm_{architecture}: {each}" for each in found]


@pytest.mark.parametrize("module", MODULES)
def test_each_kernel_computes_in_registers_and_reads_rows_by_128_bits(module) -> None:
    assert not [each for form in one_form_of_each_kernel(module) for each in problems(module, *form, 90)]


@pytest.mark.parametrize("architecture", [pytest.param(each, marks=LONG) for each in ARCHITECTURES])
@pytest.mark.parametrize("module", MODULES)
def test_so_does_each_form_for_each_gpu(module, architecture) -> None:
    assert not [each for form in all_forms(module) for each in problems(module, *form, architecture)]


@pytest.mark.parametrize("module", MODULES)
def test_an_entry_describes_the_arguments_of_its_kernel(module) -> None:
    for entry in launch_table(module).values():
        arguments = set(entry.kernel.arg_names)
        for variant in entry.variants.values():
            assert arguments <= {*entry.types, *variant.constants, *entry.blocks}
        tensors = {each for each, kind in entry.types.items() if kind.startswith("*")}
        assert {*entry.reads, *entry.writes, *entry.gathered, *entry.wide} <= tensors
        integers = {each for each, kind in entry.types.items() if kind.startswith("i") and each in arguments}
        assert integers <= {
            arguments_in_order[i] if isinstance(i, int) else i
            for arguments_in_order in [entry.kernel.arg_names]
            for i in entry.kernel.do_not_specialize
        }
>>>>>>> g2
