"""Read the rotary positions of one type of layers strictly from transformers' configurations.

transformers stores them in `rope_parameters`: one dictionary, or one for each layer type, with `None` for layers
without positions. Older files have `rope_scaling`, `rope_theta`, `partial_rotary_factor` or `rotary_pct`. For two kinds
of layers they have `rope_local_base_freq` (Gemma 3) or `local_rope_theta` and `global_rope_theta` (ModernBERT).
transformers warns about unknown keys and fills in missing ones; here both are errors. Facts that no configuration
states are in `embedlayer.families`.

In the functions, `config` is a configuration with the common names of keys, `facts` are the settings of its family, and
`parameters` the rotary parameters of one type of layers. A `CheckpointError` names the key that is unknown, missing, of
the wrong type, or contradicts another.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from embedlayer.core.errors import CheckpointError, EmbedLayerWarning
from embedlayer.families import REFUSED_ROTARY, ROTARY, RotaryPositions, rotary_facts, stated_size
from embedlayer.families.rotary_settings import GridAxes, SectionAxes
from embedlayer.io.files import JsonObject
from embedlayer.io.json_fields import as_number, as_whole_number, printable
from embedlayer.positions.rotary.axes import (
    AlternatingAxes,
    AxialAxes,
    ChannelAxes,
    ChunkedAxes,
    InterleavedAxes,
    RotaryAxes,
    SectionedAxes,
)
from embedlayer.positions.rotary.query import LogQueryScaling
from embedlayer.positions.rotary.scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKAlphaScaling,
    ProportionalScaling,
    RotaryScaling,
    YarnScaling,
)

SLIDING, FULL = "sliding_attention", "full_attention"
ORIGINAL_LENGTH = "original_max_position_embeddings"


class RopeType(NamedTuple):
    """A `rope_type` of transformers: its scaling class, and the configuration keys of its parameters."""

    scaling: Callable[..., RotaryScaling] | None
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()


ROPE_TYPES = {
    "default": RopeType(None),
    "axial": RopeType(None),
    "linear": RopeType(LinearScaling, frozenset({"factor"})),
    "dynamic": RopeType(DynamicNTKScaling, frozenset({"factor"})),
    "yarn": RopeType(
        YarnScaling,
        frozenset({"factor", ORIGINAL_LENGTH}),
        frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    ),
    "ntk_alpha": RopeType(NTKAlphaScaling, frozenset({"alpha"})),
    "longrope": RopeType(
        LongRopeScaling,
        frozenset({"short_factor", "long_factor", ORIGINAL_LENGTH}),
        frozenset({"attention_factor", "factor"}),
    ),
    "llama3": RopeType(Llama3Scaling, frozenset({"factor", ORIGINAL_LENGTH, "low_freq_factor", "high_freq_factor"})),
    "proportional": RopeType(ProportionalScaling, optional=frozenset({"factor"})),
}
COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
SECTIONS = "mrope_section"
QUERY_BETA = "llama_4_scaling_beta"
AXES: dict[str, Callable[[Sequence[int]], SectionedAxes]] = {
    "chunked": ChunkedAxes,
    "interleaved": InterleavedAxes,
    "alternating": AlternatingAxes,
    "channels": ChannelAxes,
}
"""`SectionAxes.layout` -> class of the axes that a configuration states sections of."""

ROTARY_KEYS = {
    *("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_embedding_base"),
    *("partial_rotary_factor", "rotary_pct", "rotary_dim", "rotary", "qk_rope_head_dim", "rope_interleave"),
    *("rope_local_base_freq", "local_rope_theta", "global_rope_theta", "no_rope_layers", "no_rope_layer_interval"),
    *("layer_rope_theta", "rope_scaling_layers", "compress_rope_theta"),
}
"""Keys of a configuration about rotary positions that this module understands.

