"""The input embedding of the book is the sum of two plain look-ups."""

import pytest
import torch
from torch import nn

from embedlayer.lessons import GPT_CONFIG_124M, GPTEmbedding


@pytest.mark.usefixtures("both_paths")
def test_the_gpt_layer_of_the_notebook() -> None:
    """Seed notebook: real vocabulary, width 256, context 4; sum of two plain look-ups."""
    layer = GPTEmbedding(GPT_CONFIG_124M["vocab_size"], 256, 4)
    inputs = torch.randint(0, 50257, (8, 4))
    manual = nn.functional.embedding(inputs, layer.tok_emb.weight) + layer.pos_emb(torch.arange(4))
    assert torch.equal(layer(inputs), manual)
    assert list(layer.state_dict()) == ["tok_emb.weight", "pos_emb.weight"]
    assert sum(parameter.numel() for parameter in layer.parameters()) == 50257 * 256 + 4 * 256
    positions_of_first, positions_of_last = (layer(inputs) - layer.tok_emb(inputs))[[0, 7]]
    assert torch.allclose(positions_of_first, positions_of_last, atol=1e-7)


@pytest.mark.usefixtures("both_paths")
def test_the_gpt_layer_is_read_back(tmp_path) -> None:
    layer = GPTEmbedding(20, 8, 4)
    layer.save_pretrained(tmp_path)
    again = GPTEmbedding.from_pretrained(tmp_path)
    assert torch.equal(again(torch.tensor([1, 2])), layer(torch.tensor([1, 2])))
