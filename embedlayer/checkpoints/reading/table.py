"""Read the token table of a checkpoint, and tell which of its other tables are not read."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.checkpoints.reading.configuration import factor_value, is_tied
from embedlayer.checkpoints.reading.model import CheckpointModel
from embedlayer.checkpoints.reading.tensors import CheckpointTensors, is_in_block
from embedlayer.checkpoints.refusals import NAMED, combined_error, table_advice, table_names
from embedlayer.core.errors import CheckpointError
from embedlayer.families import OTHER_WORDS, UNKNOWN
from embedlayer.families.field_types import Names
from embedlayer.families.records import FoldedRows, OtherTable
from embedlayer.formats.gguf import GGUFRows
from embedlayer.formats.layouts import GGUFBlocks
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.gguf_rows import GGUFEmbedding
from embedlayer.tables.packed_rows import PackedRows
from embedlayer.tables.quantized import QuantizedEmbedding
from embedlayer.tables.stored_embedding import StoredEmbedding
from embedlayer.tables.table import TokenTable


def read_rows(model: CheckpointModel) -> Tensor:
    """Read the rows of the token table, `(V, D)`; on the meta device for stored rows (`CheckpointTensors.stored`).

    If no dtype was requested, all later tensors are read in the dtype of the rows.
    """
    tensors = model.tensors
    name, *others = find_table(model)
    rows = tensors.read("table.weight", name, aliases=tuple(o for o in others if tensors.checkpoint.is_same(name, o)))
    tensors.dtype = rows.dtype
    if isinstance(model.family.rows, FoldedRows):
        rows = _fold(tensors, model.family.rows, rows)
        _check_sizes(model, name, rows.shape[0] if tensors.names else None, rows.shape[1])
    tensors.count_nonfinite("table", "table.weight", rows)
    return rows


def new_table(model: CheckpointModel, rows: Tensor, *, key: str = "table.weight", is_scaled: bool = True) -> TokenTable:
    """Return a new table of the size and dtype of `rows`, with initial weights; the caller assigns its tensors.

    It has the padding row of the model, and the factor of the family if `is_scaled`. If `key` has stored rows, it is
    the table of their format, and its tensors are added to `model.tensors`.
    """
    factor = model.family.scale if is_scaled else None
    with model.config.naming_file():
        scale = None if factor is None else factor_value(factor, model.config.content, rows.shape[1])
    return table_with_scale(model, rows, key, scale, round_scale=factor is not None and factor.rounding == "rows")


def table_with_scale(
    model: CheckpointModel, rows: Tensor, key: str, scale: float | None, *, round_scale: bool
) -> PackedRows | TokenEmbedding:
    """Return what `new_table` does, with a factor; `round_scale` says whether the model rounds it."""
    stored, pad = model.tensors.stored.get(key), model.padding_id
    if pad is not None and 0 <= pad < rows.shape[0]:
        with torch.device("cpu"):  # layers are built on the meta device
            row = rows[pad] if stored is None else stored.take(slice(pad, pad + 1)).dequantise(torch.float32)
        pad = None if row.any() else pad  # a row that was trained can be trained again
    else:
        pad = None
    options: dict[str, Any] = {"padding_idx": pad, "scale": scale}
    if stored is not None:
        options["round_scale"] = round_scale and stored.format.rounds_factor
        return packed_table(model, key, key.removesuffix(".weight"), rows.dtype, **options)
    return TokenEmbedding(*rows.shape, dtype=rows.dtype, round_scale=round_scale, **options)


def packed_table(
    model: CheckpointModel, key: str, module: str, dtype: torch.dtype | None, **options: Any
) -> PackedRows:
    """Return a new table for the stored rows of `key`, and add its tensors to `model.tensors`."""
    stored = model.tensors.stored[key]
    record, (vocab_size, width) = stored.format, stored.shape
    options["dtype"] = dtype
    if isinstance(record, GGUFRows):
        model.tensors.use_stored(key, module, {"packed": "packed"})
        bits = {"Q4_0": 4, "Q8_0": 8}.get(record.block_type)
        if bits is not None:
            return QuantizedEmbedding(vocab_size, width, bits, layout=GGUFBlocks(), **options)
        return GGUFEmbedding(vocab_size, width, record.block_type, **options)
    model.tensors.use_stored(key, module, {part: f"parts.{part}" for part in stored.rows | stored.shared})
    return StoredEmbedding(vocab_size, record, **options)


def read_second_table(model: CheckpointModel, names: Names, key: str) -> TokenTable | None:
    """Read the decoder's token table of an encoder-decoder model; `None` if both inputs read the encoder's."""
    tensors = model.tensors
    name = next((each for each in tensors.matrices(names) if each not in tensors.names["table.weight"]), None)
    if name is None:
        return None
    rows = tensors.read("decoder.table.weight", name)
    _check_sizes(model, name, *rows.shape, key=key)
    tensors.count_nonfinite("decoder's table", "decoder.table.weight", rows)
    return new_table(model, rows, key="decoder.table.weight")


def find_table(model: CheckpointModel) -> list[str]:
    """Return the names of the token table and of its equal copies, after checks of shape and dtype."""
    tensors, checkpoint = model.tensors, model.tensors.checkpoint
    if model.table_name:
        is_there = model.table_name in checkpoint.names or checkpoint.stored(model.table_name) is not None
        names = [model.table_name] if is_there else []
        if not names or len(tensors.info(model.table_name).shape) != 2:
            advice = table_advice(checkpoint, is_found=False)
            raise CheckpointError(f"{checkpoint.name} has no matrix {model.table_name!r}. {advice}".rstrip())
    else:
        names = _only_table(model, _candidates(model))
    info = tensors.info(names[0])
    if 0 in info.shape:
        raise CheckpointError(f"{info.file}: the table {names[0]} is empty: its shape is {list(info.shape)}.")
    tensors.refuse_quantised("table.weight", (names[0],), names[0])
    if not (isinstance(model.family.rows, FoldedRows) or model.table_name):
        _check_sizes(model, names[0], *info.shape, key=model.family.vocab_size)
    return names


def _candidates(model: CheckpointModel) -> list[str]:
    """Return the names of the matrices that may be the token table, the preferred one first."""
    family, config, tensors = model.family, model.config, model.tensors
    checkpoint, vocab_size = tensors.checkpoint, model.config.get(family.vocab_size)
    if family.codes is not None and not family.table:
        raise CheckpointError(f"{checkpoint.name} has no token table: its IDs are codes of several streams.")
    candidates = tensors.matrices(family.table)
    if not candidates and family.head is not None and is_tied(family.head, config.content):
        candidates = tensors.matrices(family.head.weight)
        if family is UNKNOWN:
            candidates = [name for name in candidates if tensors.info(name).shape[0] == vocab_size]
        if candidates:
            _refuse_rivals(model, candidates)
    if candidates:
        return candidates
    tensors.refuse_quantised("table.weight", family.table)
    others = [tensors.info(name).shape[0] for name in table_names(checkpoint)]
    is_elsewhere = vocab_size in others or (others and family is UNKNOWN)
    remedy = "" if is_elsewhere else f" {tensors.remedy} Or check model_type in {config.file}."
    raise CheckpointError(
        f"{checkpoint.name} has no table of token rows: no matrix is called {' or '.join(family.table)}.{remedy}"
    )


def _only_table(model: CheckpointModel, candidates: list[str]) -> list[str]:
    """Return the names of the token table: the preferred one and its equal copies.

    Candidates with fewer rows than the configuration's `vocab_size` are no token tables, unless all have fewer; nor are
    those of a numbered block if there are others. Several with the same end of their names must be equal.
    """
    tensors, needed = model.tensors, model.config.get(model.family.vocab_size) or 0
    first, *others = [name for name in candidates if tensors.info(name).shape[0] >= needed] or candidates
    names = [first, *(name for name in others if tensors.checkpoint.is_same(name, first))]
    suffix = next((name for name in model.family.table if f".{first}".endswith(f".{name}")), first)
    rivals = [
        name
        for name in others
        if name not in names and f".{name}".endswith(f".{suffix}") and is_in_block(name) == is_in_block(first)
    ]
    if rivals:
        listed = ", ".join(f"{name} ({tensors.sizes(name)})" for name in (first, *rivals))
        raise CheckpointError(
            f"{tensors.checkpoint.name} has several tables called {suffix.removesuffix('.weight')}.weight: {listed}. "
            f"Which of them is that of the tokens is not known."
        )
    return names


def _refuse_rivals(model: CheckpointModel, heads: list[str]) -> None:
    """Raise a `CheckpointError` if a tied head stands for a missing table, and another matrix may be the table.

    That matrix has the shape of the head, other numbers, and no name of an embedding without a row for each token.
    """
    tensors, checkpoint = model.tensors, model.tensors.checkpoint
    for name in checkpoint.names:
        is_known = name in heads or is_in_block(name) or any(word in name for word in OTHER_WORDS)
        is_alike = checkpoint.info(name).shape == tensors.info(heads[0]).shape
        if is_alike and not is_known and not checkpoint.is_same(name, heads[0]):
            raise CheckpointError(
                f"{checkpoint.name} has no {' or '.join(model.family.table)}. {name} has the shape of the head "
                f"{heads[0]}, but other numbers: which of them is the table is not known. Rename the table."
            )


def _fold(tensors: CheckpointTensors, spec: FoldedRows, rows: Tensor) -> Tensor:
    """Compute model2vec's token table `rows[mapping] * weights[:, None]`, and keep it in the place of `rows`.

    Without a tensor `mapping` the rows keep their order; without a tensor `weights` they are not multiplied. With
    either, the table has no names, because it is not one stored tensor: `vocab.targets.folded_rows` moves or writes its
    tensors.
    """
    checkpoint, device = tensors.checkpoint, tensors.device
    mapping, weights = (checkpoint.find(name) for name in (spec.mapping, spec.weights))
    if (mapping or weights) and "table.weight" in tensors.stored:
        raise combined_error(checkpoint, "table", tensors.names["table.weight"][0], *mapping, *weights)
    if mapping or weights:
        tensors.names.clear()
    index = None
    if mapping:
        index = checkpoint.read(mapping[0], dtype=torch.int64, device=device)
        if index.dim() != 1 or not ((index >= 0) & (index < rows.shape[0])).all():
            raise CheckpointError(f"{checkpoint.name}: {mapping[0]} names rows beyond the {len(rows)} of the table.")
    factors = None
    if weights:
        factors = checkpoint.read(weights[0], device=device)
        size = len(rows) if index is None else len(index)
        if factors.shape != (size,):
            raise CheckpointError(f"{checkpoint.name}: {weights[0]} has shape {list(factors.shape)} for {size} tokens.")
    rows = fold_rows(rows, index, factors)
    tensors.by_key["table.weight"] = rows
    return rows


def fold_rows(
    rows: Float[Tensor, "R D"], mapping: Int[Tensor, " V"] | None, weights: Float[Tensor, " V"] | None
) -> Float[Tensor, "V D"]:
    """Return model2vec's token table `rows[mapping] * weights[:, None]`, computed in float32 or wider."""
    rows = rows if mapping is None else rows.index_select(0, mapping)
    if weights is None:
        return rows
    wide = torch.promote_types(rows.dtype, torch.float32)
    return (rows.to(wide) * weights[:, None]).to(rows.dtype)


