"""Weights of tokens in the loss of a patched model: `model(input_ids, labels=labels, token_weights=weights)`.

The losses of transformers ignore keywords that they do not know, and so do some models. So a patched model has a
`forward` and a `loss_function` of its own around those it had. They compute the weighted loss, or refuse the weights.
"""

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from embedlayer.core.errors import SizeError
from embedlayer.core.formatting import a_or_an
from embedlayer.core.own_attributes import own_attribute, remove_own_attribute, set_own_attribute
from embedlayer.heads.deferred import weighted_cross_entropy
from embedlayer.losses.targets import require_token_weights

FORWARD, LOSS_FUNCTION = "forward", "_loss_function"
"""Attributes of a patched model: its `forward`, and what the setter of transformers' `loss_function` stores."""


class _Weights:
    """Hold the weights of one call of a model, and whether its loss has used them."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.are_used = False


def accept_token_weights(model: nn.Module) -> None:
    """Let a patched model of transformers take `token_weights` beside `labels`; `refuse_token_weights` undoes it."""
    if not hasattr(type(model), "loss_function") or _is_ours(model, FORWARD):
        return
    forward, loss_function = model.forward, cast(Callable[..., Tensor], model.loss_function)
    set_own_attribute(model, FORWARD, update_wrapper(partial(_forward, model, forward), forward))
    set_own_attribute(model, LOSS_FUNCTION, partial(_loss, type(model).__name__, loss_function))


def refuse_token_weights(model: nn.Module) -> None:
    """Give a model the `forward` and the `loss_function` that it had before `accept_token_weights`."""
    for name, public_name in ((FORWARD, "forward"), (LOSS_FUNCTION, "loss_function")):
        if _is_ours(model, name):
            before = remove_own_attribute(model, name).args[1]
            if getattr(model, public_name) != before:
                set_own_attribute(model, name, before)


def _is_ours(model: nn.Module, name: str) -> bool:
    """Return whether an attribute of the model is the one that `accept_token_weights` sets."""
    value = own_attribute(model, name)
    return isinstance(value, partial) and value.func in (_forward, _loss)


def _forward(
    model: nn.Module, forward: Callable[..., Any], *args: Any, token_weights: Tensor | None = None, **kwargs: Any
) -> Any:
    """Call the `forward` of a model; with `token_weights` the loss of each label is multiplied by its weight."""
    if token_weights is None:
        return forward(*args, **kwargs)
    if not _is_ours(model, LOSS_FUNCTION):
        return forward(*args, token_weights=token_weights, **kwargs)
    weights = _Weights(token_weights)
    outputs = forward(*args, token_weights=weights, **kwargs)
    if not weights.are_used:
        raise SizeError(f"{a_or_an(model)} ignored token_weights: docs/errors.md, Losses of the model's own code.")
    return outputs


def _loss(
    model: str, loss_function: Callable[..., Tensor], *args: Any, token_weights: _Weights | None = None, **kwargs: Any
) -> Tensor:
    if token_weights is None:
        return loss_function(*args, **kwargs)
    from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

    if loss_function not in (ForCausalLMLoss, ForMaskedLMLoss):
        name = getattr(loss_function, "__name__", loss_function)
        raise SizeError(f"The loss of {a_or_an(model)} is {name}, which has no token_weights.")
    token_weights.are_used = True
    return _weighted_loss(token_weights.values, loss_function is ForCausalLMLoss, *args, **kwargs)


def _weighted_loss(
    token_weights: Tensor,
    is_causal: bool,
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: float | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Compute transformers' `ForCausalLMLoss` or `ForMaskedLMLoss`, chosen by `is_causal`, with weights.

    The weights are shifted as the labels are; with `shift_labels` they belong to those.
    """
    if is_causal and shift_labels is not None:
        labels = shift_labels
    require_token_weights(token_weights, labels, "labels")
    if is_causal and shift_labels is None:
        labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        token_weights = F.pad(token_weights, (0, 1))[..., 1:]
    loss = weighted_cross_entropy(
        logits.float().view(-1, vocab_size),
        labels.reshape(-1).to(logits.device),
        token_weights.reshape(-1).to(logits.device),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch
