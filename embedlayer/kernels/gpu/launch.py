"""Launch Triton kernels from data: a `Launch` has the grid, block sizes, warps and types of a kernel.

Each module of this package has a table `LAUNCHES` of its kernels by name, which the records of operations refer to.

Observers are told of each launch, and so count launches. On tensors without memory (`meta` and fake tensors) nothing
is launched, and observers are told all the same: launches can be counted on a machine without a GPU.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedlayer.core.torch_state import has_memory

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
"""Triton's names of dtypes."""

Arguments = Mapping[str, Any]
Grid = tuple[int, ...]


@dataclass(frozen=True)
class Variant:
    """One form in which a kernel is compiled.

    Attributes:
        constants: Arguments that are constants in this form: flags, and `None` for tensors that are left out.
        registers: Largest number of registers of a thread that the compiled form may use with 4 warps; with more warps
            it is proportionally smaller.
    """

    constants: Mapping[str, Any]
    registers: int = 128


@dataclass(frozen=True)
class Launch:
    """How a kernel is compiled and launched.

    Attributes:
        kernel: The function that `triton.jit` decorates. Its integers are not specialised, so a launch compiles the
            same code as `signature` describes.
        grid: Function from all arguments and constants, by name, to the grid.
        types: Triton's type of each argument that is no constant: `"*z"` is a pointer to the dtype in which rows,
            logits or gradients are stored, `"*fp32"`, `"i64"`, ... are what they say.
        blocks: Block sizes: arguments that are constants in all forms, and powers of 2.
        wide: Pointers whose full-width loads and stores take 128 bits where sizes are divisible by 8.
        reads: Tensors that are read once, whole.
        writes: Tensors that are written once, whole; one that is overwritten is in both.
        gathered: Tensors of which a kernel reads or writes single numbers, with the tensor that has as many numbers, or
            a function from the arguments to how many.
        variants: Forms by name.
        dtypes: Dtypes that `"*z"` stands for.
        register_limit: Registers of a thread that the compiler may use. Without it, it may choose fewer so that more
            programs run at a time, and write a few numbers to memory instead.
    """

    kernel: Any
    grid: Callable[[Arguments], Grid]
    types: Mapping[str, str]
    blocks: Mapping[str, int]
    wide: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    gathered: Mapping[str, str | Callable[[Arguments], int]] = field(default_factory=dict)
    variants: Mapping[str, Variant] = field(default_factory=lambda: {"all": Variant({})})
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    warps: int = 4
    stages: int = 1
    fp_fusion: bool = True
    register_limit: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": self.fp_fusion}
        return options if self.register_limit is None else {**options, "maxnreg": self.register_limit}

    def signature(self, variant: str, dtype: torch.dtype) -> tuple[dict[str, str], dict[str, Any]]:
        """Return the type of each argument, and the values of those that are constants, to compile ahead of time."""
        constants = {**self.variants[variant].constants, **self.blocks}
        stored = f"*{TYPES[dtype]}"
        types = {
            name: "constexpr" if name in constants else self.types[name].replace("*z", stored)
            for name in self.kernel.arg_names
        }
        return types, constants

    def bytes(self, arguments: Arguments) -> int:
        """Return how many bytes a launch reads and writes, by `reads`, `writes` and `gathered`."""
        counts = {name: arguments[of] if isinstance(of, str) else of(arguments) for name, of in self.gathered.items()}
        parts = [(arguments[name], count) for name, count in counts.items()]
        parts += [(arguments[name], arguments[name]) for name in (*self.reads, *self.writes)]
        numels = [(x, count.numel() if isinstance(count, Tensor) else count) for x, count in parts]
        return sum(x.element_size() * count for x, count in numels if x is not None and count is not None)


class Launched(NamedTuple):
    """One launch, as observers see it."""

    module: str
    name: str
    grid: Grid
    arguments: Arguments
    bytes: int


Observer = Callable[[Launched], None]

_observers: list[Observer] = []


@contextmanager
def launches_observed(observer: Observer) -> Iterator[None]:
    """Call `observer` before each launch of a Triton kernel in a `with` block, of all threads."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def imported_launches(module: str) -> Mapping[str, Launch]:
    """Import a module of Triton kernels, and return how they are launched; a record of an operation has it as `gpu`."""
    launches: Mapping[str, Launch] = import_module(module).LAUNCHES
    return launches


def launch(launches: Mapping[str, Launch], name: str, **arguments: Any) -> None:
    """Launch a kernel on the device of its tensors, or only tell observers if a tensor has no memory."""
    entry = launches[name]
    arguments = {**arguments, **entry.blocks}
    grid = entry.grid(arguments)
    if 0 in grid:
        return
    for observer in tuple(_observers):
        observer(Launched(entry.kernel.fn.__module__.rpartition(".")[2], name, grid, arguments, entry.bytes(arguments)))
    tensors = [each for each in arguments.values() if isinstance(each, Tensor)]
    if all(map(has_memory, tensors)):
        device = tensors[0].device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            entry.kernel[grid](**arguments, **entry.options)


def columns_of(table: Tensor) -> dict[str, int]:
    """Return the arguments of kernels that say how many columns a table has."""
    unit = 8 if table.shape[-1] % 8 == 0 else 1
    return {"units": table.shape[-1] // unit, "UNIT": unit}
