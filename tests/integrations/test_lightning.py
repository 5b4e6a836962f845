"""Lightning with one callback: losses and weights of the plain trainer, our loss at each step, and no logits."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from memory import Shapes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ConstantLR, LinearLR, ReduceLROnPlateau, SequentialLR

import embedlayer as el
from embedlayer.integrations import lightning_patch

lightning = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers and devices

V, D, ROWS, TOKENS = 999, 16, 2, 300


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": 24, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, **options))


def adamw(module: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), **{"lr": 1e-3, "weight_decay": 0.1, **options})


def two_schedules(module: nn.Module) -> Any:
    optimizer = adamw(module)
    parts = [LinearLR(optimizer, 0.1, 1.0, total_iters=2), ConstantLR(optimizer, 0.5)]
    scheduler = SequentialLR(optimizer, [*parts], milestones=[2])
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def plateau(module: nn.Module) -> Any:
    optimizer = adamw(module)
    return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "loss"}


class Module(lightning.LightningModule):  # type: ignore[name-defined]
    """A user's module: its loss is the model's own, or one of the model's logits."""

    def __init__(self, model: Any, optimizer_of: Any = adamw, *, own_loss: bool = False) -> None:
        super().__init__()
        self.model, self.optimizer_of, self.own_loss = model, optimizer_of, own_loss
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        if self.own_loss:
            loss = F.cross_entropy(self.model(batch).logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        else:
            loss = self.model(batch, labels=batch).loss
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer_of(self)


def data(batches: int = 4) -> list[Tensor]:
    """All IDs of a few at first, then other ones, so that updates are pending."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(200 * i, 200 * i + 50, (ROWS, TOKENS), generator=generator) for i in range(batches)]


def fit(module: Any, folder: Path, *callbacks: Any, resume: Path | None = None, **options: Any) -> Any:
    options = {"max_epochs": 1, "enable_checkpointing": False, "gradient_clip_val": 0.5, **options}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(**quiet, **options, default_root_dir=folder, callbacks=[*callbacks])
    loader: Any = torch.utils.data.DataLoader(data(), batch_size=None)
    trainer.fit(module, loader, ckpt_path=resume, weights_only=False)
    return trainer


def assert_same(ours: Module, plain: Module) -> None:
    assert ours.losses == pytest.approx(plain.losses, abs=1e-5)
    theirs = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        assert (parameter - theirs[name]).abs().max() <= 1e-5, name


@pytest.mark.parametrize("own_loss", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_one_callback_trains_as_the_plain_trainer_without_logits(tied, own_loss, calls, tmp_path) -> None:
    plain, ours = (Module(llama(tie_word_embeddings=tied), own_loss=own_loss) for _ in range(2))
    with Shapes() as plain_shapes:
        fit(plain, tmp_path)
    assert calls == []
    with Shapes() as our_shapes:
        trainer = fit(ours, tmp_path, lightning_patch())
    assert_same(ours, plain)
    assert len(calls) >= len(ours.losses) == 4
    logits = ROWS * (TOKENS - 1) * V
    assert plain_shapes.largest(logits)
    assert not our_shapes.largest(logits)
    assert [type(each) for each in trainer.optimizers] == [torch.optim.AdamW if tied else el.RowAdamW]
    assert ours.model.get_input_embeddings().row_sparse is not tied


@pytest.mark.parametrize("optimizer_of", [two_schedules, plateau])
def test_schedulers_set_the_learning_rate_of_the_new_optimizer(optimizer_of, tmp_path) -> None:
    plain, ours = (Module(llama(), optimizer_of) for _ in range(2))
    rates = []
    for module, callbacks in ((plain, ()), (ours, (lightning_patch(row_sparse=True),))):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*optimizer.step.*")
            trainer = fit(module, tmp_path, *callbacks, max_epochs=3)
        rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])
    assert isinstance(trainer.optimizers[0], el.RowAdamW)
    assert rates[0] == rates[1]
    assert_same(ours, plain)


@pytest.mark.parametrize(("first", "then"), [(True, True), (False, True), (True, False)])
def test_a_checkpoint_of_either_optimizer_resumes_with_the_other(first, then, tmp_path) -> None:
    plain = Module(llama(), two_schedules)
    fit(plain, tmp_path, max_epochs=2)
    begun, resumed = (Module(llama(), two_schedules) for _ in range(2))
    fit(begun, tmp_path, lightning_patch(row_sparse=first)).save_checkpoint(tmp_path / "one.ckpt")
    fit(resumed, tmp_path, lightning_patch(row_sparse=then), resume=tmp_path / "one.ckpt", max_epochs=2)
    resumed.losses = begun.losses + resumed.losses
    assert_same(resumed, plain)


def test_a_second_fit_continues_with_row_sparse_tables(tmp_path) -> None:
    plain, ours = Module(llama()), Module(llama())
    for _ in range(2):
        fit(plain, tmp_path)
        trainer = fit(ours, tmp_path, lightning_patch())
    assert isinstance(trainer.optimizers[0], el.RowAdamW)
    assert_same(ours, plain)


def test_a_model_that_is_built_in_configure_model_is_patched(calls, tmp_path) -> None:
    class Late(Module):
        def configure_model(self) -> None:
            self.model = self.model or llama()

    plain, ours = Module(llama()), Late(None)
    fit(plain, tmp_path)
    fit(ours, tmp_path, lightning_patch(row_sparse=True))
    assert_same(ours, plain)
    assert len(calls) == 4


def test_a_model_with_adapters_keeps_its_frozen_table(calls, tmp_path) -> None:
    peft = pytest.importorskip("peft")
    plain, ours = (
        Module(peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))) for _ in range(2)
    )
    ours.load_state_dict(plain.state_dict())
    fit(plain, tmp_path)
    fit(ours, tmp_path, lightning_patch())
    assert_same(ours, plain)
    assert len(calls) == 4
    assert not ours.model.get_input_embeddings().row_sparse


def test_layers_of_embedlayer_get_the_optimizer_of_their_tables(tmp_path) -> None:
    class Layers(Module):
        def __init__(self, *, row_sparse: bool) -> None:
            torch.manual_seed(0)
            super().__init__(None)
            self.table = (el.RowSparseEmbedding if row_sparse else el.TokenEmbedding)(V, D)
            self.head = el.OutputHead(D, V)

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            loss = self.head.loss(self.table(batch[:, :-1]), batch[:, 1:])
            self.losses.append(loss.item())
            return loss

    plain, ours = Layers(row_sparse=False), Layers(row_sparse=True)
    fit(plain, tmp_path)
    assert isinstance(fit(ours, tmp_path, lightning_patch()).optimizers[0], el.RowAdamW)
    assert_same(ours, plain)


def amsgrad(module: nn.Module) -> torch.optim.Optimizer:
    return adamw(module, amsgrad=True)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-2)


@pytest.mark.parametrize("optimizer_of", [amsgrad, sgd])
def test_another_optimizer_trains_a_dense_table_and_refuses_row_sparse(optimizer_of, calls, tmp_path) -> None:
    plain, ours = (Module(llama(), optimizer_of) for _ in range(2))
    fit(plain, tmp_path)
    fit(ours, tmp_path, lightning_patch())
    assert_same(ours, plain)
    assert len(calls) == 4
    with pytest.raises(el.SizeError, match="row_sparse=True is impossible here"):
        fit(Module(llama(), optimizer_of), tmp_path, lightning_patch(row_sparse=True))


def test_the_callback_can_be_sent_to_spawned_processes(calls, tmp_path) -> None:
    trainer = fit(Module(llama()), tmp_path, pickle.loads(pickle.dumps(lightning_patch(row_sparse=True))))
    assert isinstance(trainer.optimizers[0], el.RowAdamW)
    assert len(calls) == 4


def test_row_sparse_gradients_of_a_tied_or_frozen_table_are_an_error(tmp_path) -> None:
    frozen = llama()
    frozen.get_input_embeddings().requires_grad_(False)
    for model in (llama(tie_word_embeddings=True), frozen):
        with pytest.raises(el.SizeError, match="table"):
            fit(Module(model), tmp_path, lightning_patch(row_sparse=True))


def test_a_module_without_anything_to_patch_is_an_error(tmp_path) -> None:
    with pytest.raises(el.CheckpointError, match="no model of transformers"):
        fit(Module(nn.Sequential(nn.Embedding(V, D), nn.Linear(D, V))), tmp_path, lightning_patch())
