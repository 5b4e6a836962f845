"""A random order that is computed place by place: a permutation, as random as a drawn one, without its memory."""

from collections import Counter
from math import factorial, sqrt

import numpy as np
import pytest
import torch

from embedlayer.data.permutation import RandomPermutation


def order(count: int, seed: int = 0) -> RandomPermutation:
    return RandomPermutation(count, torch.Generator().manual_seed(seed))


def test_each_thing_stands_at_one_place() -> None:
    for count in (*range(1, 40), 1000, 99_856, 99_857):
        assert np.array_equal(np.sort(order(count, seed=count)(np.arange(count))), np.arange(count)), count


def test_a_place_is_computed_by_itself_and_follows_from_the_generator() -> None:
    whole = order(1000)(np.arange(1000))
    assert [int(order(1000)(np.array([place]))[0]) for place in (0, 17, 999)] == whole[[0, 17, 999]].tolist()
    assert (whole != order(1000, seed=1)(np.arange(1000))).mean() > 0.99


def test_all_orders_of_a_few_things_come_about_as_often() -> None:
    draws = 100 * factorial(4)
    counts = Counter(tuple(order(4, seed)(np.arange(4))) for seed in range(draws))
    assert len(counts) == factorial(4)
    assert all(abs(count - 100) < 6 * sqrt(100) for count in counts.values())


@pytest.mark.parametrize("count", [97, 10_000, 10**13])
def test_neighbours_and_places_have_nothing_in_common(count) -> None:
    places = np.arange(min(count, 20_000))
    found = np.concatenate([order(count, seed)(places) for seed in range(20_000 // len(places))]) / count
    noise = 5 / sqrt(len(found))
    assert abs(found.mean() - 0.5) < noise * sqrt(1 / 12)
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < noise + 2 / len(places)
    assert abs(np.corrcoef(found, np.tile(places, len(found) // len(places)))[0, 1]) < noise
    assert np.abs(np.bincount((found * 16).astype(int), minlength=16) * 16 / len(found) - 1).max() < 16 * noise
