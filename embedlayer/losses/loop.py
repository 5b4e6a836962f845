"""The loop over the vocabulary: everything that losses need, from blocks of logits of some tokens over some rows.

All logits at once are `tokens x V` numbers, and their gradients as many again. But the loss of a token and its
gradients need its own logits only, and their logsumexp. So `VocabularyPass` takes one chunk of tokens after another,
and in each one block of rows after another: product, `Objective.terms`, and, once the totals are merged,
`Objective.dlogits_` and the products of its result with rows and hidden states, which are the gradients. On CUDA a
block has all rows, and a chunk may have all tokens; `chunk_size` bounds their bytes.

Where the gradient of every loss is known beforehand, as for a mean, `losses` keeps all blocks of a chunk in one buffer
until their gradients are computed: three products. Otherwise the forward pass keeps only the `totals`, and in the
backward pass `gradients` computes each block again: four products. For two heads these are four and six.

Blocks are `(R, C)`, vocabulary first: `weight @ hidden.T` is 1.4x faster on a CPU than `hidden @ weight.T`, and a
padding row is one block of memory. Suffixes name the dimensions: N tokens, C tokens of a chunk, V rows, R rows of a
block, D columns, K requested IDs.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.shapes import wide_dtype
from embedlayer.kernels.kernel import as_array
from embedlayer.kernels.softmax import STATISTICS, Finishing, concatenated
from embedlayer.losses.blocks import Gradients, GradientSums, HeadBlocks
from embedlayer.losses.chunk_size import (
    LEAST_ROWS,
    MAX_CHUNK_TOKENS,
    MULTIPLE,
    ROWS_OF_A_BLOCK,
    WORK_BYTES,
    row_blocks,
    tokens_per_chunk,
    tokens_within,
)
from embedlayer.losses.objective import (
    BlockGradient,
    EventLogits,
    LogitBlock,
    Request,
    TokenLoss,
    Totals,
    Workspace,
    joined,
)
from embedlayer.losses.recording import RECORDED, is_recording, record_totals
from embedlayer.losses.token_chunks import Chunk, TokenChunks
from embedlayer.losses.uncomputed_logits import LinearLogits, RequestedGradients, joint_multiple


class TokenLosses(NamedTuple):
    """Hold the losses of this rank's tokens, `(N,)`, and what else a pass computed of them."""

    of_tokens: Tensor
    gradients: Gradients
    total: Tensor | None  # sum of the losses times their factors, if a kernel computed it


