"""What some tested releases lack: a test that needs it is skipped there by name, and the lists have all such names."""

from importlib import import_module

import pytest

LACKING: dict[str, str] = {
    "torch.nn.attention:varlen": "torch 2.9",
}
"""Module, or module and attribute -> the newest release that was found to lack it."""

LACKING_TYPES = set(
    """
    apertus1p5 apertus1p5_text axk1 axk2 bailing_hybrid beam canary cohere2_moe cohere_compass
    cohere_compass_text cohere_compass_vision cosmos3_edge cosmos3_edge_text cosmos3_edge_vision cosmos3_omni
    deepseek_ocr2 deepseek_v32 deepseek_v4 deimv2 diffusion_gemma dory dots3_note dots3_note_text
    embedding_gemma2 embedding_gemma2_text esmc exaone exaone4_5 exaone4_5_vision flint fun_asr_nano
    fun_asr_nano_encoder gemma4_assistant gemma4_unified gemma4_unified_assistant gemma4_unified_text
    glm5_next glm5_next_text glm5_next_vision glmga gradium_phonon_tts granite4_vision granite_docling
    granite_docling_text granite_docling_vision granite_speech5_ctc granite_speech5_encoder
    granite_speech_plus granite_swa granitemoe_swa gte hrm_text hunyuan_vl hunyuan_vl_text hunyuan_vl_vision
    hy_v4 hy_v4_vl hy_v4_vl_text hy_v4_vl_vision hyperclovax hyperclovax_vision_v2 inkling2 inkling2_loop
    inkling2_loop_text inkling2_text inkling2_vision inkling_mm_model inkling_text internlm3 iquestcoder jev
    kimi_k25 kimi_k25_vision kimi_linear kolibri1 laguna lara_mini lfm3 lfm3_vl lfm3_vl_vision mellum
    mimi_decoder mimi_encoder mimo_v2_flash minicpm3 minicpm_ocr minicpm_ocr_vision minicpmv4_6 minicpmv4_7
    minicpmv4_7_vision minimax_m3_vl minimax_m3_vl_text mistral_large4 mistral_large4_text molmo2 molmo2_text
    moss_transcribe_diarize moss_transcribe_diarize_audio muse_glimmer muse_glimmer_assistant
    muse_glimmer_text muse_glimmer_vision muse_spark muse_spark_audio muse_spark_text muse_spark_vision
    nemo_speechlm nemotron3_5_asr nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_audio
    nemotron3_5_transcribe_word_timestamp nemotron3_diarization nemotron3_diarization_audio
    nemotron_asr_streaming nemotron_asr_streaming_encoder nemotron_h_omni neomme neucodec omniasr
    omniasr_audio omniasr_ctc parakeet_rnnt parakeet_tdt pocket_tts pocket_tts_audio_tokenizer
    pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder pp_doclayout_v4 pp_formulanet
    pp_ocrv6_medium_det pp_ocrv6_small_det pp_ocrv6_small_rec pp_ocrv6_tiny_rec qwen2_5_vl_vision
    qwen3_5_moe_vision qwen3_5_vision qwen3_asr qwen3_asr_encoder qwen3_vl_moe_vision qwen3_vl_vision
    qwen4_exp qwen4_exp_text qwen4_exp_vision radio rf_detr sapiens2 sarvam_mla sarvam_moe step3p7 tipsv2
    tipsv2_text_model tipsv2_vision_model ultrabert ultravbert unlimited_ocr vibevoice videoprism
    videoprism_vision_model wavtokenizer wavtokenizer_encoder xcodec2 zaya
    """.split()
)
"""Model types that transformers 5.6.0 lacks."""

LACKING_KINDS = {
    "base": {"paddleocr_vl", "qwen2_5_omni_thinker", "qwen2_audio", "qwen3_omni_moe_thinker"},
    "decision": {"gemma4", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_text"},
}
"""Kind of tools/tiny_models.py -> model types that transformers 5.6.0 has, but not as this kind."""


def has(name: str) -> bool:
    """Return whether an entry of `LACKING` can be imported."""
    module, _, attribute = name.partition(":")
    try:
        return not attribute or hasattr(import_module(module), attribute)
    except ImportError:
        return False


def skip_without(name: str) -> None:
    """Skip the test, or the whole module where this is called at its top, if the installed release lacks `name`."""
    lacking = LACKING[name]
    if not has(name):
        pytest.skip(f"{name} does not exist, as in {lacking}", allow_module_level=True)


def is_listed(kind: str, model_type: str) -> bool:
    """Return whether a release may lack a model type as a kind."""
    return model_type in LACKING_TYPES or model_type in LACKING_KINDS.get(kind, ())
