"""Read the position schemes of one stack of a model: one function for each specification of a family's record."""

import warnings
from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import version

from embedlayer.checkpoints.reading.configuration import MOST_POSITIONS
from embedlayer.checkpoints.reading.model import CheckpointModel
from embedlayer.checkpoints.reading.table import check_rows
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning
from embedlayer.families import CONFIG_KEYS, rotary_facts, stated_size
from embedlayer.families.records import (
    POSITION_KEYS,
    AlibiPositions,
    AxialPositions,
    BiasedPositions,
    LearnedPositions,
    PositionChoice,
    PositionSpec,
    RelativePositions,
    SinusoidalPositions,
    StreamPositions,
)
from embedlayer.families.vocabulary_tensors import configuration_of
from embedlayer.io.json_fields import as_number
from embedlayer.positions.alibi import AlibiBias
from embedlayer.positions.axial import AxialPositionalEmbedding
from embedlayer.positions.learned import LearnedPositionalEmbedding
from embedlayer.positions.position import Position
from embedlayer.positions.relative import RelativePositionBias
from embedlayer.positions.rotary.blocks import RotaryBlocks, layer_types, read_blocks
from embedlayer.positions.rotary.config import is_nested
from embedlayer.positions.rotary.embedding import RotaryEmbedding, rotary_scheme
from embedlayer.positions.sinusoidal import SinusoidalPositionalEmbedding

LENGTH_KEYS = (
    *(*POSITION_KEYS, "max_target_positions", "max_source_positions"),
    *("max_encoder_position_embeddings", "max_decoder_position_embeddings"),
)
"""Configuration keys of the number of positions of a stack."""

StackPositions = tuple[Mapping[str, Position], tuple[str, ...]]
"""Position schemes of one stack of a model, and for each block the key of its scheme.

The key `""` has the scheme of the first block. Other keys, such as `"full_attention"`, are there only for models whose
layers differ. There is no key for a block if every block has the scheme of the first.
"""
OLDER_KEYS = ("rope_scaling", "rope_theta", "rope_local_base_freq", "local_rope_theta", "global_rope_theta")
"""Configuration keys that `rope_parameters` replaced."""


