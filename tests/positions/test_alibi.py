"""Linear biases."""

import pytest
import torch

from embedlayer import AlibiBias, SizeError
from embedlayer.positions.alibi import alibi_slopes


def test_eight_heads_have_the_slopes_of_the_paper() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]


@pytest.mark.parametrize("num_heads", [1, 3, 6, 12, 20, 71, 112])
def test_any_number_of_heads_has_slopes_of_the_powers_of_two_around_it(num_heads) -> None:
    slopes = alibi_slopes(num_heads).tolist()
    below = 2 ** (num_heads.bit_length() - 1)
    assert slopes[:below] == alibi_slopes(below).tolist()
    assert slopes[below:] == alibi_slopes(2 * below).tolist()[::2][: num_heads - below]
    assert len(set(slopes)) == num_heads


def test_the_bias_falls_linearly_with_the_distance_on_both_sides() -> None:
    bias = AlibiBias(4).bias(torch.arange(5), torch.arange(5))
    assert bias.shape == (1, 4, 5, 5)
    for head, slope in enumerate(alibi_slopes(4).tolist()):
        for query in range(5):
            for key in range(5):
                assert bias[0, head, query, key].item() == pytest.approx(-slope * abs(query - key))
    assert torch.equal(bias, bias.transpose(-1, -2))


def test_under_a_causal_mask_it_is_the_published_bias() -> None:
    """BLOOM adds slope * key position; softmax over the past cannot tell that from -slope * distance."""
    scores = torch.randn(4, 6, 6)
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    ours = (scores + AlibiBias(4).bias(torch.arange(6), torch.arange(6))[0]).masked_fill(future, float("-inf"))
    bloom = (scores + alibi_slopes(4).float()[:, None, None] * torch.arange(6)).masked_fill(future, float("-inf"))
    assert torch.allclose(ours.softmax(-1), bloom.softmax(-1), atol=1e-6)


def test_it_depends_on_the_distance_only_and_on_each_rows_positions() -> None:
    position = AlibiBias(4)
    places = torch.arange(5)
    assert torch.equal(position.bias(places + 100, places + 100), position.bias(places, places))
    rows = torch.tensor([[0, 1, 2], [0, 0, 1]])
    bias = position.bias(rows, rows)
    assert bias.shape == (2, 4, 3, 3)
    assert torch.equal(bias[1:], position.bias(rows[1], rows[1]))


def test_queries_may_be_fewer_than_keys() -> None:
    full = AlibiBias(4).bias(torch.arange(5), torch.arange(5))
    assert torch.equal(AlibiBias(4).bias(torch.tensor([4]), torch.arange(5)), full[:, :, 4:])


def test_no_heads_and_no_bias_are_refused() -> None:
    with pytest.raises(SizeError, match="num_heads must be at least 1"):
        AlibiBias(0)
    with pytest.raises(SizeError, match="max_bias must be positive"):
        AlibiBias(4, max_bias=0.0)


HEADS = [1, 2, 3, 6, 8, 12, 20, 71]


def of_keys(position: AlibiBias, length: int) -> torch.Tensor:
    """The bias that the last query sees, up to a constant: what BLOOM, MPT and Falcon add."""
    bias = position.bias(torch.tensor([length - 1]), torch.arange(length))[0]
    return bias - bias[..., :1]


@pytest.mark.parametrize("num_heads", HEADS)
def test_biases_equal_those_of_bloom_mpt_and_falcon(num_heads) -> None:
    pytest.importorskip("transformers")
    from transformers.models.bloom import modeling_bloom as bloom
    from transformers.models.falcon import modeling_falcon as falcon
    from transformers.models.mpt import modeling_mpt as mpt

    everything = torch.ones(1, 40, dtype=torch.long)
    theirs = bloom.build_alibi_tensor(everything, num_heads, torch.float32)
    torch.testing.assert_close(of_keys(AlibiBias(num_heads), 40), theirs, atol=1e-6, rtol=5e-6)
    theirs = mpt.build_mpt_alibi_tensor(num_heads, 40)
    ours = of_keys(AlibiBias(num_heads), 40)
    torch.testing.assert_close(ours, theirs - theirs[..., :1], atol=1e-5, rtol=5e-6)
    theirs = mpt.build_mpt_alibi_tensor(num_heads, 40, alibi_bias_max=16)
    ours = of_keys(AlibiBias(num_heads, max_bias=16.0), 40)
    torch.testing.assert_close(ours, theirs - theirs[..., :1], atol=1e-5, rtol=5e-6)
    theirs = falcon.build_alibi_tensor(everything, num_heads, torch.float32) / 64**0.5  # products rounded to bfloat16
    torch.testing.assert_close(of_keys(AlibiBias(num_heads, scale=64**-0.5), 40), theirs, atol=0, rtol=2**-7)
