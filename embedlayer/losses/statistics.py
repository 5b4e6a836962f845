"""Log-probabilities, entropies and other statistics of the logits of an LM head, all from one pass over the rows."""

from typing import NamedTuple, Unpack, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.core.errors import SizeError
from embedlayer.core.option_docs import show_options
from embedlayer.losses.differentiable_totals import compute_totals
from embedlayer.losses.largest import check_top_k
from embedlayer.losses.linear import Counted
from embedlayer.losses.logit_arguments import DEFAULTS, HasLogits, Logits, resolve_logits, tokens_and_weight
from embedlayer.losses.logit_statistics import LogitStatistics
from embedlayer.losses.next_bytes import NextBytes, check_next_bytes
from embedlayer.losses.objective import Request, event_log_probs, log_probs, logsumexp
from embedlayer.losses.options import LogitOptions, LossSettings, ScoreOptions, Statistic, check_options
from embedlayer.losses.targets import CheckedIds, counted_targets
from embedlayer.losses.uncomputed_logits import UncomputedLogits, check_ids, is_plain


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
