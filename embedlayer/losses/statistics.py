"""Log-probabilities, entropies and other statistics of the logits of a head, and the cross entropy, from one pass."""

from dataclasses import astuple, dataclass
from functools import partial
from typing import Literal, NamedTuple, Unpack, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.errors import SizeError
from embedlayer.core.option_docs import show_options
from embedlayer.core.shapes import wide_dtype
from embedlayer.kernels.cpu.softmax import NO_ID
from embedlayer.kernels.largest import update_largest
from embedlayer.kernels.softmax import (
    PART,
    BlockStatistics,
    Requests,
    concatenated,
    cross_entropy_of_totals,
    gradient_on_cpu,
    softmax_factors,
    softmax_gradient,
    softmax_statistics,
    statistics_on_cpu,
)
from embedlayer.losses.differentiable_totals import compute_totals
from embedlayer.losses.largest import GROUP, LEAST_GROUPED, check_top_k, ordered_top_k, top_k
from embedlayer.losses.logit_arguments import DEFAULTS, HasLogits, Logits, resolve_logits, tokens_and_weight
from embedlayer.losses.next_bytes import NextBytes, check_next_bytes
from embedlayer.losses.objective import (
    BlockGradient,
    BlockTerms,
    LogitBlock,
    Objective,
    Request,
    TokenLoss,
    Totals,
    event_log_probs,
    finite_top,
    log_probs,
    logsumexp,
    merge_softmax,
    only_part,
    softmax_,
    softmax_totals,
    stacked,
)
from embedlayer.losses.options import LogitOptions, LossSettings, ScoreOptions, check_options
from embedlayer.losses.targets import CheckedIds, Counted, counted_targets
from embedlayer.losses.uncomputed_logits import UncomputedLogits, check_ids, is_plain

Statistic = Literal["log_probs", "entropy", "logsumexp", "sum_squared_probs", "mean_logits", "is_argmax"]
"""Name of a field of `TokenStatistics`."""

SORTED = 8  # numbers of 4 bytes that a sort needs for each logit


class TokenStatistics(NamedTuple):
    """Hold statistics of the logits z of each position, with p = softmax(z); `None` for those that were not requested.

    All but `is_argmax` and `top_ids` are differentiable. Where the token is ignored all are 0, `False`, or for
    `top_ids` -1.

    Attributes:
        log_probs: `log p[token]` in nats, `(...)`.
        entropy: `-sum of p log p` in nats, `(...)`.
        logsumexp: `log sum of exp(z)`, `(...)`.
        sum_squared_probs: `sum of p²`, `(...)`: the probability that two samples are the same token.
        is_argmax: Whether the token has the largest logit; of equal logits the lowest ID counts, `(...)`.
        top_logits: The K largest logits, largest first, `(..., K)`.
        top_ids: Their token IDs; of equal logits the lowest ID comes first, `(..., K)`.
        next_bytes: Log-probability of each event that `NextBytes` describes: each next byte, special tokens, in nats,
            `(..., E)`.
        mean_logits: Mean of z over the vocabulary, `(...)`; -inf if the logit of any token is, as with `mask_padding`.
    """

    log_probs: Float[Tensor, "*batch"] | None = None
    entropy: Float[Tensor, "*batch"] | None = None
    logsumexp: Float[Tensor, "*batch"] | None = None
    sum_squared_probs: Float[Tensor, "*batch"] | None = None
    is_argmax: Bool[Tensor, "*batch"] | None = None
    top_logits: Float[Tensor, "*batch K"] | None = None
    top_ids: Int[Tensor, "*batch K"] | None = None
    next_bytes: Float[Tensor, "*batch E"] | None = None
    mean_logits: Float[Tensor, "*batch"] | None = None


