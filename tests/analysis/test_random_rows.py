"""Random rows are told from trained ones, at every share, and trained rows are not called random."""

import pytest
import torch
from real_tables import minilm
from torch import Tensor

from embedlayer import TokenEmbedding
from embedlayer.analysis import random_rows as module
from embedlayer.analysis.random_rows import random_rows
from embedlayer.analysis.row_reader import RowReader


def related(count: int, width: int) -> Tensor:
    """Rows that use some directions more than others, as trained ones do."""
    return torch.randn(count, width) @ torch.diag(1 / torch.arange(1, width + 1).double().sqrt()).float()


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_random_rows_are_found_at_every_share(share, scale) -> None:
    rows = related(2000, 128)
    planted = torch.arange(2000) < share * 2000
    rows[planted] = scale * torch.randn(int(planted.sum()), 128)
    found = random_rows(RowReader(rows), torch.ones(2000, dtype=torch.bool))
    assert found.is_random[planted].float().mean() > 0.97
    assert not found.is_random[~planted].float().sum() > 0.01 * (~planted).sum()
    assert found.share == pytest.approx(share, abs=0.12)
    assert not (found.is_random & found.is_distinct).any()


def test_rows_that_are_related_in_evenly_spread_directions_are_distinct_by_their_nearest_row() -> None:
    rows = torch.randn(500, 64).repeat_interleave(2, 0) + 0.4 * torch.randn(1000, 64)
    rows[:100] = torch.randn(100, 64)
    found = random_rows(RowReader(rows), torch.ones(1000, dtype=torch.bool))
    assert found.is_random[:100].float().mean() > 0.9
    assert found.is_distinct[100:].float().mean() > 0.99
    assert (found.nearest[100:] > found.distinct.nearest).float().mean() > 0.9


def test_where_trained_rows_look_random_no_row_is_called_random() -> None:
    rows = related(500, 16)
    found = random_rows(RowReader(rows), torch.ones(500, dtype=torch.bool))
    assert found.is_random.sum() <= 5
    assert (~found.is_random & ~found.is_distinct).any()


def test_a_table_of_any_kind_and_width_is_judged_in_parts(monkeypatch) -> None:
    rows = related(1500, 96) @ torch.diag(1 / torch.arange(1, 97).sqrt())
    rows[1400:] = torch.randn(100, 96)
    usable = torch.ones(1500, dtype=torch.bool)
    usable[3] = False
    whole = random_rows(RowReader(rows), usable)
    monkeypatch.setattr(module, "SAMPLED", 1000)
    monkeypatch.setattr(module, "COLUMNS", 80)
    monkeypatch.setattr(module, "CANDIDATES", (256, 256))
    part = random_rows(RowReader(TokenEmbedding.from_pretrained(rows)), usable)
    assert whole.is_judged.tolist() == part.is_judged.tolist() == usable.tolist()
    for found in (whole, part):
        assert found.is_random[1400:].float().mean() > 0.95
        assert found.is_random[:1400].sum() <= 14


@pytest.mark.parametrize(("count", "width"), [(0, 4), (63, 32), (500, 2)])
def test_few_rows_and_few_dimensions_are_not_judged(count, width) -> None:
    found = random_rows(RowReader(torch.randn(count, width)), torch.ones(count, dtype=torch.bool))
    assert not found.is_judged.any()
    assert not found.is_random.any()


def test_the_share_of_a_row_that_is_noise_leaves_the_row_itself_out() -> None:
    rows = related(200, 24).double()
    found = random_rows(RowReader(rows), torch.ones(200, dtype=torch.bool))
    units = torch.nn.functional.normalize(rows, dim=1)
    for row in (0, 17, 199):
        others = torch.cat([units[:row], units[row + 1 :]])
        moment = others.T @ others * 24 / 200 + torch.eye(24).double()
        expected = float(units[row] @ torch.linalg.solve(moment, units[row]))
        assert float(found.noise_shares[row]) == pytest.approx(expected, rel=1e-3)


def test_the_rows_of_a_real_table_are_distinct_and_new_ones_are_not() -> None:
    rows = minilm().table.weight.detach()[1000:6000]
    rows = torch.cat([rows, 0.02 * torch.randn(250, rows.shape[1])])
    found = random_rows(RowReader(rows), torch.ones(len(rows), dtype=torch.bool))
    assert found.is_random[5000:].float().mean() > 0.98
    assert found.is_random[:5000].float().mean() < 0.01
