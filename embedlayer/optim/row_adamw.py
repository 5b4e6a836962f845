"""AdamW whose step costs the rows of a batch and not the vocabulary, with the results of dense AdamW.

Dense AdamW updates every row of a table at every step, also rows without gradient. For a row-sparse table `RowAdamW`
writes only to the rows that have a gradient. The updates of the other rows stay pending (`table.pending_updates`), and
are applied just before the rows are read. All other parameters go through torch's own fused AdamW.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from embedlayer.errors import CheckpointError, ShapeError, SizeError
from embedlayer.tables.lazy_adam import Betas, check_betas
from embedlayer.tables.pending_updates import PendingUpdates
from embedlayer.tables.row_arithmetic import chunk_slices, empty_rows, rows_at_once, square_root
from embedlayer.tables.row_storage import RowsInMemory, RowStorage
from embedlayer.tables.sparse_gradient import row_gradient

State = dict[str, Any]


class RowAdamW(torch.optim.Optimizer):
    """AdamW that updates only the rows of the batch in `row_sparse=True` tables, with the results of dense AdamW.

    The rows of a table become those of dense AdamW: at every step, for all rows,
    `p -= lr * wd * p`, then `p -= lr * (m / bc1) / (sqrt(v / bc2) + eps)` with `bc = 1 - beta^t`. Updates of rows
    without gradient are pending until the rows are read.

    Args:
        params: Parameters or groups, as for any optimizer of torch. Row-sparse tables are recognised.
        lr: Learning rate; may change from step to step.
        betas: Decay rates of the first and second moments.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay; a step multiplies by `1 - lr * weight_decay`. May change from step to step.
        amsgrad: Must be False, because its running maximum needs every row at every step.
        maximize: Must be False: minimise the negative loss instead.
        fused: Whether dense parameters use torch's fused kernel.
        apply_pending_every: Number of steps on a table after which all its pending updates are applied. With 1, every
            weight has the memory of dense AdamW after each step, at less than the time of dense AdamW with compiled
            kernels, and about twice its time without. That is for code that reads the memory without a torch function.
            `None` applies updates only when rows are read.

    Raises:
        SizeError: An option is outside its range, or `beta1 >= sqrt(beta2)`.

    Example:
        >>> table = TokenEmbedding(100, 8, row_sparse=True)
        >>> optimizer = RowAdamW(table.parameters(), lr=1e-3)
        >>> table(torch.tensor([[1, 2, 3]])).sum().backward()
        >>> optimizer.step()

    `state_dict()` is that of `torch.optim.AdamW`: each of the two optimizers can load the state of the other.

    Reference: Loshchilov and Hutter, Decoupled weight decay regularization, 2019; torch/optim/adamw.py. We differ from
    `torch.optim.SparseAdam`, which skips the updates of rows without gradient and so gives other results.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fused: bool = True,
        apply_pending_every: int | None = None,
    ) -> None:
        if apply_pending_every is not None and apply_pending_every < 1:
            raise SizeError(f"apply_pending_every must be at least 1 step, or None, not {apply_pending_every}.")
        self.apply_pending_every = apply_pending_every
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": fused,
            "decoupled_weight_decay": True,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch.

        Raises:
            SizeError: An option of the group is not supported or outside its range; see `check_group`.
        """
        super().add_param_group(param_group)
        check_group(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of AdamW on every parameter that has a gradient.

        Args:
            closure: Function that computes the loss again, as in torch; `None` for none.

        Returns:
            The result of `closure`, or `None`.

        Raises:
            ShapeError: A table was resized or replaced since its last step, or a table that is not row-sparse has a
                sparse gradient.
            StaleRowsError: A weight was written in place while its rows had pending updates.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients()
        for group in self.param_groups:
            dense = [p for p in group["params"] if p.grad is not None and not is_row_sparse(p)]
            for by_fsdp in (False, True):  # torch's kernels take no list of both
                self._step_dense([p for p in dense if hasattr(p, "to_local") is by_fsdp], group)
            for parameter in group["params"]:
                if parameter.grad is not None and is_row_sparse(parameter):
                    self._step_rows(parameter, group)
        return loss

    def apply_pending_updates(self) -> None:
        """Apply all pending updates of all row-sparse tables to weights and moments, in place.

        Afterwards both are those of dense AdamW. `state_dict` and `load_state_dict` do this themselves.
        """
        for parameter in self._tables():
            parameter.pending_updates.apply_all(parameter, moments=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of dense AdamW, which `torch.optim.AdamW` can load too.

        All pending updates are applied first, which writes to weights and moments.
        """
        self.apply_pending_updates()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of `RowAdamW` or `torch.optim.AdamW`. Pending updates of the former state are applied first.

        Raises:
            CheckpointError: The state belongs to parameters of other sizes.
            SizeError: The state has options that `RowAdamW` refuses, such as `amsgrad`.
        """
        self.apply_pending_updates()
        self._check_sizes(state_dict)
        for group in state_dict["param_groups"]:
            check_group(group)
        super().load_state_dict(state_dict)
        for parameter in self._tables():
            parameter.pending_updates.detach()

    def load_pending_updates(self, parameter: Any, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        """Restore the pending updates of one table from a checkpoint that was saved without applying them.

        Call it after loading the weight, and its moments by `load_moments`, as they were stored.

        Args:
            parameter: Weight of a row-sparse table.
            tensors: Tensors of `PendingUpdates.state()`.
            rest: JSON entries of `PendingUpdates.state()`.

        Raises:
            KeyError: An entry is missing.
            ShapeError: The moments have another size than the table.
        """
        state = self.state[parameter]
        parameter.pending_updates.load_state(parameter, (state["exp_avg"], state["exp_avg_sq"]), tensors, rest)

    def __getstate__(self) -> dict[str, Any]:
        self.apply_pending_updates()
        return {**super().__getstate__(), "apply_pending_every": self.apply_pending_every}

    def _tables(self) -> list[Any]:
        """Return the weights of all row-sparse tables among the parameters of this optimizer."""
        return [p for group in self.param_groups for p in group["params"] if is_row_sparse(p)]

    def _check_gradients(self) -> None:
        """Check before a step that it can be made on every parameter, so that an error leaves all of them unchanged.

        Raises:
            ShapeError: A table was resized or its weight replaced, or a table that is not row-sparse has a sparse
                gradient.
            SizeError: An option of a group was set to a value that `check_group` refuses.
        """
        for parameter in self._tables():
            pending: PendingUpdates = parameter.pending_updates
            if pending.replaced:
                raise ShapeError(
                    f"A table's weight {tuple(parameter.shape)} was replaced after the optimizer was built, "
                    f"so its steps would update the old weight. Build the optimizer again after resizing or assigning "
                    f"a weight."
                )
            if parameter.grad is not None:
                pending.check_size(parameter, self.state[parameter].get("exp_avg", parameter))
        for group in self.param_groups:
            check_group(group)
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse and not is_row_sparse(parameter):
                    raise ShapeError(
                        f"A sparse gradient {tuple(parameter.shape)} came from a table that is not row-sparse. "
                        f"Use TokenEmbedding(..., row_sparse=True), or sparse=False."
                    )

    def moments(self, parameter: Tensor) -> State:
        """Return `step`, `exp_avg` and `exp_avg_sq` of a parameter in a dict, created as zeros before its first step.

        The tensors are the optimizer's own, and are written in place by each step.
        """
        state: State = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=self._step_device(parameter))
            for name in ("exp_avg", "exp_avg_sq"):
                if is_row_sparse(parameter):
                    storage: RowStorage = parameter.pending_updates.storage  # type: ignore[attr-defined]
                    state[name] = storage.new_state(parameter, name, parameter.shape[1], parameter.dtype)
                else:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if is_row_sparse(parameter) and parameter.pending_updates.moments[-1] is state["exp_avg_sq"]:  # type: ignore[attr-defined]
                state["step"].fill_(parameter.pending_updates.step)  # type: ignore[attr-defined]
        return state

    def load_moments(self, parameter: Tensor, tensors: State) -> None:
        """Set the state of a parameter to `tensors`, moved to the devices where a step needs them.

        Args:
            parameter: Parameter of this optimizer.
            tensors: `step`, `exp_avg` and `exp_avg_sq`. A tensor that is on its device already is not copied.
        """
        storage = parameter.pending_updates.storage if is_row_sparse(parameter) else RowsInMemory()  # type: ignore[attr-defined]
        self.state[parameter] = {
            key: t.to(self._step_device(parameter)) if key == "step" else storage.place(parameter, key, t)
            for key, t in tensors.items()
        }

    def _step_device(self, parameter: Tensor) -> torch.device:
        """Return the device for the step number of a parameter.

        Torch's fused kernel needs it on the device of the parameter. For row-sparse tables and without `fused` it is
        the CPU.
        """
        fused = any(group["fused"] and any(parameter is p for p in group["params"]) for group in self.param_groups)
        return parameter.device if fused and not is_row_sparse(parameter) else torch.device("cpu")

    def _step_dense(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Make a step of torch's AdamW on dense parameters of a group. Without effect for an empty list.

        Args:
            parameters: Parameters with a gradient; all DTensors or none.
            group: Parameter group with the options.
        """
        if not parameters:
            return
        states = [self.moments(parameter) for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _step_rows(self, parameter: Any, group: dict[str, Any]) -> None:
        """Make a step on the rows of a table that have a gradient; for the other rows it stays pending.

        Args:
            parameter: Weight of the table. Its gradient is coalesced in place.
            group: Parameter group with the options.
        """
        pending: PendingUpdates = parameter.pending_updates
        grad = parameter.grad = row_gradient(parameter, parameter.grad, drop=pending.padding_idx)
        rows, gradients = grad._indices()[0], grad._values()
        state = self.moments(parameter)
        pending.attach(parameter, int(state["step"]), (state["exp_avg"], state["exp_avg_sq"]), betas_of(group))
        if not pending.step_in_one_pass(parameter, rows, gradients, float(group["lr"]), float(group["weight_decay"])):
            self._step_by_operators(parameter, rows, gradients, group)
        if self.apply_pending_every is not None and pending.step % self.apply_pending_every == 0:
            pending.apply_all(parameter)
        state["step"] += 1

    def _step_by_operators(self, parameter: Any, rows: Tensor, gradients: Tensor, group: dict[str, Any]) -> None:
        """Make a step on the rows of a table that have a gradient, by torch operators.

        Args:
            parameter: Weight of the table.
            rows: Rows with a gradient, distinct and in ascending order, `(U,)`.
            gradients: Their gradients, `(U, D)`.
            group: Parameter group with the options.
        """
        pending: PendingUpdates = parameter.pending_updates
        values = pending.row_values(parameter, rows)
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        decays = pending.begin_step(rows, lr, group["weight_decay"])
        correction = 1 - beta1**pending.step
        root_correction = math.sqrt(1 - beta2**pending.step)
        size = min(rows_at_once(parameter), len(rows))
        buffer = empty_rows(parameter, size)
        for chunk in chunk_slices(rows, size):
            p, m, v = (each[chunk] for each in values)
            g = gradients[chunk].to(p.dtype)
            m.mul_(decays[0][chunk]).add_(g, alpha=1 - beta1)
            v.mul_(decays[1][chunk]).addcmul_(g, g, value=1 - beta2)
            denominator = square_root(v, out=buffer[: len(p)]).add_(group["eps"] * root_correction)
            p.mul_(1 - lr * group["weight_decay"]).addcdiv_(m, denominator, value=-lr * root_correction / correction)
        pending.end_step(parameter, rows, values)

    def _check_sizes(self, state_dict: dict[str, Any]) -> None:
        """Check that the moments in a state dict have the shapes of this optimizer's parameters.

        Raises:
            CheckpointError: The moments of a parameter have another shape.
        """
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for place, parameter in zip(places, parameters, strict=False):  # torch counts them itself
            moments = state_dict["state"].get(place, {}).get("exp_avg")
            if moments is not None and moments.shape != parameter.shape:
                raise CheckpointError(
                    f"The state of parameter {place} is {tuple(moments.shape)}, the parameter "
                    f"{tuple(parameter.shape)}: it belongs to another table. Resize state and table together."
                )


def is_row_sparse(parameter: Tensor) -> bool:
    """Return whether `parameter` is the weight of a table with `row_sparse=True`."""
    return hasattr(parameter, "pending_updates")


def betas_of(group: dict[str, Any]) -> Betas:
    """Return `betas` and `eps` of a parameter group as floats, in one tuple."""
    return Betas(float(group["betas"][0]), float(group["betas"][1]), float(group["eps"]))


def check_group(group: dict[str, Any]) -> None:
    """Check that `RowAdamW` supports the options of a parameter group.

    Raises:
        SizeError: `amsgrad` or `maximize` is set, `lr` or `weight_decay` is negative, or the group contains a
            row-sparse table and has betas that `check_betas` refuses.
    """
    if group.get("amsgrad"):
        raise SizeError("amsgrad keeps a maximum over every step of every row: use torch.optim.AdamW for it.")
    if group.get("maximize"):
        raise SizeError("maximize is not offered: minimise the negative loss.")
    if not group["lr"] >= 0 or not group["weight_decay"] >= 0:
        raise SizeError(f"lr and weight_decay must be at least 0, not {group['lr']} and {group['weight_decay']}.")
    if any(is_row_sparse(parameter) for parameter in group["params"] if isinstance(parameter, Tensor)):
        check_betas(betas_of(group))
