"""What a bad token ID or position is, on each device, and its error; `embedlayer.kernels.index_check` checks layers'.

On the CPU a bad index raises an error at once. On an accelerator no synchronisation is added: bad indices are clamped,
the first one is recorded on the device, and the same error is raised when the program waits for the device anyway.
Under `torch.compile` the CPU check is one custom operator, so there is no graph break.
"""

from collections.abc import Mapping
from itertools import chain
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from embedlayer.core.devices import device_kind
from embedlayer.core.errors import EmbedLayerError, PositionError, ShapeError, StaleRowsError, TokenIdError
from embedlayer.core.shapes import Encoded, IdsLike
from embedlayer.core.torch_state import constant_in_graphs, plain_operators_only, values_are_read

Kind: TypeAlias = str
"""What indices are: `"position"`, `"token id"`, or `"token id of stream 3"` of several streams with own rows."""

INTEGERS = (torch.int64, torch.int32)


def length_of(indices: Tensor) -> int:
    """Return the size of the last dimension, by which a place is divided into row and column; 1 for a scalar."""
    return indices.shape[-1] if indices.dim() else 1


def clamp_and_record(indices: Tensor, rows: int, record: Tensor) -> tuple[Tensor, Tensor]:
    """Clamp row numbers on an accelerator and record the first bad one, without waiting for the device."""
    clamped = indices.clamp(0, rows - 1)
    outside = clamped != indices
    if not indices.numel():
        return clamped, outside
    first = outside.flatten().view(torch.uint8).argmax(0, keepdim=True)  # of equal maxima, torch returns the first
    found = [first, indices.flatten().index_select(0, first).to(torch.int64)]
    found += [torch.full_like(first, number) for number in (length_of(indices), rows)[: len(record) - 2]]
    is_new = outside.flatten().index_select(0, first) & (record[:1] < 0)
    record.copy_(torch.where(is_new, torch.cat(found), record))
    return clamped, outside


target_records: dict[torch.device, Tensor] = {}
"""The results of `target_record` so far, by device."""


@constant_in_graphs
def target_record(device: torch.device) -> Tensor:
    """Return the record of the first bad target of all losses on an accelerator, int64 `(4,)`."""
    # flat place, value, length of the last dimension and size; -1s for none, zeros if weights have changed
    record = target_records.get(device)
    if record is None:
        record = torch.full((4,), -1, device=device)
        if type(record) is Tensor:  # a fake tensor must not outlive its mode
            target_records[device] = record
    return record


def record_changed_weights(is_changed: Tensor) -> None:
    """Record on an accelerator that weights of logits have changed, a boolean scalar, if the record is empty."""
    record = target_record(is_changed.device)
    record.masked_fill_(is_changed & (record[0] < 0), 0)


def changed_weights() -> StaleRowsError:
    """Return the error for logits that are read after the weights of their LM head have changed."""
    return StaleRowsError(
        "The weights of the LM head have changed since the forward pass of these logits. Use them before "
        "optimizer.step(), keep outputs.logits.detach(), or call embedlayer.unpatch(model)."
    )


