"""One of K streams of codes: how an edit moves its rows, and with them the rows of the streams after it.

The vocabulary of a stream is the codes of this stream. In a `StreamTable`, streams may have different sizes. A model of
transformers states one size for all its streams, so that after an edit of one the others have as many rows, of which
the last belong to no code.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from embedlayer.census.configurations import entries_of
from embedlayer.census.files import files_left_out
from embedlayer.census.tensors import models_in
from embedlayer.checkpoints.layer import EmbeddingLayer, load
from embedlayer.checkpoints.reader import CONFIG, Checkpoint
from embedlayer.checkpoints.reading.codes import ROWS
from embedlayer.checkpoints.reading.model import checkpoint_model
from embedlayer.checkpoints.second_copies import find_copies
from embedlayer.checkpoints.writer import write_tensors
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning, SizeError, VocabularyError
from embedlayer.core.held_parameters import held_parameters
from embedlayer.families import MULTIMODAL, family_of
from embedlayer.families.records import CodeHeadSpec, CodeSpec, End, Family, Names
from embedlayer.heads.output import OutputHead
from embedlayer.heads.streams import StackedRows, StreamHead
from embedlayer.inputs.codes import CodeStreams
from embedlayer.io.files import JsonObject, read_json, write_json
from embedlayer.io.safetensors_files import INDEX
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.streams import StreamTable
from embedlayer.vocab.edit import ResolveEdit
from embedlayer.vocab.map import RowTensor
from embedlayer.vocab.targets.apply_rows import EditResult, ModelResult, apply_row_map
from embedlayer.vocab.targets.folder_files import GENERATION
from embedlayer.vocab.targets.live import assignment, do_all, replace_data
from embedlayer.vocab.targets.module_parts import dotted
from embedlayer.vocab.targets.module_settings import Assignment
from embedlayer.vocab.targets.optimizer_rows import NewState, state_with_rows
from embedlayer.vocab.targets.unmoved_state import require_moved, watch_unmoved

Layout = Literal["joined", "stacked", "transposed"]

STREAM = "stream"
"""Key of the number of the edited stream in the `settings` of a receipt."""


class StreamRows(NamedTuple):
    """Describe a tensor that has the rows of one or several streams.

    Attributes:
        name: Name of the tensor.
        tensor: The tensor: rows of the streams one after another, maybe with further rows behind them; `(K, V, D)`; or
            `(K, D, V)`, as `layout` says. A bias has numbers in place of rows.
        streams: The streams whose rows it has, in order.
        sizes: Number of codes of each of them.
        end: Which initialisation computes new rows.
        more: Rows of each stream that follow its codes.
        layout: As in `CodeHeadSpec`.
    """

    name: str
    tensor: Tensor
    streams: tuple[int, ...]
    sizes: tuple[int, ...]
    end: End
    more: int = 0
    layout: Layout = "joined"

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """Return the rows of each stream in a tensor of this layout, and then the rows behind all streams."""
        if self.layout != "joined":
            return [each.mT if self.layout == "transposed" else each for each in tensor.unbind()]
        lengths = [size + self.more for size in self.sizes]
        return list(tensor.split([*lengths, len(tensor) - sum(lengths)]))

    def codes(self, tensor: Tensor, stream: int) -> Tensor | None:
        """Return the rows of the codes of a stream in a tensor of this layout; `None` if it has no such stream."""
        if stream not in self.streams:
            return None
        at = self.streams.index(stream)
        return self.parts(tensor)[at][: self.sizes[at]]

    def replaced(self, tensor: Tensor, stream: int, rows: Tensor, size: int, resized: Collection[int]) -> Tensor:
        """Return a tensor of this layout in which a stream has other codes, and some streams `size` of them.

        Args:
            tensor: The tensor before.
            stream: The stream.
            rows: Rows of its codes. They are ignored if the tensor has no such stream.
            size: Number of codes; further rows are the mean of those before, in an optimizer's state zero.
            resized: The streams that get this size.
        """
        parts = self.parts(tensor)
        for at, (each, old) in enumerate(zip(self.streams, self.sizes, strict=True)):
            codes, rest = parts[at][:old], parts[at][old:]
            codes = rows if each == stream else codes
            if each in resized:
                codes = _resized(codes, size, is_state=tensor is not self.tensor)
            parts[at] = torch.cat([codes, rest])
        if self.layout != "joined":
            return torch.stack([each.mT if self.layout == "transposed" else each for each in parts]).contiguous()
        return torch.cat(parts)


def _resized(rows: Tensor, size: int, *, is_state: bool) -> Tensor:
    """Return the first `size` rows, or all of them and further ones: their mean, in an optimizer's state zero."""
    if size <= len(rows):
        return rows[:size]
    mean = rows.double().mean(0, keepdim=True).to(rows.dtype)
    further = torch.zeros_like(mean) if is_state else mean
    return torch.cat([rows, further.expand(size - len(rows), *further.shape[1:])])


