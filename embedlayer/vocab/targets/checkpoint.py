"""Checkpoint folders of other libraries: the rows of the edited copy.

Tensors keep the dtype in which they are stored. All other tensors are copied from file to file.
"""

import warnings
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from embedlayer.checkpoints.layer import EmbeddingLayer, load
from embedlayer.checkpoints.meta_layout import PARAMS
from embedlayer.checkpoints.reader import CONFIG, Checkpoint, weight_beside
from embedlayer.checkpoints.reading.model import checkpoint_family, is_unknown_family, tensor_rules
from embedlayer.checkpoints.reading.tensors import CheckpointTensors, is_in_block
from embedlayer.checkpoints.second_copies import Copies, find_copies, is_dense
from embedlayer.checkpoints.writer import Rows, weight_names, write_tensors
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning
from embedlayer.families.class_defaults import unknown_defaults, with_defaults_of_class
from embedlayer.families.configurations import check_padding, check_readers, id_keys, parts_of
from embedlayer.families.edit_report import CensusReport
from embedlayer.families.left_out_files import files_left_out
from embedlayer.families.vocabulary_tensors import axes_by_architecture
from embedlayer.io.safetensors_files import read_header
from embedlayer.io.weight_files import WeightFiles, find_folder
from embedlayer.opening.path_kinds import GENERATION, TOKENIZER_CONFIG
from embedlayer.saving import TOKENIZER
from embedlayer.tokenization.read import load_tokenizer, save_tokenizer
from embedlayer.vocab.edit import ResolveEdit, missing_rows
from embedlayer.vocab.map import RowMap, RowTensor
from embedlayer.vocab.targets.apply_rows import EditResult, StoredTypes, apply_row_map
from embedlayer.vocab.targets.class_rows import rows_of_class
from embedlayer.vocab.targets.folded_rows import FoldedTable
from embedlayer.vocab.targets.folder_files import (
    ADDED,
    OTHER_FORMS,
    SPECIALS,
    edited_files,
    read_json_if_there,
)
from embedlayer.vocab.targets.live import row_tensors
from embedlayer.vocab.targets.module_parts import refuse_hashed_ngrams, vocabulary_modules


class Opened(NamedTuple):
    """Describe a checkpoint whose rows are edited."""

    checkpoint: Checkpoint
    layer: EmbeddingLayer | None
    tensors: dict[str, RowTensor]
    aliases: dict[str, str]
    folded: FoldedTable | None = None

    def tokenizer(self, folder: Path) -> Tokenizer | None:
        """Return the tokenizer of the folder, or `None` if there is none; it may have IDs without a row."""
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


def apply_to_checkpoint(folder: Path, partial: Path, resolve: ResolveEdit) -> EditResult:
    """Write the edited copy of a checkpoint folder into `partial`; `folder` does not change."""
    opened = _opened(folder)
    checkpoint, layer, tensors, aliases, folded = opened
    left_out = files_left_out(folder)
    table = next(iter(tensors))
    stored = {name: checkpoint.read_stored(name) for name in tensors if checkpoint.stored(name) is not None}
    copies = _copies(folder, opened, left_out)
    for file, names in copies.items():
        for name, key in names.items():
            copy = tensors[f"{file}/{name}"] = _copied_rows(folder / file, name, tensors[key], key)
            stored |= {f"{file}/{name}": stored[key]} if copy.decode is not None else {}
    tokenizer = opened.tokenizer(folder)
    edit = resolve([tokenizer], len(tensors[table].tensor), True)
    row_map = edit.row_map
    if edit.tokens is not None:
        config = with_defaults_of_class(checkpoint.config)
        if layer is not None:
            _check_padding(layer, row_map, has_class=not isinstance(config, dict))
        contents = (config, read_json_if_there(folder / GENERATION))
        configs = [part.owner for content in contents for part in parts_of(content, 0)]
        check_readers(configs, row_map.new_ids, row_map.size)
        _warn_of_unknown_defaults(checkpoint, row_map)
    result = apply_row_map(tensors, edit)
    per_layer = any(rows.end == "per_layer" for rows in tensors.values())
    files = {} if edit.tokens is None else edited_files(folder, edit.tokens, row_map, per_layer=per_layer)
    new: dict[str, Rows] = {name: rows.with_rows(result[name], row_map) for name, rows in tensors.items()}
    new |= {name: old.of_bytes(result[name]) for name, old in stored.items()}
    written: dict[str, Rows] = {}
    if folded is None:
        written |= {alias: new[name] for alias, name in aliases.items()}
    else:
        written |= folded.after(result[table], row_map)
    axes = {} if folded is None else folded.axes
    if layer is None:
        axes = {alias: tensors[name].axis for alias, name in aliases.items()}
    write_tensors(
        written,
        folder,
        partial,
        table=next(iter(written)),
        copies={file: {name: new[f"{file}/{name}"] for name in names} for file, names in copies.items()},
        left_out=left_out,
        axes=axes,
        shared=() if folded is None else folded.shared,
    )
    if edit.tokenizer is not None:
        save_tokenizer(edit.tokenizer, partial / TOKENIZER)
    for name, content in files.items():
        if content is None:
            (partial / name).unlink()
        else:
            (partial / name).write_text(content, encoding="utf-8")
    types = {name: StoredTypes(rows.format.name, rows.format.name, 0.0) for name, rows in stored.items()}
    return EditResult(edit, left_out, types)


