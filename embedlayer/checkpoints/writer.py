"""Write a copy of a checkpoint with some tensors replaced.

Only the changed tensors are in memory. The others are copied from file to file in buffers, and files without a changed
tensor are copied whole. The new folder appears complete or not at all.
"""

import shutil
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from torch import Tensor, nn

from embedlayer.checkpoints.meta_layout import PARAMS
from embedlayer.checkpoints.reader import CONFIG, Checkpoint, weight_beside
from embedlayer.checkpoints.reading.model import checkpoint_family, tensor_rules
from embedlayer.checkpoints.second_copies import find_copies, is_dense
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning, FileError
from embedlayer.families.left_out_files import files_left_out, files_to_copy, left_out_message
from embedlayer.formats.stored import StoredRows
from embedlayer.io.files import check_new_folder, named_path, new_folder, read_json, write_json
from embedlayer.io.safetensors_files import (
    INDEX,
    Header,
    copy_bytes,
    header_of_copy,
    read_header,
    write_tensor,
)
from embedlayer.tables.packed_rows import PackedRows

Rows = Tensor | StoredRows
"""New content of a tensor, or the new rows of a weight that a checkpoint stores in a format of its own."""


@dataclass(frozen=True)
class WriteReceipt:
    """Result of `EmbeddingLayer.write_into`.

    Attributes:
        changed: Names of the tensors that changed, sorted.
        rewritten: Names of the safetensors files that contain a changed tensor.
        copied: Names of the other files. They are copied; sizes in `config.json` and the index are updated if they
            changed.
        vocab_size: Number of rows of the table in the new checkpoint.
        left_out: Paths of files that hold values by token and cannot be edited, which are not in the new checkpoint;
            that of a folder ends in a slash. Empty if the vocabulary is that of the old checkpoint.
    """

    changed: tuple[str, ...]
    rewritten: tuple[str, ...]
    copied: tuple[str, ...]
    vocab_size: int
    left_out: tuple[str, ...] = ()


