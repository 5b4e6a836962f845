"""Load LLaMA-type checkpoints as a `DecoderLM`, in Hugging Face's layout and in Meta's.

Both layouts store the same model under different tensor names, which `embedlayer.families` lists. The channels of
queries and keys differ too: Meta's rotary pairs are channels (2i, 2i + 1), Hugging Face's are (i, i + K/2). The loader
permutes no weights; it sets `interleaved` of the rotary embedding.
"""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embedlayer.checkpoints.reader import Checkpoint
from embedlayer.computed_buffers import recompute_all_buffers
from embedlayer.errors import CheckpointError, EmbedLayerWarning
from embedlayer.families import FAMILIES, HUGGING_FACE_TENSORS, META_TENSORS, RotaryPositions
from embedlayer.io.files import JsonObject, read_json
from embedlayer.layers.output import OutputHead
from embedlayer.models.decoder import DecoderLM
from embedlayer.positions.rotary import RotaryEmbedding
from embedlayer.pretrained import assign
from embedlayer.tables.dense import TokenEmbedding

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
QUERY = "blocks.{}.attention.query.weight"

_DERIVED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|rope\.freqs|freqs_cos|freqs_sin)")
"""Tensors in old checkpoints that follow from the sizes."""


def load_llama(
    source: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> DecoderLM:
    """Load a LLaMA-type checkpoint as a `DecoderLM`.

    - Hugging Face's layout: a folder with `config.json` (`model_type` llama, or mistral without a sliding window) and
      `model.safetensors`, in one file or in shards.
    - Meta's layout: a safetensors file with `tok_embeddings.weight`, `layers.0.attention.wq.weight`, ..., or a folder
      with one. Its sizes (`n_heads`, `norm_eps`, ...) are in the metadata of the file or in `params.json` in the same
      folder. A missing rotary base is 10000, as in LLaMA 1 and 2.

    A checkpoint without rows of an LM head has a tied head. The padding row of the checkpoint stays as it is.

    Args:
        source: A file, a folder, or a name on the hub.
        dtype: Dtype of the model; `None` for that of the checkpoint.
        device: Device of the model.

    Returns:
        The model in evaluation mode.

    Raises:
        FileError: A file is missing or cannot be read.
        CheckpointError: The checkpoint is damaged or a pickle, or a key of its configuration has a value that
            `DecoderLM` does not implement.

    Warns:
        EmbedLayerWarning: The configuration says that the head is tied, and the checkpoint stores other rows for it.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        >>> LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained("tiny-llama")
        >>> load_llama("tiny-llama")(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 99])

    Reference: transformers/models/llama/modeling_llama.py; meta-llama/llama, llama/model.py.
    """
    checkpoint = Checkpoint.open(source)
    stored = set(checkpoint.names)
    if {META_TENSORS["table.weight"], META_TENSORS[QUERY].format(0)} <= stored:
        names, sizes = META_TENSORS, _meta_sizes(checkpoint)
    elif HUGGING_FACE_TENSORS["table.weight"] in stored:
        names, sizes = HUGGING_FACE_TENSORS, _hugging_face_sizes(checkpoint)
    else:
        raise CheckpointError(
            f"{checkpoint.name} is no LLaMA-type checkpoint: it has neither {HUGGING_FACE_TENSORS['table.weight']} "
            f"(Hugging Face's layout) nor {META_TENSORS['table.weight']} (Meta's)."
        )
    ours = {theirs: ours for ours, theirs in names.items()}
    tensors = {
        _decoder_name(name, ours): _read(checkpoint, name, dtype, device)
        for name in checkpoint.names
        if not _DERIVED.fullmatch(name)
    }
    tied = sizes.pop("tied", "head.weight" not in tensors)
    if tied and "head.weight" in tensors:
        tied = torch.equal(tensors["head.weight"], tensors["table.weight"])
        if tied:
            del tensors["head.weight"]
        else:
            message = f"{checkpoint.name} says that its head is tied, but holds a head with other rows: these are used."
            warnings.warn(message, EmbedLayerWarning, stacklevel=2)
    with torch.device("meta"):
        model = _build(checkpoint, tensors, tied=tied, **sizes)
    assign(model, tensors, source=Path(checkpoint.name))
    recompute_all_buffers(model, device)
    return model.eval()


def _build(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], *, tied: bool, **sizes: Any) -> DecoderLM:
    """Build the model from its sizes and the shapes of its tensors, without weights.

    Raises:
        CheckpointError: A tensor of the first block is missing, or a size differs from the tensors.
    """
    table, up = tensors["table.weight"], tensors.get("blocks.0.mlp.up.weight")
    if table.dim() != 2 or up is None or up.dim() != 2:
        raise CheckpointError(
            f"{checkpoint.name} is not whole: it lacks a (V, D) table, or the tensors of the first block."
        )
    found = {
        "vocab_size": table.shape[0],
        "embed_dim": table.shape[1],
        "num_layers": len({name.split(".")[1] for name in tensors if name.startswith("blocks.")}),
    }
    for name, number in found.items():
        stated = sizes.pop(name) or number
        if stated != number:
            raise CheckpointError(
                f"{checkpoint.name} states {name} {stated}, and its tensors have {number}: they do not fit."
            )
    return DecoderLM(
        TokenEmbedding(*table.shape),
        head=None if tied else OutputHead(vocab_size=found["vocab_size"], embed_dim=found["embed_dim"]),
        num_layers=found["num_layers"],
        head_dim=getattr(sizes["position"], "head_dim", None),
        mlp_dim=len(up),
        **sizes,
    )


