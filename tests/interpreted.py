"""Run Triton kernels on CPU tensors in Triton's interpreter, and check each access to memory.

`with interpreted() as run:` launches the kernels of all operations in the interpreter, in this process. Lanes that
no mask turns off must stay inside the tensor that their pointer was passed for. Programs of a launch run at the same
time on a GPU: no program may write what another one reads, nor another number than another one writes. Within a
program, an address may be written once, and read only before, by the lane that writes it: other orders would need a
barrier. Memory that is allocated and not written is NaN.
"""

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from embedlayer.core import devices
from embedlayer.kernels.gpu import availability
from embedlayer.kernels.operation import Operation

Program = tuple[int, ...]
Programs = Callable[[Program], list[Program]]


class WrongAccessError(AssertionError):
    """An access to memory that would be an error or a race on a GPU."""


class _Accessed(NamedTuple):
    """Hold the addresses of one access, its kind, which program made it, and the bits of the numbers that it stored."""

    addresses: np.ndarray
    bits: np.ndarray
    kind: str
    program: int
    number: int
    lanes: int


class Launch:
    """The accesses to memory of one launch.

    Attributes:
        name: Name of the kernel.
        read: Bytes that unmasked lanes read, by the name of the pointer; lanes of one access that read the same number
            count once.
        written: Bytes that they write.
    """

    def __init__(self, name: str, names: dict[tuple[int, torch.dtype], str]) -> None:
        self.name = name
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.program = 0
        self._names = names
        self._accessed: list[_Accessed] = []

    def add(self, kind: str, pointers: Any, mask: Any, value: Any = None) -> None:
        """Record an access, and check that its lanes stay inside the tensor.

        Raises:
            WrongAccessError: They do not.
        """
        tensor, size = pointers.attr["tensor"], max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        name = self._names[tensor.data_ptr(), tensor.dtype]
        addresses = np.ravel(pointers.data)
        is_used = np.ravel(np.broadcast_to(mask.data, np.shape(pointers.data))).astype(bool)
        used, bits = addresses[is_used], np.zeros(int(is_used.sum()), dtype=np.int64)
        if value is not None:
            numbers = np.ravel(np.broadcast_to(value.data, np.shape(pointers.data)))[is_used]
            bits = numbers.view(f"u{numbers.itemsize}").astype(np.int64)
        if kind != "store":
            self.read[name] += len(np.unique(used)) * size
        if kind != "load":
            self.written[name] += len(used) * size
        if len(used) == 0:
            return
        extent = 1 + sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
        first = tensor.data_ptr()
        low, high = int(used.min()), int(used.max())
        if tensor.numel() == 0 or low < first or high + size > first + extent * size or (low - first) % size:
            offsets = [(each - first) // size for each in (low, high)]
            raise WrongAccessError(f"{self.name}: {kind} of {name} at {offsets} of {extent} numbers")
        lanes = hash(addresses.tobytes())
        self._accessed.append(_Accessed(used, bits, kind, self.program, len(self._accessed), lanes))

    def check_order(self) -> None:
        """Check that the result depends neither on the order of the programs nor on that of a program's threads.

        Raises:
            WrongAccessError: It does.
        """
        parts = self._accessed
        if not any(each.kind != "load" for each in parts):
            return
        written = np.unique(np.concatenate([each.addresses for each in parts if each.kind != "load"]))
        lengths = [len(each.addresses) for each in parts]
        addresses, bits = (np.concatenate([getattr(each, name) for each in parts]) for name in ("addresses", "bits"))
        here = np.isin(addresses, written)
        place = np.searchsorted(written, addresses[here])

        def of_each(numbers: list[Any]) -> np.ndarray:
            """Return the number of the access to which each address belongs."""
            return np.repeat(np.array(numbers, dtype=np.int64), lengths)[here]

        def least_and_most(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """Return the least and the largest of the numbers at each written address."""
            least = np.full(len(written), np.iinfo(np.int64).max)
            most = np.full(len(written), np.iinfo(np.int64).min)
            np.minimum.at(least, place, numbers)
            np.maximum.at(most, place, numbers)
            return least, most

        def differ(numbers: np.ndarray) -> np.ndarray:
            """Return at which written addresses the numbers are not all equal."""
            least, most = least_and_most(numbers)
            return least != most

        is_store, is_atomic = (of_each([each.kind == kind for each in parts]) for kind in ("store", "atomic"))
        all_atomic, all_stored = least_and_most(is_atomic)[0] == 1, least_and_most(is_store)[0] == 1
        several_programs = differ(of_each([each.program for each in parts])) & ~all_atomic
        if (several_programs & ~(all_stored & ~differ(bits[here]))).any():
            raise WrongAccessError(f"{self.name}: a program writes what another one reads or writes")
        number = of_each([each.number for each in parts])
        first_store = least_and_most(np.where(is_store == 1, number, np.iinfo(np.int64).max))[0]
        stores = np.bincount(place[is_store == 1], minlength=len(written))
        other_lanes = differ(of_each([each.lanes for each in parts]))
        is_late = number > first_store[place]
        alone = ~several_programs & ~all_atomic
        if (alone & ((stores > 1) | other_lanes)).any() or (is_late & alone[place]).any():
            raise WrongAccessError(f"{self.name}: a program needs a barrier between two accesses to one address")


class Run:
    """What kernels did in the interpreter.

    Attributes:
        launches: Each launch.
        programs: Function from the grid of a launch to the programs that run; `None` for all.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.programs: Programs | None = None


@contextmanager
def interpreted(*more: Operation, cpu_as_cuda: bool = True) -> Iterator[Run]:
    """Launch the kernels of all operations in Triton's interpreter, and check their accesses.

    Args:
        more: Operations that are not among those of the package.
        cpu_as_cuda: Whether CPU tensors are taken as CUDA tensors.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    from embedlayer.cli.operations import OPERATIONS

    run = Run()
    interpreter._implicit_cvt(torch.empty(0))  # the first one imports modules of compiled functions
    tables = {id(table): table for each in (*OPERATIONS, *more) if each.gpu is not None for table in [each.gpu()]}
    kernels = [entry.kernel for table in tables.values() for entry in table.values()]
    modules = [sys.modules[name] for name in dict.fromkeys(kernel.fn.__module__ for kernel in kernels)]
    with ExitStack() as stack:
        stack.enter_context(np.errstate(all="ignore"))
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills memory that is not initialised: with NaN
        for changed in (tl, tl.core, tl.math, tl.standard, tl.tensor, tl.core.tensor_descriptor_base):
            stack.callback(_restore, changed, dict(vars(changed)))
        for module in (tl, tl.standard, *modules):
            stack.callback(_restore, module, dict(vars(module)))
            _interpret(module)
        for table in tables.values():
            entries = {
                key: dataclasses.replace(entry, kernel=_interpreted(entry.kernel.fn)) for key, entry in table.items()
            }
            stack.enter_context(patch.dict(table, entries))
        for owner, attribute, replacement in _watched(interpreter, run):
            stack.enter_context(patch.object(owner, attribute, replacement))
        stack.enter_context(patch.object(availability, "_compilation_failure", lambda device: ""))
        if cpu_as_cuda:
            stack.enter_context(patch.dict(devices.TAKEN_AS, cpu="cuda"))
        yield run


def _interpret(module: ModuleType) -> None:
    """Replace compiled functions of a module by interpreted ones."""
    from triton.runtime.jit import JITFunction

    for name, value in list(vars(module).items()):
        if isinstance(value, JITFunction):
            setattr(module, name, _interpreted(value.fn))


@cache
def _interpreted(function: Callable[..., Any]) -> Any:
    """Return an interpreted function, whose signature Triton reads again for each new one."""
    from triton.runtime.interpreter import InterpretedFunction

    cells: tuple[CellType, ...] = function.__closure__ or ()
    if cells:  # the interpreter looks for `tl` among the names of the module
        names = dict(zip(function.__code__.co_freevars, [each.cell_contents for each in cells], strict=True))
        of_module = {**function.__globals__, **names}
        function = FunctionType(function.__code__, of_module, function.__name__, function.__defaults__, cells)
    return InterpretedFunction(function)


def _restore(changed: Any, before: dict[str, Any]) -> None:
    """Give a module or class back the attributes that it had; new ones stay: functions that Triton keeps use them."""
    for name, value in before.items():
        if vars(changed)[name] is not value:
            setattr(changed, name, value)


def _watched(interpreter: ModuleType, run: Run) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is replaced in Triton's interpreter: owner, attribute, and a function that records accesses."""
    builder, executor, convert = interpreter.InterpreterBuilder, interpreter.GridExecutor, interpreter._implicit_cvt
    launch_all, set_grid_dim, set_grid_idx = executor.__call__, builder.set_grid_dim, builder.set_grid_idx

    def converted(argument: Any) -> Any:
        result = convert(argument)
        if isinstance(argument, Tensor):
            result.handle.set_attr("tensor", argument)
        return result

    def of_same_tensor(name: str) -> Any:
        function = getattr(builder, name)

        def wrapped(self: Any, *arguments: Any) -> Any:
            result = function(self, *arguments)
            for each in arguments:
                if isinstance(each, interpreter.TensorHandle) and "tensor" in each.attr:
                    result.set_attr("tensor", each.attr["tensor"])
            return result

        return wrapped

    def recorded(name: str, kind: str, mask_at: int) -> Any:
        function = getattr(builder, name)

        def wrapped(self: Any, pointers: Any, *arguments: Any) -> Any:
            mask = arguments[mask_at]
            mask.data = mask.data.astype(bool)  # Triton 3.9 broadcasts a condition as int32, which it takes for no mask
            run.launches[-1].add(kind, pointers, arguments[mask_at], arguments[0] if kind == "store" else None)
            return function(self, pointers, *arguments)

        return wrapped

    def atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *arguments: Any) -> Any:
        run.launches[-1].add("atomic", pointers, mask)
        return rmw(self, operation, pointers, value, mask, *arguments)

    def launched(self: Any, *tensors: Any, **arguments: Any) -> None:
        names = {
            (each.data_ptr(), each.dtype): name
            for name, each in [*zip(self.arg_names, tensors, strict=False), *arguments.items()]
            if isinstance(each, Tensor)
        }
        launch = Launch(self.fn.__name__, names)
        run.launches.append(launch)
        patched.clear()
        grid = self.grid(arguments) if callable(self.grid) else self.grid
        chosen = None if run.programs is None else run.programs(grid)
        if chosen is not None:
            self.grid = (len(chosen), 1, 1)

        def all_dimensions(self: Any, *_: int) -> None:
            set_grid_dim(self, *grid, *(1,) * (3 - len(grid)))

        def next_program(self: Any, *place: int) -> None:
            launch.program += 1
            program = place if chosen is None else chosen[place[0]]
            set_grid_idx(self, *program, *(0,) * (3 - len(program)))

        try:
            with (
                patch.object(builder, "set_grid_dim", all_dimensions),
                patch.object(builder, "set_grid_idx", next_program),
            ):
                launch_all(self, *tensors, **arguments)
        except interpreter.InterpreterError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, WrongAccessError):
                cause = cause.__cause__  # one more for each function of the kernel
            raise cause or error from None
        launch.check_order()

    def patch_once_a_launch(function: Any) -> Any:
        """Replace the operators that a function sees by interpreted ones, which Triton does anew at each call of it."""
        if function not in seen:
            seen[function] = frozenset(id(each) for each in function.__globals__.values()) & {id(tl), id(tl.core)}
        if seen[function] in patched:
            return None
        patched.add(seen[function])
        return patch_lang(function)

    def cast(self: Any, source: Any, to: Any) -> Any:
        """Convert numbers as a GPU does: Triton's interpreter cuts off bits of bfloat16 numbers instead of rounding."""
        types = source.dtype.scalar, to.scalar
        if types == (tl.float32, tl.bfloat16):
            bits = source.data.view(np.uint32)
            rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
            data = np.where(np.isnan(source.data), bits >> 16 | 0x40, rounded).astype(np.uint16)
        elif types == (tl.bfloat16, tl.float32):
            data = (source.data.astype(np.uint32) << 16).view(np.float32)
        else:
            return cast_impl(self, source, to)
        return interpreter.TensorHandle(data, to.scalar)

    @cache
    def shape_of(shape: tuple[int, ...]) -> dict[str, Any]:
        """Return the attributes of tensors of this shape, which Triton computes anew for each tensor."""
        return {"shape": tl.core.tuple([tl.constexpr(size) for size in shape]), "numel": tl.constexpr(math.prod(shape))}

    @cache
    def block_of(element_ty: Any, shape: tuple[int, ...]) -> dict[str, Any]:
        """Return the attributes of a type of blocks, as `shape_of`."""
        block = object.__new__(tl.block_type)
        init_block(block, element_ty, list(shape))
        return vars(block)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape.values) if type.is_block() else ()
        vars(self).update(shape_of(shape), handle=handle, type=type, dtype=type.scalar)

    def init_cached_block(self: Any, element_ty: Any, shape: Any) -> None:
        vars(self).update(block_of(element_ty, tuple([getattr(size, "value", size) for size in shape])))

    cast_impl, tl = builder.cast_impl, interpreter.tl
    init_block = tl.block_type.__init__
    for kind in (tl.pointer_type, tl.block_type):
        yield kind, "__hash__", tl.dtype.__hash__
    yield tl.tensor, "__init__", init_tensor
    yield tl.block_type, "__init__", init_cached_block
    yield interpreter, "_get_np_dtype", cache(interpreter._get_np_dtype)
    # Triton computes whether numbers of 32 bits overflow, and reads it only where `debug` is set.
    unchecked = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    yield interpreter.interpreter_builder, "options", unchecked
    patch_lang, patched = interpreter._patch_lang, set[frozenset[int]]()
    seen: dict[Any, frozenset[int]] = {}
    yield interpreter, "_patch_lang", patch_once_a_launch
    yield builder, "cast_impl", cast
    rmw = builder.create_atomic_rmw
    yield interpreter, "_implicit_cvt", converted
    for name in ("create_addptr", "create_splat", "create_broadcast", "create_expand_dims", "create_bitcast"):
        yield builder, name, of_same_tensor(name)
    yield builder, "create_masked_load", recorded("create_masked_load", "load", 0)
    yield builder, "create_masked_store", recorded("create_masked_store", "store", 1)
    yield builder, "create_atomic_rmw", atomic
    yield executor, "__call__", launched
