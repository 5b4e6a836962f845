"""Records of multimodal models: how they use the head of their language model, which has a record of its own."""

from collections.abc import Mapping

from embedlayer.families.field_types import Names
from embedlayer.families.records import MultimodalSpec

_SPECS: tuple[tuple[MultimodalSpec, Names], ...] = (
    (
        MultimodalSpec(),
        (
            *("apertus1p5", "aria", "cosmos3_omni", "cosmos3_edge", "deepseek_ocr2", "emu3", "exaone4_5"),
            *("glm46v", "glm5_next", "glmga", "idefics2", "idefics3", "llava_next", "minicpmv4_6", "minicpmv4_7"),
            *("hy_v4_vl", "modernvbert", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen3_5"),
            *("qwen3_5_moe", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp", "smolvlm"),
            *("unlimited_ocr", "video_llava", "vipllava"),
        ),
    ),
    (
        MultimodalSpec(tied_by="either"),
        (
            *("fast_vlm", "glm4v", "glm4v_moe", "glm_ocr", "llava", "llava_next_video", "llava_onevision"),
            *("minimax_m3_vl", "shieldgemma2", "video_llama_3"),
        ),
    ),
    (MultimodalSpec(tied_by="none", part="decoder"), ("musicgen", "musicgen_melody")),
    (MultimodalSpec(flat="persimmon"), ("fuyu",)),
    (MultimodalSpec(flat="dots3_note_text"), ("dots3_note",)),
    (MultimodalSpec(tied_by="either", flat="hunyuan_vl_text", tied=True), ("hunyuan_vl",)),
    (MultimodalSpec(tied_by="either", flat="qwen2_vl_text"), ("qwen2_vl",)),
    (MultimodalSpec(tied_by="either", flat="qwen2_5_vl_text"), ("qwen2_5_vl",)),
    (MultimodalSpec(tied_by="either", flat="paddleocr_vl_text", tied=True), ("paddleocr_vl",)),
    (
        MultimodalSpec(tied=True),
        (
            *("aya_vision", "cohere2_vision", "deepseek_vl", "deepseek_vl_hybrid", "ernie4_5_vl_moe", "gemma3"),
            *("got_ocr2", "internvl", "janus", "kimi_k25", "lfm2_vl", "lfm3_vl", "lighton_ocr", "minicpm_ocr"),
            *("mistral3", "moss_transcribe_diarize", "ovis2", "pp_chart2table"),
            *("fun_asr_nano", "glmasr", "granite_speech", "granite_speech_plus", "qwen3_asr"),
        ),
    ),
    (
        MultimodalSpec(tied=True, scales_logits=True),
        ("gemma3n", "gemma4", "gemma4_unified", "granite_docling", "hyperclovax_vision_v2", "paligemma"),
    ),
    (MultimodalSpec(scales_logits=True), ("cohere_compass", "granite4_vision", "muse_glimmer", "muse_spark")),
    (MultimodalSpec(tied_by="text", scales_logits=True), ("blip-2", "instructblip", "instructblipvideo", "llama4")),
    (MultimodalSpec(tied_by="text"), ("nemotron_h_omni",)),
    (MultimodalSpec(tied="text"), ("perception_lm",)),
    (
        MultimodalSpec(
            tied=True, table=("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
        ),
        ("florence2",),
    ),
    (MultimodalSpec(tied_by="text", tied=True, scales_logits=True), ("kosmos-2.5",)),
    (MultimodalSpec(tied_by="either", tied=True, scales_logits=True), ("blip", "kosmos-2")),
    (MultimodalSpec(tied_by="none", scales_logits=True), ("inkling2", "inkling_mm_model", "mllama", "step3p7")),
    (
        MultimodalSpec(tied_by="none"),
        (
            *("aimv2", "align", "altclip", "audioflamingo3", "bridgetower", "chinese_clip", "clap", "clip", "clipseg"),
            *("embedding_gemma2", "flava", "glm_image", "grounding-dino", "groupvit", "jev", "metaclip_2"),
            *("mm-grounding-dino", "musicflamingo", "nemo_speechlm", "omniasr", "owlv2", "owlvit", "pe_audio"),
            *("qwen2_audio", "sam3", "siglip", "siglip2", "tipsv2", "vibevoice", "vibevoice_asr"),
            *("vision-text-dual-encoder", "voxtral", "xclip"),
        ),
    ),
)

MULTIMODAL: Mapping[str, MultimodalSpec] = {name: spec for spec, names in _SPECS for name in names}
"""Model type of a multimodal model -> how it uses the head of its language model."""

REFUSED_MULTIMODAL: Mapping[str, str] = {
    "chameleon": "its head sets the logits of all image tokens to the lowest number",
    "diffusion_gemma": "each of its steps adds vectors to the input that the step before has computed",
    **dict.fromkeys(
        ("encoder-decoder", "vision-encoder-decoder"),
        "it joins two models that have model types of their own, whose folders are read",
    ),
    "idefics": "its table and its head each have a second tensor for the tokens that were added",
    "inkling2_loop": "some of its blocks run several times in a pass, so its positions could not be compared",
    **dict.fromkeys(
        ("mistral_large4", "mistral_large4_text"), "the factor of its queries is a learned function of the position"
    ),
    **dict.fromkeys(
        ("molmo2", "molmo2_text"),
        "its checkpoints store the token table as two tensors, and its head has no rows for the second",
    ),
    "pi0": "it predicts movements, not tokens",
    **dict.fromkeys(
        ("pix2struct", "pp_formulanet"),
        "its text decoder is only run on an image, so its layer was not compared with transformers",
    ),
    "t5gemma2": "its table has a vector beside its rows, for the token at the end of an image",
    "udop": "its encoder adds vectors for the place of each token on the page",
    "voxtral_realtime": "a vector of the recorded sound is added to each token",
}
"""Model type of a multimodal model -> why it is not read, the middle of a sentence."""