def _check_sizes(
    model: CheckpointModel, name: str, vocab_size: int | None, width: int, *, key: str = "vocab_size"
) -> None:
    """Check that the token table has the sizes that the configuration states."""
    config, extra, remedy = model.config, model.family.extra_rows, model.tensors.remedy
    rows = config.get(key)
    if rows is not None and vocab_size not in (None, rows + extra):
        stated = f"{rows:,}, so {rows + extra:,} rows in this family" if extra else f"{rows:,}"
        raise CheckpointError(f"{config.file} says {key} {stated}, and {name} has {vocab_size:,} rows. {remedy}")
    width_key = config.first_key(model.family.width)
    if width_key is not None and config.get(width_key) != width:
        stated = config.get(width_key)
        raise CheckpointError(f"{config.file} says {width_key} {stated}, and {name} has width {width:,}. {remedy}")


def check_rows(model: CheckpointModel, key: str, config_keys: Names, *, more: int = 0) -> None:
    """Check that a table other than the token table has as many rows as the configuration states."""
    counts = {each: model.config.get(each) for each in config_keys if type(model.config.get(each)) is int}
    rows = model.tensors.by_key[key].shape[0]
    if counts and not any(rows in (count, count + more) for count in counts.values()):
        name, stated = model.tensors.names[key][0], " and ".join(f"{each} {count:,}" for each, count in counts.items())
        raise CheckpointError(f"{model.config.file} says {stated}, and {name} has {rows:,} rows.")


