"""What the heads and layers of the lists of kinds take and return."""

import pytest
import torch
from kinds import EMBED_DIM, LAYERS, TABLES, TIED_HEADS, UNTIED_HEADS, VOCAB_SIZE

from embedlayer import OutputHead


@pytest.mark.parametrize("name", [*UNTIED_HEADS, *TIED_HEADS])
def test_every_head_maps_hidden_states_to_a_logit_per_token(name) -> None:
    head = UNTIED_HEADS[name]() if name in UNTIED_HEADS else OutputHead(TABLES[TIED_HEADS[name]]())
    assert head(torch.randn(2, 3, EMBED_DIM)).shape == (2, 3, VOCAB_SIZE)


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_takes_a_sequence_and_a_batch(name) -> None:
    layer = LAYERS[name]()
    assert layer(torch.tensor([1, 2, 3])).shape[:-1] == (3,)
    assert layer(torch.tensor([[1, 2, 3], [7, 48, 0]])).shape[:-1] == (2, 3)
