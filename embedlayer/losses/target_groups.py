"""The loss of targets in groups that have weights of their own: the depths of multi-token prediction, or streams."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.losses.definition import loss_dtype
from embedlayer.losses.linear import cross_entropy_of, reduced_and_token_losses
from embedlayer.losses.options import LossSettings
from embedlayer.losses.token_weights import counted_weights, finite_or_nan
from embedlayer.losses.uncomputed_logits import UncomputedLogits


class TargetGroups(NamedTuple):
    """Hold G groups of targets.

    Attributes:
        targets: Token IDs or `ignore_index` of each group.
        weights: Factor of the loss of each group; `None` for the mean, or the sum, over the targets of all groups. A
            group of weight 0 is not computed if it has a head of its own: its losses are 0.
        token_weights: Factor of the loss of each target, in the shapes of `targets`; `None` for 1.
    """

    targets: Sequence[Int[Tensor, "*_"]]
    weights: Sequence[float] | None = None
    token_weights: Sequence[Float[Tensor, "*_"]] | None = None


def token_losses(heads: Sequence[UncomputedLogits], groups: TargetGroups, loss: LossSettings) -> list[Tensor]:
    """Return the loss of each target of each group, times its own weight, in the shapes of the targets.

    Args:
        heads: One head, with the hidden states of all groups one after another; or one for each group.
        groups: Targets and their weights.
        loss: Options of the loss; weights of tokens are those of `groups`.

    Raises:
        TokenIdError: A target is neither a token nor `ignore_index`; on CUDA where the call waits, else later.
        SizeError: Two options exclude each other, or the weight of a target is infinite or NaN.
        ShapeError: The targets have another shape than the hidden states.
    """
    results = []
    loss = loss._replace(reduction="none")
    for head, of_head in _by_head(heads, groups):
        targets = _joined(of_head.targets, head)
        of_tokens = None if of_head.token_weights is None else _joined(of_head.token_weights, head)
        if of_head.weights is not None and not any(of_head.weights) and len(heads) > 1:
            found = torch.zeros(targets.shape, dtype=loss_dtype(head.dtype), device=targets.device)
        else:
            found = cross_entropy_of(head, targets, loss._replace(token_weights=of_tokens))
        results += _divided(found, of_head.targets)
    return results


def reduced_losses(
    heads: Sequence[UncomputedLogits], groups: TargetGroups, loss: LossSettings
) -> tuple[Float[Tensor, ""], Float[Tensor, " G"]]:
    """Return the weighted sum of the losses of the groups, and these without gradient, each the mean or the sum.

    Arguments and errors are those of `token_losses`.
    """
    dtype = loss_dtype(heads[0].dtype)
    counts = torch.stack([(each != loss.ignore_index).sum() for each in groups.targets]).to(dtype)
    shares = torch.ones_like(counts) if loss.reduction == "sum" else counts.clamp(min=1).reciprocal()
    if groups.weights is not None:
        factors = [weight * share for weight, share in zip(groups.weights, shares.unbind(), strict=True)]
    else:
        of_all = shares if loss.reduction == "sum" else counts.sum().clamp(min=1).reciprocal().expand(len(counts))
        factors = list(of_all.unbind())
    weights = groups.token_weights
    of_tokens = None if weights is None else [finite_or_nan(each.to(dtype)) for each in weights]
    factors = [each.expand(targets.shape) for each, targets in zip(factors, groups.targets, strict=True)]
    if of_tokens is not None:
        factors = [each * of_token for each, of_token in zip(factors, of_tokens, strict=True)]
    loss, totals, losses = loss._replace(reduction="sum"), [], []
    for head, of_head in _by_head(heads, groups._replace(token_weights=factors)):
        if of_head.weights is not None and not any(of_head.weights) and len(heads) > 1:
            losses += [counts.new_zeros(each.shape) for each in of_head.targets]
            continue
        assert of_head.token_weights is not None
        targets, of_targets = _joined(of_head.targets, head), _joined(of_head.token_weights, head)
        total, of_tokens_alone = reduced_and_token_losses(head, targets, loss._replace(token_weights=of_targets))
        totals.append(total)
        losses += _divided(of_tokens_alone, of_head.targets)
    if of_tokens is not None:
        kept = [each != loss.ignore_index for each in groups.targets]
        losses = [x * counted_weights(*pair) for x, *pair in zip(losses, of_tokens, kept, strict=True)]
    total = weighted_sum(None, totals) if totals else counts.new_zeros(())
    return total, torch.stack([each.sum() for each in losses]) * shares


def weighted_sum(weights: Sequence[float] | None, parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape times weights, in this order; a product of matrices would have another."""
    total = torch.zeros_like(parts[0])
    for weight, part in zip([1.0] * len(parts) if weights is None else weights, parts, strict=True):
        total = total + weight * part
    return total


def _by_head(
    heads: Sequence[UncomputedLogits], groups: TargetGroups
) -> Iterator[tuple[UncomputedLogits, TargetGroups]]:
    """Yield each head with its groups."""
    if len(heads) == 1:
        yield heads[0], groups
        return
    for place, head in enumerate(heads):
        yield head, TargetGroups(*(None if each is None else each[place : place + 1] for each in groups))  # type: ignore[arg-type]


def _joined(parts: Sequence[Tensor], head: UncomputedLogits) -> Tensor:
    """Return numbers of the targets of all groups of a head, in the shape of its tokens."""
    flat = parts[0].flatten() if len(parts) == 1 else torch.cat([each.flatten() for each in parts])
    return flat.view(head.hidden.shape[:-1]) if flat.numel() == head.hidden.shape[:-1].numel() else flat


def _divided(x: Tensor, targets: Sequence[Tensor]) -> list[Tensor]:
    """Return what `_joined` joined, in the shapes of the targets."""
    parts = x.flatten().split([each.numel() for each in targets])
    return [part.view(each.shape) for part, each in zip(parts, targets, strict=True)]
