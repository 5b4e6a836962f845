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
    """Abstract: a table that is read in two directions, by token ID and against all rows.

    `table(ids)` looks rows up (`LookupTable`). `logits(hidden)` and `loss(hidden, targets)` compare a hidden state with
    all rows, so the table can also be the weight of an LM head. With `row_sparse` nothing can be learned through them.
    A subclass implements `look_up` and `rows`; all else follows from these.
    """

    def as_linear(self, hidden: Float[Tensor, "*batch D"]) -> tuple[Tensor, Tensor] | None:
        """Return two tensors, `(..., K)` and `(num_rows, K)`, whose product is `hidden @ rows.T`, or `None`.

        A table that stores such a matrix overrides this method, and `logits`, `loss` and `token_log_probs` use the two
        tensors. Other tables return `None` and are read by `raw_logits`, a block of rows at a time.
        """
        return None

    def raw_logits(
        self, hidden: Float[Tensor, "*batch D"], start: int = 0, stop: int | None = None
    ) -> Float[Tensor, "*batch N"]:
        """Return `hidden @ rows(start, stop).T` as a new tensor, before scale, bias and soft cap.

        Args:
            hidden: Output of the last block, `(..., D)`.
            start: First row.
            stop: Last row + 1; `None` for all tokens.
        """
        stop = self.vocab_size if stop is None else stop
        linear = self._linear(hidden)
        if linear is not None:
            return F.linear(linear[0], linear[1][start:stop])
        chunks = range(start, stop, ROWS_AT_ONCE)
        parts = [F.linear(hidden, self.rows(first, min(first + ROWS_AT_ONCE, stop))) for first in chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def logits(self, hidden: Float[Tensor, "*batch D"], **options: Unpack[LogitOptions]) -> Float[Tensor, "*batch V"]:
        """Return `finish_logits(hidden @ rows.T)`, a score for each token; 0 and no gradient for the padding token.

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
        """Return the cross entropy of `targets` under `softmax(logits(hidden))`, in nats, in chunks of logits.

        In a subclass that overrides only `logits`, it is the loss of those logits.

        Args:
            hidden: Output of the last block, `(..., D)`.
            targets: Token IDs, or `ignore_index`, `(...)`.
            **options: See `LossOptions`.

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
        """Return the log-probability of each token under `softmax(logits(hidden))`, in nats, `(...)`.

        Args:
            hidden: Output of the last block, `(..., D)`.
            tokens: Token IDs, `(...)`.
            **options: See `ScoreOptions`.
        """
        return -self.loss(hidden, tokens, **options, reduction="none")

    def _linear(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return `as_linear(hidden)`, or `None` if a subclass overrides only `rows`."""
        return self.as_linear(hidden) if is_current(type(self), "as_linear", "rows") else None


def loss_of_logits(
    logits: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, vocab_size: int, options: Mapping[str, Any]
) -> Tensor:
    """Return the cross entropy of `targets` under `softmax(logits(hidden))`, for a function `logits`."""

    def products(part: Tensor, start: int, stop: int) -> Tensor:
        """Return a slice of the logits."""
        return logits(part)[..., start:stop]

    return cross_entropy_over_rows(
        hidden,
        products,
        targets,
        vocab_size=vocab_size,
        rows_at_once=vocab_size,
        options=cast(LossOptions, options),
    )


def check_width(hidden: Tensor, embed_dim: int) -> None:
    """Check that the last dimension of hidden states is the width of the rows.

    Raises:
        ShapeError: The last dimension has another size; the message names both sizes.
    """
    if hidden.dim() == 0 or hidden.shape[-1] != embed_dim:
        raise ShapeError(
            f"hidden {tuple(hidden.shape)} does not fit a table of width {embed_dim}: pass (..., {embed_dim})."
        )
