"""Fast ways to rotate pairs of channels, against the definition: a few operations, a kernel or complex numbers."""

import pytest
import torch

from embedlayer import RotaryEmbedding
from embedlayer.positions import apply_rotary

LARGE = 1400
"""Heads of 8 tokens of width 64 that have more numbers than a few operations take."""


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads", [6, 40, LARGE], ids=["small", "middle", "large"])
def test_values_and_derivatives_are_those_of_the_definition(interleaved, heads) -> None:
    """Also those of any strides, which are not written to; positions are the same in all rows, or not."""
    rows = torch.tensor([[0, 1, 2, 3, 9, 8, 7, 1], [5, 6, 0, 1, 2, 3, 4, 5]])
    for width, rotary_dim in ((64, 64), (64, 32), (65, 32)):
        position = RotaryEmbedding(width, rotary_dim=rotary_dim, interleaved=interleaved)
        usual = torch.randn(2, 8, heads, width).transpose(1, 2)
        odd = torch.randn(2 * heads * 8 * (width + 1) + 1)[1:].view(2, heads, 8, width + 1)[..., :width]
        cases = [
            (usual, rows[0]),
            (usual, rows[:, :]),
            (odd, rows[0]),
            (usual[0], rows[0]),
            (usual[:, :, :1], rows[0, :1]),
        ]
        cases += [(usual[None], rows[0]), (usual[:, :, :0], rows[0, :0])]
        for x, positions in cases if heads != LARGE or width == 64 else cases[:2]:
            before, upstream = x.clone(), torch.randn(x.shape, requires_grad=True)
            cos, sin = (each if positions.dim() == 1 else each.unsqueeze(1) for each in position.cos_sin(positions))
            x = x.detach().requires_grad_()
            found = position.rotate(x, x[..., :2, :, :], positions)[0]
            torch.testing.assert_close(found, apply_rotary(x, cos, sin, interleaved=interleaved), atol=1e-5, rtol=1e-5)
            (gradient,) = torch.autograd.grad(found, x, upstream, create_graph=True)
            turned_back = apply_rotary(upstream, cos, -sin, interleaved=interleaved)
            torch.testing.assert_close(gradient, turned_back, atol=1e-5, rtol=1e-5)
            (through,) = torch.autograd.grad(gradient, upstream, torch.ones_like(gradient))
            ones = apply_rotary(torch.ones_like(x), cos, sin, interleaved=interleaved)
            torch.testing.assert_close(through, ones, atol=1e-5, rtol=1e-5)
            assert torch.equal(x, before)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_kernel_is_as_exact_as_the_definition(dtype, interleaved) -> None:
    position, positions = RotaryEmbedding(64, rotary_dim=24, interleaved=interleaved), torch.randint(0, 9999, (2, 8))
    x = torch.randn(2, 8, LARGE, 64).to(dtype).transpose(1, 2)
    found = position.rotate(x, x[:, :2], positions)[0]
    cos, sin = (each.unsqueeze(1) for each in position.cos_sin(positions, dtype=torch.float64))
    exact = apply_rotary(x.double(), cos, sin, interleaved=interleaved)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    plain = apply_rotary(x, cos.to(wide), sin.to(wide), interleaved=interleaved)
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() <= 1.5 * (plain.double() - exact).abs().max().clamp(min=1e-12)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_result_does_not_depend_on_the_size_of_the_call(interleaved) -> None:
    position = RotaryEmbedding(128, interleaved=interleaved)
    x = torch.randn(1, 3, 2000, 128)
    prepared = position.prepare(torch.arange(2000))
    large = position.rotate(x, x, prepared)[0]
    first = position.rotate(x[..., :7, :], x[..., :7, :], torch.arange(7))[0]
    assert torch.equal(large[..., :7, :], first)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_compiled_graph_of_large_queries_has_one_operator_for_them(unchecked, interleaved) -> None:
    position, positions = RotaryEmbedding(64, interleaved=interleaved), torch.arange(600)
    q = torch.randn(1, 16, 600, 64, requires_grad=True)
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph.forward

    compiled = torch.compile(position.rotate, fullgraph=True, backend=backend)
    found, _ = compiled(q, q, positions)
    assert [graph.count("embedlayer.rotate_in_one_pass.default") for graph in graphs] == [2]
    expected, _ = position.rotate(q, q, positions)
    assert torch.allclose(found, expected, atol=1e-6)
    upstream = torch.randn_like(q)
    (ours,) = torch.autograd.grad(found, q, upstream)
    (plain,) = torch.autograd.grad(expected, q, upstream)
    assert torch.allclose(ours, plain, atol=1e-6)