@show_options(LogitOptions, ScoreOptions)
def token_statistics(
    hidden: Logits,
    weight: Tensor | HasLogits | None = None,
    tokens: Int[Tensor, "*batch"] | None = None,
    *,
    statistics: tuple[Statistic, ...] = ("log_probs", "entropy"),
    top_k: int = 0,
    next_bytes: NextBytes | None = None,
    **options: Unpack[ScoreOptions],
) -> TokenStatistics:
    """Compute statistics of logits in one pass, without all logits in memory.

    Call it with logits, or with hidden states and what they are multiplied with:

    | call | logits |
    |---|---|
    | `token_statistics(outputs.logits, tokens)` | those of a model of transformers, of a patched one not computed |
    | `token_statistics(head.uncomputed_logits(hidden), tokens)` | those of an `UncomputedLogits` |
    | `token_statistics(hidden, head, tokens)` | those of a head or a table |
    | `token_statistics(hidden, weight, tokens)` | `finish_logits(hidden @ weight.T)` |

    Args:
        hidden: Logits, or hidden states `(..., D)`; see above.
        weight: One row per token, `(V, D)`; or a head or a table. Behind logits, leave it out.
        tokens: Token IDs `(...)`, or `ignore_index` for positions to leave out. `log_probs` and `is_argmax` need them;
            `None` for all positions.
        statistics: Names of the fields of `TokenStatistics` to compute.
        top_k: K of `top_logits` and `top_ids`; 0 for neither.
        next_bytes: Events of the tokens of this vocabulary, `NextBytes.of(tokenizer)`; `None` for no statistic of them.
        **options: See `ScoreOptions`; logits take `temperature` and `ignore_index` alone.

    On CUDA it may wait once for the device, to check and count the tokens, and without tokens never; see
    `linear_cross_entropy`, which waits in the same cases.

    Returns:
        The statistics, in float32 or, for float64 input, in float64.

    Raises:
        ShapeError: Tokens, hidden states and rows do not fit each other, or logits are no floats.
        SizeError: A statistic is unknown or needs tokens, `top_k` is below 0 or above V, or an option is unknown or
            outside its range.
        TokenIdError: A token is outside the table; this error and the others are those of `linear_cross_entropy`.

    Example:
        >>> hidden, table, tokens = torch.randn(2, 5, 8), torch.randn(100, 8), torch.randint(0, 100, (2, 5))
        >>> found = token_statistics(hidden, table, tokens, top_k=3)
        >>> found.log_probs.shape, found.entropy.shape, found.top_ids.shape
        (torch.Size([2, 5]), torch.Size([2, 5]), torch.Size([2, 5, 3]))
        >>> token_statistics(hidden @ table.T, tokens).entropy.shape
        torch.Size([2, 5])
    """
    check_options(options, ScoreOptions, "token_statistics")
    weight, tokens = tokens_and_weight(weight, tokens)
    logits, loss = resolve_logits(hidden, weight, options)
    return token_statistics_of(logits, tokens, loss, statistics=statistics, top_k=top_k, next_bytes=next_bytes)


