"""Folders of small models of transformers whose table and head a library quantised, and the same models dequantised."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from stored_cases import CASES, StoredCase
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn

TABLE, HEAD = "model.embed_tokens", "lm_head"


def one_of_each() -> list[str]:
    """Return the name of one case of each kind of layout: up to the first number, and a few more of the first ones."""
    kinds: dict[str, str] = {}
    for name in CASES:
        if not name.endswith(", head"):
            kinds.setdefault(re.split(r"\d|,", name)[0], name)
    return list(kinds.values())


def saved(folder: Path, model_type: str, kind: str = "causal", settings: Mapping[str, Any] | None = None) -> Any:
    """Save a small model of a type of transformers, and return it."""
    from tiny_models import build, quiet

    with quiet():
        model = build(model_type, kind, settings)[1]
        model.save_pretrained(folder)
    return model


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, which the tensors may be mapped to."""
    copies = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(copies, path, {"format": "pt", **(metadata or {})})


def words(size: int, start: str = "t") -> Tokenizer:
    """Return a tokenizer of the words `t0`, `t1` and so on."""
    tokenizer = Tokenizer(WordLevel({f"{start}{i}": i for i in range(size)}, unk_token=f"{start}0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return tokenizer


def model_of(rows: Tensor, head: Tensor | None) -> nn.Module:
    """Return a small LLaMA in evaluation mode with these rows, tied without `head`, in the dtype of the rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(rows),
        hidden_size=rows.shape[1],
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=32,
        tie_word_embeddings=head is None,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.to(rows.dtype)  # the frequencies of rotary positions stay float32
        model.get_input_embeddings().weight.copy_(rows)
        if head is not None:
            model.get_output_embeddings().weight.copy_(head)
    return model


def write_folder(
    folder: Path,
    table: StoredCase | Tensor,
    head: StoredCase | Tensor | None,
    *,
    tied: bool | None = None,
    config: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Write a folder with a table and, unless it is `None`, a head; return the same model dequantised.

    `tied` is what the configuration says; `None` for the truth. Keys of `config` replace those of the configuration.
    """
    rows, head_rows = (each.rows if isinstance(each, StoredCase) else each for each in (table, head))
    assert isinstance(rows, Tensor)
    model = model_of(rows, head_rows)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[0] != TABLE}
    tensors.pop(f"{HEAD}.weight", None)
    metadata = {"format": "pt"}
    settings: dict[str, Any] = {}
    for module, end in ((TABLE, table), (HEAD, head)):
        if isinstance(end, StoredCase):
            tensors |= {f"{module}.{rest}": tensor.contiguous().clone() for rest, tensor in end.tensors.items()}
            metadata |= {key.replace(TABLE, module): value for key, value in end.metadata.items()}
            for key, value in json.loads(
                json.dumps(end.settings).replace("embed_tokens", module.split(".")[-1])
            ).items():
                settings[key] = {**settings.get(key, {}), **value} if isinstance(value, dict) else value
        elif end is not None:
            tensors[f"{module}.weight"] = end
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata)
    content = json.loads(model.config.to_json_string(use_diff=False))
    content |= {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": head is None if tied is None else tied}
    if settings:
        content["quantization_config" if "quant_method" in settings else "quantization"] = settings
    (folder / "config.json").write_text(json.dumps({**content, **(config or {})}))
    return model
