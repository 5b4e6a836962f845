"""Each planted fault is found by the check of a table, and tables without it have none."""

import pytest
import torch
import torch.nn.functional as F
from covering import looped
from tokenizers import Tokenizer, models
from torch import Tensor

from embedlayer.analysis import table_health
from embedlayer.tables.dense import TokenEmbedding


def clustered(count: int = 1200, width: int = 96) -> Tensor:
    """Rows around twenty directions, in random order."""
    return torch.randn(20, width)[torch.randint(20, (count,))] + torch.randn(count, width)


def falling(count: int, width: int) -> Tensor:
    """Rows that use some directions more than others, as trained ones do."""
    return torch.randn(count, width) * torch.arange(1, width + 1) ** -0.5


@looped("scale, dtype", [1e-3, 1.0, 50.0], [torch.float32, torch.bfloat16])
def test_nearly_equal_rows_are_grouped_at_every_scale(scale, dtype) -> None:
    rows = torch.randn(3000, 48)
    rows[10], rows[2000] = rows[5] * 1.003, rows[5] + 0.003 * torch.randn(48)
    rows[700:900] = rows[:600].mean(0) * (1 + 0.002 * torch.randn(200, 48))
    rows[950], rows[960] = -rows[5], 1.1 * rows[5]
    assert table_health((scale * rows).to(dtype)).near_duplicates == ((5, 10, 2000), tuple(range(700, 900)))


def test_equal_rows_are_no_near_duplicates_and_broken_rows_have_no_distance() -> None:
    rows = torch.randn(200, 16)
    rows[3], rows[4] = rows[7], rows[7]
    rows[20:30], rows[40:50] = 0.0, torch.nan
    assert table_health(rows).near_duplicates == ()
    rows[5] = rows[7] + 0.001
    assert table_health(rows).near_duplicates == ((3, 4, 5, 7),)
    others = (torch.randn(6000, 16), torch.randn(1, 64) + 0.1 * torch.randn(3000, 64))
    for none in (*others, torch.zeros(0, 4), torch.zeros(5, 4), torch.full((3, 2), torch.nan), torch.ones(1, 3)):
        assert table_health(none).near_duplicates == ()


def of_norms(norms: Tensor) -> Tensor:
    return norms[:, None] * F.normalize(torch.randn(len(norms), 8), dim=1)


@looped("factor, count", [8.0, 1 / 8], [1, 30, 200])
def test_rows_multiplied_by_a_factor_are_found(factor, count) -> None:
    norms = 1 + 0.1 * torch.randn(3000).clamp(-3, 3)
    chosen = torch.randperm(3000)[:count].sort().values
    norms[chosen] *= factor
    (found,) = table_health(of_norms(norms)).norm_outliers
    assert found.ids == tuple(chosen.tolist())
    assert (found.low > found.nearest) == (factor > 1)
    assert found.low <= found.high
    assert found.median == pytest.approx(1.0, abs=0.05)
    assert found.log10_chance < -6


def test_heavy_tails_half_of_the_rows_and_few_rows_are_no_outliers() -> None:
    for scale in (0.05, 0.2, 0.3) * 3:
        tail = (scale * torch.empty(2000).exponential_()).exp()  # of Pareto
        assert table_health(of_norms(tail)).norm_outliers == table_health(of_norms(1 / tail)).norm_outliers == ()
    norms = torch.rand(1000) + 1
    norms[:500] *= 10
    broken = torch.ones(500)
    broken[:9], broken[9:20] = torch.nan, 0.0
    for each in (norms, torch.tensor([1.0] * 20 + [50.0]), broken):
        assert table_health(of_norms(each)).norm_outliers == ()


@looped("share, scale", [0.01, 0.2, 0.5, 1.0], [0.02, 1.0])
def test_random_rows_are_found_at_every_share(share, scale) -> None:
    rows = falling(2000, 128)
    planted = torch.arange(2000) < share * 2000
    rows[planted] = scale * torch.randn(int(planted.sum()), 128)
    found = table_health(rows).verdicts.random
    assert found.is_random[planted].float().mean() > 0.97
    assert not found.is_random[~planted].float().sum() > 0.01 * (~planted).sum()
    assert found.share == pytest.approx(share, abs=0.12)
    assert not (found.is_random & found.is_distinct).any()


