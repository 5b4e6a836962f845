"""The mask of causal attention."""

import itertools

import pytest
import torch

from embedlayer import ShapeError, SizeError
from embedlayer.positions import causal_mask

DOCUMENTS = torch.tensor([[0, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0]])


@pytest.mark.parametrize("documents", [None, DOCUMENTS, DOCUMENTS[0], DOCUMENTS != 0])
def test_a_query_attends_to_the_keys_of_its_definition(documents) -> None:
    rows = [[1] * 6] if documents is None else torch.atleast_2d(documents).long().tolist()
    for queries, window in itertools.product([1, 3, 6], [None, 1, 2, 9]):
        found = causal_mask(queries, 6, documents=documents, window=window)
        shape = (queries, 6) if documents is None else (*documents.shape[:-1], 1, queries, 6)[-4:]
        assert found.shape == shape
        for row, mask in zip(rows, found.reshape(-1, queries, 6).tolist(), strict=True):
            for t, j in itertools.product(range(queries), range(6)):
                i = 6 - queries + t
                is_near = j <= i and (window is None or i - j < window)
                assert mask[t][j] == ((is_near and row[i] == row[j] and row[i] != 0) or i == j)


def test_sizes_and_documents_without_a_meaning_are_refused(unchecked) -> None:
    with pytest.raises(SizeError, match="The 4 queries are the last of the keys, and there are 3 keys"):
        causal_mask(4, 3)
    for window in (0, -1, 2.5, True):
        with pytest.raises(SizeError, match="a number of keys, at least 1, the token itself, not"):
            causal_mask(4, window=window)
    for documents in (DOCUMENTS, torch.tensor([1, 2, 1, 1, 1]), torch.zeros(5), [1, 1, 1, 1, 1]):
        with pytest.raises(ShapeError, match="documents must be integers or booleans of shape"):
            causal_mask(5, documents=documents)
