"""Small random models of every model type of transformers, built from the type's default configuration.

    config, model = build("llama", "causal")
    config, model = VARIANTS["LLaMA 3"].build()

`KINDS` has the model types of each kind. A size that a default configuration has becomes the one in `SIZES`; its
sub-configurations are treated in the same way. `OVERRIDES` has more settings by model type: data, no code. Widths of
heads, lengths, bases, scales and epsilons stay those of the default configuration. `VARIANTS` has well-known models,
with the settings in which they differ from it.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCAB = 131
"""Number of tokens: a prime, so that no other size of a model equals it."""

KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
"""Kind -> name of the mapping in transformers' `modeling_auto` whose keys are its model types."""

MORE_KINDS = {"text encoder": "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES"}
"""Further kinds, whose models have no logits: their vocabulary is edited."""

FURTHER_KINDS = {
    **MORE_KINDS,
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "rnnt": "MODEL_FOR_RNNT_MAPPING_NAMES",
    "tdt": "MODEL_FOR_TDT_MAPPING_NAMES",
    "waveform": "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES",
    "spectrogram": "MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES",
    "retrieval": "MODEL_FOR_RETRIEVAL_MAPPING_NAMES",
    "zero-shot image": "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "zero-shot object": "MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING_NAMES",
    "text recognition": "MODEL_FOR_TEXT_RECOGNITION_MAPPING_NAMES",
    "decision": "MODEL_FOR_DECISION_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}
"""Kinds that are counted beside `KINDS`: of sound, of text beside images, and models without a head."""

OTHER_KINDS = {
    "pretraining": "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "multimodal": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "question": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "visual question": "MODEL_FOR_VISUAL_QUESTION_ANSWERING_MAPPING_NAMES",
}
"""Kinds that are not counted; their folders are read, or refused with advice."""

SAMPLE = {
    "causal": (
        *("llama", "qwen2", "gemma3_text", "gpt2", "gptj", "gpt_neox", "falcon", "bloom", "mpt", "opt", "phi"),
        *("cohere2", "granite", "olmo2", "deepseek_v3", "llama4_text", "smollm3", "exaone4", "nanochat"),
        *("stablelm", "minicpm3"),
        *("ministral3", "hunyuan_v1_dense", "jamba", "mamba", "xglm", "biogpt", "bart", "gpt_oss"),
    ),
    "masked": ("bert", "roberta", "electra", "modernbert", "deberta-v2"),
    "seq2seq": ("t5", "bart", "marian", "m2m_100"),
    "image-text": ("qwen2_vl", "paligemma"),
}
"""Kind -> model types: 40 together, which tests of all families take by default.

They have every pattern: rotary positions in all layouts, with several axes, by layer type, and left out in some layers;
ALiBi, relative, sinusoidal and learned positions, and none; scaled rows, norms, projections and token types after the
look-up; tied and untied heads, with transforms, biases, scales and softcaps; experts, state-space and linear attention;
encoder-decoders; language models of vision-language models.
"""

LAYERS = 6
_SAME = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_total")
SIZES: Mapping[str, int] = {
    "vocab_size": VOCAB,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 40),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "depth"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(_SAME, 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 24),
    **dict.fromkeys(("out_hidden_size", "text_hidden_size", "backbone_hidden_size", "audio_hidden_size"), 64),
    **dict.fromkeys(("projector_hidden_size", "projection_hidden_size", "vision_hidden_size"), 64),
    "projection_dim": 64,
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("index_n_heads", "linear_num_key_heads", "o_groups"), 2),
    "linear_num_value_heads": 4,
    "o_lora_rank": 24,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
}
"""Size in a configuration -> its value here."""

KEEP = object()
"""Value in `OVERRIDES` of a size that stays that of the default configuration."""