Any other key with `rope` or `rotary` in its name is an error, unless its value is false.
"""


def read_rotary(
    config: JsonObject,
    layer_type: str | None = None,
    *,
    interleaved: bool | None = None,
    default_base: float | None = None,
) -> dict[str, Any] | None:
    """Return the arguments of `RotaryEmbedding` that a configuration describes; `None` for layers without positions."""
    facts = family_facts(config, is_stated=interleaved is not None)
    config = common_keys(config, facts)
    base = None
    if config.get("layer_rope_theta"):
        bases = set(config["layer_rope_theta"]) - {0}
        if len(bases) != 1:
            raise CheckpointError(f"layer_rope_theta has several bases: {sorted(bases)}. Use rotary_positions(config).")
        base = bases.pop()
    return read_layer_type(config, facts, layer_type, interleaved=interleaved, default_base=default_base, base=base)


def read_layer_type(
    config: JsonObject,
    facts: RotaryPositions,
    layer_type: str | None,
    *,
    interleaved: bool | None,
    default_base: float | None,
    base: float | None = None,
    scaled: bool = True,
) -> dict[str, Any] | None:
    """Return the arguments of `RotaryEmbedding` for the layers of a type; `None` for layers without positions."""
    _check_keys(config, facts)
    if facts.without_positions == "all" or (facts.only_if and config.get(facts.only_if[0]) != facts.only_if[1]):
        return None
    parameters = _parameters(config, facts, layer_type)
    if parameters is None:
        return None
    kind = rope_type_of(parameters, facts)
    if ROPE_TYPES[kind].scaling is not None and facts.rope_types and kind not in facts.rope_types:
        raise CheckpointError(
            f"The code of {config['model_type']} has no rope_type {kind!r} that is read here: "
            f"{' or '.join(facts.rope_types)} are known."
        )
    allowed = COMMON_KEYS | ROPE_TYPES[kind].required | ROPE_TYPES[kind].optional | {*facts.other_parameters}
    allowed |= {QUERY_BETA, ORIGINAL_LENGTH} if facts.query_scaling == "rotated" else set()
    allowed |= {SECTIONS, *facts.axes.names, "mrope_interleaved"} if isinstance(facts.axes, SectionAxes) else set()
    for key in parameters:
        if key not in allowed:
            raise CheckpointError(f"Rotary positions of type {kind!r} have no key {key!r}.{_hint(key, allowed)}")
    width = head_width(config, layer_type)
    share = _rotated_share(config, facts, parameters, width, kind)
    layout = _layout(config, facts) if interleaved is None else interleaved
    rotary_dim = width if kind == "proportional" else int(width * share)
    if isinstance(facts.axes, GridAxes):  # an equal number of pairs for each axis
        rotary_dim -= rotary_dim % (2 * facts.axes.num_axes)
    arguments: dict[str, Any] = {
        "head_dim": width,
        "base": _base(config, facts, parameters, layer_type, default_base) if base is None else as_number(base, "base"),
        "scaling": _scaling(kind if scaled else "default", config, facts, parameters, share),
        "interleaved": layout,
        "rotary_dim": rotary_dim,
    }
    if facts.rotation == "reversed":
        arguments["reversed"] = True
    elif facts.rotation == "trailing":  # the whole head: all of its query is scaled (Mistral 4)
        arguments |= {"trailing": True, "head_dim": _whole_head(config, width)}
    optional = {"axes": _axes(facts.axes, parameters, rotary_dim // 2), "query_scaling": _query_scaling(parameters)}
    return arguments | {name: value for name, value in optional.items() if value is not None}


def _whole_head(config: JsonObject, width: int) -> int:
    """Return the number of channels of a head, rotated or not: `head_dim` if it is more than the rotated `width`."""
    parts = config.get("qk_nope_head_dim")
    if parts is not None:
        return as_whole_number(parts, "qk_nope_head_dim") + width
    return max(as_whole_number(config.get("head_dim") or width, "head_dim"), width)


def family_facts(config: JsonObject, *, is_stated: bool) -> RotaryPositions:
    """Return the settings of the family of a configuration; default ones for an unknown family."""
    name = config.get("model_type")
    facts = rotary_facts(name)
    if isinstance(name, str) and name in REFUSED_ROTARY:
        raise CheckpointError(f"The rotary positions of model_type {name!r} are not read: {REFUSED_ROTARY[name]}.")
    inner = _inner_models(config)
    if facts is None and inner and not config.keys() & ROTARY_KEYS:
        choices = " or ".join(f"config[{key!r}]" for key in inner)
        raise CheckpointError(f"This configuration holds several models: pass {choices}.")
    if facts is None and not is_stated:
        about = "has no model_type" if name is None else f"has the unknown model_type {name!r}"
        close = " or ".join(get_close_matches(str(name), ROTARY, n=2, cutoff=0.6))
        raise CheckpointError(
            f"The configuration {about}, so the pairing of channels and the rotated layers are not known."
            f"{f' Did you mean {close}?' if close else ''} State interleaved= (and rotated= for "
            f"rotary_positions), and compare a rotated query with that of the original model."
        )
    return facts or RotaryPositions(reads_share=True)


LANGUAGE_MODELS = ("text_config", "llm_config", "thinker_config")
"""Keys under which a configuration of several models holds that of its language model."""


def language_model_keys(config: JsonObject) -> tuple[str, ...]:
    """Return the keys that lead to the configuration of the language model; empty if `config` itself is one."""
    keys: tuple[str, ...] = ()
    while str(config.get("model_type")) not in {**ROTARY, **REFUSED_ROTARY} and not config.keys() & ROTARY_KEYS:
        key = next((key for key in LANGUAGE_MODELS if isinstance(config.get(key), Mapping)), None)
        if key is None:
            break
        keys, config = (*keys, key), config[key]
    return keys


def _inner_models(config: JsonObject) -> list[str]:
    """Return the keys under which a configuration holds those of other models, language models first."""
    types = {key: value.get("model_type") for key, value in config.items() if isinstance(value, Mapping)}
    others = [key for key, name in types.items() if isinstance(name, str) and name in {**ROTARY, **REFUSED_ROTARY}]
    return list(dict.fromkeys((*(key for key in LANGUAGE_MODELS if key in config), *others)))


def common_keys(config: JsonObject, facts: RotaryPositions) -> JsonObject:
    """Return a configuration with the common names of keys, and with the defaults of its family."""
    renamed = dict(config)
    for key, common in facts.aliases:
        value = renamed.pop(key, None)
        if value is not None and common is not None:
            renamed[common] = _only_value({common: renamed.get(common), key: value})
    for group in facts.stated:
        if all(config.get(key) in (None, {}) and (key != "sliding_window" or key not in config) for key in group):
            raise CheckpointError(
                f"{' or '.join(group)} is missing, and transformers would take a number of its own for "
                f"{config.get('model_type')}: write it into the configuration."
            )
    defaults = {key: value for key, value in facts.defaults if key not in config}
    own = {key: value for key, value in renamed.items() if value is not None}
    return {**defaults, **own, "model_type": config.get("model_type")}


def rope_type_of(parameters: Mapping[str, Any], facts: RotaryPositions) -> str:
    kind = _only_value({"rope_type": parameters.get("rope_type"), "type": parameters.get("type")})
    has_grid = isinstance(facts.axes, GridAxes)
    kind = "default" if kind is None else kind
    if has_grid and kind == "default" and "default" not in facts.rope_types:
        kind = "axial"  # transformers before 5.19 writes "default" for these classes, too
    if not isinstance(kind, str):
        raise CheckpointError(f"rope_type must be a string, not {printable(kind)}.")
    kind = dict((("su", "longrope"), *facts.former_rope_types)).get(kind, kind)
    if kind == "dynamic" and "ntk_alpha" in facts.rope_types and parameters.get("alpha"):
        kind = "ntk_alpha"
    known = {key for key in ROPE_TYPES if key not in ("ntk_alpha", "axial") or key in facts.rope_types}
    if has_grid:
        known = {"axial", *facts.rope_types}
    if kind not in known:
        raise CheckpointError(f"rope_type {kind!r} is not known here.{_hint(kind, known)}")
    return str(kind)


def _layout(config: JsonObject, facts: RotaryPositions) -> bool:
    """Return whether pairs are interleaved, by `rope_interleave` if the family's code reads it, else by the family."""
    layout = config.get("rope_interleave")
    if layout is None or bool(layout) == facts.interleaved or facts.reads_layout:
        return facts.interleaved if layout is None else bool(layout)
    raise CheckpointError(
        f"rope_interleave is {layout}, but the code of {config.get('model_type')} does not read it and has the other "
        f"layout: remove it, or pass interleaved=."
    )


