"""An optimizer that was not passed to an edit refuses its next step, and what the error says works."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import cases
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

import embedlayer as el
from embedlayer.vocab import edit_vocabulary

IDS = torch.arange(8)
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam, amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True, foreach=False),
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "RowAdamW": el.RowAdamW,
    "RowAdagrad": el.RowAdagrad,
}
EDITS: dict[str, dict[str, Any]] = {
    "add": {"add": 3},
    "remove": {"remove": [9, 11]},
    "reorder": {"order": [*range(12, 20), *range(12)]},
    "same size": {"remove": [9], "add": 1},
}


def trained(optimizer: str) -> tuple[nn.Module, Optimizer]:
    """A table and a head after a step."""
    torch.manual_seed(0)
    model = nn.Module()
    model.table = el.TokenEmbedding(20, 4, row_sparse=optimizer.startswith("Row"))
    model.head = el.OutputHead(4, 20) if model.table.row_sparse else el.OutputHead(model.table)
    trainer = OPTIMIZERS[optimizer](model.parameters())
    step(model, trainer)
    return model, trainer


def step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model.head.loss(model.table(IDS), IDS).backward()
    optimizer.step()


@cases("name, edit", OPTIMIZERS, EDITS)
def test_a_step_with_state_of_the_rows_before_is_refused_and_the_advice_works(name, edit) -> None:
    model, optimizer = trained(name)
    receipt = edit_vocabulary(model, **EDITS[edit])
    rows = copy.deepcopy(model.state_dict())
    with pytest.raises(
        el.core.errors.StaleRowsError, match=r"moved the rows of .*table\.weight.*receipt\.undo\(model\)"
    ):
        step(model, optimizer)
    assert all(torch.equal(value, rows[key]) for key, value in model.state_dict().items())
    receipt.undo(model)
    edit_vocabulary(model, **EDITS[edit], optimizer=optimizer)
    step(model, optimizer)

    twin, twin_optimizer = trained(name)
    edit_vocabulary(twin, **EDITS[edit], optimizer=twin_optimizer)
    step(twin, twin_optimizer)
    assert not twin_optimizer._optimizer_step_pre_hooks
    kept = torch.ones(twin.table.vocab_size, dtype=torch.bool)
    kept[20 - len(EDITS[edit].get("remove", ())) :] = False  # rows that are drawn
    assert torch.equal(model.table.weight[kept], twin.table.weight[kept])

    receipt = edit_vocabulary(model, add=1)
    step(model, OPTIMIZERS[name](model.parameters()))


def test_an_undo_makes_the_state_fit_again_after_any_number_of_edits() -> None:
    model, optimizer = trained("AdamW")
    receipts = [edit_vocabulary(model, **EDITS[edit]) for edit in ("add", "remove")]
    receipts.pop().undo(model)
    with pytest.raises(el.core.errors.StaleRowsError):
        step(model, optimizer)
    receipts.pop().undo(model)
    step(model, optimizer)
    assert not optimizer._optimizer_step_pre_hooks


def test_an_optimizer_with_state_of_earlier_rows_is_not_taken_by_the_next_edit() -> None:
    model, optimizer = trained("AdamW")
    receipt = edit_vocabulary(model, **EDITS["reorder"])
    rows = model.table.weight.detach().clone()
    for call in (
        lambda: edit_vocabulary(model, add=1, optimizer=optimizer),
        lambda: receipt.undo(model, optimizer=optimizer),
    ):
        with pytest.raises(el.core.errors.StaleRowsError, match="has state of the rows before"):
            call()
    assert torch.equal(model.table.weight, rows)


def test_state_that_was_loaded_after_the_edit_is_taken() -> None:
    model, optimizer = trained("AdamW")
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    edit_vocabulary(twin, add=3, optimizer=twin_optimizer)
    edit_vocabulary(model, add=3)
    optimizer.load_state_dict(copy.deepcopy(twin_optimizer.state_dict()))
    step(model, optimizer)


def test_what_has_no_state_of_the_rows_steps_on_without_a_hook() -> None:
    model, _ = trained("AdamW")
    without_state, unstepped = torch.optim.SGD(model.parameters()), torch.optim.AdamW(model.parameters())
    others = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    step(model, without_state)
    edit_vocabulary(model, add=3)
    for optimizer in (without_state, unstepped, others):
        assert not optimizer._optimizer_step_pre_hooks
        step(model, optimizer)
    assert not torch_optimizer._global_optimizer_pre_hooks


def test_rows_that_are_no_longer_trained_are_no_error() -> None:
    model, optimizer = trained("AdamW")
    edit_vocabulary(model, add=3)
    model.table.weight.requires_grad_(False)
    optimizer.zero_grad()
    optimizer.step()
