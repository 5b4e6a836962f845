"""Checkpoint folders of other makes, edited: rows, tokenizer, and the IDs that their configurations name.

Tensors are read one by one where they lie and keep their stored type; all others go from file to file untouched.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.checkpoints.embedding_layer import EmbeddingLayer, load
from embedlayer.checkpoints.reader import CONFIG, Checkpoint
from embedlayer.checkpoints.writer import write_tensors
from embedlayer.data.tokenizer import load_tokenizer, save_tokenizer
from embedlayer.errors import CheckpointError, EmbedLayerWarning, VocabularyError
from embedlayer.families import family_of
from embedlayer.io.files import JsonObject, read_json
from embedlayer.pretrained import TOKENIZER
from embedlayer.vocab.change import Asked, Change, own_or_given
from embedlayer.vocab.live import ends_of, slots_of
from embedlayer.vocab.receipt import Receipt, moved_back
from embedlayer.vocab.roles import (
    ALIKE,
    USUAL_NAMES,
    NewTokenIds,
    names_in,
    role_ids,
    roles_of,
    stated_roles,
    tokenizer_config,
)
from embedlayer.vocab.rows import Slot, moved

LISTS_OF_NAMES = ("additional_special_tokens", "extra_special_tokens")
LISTS_OF_IDS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
GENERATION, TOKENIZER_CONFIG, SPECIALS = "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"
WITH_IDS = (CONFIG, GENERATION)
ADDED = "added_tokens.json"
TEMPLATES = ("chat_template*.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
OTHER_FORMS = (
    *("*vocab.json", "*merges.txt", "*encoder.json", "*vocab.bpe", "*vocab.txt"),
    *("*.model", "*.model.v[0-9]", "*.spm", "*.tiktoken", "tekken.json", "tok*.bin"),
)
"""Files that say the vocabulary again, and that `tokenizer.json` takes the place of."""


def edit_checkpoint(folder: Path, partial: Path, asked: Asked, tokenizer: Tokenizer | None) -> Receipt:
    """Write a checkpoint, edited, into `partial`.

    Raises:
        CheckpointError: It is damaged, or its rows have no place of their own in it (model2vec with a mapping).
        VocabularyError: A token that would be gone is one that a configuration names, or from whose ID this family
            counts positions.
    """
    layer, slots = _opened(folder)
    tokenizer = own_or_given(_tokenizer_of(folder, layer), tokenizer)
    table = slots[0]
    change = asked.change(tokenizer, len(table.tensor))
    move = change.move(len(table.tensor), asked.pad_to_multiple_of)
    result = moved(slots, move, asked.starts(change, move))
    receipt = change.receipt(move, result, {})
    if layer.numbering == "ids" and int(move.new_ids[layer.padding_id or 0]) != layer.padding_id:
        raise VocabularyError(
            f"Positions of {layer.family} are counted from the ID of the padding token, {layer.padding_id}: it must "
            f"keep that ID. Keep the tokens before it, or say so with order."
        )
    files = _moved_files(folder, receipt, change)
    if change.roles is not None:
        _warn_of_own_rules(folder)
    write_tensors(_under_all_names(slots, result.tensors, layer), folder, partial, table=table.name)
    if receipt.tokenizer is not None:
        save_tokenizer(receipt.tokenizer, partial / TOKENIZER)
    for name, content in files.items():
        if content is None:
            (partial / name).unlink()
        else:
            (partial / name).write_text(content, encoding="utf-8")
    changed = {*files, CONFIG, *([TOKENIZER] if receipt.tokenizer is not None else [])}
    return replace(
        receipt,
        files={name: (folder / name).read_bytes() for name in sorted(changed) if (folder / name).exists()},
        created=tuple(sorted(name for name in changed if not (folder / name).exists())),
    )


def undo_checkpoint(receipt: Receipt, folder: Path, partial: Path) -> None:
    """Write into `partial` what `edit_checkpoint` made `folder` of; `undo_folder` puts the other files back.

    Raises:
        CheckpointError: The folder's tensors are not those that the edit gave.
    """
    layer, slots = _opened(folder)
    tensors = moved_back(receipt, slots)
    write_tensors(_under_all_names(slots, tensors, layer), folder, partial, table=slots[0].name)


def _opened(folder: Path) -> tuple[EmbeddingLayer, list[Slot]]:
    """The two ends of a checkpoint, and its tensors with a row for each token, in their stored type; table first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmbedLayerWarning)  # of what is not read: here it is not needed
        layer = load(folder)
    ends = {slot.name: slot.end for slot in slots_of(layer, ends_of(layer), None, {})}
    keys = list(ends)
    unplaced = sorted(set(keys) - layer.tensor_names.keys())
    if unplaced:
        raise CheckpointError(
            f"{', '.join(unplaced)} of {folder} is put together from several tensors, so its rows have no place there. "
            f"Save the layer by itself first: embedlayer.load(...).save_pretrained(...)."
        )
    checkpoint = Checkpoint.open(folder)
    names = [layer.tensor_names[key][0] for key in keys]
    rows = checkpoint.info(names[0]).shape[0]
    ours = {name for key in keys for name in layer.tensor_names[key]}
    others = [name for name in checkpoint.names if checkpoint.info(name).shape[:1] == (rows,) and name not in ours]
    if others:
        warnings.warn(
            f"{', '.join(others[:4])} has {rows:,} rows, as many as there are tokens, and is not known to belong to "
            f"them: it is left as it is.",
            EmbedLayerWarning,
            stacklevel=5,
        )
    return layer, [
        Slot(name, checkpoint.read(name), _nowhere, end=end) for name, end in zip(names, ends.values(), strict=True)
    ]


