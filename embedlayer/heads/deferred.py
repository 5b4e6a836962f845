"""Logits that are computed only if something reads them, so that a cross entropy can be computed without them.

A patched LM head returns `DeferredLogits`: a tensor with the shape, dtype and device of its logits, and no memory. It
refers to the hidden states. The mechanism has four parts:

1. Every function of torch that is called on it reaches `__torch_function__`. `RULES` has the functions between head and
   loss that need no values: views, indexing, casts, scales, soft cap. Each returns new deferred logits: an
   `UncomputedLogits` of the hidden states of its rows, whose options say what is done to each logit; and the function
   itself, as the step from their parent.
2. `F.cross_entropy` of them is the loss of these `UncomputedLogits`, which never stores tokens x V numbers.
3. Any other function reads the real logits. They are computed once, and all steps are applied to them. Calls from below
   Python, such as C++ extensions, reach `__torch_dispatch__`, which does the same.
4. In the autograd graph the deferred logits are where the logits were. The loss passes a `DeferredGradient` back to the
   head, which turns it into the gradients of hidden states and weights. A hook that reads it gets the real gradient.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import enable_reentrant_dispatch, resolve_name

from embedlayer.core.devices import autocast_dtype, device_kind
from embedlayer.core.shapes import wide_dtype
from embedlayer.core.torch_state import (
    PLAIN_TYPES,
    WITHOUT_VALUES,
    DisableTorchFunctionSubclass,
    is_exporting,
    is_transformed,
    make_wrapper_subclass,
    tree_map,
)
from embedlayer.heads.logit_source import HeadTensors, LogitSource, LogitsReport, marked
from embedlayer.losses.definition import cross_entropy, reduce_losses
from embedlayer.losses.linear import cross_entropy_of
from embedlayer.losses.options import LogitSettings, LossSettings, Reduction
from embedlayer.losses.targets import checked_weights
from embedlayer.losses.uncomputed_logits import UncomputedLogits

HALF = (torch.bfloat16, torch.float16)
ALIASES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default, torch.ops.aten.view.default)
"""Operators with which autograd itself makes another tensor object, to save a tensor or to run hooks."""

Step = Callable[[Tensor], Tensor]
Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Deferred(Tensor):
    """A tensor with shape, dtype and device, and no memory, whose values are computed when something reads them."""

    source: LogitSource
    computed: Tensor | None

    def materialize(self) -> Tensor:
        """Return the real tensor, which is computed at the first call and is the same object each time."""
        raise NotImplementedError

    def values(self) -> Tensor:
        """Return the real tensor without a place in the autograd graph, for an operator called below autograd."""
        raise NotImplementedError

    def deferred_result(self, func: object, args: Args) -> "Deferred | None":
        """Return the result of an operator of ATen as a deferred tensor; `None` if the operator needs the values."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if func in WITHOUT_VALUES:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func in AUTOGRAD:
            with DisableTorchFunctionSubclass():  # these tensors are in the graph themselves
                return func(*args, **kwargs)
        rule = RULES.get(func)
        if rule is not None and "input" in kwargs:
            args, kwargs = (kwargs["input"], *args), {name: each for name, each in kwargs.items() if name != "input"}
        place = int(rule in COMMUTATIVE and len(args) == 2 and not isinstance(args[0], DeferredLogits))
        logits = args[place] if args else None
        if rule is not None and isinstance(logits, DeferredLogits) and logits.is_unread:
            # In the forward of an autograd function only views stay deferred: its backward need not be the derivative.
            is_safe = torch.is_grad_enabled() or not logits.requires_grad or rule is _rearranged
            result = rule(func, logits, args, kwargs) if is_safe else None
            if result is not None:
                return result

        def real(each: Any) -> Any:
            if not isinstance(each, Deferred):
                return each
            each.source.report.read_by(resolve_name(func) or repr(func))
            return each.materialize()

        args, kwargs = tree_map(real, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        first = next((each for each in args if isinstance(each, Deferred)), None)
        result = None if first is None else first.deferred_result(func, args)
        if result is not None:
            return result

        def values(each: Any) -> Any:
            if not isinstance(each, Deferred):
                return each
            each.source.report.read_by(str(func))
            with enable_reentrant_dispatch():  # so that autograd works while the values are computed
                return each.values().detach()

        args, kwargs = tree_map(values, (args, kwargs or {}))
        return func(*args, **kwargs)


class DeferredLogits(Deferred):
    """Logits that are computed when they are read; created by `defer_logits`, and from others by `RULES`."""

    like: Tensor  # on the meta device, with shape, strides and dtype; views share its storage
    described: UncomputedLogits  # the same logits as a function of the leaves of `source`
    parent: "DeferredLogits | None"
    step: Step
    node: object  # the autograd node at creation; another `grad_fn` means that an operator wrote in place

    def __new__(
        cls,
        source: LogitSource,
        like: Tensor,
        described: UncomputedLogits,
        parent: "DeferredLogits | None" = None,
        step: Step = lambda real: real,
    ) -> "DeferredLogits":
        logits: DeferredLogits = make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=described.hidden.device
        )
        logits.source, logits.like, logits.described, logits.parent, logits.step = source, like, described, parent, step
        logits.node = logits.computed = None
        return logits

    @property
    def is_unread(self) -> bool:
        """Return whether neither these logits nor those from which they follow were read."""
        return self.computed is None and (self.parent is None or self.parent.is_unread)

    def uncomputed(self) -> UncomputedLogits | None:
        """Return the logits without computing them, with gradients to hidden states and tensors of the head."""
        source = self.source
        if not self.is_unread or source.is_freed or is_transformed(*source.originals):
            return None
        with source.restored() as is_changed:
            logits = source.with_originals(self.described) if source.requires_grad else self.described
            return logits.replaced(marked(logits.hidden, is_changed), logits.options)

    def materialize(self) -> Tensor:
        """Return the real logits, a plain tensor at the same place of the autograd graph; it is the same each time."""
        if self.computed is None:
            parent, is_own = self.parent, self.grad_fn is None or self.grad_fn is self.node
            with torch.set_grad_enabled(self.requires_grad):
                if parent is not None and is_own and self.like.untyped_storage() is parent.like.untyped_storage():
                    self.computed = self.step(parent.materialize())  # a view, so writes in place reach the parent
                else:
                    self.computed = _Read.apply(self)  # type: ignore[no-untyped-call]
        return self.computed

    def values(self) -> Tensor:
        """Return the real logits, detached; logits that were unread stay unread."""
        return self.original() if self.computed is None else self.computed.detach()

    def original(self) -> Tensor:
        """Return the real logits, detached, as they were before any write in place."""
        if self.parent is None:
            return self.source.logits().detach()
        with torch.no_grad():
            return self.step(self.parent.original())

    def deferred_result(self, func: object, args: Args) -> "DeferredLogits | None":
        """Return the result of an operator as unread logits if it only makes an alias of these; else `None`."""
        if not self.is_unread or not _is_alias(func, args):
            return None
        return DeferredLogits(self.source, self.like, self.described, self)

    def followed(
        self,
        step: Step,
        like: Tensor,
        select: Step = lambda rows: rows,
        change: Callable[[LogitSettings], LogitSettings] = lambda options: options,
    ) -> "DeferredLogits | None":
        """Return deferred logits that follow from these, in the autograd graph behind them."""
        # `select` does to the hidden states what `step` does to the rows of logits, and `change` to the options what it
        # does to the values. `None` tells the caller to read the real logits.
        if like.dtype not in (self.dtype, torch.float32, *HALF):
            return None
        with torch.set_grad_enabled(self.source.requires_grad):
            described = self.described.replaced(select(self.described.hidden), change(self.described.options))
        result: DeferredLogits = _Derived.apply(self, (self.source, like, described, self, step))  # type: ignore[no-untyped-call]
        return result


