"""Token IDs and sizes that a configuration file leaves to the defaults of its class in transformers.

An edit writes them moved into the new file, so that the class reads there what a live edit leaves in the model.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from embedlayer.core.errors import CheckpointError, VocabularyError
from embedlayer.families import MULTIMODAL, family_of
from embedlayer.families.configurations import (
    ROLE_KEYS,
    IdConversion,
    entries_of,
    id_keys,
    json_value,
    new_value,
    part_at,
    parts_of,
    size_keys,
)
from embedlayer.families.default_ids import DEFAULT_IDS
from embedlayer.families.vocabulary_tensors import configuration_of
from embedlayer.io.files import JsonObject


def with_defaults_of_class(content: JsonObject) -> Any:
    """Return a configuration as its class in transformers reads it, with what its file leaves to the class.

    If transformers is not installed, does not know the model type or does not read the content, the result is a copy of
    the content with the IDs of `DEFAULT_IDS`. The copy lacks the IDs of model types without a record, whose keys
    `unknown_defaults` returns.
    """
    config = None
    with suppress(CheckpointError):  # transformers cannot open such a folder, before an edit or after it
        config = configuration_of(content)
    return _with_recorded_defaults(content) if config is None else config


def _with_recorded_defaults(content: JsonObject) -> JsonObject:
    """Return a copy of a configuration, and of those in it, with the IDs of `DEFAULT_IDS` that it does not state."""
    filled = {
        key: _with_recorded_defaults(value) if isinstance(value, dict) else value for key, value in content.items()
    }
    defaults = DEFAULT_IDS.get(str(content.get("model_type")), {})
    return {key: [*ids] if isinstance(ids, tuple) else ids for key, ids in defaults.items()} | filled


def unknown_defaults(content: JsonObject) -> list[str]:
    """Return the keys of token IDs that a file leaves to a class with unknown defaults, such as `eos_token_id`.

    They are the keys of roles, and `image_token_id` of a multimodal model, that no part of the configuration has, under
    another name either. The result is empty if transformers knows the class. If a part has the record of a family, its
    roles are known, and only `image_token_id` may be in the result.
    """
    if not isinstance(content.get("model_type"), str) or not isinstance(with_defaults_of_class(content), dict):
        return []
    owners = [part.owner for part in parts_of(content, 0)]
    has_record = any(family_of(owner.get("model_type")) is not None for owner in owners)
    roles = () if has_record else ROLE_KEYS
    needed = (*roles, "image_token_id") if content["model_type"] in MULTIMODAL else roles
    alike = {"image_token_id": ("image_token_index", "audio_token_id", "audio_token_index")}
    return [key for key in needed if not any({key, *alike.get(key, ())} & owner.keys() for owner in owners)]


def with_moved_defaults(content: JsonObject, edited: JsonObject, ids: IdConversion, where: str) -> JsonObject:
    """Return an edited configuration with new values for IDs and sizes that it left to the defaults of its class.

    `edited` is what `edited_configuration` returned for `content`; neither is changed. An entry is written only where
    the class would read another value, and what is stated stays. `where` is the name of the file, for errors.
    """
    expected = dict(_new_entries(content, ids, where))
    moved = copy.deepcopy(edited)
    differing = _differing(moved, expected)
    for *path, own_key in differing:
        owner = moved
        for key in path:
            if not isinstance(owner.get(key), dict):  # the file lacks this part: it is stated in the innermost one
                break
            owner = owner[key]
        owner[own_key] = json_value(expected[*path, own_key])
    if differing and (wrong := [".".join(place) for place in _differing(moved, expected)]):
        raise VocabularyError(f"{where} leaves {', '.join(wrong)} to the defaults of its class: state it there first.")
    return moved


def _new_entries(content: JsonObject, ids: IdConversion, where: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the IDs and sizes that a configuration file leaves to its class, with their values after an edit.

    Each has the keys that lead to it, from the outermost configuration inwards, and its own key. Parts of the
    configuration that have IDs of another vocabulary are left out.
    """
    old = len(ids.new_ids)
    for name, part, of_tokens in parts_of(with_defaults_of_class(content), old):
        if not of_tokens:
            continue
        place, beside = tuple(name.split(".") if name else ()), entries_of(part)
        names = getattr(part, "attribute_map", {})
        for key in size_keys(part, old):
            if not _is_stated(content, place, key, names):
                yield (*place, key), ids.size
        for key in id_keys(part, old, where):
            if not _is_stated(content, place, key, names):
                try:
                    yield (*place, key), new_value(key, beside[key], ids, beside, where)
                except VocabularyError as error:
                    default = f"{where} leaves {key} to the default of its class, {beside[key]}"
                    raise VocabularyError(f"{error}\n{default}: state it there if the model has another.") from error


def _differing(content: JsonObject, expected: Mapping[tuple[str, ...], Any]) -> list[tuple[str, ...]]:
    """Return the keys of those of the expected entries that the class of a configuration file reads otherwise."""
    config = with_defaults_of_class(content) if expected else None
    return [place for place, value in expected.items() if json_value(part_at(config, place)) != json_value(value)]


def _is_stated(content: JsonObject, path: tuple[str, ...], key: str, names: Mapping[str, str]) -> bool:
    """Return whether a configuration file states an entry, under its name in the class or another one, not as null."""
    inner = part_at(content, path)
    return isinstance(inner, dict) and any(
        inner.get(own) is not None for own in (key, *(a for a, b in names.items() if b == key))
    )