def _axes(spec: SectionAxes | GridAxes | None, parameters: Mapping[str, Any], pairs: int) -> RotaryAxes | None:
    """Return how rotated `pairs` of channels are divided over several position axes; `None` for a single axis."""
    if spec is None:
        return None
    if isinstance(spec, GridAxes):
        return AxialAxes(spec.num_axes, **dict.fromkeys(spec.options, True))
    sections = _only_value({name: parameters.get(name) for name in (SECTIONS, *spec.names)})
    sections = spec.sections if sections is None else sections
    if sections is None:
        return None
    if not isinstance(sections, list | tuple):
        raise CheckpointError(f"{SECTIONS} must be a list, not {sections!r}.")
    sections = tuple(as_whole_number(size, SECTIONS) for size in sections)
    if spec.layout == "interleaved":
        sections = (max(pairs - sum(sections[1:]), 1), *sections[1:])
    layout = parameters.get("mrope_interleaved")
    if layout is not None and bool(layout) != (spec.layout == "interleaved"):
        raise CheckpointError(f"mrope_interleaved is {layout}, but the code of this family has {spec.layout} sections.")
    return AXES[spec.layout]((*sections[-1:], *sections[:-1]) if spec.layout == "alternating" else sections)


def _query_scaling(parameters: Mapping[str, Any]) -> LogQueryScaling | None:
    """Return the factor on rotated queries by position (Ministral 3); `None` for no factor."""
    beta = parameters.get(QUERY_BETA)
    if beta is None:
        return None
    length = as_whole_number(parameters.get(ORIGINAL_LENGTH), ORIGINAL_LENGTH)
    return LogQueryScaling(as_number(beta, QUERY_BETA), length)


