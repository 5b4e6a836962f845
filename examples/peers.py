"""Small random models of transformers, one or more per family, and their differences from the loaded layer."""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import embedlayer as el

os.environ.setdefault("HF_HUB_OFFLINE", "1")

LENGTH, PAD = 12, 1
SMALL = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "attn_implementation": "eager",
}
GPT = {"vocab_size": 90, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "attn_implementation": "eager"}
GPT |= {"bos_token_id": 2, "eos_token_id": 3}


@dataclass(frozen=True)
class Peer:
    """A model of transformers to compare with.

    Attributes:
        name: Name in the table.
        family: Name of the record in `embedlayer.families`.
        model: `module:Class` in transformers.
        block: Name of the first block's module.
        sizes: Arguments of the configuration.
        hidden: Name of the module that computes the input of the head; `None` for the base model.
        positions: Kind of positions to compare; `"none"` for positions that are added to the input.
        decoder: Whether the model needs `decoder_input_ids`.
        prepare: Function that changes the model before it is saved.
    """

    name: str
    family: str
    model: str
    block: str
    sizes: dict[str, Any]
    hidden: str | None = None
    positions: str = "none"
    decoder: bool = False
    prepare: Callable[[nn.Module], None] | None = field(default=None, repr=False)

    def make(self) -> nn.Module:
        """Build the model with random parameters, so that no bias is 0 and no norm weight is 1."""
        module, _, name = self.model.partition(":")
        peer = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        torch.manual_seed(0)
        cls = getattr(peer, name)
        model: nn.Module = cls(cls.config_class(**self.sizes)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.2)
        if self.prepare is not None:
            self.prepare(model)
        return model


def untie(model: nn.Module) -> None:
    """Change T5 into T5 1.1: an untied head, and no factor on its logits."""
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.2)
    model.config.scale_decoder_outputs = False


def llama_like(name: str, module: str, prefix: str, **changes: Any) -> Peer:
    return Peer(name, module, f"{module}:{prefix}ForCausalLM", "model.layers.0", SMALL | changes, positions="rotary")


ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 1.7]}
LONG |= {"long_factor": [1.5, 2.0, 3.0, 4.0], "original_max_position_embeddings": 32}
BERT = SMALL | {"type_vocab_size": 2}
T5 = {"vocab_size": 90, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "pad_token_id": 0}
T5 |= {"decoder_start_token_id": 0, "attn_implementation": "eager"}
M2M = {"vocab_size": 90, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
M2M |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64}
M2M |= {"pad_token_id": PAD, "attn_implementation": "eager"}
OPT = SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32}
FALCON = SMALL | {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4}