class DeferredGradient(Deferred):
    """The gradient of a loss by its logits, which the head turns into its own gradients without computing it."""

    leaf_gradients: Callable[[], list[Tensor | None]]
    compute: Callable[[], Tensor]

    def __new__(
        cls, like: Deferred, leaf_gradients: Callable[[], list[Tensor | None]], compute: Callable[[], Tensor]
    ) -> "DeferredGradient":
        grad: DeferredGradient = make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        grad.source, grad.leaf_gradients, grad.compute, grad.computed = like.source, leaf_gradients, compute, None
        return grad

    def materialize(self) -> Tensor:
        """Return the real gradient, computed once."""
        if self.computed is None:
            with torch.no_grad():
                self.computed = self.compute()
        return self.computed

    def values(self) -> Tensor:
        return self.materialize()

    def deferred_result(self, func: object, args: Args) -> "DeferredGradient | None":
        """Return the result of an operator as a deferred gradient if it is an alias, a clone or a sum; else `None`."""
        if func is torch.ops.aten.clone.default or _is_alias(func, args):
            return DeferredGradient(self, self.leaf_gradients, self.materialize)
        other = args[1] if func is torch.ops.aten.add.Tensor else None
        if not isinstance(other, DeferredGradient) or args[0] is not self or other.dtype != self.dtype:
            return None
        return DeferredGradient(
            self,
            lambda: [
                two if one is None else one if two is None else one + two
                for one, two in zip(self.leaf_gradients(), other.leaf_gradients(), strict=True)
            ],
            lambda: self.materialize() + other.materialize(),
        )


