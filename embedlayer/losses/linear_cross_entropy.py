"""The loss of an LM head: `cross_entropy(finish_logits(hidden @ weight.T), targets)`, in nats per token.

Three implementations compute the same loss and the same gradients: plain PyTorch, chunks of tokens, and Triton. The
last two never store the logits of all tokens, which are `tokens x V` numbers.
"""

import os
from importlib.util import find_spec
from typing import Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.errors import MissingExtraError
from embedlayer.losses.chunked import chunked_cross_entropy
from embedlayer.losses.cross_entropy import (
    Impl,
    LossOptions,
    ScoreOptions,
    check_options,
    check_shapes,
    cross_entropy,
    fill_in_defaults,
)
from embedlayer.tracing import is_transformed, plain_operators_only

# Options that the Triton kernels do not implement.
NOT_IN_TRITON = ("label_smoothing", "z_loss")
# Below this number of logits the plain definition is at least as fast, and differentiable any number of times.
FEW_LOGITS = 2**16


def linear_cross_entropy(
    hidden: Float[Tensor, "*batch D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "*batch"],
    **options: Unpack[LossOptions],
) -> Float[Tensor, "*result"]:
    """Compute the cross entropy of the targets under `softmax(finish_logits(hidden @ weight.T))`, in nats.

    `loss_i = logsumexp(z_i) - z_i[target_i]`, in float32 or, for float64 input, in float64. Matrix products use the
    dtype of `hidden` and `weight`, or of autocast; sums use the dtype of the loss. Ignored targets are dropped first.
    An empty batch, and a batch with ignored targets only, has loss 0 and zero gradients.

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
        SizeError: An option has an unknown value, or two options exclude each other.
        MissingExtraError: `impl="triton"` without Triton or without a CUDA device.

    Example:
        >>> hidden, table = torch.randn(2, 5, 8), torch.randn(100, 8)
        >>> linear_cross_entropy(hidden, table, torch.randint(0, 100, (2, 5)), softcap=30.0).shape
        torch.Size([])

    Reference: Wijmans et al., Cut your losses in large-vocabulary language models, 2024. Unlike the paper, this
    function leaves no small values of the softmax out of the gradient.
    """
    check_shapes(hidden, weight, targets)
    impl = choose_impl(hidden, targets, len(weight), options)
    if plain_operators_only() or is_transformed(hidden, weight, options.get("bias")):
        impl = "plain"
    if impl == "plain":
        rows = weight if options.get("vocab_size") is None else weight[: options["vocab_size"]]
        return cross_entropy(F.linear(hidden, rows), targets, **options)
    terms = fill_in_defaults(hidden, weight, options)
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
    """Compute the log-probability of each token, `log_softmax(finish_logits(hidden @ weight.T))[token]`, in nats.

    Policy gradients, preference losses and distillation from samples use it. The result is differentiable and needs as
    much memory as `linear_cross_entropy`. To use a temperature T, pass `logit_scale=1 / T`.

    Args:
        hidden: Hidden states that predict the tokens, `(..., D)`.
        weight: One row per token, `(V, D)`.
        tokens: Token IDs `(...)`, or `ignore_index`, for example in a prompt: there the result is 0 without gradient.
        **options: See `ScoreOptions`.

    Returns:
        Log-probabilities, `(...)`.

    Raises:
        TokenIdError: A token is outside the table; the other errors are those of `linear_cross_entropy`.

    Example:
        >>> hidden, table, tokens = torch.randn(2, 5, 8), torch.randn(100, 8), torch.randint(0, 100, (2, 5))
        >>> new, old = token_log_probs(hidden, table, tokens), token_log_probs(hidden + 0.01, table, tokens)
        >>> (new - old.detach()).exp().shape
        torch.Size([2, 5])
    """
    return -linear_cross_entropy(hidden, weight, tokens, **options, reduction="none")


def choose_impl(hidden: Tensor, targets: Tensor, vocab_size: int, options: LossOptions) -> Impl:
    """Check the options, and return the implementation of the loss that will run: never `"auto"`.

    `"auto"` becomes `"plain"` for at most `FEW_LOGITS` logits, then `"triton"` on CUDA, else `"chunked"`. `"triton"`
    becomes `"chunked"` for float64, in compiled graphs, and with options that the kernels do not have.

    Args:
        hidden: Hidden states, for their device and dtype.
        targets: Target token IDs, for their number.
        vocab_size: Number of tokens, V.
        options: The options that the caller passed.

    Raises:
        MissingExtraError: `impl="triton"` without Triton or without a CUDA device.
        SizeError: An option has an unknown value, or two options exclude each other.
    """
    check_options(options)
    requested = options.get("impl", "auto")
    known = hidden.dtype != torch.float64 and not any(options.get(name) for name in NOT_IN_TRITON)
    known = known and not torch.compiler.is_compiling()  # the chunked loss is an operator that a graph can contain
    if requested == "triton":
        if not triton_runs(hidden.device):
            raise MissingExtraError(
                f"impl='triton' needs the package triton and a CUDA device, not {hidden.device.type!r}. "
                f"pip install triton, or use impl='chunked', which runs everywhere."
            )
        return "triton" if known else "chunked"
    if requested != "auto":
        return requested
    if targets.numel() * vocab_size <= FEW_LOGITS:
        return "plain"
    return "triton" if known and hidden.device.type == "cuda" and triton_runs(hidden.device) else "chunked"


def triton_runs(device: torch.device) -> bool:
    """Return whether Triton is installed, and `device` is CUDA or `TRITON_INTERPRET=1` is set."""
    on_device = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return on_device and find_spec("triton") is not None
