"""Token IDs that transformers' configuration classes name by default, for configurations that leave them out."""

from collections.abc import Mapping

_DEFAULTS: tuple[tuple[str, int | tuple[int, ...], str], ...] = (
    ("audio_bos_token_id", 2048, "kyutai_speech_to_text"),
    ("audio_bos_token_id", 128013, "higgs_audio_v2"),
    ("audio_delay_token_id", 128014, "higgs_audio_v2"),
    ("audio_eos_token_id", 128003, "csm"),
    ("audio_pad_token_id", 69569, "kyutai_speech_to_text"),
    ("audio_token_id", 128002, "csm"),
    ("audio_token_id", 128016, "higgs_audio_v2"),
    ("begin_suppress_tokens", (220, 50256), "whisper"),
    (
        "bos_token_id",
        0,
        "altclip_text_model bart biogpt bridgetower_text_model camembert chinese_clip_text_model clap_text_model "
        "convbert data2vec-text deepseek_v3 deepseek_v32 deepseek_v4 esmc exaone4 falcon_mamba flaubert fsmt "
        "glm4_moe_lite glm_moe_dsa gpt_neox ibert jais2 jina_embeddings_v3 kosmos_2_5_text_model kosmos_2_text_model "
        "led longformer luke m2m_100 mamba mamba2 mbart mpnet mra mvp nanochat nllb-moe nystromformer plbart roberta "
        "roberta-prelayernorm rwkv sarvam_mla seed_oss speech_to_text speecht5 stablelm trocr unlimited_ocr_text "
        "visual_bert xclip_text_model xglm xlm xlm-roberta xlm-roberta-xl xlstm xmod yoso",
    ),
    (
        "bos_token_id",
        1,
        "apertus apertus1p5_text aria_text bamba big_bird blenderbot blenderbot-small bloom cosmos3_edge_text "
        "deepseek_ocr2_text deepseek_v2 diffllama ernie4_5 ernie4_5_moe exaone exaone_moe falcon_h1 fnet granite "
        "granite4_vision_text granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium higgs_audio_v2 "
        "hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text hyperclovax inkling_text internlm3 iquestcoder jamba jetmoe "
        "lfm2 lfm2_moe llama llama4_text longcat_flash mimo_v2_flash minicpm3 minimax ministral ministral3 mistral "
        "mistral4 mixtral moonshine moonshine_streaming nemotron_h paddleocr_vl_text persimmon phi phi3 phimoe "
        "prophetnet voxtral_realtime_text xlnet zamba zamba2",
    ),
    (
        "bos_token_id",
        2,
        "albert bert-generation bigbird_pegasus embedding_gemma2_text gemma gemma2 gemma3_text gemma3n_text "
        "gemma4_text gemma4_unified_text nemotron opt recurrent_gemma seamless_m4t seamless_m4t_v2 t5gemma vaultgemma "
        "zaya",
    ),
    ("bos_token_id", 4, "cohere_asr"),
    ("bos_token_id", 5, "cohere cohere2 cohere2_moe cohere_compass_text"),
    ("bos_token_id", 11, "falcon"),
    ("bos_token_id", 101, "git"),
    ("bos_token_id", 312, "rembert"),
    ("bos_token_id", 2048, "musicgen_decoder musicgen_melody_decoder"),
    ("bos_token_id", 30522, "blip_text_model"),
    ("bos_token_id", 31996, "gpt_neox_japanese"),
    ("bos_token_id", 48000, "kyutai_speech_to_text"),
    (
        "bos_token_id",
        49406,
        "clip_text_model clipseg_text_model groupvit_text_model metaclip_2_text_model owlv2_text_model "
        "owlvit_text_model siglip2_text_model siglip_text_model",
    ),
    ("bos_token_id", 50256, "codegen gpt-sw3 gpt2 gpt_bigcode gpt_neo gptj starcoder2 whisper"),
    ("bos_token_id", 50281, "modernbert modernbert-decoder"),
    ("bos_token_id", 100257, "granite_docling_text granite_swa"),
    ("bos_token_id", 120000, "hy_v4 hy_v4_vl_text"),
    ("bos_token_id", 124894, "lfm3"),
    ("bos_token_id", 128000, "arcee bitnet csm cwm eurobert evolla mllama_text_model smollm3 youtu"),
    ("bos_token_id", 151643, "dots3_note_text qwen2_5_vl_text qwen2_vl_text"),
    ("bos_token_id", 151849, "emu3_text_model"),
    ("bos_token_id", 163584, "kimi_linear"),
    ("bos_token_id", 163691, "axk1 axk2"),
    ("bos_token_id", 199999, "phi4_multimodal"),
    ("bos_token_id", 200000, "muse_glimmer_text muse_spark_text"),
    ("bos_token_id", 200034, "minimax_m2 minimax_m3_vl_text"),
    ("cls_token_id", 50281, "modernbert modernbert-decoder"),
    ("decoder_start_token_id", 0, "mt5 pegasus pegasus_x prophetnet umt5"),
    ("decoder_start_token_id", 1, "blenderbot blenderbot-small moonshine"),
    (
        "decoder_start_token_id",
        2,
        "bart bigbird_pegasus fsmt led m2m_100 mvp nllb-moe speech_to_text speecht5 trocr xglm",
    ),
    ("decoder_start_token_id", 3, "seamless_m4t seamless_m4t_v2"),
    ("decoder_start_token_id", 50257, "whisper"),
    ("decoder_start_token_id", 58100, "marian"),
    ("eod_token_id", 3, "hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text"),
    ("eos_token_id", 0, "falcon_mamba mamba marian rwkv stablelm"),
    (
        "eos_token_id",
        1,
        "bert-generation bigbird_pegasus deepseek_v3 deepseek_v32 deepseek_v4 embedding_gemma2_text flaubert gemma "
        "gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm4_moe_lite glm_moe_dsa longt5 mt5 "
        "nanochat pegasus pegasus_x pop2piano recurrent_gemma sarvam_mla sarvam_moe switch_transformers t5 t5gemma "
        "umt5 unlimited_ocr_text vaultgemma xlm",
    ),
    (
        "eos_token_id",
        2,
        "altclip_text_model apertus apertus1p5_text aria_text bamba bart big_bird biogpt blenderbot blenderbot-small "
        "blip_text_model bloom bridgetower_text_model camembert clap_text_model convbert data2vec-text "
        "deepseek_ocr2_text deepseek_v2 diffllama ernie4_5 ernie4_5_moe esm esmc exaone4 falcon_h1 fnet fsmt gpt_neox "
        "granite granite4_vision_text granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium "
        "hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text hyperclovax ibert inkling_text internlm3 iquestcoder jamba "
        "jetmoe jina_embeddings_v3 kosmos_2_5_text_model kosmos_2_text_model led lfm2 lfm2_moe llama llama4_text "
        "longcat_flash longformer luke m2m_100 mamba2 mbart minicpm3 minimax ministral ministral3 mistral mistral4 "
        "mixtral moonshine moonshine_streaming mpnet mra mvp nemotron_h nllb-moe nystromformer opt paddleocr_vl_text "
        "persimmon phi phimoe plbart prophetnet reformer roberta roberta-prelayernorm seed_oss speech_to_text "
        "speecht5 trocr visual_bert voxtral_realtime_text xclip_text_model xglm xlm-roberta xlm-roberta-xl xlnet "
        "xlstm xmod yoso zamba zamba2",
    ),
    ("eos_token_id", 3, "albert cohere_asr nemotron seamless_m4t seamless_m4t_v2"),
    ("eos_token_id", 11, "cosmos3_edge_text falcon"),
    ("eos_token_id", 53, "exaone_moe"),
    ("eos_token_id", 102, "git"),
    ("eos_token_id", 106, "zaya"),
    ("eos_token_id", 313, "rembert"),
    ("eos_token_id", 361, "exaone"),
    ("eos_token_id", 16385, "glm_image_text"),
    ("eos_token_id", 31999, "gpt_neox_japanese"),
    ("eos_token_id", 32000, "phi3"),
    (
        "eos_token_id",
        49407,
        "aimv2_text_model clip_text_model clipseg_text_model groupvit_text_model metaclip_2_text_model "
        "owlv2_text_model owlvit_text_model siglip2_text_model siglip_text_model",
    ),
    ("eos_token_id", 50256, "codegen gpt-sw3 gpt2 gpt_bigcode gpt_neo gptj starcoder2 whisper"),
    ("eos_token_id", 50279, "olmo olmo2 olmo3 olmoe"),
    ("eos_token_id", 50282, "modernbert modernbert-decoder"),
    ("eos_token_id", 100257, "flex_olmo granite_docling_text granite_swa olmo_hybrid"),
    ("eos_token_id", 120025, "hy_v4 hy_v4_vl_text"),
    ("eos_token_id", 124900, "lfm3"),
    ("eos_token_id", 128001, "arcee bitnet eurobert mllama_text_model smollm3 youtu"),
    ("eos_token_id", (128001, 128008, 128009), "cwm"),
    ("eos_token_id", 128009, "evolla higgs_audio_v2"),
    ("eos_token_id", 150024, "jais2"),
    ("eos_token_id", (151329, 151336, 151338), "glm glm4"),
    ("eos_token_id", 151643, "lara_mini"),
    ("eos_token_id", 151645, "qwen2_5_vl_text qwen2_vl_text"),
    ("eos_token_id", 151668, "dots3_note_text"),
    ("eos_token_id", 151850, "emu3_text_model"),
    ("eos_token_id", 156895, "bailing_hybrid"),
    ("eos_token_id", 163586, "kimi_linear"),
    ("eos_token_id", 163691, "axk1 axk2"),
    ("eos_token_id", 199999, "openai_privacy_filter"),
    ("eos_token_id", (199999, 200020), "phi4_multimodal"),
    ("eos_token_id", 200001, "muse_glimmer_text muse_spark_text"),
    ("eos_token_id", 200006, "inkling2_text"),
    ("eos_token_id", 200020, "minimax_m2 minimax_m3_vl_text"),
    ("eos_token_id", 255001, "cohere cohere2 cohere2_moe cohere_compass_text"),
    ("forced_eos_token_id", 0, "marian"),
    ("forced_eos_token_id", 1, "pegasus pegasus_x"),
    ("forced_eos_token_id", 2, "bart blenderbot blenderbot-small fsmt mbart plbart"),
    ("mask_index", 5, "flaubert xlm"),
    ("mask_token_id", 0, "flaubert xlm"),
    ("mask_token_id", 32, "esmc"),
    ("mask_token_id", 128002, "eurobert"),
    (
        "pad_token_id",
        0,
        "albert align_text_model bamba bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small "
        "blip_text_model bros chinese_clip_text_model cohere cohere2 cohere2_moe cohere_compass_text "
        "cosmos3_edge_text deberta deberta-v2 distilbert dpr electra embedding_gemma2_text ernie ernie4_5 "
        "ernie4_5_moe exaone exaone_moe falcon_h1 falcon_mamba flava_text_model gemma gemma2 gemma3_text gemma3n_text "
        "gemma4_text gemma4_unified_text git hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text jamba layoutlm lfm2 "
        "lfm2_moe lilt longt5 mamba megatron-bert mobilebert moonshine_streaming mt5 nemotron_h nomic_bert "
        "owlv2_text_model owlvit_text_model paddleocr_vl_text pegasus pegasus_x pop2piano prophetnet recurrent_gemma "
        "reformer rembert roc_bert roformer sarvam_moe seamless_m4t seamless_m4t_v2 splinter squeezebert "
        "switch_transformers t5 t5gemma tapas tipsv2_text_model umt5 vaultgemma zamba zamba2 zaya",
    ),
    (
        "pad_token_id",
        1,
        "altclip_text_model bart biogpt bridgetower_text_model camembert clap_text_model clip_text_model "
        "clipseg_text_model convbert data2vec-text esmc fsmt groupvit_text_model gte ibert jina_embeddings_v3 "
        "kosmos_2_5_text_model kosmos_2_text_model led longformer luke m2m_100 mamba2 mbart metaclip_2_text_model "
        "mpnet mra mvp nanochat nllb-moe nystromformer olmo olmo2 olmo3 olmoe opt plbart roberta roberta-prelayernorm "
        "seed_oss siglip2_text_model siglip_text_model speech_to_text speecht5 step3p5 trocr visual_bert "
        "xclip_text_model xglm xlm-roberta xlm-roberta-xl xlstm xmod yoso",
    ),
    ("pad_token_id", 2, "aria_text cohere_asr flaubert internlm3 xlm"),
    ("pad_token_id", 3, "apertus apertus1p5_text fnet helium kyutai_speech_to_text"),
    ("pad_token_id", 5, "xlnet"),
    ("pad_token_id", 11, "ministral3 mistral4"),
    ("pad_token_id", 2048, "musicgen_decoder musicgen_melody_decoder"),
    ("pad_token_id", 32000, "phi3"),
    ("pad_token_id", 50256, "whisper"),
    ("pad_token_id", 50283, "modernbert modernbert-decoder"),
    ("pad_token_id", 58100, "marian"),
    ("pad_token_id", 100256, "granite_docling_text"),
    ("pad_token_id", 100277, "flex_olmo olmo_hybrid"),
    ("pad_token_id", 120002, "hy_v4 hy_v4_vl_text"),
    ("pad_token_id", 124893, "lfm3"),
    ("pad_token_id", 128001, "eurobert higgs_audio_v2"),
    ("pad_token_id", 128002, "csm"),
    ("pad_token_id", 128004, "mllama_text_model smollm3"),
    ("pad_token_id", 151329, "glm glm4"),
    ("pad_token_id", 151643, "emu3_text_model"),
    ("pad_token_id", 151659, "dots3_note_text"),
    ("pad_token_id", 154820, "glm5_next_text"),
    ("pad_token_id", 156892, "bailing_hybrid"),
    ("pad_token_id", 163839, "kimi_linear"),
    ("pad_token_id", 167841, "glm_image_text"),
    ("pad_token_id", 199999, "openai_privacy_filter phi4_multimodal"),
    ("question_token_id", 104, "splinter"),
    ("sep_token_id", 2, "longformer"),
    ("sep_token_id", 4, "hunyuan_v1_moe hunyuan_vl_text"),
    ("sep_token_id", 66, "big_bird"),
    ("sep_token_id", 102, "blip_text_model"),
    ("sep_token_id", 50282, "modernbert modernbert-decoder"),
    ("unk_index", 3, "flaubert xlm"),
)
"""Key of a token ID, default, and the model types with a record in whose class it is the default."""

DEFAULT_IDS: Mapping[str, Mapping[str, int | tuple[int, ...]]] = {
    model_type: {key: ids for key, ids, names in _DEFAULTS if model_type in names.split()}
    for model_type in sorted({name for _, _, names in _DEFAULTS for name in names.split()})
}
"""Model type -> the token IDs that its configuration class in transformers names by default, without those of `None`.

A model type with a record that is not here has no such ID. A test compares with transformers.
"""
