"""An LM head over some rows of another head, for draft models of speculative decoding (FR-Spec, EAGLE-3)."""

import operator
from collections.abc import Iterable
from typing import Any, Literal, Unpack, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from embedlayer.core.computed_buffers import ComputedBuffers
from embedlayer.core.documents import IGNORED
from embedlayer.core.errors import ShapeError, SizeError, TokenIdError
from embedlayer.core.formatting import a_or_an
from embedlayer.core.option_docs import show_options
from embedlayer.core.torch_state import calls_forward, plain_operators_only
from embedlayer.heads.output import OutputHead, finished_products, logits_of_call, options_after_call
from embedlayer.heads.prediction import PredictionHead
from embedlayer.kernels.index_check import IndexCheck
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
    check_options,
)
from embedlayer.losses.statistics import Statistic, TokenStatistics, token_statistics_of
from embedlayer.losses.uncomputed_logits import BlockLogits, LinearLogits, TokenChoice, UncomputedLogits
from embedlayer.tables.conversions import as_table
from embedlayer.tables.lookup import LookupTable
from embedlayer.tables.table import TokenTable

Outside = Literal["ignore", "count", "error"]
"""What a loss does with a target that is not in the draft vocabulary; see `DraftHead.loss`."""


def check_draft_tokens(token_ids: Iterable[int] | Int[Tensor, " N"], vocab_size: int) -> tuple[int, ...]:
    """Check the tokens of a draft vocabulary and return them in the given order: draft ID i is token `token_ids[i]`."""
    if isinstance(token_ids, Tensor | np.ndarray):
        if token_ids.ndim != 1:
            raise ShapeError(f"token_ids must be (N,), not {tuple(token_ids.shape)}.")
        ids = token_ids.tolist()  # of one type
        if ids and type(ids[0]) is int and min(ids) >= 0 and max(ids) < vocab_size and len({*ids}) == len(ids):
            return tuple(ids)
        token_ids = ids
    places: dict[int, int] = {}
    for place, entry in enumerate(token_ids):
        if isinstance(entry, bool) or not hasattr(entry, "__index__"):
            raise ShapeError(
                f"Entry {place} of token_ids is {entry!r}, not an integer. Pass mask.nonzero().flatten() for a mask."
            )
        token = operator.index(entry)
        if not 0 <= token < vocab_size:
            raise TokenIdError(
                f"token id {token} at place {place} of token_ids is outside the full vocabulary of {vocab_size} tokens."
            )
        if token in places:
            raise SizeError(
                f"Token {token} is at places {places[token]} and {place} of token_ids: name each token once."
            )
        places[token] = place
    if not places:
        raise SizeError("token_ids is empty: a draft vocabulary has at least one token.")
    return tuple(places)


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
        source = self._source
        self._num_rows = source.vocab_size
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
        padding_idx = source.padding_idx
        self._padding = (padding_idx, self.token_ids.index(padding_idx) if padding_idx in self.token_ids else None)
        self.recompute_buffers(self._device)

    def buffer_values(self) -> dict[str, Tensor]:
        """Return rows and names of draft IDs, `(N,)`, and draft IDs of names, `(V,)`, -1 outside the vocabulary."""
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
        logits = self._selected(hidden, "auto", {})
        if isinstance(logits, BlockLogits):  # as the other head returned them
            return logits.raw_logits(logits.hidden, 0, self.draft_vocab_size)
        assert isinstance(logits, LinearLogits)
        if logits.options.batch_invariant:
            return logits.head_logits()
        return finished_products(logits.hidden, logits.weight, logits.options)

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

        Args:
            hidden: Output of the last block, after its final norm, `(..., D)`.
            targets: Token IDs of the full vocabulary, or `ignore_index`, `(...)`.
            outside: `"ignore"`, `"count"` or `"error"`.
            **options: See `LossOptions`. `bias` and `padding_idx` are those of the full vocabulary, and `vocab_size`
                can only be V.

        Returns:
            A scalar, or `(...)` with `reduction="none"`. If no target is left, the mean is 0.

        Raises:
            SizeError: `outside` or an option is outside its range, or the other head has got another number of tokens.
            TokenIdError: On the CPU, a target is neither a token of the full vocabulary nor `ignore_index`; or, with
                `outside="error"`, one is outside the draft vocabulary. Exports and `torch.func` transforms check
                neither, and ignore such a target.
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
        logits, loss = self._resolved(hidden, options)
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
        drafts, missing = self._draft_targets(tokens, options.get("ignore_index", IGNORED))
        logits, loss = self._resolved(hidden, options)
        return -cross_entropy_of(logits, drafts, loss._replace(reduction="none")).masked_fill(missing, float("inf"))

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
            tokens: Token IDs of the full vocabulary, or `ignore_index`, `(...)`; `None` for all positions.
            statistics: See `token_statistics` of other heads, as for what follows.
            top_k: At most N.
            next_bytes: Events of the tokens of the full vocabulary.
            **options: See `ScoreOptions`, and `loss`.
        """
        check_options(options, ScoreOptions, f"{type(self).__name__}.token_statistics")
        drafts, missing = None, None
        if tokens is not None:
            drafts, missing = self._draft_targets(tokens, options.get("ignore_index", IGNORED))
            drafts = drafts.masked_fill(missing, 0)
        if next_bytes is not None:
            check_next_bytes(next_bytes, self.vocab_size)
            next_bytes = next_bytes.selected(self.name_tensor)
        logits, loss = self._resolved(hidden, options)
        found = token_statistics_of(logits, drafts, loss, statistics=statistics, top_k=top_k, next_bytes=next_bytes)
        log_probs, is_argmax, top_ids = found.log_probs, found.is_argmax, found.top_ids
        if log_probs is not None and missing is not None:
            log_probs = log_probs.masked_fill(missing, float("-inf"))
        if is_argmax is not None and missing is not None:
            is_argmax = is_argmax & ~missing
        if top_ids is not None:
            top_ids = self.to_tokens(top_ids.clamp(min=0)).where(top_ids >= 0, -1)
        return found._replace(log_probs=log_probs, is_argmax=is_argmax, top_ids=top_ids)

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
        source = self._source
        if isinstance(source, OutputHead):
            options = {**source.model_logit_options(), **options}
        if calls_forward(self, _FORWARD):
            return self._selected(hidden, impl, options)
        own = source.logit_options() if isinstance(source, OutputHead) else {}
        settings = LogitSettings(**options_after_call(self, own, options))
        return logits_of_call(self(hidden), **self._choice(hidden.device).settings(settings)._asdict())

    def untied(self) -> OutputHead:
        """Return an untied `OutputHead` over the draft IDs, with a copy of the N rows and of the bias.

        Use it to decode with fixed weights, where copying the rows at each step would cost as much as it saves; and as
        the `lm_head` of an EAGLE-3 draft model, which trains rows of its own. Its token IDs are draft IDs. The
        transform of a `PredictionHead` is not copied.

        Raises:
            SizeError: The head has hooks or computes logits in its own way, or its model adds a bias behind it (BART).
            CheckpointError: PEFT has replaced a module of the head by one that a draft head cannot read.
        """
        source, choice = self._source, self._choice(self._device)
        if isinstance(source, OutputHead):
            table, of_model = source.adapted_table, source.model_options
        else:
            table, of_model = source, None
        if of_model is not None and of_model.bias is not None:
            raise SizeError(
                f"The model adds {of_model.bias.name} to the logits behind this head, and it has one number for each "
                f"token of the full vocabulary: use the DraftHead itself."
            )
        with torch.no_grad():
            if table is None:
                rows = source.get_parameter("weight").index_select(0, choice.ids)
            else:
                rows = table.chosen_rows(choice.ids, getattr(source, "head_dtype", None))
            logits = source.selected_logits(rows[:0], choice, "auto", {})
            is_called = isinstance(self.head, PredictionHead) and not calls_forward(self.head, _PREDICTION_FORWARD)
            if is_called or not isinstance(logits, LinearLogits):
                raise SizeError(
                    "The head that this DraftHead reads has hooks, or overrides forward or logits: rows alone do not "
                    "give its logits."
                )
            options: dict[str, Any] = logits.options._asdict()
            bias, _ = options.pop("bias"), options.pop("temperature")
            options |= {"vocab_size": len(rows), "embed_dim": rows.shape[1]}
            head = OutputHead(bias=bias is not None, device="meta", **options)
            head.weight = nn.Parameter(rows)
            head.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        head.model_options = of_model
        return head

    def extra_repr(self) -> str:
        """Return the sizes of both vocabularies for `print`: `"4 of 100 tokens"`."""
        return f"{self.draft_vocab_size} of {self.vocab_size} tokens"

    @property
    def _source(self) -> OutputHead | TokenTable:
        """Return the head or table that has the rows."""
        return self.head.output if isinstance(self.head, PredictionHead) else self.head

    @property
    def _device(self) -> torch.device:
        """Return the device of the rows."""
        table = getattr(self._source, "own_table", self._source)
        return next(self._source.parameters()).device if table is None else table.device

    def _choice(self, device: torch.device) -> TokenChoice:
        """Return the tokens of the draft vocabulary, after a check that the full one has not changed."""
        if (size := self._source.vocab_size) != self._num_rows:  # an edit may have renumbered them
            raise SizeError(
                f"The vocabulary had {self._num_rows} tokens when this DraftHead was built, and has {size} now: build "
                f"it again with the new token IDs."
            )
        return TokenChoice(self.token_tensor.to(device), self._place)

    def _place(self, token: int) -> int | None:
        """Return the draft ID of a token of the head; `None` for one outside the draft vocabulary."""
        known, draft_id = self._padding
        if token == known:
            return draft_id
        return self.token_ids.index(token) if token in self.token_ids else None

    def _selected(self, hidden: Tensor, impl: Impl, options: LogitOptions) -> UncomputedLogits:
        """Describe the logits of the draft vocabulary; `options` are those of the full one, checked."""
        return self.head.selected_logits(hidden, self._choice(hidden.device), impl, options)

    def _resolved(self, hidden: Tensor, options: ScoreOptions) -> tuple[UncomputedLogits, LossSettings]:
        """Return the logits of the draft vocabulary, and the options of a loss whose targets are draft IDs."""
        if options.get("vocab_size") not in (None, self.vocab_size):
            raise SizeError(f"This draft head is of {self.vocab_size} tokens, not vocab_size={options['vocab_size']}.")
        return resolve_logits(hidden, self, {**options, "vocab_size": None, "ignore_index": IGNORED})

    def _draft_targets(self, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        """Return the draft ID of each target, or -100 where there is none, and a mask of targets outside the draft."""
        ignored = targets == ignore_index
        drafts = self.to_draft(targets.masked_fill(ignored, 0))
        missing = (drafts < 0) & ~ignored
        return drafts.masked_fill(missing | ignored, IGNORED), missing


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


_FORWARD, _PREDICTION_FORWARD = DraftHead.forward, PredictionHead.forward
"""Methods whose products are computed without a call, saved at import to detect later changes."""