def head_width(config: JsonObject, layer_type: str | None = None) -> int:
    """Return the number of channels of a head that can be rotated."""
    overrides = config.get("per_layer_config") or {}
    types = config.get("layer_types") or ()
    alike = [layer for layer, kind in enumerate(types) if kind == layer_type]
    widths: list[object] = []
    for key in ("qk_rope_head_dim", "head_dim"):
        own = {f"layer {layer}": overrides.get(str(layer), overrides.get(layer, {})).get(key) for layer in alike}
        if key == "head_dim" and layer_type == FULL:
            own["global_head_dim"] = config.get("global_head_dim")
        widths += [_only_value(own), config.get(key) or None]
    width = next((value for value in widths if value is not None), None)
    if width is not None:
        return as_whole_number(width, "head_dim")
    hidden, heads = stated_size(config, "hidden_size"), stated_size(config, "num_attention_heads")
    if hidden is None or heads is None:
        raise CheckpointError("The configuration has neither head_dim nor hidden_size and num_attention_heads.")
    return as_whole_number(hidden, "hidden_size") // as_whole_number(heads, "num_attention_heads")


def has_layer_types(config: JsonObject) -> bool:
    """Return whether a configuration has different rotary positions for different types of layers."""
    facts = rotary_facts(config.get("model_type")) or RotaryPositions()
    return (
        is_nested(config.get("rope_parameters"))
        or "rope_local_base_freq" in config
        or "local_rope_theta" in config
        or (facts.by_layer_type == "full_attention" and bool(config.get("rope_scaling")))
    )


def _check_keys(config: JsonObject, facts: RotaryPositions) -> None:
    """Check that a configuration has no unknown rotary key and no ALiBi."""
    known = ROTARY_KEYS | ({facts.only_if[0]} if facts.only_if else set())
    for key in config:
        if ("rope" in key or "rotary" in key) and key not in known and config[key] is not False:
            raise CheckpointError(f"The configuration's key {key!r} is not known here.{_hint(key, known)}")
    if config.get("alibi"):
        raise CheckpointError("This configuration says alibi: its positions are an AlibiBias, not rotary.")


