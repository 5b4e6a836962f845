"""`linear_cross_entropy` for tables that compute their rows, over blocks of rows: it never stores all logits."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embedlayer.losses.chunk_size import MAX_CHUNK_TOKENS
from embedlayer.losses.cross_entropy import (
    LossOptions,
    check_options,
    checked_targets,
    finish_logits,
    loss_dtype,
    options_of_rows,
    reduce_losses,
)
from embedlayer.tracing import is_transformed, plain_operators_only

RawLogits = Callable[[Tensor, int, int], Tensor]
Scores = tuple[Tensor, Tensor, Tensor]
"""Three values per token over some rows: logsumexp, the target's logit or 0, and the sum of the logits."""


def cross_entropy_over_rows(
    hidden: Float[Tensor, "*batch D"],
    raw_logits: RawLogits,
    targets: Int[Tensor, "*batch"],
    *,
    vocab_size: int,
    rows_at_once: int,
    options: LossOptions,
) -> Float[Tensor, "*result"]:
    """Compute the loss of `linear_cross_entropy` from a function that computes the raw logits of a block of rows.

    For each block of tokens and rows, three numbers per token are kept: logsumexp, target logit and sum of logits. The
    backward pass calls `raw_logits` again. Every tensor that `raw_logits` depends on gets its gradient.

    Args:
        hidden: Hidden states, `(..., D)`.
        raw_logits: Function whose result `raw_logits(hidden, start, stop)` is `hidden @ rows[start:stop].T`.
        targets: Token IDs `(...)`, or `ignore_index`.
        vocab_size: Number of rows, V.
        rows_at_once: Number of rows in a block.
        options: See `LossOptions`; `impl` has no effect.

    Returns:
        A scalar in nats, or `(...)` with `reduction="none"`.

    Raises:
        TokenIdError: A target is neither a token nor `ignore_index` (on the CPU only).
        SizeError: An option has an unknown value, or two options exclude each other.
    """
    check_options(options)
    ignore_index, smoothing = options.get("ignore_index", -100), options.get("label_smoothing", 0.0)
    kept = targets != ignore_index
    aims = checked_targets(targets, vocab_size, ignore_index).masked_fill(~kept, 0).reshape(-1)
    step = MAX_CHUNK_TOKENS["cuda" if hidden.device.type == "cuda" else "cpu"]
    chunks = zip(hidden.reshape(-1, hidden.shape[-1]).split(step), aims.split(step), strict=True)
    scores = [_scores(x, raw_logits, y, vocab_size, rows_at_once, options) for x, y in chunks]
    lse, target_logits, sums = (torch.cat(parts).view(targets.shape) for parts in zip(*scores, strict=True))
    losses = lse - (1 - smoothing) * target_logits
    if smoothing:
        losses = losses - smoothing / vocab_size * sums
    if options.get("z_loss"):
        losses = losses + options["z_loss"] * lse**2
    return reduce_losses(torch.where(kept, losses, 0.0), kept, options.get("reduction", "mean"))


def _scores(
    hidden: Tensor, raw_logits: RawLogits, targets: Tensor, vocab_size: int, rows_at_once: int, options: LossOptions
) -> Scores:
    """Compute three numbers per token over all rows: logsumexp, target logit and sum of logits.

    Args:
        hidden: Hidden states of one chunk of tokens, `(C, D)`.
        raw_logits: As in `cross_entropy_over_rows`.
        targets: Target token IDs, `(C,)`.
        vocab_size: Number of rows, V.
        rows_at_once: Number of rows in a block; the backward pass computes each block again.
        options: Options of the logits.
    """
    blocks = []
    for start in range(0, vocab_size, rows_at_once):
        block = (hidden, raw_logits, targets, start, min(start + rows_at_once, vocab_size), options)
        if plain_operators_only() or is_transformed(hidden):  # torch.func and export cannot compute a block again
            blocks.append(_block_scores(*block))
        else:
            blocks.append(checkpoint(_block_scores, *block, use_reentrant=False))
    lse, target_logits, sums = blocks[0]
    for block_lse, block_targets, block_sums in blocks[1:]:
        lse = torch.logaddexp(lse, block_lse)
        target_logits, sums = target_logits + block_targets, sums + block_sums
    return lse, target_logits, sums


def _block_scores(
    hidden: Tensor, raw_logits: RawLogits, targets: Tensor, start: int, stop: int, options: LossOptions
) -> Scores:
    """Compute three numbers per token over rows `start` to `stop - 1`: logsumexp, target logit and sum of logits.

    The target logit is 0 if the target is another row. The other arguments are those of `_scores`.
    """
    logits = finish_logits(raw_logits(hidden, start, stop), **options_of_rows(options, start, stop))
    logits = logits.to(loss_dtype(logits.dtype))
    is_inside = (targets >= start) & (targets < stop)
    places = torch.where(is_inside, targets - start, 0).long()
    target_logits = logits.gather(-1, places.unsqueeze(-1)).squeeze(-1)
    return logits.logsumexp(-1), torch.where(is_inside, target_logits, 0.0), logits.sum(-1)
