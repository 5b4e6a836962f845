"""LLaMA-type checkpoints as a `DecoderLM`, in the two layouts that they come in.

The model is the same in both; names differ, and so does the order of the channels of queries and keys: Meta's rotary
pairs are neighbours, Hugging Face's lie half a head apart. Neither is permuted here: the rotary embedding is told.
"""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embedlayer.derived import derive_all
from embedlayer.errors import CheckpointError, EmbedLayerWarning
from embedlayer.io.files import JsonObject, read_json
from embedlayer.layers.output import OutputHead
from embedlayer.models.decoder import DecoderLM
from embedlayer.positions.position import Position
from embedlayer.positions.rotary import RotaryEmbedding
from embedlayer.pretrained import CONFIG, assign
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.io.safetensors_files import WeightFiles, open_weights

META = {
    "tok_embeddings.weight": "table.weight",
    "layers.{}.attention_norm.weight": "blocks.{}.attention_norm.weight",
    "layers.{}.attention.wq.weight": "blocks.{}.attention.query.weight",
    "layers.{}.attention.wk.weight": "blocks.{}.attention.key.weight",
    "layers.{}.attention.wv.weight": "blocks.{}.attention.value.weight",
    "layers.{}.attention.wo.weight": "blocks.{}.attention.out.weight",
    "layers.{}.ffn_norm.weight": "blocks.{}.mlp_norm.weight",
    "layers.{}.feed_forward.w1.weight": "blocks.{}.mlp.gate.weight",
    "layers.{}.feed_forward.w3.weight": "blocks.{}.mlp.up.weight",
    "layers.{}.feed_forward.w2.weight": "blocks.{}.mlp.down.weight",
    "norm.weight": "norm.weight",
    "output.weight": "head.weight",
}
"""Meta's names, and ours."""

HUGGING_FACE = {
    "model.embed_tokens.weight": "table.weight",
    "model.layers.{}.input_layernorm.weight": "blocks.{}.attention_norm.weight",
    "model.layers.{}.self_attn.q_proj.weight": "blocks.{}.attention.query.weight",
    "model.layers.{}.self_attn.k_proj.weight": "blocks.{}.attention.key.weight",
    "model.layers.{}.self_attn.v_proj.weight": "blocks.{}.attention.value.weight",
    "model.layers.{}.self_attn.o_proj.weight": "blocks.{}.attention.out.weight",
    "model.layers.{}.post_attention_layernorm.weight": "blocks.{}.mlp_norm.weight",
    "model.layers.{}.mlp.gate_proj.weight": "blocks.{}.mlp.gate.weight",
    "model.layers.{}.mlp.up_proj.weight": "blocks.{}.mlp.up.weight",
    "model.layers.{}.mlp.down_proj.weight": "blocks.{}.mlp.down.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
"""The names of transformers' `LlamaForCausalLM`, and ours."""

MODEL_TYPES = ("llama", "mistral")
DEFAULT_BASE = 10000.0

_DERIVED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|rope\.freqs|freqs_cos|freqs_sin)")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_llama(path: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> DecoderLM:
    """Read a LLaMA-type checkpoint.

    - Hugging Face's layout: a folder with `config.json` (`model_type` llama, or mistral without a sliding window) and
      `model.safetensors`, sharded or not.
    - Meta's: a safetensors file with `tok_embeddings.weight`, `layers.0.attention.wq.weight`, ..., or a folder that
      holds one. Its sizes (`n_heads`, `norm_eps`, ...) stand in the file's metadata or in `params.json` beside it; a
      rotary base that is not stated is 10000, as in LLaMA 1 and 2.

    A head without rows of its own is tied. Table and head keep the checkpoint's padding row as it is.

    Args:
        path: The file or folder.
        dtype: In which type; that of the checkpoint if `None`.
        device: Where to put it.

    Returns:
        The model, in evaluation mode.

    Raises:
        FileError: A file is missing or cannot be read.
        CheckpointError: It is damaged, is a pickle, or describes a model that `DecoderLM` is not: named by its key.

    Reference: transformers/models/llama/modeling_llama.py; meta-llama/llama, llama/model.py.
    """
    path = Path(path)
    stored = open_weights(path)
    if {"tok_embeddings.weight", "layers.0.attention.wq.weight"} <= set(stored.names):
        metadata = {key: text for header in stored.headers.values() for key, text in header.metadata.items()}
        names, sizes = META, _meta_sizes(path, metadata, sum(stored.info("layers.0.attention.wq.weight").shape[:1]))
    elif "model.embed_tokens.weight" in stored.names:
        names, sizes = HUGGING_FACE, _hugging_face_sizes(path)
    else:
        raise CheckpointError(
            f"{path} is no LLaMA-type checkpoint: it has neither model.embed_tokens.weight (Hugging Face's layout) nor "
            f"tok_embeddings.weight (Meta's)."
        )
    ours = {name: _our_name(name, names) for name in stored.names}
    renamed = {our: _float(stored, name, dtype, device) for name, our in ours.items() if our}
    tied = sizes.pop("tied", "head.weight" not in renamed)
    if tied and "head.weight" in renamed:
        tied = torch.equal(renamed["head.weight"], renamed["table.weight"])
        if tied:
            del renamed["head.weight"]
        else:
            message = f"{path} says that its head is tied, and holds a head with other rows: these are used."
            warnings.warn(message, EmbedLayerWarning, stacklevel=2)
    with torch.device("meta"):
        model = _build(path, renamed, tied=tied, **sizes)
    assign(model, renamed, source=path)
    derive_all(model, device)
    return model.eval()


