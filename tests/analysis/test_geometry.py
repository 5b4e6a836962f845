"""PCA, spectrum and alignment, checked against NumPy and SciPy; position pictures, against the formulas."""

import numpy as np
import pytest
import torch

from embedlayer.analysis import geometry
from embedlayer.analysis.geometry import norms_by_frequency, principal_components, table_geometry
from embedlayer.analysis.movement import align_tables, row_movement, shared_tokens
from embedlayer.analysis.position_pictures import position_values
from embedlayer.errors import ShapeError, SizeError
from embedlayer.positions.alibi import AlibiBias
from embedlayer.positions.learned import LearnedPositionalEmbedding
from embedlayer.positions.position import Position
from embedlayer.positions.rotary import RotaryEmbedding
from embedlayer.positions.rotary_scaling import YarnScaling
from embedlayer.positions.sinusoidal import SinusoidalPositionalEmbedding
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.factorized import FactorizedEmbedding
from embedlayer.tokenization.read import load_tokenizer
from embedlayer.tokenization.train import train_tokenizer


@pytest.mark.parametrize(("count", "width", "kept"), [(200, 7, 3), (5, 12, 2), (50, 50, 50), (3, 1, 1)])
@pytest.mark.parametrize("chunk", [16, 8192])
def test_pca_equals_the_singular_value_decomposition(monkeypatch, count, width, kept, chunk):
    monkeypatch.setattr(geometry, "CHUNK_ROWS", chunk)
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


@pytest.mark.parametrize(
    "rows", [torch.randn(1, 6), torch.full((40, 6), 0.1), torch.zeros(4, 6), torch.full((9, 6), 1e4)]
)
def test_rows_that_do_not_vary_lie_on_one_point(rows):
    found = principal_components(rows)
    assert found.coordinates.tolist() == [[0.0, 0.0]] * len(rows)
    assert found.explained_variance_ratio.tolist() == [0.0, 0.0]
    torch.testing.assert_close(found.mean, rows[0].double())


def test_small_differences_around_a_large_mean_are_still_found():
    rows = 100 + torch.linspace(0, 1e-6, 20, dtype=torch.float64)[:, None] * torch.tensor([1.0, 1.0, 0.0])
    assert principal_components(rows).explained_variance_ratio[0] > 0.999


def test_pca_refuses_what_has_no_components():
    with pytest.raises(SizeError, match="at least one row"):
        principal_components(torch.zeros(0, 3))
    with pytest.raises(SizeError, match="have 1 to 3 components; num_components is 4"):
        principal_components(torch.zeros(5, 3), 4)
    rows = torch.zeros(5, 3)
    rows[2, 1] = torch.nan
    with pytest.raises(ShapeError, match="1 of 5 rows hold NaN or infinity, the first is row 2"):
        principal_components(rows)


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
    with pytest.raises(SizeError, match="at least 1; found 0"):
        position_values(Position(), 0)


def test_one_position_is_a_picture_too():
    assert position_values(RotaryEmbedding(4), 1).values.tolist() == [[1.0, 1.0]]
    assert position_values(AlibiBias(2), 1).values.tolist() == [[0.0, 0.0]]


def test_a_rotation_that_also_scales_is_shown_by_its_angle():
    plain, scaled = (RotaryEmbedding(8, scaling=YarnScaling(1.0, 16, attention_factor=factor)) for factor in (1.0, 1.5))
    torch.testing.assert_close(position_values(scaled, 20).values, position_values(plain, 20).values)


@pytest.mark.parametrize("table", [TokenEmbedding(90, 12), FactorizedEmbedding(90, 12, rank=5)])
@pytest.mark.parametrize("chunk", [16, 8192])
def test_pca_of_a_table_is_that_of_its_rows(monkeypatch, table, chunk):
    monkeypatch.setattr(geometry, "CHUNK_ROWS", chunk)
    torch.testing.assert_close(
        principal_components(table, 3).coordinates,
        principal_components(table.rows(0, 90).detach(), 3).coordinates,
        atol=1e-6,
        rtol=1e-5,
    )


@pytest.mark.parametrize("chunk", [16, 8192])
def test_the_geometry_of_a_table_is_what_numpy_says(monkeypatch, chunk):
    monkeypatch.setattr(geometry, "CHUNK_ROWS", chunk)
    rows = torch.randn(150, 9, dtype=torch.float64) * torch.linspace(2, 0.2, 9) + 0.3
    broken = rows.clone()
    broken = torch.cat([broken, torch.zeros(5, 9), torch.full((2, 9), torch.nan)]).double()
    found = table_geometry(broken)
    array = rows.numpy()
    centred = array - array.mean(0)
    singular = np.linalg.svd(centred, compute_uv=False)
    shares = singular / singular.sum()
    assert found.rows == 150
    np.testing.assert_allclose(found.spectrum.numpy(), singular**2 / 150)
    assert found.effective_rank == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))
    units = array / np.linalg.norm(array, axis=1, keepdims=True)
    cosines = units @ units.T
    assert found.mean_cosine == pytest.approx(cosines[~np.eye(150, dtype=bool)].mean())
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
    with pytest.raises(SizeError, match="All 4 rows"):
        table_geometry(torch.zeros(4, 3))


