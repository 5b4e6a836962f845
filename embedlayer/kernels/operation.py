"""The record of an accelerated operation: its definition, and the compiled kernels that compute the same faster.

An operation has CPU kernels, Triton kernels for CUDA (`embedlayer.kernels.gpu`), or both. From its record come the
custom operator of torch with its fake, the fallback to the definition, its rows in `embedlayer doctor` and
docs/kernels.md, and its tests. `embedlayer.cli.operations` lists all records.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from inspect import signature
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.torch_state import (
    PLAIN_TYPES,
    count_dispatch_modes,
    fusible,
    is_transformed,
    plain_operators_only,
)
from embedlayer.kernels import kernel as kernels
from embedlayer.kernels.kernel import FLOATS, NUMBA_IS_INSTALLED, Kernel

if TYPE_CHECKING:
    from embedlayer.kernels.gpu.launch import Launch


class Operation:
    """An operation that has compiled kernels.

    A call computes by a kernel if one applies, and otherwise by the definition. Callers that have asked `applies`, or
    whose definition has other arguments, call the function that `operator` decorates.

    Args:
        what: What is computed, for people.
        definition: The same in plain torch operators; `"module:name"` if its module is above that of the record.
        cpu: CPU kernels.
        gpu: Function that imports Triton kernels, and returns how each is launched, by its name.
        launches: Names of those kernels that this operation launches.
    """

    def __init__(
        self,
        what: str,
        definition: Callable[..., Any] | str,
        *,
        cpu: Sequence[Kernel] = (),
        gpu: "Callable[[], Mapping[str, Launch]]" = dict,
        launches: Sequence[str] = (),
    ) -> None:
        self.what, self.definition, self.definition_name = what, definition, str(definition)
        if callable(definition):
            module = definition.__module__.removeprefix("embedlayer.")
            self.definition_name = f"{module}:{definition.__qualname__}"
        self.cpu, self.gpu, self.launches = tuple(cpu), gpu, tuple(launches)
        self.kernels = {"cpu": tuple(kernel.label for kernel in self.cpu), "cuda": self.launches}
        self.compute: Callable[..., Any] | None = None
        self.custom: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """Compute the operation; graphs of `torch.compile` for the CPU have the operator as one node."""
        assert callable(self.definition)
        if torch.compiler.is_compiling():
            return (self.custom if self.applies_in_graph(arguments[0]) else self.definition)(*arguments)
        result = None
        if self.compute is not None and self.applies(*(each for each in arguments if isinstance(each, Tensor))):
            result = self.compute(*arguments)
        return self.definition(*arguments) if result is None or result is False else result

    def applies(self, *tensors: Tensor | None) -> bool:
        """Return whether kernels may compute with `tensors`; `None` is skipped. See `refusal`."""
        return not self.refusal(*tensors)

    def refusal(self, *tensors: Tensor | None) -> str:
        """Return why no kernel may compute with `tensors`, or an empty string if one may; `None` is skipped.

        They must be ordinary tensors on the CPU, in eager mode, outside `torch.func` transforms, and with no dispatch
        mode that expects to see every operator. Kernels must be possible on this machine as well, as far as is known.

        On one CUDA device Triton kernels compute, if there are some. There a dispatch mode sees the custom operator
        that launches them.
        """
        if not kernels._availability.enabled:
            return "kernels are disabled"
        if not fusible(*tensors):
            return "a graph is traced, or a transform is running"
        for x in tensors:
            if x is None:
                continue
            kind = device_kind(x)
            if kind == "cuda" and self.launches:
                from embedlayer.kernels.gpu.availability import triton_refusal

                return triton_refusal(*tensors)
            if not (self.cpu and kind == "cpu"):
                return f"there is no kernel for {kind}"
            is_plain = type(x) in PLAIN_TYPES and x.layout is torch.strided
            if not is_plain or (x.dtype not in FLOATS and (x.dtype.is_floating_point or x.dtype.is_complex)):
                return f"no kernel takes {type(x).__name__} of {x.dtype}"
        if count_dispatch_modes():
            return "a dispatch mode is active"
        return kernels._failure.reason or ""

    def applies_in_graph(self, x: Tensor) -> bool:
        """Return whether a graph that is being traced should compute with `x` by an operator that runs a kernel.

        It is decided when `torch.compile` traces the graph: numba is installed, no kernel has failed, and `x` is on the
        CPU in one of `FLOATS`. Inductor's own code is faster than the torch operators to which a custom operator falls
        back, and on CUDA it fuses the definition with what follows.
        """
        if not torch.compiler.is_compiling() or plain_operators_only() or kernels._failure.reason is not None:
            return False
        return bool(self.cpu) and NUMBA_IS_INSTALLED and device_kind(x) == "cpu" and x.dtype in FLOATS

    def operator(
        self, schema: str | None = None, *, mutates: tuple[str, ...] = (), transposed: tuple[int, ...] | None = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate a function that runs the kernels such that it is a custom operator too, `embedlayer::` and its name.

        The function is also the operator's fake: on tensors without memory it allocates its results and computes
        nothing. In eager mode it is called directly, as a call of an operator takes some 20 µs. While a dispatch mode
        is active or a graph is traced, the operator is called.

        The function returns tensors, or `None` if no kernel could be compiled; of an operator without results it
        returns whether one could. The operator then computes by the definition, as where kernels are refused on a CPU.

        - `schema`: by default from the annotations.
        - `mutates`: arguments that are written.
        - `transposed`: for an operation that is linear in its first argument, the places of the arguments that have the
          opposite sign in the transposed operation, which computes the gradient by this argument. The others have none.
        """

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            name = f"embedlayer::{function.__name__}"

            def compute(*arguments: Any) -> Any:
                tensors = [each for each in arguments if isinstance(each, Tensor)]
                is_on_cpu = kernels._availability.computes and device_kind(tensors[0]) == "cpu"
                is_refused = is_on_cpu and callable(self.definition) and not self.applies(*tensors)
                result = None if is_refused else function(*arguments)
                if result is None or result is False:
                    if not callable(self.definition):
                        raise RuntimeError(f"{name} has no kernel for these tensors; see the log.")
                    result = self.definition(*arguments)
                return None if result is True else result

            declared = signature(function)
            returned = declared.return_annotation
            if NoneType in get_args(returned):
                (returned,) = (each for each in get_args(returned) if each is not NoneType)
            result = None if returned is bool else returned
            compute.__signature__ = declared.replace(return_annotation=result)  # type: ignore[attr-defined]
            custom = torch.library.custom_op(name, compute, mutates_args=mutates, schema=schema)
            custom.register_fake(kernels.nothing_computed()(compute))
            if transposed is not None:
                custom.register_autograd(partial(self._gradient, transposed), setup_context=_save_all_but_first)

            @wraps(function)
            def call(*arguments: Any) -> Any:
                if transposed is None and not count_dispatch_modes() and not torch.compiler.is_compiling():
                    return function(*arguments)
                result = custom(*arguments)
                return True if result is None else result

            self.compute, self.custom = call, custom
            return call

        return decorate

    def _gradient(self, opposite: tuple[int, ...], ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments of an operator that is linear in its first one."""
        saved = iter(ctx.saved_tensors)
        others = [next(saved) if each is None else each for each in ctx.others]
        compute: Any = self.definition if is_transformed(grad) else self.custom
        by_first = compute(grad, *(-each if place in opposite else each for place, each in enumerate(others, start=1)))
        return by_first, *(None for _ in others)


def _save_all_but_first(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the other arguments of an operator in the autograd context `ctx`; none is `None`."""
    ctx.save_for_backward(*(each for each in inputs[1:] if isinstance(each, Tensor)))
    ctx.others = [None if isinstance(each, Tensor) else each for each in inputs[1:]]


def cpu_failure() -> str:
    """Compile a small CPU kernel, or read it from the cache; return why no kernel of this process can be, or `""`."""
    from embedlayer.kernels.cpu.softmax import add_bfloat16

    total = torch.zeros(1, 1, dtype=torch.bfloat16)
    add_bfloat16.run(1, total, total.view(torch.uint16), total, True, block=1)
    return kernels._failure.reason or ""
