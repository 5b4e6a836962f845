"""Pending updates of a row-sparse table: optimizer steps that rows without a gradient have not taken yet.

An optimizer such as `RowAdamW` writes only to the rows of a batch. `RowSteps` records the last step of every row, and
`PendingUpdates` applies the missing steps of a row just before the row is read. The literature calls such updates lazy
or just-in-time. They are an attribute of the parameter (`weight.pending_updates`), because parameters are what an
optimizer receives.

A read that applies updates is a write, so a lock excludes other threads from the record and the rows meanwhile. A fork
waits for the lock; see `embedlayer.core.forks`.
"""

import operator
from collections.abc import Callable
from functools import wraps
from itertools import count
from typing import Concatenate, ParamSpec, TypeVar
from weakref import ReferenceType, WeakValueDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from embedlayer.core.block_sizes import PENDING_ROWS, block_size
from embedlayer.core.devices import device_kind
from embedlayer.core.errors import StaleRowsError
from embedlayer.core.forks import call_in_forked_processes, lock_held_at_forks
from embedlayer.core.torch_state import is_capturing
from embedlayer.io.files import JsonObject
from embedlayer.kernels.cpu import rows as row_kernels
from embedlayer.kernels.gpu.launch import columns_of, launch
from embedlayer.kernels.operation import Operation
from embedlayer.row_sparse.gradient import Segments, row_launches, segments_of_equal_ids, sort_rows
from embedlayer.row_sparse.history import Betas, StepHistory, StepRates, step_rates
from embedlayer.row_sparse.row_steps import RowSteps
from embedlayer.row_sparse.storage import (
    RowsInMemory,
    RowStorage,
    RowTensors,
    apply_skipped_steps_,
    check_state_size,
    chunk_slices,
    is_in_shared_memory,
    raw_weight,
    tolerance_of,
)

APPLY_PENDING = Operation(
    "pending updates of rows",
    apply_skipped_steps_,
    cpu=[row_kernels.apply_pending, row_kernels.apply_pending_rowwise],
    gpu=row_launches,
    launches=["apply_pending", "apply_pending_rowwise"],
)
OPTIMIZER_STEP = Operation(
    "step of `RowAdamW` and `RowAdagrad`",
    RowTensors.step_rows,
    cpu=[row_kernels.adamw_step, row_kernels.rowwise_step],
    gpu=row_launches,
    launches=["adamw_step", "rowwise_step"],
)
"""Kernels are for second moments of all numbers of a row, and for one a row; `RowTensors.rowwise` is the index."""

LOW_BITS = 31
"""Bits of the lower half of a seed, so that both halves are positive numbers of 32 bits."""

RATES = ("add1", "add2", "factor", "addend", "update")
"""Names of the numbers of `embedlayer.row_sparse.history.StepRates` in kernels."""

ROWS_IN_PASS = 1 << 18  # rows of a table that a kernel updates at once when all pending updates are applied
LEFT_OUT = 2  # outcome of a row that `APPLY_PENDING` cannot update

