"""Checks of token IDs and positions before a look-up.

On the CPU a bad index raises an error at once. On an accelerator no synchronisation is added: bad indices are clamped,
the first one is recorded on the device, and `check()` raises the same error when the program waits for the device
anyway. Under `torch.compile` the CPU check is one custom operator, so there is no graph break.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from embedlayer.computed_buffers import apply_or_allocate
from embedlayer.errors import EmbedLayerError, PositionError, ShapeError, TokenIdError
from embedlayer.shapes import Encoded, IdsLike
from embedlayer.tracing import plain_operators_only

Kind = Literal["token id", "position"]


class IndexCheck(nn.Module):
    """A check that indices are in `0 .. size - 1`, called before a look-up.

    Under `torch.func` transforms and in `torch.export` values cannot be read, so an index outside is clamped to the
    first or the last row there without an error.

    Args:
        size: Number of rows.
        kind: What the indices are, for the message: `"token id"` or `"position"`.
        offset: Number of rows before row 0. Indices may go down to `-offset`, and `index + offset` is looked up.
    """

    first_bad_index: Tensor
    """Flat position, value and length of the last dimension of the first bad index; -1s if there was none.

    It is not a buffer, because it is no state of the model, DistributedDataParallel would overwrite it with that of
    rank 0, and Opacus refuses trainable layers with buffers.
    """

    def __init__(self, size: int, kind: Kind, *, offset: int = 0) -> None:
        super().__init__()
        self.size = size
        self.offset = offset
        self.kind: Kind = kind
        self.first_bad_index = torch.full((3,), -1)

    def move_record(self, device: torch.device | str) -> None:
        """Move the record of the first bad index to `device`; from the meta device, start with an empty one."""
        lost = self.first_bad_index.is_meta
        self.first_bad_index = torch.full((3,), -1, device=device) if lost else self.first_bad_index.to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "IndexCheck":
        """Move the module as in torch, with its record of the first bad index."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.move_record(apply_or_allocate(fn, self.first_bad_index).device)
        return self

    def forward(self, indices: IdsLike) -> tuple[Tensor, Tensor | None]:
        """Return indices that are safe to look up, and a mask of the bad ones.

        Returns:
            The indices plus `offset`, and a boolean mask of their shape, or `None` where there are no bad indices.

        Raises:
            ShapeError: `indices` are not integers.
            TokenIdError: On the CPU, a token ID is outside; the message names row, column, value and size.
            PositionError: On the CPU, a position is outside.
        """
        indices = as_ids(indices, beside=self, kind=self.kind)
        if indices.dtype not in (torch.int64, torch.int32):
            raise _not_integers(self.kind, str(indices.dtype).removeprefix("torch."), "ids.long()")
        rows = indices + self.offset if self.offset else indices
        if rows.is_meta:
            return rows, None
        if plain_operators_only():
            return rows.clamp(0, self.size + self.offset - 1), None
        if rows.device.type != "cpu":
            return self.clamp_and_record(rows)
        if torch.compiler.is_compiling():
            return checked_copy(rows, self.size, self.kind, self.offset), None
        raise_if_outside(rows, self.size + self.offset, self.kind, offset=self.offset)
        return rows, None

    def clamp_and_record(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Clamp indices on an accelerator and record the first bad one, without waiting for the device.

        Returns:
            The clamped indices, and a boolean mask of the bad ones.
        """
        if self.first_bad_index.device != indices.device:  # weights may be moved one by one
            self.move_record(indices.device)
        outside = (indices < 0) | (indices >= self.size + self.offset)
        if not indices.numel():
            return indices, outside
        flat = outside.flatten()
        places = torch.arange(flat.numel(), device=indices.device)
        first = torch.where(flat, places, flat.numel()).amin(dim=0, keepdim=True)
        value = indices.flatten().index_select(0, first.clamp(max=flat.numel() - 1)).to(torch.int64)
        found = torch.cat([first, value, torch.full_like(first, indices.shape[-1] if indices.dim() else 1)])
        is_new = (first < flat.numel()) & (self.first_bad_index[:1] < 0)
        self.first_bad_index.copy_(torch.where(is_new, found, self.first_bad_index))
        return indices.clamp(0, self.size + self.offset - 1), outside

    def extra_repr(self) -> str:
        """Return the kind and the number of rows, for `print`: `"token id < 100"`."""
        return f"{self.kind} < {self.size}"

    def check(self) -> None:
        """Wait for the device, and raise the error of the first bad index since the last check, if there was one.

        Raises:
            TokenIdError: A token ID was outside.
            PositionError: A position was outside.
        """
        if self.first_bad_index.is_meta:
            return
        place, value, length = self.first_bad_index.tolist()
        if place >= 0:
            self.first_bad_index.fill_(-1)
            raise _outside(self.kind, value - self.offset, self.size, row=place // length, column=place % length)


def as_ids(ids: IdsLike, *, beside: nn.Module, kind: Kind = "token id") -> Tensor:
    """Return `ids` as a tensor: tensors unchanged, anything else as int64 on the device of a module.

    Args:
        ids: A tensor, a number, a list of numbers or of lists of one length, a NumPy array of integers, or one or
            several encodings of a tokenizer.
        beside: Module that looks the IDs up.
        kind: What the numbers are, for the message.

    Raises:
        ShapeError: The values are not integers, the sequences have different lengths, or `ids` is a mapping, as
            `transformers` tokenizers return.

    Example:
        >>> as_ids([[1, 2], [3, 4]], beside=TokenEmbedding(100, 8))
        tensor([[1, 2],
                [3, 4]])
    """
    if isinstance(ids, Tensor):
        return ids
    if isinstance(ids, Mapping):
        raise ShapeError(
            f"This is a mapping with the keys {', '.join(map(str, ids))}, not {kind}s: pass its 'input_ids', and its "
            f"'attention_mask' as attention_mask where texts are padded."
        )
    if isinstance(ids, Encoded):
        ids = ids.ids
    elif isinstance(ids, list | tuple) and any(isinstance(part, Encoded) for part in ids):
        ids = [part.ids if isinstance(part, Encoded) else part for part in ids]
    try:
        array = np.asarray(ids)
    except ValueError as error:
        raise ShapeError(
            f"Sequences of {kind}s must have one length to form a batch, not different ones: "
            f"pad them, or pass them one at a time."
        ) from error
    if array.size == 0:
        array = array.astype(np.int64)  # NumPy makes floats of an empty list
    if array.dtype.kind not in "iu":
        text = array.dtype.kind == "U"
        found = "text" if text else type(ids).__name__ if array.dtype.kind == "O" else array.dtype.name
        raise _not_integers(kind, found, "tokenizer.encode(text).ids" if text else "ids.astype(numpy.int64)")
    record = [beside.first_bad_index] if isinstance(beside, IndexCheck) else []
    device = next(chain(record, beside.parameters(), beside.buffers())).device
    return torch.from_numpy(array.astype(np.int64)).to(device)


def _not_integers(kind: Kind, found: str, remedy: str) -> ShapeError:
    """Return the error for values that are not integers."""
    return ShapeError(
        f"A {kind} must be int64 or int32, not {found}. "
        f"Look-up is by whole numbers: pass the tokenizer's ids, for instance {remedy}."
    )


def raise_if_outside(indices: Tensor, size: int, kind: Kind, *, ignore: int | None = None, offset: int = 0) -> None:
    """Raise an error for the first index outside `0 .. size - 1`. It reads the values, so call it on the CPU only.

    Args:
        indices: Integers of any shape.
        size: Number of rows.
        kind: What the indices are, for the message.
        ignore: Value that is accepted although it is outside, or `None`.
        offset: Number that was added to the indices, for the message.

    Raises:
        TokenIdError: A token ID is outside.
        PositionError: A position is outside.
    """
    if indices.numel() == 0:
        return
    if ignore is not None:
        indices = torch.where(indices == ignore, 0, indices)
    low, high = torch.aminmax(indices)
    if low >= 0 and high < size:
        return
    outside = ((indices < 0) | (indices >= size)).flatten().to(torch.uint8)
    place = int(torch.nonzero(outside)[0])
    length = indices.shape[-1] if indices.dim() else 1
    value = int(indices.flatten()[place]) - offset
    raise _outside(kind, value, size - offset, row=place // length, column=place % length)


def _outside(kind: Kind, value: int, size: int, *, row: int, column: int) -> EmbedLayerError:
    """Return the error for an index outside the table, at a row and column of the batch."""
    place = f"{kind} {value} at row {row}, column {column}"
    if kind == "token id":
        return TokenIdError(
            f"{place} is outside this table of {size} rows (0..{size - 1}).\n"
            f"Check that tokenizer and table belong together, or build the table with the tokenizer's vocabulary size."
        )
    hint = (
        f"Shorten the sequence to {size} tokens, or build the layer with a larger max_seq_len."
        if value >= 0
        else "Positions count from 0."
    )
    return PositionError(f"{place}: a sequence of {value + 1} exceeds the {size} positions covered here.\n{hint}")


@torch.library.custom_op("embedlayer::checked_copy", mutates_args=())
def checked_copy(indices: Tensor, size: int, kind: str, offset: int = 0) -> Tensor:
    """Check indices with `raise_if_outside` as one node of a compiled graph on the CPU, and return a copy of them."""
    raise_if_outside(indices, size + offset, "position" if kind == "position" else "token id", offset=offset)
    return indices.clone()


@checked_copy.register_fake
def _(indices: Tensor, size: int, kind: str, offset: int = 0) -> Tensor:
    return torch.empty_like(indices)
