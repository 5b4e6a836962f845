"""Rotary positions as transformers' configurations write them, read strictly.

transformers keeps them in `rope_parameters`: one dictionary, or one for each layer type, `None` for layers without
positions. Older files have `rope_scaling`, `rope_theta`, `partial_rotary_factor` or `rotary_pct`, and for two kinds of
layers `rope_local_base_freq` (Gemma 3) or `local_rope_theta` and `global_rope_theta` (ModernBERT). transformers warns
about keys that it does not know and fills in those that are missing; here both are errors.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from embedlayer.errors import CheckpointError
from embedlayer.io.files import JsonObject
from embedlayer.positions.rotary_scaling import (
    DynamicNTK,
    Linear,
    Llama3,
    LongRope,
    Proportional,
    RotaryScaling,
    Yarn,
)

SLIDING, FULL = "sliding_attention", "full_attention"

KEYS: dict[str, tuple[set[str], set[str]]] = {  # of each rope type: required, optional
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    "longrope": (
        {"short_factor", "long_factor", "original_max_position_embeddings"},
        {"attention_factor", "factor"},
    ),
    "llama3": ({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}, set()),
    "proportional": (set(), {"factor"}),
}
COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
LISTS = {"short_factor", "long_factor"}
FROM_OUTSIDE = {"original_max_position_embeddings"}  # Phi-3 writes it beside the dictionary
CONFIG_KEYS = {  # the keys of a configuration that speak of rotary positions and that we understand
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rotary_emb_base",
    "rotary_embedding_base",
    "partial_rotary_factor",
    "rotary_pct",
    "rotary_dim",
    "rotary",  # GPT-J says true
    "rope_local_base_freq",
    "local_rope_theta",
    "global_rope_theta",
    "rope_interleave",
    "no_rope_layers",
    "no_rope_layer_interval",
    "qk_rope_head_dim",
}
INTERLEAVED_FAMILIES = {
    *("gptj", "codegen", "cohere", "cohere2", "cohere2_moe", "glm", "glm4", "ernie4_5", "ernie4_5_moe", "helium"),
    *("moonshine", "moonshine_streaming", "llama4", "llama4_text", "deepseek_v2", "blt"),
    *("deepseek_v3", "mistral4", "axk1", "youtu"),  # unless rope_interleave says otherwise
}
"""Families whose code in transformers pairs channels (2i, 2i + 1); their configurations do not say so."""

FIXED_BASE = {"gptj": 10000.0, "codegen": 10000.0}
PARTIAL_FAMILIES = {  # what transformers takes where the key is missing
    "gpt_neox": 0.25,
    "stablelm": 0.25,
    "qwen3_next": 0.25,
    "qwen3_5": 0.25,
    "qwen3_5_moe": 0.25,
    "phi": 0.5,
    "persimmon": 0.5,
    "glm": 0.5,
    "glm4": 0.5,
    "glm4_moe": 0.5,
    "nemotron": 0.5,
    "recurrent_gemma": 0.5,
    "moonshine": 0.9,
}
SCALES_FULL_ATTENTION_ONLY = {"gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "t5gemma2", "olmo3"}
NOPE_IN_FULL_ATTENTION = {"cohere2", "cohere2_moe", "exaone4"}
NOPE_EVERY_SO_OFTEN = {"smollm3", "llama4", "llama4_text"}


def read_rotary(
    config: JsonObject,
    layer_type: str | None = None,
    *,
    interleaved: bool | None = None,
    default_base: float | None = None,
) -> dict[str, Any] | None:
    """The arguments of `RotaryEmbedding` that `config` describes, or `None` for layers without positions.

    Args:
        config: A transformers configuration as a dictionary.
        layer_type: Which layers, where a configuration has several kinds, such as `"sliding_attention"`.
        interleaved: Layout of pairs; `None` for `rope_interleave` or what the family's code does.
        default_base: The base to take where the configuration names none.

    Raises:
        CheckpointError: A key is unknown, missing, of the wrong type, or contradicts another.
    """
    _check_names(config)
    parameters = _parameters(config, layer_type)
    if parameters is None:
        return None
    if "mrope_section" in parameters:
        raise CheckpointError("mrope_section: positions along several axes are outside this library for now.")
    kind = _agreed({"rope_type": parameters.get("rope_type"), "type": parameters.get("type")}) or "default"
    kind = "longrope" if kind == "su" else kind
    if kind == "yarn" and config.get("model_type") == "phi3":
        kind = "longrope"  # under its former name, as transformers reads it
    if kind not in KEYS:
        raise CheckpointError(f"rope_type {kind!r} is not known here.{_hint(kind, KEYS)}")
    _check_keys(kind, parameters)
    width = head_width(config, layer_type)
    share = _partial(config, parameters, width)
    arguments: dict[str, Any] = {
        "head_dim": width,
        "base": _base(config, parameters, layer_type, default_base),
        "scaling": _scaling(kind, config, parameters, share),
        "interleaved": _interleaved(config) if interleaved is None else interleaved,
        "rotary_dim": width if kind == "proportional" else int(width * share),
    }
    return arguments


def head_width(config: JsonObject, layer_type: str | None = None) -> int:
    """Channels of a head that rotary positions see; Gemma 4 has wider heads in its layers of full attention.

    Raises:
        CheckpointError: The configuration does not say, or layers of one type differ.
    """
    overrides = config.get("per_layer_config") or {}
    types = config.get("layer_types") or ()
    own = {
        f"layer {i}": overrides.get(str(i), {}).get("head_dim") for i, kind in enumerate(types) if kind == layer_type
    }
    if layer_type == FULL:
        own["global_head_dim"] = config.get("global_head_dim")
    width = _agreed(own)
    if width is not None:
        return _whole(width, "head_dim")
    for key in ("qk_rope_head_dim", "head_dim"):
        if config.get(key) is not None:
            return _whole(config[key], key)
    width = next((config[key] for key in ("hidden_size", "n_embd", "d_model") if config.get(key)), None)
    heads = next((config[key] for key in ("num_attention_heads", "n_head", "n_heads") if config.get(key)), None)
    if width is None or heads is None:
        raise CheckpointError("The configuration has neither head_dim nor hidden_size and num_attention_heads.")
    return _whole(width, "hidden_size") // _whole(heads, "num_attention_heads")


def layer_types(config: JsonObject) -> list[str | None]:
    """The attention type of each layer, `None` where the configuration tells them not apart.

    Raises:
        CheckpointError: The number of layers is missing, or differs from the list of types.
    """
    count = next((config[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if config.get(key)), None)
    if count is None:
        raise CheckpointError("The configuration does not say how many layers there are: num_hidden_layers is missing.")
    count = _whole(count, "num_hidden_layers")
    types = config.get("layer_types")
    if types is not None:
        return _one_a_layer(types, count, "layer_types")
    every = config.get("sliding_window_pattern")
    if isinstance(every, int) and "rope_local_base_freq" in config:  # Gemma 3: each sixth layer sees everything
        return [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(count)]
    every = config.get("global_attn_every_n_layers")
    if isinstance(every, int):  # ModernBERT: the first, and from there each third
        return [FULL if layer % every == 0 else SLIDING for layer in range(count)]
    return [None] * count


def rotated_layers(config: JsonObject) -> list[bool]:
    """Whether each layer turns its queries and keys; the others have no positions (NoPE).

    Read from `no_rope_layers`, in which 1 means, in spite of its name, that a layer is turned; from
    `no_rope_layer_interval`; from a `None` in `rope_parameters`; and for Cohere 2 and EXAONE 4 from the layer types,
    since their code leaves out the layers of full attention.

    Raises:
        CheckpointError: The configuration of a family that has such layers does not say which.
    """
    types = layer_types(config)
    count = len(types)
    listed, every = config.get("no_rope_layers"), config.get("no_rope_layer_interval")
    family = config.get("model_type")
    if listed:
        return [bool(flag) for flag in _one_a_layer(listed, count, "no_rope_layers")]
    if every:
        return [(layer + 1) % _whole(every, "no_rope_layer_interval") != 0 for layer in range(count)]
    if family in NOPE_EVERY_SO_OFTEN:
        raise CheckpointError(
            f"{family} has layers without positions, but neither no_rope_layers nor no_rope_layer_interval is there."
        )
    if family in NOPE_IN_FULL_ATTENTION and config.get("sliding_window") is not None:
        if None in types:
            raise CheckpointError(f"{family} turns only layers of sliding attention: layer_types is missing.")
        return [kind == SLIDING for kind in types]
    parameters = config.get("rope_parameters") or {}
    absent = {key for key, value in parameters.items() if value is None} if _is_nested(parameters) else set()
    return [kind not in absent for kind in types]


def has_layer_types(config: JsonObject) -> bool:
    """Whether layers of different types have rotary positions of their own."""
    return (
        _is_nested(config.get("rope_parameters"))
        or "rope_local_base_freq" in config
        or "local_rope_theta" in config
        or (config.get("model_type") in SCALES_FULL_ATTENTION_ONLY and bool(config.get("rope_scaling")))
    )


def _check_names(config: JsonObject) -> None:
    for key in config:
        if ("rope" in key or "rotary" in key) and key not in CONFIG_KEYS and config[key] is not False:
            raise CheckpointError(f"The configuration's key {key!r} is not known here.{_hint(key, CONFIG_KEYS)}")
    if config.get("alibi"):
        raise CheckpointError("This configuration says alibi: its positions are an AlibiBias, not rotary.")
    if "text_config" in config and not config.keys() & CONFIG_KEYS:
        raise CheckpointError("This configuration holds several models: pass config['text_config'].")


def _is_nested(parameters: object) -> bool:
    return isinstance(parameters, Mapping) and any(
        isinstance(value, Mapping) or (value is None and key.endswith("attention")) for key, value in parameters.items()
    )


def _parameters(config: JsonObject, layer_type: str | None) -> Mapping[str, Any] | None:
    """The rotary parameters of a layer type; `None` for no positions."""
    parameters = _agreed({key: config.get(key) or None for key in ("rope_parameters", "rope_scaling")}) or {}
    if not isinstance(parameters, Mapping):
        raise CheckpointError(f"rope_parameters must be a dictionary, not {parameters!r}.")
    if _is_nested(parameters):
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
    if layer_type == SLIDING and config.get("model_type") in SCALES_FULL_ATTENTION_ONLY:
        return {}
    return parameters


def _check_keys(kind: str, parameters: Mapping[str, Any]) -> None:
    required, optional = KEYS[kind]
    allowed = COMMON_KEYS | required | optional
    for key in parameters:
        if key not in allowed:
            raise CheckpointError(f"Rotary positions of type {kind!r} have no key {key!r}.{_hint(key, allowed)}")
    for key in sorted(required - FROM_OUTSIDE):
        if key not in parameters:
            raise CheckpointError(f"Rotary positions of type {kind!r} lack {key!r}; found {', '.join(parameters)}.")


def _base(
    config: JsonObject, parameters: Mapping[str, Any], layer_type: str | None, default_base: float | None
) -> float:
    named: dict[str, Any] = {"rope_theta of the parameters": parameters.get("rope_theta")}
    local, whole = {
        "rope_local_base_freq": ("rope_local_base_freq", "rope_theta"),
        "local_rope_theta": ("local_rope_theta", "global_rope_theta"),
    }.get(next((key for key in ("rope_local_base_freq", "local_rope_theta") if key in config), ""), (None, None))
    if local is not None and not _is_nested(config.get("rope_parameters")):
        key = local if layer_type == SLIDING else whole
        named[f"{key}"] = config.get(f"{key}")
    elif not _is_nested(config.get("rope_parameters")):
        named |= {key: config.get(key) for key in ("rope_theta", "rotary_emb_base", "rotary_embedding_base")}
    base = _agreed(named)
    if base is None and not _is_nested(config.get("rope_parameters")):
        base = FIXED_BASE.get(str(config.get("model_type")))
    base = default_base if base is None else base
    if base is None:
        raise CheckpointError(
            f"The configuration names no base: {' or '.join(named)} is missing. transformers would take its family's "
            f"number (10000 for most): write it into the configuration, or pass default_base."
        )
    return _number(base, "rope_theta")


def _partial(config: JsonObject, parameters: Mapping[str, Any], width: int) -> float:
    share = _agreed(
        {
            "partial_rotary_factor of the parameters": parameters.get("partial_rotary_factor"),
            "partial_rotary_factor": config.get("partial_rotary_factor"),
            "rotary_pct": config.get("rotary_pct"),
            "rotary_dim": None if config.get("rotary_dim") is None else config["rotary_dim"] / width,
        }
    )
    family = str(config.get("model_type"))
    if share is None and family in PARTIAL_FAMILIES:
        raise CheckpointError(
            f"{family} turns only a part of a head, but partial_rotary_factor is missing. "
            f"transformers would take {PARTIAL_FAMILIES[family]}: write it into the configuration."
        )
    return 1.0 if share is None else _number(share, "partial_rotary_factor")


def _scaling(kind: str, config: JsonObject, parameters: Mapping[str, Any], share: float) -> RotaryScaling | None:
    given = {key: value for key, value in parameters.items() if value is not None and key not in COMMON_KEYS}
    numbers = {key: _number(value, key) for key, value in given.items() if key not in LISTS | {"truncate"}}
    if kind == "default":
        return None
    if kind == "linear":
        return Linear(_required(numbers, "factor", kind))
    if kind == "proportional":
        return Proportional(share, **numbers)
    if kind == "dynamic":
        return DynamicNTK(_required(numbers, "factor", kind), _longest(config, "dynamic"))
    numbers.pop("original_max_position_embeddings", None)
    length = _original_length(config, parameters, kind)
    if kind == "llama3":
        return Llama3(
            _required(numbers, "factor", kind), length, numbers["low_freq_factor"], numbers["high_freq_factor"]
        )
    if "factor" not in numbers:  # DeepSeek's yarn says null, Phi-3's longrope nothing: the ratio of lengths
        numbers["factor"] = _longest(config, kind) / length
    if kind == "yarn":
        truncate = given.get("truncate", True)
        if not isinstance(truncate, bool):
            raise CheckpointError(f"truncate must be true or false, not {truncate!r}.")
        return Yarn(original_max_seq_len=length, truncate=truncate, **numbers)
    divisors = {key: tuple(_number(value, key) for value in given.get(key, ())) for key in LISTS}
    return LongRope(original_max_seq_len=length, **divisors, **numbers)  # type: ignore[arg-type]


def _original_length(config: JsonObject, parameters: Mapping[str, Any], kind: str) -> int:
    key = "original_max_position_embeddings"
    length = _agreed({f"{key} of the parameters": parameters.get(key), key: config.get(key)})
    if length is None:
        raise CheckpointError(
            f"Rotary positions of type {kind!r} lack {key!r}. transformers would take max_position_embeddings "
            f"({config.get('max_position_embeddings')}): if that is the trained length, write it."
        )
    return _whole(length, key)


def _longest(config: JsonObject, kind: str) -> int:
    if config.get("max_position_embeddings") is None:
        raise CheckpointError(f"Rotary positions of type {kind!r} need max_position_embeddings in the configuration.")
    return _whole(config["max_position_embeddings"], "max_position_embeddings")


def _interleaved(config: JsonObject) -> bool:
    told = config.get("rope_interleave")
    return config.get("model_type") in INTERLEAVED_FAMILIES if told is None else bool(told)


def _agreed(named: Mapping[str, Any]) -> Any:
    """The one value among several names for it; `None` where all are missing."""
    found = {name: value for name, value in named.items() if value is not None}
    values = list(found.values())
    if any(value != values[0] for value in values):
        raise CheckpointError(f"The configuration contradicts itself: {found}.")
    return values[0] if values else None


def _required(numbers: Mapping[str, float], key: str, kind: str) -> float:
    if key not in numbers:
        raise CheckpointError(f"Rotary positions of type {kind!r} need a number for {key!r}, not null.")
    return numbers[key]


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{name} must be a number, not {value!r}.")
    return float(value)


def _whole(value: object, name: str) -> int:
    if _number(value, name) != int(value) or int(value) < 1:  # type: ignore[call-overload]
        raise CheckpointError(f"{name} must be a whole number of at least 1, not {value!r}.")
    return int(value)  # type: ignore[call-overload, no-any-return]


def _one_a_layer(values: object, count: int, name: str) -> list[Any]:
    if not isinstance(values, list | tuple) or len(values) != count:
        raise CheckpointError(f"{name} must have one entry for each of {count} layers, not {values!r}.")
    return list(values)


def _hint(name: object, known: Iterable[str]) -> str:
    known = sorted(known)
    close = get_close_matches(str(name), known, n=2, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else f" Known are: {', '.join(known)}."
