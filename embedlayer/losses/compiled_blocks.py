"""Compiled kernels over blocks of logits, as `LogitStatistics` and the divergences use them.

Each function prepares what the kernel needs once for a chunk of tokens, and returns a function of a block.
"""

import math
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from embedlayer.kernels.kernel import Kernel
from embedlayer.losses.objective import BlockGradient, BlockTerms, LogitBlock, Totals, finite_top

STATISTICS = Kernel("softmax", "statistics")
STATISTICS_GRADIENT = Kernel("softmax", "statistics_gradient")

LARGEST = Kernel("softmax", "largest")
DIVERGENCE = Kernel("softmax", "divergence")
JENSEN_SHANNON = Kernel("softmax", "jensen_shannon")
DIVERGENCE_GRADIENT = Kernel("softmax", "divergence_gradient")
ADD_BFLOAT16 = Kernel("softmax", "add_bfloat16")

PART = 256  # rows whose totals are summed on their own: rounding errors grow with the number of terms of a sum
LANES = 64  # tokens whose largest logits a thread looks for at a time
NO_ID = 2**52  # larger than every token ID; a float64 can hold it
BLOCK_NUMEL = 1 << 17  # logits that a thread claims at once


class _Requests(NamedTuple):
    """Hold requested logits, sorted by row.

    Attributes:
        rows: Token IDs, which are rows of the vocabulary, `(M,)`.
        places: Place of each request in the flattened IDs `(K, C)`; modulo C it is the token, `(M,)`.
    """

    rows: Tensor
    places: Tensor

    @classmethod
    def of(cls, ids: list[Tensor]) -> "_Requests":
        """Return the requests of some IDs, each `(K, C)`."""
        return cls(*torch.cat([torch.empty(0, dtype=torch.long), *(each.flatten() for each in ids)]).sort(stable=True))


def statistics_of_blocks(ids: Tensor | None, names: list[str]) -> BlockTerms:
    """Return a kernel that computes statistics of the blocks of a chunk; see `LogitStatistics.terms`.

    Args:
        ids: Requested IDs, `(K, C)`, or `None`.
        names: Which of `sum`, `mean` and `log_squares` to compute.
    """
    requests = _Requests.of([] if ids is None else [ids])

    def terms(block: LogitBlock) -> Totals | None:
        tokens, dtype = block.student.shape[1], _sum_dtype(block.student)
        found = _found(block, 6)
        selected = torch.zeros((0, tokens) if ids is None else ids.shape, dtype=dtype)
        inputs = block.student, _bias(block, 0), block.start, *requests
        if not STATISTICS.run(len(found), PART, *inputs, selected.view(-1), found, bool(names), block=_parts(tokens)):
            return None
        totals = dict(zip(("top", "log_sum", "sums", "sum", "mean", "log_squares"), found.unbind(1), strict=True))
        kept = {name: totals[name] for name in ("top", "log_sum", "sums", *names)}
        return kept if ids is None else {**kept, "selected": selected.unsqueeze(0)}

    return terms


def with_largest(terms: BlockTerms, k: int) -> BlockTerms:
    """Return a kernel that also looks for the K largest logits; the totals of the last block contain them.

    Args:
        terms: Kernel that computes the other totals of blocks.
        k: Number of logits.
    """
    state: list[Tensor] = []
    seen = 0

    def with_top_k(block: LogitBlock) -> Totals | None:
        nonlocal seen
        z, dtype = block.student, _sum_dtype(block.student)
        rows, tokens = z.shape
        if not state:
            thresholds, values = (torch.full(shape, -torch.inf, dtype=dtype) for shape in ((tokens,), (tokens, k)))
            state.extend((thresholds, values, torch.full((tokens, k), NO_ID)))
        found = terms(block)
        tiles = math.ceil(tokens / LANES)
        if found is None or not LARGEST.run(tiles, LANES, z, _bias(block, 0), block.start, seen, *state, block=1):
            return None
        seen += rows
        shown = slice(1 if block.is_last else 0)
        return {**found, "top_logits": state[1].T[None][shown], "top_ids": state[2].T[None][shown]}

    return with_top_k


def gradient_of_statistics(requested: list[tuple[Tensor, Tensor]], totals: Totals, grads: Totals) -> BlockGradient:
    """Return a kernel that computes the gradient by the logits of each block; see `LogitStatistics.dlogits_`.

    Args:
        requested: Token IDs `(K, C)`, with the gradient by the logit of each.
        totals: Totals over the whole vocabulary.
        grads: Gradients of the other totals that have one.
    """
    requests = _Requests.of([ids for ids, _ in requested])
    by_request = torch.cat([totals["top"].new_empty(0), *(grad.flatten() for _, grad in requested)])[requests.places]
    zeros = torch.zeros_like(totals["top"])
    share = 1 / totals["sums"].masked_fill(totals["sums"] == 0, 1.0)
    by_log_sum, by_mean = grads.get("log_sum", zeros), grads.get("mean", zeros)
    offset, squares = by_log_sum, zeros
    if "mean" in grads:
        offset = offset + by_mean * (1 - totals["mean"])
    if "log_squares" in grads:
        squares = 2 * grads["log_squares"] * (-totals["log_squares"]).exp()
    factors = torch.stack([finite_top(totals["top"]), share, offset, by_mean, squares, grads.get("sum", zeros)])

    def gradient(block: LogitBlock, bias_grad: Tensor | None) -> bool:
        rows, tokens = block.student.shape
        to_bias = factors.new_empty(0) if bias_grad is None else bias_grad
        inputs = block.student, _bias(block, 0), block.start, *requests, by_request, factors, to_bias
        return STATISTICS_GRADIENT.run(rows, *inputs, block=_rows(tokens))

    return gradient


