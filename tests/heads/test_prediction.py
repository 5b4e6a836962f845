"""LM heads with a transform before the output product."""

import pytest
import torch
from torch import nn

from embedlayer import CheckpointError, OutputHead, TokenEmbedding
from embedlayer.heads import PredictionHead
from embedlayer.heads.prediction import ACTIVATIONS, build_head, describe_head

V, D, R = 11, 6, 4


def head(*, tied: bool = True, activation: str | None = "gelu", norm: bool = True) -> PredictionHead:
    torch.manual_seed(0)
    output = OutputHead(TokenEmbedding(V, R).double(), bias=True) if tied else OutputHead(vocab_size=V, embed_dim=R)
    return PredictionHead(
        output, dense=nn.Linear(D, R), activation=activation, norm=nn.LayerNorm(R) if norm else None
    ).double()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
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


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_a_head_is_built_again_from_its_config(tied, norm) -> None:
    ours = head(tied=tied, norm=norm)
    again = build_head(describe_head(ours), TokenEmbedding(V, R))
    assert isinstance(again, PredictionHead)
    assert (again.tied, describe_head(again)) == (tied, describe_head(ours))


def test_a_damaged_config_of_a_norm_is_refused() -> None:
    config = {**describe_head(head()), "norm": {"normalized_shape": "4", "eps": 1e-5}}
    with pytest.raises(CheckpointError, match="LayerNorm: normalized_shape is '4'"):
        build_head(config, TokenEmbedding(V, R))
