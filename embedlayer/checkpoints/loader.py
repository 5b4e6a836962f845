"""Read tensors and sizes of a checkpoint's embedding layer by the record of its model family."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from embedlayer.census.tensors import TensorRule, tensor_rule
from embedlayer.checkpoints.configuration import (
    factor_value,
    logit_factors,
    text_config,
    with_defaults,
    with_whole_model,
)
from embedlayer.checkpoints.meta_layout import has_meta_layout
from embedlayer.checkpoints.reader import CONFIG, Checkpoint
from embedlayer.checkpoints.refusals import (
    NAMED,
    quantised_error,
    quantised_parts,
    states_quantisation,
    table_advice,
    table_names,
    unknown_family_error,
)
from embedlayer.computed_buffers import recompute_all_buffers
from embedlayer.errors import CheckpointError, SizeError
from embedlayer.families import (
    CONFIG_KEYS,
    HEAD_CLASSES,
    MULTIMODAL,
    STATIC_EMBEDDING,
    UNKNOWN,
    Family,
    family_of,
    gguf_family,
    rotary_facts,
    stated_size,
)
from embedlayer.families.final_norms import FINAL_NORMS, WINDOW_IN_ALL_BLOCKS
from embedlayer.families.records import (
    AlibiPositions,
    AxialPositions,
    Factor,
    HeadSpec,
    LearnedPositions,
    LinearSpec,
    Names,
    NormSpec,
    OtherTable,
    PositionChoice,
    PositionSpec,
    Presence,
    RelativePositions,
    ShiftSpec,
    SinusoidalPositions,
    Step,
)
from embedlayer.io.gguf_files import dequantise
from embedlayer.io.json_fields import as_number, as_whole_number
from embedlayer.io.safetensors_files import DTYPES
from embedlayer.layers.decoder_input import DecoderInput
from embedlayer.layers.input_parts import (
    ElementwiseAffine,
    FeatureProjection,
    OffsetRMSNorm,
    PredictionStreams,
    ShiftScale,
    TokenDropout,
    TrigramProjection,
    TypeTables,
)
from embedlayer.layers.output import OutputHead
from embedlayer.layers.per_layer import PerLayerInputs
from embedlayer.layers.prediction_head import ACTIVATIONS, PredictionHead
from embedlayer.positions.alibi import AlibiBias
from embedlayer.positions.axial import AxialPositionalEmbedding
from embedlayer.positions.learned import LearnedPositionalEmbedding
from embedlayer.positions.position import Position
from embedlayer.positions.relative import RelativePositionBias
from embedlayer.positions.rotary import RotaryEmbedding, rotary_scheme
from embedlayer.positions.rotary_blocks import layer_types, read_blocks
from embedlayer.positions.sinusoidal import SinusoidalPositionalEmbedding
from embedlayer.pretrained import FLOATS, assign, is_description
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.gguf_rows import GGUFEmbedding
from embedlayer.tables.quantized import QuantizedEmbedding
from embedlayer.tables.row_layouts import GGUFBlocks
from embedlayer.tables.table import TokenTable

Model = TypeVar("Model", bound=nn.Module)

TYPE_KEYS = ("type_vocab_size",)
ROWS_AT_ONCE = 8192
MOST_SIZE, MOST_POSITIONS = 1 << 16, 1 << 20
"""Largest sizes and lengths in a configuration that no tensor of the file bounds; larger ones mean a damaged file."""

POSITION_KEYS = ("max_position_embeddings", "n_positions")
"""Configuration keys of the number of positions."""

LENGTH_KEYS = (
    *(*POSITION_KEYS, "max_target_positions", "max_source_positions"),
    *("max_encoder_position_embeddings", "max_decoder_position_embeddings"),
)
"""Configuration keys of the number of positions of a stack."""

SIZE_KEYS = ("hidden_size", *CONFIG_KEYS["num_attention_heads"], *CONFIG_KEYS["num_hidden_layers"])
HEAD_WIDTH_KEYS = ("head_dim", "d_kv", "rotary_dim", "qk_rope_head_dim")
"""Configuration keys of widths on which positions depend; in a family without positions they may be 0."""


@dataclass(frozen=True)
class LoadedTensor:
    """Name and sizes of a tensor that was read from a checkpoint.

    Attributes:
        key: Key of the tensor in the `state_dict` of the layer.
        name: Name of the tensor in the checkpoint.
        shape: Shape in the checkpoint.
        dtype: Dtype in the checkpoint, as safetensors names it, such as `"BF16"`.
        nbytes: Number of bytes in the checkpoint.
    """

    key: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class LoadRecord:
    """Record of the tensors that were read to load a layer, with counts and notes.

    Attributes:
        source: Path or hub name of the checkpoint; empty for a layer that was not loaded.
        tensors: Tensors that were read.
        bytes_read: Bytes of headers and tensors that were read.
        nonfinite_rows: `"table"` or `"head"` -> number of its rows with NaN or infinity; a key with 0 rows is left out.
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


