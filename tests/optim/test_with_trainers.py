"""Row-sparse tables inside Lightning, accelerate and transformers' Trainer, beside dense ones in the same trainer."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import some
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn

from embedlayer import RowAdamW, RowSparseEmbedding, TokenEmbedding

V, D, BATCHES = 40, 4, 10
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


def network(*, row_sparse: bool) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential((RowSparseEmbedding if row_sparse else TokenEmbedding)(V, D), nn.Linear(D, 3))


def optimizer_of(model: nn.Module, *, row_sparse: bool) -> torch.optim.Optimizer:
    return (RowAdamW if row_sparse else torch.optim.AdamW)(model.parameters(), **OPTIONS)


def batches() -> list[Tensor]:
    """All rows in the first batch, few afterwards, so that most are pending from then on."""
    generator = torch.Generator().manual_seed(0)
    rest = [torch.randint(0, 4, (2, 3), generator=generator) for _ in range(BATCHES - 1)]
    return [torch.arange(V).view(4, 10), *rest]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return 10 * model(ids).square().sum()


def by_hand() -> list[Tensor]:
    model = network(row_sparse=False)
    optimizer = optimizer_of(model, row_sparse=False)
    for ids in batches():
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def assert_close(ours: list[Tensor], dense: list[Tensor]) -> None:
    for mine, theirs in zip(ours, dense, strict=True):
        assert (mine - theirs).abs().max() <= 1e-6


def trained_by_lightning(folder: Path, *, row_sparse: bool, epochs: int, clip: str, **callback: Any) -> list[Tensor]:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(row_sparse=row_sparse)

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return loss_of(self.inner, batch)

        def validation_step(self, batch: Tensor, _: int) -> None:
            self.log("loss", loss_of(self.inner, batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self, row_sparse=row_sparse)

    module = Module()
    loader: Any = torch.utils.data.DataLoader(batches(), batch_size=None)
    few_rows: Any = torch.utils.data.DataLoader(batches()[1:], batch_size=None)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,  # a checkpoint would apply pending updates
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.5,
        gradient_clip_algorithm=clip,
        callbacks=[kind(**options) for kind, options in callback.values()],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers and devices
        trainer.fit(module, loader, few_rows)
    return [parameter.detach().clone() for parameter in module.parameters()]


def callbacks() -> dict[str, Any]:
    found = pytest.importorskip("lightning.pytorch.callbacks")
    return {
        "none": {},
        "EMA": {"average": (found.WeightAveraging, {"avg_fn": get_ema_avg_fn(0.8)})},
        "SWA over steps": {"average": (found.WeightAveraging, {})},
        "EMAWeightAveraging": {"average": (found.EMAWeightAveraging, {"decay": 0.8, "update_starting_at_step": 2})},
        "SWA over epochs": {"average": (found.StochasticWeightAveraging, {"swa_lrs": 1e-2, "swa_epoch_start": 2})},
    }


@pytest.mark.parametrize(
    ("name", "clip"),
    [
        ("none", "norm"),
        ("none", "value"),
        *((name, "norm") for name in ("EMA", "SWA over steps", "EMAWeightAveraging", "SWA over epochs")),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_lightning_clips_and_averages_as_with_a_dense_table(name, clip, tmp_path) -> None:
    chosen = callbacks()[name]
    ours, dense = (
        trained_by_lightning(tmp_path, row_sparse=row_sparse, epochs=4, clip=clip, **chosen)
        for row_sparse in (True, False)
    )
    assert_close(ours, dense)
    if name == "none" and clip == "norm":
        assert_close(trained_by_lightning(tmp_path, row_sparse=True, epochs=1, clip=clip), by_hand())


@pytest.mark.usefixtures("both_paths")
@pytest.mark.filterwarnings("ignore")
def test_accelerate_clips_as_with_a_dense_table() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = network(row_sparse=True)
    model, optimizer = accelerator.prepare(model, optimizer_of(model, row_sparse=True))
    for ids in batches():
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, ids))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert_close([parameter.detach() for parameter in model.parameters()], by_hand())


ALWAYS = [("kernels", 0.5), ("torch operators", 0.0)]
WITH_ALL = [("kernels", 0.0), ("torch operators", 0.5)]


@pytest.mark.parametrize(("both_paths", "max_grad_norm"), some(ALWAYS, [*ALWAYS, *WITH_ALL]), indirect=["both_paths"])
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers_clips_as_with_a_dense_table(both_paths, max_grad_norm, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Model(nn.Module):
        def __init__(self, *, row_sparse: bool) -> None:
            super().__init__()
            self.inner = network(row_sparse=row_sparse)

        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": loss_of(self.inner, input_ids) + 0 * labels.sum()}

    def trained(make: Callable[[nn.Module], torch.optim.Optimizer], *, row_sparse: bool) -> list[Tensor]:
        model = Model(row_sparse=row_sparse)
        options = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            num_train_epochs=2,
            per_device_train_batch_size=2,
            max_grad_norm=max_grad_norm,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            use_cpu=True,
            disable_tqdm=True,
            seed=3,
        )
        data = [{"input_ids": row, "labels": row} for ids in batches()[1:] for row in ids]
        trainer = transformers.Trainer(model, options, train_dataset=data, optimizers=(make(model), None))
        trainer.train()
        assert all("grad_norm" in line for line in trainer.state.log_history if "loss" in line)
        return [parameter.detach().clone() for parameter in model.parameters()]

    sides = [trained(lambda m, s=s: optimizer_of(m, row_sparse=s), row_sparse=s) for s in (True, False)]
    assert_close(*sides)
