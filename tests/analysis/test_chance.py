"""What measures would be by chance, beside tables of random numbers."""

import pytest
import torch

from embedlayer.analysis.chance import chance_geometry, chance_nearest_cosine
from embedlayer.analysis.geometry import table_geometry
from embedlayer.analysis.nearest import nearest_rows


@pytest.mark.parametrize(("rows", "width"), [(3000, 64), (100, 64), (60, 64), (2000, 8), (500, 2)])
@pytest.mark.parametrize("scale", [1.0, 0.02])
def test_a_table_of_random_numbers_measures_as_by_chance(rows, width, scale) -> None:
    table = scale * torch.randn(rows, width)
    measured = table_geometry(table)
    chance = chance_geometry(measured)
    assert measured.effective_rank == pytest.approx(chance.effective_rank, rel=0.01)
    assert measured.isotropy == pytest.approx(chance.isotropy, abs=0.08)
    assert abs(measured.mean_cosine) < 5 * chance.mean_cosine_deviation
    nearest = nearest_rows(table, torch.arange(rows), 8).cosines
    assert float(nearest[:, 0].median()) == pytest.approx(chance.nearest_cosine, abs=0.02)
    assert float(nearest[:, 7].median()) == pytest.approx(chance_nearest_cosine(rows, width, 8), abs=0.02)


def test_tables_without_pairs_have_no_nearest_row() -> None:
    assert chance_nearest_cosine(1, 8) != chance_nearest_cosine(1, 8)
    assert chance_nearest_cosine(3, 1) == 1.0
    assert chance_geometry(table_geometry(torch.ones(1, 4))).isotropy == 1.0
