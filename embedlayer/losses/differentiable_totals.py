"""Totals per token of a pass over the vocabulary, for autograd, whatever computes the logits.

Rows that are stored as a matrix use `VocabularyPass`, whose gradients are written by hand. For other tables the blocks
are checkpointed: the backward pass computes each again, and every tensor that it depends on gets its gradient. Under
`torch.func` transforms and in exported graphs all logits are computed at once.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embedlayer.core.devices import HostCopy, autocast, device_kind
from embedlayer.core.errors import SizeError
from embedlayer.core.shapes import wide_dtype
from embedlayer.core.torch_state import is_transformed
from embedlayer.losses.chunk_size import LEAST_ROWS, MAX_CHUNK_TOKENS, WORK_BYTES, row_blocks, tokens_within
from embedlayer.losses.definition import (
    counted_states,
    gradient_dtype,
    reduce_losses,
    reduction_factors,
    scaled_factors,
)
from embedlayer.losses.loop import VocabularyPass
from embedlayer.losses.objective import (
    EventLogits,
    LogitBlock,
    Objective,
    Request,
    TokenLoss,
    Totals,
    Workspace,
    joined,
)
from embedlayer.losses.options import LossSettings
from embedlayer.losses.recording import is_recording, record_totals
from embedlayer.losses.rows import padded_states
from embedlayer.losses.uncomputed_logits import (
    BlockLogits,
    LinearLogits,
    RequestedGradients,
    UncomputedLogits,
    is_plain,
    joint_multiple,
)


def compute_totals(student: UncomputedLogits, request: Request) -> Totals:
    """Compute totals per token, differentiable by everything that the student's logits depend on."""
    return plain_totals(student, request) if is_plain(student) else chunked_totals(student, request)


def chunked_totals(student: UncomputedLogits, request: Request) -> Totals:
    """Compute `compute_totals` from blocks of logits of some tokens after another."""
    if isinstance(student, LinearLogits):
        job = LinearJob(student, request)
        names: list[str] = []
        totals = _LinearTotals.apply(*job.inputs(), job, names)  # type: ignore[no-untyped-call]
        found = dict(zip(names, totals, strict=True))
        mask = request.tokens.mask
        return found if mask is None or request.tokens.places is not None else _masked(found, mask)
    assert isinstance(student, BlockLogits)
    return _block_totals(student, request)


def plain_totals(student: UncomputedLogits, request: Request) -> Totals:
    """Compute totals per token from all logits at once, in plain PyTorch: the definition of `compute_totals`."""
    teacher = None
    if request.teacher is not None:
        with torch.no_grad():
            teacher = _plain_logits(request.teacher, request.tokens.mask)
    ids = None if request.ids is None else request.ids.T
    mask = request.tokens.mask
    logits = _plain_logits(student, mask)
    if request.events is not None and teacher is not None:
        both = zip((logits, teacher), request.events, strict=True)
        logits, teacher = (torch.cat([z, events.T.to(z.dtype)]) for z, events in both)
    block = LogitBlock(logits, teacher, ids, 0, True, Workspace(), is_whole=True)
    totals = request.objective.in_sweeps(partial(request.objective.terms, block))
    return totals if mask is None else _masked(totals, mask)


def _plain_logits(logits: UncomputedLogits, kept: Tensor | None) -> Tensor:
    """Return all logits as a block, `(V, N)`."""
    mask = None if kept is None else kept.view(logits.hidden.shape[:-1])
    return logits.logits(mask).reshape(-1, logits.vocab_size).T


def _masked(totals: Totals, kept: Tensor) -> Totals:
    others = ~kept
    return {name: value.masked_fill(others, 0) for name, value in totals.items()}


