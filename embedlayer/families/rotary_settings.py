"""Rotary settings by model type, which transformers has in its code and not in `config.json`.

A model type is here only if `python tools/rotary_families.py` compared it with transformers, or if the reader
refuses it by name. A configuration of any other type is refused, unless the caller states the settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from embedlayer.families.field_types import Names
from embedlayer.families.records import META_LLAMA


@dataclass(frozen=True)
class SectionAxes:
    """Several position axes, each of which rotates a section of the pairs of channels (Qwen2-VL)."""

    layout: Literal["chunked", "interleaved", "alternating", "channels"]  # a key of `AXES` in `positions.rotary.config`
    sections: tuple[int, ...] | None = None  # without `mrope_section`; `None`: a single axis then
    names: Names = ()  # other names of `mrope_section`


@dataclass(frozen=True)
class GridAxes:
    """Axes of a vision tower, with an equal number of pairs each: `AxialAxes` in which some options are set."""

    num_axes: int = 2  # 2 for rows and columns
    options: Names = ()  # arguments of `AxialAxes` that are true


@dataclass(frozen=True)
class RotaryPositions:
    """Rotary settings of a family that transformers has in its code and not in `config.json`."""

    base: float = 10000.0  # theta, if a configuration states none
    # whether the code has no other base, or had none when checkpoints were published: a configuration without a base is
    # then accepted, and else an error
    fixed_base: bool = False
    interleaved: bool = False  # pairs (2i, 2i + 1), not (i, i + half)
    reads_layout: bool = False  # `rope_interleave`; elsewhere another layout there is an error
    rotation: Literal["reversed", "trailing"] | None = None  # by the negative angle, or of the last channels of a head
    # share of a head's channels that transformers rotates if a configuration states none, which is an error here;
    # `None`: all channels, also without a stated share
    default_share: float | None = None
    # whether the code reads a share although its default is all channels; code of a family with neither ignores a share
    reads_share: bool = False
    # besides "default"; empty: those of transformers' `ROPE_INIT_FUNCTIONS`. "ntk_alpha" is "dynamic" with a fixed
    # `alpha` (HunYuan)
    rope_types: Names = ()
    former_rope_types: tuple[tuple[str, str], ...] = ()  # (old name, present name)
    other_parameters: Names = ()  # further keys of `rope_parameters`
    # scaling of full attention only; or (layer type, its key in `rope_parameters`), "" for all others
    by_layer_type: Literal["full_attention"] | tuple[tuple[str, str], ...] = ()
    # layers in `no_rope_layers` or by `no_rope_layer_interval`, those of full attention, or all
    without_positions: Literal["listed", "full_attention", "all"] | None = None
    only_if: tuple[str, str | bool] | None = None  # (key, value) for any layer to be rotated
    rotated_types: Names | None = None  # layer types; `None` for all
    aliases: tuple[tuple[str, str | None], ...] = ()  # (key of this family, common key); `None`: not read
    defaults: tuple[tuple[str, int | float], ...] = ()  # (key, transformers' default) of keys that may be left out
    # groups of keys of which a configuration must have one, as transformers has a default of its own; a null does not
    # count, unless the key is `sliding_window`
    stated: tuple[Names, ...] = ()
    axes: SectionAxes | GridAxes | None = None  # several position axes
    needs_head_dim: bool = False  # the code fails without it for `dynamic`, `yarn` and `longrope`
    base_key: str | None = "rope_theta"  # of the base beside `rope_parameters`
    original_beside: bool = False  # `original_max_position_embeddings` beside the parameters, which counts more
    # factor on queries by position: Ministral 3's, from `llama_4_scaling_beta`; Llama 4's in layers without rotation,
    # from `attn_scale` and `floor_scale`; or Beam's there, (exponent, length) of a power of the position
    query_scaling: Literal["rotated", "unrotated"] | tuple[float, int] | None = None


_SLIDING, _FULL = ("sliding_attention",), ("full_attention",)
_TYPES = RotaryPositions()
_PAIRS = RotaryPositions(interleaved=True)
_ALL_BUT_LONGROPE = ("default", "linear", "dynamic", "yarn", "llama3", "proportional")
_MROPE = RotaryPositions(former_rope_types=(("mrope", "default"),))
_AXIAL = RotaryPositions(axes=GridAxes(), fixed_base=True, aliases=(("depth", "num_hidden_layers"),))
_AXIAL_HEADS = replace(_AXIAL, aliases=(*_AXIAL.aliases, ("num_heads", "num_attention_heads")))
_HYBRID = RotaryPositions(
    rotated_types=("attention", "full_attention", "sliding_attention"),
    aliases=(("layers_block_type", "layer_types"),),
    default_share=0.5,
)
_HUNYUAN = RotaryPositions(
    rope_types=("ntk_alpha", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"),
    other_parameters=("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)

_SETTINGS: tuple[tuple[RotaryPositions, Names], ...] = (
    (
        _TYPES,
        (
            *("apertus", "apertus1p5_text", "arcee", "aria_text", "bitnet", "chameleon", "csm", "cwm"),
            *("csm_depth_decoder_model", "falcon", "sarvam_moe"),
            *("deepseek_ocr2_text", "dia_encoder", "diffllama", "diffusion_gemma_text", "doge", "dots1"),
            *("emu3_text_model", "esmc", "eurobert", "evolla", "falcon_h1", "flex_olmo"),
            *("gemma", "gemma2", "gemma4_text", "gemma4_unified_text", "gpt_oss", "gradium_phonon_tts", "granite"),
            *("granite4_vision_text", "granite_docling_text", "granitemoe", "granitemoeshared", "gte"),
            *("granite_swa", "granitemoe_swa", "muse_spark_text", "muse_glimmer_text", "higgs_audio_v2", "hrm_text"),
            *("hy_v3", "hyperclovax", "jais2", "jina_embeddings_v3", "kyutai_speech_to_text", "laguna"),
            *("internlm3", "iquestcoder", "llama", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral"),
            *("mistral", "mixtral", "mllama_text_model", "modernbert", "modernbert-decoder", "moshi"),
            *("nomic_bert", "olmo", "olmo2", "olmoe", "pocket_tts", "qwen2", "qwen2_moe"),
            *("qwen3", "qwen3_moe", "qwen3_omni_moe_talker_code_predictor", "seed_oss", "solar_open", "starcoder2"),
            *("step3p5", "t5_gemma_module", "t5gemma", "ultrabert", "unlimited_ocr_text", "vaultgemma"),
            *("voxtral_realtime_text", "voxtral_realtime_encoder", "molmo2_text", "zaya", "hy_v4"),
            # audio, time series, and the second stack of a model
            *("deepseek_ocr2_encoder", "lasr_encoder", "mimi", "mimi_encoder", "mimi_decoder", "timesfm2_5"),
            *("pocket_tts_audio_tokenizer", "pocket_tts_audio_tokenizer_encoder", "pocket_tts_audio_tokenizer_decoder"),
            *("muse_glimmer_assistant", "dia_decoder", "idefics", "nemotron3_diarization_audio"),
        ),
    ),
    (
        _PAIRS,
        (
            *("blt_local_encoder", "blt_local_decoder", "blt_global_transformer", "blt_patcher", "cohere"),
            *("openai_privacy_filter", "deepseek_v2", "axk2", "deepseek_v32", "glm_moe_dsa", "ernie4_5"),
            *("ernie4_5_moe", "helium", "pe_audio_encoder"),
        ),
    ),
    # transformers fails to compute longrope for layers whose heads differ
    (replace(_TYPES, rope_types=_ALL_BUT_LONGROPE), ("embedding_gemma2_text",)),
    (replace(_PAIRS, rope_types=_ALL_BUT_LONGROPE), ("dots3_note_text",)),
    (RotaryPositions(interleaved=True, reads_layout=True), ("axk1", "deepseek_v3", "glm4_moe_lite", "youtu")),
    (
        RotaryPositions(interleaved=True, reads_layout=True, former_rope_types=(("deepseek_yarn", "yarn"),)),
        ("sarvam_mla",),
    ),
    (RotaryPositions(interleaved=True, aliases=(("num_layers", "num_hidden_layers"),)), ("longcat_flash",)),
    (RotaryPositions(aliases=(("num_layers", "num_hidden_layers"),)), ("exaone",)),
    (RotaryPositions(aliases=(("max_seq_len", "max_position_embeddings"),)), ("dbrx",)),
    (RotaryPositions(interleaved=True, rotated_types=_FULL), ("bailing_hybrid",)),
    (RotaryPositions(aliases=(("rotary_dim", None),)), ("minimax_m3_vl_text",)),
    (RotaryPositions(aliases=(("kv_channels", "head_dim"),)), ("jetmoe",)),
    (
        RotaryPositions(
            only_if=("use_mem_rope", True),
            rotated_types=("hybrid",),
            aliases=(("attention_head_dim", "head_dim"), ("layers_block_type", "layer_types")),
        ),
        ("zamba2",),
    ),
    (
        RotaryPositions(fixed_base=True, rope_types=("default",), only_if=("position_embedding_type", "rotary")),
        ("esm",),
    ),
    (RotaryPositions(fixed_base=True, interleaved=True, rope_types=("default",)), ("roformer",)),
    (RotaryPositions(rotation="reversed"), ("nanochat",)),
    # layers without positions
    (RotaryPositions(rotated_types=_SLIDING), ("afmoe", "flint", "lara_mini")),
    (RotaryPositions(without_positions="full_attention"), ("exaone4", "exaone_moe", "kolibri1")),
    (RotaryPositions(interleaved=True, without_positions="full_attention"), ("cohere2", "cohere2_moe")),
    (RotaryPositions(without_positions="listed"), ("smollm3",)),
    (RotaryPositions(interleaved=True, without_positions="listed", query_scaling="unrotated"), ("llama4_text",)),
    (RotaryPositions(query_scaling=(0.1, 2048)), ("beam",)),
    (
        RotaryPositions(without_positions="all"),
        ("glm5_next_text", "inkling_text", "inkling2_text", "jamba", "kimi_linear", "moshi_depth"),
    ),
    (RotaryPositions(without_positions="all", aliases=(("layers_block_type", "layer_types"),)), ("nemotron_h",)),
    (
        RotaryPositions(only_if=("position_embedding_type", "rope"), rotated_types=("full_attention", "attention")),
        ("granitemoehybrid",),
    ),
    (RotaryPositions(rotated_types=_FULL), ("lfm2", "lfm2_moe", "minimax", "olmo_hybrid")),
    (RotaryPositions(rotated_types=(*_FULL, *_SLIDING)), ("lfm3",)),
    (RotaryPositions(rotated_types=_FULL, default_share=0.25), ("qwen3_next",)),
    (_HYBRID, ("bamba",)),
    (replace(_HYBRID, rope_types=("default",)), ("recurrent_gemma",)),
    # a part of the channels
    (RotaryPositions(default_share=0.25), ("gpt_neox", "stablelm", "neomme")),
    (RotaryPositions(default_share=1.0), ("gpt_neox_japanese",)),
    (
        RotaryPositions(default_share=0.5),
        (
            *("phi", "persimmon", "glm4_moe", "nemotron", "dots3_note_audio_encoder", "glmasr_encoder"),
            *("nemotron3_5_transcribe_asr_audio", "nemotron3_5_transcribe_word_timestamp"),
        ),
    ),
    (RotaryPositions(interleaved=True, default_share=0.5), ("glm", "glm4")),
    (RotaryPositions(fixed_base=True, interleaved=True, rope_types=("default",)), ("gptj", "codegen")),
    (
        RotaryPositions(
            former_rope_types=(("yarn", "longrope"),), rope_types=("default", "longrope"), original_beside=True
        ),
        ("phi3", "phi4_multimodal"),
    ),
    (
        RotaryPositions(by_layer_type="full_attention"),
        ("gemma3_text", "gemma3n_text", "olmo3", "t5gemma2_text", "t5gemma2_decoder"),
    ),
    # its longrope keeps the short factors at every length in transformers, with two factors on cosines
    (RotaryPositions(rope_types=("default",)), ("phimoe",)),
    (
        RotaryPositions(
            interleaved=True,
            default_share=0.9,
            aliases=(
                ("decoder_num_hidden_layers", "num_hidden_layers"),
                ("decoder_num_attention_heads", "num_attention_heads"),
            ),
        ),
        ("moonshine",),
    ),
    (RotaryPositions(interleaved=True, default_share=0.8), ("moonshine_streaming",)),
    # several axes
    (
        replace(_MROPE, axes=SectionAxes("chunked", (16, 24, 24))),
        ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"),
    ),
    (replace(_MROPE, axes=SectionAxes("chunked", (16, 24, 24))), ("qwen2_5_omni_talker", "paddleocr_vl_text")),
    (replace(_MROPE, axes=SectionAxes("chunked", (8, 12, 12)), interleaved=True), ("glm4v_text", "glm_ocr_text")),
    (replace(_MROPE, axes=SectionAxes("chunked", (8, 12, 12))), ("glm_image_text",)),
    (replace(_MROPE, axes=SectionAxes("chunked", (8, 12, 12)), default_share=0.5), ("glm4v_moe_text",)),
    (
        RotaryPositions(axes=SectionAxes("interleaved", (24, 20, 20))),
        (
            *("qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text", "qwen3_omni_moe_talker_text"),
            "cohere_compass_text",
        ),
    ),
    (
        RotaryPositions(axes=SectionAxes("interleaved", (24, 20, 20)), rope_types=("default",)),
        ("cosmos3_edge_text",),
    ),
    (RotaryPositions(axes=SectionAxes("interleaved", (12, 10, 10)), interleaved=True), ("hy_v4_vl_text",)),
    (
        RotaryPositions(axes=SectionAxes("interleaved", (11, 11, 10)), rotated_types=_FULL, default_share=0.25),
        ("qwen3_5_text", "qwen3_5_moe_text"),
    ),
    (
        RotaryPositions(axes=SectionAxes("interleaved", (11, 11, 10)), rotated_types=("indexed_attention", *_FULL)),
        ("qwen4_exp_text",),
    ),
    (
        RotaryPositions(interleaved=True, axes=SectionAxes("alternating", (22, 22, 20)), rope_types=("default",)),
        ("ernie4_5_vl_moe_text",),
    ),
    # vision towers: rows and columns
    (
        _AXIAL_HEADS,
        (
            *("cohere_compass_vision", "ernie4_5_vl_moe_vision", "exaone4_5_vision", "glm4v_vision"),
            "glm4v_moe_vision",
            *("glm5_next_vision", "glm_ocr_vision", "qwen2_5_omni_vision_encoder", "qwen2_5_vl_vision"),
            *("qwen3_5_vision", "qwen3_5_moe_vision", "qwen3_omni_moe_vision_encoder", "qwen3_vl_vision"),
            *("qwen3_vl_moe_vision", "qwen4_exp_vision"),
        ),
    ),
    (replace(_AXIAL, rotated_types=_FULL), ("lfm3_vl_vision",)),
    (
        _AXIAL,
        (
            *("dots3_note_vision_encoder", "muse_glimmer_vision", "muse_spark_vision"),
            *("paddleocr_vl_vision", "video_llama_3_vision"),
        ),
    ),
    (
        replace(_AXIAL_HEADS, aliases=(*_AXIAL_HEADS.aliases, ("hidden_size", None), ("embed_dim", "hidden_size"))),
        ("qwen2_vl_vision",),
    ),
    (replace(_AXIAL, axes=GridAxes(options=("last_axis_first",))), ("step3p5_vision",)),
    (replace(_AXIAL, axes=GridAxes(options=("alternating", "last_axis_first"))), ("kimi_k25_vision",)),
    (replace(_AXIAL, axes=GridAxes(num_axes=3)), ("minimax_m3_vl_vision",)),
    (replace(_AXIAL, axes=GridAxes(options=("shared_frequencies",))), ("pixtral",)),
    (replace(_AXIAL, axes=GridAxes(options=("pairs_within_axis",))), ("gemma4_vision",)),
    (replace(_AXIAL, interleaved=True), ("sam3_vit_model",)),
    (replace(_AXIAL, interleaved=True, axes=GridAxes(options=("last_axis_first",))), ("inkling2_vision",)),
    (
        replace(_AXIAL, interleaved=True, axes=GridAxes(options=("last_axis_first",)), rope_types=("default",)),
        ("llama4_vision_model",),
    ),
    # other scalings
    (_HUNYUAN, ("hunyuan_v1_dense", "hunyuan_v1_moe")),
    (
        replace(
            _HUNYUAN,
            former_rope_types=(("xdrope", "dynamic"),),
            axes=SectionAxes("channels", names=("xdrope_section",)),
        ),
        ("hunyuan_vl_text",),
    ),
    (RotaryPositions(query_scaling="rotated", other_parameters=("max_position_embeddings",)), ("ministral3",)),
    (replace(_PAIRS, query_scaling="rotated"), (META_LLAMA,)),
    (
        RotaryPositions(
            interleaved=True,
            reads_layout=True,
            rotation="trailing",
            query_scaling="rotated",
            other_parameters=("max_position_embeddings",),
        ),
        ("mistral4",),
    ),
    (
        RotaryPositions(interleaved=True, rotation="trailing", by_layer_type=((_SLIDING[0], "main"), ("", "compress"))),
        ("deepseek_v4",),
    ),
)

_BASES: tuple[tuple[float, Names], ...] = (
    (100.0, ("gemma4_vision",)),
    (1000.0, ("nomic_bert",)),
    (20_000.0, ("jina_embeddings_v3", "pe_audio_encoder")),
    (100_000.0, ("helium",)),
    (150_000.0, ("gpt_oss", "openai_privacy_filter")),
    (160_000.0, ("gte",)),
    (
        500_000.0,
        (
            *("bitnet", "blt_local_encoder", "blt_local_decoder", "blt_global_transformer", "cohere", "csm"),
            *("csm_depth_decoder_model", "ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe_text", "evolla", "flex_olmo"),
            *("llama4_text", "mllama_text_model", "olmo3", "paddleocr_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
            "exaone",
        ),
    ),
    (
        1_000_000.0,
        (
            *("cwm", "emu3_text_model", "lfm2", "lfm2_moe", "lfm3", "lfm3_vl_vision", "minimax", "mixtral", "phimoe"),
            "solar_open",
            *("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "qwen2_5_omni_talker", "qwen3_omni_moe_text"),
        ),
    ),
    (2_000_000.0, ("smollm3",)),
    (5_000_000.0, ("minimax_m2", "minimax_m3_vl_text")),
    (6_000_000.0, ("bailing_hybrid",)),
    (8_000_000.0, ("sarvam_moe",)),
    (10_000_000.0, ("longcat_flash",)),
    (11_158_840.0, ("hy_v3",)),
    (12_000_000.0, ("apertus", "apertus1p5_text")),
    (80_000_000.0, ("dots3_note_text",)),
    (100_000_000.0, ("cosmos3_edge_text",)),
)
"""Base of the frequencies if a configuration states none, where it is not 10000."""

_HEAD_WIDTHS: tuple[tuple[int, Names], ...] = (
    (
        64,
        (
            *("gemma4_vision", "gpt_oss", "muse_spark_text", "neomme", "openai_privacy_filter", "sarvam_moe"),
            "voxtral_realtime_encoder",
        ),
    ),
    (80, ("timesfm2_5",)),
    (
        128,
        (
            *("afmoe", "beam", "cohere2_moe", "cosmos3_edge_text", "cwm", "dia_encoder", "dia_decoder", "flint", "glm"),
            *("glm4", "helium", "higgs_audio_v2", "hrm_text", "hy_v3", "kolibri1", "laguna", "lfm3", "llama4_text"),
            *("internlm3", "iquestcoder", "lara_mini"),
            *("mellum", "minimax_m2", "minimax_m3_vl_text", "ministral3", "molmo2_text", "muse_glimmer_text"),
            *("paddleocr_vl_text", "pe_audio_encoder", "qwen2_5_omni_talker", "qwen3", "qwen3_vl_text", "seed_oss"),
            *("ernie4_5", "qwen3_omni_moe_talker_code_predictor", "solar_open", "step3p5", "zaya"),
        ),
    ),
    (192, ("mimo_v2_flash",)),
    (
        256,
        (
            *("diffusion_gemma_text", "embedding_gemma2_text", "gemma", "gemma2", "gemma3_text", "gemma3n_text"),
            *("gemma4_text", "gemma4_unified_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
            *("t5_gemma_module", "t5gemma", "t5gemma2_text", "t5gemma2_decoder", "vaultgemma"),
        ),
    ),
)
"""Width of a head if a configuration has no key `head_dim`, where it is not the hidden size divided by the heads."""

_STATED: tuple[tuple[Names, Names], ...] = (
    (
        ("rope_parameters", "rope_scaling"),
        (
            *("apertus", "apertus1p5_text", "beam", "cwm"),
            *("deepseek_v4", "diffusion_gemma_text", "dots3_note_text", "gpt_oss", "laguna"),
            *("embedding_gemma2_text", "gemma4_text", "gemma4_unified_text", "higgs_audio_v2", "lfm3", "mellum"),
            *("mimo_v2_flash", "ministral3", "mistral4", "neomme", "openai_privacy_filter", "step3p5"),
            *("t5_gemma_module", "ultrabert"),
            *("zaya", "cohere_compass_text", "cosmos3_edge_text"),
        ),
    ),
    (("rope_parameters", "rope_local_base_freq"), ("gemma3_text", "gemma3n_text", "t5gemma2_text", "t5gemma2_decoder")),
    (("rope_parameters", "local_rope_theta"), ("modernbert", "modernbert-decoder")),
    (("rope_parameters", "rope_theta"), ("olmo3",)),
    (("sliding_window",), ("cohere2", "cohere2_moe", "exaone4", "exaone_moe", "kolibri1")),
    (
        ("qk_rope_head_dim",),
        (
            *("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4"),
            *("hy_v4_vl_text", "sarvam_mla"),
            *("dots3_note_text", "glm4_moe_lite", "glm_moe_dsa", "hy_v4", "longcat_flash", "minicpm3", "mistral4"),
            *("youtu",),
        ),
    ),
    (("layer_types",), ("deepseek_v4",)),
    (("per_layer_config", "global_head_dim"), ("diffusion_gemma_text", "gemma4_text", "gemma4_unified_text")),
    (("per_layer_config",), ("embedding_gemma2_text", "dots3_note_text")),
    (("rotary_dim",), ("gptj", "codegen")),
    (("kv_channels", "head_dim"), ("jetmoe",)),
    (("attention_head_dim", "head_dim"), ("zamba2",)),
    (("num_layers_per_stack",), ("hrm_text",)),
    (("cross_attention_layers",), ("mllama_text_model",)),
    (("layer_rope_theta",), ("muse_glimmer_text", "muse_spark_text", "granite_swa", "granitemoe_swa")),
)
"""Keys of which a configuration must have one, and the model types; see `RotaryPositions.stated`."""

_BASE = {name: base for base, names in _BASES for name in names}
_WIDTH = {name: width for width, names in _HEAD_WIDTHS for name in names}

_REFUSED: tuple[tuple[str, Names], ...] = (
    (
        "its angles are of coordinates or times in real numbers, not of whole positions",
        ("dinov3_vit", "eomt_dinov3", "sapiens2", "musicflamingo", "esmfold2", "lightglue"),
    ),
    (
        "only its memory attention rotates, which repeats the positions of a frame and leaves object pointers out",
        ("sam2_video", "sam3_tracker_video", "edgetam_video"),
    ),
    (
        "it rotates the input of the query and key projections, not queries and keys",
        ("wav2vec2-bert", "wav2vec2-conformer", "seamless_m4t"),
    ),
    ("its parts have configurations of their own: pass those of its encoder, decoder and patcher", ("blt",)),
    ("it rotates by the number of the head, not by the position of the token", ("neucodec", "xcodec2")),
    ("it rotates only the first head of each block", ("qwen2_5_omni_dit",)),
    ("it also rotates values", ("clvp_encoder",)),
    ("it pairs interleaved channels, but their two angles differ, which is no rotation", ("vjepa2",)),
    ("it rotates its class token by learned angles", ("mlcd_vision_model",)),
    ("a tensor of the checkpoint multiplies its frequencies", ("mistral_large4_text",)),
    ("it rotates all channels of a query before it divides them into heads", ("efficientloftr",)),
    (
        "transformers cannot build it without the package timm, so it was not compared",
        ("pe_audio_video_encoder", "pe_video_encoder"),
    ),
    (
        "it has no rotary positions",
        (
            *("chameleon_vqgan", "clvp_decoder", "cosmos3_edge_vision", "deepseek_ocr2_sam_vision_model", "emu3_vqgan"),
            *("edgetam_video_mask_decoder", "edgetam_video_prompt_encoder", "gemma3n_audio", "gemma3n_vision"),
            *("gemma4_audio", "gemma4_unified_audio", "gemma4_unified_vision", "glm_image_vision", "glm_image_vqmodel"),
            *("granite_docling_vision", "hunyuan_vl_vision", "idefics_perciever", "idefics_vision"),
            *("minicpmv4_7_vision", "mllama_vision_model", "molmo2_adapter", "molmo2_vision", "muse_spark_audio"),
            *("moonshine_streaming_encoder", "nemotron_asr_streaming_encoder", "parakeet_encoder"),
            *("phi4_multimodal_audio", "phi4_multimodal_vision", "pp_doclayout_v2", "qwen2_5_omni_audio_encoder"),
            *("qwen2_5_omni_bigvgan", "qwen3_omni_moe_audio_encoder", "sam2_video_mask_decoder"),
            *("sam2_video_prompt_encoder", "sam3_detr_decoder", "sam3_detr_encoder", "sam3_geometry_encoder"),
            *("sapiens2_head", "sam3_mask_decoder", "sam3_tracker_video_mask_decoder"),
            "sam3_tracker_video_prompt_encoder",
            *("unlimited_ocr_sam_vision_model", "unlimited_ocr_vision_encoder"),
        ),
    ),
)

REFUSED_ROTARY: Mapping[str, str] = {name: reason for reason, names in _REFUSED for name in names}
"""Model type -> why its rotary positions are not read, the end of a sentence."""

_READS_SHARE: Names = (
    *("deepseek_v4", "diffusion_gemma_text", "dots3_note_text", "dots3_note_vision_encoder", "glm4_moe_lite"),
    *("glm4v_moe_vision", "glm4v_text", "glm4v_vision", "glm_image_text", "glm_ocr_text", "glm_ocr_vision"),
    *("laguna", "mellum", "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "minimax_m3_vl_vision"),
    *("nemotron3_diarization_audio", "phi3", "phi4_multimodal", "qwen3_5_moe_vision", "qwen3_5_vision"),
    *("qwen4_exp_text", "qwen4_exp_vision", "solar_open", "step3p5", "step3p5_vision", "zaya"),
)
"""Model types whose code reads `partial_rotary_factor`, with a default of 1; see `RotaryPositions.reads_share`."""

_NEEDS_HEAD_DIM: Names = ("minimax", "mixtral")
"""Model types whose class leaves `head_dim` at null; see `RotaryPositions.needs_head_dim`."""

_BASE_KEYS: Mapping[str, str | None] = {
    **dict.fromkeys(("gpt_neox", "gpt_neox_japanese"), "rotary_emb_base"),
    "moonshine_streaming": None,
    "nemotron3_5_transcribe_asr_audio": None,
    "nemotron3_5_transcribe_word_timestamp": None,
}
"""Model type -> key of the base in older configurations, where it is another one; see `RotaryPositions.base_key`."""

ROTARY: Mapping[str, RotaryPositions] = {
    name: replace(
        settings,
        needs_head_dim=name in _NEEDS_HEAD_DIM,
        base_key=_BASE_KEYS.get(name, settings.base_key),
        reads_share=name in _READS_SHARE or settings.default_share is not None,
        base=_BASE.get(name, settings.base),
        defaults=(("head_dim", _WIDTH[name]),) if name in _WIDTH else (),
        stated=tuple(keys for keys, types in _STATED if name in types),
    )
    for settings, names in _SETTINGS
    for name in names
}
"""Model type -> its rotary settings."""
