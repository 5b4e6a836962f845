"""The matrix products of a pass: blocks of logits of a head, and the gradients of hidden states and rows from dlogits.

See `rows` for their dtypes. Where products have another dtype than rows and hidden states, the hidden states
of a chunk and the rows of a block are converted for them. Of rows there is one buffer.
"""

import math

import torch
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.shapes import wide_dtype
from embedlayer.kernels.cpu.softmax import add_bfloat16
from embedlayer.kernels.softmax import BLOCK_NUMEL, Finishing
from embedlayer.losses.definition import gradient_dtype
from embedlayer.losses.options import LogitSettings
from embedlayer.losses.rows import (
    ConvertedRows,
    has_wide_products,
    matrix_product,
    one_index,
    product_dtype,
    write_product,
)
from embedlayer.losses.token_chunks import Chunk, TokenChunks
from embedlayer.losses.uncomputed_logits import LinearLogits, RequestedGradients, UncomputedLogits

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Gradients by hidden states, rows, bias and logits of further events; `None` if not requested."""


ROUNDED_ROWS = 256
"""Rows whose logits are rounded at once on a CPU."""


class BlockFinishing:
    """Finish logits in place over blocks of rows, vocabulary first, `(R, C)`, and convert gradients back."""

    # `bound * tanh((scale * x + bias / divisor) / softcap)`, without a soft cap `scale * x + bias / divisor`: the
    # temperature is in `divisor` (or, with a soft cap, in `bound`), so callers pass raw logits times `scale`.

    def __init__(self, options: LogitSettings) -> None:
        self.softcap = options.softcap
        self.divisor = options.temperature if self.softcap is None else 1.0
        self.scale = options.logit_scale / self.divisor
        self.bound = None if self.softcap is None else self.softcap / options.temperature
        self.masked = options.masked()

    def finish_(self, block_RC: Tensor, start: int, bias: Tensor | None) -> None:
        """Apply bias, soft cap and mask to scaled logits."""
        if bias is not None:
            block_RC.add_(bias.unsqueeze(1))
        if self.softcap is not None and self.bound is not None:
            block_RC.div_(self.softcap).tanh_().mul_(self.bound)
        self.fill_masked_(block_RC, start, -math.inf)

    def softcap_grad(self, logits_RC: Tensor, buffer: Tensor) -> Tensor | None:
        """Return the derivative of soft cap and temperature at finished logits, or `None` without a soft cap."""
        if self.softcap is None or self.bound is None:
            return None
        out = torch.div(logits_RC, self.bound, out=buffer[: logits_RC.numel()].view(logits_RC.shape))
        return out.square_().neg_().add_(1).mul_(self.bound / self.softcap)

    def unfinish_(self, dlogits_RC: Tensor, softcap_grad_RC: Tensor | None, start: int) -> None:
        """Convert gradients of finished logits, in place, to those of the scaled logits."""
        if softcap_grad_RC is not None:
            dlogits_RC.mul_(softcap_grad_RC)
        self.fill_masked_(dlogits_RC, start, 0.0)

    def fill_masked_(self, block_RC: Tensor, start: int, value: float) -> None:
        """Set the row of the masked token to `value`, if it is in the block from row `start` on."""
        if self.masked is not None and start <= self.masked < start + len(block_RC):
            block_RC[self.masked - start] = value


class HeadBlocks:
    """Compute blocks of logits of one head, from hidden states and this rank's rows."""

    def __init__(
        self,
        logits: UncomputedLogits,
        row_range: tuple[int, int],
        tokens: TokenChunks,
        dtype: torch.dtype,
        *,
        compiled: bool,
        kernels_finish: bool = False,
    ) -> None:
        self.logits = logits
        self.first, stop = row_range
        self.dtype = dtype
        options = logits.options.of_rows(self.first, stop)
        self.finishing = BlockFinishing(options)
        self.hidden_scale, self.block_scale = self.finishing.scale, 1.0
        hidden_ND = logits.hidden.detach().reshape(-1, logits.hidden.shape[-1])
        self.hidden_ND = tokens.states(hidden_ND)
        self.rows: ConvertedRows | None = None
        self.bias: Tensor | None = None
        self.kernel_bias: Tensor | None = None
        if isinstance(logits, LinearLogits):
            weight = logits.weight.detach()
            rows = weight[: stop - self.first] if logits.is_sharded else weight[self.first : stop]
            if options.head_dtype is None:  # that of autocast may be another
                rows, self.hidden_ND = rows.to(logits.dtype), self.hidden_ND.to(logits.dtype)
            both = {rows.dtype, self.hidden_ND.dtype}
            is_wide = len(both) == 1 and has_wide_products(rows.dtype, device_kind(rows))
            self.rows = ConvertedRows(rows, rows.dtype if is_wide else product_dtype(logits.dtype, device_kind(rows)))
            if logits.dtype == torch.float16 or logits.dtype != self.hidden_ND.dtype:
                self.hidden_scale, self.block_scale = 1.0, self.hidden_scale  # it would be rounded, or out of range
            if self.hidden_scale != 1:
                self.hidden_ND = self.hidden_ND * self.hidden_scale
            if options.bias is not None:
                bias = options.bias.detach().to(dtype)
                self.bias = bias if self.finishing.divisor == 1 else bias / self.finishing.divisor
        self._kernels_finish = kernels_finish and self.rows is not None
        device = device_kind(self.hidden_ND)
        if compiled and self.rows is not None and (self.finishing.softcap is None or self._kernels_finish):
            self.dtype = torch.bfloat16 if logits.dtype == torch.bfloat16 else dtype
            if self.bias is not None:
                self.kernel_bias, self.bias = self.bias.contiguous(), None
                if self.finishing.masked is not None and not self._kernels_finish:
                    place = one_index(self.finishing.masked, self.kernel_bias)
                    self.kernel_bias = self.kernel_bias.index_fill(0, place, 0.0)
        rows_dtype = None if self.rows is None or not self.rows.are_stored else self.rows.dtype
        self.is_stored = rows_dtype is not None and rows_dtype == self.dtype == product_dtype(rows_dtype, device)
        shapes = self.finishing.softcap is not None or self.finishing.masked is not None or self.bias is not None
        self._finishes_blocks = not self._kernels_finish and (shapes or self.block_scale != 1)

    @property
    def converted_bytes(self) -> int:
        """Return the bytes per element of a block's gradient after its conversion to the dtype of the products."""
        rows = self.rows
        if rows is None or rows.dtype == self.dtype or not has_wide_products(rows.dtype, device_kind(rows.rows)):
            return 0
        return rows.dtype.itemsize

    def narrow_scale(self, *slopes: Tensor) -> Tensor | None:
        """Return a factor of gradients of results, with which those of the logits stay in the range of their dtype."""
        # float16 products round gradients below 6e-8 to 0, and the mean over 10,000 tokens has 1e-4 times a
        # probability. All ranks must call this.
        if self.converted_bytes == 0 or self.rows is None or self.rows.dtype != torch.float16:
            return None
        assert isinstance(self.logits, LinearLogits)
        largest = torch.stack([each.abs().amax() if each.numel() else each.sum() for each in slopes]).amax()
        largest = self.logits.collectives.all_reduce(largest * abs(self.block_scale), "max")
        return 1 / largest.nan_to_num(1.0).clamp(1e-30, 1e30)

    def states(self, x_CD: Tensor) -> Tensor:
        """Return the hidden states of a chunk in the dtype of the products."""
        return x_CD if self.rows is None else x_CD.to(self.rows.dtype)

    def fill(self, out_RC: Tensor, x_CD: Tensor, start: int) -> None:
        """Write the logits of a chunk over the rows from `start` on, of this rank's rows, to `out_RC`."""
        stop = start + out_RC.shape[0]
        if self.rows is None:
            out_RC.copy_(self.logits.block(x_CD, self.first + start, self.first + stop).detach().T)
            return
        if self.is_stored:
            out_RC.addmm_(self.rows.rows[start:stop], x_CD.T, beta=0)
        else:
            self._fill_converted(out_RC, x_CD, self.rows, start, stop)
        if self._finishes_blocks:
            if self.block_scale != 1:
                out_RC.mul_(self.block_scale)
            self.finishing.finish_(out_RC, start, None if self.bias is None else self.bias[start:stop])

    def _fill_converted(self, out_RC: Tensor, x_CD: Tensor, rows: ConvertedRows, start: int, stop: int) -> None:
        """Write products of another dtype than that of the rows or of `out_RC`."""
        is_rounded = self.logits.dtype == torch.bfloat16 != out_RC.dtype
        is_narrow = is_rounded and rows.dtype == torch.bfloat16
        product_RC = torch.empty_like(out_RC, dtype=torch.bfloat16) if is_narrow else out_RC
        for part in rows.parts(start, stop):
            write_product(product_RC[part.start - start : part.stop - start], rows[part], x_CD.T)
        if is_rounded:
            size = ROUNDED_ROWS if device_kind(out_RC) == "cpu" else max(len(out_RC), 1)
            for logits, products in zip(out_RC.split(size), product_RC.split(size), strict=True):
                logits.copy_(products.to(torch.bfloat16))

    def left_to_kernels(self, start: int, stop: int) -> Finishing:
        """Return what kernels do to the logits of the rows `start` to `stop - 1` besides adding `kernel_bias`."""
        if not self._kernels_finish:
            return Finishing()
        cap, row = self.finishing, self.finishing.masked
        masked = None if row is None else row - start if start <= row < stop else -1
        return Finishing(self.block_scale, cap.softcap, cap.bound, masked)


