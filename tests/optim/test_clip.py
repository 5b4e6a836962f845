"""Clipping dense gradients is torch's; with sparse ones see test_row_adamw."""

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
