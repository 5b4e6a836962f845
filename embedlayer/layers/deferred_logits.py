"""Logits that are computed only if something reads them, so that a cross entropy can be computed without them.

A patched LM head returns `DeferredLogits`: a tensor with the shape, dtype and device of its logits, and no memory. Code
between head and loss may slice it, flatten it, cast it, scale it and soft-cap it. `F.cross_entropy` of it is then
`linear_cross_entropy` of the hidden states, which never stores tokens x V numbers. Any other operation reads the real
logits, which are computed once. This is the `__torch_function__` protocol; no code of a model is changed.

In the autograd graph the deferred logits are where the logits were. The gradient of the loss reaches them as a
`DeferredGradient`, which the head turns into the gradients of hidden states and weights. So hooks on logits run as
before, and a hook that reads the gradient gets the real one.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils._pytree import tree_map

from embedlayer.errors import StaleRowsError
from embedlayer.layers.peft import Adapter, LoraAdapter, adapt_products
from embedlayer.losses.chunked import chunked_cross_entropy
from embedlayer.losses.cross_entropy import LossOptions, fill_in_defaults, loss_dtype
from embedlayer.losses.linear_cross_entropy import choose_impl, linear_cross_entropy
from embedlayer.losses.row_blocks import cross_entropy_over_rows
from embedlayer.tracing import is_transformed

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 8192
SAMPLES = 64
"""Number of rows and of columns of a weight that are compared to notice a write that torch does not count."""
PLAIN_TYPES = (Tensor, nn.Parameter)
HALF = (torch.bfloat16, torch.float16)
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Size of a number in bytes -> dtype of integers of this size; equal bits are equal integers, also for NaN."""

Step = Callable[[Tensor], Tensor]
Adjoint = Callable[[Tensor, "DeferredLogits"], Tensor]
"""Function from a gradient of what a step returned, and the logits that the step took, to the gradient of those."""


