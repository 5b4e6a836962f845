"""The door at which IDs and positions are checked, once.

On the CPU a bad index is an error at once. On an accelerator nobody waits for the device: bad indices are clamped,
the first one is remembered on the device, and `check()` raises the same error when somebody waits anyway. Under
`torch.compile` the CPU check is one custom operator, so one graph stays one graph.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from embedlayer.derived import applied
from embedlayer.errors import EmbedLayerError, PositionError, ShapeError, TokenIdError
from embedlayer.shapes import Encoded, IdsLike
from embedlayer.tracing import plain_operators_only

Kind = Literal["token id", "position"]


class Bounds(nn.Module):
    """Indices that must lie in `0 .. size - 1`.

    Under `torch.func` transforms and in `torch.export` values can neither be read nor raised on: an index outside is
    clamped to the first or the last row there, silently.

    Args:
        size: How many rows there are.
        kind: What the indices are, for the message.
        offset: Rows in front of row 0: indices may go down to `-offset`, and what is looked up is `index + offset`.
    """

    first_outside: Tensor
    """(flat index, value, length of the last dimension) of the first bad one, or -1s.

    No buffer: it is no state of the model, DistributedDataParallel would overwrite it with that of rank 0, and Opacus
    refuses trainable layers that have buffers.
    """

    def __init__(self, size: int, kind: Kind, *, offset: int = 0) -> None:
        super().__init__()
        self.size = size
        self.offset = offset
        self.kind: Kind = kind
        self.first_outside = torch.full((3,), -1)

    def derive(self, device: torch.device | str) -> None:
        """Move the record to `device`; one that was on the meta device starts empty."""
        lost = self.first_outside.is_meta
        self.first_outside = torch.full((3,), -1, device=device) if lost else self.first_outside.to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Bounds":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.derive(applied(fn, self.first_outside).device)
        return self

    def forward(self, indices: IdsLike) -> tuple[Tensor, Tensor | None]:
        """Indices that are safe to look up, and a mask of those that were not (`None` where none can be left).

        Raises:
            ShapeError: Not integers.
            TokenIdError: On the CPU, at once, naming row, column, value and size. Positions: `PositionError`.
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
            return self.clamped(rows)
        if torch.compiler.is_compiling():
            return checked_copy(rows, self.size, self.kind, self.offset), None
        raise_if_outside(rows, self.size + self.offset, self.kind, offset=self.offset)
        return rows, None

    def clamped(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Clamp, and remember the first index that was outside, without waiting for the device."""
        if self.first_outside.device != indices.device:  # weights may be moved one by one
            self.derive(indices.device)
        outside = (indices < 0) | (indices >= self.size + self.offset)
        if not indices.numel():
            return indices, outside
        flat = outside.flatten()
        places = torch.arange(flat.numel(), device=indices.device)
        first = torch.where(flat, places, flat.numel()).amin(dim=0, keepdim=True)
        value = indices.flatten().index_select(0, first.clamp(max=flat.numel() - 1)).to(torch.int64)
        found = torch.cat([first, value, torch.full_like(first, indices.shape[-1] if indices.dim() else 1)])
        is_new = (first < flat.numel()) & (self.first_outside[:1] < 0)
        self.first_outside.copy_(torch.where(is_new, found, self.first_outside))
        return indices.clamp(0, self.size + self.offset - 1), outside

    def extra_repr(self) -> str:
        """The rule, for `print`."""
        return f"{self.kind} < {self.size}"

    def check(self) -> None:
        """Wait for the device and raise the error of the first bad index since the last check, if there was one.

        Raises:
            TokenIdError: A token ID was outside. Positions: `PositionError`.
        """
        if not self.first_outside.is_meta:
            self.raise_recorded()

    def raise_recorded(self) -> None:
        """Raise what `clamped` remembered, and forget it."""
        place, value, length = self.first_outside.tolist()
        if place >= 0:
            self.first_outside.fill_(-1)
            raise _outside(self.kind, value - self.offset, self.size, row=place // length, column=place % length)


def as_ids(ids: IdsLike, *, beside: nn.Module, kind: Kind = "token id") -> Tensor:
    """Return `ids` as a tensor: tensors unchanged, anything else as int64 on the device of a module.

    Args:
        ids: A tensor, a number, a list of numbers or of lists of one length, a NumPy array of integers, or one or
            several encodings of a tokenizer.
        beside: The module that looks them up.
        kind: What the numbers are, for the message.

    Raises:
        ShapeError: Not integers, sequences of different lengths, or what `transformers` tokenizers return, which holds
            more than IDs.

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
    tensors = [beside.first_outside] if isinstance(beside, Bounds) else chain(beside.parameters(), beside.buffers())
    return torch.from_numpy(array.astype(np.int64)).to(next(iter(tensors)).device)


def _not_integers(kind: Kind, found: str, remedy: str) -> ShapeError:
    return ShapeError(
        f"A {kind} must be int64 or int32, not {found}. "
        f"Look-up is by whole numbers: pass the tokenizer's ids, for instance {remedy}."
    )


def raise_if_outside(indices: Tensor, size: int, kind: Kind, *, ignore: int | None = None, offset: int = 0) -> None:
    """Raise the error of the first index outside `0 .. size - 1`; on the CPU only, since it reads the values.

    Args:
        indices: Integers of any shape.
        size: How many rows there are.
        kind: What the indices are, for the message.
        ignore: A value that is allowed although it is outside.
        offset: How far the indices were shifted, for the message.
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
    """The indices, once `raise_if_outside` has seen them: what a compiled graph calls on the CPU."""
    raise_if_outside(indices, size + offset, "position" if kind == "position" else "token id", offset=offset)
    return indices.clone()


@checked_copy.register_fake
def _(indices: Tensor, size: int, kind: str, offset: int = 0) -> Tensor:
    return torch.empty_like(indices)
