"""Rows that are equal, or nearly so."""

import pytest
import torch

from embedlayer.analysis.near_duplicates import equal_rows, near_duplicates, row_hashes
from embedlayer.analysis.row_reader import RowReader


def groups_of(rows: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    table = RowReader(rows)
    return near_duplicates(table, table.norms())


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nearly_equal_rows_are_grouped_at_every_scale(scale, dtype) -> None:
    rows = torch.randn(3000, 48)
    rows[10], rows[2000] = rows[5] * 1.003, rows[5] + 0.003 * torch.randn(48)
    rows[700:900] = rows[:600].mean(0) * (1 + 0.002 * torch.randn(200, 48))
    rows[950] = -rows[5]
    rows[960] = 1.1 * rows[5]
    assert groups_of((scale * rows).to(dtype)) == ((5, 10, 2000), tuple(range(700, 900)))


def test_equal_rows_alone_are_no_near_duplicates_and_broken_rows_have_no_distance() -> None:
    rows = torch.randn(200, 16)
    rows[3], rows[4] = rows[7], rows[7]
    rows[20:30], rows[40:50] = 0.0, torch.nan
    assert groups_of(rows) == ()
    rows[5] = rows[7] + 0.001
    assert groups_of(rows) == ((3, 4, 5, 7),)
    for empty in (torch.zeros(0, 4), torch.zeros(5, 4), torch.full((3, 2), torch.nan), torch.ones(1, 3)):
        assert groups_of(empty) == ()


def test_random_and_clustered_rows_have_none() -> None:
    assert groups_of(torch.randn(20_000, 16)) == ()
    assert groups_of(torch.randn(1, 64) + 0.1 * torch.randn(5000, 64)) == ()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_equal_rows_and_only_these_have_equal_hashes(dtype) -> None:
    rows = torch.randn(200, 5).to(dtype)
    rows[50:60], rows[3] = rows[7].clone(), 0.0
    rows[4], rows[4, 0] = rows[3], -0.0
    hashes = row_hashes(RowReader(rows))
    equal = (rows[:, None] == rows[None]).all(-1)
    assert torch.equal(hashes[:, None] == hashes[None], equal)
    norms = rows.double().norm(dim=1)
    assert (7, *range(50, 60)) in equal_rows(RowReader(rows), norms)
    assert all(3 not in group for group in equal_rows(RowReader(rows), norms))  # zero rows are no duplicates
    assert equal_rows(RowReader(torch.zeros(0, 4)), torch.zeros(0)) == ()
    torch.testing.assert_close(row_hashes(RowReader(rows.clone())), hashes)


def test_pairs_half_a_percent_apart_are_all_found_among_many_rows() -> None:
    rows = torch.randn(30_000, 32)
    firsts = torch.arange(0, 30_000, 1000)
    noise = torch.randn(len(firsts), 32)
    rows[firsts + 500] = (
        rows[firsts] + 0.005 * noise / noise.norm(dim=1, keepdim=True) * rows[firsts].norm(dim=1)[:, None]
    )
    assert groups_of(rows) == tuple((first, first + 500) for first in firsts.tolist())
