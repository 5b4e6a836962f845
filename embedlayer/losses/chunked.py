"""`linear_cross_entropy` over chunks of a few hundred tokens, with the gradients computed in the forward pass.

All logits at once are `tokens x V` numbers, and their gradients as many again. But the loss of a token and its
gradients need its own logits alone. So one chunk of tokens after another uses one small buffer: raw logits, softmax,
loss, and, while the softmax is in the buffer, its two products with `weight` and `hidden`, which are the gradients up
to a factor. The backward pass only multiplies by that factor.

The buffer is `(V, tokens)`, vocabulary first: `weight @ hidden.T` is 1.4x faster on a CPU than `hidden @ weight.T`, and
a padding row is one block of memory. Suffixes name the dimensions: N tokens, C tokens of a chunk, V rows, D columns.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from embedlayer.collectives import SINGLE_PROCESS, Collectives, RowPartition
from embedlayer.errors import SizeError
from embedlayer.index_checks import raise_if_outside
from embedlayer.losses.chunk_size import tokens_per_chunk
from embedlayer.losses.cross_entropy import LossSettings, cross_entropy, loss_dtype
from embedlayer.tracing import is_transformed, transforms_active

ROWS_AT_ONCE = 8192

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of the loss by hidden states, rows and bias; `None` if not requested."""


class RequestedGradients(NamedTuple):
    """Record for which of the three differentiable inputs of the loss a gradient must be computed."""

    hidden: bool
    weight: bool
    bias: bool


