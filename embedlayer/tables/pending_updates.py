"""Pending updates of a row-sparse table: optimizer steps that rows without a gradient have not taken yet.

An optimizer such as `RowAdamW` writes only to the rows of a batch. `PendingUpdates` records the last step of every row,
and applies the missing steps of a row just before the row is read. The literature calls such updates lazy or
just-in-time. The record is an attribute of the parameter (`weight.pending_updates`), because parameters are what an
optimizer receives.

A read that applies updates is a write, so a lock excludes other threads from the record and the rows meanwhile. A fork
waits for the lock; see `embedlayer.forks`.
"""

import math
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from itertools import count
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar
from weakref import ReferenceType, WeakValueDictionary, ref

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedlayer.errors import CheckpointError, ShapeError, SizeError, StaleRowsError
from embedlayer.forks import HeldLocks, call_in_forked_processes, lock_held_at_forks
from embedlayer.io.files import JsonObject
from embedlayer.kernels.kernel import Kernel
from embedlayer.tables.lazy_adam import Betas, StepHistory, step_rates
from embedlayer.tables.row_arithmetic import (
    apply_skipped_steps_,
    chunk_slices,
    compute_dtype,
    empty_rows,
    gather_rows,
    rows_at_once,
    square_root,
)
from embedlayer.tables.row_storage import RowsInMemory, RowStorage
from embedlayer.tables.sparse_gradient import (
    NUMBERS_IN_BLOCK,
    SUM_SEGMENTS,
    RowSparseGradient,
    Segments,
    call_plain,
    coalesced,
    finished_gradient,
    require_row_sparse,
    rows_and_values,
    segments_of_equal_ids,
    sum_segments,
    with_torch_functions,
)
from embedlayer.tables.stochastic_rounding import round_rows
from embedlayer.torch_state import is_function_mode_active, outside_of_graphs

APPLY_PENDING = {False: Kernel("rows", "apply_pending"), True: Kernel("rows", "apply_pending_rowwise")}
OPTIMIZER_STEP = {False: Kernel("rows", "adamw_step"), True: Kernel("rows", "rowwise_step")}
"""Kernels for second moments of all numbers of a row, and for one a row."""

GATHER = Kernel("input", "gather_scale_add_drop")

ROWS_AT_ONCE = 4096

ROWS_IN_PASS = 1 << 18
"""Rows of a table that a kernel updates at once when all pending updates are applied."""

LEFT_OUT = 2
"""Outcome of a row that `APPLY_PENDING` cannot update."""

SMALL_NUMEL = 1 << 17
"""Numbers of a look-up below which torch's operator is faster than a kernel."""

_handles = count()
_by_handle: WeakValueDictionary[int, "PendingUpdates"] = WeakValueDictionary()  # operators take numbers and tensors

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _RawReads(threading.local):
    """Handles of the tables whose weights this thread reads without their pending updates."""

    handles: frozenset[int] = frozenset()


_raw_reads = _RawReads()


