"""Sizes of the table and head of a model that a `config.json` of transformers describes, without its tensors."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embedlayer.analysis.embedding_plan import RowSize
from embedlayer.core.command_name import command_line
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning
from embedlayer.families import REFUSED, family_of, nearest_model_types, stated_size
from embedlayer.families.records import (
    POSITION_KEYS,
    BiasedPositions,
    Family,
    FoldedRows,
    HeadSpec,
    LearnedPositions,
    PositionChoice,
    PositionSpec,
    StreamPositions,
    TrigramSpec,
)
from embedlayer.io.files import JsonObject, read_json
from embedlayer.io.json_fields import as_whole_number

DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Names of data types in a configuration, and in a plan."""

INSTEAD = "Give its sizes: --vocab and --dim, in Python vocab_size and embed_dim."


def fields_of_config(source: str | JsonObject) -> JsonObject:
    """Return the fields of an `EmbeddingPlan` for the model that a configuration of transformers describes."""
    from embedlayer.checkpoints.reading.configuration import is_tied, stated_dtype, text_config, with_defaults

    config = source if isinstance(source, dict) else read_json(Path(source))
    text = text_config(config)
    family = _family(config, text)
    values = with_defaults(family, text)
    rows = _whole(values, "vocab_size") + family.extra_rows
    width = next((_whole(values, key) for key in family.width if values.get(key) is not None), None)
    hidden = stated_size(values, "hidden_size")
    if width is None:
        raise CheckpointError(f"The configuration has none of {', '.join(family.width)}. {INSTEAD}")
    narrow = family.projection is not None and hidden is not None and hidden != width
    tied = family.head is None or is_tied(family.head, values)
    fields: JsonObject = {
        "vocab_size": rows,
        "embed_dim": as_whole_number(hidden, "hidden_size") if narrow else width,
        "rank": width if narrow else None,
        "tied": tied,
        "lookup_only": family.head is None,
        "positions": sum(_position_rows(family, values)),
        "dtype": DTYPES.get(stated_dtype(config), "fp32"),
        "name": str(config.get("model_type")) if isinstance(source, dict) else str(source),
        **_per_layer(family, values),
    }
    fields["row_sizes"] = _row_sizes(family, config, fields)
    if narrow and not tied:
        raise CheckpointError(f"The untied head of this {family.name} is as narrow as its table. {INSTEAD}")
    return fields


def _row_sizes(family: Family, config: JsonObject, fields: JsonObject) -> dict[str, RowSize]:
    """Return the stored rows of table, head and per-layer table, as a quantised model's configuration states them."""
    from embedlayer.checkpoints.reader import SCHEMES
    from embedlayer.formats.mlx import stated_format

    configs = [each for each in (config, config.get("text_config")) if isinstance(each, dict)]
    scheme = next((each[key] for each in configs for key in SCHEMES if isinstance(each.get(key), dict)), None)
    if scheme is None:
        return {}
    if "quant_method" in scheme or fields["rank"] is not None:
        warnings.warn(
            f"The configuration states a quantisation ({scheme.get('quant_method', 'MLX')}), which does not tell how "
            f"the table and head are stored: they are counted in {fields['dtype']}. What a folder stores is planned "
            f"with {command_line('plan', '--checkpoint', 'FOLDER')}.",
            EmbedLayerWarning,
            stacklevel=2,
        )
        return {}
    parts = {"table": (family.table, fields["embed_dim"])}
    if family.head is not None and not fields["tied"]:
        parts["head"] = (family.head.weight, fields["embed_dim"])
    if family.per_layer is not None and "per_layer_dim" in fields:
        parts["per_layer"] = ((family.per_layer.table,), fields["per_layer_dim"])
    scale_dtype = {"bf16": "BF16", "fp16": "F16"}.get(fields["dtype"], "F32")
    records = {
        part: stated_format(scheme, tuple(name.removesuffix(".weight") for name in names), width, scale_dtype)
        for part, (names, width) in parts.items()
    }
    return {part: RowSize(each.name, each.row_bytes) for part, each in records.items() if each is not None}


def _family(config: JsonObject, text: JsonObject) -> Family:
    """Return the record of the language model."""
    model_type = text.get("model_type")
    if "kind" in config:
        raise CheckpointError("This config.json is of a layer that embedlayer saved: plan it with --checkpoint FOLDER.")
    family = family_of(model_type)
    if family is None:
        known = REFUSED.get(model_type) if isinstance(model_type, str) else None
        near = ", ".join(nearest_model_types(str(model_type)))
        raise CheckpointError(
            f"The model type {model_type!r} is not planned: {known or f'it is unknown here; near: {near}.'} {INSTEAD}"
        )
    head, decoder = family.head or HeadSpec(), family.decoder_input
    sizes = {text.get(key) for key in ("vocab_size", "vocab_size" if decoder is None else decoder.vocab_size)}
    two_tables = len(sizes - {None}) > 1 or text.get("share_encoder_decoder_embeddings") is False
    other_table = isinstance(family.rows, FoldedRows) or isinstance(family.projection, TrigramSpec)
    if head.rows is not None or other_table or two_tables or family.sub_configs or family.codes is not None:
        raise CheckpointError(f"The table or head of a {family.name or model_type} is none that a plan has. {INSTEAD}")
    return family


def _whole(config: Mapping[str, Any], key: str) -> int:
    """Return a size of the configuration; raise a `CheckpointError` if it is no whole number from 1 on."""
    return as_whole_number(config.get(key), key)


def _position_rows(family: Family, config: Mapping[str, Any]) -> list[int]:
    """Return the number of rows of each table of learned positions."""
    left_out = {step for step, key, default in family.optional if not config.get(key, default)}
    specs: list[PositionSpec | None] = [family.position]
    if family.decoder_input is not None:  # a decoder alone has the positions of a decoder
        specs = [*specs, family.decoder_input.position][config.get("is_encoder_decoder") is False :]
    sizes = []
    for spec in specs:
        if isinstance(spec, BiasedPositions | StreamPositions):
            spec = spec.added
        if isinstance(spec, PositionChoice):
            spec = dict(spec.choices).get(str(config.get(spec.key, spec.choices[0][0])))
        if isinstance(spec, LearnedPositions) and "position" not in left_out:
            key = next((key for key in POSITION_KEYS if config.get(key) is not None), POSITION_KEYS[0])
            sizes.append(_whole(config, key) + (0 if spec.offset == "padding" else spec.offset))
    return sizes


def _per_layer(family: Family, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the fields `per_layer_dim`, the width for all blocks together, and `per_layer_rows` of a plan."""
    spec = family.per_layer
    width = config.get(spec.width, 0) if spec is not None else 0
    if spec is None or not width:
        return {}
    blocks = as_whole_number(stated_size(config, "num_hidden_layers"), "num_hidden_layers")
    rows = config.get(spec.rows, config["vocab_size"])
    return {"per_layer_dim": _whole(config, spec.width) * blocks, "per_layer_rows": as_whole_number(rows, spec.rows)}
