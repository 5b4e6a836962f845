"""PEFT's adapter files: what PEFT's own loader reads, and what PEFT wrote."""

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from embedlayer import DeltaEmbedding, OutputHead, TokenEmbedding, open_model, patch
from embedlayer.core import CheckpointError, FileError, SizeError, TokenIdError
from embedlayer.vocab import load_adapter, merge_adapter, merge_rows, save_adapter, train_only_rows

if TYPE_CHECKING:
    import peft
    from transformers import LlamaForCausalLM

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
IDS = torch.tensor([[5, 60, 7, 3, 9, 1]])
TABLE = "model.embed_tokens"

BOTH = ["embed_tokens", "lm_head"]
ROWS = {
    "trainable tokens": ("TrainableTokensConfig", {"token_indices": [60, 3, 7], "target_modules": ["embed_tokens"]}),
    "trainable tokens of both ends": ("TrainableTokensConfig", {"token_indices": [60, 3, 7], "target_modules": BOTH}),
    "trainable tokens beside LoRA": ("LoraConfig", {"target_modules": ["q_proj"], "trainable_token_indices": [60, 3]}),
}
WEIGHTS = {
    "LoRA": {"r": 2, "lora_alpha": 6, "target_modules": BOTH},
    "rsLoRA": {"r": 4, "use_rslora": True, "alpha_pattern": {"embed_tokens": 3}, "target_modules": BOTH},
    "whole weights": {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]},
}


