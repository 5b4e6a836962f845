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
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from embedlayer.collectives import Collectives, RowPartition
from embedlayer.errors import ShapeError, SizeError
from embedlayer.losses.chunk_size import MAX_CHUNK_TOKENS, ROWS_OF_A_BLOCK, tokens_per_chunk
from embedlayer.losses.compiled_blocks import STATISTICS, add_bfloat16_
from embedlayer.losses.definition import loss_dtype, options_of_rows
from embedlayer.losses.objective import (
    BlockGradient,
    BlockTerms,
    LogitBlock,
    Objective,
    TokenLoss,
    Totals,
    Workspace,
    joined,
    stacked,
)
from embedlayer.losses.products import matrix_product, product_dtype, write_product
from embedlayer.losses.uncomputed_logits import LinearLogits, UncomputedLogits

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients by hidden states, rows and bias; `None` if not requested."""


class RequestedGradients(NamedTuple):
    """Record for which of the three differentiable inputs of a head a gradient must be computed."""

    hidden: bool
    weight: bool
    bias: bool

    @classmethod
    def of(cls, *tensors: Tensor | None) -> "RequestedGradients":
        """Return which of hidden states, weight and bias autograd needs a gradient of."""
        return cls(*(torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors))


NO_GRADIENTS = RequestedGradients(hidden=False, weight=False, bias=False)


class _Head:
    """One head of a pass, with its hidden states and this rank's rows in the dtype of the products.

    Args:
        logits: The head and its hidden states.
        partition: Which rows this rank computes.
        kept: Index of the tokens that are computed, `(N,)`, or `None` for all.
        dtype: Dtype of the loss.
        compiled: Whether compiled kernels read the logits: these may lack the bias, and be bfloat16.
    """

    def __init__(
        self,
        logits: UncomputedLogits,
        partition: RowPartition,
        kept: Tensor | None,
        dtype: torch.dtype,
        *,
        compiled: bool,
    ) -> None:
        self.logits = logits
        self.partition = partition
        options = options_of_rows(logits.options, partition.start, partition.stop)
        temperature, self.softcap = options["temperature"], options["softcap"]
        self.masked = options["padding_idx"]
        self.divisor = temperature if self.softcap is None else 1.0
        self.bound = None if self.softcap is None else self.softcap / temperature
        self.scale, self.block_scale = options["logit_scale"] / self.divisor, 1.0
        if logits.dtype == torch.float16:  # scaled hidden states may be outside of its range
            self.scale, self.block_scale = 1.0, self.scale
        hidden_ND = logits.hidden.detach().reshape(-1, logits.hidden.shape[-1])
        self.hidden_ND = hidden_ND if kept is None else hidden_ND.index_select(0, kept)
        self.rows_VD: Tensor | None = None
        self.bias: Tensor | None = None
        if isinstance(logits, LinearLogits):
            weight = logits.weight.detach()
            rows = weight[: len(partition)] if logits.is_sharded else weight[partition.start : partition.stop]
            self.rows_VD = rows.to(logits.dtype)
            self.hidden_ND = self.hidden_ND.to(logits.dtype)
            self.hidden_ND = self.hidden_ND * self.scale if self.scale != 1 else self.hidden_ND
            if options["bias"] is not None:
                bias = options["bias"].detach().to(dtype)
                self.bias = bias / self.divisor if self.divisor != 1 else bias
        is_raw = compiled and self.rows_VD is not None and self.softcap is None
        self.dtype = torch.bfloat16 if is_raw and logits.dtype == torch.bfloat16 else dtype
        self.unadded_bias: Tensor | None = None
        if is_raw and self.bias is not None:
            self.unadded_bias, self.bias = self.bias.contiguous(), None
            if self.masked is not None:
                self.unadded_bias = self.unadded_bias.index_fill(0, torch.tensor([self.masked]), 0.0)

    def bias_of(self, start: int, stop: int) -> Tensor | None:
        """Return the bias of some of this rank's rows that `fill` did not add, or `None`."""
        return None if self.unadded_bias is None else self.unadded_bias[start:stop]

    def fill(self, out_RC: Tensor, x_CD: Tensor, start: int) -> None:
        """Write the logits of a chunk over the rows from `start` on, of this rank's rows, to `out_RC`.

        They are finished except for `unadded_bias`.
        """
        stop = start + len(out_RC)
        if self.rows_VD is None:
            first = self.partition.start
            out_RC.copy_(self.logits.block(x_CD, first + start, first + stop).detach().T)
            return
        rows = self.rows_VD[start:stop]
        write_product(out_RC, rows, x_CD.T)
        self.scale_(out_RC)
        if self.bias is not None:
            out_RC.add_(self.bias[start:stop].unsqueeze(1))
        if self.softcap is not None and self.bound is not None:
            out_RC.div_(self.softcap).tanh_().mul_(self.bound)
        if self.masked is not None and start <= self.masked < stop:
            out_RC[self.masked - start] = -math.inf

    def softcap_grad(self, logits_RC: Tensor, buffer: Tensor) -> Tensor | None:
        """Return the derivative of soft cap and temperature at finished logits, or `None` without a soft cap.

        Args:
            logits_RC: Finished logits.
            buffer: Memory of the result.
        """
        if self.softcap is None or self.bound is None:
            return None
        out = torch.div(logits_RC, self.bound, out=buffer[: logits_RC.numel()].view(logits_RC.shape))
        return out.square_().neg_().add_(1).mul_(self.bound / self.softcap)

    def scale_(self, block_RC: Tensor) -> None:
        """Multiply a block by the part of the logit scale that the hidden states do not contain, in place."""
        if self.block_scale != 1:
            block_RC.mul_(self.block_scale)

    def unfinish_(self, dlogits_RC: Tensor, softcap_grad_RC: Tensor | None, start: int) -> None:
        """Convert gradients of finished logits, in place, to those of the scaled products of `hidden_ND` and rows."""
        if softcap_grad_RC is not None:
            dlogits_RC.mul_(softcap_grad_RC)
        if self.masked is not None and start <= self.masked < start + len(dlogits_RC):
            dlogits_RC[self.masked - start] = 0


