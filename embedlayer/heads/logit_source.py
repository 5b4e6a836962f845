"""What `patch` tells an LM head of its model; the inputs of its deferred logits, and what is computed from them."""

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from embedlayer.core.block_sizes import TABLE_ROWS, block_size
from embedlayer.core.devices import autocast, autocast_dtype, device_kind
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning
from embedlayer.core.index_checks import changed_weights, record_changed_weights
from embedlayer.core.partitioned import gathered_weights
from embedlayer.formats.adapters import Adapter, adapt_products
from embedlayer.heads.adapted_rows import ChildReference
from embedlayer.losses.options import LogitOptions, LogitSettings
from embedlayer.losses.rows import in_head_dtype, linear
from embedlayer.losses.uncomputed_logits import BlockLogits, LinearLogits, UncomputedLogits

logger = logging.getLogger(__name__)

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers with as many bytes as a number of another dtype."""

SAMPLES = 64  # number of rows and of columns of a weight that are compared to notice a write that torch does not count


class LogitsReport:
    """Log once for a model, at level INFO, that its logits are computed, and by which function they were read.

    Args:
        model: Name of the model's class, for the message.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.is_done = False
        # not a decorator: it imports the compiler, which layers without a report never need
        torch.compiler.assume_constant_result(LogitsReport.read_by_compiled_graph)

    is_weight_read = False
    """Whether code outside of the head has read `head.weight` since the last call of the model without its head."""

    is_head_called = True
    """Whether the head was called since then."""

    bypass_check: Any = None
    """Handle of the hook `warn_of_bypass`, if there is one."""

    def warn_of_bypass(self, *_: object) -> None:
        """Warn once if the last call of the model read the weight of a head with `head_dtype` and called no head.

        It is a forward pre-hook of the model without its head.
        """
        if torch.compiler.is_compiling():
            return
        if self.is_weight_read and not self.is_head_called and self.bypass_check is not None:
            warnings.warn(
                f"Other code, such as a trainer, computes logits of this {self.model} from lm_head.weight, and "
                f"head_dtype has no effect on them: call embedlayer.integrations.patch_trainer(trainer) after building "
                f"the trainer, or head.loss(hidden, targets).",
                EmbedLayerWarning,
                stacklevel=2,
            )
            self.bypass_check.remove()
            self.bypass_check = None
        self.is_weight_read = self.is_head_called = False

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

    def read_by_compiled_graph(self) -> None:
        """Log that a graph of `torch.compile` or `torch.export` contains the logits; it runs while they trace."""
        self.read_by("torch.compile")


@dataclass(frozen=True)
class ModelLogitOptions:
    """What the model of a patched head does to its logits outside the head, where the head alone is a product.

    Attributes:
        logit_scale: Factor on the hidden states before the head, or on the logits behind it.
        softcap: Cap c of `c * tanh(logits / c)` behind the head, or `None`.
        bias: Place of the tensor `(1, V)` or `(V,)` that the model adds to the logits of the head (BART), or `None`.
        scales_hidden: Whether the factor is applied to the hidden states before the head is called.
        unknown: Why that is not known, as the start of a sentence; empty if it is known.
        is_partial: Whether the model reads the head's rows itself, beside others (MobileBERT).
    """

    logit_scale: float = 1.0
    softcap: float | None = None
    bias: ChildReference | None = None
    scales_hidden: bool = False
    unknown: str = ""
    is_partial: bool = False

    def logit_options(self) -> LogitOptions:
        """Return the options of the model's logits; raise a `CheckpointError` if they are not known."""
        if self.unknown:
            raise CheckpointError(
                f"{self.unknown}. Use embedlayer.token_log_probs(model(ids).logits, tokens) and its like."
            )
        options: LogitOptions = {"logit_scale": self.logit_scale, "softcap": self.softcap}
        if self.bias is not None:
            bias = getattr(self.bias.parent, self.bias.name, None)
            if bias is None:
                raise CheckpointError(
                    f"The model adds {self.bias.name} to the logits of this head, and the head was copied without it: "
                    f"use the head inside of its model."
                )
            options["bias"] = bias.flatten()
        return options


