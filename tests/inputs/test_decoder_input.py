"""The decoder's own parts; encoder-decoders of transformers are in tests/checkpoints/test_stacks_and_steps.py."""

import pytest
import torch

import embedlayer as el
from embedlayer.inputs.decoder_input import DecoderInput


@pytest.mark.parametrize("own", [True, False])
def test_the_decoder_reads_its_own_parts_and_else_those_of_the_encoder(own) -> None:
    table, second = el.TokenEmbedding(10, 8), el.TokenEmbedding(12, 8)
    norms = torch.nn.LayerNorm(8), torch.nn.LayerNorm(8, eps=1.0)
    decoder = DecoderInput(["norm"], table=second, norm=norms[1]) if own else DecoderInput()
    layer = el.EmbeddingLayer(table, recipe=["norm"], norm=norms[0], decoder=decoder)
    ids = torch.tensor([[1, 5]])
    expected = norms[1](second(ids)) if own else layer.input(ids)
    assert torch.equal(layer.decoder_input(ids), expected)


def test_a_step_of_the_decoder_needs_its_module() -> None:
    with pytest.raises(el.SizeError, match="without its module"):
        el.EmbeddingLayer(el.TokenEmbedding(10, 8), decoder=DecoderInput(["norm", "project"]))