@dataclass
class _GradientSums:
    """Sum the gradients of the student's rows and bias over chunks of tokens, and of its hidden states over blocks.

    Attributes:
        rows_VD: The rows, in the dtype of the products.
        hidden: Gradients of the hidden states of this rank, `(N, D)`; `None` if not requested.
        weight: Gradient of the rows; `None` if not requested. In bfloat16 only where the sum is rounded once.
        residual: Low 16 bits of the sums whose high 16 bits are `weight`, `(V, D)`, or `None`.
        bias: Gradient of the bias; `None` if not requested.
        chunks: Number of chunks.
        of_chunk: Gradients of the hidden states of the chunk, of all ranks.
    """

    rows_VD: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    residual: Tensor | None
    bias: Tensor | None
    chunks: int
    of_chunk: Tensor | None = None

    def add_to_rows(self, dlogits_RC: Tensor, x_CD: Tensor, start: int, *, chunk: int) -> None:
        """Add the gradients of a block to those of its rows.

        Args:
            dlogits_RC: Gradient of the loss by the products of rows and hidden states.
            x_CD: Hidden states of the chunk.
            start: First row of the block.
            chunk: Number of the chunk; the gradient of the first one overwrites the uninitialised `weight`.
        """
        if self.weight is None:
            return
        here = slice(start, start + len(dlogits_RC))
        if self.residual is None or chunk == 0:
            write_product(self.weight[here], dlogits_RC, x_CD, add=chunk > 0)
        else:
            addend = matrix_product(dlogits_RC, x_CD).to(self.weight.dtype)
            add_bfloat16_(self.weight[here], self.residual[here], addend, last=chunk == self.chunks - 1)

    def add_to_hidden(self, dlogits_RC: Tensor, x_CD: Tensor, start: int) -> None:
        """Add the gradients of one block, or of all rows, to those of the hidden states of the chunk."""
        if self.hidden is None:
            return
        if self.of_chunk is None:
            self.of_chunk = self.hidden.new_empty(x_CD.shape)
        rows_RD = self.rows_VD[start : start + len(dlogits_RC)]
        write_product(self.of_chunk, dlogits_RC.T, rows_RD, add=start > 0)