def exclusive(
    method: Callable[Concatenate["PendingUpdates", Arguments], Result],
) -> Callable[Concatenate["PendingUpdates", Arguments], Result]:
    """Decorator of a method of `PendingUpdates` that holds its lock."""

    @wraps(method)
    def run(self: "PendingUpdates", /, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        with self.lock:
            return method(self, *arguments, **options)

    return run


class CachedRows(NamedTuple):
    """Values and moments of U rows that a look-up updated, so that the next optimizer step need not read them.

    Attributes:
        rows: Row numbers, distinct and in ascending order, `(U,)`.
        values: Values, `(U, D)`, and the rows of the optimizer's state tensors.
        versions: Version counters of the weight and the state tensors at that time. If one has changed, the cache is
            invalid.
    """

    rows: Tensor
    values: list[Tensor]
    versions: list[int]


class PendingUpdates:
    """Track which optimizer steps each row of a row-sparse table has not taken yet, and apply them when needed.

    An optimizer such as `RowAdamW` updates only rows with a gradient. In dense AdamW the other rows move too, by
    momentum and weight decay. These updates stay pending until a row is read; learning rate and weight decay of each
    step are recorded in `history`.

    The optimizer's state of a table consists of first moments, `(V, D)`, unless it has none, and of second moments:
    `(V, D)`, or `(V, 1)` for one a row.

    Of a weight in shared memory no updates stay pending after a step, because other processes read it without this
    record.

    Args:
        padding_idx: Row that gets no gradient, or `None`.

    Attributes:
        storage: Where the rows and their state are stored.
        history: The steps of the attached optimizer; `None` before its first step.
        moments: The optimizer's state tensors: first moments, unless it has none, and second moments.
        restored: `moments` by name where the storage restored them and no optimizer has taken them yet; else empty.
        forgotten: Whether an optimizer was attached and forgotten, and none was attached since. Its state may exist,
            but only it knows at which step.
        rounding_seed: Seed of stochastic rounding for a bfloat16 table, or `None` to round to nearest.
        value_steps: Last step whose update is included in each row's values, `(V,)`.
        moment_steps: Last step whose decay is included in each row's moments, `(V,)`; 0 only where they are
            zero.
        applied_step: Step up to which the values of all rows are updated; single rows may be ahead.
        cached: Rows that the last look-up updated, or `None`.
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
        self.history: StepHistory | None = None
        self.forgotten = False
        self.lock = lock_held_at_forks()
        self.handle = next(_handles)
        _by_handle[self.handle] = self
        self.detach()

    def __reduce__(self) -> tuple[type["PendingUpdates"], tuple[int | None]]:
        return PendingUpdates, (self.padding_idx,)  # a copied table has all updates applied, and no optimizer

    def watch(self, weight: nn.Parameter) -> None:
        """Attach this object to `weight` in place.

        The weight becomes a `RowSparseParameter` with the attribute `pending_updates`.

        From then on its gradients are coalesced, and reading it applies pending updates. Without effect if this object
        is attached to `weight` already.
        """
        if self.weight_ref is not None and self.weight_ref() is weight and pending_updates_of(weight) is self:
            return
        self.weight_ref = ref(weight)
        wanted = weight.requires_grad

        def coalesce(grad: Tensor) -> Tensor:
            """Gradient hook: return the gradient with equal rows summed and without the padding row, in new memory.

            Raises:
                ShapeError: The gradient is dense.
            """
            if isinstance(grad, RowSparseGradient) and grad.finished:
                return grad
            result = coalesced(require_row_sparse(grad), drop=self.padding_idx)
            if rows_and_values(result)[1].data_ptr() == rows_and_values(grad)[1].data_ptr():
                result = result.clone()  # clipping works in place, and the caller may still use these numbers
            return result

        def accept_clipping(parameter: Tensor) -> None:
            """Turn `parameter.grad` into a `RowSparseGradient` in place, which torch's clipping accepts.

            This is a post-accumulate-grad hook.
            """
            grad = parameter.grad
            if grad is not None and grad.layout is torch.sparse_coo:
                with_torch_functions(grad, parameter)

        coalesce.__torch_unserializable__ = True  # type: ignore[attr-defined]
        self.hooks = (
            weight.requires_grad_(True).register_hook(coalesce),
            weight.register_post_accumulate_grad_hook(accept_clipping),
        )
        weight.requires_grad_(wanted)
        weight.pending_updates = self  # type: ignore[attr-defined]
        if type(weight) is nn.Parameter:  # a DTensor stays one: no row-sparse optimizer takes its gradients
            weight.__class__ = RowSparseParameter

    @exclusive
    def release(self, weight: nn.Parameter) -> None:
        """Apply all pending updates, and make `weight` an ordinary parameter with dense gradients again, in place.

        Without effect if this object is not attached to `weight`: several tables may share a weight, and one released
        it.
        """
        if getattr(weight, "pending_updates", None) is not self:
            return
        self.apply_all(weight, moments=True)
        self.detach()
        for hook in self.hooks:
            hook.remove()
        del weight.pending_updates  # type: ignore[attr-defined]
        if type(weight) is RowSparseParameter:
            weight.__class__ = nn.Parameter  # type: ignore[assignment]

    @property
    def step(self) -> int:
        """Return the number of the last optimizer step on this table; 0 before the first one."""
        return self.history.step if self.history is not None else 0

    @property
    def has_pending(self) -> bool:
        """Return whether some rows may have values without the last optimizer steps."""
        return self.applied_step < self.step

    @property
    def ignored(self) -> bool:
        """Return whether this thread reads the weight without its pending updates (`without_applying_updates`)."""
        return self.handle in _raw_reads.handles

    @property
    def shared_moments(self) -> bool:
        """Return whether a state tensor of the optimizer is in shared memory."""
        return any(map(is_in_shared_memory, self.moments))

    @exclusive
    def detach(self) -> None:
        """Forget the optimizer: its moments, the history of its steps, and all pending updates.

        The updates are lost, so call `apply_all` first. The object stays attached to the weight.
        """
        self.forgotten = self.forgotten or self.history is not None
        self.history = None
        self.applied_step = 0
        self.version = 0
        self.cached: CachedRows | None = None
        self.moments: tuple[Tensor, ...] = ()
        self.restored: dict[str, Tensor] = {}
        self.rounding_seed: int | None = None
        self.value_steps = self.moment_steps = torch.empty(0)

    @property
    def rowwise(self) -> bool:
        """Return whether the optimizer has one second moment a row."""
        return self.moments[-1].shape[1] == 1

    @exclusive
    def attach(
        self, weight: Tensor, step: int, moments: tuple[Tensor, ...], betas: Betas, *, rounding_seed: int | None = None
    ) -> None:
        """Start to record the steps of an optimizer. The values and moments of all rows must be up to date with `step`.

        Without effect if an optimizer with these options is attached already. Otherwise the pending updates of the one
        attached before, which may be the same with other betas, are applied first.

        Args:
            weight: The weight that this object watches.
            step: Number of steps that the optimizer has made so far.
            moments: Its state tensors, which are kept and written in place: first moments, unless it has none, and
                second moments.
            betas: Its `beta1`, `beta2` and `eps`.
            rounding_seed: Seed of stochastic rounding, or `None` to round to nearest.

        Raises:
            ShapeError: The moments have another size than the table.
            StaleRowsError: The weight was written in place while updates were pending; see `check_for_writes`.
        """
        self.check_for_writes(weight)
        if self.history is not None:
            same = len(moments) == len(self.moments) and all(map(operator.is_, moments, self.moments))
            if same and self.history.betas == betas and self.rounding_seed == rounding_seed:
                return
            self.apply_all(weight, moments=True)
        self._begin(weight, step, moments, betas, rounding_seed)
        if step:  # at step 0 their zeros are right
            self.value_steps.fill_(step)
            self.moment_steps.fill_(step)

    def _begin(
        self, weight: Tensor, step: int, moments: tuple[Tensor, ...], betas: Betas, rounding_seed: int | None
    ) -> None:
        """Start an empty history after `step`, with the steps of the rows as their storage provides them.

        Raises:
            ShapeError: The moments have another size than the table.
        """
        self.check_size(weight, moments)
        names = ("value_steps", "moment_steps")
        steps = [self.storage.new_state(weight, name, None, torch.int32) for name in names]  # or a full disk
        self.value_steps, self.moment_steps = steps
        self.history, self.forgotten = StepHistory(step, betas), False
        self.moments, self.rounding_seed, self.restored = moments, rounding_seed, {}
        self.applied_step, self.version = step, weight._version

    @exclusive
    def apply_to_ids(self, weight: Tensor, ids: Tensor) -> None:
        """Apply the pending updates of the rows that a look-up is about to read, to the weight in place.

        If the weight is trained, values and moments of these rows are kept for the next optimizer step (`CachedRows`).

        Args:
            weight: The weight that this object watches.
            ids: Token IDs of any shape, which may repeat.

        Raises:
            ShapeError: The table has another size than the optimizer's moments.
            StaleRowsError: The weight was written in place while updates were pending; see `check_for_writes`.
            FileError: This process was forked from one that trains the files of the table.
        """
        self.check_process()
        if self.history is None:
            return
        self.check_size(weight, self.moments)
        self.check_for_writes(weight)
        if not self.has_pending:
            return
        ids = ids.flatten()
        if self._kernels_apply(weight, ids):
            rows = segments_of_equal_ids(ids).rows
            inside = not len(rows) or (int(rows[0]) >= 0 and int(rows[-1]) < len(self.value_steps))
            if inside and self._apply_in_one_pass(weight, rows):
                return
        pending = self.value_steps.index_select(0, ids) < self.step
        if not pending.any():
            return
        learns = weight.requires_grad and torch.is_grad_enabled()
        rows = torch.unique(ids if learns else ids[pending]).long()
        if learns and self.padding_idx is not None:
            padding = rows == self.padding_idx
            if padding.any():  # it has no gradient, but where it is not zero it decays
                self._update_rows(weight, rows[padding])
            rows = rows[~padding]
        self.cached = None
        values = self._update_rows(weight, rows, cache=learns)
        if learns:
            self.cached = CachedRows(rows, values, self._versions(weight))

    def _kernels_apply(self, weight: Tensor, *others: Tensor) -> bool:
        """Return whether kernels may compute with the weight, its moments, and `others`."""
        tensors = (raw_weight(weight), *self.moments, self.value_steps)
        return all(each.is_contiguous() for each in tensors) and APPLY_PENDING[self.rowwise].applies(*tensors, *others)

    def _kernel_tensors(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return table, first moments, second moments and rounding seed as kernels take them.

        First moments are `(0, D)` if there are none, and the seed is -1 if there is none.
        """
        table = raw_weight(weight)
        seed = -1 if self.rounding_seed is None else self.rounding_seed
        return table, self.moments[0] if len(self.moments) > 1 else table[:0], self.moments[-1], seed

    def _apply_in_one_pass(
        self,
        weight: Tensor,
        rows: Tensor,
        *,
        moments: bool = False,
        segments: Segments | None = None,
        vectors: Tensor | None = None,
    ) -> bool:
        """Apply the pending updates of distinct rows by a kernel, and return `False` without effect if it fails.

        Args:
            weight: The weight that this object watches.
            rows: Row numbers, `(U,)`.
            moments: Whether to decay the moments of these rows up to the last step as well.
            segments: Places of the rows in a look-up, or `None`.
            vectors: Result of the look-up, `(N, D)`, which is overwritten; `None` without a look-up.
        """
        if not len(rows):
            return True
        assert self.history is not None
        self.storage.before_write(rows if moments else rows[self.value_steps.index_select(0, rows) < self.step])
        table, outcome = raw_weight(weight), np.zeros(len(rows), np.uint8)
        order, offsets = (rows, rows) if segments is None else segments[1:]
        out = table[:0] if vectors is None else vectors
        tables, steps = self._kernel_tensors(weight), (self.value_steps, self.moment_steps)
        record = self.history.kernel_arguments(tolerance_of(table))
        block = max(1, NUMBERS_IN_BLOCK // max(1, table.shape[1]))
        arguments = (rows, *steps, *record, *tables, moments, outcome, order, offsets, out)
        if not APPLY_PENDING[self.rowwise].run(len(rows), *arguments, block=block):
            return False
        most = int(outcome.max())
        if most or moments:
            self.cached = None
            torch.autograd.graph.increment_version((weight, *self.moments) if moments else weight)
            self.version = weight._version
        if most == LEFT_OUT:
            left = rows[torch.from_numpy(outcome == LEFT_OUT)]
            for chunk in chunk_slices(left, ROWS_AT_ONCE):
                self._update_rows(weight, left[chunk])
            if moments:
                self._decay_moments(left)
            if vectors is not None:
                vectors.index_copy_(0, order, table.index_select(0, rows.repeat_interleave(offsets.diff())))
        return True

    @exclusive
    def look_up(self, weight: Tensor, ids: Tensor, segments: Segments) -> Tensor:
        """Apply the pending updates of the rows of a look-up to the weight in place, and return the rows, `(N, D)`.

        Args:
            weight: The weight that this object watches, contiguous.
            ids: Row numbers that were checked, `(N,)`, contiguous.
            segments: Their `segments_of_equal_ids`.

        Raises:
            ShapeError: The table has another size than the optimizer's moments.
            StaleRowsError: The weight was written in place while updates were pending; see `check_for_writes`.
            FileError: This process was forked from one that trains the files of the table.
        """
        table, width = raw_weight(weight), weight.shape[1]
        vectors = table.new_empty((len(ids), width))
        if self.history is not None:
            self.check_size(weight, self.moments)
            self.check_for_writes(weight)
            fits = self.has_pending and self._kernels_apply(weight)
            if fits and self._apply_in_one_pass(weight, segments.rows, segments=segments, vectors=vectors):
                return vectors
        self.apply_to_ids(weight, ids)
        block = max(1, NUMBERS_IN_BLOCK // max(1, width))
        if not GATHER.run(len(ids), table, ids, 1.0, table[:0], (0, 0), 1.0, vectors, block=block):
            torch.index_select(table, 0, ids, out=vectors)
        return vectors

    @exclusive
    def row_values(self, weight: Tensor, rows: Tensor) -> list[Tensor]:
        """Return the values and moments of rows for an optimizer step, one tensor each.

        Pending updates of the values are applied, to the weight in place too. The moments are as stored: `begin_step`
        returns the factors by which they must still decay.

        Args:
            weight: The weight that this object watches.
            rows: Distinct row numbers in ascending order, `(U,)`.

        Raises:
            StaleRowsError: The weight was written in place while updates were pending; see `check_for_writes`.
        """
        self.check_for_writes(weight)
        cached, self.cached = self.cached, None
        if cached is not None and cached.versions == self._versions(weight) and torch.equal(cached.rows, rows):
            return cached.values
        return self._update_rows(weight, rows, cache=True)

    def _versions(self, weight: Tensor) -> list[int]:
        """Return torch's version counters of the weight and of the moments, which change at every write."""
        return [each._version for each in (weight, *self.moments)]

    @exclusive
    def prepare_step(self, rows: Tensor, *, then_all: bool = False) -> None:
        """Prepare the storage for an optimizer's step on rows. The step itself can then not fail for a full disk.

        Args:
            rows: Rows with a gradient, distinct, `(U,)`.
            then_all: Whether the pending updates of all rows are applied after the step.
        """
        self.storage.before_write(rows)
        num_rows = len(self.value_steps) if then_all else 0
        for first in range(0, num_rows, ROWS_IN_PASS):
            self.storage.before_write(torch.arange(first, min(first + ROWS_IN_PASS, num_rows)))

    @exclusive
    def begin_step(self, rows: Tensor, lr: float, weight_decay: float) -> list[Tensor]:
        """Record the next optimizer step, and mark `rows`, which have gradients in it, as up to date with it.

        Call `prepare_step` and `row_values` before, and `end_step` with the new values after.

        Args:
            rows: Distinct row numbers, `(U,)`.
            lr: Learning rate of the step.
            weight_decay: Weight decay of the step.

        Returns:
            Factors by which each of the moments of these rows decays up to this step, `(U, 1)` each.
        """
        assert self.history is not None
        moment_steps = self.moment_steps.index_select(0, rows)
        now = self.history.record(lr, weight_decay)
        self.value_steps.index_fill_(0, rows, now)
        self.moment_steps.index_fill_(0, rows, now)
        return self._moment_decays(now - moment_steps)

    @exclusive
    def step_in_one_pass(self, weight: Tensor, rows: Tensor, gradients: Tensor, lr: float, weight_decay: float) -> bool:
        """Make an optimizer's step on rows by a kernel, and return `False` without effect if none applies.

        Their pending updates are applied first. Call `prepare_step` before.

        Args:
            weight: The weight that this object watches.
            rows: Rows with a gradient, distinct and in ascending order, `(U,)`.
            gradients: Their gradients, `(U, D)`.
            lr: Learning rate of the step.
            weight_decay: Weight decay of the step.

        Raises:
            SizeError: `lr` is negative, or `lr * weight_decay` is not below 1.
            StaleRowsError: The weight was written in place while updates were pending; see `check_for_writes`.
        """
        assert self.history is not None
        inside = not len(rows) or (int(rows[0]) >= 0 and int(rows[-1]) < len(self.value_steps))
        if not inside or not self._kernels_apply(weight, rows, gradients) or gradients.dtype != weight.dtype:
            return False
        self.check_for_writes(weight)
        betas, now = self.history.betas, self.step + 1
        rates = (*betas[:2], *step_rates(betas, now, lr, weight_decay))
        kernel, tables = OPTIMIZER_STEP[self.rowwise], self._kernel_tensors(weight)
        steps, missed = (self.value_steps, self.moment_steps), np.zeros(len(rows), np.uint8)
        block = max(1, NUMBERS_IN_BLOCK // max(1, weight.shape[1]))
        numbers = gradients.contiguous()
        if not kernel.run(len(rows), rows, numbers, *steps, now, rates, *tables, missed, block=block):
            return False
        if missed.any():
            left = torch.from_numpy(missed).bool()
            rows, numbers = rows[left], numbers[left]
            if not self._apply_in_one_pass(weight, rows):
                self._update_rows(weight, rows)
            kernel.run(len(rows), rows, numbers, *steps, now, rates, *tables, missed, block=block)
        torch.autograd.graph.increment_version((weight, *self.moments))
        self.history.record(lr, weight_decay)
        self.version, self.cached = weight._version, None
        return True

    @exclusive
    def end_step(self, weight: Tensor, rows: Tensor, values: list[Tensor]) -> None:
        """Write the new values and moments of `rows` that the optimizer computed, in place.

        Args:
            weight: The weight that this object watches.
            rows: Row numbers that were passed to `begin_step`, `(U,)`.
            values: New values and moments of these rows, one tensor each.
        """
        self._store(raw_weight(weight), rows, values[0])
        for whole, new in zip(self.moments, values[1:], strict=True):
            whole.index_copy_(0, rows, new.to(whole.dtype))
        self.version = weight._version

    def _store(self, table: Tensor, rows: Tensor, values: Tensor) -> None:
        """Write new values of distinct rows to the table, rounded to its dtype. They include the last step.

        Args:
            table: `raw_weight` of the weight that this object watches.
            rows: Row numbers, `(U,)`.
            values: New values in the dtype of the computation, `(U, D)`.
        """
        if self.rounding_seed is not None and table.dtype == torch.bfloat16:
            values = round_rows(values, rows, seed=self.rounding_seed, step=self.step)
        table.index_copy_(0, rows, values.to(table.dtype))

    @exclusive
    def check_for_writes(self, weight: Tensor) -> None:
        """Raise an error if the weight was written in place while updates were pending; accept other writes.

        The written values would belong to an earlier step. After the error they stay and the pending updates are
        dropped, so the table can be used.

        Args:
            weight: The weight that this object watches.

        Raises:
            StaleRowsError: Updates were pending when `weight` was written.
        """
        if self.history is None:
            return
        known, self.version = self.version, weight._version
        if self.version == known or not self.has_pending:
            return
        missed = (self.value_steps < self.step).nonzero().squeeze(1)
        self.storage.before_write(missed)
        self.value_steps.index_fill_(0, missed, self.step)
        self.applied_step, self.cached = self.step, None
        if not len(missed):
            return
        raise StaleRowsError(
            f"The weight {tuple(weight.shape)} of a row-sparse table was written in place through an older tensor of "
            f"it while {len(missed)} rows had pending updates, so what was written belongs to an earlier step. The "
            f"written values are kept and these updates dropped. Take `table.weight` anew after each step and write to "
            f"that, write inside `with embedlayer.tables.pending_updates_applied(model):`, or use "
            f"RowAdamW(apply_pending_every=1)."
        )

    def check_process(self) -> None:
        """Raise an error in a forked process that cannot know which updates the rows lack.

        Raises:
            StaleRowsError: At the fork, updates were pending in shared memory.
            FileError: The rows are in files that the forking process trains.
        """
        self.storage.check_process()
        if self.incomplete:
            raise StaleRowsError(
                "This process was forked while rows of a row-sparse table in shared memory had pending updates, which "
                "only the forking process can apply. Call table.share_memory() after optimizer.zero_grad() and before "
                "the fork: then each step updates all rows."
            )

    def _moment_decays(self, steps: Tensor) -> list[Tensor]:
        """Return the factors by which each of the moments decays in steps without gradient.

        Args:
            steps: Number of steps for each of U rows, `(U,)`.

        Returns:
            `beta1 ** steps` for the first moments, unless there are none, and `beta2 ** steps` for the second moments,
            `(U, 1)` each, in the dtype in which updates are computed.
        """
        assert self.history is not None
        steps, betas = steps.double().unsqueeze(1), self.history.betas[:2][-len(self.moments) :]
        return [torch.pow(beta, steps).to(compute_dtype(self.moments[-1])) for beta in betas]

    @exclusive
    def apply_all(self, weight: Tensor, start: int = 0, stop: int | None = None, *, moments: bool = False) -> None:
        """Apply the pending updates of rows `start` to `stop - 1` to the weight in place, in chunks.

        Rows without pending updates are not written.

        Args:
            weight: The weight that this object watches.
            start: First row.
            stop: Last row + 1; `None` for all rows.
            moments: Whether to decay the optimizer's moments of these rows up to the last step as well.

        Raises:
            ShapeError: The table has another size than the optimizer's moments.
            StaleRowsError: The weight was written in place while updates were pending; see `check_for_writes`.
            FileError: This process was forked from one that trains the files of the table.
        """
        self.check_process()
        if self.history is None:
            return
        self.check_for_writes(weight)
        if self.step == self.history.start or (not self.has_pending and not moments):
            return
        self.check_size(weight, self.moments)
        stop = len(weight) if stop is None else min(stop, len(weight))
        fits = self._kernels_apply(weight)
        for first in range(start, stop, ROWS_IN_PASS):
            last = min(first + ROWS_IN_PASS, stop)
            if fits and self._apply_in_one_pass(weight, self._pending_rows(first, last, moments), moments=moments):
                continue
            for low in range(first, last, ROWS_AT_ONCE):
                high = min(low + ROWS_AT_ONCE, last)
                pending = (self.value_steps[low:high] < self.step).nonzero().squeeze(1) + low
                if len(pending):
                    self._update_rows(weight, pending)
                if moments:
                    self._decay_moments(torch.arange(low, high, device=self.moment_steps.device))
        if start == 0 and stop == len(weight):
            self.applied_step = self.step

    def _pending_rows(self, start: int, stop: int, moments: bool) -> Tensor:
        """Return those of the rows `start` to `stop - 1` whose values, or with `moments` moments, lack steps."""
        behind = self.value_steps[start:stop] < self.step
        if moments:
            behind |= self._moments_lack_steps(self.moment_steps[start:stop])
        return behind.nonzero().squeeze(1) + start

    def _moments_lack_steps(self, moment_steps: Tensor) -> Tensor:
        """Return for entries of `moment_steps` whether the moments must still decay up to the last step."""
        return (moment_steps < self.step) & (moment_steps > 0)  # at 0 they are zero

    @exclusive
    def state(self) -> tuple[dict[str, Tensor], JsonObject]:
        """Return which steps each row has taken, and the history of steps, for a checkpoint.

        No pending update is applied. The weight and the optimizer's moments are not included. Before the first
        optimizer step both results are empty.

        Returns:
            The tensors `value_steps`, `moment_steps` and `history`, which may share memory with this object; and the
            JSON entries `start`, `betas`, `applied_step`, and with stochastic rounding `rounding_seed`.
        """
        if self.history is None:
            return {}, {}
        tensors = {
            "value_steps": self.value_steps,
            "moment_steps": self.moment_steps,
            "history": torch.from_numpy(self.history.lines),
        }
        rest = {"start": self.history.start, "betas": list(self.history.betas), "applied_step": self.applied_step}
        return tensors, rest if self.rounding_seed is None else rest | {"rounding_seed": self.rounding_seed}

    @exclusive
    def load_state(
        self, weight: Tensor, moments: tuple[Tensor, ...], tensors: dict[str, Tensor], rest: JsonObject
    ) -> None:
        """Restore the result of `state()` without applying updates, unless the weight is in shared memory.

        The weight and the moments must have been saved at the same time.

        Args:
            weight: The weight that this object watches.
            moments: The optimizer's state tensors, as for `attach`.
            tensors: First result of `state()`. Without the steps of the rows, those that their storage has are used.
            rest: Second result of `state()`.

        Raises:
            KeyError: An entry is missing.
            ShapeError: The moments have another size than the table.
            CheckpointError: A row's step is below 0, or after the last step.
        """
        self.detach()
        self._begin(weight, rest["start"], moments, Betas(*rest["betas"]), rest.get("rounding_seed"))
        assert self.history is not None
        self.history.load(tensors["history"].cpu().numpy())
        for name, steps in (("value_steps", self.value_steps), ("moment_steps", self.moment_steps)):
            if name in tensors:
                steps.copy_(_checked_steps(tensors[name], name, self.step))
        self.applied_step = rest["applied_step"] if "applied_step" in rest else rest["start"]
        if is_in_shared_memory(weight):
            self.apply_all(weight, moments=self.shared_moments)

    def check_size(self, weight: Tensor, moments: Sequence[Tensor]) -> None:
        """Check that the optimizer's moments fit the shape of the weight.

        Args:
            weight: The weight that this object watches.
            moments: The optimizer's state tensors, as for `attach`.

        Raises:
            ShapeError: The moments are of a table of another shape.
        """
        for each in moments:
            if each.shape != weight.shape and not (each is moments[-1] and each.shape == (weight.shape[0], 1)):
                raise ShapeError(
                    f"The table is {tuple(weight.shape)} and the optimizer's state for it {tuple(each.shape)}: the "
                    f"table was resized after the optimizer was built, or the state belongs to another table. Build "
                    f"the optimizer again after resizing."
                )

    @torch.no_grad()
    def _update_rows(self, weight: Tensor, rows: Tensor, *, cache: bool = False) -> list[Tensor]:
        """Apply the pending updates of distinct rows to the weight in place, and mark the rows as up to date.

        It writes `value_steps` and `version`. The moments and `cached` are not changed.

        Args:
            weight: The weight that this object watches.
            rows: Distinct row numbers, `(U,)`.
            cache: Whether the caller uses the result; without it, less memory is needed.

        Returns:
            With `cache`, the updated values, and the moments without the decay of the skipped steps, of U rows each,
            copied in the dtype of the computation (float64 for a float64 weight, else float32). Without `cache`,
            buffers of no meaning, to be ignored.
        """
        assert self.history is not None
        self.storage.before_write(rows)
        parameter, weight = weight, raw_weight(weight)
        decay, *terms = self._terms_of_skipped_steps(weight, rows)
        tables = (weight, *self.moments)
        size = min(rows_at_once(weight), len(rows))
        buffers = [empty_rows(weight, len(rows) if cache else size, width=table.shape[1]) for table in tables]
        roots, buffer = (empty_rows(weight, size, width=tables[-1].shape[1]) for _ in range(2))
        for chunk in chunk_slices(rows, size):
            some = rows[chunk]
            low = chunk.start if cache else 0
            p, *moments = (gather_rows(table, some, each[low:]) for table, each in zip(tables, buffers, strict=True))
            if terms:
                root = square_root(moments[1], out=roots[: len(some)])
                those = [each[chunk] for each in terms]
                apply_skipped_steps_(p, moments[0], root, decay[chunk], those, buffer[: len(some)])
            else:
                p.mul_(decay[chunk])
            if not cache:
                self._store(weight, some, p)
        if cache:  # at once: a call costs as much as some hundred rows
            self._store(weight, rows, buffers[0])
        self.value_steps.index_fill_(0, rows, self.step)
        self.version = parameter._version  # inside a custom operator `weight` has a counter of its own
        return buffers

    def _terms_of_skipped_steps(self, weight: Tensor, rows: Tensor) -> list[Tensor]:
        """Return the effect of the steps that rows skipped, as `apply_skipped_steps_` takes it, `(U, 1)` each.

        Args:
            weight: The weight that this object watches.
            rows: Distinct row numbers, `(U,)`.

        Returns:
            The weight decay; and if there are first moments, all weights of a quadrature, then as many nodes.
        """
        history = self.history
        assert history is not None
        value_steps = self.value_steps.index_select(0, rows).cpu().numpy().astype(np.int64)
        if len(self.moments) == 1:  # without momentum, rows without gradient only decay
            numbers = history.decay(value_steps)[None]
        else:
            lag = value_steps - self.moment_steps.index_select(0, rows).cpu().numpy()
            skipped = history.skipped_steps(value_steps, tolerance=tolerance_of(weight))
            nodes, weights = skipped.nodes, skipped.weights
            if lag.any():  # a reader updated the values; the moments are of an earlier step
                beta1, beta2, _ = history.betas
                with np.errstate(over="ignore"):  # a node at infinity adds nothing, which is right
                    nodes = nodes * beta2 ** (-0.5 * lag)
                weights = weights * (beta1 / math.sqrt(beta2)) ** lag
            numbers = np.concatenate([skipped.decay[None], weights, nodes])
        return list(torch.from_numpy(numbers).to(weight.device, compute_dtype(weight)).unsqueeze(2))

    @torch.no_grad()
    def _decay_moments(self, rows: Tensor) -> None:
        """Decay the moments of distinct rows in place, for steps without gradient up to the last one."""
        steps = self.moment_steps.index_select(0, rows)
        behind = self._moments_lack_steps(steps)
        rows, decays = rows[behind], self._moment_decays(self.step - steps[behind])
        self.storage.before_write(rows)
        for chunk in chunk_slices(rows, rows_at_once(self.moments[0])):
            for moments, decay in zip(self.moments, decays, strict=True):
                decayed = moments.index_select(0, rows[chunk]) * decay[chunk]
                moments.index_copy_(0, rows[chunk], decayed.to(moments.dtype))
        self.moment_steps.index_fill_(0, rows, self.step)


def _checked_steps(steps: Tensor, name: str, last: int) -> Tensor:
    """Return the steps of rows from a file, after checking that each is from 0 to the last one.

    Args:
        steps: The steps, `(V,)`.
        name: Their name, for the error.
        last: The last step.

    Raises:
        CheckpointError: They are no integers, or one is out of range.
    """
    whole = not (steps.is_floating_point() or steps.is_complex())
    if not whole or (steps.numel() and not 0 <= int(steps.min()) <= int(steps.max()) <= last):
        raise CheckpointError(
            f"The {name} of a row-sparse table's pending updates are {steps.dtype} and not all from 0 to {last}, its "
            f"last step: they are damaged. Use an earlier checkpoint."
        )
    return steps


def tolerance_of(weight: Tensor) -> float:
    """Return the largest relative error of the sum over skipped steps, for a table of this dtype."""
    return 1e-12 if weight.dtype == torch.float64 else 1e-7


class RowSparseParameter(nn.Parameter):
    """The weight of a row-sparse table: torch functions that read or write its values apply its pending updates first.

    Pending updates are AdamW steps that `RowAdamW` has delayed for rows without a gradient. `F.embedding` applies those
    of the rows that it looks up, and functions that read only shape, dtype or gradient apply none. All other functions
    apply all of them.

    Code that reads the memory without a torch function is not noticed: a kernel of its own,
    `torch.distributed.broadcast`, a tensor taken before the last step, or the weight itself in a compiled function. Use
    `pending_updates_applied` around such code.

    Reference: https://docs.pytorch.org/docs/stable/notes/extending.html, "Subclassing torch.Tensor".
    """

    pending_updates: PendingUpdates

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply those pending updates of weights among the arguments that `func` would miss, and then call `func`.

        Results are plain tensors. Inside a compiled function no updates are applied.
        """
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling() and func not in READS_NO_ROWS:
            weights = list(weights_among((args, kwargs)))
            if func is Tensor.share_memory_ and any(has_sparse_gradient(weight) for weight in weights):
                raise SizeError(
                    "Torch cannot share the sparse gradient of a row-sparse table: call optimizer.zero_grad() before "
                    "share_memory()."
                )
            with HeldLocks([weight.pending_updates.lock for weight in weights if _copies_rows(func, weight)]):
                for weight in weights:
                    if func is F.embedding and weight is args[1]:
                        weight.pending_updates.apply_to_ids(weight, args[0])
                    elif not weight.pending_updates.ignored:
                        weight.pending_updates.apply_all(weight)
                return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # Dynamo traces it


def look_up_rows(ids: Tensor, weight: Tensor) -> Tensor:
    """Return `F.embedding(ids, weight, sparse=True)` for the weight of a row-sparse table, by a kernel if one applies.

    Pending updates of the rows are applied first. Torch's operator waits for all of its threads, which takes long on a
    busy machine.

    Args:
        ids: Row numbers of any shape, `(...)`. On a CPU they have been checked.
        weight: Weight of the table, `(V, D)`.
    """
    pending = pending_updates_of(weight)
    numbers = ids.numel() * weight.shape[1]
    if type(weight) is RowSparseParameter and pending is not None and numbers >= SMALL_NUMEL:
        plain = raw_weight(weight)
        if plain.is_contiguous() and GATHER.applies(plain, ids) and not is_function_mode_active():
            vectors: Tensor = _LookUpRows.apply(weight, ids)  # type: ignore[no-untyped-call]
            return vectors
    return F.embedding(ids, weight, sparse=True)


_look_up_rows_outside_of_graphs = outside_of_graphs(look_up_rows)


def look_up_rows_between_graphs(ids: Tensor, weight: Tensor) -> Tensor:
    """Return `look_up_rows(ids, weight)` in a function that `torch.compile` traces, with gradients on.

    The graph ends before the look-up, and another one begins after it. Inductor takes the sparse gradient for a dense
    tensor as soon as a pass changes a node beside it, or two gradients are added, so no graph may contain it.

    Args:
        ids: Row numbers of any shape, `(...)`, that have been checked.
        weight: Weight of the table, `(V, D)`.

    Raises:
        torch._dynamo.exc.Unsupported: The function is compiled with `fullgraph=True`.
    """
    torch._dynamo.graph_break(
        msg="A compiled function looks up a row-sparse table with gradients on, and its graph cannot contain the "
        "sparse gradient. Compile it without fullgraph=True, or only what follows the look-up; look up under "
        "torch.no_grad(); or build the table with row_sparse=False."
    )
    return _look_up_rows_outside_of_graphs(ids, weight)


class _LookUpRows(torch.autograd.Function):
    """Look up rows by kernels, with the gradient of `F.embedding`; see `look_up_rows`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        flat, pending = ids.flatten().contiguous(), pending_updates_of(weight)  # one axis is flattened as a view
        assert pending is not None
        segments = segments_of_equal_ids(flat)
        ctx.save_for_backward(ids, *segments)
        ctx.shape, ctx.padding_idx = weight.shape, pending.padding_idx
        return pending.look_up(weight, flat, segments).view(*ids.shape, weight.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ids, *found = ctx.saved_tensors
        if torch.is_grad_enabled() or not SUM_SEGMENTS.applies(grad):
            return torch.ops.aten.embedding_sparse_backward(grad, ids, ctx.shape[0], -1, False), None
        segments = Segments(*found)
        if ctx.padding_idx is not None:
            segments = segments_of_equal_ids(ids.flatten(), drop=ctx.padding_idx)
        values = sum_segments(grad.reshape(-1, ctx.shape[1]), segments)
        return finished_gradient(segments.rows, values, ctx.shape), None


_ATTRIBUTES = """shape dtype device layout ndim itemsize nbytes requires_grad is_leaf grad grad_fn _version _base
_backward_hooks _post_accumulate_grad_hooks retains_grad output_nr is_sparse is_cpu is_cuda is_meta is_quantized"""
_METHODS = """size dim ndimension numel nelement stride storage_offset element_size is_contiguous is_floating_point
is_complex get_device __len__ requires_grad_ register_hook register_post_accumulate_grad_hook new_empty new_zeros
new_ones new_full
new_tensor"""
_FUNCTIONS = "is_floating_point is_complex numel empty_like zeros_like ones_like full_like randn_like rand_like"
READS_NO_ROWS = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES.split()),
        *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad", "_backward_hooks")),
        *(getattr(Tensor, name) for name in _METHODS.split()),
        *(getattr(torch, name) for name in _FUNCTIONS.split()),
    ]
)
"""Functions that read the shape, dtype, device or gradient of a tensor, but none of its values."""

COPIES_ROWS = frozenset(
    [
        F.embedding,
        *(getattr(Tensor, name) for name in ("clone", "copy_", "index_select", "share_memory_")),
        *(getattr(torch, name) for name in ("clone", "index_select")),
    ]
)
"""Functions during which no other thread writes rows: they copy rows, and run no code of the user."""


def _copies_rows(func: Callable[..., Any], weight: nn.Parameter) -> bool:
    """Return whether to exclude other threads during `func`. Where a graph is recorded, hooks of the user may run."""
    return func in COPIES_ROWS and not (torch.is_grad_enabled() and weight.requires_grad)


def weights_among(values: Any) -> Iterator[RowSparseParameter]:
    """Yield the weights of row-sparse tables among the arguments of a torch function, also in nested containers.

    Args:
        values: A value of any type, such as `(args, kwargs)`.
    """
    if isinstance(values, RowSparseParameter):
        if hasattr(values, "pending_updates"):  # a copy without its table has none
            yield values
    elif isinstance(values, list | tuple | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from weights_among(value)


def pending_updates_of(weight: Tensor | None) -> PendingUpdates | None:
    """Return the `PendingUpdates` attached to the weight of a row-sparse table; `None` for any other tensor."""
    found: PendingUpdates | None = getattr(weight, "pending_updates", None)
    return found


def has_sparse_gradient(weight: Tensor) -> bool:
    """Return whether a weight has a gradient of some rows alone."""
    return weight.grad is not None and weight.grad.is_sparse


def raw_weight(weight: Tensor) -> Tensor:
    """Return a detached plain tensor over the memory of a row-sparse weight, without applying pending updates."""
    stored: Tensor = call_plain(Tensor.detach, (), (weight,), {})
    return stored


def is_in_shared_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is in CPU memory that other processes can write, as after `share_memory_()`."""
    stored = raw_weight(tensor)
    return stored.device.type == "cpu" and stored.untyped_storage().is_shared()


@contextmanager
def applied_rows(weight: Tensor, ids: Tensor) -> Iterator[Tensor]:
    """Context manager: yield the memory of a weight to read some rows, which no other thread writes in the block.

    Pending updates of these rows (row-sparse tables) are applied first.

    Args:
        weight: Weight of any table.
        ids: Row numbers that were checked.
    """
    pending = pending_updates_of(weight)
    with nullcontext() if pending is None else pending.lock:
        if pending is not None:
            pending.apply_to_ids(weight, ids)
        yield raw_weight(weight)


@contextmanager
def pending_updates_applied(model: nn.Module) -> Iterator[None]:
    """Keep all rows of all row-sparse tables of `model` up to date inside a `with` block, for every reader and writer.

    `RowAdamW` delays the updates of rows without a gradient. Torch functions, `table.weight`, `state_dict()`,
    `copy.deepcopy` and look-ups apply them. This block is for code that keeps tensors of the weights over several
    steps, or reads their memory without a torch function.

    On entering, pending updates are applied. Each optimizer step inside updates all rows at once. Without compiled
    kernels that takes about twice as long as a step of dense AdamW. On leaving, nothing is written, and later steps
    delay updates again.

    Args:
        model: A module with row-sparse tables at any depth.

    Example:
        >>> table = TokenEmbedding(100, 8, row_sparse=True)
        >>> rows = table.weight.detach()
        >>> with pending_updates_applied(table):
        ...     rows.clamp_(-0.01, 0.01)[0, 0].abs() <= 0.01
        tensor(True)
    """
    found = [(pending, weight) for weight in model.parameters() if (pending := pending_updates_of(weight)) is not None]
    for pending, weight in found:
        with pending.lock:
            pending.apply_all(weight)
            pending.eager_blocks += 1
    try:
        yield
    finally:
        for pending, _ in found:
            with pending.lock:
                pending.eager_blocks -= 1


@contextmanager
def without_applying_updates(model: nn.Module) -> Iterator[None]:
    """Let code inside a `with` block read the weights of `model` as stored, without applying their pending updates.

    A checkpoint uses it to save the raw rows beside `PendingUpdates.state()`. Look-ups still apply updates, and so do
    other threads.

    Args:
        model: A module with row-sparse tables at any depth.
    """
    found = [pending.handle for weight in model.parameters() if (pending := pending_updates_of(weight)) is not None]
    before = _raw_reads.handles
    _raw_reads.handles = before.union(found)
    try:
        yield
    finally:
        _raw_reads.handles = before


def _after_fork() -> None:
    """Mark the tables in shared memory with pending updates, in a forked process."""
    for each in _by_handle.valuerefs():
        if (pending := each()) is None or not pending.has_pending or pending.weight_ref is None:
            continue
        if (weight := pending.weight_ref()) is not None:
            pending.incomplete = is_in_shared_memory(weight)


call_in_forked_processes(_after_fork)


@torch.library.custom_op("embedlayer::with_updates_applied", mutates_args=())
def with_updates_applied(tensor: Tensor, handle: int, is_ids: bool) -> Tensor:
    """Apply the pending updates of a table as one node of a compiled graph, and return a copy of `tensor`.

    The result is a copy so that the compiler runs the code that reads it after the update. The weight is updated in
    place, but for `is_ids` it is not an argument: AOTAutograd would copy all of it, and send a dense gradient through
    the change.

    Args:
        tensor: Token IDs whose rows are updated, or the weight, of which all rows are updated.
        handle: `PendingUpdates.handle` of the table.
        is_ids: Whether `tensor` holds IDs.
    """
    pending = _by_handle[handle]
    weight = pending.weight_ref() if pending.weight_ref is not None else None
    assert weight is not None
    if is_ids:
        pending.apply_to_ids(weight, tensor)
    else:
        pending.apply_all(weight)
    return tensor.clone()


@with_updates_applied.register_fake
def _(tensor: Tensor, handle: int, is_ids: bool) -> Tensor:
    return torch.empty_like(tensor)
