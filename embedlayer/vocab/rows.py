"""Where each row of a reshaped vocabulary comes from: one description that moves every tensor of its size.

Tables, heads, biases, an optimizer's moments and token IDs in a configuration or a corpus all follow the same list:
new row `i` is old row `sources[i]`, or starts afresh.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from embedlayer.errors import SizeError, TokenIdError

NEW = -1
"""In `sources`: a row that starts afresh."""

GONE = -1
"""In `new_ids`: an old row that is nowhere any more."""

ROWS_AT_ONCE = 8192
BYTES_AT_ONCE = 1 << 24


class RowMove:
    """New row `i` is old row `sources[i]`, or starts afresh where that is -1.

    Args:
        sources: Old row of each new row, `(N,)` int64.
        old_size: Rows before.

    Raises:
        TokenIdError: A source is no old row.
        SizeError: No row is left.

    Example:
        >>> move = RowMove(torch.tensor([2, 0, NEW]), old_size=3)
        >>> move.apply(torch.tensor([[1.0], [2.0], [3.0]])).flatten()
        tensor([3., 1., 0.])
        >>> move.new_ids.tolist(), move.dropped.tolist(), move.started.tolist()
        ([1, -1, 0], [1], [2])
    """

    def __init__(self, sources: Tensor, old_size: int) -> None:
        if not len(sources):
            raise SizeError("No token would be left: keep at least one.")
        low, high = torch.aminmax(sources)
        if low < NEW or high >= old_size:
            raise TokenIdError(f"Rows {int(low)} to {int(high)} are asked for, and there are {old_size} (0 to that).")
        self.sources = sources
        self.old_size = old_size
        places = torch.where(sources == NEW, old_size, sources)
        first = torch.full((old_size + 1,), len(sources))  # of two copies of a row, where the old ID goes
        first.scatter_reduce_(0, places, torch.arange(len(sources)), "amin")
        self.new_ids = torch.where(first == len(sources), GONE, first)[:old_size]

    @property
    def size(self) -> int:
        """Rows after, N."""
        return len(self.sources)

    @property
    def started(self) -> Tensor:
        """New rows that start afresh, in order."""
        return (self.sources == NEW).nonzero().squeeze(1)

    @property
    def dropped(self) -> Tensor:
        """Old rows that are nowhere any more, in order."""
        return (self.new_ids == GONE).nonzero().squeeze(1)

    def inverse(self) -> "RowMove":
        """The way back, on which the dropped rows are those that start afresh."""
        return RowMove(self.new_ids, self.size)

    def apply(self, tensor: Tensor, start: Tensor | None = None, *, spare: int = 0) -> Tensor:
        """The tensor with its rows moved, in memory of its own.

        Args:
            tensor: `(old_size, ...)`; rows beyond are spare ones and are left out.
            start: `(len(started), ...)`: what the fresh rows hold; zeros if `None`.
            spare: Zero rows to put behind.

        Returns:
            `(N + spare, ...)`, of the same type on the same device.
        """
        moved = tensor.new_empty((self.size + spare, *tensor.shape[1:]))
        moved[self.size :] = 0
        kept = (self.sources != NEW).nonzero().squeeze(1)
        for part in kept.split(ROWS_AT_ONCE):
            rows = tensor.detach().index_select(0, self.sources[part].to(tensor.device))
            moved.index_copy_(0, part.to(tensor.device), rows)
        fresh = self.started.to(tensor.device)
        if start is None:
            moved.index_fill_(0, fresh, 0)
        else:
            moved.index_copy_(0, fresh, start.detach().to(tensor.device, tensor.dtype))
        return moved


def row_fingerprint(tensor: Tensor) -> str:
    """A short name for exactly these numbers, their type and their shape; read in chunks."""
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    for piece in pieces_of(tensor):
        digest.update(piece.numpy().data)
    return digest.hexdigest()


def pieces_of(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of a tensor on the CPU, a few rows at a time."""
    tensor = tensor.detach()
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    row_bytes = max(rows[:1].numel() * rows.element_size(), 1)
    for piece in rows.split(max(BYTES_AT_ONCE // row_bytes, 1)):
        yield piece.cpu().contiguous().flatten().view(torch.uint8)


End = Literal["table", "head"]


@dataclass
class Slot:
    """One tensor with a row for each token.

    Attributes:
        name: Its name, `"table.weight"` or `"optimizer.table.weight.exp_avg"`.
        tensor: As it is.
        swap: Puts another tensor in its place.
        spare: Zero rows that are to stand behind the tokens'.
        end: Where its rows start; at neither end fresh ones are zero.
    """

    name: str
    tensor: Tensor
    swap: Callable[[Tensor], None]
    spare: int = 0
    end: End | None = None


def fingerprints(slots: Sequence[Slot]) -> dict[str, str]:
    """Of each tensor, by name."""
    return {slot.name: row_fingerprint(slot.tensor) for slot in slots}


class Moved(NamedTuple):
    """What a move makes of tensors, each by its name.

    Attributes:
        tensors: The new ones.
        rows: The rows that are gone.
        before: Fingerprints of the old tensors.
        after: Of the new ones.
        origins: In words, where each fresh row came from.
    """

    tensors: dict[str, Tensor]
    rows: dict[str, Tensor]
    before: dict[str, str]
    after: dict[str, str]
    origins: dict[int, str]


class Start(NamedTuple):
    """What fresh rows hold.

    Attributes:
        values: `(len(move.started), ...)`.
        origins: In words, where each came from, by its new ID.
    """

    values: Tensor
    origins: dict[int, str]


def moved(slots: Sequence[Slot], move: RowMove, start: Callable[[Slot], Start]) -> Moved:
    """Move the rows of all tensors, without touching them.

    Args:
        slots: The tensors.
        move: Where each new row comes from.
        start: What the fresh rows of a table's or a head's tensor hold; in others they are zero.
    """
    tensors: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    origins: dict[int, str] = {}
    for slot in slots:
        old = slot.tensor.detach()[: move.old_size]
        fresh = start(slot) if slot.end is not None and len(move.started) else None
        tensors[slot.name] = move.apply(old, None if fresh is None else fresh.values, spare=slot.spare)
        origins = (fresh.origins if fresh is not None else {}) | origins  # the table's, which come first, count
        rows[slot.name] = old.index_select(0, move.dropped.to(old.device)).cpu()
    after = {name: row_fingerprint(tensor) for name, tensor in tensors.items()}
    return Moved(tensors, rows, fingerprints(slots), after, origins)
