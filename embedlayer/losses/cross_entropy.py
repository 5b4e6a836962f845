"""The plain definition of the loss of an LM head, and the options that all ways to compute it share.

`cross_entropy(hidden @ weight.T, targets)` is a few lines of PyTorch, and `losses.chunked`, `losses.row_blocks` and
`losses.triton_kernels` must equal it.
"""

from typing import Literal, NamedTuple, NotRequired, TypedDict, Unpack, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.bounds import checked_copy, raise_if_outside
from embedlayer.errors import ShapeError, SizeError
from embedlayer.tracing import plain_operators_only

Impl = Literal["auto", "plain", "chunked", "triton"]
Reduction = Literal["mean", "sum", "none"]


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


class ScoreOptions(LogitOptions):
    """`LogitOptions`, and which numbers count and who computes.

    Attributes:
        ignore_index: Targets with this value cost nothing, -100 if not given.
        vocab_size: Rows of `weight` that are tokens, from the top; those below are spare. All if not given.
        impl: `"plain"` makes all logits at once, by the definition. `"chunked"` takes some hundred tokens at a time.
            `"triton"` makes no logits in memory at all, on CUDA; what it does not know (float64, `label_smoothing`,
            `z_loss`, compiled graphs) is chunked. `"auto"`, if not given, takes the best that runs.
    """

    ignore_index: NotRequired[int]
    vocab_size: NotRequired[int | None]
    impl: NotRequired[Impl]


class LossOptions(ScoreOptions):
    """`ScoreOptions`, and how the losses of the tokens become one number.

    Attributes:
        label_smoothing: Share of the target's probability that is spread over all V tokens.
        z_loss: Factor of `logsumexp(logits) ** 2`, which keeps the logits' level near 0 (PaLM).
        reduction: `"mean"` over the targets that are not ignored (0 if all are), `"sum"`, or `"none"`.
    """

    label_smoothing: NotRequired[float]
    z_loss: NotRequired[float]
    reduction: NotRequired[Reduction]


def finish_logits(
    raw_logits: Float[Tensor, "*batch V"],
    *,
    logit_scale: float = 1.0,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
    padding_idx: int | None = None,
    mask_padding: bool = False,
) -> Float[Tensor, "*batch V"]:
    """Products `hidden @ weight.T` to logits, by the options of `LogitOptions`."""
    logits = raw_logits if logit_scale == 1.0 else raw_logits * logit_scale
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if padding_idx is not None:
        column = torch.tensor([padding_idx], device=logits.device)
        logits = logits.index_fill(-1, column, float("-inf") if mask_padding else 0.0)
    return logits


def for_rows(options: LogitOptions, start: int, stop: int) -> LogitOptions:
    """Return the options for the logits of rows `start` to `stop - 1` alone, without any other options."""
    bias, padding_idx = options.get("bias"), options.get("padding_idx")
    return {
        "logit_scale": options.get("logit_scale", 1.0),
        "bias": None if bias is None else bias[start:stop],
        "softcap": options.get("softcap"),
        "padding_idx": padding_idx - start if padding_idx is not None and start <= padding_idx < stop else None,
        "mask_padding": options.get("mask_padding", False),
    }


def cross_entropy(
    raw_logits: Float[Tensor, "*batch V"],
    targets: Int[Tensor, "*batch"],
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    vocab_size: int | None = None,
    impl: Impl = "plain",
    **logit_options: Unpack[LogitOptions],
) -> Float[Tensor, "*result"]:
    """`linear_cross_entropy` from the products `hidden @ weight.T` on: its definition, and `impl="plain"`."""
    kept = targets != ignore_index
    targets = checked_targets(targets, raw_logits.shape[-1], ignore_index)
    logits = at_least_float32(finish_logits(raw_logits, **logit_options))
    losses = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        targets.flatten().long(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    ).view(targets.shape)
    if z_loss:
        losses = losses + torch.where(kept, z_loss * logits.logsumexp(-1) ** 2, 0.0)
    return reduce_losses(losses, kept, reduction)


