"""Base of optimizers whose step costs the rows of a batch and not the vocabulary.

A dense optimizer with weight decay or momentum updates every row of a table at every step, also rows without gradient.
For a row-sparse table, these optimizers write only to the rows that have a gradient. The updates of the other rows stay
pending (`table.pending_updates`), and are applied just before the rows are read.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from embedlayer.core.errors import CheckpointError, ShapeError, SizeError
from embedlayer.core.forks import held_locks
from embedlayer.core.partitioned import is_sharded, refuse_partitioned
from embedlayer.optim.row_state import RowState, check_state, check_step
from embedlayer.row_sparse.gradient import row_gradient, rows_and_values
from embedlayer.row_sparse.history import Betas, check_rates
from embedlayer.row_sparse.pending_updates import PendingUpdates
from embedlayer.row_sparse.stochastic_rounding import StochasticRounding

State = dict[str, Any]


class RowOptimizer(torch.optim.Optimizer, ABC):
    """Optimizer that updates only the rows of the batch in row-sparse tables, with the results of a dense one.

    Args:
        params: Parameters or groups, as for any optimizer of torch. Row-sparse tables are recognised.
        defaults: Options of each group that does not set its own.
        state: What is stored for each row of a row-sparse table.
        rounding: How the rows of a bfloat16 table are rounded; `None` for the nearest number.
        apply_pending_every: Number of steps on a table after which all its pending updates are applied; `None` to apply
            them only when rows are read.

    Raises:
        SizeError: An option is not supported or outside its range.
    """

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        state: RowState,
        rounding: StochasticRounding | None,
        apply_pending_every: int | None,
    ) -> None:
        if apply_pending_every is not None and apply_pending_every < 1:
            raise SizeError(f"apply_pending_every must be at least 1 step, or None, not {apply_pending_every}.")
        self.apply_pending_every = apply_pending_every
        self.row_state = state
        super().__init__(params, defaults if rounding is None else defaults | {"rounding_seed": rounding.seed})

    @abstractmethod
    def check_options(self, group: dict[str, Any], *, has_tables: bool) -> None:
        """Check that this optimizer supports the options of a parameter group.

        Raises:
            SizeError: An option is not supported or outside its range.
        """

    @abstractmethod
    def betas_of(self, group: dict[str, Any]) -> Betas:
        """Return the decay rates of the moments of row-sparse tables in a group, and `eps`."""

    @abstractmethod
    def dense_state(self) -> tuple[str, ...]:
        """Return the names of the state tensors of dense parameters, each of the shape of the parameter."""

    @abstractmethod
    def step_dense(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Make a step on dense parameters of a group that have a gradient, which are all DTensors or none."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch.

        Raises:
            SizeError: An option of the group is not supported or outside its range. The group is not added.
        """
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except SizeError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step on every parameter that has a gradient. An error leaves all parameters and states unchanged.

        The `StaleRowsError` for a written weight also drops the pending updates of that table. Threads that look rows
        of a row-sparse table up meanwhile wait.

        Args:
            closure: Function that computes the loss again, as in torch; `None` for none.

        Returns:
            The result of `closure`, or `None`.

        Raises:
            ShapeError: A table was resized or replaced since its last step, a dense parameter was converted, or a
                table that is not row-sparse has a sparse gradient.
            SizeError: An option of a group was set to a value outside its range.
            StaleRowsError: A weight was written in place while its rows had pending updates, a step is made inside
                `with table.checkpoint():`, or a CUDA graph is captured.
            CheckpointError: A resumed mapped table has the state of another rule.
            FileError: The disk of a mapped table is full.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tables, dense = self._checked_parameters()
        with held_locks([*map(attrgetter("pending_updates.lock"), dict(tables))]):
            then_all = []
            for parameter, group in tables:  # all that may fail, before any row is written
                pending: PendingUpdates = parameter.pending_updates
                gradient = row_gradient(parameter, parameter.grad, drop=pending.padding_idx)
                if gradient is not parameter.grad:
                    parameter.grad = gradient
                self._attach(parameter, group)
                every = self.apply_pending_every
                is_due = every is not None and (pending.step + 1) % every == 0
                then_all.append(pending.prepare_step(parameter, rows_and_values(gradient)[0], then_all=is_due))
            for parameters, group in dense:
                self.step_dense(parameters, group)
            for parameter, group in tables:
                rows, gradients = rows_and_values(parameter.grad)
                lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
                parameter.pending_updates.step_rows(parameter, rows, gradients, lr, weight_decay)
                self.state[parameter]["step"] += 1
            for (parameter, _), every_row in zip(tables, then_all, strict=True):
                if every_row:
                    parameter.pending_updates.apply_all(parameter, moments=parameter.pending_updates.shared_moments)
        return loss

    def apply_pending_updates(self) -> None:
        """Apply all pending updates of all row-sparse tables to weights and moments, in place.

        Afterwards both are those of the dense optimizer. `state_dict` and `load_state_dict` do this themselves.

        Raises:
            StaleRowsError: A weight was written in place while updates were pending.
            ShapeError: A table has another size than the moments.
        """
        for parameter in self._tables():
            parameter.pending_updates.apply_all(parameter, moments=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the dense optimizer.

        All pending updates are applied first, which writes to weights and moments. Where none are pending, nothing is
        written: for a state inside `with table.checkpoint():` of a mapped table, call `apply_pending_updates()` of this
        optimizer before the block.

        With sharded rows it is the state of this rank, and `rank` says so.

        Raises:
            CheckpointError: A resumed mapped table has the state of another rule.
            StaleRowsError: A weight was written in place while updates were pending.
            ShapeError: A table has another size than the moments.
        """
        for parameter in self._tables():
            if parameter.pending_updates.restored:
                self.moments(parameter)
        self.apply_pending_updates()
        rank = self._rank()
        return super().state_dict() | ({} if rank is None else {"rank": rank})

    def _rank(self) -> int | None:
        """Return the rank of this process if it trains rows of a sharded table; `None` if all ranks have all rows."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        group = next((each.shard_group for each in parameters if hasattr(each, "shard_group")), None)
        return None if group is None else torch.distributed.get_rank(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of such an optimizer. Pending updates of the former state are applied first.

        Raises:
            CheckpointError: The state belongs to parameters of other sizes or to groups of other names, is that of
                another rule, or has the moments of another rank's rows of a sharded table.
            SizeError: The state has options that this optimizer refuses, such as `amsgrad`.
            StaleRowsError: A weight was written in place while updates were pending.
            ShapeError: A table has another size than the moments.
            ValueError: The state has another number of groups or parameters, as in torch.
        """
        if state_dict.get("rank", rank := self._rank()) != rank:
            raise CheckpointError(
                f"This optimizer state has the moments of the rows of rank {state_dict['rank']} alone, and here are "
                f"{'all rows' if rank is None else f'those of rank {rank}'}: use "
                f"embedlayer.distributed.distributed_state."
            )
        both = state_dict["param_groups"], self.param_groups
        theirs, ours = ([str(group["name"]) for group in groups if "name" in group] for groups in both)
        if theirs and ours and theirs != ours:
            raise CheckpointError(
                f"This optimizer state has the groups {', '.join(theirs)}, and the optimizer {', '.join(ours)}."
            )
        self.apply_pending_updates()
        for group in state_dict["param_groups"]:
            self._check_group(group)
        loaded = self._checked_states(state_dict)
        seeds = [group.get("rounding_seed") for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, seed in zip(self.param_groups, seeds, strict=True):
            if seed is not None:
                group.setdefault("rounding_seed", seed)
        for parameter, state in loaded:
            if is_row_sparse(parameter):
                if state:  # torch converts all tensors to the dtype of the parameter
                    self.load_moments(parameter, {**state, "step": self.state[parameter]["step"]})
                else:
                    parameter.pending_updates.detach()  # type: ignore[attr-defined]

    def load_pending_updates(self, parameter: Any, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        """Restore the pending updates of one table from a checkpoint that was saved without applying them.

        `tensors` and `rest` are the results of `PendingUpdates.state()`. Call it after loading the weight, and its
        moments by `load_moments`, as they were stored.

        Raises:
            KeyError: An entry is missing.
            ShapeError: The moments have another size than the table.
            CheckpointError: A row's step is below 0, or after the last step.
            StaleRowsError: The weight was written in place while updates were pending.
        """
        pending: PendingUpdates = parameter.pending_updates
        with pending.lock:
            state = self.moments(parameter)
            pending.load_state(parameter, tuple(state[name] for name in self.row_state.names), tensors, rest)
            self._continue_rounding(parameter)

    def __getstate__(self) -> dict[str, Any]:
        self.apply_pending_updates()
        ours = {"apply_pending_every": self.apply_pending_every, "row_state": self.row_state}
        return {**super().__getstate__(), **ours}

    def state_bytes(self) -> int:
        """Return the bytes of the state tensors that exist, with the step numbers of the rows of row-sparse tables.

        A tensor exists from the first step on which its parameter has a gradient.

        Example:
            >>> table = RowSparseEmbedding(100, 8)
            >>> optimizer = RowAdagrad(table.parameters())
            >>> table(torch.tensor([[1, 2, 3]])).sum().backward()
            >>> optimizer.step()
            >>> optimizer.state_bytes()
            1204
        """
        tensors = [value for state in self.state.values() for value in state.values() if isinstance(value, Tensor)]
        for parameter in self._tables():
            steps = parameter.pending_updates.steps
            tensors += [] if steps is None else [steps.value_steps, steps.moment_steps]
        return sum(tensor.nbytes for tensor in tensors)

    def moments(self, parameter: Tensor) -> State:
        """Return the state of a parameter in a dict, created as zeros before its first step.

        It contains `step` and the state tensors, such as `exp_avg` and `exp_avg_sq`. The tensors are the optimizer's
        own, and are written in place by each step. A resumed mapped table has them in its files.

        Raises:
            CheckpointError: A resumed mapped table has the state of another rule.
        """
        state: State = self.state[parameter]
        if not state and is_row_sparse(parameter):
            return self._new_moments_of_table(parameter)
        if not state:
            new = {"step": torch.zeros((), dtype=torch.float32, device=self._step_device(parameter))}
            for name in self.dense_state():
                new[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state.update(new)
        return state

    def _new_moments_of_table(self, parameter: Any) -> State:
        """Create the state of a row-sparse table, unless another thread has created it meanwhile; see `moments`."""
        pending: PendingUpdates = parameter.pending_updates
        with pending.lock:
            state: State = self.state[parameter]
            if state:
                return state
            new: State = {"step": torch.zeros((), dtype=torch.float32, device=self._step_device(parameter))}
            if pending.restored:
                check_state(self.row_state, parameter, pending.restored, tuple(parameter.shape))
                new |= pending.restored
                new["step"].fill_(pending.step)
                pending.restored = {}
                self._continue_rounding(parameter)
            else:
                for name, (width, dtype) in self.row_state.layout(parameter).items():
                    new[name] = pending.storage.new_state(parameter, name, width, dtype or parameter.dtype)
            state.update(new)  # at once: a full disk leaves no half of a state
            self._attach(parameter, self._group_of(parameter))
            return state

    def load_moments(self, parameter: Tensor, tensors: State) -> None:
        """Set the state of a parameter to `tensors`, moved to the devices where a step needs them.

        Pending updates of the former state are applied first. `tensors` has `step` and the state tensors. A tensor that
        is on its device already is not copied.

        Raises:
            CheckpointError: The state is that of another rule, or of another table, or `step` is out of range.
            StaleRowsError: The weight was written in place while updates were pending.
            ShapeError: The table has another size than the moments that are attached.
        """
        check_step(tensors.get("step"), tuple(parameter.shape))
        step = {"step": tensors["step"].to(self._step_device(parameter))}
        if not is_row_sparse(parameter):
            self.state[parameter] = {key: t.to(parameter.device) for key, t in tensors.items()} | step
            return
        check_state(self.row_state, parameter, tensors, tuple(parameter.shape))
        pending: PendingUpdates = parameter.pending_updates  # type: ignore[attr-defined]
        with pending.lock:
            pending.apply_all(parameter, moments=True)
            self.state[parameter] = step | {
                name: pending.storage.place(parameter, name, tensors[name].to(dtype=dtype or parameter.dtype))
                for name, (_, dtype) in self.row_state.layout(parameter).items()
            }
            pending.detach()
            self._attach(parameter, self._group_of(parameter))  # now: the table may be saved before the next step

    def _tables(self) -> list[Any]:
        """Return the weights of all row-sparse tables among the parameters of this optimizer."""
        return [p for group in self.param_groups for p in group["params"] if is_row_sparse(p)]

    def _check_group(self, group: dict[str, Any]) -> None:
        """Check the common options of a parameter group, then the rest by `check_options`."""
        named = ((f"a parameter of {type(self).__name__}", each) for each in group["params"])
        refuse_partitioned(named, "is trained", gathered=False)
        if group.get("maximize"):
            raise SizeError("maximize is not offered: minimise the negative loss.")
        if not group["lr"] >= 0 or not group["weight_decay"] >= 0:
            raise SizeError(f"lr and weight_decay must be at least 0, not {group['lr']} and {group['weight_decay']}.")
        tables = [p for p in group["params"] if isinstance(p, Tensor) and is_row_sparse(p)]
        if "rounding_seed" in group and any(table.dtype == torch.float16 for table in tables):
            raise SizeError("StochasticRounding is for bfloat16 tables, not for float16: leave out `rounding`.")
        self.check_options(group, has_tables=bool(tables))

    def _checked_parameters(
        self,
    ) -> tuple[list[tuple[Any, dict[str, Any]]], list[tuple[list[Tensor], dict[str, Any]]]]:
        """Return the parameters that have a gradient, after checking that a step can be made on every one of them."""
        tables, dense = [], []
        for group in self.param_groups:
            lists: dict[bool, list[Tensor]] = {False: [], True: []}  # torch's kernels take no list of both
            for parameter in group["params"]:
                is_table = is_row_sparse(parameter)
                if is_table and parameter.pending_updates.replaced:
                    raise ShapeError(
                        f"A table's weight {tuple(parameter.shape)} was replaced after the optimizer was built: build "
                        f"it again."
                    )
                if parameter.grad is None:
                    continue
                if is_table:
                    parameter.pending_updates.check_capture(parameter)
                    check_rates(float(group["lr"]), float(group["weight_decay"]))
                    tables.append((parameter, group))
                elif parameter.grad.is_sparse:
                    raise ShapeError(f"A sparse gradient {tuple(parameter.shape)} is not of a RowSparseEmbedding(...).")
                else:
                    self._check_dense_state(parameter)
                    lists[is_sharded(parameter)].append(parameter)
            for parameters in filter(None, lists.values()):
                dense.append((parameters, group))
        return tables, dense

    def _check_dense_state(self, parameter: Tensor) -> None:
        """Check that a dense parameter was not converted since its last step; torch's kernel would find it too late."""
        for name, value in self.state.get(parameter, {}).items():
            if name == "step" or not isinstance(value, Tensor):
                continue
            if (value.dtype, value.device, value.shape) != (parameter.dtype, parameter.device, parameter.shape):
                raise ShapeError(
                    f"A parameter is {tuple(parameter.shape)}, {parameter.dtype} on {parameter.device}, and its {name} "
                    f"{tuple(value.shape)}, {value.dtype} on {value.device}: it was converted after a step."
                )

    def _step_device(self, parameter: Tensor) -> torch.device:
        fused = any(group.get("fused") and any(parameter is p for p in group["params"]) for group in self.param_groups)
        return parameter.device if fused and not is_row_sparse(parameter) else torch.device("cpu")

    def _group_of(self, parameter: Tensor) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(parameter is each for each in group["params"]))

    def _attach(self, parameter: Any, group: dict[str, Any]) -> None:
        """Let the pending updates of a table record the steps of this optimizer; see `PendingUpdates.attach`."""
        state, seed = self.moments(parameter), group.get("rounding_seed")
        moments = tuple(map(state.__getitem__, self.row_state.names))
        parameter.pending_updates.attach(
            parameter, int(state["step"]), moments, self.betas_of(group), rounding_seed=seed
        )

    def _continue_rounding(self, parameter: Any) -> None:
        """Continue with the rounding seed of restored pending updates, if this optimizer rounds at random."""
        seed, group = parameter.pending_updates.rounding_seed, self._group_of(parameter)
        if seed is not None and "rounding_seed" in group:
            group["rounding_seed"] = seed

    def _checked_states(self, state_dict: dict[str, Any]) -> list[tuple[Tensor, State]]:
        """Return the parameters of this optimizer with their states in a state dict, which is empty before a step."""
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        states = []
        for place, parameter in zip(places, parameters, strict=False):  # torch counts them itself
            state = state_dict["state"].get(place, {})
            states.append((parameter, state))
            if not state:
                continue
            check_step(state.get("step"), place)
            if is_row_sparse(parameter):
                check_state(self.row_state, parameter, state, place)
                continue
            for name in self.dense_state():
                if name not in state:
                    raise CheckpointError(
                        f"The state of parameter {place} has no {name}: it is not of {type(self).__name__}."
                    )
                if state[name].shape != parameter.shape:
                    raise CheckpointError(
                        f"The state of parameter {place} is {tuple(state[name].shape)}, it {tuple(parameter.shape)}: "
                        f"it belongs to another table."
                    )
        return states


def is_row_sparse(parameter: Tensor) -> bool:
    """Return whether `parameter` is the weight of a row-sparse table."""
    return hasattr(parameter, "pending_updates")
