"""The norm between the last block and the head of each model type, which `load(..., final_norm=True)` reads.

A type that is in neither list is refused. The norms are those of transformers' code; tools/all_families.py compares
them with the input of the head.
"""

from collections.abc import Collection, Mapping

from embedlayer.families.field_types import Names
from embedlayer.families.records import META_LLAMA, NormSpec

WINDOW_IN_ALL_BLOCKS: Names = (
    *("ministral3", "mistral", "mixtral", "phi3", "phi4_multimodal", "phimoe", "starcoder2", META_LLAMA),
)
"""Model types of which every block attends to `sliding_window` tokens, if the configuration has a number there."""

_WITHOUT: Names = (
    *("bart", "bert", "bert-generation", "big_bird", "blenderbot-small", "blip_text_model"),
    *("camembert", "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert"),
    *("electra", "ernie", "fnet", "git", "gte", "ibert", "jina_embeddings_v3", "layoutlm"),
    *("led", "luke", "marian", "mobilebert", "mpnet", "mra", "mvp", "nomic_bert"),
    *("nystromformer", "openai-gpt", "plbart", "rembert", "roberta", "roc_bert", "roformer"),
    *("squeezebert", "tapas", "trocr", "xlm-roberta", "xmod", "yoso"),
)
"""Model types whose last block ends with a norm, so that the head reads its output."""

