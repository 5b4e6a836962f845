"""PCA and spectrum, checked against NumPy, and what they are by chance."""

import math

import numpy as np
import pytest
import torch
from covering import looped

from embedlayer.analysis import chance_geometry, nearest_rows, norms_by_frequency, principal_components, table_geometry
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.factorized import FactorizedEmbedding


@looped("count, width, kept", [(9000, 7, 3), (5, 12, 2), (50, 50, 50), (3, 1, 1)])
def test_pca_equals_the_singular_value_decomposition(count, width, kept):
    rows = torch.randn(count, width, dtype=torch.float64) * torch.linspace(3, 1, width) + 5
    found = principal_components(rows, kept)
    centred = rows.numpy() - rows.numpy().mean(0)
    _, singular, directions = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(found.mean.numpy(), rows.numpy().mean(0))
    ratios = singular**2 / (singular**2).sum()
    np.testing.assert_allclose(found.explained_variance_ratio.numpy(), ratios[:kept], atol=1e-12)
    np.testing.assert_allclose(found.coordinates.abs().numpy(), np.abs(centred @ directions[:kept].T), atol=1e-7)
    np.testing.assert_allclose((found.components @ found.components.T).numpy(), np.eye(kept), atol=1e-12)


def test_pca_of_the_same_rows_in_another_order_has_the_same_signs():
    rows = torch.randn(60, 9)
    shuffled = torch.randperm(60)
    first, second = principal_components(rows), principal_components(rows[shuffled])
    torch.testing.assert_close(first.coordinates[shuffled], second.coordinates)
    assert (first.components.gather(1, first.components.abs().argmax(1, keepdim=True)) > 0).all()


@looped("rows", [torch.randn(1, 6), torch.full((40, 6), 0.1), torch.zeros(4, 6), torch.full((9, 6), 1e4)])
def test_rows_that_do_not_vary_lie_on_one_point(rows):
    found = principal_components(rows)
    assert found.coordinates.tolist() == [[0.0, 0.0]] * len(rows)
    assert found.explained_variance_ratio.tolist() == [0.0, 0.0]
    torch.testing.assert_close(found.mean, rows[0].double())


def test_small_differences_around_a_large_mean_are_still_found():
    rows = 100 + torch.linspace(0, 1e-6, 20, dtype=torch.float64)[:, None] * torch.tensor([1.0, 1.0, 0.0])
    assert principal_components(rows).explained_variance_ratio[0] > 0.999


@looped("table", [TokenEmbedding(90, 12), FactorizedEmbedding(90, 12, rank=5)])
def test_pca_of_a_table_is_that_of_its_rows(table):
    found, expected = (principal_components(each, 3).coordinates for each in (table, table.rows(0, 90).detach()))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@looped("count", [150, 9000])
def test_the_geometry_of_a_table_is_what_numpy_says(count):
    rows = torch.randn(count, 9, dtype=torch.float64) * torch.linspace(2, 0.2, 9) + 0.3
    found = table_geometry(torch.cat([rows, torch.zeros(5, 9), torch.full((2, 9), torch.nan)]))
    array = rows.numpy()
    centred = array - array.mean(0)
    singular = np.linalg.svd(centred, compute_uv=False)
    shares = singular / singular.sum()
    assert found.rows == count
    np.testing.assert_allclose(found.spectrum.numpy(), singular**2 / count)
    assert found.effective_rank == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))
    units = array / np.linalg.norm(array, axis=1, keepdims=True)
    assert found.mean_cosine == pytest.approx((np.square(units.sum(0)).sum() - count) / (count * (count - 1)))
    assert found.mean_norm == pytest.approx(
        np.linalg.norm(array.mean(0)) / np.linalg.norm(array, axis=1).mean(), abs=1e-12
    )
    _, directions = np.linalg.eigh(array.T @ array)
    partition = np.exp(array @ np.concatenate([directions, -directions], axis=1)).sum(0)
    assert found.isotropy == pytest.approx(partition.min() / partition.max())
    assert found.directions_for(0.9) == int((np.cumsum(singular**2) / (singular**2).sum() < 0.9).sum()) + 1


def test_effective_rank_and_isotropy_have_their_limits():
    even = table_geometry(torch.cat([torch.eye(6), -torch.eye(6)]))
    assert (even.effective_rank, even.isotropy) == pytest.approx((6.0, 1.0))
    line = table_geometry(torch.linspace(1, 20, 30)[:, None] * torch.tensor([1.0, 2.0, -1.0]))
    assert line.effective_rank == pytest.approx(1.0)
    assert line.isotropy < 1e-6
    assert line.mean_cosine == pytest.approx(1.0)


def test_lengths_are_told_by_frequency():
    table = TokenEmbedding(200, 8)
    counts = torch.arange(200)
    bands = norms_by_frequency(table, counts)
    assert [(band.low, band.high) for band in bands] == [(0, 0), (1, 1), (2, 7), (8, 31), (32, 127), (128, 199)]
    assert sum(band.rows for band in bands) == 200
    norms = table.weight.detach().double().norm(dim=1)
    assert bands[2].median == pytest.approx(float(norms[2:8].quantile(0.5)))


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
