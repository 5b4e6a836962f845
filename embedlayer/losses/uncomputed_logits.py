"""The logits of hidden states under an LM head, described by what they are computed from, and not computed yet.

`logits = finish_logits(hidden @ rows.T)` are `tokens x V` numbers, which losses, statistics and divergences compute in
blocks. They all take an `UncomputedLogits`: `LinearLogits` for rows that are stored as a matrix, and `BlockLogits` for
a function that computes the raw logits of some rows, as tables of another format have it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, Self, Unpack, get_origin, get_type_hints

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.core.block_sizes import FEW_LOGITS, block_size
from embedlayer.core.collectives import SINGLE_PROCESS, Collectives, RowPartition
from embedlayer.core.devices import autocast, autocast_dtype, device_kind
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.option_docs import show_options
from embedlayer.core.shapes import wide_dtype
from embedlayer.core.torch_state import is_transformed, plain_operators_only
from embedlayer.losses.definition import counted_states, finish
from embedlayer.losses.options import (
    Impl,
    LogitOptions,
    LogitSettings,
    LossSettings,
    check_options,
    check_token_options,
)
from embedlayer.losses.rows import (
    NewGradient,
    check_dtypes,
    check_rows_are_whole,
    in_head_dtype,
    linear_with_fixed_row,
    product_dtype,
    row_parts,
    row_within,
    with_fixed_row,
)
from embedlayer.losses.targets import RankRequest

RawLogits = Callable[[Tensor, int, int], Tensor]
"""Function from `(hidden, start, stop)` to the raw logits `hidden @ rows[start:stop].T`."""


class TokenChoice(NamedTuple):
    """Hold the IDs of N tokens, whose logits alone are computed, and the function from an ID to its place in them."""

    ids: Int[Tensor, " N"]
    place: Callable[[int], int | None]

    def settings(self, options: LogitSettings) -> LogitSettings:
        """Return the settings of the logits of these tokens, from those of all tokens."""
        bias, padding_idx = options.bias, options.padding_idx
        if bias is not None:
            bias = bias.index_select(0, self.ids.to(bias.device))
        return options._replace(bias=bias, padding_idx=None if padding_idx is None else self.place(padding_idx))


class UncomputedLogits(ABC):
    """Abstract: the logits of hidden states over a vocabulary, `(..., V)`, which are not computed yet.

    Args:
        hidden: Hidden states, `(..., D)`.
        vocab_size: Number of tokens, V.
        options: What `finish_logits` does to raw logits, checked.
    """

    hidden: Tensor
    vocab_size: int
    options: LogitSettings
    autocast_dtype: torch.dtype | None

    tested_multiple: int | None = None
    """Number of tokens to a multiple of which those of an invariant head are padded, once it is known."""

    _attributes: ClassVar[Sequence[str]]
    """Names of what `replaced` copies: graphs of torch 2.11 have neither `copy` nor the attributes of an object."""

    def __init_subclass__(cls) -> None:
        """Copy all attributes that the class and its bases annotate."""
        cls._attributes = [name for name, kind in get_type_hints(cls).items() if get_origin(kind) is not ClassVar]

    def __init__(self, hidden: Tensor, vocab_size: int, options: LogitSettings) -> None:
        if options.batch_invariant and torch.compiler.is_compiling() and not plain_operators_only():
            hidden, options = refused_in_graph(hidden), options._replace(batch_invariant=False)
        elif options.batch_invariant:
            require_invariance(hidden, options.bias)
        check_token_options(options, vocab_size)
        self.hidden = hidden
        self.vocab_size = vocab_size
        self.options = options
        self.autocast_dtype = autocast_dtype(hidden) if options.head_dtype is None else None

    @abstractmethod
    def block(self, hidden: Tensor, start: int, stop: int) -> Float[Tensor, "*batch N"]:
        """Return the logits of other hidden states of the same width over the tokens `start` to `stop - 1`.

        They are finished, and have the dtype of the losses: float32, or float64 for float64 inputs.
        """

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Return the dtype of the raw logits."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that the logits are computed from, as far as they are known."""
        return self.hidden, self.options.bias

    @property
    def may_be_infinite(self) -> bool:
        """Return whether a logit may be -inf, as that of a masked padding token or of a token with such a bias."""
        return self.options.masked() is not None or self.options.bias is not None

    @property
    def rank_request(self) -> RankRequest | None:
        """Return what this rank tells the others before a pass, if its rows are sharded, else `None`."""
        return None

    def replaced(self, hidden: Tensor, options: LogitSettings) -> Self:
        """Return the logits of other hidden states of the same width, with other options, from the same rows."""
        logits = object.__new__(type(self))
        for name in self._attributes:
            setattr(logits, name, getattr(self, name))
        logits.hidden, logits.options = hidden, options
        return logits

    @abstractmethod
    def _take_rows(self, parts: Sequence[Self], ranges: Sequence[tuple[int, int]]) -> None:
        """Give each of several copies the rows of one range of tokens alone."""

    def of_ranges(self, ranges: Sequence[tuple[int, int]], states: Sequence[Tensor]) -> list[Self]:
        """Return the logits over disjoint ranges of the tokens alone, each a vocabulary of its own that counts from 0.

        The rows of a matrix and the bias are split once: one gradient is joined of those of all ranges.

        Args:
            ranges: First token of each range, and the one behind its last.
            states: Hidden states of each range.
        """
        bias, options = self.options.bias, self.options._replace(bias=None)
        biases = [None] * len(ranges) if bias is None else [part.rows for part in row_parts(bias, ranges)]
        parts = []
        for each, (start, stop), of_tokens in zip(states, ranges, biases, strict=True):
            fixed = row_within(options.padding_idx, start, stop)
            is_masked = options.mask_padding and fixed is not None
            of_range = options._replace(padding_idx=fixed, mask_padding=is_masked, bias=of_tokens)
            parts.append(part := self.replaced(each, of_range))
            part.vocab_size = stop - start
        self._take_rows(parts, ranges)
        return parts

    @abstractmethod
    def _take_tokens(self, part: Self, ids: Tensor) -> None:
        """Give a copy the rows of some tokens alone."""

    def of_tokens(self, choice: TokenChoice) -> Self:
        """Return the logits over some tokens alone, which are a vocabulary of their own in the order of the choice."""
        part = self.replaced(self.hidden, choice.settings(self.options))
        part.vocab_size = len(choice.ids)
        self._take_tokens(part, choice.ids)
        return part

    def as_invariant_as(self, student: "UncomputedLogits") -> Self:
        """Return these logits of a teacher with the option `batch_invariant` of the student, whose option it is."""
        is_invariant = student.options.batch_invariant
        if self.options.batch_invariant == is_invariant:
            return self
        return self.replaced(self.hidden, self.options._replace(batch_invariant=is_invariant))

    def divided_by(self, temperature: float) -> "UncomputedLogits":
        """Return these logits divided by a temperature, besides the one that they have."""
        check_options({}, LogitOptions, f"{type(self).__name__}.divided_by", temperature=temperature)
        options = self.options._replace(temperature=self.options.temperature * temperature)
        return self.replaced(self.hidden, options)

    def logits(self, kept: Bool[Tensor, "*batch"] | None = None) -> Float[Tensor, "*batch V"]:
        """Compute all logits at once, `(..., V)`, differentiable any number of times: the plain definition.

        With `batch_invariant` they are computed in the blocks of a pass.

        Args:
            kept: Mask of the tokens that count, `(...)`; the others have the logits of the hidden state 0. `None` for
                all.
        """
        hidden = counted_states(self.hidden, kept)
        if self.options.batch_invariant:
            in_blocks: Tensor = _by_a_pass(
                "differentiable_totals", "logits_in_blocks", self.replaced(hidden, self.options)
            )
            return in_blocks
        return self.block(hidden, 0, self.vocab_size)

    def head_logits(self) -> Float[Tensor, "*batch V"]:
        """Return `logits()` in the dtype of the products and the bias, as `head(hidden)` returns them."""
        bias, dtype = self.options.bias, self.dtype
        return self.logits().to(dtype if bias is None else torch.promote_types(dtype, bias.dtype))

    @property
    def token_multiple(self) -> int:
        """Return the number of tokens to a multiple of which a pass pads its chunks on a CPU; 1 for no padding."""
        if not self.options.batch_invariant:
            return 1
        if self.tested_multiple is None:
            self.tested_multiple = _by_a_pass("batch_invariance", "tested_multiple", self)
        return self.tested_multiple

    def _autocast(self) -> AbstractContextManager[object]:
        """Return a context with the autocast state at the object's creation: the backward pass has another."""
        dtype = self.autocast_dtype
        return nullcontext() if dtype is None is autocast_dtype(self.hidden) else autocast(self.hidden, dtype)

    def _finished(self, raw_logits: Tensor, start: int, stop: int) -> Tensor:
        """Return raw logits of the tokens `start` to `stop - 1` after `finish_logits`, in the dtype of the losses."""
        logits = finish(raw_logits, self.options.of_rows(start, stop))
        return logits.to(wide_dtype(self.dtype))


