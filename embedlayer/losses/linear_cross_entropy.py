"""The loss of a vocabulary head: `cross_entropy(finish(hidden @ weight.T), targets)`, in nats per token.

This is the plain definition, in a few lines of PyTorch, that every faster way must equal.
"""

from typing import Literal, NotRequired, TypedDict, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.bounds import raise_if_outside
from embedlayer.errors import SizeError


class LogitOptions(TypedDict):
    """What stands between `hidden @ weight.T` and the logits, in this order.

    Attributes:
        logit_scale: Factor on the products, 1 if not given.
        bias: `(V,)`, added after the scale.
        softcap: `softcap * tanh(x / softcap)`, so that no logit exceeds it (Gemma 2).
        padding_idx: A token whose logit is 0 and whose row gets no gradient.
        mask_padding: Make that logit -inf instead, so that padding is never predicted.
    """

    logit_scale: NotRequired[float]
    bias: NotRequired[Float[Tensor, " V"] | None]
    softcap: NotRequired[float | None]
    padding_idx: NotRequired[int | None]
    mask_padding: NotRequired[bool]


class LossOptions(LogitOptions):
    """`LogitOptions`, and how the losses of the tokens become one number.

    Attributes:
        ignore_index: Targets with this value cost nothing, -100 if not given.
        label_smoothing: Share of the target's probability that is spread over all V tokens.
        z_loss: Factor of `logsumexp(logits) ** 2`, which keeps the logits' level near 0 (PaLM).
        reduction: `"mean"` over the targets that are not ignored (0 if all are), `"sum"`, or `"none"`.
    """

    ignore_index: NotRequired[int]
    label_smoothing: NotRequired[float]
    z_loss: NotRequired[float]
    reduction: NotRequired[Literal["mean", "sum", "none"]]


def finish_logits(
    products: Float[Tensor, "*batch V"],
    *,
    logit_scale: float = 1.0,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
    padding_idx: int | None = None,
    mask_padding: bool = False,
) -> Float[Tensor, "*batch V"]:
    """Products `hidden @ weight.T` to logits, by the options of `LogitOptions`."""
    logits = products if logit_scale == 1.0 else products * logit_scale
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if padding_idx is not None:
        column = torch.tensor([padding_idx], device=logits.device)
        logits = logits.index_fill(-1, column, float("-inf") if mask_padding else 0.0)
    return logits


def linear_cross_entropy(
    hidden: Float[Tensor, "*batch D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "*batch"],
    **options: Unpack[LossOptions],
) -> Float[Tensor, "*result"]:
    """Cross entropy of the targets under `softmax(finish_logits(hidden @ weight.T))`, in nats.

    `loss_i = logsumexp(z_i) - z_i[target_i]`, in float32 or, for float64 input, in float64.

    Args:
        hidden: What the last block gives, `(..., D)`.
        weight: One row for each token, `(V, D)`.
        targets: Token IDs `(...)`, or `ignore_index`.
        **options: See `LossOptions`.

    Returns:
        One number, or `(...)` with `reduction="none"`.

    Raises:
        TokenIdError: A target is neither a token nor `ignore_index` (on the CPU).
    """
    return cross_entropy(F.linear(hidden, weight), targets, **options)


def cross_entropy(
    products: Float[Tensor, "*batch V"],
    targets: Int[Tensor, "*batch"],
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    **logit_options: Unpack[LogitOptions],
) -> Float[Tensor, "*result"]:
    """`linear_cross_entropy` from the products `hidden @ weight.T` on."""
    if label_smoothing and logit_options.get("mask_padding") and logit_options.get("padding_idx") is not None:
        raise SizeError(
            "label_smoothing spreads over all tokens, and mask_padding gives one of them no chance: use one."
        )
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        raise_if_outside(targets, products.shape[-1], "token id", ignore=ignore_index)
    logits = finish_logits(products, **logit_options)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    kept = targets != ignore_index
    losses = F.cross_entropy(
        logits.flatten(0, -2),
        targets.flatten().long(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    ).view(targets.shape)
    if z_loss:
        losses = losses + torch.where(kept, z_loss * logits.logsumexp(-1) ** 2, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / kept.sum().clamp(min=1)