def compute_loss(
    student: UncomputedLogits,
    request: Request,
    objective: TokenLoss,
    kept: Tensor | None,
    loss: LossSettings,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute a loss in chunks, reduced, and the losses of the tokens.

    With a reduction, the pass over stored rows computes the gradients too. `kept` is the mask of the tokens that count,
    and `factors` are the factors of their losses, if a kernel computed them.
    """
    if isinstance(student, LinearLogits) and loss.reduction != "none":
        job = LinearJob(student, request, objective, token_factors(student, request, kept, loss, factors))
        total, [losses] = compute_joint_loss([job])
        return total, losses
    totals = chunked_totals(student, request)
    if is_recording():
        record_totals(student, request, totals)
    losses = objective.of(totals).view(student.hidden.shape[:-1])
    losses = losses if kept is None else losses.where(kept, 0.0)
    return reduce_losses(losses, kept, loss), losses.detach()


def compute_joint_loss(jobs: Sequence["LinearJob"]) -> tuple[Tensor, list[Tensor]]:
    """Compute the sum of the losses of heads of stored rows, with a reduction, as `compute_loss` does."""
    inputs = [x for job in jobs for x in job.inputs()]
    total, *losses = _LinearLoss.apply(jobs, *inputs)  # type: ignore[no-untyped-call]
    return total, [each.view(job.student.hidden.shape[:-1]) for each, job in zip(losses, jobs, strict=True)]


def token_factors(
    logits: UncomputedLogits, request: Request, kept: Tensor | None, loss: LossSettings, factors: Tensor | None = None
) -> Tensor:
    """Return the factor of each token's loss in a reduced one, `(N,)`; `factors` are those of a kernel."""
    dtype = wide_dtype(logits.dtype)
    if kept is None:
        weights, hidden = loss.token_weights, logits.hidden
        ones = hidden.new_ones(hidden.shape[:-1], dtype=dtype) if weights is None else weights.to(dtype)
        return (ones / max(ones.numel(), 1) if loss.reduction == "mean" else ones).flatten()
    if factors is None or factors.dtype != dtype:
        count = None if device_kind(kept) == "cpu" else request.tokens.number_of(kept.numel())
        factors = reduction_factors(kept, loss, dtype, count)
    return factors.flatten()


Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
Grads = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class LinearJob:
    """A request for a head whose rows are a matrix, with the loss of its tokens and the factors of these losses."""

    def __init__(
        self,
        student: LinearLogits,
        request: Request,
        objective: TokenLoss | None = None,
        factors: Tensor | None = None,
    ) -> None:
        self.objective, self.factors = objective, factors
        tokens, of_rank = request.tokens, student.rank_request
        if of_rank is not None and tokens.of_ranks is None:
            facts = of_rank.facts(tokens.computed_of(student.hidden.shape[:-1].numel()))
            request = request._replace(tokens=tokens._replace(of_ranks=facts))
        self.student = student
        self.request = request
        self.requested = RequestedGradients.of(student.hidden, student.weight, student.bias)
        self.events_requested = request.events is not None and request.events.student.requires_grad

    @property
    def parts(self) -> Inputs:
        """Return the tensors that may get a gradient: hidden states, rows, bias, and logits of further events."""
        student, events = self.student, self.request.events
        return student.hidden, student.weight, student.bias, None if events is None else events.student

    def inputs(self) -> Inputs:
        """Return `parts`, with the bias of the rows of this rank alone."""
        hidden, weight, bias, events = self.parts
        if bias is not None and self.student.is_sharded:
            start, stop = self.student.row_range
            bias = bias[start:stop]
        return hidden, weight, bias, events

    def with_parts(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, events: Tensor | None) -> "LinearJob":
        job, known = copy(self), self.request.events
        job.factors = None
        job.student = self.student.with_tensors(hidden, weight, bias)
        if known is not None and events is not None:
            job.request = self.request._replace(events=known._replace(student=events))
        return job

    def loss_and_gradients(self, factors: Tensor) -> tuple[Tensor, Tensor, Grads]:
        """Return `sum(factors * losses)`, the losses, and the gradients of the sum that are requested."""
        assert self.objective is not None
        with autocast(self.student.hidden, None):
            losses, gradients, total = VocabularyPass(self.student, self.request).losses(
                self.objective, self.requested, factors
            )
        if total is None:
            total = (losses * factors).sum() if device_kind(losses) == "cpu" else torch.dot(losses, factors)
        return total, losses, gradients

    @staticmethod
    def save(ctx: Any, jobs: Sequence["LinearJob"], *others: Tensor) -> None:
        """Save the tensors of jobs and others in `ctx`, and keep no reference to them."""
        ctx.save_for_backward(*(x for job in jobs for x in job.parts), *others)
        nothing = jobs[0].student.hidden.new_empty(0)
        ctx.jobs = [job.with_parts(nothing, nothing, None, nothing) for job in jobs]

    @staticmethod
    def restored(ctx: Any) -> tuple[list["LinearJob"], list[Tensor]]:
        """Return the jobs with their saved tensors, and the other saved tensors."""
        saved = iter(ctx.saved_tensors)
        jobs = [job.with_parts(next(saved), next(saved), next(saved), next(saved)) for job in ctx.jobs]
        return jobs, list(saved)

    def differentiable(self, value: Callable[[Totals], list[Tensor]], grads: Any) -> Grads:
        """Compute gradients by the plain definition, so that they can be differentiated again or batched."""
        if self.student.is_sharded:
            raise SizeError("The loss of a sharded table has no second derivatives: leave out create_graph=True.")
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():  # views: one part may have been computed from another one
            job = self.with_parts(*(None if x is None else x.view_as(x) for x in self.parts))  # type: ignore[arg-type]
            student = job.student
            student = student.replaced(student.hidden, student.options._replace(batch_invariant=False))
            outputs = value(plain_totals(student, job.request))
        requested = (*self.requested, self.events_requested)
        wanted = [part for part, need in zip(job.parts, requested, strict=True) if part is not None and need]
        found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=create_graph))
        return tuple(next(found) if need else None for need in requested)  # type: ignore[return-value]

    def like_inputs(self, gradients: Grads, factor: Tensor | None = None) -> Grads:
        """Convert gradients to the dtypes of the inputs, multiplied by a scalar; they may be overwritten."""

        def converted(grad: Tensor, dtype: torch.dtype) -> Tensor:
            if factor is None:
                return grad.to(dtype)
            if grad.dtype == dtype or device_kind(grad) == "cpu":
                return grad.mul_(factor).to(dtype)
            return torch.mul(grad, factor, out=torch.empty_like(grad, dtype=dtype))

        return tuple(  # type: ignore[return-value]
            None if grad is None or part is None else converted(grad, gradient_dtype(part))
            for grad, part in zip(gradients, self.parts, strict=True)
        )


