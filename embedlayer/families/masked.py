"""Records of encoders with a masked LM head."""

from dataclasses import replace
from typing import Any

from embedlayer.families.records import (
    AxialPositions,
    Factor,
    Family,
    HeadSpec,
    LearnedPositions,
    LinearSpec,
    Names,
    NormSpec,
)


def _masked_head(name: str, dense: str, norm: str, activation: str = "hidden_act") -> HeadSpec:
    """Return the spec of a masked LM head (BERT), which is tied to the token table by default.

    Args:
        name: Module that stores the bias of the head, and in some checkpoints its rows.
        dense: Name of the projection, which is followed by the activation.
        norm: Name of the LayerNorm after the activation.
        activation: Name of the activation, or `"hidden_act"` to read the name from that configuration key.
    """
    return HeadSpec(
        weight=(f"{name}.decoder.weight",),
        bias=(f"{name}.bias", f"{name}.decoder.bias"),
        dense=LinearSpec(dense),
        activation=activation,
        norm=NormSpec(norm),
        tied=True,
    )


def _bert(name: str, model_types: Names, **changes: Any) -> Family:
    """Return a family like BERT, which adds up token, type and position embeddings and normalises the sum.

    Args:
        name: Name of the family in reports.
        model_types: Values of `model_type` in its configurations.
        **changes: Fields of `Family` in which the family differs from BERT.
    """
    bert = Family(
        name,
        model_types,
        table=("embeddings.word_embeddings.weight",),
        position=LearnedPositions(("embeddings.position_embeddings.weight",)),
        recipe=("types", "position", "norm"),
        types=("embeddings.token_type_embeddings.weight",),
        norm=NormSpec("embeddings.LayerNorm"),
    )
    return replace(bert, **changes)


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
_PROJECTED = ("types", "position", "norm", "project")


def _roberta(name: str, model_types: Names, **changes: Any) -> Family:
    """Return a family like RoBERTa, whose positions count the tokens that are not padding, from `pad_token_id + 1`.

    Arguments are those of `_bert`.
    """
    position = LearnedPositions(("embeddings.position_embeddings.weight",), offset="padding", ids_include_offset=True)
    return _bert(name, model_types, **{"position": position, "numbering": "ids", "head": _ROBERTA_HEAD, **changes})


MASKED_FAMILIES: tuple[Family, ...] = (
    _bert("bert", ("bert",), head=_BERT_HEAD),
    _bert("megatron-bert", ("megatron-bert",), recipe=("types", "position"), norm=None, head=_BERT_HEAD),
    _bert(
        "bert-generation",
        ("bert-generation",),
        recipe=("position", "norm"),
        types=(),
        head=HeadSpec(("lm_head.decoder.weight",), bias=("lm_head.bias", "lm_head.decoder.bias"), tied=True),
    ),
    _bert(
        "roc_bert",
        ("roc_bert",),
        recipe=("project", "types", "position", "norm"),
        projection=LinearSpec("embeddings.map_inputs_layer"),
        features=(("embeddings.shape_embed.weight",), ("embeddings.pronunciation_embed.weight",)),
        head=_BERT_HEAD,
        not_computed=(("concat_input", (True,)),),
    ),
    _bert(
        "roformer",
        ("roformer",),
        width=("embedding_size",),
        position="rotary",
        recipe=("types", "norm", "project"),
        projection=LinearSpec("embeddings_project"),
        head=_BERT_HEAD,
        not_computed=(("rotary_value", (False,)),),
    ),
    _bert(
        "reformer",
        ("reformer",),
        position=AxialPositions(
            (("embeddings.position_embeddings.weights.0",), ("embeddings.position_embeddings.weights.1",)),
            LearnedPositions(("embeddings.position_embeddings.embedding.weight",)),
        ),
        recipe=("position",),
        types=(),
        norm=None,
        head=HeadSpec(("lm_head.decoder.weight",)),
    ),
    _bert(
        "xlm",
        ("xlm", "flaubert"),
        table=("embeddings.weight",),
        width=("emb_dim",),
        aliases=(("n_words", "vocab_size"), ("pad_index", "pad_token_id"), ("emb_dim", "hidden_size")),
        position=LearnedPositions(("position_embeddings.weight",)),
        recipe=("position", "types", "norm", "length_mask"),
        types="table",
        norm=NormSpec("layer_norm_emb"),
        head=HeadSpec(("pred_layer.proj.weight",), bias=("pred_layer.proj.bias",), tied=True),
        not_computed=(("asm", (False,)),),
    ),
    _bert(
        "xlnet",
        ("xlnet",),
        table=("word_embedding.weight",),
        position=None,
        recipe=(),
        types=(),
        norm=None,
        head=HeadSpec(("lm_loss.weight",), bias=("lm_loss.bias",), tied=True),
    ),
    _bert("ernie", ("ernie",), more_types=((("embeddings.task_type_embeddings.weight",), 1.0),), head=_BERT_HEAD),
    _bert("big_bird", ("big_bird",), scale=Factor("sqrt_dim", only_if=("rescale_embeddings",)), head=_BERT_HEAD),
    _bert(
        "electra",
        ("electra",),
        width=("embedding_size",),
        recipe=_PROJECTED,
        projection=LinearSpec("embeddings_project"),
        head=_ELECTRA_HEAD,
    ),
    _bert(
        "rembert",
        ("rembert",),
        width=("input_embedding_size",),
        recipe=_PROJECTED,
        projection=LinearSpec("encoder.embedding_hidden_mapping_in"),
        head=_masked_head("predictions", "predictions.dense", "predictions.LayerNorm"),
    ),
    _roberta("roberta", ("roberta", "xlm-roberta", "camembert", "data2vec-text", "xmod", "roberta-prelayernorm")),
    _roberta("xlm-roberta-xl", ("xlm-roberta-xl",), recipe=("types", "position"), norm=None),
    _bert(
        "albert",
        ("albert",),
        width=("embedding_size",),
        recipe=_PROJECTED,
        projection=LinearSpec("embedding_hidden_mapping_in"),
        head=_masked_head("predictions", "predictions.dense", "predictions.LayerNorm"),
    ),
)
