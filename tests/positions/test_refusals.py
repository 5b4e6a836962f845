"""What positions refuse because it would be silently wrong, by the class of the error."""

import math

import pytest
import torch

from embedlayer import (
    AlibiBias,
    LearnedPositionalEmbedding,
    RelativePositionBias,
    RotaryEmbedding,
    ShapeError,
    SinusoidalPositionalEmbedding,
    SizeError,
    positions_of,
)
from embedlayer.positions import (
    AlternatingAxes,
    AxialAxes,
    ChannelAxes,
    ChunkedAxes,
    DynamicNTKScaling,
    InterleavedAxes,
    LinearScaling,
    Llama3Scaling,
    LogQueryScaling,
    LongRopeScaling,
    PowerQueryScaling,
    ProportionalScaling,
    YarnScaling,
    causal_mask,
    permute_qk,
)

ROTARY = [
    *({"axes": ChunkedAxes(sections)} for sections in ((2, 4, 5), (14, -2))),  # of 12 pairs
    *({"axes": axes} for axes in (InterleavedAxes((11,)), AlternatingAxes((4, 3, 5)), AxialAxes(5))),
    {"axes": AxialAxes(2), "scaling": LinearScaling(2.0)},
    {"axes": ChannelAxes((6, 6)), "interleaved": True},
    {"axes": ChannelAxes((6, 6)), "scaling": DynamicNTKScaling(2.0, 8)},
    {"axes": ChunkedAxes((6, 6)), "query_scaling": LogQueryScaling(1.0, 1)},
    *({"base": base} for base in (0.0, -1.0, math.nan, math.inf)),
    *({"rotary_dim": width} for width in (0, 7, 26)),
    *({"scaling": YarnScaling(factor, 64, fast)} for factor, fast in ((0.5, 32.0), (4.0, 0.5))),
    {"scaling": YarnScaling(4.0, 64), "base": 1.0},
    {"scaling": DynamicNTKScaling(2.0, 64), "rotary_dim": 2},
    *({"scaling": LongRopeScaling([1.0] * 12, divisors, 64, 2.0)} for divisors in ([0.0] * 12, [-1.0] * 12)),
    {"scaling": LongRopeScaling([1.0], [1.0], 64, 2.0)},
    {"scaling": Llama3Scaling(8.0, 64, 4.0, 4.0)},
    {"scaling": ProportionalScaling(1.5)},
]
REFUSALS = [
    *(lambda options=options: RotaryEmbedding(24, **options) for options in ROTARY),
    lambda: LinearScaling(0.0),
    lambda: DynamicNTKScaling(2.0, 64, length=0),
    lambda: AxialAxes(2, alternating=True, pairs_within_axis=True),
    lambda: LogQueryScaling(0.1, 0),
    lambda: PowerQueryScaling(0.1, 1, -1),
    lambda: permute_qk(torch.zeros(32, 4), 4, to="neox"),
    lambda: AlibiBias(4, max_bias=0.0),
    lambda: LearnedPositionalEmbedding(6, 4).resize(8, "wrap"),
    lambda: LearnedPositionalEmbedding(6, 4, offset=-1),
    *(
        lambda options=options: SinusoidalPositionalEmbedding(10, 3, **options)
        for options in ({"layout": "mixed"}, {"endpoint": True}, {"offset": -1}, {"padding_idx": -1})
    ),
    lambda: RelativePositionBias(2, num_buckets=2),
    lambda: RelativePositionBias(2, max_distance=8),
    lambda: causal_mask(4, 3),
    lambda: causal_mask(4, window=0),
]


@pytest.mark.parametrize("build", REFUSALS)
def test_sizes_and_options_that_would_give_wrong_numbers_are_refused(build, unchecked) -> None:
    with pytest.raises(SizeError):
        build()


def test_masks_of_another_shape_are_refused(unchecked) -> None:
    for documents in (torch.ones(2, 6).long(), torch.tensor([1, 2, 1, 1, 1]), torch.zeros(5)):
        with pytest.raises(ShapeError):
            causal_mask(5, documents=documents)
    with pytest.raises(ShapeError):
        positions_of(torch.zeros(1, 4).long(), torch.ones(1, 3).long())
