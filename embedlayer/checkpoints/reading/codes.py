"""Read the K streams of codes of a checkpoint: their rows at the input, and their heads."""

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from embedlayer.checkpoints.reading.configuration import MOST_POSITIONS
from embedlayer.checkpoints.reading.head import refuse_missing_head
from embedlayer.checkpoints.reading.model import CheckpointModel
from embedlayer.core.errors import CheckpointError
from embedlayer.families.records import CodeHeadSpec, CodeSpec, numbered
from embedlayer.heads.output import OutputHead
from embedlayer.heads.streams import StackedRows, StreamHead
from embedlayer.inputs.codes import CodeStreams
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.streams import StreamTable

ROWS = "codes.table.rows.weight"
"""Key of the rows of all streams in the `state_dict` of a layer."""

DEPTH = "only the heads of the depth decoder are read; its blocks and its input are no part of an embedding layer."
"""Note of a checkpoint with a depth decoder."""


def read_codes(model: CheckpointModel, spec: CodeSpec) -> CodeStreams | None:
    """Read the streams of a model; `None` if the checkpoint has its text model alone."""
    if spec.use != "alone" and not model.tensors.has(numbered(spec.table, 0)):
        return None
    config, sides = model.config, spec.sides
    count = config.whole(spec.count) * sides
    sizes = [_size(model, spec) + spec.more_rows] * count
    text = [] if spec.text_size is None else [config.whole(spec.text_size, most=MOST_POSITIONS)]
    sizes = [*text, *sizes]
    shared = None if spec.shared_padding is None else config.get(spec.shared_padding)
    if shared not in (None, sum(sizes)):
        raise CheckpointError(f"{config.file}: {spec.shared_padding} must be {sum(sizes)}, not {shared!r}.")
    rows = _read_rows(model, spec, sizes, 0 if shared is None else 1)
    is_zero = shared is not None and not rows[-1].any()
    table = StreamTable(
        TokenEmbedding(len(rows), rows.shape[1], shared if is_zero else None, dtype=rows.dtype),
        sizes,
        shared_padding_idx=shared,
    )
    return CodeStreams(
        table,
        head=_read_head(model, spec, spec.head, table, "codes.head"),
        depth_head=_read_head(model, spec, spec.depth_head, table, "codes.depth_head"),
        placeholders=[config.whole(key, most=MOST_POSITIONS) for key in spec.placeholders] or None,
        delays=_delays(model, spec, count),
        text_stream=0 if text else None,
        more_rows=spec.more_rows,
        head_stream=0 if spec.head is None else spec.head.first,
        depth_stream=0 if spec.depth_head is None else spec.depth_head.first,
    )


def _size(model: CheckpointModel, spec: CodeSpec) -> int:
    """Return the number of codes of a stream: that of the configuration, or where it states none, that of the rows."""
    if model.config.first_key(spec.size) is None and "{}" in spec.table[0]:
        name = next(iter(model.tensors.checkpoint.find(*numbered(spec.table, 0))), None)
        if name is not None:
            return model.tensors.info(name).shape[0] - spec.more_rows
    return model.config.whole(*spec.size, most=MOST_POSITIONS)


def _read_rows(model: CheckpointModel, spec: CodeSpec, sizes: list[int], more: int) -> Tensor:
    """Read the rows of all streams into `ROWS`, joined if each stream has a tensor; `more` rows follow them."""
    tensors = model.tensors
    if "{}" in spec.table[0]:
        parts: list[Tensor] = []
        for k, (start, stop) in enumerate(pairwise(accumulate(sizes, initial=0))):
            key, width = f"{ROWS}[{start}:{stop}]", parts[0].shape[1] if parts else None
            parts.append(tensors.require(key, numbered(spec.table, k), f"table of stream {k}", (stop - start, width)))
            del tensors.by_key[key]
            tensors.dtype = tensors.dtype or parts[0].dtype
        if further := tensors.checkpoint.find(*numbered(spec.table, len(parts))):
            raise CheckpointError(
                f"{model.config.file}: {spec.count} states {len(parts)} streams, and there is {further[0]}."
            )
        tensors.by_key[ROWS] = torch.cat(parts)
    else:
        what = f"table of {len(sizes)} streams"
        rows = tensors.require(ROWS, spec.table, what, (sum(sizes) + more, None))
        tensors.dtype = tensors.dtype or rows.dtype
        others = [name for name in tensors.checkpoint.find(*spec.table) if name not in tensors.names[ROWS]]
        tensors.names[ROWS] += tuple(
            name for name in others if tensors.checkpoint.is_same(name, tensors.names[ROWS][0])
        )
    tensors.count_nonfinite("table of codes", ROWS, tensors.by_key[ROWS])
    return tensors.by_key[ROWS]


