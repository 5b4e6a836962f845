"""Records of text encoders beside images or sounds, and of speech decoders and speakers without a language model."""

from collections.abc import Mapping

from embedlayer.families.records import (
    SQRT_DIM,
    SQRT_DIM_IF_SCALE_EMBEDDING,
    STATE_POSITIONS,
    Factor,
    Family,
    HeadSpec,
    LearnedPositions,
    NormSpec,
    SinusoidalPositions,
)

_DECODER_TABLE = ("decoder.embed_tokens.weight",)


# the image encoder has positions of the same name, so those of `text_model` are preferred
_CLIP_POSITIONS = "embeddings.position_embedding.weight"
_CLIP = Family(
    "clip",
    (
        *("clip_text_model", "clipseg_text_model", "metaclip_2_text_model", "groupvit_text_model", "xclip_text_model"),
        *("owlvit_text_model", "owlv2_text_model", "siglip_text_model", "siglip2_text_model", "aimv2_text_model"),
    ),
    table=("text_model.embeddings.token_embedding.weight", "embeddings.token_embedding.weight"),
    position=LearnedPositions((f"text_model.{_CLIP_POSITIONS}", _CLIP_POSITIONS)),
    recipe=("position",),
    head=None,
)

TEXT_ENCODER_FAMILIES: tuple[Family, ...] = (
    _CLIP,
    _CLIP.like(
        "tipsv2",
        "tipsv2_text_model",
        table=("text_model.embeddings.token_embedding.weight", "token_embedding.weight"),
        scale=Factor("sqrt_dim", only_if=("scale_sqrt_depth",), otherwise=True),
        position=SinusoidalPositions(after_padding=False, endpoint=True),
    ),
    Family(
        "cohere_asr",
        ("cohere_asr",),
        table=("_embedding.token_embedding.weight", *_DECODER_TABLE),
        position=LearnedPositions(("_embedding.position_embedding.pos_enc", "decoder.pos_emb.weight")),
        recipe=("position", "norm"),
        norm=NormSpec(("_embedding.layer_norm", "decoder.embedding_layernorm"), None, 1e-5),
        head=HeadSpec(
            ("log_softmax.mlp.layer0.weight", "proj_out.weight"),
            bias=("log_softmax.mlp.layer0.bias", "proj_out.bias"),
        ),
    ),
    Family(
        "moonshine",
        ("moonshine",),
        table=_DECODER_TABLE,
        aliases=(
            ("decoder_num_attention_heads", "num_attention_heads"),
            ("decoder_num_hidden_layers", "num_hidden_layers"),
        ),
        position="rotary",
        head=HeadSpec(("proj_out.weight",), tied=True),
    ),
    Family(
        "moonshine_streaming",
        ("moonshine_streaming",),
        table=_DECODER_TABLE,
        position="rotary",
        head=HeadSpec(("proj_out.weight",)),
    ),
    Family(
        "speech_to_text",
        ("speech_to_text",),
        table=_DECODER_TABLE,
        aliases=(("max_target_positions", "max_position_embeddings"),),
        scale=SQRT_DIM_IF_SCALE_EMBEDDING,
        position=SinusoidalPositions(),
        numbering="ids",
        recipe=("position",),
        head=HeadSpec(tied=True),
        defaults=(("scale_embedding", True),),
    ),
    Family(
        "speecht5",
        ("speecht5",),
        table=("decoder.prenet.embed_tokens.weight",),
        aliases=(("max_text_positions", "max_position_embeddings"),),
        scale=SQRT_DIM_IF_SCALE_EMBEDDING,
        position=SinusoidalPositions(),
        numbering="ids",
        recipe=("position",),
        head=HeadSpec(("text_decoder_postnet.lm_head.weight",), tied=True),
    ),
    Family(
        "vits",
        ("vits",),
        table=("text_encoder.embed_tokens.weight",),
        scale=SQRT_DIM,
        recipe=("mask",),
        head=None,
        notes=(STATE_POSITIONS,),
    ),
    Family(
        "fastspeech2_conformer",
        ("fastspeech2_conformer",),
        table=("encoder.embed.weight",),
        scale=SQRT_DIM,
        head=None,
        notes=(STATE_POSITIONS,),
    ),
)
"""Encoders of text without an LM head, and models that hear or speak."""

_SOUND = "its input is sound: it has no token table, and its head alone has a row for each token"

REFUSED_TEXT_ENCODERS: Mapping[str, str] = {
    "canine": "its input is rows for hashes of the characters, eight of them joined, and it has no row for each token",
    **dict.fromkeys(
        (
            *("data2vec-audio", "granite_speech5_ctc", "granite_speech5_encoder", "hubert", "lasr_ctc", "omniasr_ctc"),
            *("parakeet_ctc", "sew", "sew-d", "unispeech", "unispeech-sat", "wav2vec2", "wav2vec2-bert"),
            *("wav2vec2-conformer", "wavlm"),
        ),
        _SOUND,
    ),
    **dict.fromkeys(
        ("nemotron3_5_asr", "nemotron_asr_streaming", "parakeet_rnnt", "parakeet_tdt"),
        "a recurrent network reads its rows, and its head multiplies sums of that network's and the sound's states",
    ),
    "xcodec": "its rows are codes of sound that are added up to a sound, and it reads no text",
    "lxmert": "its configuration counts blocks by kind of input, in a form that is not read",
    "canary": "its decoder has a configuration of its own, `decoder_config`, which is not read",
    **dict.fromkeys(
        ("videoprism", "videoprism_text_model"),
        "its encoder appends a vector for the whole text to the rows of the tokens",
    ),
    **dict.fromkeys(
        ("sam3_lite_text", "sam3_lite_text_text_model"), "its positions are interpolated to the length of each text"
    ),
    "sam3_video": "its text encoder is that of its detector, whose folder is read",
    **dict.fromkeys(
        ("layoutlmv2", "layoutlmv3"),
        "its encoder adds vectors for the place of each token on the page, joined from six tables",
    ),
    "markuplm": "its encoder adds vectors for the place of each token in the document's tree",
    **dict.fromkeys(("tvp", "vilt"), "its first block gets the patches of images beside the tokens"),
    "clvp": "it joins an encoder of text and one of speech codes, each with a table of its own",
    **dict.fromkeys(
        ("fastspeech2_conformer_with_hifigan", "speech-encoder-decoder"),
        "it joins two models that have model types of their own, whose folders are read",
    ),
    **dict.fromkeys(
        ("qwen2_5_omni", "qwen3_omni_moe"),
        "it joins a thinker and a talker, each with a table of its own; the folder of the thinker alone is read",
    ),
    **dict.fromkeys(
        ("gradium_phonon_tts", "pocket_tts"),
        "its input has a learned vector of sound in place of the row of one of its tokens",
    ),
    "decision_transformer": "its blocks get projected returns, states and actions, and no row of its token table",
    **dict.fromkeys(
        ("colpali", "colmodernvbert"), "its language model is described in `vlm_config`, which is not read"
    ),
}
"""Model type -> why it is not read, the middle of a sentence."""
