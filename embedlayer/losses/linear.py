"""The loss of an LM head: `cross_entropy(finish_logits(hidden @ weight.T), targets)`, in nats per token.

Two implementations compute the same loss and the same gradients: plain PyTorch, and a pass over chunks of tokens, which
stores the logits of one chunk at a time instead of `tokens x V` numbers.
"""

from collections.abc import Iterator, Sequence
from typing import Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.errors import SizeError
from embedlayer.core.option_docs import show_options
from embedlayer.core.shapes import wide_dtype
from embedlayer.core.torch_state import fusible
from embedlayer.kernels.softmax import STATISTICS
from embedlayer.losses.definition import cross_entropy, reduce_losses
from embedlayer.losses.differentiable_totals import LinearJob, compute_joint_loss, compute_loss, token_factors
from embedlayer.losses.logit_arguments import HasLogits, Logits, resolve_logits, tokens_and_weight
from embedlayer.losses.operators import cross_entropy_operator
from embedlayer.losses.options import LogitOptions, LossOptions, LossSettings, ScoreOptions, check_options
from embedlayer.losses.recording import is_recording, record_logits
from embedlayer.losses.statistics import CrossEntropy, target_request
from embedlayer.losses.targets import Counted, counted_targets, require_token_weights
from embedlayer.losses.uncomputed_logits import LinearLogits, RequestedGradients, UncomputedLogits, check_ids, is_plain


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
    batch, and a batch with ignored targets only, has loss 0 and zero gradients, even if the loss is divided by 0.

    With `impl="chunked"` the gradients are computed in the forward pass, a chunk of tokens at a time. With
    `reduction="none"` the backward pass computes the logits of each chunk again. On a CPU no memory grows with tokens
    times V; on CUDA a chunk may have all tokens, as far as its logits need no more than `chunk_bytes`.

    On CUDA it waits for the device once, to check the targets and to count the ignored ones, which are then dropped;
    see `drop_ignored`. While a CUDA graph is captured, in compiled graphs, for few logits, with `impl="plain"` and with
    `drop_ignored=False` it never waits. Where it does not, and a target is outside, the loss is NaN, and the next loss
    that waits raises the error. Over sharded rows it always waits once, and its backward pass once more, unless the
    table has `equal_loss_factors`.

    Args:
        hidden: Hidden states of the last block, `(..., D)`.
        weight: One row per token, `(V, D)`.
        targets: Token IDs `(...)`, or `ignore_index`.
        **options: See `LossOptions`.

    Returns:
        A scalar, or `(...)` with `reduction="none"`.

    Raises:
        ShapeError: Shapes or dtypes do not fit each other.
        SizeError: On the CPU, the weight of a target that is not ignored is infinite or NaN.
        TokenIdError: A target is neither a token nor `ignore_index`; on CUDA where the call waits, else later.

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
        TokenIdError: A token is outside the table; this error and the others are those of `linear_cross_entropy`.

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
    """Compute the cross entropy of the targets under the softmax of logits that are not computed yet, in nats."""
    return reduced_and_token_losses(logits, targets, loss)[0]


def reduced_and_token_losses(
    logits: UncomputedLogits, targets: Int[Tensor, "*batch"], loss: LossSettings, counted: Counted | None = None
) -> tuple[Tensor, Tensor]:
    """Return `cross_entropy_of`, and with a reduction the loss of each target without gradient, `(...)`."""
    loss = _checked_options(logits, targets, loss)
    plain = is_plain(logits, loss)
    compiled = torch.compiler.is_compiling() and not plain
    in_graph = logits if compiled and isinstance(logits, LinearLogits) and not logits.is_sharded else None
    if in_graph is not None and device_kind(targets) == "cpu":  # the operator checks targets and weights
        return cross_entropy_operator(in_graph, targets, loss)
    if counted is None:
        drop = False if plain else loss.drop_ignored
        other = loss.ignore_index if plain else 0 if compiled else _other([logits], loss)
        counted = counted_targets(targets, logits.vocab_size, loss, drop=drop, other=other, request=logits.rank_request)
    kept, checked = counted
    loss = loss._replace(token_weights=checked.weights)
    if plain:
        return _plain_losses(logits.logits(kept), targets, loss, counted)
    if in_graph is not None:
        assert kept is not None
        found = cross_entropy_operator(in_graph, torch.where(kept, checked.ids, loss.ignore_index), loss)
    else:
        objective = CrossEntropy(logits.vocab_size, loss.label_smoothing, loss.z_loss)
        found = compute_loss(logits, target_request(checked, loss), objective, kept, loss, checked.factors)
    return checked.marked(found[0]), checked.marked(found[1])


def _plain_losses(logits: Tensor, targets: Tensor, loss: LossSettings, counted: Counted) -> tuple[Tensor, Tensor]:
    """Return the reduced loss of all logits `(..., V)`, and that of each target without gradient."""
    kept, checked = counted
    if checked.is_bad is not None:
        targets = checked.ids
    elif kept is not None and not fusible(targets):  # otherwise they are what they were
        targets = checked.ids.masked_fill(~kept, loss.ignore_index)
    if is_recording():
        record_logits(logits, targets, kept)
    losses = checked.marked(cross_entropy(logits, targets, loss))
    return reduce_losses(losses, kept, loss), losses.detach()


HeadTargets = tuple[UncomputedLogits, Tensor, LossSettings, Counted | None]
"""Arguments of `reduced_and_token_losses` for one of several heads."""