def _by_a_pass(module: str, name: str, logits: UncomputedLogits) -> Any:
    """Return what a function of `embedlayer.losses` that runs passes gives for logits."""
    return getattr(import_module(f"embedlayer.losses.{module}"), name)(logits)


def require_invariance(*tensors: Tensor | None) -> None:
    """Check that `batch_invariant` holds where these tensors are: on the CPU, in eager mode, without a transform."""
    device = next(device_kind(x) for x in tensors if x is not None)
    if device != "cpu":
        reason = f"of products on {device} the order of sums depends on the number of tokens; move the head to the CPU"
    elif plain_operators_only() or is_transformed(*tensors):
        reason = "exports and torch.func transforms compute all logits at once; call the head outside of them"
    elif torch.compiler.is_compiling():
        reason = IN_GRAPHS
    else:
        return
    raise _refused(reason)


@torch.library.custom_op("embedlayer::refuse_invariance_in_graph", mutates_args=())
def refused_in_graph(hidden: Tensor) -> Tensor:
    """Raise the `SizeError` of `batch_invariant` when a graph of `torch.compile` runs."""
    # An error while tracing would end the graph, and torch would compile what is called inside instead.
    raise _refused(IN_GRAPHS)


refused_in_graph.register_fake(torch.empty_like)
refused_in_graph.register_autograd(lambda ctx, grad: grad)

