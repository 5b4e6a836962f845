"""The options of logits, losses and statistics: as keywords, as the frozen values behind them, and their one check.

Every public function and method that takes options calls `check_options` first, with its own name, before any work. So
an option is refused in the same way by every implementation. `resolve_logits` then merges them once: what applies to
logits becomes the `LogitSettings` of an `UncomputedLogits`, and what a loss does with logits becomes a `LossSettings`.
A new option is an entry of the keywords with its allowed values, a field of one of the two, and its use.
"""

import math
import sys
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict, cast, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.formatting import a_or_an
from embedlayer.core.option_docs import unknown_option
from embedlayer.losses.rows import row_within

Impl = Literal["auto", "plain", "chunked", "triton"]
Reduction = Literal["mean", "sum", "none"]


class LogitOptions(TypedDict):
    """Options of logits: how `hidden @ weight.T` is computed, and what `finish_logits` does to it, in this order.

    Attributes:
        head_dtype: `torch.float32` (or `"float32"`) for products and logits in float32, whatever dtype hidden states
            and rows have, of which both may differ. Rows are converted in blocks, never as a whole, and autocast has no
            effect. `None`, the default, is the dtype of hidden states and rows, or that of autocast.
        batch_invariant: Whether the results and the hidden gradient of a token do not depend on the other tokens of a
            call, their order or number, to the bit; `False` by default. See `check_batch_invariance`.
        logit_scale: Factor of the raw logits; 1 by default.
        bias: Bias of each token `(V,)`, added after the scale; `None` by default.
        softcap: Replace each logit by `softcap * tanh(logit / softcap)` (Gemma 2), above 0. `None`, the default, is no
            soft cap.
        temperature: Divisor of the logits, after the soft cap, above 0; 1 by default. A higher temperature makes the
            softmax more even.
        padding_idx: Token whose row gets no gradient; its logit is the product with that row, as for every token.
            `None` by default; a table or head has its own.
        mask_padding: Whether that logit is -inf, so that padding is never predicted; `False` by default.
    """

    head_dtype: NotRequired[torch.dtype | None]
    batch_invariant: NotRequired[bool]
    logit_scale: NotRequired[float]
    bias: NotRequired[Float[Tensor, " V"] | None]
    softcap: NotRequired[float | None]
    temperature: NotRequired[float]
    padding_idx: NotRequired[int | None]
    mask_padding: NotRequired[bool]


class ScoreOptions(LogitOptions):
    """Options of `token_log_probs`: `LogitOptions`, ignored targets and the implementation.

    Attributes:
        ignore_index: Target value whose loss is 0 without gradient, even if its hidden state is NaN or infinite; -100
            by default.
        vocab_size: Number of tokens, V: later rows of `weight` are spare. By default all rows are tokens.
        impl: `"plain"` computes all logits at once, `"chunked"` those of some tokens at a time. `"auto"`, the default,
            is `"plain"` for few logits, else `"chunked"`. `"triton"` is another name of `"chunked"`, which on CUDA
            runs Triton kernels where Triton is installed.
        chunk_bytes: Bytes of the logits that `"chunked"` has in memory at once, and of intermediate results of their
            size, which a chunk of more than one token never exceeds. `None`, the default, is 64 MiB on a CPU, and on
            CUDA 4 GiB, or 1 GiB where there are such results or the logits are computed again.
        drop_ignored: Whether `"chunked"` drops ignored targets before any work; otherwise it computes them from hidden
            states of zeros. Results are equal up to rounding. On an accelerator dropping waits once for the device, to
            count them and to check the others; with `False` a loss never waits. `None`, the default, is `True`, except
            while a CUDA graph is captured. Where a loss does not wait, as in graphs, it is NaN if a target is outside,
            and the next loss that waits raises the error. So does `check()` of a model. On the CPU a bad target always
            raises an error.
    """

    ignore_index: NotRequired[int]
    vocab_size: NotRequired[int | None]
    impl: NotRequired[Impl]
    chunk_bytes: NotRequired[int | None]
    drop_ignored: NotRequired[bool | None]


