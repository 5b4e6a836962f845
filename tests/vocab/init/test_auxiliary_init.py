"""Rows weighted in an auxiliary space, compared with the plain definitions of OMP, FOCUS and WECHSEL."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from embedlayer.core.block_sizes import TABLE_ROWS
from embedlayer.core.errors import SizeError, VocabularyError
from embedlayer.vocab.init.auxiliary_init import FocusInit, OMPInit, WechselInit, sparsemax
from embedlayer.vocab.init.auxiliary_vectors import AuxiliaryVectors
from embedlayer.vocab.init.old_rows import WeightRows
from embedlayer.vocab.init.row_init import NewToken, SubwordMeanInit

V, D, A = 40, 6, 9
OLD_IDS = [3, *range(8, 38)]
NEW = [f"new {number}" for number in range(7)]
TOKENS = [NewToken("no vector", (4, 9)), *[NewToken(text, (5,)) for text in NEW], NewToken("zero vector", (4,))]


def example(dtype=torch.float64, width=A):
    """Old rows, and vectors in a space of another width: some old tokens have none, one has a dead row."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(V, D, generator=generator, dtype=dtype)
    rows[12] = 0
    old = torch.randn(len(OLD_IDS), width, generator=generator, dtype=torch.float64)
    old[5] = torch.nan
    new = torch.cat([torch.randn(len(NEW), width, generator=generator, dtype=torch.float64), torch.zeros(1, width)])
    new[0] = old[2]  # one anchor is enough
    auxiliary = AuxiliaryVectors.from_tensors(OLD_IDS, old, [*NEW, "zero vector"], new)
    usable = [place for place, token in enumerate(OLD_IDS) if token != 12 and place != 5]
    return rows, auxiliary, old[usable].numpy(), [OLD_IDS[place] for place in usable], new[:-1].numpy()


def omp(target, anchors, k):
    """Orthogonal matching pursuit by its definition: least squares over all chosen anchors after each choice."""
    chosen: list[int] = []
    residual, weights = target, np.zeros(len(anchors))
    while len(chosen) < k and np.linalg.norm(residual) > 1e-9:
        scores = np.abs(anchors @ residual)
        scores[chosen] = -1
        chosen.append(int(scores.argmax()))
        solution = np.linalg.lstsq(anchors[chosen].T, target, rcond=None)[0]
        residual = target - anchors[chosen].T @ solution
    weights[chosen] = solution
    return weights


def cosines(target, anchors):
    return anchors @ target / np.linalg.norm(anchors, axis=1) / np.linalg.norm(target)


def focus(target, anchors):
    """Sparsemax by its definition: the threshold at which the positive parts sum to one, by bisection."""
    scores = cosines(target, anchors)
    low, high = scores.max() - 1, scores.max()
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(scores - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(scores - low, 0)


def wechsel(target, anchors):
    scores, weights = cosines(target, anchors), np.zeros(len(anchors))
    nearest = sorted(range(len(anchors)), key=lambda place: -scores[place])[:10]
    total = sum(np.exp(scores[place] / 0.1) for place in nearest)
    for place in nearest:
        weights[place] = np.exp(scores[place] / 0.1) / total
    return weights


RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "OMP": (OMPInit, lambda target, anchors: omp(target, anchors, 64)),
    "OMP, k = 4": (lambda auxiliary: OMPInit(auxiliary, k=4), lambda target, anchors: omp(target, anchors, 4)),
    "FOCUS": (FocusInit, focus),
    "WECHSEL": (WechselInit, wechsel),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_row_is_the_weighted_sum_of_the_plain_definition(rule, monkeypatch) -> None:
    monkeypatch.setattr("embedlayer.vocab.init.auxiliary_init.WEIGHTED_AT_ONCE", 3)
    monkeypatch.setitem(TABLE_ROWS, "cpu", 11)
    rows, auxiliary, anchors, ids, targets = example()
    start, definition = RULES[rule][0](auxiliary), RULES[rule][1]
    new = start.rows(WeightRows(rows), TOKENS)
    weights = np.stack([definition(target, anchors) for target in targets])
    np.testing.assert_allclose(new.values[1:-1].numpy(), weights @ rows[ids].numpy(), atol=1e-8)
    for row, origin in zip(weights, new.origins[1:-1], strict=True):
        assert origin.method == rule.partition(",")[0]
        wanted = [ids[place] for place in np.argsort(-np.abs(row)) if abs(row[place]) > 1e-12]
        assert [*origin.old_ids][: len(wanted)] == wanted or sorted(origin.old_ids) == sorted(wanted)
    if rule.startswith("OMP"):
        assert str(new.origins[1]) == f"OMP of {OLD_IDS[2]}"
    fallback = SubwordMeanInit().rows(WeightRows(rows), TOKENS)
    for place in (0, -1):
        assert torch.equal(new.values[place], fallback.values[place])
        assert new.origins[place] == fallback.origins[place]


def test_many_weights_are_shortened_in_the_text_of_an_origin() -> None:
    rows, auxiliary, *_ = example(width=30)
    origin = OMPInit(auxiliary).rows(WeightRows(rows), TOKENS).origins[2]
    assert len(origin.old_ids) > 16
    assert str(origin).endswith(f" and {len(origin.old_ids) - 16} more")


def test_dependent_anchors_and_a_single_one_are_no_error() -> None:
    vectors = torch.tensor([[1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    auxiliary = AuxiliaryVectors.from_tensors([0, 1, 2], vectors, ["new"], torch.tensor([[3.0, 1.0, 5.0]]))
    [row] = OMPInit(auxiliary).rows(WeightRows(torch.eye(3)), [NewToken("new")]).values
    torch.testing.assert_close(row @ vectors, torch.tensor([3.0, 1.0, 0.0]))
    alone = AuxiliaryVectors.from_tensors([2], vectors[:1], ["new"], torch.ones(1, 3))
    for start in (OMPInit(alone), FocusInit(alone), WechselInit(alone)):
        assert torch.equal(start.rows(WeightRows(torch.eye(3)), [NewToken("new")]).values, torch.eye(3)[2:])


def test_sparsemax_is_the_nearest_point_of_the_simplex() -> None:
    scores = torch.randn(50, 12, dtype=torch.float64) * 2
    found = sparsemax(scores)
    torch.testing.assert_close(found.sum(1), torch.ones(50, dtype=torch.float64))
    others = torch.softmax(scores + torch.randn(100, 50, 12), dim=-1)
    assert ((found - scores).norm(dim=1) <= (others - scores).norm(dim=2)).all()


def test_what_cannot_be_is_an_error() -> None:
    rows, auxiliary, *_ = example()
    with pytest.raises(SizeError, match="k must be at least 1"):
        OMPInit(auxiliary, k=0)
    with pytest.raises(SizeError, match="temperature positive"):
        WechselInit(auxiliary, temperature=0.0)
    with pytest.raises(VocabularyError, match="None of the 31 old tokens"):
        FocusInit(auxiliary, dead=OLD_IDS).rows(WeightRows(rows), TOKENS)
