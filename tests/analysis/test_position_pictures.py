"""Position pictures, checked against the formulas of the schemes."""

import pytest
import torch

from embedlayer.analysis.position_pictures import position_values
from embedlayer.positions.alibi import AlibiBias
from embedlayer.positions.learned import LearnedPositionalEmbedding
from embedlayer.positions.position import Position
from embedlayer.positions.rotary.embedding import RotaryEmbedding
from embedlayer.positions.rotary.scaling import YarnScaling
from embedlayer.positions.sinusoidal import SinusoidalPositionalEmbedding


@pytest.mark.parametrize("scheme", [LearnedPositionalEmbedding, SinusoidalPositionalEmbedding])
def test_an_additive_scheme_shows_its_rows_and_stops_where_they_end(scheme):
    position = scheme(20, 6)
    picture = position_values(position, 32)
    torch.testing.assert_close(picture.values, position.vectors(torch.arange(20)).detach().float())
    assert (picture.row_label, picture.column_label) == ("position", "dimension")


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_shows_the_cosine_of_each_pairs_angle_in_either_layout(interleaved):
    picture = position_values(RotaryEmbedding(8, base=100.0, interleaved=interleaved), 50)
    angles = torch.arange(50)[:, None] * 100.0 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(picture.values, angles.cos(), atol=1e-4, rtol=0)
    assert picture.column_label == "pair of dimensions"


def test_channels_that_rotary_leaves_alone_are_shown_unturned():
    picture = position_values(RotaryEmbedding(8, rotary_dim=4), 10)
    assert picture.values.shape == (10, 2 + 4)
    torch.testing.assert_close(picture.values[:, 2:], torch.ones(10, 4))


def test_alibi_shows_each_heads_bias_by_distance():
    picture = position_values(AlibiBias(4), 10)
    slopes = torch.tensor([2 ** (-8 * (head + 1) / 4) for head in range(4)])
    torch.testing.assert_close(picture.values, -torch.arange(10)[:, None] * slopes)
    assert (picture.row_label, picture.column_label) == ("distance back to the key", "head")


def test_one_position_is_a_picture_too_and_a_scheme_without_positions_has_none():
    assert position_values(RotaryEmbedding(4), 1).values.tolist() == [[1.0, 1.0]]
    assert position_values(AlibiBias(2), 1).values.tolist() == [[0.0, 0.0]]
    assert position_values(Position(), 8) is None


def test_a_rotation_that_also_scales_is_shown_by_its_angle():
    plain, scaled = (RotaryEmbedding(8, scaling=YarnScaling(1.0, 16, attention_factor=factor)) for factor in (1.0, 1.5))
    torch.testing.assert_close(position_values(scaled, 20).values, position_values(plain, 20).values)
