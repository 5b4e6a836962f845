"""Records of decoder-only language models, and the keys of `params.json` in Meta's layout."""

from collections.abc import Mapping
from dataclasses import replace

from embedlayer.families.field_types import Names
from embedlayer.families.records import (
    META_LLAMA,
    SQRT_DIM,
    SQRT_DIM_BFLOAT16,
    SQRT_DIM_IF_SCALE_EMBEDDING,
    SQRT_DIM_ROUNDED,
    STATE_POSITIONS,
    AlibiPositions,
    CountedRows,
    Factor,
    Family,
    HeadSpec,
    LearnedPositions,
    LinearSpec,
    NormSpec,
    OtherTable,
    PerLayerSpec,
    PositionChoice,
    ShiftSpec,
    SinusoidalPositions,
)

_DECODER_TENSORS = {
    "table.weight": ("model.embed_tokens.weight", "tok_embeddings.weight"),
    "blocks.{}.attention_norm.weight": ("input_layernorm.weight", "attention_norm.weight"),
    "blocks.{}.attention.query.weight": ("self_attn.q_proj.weight", "attention.wq.weight"),
    "blocks.{}.attention.key.weight": ("self_attn.k_proj.weight", "attention.wk.weight"),
    "blocks.{}.attention.value.weight": ("self_attn.v_proj.weight", "attention.wv.weight"),
    "blocks.{}.attention.out.weight": ("self_attn.o_proj.weight", "attention.wo.weight"),
    "blocks.{}.mlp_norm.weight": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "blocks.{}.mlp.gate.weight": ("mlp.gate_proj.weight", "feed_forward.w1.weight"),
    "blocks.{}.mlp.up.weight": ("mlp.up_proj.weight", "feed_forward.w3.weight"),
    "blocks.{}.mlp.down.weight": ("mlp.down_proj.weight", "feed_forward.w2.weight"),
    "norm.weight": ("model.norm.weight", "norm.weight"),
    "head.weight": ("lm_head.weight", "output.weight"),
}
"""Tensor names of `DecoderLM`; in transformers' `LlamaForCausalLM` and in Meta's LLaMA, those of blocks in a block."""

HUGGING_FACE_TENSORS: Mapping[str, str] = {
    ours: f"model.layers.{{}}.{theirs}" if "{}" in ours else theirs for ours, (theirs, _) in _DECODER_TENSORS.items()
}
"""Tensor names of `DecoderLM`, and the names in transformers' `LlamaForCausalLM`."""

META_TENSORS: Mapping[str, str] = {
    ours: f"layers.{{}}.{theirs}" if "{}" in ours else theirs for ours, (_, theirs) in _DECODER_TENSORS.items()
}
"""Tensor names of `DecoderLM`, and the names in Meta's LLaMA checkpoints. Their rotary pairs are interleaved."""


_CAPPED = (("final_logit_softcapping", 30.0),)
_LLAMA = Family("llama", ("llama",), table=("embed_tokens.weight",), position="rotary", decoder=HUGGING_FACE_TENSORS)
_ROTARY = _LLAMA.like("", decoder=None)
"""Families like LLaMA, whose decoder is not read: unscaled rows, rotary positions, and a head without a bias."""

_MUSE = _ROTARY.like(
    "muse_glimmer",
    "muse_glimmer_text",
    recipe=("norm",),
    norm=NormSpec("", "rms_norm_eps", 1e-5, kind="rms_plain"),
    head=HeadSpec(
        logit_scale=Factor("output_multiplier", default=0.19611613513818404), softcap="final_logit_softcapping"
    ),
    defaults=(("final_logit_softcapping", 20.0),),
)
_GEMMA = _ROTARY.like("", scale=SQRT_DIM_ROUNDED, head=HeadSpec(softcap="final_logit_softcapping", tied=True))
_GPT2 = Family(
    "gpt2",
    ("gpt2", "gpt-sw3"),
    table=("wte.weight",),
    position=LearnedPositions(("wpe.weight",)),
    recipe=("position", "types"),
    types="table",
    head=HeadSpec(tied=True),
)
_GRANITE = _ROTARY.like(
    "granite",
    *("granite", "granitemoe", "granitemoeshared", "granitemoe_swa", "granite4_vision_text"),
    scale=Factor("embedding_multiplier", default=1.0),
    head=HeadSpec(logit_scale=Factor(per="logits_scaling", default=1.0)),
)
_INKLING_HEAD = HeadSpec(
    ("lm_head.weight", "llm.unembed.weight"), rows=CountedRows("unpadded_vocab_size"), tied="never"
)
_INKLING = _ROTARY.like(
    "inkling",
    "inkling_text",
    table=("embed_tokens.weight", "embed.weight"),
    position=None,
    recipe=("norm",),
    norm=NormSpec("embed_norm", "rms_norm_eps", 1e-6, kind="rms"),
    head=replace(_INKLING_HEAD, logit_scale=Factor(per="logits_mup_width_multiplier", default=1 / 24)),
    notes=(STATE_POSITIONS,),
)
_KOSMOS_2 = Family(
    "kosmos-2",
    ("kosmos_2_text_model",),
    table=("embed_tokens.weight",),
    width=("embed_dim",),
    scale=SQRT_DIM_IF_SCALE_EMBEDDING,
    position=SinusoidalPositions(),
    numbering="ids",
    recipe=("position",),
    head=HeadSpec(tied=True),
    defaults=(("scale_embedding", True),),
)

