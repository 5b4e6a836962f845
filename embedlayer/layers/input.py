"""The way in: token IDs to what enters the first block."""

import math
from collections.abc import Callable
from typing import Any, Literal, TypeGuard, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from embedlayer.bounds import as_ids
from embedlayer.errors import ShapeError, SizeError
from embedlayer.io.files import JsonObject
from embedlayer.layers.one_pass import gather_scale_add, scale_add_drop
from embedlayer.overrides import has_hooks, is_current, is_unchanged
from embedlayer.positions.alibi import AlibiBias
from embedlayer.positions.learned import LearnedPositionalEmbedding
from embedlayer.positions.position import AdditivePosition, AttentionMask, Position, positions_of
from embedlayer.positions.relative import RelativePositionBias
from embedlayer.positions.rotary import RotaryEmbedding
from embedlayer.positions.sinusoidal import SinusoidalPositionalEmbedding
from embedlayer.pretrained import Pretrained, describe
from embedlayer.shapes import IdsLike, Positions, Vectors
from embedlayer.tables.dense import TokenEmbedding, as_table
from embedlayer.tables.table import TokenTable

PositionName = Literal["learned", "sinusoidal", "scaled-sinusoidal", "rotary", "alibi", "relative", "none"]

GPT_CONFIG_124M: dict[str, Any] = {
    "vocab_size": 50257,
    "context_size": 256,
    "emb_dim": 768,
    "n_heads": 12,
    "n_layers": 12,
    "drop_rate": 0.1,
    "qkv_bias": False,
}
"""GPT-2 small as the book "Build a Large Language Model From Scratch" writes it, with a context of 256."""


