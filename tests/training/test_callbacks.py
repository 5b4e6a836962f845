"""The monitor in the trainers of transformers and Lightning reports what it does in a plain loop."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import cases
from torch import Tensor, nn

import embedlayer as el
from embedlayer import CheckpointError, EmbedLayerWarning, SizeError
from embedlayer.training import EmbeddingMonitor, lightning_monitor, transformers_monitor

V, STEPS = 60, 4
ROWS = (torch.rand((8, 9), generator=torch.Generator().manual_seed(2)).pow(2) * V).long()
DATA = [
    {"input_ids": x, "labels": x.index_fill(0, torch.tensor([0]), -100)} for x in ROWS
]  # of all labels, the trainer counts also the first, which nothing predicts


def causal(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes: Any = transformers.GPT2Config(vocab_size=V, n_embd=16, n_layer=1, n_head=2, n_positions=16)
        sizes.resid_pdrop = sizes.embd_pdrop = sizes.attn_pdrop = 0.0
        return transformers.GPT2LMHeadModel(sizes)
    sizes = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(sizes)


def trained(model: Any, folder: Path, *, resume: str | None = None, callback: bool = True, **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="the interop group is not installed")
    options: dict[str, Any] = {"max_steps": STEPS, "per_device_train_batch_size": len(ROWS), "optim": "sgd"}
    options |= {"learning_rate": 0.5, "lr_scheduler_type": "constant", "max_grad_norm": 0, "save_steps": 2}
    options |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, **changes}
    arguments = transformers.TrainingArguments(output_dir=str(folder), **options)
    trainer = transformers.Trainer(model, arguments, train_dataset=DATA)
    if callback:
        trainer.add_callback(transformers_monitor(trainer, every=2, new_tokens=[3]))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def read_lines(trainer: Any) -> list[dict[str, Any]]:
    return [line for line in trainer.state.log_history if "embedding/log_z" in line]


def by_hand(model: Any) -> list[dict[str, float | str]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    monitor, lines = EmbeddingMonitor(model, optimizer, every=2, new_tokens=[3]), []
    for _ in range(STEPS):
        with monitor.step(ROWS):
            model(input_ids=ROWS, labels=ROWS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if monitor.report is not None:
            lines.append(monitor.scalars())
    return lines


def require_equal(lines: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(lines) == len(expected) > 0
    for one, other in zip(lines, expected, strict=True):
        names = {name for name in one if name.startswith("embedding")}
        assert names == {name for name in other if name.startswith("embedding")}
        for name in names - {"embedding/logit_std"}:  # of 16 tokens, in the order of the rows
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


@cases("kind, patched", ["gpt2", "llama"], [True, False])
def test_transformers_trainer_logs_what_a_plain_loop_reports(kind, patched, tmp_path) -> None:
    model = causal(kind)
    expected = by_hand(el.patch(copy.deepcopy(model)).train())
    trainer = trained(el.patch(model) if patched else model, tmp_path)
    require_equal(read_lines(trainer), expected)
    assert [line["step"] for line in read_lines(trainer)] == [2, 4]
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_accumulated_batches_are_one_step_of_transformers(tmp_path) -> None:
    model = causal("gpt2")
    whole = trained(copy.deepcopy(model), tmp_path / "whole")
    parts = trained(model, tmp_path / "parts", per_device_train_batch_size=2, gradient_accumulation_steps=4)
    require_equal(read_lines(parts), read_lines(whole))


@pytest.mark.parametrize("restore", [False, True])
def test_transformers_trainer_resumes_with_the_counts(restore, tmp_path) -> None:
    model = causal("gpt2")
    whole = trained(copy.deepcopy(model), tmp_path)
    resumed = trained(
        model, tmp_path, resume=str(tmp_path / "checkpoint-2"), restore_callback_states_from_checkpoint=restore
    )
    assert [callback for callback in resumed.callback_handler.callbacks if "Monitor" in type(callback).__name__]
    require_equal(read_lines(resumed)[-1:], read_lines(whole)[-1:])
    assert read_lines(resumed)[-1]["embedding/never_seen"] < 1


def test_damaged_counts_are_refused_and_a_checkpoint_without_counts_is_not(tmp_path) -> None:
    model, state = causal("gpt2"), tmp_path / "checkpoint-2" / "trainer_state.json"
    trained(copy.deepcopy(model), tmp_path)
    content = json.loads(state.read_text())
    saved = content["stateful_callbacks"]["EmbeddingMonitorCallback"]["attributes"]["saved"]
    for wrong in ("%", saved["counts"][:20], ""):
        saved["counts"] = wrong
        state.write_text(json.dumps(content))
        with pytest.raises(CheckpointError):
            trained(copy.deepcopy(model), tmp_path, resume=str(state.parent))
    del content["stateful_callbacks"]["EmbeddingMonitorCallback"]
    state.write_text(json.dumps(content))
    assert len(read_lines(trained(model, tmp_path, resume=str(state.parent)))) == 2


def test_training_with_transformers_ends_at_the_same_bits(tmp_path) -> None:
    model = el.patch(causal("gpt2"))
    alone = trained(copy.deepcopy(model), tmp_path, callback=False).model.state_dict()
    watched = trained(model, tmp_path).model.state_dict()
    assert all(torch.equal(alone[name], tensor) for name, tensor in watched.items())


class OtherLoss(nn.Module):
    """A model whose loss is not that of its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = causal("gpt2")

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        output = self.inner(input_ids=input_ids, labels=labels)
        output.loss = output.loss * 2 + 1
        return output


def test_a_loss_that_is_not_that_of_the_logits_is_not_reported(tmp_path) -> None:
    with pytest.warns(EmbedLayerWarning, match="is not the cross entropy of its logits"):
        trainer = trained(OtherLoss(), tmp_path, save_strategy="no")
    assert read_lines(trainer) == []
    assert any("embedding/norm/new" in line for line in trainer.state.log_history)


def test_encoder_decoders_are_refused(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = transformers.T5Config(vocab_size=V, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(SizeError):
        trained(transformers.T5ForConditionalGeneration(sizes), tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_lightning_logs_what_a_plain_loop_reports_and_resumes(tmp_path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = el.patch(causal("gpt2"))

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            loss: Tensor = self.inner(input_ids=batch, labels=batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    class Lines(lightning.Callback):  # type: ignore[name-defined]
        def __init__(self) -> None:
            self.lines: list[dict[str, Any]] = []

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if found := {
                name: float(x) for name, x in trainer.callback_metrics.items() if trainer.global_step % 2 == 0
            }:
                self.lines.append(found)

    def fit(steps: int, resume: Path | None = None, accumulate: int = 1) -> Any:
        monitor = lightning_monitor(lambda batch: batch, every=2, new_tokens=[3], model_of=lambda module: module.inner)
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accumulate_grad_batches=accumulate,
            callbacks=[monitor, lines := Lines()],
        )
        batches = [part for _ in range(STEPS) for part in ROWS.chunk(accumulate)]
        loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)
        trainer.fit(Module(), loader, ckpt_path=resume)
        return trainer, lines.lines

    expected = by_hand(Module().inner.train())
    require_equal(fit(STEPS)[1], expected)
    trainer, first = fit(2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    require_equal(first + fit(STEPS, tmp_path / "half.ckpt")[1], expected)
    whole, parts = fit(STEPS)[1], fit(STEPS, accumulate=2)[1]
    assert whole[-1]["embedding/log_z"] == pytest.approx(parts[-1]["embedding/log_z"], rel=1e-4)
