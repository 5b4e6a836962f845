"""The LM head: hidden states to logits and loss, with the rows of the input table (tied) or its own weight (untied)."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Unpack, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.core.errors import CheckpointError, ShapeError, SizeError
from embedlayer.core.formatting import a_or_an
from embedlayer.core.held_parameters import former_parameter, watch_replacement
from embedlayer.core.initialization import init_normal_, zero_rows_
from embedlayer.core.option_docs import show_options
from embedlayer.core.partitioned import refuse_partitioned
from embedlayer.core.torch_state import (
    PLAIN_TYPES,
    Proxy,
    calls_forward,
    fusible,
    is_observed,
    is_unchanged,
    leaf_of_trace,
)
from embedlayer.heads.adapted_rows import AdaptedRows, AdaptedTable, ChildReference, require_same_adapters
from embedlayer.heads.deferred import DeferredLogits, defer_logits
from embedlayer.heads.logit_source import HeadTensors, LogitsReport, ModelLogitOptions
from embedlayer.io.files import JsonObject
from embedlayer.losses.definition import finish
from embedlayer.losses.head_outputs import HeadOutputs
from embedlayer.losses.options import Impl, LogitOptions, LogitSettings, check_options, check_token_options
from embedlayer.losses.rows import check_dtypes, in_head_dtype, linear_with_fixed_row
from embedlayer.losses.uncomputed_logits import LinearLogits, TokenChoice, UncomputedLogits
from embedlayer.saving import Pretrained, describe
from embedlayer.tables.computed_weight import computed_weight
from embedlayer.tables.conversions import as_table
from embedlayer.tables.delta import DeltaEmbedding
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.lookup import check_sizes
from embedlayer.tables.table import TokenTable, check_width, logits_of_function

NEW_ROWS = "new_rows"
"""Name of the child of an untied head that has the rows which are trained separately; see `train_only_rows`."""

ROWS = "rows"
"""Name of the child of an untied head that stores its rows, if they are no dense weight."""

_OPTIONS = ("head_dtype", "batch_invariant", "softcap", "logit_scale", "mask_padding", "padding_idx")
"""Attributes of a head that are `LogitOptions`."""

SLIP = "OutputHead takes the width first, as nn.Linear does, and TokenEmbedding the number of tokens: you may mean"
"""What an error says if the sizes of a head fit exchanged."""


class OutputHead(Pretrained, HeadOutputs, nn.Linear):
    """LM head: one logit for each token, `finish_logits(hidden @ weight.T)`.

    `head(hidden)`, `loss` and all other methods are of one distribution, that of these logits. The head of a patched
    model is the exception, because its model may scale and cap the logits behind the head: there `head(hidden)` is the
    product alone, and `loss`, `token_log_probs`, `token_statistics` and `uncomputed_logits` are of the model's
    distribution (see `patch`).

    With a table the head is tied: it refers to the table and has no rows itself. There is one parameter and one key in
    the state, and `head.weight is table.weight`. With sizes the head is untied, an `nn.Linear` with its own weight:
    `OutputHead(embed_dim, vocab_size)`, in the order of `nn.Linear(in_features, out_features)`, which is not that of
    `TokenEmbedding(vocab_size, embed_dim)`. With `rows`, an untied head has its rows in a table of its own, such as the
    quantised ones of a checkpoint; it then has no `weight`.

    Args:
        table: The table to tie to; or for an untied head its `in_features`, the width of the hidden state, D.
        out_features: Number of tokens, V, of an untied head.
        in_features: The same as an integer `table`.
        vocab_size: Another name of `out_features`.
        embed_dim: Another name of `in_features`.
        bias: Whether to learn a bias for each token, which is added to its logit.
        softcap: Return `softcap * tanh(logits / softcap)`; `None` for no cap.
        logit_scale: Factor applied to `hidden @ weight.T`.
        mask_padding: Whether to set the logit of the padding token to -inf.
        padding_idx: Padding token of an untied head, whose row is initialised to zero and gets no gradient; `None` for
            no such token. A tied head has that of its table.
        init_std: Standard deviation of the normal initialisation of an untied head.
        head_dtype: `torch.float32` (or `"float32"`) for logits in float32 whatever dtype rows and hidden states have;
            see `LogitOptions`.
        batch_invariant: Whether the results of a token do not depend on the other tokens of a call; see `LogitOptions`.
        rows: Table with the rows of an untied head, which becomes its child `rows`, instead of sizes.
        device: Device of the rows of an untied head and of the bias.
        dtype: Dtype of the rows of an untied head and of the bias.

    Example:
        >>> table = TokenEmbedding(100, 8)
        >>> head = OutputHead(table)
        >>> head.weight is table.weight, len(list(head.parameters()))
        (True, 0)
        >>> head(table(torch.tensor([[1, 2, 3]]))).shape
        torch.Size([1, 3, 100])
        >>> OutputHead(8, 100)
        OutputHead(8, 100, untied)

    Reference: Press and Wolf, Using the output embedding to improve language models, 2017.
    """

    def __init__(
        self,
        table: TokenTable | int | None = None,
        out_features: int | None = None,
        *,
        in_features: int | None = None,
        vocab_size: int | None = None,
        embed_dim: int | None = None,
        bias: bool = False,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        mask_padding: bool = False,
        padding_idx: int | None = None,
        init_std: float = 0.02,
        head_dtype: torch.dtype | str | None = None,
        batch_invariant: bool = False,
        rows: TokenTable | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if isinstance(table, int):
            table, in_features = None, _one_of(table, in_features, "in_features")
        embed_dim = _one_of(embed_dim, in_features, "in_features (embed_dim)")
        vocab_size = _one_of(vocab_size, out_features, "out_features (vocab_size)")
        self.head_dtype = cast("torch.dtype | None", head_dtype)  # `__setattr__` checks and converts options
        self.batch_invariant = batch_invariant
        self.init_std = init_std
        self.softcap = softcap
        self.logit_scale = logit_scale
        self.mask_padding = mask_padding
        if rows is not None and table is not None:
            raise SizeError("OutputHead takes a table to tie to, or rows of its own, not both.")
        table = rows if table is None else table
        if table is None:
            if vocab_size is None or embed_dim is None:
                raise SizeError(
                    "OutputHead needs a table, OutputHead(table), or two sizes, OutputHead(embed_dim, vocab_size)."
                )
            padding_idx = check_sizes(padding_idx=padding_idx, vocab_size=vocab_size, embed_dim=embed_dim)
            self.padding_idx = padding_idx
            nn.Linear.__init__(self, embed_dim, vocab_size, bias=bias, device=device, dtype=dtype)
        else:
            table = as_table(table, registered=False)
            if (vocab_size, embed_dim, padding_idx) != (None, None, None):
                raise SizeError("An OutputHead takes its sizes and padding from the table: pass only the table.")
            if table.row_sparse:
                raise SizeError("A head cannot be tied to a row-sparse table. Use an untied head, or a TokenEmbedding.")
            nn.Module.__init__(self)
            self.in_features, self.out_features = table.embed_dim, table.vocab_size
            self.padding_idx = table.padding_idx
            zeros = nn.Parameter(torch.zeros(table.vocab_size, device=device, dtype=dtype)) if bias else None
            self.register_parameter("bias", zeros)
            if rows is not None:
                self.add_module(ROWS, rows)
        self.set_table(table)

    own_table: TokenTable | None = None
    """The table that `set_table` set: that of a tied head, or the trained rows of an untied one."""

    head_dtype: torch.dtype | None
    padding_idx: int | None

    table_references: Sequence[ChildReference] = ()
    """Where the table is found anew at each call, and those that share its weight; `follow` sets them."""

    head_reference: ChildReference | None = None
    adapted_rows: AdaptedRows
    """The rows of the table that `table_references` find, with PEFT's adapters."""

    def set_table(self, table: TokenTable | None) -> None:
        """Read the rows of a table from now on; with `None`, those of a weight of this head's own."""
        object.__setattr__(self, "own_table", table)  # past Module.__setattr__: referred to, not registered

    def follow(self, parent: nn.Module, table: str = "table", head: str = "head") -> "OutputHead":
        """From now on read the table as the child `table` of `parent`, so that the head sees PEFT's replacements.

        `DecoderLM`, `EmbeddingLayer` and `patch` call it; your own module with a table and a tied head calls it once.
        Supported are LoRA on the table, trainable tokens and a trained copy (`modules_to_save`). For any other module
        in the place of the table the next call of the head raises a `CheckpointError`, and so it does for LoRA on the
        head itself, unless this is PEFT's copy of the table's (`ensure_weight_tying=True`).

        Args:
            parent: The module that has the table and this head as children.
            table: Name of the table in `parent`.
            head: Name of this head in `parent`.

        Returns:
            This head.

        Example:
            >>> model = nn.Module()
            >>> model.table = TokenEmbedding(100, 8)
            >>> model.head = OutputHead(model.table).follow(model)
            >>> model.head.tied
            True
        """
        from embedlayer.integrations.peft import PeftReference

        return self.follow_references([PeftReference(parent, table)], PeftReference(parent, head))

    def follow_references(self, tables: list[ChildReference], head: ChildReference) -> "OutputHead":
        """From now on find the table anew at each call, so that the head sees modules that PEFT puts in its place.

        `follow` does this for a single table.

        Args:
            tables: Parent and name of each table. All share one weight, and their adapters must be equal.
            head: Parent and name of this head.

        Returns:
            This head.
        """
        self.table_references, self.head_reference = tables, head
        object.__setattr__(self, "adapted_rows", AdaptedRows(self._adapted_table))
        return self

    @property
    def table(self) -> TokenTable | None:
        """Return the table that the head reads now, with PEFT's adapters; `None` for an untied head.

        If PEFT wraps this head and adds the adapters to its logits itself, the table is returned without adapters.

        Raises:
            CheckpointError: PEFT has replaced the table or the head by a module that a tied head cannot read.
        """
        own, tables = self.own_table, self._resolved()
        if not tables:
            return own
        table, adapters, _ = require_same_adapters(tables)
        assert self.head_reference is not None
        if self.head_reference.adds_adapters(self, adapters):
            return own
        if not isinstance(table, TokenTable):
            if own is None and not adapters:
                return None
            raise CheckpointError(
                f"The table of a tied head was replaced by {a_or_an(table)}. Use TokenEmbedding.from_embedding."
            )
        if adapters:
            return self.adapted_rows
        return None if own is None and isinstance(table, TokenEmbedding) else table

    @property
    def adapted_table(self) -> TokenTable | None:
        """Return the table with PEFT's adapters, for code that reads rows of the head and does not call the head.

        Unlike `table`, the result has the adapters also if PEFT wraps this head and adds them to its logits itself.
        `None` for an untied head.

        Raises:
            CheckpointError: As in `table`; or PEFT wraps an untied head, whose rows then are not its logits.
        """
        table = self.table
        tables = self._resolved()
        if tables and require_same_adapters(tables).adapters:
            return self.adapted_rows
        if table is None and self.head_reference is not None:
            self.head_reference.require_unadapted(self)
        return table

    def _adapted_table(self) -> AdaptedTable:
        """Return the table that the references of `follow` find now, with the PEFT adapters on it."""
        return require_same_adapters(self._resolved())._replace(padding_idx=self.padding_idx)

    def _resolved(self) -> list[AdaptedTable]:
        """Return the tables that the references of `follow` find now, each with the PEFT adapters on it."""
        if not self.table_references:
            return []
        references = [each for each in self.table_references if each.module is not None]
        tables = [each.adapted_table() for each in references]
        if self.own_table is not None:  # the rows of an untied head follow no table
            return [] if self.own_table in self._modules.values() else tables
        weight = self._parameters.get("weight")  # transformers may tie and untie it
        found = []
        for each in tables if weight is not None else ():
            table = each.table
            while isinstance(table, DeltaEmbedding):
                table = table.base
            if table._parameters.get("weight") is weight:
                found.append(each)
        return found

    @property
    def tied(self) -> bool:
        """Return whether the head uses the rows of a table that is not its own."""
        return (self.own_table is not None and self.own_rows is None) or bool(self._resolved())

    @property
    def has_weight(self) -> bool:
        """Return whether the head stores its rows in a weight of its own: whether it is untied, without `own_rows`."""
        return self.own_rows is None and not self.tied

    @property
    def own_rows(self) -> TokenTable | None:
        """Return the table that stores the rows of an untied head; `None` if it is tied or has a weight."""
        return cast(TokenTable | None, self._modules.get(ROWS))

    # The weight gives the sizes, as in TokenEmbedding, so that an assigned weight of another size is right.

    @property
    def out_features(self) -> int:
        """Return the number of tokens, V, under the name that `nn.Linear` has for it."""
        return self._sizes()[0]

    @out_features.setter
    def out_features(self, size: int) -> None:
        self._stated_sizes = (size, self._stated_sizes[1])

    @property
    def in_features(self) -> int:
        """Return the width of the hidden states, D, under the name that `nn.Linear` has for it."""
        return self._sizes()[1]

    @in_features.setter
    def in_features(self, size: int) -> None:
        self._stated_sizes = (self._stated_sizes[0], size)

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens, V, under the name that `TokenEmbedding` has for it."""
        return self.out_features

    @property
    def embed_dim(self) -> int:
        """Return the width of the hidden states, D, under the name that `TokenEmbedding` has for it."""
        return self.in_features

    model_options: ModelLogitOptions | None = None
    """What the model does to the logits outside this head; `patch` sets it, and `None` is nothing."""

    logits_report: LogitsReport | None = None
    """If it is not `None`, `forward` returns deferred logits (see `defer_logits`); `patch` sets it."""

    _stated_sizes = (0, 0)

    def _sizes(self) -> tuple[int, int]:
        """Return `(V, D)` of the tied table, or of the head's own weight."""
        if self.own_table is not None:
            tables = self._resolved()
            table: Any = tables[0].table if tables else self.own_table
            return table.vocab_size, table.embed_dim
        weight = self._parameters.get("weight")
        vocab_size, embed_dim = self._stated_sizes if weight is None or len(weight.shape) != 2 else weight.shape
        return vocab_size, embed_dim

    @property
    def config(self) -> JsonObject:
        """Return the constructor's arguments as JSON; for a tied head without the table and its sizes."""
        options: JsonObject = {
            "bias": self.bias is not None,
            "softcap": self.softcap,
            "logit_scale": self.logit_scale,
            "mask_padding": self.mask_padding,
            "head_dtype": None if self.head_dtype is None else str(self.head_dtype).removeprefix("torch."),
            "batch_invariant": self.batch_invariant,
        }
        if self.own_rows is not None:
            return {"rows": describe(self.own_rows), **options}
        if self.tied:
            return options
        sizes = {"vocab_size": self.out_features, "embed_dim": self.in_features}
        return {**sizes, **options, "padding_idx": self.padding_idx, "init_std": self.init_std}

    def reset_parameters(self) -> None:
        """Draw the weight of an untied head from N(0, init_std²), and set its padding row and the bias to 0.

        The table of a tied head is not changed.
        """
        if self.own_table is None and not self.tied:
            init_normal_(self.weight, std=self.init_std)
            zero_rows_(self.weight, [] if self.padding_idx is None else [self.padding_idx])
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def __getattr__(self, name: str) -> Any:
        if name != "weight" or (self.own_table is None and not self.table_references):
            return super().__getattr__(name)
        if self.logits_report is not None and not torch.compiler.is_compiling():
            self.logits_report.is_weight_read = True
        stored, reference = self._parameters.get("weight"), self.head_reference
        # a module of PEFT in the place of this head adapts the products with the weight itself
        is_wrapped = reference is not None and reference.module not in (None, self)
        try:
            tables = self._resolved()
            if not is_wrapped and tables and require_same_adapters(tables).adapters:
                return self.adapted_rows.weight
            table = tables[0].table if tables else self.own_table
        except CheckpointError:  # it is raised again when something reads the values
            table = self.own_table
            if not is_wrapped:
                return computed_weight(self.adapted_rows, (), table if stored is None else stored)
        if stored is not None and not isinstance(table, DeltaEmbedding):
            return stored
        if table is None or isinstance(table, nn.Embedding):
            return super().__getattr__(name) if table is None else table.weight
        return computed_weight(cast(TokenTable, table), table.parameters())

    def stored_weight(self) -> Tensor:
        """Return the weight that this head stores itself; `weight` is also one for rows that are computed."""
        stored = self._parameters.get("weight")
        return self.weight if stored is None else stored

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter as in torch; a tied head accepts as `weight` only the weight of its table."""
        if name != "weight" or self.own_table is None:
            former = former_parameter(self, name)
            super().register_parameter(name, param)
            watch_replacement(self, name, former)
        elif param is not self.weight:
            raise SizeError(
                "This head is tied to its table: set table.weight, or use OutputHead(embed_dim, vocab_size)."
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OPTIONS:
            options: dict[str, Any] = {name: value}
            check_options(options, LogitOptions, type(self).__name__)
            if "own_table" in self.__dict__:  # after the constructor, which has checked its sizes
                check_token_options(LogitSettings(**options), self.out_features)
            value = options[name]
        if name == "weight" and self.own_table is not None:
            self.register_parameter(name, value)  # nn.Module would keep a plain tensor beside the table's weight
        else:
            super().__setattr__(name, value)

    def forward(self, input: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Return a logit for each token from its hidden state, `(..., D)` to `(..., V)`.

        In a patched model they are the product alone, which the model scales and caps. They are computed when something
        reads them, which raises a `StaleRowsError` if the weights have changed by then; the cross entropy needs none of
        them.

        Raises:
            ShapeError: `input` has another width than the rows or, without `head_dtype` and autocast, another dtype.
            CheckpointError: PEFT has replaced the table or the head by a module that a tied head cannot read.
        """
        hidden = input  # torch's name, which tools pass by keyword
        if isinstance(hidden, Proxy):
            call: Tensor = leaf_of_trace(self, hidden)
            return call
        report = self.logits_report
        if report is not None and torch.compiler.is_compiling():
            report.read_by_compiled_graph()
            report = None
        elif report is not None:
            report.is_head_called = True
        defers = report is not None and hidden.dim() > 1 and hidden.shape[-2] > 1  # see `defer_logits`
        if not defers and (rows := self._multiplied_weight(hidden)) is not None:
            return F.linear(hidden, rows, self._parameters["bias"])
        table, options = self.table, self.logit_options()
        if report is not None and (deferred := self._deferred(hidden, table, report)) is not None:
            return deferred
        if table is not None:
            return table.logits(hidden, **options)
        self._check_width(hidden)
        weight, bias = self.stored_weight(), None
        if self.batch_invariant:
            return LinearLogits(hidden, weight, **options).head_logits()
        check_dtypes(hidden, weight.dtype, self.head_dtype)
        if self.logit_scale == 1.0:  # as in nn.Linear it is added where the product is computed, before rounding
            bias, options["bias"] = self.bias, None
        return finished_products(hidden, weight, LogitSettings(**options), bias)

    def _multiplied_weight(self, hidden: Tensor) -> Tensor | None:
        """Return the weight of a call that computes `F.linear(hidden, weight, bias)` and nothing else, or `None`.

        All conditions are read at each call, with few Python calls: nothing is remembered that could be out of date.
        """
        if self.softcap is not None or self.head_dtype is not None or self.batch_invariant or self.mask_padding:
            return None
        if self.logit_scale != 1.0 or "opacus" in sys.modules:  # which refuses tied heads in training
            return None
        table, bias = self.own_table, self._parameters["bias"]
        weight = (self if table is None else table)._parameters.get("weight")
        if self.head_reference is not None and self.head_reference.module not in (None, self):
            return None
        for each in self.table_references:
            here: Any = each.module
            if here is not table and (table is not None or type(here) not in _DENSE):  # PEFT may have replaced it
                return None
        if table is not None:
            if type(table) is not TokenEmbedding or table._forward_pre_hooks or not is_unchanged(table, **_PRODUCT):
                return None
            if bias is not None or table._stated_rows != table._stated_vocab_size:  # spare rows have no logits
                return None
        if weight is None or type(weight) not in PLAIN_TYPES or type(hidden) not in PLAIN_TYPES:
            return None
        if weight.dim() != 2 or hidden.dim() == 0 or hidden.dtype != weight.dtype:
            return None
        if hidden.shape[-1] != weight.shape[1] or (bias is not None and bias.shape[0] != weight.shape[0]):
            return None
        if self.padding_idx is not None and (not fusible(weight) or (weight.requires_grad and torch.is_grad_enabled())):
            return None  # the padding row gets no gradient and no tangent
        return weight

    def _deferred(self, hidden: Tensor, table: TokenTable | None, report: LogitsReport) -> Tensor | None:
        """Return deferred logits, or `None` if they must be computed now."""
        rows = self._dense_rows(table)
        if rows is None:
            return None
        self._check_width(hidden)
        weight = self.stored_weight() if rows.table is self else cast(Tensor, rows.table.weight)
        tensors = HeadTensors(weight, self.bias, rows.adapters)
        settings = LogitSettings(head_dtype=self.head_dtype, batch_invariant=self.batch_invariant)
        return defer_logits(self, hidden, tensors, settings, report)

    def _dense_rows(self, table: TokenTable | None) -> AdaptedTable | None:
        """Return the module that has the dense weight of the head, with PEFT's adapters of its rows."""
        rows = table.adapted_table() if isinstance(table, AdaptedRows) else AdaptedTable(self)
        is_dense = table is None or (isinstance(table, AdaptedRows) and type(rows.table) is TokenEmbedding)
        return rows if is_dense and (self.logit_scale, self.softcap, self.padding_idx) == (1.0, None, None) else None

    @property
    def is_partial(self) -> bool:
        """Return whether this is the head of a patched model that reads its rows itself, beside others (MobileBERT)."""
        return self.model_options is not None and self.model_options.is_partial

    @property
    def states_model_logits(self) -> bool:
        """Return whether this is the head of a patched model, and what the model does to its logits is known."""
        return self.model_options is not None and not self.model_options.unknown

    @property
    def defers_logits(self) -> bool:
        """Return whether `forward` can return deferred logits, see `defer_logits`.

        `patch` must have set the head, its rows must be dense, and it must have no scale, soft cap or padding token.
        """
        return self.logits_report is not None and self._dense_rows(self.table) is not None

    @show_options(LogitOptions)
    def uncomputed_logits(
        self, hidden: Float[Tensor, "*batch D"], *, impl: Impl = "auto", **options: Unpack[LogitOptions]
    ) -> UncomputedLogits:
        """Describe the logits of `hidden` without computing them, as losses, statistics and divergences take them.

        If `forward` is overridden or replaced, they are the logits it returns, and the options of this head, such as
        `softcap`, are not applied again, except `mask_padding`. With hooks on the head, or global ones of torch, the
        head is called at once, and they are all the logits that the call returns, `(..., V)` in memory. In a patched
        model they are the model's logits, after its scale and soft cap.

        Args:
            hidden: Output of the last block, after its final norm, `(..., D)`; in a model with a transform before the
                head (BERT), the result of the transform.
            impl: Implementation of the cross entropy; see `ScoreOptions`.
            **options: Options that replace those of this head; see `LogitOptions`.

        Raises:
            CheckpointError: The head is that of a patched model, and what the model does to its logits is not known; or
                PEFT has replaced the table or the head by a module that a tied head cannot read.
        """
        check_options(options, LogitOptions, f"{type(self).__name__}.uncomputed_logits", impl=impl)
        return self.selected_logits(hidden, None, impl, {**self.model_logit_options(), **options})

    def selected_logits(
        self, hidden: Tensor, choice: TokenChoice | None, impl: Impl, options: LogitOptions
    ) -> UncomputedLogits:
        """Describe the logits of some tokens, or of all, without what a patched model does; `options` are checked."""
        if not calls_forward(self, _FORWARD):
            return called_logits(self, self, hidden, choice, options)
        if self.logits_report is not None and choice is None:
            self.logits_report.is_head_called = True
        table = self.table if choice is None else self.adapted_table
        options = {**self.logit_options(), **options}
        if table is not None and choice is not None:
            return table.selected_logits(hidden, choice, impl, options)
        if table is not None:
            return table.uncomputed_logits(hidden, impl=impl, **options)
        self._check_width(hidden)
        logits = LinearLogits.of(hidden, self.stored_weight(), LogitSettings(**options), impl=impl)
        return logits if choice is None else logits.of_tokens(choice)

    def model_logit_options(self) -> LogitOptions:
        """Return what a patched model does to the logits behind this head."""
        return {} if self.model_options is None else self.model_options.logit_options()

    def _check_width(self, hidden: Tensor) -> None:
        """Raise a `ShapeError` if hidden states have another width than the rows."""
        refuse_partitioned([("the weight of this head", self._parameters.get("weight"))], "is multiplied")
        width, tokens = self.in_features, self.out_features
        if hidden.dim() > 0 and width != hidden.shape[-1] == tokens and not self.tied:
            raise ShapeError(
                f"hidden {tuple(hidden.shape)} does not fit this head of width {width} and {tokens} tokens. {SLIP} "
                f"OutputHead({tokens}, {width})."
            )
        check_width(hidden, width)

    def logit_options(self) -> LogitOptions:
        """Return this head's arguments for `finish_logits`: logit scale, bias, soft cap and padding."""
        if self.bias is not None and self.bias.shape[0] != self.out_features:
            refuse_partitioned([("the bias of this head", self.bias)], "is added")
            raise SizeError(
                f"The head has {self.out_features} rows and a bias of {self.bias.shape[0]}: assign one of that size."
            )
        return {
            "logit_scale": self.logit_scale,
            "bias": self.bias,
            "softcap": self.softcap,
            "padding_idx": self.padding_idx,
            "mask_padding": self.mask_padding,
            "head_dtype": self.head_dtype,
            "batch_invariant": self.batch_invariant,
        }

    def extra_repr(self) -> str:
        """Return the sizes, whether the head is tied, and options that differ from their defaults, for `print`."""
        parts = [f"{self.in_features}, {self.out_features}", "tied" if self.tied else "untied"]
        parts += [f"softcap={self.softcap:g}"] if self.softcap is not None else []
        parts += [f"logit_scale={self.logit_scale:g}"] if self.logit_scale != 1.0 else []
        parts += ["head_dtype=float32"] if self.head_dtype is not None else []
        parts += ["batch_invariant"] if self.batch_invariant else []
        return ", ".join(parts)


