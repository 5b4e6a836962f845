"""Clusters in the plane are the groups that the eye sees, and their names are typical words of them."""

import math

import torch
from covering import looped

from embedlayer.analysis.clusters import plane_clusters, typical_tokens


def scattered(sizes: list[int], spread: float = 0.25) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(len(sizes)) * (2 * math.pi / len(sizes))
    of = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return 5 * torch.stack([angles.cos(), angles.sin()], 1)[of] + spread * torch.randn(len(of), 2), of


@looped("scale, sizes", [1e-3, 1.0, 1e4], [[300], [400, 200, 100], [90, 80, 70, 60, 50, 40]])
def test_separate_groups_are_the_clusters_largest_first_at_every_scale(sizes, scale) -> None:
    points, of = scattered(sizes)
    shuffled = torch.randperm(len(of))
    found = plane_clusters(scale * points[shuffled], most=len(sizes))
    assert len(found.sizes) == len(sizes)
    inside = found.of >= 0  # a point apart from its group is in no cluster
    assert torch.equal(found.of[inside], of[shuffled][inside])
    assert found.sizes == found.of[inside].bincount().tolist()
    assert (torch.tensor(found.sizes) >= 0.8 * torch.tensor(sizes)).all()
    distances = (found.peaks - scale * torch.stack([points[of == group].mean(0) for group in range(len(sizes))])).norm()
    assert distances < scale * 0.3 * len(sizes)


def test_small_groups_and_points_with_nan_are_in_no_cluster() -> None:
    points, of = scattered([200, 100, 5], spread=0.1)
    points[0] = math.nan
    found = plane_clusters(points, most=10, smallest=8)
    assert len(found.sizes) == 2
    assert found.sizes[0] <= 199
    assert found.of[0] == -1
    assert (found.of[of == 2] == -1).all()


def test_no_points_and_equal_points_are_no_error() -> None:
    for points, sizes in ((torch.empty(0, 2), []), (torch.full((5, 2), math.nan), []), (torch.zeros(20, 2), [20])):
        assert plane_clusters(points, most=3).sizes == sizes


def test_names_are_frequent_words_near_the_mean_of_their_cluster() -> None:
    centres = 6 * torch.nn.functional.normalize(torch.randn(2, 32), dim=1)
    of = torch.tensor([0] * 30 + [1] * 30 + [-1])
    rows = torch.cat([centres[of.clamp_min(0)] + 0.1 * torch.randn(61, 32)])
    texts = [f" word{'abcdefghij'[i % 10]}{'klm'[i // 10 % 3]}" for i in range(60)] + ["none"]
    texts[3], texts[4], texts[5] = " cat", "Cats", "##"
    rows[3:6] = centres[0]
    frequency = torch.ones(61, dtype=torch.int64)
    frequency[3:6] = torch.tensor([50, 90, 1000])
    zero, one = typical_tokens(rows, of, texts, frequency=frequency)
    assert zero[0] == 4  # the more frequent of "cat" and "Cats"; "##" is no word
    assert 3 not in zero
    assert all(of[each] == 0 for each in zero)
    assert all(of[each] == 1 for each in one)
    assert len(zero) == len(one) == 5


def test_a_cluster_without_words_is_named_by_other_tokens() -> None:
    of = torch.zeros(12, dtype=torch.int64)
    texts = [str(number) for number in range(11)] + [""]
    (names,) = typical_tokens(torch.randn(12, 8), of, texts)
    assert len(names) == 5
    assert 11 not in names
    assert typical_tokens(torch.randn(12, 8), of - 1, texts) == []
