"""Count what a call would do on a GPU, on a machine without one.

`OperatorCounter` runs a call on meta tensors, which it lets the library take for CUDA tensors. It records each kernel
that torch or Triton would launch, its bytes and FLOPs, each wait of the host for the device, and the memory that the
call allocates. Reads of values, which meta tensors do not have, are answered with plausible ones. A copy to the host
that began before the `with` block is complete: to read it is no wait.

It does not see the workspace of an operator of torch, nor of how many kernels one consists: a sort counts once.
"""

import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

import embedlayer
from embedlayer.core.devices import TAKEN_AS, HostCopy, device_kind
from embedlayer.core.torch_state import sparse_indices, sparse_values
from embedlayer.kernels.gpu.launch import Launched, launches_observed

PACKAGE = str(Path(embedlayer.__file__).parent) + os.sep

WITHOUT_MEMORY = "heads/deferred.py"
"""Module whose tensors are on the meta device on a GPU too: logits that are not computed."""

Value = bool | int | float | Sequence[int]
Answer = Value | Iterator[Value]


@dataclass(frozen=True)
class Launch:
    """A kernel that was launched.

    Attributes:
        name: Name of the operator, such as `"mm"`, or of the Triton kernel.
        place: Line of the library that called it, such as `"losses/products.py:58"`.
        bytes: Bytes that it reads and writes.
        flops: Floating-point operations of a matrix product, otherwise 0.
        dtype: Dtype of the factors of a matrix product, otherwise of the last tensor.
        sum_bytes: Bytes of the sums that a matrix product reads and writes because it adds to them.
    """

    name: str
    place: str
    bytes: int
    flops: int
    dtype: torch.dtype
    sum_bytes: int = 0


@dataclass(frozen=True)
class Wait:
    """A wait of the host for the device: the operator, and the line of the library that called it."""

    name: str
    place: str