class Loader:
    """Reads the embedding layer of one checkpoint, as the `Family` of the checkpoint describes it.

    `read_arguments` reads the tensors and returns the arguments of `EmbeddingLayer`.

    Args:
        checkpoint: The open checkpoint.
        dtype: Dtype to which all tensors are converted; `None` for that of the token table.
        device: Device of the tensors.
        table_only: Whether to read the token table alone. A checkpoint of an unknown family is then accepted, and the
            table is found by its name. A string is the full name of the tensor to read as the table.
        per_layer: Whether to read per-layer inputs, if the family has them.
        final_norm: Whether to read the norm between the last block and the head.

    Attributes:
        tensors: Key in the `state_dict` of the layer -> tensor that was read.
        names: Key in the `state_dict` of the layer -> names of that tensor in the checkpoint: first the name that was
            read, then those of equal copies.
        notes: Sentences for the user about what was skipped or contradictory.
        width: Width of the vectors that the first block receives, D; 0 before `read_arguments`.
        family: Record of the checkpoint's family, for the stacks that are stored.
        family_name: Name of the family in reports.

    Raises:
        CheckpointError: A size in the configuration is not a whole number in its range; or the family is unknown, and
            `table_only` is false.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype | None,
        device: torch.device | str,
        *,
        table_only: bool | str = False,
        per_layer: bool = True,
        final_norm: bool = False,
    ) -> None:
        self.reads_per_layer = per_layer
        self.reads_final_norm = final_norm
        self.checkpoint = checkpoint
        self.config_file = str(checkpoint.file(CONFIG) or checkpoint.name)
        self.table_only = bool(table_only)
        self.table_name = table_only if isinstance(table_only, str) else ""
        self.config = text_config(checkpoint.config)
        self.dtype = dtype
        self.requested = dtype is not None
        self.device = device
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[str, tuple[str, ...]] = {}
        self.read: list[LoadedTensor] = []
        self.notes: list[str] = []
        self.nonfinite: dict[str, int] = {}
        self.width = 0
        self.blocks: tuple[str, ...] = ()
        self.encoder_blocks: tuple[str, ...] = ()
        self.stacks: set[str] = set()
        self.family = self._stack(self._family())
        self.family_name = self.family.name or str(self.config["model_type"])
        self.config = self.whole_config = with_defaults(self.family, self.config)
        if self.family.sub_configs:
            self._use_config_of("encoder" if "encoder" in self.stacks else "decoder")
        sizes = (*SIZE_KEYS, *(() if self.family.position is None else HEAD_WIDTH_KEYS))
        for key in () if table_only else sizes:
            if self.config.get(key) is not None:
                self._whole(key)
        for key, values in () if table_only else self.family.not_computed:
            if self.config.get(key, values[0]) not in values:
                raise CheckpointError(
                    f"{self.config_file}: {key} {self.config[key]!r} changes what {self.family_name} computes at its "
                    f"input or head, and is not supported; supported: {' or '.join(map(repr, values))}."
                )
        for key in () if self.table_name else ("vocab_size", "pad_token_id"):
            if type(self.config.get(key, 0)) not in (int, NoneType):
                raise CheckpointError(
                    f"{self.config_file}: {key} must be a whole number or null, not {self.config[key]!r}."
                )

    def _family(self) -> Family:
        """Return the family of the checkpoint; `UNKNOWN` for an unknown one of which only the table is read.

        Raises:
            CheckpointError: The family is unknown, and not only the table is read.
        """
        if self.table_name:
            self.notes.append(f"Only {self.table_name} was read, as the table: everything else was left out.")
            return UNKNOWN
        family = checkpoint_family(self.checkpoint)
        if family is None and not self.table_only:
            raise unknown_family_error(self.checkpoint, self.config.get("model_type"))
        if self.table_only:
            where = "" if family is not None else ", and found by its name because the family is unknown"
            self.notes.append(f"Only the table was read{where}: scale, positions, norms and head were left out.")
        if family is None:
            return UNKNOWN
        outer = MULTIMODAL.get(str(self.checkpoint.config.get("model_type")))
        if outer is None:
            return family
        if outer.table:
            family = replace(family, table=outer.table)
            whole = self.checkpoint.config.get("tie_word_embeddings", outer.tied)
            text = self.checkpoint.config.get("text_config")
            if not self.table_only and isinstance(text, dict) and text.get("tie_word_embeddings", whole) != whole:
                raise CheckpointError(
                    f"{self.config_file}: tie_word_embeddings is {whole!r}, and in text_config it is another value. "
                    f"Write the same value into both."
                )
        return with_whole_model(family, self.checkpoint.config.get("model_type"))

    def _stack(self, family: Family) -> Family:
        """Return the record for the stacks that the checkpoint stores.

        An encoder-decoder model may be stored without its encoder (`AutoModelForCausalLM`) or without its decoder. The
        names of the tensors tell them apart: those of a stack contain `encoder.` or `decoder.`. An encoder alone has no
        head.

        Args:
            family: Record of the whole model.
        """
        spec = family.decoder_input
        if spec is None:
            return family
        decoder = spec.table[0].partition(".")[0].removesuffix("decoder")  # "text_" in families with other encoders
        stack = re.compile(rf"(?:^|[.{'' if decoder else '_'}]){decoder}((?:en|de)coder)\.")
        self.stacks = stacks = {each for name in self.checkpoint.names for each in stack.findall(name)}
        if stacks == {"decoder"}:
            return replace(
                family,
                table=tuple(dict.fromkeys((*spec.table, *family.table))),
                position=spec.position or family.position,
                norm=spec.norm or family.norm,
                recipe=family.recipe if spec.recipe is None else spec.recipe,
                scale=family.scale if spec.is_scaled else None,
                decoder_input=None,
            )
        return replace(family, decoder_input=None, head=None) if stacks == {"encoder"} else family

    def _use_config_of(self, stack: Literal["encoder", "decoder"]) -> None:
        """From now on read the configuration of one stack, in a family whose configuration has one for each.

        Args:
            stack: The stack.

        Raises:
            CheckpointError: The configuration of the stack is missing.
        """
        key = self.family.sub_configs[0 if stack == "encoder" else 1]
        own = self.whole_config.get(key)
        if not isinstance(own, dict):
            raise CheckpointError(f"{self.checkpoint.name}: the configuration has no {key!r}, which states its sizes.")
        tied = {name: self.whole_config[name] for name in ("tie_word_embeddings",) if name in self.whole_config}
        self.config = {**self.whole_config, **own, **tied}

    def load_record(self) -> LoadRecord:
        """Return the record of the tensors that were read so far, with counts and notes."""
        return LoadRecord(
            source=self.checkpoint.name,
            tensors=tuple(self.read),
            bytes_read=self.checkpoint.bytes_read,
            nonfinite_rows=self.nonfinite,
            notes=tuple(self.notes),
            other_tables=tuple(self._other_tables()),
            unread_copies=tuple(self._unread_copies()),
            table_only=self.table_only,
        )

    def _other_tables(self) -> Iterator[str]:
        """Yield a sentence about each table of the checkpoint that the record lists as not read."""
        spec, tables = self.family.per_layer, list(self.family.other_tables)
        if spec is not None and "per_layer.table.weight" not in self.names:
            tables.append(OtherTable(spec.table, "each block reads its own columns of these rows"))
        for table in tables:
            for name in sorted(self.checkpoint.find(table.name), key=_is_in_block):
                yield f"{name}, {self._sizes(name)}, is not read: {table.use}."

    def _sizes(self, name: str) -> str:
        """Return the shape of a tensor of the checkpoint as text, such as `"50,257 x 768"`."""
        return " x ".join(f"{size:,}" for size in self.checkpoint.info(name).shape)

    def _refuse_other_input(self) -> None:
        """Raise an error if the checkpoint has a table whose rows are a part of the input of the first block.

        Raises:
            CheckpointError: It has one.
        """
        for table in self.family.other_tables:
            for name in self.checkpoint.find(table.name) if table.is_input else ():
                raise CheckpointError(
                    f"{self.checkpoint.name}: {name}, {self._sizes(name)}, is not read, and {table.use}: the input of "
                    f"the first block is not computed from {self.names['table.weight'][0]} alone."
                )

    def _unread_copies(self) -> Iterator[str]:
        """Yield the names of tensors that are called like the token table and have its shape, and were not read."""
        table = self.names.get("table.weight")
        if not table or self.family is UNKNOWN:
            return
        used = {name for names in self.names.values() for name in names}
        shape = self.checkpoint.info(table[0]).shape
        for name in self._find_matrices(self.family.table):
            if name not in used and self.checkpoint.info(name).shape == shape:
                yield name

    def read_arguments(self) -> dict[str, Any]:
        """Read the weights of the embedding layer into `tensors`, and return the arguments of `EmbeddingLayer`.

        The arguments contain new modules with initial weights, on torch's default device. The caller builds the layer
        from them and then assigns `tensors` to it.

        Raises:
            CheckpointError: A tensor or a key of the configuration is missing or does not fit.
            SizeError: A module cannot have the sizes that the configuration states.
        """
        family = self.family
        self.notes.extend(family.notes)
        weight = self._table()
        pad = self.config.get("pad_token_id")
        if self.table_only:
            return self._table_alone(weight, None if self.table_name else pad)
        self._refuse_other_input()
        table = self._new_table(weight, pad)
        recipe = self._used_steps(family.recipe)
        projection = self._projection() if "project" in recipe else None
        self.width = table.embed_dim if projection is None else projection.out_features
        widths = self._widths(recipe, projection is not None)
        types = self._types(widths["types"]) if "types" in recipe else None
        norm = self._norm("norm", family.norm, widths.get("norm", 0)) if "norm" in recipe else None
        schemes = self._positions(pad, widths.get("position", self.width))
        if family.attention_position is not None:
            spec = family.attention_position
            schemes["attention"] = self._positions(pad, self.width, spec, "other_positions.attention").pop("")
            count = as_whole_number(stated_size(self.config, "num_hidden_layers"), "num_hidden_layers", most=MOST_SIZE)
            self.blocks = ("attention",) * count
        decoder = self._decoder_input(recipe, widths, schemes, pad)
        learned = family.position if isinstance(family.position, LearnedPositions) else None
        counts_rows = family.numbering == "ids" or (learned is not None and learned.ids_include_offset)
        return {
            "table": table,
            "position": schemes.pop(""),
            "head": self._head(table if decoder is None or decoder.table is None else decoder.table),
            "family": self.family_name,
            "recipe": [step for step in recipe if step != "project" or projection is not None],
            "numbering": family.numbering,
            "padding_id": pad,
            "first_position_id": self._first_position_id(pad) if counts_rows else 0,
            "types": types,
            "norm": norm,
            "projection": projection,
            "streams": self._streams(recipe),
            "token_dropout": TokenDropout(self._token_id("mask_token_id")) if "token_dropout" in recipe else None,
            "decoder": decoder,
            "per_layer": self._per_layer(pad),
            "final_norm": self._final_norm() if self.reads_final_norm else None,
            **self._attention_windows(),
            "other_positions": schemes,
            "block_positions": self.blocks,
            "encoder_block_positions": self.encoder_blocks,
            "tensor_names": self.state_names,
            "is_part": any(self._other_tables()),
        }

    @property
    def state_names(self) -> dict[str, Names]:
        """Return `names` by the keys of the layer's `state_dict`, in which the rows of a GGUF file are bytes."""
        key = "table.packed" if "table.packed" in self.tensors else "table.weight"
        return {key if own == "table.weight" else own: names for own, names in self.names.items()}

    def _new_table(self, weight: Tensor, pad: int | None, *, is_scaled: bool = True) -> TokenTable:
        """Return a new token table of the family for rows that are in `tensors`.

        Args:
            weight: The rows, `(V, D)`; on the meta device for rows that a GGUF file stores in blocks.
            pad: The configuration's `pad_token_id`, or `None`.
            is_scaled: Whether the table has the factor of the family.
        """
        factor = self.family.scale if is_scaled else None
        padding_idx = self._padding_idx(weight, pad)
        scale = None if factor is None else self._factor(factor, weight.shape[1])
        round_scale = factor is not None and factor.rounding == "rows"
        options: dict[str, Any] = {"padding_idx": padding_idx, "round_scale": round_scale, "dtype": weight.dtype}
        rows, width = weight.shape
        if not weight.is_meta:
            return TokenEmbedding(rows, width, scale=scale, **options)
        info, file = self.checkpoint.info(self.names["table.weight"][0]), self.checkpoint.gguf
        assert file is not None
        self.tensors["table.packed"] = file.stored_rows(info.name).to(self.device)
        bits = {"Q4_0": 4, "Q8_0": 8}.get(info.dtype)
        if bits is not None:
            return QuantizedEmbedding(rows, width, bits, layout=GGUFBlocks(), scale=scale, **options)
        return GGUFEmbedding(rows, width, info.dtype, scale=scale, **options)

    def _used_steps(self, recipe: Sequence[Step]) -> list[Step]:
        """Return the steps that this checkpoint has, without those that its configuration leaves out.

        Args:
            recipe: Steps of the family.
        """
        left_out = {step for step, key, default in self.family.optional if not self.config.get(key, default)}
        return [step for step in recipe if step not in left_out]

    def _widths(self, recipe: Sequence[Step], projects: bool) -> dict[Step, int]:
        """Return the width of the vectors that each step receives: that of the table, after the projection D.

        Args:
            recipe: The steps.
            projects: Whether the checkpoint has a projection.
        """
        table = self.tensors["table.weight"].shape[1]
        at = recipe.index("project") if projects else len(recipe)
        return {step: self.width if i > at else table for i, step in enumerate(recipe)}

    def _decoder_input(
        self, recipe: Sequence[Step], widths: Mapping[Step, int], schemes: dict[str, Position], pad: int | None
    ) -> DecoderInput | None:
        """Read what the decoder of an encoder-decoder model has for itself; `None` for a model with one stack.

        Args:
            recipe: Steps of the encoder.
            widths: Width of the vectors that each step receives.
            schemes: Position schemes, to which those of the decoder are added: `"decoder"` for its first block.
            pad: The configuration's `pad_token_id`, or `None`.

        Raises:
            CheckpointError: A tensor is missing or has another shape.
        """
        spec = self.family.decoder_input
        if spec is None:
            return None
        if self.family.sub_configs:
            self._use_config_of("decoder")
        table = None
        name = next((each for each in self._find_matrices(spec.table) if each not in self.names["table.weight"]), None)
        if name is not None:
            weight = self._read("decoder.table.weight", name)
            self._check_sizes(name, *weight.shape, key=spec.vocab_size)
            self._count_nonfinite("decoder's table", weight)
            table = self._new_table(weight, pad)
        self.encoder_blocks, self.blocks = self.blocks, ()
        if spec.position is not None:
            width = widths.get("position", self.width)
            layers = stated_size(self.config, "num_hidden_layers")
            layers = next((self.config[key] for key in spec.layers if self.config.get(key) is not None), layers)
            count = as_whole_number(layers, spec.layers[0], most=MOST_SIZE)
            found = self._positions(pad, width, spec.position, "other_positions.decoder", count)
            schemes |= {f"decoder_{kind}" if kind else "decoder": scheme for kind, scheme in found.items()}
            self.blocks = tuple(f"decoder_{kind}" if kind else "decoder" for kind in self.blocks or ("",) * count)
        steps = recipe if spec.recipe is None else self._used_steps(spec.recipe)
        own_norm = spec.norm is not None and "norm" in steps
        return DecoderInput(
            None if spec.recipe is None else steps,
            table=table,
            norm=self._norm("decoder.norm", spec.norm, widths["norm"]) if own_norm else None,
            is_scaled=spec.is_scaled,
        )

    def _per_layer(self, pad: int | None) -> PerLayerInputs | None:
        """Read the table of per-layer inputs with its projection and norm.

        The result is `None` for a family without them, a checkpoint that lacks one of the tensors or stores one in
        quantised form, and a caller who does not request them.

        Args:
            pad: The configuration's `pad_token_id`, or `None`.

        Raises:
            CheckpointError: A tensor has another shape than the configuration and the other tensors state.
        """
        spec = self.family.per_layer
        if spec is None or not self.reads_per_layer or self.config.get(spec.width) == 0:
            return None
        found = [next(iter(self.checkpoint.find(name)), None) for name in spec.names]
        if any(name is None or DTYPES.get(self.checkpoint.info(name).dtype) not in FLOATS for name in found):
            return None
        norm = self._require("per_layer.norm.weight", (spec.norm,), "norm of the per-layer inputs", (None,))
        width = norm.shape[0]
        layers = self._whole("num_hidden_layers", self.checkpoint.info(str(found[0])).shape[-1] // width)
        stated = self.config.get(spec.width, width)
        table, projection = "table of the per-layer inputs", "projection of the per-layer inputs"
        columns = layers * (stated if type(stated) is int else width)
        weight = self._require("per_layer.table.weight", (spec.table,), table, (None, columns))
        self._check_rows("per_layer.table.weight", (spec.rows,))
        self._require("per_layer.projection.weight", (spec.projection,), projection, (columns, self.width))
        padding_idx, dtype = self._padding_idx(weight, pad), weight.dtype
        vocab_size, embed_dim = weight.shape
        rows = TokenEmbedding(vocab_size, embed_dim, padding_idx, scale=width**0.5, round_scale=True, dtype=dtype)
        return PerLayerInputs(
            rows,
            self.width,
            layers,
            eps=self._number("rms_norm_eps", 1e-6),
            missing_row=spec.missing_row,
            round_scales=spec.round_scales,
        )

    def _table_alone(self, weight: Tensor, pad: int | None) -> dict[str, Any]:
        """Return the arguments of an `EmbeddingLayer` that has a table and nothing else.

        Args:
            weight: Rows of the table, `(V, D)`.
            pad: The configuration's `pad_token_id`, or `None`.
        """
        table = self._new_table(weight, pad, is_scaled=False)
        self.width = table.embed_dim
        if not self.table_name:
            self._note_other_tables()
        names = self.state_names
        return {"table": table, "family": self.family_name, "padding_id": pad, "tensor_names": names, "is_part": True}

    def _note_other_tables(self) -> None:
        """Add a sentence to `notes` if the checkpoint has further tables of its input, or may have some.

        In an unknown family these are all tables that are found by their names, unless `vocab_size` decides.
        """
        used = self.names["table.weight"]
        if self.family is UNKNOWN:
            is_stated = self.config.get("vocab_size") == self.checkpoint.info(used[0]).shape[0]
            others = [] if is_stated else [name for name in table_names(self.checkpoint) if not _is_in_block(name)]
        else:
            inputs = [table.name for table in self.family.other_tables if table.is_input]
            others = self.checkpoint.find(*inputs)
        others = [name for name in others if name not in used and not self._is_same(name, used[0])]
        if others:
            listed = ", ".join(f"{name} ({self._sizes(name)})" for name in others[:NAMED])
            self.notes.append(
                f"{used[0]} ({self._sizes(used[0])}) was read, and the checkpoint also has {listed}"
                f"{', ...' if len(others) > NAMED else ''}: load(..., table_only={others[0]!r}) reads another one."
            )

    def build(self, make: Callable[[], Model]) -> Model:
        """Build a layer or a model on the meta device, without memory for weights, and assign `tensors` to it.

        Args:
            make: Function that fills `tensors`, by `read_arguments` for example, and returns the module.

        Raises:
            CheckpointError: A tensor or a key of the configuration is missing or does not fit.
        """
        try:
            with torch.device("meta"):
                model = make()
        except SizeError as error:
            raise CheckpointError(f"{self.checkpoint.name}: the configuration cannot be built. {error}") from error
        tensors = {key: tensor for key, tensor in self.tensors.items() if not tensor.is_meta}
        assign(model, tensors, source=Path(self.checkpoint.name))
        recompute_all_buffers(model, self.device)
        return model

    # Reading tensors

    def _read(self, key: str, name: str, *, aliases: Names = ()) -> Tensor:
        """Read a tensor of the checkpoint, and store it in `tensors` and a line about it in the record.

        Args:
            key: Key of the tensor in the `state_dict` of the layer, under which `tensors` and `names` store it.
            name: Full name in the checkpoint.
            aliases: Names of equal copies in the checkpoint; `names[key]` becomes `(name, *aliases)`.

        Raises:
            CheckpointError: The tensor is quantised, or has a dtype other than floating point and no dtype was
                requested.
        """
        info = self.checkpoint.info(name)
        self._refuse_quantised(key, (name,), name)
        if key == "table.weight" and self.checkpoint.has_blocks(name):
            tensor = torch.empty(info.shape, dtype=self.dtype or torch.float32, device="meta")
        else:
            tensor = self.checkpoint.read(name, dtype=self.dtype, device=self.device)
        self.read.append(LoadedTensor(key, name, info.shape, info.dtype, info.nbytes))
        self.tensors[key] = tensor
        self.names[key] = (name, *aliases)
        return tensor

    def _refuse_quantised(self, key: str, names: Names, stored: str = "") -> None:
        """Raise an error if some weights are stored in quantised form; numbers without their scales are no weights.

        Args:
            key: Key of the tensor in the `state_dict` of the layer.
            names: Names of the weights in the checkpoint.
            stored: Full name of the tensor that would be read; empty if no tensor has one of `names`.

        Raises:
            CheckpointError: The tensor has scales, or is stored in a dtype other than floating point. The second is
                accepted if the caller requested a dtype and the configuration states no quantisation.
        """
        what = key.partition(".")[0]
        parts = quantised_parts(self.checkpoint, names)
        dtype = self.checkpoint.info(stored).dtype if stored else ""
        is_float = not stored or DTYPES.get(dtype) in FLOATS or self.checkpoint.has_blocks(stored)
        if parts or not (is_float or (self.requested and states_quantisation(self.checkpoint.config) is None)):
            if not parts and states_quantisation(self.checkpoint.config) is None:
                raise CheckpointError(
                    f"{self.checkpoint.info(stored).file}: the {what}, {stored}, is stored as {dtype}: without scales "
                    f"those are no vectors. If its numbers need no scales, pass a dtype, such as load(..., "
                    f"dtype=torch.float32)."
                )
            raise quantised_error(self.checkpoint, what, stored or parts[0], parts)

    def _require(self, key: str, names: Names, what: str, shape: tuple[int | None, ...]) -> Tensor:
        """Read a tensor of the checkpoint into `tensors`, and check its shape.

        Args:
            key: Key of the tensor in the `state_dict` of the layer.
            names: Suffixes of its name in the checkpoint; the first one that is found is read.
            what: Description of the tensor for error messages.
            shape: Expected shape; `None` in it allows any size.

        Raises:
            CheckpointError: The tensor is missing or has another shape.
        """
        name = next(iter(self.checkpoint.find(*names)), None)
        self._refuse_quantised(key, names if name is None else (name,), name or "")
        if name is None:
            raise CheckpointError(
                f"{self.checkpoint.name} is of family {self.family_name} but has no {what}: no tensor is called "
                f"{' or '.join(names)}. {self._remedy}"
            )
        found = self.checkpoint.info(name).shape
        if len(found) != len(shape) or any(size not in (None, other) for size, other in zip(shape, found, strict=True)):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise CheckpointError(
                f"{self.checkpoint.info(name).file}: {name} has shape {list(found)} where [{wanted}] belongs to the "
                f"{what}, by {self.config_file} and the other tensors. {self._remedy}"
            )
        return self._read(key, name)

    def _find_matrices(self, names: Names) -> list[str]:
        """Return the full names of the checkpoint's two-dimensional tensors whose names end in one of `names`.

        The order is that of `names`, so the preferred tensor is first. Tensors of a numbered block are last: blocks
        that predict several tokens (DeepSeek) may have tables and heads of their own.
        """
        found = dict.fromkeys(self.checkpoint.find(*names))
        return sorted((name for name in found if len(self.checkpoint.info(name).shape) == 2), key=_is_in_block)

    def _is_same(self, name: str, other: str) -> bool:
        """Return whether two tensors of the checkpoint have the same shape, dtype and bits.

        Args:
            name: Full name of a tensor.
            other: Full name of the other tensor.
        """
        has_same_dtype = self.checkpoint.info(name).dtype == self.checkpoint.info(other).dtype
        return has_same_dtype and self.checkpoint.stores(name, self.checkpoint.read(other))

    # The table

    def _table(self) -> Tensor:
        """Read the token table and return its rows, `(V, D)`.

        If no dtype was requested, `self.dtype` becomes the dtype of the rows, so that all later tensors are read in it.

        Raises:
            CheckpointError: The table is missing, empty or quantised, or has another size than the configuration
                states.
        """
        name, *others = self.find_table()
        weight = self._read("table.weight", name, aliases=tuple(o for o in others if self._is_same(name, o)))
        self.dtype = weight.dtype
        if self.family.folds_rows:
            weight = self._fold(weight)
            self._check_sizes(name, weight.shape[0] if self.names else None, weight.shape[1])
        self._count_nonfinite("table", weight)
        return weight

    @property
    def _remedy(self) -> str:
        """Return what to do about a tensor that is missing or has another shape, as a sentence."""
        if "auto_map" in self.checkpoint.config:
            return (
                f"The model is defined by code of its own, which auto_map in {self.config_file} names and which is not "
                f"run, and it differs from that of {self.family_name}."
            )
        return "Copy the checkpoint again."

    def find_table(self) -> list[str]:
        """Return the name of the token table and those of its equal copies, after checks of its shape and dtype.

        Raises:
            CheckpointError: As for `_table`.
        """
        if self.table_name:
            names = [self.table_name] if self.table_name in self.checkpoint.names else []
            if not names or len(self.checkpoint.info(self.table_name).shape) != 2:
                raise CheckpointError(
                    f"{self.checkpoint.name} has no matrix {self.table_name!r}. "
                    f"{table_advice(self.checkpoint, is_found=False)}".rstrip()
                )
        else:
            names = self._only_table(self._candidates())
        info = self.checkpoint.info(names[0])
        if 0 in info.shape:
            raise CheckpointError(f"{info.file}: the table {names[0]} is empty: its shape is {list(info.shape)}.")
        self._refuse_quantised("table.weight", (names[0],), names[0])
        if not (self.family.folds_rows or self.table_name):
            self._check_sizes(names[0], *info.shape)
        return names

    def _candidates(self) -> list[str]:
        """Return the names of the matrices that may be the token table, the preferred one first.

        Raises:
            CheckpointError: There is none.
        """
        spec = self.family.head
        candidates = self._find_matrices(self.family.table)
        if not candidates and spec is not None and self._is_tied(spec):
            candidates = self._find_matrices(spec.weight)
            if self.family is UNKNOWN:
                rows = self.config.get("vocab_size")
                candidates = [name for name in candidates if self.checkpoint.info(name).shape[0] == rows]
        if candidates:
            return candidates
        self._refuse_quantised("table.weight", self.family.table)
        known = f"family {self.family_name} and has" if self.family is not UNKNOWN else "an unknown family and has"
        others = [self.checkpoint.info(name).shape[0] for name in table_names(self.checkpoint)]
        is_elsewhere = self.config.get("vocab_size") in others or (others and self.family is UNKNOWN)
        remedy = "" if is_elsewhere else f" {self._remedy} Or check model_type in {self.config_file}."
        raise CheckpointError(
            f"{self.checkpoint.name} is of {known} no table of token rows: no tensor with rows and columns is called "
            f"{' or '.join(self.family.table)}.{remedy}"
        )

    def _only_table(self, candidates: list[str]) -> list[str]:
        """Return the names of the token table: the preferred one and its equal copies.

        Candidates with fewer rows than the configuration's `vocab_size` are no token tables, nor are those of a
        numbered block if there are others.

        Args:
            candidates: Names of two-dimensional tensors that may be the table, the preferred one first.

        Raises:
            CheckpointError: Several tensors that the record calls by the same name have different rows.
        """
        needed = self.config.get("vocab_size") or 0
        large = [name for name in candidates if self.checkpoint.info(name).shape[0] >= needed] or candidates
        first, *others = large
        equal = [name for name in others if self._is_same(name, first)]
        suffix = next((name for name in self.family.table if f".{first}".endswith(f".{name}")), first)
        rivals = [
            name
            for name in others
            if name not in equal and f".{name}".endswith(f".{suffix}") and _is_in_block(name) == _is_in_block(first)
        ]
        if rivals:
            listed = ", ".join(f"{name} ({self._sizes(name)})" for name in (first, *rivals))
            which = "an unknown family" if self.family is UNKNOWN else f"family {self.family_name}"
            raise CheckpointError(
                f"{self.checkpoint.name} is of {which} and has several tables called "
                f"{suffix.removesuffix('.weight')}.weight: {listed}. Which of them is that of the "
                f"tokens is not known."
            )
        return [first, *equal]

    def _fold(self, rows: Tensor) -> Tensor:
        """Compute model2vec's token table `rows[mapping] * weights[:, None]`, store it in `tensors` and return it.

        Without a tensor `mapping`, the rows keep their order; without a tensor `weights`, they are not multiplied. With
        either, the table cannot be written back to the checkpoint, so `names` is cleared.

        Args:
            rows: The stored rows.

        Raises:
            CheckpointError: `mapping` or `weights` does not fit the rows.
        """
        mapping, weights = (self.checkpoint.find(name) for name in ("mapping", "weights"))
        if mapping or weights:
            self.names.clear()
        if mapping:
            index = self.checkpoint.read(mapping[0], dtype=torch.int64, device=self.device)
            if index.dim() != 1 or not ((index >= 0) & (index < rows.shape[0])).all():
                raise CheckpointError(
                    f"{self.checkpoint.name}: {mapping[0]} names rows that the table of {rows.shape[0]} rows does not "
                    f"have. Copy the checkpoint again."
                )
            rows = rows.index_select(0, index)
        if weights:
            factors = self.checkpoint.read(weights[0], device=self.device)
            if factors.shape != rows.shape[:1]:
                raise CheckpointError(
                    f"{self.checkpoint.name}: {weights[0]} has shape {list(factors.shape)} for {rows.shape[0]} tokens. "
                    f"Copy the checkpoint again."
                )
            wide = torch.promote_types(rows.dtype, torch.float32)
            rows = (rows.to(wide) * factors[:, None]).to(rows.dtype)
        self.tensors["table.weight"] = rows
        return rows

    def _check_sizes(self, name: str, vocab_size: int | None, width: int, *, key: str = "vocab_size") -> None:
        """Check that the token table has the sizes that the configuration states.

        A size that is not stated is not checked.

        Args:
            name: Name of the table, for error messages.
            vocab_size: Number of rows of the table; `None` for rows that `_fold` computed, which are not checked.
            width: Width of its rows.
            key: Configuration key of the number of rows.

        Raises:
            CheckpointError: The configuration states another number of rows or another width.
        """
        stated, extra = self.config.get(key), self.family.extra_rows
        if stated is not None and vocab_size not in (None, stated + extra):
            expected = f"{stated:,}, so {stated + extra:,} rows in this family" if extra else f"{stated:,}"
            raise CheckpointError(
                f"{self.checkpoint.name}: {name} has {vocab_size:,} rows and the configuration says {key} {expected}: "
                f"they do not belong together, or one of them was changed alone. Copy both from the same model."
            )
        width_key = next((key for key in self.family.width if self.config.get(key) is not None), None)
        if width_key is not None and self.config[width_key] != width:
            raise CheckpointError(
                f"{self.checkpoint.name}: {name} has rows of width {width:,} and the configuration says {width_key} "
                f"{self.config[width_key]}: they do not belong together. Copy both from the same model."
            )

    def _check_rows(self, key: str, keys: Names, *, more: int = 0) -> None:
        """Check that a table other than the token table has as many rows as the configuration states.

        Nothing is checked if the configuration has none of the keys.

        Args:
            key: Key of the table in `tensors`.
            keys: Configuration keys of the number of rows; one of them must fit.
            more: Number of rows that the table may have beyond that number.

        Raises:
            CheckpointError: The configuration states other numbers.
        """
        stated = {each: self.config[each] for each in keys if type(self.config.get(each)) is int}
        rows = self.tensors[key].shape[0]
        if stated and not any(rows in (count, count + more) for count in stated.values()):
            name = self.names[key][0]
            shown = " and ".join(f"{each} {count:,}" for each, count in stated.items())
            raise CheckpointError(
                f"{self.checkpoint.info(name).file}: {name} has {rows:,} rows and {self.config_file} says {shown}: "
                f"they do not belong together, or one of them was changed alone. Copy both from the same model."
            )

    def _count_nonfinite(self, what: str, rows: Tensor) -> None:
        """Count the rows that contain NaN or infinity.

        If there are any, store their number in `self.nonfinite[what]` and add a sentence to `notes`.

        Args:
            what: `"table"` or `"head"`.
            rows: Rows of the table or the head, `(V, D)`.
        """
        if rows.is_meta:
            return  # they are dequantised where they are looked up
        count = sum(int((~chunk.isfinite().all(-1)).sum()) for chunk in rows.split(ROWS_AT_ONCE))
        if count:
            self.nonfinite[what] = count
            self.notes.append(f"{count:,} of {rows.shape[0]:,} rows of the {what} hold NaN or infinity.")

    def _padding_idx(self, weight: Tensor, pad: int | None) -> int | None:
        """Return `pad` if the padding token's row is zero; else `None`: a row that was trained can be trained again.

        Args:
            weight: Rows of the token table, `(V, D)`.
            pad: The configuration's `pad_token_id`, which may be outside the table, or `None`.
        """
        if pad is None or not 0 <= pad < weight.shape[0] or self._stored_row(weight, pad).any():
            return None
        return pad

    def _stored_row(self, weight: Tensor, row: int) -> Tensor:
        """Return a row of the token table, which is dequantised if `weight` is a tensor on the meta device."""
        if not weight.is_meta:
            return weight[row]
        assert self.checkpoint.gguf is not None
        info = self.checkpoint.info(self.names["table.weight"][0])
        return dequantise(self.checkpoint.gguf.stored_rows(info.name)[row : row + 1], info.dtype)

    def _factor(self, factor: Factor, width: int) -> float | None:
        """Return a factor on rows, as `factor_value` does.

        Raises:
            CheckpointError: A number is missing in the configuration and has no default, or is not positive.
        """
        with self._naming_config():
            return factor_value(factor, self.config, width)

    # Token types, norms, projections

    def _types(self, width: int) -> TokenEmbedding | TypeTables | Literal["table"] | None:
        """Read the table or tables of token types (segments).

        Args:
            width: Width of the vectors to which types are added.

        Returns:
            New tables for the rows in `tensors`. `"table"` if segments are rows of the token table; `None` for a
            family without token types.

        Raises:
            CheckpointError: A tensor is missing or has another width.
        """
        names, more = self.family.types, [each for each in self.family.more_types if self.checkpoint.find(*each[0])]
        if names == "table" or not (names or more):
            return "table" if names else None
        shape = (None, width)
        wanted = [(names, 1.0), *more] if names else more
        if len(wanted) == 1:
            rows = self._require("types.weight", names, "table of token types", shape)
            self._check_rows("types.weight", TYPE_KEYS if names else ())
            return TokenEmbedding(*rows.shape, dtype=rows.dtype)
        tables = []
        for i, (each, factor) in enumerate(wanted):
            rows = self._require(f"types.tables.{i}.weight", each, "table of token types", shape)
            tables.append(TokenEmbedding(*rows.shape, dtype=rows.dtype, scale=None if factor == 1 else factor))
        return TypeTables(tables)

    def _norm(self, key: str, spec: NormSpec | ShiftSpec | None, width: int) -> nn.Module | None:
        """Read the tensors of a norm, or of what replaces it, into `tensors`, and return a new module for them.

        Args:
            key: Name of the module in the layer, the prefix of the keys in `tensors`.
            spec: Name and epsilon in the checkpoint; for `None`, nothing is read and the result is `None`.
            width: Width of the vectors that are normalised.

        Raises:
            CheckpointError: A tensor is missing or has another width.
        """
        if spec is None:
            return None
        if isinstance(spec, ShiftSpec):
            self._require(f"{key}.shift", spec.shift, "vector that is added", (width,))
            if spec.scale:
                self._require(f"{key}.scale", spec.scale, "vector that is multiplied with", (width,))
            return ShiftScale(width, scales=bool(spec.scale))
        eps = spec.eps if spec.eps_key is None else self._number(spec.eps_key, spec.eps)
        if spec.kind == "rms_plain":
            return nn.RMSNorm(width, eps=eps, elementwise_affine=False)
        if spec.kind == "layer_plain":
            return nn.LayerNorm(width, eps=eps, elementwise_affine=False)
        names = (spec.name,) if isinstance(spec.name, str) else spec.name
        biases = tuple(f"{name}.{end}" for name in names for end in ("bias", "beta"))
        has_bias = spec.kind == "layer" and self._has(spec.bias)
        self._require(
            f"{key}.weight", tuple(f"{n}.{end}" for n in names for end in ("weight", "gamma")), "norm", (width,)
        )
        if spec.kind == "rms":
            return nn.RMSNorm(width, eps=eps)
        if spec.kind == "rms_offset":
            return OffsetRMSNorm(width, eps=eps)
        if has_bias:
            self._require(f"{key}.bias", biases, "norm", (width,))
        if spec.affine_key is not None and self.config.get(spec.affine_key[0]) == spec.affine_key[1]:
            return ElementwiseAffine(width)
        return nn.LayerNorm(width, eps=eps, bias=has_bias)

    def _final_norm(self) -> nn.Module | None:
        """Read the norm between the last block and the head; `None` if the family has none, as after post-norm blocks.

        In an encoder-decoder model it is that of the decoder. It is looked for in the modules around the token table,
        from the innermost one, so no norm of another part (a block, a vision tower) takes its place.

        Raises:
            CheckpointError: The final norm of this model type is not known, or its tensor is not at its place.
        """
        model_type, table, names = self.config.get("model_type"), self.names["table.weight"][0], self.checkpoint.names
        if self.checkpoint.gguf is not None or model_type not in FINAL_NORMS:
            what = "a GGUF file" if self.checkpoint.gguf is not None else f"the model type {model_type!r}"
            raise CheckpointError(
                f"{self.checkpoint.name}: the norm between the last block and the head of {what} is not known here. "
                f"Leave out final_norm=True."
            )
        spec = FINAL_NORMS[str(model_type)]
        if spec is None or spec.kind in ("rms_plain", "layer_plain"):
            return self._norm("final_norm", spec, self.width)
        parts = table.split(".")
        around = ["".join(f"{part}." for part in parts[:count]) for count in range(len(parts) - 1, -1, -1)]
        place = next((f"{prefix}{spec.name}" for prefix in around if f"{prefix}{spec.name}.weight" in names), None)
        if place is None:
            raise CheckpointError(
                f"{self.checkpoint.name}: the final norm, {spec.name}.weight, is missing. {self._remedy}"
            )
        if spec.kind == "layer" and spec.bias is False and f"{place}.bias" in names:
            raise CheckpointError(f"{self.checkpoint.name}: {place} has a bias, which its family's code does not have.")
        return self._norm("final_norm", replace(spec, name=place), self.width)

    def _attention_windows(self) -> dict[str, Any]:
        """Return the arguments `layer_types` and `window` of `EmbeddingLayer`, as far as the configuration has them.

        Raises:
            CheckpointError: The list of types has another length than there are blocks.
        """
        if self.family.decoder_input is not None or stated_size(self.config, "num_hidden_layers") is None:
            return {}
        with self._naming_config():
            types = layer_types(self.config)
        window = self.config.get("sliding_window") if self.config.get("use_sliding_window", True) else None
        if None in types and self.config.get("model_type") in WINDOW_IN_ALL_BLOCKS and "sliding_window" in self.config:
            types = ["full_attention" if window is None else "sliding_attention"] * len(types)
        return {
            "layer_types": [] if None in types else types,
            "window": None if window is None else as_whole_number(window, "sliding_window"),
        }

    def _linear(self, key: str, spec: LinearSpec, shape: tuple[int | None, int | None]) -> nn.Linear:
        """Read the tensors of a projection into `tensors`, and return a new module for them.

        Args:
            key: Name of the module in the layer, the prefix of the keys in `tensors`.
            spec: Name in the checkpoint, and whether the projection has a bias.
            shape: Expected shape of the weight, (out, in); `None` in it allows any size.

        Raises:
            CheckpointError: A tensor is missing or has another shape.
        """
        what = "projection to hidden_size" if key == "projection" else "projection"
        weight = self._require(f"{key}.weight", _names_of(spec, "weight"), what, shape)
        biases = _names_of(spec, "bias")
        has_bias = self._has(spec.bias)
        if has_bias:
            self._require(f"{key}.bias", biases, "projection", (weight.shape[0],))
        return nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias)

    def _projection(self) -> nn.Linear | None:
        """Read the projection from the width of the token table to the width of the model into `tensors`.

        Returns:
            A new module with initial weights, to which the caller later assigns `tensors`. `None`, and nothing is read,
            if the family has no projection, or if both widths are equal and the checkpoint stores none.

        Raises:
            CheckpointError: The widths differ, and the checkpoint has no projection; or a tensor of the projection is
                missing or has another shape.
        """
        spec, family = self.family.projection, self.family
        if spec is None:
            return None
        hidden = stated_size(self.config, "hidden_size")
        width = self.tensors["table.weight"].shape[1]
        has_trigrams = family.trigrams is not None and bool(self.config.get(family.trigrams, True))
        names = _names_of(spec, "weight")
        is_stored = bool(self.checkpoint.find(*names))
        if hidden != width and not is_stored and hidden is not None:
            self._refuse_quantised("projection.weight", names)
            raise CheckpointError(
                f"{self.config_file} says hidden_size {hidden!r}, the table has rows of width {width:,}, and "
                f"{self.checkpoint.name} has no projection: no tensor is called {' or '.join(names)}. {self._remedy}"
            )
        if (
            hidden == width
            and not has_trigrams
            and not family.features
            and (family.trigrams is not None or not is_stored)
        ):
            return None
        features = []
        for i, each in enumerate(each for each in family.features if self.checkpoint.find(*each)):
            features.append(self._require(f"projection.features.{i}.weight", each, "table of features", (None, None)))
        width = width * (3 if has_trigrams else 1) + sum(rows.shape[1] for rows in features)
        linear = self._linear("projection", spec, (as_whole_number(hidden, "hidden_size", most=MOST_SIZE), width))
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        if has_trigrams:
            return TrigramProjection(*sizes)
        return FeatureProjection(*sizes, features=[rows.shape for rows in features]) if features else linear

    def _streams(self, recipe: Sequence[Step]) -> PredictionStreams | None:
        """Read the vectors of prediction streams (ProphetNet); `None` if no stack of the checkpoint has that step.

        Args:
            recipe: Steps of the first stack.

        Raises:
            CheckpointError: The tensor is missing or has another width.
        """
        spec = self.family.decoder_input
        if "streams" not in (*recipe, *((spec.recipe or ()) if spec is not None else ())):
            return None
        rows = self._require("streams.weight", self.family.streams, "prediction streams", (None, self.width))
        return PredictionStreams(*rows.shape)

    # Positions

    def _first_position(self, pad: int | None) -> int:
        """Return `pad + 1`, the position ID of the first token in families that count from behind the padding ID.

        It is also the number of rows of their position table before the row of the first token.

        Raises:
            CheckpointError: `pad` is `None`, because the configuration has no `pad_token_id`.
        """
        if pad is None:
            raise CheckpointError(
                f"{self.config_file}: positions of {self.family_name} begin after pad_token_id, which is missing. "
                f"Add it."
            )
        return pad + 1

    def _first_position_id(self, pad: int | None) -> int:
        """Return the position ID that transformers gives the first token, for families that do not count from 0.

        Args:
            pad: The configuration's `pad_token_id`, or `None`.

        Raises:
            CheckpointError: It follows the padding ID, which is missing.
        """
        spec = self.family.position
        if isinstance(spec, LearnedPositions) and spec.offset != "padding":
            return spec.offset
        return self._first_position(pad)

    def _positions(
        self,
        pad: int | None,
        width: int,
        spec: PositionSpec | None = None,
        key: str = "position",
        layers: int | None = None,
    ) -> dict[str, Position]:
        """Read the position schemes of one stack of the model.

        Args:
            pad: The configuration's `pad_token_id`, or `None`.
            width: Width of the vectors that positions are added to.
            spec: Scheme of the stack; `None` for that of the family.
            key: Name of the scheme of the first block in the layer, the prefix of the keys in `tensors`.
            layers: Number of blocks of the stack; `None` for the configuration's `num_hidden_layers`.

        Returns:
            Kind of layer -> scheme. The key `""` has the scheme of the first block. Other keys, such as
            `"full_attention"`, are there only for models whose layers differ.

        Raises:
            CheckpointError: A tensor or key of the positions is missing or does not fit.
        """
        spec = self.family.position if spec is None else spec
        if self.family.positions_if is not None:
            switch, wanted = self.family.positions_if
            spec = spec if self.config.get(switch) == wanted else None
        if isinstance(spec, PositionChoice):
            value = self.config.get(spec.key, spec.choices[0][0])
            chosen = next((scheme for name, scheme in spec.choices if name == value), None)
            if chosen is None:
                known = " or ".join(repr(name) for name, _ in spec.choices)
                raise CheckpointError(f"{self.checkpoint.name}: {spec.key} {value!r} is not known here, only {known}.")
            spec = chosen
        facts = rotary_facts(self.config.get("model_type"))
        or_alibi = facts is not None and facts.or_alibi and bool(self.config.get("alibi"))
        if isinstance(spec, AlibiPositions) or (spec == "rotary" and or_alibi):
            return {"": self._alibi(divide=spec == "rotary")}
        if spec == "rotary":
            return self._rotary(None if facts is None else facts.base)
        if isinstance(spec, AxialPositions):
            if self.checkpoint.find(*spec.names[0]):
                rows = self._require(f"{key}.rows", spec.names[0], "position table of rows", (None, 1, None))
                columns = self._require(f"{key}.columns", spec.names[1], "position table of columns", (1, None, None))
                sizes = (rows.shape[0], columns.shape[1]), (rows.shape[2], columns.shape[2])
                return {"": AxialPositionalEmbedding(*sizes)}
            spec = spec.plain
        if isinstance(spec, SinusoidalPositions) and self.checkpoint.find(*spec.stored):
            spec = LearnedPositions(spec.stored, offset="padding" if spec.after_padding else spec.offset or 0)
        if isinstance(spec, LearnedPositions):
            if "position" not in self._used_steps(self.family.recipe):
                return {"": Position()}
            length = self._require(f"{key}.weight", spec.names, "table of positions", (None, width)).shape[0]
            offset = self._first_position(pad) if spec.offset == "padding" else int(spec.offset)
            self._check_rows(f"{key}.weight", LENGTH_KEYS, more=offset)
            return {"": LearnedPositionalEmbedding(length - offset, width, offset=offset)}
        if isinstance(spec, SinusoidalPositions):
            first = self._first_position(pad) if spec.after_padding and spec.offset is None else spec.offset or 0
            sinusoids = SinusoidalPositionalEmbedding(
                self._whole(self._first_key(POSITION_KEYS), most=MOST_POSITIONS),
                width,
                layout="concatenated",
                endpoint=spec.after_padding if spec.endpoint is None else spec.endpoint,
                offset=first,
                padding_idx=pad if spec.after_padding else None,
            )
            return {"": sinusoids}
        return {"": Position()} if spec is None else self._relative(spec, key, layers)

    def _rotary(self, default_base: float | None) -> dict[str, Position]:
        """Read rotary positions, store the key of each block's scheme in `blocks`, and return the schemes by key.

        Args:
            default_base: Base of the frequencies if the configuration states none; `None` makes that an error.

        Raises:
            CheckpointError: A key of the configuration is unknown, missing or contradicts another.
        """
        with self._naming_config():
            if stated_size(self.config, "num_hidden_layers") is None and "layer_types" not in self.config:
                return {"": RotaryEmbedding.from_config(self.config, default_base=default_base)}
            keys, arguments = read_blocks(self.config, default_base=default_base)
            schemes = {key: rotary_scheme(arguments[key]) if key in arguments else Position() for key in {*keys}}
        first = schemes[keys[0]]
        if len(schemes) > 1:
            self.blocks = tuple("" if key == keys[0] else key for key in keys)
        return {"": first, **{key: schemes[key] for key in dict.fromkeys(keys) if key in arguments or key != keys[0]}}

    def _alibi(self, *, divide: bool) -> AlibiBias:
        """Return linear attention biases (ALiBi) for the number of heads that the configuration states.

        Args:
            divide: Whether to multiply the biases by `head_dim ** -0.5`, as Falcon does.
        """
        heads = self._heads()
        attention = self.config.get("attn_config")
        max_bias = attention.get("alibi_bias_max", 8) if isinstance(attention, dict) else 8
        with self._naming_config():
            max_bias = as_number(max_bias, "attn_config.alibi_bias_max", above=0.0)
        return AlibiBias(heads, max_bias=max_bias, scale=(self.width // heads) ** -0.5 if divide else 1.0)

    def _relative(self, spec: RelativePositions, key: str, layers: int | None) -> dict[str, Position]:
        """Read T5's relative biases into `tensors`, and return new schemes for them by kind of layer.

        If every block has its own table (UMT5), the kinds are the numbers of the blocks, with `""` for the first one.

        Args:
            spec: Names in the checkpoint.
            key: Name of the first block's scheme in the layer, the prefix of the keys in `tensors`.
            layers: Number of blocks; `None` for the configuration's `num_hidden_layers`.

        Raises:
            CheckpointError: A tensor or a key of the configuration does not fit.
        """
        heads, buckets = self._heads(), self._whole("relative_attention_num_buckets", 32)
        each = any("{}" in name for name in spec.names)
        with self._naming_config():
            stated = stated_size(self.config, "num_hidden_layers")
            count = layers or as_whole_number(stated, "num_layers", most=MOST_SIZE)
        kinds = ["", *map(str, range(1, count))] if each else [""]
        prefix = "" if key == "position" else f"{key.removeprefix('other_positions.')}_"
        for kind in kinds:
            own = f"other_positions.{prefix}{kind}" if kind else key
            names = tuple(name.format(kind or 0) for name in spec.names)
            self._require(f"{own}.weight", names, "relative bias", (buckets, heads))
        if each:
            self.blocks = tuple(kinds)
        max_distance = self._whole("relative_attention_max_distance", 128, most=MOST_POSITIONS)
        return {
            kind: RelativePositionBias(
                heads, num_buckets=buckets, max_distance=max_distance, bidirectional=spec.bidirectional
            )
            for kind in kinds
        }

    # The head

    def _is_tied(self, spec: HeadSpec) -> bool:
        """Return whether the LM head is tied to the token table.

        `tie_word_embeddings` of the configuration decides; without that key, or for `"always"` and `"never"`,
        `spec.tied` decides.
        """
        if spec.tied in ("always", "never"):
            return spec.tied == "always"
        return bool(self.config.get("tie_word_embeddings", spec.tied))

    def _head(self, table: TokenTable) -> OutputHead | PredictionHead | None:
        """Read the LM head, tied to `table` or untied; `None` if the checkpoint has none.

        The weights of the new module, except those of the table, are in `tensors` for the caller to assign.

        Raises:
            CheckpointError: A tensor or key of the head is missing or does not fit.
        """
        spec = self.family.head
        if spec is None:
            return None
        for names in (_names_of(spec.dense, "weight") if spec.dense is not None else (), spec.weight):
            if not self.checkpoint.find(*names):
                self._refuse_quantised("head.weight", names)
        classes = self._model_classes()
        is_stored = spec.dense is not None and bool(self.checkpoint.find(*_names_of(spec.dense, "weight")))
        dense = spec.dense if is_stored else None
        if spec.dense is not None and dense is None and not (spec.dense_optional and self.width == table.embed_dim):
            self._refuse_missing_head(_names_of(spec.dense, "weight"), classes)
            return None
        if dense is not None and classes and not _have_head(classes) and not self.checkpoint.find(*spec.bias):
            return None  # the layer of that name belongs to a classifier (ModernBERT)
        key = "head" if dense is None else "head.output"
        weight = self._untied_rows(spec, f"{key}.weight")
        if weight is None and not self._is_tied(spec):
            self._refuse_missing_head(spec.weight, classes)
            return None
        if weight is not None:
            self._check_head(spec, key, table, dense)
        rows, width = (table.vocab_size, table.embed_dim) if weight is None else weight.shape
        biases = self.checkpoint.find(*spec.bias)
        has_bias = bool(biases) if spec.has_bias == "stored" else bool(spec.bias) and self._has(spec.has_bias)
        if has_bias and not biases and weight is None and dense is None:
            self._refuse_missing_head(spec.bias, classes)
            return None  # no tensor of the head is stored: this is the base model, or one with another head
        if has_bias:
            shape = self.checkpoint.info(biases[0]).shape if biases else (rows,)
            bias = self._require(
                f"{key}.bias", spec.bias, "bias of the head", (1, rows) if len(shape) == 2 else (rows,)
            )
            self.tensors[f"{key}.bias"] = bias.flatten()
            self.names[f"{key}.bias"] = tuple(name for name in biases if self._is_same(biases[0], name))
        with self._naming_config():
            factors = logit_factors(spec, self.config, table.embed_dim)
        output = OutputHead(
            **({"table": table} if weight is None else {"vocab_size": rows, "embed_dim": width}),
            bias=has_bias,
            **factors._asdict(),
        )
        if dense is None:
            return output
        return PredictionHead(
            output,
            dense=self._linear("head.dense", dense, (width, self.width)),
            activation=spec.activation
            if spec.activation is None or spec.activation in ACTIVATIONS
            else str(self.config.get(spec.activation, "gelu")),
            norm=self._norm("head.norm", spec.norm, width),
        )

    def _model_classes(self) -> list[str]:
        """Return the names of the model classes that the configuration states as `architectures`; may be empty."""
        stated = self.checkpoint.config.get("architectures")
        return [name for name in stated if isinstance(name, str)] if isinstance(stated, list) else []

    def _refuse_missing_head(self, names: Names, classes: list[str]) -> None:
        """Raise an error if the configuration names a model with an LM head, whose tensors the checkpoint lacks.

        Args:
            names: Tensor names of the head that are missing.
            classes: Names of model classes in the configuration.

        Raises:
            CheckpointError: One of the classes has an LM head.
        """
        if _have_head(classes):
            raise CheckpointError(
                f"{self.checkpoint.name}: {' or '.join(names)} is missing, and {self.config_file} has architectures "
                f"{', '.join(classes)}, a model with an LM head. {self._remedy} If the checkpoint is meant to have no "
                f"head, remove architectures."
            )

    def _check_head(self, spec: HeadSpec, key: str, table: TokenTable, dense: LinearSpec | None) -> None:
        """Check the shape of an untied head's rows: one for each row of the table, of the width of hidden states.

        The width of a head behind a projection is checked when the projection is read.

        Raises:
            CheckpointError: The number of rows or the width is another.
        """
        name = next(iter(self.names.get(f"{key}.weight", ())), None)
        if name is None:
            return  # computed from several tensors, or cut to the rows that count
        rows, width = self.tensors[f"{key}.weight"].shape
        expected = self.tensors.get("decoder.table.weight", self.tensors["table.weight"]).shape[0]
        hidden = self.width * spec.hidden
        widths = {hidden} if spec.hidden > 1 else {hidden, table.embed_dim, self.config.get("hidden_size", hidden)}
        if rows != expected - self.family.extra_rows or (dense is None and width not in widths):
            raise CheckpointError(
                f"{self.checkpoint.info(name).file}: {name} has shape {[rows, width]} where "
                f"[{expected - self.family.extra_rows}, {hidden}] belongs to the head, by {self.config_file} and "
                f"the table. {self._remedy}"
            )

    def _untied_rows(self, spec: HeadSpec, key: str) -> Tensor | None:
        """Read the rows of an untied head into `tensors[key]` and return them; `None` if it has no own rows.

        The configuration may say that the head is tied while the checkpoint stores rows for it. Rows that equal the
        token table count as tied: the result is `None`, and `names` lists them as a copy of the table. Other rows are
        read as an untied head, with a sentence in `notes` unless the family always ties.

        Columns of `spec.columns` that are stored are appended to the rows, or to those of the table if the head is
        tied. Rows beyond the number that the configuration states under `spec.rows` are cut off, if they are stored. A
        head that was extended, or has fewer rows than the table, has no entry in `names`: it cannot be written back.

        Raises:
            CheckpointError: A tensor is quantised, or has no floating point dtype and no dtype was requested; or the
                number of rows in the configuration is not in its range.
        """
        tied_to = "decoder.table.weight" if "decoder.table.weight" in self.tensors else "table.weight"
        used = self.names.get(tied_to, ())
        found = [name for name in self._find_matrices(spec.weight) if name not in used and not _is_in_block(name)]
        columns = self.checkpoint.find(*spec.columns)
        if columns and 0 not in self.checkpoint.info(columns[0]).shape:
            if not found and not self._is_tied(spec):
                return None
            rows = self.tensors[tied_to] if self._is_tied(spec) else self._read(key, found[0])
            self.tensors[key] = torch.cat([rows, self._read(key, columns[0]).T.to(rows.dtype)], dim=1)
            del self.names[key]
            return self.tensors[key]
        if not found:
            return None
        if self._is_tied(spec):
            table = self.names[tied_to][0]
            if self._is_same(table, found[0]):
                self.names[tied_to] += (found[0],)
                return None
            if spec.tied != "always":
                self.notes.append(
                    f"the configuration ties the head to the table, but {found[0]} and {table} hold other numbers: "
                    f"the head is read as untied."
                )
        weight = self._read(key, found[0])
        if spec.rows is not None and self.config.get(spec.rows) is not None:
            count = self._whole(spec.rows, most=MOST_POSITIONS)
            if count <= weight.shape[0] and count < max(weight.shape[0], self.tensors[tied_to].shape[0]):
                weight = self.tensors[key] = weight[:count]
                del self.names[key]  # there is not one row for each token, so they cannot be written back
        self._count_nonfinite("head", weight)
        return weight

    # Keys of the configuration

    def _has(self, presence: Presence) -> bool:
        """Return whether a tensor exists, as the record or a key of the configuration says."""
        if isinstance(presence, bool):
            return presence
        key, default = presence
        return bool(self.config.get(key, default))

    @contextmanager
    def _naming_config(self) -> Iterator[None]:
        """Context manager: put the name of the configuration's file in front of the errors of its values."""
        try:
            yield
        except (CheckpointError, SizeError) as error:
            raise CheckpointError(f"{self.config_file}: {error}") from error

    def _first_key(self, keys: Names) -> str:
        """Return the first of several names of a key that the configuration has; the first name if it has none."""
        return next((key for key in keys if self.config.get(key) is not None), keys[0])

    def _number(self, key: str, default: float | None = None) -> float:
        """Return a positive number of the configuration, or `default` if the key is missing.

        Raises:
            CheckpointError: The value is not a positive number, or the key is missing and there is no default.
        """
        with self._naming_config():
            return as_number(self.config.get(key, default), key, above=0.0)

    def _whole(self, key: str, default: int | None = None, *, most: int = MOST_SIZE) -> int:
        """Return a whole number of the configuration, from 1 to `most`; `default` if the key is missing or null.

        Raises:
            CheckpointError: The value is not such a number, or the key is missing and there is no default.
        """
        value = self.config.get(key)
        with self._naming_config():
            return as_whole_number(default if value is None else value, key, most=most)

    def _token_id(self, key: str) -> int:
        """Return a token ID of the configuration.

        Raises:
            CheckpointError: The key is missing, or the value is no ID.
        """
        with self._naming_config():
            return as_whole_number(self.config.get(key), key, most=MOST_POSITIONS)

    def _heads(self) -> int:
        """Return the number of attention heads.

        Raises:
            CheckpointError: The configuration does not state the number of heads.
        """
        heads = stated_size(self.config, "num_attention_heads")
        with self._naming_config():
            return as_whole_number(heads, "num_attention_heads", most=MOST_SIZE)


def _is_in_block(name: str) -> bool:
    """Return whether a tensor belongs to a numbered module, such as `model.layers.61.embed_tokens.weight`."""
    return any(part.isdecimal() for part in name.split("."))


def _names_of(spec: LinearSpec, end: str) -> Names:
    """Return the names of a projection's tensor, such as `("project_in.weight",)` for the end `"weight"`."""
    names = (spec.name,) if isinstance(spec.name, str) else spec.name
    return tuple(f"{name}.{end}" for name in names)


def _have_head(classes: list[str]) -> bool:
    """Return whether one of these model classes of transformers has an LM head."""
    return any(name.endswith(HEAD_CLASSES) for name in classes)


def finds_table(checkpoint: Checkpoint) -> bool:
    """Return whether `load(..., table_only=True)` finds the token table of a checkpoint, judged by names and shapes."""
    try:
        Loader(checkpoint, None, "cpu", table_only=True).find_table()
    except CheckpointError:
        return False
    return True


def checkpoint_family(checkpoint: Checkpoint) -> Family | None:
    """Return the family that a checkpoint's configuration names, or `None` if it names none or an unknown one."""
    if checkpoint.is_static_embedding:
        return family_of(STATIC_EMBEDDING)
    family = family_of(text_config(checkpoint.config).get("model_type"))
    return family if family is None or checkpoint.gguf is None else gguf_family(family)


def tensor_rules(checkpoint: Checkpoint) -> dict[str, TensorRule | None]:
    """Return how an edit of the vocabulary moves each tensor of a checkpoint, by its family's record.

    `None` is a tensor that the record does not name as one of tokens.
    """
    family, model_type = checkpoint_family(checkpoint), checkpoint.config.get("model_type")
    families = [] if family is None else [family]
    return {name: tensor_rule(name, families, model_type) for name in checkpoint.names}


def is_unknown_family(checkpoint: Checkpoint) -> bool:
    """Return whether `load` reads a checkpoint with `table_only=True` alone, because its family is unknown."""
    is_known = is_description(checkpoint.config) or checkpoint_family(checkpoint) is not None
    return not is_known and not ("model_type" not in checkpoint.config and has_meta_layout(checkpoint))
