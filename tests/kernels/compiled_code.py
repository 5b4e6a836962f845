"""Compile Triton kernels for GPUs ahead of time, on any machine, and read the machine code that the GPU would run.

Triton's package contains the compiler's last stage and NVIDIA's disassembler. Triton stores what it compiles in its own
cache on disk, so an unchanged kernel is compiled once on a machine.
"""

import math
import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from embedlayer.kernels.operation import Operation

ARCHITECTURES = (80, 89, 90, 100, 120)
"""A100, L4 and RTX 40, H100 and H200, B200, RTX 50."""

WIDE = 16
"""Bytes of the widest access that all of these GPUs have."""


class Access(NamedTuple):
    """Hold one access to global memory: `"load"` or `"store"`, the pointer that its address is computed from, bytes."""

    kind: str
    pointer: str
    bytes: int


class CompiledCode(NamedTuple):
    """Describe the machine code of one kernel.

    Attributes:
        registers: Registers of a thread.
        stack: Bytes of a thread's stack.
        local: Bytes of a thread's local memory.
        shared: Bytes of shared memory of a program.
        binary: The machine code, as a file that NVIDIA's programs read.
        tiles: Accesses as the kernel states them, each with the bytes of one thread.
        accesses: Accesses as the compiler divides them into instructions.
    """

    registers: int
    stack: int
    local: int
    shared: int
    binary: bytes
    tiles: tuple[Access, ...]
    accesses: tuple[Access, ...]

    @property
    def spills(self) -> int:
        """Number of instructions that read or write local memory."""
        return len(re.findall(r"\b(?:LDL|STL)\b", _output(self.binary, "nvdisasm", "-c")))

    def narrow_accesses(self, wide: Collection[str]) -> list[str]:
        """Return what keeps full-width accesses to some pointers from taking 128 bits at a time; empty if nothing does.

        An access is full-width if its tile has 16 bytes or more for each thread.
        """
        problems = []
        for kind, pointer in dict.fromkeys((tile.kind, tile.pointer) for tile in self.tiles if tile.pointer in wide):
            tiles, accesses = (
                [each.bytes for each in found if (each.kind, each.pointer) == (kind, pointer)]
                for found in (self.tiles, self.accesses)
            )
            needed = sum(size // WIDE for size in tiles if size >= WIDE)
            present = sum(size // WIDE for size in accesses if size >= WIDE)
            if present < needed:
                problems.append(f"{kind}s of {pointer}: {present} of 128 bits, needed {needed}; bytes {accesses}")
        return problems


@cache
def compiled_code(operation: Operation, name: str, variant: str, dtype: torch.dtype, architecture: int) -> CompiledCode:
    """Compile one form of a kernel of the launch table.

    Args:
        operation: Operation of the kernel.
        name: Name of the kernel.
        variant: Name of the form.
        dtype: Dtype of rows, logits or gradients.
        architecture: Compute capability without the point, such as 90.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    entry = operation.gpu()[name]
    kernel, (types, constants) = entry.kernel, entry.signature(variant, dtype)
    names = kernel.arg_names
    types = {each: "constexpr" if each in constants else types[each] for each in names}
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(names.index(each),): value for each, value in constants.items()},
        attrs={(names.index(each),): [["tt.divisibility", 16]] for each in names if types[each].startswith("*")},
    )
    binary = compile(source, target=GPUTarget("cuda", architecture, 32), options=entry.options)
    arguments = [each for each in names if types[each] != "constexpr"]
    usage = _output(binary.asm["cubin"], "cuobjdump", "-res-usage")
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    return CompiledCode(
        numbers["REG"],
        numbers["STACK"],
        numbers["LOCAL"],
        binary.metadata.shared,
        binary.asm["cubin"],
        tuple(_tiles(binary.asm["ttgir"], arguments, 32 * entry.warps)),
        tuple(_accesses(binary.asm["ptx"], [each if types[each].startswith("*") else "" for each in arguments])),
    )


def _output(binary: bytes, tool: str, option: str) -> str:
    """Return what one of the programs in Triton's package prints of machine code."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([program, option, file.name], capture_output=True, text=True, check=True).stdout


def _tiles(code: str, arguments: list[str], threads: int) -> Iterator[Access]:
    """Yield the accesses to global memory in Triton's own representation, with the bytes of one thread."""
    pointers: dict[str, str] = {}
    for text in code.splitlines():
        if "tt.func public" in text:
            pointers.update(zip(re.findall(r"(%\w+): ", text), arguments, strict=True))
        elif "scf.for" in text or "scf.while" in text:
            for value, first in re.findall(r"(%\w+) = (%[\w#]+)[,)]", text):
                pointers[value] = pointers.get(first, "")
        elif access := re.search(r"\b(tt\.load|tt\.store|ttg\.async_copy_global_to_local) (%[\w#]+)", text):
            tile = re.search(r"tensor<([\dx]+)x!tt\.ptr<[a-z]*(\d+)>", text)
            size = math.prod(map(int, tile[1].split("x"))) * int(tile[2]) // 8 if tile else 0
            kind = "store" if access[1] == "tt.store" else "load"
            yield Access(kind, pointers.get(access[2], ""), size // threads)
        elif value := re.match(r"\s*(%[\w#]+) = \S+ (%[\w#]+)", text):
            pointers[value[1]] = pointers.get(value[2], "")


def _accesses(code: str, pointers: list[str]) -> Iterator[Access]:
    """Yield the accesses to global memory in PTX code; they have the width of the instructions of the machine code.

    `pointers` are the names of the arguments, empty for those that are no pointers.
    """
    sources: dict[str, set[str]] = {}
    for text in code.splitlines():
        if parameter := re.search(r"ld\.param\.\w+\s+(%rd\d+), \[\w+_param_(\d+)", text):
            number = int(parameter[2])  # behind the kernel's own arguments are two of Triton's
            sources.setdefault(parameter[1], set()).update(pointers[number : number + 1])
        elif not re.search(r"\b(ld|st)\.", text) and (value := re.search(r"\s(%rd\d+),\s*(.*);", text)):
            sources.setdefault(value[1], set()).update(re.findall(r"%rd\d+", value[2]))
    access = re.compile(r"\b(?:(ld|st)\.global|cp\.async)\S*?(?:\.v(\d))?(?:\.[bfsu](\d+))?\s(.*);")
    for text in code.splitlines():
        if found := access.search(text):
            kind, vector, bits, operands = found.groups()
            if "[" not in operands:  # the end of a group of copies
                continue
            addresses = re.findall(r"\[\s*(%rd\d+)", operands)
            size = int(vector or 1) * int(bits) // 8 if kind else int(re.findall(r"\b\d+", operands)[-1])
            (pointer,) = _origin(addresses[-1], sources) or {""}
            yield Access("store" if kind == "st" else "load", pointer, size)


def _origin(register: str, sources: dict[str, set[str]]) -> set[str]:
    """Return the arguments that the number in a register is computed from."""
    seen, waiting, origin = set(), [register], set()
    while waiting:
        each = waiting.pop()
        if each in sources and each not in seen:
            seen.add(each)
            waiting.extend(sources[each])
        elif each and not each.startswith("%"):
            origin.add(each)
    return origin