class Allocations:
    """Bytes of the storages that were allocated and not freed: `now`, and the most there were, `peak`."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._live: set[int] = set()

    def add(self, storages: Iterable[torch.UntypedStorage], older: Iterable[torch.UntypedStorage]) -> None:
        """Add those of `storages` that are new: neither counted before nor among `older`."""
        known = {storage._cdata for storage in older} | self._live
        for storage in storages:
            if storage._cdata not in known:
                known.add(storage._cdata)
                self._live.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._live.discard(key)
        self.now -= size


class OperatorCounter:
    """Record the launches, the waits and the memory of the calls in a `with` block.

    Args:
        answers: Value that a function of the library reads, by its name, or an iterator with a value for each read.
            A sequence is what a read of several numbers returns. Without an answer a boolean is
            `True`, but `False` if `any` computed it; an integer is -1, a float 1. Masks select all, IDs are distinct.

    Example:
        >>> x = torch.empty(4, 8, device="meta")
        >>> with OperatorCounter() as count:
        ...     y = (x @ x.T).exp()
        >>> [launch.name for launch in count.launches], count.flops, count.bytes, count.memory.peak
        (['mm', 'exp'], 256, 448, 128)
    """

    def __init__(self, answers: Mapping[str, Answer] | None = None) -> None:
        self.launches: list[Launch] = []
        self.waits: list[Wait] = []
        self.memory = Allocations()
        self.answers = dict(answers or {})
        self._contexts = ExitStack()

    @property
    def bytes(self) -> int:
        """Bytes that all kernels read and write."""
        return sum(launch.bytes for launch in self.launches)

    @property
    def flops(self) -> int:
        """Floating-point operations of all matrix products."""
        return sum(launch.flops for launch in self.launches)

    def by_line(self) -> Counter[str]:
        """Return the number of launches of each line of the library, with the operator; for reading."""
        return Counter(f"{launch.place} {launch.name}" for launch in self.launches)

    def __enter__(self) -> "OperatorCounter":
        from torch._dynamo.trace_rules import get_torch_obj_rule_map  # 4 s, which products of meta tensors take anyway

        get_torch_obj_rule_map()  # Dynamo keeps this map of torch's functions: it must not have those below
        self._contexts.enter_context(patch.dict(TAKEN_AS, meta="cuda"))
        for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (Tensor, "new_tensor")):
            self._contexts.enter_context(patch.object(owner, name, self._counted(getattr(owner, name), name)))
        attention = self._attention(F.scaled_dot_product_attention)
        self._contexts.enter_context(patch.object(F, "scaled_dot_product_attention", attention))
        self._contexts.enter_context(self._copies_observed())
        self._contexts.enter_context(launches_observed(self._triton_launched))
        self._contexts.enter_context(_Mode(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._contexts.close()

    def launched(self, name: str, size: int, *, flops: int = 0, dtype: torch.dtype, sum_bytes: int = 0) -> None:
        """Record a launch of a kernel that moves `size` bytes; the other arguments are those of `Launch`."""
        self.launches.append(Launch(name, _caller()[0], size, flops, dtype, sum_bytes))

    def waited(self, name: str) -> str:
        """Record a wait, and return the name of the library's function that waits."""
        place, function = _caller()
        self.waits.append(Wait(name, place))
        return function

    def _triton_launched(self, launch: Launched) -> None:
        """Record a launch of a Triton kernel on tensors of the device."""
        tensors = [each for each in launch.arguments.values() if isinstance(each, Tensor)]
        if all(map(_is_on_device, tensors)):
            self.launched(f"{launch.module}.{launch.name}", launch.bytes, dtype=tensors[0].dtype)

    def _counted(self, function: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
        """Return a function that makes a tensor of Python numbers, and counts its copy to the device.

        No dispatch mode sees this copy, for which the host waits.
        """

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            x = function(*args, **kwargs)
            if _is_on_device(x) and not any(x is each for each in args[:1]):
                self.waited(name)
                self.launched(name, x.nbytes, dtype=x.dtype)
                self.memory.add([x.untyped_storage()], [])
            return x

        return counted

    def _copies_observed(self) -> AbstractContextManager[object]:
        """Return a context in which reads of copies that began before it are no waits."""
        begin, read, begun = HostCopy.__init__, HostCopy.tolist, weakref.WeakSet[HostCopy]()

        def begin_here(copy: HostCopy, numbers: Tensor) -> None:
            begun.add(copy)
            begin(copy, numbers)

        def tolist(copy: HostCopy) -> Any:
            before = len(self.waits)
            values = read(copy)
            if copy not in begun:
                del self.waits[before:]
            return values

        return patch.multiple(HostCopy, __init__=begin_here, tolist=tolist)

    def _attention(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a function that counts an attention without gradients as one kernel, as torch has on a GPU.

        For meta tensors torch would compute all scores.
        """

        def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
            if not _is_on_device(q) or torch.is_grad_enabled():
                return function(q, k, v, attn_mask=attn_mask, **options)
            y = torch.empty_like(q)
            size = sum(_size(each) for each in (q, k, v, attn_mask, y) if each is not None)
            self.launched("attention", size, flops=4 * q.numel() * k.shape[-2], dtype=q.dtype)
            return y

        return attention


class _Mode(TorchDispatchMode):
    """Sees every operator, also those in the bodies of custom operators."""

    def __init__(self, count: OperatorCounter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = count
        self.by_any = WeakTensorKeyDictionary()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return `False`: torch would import Dynamo at the first operator, which takes 4 s."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        body = OPDEFS[func._schema.name]._init_fn if func.namespace == "embedlayer" else None
        if body is None and func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
            body = func.decompose  # such as a matmul in the body of a custom operator
        if func is torch.ops.aten.clone.default and args[0].layout is torch.sparse_coo:
            body = _cloned  # torch's own has no rows on the meta device
        if body is not None:
            with self, torch.no_grad():
                return body(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        inputs = _tensors((args, kwargs))
        if _waits(name, inputs, args, kwargs):
            out = self._result(func, name, self.count.waited(name), args, kwargs)
        elif name in ("mm", "addmm") and func._overloadname in ("dtype", "dtype_out") and inputs:
            *_, a, b, dtype = args  # torch 2.9 has no such product on the meta device
            out = kwargs["out"] if "out" in kwargs else a.new_empty(len(a), b.shape[1], dtype=dtype)
        else:
            out = func(*args, **kwargs)
        outputs = _tensors(out)
        if not _caller()[0].startswith(WITHOUT_MEMORY):
            self.count.memory.add(_storages(outputs), older=_storages(inputs))
        if name == "any":
            self.by_any.update((x, True) for x in outputs)
        if _launches(func, name, inputs, outputs):
            flops = _flops(func, args, kwargs, out)
            dtype = (_tensors(args) or outputs)[-1].dtype
            adds = name in ADDITIONS and args[0].shape == outputs[0].shape and not _overwrites(name, kwargs)
            sums = _size(args[0]) + _size(outputs[0]) if adds else 0
            size = _bytes(name, inputs, outputs, args, kwargs)
            self.count.launched(name, size, flops=flops, dtype=dtype, sum_bytes=sums)
        return out

    def _result(self, func: Any, name: str, reader: str, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator that waits, called by the function `reader`."""
        x: Tensor = args[1] if name == "copy_" else args[0]
        value: Answer = x not in self.by_any if x.dtype == torch.bool else 1.0 if x.is_floating_point() else -1
        value = self.count.answers.get(reader, value)
        value = next(value) if isinstance(value, Iterator) else value
        if name in RESULTS:
            return RESULTS[name](value, *args, **kwargs)
        if name in ("_to_copy", "copy_") and _is_on_device(x):
            numbers = torch.tensor(value, dtype=kwargs.get("dtype") or x.dtype, device="cpu").expand(x.shape)
            return args[0].copy_(numbers) if name == "copy_" else numbers.clone()
        return func(*args, **kwargs)


def _caller() -> tuple[str, str]:
    """Return the line of the library that is running, and the name of its function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) and not frame.f_code.co_name.startswith("<"):  # a comprehension is its function's
            return f"{file.removeprefix(PACKAGE)}:{frame.f_lineno}", frame.f_code.co_name
        frame = frame.f_back
    return "", ""


def _is_on_device(x: Tensor) -> bool:
    return device_kind(x) == "cuda"


def _tensors(tree: object) -> list[Tensor]:
    """Return the tensors on the device in a tree of arguments."""
    if isinstance(tree, Tensor):
        return [tree] if _is_on_device(tree) and tree.layout is torch.strided else []
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    return [x for part in parts for x in _tensors(part)]


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    return map(Tensor.untyped_storage, tensors)


def _is_mask(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) and _is_on_device(x)


def _waits(name: str, inputs: list[Tensor], args: Any, kwargs: Any) -> bool:
    """Return whether the host waits for the device in this operator: it needs values, or copies to or from the CPU."""
    if name == "_to_copy":
        to = torch.device(kwargs.get("device") or args[0].device)
        return (_is_on_device(args[0]) != (device_kind(to) == "cuda")) and not kwargs.get("non_blocking")
    if name == "copy_":
        blocking = not kwargs.get("non_blocking", len(args) > 2 and args[2])
        return _is_on_device(args[0]) != _is_on_device(args[1]) and blocking
    if name == "index":
        return any(map(_is_mask, args[1]))
    if name in ("index_put", "index_put_", "_index_put_impl_"):
        is_fill = args[2].numel() == 1 and args[2].device.type == "cpu"  # becomes masked_fill
        return any(map(_is_mask, args[1])) and not is_fill
    return name in WAITS and bool(inputs)


WAITS = {
    "_local_scalar_dense", "nonzero", "_unique2", "unique_consecutive", "unique_dim", "masked_select", "equal",
    "allclose", "bincount", "repeat_interleave",
}  # fmt: skip
"""Operators that wait whatever their arguments, if these are on the device."""

NO_KERNELS = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "detach", "alias",
    "lift", "lift_fresh", "set_", "resize_", "is_same_size", "_unsafe_view", "_reshape_alias",
    "_local_scalar_dense", "_sparse_coo_tensor_with_dims_and_tensors", "_coalesced_",
}  # fmt: skip
"""Operators that launch nothing, beside views. A value is read by a copy, which counts as a wait alone."""

LOOK_UPS = {
    "index_select", "embedding", "index", "gather", "take", "nll_loss_forward",
}  # fmt: skip
"""Operators that read as many numbers of their first tensor as they write."""

ROW_WRITES = {"index_fill": 1, "index_copy": 2, "index_put": 2, "scatter": 2, "index_add": 3, "scatter_add": 3}
"""Operators that write some numbers of their first tensor, and how many accesses each of these needs."""

UNREAD = {"copy_": 0, "fill_": 0, "zero_": 0, "nll_loss_backward": 1}
"""The argument that an operator does not read, or nearly nothing of it."""


ADDITIONS = {"addmm", "addmm_", "baddbmm", "baddbmm_"}
"""Products that add to sums."""


def _launches(func: Any, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Return whether an operator launches kernels: it is no view, and has work on the device."""
    is_read = name == "_to_copy" and not outputs
    return not func.is_view and name not in NO_KERNELS and not is_read and any(x.numel() for x in outputs or inputs)


def _bytes(name: str, inputs: list[Tensor], outputs: list[Tensor], args: Any, kwargs: Any) -> int:
    """Return the bytes that an operator reads and writes, each tensor once."""
    if name.rstrip("_").removeprefix("_").removesuffix("_impl") in ROW_WRITES:
        return _bytes_of_row_writes(name, args, kwargs)
    written = sum(map(_size, outputs)) if outputs else sum(map(_size, _tensors(args[:1])))
    place = 0 if name in LOOK_UPS or _overwrites(name, kwargs) else UNREAD.get(name)
    unread = {id(x) for x in _tensors((kwargs.get("out"), None if place is None else args[place]))}
    read = sum(_size(x) for x in {id(x): x for x in inputs}.values() if id(x) not in unread)
    return read + written + (written if name in LOOK_UPS else 0)


def _flops(func: Any, args: Any, kwargs: Any, out: object) -> int:
    """Return the floating-point operations of a matrix product; 0 for other operators."""
    formula = flop_registry.get(getattr(torch.ops.aten, func._schema.name.removeprefix("aten::").rstrip("_"), None))
    if formula is None:
        return 0
    shapes = (each for each in args if not isinstance(each, torch.dtype))  # `out_dtype` is an argument of an overload
    flops: int = formula(*shapes, **kwargs, out_val=out)
    return flops


def _overwrites(name: str, kwargs: Any) -> bool:
    """Return whether a product overwrites the tensor to which others add."""
    return name in ADDITIONS and kwargs.get("beta") == 0


def _bytes_of_row_writes(name: str, args: Any, kwargs: Any) -> int:
    """Return the bytes of an operator that writes some numbers of its first tensor: of these, and of the indices."""
    kind, x = name.rstrip("_").removeprefix("_").removesuffix("_impl"), args[0]
    if kind == "index_put":
        indices = [index for index in args[1] if index is not None]
        rest = [size for size, index in zip_longest(x.shape, args[1]) if index is None]
        numbers = torch.broadcast_shapes(*(index.shape for index in indices)).numel() * prod(rest)
    else:
        indices = [args[2]]
        numbers = args[2].numel() * (1 if kind.startswith("scatter") else x.numel() // max(x.shape[args[1]], 1))
    adds = kind == "index_put" and (args[3] if len(args) > 3 else kwargs.get("accumulate"))
    accesses = 3 if adds else ROW_WRITES[kind]
    copied = 0 if name.endswith("_") else 2 * _size(x)
    size: int = accesses * numbers * x.itemsize + sum(map(_size, indices)) + copied
    return size


def _size(x: Tensor) -> int:
    """Return the bytes of a tensor in memory; numbers along an expanded dimension are there once."""
    return x.itemsize * prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or not size)


def _rows(x: Tensor, *, inverse: bool, counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `unique` returns if all numbers differ."""
    indices = torch.empty(x.shape, dtype=torch.int64, device=x.device)
    return (
        torch.empty_like(x.flatten()),
        indices if inverse else indices[:0],
        indices.flatten() if counts else indices[:0],
    )


def _cloned(x: Tensor, memory_format: torch.memory_format | None = None) -> Tensor:
    """Return a copy of a sparse tensor, or one over the same memory where autograd stores a gradient.

    Autograd copies a gradient that something refers to, as a dispatch mode does; without a mode it does not.
    """
    rows, values = sparse_indices(x), sparse_values(x)
    if _caller()[0]:
        rows, values = rows.clone(), values.clone()
    return torch.sparse_coo_tensor(rows, values, x.shape, is_coalesced=x.is_coalesced(), check_invariants=False)


def _selected(value: Answer, x: Tensor, indices: list[Tensor | None]) -> Tensor:
    """Return what a mask selects that is `True` everywhere."""
    place, mask = next((place, index) for place, index in enumerate(indices) if index is not None)
    return x.new_empty(*x.shape[:place], mask.numel(), *x.shape[place + mask.dim() :])


RESULTS: dict[str, Callable[..., Any]] = {
    "_local_scalar_dense": lambda value, x: value,
    "equal": lambda value, x, y: True,
    "index": _selected,
    "nonzero": lambda value, x: torch.empty(x.numel(), x.dim(), dtype=torch.int64, device=x.device),
    "_unique2": lambda value, x, sorted=True, return_inverse=False, return_counts=False: _rows(
        x, inverse=return_inverse, counts=return_counts
    ),
    "unique_consecutive": lambda value, x, return_inverse=False, return_counts=False, dim=None: _rows(
        x, inverse=return_inverse, counts=return_counts
    ),
    "allclose": lambda value, x, y, *_, **__: True,
    "masked_select": lambda value, x, mask: torch.empty_like(x.flatten()),
    "bincount": lambda value, x, weights=None, minlength=0: torch.empty(minlength, dtype=torch.int64, device=x.device),
}
"""Results of operators that depend on values, from the answer and the arguments."""
