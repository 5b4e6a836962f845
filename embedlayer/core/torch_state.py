"""Torch's state, and changes that users made to modules: whether a fast path would compute what a call computes.

Torch has no public function for some of these questions, and for the hooks of a module, so its private names are used
here and nowhere else. Every table, position scheme, head and loss imports this module, so it warns of a release of
torch that is outside of the tested range.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.fx import Proxy as Proxy
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

from embedlayer.core.devices import device_kind
from embedlayer.core.errors import SizeError, StaleRowsError, release, warn_if_untested
from embedlayer.core.formatting import a_or_an
from embedlayer.core.partitioned import GATHERING_HOOKS

warn_if_untested("torch", torch.__version__)


def leaf_of_trace(module: nn.Module, *arguments: object, **options: object) -> Any:
    """Return the call of a module as one node of a graph of `torch.fx`, as a call of torch's own modules is."""
    tracer: Any = next(each.tracer for each in (*arguments, *options.values()) if isinstance(each, Proxy))
    name = tracer.path_of_module(module)
    if not name:
        raise SizeError(f"torch.fx traces a module that contains {a_or_an(module)}, whose call is one node.")
    return tracer.create_proxy("call_module", name, arguments, options)


transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Return whether a `torch.func` transform (`grad`, `vmap`, `jvp`, ...) is running."""


def is_exporting() -> bool:
    """Return whether `torch.export` or `torch.jit.trace` is running, which record operators and no kernels."""
    return torch.compiler._is_exporting_flag or torch._C._get_tracing_state() is not None


def plain_operators_only() -> bool:
    """Return whether custom operators must not be used: in exports and traces, and under a `torch.func` transform."""
    return is_exporting() or transforms_active()


def values_are_read(x: Tensor) -> bool:
    """Return whether a check reads the values of `x`: on the CPU, not in compiled graphs, exports and transforms."""
    return device_kind(x) == "cpu" and not torch.compiler.is_compiling() and not plain_operators_only()


def is_transformed(*tensors: Tensor | None) -> bool:
    """Return whether a `torch.func` transform is running, or a tensor takes part in an older form of one."""
    if transforms_active() or torch.compiler.is_compiling():
        return transforms_active()
    return _is_transformed_as_before(tensors)


def _is_transformed_as_before(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether a tensor is batched by torch's former `vmap`, or has a tangent of forward differentiation."""
    below_autograd = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)
    has_tangents = forward_ad._current_level >= 0 and not below_autograd
    for x in tensors:
        if x is not None and (
            torch._C._functorch.is_legacy_batchedtensor(x)
            or (has_tangents and forward_ad.unpack_dual(x).tangent is not None)
        ):
            return True
    return False


def are_saved_tensors_hooked() -> bool:
    """Return whether hooks receive what autograd saves, as in activation checkpointing and its recomputation."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_in_backward() -> bool:
    """Return whether this thread computes a backward pass, in which a forward pass may be computed again."""
    return torch._C._current_graph_task_id() != -1


def is_capturing(x: Tensor) -> bool:
    """Return whether a CUDA graph is captured on the current stream of the device of `x`: no value can be read then."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_graphs(function: Function) -> Function:
    """Decorate a function of constants such that `torch.compile` calls it while it traces, and inserts the result."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def fusible(*tensors: Tensor | None) -> bool:
    """Return whether a fused function may compute with `tensors`: in eager mode, without transforms and traces."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or transforms_active():
        return False
    return not tensors or not _is_transformed_as_before(tensors)


count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of active `TorchDispatchMode`s, such as `FakeTensorMode` or a counter of operators."""

count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""Return the number of active `TorchFunctionMode`s, such as a default device. They see every torch function."""


def is_fake_mode_active() -> bool:
    """Return whether a `FakeTensorMode` is active, such as while `torch.compile` of torch 2.11 describes its inputs."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


PLAIN_TYPES = (Tensor, nn.Parameter)
"""Types of ordinary tensors: no DTensor, fake tensor or other subclass."""


def has_memory(x: Tensor) -> bool:
    """Return whether `x` is an ordinary tensor or parameter with numbers, of no subclass and not on `meta`."""
    return type(x) in PLAIN_TYPES and not x.is_meta


def is_ordinary_or_fake(x: Tensor) -> bool:
    """Return whether `x` is an ordinary tensor or parameter, or a fake one that stands for it (`FakeTensorMode`)."""
    if type(x) in PLAIN_TYPES:
        return True
    from torch._subclasses.fake_tensor import FakeTensor

    return type(x) is FakeTensor


def has_more_than(x: Tensor, numel: int) -> bool:
    """Return whether `x` has more than `numel` elements; `False` in a graph whose dynamic shapes leave it open."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # 0.3 s, which only graphs need

    return statically_known_true(x.numel() > numel)


