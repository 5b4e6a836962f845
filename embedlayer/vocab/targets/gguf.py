"""GGUF files: rows and tokenizer of an edited copy. All other tensors and metadata are copied byte for byte.

A row is a whole number of blocks, so rows that are kept keep their bytes. New rows are quantised to the type of the
table where `gguf` can do so. Otherwise the whole table is written as `FALLBACK_TYPE`; a warning and the receipt say so.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.core.block_sizes import TABLE_ROWS
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning, VocabularyError
from embedlayer.families import GGUF_HEAD, GGUF_HEAD_BIAS, GGUF_PER_LAYER, GGUF_TABLE
from embedlayer.families.gguf import GGUF_OTHER_TABLES, has_no_token_rows
from embedlayer.formats.gguf import GGUFRows
from embedlayer.formats.stored import StoredRows
from embedlayer.io.gguf_files import (
    FALLBACK_TYPE,
    GGUFFile,
    NewTensor,
    read_gguf,
    row_bytes,
    write_gguf,
)
from embedlayer.io.safetensors_files import DTYPES
from embedlayer.tables.lookup import LookupTable
from embedlayer.tables.table import TokenTable
from embedlayer.tokenization.gguf_tokenizers import TOKEN_ID, check_kind, tokenizer_metadata, tokenizer_of
from embedlayer.tokenization.ids import USUAL_NAMES
from embedlayer.vocab.edit import ResolveEdit, TokenMap
from embedlayer.vocab.map import DROPPED, RowMap, RowTensor
from embedlayer.vocab.special_tokens import SpecialTokens
from embedlayer.vocab.targets.apply_rows import (
    EditResult,
    StoredTypes,
    apply_row_map,
    token_sources,
    unchanged_rows,
    written_rows,
)
from embedlayer.vocab.token_selection import shown_names
from embedlayer.vocab.tokenizer_edit import other_texts

ENDS = {GGUF_TABLE: "table", GGUF_HEAD: "head", GGUF_HEAD_BIAS: "head", GGUF_PER_LAYER: "per_layer"}
"""Tensors with a row for each token -> which initialisation computes new rows."""


def apply_to_gguf(source: Path, out: Path, resolve: ResolveEdit) -> EditResult:
    """Write the edited copy of a GGUF file, atomically; `source` does not change."""
    file = read_gguf(source)
    values = file.metadata
    num_rows = _number_of_rows(file)
    edit = resolve([tokenizer_of(values, source)], num_rows, True)
    row_map, tokens = edit.row_map, edit.tokens
    assert tokens is not None
    assert tokens.tokenizer is not None
    check_kind(tokens.tokenizer, values, source)
    new_ids = _ids_by_map(values, row_map.token_ids(tokens.merged).tolist(), tokens)
    _check_other_tensors(file, num_rows)
    adds = len(row_map.initialised) > 0
    tensors = {name: _old_rows(file, name, adds=adds) for name in ENDS if name in file.tensors}
    result = apply_row_map({name: old.rows for name, old in tensors.items()}, edit)
    new = {
        name: NewTensor(
            tensors[name].dtype, (row_map.size, *file.tensors[name].shape[1:]), rows.contiguous().view(torch.uint8)
        )
        for name, rows in result.items()
    }
    extra_space = _write(file, out, tokens.tokenizer, new, new_ids, row_map.size)
    kept_rows = row_map.sources[row_map.sources >= 0]
    stored_rows = {
        name: StoredTypes(file.tensors[name].dtype, old.dtype, max(old.changes[kept_rows].tolist(), default=0.0))
        for name, old in tensors.items()
    }
    return EditResult(edit, stored=stored_rows, extra_space_decoded=extra_space)


def write_into_gguf(
    table: TokenTable, tokenizer: Tokenizer, original: Path, out: Path, *, head: Tensor | LookupTable | None
) -> int:
    """Write a copy of a GGUF file with the rows of a table and the tokens of a tokenizer, atomically."""
    file = read_gguf(original)
    values = file.metadata
    num_rows, width = _number_of_rows(file), file.tensors[GGUF_TABLE].shape[1]
    check_kind(tokenizer, values, original)
    if width != table.embed_dim:
        raise CheckpointError(f"The rows have {table.embed_dim:,} numbers and those of {original} {width:,}.")
    if (head is None) != (GGUF_HEAD not in file.tensors):
        has = "an untied head and the table that is written has none" if head is None else "no head of its own"
        raise CheckpointError(f"{original} has {has}: both must have one, or neither.")
    if GGUF_HEAD_BIAS in file.tensors and num_rows != table.vocab_size:
        raise CheckpointError(f"{original} has {GGUF_HEAD_BIAS}, with another number of tokens than the table.")
    if num_rows != table.vocab_size:
        _check_other_tensors(file, num_rows)
    old_tokenizer = tokenizer_of(values, original)
    sources = token_sources(old_tokenizer, tokenizer, num_rows, table.vocab_size)
    if GGUF_PER_LAYER in file.tensors and not torch.equal(sources, torch.arange(num_rows)):
        raise CheckpointError(f"{original} has {GGUF_PER_LAYER} too: edit the vocabulary of the file itself.")
    new, num_unchanged = {}, 0
    for name, source in ((GGUF_TABLE, table), (GGUF_HEAD, head)):
        if source is not None:
            new[name], equal = _quantised_rows(file, name, source, sources)
            num_unchanged = equal if name == GGUF_TABLE else num_unchanged
    new_ids = RowMap(sources, num_rows).new_ids.tolist()
    by_name = {token: new_ids[token] for token in old_tokenizer.get_vocab(with_added_tokens=True).values()}
    changed = _ids_by_map(values, by_name, None)
    _write(file, out, tokenizer, new, changed, table.vocab_size)
    return num_unchanged


def _quantised_rows(file: GGUFFile, name: str, source: Tensor | LookupTable, sources: Tensor) -> tuple[NewTensor, int]:
    """Return a table in the type of a file, and the number of rows that keep the file's bytes."""
    stored = _stored_rows(file, name)
    record, is_dense = stored.format, file.tensors[name].dtype in DTYPES
    old = RowTensor(file.read(name)) if is_dense else RowTensor.of_stored(stored, None)
    unchanged = unchanged_rows(old, source, sources)
    if not unchanged.all() and not is_dense and not record.can_quantise:
        record, unchanged = GGUFRows(record.embed_dim, FALLBACK_TYPE), torch.zeros_like(unchanged)
        none = torch.zeros(1, *record.row_parts["packed"].shape, dtype=torch.uint8)
        old = RowTensor.of_stored(StoredRows(record, {"packed": none}, {}), None)
    packed = written_rows(old, source, sources, unchanged).view(torch.uint8)
    new = NewTensor(record.name, (len(sources), record.embed_dim), packed)
    _warn_of_type(file, name, new)
    return new, int(unchanged.sum())


