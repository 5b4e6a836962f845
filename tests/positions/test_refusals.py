"""What positions refuse, by the class of the error; refusals that need a set-up are beside what they refuse."""

import json
import math

import pytest
import torch

from embedlayer import (
    AlibiBias,
    LearnedPositionalEmbedding,
    PositionError,
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
    AxialPositionalEmbedding,
    ChannelAxes,
    ChunkedAxes,
    DynamicNTKScaling,
    InterleavedAxes,
    LinearScaling,
    Llama3Scaling,
    LogQueryScaling,
    LongRopeScaling,
    NTKAlphaScaling,
    PowerQueryScaling,
    ProportionalScaling,
    YarnScaling,
    causal_mask,
    permute_qk,
)


def sinusoidal(**options: object) -> object:
    return SinusoidalPositionalEmbedding(10, 3, **options)


def permuted(heads: int, rotary_dim: int | None = None, to: str = "half_split") -> object:
    return permute_qk(torch.zeros(32, 4), heads, to=to, rotary_dim=rotary_dim)


DOCUMENTS = torch.tensor([[0, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0]])
AXES = [
    lambda: ChunkedAxes((2, 4, 5)),  # 11 of 12 pairs
    lambda: InterleavedAxes((12,)),
    lambda: ChannelAxes((12, 0)),
    lambda: AlternatingAxes((4, 3, 5)),
    lambda: AxialAxes(5),
    lambda: AxialAxes(1),
    lambda: AxialAxes(2, alternating=True, pairs_within_axis=True),
]
SCALINGS = [
    lambda: LinearScaling(0.0),
    lambda: DynamicNTKScaling(0.5, 64),
    lambda: DynamicNTKScaling(2.0, 64, length=0),
    lambda: YarnScaling(4.0, 64, beta_fast=0.0),
    lambda: YarnScaling(4.0, 64, beta_fast=1.0, beta_slow=2.0),
    lambda: LongRopeScaling((1.0, 0.0), (1.0, 1.0), 64, 2.0),
    lambda: LongRopeScaling((1.0, 1.0), json.loads('["1", 1.0]'), 64, 2.0),
    lambda: LongRopeScaling(json.loads("1.0"), (1.0,), 64, 2.0),
    lambda: LongRopeScaling((1.0,), (1.0,) * 4, 64, 2.0),
    lambda: LongRopeScaling((1.0,), (1.0,), 1, 2.0),
    lambda: Llama3Scaling(8.0, 64, 4.0, 4.0),
    lambda: ProportionalScaling(1.5),
    lambda: NTKAlphaScaling(0.0),
]
REFUSALS = [
    *((lambda axes=axes: RotaryEmbedding(24, axes=axes()), SizeError) for axes in AXES),
    *((lambda scaling=scaling: RotaryEmbedding(8, scaling=scaling()), SizeError) for scaling in SCALINGS),
    *((lambda base=base: RotaryEmbedding(8, base=base), SizeError) for base in (0.0, -1.0, math.nan, math.inf)),
    (lambda: RotaryEmbedding(7), SizeError),
    (lambda: RotaryEmbedding(8, rotary_dim=10), SizeError),
    (lambda: RotaryEmbedding(8, rotary_dim=0), SizeError),
    (lambda: RotaryEmbedding(8, 1.0, scaling=YarnScaling(4.0, 64)), SizeError),
    (lambda: RotaryEmbedding(2, scaling=DynamicNTKScaling(2.0, 64)), SizeError),
    (lambda: RotaryEmbedding(24, rotary_dim=2, scaling=NTKAlphaScaling(2.0)), SizeError),
    (lambda: RotaryEmbedding(24, axes=AxialAxes(2), scaling=LinearScaling(2.0)), SizeError),
    (lambda: RotaryEmbedding(24, axes=ChannelAxes((6, 6)), interleaved=True), SizeError),
    (lambda: RotaryEmbedding(24, axes=ChannelAxes((6, 6)), scaling=DynamicNTKScaling(2.0, 8)), SizeError),
    (lambda: RotaryEmbedding(24, axes=ChunkedAxes((6, 6)), query_scaling=LogQueryScaling(1.0, 1)), SizeError),
    (lambda: LogQueryScaling(0.1, 0), SizeError),
    (lambda: PowerQueryScaling(0.1, 1, -1), SizeError),
    *((lambda rows=rows: permuted(*rows), SizeError) for rows in ((5,), (0,), (32,), (4, 3), (4, 10))),
    (lambda: permuted(4, to="neox"), SizeError),
    (lambda: AlibiBias(0), SizeError),
    (lambda: AlibiBias(4, max_bias=0.0), SizeError),
    (lambda: AxialPositionalEmbedding((2, 3), (4, 4))(torch.tensor([6])), PositionError),
    (lambda: AxialPositionalEmbedding((0, 3), (4, 4)), SizeError),
    (lambda: AxialPositionalEmbedding((2, 3, 4), (4, 4)), SizeError),
    (lambda: LearnedPositionalEmbedding(6, 4).resize(8, "wrap"), SizeError),
    (lambda: LearnedPositionalEmbedding(0, 4), SizeError),
    (lambda: LearnedPositionalEmbedding(6, 4).resize(0), SizeError),
    (lambda: LearnedPositionalEmbedding(6, 4, offset=-1), SizeError),
    (lambda: sinusoidal(layout="mixed"), SizeError),
    (lambda: sinusoidal(endpoint=True), SizeError),  # of fewer than 4 channels
    (lambda: sinusoidal(offset=-1), SizeError),
    (lambda: sinusoidal(padding_idx=10), SizeError),
    (lambda: RelativePositionBias(0), SizeError),
    (lambda: RelativePositionBias(2, num_buckets=2), SizeError),
    (lambda: RelativePositionBias(2, num_buckets=7), SizeError),
    (lambda: RelativePositionBias(2, num_buckets=1, bidirectional=False), SizeError),
    (lambda: RelativePositionBias(2, max_distance=8), SizeError),
    (lambda: causal_mask(4, 3), SizeError),
    *((lambda window=window: causal_mask(4, window=window), SizeError) for window in (0, -1, 2.5, True)),
    (lambda: causal_mask(5, documents=DOCUMENTS), ShapeError),
    (lambda: causal_mask(5, documents=torch.tensor([1, 2, 1, 1, 1])), ShapeError),
    (lambda: causal_mask(5, documents=torch.zeros(5)), ShapeError),
    (lambda: causal_mask(5, documents=[1, 1, 1, 1, 1]), ShapeError),
    (lambda: positions_of(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 3, dtype=torch.long)), ShapeError),
]


@pytest.mark.parametrize(("build", "error"), REFUSALS)
def test_what_is_not_possible_is_refused(build, error, unchecked) -> None:
    with pytest.raises(error):
        build()
