"""Edits of one of K streams of codes: live layers, tables and models of transformers, and folders of models."""

import warnings
from functools import partial
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from embedlayer.census.files import files_left_out
from embedlayer.census.tensors import models_in
from embedlayer.checkpoints.layer import load
from embedlayer.checkpoints.reader import CONFIG, Checkpoint
from embedlayer.checkpoints.reading.model import checkpoint_model
from embedlayer.checkpoints.second_copies import find_copies
from embedlayer.checkpoints.writer import write_tensors
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning, SizeError
from embedlayer.core.held_parameters import held_parameters
from embedlayer.io.files import read_json, write_json
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.streams import StreamTable
from embedlayer.vocab.edit import ModelResult, ResolveEdit
from embedlayer.vocab.targets.apply_rows import EditResult
from embedlayer.vocab.targets.folder_files import GENERATION
from embedlayer.vocab.targets.live import assignment, do_all, replace_data
from embedlayer.vocab.targets.module_parts import dotted
from embedlayer.vocab.targets.module_settings import Assignment
from embedlayer.vocab.targets.stream_layers import streams_of_layer
from embedlayer.vocab.targets.stream_models import (
    SizeChange,
    changed_entries,
    named_streams,
    spec_and_config,
    streams_of_model,
)
from embedlayer.vocab.targets.stream_rows import Streams, edit_streams
from embedlayer.vocab.targets.unmoved_state import watch_unmoved


def apply_to_stream(
    module: nn.Module,
    stream: int,
    resolve: ResolveEdit,
    optimizer: Optimizer | None = None,
    *,
    used: int | None = None,
) -> ModelResult:
    """Apply an edit of one stream, or the undo of one, to a live module in place; if it fails, nothing is changed.

    Gradients of the tensors are set to `None`. Arguments and errors are those of `edit_streams`.

    Raises:
        SizeError: The module has no streams, or several sets of streams, or rows that cannot be moved.
        VocabularyError: A configuration names a code that the edit moves or removes.
    """
    held = held_parameters(module, optimizer, [])
    streams = streams_of(module)
    for table in [part.rows for part in module.modules() if isinstance(part, StreamTable)]:
        if isinstance(table, TokenEmbedding) and (updates := table.pending_updates) is not None:
            updates.apply_all(table.weight, moments=True)
            updates.detach()
    edited = edit_streams(streams, stream, resolve, optimizer, used)
    parts = {part.name: part.tensor for part in streams.rows if part.name in edited.tensors}
    assignments: list[Assignment] = []
    for name, tensor in parts.items():
        replace = partial(replace_data, tensor)
        assignments += [assignment(tensor, "grad", None)]
        assignments += [(partial(replace, edited.tensors[name]), partial(replace, tensor.detach()))]
    for name, _, key, state, _ in edited.states:
        if name in edited.tensors:
            replace = partial(state.__setitem__, key)
            assignments += [(partial(replace, edited.tensors[name]), partial(replace, state[key]))]
    do_all([*assignments, *streams.resize(edited.sizes, stream, edited.result.edit.new_ids)])
    moved = {name: tensor for name, tensor in parts.items() if id(tensor) in held}
    watch_unmoved(moved, edited.result.edit.row_map, optimizer, is_undo=used is not None)
    return edited.result


def streams_of(module: nn.Module) -> Streams:
    """Return the streams of a live module: a model of transformers, a layer, or a `StreamTable`.

    Raises:
        SizeError: It has no streams, several sets of streams, or rows that cannot be moved.
    """
    for name, model in models_in(module).items():
        if (streams := streams_of_model(model)) is not None:
            return streams._replace(rows=[part._replace(name=dotted(name, part.name)) for part in streams.rows])
    return streams_of_layer(module)


def apply_to_stream_of_checkpoint(folder: Path, partial_copy: Path, stream: int, resolve: ResolveEdit) -> EditResult:
    """Write the edited copy of a checkpoint folder into `partial_copy`; `folder` does not change.

    Arguments are those of `apply_to_checkpoint` and `edit_streams`.

    Raises:
        CheckpointError: The checkpoint is damaged or quantised, has no streams, or a second copy of their rows.
        VocabularyError: A configuration names a code that the edit moves or removes.
        SizeError: There is no such stream, or it is one of text.
    """
    checkpoint = Checkpoint.open(folder)
    with warnings.catch_warnings(action="ignore", category=EmbedLayerWarning):
        layer = load(folder)  # it checks sizes and configuration
    contents = {name: read_json(folder / name) for name in (CONFIG, GENERATION) if (folder / name).is_file()}
    known = spec_and_config(contents.get(CONFIG, {}))
    if known is None or layer.codes is None:
        raise CheckpointError(f"{folder} has no streams of codes: leave stream out.")
    if stream == layer.codes.text_stream:
        raise SizeError(
            f"Stream {stream} of {folder} is its text: save its layer, load(...).save_pretrained(...), and edit that."
        )
    with_defaults = checkpoint_model(checkpoint, None, "cpu").of_decoder().config.content
    streams = named_streams(known[0], with_defaults, checkpoint.names, checkpoint.read)
    edited = edit_streams(streams, stream, resolve)
    left_out = files_left_out(folder)
    if copies := find_copies(folder, checkpoint, {part.name: part.name for part in streams.rows}, left_out):
        raise CheckpointError(f"{next(iter(copies))} has a second copy of the rows: move it out of {folder}.")
    change = SizeChange(streams.sizes[-1], edited.sizes[-1], len(streams.alike), edited.result.edit.new_ids)
    others = [content for name, content in contents.items() if name != CONFIG]
    for owner, key, value in changed_entries(*known, others, change):
        owner[key] = value
    shapes = {name: tuple(tensor.shape) for name, tensor in edited.tensors.items()}
    table = next(iter(edited.tensors))
    write_tensors(edited.tensors, folder, partial_copy, table=table, copies={}, left_out=left_out, shapes=shapes)
    for name, content in contents.items():
        if content != read_json(folder / name):
            write_json(partial_copy / name, content)
    return EditResult(edited.result.edit, left_out)