_CLIP = {"model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
_CLIP |= {"num_attention_heads": 4}
"""A vision tower in place of one that needs the package timm."""

_COMPASS_ROPE = {"rope_type": "default", "rope_theta": 50000.0, "mrope_section": [4, 2, 2]}
_MROPE = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 3, 3]}
_INTERLEAVED_MROPE = _MROPE | {"mrope_section": [4, 2, 2]}
_HALF_MROPE = _MROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "apertus1p5": {
        "image_token_offset": 20,
        "vision_config.codebook_size": 40,
        "vision_config.base_channels": 32,
        "audio_token_offset": 60,
        "audio_config.codebook_size": 40,
        "audio_config.codebook_dim": 64,
    },
    "bamba": {"attn_layer_indices": [2, 5], "mamba_n_heads": 8, "mamba_d_head": 16},
    "bailing_hybrid": {"head_dim": 16, "v_head_dim": 16, "qk_nope_head_dim": 16},
    "blt": {"hidden_size_global": 64, "encoder_hash_byte_group_vocab": 500},
    "chameleon": {"vocabulary_map": {"<image>": 120}, "vq_config.base_channels": 32},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 4,
        "rope_parameters": {"sliding_attention": _COMPASS_ROPE, "full_attention": None},
    },
    "cpmant": {"dim_ff": 48},
    "dia": {"decoder_config.cross_hidden_size": 64},
    "kyutai_speech_to_text": {"audio_pad_token_id": VOCAB + 32 * 2049},
    "dbrx": {
        "attn_config.clip_qkv": 8.0,
        "attn_config.rope_theta": 10000.0,
        "attn_config.kv_n_heads": 2,
        "ffn_config.ffn_hidden_size": 48,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_ocr2_text": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1)},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note_text": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 20,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_vision_encoder": {
        "mlp_layer_types": ["dense", "sparse"],
        "num_hidden_layers": 2,
        "adapter_in_dim": 64,
        "adapter_out_dim": 64,
    },
    "emu3": {"vocabulary_map": {"<image>": 120}, "vq_config.base_channels": 32},
    "ernie4_5_vl_moe_text": {"rope_parameters": _MROPE | {"mrope_section": [3, 3, 2]}},
    "esm": {"vocab_size": VOCAB, "pad_token_id": 1, "mask_token_id": 30},
    "esmc": {"num_key_value_heads": 4},
    "funnel": {"block_sizes": [2, 2], "num_hidden_layers": KEEP, "num_blocks": KEEP, "d_head": 16, "d_inner": 48},
    "fast_vlm": {"vision_config": _CLIP, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    "florence_vision": {"embed_dim": [8, 16, 32, 64]},
    "gemma3n_text": {"num_kv_shared_layers": 0, "intermediate_size": 48},
    "gemma4_assistant": {
        "text_config.hidden_size_per_layer_input": 0,
        "text_config.vocab_size_per_layer_input": 0,
        "text_config.num_kv_shared_layers": LAYERS,
    },
    "gemma4_unified_assistant": {"text_config.num_kv_shared_layers": 0},
    "glm5_next_text": {"num_key_value_heads": 4, "linear_head_dim": 16, "linear_num_heads": 4},
    **{name: {"rope_parameters": _MROPE} for name in ("glm4v_text", "glm_ocr_text", "glm_image_text")},
    "glm4v_moe_text": {"rope_parameters": _HALF_MROPE},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granite4_vision": {"deepstack_layer_map": [[-1, 2]], "downsample_rate": "1/4"},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {
        "layer_types": ["mamba", "mamba", "attention"] * (LAYERS // 3),
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
    },
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hunyuan_vl_text": {"head_dim": 16, "rope_parameters": _MROPE},
    "inkling2_text": {"unpadded_vocab_size": VOCAB - 4},
    "inkling2_loop_text": {
        "unpadded_vocab_size": VOCAB - 4,
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
    },
    "janus": {"vision_config.projection_dim": 64, "vq_config.base_channels": 32},
    "janus_vqgan": {"num_embeddings": 100, "projection_dim": 64, "image_token_embed_dim": 64},
    "led": {"attention_window": 4},
    "longt5": {"local_radius": 15},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * (LAYERS // 3)},
    "longformer": {"attention_window": 4},
    "luke": {"entity_vocab_size": 100, "entity_emb_size": 32},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"head_dim": 16},
    "mobilebert": {"embedding_size": 32, "true_hidden_size": 48, "intra_bottleneck_size": 48},
    "mimi": {"upsample_groups": 64, "num_filters": 8},
    "molmo2_vision": {"num_hidden_layers": KEEP},
    "muse_spark_audio": {"num_hidden_layers": KEEP, "hidden_sizes": [16, 16, 16, 16]},
    "nemotron_h_omni": {"vision_config.video_temporal_patch_size": 2},
    "nemotron": {"num_key_value_heads": 2},
    "opt": {"word_embed_proj_dim": 24},
    "pegasus_x": {"block_size": 4, "num_global_tokens": 3},
    "perceiver": {"num_latents": 8, "d_latents": 48, "num_self_attends_per_block": 2},
    "perception_lm": {"vision_config": _CLIP | {"model_args": {"embed_dim": 64}}},
    "prophetnet": {"num_hidden_layers": KEEP},
    **{name: {"rope_parameters": _MROPE} for name in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text")},
    **{name: {"rope_parameters": _INTERLEAVED_MROPE} for name in ("qwen3_omni_moe_text", "qwen3_vl_moe_text")},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "ple_embed_dim": 64,
        "ngram_vocab_size_base": 50,
        "eos_token_id": 2,
    },
    "ctc:wav2vec2-bert": {"vocab_size": VOCAB},
    "ctc:wav2vec2-conformer": {"vocab_size": VOCAB},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 16},
    "gradium_phonon_tts": {"flow_head_config.condition_dim": 64},
    "moonshine": {"decoder_num_attention_heads": 2, "encoder_num_attention_heads": 2},
    "lilt": {"hidden_size": 96},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "pocket_tts": {"flow_head_config.condition_dim": 64},
    "vits": {"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3, 5]]},
    "reformer": {"axial_pos_embds_dim": [16, 48]},
    "qwen2_vl_vision": {"embed_dim": 64},
    "causal:reformer": {"is_decoder": True},
    "roc_bert": {"shape_vocab_size": 50, "shape_embed_dim": 24, "pronunciation_embed_dim": 24},
    "squeezebert": {"embedding_size": 64},
    "step3p5": {"sliding_window": 512},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 14},
    "zamba2": {"num_hidden_layers": 9, "layers_block_type": (["mamba"] * 2 + ["hybrid"]) * 3},
    "zaya": {"num_experts_per_tok": 1},
}
"""Model type -> settings of its configuration; `a.b` is the setting `b` of the sub-configuration `a`.

The settings also apply where a configuration of this type is part of another one.
"""


