"""TRL: SFT and DPO on a tiny GPT-2, plain or patched; the recorded losses equal those of the plain model."""

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from interop.substitution import patched

WORDS = ["<pad>", "<eos>", "<unk>", "the", "cat", "sat", "on", "a", "mat", "dog", "ran", "and", "slept"]
OPTIONS = {"max_steps": 3, "per_device_train_batch_size": 2, "report_to": [], "logging_steps": 1, "use_cpu": True,
           "save_strategy": "no", "bf16": False, "gradient_checkpointing": False, "learning_rate": 1e-2}  # fmt: skip


def tokenizer():
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(WORDS), n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, pad_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


TEXT = Dataset.from_dict({"text": ["the cat sat on a mat", "a dog ran and slept"] * 4})
PAIRS = Dataset.from_dict({"prompt": ["the cat"] * 4, "chosen": [" sat on a mat"] * 4, "rejected": [" slept"] * 4})


def losses(kind, arguments, data, folder, prepare):
    reference = {"ref_model": prepare(model())} if kind is DPOTrainer else {}
    trainer = kind(
        model=prepare(model()), args=arguments(output_dir=str(folder), **OPTIONS), train_dataset=data,
        processing_class=tokenizer(), **reference,
    )  # fmt: skip
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(("kind", "arguments", "data"), [(SFTTrainer, SFTConfig, TEXT), (DPOTrainer, DPOConfig, PAIRS)])
def test_losses_are_those_of_the_plain_model(kind, arguments, data, tmp_path) -> None:
    found = losses(kind, arguments, data, tmp_path, patched)
    assert len(found) == 3
    assert found == pytest.approx(losses(kind, arguments, data, tmp_path, lambda model: model), abs=1e-5)
