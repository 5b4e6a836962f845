"""State of optimizers: new rows start as in a new optimizer; one that an edit did not get refuses its next step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import cases
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

import embedlayer as el
from embedlayer.tables import DenseTable
from embedlayer.vocab import edit_vocabulary

ROWS, WIDTH = 9, 4


class ScheduleFree(Optimizer):
    """The recipe of schedule-free SGD: `z` starts as the parameter, and a step outside of training is an error."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "train_mode": False, "k": 0})

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.clone())
                z.sub_(parameter.grad + group["weight_decay"] * parameter, alpha=group["lr"])
                parameter.lerp_(z, 1 / (group["k"] + 2))
            group["k"] += 1


class Late(Optimizer):
    """State that the first step does not show."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["steps"] = state.get("steps", 0) + 1
            if state["steps"] == 2:
                state["late"] = torch.ones_like(parameter)


class NeedsMore(Late):
    """An argument that no group has."""

    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params)


def in_accelerate(optimizer: Optimizer) -> Any:
    return pytest.importorskip("accelerate").Accelerator(cpu=True).prepare_optimizer(optimizer)


OPTIMIZERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "Adadelta": lambda params: torch.optim.Adadelta(params, weight_decay=0.1),
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": lambda params: torch.optim.Adagrad(params, initial_accumulator_value=0.5),
    "Adagrad, row-sparse": lambda params: torch.optim.Adagrad(params, initial_accumulator_value=0.5),
    "Adamax": torch.optim.Adamax,
    "AdamW, amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True),
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.9),
    "RowAdagrad": el.RowAdagrad,
    "RowAdamW": el.RowAdamW,
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.03),
    "Rprop, in accelerate's wrapper": lambda params: in_accelerate(torch.optim.Rprop(params, lr=0.03)),
    "schedule-free": lambda params: ScheduleFree(params, weight_decay=0.1),
    "SGD": lambda params: torch.optim.SGD(params, momentum=0.9, weight_decay=0.1),
    "SparseAdam, row-sparse": torch.optim.SparseAdam,
}
STARTS: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {
    ("Adagrad", "sum"): lambda rows: torch.full_like(rows, 0.5),
    ("Adamax", "exp_inf"): lambda rows: torch.full_like(rows, 1e-8),
    ("ASGD", "ax"): torch.clone,
    ("Rprop", "step_size"): lambda rows: torch.full_like(rows, 0.03),
    ("schedule-free", "z"): torch.clone,
}
"""States that do not start at zero, and what they start with."""


def trained(make: Callable[[list[Tensor]], Optimizer], row_sparse: bool = False) -> tuple[DenseTable, Optimizer]:
    table = (el.RowSparseEmbedding if row_sparse else el.TokenEmbedding)(ROWS, WIDTH)
    optimizer = make([table.weight])
    getattr(optimizer, "train", lambda: None)()
    for _ in range(2):
        optimizer.zero_grad()
        table([1, 2, 8]).square().sum().backward()
        optimizer.step()
    return table, optimizer


def rows_of(optimizer: Optimizer, table: el.TokenEmbedding) -> dict[str, Tensor]:
    state = optimizer.state[table.weight]
    return {key: each.clone() for key, each in state.items() if isinstance(each, Tensor) and len(each.shape) > 1}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_new_rows_start_as_in_a_new_optimizer_and_kept_ones_keep_their_state(name) -> None:
    table, optimizer = trained(OPTIMIZERS[name], row_sparse="row-sparse" in name)
    before = {key: each for key, each in rows_of(optimizer, table).items() if len(each) == ROWS}
    assert before
    receipt = edit_vocabulary(table, remove=[3], add=2, optimizer=optimizer)
    kept = [row for row in range(ROWS) if row != 3]

    def check_new_rows(start: int) -> None:
        for key in before:
            found, new = optimizer.state[table.weight][key][start:], table.weight[start:].detach()
            start_of = STARTS.get((name.partition(",")[0], key), torch.zeros_like)
            torch.testing.assert_close(found, start_of(new)[:, : found.shape[1]])

    check_new_rows(ROWS - 1)
    assert all(torch.equal(optimizer.state[table.weight][key][: ROWS - 1], each[kept]) for key, each in before.items())
    receipt.undo(table, optimizer=optimizer)
    after = rows_of(optimizer, table)
    assert all(torch.equal(after[key], each) for key, each in before.items())
    el.vocab.add_tokens(table, 1, optimizer=optimizer)
    check_new_rows(ROWS)
    optimizer.zero_grad()
    table([1, 8, ROWS]).square().sum().backward()
    optimizer.step()
    assert table.weight.isfinite().all()


def test_an_undo_with_state_that_came_after_the_edit_says_how_to_undo() -> None:
    table = el.RowSparseEmbedding(ROWS, 4)
    before, optimizer = table.weight.detach().clone(), el.RowAdamW(table.parameters(), weight_decay=0.0)
    receipt = el.vocab.add_tokens(table, 1, optimizer=optimizer)
    table([ROWS]).sum().backward()
    optimizer.step()
    with pytest.raises(el.CheckpointError):
        receipt.undo(table, optimizer=optimizer)
    receipt.undo(table)
    assert torch.equal(table.weight, before)


@pytest.mark.parametrize(
    ("make", "reason"), [(Late, "does not show late"), (lambda p: NeedsMore(p, nn.Module()), "model")]
)
def test_state_that_a_new_optimizer_does_not_show_is_refused_by_name(make, reason) -> None:
    table, optimizer = trained(make)
    before, state = table.weight.detach().clone(), rows_of(optimizer, table)
    with pytest.raises(el.SizeError, match=f"A new {type(optimizer).__name__} .*{reason}.* of new rows of weight"):
        el.vocab.add_tokens(table, 2, optimizer=optimizer)
    assert torch.equal(table.weight, before)
    el.vocab.remove_tokens(table, [3], optimizer=optimizer)  # no row is new
    kept = [row for row in range(ROWS) if row != 3]
    assert torch.equal(optimizer.state[table.weight]["late"], state["late"][kept])
    el.vocab.add_tokens(table, 2)
    built_again = make([table.weight])
    table([1]).sum().backward()
    built_again.step()


@pytest.mark.parametrize("model_type", ["esm", "mobilebert"])
def test_gradient_and_state_of_tensors_behind_the_head_are_moved_too(model_type, unchecked) -> None:
    """ESM's bias is no part of its head; MobileBERT's further columns of the head's rows have tokens at axis 1."""
    from tiny_models import VOCAB, build

    model = el.patch(build(model_type, "masked")[1])
    name = {"esm": "lm_head.bias", "mobilebert": "cls.predictions.dense.weight"}[model_type]
    parameter = model.get_parameter(name)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.tensor([[5, 9, 40]])
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    gradient, average = parameter.grad.clone(), optimizer.state[parameter]["exp_avg"].clone()
    receipt = edit_vocabulary(model, remove=[VOCAB - 1], add=2, optimizer=optimizer)
    axis = parameter.dim() - 1
    assert model.get_parameter(name) is parameter
    for found, old in ((parameter.grad, gradient), (optimizer.state[parameter]["exp_avg"], average)):
        assert torch.equal(found.narrow(axis, 0, VOCAB - 1), old.narrow(axis, 0, VOCAB - 1))
        assert not found.narrow(axis, VOCAB - 1, 2).any()
    model(input_ids=ids, labels=ids).loss.backward()
    receipt.undo(model, optimizer=optimizer)
    assert torch.equal(optimizer.state[parameter]["exp_avg"], average)