def _tokenizer_of(folder: Path, layer: EmbeddingLayer) -> Tokenizer | None:
    """The checkpoint's tokenizer; llama2.c's file is no part of a layer."""
    if layer.tokenizer is None and any(folder.glob("tok*.bin")):
        return load_tokenizer(folder)
    return layer.tokenizer


def _nowhere(_: Tensor) -> None:
    raise AssertionError("a tensor in a file is not replaced in place")


def _under_all_names(slots: list[Slot], tensors: Mapping[str, Tensor], layer: EmbeddingLayer) -> dict[str, Tensor]:
    """The new tensors, also under the other names that they have in the checkpoint."""
    aliases = {names[0]: names for names in layer.tensor_names.values()}
    return {name: tensors[slot.name] for slot in slots for name in aliases[slot.name]}


# The other files


def _warn_of_own_rules(folder: Path) -> None:
    family = family_of(read_json(folder / CONFIG).get("model_type")) if (folder / CONFIG).is_file() else None
    if family is not None and family.tokenizer_rules:
        warnings.warn(
            f"transformers' AutoTokenizer opens checkpoints of {family.name} with that family's own rules, whatever "
            f"tokenizer.json says, and gives other IDs than the new tokenizer. Open the new folder with "
            f"transformers.PreTrainedTokenizerFast.from_pretrained.",
            EmbedLayerWarning,
            stacklevel=5,
        )


def _moved_files(folder: Path, receipt: Receipt, change: Change) -> dict[str, str | None]:
    """Return the text of the files that change beside tensors and `tokenizer.json`; `None` for those that go."""
    moved: dict[str, str | None] = {}

    def note(name: str, edit: Callable[[JsonObject], JsonObject], *, create: bool = False) -> None:
        there = (folder / name).is_file()
        if there or create:
            old = read_json(folder / name) if there else {}
            new = edit(old)
            if new != old:
                moved[name] = json.dumps(new, indent=2, ensure_ascii=False) + "\n"

    sizes = (receipt.move.old_size, receipt.move.size)
    ids = NewTokenIds(receipt.new_ids.tolist(), receipt.dropped, role_ids(change.tokenizer, change.roles))
    note(CONFIG, lambda content: _with_all_roles(_with_size(_with_ids(content, ids, CONFIG), *sizes), ids))
    note(GENERATION, lambda content: _with_ids(content, ids, GENERATION))
    note("params.json", lambda content: _with_size(content, *sizes))
    if receipt.tokenizer is None:
        return moved
    replaced = change.roles is not None
    if change.roles is not None:
        change.roles.warn()
    roles = change.roles if change.roles is not None else _roles_in(folder, receipt)

    def named(content: JsonObject, file: str) -> JsonObject:
        return content if replaced else _with_names(content, receipt, file)

    note(
        TOKENIZER_CONFIG,
        lambda content: named(tokenizer_config(content, roles, replaced=replaced), TOKENIZER_CONFIG),
        create=(folder / CONFIG).is_file(),
    )
    note(SPECIALS, lambda content: named(dict(roles) if replaced else content, SPECIALS))
    gone = list(OTHER_FORMS)
    if replaced:
        gone.append(ADDED)
    else:
        note(ADDED, lambda content: _added_tokens(content, receipt))
    for pattern in gone:
        moved |= {file.name: None for file in folder.glob(pattern)}
    return moved | _templates(folder, receipt, moved)


def _with_all_roles(content: JsonObject, ids: NewTokenIds) -> JsonObject:
    """Return `config.json` with the roles of a new tokenizer also where its class has a default that would stand."""
    content = {key: value for key, value in content.items() if key != "tokenizer_class"}
    if ids.roles is None:
        return content
    if isinstance(content.get("text_config"), dict):
        content["text_config"] = _with_all_roles(content["text_config"], ids)
    elif "vocab_size" in content or "model_type" in content:
        for role in ("bos_token", "eos_token"):
            content.setdefault(f"{role}_id", ids.roles.get(role, ids.roles.get(ALIKE[role])))
        for role in ("bos_token", "eos_token", "pad_token"):
            if content.get(f"{role}_id") is None and role in ids.roles:
                content[f"{role}_id"] = ids.roles[role]
    return content


