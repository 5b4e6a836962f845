"""Under-trained rows: on real tables whose under-trained tokens are known, and on planted ones."""

import pytest
import torch
import torch.nn.functional as F
from covering import looped
from real_tables import area_under_curve, stories
from torch import Tensor

from embedlayer.analysis import row_reader as rows_module
from embedlayer.analysis.under_trained import under_trained_scores
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.factorized import FactorizedEmbedding


def trained(vocab_size: int, embed_dim: int) -> Tensor:
    """Rows like those of a trained table: unequal directions, a common part, groups of like meaning, unequal norms."""
    spectrum = torch.linspace(2.0, 0.3, embed_dim)
    rows = torch.randn(vocab_size, embed_dim) * spectrum + 0.5 * torch.randn(embed_dim)
    for _ in range(8):  # a dozen words around one meaning, some nearer and some further
        members = torch.randint(vocab_size, (12,))
        centre = torch.randn(embed_dim) * spectrum
        rows[members] = centre + torch.rand(12, 1) * torch.randn(12, embed_dim) * spectrum
    return rows * torch.rand(vocab_size, 1).add(0.3) / embed_dim**0.5


def plant(rows: Tensor, share: float, noise: float) -> Tensor:
    """Make a share of the rows one direction and noise of `noise` times its length; returns which."""
    count, width = max(16, round(share * len(rows))), rows.shape[1]
    dead = torch.zeros(len(rows), dtype=torch.bool)
    dead[torch.randperm(len(rows))[:count]] = True
    rows[dead] = F.normalize(torch.randn(width), dim=0) + noise * torch.randn(count, width) / width**0.5
    return dead


def test_byte_pieces_that_stories_never_gave_are_found(shared_data) -> None:
    table, dead = stories(shared_data)
    found = under_trained_scores(table)
    assert area_under_curve(found.scores, dead) >= 0.996
    assert area_under_curve(-table.weight.detach().norm(dim=1), dead) < 0.05  # low norm alone says the opposite
    (cone,) = found.cones
    assert cone.mean_cosine > 0.999
    assert dead[found.flagged].float().mean() > 0.98
    assert found.flagged[dead].float().mean() > 0.85
    assert cone.contrast > 10
    assert cone.outside_cosine < 0.5
    assert "230 rows are within 2 degrees of one direction" in found.explain()


@looped("share, noise", [(0.2, 0.7), (0.005, 0.7), (0.4, 0.02)])
def test_planted_cones_are_found_whatever_their_share(share, noise) -> None:
    rows = trained(4000, 96)
    dead = plant(rows, share, noise)
    found = under_trained_scores(rows)
    assert area_under_curve(found.scores, dead) > 0.999
    assert found.flagged[~dead].sum() <= 2
    assert found.flagged[dead].float().mean() > 0.9


@pytest.mark.parametrize(
    "rows",
    [
        lambda: torch.randn(512, 16),
        lambda: torch.randn(6000, 3),
        lambda: trained(2000, 50),
        lambda: torch.randn(5000, 50) * torch.logspace(0.5, -2, 50) + 3 * torch.randn(50),
    ],
    ids=["untrained", "three wide", "trained", "one common direction"],
)
def test_a_table_without_such_rows_has_none_flagged(rows) -> None:
    table = rows()
    found = under_trained_scores(table)
    assert not found.flagged.any()
    assert found.scores.shape == (len(table),)
    assert "no row is flagged" in found.explain()


def clusters(count: int, low: float, high: float, *, zipf: bool = False) -> Tensor:
    """1,500 rows in clusters around random directions, with noise from `low` to `high` times the common part."""
    sizes = 1 / torch.arange(1, count + 1) if zipf else torch.ones(count)
    which = torch.multinomial(sizes, 1500, replacement=True)
    noise = low * (high / low) ** torch.rand(count)
    return directions(count)[which] + noise[which][:, None] * torch.randn(1500, WIDTH) / WIDTH**0.5


def directions(count: int) -> Tensor:
    return F.normalize(torch.randn(count, WIDTH), dim=1)


def two_scripts() -> Tensor:
    which = (torch.rand(1500) < 0.4).long()
    noise = torch.tensor([0.9, 0.6])[which][:, None]
    return directions(2)[which] + noise * torch.randn(1500, WIDTH) / WIDTH**0.5


def few_clusters_in_a_broad_table() -> Tensor:
    rows = torch.randn(1500, WIDTH) / WIDTH**0.5
    for part in rows[:125].split(25):
        part.copy_(directions(1) + 0.3 * torch.randn(25, WIDTH) / WIDTH**0.5)
    return rows


