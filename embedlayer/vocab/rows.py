"""Where each row of a reshaped vocabulary comes from: one description that moves every tensor of its size.

Tables, heads, biases, an optimizer's moments and token IDs in a configuration or a corpus all follow the same list:
new row `i` is old row `sources[i]`, or starts afresh.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from embedlayer.errors import ShapeError, SizeError, TokenIdError
from embedlayer.io.safetensors_files import byte_chunks
from embedlayer.vocab.owners import ALONE, Owners

NEW = -1
"""In `sources`: a row that starts afresh."""

GONE = -1
"""In `new_ids`: an old row that is nowhere any more."""

ROWS_AT_ONCE = 8192


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

    def apply(self, part: Tensor, start: Tensor | None = None, *, spare: int = 0, owners: Owners = ALONE) -> Tensor:
        """The rows of a tensor that are to be here, in memory of its own.

        Args:
            part: `(old_size, ...)`, or those of the rows that are here; rows beyond are spare ones and are left out.
            start: What those of the fresh rows hold that are to be here, `(k, ...)`; zeros if `None`.
            spare: Zero rows to put behind.
            owners: Who has the others.

        Returns:
            `(N + spare, ...)`, or less where others have rows; of the same type on the same device.
        """
        spans = owners.spans(self.size)
        low, high = spans[owners.rank]
        moved = part.new_empty((high - low + spare, *part.shape[1:]))
        moved[high - low :] = 0
        at_once = max(ROWS_AT_ONCE // owners.count, 1)  # one process may be asked by all
        for first in range(0, spans[0][1], at_once):
            wanted = [self.sources[begin + first : end][:at_once] for begin, end in spans]
            places = (wanted[owners.rank] != NEW).nonzero().squeeze(1) + first
            rows = owners.sent(part.detach(), [ids[ids != NEW] for ids in wanted], self.old_size)
            moved.index_copy_(0, places.to(part.device), rows)
        fresh = within(self.started, low, high).to(part.device)
        if start is None:
            moved.index_fill_(0, fresh, 0)
        else:
            moved.index_copy_(0, fresh, start.detach().to(part.device, part.dtype))
        return moved


def within(ids: Tensor, low: int, high: int) -> Tensor:
    """Those IDs that are among rows `low` to `high - 1`, as places in these."""
    return ids[(ids >= low) & (ids < high)] - low


def row_fingerprint(tensor: Tensor) -> str:
    """A short name for exactly these numbers, their type and their shape; read in chunks."""
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    for piece in byte_chunks(tensor):
        digest.update(piece.numpy().data)
    return digest.hexdigest()


End = Literal["table", "head"]


@dataclass
class Slot:
    """One tensor with a row for each token.

    Attributes:
        name: Its name, `"table.weight"` or `"optimizer.table.weight.exp_avg"`.
        tensor: As it is; where rows are divided, those that are here.
        swap: Puts another tensor in its place.
        spare: Zero rows that are to stand behind the tokens'.
        end: Where its rows start; at neither end fresh ones are zero.
        owners: Who has its rows.
    """

    name: str
    tensor: Tensor
    swap: Callable[[Tensor], None]
    spare: int = 0
    end: End | None = None
    owners: Owners = ALONE


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
    """What some fresh rows hold.

    Attributes:
        values: `(k, ...)`, the next ones.
        origins: In words, where each came from.
    """

    values: Tensor
    origins: Sequence[str]


def moved(
    slots: Sequence[Slot], move: RowMove, start: Callable[[Slot], Iterable[Start]], everyone: Owners = ALONE
) -> Moved:
    """Move the rows of all tensors, without touching them.

    Args:
        slots: The tensors.
        move: Where each new row comes from.
        start: What the fresh rows of a table's or a head's tensor hold, in order, some at a time; in others they are
            zero.
        everyone: The processes that make this move together; fresh rows hold what the first says.
    """
    tensors: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    origins: dict[int, str] = {}
    for slot in slots:
        low, high = slot.owners.span(move.old_size)
        old = slot.tensor.detach()[: high - low]
        tensors[slot.name] = new = move.apply(old, spare=slot.spare, owners=slot.owners)
        if slot.end is not None and len(move.started):
            words = _fill(new, slot.owners.span(move.size), move.started, start(slot), everyone)
            origins = words | origins  # the table's, which come first, count
        rows[slot.name] = old.index_select(0, within(move.dropped, low, high).to(old.device)).cpu()
    after = {name: row_fingerprint(tensor) for name, tensor in tensors.items()}
    return Moved(tensors, rows, fingerprints(slots), after, origins)


def _fill(
    new: Tensor, span: tuple[int, int], fresh: Tensor, starts: Iterable[Start], everyone: Owners
) -> dict[int, str]:
    """Put into a tensor those fresh rows that are to be in it; in words, where each came from."""
    (low, high), words, done = span, list[str](), 0
    for values, origins in starts:
        values = everyone.first_says(values.detach().to(new.device, new.dtype))
        ids, done = fresh[done : done + len(values)], done + len(values)
        here = ((ids >= low) & (ids < high)).nonzero().squeeze(1)
        new.index_copy_(0, (ids[here] - low).to(new.device), values.index_select(0, here.to(new.device)))
        words += origins
    if done != len(fresh):
        raise ShapeError(f"{done} rows were made for {len(fresh)} tokens: a start must give one for each.")
    return dict(zip(fresh.tolist(), words, strict=False))