def _read_head(
    model: CheckpointModel, codes: CodeSpec, spec: CodeHeadSpec | None, table: StreamTable, key: str
) -> StreamHead | None:
    """Read the heads of the streams under `key`; `None` for a model or a checkpoint without them."""
    if spec is None:
        return None
    tensors, is_depth = model.tensors, key == "codes.depth_head"
    streams = codes.streams_of(spec, table.num_streams)
    sizes = [table.sizes[k] - codes.more_rows for k in streams]
    names = [numbered(spec.weight, number) for number in range(len(streams) if "{}" in spec.weight[0] else 1)]
    is_tied = spec.tied is not None and bool(model.config.get(spec.tied, False))
    if is_tied and not tensors.has(names[0]):
        whole = range(table.rows.vocab_size)
        ranges = [table.stream(k) for k in streams] if "{}" in codes.table[0] else [whole]  # tied as a tensor
        starts = [rows.start for rows in ranges]
        return StreamHead(OutputHead(table.token_table), list(map(len, ranges)), first_rows=starts)
    if not tensors.has(names[0]):
        refuse_missing_head(model, names[0])
        return None
    width = None if is_depth else table.embed_dim
    tensors.notes += [DEPTH] * is_depth
    if len(names) > 1:
        heads: list[OutputHead] = []
        for i, (each, size) in enumerate(zip(names, sizes, strict=True)):
            rows = tensors.require(f"{key}.output.{i}.weight", each, f"head of stream {streams[i]}", (size, width))
            heads.append(OutputHead(rows.shape[1], size, dtype=rows.dtype))
        return StreamHead(heads, hidden_per_stream=is_depth)
    if spec.layout != "joined":
        is_transposed = spec.layout == "transposed"
        shape = (len(sizes), width, sizes[0]) if is_transposed else (len(sizes), sizes[0], width)
        rows = tensors.require(f"{key}.output.weight", names[0], f"heads of {len(sizes)} streams", shape)
        own_width = rows.shape[1 if is_transposed else 2]
        stack = StackedRows(len(sizes), sizes[0], own_width, transposed=is_transposed, dtype=rows.dtype)
        return StreamHead(stack, hidden_per_stream=is_depth)
    rows = tensors.require(f"{key}.output.weight", names[0], f"heads of {len(sizes)} streams", (sum(sizes), width))
    return StreamHead(OutputHead(*reversed(rows.shape), dtype=rows.dtype), sizes, hidden_per_stream=is_depth)


def _delays(model: CheckpointModel, spec: CodeSpec, count: int) -> list[int] | None:
    """Return how many steps later each of `count` streams is written; `None` for no delays."""
    config, of_side = model.config, count // spec.sides
    if spec.delays is None:
        return None
    if spec.delays == "first":
        return [int(k % of_side > 0) for k in range(count)]
    if spec.delays == "steps":
        return [k // config.whole("audio_channels", default=1) for k in range(count)]
    delays = config.get(spec.delays)
    is_list = isinstance(delays, list | tuple) and all(type(each) is int and each >= 0 for each in delays)
    if not is_list or len(delays) != count:
        raise CheckpointError(f"{config.file}: {spec.delays} must be {count} whole numbers from 0, not {delays!r}.")
    return list(delays)