class LossOptions(ScoreOptions):
    """Options of `linear_cross_entropy`: `ScoreOptions`, regularisation and reduction.

    Attributes:
        label_smoothing: Fraction of the target probability that is spread evenly over all V tokens, from 0 to 1; 0 by
            default.
        z_loss: Factor, 0 or more, of the penalty `logsumexp(logits) ** 2`, which keeps logsumexp near 0 (PaLM); 0 by
            default.
        reduction: `"mean"` over the targets that are not ignored (0 if all are), `"sum"`, or `"none"`.
        token_weights: Factor of the loss of each target, floats of any sign in the shape of the targets, without
            gradient, whatever the reduction; `None`, the default, is 1. `"mean"` divides by the number of targets that
            are not ignored, not by the sum of the weights. Those of ignored targets have no effect, and may be infinite
            or NaN; any other such weight raises an error. Where the host does not wait for an accelerator, under
            `torch.func` transforms and in exports, the loss and its gradients are NaN instead.
    """

    label_smoothing: NotRequired[float]
    z_loss: NotRequired[float]
    reduction: NotRequired[Reduction]
    token_weights: NotRequired[Float[Tensor, "*batch"] | None]


class LogitSettings(NamedTuple):
    """Hold the values of all `LogitOptions`, which are its attributes."""

    logit_scale: float = 1.0
    bias: Tensor | None = None
    softcap: float | None = None
    temperature: float = 1.0
    padding_idx: int | None = None
    mask_padding: bool = False
    head_dtype: torch.dtype | None = None
    batch_invariant: bool = False

    # no property: graphs of torch 2.9 read none of a named tuple
    def masked(self) -> int | None:
        """Return the token whose logit is -inf, or `None`."""
        return self.padding_idx if self.mask_padding else None

    def of_rows(self, start: int, stop: int) -> "LogitSettings":
        """Return the settings of the logits of rows `start` to `stop - 1`.

        The bias is sliced. `padding_idx` counts from row `start`, and is `None` if no logit of these rows is masked.
        """
        masked = row_within(self.masked(), start, stop)
        bias = None if self.bias is None else self.bias[start:stop]
        return self._replace(bias=bias, padding_idx=masked, mask_padding=masked is not None)

    def scaled(self, factor: float, divisor: float = 1.0) -> "LogitSettings":
        """Return the settings whose logits are those of these, times `factor / divisor`; a masked one stays -inf.

        The divisor becomes part of the temperature, so that a soft cap `c * tanh(logits / c)` is exact. With a soft cap
        the factor must not be 0, as the divisor never may.
        """
        if self.softcap is not None:
            ratio = factor / (self.temperature * divisor)
            settings = self._scaled_before(ratio)
            return settings._replace(softcap=self.softcap * abs(ratio), temperature=1.0)
        settings = self._scaled_before(math.copysign(factor, factor * math.copysign(1.0, divisor)))
        return settings._replace(temperature=self.temperature * abs(divisor))

    def _scaled_before(self, factor: float) -> "LogitSettings":
        """Return the settings with another scale and bias: both times `factor`."""
        bias = self.bias
        if bias is not None and factor != 1.0:
            bias = bias.to(torch.promote_types(bias.dtype, torch.float32)) * factor
        return self._replace(logit_scale=self.logit_scale * factor, bias=bias)

    def bounded(self) -> "LogitSettings":
        """Return the settings whose logits are the tanh of those of these, which have no soft cap."""
        return self._replace(softcap=self.temperature)

    def shifted(self, shift: Tensor) -> "LogitSettings":
        """Return the settings whose logits are those of these, which have no soft cap, plus a tensor `(V,)`."""
        shift = shift if self.temperature == 1.0 else shift * self.temperature
        return self._replace(bias=shift if self.bias is None else self.bias + shift)


