"""Records of encoders with a masked LM head."""

from collections.abc import Mapping
from dataclasses import replace

from embedlayer.families.records import (
    STATE_POSITIONS,
    AddedColumns,
    AxialPositions,
    BiasedPositions,
    Factor,
    Family,
    FeatureSpec,
    HeadSpec,
    LearnedPositions,
    LinearSpec,
    NormSpec,
    OtherTable,
    PositionChoice,
    RelativePositions,
    TrigramSpec,
    WideRows,
)


def _masked_head(name: str, dense: str, norm: str, activation: str = "hidden_act") -> HeadSpec:
    """Return the spec of a masked LM head (BERT), which is tied to the token table by default."""
    return HeadSpec(
        weight=(f"{name}.decoder.weight",),
        bias=(f"{name}.decoder.bias", f"{name}.bias"),
        dense=LinearSpec(dense),
        activation=activation,
        norm=NormSpec(norm),
        tied=True,
    )


_BERT_HEAD = _masked_head("predictions", "predictions.transform.dense", "predictions.transform.LayerNorm")
_ROBERTA_HEAD = _masked_head("lm_head", "lm_head.dense", "lm_head.layer_norm", "gelu")
_ELECTRA_HEAD = HeadSpec(
    weight=("generator_lm_head.weight",),
    bias=("generator_lm_head.bias",),
    dense=LinearSpec("generator_predictions.dense"),
    activation="gelu",
    norm=NormSpec("generator_predictions.LayerNorm"),
    tied=True,
)
_FROM_TWO = LearnedPositions(("embeddings.position_embeddings.weight",), offset=2, ids_include_offset=True)
_FROM_PADDING = LearnedPositions(("embeddings.position_embeddings.weight",), offset="padding", ids_include_offset=True)
_PLANES = tuple(
    ((f"embeddings.{axis}_position_embeddings.weight",), factor)
    for axis, factor in (("x", 2.0), ("y", 2.0), ("h", 1.0), ("w", 1.0))
)
_PROJECTED = ("types", "position", "norm", "project")


_BERT = Family(
    "bert",
    ("bert", "squeezebert", "splinter", "dpr", "visual_bert", "bros"),
    table=("embeddings.word_embeddings.weight",),
    position=LearnedPositions(("embeddings.position_embeddings.weight",)),
    recipe=("types", "position", "norm"),
    types=("embeddings.token_type_embeddings.weight",),
    norm=NormSpec("embeddings.LayerNorm"),
    head=_BERT_HEAD,
)
"""Token, type and position embeddings are added up, and the sum is normalised."""

_ROBERTA = _BERT.like(
    "roberta",
    *("roberta", "xlm-roberta", "camembert", "data2vec-text", "xmod", "roberta-prelayernorm"),
    position=_FROM_PADDING,
    numbering="ids",
    head=_ROBERTA_HEAD,
)
"""Positions count the tokens that are not padding, from `pad_token_id + 1`."""

_ROTARY_BERT = _BERT.like(
    "",
    position="rotary",
    recipe=("types", "norm"),
    norm=NormSpec(("embeddings.LayerNorm", "emb_ln")),
    head=replace(_ROBERTA_HEAD, norm=NormSpec(("lm_head.layer_norm", "lm_head.norm"))),
)
_EPS = (("layer_norm_eps", 1e-5),)
_GELU_NEW = (("hidden_act", "gelu_new"),)

