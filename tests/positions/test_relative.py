"""Relative buckets, against T5's own."""

import pytest
import torch

from embedlayer import RelativePositionBias

SIZES = [(32, 128), (32, 1000), (8, 20), (64, 256)]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), SIZES)
def test_buckets_of_all_distances_equal_those_of_t5(num_buckets, max_distance, bidirectional) -> None:
    pytest.importorskip("transformers")
    from transformers.models.t5.modeling_t5 import T5Attention

    position = RelativePositionBias(2, num_buckets=num_buckets, max_distance=max_distance, bidirectional=bidirectional)
    relative = torch.arange(-3 * max_distance, 3 * max_distance)[None]
    theirs = T5Attention._relative_position_bucket(
        relative, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
    )
    assert torch.equal(position.bucket(relative), theirs)
    assert position.bucket(relative).max() == (num_buckets - 1)


@pytest.mark.parametrize("is_decoder", [True, False])
def test_the_bias_equals_that_of_a_live_t5_layer(is_decoder) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.t5.modeling_t5 import T5Attention

    config = transformers.T5Config(
        d_model=16, d_kv=4, num_heads=4, is_decoder=is_decoder, relative_attention_num_buckets=16
    )
    layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    position = RelativePositionBias(4, num_buckets=16, bidirectional=not is_decoder)
    with torch.no_grad():
        position.weight.copy_(layer.relative_attention_bias.weight)
    theirs = layer.compute_bias(200, 200)
    assert torch.equal(position.bias(torch.arange(200), torch.arange(200)), theirs)
    one = position.bias(torch.tensor([199]), torch.arange(200))
    assert torch.equal(one, theirs[:, :, -1:])