PEERS = (
    Peer("GPT-2", "gpt2", "gpt2:GPT2LMHeadModel", "transformer.h.0", GPT),
    Peer("BERT", "bert", "bert:BertForMaskedLM", "bert.encoder.layer.0", BERT),
    Peer("RoBERTa", "roberta", "roberta:RobertaForMaskedLM", "roberta.encoder.layer.0", BERT),
    Peer("XLM-R", "roberta", "xlm_roberta:XLMRobertaForMaskedLM", "roberta.encoder.layer.0", BERT),
    Peer(
        "ALBERT",
        "albert",
        "albert:AlbertForMaskedLM",
        "albert.encoder.albert_layer_groups.0",
        BERT | {"embedding_size": 16},
    ),
    Peer("OPT", "opt", "opt:OPTForCausalLM", "model.decoder.layers.0", OPT, hidden="model.decoder"),
    Peer(
        "OPT 350M's projections",
        "opt",
        "opt:OPTForCausalLM",
        "model.decoder.layers.0",
        OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": True},
        hidden="model.decoder.final_layer_norm",
    ),
    Peer(
        "BLOOM, 6 heads",
        "bloom",
        "bloom:BloomForCausalLM",
        "transformer.h.0",
        {"vocab_size": 90, "hidden_size": 48, "n_layer": 1, "n_head": 6, "pad_token_id": PAD},
        positions="alibi",
    ),
    Peer(
        "MPT, 6 heads",
        "mpt",
        "mpt:MptForCausalLM",
        "transformer.blocks.0",
        {"vocab_size": 90, "d_model": 48, "n_layers": 1, "n_heads": 6, "max_seq_len": 64},
        positions="mpt alibi",
    ),
    Peer("T5", "t5", "t5:T5ForConditionalGeneration", "encoder.block.0", T5, "decoder", "relative", True),
    Peer("T5 1.1", "t5", "t5:T5ForConditionalGeneration", "decoder.block.0", T5, "decoder", "relative", True, untie),
    Peer(
        "M2M100",
        "m2m_100",
        "m2m_100:M2M100ForConditionalGeneration",
        "model.encoder.layers.0",
        M2M,
        hidden="model.decoder",
        decoder=True,
    ),
    llama_like("LLaMA 2", "llama", "Llama", rope_parameters=ROPE),
    llama_like("LLaMA 3", "llama", "Llama", rope_parameters=LLAMA3, tie_word_embeddings=True),
    llama_like("Mistral", "mistral", "Mistral", head_dim=16),
    llama_like("Qwen2", "qwen2", "Qwen2", tie_word_embeddings=True),
    llama_like("Qwen3", "qwen3", "Qwen3", head_dim=16),
    llama_like("Gemma", "gemma", "Gemma", head_dim=16),
    llama_like("Gemma 2", "gemma2", "Gemma2", head_dim=16, final_logit_softcapping=3.0),
    llama_like("Gemma 3", "gemma3", "Gemma3", head_dim=16, num_hidden_layers=6, final_logit_softcapping=None),
    Peer(
        "GPT-NeoX",
        "gpt_neox",
        "gpt_neox:GPTNeoXForCausalLM",
        "gpt_neox.layers.0",
        SMALL | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}},
        positions="rotary",
    ),
    Peer("GPT-J", "gptj", "gptj:GPTJForCausalLM", "transformer.h.0", GPT | {"rotary_dim": 4}, positions="gptj"),
    llama_like("Phi", "phi", "Phi", rope_parameters=ROPE | {"partial_rotary_factor": 0.5}),
    llama_like("Phi-3", "phi3", "Phi3", rope_parameters=LONG, original_max_position_embeddings=32),
    Peer("Falcon", "falcon", "falcon:FalconForCausalLM", "transformer.h.0", FALCON, positions="rotary"),
    Peer(
        "Falcon RW",
        "falcon",
        "falcon:FalconForCausalLM",
        "transformer.h.0",
        FALCON | {"alibi": True},
        positions="falcon alibi",
    ),
    llama_like("Cohere", "cohere", "Cohere", logit_scale=0.0625),
    llama_like("Granite", "granite", "Granite", embedding_multiplier=12.0, logits_scaling=8.0),
)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings of transformers about tiny and patched configurations."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def run(peer: Peer, model: nn.Module, ids: Tensor, **inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the input of the first block, the input of the head, and the logits."""
    seen: dict[str, Tensor] = {}

    def before_block(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["block"] = args[0] if args else kwargs["hidden_states"]

    def after_hidden(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        seen["hidden"] = output if isinstance(output, Tensor) else output[0]

    body = model.base_model if peer.hidden is None else model.get_submodule(peer.hidden)
    handles = [
        model.get_submodule(peer.block).register_forward_pre_hook(before_block, with_kwargs=True),
        body.register_forward_hook(after_hidden),
    ]
    if peer.decoder:
        inputs["decoder_input_ids"] = ids
    with torch.no_grad():
        logits = model(ids, **inputs).logits
    for handle in handles:
        handle.remove()
    return seen["block"], seen["hidden"], logits


def largest(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return (ours.double() - theirs.double()).abs().max().item() if ours.numel() else 0.0


def position_difference(peer: Peer, model: nn.Module, layer: el.EmbeddingLayer, length: int = LENGTH) -> float | None:
    """Return the largest difference of cosines and sines, or of biases; `None` for positions added to the input."""
    at = torch.arange(length)
    if peer.positions == "none":
        return None
    if peer.positions in ("rotary", "gptj"):
        return max(_rotary_differences(peer, model, layer, at))
    if peer.positions == "relative":
        sides = [("encoder", layer.position), ("decoder", layer.position_of("decoder"))]
        return max(_relative_difference(model.get_submodule(side), position, at) for side, position in sides)
    return largest(*_causal(layer.position.bias(at, at)[0], _alibi(peer, model, length)))


def _rotary_differences(peer: Peer, model: nn.Module, layer: el.EmbeddingLayer, at: Tensor) -> Iterator[float]:
    if peer.positions == "gptj":
        sin, cos = model.transformer.h[0].attn.embed_positions[: len(at)].chunk(2, dim=-1)
        yield from (largest(ours, theirs) for ours, theirs in zip(layer.position.cos_sin(at), (cos, sin), strict=True))
        return
    rotary = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    for kind in getattr(rotary, "layer_types", [None]):
        options = () if kind is None else (kind,)
        theirs = rotary(torch.zeros(1), at.unsqueeze(0), *options)
        position = layer.position_of(kind)
        for ours, wide in zip(position.cos_sin(at), theirs, strict=True):
            yield largest(ours, wide[0, :, ::2] if position.interleaved else wide[0, :, : ours.shape[-1]])


def _relative_difference(stack: nn.Module, position: el.Position, at: Tensor) -> float:
    attention = stack.block[0].layer[0].SelfAttention
    with torch.no_grad():
        return largest(position.bias(at, at), attention.compute_bias(len(at), len(at)))


def _alibi(peer: Peer, model: nn.Module, length: int) -> Tensor:
    """Return transformers' bias, `(H, T)`, without the term that is equal for all keys of a query."""
    mask = torch.ones(1, length, dtype=torch.long)
    if peer.positions == "mpt alibi":
        bias = model.transformer.build_mpt_alibi_tensor(model.config.n_heads, length)
    elif peer.positions == "falcon alibi":
        from transformers.models.falcon.modeling_falcon import build_alibi_tensor

        heads = model.config.num_attention_heads
        bias = build_alibi_tensor(mask, heads, torch.float32) / (model.config.hidden_size // heads) ** 0.5
    else:
        bias = model.transformer.build_alibi_tensor(mask, model.config.n_head, torch.float32)
    return bias.squeeze(1)


def _causal(ours: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return both biases of earlier keys, relative to the key at the position of the query."""
    theirs = keys.unsqueeze(-2) - keys.unsqueeze(-1)
    return ours.tril(), theirs.tril()


@dataclass(frozen=True)
class Differences:
    """Largest absolute differences from transformers in float32; `None` where a model has no such part."""

    input: float
    logits: float | None
    positions: float | None


def compare(peer: Peer, folder: Path) -> Differences:
    """Save the model of a peer, load its embedding layer, and compare both on texts with and without padding."""
    with quiet():
        model = peer.make()
        model.save_pretrained(folder)
        layer = el.load(folder)
        torch.manual_seed(1)
        ids = torch.randint(4, 90, (3, LENGTH))
        mask = torch.ones_like(ids)
        mask[1, :5] = 0
        ids[1, :5] = PAD
        with torch.no_grad():
            whole = run(peer, model, ids[:1])
            padded = run(peer, model, ids, attention_mask=mask)
            inputs = [largest(layer.input(ids[:1]), whole[0]), largest(layer.input(ids, mask), padded[0])]
            logits = [largest(layer.head(hidden), theirs) for _, hidden, theirs in (whole, padded)]
        return Differences(max(inputs), max(logits), position_difference(peer, model, layer))