def other_tables(model: CheckpointModel) -> Iterator[str]:
    """Yield a sentence about each table of the checkpoint that the record lists as not read."""
    spec, tables = model.family.per_layer, list(model.family.other_tables)
    if spec is not None and "per_layer.table.weight" not in model.tensors.names:
        tables.append(OtherTable(spec.table, "each block reads its own columns of these rows"))
    for table in tables:
        try:
            names = sorted(model.tensors.checkpoint.find(table.name), key=is_in_block)
            sized = [f"{name}, {model.tensors.sizes(name)}" for name in names]
        except CheckpointError:
            sized = [f"{table.name}, quantised"]
        yield from (f"{each}, is not read: {table.use}." for each in sized)


def unread_copies(model: CheckpointModel) -> Iterator[str]:
    """Yield the names of tensors that are called like the token table and have its shape, and were not read."""
    tensors = model.tensors
    table = tensors.names.get("table.weight")
    if not table or model.family is UNKNOWN:
        return
    read_names = {name for names in tensors.names.values() for name in names}
    shape = tensors.info(table[0]).shape
    for name in tensors.matrices(model.family.table):
        if name not in read_names and tensors.info(name).shape == shape:
            yield name


def note_other_inputs(model: CheckpointModel) -> None:
    """Add a sentence to the notes if the checkpoint has further tables of its input, or may have some."""
    tensors, checkpoint = model.tensors, model.tensors.checkpoint
    # rows that are computed from several tensors have no name: `_fold`
    table_copies = tensors.names.get("table.weight") or find_table(model)
    first = table_copies[0]
    if model.family is UNKNOWN:
        is_stated = model.config.get("vocab_size") == tensors.info(first).shape[0]
        others = [] if is_stated else [name for name in table_names(checkpoint) if not is_in_block(name)]
    else:
        inputs = [table.name for table in model.family.other_tables if table.is_input]
        codes = () if model.family.codes is None else model.family.codes.table
        others = checkpoint.find(*inputs, *(name.format(0) for name in codes))
    others = [name for name in others if name not in table_copies and not tensors.checkpoint.is_same(name, first)]
    if others:
        listed = ", ".join(f"{name} ({tensors.sizes(name)})" for name in others[:NAMED])
        tensors.notes.append(
            f"{first} ({tensors.sizes(first)}) was read, and the checkpoint also has {listed}"
            f"{', ...' if len(others) > NAMED else ''}: load(..., table_only={others[0]!r}) reads another one."
        )
