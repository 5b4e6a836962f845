"""The loss of an LM head: `cross_entropy(finish_logits(hidden @ weight.T), targets)`, in nats per token.

Three implementations compute the same loss and the same gradients: plain PyTorch, a pass over blocks of logits, and
Triton. The last two never store the logits of all tokens, which are `tokens x V` numbers.
"""

import os
from importlib.util import find_spec
from typing import Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.errors import MissingExtraError, SizeError
from embedlayer.core.option_docs import show_options
from embedlayer.losses.definition import cross_entropy, reduce_losses
from embedlayer.losses.differentiable_totals import compute_loss
from embedlayer.losses.logit_arguments import HasLogits, Logits, resolve_logits, tokens_and_weight
from embedlayer.losses.logit_statistics import CrossEntropy, target_request
from embedlayer.losses.operators import cross_entropy_operator
from embedlayer.losses.options import Impl, LogitOptions, LossOptions, LossSettings, ScoreOptions, check_options
from embedlayer.losses.uncomputed_logits import LinearLogits, UncomputedLogits, check_ids, is_plain


@show_options(LogitOptions, ScoreOptions, LossOptions)
def linear_cross_entropy(
    hidden: Float[Tensor, "*batch D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "*batch"],
    **options: Unpack[LossOptions],
) -> Float[Tensor, "*result"]:
    """Compute the cross entropy of the targets under `softmax(finish_logits(hidden @ weight.T))`, in nats.

    `loss_i = logsumexp(z_i) - z_i[target_i]`, in float32 or, for float64 input, in float64. Matrix products use the
    dtype of `hidden` and `weight`, or of autocast; sums use the dtype of the loss. Products of float16, which may
    exceed its range, are float32, as are those of bfloat16 on a CPU without instructions for it. Ignored targets are
    dropped first, or their hidden states are replaced by zeros, so that NaN and infinity there have no effect. An empty
    batch, and a batch with ignored targets only, has loss 0 and zero gradients.

    With `impl="chunked"` the gradients are computed in the forward pass, a chunk of tokens at a time. With
    `reduction="none"` the backward pass computes the logits of each chunk again. `impl="triton"` computes blocks of
    logits in both passes. Neither needs memory that grows with tokens times V. On CUDA both wait for the device once,
    to check targets and drop the ignored ones.

    Args:
        hidden: Hidden states of the last block, `(..., D)`.
        weight: One row per token, `(V, D)`.
        targets: Token IDs `(...)`, or `ignore_index`.
        **options: See `LossOptions`.

    Returns:
        A scalar, or `(...)` with `reduction="none"`.

    Raises:
        TokenIdError: A target is neither a token nor `ignore_index` (with `impl="plain"` only on the CPU).
        ShapeError: Shapes or dtypes do not fit each other.
        SizeError: An option is unknown or outside its range, or two options exclude each other.
        MissingExtraError: `impl="triton"` without Triton or without a CUDA device.

    Example:
        >>> hidden, table = torch.randn(2, 5, 8), torch.randn(100, 8)
        >>> linear_cross_entropy(hidden, table, torch.randint(0, 100, (2, 5)), softcap=30.0).shape
        torch.Size([])

    Reference: Wijmans et al., Cut your losses in large-vocabulary language models, 2024. Unlike the paper, this
    function leaves no small values of the softmax out of the gradient.
    """
    check_options(options, LossOptions, "linear_cross_entropy")
    logits, loss = resolve_logits(hidden, weight, options)
    return cross_entropy_of(logits, targets, loss)


@show_options(LogitOptions, ScoreOptions)
def token_log_probs(
    hidden: Logits,
    weight: Tensor | HasLogits | None = None,
    tokens: Int[Tensor, "*batch"] | None = None,
    **options: Unpack[ScoreOptions],
) -> Float[Tensor, "*batch"]:
    """Compute the log-probability of each token, `log_softmax(logits)[token]`, in nats.

    Policy gradients, preference losses and distillation from samples use it. The result is differentiable and needs as
    much memory as `linear_cross_entropy`. For entropies and other statistics of the same logits in the same pass, see
    `token_statistics`.

    Call it as `token_statistics`: with logits, such as `token_log_probs(outputs.logits, tokens)`, or with hidden states
    and a weight, a head or a table, `token_log_probs(hidden, weight, tokens)`.

    Args:
        hidden: Logits, or hidden states that predict the tokens, `(..., D)`.
        weight: One row per token, `(V, D)`; or a head or a table. Behind logits, leave it out.
        tokens: Token IDs `(...)`, or `ignore_index`, for example in a prompt: there the result is 0 without gradient.
        **options: See `ScoreOptions`; logits take `temperature` and `ignore_index` alone.

    Returns:
        Log-probabilities, `(...)`.

    Raises:
        SizeError: Tokens are missing, or an option is unknown, outside its range, or does not apply to logits.
        TokenIdError: A token is outside the table; the other errors are those of `linear_cross_entropy`.

    Example:
        >>> hidden, table, tokens = torch.randn(2, 5, 8), torch.randn(100, 8), torch.randint(0, 100, (2, 5))
        >>> new, old = token_log_probs(hidden, table, tokens), token_log_probs(hidden + 0.01, table, tokens)
        >>> (new - old.detach()).exp().shape
        torch.Size([2, 5])
        >>> token_log_probs(hidden @ table.T, tokens).shape
        torch.Size([2, 5])
    """
    check_options(options, ScoreOptions, "token_log_probs")
    weight, tokens = tokens_and_weight(weight, tokens)
    if tokens is None:
        raise SizeError("token_log_probs needs tokens: token_log_probs(logits, tokens) or (hidden, weight, tokens).")
    logits, loss = resolve_logits(hidden, weight, options)
    return -cross_entropy_of(logits, tokens, loss._replace(reduction="none"))


def cross_entropy_of(
    logits: UncomputedLogits, targets: Int[Tensor, "*batch"], loss: LossSettings
) -> Float[Tensor, "*result"]:
    """Compute the cross entropy of the targets under the softmax of logits that are not computed yet, in nats.

    Args:
        logits: The head and its hidden states.
        targets: Token IDs `(...)`, or `ignore_index`.
        loss: Options of the loss.

    Returns:
        A scalar, or `(...)` with `reduction="none"`.

    Raises:
        TokenIdError: A target is neither a token nor `ignore_index`.
        ShapeError: Targets and hidden states do not fit each other.
        SizeError: Two options exclude each other. Of sharded rows, a `torch.func` transform is active.
        MissingExtraError: `impl="triton"` without Triton or without a CUDA device.
    """
    return reduced_and_token_losses(logits, targets, loss)[0]


def reduced_and_token_losses(
    logits: UncomputedLogits, targets: Int[Tensor, "*batch"], loss: LossSettings
) -> tuple[Tensor, Tensor]:
    """Return `cross_entropy_of`, and with a reduction the loss of each target without gradient, `(...)`.

    Raises:
        SizeError: See `cross_entropy_of`, which has the same errors.
    """
    check_ids(logits.hidden, targets, "targets")
    if loss.label_smoothing and logits.options.masked is not None:
        raise SizeError(
            "label_smoothing spreads over all tokens, and mask_padding leaves no probability to one of them: use one."
        )
    impl, kept = choose_impl(logits, loss), targets != loss.ignore_index
    if impl == "plain":
        losses = cross_entropy(logits.logits(kept), targets, loss)
    elif impl == "triton" and isinstance(logits, LinearLogits):
        from embedlayer.losses.triton_kernels import triton_cross_entropy

        losses = triton_cross_entropy(logits, targets, loss.ignore_index)
    elif torch.compiler.is_compiling() and isinstance(logits, LinearLogits) and not logits.is_sharded:
        if loss.token_weights is None:
            result = cross_entropy_operator(logits, targets, loss)
            return result, result.detach()
        losses = cross_entropy_operator(logits, targets, loss._replace(reduction="none", token_weights=None))
    else:
        objective = CrossEntropy(logits.vocab_size, loss.label_smoothing, loss.z_loss)
        return compute_loss(logits, target_request(logits, targets, loss), objective, kept, loss)
    return reduce_losses(losses, kept, loss), losses.detach()


def choose_impl(logits: UncomputedLogits, loss: LossSettings) -> Impl:
    """Return the implementation of the loss that will run: never `"auto"`.

    `"auto"` becomes `"plain"` for few logits, then `"triton"` on CUDA, else `"chunked"`. `"triton"`
    becomes `"chunked"` for float64, in compiled graphs, and with options that the kernels do not have. Under
    `torch.func` transforms and in exports it is `"plain"`. Rows that are computed or sharded have `"chunked"` only.

    Args:
        logits: The head and its hidden states.
        loss: Options of the loss.

    Raises:
        MissingExtraError: `impl="triton"` without Triton or without a CUDA device.
        SizeError: The rows are sharded, and a `torch.func` transform is active.
    """
    device = logits.hidden.device
    if isinstance(logits, LinearLogits) and logits.impl == "triton" and not triton_runs(device):
        raise MissingExtraError(
            f"impl='triton' needs the package triton and a CUDA device, not {device.type!r}. "
            f"pip install triton, or use impl='chunked', which runs everywhere."
        )
    if is_plain(logits, loss):
        return "plain"
    if not isinstance(logits, LinearLogits) or logits.impl == "chunked" or logits.prefers_plain:
        return "chunked"
    options = logits.options
    has_kernels = logits.hidden.dtype != torch.float64 and not loss.label_smoothing and not loss.z_loss
    has_kernels = has_kernels and (options.softcap is None or options.temperature == 1.0)
    if torch.compiler.is_compiling() or not has_kernels:  # a graph can contain the chunked loss
        return "chunked"
    return "triton" if logits.impl == "triton" or (device_kind(device) == "cuda" and triton_runs(device)) else "chunked"


def triton_runs(device: torch.device) -> bool:
    """Return whether Triton is installed, and `device` is CUDA or `TRITON_INTERPRET=1` is set."""
    on_device = device_kind(device) == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return on_device and find_spec("triton") is not None
