"""Divergence between a student's and a teacher's distribution over one vocabulary, without the logits of either."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.losses.definition import reduce_losses
from embedlayer.losses.differentiable_totals import compute_loss, compute_totals, plain_totals
from embedlayer.losses.divergence_kinds import Divergence, ForwardKL
from embedlayer.losses.logit_arguments import Logits, resolve_logits
from embedlayer.losses.logit_statistics import LogitStatistics
from embedlayer.losses.next_bytes import NextByte, NextBytes, check_next_bytes
from embedlayer.losses.objective import Request, event_log_probs, log_probs
from embedlayer.losses.options import LossOptions, LossSettings, Reduction, check_options
from embedlayer.losses.padding import padded_tokens
from embedlayer.losses.targets import CountedTokens, checked_ids, counted_tokens
from embedlayer.losses.uncomputed_logits import LinearLogits, UncomputedLogits, check_ids, is_plain


class TopKTargets(NamedTuple):
    """Hold a teacher's K most likely tokens and their log-probabilities, as servers and caches store them.

    Attributes:
        ids: Token IDs, `(..., K)`.
        log_probs: Their log-probabilities under the teacher in nats, `(..., K)`. They may sum to less than 1.
    """

    ids: Int[Tensor, "*batch K"]
    log_probs: Float[Tensor, "*batch K"]


def divergence(
    student: Logits,
    teacher: Logits | TopKTargets,
    kind: Divergence | NextByte | None = None,
    *,
    labels: Int[Tensor, "*batch"] | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk_bytes: int | None = None,
    drop_ignored: bool | None = None,
) -> Float[Tensor, "*result"]:
    """Compute the divergence between the distributions of two heads at each position, in nats.

    The heads may have different widths, formats, temperatures and soft caps, and must have one vocabulary; with
    `NextByte` they may have two. Gradients
    reach the student's hidden states and rows; the teacher is a constant. With `TopKTargets` the sum is over the
    teacher's K tokens: `sum over k of p_k (log p_k - log q_k)` for `ForwardKL`.

    Args:
        student: Logits of the model that is trained: `outputs.logits` (of a patched model they are not computed),
            `head.uncomputed_logits(hidden)`, `LinearLogits`, or a pair `(hidden, head)` or `(hidden, weight)`.
        teacher: The same of the other model, or a teacher's most likely tokens.
        kind: `ForwardKL()`, the default, `ReverseKL()` or `JensenShannon(beta)`; or `NextByte(...)` of one of these.
        labels: Token IDs `(...)`; positions with `ignore_index` do not count. `None` if all count.
        ignore_index: Label of a position that does not count.
        reduction: `"mean"` over the counted positions (0 if there are none), `"sum"`, or `"none"`.
        chunk_bytes: See `ScoreOptions`.
        drop_ignored: Whether positions that do not count are dropped before any work; see `ScoreOptions`. Without
            labels and `TopKTargets` the call never waits for a device.

    Returns:
        A scalar, or `(...)` with `reduction="none"`, where the divergence is 0 at positions that do not count.

    Raises:
        ShapeError: The vocabularies, or the batches of hidden states, IDs and labels, have different sizes.
        SizeError: `reduction` is unknown, or K is 0 or above V. Of sharded rows, the teacher is sharded in another way.
        TokenIdError: A teacher's token is outside the vocabulary; on CUDA where the call waits, else later. Or an ID of
            an earlier loss on the same device was.

    Example:
        >>> student = LinearLogits(torch.randn(2, 5, 8), torch.randn(100, 8), temperature=2.0)
        >>> teacher = LinearLogits(torch.randn(2, 5, 32), torch.randn(100, 32), temperature=2.0)
        >>> divergence(student, teacher, ForwardKL()).shape
        torch.Size([])

    Reference: `generalized_jsd_loss` of TRL, whose `batchmean` is this function's mean over the counted positions.
    """
    kind = ForwardKL() if kind is None else kind
    options = {"chunk_bytes": chunk_bytes, "drop_ignored": drop_ignored}
    check_options(options, LossOptions, "divergence", ignore_index=ignore_index, reduction=reduction)
    loss = LossSettings(ignore_index, 0.0, 0.0, reduction, chunk_bytes, drop_ignored)
    student = resolve_logits(student, None, {})[0]
    teacher = teacher if isinstance(teacher, TopKTargets) else resolve_logits(teacher, None, {})[0]
    shape = student.hidden.shape[:-1]
    kept = torch.ones(shape, dtype=torch.bool, device=student.hidden.device)
    if labels is not None:
        check_ids(student.hidden, labels, "labels")
        kept = labels != ignore_index
    drop = False if is_plain(student) else drop_ignored
    if isinstance(teacher, TopKTargets):
        _check_top_k(student, teacher)
        mask = None if labels is None else kept
        of_rank = student.rank_request
        checked = checked_ids(teacher.ids, mask, student.vocab_size, drop=drop, several=True, request=of_rank)
        kept = kept if checked.is_bad is None else checked.is_counted()
        ids = checked.ids.flatten(0, -2)
        totals = compute_totals(student, Request(LogitStatistics(), None, ids, checked.tokens, 1, chunk_bytes))
        own = log_probs(totals, totals["selected"]).T
        losses = _of_log_probs(kind, student, own, teacher.log_probs.detach().flatten(0, -2).to(own.dtype))
        return checked.marked(reduce_losses(losses.view(shape).where(kept, 0.0), kept, loss))
    _check_pair(student, teacher, kind)
    tokens = CountedTokens() if labels is None else counted_tokens(kept, drop=drop, request=student.rank_request)
    if isinstance(kind, NextByte):
        with torch.no_grad():
            of_teacher = _next_byte_log_probs(teacher.as_invariant_as(student), kind.teacher, tokens, chunk_bytes)
        own = _next_byte_log_probs(student, kind.student, tokens, chunk_bytes)
        losses = _of_log_probs(kind, student, own, of_teacher)
        return reduce_losses(losses.view(shape).where(kept, 0.0), kept, loss)
    return divergence_of(student, Request(kind, teacher, tokens=tokens, chunk_bytes=chunk_bytes), kind, kept, loss)


def divergence_of(
    student: UncomputedLogits, request: Request, kind: Divergence, kept: Tensor, loss: LossSettings
) -> Tensor:
    """Compute the divergence of a request, whose objective is `kind`, reduced as `loss` says; `kept` is `(...)`."""
    if is_plain(student):
        losses = kind.of(plain_totals(student, request)).view(kept.shape)
        return reduce_losses(losses.where(kept, 0.0), kept, loss)
    return compute_loss(student, request, kind, kept, loss)[0]


def _of_log_probs(kind: Divergence | NextByte, student: UncomputedLogits, own: Tensor, of_teacher: Tensor) -> Tensor:
    """Return the divergence of each token `(N,)` from the log-probabilities `(N, K)` of student and teacher."""
    if not student.options.batch_invariant:
        return kind.of_log_probs(own, of_teacher)
    return kind.of_log_probs(padded_tokens(own), padded_tokens(of_teacher))[: len(own)]


def _next_byte_log_probs(
    logits: UncomputedLogits, next_bytes: NextBytes, tokens: CountedTokens, chunk_bytes: int | None
) -> Tensor:
    """Return the log-probability of each event at each position, `(N, E)`."""
    request = Request(LogitStatistics(next_bytes=next_bytes, only_events=True), tokens=tokens, chunk_bytes=chunk_bytes)
    return event_log_probs(compute_totals(logits, request), pads=logits.options.batch_invariant)


def _check_pair(student: UncomputedLogits, teacher: UncomputedLogits, kind: Divergence | NextByte) -> None:
    """Check that two heads have the same vocabulary and tokens, and rows on the same ranks."""
    if isinstance(kind, NextByte):
        check_next_bytes(kind.student, student.vocab_size)
        check_next_bytes(kind.teacher, teacher.vocab_size)
    elif student.vocab_size != teacher.vocab_size:
        raise ShapeError(
            f"The student has {student.vocab_size} tokens and the teacher {teacher.vocab_size}: a divergence needs one "
            f"vocabulary. Leave out spare rows with vocab_size=, or compare the next byte: NextByte."
        )
    if student.hidden.shape[:-1] != teacher.hidden.shape[:-1]:
        raise ShapeError(
            f"The hidden states of the student are {tuple(student.hidden.shape)} and the teacher's "
            f"{tuple(teacher.hidden.shape)}: pass one of each for every token."
        )
    if isinstance(teacher, LinearLogits) and teacher.is_sharded and not isinstance(kind, NextByte):
        same = isinstance(student, LinearLogits) and student.is_sharded and student.partition == teacher.partition
        if not same:
            raise SizeError(
                "The teacher's rows are sharded and the student's are not, or in another way: shard both over the same "
                "ranks, or only the student."
            )


def _check_top_k(student: UncomputedLogits, teacher: TopKTargets) -> None:
    """Check that there are K IDs and log-probabilities of a teacher for each hidden state."""
    ids, shape = teacher.ids, student.hidden.shape[:-1]
    if ids.shape != teacher.log_probs.shape or ids.shape[:-1] != shape or ids.dim() != len(shape) + 1:
        raise ShapeError(
            f"A teacher's IDs are {tuple(ids.shape)} and its log-probabilities {tuple(teacher.log_probs.shape)}: both "
            f"must be {(*shape, 'K')}, K for each hidden state."
        )
    if not 1 <= ids.shape[-1] <= student.vocab_size:
        raise SizeError(f"A teacher has {ids.shape[-1]} tokens per position; pass 1 to {student.vocab_size}.")
