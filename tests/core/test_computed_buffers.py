"""Tensors that follow from arguments survive casts, moves, and a birth without memory."""

import copy

import pytest
import torch

from embedlayer import AlibiBias, RotaryEmbedding, SinusoidalPositionalEmbedding
from embedlayer.positions import DynamicNTKScaling, LongRopeScaling

SCHEMES = [
    lambda: RotaryEmbedding(8, scaling=DynamicNTKScaling(2.0, 16)),
    lambda: RotaryEmbedding(8, scaling=LongRopeScaling((1.0,) * 4, (2.0,) * 4, 16, 4.0)),
    lambda: SinusoidalPositionalEmbedding(20, 6),
    lambda: AlibiBias(6),
]


def born_on_meta(make):
    with torch.device("meta"):
        module = make()
    return module.to_empty(device="cpu")


@pytest.mark.parametrize("make", SCHEMES)
def test_no_treatment_harms_a_derived_tensor(make) -> None:
    for treat in (
        lambda make: make().to(torch.bfloat16),
        lambda make: make().half().float(),
        lambda make: copy.deepcopy(make()),
        born_on_meta,
        lambda make: torch.nn.Sequential(make()).double()[0],
    ):
        fresh, treated = make(), treat(make)
        assert not treated.state_dict()
        for (name, expected), (other, found) in zip(fresh.named_buffers(), treated.named_buffers(), strict=True):
            assert name == other
            assert expected.dtype == found.dtype
            assert torch.equal(expected, found)
