"""Fast ways to rotate pairs of channels, against the definition."""

import pytest
import torch
from covering import cases

from embedlayer.positions.rotary import rotation as module
from embedlayer.positions.rotary.embedding import RotaryEmbedding
from embedlayer.positions.rotary.rotation import apply_rotary, channel_tables, fused_apply_rotary, rotate_pairs


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate pairs in the way that `rotate_pairs` chooses: a few operations, a kernel or complex numbers."""
    return rotate_pairs(x, *channel_tables(cos, sin, interleaved=interleaved), interleaved=interleaved)


@pytest.fixture(params=["small", "large"])
def sizes(request, monkeypatch) -> None:
    """Take the tensors of a test for small ones, and for large ones."""
    for name in ("SMALL_INTERLEAVED_NUMEL", "LARGE_NUMEL"):
        monkeypatch.setattr(module, name, 0 if request.param == "large" else 1 << 20)


def angles(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    phase = torch.randn(shape) * 3
    return phase.cos(), phase.sin()


@pytest.mark.usefixtures("both_paths", "sizes")
@cases(
    "interleaved, shapes",
    [False, True],
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
def test_values_and_gradients_are_those_of_the_definition(interleaved, shapes) -> None:
    x_shape, angle_shape = shapes
    cos, sin = angles(*angle_shape)
    upstream = torch.randn(x_shape)
    results = []
    for way in (rotated, apply_rotary):
        torch.manual_seed(1)
        x = torch.randn(x_shape, requires_grad=True)
        y = way(x, cos, sin, interleaved=interleaved)
        y.backward(upstream)
        results.append((y.detach(), x.grad))
    for ours, plain in zip(*results, strict=True):
        assert ours.shape == plain.shape
        assert torch.allclose(ours, plain, atol=1e-6)


@pytest.mark.usefixtures("both_paths", "sizes")
@pytest.mark.parametrize("interleaved", [False, True])
def test_any_strides_are_read_and_nothing_is_written_to(interleaved) -> None:
    cos, sin = angles(1, 5, 4)
    x = torch.randn(2, 5, 6, 8).transpose(1, 2)
    odd = torch.randn(2 * 6 * 5 * 9 + 1)[1:].view(2, 6, 5, 9)[..., :8]
    for view in (x, odd):
        before = view.clone()
        assert torch.allclose(
            rotated(view, cos, sin, interleaved=interleaved),
            apply_rotary(before, cos, sin, interleaved=interleaved),
            atol=1e-6,
        )
        assert torch.equal(view, before)


@pytest.mark.usefixtures("both_paths", "sizes")
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_second_derivative_is_zero_and_can_be_asked_for(interleaved) -> None:
    cos, sin = angles(1, 3, 2)
    x = torch.randn(1, 2, 3, 4, requires_grad=True)
    upstream = torch.randn(1, 2, 3, 4, requires_grad=True)
    (first,) = torch.autograd.grad(rotated(x, cos, sin, interleaved=interleaved), x, upstream, create_graph=True)
    (through,) = torch.autograd.grad(first, upstream, torch.ones_like(first))
    assert torch.allclose(through, apply_rotary(torch.ones_like(x), cos, sin, interleaved=interleaved), atol=1e-6)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("angle_dtype", [torch.float32, None])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_kernel_is_as_exact_as_the_definition(monkeypatch, dtype, angle_dtype, interleaved) -> None:
    monkeypatch.setattr(module, "CLAIMED_NUMEL", 30)
    cos, sin = (each.to(angle_dtype or dtype) for each in angles(2, 1, 33, 12))
    x = torch.randn(2, 33, 5, 26).to(dtype).transpose(1, 2)
    exact = apply_rotary(x.double(), cos.double(), sin.double(), interleaved=interleaved)
    found = fused_apply_rotary(x, cos, sin, interleaved=interleaved)
    assert found.dtype == dtype
    own_error = (apply_rotary(x, cos, sin, interleaved=interleaved).double() - exact).abs().max()
    assert (found.double() - exact).abs().max() <= own_error.clamp(min=1e-12)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_result_does_not_depend_on_the_size_of_the_call(interleaved) -> None:
    position = RotaryEmbedding(128, interleaved=interleaved)
    x = torch.randn(1, 3, 2000, 128)
    prepared = position.prepare(torch.arange(2000))
    assert x.numel() > module.LARGE_NUMEL
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
    assert [graph.count("embedlayer.apply_rotary.default") for graph in graphs] == [2]
    expected, _ = position.rotate(q, q, positions)
    assert torch.allclose(found, expected, atol=1e-6)
    upstream = torch.randn_like(q)
    (ours,) = torch.autograd.grad(found, q, upstream)
    (plain,) = torch.autograd.grad(expected, q, upstream)
    assert torch.allclose(ours, plain, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides its own here
@pytest.mark.usefixtures("both_paths")
def test_the_operator_fulfils_torchs_rules() -> None:
    cos, sin = angles(1, 5, 4)
    x = torch.randn(2, 3, 5, 8, requires_grad=True)
    torch.library.opcheck(module.rotate_in_graph, (x, cos, sin, False))
