"""State of an optimizer by rows: which of its tensors have a row for each token, and what new rows start with.

The state of an optimizer that was not passed to an edit has the rows before it: its next step raises an error.
"""

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from embedlayer.core.errors import SizeError, StaleRowsError
from embedlayer.core.held_parameters import optimizers_of, trained_by
from embedlayer.core.partitioned import is_sharded, sharding_of
from embedlayer.optim.row_optimizer import RowOptimizer
from embedlayer.vocab.map import RowMap, RowTensor


def state_with_rows(state: Mapping[str, Any], name: str, rows: RowTensor) -> Iterator[tuple[str, Tensor]]:
    """Yield `(key, tensor)` for each state of an optimizer for one parameter that has one row for each token."""
    parameter = rows.tensor
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or value.numel() <= 1:
            continue
        has_rows = value.shape == parameter.shape or (rows.axis == 0 and _has_rows(key, value, parameter))
        if has_rows and is_sharded(parameter) and sharding_of(value) != sharding_of(parameter):
            raise SizeError(
                f"The optimizer's {key} of {name} is not sharded as the parameter is: build the optimizer again."
            )
        without_rows = rows.axis == 0 and value.shape[-1:] == parameter.shape[-1:]
        if not value.is_floating_point() or not (has_rows or without_rows):
            raise SizeError(
                f"It is not known how {key} of {name}, {tuple(value.shape)} of {value.dtype}, belongs to rows: build "
                f"the optimizer again after the edit."
            )
        if has_rows:
            yield key, value


def _has_rows(key: str, value: Tensor, parameter: Tensor) -> bool:
    """Return whether a state has a row for each row of a parameter, but not the parameter's shape."""
    count = len(parameter)
    return value.shape == (count, 1) or (value.shape[0] == count and (count not in parameter.shape[1:] or "row" in key))


class NewState:
    """Compute the state with which an optimizer starts for new rows of a parameter."""

    # That of a new optimizer after one step with a gradient of zero and no weight decay: zero for most, but the row
    # itself for the `z` of schedule-free optimizers, the first step size for Rprop, `initial_accumulator_value` for
    # Adagrad.

    def __init__(self, optimizer: Optimizer, name: str, parameter: Tensor) -> None:
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):  # as accelerate wraps one
            optimizer = inner
        self.optimizer, self.name, self.parameter = optimizer, name, parameter
        self.last: tuple[Tensor, Mapping[str, Any]] | None = None

    def of(self, key: str) -> Callable[[Tensor], Tensor] | None:
        """Return the function from new rows to their state under `key`; `None` if it is zero whatever they are."""
        return None if isinstance(self.optimizer, RowOptimizer) else partial(self._rows, key)

    def _rows(self, key: str, rows: Tensor) -> Tensor:
        """Return the state of new rows under `key`, `(k, ...)`."""
        if self.last is None or not torch.equal(self.last[0], rows):
            self.last = rows.clone(), self._stepped(rows)
        value = self.last[1].get(key)
        if not isinstance(value, Tensor) or value.shape[:1] != rows.shape[:1]:
            raise self._not_shown(key)
        return value

    def _stepped(self, rows: Tensor) -> Mapping[str, Any]:
        """Return the state of a new optimizer after one step on a copy of `rows` with a gradient of zero."""
        optimizer = self.optimizer
        group = next(each for each in optimizer.param_groups if any(p is self.parameter for p in each["params"]))
        options = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        options |= {key: 0.0 for key in options if key == "weight_decay"}
        arguments = inspect.signature(type(optimizer)).parameters
        new_rows = nn.Parameter(rows.detach().clone())
        try:
            new = type(optimizer)([new_rows], **{key: options[key] for key in arguments if key in options})
            new.param_groups[0].update(options)
            getattr(new, "train", lambda: None)()  # schedule-free optimizers step in this mode alone
            new_rows.grad = torch.zeros_like(new_rows)
            if isinstance(new, torch.optim.SparseAdam):
                new_rows.grad = new_rows.grad.to_sparse(1)
            new.step()
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._not_shown(f"its state ({error})") from error
        state: Mapping[str, Any] = new.state[new_rows]
        return state

    def _not_shown(self, key: str) -> SizeError:
        """Return the error for a state of new rows that is not known."""
        return SizeError(
            f"A new {type(self.optimizer).__name__} does not show {key} of new rows of {self.name}. Leave optimizer "
            f"out, and build the optimizer again after the edit."
        )