def is_nested(parameters: object) -> bool:
    """Return whether `rope_parameters` of a configuration hold one dictionary, or `None`, for each type of layer."""
    return isinstance(parameters, Mapping) and any(
        isinstance(value, Mapping) or (value is None and key.endswith("attention")) for key, value in parameters.items()
    )


def _parameters(config: JsonObject, facts: RotaryPositions, layer_type: str | None) -> Mapping[str, Any] | None:
    values = {key: config.get(key) for key in ("rope_parameters", "rope_scaling")}
    parameters = _only_value({key: None if value == {} else value for key, value in values.items()})
    parameters = {} if parameters is None else parameters
    if not isinstance(parameters, Mapping):
        raise CheckpointError(f"rope_parameters must be a dictionary, not {parameters!r}.")
    if is_nested(parameters):
        labels = dict(facts.by_layer_type) if isinstance(facts.by_layer_type, tuple) else {}
        layer_type = labels.get(str(layer_type), labels.get("", layer_type))
        if layer_type not in parameters:
            raise CheckpointError(
                f"rope_parameters differ by layer type, and {layer_type!r} is none of {', '.join(parameters)}: "
                f"pass layer_type.{_hint(layer_type, parameters)}"
            )
        chosen = parameters[layer_type]
        if chosen is not None and not isinstance(chosen, Mapping):
            raise CheckpointError(f"rope_parameters[{layer_type!r}] must be a dictionary or null, not {chosen!r}.")
        return chosen
    known = {*(config.get("layer_types") or ()), SLIDING, FULL}
    if layer_type is not None and layer_type not in known:
        raise CheckpointError(
            f"There are no layers of type {layer_type!r} in this configuration.{_hint(layer_type, known)}"
        )
    if layer_type is None and has_layer_types(config):
        raise CheckpointError(f"This configuration has layers of two types: pass layer_type={SLIDING!r} or {FULL!r}.")
    return {} if layer_type == SLIDING and facts.by_layer_type == "full_attention" else parameters


def _base(
    config: JsonObject,
    facts: RotaryPositions,
    parameters: Mapping[str, Any],
    layer_type: str | None,
    default_base: float | None,
) -> float:
    bases: dict[str, Any] = {"rope_theta of the parameters": parameters.get("rope_theta")}
    if not is_nested(config.get("rope_parameters")):
        bases |= {key: config.get(key) for key in base_keys(config, layer_type)}
        default_base = facts.base if facts.fixed_base else default_base
    if has_layer_types(config):
        default_base = None
    base = _only_value(bases)
    base = default_base if base is None else base
    if base is None:
        raise CheckpointError(
            f"The configuration names no base: {' or '.join(bases)} is missing. transformers would take its family's "
            f"number (10000 for most): write it into the configuration, or pass default_base."
        )
    return as_number(base, "rope_theta")


def base_keys(config: JsonObject, layer_type: str | None) -> tuple[str, ...]:
    """Return the keys under which a configuration may store the base of the frequencies of a layer type."""
    for local, full in (("rope_local_base_freq", "rope_theta"), ("local_rope_theta", "global_rope_theta")):
        if local in config:
            return (local if layer_type == SLIDING else full,)
    return ("rope_theta", "rotary_emb_base", "rotary_embedding_base")