class Streams(NamedTuple):
    """Describe the streams of a module or a checkpoint.

    Attributes:
        rows: The tensors with rows of streams.
        sizes: Number of codes of each stream.
        alike: Streams that have one size, as a configuration or a tensor says; empty if each has a size of its own.
        resize: Function that returns the assignments which give modules and configurations other sizes, from these
            sizes, the edited stream, and the new ID of each of its codes.
    """

    rows: list[StreamRows]
    sizes: tuple[int, ...]
    alike: frozenset[int]
    resize: Callable[[tuple[int, ...], int, Tensor], list[Assignment]]


class StreamEdit(NamedTuple):
    """Result of an edit of a stream: the new tensors by name, the new sizes, and what a receipt stores."""

    tensors: dict[str, Tensor]
    sizes: tuple[int, ...]
    result: ModelResult


def edit_streams(
    streams: Streams, stream: int, resolve: ResolveEdit, optimizer: Optimizer | None = None, used: int | None = None
) -> StreamEdit:
    """Compute the edit of one stream, or the undo of one; nothing is changed.

    Args:
        streams: The streams.
        stream: Number of the stream.
        resolve: Function that returns the edit of the stream, or the undo of one.
        optimizer: Optimizer whose state is edited too, or `None`.
        used: For an undo: number of codes after the edit, without rows that belong to no code; else `None`.

    Raises:
        SizeError: There is no such stream, or the optimizer trains none of the tensors.
        CheckpointError: For an undo: the streams are not as the edit of the receipt left them.
        All other errors are those of `apply_row_map`.
    """
    if not 0 <= stream < len(streams.sizes):
        raise SizeError(f"Stream {stream} is none of the {len(streams.sizes)} streams (0..{len(streams.sizes) - 1}).")
    old = streams.sizes[stream]
    if used is not None and not used <= old:
        raise CheckpointError(
            f"This model is not what the receipt belongs to: stream {stream} has {old:,} codes, the receipt's {used:,}."
        )
    edit = resolve([], used or old, all_rows_have_ids=True)
    size = edit.row_map.size
    resized = streams.alike if stream in streams.alike else frozenset({stream})
    size = max(size, old) if len(resized) > 1 and used is None else size
    tensors: dict[str, RowTensor] = {}
    states: dict[str, tuple[StreamRows, dict[str, Any], str]] = {}
    for part in streams.rows:
        codes = part.codes(part.tensor.detach(), stream)
        if codes is not None:
            tensors[part.name] = RowTensor(codes[: used or old], part.end)
    tensors = dict(sorted(tensors.items(), key=lambda named: named[1].local.dim() == 1))
    for part, key, state in _states(streams.rows, optimizer):
        name = f"optimizer.{part.name}.{key}"
        states[name] = part, state, key
        codes = part.codes(state[key], stream)
        if codes is not None:
            assert optimizer is not None
            new = NewState(optimizer, part.name, part.tensor).of(key)
            tensors[name] = RowTensor(codes[: used or old], parameter=part.name, state_of=new)
    result = apply_row_map(tensors, edit)
    new_tensors: dict[str, Tensor] = {}
    for name, part, tensor in [
        *((part.name, part, part.tensor) for part in streams.rows),
        *((name, part, state[key]) for name, (part, state, key) in states.items()),
    ]:
        if resized & {*part.streams}:
            rows = result.tensors.get(name, tensor)
            new_tensors[name] = part.replaced(tensor.detach(), stream, rows, size, resized)
    sizes = tuple(size if k in resized else each for k, each in enumerate(streams.sizes))
    return StreamEdit(new_tensors, sizes, replace(result, settings={STREAM: stream}))