class _Chunk(NamedTuple):
    """Hold the tokens of all ranks that one chunk of a pass computes.

    Attributes:
        here: Slice of this rank's tokens.
        sizes: Number of tokens of each rank in this chunk.
        hidden: Hidden states for each head, `(C, D)`.
        ids: Requested token IDs `(K, C)`, or `None`.
    """

    here: slice
    sizes: list[int]
    hidden: list[Tensor]
    ids: Tensor | None


class _Packed:
    """Totals of a chunk as one tensor for each dtype, `(C, S)`, to send them to other ranks.

    `log_sum` is left out, as it follows from `sums`.

    Args:
        totals: Totals, `(C,)` or `(K, C)`.
    """

    def __init__(self, totals: Totals) -> None:
        self.like = {name: value for name, value in totals.items() if not name.startswith("log_sum")}
        self.suffixes = [name.removeprefix("log_sum") for name in totals if name.startswith("log_sum")]
        self.dtypes = list(dict.fromkeys(value.dtype for value in self.like.values()))
        self.rows = [
            torch.cat([_as_rows(value) for value in self.like.values() if value.dtype == dtype], dim=1)
            for dtype in self.dtypes
        ]

    def unpacked(self, rows: list[Tensor]) -> Totals:
        """Return totals of the same names from other rows, `(C', S)` for each dtype."""
        totals: Totals = {}
        for dtype, rows_of_dtype in zip(self.dtypes, rows, strict=True):
            names = [name for name, value in self.like.items() if value.dtype == dtype]
            widths = [_as_rows(self.like[name]).shape[1] for name in names]
            for name, part in zip(names, rows_of_dtype.split(widths, dim=1), strict=True):
                totals[name] = part.T if self.like[name].dim() == 2 else part.squeeze(1)
        for suffix in self.suffixes:
            totals[f"log_sum{suffix}"] = totals[f"sums{suffix}"].log()
        return totals


def _as_rows(value: Tensor) -> Tensor:
    """Return totals `(C,)` or `(K, C)` as `(C, 1)` or `(C, K)`."""
    return value.T if value.dim() == 2 else value.unsqueeze(1)


class Request(NamedTuple):
    """Say what a pass computes, for which tokens.

    Attributes:
        objective: What is computed per token.
        teacher: The second head of a divergence, or `None`.
        ids: Token IDs whose logits are requested, `(N, K)`, or `None`. They count from the first row of all ranks.
        kept: Mask `(N,)` of the tokens that are computed; `None` for all.
        min_chunks: Number of chunks into which the tokens are divided at least.
    """

    objective: Objective
    teacher: UncomputedLogits | None = None
    ids: Tensor | None = None
    kept: Tensor | None = None
    min_chunks: int = 1