def make_position(
    name: PositionName,
    *,
    max_seq_len: int,
    embed_dim: int,
    num_heads: int | None = None,
    head_dim: int | None = None,
    init_std: float = 0.02,
) -> Position:
    """A position scheme by its name; `"relative"` is T5's for decoders, `"scaled-sinusoidal"` learns one factor.

    Raises:
        SizeError: The name is unknown, or a scheme that works on heads is asked for without `num_heads`.
    """
    if name == "learned":
        return LearnedPositionalEmbedding(max_seq_len, embed_dim, init_std=init_std)
    if name == "sinusoidal":
        return SinusoidalPositionalEmbedding(max_seq_len, embed_dim)
    if name == "scaled-sinusoidal":
        return SinusoidalPositionalEmbedding(
            max_seq_len, embed_dim, layout="concatenated", init_scale=1 / math.sqrt(embed_dim)
        )
    if name == "none":
        return Position()
    if name not in ("rotary", "alibi", "relative"):
        raise SizeError(f"Position {name!r} is none of: {', '.join(get_args(PositionName))}.")
    if num_heads is None:
        raise SizeError(f"{name} positions work on attention heads: give num_heads, or the position as an object.")
    if name == "alibi":
        return AlibiBias(num_heads)
    if name == "relative":
        return RelativePositionBias(num_heads, bidirectional=False, init_std=init_std)
    if head_dim is None and embed_dim % num_heads:
        raise SizeError(f"embed_dim {embed_dim} is not divisible by {num_heads} heads.")
    return RotaryEmbedding(embed_dim // num_heads if head_dim is None else head_dim)


def as_position(
    position: Position | PositionName,
    *,
    max_seq_len: int,
    embed_dim: int,
    num_heads: int | None = None,
    head_dim: int | None = None,
) -> Position:
    """Return the position of a model of these sizes: `position` itself, or the scheme of that name.

    Raises:
        SizeError: The name is unknown, the position was built for other sizes, or it is no position.
    """
    if isinstance(position, str):
        position = make_position(
            position, max_seq_len=max_seq_len, embed_dim=embed_dim, num_heads=num_heads, head_dim=head_dim
        )
    if not isinstance(position, Position):
        raise SizeError(
            f"A position is needed here; found {type(position).__name__}: pass one of the names "
            f"{', '.join(get_args(PositionName))}, or an object such as LearnedPositionalEmbedding({max_seq_len}, "
            f"{embed_dim}), which takes the rows of an nn.Embedding by load_state_dict."
        )
    position.require_sizes(embed_dim=embed_dim, num_heads=num_heads, head_dim=head_dim)
    return position


class TransformerEmbedding(Pretrained):
    """The input of a transformer: `dropout(position.add(scale * table(ids), positions))`.

    Args:
        vocab_size: Rows of the table, V.
        embed_dim: Width of a row, D.
        max_seq_len: Longest sequence.
        dropout: Share of the numbers set to 0 in training.
        position: A `Position`, or the name of one: `"learned"`, `"sinusoidal"`, `"scaled-sinusoidal"`, `"rotary"`,
            `"alibi"`, `"relative"`, `"none"`. Those that rotate or are biases add nothing here: hand `layer.position`
            to the attention, which calls `rotate` and `bias`.
        scale: Factor on the looked-up rows: a number, `"sqrt_dim"` (the original Transformer), or `None`.
        padding_idx: Row that is zero and stays zero; `None` for no such row.
        init_std: Standard deviation of the normal initialisation: a number, or `"1/sqrt_dim"`.
        num_heads: Query heads; needed for `"rotary"`, `"alibi"` and `"relative"`.
        table: A table to use instead of a fresh one of these sizes, which keeps its own scale and padding; or a plain
            `nn.Embedding`, whose weight is used (`TokenEmbedding.from_embedding`), without scale.

    Raises:
        SizeError: A size is below 1, or `table` or `position` has other sizes.

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
        table: TokenTable | nn.Embedding | None = None,
    ) -> None:
        super().__init__()
        if table is None:
            table = TokenEmbedding(vocab_size, embed_dim, padding_idx=padding_idx, scale=scale, init_std=init_std)
        table = as_table(table)
        if (table.vocab_size, table.embed_dim) != (vocab_size, embed_dim):
            raise SizeError(
                f"The table has {table.vocab_size} tokens of width {table.embed_dim}, "
                f"the layer was asked for {vocab_size} of {embed_dim}."
            )
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
    def token_embedding(self) -> "UnscaledRows":
        """The look-up without the scale: `layer(ids)` is `dropout(token_embedding(ids) * scale + position vectors)`."""
        return UnscaledRows(self.table)

    @property
    def position_embedding(self) -> Position:
        """`position`: called with positions, an additive scheme returns their vectors."""
        return self.position

    @property
    def scale(self) -> float | Tensor:
        """Factor on the looked-up rows: the table's, or 1."""
        factor = self.table.factor
        return 1.0 if factor is None else factor

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments."""
        return {
            "vocab_size": self.table.vocab_size,
            "embed_dim": self.table.embed_dim,
            "max_seq_len": self.max_seq_len,
            "dropout": self.dropout.p,
            "table": describe(self.table),
            "position": describe(self.position),
        }

    def forward(
        self,
        ids: IdsLike | None = None,
        *,
        inputs_embeds: Float[Tensor, "*batch T D"] | None = None,
        positions: Positions | None = None,
        attention_mask: AttentionMask | None = None,
    ) -> Float[Tensor, "*batch T D"]:
        """Turn token IDs `(T,)` or `(B, T)` into vectors `(T, D)` or `(B, T, D)`.

        Args:
            ids: Token IDs.
            inputs_embeds: Vectors in place of `table(ids)`, scale included, as in transformers: positions and dropout
                follow.
            positions: Where each token stands, `(T,)` or the shape of `ids`; by default from 0, or as the mask says.
            attention_mask: Padding and packed documents, as in `positions_of`.

        Raises:
            TokenIdError: An ID is outside the table.
            PositionError: The sequence is longer than the positions cover.
            SizeError: Both or neither of `ids` and `inputs_embeds` are given.
            ShapeError: `ids` are no integers, or `inputs_embeds` have another width.
        """
        return embed(
            ids,
            self.table,
            self.position,
            positions,
            attention_mask,
            inputs_embeds=inputs_embeds,
            dropout=self.dropout,
        )

    def check(self) -> None:
        """Wait for the device and raise the error of a bad ID or position since the last check."""
        self.table.check()
        self.position.check()


class UnscaledRows:
    """A table whose calls leave the scale out: `rows(ids)` is `table.look_up(ids)`; all else is the table's.

    Example:
        >>> layer = TransformerEmbedding(100, 16, 12, dropout=0.0, scale=4.0)
        >>> ids = torch.tensor([[5, 2, 7]])
        >>> torch.equal(layer.token_embedding(ids), layer.token_embedding.weight[ids])
        True
    """

    def __init__(self, table: TokenTable) -> None:
        self.table = table

    def __call__(self, ids: IdsLike) -> Vectors:
        """Return the rows of `ids` as stored, `(..., T)` to `(..., T, D)`."""
        return self.table.look_up(as_ids(ids, beside=self.table))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "table":
            super().__setattr__(name, value)
        else:
            setattr(self.table, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "table":  # not there yet while an instance is copied
            raise AttributeError(name)
        return getattr(self.table, name)

    def __repr__(self) -> str:
        return f"UnscaledRows({self.table!r})"


class GPTEmbedding(Pretrained):
    """The input of GPT-2: `tok_emb(ids) + pos_emb(positions)`, without scale and without dropout.

    Args:
        vocab_size: Rows of the table, V.
        emb_dim: Width of a row, D.
        context_size: Longest sequence.
        init_std: Standard deviation of both tables' normal initialisation.

    Raises:
        SizeError: A size is below 1.

    Example:
        >>> GPTEmbedding(50257, 256, 4)(torch.tensor([[40, 367, 2885, 1464]])).shape
        torch.Size([1, 4, 256])

    Reference: Radford et al., GPT-2, 2019 (`wte`, `wpe`).
    """

    def __init__(self, vocab_size: int, emb_dim: int, context_size: int, *, init_std: float = 0.02) -> None:
        super().__init__()
        self.tok_emb = TokenEmbedding(vocab_size, emb_dim, init_std=init_std)
        self.pos_emb = LearnedPositionalEmbedding(context_size, emb_dim, init_std=init_std)

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments."""
        return {
            "vocab_size": self.tok_emb.vocab_size,
            "emb_dim": self.tok_emb.embed_dim,
            "context_size": self.pos_emb.max_seq_len,
            "init_std": self.tok_emb.init_std,
        }

    def forward(
        self,
        ids: IdsLike | None = None,
        *,
        inputs_embeds: Float[Tensor, "*batch T D"] | None = None,
        positions: Positions | None = None,
        attention_mask: AttentionMask | None = None,
    ) -> Float[Tensor, "*batch T D"]:
        """Turn token IDs `(T,)` or `(B, T)` into vectors; arguments and errors as in `TransformerEmbedding`."""
        return embed(ids, self.tok_emb, self.pos_emb, positions, attention_mask, inputs_embeds=inputs_embeds)

    def check(self) -> None:
        """Wait for the device and raise the error of a bad ID or position since the last check."""
        self.tok_emb.check()
        self.pos_emb.check()


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
    """Return `dropout(position.add(table(ids), positions))`: the one definition of the input embedding.

    It is computed by these calls, or in one pass over the vectors where nobody could notice: where the methods are ours
    and not overridden or replaced, and there are no hooks.

    Args:
        ids: Token IDs.
        table: What each token is: a `TokenTable`, or a module that wraps one.
        position: Where each token is.
        positions: By default `positions_of(ids, attention_mask)`.
        attention_mask: Padding and packed documents, as in `positions_of`.
        inputs_embeds: Vectors in place of `table(ids)`.
        dropout: Called last; `None` for no dropout.

    Raises:
        SizeError: Both or neither of `ids` and `inputs_embeds` are given.
        ShapeError: `ids` are no sequence, or `inputs_embeds` have another width than the table.
    """
    ids = sequence_of(ids, inputs_embeds, table)
    share = _share_of(dropout)
    if inputs_embeds is None and _can_fuse(table, position):
        x = _fused(ids, table, position, positions, attention_mask, dropout=share or 0.0)
        return x if dropout is None or share is not None else dropout(x)
    positions = positions_of(ids, attention_mask) if positions is None else positions
    x = position.add(table(ids) if inputs_embeds is None else inputs_embeds, positions)
    return x if dropout is None else dropout(x)


def sequence_of(
    ids: IdsLike | None, inputs_embeds: Float[Tensor, "*batch T D"] | None, table: nn.Module
) -> Int[Tensor, "*batch T"]:
    """Return the token IDs as a tensor, or, where vectors are given in their place, zeros of the IDs' shape.

    Raises:
        SizeError: Both or neither are given.
        ShapeError: The IDs are no sequence, or the vectors have another width than the table.
    """
    if (ids is None) == (inputs_embeds is None):
        raise SizeError("Give token IDs or inputs_embeds, exactly one of them.")
    if inputs_embeds is not None:
        width = getattr(table, "embed_dim", "D")  # a module that wraps a table need not have it
        if inputs_embeds.dim() < 2 or (isinstance(width, int) and inputs_embeds.shape[-1] != width):
            raise ShapeError(
                f"inputs_embeds must have shape (..., T, {width}), a vector for each token, "
                f"not {tuple(inputs_embeds.shape)}."
            )
        return torch.zeros(inputs_embeds.shape[:-1], dtype=torch.int64, device=inputs_embeds.device)
    assert ids is not None
    found = as_ids(ids, beside=table)
    if found.dim() == 0:
        raise ShapeError("IDs must have shape (..., T), not (): a single one is written torch.tensor([7]).")
    return found


_TABLE: dict[str, Callable[..., Any]] = {"__call__": nn.Module.__call__, "forward": TokenTable.forward}
_ADDITIVE: dict[str, Callable[..., Any]] = {
    "__call__": nn.Module.__call__,
    "forward": AdditivePosition.forward,
    "add": AdditivePosition.add,
}
_NEUTRAL: dict[str, Callable[..., Any]] = {"add": Position.add}
_DROPOUT: dict[str, Callable[..., Any]] = {"__call__": nn.Module.__call__, "forward": nn.Dropout.forward}
"""The methods that one pass stands for, as they are when this is imported."""


def _can_fuse(table: nn.Module, position: Position) -> TypeGuard[TokenTable]:
    """Return whether nobody could tell one pass from the calls of `table` and `position.add`.

    A compiled graph is made from the calls: the compiler fuses them itself.
    """
    if torch.compiler.is_compiling() or not isinstance(table, TokenTable):
        return False
    if has_hooks(table) or not is_unchanged(table, **_TABLE):
        return False
    return is_unchanged(position, **_NEUTRAL) or (is_unchanged(position, **_ADDITIVE) and not has_hooks(position))


def _reads_stored(part: TokenTable | AdditivePosition, definition: str) -> bool:
    """Return whether `part.stored` may be read in place of a call of the method `definition`."""
    return definition not in vars(part) and is_current(type(part), "stored", definition)


def _share_of(dropout: nn.Module | None) -> float | None:
    """Return the share of numbers that `dropout` sets to 0, or `None` where it has to be called."""
    if not isinstance(dropout, nn.Dropout) or has_hooks(dropout) or not is_unchanged(dropout, **_DROPOUT):
        return None
    return dropout.p if dropout.training else 0.0


def _fused(
    ids: Int[Tensor, "*batch T"],
    table: TokenTable,
    position: Position,
    positions: Positions | None,
    attention_mask: AttentionMask | None,
    *,
    dropout: float,
) -> Float[Tensor, "*batch T D"]:
    """Compute `embed` in one pass over the vectors that were looked up."""
    if not isinstance(position, AdditivePosition):
        return scale_add_drop(table.look_up(ids), table.factor, None, dropout)
    addend = None
    if positions is None and attention_mask is None and _reads_stored(position, "vectors"):
        addend = position.stored(ids.shape[-1])
    if addend is None:
        addend = position.vectors(positions_of(ids, attention_mask) if positions is None else positions)
    if not dropout and not torch.is_grad_enabled() and _reads_stored(table, "look_up"):
        found = table.stored(ids)
        if found is not None:
            return gather_scale_add(*found, table.factor, addend)
    return scale_add_drop(table.look_up(ids), table.factor, addend, dropout)
