"""Checkpoint folders of other libraries: rows, tokenizer, and the token IDs in their configuration files.

Tensors keep the dtype in which they are stored. All other tensors are copied from file to file.
"""

import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.census.class_defaults import unknown_defaults, with_defaults_of_class, with_moved_defaults
from embedlayer.census.configurations import (
    check_padding,
    check_readers,
    edited_configuration,
    id_keys,
    part_at,
    parts_of,
)
from embedlayer.census.files import files_left_out
from embedlayer.census.report import CensusReport
from embedlayer.census.tensors import axes_by_architecture
from embedlayer.checkpoints.embedding_layer import EmbeddingLayer, load
from embedlayer.checkpoints.meta_layout import PARAMS
from embedlayer.checkpoints.reader import CONFIG, Checkpoint
from embedlayer.checkpoints.reading.model import checkpoint_family, is_unknown_family, tensor_rules
from embedlayer.checkpoints.second_copies import find_copies
from embedlayer.checkpoints.writer import write_tensors
from embedlayer.errors import CheckpointError, EmbedLayerWarning, VocabularyError
from embedlayer.families import PER_LAYER_ROWS
from embedlayer.families.tokenizers import OWN_RULES
from embedlayer.io.files import JsonObject, read_bytes, read_json, write_json
from embedlayer.io.weight_files import WeightFiles, find_folder
from embedlayer.pretrained import TOKENIZER
from embedlayer.tokenization.read import load_tokenizer, save_tokenizer
from embedlayer.vocab.class_rows import rows_of_class, stored_names
from embedlayer.vocab.edit_request import TokenMap, VocabularyEdit, missing_rows
from embedlayer.vocab.language_tokenizers import gives_ids, language_class, warn_of_lost_settings
from embedlayer.vocab.live_modules import (
    FolderResult,
    ModuleResult,
    row_tensors,
)
from embedlayer.vocab.module_parts import refuse_hashed_ngrams, vocabulary_modules
from embedlayer.vocab.row_map import RowEdit, RowMap, RowTensor, apply_row_map
from embedlayer.vocab.special_tokens import (
    LISTS_OF_NAMES,
    USUAL_NAMES,
    NewTokenIds,
    added_texts,
    first_id,
    names_in,
    roles_of_class,
    special_tokens_of,
    stated_roles,
    token_text,
    tokenizer_config,
    with_class,
)
from embedlayer.vocab.tokenizer_edit import tokenizer_data

ROWS = "num_rows"
"""End of the name of a number of rows in a receipt."""