HEAD_INPUTS = {"fsmt": "model.decoder.output_projection", "opt": "model.decoder.project_out", "prophetnet": "lm_head"}
"""Model type -> module whose input is that of the head, where the decoder does not return these hidden states."""


PARTS = {
    "blip": "text_decoder",
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo"), "language_model"),
    "kosmos-2": "text_model",
}
"""Model type -> module that is compared alone: the language model of a model that needs an image."""

UNHOOKED = {"squeezebert": "transformer.encoder"}
"""Model type -> module around the blocks, where the model calls `forward` of its blocks and so passes by hooks."""


FILLED = {
    "bros": {"bbox": (4,)},
}
"""Model type -> inputs of its `forward` beside the text, and the shape of each behind `(B, T)`; they are zeros."""


CODES = {
    "csm": ("input_ids", "num_codebooks", 0),
    "dia": ("decoder_input_ids", "num_channels", 0),
    "higgs_audio_v2": ("audio_input_ids", "num_codebooks", 0),
    "kyutai_speech_to_text": ("input_ids", "num_codebooks", 1),
    **dict.fromkeys(("musicgen_decoder", "musicgen_melody_decoder"), ("input_ids", "num_codebooks", 0)),
}
"""Model type -> argument of `forward` that takes codes of K streams, setting with the number of codebooks, and further
streams: Kyutai's text."""