def _hugging_face_sizes(checkpoint: Checkpoint) -> JsonObject:
    """Return the arguments of `DecoderLM` that `config.json` states.

    Raises:
        CheckpointError: A key is missing, or its value is not implemented.
    """
    config, source = checkpoint.config, f"{checkpoint.name}/config.json"
    families = {model_type: family for family in FAMILIES if family.decoder for model_type in family.model_types}
    _require_value(source, config, "model_type", *families)
    _require_value(source, config, "hidden_act", "silu", "swish", None)
    for key in ("attention_bias", "mlp_bias", "sliding_window", "quantization_config"):
        _require_value(source, config, key, False, None)
    heads = _number(source, config, "num_attention_heads", int)
    _number(source, config, "head_dim", int, 0)
    rotary = families[config["model_type"]].position
    assert isinstance(rotary, RotaryPositions)
    return {
        "vocab_size": _number(source, config, "vocab_size", int),
        "embed_dim": _number(source, config, "hidden_size", int),
        "num_layers": _number(source, config, "num_hidden_layers", int),
        "num_heads": heads,
        "num_kv_heads": _number(source, config, "num_key_value_heads", int, heads),
        "norm_eps": _number(source, config, "rms_norm_eps", float),
        "tied": config.get("tie_word_embeddings", False) is True,
        "position": RotaryEmbedding.from_config(config, default_base=rotary.base),
    }


def _meta_sizes(checkpoint: Checkpoint) -> JsonObject:
    """Return the arguments of `DecoderLM` that the files' metadata or `params.json` state.

    Raises:
        CheckpointError: A size is missing, or a value is not implemented.
    """
    source = checkpoint.name
    metadata: JsonObject = {
        key: text for header in checkpoint.headers.values() for key, text in header.metadata.items()
    }
    if "n_heads" not in metadata:
        file = checkpoint.file("params.json")
        if file is None:
            raise CheckpointError(
                f"{source} does not state its sizes: its metadata has no n_heads, and no params.json is beside it."
            )
        metadata = read_json(file)
    _require_value(source, metadata, "use_scaled_rope", False, None)
    stated = re.search(r"theta ([\d.]+)", str(metadata.get("rope", "")))
    metadata = {"rope_theta": stated[1], **metadata} if stated else metadata
    if str(metadata.get("vocab_size")) == "-1":  # Meta leaves the size to the tokenizer
        metadata = {**metadata, "vocab_size": None}
    heads = _number(source, metadata, "n_heads", int)
    query_rows = sum(checkpoint.info(META_TENSORS[QUERY].format(0)).shape[:1])
    base = _number(source, metadata, "rope_theta", float, RotaryPositions().base)
    return {
        "vocab_size": _number(source, metadata, "vocab_size", int, 0),
        "embed_dim": _number(source, metadata, "dim", int, 0),
        "num_layers": _number(source, metadata, "n_layers", int, 0),
        "num_heads": heads,
        "num_kv_heads": _number(source, metadata, "n_kv_heads", int, heads),
        "norm_eps": _number(source, metadata, "norm_eps", float),
        "position": RotaryEmbedding(query_rows // max(1, heads), base, interleaved=True),
    }


def _require_value(source: str, config: Mapping[str, Any], key: str, *allowed: object) -> None:
    """Raise unless the value of a configuration key is one of those that `DecoderLM` implements.

    Raises:
        CheckpointError: The value is another one; the message names it and the allowed values.
    """
    if config.get(key) not in allowed:
        known = ", ".join(str(value) for value in allowed if value is not None)
        raise CheckpointError(f"{source}: {key} {config.get(key)!r} is not what DecoderLM has (known: {known}).")


def _number(source: str, config: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """Return the number under a key, of type `kind`; metadata of safetensors files store numbers as strings.

    Raises:
        CheckpointError: The number is missing without a default, or is not a number from 0 to 2^31 - 1.
    """
    found = default if config.get(key) is None else config[key]
    if found is None:
        raise CheckpointError(f"{source} does not state {key}.")
    try:
        number = kind(found)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or isinstance(found, bool) or number != float(found) or not 0 <= number < 2**31:
        kinds = {int: "a whole number", float: "a number"}
        raise CheckpointError(f"{source}: {key} must be {kinds[kind]} of at least 0, not {found!r}.")
    return number


def _decoder_name(name: str, ours: Mapping[str, str]) -> str:
    """Return the `DecoderLM` name of a checkpoint's tensor; an unknown name is returned unchanged."""
    block = re.fullmatch(r"(.*?\.?layers)\.(0|[1-9]\d{0,5})\.(.*)", name)
    pattern = ours.get(name if block is None else f"{block[1]}.{{}}.{block[3]}", name)
    return pattern if block is None or pattern == name else pattern.format(block[2])


def _read(checkpoint: Checkpoint, name: str, dtype: torch.dtype | None, device: torch.device | str) -> Tensor:
    """Read a floating-point tensor.

    Raises:
        CheckpointError: The tensor has another dtype.
    """
    found = checkpoint.info(name).torch_dtype
    if found not in DTYPES:
        raise CheckpointError(
            f"{name} is stored as {str(found).removeprefix('torch.')}: only checkpoints in float32, bfloat16, float16 "
            f"are read."
        )
    return checkpoint.read(name, dtype=dtype, device=device)
