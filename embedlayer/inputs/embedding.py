"""The input embedding: layers that compute the input of the first block from token IDs."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from embedlayer.core.block_sizes import FEW_VECTORS
from embedlayer.core.devices import device_kind
from embedlayer.core.documents import AttentionMask, check_mask
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.index_checks import as_ids
from embedlayer.core.shapes import IdsLike, Positions, Vectors
from embedlayer.core.torch_state import may_use
from embedlayer.inputs.fused import gather_scale_add_drop, may_skip_call, scale_add_drop
from embedlayer.inputs.injection import EmbeddingInjection, injections_at_input
from embedlayer.inputs.steps import TokenBatch, TracedStep, input_steps, run_steps, trace_steps
from embedlayer.io.files import JsonObject
from embedlayer.kernels.input import StoredRows
from embedlayer.positions.alibi import AlibiBias
from embedlayer.positions.learned import LearnedPositionalEmbedding
from embedlayer.positions.position import AdditivePosition, Position, positions_of
from embedlayer.positions.relative import RelativePositionBias
from embedlayer.positions.rotary.embedding import RotaryEmbedding
from embedlayer.positions.sinusoidal import SinusoidalPositionalEmbedding
from embedlayer.saving import Pretrained, describe
from embedlayer.tables.conversions import as_lookup_table
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.lookup import LookupTable

PositionName = Literal["learned", "sinusoidal", "scaled-sinusoidal", "rotary", "alibi", "relative", "none"]


def as_position(
    position: Position | PositionName,
    *,
    max_seq_len: int,
    embed_dim: int,
    num_heads: int | None = None,
    head_dim: int | None = None,
) -> Position:
    """Return a position scheme: `position` itself if it is an object, or a new scheme of that name."""
    if isinstance(position, Position):
        position.require_sizes(embed_dim=embed_dim, num_heads=num_heads, head_dim=head_dim)
        return position
    if position == "learned":
        return LearnedPositionalEmbedding(max_seq_len, embed_dim)
    if position == "sinusoidal":
        return SinusoidalPositionalEmbedding(max_seq_len, embed_dim)
    if position == "scaled-sinusoidal":
        scale = 1 / math.sqrt(embed_dim)
        return SinusoidalPositionalEmbedding(max_seq_len, embed_dim, layout="concatenated", init_scale=scale)
    if position == "none":
        return Position()
    if position not in get_args(PositionName):
        raise SizeError(f"Position {position!r} is none of: {', '.join(get_args(PositionName))}.")
    if num_heads is None:
        raise SizeError(f"{position} positions are applied in attention: give num_heads, or the position as an object.")
    if position == "alibi":
        return AlibiBias(num_heads)
    if position == "relative":
        return RelativePositionBias(num_heads, bidirectional=False)
    if head_dim is None and embed_dim % num_heads:
        raise SizeError(f"embed_dim {embed_dim} is not divisible by {num_heads} heads.")
    return RotaryEmbedding(embed_dim // num_heads if head_dim is None else head_dim)


class InputOptions(TypedDict, total=False):
    """Keyword arguments of `InputEmbedding.forward` and `trace`; `InputEmbedding.forward` describes them."""

    inputs_embeds: Float[Tensor, "*batch T D"] | None
    positions: Positions | None
    attention_mask: AttentionMask | None


class InputParts(NamedTuple):
    """Hold the modules that an input embedding calls; `dropout` is `None` for a layer without dropout."""

    table: nn.Module
    position: Position
    dropout: nn.Module | None = None


class InputEmbedding(Pretrained, ABC):
    """Abstract input embedding: it computes `dropout(position.add(table(ids), positions))` with the modules in `parts`.

    A subclass implements `parts`. To be saved it stores each argument of its constructor in an attribute of the same
    name, or overrides `config`.
    """

    @property
    @abstractmethod
    def parts(self) -> InputParts:
        """Return the table, the position scheme and the dropout of this layer."""

    def forward(
        self,
        ids: IdsLike | None = None,
        *,
        inputs_embeds: Float[Tensor, "*batch T D"] | None = None,
        positions: Positions | None = None,
        attention_mask: AttentionMask | None = None,
    ) -> Float[Tensor, "*batch T D"]:
        """Compute vectors `(T, D)` or `(B, T, D)` from token IDs `(T,)` or `(B, T)`.

        Args:
            ids: Token IDs; a list or NumPy array is converted.
            inputs_embeds: Vectors to use instead of `table(ids)`, already scaled, as in transformers. Positions are
                added to them, and dropout is applied.
            positions: Position of each token, `(T,)` or the shape of `ids`; by default `positions_of(ids,
                attention_mask)`.
            attention_mask: Mask of padding and packed documents, as in `positions_of`. It only determines the
                positions.

        Raises:
            ShapeError: `ids` are not integers, or a single one; `inputs_embeds` have another width than the table; or
                positions or mask do not fit the tokens.
            SizeError: Both or neither of `ids` and `inputs_embeds` are passed.
            TokenIdError: On the CPU, an ID is outside the table; see `LookupTable.look_up` for accelerators.
            PositionError: On the CPU, a position is outside those that the scheme covers, as in a sequence that is too
                long.
        """
        table, position, dropout = self.parts
        return embed(ids, table, position, positions, attention_mask, inputs_embeds=inputs_embeds, dropout=dropout)

    def trace(self, ids: IdsLike | None = None, **options: Unpack[InputOptions]) -> Iterator[TracedStep]:
        """Run `forward` step by step, and yield a `TracedStep` after each step: its name, vectors and a description.

        Arguments and errors are those of `forward`; a wrong argument raises its error at the first step. The last
        vectors equal the result of `forward`, up to one rounding where `forward` fuses multiplication and addition.
        Dropout in training draws a new mask.

        Example:
            >>> layer = TransformerEmbedding(100, 16, max_seq_len=8).eval()
            >>> for step in layer.trace(torch.tensor([5, 2, 7])):
            ...     print(f"{step.name}: {step.description}")
            look_up: a table of 100 × 16
            scale: each row times 4 = √D
            position: LearnedPositionalEmbedding: adds a vector for each position
            dropout: p = 0.1, in training only
        """
        return trace_embed(ids, *self.parts, **options)


class TransformerEmbedding(InputEmbedding):
    """Input embedding of a transformer: `dropout(position.add(scale * weight[ids], positions))`.

    Args:
        vocab_size: Number of tokens, V.
        embed_dim: Width of a row, D.
        max_seq_len: Longest sequence.
        dropout: Probability of setting an element to 0 in training.
        position: A `Position`, or the name of one: `"learned"`, `"sinusoidal"`, `"scaled-sinusoidal"`, `"rotary"`,
            `"alibi"`, `"relative"`, `"none"`. Rotations and biases add nothing here: pass `layer.position` to the
            attention, which calls `rotate` and `bias`.
        scale: Factor applied to looked-up rows: a number, `"sqrt_dim"` (the original Transformer), or `None` for 1.
        padding_idx: Padding token, or `None`; see `LookupTable`.
        init_std: Standard deviation of the normal initialisation: a number, or `"1/sqrt_dim"`.
        num_heads: Query heads; required for `"rotary"`, `"alibi"` and `"relative"`.
        table: A table to use instead of a new one; it keeps its own scale and padding. The weight of a plain
            `nn.Embedding` is used without scale (`TokenEmbedding.from_embedding`).

    Example:
        >>> layer = TransformerEmbedding(vocab_size=1000, embed_dim=64, max_seq_len=128)
        >>> layer(torch.tensor([[5, 2, 7]])).shape
        torch.Size([1, 3, 64])

    Reference: Vaswani et al., Attention is all you need, 2017, section 3.4.
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        max_seq_len: int,
        dropout: float = 0.1,
        *,
        position: PositionName | Position = "learned",
        scale: float | Literal["sqrt_dim"] | None = "sqrt_dim",
        padding_idx: int | None = None,
        init_std: float | Literal["1/sqrt_dim"] = 0.02,
        num_heads: int | None = None,
        table: LookupTable | nn.Embedding | None = None,
    ) -> None:
        super().__init__()
        if table is None:
            table = TokenEmbedding(vocab_size, embed_dim, padding_idx=padding_idx, scale=scale, init_std=init_std)
        table = as_lookup_table(table)
        if (table.vocab_size, table.embed_dim) != (vocab_size, embed_dim):
            sizes = f"{table.vocab_size} tokens of width {table.embed_dim}"
            raise SizeError(f"The table has {sizes}, the layer was asked for {vocab_size} of {embed_dim}.")
        self.table = table
        self.position = as_position(position, max_seq_len=max_seq_len, embed_dim=embed_dim, num_heads=num_heads)
        self.max_seq_len = max_seq_len
        self.dropout = nn.Dropout(dropout)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("token_embedding", "position_embedding"):
            attribute = "table" if name == "token_embedding" else "position"
            raise SizeError(f"{name} is another name of {attribute}: assign layer.{attribute} = ...")
        super().__setattr__(name, value)

    @property
    def token_embedding(self) -> "UnscaledLookup":
        """Return an object that looks up rows without the scale, and otherwise has the attributes of the table.

        `layer(ids)` equals `dropout(scale * token_embedding(ids) + position vectors)`.
        """
        return UnscaledLookup(self.table)

    @property
    def position_embedding(self) -> Position:
        """Return `position` under another name.

        A scheme that adds vectors to the input returns these vectors if it is called with positions.
        """
        return self.position

    @property
    def scale(self) -> float | Tensor:
        """Return the factor that the table applies to looked-up rows; 1 for a table without one."""
        factor = self.table.factor
        return 1.0 if factor is None else factor

    @property
    def config(self) -> JsonObject:
        """Return the constructor's arguments as JSON, with those of the table and of the position scheme."""
        return {
            "vocab_size": self.table.vocab_size,
            "embed_dim": self.table.embed_dim,
            "max_seq_len": self.max_seq_len,
            "dropout": self.dropout.p,
            "table": describe(self.table),
            "position": describe(self.position),
        }

    @property
    def parts(self) -> InputParts:
        """Return the table, the position scheme and the dropout of this layer."""
        parts: Any = self._modules
        return InputParts(parts["table"], parts["position"], parts["dropout"])