class Variant(NamedTuple):
    """A well-known model, as a model type of transformers with settings.

    Attributes:
        model_type: A key of `model_types(kind)`.
        kind: A key of `KINDS`.
        settings: As in `build`.
    """

    model_type: str
    kind: str = "causal"
    settings: Mapping[str, Any] = {}

    def build(self) -> tuple[Any, nn.Module]:
        """Return the configuration and the small random model."""
        return build(self.model_type, self.kind, self.settings)


_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_YARN = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LINEAR = {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}
_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096}
_LONG |= {"short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.1, 2.2, 2.5], "long_factor": [1.5, 2, 3, 4, 5, 6, 8, 9]}

VARIANTS: Mapping[str, Variant] = {
    "GPT-2": Variant("gpt2"),
    "BERT": Variant("bert", "masked"),
    "RoBERTa": Variant("roberta", "masked"),
    "XLM-R": Variant("xlm-roberta", "masked"),
    "ALBERT": Variant("albert", "masked", {"embedding_size": 16}),
    "OPT": Variant("opt", settings={"word_embed_proj_dim": SIZES["hidden_size"]}),
    "OPT 350M's projections": Variant("opt", settings={"word_embed_proj_dim": 16}),
    "BLOOM, 6 heads": Variant("bloom", settings={"hidden_size": 48, "n_head": 6}),
    "MPT, 6 heads": Variant("mpt", settings={"d_model": 48, "n_heads": 6}),
    "T5": Variant("t5", "seq2seq"),
    "T5 1.1": Variant("t5", "seq2seq", {"tie_word_embeddings": False}),
    "M2M100": Variant("m2m_100", "seq2seq"),
    "LLaMA 2": Variant("llama"),
    "LLaMA 3": Variant("llama", settings={"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "Mistral": Variant("mistral"),
    "Qwen2": Variant("qwen2", settings={"tie_word_embeddings": True}),
    "Qwen2.5, YaRN": Variant("qwen2", settings={"rope_parameters": _YARN}),
    "Qwen3": Variant("qwen3"),
    "Gemma": Variant("gemma"),
    "Gemma 2": Variant("gemma2", settings={"final_logit_softcapping": 3.0}),
    "Gemma 3": Variant("gemma3_text"),
    "GPT-NeoX": Variant("gpt_neox"),
    "GPT-J": Variant("gptj"),
    "Phi": Variant("phi"),
    "Phi-3, LongRoPE": Variant("phi3", settings={"rope_parameters": _LONG}),
    "Falcon": Variant("falcon"),
    "Falcon RW": Variant("falcon", settings={"alibi": True, "multi_query": False, "num_kv_heads": 4}),
    "Cohere": Variant("cohere"),
    "Granite": Variant("granite", settings={"embedding_multiplier": 12.0, "logits_scaling": 8.0}),
}
"""Name -> variant."""


class CannotBuild(Exception):
    """A model cannot be built here; the message is the reason."""


class LacksType(Exception):
    """The installed release of transformers lacks the model type, or does not have it as this kind: both arguments."""


def model_types(kind: str) -> dict[str, str]:
    """Return the model types of a kind, and the name of each one's model class in transformers."""
    from transformers.models.auto import modeling_auto

    names = getattr(modeling_auto, {**KINDS, **FURTHER_KINDS, **OTHER_KINDS}[kind], {})  # older releases lack kinds
    return {name: each if isinstance(each, str) else each[0] for name, each in names.items()}


def small_config(config_class: Any, overrides: Mapping[str, Any]) -> Any:
    """Return a small configuration of a class.

    Args:
        config_class: Class of the configuration.
        overrides: Settings that replace those of `OVERRIDES`; `a.b` is the setting `b` of the sub-configuration `a`.
    """
    overrides = {**OVERRIDES.get(config_class.model_type, {}), **overrides}
    own = {key: value for key, value in overrides.items() if "." not in key}
    stated = {key: value for key, value in own.items() if value is not KEEP}
    default = _default(config_class, stated)
    known = {} if default is None else default.to_dict()
    changes: dict[str, Any] = {}
    for key in config_class.sub_configs:
        part = _part(config_class, key) if default is None else type(getattr(default, key, None))
        if part is not type(None) and key not in own:
            inner = {name[len(key) + 1 :]: value for name, value in overrides.items() if name.startswith(f"{key}.")}
            changes[key] = small_config(part, inner)
    for key, small in SIZES.items():
        value = known.get(config_class.attribute_map.get(key, key))
        if key in ("num_key_value_heads", "num_kv_heads") and known.get("kv_lora_rank"):
            small = SIZES["num_attention_heads"]  # latent attention has as many key heads as query heads
        if isinstance(value, int) and not isinstance(value, bool) and key not in own:
            changes[key] = small
    changes |= _small_ids({key: value for key, value in known.items() if key not in own})
    return config_class(**{**changes, **stated})


def _default(config_class: Any, stated: Mapping[str, Any]) -> Any:
    """Return the default configuration of a class, or `None` if the class cannot be built without more settings."""
    for settings in ({}, stated):
        with suppress(Exception):
            return config_class(**settings)
    return None


def _part(config_class: Any, key: str) -> Any:
    """Return the class of a sub-configuration of a class whose default cannot be built."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    spec = config_class.sub_configs_defaults[key]
    return CONFIG_MAPPING[spec.model_type] if getattr(spec, "model_type", None) else spec


def _small_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return IDs of special tokens below `VOCAB` for those of a configuration that are not."""
    changes: dict[str, Any] = {}
    free = VOCAB
    for key, value in sorted(config.items()):
        ids = value if isinstance(value, list) else [value]
        is_token = "token" in key and key.endswith(("_id", "_index", "_ids"))
        if is_token and any(type(one) is int and one >= VOCAB - 10 for one in ids):
            free -= len(ids)
            changes[key] = list(range(free, free + len(ids))) if isinstance(value, list) else free
    return changes


def build(model_type: str, kind: str, settings: Mapping[str, Any] | None = None) -> tuple[Any, nn.Module]:
    """Build a small random model of a type; no bias is 0 and no weight of a norm is 1.

    Args:
        model_type: A key of `model_types(kind)`.
        kind: A key of `KINDS`, `FURTHER_KINDS` or `OTHER_KINDS`.
        settings: Settings that replace those of the configuration; `a.b` is the setting `b` of the sub-configuration
            `a`. With `tie_word_embeddings=False`, the head has rows of its own, also if transformers ties it (T5).

    Returns:
        The configuration and the model in float32, in evaluation mode.

    Raises:
        LacksType: The installed release of transformers lacks it.
        CannotBuild: transformers cannot build it from such a configuration.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING or model_type not in model_types(kind):
        raise LacksType(kind, model_type)
    config_class = CONFIG_MAPPING[model_type]
    with quiet():
        try:
            model_class = getattr(transformers, model_types(kind)[model_type])
            config = small_config(config_class, {**OVERRIDES.get(f"{kind}:{model_type}", {}), **(settings or {})})
            parts = [name for name, part in config_class.sub_configs.items() if part is model_class.config_class]
            if parts and model_class.config_class is not config_class:
                config = getattr(config, parts[0])
            if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
                config.decoder_start_token_id = 0
            torch.manual_seed(0)
            model = model_class._from_config(config, attn_implementation="eager", experts_implementation="eager")
        except Exception as error:
            raise CannotBuild(f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0][:300]) from error
        if settings and settings.get("tie_word_embeddings") is False:
            head = model.get_output_embeddings()
            if head is not None:
                head.weight = nn.Parameter(torch.empty_like(head.weight))
        randomise(model)
        for part in (model.config, text_config(model.config)):
            part.use_cache = False
    return config, model.eval()


def text_config(config: Any) -> Any:
    """Return the configuration of the language model in one of transformers, that of the decoder if there are two."""
    try:
        return config.get_text_config()
    except ValueError:  # MusicGen has an encoder and a decoder of different types
        return config.get_text_config(decoder=True)


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Draw every trained parameter, and every saved buffer of zeros, from N(0, 0.2²).

    Frozen parameters are fixed sinusoids; buffers of zeros are biases such as BART's `final_logits_bias`.
    """
    torch.manual_seed(seed)
    saved = model.state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point() and not buffer.any():
                buffer.normal_(std=0.2)


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
