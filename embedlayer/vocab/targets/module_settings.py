"""Sizes and token IDs that modules and configurations of a live module state, and their values after an edit."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from embedlayer.core.collectives import SINGLE_PROCESS
from embedlayer.core.errors import CheckpointError, SizeError, TokenIdError, VocabularyError
from embedlayer.core.own_attributes import REPLACED, own_attribute
from embedlayer.distributed.sharded import ShardedTable
from embedlayer.families import PER_LAYER_ROWS, VOCAB_SIZE_KEYS
from embedlayer.families.configurations import (
    ROLE_KEYS,
    entries_of,
    id_keys,
    new_value,
    part_at,
    size_keys,
    text_part,
)
from embedlayer.inputs.ngram import NgramHash
from embedlayer.io.files import JsonObject
from embedlayer.tables.dense_table import DenseTable
from embedlayer.tables.row_sparse import RowSparseEmbedding
from embedlayer.vocab.edit import ModelEdit, round_up
from embedlayer.vocab.targets.module_parts import LocalTable, VocabularyModules, dotted

Assignment = tuple[Callable[[], object], Callable[[], object]]
"""Two functions: one makes a change, the other reverts it."""


class Setting(NamedTuple):
    """Refer to a size or an ID that an edit changes: an attribute of a module or configuration."""

    owner: Any
    attribute: str
    part: LocalTable | None = None
    names_ids: bool = False

    @property
    def value(self) -> Any:
        return self.owner[self.attribute] if isinstance(self.owner, Mapping) else getattr(self.owner, self.attribute)

    def assignment(self, value: Any) -> Assignment:
        """Return a pair of functions: one sets the attribute to `value`, the other to its present value."""
        set_value = self.owner.__setitem__ if isinstance(self.owner, dict) else partial(setattr, self.owner)
        return partial(set_value, self.attribute, value), partial(set_value, self.attribute, self.value)


def settings_of(modules: VocabularyModules) -> dict[str, Setting]:
    """Return all sizes, padding IDs and token IDs of a live module that an edit may change."""
    settings: dict[str, Setting] = {}

    def note(name: str, owner: Any, attributes: str, part: LocalTable | None = None) -> None:
        present = [attribute for attribute in attributes.split() if hasattr(owner, attribute)]
        settings.update({dotted(name, attribute): Setting(owner, attribute, part) for attribute in present})

    for name, table in modules.tables.items():
        note(name, table, "vocab_size num_rows padding_idx")
    for name, part in modules.local.items():
        if isinstance(part.table, ShardedTable):
            note(f"{name}.sharded", part.table, "start stop", part)
            note(f"{name}.sharded.index_check", part.table.index_check, "size")
        note(name, part.local, "vocab_size num_rows padding_idx", part)
    for name, part in modules.stored.items():
        stored = part.stored
        note(name, stored, "vocab_size num_rows num_embeddings padding_idx pad_to_multiple_of", part)
        note(dotted(name, "bounds"), stored.index_check, "size", part)
        if isinstance(stored, DenseTable):
            note(name, stored, "first_row whole_rows" if stored.whole_rows is not None else "", part)
        if isinstance(stored, RowSparseEmbedding):
            note(dotted(name, "pending_updates"), stored.pending_updates, "padding_idx", part)
    for name, head in modules.heads.items():
        note(name, head, "out_features padding_idx")
    for name, projection, attribute in modules.linear:
        note(name, projection, attribute if getattr(projection, attribute) == modules.vocab_size else "")
    for name, layer in modules.layers.items():
        note(name, layer, "padding_id is_edited")
    for name, ngrams in modules.hashes.items():
        note(name, ngrams, "vocab_size compressed_size hashes_token_ids")
        note(dotted(name, "bounds"), ngrams.index_check, "size")
    for name, owner in modules.bag_owners.items():
        note(name, owner, "num_embeddings" if getattr(owner, "num_embeddings", None) == modules.vocab_size else "")
    for name, patched in {**modules.tables, **modules.heads, **modules.bags}.items():
        note(dotted(name, "original"), own_attribute(patched, REPLACED), "num_embeddings out_features padding_idx")
    has_per_layer = any(part.per_layer for part in modules.local.values())
    for name, config in modules.configs.items():
        sizes = [key for key in VOCAB_SIZE_KEYS if getattr(config, key, None) == modules.vocab_size]
        if isinstance(config, dict):
            sizes = size_keys(config, modules.vocab_size)
        sizes += [key for key in PER_LAYER_ROWS if has_per_layer and hasattr(config, key) and key not in sizes]
        settings.update({dotted(name, key): Setting(config, key) for key in sizes})
    of_tokens = [each for each in modules.parts if each.of_tokens]
    of_roles = {id(text_part(each.owner)) for each in of_tokens if each.name.rpartition(".")[2] == "config"}
    for name, owner, _ in of_tokens:
        keys = id_keys(owner, modules.vocab_size, f"The model's {name}")
        keys += [key for key in ROLE_KEYS if id(owner) in of_roles and entries_of(owner).get(key, 0) is None]
        settings.update({dotted(name, key): Setting(owner, key, names_ids=True) for key in keys})
    for name, owner, key in modules.module_ids:
        settings[dotted(name, key)] = Setting(owner, key, names_ids=True)
    return settings


def new_settings(modules: VocabularyModules, edit: ModelEdit) -> JsonObject:
    """Return the value after an edit of each setting that `settings_of` returns; nothing is changed."""
    settings = settings_of(modules)
    assert edit.tokens is not None
    row_map = edit.row_map
    ids = edit.tokens.new_token_ids(row_map)
    after: JsonObject = {}
    for name, setting in settings.items():
        (owner, attribute, part, names_ids), value = setting, setting.value
        local = (SINGLE_PROCESS if part is None else part.collectives).partition(row_map.size)
        bounds = {"start": local.start, "first_row": local.start, "stop": local.stop, "whole_rows": row_map.size}
        if names_ids and value is None:
            value = None if ids.role_ids is None else ids.role_ids.get(attribute.removesuffix("_id"))
        elif names_ids:
            value = new_value(
                attribute, value, ids, entries_of(owner), f"the model's {name.rpartition('.')[0] or name}"
            )
        elif attribute in bounds:
            value = bounds[attribute]
        elif attribute in ("padding_idx", "padding_id"):
            padding = value if part is None else part.table.padding_idx
            new_padding = None if padding is None else int(row_map.new_ids[padding])
            if new_padding is not None and new_padding < 0:
                raise TokenIdError(f"Token {padding} is the padding token, which the table needs: keep it.")
            value = local.local_or_none(new_padding)
        elif attribute == "is_edited":
            value = True
        elif attribute == "compressed_size":
            value = _compressed_size(owner, len(row_map.initialised))
        elif attribute == "hashes_token_ids":
            new = row_map.sources.clone()
            new[row_map.initialised] = new_compressed_ids(owner, len(row_map.initialised))
            value = value and torch.equal(new, torch.arange(row_map.size))
        elif attribute == "pad_to_multiple_of":
            value = value if edit.pad_to_multiple_of is None else edit.pad_to_multiple_of
        elif attribute in ("num_rows", "num_embeddings") and part is not None:
            own_multiple = getattr(part.stored, "pad_to_multiple_of", None)  # stored codes have none
            value = round_up(len(local), edit.pad_to_multiple_of or own_multiple or 1)
        else:
            value = len(local)
        after[name] = value
    return after


def restored_settings(module: nn.Module, modules: VocabularyModules, names: Iterable[str]) -> dict[str, Setting]:
    """Return the settings that the undo of an edit changes: those that the edit changed, by their names."""
    present = settings_of(modules)
    changed = {name: present.pop(name, None) or _setting_at(module, name) for name in names}
    if None in changed.values() or any(not each.names_ids for each in present.values()):
        raise CheckpointError("The receipt belongs to other tables, heads or configurations.")
    return {name: setting for name, setting in changed.items() if setting is not None}


def _setting_at(module: nn.Module, name: str) -> Setting | None:
    """Return an entry of a configuration by the dotted name of an attribute of a module; `None` if there is none."""
    *path, attribute = name.split(".")
    if not {"config", "generation_config"} & {*path}:
        return None
    owner = part_at(module, path)
    is_there = attribute in owner if isinstance(owner, Mapping) else hasattr(owner, attribute)
    return Setting(owner, attribute, names_ids=True) if is_there else None


def _compressed_size(ngrams: NgramHash, added: int) -> int:
    """Return the number of compressed IDs of an n-gram hash after an edit."""
    size = ngrams.next_id + added if added else ngrams.compressed_size
    try:
        ngrams.require_products(size)
    except SizeError as error:
        raise VocabularyError(f"The n-gram hash has no room for {added} new tokens. {error}") from error
    return size


def new_compressed_ids(ngrams: NgramHash, count: int) -> Tensor:
    """Return the compressed IDs of so many new tokens: the next free ones, one for each token."""
    return torch.arange(count) + ngrams.next_id
