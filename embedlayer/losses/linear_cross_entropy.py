"""The loss of an LM head: `cross_entropy(finish_logits(hidden @ weight.T), targets)`, in nats per token.

Three implementations compute the same number and the same gradients: plain PyTorch, chunks of tokens, and Triton. The
last two never store `tokens x V` logits.
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
    check_fit,
    cross_entropy,
    filled_in,
    refuse_clash,
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
