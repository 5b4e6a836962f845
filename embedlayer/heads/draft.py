"""An LM head over some rows of another head, for draft models of speculative decoding (FR-Spec, EAGLE-3)."""

import sys
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, Unpack, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from embedlayer.core.computed_buffers import ComputedBuffers
from embedlayer.core.devices import autocast
from embedlayer.core.documents import IGNORED
from embedlayer.core.errors import SizeError, TokenIdError
from embedlayer.core.formatting import a_or_an
from embedlayer.core.option_docs import show_options
from embedlayer.core.torch_state import (
    calls_forward,
    is_current,
    is_observed,
    plain_operators_only,
    refuse_per_sample_gradients,
)
from embedlayer.heads.adapted_rows import AdaptedRows
from embedlayer.heads.draft_map import check_draft_tokens
from embedlayer.heads.logit_source import ModelLogitOptions
from embedlayer.heads.output import OutputHead, logits_of_call, options_after_call
from embedlayer.heads.prediction import PredictionHead
from embedlayer.kernels.index_check import IndexCheck
from embedlayer.losses.converted_rows import check_dtypes, in_head_dtype
from embedlayer.losses.definition import finish
from embedlayer.losses.fixed_row import linear_with_fixed_row
from embedlayer.losses.linear import cross_entropy_of
from embedlayer.losses.logit_arguments import resolve_logits
from embedlayer.losses.next_bytes import NextBytes, check_next_bytes
from embedlayer.losses.options import (
    Impl,
    LogitOptions,
    LogitSettings,
    LossOptions,
    LossSettings,
    ScoreOptions,
    Statistic,
    check_options,
)
from embedlayer.losses.padding import own_tokens, padded_tokens
from embedlayer.losses.statistics import TokenStatistics, token_statistics_of
from embedlayer.losses.uncomputed_logits import LinearLogits, UncomputedLogits
from embedlayer.tables.conversions import as_table
from embedlayer.tables.lookup import LookupTable
from embedlayer.tables.table import TokenTable, check_width, logits_of_function

Outside = Literal["ignore", "count", "error"]
"""What a loss does with a target that is not in the draft vocabulary; see `DraftHead.loss`."""


