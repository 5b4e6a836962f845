"""Token IDs in configurations of any depth and in attributes of modules, and their values after an edit.

A configuration is the content of a JSON file, a live configuration of transformers, or a generation configuration. All
functions take each of them; `families.token_ids` says which keys name token IDs. A `VocabularyError` refuses an edit.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from embedlayer.core.errors import VocabularyError
from embedlayer.core.own_attributes import own_attribute
from embedlayer.families import VOCAB_SIZE_KEYS, family_of
from embedlayer.families.token_ids import (
    COUNTED_FROM_PADDING,
    COUNTS,
    ENDINGS,
    FIRST_IDS,
    FIXED_IDS,
    HASHED_IDS,
    IDS_BEFORE_RANGE,
    LARGEST_ID,
    NAMED_IDS,
    NO_IDS,
    OTHER_PARTS,
    PLACED_IDS,
    ROLES,
    SEQUENCE_BIASES,
    SINGLE_IDS,
    SUPPRESSED_IDS,
    TEXTS_BY_ID,
)
from embedlayer.io.files import JsonObject

KNOWN_IDS = SINGLE_IDS | SUPPRESSED_IDS | SEQUENCE_BIASES | PLACED_IDS | NAMED_IDS | TEXTS_BY_ID | FIXED_IDS
"""All keys that name token IDs."""

ROLE_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that a configuration gets from the tokenizer that replaces the old one, if they are null."""


class IdConversion(Protocol):
    """Conversion of old token IDs to new ones; `NewTokenIds` of `embedlayer.vocab.special_tokens` is one."""

    new_ids: Sequence[int]
    size: int

    def of(self, key: str, value: Any, config: Mapping[str, Any], where: str, *, role: str = "") -> Any:
        """Return the new value of an entry with one ID or a list of IDs."""


class Part(NamedTuple):
    """Refer to a configuration, or to a part of one."""

    name: str
    owner: Any
    of_tokens: bool


def part_at(owner: Any, path: Sequence[str]) -> Any:
    """Return what is at a path of keys and attributes of a configuration or module; `None` if there is nothing."""
    for key in path:
        owner = owner.get(key) if isinstance(owner, Mapping) else getattr(owner, key, None)
    return owner


def is_configuration(value: object) -> bool:
    """Return whether a value is a dictionary, or a configuration object of transformers."""
    return isinstance(value, Mapping) or hasattr(value, "to_dict")


def entries_of(owner: Any) -> dict[str, Any]:
    """Return the entries of a dictionary, or the attributes of an object; keys that are no strings are left out."""
    entries = owner if isinstance(owner, Mapping) else vars(owner)
    return {key: value for key, value in entries.items() if isinstance(key, str)}


def parts_of(config: Any, size: int, name: str = "") -> Iterator[Part]:
    """Yield a configuration and all configurations in it."""
    nested = [*_nested(config, name)]
    is_stated = any(size in _sizes(owner).values() for _, key, owner, _ in nested if key not in OTHER_PARTS)
    of_tokens: dict[int, bool] = {}
    for own_name, key, owner, around in nested:
        sizes, is_inherited = _sizes(owner), of_tokens.get(id(around), True)
        is_edited = size in sizes.values() if is_stated else is_inherited
        of_tokens[id(owner)] = key not in OTHER_PARTS and is_edited if sizes and key else is_inherited
        yield Part(own_name, owner, of_tokens[id(owner)])


def _nested(config: Any, name: str, key: str = "", around: Any = None) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield `(name, key, configuration, around)` for a configuration and all configurations in it."""
    yield name, key, config, around
    for own, value in entries_of(config).items():
        if own not in KNOWN_IDS | NO_IDS and is_configuration(value):
            yield from _nested(value, f"{name}.{own}".lstrip("."), own, config)


def _sizes(config: Any) -> dict[str, int]:
    """Return the numbers of tokens that a configuration states, by the names of its attributes or keys."""
    entries, names = entries_of(config), getattr(config, "attribute_map", {})
    sizes = {names.get(key, key): entries.get(names.get(key, key)) for key in VOCAB_SIZE_KEYS}
    return {key: value for key, value in sizes.items() if type(value) is int}


def text_part(config: Any) -> Any:
    """Return the configuration of the text model in a configuration; itself if it has no `text_config`."""
    text = entries_of(config).get("text_config")
    return text_part(text) if is_configuration(text) else config


def id_keys(owner: Any, size: int, where: str) -> list[str]:
    """Return the keys of a configuration that name token IDs and are not null."""
    entries = entries_of(owner)
    for key, value in entries.items():
        is_known = key in KNOWN_IDS or key in NO_IDS or key in FIRST_IDS or key.startswith(COUNTS)
        if not is_known and key.endswith(ENDINGS) and _holds_id(value, size):
            raise VocabularyError(f"{where} has {key} = {value}, which may be a token ID: remove it for the edit.")
    return [key for key, value in entries.items() if key in KNOWN_IDS and value is not None]


def _holds_id(value: Any, size: int) -> bool:
    """Return whether a value is a whole number from 0 to `size - 1`, or a list or dictionary that contains one."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return any(_holds_id(each, size) for each in value)
    return type(value) is int and 0 <= value < size