class LogitsReport:
    """Log once for a model, at level INFO, that its logits are computed, and by which function they were read.

    Args:
        model: Name of the model's class, for the message.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.is_done = False

    def read_by(self, reader: str) -> None:
        """Log that `reader`, the name of a function, has read the logits; only the first call logs."""
        if not self.is_done:
            self.is_done = True
            logger.info(
                "%s: %s reads the logits, so all of them are computed. A loss by F.cross_entropy needs none; this is "
                "logged once.",
                self.model,
                reader,
            )

    @torch.compiler.assume_constant_result
    def read_by_compiled_graph(self) -> None:
        """Log that a graph of `torch.compile` or `torch.export` contains the logits; it runs while they trace."""
        self.read_by("torch.compile")


class HeadTensors(NamedTuple):
    """Hold the tensors of an LM head at the time of its forward pass.

    Attributes:
        weight: One row per token, `(V, D)`.
        bias: Bias of the tokens, `(V,)`, or `None`.
        adapters: PEFT adapters of the rows, in the order in which they are applied.
    """

    weight: Tensor
    bias: Tensor | None
    adapters: tuple[Adapter, ...] = ()

    def flat(self) -> list[Tensor]:
        """Return all tensors as a list."""
        found = [self.weight] if self.bias is None else [self.weight, self.bias]
        for adapter in self.adapters:
            found += [each for each in adapter if isinstance(each, Tensor)]
        return found

    def replaced(self, tensors: Sequence[Tensor]) -> "HeadTensors":
        """Return a copy with other tensors, in the order of `flat`."""
        rest = iter(tensors)
        weight, bias = next(rest), None if self.bias is None else next(rest)
        adapters: list[Adapter] = []
        for adapter in self.adapters:
            names = ("a", "b") if isinstance(adapter, LoraAdapter) else ("values",)
            adapters.append(adapter._replace(**{name: next(rest) for name in names}))
        return HeadTensors(weight, bias, tuple(adapters))

    def raw_logits(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Return `hidden @ rows[start:stop].T` with the adapters applied, without the bias."""
        products = F.linear(hidden, self.weight[start:stop])
        for adapter in self.adapters:
            products = adapt_products(adapter, products, hidden, start, stop)
        return products

    def logits(self, hidden: Tensor) -> Tensor:
        """Return all logits, computed by the operations of the plain head."""
        if not self.adapters:
            return F.linear(hidden, self.weight, self.bias)
        products = self.raw_logits(hidden, 0, len(self.weight))
        return products if self.bias is None else products + self.bias

    def loss(self, hidden: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
        """Return the cross entropy; `options` contain the bias. Even few tokens never have all their logits at once."""
        vocab_size = len(self.weight)
        if self.adapters:
            rows_at_once = min(ROWS_AT_ONCE, math.ceil(vocab_size / 2))
            return cross_entropy_over_rows(
                hidden, self.raw_logits, targets, vocab_size=vocab_size, rows_at_once=rows_at_once, options=options
            )
        if choose_impl(hidden, targets, vocab_size, options) == "triton":
            return linear_cross_entropy(hidden, self.weight, targets, **options)
        settings = fill_in_defaults(hidden, self.weight, options)
        return chunked_cross_entropy(hidden, self.weight, options.get("bias"), targets, settings, min_chunks=2)


class Shaping(NamedTuple):
    """Hold what a model does to each logit x of the head: `y = x * numerator / divisor + shift`, then a bound.

    The bounded logit is `bound * tanh(y)`; without a bound it is y.

    Attributes:
        numerator: Product of all factors.
        divisor: Product of all divisors. It is separate so that `c * tanh(x / c)` is an exact soft cap.
        shift: Sum of all added tensors, `(V,)`, or `None`.
        bound: Factor of the tanh, or `None`.
    """

    numerator: float = 1.0
    divisor: float = 1.0
    shift: Tensor | None = None
    bound: float | None = None

    def scaled(self, factor: float, divisor: float) -> "Shaping":
        """Return the shaping followed by `* factor / divisor`."""
        if self.bound is not None:
            return self._replace(bound=self.bound * factor / divisor)
        shift = None if self.shift is None else self.shift * factor / divisor
        return Shaping(self.numerator * factor, self.divisor * divisor, shift)

    def options(self, bias: Tensor | None) -> LossOptions:
        """Return the options of `linear_cross_entropy` for logits of a head with this bias."""
        factor = 1.0 if self.bound is None else self.bound
        scale = self.numerator * factor / self.divisor
        if bias is not None and scale != 1.0:
            bias = bias.to(loss_dtype(bias.dtype)) * scale
        if self.shift is not None:
            shift = self.shift * factor
            bias = shift if bias is None else bias + shift
        return {"logit_scale": scale, "bias": bias, "softcap": self.bound}


class LogitSource:
    """The inputs from which deferred logits are computed: hidden states, tensors of the head, and the state of torch.

    All tensors are detached aliases of the model's, so that gradients can be computed from them at any time without
    running hooks of the model's parameters.

    Args:
        head: The head, which can gather sharded weights.
        hidden: Hidden states, `(..., D)`.
        tensors: Tensors of the head.
        report: Where to log that logits are read.
    """

    def __init__(self, head: nn.Module, hidden: Tensor, tensors: HeadTensors, report: LogitsReport) -> None:
        self.head: Any = head
        self.report = report
        self.originals = [hidden, *tensors.flat()]
        with_grad = torch.is_grad_enabled()
        self.leaves = [each.detach().requires_grad_(with_grad and each.requires_grad) for each in self.originals]
        self.requires_grad = any(each.requires_grad for each in self.leaves)
        self.hidden = self.leaves[0]
        self.tensors = tensors.replaced(self.leaves[1:])
        device = hidden.device.type
        self.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        self.versions = [_version(each) for each in self.originals]
        self.samples = [_sampled(each) for each in self.originals[1:]]
        self._logits: Tensor | None = None
        self._logits_version = 0

    @property
    def vocab_size(self) -> int:
        """Return the number of logits per token, V."""
        return len(self.tensors.weight)

    @property
    def logits_dtype(self) -> torch.dtype:
        """Return the dtype of the logits, which is that of autocast if autocast was active."""
        _, narrow, enabled = self.autocast
        return narrow if enabled and self.hidden.dtype != torch.float64 else self.hidden.dtype

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore grad mode and autocast of the forward pass, and gather weights that FSDP has sharded since.

        Raises:
            StaleRowsError: The weights were changed or freed since the forward pass.
        """
        is_freed = self.tensors.weight.numel() > 0 and self.originals[1].untyped_storage().size() == 0
        if is_freed and not hasattr(self.head, "unshard"):
            raise StaleRowsError(
                "The weights of the LM head were sharded again after its forward pass, so its logits cannot be "
                "computed now. Compute the loss inside the model's forward, call fully_shard on the head itself, or "
                "pass reshard_after_forward=False."
            )
        if is_freed:
            self.head.unshard()
        try:
            self._require_unchanged()
            device, dtype, enabled = self.autocast
            with torch.autocast(device, dtype, enabled=enabled), torch.set_grad_enabled(self.requires_grad):
                yield
        finally:
            if is_freed:
                self.head.reshard()

    def _require_unchanged(self) -> None:
        """Raise an error if hidden states or weights were written in place since the forward pass."""
        is_same = self.versions == [_version(each) for each in self.originals]
        is_same = is_same and all(
            torch.equal(old, _sampled(now)) for old, now in zip(self.samples, self.originals[1:], strict=True)
        )
        if not is_same:
            raise StaleRowsError(
                "The logits of a patched model are computed when they are read, and the weights of its LM head have "
                "changed since the forward pass. Read outputs.logits before optimizer.step() or any other change of "
                "the weights, or call embedlayer.unpatch(model)."
            )

    def logits(self) -> Tensor:
        """Return the real logits, computed once, with a graph from the leaves where one can be recorded.

        If they were written in place since, they are computed again.
        """
        if self._logits is None or _version(self._logits) != self._logits_version:
            with self.restored():
                self._logits = self.tensors.logits(self.hidden)
            self._logits_version = _version(self._logits)
        return self._logits

    def gradients(self, grad_logits: Tensor) -> list[Tensor | None]:
        """Return the gradients of hidden states and tensors of the head, for a gradient of the logits."""
        logits = self.logits()
        if not logits.requires_grad:  # they were computed where autograd does not record
            with self.restored():
                logits = self.tensors.logits(self.hidden)
        return self.gradients_of(logits, grad_logits)

    def gradients_of(self, output: Tensor, grad_output: Tensor) -> list[Tensor | None]:
        """Return the gradients of all leaves, for the gradient of something that was computed from the leaves."""
        wanted = [each for each in self.leaves if each.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, grad_output, retain_graph=True, allow_unused=True))
        return [next(found) if each.requires_grad else None for each in self.leaves]


def _version(tensor: Tensor) -> int:
    """Return how often torch has written `tensor` in place; 0 for a tensor of inference mode, which has no count."""
    return 0 if tensor.is_inference() else tensor._version


def _sampled(tensor: Tensor) -> Tensor:
    """Return some numbers of `tensor`, their bits as integers: every n-th row and column.

    An optimizer that writes through `.data` or a pointer does not increase the version, but changes these numbers.
    """
    steps = tuple(slice(None, None, max(1, size // SAMPLES)) for size in tensor.shape)
    sample = tensor.detach()[steps].clone(memory_format=torch.contiguous_format)
    return sample.view(INTEGERS[sample.element_size()])


class DeferredLogits(Tensor):
    """Logits that are computed when they are read: a tensor with shape, dtype and device, and no memory.

    `defer_logits` creates the logits of a head; recognised operations create others from those.

    Attributes:
        source: The inputs of the head.
        rows: For each row of logits its hidden state, `(..., D)`.
        shaping: What the model did to each logit.
        parent: The deferred logits from which these follow by `step`; `None` for those of the head.
        step: Function that computes these logits from the real logits of `parent`.
        adjoint: Function that computes the gradient of `parent` from the gradient of these logits.
        is_view: Whether the result of `step` shares memory with its argument.
        is_contiguous_view: Whether the real logits would be contiguous.
        node: Node of the autograd graph with which they were created.
        computed: The real logits, once they were read.
    """

    source: LogitSource
    rows: Tensor
    shaping: Shaping
    parent: "DeferredLogits | None"
    step: Step
    adjoint: Adjoint
    is_view: bool
    is_contiguous_view: bool
    node: object
    computed: Tensor | None

    @staticmethod
    def __new__(
        cls,
        source: LogitSource,
        rows: Tensor,
        dtype: torch.dtype,
        shaping: Shaping,
        parent: "DeferredLogits | None" = None,
        step: Step | None = None,
        adjoint: Adjoint | None = None,
        is_view: bool = False,
        is_contiguous_view: bool = True,
    ) -> "DeferredLogits":
        shape = (*rows.shape[:-1], source.vocab_size)
        made: DeferredLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=rows.device)  # type: ignore[attr-defined]
        made.source, made.rows, made.shaping = source, rows, shaping
        made.parent, made.is_view, made.is_contiguous_view = parent, is_view, is_contiguous_view
        made.step = step if step is not None else _unchanged
        made.adjoint = adjoint if adjoint is not None else _same_gradient
        made.node = made.computed = None
        return made

    @property
    def is_unread(self) -> bool:
        """Return whether neither these logits nor those from which they follow were read."""
        return self.computed is None and (self.parent is None or self.parent.is_unread)

    def looked(self) -> Tensor:
        """Return the real logits, a plain tensor at the same place of the autograd graph; it is the same each time."""
        if self.computed is None:
            with torch.set_grad_enabled(self.requires_grad):
                is_own = self.grad_fn is None or self.grad_fn is self.node
                if self.parent is not None and self.is_view and is_own:
                    self.computed = self.step(self.parent.looked())  # shares memory, also for writes in place
                else:
                    self.computed = _Read.apply(self)  # type: ignore[no-untyped-call]
        return self.computed

    def values(self) -> Tensor:
        """Return the real logits without a place in the autograd graph, as they were before any write in place."""
        if self.parent is None:
            return self.source.logits().detach()
        with torch.no_grad():
            return self.step(self.parent.values())

    def derived(
        self,
        rows: Step,
        step: Step,
        adjoint: Adjoint,
        *,
        shaping: Shaping | None = None,
        dtype: torch.dtype | None = None,
        is_view: bool = False,
        is_contiguous_view: bool = True,
    ) -> "DeferredLogits":
        """Return deferred logits that follow from these.

        Args:
            rows: Function that selects or arranges the hidden states.
            step: The same function for real logits.
            adjoint: See the attributes of this class.
            shaping: What was done to each logit; by default the same as in these logits.
            dtype: Dtype of the result, by default the same.
            is_view: See the attributes of this class.
            is_contiguous_view: See the attributes of this class.
        """
        with torch.set_grad_enabled(self.source.requires_grad):
            chosen = rows(self.rows)
        shaping = self.shaping if shaping is None else shaping
        dtype = self.dtype if dtype is None else dtype
        link = (self.source, chosen, dtype, shaping, self, step, adjoint, is_view, is_contiguous_view)
        result: DeferredLogits = _Derived.apply(self, link)  # type: ignore[no-untyped-call]
        return result

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in WITHOUT_VALUES:
            return super().__torch_function__(func, types, args, kwargs)
        if func in AUTOGRAD:
            with torch._C.DisableTorchFunctionSubclass():  # these tensors are in the graph themselves
                return func(*args, **kwargs)
        recognised = RECOGNISED.get(func)
        if func in COMMUTATIVE and len(args) == 2 and not isinstance(args[0], DeferredLogits):
            args = (args[1], args[0])
        if recognised is not None and isinstance(args[0] if args else None, DeferredLogits) and args[0].is_unread:
            result = recognised(*args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = _with_real_logits((args, kwargs), resolve_name(func) or repr(func))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute an operator on the real logits: it was called below Python, by an autograd function or an extension.

        Aliases stay deferred, because autograd makes them itself to save a tensor or to run hooks.
        """
        kept = args[0] if args else None
        if func in ALIASES and isinstance(kept, DeferredLogits) and kept.is_unread:
            same_shape = func is not torch.ops.aten.view.default or tuple(args[1]) == tuple(kept.shape)
            if same_shape:
                return DeferredLogits(kept.source, kept.rows, kept.dtype, kept.shaping, kept, is_view=True)
        kwargs = kwargs or {}
        args, kwargs = _with_values((args, kwargs), str(func))
        return func(*args, **kwargs)


class DeferredGradient(Tensor):
    """The gradient of a loss by its logits, which is computed when it is read: a tensor without memory.

    The head turns it into the gradients of hidden states and weights without computing it.

    Attributes:
        source: The inputs of the head.
        leaf_gradients: Function that computes the gradients of the leaves of `source`.
        compute: Function that computes the real gradient of the logits.
        more: Gradient of other readers of the logits, a plain tensor that is added, or `None`.
    """

    source: LogitSource
    leaf_gradients: Callable[[], list[Tensor | None]]
    compute: Callable[[], Tensor]
    more: Tensor | None
    computed: Tensor | None

    @staticmethod
    def __new__(
        cls,
        like: "DeferredLogits | DeferredGradient",
        leaf_gradients: Callable[[], list[Tensor | None]],
        compute: Callable[[], Tensor],
        more: Tensor | None = None,
    ) -> "DeferredGradient":
        made: DeferredGradient = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
        made.source, made.leaf_gradients, made.compute, made.more = like.source, leaf_gradients, compute, more
        made.computed = None
        return made

    def looked(self) -> Tensor:
        """Return the real gradient, computed once."""
        if self.computed is None:
            value = self.compute()
            self.computed = value if self.more is None else value + self.more
        return self.computed

    def plus(self, other: Tensor) -> "DeferredGradient":
        """Return the sum with another gradient of the same logits, deferred or not."""
        if not isinstance(other, DeferredGradient):
            return DeferredGradient(self, self.leaf_gradients, self.compute, _sum(self.more, other))
        ours, theirs, values = self.leaf_gradients, other.leaf_gradients, (self.compute, other.compute)
        return DeferredGradient(
            self,
            lambda: [_sum(one, two) for one, two in zip(ours(), theirs(), strict=True)],
            lambda: values[0]() + values[1](),
            _sum(self.more, other.more),
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in WITHOUT_VALUES:
            return super().__torch_function__(func, types, args, kwargs or {})
        if func in AUTOGRAD:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = _with_real_logits((args, kwargs or {}), resolve_name(func) or repr(func))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute an operator on the real gradient; autograd's own copies and sums stay deferred."""
        kept = args[0] if args else None
        if func in (*ALIASES, torch.ops.aten.clone.default) and isinstance(kept, DeferredGradient):
            if func is not torch.ops.aten.view.default or tuple(args[1]) == tuple(kept.shape):
                return DeferredGradient(kept, kept.leaf_gradients, kept.compute, kept.more)
        if func is torch.ops.aten.add.Tensor and len(args) == 2 and not kwargs:
            first, second = args if isinstance(kept, DeferredGradient) else (args[1], args[0])
            if first.shape == second.shape and first.dtype == second.dtype:
                return first.plus(second)
        args, kwargs = _with_values((args, kwargs or {}), str(func))
        return func(*args, **kwargs)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients, of which `None` is 0."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _with_real_logits(arguments: Any, reader: str) -> Any:
    """Return arguments with each deferred tensor replaced by the real one, and log that `reader` reads it."""

    def real(each: Any) -> Any:
        if not isinstance(each, DeferredLogits | DeferredGradient):
            return each
        each.source.report.read_by(reader)
        return each.looked()

    return tree_map(real, arguments)


def _with_values(arguments: Any, reader: str) -> Any:
    """Return arguments as `_with_real_logits` does, but with tensors outside of the autograd graph."""

    def values(each: Any) -> Any:
        if not isinstance(each, DeferredLogits | DeferredGradient):
            return each
        each.source.report.read_by(reader)
        if isinstance(each, DeferredGradient) or each.computed is not None:
            return each.looked().detach()
        return each.values()

    return tree_map(values, arguments)


def _unchanged(tensor: Tensor) -> Tensor:
    """Return `tensor` unchanged."""
    return tensor


def _same_gradient(grad: Tensor, logits: DeferredLogits) -> Tensor:
    """Return a gradient unchanged: the adjoint of a step that changes no value."""
    return grad


# The autograd graph of deferred logits


class _Head(torch.autograd.Function):
    """Create the deferred logits of a head in the autograd graph, behind hidden states and tensors of the head."""

    @staticmethod
    def forward(ctx: Any, source: LogitSource, *originals: Tensor) -> DeferredLogits:
        ctx.source = source
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*originals)
        made = DeferredLogits(source, source.hidden, source.logits_dtype, Shaping())
        made.node = ctx
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        originals, source = ctx.saved_tensors, ctx.source
        if grad is None:
            return (None, *(None for _ in originals))
        if isinstance(grad, DeferredGradient):
            found = grad.leaf_gradients()
            more = [None] * len(found) if grad.more is None else source.gradients(grad.more)
            return (None, *(_sum(one, other) for one, other in zip(found, more, strict=True)))
        if torch.is_grad_enabled():  # create_graph=True
            wanted = [each for each in originals if each.requires_grad]
            with source.restored():
                logits = source.tensors.replaced(originals[1:]).logits(originals[0])
            rest = iter(torch.autograd.grad(logits, wanted, grad, create_graph=True, allow_unused=True))
            return (None, *(next(rest) if each.requires_grad else None for each in originals))
        return (None, *source.gradients(grad))


class _Derived(torch.autograd.Function):
    """Create deferred logits that follow from others; `backward` passes a deferred gradient on."""

    @staticmethod
    def forward(ctx: Any, parent: DeferredLogits, link: tuple[Any, ...]) -> DeferredLogits:
        ctx.set_materialize_grads(False)
        made = DeferredLogits(*link)
        made.node = ctx
        ctx.parent, ctx.adjoint = parent, made.adjoint
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        parent, adjoint = ctx.parent, ctx.adjoint
        if not isinstance(grad, DeferredGradient):
            return adjoint(grad, parent), None
        compute, more = grad.compute, grad.more
        more = None if more is None else adjoint(more, parent)
        return DeferredGradient(parent, grad.leaf_gradients, lambda: adjoint(compute(), parent), more), None


class _Read(torch.autograd.Function):
    """Return the real logits, a plain tensor, in the autograd graph behind the deferred ones."""

    @staticmethod
    def forward(ctx: Any, deferred: DeferredLogits) -> Tensor:
        return deferred.values()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Loss(torch.autograd.Function):
    """Compute the cross entropy of deferred logits from their hidden states.

    `backward` returns a deferred gradient, or with `create_graph=True` the real one.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: DeferredLogits, targets: Tensor, dtype: torch.dtype, arguments: dict[str, Any]
    ) -> Tensor:
        source = logits.source
        with source.restored():
            loss = _loss_of_rows(logits, targets, arguments)
        ctx.loss, ctx.logits, ctx.arguments = loss, logits, arguments
        ctx.save_for_backward(targets)
        return loss.detach().to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (targets,), logits, loss, arguments = ctx.saved_tensors, ctx.logits, ctx.loss, ctx.arguments

        if torch.is_grad_enabled() or is_transformed(grad):  # create_graph=True, or batched gradients
            with torch.enable_grad():
                real = logits.looked()
                plain = F.cross_entropy(real, targets, **arguments)
            create_graph = torch.is_grad_enabled()
            (found,) = torch.autograd.grad(plain, real, grad.to(plain.dtype), create_graph=create_graph)
            return found, None, None, None
        deferred = DeferredGradient(
            logits,
            lambda: logits.source.gradients_of(loss, grad.to(loss.dtype)),
            lambda: _gradient_of_logits(logits, targets, grad, arguments),
        )
        return deferred, None, None, None


def _loss_of_rows(logits: DeferredLogits, targets: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Return the cross entropy of unread logits; as in torch the mean over no target is NaN."""
    source = logits.source
    options: LossOptions = {**logits.shaping.options(source.tensors.bias), **arguments}  # type: ignore[typeddict-item]
    loss = source.tensors.loss(logits.rows, targets, options)
    if arguments["reduction"] != "mean":
        return loss
    return torch.where((targets != arguments["ignore_index"]).any(), loss, math.nan)


def _gradient_of_logits(logits: DeferredLogits, targets: Tensor, grad: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Return the gradient of `F.cross_entropy` by the real logits, `(softmax - target probabilities) * grad`.

    It is a formula, because autograd records nothing where autograd itself reads a deferred gradient.
    """
    values, smoothing = logits.values(), arguments["label_smoothing"]
    dtype = loss_dtype(values.dtype)
    kept = targets != arguments["ignore_index"]
    result = values.to(dtype).softmax(-1) - smoothing / values.shape[-1]
    chosen = torch.where(kept, targets, 0).unsqueeze(-1)
    result.scatter_add_(-1, chosen, torch.full_like(chosen, smoothing - 1, dtype=dtype))
    weights = grad.to(dtype) * kept
    if arguments["reduction"] == "mean":
        weights = weights / kept.sum().clamp(min=1)
    return (result * weights.unsqueeze(-1)).to(logits.dtype)


# Operations that are recognised: they take unread logits, and return `NotImplemented` if they must read them


def _cross_entropy(
    input: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return `F.cross_entropy` of unread logits `(N, V)` or `(V,)` and token IDs, from the hidden states."""
    bound = input.shaping.bound
    is_known = type(target) in PLAIN_TYPES and target.dtype == torch.int64 and target.device == input.device
    is_known = is_known and input.dim() in (1, 2) and target.shape == input.shape[:-1] and target.numel() > 0
    is_known = is_known and (weight, size_average, reduce) == (None, None, None) and (bound is None or bound > 0)
    if not is_known or reduction not in ("mean", "sum", "none") or not 0.0 <= label_smoothing <= 1.0:
        return NotImplemented
    dtype, device = input.dtype, input.device.type
    if torch.is_autocast_enabled(device) and dtype in HALF:
        dtype = torch.float32
    if input.source.logits_dtype == torch.float64:
        dtype = torch.float64  # also where the model casts its logits to float32: this loss never rounded them
    arguments = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    result: Tensor = _Loss.apply(input, target, dtype, arguments)  # type: ignore[no-untyped-call]
    return result


def _is_detaching(logits: DeferredLogits) -> bool:
    """Return whether an operation on `logits` is not recorded by autograd although the logits were.

    This is so in the forward of an autograd function, whose backward need not be the derivative.
    """
    return logits.requires_grad and not torch.is_grad_enabled()


def _reshaped(input: DeferredLogits, *shape: Any, **others: Any) -> DeferredLogits:
    """Return reshaped logits if the vocabulary stays the last dimension."""
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    if others or not sizes or not all(isinstance(size, int) for size in sizes) or sizes.count(-1) > 1:
        return NotImplemented
    if -1 in sizes:
        known = -math.prod(sizes)
        if known <= 0 or input.numel() % known:
            return NotImplemented
        sizes = tuple(input.numel() // known if size == -1 else size for size in sizes)
    if sizes[-1] != input.shape[-1] or math.prod(sizes) != input.numel():
        return NotImplemented
    width = input.rows.shape[-1]
    return input.derived(
        lambda rows: rows.reshape(*sizes[:-1], width),
        lambda real: real.reshape(sizes),
        lambda grad, logits: grad.reshape(logits.shape),
        is_view=input.is_contiguous_view,
    )


def _reshaped_like(input: DeferredLogits, other: Tensor) -> DeferredLogits:
    """Return logits in the shape of another tensor."""
    return _reshaped(input, tuple(other.shape))


def _flattened(input: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> DeferredLogits:
    """Return logits with some leading dimensions flattened."""
    start, end, last = start_dim % input.dim(), end_dim % input.dim(), input.dim() - 1
    if not start <= end < last:
        return NotImplemented
    shape = input.shape
    return _reshaped(input, (*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]))


def _squeezed(input: DeferredLogits, dim: Any = None) -> DeferredLogits:
    """Return logits without one leading dimension of size 1."""
    if not isinstance(dim, int) or not -input.dim() <= dim < input.dim() or dim % input.dim() == input.dim() - 1:
        return NotImplemented
    place, shape = dim % input.dim(), tuple(input.shape)
    return input if shape[place] != 1 else _reshaped(input, (*shape[:place], *shape[place + 1 :]))


def _unsqueezed(input: DeferredLogits, dim: int) -> DeferredLogits:
    """Return logits with another leading dimension of size 1."""
    place = dim % (input.dim() + 1)
    if place == input.dim():
        return NotImplemented
    return _reshaped(input, (*input.shape[:place], 1, *input.shape[place:]))


def _indexed(input: DeferredLogits, key: Any) -> DeferredLogits:
    """Return logits indexed in their leading dimensions, by integers, slices, masks or tensors of indices."""
    keys = key if isinstance(key, tuple) else (key,)
    known = (int, slice, type(None), type(...))
    if _is_detaching(input) or not all(
        (isinstance(each, known) and not isinstance(each, bool))
        or (type(each) in PLAIN_TYPES and each.dtype in (torch.bool, torch.int64, torch.int32))
        for each in keys
    ):
        return NotImplemented
    sizes = [each.dim() if isinstance(each, Tensor) and each.dtype == torch.bool else 1 for each in keys]
    used = sum(size for size, each in zip(sizes, keys, strict=True) if each is not None and each is not ...)
    places = [place for place, each in enumerate(keys) if each is ...] or [len(keys)]
    fill = (slice(None),) * (input.dim() - used)
    whole = (*keys[: places[0]], *fill, *keys[places[0] + 1 :])
    last = whole[-1] if whole else None
    keeps_vocabulary = isinstance(last, slice) and (last.start, last.stop, last.step) == (None, None, None)
    if len(places) > 1 or used > input.dim() or not keeps_vocabulary:
        return NotImplemented
    is_view = not any(isinstance(each, Tensor) for each in whole)

    def adjoint(grad: Tensor, logits: DeferredLogits) -> Tensor:
        leading = logits.shape[:-1]
        places = torch.arange(leading.numel(), device=grad.device).view(leading)[whole[:-1]].flatten()
        zeros = grad.new_zeros(leading.numel(), logits.shape[-1])
        return zeros.index_add(0, places, grad.reshape(-1, logits.shape[-1])).view(logits.shape)

    return input.derived(
        lambda rows: rows[whole], lambda real: real[whole], adjoint, is_view=is_view, is_contiguous_view=not is_view
    )


def _itself(input: DeferredLogits) -> DeferredLogits:
    """Return the logits themselves, as torch does for contiguous logits."""
    if not input.is_contiguous_view:
        return input.derived(_unchanged, Tensor.contiguous, _same_gradient)
    return input


def _cloned(input: DeferredLogits, **others: Any) -> DeferredLogits:
    """Return a copy of unread logits, which is unread too."""
    return NotImplemented if others else input.derived(_unchanged, Tensor.clone, _same_gradient)


def _cast(input: DeferredLogits, dtype: torch.dtype) -> DeferredLogits:
    """Return logits of another dtype. Wider than the products of the head is only computed by reading them."""
    if dtype == input.dtype:
        return input
    if dtype not in (torch.float32, *HALF) or _is_detaching(input):
        return NotImplemented
    return input.derived(
        _unchanged, lambda real: real.to(dtype), lambda grad, logits: grad.to(logits.dtype), dtype=dtype
    )


def _cast_to(dtype: torch.dtype) -> Callable[[DeferredLogits], DeferredLogits]:
    """Return the operation that casts to `dtype`."""
    return lambda input: _cast(input, dtype)


def _moved(input: DeferredLogits, *arguments: Any, **options: Any) -> DeferredLogits:
    """Return `input.to(...)` if the device stays the same."""
    named = {name: options.pop(name) for name in ("dtype", "device", "other") if name in options}
    copy = options.pop("copy", False) or any(isinstance(each, bool) and each for each in arguments[2:])
    options.pop("non_blocking", None)
    dtype, device = named.get("dtype"), named.get("device")
    targets = [*arguments[:2], *([named["other"]] if "other" in named else [])]
    for each in targets:
        if isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, Tensor):
            dtype, device = each.dtype, each.device
        elif isinstance(each, str | int | torch.device) and not isinstance(each, bool):
            device = each
    if copy or options or (device is not None and not _is_same_device(input.device, torch.device(device))):
        return NotImplemented
    return _cast(input, input.dtype if dtype is None else dtype)


def _is_same_device(here: torch.device, other: torch.device) -> bool:
    """Return whether a move from `here` to `other` moves nothing."""
    return here == other or (here.type == other.type == "cpu")


def _with_type(input: DeferredLogits, dtype: Any = None, **options: Any) -> DeferredLogits:
    """Return `input.type(dtype)`."""
    return _cast(input, dtype) if isinstance(dtype, torch.dtype) else NotImplemented


def _with_type_of(input: DeferredLogits, other: Tensor) -> DeferredLogits:
    """Return `input.type_as(other)`."""
    return _cast(input, other.dtype) if other.device == input.device else NotImplemented


def _number(value: Any) -> float | None:
    """Return a factor as a number, or `None`: a tensor counts if it has one number on the CPU and no gradient."""
    if isinstance(value, Tensor):
        is_known = type(value) in PLAIN_TYPES and value.dim() == 0 and value.device.type == "cpu"
        value = value.item() if is_known and not value.requires_grad and value.is_floating_point() else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _multiplied(input: DeferredLogits, other: Any) -> DeferredLogits:
    """Return logits times a number."""
    factor = _number(other)
    if factor is None or _is_detaching(input):
        return NotImplemented
    shaping = input.shaping.scaled(factor, 1.0)
    return input.derived(_unchanged, lambda real: real * factor, lambda grad, _: grad * factor, shaping=shaping)


def _divided(input: DeferredLogits, other: Any, *, rounding_mode: str | None = None) -> DeferredLogits:
    """Return logits divided by a number."""
    divisor = _number(other)
    if not divisor or rounding_mode is not None or _is_detaching(input):
        return NotImplemented
    shaping = input.shaping.scaled(1.0, divisor)
    return input.derived(_unchanged, lambda real: real / divisor, lambda grad, _: grad / divisor, shaping=shaping)


def _bounded(input: DeferredLogits) -> DeferredLogits:
    """Return the tanh of logits."""
    if input.shaping.bound is not None or _is_detaching(input):
        return NotImplemented

    def adjoint(grad: Tensor, logits: DeferredLogits) -> Tensor:
        values = logits.looked() if torch.is_grad_enabled() else logits.values()
        return grad * (1 - torch.tanh(values) ** 2)

    return input.derived(_unchanged, torch.tanh, adjoint, shaping=input.shaping._replace(bound=1.0))


def _shifted(input: DeferredLogits, other: Any, *, alpha: float = 1) -> DeferredLogits:
    """Return logits plus a tensor without gradient that has one number for each token."""
    is_known = type(other) in PLAIN_TYPES and other.device == input.device and other.is_floating_point()
    if not is_known or other.requires_grad or other.shape[-1:] != input.shape[-1:]:
        return NotImplemented
    is_known = other.numel() == input.shape[-1] and other.dim() <= input.dim() and input.shaping.bound is None
    is_known = is_known and torch.promote_types(other.dtype, input.dtype) == input.dtype
    if not is_known or alpha != 1 or _is_detaching(input):
        return NotImplemented
    before, added = input.shaping.shift, other.detach().flatten().clone()
    added = added.to(loss_dtype(input.source.logits_dtype))
    shaping = input.shaping._replace(shift=added if before is None else before + added)
    return input.derived(_unchanged, lambda real: real + added.to(real.dtype), _same_gradient, shaping=shaping)


ALIASES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default, torch.ops.aten.view.default)

RECOGNISED: dict[Callable[..., Any], Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _reshaped),
    Tensor.view_as: _reshaped_like,
    Tensor.reshape_as: _reshaped_like,
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flattened),
    **dict.fromkeys((Tensor.squeeze, torch.squeeze), _squeezed),
    **dict.fromkeys((Tensor.unsqueeze, torch.unsqueeze), _unsqueezed),
    Tensor.__getitem__: _indexed,
    Tensor.contiguous: _itself,
    **dict.fromkeys((Tensor.clone, torch.clone), _cloned),
    Tensor.float: _cast_to(torch.float32),
    Tensor.half: _cast_to(torch.float16),
    Tensor.bfloat16: _cast_to(torch.bfloat16),
    Tensor.to: _moved,
    Tensor.type: _with_type,
    Tensor.type_as: _with_type_of,
    **dict.fromkeys((Tensor.mul, Tensor.multiply, Tensor.__mul__, torch.mul, torch.multiply), _multiplied),
    Tensor.__rmul__: _multiplied,
    **dict.fromkeys((Tensor.div, Tensor.divide, Tensor.true_divide, torch.div, torch.divide), _divided),
    **dict.fromkeys((torch.true_divide, Tensor.__truediv__), _divided),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _bounded),
    **dict.fromkeys((Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add), _shifted),
}
"""Functions that need no values of deferred logits, and what replaces them."""

