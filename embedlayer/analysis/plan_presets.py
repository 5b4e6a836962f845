"""Plans of published models by name, of a `config.json` of transformers, and of given sizes."""

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from embedlayer.analysis.embedding_plan import OPTIONS, EmbeddingPlan, RowSize
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning, SizeError
from embedlayer.core.formatting import command_line
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

_PUBLISHED: list[tuple[str, int, int, bool, dict[str, Any]]] = [
    ("gpt2", 50257, 768, True, {"positions": 1024}),
    ("gpt2-medium", 50257, 1024, True, {"positions": 1024}),
    ("gpt2-large", 50257, 1280, True, {"positions": 1024}),
    ("gpt2-xl", 50257, 1600, True, {"positions": 1024}),
    ("bert-base", 30522, 768, True, {"positions": 512}),
    ("bert-large", 30522, 1024, True, {"positions": 512}),
    # RoBERTa and OPT start counting positions at 2.
    ("roberta-base", 50265, 768, True, {"positions": 514}),
    ("opt-125m", 50272, 768, True, {"positions": 2050}),
    # ALBERT's 512 positions are as narrow as its rank; not counted, as ours are added at full width.
    ("albert-base", 30000, 768, True, {"rank": 128}),
    ("t5-small", 32128, 512, True, {}),
    ("t5-base", 32128, 768, True, {}),
    ("bloom-560m", 250880, 1024, True, {}),
    ("pythia-70m", 50304, 512, False, {}),
    ("phi-2", 51200, 2560, False, {}),
    ("phi-3-mini", 32064, 3072, False, {}),
    ("llama-7b", 32000, 4096, False, {}),
    ("llama-13b", 32000, 5120, False, {}),
    ("llama-65b", 32000, 8192, False, {}),
    ("llama-2-7b", 32000, 4096, False, {}),
    ("llama-2-13b", 32000, 5120, False, {}),
    ("llama-2-70b", 32000, 8192, False, {}),
    ("llama-3-8b", 128256, 4096, False, {}),
    ("llama-3-70b", 128256, 8192, False, {}),
    ("llama-3.2-1b", 128256, 2048, True, {}),
    ("llama-3.2-3b", 128256, 3072, True, {}),
    ("mistral-7b", 32000, 4096, False, {}),
    ("gemma-2b", 256000, 2048, True, {}),
    ("gemma-7b", 256000, 3072, True, {}),
    ("gemma-2-2b", 256000, 2304, True, {}),
    ("gemma-2-9b", 256000, 3584, True, {}),
    ("gemma-2-27b", 256000, 4608, True, {}),
    ("gemma-3-270m", 262144, 640, True, {}),
    ("gemma-3-1b", 262144, 1152, True, {}),
    # The larger models read images too, and their tables have 64 rows more.
    ("gemma-3-4b", 262208, 2560, True, {}),
    ("gemma-3-12b", 262208, 3840, True, {}),
    ("gemma-3-27b", 262208, 5376, True, {}),
    ("qwen2-0.5b", 151936, 896, True, {}),
    ("qwen2-1.5b", 151936, 1536, True, {}),
    ("qwen2-7b", 152064, 3584, False, {}),
    ("qwen3-0.6b", 151936, 1024, True, {}),
    ("qwen3-1.7b", 151936, 2048, True, {}),
    ("qwen3-4b", 151936, 2560, True, {}),
    ("qwen3-8b", 151936, 4096, False, {}),
    ("qwen3-14b", 151936, 5120, False, {}),
    ("qwen3-32b", 151936, 5120, False, {}),
    ("smollm2-135m", 49152, 576, True, {}),
]
PRESETS = {name: EmbeddingPlan(*size, tied=tied, name=name, **rest) for name, *size, tied, rest in _PUBLISHED}
"""Tables and heads of published models by name. V is that of the checkpoint, padding to a round number included."""


Model: TypeAlias = str | JsonObject | None
"""Name of a preset, path of a `config.json` of transformers, its content, or `None` for given sizes."""


