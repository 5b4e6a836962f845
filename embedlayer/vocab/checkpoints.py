"""Checkpoint folders of other makes, edited: rows, tokenizer, and the IDs that their configurations name.

Tensors are read one by one where they lie and keep their stored type; all others go from file to file untouched.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.checkpoints.layer import EmbeddingLayer
from embedlayer.checkpoints.loader import load
from embedlayer.checkpoints.reader import CONFIG, Checkpoint
from embedlayer.checkpoints.writer import write_tensors
from embedlayer.errors import CheckpointError, EmbedLayerWarning, VocabularyError
from embedlayer.files import JsonObject, read_json
from embedlayer.pretrained import TOKENIZER
from embedlayer.text.tokenizer import load_tokenizer, save_tokenizer
from embedlayer.vocab.change import Asked, own_or_given
from embedlayer.vocab.live import ends_of, slots_of
from embedlayer.vocab.receipt import Receipt, moved_back
from embedlayer.vocab.rows import Slot, moved

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS_OF_NAMES = ("additional_special_tokens", "extra_special_tokens")
LISTS_OF_IDS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
WITH_IDS = (CONFIG, "generation_config.json")
WITH_NAMES = ("tokenizer_config.json", "special_tokens_map.json")
ADDED = "added_tokens.json"
OTHER_FORMS = ("vocab.json", "merges.txt", "encoder.json", "vocab.bpe", "vocab.txt", "*.model", "tok*.bin")
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
    files = _moved_files(folder, receipt)
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


def _moved_files(folder: Path, receipt: Receipt) -> dict[str, str | None]:
    """Text of the files that change beside tensors and `tokenizer.json`; `None` for those that go."""
    moved: dict[str, str | None] = {}

    def note(name: str, change: Callable[[JsonObject], JsonObject]) -> None:
        if (folder / name).is_file():
            old = read_json(folder / name)
            new = change(old)
            if new != old:
                moved[name] = json.dumps(new, indent=2, ensure_ascii=False) + "\n"

    sizes = (receipt.move.old_size, receipt.move.size)
    for name in WITH_IDS:
        note(name, lambda content, name=name: _with_size(_with_ids(content, receipt, name), *sizes))  # type: ignore[misc]
    note("params.json", lambda content: _with_size(content, *sizes))
    if receipt.tokenizer is None:
        return moved
    for name in WITH_NAMES:
        note(name, lambda content, name=name: _with_names(content, receipt, name))  # type: ignore[misc]
    note(ADDED, lambda content: _added_tokens(content, receipt))
    for pattern in OTHER_FORMS:
        moved |= {file.name: None for file in folder.glob(pattern)}
    return moved


def _with_size(content: JsonObject, old: int, new: int) -> JsonObject:
    """`vocab_size`, also in the part of a configuration that is about text."""
    content = dict(content)
    if content.get("vocab_size") == old:
        content["vocab_size"] = new
    if isinstance(content.get("text_config"), dict):
        content["text_config"] = _with_size(content["text_config"], old, new)
    return content


def _with_ids(content: JsonObject, receipt: Receipt, file: str) -> JsonObject:
    """A configuration with the new IDs of the tokens that it names.

    Raises:
        VocabularyError: It names one that is gone.
    """
    moved: JsonObject = {}
    for key, value in content.items():
        if isinstance(value, dict):
            moved[key] = _with_ids(value, receipt, file)
        elif key in LISTS_OF_IDS and isinstance(value, list):
            moved[key] = _without_gone(value, receipt)
        elif key.endswith(("_token_id", "_token_ids")):
            moved[key] = (
                [_new_id(one, receipt, key, file) for one in value]
                if isinstance(value, list)
                else _new_id(value, receipt, key, file)
            )
        else:
            moved[key] = value
    return moved


def _new_id(old: Any, receipt: Receipt, key: str, file: str) -> Any:
    if type(old) is not int or not 0 <= old < receipt.move.old_size:
        return old
    new = int(receipt.new_ids[old])
    if new < 0:
        raise VocabularyError(
            f"Token {old} ({receipt.dropped.get(old, 'without a name')!r}) cannot go: {file} names it as {key}. Keep "
            f"it, or change {file} first."
        )
    return new


def _without_gone(ids: list[Any], receipt: Receipt) -> list[Any]:
    """Lists of tokens, or of sequences of tokens, that are never to be said: what holds one that is gone goes."""
    new_ids = receipt.new_ids.tolist()

    def move(value: Any) -> Any:
        if isinstance(value, list):
            inner = [move(one) for one in value]
            return None if None in inner else inner
        if type(value) is not int or not 0 <= value < len(new_ids):
            return value
        return new_ids[value] if new_ids[value] >= 0 else None

    return [one for one in map(move, ids) if one is not None]


def _with_names(content: JsonObject, receipt: Receipt, file: str) -> JsonObject:
    """A tokenizer's configuration with the tokens that it still has, by their new IDs."""
    gone, content = set(receipt.dropped.values()), dict(content)
    for key in NAMES:
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