def model_of(*, tied: bool, dtype: torch.dtype = torch.float32) -> "LlamaForCausalLM":
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=tied)
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """PEFT warns of tied tables, and that it saves whole tables."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def adapted(model: nn.Module, directory: Path, config: str = "LoraConfig", **options: Any) -> "peft.PeftModel":
    """A model with an adapter that changes it, saved to a folder by PEFT."""
    import peft

    wrapped = peft.get_peft_model(copy.deepcopy(model), getattr(peft, config)(**copy.deepcopy(options))).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and "q_proj" not in name:
                parameter += torch.randn_like(parameter)
    wrapped.save_pretrained(directory)
    return wrapped


def loaded_by_peft(model: nn.Module, directory: Path) -> "peft.PeftModel":
    import peft

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*([Mm]issing|[Uu]nexpected)")
        warnings.filterwarnings("ignore", "Found missing adapter keys.*lm_head")  # the tied end, whose rows are these
        return peft.PeftModel.from_pretrained(copy.deepcopy(model), directory).eval()


def moved(table: DeltaEmbedding) -> DeltaEmbedding:
    with torch.no_grad():
        table.delta += torch.randn_like(table.delta)
    return table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peft_loads_the_rows_that_a_table_saved_bit_for_bit(dtype, tmp_path: Path) -> None:
    model = model_of(tied=True, dtype=dtype)
    base = TokenEmbedding.from_pretrained(model.model.embed_tokens.weight.detach())
    table = moved(DeltaEmbedding(base, [60, 3, 7], dtype=torch.float32))
    table.save_adapter(tmp_path)
    wrapped = loaded_by_peft(model, tmp_path)
    assert torch.equal(wrapped.base_model.model.model.embed_tokens(IDS), table(IDS).to(dtype))
    assert torch.equal(wrapped(IDS).logits, wrapped.merge_and_unload()(IDS).logits)
    again = DeltaEmbedding.from_pretrained(tmp_path, base=base)
    assert again.token_ids == table.token_ids
    assert again.delta.dtype == torch.float32
    assert torch.equal(again.delta, table.delta)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("tied", [True, False])
def test_rows_that_peft_trained_are_read_bit_for_bit(name, tied, tmp_path: Path) -> None:
    model = model_of(tied=tied)
    config, options = ROWS[name]
    wrapped = adapted(model, tmp_path, config, **options)
    base = TokenEmbedding.from_pretrained(model.model.embed_tokens.weight.detach())
    module = "embed_tokens" if "both" in name else None
    table = DeltaEmbedding.from_pretrained(tmp_path, base=base, module=module)
    assert table.token_ids == tuple(sorted([60, 3, 7][: len(table.token_ids)]))
    assert torch.equal(table(IDS), wrapped.base_model.model.model.embed_tokens(IDS))


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_a_model_go_to_peft_and_back(tied, tmp_path: Path) -> None:
    model = model_of(tied=tied)
    ours = patch(copy.deepcopy(model))
    train_only_rows(ours, [60, 3])
    torch.testing.assert_close(ours(IDS).logits, model(IDS).logits)
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter)
    save_adapter(ours, tmp_path / "ours")
    wrapped = loaded_by_peft(model, tmp_path / "ours")
    torch.testing.assert_close(wrapped(IDS).logits, ours(IDS).logits)
    wrapped.save_pretrained(tmp_path / "peft")
    again = patch(copy.deepcopy(model))
    load_adapter(again, tmp_path / "peft")
    assert torch.equal(again(IDS).logits, ours(IDS).logits)
    for module in (again, ours):
        merge_rows(module)
    merged = patch(copy.deepcopy(model))
    merge_adapter(merged, tmp_path / "peft")
    for other in (again, merged):
        assert all(torch.equal(one, two) for one, two in zip(other.parameters(), ours.parameters(), strict=True))


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("tied", [True, False])
def test_what_peft_merges_is_merged_into_the_table_and_the_head(name, tied, tmp_path: Path) -> None:
    model = model_of(tied=tied)
    merged = adapted(model, tmp_path, **WEIGHTS[name]).merge_and_unload()
    ends = {TABLE: merged.model.embed_tokens.weight, "lm_head": merged.lm_head.weight}
    ours = {TABLE: TokenEmbedding(64, 16), "lm_head": OutputHead(16, 64)}
    for module, target in ours.items():
        with torch.no_grad():
            target.weight.copy_(model.get_submodule(module).weight)
        if tied and name != "whole weights":  # PEFT adds both changes to the one weight
            continue
        merge_adapter(target, tmp_path, module=module)
        torch.testing.assert_close(target.weight, ends[module], rtol=1e-6, atol=1e-6)
    if not tied:
        patched = patch(copy.deepcopy(model))
        merge_adapter(patched, tmp_path)
        torch.testing.assert_close(patched(IDS).logits, merged(IDS).logits, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_read_right_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    model = model_of(tied=False)
    patched, table = patch(copy.deepcopy(model)), TokenEmbedding(64, 16)
    before = [parameter.clone() for parameter in (*patched.parameters(), table.weight)]

    def refuse(error: type[Exception], *calls: Callable[[], object]) -> None:
        for call in calls:
            with pytest.raises(error):
                call()
        assert all(
            torch.equal(one, two) for one, two in zip(before, (*patched.parameters(), table.weight), strict=True)
        )

    refuse(FileError, lambda: merge_adapter(table, tmp_path))
    adapted(model, tmp_path, target_modules=["embed_tokens"], use_dora=True)
    refuse(CheckpointError, lambda: merge_adapter(table, tmp_path))
    adapted(model, tmp_path, "IA3Config", target_modules=["k_proj"], feedforward_modules=[])
    refuse(CheckpointError, lambda: merge_adapter(table, tmp_path))
    adapted(model, tmp_path, target_modules=[*BOTH, "q_proj"])
    refuse(
        CheckpointError,
        lambda: merge_adapter(patched, tmp_path),  # other modules too
        lambda: merge_adapter(table, tmp_path),  # no module is named
        lambda: DeltaEmbedding.from_pretrained(tmp_path, base=table, module="embed_tokens"),  # more than rows
    )
    adapted(model, tmp_path, "TrainableTokensConfig", **ROWS["trainable tokens"][1])
    refuse(TokenIdError, lambda: merge_adapter(TokenEmbedding(32, 16), tmp_path))
    refuse(CheckpointError, lambda: merge_adapter(TokenEmbedding(64, 8), tmp_path))
    refuse(
        SizeError,
        lambda: merge_adapter(DeltaEmbedding(table, [3]), tmp_path),
        lambda: save_adapter(patched, tmp_path / "none"),
    )
    tensors = load_file(tmp_path / ADAPTER_WEIGHTS)
    save_file({name: tensor[:2].clone() for name, tensor in tensors.items()}, tmp_path / ADAPTER_WEIGHTS)
    refuse(CheckpointError, lambda: load_adapter(patched, tmp_path))
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({"peft_type": "LORA", "init_lora_weights": "pissa"}))
    refuse(CheckpointError, lambda: load_adapter(patched, tmp_path))


@pytest.mark.parametrize("path", ["", ADAPTER_WEIGHTS])
def test_an_adapter_is_not_opened_as_a_model(path, tmp_path: Path) -> None:
    adapted(model_of(tied=False), tmp_path, **WEIGHTS["LoRA"])
    with pytest.raises(CheckpointError, match="is an adapter"):
        open_model(tmp_path / path)
