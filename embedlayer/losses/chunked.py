"""`linear_cross_entropy` a few hundred tokens at a time, with the gradients made on the way forward.

All logits at once are `tokens x V` numbers, and their gradient as many again. But a token's loss and gradients need its
own logits only, so one chunk of tokens after another goes through one small buffer: products, softmax, loss, and, while
the softmax is still there, its two products with `weight` and `hidden`, which are the gradients up to a factor. The
backward pass then only multiplies by that factor.

The buffer holds `(V, tokens)`, vocabulary first: so `weight @ hidden.T` is 1.4x faster on a CPU than
`hidden @ weight.T`, and a padding row is one run of memory.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedlayer.errors import SizeError
from embedlayer.index_checks import raise_if_outside
from embedlayer.losses.chunk_length import chunk_length
from embedlayer.losses.held_rows import AllRows, HeldRows
from embedlayer.tracing import is_transformed, transforms_active

ROWS_AT_ONCE = 8192

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

ALL_ROWS = AllRows()


class Needs(NamedTuple):
    """Which gradients are made."""

    hidden: bool
    weight: bool
    bias: bool


class Terms(NamedTuple):
    """The options of `LossOptions`, filled in, and the type in which the three products are taken."""

    vocab_size: int
    logit_scale: float
    softcap: float | None
    padding_idx: int | None
    mask_padding: bool
    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: str
    compute: torch.dtype


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    terms: Terms,
    held: HeldRows = ALL_ROWS,
) -> Tensor:
    """The loss: differentiable in `hidden`, `weight` and `bias`.

    Args:
        hidden: Of this process.
        weight: The rows that are here.
        bias: Theirs.
        targets: Token IDs of the whole vocabulary.
        terms: The options; `padding_idx` counts from the first row that is here.
        held: Which rows are here. Where others have the rest, they all must call this, and call backward.
    """
    if transforms_active():
        raise SizeError(
            "The loss of a sharded table is computed by all ranks together and cannot be transformed by torch.func: "
            "differentiate it with backward() or torch.autograd.grad."
        )
    inputs = (hidden, weight, bias)
    needs = Needs(*(torch.is_grad_enabled() and part is not None and part.requires_grad for part in inputs))
    if torch.compiler.is_compiling() and held is ALL_ROWS:
        result: Tensor = _operator(hidden, weight, bias, targets, None, *terms, *needs)[0]
    else:
        result = _Chunked.apply(hidden, weight, bias, targets, terms, needs, held)  # type: ignore[no-untyped-call]
    return result


def loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    upstream: Tensor | None,
    terms: Terms,
    needs: Needs,
    held: HeldRows = ALL_ROWS,
) -> tuple[Tensor, Gradients]:
    """The loss, and its gradients times `upstream` (1 if `None`), in float32 or float64.

    With `reduction="none"` and no upstream there is nothing to make gradients of, and they are `None`.
    """
    raise_if_outside(targets, terms.vocab_size, "token id", ignore=terms.ignore_index)
    targets_N = targets.reshape(-1).long()
    hidden_ND = hidden.reshape(-1, hidden.shape[-1])
    kept = targets_N != terms.ignore_index
    places = None if bool(kept.all()) else kept.nonzero().squeeze(1)
    if places is not None:
        targets_N, hidden_ND = targets_N[places], hidden_ND.index_select(0, places)
    each = terms.reduction == "none"
    factor = 1 / max(targets_N.numel(), 1) if terms.reduction == "mean" else 1.0
    if upstream is None:
        factors_N = None if each else torch.full_like(targets_N, factor, dtype=accumulated(terms.compute))
    else:
        upstream_N = upstream.reshape(-1) if each else upstream.expand(kept.shape)
        factors_N = factor * (upstream_N if places is None else upstream_N[places]).to(accumulated(terms.compute))
    with torch.autocast(hidden.device.type, enabled=False):
        losses_N, (grad_ND, *others) = _sweep(hidden_ND, weight, bias, targets_N, factors_N, terms, needs, held)
    if places is not None:
        losses_N = _spread(losses_N, places, kept.numel()) if each else losses_N
        grad_ND = None if grad_ND is None else _spread(grad_ND, places, kept.numel())
    result = losses_N.view(targets.shape) if each else losses_N.sum() * factor
    return result, (None if grad_ND is None else grad_ND.view(hidden.shape), others[0], others[1])


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The type in which losses and gradients are summed: float64 for itself, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class _Sums:
    """Where the gradients of the chunks come together."""

    rows_VD: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @staticmethod
    def zeros(hidden_ND: Tensor, rows_VD: Tensor, spare: int, needs: Needs, *, chunks: int) -> "_Sums":
        (tokens, width), vocab_size, kind = hidden_ND.shape, len(rows_VD), accumulated(rows_VD.dtype)
        hidden = hidden_ND.new_empty(tokens, width, dtype=kind) if needs.hidden else None
        weight = rows_VD.new_empty(vocab_size + spare, width, dtype=kind) if needs.weight else None
        if weight is not None:  # the first chunk overwrites the others
            weight[vocab_size if chunks else 0 :] = 0
        return _Sums(rows_VD, hidden, weight, rows_VD.new_zeros(vocab_size, dtype=kind) if needs.bias else None)

    def add(self, slopes_VC: Tensor, x_CD: Tensor, factors_C: Tensor, *, first: bool) -> Tensor | None:
        """Add the gradients of a chunk, whose logits have the gradients `factors * slopes`; returns that of `x_CD`."""
        if self.bias is not None:
            self.bias.addmv_(slopes_VC, factors_C)
        if slopes_VC.dtype != x_CD.dtype:
            return self._add_narrow(slopes_VC.mul_(factors_C).to(x_CD.dtype), x_CD, first=first)
        grad_CD = None if self.hidden is None else (slopes_VC.T @ self.rows_VD).mul_(factors_C.unsqueeze(1))
        if self.weight is not None:
            x_CD = x_CD * factors_C.unsqueeze(1)
            self.weight[: len(slopes_VC)].addmm_(slopes_VC, x_CD, beta=0 if first else 1)
        return grad_CD

    def _add_narrow(self, slopes_VC: Tensor, x_CD: Tensor, *, first: bool) -> Tensor | None:
        """Products of 16-bit numbers, added up in 32 bits a block of rows at a time."""
        if self.weight is not None:
            for start in range(0, len(slopes_VC), ROWS_AT_ONCE):
                part = slopes_VC[start : start + ROWS_AT_ONCE] @ x_CD
                block = self.weight[start : start + len(part)]
                if first:
                    block.copy_(part)
                else:
                    block.add_(part)
        return None if self.hidden is None else slopes_VC.T @ self.rows_VD


def _sweep(
    hidden_ND: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets_N: Tensor,
    factors_N: Tensor | None,
    terms: Terms,
    needs: Needs,
    held: HeldRows,
) -> tuple[Tensor, Gradients]:
    """Losses of tokens that all count, and the gradients of `sum(factors * losses)`."""
    rows_VD = weight[: terms.vocab_size].to(terms.compute)
    hidden_ND = hidden_ND.to(terms.compute)
    hidden_ND = hidden_ND * terms.logit_scale if terms.logit_scale != 1 else hidden_ND
    if factors_N is None:
        needs = Needs(hidden=False, weight=False, bias=False)
    counts, wanted = held.counts(len(hidden_ND), needs.hidden)
    needs = needs._replace(hidden=wanted)  # the others' come from here too
    length = _chunk_length(counts, terms.vocab_size, rows_VD)
    sums = _Sums.zeros(hidden_ND, rows_VD, len(weight) - len(rows_VD), needs, chunks=max(counts))
    losses_N = hidden_ND.new_empty(len(hidden_ND), dtype=accumulated(terms.compute))
    buffer = rows_VD.new_empty(len(rows_VD) * length * len(counts), dtype=losses_N.dtype)
    for start in range(0, max(counts), length):
        here, sizes = slice(start, start + length), [min(max(count - start, 0), length) for count in counts]
        x_CD, targets_C = held.gather(hidden_ND[here], sizes), held.gather(targets_N[here], sizes)
        scores_VC = buffer[: len(rows_VD) * len(x_CD)].view(len(rows_VD), -1)
        _multiply(rows_VD, x_CD.T, out=scores_VC)
        slope_VC = _finish(scores_VC, bias, terms, keep_slope=any(needs))
        losses_C, sums_C, levels_C = _softmax(scores_VC, targets_C, terms, held)
        losses_N[here] = held.own(losses_C, sizes)
        if factors_N is not None and any(needs):
            _slopes(scores_VC, sums_C, levels_C, targets_C, slope_VC, terms, held)
            factors_C = held.gather(factors_N[here], sizes)
            grad_CD = sums.add(scores_VC, x_CD, factors_C / sums_C, first=start == 0)
            if sums.hidden is not None and grad_CD is not None:
                sums.hidden[here] = held.home(grad_CD, sizes)
            del grad_CD
        del x_CD  # the next chunk's come to the same place
    if sums.hidden is not None and terms.logit_scale != 1:
        sums.hidden.mul_(terms.logit_scale)
    return losses_N, (sums.hidden, sums.weight, sums.bias)


def _chunk_length(counts: list[int], vocab_size: int, rows_VD: Tensor) -> int:
    """Tokens of each process in a chunk: the same number on all, also where the last has fewer rows."""
    most_rows, kind = math.ceil(vocab_size / len(counts)), accumulated(rows_VD.dtype)
    length = chunk_length(sum(counts), most_rows, rows_VD.shape[1], rows_VD.device.type, kind.itemsize)
    return max(math.ceil(length / len(counts)), 1)


def _multiply(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


def _finish(scores_VC: Tensor, bias: Tensor | None, terms: Terms, *, keep_slope: bool) -> Tensor | None:
    """`finish_logits` in place, after its scale; the derivative of the soft cap where that is asked for."""
    slope_VC = None
    if bias is not None:
        scores_VC.add_(bias.unsqueeze(1))
    if terms.softcap is not None:
        scores_VC.div_(terms.softcap).tanh_()
        slope_VC = scores_VC.square().neg_().add_(1) if keep_slope else None
        scores_VC.mul_(terms.softcap)
    if terms.padding_idx is not None:
        scores_VC[terms.padding_idx] = -math.inf if terms.mask_padding else 0
    return slope_VC


def _softmax(scores_VC: Tensor, targets_C: Tensor, terms: Terms, held: HeldRows) -> tuple[Tensor, Tensor, Tensor]:
    """Scores to softmax in place, but for its division by the second result; losses, sums, and logsumexp."""
    highest_C = held.highest(scores_VC.amax(0))
    scores_VC.sub_(highest_C)
    places_C, here_C = held.places(targets_C)
    parts = [torch.where(here_C.bool(), scores_VC.gather(0, places_C.unsqueeze(0)).squeeze(0), 0)]
    parts += [scores_VC.sum(0)] if terms.label_smoothing else []
    sums_C, picked_C, *lows_C = held.total(scores_VC.exp_().sum(0), *parts)
    losses_C = -(1 - terms.label_smoothing) * picked_C
    if terms.label_smoothing:
        losses_C.sub_(lows_C[0], alpha=terms.label_smoothing / terms.vocab_size)
    logs_C = sums_C.log()
    levels_C = highest_C + logs_C
    return losses_C + logs_C + (terms.z_loss * levels_C.square() if terms.z_loss else 0), sums_C, levels_C


def _slopes(
    scores_VC: Tensor,
    sums_C: Tensor,
    levels_C: Tensor,
    targets_C: Tensor,
    slope_VC: Tensor | None,
    terms: Terms,
    held: HeldRows,
) -> None:
    """What `_softmax` left to the losses' gradients by the products, in place, but for the division by `sums`."""
    if terms.z_loss:
        scores_VC.mul_(1 + 2 * terms.z_loss * levels_C)
    if terms.label_smoothing:
        scores_VC.sub_(sums_C * (terms.label_smoothing / terms.vocab_size))
    places_C, here_C = held.places(targets_C)
    places_1C = places_C.unsqueeze(0)
    scores_VC.scatter_(0, places_1C, scores_VC.gather(0, places_1C) - (1 - terms.label_smoothing) * sums_C * here_C)
    if slope_VC is not None:
        scores_VC.mul_(slope_VC)
    if terms.padding_idx is not None:
        scores_VC[terms.padding_idx] = 0


