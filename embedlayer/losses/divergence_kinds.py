"""Divergences between the distributions of two heads over one vocabulary, as objectives of a pass over their logits.

With logits s of the student and t of the teacher, `q = softmax(s)` and `p = softmax(t)`. The teacher is a constant.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from embedlayer.core.errors import SizeError
from embedlayer.kernels.divergences import (
    DivergenceKind,
    divergence_gradient,
    mixture_divergences,
    pair_statistics,
)
from embedlayer.losses.objective import (
    BlockGradient,
    BlockTerms,
    LogitBlock,
    Objective,
    TokenLoss,
    Totals,
    finite_top,
    log_softmax_,
    merge_softmax,
    only_part,
    softmax_,
    softmax_totals,
)

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
