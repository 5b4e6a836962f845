"""Clipping dense gradients is torch's; with row-sparse ones see tests/row_sparse/test_gradient.py."""

import pytest
import torch
from torch import nn

from embedlayer import clip_grad_norm_


def test_dense_gradients_are_clipped_as_torch_does_bit_for_bit() -> None:
    ours, theirs = (nn.Linear(5, 3) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(4, 5)
    norms = []
    for layer, clip in ((ours, clip_grad_norm_), (theirs, nn.utils.clip_grad_norm_)):
        layer(x).square().sum().backward()
        norms.append(clip(layer.parameters(), 0.1))
    assert torch.equal(*norms)
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0


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