class _LinearTotals(torch.autograd.Function):
    """Compute totals; `backward` computes each block of logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        events: Tensor | None,
        job: LinearJob,
        names: list[str],
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        with autocast(hidden, None):
            totals = VocabularyPass(job.student, job.request).totals()
        names.extend(totals)
        ctx.names = list(totals)
        constants = job.request.objective.constants
        ctx.mark_non_differentiable(*(value for name, value in totals.items() if name in constants))
        LinearJob.save(ctx, [job], *totals.values())
        return tuple(totals.values())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        [job], values = LinearJob.restored(ctx)
        totals = dict(zip(ctx.names, values, strict=True))
        grads = {name: x for name, x in zip(ctx.names, grad_outputs, strict=True) if x is not None}
        grads = {name: x for name, x in grads.items() if name not in job.request.objective.constants}
        if not grads:
            return (None,) * 6
        if torch.is_grad_enabled() or is_transformed(*grads.values()):
            found = job.differentiable(lambda all_of: [all_of[name] for name in grads], list(grads.values()))
        else:
            with autocast(job.student.hidden, None):
                found = job.like_inputs(
                    VocabularyPass(job.student, job.request).gradients(job.requested, totals, grads)
                )
        return (*found, None, None)


class _LinearLoss(torch.autograd.Function):
    """Compute the sum of `sum(factors * losses)` over jobs, with its gradients."""

    # `backward` multiplies the saved gradients by `grad_output` in place, so a second `backward` computes them again.

    @staticmethod
    def forward(ctx: Any, jobs: list[LinearJob], *_: Tensor | None) -> tuple[Tensor, ...]:
        factors = [job.factors for job in jobs if job.factors is not None]
        totals, losses, ctx.gradients = _LinearLoss._passes(jobs, factors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*losses)
        LinearJob.save(ctx, jobs, *(each.detach() for each in factors))
        return totals[0] if len(totals) == 1 else torch.stack(totals).sum(), *losses

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (None,) * len(ctx.needs_input_grad)
        jobs, factors = LinearJob.restored(ctx)
        if torch.is_grad_enabled() or is_transformed(grad_output):
            found = [
                job.differentiable(partial(_LinearLoss._reduced, job, of_tokens), [grad_output])
                for job, of_tokens in zip(jobs, factors, strict=True)
            ]
        elif (scaled := _LinearLoss._scaled(ctx, jobs, factors, grad_output)) is not None:
            found = scaled
        else:
            gradients = _LinearLoss._passes(jobs, [scaled_factors(each, grad_output) for each in factors])[2]
            found = [job.like_inputs(each) for job, each in zip(jobs, gradients, strict=True)]
        return (None, *(grad for each in found for grad in each))

    @staticmethod
    def _passes(jobs: list[LinearJob], factors: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Grads]]:
        """Return `sum(factors * losses)` of each job, its losses and its gradients."""
        totals, losses = [], []
        gradients: list[Grads] = []
        for job, of_tokens in zip(jobs, factors, strict=True):
            total, each, (hidden, weight, bias, events) = job.loss_and_gradients(of_tokens)
            if gradients and (joint := gradients[0][0]) is not None and hidden is not None:
                joint.add_(hidden)
                hidden = None
            totals.append(total)
            losses.append(each)
            gradients.append((hidden, weight, bias, events))
        return totals, losses, gradients

    @staticmethod
    def _reduced(job: LinearJob, factors: Tensor, totals: Totals) -> list[Tensor]:
        assert job.objective is not None
        return [(job.objective.of(totals) * factors).sum()]

    @staticmethod
    def _scaled(ctx: Any, jobs: list[LinearJob], factors: list[Tensor], grad_output: Tensor) -> list[Grads] | None:
        """Return the gradients of the forward pass times `grad_output`, or `None` where they are computed again."""
        # `None`: compute again. Sharded rows need one `grad_output` on all ranks: the host waits to compare them, or,
        # with `equal_loss_factors`, the gradients are NaN if they differ.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            return None
        student = jobs[0].student
        are_equal = student.collectives.all_equal(grad_output)
        factor = grad_output.where(are_equal, torch.nan) if student.equal_loss_factors else grad_output
        copy = None if student.equal_loss_factors else HostCopy(are_equal)
        value = factor.item() if device_kind(factor) == "cpu" else None
        if not student.is_sharded:
            if value is not None and not math.isfinite(value):
                return None
            if value is None:
                factor = _LinearLoss._zero_without_tokens(jobs, factors, factor)
        scaled = [job.like_inputs(gradients.pop(0), None if value == 1 else factor) for job in jobs]
        return scaled if copy is None or copy.tolist() else None

    @staticmethod
    def _zero_without_tokens(jobs: list[LinearJob], factors: list[Tensor], grad_output: Tensor) -> Tensor:
        """Return `grad_output`, or 0 if no token of any job counts, without waiting for the device."""
        tokens = [job.request.tokens for job in jobs]
        counts = [each.number_of(len(of_tokens)) for each, of_tokens in zip(tokens, factors, strict=True)]
        if any(counts):
            return grad_output
        flags = [
            (of_tokens == 0).all() if each.is_empty is None else each.is_empty
            for each, count, of_tokens in zip(tokens, counts, factors, strict=True)
            if count is None
        ]
        if not flags:
            return torch.zeros_like(grad_output)
        is_empty = flags[0] if all(flag is flags[0] for flag in flags) else torch.stack(flags).all()
        return grad_output.masked_fill(is_empty, 0.0)


def logits_in_blocks(logits: UncomputedLogits) -> Tensor:
    """Compute all logits, `(..., V)`, from the products of a pass, each of some tokens and a block of rows."""
    all_logits = chunked_totals(logits, Request(_AllLogits()))["logits"]
    return all_logits.T.reshape(*logits.hidden.shape[:-1], logits.vocab_size)


class _AllLogits(Objective):
    """Take all logits as the totals of a token, so that their gradient is that of the products of a pass."""

    slots = 0
    has_row_totals = True

    def terms(self, block: LogitBlock, previous: Totals) -> Totals:
        return {"logits": block.student.clone()}

    def merge(self, parts: Totals) -> Totals:
        return parts

    def dlogits_(self, block: LogitBlock, totals: Totals, grads: Totals) -> None:
        block.student.copy_(grads["logits"][block.start : block.start + len(block.student)])


def _blocks_of_rows(logits: BlockLogits) -> list[tuple[int, int]]:
    """Return the first row of each block, and the row behind it."""
    return row_blocks(logits.vocab_size, logits.rows_at_once, least=LEAST_ROWS if logits.options.batch_invariant else 1)


def _block_totals(student: BlockLogits, request: Request) -> Totals:
    hidden = student.hidden.reshape(-1, student.hidden.shape[-1])
    teacher = None if request.teacher is None else request.teacher.hidden.detach().flatten(0, -2)
    ids, (mask, places, *_), tokens = request.ids, request.tokens, len(hidden)
    if places is not None:
        ids = None if ids is None else ids[places]
    of_tokens = [
        None if x is None else counted_states(x, mask) if places is None else x[places]
        for x in (hidden, teacher, *(request.events or ()))
    ]
    count = tokens if places is None else len(places)
    multiple = joint_multiple(student, request.teacher)
    step = max(_tokens_at_once(student, request) // multiple, 1) * multiple
    found = []
    for number in range(max(-(-count // step), 1)):  # a compiled graph serves each count with as many chunks
        start = number * step
        chunk = [None if x is None else padded_states(x[start : start + step], multiple) for x in (ids, *of_tokens)]
        totals = request.objective.in_sweeps(partial(_sweep, student, request, chunk))
        found.append({name: value[..., : count - start] for name, value in totals.items()})
    joined = {name: torch.cat([each[name] for each in found], dim=-1) for name in found[0]}
    if places is None:
        return joined if mask is None else _masked(joined, mask)
    return {
        name: value.new_zeros(*value.shape[:-1], tokens).index_copy(-1, places, value) for name, value in joined.items()
    }


def _tokens_at_once(student: BlockLogits, request: Request) -> int:
    """Return how many tokens have the logits of a block of rows, and what autograd keeps of them, in memory at once."""
    device, rows = "cuda" if device_kind(student.hidden) == "cuda" else "cpu", student.rows_at_once
    if device == "cpu" and request.chunk_bytes is None:
        return MAX_CHUNK_TOKENS[device]
    objective = request.objective
    numbers = objective.work_numbers(rows) + 2 * objective.slots * rows  # intermediate results and their gradients
    size = numbers * wide_dtype(student.dtype).itemsize + 6 * rows  # raw logits and masks
    return min(MAX_CHUNK_TOKENS[device], tokens_within(request.chunk_bytes or WORK_BYTES, size))


def _sweep(student: BlockLogits, request: Request, chunk: list[Tensor | None], previous: Totals) -> Totals:
    """Compute the totals of one sweep over all blocks of rows for a chunk of tokens."""
    ids, hidden, teacher_hidden, *events = chunk
    assert hidden is not None
    ids = None if ids is None else ids.T

    def terms(hidden: Tensor, start: int, stop: int) -> Totals:
        z, t = student.block(hidden, start, stop).T, None
        if request.teacher is not None and teacher_hidden is not None:
            with torch.no_grad():
                t = request.teacher.block(teacher_hidden, start, stop).T
        return request.objective.parts(LogitBlock(z, t, ids, start, True, Workspace(), is_whole=is_whole), previous)

    blocks = _blocks_of_rows(student)
    is_whole = len(blocks) == 1 and request.events is None
    if torch.is_grad_enabled():
        parts = [checkpoint(terms, hidden, *block, use_reentrant=False) for block in blocks]
    else:
        parts = [terms(hidden, *block) for block in blocks]
    if request.events is not None:
        block = EventLogits(*events).block(student.vocab_size, wide_dtype(student.dtype))  # type: ignore[arg-type]
        parts.append(request.objective.parts(block, previous))
    return request.objective.merge(joined(parts))
