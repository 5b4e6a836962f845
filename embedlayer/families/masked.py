"""Records of encoders with a masked LM head."""

from dataclasses import replace
from typing import Any

from embedlayer.families.records import Family, HeadSpec, LearnedPositions, LinearSpec, Names, NormSpec


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


MASKED_FAMILIES: tuple[Family, ...] = (
    _bert(
        "bert",
        ("bert",),
        head=_masked_head("predictions", "predictions.transform.dense", "predictions.transform.LayerNorm"),
    ),
    _bert(
        "roberta",
        ("roberta", "xlm-roberta"),
        position=LearnedPositions(("embeddings.position_embeddings.weight",), offset="padding"),
        numbering="ids",
        head=_masked_head("lm_head", "lm_head.dense", "lm_head.layer_norm", "gelu"),
    ),
    _bert(
        "albert",
        ("albert",),
        width=("embedding_size",),
        recipe=("types", "position", "norm", "project"),
        projection=LinearSpec("embedding_hidden_mapping_in"),
        head=_masked_head("predictions", "predictions.dense", "predictions.LayerNorm"),
    ),
)