_handles = count()
by_handle: WeakValueDictionary[int, "PendingUpdates"] = WeakValueDictionary()
"""The pending updates of all tables by `handle`, because custom operators take only numbers and tensors."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def exclusive(
    method: Callable[Concatenate["PendingUpdates", Arguments], Result],
) -> Callable[Concatenate["PendingUpdates", Arguments], Result]:
    """Decorator of a method of `PendingUpdates` that holds its lock."""

    @wraps(method)
    def run(self: "PendingUpdates", /, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        with self.lock:
            return method(self, *arguments, **options)

    return run


class PendingUpdates:
    """Track which optimizer steps each row of a row-sparse table has not taken yet, and apply them when needed.

    An optimizer such as `RowAdamW` updates only rows with a gradient. In dense AdamW the other rows move too, by
    momentum and weight decay. These updates stay pending until a row is read.

    The optimizer's state of a table consists of first moments, `(V, D)`, unless it has none, and of second moments:
    `(V, D)`, or `(V, 1)` for one a row.

    Of a weight in shared memory no updates stay pending after a step, because other processes read it without this
    record.

    Methods take the weight that this object watches. They raise `StaleRowsError` if it was written in place while
    updates were pending (see `_check_for_writes`), `ShapeError` if the table has another size than the moments, and
    `FileError` in a process that was forked from one that trains the files of the table.

    Args:
        padding_idx: Row that gets no gradient, or `None`.

    Attributes:
        storage: Where the rows and their state are stored.
        steps: Steps of the attached optimizer, and which of them each row has taken; `None` before its first step.
        moments: The optimizer's state tensors: first moments, unless it has none, and second moments.
        restored: `moments` by name where the storage restored them and no optimizer has taken them yet; else empty.
        forgotten: Whether an optimizer was attached and forgotten, and none was attached since. Its state may exist,
            but only it knows at which step.
        rounding_seed: Seed of stochastic rounding for a bfloat16 table, or `None` to round to nearest.
        cached: Rows that the last look-up updated, their values and moments, and the versions of the tensors that have
            them, so that the next optimizer step need not read them; or `None`.
        handle: Number by which custom operators find this object.
        lock: Lock of the rows, their state and this record, which is neither saved nor copied. It is held while updates
            are applied and during a step, but not during collective operations or code of the user.
        replaced: Whether the table got another weight after this object was attached to the former one.
        incomplete: Whether this process was forked while updates were pending in shared memory. Only the process that
            made these steps can apply them.
        eager_blocks: Number of open `pending_updates_applied` blocks, in which each step updates all rows.
        version: Version counter of the weight after the last write that this object knows of.
    """

    def __init__(self, padding_idx: int | None = None) -> None:
        self.padding_idx = padding_idx
        self.storage: RowStorage = RowsInMemory()
        self.replaced = False
        self.incomplete = False
        self.eager_blocks = 0
        self.weight_ref: ReferenceType[nn.Parameter] | None = None
        self.hooks: tuple[RemovableHandle, ...] = ()
        self.steps: RowSteps | None = None
        self.forgotten = False
        self.lock = lock_held_at_forks()
        self.handle = next(_handles)
        by_handle[self.handle] = self
        self.detach()

    def __reduce__(self) -> tuple[type["PendingUpdates"], tuple[int | None]]:
        return PendingUpdates, (self.padding_idx,)  # a copied table has all updates applied, and no optimizer

    @property
    def step(self) -> int:
        """Return the number of the last optimizer step on this table; 0 before the first one."""
        return 0 if self.steps is None else self.steps.step

    @property
    def has_pending(self) -> bool:
        """Return whether some rows may have values without the last optimizer steps."""
        return self.steps is not None and self.steps.has_pending

    @property
    def shared_moments(self) -> bool:
        """Return whether a state tensor of the optimizer is in shared memory."""
        return any(map(is_in_shared_memory, self.moments))

    @exclusive
    def detach(self) -> None:
        """Forget the optimizer: its moments, the history of its steps, and all pending updates.

        The updates are lost, so call `apply_all` first. The object stays attached to the weight.
        """
        self.forgotten = self.forgotten or self.steps is not None
        self.steps = None
        self.version = 0
        self.cached: tuple[Tensor, list[Tensor], list[int]] | None = None
        self.moments: tuple[Tensor, ...] = ()
        self.tensors: RowTensors | None = None
        self.restored: dict[str, Tensor] = {}
        self.rounding_seed: int | None = None

    @exclusive
    def attach(
        self, weight: Tensor, step: int, moments: tuple[Tensor, ...], betas: Betas, *, rounding_seed: int | None = None
    ) -> None:
        """Start to record the steps of an optimizer. The values and moments of all rows must be up to date with `step`.

        Without effect if an optimizer with these moments, betas and seed is attached already. Otherwise the pending
        updates of the one attached before, which may be the same with other betas, are applied first. `step` is the
        number of steps that the optimizer has made so far. Its state tensors, `moments`, are kept and written in place:
        first moments, unless it has none, and second moments.
        """
        check_state_size(weight, moments)
        self._check_for_writes(weight)
        if self.steps is not None:
            same = len(moments) == len(self.moments) and all(map(operator.is_, moments, self.moments))
            if same and self.steps.history.betas == betas and self.rounding_seed == rounding_seed:
                return
            self.apply_all(weight, moments=True)
        steps = self._begin(weight, step, moments, betas, rounding_seed)
        if step:  # at step 0 their zeros are right
            steps.value_steps.fill_(step)
            steps.moment_steps.fill_(step)

    def _begin(
        self, weight: Tensor, step: int, moments: tuple[Tensor, ...], betas: Betas, rounding_seed: int | None
    ) -> RowSteps:
        """Start an empty history after `step`, with the steps of the rows as their storage provides them."""
        names = ("value_steps", "moment_steps")
        steps = [self.storage.new_state(weight, name, None, torch.int32) for name in names]  # or a full disk
        self.steps, self.forgotten = RowSteps(StepHistory(step, betas), *steps), False
        self.moments, self.rounding_seed, self.restored = moments, rounding_seed, {}
        self.tensors = None
        self.version = weight._version
        return self.steps

    @exclusive
    def look_up(self, weight: Tensor, ids: Tensor, *, learns: bool) -> tuple[Tensor, Segments | None]:
        """Apply the pending updates of the rows of IDs on a CPU to the weight in place, and return the rows.

        Returns:
            The rows, `(..., D)`, and the `segments_of_equal_ids` if they were computed.

        Raises:
            IndexError: An ID is outside the table. Nothing was written.
        """
        if not self._has_pending_for_reads(weight):
            return torch.embedding(raw_weight(weight), ids), None
        segments = self._apply_to_rows(weight, ids.flatten(), learns=learns)
        return torch.embedding(self._tensors(weight).table, ids), segments

    @exclusive
    def apply_to_ids(self, weight: Tensor, ids: Tensor, places: tuple[Tensor, Tensor] | None = None) -> None:
        """Apply the pending updates of the rows that an operator is about to read, to the weight in place.

        `places` are the sorted IDs, if the caller has them.
        """
        if not self._has_pending_for_reads(weight):
            return
        tensors = self._tensors(weight)
        if tensors.on_gpu and tensors.kernel_applies(APPLY_PENDING):
            self._update_on_gpu(weight, (sort_rows(ids) if places is None else places)[0])
        else:
            self._apply_to_rows(weight, ids.flatten(), learns=weight.requires_grad and torch.is_grad_enabled())

    def _has_pending_for_reads(self, weight: Tensor) -> bool:
        """Return whether rows may lack updates, after checking that this process may read and update them."""
        self.check_process()
        if self.steps is None:
            return False
        self.check_capture(weight)
        self._check_for_writes(weight)
        return self.steps.has_pending

    def _apply_to_rows(self, weight: Tensor, ids: Tensor, *, learns: bool) -> Segments:
        """Apply the pending updates of the rows of IDs, `(N,)`, by a kernel on a CPU or by torch operators."""
        tensors, steps = self._tensors(weight), self.steps
        assert steps is not None
        by_kernel = not tensors.on_gpu and tensors.kernel_applies(APPLY_PENDING)
        segments = segments_of_equal_ids(ids, by_kernel=by_kernel)
        if not (by_kernel and steps.contains(segments.rows) and self._apply_in_one_pass(weight, segments.rows)):
            self._apply_by_operators(weight, segments.rows, learns=learns)
        return segments

    def _apply_by_operators(self, weight: Tensor, rows: Tensor, *, learns: bool) -> None:
        """Apply the pending updates of distinct rows by torch operators, and keep what a step will need (`cached`).

        If the weight learns, values and moments of all these rows but for the padding row are kept.
        """
        steps = self.steps
        assert steps is not None
        pending = steps.value_steps.index_select(0, rows) < steps.step
        if not pending.any():
            return
        if not learns:
            rows = rows[pending]
        elif self.padding_idx is not None:
            padding = rows == self.padding_idx
            if padding.any():  # it has no gradient, but where it is not zero it decays
                self._update_rows(weight, rows[padding])
            rows = rows[~padding]
        self.cached = None
        values = self._update_rows(weight, rows, cache=learns)
        if learns:
            self.cached = rows, values, self._versions(weight)

    def _update_on_gpu(
        self,
        weight: Tensor,
        rows: Tensor | range,
        *,
        moments: bool = False,
        gradients: Tensor | None = None,
        rates: StepRates | None = None,
    ) -> None:
        """Apply the pending updates of rows by a Triton kernel, and then make a step on them if they have gradients."""
        steps = self.steps
        assert steps is not None
        tensors = self._tensors(weight)
        first, stop, chosen = (rows.start, rows.stop, None) if isinstance(rows, range) else (0, len(weight), rows)
        most = steps.history.most_terms(tolerance_of(tensors.table))
        record = (steps.record_on_device(), steps.value_steps, steps.moment_steps)
        table, second = tensors.table, tensors.moments[-1]
        first_moments = tensors.moments[0] if len(tensors.moments) > 1 else None
        numbers = (first, stop, steps.history.start, steps.step, most, tensors.random_seed, moments, list(rates or ()))
        update_rows(chosen, gradients, *record, table, first_moments, second, *numbers)
        self.cached = None
        torch.autograd.graph.increment_version((weight, *self.moments) if moments or rates else weight)
        self.version = weight._version

    def _apply_in_one_pass(self, weight: Tensor, rows: Tensor, *, moments: bool = False) -> bool:
        """Apply the pending updates of distinct rows by a kernel, and return `False` without effect if it fails."""
        if not rows.shape[0]:
            return True
        steps = self.steps
        assert steps is not None
        if self.storage.keeps_old_rows:
            changed = rows if moments else rows[steps.value_steps.index_select(0, rows) < steps.step]
            self.storage.before_write(changed)
        tensors, outcome = self._tensors(weight), np.zeros(rows.shape[0], np.uint8)
        assert tensors.arrays is not None
        row_steps, arrays = tensors.arrays
        history = steps.history.kernel_arguments(tolerance_of(tensors.table))
        arguments = (rows, *row_steps, *history, *arrays, moments, outcome)
        if not APPLY_PENDING.cpu[tensors.rowwise].run(rows.shape[0], *arguments, block=tensors.block):
            return False
        most = int(outcome.max())
        if most or moments:
            self.cached = None
            torch.autograd.graph.increment_version((weight, *self.moments) if moments else weight)
            self.version = weight._version
        if most == LEFT_OUT:
            left = rows[torch.from_numpy(outcome == LEFT_OUT)]
            for chunk in chunk_slices(left, block_size(PENDING_ROWS, "cpu")):
                self._update_rows(weight, left[chunk])
            if moments:
                self._decay_moments(weight, left)
        return True

    def _tensors(self, weight: Tensor) -> RowTensors:
        """Return the memory of the weight and the optimizer's state for it."""
        tensors, steps = self.tensors, self.steps
        assert steps is not None
        memory = (weight.shape, *map(Tensor.data_ptr, (weight, *self.moments)))  # without a Python call for each
        if tensors is None or tensors.memory != memory:
            each = (steps.value_steps, steps.moment_steps)
            tensors = self.tensors = RowTensors(weight, self.moments, each, self.rounding_seed, memory)
        return tensors

    def _versions(self, weight: Tensor) -> list[int]:
        """Return torch's version counters of the weight and of the moments, which change at every write."""
        return [each._version for each in (weight, *self.moments)]

    @exclusive
    def prepare_step(self, weight: Tensor, rows: Tensor, *, then_all: bool) -> bool:
        """Prepare the storage for an optimizer's step on rows. The step itself can then not fail for a full disk.

        `rows` have a gradient and are distinct, `(U,)`. With `then_all` the pending updates of all rows are applied
        after the step.

        Returns:
            Whether they must be applied: with `then_all`, in shared memory, or in a block `pending_updates_applied`.
        """
        then_all = then_all or self.eager_blocks > 0 or self._tensors(weight).is_shared
        if self.storage.keeps_old_rows:
            self.storage.before_write(rows)
            for first in range(0, weight.shape[0] if then_all else 0, ROWS_IN_PASS):
                self.storage.before_write(torch.arange(first, min(first + ROWS_IN_PASS, weight.shape[0])))
        return then_all

    @exclusive
    def step_rows(self, weight: Tensor, rows: Tensor, gradients: Tensor, lr: float, weight_decay: float) -> None:
        """Make an optimizer's step on rows with a gradient; for the other rows it stays pending.

        Pending updates of the rows are applied first. Call `prepare_step` before. The rows are distinct and in
        ascending order, `(U,)`, the gradients `(U, D)`. On CUDA rows may repeat, as those of a `summed_gradient`.
        """
        steps = self.steps
        assert steps is not None
        self._check_for_writes(weight)
        tensors, betas, now = self._tensors(weight), steps.history.betas, steps.history.step + 1
        rates, by_kernel = step_rates(betas, now, lr, weight_decay), tensors.kernel_applies(OPTIMIZER_STEP)
        if by_kernel and tensors.on_gpu:
            steps.history.record(lr, weight_decay)
            gradients = gradients.to(weight.dtype).contiguous()
            self._update_on_gpu(weight, rows.contiguous(), gradients=gradients, rates=rates)
            return
        if tensors.on_gpu:
            is_first = F.pad(rows[1:] != rows[:-1], (1, 0), value=True)[: len(rows)]
            rows, gradients = rows[is_first], gradients[is_first]
        cached, self.cached = self.cached, None
        if by_kernel and tensors.arrays is not None and gradients.dtype == tensors.table.dtype:
            kernel, (row_steps, arrays) = OPTIMIZER_STEP.cpu[tensors.rowwise], tensors.arrays
            numbers, missed = gradients.contiguous(), np.zeros(rows.shape[0], np.uint8)
            rest = (*row_steps, now, (*betas[:2], *rates), *arrays, missed)
            if kernel.run(rows.shape[0], rows, numbers, *rest, block=tensors.block):
                if missed.any():
                    left = torch.from_numpy(missed).bool()
                    rows, numbers = rows[left], numbers[left]
                    if not self._apply_in_one_pass(weight, rows):
                        self._update_rows(weight, rows)
                    kernel.run(rows.shape[0], rows, numbers, *rest, block=tensors.block)
                torch.autograd.graph.increment_version((weight, *self.moments))
                self.version = weight._version
                steps.history.record(lr, weight_decay)
                return
        looked_up, values, versions = cached or (None, [], [])
        if looked_up is None or versions != self._versions(weight) or not torch.equal(looked_up, rows):
            values = self._update_rows(weight, rows, cache=True)
        decays = steps.decays(steps.record(rows, lr, weight_decay), self.moments)
        tensors.step_rows(rows, values, gradients, decays, rates, step=now)
        self.version = weight._version

    def _check_for_writes(self, weight: Tensor) -> None:
        """Check that the weight was not written in place while updates were pending; accept other writes.

        The written values would belong to an earlier step. After the error they stay and the pending updates are
        dropped, so the table can be used.
        """
        steps = self.steps
        if steps is None:
            return
        known, self.version = self.version, weight._version
        if self.version == known or not steps.has_pending:
            return
        missed = steps.pending_rows(0, steps.value_steps.shape[0])
        self.storage.before_write(missed)
        steps.value_steps.index_fill_(0, missed, steps.step)
        steps.applied_step, self.cached = steps.step, None
        if not len(missed):
            return
        raise StaleRowsError(
            f"The weight {tuple(weight.shape)} of a row-sparse table was written in place through an older tensor "
            f"while {len(missed)} rows had pending updates, which are dropped. See docs/errors.md, Writes to a "
            f"row-sparse table."
        )

    def check_capture(self, weight: Tensor) -> None:
        """Check that no CUDA graph is captured: a replay would not have the numbers of later steps."""
        if is_capturing(weight):
            raise StaleRowsError(
                f"A CUDA graph is captured, and would repeat these steps of the row-sparse table {tuple(weight.shape)} "
                f"at every replay: leave it out of the graph, or look up in a copy.deepcopy of it."
            )

    def check_process(self) -> None:
        """Check that this is no forked process that cannot know which updates the rows lack."""
        self.storage.check_process()
        if self.incomplete:
            raise StaleRowsError(
                "Only the process that forked this one can apply the pending updates of a row-sparse table in shared "
                "memory: call table.share_memory() before the fork, so that each step updates all rows."
            )

    @exclusive
    def apply_all(self, weight: Tensor, start: int = 0, stop: int | None = None, *, moments: bool = False) -> None:
        """Apply the pending updates of rows `start` to `stop - 1` to the weight in place, in chunks.

        A `stop` of `None` is the end of the table. Rows without pending updates are not written. With `moments`, the
        optimizer's moments of these rows decay up to the last step as well.
        """
        self.check_process()
        steps = self.steps
        if steps is None:
            return
        self.check_capture(weight)
        self._check_for_writes(weight)
        if steps.step == steps.history.start or (not steps.has_pending and not moments):
            return
        check_state_size(weight, self.moments)
        stop = len(weight) if stop is None else min(stop, len(weight))
        tensors = self._tensors(weight)
        fits = tensors.kernel_applies(APPLY_PENDING)
        if fits and tensors.on_gpu:
            self._update_on_gpu(weight, range(start, max(start, stop)), moments=moments)
            if start == 0 and stop == len(weight):
                steps.applied_step = steps.step
            return
        size = block_size(PENDING_ROWS, device_kind(weight))
        for first in range(start, stop, ROWS_IN_PASS):
            last = min(first + ROWS_IN_PASS, stop)
            rows = steps.pending_rows(first, last, moments=moments) if fits else None
            if rows is not None and self._apply_in_one_pass(weight, rows, moments=moments):
                continue
            for low in range(first, last, size):
                high = min(low + size, last)
                pending = steps.pending_rows(low, high)
                if len(pending):
                    self._update_rows(weight, pending)
                if moments:
                    self._decay_moments(weight, torch.arange(low, high, device=steps.moment_steps.device))
        if start == 0 and stop == len(weight):
            steps.applied_step = steps.step

    @exclusive
    def state(self) -> tuple[dict[str, Tensor], JsonObject]:
        """Return which steps each row has taken, and the history of steps, for a checkpoint.

        No pending update is applied. The weight and the optimizer's moments are not included. Before the first
        optimizer step both results are empty.
        """
        if self.steps is None:
            return {}, {}
        tensors, rest = self.steps.state()
        return tensors, rest if self.rounding_seed is None else rest | {"rounding_seed": self.rounding_seed}

    @exclusive
    def load_state(
        self, weight: Tensor, moments: tuple[Tensor, ...], tensors: dict[str, Tensor], rest: JsonObject
    ) -> None:
        """Restore the result of `state()` without applying updates, unless the weight is in shared memory.

        The weight and the moments must have been saved at the same time. `tensors` and `rest` are its two results;
        without the steps of the rows in `tensors`, those that their storage has are used.
        """
        check_state_size(weight, moments)
        self.detach()
        steps = self._begin(weight, rest["start"], moments, Betas(*rest["betas"]), rest.get("rounding_seed"))
        steps.load(tensors, rest)
        if is_in_shared_memory(weight):
            self.apply_all(weight, moments=self.shared_moments)

    @torch.no_grad()
    def _update_rows(self, weight: Tensor, rows: Tensor, *, cache: bool = False) -> list[Tensor]:
        """Apply the pending updates of distinct rows to the weight in place, and mark the rows as up to date."""
        assert self.steps is not None
        self.storage.before_write(rows)
        tensors = self._tensors(weight)
        terms = self.steps.skipped_terms(tensors.table, rows, len(self.moments) > 1)
        values = tensors.skip_steps(rows, terms, step=self.steps.step, cache=cache)
        self.steps.value_steps.index_fill_(0, rows, self.steps.step)
        torch.autograd.graph.increment_version(weight)  # below autograd, as in `run_operator`, writes do not count
        self.version = weight._version
        return values

    @torch.no_grad()
    def _decay_moments(self, weight: Tensor, rows: Tensor) -> None:
        """Decay the moments of distinct rows in place, for steps without gradient up to the last one."""
        assert self.steps is not None
        moment_steps = self.steps.moment_steps.index_select(0, rows)
        behind = self.steps.lack_decay(moment_steps)
        rows, decays = rows[behind], self.steps.decays(self.steps.step - moment_steps[behind], self.moments)
        self.storage.before_write(rows)
        self._tensors(weight).decay_moments(rows, decays)
        self.steps.moment_steps.index_fill_(0, rows, self.steps.step)
        torch.autograd.graph.increment_version(self.moments)