IN_GRAPHS = "a graph of torch.compile computes sums in an order of its own; call the head outside of it"


def _refused(reason: str) -> SizeError:
    """Return, without raising it, the error of `batch_invariant` where it does not hold."""
    return SizeError(f"batch_invariant=True is not possible here: {reason}, or leave the option out.")


def refuse_sharded_invariance(options: LogitSettings) -> None:
    """Raise the `SizeError` of `batch_invariant` over sharded rows, if it is among the options."""
    if options.batch_invariant:
        raise SizeError("batch_invariant=True is not possible over sharded rows, whose ranks merge their tokens.")


def joint_multiple(student: UncomputedLogits, teacher: UncomputedLogits | None) -> int:
    """Return the number of tokens to a multiple of which a pass over two heads pads its chunks on a CPU."""
    if teacher is None or not student.options.batch_invariant:
        return student.token_multiple
    return max(student.token_multiple, teacher.as_invariant_as(student).token_multiple)


class RequestedGradients(NamedTuple):
    """Record for which of the three differentiable inputs of a head a gradient must be computed."""

    hidden: bool
    weight: bool
    bias: bool

    @classmethod
    def of(cls, *tensors: Tensor | None) -> "RequestedGradients":
        """Return which of hidden states, weight and bias autograd needs a gradient of."""
        return cls(*(torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors))


