"""Learned positions."""

import numpy as np
import pytest
import torch
from torch import nn

from embedlayer import LearnedPositionalEmbedding, PositionError, SizeError
from embedlayer.scratch import ScratchPositionEmbedding


def test_values_and_gradients_equal_the_one_hot_oracle() -> None:
    position = LearnedPositionalEmbedding(7, 4, dtype=torch.float64)
    oracle = ScratchPositionEmbedding(7, 4, W=position.weight.detach().numpy().copy())
    ids = torch.zeros(2, 5, dtype=torch.long)
    upstream = torch.randn(5, 4, dtype=torch.float64)
    vectors = position(ids)
    vectors.backward(upstream)
    np.testing.assert_allclose(vectors.detach().numpy(), oracle(5), rtol=1e-15)
    np.testing.assert_allclose(position.weight.grad.numpy(), oracle.backward(upstream.numpy()), rtol=1e-15)


def test_it_is_an_embedding_that_is_called_with_ids_of_any_batch() -> None:
    position = LearnedPositionalEmbedding(7, 4)
    assert isinstance(position, nn.Embedding)
    assert list(position.state_dict()) == ["weight"]
    for ids in (torch.arange(3), torch.zeros(1, 3).long(), torch.zeros(2, 5, 3).long()):
        assert torch.equal(position(ids), position.weight[:3])


def test_each_sequence_may_have_its_own_positions() -> None:
    position = LearnedPositionalEmbedding(7, 4)
    x = torch.randn(2, 3, 4)
    places = torch.tensor([[4, 5, 6], [0, 0, 1]])
    assert torch.equal(position.add(x, places), x + position.weight[places])
    assert position.add(x.bfloat16(), places).dtype == torch.bfloat16


def test_beyond_the_learned_length_the_error_names_length_limit_and_remedy() -> None:
    position = LearnedPositionalEmbedding(7, 4)
    with pytest.raises(PositionError, match="a sequence of 8 exceeds the 7 positions") as error:
        position(torch.zeros(1, 8, dtype=torch.long))
    assert "Shorten the sequence to 7 tokens, or build the layer with a larger max_seq_len" in str(error.value)
    with pytest.raises(PositionError, match="position -1 at row 1, column 0.*\nPositions count from 0"):
        position.vectors(torch.tensor([[0, 1], [-1, 0]]))


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(SizeError, match="not 0 and 4"):
        LearnedPositionalEmbedding(0, 4)


def test_what_was_saved_is_read_back_bit_for_bit(tmp_path) -> None:
    position = LearnedPositionalEmbedding(7, 4)
    position.save_pretrained(tmp_path)
    assert torch.equal(LearnedPositionalEmbedding.read_pretrained(tmp_path).weight, position.weight)
