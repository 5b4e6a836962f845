"""Run compiled kernels, and fall back to torch operators where they cannot be compiled.

`embedlayer.kernels.operation` says when. This module runs CPU kernels; `embedlayer.kernels.gpu` has those for CUDA.

A kernel is a function that numba compiles, `f(start, stop, *arguments)`. It computes the
items `start` to `stop - 1` of an operation, such as rows or tokens. No item depends on another one, so the result
depends neither on the blocks into which the items are divided nor on the number of threads.

Blocks are computed by the calling thread and by helper threads, as many in all as `torch.get_num_threads()`. A thread
claims one block after another. The calling thread waits for claimed blocks only, so helpers that get no time on a busy
machine cost nothing. These are Python threads, because kernels release the global interpreter lock: unlike numba's own
threading layers they survive a fork and take concurrent calls.
"""

import logging
import math
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.util import find_spec
from itertools import count
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedlayer.core.forks import call_in_forked_processes, lock_held_at_forks

Array = Tensor | NDArray[Any]
Argument = Array | int | float | bool | tuple[int, ...] | tuple[float, ...] | tuple[Array, ...]

OLDEST_NUMBA = (0, 61)

FAILURES = (ImportError, OSError, RuntimeError, EOFError, pickle.UnpicklingError)
"""What is raised if numba is missing or too old, cannot write its cache, or reads a damaged one."""

FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16})
"""Floating-point dtypes of kernels. NumPy has no bfloat16: its bits are passed as uint16."""

TYPES = {
    torch.float32: "=f4",
    torch.float64: "=f8",
    torch.bfloat16: "=u2",
    torch.float16: "=f2",
    torch.bool: "|b1",
    torch.uint8: "|u1",
    torch.int8: "|i1",
    torch.int16: "=i2",
    torch.uint16: "=u2",
    torch.int32: "=i4",
    torch.uint32: "=u4",
    torch.int64: "=i8",
    torch.uint64: "=u8",
}
"""NumPy's type strings of dtypes; uint16 for bfloat16, which NumPy lacks."""

EMPTY, LIKE, NO_ROWS = (
    {dtype: np.zeros(shape, kind) for dtype, kind in TYPES.items()} for shape in ((0,), (1,), (0, 0))
)
"""Constant arguments by dtype: no numbers, and no rows, which kernels take for `None`; and one number of the dtype."""

NUMBER_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.int16)
"""Dtypes that a kernel tells apart by their index here, when it runs; numba would compile it for each of them."""

NUMBERS = frozenset({int, float, bool})

NUMBA_IS_INSTALLED = sys.modules.get("numba", find_spec) is not None and find_spec("numba") is not None
"""Whether numba is installed; the check would end a graph of `torch.compile`."""

PATIENCE = 1.0
"""Seconds for which a process waits for kernels before it says so in the log."""

log = logging.getLogger("embedlayer")


class _Availability(threading.local):
    """Whether kernels may run in this thread, which `kernels_disabled` changes, and whether they compute numbers."""

    enabled = True
    computes = True


class _Failure:
    """The reason why no kernel of this process can be compiled, once one could not; logged when it is set."""

    reason: str | None = None

    def set(self, reason: str) -> None:
        """Record the reason, and log it the first time."""
        if self.reason is None:
            self.reason = reason
            log.warning("Compiled CPU kernels are off, torch operators are used instead: %s", reason)


class _Wait:
    """Says once in the log that this process waits for kernels, when it has waited for `PATIENCE` in all."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_said = False

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the time of a `with` block, in which a kernel is compiled or loaded, as waiting."""
        timer = threading.Timer(max(0.0, PATIENCE - self.seconds), self._say)
        timer.daemon = True
        start = time.perf_counter()
        if not self.is_said:
            with suppress(RuntimeError):  # no thread can be started while the interpreter exits
                timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self.seconds += time.perf_counter() - start

    def _say(self) -> None:
        self.is_said = True
        log.info("Compiling or loading CPU kernels: first calls take some seconds. A machine compiles them once.")


_availability, _failure, _wait, _compiling = _Availability(), _Failure(), _Wait(), lock_held_at_forks()


