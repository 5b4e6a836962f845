"""Divided rows in one ordinary safetensors file: written by rank 0 as they arrive, read by each rank for itself.

No process ever has more of a table than its own rows and a piece of another's.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from embedlayer.distributed.sharded import ShardedTable, spans_of
from embedlayer.io.files import replace_file
from embedlayer.io.safetensors_files import byte_chunks, encode_header, open_safetensors, rows_per_chunk


class Rows(NamedTuple):
    """Where the rows of a tensor are.

    Attributes:
        table: Which of them are here.
        stored: Rows in a file: the vocabulary's and spare ones, which are zero.
    """

    table: ShardedTable
    stored: int


def save_gathered(
    path: Path, tensors: Mapping[str, Tensor], divided: Mapping[str, Rows], metadata: Mapping[str, str] | None = None
) -> None:
    """Write one safetensors file on rank 0, wholly or not at all; all ranks must call it.

    Args:
        path: The file.
        tensors: The same names on every rank, in the same order; DTensors where they are divided.
        divided: Which of them are.
        metadata: Strings for the file's header, beside `{"format": "pt"}`.

    Raises:
        FileError: The folder cannot be written, or the disk is full.
    """
    if dist.get_rank():
        for name, tensor in tensors.items():
            if name in divided and dist.get_rank() < divided[name].table.mesh.size():  # a part of the first copy
                for piece in byte_chunks(part_of(tensor)):
                    dist.send(piece, 0)
        return
    with replace_file(path) as partial, partial.open("wb") as file:
        file.write(header(tensors, divided, {"format": "pt", **(metadata or {})}))
        for name, tensor in tensors.items():
            if name in divided:
                _write_rows(file, part_of(tensor), divided[name])
            else:
                _write(file, tensor)


def load_parts(
    path: Path, divided_among: Callable[[Iterable[str]], Mapping[str, Rows]]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file by name, and its metadata; of divided ones this rank's rows, as DTensors.

    Raises:
        FileError: There is no such file, or it cannot be read.
        CheckpointError: It is truncated or not a safetensors file.
    """
    with open_safetensors(path) as file:
        names = list(file.keys())
        divided = divided_among(names)
        tensors: dict[str, Tensor] = {}
        for name in names:
            if rows := divided.get(name):
                part = file.get_slice(name)[rows.table.start : rows.table.stop]
                tensors[name] = rows.table.whole(part)
            else:
                tensors[name] = file.get_tensor(name)
        return tensors, dict(file.metadata() or {})


def header(tensors: Mapping[str, Tensor], divided: Mapping[str, Rows], metadata: Mapping[str, str]) -> bytes:
    """What stands in front of the numbers in a safetensors file: its length, then names, types, shapes and places."""
    entries: dict[str, tuple[torch.dtype, list[int], int]] = {}
    for name, tensor in tensors.items():
        shape = [divided[name].stored, *tensor.shape[1:]] if name in divided else list(tensor.shape)
        entries[name] = tensor.dtype, shape, torch.Size(shape).numel() * tensor.dtype.itemsize
    return encode_header(entries, metadata)


def part_of(tensor: Tensor) -> Tensor:
    """The rows of this rank."""
    assert isinstance(tensor, DTensor)
    part: Tensor = tensor.to_local()
    return part


def _write_rows(file: BinaryIO, own: Tensor, rows: Rows) -> None:
    """Rank 0's rows, those of all others as they arrive, and spare ones."""
    _write(file, own)
    room = own.new_empty((rows_per_chunk(own), *own.shape[1:]), device="cpu")
    vocab_size = rows.table.vocab_size
    for rank, (start, stop) in enumerate(spans_of(rows.table.mesh, vocab_size)[1:], start=1):
        left = stop - start
        while left:
            piece = room[: min(left, len(room))].flatten().view(torch.uint8)
            dist.recv(piece, rank)
            file.write(piece.numpy().data)
            left -= min(left, len(room))
    spare = own.new_zeros((rows.stored - vocab_size, *own.shape[1:]), device="cpu")
    if own.dtype == torch.int32 and len(spare):  # a ledger's: rows that never had a gradient are always up to date
        spare.fill_(int(own.max()))
    _write(file, spare)


def _write(file: BinaryIO, tensor: Tensor) -> None:
    for piece in byte_chunks(tensor):
        file.write(piece.numpy().data)