GENERATION, TOKENIZER_CONFIG, SPECIALS = "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"
ADDED = "added_tokens.json"
TEMPLATES = ("chat_template*.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
OTHER_FORMS = (
    *("*vocab.json", "*merges.txt", "*encoder.json", "*vocab.bpe", "*vocab.txt"),
    *("*.model", "*.model.v[0-9]", "*.spm", "*.tiktoken", "tekken.json", "tok*.bin"),
)
"""Files that state the vocabulary again; `tokenizer.json` replaces them."""


class Opened(NamedTuple):
    """Describe a checkpoint whose rows are edited.

    Attributes:
        checkpoint: The checkpoint.
        layer: Its layer; `None` if the class of transformers names the tensors, and no record does.
        tensors: The tensors that have one row for each token, in their stored dtype, by the name under which each is
            read; the table is the first.
        aliases: From every name of such a tensor in the checkpoint to its key in `tensors`. A tied tensor may be stored
            under several names.
    """

    checkpoint: Checkpoint
    layer: EmbeddingLayer | None
    tensors: dict[str, RowTensor]
    aliases: dict[str, str]

    def tokenizer(self, folder: Path) -> Tokenizer | None:
        """Return the tokenizer of the folder, or `None` if there is none; it may have IDs without a row.

        Raises:
            TokenizerError: It cannot be read.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EmbedLayerWarning)  # about these tokens, to which the edit gives rows
            if self.layer is not None:
                tokenizer = self.layer.tokenizer
            else:
                file = self.checkpoint.tokenizer_file()
                tokenizer = None if file is None else load_tokenizer(file)
        if tokenizer is None and any(folder.glob("tok*.bin")):
            return load_tokenizer(folder)  # llama2.c's file is no part of a layer
        return tokenizer


def apply_to_checkpoint(folder: Path, partial: Path, edit: VocabularyEdit) -> FolderResult:
    """Write the edited copy of a checkpoint folder into `partial`; `folder` does not change.

    Weights, their second copies, tokenizer and configuration files are edited. Files that the edit does not change are
    copied. Files that state the old vocabulary in another form, such as `vocab.json`, are removed. Files that hold
    values by token and cannot be edited (`census.files`) are left out.

    Args:
        folder: The checkpoint before the edit.
        partial: The empty folder to write to.
        edit: The edit, or the undo of one.

    Raises:
        CheckpointError: The checkpoint is damaged; another file has values of tokens, and how they move is not known;
            or it builds its table from several tensors (model2vec with a mapping).
            Or its family is unknown, and other tensors than the table may have a row for each token. Or, for an undo,
            the folder is not what the edit of the receipt wrote.
        VocabularyError: A configuration names a removed token. Or the padding token would get another ID in a
            family that counts positions from that ID. Or the model has hashed n-grams.
    """
    opened = _opened(folder)
    checkpoint, layer, tensors, aliases = opened
    left_out = files_left_out(folder)
    table = next(iter(tensors))
    copies = find_copies(folder, checkpoint, aliases, left_out)
    for file, names in copies.items():
        for name, key in names.items():
            copy = _read_tensor(folder / file, name)
            tensors[f"{file}/{name}"] = replace(tensors[key], tensor=copy, parameter=key, state_of=_same)
    tokenizer = opened.tokenizer(folder)
    resolved = edit.resolve([tokenizer], len(tensors[table].tensor), all_rows_have_ids=True)
    row_map = resolved.rows.row_map
    if resolved.tokens is not None:
        config = with_defaults_of_class(checkpoint.config)
        if layer is not None:
            _check_padding(layer, row_map, has_class=not isinstance(config, dict))
        contents = (config, _read(folder / GENERATION))
        configs = [part.owner for content in contents for part in parts_of(content, 0)]
        check_readers(configs, row_map.new_ids, row_map.size)
        _warn_of_unknown_defaults(checkpoint, row_map)
    # An edit gives a row to each token: how many a per-layer table had is written down for the undo.
    short = {f"{name}.{ROWS}": len(r.local) for name, r in tensors.items() if len(r.local) < row_map.old_size}
    before = resolved.settings or {}
    for name in [name for name in tensors if f"{name}.{ROWS}" in before]:
        tensors[name] = replace(tensors[name], padding=min(before[f"{name}.{ROWS}"] - row_map.size, 0))
    result = apply_row_map(tensors, _with_stored_names(resolved.rows, opened))
    per_layer = any(rows.end == "per_layer" for rows in tensors.values())
    files = {} if resolved.tokens is None else _edited_files(folder, resolved.tokens, row_map, per_layer=per_layer)
    new = {name: rows.with_rows(result.tensors[name], row_map) for name, rows in tensors.items()}
    write_tensors(
        {alias: new[name] for alias, name in aliases.items()},
        folder,
        partial,
        table=table,
        copies={file: {name: new[f"{file}/{name}"] for name in names} for file, names in copies.items()},
        left_out=left_out,
        axes=None if layer is not None else {alias: tensors[name].axis for alias, name in aliases.items()},
    )
    if resolved.tokenizer is not None:
        save_tokenizer(resolved.tokenizer, partial / TOKENIZER)
    for name, content in files.items():
        if content is None:
            (partial / name).unlink()
        else:
            (partial / name).write_text(content, encoding="utf-8")
    _restore_config(partial, resolved.settings or {})
    changed = {*files, CONFIG} | ({TOKENIZER} if resolved.tokenizer is not None else set())
    return FolderResult({"": ModuleResult(resolved, result, short)}, sorted(changed), left_out)


def checkpoint_census(folder: Path, left_out: Collection[str]) -> CensusReport:
    """Return what follows the vocabulary in a checkpoint folder, as `apply_to_checkpoint` moves it.

    Args:
        folder: The checkpoint.
        left_out: Paths of the files that an edit leaves out.

    Raises:
        CheckpointError: `apply_to_checkpoint` would raise it.
        TokenizerError, VocabularyError: The same; errors about single tokens are not among them.

    Warns:
        EmbedLayerWarning: `apply_to_checkpoint` would give it, or added tokens of the tokenizer have no row yet.
    """
    opened = _opened(folder)
    checkpoint, _, tensors, aliases = opened
    copies = find_copies(folder, checkpoint, aliases, left_out)
    shapes = {name: tuple(rows.tensor.shape) for name, rows in tensors.items()}
    size = next(iter(shapes.values()))[0]
    tokenizer = opened.tokenizer(folder)
    if tokenizer is not None and (missing := missing_rows(tokenizer, size, folder)):
        warnings.warn(missing, EmbedLayerWarning, stacklevel=3)
    copied = {f"{file}/{name}": shapes[key] for file, names in copies.items() for name, key in names.items()}
    token_ids = {
        f"{file}: {part.name}.{key}".replace(": .", ": "): part.owner[key]
        for file in (CONFIG, GENERATION, PARAMS)
        for part in parts_of(_read(folder / file), size)
        if part.of_tokens
        for key in id_keys(part.owner, size, file)
    }
    forms = (TOKENIZER, CONFIG, GENERATION, PARAMS, TOKENIZER_CONFIG, SPECIALS, ADDED, *OTHER_FORMS)
    files = {file.name for form in forms for file in folder.glob(form)}
    return CensusReport({**shapes, **copied}, token_ids, tuple(sorted(files)))


def _same(rows: Tensor) -> Tensor:
    """Return new rows unchanged: those of a second copy are those of the checkpoint."""
    return rows


def _read_tensor(path: Path, name: str) -> Tensor:
    """Read one tensor of a safetensors file."""
    place = find_folder(path)
    assert place is not None
    return WeightFiles(place[0], path.name).read(name)


def _with_stored_names(rows: RowEdit, opened: Opened) -> RowEdit:
    """Return the undo of an edit of a live model with the names that its tensors have in the folder of that model.

    transformers writes some tensors, as those of multimodal models, under other names than the live model has.

    Args:
        rows: The undo; an edit, and an undo with names of the folder, are returned unchanged.
        opened: The checkpoint.
    """
    if rows.after is None or rows.restored_rows is None or rows.after.keys() <= opened.tensors.keys():
        return rows
    written = stored_names(opened.checkpoint.config)
    names = {own: opened.aliases[name] for own, each in written.items() for name in each if name in opened.aliases}
    return replace(
        rows,
        after={names.get(name, name): value for name, value in rows.after.items()},
        restored_rows={names.get(name, name): value for name, value in rows.restored_rows.items()},
    )


def _restore_config(folder: Path, settings: JsonObject) -> None:
    """Write the values before an edit of a live model into its configurations, to undo it in the folder of that model.

    Args:
        folder: The folder; its `config.json` and `generation_config.json` are changed if they are there.
        settings: The settings of the receipt; those of the configurations start with the name of the file.
    """
    for file in (CONFIG, GENERATION):
        start = f"{Path(file).stem}."
        before = {name.removeprefix(start): value for name, value in settings.items() if name.startswith(start)}
        if before and (folder / file).is_file():
            content = _read(folder / file)
            for name, value in before.items():
                *path, key = name.split(".")
                part = part_at(content, path)
                if isinstance(part, dict) and key in part:
                    part[key] = value
            write_json(folder / file, content)


def _warn_of_unknown_defaults(checkpoint: Checkpoint, row_map: RowMap) -> None:
    """Warn if an edit moves tokens, and the configuration leaves roles to a class whose defaults are not known."""
    is_moved = not torch.equal(row_map.new_ids, torch.arange(row_map.old_size))
    if is_moved and (keys := unknown_defaults(checkpoint.config)):
        warnings.warn(
            f"{CONFIG} does not state {', '.join(keys)}, and the defaults of the class of model type "
            f"{checkpoint.config.get('model_type')!r} are not known without a transformers that has it. If they name "
            f"tokens, state them in {CONFIG} before the edit.",
            EmbedLayerWarning,
            stacklevel=6,
        )


def _check_padding(layer: EmbeddingLayer, row_map: RowMap, *, has_class: bool) -> None:
    """Check that the padding token keeps its ID, if positions are or may be counted from that ID.

    Args:
        layer: The layer before the edit; if only its table was read, the record does not say how positions are counted.
        row_map: The old row of each new row.
        has_class: Whether transformers has the class of the configuration; `check_readers` knows those of its classes
            that count from the padding.

    Raises:
        VocabularyError: The padding token would get another ID.
    """
    unknown = layer.load_record.table_only and not has_class
    if unknown or layer.numbering == "ids":
        subject = "This unknown family may count" if unknown else f"{layer.family} counts"
        check_padding(subject, layer.padding_id, row_map.new_ids)


def _opened(folder: Path) -> Opened:
    """Open a checkpoint for an edit of its rows, by the record of its family, else by its class of transformers.

    Raises:
        CheckpointError: Neither names all tensors with values for each token; see `_opened_by_record`.
        VocabularyError: The model has hashed n-grams.
    """
    checkpoint = Checkpoint.open(folder)
    refuse_hashed_ngrams(checkpoint.names, str(folder))
    is_unknown = is_unknown_family(checkpoint)
    by_class = rows_of_class(checkpoint) if is_unknown else None
    if by_class is not None:
        return Opened(checkpoint, None, *by_class)
    try:
        return _opened_by_record(folder, checkpoint, is_unknown=is_unknown)
    except CheckpointError:
        by_class = None if is_unknown else rows_of_class(checkpoint)
        if by_class is None:
            raise
        return Opened(checkpoint, None, *by_class)


def _opened_by_record(folder: Path, checkpoint: Checkpoint, *, is_unknown: bool) -> Opened:
    """Open a checkpoint for an edit of its rows, by the record of its family; of an unknown family, only the table.

    It warns of other tensors with the same number of rows: they are not known to belong to tokens and are not edited.

    Raises:
        CheckpointError: The layer builds a tensor from several stored ones, so no stored rows can be edited. Or the
            model has more tensors with rows for tokens. Or the family is unknown, and another tensor has a
            size equal to the number of tokens.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmbedLayerWarning)  # about tensors that are not read, and not needed here
        layer = load(folder, table_only=is_unknown)
    family, rules = checkpoint_family(checkpoint), tensor_rules(checkpoint)
    read = {name for stored in layer.tensor_names.values() for name in stored}
    ruled = {name: rule for name, rule in rules.items() if rule is not None and (name in read or rule.end is not None)}
    unmoved = [name for name, rule in ruled.items() if name not in read and rule.end == "per_layer"]
    unmoved += [name for name, rule in rules.items() if rule is not None and name not in ruled]
    if unmoved:
        what = [f"{name}, {' x '.join(f'{size:,}' for size in checkpoint.info(name).shape)}" for name in unmoved[:4]]
        raise CheckpointError(
            f"{folder} has more tensors with rows for tokens than the layer, and what these are for a new token is not "
            f"known, so its vocabulary is not edited: {'; '.join(what)}."
        )
    ends = row_tensors(layer, vocabulary_modules(layer))[0]
    unplaced = sorted(ends.keys() - layer.tensor_names.keys())
    has_columns = family is not None and family.head is not None and bool(checkpoint.find(*family.head.columns))
    if unplaced and not has_columns:
        raise CheckpointError(
            f"{', '.join(unplaced)} of {folder} is put together from several tensors, so the checkpoint has no rows of "
            f"it to edit. Save the layer by itself first: embedlayer.load(...).save_pretrained(...)."
        )
    names = {key: layer.tensor_names[key] for key in ends if key in layer.tensor_names}
    aliases = {name: stored[0] for stored in names.values() for name in stored}
    tensors = {names[key][0]: _stored(checkpoint, names[key][0], ends[key]) for key in names}
    table, rows = next(iter(tensors.items()))
    num_rows = len(rows.tensor)
    for name, rule in ruled.items():
        shape = checkpoint.info(name).shape
        if name not in aliases and rule.end is not None and shape and shape[rule.axis] == num_rows:
            axis = rule.axis % len(shape)
            tensors[name], aliases[name] = RowTensor(checkpoint.read(name), rule.end, axis=axis), name
    if is_unknown:
        aliases |= dict.fromkeys(_copies_of(checkpoint, table), table)
    _check_others(checkpoint, num_rows, aliases, read - aliases.keys(), is_unknown=is_unknown)
    tensors = dict(sorted(tensors.items(), key=lambda named: named[1].local.dim() == 1))
    return Opened(checkpoint, layer, tensors, aliases)