def token_statistics_of(
    logits: UncomputedLogits,
    tokens: Int[Tensor, "*batch"] | None = None,
    loss: LossSettings = DEFAULTS,
    *,
    statistics: tuple[Statistic, ...] = ("log_probs", "entropy"),
    top_k: int = 0,
    next_bytes: NextBytes | None = None,
    counted: Counted | None = None,
) -> TokenStatistics:
    """Compute `token_statistics` of logits that are not computed yet; arguments and errors are the same."""
    wanted = set(statistics)
    if not wanted <= set(get_args(Statistic)):
        unknown = ", ".join(sorted(map(repr, wanted - set(get_args(Statistic)))))
        raise SizeError(f"statistics must be among {', '.join(get_args(Statistic))}, not {unknown}.")
    if tokens is None and wanted & {"log_probs", "is_argmax"}:
        raise SizeError("log_probs and is_argmax are statistics of tokens: pass tokens, or leave them out.")
    if top_k:
        check_top_k(top_k, logits.vocab_size)
    shape = logits.hidden.shape[:-1]
    checked: CheckedIds | None
    if tokens is None:
        kept, checked = torch.ones(shape, dtype=torch.bool, device=logits.hidden.device), None
    else:
        check_ids(logits.hidden, tokens, "tokens")
        if counted is None:
            drop = False if is_plain(logits) else loss.drop_ignored
            of_rank = logits.rank_request
            counted = counted_targets(tokens, logits.vocab_size, loss, drop=drop, request=of_rank)
        mask, checked = counted
        kept = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    best = max(top_k, 1) if "is_argmax" in wanted else top_k
    check_next_bytes(next_bytes, logits.vocab_size)
    objective = LogitStatistics(
        sum="mean_logits" in wanted,
        mean="entropy" in wanted,
        squares="sum_squared_probs" in wanted,
        top_k=best,
        next_bytes=next_bytes,
        only_events=not wanted and not top_k and next_bytes is not None,
    )
    request = Request(objective, chunk_bytes=loss.chunk_bytes)
    if checked is not None:
        ids = checked.ids.flatten().unsqueeze(1) if "log_probs" in wanted else None
        request = request._replace(ids=ids, tokens=checked.tokens)
    totals = {
        name: value.unflatten(-1, shape) if shape else value.squeeze(-1)
        for name, value in compute_totals(logits, request).items()
    }
    top = totals["top_ids"].movedim(0, -1) if best else None
    entropy = totals["log_sum"] - totals["mean"] if "entropy" in wanted else None
    found = TokenStatistics(
        log_probs=log_probs(totals, totals["selected"])[0] if "log_probs" in wanted else None,
        entropy=entropy.masked_fill(entropy == -torch.inf, torch.nan) if entropy is not None else None,
        logsumexp=logsumexp(totals) if "logsumexp" in wanted else None,
        sum_squared_probs=(totals["log_squares"] - 2 * totals["log_sum"]).exp() * kept
        if "sum_squared_probs" in wanted
        else None,
        is_argmax=(top[..., 0] == tokens) & kept if top is not None and "is_argmax" in wanted else None,
        top_logits=totals["top_logits"].movedim(0, -1)[..., :top_k] if top_k else None,
        top_ids=top[..., :top_k].where(kept.unsqueeze(-1), -1) if top is not None and top_k else None,
        next_bytes=event_log_probs(totals, pads=logits.options.batch_invariant) * kept.unsqueeze(-1)
        if next_bytes is not None
        else None,
        mean_logits=totals["sum"] / logits.vocab_size if "mean_logits" in wanted else None,
    )
    if checked is None or checked.is_bad is None:
        return found
    is_bad = checked.is_bad
    return TokenStatistics(
        *(
            x
            if x is None or not x.is_floating_point()
            else x.masked_fill(is_bad if x.dim() == is_bad.dim() else is_bad.unsqueeze(-1), torch.nan)
            for x in found
        )
    )