def _build(path: Path, tensors: Mapping[str, Tensor], *, tied: bool, position: Position, **sizes: Any) -> DecoderLM:
    """The model that sizes and shapes describe, without its numbers."""
    table, up = tensors["table.weight"], tensors.get("blocks.0.mlp.up.weight")
    if table.dim() != 2 or up is None or up.dim() != 2:
        raise CheckpointError(f"{path} is not whole: it lacks a (V, D) table, or the tensors of the first block.")
    vocab_size, embed_dim = table.shape
    found = {
        "vocab_size": vocab_size,
        "embed_dim": embed_dim,
        "num_layers": len({name.split(".")[1] for name in tensors if name.startswith("blocks.")}),
    }
    for name, number in found.items():
        stated = sizes.pop(name) or number
        if stated != number:
            raise CheckpointError(f"{path} states {name} {stated}, and its tensors have {number}: they do not fit.")
    return DecoderLM(
        TokenEmbedding(vocab_size, embed_dim),
        position,
        None if tied else OutputHead(vocab_size=vocab_size, embed_dim=embed_dim),
        num_layers=found["num_layers"],
        head_dim=getattr(position, "head_dim", None),
        mlp_dim=len(up),
        **sizes,
    )


# Sizes


def _hugging_face_sizes(path: Path) -> JsonObject:
    file = (path if path.is_dir() else path.parent) / CONFIG
    config = read_json(file)
    refuse_unless(file, config, "model_type", *MODEL_TYPES)
    refuse_unless(file, config, "hidden_act", "silu", "swish", None)
    for key in ("attention_bias", "mlp_bias", "sliding_window", "quantization_config"):
        refuse_unless(file, config, key, False, None)
    heads = _number(file, config, "num_attention_heads", int)
    _number(file, config, "head_dim", int, 0)
    return {
        "vocab_size": _number(file, config, "vocab_size", int),
        "embed_dim": _number(file, config, "hidden_size", int),
        "num_layers": _number(file, config, "num_hidden_layers", int),
        "num_heads": heads,
        "num_kv_heads": _number(file, config, "num_key_value_heads", int, heads),
        "norm_eps": _number(file, config, "rms_norm_eps", float),
        "tied": config.get("tie_word_embeddings", False) is True,
        "position": RotaryEmbedding.from_config(config, default_base=DEFAULT_BASE),
    }


def _meta_sizes(path: Path, metadata: JsonObject, query_rows: int) -> JsonObject:
    file = (path if path.is_dir() else path.parent) / "params.json"
    if "n_heads" not in metadata:
        if not file.exists():
            raise CheckpointError(
                f"{path} does not state its sizes: its metadata has no n_heads, and there is no {file.name} beside it."
            )
        metadata = read_json(file)
    refuse_unless(file, metadata, "use_scaled_rope", False, None)
    heads = _number(path, metadata, "n_heads", int)
    stated = re.search(r"theta ([\d.]+)", str(metadata.get("rope", "")))
    base = _number(
        path, {"rope_theta": stated[1], **metadata} if stated else metadata, "rope_theta", float, DEFAULT_BASE
    )
    if str(metadata.get("vocab_size")) == "-1":  # Meta's way to leave it to the tokenizer
        metadata = {**metadata, "vocab_size": None}
    return {
        "vocab_size": _number(path, metadata, "vocab_size", int, 0),
        "embed_dim": _number(path, metadata, "dim", int, 0),
        "num_layers": _number(path, metadata, "n_layers", int, 0),
        "num_heads": heads,
        "num_kv_heads": _number(path, metadata, "n_kv_heads", int, heads),
        "norm_eps": _number(path, metadata, "norm_eps", float),
        "position": RotaryEmbedding(query_rows // max(1, heads), base, interleaved=True),
    }


def refuse_unless(file: Path, config: Mapping[str, Any], key: str, *allowed: object) -> None:
    """Refuse a configuration that asks for something that is not among what is understood.

    Raises:
        CheckpointError: Naming the key, its value and what is understood.
    """
    if config.get(key) not in allowed:
        known = ", ".join(str(value) for value in allowed if value is not None)
        raise CheckpointError(f"{file}: {key} {config.get(key)!r} is not what DecoderLM has (known: {known}).")


def _number(file: Path, config: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """The number at `key`, which metadata hold as a string."""
    found = default if config.get(key) is None else config[key]
    if found is None:
        raise CheckpointError(f"{file} does not state {key}.")
    try:
        number = kind(found)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or isinstance(found, bool) or number != float(found) or not 0 <= number < 2**31:
        kinds = {int: "a whole number", float: "a number"}
        raise CheckpointError(f"{file}: {key} must be {kinds[kind]} of at least 0, not {found!r}.")
    return number


# Reading


def _our_name(name: str, names: Mapping[str, str]) -> str:
    """Our name of a tensor; "" for one that follows from the sizes; an unknown one keeps its name, and is refused."""
    if _DERIVED.fullmatch(name):
        return ""
    block = re.fullmatch(r"(.*?\.?layers)\.(0|[1-9]\d{0,5})\.(.*)", name)
    if block is None:
        return names.get(name, name)
    pattern = names.get(f"{block[1]}.{{}}.{block[3]}")
    return name if pattern is None else pattern.format(block[2])


def _float(stored: WeightFiles, name: str, dtype: torch.dtype | None, device: torch.device | str) -> Tensor:
    kind = stored.info(name).torch_dtype
    if kind not in _FLOATS:
        found = str(kind).removeprefix("torch.")
        raise CheckpointError(f"{name} is stored as {found}: only checkpoints in float32, bfloat16, float16 are read.")
    return stored.read(name, dtype=dtype, device=device)
