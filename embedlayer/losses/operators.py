"""The chunked cross entropy as a custom operator, which graphs of `torch.compile` can contain."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.shapes import wide_dtype
from embedlayer.losses.definition import reduction_factors, scaled_factors
from embedlayer.losses.loop import VocabularyPass
from embedlayer.losses.options import LogitSettings, LossSettings
from embedlayer.losses.statistics import CrossEntropy, target_request
from embedlayer.losses.targets import CheckedIds, CountedTokens, checked_ids, raise_if_not_finite
from embedlayer.losses.uncomputed_logits import LinearLogits, RequestedGradients


class OperatorArguments(NamedTuple):
    """Hold the arguments of the operator that are no tensors."""

    vocab_size: int
    compute: torch.dtype
    options: LogitSettings
    loss: LossSettings
    requested: RequestedGradients

    def flat(self) -> tuple[Any, ...]:
        """Return all values in the order of the operator's schema."""
        scale, _, *of_logits = self.options
        *of_loss, _, _ = self.loss
        return self.vocab_size, self.compute, scale, *of_logits, *of_loss, *self.requested

    @classmethod
    def of(cls, values: tuple[Any, ...]) -> "OperatorArguments":
        """Rebuild the arguments from the result of `flat`."""
        vocab_size, compute, scale, *of_logits = values[:9]
        options = LogitSettings(scale, None, *of_logits)
        return cls(vocab_size, compute, options, LossSettings(*values[9:15]), RequestedGradients(*values[15:]))


def cross_entropy_operator(logits: LinearLogits, targets: Tensor, loss: LossSettings) -> tuple[Tensor, Tensor]:
    """Compute a loss as `reduced_and_token_losses` does, by the custom operator of this module."""
    requested = RequestedGradients.of(logits.hidden, logits.weight, logits.bias)
    arguments = OperatorArguments(logits.vocab_size, logits.dtype, logits.options, loss, requested)
    tensors = logits.hidden, logits.weight, logits.bias, targets, loss.token_weights, None
    result, losses, *_ = _operator(*tensors, *arguments.flat())
    return result, losses.detach()


@torch.library.custom_op(
    "embedlayer::chunked_cross_entropy",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? token_weights, Tensor? grad_output, "
    "SymInt vocab_size, ScalarType compute, float logit_scale, float? softcap, float temperature, SymInt? padding_idx, "
    "bool mask_padding, ScalarType? head_dtype, bool batch_invariant, SymInt ignore_index, float label_smoothing, "
    "float z_loss, str reduction, SymInt? chunk_bytes, bool? drop_ignored, bool hidden_requested, "
    "bool weight_requested, bool bias_requested) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _operator(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    token_weights: Tensor | None,
    grad_output: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """Compute the loss and its gradients in one pass. On CUDA the host never waits."""
    arguments = OperatorArguments.of(rest)
    compute, options = arguments.compute, arguments.options._replace(bias=bias)
    loss = arguments.loss._replace(token_weights=token_weights)
    if options.head_dtype is None:  # that of autocast, which is not active here, may be another
        states, rows = hidden.to(compute), weight.to(compute)
    else:
        states, rows = hidden, weight
    logits = LinearLogits.of(states, rows, options, vocab_size=arguments.vocab_size)
    kept = targets != loss.ignore_index
    per_token = loss.reduction == "none"
    factors = reduction_factors(kept, loss, wide_dtype(compute))
    weights = None if per_token else factors
    if grad_output is not None:
        weights = scaled_factors(factors, grad_output)
    objective = CrossEntropy(arguments.vocab_size, loss.label_smoothing, loss.z_loss)
    if device_kind(targets) == "cpu":
        if token_weights is not None:
            raise_if_not_finite(token_weights, kept)
        checked = checked_ids(targets, kept, logits.vocab_size, drop=loss.drop_ignored)
    else:  # they were checked before, and the operator can be captured in a CUDA graph
        checked = CheckedIds(torch.where(kept, targets, 0).long(), CountedTokens(kept.flatten()), None)
    weights = None if weights is None else weights.flatten()
    vocabulary_pass = VocabularyPass(logits, target_request(checked, loss))
    losses, (*gradients, _), _ = vocabulary_pass.losses(objective, arguments.requested, weights)
    if options.padding_idx is not None and gradients[1] is not None:
        gradients[1][options.padding_idx] = 0
    losses = losses.view(targets.shape) * kept
    weighted = losses * factors
    result = weighted if per_token else weighted.sum()
    dtypes = _gradient_dtypes(weight, arguments)
    parts = zip(gradients, dtypes, strict=True)
    return (result, losses, *(result.new_empty(0, dtype=dtype) if x is None else x.to(dtype) for x, dtype in parts))


def _gradient_dtypes(weight: Tensor, arguments: OperatorArguments) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Return the dtypes of the gradients: bfloat16 for rows that have it, otherwise that of the loss."""
    dtype, keeps_rows = wide_dtype(arguments.compute), arguments.options.head_dtype is not None
    is_narrow = weight.dtype == torch.bfloat16 and (keeps_rows or arguments.compute == torch.bfloat16)
    return dtype, torch.bfloat16 if is_narrow else dtype, dtype


@_operator.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    token_weights: Tensor | None,
    grad_output: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    arguments = OperatorArguments.of(rest)
    dtype, per_token = wide_dtype(arguments.compute), arguments.loss.reduction == "none"
    is_computed = grad_output is not None or not per_token
    bias_like = weight.new_empty(arguments.vocab_size)
    gradients = (
        hidden.new_empty(like.shape if need and is_computed else (0,), dtype=like_dtype)
        for like, need, like_dtype in zip(
            (hidden, weight, bias_like), arguments.requested, _gradient_dtypes(weight, arguments), strict=True
        )
    )
    losses = hidden.new_empty(targets.shape, dtype=dtype)
    return (losses.new_empty(targets.shape if per_token else ()), losses, *gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save in `ctx` what `_backward` needs: the inputs of `_operator`, and the gradients among its outputs."""
    hidden, weight, bias, targets, token_weights, _, *rest = inputs
    ctx.set_materialize_grads(False)
    ctx.rest = rest
    ctx.save_for_backward(hidden, weight, bias, targets, token_weights, *output[2:])


def _backward(ctx: Any, grad_output: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of the arguments of `_operator`; `None` for those that are no differentiable tensor."""
    hidden, weight, bias, targets, token_weights, *gradients = ctx.saved_tensors
    arguments = OperatorArguments.of(ctx.rest)
    if arguments.loss.reduction == "none":
        gradients = _operator(hidden, weight, bias, targets, token_weights, grad_output, *ctx.rest)[2:]
    else:
        is_counted = targets != arguments.loss.ignore_index
        grad_output = torch.where(is_counted.any(), grad_output, 0.0)  # otherwise 0 times infinity is possible
        gradients = [part * grad_output for part in gradients]
    converted = (
        part.to(like.dtype) if need and like is not None else None
        for part, like, need in zip(gradients, (hidden, weight, bias), arguments.requested, strict=True)
    )
    return (*converted, *(None for _ in range(3 + len(ctx.rest))))


_operator.register_autograd(_backward, setup_context=_save)