class VocabularyPass:
    """Compute totals per token, and their gradients, over chunks of tokens and blocks of rows; all without autograd.

    With rows that are sharded over ranks, each rank passes its own tokens. For each chunk a rank gathers the hidden
    states of all ranks, and computes the logits of its own rows. The totals of all ranks are then merged as those of
    blocks are. All ranks must call the same methods.

    Args:
        student: The head that may be trained, with its hidden states.
        request: What is computed, for which tokens.

    Raises:
        ShapeError: Student and teacher have different numbers of tokens or of rows.
        SizeError: The teacher is sharded in another way than the student.
    """

    def __init__(self, student: LinearLogits, request: Request) -> None:
        self.objective, teacher, ids, kept, self.min_chunks = request
        self.student = student
        self.ranks: Collectives = student.collectives
        self.partition = student.partition
        self.dtype = loss_dtype(student.dtype)
        self.tokens = student.hidden.shape[:-1].numel()
        self.kept = None if kept is None or bool(kept.all()) else kept.nonzero().squeeze(1)
        self.ids = ids if ids is None or self.kept is None else ids[self.kept]
        self.may_be_infinite = student.may_be_infinite or (teacher is not None and teacher.may_be_infinite)
        sources = [student] if teacher is None else [student, teacher]
        if teacher is not None:
            check_pair(student, teacher)
        tensors = [x for each in sources for x in each.tensors]
        self.compiled = self.objective.has_kernels and STATISTICS.applies(*tensors)
        self.heads = [_Head(each, self.partition, self.kept, self.dtype, compiled=self.compiled) for each in sources]
        sizes = torch.tensor([len(self.heads[0].hidden_ND)], device=self.ranks.device)
        self.work, self.softcap_buffer = Workspace(), self._like
        self.counts: list[int] = self.ranks.all_gather(sizes, [1] * self.ranks.size).tolist()

    def totals(self) -> Totals:
        """Return the totals of this rank's tokens, `(N,)` or `(K, N)`; 0 for tokens that are not kept."""
        step = self._recomputed_chunk_tokens()
        self._allocate(step)
        buffers = self._buffers(self._block_numbers(step))
        found: list[Totals] = []
        for chunk in self._chunks(step):
            totals = self.objective.in_sweeps(partial(self._recomputed_sweep, buffers, chunk))
            found.append({name: self._own(value, chunk) for name, value in totals.items()})
        found = found or [self._totals_of_nothing()]
        joined = {name: torch.cat([each[name] for each in found], dim=-1) for name in found[0]}
        return {name: self._scattered(value) for name, value in joined.items()}

    def _totals_of_nothing(self) -> Totals:
        """Return empty totals, for a batch without tokens on any rank."""
        nothing = self._like.new_zeros(self.student.vocab_size, 0)
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
        requested = self._requested_by_all(requested)
        step = self._recomputed_chunk_tokens()
        self._allocate(step)
        sums, buffers = self._sums(requested, step), self._buffers(self._block_numbers(step))
        totals, grads = ({name: self._compact(x) for name, x in each.items()} for each in (totals, grads))
        for number, chunk in enumerate(self._chunks(step)):
            totals_C, grads_C = (
                {name: self._gathered(x.movedim(-1, 0)[chunk.here], chunk).movedim(0, -1) for name, x in each.items()}
                for each in (totals, grads)
            )
            compiled = self._compiled_dlogits(chunk, totals_C, grads_C)
            for block in self._blocks(chunk, buffers):
                self._dlogits_(sums, block, totals_C, grads_C, compiled)
                start = block.start - self.partition.start
                sums.add_to_rows(block.student, chunk.hidden[0], start, chunk=number)
                sums.add_to_hidden(block.student, chunk.hidden[0], start)
            self._finish_chunk(sums, chunk)
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
        requested = self._requested_by_all(NO_GRADIENTS if factors is None else requested)
        if factors is None or not self._any_rank(any(requested)):
            return loss.of(self.totals()), (None, None, None)
        factors_N = self._compact(factors)
        step = self._kept_chunk_tokens()
        rows, size = len(self.partition), ROWS_OF_A_BLOCK[self._device]
        sums = self._sums(requested, step)
        self._allocate(step)
        whole = self._buffers(rows * step * self.ranks.size)
        found = []
        dtype = sums.rows_VD.dtype
        is_converted = {dtype, product_dtype(dtype, self._like.device.type)} != {whole[0].dtype}
        for number, chunk in enumerate(self._chunks(step)):
            tokens = sum(chunk.sizes)
            views = [buffer[: rows * tokens].view(rows, tokens) for buffer in whole]
            blocks = [
                self._block([view[start : start + size] for view in views], chunk, start)
                for start in range(0, rows, size)
            ]
            totals = self.objective.in_sweeps(partial(self._kept_sweep, blocks, chunk))
            factors_C = self._gathered(factors_N[chunk.here], chunk)
            grads_C = loss.gradients(totals, factors_C)
            found.append(loss.of(totals).split(chunk.sizes)[self.ranks.rank])
            compiled = self._compiled_dlogits(chunk, totals, grads_C)
            for block in blocks:
                self._dlogits_(sums, block, totals, grads_C, compiled)
                start = block.start - self.partition.start
                sums.add_to_rows(block.student, chunk.hidden[0], start, chunk=number)
                if is_converted:  # a block at a time
                    sums.add_to_hidden(block.student, chunk.hidden[0], start)
            if not is_converted:
                sums.add_to_hidden(views[0], chunk.hidden[0], 0)
            self._finish_chunk(sums, chunk)
        losses_N = torch.cat(found) if found else self._like.new_zeros(0)
        return self._scattered(losses_N), self._finished(sums)

    @property
    def _device(self) -> str:
        """Return the key of this device in the tables of block sizes."""
        return "cuda" if self._like.device.type == "cuda" else "cpu"

    @property
    def _like(self) -> Tensor:
        """Return an empty tensor of the device and dtype of the logits."""
        return self.student.hidden.new_empty(0, dtype=self.dtype)

    def _recomputed_chunk_tokens(self) -> int:
        """Return the number of tokens of each rank in a chunk whose blocks are not kept."""
        most = min(MAX_CHUNK_TOKENS[self._device] // len(self.counts), math.ceil(max(self.counts) / self.min_chunks))
        return max(most, 1)

    def _kept_chunk_tokens(self) -> int:
        """Return the number of tokens of each rank in a chunk whose blocks are all kept: one buffer for each head."""
        ranks, rows = len(self.counts), math.ceil(self.student.vocab_size / len(self.counts))
        width, itemsize = self.heads[0].hidden_ND.shape[1], max(head.dtype.itemsize for head in self.heads)
        size = math.ceil(tokens_per_chunk(sum(self.counts), rows, width, self._device, itemsize) / ranks)
        return max(min(size, math.ceil(max(self.counts) / self.min_chunks)), 1)

    def _chunks(self, step: int) -> Iterator[_Chunk]:
        """Yield the chunks of the tokens of all ranks, with at most `step` tokens of each rank."""
        for start in range(0, max(self.counts), step):
            sizes = [min(max(count - start, 0), step) for count in self.counts]
            here = slice(start, start + step)
            chunk = _Chunk(here, sizes, [], None)
            hidden = [self._gathered(head.hidden_ND[here], chunk) for head in self.heads]
            ids = None if self.ids is None else self._gathered(self.ids[here], chunk).T
            yield chunk._replace(hidden=hidden, ids=ids)

    def _gathered(self, rows: Tensor, chunk: _Chunk) -> Tensor:
        """All-gather: concatenate the rows of all ranks for the tokens of the chunk."""
        return self.ranks.all_gather(rows.contiguous(), chunk.sizes)

    def _own(self, value: Tensor, chunk: _Chunk) -> Tensor:
        """Return the part of totals of the chunk, along their last dimension, that belongs to this rank's tokens."""
        parts: tuple[Tensor, ...] = value.split(chunk.sizes, dim=-1)
        return parts[self.ranks.rank]

    def _allocate(self, tokens: int) -> None:
        """Allocate the workspace for blocks of chunks of at most `tokens` tokens of each rank."""
        numbers = self._block_numbers(tokens)
        slots = 0 if self.compiled else self.objective.slots
        self.work = Workspace(tuple(self._like.new_empty(numbers) for _ in range(slots)))
        self.softcap_buffer = self._like.new_empty(numbers if self.heads[0].softcap is not None else 0)

    def _buffers(self, numbers: int) -> list[Tensor]:
        """Allocate memory for a number of logits of each head."""
        return [self._like.new_empty(numbers, dtype=head.dtype) for head in self.heads]

    def _block_numbers(self, tokens: int) -> int:
        """Return the number of logits in a block, for chunks of at most `tokens` tokens of each rank."""
        return min(ROWS_OF_A_BLOCK[self._device], len(self.partition)) * tokens * len(self.counts)

    def _blocks(self, chunk: _Chunk, buffers: list[Tensor]) -> Iterator[LogitBlock]:
        """Compute the logits of the chunk over one block of this rank's rows after another, in the same memory.

        Args:
            chunk: The tokens.
            buffers: Memory of a block of logits, for each head.
        """
        tokens, size = sum(chunk.sizes), ROWS_OF_A_BLOCK[self._device]
        for start in range(0, len(self.partition), size):
            rows = min(size, len(self.partition) - start)
            views = [buffer[: rows * tokens].view(rows, tokens) for buffer in buffers]
            block = self._block(views, chunk, start)
            self._fill(block, chunk)
            yield block

    def _block(self, views: list[Tensor], chunk: _Chunk, start: int) -> LogitBlock:
        """Return a block whose first row is the row `start` of this rank."""
        teacher, first, stop = None, self.partition.start + start, start + len(views[0])
        bias, teacher_bias = self.heads[0].bias_of(start, stop), None
        if len(views) == 2:
            teacher, teacher_bias = views[1], self.heads[1].bias_of(start, stop)
        biases = (bias, teacher_bias)
        is_last = stop == len(self.partition)
        return LogitBlock(views[0], teacher, chunk.ids, first, self.may_be_infinite, self.work, is_last, biases)

    def _fill(self, block: LogitBlock, chunk: _Chunk) -> None:
        """Compute the logits of a block."""
        start = block.start - self.partition.start
        for head, x_CD, view in zip(self.heads, chunk.hidden, (block.student, block.teacher), strict=False):
            assert view is not None
            head.fill(view, x_CD, start)

    def _recomputed_sweep(self, buffers: list[Tensor], chunk: _Chunk, earlier: Totals) -> Totals:
        """Return the totals of one sweep whose blocks of logits share the memory of `buffers`."""
        return self._sweep(self._blocks(chunk, buffers), chunk, earlier)

    def _kept_sweep(self, blocks: list[LogitBlock], chunk: _Chunk, earlier: Totals) -> Totals:
        """Return the totals of one sweep over blocks that have memory of their own; the first sweep fills them."""

        def filled() -> Iterator[LogitBlock]:
            for block in blocks:
                self._fill(block, chunk)
                yield block

        return self._sweep(blocks if earlier else filled(), chunk, earlier)

    def _sweep(self, blocks: Iterable[LogitBlock], chunk: _Chunk, earlier: Totals) -> Totals:
        """Return the totals of one sweep over this rank's blocks, merged with those of all ranks.

        Each rank merges the totals of its own tokens, and sends the result to the others. This is as much as an
        all-reduce sends.
        """
        compiled = self.objective.compiled_terms(chunk.ids, earlier) if self.compiled else None
        own = self.objective.merge(joined([self._terms(block, earlier, compiled) for block in blocks]))
        if self.ranks.size == 1:
            return own
        size, mine = self.ranks.size, chunk.sizes[self.ranks.rank]
        packed = _Packed(own)
        received = [self.ranks.all_to_all(rows, chunk.sizes, [mine] * size) for rows in packed.rows]
        by_rank = [rows.view(size, mine, rows.shape[1]) for rows in received]
        of_ranks = [packed.unpacked([rows[rank] for rows in by_rank]) for rank in range(size)]
        merged = _Packed(self.objective.merge(stacked(of_ranks)))
        return merged.unpacked([self.ranks.all_gather(rows, chunk.sizes) for rows in merged.rows])

    def _terms(self, block: LogitBlock, earlier: Totals, compiled: BlockTerms | None) -> Totals:
        """Return the totals of parts of a block, by a kernel if there is one."""
        found = None if compiled is None else compiled(block)
        return stacked([self.objective.terms(block.finished(self.dtype), earlier)]) if found is None else found

    def _compiled_dlogits(self, chunk: _Chunk, totals: Totals, grads: Totals) -> BlockGradient | None:
        """Return a kernel that computes the gradients by the logits of a chunk, or `None`."""
        return self.objective.compiled_dlogits(chunk.ids, totals, grads) if self.compiled else None

    def _dlogits_(
        self, sums: _GradientSums, block: LogitBlock, totals: Totals, grads: Totals, compiled: BlockGradient | None
    ) -> None:
        """Replace the logits of a block by the gradient of the products, and add the gradient of the bias to `sums`."""
        head, start = self.heads[0], block.start - self.partition.start
        bias = None if sums.bias is None else sums.bias[start : start + len(block.student)]
        softcap_grad_RC = head.softcap_grad(block.student, self.softcap_buffer)
        in_kernel = bias if softcap_grad_RC is None else None
        if compiled is not None and compiled(block, in_kernel):
            head.unfinish_(block.student, softcap_grad_RC, start)
            if bias is not None and in_kernel is None:
                bias += block.student.sum(1)
            head.scale_(block.student)
            return
        finished = block.finished(self.dtype)
        self.objective.dlogits_(finished, totals, grads)
        head.unfinish_(finished.student, softcap_grad_RC, start)
        if bias is not None:
            bias += finished.student.sum(1)
        head.scale_(finished.student)
        if finished.student is not block.student:
            block.student.copy_(finished.student)

    def _requested_by_all(self, requested: RequestedGradients) -> RequestedGradients:
        """Request gradients of the hidden states if any rank does: they need the rows of all ranks."""
        return requested._replace(hidden=self._any_rank(requested.hidden))

    def _any_rank(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank; a single process does not communicate."""
        return self.ranks.any(flag) if self.ranks.size > 1 else flag

    def _sums(self, requested: RequestedGradients, step: int) -> _GradientSums:
        """Allocate the gradients that are requested, for chunks of at most `step` tokens of each rank.

        Those of rows in bfloat16 have this dtype where no sum is rounded more than once: for one chunk, or with a
        residual that a kernel adds to. Otherwise they have the dtype of the loss.
        """
        chunks = math.ceil(max(self.counts) / step)
        head, like = self.heads[0], self._like
        rows_VD = head.rows_VD
        assert rows_VD is not None
        is_narrow = rows_VD.dtype == self.student.weight.dtype == torch.bfloat16 and (chunks < 2 or self.compiled)
        weight = residual = None
        if requested.weight:
            weight = like.new_empty(self.student.weight.shape, dtype=torch.bfloat16 if is_narrow else None)
            if is_narrow and chunks > 1:
                residual = torch.zeros_like(weight, dtype=torch.uint16)
        if weight is not None:  # the first chunk overwrites the rows of tokens
            weight[len(rows_VD) if max(self.counts) else 0 :] = 0
        return _GradientSums(
            rows_VD,
            like.new_empty(head.hidden_ND.shape) if requested.hidden else None,
            weight,
            residual,
            like.new_zeros(len(rows_VD)) if requested.bias else None,
            chunks,
        )

    def _finish_chunk(self, sums: _GradientSums, chunk: _Chunk) -> None:
        """Reduce-scatter: sum the gradients of the chunk's hidden states over all ranks, and store this rank's."""
        if sums.hidden is not None and sums.of_chunk is not None:
            sums.hidden[chunk.here] = self.ranks.reduce_scatter(sums.of_chunk, chunk.sizes)
            sums.of_chunk = None

    def _finished(self, sums: _GradientSums) -> Gradients:
        """Return the summed gradients, in the shapes of the inputs."""
        head, hidden = self.heads[0], sums.hidden
        if hidden is not None:
            hidden = hidden.mul_(head.scale) if head.scale != 1 else hidden
            hidden = hidden if self.kept is None else _scatter_kept(hidden, self.kept, self.tokens)
            hidden = hidden.view(self.student.hidden.shape)
        bias = sums.bias
        if bias is not None and head.divisor != 1:
            bias.div_(head.divisor)
        if bias is not None and head.masked is not None:
            bias[head.masked] = 0
        return hidden, sums.weight, bias

    def _compact(self, value: Tensor) -> Tensor:
        """Return the entries of the kept tokens along the last dimension."""
        return value if self.kept is None else value.index_select(-1, self.kept)

    def _scattered(self, value: Tensor) -> Tensor:
        """Return totals of the kept tokens with 0 for the others, along the last dimension."""
        if self.kept is None:
            return value
        return _scatter_kept(value.movedim(-1, 0), self.kept, self.tokens).movedim(0, -1)


def check_pair(student: UncomputedLogits, teacher: UncomputedLogits) -> None:
    """Check that two heads have the same vocabulary and tokens, and rows on the same ranks.

    Raises:
        ShapeError: The vocabularies or the batches have different sizes.
        SizeError: The teacher's rows are sharded and the student's are not, or in another way.
    """
    if student.vocab_size != teacher.vocab_size:
        raise ShapeError(
            f"The student has {student.vocab_size} tokens and the teacher {teacher.vocab_size}: a divergence needs one "
            f"vocabulary. Leave out spare rows with vocab_size=, or map one vocabulary to the other first."
        )
    if student.hidden.shape[:-1] != teacher.hidden.shape[:-1]:
        raise ShapeError(
            f"The hidden states of the student are {tuple(student.hidden.shape)} and those of the teacher "
            f"{tuple(teacher.hidden.shape)}: pass one of each for every token."
        )
    if isinstance(teacher, LinearLogits) and teacher.is_sharded:
        same = isinstance(student, LinearLogits) and student.is_sharded and student.partition == teacher.partition
        if not same:
            raise SizeError(
                "The teacher's rows are sharded and the student's are not, or in another way: shard both over the same "
                "ranks, or only the student."
            )


def _scatter_kept(values: Tensor, kept: Tensor, tokens: int) -> Tensor:
    """Return a tensor with one entry per token: `values` at the indices `kept`, and 0 at all others."""
    return values.new_zeros(tokens, *values.shape[1:]).index_copy_(0, kept, values)
