"""RowAdamW with what torch puts around an optimizer: schedulers, averages, checkpoints, scaling, hooks, DDP."""

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import LONG, some
from processes import on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as schedulers
from torch.optim import swa_utils

from embedlayer import RowAdamW, RowSparseEmbedding, TokenEmbedding

V, D, STEPS = 40, 4, 14


def model_of(*, row_sparse: bool) -> nn.Sequential:
    torch.manual_seed(1)
    table = (RowSparseEmbedding if row_sparse else TokenEmbedding)(V, D, padding_idx=0, dtype=torch.float64)
    return nn.Sequential(table, nn.Linear(D, 3, dtype=torch.float64))


def optimizer_of(model: nn.Module, **options: object) -> torch.optim.Optimizer:
    kind = RowAdamW if model[0].row_sparse else torch.optim.AdamW
    return kind(model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, "fused": True, **options})


def both() -> Iterator[tuple[nn.Sequential, torch.optim.Optimizer]]:
    for row_sparse in (True, False):
        model = model_of(row_sparse=row_sparse)
        yield model, optimizer_of(model)


def batch(step: int) -> Tensor:
    """Few rows at most steps, so that the others are left alone for long."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, V if step % 8 == 0 else 4, (2, 3), generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    optimizer.zero_grad()
    loss = model(batch(number)).square().sum() + model(batch(number + 1)).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_same(ours: list[Tensor], dense: list[Tensor], tolerance: float = 1e-12) -> None:
    for mine, theirs in zip(ours, dense, strict=True):
        assert (mine - theirs).abs().max() <= tolerance


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], schedulers.LRScheduler]] = {
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, STEPS),  # ends at a learning rate of 0
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-4, 1e-2, 4),  # changes betas too
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 1e-2, STEPS),  # changes betas too
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 4), schedulers.ExponentialLR(o, 0.9)], [6]
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: swa_utils.SWALR(o, 1e-3, anneal_epochs=5),
}


PATHS = ("kernels", "torch operators")
ALWAYS = [("kernels", "CosineAnnealingLR"), ("torch operators", "OneCycleLR"), ("kernels", "SequentialLR")]
ALWAYS += [("torch operators", "ReduceLROnPlateau")]


@pytest.mark.parametrize(("both_paths", "name"), some(ALWAYS, product(PATHS, SCHEDULERS)), indirect=["both_paths"])
@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch's SequentialLR calls what it deprecates
def test_schedulers_of_torch_give_the_dense_run(both_paths, name) -> None:
    results = []
    for model, optimizer in both():
        scheduler = SCHEDULERS[name](optimizer)
        for number in range(STEPS):
            loss = step(model, optimizer, number)
            scheduler.step(*([float(loss)] if name == "ReduceLROnPlateau" else []))
        results.append(weights(model))
    assert_same(*results)


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("apply_pending_every", [None, 1])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)}, id="EMA, foreach"),
        pytest.param({"avg_fn": swa_utils.get_ema_avg_fn(0.9)}, id="EMA", marks=LONG),
        pytest.param({"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()}, id="SWA, foreach", marks=LONG),
        pytest.param({}, id="default", marks=LONG),
        pytest.param({"use_buffers": True}, id="buffers"),
    ],
)
def test_averaged_models_are_those_of_the_dense_run(options, apply_pending_every) -> None:
    results = []
    for model, optimizer in both():
        if isinstance(optimizer, RowAdamW):
            optimizer = optimizer_of(model, apply_pending_every=apply_pending_every)
        average = swa_utils.AveragedModel(model, **options)
        for number in range(STEPS):
            step(model, optimizer, number)
            average.update_parameters(model)
        looked_up = average(torch.arange(V)).detach()
        results.append([*weights(average.module), looked_up])
    assert_same(*results)


@pytest.mark.usefixtures("both_paths")
def test_the_state_for_distributed_checkpoints_goes_into_a_fresh_optimizer_and_into_that_of_dense_adamw() -> None:
    for make in (lambda m, o: o, lambda m, o: RowAdamW(m.parameters()), lambda m, o: torch.optim.AdamW(m.parameters())):
        results = []
        for row_sparse in (True, False):
            model = model_of(row_sparse=row_sparse)
            optimizer = optimizer_of(model)
            for number in range(STEPS):
                step(model, optimizer, number)
            state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
            fresh = model_of(row_sparse=row_sparse and make(model, optimizer).__class__ is RowAdamW)
            fresh.load_state_dict(model.state_dict())
            again = make(fresh, optimizer_of(fresh))
            set_optimizer_state_dict(fresh, again, state)
            for number in range(STEPS, 2 * STEPS):
                step(fresh, again, number)
            results.append(weights(fresh))
        assert_same(*results)


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("clip", [None, nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_scaled_and_accumulated_gradients_clipped_by_torch_give_the_dense_run(clip) -> None:
    results = []
    for model, optimizer in both():
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for number in range(STEPS):
            for part in range(2):
                scaler.scale(model(batch(2 * number + part)).square().sum()).backward()
            if number == 5:
                grad = model[0].weight.grad
                (grad._values() if grad.is_sparse else grad)[0, 0] = torch.inf
            if clip is not None:
                scaler.unscale_(optimizer)
                clip(model.parameters(), 1e-2)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        results.append(weights(model))
    assert_same(*results)


@pytest.mark.usefixtures("both_paths")
def test_a_training_loop_never_applies_the_updates_of_rows_that_it_does_not_read() -> None:
    model = model_of(row_sparse=True)
    optimizer = optimizer_of(model)
    scheduler, scaler = schedulers.StepLR(optimizer, 3), torch.amp.GradScaler("cpu")
    for number in range(STEPS):
        scaler.scale(model.train()(batch(number)).square().sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.requires_grad_(True).parameters(), 1e-2)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        assert sum(p.numel() for p in model.parameters() if p.is_floating_point() and p.device.type == "cpu")
        with torch.no_grad():
            model.eval()(batch(number))
    assert model[0].pending_updates.has_pending
    assert model[0].pending_updates.state()[1]["applied_step"] == 0


@pytest.mark.usefixtures("both_paths")
def test_a_step_on_zeroed_gradients_is_a_step() -> None:
    results = []
    for model, optimizer in both():
        for number in range(STEPS):
            step(model, optimizer, number)
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
            model.zero_grad()
            optimizer.step()  # without gradients it is none
        results.append(weights(model))
    assert_same(*results)


@pytest.mark.usefixtures("both_paths")
def test_hooks_closures_and_groups_that_are_added_or_changed_give_the_dense_run() -> None:
    results = []
    for row_sparse in (True, False):
        seen: list[Any] = []
        model, more = model_of(row_sparse=row_sparse), model_of(row_sparse=row_sparse)
        optimizer = optimizer_of(model)
        optimizer.register_step_post_hook(lambda o, *_, seen=seen: seen.append(o.param_groups[0]["params"][0].sum()))
        for number in range(STEPS):
            if number == 6:
                optimizer.add_param_group({"params": more.parameters(), "lr": 3e-3, "betas": (0.8, 0.99)})
            group = optimizer.param_groups[-1]
            group["lr"] = 0.95 * (torch.tensor(group["lr"], dtype=torch.float64) if number == 7 else group["lr"])
            group["weight_decay"] = 0.01 * number
            group["betas"] = (0.9, 0.999) if number < 15 else (0.85, 0.98)
            optimizer.zero_grad()

            def closure(model: nn.Module = model, more: nn.Module = more, number: int = number) -> Tensor:
                loss = model(batch(number)).square().sum() + more(batch(number + 1)).square().sum()
                loss.backward()
                return loss

            seen.append(optimizer.step(closure).detach())
        results.append([*weights(model), *weights(more), torch.stack(seen).detach()])
    assert_same(*results, tolerance=1e-11)


@pytest.mark.usefixtures("both_paths")
def test_a_copy_of_an_optimizer_alone_holds_current_rows_and_its_options() -> None:
    model = model_of(row_sparse=True)
    optimizer = optimizer_of(model, apply_pending_every=7)
    for number in range(STEPS):
        step(model, optimizer, number)
    again = copy.deepcopy(optimizer)
    assert torch.equal(again.param_groups[0]["params"][0], model[0].weight)
    assert again.apply_pending_every == 7
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def trained_by_ddp(row_sparse: bool) -> list[Tensor]:
    model = model_of(row_sparse=row_sparse)
    together = DistributedDataParallel(model)
    optimizer = optimizer_of(model)
    norms = []
    for number in range(12):
        optimizer.zero_grad()
        with together.no_sync():
            together(batch(2 * number + dist.get_rank())).square().sum().backward()
        together(batch(100 + 2 * number + dist.get_rank())).square().sum().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e-2))
        optimizer.step()
    return [*weights(model), torch.stack(norms)]


def test_under_ddp_ranks_give_the_dense_run() -> None:
    for ours, dense in zip(on_ranks(2, trained_by_ddp, True), on_ranks(2, trained_by_ddp, False), strict=True):
        assert_same(ours, dense)