def test_lengths_are_told_by_frequency():
    table = TokenEmbedding(200, 8)
    counts = torch.arange(200)
    bands = norms_by_frequency(table, counts)
    assert [(band.low, band.high) for band in bands] == [(0, 0), (1, 1), (2, 7), (8, 31), (32, 127), (128, 199)]
    assert sum(band.rows for band in bands) == 200
    norms = table.weight.detach().double().norm(dim=1)
    assert bands[2].median == pytest.approx(float(norms[2:8].quantile(0.5)))
    with pytest.raises(ShapeError, match="200 rows need as many counts"):
        norms_by_frequency(table, counts[:7])


@pytest.mark.parametrize("width", [6, 9, 4])
@pytest.mark.parametrize("chunk", [16, 8192])
def test_alignment_is_the_best_rotation(monkeypatch, width, chunk):
    linalg = pytest.importorskip("scipy.linalg")
    monkeypatch.setattr(geometry, "CHUNK_ROWS", chunk)
    before, after = torch.randn(50, 6, dtype=torch.float64), torch.randn(50, width, dtype=torch.float64)
    found = align_tables(before, after)
    turned = found.scale * before @ found.rotation
    assert found.residual == pytest.approx(float((turned - after).square().sum() / after.square().sum()))
    if width == 6:
        expected, _ = linalg.orthogonal_procrustes(before.numpy(), after.numpy())
        np.testing.assert_allclose(found.rotation.numpy(), expected, atol=1e-9)
    for _ in range(5):
        nearby = torch.linalg.qr(found.rotation + 0.1 * torch.randn(6, width, dtype=torch.float64)).Q
        if nearby.shape == found.rotation.shape:
            assert (found.scale * before @ nearby - after).square().sum() > (turned - after).square().sum() - 1e-9


def test_rows_that_were_turned_apart_are_the_ones_that_moved():
    before = torch.randn(400, 16)
    turn = torch.linalg.qr(torch.randn(16, 16)).Q
    after = 2 * before @ turn
    after[[7, 90]] = torch.randn(2, 16)
    before[3], after[4] = 0.0, torch.nan
    plain = row_movement(before, after)
    assert plain.cosines.nanmedian() < 0.5  # without turning, all have moved
    moved = row_movement(before, after, alignment=align_tables(before, after))
    assert {row.before for row in moved.most(2)} == {7, 90}
    assert moved.least(1)[0].cosine > 0.999
    assert moved.cosines[[3, 4]].isnan().all()
    assert len(moved.most(1000)) == 398
    assert moved.most(1)[0].norm_after == pytest.approx(float(after[moved.most(1)[0].after].norm()), rel=1e-5)


def test_two_vocabularies_are_compared_by_what_their_tokens_say(shared_data):
    text = "the cats and the dogs ran to the log, and the mats lay on it " * 20
    bpe, unigram = train_tokenizer(text, vocab_size=290), train_tokenizer(text, "unigram", vocab_size=60)
    pairs = shared_tokens(bpe, unigram)
    assert [bpe.token_to_id("Ġthe"), unigram.token_to_id("▁the")] in pairs.tolist()
    one, other = torch.randn(bpe.get_vocab_size(), 8), torch.zeros(unigram.get_vocab_size(), 8)
    other[pairs[:, 1]] = one[pairs[:, 0]]
    moved = row_movement(one, other, pairs=pairs)
    torch.testing.assert_close(moved.cosines, torch.ones(len(pairs)).double())
    llama = load_tokenizer(shared_data / "tokenizers" / "phi-3-mini.tokenizer.json")
    same = shared_tokens(llama, llama)
    assert torch.equal(same[:, 0], same[:, 1])
    assert len(same) == 32011


def test_tables_that_do_not_fit_together_say_what_to_give():
    with pytest.raises(ShapeError, match="5 and 6 rows: pass pairs"):
        align_tables(torch.randn(5, 2), torch.randn(6, 2))
    with pytest.raises(ShapeError, match="pass alignment=align"):
        row_movement(torch.randn(5, 2), torch.randn(5, 3))
    with pytest.raises(ShapeError, match="outside the tables"):
        row_movement(torch.randn(5, 2), torch.randn(5, 2), pairs=torch.tensor([[0, 5]]))
    with pytest.raises(SizeError, match="No pair has two usable rows"):
        align_tables(torch.zeros(5, 2), torch.randn(5, 2))
    assert row_movement(torch.zeros(0, 2), torch.zeros(0, 2)).most() == []


def test_rows_with_the_same_direction_are_ordered_by_the_change_of_their_norms() -> None:
    rows = torch.randn(50, 8)
    changed = rows.clone()
    changed[[3, 4]] *= torch.tensor([[8.0], [0.5]])
    changed[9] = -changed[9]
    moved = row_movement(rows, changed)
    assert [each.after for each in moved.most(3)] == [9, 3, 4]
    assert [each.after for each in moved.least(50)][-3:] == [4, 3, 9]
