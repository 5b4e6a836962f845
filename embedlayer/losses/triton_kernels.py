"""`linear_cross_entropy` in Triton, for CUDA: logits exist in registers only, one block of tokens by rows at a time.

Forward: each program computes one share of the vocabulary for one block of tokens, and keeps a running logsumexp and
the target logit. Backward: the softmax of each block is computed again from the logsumexp. Programs for blocks of
tokens compute the gradient of `hidden`, and programs for blocks of rows those of `weight` and `bias`. No two programs
write to the same memory, so the results do not depend on their order.

The kernels share some arguments: `tokens` and `rows` are the indices of a block, and `numbers` are sizes and options
as `_numbers` returns them. `TRITON_INTERPRET=1`, set before Triton is imported, runs the same kernels slowly on the
CPU, for tests.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from embedlayer.core.index_checks import raise_if_outside
from embedlayer.losses.finishing import BlockFinishing
from embedlayer.losses.uncomputed_logits import LinearLogits

BLOCK = tl.constexpr(64)  # tokens, rows and columns of a block
SHARES = 16  # parts of the vocabulary in the forward pass


@triton.jit
def _load(matrix, rows, columns, num_rows, width):
    """Load a block of a row-major matrix `(num_rows, width)`, with 0 for elements outside of it.

    `rows` and `columns` are index tensors, such as `(BLOCK, 1)` and `(1, BLOCK)`; they broadcast to the shape of the
    block.
    """
    mask = (rows < num_rows) & (columns < width)
    return tl.load(matrix + rows * width + columns, mask=mask, other=0.0)


@triton.jit
def _add(matrix, rows, columns, num_rows, width, values):
    """Add `values` in place to one block of a row-major matrix `(num_rows, width)`; elements outside of it are skipped.

    The addition is not atomic: no other program of the grid may write to the same block.
    """
    mask = (rows < num_rows) & (columns < width)
    place = matrix + rows * width + columns
    tl.store(place, tl.load(place, mask=mask, other=0.0) + values, mask=mask)


@triton.jit
def _logits(hidden, weight, bias, tokens, rows, numbers):
    """Compute float32 logits of a block of tokens by a block of rows, `(BLOCK, BLOCK)`; -inf for other rows."""
    num_tokens, num_rows, width, scale, softcap, masked = numbers
    raw_logits = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = _load(hidden, tokens[:, None], columns[None, :], num_tokens, width)
        w = _load(weight, rows[None, :], columns[:, None], num_rows, width)
        raw_logits += tl.dot(x, w, input_precision="ieee")
    logits = raw_logits * scale
    if bias is not None:
        logits += tl.load(bias + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[None, :]
    if softcap is not None:
        # tanh by exp of a number that is not positive, which cannot overflow
        small = tl.exp(-2.0 * tl.abs(logits) / softcap)
        size = softcap * (1.0 - small) / (1.0 + small)
        logits = tl.where(logits < 0, -size, size)
    return tl.where((rows[None, :] < num_rows) & (rows[None, :] != masked), logits, float("-inf"))


@triton.jit
def _dlogits(logits, lse, factors, targets, tokens, rows, numbers):
    """Compute the gradient of the losses with respect to the logits before the soft cap, `(BLOCK, BLOCK)`.

    Without a soft cap it is `(softmax - one_hot) * factor`. The logit scale is not included: the kernels multiply by
    it.
    """
    num_tokens, num_rows, _width, _scale, softcap, masked = numbers
    inside = tokens < num_tokens
    token_lse = tl.load(lse + tokens, mask=inside, other=0.0)
    factor = tl.load(factors + tokens, mask=inside, other=0.0)
    target = tl.load(targets + tokens, mask=inside, other=-1)
    dlogits = tl.exp(logits - token_lse[:, None]) - tl.where(rows[None, :] == target[:, None], 1.0, 0.0)
    counts = inside[:, None] & (rows[None, :] < num_rows) & (rows[None, :] != masked)
    if softcap is not None:
        share = tl.where(counts, logits, 0.0) / softcap
        dlogits = dlogits * (1.0 - share * share)
    return tl.where(counts, dlogits * factor[:, None], 0.0)


@triton.jit
def _forward(hidden, weight, bias, targets, lse, target_logits, rows_each, numbers):
    """Store the logsumexp and the target logit of each token of a block, over one share of the vocabulary.

    The outputs `lse` and `target_logits` are `(SHARES, num_tokens)`. A target logit is 0 if the target is in another
    share. `rows_each` is the number of rows in a share.
    """
    num_tokens, _num_rows, _width, _scale, _softcap, _masked = numbers
    tokens = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    share = tl.program_id(1)
    target = tl.load(targets + tokens, mask=tokens < num_tokens, other=-1)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    found = tl.zeros((BLOCK,), tl.float32)
    for start in range(share * rows_each, (share + 1) * rows_each, BLOCK):
        rows = (start + tl.arange(0, BLOCK)).to(tl.int64)
        logits = _logits(hidden, weight, bias, tokens, rows, numbers)
        higher = tl.maximum(highest, tl.max(logits, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - safe) + tl.sum(tl.exp(logits - safe[:, None]), 1)
        found += tl.sum(tl.where(rows[None, :] == target[:, None], logits, 0.0), 1)
        highest = higher
    place = share * num_tokens + tokens
    total = tl.where(total == 0, 1.0, total)  # NaN stays NaN
    tl.store(lse + place, highest + tl.log(total), mask=tokens < num_tokens)
    tl.store(target_logits + place, found, mask=tokens < num_tokens)


@triton.jit
def _backward_hidden(hidden, weight, bias, targets, lse, factors, grad_hidden, numbers):
    """Add `dlogits @ weight`, summed in float32 over the vocabulary, to one block of tokens of `grad_hidden`."""
    num_tokens, num_rows, width, scale, _softcap, _masked = numbers
    tokens = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    for first in range(0, num_rows, BLOCK):
        rows = (first + tl.arange(0, BLOCK)).to(tl.int64)
        logits = _logits(hidden, weight, bias, tokens, rows, numbers)
        dlogits = _dlogits(logits, lse, factors, targets, tokens, rows, numbers)
        dlogits = (dlogits * scale).to(weight.dtype.element_ty)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            w = _load(weight, rows[:, None], columns[None, :], num_rows, width)
            product = tl.dot(dlogits, w, input_precision="ieee")
            _add(grad_hidden, tokens[:, None], columns[None, :], num_tokens, width, product)
        tl.debug_barrier()


@triton.jit
def _backward_weight(hidden, weight, bias, targets, lse, factors, grad_weight, grad_bias, numbers):
    """Add `dlogits.T @ hidden`, summed in float32 over the tokens, to one block of rows of `grad_weight`.

    The sums of `dlogits` over the tokens are written to `grad_bias`, unless `bias` is `None`.
    """
    num_tokens, num_rows, width, scale, _softcap, _masked = numbers
    rows = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    bias_sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_tokens, BLOCK):
        tokens = (first + tl.arange(0, BLOCK)).to(tl.int64)
        logits = _logits(hidden, weight, bias, tokens, rows, numbers)
        dlogits = _dlogits(logits, lse, factors, targets, tokens, rows, numbers)
        bias_sums += tl.sum(dlogits, 0)
        dlogits = tl.trans((dlogits * scale).to(hidden.dtype.element_ty))
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = _load(hidden, tokens[:, None], columns[None, :], num_tokens, width)
            product = tl.dot(dlogits, x, input_precision="ieee")
            _add(grad_weight, rows[:, None], columns[None, :], num_rows, width, product)
        tl.debug_barrier()
    if bias is not None:
        tl.store(grad_bias + rows, bias_sums, mask=rows < num_rows)


def triton_cross_entropy(logits: LinearLogits, targets: Tensor, ignore_index: int) -> Tensor:
    """Compute the cross entropy of each target by Triton kernels, on CUDA or in Triton's interpreter.

    It is differentiable once in hidden states, rows and bias. A temperature is folded into scale and bias, so it must
    be 1 with a soft cap.

    Args:
        logits: The head and its hidden states.
        targets: Token IDs `(...)`, or `ignore_index`.
        ignore_index: Target value whose loss is 0.

    Returns:
        Losses in nats, `(...)`.

    Raises:
        TokenIdError: A target is neither a token nor `ignore_index`.
    """
    raise_if_outside(targets, logits.vocab_size, "token id", ignore=ignore_index)
    finishing, bias = BlockFinishing(logits.options), logits.bias
    kept = targets != ignore_index
    places = kept.flatten().nonzero().squeeze(1)
    hidden = logits.hidden
    hidden_ND = hidden.reshape(-1, hidden.shape[-1]).index_select(0, places).to(logits.dtype)
    rows_VD = logits.weight if len(logits.weight) == logits.vocab_size else logits.rows
    targets_N = targets.flatten().index_select(0, places).long()
    bias = bias if bias is None or finishing.divisor == 1.0 else bias / finishing.divisor
    losses_N: Tensor = _Triton.apply(hidden_ND, rows_VD.to(logits.dtype), bias, targets_N, finishing)  # type: ignore[no-untyped-call]
    losses_N = losses_N.new_zeros(kept.numel()).index_copy(0, places, losses_N)
    return losses_N.view(targets.shape)


class _Triton(torch.autograd.Function):
    """Autograd function that runs the kernels: from hidden states `(N, D)` and token IDs `(N,)` to losses `(N,)`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, finishing: BlockFinishing
    ) -> Tensor:
        hidden, weight = hidden.contiguous(), weight.contiguous()
        tokens, rows_each = len(hidden), triton.cdiv(triton.cdiv(len(weight), SHARES), BLOCK.value) * BLOCK.value
        lse_of_shares, target_logits = hidden.new_empty(2, SHARES, tokens, dtype=torch.float32)
        if tokens:
            numbers = _numbers(hidden, weight, finishing)
            grid = (triton.cdiv(tokens, BLOCK.value), SHARES)
            _forward[grid](hidden, weight, bias, targets, lse_of_shares, target_logits, rows_each, numbers)
        lse = lse_of_shares.logsumexp(0)
        ctx.save_for_backward(hidden, weight, bias, targets, lse)
        ctx.finishing = finishing
        losses: Tensor = lse - target_logits.sum(0)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        numbers = _numbers(hidden, weight, ctx.finishing)
        inputs = (hidden, weight, bias, targets, lse, grad_output.float().contiguous())
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight or needs_bias else None
        grad_bias = weight.new_zeros(len(weight), dtype=torch.float32)
        if grad_hidden is not None and len(hidden):
            _backward_hidden[triton.cdiv(len(hidden), BLOCK.value),](*inputs, grad_hidden, numbers)
        if grad_weight is not None and len(hidden):
            grid = (triton.cdiv(len(weight), BLOCK.value),)
            _backward_weight[grid](*inputs, grad_weight, grad_bias, numbers)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            grad_weight.to(weight.dtype) if grad_weight is not None and needs_weight else None,
            grad_bias.to(bias.dtype) if needs_bias else None,
            None,
            None,
        )


def _numbers(hidden: Tensor, weight: Tensor, finishing: BlockFinishing) -> tuple[int | float | None, ...]:
    """Return the argument `numbers` of all kernels, a tuple that Triton compiles `None` in as a constant.

    Its entries are number of tokens, number of rows, width, logit scale, soft cap or `None`, and masked row or -1.
    """
    masked = -1 if finishing.masked is None else finishing.masked
    return len(hidden), len(weight), weight.shape[1], finishing.scale, finishing.softcap, masked