def _states(
    rows: Sequence[StreamRows], optimizer: Optimizer | None
) -> Iterable[tuple[StreamRows, str, dict[str, Any]]]:
    """Yield each state of an optimizer that has the shape of a tensor: the tensor, its key, and all states of it.

    Raises:
        SizeError: The optimizer trains none of the tensors, or has a state of another shape.
        StaleRowsError: The optimizer's state is that before an edit.
    """
    if optimizer is None:
        return
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(part.tensor) in trained for part in rows):
        raise SizeError("This optimizer belongs to other parameters: it trains none of the rows of these streams.")
    for part in rows:
        if id(part.tensor) in trained:
            require_moved(optimizer, part.tensor)
            state = optimizer.state.get(part.tensor, {})
            for key, value in state_with_rows(state, part.name, RowTensor(part.tensor)):
                if value.shape != part.tensor.shape:
                    raise SizeError(
                        f"The optimizer stores {key} of {part.name} as {tuple(value.shape)}, and the edit of one "
                        f"stream moves states of the shape of the parameter: build the optimizer again after the edit."
                    )
                yield part, key, state


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
    assignments: list[Assignment] = []
    for part in streams.rows:
        if part.name in edited.tensors:
            old = part.tensor.detach()
            assignments += [assignment(part.tensor, "grad", None)]
            assignments += [
                (partial(replace_data, part.tensor, edited.tensors[part.name]), partial(replace_data, part.tensor, old))
            ]
    for part, key, state in _states(streams.rows, optimizer):
        if (name := f"optimizer.{part.name}.{key}") in edited.tensors:
            assignments += [
                (partial(state.__setitem__, key, edited.tensors[name]), partial(state.__setitem__, key, state[key]))
            ]
    do_all([*assignments, *streams.resize(edited.sizes, stream, edited.result.edit.new_ids)])
    moved = {part.name: part.tensor for part in streams.rows if part.name in edited.tensors and id(part.tensor) in held}
    watch_unmoved(moved, edited.result.edit.row_map, optimizer, is_undo=used is not None)
    return edited.result


def streams_of(module: nn.Module) -> Streams:
    """Return the streams of a live module: a model of transformers, a layer, or a `StreamTable`.

    Raises:
        SizeError: It has no streams, several sets of streams, or rows that cannot be moved.
    """
    for name, model in models_in(module).items():
        if (known := streams_of_model(model)) is not None:
            spec, owner, rows = known
            rows = [part._replace(name=dotted(name, part.name)) for part in rows]
            others = [model.generation_config] if getattr(model, "generation_config", None) is not None else []
            return Streams(rows, *_sizes(spec, rows), partial(_resize_model, model, spec, owner, others))
    return _own_streams(module)


def streams_of_model(model: Any) -> tuple[CodeSpec, Any, list[StreamRows]] | None:
    """Return the streams of a live model of transformers: their record, configuration and tensors; `None` for none."""
    config = model.config
    part = MULTIMODAL[config.model_type].part if config.model_type in MULTIMODAL else ""
    text = getattr(config, part, config)
    family = family_of(text.model_type)
    if family is None or family.codes is None:
        return None
    owner = getattr(text, family.sub_configs[1]) if family.sub_configs else text
    tensors = dict(model.named_parameters(remove_duplicate=False))
    return family.codes, owner, named_rows(family.codes, owner, tensors, tensors.__getitem__)


# Layers of this library


def codes_in(module: nn.Module) -> tuple[str, str, CodeStreams]:
    """Return the streams in a layer or table of this library, their name, and that of their `StreamTable`.

    For a `StreamTable` alone they are new ones with this table, without heads.

    Raises:
        SizeError: There are none, or several sets.
    """
    modules = dict(module.named_modules())
    sets = [(name, part) for name, part in modules.items() if isinstance(part, CodeStreams)]
    inside = {id(part.table) for _, part in sets}
    tables = [
        (name, part) for name, part in modules.items() if isinstance(part, StreamTable) and id(part) not in inside
    ]
    if not sets and not tables:
        raise SizeError("This module has no streams of codes: leave stream out.")
    if len(sets) + len(tables) > 1:
        raise SizeError(
            f"This module has {len(sets) + len(tables)} sets of streams of codes: pass the layer or the StreamTable "
            f"whose streams are meant."
        )
    if sets:
        [(name, codes)] = sets
        return name, dotted(name, "table"), codes
    [(table_name, table)] = tables
    return "", table_name, CodeStreams(table)


