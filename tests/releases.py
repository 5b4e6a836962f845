"""What some tested releases lack: a test that needs it is skipped there by name, and the lists have all such names."""

from importlib import import_module
from inspect import signature
from typing import Any

import pytest
import transformers
from packaging.version import Version
from torch import Tensor

LACKING: dict[str, str] = {
    "compressed_tensors": "torch 2.9",  # 0.20 requires torch 2.10
    "peft.tuners.tuners_utils:warn_msg_weight_tying": "PEFT 0.18",  # came with LoRA on tied ends
    "torch.distributed.tensor.experimental._attention:_HeadTailLoadBalancer": "torch 2.9",
    "torch.nn.attention.varlen:varlen_attn": "torch 2.9",
    "torch.nn.functional:ScalingType": "torch 2.9",  # torchao 0.18 imports it
    "transformers.models.beam.modeling_beam": "transformers 5.6",
    "transformers.models.deepseek_v4.modeling_deepseek_v4": "transformers 5.6",
    "transformers.models.hunyuan_vl.modeling_hunyuan_vl:HunYuanVLRotaryEmbedding": "transformers 5.6",
    "transformers.models.kimi_k25.modeling_kimi_k25:Kimi_K25VisionRotaryEmbedding": "transformers 5.6",
    "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl:MiniMaxM3VLVisionRotaryEmbedding": "transformers 5.6",
    "transformers.models.pixtral.modeling_pixtral:PixtralVisionRotaryEmbedding": "transformers 5.6",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VLVisionRotaryEmbedding": "transformers 5.6",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:apply_rotary_pos_emb": "transformers 5.6",
    "transformers.models.qwen2_vl.modeling_qwen2_vl:Qwen2VLVisionRotaryEmbedding": "transformers 5.6",
    "transformers.models.qwen2_vl.modeling_qwen2_vl:apply_rotary_pos_emb": "transformers 5.6",
    "transformers.models.qwen4_exp.modeling_qwen4_exp": "transformers 5.6",
    "transformers:EsmcConfig": "transformers 5.6",
    "transformers:EsmcTokenizer": "transformers 5.6",
    "transformers:Qwen4ExpTextConfig": "transformers 5.6",
    "transformers:Tipsv2Tokenizer": "transformers 5.6",
    "transformers:VideoPrismTokenizer": "transformers 5.6",
}
"""Module, or module and attribute -> the newest release that was found to lack it."""

LACKING_TYPES = set(
    """
    apertus1p5 apertus1p5_text apertus1p5_vision_tokenizer axk1 axk2 bailing_hybrid beam canary canary_decoder
    cohere2_moe cohere_compass cohere_compass_text cohere_compass_vision cosmos3_edge cosmos3_edge_text
    cosmos3_edge_vision cosmos3_omni deepseek_ocr2 deepseek_ocr2_encoder deepseek_ocr2_sam_vision_model
    deepseek_ocr2_text deepseek_ocr2_vision deepseek_v32 deepseek_v4 deimv2 diffusion_gemma diffusion_gemma_text dory
    dots3_note dots3_note_audio_encoder dots3_note_text dots3_note_vision_encoder edgetam_mask_decoder
    edgetam_prompt_encoder edgetam_video_mask_decoder edgetam_video_prompt_encoder embedding_gemma2
    embedding_gemma2_text esmc esmfold2 exaone exaone4_5 exaone4_5_vision flava_image_codebook flint fun_asr_nano
    fun_asr_nano_encoder gemma4_assistant gemma4_unified gemma4_unified_assistant gemma4_unified_audio
    gemma4_unified_text gemma4_unified_vision glm5_next glm5_next_text glm5_next_vision glmga got_ocr2_vision
    gradium_phonon_tts granite4_vision granite4_vision_text granite_docling granite_docling_text
    granite_docling_vision granite_speech5_ctc granite_speech5_encoder granite_speech_plus granite_speech_plus_encoder
    granite_swa granitemoe_swa gte hrm_text hunyuan_vl hunyuan_vl_text hunyuan_vl_vision hy_v4 hy_v4_vl hy_v4_vl_text
    hy_v4_vl_vision hyperclovax hyperclovax_vision_v2 inkling2 inkling2_loop inkling2_loop_text inkling2_text
    inkling2_vision inkling_audio inkling_mm_model inkling_text inkling_vision internlm3 iquestcoder jev kimi_k25
    kimi_k25_vision kimi_linear kolibri1 laguna lara_mini lfm3 lfm3_vl lfm3_vl_vision mellum mimi_decoder mimi_encoder
    mimo_v2_flash minicpm3 minicpm_ocr minicpm_ocr_vision minicpmv4_6 minicpmv4_6_vision minicpmv4_7
    minicpmv4_7_vision minimax_m3_vl minimax_m3_vl_text minimax_m3_vl_vision mistral_large4 mistral_large4_text molmo2
    molmo2_adapter molmo2_text molmo2_vision moss_transcribe_diarize moss_transcribe_diarize_audio muse_glimmer
    muse_glimmer_assistant muse_glimmer_text muse_glimmer_vision muse_spark muse_spark_audio muse_spark_text
    muse_spark_vision nemo_speechlm nemotron3_5_asr nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_audio
    nemotron3_5_transcribe_word_timestamp nemotron3_diarization nemotron3_diarization_audio nemotron_asr_streaming
    nemotron_asr_streaming_encoder nemotron_h_omni neomme neucodec omniasr omniasr_audio omniasr_ctc ovis2_vision
    parakeet_rnnt parakeet_tdt pocket_tts pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder
    pocket_tts_audio_tokenizer_encoder pp_chart2table_vision pp_doclayout_v4 pp_formulanet pp_formulanet_text
    pp_formulanet_vision pp_lcnet_v4 pp_ocrv6_medium_det pp_ocrv6_small_det pp_ocrv6_small_rec pp_ocrv6_tiny_rec
    qwen3_asr qwen3_asr_encoder qwen4_exp qwen4_exp_text qwen4_exp_vision radio rf_detr rf_detr_dinov2
    sam2_mask_decoder sam2_prompt_encoder sam2_video_mask_decoder sam2_video_prompt_encoder sam3_tracker_mask_decoder
    sam3_tracker_prompt_encoder sam3_tracker_video_mask_decoder sam3_tracker_video_prompt_encoder sam_hq_mask_decoder
    sam_hq_prompt_encoder sam_mask_decoder sam_prompt_encoder sapiens2 sapiens2_head sarvam_mla sarvam_moe
    slanext_vision step3p5 step3p5_vision step3p7 tipsv2 tipsv2_dpt tipsv2_text_model tipsv2_vision_model ultrabert
    ultravbert unlimited_ocr unlimited_ocr_sam_vision_model unlimited_ocr_text unlimited_ocr_vision
    unlimited_ocr_vision_encoder vibevoice vibevoice_diffusion videoprism videoprism_text_model
    videoprism_vision_model wavtokenizer wavtokenizer_encoder xcodec2 zaya
    """.split()
)
"""Model types that transformers 5.6.0 lacks."""