def _stored(checkpoint: Checkpoint, name: str, rows: RowTensor) -> RowTensor:
    """Return the description of a tensor as it is stored; a bias may be stored as `(1, V)`."""
    stored = checkpoint.read(name)
    return replace(rows, tensor=stored, axis=stored.dim() - rows.tensor.dim())


def _copies_of(checkpoint: Checkpoint, table: str) -> list[str]:
    """Return the names of the other tensors that have the shape, dtype and bits of the table, such as a tied head."""
    info, rows = checkpoint.info(table), checkpoint.read(table)
    alike = [name for name in checkpoint.names if name != table and checkpoint.info(name).shape == info.shape]
    return [name for name in alike if checkpoint.info(name).dtype == info.dtype and checkpoint.stores(name, rows)]


def _check_others(
    checkpoint: Checkpoint, num_rows: int, edited: Collection[str], read: Collection[str], *, is_unknown: bool
) -> None:
    """Check that no other tensor of a checkpoint follows the vocabulary; warn of those of which that is not known.

    What the record of the family does not name is looked for in the class of transformers that `config.json` names,
    which is built on the meta device. A known family is looked up there only if a tensor has a size of `num_rows`.

    Args:
        checkpoint: The checkpoint.
        num_rows: Number of rows of the table.
        edited: Names of the tensors that are edited; the table is the first.
        read: Names of other tensors of the layer, such as positions, which have no rows of tokens.
        is_unknown: Whether the family is unknown, so that only the table and its copies are edited; that is a warning.

    Raises:
        CheckpointError: Another tensor follows the vocabulary; or, if the family is unknown, it may, because it has a
            size of `num_rows`, such as an untied head.
    """
    sized = [name for name in checkpoint.names if num_rows in checkpoint.info(name).shape]
    sized = [name for name in sized if name not in edited and name not in read]
    axes = axes_by_architecture(checkpoint.config, edited) if sized or is_unknown else None
    follow = [name for name, own in (axes or {}).items() if own and name in checkpoint.names and name not in edited]
    if follow:
        raise CheckpointError(
            f"{checkpoint.name}: the size of {', '.join(follow[:4])} follows the number of tokens, and it is not known "
            f"how its values belong to them, so the vocabulary is not edited."
        )
    sized = [name for name in sized if axes is None or name not in axes]
    model_type, table = checkpoint.config.get("model_type"), next(iter(edited))
    if sized and is_unknown:
        raise CheckpointError(
            f"{checkpoint.name} is of an unknown family (model_type {model_type!r}), and {', '.join(sized[:4])} has "
            f"{num_rows:,} rows or columns, as many as there are tokens. Whether they must change too is not known, so "
            f"the vocabulary is not edited."
        )
    warning = ""
    if is_unknown:
        warning = (
            f"{checkpoint.name} is of an unknown family (model_type {model_type!r}): only its table, {table}, is "
            f"edited. No other tensor has as many rows."
        )
    elif rows := [name for name in sized if checkpoint.info(name).shape[0] == num_rows]:
        warning = (
            f"{', '.join(rows[:4])} has {num_rows:,} rows, as many as there are tokens, and is not known to belong to "
            f"them: it is not edited."
        )
    if warning:
        warnings.warn(warning, EmbedLayerWarning, stacklevel=6)


