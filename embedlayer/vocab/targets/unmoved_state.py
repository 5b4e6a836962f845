"""State of optimizers that were not passed to an edit: it has the rows before the edit, so the next step is refused."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from embedlayer.core.errors import StaleRowsError
from embedlayer.core.held_parameters import optimizers_of, trained_by
from embedlayer.vocab.map import RowMap

UNMOVED = "unmoved_state"
"""Attribute of an optimizer, only after such an edit: from the `id` of a parameter to its `UnmovedState`."""


class UnmovedState:
    """Step pre-hook of an optimizer whose state of a parameter has the rows before an edit; raises a `StaleRowsError`.

    It has no effect once the state was replaced, as `load_state_dict` does.

    Attributes:
        row_maps: The edits that the state has not taken, oldest first.
    """

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
        """Raise the error before a step that would use the state; torch passes the arguments of the step too.

        Raises:
            StaleRowsError: The step would use state of the rows before the edit.
        """
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

    An undo of the edit, to which the optimizer is not passed either, makes its state fit again. The parameters are
    those whose rows were moved and that an optimizer may hold, by name; `optimizer` is the one whose state was moved
    too, or `None`. If the row map changes nothing, neither does this.
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
