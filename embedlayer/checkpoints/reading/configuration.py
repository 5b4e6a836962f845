"""What a configuration says about the language model of a family: checked numbers, and factors on rows and logits."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from embedlayer.core.errors import CheckpointError, SizeError
from embedlayer.families import CONFIG_KEYS, MULTIMODAL, Family, family_of, stated_size
from embedlayer.families.default_ids import DEFAULT_IDS
from embedlayer.families.field_types import Names, Presence
from embedlayer.families.records import Factor, HeadSpec
from embedlayer.io.files import JsonObject
from embedlayer.io.json_fields import as_number, as_whole_number

MOST_SIZE, MOST_POSITIONS = 1 << 16, 1 << 20
"""Largest sizes and lengths in a configuration that no tensor of the file bounds; larger ones mean a damaged file."""


@dataclass(frozen=True)
class Configuration:
    """Configuration of one stack of a language model; its methods check the values that they return."""

    content: JsonObject
    file: str

    def get(self, key: str, default: object = None) -> Any:
        """Return the value of a key without a check of its type, also a null; `default` if the key is missing."""
        return self.content.get(key, default)

    def number(self, key: str, default: float) -> float:
        """Return the value of a key, a positive number, or `default` if the key is missing."""
        with self.naming_file():
            return as_number(self.content.get(key, default), key, above=0.0)

    def whole(self, *keys: str, default: int | None = None, most: int = MOST_SIZE) -> int:
        """Return a whole number from 1 to `most`: the value of the first of `keys` that has one, else `default`."""
        key = self.first_key(keys) or keys[0]
        value = self.content.get(key)
        with self.naming_file():
            return as_whole_number(default if value is None else value, key, most=most)

    def first_key(self, keys: Names) -> str | None:
        return next((key for key in keys if self.content.get(key) is not None), None)

    def has(self, presence: Presence) -> bool:
        """Return whether a tensor exists, as the record or a key of the configuration says."""
        return presence if isinstance(presence, bool) else bool(self.content.get(*presence))

    @contextmanager
    def naming_file(self) -> Iterator[None]:
        """Context manager: raise a `CheckpointError` or `SizeError` as a `CheckpointError` that names the file."""
        try:
            yield
        except (CheckpointError, SizeError) as error:
            raise CheckpointError(f"{self.file}: {error}") from error


def text_config(config: JsonObject) -> JsonObject:
    """Return the configuration of the language model: `config["text_config"]` in a multimodal model, else `config`.

    Its `tie_word_embeddings` then says whether the head of the whole model is tied. Other multimodal configurations are
    flat in older releases, and get the `model_type` of their language model (`MultimodalSpec.flat`).
    """
    outer = config.get("model_type")
    spec = MULTIMODAL.get(outer) if isinstance(outer, str) else None
    text = config.get("text_config" if spec is None else spec.part)
    if not isinstance(text, dict):
        return config if spec is None or spec.flat is None else {**config, "model_type": spec.flat}
    if spec is None:
        return {**text, "model_type": outer}
    if spec.tied_by == "text":
        return text
    family = family_of(text.get("model_type"))
    own = text.get("tie_word_embeddings")
    if own is None:
        own = family is not None and family.head is not None and family.head.tied is True
    whole = config.get("tie_word_embeddings")
    if whole is None:
        whole = own if spec.tied == "text" else spec.tied
    tied = spec.tied_by != "none" and bool(whole)
    tied = tied or (spec.tied_by == "either" and bool(own))
    return {**text, "tie_word_embeddings": tied}


def with_whole_model(family: Family, model_type: object) -> Family:
    """Return the record of a language model as the multimodal model around it, of type `model_type`, uses it.

    The head then has no factor and no cap on logits, unless the whole model applies them too.
    """
    outer = MULTIMODAL.get(model_type) if isinstance(model_type, str) else None
    if outer is None or outer.scales_logits or family.head is None:
        return family
    return replace(family, head=replace(family.head, logit_scale=None, softcap=None))


def with_defaults(family: Family, config: JsonObject) -> JsonObject:
    """Return a configuration with the keys that published ones of the family leave out, and common names of keys.

    What the configuration states stays. With `rope_parameters`, no default of a key with `rope` in its name is added.
    """
    has_rotary = "rope_parameters" in config
    defaults: JsonObject = {key: value for key, value in family.defaults if not (has_rotary and "rope" in key)}
    ids = DEFAULT_IDS.get(str(config.get("model_type")), {})
    if family.numbering == "ids" and "pad_token_id" in ids:
        defaults["pad_token_id"] = ids["pad_token_id"]
    aliases = {common: config[own] for own, common in family.aliases if own in config}
    return {**defaults, **aliases, **config}


def stated_dtype(config: JsonObject) -> str:
    """Return the name of the dtype that a configuration states, such as `"bfloat16"`; `""` for none."""
    parts = (config.get("text_config"), config)
    dtypes = [part.get(key) for part in parts if isinstance(part, dict) for key in ("dtype", "torch_dtype")]
    return str(next((dtype for dtype in dtypes if dtype is not None), "")).removeprefix("torch.")


def is_tied(spec: HeadSpec, config: Mapping[str, Any]) -> bool:
    """Return whether the LM head is tied to the token table.

    `tie_word_embeddings` decides; without that key, or for `"always"` and `"never"`, `spec.tied` decides.
    """
    if spec.tied in ("always", "never"):
        return spec.tied == "always"
    return bool(config.get("tie_word_embeddings", spec.tied))


def logit_factors(spec: HeadSpec, config: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Return `logit_scale` and `softcap` of a head as a configuration states them; `width` is the D of `Factor`."""
    scale = None if spec.logit_scale is None else factor_value(spec.logit_scale, config, width)
    cap = None if spec.softcap is None else config.get(spec.softcap)
    softcap = None if cap is None else as_number(cap, str(spec.softcap), above=0.0)
    return {"logit_scale": 1.0 if scale is None else scale, "softcap": softcap}


def factor_value(factor: Factor, config: Mapping[str, Any], width: int) -> float | None:
    """Return a factor on rows or logits, `of / per`; `None` if the configuration switches it off.

    A factor that the family rounds to the dtype of the rows (Gemma) is not rounded here; one that it rounds to bfloat16
    is.
    """
    switches = [config[key] for key in factor.only_if if config.get(key) is not None]
    if factor.only_if and not (switches[0] if switches else factor.otherwise):
        return None
    number, divisor = _stated_number(factor.of, config, width), _stated_number(factor.per, config, width)
    if factor.default is not None and None in (number, divisor):
        return factor.default
    value = as_number(number, str(factor.of), above=0.0) / as_number(divisor, str(factor.per), above=0.0)
    rounded = torch.tensor(value, dtype=torch.bfloat16, device="cpu").item()
    return rounded if factor.rounding == "bfloat16" else value


def _stated_number(key: str | None, config: Mapping[str, Any], width: int) -> object:
    """Return a number of a `Factor`: 1 without a key, sqrt(`width`), its inverse, or a value of the configuration.

    The result is `None` if the key is missing. A value of the configuration is returned without a check.
    """
    if key is None:
        return 1.0
    if key in ("sqrt_dim", "1/sqrt_dim"):
        return math.sqrt(width) if key == "sqrt_dim" else width**-0.5
    return stated_size(config, key) if key in CONFIG_KEYS else config.get(key)
