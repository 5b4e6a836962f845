"""Where tokens stand, and schemes that stand nowhere."""

import pytest
import torch

from embedlayer import Position, ShapeError, positions_of


def test_without_a_mask_positions_count_from_the_offset() -> None:
    ids = torch.zeros(2, 4, dtype=torch.long)
    assert positions_of(ids).tolist() == [0, 1, 2, 3]
    assert positions_of(ids, offset=5).tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([1, 1, 1, 1], [0, 1, 2, 3]),
        ([0, 0, 1, 1], [0, 0, 0, 1]),
        ([1, 1, 0, 0], [0, 1, 0, 0]),
        ([1, 0, 1, 1], [0, 0, 1, 2]),
        ([1, 1, 2, 2], [0, 1, 0, 1]),
        ([0, 1, 2, 2], [0, 0, 0, 1]),
        ([1, 0, 2, 2], [0, 0, 0, 1]),
        ([1, 2, 3, 0], [0, 0, 0, 0]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_padding_shifts_nothing_and_packed_documents_count_from_zero(mask, expected) -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)
    assert positions_of(ids, torch.tensor([mask])).tolist() == [expected]
    if max(mask) == 1:
        assert positions_of(ids, torch.tensor([mask]).bool()).tolist() == [expected]


def test_a_mask_of_another_shape_is_refused(unchecked: None) -> None:
    with pytest.raises(ShapeError, match=r"attention_mask \(1, 3\) must have the shape of ids \(1, 4\)"):
        positions_of(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 3, dtype=torch.long))


def test_no_position_leaves_everything_as_it_is() -> None:
    position = Position()
    x, q, places = torch.randn(2, 3, 4), torch.randn(2, 2, 3, 2), torch.arange(3)
    assert position.add(x, places) is x
    assert position.rotate(q, q, places) == (q, q)
    assert position.bias(places, places) is None


def test_without_positions_attention_scores_are_merely_permuted() -> None:
    x = torch.randn(3, 8)
    order = torch.tensor([2, 0, 1])
    scores = Position().add(x, torch.arange(3)) @ x.T
    permuted = Position().add(x[order], torch.arange(3)) @ x[order].T
    assert torch.allclose(permuted, scores[order][:, order])