def heads_of(name: str, codes: CodeStreams) -> list[tuple[str, StreamHead, int]]:
    """Return the heads of streams: name, head, and the first stream that it predicts."""
    heads = [("head", codes.head, codes.head_stream), ("depth_head", codes.depth_head, codes.depth_stream)]
    return [(dotted(name, key), head, first) for key, head, first in heads if head is not None]


def _own_streams(module: nn.Module) -> Streams:
    """Return the streams of a layer or table of this library; see `streams_of`."""
    name, table_name, codes = codes_in(module)
    table = codes.table
    rows = table.rows
    if not isinstance(rows, TokenEmbedding) or rows.num_rows != rows.vocab_size:
        raise SizeError(
            f"The rows of these streams are a {type(rows).__name__}, and an edit of one stream moves those of a "
            f"TokenEmbedding without spare rows alone: edit the streams before the rows are converted."
        )
    more = [0 if k == codes.text_stream else codes.more_rows for k in range(table.num_streams)]
    if codes.more_rows and codes.text_stream is not None:
        raise SizeError("Streams of codes with further rows and a stream of text are not edited.")
    sizes = tuple(size - each for size, each in zip(table.sizes, more, strict=True))
    every = tuple(range(table.num_streams))
    parts = [StreamRows(dotted(table_name, "rows.weight"), rows.weight, every, sizes, "table", codes.more_rows)]
    heads = heads_of(name, codes)
    for head_name, head, first in heads:
        parts += _rows_of_head(head_name, head, first, sizes)
    alike = frozenset(every) if any(part.layout != "joined" for part in parts) else frozenset[int]()
    layers = [part for part in module.modules() if isinstance(part, EmbeddingLayer) and part.codes is codes]
    return Streams(parts, sizes, alike, partial(_resize_layer, codes, [each[1:] for each in heads], layers))


def _rows_of_head(name: str, head: StreamHead, first: int, sizes: tuple[int, ...]) -> list[StreamRows]:
    """Return the tensors of a head whose first stream is `first`; none for a tied one without a bias.

    Raises:
        SizeError: Its rows are stored in a way that is not moved by streams.
    """
    streams = tuple(range(first, first + head.num_streams))
    own = tuple(sizes[k] for k in streams)
    output = head.output
    if isinstance(output, StackedRows):
        layout: Layout = "transposed" if output.transposed else "stacked"
        return [StreamRows(f"{name}.output.weight", output.weight, streams, own, "head", layout=layout)]
    if isinstance(output, OutputHead):
        starts = [0, *accumulate(own)][:-1]
        named = [(f"{name}.output", output, streams, own)]
        is_plain = head.tied or (head.first_rows == starts and output.out_features == sum(own))
    else:
        outputs = [each for each in output.children() if isinstance(each, OutputHead)]
        named = [
            (f"{name}.output.{i}", each, (k,), (sizes[k],))
            for i, (k, each) in enumerate(zip(streams, outputs, strict=False))
        ]
        is_plain = not head.tied
    rows = [
        StreamRows(f"{each}.{key}", parameter, own_streams, own_sizes, "head")
        for each, part, own_streams, own_sizes in named
        for key in ("weight", "bias")
        if isinstance(parameter := part._parameters.get(key), nn.Parameter)
    ]
    is_dense = head.tied or all(part.has_weight for _, part, _, _ in named)
    if not is_plain or not is_dense or (head.tied and rows) or any(part.padding_idx for _, part, _, _ in named if rows):
        raise SizeError(
            f"The rows of {name} are not moved by streams: its heads have a weight of their own, of these streams one "
            f"after another, or all are tied to the rows at the input."
        )
    return rows


