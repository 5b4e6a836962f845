"""Where the rows of a row-sparse table and of its optimizer state are stored."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class RowStorage(ABC):
    """Where the rows of a row-sparse table and of its optimizer state are stored.

    A row-sparse table calls this object wherever it allocates a tensor with an entry for each row, and before it writes
    rows.
    """

    @abstractmethod
    def new_state(self, weight: Tensor, name: str, width: int | None, dtype: torch.dtype) -> Tensor:
        """Return a state tensor with an entry for each row of `weight`: zeros, unless stored entries were restored.

        It must not read or write all rows, which may be more than fit into memory.

        Args:
            weight: Weight of the table, `(V, D)`.
            name: Name of the state, such as `exp_avg` or `value_steps`.
            width: Number of columns, or `None` for one number a row.
            dtype: Data type of the state.

        Returns:
            The tensor, `(V, width)`, or `(V,)` for a width of `None`.
        """

    @abstractmethod
    def place(self, weight: Tensor, name: str, value: Tensor) -> Tensor:
        """Return a state tensor that was loaded from elsewhere, as this object stores it.

        Args:
            weight: Weight of the table, `(V, D)`.
            name: Name of the state, as for `new_state`.
            value: The loaded tensor, with an entry for each row.
        """

    @abstractmethod
    def check_process(self) -> None:
        """Check before a read that this process may read the rows.

        Raises:
            FileError: It was forked from the process that trains them in files.
        """

    @abstractmethod
    def before_write(self, rows: Tensor) -> None:
        """Prepare for a write to the values or the state of rows, which still have their old contents.

        Args:
            rows: Distinct row numbers, `(U,)`.
        """


class RowsInMemory(RowStorage):
    """Ordinary memory, on the device of the weight."""

    def new_state(self, weight: Tensor, name: str, width: int | None, dtype: torch.dtype) -> Tensor:
        """Return zeros. On a CPU the system provides their memory when rows are written, not here."""
        shape = weight.shape[:1] if width is None else (weight.shape[0], width)
        return torch.zeros(shape, dtype=dtype, device=weight.device)

    def place(self, weight: Tensor, name: str, value: Tensor) -> Tensor:
        """Return `value` on the device of the weight. A tensor that is on it already is not copied."""
        return value.to(weight.device)

    def check_process(self) -> None:
        """Do nothing: a forked process has the rows and their record as they were at the fork."""

    def before_write(self, rows: Tensor) -> None:
        """Do nothing."""
