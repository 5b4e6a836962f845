"""Read the LM head of a checkpoint: its rows, its bias, and the transform before them."""

from typing import Any

import torch
from torch import Tensor

from embedlayer.checkpoints.reading.configuration import MOST_POSITIONS, is_tied, logit_factors
from embedlayer.checkpoints.reading.inputs import read_linear, read_norm, tensor_names
from embedlayer.checkpoints.reading.model import CheckpointModel
from embedlayer.checkpoints.reading.table import packed_table
from embedlayer.checkpoints.reading.tensors import is_in_block
from embedlayer.checkpoints.refusals import combined_error
from embedlayer.core.errors import CheckpointError
from embedlayer.families import BASE_CLASSES, HEAD_CLASSES
from embedlayer.families.field_types import Names, Presence
from embedlayer.families.records import AddedColumns, CountedRows, HeadSpec, WideRows
from embedlayer.heads.output import OutputHead
from embedlayer.heads.prediction import ACTIVATIONS, PredictionHead
from embedlayer.tables.table import TokenTable


def read_head(model: CheckpointModel, table: TokenTable, width: int) -> OutputHead | PredictionHead | None:
    """Read the LM head, tied to the table of the last stack or untied; `None` if the checkpoint has none."""
    spec, tensors = model.family.head, model.tensors
    if spec is None:
        return None
    dense_names = () if spec.dense is None else tensor_names(spec.dense.name, "weight")
    for names in (dense_names, spec.weight):
        if not tensors.has(names):
            tensors.refuse_quantised("head.weight", names)
    dense = spec.dense if spec.dense is not None and tensors.has(dense_names) else None
    if dense is not None:
        classes = _model_classes(model)  # a classifier may have a layer of the same name (ModernBERT)
        if classes and not _have_head(classes) and not tensors.has(spec.bias):
            return None
    elif spec.dense is not None and not (spec.dense.optional and width == table.embed_dim):
        refuse_missing_head(model, dense_names)
        return None
    output = _read_output(model, spec, table, width, "head" if dense is None else "head.output")
    if output is None or dense is None:
        return output
    activation = spec.activation
    if activation is not None and activation not in ACTIVATIONS:
        activation = str(model.config.get(activation, "gelu"))
    return PredictionHead(
        output,
        dense=read_linear(model, "head.dense", dense, (output.in_features, width)),
        activation=activation,
        norm=read_norm(model, "head.norm", spec.norm, output.in_features),
    )


def _read_output(model: CheckpointModel, spec: HeadSpec, table: TokenTable, width: int, key: str) -> OutputHead | None:
    """Read the rows and the bias of the head; `None` for a base model, which has no head."""
    tensors, has_dense = model.tensors, key != "head"
    rows = _untied_rows(model, spec, f"{key}.weight")
    presence: Presence = tensors.has(spec.bias) if spec.has_bias == "stored" else spec.has_bias
    has_bias = bool(spec.bias) and model.config.has(presence)
    classes = _model_classes(model)
    has_base_class = bool(classes) and all(name.endswith(BASE_CLASSES) for name in classes)
    is_base = has_base_class and not _have_head(classes) and not tensors.has(spec.bias)
    is_absent = rows is None and (is_base or not is_tied(spec, model.config.content))
    if is_absent or (rows is None and has_bias and not has_dense and not tensors.has(spec.bias)):
        if model.family.codes is None or model.family.codes.head is None:  # else the class names the heads of codes
            refuse_missing_head(model, spec.weight if is_absent else spec.bias)
        return None
    if rows is not None and f"{key}.weight" in tensors.names:
        _check_shape(model, spec, f"{key}.weight", table, width, has_dense=has_dense)
    vocab_size, embed_dim = (table.vocab_size, table.embed_dim) if rows is None else rows.shape
    if has_bias:
        _read_bias(model, f"{key}.bias", spec.bias, vocab_size)
    with model.config.naming_file():
        factors = logit_factors(spec, model.config.content, table.embed_dim)
    weight, module = f"{key}.weight", f"{key}.rows"
    if rows is None:
        source: dict[str, Any] = {"table": table}
    elif weight in tensors.stored:
        source = {"rows": packed_table(model, weight, module, rows.dtype)}
    else:
        source = {"vocab_size": vocab_size, "embed_dim": embed_dim}
    return OutputHead(**source, bias=has_bias, **factors)


def _check_shape(
    model: CheckpointModel, spec: HeadSpec, key: str, table: TokenTable, width: int, *, has_dense: bool
) -> None:
    """Check the shape of an untied head's rows: one for each row of the table, of the width of hidden states.

    The width of a head behind a projection is checked when the projection is read. Rows that were computed from several
    tensors, or cut to those that count, have no name and are not checked.
    """
    tensors, (rows, columns) = model.tensors, model.tensors.by_key[key].shape
    expected = tensors.by_key[_tied_to(model)].shape[0] - model.family.extra_rows
    hidden, widths = width, {width, table.embed_dim, model.config.get("hidden_size", width)}
    if isinstance(spec.rows, WideRows):
        hidden = width * spec.rows.hidden
        widths = {hidden}
    if rows != expected or (not has_dense and columns not in widths):
        raise CheckpointError(
            f"{tensors.config_file}: the head {tensors.names[key][0]} has shape {[rows, columns]} where "
            f"[{expected}, {hidden}] fits the table. {tensors.remedy}"
        )