class VocabularyPass:
    """A pass over the vocabulary for one request, without autograd; what it decides, it decides once, when built."""

    # Sharded rows: each rank passes its own tokens, and all ranks must make the same calls.

    def __init__(self, student: LinearLogits, request: Request) -> None:
        self.request = request
        self.objective, teacher, ids, counted, self.min_chunks, self.max_bytes, events = request
        self.student = student
        (self.first, stop), self.dtype = student.row_range, wide_dtype(student.dtype)
        self.rows = stop - self.first
        self.is_invariant = student.options.batch_invariant
        multiple = joint_multiple(student, teacher)
        self.tokens = TokenChunks(student.collectives, student.hidden.shape[:-1].numel(), counted, multiple)
        self.ids = self.tokens.compact_ids(ids)
        self.events = None if events is None else EventLogits(*(self.tokens.states(x.detach()) for x in events))
        assert events is None or not student.is_sharded
        both = [student] if teacher is None else [student, teacher]
        self.may_be_infinite = any(each.may_be_infinite for each in both)
        self.like = student.hidden.new_empty(0, dtype=self.dtype)
        self.device = "cuda" if device_kind(self.like) == "cuda" else "cpu"  # the key of the tables of block sizes
        self.compiled = self.objective.has_kernels and STATISTICS.applies(*(x for each in both for x in each.tensors))
        self.kernels_finish = self.compiled and self.device == "cuda" and self.objective.finishes
        kernels = {"compiled": self.compiled, "kernels_finish": self.kernels_finish}
        self.heads = [HeadBlocks(each, (self.first, stop), self.tokens, self.dtype, **kernels) for each in both]
        least = LEAST_ROWS if self.is_invariant else 1
        self.row_blocks = row_blocks(self.rows, ROWS_OF_A_BLOCK[self.device], least=least)
        self.work, self.softcap_buffer = Workspace(), self.like

    def totals(self) -> Totals:
        """Return the totals of all tokens, `(N,)` or `(K, N)`."""
        step, found = self._recomputed_tokens(), []
        buffers = self._allocate(step)
        for chunk in self._chunks(step):
            totals = self._totals(chunk, self._blocks(chunk, buffers))
            found.append({name: chunk.own(x) for name, x in totals.items()})
        return self._scattered(found or [self._totals_of_nothing()])

    def gradients(self, requested: RequestedGradients, totals: Totals, grads: Totals) -> Gradients:
        """Return the requested gradients from the totals of an earlier pass and their gradients.

        The logits of a block are computed again.
        """
        totals, grads = ({name: self.tokens.compact(x) for name, x in each.items()} for each in (totals, grads))
        step, scale = self._recomputed_tokens(), self.heads[0].narrow_scale(*grads.values())
        if scale is not None:
            grads = {name: x * scale for name, x in grads.items()}
        sums, buffers = self._sums(requested, step, scale), self._allocate(step)
        for chunk in self._chunks(step):
            of_chunk = chunk.gathered_totals(totals), chunk.gathered_totals(grads, zeros=True)
            self._add_gradients(sums, chunk, self._blocks(chunk, buffers), *of_chunk)
        return self._of_inputs(sums)

    def losses(self, loss: TokenLoss, requested: RequestedGradients, factors: Tensor | None = None) -> TokenLosses:
        """Return the losses of all tokens and, with `factors` `(N,)`, the gradients of `sum(factors * losses)`.

        The logits of a chunk are kept until its gradients are computed.
        """
        tokens, sums = self.tokens, None
        if not (any(requested) if tokens.of_ranks is None else tokens.of_ranks.gradients):
            factors = None
        kept = factors is not None
        step = self._kept_tokens(requested) if kept else self._recomputed_tokens()
        if factors is not None:
            factors = tokens.compact(factors)
            if (scale := self.heads[0].narrow_scale(factors)) is not None:
                factors = factors * scale
            sums = self._sums(requested, step, scale)
        buffers = self._allocate(step, kept=kept)
        losses, recorded, total = [], [], None
        for chunk in self._chunks(step):
            blocks = self._blocks(chunk, buffers, kept=kept)
            totals = self._totals(chunk, blocks, kept=kept)
            if is_recording():
                recorded.append({name: chunk.own(totals[name]) for name in RECORDED})
            if sums is None or factors is None:
                of_tokens = loss.of(totals)
            else:
                factors_C = chunk.gathered(factors, zeros=True)
                compiled = loss.compiled(chunk.ids, totals, factors_C, sum(chunk.sizes)) if self.compiled else None
                of_tokens, grads, total = compiled or (loss.of(totals), loss.gradients(totals, factors_C), None)
                self._add_gradients(sums, chunk, blocks, totals, grads, buffers[0])
            losses.append(chunk.own(of_tokens))
        gradients = (None, None, None, None) if sums is None else self._of_inputs(sums)
        if recorded:
            record_totals(self.student, self.request, self._scattered(recorded))
        losses_N = tokens.masked(tokens.scattered(concatenated(losses) if losses else self.like.new_zeros(0)))
        is_all = len(losses) == len(tokens.counts) == 1 and tokens.all_count and (sums is None or sums.scale is None)
        return TokenLosses(losses_N, gradients, total if is_all else None)

    def _totals(self, chunk: Chunk, blocks: list[LogitBlock], *, kept: bool = False) -> Totals:
        """Return the totals of a chunk over the rows of all ranks; computes the logits of its blocks."""
        totals: Totals = {}
        for sweep in range(self.objective.sweeps):
            kernel = self.objective.compiled_terms(chunk.ids, totals) if self.compiled else None
            parts = []
            for block in blocks:
                if not (kept and sweep):
                    self._fill(block, chunk)
                of_block = None if kernel is None else kernel(block)
                if of_block is None:
                    of_block = self.objective.parts(block.with_bias(self.dtype), totals)
                parts.append(of_block)
            if (events := self._event_block(chunk)) is not None:
                parts.append(self.objective.parts(events, totals))
            totals = {**totals, **chunk.merged(self.objective.merge(joined(parts)), self.objective.merge)}
        return totals

    def _add_gradients(
        self,
        sums: GradientSums,
        chunk: Chunk,
        blocks: list[LogitBlock],
        totals: Totals,
        grads: Totals,
        logits: Tensor | None = None,
    ) -> None:
        """Add the gradients of a chunk to `sums`; `logits` has all its logits, or they are computed again."""
        kernel = self.objective.compiled_dlogits(chunk.ids, totals, grads) if self.compiled else None
        one_product = logits if sums.multiplies_stored_rows and not self.is_invariant else None
        for block in blocks:
            if logits is None:
                self._fill(block, chunk)
            self._to_dlogits(block, totals, grads, kernel, sums)
            sums.add(block.student, chunk, block.start - self.first, with_hidden=one_product is None)
        if one_product is not None:
            sums.add_to_hidden(one_product[: self.rows * len(chunk.hidden[0])].view(self.rows, -1), chunk, 0)
        if (events := self._event_block(chunk)) is not None and sums.events is not None:
            self.objective.dlogits_(events, totals, grads)
            sums.events[chunk.here] = chunk.own(events.student).T
        sums.finish_chunk(chunk)

    def _of_inputs(self, sums: GradientSums) -> Gradients:
        """Return the gradients of the inputs once all chunks are added."""
        self.work, self.softcap_buffer = Workspace(), self.like  # freed: the conversion needs as much memory
        return sums.of_inputs(self.tokens)

    def _to_dlogits(
        self, block: LogitBlock, totals: Totals, grads: Totals, kernel: BlockGradient | None, sums: GradientSums
    ) -> None:
        """Replace the logits of a block by the gradient of the products, and add the gradient of the bias to `sums`."""
        head, start = self.heads[0], block.start - self.first
        bias = None if sums.bias is None else sums.bias[start : start + len(block.student)]
        if kernel is not None and self.kernels_finish:
            kernel(block, bias, sums.adds_to_bias)
            return
        finishing, dlogits, softcap_grad_RC = head.finishing, block, None
        if finishing.softcap is not None:
            softcap_grad_RC = finishing.softcap_grad(block.student, self.softcap_buffer)
        summed_by_kernel = bias if softcap_grad_RC is None else None
        if kernel is None or not kernel(block, summed_by_kernel, sums.adds_to_bias):
            dlogits, summed_by_kernel = block.with_bias(self.dtype), None
            self.objective.dlogits_(dlogits, totals, grads)
        if softcap_grad_RC is not None or finishing.masked is not None:
            finishing.unfinish_(dlogits.student, softcap_grad_RC, start)
        if bias is not None and summed_by_kernel is None:
            bias += dlogits.student.sum(1)
        if head.block_scale != 1:
            dlogits.student.mul_(head.block_scale)
        if dlogits.student is not block.student:
            block.student.copy_(dlogits.student)

    def _scattered(self, parts: list[Totals]) -> Totals:
        """Return the totals of this rank's tokens, `(N,)` or `(K, N)`, from those of chunks."""
        return {name: self.tokens.scattered(torch.cat([part[name] for part in parts], dim=-1)) for name in parts[0]}

    def _totals_of_nothing(self) -> Totals:
        """Return empty totals, for a batch without tokens on any rank."""
        nothing = self.like.new_zeros(self.student.vocab_size, 0)
        ids = None if self.ids is None else self.ids.T
        block = LogitBlock(nothing, nothing, ids, 0, may_be_infinite=False, work=Workspace())
        return self.objective.in_sweeps(partial(self.objective.terms, block))

    def _chunks(self, step: int) -> Iterator[Chunk]:
        """Yield the chunks of at most `step` tokens of each rank, with hidden states in the dtype of the products."""
        for chunk in self.tokens.chunks(step, [head.hidden_ND for head in self.heads], self.ids):
            yield chunk._replace(hidden=[head.states(x) for head, x in zip(self.heads, chunk.hidden, strict=True)])

    def _kept_tokens(self, requested: RequestedGradients) -> int:
        """Return the number of tokens of each rank in a chunk whose logits are kept for their gradients."""
        ranks, width = len(self.tokens.counts), self.student.hidden.shape[-1]
        rows, sizes = math.ceil(self.student.vocab_size / ranks), [head.dtype.itemsize for head in self.heads]
        tokens = tokens_per_chunk(
            self._padded(sum(self.tokens.counts)),
            rows,
            width,
            self.device,
            max(sizes) if self.device == "cpu" and self.max_bytes is None else sum(sizes),
            work_bytes=self._work_bytes(rows),
            is_frozen=ranks == 1 and not requested.weight,
            is_gathered=ranks > 1,
            max_bytes=self.max_bytes,
        )
        return self._chunk_tokens(math.ceil(tokens / ranks))

    def _recomputed_tokens(self) -> int:
        """Return the number of tokens of each rank in a chunk whose logits are not kept."""
        most, ranks = MAX_CHUNK_TOKENS[self.device], len(self.tokens.counts)
        rows = min(ROWS_OF_A_BLOCK[self.device], math.ceil(self.student.vocab_size / ranks))
        if self.device == "cuda" or self.max_bytes is not None:
            size = rows * sum(head.dtype.itemsize for head in self.heads) + self._work_bytes(rows)
            size += self.objective.bytes_of_parts(rows)
            most = min(most, tokens_within(self.max_bytes or WORK_BYTES, size))
        return self._chunk_tokens(most // ranks)

    def _work_bytes(self, rows: int) -> int:
        """Return the bytes of intermediate results over the rows of a block, per token."""
        size, head = self.dtype.itemsize, self.heads[0]
        work = 0 if self.compiled else self.objective.work_numbers(rows) * size
        if head.finishing.softcap is not None and not self.kernels_finish:
            work += rows * size
        if not self.compiled and self.may_be_infinite:
            work += self.objective.slots * rows  # masks
        return work + head.converted_bytes * rows

    def _chunk_tokens(self, most: int) -> int:
        """Return the number of tokens of each rank in a chunk: at most `most`, for `min_chunks` chunks or more."""
        multiple = self.tokens.multiple
        most = min(most, math.ceil(self._padded(max(self.tokens.counts)) / self.min_chunks))
        return max(most // multiple, 1) * multiple

    def _padded(self, tokens: int) -> int:
        """Return the number of tokens with those of the padding on a CPU."""
        return math.ceil(tokens / self.tokens.multiple) * self.tokens.multiple

    def _sums(self, requested: RequestedGradients, step: int, scale: Tensor | None) -> GradientSums:
        """Allocate the requested gradients, for chunks of at most `step` tokens of each rank."""
        of_ranks = self.tokens.of_ranks
        requested = requested if of_ranks is None else requested._replace(hidden=of_ranks.hidden)
        chunks = math.ceil(max(self.tokens.counts) / step)
        events = None if self.events is None else self.events.student
        return GradientSums(self.heads[0], requested, chunks, events, compiled=self.compiled, scale=scale)

    def _allocate(self, step: int, *, kept: bool = False) -> list[Tensor]:
        """Allocate the workspace for blocks of chunks, and return memory for the logits of each head."""
        tokens = step * len(self.tokens.counts)
        if self.device == "cuda":
            tokens = math.ceil(tokens / MULTIPLE) * MULTIPLE
        numbers = max((stop - start for start, stop in self.row_blocks), default=0) * tokens
        slots = 0 if self.compiled else self.objective.slots
        self.work = Workspace(tuple(self.like.new_empty(numbers) for _ in range(slots)))
        is_capped = self.heads[0].finishing.softcap is not None and not self.kernels_finish
        self.softcap_buffer = self.like.new_empty(numbers if is_capped else 0)
        return [self.like.new_empty(self.rows * tokens if kept else numbers, dtype=head.dtype) for head in self.heads]

    def _blocks(self, chunk: Chunk, buffers: list[Tensor], *, kept: bool = False) -> list[LogitBlock]:
        """Return the blocks of a chunk over this rank's rows; their logits are not computed."""
        tokens, blocks = len(chunk.hidden[0]), []
        is_whole = len(self.row_blocks) == 1 and not self.student.is_sharded and self.events is None
        head, buffer, unfinished = self.heads[0], buffers[0], Finishing()
        array = as_array(buffer) if self.compiled and self.device == "cpu" else None
        pair = (*(each.kernel_bias for each in self.heads), None)[:2]
        has_bias = any(each is not None for each in pair)
        biases: tuple[Tensor | None, Tensor | None] = (None, None)
        for start, stop in self.row_blocks:
            shape = stop - start, tokens
            place = slice(start * tokens, stop * tokens) if kept else slice((stop - start) * tokens)
            if self.kernels_finish:
                unfinished = head.left_to_kernels(start, stop)
            teacher = buffers[1][place].view(shape) if len(buffers) > 1 else None
            if has_bias:
                own, other = (None if each is None else each[start:stop] for each in pair)
                biases = own, other
            others = chunk.ids, self.first + start, self.may_be_infinite, self.work, stop == self.rows
            stored = None if array is None else array[place].reshape(shape)
            blocks.append(LogitBlock(buffer[place].view(shape), teacher, *others, biases, unfinished, is_whole, stored))
        return blocks

    def _fill(self, block: LogitBlock, chunk: Chunk) -> None:
        self.heads[0].fill(block.student, chunk.hidden[0], block.start - self.first)
        if block.teacher is not None:
            self.heads[1].fill(block.teacher, chunk.hidden[1], block.start - self.first)

    def _event_block(self, chunk: Chunk) -> LogitBlock | None:
        """Return the logits of further events as a block behind this rank's rows, or `None` if there are none."""
        if self.events is None:
            return None
        return EventLogits(*(chunk.gathered(x) for x in self.events)).block(self.rows, self.dtype)
