"""Sinusoidal positions, against the formula written out."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from embedlayer import PositionError, SinusoidalPositionalEmbedding, sinusoids
from embedlayer.scratch import scratch_sinusoidal


@pytest.mark.parametrize("width", [1, 2, 7, 64])
def test_rows_equal_the_formula_also_at_odd_widths(width) -> None:
    position = SinusoidalPositionalEmbedding(50, width)
    np.testing.assert_allclose(position.waves.numpy(), scratch_sinusoidal(50, width), atol=6e-8)
    for place in (0, 1, 49):
        for channel in range(width):
            angle = place / 10000 ** ((channel - channel % 2) / width)
            expected = math.sin(angle) if channel % 2 == 0 else math.cos(angle)
            assert position.waves[place, channel].item() == pytest.approx(expected, abs=1e-7)


@given(offset=st.integers(-40, 40), base=st.floats(10.0, 1e6))
def test_a_shift_is_one_fixed_linear_map(offset, base) -> None:
    """PE(p + k) = PE(p) M_k, with a turn by k / base^(2i/D) for each pair."""
    places = torch.arange(50, 60, dtype=torch.float64)
    angles = offset * base ** -(torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    turns = [torch.tensor([[a.cos(), -a.sin()], [a.sin(), a.cos()]], dtype=torch.float64) for a in angles]
    shifted = sinusoids(places, 6, base) @ torch.block_diag(*turns)
    assert torch.allclose(shifted, sinusoids(places + offset, 6, base), atol=1e-9)


def test_near_positions_are_more_alike_than_far_ones_and_each_is_unique() -> None:
    waves = F.normalize(SinusoidalPositionalEmbedding(128, 64).waves, dim=-1)
    alike = waves @ waves.T
    assert alike[0, 1] > 0.95
    assert alike[0, 1] > alike[0, 32]
    assert alike[5, 6] > alike[5, 15]
    assert torch.equal(alike, alike.T)
    assert len(torch.unique(waves, dim=0)) == 128


def test_it_has_no_parameters_and_a_longer_one_has_the_same_rows() -> None:
    short, long = SinusoidalPositionalEmbedding(10, 6), SinusoidalPositionalEmbedding(1000, 6)
    assert not list(short.parameters())
    assert torch.equal(short.waves, long.waves[:10])


def test_added_to_a_low_precision_input_the_type_stays() -> None:
    position = SinusoidalPositionalEmbedding(10, 6)
    x = torch.zeros(1, 4, 6, dtype=torch.bfloat16)
    assert torch.equal(position.add(x, torch.arange(4)), position.waves[:4].bfloat16()[None])


def test_past_the_rows_made_the_error_says_so() -> None:
    with pytest.raises(PositionError, match="a sequence of 11 exceeds the 10 positions"):
        SinusoidalPositionalEmbedding(10, 6)(torch.zeros(11, dtype=torch.long))


def test_what_was_saved_is_built_again(tmp_path) -> None:
    position = SinusoidalPositionalEmbedding(10, 6, base=100.0)
    position.save_pretrained(tmp_path)
    assert torch.equal(SinusoidalPositionalEmbedding.read_pretrained(tmp_path).waves, position.waves)