# Optimizers that an edit did not get

IDS = torch.arange(8)
HELD: dict[str, Callable[[Any], Optimizer]] = {
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


def held(optimizer: str) -> tuple[nn.Module, Optimizer]:
    """A table and a head after a step."""
    torch.manual_seed(0)
    model = nn.Module()
    model.table = (el.RowSparseEmbedding if optimizer.startswith("Row") else el.TokenEmbedding)(20, 4)
    model.head = el.OutputHead(4, 20) if model.table.row_sparse else el.OutputHead(model.table)
    trainer = HELD[optimizer](model.parameters())
    step(model, trainer)
    return model, trainer


def step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model.head.loss(model.table(IDS), IDS).backward()
    optimizer.step()


@cases("name, edit", HELD, EDITS)
def test_a_step_with_state_of_the_rows_before_is_refused_and_the_advice_works(name, edit) -> None:
    model, optimizer = held(name)
    receipt = edit_vocabulary(model, **EDITS[edit])
    rows = copy.deepcopy(model.state_dict())
    with pytest.raises(el.StaleRowsError, match=r"moved the rows of .*table\.weight.*receipt\.undo\(model\)"):
        step(model, optimizer)
    assert all(torch.equal(value, rows[key]) for key, value in model.state_dict().items())
    receipt.undo(model)
    edit_vocabulary(model, **EDITS[edit], optimizer=optimizer)
    step(model, optimizer)

    twin, twin_optimizer = held(name)
    edit_vocabulary(twin, **EDITS[edit], optimizer=twin_optimizer)
    step(twin, twin_optimizer)
    assert not twin_optimizer._optimizer_step_pre_hooks
    kept = torch.ones(twin.table.vocab_size, dtype=torch.bool)
    kept[20 - len(EDITS[edit].get("remove", ())) :] = False  # rows that are drawn
    assert torch.equal(model.table.weight[kept], twin.table.weight[kept])

    receipt = edit_vocabulary(model, add=1)
    step(model, HELD[name](model.parameters()))


def test_an_undo_makes_the_state_fit_again_after_any_number_of_edits() -> None:
    model, optimizer = held("AdamW")
    receipts = [edit_vocabulary(model, **EDITS[edit]) for edit in ("add", "remove")]
    receipts.pop().undo(model)
    with pytest.raises(el.StaleRowsError):
        step(model, optimizer)
    receipts.pop().undo(model)
    step(model, optimizer)
    assert not optimizer._optimizer_step_pre_hooks


def test_an_optimizer_with_state_of_earlier_rows_is_not_taken_by_the_next_edit() -> None:
    model, optimizer = held("AdamW")
    receipt = edit_vocabulary(model, **EDITS["reorder"])
    rows = model.table.weight.detach().clone()
    for call in (
        lambda: edit_vocabulary(model, add=1, optimizer=optimizer),
        lambda: receipt.undo(model, optimizer=optimizer),
    ):
        with pytest.raises(el.StaleRowsError):
            call()
    assert torch.equal(model.table.weight, rows)


def test_state_that_was_loaded_after_the_edit_is_taken() -> None:
    model, optimizer = held("AdamW")
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    edit_vocabulary(twin, add=3, optimizer=twin_optimizer)
    edit_vocabulary(model, add=3)
    optimizer.load_state_dict(copy.deepcopy(twin_optimizer.state_dict()))
    step(model, optimizer)


def test_what_has_no_state_of_the_rows_steps_on_without_a_hook() -> None:
    model, _ = held("AdamW")
    without_state, unstepped = torch.optim.SGD(model.parameters()), torch.optim.AdamW(model.parameters())
    others = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    step(model, without_state)
    edit_vocabulary(model, add=3)
    for optimizer in (without_state, unstepped, others):
        assert not optimizer._optimizer_step_pre_hooks
        step(model, optimizer)
    assert not torch_optimizer._global_optimizer_pre_hooks
