"""The loss of multi-token prediction: several hidden states per position, shifted targets, one head, one pass."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.core.documents import AttentionMask, shifted_targets
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.losses.options import LossSettings
from embedlayer.losses.target_groups import TargetGroups, reduced_losses, token_losses, weighted_sum
from embedlayer.losses.targets import require_token_weights
from embedlayer.losses.uncomputed_logits import UncomputedLogits


class MultiTokenLoss(NamedTuple):
    """Hold the loss of multi-token prediction.

    Attributes:
        loss: `sum over k of weights[k] * losses[k]`, in nats: a scalar, or `(B, T)` with `reduction="none"`.
        losses: Cross entropy of each depth, without gradient, as `reduction` says: the mean or the sum, `(depths,)`, or
            `(depths, B, T)` with `"none"`. It is 0 for a depth without targets, and at a position without a target.
    """

    loss: Float[Tensor, "*result"]
    losses: Float[Tensor, "depths *result"]


def multi_token_targets(
    hidden_states: Sequence[Float[Tensor, "B T D"]],
    labels: Int[Tensor, "B T"],
    weights: Sequence[float] | None,
    documents: AttentionMask | None,
    ignore_index: int,
    token_weights: Float[Tensor, "B T"] | None = None,
) -> tuple[list[Float[Tensor, "N D"]], TargetGroups]:
    """Return the hidden states of each depth that have targets, and the shifted labels and weights of all depths."""
    weights = [1.0] * len(hidden_states) if weights is None else list(weights)
    if len(weights) != len(hidden_states) or not weights:
        raise SizeError(f"{len(hidden_states)} depths and {len(weights)} weights: pass one weight for each depth.")
    if token_weights is not None:
        require_token_weights(token_weights, labels, "labels")
    hidden, targets, of_tokens = [], [], []
    for depth, states in enumerate(hidden_states):
        if states.shape[:-1] != labels.shape:
            raise ShapeError(
                f"labels {tuple(labels.shape)} and hidden states of depth {depth} {tuple(states.shape)} "
                f"must be (B, T) and (B, T, D)."
            )
        shifted = shifted_targets(labels, documents, depth=depth, ignore_index=ignore_index)
        hidden.append(states[:, : shifted.shape[1]].flatten(0, 1))
        targets.append(shifted.flatten())
        if token_weights is not None:
            of_tokens.append(token_weights[:, depth + 1 :].flatten())
    lengths = [len(each) for each in targets]
    return hidden, TargetGroups(torch.cat(targets), lengths, weights, torch.cat(of_tokens) if of_tokens else None)


def multi_token_loss_of(
    logits: UncomputedLogits, groups: TargetGroups, labels: Int[Tensor, "B T"], loss: LossSettings
) -> MultiTokenLoss:
    """Return the loss of targets of `multi_token_targets`, whose depths are one after another."""
    if loss.reduction != "none":
        return MultiTokenLoss(*reduced_losses(logits, groups, loss))
    batch, steps = labels.shape
    lengths = [max(steps - 1 - depth, 0) for depth in range(len(groups.lengths))]
    parts = zip(token_losses(logits, groups, loss), lengths, strict=True)
    losses = [F.pad(part.view(batch, length), (0, steps - length)) for part, length in parts]
    return MultiTokenLoss(weighted_sum(groups.weights, losses), torch.stack(losses).detach())