WIDTH = 32
CLUSTERED = {
    "2 equally tight": lambda: clusters(2, 0.1, 0.1),
    "100 of any width": lambda: clusters(100, 0.2, 0.8),
    "a few large, many small": lambda: clusters(30, 0.3, 0.3, zipf=True),
    "a common offset": lambda: clusters(12, 0.3, 0.6) + 1.5 * directions(1),
    "norms with heavy tails": lambda: clusters(20, 0.3, 0.6) * torch.randn(1500, 1).exp(),
    "two scripts": two_scripts,
    "few clusters in a broad table": few_clusters_in_a_broad_table,
}


@looped("kind", CLUSTERED)
def test_clusters_of_trained_rows_are_never_flagged_and_unused_rows_among_them_are_found(kind) -> None:
    rows = CLUSTERED[kind]()
    clean = under_trained_scores(rows)
    assert not clean.flagged.any()
    assert all(cone.doubt for cone in clean.undecided)
    dead = torch.zeros(1500, dtype=torch.bool)
    dead[torch.randperm(1500)[:120]] = True
    rows[dead] = rows.norm(dim=1).median() * (directions(1) + 0.01 * torch.randn(120, WIDTH) / WIDTH**0.5)
    found = under_trained_scores(rows)
    assert found.flagged[dead].float().mean() > 0.95
    assert found.flagged[~dead].sum() <= 2
    assert found.cones[0].contrast > 3


def test_counts_decide_where_directions_cannot() -> None:
    rows = clusters(2, 0.3, 0.3)
    mean = rows.mean(0)
    first = (rows - mean) @ (rows[0] - mean) > 0
    assert "Cannot tell" in under_trained_scores(rows).explain()
    found = under_trained_scores(rows, torch.where(first, 0, 5))
    assert torch.equal(found.flagged, first) or (found.flagged != first).sum() < 30
    assert not under_trained_scores(rows, torch.full((1500,), 5)).flagged.any()


def test_two_cones_are_two() -> None:
    rows = trained(4000, 128)
    first, second = slice(0, 300), slice(300, 500)
    rows[first] = torch.randn(128) + 0.3 * torch.randn(300, 128)
    rows[second] = torch.randn(128) + 0.05 * torch.randn(200, 128)
    found = under_trained_scores(rows)
    first_size, second_size = (cone.rows for cone in found.cones)
    assert 294 <= first_size <= 300
    assert second_size == 200
    assert found.flagged[:500].sum() >= 494
    assert not found.flagged[500:].any()


def test_rows_that_training_has_begun_to_pull_out_are_no_cone_of_their_own() -> None:
    rows = trained(4000, 64)
    axis, *ways = F.normalize(torch.randn(41, 64), dim=1)
    rows[:400] = axis + 0.02 * torch.randn(400, 64) / 8
    rows[400:440] = axis + torch.linspace(0.05, 1.0, 40)[:, None] * torch.stack(ways)
    found = under_trained_scores(rows)
    assert len(found.cones) == 1
    assert 400 <= found.flagged.sum() < 410


def test_rows_without_a_direction_are_no_cone_and_score_lowest() -> None:
    rows = trained(3000, 32)
    rows[:200] = 0.0
    rows[200], rows[201, 3] = torch.nan, torch.inf
    found = under_trained_scores(rows)
    assert not found.flagged.any()
    assert (found.scores[:202] == -1).all()
    assert found.scores.isfinite().all()
    for empty in (torch.zeros(50, 4), torch.zeros(0, 4), torch.ones(1, 4), torch.full((3, 2), torch.nan)):
        assert not under_trained_scores(empty).flagged.any()


@looped(
    "make, dtype", [TokenEmbedding, lambda v, d: FactorizedEmbedding(v, d, rank=24)], [torch.float32, torch.bfloat16]
)
def test_every_kind_of_table_is_read_by_chunks(monkeypatch, make, dtype) -> None:
    monkeypatch.setattr(rows_module, "NUMBERS_AT_ONCE", 1000)
    table = make(1200, 32).to(dtype)
    rows = table.inner.weight if isinstance(table, FactorizedEmbedding) else table.weight
    with torch.no_grad():
        rows[300:360] = rows[7] + 0.001 * torch.randn(60, rows.shape[1]).to(dtype)
    found = under_trained_scores(table)
    assert found.flagged[300:360].float().mean() > 0.9
    assert found.flagged.sum() <= 61
    again = under_trained_scores(table.rows(0, 1200).detach())
    torch.testing.assert_close(again.scores, found.scores, atol=1e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0)


def test_the_answer_is_the_same_each_time_and_leaves_torchs_generator_alone() -> None:
    rows = trained(17_000, 32)  # more than are sampled
    plant(rows, 0.02, 0.3)
    state = torch.random.get_rng_state()
    first, second = under_trained_scores(rows), under_trained_scores(rows)
    assert torch.equal(first.scores, second.scores)
    assert torch.equal(state, torch.random.get_rng_state())
