"""PCA, checked against NumPy's singular values; position pictures, against the formulas."""

import numpy as np
import pytest
import torch

from embedlayer.analysis import geometry
from embedlayer.analysis.geometry import pca, position_values
from embedlayer.errors import ShapeError, SizeError
from embedlayer.positions.alibi import AlibiBias
from embedlayer.positions.learned import LearnedPositionalEmbedding
from embedlayer.positions.position import Position
from embedlayer.positions.rotary import RotaryEmbedding
from embedlayer.positions.rotary_scaling import Yarn
from embedlayer.positions.sinusoidal import SinusoidalPositionalEmbedding


@pytest.mark.parametrize(("count", "width", "kept"), [(200, 7, 3), (5, 12, 2), (50, 50, 50), (3, 1, 1)])
@pytest.mark.parametrize("chunk", [16, 8192])
def test_pca_equals_the_singular_value_decomposition(monkeypatch, count, width, kept, chunk):
    monkeypatch.setattr(geometry, "CHUNK_ROWS", chunk)
    rows = torch.randn(count, width, dtype=torch.float64) * torch.linspace(3, 1, width) + 5
    found = pca(rows, kept)
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
    first, second = pca(rows), pca(rows[shuffled])
    torch.testing.assert_close(first.coordinates[shuffled], second.coordinates)
    assert (first.components.gather(1, first.components.abs().argmax(1, keepdim=True)) > 0).all()


@pytest.mark.parametrize(
    "rows", [torch.randn(1, 6), torch.full((40, 6), 0.1), torch.zeros(4, 6), torch.full((9, 6), 1e4)]
)
def test_rows_that_do_not_vary_lie_on_one_point(rows):
    found = pca(rows)
    assert found.coordinates.tolist() == [[0.0, 0.0]] * len(rows)
    assert found.explained_variance_ratio.tolist() == [0.0, 0.0]
    torch.testing.assert_close(found.mean, rows[0].double())


def test_small_differences_around_a_large_mean_are_still_found():
    rows = 100 + torch.linspace(0, 1e-6, 20, dtype=torch.float64)[:, None] * torch.tensor([1.0, 1.0, 0.0])
    assert pca(rows).explained_variance_ratio[0] > 0.999


def test_pca_refuses_what_has_no_components():
    with pytest.raises(SizeError, match="at least one row"):
        pca(torch.zeros(0, 3))
    with pytest.raises(SizeError, match="have 1 to 3 components; asked for 4"):
        pca(torch.zeros(5, 3), 4)
    rows = torch.zeros(5, 3)
    rows[2, 1] = torch.nan
    with pytest.raises(ShapeError, match="1 of 5 rows hold NaN or infinity, the first is row 2"):
        pca(rows)


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


def test_a_scheme_without_positions_has_no_picture():
    assert position_values(Position(), 8) is None
    with pytest.raises(SizeError, match="at least one position"):
        position_values(Position(), 0)


def test_one_position_is_a_picture_too():
    assert position_values(RotaryEmbedding(4), 1).values.tolist() == [[1.0, 1.0]]
    assert position_values(AlibiBias(2), 1).values.tolist() == [[0.0, 0.0]]


def test_a_rotation_that_also_scales_is_shown_by_its_angle():
    plain, scaled = (RotaryEmbedding(8, scaling=Yarn(1.0, 16, attention_factor=factor)) for factor in (1.0, 1.5))
    torch.testing.assert_close(position_values(scaled, 20).values, position_values(plain, 20).values)