without_dispatch: Callable[[], Any] = torch._C._DisableTorchDispatch
"""Context manager: operators run on tensors as on plain ones, without `__torch_dispatch__` and dispatch modes."""


class _Dispatched(nn.Parameter):
    """A tensor that was created as this class has the dispatch key of `__torch_dispatch__`, also in another class."""

    __torch_dispatch__: Any = None  # not torch's own: `set_dispatch` stores the handler in each tensor


def set_dispatch(parameter: Any, kind: type[nn.Parameter], handler: Callable[..., Any] | None) -> None:
    """Turn a parameter into one of class `kind` in place, whose `__torch_dispatch__` is `handler`."""

    def refuse(_: Any) -> None:
        raise StaleRowsError(
            f"The parameter {tuple(parameter.shape)} became row-sparse, or dense, after this forward pass. Compute "
            f"the forward pass again before backward()."
        )

    with without_dispatch():
        memory = parameter.detach()
    other = Tensor._make_subclass(nn.Parameter if handler is None else _Dispatched, memory, parameter.requires_grad)
    del memory
    if parameter._use_count() > 1 and parameter.requires_grad:  # a graph sends its gradient to the former tensor
        torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(refuse)
    grad, hooks, after = parameter.grad, parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(parameter, other)
    parameter.grad, parameter._backward_hooks, parameter._post_accumulate_grad_hooks = grad, hooks, after
    parameter.__class__ = kind
    vars(parameter).pop("__torch_dispatch__", None)
    if handler is not None:
        parameter.__torch_dispatch__ = handler


def varlen_attention() -> Callable[..., Any] | None:
    """Return torch's attention over sequences of different lengths; torch 2.9 has none, torch 2.10 no windows."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return None
    return varlen.varlen_attn if "window_size" in signature(varlen.varlen_attn).parameters else None


def distinguish_numbers_of_rows() -> None:
    """Make torch 2.9 plan the gradient of a looked-up DTensor by the number of its rows, as later releases do."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    if release(torch.__version__) < (2, 11):
        known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
        known.setdefault(torch.ops.aten.embedding_dense_backward.default, RuntimeSchemaInfo(static_argnum=2))


outside_of_graphs = _disable_dynamo
"""Decorate a function such that a graph of `torch.compile` ends before each call of it, and the next begins after it.

Unlike `torch.compiler.disable`, the decorator does not import the compiler; the first call does.
"""


make_wrapper_subclass = Tensor._make_wrapper_subclass
"""Return a tensor of a subclass that has a shape, a dtype and a device, but no memory."""

_ATTRIBUTES = ["shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "requires_grad", "is_leaf"]
_ATTRIBUTES += ["is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn"]
_ATTRIBUTES += ["is_mps", "is_xpu", "grad_fn", "output_nr", "_base", "retains_grad", "grad", "_backward_hooks"]
_METHODS = ["size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex"]
_METHODS += ["is_signed", "is_contiguous", "stride", "storage_offset", "get_device", "is_inference", "__len__"]
_METHODS += ["register_hook", "retain_grad", "__hash__"]
WITHOUT_VALUES = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(getattr(Tensor, name, None), "__get__")),
    *(getattr(Tensor, name) for name in _METHODS),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
"""Functions that read only what such a tensor has: shape, dtype, device, and its place in the autograd graph."""

sparse_indices, sparse_values = Tensor._indices, Tensor._values
"""Return indices and values of a sparse tensor, whether or not it is coalesced."""

foreach_norm, torch_foreach_mul_ = torch._foreach_norm, torch._foreach_mul_
foreach_clamp_min_, foreach_clamp_max_ = torch._foreach_clamp_min_, torch._foreach_clamp_max_
unscale_all_ = torch._amp_foreach_non_finite_check_and_unscale_
"""Functions on lists of gradients, which `torch.nn.utils` and `GradScaler` call."""