def read_positions(
    model: CheckpointModel, spec: PositionSpec | None, width: int, key: str = "position", num_layers: int | None = None
) -> StackPositions:
    """Read the position schemes of one stack of the model, by kind of layer, and the kind of each block.

    `width` is that of the vectors that positions are added to, or that of the model for other schemes. `key` is the
    name of the scheme of the first block in the layer, the prefix of its tensors' keys.
    """
    spec = chosen_positions(model, spec)
    if spec == "rotary":
        return _rotary(model)
    if isinstance(spec, RelativePositions):
        return _relative(model, spec, key, num_layers)
    if isinstance(spec, BiasedPositions):  # added positions, and a bias that all blocks apply in attention (MPNet)
        bias = _relative(model, spec.bias, "other_positions.attention", None)[0][""]
        count = model.config.whole(*CONFIG_KEYS["num_hidden_layers"])
        return {"": _learned(model, spec.added, width, key), "attention": bias}, ("attention",) * count
    scheme = Position()
    if isinstance(spec, AlibiPositions):
        heads, attention = model.config.whole(*CONFIG_KEYS["num_attention_heads"]), model.config.get("attn_config")
        max_bias = attention.get("alibi_bias_max", 8) if isinstance(attention, dict) else 8
        with model.config.naming_file():
            max_bias = as_number(max_bias, "attn_config.alibi_bias_max", above=0.0)
        scheme = AlibiBias(heads, max_bias=max_bias, scale=(width // heads) ** -0.5 if spec.is_divided else 1.0)
    elif isinstance(spec, AxialPositions):
        rows = model.tensors.require(f"{key}.rows", spec.names[0], "position table of rows", (None, 1, None))
        columns = model.tensors.require(f"{key}.columns", spec.names[1], "position table of columns", (1, None, None))
        scheme = AxialPositionalEmbedding((rows.shape[0], columns.shape[1]), (rows.shape[2], columns.shape[2]))
    elif isinstance(spec, LearnedPositions | StreamPositions):
        scheme = _learned(model, spec if isinstance(spec, LearnedPositions) else spec.added, width, key)
    elif isinstance(spec, SinusoidalPositions):
        counts_from_padding = spec.after_padding and spec.offset is None
        scheme = SinusoidalPositionalEmbedding(
            model.config.whole(*POSITION_KEYS, most=MOST_POSITIONS),
            width,
            layout="cosines_first" if spec.cosines_first else "concatenated",
            endpoint=spec.after_padding if spec.endpoint is None else spec.endpoint,
            offset=first_position(model) if counts_from_padding else spec.offset or 0,
            padding_idx=model.padding_id if spec.after_padding else None,
        )
    return {"": scheme}, ()


def chosen_positions(model: CheckpointModel, spec: PositionSpec | None) -> PositionSpec | None:
    """Return the position scheme of a family record that the configuration and tensors of a checkpoint select."""
    tensors = model.tensors
    if isinstance(spec, PositionChoice):
        value = model.config.get(spec.key, spec.choices[0][0] if spec.otherwise == "refused" else None)
        scheme = next((scheme for choice, scheme in spec.choices if choice == value), spec.otherwise)
        if scheme == "refused":
            known = [choice for choice, _ in spec.choices]
            raise CheckpointError(f"{tensors.checkpoint.name}: {spec.key} {value!r} is not read, only {known}.")
        return scheme
    if isinstance(spec, AxialPositions) and not tensors.has(spec.names[0]):
        return spec.plain
    if isinstance(spec, SinusoidalPositions) and tensors.has(spec.stored):
        return LearnedPositions(spec.stored, offset="padding" if spec.after_padding else spec.offset or 0)
    return spec


def _learned(model: CheckpointModel, spec: LearnedPositions, width: int, key: str) -> Position:
    """Read a table of learned positions; a neutral `Position` if the input embedding has no such step."""
    if "position" not in model.used_steps(model.family.recipe):
        return Position()
    length = model.tensors.require(f"{key}.weight", spec.names, "table of positions", (None, width)).shape[0]
    offset = first_position(model) if spec.offset == "padding" else int(spec.offset)
    check_rows(model, f"{key}.weight", LENGTH_KEYS, more=offset)
    return LearnedPositionalEmbedding(length - offset, width, offset=offset)


def _rotary(model: CheckpointModel) -> StackPositions:
    """Read rotary positions, which may differ between blocks."""
    config = model.config.content
    facts = rotary_facts(config.get("model_type"))
    base = None if facts is None else facts.base
    with model.config.naming_file():
        if stated_size(config, "num_hidden_layers") is None and "layer_types" not in config:
            return {"": RotaryEmbedding.from_config(config, default_base=base)}, ()
        keys, arguments = blocks = read_blocks(config, default_base=base)
        schemes = {key: rotary_scheme(arguments[key]) if key in arguments else Position() for key in {*keys}}
    _warn_of_another_reading(model, blocks)
    others = {key: schemes[key] for key in dict.fromkeys(keys) if key in arguments or key != keys[0]}
    names = tuple("" if key == keys[0] else key for key in keys) if len(schemes) > 1 else ()
    return {"": schemes[keys[0]], **others}, names


def _warn_of_another_reading(model: CheckpointModel, ours: RotaryBlocks) -> None:
    """Warn if transformers, as it is installed, takes other rotary positions from the configuration.

    Releases differ in which older forms they read for families whose class has numbers of its own, such as one base for
    each type of layers: they silently ignore the others, and compute with these numbers. Where the parameters of each
    type are stated, and for other families, all releases agree, so transformers is not imported.
    """
    config = model.config.content
    facts = rotary_facts(config.get("model_type"))
    has_own = facts is not None and any("rope_parameters" in keys for keys in facts.stated)
    if is_nested(config.get("rope_parameters")) or not has_own:
        return
    try:
        installed = configuration_of(config)
        parameters = getattr(installed, "rope_parameters", None)
        if parameters is None:
            return
        others = {key: value for key, value in config.items() if key not in OLDER_KEYS}
        others = {"layer_types": getattr(installed, "layer_types", None), **others, "rope_parameters": parameters}
        theirs = read_blocks(others, default_base=None if facts is None else facts.base)
    except CheckpointError:  # transformers raises an error, or what it reads is none of the known forms
        return
    differences = defaultdict[str, list[str]](list)  # what differs -> types of layers
    for kind, own, other in zip(layer_types(others), ours.keys, theirs.keys, strict=True):
        here, there = ours.arguments.get(own, {}), theirs.arguments.get(other, {})
        names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        if names:
            texts = (", ".join(f"{name} {each.get(name)}" for name in names) for each in (here, there))
            differences["{} here and {} in transformers".format(*texts)].append(kind or "all")
    if differences:
        listed = "; ".join(f"{' and '.join(dict.fromkeys(kinds))}: {text}" for text, kinds in differences.items())
        warnings.warn(
            f"{model.config.file}: transformers {version('transformers')} ignores rotary keys of this file, which are "
            f"used here. {listed}. All releases read rope_parameters with a dictionary for each type of layer.",
            EmbedLayerWarning,
            stacklevel=2,
        )


def _relative(model: CheckpointModel, spec: RelativePositions, key: str, num_layers: int | None) -> StackPositions:
    """Read T5's relative biases, one for each kind of layer.

    If every block has its own table (UMT5), the kinds are the numbers of the blocks, with `""` for the first one.
    """
    config = model.config
    heads = config.whole(*CONFIG_KEYS["num_attention_heads"])
    buckets = config.whole("relative_attention_num_buckets", default=32)
    has_one_each = any("{}" in name for name in spec.names)
    count = num_layers or config.whole(config.first_key(CONFIG_KEYS["num_hidden_layers"]) or "num_layers")
    kinds = ("", *map(str, range(1, count))) if has_one_each else ("",)
    prefix = "" if key == "position" else f"{key.removeprefix('other_positions.')}_"
    for kind in kinds:
        own = f"other_positions.{prefix}{kind}" if kind else key
        names = tuple(name.format(kind or 0) for name in spec.names)
        model.tensors.require(f"{own}.weight", names, "relative bias", (buckets, heads))
    distance = config.whole("relative_attention_max_distance", default=128, most=MOST_POSITIONS)
    schemes = {
        kind: RelativePositionBias(heads, num_buckets=buckets, max_distance=distance, bidirectional=spec.bidirectional)
        for kind in kinds
    }
    return schemes, kinds if has_one_each else ()


def first_position(model: CheckpointModel) -> int:
    """Return `padding_id + 1`, the position ID of the first token in families that count from behind the padding ID.

    It is also the number of rows of their position table before the row of the first token.
    """
    if model.padding_id is None:
        raise CheckpointError(f"{model.config.file}: positions of {model.tensors.family_name} need pad_token_id.")
    return model.padding_id + 1


def first_position_id(model: CheckpointModel) -> int:
    """Return the position ID that transformers gives the first token: 0, unless the family counts from a later one."""
    family, spec = model.family, model.family.position
    learned = spec if isinstance(spec, LearnedPositions) else None
    if family.numbering != "ids" and (learned is None or not learned.ids_include_offset):
        return 0
    return first_position(model) if learned is None or learned.offset == "padding" else int(learned.offset)