class HeadTensors(NamedTuple):
    """Hold the tensors of an LM head at the time of its forward pass."""

    weight: Tensor
    bias: Tensor | None
    adapters: tuple[Adapter, ...] = ()

    def flat(self) -> list[Tensor]:
        tensors = [self.weight] if self.bias is None else [self.weight, self.bias]
        return tensors + [each for adapter in self.adapters for each in adapter if isinstance(each, Tensor)]

    def replaced(self, tensors: Sequence[Tensor]) -> "HeadTensors":
        """Return a copy with other tensors, in the order of `flat`."""
        rest = iter(tensors)
        weight, bias = next(rest), None if self.bias is None else next(rest)
        adapters: list[Adapter] = []
        adapter: Any
        for adapter in self.adapters:
            adapters.append(adapter._make(next(rest) if isinstance(each, Tensor) else each for each in adapter))
        return HeadTensors(weight, bias, tuple(adapters))

    def raw_logits(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Return `hidden @ rows[start:stop].T` in the dtype of `hidden`, with the adapters and without the bias."""
        return adapt_products(self.adapters, linear(hidden, self.weight[start:stop]), hidden, start, stop)

    def logits(self, hidden: Tensor, settings: LogitSettings) -> Tensor:
        """Return all logits, computed by the operations of the plain head; the bias is that of these tensors."""
        if settings.batch_invariant:
            return self.uncomputed_logits(hidden, settings._replace(bias=self.bias)).head_logits()
        return in_head_dtype(self._plain_logits, hidden, settings.head_dtype)

    def _plain_logits(self, hidden: Tensor) -> Tensor:
        """Return all logits in the dtype of `hidden`, or in that of autocast."""
        if not self.adapters:
            return linear(hidden, self.weight, self.bias)
        products = self.raw_logits(hidden, 0, len(self.weight))
        return products if self.bias is None else products + self.bias

    def uncomputed_logits(self, hidden: Tensor, settings: LogitSettings) -> UncomputedLogits:
        """Describe the logits without computing them; the bias is that of `settings`."""
        options = cast(LogitOptions, settings._asdict())
        if not self.adapters:
            return LinearLogits(hidden, self.weight, **options)
        rows_at_once = min(block_size(TABLE_ROWS, device_kind(hidden)), math.ceil(len(self.weight) / 2))
        return BlockLogits(hidden, self.raw_logits, len(self.weight), rows_at_once, **options)


class LogitSource:
    """The inputs of deferred logits: hidden states, tensors of the head, and the state of torch."""

    # The tensors are detached aliases, the leaves of a graph of their own: gradients can be computed at any time
    # without running hooks of the model's parameters. Version counters miss PEFT's merges (through `.data`) and FSDP2's
    # gathering, so samples of the weights are compared as well.

    def __init__(
        self, head: nn.Module, hidden: Tensor, tensors: HeadTensors, settings: LogitSettings, report: LogitsReport
    ) -> None:
        self.head: Any = head
        self.settings = settings
        self.report = report
        self.originals = [hidden, *tensors.flat()]
        with_grad = torch.is_grad_enabled()
        self.leaves = [each.detach().requires_grad_(with_grad and each.requires_grad) for each in self.originals]
        self.requires_grad = any(each.requires_grad for each in self.leaves)
        self.hidden = self.leaves[0]
        self.tensors = tensors.replaced(self.leaves[1:])
        self.autocast_dtype = autocast_dtype(hidden)
        self.versions = [_version(each) for each in self.originals]
        self.samples = [_sample(each).clone() for each in self.originals[1:]]
        self._logits: Tensor | None = None
        self._logits_version = 0

    @property
    def logits_dtype(self) -> torch.dtype:
        """Return the dtype of the logits: `head_dtype`, or autocast's, or that of the hidden states."""
        if self.settings.head_dtype is not None:
            return self.settings.head_dtype
        narrow = self.autocast_dtype
        return self.hidden.dtype if narrow is None or self.hidden.dtype == torch.float64 else narrow

    @property
    def is_freed(self) -> bool:
        """Return whether FSDP has freed the weights since the forward pass."""
        return self.tensors.weight.numel() > 0 and self.originals[1].untyped_storage().size() == 0

    def described(self) -> UncomputedLogits:
        """Return the logits of the leaves, not computed."""
        return self.tensors.uncomputed_logits(self.hidden, self.settings._replace(bias=self.tensors.bias))

    def with_originals(self, logits: UncomputedLogits) -> UncomputedLogits:
        """Return logits that follow from those of `described`, with gradients to the model's own tensors."""
        hidden, *tensors = self.originals
        own, bias = self.tensors.replaced(tensors), logits.options.bias
        rows: Tensor = _Linked.apply(hidden, logits.hidden, self.hidden)  # type: ignore[no-untyped-call]
        if bias is not None and own.bias is not None:
            bias = _Linked.apply(own.bias, bias, self.tensors.bias)  # type: ignore[no-untyped-call]
        return own.uncomputed_logits(rows, logits.options._replace(bias=bias))

    @contextlib.contextmanager
    def restored(self) -> Iterator[Tensor | None]:
        """Restore grad mode and autocast of the forward pass, and gather weights that FSDP has sharded since."""
        # On a CPU a change of the weights raises. An accelerator compares without waiting and yields whether they
        # changed: results become NaN, and the next loss that waits, or `check()` of a layer, raises.
        with gathered_weights(self.head) if self.is_freed else contextlib.nullcontext():
            is_changed = self._changed_samples()
            if self.versions != [_version(each) for each in self.originals] or is_changed is None:
                raise changed_weights()
            on_cpu = device_kind(is_changed) == "cpu"
            if not on_cpu:
                record_changed_weights(is_changed)
            elif bool(is_changed):
                raise changed_weights()
            with autocast(self.hidden, self.autocast_dtype), torch.set_grad_enabled(self.requires_grad):
                yield None if on_cpu else is_changed

    def _changed_samples(self) -> Tensor | None:
        """Return whether bits of the samples have changed, a boolean scalar; `None` if their shapes have."""
        samples = [_sample(each) for each in self.originals[1:]]
        if [each.shape for each in samples] != [each.shape for each in self.samples]:
            return None
        bits = (
            (old.view(BITS[old.itemsize]), now.view(BITS[old.itemsize]))
            for old, now in zip(self.samples, samples, strict=True)
        )
        changes = [(old != now).any() for old, now in bits]
        return changes[0] if len(changes) == 1 else torch.stack(changes).any()

    def logits(self) -> Tensor:
        """Return the real logits, computed once, with a graph from the leaves."""
        if self._logits is None or _version(self._logits) != self._logits_version:
            with self.restored() as is_changed:
                self._logits = self.tensors.logits(marked(self.hidden, is_changed), self.settings)
            self._logits_version = _version(self._logits)
        return self._logits

    def gradients_of(
        self, output: Tensor, grad_output: Tensor, inputs: Sequence[Tensor] | None = None
    ) -> list[Tensor | None]:
        """Return the gradients of hidden states and tensors of the head; `None` for those that need none."""
        # With `inputs`, the model's own tensors, the gradients can be differentiated again.
        create_graph = inputs is not None
        inputs = self.leaves if inputs is None else inputs
        wanted = [each for each in inputs if each.requires_grad]
        options = {"retain_graph": True, "create_graph": create_graph, "allow_unused": True}
        grads = iter(torch.autograd.grad(output, wanted, grad_output, **options))
        return [next(grads) if each.requires_grad else None for each in inputs]


class _Linked(torch.autograd.Function):
    """Return a tensor that was computed from a leaf; `backward` passes the gradient on to the original of the leaf."""

    @staticmethod
    def forward(ctx: Any, original: Tensor, derived: Tensor, leaf: Tensor) -> Tensor:
        ctx.derived, ctx.leaf = derived, leaf
        return derived.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.derived is ctx.leaf:
            return grad, None, None
        options = {"retain_graph": True, "create_graph": torch.is_grad_enabled()}
        (result,) = torch.autograd.grad(ctx.derived, ctx.leaf, grad, **options)
        return result, None, None


def _version(tensor: Tensor) -> int:
    """Return how often torch has written `tensor` in place; 0 for a tensor of inference mode, which has no count."""
    return 0 if tensor.is_inference() else tensor._version


def _sample(tensor: Tensor) -> Tensor:
    """Return a view of every n-th row and column of `tensor`: at least `SAMPLES` of each, or all."""
    return tensor.detach()[tuple(slice(None, None, max(1, size // SAMPLES)) for size in tensor.shape)]


def marked(x: Tensor, is_changed: Tensor | None) -> Tensor:
    """Return `x`, and NaN in its place if the weights have changed, as `LogitSource.restored` says."""
    return x if is_changed is None else x.masked_fill(is_changed, math.nan)