def _resize_layer(
    codes: CodeStreams,
    heads: Sequence[tuple[StreamHead, int]],
    layers: Sequence[EmbeddingLayer],
    sizes: tuple[int, ...],
    stream: int,
    new_ids: Tensor,
) -> list[Assignment]:
    """Return the assignments that give a layer other sizes of its streams.

    Raises:
        SizeError: The padding row of the table would be removed.
    """
    table, rows = codes.table, codes.rows
    assert isinstance(rows, TokenEmbedding)
    full = tuple(size + codes.more_rows * (k != codes.text_stream) for k, size in enumerate(sizes))
    added = sum(full) - sum(table.sizes)
    padding_idx = None if rows.padding_idx is None else _new_row(rows.padding_idx, codes, full, stream, new_ids)
    if padding_idx is not None and padding_idx < 0:
        raise SizeError(f"The padding row {rows.padding_idx} would be removed: keep it.")
    shared = None if table.shared_padding_idx is None else sum(full)
    old = (table.sizes, table.shared_padding_idx)
    result = [assignment(rows, key, rows.vocab_size + added) for key in ("vocab_size", "num_rows", "num_embeddings")]
    result += [
        assignment(rows, "padding_idx", padding_idx),
        assignment(rows.index_check, "size", rows.vocab_size + added),
    ]
    if rows.pending_updates is not None:
        result += [assignment(rows.pending_updates, "padding_idx", padding_idx)]
    result += [(partial(table.set_sizes, full, shared), partial(table.set_sizes, *old))]
    starts = [0, *accumulate(full)]
    for head, first in heads:
        outputs = [each for each in head.modules() if isinstance(each, OutputHead)]
        if not outputs:
            continue
        streams = range(first, first + head.num_streams)
        own, before = [sizes[k] for k in streams], (head.sizes, head.first_rows)
        if head.tied:
            is_whole = head.sizes == [rows.vocab_size]
            own = [rows.vocab_size + added] if is_whole else own
            result += [assignment(outputs[0], "out_features", rows.vocab_size + added)]
            firsts: list[int] | None = [0] if is_whole else [starts[k] for k in streams]
        else:
            firsts = None
            ends = [sum(own)] if len(outputs) == 1 and isinstance(head.output, OutputHead) else own
            result += [assignment(each, "out_features", size) for each, size in zip(outputs, ends, strict=True)]
        result += [(partial(head.set_ranges, own, firsts), partial(head.set_ranges, *before))]
    for layer in layers:
        names = _moved_names(layer.tensor_names, table.sizes, full)
        result += [assignment(layer, "is_edited", True), assignment(layer, "tensor_names", names)]
    return result


def _new_row(row: int, codes: CodeStreams, full: tuple[int, ...], stream: int, new_ids: Tensor) -> int:
    """Return the new number of a row of the table of streams, or a negative number if it is removed."""
    old_starts, starts = [0, *accumulate(codes.table.sizes)], [0, *accumulate(full)]
    at = sum(start <= row for start in old_starts) - 1
    inside = row - old_starts[at]
    if at == stream and inside < len(new_ids):
        new = int(new_ids[inside])
        return new if new < 0 else starts[at] + new
    more = inside - (codes.table.sizes[at] if at < len(full) else 0)
    return starts[at] + inside if at != stream else starts[at] + full[at] + more


def _moved_names(
    names: Mapping[str, tuple[str, ...]], old: tuple[int, ...], new: tuple[int, ...]
) -> dict[str, tuple[str, ...]]:
    """Return `EmbeddingLayer.tensor_names` in which the rows of tensors of single streams have their new numbers."""

    def keys(sizes: tuple[int, ...]) -> list[str]:
        starts = [0, *accumulate(sizes)]
        return [f"{ROWS}[{start}:{stop}]" for start, stop in pairwise(starts)]

    moved = dict(zip(keys(old), keys(new), strict=True))
    return {moved.get(key, key): each for key, each in names.items()}


# Tensors by their names in checkpoints: models of transformers, live and in folders


def named_rows(spec: CodeSpec, config: Any, names: Iterable[str], read: Callable[[str], Tensor]) -> list[StreamRows]:
    """Return the tensors with rows of streams, by their names in checkpoints; a tied one once.

    Args:
        spec: What the record says about the streams.
        config: Configuration that states their sizes.
        names: Names of all tensors.
        read: Function that returns the tensor of a name.
    """
    entries, names = entries_of(config), list(names)
    count = entries[spec.count] * spec.sides
    text = [] if spec.text_size is None else [entries[spec.text_size]]
    key = next((key for key in spec.size if entries.get(key) is not None), None)
    of_side = count // spec.sides
    rows: dict[int, StreamRows] = {}

    def add(ends: Names, streams: Sequence[int], end: End, more: int, layout: Layout = "joined") -> None:
        for name in (each for suffix in ends for each in _named(names, suffix)):
            tensor = read(name)
            size = entries[key] if key is not None else len(tensor) - more
            sizes = tuple(text[0] if text and k == 0 else size for k in streams)
            if layout == "joined" and len(tensor) < sum(sizes) + more * len(sizes):
                continue  # a matrix that ends in the same name
            rows.setdefault(id(tensor), StreamRows(name, tensor, tuple(streams), sizes, end, more, layout))

    every = range(len(text) + count)
    if "{}" in spec.table[0]:
        for k in every:
            add(tuple(each.format(k) for each in spec.table), [k], "table", spec.more_rows)
    else:
        add(spec.table, every, "table", 0)
    for head in (spec.head, spec.depth_head):
        if head is not None:
            _add_head(head, of_side, len(text), add)
    return list(rows.values())