# Configuration files


def _warn_of_own_rules(folder: Path) -> None:
    """Warn if transformers' `AutoTokenizer` would not use the new tokenizer as it is.

    Such a model family has a tokenizer class with rules of its own, which returns other IDs whatever `tokenizer.json`
    contains.
    """
    model_type = read_json(folder / CONFIG).get("model_type") if (folder / CONFIG).is_file() else None
    if model_type in OWN_RULES:
        warnings.warn(
            f"transformers' AutoTokenizer opens checkpoints of {model_type} with that family's own rules, whatever "
            f"tokenizer.json says, and returns other IDs than the new tokenizer. Open the new folder with "
            f"transformers.PreTrainedTokenizerFast.from_pretrained.",
            EmbedLayerWarning,
            stacklevel=5,
        )


def _edited_files(folder: Path, tokens: TokenMap, row_map: RowMap, *, per_layer: bool) -> dict[str, str | None]:
    """Return the new text of each file that an edit changes, other than the weights and `tokenizer.json`.

    It warns of chat templates that are left out, and of a guessed end-of-text token.

    Args:
        folder: The checkpoint before the edit; it is not changed.
        tokens: The old token of each new token, and both tokenizers.
        row_map: The old row of each new row.
        per_layer: Whether the edit moves a per-layer table, which has a row for each token afterwards.

    Returns:
        A dictionary from file name, relative to `folder`, to the new text, or to `None` for a file to delete.

    Raises:
        VocabularyError: A configuration names a removed token.
    """
    ids, special, model = tokens.new_token_ids(row_map), tokens.special_tokens, _read(folder / CONFIG)

    def edited_config(content: JsonObject) -> JsonObject:
        edited = edited_configuration(content, ids, CONFIG)
        edited = _with_all_roles(_with_per_layer_rows(edited, row_map.size) if per_layer else edited, ids)
        return with_moved_defaults(content, edited, ids, CONFIG)

    def edited_params(content: JsonObject) -> JsonObject:
        size = {"vocab_size": row_map.size} if content.get("vocab_size") == row_map.old_size else {}
        return {**edited_configuration(content, ids, PARAMS), **size}

    edits: dict[str, Callable[[JsonObject], JsonObject]] = {
        CONFIG: edited_config,
        GENERATION: lambda content: edited_configuration(content, ids, GENERATION),
        PARAMS: edited_params,
    }
    removed: list[Path] = []
    old_tokenizer, tokenizer = tokens.old_tokenizer, tokens.tokenizer
    own_class = language_class(_read(folder / TOKENIZER_CONFIG), model)
    if special is not None:
        if own_class is not None:
            warn_of_lost_settings(own_class)
        special.warn()
        _warn_of_own_rules(folder)
        edits[TOKENIZER_CONFIG] = lambda content: tokenizer_config(content, special, model, replaced=True)
        edits[SPECIALS] = lambda _: dict(special)
        removed = list(folder.glob(ADDED))
    elif old_tokenizer is not None and tokenizer is not None:
        roles = _roles_in(folder, old_tokenizer, tokenizer)

        def edited_tokenizer_config(content: JsonObject) -> JsonObject:
            if own_class is not None:
                own = _without_removed_names(with_class(content, own_class), tokens, tokenizer, TOKENIZER_CONFIG)
                if gives_ids(own, model, tokenizer):
                    return own
                warn_of_lost_settings(own_class)
            generic = tokenizer_config(content, roles, model, replaced=False)
            return _without_removed_names(generic, tokens, tokenizer, TOKENIZER_CONFIG)

        edits[TOKENIZER_CONFIG] = edited_tokenizer_config
        edits[SPECIALS] = lambda content: _without_removed_names(content, tokens, tokenizer, SPECIALS)
        edits[ADDED] = lambda content: _added_tokens(content, tokens, tokenizer)
    found: dict[str, JsonObject] = {}
    for name, edit in edits.items():
        if (folder / name).is_file() or (name == TOKENIZER_CONFIG and (folder / CONFIG).is_file()):
            old = _read(folder / name)
            new = edit(old)
            if new != old:
                found[name] = new
    if old_tokenizer is not None and tokenizer is not None:
        removed += [file for pattern in OTHER_FORMS for file in folder.glob(pattern)]
        removed += _templates_to_remove(folder, sorted(added_texts(old_tokenizer) - added_texts(tokenizer)), found)
    texts = {name: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for name, content in found.items()}
    return {**texts, **{file.relative_to(folder).as_posix(): None for file in removed}}


