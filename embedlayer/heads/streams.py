"""The heads of K streams of tokens, such as the codebooks of an audio codec: K distributions at each position."""

import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from embedlayer.core.devices import device_kind
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.index_checks import check_integer_ids, checked_copy, raise_if_outside
from embedlayer.core.initialization import init_normal_
from embedlayer.core.option_docs import show_options
from embedlayer.core.torch_state import (
    calls_forward,
    plain_operators_only,
    recompute_weights,
    refuse_per_sample_gradients,
)
from embedlayer.heads.output import OutputHead, logits_of_call
from embedlayer.io.files import JsonObject
from embedlayer.losses.linear import targets_of_heads
from embedlayer.losses.logit_arguments import divided_options
from embedlayer.losses.options import (
    Impl,
    LogitOptions,
    LossOptions,
    LossSettings,
    ScoreOptions,
    check_options,
)
from embedlayer.losses.rows import RowPart, row_parts
from embedlayer.losses.statistics import Statistic, TokenStatistics, token_statistics_of
from embedlayer.losses.target_groups import TargetGroups, reduced_losses, token_losses, weighted_sum
from embedlayer.losses.targets import require_token_weights
from embedlayer.losses.uncomputed_logits import LinearLogits, UncomputedLogits
from embedlayer.saving import Pretrained, describe
from embedlayer.tables.streams import StreamTable


class StreamLoss(NamedTuple):
    """Hold the loss of K streams.

    Attributes:
        loss: The mean or the sum over the targets of all streams, or `sum over k of stream_weights[k] * losses[k]`, in
            nats: a scalar, or `(...)` with `reduction="none"`.
        losses: Cross entropy of each stream, without gradient, as `reduction` says: the mean or the sum, `(K,)`, or
            `(..., K)` with `"none"`. It is 0 for a stream without targets or of weight 0.
    """

    loss: Float[Tensor, "*result"]
    losses: Float[Tensor, "*result K"]


