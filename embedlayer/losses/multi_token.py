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


class MultiTokenInputs(NamedTuple):
    """Hold the hidden states of all depths, one after another, with their shifted targets."""

    hidden: Float[Tensor, "N D"]
    targets: list[Int[Tensor, "B _"]]
    weights: list[float]
    token_weights: Float[Tensor, " N"] | None = None


def multi_token_inputs(
    hidden_states: Sequence[Float[Tensor, "B T D"]],
    labels: Int[Tensor, "B T"],
    weights: Sequence[float] | None,
    documents: AttentionMask | None,
    ignore_index: int,
    token_weights: Float[Tensor, "B T"] | None = None,
) -> MultiTokenInputs:
    """Shift labels and weights for each depth, and join all depths; arguments and errors: see `multi_token_loss`."""
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
        targets.append(shifted)
        if token_weights is not None:
            of_tokens.append(token_weights[:, depth + 1 :].flatten())
    return MultiTokenInputs(torch.cat(hidden), targets, weights, torch.cat(of_tokens) if of_tokens else None)


def multi_token_loss_of(logits: UncomputedLogits, inputs: MultiTokenInputs, loss: LossSettings) -> MultiTokenLoss:
    lengths = [each.numel() for each in inputs.targets]
    targets = torch.cat([each.flatten() for each in inputs.targets])
    groups = TargetGroups(targets, lengths, inputs.weights, inputs.token_weights)
    if loss.reduction != "none":
        return MultiTokenLoss(*reduced_losses(logits, groups, loss))
    steps, parts = inputs.targets[0].shape[1] + 1, token_losses(logits, groups, loss)
    losses = [F.pad(x.view(y.shape), (0, steps - y.shape[1])) for x, y in zip(parts, inputs.targets, strict=True)]
    return MultiTokenLoss(weighted_sum(inputs.weights, losses), torch.stack(losses).detach())
