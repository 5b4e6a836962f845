"""Which rows of a vocabulary a process holds, and how the numbers of the others come in when all must be summed."""

from abc import ABC, abstractmethod

from torch import Tensor


class HeldRows(ABC):
    """Abstract: the rows of a vocabulary that are here, for tokens of this process and of its peers.

    A chunk of tokens is put together from a part of each process's, `sizes[r]` of rank r.
    """

    @abstractmethod
    def counts(self, tokens: int, wanted: bool) -> tuple[list[int], bool]:
        """Tokens of each process, of which this one has `tokens`, and whether any wants their hidden gradients."""

    @abstractmethod
    def gather(self, part: Tensor, sizes: list[int]) -> Tensor:
        """The parts of all processes, in their order, from this one's."""

    @abstractmethod
    def own(self, chunk: Tensor, sizes: list[int]) -> Tensor:
        """Of something that each has for the whole chunk, this process's part."""

    @abstractmethod
    def home(self, chunk: Tensor, sizes: list[int]) -> Tensor:
        """Of something that each has a share of for the whole chunk, the sum of the shares of this process's part."""

    @abstractmethod
    def highest(self, numbers: Tensor) -> Tensor:
        """The greatest of the processes' numbers, place by place."""

    @abstractmethod
    def total(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """The sums of the processes' numbers, place by place."""

    @abstractmethod
    def places(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Where the rows of `tokens` stand here, and 1 for those that do, 0 for those that are elsewhere."""

    @abstractmethod
    def same(self, number: Tensor) -> bool:
        """Whether all processes have the same number."""


class AllRows(HeldRows):
    """One process that holds all: nothing is to be asked."""

    def counts(self, tokens: int, wanted: bool) -> tuple[list[int], bool]:
        """These alone."""
        return [tokens], wanted

    def gather(self, part: Tensor, sizes: list[int]) -> Tensor:
        """The part."""
        return part

    def own(self, chunk: Tensor, sizes: list[int]) -> Tensor:
        """All of it."""
        return chunk

    def home(self, chunk: Tensor, sizes: list[int]) -> Tensor:
        """All of it."""
        return chunk

    def highest(self, numbers: Tensor) -> Tensor:
        """The numbers."""
        return numbers

    def total(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """The numbers."""
        return numbers

    def places(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens, each of which is here."""
        return tokens, tokens.new_ones(())

    def same(self, number: Tensor) -> bool:
        """There is nobody to differ from."""
        return True
