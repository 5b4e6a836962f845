"""The loss of targets in groups that have weights of their own: the depths of multi-token prediction, or streams."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from embedlayer.core.documents import AttentionMask, shifted_targets
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.shapes import wide_dtype
from embedlayer.losses.definition import counted_weights
from embedlayer.losses.linear import cross_entropy_of, losses_of_heads, reduced_and_token_losses, targets_of_heads
from embedlayer.losses.options import LossSettings
from embedlayer.losses.targets import finite_or_nan, require_token_weights
from embedlayer.losses.uncomputed_logits import UncomputedLogits


class TargetGroups(NamedTuple):
    """Hold G groups of targets, one after another."""

    targets: Int[Tensor, " N"]
    lengths: Sequence[int]
    weights: Sequence[float] | None = None
    token_weights: Float[Tensor, " N"] | None = None

    def sums(self, x: Num[Tensor, " N"] | Bool[Tensor, " N"]) -> Num[Tensor, " G"]:
        if all(length == self.lengths[0] for length in self.lengths):
            return x.view(len(self.lengths), -1).sum(1)
        return torch.stack([part.sum() for part in torch.split(x, list(self.lengths))])

    def of_each(self, x: Float[Tensor, " G"]) -> Float[Tensor, " N"]:
        return torch.cat([number.expand(length) for number, length in zip(x.unbind(), self.lengths, strict=True)])

    def is_computed(self, group: int) -> bool:
        """Return whether a group that has a head of its own is computed: whether its weight is not 0."""
        return self.weights is None or self.weights[group] != 0


Heads = UncomputedLogits | Sequence[UncomputedLogits]
"""One head, with the hidden states of all groups one after another, or one for each group."""


def token_losses(heads: Heads, groups: TargetGroups, loss: LossSettings) -> list[Float[Tensor, " _"]]:
    """Return the losses of the targets of each group, times the weights of these."""
    loss = loss._replace(reduction="none", token_weights=groups.token_weights)
    if isinstance(heads, UncomputedLogits):
        states = heads.hidden.shape[:-1]
        losses = cross_entropy_of(heads, groups.targets.view(states), _of_states(loss, states)).flatten()
        return list(torch.split(losses, list(groups.lengths)))
    results = []
    for group, (head, targets, options, counted) in enumerate(targets_of_heads(heads, groups.targets, loss)):
        if groups.is_computed(group):
            results.append(reduced_and_token_losses(head, targets, options, counted)[0].flatten())
        else:
            results.append(_zero(head).expand(targets.numel()))
    return results


def reduced_losses(
    heads: Heads, groups: TargetGroups, loss: LossSettings
) -> tuple[Float[Tensor, ""], Float[Tensor, " G"]]:
    """Return the weighted sum of the losses of the groups, and these without gradient, each the mean or the sum."""
    first = heads if isinstance(heads, UncomputedLogits) else heads[0]
    dtype, kept = wide_dtype(first.dtype), groups.targets != loss.ignore_index
    counts = groups.sums(kept).clamp(min=1).to(dtype)
    shares = torch.ones_like(counts) if loss.reduction == "sum" else counts.reciprocal()
    if groups.weights is not None:
        factors = torch.stack([weight * share for weight, share in zip(groups.weights, shares.unbind(), strict=True)])
    else:
        factors = (
            shares if loss.reduction == "sum" else kept.sum().clamp(min=1).to(dtype).reciprocal().expand_as(counts)
        )
    factors, of_tokens = groups.of_each(factors), groups.token_weights
    if of_tokens is not None:
        of_tokens = finite_or_nan(of_tokens.to(dtype))
        factors = factors * of_tokens
    loss = loss._replace(reduction="sum", token_weights=factors)
    if isinstance(heads, UncomputedLogits):
        states = heads.hidden.shape[:-1]
        total, losses = reduced_and_token_losses(heads, groups.targets.view(states), _of_states(loss, states))
    else:
        of_heads = enumerate(targets_of_heads(heads, groups.targets, loss))
        computed = {group: head for group, head in of_heads if groups.is_computed(group)}
        total, parts = losses_of_heads(list(computed.values())) if computed else (_zero(first), [])
        by_group = dict(zip(computed, parts, strict=True))
        lengths = enumerate(groups.lengths)
        losses = torch.cat([by_group[k].flatten() if k in by_group else counts.new_zeros(n) for k, n in lengths])
    losses = losses.flatten()
    if of_tokens is not None:
        losses = losses * counted_weights(of_tokens, kept)
    return total, groups.sums(losses) * shares


def _zero(head: UncomputedLogits) -> Float[Tensor, ""]:
    """Return the loss of a head that is not computed: 0, with a gradient of 0."""
    return head.hidden.flatten()[:0].sum().to(wide_dtype(head.dtype))


def weighted_sum(weights: Sequence[float] | None, parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape times weights, in this order; a product of matrices would have another."""
    total = torch.zeros_like(parts[0])
    for weight, part in zip([1.0] * len(parts) if weights is None else weights, parts, strict=True):
        total = total + weight * part
    return total


def _of_states(loss: LossSettings, states: torch.Size) -> LossSettings:
    """Return the options with the weights of tokens in the shape of the hidden states."""
    weights = loss.token_weights
    return loss if weights is None else loss._replace(token_weights=weights.view(states))


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