def other_models(module: nn.Module) -> set[int]:
    """Return the `id` of each module in an encoder of images, sounds or proteins, whose tokens are no text."""
    parts = [part for part in module.modules() if is_configuration(own_attribute(part, "config"))]
    nested = {id(each.config): list(_nested(each.config, "")) for each in parts}
    others = {id(owner) for found in nested.values() for _, key, owner, _ in found if key in OTHER_PARTS}
    return {id(child) for part in parts if id(part.config) in others for child in part.modules()} - {id(module)}


def module_ids(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield `(name, module, attribute)` for the token IDs that modules of a user's class or of transformers store."""
    for name, part in module.named_modules():
        package = type(part).__module__.partition(".")[0]
        if package not in ("torch", "embedlayer") and not isinstance(part, nn.Embedding):
            for key, value in vars(part).items():
                if key in SINGLE_IDS and (type(value) is int or isinstance(value, list | tuple)):
                    yield name, part, key


def new_value(key: str, value: Any, ids: IdConversion, beside: Mapping[str, Any], where: str) -> Any:
    """Return the value after an edit of an entry that names token IDs; nothing is changed."""
    if key in SUPPRESSED_IDS and isinstance(value, list | tuple):
        moved = [_sequence(one, ids) if isinstance(one, list | tuple) else _id_or_none(one, ids) for one in value]
        return type(value)(one for one in moved if one is not None)
    if key in SEQUENCE_BIASES and isinstance(value, Mapping):
        biases = [(_sequence(sequence, ids), bias) for sequence, bias in value.items()]
        return {sequence: bias for sequence, bias in biases if sequence is not None}
    if key in SEQUENCE_BIASES and isinstance(value, list | tuple):
        biases = [(_sequence(sequence, ids), bias) for sequence, bias in value]
        return type(value)([sequence, bias] for sequence, bias in biases if sequence is not None)
    if key in SUPPRESSED_IDS | SEQUENCE_BIASES:
        return value
    if key in PLACED_IDS and isinstance(value, list | tuple):
        return type(value)(type(pair)((pair[0], ids.of(key, pair[1], {}, where))) for pair in value)
    if key in NAMED_IDS and isinstance(value, Mapping):
        named = {name: _id_or_none(one, ids) for name, one in value.items()}
        return {name: one for name, one in named.items() if one is not None}
    if key in TEXTS_BY_ID and isinstance(value, Mapping):
        texts = {_id_or_none(int(one), ids): text for one, text in value.items()}
        return {str(one): text for one, text in texts.items() if one is not None}
    if key in FIXED_IDS:
        if isinstance(value, Mapping) and any(_id_or_none(one, ids) != one for one in value.values()):
            raise VocabularyError(f"The model reads the order of the token IDs in {key} of {where}: keep their places.")
        return value
    if key not in ROLES and type(value) is int and len(ids.new_ids) <= value < ids.size:
        raise VocabularyError(f"{where} has {key} = {value}, which has no row: set it to an ID from {ids.size} on.")
    return ids.of(key, value, beside, where, role=ROLES.get(key, ""))


def _id_or_none(value: Any, ids: IdConversion) -> Any:
    """Return the new ID of a token, or `None` if it is removed; what is no old ID is returned unchanged."""
    if type(value) is not int or not 0 <= value < len(ids.new_ids):
        return value
    return ids.new_ids[value] if ids.new_ids[value] >= 0 else None


def _sequence(value: Sequence[Any], ids: IdConversion) -> Any:
    """Return the new IDs of a sequence of tokens, in its form; `None` if one of them is removed."""
    if isinstance(value, str):  # JSON has no tuples as keys, so they are their texts there
        if not re.fullmatch(r"\((\d+, )*\d+,?\)", value):
            raise VocabularyError(f"The key {value!r} of a sequence_bias is no tuple of token IDs: change it first.")
        moved = _sequence(tuple(map(int, re.findall(r"\d+", value))), ids)
        return None if moved is None else str(moved)
    moved = [_id_or_none(one, ids) for one in value]
    return None if None in moved else type(value)(moved)  # type: ignore[call-arg]


def check_sizes(owners: Sequence[Any], old: int, new: int) -> None:
    """Check that one of the configurations that state a number of tokens states that of the table, `old`."""
    sizes = [(key, value) for owner in owners for key, value in _sizes(owner).items()]
    if old != new and sizes and all(value != old for _, value in sizes):
        key, value = sizes[0]
        raise VocabularyError(f"The table has {old:,} rows and {key} is {value:,}: the other rows are not known.")


def edited_configuration(content: JsonObject, ids: IdConversion, where: str) -> JsonObject:
    """Return the content of a configuration file after an edit: new token IDs, and the new number of tokens."""
    edited, old = copy.deepcopy(content), len(ids.new_ids)
    parts = [part for part in parts_of(edited, old) if part.of_tokens]
    check_sizes([part.owner for part in parts], old, ids.size)
    for part in parts:
        beside = dict(part.owner)
        for key in id_keys(part.owner, old, where):
            part.owner[key] = new_value(key, beside[key], ids, beside, where)
        part.owner.update(dict.fromkeys(size_keys(part.owner, old), ids.size))
    return edited


def size_keys(owner: Any, size: int) -> list[str]:
    """Return the keys of a configuration that state the number of tokens, `size`."""
    return [key for key, value in _sizes(owner).items() if value == size]


def json_value(value: Any) -> Any:
    """Return a value of a configuration as JSON has it: tuples become lists, and some dictionaries lists of pairs."""
    if isinstance(value, Mapping) and any(not isinstance(key, str) for key in value):
        return [[list(key) if isinstance(key, tuple) else key, json_value(one)] for key, one in value.items()]
    if isinstance(value, Mapping):
        return {key: json_value(one) for key, one in value.items()}
    return [json_value(one) for one in value] if isinstance(value, list | tuple) else value


# Models that read the order or the size of IDs


def check_readers(configs: Sequence[Any], new_ids: Tensor, size: int) -> None:
    """Check that an edit leaves as it is what a model reads from the order or the size of token IDs."""
    entries = [entries_of(config) for config in configs]
    # a multimodal model looks up images or sounds at the IDs from a first one on
    firsts = [(config[key], key) for key in FIRST_IDS for config in entries if type(config.get(key)) is int]
    first = min(firsts, default=(size, ""))[0]
    if firsts and (size != len(new_ids) or not _are_consecutive(new_ids[first:], first)):
        keys = ", ".join(dict.fromkeys(key for _, key in firsts))
        raise VocabularyError(f"Token IDs from {first:,} on are images or sounds ({keys}): edit the text model alone.")
    kept_ids = new_ids[new_ids >= 0]
    is_ordered = len(kept_ids) == size and bool((kept_ids[1:] > kept_ids[:-1]).all())
    for owner, config in zip(configs, entries, strict=True):
        for key in IDS_BEFORE_RANGE:  # the IDs above are numbers: they stay in their order, and no other ID is there
            last = config.get(key)
            if type(last) is int and 0 <= last < len(new_ids):
                above, start = new_ids[last:], int(new_ids[last])
                is_last = start >= 0 and start + len(above) == size and not bool((new_ids[:last] > start).any())
                if not is_last or not _are_consecutive(above, start):
                    raise VocabularyError(
                        f"The model reads each token ID above {key} = {last} as a number: place new tokens before them."
                    )
        name = config.get("model_type") or getattr(owner, "model_type", None)
        if name in HASHED_IDS and not _are_consecutive(new_ids, 0):
            raise VocabularyError(f"A model of type {name} looks up rows by hashes of token IDs, keep all IDs.")
        if name in LARGEST_ID:  # the end of a text is at its largest ID: always, or with this `eos_token_id`
            switch, end = LARGEST_ID[str(name)], config.get("eos_token_id")
            new = int(new_ids[end]) if type(end) is int and 0 <= end < len(new_ids) else end
            if switch in (None, end) and not is_ordered:
                raise VocabularyError(f"A model of type {name} ends a text at its largest ID, which would change.")
            if switch is not None and (end == switch) != (new == switch):
                raise VocabularyError(f"A {name} with eos_token_id {switch} ends texts at the largest ID, not {new}.")
        family = family_of(name)
        if name in COUNTED_FROM_PADDING or (family is not None and family.numbering == "ids"):
            check_padding(f"{name} counts", config.get("pad_token_id"), new_ids)


def check_padding(subject: str, padding: object, new_ids: Tensor) -> None:
    """Check that the padding token keeps its ID, in a family that counts positions from that ID."""
    if type(padding) is int and 0 <= padding < len(new_ids) and int(new_ids[padding]) != padding:
        counted = f"{subject} positions from the ID of the padding token, {padding}"
        raise VocabularyError(f"{counted}, which the edit would change.")


def _are_consecutive(ids: Tensor, start: int) -> bool:
    """Return whether IDs are `start`, `start + 1` and so on."""
    return bool((ids == ids.new_tensor(range(start, start + len(ids)))).all())
