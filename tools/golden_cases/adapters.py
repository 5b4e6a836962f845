"""PEFT adapters on tables and heads, tied and untied: values, gradients, saved files, merged models."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from golden import files_of
from golden_cases.edits import hashed
from tiny_models import build, quiet

import embedlayer as el
from embedlayer import vocab

ENDS = {"llama": ("embed_tokens", "lm_head"), "gpt2": ("wte", "lm_head"), "gemma3_text": ("embed_tokens", "lm_head")}
MODELS = (("llama", False), ("gpt2", True), ("gpt2", False), ("gemma3_text", True))
CHOICES: dict[str, Callable[[str, str], Mapping[str, Any]]] = {
    "table": lambda table, head: {"target_modules": [table]},
    "head": lambda table, head: {"target_modules": [head]},
    "both": lambda table, head: {"target_modules": [table, head]},
    "both, ensured": lambda table, head: {"target_modules": [table, head], "ensure_weight_tying": True},
    "table, rsLoRA": lambda table, head: {"target_modules": [table], "use_rslora": True},
    "table, DoRA": lambda table, head: {"target_modules": [table], "use_dora": True},
    "trainable tokens": lambda table, head: {
        "target_modules": ["q_proj", "c_attn"],
        "trainable_token_indices": {table: [3, 5, 130]},
    },
    "saved copies": lambda table, head: {"target_modules": ["q_proj", "c_attn"], "modules_to_save": [table, head]},
}
IDS = torch.tensor([[1, 3, 5, 130, 7]])


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the cases of this area."""
    for model_type, tied in MODELS:
        for choice in CHOICES:
            name = f"{model_type}, {'tied' if tied else 'untied'}, {choice}"
            yield name, partial(adapted, model_type, tied, choice)


def adapted(model_type: str, tied: bool, choice: str) -> object:
    """Return what a patched model with an adapter computes, and the model into which its saved files are merged."""
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder, quiet():
        base, adapter = Path(folder, "base"), Path(folder, "adapter")
        model = build(model_type, "causal")[1]
        if not tied and model.config.tie_word_embeddings:
            model.config.tie_word_embeddings = False
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        model.save_pretrained(base)
        config = peft.LoraConfig(r=2, lora_alpha=6, init_lora_weights=False, **CHOICES[choice](*ENDS[model_type]))
        model = peft.get_peft_model(el.patch(model), config)
        model.save_pretrained(adapter)
        steps: dict[str, Callable[[], object]] = {
            "logits": lambda: model.eval()(IDS).logits.detach(),
            "gradients": lambda: _gradients(model),
            "files": lambda: hashed(files_of(adapter)),
            "merged": lambda: _merged(base, adapter),
            "unloaded": lambda: model.merge_and_unload()(IDS).logits.detach(),
        }
        for name, step in steps.items():
            try:
                results[name] = step()
            except Exception as error:  # noqa: BLE001 - the class of an error is a result
                results[name] = error
    return results


def _gradients(model: torch.nn.Module) -> object:
    """Return the gradients of the loss with respect to the parameters of an adapter."""
    model(IDS, labels=IDS).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _merged(base: Path, adapter: Path) -> object:
    """Return a model into which the adapter was merged."""
    import transformers

    model = el.patch(transformers.AutoModelForCausalLM.from_pretrained(base))
    vocab.merge_adapter(model, adapter)
    return hashed(model.state_dict())
