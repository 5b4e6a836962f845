"""Read the parts of the input embedding beside the table: token types, norms, projections, streams, second inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from embedlayer.checkpoints.reading.model import CheckpointModel
from embedlayer.checkpoints.reading.positions import StackPositions, read_positions
from embedlayer.checkpoints.reading.table import check_rows, read_second_table, table_with_scale
from embedlayer.core.errors import CheckpointError
from embedlayer.families import CONFIG_KEYS, stated_size
from embedlayer.families.field_types import Names, Step
from embedlayer.families.final_norms import FINAL_NORMS, WINDOW_IN_ALL_BLOCKS, final_norm_module
from embedlayer.families.records import (
    DecoderSpec,
    FeatureSpec,
    LinearSpec,
    NormSpec,
    PerLayerSpec,
    ShiftSpec,
    StreamPositions,
    TrigramSpec,
)
from embedlayer.inputs.parts import (
    DecoderInput,
    ElementwiseAffine,
    FeatureProjection,
    OffsetRMSNorm,
    PredictionStreams,
    ShiftScale,
    TrigramProjection,
    TypeTables,
)
from embedlayer.inputs.per_layer import PerLayerInputs
from embedlayer.io.json_fields import as_whole_number
from embedlayer.positions.rotary.blocks import layer_types
from embedlayer.tables.dense import TokenEmbedding

TYPE_KEYS = ("type_vocab_size",)


def read_types(model: CheckpointModel, width: int) -> TokenEmbedding | TypeTables | Literal["table"] | None:
    """Read the table or tables of token types (segments), which are added to vectors of a width."""
    tensors, names = model.tensors, model.family.types
    more = [each for each in model.family.more_types if tensors.has(each[0])]
    if names == "table" or not (names or more):
        return "table" if names else None
    shape, what = (None, width), "table of token types"
    wanted = [(names, 1.0), *more] if names else more
    if len(wanted) == 1:
        rows = tensors.require("types.weight", names, what, shape)
        check_rows(model, "types.weight", TYPE_KEYS if names else ())
        return TokenEmbedding(*rows.shape, dtype=rows.dtype)
    tables = []
    for i, (each, factor) in enumerate(wanted):
        rows = tensors.require(f"types.tables.{i}.weight", each, what, shape)
        tables.append(TokenEmbedding(*rows.shape, dtype=rows.dtype, scale=None if factor == 1 else factor))
    return TypeTables(tables)


def read_norm(model: CheckpointModel, key: str, spec: NormSpec | ShiftSpec | None, width: int) -> nn.Module | None:
    """Read the tensors of a norm, or of what replaces it, and return a new module for them; `None` for no norm."""
    if spec is None:
        return None
    tensors, config = model.tensors, model.config
    if isinstance(spec, ShiftSpec):
        tensors.require(f"{key}.shift", spec.shift, "vector that is added", (width,))
        if spec.scale:
            tensors.require(f"{key}.scale", spec.scale, "vector that is multiplied with", (width,))
        return ShiftScale(width, scales=bool(spec.scale))
    eps = spec.eps if spec.eps_key is None else config.number(spec.eps_key, spec.eps)
    if spec.kind in ("rms_plain", "layer_plain"):
        plain = nn.RMSNorm if spec.kind == "rms_plain" else nn.LayerNorm
        return plain(width, eps=eps, elementwise_affine=False)
    has_bias = spec.kind == "layer" and config.has(spec.bias)
    tensors.require(f"{key}.weight", tensor_names(spec.name, "weight", "gamma"), "norm", (width,))
    if spec.kind == "rms":
        return nn.RMSNorm(width, eps=eps)
    if spec.kind == "rms_offset":
        return OffsetRMSNorm(width, eps=eps)
    if has_bias:
        tensors.require(f"{key}.bias", tensor_names(spec.name, "bias", "beta"), "norm", (width,))
    if spec.affine_key is not None and config.get(spec.affine_key[0]) == spec.affine_key[1]:
        return ElementwiseAffine(width)
    return nn.LayerNorm(width, eps=eps, bias=has_bias)


def read_final_norm(model: CheckpointModel, width: int) -> nn.Module | None:
    """Read the norm between the last block and the head; `None` if the family has none, as after post-norm blocks."""
    model_type, tensors = model.config.get("model_type"), model.tensors
    checkpoint, [table, *_] = tensors.checkpoint, next(iter(tensors.names.values()))  # of tokens, or of codes
    if checkpoint.gguf is not None or model_type not in FINAL_NORMS:
        what = "a GGUF file" if checkpoint.gguf is not None else f"the model type {model_type!r}"
        raise CheckpointError(f"{checkpoint.name}: the final norm of {what} is not known. Leave out final_norm=True.")
    spec = FINAL_NORMS[str(model_type)]
    if spec is None or spec.kind in ("rms_plain", "layer_plain"):
        return read_norm(model, "final_norm", spec, width)
    place = final_norm_module(str(spec.name), table, checkpoint.names)
    if place is None:
        raise CheckpointError(f"{checkpoint.name}: the final norm, {spec.name}.weight, is missing. {tensors.remedy}")
    if spec.kind == "layer" and spec.bias is False and f"{place}.bias" in checkpoint.names:
        raise CheckpointError(f"{checkpoint.name}: {place} has a bias, which its family's code does not have.")
    return read_norm(model, "final_norm", replace(spec, name=place), width)


def attention_windows(model: CheckpointModel) -> dict[str, Any]:
    """Return the arguments `layer_types` and `window` of `EmbeddingLayer`, as far as the configuration has them."""
    config = model.config
    if model.family.decoder_input is not None or stated_size(config.content, "num_hidden_layers") is None:
        return {}
    with config.naming_file():
        types = layer_types(config.content)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if None in types and config.get("model_type") in WINDOW_IN_ALL_BLOCKS and "sliding_window" in config.content:
        types = ["full_attention" if window is None else "sliding_attention"] * len(types)
    return {
        "layer_types": [] if None in types else types,
        "window": None if window is None else as_whole_number(window, "sliding_window"),
    }


def read_linear(model: CheckpointModel, key: str, spec: LinearSpec, shape: tuple[int | None, int | None]) -> nn.Linear:
    """Read the tensors of a projection, and return a new module for them."""
    what = "projection to hidden_size" if key == "projection" else "projection"
    weight = model.tensors.require(f"{key}.weight", tensor_names(spec.name, "weight"), what, shape)
    has_bias = model.config.has(spec.bias)
    if has_bias:
        model.tensors.require(f"{key}.bias", tensor_names(spec.name, "bias"), "projection", (weight.shape[0],))
    return nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias)


def tensor_names(modules: str | Names, *ends: str) -> Names:
    """Return the names of a tensor of a module that may have several names: each name with each end."""
    names = (modules,) if isinstance(modules, str) else modules
    return tuple(f"{name}.{end}" for name in names for end in ends)


def read_projection(model: CheckpointModel) -> nn.Linear | None:
    """Read the projection from the width of the token table to the width of the model."""
    spec, tensors = model.family.projection, model.tensors
    if spec is None:
        return None
    names = tensor_names((spec if isinstance(spec, LinearSpec) else spec.linear).name, "weight")
    hidden, width = stated_size(model.config.content, "hidden_size"), tensors.by_key["table.weight"].shape[1]
    is_stored = tensors.has(names)
    if hidden not in (width, None) and not is_stored:
        tensors.refuse_quantised("projection.weight", names)
        raise CheckpointError(
            f"{model.config.file} says hidden_size {hidden!r}, the table has width {width:,}, and there is no "
            f"projection {' or '.join(names)}. {tensors.remedy}"
        )
    if isinstance(spec, FeatureSpec):  # of each vector with constant features appended
        features = [
            tensors.require(f"projection.features.{i}.weight", each, "table of features", (None, None))
            for i, each in enumerate(filter(tensors.has, spec.tables))
        ]
        linear = _projection(model, spec.linear, width + sum(rows.shape[1] for rows in features))
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        return FeatureProjection(*sizes, features=[rows.shape for rows in features]) if features else linear
    if isinstance(spec, TrigramSpec) and model.config.get(spec.key, True):  # of each vector with its neighbours
        linear = _projection(model, spec.linear, 3 * width)
        return TrigramProjection(linear.in_features, linear.out_features, linear.bias is not None)
    if hidden == width and (isinstance(spec, TrigramSpec) or not is_stored):
        return None
    return _projection(model, spec if isinstance(spec, LinearSpec) else spec.linear, width)


def _projection(model: CheckpointModel, spec: LinearSpec, width: int) -> nn.Linear:
    """Read a projection to the width of the model from vectors of another width."""
    return read_linear(model, "projection", spec, (model.config.whole(*CONFIG_KEYS["hidden_size"]), width))


def read_streams(model: CheckpointModel, width: int) -> PredictionStreams | None:
    """Read the vectors of prediction streams (ProphetNet); `None` if no stack of the checkpoint has them."""
    decoder = model.family.decoder_input
    positions = model.family.position if decoder is None else decoder.position
    if not isinstance(positions, StreamPositions):
        return None
    rows = model.tensors.require("streams.weight", positions.streams, "prediction streams", (None, width))
    return PredictionStreams(*rows.shape)


def read_decoder_input(
    model: CheckpointModel, spec: DecoderSpec, recipe: Sequence[Step], widths: Mapping[Step, int], width: int
) -> tuple[DecoderInput, StackPositions]:
    """Read what the decoder of an encoder-decoder model has for itself, and the positions of its blocks."""
    table = None if model.family.codes is not None else read_second_table(model, spec.table, spec.vocab_size)
    positions: StackPositions = {}, ()
    if spec.position is not None:
        count = model.config.whole(*spec.layers, *CONFIG_KEYS["num_hidden_layers"])
        own_width = widths.get("position", width)
        schemes, blocks = read_positions(model, spec.position, own_width, "other_positions.decoder", count)
        kinds = {kind: f"decoder_{kind}" if kind else "decoder" for kind in schemes}
        own = {kinds[kind]: scheme for kind, scheme in schemes.items()}
        positions = own, tuple(kinds[kind] for kind in blocks or ("",) * count)
    steps = recipe if spec.recipe is None else model.used_steps(spec.recipe)
    has_norm = spec.norm is not None and "norm" in steps
    parts = DecoderInput(
        None if spec.recipe is None else steps,
        table=table,
        norm=read_norm(model, "decoder.norm", spec.norm, widths["norm"]) if has_norm else None,
        is_scaled=spec.is_scaled,
    )
    return parts, positions


def read_per_layer(model: CheckpointModel, spec: PerLayerSpec, width: int) -> PerLayerInputs | None:
    """Read the table of per-layer inputs with its projection and norm.

    Stored rows of the table stay stored rows; those of the projection are dequantised. The result is `None` if the
    checkpoint lacks one of the tensors, or if their width is 0 in the configuration.
    """
    config, tensors, checkpoint = model.config, model.tensors, model.tensors.checkpoint
    names = [next(iter(checkpoint.find(name)), None) for name in spec.names]
    if config.get(spec.width) == 0:
        return None
    if None in names:
        tensors.refuse_quantised("per-layer inputs", spec.names)
        return None
    norm = tensors.require("per_layer.norm.weight", (spec.norm,), "norm of the per-layer inputs", (None,))
    layer_width = norm.shape[0]
    layers = config.whole("num_hidden_layers", default=tensors.info(str(names[0])).shape[-1] // layer_width)
    own_width = config.get(spec.width, layer_width)
    table, projection = "table of the per-layer inputs", "projection of the per-layer inputs"
    columns = layers * (own_width if type(own_width) is int else layer_width)
    rows = tensors.require("per_layer.table.weight", (spec.table,), table, (None, columns))
    check_rows(model, "per_layer.table.weight", (spec.rows,))
    tensors.require("per_layer.projection.weight", (spec.projection,), projection, (columns, width))
    return PerLayerInputs(
        table_with_scale(model, rows, "per_layer.table.weight", layer_width**0.5, round_scale=True),
        width,
        layers,
        eps=config.number("rms_norm_eps", 1e-6),
        missing_row=spec.missing_row,
        round_scales=spec.round_scales,
    )
