"""Which process has which rows of a tensor, and how the others get at them.

One process has them all (`ALONE`). Several that have divided them are `ManyOwners` (`embedlayer.vocab.divided`);
surgery asks both the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from jaxtyping import Int, Shaped
from torch import Tensor

from embedlayer.io.files import JsonObject
from embedlayer.vocab.starting_rows import HeadRows, Rows

Ids = Int[Tensor, " _"]
Part = Shaped[Tensor, "_ *each"]
"""The rows of a tensor that are here; spare ones may stand behind them."""


class Owners(ABC):
    """Abstract: the processes that have the rows of a tensor, each its own; all must ask alike.

    Attributes:
        count: How many there are.
        rank: Which of them this is, from 0.
    """

    count: int = 1
    rank: int = 0

    def span(self, size: int) -> tuple[int, int]:
        """Of `size` rows the first that is here, and the first after those that are.

        Raises:
            SizeError: A process would have none.
        """
        return self.spans(size)[self.rank]

    @abstractmethod
    def spans(self, size: int) -> list[tuple[int, int]]:
        """`span` of each process; the first has as many rows as any."""

    @abstractmethod
    def sent(self, part: Part, wanted: Sequence[Ids], size: int) -> Part:
        """The rows that this process wants.

        Args:
            part: Rows of `size` that are here.
            wanted: The IDs that each process wants; all know of all.
            size: Rows in all.
        """

    @abstractmethod
    def delivered(self, ids: Ids, rows: Part, size: int) -> tuple[Ids, Part]:
        """Rows that go to whoever owns their IDs of `size`: those for this process, by place in its own."""

    @abstractmethod
    def reader(self, part: Part, size: int, count: int) -> Rows:
        """The first `count` of `size` rows, as starts read them."""

    @abstractmethod
    def first_says(self, values: Part) -> Part:
        """The numbers of process 0."""

    @abstractmethod
    def agreed(self) -> AbstractContextManager[JsonObject]:
        """What is done inside is done by all, or fails for all; facts that are left there must be the same.

        Raises:
            PeerError: Another process failed, or came with other facts.
        """


class _Alone(Owners):
    """One process, which has all rows."""

    def spans(self, size: int) -> list[tuple[int, int]]:
        """All."""
        return [(0, size)]

    def sent(self, part: Part, wanted: Sequence[Ids], size: int) -> Part:
        """They are here."""
        return part.index_select(0, wanted[0].to(part.device))

    def delivered(self, ids: Ids, rows: Part, size: int) -> tuple[Ids, Part]:
        """They are here."""
        return ids, rows

    def reader(self, part: Part, size: int, count: int) -> Rows:
        """They are here."""
        return HeadRows(part[:count])

    def first_says(self, values: Part) -> Part:
        """The numbers."""
        return values

    def agreed(self) -> AbstractContextManager[JsonObject]:
        """Nobody else is asked."""
        return nullcontext({})


ALONE = _Alone()