def _with_per_layer_rows(content: JsonObject, size: int) -> JsonObject:
    """Return a copy of the content of a `config.json` that states the number of rows of the per-layer table."""
    text = content.get("text_config")
    stated = dict.fromkeys(PER_LAYER_ROWS, size)
    return {**content, "text_config": {**text, **stated}} if isinstance(text, dict) else {**content, **stated}


def _read(file: Path) -> JsonObject:
    """Return the content of a JSON file, or an empty dictionary if there is no such file."""
    return read_json(file) if file.is_file() else {}


def _with_all_roles(content: JsonObject, ids: NewTokenIds) -> JsonObject:
    """Return a copy of the content of a `config.json` in which the IDs of special tokens are complete.

    `tokenizer_class` is removed from the copy. Only if another tokenizer replaces the old one, IDs are added, because
    transformers uses the defaults of the model's class for missing ones:

    - `bos_token_id` and `eos_token_id`, as `None` if the new tokenizer has no such token;
    - `pad_token_id`, only if the new tokenizer has a padding token.

    Args:
        content: The content, in which the IDs that are present are new ones. IDs may be in its `text_config` instead.
        ids: Has the IDs of the new tokenizer's special tokens.
    """
    content = {key: value for key, value in content.items() if key != "tokenizer_class"}
    if ids.role_ids is None:
        return content
    if isinstance(content.get("text_config"), dict):
        content["text_config"] = _with_all_roles(content["text_config"], ids)
    elif "vocab_size" in content or "model_type" in content:
        for role in ("bos_token", "eos_token"):
            content.setdefault(f"{role}_id", ids.id_of(role))
        for role in ("bos_token", "eos_token", "pad_token"):
            if content.get(f"{role}_id") is None and role in ids.role_ids:
                content[f"{role}_id"] = ids.role_ids[role]
    return content


