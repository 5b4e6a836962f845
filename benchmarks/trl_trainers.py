"""A training step of TRL's trainers: after `patch_trainer` beside TRL alone.

The model is a Llama of one layer with an untied head, so that a step is mostly table, LM head, loss and optimizer. A
step is forward pass, backward pass and optimizer on a batch that is there already: GRPO generates nothing. Time is
measured in this process, in turns; memory is what the peak of a first step adds, in a process for each competitor, with
gradients and the optimizer's state.
"""

import contextlib
import io
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness import Case, Row, added_mib, step_mib_apart, time_alternately
from embedlayer.integrations import patch_trainer

NAMES = ("embedlayer", "TRL")


@dataclass(frozen=True)
class Setting:
    """A trainer, the number of its sequences and their tokens, half of which are of the prompt for DPO and GRPO."""

    trainer: str
    sequences: int = 8
    length: int = 128
    vocab_size: int = 50257
    embed_dim: int = 512
    rounds: int = 5


SETTINGS = (Setting("SFT"), Setting("DPO"), Setting("GRPO"))


def tokenizer() -> Any:
    """Return a tokenizer of words, of which the trainers need the special tokens only."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<end>": 0, "word": 1}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    kind: Any = PreTrainedTokenizerFast
    return kind(tokenizer_object=words, eos_token="<end>", pad_token="<end>")


def model_of(setting: Setting) -> Any:
    """Return a Llama of one layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": setting.embed_dim, "intermediate_size": 1024, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=setting.vocab_size, num_attention_heads=8, **sizes))


def step(setting: Setting, name: str) -> Callable[[], object]:
    """Return a function that runs one training step of a competitor."""
    import trl
    from datasets import Dataset

    column = {"SFT": {"text": "word"}, "DPO": {"prompt": "word", "chosen": "word", "rejected": "word"}}
    rows = Dataset.from_list([column.get(setting.trainer, {"prompt": "word"})] * 8)
    others: dict[str, Any] = {"reward_funcs": len} if setting.trainer == "GRPO" else {}
    if setting.trainer == "DPO":
        others["ref_model"] = model_of(setting)
    args = getattr(trl, f"{setting.trainer}Config")(
        tempfile.mkdtemp(), report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False
    )
    with contextlib.redirect_stderr(io.StringIO()):
        trainer = getattr(trl, f"{setting.trainer}Trainer")(
            model_of(setting), args=args, train_dataset=rows, processing_class=tokenizer(), **others
        )
    if name == NAMES[0]:
        patch_trainer(trainer)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # train() sets it
    optimizer = trainer.create_optimizer()

    def run() -> None:
        optimizer.zero_grad()
        trainer.compute_loss(trainer.model, batch(setting)).backward()
        optimizer.step()

    return run


def batch(setting: Setting) -> dict[str, Any]:
    """Return the inputs of a step."""
    torch.manual_seed(1)
    ids = torch.randint(2, setting.vocab_size, (setting.sequences, setting.length))
    half, ones = setting.length // 2, torch.ones_like(ids)
    if setting.trainer == "SFT":
        return {"input_ids": ids, "attention_mask": ones, "labels": ids}
    if setting.trainer == "DPO":
        completions = (torch.arange(setting.length) >= half).long().expand_as(ids)
        return {"input_ids": ids, "attention_mask": ones, "completion_mask": completions}
    return {
        "prompt_ids": ids[:, :half],
        "prompt_mask": ones[:, :half],
        "completion_ids": ids[:, half:],
        "completion_mask": ones[:, half:],
        "advantages": torch.randn(setting.sequences),
        "num_items_in_batch": torch.tensor(ids[:, half:].numel()),
    }


def peak_added(setting: Setting, name: str) -> float:
    """Mebibytes that the first step of a competitor adds to this process."""
    return added_mib(step(setting, name))


def measure(place: int, setting: Setting) -> list[Row]:
    import trl

    times = time_alternately({name: step(setting, name) for name in NAMES}, rounds=setting.rounds)
    base = float(times[NAMES[1]]["time_ms"])
    return [
        {
            "trainer": setting.trainer,
            "competitor": name,
            "tokens": setting.sequences * setting.length,
            "vocab_size": setting.vocab_size,
            "embed_dim": setting.embed_dim,
            "dtype": "float32",
            **spread,
            "times_plain": round(float(spread["time_ms"]) / base, 2),
            "peak_mib": step_mib_apart(__name__, place, name),
            "trl": trl.__version__,
        }
        for name, spread in times.items()
    ]


def run() -> list[Row]:
    return [row for place, setting in enumerate(SETTINGS) for row in measure(place, setting)]


CASE = Case("Training step of TRL's trainers; memory that it adds", run)
