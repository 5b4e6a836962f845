"""A token table, read in two directions.

By rows on the way in, `table(ids) -> vectors`; against all rows on the way out, `table.logits(hidden)` and
`table.loss(hidden, targets)`. Every way to store the numbers is a `TokenTable`. Tying is not a flag: it is the same
object at both ends.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any, Unpack, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.bounds import as_ids
from embedlayer.errors import ShapeError, SizeError
from embedlayer.losses.cross_entropy import LogitOptions, LossOptions, ScoreOptions, finish_logits
from embedlayer.losses.linear_cross_entropy import linear_cross_entropy
from embedlayer.losses.row_blocks import cross_entropy_over_rows
from embedlayer.overrides import is_current
from embedlayer.pretrained import Pretrained
from embedlayer.shapes import Ids, IdsLike, Vectors

ROWS_AT_ONCE = 8192


class TokenTable(Pretrained, ABC):
    """Abstract: one vector for each token, however it is stored.

    Attributes:
        vocab_size: Tokens that have a row, V. IDs run from 0 to V - 1.
        num_rows: Rows stored, V and the spare ones; spare rows are never looked up and have no logit.
        embed_dim: Width of a vector, D.
        padding_idx: Token whose row is zero and stays zero, or `None`.
        scale: Factor that `forward` applies and `rows` and `logits` do not, or `None` for none.
        row_sparse: Whether only looked-up rows get a gradient, so that nothing can be learned through `logits`.
    """

    vocab_size: int
    num_rows: int
    embed_dim: int
    padding_idx: int | None
    scale: float | None
    row_sparse: bool = False

    @abstractmethod
    def look_up(self, ids: Ids) -> Vectors:
        """Return the vectors of `ids` without `scale`, `(...)` to `(..., D)`, in memory that nobody else reads.

        Raises:
            TokenIdError: An ID is outside the table; on an accelerator it is raised by `check()`, and until then a bad
                ID gives zeros and gets no gradient.
            ShapeError: Not integers.
        """

    def stored(self, ids: Ids) -> tuple[Tensor, Tensor] | None:
        """Checked IDs and the tensor whose rows they are, to be read only; `None` where a look-up is more than that.

        The errors are those of `look_up`.
        """
        return None

    def forward(self, ids: IdsLike) -> Vectors:
        """Return `scale * look_up(ids)`, `(...)` to `(..., D)`: for IDs of any shape, as `nn.Embedding` does.

        Args:
            ids: A tensor of int64 or int32; also a number, lists, a NumPy array of integers, or an `Encoding` of a
                tokenizer, as `embedlayer.bounds.as_ids` turns them into a tensor. The errors are those of `look_up`.
        """
        vectors, factor = self.look_up(as_ids(ids, beside=self)), self.factor
        return vectors if factor is None else factor * vectors

    @property
    def factor(self) -> float | Tensor | None:
        """What `forward` multiplies by: `scale`, or the `embed_scale` of a kind that may round it."""
        factor: float | Tensor | None = getattr(self, "embed_scale", self.scale)
        return factor

    @abstractmethod
    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Rows `start` to `stop - 1` as stored, without `scale`."""

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return next(chain(self.parameters(), self.buffers())).device

    @abstractmethod
    def check(self) -> None:
        """Wait for the device and raise the error of a bad ID that was looked up since the last check."""

    def as_linear(self, hidden: Float[Tensor, "*batch D"]) -> tuple[Tensor, Tensor] | None:
        """Two tensors, `(..., K)` and `(num_rows, K)`, whose product is `hidden @ rows.T`; `None` if there are none.

        A kind that stores its rows, or has a shorter way than by its rows, says so here, and its `logits`, `loss` and
        `token_log_probs` take that way. The others are asked for `products`, a block of rows at a time.
        """
        return None

    def products(
        self, hidden: Float[Tensor, "*batch D"], start: int = 0, stop: int | None = None
    ) -> Float[Tensor, "*batch N"]:
        """`hidden @ rows(start, stop).T`, in memory that nobody else reads; of all V rows if no ends are given."""
        stop = self.vocab_size if stop is None else stop
        linear = self._linear(hidden)
        if linear is not None:
            return F.linear(linear[0], linear[1][start:stop])
        chunks = range(start, stop, ROWS_AT_ONCE)
        parts = [F.linear(hidden, self.rows(first, min(first + ROWS_AT_ONCE, stop))) for first in chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def logits(self, hidden: Float[Tensor, "*batch D"], **options: Unpack[LogitOptions]) -> Float[Tensor, "*batch V"]:
        """Return `finish_logits(hidden @ rows.T)`: a score for each token; padding's is 0 and sends no gradient.

        Raises:
            ShapeError: `hidden` has another width than the rows.
        """
        check_width(hidden, self.embed_dim)
        options.setdefault("padding_idx", self.padding_idx)
        return finish_logits(self.products(hidden), **options)

    def loss(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"], **options: Unpack[LossOptions]
    ) -> Float[Tensor, "*result"]:
        """Return the cross entropy of `targets` under `softmax(logits(hidden))`, in nats, without making the logits.

        A subclass that overrides `logits` alone gets the loss of its logits.

        Args:
            hidden: What the last block gives.
            targets: Token IDs, or `ignore_index`.
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
        linear = self._linear(hidden) if is_current(type(self), "as_linear", "products") else None
        if linear is not None:
            options["vocab_size"] = self.vocab_size
            return linear_cross_entropy(*linear, targets, **options)
        return cross_entropy_over_rows(
            hidden, self.products, targets, vocab_size=self.vocab_size, rows_at_once=ROWS_AT_ONCE, options=options
        )

    def token_log_probs(
        self, hidden: Float[Tensor, "*batch D"], tokens: Int[Tensor, "*batch"], **options: Unpack[ScoreOptions]
    ) -> Float[Tensor, "*batch"]:
        """`token_log_probs` over the rows: the log-probability of each given token, in nats, without logits."""
        return -self.loss(hidden, tokens, **options, reduction="none")

    def _linear(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return `as_linear(hidden)`, or `None` where a subclass has overridden `rows` alone."""
        return self.as_linear(hidden) if is_current(type(self), "as_linear", "rows") else None


def check_sizes(*, padding_idx: int | None, vocab_size: int, **sizes: int) -> int | None:
    """Refuse sizes below 1 and a padding row that is not in the vocabulary.

    Returns:
        `padding_idx` counted from 0: as in torch, -1 is the last token.

    Raises:
        SizeError: Naming the size.
    """
    for name, size in {"vocab_size": vocab_size, **sizes}.items():
        if size < 1:
            raise SizeError(f"{name} must be at least 1, not {size}.")
    if padding_idx is None:
        return None
    if not -vocab_size <= padding_idx < vocab_size:
        raise SizeError(f"padding_idx {padding_idx} is not one of the {vocab_size} tokens (0..{vocab_size - 1}).")
    return padding_idx % vocab_size


def loss_of_logits(
    logits: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, vocab_size: int, options: Mapping[str, Any]
) -> Tensor:
    """Return the cross entropy of `targets` under `softmax(logits(hidden))`: for logits that only this call gives."""

    def products(part: Tensor, start: int, stop: int) -> Tensor:
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
    """Refuse hidden states that are not as wide as the rows that they are compared with.

    Raises:
        ShapeError: Naming both.
    """
    if hidden.dim() == 0 or hidden.shape[-1] != embed_dim:
        raise ShapeError(
            f"hidden {tuple(hidden.shape)} does not fit a table of width {embed_dim}: pass (..., {embed_dim})."
        )
