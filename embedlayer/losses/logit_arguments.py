"""The forms in which losses, statistics and divergences take logits, and the one function that resolves them."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, Unpack, runtime_checkable

from torch import Tensor, nn

from embedlayer.core.block_sizes import TABLE_ROWS, block_size
from embedlayer.core.devices import device_kind
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.losses.options import Impl, LogitOptions, LossSettings
from embedlayer.losses.uncomputed_logits import BlockLogits, LinearLogits, UncomputedLogits


@runtime_checkable
class HasLogits(Protocol):
    """A head or a table: it describes the logits of hidden states."""

    def uncomputed_logits(
        self, hidden: Tensor, *, impl: Impl = "auto", **options: Unpack[LogitOptions]
    ) -> UncomputedLogits:
        """Describe the logits of `hidden` without computing them."""


@runtime_checkable
class MayBeUncomputed(Protocol):
    """Logits of a patched model, which know from which hidden states and rows they are computed."""

    def uncomputed(self) -> UncomputedLogits | None:
        """Return the logits without computing them; `None` if they must be read."""


Logits: TypeAlias = UncomputedLogits | Tensor | tuple[Tensor, Tensor | HasLogits]
"""Logits as an argument: `outputs.logits` of a model, patched or not; an `UncomputedLogits`; or hidden states and what
they are multiplied with, `(hidden, weight)` or `(hidden, head)`."""


def resolve_logits(
    logits: Logits, weight: Tensor | HasLogits | None, options: Mapping[str, Any]
) -> tuple[UncomputedLogits, LossSettings]:
    """Return the logits that arguments name, not computed yet, and the options of a loss of them."""
    if isinstance(logits, tuple):
        if len(logits) != 2 or weight is not None:
            raise ShapeError("Logits as a tuple are (hidden, weight) or (hidden, head), without another weight.")
        logits, weight = logits
    loss, of_logits = divided_options(options)
    if weight is None:
        _require_temperature_alone(of_logits)
        uncomputed, temperature = _of_logits(logits), of_logits.get("temperature")
        return uncomputed if temperature is None else uncomputed.divided_by(temperature), loss
    if not isinstance(logits, Tensor):
        raise ShapeError(f"Hidden states (..., D) are needed beside a weight or a head; found {type(logits).__name__}.")
    if isinstance(weight, Tensor):
        return LinearLogits(logits, weight, **of_logits), loss
    require_head(weight)
    vocab_size = of_logits.pop("vocab_size", None)
    uncomputed = weight.uncomputed_logits(logits, **of_logits)
    if vocab_size not in (None, uncomputed.vocab_size):
        raise SizeError(
            f"This head has {uncomputed.vocab_size} tokens, not vocab_size={vocab_size}: leave vocab_size out."
        )
    return uncomputed, loss


DEFAULTS = LossSettings()


def divided_options(options: Mapping[str, Any]) -> tuple[LossSettings, dict[str, Any]]:
    """Return the options of a loss, and those of the logits with `impl` and `vocab_size`, from `LossOptions`."""
    of_logits = dict(options)
    of_loss = {name: of_logits.pop(name) for name in LossSettings._fields if name in options}
    return LossSettings(**of_loss) if of_loss else DEFAULTS, of_logits


def require_head(head: object) -> None:
    """Check that an argument is a head or a table of this library."""
    if not hasattr(head, "uncomputed_logits"):
        advice = "a head or a table of embedlayer"
        if isinstance(head, nn.Linear):
            sizes = f"{head.in_features}, {head.out_features}, bias={head.bias is not None}"
            advice = f"head = OutputHead({sizes}) after head.load_state_dict(linear.state_dict())"
        raise ShapeError(f"A head or a table is needed; found {type(head).__name__}: pass {advice}.")


def tokens_and_weight(
    weight: Tensor | HasLogits | None, tokens: Tensor | None
) -> tuple[Tensor | HasLogits | None, Tensor | None]:
    """Return `(weight, tokens)` of the arguments behind logits, `(logits, tokens)`, or behind hidden states."""
    is_ids = isinstance(weight, Tensor) and not weight.is_floating_point()
    return (None, weight) if is_ids and tokens is None else (weight, tokens)  # type: ignore[return-value]


def _of_logits(logits: object) -> UncomputedLogits:
    """Return logits of any form, real ones too, as an `UncomputedLogits`."""
    if isinstance(logits, UncomputedLogits):
        return logits
    uncomputed = logits.uncomputed() if isinstance(logits, MayBeUncomputed) else None
    if uncomputed is not None:
        return uncomputed
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.dim() == 0:
        found = f"{logits.dtype} {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ShapeError(
            f"Logits are needed: (..., V), an UncomputedLogits, or hidden states with a weight or head; found {found}."
        )
    vocab_size = logits.shape[-1]
    return BlockLogits(logits, _some_logits, vocab_size, min(vocab_size, block_size(TABLE_ROWS, device_kind(logits))))


def _some_logits(logits: Tensor, start: int, stop: int) -> Tensor:
    return logits[..., start:stop]


def _require_temperature_alone(options: Mapping[str, object]) -> None:
    """Check that no option but the temperature is passed for logits, which their model has finished."""
    others = [name for name in options if name != "temperature"]
    if others:
        raise SizeError(
            f"These logits have a head's scale and soft cap: pass (hidden, head, tokens) to change {', '.join(others)}."
        )