UNMOVED = "unmoved_state"
"""Attribute of an optimizer, only after such an edit: from the `id` of a parameter to its `UnmovedState`."""


class UnmovedState:
    """Step pre-hook of an optimizer whose state has the rows before an edit: raise a `StaleRowsError`."""

    # It has no effect once the state was replaced, as by `load_state_dict`. `row_maps` are the edits that the state has
    # not taken, oldest first.

    def __init__(self, optimizer: Optimizer, parameter: Tensor, name: str) -> None:
        self.row_maps: list[RowMap] = []
        self.name, self.parameter = name, id(parameter)
        self.tensors = [weakref.ref(value) for value in _rows_of(optimizer, parameter)]
        self.handle = optimizer.register_step_pre_hook(self)

    def is_current(self, optimizer: Optimizer) -> bool:
        """Return whether the state is still that before the edit."""
        parameter = trained_by(optimizer, self.parameter)
        known = {id(value) for reference in self.tensors if (value := reference()) is not None}
        return parameter is not None and any(id(value) in known for value in _rows_of(optimizer, parameter))

    def remove(self, optimizer: Optimizer) -> None:
        """Take the hook off the optimizer."""
        self.handle.remove()
        del vars(optimizer)[UNMOVED][self.parameter]

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Raise the error before a step that would use the state; torch passes the arguments of the step too."""
        parameter = trained_by(optimizer, self.parameter)
        if parameter is not None and parameter.grad is not None and self.is_current(optimizer):
            raise StaleRowsError(self.message(optimizer))

    def message(self, optimizer: Optimizer) -> str:
        """Return what is wrong and which calls help."""
        return (
            f"An edit of the vocabulary moved the rows of {self.name}, and this {type(optimizer).__name__} has state "
            f"of the rows before. Call receipt.undo(model), without an optimizer, and repeat the edit with "
            f"optimizer=optimizer, which moves the state too. Or build the optimizer again: its state then begins anew."
        )


def _rows_of(optimizer: Optimizer, parameter: Tensor) -> list[Tensor]:
    """Return the tensors of an optimizer's state of a parameter, without single numbers."""
    state = optimizer.state.get(parameter, {})
    return [value for value in state.values() if isinstance(value, Tensor) and value.dim()]


def watch_unmoved(
    parameters: Mapping[str, Tensor], row_map: RowMap, optimizer: Optimizer | None, *, is_undo: bool
) -> None:
    """Let each optimizer that an edit did not move refuse its next step with state of the rows before.

    An undo of the edit, to which the optimizer is not passed either, makes its state fit again.
    """
    if torch.equal(row_map.sources, torch.arange(row_map.old_size)):
        return
    for other in optimizers_of(parameters.values()):
        for name, parameter in parameters.items():
            state = other.state.get(parameter)
            is_moved = optimizer is not None and state is optimizer.state.get(parameter)
            if state is None or is_moved or not _rows_of(other, parameter):
                continue
            states: dict[int, UnmovedState] = vars(other).setdefault(UNMOVED, {})
            unmoved = states.get(id(parameter))
            if unmoved is None or not unmoved.is_current(other):
                unmoved = states[id(parameter)] = UnmovedState(other, parameter, name)
            if is_undo and unmoved.row_maps and torch.equal(unmoved.row_maps[-1].inverse().sources, row_map.sources):
                unmoved.row_maps.pop()
            else:
                unmoved.row_maps.append(row_map)
            if not unmoved.row_maps:
                unmoved.remove(other)


def require_moved(optimizer: Optimizer, parameter: Tensor) -> None:
    """Raise a `StaleRowsError` unless the state of a parameter has the rows that the parameter has now."""
    unmoved: UnmovedState | None = vars(optimizer).get(UNMOVED, {}).get(id(parameter))
    if unmoved is not None and unmoved.is_current(optimizer):
        raise StaleRowsError(unmoved.message(optimizer))