class LogitStatistics(Objective):
    """Compute statistics of the logits z of each token, where p is `softmax(z)`."""

    # With p = softmax(z), for each of C tokens: `log_sum` is logsumexp(z) - `top`, `mean` the sum of p (z - top),
    # `log_squares` the log of the sum of exp(2 (z - top)); so the entropy is `log_sum - mean`, and the sum of p² is
    # `exp(log_squares - 2 log_sum)`. `sums` and `event_tops` have no gradient.

    has_kernels = True
    constants = Objective.constants | {"event_tops"}

    def __init__(
        self,
        *,
        sum: bool = False,
        mean: bool = False,
        squares: bool = False,
        top_k: int = 0,
        next_bytes: NextBytes | None = None,
        only_events: bool = False,
    ) -> None:
        self.sum = sum
        self.mean = mean
        self.squares = squares
        self.top_k = top_k
        self.next_bytes, self.only_events = next_bytes, only_events
        self.slots = 3 if next_bytes is not None else 2 if mean else 1
        self.finishes = next_bytes is None

    def work_numbers(self, rows: int) -> int:
        """Return how many numbers of intermediate results exist at once without kernels, per token."""
        sorted_rows = min(rows, max(4 * GROUP * self.top_k, LEAST_GROUPED)) if self.top_k > 1 else 0
        return self.slots * rows + SORTED * sorted_rows

    def bytes_of_parts(self, rows: int) -> int:
        """Return the bytes of `Objective.bytes_of_parts`; of the largest logits each part has 9 keys of 8 bytes."""
        return super().bytes_of_parts(rows) + (-(-rows // PART) * 72 if self.top_k else 0)

    def terms(self, block: LogitBlock, previous: Totals) -> Totals:
        """Return the statistics over the rows of the block; `selected` is 0 where the ID is another row."""
        z = block.student
        if self.only_events and self.next_bytes is not None:
            return self._event_totals(block, self.next_bytes)
        found, exponentials = softmax_totals(block, z)
        if block.ids is not None:
            local, is_inside = block.local_ids(block.ids)
            found["selected"] = z.gather(0, local).where(is_inside, 0.0)
        if self.sum:
            found["sum"] = z.sum(0)
        if self.mean:
            found["mean"] = exponentials.mean(block.work.subtract(z, found["top"], slot=1), block)
        if self.squares:
            found["log_squares"] = block.work.multiply(exponentials.powers, exponentials.powers).sum(0).log()
        if self.top_k:
            values, ids = top_k(z.T, min(self.top_k, len(z)))
            missing = self.top_k - values.shape[1]  # a block of fewer rows is filled up with IDs that lose every tie
            found["top_logits"] = F.pad(values, (0, missing), value=-torch.inf).T
            found["top_ids"] = F.pad(ids + block.start, (0, missing), value=NO_ID).T
        return found if self.next_bytes is None else found | self._event_totals(block, self.next_bytes)

    def _event_totals(self, block: LogitBlock, next_bytes: NextBytes) -> Totals:
        """Return the totals of events over the rows of the block; -inf for an event that no row has."""
        z = block.student
        rows = self._events_of(block, next_bytes).unsqueeze(1).expand_as(z)
        tops = z.new_full((next_bytes.num_events, z.shape[1]), -torch.inf).scatter_reduce(0, rows, z.detach(), "amax")
        powers = block.work.exp(block.work.subtract(z, finite_top(tops)[rows[:, 0]], slot=2))
        sums = torch.zeros_like(tops).scatter_add(0, rows, powers)
        is_empty = sums == 0
        log_sums = sums.masked_fill(is_empty, 1.0).log().masked_fill(is_empty, -torch.inf)
        return {"event_tops": tops, "event_log_sums": log_sums}

    def _events_of(self, block: LogitBlock, next_bytes: NextBytes) -> Tensor:
        """Return the event of each row of a block, `(R,)`."""
        return next_bytes.events[block.start : block.start + len(block.student)].to(block.student.device)

    def merge(self, parts: Totals) -> Totals:
        """Combine the statistics of several blocks."""
        only = only_part(parts)
        if only is not None:
            return only
        events: Totals = {}
        if self.next_bytes is not None:
            tops = events["event_tops"] = parts["event_tops"].amax(0)
            events["event_log_sums"] = (parts["event_log_sums"] + parts["event_tops"] - finite_top(tops)).logsumexp(0)
        if self.only_events:
            return events
        found, shares = merge_softmax(parts)
        shifts = parts["top"].where(parts["top"] > -torch.inf, found["top"]) - found["top"]
        for name in ("selected", "sum"):
            if name in parts:
                found[name] = parts[name].sum(0)
        if self.mean:
            found["mean"] = ((parts["mean"] + shifts) * shares).sum(0)
        if self.squares:
            found["log_squares"] = (parts["log_squares"] + 2 * shifts).logsumexp(0)
        if self.top_k:
            values, ids = (parts[name].flatten(0, 1).T for name in ("top_logits", "top_ids"))
            values, ids = ordered_top_k(values, ids, self.top_k)
            found["top_logits"], found["top_ids"] = values.T, ids.T
        return found | events

    def compiled_terms(self, ids: Tensor | None, previous: Totals) -> BlockTerms | None:
        names = ["sum"] * self.sum + ["mean"] * self.mean + ["log_squares"] * self.squares
        terms = statistics_of_blocks(ids, names, with_keys=bool(self.top_k))
        terms = with_largest(terms, self.top_k) if self.top_k else terms
        return terms if self.next_bytes is None else partial(self._with_events, terms, self.next_bytes)

    def _with_events(self, terms: BlockTerms, next_bytes: NextBytes, block: LogitBlock) -> Totals | None:
        """Return the totals that a kernel computes of a block, with those of events."""
        found = {} if self.only_events else terms(block)
        if found is None:
            return None
        finished = block.with_bias(wide_dtype(block.student.dtype))
        return found | stacked([self._event_totals(finished, next_bytes)])

    def compiled_dlogits(self, ids: Tensor | None, totals: Totals, grads: Totals) -> BlockGradient | None:
        """Return a kernel that computes the gradient, from the same formula as `dlogits_`; of events there is none."""
        if "event_log_sums" in grads:
            return None
        found = [
            (ids, grads.get("selected"), totals.get("selected")),
            (totals.get("top_ids"), grads.get("top_logits"), totals.get("top_logits")),
        ]
        requested = [(i, g, z) for i, g, z in found if i is not None and g is not None and z is not None]
        return gradient_of_statistics(requested, totals, grads)

    def dlogits_(self, block: LogitBlock, totals: Totals, grads: Totals) -> None:
        """Replace the logits by the gradient `p (g + g_mean (1 + z - top - mean)) + 2 g_squares p₂ + g_sum + g_ids`."""
        z, factor = block.student, grads.get("log_sum")
        squares, of_events = None, None
        if "event_log_sums" in grads and self.next_bytes is not None:
            rows = self._events_of(block, self.next_bytes)
            log_sums = totals["event_log_sums"]
            levels = finite_top(totals["event_tops"]) + log_sums.masked_fill(log_sums == -torch.inf, 0.0)
            of_events = block.work.subtract(z, levels[rows], slot=2).exp_().mul_(grads["event_log_sums"][rows])
            if not grads.keys() - {"event_log_sums"}:
                z.copy_(of_events)
                return
        if "log_squares" in grads:
            shifted = block.work.subtract(z, totals["top"], slot=0)
            squares = shifted.mul_(2).sub_(totals["log_squares"]).exp_().mul_(2 * grads["log_squares"])
        if "mean" in grads:
            shifted = block.work.subtract(z, totals["top"], slot=1)
            if block.may_be_infinite:
                shifted.masked_fill_(z == -torch.inf, 0.0)  # a probability of 0 times -inf would be NaN
            offset = grads["mean"] * (1 - totals["mean"]) + (0 if factor is None else factor)
            softmax_(z, totals).mul_(shifted.mul_(grads["mean"]).add_(offset))
        elif factor is not None:
            softmax_(z, totals, factor=factor)
        else:
            z.zero_()
        if squares is not None:
            z.add_(squares)
        if of_events is not None:
            z.add_(of_events)
        if "sum" in grads:
            z.add_(grads["sum"])
        for name, ids in (("selected", block.ids), ("top_logits", totals.get("top_ids"))):
            if name in grads and ids is not None:
                local, is_inside = block.local_ids(ids)
                z.scatter_add_(0, local, grads[name].where(is_inside, 0.0))


@dataclass(frozen=True)
class CrossEntropy(TokenLoss):
    """Cross entropy `(1 - smoothing) (lse - z[target]) + smoothing (lse - mean of z) + z_loss * lse²`."""

    vocab_size: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def of(self, totals: Totals) -> Tensor:
        """Return the loss of each token, from the totals of its logits z."""
        losses = -log_probs(totals, totals["selected"])[0]
        if self.label_smoothing:
            mean = totals["sum"] / self.vocab_size
            smooth = totals["top"] - mean + totals["log_sum"]
            losses = (1 - self.label_smoothing) * losses + self.label_smoothing * smooth
        return losses + self.z_loss * logsumexp(totals).square() if self.z_loss else losses

    def gradients(self, totals: Totals, factors: Tensor) -> Totals:
        """Return the gradients with respect to `log_sum`, `selected` and, with label smoothing, `sum`."""
        by_log_sum = factors * (1 + 2 * self.z_loss * logsumexp(totals)) if self.z_loss else factors
        grads = {"log_sum": by_log_sum, "selected": -(1 - self.label_smoothing) * factors.unsqueeze(0)}
        if self.label_smoothing:
            grads["sum"] = -self.label_smoothing / self.vocab_size * factors
        return grads

    def compiled(
        self, ids: Tensor | None, totals: Totals, factors: Tensor, results: int
    ) -> tuple[Tensor, Totals, Tensor] | None:
        """Return losses, gradients and the reduced loss from one kernel on CUDA; elsewhere, and without IDs, `None`."""
        if ids is None or device_kind(factors) != "cuda":
            return None
        names = ("top", "log_sum", "sums", "selected", "sum")
        losses, by_selected, prepared, total = cross_entropy_of_totals(
            ids, *(totals.get(name) for name in names), factors, results, *astuple(self)
        )
        return losses, {"selected": by_selected, "factors": prepared}, total


def target_request(targets: CheckedIds, loss: LossSettings) -> Request:
    """Return the request for the totals that the losses of targets need."""
    objective, ids = LogitStatistics(sum=bool(loss.label_smoothing)), targets.ids.flatten().unsqueeze(1)
    return Request(objective, ids=ids, tokens=targets.tokens, min_chunks=loss.min_chunks, chunk_bytes=loss.chunk_bytes)


OF_BLOCK = ("top", "log_sum", "sums", "sum", "mean", "log_squares")
"""Totals that kernels compute, in this order."""

KEYS = ("lane_keys", "part_keys")
"""Results of `softmax_statistics` from which the largest logits are found on CUDA."""


def statistics_of_blocks(ids: Tensor | None, names: list[str], *, with_keys: bool = False) -> BlockTerms:
    """Return a kernel that computes statistics of the blocks of a chunk; see `LogitStatistics.terms`."""
    requests = Requests.of([] if ids is None else [ids])
    flags = ["sum" in names, "mean" in names, "log_squares" in names, with_keys]
    left_out = [name for name in ("sum", "mean", "log_squares") if name not in names]
    on_cpu: BlockStatistics | None = None

    def terms(block: LogitBlock) -> Totals | None:
        nonlocal on_cpu
        z, bias = block.student, block.biases[0]
        if on_cpu is None and device_kind(z) != "cuda":
            on_cpu = statistics_on_cpu(requests, z, extended=any(flags[:3]))
        if on_cpu is not None:
            result = on_cpu(z if block.array is None else block.array, bias, block.start)
        else:
            result = softmax_statistics(z, bias, *requests, block.start, *flags, *block.unfinished)
        if result is None:
            return None
        found, selected = result[:2]
        totals = dict(zip(OF_BLOCK, found.unbind(1), strict=True))
        for name in left_out:
            del totals[name]
        if with_keys:
            totals |= zip(KEYS, result[2:] or [z.new_empty(0, dtype=torch.long)] * 2, strict=True)
        if ids is not None:
            totals["selected"] = selected.unsqueeze(0)
        return totals

    return terms


def with_largest(terms: BlockTerms, k: int) -> BlockTerms:
    """Return a kernel that also looks for the K largest logits; the totals of the last block contain them."""
    # The kernel has state: use it for the blocks of one chunk, each once.
    state: list[Tensor] = []
    seen = 0

    def with_top_k(block: LogitBlock) -> Totals | None:
        nonlocal seen
        z, dtype = block.student, wide_dtype(block.student.dtype)
        rows, tokens = z.shape
        if not state:
            state.extend(z.new_full(shape, -torch.inf, dtype=dtype) for shape in ((tokens,), (tokens, k)))
            state.append(z.new_full((tokens, k), NO_ID, dtype=torch.long))
        found = terms(block)
        if found is None:
            return None
        keys = [found.pop(name) for name in KEYS]
        if not update_largest(z, block.biases[0], block.start, seen, *keys, *state, *block.unfinished):
            return None
        seen += rows
        shown = slice(1 if block.is_last else 0)
        return {**found, "top_logits": state[1].T[None][shown], "top_ids": state[2].T[None][shown]}

    return with_top_k


def gradient_of_statistics(
    requested: list[tuple[Tensor, Tensor, Tensor]], totals: Totals, grads: Totals
) -> BlockGradient:
    """Return a kernel that computes the gradient by the logits of each block; see `LogitStatistics.dlogits_`."""
    requests = Requests.of([ids for ids, _, _ in requested])
    by_request, values = None, None
    if requests.places is not None:
        by_request = torch.cat([grad.flatten() for _, grad, _ in requested])[requests.places]
    elif requests.ids is not None:
        by_request, values = (concatenated([each[i] for each in requested]) for i in (1, 2))
    names = ("log_sum", "mean", "log_squares", "sum")
    of_totals = totals["top"], totals["sums"], totals.get("mean"), totals.get("log_squares")
    factors = grads["factors"] if "factors" in grads else softmax_factors(*of_totals, *map(grads.get, names))
    flags = "mean" in grads, "log_squares" in grads
    if device_kind(factors) != "cuda":
        on_cpu = gradient_on_cpu(requests, by_request, factors)

        def gradient_of_block(block: LogitBlock, bias_grad: Tensor | None, _: bool) -> bool:
            z = block.student if block.array is None else block.array
            return on_cpu(z, block.biases[0], block.start, bias_grad)

        return gradient_of_block

    def gradient(block: LogitBlock, bias_grad: Tensor | None, add: bool) -> bool:
        inputs = block.student, block.biases[0], *requests, block.start, by_request, values, factors, bias_grad, add
        done: bool = softmax_gradient(*inputs, *flags, *block.unfinished)
        return done

    return gradient