class DivergenceKind(IntEnum):
    """Divergences by the number that kernels know them by."""

    JENSEN_SHANNON = 0
    FORWARD = 1
    REVERSE = 2


SOFTMAXES = ("top", "log_sum", "sums", "top_teacher", "log_sum_teacher", "sums_teacher")
"""Totals of the softmaxes of two heads, in the order of the kernel."""


def divergence_of_blocks(kind: DivergenceKind) -> BlockTerms:
    """Return a kernel that computes both softmaxes of the blocks of a chunk, and for a KL divergence its mean."""

    def terms(block: LogitBlock) -> Totals | None:
        found = _found(block, 7)
        if not DIVERGENCE.run(len(found), PART, *_pair(block), found, int(kind), block=_parts(found.shape[2])):
            return None
        names = (*SOFTMAXES, "mean") if kind else SOFTMAXES
        return dict(zip(names, found.unbind(1), strict=False))

    return terms


def mixture_divergences_of_blocks(previous: Totals, beta: float) -> BlockTerms:
    """Return a kernel that computes the second sweep of `JensenShannon` over the blocks of a chunk.

    Args:
        previous: Totals of the first sweep.
        beta: Weight of the teacher in the mixture.
    """
    names = ("top", "log_sum", "top_teacher", "log_sum_teacher")
    levels = torch.stack([finite_top(previous[name]) if name[0] == "t" else previous[name] for name in names])

    def terms(block: LogitBlock) -> Totals | None:
        found = _found(block, 2)
        if not JENSEN_SHANNON.run(len(found), PART, *_pair(block), levels, found, beta, block=_parts(found.shape[2])):
            return None
        return dict(zip(("student", "teacher"), found.unbind(1), strict=True))

    return terms


def gradient_of_divergence(
    kind: DivergenceKind, totals: Totals, factors: tuple[Tensor, ...], beta: float = 0.0
) -> BlockGradient:
    """Return a kernel that computes the gradient by the student's logits of each block.

    Args:
        kind: Which divergence.
        totals: Totals over the whole vocabulary.
        factors: f₀ to f₃ of `embedlayer.kernels.cpu.softmax.divergence_gradient`, `(C,)`; unused ones are left out.
        beta: Weight of the teacher in the mixture of Jensen-Shannon.
    """
    tops = finite_top(totals["top"]), finite_top(totals["top_teacher"])
    numbers = torch.stack([*tops, *factors, *(torch.zeros_like(tops[0]),) * (4 - len(factors))])

    def gradient(block: LogitBlock, bias_grad: Tensor | None) -> bool:
        rows, tokens = block.student.shape
        to_bias = numbers.new_empty(0) if bias_grad is None else bias_grad
        return DIVERGENCE_GRADIENT.run(
            rows, *_pair(block), numbers, to_bias, int(kind), float(beta), block=_rows(tokens)
        )

    return gradient


def _pair(block: LogitBlock) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the logits of student and teacher, and the biases that these do not contain yet."""
    assert block.teacher is not None
    return block.student, block.teacher, _bias(block, 0), _bias(block, 1)


def _found(block: LogitBlock, numbers: int) -> Tensor:
    """Allocate the results of the parts of a block, `(P, numbers, C)`."""
    rows, tokens = block.student.shape
    return torch.empty(math.ceil(rows / PART), numbers, tokens, dtype=_sum_dtype(block.student))


def _parts(tokens: int) -> int:
    """Return the number of parts that a thread claims at once."""
    return max(1, BLOCK_NUMEL // (PART * max(tokens, 1)))


def _rows(tokens: int) -> int:
    """Return the number of rows that a thread claims at once."""
    return max(1, BLOCK_NUMEL // max(tokens, 1))


def add_bfloat16_(total: Tensor, residual: Tensor, addend: Tensor, *, last: bool) -> None:
    """Add a tensor to float32 sums, whose high 16 bits are bfloat16 numbers, and whose low 16 bits are a residual.

    Args:
        total: High 16 bits of the sums, bfloat16, `(R, D)`; overwritten.
        residual: Low 16 bits, uint16, `(R, D)`; overwritten.
        addend: What is added, bfloat16, `(R, D)`.
        last: Whether this is the last addition: then `total` is rounded to the nearest, and `residual` is not needed.
    """
    if ADD_BFLOAT16.run(len(total), total, residual, addend, last, block=max(1, BLOCK_NUMEL // total.shape[1])):
        return
    bits = (total.view(torch.int16).int() << 16) | residual.int()
    wide = bits.view(torch.float32) + addend
    if last:
        total.copy_(wide)
    else:
        total.view(torch.int16).copy_(wide.view(torch.int32) >> 16)
        residual.copy_(wide.view(torch.int32))


def _bias(block: LogitBlock, head: int) -> Tensor:
    """Return the bias that the logits of a head do not contain yet, or a tensor without numbers."""
    bias = block.biases[head]
    return torch.empty(0, dtype=_sum_dtype(block.student)) if bias is None else bias


def _sum_dtype(logits: Tensor) -> torch.dtype:
    """Return the dtype of sums over logits."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