def _add_head(head: CodeHeadSpec, of_side: int, text: int, add: Callable[..., None]) -> None:
    """Call `add` for the tensors of the heads of streams."""
    streams = [head.first] if head.only else list(range(text + head.first, text + of_side))
    if "{}" in head.weight[0]:
        for i, k in enumerate(streams):
            add(tuple(each.format(i) for each in head.weight), [k], "head", 0)
    else:
        add(head.weight, streams, "head", 0, head.layout)


def _named(names: Iterable[str], suffix: str) -> list[str]:
    """Return the names that end in a suffix, the shortest first."""
    return sorted((name for name in names if f".{name}".endswith(f".{suffix}")), key=lambda name: (len(name), name))


def _sizes(spec: CodeSpec, rows: Sequence[StreamRows]) -> tuple[tuple[int, ...], frozenset[int]]:
    """Return the number of codes of each stream, and the streams that have one size: all but that of a text."""
    by_stream = {k: size for part in rows for k, size in zip(part.streams, part.sizes, strict=True)}
    return tuple(by_stream[k] for k in sorted(by_stream)), frozenset(by_stream) - ({0} if spec.text_size else set())


def changed_entries(
    spec: CodeSpec, configs: Sequence[Any], size: int, new_size: int, new_ids: Tensor, streams: int
) -> list[tuple[Any, str, int]]:
    """Return the entries of configurations that follow the size of streams: configuration, key and new value.

    Args:
        spec: What the record says about the streams.
        configs: The configuration of the streams first, then others with the same keys.
        size: Number of codes of each stream.
        new_size: That after the edit.
        new_ids: New ID of each code of the edited stream, or -1.
        streams: Number of streams of codes.

    Raises:
        VocabularyError: A configuration names a code that has a meaning in all streams, and the edit moves it in one.
    """
    nested = [each for key in spec.configs if (each := entries_of(configs[0]).get(key)) is not None]
    result: list[tuple[Any, str, int]] = []
    for owner in (*configs, *nested):
        entries = entries_of(owner)
        result += [(owner, key, new_size) for key in spec.size if entries.get(key) == size]
        if spec.shared_padding is not None and type(last := entries.get(spec.shared_padding)) is int:
            result += [(owner, spec.shared_padding, last + streams * (new_size - size))]
        for key in spec.token_ids:
            value = entries.get(key)
            ids = [value] if type(value) is int else value if isinstance(value, list) else []
            for each in ids:
                if each < len(new_ids) and int(new_ids[each]) != each:
                    raise VocabularyError(
                        f"{key} names the code {each} of every stream, and the edit of one stream would move or remove "
                        f"it there: keep its ID."
                    )
            if type(value) is int and size <= value < size + spec.more_rows:
                result += [(owner, key, value + new_size - size)]
    return result


