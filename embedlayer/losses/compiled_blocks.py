"""Compiled kernels over blocks of logits, as `LogitStatistics` and the divergences use them.

Each function but `add_bfloat16_` prepares what the kernel needs once for a chunk of tokens, and returns a function of
a block.
"""

import torch
from torch import Tensor

from embedlayer.core.shapes import wide_dtype
from embedlayer.kernels.cpu.softmax import NO_ID, add_bfloat16
from embedlayer.kernels.divergences import (
    DivergenceKind,
    divergence_gradient,
    mixture_divergences,
    pair_statistics,
)
from embedlayer.kernels.largest import update_largest
from embedlayer.kernels.softmax import (
    BLOCK_NUMEL,
    Requests,
    concatenated,
    softmax_factors,
    softmax_gradient,
    softmax_statistics,
)
from embedlayer.losses.objective import BlockGradient, BlockTerms, LogitBlock, Totals, finite_top

KEYS = ("lane_keys", "part_keys")
"""Results of `softmax_statistics` from which the largest logits are found on CUDA."""


def statistics_of_blocks(ids: Tensor | None, names: list[str], *, with_keys: bool = False) -> BlockTerms:
    """Return a kernel that computes statistics of the blocks of a chunk; see `LogitStatistics.terms`."""
    requests = Requests.of([] if ids is None else [ids])
    flags = [*(name in names for name in ("sum", "mean", "log_squares")), with_keys]

    def terms(block: LogitBlock) -> Totals | None:
        result = softmax_statistics(block.student, block.biases[0], *requests, block.start, *flags, *block.unfinished)
        if result is None:
            return None
        found, selected, *keys = result
        totals = dict(zip(("top", "log_sum", "sums", "sum", "mean", "log_squares"), found.unbind(1), strict=True))
        kept = {name: totals[name] for name in ("top", "log_sum", "sums", *names)}
        kept |= dict(zip(KEYS, keys, strict=True)) if with_keys else {}
        return kept if ids is None else {**kept, "selected": selected.unsqueeze(0)}

    return terms


def with_largest(terms: BlockTerms, k: int) -> BlockTerms:
    """Return a kernel that also looks for the K largest logits; the totals of the last block contain them."""
    # The kernel has state: use it for the blocks of one chunk, each once.
    state: list[Tensor] = []
    seen = 0

    def with_top_k(block: LogitBlock) -> Totals | None:
        nonlocal seen
        z, dtype = block.student, wide_dtype(block.student.dtype)
        rows, tokens = z.shape
        if not state:
            state.extend(z.new_full(shape, -torch.inf, dtype=dtype) for shape in ((tokens,), (tokens, k)))
            state.append(z.new_full((tokens, k), NO_ID, dtype=torch.long))
        found = terms(block)
        if found is None:
            return None
        keys = [found.pop(name) for name in KEYS]
        if not update_largest(z, block.biases[0], block.start, seen, *keys, *state, *block.unfinished):
            return None
        seen += rows
        shown = slice(1 if block.is_last else 0)
        return {**found, "top_logits": state[1].T[None][shown], "top_ids": state[2].T[None][shown]}

    return with_top_k


def gradient_of_statistics(
    requested: list[tuple[Tensor, Tensor, Tensor]], totals: Totals, grads: Totals
) -> BlockGradient:
    """Return a kernel that computes the gradient by the logits of each block; see `LogitStatistics.dlogits_`."""
    requests = Requests.of([ids for ids, _, _ in requested])
    by_request, values = None, None
    if requests.places is not None:
        by_request = torch.cat([grad.flatten() for _, grad, _ in requested])[requests.places]
    elif requests.ids is not None:
        by_request, values = (concatenated([each[i] for each in requested]) for i in (1, 2))
    names = ("log_sum", "mean", "log_squares", "sum")
    of_totals = totals["top"], totals["sums"], totals.get("mean"), totals.get("log_squares")
    factors = grads["factors"] if "factors" in grads else softmax_factors(*of_totals, *map(grads.get, names))
    flags = "mean" in grads, "log_squares" in grads

    def gradient(block: LogitBlock, bias_grad: Tensor | None, add: bool) -> bool:
        inputs = block.student, block.biases[0], *requests, block.start, by_request, values, factors, bias_grad, add
        done: bool = softmax_gradient(*inputs, *flags, *block.unfinished)
        return done

    return gradient


SOFTMAXES = ("top", "log_sum", "sums", "top_teacher", "log_sum_teacher", "sums_teacher")
"""Totals of the softmaxes of two heads, in the order of the kernel."""


def divergence_of_blocks(kind: DivergenceKind) -> BlockTerms:
    """Return a kernel that computes both softmaxes of the blocks of a chunk, and for a KL divergence its mean."""

    def terms(block: LogitBlock) -> Totals | None:
        found = pair_statistics(*_pair(block), int(kind))
        names = (*SOFTMAXES, "mean") if kind else SOFTMAXES
        return None if found is None else dict(zip(names, found.unbind(1), strict=False))

    return terms


def mixture_divergences_of_blocks(previous: Totals, beta: float) -> BlockTerms:
    """Return a kernel that computes the second sweep of `JensenShannon` over the blocks of a chunk."""
    names = ("top", "log_sum", "top_teacher", "log_sum_teacher")
    levels = torch.stack([finite_top(previous[name]) if name[0] == "t" else previous[name] for name in names])

    def terms(block: LogitBlock) -> Totals | None:
        found = mixture_divergences(*_pair(block), levels, beta)
        return None if found is None else dict(zip(("student", "teacher"), found.unbind(1), strict=True))

    return terms


def gradient_of_divergence(
    kind: DivergenceKind, totals: Totals, factors: tuple[Tensor, ...], beta: float = 0.0
) -> BlockGradient:
    """Return a kernel that computes the gradient by the student's logits of each block."""
    tops = finite_top(totals["top"]), finite_top(totals["top_teacher"])
    numbers = torch.stack([*tops, *factors, *(torch.zeros_like(tops[0]),) * (4 - len(factors))])

    def gradient(block: LogitBlock, bias_grad: Tensor | None, add: bool) -> bool:
        done: bool = divergence_gradient(*_pair(block), numbers, bias_grad, add, int(kind), float(beta))
        return done

    return gradient


def _pair(block: LogitBlock) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the logits of student and teacher, and the biases that these do not contain yet."""
    assert block.teacher is not None
    return block.student, block.teacher, *block.biases


def add_bfloat16_(total: Tensor, residual: Tensor, addend: Tensor, *, last: bool) -> None:
    """Add a tensor to float32 sums, whose high 16 bits are bfloat16 numbers, and whose low 16 bits are a residual."""
    # Overwrites `total` and `residual` (uint16). The last addition rounds `total` to nearest; `residual` is then stale.
    if add_bfloat16.run(len(total), total, residual, addend, last, block=max(1, BLOCK_NUMEL // total.shape[1])):
        return
    bits = (total.view(torch.int16).int() << 16) | residual.int()
    wide = bits.view(torch.float32) + addend
    if last:
        total.copy_(wide)
    else:
        total.view(torch.int16).copy_(wide.view(torch.int32) >> 16)
        residual.copy_(wide.view(torch.int32))
