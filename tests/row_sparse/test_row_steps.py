"""The record of the steps that each row has taken: which rows lack some, what these do, and its state."""

import pytest
import torch

from embedlayer.core.errors import CheckpointError
from embedlayer.row_sparse.history import Betas, StepHistory
from embedlayer.row_sparse.row_steps import RowSteps

BETAS = Betas(0.9, 0.999, 1e-8)
V = 6


def recorded(batches: list[list[int]]) -> RowSteps:
    """The record of a new table after a step on each of these batches."""
    steps = RowSteps(StepHistory(0, BETAS), *torch.zeros(2, V, dtype=torch.int32))
    for rows in batches:
        steps.record(torch.tensor(rows), 1e-2, 1e-2)
    return steps


def test_rows_that_lack_steps_are_those_without_the_last_one() -> None:
    steps = recorded([[1, 2], [2, 4]])
    assert steps.pending_rows(0, V).tolist() == [0, 1, 3, 5]
    assert steps.pending_rows(1, 4).tolist() == [1, 3]
    steps.value_steps.fill_(2)
    assert steps.pending_rows(0, V).tolist() == []
    assert steps.pending_rows(0, V, moments=True).tolist() == [1]  # the moments of the others are zero or up to date


def test_moments_decay_once_for_each_step_without_a_gradient_and_the_new_one() -> None:
    steps = recorded([[1], [2], [2]])
    missed = steps.record(torch.tensor([1, 2]), 1e-2, 1e-2)
    assert missed.tolist() == [3, 1]
    first, second = steps.decays(missed, torch.zeros(2, V, 3, dtype=torch.float64))
    assert torch.equal(first, torch.tensor([[0.9**3], [0.9]], dtype=torch.float64))
    assert torch.equal(second, torch.tensor([[0.999**3], [0.999]], dtype=torch.float64))


@pytest.mark.parametrize("has_momentum", [True, False])
def test_a_loaded_record_skips_the_same_steps(has_momentum: bool) -> None:
    steps, rows, table = recorded([[1, 2], [2, 4], [5]]), torch.arange(V), torch.zeros(V, 3)
    tensors, rest = steps.state()
    other = recorded([])
    other.load({name: tensor.clone() for name, tensor in tensors.items()}, rest)
    assert other.step == steps.step == 3
    assert other.has_pending
    ours, theirs = (each.skipped_terms(table, rows, has_momentum) for each in (other, steps))
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("damaged", [torch.full((V,), 4), torch.full((V,), -1), torch.zeros(V)])
def test_steps_outside_the_history_are_refused(damaged: torch.Tensor) -> None:
    steps = recorded([[1, 2], [2, 4], [5]])
    tensors, rest = steps.state()
    with pytest.raises(CheckpointError, match="The value_steps of a row-sparse table's pending updates are"):
        recorded([]).load(tensors | {"value_steps": damaged}, rest)