def _rotated_share(
    config: JsonObject, facts: RotaryPositions, parameters: Mapping[str, Any], width: int, kind: str
) -> float:
    """Return the share of a head's `width` channels that is rotated, from 0 to 1."""
    share = _only_value(
        {
            "partial_rotary_factor of the parameters": parameters.get("partial_rotary_factor"),
            "partial_rotary_factor": config.get("partial_rotary_factor"),
            "rotary_pct": config.get("rotary_pct"),
            "rotary_dim": None if config.get("rotary_dim") is None else config["rotary_dim"] / width,
        }
    )
    default = facts.default_share
    if share not in (None, 1) and kind == "default" and not facts.reads_share and config.get("rotary_dim") is None:
        warnings.warn(
            f"partial_rotary_factor {share} is ignored, because the code of {config['model_type']} does not read it: "
            f"all {width} channels of a head are rotated.",
            EmbedLayerWarning,
            stacklevel=2,
        )
        return 1.0
    if share is not None and config.get("qk_rope_head_dim"):
        whole = config.get("head_dim") or width
        widths = (width, config["qk_rope_head_dim"])
        if share != 1 and int(as_number(share, "partial_rotary_factor") * whole) not in widths:
            raise CheckpointError(
                f"partial_rotary_factor {share} of {whole} channels contradicts qk_rope_head_dim {width}."
            )
        return 1.0
    if share not in (None, 1) and kind != "proportional" and not facts.reads_share and config.get("rotary_dim") is None:
        raise CheckpointError(
            f"partial_rotary_factor {share} with rope_type {kind!r} is not read, because the code of "
            f"{config['model_type']} fails with it: remove partial_rotary_factor if all channels are rotated."
        )
    if share is None and default is not None:
        raise CheckpointError(
            f"{config['model_type']} rotates only a part of a head's channels, but partial_rotary_factor is missing. "
            f"transformers would take {default}: write it into the configuration."
        )
    return 1.0 if share is None else as_number(share, "partial_rotary_factor")


def _scaling(
    kind: str, config: JsonObject, facts: RotaryPositions, parameters: Mapping[str, Any], share: float
) -> RotaryScaling | None:
    """Build the scaling of the frequencies of a `rope_type`; `None` for the default type."""
    scaling, required, _ = ROPE_TYPES[kind]
    if scaling is None:
        return None
    own = ROPE_TYPES[kind].required | ROPE_TYPES[kind].optional
    arguments = {
        key: _argument(value, key)
        for key, value in parameters.items()
        if value is not None and key in own and key != ORIGINAL_LENGTH
    }
    longest = config.get("max_position_embeddings")
    if kind == "proportional":
        arguments["proportion"] = share
    if kind == "dynamic":
        arguments["original_max_seq_len"] = as_whole_number(longest, "max_position_embeddings")
    if ORIGINAL_LENGTH in required:
        values = {f"{ORIGINAL_LENGTH} of the parameters": parameters.get(ORIGINAL_LENGTH)}
        length = _only_value(values | {ORIGINAL_LENGTH: config.get(ORIGINAL_LENGTH)})
        if length is None:
            raise CheckpointError(
                f"Rotary positions of type {kind!r} lack {ORIGINAL_LENGTH!r}. transformers would take "
                f"max_position_embeddings ({longest}): write it if it is the trained one."
            )
        length = arguments["original_max_seq_len"] = as_whole_number(length, ORIGINAL_LENGTH)
        if "factor" not in arguments and (kind == "longrope" or (kind == "yarn" and "factor" in parameters)):
            # missing in Phi-3's longrope, null in DeepSeek's yarn
            arguments["factor"] = as_whole_number(longest, "max_position_embeddings") / length
    for key in sorted(required - {ORIGINAL_LENGTH} - arguments.keys()):
        raise CheckpointError(f"Rotary positions of type {kind!r} lack a number for {key!r}.")
    return scaling(**arguments)


def _argument(value: object, key: str) -> Any:
    """Check the value of a rotary parameter in a configuration, and return it as an argument of the scaling class."""
    if key == "truncate":
        if not isinstance(value, bool):
            raise CheckpointError(f"truncate must be true or false, not {value!r}.")
        return value
    if key in ("short_factor", "long_factor") and isinstance(value, list | tuple):
        return tuple(as_number(each, key) for each in value)
    return as_number(value, key)


def _only_value(values: Mapping[str, Any]) -> Any:
    """Return the one value of several configuration keys that mean the same; `None` if all are missing."""
    present = {name: value for name, value in values.items() if value is not None}
    first = next(iter(present.values()), None)
    if any(value != first for value in present.values()):
        raise CheckpointError(f"The configuration contradicts itself: {present}.")
    return first


def _hint(name: object, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name."""
    known = sorted(known)
    close = get_close_matches(str(name), known, n=2, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else f" Known are: {', '.join(known)}."
