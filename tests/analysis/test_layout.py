"""Neighbours stay together in the picture."""

import math

import torch

from embedlayer import TokenEmbedding
from embedlayer.analysis import neighbor_layout, principal_components


def groups(count: int = 6, each: int = 60, width: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    centres = 4 * torch.randn(count, width)
    labels = torch.arange(count).repeat(each)
    return centres[labels] + torch.randn(count * each, width), labels


def share_of_own_group(places: torch.Tensor, labels: torch.Tensor, count: int = 10) -> float:
    distances = torch.cdist(places, places).fill_diagonal_(math.inf)
    near = distances.topk(count, largest=False).indices
    return float((labels[near] == labels[:, None]).float().mean())


def test_rows_of_a_group_lie_together_better_than_along_two_components():
    rows, labels = groups()
    places = neighbor_layout(rows, rounds=80).places
    assert share_of_own_group(places, labels) > 0.99
    assert share_of_own_group(places, labels) >= share_of_own_group(principal_components(rows).coordinates, labels)


def test_the_same_rows_give_the_same_picture_and_leave_the_generator_alone():
    rows, _ = groups(3, 20)
    state = torch.get_rng_state()
    first = neighbor_layout(rows, rounds=10).places
    assert torch.equal(first, neighbor_layout(rows, rounds=10).places)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_large_table_states_the_recall_of_its_graph():
    assert neighbor_layout(torch.randn(100, 24), rounds=1).recall == 1.0
    assert 0.9 < neighbor_layout(torch.randn(8200, 24), rounds=1).recall <= 1.0


def test_a_table_is_laid_out_without_rows_that_are_not_finite() -> None:
    table = TokenEmbedding(40, 8)
    with torch.no_grad():
        table.weight[7] = torch.nan
    found = neighbor_layout(table, rounds=3)
    others = torch.arange(40) != 7
    assert found.places[7].isnan().all()
    assert torch.equal(found.places[others], neighbor_layout(table.weight[others], rounds=3).places)
    for count in (1, 2, 3, 5):
        assert neighbor_layout(torch.ones(count, 4), rounds=3).places.isfinite().all()
    assert neighbor_layout(TokenEmbedding(5, 1), rounds=3).places.isfinite().all()
    assert neighbor_layout(torch.full((5, 3), torch.nan)).places.isnan().all()