def test_rows_that_are_related_in_evenly_spread_directions_are_distinct_by_their_nearest_row() -> None:
    rows = torch.randn(500, 64).repeat_interleave(2, 0) + 0.4 * torch.randn(1000, 64)
    rows[:100] = torch.randn(100, 64)
    found = table_health(rows).verdicts.random
    assert found.is_random[:100].float().mean() > 0.9
    assert found.is_distinct[100:].float().mean() > 0.99
    assert (found.nearest[100:] > found.distinct.nearest).float().mean() > 0.9


def test_where_trained_rows_look_random_and_of_few_rows_none_is_called_random() -> None:
    found = table_health(falling(500, 16)).verdicts.random
    assert found.is_random.sum() <= 5
    assert (~found.is_random & ~found.is_distinct).any()
    for size in ((0, 4), (63, 32), (500, 2)):
        found = table_health(torch.randn(size)).verdicts.random
        assert not (found.is_judged | found.is_random).any()


def test_of_wide_tables_a_part_of_the_columns_is_judged() -> None:
    rows = falling(700, 600) * torch.arange(1, 601) ** -0.5
    rows[600:] = torch.randn(100, 600)
    rows[3] = 0.0
    found = table_health(TokenEmbedding.from_pretrained(rows)).verdicts.random
    assert found.is_judged.tolist() == [row != 3 for row in range(700)]
    assert found.is_random[600:].float().mean() > 0.95
    assert found.is_random[:600].sum() <= 6


def test_the_share_of_a_row_that_is_noise_leaves_the_row_itself_out() -> None:
    rows = falling(200, 24).double()
    found, units = table_health(rows).verdicts.random, F.normalize(rows, dim=1)
    for row in (0, 17, 199):
        others = torch.cat([units[:row], units[row + 1 :]])
        moment = others.T @ others * 24 / 200 + torch.eye(24).double()
        expected = float(units[row] @ torch.linalg.solve(moment, units[row]))
        assert float(found.noise_shares[row]) == pytest.approx(expected, rel=1e-3)


@looped("place, shift", [((0, 48), -3), ((48, 96), -1), ((30, 62), 1), ((0, 32), 2), ((30, 62), -2)])
def test_columns_that_hold_the_numbers_of_other_rows_are_named(place, shift) -> None:
    (start, stop), rows = place, clustered()
    shifted = rows.clone()
    shifted[:, start:stop] = rows.roll(-shift, 0)[:, start:stop]
    found = table_health(shifted).columns
    assert found.is_fault
    if stop - start == 48:  # either half is the odd one
        assert (found.start, found.stop) in ((0, 48), (48, 96))
        assert abs(found.shift) == abs(shift)
    else:
        assert abs(found.start - start) + abs(found.stop - stop) <= 32
        assert found.shift == shift
    assert f"{found.start} to {found.stop - 1} belong to other rows" in found.sentence()
    assert f"ID {'+' if found.shift > 0 else '-'} {abs(shift)}" in found.sentence()


def test_permuted_columns_fit_no_other_row_and_random_few_and_narrow_rows_are_not_compared() -> None:
    rows = clustered()
    assert not table_health(rows).columns.is_fault
    rows[:, 32:64] = rows[torch.randperm(1200)][:, 32:64]
    found = table_health(rows).columns
    assert (found.is_fault, found.shift) == (True, 0)
    assert "by chance 0.00" in found.sentence()
    for none in (torch.randn(1200, 96), clustered(width=48), clustered(100), torch.zeros(1200, 96)):
        assert table_health(none).columns is None


TRAINED = torch.randn(300, 24, generator=torch.Generator().manual_seed(0))


