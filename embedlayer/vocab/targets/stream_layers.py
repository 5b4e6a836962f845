"""Streams of codes of a layer or table of this library: their rows, and sizes and names that follow an edit."""

from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise

from torch import Tensor, nn

from embedlayer.checkpoints.layer import EmbeddingLayer
from embedlayer.checkpoints.reading.codes import ROWS
from embedlayer.core.errors import SizeError
from embedlayer.core.formatting import a_or_an
from embedlayer.families.stream_records import Layout
from embedlayer.heads.output import OutputHead
from embedlayer.heads.streams import StackedRows, StreamHead
from embedlayer.inputs.codes import CodeStreams
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.streams import StreamTable
from embedlayer.vocab.targets.live import assignment
from embedlayer.vocab.targets.module_parts import dotted
from embedlayer.vocab.targets.module_settings import Assignment
from embedlayer.vocab.targets.stream_rows import StreamRows, Streams


def codes_in(module: nn.Module) -> tuple[str, str, CodeStreams]:
    """Return the streams in a layer or table of this library, their name, and that of their `StreamTable`.

    For a `StreamTable` alone they are new ones with this table, without heads.

    Raises:
        SizeError: There are none, or several sets.
    """
    modules = dict(module.named_modules())
    sets = [(name, dotted(name, "table"), part) for name, part in modules.items() if isinstance(part, CodeStreams)]
    inside = {id(codes.table) for _, _, codes in sets}
    tables = {name: part for name, part in modules.items() if isinstance(part, StreamTable) and id(part) not in inside}
    sets += [("", name, CodeStreams(table)) for name, table in tables.items()]
    if not sets:
        raise SizeError("This module has no streams of codes: leave stream out.")
    if len(sets) > 1:
        raise SizeError(
            f"This module has {len(sets)} sets of streams of codes: pass the layer or the StreamTable whose "
            f"streams are meant."
        )
    return sets[0]


def heads_of(name: str, codes: CodeStreams) -> list[tuple[str, StreamHead, int]]:
    """Return the heads of streams: name, head, and the first stream that it predicts."""
    heads = [("head", codes.head, codes.head_stream), ("depth_head", codes.depth_head, codes.depth_stream)]
    return [(dotted(name, key), head, first) for key, head, first in heads if head is not None]


def streams_of_layer(module: nn.Module) -> Streams:
    """Return the streams of a layer or table of this library.

    Raises:
        SizeError: It has no streams, several sets of streams, or rows that cannot be moved.
    """
    name, table_name, codes = codes_in(module)
    table, rows = codes.table, codes.table.rows
    if not isinstance(rows, TokenEmbedding) or rows.num_rows != rows.vocab_size:
        raise SizeError(
            f"The rows of these streams are {a_or_an(rows)}, and an edit of one stream moves those of a "
            f"TokenEmbedding without spare rows alone: edit the streams before the rows are converted."
        )
    if codes.more_rows and codes.text_stream is not None:
        raise SizeError("Streams of codes with further rows and a stream of text are not edited.")
    sizes = tuple(size - codes.more_rows for size in table.sizes)
    every = tuple(range(table.num_streams))
    parts = [StreamRows(dotted(table_name, "rows.weight"), rows.weight, every, sizes, "table", codes.more_rows)]
    heads = heads_of(name, codes)
    for head_name, head, first in heads:
        parts += _rows_of_head(head_name, head, first, sizes)
    alike = frozenset(every) if any(part.layout != "joined" for part in parts) else frozenset[int]()
    layers = [part for part in module.modules() if isinstance(part, EmbeddingLayer) and part.codes is codes]
    return Streams(parts, sizes, alike, partial(_resize_layer, codes, rows, layers))


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
    rows: TokenEmbedding,
    layers: Sequence[EmbeddingLayer],
    sizes: tuple[int, ...],
    stream: int,
    new_ids: Tensor,
) -> list[Assignment]:
    """Return the assignments that give a layer other sizes of its streams.

    Raises:
        SizeError: The padding row of the table would be removed.
    """
    full = tuple(size + codes.more_rows for size in sizes)
    padding_idx = None if rows.padding_idx is None else _new_row(rows.padding_idx, codes, full, stream, new_ids)
    result = _resize_table(codes.table, rows, full, padding_idx)
    added = sum(full) - sum(codes.table.sizes)
    for _, head, first in heads_of("", codes):
        result += _resize_head(head, range(first, first + head.num_streams), sizes, full, added)
    for layer in layers:
        names = _moved_names(layer.tensor_names, codes.table.sizes, full)
        result += [assignment(layer, "is_edited", True), assignment(layer, "tensor_names", names)]
    return result