def _stored_rows(file: GGUFFile, name: str) -> StoredRows:
    """Return the rows of a matrix as they are stored; numbers in floating point count as blocks of one."""
    info = file.tensors[name]
    return StoredRows(GGUFRows(info.shape[1], info.dtype), {"packed": file.stored_rows(name)}, {})


def _number_of_rows(file: GGUFFile) -> int:
    """Return the number of rows of the token table."""
    if GGUF_TABLE not in file.tensors or len(file.tensors[GGUF_TABLE].shape) != 2:
        raise CheckpointError(f"{file.path} has no matrix {GGUF_TABLE}.")
    rows, entries = file.tensors[GGUF_TABLE].shape[0], len(file.metadata.get("tokenizer.ggml.tokens", []))
    if rows != entries:
        raise CheckpointError(f"{file.path}: {GGUF_TABLE} has {rows:,} rows for {entries:,} tokens.")
    other = [name for name in ENDS if name in file.tensors and file.tensors[name].shape[0] != rows]
    if other:
        raise CheckpointError(f"{file.path}: {other[0]} must have {rows:,} rows, as {GGUF_TABLE} has.")
    return rows


def _check_other_tensors(file: GGUFFile, old: int) -> None:
    """Check by names and sizes that no other tensor has, or may have, a row for each of the `old` tokens."""
    ends = tuple(f".{name}.weight" for name in GGUF_OTHER_TABLES)
    if tables := [name for name in file.tensors if name.endswith(ends)]:
        raise CheckpointError(f"{file.path} is not edited: what new rows of {tables[:4]} hold is unknown.")
    others = [name for name, info in file.tensors.items() if old in info.shape and name not in ENDS]
    others = [name for name in others if not has_no_token_rows(name)]
    if others:
        raise CheckpointError(f"{file.path} is not edited: {others[:4]} may have rows of its {old:,} tokens.")


class _OldRows(NamedTuple):
    """The old rows of a tensor in the type in which it is written."""

    dtype: str
    rows: RowTensor
    changes: Tensor  # largest absolute change of a finite number of each row, `(V,)`