def test_the_shares_are_those_of_the_definition() -> None:
    rows = torch.randn(200, 6, dtype=torch.float64) * torch.arange(1, 7) + torch.randn(6)
    rows[:, 2], rows[7] = 0.25, 0.0
    rows[8, 1] = torch.nan
    found, kept = table_health(rows).shared, rows[[row for row in range(200) if row not in (7, 8)]]
    variance = kept.var(0, correction=0)
    assert found.rows == 198
    assert found.scale == pytest.approx(float(kept.square().mean().sqrt()))
    assert found.offset_share == pytest.approx(float(198 * kept.mean(0).square().sum() / kept.square().sum()))
    assert (found.dimension, found.dimension_share) == (5, pytest.approx(float(variance[5] / variance.sum())))
    values = torch.linalg.svdvals(kept - kept.mean(0)).square()
    assert found.component_share == pytest.approx(float(values[0] / values.sum()))
    assert (found.constant, found.rank, found.most_rank) == ((2,), 5, 5)
    few = TRAINED[:, :4] @ torch.randn(4, 24)
    assert [table_health(each).shared.has_few_directions for each in (few, TRAINED)] == [True, False]
    assert list(table_health(torch.zeros(50, 4)).shared.faults()) == []


@looped(
    "spoil, fault",
    [
        (lambda rows: rows, None),
        (lambda rows: rows.bfloat16(), None),
        (lambda rows: rows + 5, "One offset that all rows share holds 96 %"),
        (lambda rows: rows * torch.tensor([1.0] * 23 + [50.0]), "Dimension 23 alone holds 99 %"),
        (lambda rows: rows + 9 * torch.randn(300, 1) * torch.ones(24), "One direction holds 9"),
        (lambda rows: rows * 1e18, "The scale is out of range: "),
        (lambda rows: rows * 1e-18, "The scale is out of range: "),
        (lambda rows: rows.index_fill(1, torch.tensor([3, 4]), 0.0), "2 columns are constant"),
    ],
)
def test_each_fault_that_all_rows_share_is_a_sentence_and_rows_are_judged_without_it(spoil, fault) -> None:
    rows = torch.cat([torch.zeros(3, 24), spoil(TRAINED)])
    found, plain = table_health(rows.to(spoil(TRAINED).dtype)), table_health(torch.cat([torch.zeros(3, 24), TRAINED]))
    sentences = list(found.shared.faults())
    assert [sentence.startswith(fault or "-") for sentence in sentences] == [True] * (fault is not None)
    assert set(sentences) <= set(found.table_faults())
    assert found.zero_rows == (0, 1, 2)
    if fault is None or "direction" not in fault:  # which may be where the meaning is
        assert found.nearest.median == pytest.approx(plain.nearest.median, abs=0.05)
        assert found.nearest.mean_pair == pytest.approx(plain.nearest.mean_pair, abs=0.01)


LETTERS = "bcdfghjklm"
STEMS = [f"{a}a{b}e{c}" for a in LETTERS for b in LETTERS for c in LETTERS][:300]
TEXTS = [text for stem in STEMS for text in (stem, stem.capitalize(), f"{stem}s")]


def similar(noise: float = 0.5, width: int = 24) -> Tensor:
    """Rows of `TEXTS`, in which those of a stem are similar."""
    return torch.randn(300, width).repeat_interleave(3, 0) + noise * torch.randn(900, width) + 2 * torch.randn(width)


def health_of(rows: Tensor, texts: list[str] = TEXTS):
    return table_health(rows, Tokenizer(models.WordLevel(dict(zip(texts, range(900), strict=True)), "?")))


def fit_of(rows: Tensor, texts: list[str] = TEXTS):
    return health_of(rows, texts).spelling


@looped("shift", range(-3, 4))
def test_a_shift_of_the_rows_against_the_tokens_is_found(shift) -> None:
    order = torch.randperm(900)
    found = fit_of(similar()[order].roll(shift, 0), [TEXTS[row] for row in order.tolist()])
    assert found.shift == shift
    assert found.shifted_cosine == pytest.approx(0.8, abs=0.05)
    assert (abs(found.cosine) < 0.1) == (shift != 0)