def _resize_table(
    table: StreamTable, rows: TokenEmbedding, full: tuple[int, ...], padding_idx: int | None
) -> list[Assignment]:
    """Return the assignments that give a table of streams other numbers of rows, `full`, and a padding row."""
    size = rows.vocab_size + sum(full) - sum(table.sizes)
    old, new = ((each, None if table.shared_padding_idx is None else sum(each)) for each in (table.sizes, full))
    updates = [] if rows.pending_updates is None else [rows.pending_updates]
    return [
        *(assignment(rows, key, size) for key in ("vocab_size", "num_rows", "num_embeddings")),
        assignment(rows.index_check, "size", size),
        *(assignment(owner, "padding_idx", padding_idx) for owner in (rows, *updates)),
        (partial(table.set_sizes, *new), partial(table.set_sizes, *old)),
    ]


def _resize_head(
    head: StreamHead, streams: range, sizes: tuple[int, ...], full: tuple[int, ...], added: int
) -> list[Assignment]:
    """Return the assignments that give the head of some streams their new sizes; none for stacked rows.

    `full` is the number of rows of each stream in the table after the edit, and `added` by how many rows it grows.
    """
    outputs = [each for each in head.modules() if isinstance(each, OutputHead)]
    own: list[int] = [sizes[k] for k in streams]
    first_rows: list[int] | None = None
    out_features = own if isinstance(head.output, nn.ModuleList) else [sum(own)] * len(outputs)
    if head.tied:
        [output], starts = outputs, [0, *accumulate(full)]
        out_features, first_rows = [output.out_features + added], [starts[k] for k in streams]
        if head.sizes == [output.out_features]:
            own, first_rows = out_features, [0]
    return [
        *(assignment(each, "out_features", size) for each, size in zip(outputs, out_features, strict=True)),
        (partial(head.set_ranges, own, first_rows), partial(head.set_ranges, head.sizes, head.first_rows)),
    ]


def _new_row(row: int, codes: CodeStreams, full: tuple[int, ...], stream: int, new_ids: Tensor) -> int:
    """Return the number of a padding row of the table after an edit; `full` are the rows of each stream then.

    Raises:
        SizeError: The row would be removed.
    """
    sizes = codes.table.sizes
    old_starts, starts = [0, *accumulate(sizes)], [0, *accumulate(full)]
    at = bisect(old_starts, row) - 1
    inside = row - old_starts[at]
    if at == len(sizes):  # the shared padding row
        return starts[at]
    if at == stream and inside < len(new_ids):
        inside = int(new_ids[inside])
        if inside < 0:
            raise SizeError(f"The padding row {row} would be removed: keep it.")
    elif at == stream or inside >= sizes[at] - codes.more_rows:  # rows behind the codes
        inside += full[at] - sizes[at]
    return starts[at] + inside


def _moved_names(
    names: Mapping[str, tuple[str, ...]], old: tuple[int, ...], new: tuple[int, ...]
) -> dict[str, tuple[str, ...]]:
    """Return `EmbeddingLayer.tensor_names` in which the rows of tensors of single streams have their new numbers."""

    def keys(sizes: tuple[int, ...]) -> list[str]:
        starts = [0, *accumulate(sizes)]
        return [f"{ROWS}[{start}:{stop}]" for start, stop in pairwise(starts)]

    moved = dict(zip(keys(old), keys(new), strict=True))
    return {moved.get(key, key): each for key, each in names.items()}