@show_options(LogitOptions)
class LinearLogits(UncomputedLogits):
    """Logits of rows that are stored as a matrix: `finish_logits(hidden @ weight.T)`.

    Args:
        hidden: Hidden states, `(..., D)`.
        weight: One row per token, `(V, D)`; further rows are spare.
        vocab_size: Number of tokens, V; `None` for all rows.
        impl: Implementation of the cross entropy; see `ScoreOptions`.
        **options: See `LogitOptions`.

    Example:
        >>> logits = LinearLogits(torch.randn(2, 5, 8), torch.randn(100, 8), temperature=2.0)
        >>> logits.logits().shape
        torch.Size([2, 5, 100])
    """

    weight: Tensor
    impl: Impl
    partition: RowPartition | None = None
    """Which rows this rank stores, if others store rows too."""

    collectives: Collectives = SINGLE_PROCESS
    """The ranks over which the rows are sharded."""

    equal_loss_factors: bool = False
    """Whether all ranks multiply a loss by one number; see `embedlayer.distributed.ShardedTable`."""

    new_gradient: NewGradient | None = None
    """What allocates the gradient of the rows, if they are a part of a weight; see `row_parts`."""

    def __init__(
        self,
        hidden: Float[Tensor, "*batch D"],
        weight: Float[Tensor, "N D"],
        *,
        vocab_size: int | None = None,
        impl: Impl = "auto",
        **options: Unpack[LogitOptions],
    ) -> None:
        # in a compiled graph this also reads symbolic numbers outside of the subgraphs of blocks, for all later uses
        check_options(options, LogitOptions, type(self).__name__, vocab_size=vocab_size, impl=impl)
        self._describe(hidden, weight, LogitSettings(**options), vocab_size, impl)

    def _describe(
        self, hidden: Tensor, weight: Tensor, options: LogitSettings, vocab_size: int | None, impl: Impl
    ) -> None:
        """Store the arguments of the constructor, whose options were checked."""
        check_fit(hidden, weight, options.head_dtype)
        rows = weight.shape[0]
        if vocab_size is not None and vocab_size > rows:
            raise SizeError(f"vocab_size must be at most the {rows} rows of weight, not {vocab_size}.")
        if impl == "plain" and options.batch_invariant:
            raise SizeError("impl='plain' computes all logits at once, and batch_invariant=True in blocks: use one.")
        super().__init__(hidden, rows if vocab_size is None else vocab_size, options)
        self.weight = with_fixed_row(weight, options.padding_idx)
        self.impl = impl

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        options: LogitSettings,
        *,
        vocab_size: int | None = None,
        impl: Impl = "auto",
    ) -> "LinearLogits":
        """Describe logits by options that were checked already."""
        logits = object.__new__(cls)
        logits._describe(hidden, weight, options, vocab_size, impl)
        return logits

    @classmethod
    def sharded(
        cls,
        hidden: Tensor,
        weight: Tensor,
        options: LogitSettings,
        collectives: Collectives,
        partition: RowPartition,
        *,
        equal_loss_factors: bool = False,
    ) -> "LinearLogits":
        """Describe the logits of this rank's hidden states over the rows of all ranks.

        Args:
            hidden: Hidden states of this rank, `(..., D)`.
            weight: The rows that this rank stores.
            options: Options for the logits of all tokens, checked.
            collectives: The ranks.
            partition: Which rows this rank stores.
            equal_loss_factors: See `embedlayer.distributed.ShardedTable`.
        """
        refuse_sharded_invariance(options)
        fixed = with_fixed_row(weight, partition.local_or_none(options.padding_idx))
        check_token_options(options, partition.num_rows)
        logits = cls(hidden, fixed, impl="chunked", head_dtype=options.head_dtype)
        logits.vocab_size, logits.options = partition.num_rows, options
        logits.collectives, logits.partition = collectives, partition
        logits.equal_loss_factors = equal_loss_factors
        return logits

    def with_tensors(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> "LinearLogits":
        """Return the same logits with other tensors of the same shapes.

        Args:
            hidden: Hidden states, `(..., D)`.
            weight: Rows, spare rows included.
            bias: Bias of all tokens, `(V,)`, or `None`.
        """
        logits = self.replaced(hidden, self.options._replace(bias=bias))
        logits.weight = weight
        return logits

    @property
    def bias(self) -> Tensor | None:
        """Return the bias of all tokens, `(V,)`, or `None`."""
        return self.options.bias

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return hidden states, rows and bias."""
        return self.hidden, self.weight, self.bias

    @property
    def prefers_plain(self) -> bool:
        """Return whether all logits are to be computed at once: on request, or by default if there are few.

        If products convert the rows, logits are computed in blocks, whose memory is overwritten.
        """
        if self.impl != "auto":
            return self.impl == "plain"
        device, dtype = device_kind(self.hidden), self.weight.dtype
        if self.options.head_dtype not in (None, dtype):
            return False
        few = self.hidden.shape[:-1].numel() * self.vocab_size <= block_size(FEW_LOGITS, device)
        return few and (dtype != torch.bfloat16 or product_dtype(dtype, device) == dtype)

    @property
    def row_range(self) -> tuple[int, int]:
        """Return the first row that this rank stores, and the row behind its last one."""
        return (0, self.vocab_size) if self.partition is None else (self.partition.start, self.partition.stop)

    @property
    def is_sharded(self) -> bool:
        """Return whether other ranks store rows too."""
        return self.partition is not None

    @property
    def rank_request(self) -> RankRequest | None:
        """Return what this rank tells the others before a pass, if its rows are sharded, else `None`."""
        if not self.is_sharded:
            return None
        requested = RequestedGradients.of(self.hidden, self.weight, self.bias)
        return RankRequest(self.collectives, any(requested), requested.hidden)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the products: `head_dtype`, or that of autocast if it is active, or of the inputs."""
        if self.options.head_dtype is not None:
            return self.options.head_dtype
        if self.autocast_dtype is not None and torch.float64 not in (self.hidden.dtype, self.weight.dtype):
            return self.autocast_dtype
        return torch.promote_types(self.hidden.dtype, self.weight.dtype)

    @property
    def rows(self) -> Tensor:
        """Return the rows of this rank's tokens, without spare rows."""
        start, stop = self.row_range
        return self.weight[: stop - start]

    def _take_rows(self, parts: Sequence[Self], ranges: Sequence[tuple[int, int]]) -> None:
        """Give each of several copies the rows of one range of tokens alone."""
        if self.is_sharded:
            raise SizeError("Rows that are sharded over ranks cannot be divided into streams: use a whole table.")
        for part, of_part in zip(parts, row_parts(self.weight, ranges), strict=True):
            part.weight, part.new_gradient = of_part

    def _take_tokens(self, part: Self, ids: Tensor) -> None:
        """Give a copy the rows of some tokens alone."""
        part.weight = self.weight.index_select(0, ids)

    def block(self, hidden: Tensor, start: int, stop: int) -> Float[Tensor, "*batch N"]:
        """Return the logits of other hidden states of the same width over the tokens `start` to `stop - 1`.

        Products of float16 numbers are computed in float32, and so is what follows: they may exceed 65,504.
        """
        if self.is_sharded:
            raise SizeError("The logits of a sharded table are computed by all ranks together: call table.logits.")
        fixed, rows = row_within(self.options.padding_idx, start, stop), self.weight
        if (start, stop) != (0, len(rows)):  # the gradient of a slice is a copy
            rows = rows[start:stop]
        head_dtype = self.options.head_dtype
        if self.dtype == torch.float16:  # that of the inputs, or of autocast
            hidden, rows, head_dtype = hidden.half(), rows.half(), torch.float32
        with self._autocast():
            products = in_head_dtype(lambda states: linear_with_fixed_row(states, rows, fixed), hidden, head_dtype)
            return self._finished(products, start, stop)


@show_options(LogitOptions)
class BlockLogits(UncomputedLogits):
    """Logits whose raw values a function computes for a block of rows, such as those of quantised rows.

    Args:
        hidden: Hidden states, `(..., D)`.
        raw_logits: Function whose result `raw_logits(hidden, start, stop)` is `hidden @ rows[start:stop].T`. Every
            tensor that it depends on gets its gradient.
        vocab_size: Number of tokens, V.
        rows_at_once: Number of rows in a block.
        **options: See `LogitOptions`.
    """

    raw_logits: RawLogits
    rows_at_once: int
    _first: int = 0

    def __init__(
        self,
        hidden: Float[Tensor, "*batch D"],
        raw_logits: RawLogits,
        vocab_size: int,
        rows_at_once: int,
        **options: Unpack[LogitOptions],
    ) -> None:
        check_options(options, LogitOptions, type(self).__name__)
        super().__init__(hidden, vocab_size, LogitSettings(**options))
        self.raw_logits = raw_logits
        self.rows_at_once = rows_at_once

    def _take_rows(self, parts: Sequence[Self], ranges: Sequence[tuple[int, int]]) -> None:
        """Give each of several copies the rows of one range of tokens alone."""
        for part, (start, _) in zip(parts, ranges, strict=True):
            part._first = self._first + start

    def _take_tokens(self, part: Self, ids: Tensor) -> None:
        """Give a copy the columns of some tokens alone, of the raw logits of all tokens."""
        whole, first, stop = self.raw_logits, self._first, self._first + self.vocab_size
        part.raw_logits = lambda hidden, start, end: whole(hidden, first, stop).index_select(-1, ids[start:end])
        part.rows_at_once, part._first = len(ids), 0

    @property
    def dtype(self) -> torch.dtype:
        """Return `head_dtype`, or that of autocast if it is active, or that of the hidden states."""
        return self.options.head_dtype or self.autocast_dtype or self.hidden.dtype

    @property
    def may_be_infinite(self) -> bool:
        """Return `True`: the function may compute any logit."""
        return True

    def block(self, hidden: Tensor, start: int, stop: int) -> Float[Tensor, "*batch N"]:
        """Return the logits of other hidden states of the same width over the tokens `start` to `stop - 1`."""
        with self._autocast():
            products = in_head_dtype(
                lambda states: self._products(states, start, stop), hidden, self.options.head_dtype
            )
            return self._finished(products, start, stop)

    def _products(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Return the raw logits of hidden states; if they are to be invariant, with the tokens last in memory."""
        start, stop = self._first + start, self._first + stop
        if not self.options.batch_invariant:
            return self.raw_logits(hidden, start, stop)
        products = self.raw_logits(_tokens_last(hidden), start, stop)
        if products.requires_grad:
            products.register_hook(_tokens_last)
        return products


def _tokens_last(x: Tensor) -> Tensor:
    """Return a matrix `(C, D)` as the transpose of one in memory."""
    # In products with few rows (LoRA), rounding depends on the address of a token's numbers, so on its place in `x`.
    return x.mT.contiguous().mT


def is_plain(logits: UncomputedLogits, loss: LossSettings | None = None) -> bool:
    """Return whether all logits are computed at once, in plain PyTorch."""
    if logits.options.batch_invariant:
        require_invariance(*logits.tensors)
        return False
    if isinstance(logits, LinearLogits) and logits.is_sharded:
        if plain_operators_only():  # the ranks cannot follow a transform
            raise SizeError(
                "The loss of a sharded table has no transforms of torch.func: use backward() or torch.autograd.grad."
            )
        return False
    if plain_operators_only() or is_transformed(*logits.tensors):
        return True
    if not isinstance(logits, LinearLogits):
        return False
    if loss is None:
        return logits.prefers_plain or torch.compiler.is_compiling()
    return logits.prefers_plain and loss.min_chunks == 1


def check_fit(hidden: Tensor, weight: Tensor, head_dtype: torch.dtype | None = None) -> None:
    """Check that hidden states and rows have one width and, without `head_dtype` and autocast, one dtype."""
    check_rows_are_whole(hidden, weight)
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ShapeError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be (..., D) and (V, D).")
    check_dtypes(hidden, weight.dtype, head_dtype)


def check_ids(hidden: Tensor, ids: Tensor, name: str) -> None:
    """Check that there is one int32 or int64 token ID for each hidden state."""
    if ids.shape != hidden.shape[:-1] or ids.dtype not in (torch.int64, torch.int32):
        raise ShapeError(
            f"{name} must be int64 or int32 {tuple(hidden.shape[:-1])}, not {ids.dtype} {tuple(ids.shape)}."
        )
