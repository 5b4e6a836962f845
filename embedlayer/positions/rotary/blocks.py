"""The rotary positions of each block of a model, as transformers' configurations state them.

`rotary_config` reads the settings of one type of layers; this module reads which layers have which settings, and which
are not rotated.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from embedlayer.core.errors import CheckpointError
from embedlayer.families import RotaryPositions, stated_size
from embedlayer.io.files import JsonObject
from embedlayer.io.json_fields import as_number, as_whole_number
from embedlayer.positions.rotary.config import (
    FULL,
    SLIDING,
    common_keys,
    family_facts,
    has_layer_types,
    is_nested,
    read_layer_type,
)
from embedlayer.positions.rotary.query import LogQueryScaling, PowerQueryScaling, QueryScaling

MOST_LAYERS = 1 << 16
NO_POSITIONS = "none"
"""Key of blocks whose attention has no positions, and of blocks without attention."""

SAME_FOR_ALL = "rotary"
"""Key of the blocks of a model in which all rotated blocks have the same rotary positions."""


class RotaryBlocks(NamedTuple):
    """Positions of each block of a model whose attention is rotated."""

    keys: tuple[str, ...]
    arguments: dict[str, dict[str, Any]]


def read_blocks(
    config: JsonObject,
    *,
    interleaved: bool | None = None,
    rotated: bool | Sequence[bool] | None = None,
    default_base: float | None = None,
) -> RotaryBlocks:
    """Return the positions of every block that a configuration describes."""
    facts = family_facts(config, is_stated=interleaved is not None and rotated is not None)
    config = common_keys(config, facts)
    types = layer_types(config)
    if rotated is None:
        flags = _rotated_layers(config, facts, types)
    else:
        flags = [rotated] * len(types) if isinstance(rotated, bool) else _list_of(len(types), rotated, "rotated")
    kinds = types if has_layer_types(config) else [None] * len(types)
    bases = _list_of(len(types), config.get("layer_rope_theta") or [None] * len(types), "layer_rope_theta")
    scaled = config.get("rope_scaling_layers")
    unrotated: QueryScaling | None = None
    if isinstance(facts.query_scaling, tuple):
        unrotated = PowerQueryScaling(*facts.query_scaling)
    elif facts.query_scaling == "unrotated" and config.get("attn_temperature_tuning", True):
        scale, length = as_number(config.get("attn_scale"), "attn_scale"), config.get("floor_scale")
        unrotated = LogQueryScaling(scale, as_whole_number(length, "floor_scale"), offset=1)
    keys: list[str] = []
    arguments: dict[str, dict[str, Any]] = {}
    by_settings: dict[tuple[Any, ...], dict[str, Any] | None] = {}
    for layer, (kind, flag, base) in enumerate(zip(kinds, flags, bases, strict=True)):
        block, key = None, kind or SAME_FOR_ALL
        settings = (kind, base, scaled is None or layer in scaled)
        if flag and settings not in by_settings:
            stated: dict[str, Any] = {"interleaved": interleaved, "default_base": default_base, "base": base}
            by_settings[settings] = read_layer_type(config, facts, kind, **stated, scaled=settings[-1])
        if flag:
            block = by_settings[settings]
        if block is None and unrotated is not None and types[layer] in (None, FULL, SLIDING, "chunked_attention"):
            block, key = {"query_scaling": unrotated}, "query_scaling"
        if block is None:
            keys.append(NO_POSITIONS)
            continue
        number = 1
        while arguments.get(key, block) != block:
            number += 1
            key = f"{kind or SAME_FOR_ALL}_{number}"
        arguments[key] = block
        keys.append(key)
    return RotaryBlocks(tuple(keys), arguments)


def layer_types(config: JsonObject) -> list[str | None]:
    """Return the attention type of each layer, as the configuration lists it or states a pattern of types."""
    types, count = config.get("layer_types"), stated_size(config, "num_hidden_layers")
    if count is None and isinstance(types, list | tuple):
        count = len(types)
    count = as_whole_number(count, "num_hidden_layers", most=MOST_LAYERS)
    if types is not None:
        return _list_of(count, types, "layer_types")
    cycle, attention = config.get("block_types"), config.get("attn_layer_indices")
    if isinstance(cycle, list | tuple) and cycle:
        return [str(cycle[layer % len(cycle)]) for layer in range(count)]
    if isinstance(attention, list | tuple):
        return ["attention" if layer in attention else "linear_attention" for layer in range(count)]
    every = config.get("sliding_window_pattern")
    if isinstance(every, int) and "rope_local_base_freq" in config:  # Gemma 3: layers 5, 11, ... have full attention
        return [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(count)]
    every = config.get("full_attention_interval")
    if isinstance(every, int):  # Qwen3-Next: layers 3, 7, ... have attention
        return [FULL if (layer + 1) % every == 0 else "linear_attention" for layer in range(count)]
    every = config.get("global_attn_every_n_layers")
    if isinstance(every, int) and "local_rope_theta" in config:  # ModernBERT: layers 0, 3, ... have full attention
        return [FULL if layer % every == 0 else SLIDING for layer in range(count)]
    return [None] * count


def _rotated_layers(config: JsonObject, facts: RotaryPositions, types: Sequence[str | None]) -> list[bool]:
    """Return for each layer whether it rotates queries and keys; the others have no positions (NoPE)."""
    count = len(types)
    listed, every = config.get("no_rope_layers"), config.get("no_rope_layer_interval")
    unless = facts.only_if is not None and config.get(facts.only_if[0]) != facts.only_if[1]
    flags = [facts.without_positions != "all" and not unless] * count
    if listed:
        flags = [bool(flag) for flag in _list_of(count, listed, "no_rope_layers")]
    elif every:
        flags = [(layer + 1) % as_whole_number(every, "no_rope_layer_interval") != 0 for layer in range(count)]
    elif facts.without_positions == "listed":
        name = config["model_type"]
        raise CheckpointError(f"{name} lacks no_rope_layers or no_rope_layer_interval: some layers are not rotated.")
    if config.get("layer_rope_theta"):
        flags = [base != 0 for base in _list_of(count, config["layer_rope_theta"], "layer_rope_theta")]
    crossed = config.get("cross_attention_layers") or ()
    flags = [flag and layer not in crossed for layer, flag in enumerate(flags)]
    if facts.without_positions == "full_attention" and config.get("sliding_window") is not None:
        rotated_types: Sequence[str] | None = (SLIDING,)
    else:
        rotated_types = facts.rotated_types
    if rotated_types is not None:
        if None in types:
            kinds, name = " or ".join(rotated_types), config["model_type"]
            raise CheckpointError(f"{name} rotates only layers of type {kinds}: layer_types is missing.")
        flags = [flag and kind in rotated_types for flag, kind in zip(flags, types, strict=True)]
    parameters = config.get("rope_parameters") or {}
    absent = {key for key, value in parameters.items() if value is None} if is_nested(parameters) else set()
    return [flag and kind not in absent for flag, kind in zip(flags, types, strict=True)]


def _list_of(count: int, values: object, name: str) -> list[Any]:
    """Return a value of the configuration as a list; raise a `CheckpointError` unless each layer has one entry."""
    if not isinstance(values, list | tuple) or len(values) != count:
        raise CheckpointError(f"{name} must have one entry for each of {count} layers, not {values!r}.")
    return list(values)