class KernelFunction:
    """A function that kernels call. Its module imports no numba: the first kernel that calls it does."""

    def __init__(self, function: Callable[..., Any], numba_function: Callable[[Any], Any]) -> None:
        self.function, self._numba_function = function, numba_function

    def __call__(self, *arguments: Any) -> Any:
        return self.numba_function(*arguments)

    @cached_property
    def numba_function(self) -> Any:
        """What numba knows as the function."""
        return self._numba_function(self.function)

    @cached_property
    def _numba_type_(self) -> Any:
        """Return the type of the function, which numba asks for when it compiles a kernel that calls it."""
        from numba.core.registry import cpu_target

        function, context = self.numba_function, cpu_target.typing_context
        context.refresh()
        return context.resolve_value_type(function)


class Kernel(KernelFunction):
    """A function that numba compiles at the first run; the decorators are in `embedlayer.kernels.cpu.numbers`.

    numba compiles it once for each combination of dtypes, and stores the result on disk: in `__pycache__` beside the
    module, or in the user's cache folder if that cannot be written, or in `NUMBA_CACHE_DIR`.
    """

    def __init__(self, function: Callable[..., Any], numba_function: Callable[[Any], Any]) -> None:
        super().__init__(function, numba_function)
        self.module, self.name = function.__module__.rpartition(".")[2], function.__name__
        self.label = f"{self.module}.{self.name}"
        self._compiled: set[tuple[object, ...]] = set()

    def run(self, items: int, *arguments: Argument, block: int) -> bool:
        """Compute the items `0` to `items - 1`, and return whether the kernel could be compiled.

        If it could not, nothing was computed, and the caller uses torch operators instead. Call it only with tensors
        for which `applies` returns `True`.

        - `*arguments`: arguments of the function after `start` and `stop`. Tensors must be contiguous and are passed as
          NumPy arrays over the same memory, bfloat16 as uint16; so are those of a tuple.
        - `block`: number of items that a thread claims at once: enough for about 0.1 ms.
        """
        if not _availability.computes:
            return True
        arrays: list[Any] = []
        kinds: list[object] = []
        for each in arguments:
            if isinstance(each, Tensor):
                each = as_array(each)
            if isinstance(each, np.ndarray):
                kinds.append((each.dtype.char, each.ndim))
            elif not isinstance(each, tuple):
                kinds.append(type(each))
            elif NUMBERS.issuperset(map(type, each)):
                kinds.append(tuple(map(type, each)))
            else:
                parts: Any = [as_array(x) if isinstance(x, Tensor) else x for x in each]
                kinds.append(tuple((x.dtype.char, x.ndim) for x in parts))
                each = tuple(parts)
            arrays.append(each)
        types = tuple(kinds)
        if _failure.reason is not None or not (types in self._compiled or self._compile(types, arrays)):
            return False
        function = self.numba_function
        if block >= items or torch.get_num_threads() == 1:
            function(0, items, *arrays)
        else:
            _divide(function, arrays, items, block)
        return True

    def _compile(self, types: tuple[object, ...], arrays: list[Any]) -> bool:
        """Compile the function for these types; return whether it could be."""
        with _compiling, _wait.measured():
            errors: tuple[type[Exception], ...] = FAILURES
            try:
                errors = (*FAILURES, _require_numba())
                start = time.perf_counter()
                self.numba_function(0, 0, *arrays)  # an empty range: compiles and computes nothing
                log.debug("kernel %s.%s ready in %.3f s", self.module, self.name, time.perf_counter() - start)
            except errors as error:
                advice = "; NUMBA_CACHE_DIR can name another cache folder" if isinstance(error, FAILURES) else ""
                reason = f"{type(error).__name__}: {error}".splitlines()[0] + advice
                _failure.set(str(error) if isinstance(error, ImportError) else reason)
                return False
            self._compiled.add(types)
        return True


