"""One ordinary safetensors file of sharded tensors: rank 0 writes rows as they arrive, each rank reads its own.

No process needs memory for more than its own rows and a small buffer.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from embedlayer.core.collectives import Collectives, RowPartition
from embedlayer.distributed.dtensors import to_local
from embedlayer.distributed.sharded import ShardedTable
from embedlayer.io.files import replace_file
from embedlayer.io.safetensors_files import byte_chunks, encode_header, open_safetensors, rows_per_chunk, write_tensor


class ShardedRows(NamedTuple):
    """Describe a tensor in a file whose rows are sharded over ranks."""

    table: ShardedTable
    stored: int


def save_sharded(
    path: Path,
    tensors: Mapping[str, Tensor],
    sharded: Mapping[str, ShardedRows],
    collectives: Collectives,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file with whole tensors on rank 0, atomically. Every rank must call it."""
    if not collectives.is_first:
        with collectives.peer_errors():
            for name, tensor in tensors.items():
                if name in sharded and collectives.rank < sharded[name].table.mesh.size():
                    for rows in byte_chunks(to_local(tensor)):
                        dist.send(rows, 0)
        return
    entries: dict[str, tuple[torch.dtype, list[int], int]] = {}
    for name, tensor in tensors.items():
        shape = [sharded[name].stored, *tensor.shape[1:]] if name in sharded else list(tensor.shape)
        entries[name] = tensor.dtype, shape, torch.Size(shape).numel() * tensor.dtype.itemsize
    with replace_file(path) as partial, partial.open("wb") as file:
        file.write(encode_header(entries, {"format": "pt", **(metadata or {})}))
        for name, tensor in tensors.items():
            if name in sharded:
                _write_rows(file, to_local(tensor), sharded[name], collectives)
            else:
                write_tensor(file, tensor)


def load_sharded(
    path: Path, sharded_among: Callable[[Iterable[str]], Mapping[str, ShardedRows]]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file; of tensors with sharded rows, read only this rank's rows, as DTensors."""
    with open_safetensors(path) as file:
        names = list(file.keys())
        sharded = sharded_among(names)
        tensors: dict[str, Tensor] = {}
        for name in names:
            if rows := sharded.get(name):
                part = file.get_slice(name)[rows.table.partition.start : rows.table.partition.stop]
                tensors[name] = rows.table.as_dtensor(part)
            else:
                tensors[name] = file.get_tensor(name)
        return tensors, dict(file.metadata() or {})


def _write_rows(file: BinaryIO, own: Tensor, rows: ShardedRows, collectives: Collectives) -> None:
    """Write one sharded tensor on rank 0: its own rows, those of the other ranks as they arrive, and spare rows."""
    write_tensor(file, own)
    table = rows.table
    buffer = own.new_empty((rows_per_chunk(own), *own.shape[1:]), device="cpu")
    for rank in range(1, table.mesh.size()):
        count = len(RowPartition(table.vocab_size, rank, table.mesh.size()))
        for start in range(0, count, len(buffer)):
            block = buffer[: count - start].flatten().view(torch.uint8)
            with collectives.peer_errors():
                dist.recv(block, rank)
            file.write(block.numpy().data)
    spare = own.new_zeros((rows.stored - table.vocab_size, *own.shape[1:]), device="cpu")
    if own.dtype == torch.int32 and len(spare):  # step numbers of pending updates: spare rows are always up to date
        spare.fill_(int(own.max()))
    write_tensor(file, spare)
