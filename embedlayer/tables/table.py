"""A token table, read in two directions: by token ID at the input, against all rows at the output.

`table(ids)` returns vectors; `table.logits(hidden)` and `table.loss(hidden, targets)` read the same rows as the weight
of an LM head. Every storage format is a `TokenTable`. Tying is not a flag: both ends use the same object.
"""

import sys
from abc import ABC
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.core.block_sizes import TABLE_ROWS, block_size
from embedlayer.core.devices import autocast, device_kind
from embedlayer.core.errors import ShapeError
from embedlayer.core.option_docs import show_options
from embedlayer.core.shapes import Ids, Vectors
from embedlayer.core.torch_state import is_current, recompute_weights, refuse_per_sample_gradients
from embedlayer.losses.definition import finish
from embedlayer.losses.head_outputs import HeadOutputs
from embedlayer.losses.options import Impl, LogitOptions, LogitSettings, check_options, check_token_options
from embedlayer.losses.rows import check_dtypes, in_head_dtype, linear_with_fixed_row, row_within
from embedlayer.tables.lookup import LookupTable

if TYPE_CHECKING:
    from embedlayer.losses.uncomputed_logits import TokenChoice, UncomputedLogits


class TokenTable(LookupTable, HeadOutputs, ABC):
    """Abstract: a table that is read in two directions, by token ID at the input and against all rows at the output.

    `table(ids)` looks vectors up (see `LookupTable`). `logits(hidden)` and `loss(hidden, targets)` multiply a hidden
    state by all rows, so the table can also be the weight of an LM head. A subclass implements `look_up` and `rows`;
    `logits`, `loss` and the other methods of `HeadOutputs` follow from these.

    The rows of a row-sparse table learn from look-ups only. If they are trained, the backward pass of `logits`
    or `loss` raises `ShapeError`, because it would give a gradient to every row.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type of looked-up vectors and of `rows`. What is stored may have another one."""
        return self.rows(0, 1).dtype

    def rows_as(self, start: int, stop: int, dtype: torch.dtype) -> Float[Tensor, "N D"]:
        """Return `rows(start, stop)` for products in `dtype`.

        Rows that are computed from others have this dtype, and were not rounded to that of the table before. Rows that
        are stored are returned as they are, and products convert them.

        Args:
            start: First row.
            stop: Last row + 1.
            dtype: Dtype of the products.
        """
        return self.rows(start, stop)

    def vectors_as(self, ids: Ids, dtype: torch.dtype) -> Vectors:
        """Return `look_up(ids)` for products in `dtype`, as `rows_as` does."""
        return self.look_up(ids)

    def as_linear(self, hidden: Float[Tensor, "*batch D"]) -> tuple[Tensor, Tensor] | None:
        """Return two tensors whose product is the raw logits of all rows, or `None` if the table stores no such matrix.

        For the result `(x, matrix)`, `x @ matrix.T` equals `hidden @ rows.T`. The shapes are `(..., K)` and
        `(num_rows, K)`, where K is the width of the stored rows: D, or R in a `FactorizedEmbedding` of rank R.

        Tables that store a matrix override this method, and `logits`, `loss` and the like use the two tensors. For
        `None` those methods call `raw_logits`, which reads the rows block by block.

        Args:
            hidden: Output of the last block, `(..., D)`.
        """
        return None

    def raw_logits(
        self, hidden: Float[Tensor, "*batch D"], start: int = 0, stop: int | None = None
    ) -> Float[Tensor, "*batch N"]:
        """Return `hidden @ rows(start, stop).T` as a new tensor: logits before scale, bias, soft cap and padding.

        The products have the dtype of `hidden`, whatever dtype the rows have, or that of autocast.

        Args:
            hidden: Output of the last block, `(..., D)`.
            start: First row.
            stop: Last row + 1; `None` for all V tokens.

        Returns:
            Raw logits, `(..., stop - start)`.
        """
        if self._forward_pre_hooks:
            recompute_weights(self)
        stop = self.vocab_size if stop is None else stop
        linear = self._linear(hidden)
        if linear is not None:
            states, matrix = linear
            if start or stop != matrix.shape[0]:  # the gradient of a slice is a copy
                matrix = matrix[start:stop]
            return linear_with_fixed_row(states, matrix, row_within(self.padding_idx, start, stop))
        parts, size = [], block_size(TABLE_ROWS, device_kind(hidden))
        for first in range(start, stop, size):
            last = min(first + size, stop)
            fixed = row_within(self.padding_idx, first, last)
            parts.append(linear_with_fixed_row(hidden, self.rows_as(first, last, hidden.dtype), fixed))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    @show_options(LogitOptions)
    def logits(self, hidden: Float[Tensor, "*batch D"], **options: Unpack[LogitOptions]) -> Float[Tensor, "*batch V"]:
        """Return the logits of all tokens: `hidden @ rows.T`, then scale, bias and soft cap if `options` contain them.

        This is the product with the stored rows. What a model does to its logits beyond that, such as a soft cap, is
        not applied. The factor `table.scale` is for look-ups and is not applied either. The padding row is multiplied
        like every row and gets no gradient; with `mask_padding` its logit is -inf.

        Args:
            hidden: Output of the last block, `(..., D)`.
            **options: See `LogitOptions`.

        Raises:
            ShapeError: `hidden` has another width than the rows or, without `head_dtype` and autocast, another dtype.
        """
        check_options(options, LogitOptions, f"{type(self).__name__}.logits")
        if "opacus" in sys.modules:
            refuse_per_sample_gradients(self)
        check_width(hidden, self.embed_dim)
        options.setdefault("padding_idx", self.padding_idx)
        settings = LogitSettings(**options)
        if settings.batch_invariant:
            return self._products(hidden, "auto", options).head_logits()
        check_dtypes(hidden, self.dtype, settings.head_dtype)
        return finish(in_head_dtype(self.raw_logits, hidden, settings.head_dtype), settings)

    @show_options(LogitOptions)
    def uncomputed_logits(
        self, hidden: Float[Tensor, "*batch D"], *, impl: Impl = "auto", **options: Unpack[LogitOptions]
    ) -> "UncomputedLogits":
        """Describe `logits(hidden)` without computing them, as losses, statistics and divergences take them.

        In a subclass that overrides only `logits`, they are the logits which that override returns.

        Args:
            hidden: Output of the last block, `(..., D)`.
            impl: Implementation of the cross entropy; see `ScoreOptions`. It has an effect on stored rows only.
            **options: See `LogitOptions`.
        """
        check_options(options, LogitOptions, f"{type(self).__name__}.uncomputed_logits", impl=impl)
        if "opacus" in sys.modules:
            refuse_per_sample_gradients(self)
        check_width(hidden, self.embed_dim)
        if not is_current(type(self), "uncomputed_logits", "logits"):
            function, is_invariant = partial(self.logits, **options), options.get("batch_invariant", False)
            return logits_of_function(function, hidden, self.vocab_size, batch_invariant=is_invariant)
        options.setdefault("padding_idx", self.padding_idx)
        return self._products(hidden, impl, options)

    def selected_logits(
        self, hidden: Tensor, choice: "TokenChoice", impl: Impl, options: LogitOptions
    ) -> "UncomputedLogits":
        """Describe the logits of some tokens, whose rows are gathered; `options` are those of all tokens, checked."""
        from embedlayer.losses.uncomputed_logits import LinearLogits

        if "opacus" in sys.modules:
            refuse_per_sample_gradients(self)
        check_width(hidden, self.embed_dim)
        options = {"padding_idx": self.padding_idx, **options}
        if not self.row_sparse and self._gives_logits("as_linear"):
            wide = hidden.to(options.get("head_dtype") or hidden.dtype)
            return self._products(wide, impl, options).of_tokens(choice)
        if not self._gives_logits("look_up"):
            function, is_invariant = partial(self.logits, **options), options.get("batch_invariant", False)
            columns = logits_of_function(function, hidden, self.vocab_size, batch_invariant=is_invariant)
            return columns.of_tokens(choice)
        settings = LogitSettings(**options)
        check_token_options(settings, self.vocab_size)
        rows = self.chosen_rows(choice.ids, settings.head_dtype)
        return LinearLogits(hidden, rows, impl=impl, **choice.settings(settings)._asdict())

    def chosen_rows(self, ids: Int[Tensor, " N"], head_dtype: torch.dtype | None) -> Float[Tensor, "N D"]:
        """Return the rows of some tokens as a new tensor, for products in `head_dtype`."""
        if head_dtype is None:
            return self.look_up(ids)
        with autocast(ids, None):
            return self.vectors_as(ids, head_dtype)

    def _gives_logits(self, method: str) -> bool:
        """Return whether a method reads the rows of the logits: no subclass has changed only the logits."""
        return all(is_current(type(self), method, definition) for definition in ("rows", "raw_logits", "logits"))

    def _products(self, hidden: Tensor, impl: Impl, options: LogitOptions) -> "UncomputedLogits":
        """Describe the logits that follow from the rows, even in a subclass that overrides `logits`."""
        from embedlayer.losses.rows import own_tokens, padded_tokens
        from embedlayer.losses.uncomputed_logits import BlockLogits, LinearLogits

        head_dtype, pads = options.get("head_dtype"), options.get("batch_invariant", False)
        check_dtypes(hidden, self.dtype, head_dtype)
        wide = hidden if head_dtype is None else hidden.to(head_dtype)
        wide = padded_tokens(wide) if pads else wide
        is_linear = is_current(type(self), "as_linear", "raw_logits")
        linear = in_head_dtype(self._linear, wide, head_dtype) if is_linear else None
        if linear is not None:
            states, matrix = linear
            if states is wide:  # a pass converts a chunk at a time
                states = hidden
            elif pads:
                states = own_tokens(states, hidden)
            return LinearLogits.of(states, matrix, LogitSettings(**options), vocab_size=self.vocab_size, impl=impl)
        rows_at_once = block_size(TABLE_ROWS, device_kind(hidden))
        return BlockLogits(hidden, self.raw_logits, self.vocab_size, rows_at_once, **options)

    def _linear(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return `as_linear(hidden)`, or `None` where its matrix may not be what `rows` returns."""
        return self.as_linear(hidden) if is_current(type(self), "as_linear", "rows") else None


def logits_of_function(
    logits: Callable[[Tensor], Tensor], hidden: Tensor, vocab_size: int, **options: Unpack[LogitOptions]
) -> "UncomputedLogits":
    """Describe the logits that any function computes, without computing them."""
    from embedlayer.losses.uncomputed_logits import BlockLogits

    return BlockLogits(
        hidden, lambda part, start, stop: logits(part)[..., start:stop], vocab_size, vocab_size, **options
    )


def check_width(hidden: Tensor, embed_dim: int) -> None:
    """Check that the last dimension of `hidden` is `embed_dim`; else raise a `ShapeError`."""
    if hidden.dim() == 0 or hidden.shape[-1] != embed_dim:
        raise ShapeError(f"hidden {tuple(hidden.shape)} does not fit a table of width {embed_dim}.")
