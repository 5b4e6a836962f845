"""LM heads with a transform before the output product."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from covering import cases
from torch import nn

from embedlayer import CheckpointError, EmbeddingLayer, OutputHead, TokenEmbedding
from embedlayer.heads import PredictionHead

V, D, R = 11, 6, 4
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def head(*, tied: bool = True, activation: str | None = "gelu", norm: bool = True) -> PredictionHead:
    torch.manual_seed(0)
    output = OutputHead(TokenEmbedding(V, R).double(), bias=True) if tied else OutputHead(vocab_size=V, embed_dim=R)
    return PredictionHead(
        output, dense=nn.Linear(D, R), activation=activation, norm=nn.LayerNorm(R) if norm else None
    ).double()


@cases("tied, activation", [True, False], [None, *ACTIVATIONS])
def test_logits_are_the_composition_of_the_parts_and_the_loss_is_their_cross_entropy(tied, activation) -> None:
    ours = head(tied=tied, activation=activation)
    hidden, targets = torch.randn(2, 5, D).double(), torch.randint(0, V, (2, 5))
    x = ours.dense(hidden)
    x = x if activation is None else ACTIVATIONS[activation](x)
    logits = ours.output(ours.norm(x))
    torch.testing.assert_close(ours(hidden), logits)
    torch.testing.assert_close(
        ours.loss(hidden, targets), nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    )
    assert ours.tied == tied
    assert ours.weight is ours.output.weight


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(CheckpointError, match="activation 'swish"):
        PredictionHead(OutputHead(TokenEmbedding(V, R)), dense=nn.Linear(D, R), activation="swish6")


@cases("tied, norm", [True, False], [True, False])
def test_a_layer_saves_its_head_and_builds_it_again(tied, norm, tmp_path) -> None:
    ours = head(tied=tied, norm=norm)
    table = ours.output.table if tied else TokenEmbedding(V, R).double()
    EmbeddingLayer(table, head=ours).save_pretrained(tmp_path)
    again = EmbeddingLayer.from_pretrained(tmp_path).head
    hidden = torch.randn(3, D).double()
    assert isinstance(again, PredictionHead)
    assert again.tied == tied
    assert torch.equal(again(hidden), ours(hidden))


def test_a_damaged_config_of_a_norm_is_an_error() -> None:
    ours = head()
    config = EmbeddingLayer(ours.output.table, head=ours).config
    config["head"]["norm"] = {"normalized_shape": "4", "eps": 1e-5}
    with pytest.raises(CheckpointError, match="LayerNorm: normalized_shape is '4'"):
        EmbeddingLayer.from_config(config)