@looped("share", [0.3, 0.6])
def test_a_share_of_exchanged_rows_is_measured(share) -> None:
    rows, chosen = similar(width=96), torch.randperm(900)[: int(900 * share)]
    rows[chosen] = rows[chosen[torch.randperm(len(chosen))]]
    found = (health := health_of(rows)).spelling
    assert found.is_mixed
    assert found.misplaced == pytest.approx(share, abs=0.12)
    assert found.alike_cosine == pytest.approx(0.8, abs=0.1)
    assert len(found.odd_rows) > 20
    assert sum(row in set(chosen.tolist()) for row in found.odd_rows) > 0.9 * len(found.odd_rows)
    assert health.to_json(5)["spelling"]["odd_rows"]["rows"] == len(found.odd_rows)


@looped("noise", [0.3, 1.0, 2.0, 5.0])
def test_a_table_that_was_trained_little_is_not_called_mixed(noise) -> None:
    faint = torch.rand(300, 1).square().repeat_interleave(3, 0)  # from not similar at all to very similar
    for rows in (similar(noise), faint * similar() + noise * torch.randn(900, 24)):
        found = fit_of(rows)
        assert found is None or not found.is_mixed
        assert found is None or (found.odd_rows, 0 <= found.unlike <= 1) == ((), True)


def test_broken_rows_show_no_shift_and_few_pairs_show_nothing() -> None:
    rows = similar()
    rows[::7] = torch.nan
    assert fit_of(rows).cosine > 0.7
    broken = fit_of(torch.full((900, 4), torch.nan))
    assert broken is None or broken.shift == 0
    pairless = [f"{'abcdefghij'[r % 10]}{'klmnopqrst'[r // 10 % 10]}{'uvwxyzäöü'[r // 100]}q" for r in range(900)]
    assert fit_of(rows, pairless) is None


def related(count: int, width: int) -> Tensor:
    """Rows that use some directions more than others, as trained ones do."""
    return torch.randn(count, 12) @ torch.randn(12, width) / 12**0.5 + 0.3 * torch.randn(count, width)


def test_each_kind_of_row_has_its_verdict_and_its_reason() -> None:
    rows = related(2000, 96)
    rows[100:200] = 0.02 * torch.randn(100, 96)
    rows[200:300] = torch.randn(96) + 0.1 * torch.randn(100, 96)
    rows[300], rows[301, 4] = 0.0, torch.nan
    rows[302:304] = rows[304]
    counts = torch.ones(2000, dtype=torch.int64)
    counts[250:300], counts[7] = 0, 0
    counts[200:250] = 0
    counts[240:250] = 1
    found = table_health(rows, counts=counts).verdicts
    expected = {
        7: ("never seen", "0 times in the training text"),
        260: ("never seen", "0 times"),
        245: ("not learned", "inside a narrow cone"),
        300: ("cannot tell", "zero, or holds NaN"),
        301: ("cannot tell", "zero, or holds NaN"),
        303: ("cannot tell", "equals another row"),
    }
    for row, (verdict, because) in expected.items():
        assert found.of(row).verdict == verdict
        assert because in found.of(row).because
    random = [found.of(row) for row in range(100, 200)]
    assert sum(each.verdict == "not learned" for each in random) >= 97
    assert any("as of random rows (" in each.because for each in random)
    assert sum(found.of(row).verdict == "learned" for row in range(400, 2000)) > 1580
    assert sum(map(found.count, ("learned", "not learned", "never seen", "cannot tell"))) == 2000
    assert "random rows have " in found.of(1000).because


def test_a_run_whose_rows_were_exchanged_is_not_sound() -> None:
    before = torch.randn(1000, 64)
    after = before + related(1000, 64)
    assert table_health(after, before=before).exchanged == pytest.approx(0.0, abs=0.02)
    after[::5] = after[::5].roll(1, 0)
    found = table_health(after, before=before)
    assert found.exchanged == pytest.approx(0.2, abs=0.05)
    assert "% of the rows were exchanged: they come from the rows that other tokens had" in found.summary()
    assert table_health(after.roll(1, 0), before=before).exchanged > 0.95
    assert table_health(related(1000, 64), before=before).exchanged is None  # nothing is left of the start
    assert [table_health(after[:v], before=before[:v]).exchanged is None for v in (63, 64)] == [True, False]
