"""The K largest logits with their token IDs, exact; of equal logits the one with the lowest ID comes first."""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from embedlayer.errors import SizeError
from embedlayer.tracing import plain_operators_only

GROUP = 16
"""Number of neighbouring logits whose maximum is looked at first."""
SPARE_CANDIDATES = 16
"""How many more than K logits are looked at, so that equal logits at the K-th place seldom need a sort of all."""


def check_top_k(k: int, vocab_size: int) -> None:
    """Check that K is a number of tokens that a vocabulary has.

    Raises:
        SizeError: K is below 1 or above V.
    """
    if not 1 <= k <= vocab_size:
        raise SizeError(f"top_k must be from 1 to the {vocab_size} tokens of the vocabulary, not {k}.")


def top_k(logits: Float[Tensor, "*batch V"], k: int) -> tuple[Float[Tensor, "*batch K"], Int[Tensor, "*batch K"]]:
    """Return the K largest logits along the last dimension, largest first, and their indices.

    Of equal logits the one with the lowest index comes first. `torch.topk` leaves that order open.

    Args:
        logits: Any numbers, `(..., V)`.
        k: How many, from 1 to V.

    Returns:
        The logits and their indices, each `(..., K)`.

    Raises:
        SizeError: `k` is below 1 or above V.

    Example:
        >>> top_k(torch.tensor([1.0, 3.0, 2.0, 3.0]), 2)[1]
        tensor([1, 3])
    """
    size = logits.shape[-1]
    check_top_k(k, size)
    if k == 1:  # of equal maxima, torch returns the first
        values, ids = logits.max(dim=-1, keepdim=True)
        return values, ids
    if torch.compiler.is_compiling() or plain_operators_only():
        return _first(*logits.sort(dim=-1, descending=True, stable=True), k)
    if size >= 4 * GROUP * k:
        return _by_groups(logits, k)
    values, ids = logits.topk(min(k + SPARE_CANDIDATES, size), dim=-1)
    best, best_ids = ordered_top_k(values, ids, k)
    if values.shape[-1] < size:
        unresolved = values[..., k - 1] == values[..., -1]  # equal logits may be left among the others
        if bool(unresolved.any()):
            exact = _first(*logits[unresolved].sort(dim=-1, descending=True, stable=True), k)
            best, best_ids = best.clone(), best_ids.clone()
            best[unresolved], best_ids[unresolved] = exact
    return best, best_ids


def _by_groups(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the K largest logits and their indices, by way of the K groups of `GROUP` logits with the largest maxima.

    A logit of another group is smaller than K maxima, or equal to some and behind them. So it is not among the K.
    """
    groups = logits.shape[-1] // GROUP
    _, chosen = top_k(logits[..., : groups * GROUP].detach().unflatten(-1, (groups, GROUP)).amax(-1), k)
    members = torch.arange(GROUP, device=logits.device)
    ids = (chosen.sort(dim=-1).values.unsqueeze(-1) * GROUP + members).flatten(-2)
    rest = torch.arange(groups * GROUP, logits.shape[-1], device=logits.device)
    ids = torch.cat([ids, rest.expand(*ids.shape[:-1], -1)], dim=-1)
    values, places = top_k(logits.gather(-1, ids), k)
    return values, ids.gather(-1, places)


def ordered_top_k(
    values: Shaped[Tensor, "*batch N"], ids: Int[Tensor, "*batch N"], k: int
) -> tuple[Shaped[Tensor, "*batch K"], Int[Tensor, "*batch K"]]:
    """Return the K largest of some logits with given token IDs; of equal logits the lowest ID comes first.

    Args:
        values: Logits, `(..., N)`.
        ids: Their token IDs, `(..., N)`, all different.
        k: How many, at most N.
    """
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return _first(values, ids.gather(-1, order), k)


def _first(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the first K entries of both tensors along their last dimension."""
    return values[..., :k], ids[..., :k]
