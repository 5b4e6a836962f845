"""Sentences about the tables of a checkpoint that are not read with its embedding layer."""

from collections.abc import Iterator

from embedlayer.checkpoints.reading.model import CheckpointModel
from embedlayer.checkpoints.reading.tensors import is_in_block
from embedlayer.checkpoints.refusals import NAMED, table_names
from embedlayer.errors import CheckpointError
from embedlayer.families import UNKNOWN
from embedlayer.families.records import OtherTable


def other_tables(model: CheckpointModel) -> Iterator[str]:
    """Yield a sentence about each table of the checkpoint that the record lists as not read."""
    spec, tables = model.family.per_layer, list(model.family.other_tables)
    if spec is not None and "per_layer.table.weight" not in model.tensors.names:
        tables.append(OtherTable(spec.table, "each block reads its own columns of these rows"))
    for table in tables:
        for name in sorted(model.tensors.checkpoint.find(table.name), key=is_in_block):
            yield f"{name}, {model.tensors.sizes(name)}, is not read: {table.use}."


def unread_copies(model: CheckpointModel) -> Iterator[str]:
    """Yield the names of tensors that are called like the token table and have its shape, and were not read."""
    tensors = model.tensors
    table = tensors.names.get("table.weight")
    if not table or model.family is UNKNOWN:
        return
    read_names = {name for names in tensors.names.values() for name in names}
    shape = tensors.checkpoint.info(table[0]).shape
    for name in tensors.matrices(model.family.table):
        if name not in read_names and tensors.checkpoint.info(name).shape == shape:
            yield name


def refuse_other_input(model: CheckpointModel) -> None:
    """Raise an error if the checkpoint has a table whose rows are a part of the input of the first block.

    Raises:
        CheckpointError: It has one.
    """
    tensors = model.tensors
    for table in model.family.other_tables:
        for name in tensors.checkpoint.find(table.name) if table.is_input else ():
            raise CheckpointError(
                f"{tensors.checkpoint.name}: {name}, {tensors.sizes(name)}, is not read, and {table.use}: the input of "
                f"the first block is not computed from {tensors.names['table.weight'][0]} alone."
            )


def note_other_inputs(model: CheckpointModel) -> None:
    """Add a sentence to the notes if the checkpoint has further tables of its input, or may have some.

    In an unknown family these are all tables that are found by their names, unless `vocab_size` decides.
    """
    tensors, checkpoint = model.tensors, model.tensors.checkpoint
    table_copies = tensors.names["table.weight"]
    first = table_copies[0]
    if model.family is UNKNOWN:
        is_stated = model.config.get("vocab_size") == checkpoint.info(first).shape[0]
        others = [] if is_stated else [name for name in table_names(checkpoint) if not is_in_block(name)]
    else:
        inputs = [table.name for table in model.family.other_tables if table.is_input]
        others = checkpoint.find(*inputs)
    others = [name for name in others if name not in table_copies and not tensors.is_same(name, first)]
    if others:
        listed = ", ".join(f"{name} ({tensors.sizes(name)})" for name in others[:NAMED])
        tensors.notes.append(
            f"{first} ({tensors.sizes(first)}) was read, and the checkpoint also has {listed}"
            f"{', ...' if len(others) > NAMED else ''}: load(..., table_only={others[0]!r}) reads another one."
        )
