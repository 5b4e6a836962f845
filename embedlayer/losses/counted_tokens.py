"""Which tokens count, and whether their IDs are tokens of the vocabulary.

On a CPU a bad ID raises an error at once, and tokens that do not count are dropped before any product. On an
accelerator both need numbers that only the device knows, so the host waits for it: once, for all of them. It does not
wait while a CUDA graph is captured, in graphs of `torch.compile`, and with `drop_ignored=False`. There all tokens are
computed, those that do not count from hidden states of zeros. A bad ID is recorded on the device and its result is NaN;
the next loss that waits raises the error, and so does `check()` of a table or model (`check_indices`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from embedlayer.core.collectives import Collectives
from embedlayer.core.devices import device_kind
from embedlayer.core.index_checks import (
    checked_copy,
    clamp_and_record_targets,
    raise_if_outside,
    raise_recorded_target,
    target_record,
)
from embedlayer.core.torch_state import is_capturing, plain_operators_only
from embedlayer.kernels.softmax import STATISTICS, check_targets
from embedlayer.losses.token_weights import checked_weights, raise_if_not_finite


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
    """Say which of N tokens count, and which are computed.

    Attributes:
        mask: Mask of the tokens that count, `(N,)`; `None` for all.
        places: Index of these tokens, `(M,)`, if no others are computed. Without it all N tokens are computed; results
            and gradients of those that do not count are zeros.
        others: Mask of those that do not count, `(N,)`, if their IDs are -1, or V for bad ones, for which kernels
            compute the loss 0 or NaN; otherwise `None`.
        of_ranks: What the ranks told each other, if the rows are sharded and it was gathered already.
    """

    mask: Tensor | None = None
    places: Tensor | None = None
    others: Tensor | None = None
    of_ranks: RankFacts | None = None

    def number_of(self, tokens: int) -> int | None:
        """Return how many of `tokens` tokens count; `None` if the host has not counted them."""
        return tokens if self.mask is None else None if self.places is None else len(self.places)

    def computed_of(self, tokens: int) -> int:
        """Return how many of `tokens` tokens are computed."""
        return tokens if self.places is None else len(self.places)


class CheckedIds(NamedTuple):
    """Hold token IDs that were checked, with the tokens that count.

    Attributes:
        ids: The IDs, int64; 0, or `other` of `counted_targets`, for tokens that do not count. Bad IDs of `checked_ids`
            are clamped.
        tokens: The tokens that count; those with a bad ID do not.
        is_bad: Mask of the tokens with a bad ID, in the shape of the tokens; `None` if there is none.
        factors: Factor of each loss in the reduction, its weight included, float32, in the shape of the tokens, if a
            kernel computed it.
        weights: Weights of the tokens after the check of `counted_targets`; `None` for 1.
    """

    ids: Tensor
    tokens: CountedTokens
    is_bad: Tensor | None
    factors: Tensor | None = None
    weights: Tensor | None = None

    @property
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


def counted_tokens(mask: Tensor, *, drop: bool, request: RankRequest | None = None) -> CountedTokens:
    """Return the tokens that count by their mask `(...)`.

    Args:
        mask: Mask of the tokens that count.
        drop: Whether the others should not be computed. An accelerator then waits once, if it may.
        request: What this rank tells the others, if the rows are sharded; gathered where the host waits anyway.
    """
    flat = mask.flatten()
    if not drop or not _may_read(mask):
        return CountedTokens(flat)
    if device_kind(mask) != "cpu":
        others = ~flat
        (left_out,), of_ranks = _read_with_facts(others.sum().view(1), flat.numel(), request)
        return _dropped(flat, others, left_out)._replace(of_ranks=of_ranks)
    return CountedTokens() if bool(flat.all()) else CountedTokens(flat, flat.nonzero().squeeze(1))


def checked_ids(
    ids: Tensor,
    mask: Tensor | None,
    vocab_size: int,
    *,
    drop: bool,
    several: bool = False,
    weights: Tensor | None = None,
    request: RankRequest | None = None,
) -> CheckedIds:
    """Check that the IDs of the tokens that count are tokens of the vocabulary.

    Under `torch.func` transforms, in `torch.export` and on the meta device other IDs are clamped to the first or last
    token. On an accelerator that the host does not wait for they are clamped too, recorded, and marked in `is_bad`.

    Args:
        ids: Token IDs, `(...)`, or with `several` K for each token, `(..., K)`.
        mask: Mask of the tokens that count, `(...)`; `None` for all.
        vocab_size: Number of tokens, V.
        drop: Whether the tokens that do not count should not be computed. An accelerator then waits once, if it may.
        several: Whether each token has K IDs.
        weights: Weights of the tokens, which an accelerator that waits checks too.
        request: See `counted_tokens`.

    Raises:
        TokenIdError: An ID is outside, or one of an earlier loss on the same accelerator was. The message names the
            first one, its row and its column.
        SizeError: On an accelerator that waits, the weight of a token that counts is infinite or NaN.
    """
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
    if drop and _may_read(ids):
        tokens = ids[..., 0].numel() if several else ids.numel()
        found = _read(ids, _flat(mask), _flat(others), vocab_size, tokens, request, weights)
        return CheckedIds(ids, found, None)
    ids, is_bad = clamp_and_record_targets(ids, vocab_size)
    is_bad = is_bad.any(-1) if several else is_bad
    is_good = ~(is_bad if others is None else others | is_bad)
    return CheckedIds(ids, CountedTokens(is_good.flatten()), is_bad)


def counted_targets(
    targets: Tensor,
    vocab_size: int,
    ignore_index: int,
    *,
    drop: bool,
    other: int | None = 0,
    mean: bool = True,
    weights: Tensor | None = None,
    request: RankRequest | None = None,
) -> tuple[Tensor, CheckedIds]:
    """Return the mask of the targets that count, and the result of `checked_ids` for those that are not ignored.

    Args:
        targets: Token IDs or `ignore_index`, `(...)`.
        vocab_size: As in `checked_ids`, as for `drop`.
        ignore_index: Target that is ignored.
        drop: See `checked_ids`.
        other: ID of those that do not count, where bad targets are recorded; `None` for those that
            `CountedTokens.others` describes, if kernels compute.
        mean: Whether the factors are those of a mean; otherwise they are those of a sum.
        weights: Weights of the tokens in the dtype of the losses, which the factors contain; those of tokens that count
            must be finite. Where the host does not read values they are NaN otherwise.
        request: See `counted_tokens`.

    Raises:
        TokenIdError: See `checked_ids`.
        SizeError: The weight of a token that counts is infinite or NaN.
    """
    read = drop and _may_read(targets)
    if weights is not None:
        weights = checked_weights(weights, targets, ignore_index, is_read=read)
    on_cuda = device_kind(targets) == "cuda" and targets.dtype == torch.int64 and targets.numel() > 0
    if not (on_cuda and STATISTICS.applies(targets)) or plain_operators_only():
        mask = targets != ignore_index
        checked = checked_ids(targets, mask, vocab_size, drop=drop, weights=weights, request=request)
        checked = checked._replace(weights=weights)
        if checked.is_bad is None:
            return mask, checked
        return checked.is_counted, checked._replace(ids=checked.ids.masked_fill(~checked.is_counted, other or 0))
    record = target_record(targets.device)
    inputs = targets.contiguous(), weights, record, vocab_size, ignore_index, 0 if read else other, mean, read
    ids, mask, is_bad, factors, numbers = check_targets(*inputs)
    if not read and other is None:
        return mask, CheckedIds(ids, CountedTokens(mask.flatten(), None, is_bad.flatten()), None, factors, weights)
    if not read:
        return mask, CheckedIds(ids, CountedTokens(mask.flatten()), is_bad, factors, weights)
    values, of_ranks = _read_with_facts(numbers, targets.numel(), request)
    bad, left_out = values[len(record)], values[-1]
    _raise_if_bad(ids, vocab_size, record, values, bad)
    if weights is not None and values[-2] > 0:
        raise_if_not_finite(weights, mask)
    tokens = CountedTokens() if left_out <= 0 else _dropped(mask.flatten(), ~mask.flatten(), left_out)
    return mask, CheckedIds(ids, tokens._replace(of_ranks=of_ranks), None, factors, weights)


def _read_numbers(numbers: Tensor) -> list[int]:
    """Return numbers that the device computes. It waits for them."""
    values: list[int] = numbers.tolist()
    return values


def _read_with_facts(numbers: Tensor, tokens: int, request: RankRequest | None) -> tuple[list[int], RankFacts | None]:
    """Return numbers that the device computes, and what the ranks tell each other: one wait for both.

    Args:
        numbers: The numbers, of which the last one is that of the tokens that do not count.
        tokens: Number of tokens.
        request: What this rank tells, if the rows are sharded.
    """
    if request is None:
        return _read_numbers(numbers), None
    values = _read_numbers(torch.cat([numbers, request.gathered(tokens - numbers[-1:]).to(numbers.device)]))
    return values[: len(numbers)], rank_facts(values[len(numbers) :])


def _raise_if_bad(ids: Tensor, vocab_size: int, record: Tensor, values: list[int], bad: int) -> None:
    """Raise the error of a recorded ID, or of the first bad one if there are any; `values` begin with the record."""
    raise_recorded_target(record, values[: len(record)])
    if bad > 0:
        raise_if_outside(ids, vocab_size, "token id")


def _may_read(x: Tensor) -> bool:
    """Return whether the host may read values of `x`, and on an accelerator wait for them."""
    return device_kind(x) != "meta" and not (torch.compiler.is_compiling() or plain_operators_only() or is_capturing(x))


def _flat(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.flatten()


def _read(
    ids: Tensor,
    mask: Tensor | None,
    others: Tensor | None,
    vocab_size: int,
    tokens: int,
    request: RankRequest | None,
    weights: Tensor | None,
) -> CountedTokens:
    """Check IDs and weights on an accelerator and return which of the tokens count: one wait for all numbers.

    Raises:
        TokenIdError: An ID is outside, or one was recorded.
        SizeError: The weight of a token that counts is infinite or NaN.
    """
    record = target_record(ids.device)
    bad_ids = (ids != ids.clamp(0, vocab_size - 1)).sum().view(1)
    numbers = [record, bad_ids]
    if weights is not None and others is not None:
        numbers.append((weights - weights).flatten().masked_fill(others, 0.0).isnan().sum().view(1))
    numbers.append(torch.zeros_like(bad_ids) if others is None else others.sum().view(1))
    values, of_ranks = _read_with_facts(torch.cat(numbers), tokens, request)
    bad, left_out = values[len(record)], values[-1]
    _raise_if_bad(ids, vocab_size, record, values, bad)
    if weights is not None and mask is not None and values[-2] > 0:
        raise_if_not_finite(weights, mask.view(weights.shape))
    counted = CountedTokens() if mask is None or others is None else _dropped(mask, others, left_out)
    return counted._replace(of_ranks=of_ranks)


def _dropped(mask: Tensor, others: Tensor, left_out: int) -> CountedTokens:
    """Return the tokens that count, without waiting for the device.

    Args:
        mask: Mask of the tokens that count, `(N,)`.
        others: Mask of those that do not.
        left_out: Their number.
    """
    if left_out <= 0:
        return CountedTokens()
    places = others.view(torch.uint8).sort(stable=True).indices
    return CountedTokens(mask, places[: len(mask) - left_out])