def losses_of_heads(heads: Sequence[HeadTargets]) -> tuple[Tensor, list[Tensor]]:
    """Return the sum of the losses of heads, which have a reduction, and the losses of the targets of each head."""
    if _have_few_logits(heads):
        return _losses_of_few_logits(heads)
    if not _have_joint_loss(heads):
        found = [reduced_and_token_losses(*head) for head in heads]
        return torch.stack([total for total, _ in found]).sum(), [losses for _, losses in found]
    jobs, all_checked = [], []
    for logits, targets, loss, counted in heads:
        options = _checked_options(logits, targets, loss)
        if counted is None:
            other = _other([logits], options)
            counted = counted_targets(targets, logits.vocab_size, options, drop=options.drop_ignored, other=other)
        kept, checked = counted
        options = options._replace(token_weights=checked.weights)
        objective = CrossEntropy(logits.vocab_size, options.label_smoothing, options.z_loss)
        request = target_request(checked, options)
        factors = token_factors(logits, request, kept, options, checked.factors)
        assert isinstance(logits, LinearLogits)  # as `_have_joint_loss` says
        jobs.append(LinearJob(logits, request, objective, factors))
        all_checked.append(checked)
    total, of_heads = compute_joint_loss(jobs)
    for checked in all_checked:
        total = checked.marked(total)
    return total, [checked.marked(losses) for checked, losses in zip(all_checked, of_heads, strict=True)]


def _have_few_logits(heads: Sequence[HeadTargets]) -> bool:
    """Return whether several heads of one size have few logits each; see `losses_of_heads`."""
    first = heads[0][0]
    return len(heads) > 1 and all(
        loss.reduction == "sum"
        and logits.vocab_size == first.vocab_size
        and logits.dtype == first.dtype
        and is_plain(logits, loss)
        for logits, _, loss, _ in heads
    )


def _losses_of_few_logits(heads: Sequence[HeadTargets]) -> tuple[Tensor, list[Tensor]]:
    """Return `losses_of_heads` from one tensor of all logits, `(K, ..., V)`."""
    all_checked = [_checked_options(logits, targets, loss) for logits, targets, loss, _ in heads]
    loss, targets = all_checked[0], torch.stack([each for _, each, _, _ in heads])
    if loss.token_weights is not None:
        weights = [each.token_weights for each in all_checked if each.token_weights is not None]
        loss = loss._replace(token_weights=torch.stack(weights))
    kept, checked = counted_targets(targets, heads[0][0].vocab_size, loss, drop=False, other=loss.ignore_index)
    masks = [None] * len(heads) if kept is None else kept.unbind()
    logits = torch.stack([head.logits(mask) for (head, *_), mask in zip(heads, masks, strict=True)])
    total, losses = _plain_losses(logits, targets, loss._replace(token_weights=checked.weights), (kept, checked))
    return total, list(losses.unbind())


def _have_joint_loss(heads: Sequence[HeadTargets]) -> bool:
    first = heads[0][0]
    return not torch.compiler.is_compiling() and all(
        isinstance(logits, LinearLogits)
        and not logits.is_sharded
        and logits.hidden is first.hidden
        and logits.dtype == first.dtype
        and not is_plain(logits, loss)
        for logits, _, loss, _ in heads
    )


def _checked_options(logits: UncomputedLogits, targets: Tensor, loss: LossSettings) -> LossSettings:
    """Check that the options of a loss fit the head and its targets, and convert the weights of tokens."""
    check_ids(logits.hidden, targets, "targets")
    if loss.token_weights is not None:
        require_token_weights(loss.token_weights, targets)
        loss = loss._replace(token_weights=loss.token_weights.to(wide_dtype(logits.dtype)))
    if loss.label_smoothing and logits.options.masked() is not None:
        raise SizeError(
            "label_smoothing spreads over all tokens, and mask_padding leaves no probability to one of them: use one."
        )
    return loss


def targets_of_heads(
    heads: Sequence[UncomputedLogits], targets: Int[Tensor, " N"], loss: LossSettings
) -> Iterator[HeadTargets]:
    """Yield for each of several heads its arguments of `reduced_and_token_losses`."""
    shape, weights, count = heads[0].hidden.shape[:-1], loss.token_weights, len(heads)
    by_head = targets.view(count, -1)
    counted: list[Counted | None] = [None] * count
    is_in_graph = torch.compiler.is_compiling() or not fusible(targets)
    if device_kind(targets) != "cpu" and not is_in_graph and not any(is_plain(head, loss) for head in heads):
        size = max(head.vocab_size for head in heads)
        if any(head.vocab_size < size for head in heads):  # one that is outside of its own head is outside of all
            parts = zip(heads, by_head, strict=True)
            by_head = torch.stack([part.masked_fill(part >= head.vocab_size, size) for head, part in parts])
        if weights is not None:
            weights = weights.to(wide_dtype(heads[0].dtype)).view(count, -1)
        kept, checked = counted_targets(
            *(by_head, size, loss._replace(token_weights=weights)), drop=loss.drop_ignored, other=_other(heads, loss)
        )
        assert kept is not None  # on an accelerator
        counted = [(mask.view(shape), each.viewed(shape)) for mask, each in checked.by_row(kept)]
    for place, head in enumerate(heads):
        of_tokens = None if weights is None else weights.view(count, -1)[place].view(shape)
        yield head, by_head[place].view(shape), loss._replace(token_weights=of_tokens), counted[place]


def _other(heads: Sequence[UncomputedLogits], loss: LossSettings) -> int | None:
    """Return `other` of `counted_targets` for a loss of heads that is computed in chunks, in eager mode."""
    for head in heads:
        if not isinstance(head, LinearLogits) or head.is_sharded or loss.reduction == "none":
            return 0
        if not (any(RequestedGradients.of(head.hidden, head.weight, head.bias)) and STATISTICS.applies(*head.tensors)):
            return 0
    return None
