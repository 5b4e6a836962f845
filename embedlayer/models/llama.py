"""Load LLaMA-type checkpoints as a `DecoderLM`, in Hugging Face's layout and in Meta's.

Both layouts store the same model under different tensor names, which `embedlayer.families` lists. The channels of
queries and keys differ too: Meta's rotary pairs are channels (2i, 2i + 1), Hugging Face's are (i, i + K/2). The loader
permutes no weights; it sets `interleaved` of the rotary embedding.
"""

import re
import warnings
from pathlib import Path

import torch

from embedlayer.checkpoints.meta_layout import has_meta_layout, meta_config, require_value
from embedlayer.checkpoints.reader import Checkpoint
from embedlayer.checkpoints.reading.layer import build_with_tensors, read_layer_arguments
from embedlayer.checkpoints.reading.model import CheckpointModel, checkpoint_model
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning
from embedlayer.families import FAMILIES, HUGGING_FACE_TENSORS, META_LLAMA
from embedlayer.io.json_fields import as_number, as_whole_number
from embedlayer.io.safetensors_files import DTYPES
from embedlayer.models.decoder import DecoderLM
from embedlayer.saving import FLOATS

_DERIVED = re.compile(r"rope_freqs\.weight|(.*\.)?(rotary_emb\.inv_freq|rope\.freqs|freqs_cos|freqs_sin)")
"""Tensors in old checkpoints that follow from the sizes."""


def load_llama(
    source: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> DecoderLM:
    """Load a LLaMA-type checkpoint as a `DecoderLM`.

    - Hugging Face's layout: a folder with `config.json` (`model_type` llama, or mistral without a sliding window) and
      `model.safetensors`, in one file or in shards.
    - Meta's layout: a safetensors file with `tok_embeddings.weight`, `layers.0.attention.wq.weight`, ..., or a folder
      with one. Its sizes (`n_heads`, `norm_eps`, ...) are in the metadata of the file or in `params.json` in the same
      folder. A missing rotary base is 10000, as in LLaMA 1 and 2. A missing LM head is tied to the table.
    - A GGUF file of the architecture `llama`.

    The table and an untied head may be quantised, the blocks may not. They and the position scheme are read as by
    `load`.

    Args:
        source: A file, a folder, or a name on the hub.
        dtype: Dtype of the model; `None` for that of each tensor in the checkpoint, which may differ in a GGUF file.
        device: Device of the model.

    Returns:
        The model in evaluation mode.

    Raises:
        FileError: A file is missing or cannot be read.
        CheckpointError: The checkpoint is damaged, a pickle or not of LLaMA's type; a key of its configuration has a
            value that `DecoderLM` does not implement; or the blocks are quantised.
        MissingExtraError: The hub needs `pip install 'embedlayer[hf]'`, and a GGUF file `'embedlayer[gguf]'`.

    Warns:
        EmbedLayerWarning: The configuration says that the head is tied, and the checkpoint stores other rows for it; or
            rows contain NaN or infinity.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        >>> LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained("tiny-llama")
        >>> load_llama("tiny-llama")(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 99])

    Reference: transformers/models/llama/modeling_llama.py; meta-llama/llama, llama/model.py.
    """
    checkpoint = Checkpoint.open(source)
    if has_meta_layout(checkpoint):
        checkpoint.config = meta_config(checkpoint)
        for key in ("moe", "sliding_window"):
            require_value(checkpoint.name, checkpoint.config, key, False, None)
    elif checkpoint.gguf is not None:
        if checkpoint.config.get("model_type") != META_LLAMA:
            architecture = checkpoint.gguf.metadata.get("general.architecture")
            raise CheckpointError(f"{checkpoint.name}: blocks of {architecture!r} are not read, only those of llama.")
        require_value(checkpoint.name, checkpoint.config, "sliding_window", 0, None)
    elif checkpoint.find(HUGGING_FACE_TENSORS["table.weight"]):
        config, file = checkpoint.config, f"{checkpoint.name}/config.json"
        decoders = [family for family in FAMILIES if family.decoder is HUGGING_FACE_TENSORS]
        require_value(file, config, "model_type", *(name for family in decoders for name in family.model_types))
        require_value(file, config, "hidden_act", "silu", "swish", None)
        for key in ("attention_bias", "mlp_bias", "sliding_window"):
            require_value(file, config, key, False, None)
    else:
        raise CheckpointError(f"{checkpoint.name} is no LLaMA-type checkpoint, of Hugging Face's or Meta's layout.")
    model = checkpoint_model(checkpoint, None if checkpoint.gguf is None else dtype, device)  # a GGUF file mixes dtypes
    decoder = build_with_tensors(model, lambda: _build(model))
    for note in model.tensors.notes:
        warnings.warn(f"{checkpoint.name}: {note}", EmbedLayerWarning, stacklevel=2)
    return (decoder if dtype is None else decoder.to(dtype)).eval()


def _build(model: CheckpointModel) -> DecoderLM:
    """Build the decoder, and read all its tensors into `model.tensors`; the caller assigns them to the decoder.

    `build_with_tensors` calls it with the meta device as torch's default, so that the weights of the decoder take no
    memory.
    """
    tensors, config, names = model.tensors, model.config.content, model.family.decoder
    checkpoint, weights = tensors.checkpoint, tensors.by_key
    assert names is not None
    arguments = read_layer_arguments(model)
    if arguments["head"] is None:
        raise CheckpointError(f"{checkpoint.name} is not whole: {names['head.weight']} is missing.")
    ours = {theirs: ours for ours, theirs in names.items()}
    of_layer = tensors.own_names
    of_blocks = [name for name in checkpoint.names if name not in of_layer and not _DERIVED.fullmatch(name)]
    types = sorted({checkpoint.info(name).dtype for name in of_blocks})
    if quantised := [dtype for dtype in types if DTYPES.get(dtype) not in FLOATS]:  # they would be dequantised whole
        program = "the library that quantised it" if checkpoint.gguf is None else "llama.cpp"
        raise CheckpointError(f"{checkpoint.name}: its blocks are quantised ({', '.join(quantised)}): use {program}.")
    for name in of_blocks:
        block = re.fullmatch(r"(.*?\.?layers|blk)\.(0|[1-9]\d{0,5})\.(.*)", name)
        pattern = ours.get(name if block is None else f"{block[1]}.{{}}.{block[3]}", name)  # an unknown name stays
        own_name = pattern if block is None or pattern == name else pattern.format(block[2])
        weights[own_name] = checkpoint.read(
            name, dtype=None if checkpoint.gguf is None else tensors.dtype, device=tensors.device
        )
    num_layers = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    if config.get("num_hidden_layers", num_layers) != num_layers:
        stated = config["num_hidden_layers"]
        raise CheckpointError(f"{checkpoint.name} states num_hidden_layers {stated}, and has tensors of {num_layers}.")
    heads = as_whole_number(config.get("num_attention_heads"), "num_attention_heads")
    groups = config.get("num_key_value_heads")
    up = weights.get("blocks.0.mlp.up.weight", torch.empty(1))
    return DecoderLM(
        arguments["table"],
        arguments["position"],
        arguments["head"],
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads if groups is None else as_whole_number(groups, "num_key_value_heads"),
        head_dim=getattr(arguments["position"], "head_dim", None),
        mlp_dim=max(1, torch.atleast_1d(up).shape[0]),
        norm_eps=as_number(config.get("rms_norm_eps"), "rms_norm_eps", above=0.0),
    )
