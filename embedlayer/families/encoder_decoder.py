"""Records of encoder-decoder models, whose decoder may also be stored alone."""

from embedlayer.families.records import (
    SQRT_DIM_IF_SCALE_EMBEDDING,
    SQRT_DIM_ROUNDED,
    DecoderSpec,
    Factor,
    Family,
    HeadSpec,
    LearnedPositions,
    NormSpec,
    OtherTable,
    RelativePositions,
    SinusoidalPositions,
    StreamPositions,
)

_TABLE = ("encoder.embed_tokens.weight", "shared.weight", "decoder.embed_tokens.weight")
"""The encoder's own table first: in an untied model, `shared` is another one that no stack reads."""
_DECODER_TABLE = ("decoder.embed_tokens.weight",)
_BIAS = ("final_logits_bias",)
_T5_ATTENTION = ("SelfAttention", "LocalSelfAttention", "TransientGlobalSelfAttention")
_UMT5_BIAS = "block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
_SCALED = (("scale_embedding", True),)
_T5_LOGITS = Factor("1/sqrt_dim", only_if=("scale_decoder_outputs", "tie_word_embeddings"), otherwise=True)


def _learned(stack: str, offset: int = 2) -> LearnedPositions:
    """Return learned positions of a stack, with the rows before position 0 that fairseq leaves."""
    return LearnedPositions((f"{stack}.embed_positions.weight",), offset=offset)


def _fixed(stack: str, *, after_padding: bool = False) -> SinusoidalPositions:
    """Return fixed positions of a stack, which a checkpoint may also store."""
    return SinusoidalPositions(after_padding, stored=(f"{stack}.embed_positions.weight",))


_BART_NORM = NormSpec("decoder.layernorm_embedding", None, 1e-5)
_BART = Family(
    "",
    ("bart", "mbart", "mvp"),
    table=_TABLE,
    scale=SQRT_DIM_IF_SCALE_EMBEDDING,
    position=_learned("encoder"),
    recipe=("position", "norm"),
    norm=NormSpec("encoder.layernorm_embedding", None, 1e-5),
    head=HeadSpec(bias=_BIAS, has_bias="stored", tied=True),
    decoder_input=DecoderSpec(position=_learned("decoder"), norm=_BART_NORM),
)
"""Learned positions, then a LayerNorm, in both stacks, and a head with a bias."""

_BLENDERBOT = _BART.like(
    "blenderbot",
    position=_learned("encoder", 0),
    recipe=("position",),
    norm=None,
    decoder_input=DecoderSpec(position=_learned("decoder", 0)),
)
_PEGASUS = _BLENDERBOT.like(
    "pegasus", position=_fixed("encoder"), decoder_input=DecoderSpec(position=_fixed("decoder"))
)
_BIASES = tuple(f"block.0.layer.0.{kind}.relative_attention_bias.weight" for kind in _T5_ATTENTION)
_T5 = Family(
    "t5",
    ("t5",),
    table=_TABLE,
    aliases=(("num_heads", "num_attention_heads"), ("num_layers", "num_hidden_layers")),
    position=RelativePositions(tuple(f"encoder.{bias}" for bias in _BIASES)),
    head=HeadSpec(logit_scale=_T5_LOGITS, scales_hidden=True, tied="always"),
    decoder_input=DecoderSpec(
        position=RelativePositions(tuple(f"decoder.{bias}" for bias in _BIASES), bidirectional=False)
    ),
)
"""A relative bias in each stack, and a head that always shares the table."""

_M2M_100 = Family(
    "",
    ("m2m_100", "nllb-moe"),
    table=_TABLE,
    scale=SQRT_DIM_IF_SCALE_EMBEDDING,
    position=SinusoidalPositions(),
    numbering="ids",
    recipe=("position",),
    head=HeadSpec(tied=True),
    decoder_input=DecoderSpec(),
    defaults=_SCALED,
)