COMMUTATIVE = {function for function, replaced in RECOGNISED.items() if replaced in (_multiplied, _shifted)}
AUTOGRAD = {torch.autograd.grad, torch.autograd.backward}
"""Functions that take tensors of the autograd graph."""

_ATTRIBUTES = (
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "output_nr",
    "_base",
)
_ATTRIBUTES += ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn")
_ATTRIBUTES += ("is_mps", "is_xpu", "itemsize", "nbytes", "names", "retains_grad", "grad", "_backward_hooks")
_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex")
_METHODS += ("is_signed", "is_contiguous", "stride", "storage_offset", "get_device", "is_inference", "__len__")
_METHODS += ("register_hook", "retain_grad", "__hash__")
WITHOUT_VALUES = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(getattr(Tensor, name, None), "__get__")),
    *(getattr(Tensor, name) for name in _METHODS),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
"""Functions that read only what deferred tensors have: shape, dtype, device, and their place in the autograd graph."""


def defer_logits(head: nn.Module, hidden: Tensor, tensors: HeadTensors, report: LogitsReport) -> DeferredLogits | None:
    """Return the deferred logits of a head, or `None` where its logits must be computed at once.

    That is the case for a single position, as in generation; under `torch.func`, tracing and CUDA graph capture; and
    for tensor subclasses, such as a `DTensor` or a quantised weight.

    Args:
        head: The head; if FSDP has sharded it, it gathers its weights.
        hidden: Hidden states, `(..., D)`.
        tensors: Tensors of the head.
        report: Where to log that logits are read.
    """
    parts = (hidden, *tensors.flat())
    is_batch = hidden.dim() > 1 and hidden.shape[-2] > 1 and hidden.numel() > 0
    is_plain = all(type(each) in PLAIN_TYPES and each.device == hidden.device for each in parts)
    if not is_batch or not is_plain or hidden.is_meta or not hidden.is_floating_point():
        return None
    if (
        torch.jit.is_tracing()
        or is_transformed(*parts)
        or (hidden.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return None
    fits = hidden.dtype == tensors.weight.dtype or torch.is_autocast_enabled(hidden.device.type)
    if not fits or (hidden.dtype == torch.float64) != (tensors.weight.dtype == torch.float64):
        return None
    source = LogitSource(head, hidden, tensors, report)
    result: DeferredLogits = _Head.apply(source, *source.originals)  # type: ignore[no-untyped-call]
    return result
