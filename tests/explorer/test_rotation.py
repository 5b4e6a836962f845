"""Rotations that are read from the results of a scheme."""

import pytest
import torch
from kinds import POSITIONS
from rotations import DecayingRotation, MixingRotation

from embedlayer.explorer.rotation import pair_rotation

PLACES = torch.arange(6)


def test_queries_and_keys_have_the_numbers_of_their_own_rotation():
    found = pair_rotation(DecayingRotation(), PLACES)
    assert found.channels.tolist() == [[0, 1], [2, 3], [4, 5]]
    sizes = 1.01 ** (5 * torch.arange(1.0, 4))
    for columns, expected in ((found.queries, sizes), (found.keys, 1 / sizes)):
        torch.testing.assert_close(columns[5, 0:6:2].hypot(columns[5, 1:6:2]), expected)
        assert (columns[:, 6] == 1).all()
    torch.testing.assert_close(found.angles[1], torch.tensor([1.0, 0.3, 0.01]))


def test_a_rotation_of_more_than_two_channels_has_no_pairs():
    assert pair_rotation(MixingRotation(), PLACES) is None


@pytest.mark.parametrize("name", [name for name in POSITIONS if name.startswith("rotary")])
def test_rotary_positions_have_their_own_angles(name):
    position = POSITIONS[name]()
    found = pair_rotation(position, PLACES)
    cos, sin = position.cos_sin(PLACES)
    torch.testing.assert_close(found.angles, torch.atan2(sin, cos), rtol=1e-5, atol=1e-5)
    assert found.channels.equal(position.pair_channels())


def test_a_factor_on_queries_alone_is_a_rotation_without_pairs():
    position = POSITIONS["query-scaled"]()
    found = pair_rotation(position, PLACES)
    assert found.channels.shape == (0, 2)
    torch.testing.assert_close(found.queries[:, 0], position.query_scaling.factors(PLACES))
    assert (found.keys == 1).all()