class DraftHead(ComputedBuffers):
    """LM head over N of the V tokens of another head: `head(hidden)[..., token_ids]`, without the other logits.

    Draft ID i is token `token_ids[i]`. The draft head has no rows itself: it reads those of the other head or table at
    each call, without registering it, and its loss trains them. It has no state either: save the token IDs with
    `save_draft_tokens`. The bias, scale, soft cap and padding token of the other head apply. Over the head of a patched
    model, losses and statistics are of the model's distribution, and `draft_head(hidden)` is the product alone.

    Token IDs in arguments and results are those of the full vocabulary, except where draft IDs are named. With `names`
    they are those of another tokenizer: `DraftMap.draft_head` builds such a head.

    Args:
        head: An `OutputHead` or `PredictionHead`, tied or untied, or a `TokenTable` of any kind. Every rank of a
            sharded table must make the same calls.
        token_ids: The tokens, each once, in any order. EAGLE-3's files need ascending order.
        names: The IDs by which arguments and results name these tokens, in the same order, if they are those of another
            tokenizer; `None` for `token_ids`. `bias` and `padding_idx` remain those of the full vocabulary of the head.
        vocab_size: Number of tokens of that tokenizer; only with `names`.

    Attributes:
        head: The head or table that is read.
        token_ids: The tokens, a tuple: the rows that are read.
        names: The IDs in arguments and results, a tuple: `token_ids`, unless they were given.
        vocab_size: Number of tokens of the full vocabulary, V, in which `names` are.
        draft_vocab_size: Number of tokens of the draft vocabulary, N.

    Raises:
        TokenIdError: A token is outside the full vocabulary, or one of `names` not below `vocab_size`.

    Example:
        >>> head = OutputHead(TokenEmbedding(100, 8))
        >>> draft = DraftHead(head, [2, 7, 98, 99])
        >>> draft(torch.randn(2, 5, 8)).shape, len(list(draft.parameters()))
        (torch.Size([2, 5, 4]), 0)
        >>> draft.to_tokens(torch.tensor([3, 0])), draft.to_draft(torch.tensor([98, 50]))
        (tensor([99,  2]), tensor([ 2, -1]))

    Reference: Zhao et al., FR-Spec: accelerating large-vocabulary language models via frequency-ranked speculative
    sampling, 2025; Li et al., EAGLE-3, 2025.
    """

    head: OutputHead | PredictionHead | TokenTable
    token_tensor: Tensor
    name_tensor: Tensor
    draft_tensor: Tensor

    def __init__(
        self,
        head: OutputHead | PredictionHead | TokenTable,
        token_ids: Iterable[int] | Int[Tensor, " N"],
        *,
        names: Iterable[int] | Int[Tensor, " N"] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(head, OutputHead | PredictionHead | nn.Embedding | LookupTable):
            raise SizeError(
                f"A draft head reads the rows of an OutputHead, a PredictionHead or a TokenTable, not of "
                f"{a_or_an(head)}. A head of transformers is one after embedlayer.patch(model)."
            )
        if not isinstance(head, OutputHead | PredictionHead):
            head = as_table(head, registered=False)
        self.__dict__["head"] = head  # past Module.__setattr__: referred to, not registered
        self._num_rows = self._current_vocab_size()
        self.token_ids = self.names = check_draft_tokens(token_ids, self._num_rows)
        self.vocab_size, self.draft_vocab_size = self._num_rows, len(self.token_ids)
        if (names is None) != (vocab_size is None):
            raise SizeError("names and vocab_size belong together: the tokenizer whose IDs these are has both.")
        if names is not None and vocab_size is not None:
            self.vocab_size, self.names = vocab_size, check_draft_tokens(names, vocab_size)
            if len(self.names) != self.draft_vocab_size:
                raise SizeError(f"names has {len(self.names)} tokens, and token_ids {self.draft_vocab_size}.")
        self.token_check = IndexCheck(self.vocab_size, "token id")
        self.draft_check = IndexCheck(self.draft_vocab_size, "token id")
        padding_idx = self._logit_options().get("padding_idx")
        self._padding = (padding_idx, self._draft_id(padding_idx))
        self.recompute_buffers(self._device())

    def buffer_values(self) -> dict[str, Tensor]:
        """Return the maps between IDs: `token_tensor` and `name_tensor` `(N,)`, and `draft_tensor` `(V,)`.

        These are the rows and the names of draft IDs, and the draft IDs of names: -1 for tokens outside the draft
        vocabulary.
        """
        tokens, names = torch.tensor(self.token_ids), torch.tensor(self.names)
        drafts = torch.full((self.vocab_size,), -1).index_copy(0, names, torch.arange(len(names)))
        return {"token_tensor": tokens, "name_tensor": names, "draft_tensor": drafts}

    def to_tokens(self, draft_ids: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Return the token ID of each draft ID, as int64.

        Raises:
            TokenIdError: On the CPU, a draft ID is outside `0..N - 1`. See `LookupTable.look_up` for accelerators.
        """
        draft_ids, _ = self.draft_check(draft_ids)
        return self.name_tensor.to(draft_ids.device)[draft_ids.long()]

    def to_draft(self, token_ids: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Return the draft ID of each token ID, as int64; -1 for a token that is not in the draft vocabulary.

        Raises:
            TokenIdError: On the CPU, a token is outside the full vocabulary. See `LookupTable.look_up` for
                accelerators, where its draft ID is -1.
        """
        token_ids, bad = self.token_check(token_ids)
        draft_ids: Tensor = self.draft_tensor.to(token_ids.device)[token_ids.long()]
        return draft_ids if bad is None else draft_ids.masked_fill(bad, -1)

    def count_outside(self, targets: Int[Tensor, "*batch"], *, ignore_index: int = IGNORED) -> Int[Tensor, ""]:
        """Return how many targets are not in the draft vocabulary, as a scalar tensor, to log the coverage.

        Args:
            targets: Token IDs, or `ignore_index`, which is not counted, `(...)`.
            ignore_index: Value of targets that do not count.

        Raises:
            TokenIdError: On the CPU, a target is neither a token of the full vocabulary nor `ignore_index`.
        """
        return self._draft_targets(targets, ignore_index)[1].sum()

    def forward(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch N"]:
        """Return a logit for each token of the draft vocabulary, `(..., D)` to `(..., N)`, in the order of draft IDs.

        If the `forward` of the other head is overridden or replaced, or has hooks, or the table computes logits in its
        own way, all logits are computed and the draft vocabulary is selected.

        Raises:
            SizeError: The other head has another number of tokens than when this head was built.
            CheckpointError: PEFT has replaced a module of the head by one that a draft head cannot read.
        """
        options = self._draft_options(self._logit_options())
        settings = LogitSettings(**options)
        operands = self._operands(hidden, settings)
        if operands is None:
            return self._selected_logits({}, hidden)
        states, rows = operands
        if settings.batch_invariant:
            return LinearLogits(states, rows, **options).head_logits()
        check_dtypes(states, rows.dtype, settings.head_dtype)
        padding_idx = settings.padding_idx
        products = in_head_dtype(
            lambda wide: linear_with_fixed_row(wide, rows, padding_idx), states, settings.head_dtype
        )
        return finish(products, settings)

    @show_options(LogitOptions, ScoreOptions, LossOptions)
    def loss(
        self,
        hidden: Float[Tensor, "*batch D"],
        targets: Int[Tensor, "*batch"],
        *,
        outside: Outside = "ignore",
        **options: Unpack[LossOptions],
    ) -> Float[Tensor, "*result"]:
        """Return the cross entropy of `targets` under `softmax(draft_head(hidden))`, in nats, without all logits.

        The draft head gives a target outside the draft vocabulary the probability 0, so its cross entropy is infinite.
        `outside` says what happens instead:

        - `"ignore"`: As with `ignore_index`, its loss is 0 without gradient, and it does not count in the mean.
        - `"count"`: Its loss is 0 without gradient, and it counts in the mean: the sum is divided by all targets that
          are not `ignore_index`. EAGLE-3's training masks such positions in this way.
        - `"error"`: `TokenIdError`. On an accelerator this waits for the device.

        `count_outside` returns the number of such targets.

        Args:
            hidden: Output of the last block, after its final norm, `(..., D)`.
            targets: Token IDs of the full vocabulary, or `ignore_index`, `(...)`.
            outside: `"ignore"`, `"count"` or `"error"`.
            **options: See `LossOptions`. `bias` and `padding_idx` are those of the full vocabulary, and `vocab_size`
                can only be V.

        Returns:
            A scalar, or `(...)` with `reduction="none"`. If no target is left, the mean is 0.

        Raises:
            ShapeError: Shapes or dtypes do not fit each other.
            SizeError: `outside` or an option is unknown or outside its range; or the other head has another number of
                tokens than when this head was built.
            TokenIdError: On the CPU, a target is neither a token of the full vocabulary nor `ignore_index`. Or a target
                is outside the draft vocabulary, with `outside="error"`; the message names the first one. In exports and
                under `torch.func` transforms neither is checked, and such a target is ignored.
            CheckpointError: PEFT has replaced a module of the head by one that a draft head cannot read; or the head is
                that of a patched model, and what the model does to its logits is not known.
        """
        check_options(options, LossOptions, f"{type(self).__name__}.loss")
        if outside not in get_args(Outside):
            raise SizeError(f"outside must be one of {', '.join(get_args(Outside))}, not {outside!r}.")
        ignore_index = options.get("ignore_index", IGNORED)
        drafts, missing = self._draft_targets(targets, ignore_index)
        if outside == "error" and not plain_operators_only():
            drafts = require_draft_tokens(drafts, targets, missing)
        logits, loss = self._described(hidden, options)
        if outside == "count" and loss.reduction == "mean":
            total = cross_entropy_of(logits, drafts, loss._replace(reduction="sum"))
            return total / (targets != ignore_index).sum().clamp(min=1)
        return cross_entropy_of(logits, drafts, loss)

    @show_options(LogitOptions, ScoreOptions)
    def token_log_probs(
        self, hidden: Float[Tensor, "*batch D"], tokens: Int[Tensor, "*batch"], **options: Unpack[ScoreOptions]
    ) -> Float[Tensor, "*batch"]:
        """Return the log-probability of each token under `softmax(draft_head(hidden))`, in nats, `(...)`.

        The draft head never predicts a token outside the draft vocabulary: the result is -inf, without gradient.

        Args:
            hidden: Output of the last block, after its final norm, `(..., D)`.
            tokens: Token IDs of the full vocabulary, or `ignore_index`, whose result is 0, `(...)`.
            **options: See `ScoreOptions`, and `loss`.
        """
        check_options(options, ScoreOptions, f"{type(self).__name__}.token_log_probs")
        scores = -self.loss(hidden, tokens, **options, reduction="none")
        missing = self._draft_targets(tokens, options.get("ignore_index", IGNORED))[1]
        return scores.masked_fill(missing, float("-inf"))

    @show_options(LogitOptions, ScoreOptions)
    def token_statistics(
        self,
        hidden: Float[Tensor, "*batch D"],
        tokens: Int[Tensor, "*batch"] | None = None,
        *,
        statistics: tuple[Statistic, ...] = ("log_probs", "entropy"),
        top_k: int = 0,
        next_bytes: NextBytes | None = None,
        **options: Unpack[ScoreOptions],
    ) -> TokenStatistics:
        """Return statistics of `softmax(draft_head(hidden))`, all from one pass; see `TokenStatistics`.

        `top_ids` are token IDs of the full vocabulary. Of equal logits, the lowest draft ID comes first. For a token
        outside the draft vocabulary `log_probs` is -inf without gradient, and `is_argmax` is `False`.

        Args:
            hidden: Output of the last block, after its final norm, `(..., D)`.
            tokens: Token IDs of the full vocabulary, or `ignore_index` for positions to leave out, `(...)`; `None` for
                all positions.
            statistics: Names of the fields of `TokenStatistics` to compute.
            top_k: K of `top_logits` and `top_ids`, at most N; 0 for neither.
            next_bytes: Events of the tokens, `NextBytes.of(tokenizer)`; `None` for no statistic of them.
            **options: See `ScoreOptions`, and `loss`.

        Raises:
            TokenIdError: On the CPU, a token is neither a token of the full vocabulary nor `ignore_index`.
            CheckpointError: As in `loss`.
        """
        check_options(options, ScoreOptions, f"{type(self).__name__}.token_statistics")
        drafts, missing = None, None
        if tokens is not None:
            drafts, missing = self._draft_targets(tokens, options.get("ignore_index", IGNORED))
            drafts = drafts.masked_fill(missing, 0)
        check_next_bytes(next_bytes, self.vocab_size)
        logits, loss = self._described(hidden, options)
        results = token_statistics_of(
            logits,
            drafts,
            loss._replace(ignore_index=IGNORED),
            statistics=statistics,
            top_k=top_k,
            next_bytes=None if next_bytes is None else next_bytes.selected(self.name_tensor),
        )
        if results.top_ids is not None:
            ids = self.to_tokens(results.top_ids.clamp(min=0))
            results = results._replace(top_ids=ids.where(results.top_ids >= 0, -1))
        if missing is not None and results.log_probs is not None:
            results = results._replace(log_probs=results.log_probs.masked_fill(missing, float("-inf")))
        if missing is not None and results.is_argmax is not None:
            results = results._replace(is_argmax=results.is_argmax & ~missing)
        return results

    @show_options(LogitOptions)
    def uncomputed_logits(
        self, hidden: Float[Tensor, "*batch D"], *, impl: Impl = "auto", **options: Unpack[LogitOptions]
    ) -> UncomputedLogits:
        """Describe the logits of the draft vocabulary without computing them, as `divergence` takes them.

        EAGLE-3 trains its draft model on the divergence from the target model's distribution over the draft vocabulary.
        That is the distribution of `DraftHead(target_head, token_ids)`.

        Args:
            hidden: Output of the last block, after its final norm, `(..., D)`.
            impl: Implementation of the cross entropy; see `ScoreOptions`.
            **options: Options that replace those of the head; see `LogitOptions`. `bias` and `padding_idx` are those of
                the full vocabulary.

        Raises:
            CheckpointError: As in `loss`.
        """
        check_options(options, LogitOptions, f"{type(self).__name__}.uncomputed_logits", impl=impl)
        of_model, passed = self._model_options(), options
        options = {**({} if of_model is None else of_model.logit_options()), **options}
        of_draft = self._draft_options({**self._logit_options(), **options})
        if not calls_forward(self, _FORWARD):
            return logits_of_call(self(hidden), **self._draft_options(self._options_after_call(passed)))
        operands = self._operands(hidden, LogitSettings(**of_draft))
        if operands is None and not isinstance(self.head, TokenTable):
            options = self._options_after_call(passed)
            if is_observed(self.head) or is_observed(_output(self.head)):  # hooks see one call with all hidden states
                return logits_of_call(self._selected_logits(options, hidden))
        if operands is None:
            function, is_invariant = partial(self._selected_logits, options), of_draft.get("batch_invariant", False)
            return logits_of_function(function, hidden, self.draft_vocab_size, batch_invariant=is_invariant)
        return LinearLogits(*operands, impl=impl, **of_draft)

    def untied(self) -> OutputHead:
        """Return an untied `OutputHead` over the draft IDs, with a copy of the N rows and of the bias.

        Use it to decode with fixed weights, where copying the rows at each step would cost as much as it saves; and as
        the `lm_head` of an EAGLE-3 draft model, which trains rows of its own. Its token IDs are draft IDs. The
        transform of a `PredictionHead` is not copied.

        Raises:
            SizeError: The head has hooks or computes logits in its own way, or its model adds a bias behind it (BART).
            CheckpointError: PEFT has replaced a module of the head by one that a draft head cannot read.
        """
        self._check_vocab_size()
        table = self._table()
        if not self._is_product(table):
            raise SizeError(
                "The head that this DraftHead reads has hooks, or overrides forward or logits: rows alone do not give "
                "its logits."
            )
        of_model = self._model_options()
        if of_model is not None and of_model.bias is not None:
            raise SizeError(
                f"The model adds {of_model.bias.name} to the logits behind this head, and it has one number for each "
                f"token of the full vocabulary: use the DraftHead itself."
            )
        shaping = self._draft_options(self._logit_options())
        bias = shaping.pop("bias", None)
        with torch.no_grad():
            rows = self._rows(table, self._device(), shaping.get("head_dtype"))
            options: dict[str, Any] = {**shaping, "vocab_size": len(rows), "embed_dim": rows.shape[1]}
            head = OutputHead(bias=bias is not None, device="meta", **options)
            head.weight = nn.Parameter(rows)
            head.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        head.model_options = of_model
        return head

    def extra_repr(self) -> str:
        """Return the sizes of both vocabularies for `print`: `"4 of 100 tokens"`."""
        return f"{self.draft_vocab_size} of {self.vocab_size} tokens"

    def _described(self, hidden: Tensor, options: ScoreOptions) -> tuple[UncomputedLogits, LossSettings]:
        if options.get("vocab_size") not in (None, self.vocab_size):
            raise SizeError(f"This draft head is of {self.vocab_size} tokens, not vocab_size={options['vocab_size']}.")
        return resolve_logits(hidden, self, {**options, "vocab_size": None, "ignore_index": IGNORED})

    def _draft_targets(self, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        """Return the draft ID of each target, or -100 where there is none, and a mask of targets outside the draft."""
        ignored = targets == ignore_index
        drafts = self.to_draft(targets.masked_fill(ignored, 0))
        missing = (drafts < 0) & ~ignored
        return drafts.masked_fill(missing | ignored, IGNORED), missing

    def _operands(self, hidden: Tensor, options: LogitSettings) -> tuple[Tensor, Tensor] | None:
        """Return two tensors whose product is the raw draft logits: `(..., K)`, and rows `(N, K)`."""
        # K is the width of the stored rows, as in `TokenTable.as_linear`. `None` if the logits are no product of rows.
        self._check_vocab_size()
        table = self._table()
        if not self._is_product(table):
            return None
        pads, head_dtype, states = options.batch_invariant, options.head_dtype, hidden
        if isinstance(self.head, PredictionHead):
            states = self.head.transformed(hidden, batch_invariant=pads)
        check_width(
            states, self.head.embed_dim if isinstance(self.head, TokenTable) else _output(self.head).in_features
        )
        if table is not None and not table.row_sparse and _computes_logits_by(table, "as_linear"):
            wide = states if head_dtype is None else states.to(head_dtype)
            linear = in_head_dtype(table.as_linear, padded_tokens(wide) if pads else wide, head_dtype)
            if linear is not None:
                x = own_tokens(linear[0], states) if pads else linear[0]
                return x, linear[1].index_select(0, self.token_tensor.to(hidden.device))
        return states, self._rows(table, hidden.device, head_dtype)

    def _rows(self, table: TokenTable | None, device: torch.device, head_dtype: torch.dtype | None) -> Tensor:
        """Return the rows of the draft vocabulary, `(N, D)`, as a new tensor, for products in `head_dtype`."""
        ids = self.token_tensor.to(device)
        if table is not None:
            if head_dtype is None:
                return table.look_up(ids)
            with autocast(device, None):
                return table.vectors_as(ids, head_dtype)
        rows: Tensor = _output(self.head).weight.index_select(0, ids)
        return rows

    def _table(self) -> TokenTable | None:
        """Return the table whose rows are read, with PEFT's adapters; `None` for an untied head."""
        table = self.head if isinstance(self.head, TokenTable) else _output(self.head).adapted_table
        if table is not None and "opacus" in sys.modules:
            refuse_per_sample_gradients(table)
        return table

    def _is_product(self, table: TokenTable | None) -> bool:
        """Return whether the logits are products with the rows: no method that computes them is changed or hooked."""
        head = self.head
        if isinstance(head, PredictionHead) and not calls_forward(head, _PREDICTION_FORWARD):
            return False
        if not isinstance(head, TokenTable) and not calls_forward(_output(head), _OUTPUT_FORWARD):
            return False
        return table is None or _computes_logits_by(table, "look_up")

    def _check_vocab_size(self) -> None:
        """Check that the head has as many tokens as when this head was built; an edit may have renumbered them."""
        size = self._current_vocab_size()
        if size != self._num_rows:
            raise SizeError(
                f"The vocabulary had {self._num_rows} tokens when this DraftHead was built, and has {size} now: build "
                f"it again with the new token IDs."
            )

    def _selected_logits(self, options: LogitOptions, hidden: Tensor) -> Tensor:
        """Return the draft logits, selected from all logits; `options` are in terms of the full vocabulary."""
        ids = self.token_tensor.to(hidden.device)
        if isinstance(self.head, TokenTable):
            return self.head.logits(hidden, **options).index_select(-1, ids)
        return finish(self.head(hidden).index_select(-1, ids), LogitSettings(**self._draft_options(options)))

    def _logit_options(self) -> LogitOptions:
        """Return the logit options of the head, in terms of the full vocabulary."""
        if isinstance(self.head, TokenTable):
            return {"padding_idx": self.head.padding_idx}
        return _output(self.head).logit_options()

    def _model_options(self) -> ModelLogitOptions | None:
        """Return what a patched model does to the logits outside the head; `None` for nothing."""
        return None if isinstance(self.head, TokenTable) else _output(self.head).model_options

    def _options_after_call(self, options: LogitOptions) -> LogitOptions:
        """Return what is done to logits that a call has computed; see `options_after_call`."""
        return options_after_call(self, self._logit_options(), self._model_options(), options)

    def _draft_options(self, options: LogitOptions) -> LogitOptions:
        """Return a copy of logit options in terms of draft IDs: the bias of its tokens, and the padding token."""
        changed = options.copy()
        bias, padding_idx = options.get("bias"), options.get("padding_idx")
        if bias is not None:
            changed["bias"] = bias.index_select(0, self.token_tensor.to(bias.device))
        if padding_idx is not None:
            known, draft_id = self._padding
            changed["padding_idx"] = draft_id if padding_idx == known else self._draft_id(padding_idx)
        return changed

    def _draft_id(self, token: int | None) -> int | None:
        """Return the draft ID of a token; `None` for `None`, and for a token outside the draft vocabulary."""
        return self.token_ids.index(token) if token is not None and token in self.token_ids else None

    def _current_vocab_size(self) -> int:
        """Return the number of tokens that the head or table has now, V."""
        return self.head.vocab_size if isinstance(self.head, TokenTable) else _output(self.head).out_features

    def _device(self) -> torch.device:
        """Return the device of the head's rows."""
        table = self._table()
        table = table.table if isinstance(table, AdaptedRows) else table
        return next(_output(self.head).parameters()).device if table is None else table.device


def _output(head: OutputHead | PredictionHead | TokenTable) -> OutputHead:
    """Return the part of a head that multiplies with the rows of the vocabulary; `head` must not be a table."""
    assert not isinstance(head, TokenTable)
    return head.output if isinstance(head, PredictionHead) else head


def _computes_logits_by(table: TokenTable, method: str) -> bool:
    """Return whether a method of a table gives the rows of its logits: no subclass has changed only these."""
    return all(is_current(type(table), method, definition) for definition in ("rows", "raw_logits", "logits"))


@torch.library.custom_op("embedlayer::require_draft_tokens", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def require_draft_tokens(drafts: Tensor, targets: Tensor, missing: Tensor) -> Tensor:
    """Raise an error for the first target outside the draft vocabulary; else return a copy of `drafts`."""
    # A custom operator, so that `torch.compile` keeps it as one node. It reads values: an accelerator waits.
    places = missing.flatten().nonzero().flatten()
    if len(places):
        place, length = int(places[0]), targets.shape[-1] if targets.dim() else 1
        raise TokenIdError(
            f"token id {int(targets.flatten()[place])} at row {place // length}, column {place % length} is outside "
            f"the draft vocabulary: pass outside='ignore' or 'count'."
        )
    return drafts.clone()


@require_draft_tokens.register_fake
def _(drafts: Tensor, targets: Tensor, missing: Tensor) -> Tensor:
    return torch.empty_like(drafts)


_FORWARD, _OUTPUT_FORWARD, _PREDICTION_FORWARD = DraftHead.forward, OutputHead.forward, PredictionHead.forward
"""The methods whose products a draft head computes for some rows, saved at import to detect later changes."""