def _roles_in(folder: Path, receipt: Receipt) -> dict[str, str]:
    """Return the special token of each role of a checkpoint's own tokenizer: as its files say, by name or by ID."""
    assert receipt.old_tokenizer is not None
    stated = stated_roles(folder)
    for name in WITH_IDS:
        content = read_json(folder / name) if (folder / name).is_file() else {}
        for role in USUAL_NAMES:
            token_id = content.get(f"{role}_id")
            token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
            if type(token_id) is int and token_id >= 0 and role not in stated:
                stated[role] = receipt.old_tokenizer.id_to_token(token_id) or ""
    assert receipt.tokenizer is not None
    return roles_of(receipt.tokenizer, stated)


def _templates(folder: Path, receipt: Receipt, moved: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the files without the chat templates that write out tokens which the new tokenizer lacks."""
    old, new = (
        {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        for tokenizer in (receipt.old_tokenizer, receipt.tokenizer)
        if tokenizer is not None
    )
    lost = sorted(old - new)
    found: dict[str, str | None] = {}
    named: set[str] = set()
    for pattern in TEMPLATES:
        for file in folder.glob(pattern):
            absent = names_in(file.read_text(encoding="utf-8", errors="replace"), lost)
            if absent:
                named |= {*absent}
                found[file.relative_to(folder).as_posix()] = None
    text = moved.get(TOKENIZER_CONFIG)
    stored = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
    config = stored if text is None else json.loads(text)
    if "chat_template" in config:
        absent = names_in(json.dumps(config["chat_template"], ensure_ascii=False), lost)
        if absent:
            named |= {*absent}
            del config["chat_template"]
            found[TOKENIZER_CONFIG] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    if named:
        warnings.warn(
            f"The chat template is left out: it writes {', '.join(sorted(named))}, which the new tokenizer does not "
            f"have. Write one for the new tokenizer.",
            EmbedLayerWarning,
            stacklevel=6,
        )
    return found


def _with_size(content: JsonObject, old: int, new: int) -> JsonObject:
    """`vocab_size`, also in the part of a configuration that is about text."""
    content = dict(content)
    if content.get("vocab_size") == old:
        content["vocab_size"] = new
    if isinstance(content.get("text_config"), dict):
        content["text_config"] = _with_size(content["text_config"], old, new)
    return content


def _with_ids(content: JsonObject, ids: NewTokenIds, file: str) -> JsonObject:
    """Return a configuration with the new IDs of the tokens that it names.

    Raises:
        VocabularyError: It names one that is gone.
    """
    moved: JsonObject = {}
    for key, value in content.items():
        if isinstance(value, dict):
            moved[key] = _with_ids(value, ids, file)
        elif key in LISTS_OF_IDS and isinstance(value, list):
            moved[key] = _without_gone(value, ids.new_ids)
        elif key.endswith(("_token_id", "_token_ids")):
            moved[key] = ids.of(key, value, content, file)
        else:
            moved[key] = value
    return moved


def _without_gone(ids: list[Any], new_ids: Sequence[int]) -> list[Any]:
    """Lists of tokens, or of sequences of tokens, that are never to be said: what holds one that is gone goes."""

    def move(value: Any) -> Any:
        if isinstance(value, list):
            inner = [move(one) for one in value]
            return None if None in inner else inner
        if type(value) is not int or not 0 <= value < len(new_ids):
            return value
        return new_ids[value] if new_ids[value] >= 0 else None

    return [one for one in map(move, ids) if one is not None]


def _with_names(content: JsonObject, receipt: Receipt, file: str) -> JsonObject:
    """Return a tokenizer's configuration with the tokens that it still has, by their new IDs."""
    gone, content = set(receipt.dropped.values()), dict(content)
    for key in USUAL_NAMES:
        token = _text(content.get(key))
        if token in gone:
            raise VocabularyError(
                f"Token {token!r} cannot go: {file} names it as {key}. Keep it, or change {file} first."
            )
    for key in LISTS_OF_NAMES:
        if isinstance(content.get(key), list):
            content[key] = [token for token in content[key] if _text(token) not in gone]
    if "added_tokens_decoder" in content:
        content["added_tokens_decoder"] = {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in _data(receipt.tokenizer)["added_tokens"]
        }
    return content


def _text(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _added_tokens(content: JsonObject, receipt: Receipt) -> JsonObject:
    """`added_tokens.json`: what stood in it and is still there, and what is new."""
    added = {token["content"]: token["id"] for token in _data(receipt.tokenizer)["added_tokens"]}
    new = set(receipt.added.values())
    return {token: token_id for token, token_id in added.items() if token in content or token in new}


def _data(tokenizer: Tokenizer | None) -> JsonObject:
    content: JsonObject = json.loads(tokenizer.to_str()) if tokenizer is not None else {"added_tokens": []}
    return content
