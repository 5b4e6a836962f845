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
    """Say of which inputs of the loss the gradients are computed."""

    hidden: bool
    weight: bool
    bias: bool


class LossInputs(NamedTuple):
    """The tensors of a loss: hidden states, rows, their bias, and targets."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor


class ChunkedSettings(NamedTuple):
    """The options of a chunked loss, the requested gradients, and which rows this process and the other ranks store."""

    loss: LossSettings
    requested: RequestedGradients
    collectives: Collectives
    partition: RowPartition


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    settings: LossSettings,
    collectives: Collectives = SINGLE_PROCESS,
    partition: RowPartition | None = None,
) -> Tensor:
    """Compute the loss over chunks of tokens, differentiable in `hidden`, `weight` and `bias`.

    With several ranks each passes its own hidden states, targets and rows. Of a chunk of tokens each rank gathers the
    hidden states of all ranks and computes the logits of its own rows. Three numbers per token are reduced over the
    ranks: the maximum, the sum of exponentials and the target logit; with `label_smoothing` also the sum of logits.
    All ranks must call this function, and `backward` through it.

    Args:
        hidden: Hidden states of this process, `(..., D)`.
        weight: The rows that this process stores, `(rows, D)`.
        bias: Their bias `(rows,)`, or `None`.
        targets: Token IDs of the whole vocabulary, `(...)`, or `ignore_index`.
        settings: The options; `padding_idx` is a row number of this process.
        collectives: The ranks over which the rows are sharded.
        partition: The rows of this rank; `None` for all rows.

    Returns:
        The loss of this process's tokens in nats: a scalar, or `(...)` with `reduction="none"`.

    Raises:
        TokenIdError: A target is neither a token nor `ignore_index`.
        SizeError: A `torch.func` transform is active, or gradients of gradients of a sharded table are requested.
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
    chunked = ChunkedSettings(settings, requested, collectives, partition)
    return _Chunked.apply(hidden, weight, bias, targets, chunked)  # type: ignore[no-any-return, no-untyped-call]


def loss_and_gradients(
    inputs: LossInputs, grad_output: Tensor | None, chunked: ChunkedSettings
) -> tuple[Tensor, Gradients]:
    """Return the loss, and its gradients times `grad_output` (1 if `None`), in float32 or float64.

    With `reduction="none"` and without `grad_output` no gradients are computed, and they are `None`.
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
    """Sums of the gradients over chunks; `None` where no gradient is requested."""

    rows_VD: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def add(self, dlogits_VC: Tensor, x_CD: Tensor, factors_C: Tensor, *, first: bool) -> Tensor | None:
        """Add the gradients of a chunk to the sums of weight and bias, and return the gradient of `x_CD`.

        The gradient of the loss by a logit is `factors * dlogits`. Hidden gradients are returned, not summed:
        `None` if they are not requested. `first` marks the first chunk, which overwrites the weight's sum.
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
        """Add products of 16-bit numbers in 32 bits, a block of rows at a time."""
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
    """Return the losses of tokens without ignored targets, and the gradients of `sum(factors * losses)`."""
    hidden_ND, weight, bias, targets_N = inputs
    settings, requested, ranks, _ = chunked
    dtype = loss_dtype(settings.compute)
    rows_VD = weight[: settings.vocab_size].to(settings.compute)
    hidden_ND = hidden_ND.to(settings.compute)
    hidden_ND = hidden_ND * settings.logit_scale if settings.logit_scale != 1 else hidden_ND
    if factors_N is None:
        requested = RequestedGradients(hidden=False, weight=False, bias=False)
    sizes = torch.tensor([[len(hidden_ND), requested.hidden]], device=ranks.device)
    counts, any_hidden = ranks.all_gather(sizes, [1] * ranks.size).T.tolist()
    requested = requested._replace(hidden=any(any_hidden))  # the gradients of other ranks' states need these rows too
    step = _chunk_size(counts, settings.vocab_size, rows_VD)
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
    """Return the number of tokens per rank and chunk, which is the same on all ranks."""
    most_rows, itemsize = math.ceil(vocab_size / len(counts)), loss_dtype(rows_VD.dtype).itemsize
    size = tokens_per_chunk(sum(counts), most_rows, rows_VD.shape[1], rows_VD.device.type, itemsize)
    return max(math.ceil(size / len(counts)), 1)


def _multiply(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """Write `a @ b` to `out`, converted to its dtype."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


def _finish_logits_(
    scores_VC: Tensor, bias: Tensor | None, settings: LossSettings, *, keep_grad: bool
) -> Tensor | None:
    """Apply `finish_logits` in place, but for its scale; return the derivative of the soft cap, or `None`."""
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
    """Replace logits by softmax times its denominator, in place; return losses, denominators and logsumexp."""
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
    """Replace the result of `_softmax_` by the gradients of the losses by the raw logits times `sums_C`, in place."""
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
    """Return zeros for all tokens, with `values` at the tokens that are kept."""
    return values.new_zeros(tokens, *values.shape[1:]).index_copy_(0, kept, values)


def _scaled(gradients: Gradients, grad_output: Tensor | None, inputs: LossInputs) -> Gradients:
    """Multiply gradients by `grad_output` in place, and convert each to the dtype of its input."""
    if grad_output is not None and grad_output.device.type == "cpu" and grad_output.item() == 1:
        grad_output = None
    return tuple(  # type: ignore[return-value]
        None
        if grad is None or like is None
        else (grad if grad_output is None else grad.mul_(grad_output)).to(like.dtype)
        for grad, like in zip(gradients, inputs[:3], strict=True)
    )


class _Chunked(torch.autograd.Function):
    """Compute the chunked loss, and its gradients already in `forward`; a second backward pass computes them again.

    With `reduction="none"` the gradients wait for `backward`, because they depend on `grad_output`.
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
    """Compute gradients by the plain definition, so that they are differentiable themselves (`create_graph=True`).

    It also computes batched gradients (`is_grads_batched=True`), since the chunks cannot take a batch of `grad_output`.

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
    """Compute `loss_and_gradients` as one operator, for compiled graphs of a single process.

    Args:
        hidden: Hidden states.
        weight: Rows of the head.
        bias: Bias of the rows, or `None`.
        targets: Target IDs.
        grad_output: Gradient of the loss; 1 if `None`.
        rest: The settings and requested gradients as flat values, in the order of the operator's schema.

    Returns:
        The loss, and the gradients of `hidden`, `weight` and `bias`. One that is not requested is an empty
        tensor.
    """
    settings, requested = _unpacked(rest)
    chunked = ChunkedSettings(settings, requested, SINGLE_PROCESS, RowPartition(settings.vocab_size))
    result, gradients = loss_and_gradients(LossInputs(hidden, weight, bias, targets), grad_output, chunked)
    return (result, *(result.new_empty(0) if gradient is None else gradient for gradient in gradients))


def _unpacked(rest: tuple[Any, ...]) -> tuple[LossSettings, RequestedGradients]:
    """Rebuild the settings from the flat arguments of the operator."""
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
    """Keep inputs and gradients for `_backward`."""
    hidden, weight, bias, targets, _, *rest = inputs
    ctx.set_materialize_grads(False)
    ctx.rest = rest
    ctx.save_for_backward(hidden, weight, bias, targets, *output[1:])


def _backward(ctx: Any, grad_output: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    """Scale the gradients that `_operator` returned in the forward pass; with `reduction="none"`, compute them now."""
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