def finished_products(hidden: Tensor, weight: Tensor, options: LogitSettings, bias: Tensor | None = None) -> Tensor:
    """Return `finish(hidden @ weight.T + bias)` in the dtype of the products, as a call of a head returns it."""
    products = in_head_dtype(
        lambda states: linear_with_fixed_row(states, weight, options.padding_idx, bias), hidden, options.head_dtype
    )
    return finish(products, options)


def called_logits(
    head: nn.Module, output: OutputHead, hidden: Tensor, choice: TokenChoice | None, options: Mapping[str, Any]
) -> UncomputedLogits:
    """Describe the logits that a call of a head returns, whose hooks or whose own `forward` decide them."""
    own = output.logit_options()
    rest: Any = {name: own[name] for name in ("padding_idx", "mask_padding", "batch_invariant")}
    rest |= options_after_call(head, own, options)
    if not is_observed(head):
        logits = logits_of_function(head.forward, hidden, output.out_features, **rest)
    else:
        logits = logits_of_call(head(hidden), **rest)
    return logits if choice is None else logits.of_tokens(choice)


def options_after_call(head: nn.Module, own: Mapping[str, Any], options: Mapping[str, Any]) -> LogitOptions:
    """Return the options that a call of a head, whose own options are `own`, has not applied."""
    rest = dict(options)
    for name in ("head_dtype", "logit_scale", "bias", "softcap"):
        applied = own.get(name)
        is_applied = name == "head_dtype" or (applied is not None and not (name == "logit_scale" and applied == 1.0))
        if name not in rest or not is_applied:
            continue
        value = rest.pop(name)
        if value is not applied and (isinstance(value, Tensor) or value != applied):
            raise SizeError(
                f"This {type(head).__name__} has hooks or its own forward: set {name} on the head, not for one call."
            )
    return cast(LogitOptions, rest)


def logits_of_call(logits: Tensor, **options: Unpack[LogitOptions]) -> UncomputedLogits:
    """Describe logits that a head has computed, and what is done to them: options that it has not applied."""
    logits = logits.materialize() if isinstance(logits, DeferredLogits) else logits
    return logits_of_function(torch.clone, logits, logits.shape[-1], **options)


def _one_of(value: int | None, other: int | None, name: str) -> int | None:
    """Return the size that was passed under one of two names, as `value` or as `other`; `None` if neither was."""
    if value is not None and other is not None:
        raise SizeError(f"{name} was passed twice: {value} and {other}.")
    return other if value is None else value


_DENSE = (TokenEmbedding, nn.Embedding)

_PRODUCT: dict[str, Any] = {name: getattr(TokenEmbedding, name) for name in ("logits", "raw_logits", "as_linear")}
"""Methods of a table that the product with its weight replaces."""

_FORWARD = OutputHead.forward
"""The method that the fused loss replaces, saved at import to detect later changes."""
