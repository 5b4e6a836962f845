"""The plain definition of the loss of an LM head.

`cross_entropy(finish_logits(hidden @ weight.T), targets)` is a few lines of PyTorch. Hidden states of ignored targets
are zeros in it (`counted_states`), and float16 numbers are multiplied in float32. `losses.vocabulary_pass` and
`losses.triton_kernels` compute the same loss with less memory, and are tested against it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.index_checks import checked_copy, raise_if_outside
from embedlayer.losses.fixed_row import row_within
from embedlayer.losses.options import LogitOptions, Reduction, check_options
from embedlayer.torch_state import fusible, is_dispatch_mode_active, plain_operators_only


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

    Raises:
        SizeError: An option is outside its range.

    Example:
        >>> finish_logits(torch.tensor([1.0, 2.0, 3.0]), logit_scale=0.5, padding_idx=0, mask_padding=True)
        tensor([  -inf, 1.0000, 1.5000])
    """
    options = {"logit_scale": logit_scale, "bias": bias, "softcap": softcap, "temperature": temperature}
    check_options({**options, "padding_idx": padding_idx, "mask_padding": mask_padding}, LogitOptions, "finish_logits")
    logits = raw_logits if logit_scale == 1.0 else raw_logits * logit_scale
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if temperature != 1.0:
        logits = logits / temperature
    if padding_idx is not None and mask_padding:
        logits = logits.index_fill(-1, torch.tensor([padding_idx], device=logits.device), float("-inf"))
    return logits


def counted_states(hidden: Float[Tensor, "*batch D"], kept: Bool[Tensor, "*batch"] | None) -> Float[Tensor, "*batch D"]:
    """Return hidden states with zeros in place of those of tokens that do not count.

    NaN and infinity there reach neither losses nor gradients. Later masks do not ensure that, because 0 times NaN is
    NaN in the products of the backward pass. On the CPU, a batch in which all tokens count is returned unchanged.

    Args:
        hidden: Hidden states, `(..., D)`.
        kept: Mask of the tokens that count, `(...)`; `None` for all.
    """
    if kept is None:
        return hidden
    is_read_at_once = kept.device.type == "cpu" and fusible(hidden, kept) and not is_dispatch_mode_active()
    if is_read_at_once and bool(kept.all()):
        return hidden
    return torch.where(kept.unsqueeze(-1), hidden, 0.0)


def transformed_states(
    transform: Callable[[Tensor], Tensor], hidden: Float[Tensor, "*batch D"]
) -> Float[Tensor, "*batch R"]:
    """Return `transform(hidden)`, of hidden states that a head transforms before it is known which tokens count.

    A hidden state with NaN or infinity is transformed as 0, and its result is NaN. If its token does not count, the
    result gets the gradient 0, and no gradient of the transform's own weights is 0 times NaN.

    Args:
        transform: Function of each hidden state alone, `(..., D)` to `(..., R)`.
        hidden: Hidden states, `(..., D)`.
    """
    is_finite = hidden.detach().abs().amax(-1, keepdim=True) < torch.inf  # a tenth of the time of isfinite().all()
    states = transform(torch.where(is_finite, hidden, 0.0))
    return states + torch.where(is_finite, 0.0, torch.nan).to(states.dtype)


def options_of_rows(options: LogitOptions, start: int, stop: int) -> LogitOptions:
    """Return the `LogitOptions` among `options`, changed to apply to the logits of rows `start` to `stop - 1`.

    The bias is sliced. `padding_idx` counts from row `start`, and is `None` if no logit of these rows is masked.
    Defaults are filled in, and options of the loss are left out.
    """
    bias = options.get("bias")
    masked = row_within(options.get("padding_idx"), start, stop) if options.get("mask_padding") else None
    return {
        "logit_scale": options.get("logit_scale", 1.0),
        "bias": None if bias is None else bias[start:stop],
        "softcap": options.get("softcap"),
        "temperature": options.get("temperature", 1.0),
        "padding_idx": masked,
        "mask_padding": masked is not None,
    }


def cross_entropy(
    logits: Float[Tensor, "*batch V"],
    targets: Int[Tensor, "*batch"],
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Float[Tensor, "*result"]:
    """Compute the loss from all logits: the definition of `linear_cross_entropy`, and its `impl="plain"`.

    Args:
        logits: Results of `finish_logits`, `(..., V)`.
        targets: Token IDs `(...)`, or `ignore_index`.
        ignore_index: See `LossOptions`, as for the other options.
        label_smoothing: Fraction of the target probability that is spread over all tokens.
        z_loss: Factor of `logsumexp(logits) ** 2`.
        reduction: `"mean"`, `"sum"` or `"none"`.

    Returns:
        A scalar in nats, or `(...)` with `reduction="none"`.

    Raises:
        TokenIdError: A target is neither a token nor `ignore_index` (on the CPU only).
    """
    kept = targets != ignore_index
    targets = checked_targets(targets, logits.shape[-1], ignore_index)
    logits = logits.to(loss_dtype(logits.dtype))
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


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which losses and gradients are summed: float64 for `dtype` float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def reduce_losses(losses: Tensor, kept: Tensor, reduction: Reduction) -> Tensor:
    """Reduce the losses of tokens to a mean (`"mean"`), to a sum (`"sum"`), or return them unchanged (`"none"`).

    Args:
        losses: One loss per token, 0 for ignored targets.
        kept: Mask of the tokens with a target that is not ignored; the mean is over these, and 0 if there are none.
        reduction: `"mean"`, `"sum"` or `"none"`.
    """
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / kept.sum().clamp(min=1)


def reduction_factors(kept: Tensor, reduction: Reduction, dtype: torch.dtype) -> Tensor:
    """Return the factor of each token's loss with which `reduce_losses` sums them; 0 for tokens that do not count.

    Args:
        kept: Mask of the tokens that count.
        reduction: `"mean"`, or `"sum"` or `"none"` for a factor of 1.
        dtype: Dtype of the losses.
    """
    factors = kept.to(dtype)
    return factors / kept.sum().clamp(min=1) if reduction == "mean" else factors


def checked_targets(targets: Tensor, vocab_size: int, ignore_index: int, *, everywhere: bool = False) -> Tensor:
    """Check that each target is a token or `ignore_index`, and return the targets.

    On an accelerator they are checked only with `everywhere`, as the check waits for the device. Under `torch.func`
    transforms and in `torch.export` a target outside the vocabulary is clamped to the first or last token.

    Raises:
        TokenIdError: A target is neither; the message names the first such target, its row and its column.
    """
    if plain_operators_only():
        return torch.where(targets == ignore_index, targets, targets.clamp(0, vocab_size - 1))
    if targets.device.type != "cpu" and not everywhere:
        return targets
    if torch.compiler.is_compiling():
        kept = targets != ignore_index
        return torch.where(kept, checked_copy(torch.where(kept, targets, 0), vocab_size, "token id"), targets)
    raise_if_outside(targets, vocab_size, "token id", ignore=ignore_index)
    return targets
