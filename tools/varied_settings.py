"""Other values for those settings of a model type that its embedding layer may read.

    for variation in variations("granite", "causal"):
        print(variation.name, variation.settings)

With default settings many factors are 1, many parts are absent, and every configuration states its settings, so that a
wrong record can pass. `RULES` says which settings change and how: data, by their names alone. A setting counts if the
configuration of the text has it and the type's own modeling source names it.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tiny_models import build, model_types, small_config
from torch import nn

FACTOR = 1.7
"""Factor on numbers: not a power of 2, which rounding does not show."""

MORE_TOKENS = 6
PADDING_ID = 7


class Rule(NamedTuple):
    """Which settings change, and how.

    Attributes:
        names: Regular expression that the name of a setting contains.
        other: Value -> other value; `None` if a value of this kind stays.
        unless: Regular expression of names that stay.
        always: Whether the setting also changes if the modeling source does not name it.
    """

    names: str
    other: Callable[[Any], Any]
    unless: str = "(?!)"
    always: bool = False


def _scaled(value: Any) -> Any:
    """Return a float times `FACTOR`, or 0.3 for 0; of lists and dictionaries, of each number of the kind."""
    if isinstance(value, list):
        return [_scaled(one) for one in value] if any(type(one) is float for one in value) else None
    return (value * FACTOR or 0.3) if type(value) is float else None


def _scaled_bases(value: Any) -> Any:
    """Return rotary parameters with scaled bases and the sections of their axes in the opposite order."""
    if not isinstance(value, dict):
        return None
    changes = {
        "rope_theta": _scaled,
        "mrope_section": lambda one: one[::-1] if isinstance(one, list) else None,
        "partial_rotary_factor": lambda one: 0.5 if one == 1.0 else 1.0,
    }
    own = {key: change(value[key]) for key, change in changes.items() if key in value}
    own |= {key: _scaled_bases(one) for key, one in value.items() if isinstance(one, dict)}
    return value | {key: one for key, one in own.items() if one is not None}


RULES = (
    Rule(
        "scal|multiplier|soft_?cap|logit|mup|embedding|beta|theta$|base_freq$",
        _scaled,
        unless="init|std|range|router|aux|dropout|attention|residual|ssm|mlp|expert|routed|query|loss|rope_(param|scal)"
        "|eps",
    ),
    Rule("norm_eps|epsilon|rms_eps", lambda value: 0.05 if type(value) is float else None),
    Rule("(scaling|multiplier|scale|scale_emb|model_base)$", lambda value: value + 3 if type(value) is int else None),
    Rule("soft_?cap", lambda value: 5.0 if value is None else None, unless="attn|router"),
    Rule("^rope_parameters$", _scaled_bases, always=True),
    Rule(
        "^(layer_types|layers_block_type|no_rope_layers)$",
        lambda value: value[-1:] + value[:-1] if isinstance(value, list) else None,
    ),
    Rule(
        "^((hidden|classifier)_act(ivation)?|activation(_function)?)$",
        lambda value: ("relu" if value == "silu" else "silu") if isinstance(value, str) else None,
    ),
    Rule("^type_vocab_size$", lambda value: value + 1 if isinstance(value, int) else None),
    Rule(
        "vocab_size$|^n_words$",
        lambda value: value + MORE_TOKENS if isinstance(value, int) else None,
        unless="^type_|unpadded",
        always=True,
    ),
    Rule("^pad_(token_id|index)$", lambda value: PADDING_ID if isinstance(value, int | None) else None, always=True),
)
"""Settings that change together. Where the model is then not equal, each one changes alone."""

FLAGS = Rule(
    "scale_|tie_|share_|normali[sz]e|bias|use_.*embed|position|alibi|norm|mup|parallel_|embed|head|mem_rope|add_|"
    "token_dropout|trigram|rotary|rope",
    lambda value: not value if type(value) is bool else None,
    unless="dropout(?<!token_dropout)|use_cache|cross_attention|topk|mamba",
)
"""Settings that change one at a time."""

LEFT_OUT = (
    "^rope_(parameters|theta|scaling)$",
    "head_dim",
    "pad_token_id|pad_index",
    "scal|multiplier|soft_?cap|logit|embedding(?!s$)|eps|tie_|act(ivation|ivation_function)?$|bias|norm",
)
"""Names of settings that `config.json` leaves out together, where it cannot do without all of them."""

TIE = "tie_word_embeddings"


@dataclass(frozen=True)
class Variation:
    """A model type with other settings.

    Attributes:
        name: What differs.
        changes: Name of a setting -> its path, as in `tiny_models.build`, in each configuration that has it -> value.
        left_out: Regular expression of the names of settings that the saved configuration leaves out, as far as
            transformers restores them; `None` for a whole configuration.
    """

    name: str
    changes: Mapping[str, Mapping[str, Any]]
    left_out: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """All changes, as in `tiny_models.build`."""
        return {path: value for paths in self.changes.values() for path, value in paths.items()}

    @property
    def changes_positions(self) -> bool:
        """Whether positions far from 0 are compared too: not if a single setting changes, or none does."""
        return len(self.changes) > 1 or self.left_out is not None

    def single(self) -> list["Variation"]:
        """Return a variation for each setting that changes, or for each group of settings that are left out."""
        if self.left_out is not None:
            return [Variation(f"left out: {names}", self.changes, names) for names in LEFT_OUT]
        return [Variation(name, {name: paths}) for name, paths in self.changes.items()]


def variations(model_type: str, kind: str) -> Iterator[Variation]:
    """Yield the variations of a model type.

    Args:
        model_type: A key of `tiny_models.model_types(kind)`.
        kind: A key of `tiny_models.KINDS`.

    Raises:
        CannotBuild: transformers cannot build the type from its default configuration.
    """
    _, model = build(model_type, kind)
    parts = _text_configs(model_type, kind)
    source = _modeling_source(model)
    together: dict[str, Mapping[str, Any]] = {}
    for rule in RULES:
        for name, paths in _changes(rule, parts, source).items():
            together.setdefault(name, paths)
    if together:
        yield Variation("numbers, bases, layers, sizes", together)
    for name, paths in _changes(FLAGS, parts, source).items():
        yield Variation(name, {name: paths})
        if len(paths) > 1 and name == TIE:
            yield from (Variation(path, {path: {path: value}}) for path, value in paths.items())
    axes = {key: value for prefix, config in parts.items() for key, value in _default_axes(prefix, config).items()}
    if axes:
        yield Variation("default sections of axes", {"rope_parameters": axes})
        yield Variation("default sections of axes, left out", {"rope_parameters": axes}, ".")
    yield Variation("defaults left out", {}, ".")


def _text_configs(model_type: str, kind: str) -> dict[str, Any]:
    """Return the configurations of a type that have a vocabulary, and the outermost one: prefix of paths -> it."""
    import transformers
    from tiny_models import OVERRIDES
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    whole = small_config(CONFIG_MAPPING[model_type], OVERRIDES.get(f"{kind}:{model_type}", {}))
    model_class = getattr(transformers, model_types(kind)[model_type])
    found: dict[str, Any] = (
        {} if any(part is model_class.config_class for part in whole.sub_configs.values()) else {"": whole}
    )

    def visit(prefix: str, config: Any) -> None:
        for key in config.sub_configs:
            part = getattr(config, key, None)
            if part is not None and hasattr(part, "sub_configs"):
                if hasattr(part, "vocab_size") and not re.search("vision|vq|audio|code", key):
                    found[f"{prefix}{key}."] = part
                visit(f"{prefix}{key}.", part)

    visit("", whole)
    return found or {"": whole}


def _modeling_source(model: nn.Module) -> str:
    """Return the source of the modeling files of all modules of a model."""
    names = {type(module).__module__ for module in model.modules()}
    return "\n".join(inspect.getsource(sys.modules[name]) for name in names if name.startswith("transformers.models."))


def _changes(rule: Rule, parts: Mapping[str, Any], source: str) -> dict[str, dict[str, Any]]:
    """Return the settings that a rule changes: name -> path -> other value.

    Args:
        rule: The rule.
        parts: Result of `_text_configs`.
        source: Source that must name a setting.
    """
    found: dict[str, dict[str, Any]] = {}
    for prefix, config in parts.items():
        for name, value in {TIE: getattr(config, TIE, False), **config.to_dict()}.items():
            if name.startswith("_") or not re.search(rule.names, name) or re.search(rule.unless, name):
                continue
            if not (rule.always or name == TIE or re.search(rf"\b{name}\b", source)):
                continue
            other = rule.other(value)
            if other is not None and other != value:
                found.setdefault(name, {})[prefix + name] = other
    return found


def _default_axes(prefix: str, config: Any) -> dict[str, Any]:
    """Return settings with which a configuration has the sections of position axes that the type's code has.

    Those fit only heads of the default width. The result is empty for a configuration without sections.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if not any("mrope_section" in each for each in (rope, *rope.values()) if isinstance(each, dict)):
        return {}
    default = type(config)()
    heads = config.num_attention_heads
    width = getattr(default, "head_dim", None) or default.hidden_size / default.num_attention_heads
    width = int(width) if width % 2 == 0 else 128  # some defaults do not fit each other
    stated = {f"{prefix}hidden_size": heads * width, f"{prefix}rope_parameters": None}
    return stated | ({f"{prefix}head_dim": width} if "head_dim" in config.to_dict() else {})


def shorten(folder: Path, config: Any, names: str) -> bool:
    """Leave out of `config.json` each setting without which transformers reads the same configuration.

    Only settings of the texts and of the whole model are left out, not those of images or sound.

    Args:
        folder: Folder of the checkpoint.
        config: Its configuration.
        names: Regular expression of their names.

    Returns:
        Whether a setting was left out.
    """
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    short = json.loads(path.read_text())

    def restored() -> dict[str, Any]:
        path.write_text(json.dumps(short))
        read = type(config).from_json_file(path).to_dict()
        return {key: value for key, value in read.items() if key not in ("transformers_version", "architectures")}

    whole = restored()

    def visit(part: dict[str, Any]) -> None:
        for key in [key for key in part if key not in ("model_type", "architectures")]:
            if re.search("vision|vq|audio", key):
                continue
            value = part[key]
            if re.search(names, key):
                del part[key]
                with suppress(Exception):
                    if restored() == whole:
                        continue
                part[key] = value
            if isinstance(value, dict) and "model_type" in value:
                visit(value)

    visit(short)
    path.write_text(json.dumps(short))
    return bool(short != stored)
