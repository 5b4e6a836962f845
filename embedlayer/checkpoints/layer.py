"""The embedding layer of a checkpoint: what stands before its first block and after its last."""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from tokenizers import Tokenizer
from torch import Tensor, nn

from embedlayer.checkpoints.families import Numbering, Step
from embedlayer.checkpoints.writer import WriteReceipt, write_tensors
from embedlayer.errors import CheckpointError, EmbedLayerError, EmbedLayerWarning, SizeError
from embedlayer.fields import Range, check_fields
from embedlayer.files import JsonObject
from embedlayer.layers.in_place import Place
from embedlayer.layers.input import sequence_of
from embedlayer.layers.output import OutputHead
from embedlayer.losses.cross_entropy import LossOptions
from embedlayer.positions.position import AttentionMask, Position, positions_of
from embedlayer.pretrained import Pretrained, build, check_saved, describe
from embedlayer.shapes import Ids, IdsLike, Positions, Vectors
from embedlayer.tables.dense import TokenEmbedding, as_table
from embedlayer.tables.table import TokenTable
from embedlayer.text.tokenizer import load_tokenizer, table_size, tokens_without_rows

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
"""Activations of heads, by the words of transformers' configurations."""


class TransformedHead(nn.Module):
    """A head with something before its product: `output(norm(activation(dense(hidden))))` (BERT, ALBERT, OPT).

    Args:
        output: The product with the rows, tied or free.
        dense: A projection to the width of the rows.
        activation: One of `ACTIVATIONS`, or `None`.
        norm: A LayerNorm, or `None`.

    Raises:
        CheckpointError: The activation is not known.
    """

    def __init__(
        self, output: OutputHead, *, dense: nn.Linear, activation: str | None = None, norm: nn.LayerNorm | None = None
    ) -> None:
        super().__init__()
        if activation is not None and activation not in ACTIVATIONS:
            raise CheckpointError(f"The activation {activation!r} is none of {', '.join(ACTIVATIONS)}.")
        self.output = output
        self.dense = dense
        self.activation = activation
        self.norm = norm

    @property
    def tied(self) -> bool:
        """Whether the rows are the table's."""
        return self.output.tied

    @property
    def weight(self) -> Tensor:
        """The rows."""
        weight: Tensor = self.output.weight
        return weight

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments, without the table of a tied head."""
        return {
            **self.output.config,
            "dense": _linear_config(self.dense),
            "activation": self.activation,
            "norm": _norm_config(self.norm),
        }

    def transform(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch R"]:
        """`norm(activation(dense(hidden)))`."""
        narrowed = self.dense(hidden)
        activated = narrowed if self.activation is None else ACTIVATIONS[self.activation](narrowed)
        result: Tensor = activated if self.norm is None else self.norm(activated)
        return result

    def forward(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """A score for each token, `(..., D)` to `(..., V)`."""
        logits: Tensor = self.output(self.transform(hidden))
        return logits

    def loss(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"], **options: Unpack[LossOptions]
    ) -> Float[Tensor, "*result"]:
        """Cross entropy of `targets` under `softmax(head(hidden))`; see `OutputHead.loss`."""
        return self.output.loss(self.transform(hidden), targets, **options)

    def extra_repr(self) -> str:
        """The activation, for `print`."""
        return "" if self.activation is None else f"activation={self.activation}"


@dataclass(frozen=True)
class ReadTensor:
    """One tensor that was read.

    Attributes:
        part: Where it went: a key of the layer's state.
        name: Its name in the checkpoint.
        shape: Its sizes.
        dtype: Its type in the checkpoint.
        nbytes: Bytes it takes there.
    """

    part: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Origin:
    """Where a layer came from.

    Attributes:
        source: What it was loaded from.
        tensors: What was read.
        bytes_read: Bytes of headers and tensors that were read.
        nonfinite_rows: Rows with NaN or infinity, by part.
        notes: What was skipped, guessed or contradicts, in sentences.
    """

    source: str
    tensors: tuple[ReadTensor, ...] = ()
    bytes_read: int = 0
    nonfinite_rows: Mapping[str, int] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerReport:
    """What a layer is and what was read to make it; `print` shows it, `to_json` is for machines.

    Attributes:
        source: What it was loaded from.
        family: Layout, or `"unknown"`.
        vocab_size: Rows of the table, V.
        embed_dim: Width of a row.
        width: Width of what the first block receives, D.
        dtype: Type of the rows.
        device: Where they are.
        scale: Factor on looked-up rows, as stated; `None` for none.
        embed_scale: The same, rounded to the type of the rows, where the family rounds it (Gemma).
        padding_idx: Row that is zero and stays zero.
        recipe: Steps of the way in.
        positions: The schemes, by kind of layer where there are several.
        head: `"tied"`, `"free"` or `None`.
        logit_scale: Factor on the products of the head.
        softcap: Cap on its logits.
        tokenizer: How many rows its tokenizer needs, why it cannot be read, or `None` if it has none.
        parameters: Numbers that can be trained, at both ends together.
        tensors: What was read.
        bytes_read: Bytes of headers and tensors that were read.
        nonfinite_rows: Rows with NaN or infinity, by part; only parts that have some.
        notes: What was skipped, guessed or contradicts.
    """

    source: str
    family: str
    vocab_size: int
    embed_dim: int
    width: int
    dtype: str
    device: str
    scale: float | None
    embed_scale: float | None
    padding_idx: int | None
    recipe: tuple[str, ...]
    positions: dict[str, str]
    head: str | None
    logit_scale: float | None
    softcap: float | None
    tokenizer: int | str | None
    parameters: int
    tensors: tuple[ReadTensor, ...]
    bytes_read: int
    nonfinite_rows: dict[str, int]
    notes: tuple[str, ...]

    def to_json(self) -> JsonObject:
        """Every field, as JSON has it."""
        content: JsonObject = json.loads(json.dumps(asdict(self)))
        return content

    def __str__(self) -> str:
        scale = "none" if self.scale is None else f"{self.scale:.6g}"
        if self.embed_scale is not None:
            scale += f", rounded to {self.embed_scale:.6g}"
        options = [f"logit scale {self.logit_scale:g}"] if self.logit_scale not in (None, 1.0) else []
        options += [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        lines = {
            "family": self.family,
            "table": f"{self.vocab_size:,} x {self.embed_dim:,} {self.dtype} on {self.device}",
            "scale": scale,
            "padding": "none" if self.padding_idx is None else f"row {self.padding_idx}",
            "way in": " -> ".join(("look-up", *self.recipe)) + f" -> width {self.width:,}",
            "positions": "; ".join(f"{kind}: {scheme}" if kind else scheme for kind, scheme in self.positions.items()),
            "head": ", ".join([self.head or "none", *options]),
            "tokenizer": "none" if self.tokenizer is None else str(self.tokenizer),
            "parameters": f"{self.parameters:,}",
            "read": f"{self.bytes_read:,} bytes, {len(self.tensors)} tensors",
        }
        text = [self.source, *(f"  {name:<11}{value}" for name, value in lines.items())]
        text += [f"    {t.part} = {t.name} {t.dtype} {list(t.shape)}" for t in self.tensors]
        text += [f"  {count:,} rows of {part} hold NaN or infinity" for part, count in self.nonfinite_rows.items()]
        return "\n".join([*text, *(f"  note: {note}" for note in self.notes)])


class EmbeddingLayer(Pretrained):
    """The two ends of a model: `input(ids)` is what its first block receives, `head(hidden)` are its logits.

    `embedlayer.load` makes one out of a checkpoint. In training, the dropout that some families have after the way in
    is the caller's.

    Args:
        table: What each token is.
        position: Where each token is, as the first block sees it; neutral if `None`.
        head: The way out, tied to `table` or free; `None` for none.
        family: Name of the layout.
        recipe: Steps of the way in, after look-up and scale: `"types"`, `"project"`, `"position"`, `"norm"`.
        numbering: How positions are counted where none are given; see `families.Numbering`.
        padding_id: Token that `numbering="ids"` does not count.
        first_position_id: What transformers calls position 0 in `position_ids` (RoBERTa: 2).
        types: Rows of token types, or `"table"` if they are rows of the table (GPT-2).
        norm: The LayerNorm of the recipe.
        projection: The projection of the recipe.
        other_positions: Schemes of other layers, by kind: Gemma 3's `"full_attention"`, T5's `"decoder"`.
        tensor_names: Names in the checkpoint, by key of this layer's state; the first is the one that was read.

    Raises:
        SizeError: The recipe has a step twice, or one that there is nothing for.
    """

    def __init__(
        self,
        table: TokenTable | nn.Embedding,
        position: Position | None = None,
        head: OutputHead | TransformedHead | None = None,
        *,
        family: str = "unknown",
        recipe: Sequence[Step] = (),
        numbering: Numbering = "all",
        padding_id: int | None = None,
        first_position_id: int = 0,
        types: TokenEmbedding | Literal["table"] | None = None,
        norm: nn.LayerNorm | None = None,
        projection: nn.Linear | None = None,
        other_positions: Mapping[str, Position] | None = None,
        tensor_names: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        super().__init__()
        there = {"types": types, "project": projection, "norm": norm, "position": True}
        if len(set(recipe)) != len(recipe) or any(there.get(step) is None for step in recipe):
            raise SizeError(f"The recipe {' -> '.join(recipe)} has a step twice, or one that there is nothing for.")
        if numbering == "ids" and padding_id is None:
            raise SizeError('numbering="ids" counts the tokens that are not padding: it needs padding_id.')
        self.table = as_table(table)
        self.position = Position() if position is None else position
        self.head = head
        output, parent, name = (
            (head.output, head, "output") if isinstance(head, TransformedHead) else (head, self, "head")
        )
        if output is not None and output.table is table:
            output.follow_places([Place(self, "table")], Place(parent, name))
        self.family = family
        self.recipe = tuple(recipe)
        self.numbering = numbering
        self.padding_id = padding_id
        self.first_position_id = first_position_id
        self.types = types if isinstance(types, TokenEmbedding) else None
        self.types_from_table = types == "table" if isinstance(types, str) else False
        self.norm = norm
        self.projection = projection
        self.other_positions = nn.ModuleDict(dict(other_positions or {}))
        self.tensor_names = {key: tuple(names) for key, names in (tensor_names or {}).items()}
        self.origin = Origin("")
        self._find_tokenizer: Callable[[], Path | None] = _no_tokenizer
        self._tokenizer: Tokenizer | None = None

    @property
    def width(self) -> int:
        """Width of what the first block receives, D."""
        return self.table.embed_dim if self.projection is None else self.projection.out_features

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments."""
        return {
            "table": describe(self.table),
            "position": describe(self.position),
            "head": None if self.head is None else {"tied": self.head.tied, **self.head.config},
            "family": self.family,
            "recipe": list(self.recipe),
            "numbering": self.numbering,
            "padding_id": self.padding_id,
            "first_position_id": self.first_position_id,
            "types": "table" if self.types_from_table else None if self.types is None else describe(self.types),
            "norm": _norm_config(self.norm),
            "projection": _linear_config(self.projection),
            "other_positions": {kind: describe(position) for kind, position in self._others()},
            "tensor_names": {key: list(names) for key, names in self.tensor_names.items()},
        }

    @classmethod
    def from_config(cls: type["EmbeddingLayer"], config: JsonObject) -> "EmbeddingLayer":
        """Build the layer that `config` describes; a tied head is given the table that was just built."""
        options = dict(config)
        try:
            table, position = build(options.pop("table")), build(options.pop("position"))
            types = options.pop("types")
            head = options.pop("head")
            return cls.construct(
                table=table,
                position=position,
                head=None if head is None else _head(head, table),
                types=build(types) if isinstance(types, dict) else types,
                norm=_norm(options.pop("norm")),
                projection=_linear(options.pop("projection")),
                other_positions={kind: build(value) for kind, value in options.pop("other_positions").items()},
                **options,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"The saved configuration does not fit an EmbeddingLayer: {error!r}.") from error

    @classmethod
    def from_pretrained(
        cls, source: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> "EmbeddingLayer":
        """What `embedlayer.load` gives."""
        from embedlayer.checkpoints.loader import load

        return load(source, dtype=dtype, device=device)

    def save_pretrained(self, directory: Path | str, *, tokenizer: Any = None) -> None:
        """Write the layer, with its tokenizer, as a folder that `embedlayer.load` reads back bit for bit.

        Raises:
            FileError: The folder cannot be written.
        """
        super().save_pretrained(directory, tokenizer=self.tokenizer if tokenizer is None else tokenizer)

    def write_into(self, checkpoint_dir: Path | str, out_dir: Path | str) -> WriteReceipt:
        """Write the whole checkpoint in `checkpoint_dir`, with this layer's tensors in place of its own, to `out_dir`.

        The other tensors are streamed from file to file. Tied aliases and the index of shards are kept, stored types
        too; a table with other rows changes `vocab_size`. The new folder appears complete or not at all.

        Raises:
            CheckpointError: This layer is not of that checkpoint; or it was folded together on loading, so that its
                rows have no place there (model2vec with a mapping or weights).
            FileError: `out_dir` is not empty, or cannot be written.
        """
        state = self.state_dict()
        unplaced = sorted(state.keys() ^ self.tensor_names.keys())
        if unplaced:
            raise CheckpointError(
                f"{', '.join(unplaced)} of this layer and the checkpoint's tensors are not one to one, so they cannot "
                f"be put back. Save the layer by itself with save_pretrained."
            )
        tensors = {name: state[key] for key, names in self.tensor_names.items() for name in names}
        return write_tensors(tensors, checkpoint_dir, out_dir, table=self.tensor_names["table.weight"][0])

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, read when it is first asked for; `None` if it has none.

        Raises:
            TokenizerError: It is damaged.
        """
        if self._tokenizer is None:
            path = self._find_tokenizer()
            if path is not None:
                self._tokenizer = load_tokenizer(path)
                self._warn_of_tokens_without_rows(self._tokenizer)
        return self._tokenizer

    def _warn_of_tokens_without_rows(self, tokenizer: Tokenizer) -> None:
        mismatch = tokens_without_rows(tokenizer, self.table.vocab_size)
        if mismatch is not None:
            warnings.warn(mismatch, EmbedLayerWarning, stacklevel=3)

    def input(
        self,
        ids: IdsLike,
        attention_mask: AttentionMask | None = None,
        *,
        position_ids: Positions | None = None,
        positions: Positions | None = None,
        token_type_ids: Ids | None = None,
    ) -> Vectors:
        """Token IDs `(T,)` or `(B, T)` to what the first block receives, `(..., T, D)`.

        Args:
            ids: Token IDs.
            attention_mask: 0 for padding. As in transformers it moves positions in OPT only; elsewhere left-padded text
                needs `positions=positions_of(ids, attention_mask)`.
            position_ids: Where each token stands, as transformers counts for this family (RoBERTa's text starts at 2).
            positions: The same, from 0 in every family.
            token_type_ids: Segments (BERT, ALBERT); by default 0, and none in GPT-2 and GPT-J.

        Raises:
            TokenIdError: An ID is outside the table.
            PositionError: The sequence is longer than the positions cover.
            SizeError: Both kinds of positions are given, or token types to a family without them.
        """
        if position_ids is not None and positions is not None:
            raise SizeError("Give position_ids (as transformers counts) or positions (from 0), not both.")
        if token_type_ids is not None and "types" not in self.recipe:
            raise SizeError(f"A layer of family {self.family} has no token types: leave token_type_ids out.")
        if position_ids is not None:
            positions = position_ids - self.first_position_id
        ids = sequence_of(ids, None, self.table)
        x: Tensor = self.table(ids)
        for step in self.recipe:
            if step == "position":
                x = self.position.add(x, self._positions(ids, attention_mask) if positions is None else positions)
            elif step == "types":
                x = self._add_types(x, ids, token_type_ids)
            else:
                layer = self.norm if step == "norm" else self.projection
                assert layer is not None
                x = layer(x)
        return x

    def forward(self, ids: IdsLike, attention_mask: AttentionMask | None = None, **options: Any) -> Vectors:
        """`input(ids, attention_mask, **options)`."""
        return self.input(ids, attention_mask, **options)

    def _positions(self, ids: Ids, attention_mask: AttentionMask | None) -> Positions:
        """Positions by the family's numbering, from 0; padding at -1 where it counts text only."""
        if self.numbering == "ids":
            assert self.padding_id is not None
            attention_mask = ids.ne(self.padding_id)
        return positions_of(ids, None if self.numbering == "all" else attention_mask, padding_position=-1)

    def _add_types(self, x: Vectors, ids: Ids, token_type_ids: Ids | None) -> Vectors:
        if self.types_from_table:
            return x if token_type_ids is None else x + self.table(token_type_ids)
        assert self.types is not None
        types: Tensor = self.types(torch.zeros_like(ids) if token_type_ids is None else token_type_ids)
        return x + types

    def position_of(self, kind: str | None = None) -> Position:
        """The scheme of one kind of layer, such as `"full_attention"`; without a name the first block's.

        Raises:
            SizeError: There is no such kind.
        """
        if kind is None:
            return self.position
        if kind not in self.other_positions:
            known = ", ".join(self.other_positions) or "none"
            raise SizeError(f"No layers of kind {kind!r} have positions of their own; other kinds here: {known}.")
        position = self.other_positions[kind]
        assert isinstance(position, Position)
        return position

    def _others(self) -> Iterable[tuple[str, Position]]:
        return ((kind, self.position_of(kind)) for kind in self.other_positions)

    def report(self) -> LayerReport:
        """What this layer is, and what was read to make it. Reads the tokenizer."""
        output = self.head.output if isinstance(self.head, TransformedHead) else self.head
        first = next(chain(self.table.parameters(), self.table.buffers()))
        embed_scale = getattr(self.table, "embed_scale", None)
        return LayerReport(
            source=self.origin.source,
            family=self.family,
            vocab_size=self.table.vocab_size,
            embed_dim=self.table.embed_dim,
            width=self.width,
            dtype=str(first.dtype).removeprefix("torch."),
            device=str(first.device),
            scale=self.table.scale,
            embed_scale=float(embed_scale) if isinstance(embed_scale, Tensor) else None,
            padding_idx=self.table.padding_idx,
            recipe=self.recipe,
            positions={"": _shown(self.position)} | {kind: _shown(position) for kind, position in self._others()},
            head=None if self.head is None else "tied" if self.head.tied else "free",
            logit_scale=None if output is None else output.logit_scale,
            softcap=None if output is None else output.softcap,
            tokenizer=self._tokenizer_rows(),
            parameters=sum(parameter.numel() for parameter in self.parameters()),
            tensors=self.origin.tensors,
            bytes_read=self.origin.bytes_read,
            nonfinite_rows=dict(self.origin.nonfinite_rows or {}),
            notes=self.origin.notes,
        )

    def _tokenizer_rows(self) -> int | str | None:
        try:
            return None if self.tokenizer is None else table_size(self.tokenizer)
        except EmbedLayerError as error:
            return str(error)

    def check(self) -> None:
        """Wait for the device and raise the error of a bad ID or position since the last check."""
        self.table.check()
        self.position.check()


def _no_tokenizer() -> None:
    return None


def _shown(position: Position) -> str:
    """One line about a scheme."""
    return "none" if type(position) is Position else f"{type(position).__name__}({position.extra_repr()})"


def _norm_config(norm: nn.LayerNorm | None) -> JsonObject | None:
    return None if norm is None else {"width": norm.normalized_shape[0], "eps": norm.eps}


def _linear_config(linear: nn.Linear | None) -> JsonObject | None:
    if linear is None:
        return None
    return {"in": linear.in_features, "out": linear.out_features, "bias": linear.bias is not None}


Width = Annotated[int, Range(1, 1 << 24)]


class NormConfig(TypedDict):
    """A LayerNorm in a saved configuration."""

    width: Width
    eps: float


LinearConfig = TypedDict("LinearConfig", {"in": Width, "out": Width, "bias": bool})


def _norm(config: JsonObject | None) -> nn.LayerNorm | None:
    if config is None:
        return None
    check_fields(config, NormConfig, "The saved configuration of a LayerNorm")
    return nn.LayerNorm(config["width"], eps=config["eps"])


def _linear(config: JsonObject | None) -> nn.Linear | None:
    if config is None:
        return None
    check_fields(config, LinearConfig, "The saved configuration of a projection")
    return nn.Linear(config["in"], config["out"], bias=config["bias"])


def _head(config: JsonObject, table: TokenTable) -> OutputHead | TransformedHead:
    options = dict(config)
    tied, dense = options.pop("tied"), _linear(options.pop("dense", None))
    activation, norm = options.pop("activation", None), _norm(options.pop("norm", None))
    check_saved(TransformedHead, {"activation": activation})
    check_saved(OutputHead, options)
    output = OutputHead(table if tied else None, **options)
    return output if dense is None else TransformedHead(output, dense=dense, activation=activation, norm=norm)