def at_least_float32(logits: Tensor) -> Tensor:
    """Convert logits to the dtype of the loss: float64 stays float64, all others become float32."""
    return logits if logits.dtype == torch.float64 else logits.float()


def reduce_losses(losses: Tensor, kept: Tensor, reduction: Reduction) -> Tensor:
    """The losses of the tokens as `LossOptions.reduction` asks; those that are not `kept` are 0."""
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / kept.sum().clamp(min=1)


def checked_targets(targets: Tensor, vocab_size: int, ignore_index: int) -> Tensor:
    """The targets, each of them a token or `ignore_index`; on the CPU, where reading them costs nothing.

    Raises:
        TokenIdError: Naming the first that is neither, its row and its column.
    """
    if plain_operators_only():
        return torch.where(targets == ignore_index, targets, targets.clamp(0, vocab_size - 1))
    if targets.device.type != "cpu":
        return targets
    if torch.compiler.is_compiling():
        kept = targets != ignore_index
        return torch.where(kept, checked_copy(torch.where(kept, targets, 0), vocab_size, "token id"), targets)
    raise_if_outside(targets, vocab_size, "token id", ignore=ignore_index)
    return targets


def check_fit(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Refuse shapes and types of which no product can be made.

    Raises:
        ShapeError: Naming what was found.
    """
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit: "
            f"they must be (..., D) and (V, D) of one width D."
        )
    if targets.shape != hidden.shape[:-1] or targets.dtype not in (torch.int64, torch.int32):
        raise ShapeError(
            f"targets must be int64 or int32 of shape {tuple(hidden.shape[:-1])}, one for each hidden state, "
            f"not {str(targets.dtype).removeprefix('torch.')} of shape {tuple(targets.shape)}."
        )
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise ShapeError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}: bring them to one type, or use torch.autocast."
        )


def refuse_clash(options: LossOptions) -> None:
    """Refuse options that exclude each other.

    Raises:
        SizeError: Saying which.
    """
    if options.get("label_smoothing") and options.get("mask_padding") and options.get("padding_idx") is not None:
        raise SizeError(
            "label_smoothing spreads over all tokens, and mask_padding gives one of them no chance: use one."
        )
    if options.get("reduction", "mean") not in get_args(Reduction):
        raise SizeError(f"reduction must be one of {', '.join(get_args(Reduction))}, not {options['reduction']!r}.")
    if options.get("impl", "auto") not in get_args(Impl):
        raise SizeError(f"impl must be one of {', '.join(get_args(Impl))}, not {options['impl']!r}.")


class LossSettings(NamedTuple):
    """`LossOptions` with their defaults, and `compute`, the dtype of the matrix products."""

    vocab_size: int
    logit_scale: float
    softcap: float | None
    padding_idx: int | None
    mask_padding: bool
    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: str
    compute: torch.dtype


def filled_in(hidden: Tensor, weight: Tensor, options: LossOptions) -> LossSettings:
    """The options with their defaults, and the type of the products."""
    device, vocab_size = hidden.device.type, options.get("vocab_size")
    narrow = torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight.dtype)
    return LossSettings(
        vocab_size=len(weight) if vocab_size is None else vocab_size,
        logit_scale=options.get("logit_scale", 1.0),
        softcap=options.get("softcap"),
        padding_idx=options.get("padding_idx"),
        mask_padding=options.get("mask_padding", False),
        ignore_index=options.get("ignore_index", -100),
        label_smoothing=options.get("label_smoothing", 0.0),
        z_loss=options.get("z_loss", 0.0),
        reduction=options.get("reduction", "mean"),
        compute=torch.get_autocast_dtype(device) if narrow else torch.promote_types(hidden.dtype, weight.dtype),
    )