LACKING_KINDS = {
    "base": {
        "paddleocr_vl",
        "qwen2_5_omni_thinker",
        "qwen2_5_vl_vision",
        "qwen2_audio",
        "qwen3_5_moe_vision",
        "qwen3_5_vision",
        "qwen3_omni_moe_thinker",
        "qwen3_vl_moe_vision",
        "qwen3_vl_vision",
    },
    "decision": {"gemma4", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_text"},
}
"""Kind of tools/tiny_models.py -> model types that transformers 5.6.0 has, but not as this kind."""


SINCE = {
    "token without a row in a per-layer table of Gemma 3n": "5.21",
    "YaRN of one layer type": "5.9",
    "accents of RemBERT's tokenizer": "5.14",
    "settings of ALBERT's tokenizer": "5.14",
    "text positions of ERNIE 4.5 VL": "5.24",
    "rotation of vision towers": "5.24",
    "sections of Qwen2-VL by default": "5.24",
    "configuration of DBRX from its dictionary": "5.24",
    "tied head of Voxtral Realtime's language model": "5.10",
    "encoder-decoder of any two models": "5.24",
    "rules of Qwen2's tokenizer": "5.24",
    "codebooks of Higgs Audio v2 other than 8": "5.18",
    "tokenizer classes of model types": "5.24",
}
"""What transformers computes otherwise, or cannot do, before this release."""


def has(name: str) -> bool:
    """Return whether a module, or an attribute of a module, can be imported."""
    module, _, attribute = name.partition(":")
    try:
        imported = import_module(module)
    except ImportError:
        return False
    return not attribute or hasattr(imported, attribute)


def skip_without(name: str) -> None:
    """Skip the test if the installed release lacks `name`, which `LACKING` then has."""
    if not has(name):
        pytest.skip(f"{LACKING[name]} lacks {name}")


def skip_without_type(model_type: str) -> None:
    """Skip the test if the installed transformers lacks a model type, which `LACKING_TYPES` then has."""
    if model_type not in transformers.CONFIG_MAPPING and model_type in LACKING_TYPES:
        pytest.skip(f"this release of transformers lacks {model_type}")


def skip_before(what: str) -> None:
    """Skip the test if the installed transformers is older than `SINCE` says for `what`."""
    if Version(transformers.__version__) < Version(SINCE[what]):
        pytest.skip(f"{what} is compared since transformers {SINCE[what]}")


def is_listed(kind: str, model_type: str) -> bool:
    """Return whether a release may lack a model type as a kind."""
    return model_type in LACKING_TYPES or model_type in LACKING_KINDS.get(kind, ())


def per_layer_rows(model: Any, ids: Tensor) -> Tensor:
    """Return the rows of `ids` in the per-layer table; before 5.14, Gemma 4 requires its input vectors as well."""
    others = len(signature(model.get_per_layer_inputs).parameters) - 1
    rows: Tensor = model.get_per_layer_inputs(ids, *[None] * others)
    return rows
