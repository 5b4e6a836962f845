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
from embedlayer.io.json_fields import as_number, as_whole_number
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
    known = ROTARY_KEYS | ({facts.only_if[0]} if facts.only_if else set())
    for key in config:
        if ("rope" in key or "rotary" in key) and key not in known and config[key] is not False:
            raise CheckpointError(f"The configuration's key {key!r} is not known here.{_hint(key, known)}")
    if config.get("alibi"):
        raise CheckpointError("This configuration says alibi: its positions are an AlibiBias, not rotary.")
    if facts.without_positions == "all" or (facts.only_if and config.get(facts.only_if[0]) != facts.only_if[1]):
        return None
    parameters = _parameters(config, facts, layer_type)
    if parameters is None:
        return None
    kind = rope_type_of(parameters, facts)
    if ROPE_TYPES[kind].scaling is not None and facts.rope_types and kind not in facts.rope_types:
        types = " or ".join(facts.rope_types)
        raise CheckpointError(f"The code of {config['model_type']} has no rope_type {kind!r}, only {types}.")
    allowed = COMMON_KEYS | ROPE_TYPES[kind].required | ROPE_TYPES[kind].optional | {*facts.other_parameters}
    allowed |= {QUERY_BETA, ORIGINAL_LENGTH} if facts.query_scaling == "rotated" else set()
    allowed |= {SECTIONS, *facts.axes.names, "mrope_interleaved"} if isinstance(facts.axes, SectionAxes) else set()
    for key in parameters:
        if key not in allowed:
            raise CheckpointError(f"Rotary positions of type {kind!r} have no key {key!r}.{_hint(key, allowed)}")
    width = head_width(config, layer_type)
    share = _rotated_share(config, facts, parameters, width, kind)
    stated = config.get("rope_interleave")
    if interleaved is None and stated is not None and bool(stated) != facts.interleaved and not facts.reads_layout:
        name = config.get("model_type")
        raise CheckpointError(f"{name} does not read rope_interleave {stated}: remove it, or pass interleaved.")
    if interleaved is None:
        interleaved = facts.interleaved if stated is None else bool(stated)
    rotary_dim = width if kind == "proportional" else int(width * share)
    if isinstance(facts.axes, GridAxes):  # an equal number of pairs for each axis
        rotary_dim -= rotary_dim % (2 * facts.axes.num_axes)
    arguments: dict[str, Any] = {
        "head_dim": width,
        "base": _base(config, facts, parameters, layer_type, default_base) if base is None else as_number(base, "base"),
        "scaling": _scaling(kind if scaled else "default", config, facts, parameters, share),
        "interleaved": interleaved,
        "rotary_dim": rotary_dim,
    }
    if facts.rotation == "reversed":
        arguments["reversed"] = True
    elif facts.rotation == "trailing":  # the whole head: all of its query is scaled (Mistral 4)
        others, whole = config.get("qk_nope_head_dim"), as_whole_number(config.get("head_dim") or width, "head_dim")
        whole = max(whole, width) if others is None else as_whole_number(others, "qk_nope_head_dim") + width
        arguments |= {"trailing": True, "head_dim": whole}
    if (axes := _axes(facts.axes, parameters, rotary_dim // 2)) is not None:
        arguments["axes"] = axes
    if (beta := parameters.get(QUERY_BETA)) is not None:
        length = as_whole_number(parameters.get(ORIGINAL_LENGTH), ORIGINAL_LENGTH)
        arguments["query_scaling"] = LogQueryScaling(as_number(beta, QUERY_BETA), length)
    return arguments


def family_facts(config: JsonObject, *, is_stated: bool) -> RotaryPositions:
    """Return the settings of the family of a configuration; default ones for an unknown family."""
    name = config.get("model_type")
    facts = rotary_facts(name)
    if isinstance(name, str) and name in REFUSED_ROTARY:
        raise CheckpointError(f"The rotary positions of model_type {name!r} are not read: {REFUSED_ROTARY[name]}.")
    if facts is None and not config.keys() & ROTARY_KEYS:
        types = {key: str(value.get("model_type")) for key, value in config.items() if isinstance(value, Mapping)}
        inner = [key for key in LANGUAGE_MODELS if key in config]
        inner += [key for key, each in types.items() if each in {**ROTARY, **REFUSED_ROTARY} and key not in inner]
        if inner:
            choices = " or ".join(f"config[{key!r}]" for key in inner)
            raise CheckpointError(f"This configuration holds several models: pass {choices}.")
    if facts is None and not is_stated:
        close = " or ".join(get_close_matches(str(name), ROTARY, n=2, cutoff=0.6))
        hint = f" Did you mean {close}?" if close else ""
        raise CheckpointError(f"State interleaved= and rotated= for the unknown model_type {name!r}.{hint}")
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


def common_keys(config: JsonObject, facts: RotaryPositions) -> JsonObject:
    """Return a configuration with the common names of keys, and with the defaults of its family."""
    renamed = dict(config)
    for key, common in facts.aliases:
        value = renamed.pop(key, None)
        if value is not None and common is not None:
            renamed[common] = _only_value({common: renamed.get(common), key: value})
    for group in facts.stated:
        if all(config.get(key) in (None, {}) and (key != "sliding_window" or key not in config) for key in group):
            keys, name = " or ".join(group), config.get("model_type")
            raise CheckpointError(f"{keys} is missing: write it, because the class of {name} has a default of its own.")
    defaults = {key: value for key, value in facts.defaults if key not in config}
    own = {key: value for key, value in renamed.items() if value is not None}
    return {**defaults, **own, "model_type": config.get("model_type")}


def rope_type_of(parameters: Mapping[str, Any], facts: RotaryPositions) -> str:
    kind = _only_value({"rope_type": parameters.get("rope_type"), "type": parameters.get("type")})
    has_grid = isinstance(facts.axes, GridAxes)
    kind = "default" if kind is None else str(kind)
    if has_grid and kind == "default" and "default" not in facts.rope_types:
        kind = "axial"  # transformers before 5.19 writes "default" for these classes, too
    kind = dict((("su", "longrope"), *facts.former_rope_types)).get(kind, kind)
    if kind == "dynamic" and "ntk_alpha" in facts.rope_types and parameters.get("alpha"):
        kind = "ntk_alpha"
    known = {key for key in ROPE_TYPES if key not in ("ntk_alpha", "axial") or key in facts.rope_types}
    if has_grid:
        known = {"axial", *facts.rope_types}
    if kind not in known:
        raise CheckpointError(f"rope_type {kind!r} is not known here.{_hint(kind, known)}")
    return kind


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
            types = f"{', '.join(parameters)}: pass layer_type.{_hint(layer_type, parameters)}"
            raise CheckpointError(f"rope_parameters differ by layer type, and {layer_type!r} is none of {types}")
        chosen = parameters[layer_type]
        if chosen is not None and not isinstance(chosen, Mapping):
            raise CheckpointError(f"rope_parameters[{layer_type!r}] must be a dictionary or null, not {chosen!r}.")
        return chosen
    known = {*(config.get("layer_types") or ()), SLIDING, FULL}
    if layer_type is not None and layer_type not in known:
        raise CheckpointError(f"The configuration has no layers of type {layer_type!r}.{_hint(layer_type, known)}")
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
        raise CheckpointError(f"The configuration names no base: write {' or '.join(bases)}, or pass default_base.")
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
        ignored = f"The code of {config['model_type']} ignores partial_rotary_factor {share}: all channels are rotated."
        warnings.warn(ignored, EmbedLayerWarning, stacklevel=2)
        return 1.0
    if share is not None and config.get("qk_rope_head_dim"):
        whole = config.get("head_dim") or width
        widths = (width, config["qk_rope_head_dim"])
        if share != 1 and int(as_number(share, "partial_rotary_factor") * whole) not in widths:
            raise CheckpointError(f"partial_rotary_factor {share} of {whole} contradicts qk_rope_head_dim {width}.")
        return 1.0
    if share not in (None, 1) and kind != "proportional" and not facts.reads_share and config.get("rotary_dim") is None:
        where = f"rope_type {kind!r} in the code of {config['model_type']}"
        raise CheckpointError(f"partial_rotary_factor {share} fails with {where}: remove it if all channels rotate.")
    if share is None and default is not None:
        name = config["model_type"]
        raise CheckpointError(f"{name} rotates a part of a head: write partial_rotary_factor, by default {default}.")
    return 1.0 if share is None else as_number(share, "partial_rotary_factor")


def _scaling(
    kind: str, config: JsonObject, facts: RotaryPositions, parameters: Mapping[str, Any], share: float
) -> RotaryScaling | None:
    """Build the scaling of the frequencies of a `rope_type`; `None` for the default type."""
    scaling, required, optional = ROPE_TYPES[kind]
    if scaling is None:
        return None
    arguments: dict[str, Any] = {}
    for key in sorted((required | optional) - {ORIGINAL_LENGTH}):
        value = parameters.get(key)
        if key == "truncate" and not isinstance(value, bool | None):
            raise CheckpointError(f"truncate must be true or false, not {value!r}.")
        if key in ("short_factor", "long_factor") and isinstance(value, list | tuple):
            arguments[key] = tuple(as_number(each, key) for each in value)
        elif value is not None:
            arguments[key] = value if key == "truncate" else as_number(value, key)
    longest = config.get("max_position_embeddings")
    if kind == "proportional":
        arguments["proportion"] = share
    if kind == "dynamic":
        arguments["original_max_seq_len"] = as_whole_number(longest, "max_position_embeddings")
    if ORIGINAL_LENGTH in required:
        values = {f"{ORIGINAL_LENGTH} of the parameters": parameters.get(ORIGINAL_LENGTH)}
        length = _only_value(values | {ORIGINAL_LENGTH: config.get(ORIGINAL_LENGTH)})
        if length is None:
            raise CheckpointError(f"rope_type {kind!r} lacks {ORIGINAL_LENGTH}; max_position_embeddings is {longest}.")
        length = arguments["original_max_seq_len"] = as_whole_number(length, ORIGINAL_LENGTH)
        if "factor" not in arguments and (kind == "longrope" or (kind == "yarn" and "factor" in parameters)):
            # missing in Phi-3's longrope, null in DeepSeek's yarn
            arguments["factor"] = as_whole_number(longest, "max_position_embeddings") / length
    for key in sorted(required - {ORIGINAL_LENGTH} - arguments.keys()):
        raise CheckpointError(f"Rotary positions of type {kind!r} lack a number for {key!r}.")
    return scaling(**arguments)


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
