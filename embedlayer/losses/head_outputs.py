"""What every LM head computes besides its logits: loss, log-probabilities, statistics, losses of several depths."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Unpack

from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.losses.cross_entropy import Impl, LogitOptions, LossOptions, ScoreOptions
from embedlayer.losses.linear_cross_entropy import cross_entropy_of
from embedlayer.losses.logit_arguments import resolve_logits
from embedlayer.losses.multi_token import MultiTokenLoss, multi_token_inputs, multi_token_loss_of
from embedlayer.losses.statistics import Statistic, TokenStatistics, token_statistics_of
from embedlayer.losses.uncomputed_logits import UncomputedLogits


class HeadOutputs:
    """Abstract: the methods of tables and heads that read all rows without storing all logits.

    They follow from `uncomputed_logits`, which a subclass implements.
    """

    @abstractmethod
    def uncomputed_logits(
        self, hidden: Float[Tensor, "*batch D"], *, impl: Impl = "auto", **options: Unpack[LogitOptions]
    ) -> UncomputedLogits:
        """Describe the logits of `hidden` without computing them."""

    def loss(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"], **options: Unpack[LossOptions]
    ) -> Float[Tensor, "*result"]:
        """Return the cross entropy of `targets` under the softmax of the logits, in nats, without all logits in memory.

        Logits are computed and dropped in chunks. Where a subclass or a caller has replaced the method that returns
        logits, the loss is that of the logits it returns.

        Args:
            hidden: Output of the last block, after its final norm, `(..., D)`.
            targets: Token IDs, `(...)`; positions with `ignore_index` (-100 by default) do not count.
            **options: See `LossOptions`.

        Returns:
            The mean over the counted targets, a scalar. With `reduction="sum"` the sum; with `"none"` one loss for each
            target, `(...)`.

        Raises:
            ShapeError: `hidden` has another width than the rows.
        """
        logits, others = resolve_logits(hidden, self, options)
        return cross_entropy_of(logits, targets, **others)

    def token_log_probs(
        self, hidden: Float[Tensor, "*batch D"], tokens: Int[Tensor, "*batch"], **options: Unpack[ScoreOptions]
    ) -> Float[Tensor, "*batch"]:
        """Return the log-probability of each token of `tokens` under the softmax of the logits, in nats, `(...)`.

        Args:
            hidden: Output of the last block, after its final norm, `(..., D)`.
            tokens: Token whose probability is returned, for each position, `(...)`. Where it is `ignore_index` the
                result is 0.
            **options: See `ScoreOptions`.
        """
        return -self.loss(hidden, tokens, **options, reduction="none")

    def token_statistics(
        self,
        hidden: Float[Tensor, "*batch D"],
        tokens: Int[Tensor, "*batch"] | None = None,
        *,
        statistics: tuple[Statistic, ...] = ("log_probs", "entropy"),
        top_k: int = 0,
        **options: Unpack[ScoreOptions],
    ) -> TokenStatistics:
        """Return log-probabilities, entropies and other statistics of the logits, all from one pass.

        Args:
            hidden: Output of the last block, after its final norm, `(..., D)`.
            tokens: Token IDs `(...)`, or `ignore_index` for positions to leave out; `None` for all positions.
            statistics: Names of the fields of `TokenStatistics` to compute.
            top_k: K of `top_logits` and `top_ids`; 0 for neither.
            **options: See `ScoreOptions`.

        Raises:
            SizeError: A statistic is unknown or needs tokens, or `top_k` is below 0 or above V.
            TokenIdError: A token is outside the table.
        """
        logits, others = resolve_logits(hidden, self, options)
        return token_statistics_of(logits, tokens, statistics=statistics, top_k=top_k, **others)

    def multi_token_loss(
        self,
        hidden_states: Sequence[Float[Tensor, "B T D"]],
        labels: Int[Tensor, "B T"],
        weights: Sequence[float] | None = None,
        **options: Unpack[ScoreOptions],
    ) -> MultiTokenLoss:
        """Return the loss of heads that predict the next token, the one after it, and so on, in one pass.

        Depth k predicts `labels[:, t + 1 + k]` from `hidden_states[k][:, t]`. The loss is
        `sum over k of weights[k] * mean cross entropy of depth k`.

        Args:
            hidden_states: Hidden states of each depth, `(B, T, D)`.
            labels: Token IDs of the same positions, not shifted, or `ignore_index`, `(B, T)`.
            weights: Weight of each depth; `None` for 1 each.
            **options: See `ScoreOptions`.

        Raises:
            ShapeError: Hidden states and labels do not fit each other.
            SizeError: There is no depth, or another number of weights.
            TokenIdError: A label is neither a token nor `ignore_index`.

        Reference: DeepSeek-V3 technical report, 2024, equations 24 and 25: weights `(1, λ/D, ..., λ/D)`.
        """
        inputs = multi_token_inputs(hidden_states, labels, weights, options.get("ignore_index", -100))
        logits, others = resolve_logits(inputs.hidden, self, options)
        return multi_token_loss_of(logits, inputs, others.get("ignore_index", -100))
