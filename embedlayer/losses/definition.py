"""The plain definition of the loss of an LM head.

`cross_entropy(finish_logits(hidden @ weight.T), targets)` is a few lines of PyTorch. Hidden states of ignored targets
are zeros in it (`counted_states`), and float16 numbers are multiplied in float32. `losses.loop`
computes the same loss with less memory, and is tested against it.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.shapes import wide_dtype
from embedlayer.core.torch_state import count_dispatch_modes, fusible
from embedlayer.losses.options import LogitOptions, LogitSettings, LossSettings, check_options
from embedlayer.losses.rows import one_index


def finish_logits(
    raw_logits: Float[Tensor, "*batch V"],
    *,
    logit_scale: float = 1.0,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    padding_idx: int | None = None,
    mask_padding: bool = False,
) -> Float[Tensor, "*batch V"]:
    """Compute logits from raw logits `hidden @ weight.T`: scale, bias, soft cap, temperature and masked padding.

    Args:
        raw_logits: Products of hidden states and rows, `(..., V)`.
        logit_scale: See `LogitOptions`, as for the other arguments.
        bias: `(V,)` or `None`.
        softcap: Bound of the logits, or `None`.
        temperature: Divisor of the logits, above 0.
        padding_idx: Padding token, or `None`.
        mask_padding: Whether the logit of the padding token is -inf.

    Returns:
        Logits, `(..., V)`.

    Example:
        >>> finish_logits(torch.tensor([1.0, 2.0, 3.0]), logit_scale=0.5, padding_idx=0, mask_padding=True)
        tensor([  -inf, 1.0000, 1.5000])
    """
    settings = LogitSettings(logit_scale, bias, softcap, temperature, padding_idx, mask_padding)
    check_options(settings._asdict(), LogitOptions, "finish_logits")
    return finish(raw_logits, settings)


def finish(raw_logits: Float[Tensor, "*batch V"], options: LogitSettings) -> Float[Tensor, "*batch V"]:
    """Compute `finish_logits` with options that were checked already."""
    logits = raw_logits if options.logit_scale == 1.0 else raw_logits * options.logit_scale
    if options.bias is not None:
        logits = logits + options.bias
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    if options.temperature != 1.0:
        logits = logits / options.temperature
    if (masked := options.masked()) is not None:
        logits = logits.index_fill(-1, one_index(masked, logits), -math.inf)
    return logits


def counted_states(hidden: Float[Tensor, "*batch D"], kept: Bool[Tensor, "*batch"] | None) -> Float[Tensor, "*batch D"]:
    """Return hidden states with zeros in place of those of tokens that do not count."""
    # Zeros in the input, because a later mask is not enough: 0 times NaN is NaN in the products of the backward pass.
    if kept is None:
        return hidden
    is_read_at_once = device_kind(kept) == "cpu" and fusible(hidden, kept) and not count_dispatch_modes()
    if is_read_at_once and bool(kept.all()):
        return hidden
    return torch.where(kept.unsqueeze(-1), hidden, 0.0)


def transformed_states(
    transform: Callable[[Tensor], Tensor], hidden: Float[Tensor, "*batch D"]
) -> Float[Tensor, "*batch R"]:
    """Return `transform(hidden)`, of hidden states that a head transforms before it is known which tokens count."""
    # A state with NaN or infinity is transformed as 0 and its result set to NaN, so that the gradients of the
    # transform's own weights are not 0 times NaN if its token does not count.
    is_finite = hidden.detach().abs().amax(-1, keepdim=True) < torch.inf  # a tenth of the time of isfinite().all()
    states = transform(torch.where(is_finite, hidden, 0.0))
    return states + torch.where(is_finite, 0.0, torch.nan).to(states.dtype)


def cross_entropy(
    logits: Float[Tensor, "*batch V"], targets: Int[Tensor, "*batch"], loss: LossSettings
) -> Float[Tensor, "*batch"]:
    """Compute the loss of each target from all logits: `linear_cross_entropy` before its reduction."""
    logits = logits.to(wide_dtype(logits.dtype))
    losses = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        targets.flatten().long(),
        ignore_index=loss.ignore_index,
        label_smoothing=loss.label_smoothing,
        reduction="none",
    ).view(targets.shape)
    if loss.z_loss:
        losses = losses + torch.where(targets != loss.ignore_index, loss.z_loss * logits.logsumexp(-1) ** 2, 0.0)
    return losses


def gradient_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the gradient of a tensor: its own, or `grad_dtype`, which torch has from 2.13 on."""
    dtype: torch.dtype | None = getattr(x, "grad_dtype", None) if x.is_leaf else None
    return x.dtype if dtype is None else dtype


def counted_weights(weights: Float[Tensor, "*batch"], kept: Bool[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Return the weights with 0 for tokens that do not count, even if they are infinite or NaN."""
    return weights.masked_fill(~kept, 0.0)


def reduce_losses(losses: Tensor, kept: Tensor | None, loss: LossSettings) -> Tensor:
    """Return the mean, the sum or all of the losses of tokens, as `loss.reduction` says, times `loss.token_weights`.

    `kept` is the mask of the tokens that count; `None` if all do.
    """
    weights = loss.token_weights
    if weights is not None:
        losses = losses * (weights if kept is None else counted_weights(weights, kept))
    if loss.reduction == "none":
        return losses
    total = losses.sum()
    if loss.reduction == "sum":
        return total
    return total / (max(losses.numel(), 1) if kept is None else kept.sum().clamp(min=1))


def scaled_factors(factors: Tensor, grad_output: Tensor) -> Tensor:
    """Return factors of the losses of tokens times the gradient by their sum: 0 for a factor of 0, whatever this is."""
    # So a token that does not count has no gradient even where a mean divides by 0 tokens.
    return torch.where(factors == 0, 0.0, factors * grad_output)


def reduction_factors(kept: Tensor, loss: LossSettings, dtype: torch.dtype, count: int | None = None) -> Tensor:
    """Return the factor of each token's loss with which `reduce_losses` sums them; 0 for tokens that do not count."""
    is_narrow = dtype == torch.float32  # torch divides masks in float32
    if is_narrow and count is not None and loss.reduction == "mean" and loss.token_weights is None:
        return torch.div(kept, max(count, 1), out=torch.empty_like(kept, dtype=dtype))
    factors = kept.to(dtype) if loss.token_weights is None else counted_weights(loss.token_weights, kept).to(dtype)
    return factors / kept.sum().clamp(min=1) if loss.reduction == "mean" else factors