def _resize_model(
    model: Any, spec: CodeSpec, config: Any, others: Sequence[Any], sizes: tuple[int, ...], stream: int, new_ids: Tensor
) -> list[Assignment]:
    """Return the assignments that give a model of transformers another size of its streams.

    Its modules have that size as attributes of their own, and offsets of the streams in buffers.

    Raises:
        SizeError: The stream is one of text.
        VocabularyError: As in `changed_entries`.
    """
    text = 0 if spec.text_size is None else 1
    if stream < text:
        raise SizeError("Stream 0 of this model is its text: load its layer, el.load(folder), and edit that.")
    known = streams_of_model(model)
    assert known is not None
    rows = known[2]
    old = next(part.sizes[-1] for part in rows)
    new = sizes[-1]
    entries = changed_entries(spec, [config, *others], old, new, new_ids, len(sizes) - text)
    result = [assignment(owner, key, value) for owner, key, value in entries]
    by_weight = {id(part.tensor): part for part in rows}
    offsets = torch.arange(len(sizes) - text)
    sizes_of = {key for key in spec.size if getattr(config, key, None) == old}
    for part in model.modules():
        weight = part._parameters.get("weight")
        own = None if weight is None else by_weight.get(id(weight))
        if own is not None and own.layout == "joined":
            added = (new - old) * len([k for k in own.streams if k >= text])
            result += [
                assignment(part, key, getattr(part, key) + added)
                for key in ("num_embeddings", "out_features")
                if getattr(part, key, None) == len(own.tensor)
            ]
            if getattr(part, "padding_idx", None) is not None and spec.shared_padding is not None:
                result += [assignment(part, "padding_idx", part.padding_idx + added)]
        own_config = getattr(part, "config", None)
        is_of_streams = any(
            own_config is each for each in (config, *(getattr(config, key, None) for key in spec.configs))
        )
        is_of_streams = is_of_streams or own_config is model.config
        result += [
            assignment(part, key, new)
            for key in ("vocab_size", "codebook_size", "audio_vocab_size")
            if is_of_streams and sizes_of and vars(part).get(key) == old and (key in sizes_of or key == "vocab_size")
        ]
        for name, buffer in part._buffers.items():
            if buffer is not None and "offsets" in name and not buffer.is_floating_point():
                steps = buffer[text:].cpu()
                if len(steps) == len(offsets) and bool((steps - steps[0] == offsets * old).all()):
                    moved = buffer.clone()
                    moved[text:] += (offsets * (new - old)).to(buffer)
                    result += [assignment(part, name, moved)]
    return result


def apply_to_stream_of_checkpoint(
    folder: Path, partial_copy: Path, stream: int, resolve: ResolveEdit, used: int | None = None
) -> EditResult:
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
    model = checkpoint_model(checkpoint, None, "cpu").of_decoder()
    spec = model.family.codes
    if spec is None or layer.codes is None:
        raise CheckpointError(f"{folder} has no streams of codes: leave stream out.")
    if stream == layer.codes.text_stream:
        raise SizeError(
            f"Stream {stream} of {folder} is its text: save its layer, load(...).save_pretrained(...), and edit that."
        )
    rows = named_rows(spec, model.config.content, checkpoint.names, checkpoint.read)
    edited = edit_streams(Streams(rows, *_sizes(spec, rows), lambda *_: []), stream, resolve, used=used)
    left_out = files_left_out(folder)
    if copies := find_copies(folder, checkpoint, {part.name: part.name for part in rows}, left_out):
        raise CheckpointError(f"{next(iter(copies))} has a second copy of the rows: move it out of {folder}.")
    contents = {name: read_json(folder / name) for name in (CONFIG, GENERATION) if (folder / name).is_file()}
    owners = [_config_of_streams(contents[CONFIG], model.family), *(contents[name] for name in {*contents} - {CONFIG})]
    text = 0 if layer.codes.text_stream is None else 1
    old, new, new_ids = rows[0].sizes[-1], edited.sizes[-1], edited.result.edit.new_ids
    for owner, key, value in changed_entries(spec, owners, old, new, new_ids, len(edited.sizes) - text):
        owner[key] = value
    shapes = {name: tuple(tensor.shape) for name, tensor in edited.tensors.items()}
    table = next(iter(edited.tensors))
    write_tensors(edited.tensors, folder, partial_copy, table=table, copies={}, left_out=left_out, shapes=shapes)
    for name, content in contents.items():
        if content != read_json(folder / name):
            write_json(partial_copy / name, content)
    changed = [name for name in (*contents, INDEX) if (folder / name).exists()]
    return EditResult({"": edited.result}, changed, left_out)


def _config_of_streams(content: JsonObject, family: Family) -> JsonObject:
    """Return the configuration that states the sizes of streams, in that of a whole model."""
    outer = content.get("model_type")
    part = MULTIMODAL[outer].part if isinstance(outer, str) and outer in MULTIMODAL else ""
    inner: JsonObject = content.get(part, content)
    result: JsonObject = inner[family.sub_configs[1]] if family.sub_configs else inner
    return result
