"""The `Trainer` of transformers after `patch_trainer`, beside the same trainer without it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from memory import Shapes
from small_blocks import small_blocks
from torch import Tensor

import embedlayer as el
from embedlayer.integrations import patch_trainer

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")

VOCAB, TOKENS, BATCH, STEPS = 300, 32, 2, 4


@pytest.fixture(autouse=True)
def several_blocks() -> Iterator[None]:
    with small_blocks(few_logits=0, rows=64, tokens=16):
        yield


def model_of(*, tied: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCAB, tie_word_embeddings=tied, initializer_range=0.3))


def trainer_of(folder: Path, model: Any = None, *, tied: bool = False, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    inputs = {
        key: options.pop(key) for key in ("optimizers", "optimizer_cls_and_kwargs", "model_init") if key in options
    }
    args = TrainingArguments(
        str(folder),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        per_device_train_batch_size=BATCH,
        **{
            "learning_rate": 1e-2,
            "save_strategy": "no",
            "weight_decay": 0.1,
            "max_steps": STEPS,
            "lr_scheduler_type": "cosine",
            "adam_epsilon": 1e-4,
            **options,
        },
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (BATCH * STEPS, TOKENS), generator=generator)
    model = None if "model_init" in inputs else model_of(tied=tied) if model is None else model
    return Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in ids], **inputs)


def trained(trainer: Any) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    trainer.train()
    names = {"loss", "grad_norm", "learning_rate"}
    logged = [{k: v for k, v in entry.items() if k in names} for entry in trainer.state.log_history[:-1]]
    return logged, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_same(ours: Any, plain: Any, tolerance: float = 1e-5) -> None:
    for mine, other in zip(ours[0], plain[0], strict=True):
        assert mine == pytest.approx(other, rel=tolerance, abs=tolerance)
    assert ours[1].keys() == plain[1].keys()
    for key, weight in plain[1].items():
        torch.testing.assert_close(ours[1][key], weight, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options", [{}, {"tied": True}, {"gradient_accumulation_steps": 2}, {"max_grad_norm": 0.1}], ids=str
)
def test_a_patched_trainer_is_the_plain_one_and_stores_no_logits(options, tmp_path) -> None:
    with Shapes() as computed:
        plain = trained(trainer_of(tmp_path / "plain", **options))
    assert computed.largest(BATCH * TOKENS * VOCAB)
    trainer = trainer_of(tmp_path / "ours", **options)
    assert patch_trainer(trainer) is trainer
    with Shapes() as computed:
        ours = trained(trainer)
    assert computed.largest(BATCH * (TOKENS - 1) * VOCAB) == set()
    assert_same(ours, plain)
    is_tied = bool(options.get("tied"))
    assert type(trainer.optimizer.optimizer) is (torch.optim.AdamW if is_tied else el.RowAdamW)
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.0]


def test_gradients_in_bfloat16_are_as_near_to_float32_as_the_plain_ones(tmp_path) -> None:
    def step(*, bf16: bool, patched: bool) -> Tensor:
        options = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "bf16": bf16, "weight_decay": 0.0}
        options |= {"max_steps": 1, "lr_scheduler_type": "constant"}
        trainer = trainer_of(tmp_path / f"{bf16} {patched}", **options)
        trainer = patch_trainer(trainer) if patched else trainer
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        return torch.cat([(weight - before[name]).flatten() for name, weight in trained(trainer)[1].items()])

    exact = step(bf16=False, patched=False)
    errors = [(step(bf16=True, patched=each) - exact).norm() / exact.norm() for each in (True, False)]
    assert errors[0] <= 1.25 * errors[1]
    assert errors[1] < 0.1


def test_models_that_are_patched_or_wrapped_by_peft(tmp_path) -> None:
    peft = pytest.importorskip("peft")
    plain = trained(trainer_of(tmp_path))
    for row_sparse in (True, False):
        trainer = patch_trainer(trainer_of(tmp_path, el.patch(model_of(), row_sparse=row_sparse)))
        assert_same(trained(trainer), plain)
        assert isinstance(trainer.optimizer.optimizer, el.RowAdamW) is row_sparse

    def adapted() -> Any:
        torch.manual_seed(2)
        return peft.get_peft_model(model_of(tied=True), peft.LoraConfig(r=2, target_modules=["q_proj"]))

    trainer = patch_trainer(trainer_of(tmp_path, adapted()))
    assert isinstance(trainer.model.get_base_model().lm_head, el.OutputHead)
    assert_same(trained(trainer), trained(trainer_of(tmp_path, adapted())))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tied": True}, "tied"),
        ({"optim": "adafactor"}, "optim is"),
        ({"adam_beta1": 0.95, "adam_beta2": 0.9}, "root of beta2"),
        ({"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})}, "optimizer of its own"),
    ],
    ids=str,
)
def test_the_table_stays_dense_where_row_sparse_gradients_are_impossible(options, reason, tmp_path) -> None:
    with pytest.raises(el.SizeError, match=reason):
        patch_trainer(trainer_of(tmp_path, **options), row_sparse=True)
    trainer = patch_trainer(trainer_of(tmp_path, **options))
    assert isinstance(trainer.model.lm_head, el.OutputHead)
    assert not isinstance(trainer.create_optimizer(), el.RowAdamW)


def test_a_trainer_that_creates_its_optimizer_itself_keeps_a_dense_table(tmp_path) -> None:
    plain = trainer_of(tmp_path)

    class Own(type(plain)):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            return self.optimizer

    plain.__class__ = Own
    with pytest.raises(el.SizeError, match="Own has a create_optimizer of its own"):
        patch_trainer(plain, row_sparse=True)
    patch_trainer(plain)
    assert type(plain.create_optimizer()) is torch.optim.AdamW
    assert not plain.model.get_input_embeddings().row_sparse


def test_row_sparse_gradients_can_be_declined(tmp_path) -> None:
    trainer = patch_trainer(trainer_of(tmp_path), row_sparse=False)
    assert isinstance(trainer.create_optimizer(), torch.optim.AdamW)


def test_what_cannot_work_is_an_error(tmp_path) -> None:
    with pytest.raises(el.SizeError, match="model_init"):
        patch_trainer(trainer_of(tmp_path, model_init=lambda: model_of()))
    with pytest.raises(el.CheckpointError, match="found Linear"):
        patch_trainer(torch.nn.Linear(2, 2))


def test_a_resumed_run_continues_as_the_plain_one(tmp_path) -> None:
    runs = []
    for patched in (False, True):
        options = {"save_strategy": "steps", "save_steps": 2}
        first = trainer_of(tmp_path / str(patched), **options)
        second = trainer_of(tmp_path / str(patched), **options)
        for trainer in (first, second) if patched else ():
            patch_trainer(trainer)
        first.train()
        second.train(resume_from_checkpoint=str(tmp_path / str(patched) / "checkpoint-2"))
        runs.append([p.detach().clone() for p in second.model.parameters()])
        for mine, other in zip(second.model.parameters(), first.model.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    for mine, other in zip(*runs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