def plan(preset: Model = None, **options: Any) -> EmbeddingPlan:
    """Plan the table and head of a published model, or of given sizes.

    Args:
        preset: A name in `PRESETS`; or the path of a `config.json` of transformers, or its content; `None` if
            `vocab_size` and `embed_dim` are passed.
        **options: Fields of `EmbeddingPlan`. Beside a preset they replace its own; `None` keeps the preset's.

    Raises:
        FileError: The `config.json` cannot be read.
        CheckpointError: The `config.json` is of a model that is not planned: its type is unknown or not read by
            `embedlayer.load`, a size is missing, or it has a table or a head that no plan describes.

    Example:
        >>> plan("gpt2").parameters - plan("gpt2").position_parameters
        38597376
        >>> plan(vocab_size=32000, embed_dim=4096).table_bytes
        524288000
    """
    values = {name: value for name, value in options.items() if value is not None}
    if isinstance(preset, dict) or (preset is not None and preset.endswith(".json")):
        return EmbeddingPlan(**{**fields_of_config(preset), **values})
    if preset in PRESETS:
        return replace(PRESETS[preset], **values)
    if preset is not None:
        close = get_close_matches(preset.lower(), PRESETS, n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(PRESETS)}."
        raise SizeError(f"there is no preset {preset!r}.\n{hint} Other models: give vocab_size and embed_dim.")
    if missing := {"vocab_size", "embed_dim"} - values.keys():
        raise SizeError(f"pass {' and '.join(sorted(missing))}, or the name of a model: plan('gpt2').")
    return EmbeddingPlan(**values)


_signature = inspect.signature(plan)
_options = [
    each.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=None)
    for name, each in inspect.signature(EmbeddingPlan).parameters.items()
    if name in OPTIONS
]
plan.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=[_signature.parameters["preset"], *_options]
)


PLAN_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Names of data types in a configuration, and in a plan."""

INSTEAD = "Give its sizes: --vocab and --dim, in Python vocab_size and embed_dim."


def fields_of_config(source: str | JsonObject) -> JsonObject:
    """Return the fields of an `EmbeddingPlan` for the model that a configuration of transformers describes.

    Learned positions of encoder and decoder are counted together. Token types, norms and biases are not counted. A
    quantised MLX configuration says how table and head are stored. In other quantised models they are counted in
    `dtype`, with a warning.
    """
    from embedlayer.checkpoints.reading.configuration import is_tied, stated_dtype, text_config, with_defaults

    config = source if isinstance(source, dict) else read_json(Path(source))
    text = text_config(config)
    model_type = text.get("model_type")
    if "kind" in config:
        raise CheckpointError("This config.json is of a layer that embedlayer saved: plan it with --checkpoint FOLDER.")
    family = family_of(model_type)
    if family is None:
        why = (
            REFUSED.get(str(model_type))
            or f"it is unknown here; near: {', '.join(nearest_model_types(str(model_type)))}."
        )
        raise CheckpointError(f"The model type {model_type!r} is not planned: {why} {INSTEAD}")
    head, decoder = family.head or HeadSpec(), family.decoder_input
    sizes = {text.get(key) for key in ("vocab_size", "vocab_size" if decoder is None else decoder.vocab_size)}
    two_tables = len(sizes - {None}) > 1 or text.get("share_encoder_decoder_embeddings") is False
    other_table = isinstance(family.rows, FoldedRows) or isinstance(family.projection, TrigramSpec)
    if head.rows is not None or other_table or two_tables or family.sub_configs or family.codes is not None:
        raise CheckpointError(f"The table or head of a {family.name or model_type} is none that a plan has. {INSTEAD}")
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
        "dtype": PLAN_DTYPES.get(stated_dtype(config), "fp32"),
        "name": str(config.get("model_type")) if isinstance(source, dict) else str(source),
    }
    if family.per_layer is not None and values.get(family.per_layer.width):
        blocks = as_whole_number(stated_size(values, "num_hidden_layers"), "num_hidden_layers")
        fields["per_layer_dim"] = _whole(values, family.per_layer.width) * blocks  # for all blocks together
        stored_rows = values.get(family.per_layer.rows, values["vocab_size"])
        fields["per_layer_rows"] = as_whole_number(stored_rows, family.per_layer.rows)
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