CAUSAL_FAMILIES: tuple[Family, ...] = (
    # LLaMA and the families that differ from it in the names of tensors or in the tying.
    _LLAMA,
    _LLAMA.like("mistral"),
    _ROTARY.like(
        META_LLAMA,
        table=("tok_embeddings.weight",),
        aliases=(
            ("dim", "hidden_size"),
            ("n_heads", "num_attention_heads"),
            ("n_kv_heads", "num_key_value_heads"),
            ("n_layers", "num_hidden_layers"),
            ("norm_eps", "rms_norm_eps"),
        ),
        head=HeadSpec(("output.weight",)),
        decoder=META_TENSORS,
    ),
    _ROTARY.like("qwen2"),
    _ROTARY.like(
        "",
        *("apertus", "arcee", "aria_text", "axk1", "axk2", "bamba", "bitnet", "cosmos3_edge_text", "cwm"),
        *("deepseek_ocr2_text", "deepseek_v2", "deepseek_v3", "deepseek_v32", "diffllama", "doge", "dots1"),
        *("dots3_note_text", "emu3_text_model", "evolla", "exaone4"),
        *("exaone_moe", "flex_olmo", "flint", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text"),
        *("glm4v_text", "glm_moe_dsa", "glm_ocr_text", "gpt_oss", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe"),
        *("hy_v3", "hy_v4", "internlm3", "iquestcoder", "jais2", "kolibri1", "laguna", "llama4_text"),
        *("longcat_flash", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral"),
        *("ministral3", "mistral4", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe"),
        *("persimmon", "phi3", "phi4_multimodal", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_text", "qwen3_vl_text"),
        *("hy_v4_vl_text", "sarvam_mla", "seed_oss", "solar_open", "stablelm", "step3p5", "unlimited_ocr_text"),
    ),
    _ROTARY.like(
        "",
        *("ernie4_5", "ernie4_5_vl_moe_text", "hunyuan_vl_text", "jetmoe", "lara_mini", "lfm3", "paddleocr_vl_text"),
        *("qwen2_5_omni_text", "qwen3_vl_moe_text", "smollm3", "starcoder2", "voxtral_realtime_text", "youtu"),
        head=HeadSpec(tied=True),
    ),
    _ROTARY.like(
        "", *("lfm2", "lfm2_moe"), aliases=(("tie_embedding", "tie_word_embeddings"),), head=HeadSpec(tied=True)
    ),
    _ROTARY.like("", *("bailing_hybrid", "sarvam_moe"), table=("embed_tokens.weight", "word_embeddings.weight")),
    _ROTARY.like("exaone", table=("embed_tokens.weight", "wte.weight"), aliases=(("num_layers", "num_hidden_layers"),)),
    _ROTARY.like("apertus1p5", "apertus1p5_text", head=HeadSpec(rows=CountedRows("output_vocab_size"))),
    _ROTARY.like(
        "deepseek_v4",
        table=("embed_tokens.weight", "embed.weight"),
        head=HeadSpec(("lm_head.weight", "head.weight")),
        other_tables=(OtherTable("gate.tid2eid", "it states the experts of each token in blocks that hash"),),
    ),
    _ROTARY.like("dbrx", table=("wte.weight",)),
    _ROTARY.like("openai_privacy_filter", head=None),
    _ROTARY.like("glm_image", "glm_image_text", head=HeadSpec(rows=CountedRows("vision_vocab_size"), tied="never")),
    _ROTARY.like(
        "falcon",
        table=("word_embeddings.weight",),
        position=PositionChoice("alibi", ((True, AlibiPositions(is_divided=True)),), otherwise="rotary"),
        head=HeadSpec(tied=True),
    ),
    _ROTARY.like("gpt_neox", table=("embed_in.weight",), head=HeadSpec(("embed_out.weight", "lm_head.weight"))),
    _ROTARY.like("gpt_neox_japanese", table=("embed_in.weight",), head=HeadSpec(("embed_out.weight",), tied=True)),
    _ROTARY.like(
        "zamba2", position=PositionChoice("use_mem_rope", ((True, "rotary"),), otherwise=None), head=HeadSpec(tied=True)
    ),
    _ROTARY.like("mllama", "mllama_text_model", extra_rows=8, head=HeadSpec(tied="never")),
    _ROTARY.like(
        "qwen4_exp",
        "qwen4_exp_text",
        other_tables=(
            OtherTable("ngram_embedding.shard_0.weight", "first shard of a hashed n-gram table, which one block adds"),
        ),
    ),
    # Heads with a bias.
    _ROTARY.like("phi", head=HeadSpec(bias=("lm_head.bias",))),
    _ROTARY.like("phimoe", head=HeadSpec(bias=("lm_head.bias",), has_bias=("lm_head_bias", False))),
    _ROTARY.like("ernie4_5_moe", head=HeadSpec(bias=("lm_head.bias",), has_bias=("use_bias", False), tied=True)),
    _GPT2.like(
        "gptj", *("gptj", "codegen"), position="rotary", recipe=("types",), head=HeadSpec(bias=("lm_head.bias",))
    ),
    _ROTARY.like(
        "zaya",
        recipe=("norm",),
        norm=ShiftSpec(("input_hidden_states_bias",), ("input_hidden_states_scale",)),
        head=HeadSpec(bias=("lm_head.bias",), has_bias=("lm_head_bias", False), tied=True),
    ),
    # Rows or logits with a factor or a cap.
    _ROTARY.like("gemma", scale=SQRT_DIM_ROUNDED, head=HeadSpec(tied=True)),
    _GEMMA.like("gemma2", defaults=_CAPPED),
    _GEMMA.like(
        "gemma3",
        "gemma3_text",
        defaults=(
            ("head_dim", 256),
            ("rope_theta", 1_000_000.0),
            ("rope_local_base_freq", 10_000.0),
            ("sliding_window_pattern", 6),
        ),
    ),
    _GEMMA.like("gemma3n", "gemma3n_text", defaults=_CAPPED, per_layer=PerLayerSpec(missing_row=0, round_scales=True)),
    _GEMMA.like("gemma4", "gemma4_text", per_layer=PerLayerSpec()),
    _GEMMA.like("gemma4_unified", "gemma4_unified_text"),
    _GEMMA.like(
        "embedding_gemma2",
        "embedding_gemma2_text",
        head=None,
        notes=("each block also gets a projection of the input, which is no part of this layer.",),
    ),
    _GEMMA.like("vaultgemma", defaults=_CAPPED),
    _ROTARY.like(
        "recurrent_gemma",
        scale=SQRT_DIM_BFLOAT16,
        head=HeadSpec(softcap="logits_soft_cap", tied=True),
        defaults=(("logits_soft_cap", 30.0),),
    ),
    _ROTARY.like(
        "",
        *("cohere", "cohere2", "cohere2_moe"),
        head=HeadSpec(logit_scale=Factor("logit_scale", default=1.0), tied=True),
        defaults=(("logit_scale", 0.0625),),
    ),
    _ROTARY.like(
        "cohere_compass",
        "cohere_compass_text",
        head=HeadSpec(logit_scale=Factor("logit_scale", default=1.0), tied=True),
    ),
    _GRANITE,
    _GRANITE.like("granite_swa", head=HeadSpec(logit_scale=Factor(per="logits_scaling", default=1.0), tied=True)),
    _GRANITE.like(
        "granitemoehybrid", position=PositionChoice("position_embedding_type", (("rope", "rotary"),), otherwise=None)
    ),
    _ROTARY.like(
        "granite_docling",
        "granite_docling_text",
        scale=Factor("embedding_multiplier", default=12.0),
        head=HeadSpec(logit_scale=Factor(per="logits_scaling", default=0.25), tied=True),
    ),
    _GRANITE.like("hyperclovax", head=HeadSpec(logit_scale=Factor("logits_scaling", default=1.0))),
    _GRANITE.like("falcon_h1", head=HeadSpec(logit_scale=Factor("lm_head_multiplier"))),
    _ROTARY.like(
        "minicpm3",
        scale=Factor("scale_emb"),
        head=HeadSpec(
            logit_scale=Factor("dim_model_base", per="hidden_size", default=1.0), scales_hidden=True, tied=True
        ),
        defaults=(("scale_emb", 12), ("dim_model_base", 256)),
    ),
    _ROTARY.like("afmoe", scale=Factor("sqrt_dim", only_if=("mup_enabled",))),
    _ROTARY.like("beam", head=HeadSpec(softcap="final_logit_softcapping"), defaults=_CAPPED),
    # A norm or a shift of the rows.
    _ROTARY.like(
        "nanochat",
        recipe=("norm",),
        norm=NormSpec("", "rms_norm_eps", 1e-6, kind="rms_plain"),
        head=HeadSpec(softcap="final_logit_softcapping"),
        defaults=(("final_logit_softcapping", 15.0),),
    ),
    _MUSE,
    _MUSE.like(
        "muse_spark",
        "muse_spark_text",
        head=HeadSpec(
            logit_scale=Factor("output_multiplier", default=0.1767766952966369), softcap="final_logit_softcapping"
        ),
    ),
    _INKLING,
    _INKLING.like(
        "inkling2",
        "inkling2_text",
        head=replace(_INKLING_HEAD, softcap="final_logit_softcapping"),
        defaults=_CAPPED,
    ),
    _ROTARY.like(
        "hrm_text", scale=Factor("embedding_scale", default=50.0), recipe=("norm",), norm=ShiftSpec(("z_L_init",))
    ),
    Family(
        "modernbert-decoder",
        ("modernbert-decoder",),
        table=("tok_embeddings.weight",),
        position="rotary",
        recipe=("norm",),
        norm=NormSpec("embeddings.norm", "norm_eps", 1e-5, bias=("norm_bias", False)),
        head=HeadSpec(
            ("decoder.weight",),
            bias=("decoder.bias",),
            has_bias=("decoder_bias", True),
            dense=LinearSpec("lm_head.dense", bias=("classifier_bias", False)),
            activation="classifier_activation",
            norm=NormSpec("lm_head.norm", "norm_eps", 1e-5, bias=("norm_bias", False)),
            tied=True,
        ),
    ),
    # No positions.
    _ROTARY.like("", *("glm5_next_text", "jamba", "kimi_linear"), position=None),
    _ROTARY.like("zamba", position=None, head=HeadSpec(tied=True)),
    _ROTARY.like("", *("mamba", "falcon_mamba"), table=("embeddings.weight",), position=None, head=HeadSpec(tied=True)),
    _ROTARY.like("", *("mamba2", "nemotron_h"), table=("embeddings.weight", "embed_tokens.weight"), position=None),
    _ROTARY.like("rwkv", table=("embeddings.weight",), position=None, head=HeadSpec(("head.weight",))),
    _ROTARY.like(
        "xlstm",
        table=("embeddings.weight",),
        position=None,
        head=HeadSpec(softcap="output_logit_soft_cap"),
        defaults=(("output_logit_soft_cap", 30.0),),
    ),
    # Positions added to the input.
    _GPT2,
    _GPT2.like("", *("gpt_bigcode", "gpt_neo")),
    _GPT2.like("imagegpt", head=HeadSpec()),
    _GPT2.like("openai-gpt", table=("tokens_embed.weight",), position=LearnedPositions(("positions_embed.weight",))),
    Family(
        "opt",
        ("opt",),
        table=("decoder.embed_tokens.weight", "embed_tokens.weight"),
        width=("word_embed_proj_dim", "hidden_size"),
        position=LearnedPositions(("embed_positions.weight",), offset=2),
        numbering="mask",
        recipe=("project", "position"),
        projection=LinearSpec("project_in", bias=False),
        head=HeadSpec(dense=LinearSpec("project_out", bias=False, optional=True), tied=True),
    ),
    Family(
        "biogpt",
        ("biogpt",),
        table=("embed_tokens.weight",),
        scale=Factor("sqrt_dim", only_if=("scale_embedding",), otherwise=True),
        position=LearnedPositions(("embed_positions.weight",), offset=2),
        recipe=("position",),
        head=HeadSpec(("output_projection.weight",), tied=True),
    ),
    Family(
        "git",
        ("git",),
        table=("embeddings.word_embeddings.weight",),
        position=LearnedPositions(("embeddings.position_embeddings.weight",)),
        recipe=("position", "norm"),
        norm=NormSpec("embeddings.LayerNorm"),
        head=HeadSpec(("output.weight",), bias=("output.bias",)),
    ),
    _GPT2.like(
        "ctrl",
        table=("w.weight",),
        scale=SQRT_DIM,
        position=SinusoidalPositions(after_padding=False),
        head=HeadSpec(bias=("lm_head.bias",), tied=True),
    ),
    Family(
        "xglm",
        ("xglm",),
        table=("embed_tokens.weight",),
        scale=SQRT_DIM_IF_SCALE_EMBEDDING,
        position=SinusoidalPositions(offset=2),
        recipe=("position",),
        head=HeadSpec(tied=True),
        defaults=(("scale_embedding", True),),
    ),
    _KOSMOS_2,
    _KOSMOS_2.like("kosmos-2.5", "kosmos_2_5_text_model", recipe=("types", "position"), types=("segment_emb.weight",)),
    # A bias on attention.
    Family(
        "bloom",
        ("bloom",),
        table=("word_embeddings.weight",),
        position=AlibiPositions(),
        recipe=("norm",),
        norm=NormSpec("word_embeddings_layernorm", "layer_norm_epsilon", 1e-5),
        head=HeadSpec(tied=True),
    ),
    Family("mpt", ("mpt",), table=("wte.weight",), position=AlibiPositions(), head=HeadSpec(tied=True)),
)
"""Families whose input is one token table, grouped by what they compute beside LLaMA."""

REFUSED_CAUSAL: Mapping[str, str] = {
    "blt": "its input is the sum of a row for each byte and of rows for hashes of the bytes before it",
    "clvp_decoder": "it speaks codes, and is a part of a model that also reads text",
    "dory": "its head multiplies each logit by a learned number of its token",
    "inkling2_loop_text": "some of its blocks run several times in a pass, so its positions could not be compared",
    "cpmant": "it puts rows of prompts in front of the text, and adds a segment to every token",
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "its first block receives hidden states of another model, which drafts tokens with it",
    ),
}
"""Model type -> why its input or its head is not that of one table, the middle of a sentence."""

META_PARAMS: Names = (
    *("dim", "n_heads", "n_kv_heads", "n_layers", "head_dim", "norm_eps", "vocab_size", "tied_embeddings"),
    *("rope", "rope_theta", "yarn", "llama_4_scaling", "sliding_window", "quantization"),
)
"""Keys of `params.json` in Meta's layout that are read, as Meta, Mistral and llama2.c write them.

A key outside these lists that has a value may change the model, so the reader refuses it by name.
"""

BLOCK_PARAMS: Names = (
    *("hidden_dim", "multiple_of", "ffn_dim_multiplier", "moe"),
    *("max_seq_len", "seq_len", "max_position_embeddings", "max_batch_size", "ragged_attention"),
    *("format", "tied", "vision_encoder"),
)
"""Keys of the MLPs in blocks, of lengths that no tensor has, and of images, whose vectors replace those of tokens."""

FIXED_PARAMS: Mapping[str, tuple[object, ...]] = {
    "activation": ("silu",),
    "causal": (True,),
    "model_type": ("transformer",),
    "use_scaled_rope": (False,),
}
"""Key -> values of it that change nothing; other values are refused."""

YARN_PARAMS: Mapping[str, str] = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
"""Key of Mistral's `yarn` -> the common key of the same meaning."""

QUERY_PARAMS: Names = ("beta", "original_max_position_embeddings")
"""Keys of Mistral's `llama_4_scaling`."""

MISTRAL_BASES = {"with a window": 10_000.0, "without a window": 1_000_000.0}
"""Base of the rotary frequencies that Mistral's code uses if `params.json` states none, by its `sliding_window`."""
