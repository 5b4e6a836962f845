"""The loss of a vocabulary head: `cross_entropy(finish(hidden @ weight.T), targets)`, in nats per token.

`cross_entropy` after `hidden @ weight.T` is the plain definition, in a few lines of PyTorch, that every faster way must
equal. The other ways make the same number and the same gradients without `tokens x V` logits.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal, NotRequired, TypedDict, Unpack, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embedlayer.errors import MissingExtraError, ShapeError, SizeError
from embedlayer.index_checks import checked_copy, raise_if_outside
from embedlayer.losses.chunk_length import TOKENS_AT_ONCE
from embedlayer.losses.chunked import Terms, chunked_cross_entropy
from embedlayer.tracing import is_transformed, plain_operators_only

Impl = Literal["auto", "plain", "chunked", "triton"]
Reduction = Literal["mean", "sum", "none"]

# Options that only the other ways know.
NOT_IN_TRITON = ("label_smoothing", "z_loss")
# Under this many logits the plain definition is at least as fast, and differentiable any number of times.
FEW_LOGITS = 2**16


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
    """Cross entropy of the targets under `softmax(finish_logits(hidden @ weight.T))`, in nats, without the logits.

    `loss_i = logsumexp(z_i) - z_i[target_i]`, in float32 or, for float64 input, in float64. Products are taken in the
    type of `hidden` and `weight`, or of autocast; sums in the type of the loss. Ignored targets are dropped before any
    work. An empty batch, and one whose targets are all ignored, has loss 0 and zero gradients.

    Unless `impl` is `"plain"`, the gradients are made in the forward pass, a chunk of tokens at a time, so no memory
    grows with tokens times V; for `reduction="none"` the backward pass computes the logits of each chunk again. On CUDA
    the chunked way waits for the device once, to check the targets and to drop those that are ignored.

    Args:
        hidden: What the last block gives, `(..., D)`.
        weight: One row for each token, `(V, D)`.
        targets: Token IDs `(...)`, or `ignore_index`.
        **options: See `LossOptions`.

    Returns:
        One number, or `(...)` with `reduction="none"`.

    Raises:
        TokenIdError: A target is neither a token nor `ignore_index` (with `impl="plain"` only on the CPU).
        ShapeError: Shapes or types do not fit each other.
        SizeError: An option is not one of those above, or two of them exclude each other.
        MissingExtraError: `impl="triton"` where Triton or the device for it is missing.

    Example:
        >>> hidden, table = torch.randn(2, 5, 8), torch.randn(100, 8)
        >>> linear_cross_entropy(hidden, table, torch.randint(0, 100, (2, 5)), softcap=30.0).shape
        torch.Size([])

    Reference: Wijmans et al., Cut your losses in large-vocabulary language models, 2024. We differ: no part of the
    softmax is left out of the gradient for being small.
    """
    check_fit(hidden, weight, targets)
    impl = chosen_impl(hidden, targets, len(weight), options)
    if plain_operators_only() or is_transformed(hidden, weight, options.get("bias")):
        impl = "plain"
    if impl == "plain":
        rows = weight if options.get("vocab_size") is None else weight[: options["vocab_size"]]
        return cross_entropy(F.linear(hidden, rows), targets, **options)
    terms = filled_in(hidden, weight, options)
    if impl == "triton":
        from embedlayer.losses.triton_kernels import triton_cross_entropy

        return triton_cross_entropy(hidden, weight, options.get("bias"), targets, terms)
    return chunked_cross_entropy(hidden, weight, options.get("bias"), targets, terms)


def token_log_probs(
    hidden: Float[Tensor, "*batch D"],
    weight: Float[Tensor, "V D"],
    tokens: Int[Tensor, "*batch"],
    **options: Unpack[ScoreOptions],
) -> Float[Tensor, "*batch"]:
    """Log-probability of each given token, `log_softmax(finish_logits(hidden @ weight.T))[token]`, in nats.

    What policy gradients (the ratio of a new to an old policy), preference losses and distillation from samples need,
    with gradients and at the memory of `linear_cross_entropy`. A temperature T is `logit_scale=1 / T`.

    Args:
        hidden: What the last block gives, `(..., D)`: at each place the state that predicts the token.
        weight: One row for each token, `(V, D)`.
        tokens: Token IDs `(...)`; where one is `ignore_index`, as in a prompt, the result is 0 without gradient.
        **options: See `ScoreOptions`.

    Raises:
        TokenIdError: As `linear_cross_entropy`.

    Example:
        >>> hidden, table, tokens = torch.randn(2, 5, 8), torch.randn(100, 8), torch.randint(0, 100, (2, 5))
        >>> new, old = token_log_probs(hidden, table, tokens), token_log_probs(hidden + 0.01, table, tokens)
        >>> (new - old.detach()).exp().shape
        torch.Size([2, 5])
    """
    return -linear_cross_entropy(hidden, weight, tokens, **options, reduction="none")


def cross_entropy(
    products: Float[Tensor, "*batch V"],
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
    targets = checked_targets(targets, products.shape[-1], ignore_index)
    logits = finish_logits(products, **logit_options)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        targets.flatten().long(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    ).view(targets.shape)
    if z_loss:
        losses = losses + torch.where(kept, z_loss * logits.logsumexp(-1) ** 2, 0.0)
    return reduced(losses, kept, reduction)


def cross_entropy_over_rows(
    hidden: Float[Tensor, "*batch D"],
    products: Callable[[Tensor, int, int], Tensor],
    targets: Int[Tensor, "*batch"],
    *,
    vocab_size: int,
    rows_at_once: int,
    options: LossOptions,
) -> Float[Tensor, "*result"]:
    """`linear_cross_entropy` of rows that are known by `products(hidden, start, stop)`, their `hidden @ rows.T`.

    Of each block of tokens and rows only `logsumexp`, the targets' logits and the sums of logits are kept; the backward
    pass asks for the block again. So no memory grows with tokens times V, and whatever `products` computes from gets
    its gradient. There is this one way, whatever `impl` says.
    """
    refuse_clash(options)
    ignore_index = options.get("ignore_index", -100)
    kept = targets != ignore_index
    places = checked_targets(targets, vocab_size, ignore_index).masked_fill(~kept, 0)
    scores = scores_over_rows(
        hidden, products, places, within=(0, vocab_size), rows_at_once=rows_at_once, options=options
    )
    return cross_entropy_of_scores(*scores, kept, vocab_size=vocab_size, options=options)


def scores_over_rows(
    hidden: Float[Tensor, "*batch D"],
    products: Callable[[Tensor, int, int], Tensor],
    targets: Int[Tensor, "*batch"],
    *,
    within: tuple[int, int],
    rows_at_once: int,
    options: LogitOptions | LossOptions,
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """Over the tokens `within[0]` to `within[1] - 1`: logsumexp, the target's logit or 0, and the sum of the logits.

    Those of several parts of the vocabulary are put together by logsumexp and two sums, and `cross_entropy_of_scores`
    makes losses of them. Goes by blocks of tokens and rows, each of which the backward pass computes again.
    """
    tokens_at_once = TOKENS_AT_ONCE["cuda" if hidden.device.type == "cuda" else "cpu"]
    parts = zip(
        hidden.reshape(-1, hidden.shape[-1]).split(tokens_at_once),
        targets.reshape(-1).split(tokens_at_once),
        strict=True,
    )
    found = [_over_blocks(part, products, aims, within, rows_at_once, options) for part, aims in parts]
    levels, picked, sums = (torch.cat(pieces).view(targets.shape) for pieces in zip(*found, strict=True))
    return levels, picked, sums


def cross_entropy_of_scores(
    levels: Float[Tensor, "*batch"],
    picked: Float[Tensor, "*batch"],
    sums: Float[Tensor, "*batch"],
    kept: Bool[Tensor, "*batch"],
    *,
    vocab_size: int,
    options: LossOptions,
) -> Float[Tensor, "*result"]:
    """The loss, from what `scores_over_rows` gives over all tokens; targets that are not `kept` cost nothing."""
    smoothing = options.get("label_smoothing", 0.0)
    losses = levels - (1 - smoothing) * picked
    if smoothing:
        losses = losses - smoothing / vocab_size * sums
    if options.get("z_loss"):
        losses = losses + options["z_loss"] * levels**2
    return reduced(torch.where(kept, losses, 0.0), kept, options.get("reduction", "mean"))


def _over_blocks(
    hidden: Tensor,
    products: Callable[[Tensor, int, int], Tensor],
    targets: Tensor,
    within: tuple[int, int],
    rows_at_once: int,
    options: LogitOptions | LossOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_block_of_logits` over all rows `within`, a block at a time."""
    low, high = within
    ends = [(start, min(start + rows_at_once, high)) for start in range(low, high, rows_at_once)]
    if plain_operators_only() or is_transformed(hidden):  # what cannot compute a block again
        blocks = [_block_of_logits(hidden, products, targets, start, stop, options) for start, stop in ends]
    else:
        blocks = [
            checkpoint(_block_of_logits, hidden, products, targets, start, stop, options, use_reentrant=False)
            for start, stop in ends
        ]
    levels, picked, sums = blocks[0]
    for level, pick, total in blocks[1:]:
        levels, picked, sums = torch.logaddexp(levels, level), picked + pick, sums + total
    return levels, picked, sums


