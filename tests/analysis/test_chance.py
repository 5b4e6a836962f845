"""What measures would be by chance, beside tables of random numbers."""

import math

import pytest
import torch
from covering import looped

from embedlayer.analysis import chance_geometry, nearest_rows, table_geometry


@looped("size, scale", [(3000, 64), (100, 64), (60, 64), (2000, 8), (500, 2)], [1.0, 0.02])
def test_a_table_of_random_numbers_measures_as_by_chance(size, scale) -> None:
    table = scale * torch.randn(size)
    measured = table_geometry(table)
    chance = chance_geometry(measured)
    assert measured.effective_rank == pytest.approx(chance.effective_rank, rel=0.01)
    assert measured.isotropy == pytest.approx(chance.isotropy, abs=0.08)
    assert abs(measured.mean_cosine) < 5 * chance.mean_cosine_deviation
    nearest = nearest_rows(table, torch.arange(len(table)), 1).cosines
    assert float(nearest.median()) == pytest.approx(chance.nearest_cosine, abs=0.02)


def test_tables_without_pairs_have_no_nearest_row() -> None:
    one = chance_geometry(table_geometry(torch.ones(1, 4)))
    assert math.isnan(one.nearest_cosine)
    assert one.isotropy == 1.0
    assert chance_geometry(table_geometry(torch.randn(3, 1))).nearest_cosine == 1.0
