"""Record what cross entropies compute of each token: its log-probability, log Z and the largest logit of its position.

A cross entropy computes them anyway, in its one pass over the vocabulary. `record_losses` keeps them, for programs that
watch a training run; the loss and its gradients are the same bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from embedlayer.core.collectives import SINGLE_PROCESS, Collectives
from embedlayer.core.shapes import wide_dtype
from embedlayer.core.torch_state import is_in_backward
from embedlayer.losses.objective import Request, Totals, log_probs, logsumexp
from embedlayer.losses.uncomputed_logits import LinearLogits, UncomputedLogits

RECORDED = ("top", "log_sum", "selected")
"""Totals of a token that are recorded."""

SAMPLED = 16
"""Number of tokens whose logits are computed again, for their variance over the vocabulary."""


class TokenRecord(NamedTuple):
    """Hold what one cross entropy computed of N tokens with logits z, without gradient."""

    targets: Tensor
    counted: Tensor | None
    log_probs: Tensor
    logsumexp: Tensor
    largest: Tensor
    variances: Tensor


_records: ContextVar[list[TokenRecord] | None] = ContextVar("records", default=None)


@contextmanager
def record_losses() -> Iterator[list[TokenRecord]]:
    """Context manager: yield a list to which each cross entropy of this thread adds a `TokenRecord`."""
    records: list[TokenRecord] = []
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


def is_recording() -> bool:
    """Return whether a cross entropy of this thread is to be recorded now."""
    return not torch.compiler.is_compiling() and _records.get() is not None and not is_in_backward()


@torch.no_grad()
def record_totals(logits: UncomputedLogits, request: Request, totals: Totals) -> None:
    """Add a record of the totals of all tokens of this rank, `RECORDED` among them."""
    records = _records.get()
    assert records is not None
    assert request.ids is not None
    found = {name: totals[name].detach() for name in RECORDED}
    states = logits.hidden.detach().reshape(-1, logits.hidden.shape[-1])
    variances = _variances_of(logits, states[_sample(request.tokens.mask, len(states))])
    of_target, lse = log_probs(found, found["selected"])[0], logsumexp(found)
    largest = torch.where(lse.isnan(), lse, found["top"])  # a kernel leaves -inf where all logits are NaN
    records.append(TokenRecord(request.ids[:, 0], request.tokens.mask, of_target, lse, largest, variances))


@torch.no_grad()
def record_logits(logits: Tensor, targets: Tensor, counted: Tensor | None) -> None:
    """Add a record of logits `(..., V)` that were computed all at once."""
    records = _records.get()
    assert records is not None
    z = logits.detach().reshape(-1, logits.shape[-1])
    z = z.to(wide_dtype(z.dtype))
    ids = targets.reshape(-1).long()
    counted = None if counted is None else counted.reshape(-1)
    ids = ids if counted is None else ids.where(counted, 0)
    lse = z.logsumexp(-1)
    of_target = z.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - lse
    largest = z.amax(-1) if len(z) else z.new_empty(0)
    records.append(TokenRecord(ids, counted, of_target, lse, largest, _variances(z[_sample(counted, len(z))])))


def _sample(counted: Tensor | None, tokens: int) -> Tensor:
    """Return the indices of up to `SAMPLED` of the tokens that count, spread evenly."""
    if counted is None:
        return torch.arange(min(SAMPLED, tokens)) * tokens // max(min(SAMPLED, tokens), 1)
    places = counted.nonzero()[:, 0]
    return places[_sample(None, len(places))]


def _variances_of(logits: UncomputedLogits, states: Tensor) -> Tensor:
    """Return the variance over the vocabulary of the logits of a few hidden states `(S, D)`, `(S,)`."""
    if not (isinstance(logits, LinearLogits) and logits.is_sharded):
        return _variances(logits.block(states, 0, logits.vocab_size))
    (start, stop), collectives = logits.row_range, logits.collectives
    states = collectives.all_gather(states.to(logits.rows.dtype))  # outside of autocast both must have one dtype
    options = logits.options.of_rows(start, stop)
    of_rank = LinearLogits.of(states, logits.rows, options)
    return _variances(of_rank.block(states, 0, stop - start), collectives)


def _variances(z: Tensor, ranks: Collectives = SINGLE_PROCESS) -> Tensor:
    """Return the variance of the finite logits of each row of `(S, V)`, `(S,)`; of `ranks`, each has some columns."""
    z, is_masked = z.double(), z == -torch.inf
    z = z.masked_fill(is_masked, 0.0)
    sums: Tensor = torch.stack([(~is_masked).sum(-1).double(), z.sum(-1), z.square().sum(-1)])
    count, total, squares = ranks.all_reduce(sums).unbind()
    return (squares - total.square() / count) / count