def weight_names(layer: nn.Module, names: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return the names of an `EmbeddingLayer`'s tensors in its checkpoint, a table of stored rows as one entry."""
    tables = [name for name, part in layer.named_modules() if isinstance(part, PackedRows)]
    weights: dict[str, tuple[str, ...]] = {}
    for key, own in names.items():
        table = next((each for each in tables if key.startswith(f"{each}.")), None)
        weights |= {key: tuple(own)} if table is None else {table: tuple(map(weight_beside, own))}
    return weights


def tensors_of_layer(
    layer: nn.Module, names: Mapping[str, Sequence[str]], *, is_part: bool, is_edited: bool
) -> dict[str, Rows]:
    """Return the tensors of an `EmbeddingLayer` by their names in the checkpoint, the table first."""
    if is_part and is_edited:
        raise CheckpointError("The vocabulary of this layer was edited: edit the checkpoint's folder instead.")
    state = layer.state_dict()
    if unmatched := sorted(state.keys() ^ {key.partition("[")[0] for key in names}):
        raise CheckpointError(
            f"{', '.join(unmatched)} of this layer and the checkpoint's tensors are not one to one: save_pretrained "
            f"or embedlayer.vocab.write_into(layer.table, tokenizer, folder, out)."
        )
    weights = weight_names(layer, names)
    parts: dict[str, Rows] = {
        name: part.stored_rows for name, part in layer.named_modules() if isinstance(part, PackedRows)
    }
    for key in weights.keys() - parts.keys():  # `"weight[2:5]"`: the rows 2 to 4 of `state["weight"]`
        name, _, bounds = key.partition("[")
        parts[key] = state[name][slice(*map(int, bounds[:-1].split(":")))] if bounds else state[name]
    ordered = sorted(weights, key=lambda key: key not in ("table", "table.weight"))
    return {name: parts[key] for key in ordered for name in weights[key]}


def write_tensors(
    tensors: Mapping[str, Rows],
    checkpoint_dir: Path | str,
    out_dir: Path | str,
    *,
    table: str,
    copies: Mapping[str, Mapping[str, Rows]] | None = None,
    left_out: Collection[str] = (),
    is_edited: bool = False,
    axes: Mapping[str, int] | None = None,
    shared: Collection[str] = (),
) -> WriteReceipt:
    """Write a copy of the checkpoint in `checkpoint_dir` to `out_dir`, in which some tensors are replaced.

    `tensors` has the new tensors by their names in the checkpoint; each is stored in the dtype of the old one, and
    stored rows keep the format of the old ones. `table` is the name of the token table, a key of `tensors`. If it has
    another number of rows than before, every tensor that follows the vocabulary, as the record of the family says, must
    be among `tensors` with as many rows; `axes` names further ones with the axis of their tokens, and `shared` those
    whose rows tokens share, of any number (model2vec: `table` is then the mapping). `is_edited`: the rows belong to
    other tokens, also if there are as many.
    """
    source, target = Path(checkpoint_dir), named_path(out_dir)
    if not source.is_dir():
        raise FileError(f"There is no folder {source}.")
    check_new_folder(target)
    checkpoint = Checkpoint.open(source)
    if checkpoint.gguf is not None:
        raise CheckpointError(f"{checkpoint.gguf.path} is a GGUF file: write into it with embedlayer.vocab.write_into.")
    if (inner := checkpoint.matrix_info(table).file.parent) != source:
        raise CheckpointError(f"The weights of {source} are in the folder {inner.name} (modules.json): edit {inner}.")
    old_rows, rows = checkpoint.matrix_info(table).shape[0], tensors[table].shape[0]
    family = checkpoint_family(checkpoint)
    spec = None if family is None else family.per_layer
    per_layer = [] if spec is None else checkpoint.find(spec.table)
    moved = _expected_shapes(checkpoint, old_rows, rows)
    for name, axis in (axes or {}).items():
        old_shape = checkpoint.matrix_info(name).shape
        moved[name] = (*old_shape[:axis], rows, *old_shape[axis + 1 :])
    if rows != old_rows and (unmoved := sorted(moved.keys() - tensors.keys())):
        remedy = "load(..., per_layer=True)" if unmoved[0] in per_layer else "edit the vocabulary of the folder instead"
        raise CheckpointError(
            f"{unmoved[0]} of {checkpoint.name} has {old_rows:,} rows of tokens, and the new table {rows:,}: {remedy}."
        )
    tensors = {  # a bias `(V,)` is stored as `(1, V)` if the old one is (BART)
        name: rows[None] if isinstance(rows, Tensor) and rows.dim() == 1 and len(moved.get(name, ())) == 2 else rows
        for name, rows in tensors.items()
    }
    of_tokens = [table]
    for name, tensor in tensors.items():
        old_shape = checkpoint.matrix_info(name).shape
        is_copy = family is None and old_shape == checkpoint.matrix_info(table).shape
        of_tokens += [name] if is_copy or name in moved else []
        expected = (rows, *old_shape[1:]) if name == table or is_copy else moved.get(name, old_shape)
        is_short = name in per_layer and tensor.shape[0] <= rows  # it may lack the last tokens (Gemma 3n)
        if is_short or name in shared:
            expected = (tensor.shape[0], *old_shape[1:])
        if tuple(tensor.shape) != expected:
            raise CheckpointError(
                f"{checkpoint.name}: {name} {list(old_shape)} needs {list(expected)}, not {list(tensor.shape)}."
            )
    if copies is None and (is_edited or rows != old_rows):  # else the caller has found them
        stale = files_left_out(source)
        keys_by_file = find_copies(source, checkpoint, {name: name for name in of_tokens}, stale)
        _check_precision(checkpoint, source, keys_by_file)
        copies = {file: {name: tensors[key] for name, key in keys.items()} for file, keys in keys_by_file.items()}
        left_out = tuple(stale)
        if stale:
            warnings.warn(left_out_message(stale), EmbedLayerWarning, stacklevel=3)
    _check_formats(checkpoint, tensors)
    numel = sum(prod(new.shape) - prod(checkpoint.matrix_info(name).shape) for name, new in tensors.items())
    plain_copies = {file: _plain(checkpoint, of_file) for file, of_file in (copies or {}).items()}
    plain, metadata = _plain(checkpoint, tensors)
    changed = {name: tensor for name, tensor in plain.items() if not checkpoint.stores(name, tensor)}
    rewritten = {file: header for file, header in checkpoint.headers.items() if header.tensors.keys() & changed.keys()}
    copied: list[str] = []
    with new_folder(target) as partial:
        for name in files_to_copy(source, partial, left_out):
            file = source / name
            if name in rewritten:
                is_size = rewritten[name].metadata.get("vocab_size") == str(old_rows)
                sized = {**metadata, "vocab_size": str(rows)} if is_size else metadata
                copy_with_tensors(file, partial / name, rewritten[name], changed, sized)
            elif name in plain_copies:
                copy_with_tensors(file, partial / name, read_header(file), *plain_copies[name])
            else:
                shutil.copyfile(file, partial / name)
                copied += [name]
        sizes = {"vocab_size": rows} if family is None else {family.vocab_size: rows - family.extra_rows}
        sizes = sizes if rows != old_rows else {}
        if spec is not None and changed.keys() & {*per_layer}:
            sizes[spec.rows] = len(changed[per_layer[0]])
        _rewrite_json(partial, checkpoint, old_rows, sizes, changed, numel)
    return WriteReceipt(tuple(sorted(changed)), (*rewritten, *plain_copies), tuple(copied), rows, tuple(left_out))


def _plain(checkpoint: Checkpoint, tensors: Mapping[str, Rows]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return new content by the names of tensors in the files, in which stored rows are several tensors."""
    plain: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for name, rows in tensors.items():
        parts, changes = ({name: rows}, {}) if isinstance(rows, Tensor) else checkpoint.stored_tensors(name, rows)
        plain, metadata = plain | parts, metadata | changes
    return plain, metadata


def _check_formats(checkpoint: Checkpoint, tensors: Mapping[str, Rows]) -> None:
    """Raise a `CheckpointError` if a checkpoint stores a weight in another format than its new rows have."""
    for name, rows in tensors.items():
        stored = checkpoint.stored(name)
        old, new = None if stored is None else stored[0], None if isinstance(rows, Tensor) else rows.format
        if old != new:
            formats = ("floating point" if each is None else each.name for each in (old, new))
            raise CheckpointError("{} stores {} as {}, and new rows are {}.".format(checkpoint.name, name, *formats))


def _check_precision(checkpoint: Checkpoint, folder: Path, copies: Mapping[str, Mapping[str, str]]) -> None:
    """Raise a `CheckpointError` if a second copy has numbers in floating point for stored rows of the checkpoint."""
    for file, keys in copies.items():
        infos = read_header(folder / file).tensors
        if dense := [name for name, key in keys.items() if is_dense(infos.get(name)) and checkpoint.stored(key)]:
            raise CheckpointError(
                f"{file} has {dense[0]} in floating point, and {checkpoint.name} has quantised rows: edit the "
                f"vocabulary of the folder instead."
            )


def _expected_shapes(checkpoint: Checkpoint, old_rows: int, rows: int) -> dict[str, tuple[int, ...]]:
    """Return the new shape of each tensor of a checkpoint that follows the vocabulary, by its family's record.

    A per-layer table that lacks tokens is among them, with the rows that it would have. Of an unknown family nothing is
    known, and the result is empty.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rule in tensor_rules(checkpoint).items():
        shape = [] if rule is None or rule.end is None else [*checkpoint.matrix_info(name).shape]
        if rule is not None and shape and shape[rule.axis] == old_rows:
            shape[rule.axis] = rows
            shapes[name] = tuple(shape)
        elif rule is not None and rule.end == "per_layer":
            shapes[name] = (rows, *shape[1:])
    return shapes


def copy_with_tensors(
    source: Path, target: Path, header: Header, changed: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a copy of one safetensors file in which some tensors are replaced; the order of the tensors stays.

    A copy of the copy with the old tensors has the bytes of the old file. `changed` may have other shapes; values of
    `metadata` that the old file lacks are ignored.
    """
    metadata = {key: metadata.get(key, value) for key, value in header.metadata.items()}
    sizes = {
        name: (changed[name].shape, changed[name].numel() * info.torch_dtype.itemsize)
        if name in changed
        else (info.shape, info.nbytes)
        for name, info in header.tensors.items()
    }
    with source.open("rb") as old, target.open("wb") as new:
        new.write(header_of_copy(old, sizes, metadata))
        for name, info in header.tensors.items():
            if name in changed:
                write_tensor(new, changed[name], info.torch_dtype)
            else:
                copy_bytes(old, new, info)


def _rewrite_json(
    folder: Path,
    checkpoint: Checkpoint,
    old_rows: int,
    sizes: Mapping[str, int],
    changed: Mapping[str, Tensor],
    numel: int,
) -> None:
    """Update the numbers of rows in `config.json` and `params.json`, and the sizes in the shard index.

    A file that is missing stays missing, and a file that states no such sizes stays as it is. `sizes` has the number of
    rows of the new table for each configuration key. `numel` is the number of added numbers; a matrix of stored rows
    counts V D, as in mlx-lm.
    """
    config = folder / CONFIG
    if config.is_file():
        content = read_json(config)
        text = content.get("text_config")
        text = text if isinstance(text, dict) and "vocab_size" in text else content
        new = {key: size for key, size in sizes.items() if text.get(key, size) != size}
        if new:
            text.update(new)
            write_json(config, content)
    params, rows = folder / PARAMS, sizes.get("vocab_size", old_rows)
    if rows != old_rows and params.is_file() and (content := read_json(params)).get("vocab_size") == old_rows:
        write_json(params, {**content, "vocab_size": rows})
    index = folder / INDEX
    if index.is_file() and changed:
        content = read_json(index)
        metadata = content.get("metadata")
        if isinstance(metadata, dict):
            infos = {name: checkpoint.info(name) for name in changed}
            nbytes = sum(
                tensor.numel() * infos[name].torch_dtype.itemsize - infos[name].nbytes
                for name, tensor in changed.items()
            )
            for key, added in (("total_size", nbytes), ("total_parameters", numel)):
                if isinstance(metadata.get(key), int | float):
                    metadata[key] += added
        write_json(index, content)
