"""One ordinary safetensors file of sharded tensors: rank 0 writes rows as they arrive, each rank reads its own.

No process needs memory for more than its own rows and a small buffer.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from embedlayer.core.collectives import Collectives, RowPartition
from embedlayer.core.partitioned import local_shard
from embedlayer.distributed.sharded import ShardedTable
from embedlayer.io.files import replace_file
from embedlayer.io.safetensors_files import byte_chunks, encode_header, open_safetensors, rows_per_chunk, write_tensor


def save_sharded(
    path: Path,
    tensors: Mapping[str, Tensor],
    sharded: Mapping[str, tuple[ShardedTable, int]],
    collectives: Collectives,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file with whole tensors on rank 0, atomically. Every rank must call it.

    The tensors have the same names, in the same order, on every rank; they are DTensors where rows are `sharded`.
    `sharded` has the table of each such tensor, and the number of rows in the file: the vocabulary, then spare rows.
    """
    if not collectives.is_first:
        with collectives.peer_errors():
            for name, tensor in tensors.items():
                if name in sharded and collectives.rank < sharded[name][0].mesh.size():
                    for rows in byte_chunks(local_shard(tensor)):
                        dist.send(rows, 0)
        return
    entries: dict[str, tuple[torch.dtype, list[int], int]] = {}
    for name, tensor in tensors.items():
        shape = [sharded[name][1], *tensor.shape[1:]] if name in sharded else list(tensor.shape)
        entries[name] = tensor.dtype, shape, torch.Size(shape).numel() * tensor.dtype.itemsize
    with replace_file(path) as partial, partial.open("wb") as file:
        file.write(encode_header(entries, {"format": "pt", **(metadata or {})}))
        for name, tensor in tensors.items():
            if name in sharded:
                _write_rows(file, local_shard(tensor), *sharded[name], collectives)
            else:
                write_tensor(file, tensor)


def load_sharded(
    path: Path, sharded_among: Callable[[Iterable[str]], Mapping[str, tuple[ShardedTable, int]]]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file; of tensors with sharded rows, read only this rank's rows, as DTensors.

    `sharded_among` gets the names in the file, and returns the tables of those with sharded rows, as in `save_sharded`.
    The result is the tensors by name, and the metadata of the file.
    """
    with open_safetensors(path) as file:
        names = list(file.keys())
        sharded = sharded_among(names)
        tensors: dict[str, Tensor] = {}
        for name in names:
            if rows := sharded.get(name):
                table, _ = rows
                part = file.get_slice(name)[table.partition.start : table.partition.stop]
                tensors[name] = table.as_dtensor(part)
            else:
                tensors[name] = file.get_tensor(name)
        return tensors, dict(file.metadata() or {})


def _write_rows(file: BinaryIO, own: Tensor, table: ShardedTable, stored: int, collectives: Collectives) -> None:
    """Write one sharded tensor on rank 0: its own rows, the rows of the other ranks as they arrive, and spare rows."""
    write_tensor(file, own)
    buffer = own.new_empty((rows_per_chunk(own), *own.shape[1:]), device="cpu")
    for rank in range(1, table.mesh.size()):
        count = len(RowPartition(table.vocab_size, rank, table.mesh.size()))
        for start in range(0, count, len(buffer)):
            block = buffer[: count - start].flatten().view(torch.uint8)
            with collectives.peer_errors():
                dist.recv(block, rank)
            file.write(block.numpy().data)
    spare = own.new_zeros((stored - table.vocab_size, *own.shape[1:]), device="cpu")
    if own.dtype == torch.int32 and len(spare):  # step numbers of pending updates: spare rows are always up to date
        spare.fill_(int(own.max()))
    write_tensor(file, spare)
