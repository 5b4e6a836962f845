"""Names in GGUF files: architectures, tensors, keys of sizes, and the pre-tokenizers of byte-level BPE.

A file of llama.cpp names an architecture, which often covers several model types with equal input and head. The record
of a family is the one of its other checkpoints, with the names that tensors have in GGUF files.

Reference: gguf/constants.py, convert_hf_to_gguf.py and src/llama-vocab.cpp in the repository of llama.cpp.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from embedlayer.families.causal import META_TENSORS
from embedlayer.families.records import META_LLAMA, Family, LearnedPositions, NormSpec

GGUF_TABLE, GGUF_HEAD, GGUF_HEAD_BIAS = "token_embd.weight", "output.weight", "output.bias"
GGUF_PER_LAYER = "per_layer_token_embd.weight"
"""Per-layer table of Gemma 3n and 4, with a row for each token."""

GGUF_OTHER_TABLES = ("nextn.embed_tokens", "nextn.shared_head_head")
"""Names in a block, without `.weight`, of further tensors with a row for each token: the layers that predict the next
tokens, of DeepSeek V3 and GLM 4."""

_WITHOUT_TOKENS = (
    *("token_embd_norm", "output_norm", "position_embd", "token_types", "rope_freqs", "rope_factors_long"),
    *("rope_factors_short", "cls", "cls.norm", "cls.output", "dense_2", "dense_3", "altup_proj", "altup_unembd_proj"),
    *("per_layer_model_proj", "per_layer_proj_norm", "enc.output_norm", "dec.output_norm"),
)
_OF_BLOCKS = (
    *("altup", "attn", "channel_mix", "cross_attn", "exp_probs", "ffn", "indexer", "inp_gate", "laurel"),
    *("layer_out", "nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm", "per_layer"),
    *("post_", "pre_ffw", "proj", "shortconv", "ssm", "time_mix", "vis"),
)
_BLOCK = re.compile(r"(?:enc\.|dec\.)?blk\.\d+\.")


def has_no_token_rows(name: str) -> bool:
    """Return whether a tensor of a GGUF file is known, by its name in llama.cpp, to have no row for each token."""
    stem = name.removesuffix(".weight").removesuffix(".bias")
    block = _BLOCK.match(stem)
    return stem in _WITHOUT_TOKENS if block is None else stem[block.end() :].startswith(_OF_BLOCKS)


ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors with a number for each rotated pair, by which its frequency is divided."""

GGUF_ARCHITECTURES: Mapping[str, str] = {
    "llama": META_LLAMA,  # the converter permutes queries and keys so that pairs are channels (2i, 2i + 1)
    **{name: name for name in ("qwen2", "qwen3", "gemma", "gemma2", "phi3", "gpt2", "bert", "starcoder2", "olmo2")},
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gptneox": "gpt_neox",
    "gemma3": "gemma3_text",
}
"""Architecture -> model type of the family whose input and head it has."""

GGUF_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "gemma2": {"final_logit_softcapping": 30.0},
    "gemma3": {"rope_local_base_freq": 1e4, "sliding_window_pattern": 6},
}
"""Architecture -> values that llama.cpp has in its code."""

_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
"""Key after the name of the architecture -> key of the same meaning in transformers' configurations."""

_TOKENS = {"tokenizer.ggml.bos_token_id": "bos_token_id", "tokenizer.ggml.eos_token_id": "eos_token_id"}
_TOKENS |= {"tokenizer.ggml.padding_token_id": "pad_token_id"}

