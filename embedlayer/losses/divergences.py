"""Divergences between the distributions of two heads, without the logits of either: their kinds, and one function.

With logits s of the student and t of the teacher, `q = softmax(s)` and `p = softmax(t)`. The teacher is a constant.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.kernels.divergences import (
    DivergenceKind,
    divergence_gradient,
    mixture_divergences,
    pair_statistics,
)
from embedlayer.losses.definition import reduce_losses
from embedlayer.losses.differentiable_totals import compute_loss, compute_totals, plain_totals
from embedlayer.losses.logit_arguments import Logits, resolve_logits
from embedlayer.losses.next_bytes import SPECIAL, NextBytes, check_next_bytes
from embedlayer.losses.objective import (
    BlockGradient,
    BlockTerms,
    LogitBlock,
    Objective,
    Request,
    TokenLoss,
    Totals,
    event_log_probs,
    finite_top,
    log_probs,
    log_softmax_,
    merge_softmax,
    only_part,
    softmax_,
    softmax_totals,
)
from embedlayer.losses.options import LossOptions, LossSettings, Reduction, check_options
from embedlayer.losses.rows import padded_tokens
from embedlayer.losses.statistics import LogitStatistics
from embedlayer.losses.targets import CountedTokens, checked_ids, counted_tokens
from embedlayer.losses.uncomputed_logits import LinearLogits, UncomputedLogits, check_ids, is_plain

TEACHER = "_teacher"  # suffix of the totals of the teacher's logits


class Divergence(Objective, TokenLoss):
    """Abstract: a divergence between teacher p and student q; `ForwardKL`, `ReverseKL` or `JensenShannon`."""

    has_kernels = True

    @abstractmethod
    def of_log_probs(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the divergence from the log-probabilities of some tokens, `(..., K)`, summed over these: `(...)`.

        Over all tokens of a vocabulary this is the definition of the divergence.
        """