class LossSettings(NamedTuple):
    """Hold what a loss does with logits: the values of the `LossOptions` that are no `LogitOptions`."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    reduction: Reduction = "mean"
    chunk_bytes: int | None = None
    drop_ignored: bool | None = None
    token_weights: Tensor | None = None
    min_chunks: int = 1  # least number of chunks; with 2, not even a small batch has all its logits at once


def check_options(options: Mapping[str, object], kind: type, call: str, **arguments: object) -> None:
    """Check the names of options against a class that declares them, and their values against their ranges."""
    if not options.keys() <= kind.__annotations__.keys():
        raise SizeError(str(unknown_option(options, kind, call)))
    values: dict[str, Any] = {**options, **arguments}
    for name, value in values.items():
        allowed = _ALLOWED[name]
        is_no_vector = (
            name == "bias" and isinstance(value, Tensor) and not (value.dim() == 1 and value.is_floating_point())
        )
        if is_no_vector or not allowed.contains(value):
            found = a_or_an(value) if isinstance(value, Tensor) else repr(value)
            raise SizeError(f"{call}: {name} must be {allowed.text}, not {found}.")
    if options.get("head_dtype") is not None:
        cast(dict[str, Any], options)["head_dtype"] = torch.float32


def check_token_options(options: LogitSettings, vocab_size: int) -> None:
    """Check the options of single tokens against the number of tokens."""
    bias, padding_idx = options.bias, options.padding_idx
    if bias is not None and bias.shape[0] != vocab_size:
        raise ShapeError(f"bias {tuple(bias.shape)} must have one number for each of the {vocab_size} tokens.")
    if padding_idx is not None and padding_idx >= vocab_size:
        raise SizeError(f"padding_idx must be one of the {vocab_size} tokens, not {padding_idx}.")


class _Allowed(NamedTuple):
    """Hold the values that an option may have, as text and as data.

    Attributes:
        text: The values in words.
        types: Types of the values; a boolean is no number.
        low: Least number.
        high: Largest number.
        choices: All values, if they can be listed.
        is_optional: Whether `None` is one.
    """

    text: str
    types: tuple[type, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[object, ...] = ()
    is_optional: bool = False

    def contains(self, value: Any) -> bool:
        """Return whether an option may have a value."""
        if value is None:
            return self.is_optional
        if not isinstance(value, self.types) or (isinstance(value, bool) and bool not in self.types):
            return False
        if self.choices:
            return value in self.choices
        number: Any = value
        return isinstance(value, Tensor) or bool(self.low <= number <= self.high)


_NUMBER = (int, float, np.number, torch.SymInt, torch.SymFloat)
_INTEGER = (int, np.integer, torch.SymInt)
_POSITIVE, _FINITE = math.ulp(0.0), sys.float_info.max

_ALLOWED: dict[str, _Allowed] = {
    "logit_scale": _Allowed("a finite number", _NUMBER, -_FINITE, _FINITE),
    "bias": _Allowed("a tensor of floats (V,) or None", (Tensor,), is_optional=True),
    "softcap": _Allowed("a number above 0 or None", _NUMBER, _POSITIVE, _FINITE, is_optional=True),
    "temperature": _Allowed("a number above 0", _NUMBER, _POSITIVE, _FINITE),
    "padding_idx": _Allowed("a token ID or None", _INTEGER, 0, is_optional=True),
    "mask_padding": _Allowed("True or False", (bool,)),
    "head_dtype": _Allowed(
        "torch.float32 or None", (torch.dtype, str), choices=(torch.float32, "float32"), is_optional=True
    ),
    "batch_invariant": _Allowed("True or False", (bool,)),
    "ignore_index": _Allowed("an integer", _INTEGER),
    "vocab_size": _Allowed("a number of tokens or None", _INTEGER, 1, is_optional=True),
    "impl": _Allowed(f"one of {', '.join(get_args(Impl))}", (str,), choices=get_args(Impl)),
    "chunk_bytes": _Allowed("a number of bytes or None", _INTEGER, 1, is_optional=True),
    "drop_ignored": _Allowed("True, False or None", (bool,), is_optional=True),
    "label_smoothing": _Allowed("a number from 0 to 1", _NUMBER, 0, 1),
    "z_loss": _Allowed("a number of at least 0", _NUMBER, 0, _FINITE),
    "token_weights": _Allowed("a tensor of floats or None", (Tensor,), is_optional=True),
    "reduction": _Allowed(f"one of {', '.join(get_args(Reduction))}", (str,), choices=get_args(Reduction)),
}
"""The values of every option."""