class LossInputs(NamedTuple):
    """Hold the input tensors of a loss.

    Attributes:
        hidden: Hidden states, `(..., D)`.
        weight: One row per token, `(rows, D)`.
        bias: Bias of the rows, `(rows,)`, or `None`.
        targets: Target token IDs, `(...)`.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor


class ChunkedSettings(NamedTuple):
    """Hold everything that a chunked loss needs besides its input tensors.

    Attributes:
        loss: The options, such as `label_smoothing` and `reduction`.
        requested: For which inputs a gradient is computed.
        collectives: Collective operations of the ranks over which the rows are sharded.
        partition: Which rows this rank stores.
        min_chunks: Number of chunks into which the tokens are divided at least.
    """

    loss: LossSettings
    requested: RequestedGradients
    collectives: Collectives
    partition: RowPartition
    min_chunks: int = 1


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    settings: LossSettings,
    collectives: Collectives = SINGLE_PROCESS,
    partition: RowPartition | None = None,
    min_chunks: int = 1,
) -> Tensor:
    """Compute the loss over chunks of tokens, differentiable in `hidden`, `weight` and `bias`.

    With several ranks each passes its own hidden states, targets and rows. For each chunk of tokens, every rank gathers
    the hidden states of all ranks and computes the logits of its own rows. Three numbers per token are then reduced
    over the ranks: the maximum, the sum of exponentials and the target logit; with `label_smoothing` also the sum of
    logits. All ranks must call this function, and `backward` through it.

    Args:
        hidden: Hidden states of this rank's tokens, `(..., D)`.
        weight: The rows that this rank stores, `(rows, D)`.
        bias: The bias of these rows, `(rows,)`, or `None`.
        targets: Token IDs `(...)`, or `ignore_index`. An ID counts from the first row of the whole vocabulary.
        settings: The options. Here `padding_idx` counts from the first row of this rank.
        collectives: The ranks over which the rows are sharded.
        partition: Which rows this rank stores; `None` for all rows.
        min_chunks: Number of chunks into which the tokens are divided at least; with 2 or more chunks not even a small
            batch has all its logits at once. A compiled graph ignores it.

    Returns:
        The loss of this rank's tokens in nats: a scalar, or `(...)` with `reduction="none"`.

    Raises:
        TokenIdError: A target is neither a token nor `ignore_index`.
        SizeError: A `torch.func` transform is active. `backward` raises it if `create_graph=True` and rows are sharded.
    """
    if transforms_active():
        raise SizeError(
            "The loss of a sharded table is computed by all ranks together and cannot be transformed by torch.func: "
            "differentiate it with backward() or torch.autograd.grad."
        )
    needs_grad = (torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias))
    requested = RequestedGradients(*needs_grad)
    if torch.compiler.is_compiling() and partition is None:
        result: Tensor = _operator(hidden, weight, bias, targets, None, *settings, *requested)[0]
        return result
    partition = RowPartition(settings.vocab_size) if partition is None else partition
    chunked = ChunkedSettings(settings, requested, collectives, partition, min_chunks)
    return _Chunked.apply(hidden, weight, bias, targets, chunked)  # type: ignore[no-any-return, no-untyped-call]


def loss_and_gradients(
    inputs: LossInputs, grad_output: Tensor | None, chunked: ChunkedSettings
) -> tuple[Tensor, Gradients]:
    """Compute the loss and its gradients in one pass over chunks of tokens; all ranks must call it.

    Args:
        inputs: The input tensors; targets may be `ignore_index`.
        grad_output: Gradient of the final scalar with respect to the loss, of the shape of the loss; `None` for 1.
        chunked: The options, the requested gradients, and the ranks.

    Returns:
        The loss, and the gradients of hidden states, weight and bias times `grad_output`. All are float32, or float64
        for float64 products. A gradient that is not requested is `None`. With `reduction="none"` and without
        `grad_output` all gradients are `None`.

    Raises:
        TokenIdError: A target is neither a token nor `ignore_index`.
    """
    settings, (hidden, weight, bias, targets) = chunked.loss, inputs
    raise_if_outside(targets, settings.vocab_size, "token id", ignore=settings.ignore_index)
    targets_N = targets.reshape(-1).long()
    hidden_ND = hidden.reshape(-1, hidden.shape[-1])
    is_kept = targets_N != settings.ignore_index
    kept = None if bool(is_kept.all()) else is_kept.nonzero().squeeze(1)
    if kept is not None:
        targets_N, hidden_ND = targets_N[kept], hidden_ND.index_select(0, kept)
    per_token, dtype = settings.reduction == "none", loss_dtype(settings.compute)
    factor = 1 / max(targets_N.numel(), 1) if settings.reduction == "mean" else 1.0
    if grad_output is None:
        factors_N = None if per_token else torch.full_like(targets_N, factor, dtype=dtype)
    else:
        grad_output_N = grad_output.reshape(-1) if per_token else grad_output.expand(is_kept.shape)
        factors_N = factor * (grad_output_N if kept is None else grad_output_N[kept]).to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        kept_inputs = LossInputs(hidden_ND, weight, bias, targets_N)
        losses_N, (grad_ND, grad_weight, grad_bias) = _all_chunks(kept_inputs, factors_N, chunked)
    if kept is not None:
        losses_N = _scatter_kept(losses_N, kept, is_kept.numel()) if per_token else losses_N
        grad_ND = None if grad_ND is None else _scatter_kept(grad_ND, kept, is_kept.numel())
    result = losses_N.view(targets.shape) if per_token else losses_N.sum() * factor
    return result, (None if grad_ND is None else grad_ND.view(hidden.shape), grad_weight, grad_bias)


@dataclass
class _GradientSums:
    """Sum the gradients of weight and bias over chunks of tokens.

    Attributes:
        rows_VD: The rows, in the dtype of the matrix products.
        hidden: Buffer `(N, D)` that the caller fills with the gradients of the hidden states; `None` if not requested.
        weight: Sum of the gradients of the rows; `None` if not requested.
        bias: Sum of the gradients of the bias; `None` if not requested.
    """

    rows_VD: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def add(self, dlogits_VC: Tensor, x_CD: Tensor, factors_C: Tensor, *, first: bool) -> Tensor | None:
        """Add the gradients of one chunk to `weight` and `bias` in place, and return those of its hidden states.

        The gradient of the loss with respect to the raw logits is `dlogits_VC * factors_C`.

        Args:
            dlogits_VC: Result of `_softmax_to_dlogits_`; overwritten if the hidden states are 16-bit numbers.
            x_CD: Hidden states of the chunk.
            factors_C: One factor per token.
            first: Whether this is the first chunk, whose gradient overwrites the uninitialised `weight`.

        Returns:
            The gradient of `x_CD`, or `None` if it is not requested.
        """
        if self.bias is not None:
            self.bias.addmv_(dlogits_VC, factors_C)
        if dlogits_VC.dtype != x_CD.dtype:
            return self._add_16_bit(dlogits_VC.mul_(factors_C).to(x_CD.dtype), x_CD, first=first)
        grad_CD = None if self.hidden is None else (dlogits_VC.T @ self.rows_VD).mul_(factors_C.unsqueeze(1))
        if self.weight is not None:
            x_CD = x_CD * factors_C.unsqueeze(1)
            self.weight[: len(dlogits_VC)].addmm_(dlogits_VC, x_CD, beta=0 if first else 1)
        return grad_CD

    def _add_16_bit(self, dlogits_VC: Tensor, x_CD: Tensor, *, first: bool) -> Tensor | None:
        """Do the work of `add` for 16-bit hidden states and rows; here `dlogits_VC` already contains the factors.

        Each matrix product is computed in 16 bits, for `ROWS_AT_ONCE` rows at a time, and added to the 32-bit `weight`.
        """
        if self.weight is not None:
            for start in range(0, len(dlogits_VC), ROWS_AT_ONCE):
                part = dlogits_VC[start : start + ROWS_AT_ONCE] @ x_CD
                block = self.weight[start : start + len(part)]
                if first:
                    block.copy_(part)
                else:
                    block.add_(part)
        return None if self.hidden is None else dlogits_VC.T @ self.rows_VD


def _all_chunks(inputs: LossInputs, factors_N: Tensor | None, chunked: ChunkedSettings) -> tuple[Tensor, Gradients]:
    """Compute the token losses, and the gradients of `sum(factors * losses)`, one chunk of tokens after another.

    Args:
        inputs: Hidden states `(N, D)` and targets `(N,)` without ignored targets, and the rows and bias of this rank.
        factors_N: Factor of each token's loss; `None` to compute no gradients.
        chunked: The options, the requested gradients, and the ranks.

    Returns:
        The losses of this rank's tokens, `(N,)`, and the gradients of hidden states, weight and bias.
    """
    hidden_ND, weight, bias, targets_N = inputs
    settings, requested, ranks = chunked.loss, chunked.requested, chunked.collectives
    dtype = loss_dtype(settings.compute)
    rows_VD = weight[: settings.vocab_size].to(settings.compute)
    hidden_ND = hidden_ND.to(settings.compute)
    hidden_ND = hidden_ND * settings.logit_scale if settings.logit_scale != 1 else hidden_ND
    if factors_N is None:
        requested = RequestedGradients(hidden=False, weight=False, bias=False)
    sizes = torch.tensor([[len(hidden_ND), requested.hidden]], device=ranks.device)
    counts, any_hidden = ranks.all_gather(sizes, [1] * ranks.size).T.tolist()
    requested = requested._replace(hidden=any(any_hidden))  # the gradients of other ranks' states need these rows too
    step = min(_chunk_size(counts, settings.vocab_size, rows_VD), math.ceil(max(*counts, 1) / chunked.min_chunks))
    sums = _GradientSums(
        rows_VD,
        torch.empty_like(hidden_ND, dtype=dtype) if requested.hidden else None,
        rows_VD.new_empty(weight.shape, dtype=dtype) if requested.weight else None,
        rows_VD.new_zeros(len(rows_VD), dtype=dtype) if requested.bias else None,
    )
    if sums.weight is not None:  # the first chunk overwrites the rows of tokens
        sums.weight[len(rows_VD) if max(counts) else 0 :] = 0
    losses_N = hidden_ND.new_empty(len(hidden_ND), dtype=dtype)
    buffer = rows_VD.new_empty(len(rows_VD) * step * len(counts), dtype=dtype)
    for start in range(0, max(counts), step):
        here, sizes_of_ranks = slice(start, start + step), [min(max(count - start, 0), step) for count in counts]
        x_CD = ranks.all_gather(hidden_ND[here], sizes_of_ranks)
        targets_C = ranks.all_gather(targets_N[here], sizes_of_ranks)
        scores_VC = buffer[: len(rows_VD) * len(x_CD)].view(len(rows_VD), -1)
        _multiply(rows_VD, x_CD.T, out=scores_VC)
        softcap_grad_VC = _finish_logits_(scores_VC, bias, settings, keep_grad=any(requested))
        losses_C, sums_C, lse_C = _softmax_(scores_VC, targets_C, chunked)
        losses_N[here] = losses_C.split(sizes_of_ranks)[ranks.rank]
        if factors_N is not None and any(requested):
            _softmax_to_dlogits_(scores_VC, sums_C, lse_C, targets_C, softcap_grad_VC, chunked)
            factors_C = ranks.all_gather(factors_N[here], sizes_of_ranks)
            grad_CD = sums.add(scores_VC, x_CD, factors_C / sums_C, first=start == 0)
            if sums.hidden is not None and grad_CD is not None:
                sums.hidden[here] = ranks.reduce_scatter(grad_CD, sizes_of_ranks)
            del grad_CD
        del x_CD  # so that the next chunk reuses its memory
    if sums.hidden is not None and settings.logit_scale != 1:
        sums.hidden.mul_(settings.logit_scale)
    return losses_N, (sums.hidden, sums.weight, sums.bias)


def _chunk_size(counts: list[int], vocab_size: int, rows_VD: Tensor) -> int:
    """Return how many tokens of each rank form a chunk; the number is the same on all ranks.

    Args:
        counts: Number of tokens of each rank.
        vocab_size: Number of tokens of the whole vocabulary, V.
        rows_VD: The rows of this rank.
    """
    most_rows, itemsize = math.ceil(vocab_size / len(counts)), loss_dtype(rows_VD.dtype).itemsize
    size = tokens_per_chunk(sum(counts), most_rows, rows_VD.shape[1], rows_VD.device.type, itemsize)
    return max(math.ceil(size / len(counts)), 1)


def _multiply(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """Write `a @ b` to `out`. The product has the dtype of `a`, and is converted to that of `out`."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