_SPECS: tuple[tuple[NormSpec, Names], ...] = (
    (
        NormSpec("norm", "rms_norm_eps", 1e-05, kind="rms"),
        (
            *("afmoe", "apertus", "apertus1p5_text", "arcee", "bitnet", "chameleon"),
            *("cosmos3_edge_text", "cwm", "diffllama", "dots3_note_text", "emu3_text_model"),
            *("ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe_text", "eurobert", "evolla", "exaone"),
            *("exaone4", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "glm4v_text"),
            *("glm_moe_dsa", "glm_ocr_text", "gpt_oss", "granite_docling_text", "granite_swa"),
            *("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "hy_v3", "internlm3"),
            *("iquestcoder", "kimi_linear", "llama4_text", "llama_meta", "longcat_flash"),
            *("mimo_v2_flash", "minicpm3", "minimax", "ministral3", "mistral_large4_text", "mixtral"),
            *("mllama_text_model", "olmo2", "olmo3", "olmoe", "paddleocr_vl_text", "phi3"),
            *("higgs_audio_v2", "phi4_multimodal", "qwen2_5_vl_text", "qwen2_vl_text", "solar_open", "zaya"),
        ),
    ),
    (
        NormSpec("norm", "rms_norm_eps", 1e-06, kind="rms"),
        (
            *("aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "deepseek_ocr2_text"),
            *("deepseek_v2", "deepseek_v3", "deepseek_v32", "doge", "dots1", "flex_olmo", "flint"),
            *("gemma4_text", "gemma4_unified_text", "granite", "granite4_vision_text", "granitemoe"),
            *("granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hyperclovax", "inkling_text"),
            *("jetmoe", "kolibri1", "laguna", "lara_mini", "llama", "mellum", "minimax_m2"),
            *("ministral", "mistral", "mistral4", "molmo2_text", "olmo_hybrid", "qwen2"),
            *("qwen2_5_omni_text", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_omni_moe_text"),
            *("qwen3_vl_moe_text", "qwen3_vl_text", "sarvam_mla", "sarvam_moe", "seed_oss", "smollm3"),
            *("ultrabert", "unlimited_ocr_text", "youtu"),
        ),
    ),
    (
        NormSpec("norm", "rms_norm_eps", 1e-06, kind="rms_offset"),
        (
            *("gemma", "gemma2", "gemma3_text", "minimax_m3_vl_text", "qwen3_5_moe_text"),
            *("qwen3_5_text", "qwen3_next", "vaultgemma"),
        ),
    ),
    (
        NormSpec("ln_f", "layer_norm_epsilon", 1e-05),
        ("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj"),
    ),
    (
        NormSpec("decoder.layer_norm", None, 1e-05),
        ("blenderbot", "m2m_100", "mbart", "nllb-moe", "pegasus", "pegasus_x"),
    ),
    (
        NormSpec("layer_norm", None, 1e-05),
        (
            *("biogpt", "musicgen_decoder", "musicgen_melody_decoder"),
            *("seamless_m4t", "seamless_m4t_v2", "whisper", "xglm"),
        ),
    ),
    (NormSpec("layernorm_final", None, 1e-05), ("fine_acoustics",)),
    (NormSpec("layernorm_final", None, 1e-05, bias=("bias", True)), ("coarse_acoustics", "semantic")),
    (NormSpec("backbone_model.norm", "rms_norm_eps", 1e-05, kind="rms"), ("csm",)),
    (NormSpec("decoder.norm", "norm_eps", 1e-05, kind="rms"), ("dia_decoder",)),
    (
        NormSpec("decoder.final_layer_norm", "layer_norm_epsilon", 1e-06, kind="rms"),
        ("longt5", "mt5", "switch_transformers", "t5", "umt5"),
    ),
    (NormSpec("final_layernorm", "rms_norm_eps", 1e-05, kind="rms"), ("bamba", "falcon_h1", "zamba", "zamba2")),
    (NormSpec("norm_f", "layer_norm_epsilon", 1e-05, kind="rms"), ("falcon_mamba", "mamba", "mamba2", "nemotron_h")),
    (NormSpec("norm", "layer_norm_eps", 1e-05, bias=False), ("cohere", "cohere2", "cohere_compass_text")),
    (NormSpec("embedding_norm", "norm_eps", 1e-05, kind="rms"), ("lfm2", "lfm2_moe", "lfm3")),
    (NormSpec("final_layer_norm", "layer_norm_eps", 1e-05), ("gpt_neox", "gpt_neox_japanese")),
    (NormSpec("final_layernorm", "layer_norm_eps", 1e-05), ("persimmon", "phi")),
    (NormSpec("layer_norm", "layer_norm_eps", 1e-05), ("kosmos_2_5_text_model", "kosmos_2_text_model")),
    (NormSpec("norm", "layer_norm_eps", 1e-05), ("jais2", "stablelm")),
    (NormSpec("final_norm", "norm_eps", 1e-05, bias=False), ("modernbert", "modernbert-decoder")),
    (NormSpec("norm", "rms_norm_eps", 1.5625e-07, kind="rms"), ("glm", "glm4")),
    (NormSpec("norm", "rms_norm_eps", 1e-08, kind="rms"), ("helium", "kyutai_speech_to_text", "moshi")),
    (NormSpec("norm", None, 1e-05, kind="rms"), ("muse_glimmer_text", "muse_spark_text")),
    (NormSpec("decoder.norm", "rms_norm_eps", 1e-06, kind="rms_offset"), ("t5_gemma_module", "t5gemma2_decoder")),
    (NormSpec("decoder.layernorm_embedding", None, 1e-05), ("bigbird_pegasus",)),
    (NormSpec("encoder.LayerNorm", "layer_norm_eps", 1e-05), ("xlm-roberta-xl",)),
    (NormSpec("encoder.emb_layer_norm_after", "layer_norm_eps", 1e-12), ("esm",)),
    (NormSpec("encoder.ln", "layer_norm_eps", 1e-12), ("megatron-bert",)),
    (NormSpec("final_layer_norm", None, 1e-05), ("opt",)),
    (NormSpec("layernorm", "layer_norm_epsilon", 1e-06), ("ctrl",)),
    (NormSpec("norm", "norm_epsilon", 1e-05), ("starcoder2",)),
    (NormSpec("norm", "rms_norm_eps", 1e-05), ("phimoe",)),
    (NormSpec("roberta_prelayernorm.LayerNorm", "layer_norm_eps", 1e-12), ("roberta-prelayernorm",)),
    (NormSpec("norm", None, 1e-05, bias=False), ("esmc",)),
    (NormSpec("norm_f", "layer_norm_epsilon", 1e-05, bias=False), ("mpt",)),
    (NormSpec("norm_f", None, 1e-05, bias=False), ("dbrx",)),
    (NormSpec("norm", None, 1e-05, kind="layer_plain"), ("olmo",)),
    (NormSpec("final_layernorm", "rms_norm_eps", 1e-06, kind="rms"), ("jamba",)),
    (NormSpec("out_norm", "norm_eps", 1e-06, kind="rms"), ("xlstm",)),
    (NormSpec("norm", "rms_norm_eps", 1e-06, kind="rms_plain"), ("nanochat",)),
    (NormSpec("final_norm", "rms_norm_eps", 1e-06, kind="rms_offset"), ("recurrent_gemma",)),
    (NormSpec("norm", "rms_norm_eps", 1e-05, kind="rms_offset"), ("step3p5",)),
)

FINAL_NORMS: Mapping[str, NormSpec | None] = {
    **dict.fromkeys(_WITHOUT),
    **{model_type: spec for spec, model_types in _SPECS for model_type in model_types},
}
"""Model type -> its final norm; `None` for a type without one. `name` is where the norm is, seen from a module around
the token table: the innermost one that has it."""


def final_norm_module(name: str, table: str, tensors: Collection[str]) -> str | None:
    """Return the full name of the module `name` of a final norm; `None` if the checkpoint has no such module.

    It is looked for in the modules around the token table, from the innermost one, so no norm of another part (a block,
    a vision tower) is taken for it.
    """
    parts = table.split(".")
    around = ["".join(f"{part}." for part in parts[:count]) for count in range(len(parts) - 1, -1, -1)]
    return next((f"{prefix}{name}" for prefix in around if f"{prefix}{name}.weight" in tensors), None)