@contextmanager
def kernels_disabled() -> Iterator[None]:
    """Use torch operators instead of compiled kernels inside a `with` block, in this thread.

    Backward passes run in this thread too: on CUDA torch would otherwise run them in another one.

    Example:
        >>> x = torch.randn(1, 32, 1024, 64)
        >>> with kernels_disabled():
        ...     q, k = RotaryEmbedding(64).rotate(x, x, torch.arange(1024))
    """
    before, _availability.enabled = _availability.enabled, False
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        _availability.enabled = before


@contextmanager
def nothing_computed() -> Iterator[None]:
    """Skip kernels inside a `with` block, in this thread: tensors have no memory."""
    before, _availability.computes = _availability.computes, False
    try:
        yield
    finally:
        _availability.computes = before


def as_array(x: Tensor) -> np.ndarray[Any, Any]:
    """Return a NumPy array over the memory of a contiguous tensor; bfloat16 as uint16."""
    assert x.is_contiguous()
    if x.numel() == 0:  # before NumPy 2.4 no array has the null pointer of an empty tensor
        return np.empty(tuple(x.shape), TYPES[x.dtype])
    memory = {"data": (x.data_ptr(), False), "shape": tuple(x.shape), "typestr": TYPES[x.dtype], "version": 3}
    # the array keeps the tensor; after `x.numpy()` torch could no longer resize its storage
    return np.asarray(SimpleNamespace(tensor=x, __array_interface__=memory))


def _require_numba() -> type[Exception]:
    """Check that numba is installed and new enough, and return the class of its errors."""
    try:
        import numba
        from numba.core.errors import NumbaError
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        reason = "numba is not installed" if missing else f"numba cannot be imported ({error})"
        raise ImportError(f"{reason}. For the kernels: pip install 'embedlayer[fast]'") from error
    found = tuple(int(part) for part in numba.__version__.split(".")[:2])
    if found < OLDEST_NUMBA:
        oldest = ".".join(map(str, OLDEST_NUMBA))
        raise ImportError(f"numba {numba.__version__} is older than {oldest}: pip install -U 'embedlayer[fast]'")
    compilation_error: type[Exception] = NumbaError
    return compilation_error


def _divide(function: Callable[..., object], arrays: list[Any], items: int, block: int) -> None:
    """Call `function(start, stop, *arrays)` for consecutive blocks that cover `0 .. items - 1`, in several threads."""
    blocks = math.ceil(items / block)
    helpers = min(torch.get_num_threads(), blocks) - 1
    turns = count()

    def claim() -> None:
        """Compute one block after another, until all are claimed."""
        while (turn := next(turns)) < blocks:
            function(turn * block, min((turn + 1) * block, items), *arrays)

    jobs = [claim]
    offered = _helpers.offer(jobs, helpers)
    try:
        claim()
    finally:
        for lock in offered:
            lock.acquire()  # waits for a helper that has begun; one that has not can no longer begin
        jobs.clear()


class _Helpers:
    """Threads of this process that wait for work. `ThreadPoolExecutor` takes twice as long to hand it over."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin without threads, as in a forked process, which has the forking thread only."""
        self.offers: SimpleQueue[tuple[threading.Lock, list[Callable[[], None]]]] = SimpleQueue()
        self.started = 0

    def offer(self, jobs: list[Callable[[], None]], helpers: int) -> list[threading.Lock]:
        """Offer a job to several threads, and return a lock for each, which a thread holds while it works.

        A thread keeps no reference to the job when it has released its lock. If it were the last one, the thread would
        free tensors, and abort the process if the interpreter is being finalised.
        """
        with suppress(RuntimeError):  # no thread can be started while the interpreter exits
            while self.started < helpers:
                threading.Thread(target=self._work, name="embedlayer-kernel", daemon=True).start()
                self.started += 1
        locks = [threading.Lock() for _ in range(helpers)]
        for lock in locks:
            self.offers.put((lock, jobs))
        return locks

    def _work(self) -> None:
        """Do jobs forever, except those whose lock the caller has taken back."""
        while True:
            lock, jobs = self.offers.get()
            if lock.acquire(blocking=False):
                try:
                    jobs[0]()
                finally:
                    lock.release()


_helpers = _Helpers()
call_in_forked_processes(_helpers.forget)