def _finish_logits_(
    scores_VC: Tensor, bias: Tensor | None, settings: LossSettings, *, keep_grad: bool
) -> Tensor | None:
    """Apply bias, soft cap and padding to raw logits in place, as `finish_logits` does; they are already scaled.

    Returns:
        The derivative of the soft cap at each logit, or `None` without a soft cap or without `keep_grad`.
    """
    softcap_grad_VC = None
    if bias is not None:
        scores_VC.add_(bias.unsqueeze(1))
    if settings.softcap is not None:
        scores_VC.div_(settings.softcap).tanh_()
        softcap_grad_VC = scores_VC.square().neg_().add_(1) if keep_grad else None
        scores_VC.mul_(settings.softcap)
    if settings.padding_idx is not None:
        scores_VC[settings.padding_idx] = -math.inf if settings.mask_padding else 0
    return softcap_grad_VC


def _softmax_(scores_VC: Tensor, targets_C: Tensor, chunked: ChunkedSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Replace logits by `exp(logit - maximum)` in place, and compute the loss of each token of the chunk.

    Args:
        scores_VC: Logits of this rank's rows for the tokens of all ranks.
        targets_C: Target token IDs of the whole vocabulary.
        chunked: The options and the ranks.

    Returns:
        Three numbers per token, over the rows of all ranks: loss, sum of the exponentials, and logsumexp.
    """
    settings, ranks = chunked.loss, chunked.collectives
    highest_C = ranks.all_reduce(scores_VC.amax(0), "max")
    scores_VC.sub_(highest_C)
    local_C, is_local_C = chunked.partition.local(targets_C)
    parts = [torch.where(is_local_C, scores_VC.gather(0, local_C.unsqueeze(0)).squeeze(0), 0)]
    parts += [scores_VC.sum(0)] if settings.label_smoothing else []
    totals = ranks.all_reduce(torch.stack([scores_VC.exp_().sum(0), *parts]))
    sums_C, target_logits_C, *logit_sums = totals
    losses_C = -(1 - settings.label_smoothing) * target_logits_C
    if settings.label_smoothing:
        losses_C.sub_(logit_sums[0], alpha=settings.label_smoothing / settings.vocab_size)
    logs_C = sums_C.log()
    lse_C = highest_C + logs_C
    return losses_C + logs_C + (settings.z_loss * lse_C.square() if settings.z_loss else 0), sums_C, lse_C


def _softmax_to_dlogits_(
    scores_VC: Tensor,
    sums_C: Tensor,
    lse_C: Tensor,
    targets_C: Tensor,
    softcap_grad_VC: Tensor | None,
    chunked: ChunkedSettings,
) -> None:
    """Replace the exponentials of `_softmax_` in place by gradients of the token losses by the raw logits.

    The written gradients still have to be divided by `sums_C`.

    Args:
        scores_VC: Exponentials that `_softmax_` wrote; overwritten.
        sums_C: Sum of the exponentials of each token, over all ranks.
        lse_C: Logsumexp of each token.
        targets_C: Target token IDs of the whole vocabulary.
        softcap_grad_VC: Derivative of the soft cap, or `None`.
        chunked: The options, and which rows this rank stores.
    """
    settings = chunked.loss
    if settings.z_loss:
        scores_VC.mul_(1 + 2 * settings.z_loss * lse_C)
    if settings.label_smoothing:
        scores_VC.sub_(sums_C * (settings.label_smoothing / settings.vocab_size))
    local_C, is_local_C = chunked.partition.local(targets_C)
    local_1C = local_C.unsqueeze(0)
    target_part_C = (1 - settings.label_smoothing) * sums_C * is_local_C
    scores_VC.scatter_(0, local_1C, scores_VC.gather(0, local_1C) - target_part_C)
    if softcap_grad_VC is not None:
        scores_VC.mul_(softcap_grad_VC)
    if settings.padding_idx is not None:
        scores_VC[settings.padding_idx] = 0


def _scatter_kept(values: Tensor, kept: Tensor, tokens: int) -> Tensor:
    """Return a tensor with one entry per token: `values` at the indices `kept`, and 0 at all others."""
    return values.new_zeros(tokens, *values.shape[1:]).index_copy_(0, kept, values)


def _scaled(gradients: Gradients, grad_output: Tensor | None, inputs: LossInputs) -> Gradients:
    """Multiply each gradient by the scalar `grad_output` in place, and convert it to the dtype of its input.

    `None` among the gradients stays `None`; `None` as `grad_output` means 1.
    """
    if grad_output is not None and grad_output.device.type == "cpu" and grad_output.item() == 1:
        grad_output = None
    return tuple(  # type: ignore[return-value]
        None
        if grad is None or like is None
        else (grad if grad_output is None else grad.mul_(grad_output)).to(like.dtype)
        for grad, like in zip(gradients, inputs[:3], strict=True)
    )


class _Chunked(torch.autograd.Function):
    """Autograd function of the chunked loss, whose `forward` computes the gradients too.

    `backward` multiplies them in place by `grad_output`; a second `backward` of the same graph computes them again.
    `backward` also computes them with `reduction="none"`, and where the ranks have different `grad_output`.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunked: ChunkedSettings
    ) -> Tensor:
        result, gradients = loss_and_gradients(LossInputs(hidden, weight, bias, targets), None, chunked)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.chunked = chunked
        ctx.gradients = None if chunked.loss.reduction == "none" else gradients
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        inputs, chunked = LossInputs(*ctx.saved_tensors), ctx.chunked
        if torch.is_grad_enabled() or is_transformed(grad_output):  # create_graph=True, or batched gradients
            gradients = _differentiable(inputs, grad_output, chunked)
        elif ctx.gradients is None or not chunked.collectives.all_equal(grad_output):
            _, again = loss_and_gradients(inputs, grad_output, chunked)
            gradients = _scaled(again, None, inputs)
        else:
            gradients = _scaled(ctx.gradients, grad_output, inputs)
            ctx.gradients = None
        return (*gradients, None, None)


