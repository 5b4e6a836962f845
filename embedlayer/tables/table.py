"""A token table, read in two directions: by token ID at the input, against all rows at the output.

`table(ids)` returns vectors; `table.logits(hidden)` and `table.loss(hidden, targets)` read the same rows as the weight
of an LM head. Every storage format is a `TokenTable`. Tying is not a flag: both ends use the same object.
"""

from abc import ABC
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Unpack, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.errors import ShapeError
from embedlayer.losses.cross_entropy import LogitOptions, LossOptions, ScoreOptions, finish_logits
from embedlayer.losses.linear_cross_entropy import linear_cross_entropy
from embedlayer.losses.row_blocks import cross_entropy_over_rows
from embedlayer.overrides import is_current
from embedlayer.tables.lookup import LookupTable

ROWS_AT_ONCE = 8192


class TokenTable(LookupTable, ABC):
    """Abstract: a table that is read in two directions, by token ID at the input and against all rows at the output.

    `table(ids)` looks vectors up (see `LookupTable`). `logits(hidden)` and `loss(hidden, targets)` multiply a hidden
    state by all rows, so the table can also be the weight of an LM head. A subclass implements `look_up` and `rows`;
    `logits`, `loss` and `token_log_probs` follow from these.

    The rows of a `row_sparse=True` table learn from look-ups only. If they are trained, the backward pass of `logits`
    or `loss` raises `ShapeError`, because it would give a gradient to every row.
    """

    def as_linear(self, hidden: Float[Tensor, "*batch D"]) -> tuple[Tensor, Tensor] | None:
        """Return two tensors whose product is the raw logits of all rows, or `None` if the table stores no such matrix.

        For the result `(x, matrix)`, `x @ matrix.T` equals `hidden @ rows.T`. The shapes are `(..., K)` and
        `(num_rows, K)`, where K is the width of the stored rows: D, or R in a `FactorizedEmbedding` of rank R.

        Tables that store a matrix override this method, and `logits`, `loss` and `token_log_probs` use the two tensors.
        For `None` those methods call `raw_logits`, which reads the rows block by block.

        Args:
            hidden: Output of the last block, `(..., D)`.
        """
        return None

    def raw_logits(
        self, hidden: Float[Tensor, "*batch D"], start: int = 0, stop: int | None = None
    ) -> Float[Tensor, "*batch N"]:
        """Return `hidden @ rows(start, stop).T` as a new tensor: logits before scale, bias, soft cap and padding.

        Args:
            hidden: Output of the last block, `(..., D)`.
            start: First row.
            stop: Last row + 1; `None` for all V tokens.

        Returns:
            Raw logits, `(..., stop - start)`.
        """
        stop = self.vocab_size if stop is None else stop
        linear = self._linear(hidden)
        if linear is not None:
            return F.linear(linear[0], linear[1][start:stop])
        chunks = range(start, stop, ROWS_AT_ONCE)
        parts = [F.linear(hidden, self.rows(first, min(first + ROWS_AT_ONCE, stop))) for first in chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def logits(self, hidden: Float[Tensor, "*batch D"], **options: Unpack[LogitOptions]) -> Float[Tensor, "*batch V"]:
        """Return the logits of all tokens: `hidden @ rows.T`, then scale, bias and soft cap if `options` contain them.

        The logit of the padding token is 0, or -inf with `mask_padding`, and gives its row no gradient. The factor
        `table.scale` is for look-ups and is not applied.

        Args:
            hidden: Output of the last block, `(..., D)`.
            **options: See `LogitOptions`.

        Raises:
            ShapeError: `hidden` has another width than the rows.
        """
        check_width(hidden, self.embed_dim)
        options.setdefault("padding_idx", self.padding_idx)
        return finish_logits(self.raw_logits(hidden), **options)

    def loss(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"], **options: Unpack[LossOptions]
    ) -> Float[Tensor, "*result"]:
        """Return the cross entropy of `targets` under `softmax(logits(hidden))`, in nats, without all logits in memory.

        Logits are computed and dropped in chunks. In a subclass that overrides only `logits`, the loss is computed from
        the logits which that override returns.

        Args:
            hidden: Output of the last block, `(..., D)`.
            targets: Token IDs, `(...)`; positions with `ignore_index` (-100 by default) do not count.
            **options: See `LossOptions`.

        Returns:
            The mean over the counted targets, a scalar. With `reduction="sum"` the sum; with `"none"` one loss for each
            target, `(...)`.

        Raises:
            ShapeError: `hidden` has another width than the rows.
        """
        check_width(hidden, self.embed_dim)
        if not is_current(type(self), "loss", "logits"):
            given: dict[str, Any] = dict(options)
            shaping = {name: given.pop(name) for name in LogitOptions.__annotations__ if name in options}
            return loss_of_logits(partial(self.logits, **shaping), hidden, targets, self.vocab_size, given)
        options.setdefault("padding_idx", self.padding_idx)
        linear = self._linear(hidden) if is_current(type(self), "as_linear", "raw_logits") else None
        if linear is not None:
            options["vocab_size"] = self.vocab_size
            return linear_cross_entropy(*linear, targets, **options)
        return cross_entropy_over_rows(
            hidden, self.raw_logits, targets, vocab_size=self.vocab_size, rows_at_once=ROWS_AT_ONCE, options=options
        )

    def token_log_probs(
        self, hidden: Float[Tensor, "*batch D"], tokens: Int[Tensor, "*batch"], **options: Unpack[ScoreOptions]
    ) -> Float[Tensor, "*batch"]:
        """Return the log-probability of each token of `tokens` under `softmax(logits(hidden))`, in nats, `(...)`.

        Args:
            hidden: Output of the last block, `(..., D)`.
            tokens: Token whose probability is returned, for each position, `(...)`. Where it is `ignore_index` the
                result is 0.
            **options: See `ScoreOptions`.
        """
        return -self.loss(hidden, tokens, **options, reduction="none")

    def _linear(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return `as_linear(hidden)`, or `None` where its matrix may not be what `rows` returns.

        That is the case in a subclass that overrides `rows` and not `as_linear`.
        """
        return self.as_linear(hidden) if is_current(type(self), "as_linear", "rows") else None


def loss_of_logits(
    logits: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, vocab_size: int, options: Mapping[str, Any]
) -> Tensor:
    """Return the cross entropy of `targets` under `softmax(logits(hidden))`, in nats, for any function `logits`.

    Args:
        logits: Function from hidden states `(N, D)` to all logits `(N, V)`. It is called on a chunk of tokens at a
            time, and again in the backward pass.
        hidden: Hidden states, `(..., D)`.
        targets: Token IDs `(...)`, or `ignore_index`.
        vocab_size: Number of logits, V.
        options: See `LossOptions`. Options of `LogitOptions` are applied to the result of `logits`, so leave out those
            that `logits` applies itself.
    """
    return cross_entropy_over_rows(
        hidden,
        lambda part, start, stop: logits(part)[..., start:stop],
        targets,
        vocab_size=vocab_size,
        rows_at_once=vocab_size,
        options=cast(LossOptions, options),
    )


def check_width(hidden: Tensor, embed_dim: int) -> None:
    """Check that the last dimension of `hidden` is `embed_dim`.

    Raises:
        ShapeError: The last dimension has another size, or `hidden` is a scalar.
    """
    if hidden.dim() == 0 or hidden.shape[-1] != embed_dim:
        raise ShapeError(
            f"hidden {tuple(hidden.shape)} does not fit a table of width {embed_dim}: pass (..., {embed_dim})."
        )