ENCODER_DECODER_FAMILIES: tuple[Family, ...] = (
    _T5,
    _T5.like("", *("longt5", "switch_transformers")),
    _T5.like("pop2piano", head=HeadSpec(logit_scale=Factor("1/sqrt_dim"), scales_hidden=True, tied="always")),
    _T5.like("mt5", head=HeadSpec(tied="always")),
    _T5.like(
        "umt5",
        position=RelativePositions((f"encoder.{_UMT5_BIAS}",)),
        head=HeadSpec(logit_scale=Factor("1/sqrt_dim"), scales_hidden=True, tied="always"),
        decoder_input=DecoderSpec(position=RelativePositions((f"decoder.{_UMT5_BIAS}",), bidirectional=False)),
    ),
    Family(
        "t5gemma",
        ("t5gemma",),
        table=("encoder.embed_tokens.weight",),
        scale=SQRT_DIM_ROUNDED,
        position="rotary",
        head=HeadSpec(("lm_head.out_proj.weight",), softcap="final_logit_softcapping", tied=True),
        decoder_input=DecoderSpec(position="rotary", layers=("num_hidden_layers",), sub_configs=("encoder", "decoder")),
        defaults=(("final_logit_softcapping", 30.0),),
    ),
    _BART,
    _BART.like("plbart", defaults=_SCALED),
    _BART.like(
        "led",
        scale=None,
        position=_learned("encoder", 0),
        decoder_input=DecoderSpec(position=_learned("decoder", 0), norm=_BART_NORM),
    ),
    _BART.like(
        "blenderbot-small",
        position=_learned("encoder", 0),
        decoder_input=DecoderSpec(
            position=_learned("decoder", 0), norm=_BART_NORM, recipe=("norm", "position"), is_scaled=False
        ),
    ),
    _BLENDERBOT,
    _BLENDERBOT.like("bigbird_pegasus", defaults=_SCALED),
    _PEGASUS,
    _PEGASUS.like(
        "pegasus_x",
        position=SinusoidalPositions(after_padding=False, endpoint=True),
        decoder_input=DecoderSpec(),
        head=HeadSpec(tied=True),
        defaults=_SCALED,
        other_tables=(
            OtherTable(
                "encoder.embed_global.weight", "blocks of the encoder read it as global tokens", of_tokens=False
            ),
        ),
    ),
    _PEGASUS.like("marian", decoder_input=DecoderSpec(vocab_size="decoder_vocab_size", position=_fixed("decoder"))),
    Family(
        "trocr",
        ("trocr",),
        table=_DECODER_TABLE,
        scale=SQRT_DIM_IF_SCALE_EMBEDDING,
        position=_learned("decoder"),
        recipe=("position", "norm"),
        optional=(("norm", "layernorm_embedding", True),),
        norm=NormSpec("decoder.layernorm_embedding", None, 1e-5),
        head=HeadSpec(("output_projection.weight",), tied=True),
        not_computed=(("use_learned_position_embeddings", (True,)),),
    ),
    Family(
        "whisper",
        ("whisper",),
        table=_DECODER_TABLE,
        position=_learned("decoder", 0),
        recipe=("position",),
        head=HeadSpec(("proj_out.weight",), tied=True),
    ),
    _M2M_100,
    Family(
        "prophetnet",
        ("prophetnet",),
        table=("encoder.word_embeddings.weight", "word_embeddings.weight"),
        position=LearnedPositions(("encoder.position_embeddings.weight",), offset="padding"),
        recipe=("position", "norm"),
        norm=NormSpec("encoder.embeddings_layer_norm", None, 1e-5),
        head=HeadSpec(tied=True),
        decoder_input=DecoderSpec(
            table=("decoder.word_embeddings.weight", "word_embeddings.weight"),
            position=StreamPositions(
                LearnedPositions(("decoder.position_embeddings.weight",), offset="padding"),
                streams=("decoder.ngram_embeddings.weight",),
            ),
            norm=NormSpec("decoder.embeddings_layer_norm", None, 1e-5),
            recipe=("position", "streams", "norm"),
        ),
        notes=(
            "each block of the decoder also computes a bias from relative positions and its hidden states, which is no "
            "part of this layer.",
        ),
    ),
    Family(
        "fsmt",
        ("fsmt",),
        table=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        aliases=(("src_vocab_size", "vocab_size"),),
        scale=SQRT_DIM_IF_SCALE_EMBEDDING,
        position=_fixed("encoder", after_padding=True),
        numbering="ids",
        recipe=("position",),
        head=HeadSpec(("decoder.output_projection.weight",)),
        decoder_input=DecoderSpec(vocab_size="tgt_vocab_size", position=_fixed("decoder", after_padding=True)),
        defaults=_SCALED,
    ),
    _M2M_100.like(
        "",
        *("seamless_m4t", "seamless_m4t_v2"),
        table=("text_encoder.embed_tokens.weight", "shared.weight", "text_decoder.embed_tokens.weight"),
        decoder_input=DecoderSpec(("text_decoder.embed_tokens.weight",)),
    ),
)