def _is_alias(func: object, args: Args) -> bool:
    """Return whether an operator returns its first argument as it is, as another tensor object."""
    return func in ALIASES and (func is not torch.ops.aten.view.default or tuple(args[1]) == tuple(args[0].shape))


# The autograd graph of deferred logits


class _Head(torch.autograd.Function):
    """Create the deferred logits of a head in the autograd graph, behind hidden states and tensors of the head."""

    @staticmethod
    def forward(ctx: Any, source: LogitSource, *originals: Tensor) -> DeferredLogits:
        ctx.source = source
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*originals)
        described = source.described()
        shape = (*source.hidden.shape[:-1], described.vocab_size)
        like = torch.empty(shape, dtype=source.logits_dtype, device="meta")
        logits = DeferredLogits(source, like, described)
        logits.node = ctx
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        originals, source = ctx.saved_tensors, ctx.source
        if grad is None:
            return (None, *(None for _ in originals))
        if isinstance(grad, DeferredGradient):
            return (None, *grad.leaf_gradients())
        if not torch.is_grad_enabled():
            return (None, *source.gradients_of(source.logits(), grad))
        with source.restored() as is_changed:  # create_graph=True
            logits = source.tensors.replaced(originals[1:]).logits(marked(originals[0], is_changed), source.settings)
        return (None, *source.gradients_of(logits, grad, originals))


class _Derived(torch.autograd.Function):
    """Create deferred logits that follow from others; `backward` passes a deferred gradient on."""

    @staticmethod
    def forward(ctx: Any, parent: DeferredLogits, link: tuple[Any, ...]) -> DeferredLogits:
        ctx.set_materialize_grads(False)
        logits = DeferredLogits(*link)
        logits.node = ctx
        ctx.parent, ctx.step = parent, logits.step
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        parent, step = ctx.parent, ctx.step
        if isinstance(grad, DeferredGradient):
            own = DeferredGradient(parent, grad.leaf_gradients, lambda: _gradient(step, parent, grad.materialize()))
            return own, None
        return None if grad is None else _gradient(step, parent, grad), None


