"""Rotation in blocks, against the definition."""

import pytest
import torch

from embedlayer.positions import rotation as module
from embedlayer.positions.rotation import apply_rotary, fused_apply_rotary


def angles(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    phase = torch.randn(shape) * 3
    return phase.cos(), phase.sin()


@pytest.mark.parametrize("block", [1 << 17, 30])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("x_shape", "angle_shape"),
    [
        ((2, 6, 5, 8), (1, 5, 4)),
        ((2, 6, 5, 8), (2, 1, 5, 4)),
        ((2, 6, 5, 8), (1, 1, 5, 4)),
        ((2, 6, 5, 8), (1, 5, 2)),
        ((2, 6, 5, 7), (1, 5, 2)),
        ((6, 5, 8), (1, 5, 4)),
        ((2, 6, 1, 8), (1, 1, 4)),
        ((2, 6, 0, 8), (1, 0, 4)),
        ((2, 3, 6, 5, 8), (1, 5, 4)),
    ],
)
def test_values_and_gradients_are_those_of_the_definition(
    monkeypatch, block, interleaved, x_shape, angle_shape
) -> None:
    monkeypatch.setattr(module, "BLOCK_NUMEL", block)
    cos, sin = angles(*angle_shape)
    upstream = torch.randn(x_shape)
    results = []
    for way in (fused_apply_rotary, apply_rotary):
        torch.manual_seed(1)
        x = torch.randn(x_shape, requires_grad=True)
        y = way(x, cos, sin, interleaved=interleaved)
        y.backward(upstream)
        results.append((y.detach(), x.grad))
    for ours, plain in zip(*results, strict=True):
        assert ours.shape == plain.shape
        assert torch.allclose(ours, plain, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_any_strides_are_read_and_nothing_is_written_to(interleaved) -> None:
    cos, sin = angles(1, 5, 4)
    x = torch.randn(2, 5, 6, 8).transpose(1, 2)
    odd = torch.randn(2 * 6 * 5 * 9 + 1)[1:].view(2, 6, 5, 9)[..., :8]
    for view in (x, odd):
        before = view.clone()
        assert torch.allclose(
            fused_apply_rotary(view, cos, sin, interleaved=interleaved),
            apply_rotary(before, cos, sin, interleaved=interleaved),
            atol=1e-6,
        )
        assert torch.equal(view, before)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_second_derivative_is_zero_and_can_be_asked_for(interleaved) -> None:
    cos, sin = angles(1, 3, 2)
    x = torch.randn(1, 2, 3, 4, requires_grad=True)
    upstream = torch.randn(1, 2, 3, 4, requires_grad=True)
    (first,) = torch.autograd.grad(
        fused_apply_rotary(x, cos, sin, interleaved=interleaved), x, upstream, create_graph=True
    )
    (through,) = torch.autograd.grad(first, upstream, torch.ones_like(first))
    assert torch.allclose(through, apply_rotary(torch.ones_like(x), cos, sin, interleaved=interleaved), atol=1e-6)
