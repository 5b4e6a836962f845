"""Targets: which tokens count, whether their IDs are tokens of the vocabulary, and the weights of their losses.

On a CPU a bad ID raises an error at once, and tokens that do not count are dropped before any product. On an
accelerator both need numbers that only the device knows: the host waits for it once, for all of them. It does not wait
while a CUDA graph is captured, in graphs of `torch.compile`, and with `drop_ignored=False`. There all tokens are
computed, those that do not count from hidden states of zeros. A bad ID is recorded on the device and its result is NaN;
the next loss that waits raises the error, and so does `check()` of a table or model (`check_indices`).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.core.collectives import Collectives
from embedlayer.core.devices import device_kind
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.index_checks import (
    checked_copy,
    clamp_and_record,
    raise_if_outside,
    raise_recorded_target,
    target_record,
)
from embedlayer.core.torch_state import (
    count_dispatch_modes,
    fusible,
    has_memory,
    is_capturing,
    plain_operators_only,
)
from embedlayer.kernels.softmax import STATISTICS, check_targets
from embedlayer.losses.options import LossSettings


class RankFacts(NamedTuple):
    """What the ranks of sharded rows tell each other before a pass over the vocabulary.

    Attributes:
        counts: Number of tokens that each rank computes.
        gradients: Whether any rank requests a gradient.
        hidden: Whether any rank requests the gradient of its hidden states.
    """

    counts: list[int]
    gradients: bool
    hidden: bool


class RankRequest(NamedTuple):
    """What a rank of sharded rows tells the others before a pass, besides the number of tokens that it computes.

    Attributes:
        ranks: The ranks.
        gradients: Whether this rank requests a gradient.
        hidden: Whether it requests the gradient of its hidden states.
    """

    ranks: Collectives
    gradients: bool
    hidden: bool

    def gathered(self, count: Tensor) -> Tensor:
        """All-gather what the ranks tell, one integer of each rank, without waiting for the device.

        Args:
            count: Number of tokens that this rank computes, int64 `(1,)`.
        """
        codes = (count * 4 + (2 * self.gradients + self.hidden)).to(self.ranks.device)
        return self.ranks.all_gather(codes, [1] * self.ranks.size)

    def facts(self, count: int) -> RankFacts:
        """Return what all ranks tell, for a rank that knows its number of tokens. It waits for the device once."""
        return rank_facts(_read_numbers(self.gathered(torch.full((1,), count, device=self.ranks.device))))


def rank_facts(codes: list[int]) -> RankFacts:
    """Return what the ranks tell from the numbers of `RankRequest.gathered`."""
    return RankFacts([code // 4 for code in codes], any(code & 2 for code in codes), any(code & 1 for code in codes))


class CountedTokens(NamedTuple):
    """Say which of N tokens count, and which are computed."""

    mask: Tensor | None = None
    # `(M,)`, the computed tokens; `None`: all N are computed, the others with result and gradient 0
    places: Tensor | None = None
    # those that do not count, if kernels know them by ID: -1, or V for a bad ID (loss NaN)
    others: Tensor | None = None
    of_ranks: RankFacts | None = None
    is_empty: Tensor | None = None

    def number_of(self, tokens: int) -> int | None:
        return tokens if self.mask is None else None if self.places is None else len(self.places)

    def computed_of(self, tokens: int) -> int:
        return tokens if self.places is None else len(self.places)


class CheckedIds(NamedTuple):
    """Hold token IDs that were checked, with the tokens that count."""

    ids: Tensor  # int64; 0, or `other`, where a token does not count; bad IDs are clamped
    tokens: CountedTokens
    is_bad: Tensor | None
    factors: Tensor | None = None
    weights: Tensor | None = None

    # no property: graphs of torch 2.9 read none of a named tuple
    def is_counted(self) -> Tensor:
        """Return the mask of the tokens that count, in the shape of the tokens; only where `is_bad` is not `None`."""
        assert self.tokens.mask is not None
        assert self.is_bad is not None
        return self.tokens.mask.view(self.is_bad.shape)

    def marked(self, result: Tensor) -> Tensor:
        """Return a result of each token with NaN where the ID is bad; a scalar is NaN if any ID is."""
        if self.is_bad is None:
            return result
        is_bad = self.is_bad if result.dim() else self.is_bad.any()
        return result.masked_fill(is_bad, torch.nan)

    def by_row(self, kept: Tensor) -> list[tuple[Tensor, "CheckedIds"]]:
        """Return mask and IDs of the tokens of each of several heads; with others to drop, the host waits once more."""
        tokens, masks = self.tokens, kept.unbind()
        counted = [CountedTokens()] * len(masks)
        if tokens.places is not None:
            others = ~kept
            left_out = _read_numbers(others.sum(1))
            counted = [_dropped(*each) for each in zip(masks, others.unbind(), left_out, strict=True)]
        elif tokens.mask is not None:
            by_row = [None] * len(masks) if tokens.others is None else tokens.others.view(kept.shape).unbind()
            counted = [
                CountedTokens(mask, None, others, is_empty=tokens.is_empty)
                for mask, others in zip(masks, by_row, strict=True)
            ]
        ids, *rest = (
            [None] * len(masks) if x is None else x.unbind()
            for x in (self.ids, self.is_bad, self.factors, self.weights)
        )
        parts = zip(ids, counted, *rest, strict=True)
        return [(mask, CheckedIds(*part)) for mask, part in zip(masks, parts, strict=True)]

    def viewed(self, shape: torch.Size) -> "CheckedIds":
        """Return the same IDs with the tokens in another shape."""
        ids, tokens, *rest = self
        return CheckedIds(ids.view(shape), tokens, *(None if x is None else x.view(shape) for x in rest))


Counted = tuple[Tensor | None, CheckedIds]
"""Mask of the targets that count, `None` if all do, and the checked targets, as `counted_targets` returns them."""


def counted_tokens(mask: Tensor, *, drop: bool | None, request: RankRequest | None = None) -> CountedTokens:
    flat = mask.flatten()
    if not is_read(mask, drop):
        return CountedTokens(flat)
    if device_kind(mask) == "cpu":
        return CountedTokens() if bool(flat.all()) else CountedTokens(flat, flat.nonzero().squeeze(1))
    others, record = ~flat, target_record(mask.device)
    numbers = torch.cat([record, others.sum().view(1)])
    (*recorded, left_out), of_ranks = _read_with_facts(numbers, flat.numel(), request)
    raise_recorded_target(record, recorded)
    return _dropped(flat, others, left_out)._replace(of_ranks=of_ranks)


def checked_ids(
    ids: Tensor,
    mask: Tensor | None,
    vocab_size: int,
    *,
    drop: bool | None,
    several: bool = False,
    weights: Tensor | None = None,
    request: RankRequest | None = None,
) -> CheckedIds:
    """Check that the IDs of the tokens that count are tokens of the vocabulary."""
    # Bad IDs are clamped under transforms, in exports and where the host does not wait; there `is_bad` marks them.
    others = None if mask is None else ~mask
    if others is not None:
        ids = ids.masked_fill(others.unsqueeze(-1) if several else others, 0)
    ids = ids.long()
    if plain_operators_only() or device_kind(ids) == "meta":
        return CheckedIds(ids.clamp(0, vocab_size - 1), CountedTokens(_flat(mask)), None)
    if device_kind(ids) == "cpu":
        if torch.compiler.is_compiling():
            return CheckedIds(checked_copy(ids, vocab_size, "token id"), CountedTokens(_flat(mask)), None)
        raise_if_outside(ids, vocab_size, "token id")
        return CheckedIds(ids, CountedTokens() if mask is None else counted_tokens(mask, drop=drop), None)
    if is_read(ids, drop):
        tokens = ids[..., 0].numel() if several else ids.numel()
        return CheckedIds(ids, _read(ids, _flat(mask), _flat(others), vocab_size, tokens, request, weights), None)
    ids, is_bad = clamp_and_record(ids, vocab_size, target_record(ids.device))
    is_bad = is_bad.any(-1) if several else is_bad
    is_good = ~(is_bad if others is None else others | is_bad)
    return CheckedIds(ids, CountedTokens(is_good.flatten()), is_bad)


def counted_targets(
    targets: Tensor,
    vocab_size: int,
    loss: LossSettings,
    *,
    drop: bool | None,
    other: int | None = 0,
    request: RankRequest | None = None,
) -> tuple[Tensor | None, CheckedIds]:
    """Return the mask of the targets that count, and the result of `checked_ids` for those that are not ignored.

    The mask is `None` where the host knows that all count.
    """
    ignore_index, weights = loss.ignore_index, loss.token_weights
    if _are_tokens(targets, vocab_size, ignore_index):
        if weights is not None:
            weights = checked_weights(weights, targets, ignore_index)
        return None, CheckedIds(targets.long(), CountedTokens(), None, None, weights)
    read = is_read(targets, drop)
    on_cuda = device_kind(targets) == "cuda" and targets.dtype == torch.int64 and targets.numel() > 0
    by_kernel = on_cuda and STATISTICS.applies(targets) and not plain_operators_only()
    if weights is not None:  # with `other=None` the kernel's factors alone are used, which are NaN for infinite ones
        weights = checked_weights(weights, targets, ignore_index, is_read=read or (by_kernel and other is None))
    if not by_kernel:
        mask = targets != ignore_index
        checked = checked_ids(targets, mask, vocab_size, drop=drop, weights=weights, request=request)
        checked = checked._replace(weights=weights)
        if checked.is_bad is None:
            return mask, checked
        return checked.is_counted(), checked._replace(ids=checked.ids.masked_fill(~checked.is_counted(), other or 0))
    record = target_record(targets.device)
    inputs = targets.contiguous(), weights, record, vocab_size, ignore_index, 0 if read else other
    ids, mask, is_bad, factors, numbers, is_empty = check_targets(*inputs, loss.reduction == "mean", read)
    if not read and other is None:
        found = CountedTokens(mask.flatten(), None, is_bad.flatten(), is_empty=is_empty)
        return mask, CheckedIds(ids, found, None, factors, weights)
    if not read:
        return mask, CheckedIds(ids, CountedTokens(mask.flatten(), is_empty=is_empty), is_bad, factors, weights)
    values, of_ranks = _read_with_facts(numbers, targets.numel(), request)
    bad, left_out = values[len(record)], values[-1]
    _raise_if_bad(ids, vocab_size, record, values, bad)
    if weights is not None and values[-2] > 0:
        raise_if_not_finite(weights, mask)
    tokens = CountedTokens() if left_out <= 0 else _dropped(mask.flatten(), ~mask.flatten(), left_out)
    return mask, CheckedIds(ids, tokens._replace(of_ranks=of_ranks), None, factors, weights)


def _are_tokens(targets: Tensor, vocab_size: int, ignore_index: int) -> bool:
    """Return whether the host can read targets without a wait, and all are tokens that count."""
    if device_kind(targets) != "cpu" or not has_memory(targets) or not targets.numel():
        return False
    if not fusible(targets) or plain_operators_only() or count_dispatch_modes() or 0 <= ignore_index < vocab_size:
        return False
    low, high = torch.aminmax(targets)
    return bool(low.item() >= 0 and high.item() < vocab_size)


def _read_numbers(numbers: Tensor) -> list[int]:
    """Return numbers that the device computes. It waits for them."""
    values: list[int] = numbers.tolist()
    return values


def _read_with_facts(numbers: Tensor, tokens: int, request: RankRequest | None) -> tuple[list[int], RankFacts | None]:
    """Return numbers that the device computes, and what the ranks tell each other: one wait for both."""
    if request is None:
        return _read_numbers(numbers), None
    values = _read_numbers(torch.cat([numbers, request.gathered(tokens - numbers[-1:]).to(numbers.device)]))
    return values[: len(numbers)], rank_facts(values[len(numbers) :])


def _raise_if_bad(ids: Tensor, vocab_size: int, record: Tensor, values: list[int], bad: int) -> None:
    """Raise the error of a recorded ID, or of the first bad one if there are any; `values` begin with the record."""
    raise_recorded_target(record, values[: len(record)])
    if bad > 0:
        raise_if_outside(ids, vocab_size, "token id")


def is_read(x: Tensor, drop: bool | None) -> bool:
    """Return whether the host reads numbers of a loss at once, and on an accelerator waits for them."""
    # All ranks must decide the same, or their collectives do not match.
    is_in_graph = torch.compiler.is_compiling() or plain_operators_only() or is_capturing(x)
    return drop is not False and device_kind(x) != "meta" and not is_in_graph


def _flat(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.flatten()


def _number_of(others: Tensor | None, like: Tensor) -> Tensor:
    """Return the number of tokens that do not count, int64 `(1,)`; 0 on the device of `like` for `None`."""
    return torch.zeros(1, dtype=torch.int64, device=like.device) if others is None else others.sum().view(1)


def _read(
    ids: Tensor,
    mask: Tensor | None,
    others: Tensor | None,
    vocab_size: int,
    tokens: int,
    request: RankRequest | None,
    weights: Tensor | None,
) -> CountedTokens:
    """Check IDs and weights on an accelerator and return which of the tokens count: one wait for all numbers."""
    record = target_record(ids.device)
    bad_ids = (ids != ids.clamp(0, vocab_size - 1)).sum().view(1)
    numbers = [record, bad_ids]
    if weights is not None and others is not None:
        numbers.append((weights - weights).flatten().masked_fill(others, 0.0).isnan().sum().view(1))
    numbers.append(_number_of(others, ids))
    values, of_ranks = _read_with_facts(torch.cat(numbers), tokens, request)
    bad, left_out = values[len(record)], values[-1]
    _raise_if_bad(ids, vocab_size, record, values, bad)
    if weights is not None and mask is not None and values[-2] > 0:
        raise_if_not_finite(weights, mask.view(weights.shape))
    counted = CountedTokens() if mask is None or others is None else _dropped(mask, others, left_out)
    return counted._replace(of_ranks=of_ranks)


def _dropped(mask: Tensor, others: Tensor, left_out: int) -> CountedTokens:
    """Return the tokens that count, without waiting for the device."""
    if left_out <= 0:
        return CountedTokens()
    places = others.view(torch.uint8).sort(stable=True).indices
    return CountedTokens(mask, places[: len(mask) - left_out])


def require_token_weights(weights: Tensor, targets: Tensor, name: str = "targets") -> None:
    """Check shape, dtype and device of weights of tokens; their values are not read."""
    fits = weights.shape == targets.shape and weights.is_floating_point() and weights.device == targets.device
    if fits and not weights.requires_grad:
        return
    found = f"{str(weights.dtype).removeprefix('torch.')} of shape {tuple(weights.shape)} on {weights.device}"
    found += " with gradient: pass weights.detach()" if weights.requires_grad else ""
    raise ShapeError(
        f"token_weights must be floats {tuple(targets.shape)} on {targets.device} without gradient; found {found}."
    )


def checked_weights(
    weights: Float[Tensor, "*batch"], targets: Int[Tensor, "*batch"], ignore_index: int, *, is_read: bool = False
) -> Float[Tensor, "*batch"]:
    """Check that the weights of targets that are not ignored are finite, as far as it needs no wait for a device."""
    # Where values are not read (accelerators, transforms, exports), infinite weights are returned as NaN.
    if device_kind(weights) != "cpu" or plain_operators_only():
        return weights if is_read else finite_or_nan(weights)
    kept = targets != ignore_index
    if torch.compiler.is_compiling():
        copy: Tensor = _finite_copy(weights, kept)
        return copy
    raise_if_not_finite(weights, kept)
    return weights


def finite_or_nan(weights: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Return the weights with NaN for infinite ones, where nothing may read their values."""
    return weights - weights + weights


def raise_if_not_finite(weights: Float[Tensor, "*batch"], kept: Bool[Tensor, "*batch"]) -> None:
    """Raise an error for the first infinite weight or NaN of a token that counts. It waits for a device."""
    is_bad = kept & ~weights.isfinite()
    if not bool(is_bad.any()):
        return
    place, length = int(is_bad.flatten().nonzero()[0]), weights.shape[-1] if weights.dim() else 1
    raise SizeError(
        f"token_weights: {weights.flatten()[place].item()} at row {place // length}, column {place % length} is not "
        f"finite in {str(weights.dtype).removeprefix('torch.')}. Only those of ignored targets may be infinite or NaN."
    )


@torch.library.custom_op("embedlayer::finite_copy", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _finite_copy(weights: Tensor, kept: Tensor) -> Tensor:
    """Call `raise_if_not_finite` as a custom operator, and return a copy of the weights."""
    raise_if_not_finite(weights, kept)
    return weights.clone()


@_finite_copy.register_fake
def _(weights: Tensor, kept: Tensor) -> Tensor:
    return torch.empty_like(weights)