def _spread(kept: Tensor, places: Tensor, length: int) -> Tensor:
    """Put the rows of the targets that count back in their places; zeros at the others."""
    return kept.new_zeros(length, *kept.shape[1:]).index_copy_(0, places, kept)


def _scaled(gradients: Gradients, upstream: Tensor | None, likes: tuple[Tensor | None, ...]) -> Gradients:
    """Gradients times `upstream`, in place, each in the type of what it is a gradient of."""
    if upstream is not None and upstream.device.type == "cpu" and upstream.item() == 1:
        upstream = None
    return tuple(  # type: ignore[return-value]
        None if part is None or like is None else (part if upstream is None else part.mul_(upstream)).to(like.dtype)
        for part, like in zip(gradients, likes, strict=True)
    )


class _Chunked(torch.autograd.Function):
    """Gradients are made in the forward pass and handed out once; whoever asks again has them made again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        terms: Terms,
        needs: Needs,
        held: HeldRows,
    ) -> Tensor:
        result, ready = loss_and_gradients(hidden, weight, bias, targets, None, terms, needs, held)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.terms, ctx.needs, ctx.held = terms, needs, held
        ctx.ready = None if terms.reduction == "none" else ready
        return result

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        if torch.is_grad_enabled() or is_transformed(upstream):  # create_graph=True, or batched gradients
            gradients = _differentiable(hidden, weight, bias, targets, upstream, ctx.terms, ctx.needs, ctx.held)
        elif ctx.ready is None or not ctx.held.same(upstream):
            _, made = loss_and_gradients(hidden, weight, bias, targets, upstream, ctx.terms, ctx.needs, ctx.held)
            gradients = _scaled(made, None, (hidden, weight, bias))
        else:
            gradients = _scaled(ctx.ready, upstream, (hidden, weight, bias))
            ctx.ready = None
        return (*gradients, None, None, None, None)


def _differentiable(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    upstream: Tensor,
    terms: Terms,
    needs: Needs,
    held: HeldRows,
) -> Gradients:
    """The gradients as functions that have gradients themselves (`create_graph=True`), from the plain definition.

    Also those of batched gradients (`is_grads_batched=True`), where `upstream` is a batch that the chunks cannot take.
    """
    from embedlayer.losses.linear_cross_entropy import linear_cross_entropy

    if held is not ALL_ROWS:
        raise SizeError("The loss of a divided table has gradients, and these have none: leave out create_graph=True.")
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        result = linear_cross_entropy(
            hidden.to(terms.compute),
            weight.to(terms.compute),
            targets,
            bias=bias,
            impl="plain",
            vocab_size=terms.vocab_size,
            logit_scale=terms.logit_scale,
            softcap=terms.softcap,
            padding_idx=terms.padding_idx,
            mask_padding=terms.mask_padding,
            ignore_index=terms.ignore_index,
            label_smoothing=terms.label_smoothing,
            z_loss=terms.z_loss,
            reduction=terms.reduction,  # type: ignore[arg-type]
        )
    wanted = [part for part, need in zip((hidden, weight, bias), needs, strict=True) if part is not None and need]
    made = iter(torch.autograd.grad(result, wanted, upstream, create_graph=create_graph))
    return tuple(next(made) if need else None for need in needs)  # type: ignore[return-value]


@torch.library.custom_op("embedlayer::chunked_cross_entropy", mutates_args=())
def _operator(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    upstream: Tensor | None,
    vocab_size: int,
    logit_scale: float,
    softcap: float | None,
    padding_idx: int | None,
    mask_padding: bool,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    compute: torch.dtype,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`loss_and_gradients` for compiled graphs; what is not needed is an empty tensor."""
    terms = Terms(
        vocab_size,
        logit_scale,
        softcap,
        padding_idx,
        mask_padding,
        ignore_index,
        label_smoothing,
        z_loss,
        reduction,
        compute,
    )
    needs = Needs(needs_hidden, needs_weight, needs_bias)
    result, gradients = loss_and_gradients(hidden, weight, bias, targets, upstream, terms, needs)
    made = (result.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return (result, *made)  # type: ignore[return-value]


@_operator.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, upstream: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    terms, needs = Terms(*rest[: len(Terms._fields)]), Needs(*rest[len(Terms._fields) :])
    kind = accumulated(terms.compute)
    each = terms.reduction == "none"
    made = upstream is not None or not each
    bias_like = weight.new_empty(terms.vocab_size)
    gradients = (
        hidden.new_empty(like.shape if need and made else (0,), dtype=kind)
        for like, need in zip((hidden, weight, bias_like), needs, strict=True)
    )
    return (hidden.new_empty(targets.shape if each else (), dtype=kind), *gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, targets, _, *rest = inputs
    ctx.set_materialize_grads(False)
    ctx.rest = rest
    ctx.save_for_backward(hidden, weight, bias, targets, *output[1:])


def _backward(ctx: Any, upstream: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    hidden, weight, bias, targets, *ready = ctx.saved_tensors
    terms, needs = Terms(*ctx.rest[: len(Terms._fields)]), Needs(*ctx.rest[len(Terms._fields) :])
    if terms.reduction == "none":
        ready = _operator(hidden, weight, bias, targets, upstream, *terms, *needs)[1:]
    else:
        ready = [part * upstream for part in ready]
    gradients = (
        part.to(like.dtype) if need and like is not None else None
        for part, like, need in zip(ready, (hidden, weight, bias), needs, strict=True)
    )
    return (*gradients, *(None for _ in range(2 + len(ctx.rest))))


_operator.register_autograd(_backward, setup_context=_save)