def _block_of_logits(
    hidden: Tensor,
    products: Callable[[Tensor, int, int], Tensor],
    targets: Tensor,
    start: int,
    stop: int,
    options: LogitOptions | LossOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Over the tokens `start..stop - 1`: logsumexp, the target's logit or 0, and the sum of the logits."""
    bias, padding_idx = options.get("bias"), options.get("padding_idx")
    logits = finish_logits(
        products(hidden, start, stop),
        logit_scale=options.get("logit_scale", 1.0),
        bias=None if bias is None else bias[start:stop],
        softcap=options.get("softcap"),
        padding_idx=padding_idx - start if padding_idx is not None and start <= padding_idx < stop else None,
        mask_padding=options.get("mask_padding", False),
    )
    logits = logits if logits.dtype == torch.float64 else logits.float()
    here = (targets >= start) & (targets < stop)
    places = torch.where(here, targets - start, 0).long()
    picked = logits.gather(-1, places.unsqueeze(-1)).squeeze(-1)
    return logits.logsumexp(-1), torch.where(here, picked, 0.0), logits.sum(-1)


def reduced(losses: Tensor, kept: Tensor, reduction: Reduction) -> Tensor:
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


def chosen_impl(hidden: Tensor, targets: Tensor, vocab_size: int, options: LossOptions) -> Impl:
    """Who computes: the one that `impl` names, or the best that runs here and knows the options."""
    refuse_clash(options)
    asked = options.get("impl", "auto")
    known = hidden.dtype != torch.float64 and not any(options.get(name) for name in NOT_IN_TRITON)
    known = known and not torch.compiler.is_compiling()  # the chunks are an operator that a graph can hold
    if asked == "triton":
        if not triton_runs(hidden.device):
            raise MissingExtraError(
                f"impl='triton' needs the package triton and a CUDA device, not {hidden.device.type!r}. "
                f"pip install triton, or use impl='chunked', which runs everywhere."
            )
        return "triton" if known else "chunked"
    if asked != "auto":
        return asked
    if targets.numel() * vocab_size <= FEW_LOGITS:
        return "plain"
    return "triton" if known and hidden.device.type == "cuda" and triton_runs(hidden.device) else "chunked"


def triton_runs(device: torch.device) -> bool:
    """Whether Triton is there, and the device is one of its own (or Triton's interpreter stands in for it)."""
    on_device = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return on_device and find_spec("triton") is not None


def filled_in(hidden: Tensor, weight: Tensor, options: LossOptions) -> Terms:
    """The options with their defaults, and the type of the products."""
    device, vocab_size = hidden.device.type, options.get("vocab_size")
    narrow = torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight.dtype)
    return Terms(
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
