"""The mask of causal attention."""

import itertools

import pytest
import torch

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