def checkpoint_census(folder: Path, left_out: Collection[str]) -> CensusReport:
    """Return what follows the vocabulary in a checkpoint folder, as `apply_to_checkpoint` moves it."""
    opened = _opened(folder)
    checkpoint, _, tensors, _, folded = opened
    copies = _copies(folder, opened, left_out)
    shapes = {name: checkpoint.matrix_info(name).shape for name in tensors}
    shapes = shapes if folded is None else folded.shapes
    size = len(next(iter(tensors.values())).tensor)
    tokenizer = opened.tokenizer(folder)
    if tokenizer is not None and (missing := missing_rows(tokenizer, size, folder)):
        warnings.warn(missing, EmbedLayerWarning, stacklevel=3)
    copied = {f"{file}/{name}": shapes[key] for file, names in copies.items() for name, key in names.items()}
    token_ids = {
        f"{file}: {part.name}.{key}".replace(": .", ": "): part.owner[key]
        for file in (CONFIG, GENERATION, PARAMS)
        for part in parts_of(read_json_if_there(folder / file), size)
        if part.of_tokens
        for key in id_keys(part.owner, size, file)
    }
    forms = (TOKENIZER, CONFIG, GENERATION, PARAMS, TOKENIZER_CONFIG, SPECIALS, ADDED, *OTHER_FORMS)
    files = {file.name for form in forms for file in folder.glob(form)}
    return CensusReport({**shapes, **copied}, token_ids, tuple(sorted(files)))


def _copies(folder: Path, opened: Opened, left_out: Collection[str]) -> Copies:
    copies = find_copies(folder, opened.checkpoint, opened.aliases, left_out)
    if copies and opened.folded is not None:
        raise CheckpointError(f"{[*copies]} has copies of {[*opened.folded.shapes]}: move it out of {folder}.")
    return copies


def _copied_rows(path: Path, name: str, rows: RowTensor, key: str) -> RowTensor:
    """Return the rows of a second copy of `rows`, with the same new rows."""
    if rows.decode is not None and not is_dense(read_header(path).tensors.get(name)):
        return replace(rows, parameter=key, state_of=lambda new: new)
    decode, place = rows.decode or (lambda new: new), find_folder(path)
    assert place is not None
    tensor = WeightFiles(place[0], path.name).read(name)
    return replace(rows, tensor=tensor, parameter=key, state_of=decode, encode=None, decode=None)


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
    """Check that the padding token keeps its ID, if positions are or may be counted from that ID."""
    unknown = layer.load_record.table_only and not has_class
    if unknown or layer.numbering == "ids":
        subject = "This unknown family may count" if unknown else f"{layer.family} counts"
        check_padding(subject, layer.padding_id, row_map.new_ids)


def _opened(folder: Path) -> Opened:
    """Open a checkpoint for an edit of its rows, by the record of its family or by its class of transformers."""
    checkpoint = Checkpoint.open(folder)
    refuse_hashed_ngrams(checkpoint.names, str(folder))
    opened = _opened_by_record_or_class(folder, checkpoint)
    tensors = CheckpointTensors(checkpoint, None, "cpu", str(checkpoint.config.get("model_type")))
    for name, rows in opened.tensors.items():
        if checkpoint.stored(name) is None:
            tensors.refuse_quantised(f"{rows.end}.weight", (name,), name)
    return opened


