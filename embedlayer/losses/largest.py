"""The K largest logits with their token IDs, exact; of equal logits the one with the lowest ID comes first."""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.errors import SizeError
from embedlayer.core.torch_state import plain_operators_only

GROUP = 16  # number of neighbouring logits whose maximum is looked at first
LEAST_GROUPED = 2048  # of fewer logits `torch.topk` is faster without groups


def check_top_k(k: int, vocab_size: int) -> None:
    """Check that K is a number of tokens that a vocabulary has."""
    if not 1 <= k <= vocab_size:
        raise SizeError(f"top_k must be from 1 to the {vocab_size} tokens of the vocabulary, not {k}.")


def top_k(logits: Float[Tensor, "*batch V"], k: int) -> tuple[Float[Tensor, "*batch K"], Int[Tensor, "*batch K"]]:
    """Return the K largest logits along the last dimension, largest first, and their indices.

    Of equal logits the one with the lowest index comes first. `torch.topk` leaves that order open. Nearest rows by
    cosine similarity are ordered in this way too.

    Args:
        logits: Any numbers, `(..., V)`.
        k: How many, from 1 to V.

    Returns:
        The logits and their indices, each `(..., K)`.

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
    ids = _ids_of_largest(logits.detach(), k)
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _ids_of_largest(logits: Tensor, k: int) -> Tensor:
    """Return the indices of the K largest logits in ascending order, `(..., K)`; the first of equal logits."""
    # Only the K groups with the largest maxima are searched: any other logit is below K maxima, or equal and behind.
    size = logits.shape[-1]
    if size >= max(4 * GROUP * k, LEAST_GROUPED):
        ids = _members(_ids_of_largest(_maxima(logits), k), size)
        return ids.gather(-1, _ids_of_largest(logits.gather(-1, ids), k))
    if device_kind(logits) != "cpu":  # without waiting for the device
        return logits.sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(dim=-1).values
    values, ids = logits.topk(k, dim=-1)
    if size > k:
        is_open = (logits >= values[..., -1:]).sum(-1) > k  # logits equal to the last are left among the others
        if bool(is_open.any()):
            ids[is_open] = logits[is_open].sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return ids.sort(dim=-1).values


def _maxima(logits: Tensor) -> Tensor:
    """Return the maximum of each whole group, `(..., V // GROUP)`; groups are consecutive."""
    groups = logits.shape[-1] // GROUP
    whole = logits[..., : groups * GROUP]
    if whole.stride(-1) == 1:
        maxima: Tensor = whole.unflatten(-1, (groups, GROUP)).amax(-1)
    else:  # as blocks of logits are stored
        maxima = whole.movedim(-1, 0).unflatten(0, (groups, GROUP)).amax(1).movedim(0, -1)
    return maxima


def _members(groups: Tensor, size: int) -> Tensor:
    """Return the indices of all logits in some groups, and of those in no whole group, in ascending order."""
    ids = (groups.unsqueeze(-1) * GROUP + torch.arange(GROUP, device=groups.device)).flatten(-2)
    rest = torch.arange(size // GROUP * GROUP, size, device=groups.device)
    return torch.cat([ids, rest.expand(*ids.shape[:-1], -1)], dim=-1)


def ordered_top_k(
    values: Shaped[Tensor, "*batch N"], ids: Int[Tensor, "*batch N"], k: int
) -> tuple[Shaped[Tensor, "*batch K"], Int[Tensor, "*batch K"]]:
    """Return the K largest of some logits with given token IDs; of equal logits the lowest ID comes first."""
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return _first(values, ids.gather(-1, order), k)


def _first(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the first K entries of both tensors along their last dimension."""
    return values[..., :k], ids[..., :k]