def _old_rows(file: GGUFFile, name: str, *, adds: bool) -> _OldRows:
    """Return the old rows of a tensor, all requantised, with a warning, if new ones cannot be written in their type."""
    info, end = file.tensors[name], ENDS[name]
    changes = torch.zeros(info.shape[0])
    if info.dtype in DTYPES:
        return _OldRows(info.dtype, RowTensor(file.read(name), end), changes)  # type: ignore[arg-type]
    stored, dtype = _stored_rows(file, name), info.dtype
    if adds and not stored.format.can_quantise:
        dtype, parts, record = FALLBACK_TYPE, [], GGUFRows(stored.format.embed_dim, FALLBACK_TYPE)
        for start in range(0, len(changes), step := TABLE_ROWS["cpu"]):
            numbers = stored.take(slice(start, start + step)).dequantise(torch.float32)
            parts.append(record.quantise(numbers, {}))
            change = (record.dequantise(parts[-1], {}, torch.float32) - numbers).abs()
            changes[start : start + step] = change.nan_to_num(0.0, 0.0).amax(1)
        stored = StoredRows(record, {"packed": torch.cat([part["packed"] for part in parts])}, {})
        _warn_of_type(file, name, NewTensor(dtype, info.shape, stored.row_bytes))
    return _OldRows(dtype, RowTensor.of_stored(stored, end), changes)  # type: ignore[arg-type]


def _warn_of_type(file: GGUFFile, name: str, new: NewTensor) -> None:
    """Warn if a tensor is written in another type than before, with the bytes per row."""
    info = file.tensors[name]
    if new.dtype != info.dtype:
        before, after = (row_bytes(dtype, info.shape[1]) for dtype in (info.dtype, new.dtype))
        warnings.warn(
            f"{name} is stored as {info.dtype}, to which the package gguf cannot quantise new rows: the whole tensor "
            f"is written as {new.dtype}, {(after - before) * new.shape[0]:,} bytes more for {new.shape[0]:,} rows.",
            EmbedLayerWarning,
            stacklevel=4,
        )


def _ids_by_map(values: Mapping[str, Any], ids: Any, tokens: TokenMap | None) -> dict[str, int]:
    """Return the new ID of each special token that the metadata names."""
    roles: SpecialTokens | None = None if tokens is None else tokens.special_tokens
    new_tokenizer = None if tokens is None else tokens.tokenizer
    vocabulary = {} if new_tokenizer is None else new_tokenizer.get_vocab(with_added_tokens=True)
    new_ids: dict[str, int] = {}
    for key, old in values.items():
        if not key.endswith(TOKEN_ID) or type(old) is not int:
            continue
        role = key.rpartition(".")[2].removesuffix("_id").replace("padding", "pad").replace("unknown", "unk")
        if roles is not None and role in roles:
            new_ids[key] = vocabulary[roles[role]]
            continue
        try:
            new = ids[old]
        except (KeyError, IndexError):
            continue  # no token before, none afterwards
        if new == DROPPED and roles is not None:
            name = f" Name one with special={{{role!r}: TOKEN}} of embedlayer.vocab.transplant." * (role in USUAL_NAMES)
            raise VocabularyError(
                f"{key} of the file is token {old}, which the new tokenizer lacks, and it names no {role}.{name}"
            )
        if new == DROPPED:
            raise VocabularyError(f"{key} is token {old}, which would be removed: keep it.")
        new_ids[key] = new
    return new_ids


def _write(
    file: GGUFFile, out: Path, tokenizer: Tokenizer, tensors: Mapping[str, NewTensor], ids: Mapping[str, int], rows: int
) -> tuple[int, ...]:
    """Write a copy of a file with new tensors, and the metadata of a new tokenizer."""
    values = file.metadata
    sizes = {key: rows for key in values if key.endswith(".vocab_size")}
    metadata = {**tokenizer_metadata(tokenizer, {**values, **ids}, rows, file.path), **ids, **sizes}
    extra_space = _with_extra_space(tokenizer, tokenizer_of({**values, **metadata}, file.path))
    write_gguf(file, out, metadata=metadata, tensors=tensors)
    return extra_space


def _with_extra_space(tokenizer: Tokenizer, written: Tokenizer) -> tuple[int, ...]:
    """Return the IDs of added tokens around which only the written metadata decode an extra space, and warn of them."""
    # GGUF metadata cannot state the decoder step that removes the space behind an added token, so llama.cpp keeps it.
    added = {token.content: row for row, token in tokenizer.get_added_tokens_decoder().items() if not token.special}
    if changed := other_texts(tokenizer, written, added):
        texts = next(iter(changed.values()))
        before, after = min(texts, key=lambda pair: (len(pair[0]) - len(pair[1]), len(pair[0])))
        warnings.warn(
            f"Text around {len(changed):,} of the added tokens gets an extra space when it is decoded from the GGUF "
            f"file{shown_names(':', list(changed))}. For example {before!r} becomes {after!r}. The new tokenizer has a "
            f"rule that removes the space, and a GGUF file has no place for it; token IDs are equal. A merge (`vocab "
            f"suggest`, AddedMerge) needs no such rule.",
            EmbedLayerWarning,
            stacklevel=4,
        )
    return tuple(added[term] for term in changed)
