"""Records of encoder-decoder models."""

from embedlayer.families.records import (
    SQRT_DIM_IF_SCALE_EMBEDDING,
    Factor,
    Family,
    HeadSpec,
    RelativePositions,
    SinusoidalPositions,
)

_ENCODER_DECODER_TABLE = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")

_T5_LOGITS = Factor("1/sqrt_dim", only_if=("scale_decoder_outputs", "tie_word_embeddings"), otherwise=True)

ENCODER_DECODER_FAMILIES: tuple[Family, ...] = (
    Family(
        "t5",
        ("t5",),
        table=_ENCODER_DECODER_TABLE,
        aliases=(("num_heads", "num_attention_heads"), ("num_layers", "num_hidden_layers")),
        position=RelativePositions(
            encoder=("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",),
            decoder=("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",),
        ),
        head=HeadSpec(logit_scale=_T5_LOGITS, tied="always"),
    ),
    Family(
        "m2m_100",
        ("m2m_100",),
        table=_ENCODER_DECODER_TABLE,
        scale=SQRT_DIM_IF_SCALE_EMBEDDING,
        position=SinusoidalPositions(),
        numbering="ids",
        recipe=("position",),
        head=HeadSpec(tied=True),
    ),
)
