"""One pass over the vocabulary: everything that losses need, from blocks of logits of some tokens over some rows.

All logits at once are `tokens x V` numbers, and their gradients as many again. But the loss of a token and its
gradients need its own logits alone, and their logsumexp. So a pass takes a chunk of tokens after another, and in each a
block of rows after another: product, `Objective.terms`, and, once the totals are merged, `Objective.dlogits_` and the
products of its result with rows and hidden states, which are the gradients. On CUDA a block has all rows, and a chunk
may have all tokens; `chunk_size` bounds their bytes.

Where the gradient of every loss is known beforehand, as that of a mean, all blocks of a chunk are kept in one buffer
until their gradients are computed, in the forward pass: three products. Otherwise the forward pass keeps the totals
alone, and the backward pass computes each block again: four products. For two heads these are four and six.

Blocks are `(R, C)`, vocabulary first: `weight @ hidden.T` is 1.4x faster on a CPU than `hidden @ weight.T`, and a
padding row is one block of memory. Suffixes name the dimensions: N tokens, C tokens of a chunk, V rows, R rows of a
block, D columns, K requested IDs.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.shapes import wide_dtype
from embedlayer.kernels.softmax import STATISTICS, concatenated
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
    stacked,
)
from embedlayer.losses.products import Gradients, GradientSums, HeadBlocks
from embedlayer.losses.recording import RECORDED, is_recording, record_totals
from embedlayer.losses.token_chunks import Chunk, TokenChunks
from embedlayer.losses.uncomputed_logits import LinearLogits, RequestedGradients, joint_multiple


class VocabularyPass:
    """Compute totals per token, and their gradients, over chunks of tokens and blocks of rows; all without autograd."""

    # Sharded rows: each rank passes its own tokens, and all ranks must call the same methods.

    event_grads: Tensor | None = None

    def __init__(self, student: LinearLogits, request: Request) -> None:
        self.request = request
        self.objective, teacher, ids, counted, self.min_chunks, self.max_bytes, events = request
        self.student = student
        partition, self.dtype = student.partition, wide_dtype(student.dtype)
        self.first, self.rows = partition.start, len(partition)
        self.is_invariant = student.options.batch_invariant
        multiple = joint_multiple(student, teacher)
        self.tokens = TokenChunks(student.collectives, student.hidden.shape[:-1].numel(), counted, multiple)
        self.ids = self.tokens.compact_ids(ids)
        self.events = None if events is None else EventLogits(*(self.tokens.states(x.detach()) for x in events))
        assert events is None or not student.is_sharded
        both = [student] if teacher is None else [student, teacher]
        self.may_be_infinite = any(each.may_be_infinite for each in both)
        on_cuda = device_kind(student.hidden) == "cuda"
        self.compiled = self.objective.has_kernels and STATISTICS.applies(*(x for each in both for x in each.tensors))
        self.finishes = self.compiled and on_cuda and self.objective.finishes
        parts = partition, self.tokens, self.dtype
        self.heads = [HeadBlocks(each, *parts, compiled=self.compiled, unfinished=self.finishes) for each in both]
        self.hidden = [head.hidden_ND for head in self.heads]
        self.like = student.hidden.new_empty(0, dtype=self.dtype)
        self.device = "cuda" if device_kind(self.like) == "cuda" else "cpu"  # the key of the tables of block sizes
        least = LEAST_ROWS if self.is_invariant else 1
        self.row_blocks = row_blocks(self.rows, ROWS_OF_A_BLOCK[self.device], least=least)
        self.work, self.softcap_buffer = Workspace(), self.like

    def totals(self) -> Totals:
        """Return the totals of this rank's tokens, `(N,)` or `(K, N)`; 0 for tokens that are not computed."""
        step = self._recomputed_tokens()
        buffers = self._allocate(step, kept=False)
        parts: list[Totals] = []
        for chunk in self._chunks(step):
            blocks = self._blocks(chunk, buffers, kept=False)
            totals = self.objective.in_sweeps(partial(self._sweep, chunk, blocks, False))
            parts.append({name: chunk.own(value) for name, value in totals.items()})
        return self._scattered(parts or [self._totals_of_nothing()])

    def _scattered(self, parts: list[Totals]) -> Totals:
        """Return the totals of this rank's tokens, `(N,)` or `(K, N)`, from those of chunks."""
        return {name: self.tokens.scattered(torch.cat([part[name] for part in parts], dim=-1)) for name in parts[0]}

    def logits(self) -> Tensor:
        """Return the finished logits of all tokens, `(N, V)`, from the products that totals are computed from."""
        step = self._recomputed_tokens()
        buffers = self._allocate(step, kept=False)
        logits_NV = self.like.new_empty(sum(self.tokens.counts), self.rows)
        for chunk in self._chunks(step):
            for block in self._blocks(chunk, buffers, kept=False):
                self._fill(block, chunk)
                logits_RC = chunk.own(block.finished(self.dtype).student)
                logits_NV[chunk.here, block.start : block.start + len(logits_RC)] = logits_RC.T
        return logits_NV

    def _totals_of_nothing(self) -> Totals:
        """Return empty totals, for a batch without tokens on any rank."""
        nothing = self.like.new_zeros(self.student.vocab_size, 0)
        ids = None if self.ids is None else self.ids.T
        block = LogitBlock(nothing, nothing, ids, 0, may_be_infinite=False, work=Workspace())
        return self.objective.in_sweeps(partial(self.objective.terms, block))

    def gradients(self, totals: Totals, grads: Totals, requested: RequestedGradients) -> Gradients:
        """Return the gradients of the student's hidden states, rows and bias; logits are computed again."""
        step = self._recomputed_tokens()
        buffers = self._allocate(step, kept=False)
        totals, grads = ({name: self.tokens.compact(x) for name, x in each.items()} for each in (totals, grads))
        scale = self.heads[0].narrow_scale(list(grads.values()), self.student.collectives)
        grads = grads if scale is None else {name: x * scale for name, x in grads.items()}
        sums = self._sums(requested, step, scale)
        for chunk in self._chunks(step):
            blocks = self._blocks(chunk, buffers, kept=False)
            of_chunk = chunk.gathered_totals(totals), chunk.gathered_total_gradients(grads)
            self._add_gradients(sums, chunk, blocks, *of_chunk, kept=None)
        return self._finished(sums)

    def losses_and_gradients(
        self, loss: TokenLoss, factors: Tensor | None, requested: RequestedGradients
    ) -> tuple[Tensor, Gradients, Tensor | None]:
        """Return the losses of this rank's tokens, and the gradients of `sum(factors * losses)`, from one pass."""
        of_ranks = self.tokens.of_ranks
        recorded: list[Totals] | None = [] if is_recording() else None
        if not (factors is not None and any(requested) if of_ranks is None else of_ranks.gradients):
            all_totals = self.totals()
            if recorded is not None:
                record_totals(self.student, self.request, all_totals)
            return self.tokens.masked(loss.of(all_totals)), (None, None, None), None
        assert factors is not None
        factors_N, step = self.tokens.compact(factors), self._kept_tokens(requested)
        scale = self.heads[0].narrow_scale([factors_N], self.student.collectives)
        factors_N = factors_N if scale is None else factors_N * scale
        sums, buffers = self._sums(requested, step, scale), self._allocate(step, kept=True)
        parts, total = [], None
        for chunk in self._chunks(step):
            blocks = self._blocks(chunk, buffers, kept=True)
            totals = self.objective.in_sweeps(partial(self._sweep, chunk, blocks, True))
            if recorded is not None:
                recorded.append({name: chunk.own(totals[name]) for name in RECORDED})
            factors_C = chunk.gathered_gradients(factors_N)
            compiled = loss.compiled(chunk.ids, totals, factors_C, sum(chunk.sizes)) if self.compiled else None
            losses, grads, total = compiled or (loss.of(totals), loss.gradients(totals, factors_C), None)
            parts.append(chunk.own(losses))
            self._add_gradients(sums, chunk, blocks, totals, grads, kept=buffers[0])
        if recorded:
            record_totals(self.student, self.request, self._scattered(recorded))
        losses_N = concatenated(parts) if parts else self.like.new_zeros(0)
        is_all = len(parts) == len(self.tokens.counts) == 1 and self.tokens.all_count and scale is None
        losses_N = self.tokens.scattered(losses_N)
        losses_N = losses_N if self.compiled and self.tokens.all_count else self.tokens.masked(losses_N)
        return losses_N, self._finished(sums), total if is_all else None

    def _chunks(self, step: int) -> Iterator[Chunk]:
        """Yield the chunks of at most `step` tokens of each rank, with hidden states in the dtype of the products."""
        for chunk in self.tokens.chunks(step, self.hidden, self.ids):
            yield chunk._replace(hidden=[head.states(x) for head, x in zip(self.heads, chunk.hidden, strict=True)])

    def _kept_tokens(self, requested: RequestedGradients) -> int:
        """Return the number of tokens of each rank in a chunk whose logits are kept for their gradients."""
        ranks, width = len(self.tokens.counts), self.hidden[0].shape[1]
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
        if head.finishing.softcap is not None and not self.finishes:
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
        head = self.heads[0]
        in_kernel = self.device == "cuda" and self.compiled and (self.finishes or head.finishing.softcap is None)
        events = None if self.events is None else self.events.student
        return GradientSums(
            head, requested, chunks, events, compiled=self.compiled, overwrites_bias=in_kernel, scale=scale
        )

    def _finished(self, sums: GradientSums) -> Gradients:
        """Return the sums of all chunks in the shapes of the inputs, and keep that of the events."""
        # The workspace is freed first: converting the gradients needs as much memory.
        self.work, self.softcap_buffer = Workspace(), self.like
        gradients = sums.finished(self.tokens)
        self.event_grads = sums.events
        return gradients

    def _allocate(self, step: int, *, kept: bool) -> list[Tensor]:
        """Allocate the workspace for blocks of chunks, and return memory for the logits of each head."""
        tokens = step * len(self.tokens.counts)
        if self.device == "cuda":
            tokens = math.ceil(tokens / MULTIPLE) * MULTIPLE
        numbers = max((stop - start for start, stop in self.row_blocks), default=0) * tokens
        slots = 0 if self.compiled else self.objective.slots
        self.work = Workspace(tuple(self.like.new_empty(numbers) for _ in range(slots)))
        is_capped = self.heads[0].finishing.softcap is not None and not self.finishes
        self.softcap_buffer = self.like.new_empty(numbers if is_capped else 0)
        return [self.like.new_empty(self.rows * tokens if kept else numbers, dtype=head.dtype) for head in self.heads]

    def _blocks(self, chunk: Chunk, buffers: list[Tensor], *, kept: bool) -> list[LogitBlock]:
        """Return the blocks of a chunk over this rank's rows; their logits are not computed."""
        tokens, blocks = len(chunk.hidden[0]), []
        is_whole = len(self.row_blocks) == 1 and not self.student.is_sharded and self.events is None
        for start, stop in self.row_blocks:
            place = slice(start * tokens, stop * tokens) if kept else slice((stop - start) * tokens)
            logits = [buffer[place].view(stop - start, tokens) for buffer in buffers]
            biases = [None if x is None else x[start:stop] for x in (head.unadded_bias for head in self.heads)]
            student, teacher, *_ = (*logits, None)
            bias, other_bias, *_ = (*biases, None)
            others = chunk.ids, self.first + start, self.may_be_infinite, self.work, stop == self.rows
            unfinished = self.heads[0].unfinished(start, stop)
            blocks.append(LogitBlock(student, teacher, *others, (bias, other_bias), unfinished, is_whole))
        return blocks

    def _fill(self, block: LogitBlock, chunk: Chunk) -> None:
        for head, x_CD, view in zip(self.heads, chunk.hidden, (block.student, block.teacher), strict=False):
            assert view is not None
            head.fill(view, x_CD, block.start - self.first)

    def _event_block(self, chunk: Chunk) -> LogitBlock | None:
        """Return the logits of further events as a block behind this rank's rows, or `None` if there are none."""
        if self.events is None:
            return None
        return EventLogits(*(chunk.gathered(x) for x in self.events)).block(self.rows, self.dtype)

    def _sweep(self, chunk: Chunk, blocks: list[LogitBlock], kept: bool, earlier: Totals) -> Totals:
        """Return the totals of one sweep over this rank's blocks, merged with those of all ranks."""
        compiled = self.objective.compiled_terms(chunk.ids, earlier) if self.compiled else None
        parts = []
        for block in blocks:
            if not (kept and earlier):
                self._fill(block, chunk)
            terms = None if compiled is None else compiled(block)
            if terms is None:
                terms = stacked([self.objective.terms(block.finished(self.dtype), earlier)])
            parts.append(terms)
        if (events := self._event_block(chunk)) is not None:
            parts.append(stacked([self.objective.terms(events, earlier)]))
        return chunk.merged(self.objective.merge(joined(parts)), self.objective.merge)

    def _add_gradients(
        self,
        sums: GradientSums,
        chunk: Chunk,
        blocks: list[LogitBlock],
        totals: Totals,
        grads: Totals,
        *,
        kept: Tensor | None,
    ) -> None:
        # Overwrites the logits of the chunk.
        x_CD = chunk.hidden[0]
        compiled = self.objective.compiled_dlogits(chunk.ids, totals, grads) if self.compiled else None
        in_one_product = kept is not None and sums.multiplies(kept.dtype) and not self.is_invariant
        for block in blocks:
            if kept is None:
                self._fill(block, chunk)
            self._dlogits_(sums, block, totals, grads, compiled)
            dlogits_RC = sums.narrowed(block.student)
            sums.add_to_rows(dlogits_RC, x_CD, block.start - self.first)
            if not in_one_product:
                sums.add_to_hidden(dlogits_RC, chunk, block.start - self.first)
        if kept is not None and in_one_product:
            sums.add_to_hidden(kept[: self.rows * len(x_CD)].view(self.rows, -1), chunk, 0)
        if (events := self._event_block(chunk)) is not None and sums.events is not None:
            self.objective.dlogits_(events, totals, grads)
            sums.events[chunk.here] = chunk.own(events.student).T
        sums.finish_chunk(chunk)

    def _dlogits_(
        self, sums: GradientSums, block: LogitBlock, totals: Totals, grads: Totals, compiled: BlockGradient | None
    ) -> None:
        """Replace the logits of a block by the gradient of the products, and add the gradient of the bias to `sums`."""
        head, start = self.heads[0], block.start - self.first
        bias = None if sums.bias is None else sums.bias[start : start + len(block.student)]
        if compiled is not None and self.finishes:
            compiled(block, bias, sums.adds_to_bias)
            return
        softcap_grad_RC = head.finishing.softcap_grad(block.student, self.softcap_buffer)
        in_kernel = bias if softcap_grad_RC is None else None
        if compiled is not None and compiled(block, in_kernel, sums.adds_to_bias):
            head.finishing.unfinish_(block.student, softcap_grad_RC, start)
            if bias is not None and in_kernel is None:
                bias += block.student.sum(1)
            head.scale_(block.student)
            return
        finished = block.finished(self.dtype)
        self.objective.dlogits_(finished, totals, grads)
        head.finishing.unfinish_(finished.student, softcap_grad_RC, start)
        if bias is not None:
            bias += finished.student.sum(1)
        head.scale_(finished.student)
        if finished.student is not block.student:
            block.student.copy_(finished.student)