@OPTIMIZER_STEP.operator(mutates=("value_steps", "moment_steps", "weight", "exp_avg", "exp_avg_sq"))
def update_rows(
    rows: Tensor | None,
    gradients: Tensor | None,
    record: Tensor,
    value_steps: Tensor,
    moment_steps: Tensor,
    weight: Tensor,
    exp_avg: Tensor | None,
    exp_avg_sq: Tensor,
    first_row: int,
    stop_row: int,
    start: int,
    step: int,
    most_terms: int,
    seed: int | None,
    decay_moments: bool,
    rates: list[float],
) -> bool:
    """Apply pending updates of rows in place, and then make an optimizer's step on them if they have gradients.

    - `rows`: sorted row numbers, int64, `(N,)`, which may repeat; `None` for those from `first_row` to `stop_row - 1`.
    - `gradients`: sums of the gradients of equal rows at the first place of each, `(N, D)`; `None` for no step.
    - `record`: `RowSteps.record_on_device`.
    - `value_steps`: last step that each row's values include, `(V,)`.
    - `exp_avg_sq`: second moments, `(V, D)` or `(V, 1)`.
    - `first_row`: first row; 0 with `rows`.
    - `step`: number of the step, or of the last one if no step is made.
    - `most_terms`: number of skipped steps after which others are negligible.
    - `rates`: the numbers of `StepRates`; empty for no step.
    """
    rowwise = exp_avg_sq.shape[1] == 1
    name = ("apply_pending", "apply_pending_rowwise", "adamw_step", "rowwise_step")[rowwise + 2 * bool(rates)]
    halves = (None, None) if seed is None else (seed >> LOW_BITS, seed & ((1 << LOW_BITS) - 1))
    tensors = {"rows": rows, "gradients": gradients, "record": record, "weight": weight}
    tensors |= {"value_steps": value_steps, "moment_steps": moment_steps, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    numbers: dict[str, float | None] = dict(zip(("seed_high", "seed_low"), halves, strict=True))
    numbers |= {"first_row": first_row, "stop_row": stop_row, "start": start, "step": step, "most_terms": most_terms}
    numbers |= dict(zip(RATES, rates, strict=True)) if rates else dict.fromkeys(RATES)
    flags = {"ROWWISE": rowwise, "DECAY": decay_moments}
    launch(row_launches(), name, **tensors, **columns_of(weight), **numbers, **flags)
    return True


def pending_updates_of(weight: Tensor | None) -> PendingUpdates | None:
    """Return the `PendingUpdates` attached to the weight of a row-sparse table; `None` for any other tensor."""
    pending: PendingUpdates | None = getattr(weight, "pending_updates", None)
    return pending


def _after_fork() -> None:
    """Mark the tables in shared memory with pending updates, in a forked process."""
    for each in by_handle.valuerefs():
        if (pending := each()) is None or not pending.has_pending or pending.weight_ref is None:
            continue
        if (weight := pending.weight_ref()) is not None:
            pending.incomplete = is_in_shared_memory(weight)


call_in_forked_processes(_after_fork)
