"""Learned positions."""

import numpy as np
import pytest
import torch

from embedlayer import LearnedPositionalEmbedding, positions_of
from embedlayer.lessons.scratch import ScratchPositionEmbedding


def test_values_and_gradients_equal_the_one_hot_oracle() -> None:
    position = LearnedPositionalEmbedding(7, 4, dtype=torch.float64)
    oracle = ScratchPositionEmbedding(7, 4, W=position.weight.detach().numpy().copy())
    upstream = torch.randn(5, 4, dtype=torch.float64)
    vectors = position(torch.arange(5))
    vectors.backward(upstream)
    np.testing.assert_allclose(vectors.detach().numpy(), oracle(5), rtol=1e-15)
    np.testing.assert_allclose(position.weight.grad.numpy(), oracle.backward(upstream.numpy()), rtol=1e-15)


MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


def test_with_an_offset_of_2_it_equals_opt_also_at_padding() -> None:
    pytest.importorskip("transformers")
    from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding

    theirs, ours = OPTLearnedPositionalEmbedding(10, 4), LearnedPositionalEmbedding(10, 4, offset=2)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.vectors(positions_of(MASK, MASK, padding_position=-1)), theirs(MASK))


def test_positions_from_padding_equal_those_of_roberta() -> None:
    pytest.importorskip("transformers")
    from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

    ids = torch.where(MASK == 1, 7, 1)  # its padding_idx is 1
    theirs = RobertaEmbeddings.create_position_ids_from_input_ids(ids, 1)
    assert torch.equal(positions_of(ids, ids != 1, offset=2, padding_position=1), theirs)


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extending_keeps_old_rows_bit_for_bit(offset, dtype) -> None:
    position = LearnedPositionalEmbedding(6, 4, offset=offset, init_std=0.5, dtype=dtype)
    position.weight.requires_grad_(False)
    longer, shorter = position.resize(10, "extend"), position.resize(3, "extend")
    assert torch.equal(longer.weight[: 6 + offset], position.weight)
    assert torch.equal(shorter.weight, position.weight[: 3 + offset])
    assert 0.1 < longer.weight[6 + offset :].float().std() < 1.5
    assert (longer.max_seq_len, longer.weight.dtype, longer.weight.requires_grad) == (10, dtype, False)
    assert longer.vectors(torch.tensor([9])).shape == (1, 4)
    assert position.weight.shape == (6 + offset, 4)


@pytest.mark.parametrize("offset", [0, 2])
def test_resizing_repeats_the_rows_in_turn_or_reads_between_them_and_keeps_the_ends(offset) -> None:
    position = LearnedPositionalEmbedding(6, 4, offset=offset, dtype=torch.float64)
    rows = position.weight[offset:].detach().numpy()
    for new_len in (1, 3, 6, 11, 16):
        repeated, resized = position.resize(new_len, "repeat"), position.resize(new_len)
        assert torch.equal(repeated.weight[offset:], position.weight[offset:][torch.arange(new_len) % 6])
        places = np.linspace(0, 5, new_len)
        expected = np.stack([np.interp(places, np.arange(6), rows[:, channel]) for channel in range(4)], axis=1)
        np.testing.assert_allclose(resized.weight[offset:].detach().numpy(), expected, atol=1e-7)
        for each in (repeated, resized):
            assert torch.equal(each.weight[:offset], position.weight[:offset])
            assert each.weight.requires_grad
