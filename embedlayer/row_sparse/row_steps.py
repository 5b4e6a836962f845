"""Which optimizer steps each row of a row-sparse table has taken, and what the steps do that it has not taken yet."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from embedlayer.core.errors import CheckpointError
from embedlayer.core.shapes import wide_dtype
from embedlayer.io.files import JsonObject
from embedlayer.row_sparse.history import StepHistory
from embedlayer.row_sparse.storage import tolerance_of


class RowSteps:
    """Record the last optimizer step that each row's values and moments include, beside the history of all steps."""

    def __init__(self, history: StepHistory, value_steps: Tensor, moment_steps: Tensor) -> None:
        self.history, self.value_steps, self.moment_steps = history, value_steps, moment_steps
        self.applied_step = history.start
        self._record: Tensor | None = None
        self._sent = 0  # lines of the record that the device has

    @property
    def step(self) -> int:
        return self.history.step

    @property
    def has_pending(self) -> bool:
        """Return whether some rows may have values without the last optimizer steps."""
        return self.applied_step < self.history.step

    def contains(self, rows: Tensor) -> bool:
        """Return whether row numbers in ascending order, on the CPU, are those of rows of the table."""
        numbers = rows.numpy()
        return not len(numbers) or bool(numbers[0] >= 0 and numbers[-1] < self.value_steps.shape[0])

    def pending_rows(self, start: int, stop: int, *, moments: bool = False) -> Tensor:
        behind = self.value_steps[start:stop] < self.step
        if moments:
            behind |= self.lack_decay(self.moment_steps[start:stop])
        return behind.nonzero().squeeze(1) + start

    def lack_decay(self, moment_steps: Tensor) -> Tensor:
        """Return for entries of `moment_steps` whether the moments must still decay up to the last step."""
        return (moment_steps < self.step) & (moment_steps > 0)  # at 0 they are zero

    def record(self, rows: Tensor, lr: float, weight_decay: float) -> Tensor:
        """Record the next step, and mark `rows`, which have gradients in it, as up to date with it."""
        now, moment_steps = self.history.record(lr, weight_decay), self.moment_steps.index_select(0, rows)
        self.value_steps.index_fill_(0, rows, now)
        self.moment_steps.index_fill_(0, rows, now)
        return now - moment_steps

    def decays(self, steps: Tensor, moments: Sequence[Tensor]) -> list[Tensor]:
        """Return the factors by which each moment decays in numbers of steps without gradient, `(U, 1)` each."""
        steps, betas = steps.double().unsqueeze(1), self.history.betas[:2][-len(moments) :]
        return [torch.pow(beta, steps).to(wide_dtype(moments[-1].dtype)) for beta in betas]

    def skipped_terms(self, table: Tensor, rows: Tensor, has_momentum: bool) -> list[Tensor]:
        """Return the effect of the steps that rows skipped, as `apply_skipped_steps_` takes it, `(U, 1)` each."""
        value_steps = self.value_steps.index_select(0, rows).cpu().numpy().astype(np.int64)
        if not has_momentum:  # rows without gradient only decay
            numbers = self.history.decay(value_steps)[None]
        else:
            lag = value_steps - self.moment_steps.index_select(0, rows).cpu().numpy()
            decay, nodes, weights = self.history.skipped_steps(value_steps, tolerance=tolerance_of(table))
            if lag.any():  # a reader updated the values; the moments are of an earlier step
                beta1, beta2, _ = self.history.betas
                with np.errstate(over="ignore"):  # a node at infinity adds nothing, which is right
                    nodes = nodes * beta2 ** (-0.5 * lag)
                weights = weights * (beta1 / math.sqrt(beta2)) ** lag
            numbers = np.concatenate([decay[None], weights, nodes])
        return list(torch.from_numpy(numbers).to(table.device, wide_dtype(table.dtype)).unsqueeze(2))

    def record_on_device(self) -> Tensor:
        """Return the record of the steps on the device of the rows, as `embedlayer.kernels.gpu.rows` describes it."""
        size, device = self.history.size + 1, self.value_steps.device
        if self._record is None or len(self._record) < size:
            with torch.inference_mode(False):  # a later step writes to it
                self._record = torch.empty(max(64, 2 * size), 3, dtype=torch.float64, device=device)
            self._sent = 0
        if self._sent < size:
            lines = torch.from_numpy(self.history.lines_from(self._sent))
            # torch does not use pinned memory again before the copy has ended
            lines = lines.pin_memory() if self.value_steps.is_cuda else lines
            self._record[self._sent : size].copy_(lines, non_blocking=True)
            self._sent = size
        return self._record

    def state(self) -> tuple[dict[str, Tensor], JsonObject]:
        """Return the tensors and the JSON entries from which `load` restores the record, for a checkpoint."""
        history, steps = self.history, {"value_steps": self.value_steps, "moment_steps": self.moment_steps}
        rest = {"start": history.start, "betas": list(history.betas), "applied_step": self.applied_step}
        return {**steps, "history": torch.from_numpy(history.lines)}, rest

    def load(self, tensors: dict[str, Tensor], rest: JsonObject) -> None:
        """Restore the result of `state()`, in place, for a history with the same start and betas."""
        self.history.load(tensors["history"].cpu().numpy())
        self._record = None
        for name, steps in (("value_steps", self.value_steps), ("moment_steps", self.moment_steps)):
            if name in tensors:
                saved, last = tensors[name], self.step
                is_whole = not (saved.is_floating_point() or saved.is_complex())
                if not is_whole or (saved.numel() and not 0 <= int(saved.min()) <= int(saved.max()) <= last):
                    raise CheckpointError(
                        f"The {name} of a row-sparse table's pending updates are {saved.dtype} and not all from 0 to "
                        f"{last}."
                    )
                steps.copy_(saved)
        self.applied_step = rest["applied_step"] if "applied_step" in rest else rest["start"]
