"""One pass over the vocabulary: everything that losses need, from blocks of logits of some tokens over some rows.

All logits at once are `tokens x V` numbers, and their gradients as many again. But the loss of a token and its
gradients need its own logits alone, and their logsumexp. So a pass takes a chunk of tokens after another, and in each a
block of rows after another: product, `Objective.terms`, and, once the totals are merged, `Objective.dlogits_` and the
products of its result with rows and hidden states, which are the gradients.

Where the gradient of every loss is known beforehand, as that of a mean, all blocks of a chunk are kept in one buffer
until their gradients are computed, in the forward pass: three products. Otherwise the forward pass keeps the totals
alone, and the backward pass computes each block again: four products. For two heads these are four and six.

Blocks are `(R, C)`, vocabulary first: `weight @ hidden.T` is 1.4x faster on a CPU than `hidden @ weight.T`, and a
padding row is one block of memory. Suffixes name the dimensions: N tokens, C tokens of a chunk, V rows, R rows of a
block, D columns, K requested IDs.
"""

import math
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from embedlayer.kernels.kernel import kernels_apply
from embedlayer.losses.chunk_size import MAX_CHUNK_TOKENS, ROWS_OF_A_BLOCK, tokens_per_chunk
from embedlayer.losses.definition import loss_dtype
from embedlayer.losses.objective import (
    BlockGradient,
    LogitBlock,
    Request,
    TokenLoss,
    Totals,
    Workspace,
    joined,
    stacked,
)
from embedlayer.losses.products import Gradients, GradientSums, HeadBlocks, RequestedGradients, product_dtype
from embedlayer.losses.token_chunks import Chunk, TokenChunks
from embedlayer.losses.uncomputed_logits import LinearLogits


