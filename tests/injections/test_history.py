"""The tokens that layers keep between calls in cached decoding, and the masks they accept."""

import pytest
import torch

import embedlayer as el
from embedlayer.injections.history import documents_of, prepend_history


def test_the_history_of_a_row_is_its_last_tokens_without_padding() -> None:
    state: dict[str, torch.Tensor] = {}
    mask = torch.tensor([[0, 0, 1, 1], [1, 2, 0, 0]])
    prepend_history("ids", torch.tensor([[9, 9, 5, 6], [7, 8, 9, 9]]), mask, state, length=2, fill=0)
    tokens, documents = prepend_history("ids", torch.tensor([[1], [2]]), None, state, length=2, fill=0)
    assert tokens.tolist() == [[5, 6, 1], [7, 8, 2]]
    assert documents.tolist() == [[1, 1, 1], [1, 2, 2]]
    with pytest.raises(el.ShapeError, match="The state is of 2 sequences and the new tokens are of 1"):
        prepend_history("ids", torch.tensor([[1]]), None, state, length=2, fill=0)


@pytest.mark.parametrize("row", [[0, 1, 1, 0], [1, 2, 3, 0], [2, 2, 5, 5], [0, 0, 0, 0], [True, True, False, False]])
def test_documents_without_a_gap_are_accepted(row) -> None:
    mask = torch.tensor([[1, 1, 1, 1], row])
    assert torch.equal(documents_of(mask, mask.shape), mask.long())


@pytest.mark.parametrize("row", [[1, 0, 1, 1], [1, 2, 1, 0], [0, 3, 0, 3]])
def test_a_document_with_a_gap_is_refused(row) -> None:
    mask = torch.tensor([[1, 1, 1, 1], row])
    with pytest.raises(el.ShapeError, match="without padding inside of one; found row 1"):
        documents_of(mask, mask.shape)
    with pytest.raises(el.ShapeError, match=r"of shape \(2, 5\), one for each token.*found shape \(2, 4\)"):
        documents_of(mask, torch.Size([2, 5]))
