"""What a pass over the vocabulary computes for each token, from blocks of its logits.

An `Objective` computes a few numbers per token from the logits of a block of rows, `terms`, and combines those of
several blocks, `merge`. Blocks may be consecutive rows of one process, or the rows of several ranks. `terms` and
`merge` are plain PyTorch and differentiable. `dlogits_` writes the same gradient over the logits of a block.

A block is `(R, C)`: R rows of the vocabulary by C tokens, vocabulary first.

An objective may also have compiled kernels that compute the same as `terms` and `dlogits_` in one pass over a block.
They read logits as the matrix product wrote them: without the bias, and in bfloat16 if that is its dtype.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedlayer.kernels.softmax import Finishing
from embedlayer.losses.rows import own_tokens, padded_tokens
from embedlayer.losses.targets import CountedTokens
from embedlayer.losses.uncomputed_logits import UncomputedLogits

Totals = dict[str, Tensor]
"""Numbers per token by name: `(C,)` or `(K, C)` for C tokens of a chunk, `(N,)` or `(K, N)` for all."""


class Workspace:
    """Memory for intermediate results of the size of a block, or none: then each result is a new tensor."""

    # Fresh memory costs page faults at every block. Empty under autograd, where results must not be overwritten.

    def __init__(self, buffers: tuple[Tensor, ...] = ()) -> None:
        self.buffers = buffers

    def _slot(self, slot: int, like: Tensor) -> Tensor | None:
        """Return a view of a buffer in the shape of `like`, or `None` if there are no buffers."""
        return self.buffers[slot][: like.numel()].view(like.shape) if self.buffers else None

    def subtract(self, a: Tensor, b: Tensor, slot: int) -> Tensor:
        return torch.sub(a, b, out=self._slot(slot, a))

    def add(self, a: Tensor, number: float, slot: int) -> Tensor:
        return torch.add(a, number, out=self._slot(slot, a))

    def logaddexp(self, a: Tensor, b: Tensor, slots: tuple[int, int]) -> Tensor:
        """Return `log(exp(a) + exp(b))` in the memory of the first of two slots; the second may be `a`'s or `b`'s."""
        # Not `torch.logaddexp`, which rounds the last numbers of a thread's share differently from the others.
        top = torch.maximum(a, b, out=self._slot(slots[0], a))
        below = self.subtract(a, b, slots[1])
        if self.buffers:
            return top.add_(below.abs_().neg_().exp_().log1p_())
        return top + (-below.abs()).exp().log1p()

    def exp(self, a: Tensor) -> Tensor:
        """Return `exp(a)`, in the memory of `a` if results may be overwritten."""
        return a.exp_() if self.buffers else a.exp()

    def masked_fill(self, a: Tensor, mask: Tensor, number: float) -> Tensor:
        """Return `a` with a number where the mask is `True`, in the memory of `a` if results may be overwritten."""
        return a.masked_fill_(mask, number) if self.buffers else a.masked_fill(mask, number)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `a * b`, in the memory of `a` if results may be overwritten."""
        return a.mul_(b) if self.buffers else a * b