class VocabularyPass:
    """Compute totals per token, and their gradients, over chunks of tokens and blocks of rows; all without autograd.

    With rows that are sharded over ranks, each rank passes its own tokens. For each chunk a rank gathers the hidden
    states of all ranks, and computes the logits of its own rows. The totals of all ranks are then merged as those of
    blocks are. All ranks must call the same methods.

    Args:
        student: The head that may be trained, with its hidden states.
        request: What is computed, for which tokens; a teacher fits the student.
    """

    def __init__(self, student: LinearLogits, request: Request) -> None:
        self.objective, teacher, ids, kept, self.min_chunks = request
        self.student = student
        self.partition = student.partition
        self.dtype = loss_dtype(student.dtype)
        self.tokens = TokenChunks(student.collectives, student.hidden.shape[:-1].numel(), kept)
        self.ids = ids if ids is None or self.tokens.kept is None else ids[self.tokens.kept]
        both = [student] if teacher is None else [student, teacher]
        self.may_be_infinite = any(each.may_be_infinite for each in both)
        self.compiled = self.objective.has_kernels and kernels_apply(*(x for each in both for x in each.tensors))
        parts = self.partition, self.tokens.kept, self.dtype
        self.heads = [HeadBlocks(each, *parts, compiled=self.compiled) for each in both]
        self.like = student.hidden.new_empty(0, dtype=self.dtype)
        self.device = "cuda" if self.like.device.type == "cuda" else "cpu"  # the key of the tables of block sizes
        self.work, self.softcap_buffer = Workspace(), self.like

    def totals(self) -> Totals:
        """Return the totals of this rank's tokens, `(N,)` or `(K, N)`; 0 for tokens that are not kept."""
        step = self._recomputed_chunk_tokens()
        self._allocate(step)
        buffers = self._buffers(self._block_numbers(step))
        parts: list[Totals] = []
        for chunk in self._chunks(step):
            totals = self.objective.in_sweeps(partial(self._recomputed_sweep, buffers, chunk))
            parts.append({name: chunk.own(value) for name, value in totals.items()})
        parts = parts or [self._totals_of_nothing()]
        return {name: self.tokens.scattered(torch.cat([part[name] for part in parts], dim=-1)) for name in parts[0]}

    def _totals_of_nothing(self) -> Totals:
        """Return empty totals, for a batch without tokens on any rank."""
        nothing = self.like.new_zeros(self.student.vocab_size, 0)
        ids = None if self.ids is None else self.ids.T
        block = LogitBlock(nothing, nothing, ids, 0, may_be_infinite=False, work=Workspace())
        return self.objective.in_sweeps(partial(self.objective.terms, block))

    def gradients(self, totals: Totals, grads: Totals, requested: RequestedGradients) -> Gradients:
        """Return the gradients of the student's hidden states, rows and bias; each block of logits is computed again.

        Args:
            totals: Result of `totals`.
            grads: Gradients of those totals that have one.
            requested: Which gradients to compute.
        """
        step = self._recomputed_chunk_tokens()
        self._allocate(step)
        sums, buffers = self._sums(requested, step), self._buffers(self._block_numbers(step))
        totals, grads = ({name: self.tokens.compact(x) for name, x in each.items()} for each in (totals, grads))
        for number, chunk in enumerate(self._chunks(step)):
            totals_C, grads_C = chunk.gathered_totals(totals), chunk.gathered_totals(grads)
            compiled = self._compiled_dlogits(chunk, totals_C, grads_C)
            for block in self._blocks(chunk, buffers):
                self._dlogits_(sums, block, totals_C, grads_C, compiled)
                start = block.start - self.partition.start
                sums.add_to_rows(block.student, chunk.hidden[0], start, chunk=number)
                sums.add_to_hidden(block.student, chunk.hidden[0], start)
            sums.finish_chunk(chunk)
        return self._finished(sums)

    def losses_and_gradients(
        self, loss: TokenLoss, factors: Tensor | None, requested: RequestedGradients
    ) -> tuple[Tensor, Gradients]:
        """Return the loss of each of this rank's tokens, and the gradients of `sum(factors * losses)`, from one pass.

        Args:
            loss: Loss of a token as a function of its totals.
            factors: Factor of each token's loss, `(N,)`; `None` to compute no gradients.
            requested: Which gradients to compute.

        Returns:
            Losses `(N,)`, 0 for tokens that are not kept, and the gradients.
        """
        if not self.tokens.any_rank(factors is not None and any(requested)):
            return loss.of(self.totals()), (None, None, None)
        assert factors is not None
        factors_N = self.tokens.compact(factors)
        step = self._kept_chunk_tokens()
        rows, size = len(self.partition), ROWS_OF_A_BLOCK[self.device]
        sums = self._sums(requested, step)
        self._allocate(step)
        whole = self._buffers(rows * step * len(self.tokens.counts))
        parts = []
        dtype = sums.rows_VD.dtype
        is_converted = {dtype, product_dtype(dtype, self.like.device.type)} != {whole[0].dtype}
        for number, chunk in enumerate(self._chunks(step)):
            tokens = sum(chunk.sizes)
            views = [buffer[: rows * tokens].view(rows, tokens) for buffer in whole]
            blocks = [
                self._block([view[start : start + size] for view in views], chunk, start)
                for start in range(0, rows, size)
            ]
            totals = self.objective.in_sweeps(partial(self._kept_sweep, blocks, chunk))
            grads_C = loss.gradients(totals, chunk.gathered(factors_N))
            parts.append(chunk.own(loss.of(totals)))
            compiled = self._compiled_dlogits(chunk, totals, grads_C)
            for block in blocks:
                self._dlogits_(sums, block, totals, grads_C, compiled)
                start = block.start - self.partition.start
                sums.add_to_rows(block.student, chunk.hidden[0], start, chunk=number)
                if is_converted:  # a block at a time
                    sums.add_to_hidden(block.student, chunk.hidden[0], start)
            if not is_converted:
                sums.add_to_hidden(views[0], chunk.hidden[0], 0)
            sums.finish_chunk(chunk)
        losses_N = torch.cat(parts) if parts else self.like.new_zeros(0)
        return self.tokens.scattered(losses_N), self._finished(sums)

    def _recomputed_chunk_tokens(self) -> int:
        """Return the number of tokens of each rank in a chunk whose blocks are not kept."""
        return max(min(MAX_CHUNK_TOKENS[self.device] // len(self.tokens.counts), self._most_of_a_chunk()), 1)

    def _kept_chunk_tokens(self) -> int:
        """Return the number of tokens of each rank in a chunk whose blocks are all kept: one buffer for each head."""
        counts = self.tokens.counts
        rows = math.ceil(self.student.vocab_size / len(counts))
        width, itemsize = self.heads[0].hidden_ND.shape[1], max(head.dtype.itemsize for head in self.heads)
        size = math.ceil(tokens_per_chunk(sum(counts), rows, width, self.device, itemsize) / len(counts))
        return max(min(size, self._most_of_a_chunk()), 1)

    def _most_of_a_chunk(self) -> int:
        """Return the largest number of tokens of each rank in a chunk with which there are enough chunks."""
        return math.ceil(max(self.tokens.counts) / self.min_chunks)

    def _chunks(self, step: int) -> Iterator[Chunk]:
        """Yield the chunks of the tokens of all ranks, with at most `step` tokens of each rank."""
        for chunk in self.tokens.chunks(step):
            hidden = tuple(chunk.gathered(head.hidden_ND) for head in self.heads)
            yield chunk._replace(hidden=hidden, ids=None if self.ids is None else chunk.gathered(self.ids).T)

    def _allocate(self, tokens: int) -> None:
        """Allocate the workspace for blocks of chunks of at most `tokens` tokens of each rank."""
        numbers = self._block_numbers(tokens)
        slots = 0 if self.compiled else self.objective.slots
        self.work = Workspace(tuple(self.like.new_empty(numbers) for _ in range(slots)))
        self.softcap_buffer = self.like.new_empty(numbers if self.heads[0].finishing.softcap is not None else 0)

    def _buffers(self, numbers: int) -> list[Tensor]:
        """Allocate memory for a number of logits of each head."""
        return [self.like.new_empty(numbers, dtype=head.dtype) for head in self.heads]

    def _block_numbers(self, tokens: int) -> int:
        """Return the number of logits in a block, for chunks of at most `tokens` tokens of each rank."""
        return min(ROWS_OF_A_BLOCK[self.device], len(self.partition)) * tokens * len(self.tokens.counts)

    def _blocks(self, chunk: Chunk, buffers: list[Tensor]) -> Iterator[LogitBlock]:
        """Compute the logits of the chunk over one block of this rank's rows after another, in the same memory.

        Args:
            chunk: The tokens.
            buffers: Memory of a block of logits, for each head.
        """
        tokens, size = sum(chunk.sizes), ROWS_OF_A_BLOCK[self.device]
        for start in range(0, len(self.partition), size):
            rows = min(size, len(self.partition) - start)
            views = [buffer[: rows * tokens].view(rows, tokens) for buffer in buffers]
            block = self._block(views, chunk, start)
            self._fill(block, chunk)
            yield block

    def _block(self, views: list[Tensor], chunk: Chunk, start: int) -> LogitBlock:
        """Return a block whose first row is the row `start` of this rank."""
        teacher, first, stop = None, self.partition.start + start, start + len(views[0])
        bias, teacher_bias = self.heads[0].bias_of(start, stop), None
        if len(views) == 2:
            teacher, teacher_bias = views[1], self.heads[1].bias_of(start, stop)
        biases = (bias, teacher_bias)
        is_last = stop == len(self.partition)
        return LogitBlock(views[0], teacher, chunk.ids, first, self.may_be_infinite, self.work, is_last, biases)

    def _fill(self, block: LogitBlock, chunk: Chunk) -> None:
        """Compute the logits of a block."""
        start = block.start - self.partition.start
        for head, x_CD, view in zip(self.heads, chunk.hidden, (block.student, block.teacher), strict=False):
            assert view is not None
            head.fill(view, x_CD, start)

    def _recomputed_sweep(self, buffers: list[Tensor], chunk: Chunk, earlier: Totals) -> Totals:
        """Return the totals of one sweep whose blocks of logits share the memory of `buffers`."""
        return self._sweep(self._blocks(chunk, buffers), chunk, earlier)

    def _kept_sweep(self, blocks: list[LogitBlock], chunk: Chunk, earlier: Totals) -> Totals:
        """Return the totals of one sweep over blocks that have memory of their own; the first sweep fills them."""

        def filled() -> Iterator[LogitBlock]:
            for block in blocks:
                self._fill(block, chunk)
                yield block

        return self._sweep(blocks if earlier else filled(), chunk, earlier)

    def _sweep(self, blocks: Iterable[LogitBlock], chunk: Chunk, earlier: Totals) -> Totals:
        """Return the totals of one sweep over this rank's blocks, merged with those of all ranks."""
        compiled = self.objective.compiled_terms(chunk.ids, earlier) if self.compiled else None
        parts = []
        for block in blocks:  # by a kernel if there is one
            terms = None if compiled is None else compiled(block)
            if terms is None:
                terms = stacked([self.objective.terms(block.finished(self.dtype), earlier)])
            parts.append(terms)
        return chunk.merged(self.objective.merge(joined(parts)), self.objective.merge)

    def _compiled_dlogits(self, chunk: Chunk, totals: Totals, grads: Totals) -> BlockGradient | None:
        """Return a kernel that computes the gradients by the logits of a chunk, or `None`."""
        return self.objective.compiled_dlogits(chunk.ids, totals, grads) if self.compiled else None

    def _dlogits_(
        self, sums: GradientSums, block: LogitBlock, totals: Totals, grads: Totals, compiled: BlockGradient | None
    ) -> None:
        """Replace the logits of a block by the gradient of the products, and add the gradient of the bias to `sums`."""
        head, start = self.heads[0], block.start - self.partition.start
        bias = None if sums.bias is None else sums.bias[start : start + len(block.student)]
        softcap_grad_RC = head.finishing.softcap_grad(block.student, self.softcap_buffer)
        in_kernel = bias if softcap_grad_RC is None else None
        if compiled is not None and compiled(block, in_kernel):
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

    def _sums(self, requested: RequestedGradients, step: int) -> GradientSums:
        """Allocate the requested gradients, for chunks of at most `step` tokens of each rank.

        Those of hidden states are computed if any rank requests them, as they need the rows of all ranks.
        """
        requested = requested._replace(hidden=self.tokens.any_rank(requested.hidden))
        chunks = math.ceil(max(self.tokens.counts) / step)
        return GradientSums(self.heads[0], requested, chunks, compiled=self.compiled)

    def _finished(self, sums: GradientSums) -> Gradients:
        """Return the summed gradients, in the shapes of the inputs."""
        hidden, weight, bias = sums.finished()
        if hidden is not None:
            hidden = self.tokens.scattered(hidden, 0).view(self.student.hidden.shape)
        return hidden, weight, bias
