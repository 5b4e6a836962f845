"""The chunked cross entropy as a custom operator, which graphs of `torch.compile` can contain."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedlayer.losses.definition import loss_dtype, reduction_factors
from embedlayer.losses.options import LossOptions
from embedlayer.losses.token_loss import CrossEntropy, target_request
from embedlayer.losses.uncomputed_logits import LinearLogits
from embedlayer.losses.vocabulary_pass import RequestedGradients, VocabularyPass


class LossSettings(NamedTuple):
    """Hold the options of a loss in the order of the operator's schema; see `LossOptions`.

    Attributes:
        vocab_size: Number of tokens, V.
        compute: Dtype of the matrix products.
    """

    vocab_size: int
    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    padding_idx: int | None = None
    mask_padding: bool = False
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    reduction: str = "mean"
    compute: torch.dtype = torch.float32


def cross_entropy_operator(logits: LinearLogits, targets: Tensor, options: LossOptions) -> Tensor:
    """Compute `cross_entropy_of` by the operator, in a compiled graph.

    Args:
        logits: The head and its hidden states.
        targets: Token IDs `(...)`, or `ignore_index`.
        options: All options of the loss, defaults included.
    """
    known = {name: value for name, value in options.items() if name in LossSettings._fields}
    settings = LossSettings(**{**known, "vocab_size": logits.vocab_size, "compute": logits.dtype})  # type: ignore[arg-type]
    requested = RequestedGradients.of(logits.hidden, logits.weight, logits.bias)
    result: Tensor = _operator(logits.hidden, logits.weight, logits.bias, targets, None, *settings, *requested)[0]
    return result


@torch.library.custom_op(
    "embedlayer::chunked_cross_entropy",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? grad_output, SymInt vocab_size, "
    "float logit_scale, float? softcap, float temperature, SymInt? padding_idx, bool mask_padding, "
    "SymInt ignore_index, float label_smoothing, float z_loss, str reduction, ScalarType compute, "
    "bool hidden_requested, bool weight_requested, bool bias_requested) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _operator(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, grad_output: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """Compute the loss and its gradients in one pass.

    Args:
        hidden: Hidden states, `(..., D)`.
        weight: Rows of the head, `(V, D)`.
        bias: Bias of the rows, or `None`.
        targets: Target token IDs, `(...)`.
        grad_output: Gradient of the final scalar with respect to the loss; `None` for 1.
        rest: The fields of `LossSettings`, then those of `RequestedGradients`, in the order of the operator's schema.

    Returns:
        The loss, and the gradients of `hidden`, `weight` and `bias`. A gradient that is not requested is an empty
        tensor, as are all with `reduction="none"` and without `grad_output`.
    """
    settings, requested = _unpacked(rest)
    options: Any = settings._asdict()
    logits = LinearLogits(
        hidden.to(settings.compute),
        weight.to(settings.compute),
        vocab_size=settings.vocab_size,
        logit_scale=settings.logit_scale,
        bias=bias,
        softcap=settings.softcap,
        temperature=settings.temperature,
        padding_idx=settings.padding_idx,
        mask_padding=settings.mask_padding,
    )
    kept = targets != settings.ignore_index
    per_token = settings.reduction == "none"
    factors = reduction_factors(kept, options["reduction"], loss_dtype(settings.compute))
    weights = None if per_token and grad_output is None else factors * (1 if grad_output is None else grad_output)
    loss = CrossEntropy(settings.vocab_size, settings.label_smoothing, settings.z_loss)
    vocabulary_pass = VocabularyPass(logits, target_request(logits, targets, options))
    losses, gradients = vocabulary_pass.losses_and_gradients(
        loss, None if weights is None else weights.flatten(), requested
    )
    if settings.padding_idx is not None and gradients[1] is not None:
        gradients[1][settings.padding_idx] = 0
    losses = losses.view(targets.shape)
    result = losses * kept if per_token else (losses * factors).sum()
    dtypes = _gradient_dtypes(weight, settings)
    found = zip(gradients, dtypes, strict=True)
    return (result, *(result.new_empty(0, dtype=dtype) if x is None else x.to(dtype) for x, dtype in found))


def _gradient_dtypes(weight: Tensor, settings: LossSettings) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Return the dtypes of the gradients: bfloat16 for rows that have it, otherwise that of the loss."""
    dtype = loss_dtype(settings.compute)
    return dtype, torch.bfloat16 if weight.dtype == settings.compute == torch.bfloat16 else dtype, dtype


def _unpacked(rest: tuple[Any, ...]) -> tuple[LossSettings, RequestedGradients]:
    """Rebuild the settings and the requested gradients from the flat arguments `rest` of `_operator`."""
    count = len(LossSettings._fields)
    return LossSettings(*rest[:count]), RequestedGradients(*rest[count:])


@_operator.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, grad_output: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    settings, requested = _unpacked(rest)
    dtype, per_token = loss_dtype(settings.compute), settings.reduction == "none"
    is_computed = grad_output is not None or not per_token
    bias_like = weight.new_empty(settings.vocab_size)
    gradients = (
        hidden.new_empty(like.shape if need and is_computed else (0,), dtype=like_dtype)
        for like, need, like_dtype in zip(
            (hidden, weight, bias_like), requested, _gradient_dtypes(weight, settings), strict=True
        )
    )
    return (hidden.new_empty(targets.shape if per_token else (), dtype=dtype), *gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save in `ctx` what `_backward` needs: the inputs of `_operator`, and the gradients among its outputs."""
    hidden, weight, bias, targets, _, *rest = inputs
    ctx.set_materialize_grads(False)
    ctx.rest = rest
    ctx.save_for_backward(hidden, weight, bias, targets, *output[1:])


def _backward(ctx: Any, grad_output: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of the arguments of `_operator`; `None` for those that are no differentiable tensor.

    The gradients that `_operator` returned are multiplied by `grad_output`. With `reduction="none"` they are computed
    now.
    """
    hidden, weight, bias, targets, *gradients = ctx.saved_tensors
    settings, requested = _unpacked(ctx.rest)
    if settings.reduction == "none":
        gradients = _operator(hidden, weight, bias, targets, grad_output, *ctx.rest)[1:]
    else:
        gradients = [part * grad_output for part in gradients]
    converted = (
        part.to(like.dtype) if need and like is not None else None
        for part, like, need in zip(gradients, (hidden, weight, bias), requested, strict=True)
    )
    return (*converted, *(None for _ in range(2 + len(ctx.rest))))


_operator.register_autograd(_backward, setup_context=_save)