class LogitBlock(NamedTuple):
    """Logits of C tokens over some rows; CPU kernels read `array`."""

    student: Tensor
    teacher: Tensor | None
    ids: Tensor | None
    start: int
    may_be_infinite: bool
    work: Workspace
    is_last: bool = True
    biases: tuple[Tensor | None, Tensor | None] = (None, None)
    unfinished: Finishing = Finishing()
    is_whole: bool = False
    array: Any = None

    def with_bias(self, dtype: torch.dtype) -> "LogitBlock":
        """Return the block with the biases added, in the dtype of the loss; it is a copy only where needed."""
        assert self.unfinished == Finishing()
        if self.biases == (None, None) and self.student.dtype == dtype == getattr(self.teacher, "dtype", dtype):
            return self
        student, teacher = (
            None if z is None else z.to(dtype) if bias is None else z.to(dtype) + bias.unsqueeze(1)
            for z, bias in zip((self.student, self.teacher), self.biases, strict=True)
        )
        assert student is not None
        return self._replace(student=student, teacher=teacher, biases=(None, None), array=None)

    def local_ids(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return `ids` as indices into the rows of this block, 0 for others, and a mask of those inside."""
        is_inside = (ids >= self.start) & (ids < self.start + len(self.student))
        return torch.where(is_inside, ids - self.start, 0), is_inside


BlockTerms = Callable[[LogitBlock], Totals | None]
"""Kernel that computes the totals of parts of a block, with the parts in front: `(P, C)` or `(P, K, C)`.

It is called for one block of a chunk after another, in the order of their rows. The totals of a name may have another P
than those of another name. The result is `None` if there is no kernel.
"""

BlockGradient = Callable[[LogitBlock, Tensor | None, bool], bool]
"""Kernel that replaces `block.student` by the gradient, and returns whether it did.

The second argument is the gradient of the bias of the block's rows, or `None`. The third says whether the kernel adds
to it; otherwise kernels for CUDA overwrite it.
"""


class Objective(ABC):
    """Abstract: numbers per token that are computed from its logits in one or more sweeps over the vocabulary.

    Attributes:
        sweeps: How often all blocks are visited; a later sweep knows the totals of the earlier ones.
        slots: Number of intermediate results of the size of a block that exist at once without kernels.
        has_kernels: Whether kernels compute the totals and the gradients: compiled ones on the CPU, Triton's on CUDA.
        finishes: Whether kernels for CUDA finish the logits that they read: scale, soft cap and masked padding.
        constants: Names of totals without gradient.
        has_row_totals: Whether `terms` returns a total for each row of a block, `(R, C)`, as parts of it.
    """

    sweeps: int = 1
    slots: int = 2
    has_kernels: bool = False
    finishes: bool = False
    has_row_totals: bool = False
    constants: frozenset[str] = frozenset({"top", "sums", "top_teacher", "sums_teacher", "log_sum_teacher", "top_ids"})

    @abstractmethod
    def terms(self, block: LogitBlock, previous: Totals) -> Totals:
        """Return the totals of the block alone: plain PyTorch, differentiable.

        Args:
            block: Logits, which are not changed.
            previous: Merged totals of the earlier sweeps; empty in the first.
        """

    @abstractmethod
    def merge(self, parts: Totals) -> Totals:
        """Combine the totals of blocks with different rows, all of one sweep.

        Args:
            parts: Totals as `stacked` returns them, or `BlockTerms`.
        """

    def parts(self, block: LogitBlock, previous: Totals) -> Totals:
        """Return `terms` with the parts of the block in front, of which there is one."""
        terms = self.terms(block, previous)
        return terms if self.has_row_totals else {name: x.unsqueeze(0) for name, x in terms.items()}

    def work_numbers(self, rows: int) -> int:
        """Return how many numbers of intermediate results exist at once without kernels, per token of a block."""
        return self.slots * rows

    def bytes_of_parts(self, rows: int) -> int:
        """Return the bytes per token of what Triton kernels store of the parts of a block, until these are merged."""
        return rows // 8

    def in_sweeps(self, sweep: Callable[[Totals], Totals]) -> Totals:
        """Return the totals of all sweeps.

        Args:
            sweep: Function from the totals of the earlier sweeps to those of the next, over the whole vocabulary.
        """
        totals: Totals = {}
        for _ in range(self.sweeps):
            totals = {**totals, **sweep(totals)}
        return totals

    def compiled_terms(self, ids: Tensor | None, previous: Totals) -> BlockTerms | None:
        """Return a kernel that computes `terms` of the blocks of a chunk, or `None` if there is none.

        Args:
            ids: Requested IDs, `(K, C)`, or `None`.
            previous: As in `terms`.
        """
        return None

    def compiled_dlogits(self, ids: Tensor | None, totals: Totals, grads: Totals) -> BlockGradient | None:
        """Return a kernel that does what `dlogits_` does to the blocks of a chunk, or `None` if there is none.

        Args:
            ids: Requested IDs, `(K, C)`, or `None`.
            totals: As in `dlogits_`.
            grads: As in `dlogits_`.
        """
        return None

    @abstractmethod
    def dlogits_(self, block: LogitBlock, totals: Totals, grads: Totals) -> None:
        """Replace `block.student` by the gradient with respect to it; `block.teacher` may be overwritten.

        Args:
            block: Logits.
            totals: Totals over the whole vocabulary, of all sweeps.
            grads: Gradients of the differentiable totals that have one.
        """


class EventLogits(NamedTuple):
    """Hold the logits of E further events, behind those of the vocabulary, for each of N tokens."""

    student: Tensor
    teacher: Tensor

    def block(self, start: int, dtype: torch.dtype) -> "LogitBlock":
        """Return them as the block of rows from `start` on, in a dtype and in memory of its own."""
        student, teacher = (x.T.to(dtype, copy=True) for x in self)
        return LogitBlock(student, teacher, None, start, True, Workspace())


class Request(NamedTuple):
    """Say what a pass computes, for which tokens."""

    objective: Objective
    teacher: UncomputedLogits | None = None
    ids: Tensor | None = None
    tokens: CountedTokens = CountedTokens()
    min_chunks: int = 1
    chunk_bytes: int | None = None
    events: EventLogits | None = None


class TokenLoss(ABC):
    """Abstract: the loss of a token as a function of its totals, with its gradient written by hand."""

    @abstractmethod
    def of(self, totals: Totals) -> Tensor:
        """Return the loss of each token, `(C,)`; plain PyTorch, differentiable."""

    @abstractmethod
    def gradients(self, totals: Totals, factors: Tensor) -> Totals:
        """Return the gradients of `sum(factors * of(totals))` with respect to the totals that have one."""

    def compiled(
        self, ids: Tensor | None, totals: Totals, factors: Tensor, results: int
    ) -> tuple[Tensor, Totals, Tensor] | None:
        """Return the results of `of` and `gradients` from one kernel, and the loss; `None` if there is no kernel.

        The gradients are as `Objective.compiled_dlogits` takes them: that of `selected` and, in place of the others,
        `factors`, the numbers of each token that its kernel computes with. The loss is the sum of `factors` times the
        losses of the first `results` tokens.

        Args:
            ids: Requested IDs, `(K, C)`, or `None`.
            totals: As in `of`.
            factors: As in `gradients`.
            results: How many tokens are no padding.
        """
        return None


class Exponentials(NamedTuple):
    """Hold `exp(logits - top)` of the rows of a block, `(R, C)`, and their sums, `(C,)`; the softmax is their ratio."""

    powers: Tensor
    sums: Tensor

    def mean(self, values: Tensor, block: LogitBlock) -> Tensor:
        """Return the mean of values `(R, C)` under the softmax, `(C,)`."""
        # With a workspace, `values` are overwritten. A probability of 0 counts as 0 even if its value is infinite.
        if block.may_be_infinite:
            values = block.work.masked_fill(values, self.powers == 0, 0.0)
        return block.work.multiply(values, self.powers).sum(0) / self.sums


def softmax_totals(block: LogitBlock, logits: Tensor, suffix: str = "") -> tuple[Totals, Exponentials]:
    """Return the totals of a softmax over the rows, and the exponentials that it was computed from."""
    # `top` and `log_sum` are separate because differences from a logit are more accurate. Only `log_sum` has a
    # gradient: that of logsumexp. Uses workspace slot 0 for the student, 1 for the teacher.
    top = finite_top(logits.detach().amax(0))
    powers = block.work.subtract(logits, top, slot=1 if suffix else 0).exp_()
    sums = powers.sum(0)
    is_empty = sums == 0
    nonzero = sums if block.is_whole else sums + is_empty  # not masked: a gradient of NaN passes
    totals = {
        f"log_sum{suffix}": nonzero.log(),
        f"top{suffix}": top.masked_fill(is_empty, -torch.inf),
        f"sums{suffix}": sums.detach(),
    }
    return totals, Exponentials(powers, nonzero)


def stacked(parts: list[Totals]) -> Totals:
    """Stack the totals of several blocks: each is `(P, C)` or `(P, K, C)` for P blocks."""
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


def joined(parts: list[Totals]) -> Totals:
    """Concatenate totals that are stacked already."""
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def only_part(parts: Totals) -> Totals | None:
    """Return the totals without their first dimension if there is one part only, else `None`."""
    return {name: x[0] for name, x in parts.items()} if all(len(x) == 1 for x in parts.values()) else None


def merge_softmax(parts: Totals, suffix: str = "") -> tuple[Totals, Tensor]:
    """Combine the totals of a softmax over P blocks, and return the share of each one's probabilities, `(P, C)`."""
    tops = parts[f"top{suffix}"]
    top = tops.amax(0)
    shifts = tops - finite_top(top)
    log_sums = shifts + parts[f"log_sum{suffix}"]
    log_sum = log_sums.logsumexp(0)
    sums = (parts[f"sums{suffix}"] * shifts.exp()).sum(0)
    shares = (log_sums - finite_top(log_sum)).exp()
    return {f"log_sum{suffix}": log_sum, f"top{suffix}": top, f"sums{suffix}": sums}, shares


def logsumexp(totals: Totals) -> Tensor:
    """Return logsumexp of the logits of each token."""
    return totals["top"] + totals["log_sum"]


def log_probs(totals: Totals, selected: Tensor) -> Tensor:
    """Return the log-probabilities of logits of the same tokens, `(C,)` or `(K, C)`."""
    return selected - totals["top"] - totals["log_sum"]


def event_log_probs(totals: Totals, *, pads: bool) -> Tensor:
    """Return the log-probability of each event of `NextBytes`, `(..., E)`."""
    logits = (totals["event_tops"] + totals["event_log_sums"]).movedim(0, -1)
    return own_tokens(padded_tokens(logits).log_softmax(-1), logits) if pads else logits.log_softmax(-1)


def softmax_(logits: Tensor, totals: Totals, suffix: str = "", factor: Tensor | None = None) -> Tensor:
    """Replace logits in place by their softmax over the whole vocabulary, times a factor per token."""
    scale = (1.0 if factor is None else factor) / totals[f"sums{suffix}"]
    return logits.sub_(finite_top(totals[f"top{suffix}"])).exp_().mul_(scale)


def log_softmax_(logits: Tensor, totals: Totals, suffix: str = "") -> Tensor:
    """Replace logits in place by their log-softmax over the whole vocabulary; arguments as in `softmax_`."""
    return logits.sub_(finite_top(totals[f"top{suffix}"])).sub_(totals[f"sums{suffix}"].log())


def finite_top(top: Tensor) -> Tensor:
    """Return 0 for -inf and NaN, else the number: a maximum that can be subtracted. NaN comes back with the sum."""
    return top.nan_to_num(0.0, torch.inf, 0.0)
