"""Clipping sparse gradients of torch; for row-sparse tables see tests/row_sparse/test_gradient.py."""

import pytest
import torch
from torch import nn

from embedlayer import clip_grad_norm_


@pytest.mark.usefixtures("both_paths")
def test_sparse_gradients_of_an_embedding_of_torch_are_clipped_too() -> None:
    torch.manual_seed(0)
    sparse, dense = nn.Embedding(9, 3, sparse=True), nn.Embedding(9, 3)
    dense.load_state_dict(sparse.state_dict())
    norms = []
    for table, clip in ((sparse, clip_grad_norm_), (dense, nn.utils.clip_grad_norm_)):
        table(torch.tensor([[1, 5, 5]])).square().sum().backward()
        norms.append(clip(table.parameters(), 0.1))
    assert torch.allclose(*norms)
    assert torch.allclose(sparse.weight.grad.to_dense(), dense.weight.grad)
