"""Axial learned positions."""

import pytest
import torch

from embedlayer import PositionError, SizeError
from embedlayer.positions import AxialPositionalEmbedding


def test_a_vector_is_the_row_and_the_column_of_its_place_in_the_grid() -> None:
    position = AxialPositionalEmbedding((3, 4), (2, 5))
    vectors = position(torch.arange(12))
    for p in range(12):
        row, column = position.rows[p // 4, 0], position.columns[0, p % 4]
        assert torch.equal(vectors[p], torch.cat([row, column]))
    assert (position.embed_dim, position.max_seq_len) == (7, 12)


def test_places_outside_of_the_grid_and_sizes_below_one_are_errors() -> None:
    position = AxialPositionalEmbedding((2, 3), (4, 4))
    with pytest.raises(PositionError):
        position(torch.tensor([6]))
    with pytest.raises(SizeError, match="at least 1"):
        AxialPositionalEmbedding((0, 3), (4, 4))
    with pytest.raises(SizeError, match="two sizes"):
        AxialPositionalEmbedding((2, 3, 4), (4, 4))
