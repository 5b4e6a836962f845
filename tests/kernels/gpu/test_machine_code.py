"""What the compiler makes of each entry of the launch tables, for each GPU, on any machine."""

from collections.abc import Iterator

import pytest
import torch
from compiled_code import ARCHITECTURES, compiled_code
from covering import LONG

from embedlayer.cli.operations import OPERATIONS
from embedlayer.core.errors import release
from embedlayer.kernels.operation import Operation

pytestmark = pytest.mark.usefixtures("triton")


@pytest.fixture(scope="module")
def triton() -> None:
    pytest.importorskip("triton")


ON_GPU = [each for each in OPERATIONS if each.launches]

ON_STACK = [
    ("check_targets", "weighted", torch.float32, 89),
    ("member_keys", "finished", torch.bfloat16, 120),
    ("member_keys", "finished", torch.float16, 120),
    ("gather_scale_add_drop", "places", torch.float32, 80),
]
"""Forms of which the assembler of Triton 3.5 has 8 bytes on the stack; that of later releases has none there."""


def one_form_of_each_kernel(operation: Operation) -> Iterator[tuple[str, str, torch.dtype]]:
    """Yield the first form of each kernel, in bfloat16 where it has this dtype."""
    kernels = []
    for name in operation.launches:
        entry = operation.gpu()[name]
        if entry.kernel not in kernels:
            kernels.append(entry.kernel)
            dtype = torch.bfloat16 if torch.bfloat16 in entry.dtypes else entry.dtypes[0]
            yield name, next(iter(entry.variants)), dtype


def all_forms(operation: Operation) -> Iterator[tuple[str, str, torch.dtype]]:
    """Yield all forms of all kernels."""
    for name in operation.launches:
        entry = operation.gpu()[name]
        for variant in entry.variants:
            for dtype in entry.dtypes:
                yield name, variant, dtype


def problems(
    operation: Operation, name: str, variant: str, dtype: torch.dtype, architecture: int, *, disassembled: bool
) -> list[str]:
    """Return what is wrong with the machine code of one form of a kernel.

    Registers are spilled to the stack, whose bytes are known without disassembling, which counts the instructions.
    """
    import triton

    entry = operation.gpu()[name]
    form, code = entry.variants[variant], compiled_code(operation, name, variant, dtype, architecture)
    assert code.tiles
    assert {each.pointer for each in code.accesses if each.pointer} <= set(entry.types)
    found = []
    known = ON_STACK if release(triton.__version__) < (3, 6) else []
    stack = 8 if (name, variant, dtype, architecture) in known else 0
    if (code.stack, code.local) != (stack, 0) or (disassembled and code.spills and not stack):
        found.append(f"{code.stack} bytes of stack, {code.local} of local memory, {code.spills} spills")
    if code.registers * entry.warps > 4 * form.registers:
        found.append(f"{code.registers} registers, at most {form.registers * 4 // entry.warps}")
    if form.constants.get("UNIT") != 1:
        found += code.narrow_accesses(entry.wide)
    return [f"{name}, {variant}, {dtype}, sm_{architecture}: {each}" for each in found]


@pytest.mark.parametrize("operation", ON_GPU, ids=lambda each: each.what)
def test_each_kernel_computes_in_registers_and_reads_rows_by_128_bits(operation) -> None:
    forms = one_form_of_each_kernel(operation)
    assert not [each for form in forms for each in problems(operation, *form, 90, disassembled=False)]


@pytest.mark.parametrize("architecture", [pytest.param(each, marks=LONG) for each in ARCHITECTURES])
@pytest.mark.parametrize("operation", ON_GPU, ids=lambda each: each.what)
def test_so_does_each_form_for_each_gpu(operation, architecture) -> None:
    forms = all_forms(operation)
    assert not [each for form in forms for each in problems(operation, *form, architecture, disassembled=True)]
