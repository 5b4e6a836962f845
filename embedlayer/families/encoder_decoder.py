"""Records of encoder-decoder models."""

from embedlayer.families.records import Family, HeadSpec, RelativePositions, SinusoidalPositions

_ENCODER_DECODER_TABLE = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")

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
        head=HeadSpec(logit_scale="sqrt_dim_if_tied", tied="always"),
    ),
    Family(
        "m2m_100",
        ("m2m_100",),
        table=_ENCODER_DECODER_TABLE,
        scale="sqrt_dim_if_scale_embedding",
        position=SinusoidalPositions(),
        numbering="ids",
        recipe=("position",),
        head=HeadSpec(tied=True),
    ),
)