MASKED_FAMILIES: tuple[Family, ...] = (
    _BERT,
    _BERT.like("", *("align_text_model", "chinese_clip_text_model", "flava_text_model"), head=None),
    _BERT.like("yoso", position=_FROM_TWO),
    _BERT.like("nystromformer", position=_FROM_TWO, defaults=_EPS + _GELU_NEW),
    _BERT.like("mra", position=_FROM_TWO, defaults=_EPS),
    _BERT.like("layoutlm", more_types=_PLANES),
    _BERT.like(
        "tapas",
        types=("embeddings.token_type_embeddings_0.weight",),
        more_types=tuple(((f"embeddings.token_type_embeddings_{i}.weight",), 1.0) for i in range(1, 7)),
    ),
    _BERT.like(
        "fnet",
        recipe=_PROJECTED,
        projection=LinearSpec("embeddings.projection"),
        defaults=_GELU_NEW,
    ),
    _BERT.like(
        "mobilebert",
        width=("embedding_size",),
        recipe=("project", "position", "types", "norm"),
        projection=TrigramSpec(LinearSpec("embeddings.embedding_transformation"), "trigram_input"),
        norm=NormSpec("embeddings.LayerNorm", None, 1e-5, affine_key=("normalization_type", "no_norm")),
        head=replace(_BERT_HEAD, rows=AddedColumns(("predictions.dense.weight",))),
        defaults=(("hidden_act", "relu"), ("normalization_type", "no_norm")),
    ),
    _BERT.like(
        "deberta",
        *("deberta", "deberta-v2"),
        width=("embedding_size", "hidden_size"),
        recipe=("position", "types", "project", "norm", "mask"),
        optional=(("position", "position_biased_input", True), ("types", "type_vocab_size", 0)),
        projection=LinearSpec("embeddings.embed_proj", bias=False),
        norm=NormSpec("embeddings.LayerNorm", eps=1e-7),
        head=HeadSpec(
            ("predictions.decoder.weight",),
            bias=("predictions.decoder.bias", "predictions.bias", "lm_predictions.lm_head.bias"),
            dense=LinearSpec(("predictions.transform.dense", "lm_predictions.lm_head.dense")),
            activation="hidden_act",
            norm=NormSpec(("predictions.transform.LayerNorm", "lm_predictions.lm_head.LayerNorm"), eps=1e-7),
            tied=True,
        ),
        notes=(
            "if relative_attention is true, each block also computes a bias from relative positions and its hidden "
            "states, which is no part of this layer.",
        ),
    ),
    _BERT.like(
        "distilbert",
        width=("dim",),
        aliases=(("dim", "hidden_size"),),
        recipe=("position", "norm"),
        types=(),
        norm=NormSpec("embeddings.LayerNorm", None, 1e-12),
        head=HeadSpec(
            ("vocab_projector.weight",),
            bias=("vocab_projector.bias",),
            dense=LinearSpec("vocab_transform"),
            activation="activation",
            norm=NormSpec("vocab_layer_norm", None, 1e-12),
            tied=True,
        ),
    ),
    _ROTARY_BERT.like(
        "nomic_bert",
        head=_masked_head("predictions", "predictions.transform.dense", "predictions.transform.layer_norm"),
        defaults=(("hidden_act", "silu"),),
    ),
    _ROTARY_BERT.like("gte", optional=(("types", "type_vocab_size", 1),)),
    _ROTARY_BERT.like("jina_embeddings_v3", optional=(("types", "type_vocab_size", 1),), defaults=_EPS),
    _BERT.like(
        "esmc",
        table=("embed_tokens.weight",),
        position="rotary",
        recipe=(),
        types=(),
        norm=None,
        head=replace(_ROBERTA_HEAD, norm=NormSpec("lm_head.layer_norm", None, 1e-5), tied=False),
    ),
    Family(
        "eurobert",
        ("eurobert",),
        ("embed_tokens.weight",),
        position="rotary",
        head=HeadSpec(bias=("lm_head.bias",), has_bias=("mlp_bias", False)),
    ),
    Family(
        "modernbert",
        ("modernbert",),
        ("embeddings.tok_embeddings.weight",),
        position="rotary",
        recipe=("norm",),
        norm=NormSpec("embeddings.norm", "norm_eps", 1e-5, bias=("norm_bias", False)),
        head=HeadSpec(
            ("decoder.weight", "lm_head.weight"),
            bias=("decoder.bias", "lm_head.bias"),
            has_bias=("decoder_bias", True),
            dense=LinearSpec(("head.dense", "projection_head.dense"), bias=("classifier_bias", False)),
            activation="classifier_activation",
            norm=NormSpec(("head.norm", "projection_head.norm"), "norm_eps", 1e-5, bias=("norm_bias", False)),
            tied=True,
        ),
    ),
    _BERT.like(
        "funnel",
        position=None,
        recipe=("norm",),
        types=(),
        norm=NormSpec("embeddings.layer_norm", eps=1e-9),
        head=HeadSpec(bias=("lm_head.bias",), tied=True),
        notes=(STATE_POSITIONS,),
    ),
    _BERT.like(
        "blip",
        "blip_text_model",
        table=(
            "text_decoder.bert.embeddings.word_embeddings.weight",
            "text_model.embeddings.word_embeddings.weight",
            "embeddings.word_embeddings.weight",
        ),
        recipe=("position", "norm"),
        types=(),
        other_tables=(
            OtherTable(
                "text_encoder.embeddings.word_embeddings.weight",
                "the encoder of the question has a table of its own",
                is_input=True,
            ),
        ),
    ),
    _BERT.like("megatron-bert", recipe=("types", "position"), norm=None),
    _BERT.like(
        "bert-generation",
        recipe=("position", "norm"),
        types=(),
        head=HeadSpec(("lm_head.decoder.weight",), bias=("lm_head.decoder.bias", "lm_head.bias"), tied=True),
    ),
    _BERT.like(
        "roc_bert",
        recipe=("project", "types", "position", "norm"),
        projection=FeatureSpec(
            LinearSpec("embeddings.map_inputs_layer"),
            (("embeddings.shape_embed.weight",), ("embeddings.pronunciation_embed.weight",)),
        ),
        not_computed=(("concat_input", (True,)),),
    ),
    _BERT.like(
        "roformer",
        width=("embedding_size",),
        position="rotary",
        recipe=("types", "norm", "project"),
        projection=LinearSpec("embeddings_project"),
        not_computed=(("rotary_value", (False,)),),
    ),
    _BERT.like(
        "reformer",
        position=AxialPositions(
            (("embeddings.position_embeddings.weights.0",), ("embeddings.position_embeddings.weights.1",)),
            LearnedPositions(("embeddings.position_embeddings.embedding.weight",)),
        ),
        recipe=("position",),
        types=(),
        norm=None,
        head=HeadSpec(
            ("lm_head.decoder.weight",), bias=("lm_head.decoder.bias",), has_bias="stored", rows=WideRows(hidden=2)
        ),
        other_tables=(OtherTable("lm_head.bias", "a bias of the head that the family's code does not add", "head"),),
    ),
    _BERT.like(
        "xlm",
        *("xlm", "flaubert"),
        table=("embeddings.weight",),
        width=("emb_dim",),
        aliases=(("n_words", "vocab_size"), ("pad_index", "pad_token_id"), ("emb_dim", "hidden_size")),
        position=LearnedPositions(("position_embeddings.weight",)),
        recipe=("position", "types", "norm", "length_mask"),
        types="table",
        norm=NormSpec("layer_norm_emb"),
        head=HeadSpec(("pred_layer.proj.weight",), bias=("pred_layer.proj.bias",), tied=True),
        defaults=(("pad_token_id", 2),),
        not_computed=(("asm", (False,)),),
    ),
    _BERT.like(
        "xlnet",
        table=("word_embedding.weight",),
        position=None,
        recipe=(),
        types=(),
        norm=None,
        head=HeadSpec(("lm_loss.weight",), bias=("lm_loss.bias",), tied=True),
        notes=(STATE_POSITIONS,),
    ),
    _BERT.like("ernie", more_types=((("embeddings.task_type_embeddings.weight",), 1.0),)),
    _BERT.like(
        "big_bird",
        scale=Factor("sqrt_dim", only_if=("rescale_embeddings",)),
        defaults=_GELU_NEW,
    ),
    _BERT.like(
        "electra",
        *("electra", "convbert"),
        width=("embedding_size",),
        recipe=_PROJECTED,
        projection=LinearSpec("embeddings_project"),
        head=_ELECTRA_HEAD,
    ),
    _BERT.like(
        "rembert",
        width=("input_embedding_size",),
        recipe=_PROJECTED,
        projection=LinearSpec("encoder.embedding_hidden_mapping_in"),
        head=replace(_masked_head("predictions", "predictions.dense", "predictions.LayerNorm"), tied="never"),
    ),
    _ROBERTA,
    _ROBERTA.like("longformer", *("longformer", "luke")),
    _ROBERTA.like("lilt", notes=("a second stream of each block reads places on the page, not tokens.",)),
    _ROBERTA.like("clap", "clap_text_model", head=None),
    _ROBERTA.like("", *("altclip_text_model", "bridgetower_text_model"), head=None, defaults=_EPS),
    _ROBERTA.like(
        "ibert",
        not_computed=(("quant_mode", (False,)),),
        other_tables=(
            OtherTable(
                "word_embeddings.weight_integer", "the rows as integers, for the inference that quant_mode says"
            ),
        ),
    ),
    _ROBERTA.like(
        "mpnet",
        recipe=("position", "norm"),
        types=(),
        position=BiasedPositions(_FROM_PADDING, RelativePositions(("encoder.relative_attention_bias.weight",))),
        not_computed=(("pad_token_id", (1,)),),
    ),
    _ROBERTA.like(
        "esm",
        position=PositionChoice("position_embedding_type", (("absolute", _FROM_PADDING), ("rotary", "rotary"))),
        recipe=("token_dropout", "position", "norm", "mask"),
        optional=(("token_dropout", "token_dropout", False), ("norm", "emb_layer_norm_before", False)),
        types=(),
        norm=NormSpec("embeddings.layer_norm"),
    ),
    _ROBERTA.like("xlm-roberta-xl", recipe=("types", "position"), norm=None, defaults=_EPS),
    _BERT.like(
        "albert",
        width=("embedding_size",),
        recipe=_PROJECTED,
        projection=LinearSpec("embedding_hidden_mapping_in"),
        head=_masked_head("predictions", "predictions.dense", "predictions.LayerNorm"),
        defaults=_GELU_NEW,
    ),
)
"""Encoders with a masked LM head, grouped by what they compute beside BERT."""

REFUSED_MASKED: Mapping[str, str] = {
    "neomme": "its head multiplies by the transposed projection of its input, and blocks read a second token table",
    "perceiver": "its blocks compute latent vectors, not one vector for each token",
    **dict.fromkeys(("ultrabert", "ultravbert"), "its head has two projections, one after the other"),
}
"""Model type -> why it is not read, the middle of a sentence."""