class UnscaledLookup:
    """A view of a table: `view(ids)` looks up rows without the scale.

    Its attributes are read from the table, and set on the table.

    Example:
        >>> layer = TransformerEmbedding(100, 16, 12, dropout=0.0, scale=4.0)
        >>> ids = torch.tensor([[5, 2, 7]])
        >>> torch.equal(layer.token_embedding(ids), layer.token_embedding.weight[ids])
        True
    """

    def __init__(self, table: LookupTable) -> None:
        self.table = table

    def __call__(self, ids: IdsLike) -> Vectors:
        """Return the stored rows of `ids`, `(..., T)` to `(..., T, D)`."""
        return self.table.look_up(as_ids(ids, beside=self.table))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "table":
            super().__setattr__(name, value)
        else:
            setattr(self.table, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "table":  # not set yet while an instance is copied
            raise AttributeError(name)
        return getattr(self.table, name)

    def __repr__(self) -> str:
        return f"UnscaledLookup({self.table!r})"


def embed(
    ids: IdsLike | None,
    table: nn.Module,
    position: Position,
    positions: Positions | None = None,
    attention_mask: AttentionMask | None = None,
    *,
    inputs_embeds: Float[Tensor, "*batch T D"] | None = None,
    dropout: nn.Module | None = None,
) -> Float[Tensor, "*batch T D"]:
    """Compute `dropout(position.add(table(ids), positions))`.

    This calls the modules one after another (`run_steps`). One fused pass over the vectors replaces the calls where
    nobody could observe the difference: all methods are those of embedlayer, and there are no hooks.

    Args:
        ids: Token IDs, or `None` with `inputs_embeds`.
        table: A `LookupTable`, or a module that wraps one.
        position: Position scheme.
        positions: Position of each token; by default `positions_of(ids, attention_mask)`.
        attention_mask: Mask of padding and packed documents, as in `positions_of`; unused if `positions` are passed.
        inputs_embeds: Vectors to use instead of `table(ids)`, already scaled.
        dropout: Module that is called last; `None` for no dropout.

    Returns:
        Vectors, `(..., T, D)`.

    Raises:
        SizeError, ShapeError, TokenIdError, PositionError: As in `InputEmbedding.forward`.
    """
    if inputs_embeds is not None or not isinstance(ids, Tensor) or ids.dim() == 0:
        ids = sequence_of(ids, inputs_embeds, table)
    if positions is not None or attention_mask is not None:
        positions = checked_positions(ids, position, positions, attention_mask)
    if inputs_embeds is None and not torch.compiler.is_compiling():  # torch.compile fuses by itself
        if dropout is not None and may_skip_call(table, position, dropout):
            drop: Any = dropout
            return _embed_fused(ids, table, position, positions, drop.p if drop.training else 0.0)
        if may_skip_call(table, position):
            vectors = _embed_fused(ids, table, position, positions, 0.0)
            return vectors if dropout is None else dropout(vectors)
    batch = TokenBatch(ids, positions_of(ids) if positions is None else positions)
    return run_steps(input_steps(table, position, dropout), batch, inputs_embeds)


def trace_embed(
    ids: IdsLike | None,
    table: nn.Module,
    position: Position,
    dropout: nn.Module | None = None,
    *,
    injections: Iterable[EmbeddingInjection] = (),
    **options: Unpack[InputOptions],
) -> Iterator[TracedStep]:
    """Run the steps of `embed` one after another, and yield a `TracedStep` with the vectors after each."""
    inputs_embeds, positions = options.get("inputs_embeds"), options.get("positions")
    at_input = injections_at_input(injections)
    ids = sequence_of(ids, None if at_input else inputs_embeds, table)
    positions = checked_positions(ids, position, positions, options.get("attention_mask"))
    batch = TokenBatch(ids, positions, attention_mask=options.get("attention_mask"))
    steps = input_steps(table, position, dropout, injections=at_input)
    yield from trace_steps(steps, batch, inputs_embeds)


def checked_positions(
    ids: Int[Tensor, "*batch T"], position: Position, positions: Positions | None, attention_mask: AttentionMask | None
) -> Positions:
    """Return the positions of tokens, or those that their mask gives them, after `check_positions` and `check_mask`."""
    if positions is None:
        return positions_of(ids, attention_mask)
    position.check_positions(positions, ids.shape)
    if attention_mask is not None:
        check_mask(attention_mask, ids.shape)
    return positions


def sequence_of(
    ids: IdsLike | None, inputs_embeds: Float[Tensor, "*batch T D"] | None, table: nn.Module
) -> Int[Tensor, "*batch T"]:
    """Return the token IDs as a tensor `(..., T)`, or zeros for `inputs_embeds` `(..., T, D)`."""
    if (ids is None) == (inputs_embeds is None):
        raise SizeError("Give token IDs or inputs_embeds, exactly one of them.")
    if inputs_embeds is not None:
        width = getattr(table, "embed_dim", "D")  # a module that wraps a table need not have it
        if inputs_embeds.dim() < 2 or (isinstance(width, int) and inputs_embeds.shape[-1] != width):
            raise ShapeError(f"inputs_embeds must have shape (..., T, {width}), not {tuple(inputs_embeds.shape)}.")
        return torch.zeros(inputs_embeds.shape[:-1], dtype=torch.int64, device=inputs_embeds.device)
    assert ids is not None
    sequence = as_ids(ids, beside=table)
    if sequence.dim() == 0:
        raise ShapeError("IDs must have shape (..., T), not (): pass torch.tensor([7]) for a single one.")
    return sequence


def _embed_fused(
    ids: Int[Tensor, "*batch T"], table: Any, position: Any, positions: Positions | None, dropout: float
) -> Float[Tensor, "*batch T D"]:
    """Compute `dropout(position.add(table(ids), positions))` in one pass over the looked-up vectors, or in few."""
    weight, stored = table._parameters.get("weight"), None
    are_few = weight is not None and ids.numel() * weight.shape[-1] <= FEW_VECTORS.get(device_kind(ids), 0)
    if (dropout or not are_few) and may_use(table, "stored", "look_up"):
        stored = table.stored(ids)
    addend: Tensor | StoredRows | None = None
    if type(position).add is AdditivePosition.add:
        reads_stored = may_use(position, "stored", "vectors")
        if positions is None and reads_stored:
            addend = position.stored(ids.shape[-1])
        if addend is None:
            positions = positions_of(ids) if positions is None else positions
            addend = position.stored_look_up(positions) if reads_stored else None
            addend = position.vectors(positions) if addend is None else addend
    if stored is not None:
        vectors = gather_scale_add_drop(stored, table.factor, addend, dropout)
        if vectors is not None:
            return vectors
    return scale_add_drop(table.look_up(ids), table.factor, addend, dropout)
