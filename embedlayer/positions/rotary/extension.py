"""Write other rotary frequencies into a configuration, for sequences longer than in training.

The result is read back by `read_blocks`: each block has the positions that it had, or those with the requested scaling
or base and nothing else. What the reader refuses is not written: families whose code has no such `rope_type`, unknown
families, and keys that contradict each other.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from embedlayer.core.errors import CheckpointError, SizeError
from embedlayer.families import ROTARY, RotaryPositions, family_of
from embedlayer.families.records import (
    POSITION_KEYS,
    AxialPositions,
    BiasedPositions,
    LearnedPositions,
    PositionChoice,
    StreamPositions,
)
from embedlayer.families.rotary_settings import GridAxes
from embedlayer.io.files import JsonObject
from embedlayer.io.json_fields import as_whole_number
from embedlayer.positions.rotary.blocks import NO_POSITIONS, layer_types, read_blocks
from embedlayer.positions.rotary.config import (
    FULL,
    ORIGINAL_LENGTH,
    QUERY_BETA,
    ROPE_TYPES,
    SLIDING,
    base_keys,
    common_keys,
    family_facts,
    head_width,
    is_nested,
    language_model_keys,
    rope_type_of,
)
from embedlayer.positions.rotary.embedding import RotaryEmbedding
from embedlayer.positions.rotary.scaling import (
    LinearScaling,
    LongRopeScaling,
    ProportionalScaling,
    RotaryScaling,
)

METHODS = ("linear", "dynamic", "yarn", "llama3", "longrope", "base")
"""Methods by the `rope_type` that they write, and `"base"`, which changes the base of the frequencies alone."""

LENGTH, POSITIONS_AT_ONCE = POSITION_KEYS[0], 4096
SCALING_KEYS = {"rope_type", "type"}.union(*(kind.required | kind.optional for kind in ROPE_TYPES.values()))
"""Keys of rotary parameters that belong to one `rope_type`; the others stay when it changes."""


class RotaryChange(NamedTuple):
    """Other frequencies of the rotary positions of some blocks.

    Attributes:
        blocks: Number of these blocks.
        before: Their scheme before.
        after: Their scheme afterwards.
    """

    blocks: int
    before: RotaryEmbedding
    after: RotaryEmbedding

    def largest(self, length: int) -> float:
        """Return the largest change of a cosine or sine, each times `attention_scaling`, at positions below `length`.

        Both schemes have their frequencies for a sequence of `length` tokens. Computed in float64.
        """
        largest = 0.0
        for start in range(0, length, POSITIONS_AT_ONCE):
            positions = torch.arange(start, min(start + POSITIONS_AT_ONCE, length))
            tables = (scheme.cos_sin(positions, length, dtype=torch.float64) for scheme in (self.before, self.after))
            largest = max(largest, *(float((old - new).abs().max()) for old, new in zip(*tables, strict=True)))
        return largest


class RotaryExtension(NamedTuple):
    """A configuration with rotary positions for longer sequences.

    Attributes:
        config: The new configuration, whole.
        original_length: Trained length, L, in tokens.
        old_length: Longest sequence that the old configuration states.
        changes: For each scheme that changed, what it was and is.
    """

    config: JsonObject
    original_length: int
    old_length: int
    changes: tuple[RotaryChange, ...]


def extend_rotary(
    config: JsonObject,
    length: int,
    method: str | RotaryScaling = "yarn",
    *,
    base: float | None = None,
    factors: Mapping[str, Sequence[float]] | None = None,
    original_length: int | None = None,
    replace: bool = False,
) -> RotaryExtension:
    """Return a configuration of transformers whose rotary positions are for sequences of `length` tokens.

    The keys are those that the file has: `rope_parameters`, of one layer type where these differ, or the older
    `rope_scaling`; with several models, in the configuration of the language model. Parameters that are those of
    sliding attention alone stay. The longest sequence (`max_position_embeddings`) becomes `length`; for the method
    `"dynamic"` it stays the trained length, from which transformers computes the growth of the base.

    Args:
        config: The configuration, which is not changed.
        length: Longest sequence, N, in tokens.
        method: A scaling, or one of `METHODS` with the factor N / L, in which L is the trained length. `"base"`
            multiplies the base by `(N / L)^(d / (d - 2))` for d rotated channels (NTK-aware), or writes `base`.
        base: The base of the method `"base"`.
        factors: For the method `"longrope"`: `short_factor` and `long_factor`, a divisor for each pair.
        original_length: Trained length, L; `None` if the configuration states it: `max_position_embeddings` of
            positions that are not scaled, else what their scaling says.
        replace: Whether positions that are scaled already lose their scaling.

    Raises:
        CheckpointError: The family is not known, has no rotary positions, or its code does not read these keys; the
            positions are scaled already, and `replace` is not set; or the configuration does not state the trained
            length, states another one, or contradicts itself.

    Example:
        >>> sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
        >>> config = {"model_type": "llama", "rope_theta": 1e4, "max_position_embeddings": 4096, **sizes}
        >>> longer = extend_rotary(config, 16384, "yarn").config
        >>> longer["rope_scaling"], longer["max_position_embeddings"]
        ({'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 4096}, 16384)
    """
    keys, parts = language_model_keys(config), [config]
    for key in keys:
        parts.append(parts[-1][key])
    edit = _ConfigurationEdit(parts.pop())
    trained = edit.trained_length(original_length, replace=replace)
    if length <= trained:
        raise SizeError(f"The positions were trained on {trained:,} tokens: sequences of {length:,} need no edit.")
    if base is not None and method != "base":
        raise SizeError(f"base is the number of the method 'base', not of {method!r}.")
    if method == "base":
        new, requested = edit.with_base(base, length / trained, length)
    else:
        scaling = scaling_of_method(method, length / trained, trained, factors) if isinstance(method, str) else method
        new, requested = edit.with_scaling(scaling, length, trained)
    readings = (edit.before, read_blocks(new, default_base=edit.facts.base))
    before, after = ([blocks.arguments.get(key, {}) for key in blocks.keys] for blocks in readings)
    changed = [(old, read) for old, read in zip(before, after, strict=True) if old != read]
    for old, read in changed:
        if read != {**old, **requested}:
            raise CheckpointError(f"{requested} was requested for positions of {old}, but {read} is read back.")
    if not changed:
        raise CheckpointError(f"The blocks have these frequencies already: {requested}. Nothing would change.")
    distinct = [pair for number, pair in enumerate(changed) if pair not in changed[:number]]
    changes = [
        RotaryChange(changed.count(pair), RotaryEmbedding(**pair[0]), RotaryEmbedding(**pair[1])) for pair in distinct
    ]
    for key, outer in zip(reversed(keys), reversed(parts), strict=True):
        new = {**outer, key: new}
    return RotaryExtension(new, trained, edit.old_length, tuple(changes))


def scaling_of_method(
    method: str, ratio: float, trained: int, factors: Mapping[str, Sequence[float]] | None
) -> RotaryScaling:
    """Return the scaling of a method for sequences of `ratio` times the trained length."""
    if method == "longrope":
        if factors is None or factors.keys() != {"short_factor", "long_factor"}:
            raise SizeError("LongRoPE has no formula for its divisors: pass factors with short_factor and long_factor.")
        return LongRopeScaling(factors["short_factor"], factors["long_factor"], trained, ratio)
    if factors is not None:
        raise SizeError(f"factors are the numbers of the method 'longrope', not of {method!r}.")
    if method == "linear":
        return LinearScaling(ratio)
    if method not in METHODS:
        raise SizeError(f"method must be a scaling or one of {', '.join(METHODS)}, not {method!r}.")
    scaling = ROPE_TYPES[method].scaling
    assert scaling is not None
    return scaling(ratio, original_max_seq_len=trained)


class _ConfigurationEdit:
    """The keys of a configuration that an extension of its rotary positions changes."""

    def __init__(self, config: JsonObject) -> None:
        self.config = config
        name = config.get("model_type")
        family = family_of(name)
        spec: object = None if family is None else family.position
        if isinstance(spec, PositionChoice):
            value = config.get(spec.key, spec.choices[0][0] if spec.otherwise == "refused" else None)
            spec = next((scheme for choice, scheme in spec.choices if choice == value), spec.otherwise)
        if isinstance(spec, LearnedPositions | AxialPositions | BiasedPositions | StreamPositions):
            raise CheckpointError(
                f"{name} has a table of learned positions: el.load(...).position.resize(n) extends it."
            )
        if family is not None and spec not in ("rotary", "refused") and not (spec is None and name in ROTARY):
            kind = "no" if spec is None else type(spec).__name__.removesuffix("Positions").lower()
            raise CheckpointError(f"{name} has {kind} positions: there are no rotary frequencies to change.")
        self.facts: RotaryPositions = family_facts(config, is_stated=False)
        self.before = read_blocks(config, default_base=self.facts.base)
        types = layer_types(common_keys(config, self.facts))
        kinds = {kind for kind, key in zip(types, self.before.keys, strict=True) if key != NO_POSITIONS}
        if isinstance(self.facts.axes, GridAxes):
            raise CheckpointError(f"The positions of {name} are rows and columns of patches, and not those of tokens.")
        if not any("head_dim" in each for each in self.before.arguments.values()):
            raise CheckpointError(f"No block of {name} rotates queries and keys: there is nothing to extend.")
        if kinds == {SLIDING}:  # no distance exceeds the window, so no frequency needs a change
            raise CheckpointError(f"Only the layers of sliding attention of {name} have positions: nothing to extend.")
        if config.get("layer_rope_theta"):
            raise CheckpointError(f"{name} states a base for each layer (layer_rope_theta): it is not extended here.")
        parameters = config.get("rope_parameters") or {}
        if not is_nested(parameters):
            self.places: list[tuple[str, ...]] = [("rope_parameters",) if parameters else ("rope_scaling",)]
            return
        labels = self.facts.by_layer_type
        local = dict(labels).get(SLIDING, SLIDING) if isinstance(labels, tuple) else SLIDING
        self.places = [("rope_parameters", key) for key, each in parameters.items() if each and key != local]

    def parameters(self, place: tuple[str, ...]) -> Mapping[str, Any]:
        """Return the rotary parameters at a place, or an empty dictionary."""
        parameters: Mapping[str, Any] = self.config.get(place[0]) or {}
        return parameters if len(place) == 1 else parameters[place[1]]

    def _without_scaling(self, place: tuple[str, ...]) -> JsonObject:
        """Return the rotary parameters at a place without those of their `rope_type`."""
        parameters = self.parameters(place)
        needed = {ORIGINAL_LENGTH} if QUERY_BETA in parameters else set()  # the scale of queries counts from it
        return {key: value for key, value in parameters.items() if key not in SCALING_KEYS - needed}

    @property
    def _length_keys(self) -> list[str]:
        """Return the names of the keys that state the longest sequence."""
        own = [key for key, common in self.facts.aliases if common == LENGTH]
        return [key for key in (*own, *POSITION_KEYS) if self.config.get(key) is not None]

    @property
    def old_length(self) -> int:
        """Return the longest sequence that the configuration states."""
        return as_whole_number(self.config[self._length_keys[0]], self._length_keys[0])

    def trained_length(self, stated: int | None, *, replace: bool) -> int:
        lengths: dict[str, int] = {} if stated is None else {"original_length": stated}
        for place in self.places:
            parameters = self.parameters(place)
            kind, where = rope_type_of(parameters, self.facts), ".".join(place)
            if kind == "ntk_alpha":
                name = self.config["model_type"]
                raise CheckpointError(f"{where} has an alpha, with which {name} was trained: it has no other scaling.")
            is_scaled = ROPE_TYPES[kind].scaling is not None and (kind != "proportional" or "factor" in parameters)
            if is_scaled and not replace:
                shown = {key: parameters[key] for key in ("factor", ORIGINAL_LENGTH) if key in parameters}
                raise CheckpointError(f"{where} has rope_type {kind!r} already ({shown}). Pass replace (--replace).")
            own = {f"{ORIGINAL_LENGTH} of {where}": parameters.get(ORIGINAL_LENGTH)}
            own |= {ORIGINAL_LENGTH: self.config.get(ORIGINAL_LENGTH)}
            if kind == "dynamic" or (not is_scaled and stated is None and not any(own.values())):
                own |= {key: self.config[key] for key in self._length_keys}
            lengths |= {key: as_whole_number(value, key) for key, value in own.items() if value is not None}
        if not self._length_keys:
            raise CheckpointError(f"The configuration states no {LENGTH}: write the longest sequence into it first.")
        if not lengths:
            raise CheckpointError("The scaling does not say the trained length: pass original_length (--original).")
        if len({*lengths.values()}) != 1:
            raise CheckpointError(f"The trained length is stated as {lengths}: which one is right?")
        return next(iter(lengths.values()))

    def with_scaling(self, scaling: RotaryScaling, length: int, trained: int) -> tuple[JsonObject, dict[str, Any]]:
        """Return the configuration with a scaling, and the changed arguments of `RotaryEmbedding`."""
        kinds = {rope_type_of(self.parameters(place), self.facts) for place in self.places}
        if kinds & {"proportional"} and not isinstance(scaling, ProportionalScaling):
            if kinds != {"proportional"} or not isinstance(scaling, LinearScaling):
                raise CheckpointError("Code with rope_type 'proportional' can scale linearly alone: use 'linear'.")
            schemes = [each.get("scaling") for each in self.before.arguments.values()]
            own = next(each for each in schemes if isinstance(each, ProportionalScaling))
            scaling = ProportionalScaling(own.proportion, scaling.factor)
        kind = next(kind for kind, (cls, *_) in ROPE_TYPES.items() if cls is type(scaling))
        if kind in dict(self.facts.former_rope_types):
            former, name = dict(self.facts.former_rope_types)[kind], self.config["model_type"]
            raise CheckpointError(f"{name} reads rope_type {kind!r} as another one: use {former!r} or 'base'.")
        values: dict[str, Any] = {}
        for each in fields(scaling):  # type: ignore[arg-type]  # every scaling is a dataclass
            value = getattr(scaling, each.name)
            if each.name == "original_max_seq_len":
                if value != trained:
                    raise SizeError(f"The scaling is for a trained length of {value:,}, the model's is {trained:,}.")
                values |= {ORIGINAL_LENGTH: value} if ORIGINAL_LENGTH in ROPE_TYPES[kind].required else {}
            elif each.name == "length" and value is not None:
                raise SizeError("A configuration has no fixed length of a scaling: leave length out.")
            elif each.name in ROPE_TYPES[kind].required or (
                each.name in ROPE_TYPES[kind].optional and value != each.default
            ):
                values[each.name] = list(value) if isinstance(value, tuple) else value
        new = self._with_length(trained if kind == "dynamic" else length)
        if self.facts.original_beside and ORIGINAL_LENGTH in values:
            new[ORIGINAL_LENGTH] = trained
        is_missing = self.facts.needs_head_dim and self.config.get("head_dim") is None
        if is_missing and kind in ("dynamic", "yarn", "longrope"):
            new["head_dim"] = head_width(common_keys(self.config, self.facts))
        for place in self.places:
            new = _with(new, place, self._without_scaling(place) | {"rope_type": kind, **values})
        return new, {"scaling": scaling}

    def with_base(self, base: float | None, ratio: float, length: int) -> tuple[JsonObject, dict[str, Any]]:
        """Return the configuration with another base and no scaling, and the changed arguments of `RotaryEmbedding`."""
        name, before = self.config["model_type"], self.before
        if self.facts.fixed_base:
            raise CheckpointError(f"The code of {name} has the base {self.facts.base:g} and reads no other one.")
        types = layer_types(common_keys(self.config, self.facts))
        blocks = [(kind, before.arguments.get(key, {})) for kind, key in zip(types, before.keys, strict=True)]
        rotary = [(kind, each) for kind, each in blocks if "head_dim" in each]
        wide = [each for kind, each in rotary if kind != SLIDING] or [each for _, each in rotary]
        old, width = wide[0]["base"], wide[0]["rotary_dim"]
        if any((each["base"], each["rotary_dim"]) != (old, width) for each in wide):
            raise CheckpointError(f"Blocks of {name} that see the whole context have different bases.")
        base = old * math.pow(ratio, width / (width - 2)) if base is None else base
        new, requested = self._with_length(length), dict[str, Any](base=base)
        for place in self.places:
            parameters = dict(self.parameters(place))
            if ROPE_TYPES[kind := rope_type_of(parameters, self.facts)].scaling and kind != "proportional":
                parameters = self._without_scaling(place)
                parameters |= {"rope_type": "default"} if parameters or place[0] == "rope_parameters" else {}
                requested["scaling"] = None
            if place[0] == "rope_parameters" or "rope_theta" in parameters:
                parameters["rope_theta"] = base
            if parameters or place[0] in new:
                new = _with(new, place, parameters or None)
        if len(self.places[0]) == 1:  # older keys, beside the parameters
            keys = base_keys(self.config, FULL)
            key = keys[0] if len(keys) == 1 else self.facts.base_key  # one key: that of full attention has its own
            stated = [each for each in keys if self.config.get(each) is not None]
            is_inside = "rope_theta" in (new.get(self.places[0][0]) or {})
            if not is_inside and (key is None or (stated and key not in stated)):
                own, others = key or "rope_parameters alone", " or ".join(stated) or "a key beside them"
                raise CheckpointError(f"The class of {name} reads the base from {own}, and not from {others}.")
            new |= dict.fromkeys(stated or ([] if is_inside or key is None else [key]), base)
        return new, requested

    def _with_length(self, length: int) -> JsonObject:
        """Return the configuration with another longest sequence."""
        return {**self.config, **dict.fromkeys(self._length_keys, length)}


def _with(config: JsonObject, place: tuple[str, ...], value: object) -> JsonObject:
    """Return a configuration with another value at a place of one or two keys."""
    return {**config, place[0]: value if len(place) == 1 else {**config[place[0]], place[1]: value}}
