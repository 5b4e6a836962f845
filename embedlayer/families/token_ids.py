"""Which entries of a configuration name token IDs, and which models read the order or the size of IDs.

The keys are those of the configurations, generation configurations and modules of transformers, and of the files of
published checkpoints. A key that is in none of these lists, ends in one of `ENDINGS` and holds an ID is an error.
"""

from collections.abc import Mapping

from embedlayer.families.field_types import Names

ROLES: Mapping[str, str] = {
    **{key: key for key in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")},
    **{key: key for key in ("cls_token_id", "sep_token_id", "mask_token_id")},
    "bos_index": "bos_token_id",
    "eos_index": "eos_token_id",
    "unk_index": "unk_token_id",
    "mask_index": "mask_token_id",
    **dict.fromkeys(("pad_index", "pad_id", "_pad_token_id", "decoder_pad_token_id", "padding_idx"), "pad_token_id"),
}
"""Key of the ID of a special token with a role -> the usual key of that role."""

SINGLE_IDS: frozenset[str] = frozenset(
    (
        *ROLES,
        *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "force_words_ids", "stop_token_ids"),
        *("no_timestamps_token_id", "prev_sot_token_id", "transcribe_token_id", "translate_token_id"),
        "timestamp_token_id",
        *("eod_token_id", "start_token_id", "end_token_id", "question_token_id", "document_token_id", "blank_token_id"),
        *("user_token_id", "assistant_token_id", "system_token_id", "im_start_token_id", "im_end_token_id"),
        *("image_token_id", "image_token_index", "image_start_token_id", "image_end_token_id", "image_bos_token_id"),
        *("image_eos_token_id", "image_pad_token_id", "image_break_token_id", "image_placeholder_token_id"),
        *("image_start_id", "image_end_id", "image_patch_id", "im_start_id", "im_end_id", "im_newline_id"),
        *("low_res_image_start_token_id", "frame_start_token_id", "frame_end_token_id", "newline_id"),
        *("slice_start_id", "slice_end_id", "visual_indicator_token_ids", "vision_token_id"),
        *("vision_start_token_id", "vision_end_token_id", "video_token_id", "video_token_index"),
        *("video_start_token_id", "video_end_token_id", "boi_token_id", "boi_token_index", "eoi_token_id"),
        *("eoi_token_index", "boa_token_id", "boa_token_index", "eoa_token_id", "eoa_token_index", "audio_token_id"),
        *("audio_token_index", "audio_start_token_id", "audio_end_token_id", "audio_bos_token_id"),
        *("audio_eos_token_id", "audio_pad_token_id", "audio_delay_token_id", "audio_latent_token_id"),
        *("audio_prompt_token_id", "audio_prompt_bos_token_id", "yes_token_index", "no_token_index"),
        *("tts_bos_token_id", "tts_eos_token_id", "tts_pad_token_id", "tts_text_start_token_id"),
        *("tts_text_end_token_id", "tts_text_pad_token_id"),
    )
)
"""Keys of one token ID, or of a list in which each token is needed; lists may be nested."""