def raise_recorded_target(record: Tensor, values: list[int]) -> None:
    """Empty a record of targets and raise its error, if it holds one."""
    place, value, length, size = values
    if place >= 0:
        record.fill_(-1)
        if size == 0:
            raise changed_weights()
        raise outside_error("token id", value, size, first=0, row=place // length, column=place % length)


def rows_without_record(indices: Tensor, size: int, kind: Kind, *, offset: int = 0) -> Tensor | None:
    """Return row numbers that are safe to look up, `indices + offset`, where no bad index needs to be recorded."""
    check_integer_ids(indices)
    rows = indices + offset if offset else indices
    device = device_kind(rows)
    if device == "meta":
        return rows
    if plain_operators_only():
        return rows.clamp(0, size + offset - 1)
    if device != "cpu":
        return None
    if torch.compiler.is_compiling():
        copy: Tensor = checked_copy(rows, size, kind, offset)
        return copy
    raise_if_outside(rows, size + offset, kind, offset=offset)
    return rows


def as_ids(ids: IdsLike, *, beside: nn.Module | Tensor) -> Tensor:
    """Return `ids` as a tensor: tensors unchanged, anything else as int64 on the device of a module or tensor."""
    if isinstance(ids, Tensor):
        return ids
    if isinstance(ids, Mapping):
        raise ShapeError(f"This is a mapping with the keys {', '.join(map(str, ids))}: pass its 'input_ids'.")
    if isinstance(ids, Encoded):
        ids = ids.ids
    elif isinstance(ids, list | tuple) and any(isinstance(part, Encoded) for part in ids):
        ids = [part.ids if isinstance(part, Encoded) else part for part in ids]
    try:
        array = np.asarray(ids)
    except ValueError as error:
        raise ShapeError(
            "Token id sequences must have one length to form a batch: pad them, or pass one at a time."
        ) from error
    if array.size == 0:
        array = array.astype(np.int64)  # NumPy makes floats of an empty list
    if array.dtype.kind not in "iu":
        text = array.dtype.kind == "U"
        found = "text" if text else type(ids).__name__ if array.dtype.kind == "O" else array.dtype.name
        raise _not_integers(found, "tokenizer.encode(text).ids" if text else "ids.astype(numpy.int64)")
    tensor = beside if isinstance(beside, Tensor) else next(chain(beside.parameters(), beside.buffers()))
    return torch.from_numpy(array.astype(np.int64)).to(tensor.device)


def check_integer_ids(ids: Tensor) -> None:
    """Check that token IDs are a tensor of int64 or int32."""
    if ids.dtype not in INTEGERS:
        raise _not_integers(str(ids.dtype).removeprefix("torch."), "ids.long()")


def check_integer_positions(positions: object) -> None:
    """Check that positions are a tensor of int64 or int32, as every scheme takes them."""
    if isinstance(positions, Tensor) and positions.dtype in INTEGERS:
        return
    found = type(positions).__name__
    if isinstance(positions, Tensor):
        found = f"{str(positions.dtype).removeprefix('torch.')} values of shape {tuple(positions.shape)}"
    raise ShapeError(f"Positions are int64 or int32 tensors, such as torch.arange(T), not {found}.")


def require_counted(positions: Tensor) -> None:
    """Check that positions count from 0; on the CPU only, and not in compiled graphs, exports and transforms."""
    if values_are_read(positions) and positions.numel() and bool(positions.amin() < 0):
        raise_if_outside(positions.clamp(max=0), 1, "position")


def _not_integers(found: str, remedy: str) -> ShapeError:
    """Return the error for token IDs that are not int64 or int32; the caller raises it."""
    return ShapeError(
        f"A token id must be int64 or int32, not {found}: pass the tokenizer's ids, for instance {remedy}."
    )


def raise_if_outside(indices: Tensor, size: int, kind: Kind, *, ignore: int | None = None, offset: int = 0) -> None:
    """Raise an error for the first index outside `0..size - 1`; return `None` if there is none."""
    if indices.numel() == 0:
        return
    if ignore is not None:
        indices = torch.where(indices == ignore, 0, indices)
    # torch 2.9 has no `aminmax` of a DTensor
    low, high = torch.aminmax(indices) if type(indices) is Tensor else (indices.min(), indices.max())
    if low >= 0 and high < size:
        return
    outside = ((indices < 0) | (indices >= size)).flatten().to(torch.uint8)
    place = int(torch.nonzero(outside)[0])
    length = length_of(indices)
    value = int(indices.flatten()[place]) - offset
    raise outside_error(kind, value, size - offset, first=-offset, row=place // length, column=place % length)


def outside_error(kind: Kind, value: int, size: int, *, first: int, row: int, column: int) -> EmbedLayerError:
    """Return the error for an index outside its table; the caller raises it."""
    name, _, stream = kind.partition(" of ")
    place = f"{name} {value} at row {row}, column {column}"
    if stream:
        hint = "IDs of a stream count from 0; the offset of its rows is added to them."
        return TokenIdError(f"{place}, {stream}, is outside this stream of {size} rows (0..{size - 1}).\n{hint}")
    if kind == "token id":
        hint = (
            "Check that tokenizer and table belong together; embedlayer.tokenization.table_size(tokenizer) rows are "
            "needed."
            if value >= 0
            else "IDs count from 0. A target without a loss has the value of ignore_index, which is -100 by default."
        )
        return TokenIdError(f"{place} is outside this table of {size} rows (0..{size - 1}).\n{hint}")
    if value < 0:
        return PositionError(f"{place} is below {first}, the first position covered here.\nPositions count from 0.")
    return PositionError(
        f"{place}: a sequence of {value + 1} exceeds the {size} positions covered here.\n"
        f"Shorten the sequence to {size} tokens, or build the layer with a larger max_seq_len."
    )


@torch.library.custom_op("embedlayer::checked_copy", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def checked_copy(indices: Tensor, size: int, kind: str, offset: int = 0) -> Tensor:
    """Call `raise_if_outside` as a custom operator, and return a copy of `indices`."""
    raise_if_outside(indices, size + offset, kind, offset=offset)
    return indices.clone()


@checked_copy.register_fake
def _(indices: Tensor, size: int, kind: str, offset: int = 0) -> Tensor:
    return torch.empty_like(indices)
