"""What every LM head computes besides its logits: loss, log-probabilities, statistics, losses of several depths."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from embedlayer.core.option_docs import show_options
from embedlayer.core.torch_state import is_observed
from embedlayer.losses.options import Impl, LogitOptions, LossOptions, ScoreOptions, check_options

if TYPE_CHECKING:  # imported where they are used: a table that only looks rows up needs no losses
    from embedlayer.core.documents import AttentionMask
    from embedlayer.losses.next_bytes import NextBytes
    from embedlayer.losses.statistics import Statistic, TokenStatistics
    from embedlayer.losses.target_groups import MultiTokenLoss
    from embedlayer.losses.uncomputed_logits import UncomputedLogits


class HeadOutputs:
    """Abstract: the methods of tables and heads that read all rows without storing all logits.

    They follow from `uncomputed_logits`, which a subclass implements.
    """

    @abstractmethod
    def uncomputed_logits(
        self, hidden: Float[Tensor, "*batch D"], *, impl: Impl = "auto", **options: Unpack[LogitOptions]
    ) -> "UncomputedLogits":
        """Describe the logits of `hidden` without computing them."""

    @show_options(LogitOptions, ScoreOptions, LossOptions)
    def loss(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"], **options: Unpack[LossOptions]
    ) -> Float[Tensor, "*result"]:
        """Return the cross entropy of `targets` under the softmax of the logits, in nats, without all logits in memory.

        Logits are computed and dropped in chunks. Where a subclass or a caller has replaced the method that returns
        logits, the loss is that of the logits it returns. A head with hooks is called, once, so that all its logits are
        in memory. On CUDA the call waits for the device where `linear_cross_entropy` does.

        Args:
            hidden: Output of the last block, after its final norm, `(..., D)`.
            targets: Token IDs, `(...)`; positions with `ignore_index` (-100 by default) do not count.
            **options: See `LossOptions`.

        Returns:
            The mean over the counted targets, a scalar. With `reduction="sum"` the sum; with `"none"` one loss for each
            target, `(...)`.

        Raises:
            TokenIdError: A target is neither a token nor `ignore_index`; on CUDA where the call waits, else later.
        """
        from embedlayer.losses.linear import cross_entropy_of
        from embedlayer.losses.logit_arguments import resolve_logits

        check_options(options, LossOptions, f"{type(self).__name__}.loss")
        logits, loss = resolve_logits(hidden, self, options)
        return cross_entropy_of(logits, targets, loss)

    @show_options(LogitOptions, ScoreOptions)
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
        from embedlayer.losses.linear import cross_entropy_of
        from embedlayer.losses.logit_arguments import resolve_logits

        check_options(options, ScoreOptions, f"{type(self).__name__}.token_log_probs")
        logits, loss = resolve_logits(hidden, self, options)
        return -cross_entropy_of(logits, tokens, loss._replace(reduction="none"))

    @show_options(LogitOptions, ScoreOptions)
    def token_statistics(
        self,
        hidden: Float[Tensor, "*batch D"],
        tokens: Int[Tensor, "*batch"] | None = None,
        *,
        statistics: "tuple[Statistic, ...]" = ("log_probs", "entropy"),
        top_k: int = 0,
        next_bytes: "NextBytes | None" = None,
        **options: Unpack[ScoreOptions],
    ) -> "TokenStatistics":
        """Return log-probabilities, entropies and other statistics of the logits, all from one pass.

        Args:
            hidden: Output of the last block, after its final norm, `(..., D)`.
            tokens: Token IDs `(...)`, or `ignore_index` for positions to leave out; `None` for all positions.
            statistics: Names of the fields of `TokenStatistics` to compute.
            top_k: K of `top_logits` and `top_ids`; 0 for neither.
            next_bytes: Events of the tokens, `NextBytes.of(tokenizer)`; `None` for no statistic of them.
            **options: See `ScoreOptions`.

        Raises:
            TokenIdError: A token is outside the table; on CUDA where the call waits, else later.
        """
        from embedlayer.losses.logit_arguments import resolve_logits
        from embedlayer.losses.statistics import token_statistics_of

        check_options(options, ScoreOptions, f"{type(self).__name__}.token_statistics")
        logits, loss = resolve_logits(hidden, self, options)
        return token_statistics_of(logits, tokens, loss, statistics=statistics, top_k=top_k, next_bytes=next_bytes)

    @show_options(LogitOptions, ScoreOptions, LossOptions)
    def multi_token_loss(
        self,
        hidden_states: Sequence[Float[Tensor, "B T D"]],
        labels: Int[Tensor, "B T"],
        weights: Sequence[float] | None = None,
        *,
        documents: "AttentionMask | None" = None,
        **options: Unpack[LossOptions],
    ) -> "MultiTokenLoss":
        """Return the loss of heads that predict the next token, the one after it, and so on, in one pass.

        Depth k predicts `labels[:, t + 1 + k]` from `hidden_states[k][:, t]`. The loss is
        `sum over k of weights[k] * losses[k]`, where `losses[k]` is what `loss` returns for depth k.

        Args:
            hidden_states: Hidden states of each depth, `(B, T, D)`.
            labels: Token IDs of the same positions, not shifted, or `ignore_index`, `(B, T)`.
            weights: Weight of each depth; `None` for 1 each.
            documents: Mask of padding and packed documents, `(B, T)`, as a model's `attention_mask`: at every depth,
                a label is no target of padding or of a token of another document. `None` for one document in each row.
            **options: See `LossOptions`. `token_weights` are those of the labels, `(B, T)`, and shifted as these are.

        Raises:
            TokenIdError: A label is neither a token nor `ignore_index`; on CUDA where the call waits, else later.

        Reference: DeepSeek-V3 technical report, 2024, equations 24 and 25: weights `(1, λ/D, ..., λ/D)`.
        """
        from embedlayer.losses.logit_arguments import resolve_logits
        from embedlayer.losses.target_groups import multi_token_loss_of, multi_token_targets

        check_options(options, LossOptions, f"{type(self).__name__}.multi_token_loss")
        ignore_index = options.get("ignore_index", -100)
        token_weights = options.get("token_weights")
        hidden, groups = multi_token_targets(hidden_states, labels, weights, documents, ignore_index, token_weights)
        head = cast(nn.Module, self)
        if any(map(is_observed, (head, *head.children()))):  # hooks see one call for each depth
            depths = [resolve_logits(states, self, options) for states in hidden_states]
            logits, loss = depths[0]
            lengths = [length // max(len(labels), 1) for length in groups.lengths]
            parts = [each.hidden[:, :length].flatten(0, 1) for (each, _), length in zip(depths, lengths, strict=True)]
            logits = logits.replaced(torch.cat(parts), logits.options)
        else:
            logits, loss = resolve_logits(torch.cat(hidden), self, options)
        return multi_token_loss_of(logits, groups, labels, loss)
