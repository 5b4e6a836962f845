"""Nearest rows equal those of all cosines at once."""

import pytest
import torch
import torch.nn.functional as F
from covering import looped
from kinds import TABLES

from embedlayer.analysis import cosines_with, nearest_rows, neighbor_graph


@looped("count, width", [(20, 8), (2300, 256)])  # more scores than are computed at once, of rows in several chunks
def test_nearest_rows_are_those_of_all_cosines(count, width) -> None:
    rows = torch.randn(count, width, dtype=torch.float64)
    units = F.normalize(rows, dim=1)
    expected = (units @ units.T).fill_diagonal_(-2).topk(10)
    found = nearest_rows(rows, torch.arange(count), 10)
    assert torch.equal(found.ids, expected.indices)
    torch.testing.assert_close(found.cosines.double(), expected.values, atol=1e-6, rtol=0)
    by_vector = nearest_rows(rows, rows, 10, exclude=torch.arange(count)[:, None])
    assert torch.equal(by_vector.ids, expected.indices)


@looped("name", TABLES)
def test_every_kind_of_table_is_searched(name) -> None:
    table = TABLES[name]()
    rows = table.rows(0, table.vocab_size).detach()
    expected = nearest_rows(rows, torch.tensor([1, 3]), 4)
    found = nearest_rows(table, torch.tensor([1, 3]), 4)
    torch.testing.assert_close(found.cosines, expected.cosines, atol=1e-5, rtol=0)


@looped("width", [16, 2048])
def test_equal_rows_come_by_id(width) -> None:
    rows = torch.randn(7, width)[torch.randint(0, 7, (300,))]
    for count in (1, 5, 40):
        found = nearest_rows(rows, rows[:3], count)
        cosines = cosines_with(rows, rows[:3])
        expected = cosines.sort(dim=1, descending=True, stable=True).indices[:, :count]
        assert torch.equal(found.ids, expected)


def test_candidates_and_missing_neighbours() -> None:
    rows = torch.randn(6, 4)
    allowed = torch.tensor([True, False, True, False, False, False])
    found = nearest_rows(rows, torch.tensor([0, 1]), 5, candidates=allowed)
    assert found.ids.tolist()[0] == [2, -1]
    assert found.cosines[0, 1] == -torch.inf
    assert sorted(found.ids[1].tolist()) == [0, 2]
    assert nearest_rows(rows, torch.tensor([0]), 9).ids.shape == (1, 5)
    assert nearest_rows(rows[:1], torch.tensor([0]), 3).ids.shape == (1, 0)
    assert nearest_rows(rows, torch.empty(0, 4), 3).ids.shape == (0, 3)


def test_zero_rows_have_cosine_zero_and_broken_rows_are_no_neighbours() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 0.0], [torch.nan, 1.0], [-1.0, 0.0], [torch.inf, 0.0]])
    found = nearest_rows(rows, torch.tensor([0]), 4)
    assert found.ids.tolist() == [[1, 3, -1, -1]]
    assert found.cosines.tolist() == [[0.0, -1.0, -torch.inf, -torch.inf]]
    assert nearest_rows(rows, torch.tensor([2]), 1).ids.tolist() == [[-1]]


def test_the_graph_by_cells_states_its_recall() -> None:
    centres = 4 * torch.randn(20, 24)
    rows = centres.repeat_interleave(50, 0) + torch.randn(1000, 24)
    graph = neighbor_graph(rows, 10, torch.Generator().manual_seed(0))
    exact = nearest_rows(rows, torch.arange(1000), 10)
    recall = (graph.ids[:, :, None] == exact.ids[:, None, :]).any(2).float().mean()
    assert recall > 0.9
    assert graph.recall == pytest.approx(float(recall), abs=0.05)
    assert (graph.ids != torch.arange(1000)[:, None]).all()
