"""The loss of multi-token prediction: several hidden states per position, shifted targets, one head, one pass."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.errors import ShapeError, SizeError
from embedlayer.losses.cross_entropy import loss_dtype
from embedlayer.losses.linear_cross_entropy import weighted_cross_entropy
from embedlayer.losses.uncomputed_logits import UncomputedLogits


class MultiTokenLoss(NamedTuple):
    """Hold the loss of multi-token prediction.

    Attributes:
        loss: `sum over k of weights[k] * losses[k]`, a scalar in nats.
        losses: Mean cross entropy of each depth, `(depths,)`, without gradient; 0 for a depth without targets.
    """

    loss: Float[Tensor, ""]
    losses: Float[Tensor, " depths"]


class MultiTokenInputs(NamedTuple):
    """Hold the hidden states of all depths, one after another, with their shifted targets.

    Attributes:
        hidden: Hidden states, `(N, D)`.
        targets: Token IDs or `ignore_index`, `(N,)`.
        factors: Weight of the depth divided by its number of targets, `(N,)`.
        lengths: Number of positions of each depth; they sum to N.
        counts: Number of targets of each depth that are not ignored, `(depths,)`.
    """

    hidden: Float[Tensor, "N D"]
    targets: Int[Tensor, " N"]
    factors: Float[Tensor, " N"]
    lengths: list[int]
    counts: Int[Tensor, " depths"]


def multi_token_inputs(
    hidden_states: Sequence[Float[Tensor, "B T D"]],
    labels: Int[Tensor, "B T"],
    weights: Sequence[float] | None,
    ignore_index: int,
) -> MultiTokenInputs:
    """Shift the labels for each depth, and join all depths; arguments and errors are those of `multi_token_loss`."""
    weights = [1.0] * len(hidden_states) if weights is None else list(weights)
    if len(weights) != len(hidden_states) or not weights:
        raise SizeError(f"{len(hidden_states)} depths and {len(weights)} weights: pass one weight for each depth.")
    hidden, targets, factors, counts = [], [], [], []
    for depth, (states, weight) in enumerate(zip(hidden_states, weights, strict=True)):
        if states.shape[:-1] != labels.shape:
            raise ShapeError(
                f"labels are {tuple(labels.shape)}, and the hidden states of depth {depth} {tuple(states.shape)}: they "
                f"must be (B, T) and (B, T, D)."
            )
        shifted = labels[:, 1 + depth :]
        count = (shifted != ignore_index).sum()
        hidden.append(states[:, : shifted.shape[1]].flatten(0, 1))
        targets.append(shifted.flatten())
        dtype = loss_dtype(states.dtype)
        factors.append((weight / count.clamp(min=1).to(dtype)).expand(shifted.numel()))
        counts.append(count)
    lengths = [len(each) for each in targets]
    return MultiTokenInputs(torch.cat(hidden), torch.cat(targets), torch.cat(factors), lengths, torch.stack(counts))


def multi_token_loss_of(logits: UncomputedLogits, inputs: MultiTokenInputs, ignore_index: int) -> MultiTokenLoss:
    """Compute the loss of `multi_token_loss`, for `logits` of the hidden states of `inputs`.

    Raises:
        TokenIdError: A label is neither a token nor `ignore_index`.
    """
    loss, losses = weighted_cross_entropy(logits, inputs.targets, inputs.factors, {"ignore_index": ignore_index})
    sums = torch.stack([each.sum() for each in losses.split(inputs.lengths)])
    return MultiTokenLoss(loss, sums / inputs.counts.clamp(min=1))