def _differentiable(inputs: LossInputs, grad_output: Tensor, chunked: ChunkedSettings) -> Gradients:
    """Compute gradients by the plain definition, so that they can be differentiated again (`create_graph=True`).

    It is also used for batched gradients (`is_grads_batched=True`), as the chunks cannot take a batch of `grad_output`.

    Raises:
        SizeError: The rows are sharded.
    """
    if chunked.collectives is not SINGLE_PROCESS:
        raise SizeError("The loss of a sharded table has no second derivatives: leave out create_graph=True.")
    (hidden, weight, bias, targets), settings, requested = inputs, chunked.loss, chunked.requested
    options = {name: value for name, value in settings._asdict().items() if name not in ("vocab_size", "compute")}
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        raw_logits = F.linear(hidden.to(settings.compute), weight[: settings.vocab_size].to(settings.compute))
        result = cross_entropy(raw_logits, targets, bias=bias, **options)
    wanted = [part for part, need in zip((hidden, weight, bias), requested, strict=True) if part is not None and need]
    found = iter(torch.autograd.grad(result, wanted, grad_output, create_graph=create_graph))
    return tuple(next(found) if need else None for need in requested)  # type: ignore[return-value]


@torch.library.custom_op(
    "embedlayer::chunked_cross_entropy",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? grad_output, SymInt vocab_size, "
    "float logit_scale, float? softcap, SymInt? padding_idx, bool mask_padding, SymInt ignore_index, "
    "float label_smoothing, float z_loss, str reduction, ScalarType compute, bool hidden_requested, "
    "bool weight_requested, bool bias_requested) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _operator(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, grad_output: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """Compute `loss_and_gradients` in a single process, as one custom operator that compiled graphs can contain.

    Args:
        hidden: Hidden states, `(..., D)`.
        weight: Rows of the head, `(V, D)`.
        bias: Bias of the rows, or `None`.
        targets: Target token IDs, `(...)`.
        grad_output: Gradient of the final scalar with respect to the loss; `None` for 1.
        rest: The fields of `LossSettings`, then those of `RequestedGradients`, in the order of the operator's schema.

    Returns:
        The loss, and the gradients of `hidden`, `weight` and `bias`. A gradient that is not requested is an empty
        tensor.
    """
    settings, requested = _unpacked(rest)
    chunked = ChunkedSettings(settings, requested, SINGLE_PROCESS, RowPartition(settings.vocab_size))
    result, gradients = loss_and_gradients(LossInputs(hidden, weight, bias, targets), grad_output, chunked)
    return (result, *(result.new_empty(0) if gradient is None else gradient for gradient in gradients))


def _unpacked(rest: tuple[Any, ...]) -> tuple[LossSettings, RequestedGradients]:
    """Rebuild the settings and the requested gradients from the flat arguments `rest` of `_operator`."""
    count = len(LossSettings._fields)
    return LossSettings(*rest[:count]), RequestedGradients(*rest[count:])


@_operator.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, grad_output: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    settings, requested = _unpacked(rest)
    dtype, per_token = loss_dtype(settings.compute), settings.reduction == "none"
    is_computed = grad_output is not None or not per_token
    bias_like = weight.new_empty(settings.vocab_size)
    gradients = (
        hidden.new_empty(like.shape if need and is_computed else (0,), dtype=dtype)
        for like, need in zip((hidden, weight, bias_like), requested, strict=True)
    )
    return (hidden.new_empty(targets.shape if per_token else (), dtype=dtype), *gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save in `ctx` what `_backward` needs: the inputs of `_operator`, and the gradients among its outputs."""
    hidden, weight, bias, targets, _, *rest = inputs
    ctx.set_materialize_grads(False)
    ctx.rest = rest
    ctx.save_for_backward(hidden, weight, bias, targets, *output[1:])


def _backward(ctx: Any, grad_output: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of the arguments of `_operator`; `None` for those that are no differentiable tensor.

    The gradients that `_operator` returned are multiplied by `grad_output`. With `reduction="none"` they are computed
    now.
    """
    hidden, weight, bias, targets, *gradients = ctx.saved_tensors
    settings, requested = _unpacked(ctx.rest)
    if settings.reduction == "none":
        gradients = _operator(hidden, weight, bias, targets, grad_output, *ctx.rest)[1:]
    else:
        gradients = [part * grad_output for part in gradients]
    converted = (
        part.to(like.dtype) if need and like is not None else None
        for part, like, need in zip(gradients, (hidden, weight, bias), requested, strict=True)
    )
    return (*converted, *(None for _ in range(2 + len(ctx.rest))))


_operator.register_autograd(_backward, setup_context=_save)