class StackedRows(Pretrained, nn.Module):
    """Rows of K streams of one size in one weight, `(K, V, D)`, or transposed, `(K, D, V)`.

    The depth decoder of Moshi has the former (`lm_heads.weight`), that of CSM the latter (`codebooks_head.weight`).
    `StreamHead` reads them without a copy.

    Args:
        num_streams: Number of streams, K.
        stream_size: Number of tokens of each stream, V.
        embed_dim: Width, D.
        transposed: Whether the weight is `(K, D, V)`.
        init_std: Standard deviation of the normal initialisation.
        device: Device of the weight.
        dtype: Dtype of the weight.

    Example:
        >>> StackedRows(3, 100, 8, transposed=True).weight.shape
        torch.Size([3, 8, 100])
    """

    def __init__(
        self,
        num_streams: int,
        stream_size: int,
        embed_dim: int,
        *,
        transposed: bool = False,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(num_streams, stream_size, embed_dim) < 1:
            raise SizeError(f"StackedRows needs sizes of at least 1, not {num_streams=}, {stream_size=}, {embed_dim=}.")
        self.transposed, self.init_std = transposed, init_std
        sizes = (embed_dim, stream_size) if transposed else (stream_size, embed_dim)
        self.weight = nn.Parameter(torch.empty(num_streams, *sizes, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, init_std²)."""
        init_normal_(self.weight, std=self.init_std)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return `(K, V, D)`, transposed or not."""
        streams, *sizes = self.weight.shape
        stream_size, embed_dim = reversed(sizes) if self.transposed else sizes
        return streams, stream_size, embed_dim

    @property
    def config(self) -> JsonObject:
        """Return the constructor's arguments as JSON."""
        streams, stream_size, embed_dim = self.shape
        sizes = {"num_streams": streams, "stream_size": stream_size, "embed_dim": embed_dim}
        return {**sizes, "transposed": self.transposed, "init_std": self.init_std}

    def parts(self) -> list[RowPart]:
        """Return the rows of each stream, `(V, D)`, as views of the weight, whose gradients are one tensor."""
        if "opacus" in sys.modules:
            refuse_per_sample_gradients(self)
        if "weight" in vars(self):
            recompute_weights(self)
        weight = self.weight
        streams, size, _ = map(int, weight.shape)  # under torch.jit.trace they are tensors
        parts = row_parts(weight.flatten(0, 1), [(k * size, (k + 1) * size) for k in range(streams)])
        return [part.transposed() for part in parts] if self.transposed else parts

    def extra_repr(self) -> str:
        """Return the sizes for `print`."""
        return ", ".join(map(str, self.shape)) + (", transposed" if self.transposed else "")


class StreamHead(Pretrained, nn.Module):
    """LM head of K streams: at each position one distribution for each stream, over the tokens of this stream alone.

    `logits[k] = finish_logits(hidden @ rows[k].T)`, where `rows[k]` are the V_k rows of stream k. Targets are
    `(..., K)`, streams last, and IDs count from 0 in each stream. Nothing of the size tokens x sum(V_k) is stored by
    `loss`, `token_log_probs` and `token_statistics`.

    | rows | `output` |
    |---|---|
    | one weight `(sum(V_k), D)` of its own | `OutputHead(embed_dim, sum(sizes))` |
    | those of a table, of which some may be other rows | `OutputHead(table)`, with `first_rows` |
    | quantised, or of another kind of table | `OutputHead(rows=table)` |
    | K weights, or K tied tables | `[OutputHead(...), ...]` |
    | one weight `(K, V, D)` or `(K, D, V)` | `StackedRows(...)` |

    Args:
        output: What computes the logits; see above. Its options, such as bias and soft cap, are those of every stream.
        sizes: Number of tokens of each stream, V_k, for one `OutputHead`, or the number K of streams of one size;
            `None` for K outputs or stacked rows, which have sizes.
        first_rows: First row of each stream in one `OutputHead`, whose other rows belong to no stream; `None` for
            streams one after another from row 0 on.
        hidden_per_stream: Whether each stream has a hidden state of its own, `(..., K, D)`, as in the depth decoders of
            Moshi and CSM; otherwise one `(..., D)` is that of all streams.

    Example:
        >>> head = StreamHead(OutputHead(8, 30), sizes=[10, 20])
        >>> [logits.shape for logits in head(torch.randn(2, 5, 8))]
        [torch.Size([2, 5, 10]), torch.Size([2, 5, 20])]
        >>> targets = torch.randint(0, 10, (2, 5, 2))
        >>> head.loss(torch.randn(2, 5, 8), targets).losses.shape
        torch.Size([2])

    Reference: Copet et al., Simple and controllable music generation, 2023.
    """

    def __init__(
        self,
        output: OutputHead | StackedRows | Sequence[OutputHead],
        sizes: Sequence[int] | int | None = None,
        *,
        first_rows: Sequence[int] | None = None,
        hidden_per_stream: bool = False,
    ) -> None:
        super().__init__()
        self.output: nn.Module = output if isinstance(output, nn.Module) else nn.ModuleList(output)
        self.hidden_per_stream = hidden_per_stream
        self._ranges: list[tuple[int, int]] | None = None
        if isinstance(output, OutputHead):
            self._ranges = _ranges(sizes, first_rows, output.out_features)
        elif sizes is not None or first_rows is not None:
            raise SizeError("sizes and first_rows are those of one OutputHead: leave them out for several, or a stack.")
        if self.num_streams < 1:
            raise SizeError("A StreamHead needs at least one stream.")

    @classmethod
    def tied_to(
        cls, table: StreamTable, streams: Sequence[int] | None = None, *, hidden_per_stream: bool = False
    ) -> "StreamHead":
        """Build a head whose streams read the rows of streams of an input table, as that of Bark's fine model does.

        Args:
            table: The table of K streams.
            streams: Stream of the table for each stream of the head; `None` for all, in their order.
            hidden_per_stream: See `StreamHead`.

        Example:
            >>> table = StreamTable(TokenEmbedding(30, 8), [10, 10, 10])
            >>> StreamHead.tied_to(table, streams=[1, 2]).first_rows
            [10, 20]
        """
        rows = [table.stream(stream) for stream in (range(table.num_streams) if streams is None else streams)]
        return cls(
            OutputHead(table.token_table),
            [len(each) for each in rows],
            first_rows=[each.start for each in rows],
            hidden_per_stream=hidden_per_stream,
        )

    @property
    def sizes(self) -> list[int]:
        """Return the number of tokens of each stream, V_k."""
        if self._ranges is not None:
            return [stop - start for start, stop in self._ranges]
        if isinstance(self.output, StackedRows):
            streams, stream_size, _ = self.output.shape
            return [stream_size] * streams
        return [head.out_features for head in self._outputs()]

    @property
    def first_rows(self) -> list[int] | None:
        """Return the first row of each stream in one `OutputHead`; `None` for other outputs."""
        return None if self._ranges is None else [start for start, _ in self._ranges]

    @property
    def num_streams(self) -> int:
        """Return the number of streams, K."""
        return len(self.sizes)

    @property
    def embed_dim(self) -> int:
        """Return the width of the hidden states, D."""
        if isinstance(self.output, StackedRows):
            return self.output.shape[2]
        return self._outputs()[0].embed_dim

    @property
    def tied(self) -> bool:
        """Return whether a stream uses the rows of a table that is not the head's own."""
        return any(head.tied for head in self._outputs())

    def _outputs(self) -> list[OutputHead]:
        """Return the output heads: one, K, or none for stacked rows."""
        return [module for module in self.output.modules() if isinstance(module, OutputHead)]

    @property
    def config(self) -> JsonObject:
        """Return the constructor's arguments as JSON; those of tied outputs lack their tables."""
        output = self.output
        described = [describe(head) for head in self._outputs()] if isinstance(output, nn.ModuleList) else None
        arguments: JsonObject = {"output": describe(output) if described is None else described}  # type: ignore[arg-type]
        if self._ranges is not None:
            arguments |= {"sizes": self.sizes, "first_rows": self.first_rows}
        return {**arguments, "hidden_per_stream": self.hidden_per_stream}

    @show_options(LogitOptions)
    def uncomputed_logits(
        self,
        hidden: Float[Tensor, "*batch D"],
        *,
        streams: Sequence[int] | None = None,
        impl: Impl = "auto",
        **options: Unpack[LogitOptions],
    ) -> list[UncomputedLogits]:
        """Describe the logits of each stream without computing them, as `divergence` and other functions take them.

        With hooks on this head, global ones of torch, or another `forward`, the head is called at once, and they are
        the logits that the call returns.

        Args:
            hidden: Output of the last block, after its final norm, `(..., D)`, or `(..., K, D)` with
                `hidden_per_stream`.
            streams: Numbers of the streams, whose hidden states then are those of `hidden`; `None` for all K.
            impl: Implementation of the cross entropy; see `ScoreOptions`.
            **options: Options that replace those of `output`; see `LogitOptions`.
        """
        check_options(options, LogitOptions, f"{type(self).__name__}.uncomputed_logits", impl=impl)
        chosen = self._chosen(hidden, streams)
        if not calls_forward(self, _FORWARD):
            if others := sorted(options.keys() - {"temperature"}):
                raise SizeError(
                    f"This {type(self).__name__} has hooks or its own forward: set {', '.join(others)} on its output."
                )
            return [logits_of_call(logits, **options) for logits in self(hidden, streams=streams)]
        return self._described(hidden, chosen, {"impl": impl, **options})

    def _described(self, hidden: Tensor, chosen: list[int], arguments: Any) -> list[UncomputedLogits]:
        """Return the logits of the chosen streams, which are computed from the rows of each."""
        if self._ranges is not None:
            [head] = self._outputs()
            joint = head.uncomputed_logits(hidden, **arguments)
            states = self._states(joint.hidden, len(chosen))
            return joint.of_ranges([self._ranges[stream] for stream in chosen], states)
        states = self._states(hidden, len(chosen))
        if isinstance(self.output, StackedRows):
            rows, results = self.output.parts(), []
            for x, k in zip(states, chosen, strict=True):
                results.append(logits := LinearLogits(x, rows[k].rows, **arguments))
                logits.new_gradient = rows[k].new_gradient
            return list(results)
        heads = self._outputs()
        return [heads[k].uncomputed_logits(x, **arguments) for x, k in zip(states, chosen, strict=True)]

    def _chosen(self, hidden: Tensor, streams: Sequence[int] | None) -> list[int]:
        """Return the numbers of the requested streams, after a check that they exist and have their hidden states."""
        chosen = list(range(self.num_streams)) if streams is None else list(streams)
        if not all(0 <= stream < self.num_streams for stream in chosen):
            raise SizeError(f"Streams are 0 to {self.num_streams - 1}, not {chosen}.")
        if self.hidden_per_stream and (hidden.dim() < 2 or hidden.shape[-2] != len(chosen)):
            raise ShapeError(
                f"hidden {tuple(hidden.shape)} must be (..., {len(chosen)}, {self.embed_dim}), one for each stream."
            )
        return chosen

    def _states(self, hidden: Tensor, streams: int) -> Sequence[Tensor]:
        """Return the hidden states of each of several streams, `(..., D)`."""
        return hidden.unbind(-2) if self.hidden_per_stream else [hidden] * streams

    def forward(
        self, hidden: Float[Tensor, "*batch D"], *, streams: Sequence[int] | None = None
    ) -> list[Float[Tensor, "*_ V"]]:
        """Return the logits of each stream, `(..., V_k)`.

        Args:
            hidden: Output of the last block, after its final norm, `(..., D)`, or `(..., K, D)` with
                `hidden_per_stream`.
            streams: Numbers of the streams, as for one step of a depth decoder; `None` for all K.
        """
        return [logits.head_logits() for logits in self._described(hidden, self._chosen(hidden, streams), {})]

    @show_options(LogitOptions, ScoreOptions, LossOptions)
    def loss(
        self,
        hidden: Float[Tensor, "*states D"],
        targets: Int[Tensor, "*batch K"],
        stream_weights: Sequence[float] | None = None,
        **options: Unpack[LossOptions],
    ) -> StreamLoss:
        """Return the cross entropy of the targets of all streams, in nats, from one pass over the rows of each.

        | model | its loss |
        |---|---|
        | Dia, depth decoders of Moshi and CSM | the mean over all targets: `stream_weights=None` |
        | MusicGen | the mean over streams of their means: `stream_weights=[1 / K] * K` |
        | Higgs v2 | the sum over streams of their means: `stream_weights=[1.0] * K` |

        Args:
            hidden: Output of the last block, after its final norm, `(..., D)`, or `(..., K, D)` with
                `hidden_per_stream`.
            targets: Token IDs of each stream, counted from 0 in each, or `ignore_index`, `(..., K)`.
            stream_weights: Factor of the loss of each stream; a stream of weight 0 is not computed. `None` for the mean
                or the sum over the targets of all streams.
            **options: See `LossOptions`. `token_weights` are `(..., K)`.

        Raises:
            ShapeError: Hidden states, targets and `token_weights` do not fit each other or the number of streams.
            SizeError: On the CPU, the weight of a target that is not ignored is infinite or NaN.
            TokenIdError: A target is outside of its stream; on CUDA where the call waits, else later.
        """
        check_options(options, LossOptions, f"{type(self).__name__}.loss")
        heads, groups, loss = self._requested(hidden, targets, options)
        weights = None if stream_weights is None else list(stream_weights)
        if weights is not None and len(weights) != self.num_streams:
            raise SizeError(f"{self.num_streams} streams and {len(weights)} weights: pass one weight for each stream.")
        if weights is not None and not all(map(math.isfinite, weights)):
            raise SizeError(f"stream_weights must be finite, not {weights}.")
        if loss.token_weights is not None:
            require_token_weights(loss.token_weights, targets)
            groups = groups._replace(token_weights=_by_stream(loss.token_weights))
        groups = groups._replace(weights=weights)
        if loss.reduction != "none":
            return StreamLoss(*reduced_losses(heads, groups, loss))
        losses = [each.view(targets.shape[:-1]) for each in token_losses(heads, groups, loss)]
        return StreamLoss(weighted_sum(weights, losses), torch.stack(losses, -1).detach())

    @show_options(LogitOptions, ScoreOptions)
    def token_log_probs(
        self, hidden: Float[Tensor, "*states D"], tokens: Int[Tensor, "*batch K"], **options: Unpack[ScoreOptions]
    ) -> Float[Tensor, "*batch K"]:
        """Return the log-probability of the token of each stream under the softmax of its logits, in nats, `(..., K)`.

        Args:
            hidden: Output of the last block, after its final norm, `(..., D)`, or `(..., K, D)` with
                `hidden_per_stream`.
            tokens: Token of each stream, `(..., K)`. Where it is `ignore_index` the result is 0.
            **options: See `ScoreOptions`.
        """
        check_options(options, ScoreOptions, f"{type(self).__name__}.token_log_probs")
        losses = token_losses(*self._requested(hidden, tokens, options))
        return -torch.stack(losses, -1).view(tokens.shape)

    @show_options(LogitOptions, ScoreOptions)
    def token_statistics(
        self,
        hidden: Float[Tensor, "*states D"],
        tokens: Int[Tensor, "*batch K"],
        *,
        statistics: tuple[Statistic, ...] = ("log_probs", "entropy"),
        top_k: int = 0,
        **options: Unpack[ScoreOptions],
    ) -> TokenStatistics:
        """Return log-probabilities, entropies and other statistics of each stream, all from one pass over its rows.

        Args:
            hidden: Output of the last block, after its final norm, `(..., D)`, or `(..., K, D)` with
                `hidden_per_stream`.
            tokens: Token of each stream, `(..., K)`, or `ignore_index` for what is to be left out.
            statistics: Names of the fields of `TokenStatistics` to compute.
            top_k: Number of the largest logits of each stream; 0 for none.
            **options: See `ScoreOptions`.

        Returns:
            The statistics, `(..., K)`; `top_logits` and `top_ids` are `(..., K, top_k)`.
        """
        check_options(options, ScoreOptions, f"{type(self).__name__}.token_statistics")
        heads, groups, loss = self._requested(hidden, tokens, options)
        parts = [
            token_statistics_of(head, ids, each, statistics=statistics, top_k=top_k, counted=counted)
            for head, ids, each, counted in targets_of_heads(heads, groups.targets, loss._replace(reduction="none"))
        ]
        stacked = {
            name: None if value is None else torch.stack([getattr(part, name) for part in parts], tokens.dim() - 1)
            for name, value in parts[0]._asdict().items()
        }
        return TokenStatistics(**stacked)

    def _requested(
        self, hidden: Tensor, targets: Tensor, options: Any
    ) -> tuple[list[UncomputedLogits], TargetGroups, LossSettings]:
        """Return the logits of each stream, the targets one stream after another, and the options of the loss."""
        loss, of_logits = divided_options(options)
        vocab_size = of_logits.pop("vocab_size", None)
        if vocab_size is not None and set(self.sizes) != {vocab_size}:
            raise SizeError(f"The streams have {self.sizes} tokens, not vocab_size={vocab_size}: leave vocab_size out.")
        heads = self.uncomputed_logits(hidden, **of_logits)
        expected = (*(hidden.shape[:-2] if self.hidden_per_stream else hidden.shape[:-1]), self.num_streams)
        if targets.shape != expected:
            raise ShapeError(
                f"Targets {tuple(targets.shape)} must be {expected} beside hidden states {tuple(hidden.shape)}."
            )
        check_integer_ids(targets)
        if device_kind(targets) == "cpu" and not plain_operators_only():
            targets = self._checked(targets, loss.ignore_index)
        return heads, TargetGroups(_by_stream(targets), [targets[..., 0].numel()] * self.num_streams), loss

    def _checked(self, targets: Tensor, ignore_index: int) -> Tensor:
        """Return targets after a check that each is in its own stream, which graphs contain."""
        parts = []
        for stream, (ids, size) in enumerate(zip(targets.unbind(-1), self.sizes, strict=True)):
            kind = f"token id of stream {stream}"
            if torch.compiler.is_compiling():
                ignored = ids == ignore_index
                ids = torch.where(ignored, ids, checked_copy(ids.masked_fill(ignored, 0), size, kind))
            else:
                raise_if_outside(ids, size, kind, ignore=ignore_index)
            parts.append(ids)
        return torch.stack(parts, -1) if torch.compiler.is_compiling() else targets

    def extra_repr(self) -> str:
        """Return the sizes of the streams for `print`."""
        return f"sizes={self.sizes}" + (", hidden_per_stream=True" if self.hidden_per_stream else "")


_FORWARD = StreamHead.forward
"""The method whose products losses compute, saved at import to detect later changes."""


def _by_stream(x: Tensor) -> Tensor:
    """Return numbers `(..., K)` one stream after another, in one dimension."""
    return x.movedim(-1, 0).flatten()


def _ranges(sizes: Sequence[int] | int | None, first_rows: Sequence[int] | None, rows: int) -> list[tuple[int, int]]:
    """Return first row and last row + 1 of each stream among `rows` rows; arguments and errors: see `StreamHead`."""
    if isinstance(sizes, int) and sizes > 0:
        if rows % sizes:
            raise SizeError(f"{sizes} streams do not divide the {rows} rows of the output: pass the size of each.")
        sizes = [rows // sizes] * sizes
    if isinstance(sizes, int) or not sizes or min(sizes) < 1:
        raise SizeError(f"A StreamHead needs sizes of at least 1, one for each stream, not {sizes}.")
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    starts = bounds[:-1] if first_rows is None else list(first_rows)
    if len(starts) != len(sizes):
        raise SizeError(f"{len(sizes)} sizes and {len(starts)} first_rows: pass one of each for a stream.")
    ranges = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    if min(starts) < 0 or max(stop for _, stop in ranges) > rows or (first_rows is None and bounds[-1] != rows):
        raise SizeError(
            f"Streams of sizes {list(sizes)} from the rows {starts} on do not fit the {rows} rows of the output: they "
            f"have {bounds[-1]} rows. Pass first_rows where some rows of the output belong to no stream."
        )
    if any(stop > start for (_, stop), (start, _) in pairwise(sorted(ranges))):
        raise SizeError(f"Streams share rows: {ranges}.")
    return ranges
