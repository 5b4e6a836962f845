"""torch's own inputs for its embedding, optimizer and scheduler tests (torch.testing), on plain classes or ours."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db

from interop.substitution import OURS, adamw, embedding

INPUTS = next(info for info in module_db if info.module_cls is nn.Embedding)
CASES = INPUTS.module_inputs_func(INPUTS, device="cpu", dtype=torch.float64, requires_grad=False, training=True)
ADAMW = next(info for info in optim_db if info.optim_cls is torch.optim.AdamW)
SCHEDULERS = {
    "StepLR": {"step_size": 2}, "CosineAnnealingLR": {"T_max": 5}, "LinearLR": {},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 8, "cycle_momentum": False},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "cycle_momentum": False}, "ExponentialLR": {"gamma": 0.9},
    "LambdaLR": {"lr_lambda": lambda step: 0.9**step}, "CosineAnnealingWarmRestarts": {"T_0": 3}}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.desc or "default")
def test_module_inputs_of_embedding(case) -> None:
    arguments, options = case.constructor_input.args, {**case.constructor_input.kwargs, "dtype": torch.float64}
    module, reference = embedding(*arguments, **options), nn.Embedding(*arguments, **options)
    module.load_state_dict(reference.state_dict())
    ids = case.forward_input.args[0]
    torch.testing.assert_close(module(ids), reference(ids))
    for each in (module, reference):
        each(ids).sin().sum().backward()
    torch.testing.assert_close(module.weight.grad, reference.weight.grad)


def trained(build, make_table, options, scheduler):
    torch.manual_seed(0)
    table = make_table()
    optimizer = build(table.parameters(), **options)
    schedule = scheduler(optimizer)
    for step in range(8):
        optimizer.zero_grad()
        table(torch.tensor([step, 3, 3])).square().sum().backward()
        optimizer.step()
        schedule.step()
    return table.weight.detach().clone()


def both(options, scheduler=lr_scheduler.ConstantLR):
    ours = {"row_sparse": True} if OURS else {}
    found = trained(adamw, lambda: embedding(10, 4, **ours), options, scheduler)
    torch.testing.assert_close(found, trained(torch.optim.AdamW, lambda: nn.Embedding(10, 4), options, scheduler))


@pytest.mark.parametrize("case", ADAMW.optim_inputs_func(device="cpu"), ids=lambda case: case.desc)
def test_optimizer_inputs_of_adamw(case) -> None:
    both(case.kwargs)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name) -> None:
    both({"lr": 0.1}, lambda optimizer: getattr(lr_scheduler, name)(optimizer, **SCHEDULERS[name]))
