"""Read the embedding layer of a checkpoint: the arguments of `EmbeddingLayer`, and records of what was read."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from embedlayer.checkpoints.reader import Checkpoint
from embedlayer.checkpoints.reading.codes import read_codes
from embedlayer.checkpoints.reading.configuration import MOST_POSITIONS
from embedlayer.checkpoints.reading.head import read_head
from embedlayer.checkpoints.reading.inputs import (
    attention_windows,
    read_decoder_input,
    read_final_norm,
    read_norm,
    read_per_layer,
    read_projection,
    read_streams,
    read_types,
)
from embedlayer.checkpoints.reading.model import CheckpointModel, checkpoint_model
from embedlayer.checkpoints.reading.positions import first_position_id, read_positions
from embedlayer.checkpoints.reading.table import (
    find_table,
    new_table,
    note_other_inputs,
    other_tables,
    read_rows,
    unread_copies,
)
from embedlayer.checkpoints.reading.tensors import LoadedTensor
from embedlayer.core.computed_buffers import recompute_all_buffers
from embedlayer.core.errors import CheckpointError, SizeError
from embedlayer.families.records import FoldedRows
from embedlayer.inputs.parts import TokenDropout
from embedlayer.io.files import JsonObject
from embedlayer.saving import assign

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class LoadRecord:
    """Record of the tensors that were read to load a layer, with counts and notes.

    Attributes:
        source: Path or hub name of the checkpoint; empty for a layer that was not loaded.
        tensors: Tensors that were read.
        bytes_read: Bytes of headers and tensors that were read.
        nonfinite_rows: `"table"`, `"decoder's table"` or `"head"` -> number of its rows with NaN or infinity; a key
            with 0 rows is left out.
        notes: Sentences about what was skipped or contradictory.
        other_tables: Sentences about tables that the model has beside the token table, and that were not read.
        unread_copies: Names of tensors that are called like the token table and have its shape but other values, and
            that were not read, such as `shared.weight` of a BART model whose tables are not tied.
        table_only: Whether only the token table was read, as the caller requested; the first note then says so.
    """

    source: str = ""
    tensors: tuple[LoadedTensor, ...] = ()
    bytes_read: int = 0
    nonfinite_rows: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    other_tables: tuple[str, ...] = ()
    unread_copies: tuple[str, ...] = ()
    table_only: bool = False


def load_record(model: CheckpointModel) -> LoadRecord:
    """Return the record of the tensors that were read so far, with counts and notes."""
    tensors = model.tensors
    return LoadRecord(
        source=tensors.checkpoint.name,
        tensors=tuple(tensors.read_tensors),
        bytes_read=tensors.checkpoint.bytes_read,
        nonfinite_rows=tensors.nonfinite_rows,
        notes=tuple(tensors.notes),
        other_tables=tuple(other_tables(model)),
        unread_copies=tuple(unread_copies(model)),
        table_only=model.table_only,
    )


def read_layer_arguments(model: CheckpointModel, *, per_layer: bool = True, final_norm: bool = False) -> dict[str, Any]:
    """Read the weights of the embedding layer into `model.tensors`, and return the arguments of `EmbeddingLayer`.

    The arguments contain new modules with initial weights, on torch's default device. The caller builds the layer from
    them and then assigns the tensors to it.
    """
    family, tensors = model.family, model.tensors
    tensors.notes.extend(family.notes)
    rows = read_rows(model) if family.table or model.table_only else None
    if model.table_only:
        assert rows is not None
        parts = {"table": new_table(model, rows, is_scaled=False), "family": tensors.family_name, "is_part": True}
        if not model.table_name:
            note_other_inputs(model)
        return {**parts, "padding_id": model.padding_id, "tensor_names": tensors.state_names}
    for other in family.other_tables:
        for name in tensors.checkpoint.find(other.name) if other.is_input else ():
            source, size = tensors.checkpoint.name, tensors.sizes(name)
            raise CheckpointError(f"{source}: {name}, {size}, is not read, and {other.use}.")
    table = None if rows is None else new_table(model, rows)
    codes = None if family.codes is None else read_codes(model.of_decoder(), family.codes)
    recipe = [step for step in model.used_steps(family.recipe) if step != "codes" or codes is not None]
    projection = read_projection(model) if "project" in recipe else None
    first = codes.rows if codes is not None and table is None else table
    assert first is not None
    width = first.embed_dim if projection is None else projection.out_features
    at = len(recipe) if projection is None else recipe.index("project")
    widths = {step: width if i > at else first.embed_dim for i, step in enumerate(recipe)}
    types = read_types(model, widths["types"]) if "types" in recipe else None
    norm = read_norm(model, "norm", family.norm, widths["norm"]) if "norm" in recipe else None
    schemes, blocks = read_positions(model, family.position, widths.get("position", width))
    others = {kind: scheme for kind, scheme in schemes.items() if kind}
    encoder_blocks: tuple[str, ...] = ()
    decoder, output_table = None, first
    if family.decoder_input is not None:
        model, encoder_blocks = model.of_decoder(), blocks
        decoder, (own, blocks) = read_decoder_input(model, family.decoder_input, recipe, widths, width)
        others |= own
        output_table = decoder.table or first
    is_dropped = "token_dropout" in recipe
    mask_token = model.config.whole("mask_token_id", most=MOST_POSITIONS) if is_dropped else None
    per_layer_inputs = None
    if per_layer and family.per_layer is not None:
        try:
            per_layer_inputs = read_per_layer(model, family.per_layer, width)
        except CheckpointError as error:
            raise CheckpointError(f"{error} To leave the per-layer inputs out: load(..., per_layer=False).") from error
    last = codes.table.embed_dim if decoder is not None and codes is not None else width
    return {
        "table": table,
        "position": schemes[""],
        "head": read_head(model, output_table, width),
        "family": tensors.family_name,
        "recipe": [step for step in recipe if step != "project" or projection is not None],
        "numbering": family.numbering,
        "padding_id": model.padding_id,
        "first_position_id": first_position_id(model),
        "types": types,
        "norm": norm,
        "projection": projection,
        "streams": read_streams(model, width),
        "token_dropout": None if mask_token is None else TokenDropout(mask_token),
        "decoder": decoder,
        "codes": codes,
        "per_layer": per_layer_inputs,
        "final_norm": read_final_norm(model, last) if final_norm else None,
        **attention_windows(model),
        "other_positions": others,
        "block_positions": blocks,
        "encoder_block_positions": encoder_blocks,
        "tensor_names": tensors.state_names,
        "is_part": any(other_tables(model)),
    }


def build_with_tensors(model: CheckpointModel, make: Callable[[], Model]) -> Model:
    """Build a layer or a decoder on the meta device, without memory for weights, and assign the tensors to it."""
    name = model.tensors.checkpoint.name
    try:
        with torch.device("meta"):
            module = make()
    except SizeError as error:
        raise CheckpointError(f"{name}: the configuration cannot be built. {error}") from error
    weights = {key: tensor for key, tensor in model.tensors.by_key.items() if not tensor.is_meta}
    assign(module, weights, source=Path(name))
    recompute_all_buffers(module, model.tensors.device)
    return module


def finds_table(checkpoint: Checkpoint) -> bool:
    """Return whether `load(..., table_only=True)` reads the token table of a checkpoint.

    Names and shapes tell it for a table of plain numbers; others are read, stored rows with all their scales.
    """
    try:
        model = checkpoint_model(checkpoint, None, "cpu", table_only=True)
        name = find_table(model)[0]
        if checkpoint.stored(name) is not None or isinstance(model.family.rows, FoldedRows):
            read_rows(model)
    except CheckpointError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class LayerReport(LoadRecord):
    """Description of a layer and of the tensors that were read to load it; `print` shows it as text.

    The attributes of `LoadRecord` come first.

    Attributes:
        family: Name of the model family, or `"unknown"`.
        vocab_size: Number of rows of the table, V.
        embed_dim: Width of a row.
        width: Width of the vectors that the first block receives, D.
        dtype: Dtype in which the rows are stored; for quantised rows the name of their type, such as `"Q4_K"`.
        device: Device of the rows.
        scale: Factor on looked-up rows, as the family defines it; `None` for none.
        embed_scale: `scale` rounded to the dtype of the rows, for families that round the factor (Gemma), else `None`.
        padding_idx: Padding row of the table, or `None`; see `LookupTable`.
        recipe: Steps of the input embedding after look-up and scale.
        positions: Position schemes by kind of layer; the key `""` has that of the first block.
        head: `"tied"`, `"untied"`, or `None` without a head.
        logit_scale: Factor on the logits, or `None` without a head.
        softcap: Cap on the logits, or `None`.
        tokenizer: Number of rows that the tokenizer's IDs need; the error message if the tokenizer cannot be read;
            `None` if there is no tokenizer.
        per_layer: Rows, blocks and width of the per-layer table; `None` for a layer without one.
        streams: Number of rows of each stream of codes; empty for a layer without them.
        parameters: Number of numbers in the parameters of the layer, head included, frozen ones too; a shared one
            counts once.
    """

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
    per_layer: tuple[int, int, int] | None
    streams: tuple[int, ...]
    parameters: int

    def to_json(self) -> JsonObject:
        """Return all fields, with those of `LoadRecord`, as a dictionary of JSON values."""
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
            "input": " -> ".join(("look-up", *self.recipe)) + f" -> width {self.width:,}",
            "positions": "; ".join(f"{kind}: {scheme}" if kind else scheme for kind, scheme in self.positions.items()),
            "head": ", ".join([self.head or "none", *options]),
            "tokenizer": "none" if self.tokenizer is None else str(self.tokenizer),
            "parameters": f"{self.parameters:,}",
            "read": f"{self.bytes_read:,} bytes, {len(self.tensors)} tensors",
        }
        if self.per_layer is not None:
            rows, blocks, width = self.per_layer
            lines["per layer"] = f"{rows:,} rows, a vector of width {width:,} for each of {blocks:,} blocks"
        if self.streams:
            same = len({*self.streams}) == 1
            sizes = f"{self.streams[0]:,} rows each" if same else f"rows {', '.join(map(str, self.streams))}"
            lines["streams"] = f"{len(self.streams)} streams of codes, {sizes}"
        text = [self.source, *(f"  {name:<11}{value}" for name, value in lines.items())]
        text += [f"    {t.key} = {t.name} {t.dtype} {list(t.shape)}" for t in self.tensors]
        text += [f"  {count:,} rows of the {of} contain NaN or infinity" for of, count in self.nonfinite_rows.items()]
        text += [f"  other table: {sentence}" for sentence in self.other_tables]
        return "\n".join([*text, *(f"  note: {note}" for note in self.notes)])