SUPPRESSED_IDS: frozenset[str] = frozenset(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"))
"""Keys of lists of token IDs, or of sequences of them, from which removed tokens are left out."""

SEQUENCE_BIASES: frozenset[str] = frozenset(("sequence_bias",))
"""Keys of pairs (token IDs, number): `[[[7, 8], -1.0]]` or `{(7, 8): -1.0}`. Removed tokens are left out."""

PLACED_IDS: frozenset[str] = frozenset(("forced_decoder_ids",))
"""Keys of lists of pairs `[place in the text, token ID]`."""

NAMED_IDS: frozenset[str] = frozenset(("lang_to_id", "task_to_id", "lang_code_to_id", "text_decoder_lang_to_code_id"))
"""Keys of dictionaries from a name, such as a language, to a token ID. Removed tokens are left out."""

TEXTS_BY_ID: frozenset[str] = frozenset(("id_to_text",))
"""Keys of dictionaries from a token ID, as text, to something about the token (SeamlessM4T v2)."""

FIXED_IDS: frozenset[str] = frozenset(("vocabulary_map",))
"""Keys of dictionaries from a name to a token ID that an edit must not change.

Chameleon and Emu3 compute tables from them when they are built, and read the order of the IDs of image tokens.
"""

FIRST_IDS: Names = ("vocab_offset", "image_token_offset", "audio_token_offset")
"""Keys of the first ID of a range in which a multimodal model looks up images or sounds (Gemma 3n, Apertus 1.5)."""

IDS_BEFORE_RANGE: Names = ("no_timestamps_token_id",)
"""Keys of the ID before a range in which IDs are numbers: all IDs above it are times (Whisper)."""

NO_IDS: frozenset[str] = frozenset(
    (
        *("alignment_heads", "id2label", "label2id", "composer_to_feature_token"),
        *("max_new_tokens", "min_new_tokens", "max_text_tokens", "max_tokens", "prompt_lookup_num_tokens"),
        *("max_initial_timestamp_index", "speaker_id", "lang_id", "default_prompt_id"),
        *("hybrid_layer_ids", "insert_layer_id", "local_layer_ids", "mtp_local_layer_ids", "ple_layer_ids"),
        *("target_layer_ids", "moe_layer_start_index", "moe_layer_end_index", "intermediate_hook_ids"),
        *("head_in_index", "merge_index", "decode_index", "no_aggregation_label_index"),
        *("ce_ignore_index", "ignore_index", "loss_ignore_index", "semantic_loss_ignore_index"),
        *("sparse_pred_ignore_index", "pred_num_mask_tokens", "t2u_max_new_tokens"),
        *("default_num_delay_tokens", "default_num_lookahead_tokens"),
        *("audio_stream_bos_id", "audio_stream_eos_id", "codebook_eos_token_id", "codebook_pad_token_id"),
        *("codec_bos_id", "codec_eos_token_id", "codec_nothink_id", "codec_pad_id", "codec_think_bos_id"),
        *("codec_think_eos_id", "tts_codec_start_token_id", "tts_codec_end_token_id", "tts_codec_mask_token_id"),
        *("tts_codec_pad_token_id", "t2u_bos_token_id", "t2u_decoder_start_token_id", "t2u_eos_token_id"),
        *("t2u_pad_token_id", "t2u_lang_code_to_id", "vocoder_lang_code_to_id", "char_to_id"),
        *("subs_pad_id", "tag_pad_id", "pred_token_id", "quantization_config", "quantization"),
    )
)
"""Keys that end like those of token IDs, and are counts, places, labels, or IDs of another vocabulary.

Also settings of quantisation, which have entries by names of modules, such as `embed_tokens`.
"""

COUNTS: Names = ("num_", "n_")
"""Beginnings of keys that are counts."""

ENDINGS: Names = ("_id", "_ids", "_tokens", "_to_id", "_index")
"""Ends of keys that may name token IDs."""

OTHER_PARTS: frozenset[str] = frozenset(
    (
        *("vision_config", "audio_config", "speech_config", "image_config", "video_config", "vq_config"),
        *("qformer_config", "projector_config", "codec_config", "backbone_config", "protein_encoder_config"),
        *("token2wav_config", "code2wav_config", "depth_decoder_config", "semantic_model_config"),
    )
)
"""Keys of nested configurations whose number of tokens is that of images, sounds or another text model."""

LARGEST_ID: Mapping[str, int | None] = {
    **dict.fromkeys(("clip_text_model", "clipseg_text_model", "xclip_text_model", "groupvit_text_model"), 2),
    **dict.fromkeys(("owlvit_text_model", "owlv2_text_model", "sam3_lite_text_text_model"), None),
}
"""Model type whose vector of a text is that of its largest ID -> `eos_token_id` with which it is; `None`: always."""

HASHED_IDS: Names = ("blt",)
"""Model types that look up rows by hashes of token IDs."""

COUNTED_FROM_PADDING: frozenset[str] = frozenset(
    (
        *("altclip_text_model", "bridgetower_text_model", "clap_text_model", "layoutlmv3", "lilt", "markuplm"),
        *("speech_to_text", "speecht5"),
    )
)
"""Model types without a record whose positions are counted from the ID of the padding token."""