class _Read(torch.autograd.Function):
    """Compute the real logits of deferred ones, as they were before any write in place; `backward` is the identity."""

    @staticmethod
    def forward(ctx: Any, deferred: DeferredLogits) -> Tensor:
        return deferred.original()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Loss(torch.autograd.Function):
    """Compute the cross entropy of deferred logits from their hidden states; `backward` returns a deferred gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: DeferredLogits, targets: Tensor, dtype: torch.dtype, arguments: dict[str, Any]
    ) -> Tensor:
        source = logits.source
        with source.restored() as is_changed:
            # on a CPU even few tokens never have all their logits at once; elsewhere two chunks need float32 sums
            chunks = 2 if device_kind(targets) == "cpu" else 1
            loss = cross_entropy_of(logits.described, targets, LossSettings(**arguments, min_chunks=chunks))
            if arguments["reduction"] == "mean":  # over no target it is NaN, as in torch
                loss = loss.masked_fill((targets == arguments["ignore_index"]).all(), math.nan)
            loss = marked(loss, is_changed)
        ctx.loss, ctx.logits, ctx.arguments = loss, logits, arguments
        ctx.save_for_backward(targets)
        return loss.detach().to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (targets,), logits, loss, arguments = ctx.saved_tensors, ctx.logits, ctx.loss, ctx.arguments

        def gradient() -> Tensor:
            return _gradient(lambda real: _loss_of_values(real, targets, **arguments), logits, grad)

        if torch.is_grad_enabled() or is_transformed(grad):
            return gradient(), None, None, None
        deferred = DeferredGradient(logits, lambda: logits.source.gradients_of(loss, grad.to(loss.dtype)), gradient)
        return deferred, None, None, None


def _gradient(step: Step, logits: DeferredLogits, grad: Tensor) -> Tensor:
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        real = logits.materialize() if create_graph else logits.original().detach().requires_grad_()
        result = step(real)
    return torch.autograd.grad(result, real, grad.to(result.dtype), create_graph=create_graph)[0]


# Rules for functions that need no values. Each takes the function, unread logits, and all arguments of the function. It
# returns `None` if the caller must read the logits and call the function on them.


def _cross_entropy(
    logits: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    token_weights: Tensor | None = None,
) -> Tensor | None:
    """Return `F.cross_entropy` of unread logits `(N, V)` or `(V,)` and token IDs, from the hidden states."""
    is_known = type(target) in PLAIN_TYPES and target.dtype == torch.int64 and target.device == logits.device
    is_known = is_known and logits.dim() in (1, 2) and target.shape == logits.shape[:-1] and target.numel() > 0
    is_known = is_known and (weight, size_average, reduce) == (None, None, None)
    if not is_known or reduction not in ("mean", "sum", "none") or not 0.0 <= label_smoothing <= 1.0:
        return None
    dtype = logits.dtype
    if dtype in HALF and autocast_dtype(logits) is not None:
        dtype = torch.float32
    if logits.source.logits_dtype == torch.float64:
        dtype = torch.float64  # also where the model casts its logits to float32: this loss never rounded them
    arguments = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    if token_weights is not None:
        arguments["token_weights"] = token_weights
    result: Tensor = _Loss.apply(logits, target, dtype, arguments)  # type: ignore[no-untyped-call]
    return result


def _loss_of_values(logits: Tensor, targets: Tensor, token_weights: Tensor | None = None, **arguments: Any) -> Tensor:
    """Return `F.cross_entropy` of real logits, or `weighted_cross_entropy` of them."""
    if token_weights is None:
        return F.cross_entropy(logits, targets, **arguments)
    kept = targets != arguments["ignore_index"]
    weights = checked_weights(token_weights.to(wide_dtype(logits.dtype)), targets, arguments["ignore_index"])
    loss = LossSettings(**arguments, token_weights=weights)
    result = reduce_losses(cross_entropy(logits, targets, loss), kept, loss)
    return torch.where(kept.any(), result, math.nan) if loss.reduction == "mean" else result  # as in torch


def weighted_cross_entropy(
    logits: Tensor, targets: Tensor, token_weights: Tensor, *, ignore_index: int, reduction: Reduction
) -> Tensor:
    """Return `F.cross_entropy` with a weight of each target, of deferred logits without computing them."""
    # The caller has checked `token_weights` with `require_token_weights`.
    arguments: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction, "token_weights": token_weights}
    result, is_safe = None, torch.is_grad_enabled() or not logits.requires_grad  # see `__torch_function__`
    if isinstance(logits, DeferredLogits) and logits.is_unread and is_safe:
        result = _cross_entropy(logits, targets, **arguments)
    return _loss_of_values(logits, targets, **arguments) if result is None else result


def _rearranged(func: Function, logits: DeferredLogits, args: Args, kwargs: Kwargs) -> DeferredLogits | None:
    """Return the result of a function that keeps the order of all numbers, if the vocabulary stays last."""
    others = [each.like if isinstance(each, DeferredLogits) else each for each in args[1:]]
    like = func(logits.like, *others, **kwargs)
    if like is logits.like:
        return logits
    if like.shape[-1:] != logits.shape[-1:] or like.dtype != logits.dtype:
        return None
    shape = (*like.shape[:-1], logits.described.hidden.shape[-1])
    return logits.followed(lambda real: func(real, *others, **kwargs), like, lambda rows: rows.reshape(shape))


def _indexed(func: Function, logits: DeferredLogits, args: Args, kwargs: Kwargs) -> DeferredLogits | None:
    """Return logits indexed in their leading dimensions, by integers, slices, masks or tensors of indices."""
    keys = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(isinstance(each, Deferred) for each in keys):
        return None
    leading = keys[:-1] if keys and isinstance(keys[-1], slice) and keys[-1] == slice(None) else keys
    if leading is keys and any(each is ... for each in keys[:-1]):
        return None
    with suppress(IndexError):  # raised if a key reaches the vocabulary
        chosen = logits.described.hidden.detach()[..., 0][leading]
        if all(isinstance(each, int | slice | type(None) | type(...)) and not isinstance(each, bool) for each in keys):
            return logits.followed(lambda real: real[keys], logits.like[keys], lambda rows: rows[keys])
        like = logits.like.new_empty(*chosen.shape, logits.shape[-1])
        return logits.followed(lambda real: real[keys].contiguous(), like, lambda rows: rows[keys])
    return None


def _cast(func: Function, logits: DeferredLogits, args: Args, kwargs: Kwargs) -> DeferredLogits | None:
    """Return logits of another dtype, or the logits themselves; `None` for another device."""
    empty, *others = (
        torch.empty(0, dtype=each.dtype, device=each.device) if isinstance(each, DeferredLogits) else each
        for each in args
    )
    result = func(empty, *others, **kwargs)
    if result is empty:
        return logits
    if type(result) is not Tensor or result.device != logits.device:
        return None
    like = torch.empty_like(logits.like, dtype=result.dtype)
    return logits.followed(lambda real: func(real, *others, **kwargs), like)


def _number(value: Any) -> float | None:
    """Return a finite factor as a number; `None` for a boolean, an infinite one or NaN, and for other objects."""
    if isinstance(value, Tensor):
        is_known = type(value) in PLAIN_TYPES and value.dim() == 0 and device_kind(value) == "cpu"
        value = value.item() if is_known and not value.requires_grad and value.is_floating_point() else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _multiplied(func: Function, logits: DeferredLogits, args: Args, kwargs: Kwargs) -> DeferredLogits | None:
    """Return logits times a number; `None` if `_number` does not know the factor, or if it is 0 behind a tanh."""
    factor = None if kwargs else _number(args[1] if args[0] is logits else args[0])
    if factor is None or (factor == 0 and logits.described.options.softcap is not None):
        return None
    like = torch.empty_like(logits.like)
    return logits.followed(lambda real: real * factor, like, change=lambda options: options.scaled(factor))


def _divided(func: Function, logits: DeferredLogits, args: Args, kwargs: Kwargs) -> DeferredLogits | None:
    """Return logits divided by a number; `None` if `_number` does not know the divisor, or if it is 0."""
    divisor = None if kwargs else _number(args[1])
    if not divisor:
        return None
    like = torch.empty_like(logits.like)
    return logits.followed(lambda real: real / divisor, like, change=lambda options: options.scaled(1.0, divisor))


def _bounded(func: Function, logits: DeferredLogits, args: Args, kwargs: Kwargs) -> DeferredLogits | None:
    """Return the tanh of logits, the first half of a soft cap; `None` for logits that have a soft cap already."""
    if logits.described.options.softcap is not None or kwargs:
        return None
    return logits.followed(torch.tanh, torch.empty_like(logits.like), change=LogitSettings.bounded)


def _shifted(func: Function, logits: DeferredLogits, args: Args, kwargs: Kwargs) -> DeferredLogits | None:
    """Return logits plus a tensor without gradient that has one number for each token of the vocabulary."""
    if kwargs:
        return None
    other, size = args[1] if args[0] is logits else args[0], logits.shape[-1]
    if type(other) not in PLAIN_TYPES or other.device != logits.device or not other.is_floating_point():
        return None
    is_known = other.shape[-1:] == (size,) and other.numel() == size and other.dim() <= logits.dim()
    if not is_known or other.requires_grad or logits.described.options.softcap is not None:
        return None
    added = other.detach().flatten().clone()
    wide = added.to(wide_dtype(logits.source.logits_dtype))
    like = torch.empty_like(logits.like, dtype=torch.promote_types(added.dtype, logits.dtype))
    return logits.followed(lambda real: real + added, like, change=lambda options: options.shifted(wide))


Rule = Callable[[Function, DeferredLogits, Args, Kwargs], Tensor | None]
_REARRANGED = ["view", "reshape", "view_as", "reshape_as", "flatten", "squeeze", "unsqueeze", "contiguous", "clone"]
_BY_NAME: dict[Rule, list[str]] = {
    _rearranged: _REARRANGED,
    _indexed: ["__getitem__"],
    _cast: ["float", "half", "bfloat16", "to", "type", "type_as"],
    _multiplied: ["mul", "multiply", "__mul__", "__rmul__"],
    _divided: ["div", "divide", "true_divide", "__truediv__"],
    _bounded: ["tanh"],
    _shifted: ["add", "__add__", "__radd__"],
}
RULES: dict[Function, Rule] = {
    getattr(place, name): rule
    for rule, names in _BY_NAME.items()
    for name in names
    for place in (Tensor, torch)
    if callable(getattr(place, name, None)) and not isinstance(getattr(place, name), torch.dtype)
}
RULES[F.cross_entropy] = lambda func, logits, args, kwargs: _cross_entropy(*args, **kwargs)
"""Functions that need no values of deferred logits, as methods and as functions of torch, and their rules."""

COMMUTATIVE = (_multiplied, _shifted)
AUTOGRAD = {torch.autograd.grad, torch.autograd.backward}  # functions that take tensors of the autograd graph


def defer_logits(
    head: nn.Module, hidden: Tensor, tensors: HeadTensors, settings: LogitSettings, report: LogitsReport
) -> DeferredLogits | None:
    """Return the deferred logits of a head, or `None` where its logits must be computed at once."""
    # `None` for anything unusual (one position, subclasses, mixed devices or dtypes): the plain head computes it or
    # raises torch's error.
    parts = (hidden, *tensors.flat())
    is_batch = hidden.dim() > 1 and hidden.shape[-2] > 1 and hidden.numel() > 0
    is_plain = all(type(each) in PLAIN_TYPES and each.device == hidden.device for each in parts)
    if not is_batch or not is_plain or device_kind(hidden) == "meta" or not hidden.is_floating_point():
        return None
    if is_exporting() or is_transformed(*parts) or (hidden.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    dtypes = {hidden.dtype, tensors.weight.dtype}
    fits = len(dtypes) == 1 or (autocast_dtype(hidden) is not None and torch.float64 not in dtypes)
    if not fits and settings.head_dtype is None:
        return None
    source = LogitSource(head, hidden, tensors, settings, report)
    result: DeferredLogits = _Head.apply(source, *source.originals)  # type: ignore[no-untyped-call]
    return result