def _read_bias(model: CheckpointModel, key: str, names: Names, vocab_size: int) -> None:
    """Read the bias of the head, which is stored as `(V,)` or `(1, V)`."""
    tensors = model.tensors
    stored_names = tensors.checkpoint.find(*names)
    is_matrix = bool(stored_names) and len(tensors.checkpoint.info(stored_names[0]).shape) == 2
    bias = tensors.require(key, names, "bias of the head", (1, vocab_size) if is_matrix else (vocab_size,))
    tensors.by_key[key] = bias.flatten()
    tensors.names[key] = tuple(name for name in stored_names if tensors.checkpoint.is_same(stored_names[0], name))


def _model_classes(model: CheckpointModel) -> list[str]:
    """Return the names of the model classes that the configuration states as `architectures`; may be empty."""
    classes = model.tensors.checkpoint.config.get("architectures")
    return [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []


def _have_head(classes: list[str]) -> bool:
    """Return whether one of these model classes of transformers has an LM head."""
    return any(name.endswith(HEAD_CLASSES) for name in classes)


def refuse_missing_head(model: CheckpointModel, names: Names) -> None:
    """Raise a `CheckpointError` if the configuration names a model with an LM head, whose tensors are missing."""
    classes, tensors = _model_classes(model), model.tensors
    if _have_head(classes):
        raise CheckpointError(
            f"{model.config.file}: {' or '.join(names)} of a {', '.join(classes)} is missing. {tensors.remedy} If the "
            f"checkpoint is meant to have no head, remove architectures."
        )


def _tied_to(model: CheckpointModel) -> str:
    """Return the key of the table that a tied head has: that of the decoder, if it has its own."""
    return "decoder.table.weight" if "decoder.table.weight" in model.tensors.by_key else "table.weight"


def _untied_rows(model: CheckpointModel, spec: HeadSpec, key: str) -> Tensor | None:
    """Read the rows of an untied head into `model.tensors`, and return them; `None` if it has no rows of its own.

    The configuration may say that the head is tied while the checkpoint stores rows for it. Rows that equal the token
    table count as tied: the result is `None`, and the table's names list them as a copy. Other rows are read as an
    untied head, with a sentence in the notes unless the family always ties. A head whose rows are not one stored tensor
    has no names: it cannot be written back.
    """
    tensors, tied = model.tensors, is_tied(spec, model.config.content)
    tied_to = _tied_to(model)
    copies = tensors.names.get(tied_to, ())
    names = [name for name in tensors.matrices(spec.weight) if name not in copies and not is_in_block(name)]
    if isinstance(spec.rows, AddedColumns):
        columns = tensors.checkpoint.find(*spec.rows.names)
        if columns and 0 not in tensors.checkpoint.info(columns[0]).shape:
            if not names and not tied:
                return None
            parts = copies[0] if tied else names[0], columns[0]
            if any(tensors.checkpoint.stored(each) is not None for each in parts):
                raise combined_error(tensors.checkpoint, "head", *parts)
            rows = tensors.by_key[tied_to] if tied else tensors.read(key, names[0])
            more = tensors.read(key, columns[0]).T  # `(columns, V)`
            tensors.by_key[key] = torch.cat([rows, more.to(rows.dtype)], dim=1)
            del tensors.names[key]
            return tensors.by_key[key]
    if not names:
        return None
    if tied:
        table = copies[0]
        if tensors.checkpoint.is_same(table, names[0]):
            tensors.names[tied_to] += (names[0],)
            return None
        if spec.tied != "always":
            tensors.notes.append(
                f"the configuration ties the head to the table, but {names[0]} and {table} hold other numbers: the "
                f"head is read as untied."
            )
    rows = tensors.read(key, names[0])
    if isinstance(spec.rows, CountedRows):
        rows = _counted_rows(model, spec.rows, key, rows, tensors.by_key[tied_to].shape[0])
    tensors.count_nonfinite("head", key, rows)
    return rows


def _counted_rows(model: CheckpointModel, spec: CountedRows, key: str, rows: Tensor, table_rows: int) -> Tensor:
    """Return the rows of a head that count, without stored rows beyond the number in the configuration.

    Without that number, or if it is larger than the number of rows, all rows count.
    """
    if model.config.get(spec.key) is None:
        return rows
    count, tensors = model.config.whole(spec.key, most=MOST_POSITIONS), model.tensors
    if count <= rows.shape[0] and count < max(rows.shape[0], table_rows):
        rows = tensors.by_key[key] = rows[:count]
        if key in tensors.stored:
            tensors.stored[key] = tensors.stored[key].take(slice(count))
        del tensors.names[key]  # there is not one row for each token, so they cannot be written back
    return rows