class GradientSums:
    """Sum gradients: of a head's rows and bias over chunks of tokens, of its hidden states over blocks of rows."""

    def __init__(
        self,
        head: HeadBlocks,
        requested: RequestedGradients,
        chunks: int,
        events: Tensor | None = None,
        *,
        compiled: bool,
        scale: Tensor | None = None,
    ) -> None:
        assert head.rows is not None
        assert isinstance(head.logits, LinearLogits)
        self.head, self.rows, self.scale = head, head.rows, scale
        count, dtype = head.rows.rows.shape[0], head.rows.rows.dtype
        self._chunk, self._chunks = 0, chunks
        self.multiplies_stored_rows = head.rows.are_stored and head.rows.dtype == head.dtype
        self._is_narrowed = has_wide_products(head.rows.dtype, device_kind(head.hidden_ND))
        whole = head.logits.weight
        like = head.hidden_ND.new_empty(0, dtype=wide_dtype(head.logits.dtype))
        self.hidden = like.new_empty(head.hidden_ND.shape) if requested.hidden else None
        overwrites_bias = head.kernel_bias is not None and device_kind(whole) == "cuda" and chunks > 0
        self.adds_to_bias = not overwrites_bias
        allocate = like.new_empty if overwrites_bias else like.new_zeros
        self.bias = allocate(count) if requested.bias else None
        self.events = None if events is None else like.new_empty(events.shape)
        self._of_chunk: Tensor | None = None  # gradients of the hidden states of the chunk, of all ranks
        self._is_stored = False  # whether they are computed where `hidden` stores them
        self.weight: Tensor | None = None
        self._residual: Tensor | None = None
        if requested.weight:
            has_residual = compiled and device_kind(whole) == "cpu" and whole.is_contiguous()
            is_narrow = dtype == gradient_dtype(whole) == torch.bfloat16 and (chunks < 2 or has_residual)
            of_rows = torch.bfloat16 if is_narrow else like.dtype
            of_part = head.logits.new_gradient
            self.weight = torch.empty_like(whole, dtype=of_rows) if of_part is None else of_part(of_rows)
            if is_narrow and chunks > 1:
                self._residual = torch.zeros_like(self.weight.zero_(), dtype=torch.uint16)
            if chunks == 0 or len(whole) > count:
                self.weight[count if chunks else 0 :].zero_()  # the first chunk overwrites the others
        is_exact = self.weight is not None and self._residual is None and self.weight.dtype == head.dtype
        self._adds_stored = is_exact and head.is_stored and not self._is_narrowed

    def add(self, dlogits_RC: Tensor, chunk: Chunk, start: int, *, with_hidden: bool) -> None:
        """Add the products of the gradient of a block, with the hidden states of its chunk and with its rows."""
        x_CD = chunk.hidden[0]
        if self._adds_stored and self.weight is not None:
            part = self.weight[start : start + dlogits_RC.shape[0]]
            part.addmm_(dlogits_RC, x_CD, beta=1 if self._chunk else 0)
        else:
            if self._is_narrowed:
                dlogits_RC = dlogits_RC.to(self.rows.dtype)
            self.add_to_rows(dlogits_RC, x_CD, start)
        if with_hidden:
            self.add_to_hidden(dlogits_RC, chunk, start)

    def add_to_rows(self, dlogits_RC: Tensor, x_CD: Tensor, start: int) -> None:
        if self.weight is None:
            return
        for here in self.rows.parts(start, start + len(dlogits_RC)):
            part_RC = dlogits_RC[here.start - start : here.stop - start]
            if self._residual is None:  # the first chunk overwrites what is not initialised
                write_product(self.weight[here], part_RC, x_CD, add=self._chunk > 0)
            else:
                addend, is_last = matrix_product(part_RC, x_CD), self._chunk == self._chunks - 1
                add_bfloat16_(self.weight[here], self._residual[here], addend, last=is_last)

    def add_to_hidden(self, dlogits_RC: Tensor, chunk: Chunk, start: int) -> None:
        """Add the gradients of one block, or of all rows, to those of the hidden states of the chunk."""
        # The block from row 0 on must come first: it overwrites.
        if self.hidden is None:
            return
        if self._of_chunk is None:
            self._is_stored = device_kind(self.hidden) == "cuda" and chunk.ranks.size == 1 and not chunk.padding
            shape = chunk.hidden[0].shape
            self._of_chunk = self.hidden[chunk.here] if self._is_stored else self.hidden.new_empty(shape)
        for here in self.rows.parts(start, start + len(dlogits_RC)):
            part_RC = dlogits_RC[here.start - start : here.stop - start]
            write_product(self._of_chunk, part_RC.T, self.rows[here], add=here.start > 0)

    def finish_chunk(self, chunk: Chunk) -> None:
        """Reduce-scatter: sum the gradients of the chunk's hidden states over all ranks, and store this rank's."""
        if self.hidden is not None and self._of_chunk is not None:
            if not self._is_stored:
                of_tokens = self._of_chunk[: sum(chunk.sizes)]
                self.hidden[chunk.here] = chunk.ranks.reduce_scatter(of_tokens, chunk.sizes)
            self._of_chunk = None
        self._chunk += 1
        self.adds_to_bias = True

    def of_inputs(self, tokens: TokenChunks) -> Gradients:
        """Return the gradients in the shapes of the inputs."""
        head, finishing, hidden = self.head, self.head.finishing, self.hidden
        if self.scale is not None:
            for each in (hidden, self.weight, self.bias, self.events):
                if each is not None:
                    each.div_(self.scale)
        if hidden is not None:
            hidden = hidden.mul_(head.hidden_scale) if head.hidden_scale != 1 else hidden
            hidden = tokens.masked(tokens.scattered(hidden, 0), 0).view(head.logits.hidden.shape)
        if self.events is not None:
            self.events = tokens.masked(tokens.scattered(self.events, 0), 0)
        if self.bias is not None:
            if finishing.divisor != 1:
                self.bias.div_(finishing.divisor)
            finishing.fill_masked_(self.bias, 0, 0.0)
        return hidden, self.weight, self.bias, self.events


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
