"""Axial learned positions."""

import torch

from embedlayer.positions import AxialPositionalEmbedding


def test_a_vector_is_the_row_and_the_column_of_its_place_in_the_grid() -> None:
    position = AxialPositionalEmbedding((3, 4), (2, 5))
    vectors = position(torch.arange(12))
    for p in range(12):
        row, column = position.rows[p // 4, 0], position.columns[0, p % 4]
        assert torch.equal(vectors[p], torch.cat([row, column]))
    assert (position.embed_dim, position.max_seq_len) == (7, 12)
