"""Rotary settings by model type, which transformers has in its code and not in `config.json`."""

from collections.abc import Mapping

from embedlayer.families.records import META_LLAMA, Names, RotaryPositions

_SETTINGS: tuple[tuple[RotaryPositions, Names], ...] = (
    (RotaryPositions(), ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "granite")),
    (RotaryPositions(interleaved=True), (META_LLAMA,)),
    (RotaryPositions(scales_full_attention_only=True), ("gemma3", "gemma3_text")),
    (RotaryPositions(default_share=0.25), ("gpt_neox",)),
    (RotaryPositions(fixed_base=True, interleaved=True), ("gptj", "codegen", "roformer")),
    (RotaryPositions(default_share=0.5), ("phi",)),
    (RotaryPositions(former_rope_types=(("yarn", "longrope"),)), ("phi3",)),
    (RotaryPositions(or_alibi=True), ("falcon",)),
    (RotaryPositions(500_000.0, interleaved=True), ("cohere",)),
    (RotaryPositions(interleaved=True, without_positions="full_attention"), ("cohere2", "cohere2_moe")),
    (RotaryPositions(without_positions="full_attention"), ("exaone4",)),
    (RotaryPositions(interleaved=True, without_positions="listed"), ("llama4", "llama4_text")),
    (RotaryPositions(without_positions="listed"), ("smollm3",)),
    (RotaryPositions(scales_full_attention_only=True), ("gemma3n", "gemma3n_text", "t5gemma2", "olmo3")),
    (RotaryPositions(interleaved=True, default_share=0.5), ("glm", "glm4")),
    (RotaryPositions(interleaved=True), ("ernie4_5", "ernie4_5_moe", "helium", "moonshine_streaming", "blt")),
    (RotaryPositions(interleaved=True), ("deepseek_v2", "deepseek_v3", "mistral4", "axk1", "youtu")),
    (RotaryPositions(interleaved=True, default_share=0.9), ("moonshine",)),
    (RotaryPositions(default_share=0.25), ("stablelm", "qwen3_next", "qwen3_5", "qwen3_5_moe")),
    (RotaryPositions(default_share=0.5), ("persimmon", "glm4_moe", "nemotron", "recurrent_gemma")),
    (RotaryPositions(reversed=True), ("nanochat",)),
)

ROTARY: Mapping[str, RotaryPositions] = {name: settings for settings, names in _SETTINGS for name in names}
"""Model type -> its rotary settings."""
