"""Records of models whose input or output are K streams of codes, such as those of a sound codec."""

from collections.abc import Mapping
from dataclasses import replace

from embedlayer.families.records import (
    CodeHeadSpec,
    CodeSpec,
    CountedRows,
    DecoderSpec,
    Family,
    HeadSpec,
    LearnedPositions,
    OtherTable,
    SinusoidalPositions,
)

_BARK = Family(
    "bark",
    ("semantic", "coarse_acoustics"),
    table=("input_embeds_layer.weight",),
    vocab_size="input_vocab_size",
    position=LearnedPositions(("position_embeds_layer.weight",)),
    recipe=("position",),
    aliases=(("num_heads", "num_attention_heads"), ("num_layers", "num_hidden_layers")),
    head=HeadSpec(rows=CountedRows("output_vocab_size"), tied="never"),
)

STREAM_FAMILIES: tuple[Family, ...] = (
    Family(
        "musicgen",
        ("musicgen_decoder", "musicgen_melody_decoder"),
        table=(),
        position=SinusoidalPositions(after_padding=False, endpoint=True, cosines_first=True),
        recipe=("position",),
        head=None,
        codes=CodeSpec(
            ("decoder.embed_tokens.{}.weight",),
            ("vocab_size",),
            more_rows=1,
            head=CodeHeadSpec(("lm_heads.{}.weight",)),
            delays="steps",
        ),
    ),
    Family(
        "moshi",
        ("moshi",),
        table=("model.embed_tokens.weight", "embed_tokens.weight"),
        extra_rows=1,
        position="rotary",
        recipe=("codes",),
        head=HeadSpec(tied="never"),
        codes=CodeSpec(
            ("embed_tokens.{}.weight",),
            ("audio_vocab_size",),
            sides=2,
            more_rows=1,
            use="added",
            depth_head=CodeHeadSpec(("depth_decoder.lm_heads.weight",), layout="stacked"),
            delays="first",
        ),
        other_tables=(OtherTable("text_embed_tokens.weight", "input of the depth decoder"),),
    ),
    Family(
        "csm",
        ("csm",),
        table=("embed_text_tokens.weight",),
        vocab_size="text_vocab_size",
        position="rotary",
        recipe=("codes",),
        head=None,
        codes=CodeSpec(
            ("embed_audio_tokens.weight", "depth_decoder.model.embed_tokens.weight"),
            ("vocab_size", "codebook_size"),
            use="placed",
            placeholders=("audio_token_id", "audio_eos_token_id"),
            head=CodeHeadSpec(("lm_head.weight",), only=True),
            depth_head=CodeHeadSpec(("codebooks_head.weight",), first=1, layout="transposed"),
        ),
    ),
    Family(
        "dia",
        ("dia",),
        table=("encoder.embedding.weight",),
        position="rotary",
        head=None,
        decoder_input=DecoderSpec(
            ("decoder.embeddings.embed.weight",),
            position="rotary",
            recipe=(),
            layers=("num_hidden_layers",),
            sub_configs=("encoder_config", "decoder_config"),
        ),
        codes=CodeSpec(
            ("decoder.embeddings.embed.weight",),
            ("vocab_size",),
            count="num_channels",
            head=CodeHeadSpec(("logits_dense.weight",)),
            delays="delay_pattern",
        ),
    ),
    Family(
        "higgs_audio_v2",
        ("higgs_audio_v2",),
        table=("embed_tokens.weight",),
        position="rotary",
        recipe=("codes",),
        head=HeadSpec(("text_lm_head.weight",), tied="never"),
        codes=CodeSpec(
            ("embed_audio_tokens.weight",),
            ("codebook_size",),
            use="placed",
            placeholders=("audio_token_id", "audio_delay_token_id"),
            head=CodeHeadSpec(("audio_lm_head.weight",)),
        ),
    ),
    Family(
        "kyutai_speech_to_text",
        ("kyutai_speech_to_text",),
        table=(),
        position="rotary",
        head=None,
        codes=CodeSpec(
            ("embed_tokens.embed_tokens.weight",),
            ("codebook_vocab_size",),
            text_size="vocab_size",
            shared_padding="audio_pad_token_id",
            head=CodeHeadSpec(("lm_head.weight",), only=True, tied="tie_word_embeddings"),
        ),
    ),
    _BARK,
    replace(
        _BARK,
        model_types=("fine_acoustics",),
        table=(),
        head=None,
        codes=CodeSpec(
            ("input_embeds_layers.{}.weight",),
            ("input_vocab_size", "output_vocab_size"),
            count="n_codes_total",
            head=CodeHeadSpec(("lm_heads.{}.weight",), first=1, tied="tie_word_embeddings"),
        ),
        not_computed=(("n_codes_given", (1,)),),
        defaults=(("tie_word_embeddings", True),),
    ),
)
"""Records of models with K streams of codes; of Bark, also those of its parts with one stream."""

REFUSED_STREAMS: Mapping[str, str] = {
    "bark": "it joins three models: load a folder of one, as model.fine_acoustics.save_pretrained(folder) writes it",
    **dict.fromkeys(
        ("csm_depth_decoder_model", "moshi_depth"),
        "each of its steps reads the rows of another stream, and the first a hidden state of another model",
    ),
}
"""Model type with streams of codes -> why it is not read, the middle of a sentence."""