@dataclass(frozen=True)
class ForwardKL(Divergence):
    """Kullback-Leibler divergence from teacher to student, `KL(p || q) = sum of p (log p - log q)`.

    It is the divergence of distillation (Hinton et al., 2015): the student covers all that the teacher gives weight.
    """

    def terms(self, block: LogitBlock, previous: Totals) -> Totals:
        """Return both softmaxes, and the mean of t - s under p, over the rows of the block."""
        s, t = _pair(block)
        student = softmax_totals(block, s)[0]
        teacher, p = softmax_totals(block, t, TEACHER)
        return {**student, **teacher, "mean": p.mean(block.work.subtract(t, s, slot=0), block)}

    def merge(self, parts: Totals) -> Totals:
        """Combine the totals of blocks; the mean is weighted by the teacher's probabilities."""
        return _merge(parts, TEACHER)

    def of(self, totals: Totals) -> Tensor:
        """Return `mean of (t - s) under p - logsumexp(t) + logsumexp(s)`."""
        return totals["mean"] - _logsumexp_difference(totals)

    def gradients(self, totals: Totals, factors: Tensor) -> Totals:
        """Return the gradients with respect to `mean` and `log_sum`."""
        return {"mean": factors, "log_sum": factors}

    def of_log_probs(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return `sum of p (log p - log q)`."""
        return _kl(teacher, student)

    def compiled_terms(self, ids: Tensor | None, previous: Totals) -> BlockTerms:
        """Return a kernel that computes both softmaxes and the mean."""
        return divergence_of_blocks(DivergenceKind.FORWARD)

    def compiled_dlogits(self, ids: Tensor | None, totals: Totals, grads: Totals) -> BlockGradient:
        """Return a kernel that computes the gradient, from the same formula as `dlogits_`."""
        factors = grads["log_sum"] / totals["sums"], -grads["mean"] / totals[f"sums{TEACHER}"]
        return gradient_of_divergence(DivergenceKind.FORWARD, totals, factors)

    def dlogits_(self, block: LogitBlock, totals: Totals, grads: Totals) -> None:
        """Replace s by `g q - g_mean p`, where g is the gradient of `log_sum`."""
        s, t = _pair(block)
        softmax_(s, totals, factor=grads["log_sum"])
        s.sub_(softmax_(t, totals, TEACHER, factor=grads["mean"]))


@dataclass(frozen=True)
class ReverseKL(Divergence):
    """Kullback-Leibler divergence from student to teacher, `KL(q || p) = sum of q (log q - log p)`.

    It is the divergence of on-policy distillation (MiniLLM): the student keeps to what the teacher finds likely.
    """

    def terms(self, block: LogitBlock, previous: Totals) -> Totals:
        """Return both softmaxes, and the mean of s - t under q, over the rows of the block."""
        s, t = _pair(block)
        teacher = softmax_totals(block, t, TEACHER)[0]
        student, q = softmax_totals(block, s)
        return {**student, **teacher, "mean": q.mean(block.work.subtract(s, t, slot=1), block)}

    def merge(self, parts: Totals) -> Totals:
        """Combine the totals of blocks; the mean is weighted by the student's probabilities."""
        return _merge(parts, "")

    def of(self, totals: Totals) -> Tensor:
        """Return `mean of (s - t) under q - logsumexp(s) + logsumexp(t)`; NaN if all s are -inf."""
        divergence = totals["mean"] + _logsumexp_difference(totals)
        return divergence.masked_fill(totals["sums"] == 0, torch.nan)

    def gradients(self, totals: Totals, factors: Tensor) -> Totals:
        """Return the gradients with respect to `mean` and `log_sum`."""
        return {"mean": factors, "log_sum": -factors}

    def of_log_probs(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return `sum of q (log q - log p)`."""
        return _kl(student, teacher)

    def compiled_terms(self, ids: Tensor | None, previous: Totals) -> BlockTerms:
        """Return a kernel that computes both softmaxes and the mean."""
        return divergence_of_blocks(DivergenceKind.REVERSE)

    def compiled_dlogits(self, ids: Tensor | None, totals: Totals, grads: Totals) -> BlockGradient:
        """Return a kernel that computes the gradient, from the same formula as `dlogits_`."""
        offset, share = grads["log_sum"] + grads["mean"] * (1 - totals["mean"]), 1 / totals["sums"]
        return gradient_of_divergence(DivergenceKind.REVERSE, totals, (offset, grads["mean"], share))

    def dlogits_(self, block: LogitBlock, totals: Totals, grads: Totals) -> None:
        """Replace s by `q (g + g_mean (1 + s - t - mean))`, where g is the gradient of `log_sum`."""
        s, t = _pair(block)
        factor = torch.sub(s, t, out=t)
        if block.may_be_infinite:
            factor.masked_fill_(s == -torch.inf, 0.0)
        factor.mul_(grads["mean"]).add_(grads["log_sum"] + grads["mean"] * (1 - totals["mean"]))
        softmax_(s, totals).mul_(factor)


@dataclass(frozen=True)
class JensenShannon(Divergence):
    """Generalised Jensen-Shannon divergence, `beta KL(p || m) + (1 - beta) KL(q || m)`.

    The mixture m is `beta p + (1 - beta) q`.

    Args:
        beta: Weight of the teacher in the mixture, above 0 and below 1. TRL's 0 is `ForwardKL`, its 1 `ReverseKL`.

    Reference: Agarwal et al., On-policy distillation of language models, 2024, equation 1; `generalized_jsd_loss` of
    TRL.
    """

    beta: float = 0.5
    sweeps = 2
    slots = 5

    def __post_init__(self) -> None:
        if not 0 < self.beta < 1:
            raise SizeError(
                f"beta must be between 0 and 1, not {self.beta}: at the ends use ForwardKL() (0) or ReverseKL() (1)."
            )

    def terms(self, block: LogitBlock, previous: Totals) -> Totals:
        """Return both softmaxes in the first sweep; then the parts of both divergences over the rows of the block."""
        s, t = _pair(block)
        if not previous:
            return {**softmax_totals(block, s)[0], **softmax_totals(block, t, TEACHER)[0]}
        work = block.work
        log_q = work.subtract(s, finite_top(previous["top"]) + previous["log_sum"], slot=0)
        log_p = work.subtract(t, finite_top(previous[f"top{TEACHER}"]) + previous[f"log_sum{TEACHER}"], slot=1)
        log_m = self._log_mixture(block, log_q, log_p)
        above_q, above_p = work.subtract(log_q, log_m, slot=3), work.subtract(log_p, log_m, slot=2)
        if block.may_be_infinite:  # a probability of 0 counts as 0
            above_q = work.masked_fill(above_q, log_q == -torch.inf, 0.0)
            above_p = work.masked_fill(above_p, log_p == -torch.inf, 0.0)
        from_student = work.multiply(work.exp(log_q), above_q).sum(0)
        return {"student": from_student, "teacher": work.multiply(work.exp(log_p), above_p).sum(0)}

    def merge(self, parts: Totals) -> Totals:
        """Combine the totals of blocks, all of the first sweep or all of the second."""
        only = only_part(parts)
        if only is not None:
            return only
        if "log_sum" in parts:
            return {**merge_softmax(parts)[0], **merge_softmax(parts, TEACHER)[0]}
        return {name: parts[name].sum(0) for name in ("student", "teacher")}

    def of(self, totals: Totals) -> Tensor:
        """Return `beta KL(p || m) + (1 - beta) KL(q || m)`."""
        return self.beta * totals["teacher"] + (1 - self.beta) * totals["student"]

    def gradients(self, totals: Totals, factors: Tensor) -> Totals:
        """Return the gradient with respect to `student`, from which `dlogits_` computes all of the divergence's."""
        return {"student": (1 - self.beta) * factors}

    def of_log_probs(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return `sum of beta p (log p - log m) + (1 - beta) q (log q - log m)`."""
        neither = (student == -torch.inf) & (teacher == -torch.inf)  # the gradient of logaddexp would be NaN there
        own, other = (x.masked_fill(neither, 0.0) for x in (student, teacher))
        mixture = torch.logaddexp(own + math.log1p(-self.beta), other + math.log(self.beta))
        return self.beta * _kl(teacher, mixture) + (1 - self.beta) * _kl(student, mixture)

    def compiled_terms(self, ids: Tensor | None, previous: Totals) -> BlockTerms:
        """Return a kernel that computes the totals of a sweep."""
        if not previous:
            return divergence_of_blocks(DivergenceKind.JENSEN_SHANNON)
        return mixture_divergences_of_blocks(previous, self.beta)

    def compiled_dlogits(self, ids: Tensor | None, totals: Totals, grads: Totals) -> BlockGradient:
        """Return a kernel that computes the gradient, from the same formula as `dlogits_`."""
        factors = grads["student"], -totals["student"], totals["sums"].log(), totals[f"sums{TEACHER}"].log()
        return gradient_of_divergence(DivergenceKind.JENSEN_SHANNON, totals, factors, self.beta)

    def dlogits_(self, block: LogitBlock, totals: Totals, grads: Totals) -> None:
        """Replace s by `g (1 - beta) q (log q - log m - KL(q || m))`, where g is the gradient of the divergence."""
        s, t = _pair(block)
        log_softmax_(s, totals)
        log_softmax_(t, totals, TEACHER)
        above = block.work.subtract(s, self._log_mixture(block, s, t), slot=3)
        if block.may_be_infinite:
            above.masked_fill_(s == -torch.inf, 0.0)
        s.exp_().mul_(above.sub_(totals["student"]).mul_(grads["student"]))

    def _log_mixture(self, block: LogitBlock, log_q: Tensor, log_p: Tensor) -> Tensor:
        """Return `log m` from the log-probabilities of both heads; it uses the last three slots of the workspace."""
        q = block.work.add(log_q, math.log1p(-self.beta), slot=2)
        p = block.work.add(log_p, math.log(self.beta), slot=3)
        if block.may_be_infinite:  # the gradient of logaddexp at -inf twice would be NaN
            neither = (log_q == -torch.inf) & (log_p == -torch.inf)
            q, p = block.work.masked_fill(q, neither, 0.0), block.work.masked_fill(p, neither, 0.0)
        return block.work.logaddexp(q, p, slots=(4, 2))


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """Return `sum of p (log p - log q)` for log-probabilities log p and log q; the term of a probability 0 is 0."""
    return (first.exp() * (first - second).masked_fill(first == -torch.inf, 0.0)).sum(-1)


def _pair(block: LogitBlock) -> tuple[Tensor, Tensor]:
    """Return the logits of student and teacher."""
    assert block.teacher is not None
    return block.student, block.teacher


def _logsumexp_difference(totals: Totals) -> Tensor:
    """Return logsumexp of the teacher's logits minus that of the student's, `(C,)`."""
    return (totals[f"top{TEACHER}"] - totals["top"]) + (totals[f"log_sum{TEACHER}"] - totals["log_sum"])


def _merge(parts: Totals, weights: str) -> Totals:
    """Combine two softmaxes and a mean over blocks."""
    only = only_part(parts)
    if only is not None:
        return only
    student, shares = merge_softmax(parts)
    teacher, shares_of_teacher = merge_softmax(parts, TEACHER)
    shares = shares_of_teacher if weights == TEACHER else shares
    return {**student, **teacher, "mean": (parts["mean"] * shares).sum(0)}


SOFTMAXES = ("top", "log_sum", "sums", "top_teacher", "log_sum_teacher", "sums_teacher")
"""Totals of the softmaxes of two heads, in the order of the kernel."""


def divergence_of_blocks(kind: DivergenceKind) -> BlockTerms:
    """Return a kernel that computes both softmaxes of the blocks of a chunk, and for a KL divergence its mean."""

    def terms(block: LogitBlock) -> Totals | None:
        found = pair_statistics(*_stored_pair(block), int(kind))
        names = (*SOFTMAXES, "mean") if kind else SOFTMAXES
        return None if found is None else dict(zip(names, found.unbind(1), strict=False))

    return terms


def mixture_divergences_of_blocks(previous: Totals, beta: float) -> BlockTerms:
    """Return a kernel that computes the second sweep of `JensenShannon` over the blocks of a chunk."""
    names = ("top", "log_sum", "top_teacher", "log_sum_teacher")
    levels = torch.stack([finite_top(previous[name]) if name[0] == "t" else previous[name] for name in names])

    def terms(block: LogitBlock) -> Totals | None:
        found = mixture_divergences(*_stored_pair(block), levels, beta)
        return None if found is None else dict(zip(("student", "teacher"), found.unbind(1), strict=True))

    return terms


def gradient_of_divergence(
    kind: DivergenceKind, totals: Totals, factors: tuple[Tensor, ...], beta: float = 0.0
) -> BlockGradient:
    """Return a kernel that computes the gradient by the student's logits of each block."""
    tops = finite_top(totals["top"]), finite_top(totals["top_teacher"])
    numbers = torch.stack([*tops, *factors, *(torch.zeros_like(tops[0]),) * (4 - len(factors))])

    def gradient(block: LogitBlock, bias_grad: Tensor | None, add: bool) -> bool:
        done: bool = divergence_gradient(*_stored_pair(block), numbers, bias_grad, add, int(kind), float(beta))
        return done

    return gradient


def _stored_pair(block: LogitBlock) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the logits of student and teacher, and the biases that these do not contain yet."""
    assert block.teacher is not None
    return block.student, block.teacher, *block.biases


@dataclass(frozen=True, eq=False)
class NextByte:
    """Kind of a `divergence`: that of the next byte, between two heads whose tokenizers are different ones.

    It is `kind` over the 257 events that `NextBytes` describes. Pass the hidden states of both models at the positions
    where both tokenizations of a text have the end of a token.

    Args:
        student: Events of the student's tokens.
        teacher: Events of the teacher's tokens.
        kind: Divergence of the two distributions.

    Example:
        >>> student, teacher = (NextBytes.of(train_tokenizer((), kind="byte")) for _ in range(2))
        >>> heads = OutputHead(8, 257), OutputHead(16, 257)
        >>> divergence((torch.randn(5, 8), heads[0]), (torch.randn(5, 16), heads[1]), NextByte(student, teacher)).shape
        torch.Size([])
    """

    student: NextBytes
    teacher: NextBytes
    kind: Divergence = field(default_factory=ForwardKL)

    def __post_init__(self) -> None:
        both = self.student, self.teacher
        student, teacher = ({*each.events.unique().tolist()} for each in both)
        if self.student.num_events != self.teacher.num_events or student != teacher:
            raise SizeError(
                f"Only one of student and teacher has the events {sorted(student ^ teacher)[:4]} ({SPECIAL}: special)."
            )

    def of_log_probs(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the divergence from the log-probabilities of all events, `(..., E)`."""
        return self.kind.of_log_probs(student, teacher)


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