def _opened_by_record_or_class(folder: Path, checkpoint: Checkpoint) -> Opened:
    """Open a checkpoint as `_opened` does, whatever its rows are stored as."""
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
    """Open a checkpoint for an edit of its rows, by the record of its family; of an unknown family, only the table."""
    with warnings.catch_warnings(action="ignore", category=EmbedLayerWarning):  # about tensors that are not needed here
        layer = load(folder, table_only=is_unknown)
    family, rules = checkpoint_family(checkpoint), tensor_rules(checkpoint)
    read = {name for tensor_names in layer.tensor_names.values() for name in tensor_names}
    ruled = {name: rule for name, rule in rules.items() if rule is not None and (name in read or rule.end is not None)}
    unmoved = [name for name, rule in ruled.items() if name not in read and rule.end == "per_layer"]
    unmoved += [name for name, rule in rules.items() if rule is not None and name not in ruled]
    if unmoved:
        shapes = {name: checkpoint.matrix_info(name).shape for name in unmoved[:4]}
        what = [f"{name}, {' x '.join(f'{size:,}' for size in shape)}" for name, shape in shapes.items()]
        raise CheckpointError(f"{folder} is not edited: what new rows of {'; '.join(what)} hold is unknown.")
    weights = weight_names(layer, layer.tensor_names)
    of_stored = {f"{table}.": table for table in weights.keys() - layer.tensor_names.keys()}
    ends = {
        next((table for start, table in of_stored.items() if key.startswith(start)), key): rows
        for key, rows in row_tensors(layer, vocabulary_modules(layer))[0].items()
    }
    folded = FoldedTable.read(checkpoint)
    unplaced = sorted(ends.keys() - weights.keys()) if folded is None else []
    has_columns = family is not None and family.head is not None and bool(checkpoint.find(*family.head.columns))
    if unplaced and not has_columns:
        raise CheckpointError(f"{unplaced} of {folder} joins several tensors: edit a layer saved by itself.")
    names = {key: weights[key] for key in ends if key in weights}
    aliases = {name: tensor_names[0] for tensor_names in names.values() for name in tensor_names}
    tensors: dict[str, RowTensor] = {}
    if folded is not None:
        tensors[folded.names[0]] = folded.row_tensor
        aliases |= {name: name for name in folded.shapes}
    for key, (name, *_) in names.items():
        if checkpoint.stored(name) is not None:
            tensors[name] = RowTensor.of_stored(checkpoint.read_stored(name), ends[key].end)
            continue
        stored = checkpoint.read(name)  # a bias may be stored as `(1, V)`
        tensors[name] = replace(ends[key], tensor=stored, axis=stored.dim() - ends[key].tensor.dim())
    table, rows = next(iter(tensors.items()))
    num_rows = len(rows.tensor)
    for name, rule in ruled.items():
        shape = checkpoint.matrix_info(name).shape
        if name not in aliases and rule.end is not None and shape and shape[rule.axis] == num_rows:
            aliases[name] = name
            if checkpoint.stored(name) is not None:
                tensors[name] = RowTensor.of_stored(checkpoint.read_stored(name), rule.end)
            else:
                tensors[name] = RowTensor(checkpoint.read(name), rule.end, axis=rule.axis % len(shape))
    if is_unknown:
        info = checkpoint.matrix_info(table)
        alike = [name for name in checkpoint.names if checkpoint.info(name).shape == info.shape]
        alike = [name for name in alike if checkpoint.info(name).dtype == info.dtype] or _stored_weights(checkpoint)
        aliases |= {name: table for name in alike if name != table and checkpoint.is_same(name, table)}  # a tied head
    read |= {part for name in aliases if checkpoint.stored(name) for part in checkpoint.module_tensors(name).values()}
    _check_others(checkpoint, num_rows, aliases, read - aliases.keys(), is_unknown=is_unknown)
    tensors = dict(sorted(tensors.items(), key=lambda named: named[1].local.dim() == 1))
    return Opened(checkpoint, layer, tensors, aliases, folded)


def _stored_weights(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the weights outside numbered blocks that are stored rows."""
    weights = dict.fromkeys(map(weight_beside, checkpoint.names))
    return [name for name in weights if not is_in_block(name) and checkpoint.stored(name) is not None]


def _check_others(
    checkpoint: Checkpoint, num_rows: int, edited: Collection[str], read: Collection[str], *, is_unknown: bool
) -> None:
    """Check that no other tensor of a checkpoint has values by token; warn of those that may have them."""
    sized = [name for name in checkpoint.names if num_rows in checkpoint.info(name).shape]
    if is_unknown:
        sized += [name for name in _stored_weights(checkpoint) if checkpoint.matrix_info(name).shape[0] == num_rows]
    sized = [name for name in sized if name not in edited and name not in read]
    axes = axes_by_architecture(checkpoint.config, edited) if sized or is_unknown else None
    follow = [name for name, own in (axes or {}).items() if own and name in checkpoint.names and name not in edited]
    if follow:
        raise CheckpointError(f"{checkpoint.name} is not edited: what {follow[:4]} hold for each token is unknown.")
    sized = [name for name in sized if axes is None or name not in axes]
    model_type, table = checkpoint.config.get("model_type"), next(iter(edited))
    if sized and is_unknown:
        raise CheckpointError(f"{model_type!r} is unknown, and {sized[:4]} of {checkpoint.name} has {num_rows:,} rows.")
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