_BLOCK_TENSORS = {
    "attention_norm": "attn_norm",
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.out": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}

GGUF_TENSORS: Mapping[str, str] = {
    "table.weight": GGUF_TABLE,
    **{f"blocks.{{}}.{ours}.weight": f"blk.{{}}.{theirs}.weight" for ours, theirs in _BLOCK_TENSORS.items()},
    "norm.weight": "output_norm.weight",
    "head.weight": GGUF_HEAD,
}
"""Tensor names of `DecoderLM`, and the names in GGUF files of the architecture `llama`."""


def gguf_family(family: Family) -> Family:
    """Return the record of a family with the names that its tensors have in GGUF files."""
    head, position = family.head, family.position
    if head is not None:
        head = replace(head, weight=(GGUF_HEAD,), bias=(GGUF_HEAD_BIAS,) if head.bias else ())
    if isinstance(position, LearnedPositions):
        position = replace(position, names=("position_embd.weight",))
    return replace(
        family,
        table=(GGUF_TABLE,),
        head=head,
        position=position,
        types=("token_types.weight",) if isinstance(family.types, tuple) and family.types else family.types,
        norm=replace(family.norm, name="token_embd_norm") if isinstance(family.norm, NormSpec) else family.norm,
        decoder=GGUF_TENSORS if family.decoder is META_TENSORS else None,
    )


def gguf_config(values: Mapping[str, Any], *, is_tied: bool, factors: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the configuration that transformers would have for the model of a GGUF file.

    It has no `model_type` if the architecture is none of `GGUF_ARCHITECTURES`. `factors` are the numbers of the tensors
    `ROPE_FACTORS`, `LONG_FACTORS` and `SHORT_FACTORS` that the file has.
    """
    name = values.get("general.architecture")
    own = {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}
    config: dict[str, Any] = {"tie_word_embeddings": is_tied, **GGUF_DEFAULTS.get(str(name), {})}
    if str(name) in GGUF_ARCHITECTURES:
        config["model_type"] = GGUF_ARCHITECTURES[str(name)]
    config |= {theirs: own[key] for key, theirs in _KEYS.items() if key in own and not isinstance(own[key], list)}
    config |= {theirs: values[key] for key, theirs in _TOKENS.items() if key in values}
    if "tokenizer.ggml.tokens" in values:
        config["vocab_size"] = len(values["tokenizer.ggml.tokens"])
    sizes = (config.get("hidden_size"), config.get("num_attention_heads"), own.get("rope.dimension_count"))
    width, heads, rotated = (size if type(size) is int else 0 for size in sizes)
    if 0 < heads <= width and rotated:
        config.setdefault("head_dim", width // heads)
        config["rotary_dim"] = rotated  # llama.cpp rotates so many channels in every architecture
    if (scaling := _rope_scaling(own, config.get("max_position_embeddings"), factors)) is not None:
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(own: Mapping[str, Any], max_length: Any, factors: Mapping[str, list[float]]) -> dict[str, Any] | None:
    """Return the `rope_scaling` of transformers; `None` for unscaled frequencies.

    `own` is the metadata of the architecture, without its name; `factors` are those of `gguf_config`.
    """
    kind, original = own.get("rope.scaling.type", "none"), own.get("rope.scaling.original_context_length")
    lengths = {"factor": own.get("rope.scaling.factor"), "original_max_position_embeddings": original or max_length}
    if ROPE_FACTORS in factors or LONG_FACTORS in factors:  # LLaMA 3.1 in this form; Phi-3
        both = factors.get(ROPE_FACTORS)
        long, short = factors.get(LONG_FACTORS, both), factors.get(SHORT_FACTORS, both)
        lengths |= {"factor": 1.0, "attention_factor": own.get("rope.scaling.attn_factor", 1.0)}
        return {"rope_type": "longrope", "long_factor": long, "short_factor": short, **lengths}
    if kind == "linear":
        return {"rope_type": kind, "factor": lengths["factor"]}
    return None if kind == "none" else {"rope_type": kind, **lengths}


# Tokenizers

GGUF_TOKENIZERS: Mapping[str, Literal["byte-level", "sentencepiece", "unigram", "wordpiece"]] = {
    "gpt2": "byte-level",
    "llama": "sentencepiece",
    "t5": "unigram",
    "bert": "wordpiece",
}
"""Value of `tokenizer.ggml.model` -> what it is: byte-level BPE, BPE or Unigram of SentencePiece, or WordPiece."""


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level BPE tokenizer of a GGUF file splits a text before it merges bytes."""

    patterns: tuple[str, ...]  # that split a text one after the other
    ignores_merges: bool = False  # whether a part that is a token is not merged from bytes
    adds_bos: bool = False  # whether a text starts with that token if the file does not say


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST
_QWEN = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{{L}}\p{{N}}]?{0}*{1}+{2}|[^\r\n\p{{L}}\p{{N}}]?{0}+{1}*{2}|"
_REST_WITH_SLASH = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_O200K = _CASED.format(_UPPER, _LOWER, f"{_ENDINGS}?") + r"\p{N}{1,3}|" + _REST_WITH_SLASH
_TEKKEN = _CASED.format(_UPPER, _LOWER, "") + r"\p{N}|" + _REST_WITH_SLASH

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"), PreTokenizer((_GPT2,))),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), PreTokenizer((_LLAMA3,), True, True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), PreTokenizer((_QWEN,))),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell"), PreTokenizer((r"\p{N}", _GPT2))),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer((_O200K,))),
    "tekken": PreTokenizer((_TEKKEN,), True, True),
}
"""Value of `tokenizer.ggml.pre` -> what it does."""
