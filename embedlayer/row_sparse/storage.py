"""The stored rows of a row-sparse table and of its optimizer's state: where they are, and how they are written."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from embedlayer.core.block_sizes import NUMBERS, block_size
from embedlayer.core.devices import device_kind
from embedlayer.core.errors import ShapeError
from embedlayer.core.shapes import wide_dtype
from embedlayer.core.torch_state import has_memory, without_dispatch
from embedlayer.kernels.kernel import FLOATS, Array, as_array
from embedlayer.kernels.operation import Operation
from embedlayer.row_sparse.gradient import rows_in_block
from embedlayer.row_sparse.history import StepRates
from embedlayer.row_sparse.stochastic_rounding import round_rows


class RowStorage(ABC):
    """Where the rows of a row-sparse table and of its optimizer state are stored."""

    keeps_old_rows = True
    """Whether `before_write` stores the old contents, and should be told only of rows that change."""

    @abstractmethod
    def new_state(self, weight: Tensor, name: str, width: int | None, dtype: torch.dtype) -> Tensor:
        """Return a state tensor with an entry for each row of `weight`: zeros, unless stored entries were restored."""

    @abstractmethod
    def place(self, weight: Tensor, name: str, value: Tensor) -> Tensor:
        """Return a state tensor that was loaded from elsewhere, as this object stores it."""

    @abstractmethod
    def check_process(self) -> None:
        """Check before a read that this process may read the rows."""

    @abstractmethod
    def before_write(self, rows: Tensor) -> None:
        """Prepare for a write to the values or the state of rows, which still have their old contents."""


class RowsInMemory(RowStorage):
    """Ordinary memory, on the device of the weight."""

    keeps_old_rows = False

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


def rows_at_once(table: Tensor) -> int:
    """Return how many rows of `table` to process at once so that a chunk fits the CPU cache; at least 1."""
    return max(1, block_size(NUMBERS, device_kind(table)) // table.shape[1])


def chunk_slices(rows: Tensor, size: int) -> list[slice]:
    """Return the slices that split the row numbers `rows` into chunks of `size`; the last chunk may be smaller."""
    return [slice(low, low + size) for low in range(0, len(rows), max(size, 1))]


def tolerance_of(table: Tensor) -> float:
    """Return the relative error that `StepHistory.skipped_steps` may have, for a table of this dtype."""
    return 1e-12 if table.dtype == torch.float64 else 1e-7


def gather_rows(table: Tensor, rows: Tensor, buffer: Tensor) -> Tensor:
    """Copy the rows `rows` of `table` into the start of `buffer`, converted to its dtype, and return that part."""
    values = buffer[: len(rows)]
    if values.dtype == table.dtype:
        return torch.index_select(table, 0, rows, out=values)
    return values.copy_(table.index_select(0, rows))


def apply_skipped_steps_(
    p: Tensor, m: Tensor, root: Tensor, decay: Tensor, terms: list[Tensor], buffer: Tensor
) -> None:
    """Apply the AdamW steps that rows skipped: `p = p * decay - m * sum_q weight_q / (root + node_q)`, in place."""
    weights, nodes = terms[: len(terms) // 2], terms[len(terms) // 2 :]
    total = torch.add(root, nodes[0], out=buffer)
    torch.div(weights[0], total, out=total)
    for weight, node in zip(weights[1:], nodes[1:], strict=True):
        total.addcdiv_(weight, root + node)
    p.mul_(decay).addcmul_(m, total, value=-1)


class RowTensors:
    """The rows of a table and of its optimizer's state as plain tensors, which are written in place.

    Attributes:
        memory: Shape of the weight, and addresses of it and of the moments. They are other ones after
            `weight.data = ...` or `share_memory_()`.
        is_shared: Whether the table is in memory that other processes can write; see `is_in_shared_memory`.
        arrays: What a kernel on a CPU takes: the steps of values and of moments, and table, first moments, second
            moments and seed; `None` where no kernel takes these tensors.
    """

    def __init__(
        self,
        weight: Tensor,
        moments: tuple[Tensor, ...],
        steps: tuple[Tensor, Tensor],
        rounding_seed: int | None,
        memory: tuple[object, ...],
    ) -> None:
        self.table, self.moments, self.rounding_seed = raw_weight(weight), moments, rounding_seed
        check_state_size(self.table, moments)
        self.memory, self.is_shared = memory, is_in_shared_memory(self.table)
        self.on_gpu, self.block = device_kind(self.table) == "cuda", rows_in_block(self.table)
        self.rowwise = moments[-1].shape[1] == 1
        self._all = (self.table, *moments, *steps)
        self.arrays: tuple[tuple[Array, ...], tuple[Array | int, ...]] | None = None
        are_plain = all(has_memory(each) and each.is_contiguous() for each in self._all)
        if are_plain and self.table.is_cpu and FLOATS.issuperset(each.dtype for each in self._all[:-2]):
            first = moments[0] if len(moments) > 1 else self.table[:0]
            rows = (as_array(self.table), as_array(first), as_array(moments[-1]))
            self.arrays = (*map(as_array, steps),), (*rows, -1 if rounding_seed is None else rounding_seed)

    def kernel_applies(self, operation: Operation) -> bool:
        """Return whether kernels of an operation may compute with the rows now."""
        if self.on_gpu:
            return all(each.is_contiguous() for each in self._all) and operation.applies(*self._all)
        return self.arrays is not None and not operation.refusal()

    @property
    def random_seed(self) -> int | None:
        """Return the seed of stochastic rounding, or `None` where rows are rounded to nearest."""
        return self.rounding_seed if self.table.dtype == torch.bfloat16 else None

    def skip_steps(self, rows: Tensor, terms: list[Tensor], *, step: int, cache: bool) -> list[Tensor]:
        """Apply steps without a gradient to the values of distinct rows. The moments are not changed."""
        decay, *quadrature = terms
        tables, dtype = (self.table, *self.moments), wide_dtype(self.table.dtype)
        size = min(rows_at_once(self.table), len(rows))
        count = len(rows) if cache else size
        buffers = [self.table.new_empty((count, each.shape[1]), dtype=dtype) for each in tables]
        roots, buffer = (self.table.new_empty((size, tables[-1].shape[1]), dtype=dtype) for _ in range(2))
        for chunk in chunk_slices(rows, size):
            some = rows[chunk]
            low = chunk.start if cache else 0
            p, *moments = (gather_rows(table, some, each[low:]) for table, each in zip(tables, buffers, strict=True))
            if quadrature:
                root = torch.rsqrt(moments[1], out=roots[: len(some)]).reciprocal_()
                some_terms = [each[chunk] for each in quadrature]
                apply_skipped_steps_(p, moments[0], root, decay[chunk], some_terms, buffer[: len(some)])
            else:
                p.mul_(decay[chunk])
            if not cache:
                self.write(some, p, step=step)
        if cache:  # at once: a call costs as much as some hundred rows
            self.write(rows, buffers[0], step=step)
        return buffers

    def step_rows(
        self,
        rows: Tensor,
        values: list[Tensor],
        gradients: Tensor,
        decays: list[Tensor],
        rates: StepRates,
        *,
        step: int,
    ) -> None:
        """Make an optimizer's step on distinct rows with a gradient, by torch operators."""
        size = min(rows_at_once(self.table), len(rows))
        buffer = self.table.new_empty((size, values[-1].shape[1]), dtype=wide_dtype(self.table.dtype))
        for chunk in chunk_slices(rows, size):
            p, *moments = (each[chunk] for each in values)
            g = gradients[chunk].to(p.dtype)
            for moment, decay in zip(moments, decays, strict=True):
                moment.mul_(decay[chunk])
            m = moments[0].add_(g, alpha=rates.add1) if len(moments) > 1 else g
            if moments[-1].shape == g.shape:
                moments[-1].addcmul_(g, g, value=rates.add2)
            else:
                moments[-1].add_(g.square().mean(1, keepdim=True), alpha=rates.add2)
            denominator = torch.rsqrt(moments[-1], out=buffer[: len(p)]).reciprocal_().add_(rates.addend)
            p.mul_(rates.factor).addcdiv_(m, denominator, value=-rates.rate)
        self.write(rows, values[0], step=step)
        for moment, new in zip(self.moments, values[1:], strict=True):
            moment.index_copy_(0, rows, new.to(moment.dtype))

    def decay_moments(self, rows: Tensor, decays: list[Tensor]) -> None:
        """Multiply each of the moments of distinct rows by factors, `(U, 1)` each."""
        for chunk in chunk_slices(rows, rows_at_once(self.moments[0])):
            for moment, decay in zip(self.moments, decays, strict=True):
                decayed = moment.index_select(0, rows[chunk]) * decay[chunk]
                moment.index_copy_(0, rows[chunk], decayed.to(moment.dtype))

    def write(self, rows: Tensor, values: Tensor, *, step: int) -> None:
        """Write new values of distinct rows, `(U, D)`, rounded to the dtype of the table. They include step `step`."""
        if self.random_seed is not None:
            values = round_rows(values, rows, seed=self.random_seed, step=step)
        self.table.index_copy_(0, rows, values.to(self.table.dtype))


def check_state_size(weight: Tensor, moments: Sequence[Tensor]) -> None:
    """Check that the optimizer's moments fit the shape of the weight."""
    for each in moments:
        if each.shape != weight.shape and not (each is moments[-1] and each.shape == (weight.shape[0], 1)):
            raise ShapeError(
                f"The table is {tuple(weight.shape)} and the optimizer's state for it {tuple(each.shape)}. Build "
                f"the optimizer again after resizing, or load the state of this table."
            )


def raw_weight(weight: Tensor) -> Tensor:
    """Return a detached plain tensor over the memory of a row-sparse weight, without applying pending updates."""
    if "__torch_dispatch__" not in vars(weight):  # also a fake tensor or a DTensor
        return Tensor.detach(weight)
    with without_dispatch():
        return Tensor.detach(weight)


def is_in_shared_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is in CPU memory that other processes can write, as after `share_memory_()`."""
    plain = raw_weight(tensor)
    return device_kind(plain) == "cpu" and plain.untyped_storage().is_shared()
