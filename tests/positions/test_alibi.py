"""Linear biases."""

import pytest
import torch

from embedlayer import AlibiBias

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