def bag_gradient_of_rows(grad: Tensor, ids: Tensor, bags: Tensor, num_rows: int, weights: Tensor | None) -> Tensor:
    """Return the dense gradient of the rows of `F.embedding_bag(mode="sum")`, `(num_rows, D)`."""
    none = ids.new_empty(0)
    rows: Tensor = torch.ops.aten._embedding_bag_dense_backward(
        grad, ids, bags, none, none, num_rows, False, 0, weights, -1
    )
    return rows


def bag_gradient_of_weights(grad: Tensor, rows: Tensor, ids: Tensor, bounds: Tensor, bags: Tensor) -> Tensor:
    """Return the gradient of the factors of the terms of `F.embedding_bag(mode="sum")`, `(M,)`."""
    factors: Tensor = torch.ops.aten._embedding_bag_per_sample_weights_backward(grad, rows, ids, bounds, bags, 0, -1)
    return factors


"""Return the gradient of the factors of the terms of `F.embedding_bag`, `(M,)`."""


_GLOBAL_HOOKS = (
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
    torch_module._global_backward_pre_hooks,
    torch_module._global_backward_hooks,
)
"""Hooks of the calls of all modules. Torch fills these dictionaries and never replaces them."""


def has_hooks(*modules: nn.Module) -> bool:
    """Return whether calling a module runs more than `forward`: its hooks, global hooks, or `module.compile()`."""
    for each in modules:
        if each._forward_pre_hooks or each._forward_hooks or each._compiled_call_impl is not None:
            return True
        if each._backward_pre_hooks or each._backward_hooks:
            return True
    return any(_GLOBAL_HOOKS)


def calls_forward(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Return whether a call of `module` is no more than the passed `forward`: not overridden, replaced or observed."""
    if type(module).forward is not forward or "forward" in vars(module):
        return False
    own = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return not (own or any(_GLOBAL_HOOKS)) or not is_observed(module)


UNOBTRUSIVE = (GATHERING_HOOKS, "torch.utils.module_tracker", "embedlayer.")
"""Starts of the names of modules whose hooks change nothing that a module computes."""


def is_observed(module: nn.Module) -> bool:
    """Return whether hooks may see or change what a call of `module` computes: its own hooks, or global ones."""
    own = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    hooks = [hook for each in (*own, *_GLOBAL_HOOKS) for hook in each.values()]
    origins = [getattr(hook, "__module__", None) or "" for hook in hooks]
    return not all(origin.startswith(UNOBTRUSIVE) for origin in origins)


def recompute_weights(module: nn.Module) -> None:
    """Recompute the weights of a module that hooks compute from its parameters before each call."""
    from torch.nn.utils import prune
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            setattr(module, hook.name, hook.compute_weight(module, do_power_iteration=False))
        elif isinstance(hook, WeightNorm | prune.BasePruningMethod):
            hook(module, ())


def refuse_per_sample_gradients(module: nn.Module) -> None:
    """Raise a `SizeError` if Opacus records per-sample gradients of the parameters of `module`, which are read here."""
    if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
        return
    if any(hasattr(parameter, "grad_sample") for parameter in module.parameters()):
        raise SizeError(
            f"Opacus computes per-sample gradients of this {type(module).__name__} from its calls only, and a tied "
            f"head or a flat Bag reads its rows without one. Use an OutputHead; pass a Bag bags of shape (..., T)."
        )


def is_unchanged(module: object, **methods: Callable[..., Any]) -> bool:
    """Return whether the methods of `module` are still the passed functions."""
    kind, own = type(module), vars(module)
    for name, method in methods.items():  # noqa: SIM110 - a generator takes twice as long, in each small call
        if name in own or getattr(kind, name, None) is not method:
            return False
    return True


def is_current(kind: type, shortcut: str, definition: str) -> bool:
    """Return whether a fast method of a class still computes what the plain method, its `definition`, computes."""
    for part in kind.__mro__:
        if shortcut in vars(part):
            return definition in vars(part) or issubclass(part, next(k for k in kind.__mro__ if definition in vars(k)))
        if definition in vars(part):
            return False
    raise AttributeError(f"{kind.__name__} has no {shortcut}.")


def may_use(part: object, shortcut: str, definition: str) -> bool:
    """Return whether the method `shortcut` of `part` may be used in place of its method `definition`."""
    return definition not in vars(part) and is_current(type(part), shortcut, definition)