def _roles_in(folder: Path, old: Tokenizer, new: Tokenizer) -> Mapping[str, str]:
    """Return a dictionary from each role, such as `eos_token`, to the text of the edited tokenizer's special token.

    These are the roles of the old tokenizer: those that its files state, and those of its class. A class that has no
    record is asked in transformers. Without transformers, the IDs in `config.json`, else in `generation_config.json`,
    are converted to texts by the old tokenizer; if no role is left, the roles follow from the usual names, such as
    `</s>`, as in `special_tokens_of`. Roles whose text is not an added token of the new tokenizer are left out.

    Args:
        folder: The checkpoint before the edit.
        old: The tokenizer before the edit, to which the IDs in the configurations belong.
        new: The tokenizer after the edit.
    """
    roles = roles_of_class(folder)
    if roles is not None:
        return {role: token for role, token in roles.items() if token in added_texts(new)}
    stated = stated_roles(folder)
    for name in (CONFIG, GENERATION):
        content = _read(folder / name)
        for role in USUAL_NAMES:
            token_id = first_id(content.get(f"{role}_id"))
            if type(token_id) is int and token_id >= 0 and role not in stated:
                stated[role] = old.id_to_token(token_id) or ""
    return special_tokens_of(new, stated)


def _templates_to_remove(folder: Path, lost: Sequence[str], found: dict[str, JsonObject]) -> list[Path]:
    """Return the files of chat templates that contain a token of `lost`; warn of these tokens.

    A template inside `tokenizer_config.json` that contains such a token is removed from that file's new content.

    Args:
        folder: The checkpoint before the edit.
        lost: Texts of the added tokens that the new tokenizer lacks.
        found: From file name to the new content of each changed JSON file; changed in place.
    """
    files = {file: read_bytes(file).decode(errors="replace") for glob in TEMPLATES for file in folder.glob(glob)}
    named = {file: names for file, text in files.items() if (names := names_in(text, lost))}
    absent = {name for names in named.values() for name in names}
    config = found.get(TOKENIZER_CONFIG, _read(folder / TOKENIZER_CONFIG))
    template = json.dumps(config["chat_template"], ensure_ascii=False) if "chat_template" in config else ""
    if names := names_in(template, lost):
        absent |= {*names}
        found[TOKENIZER_CONFIG] = {key: value for key, value in config.items() if key != "chat_template"}
    if absent:
        warnings.warn(
            f"The chat template is left out: it contains {', '.join(sorted(absent))}, which the new tokenizer does not "
            f"have. Write one for the new tokenizer.",
            EmbedLayerWarning,
            stacklevel=6,
        )
    return list(named)


def _without_removed_names(content: JsonObject, tokens: TokenMap, new: Tokenizer, file: str) -> JsonObject:
    """Return a copy of the content of a tokenizer's configuration file, changed to match the edited tokenizer.

    Removed tokens are left out of lists of special tokens, and `added_tokens_decoder` gets the new IDs.

    Args:
        content: The content of the file.
        tokens: The old token of each new token, and both tokenizers.
        new: The tokenizer after the edit.
        file: Name of the file, for the error.

    Raises:
        VocabularyError: The file names a removed token in a role, such as `eos_token`.
    """
    removed, content = set(tokens.dropped.values()), dict(content)
    for key in USUAL_NAMES:
        token = token_text(content.get(key))
        if token in removed:
            raise VocabularyError(
                f"Token {token!r} cannot be removed: {file} names it as {key}. Keep it, or change {file} first."
            )
    for key in LISTS_OF_NAMES:
        if isinstance(content.get(key), list):
            content[key] = [token for token in content[key] if token_text(token) not in removed]
    if "added_tokens_decoder" in content:
        content["added_tokens_decoder"] = {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in tokenizer_data(new)["added_tokens"]
        }
    return content


def _added_tokens(content: JsonObject, tokens: TokenMap, new: Tokenizer) -> JsonObject:
    """Return the new content of `added_tokens.json`: a dictionary from the text of each added token to its new ID.

    The added tokens are those of the old file that are kept, and those that the edit adds.

    Args:
        content: The old content, in the same form.
        tokens: The old token of each new token, and both tokenizers.
        new: The tokenizer after the edit.
    """
    names = {*tokens.added.values(), *content}
    records = tokenizer_data(new)["added_tokens"]
    return {token["content"]: token["id"] for token in records if token["content"] in names}
