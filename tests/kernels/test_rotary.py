"""Triton kernels of rotary positions, compared with torch operators: in Triton's interpreter, or on a GPU."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from covering import cases, covering, some
from interpreted import interpreted
from kernel_paths import GPU_BACKENDS, cpu_taken_for_cuda, running_on
from rotary_schemes import ROTATED, SCHEMES, SIZES, assert_rotation_is_no_worse_than_by_operators, heads, rotated
from torch import Tensor

from embedlayer import RotaryEmbedding
from embedlayer.kernels import kernels_disabled
from embedlayer.kernels.gpu.launch import Launched, launches_observed
from embedlayer.positions import DynamicNTKScaling
from embedlayer.positions.rotary import rotation

pytestmark = pytest.mark.usefixtures("triton")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def triton() -> None:
    pytest.importorskip("triton")


OF_OTHER_LINES = ["plain", "chunked", "alternating", "channels", "axial, within", "query scaling"]
"""A scheme for each way in which axes share the channels, and for each option that the kernels read."""
POSITIONS = ["each axis", "each sequence", "all alike"]


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize(
    ("name", "dtype", "size", "positions"),
    some(
        covering(product(OF_OTHER_LINES, DTYPES, SIZES, POSITIONS), [(1, 2)]),
        product(ROTATED, DTYPES, SIZES, POSITIONS),
    ),
)
def test_values_and_gradients_are_no_worse_than_those_of_torch_operators(
    backend, name, dtype, size, positions, monkeypatch
) -> None:
    monkeypatch.setattr(rotation, "PROGRAMS", 1024 if size == "small" else 4)  # many heads in a program
    with running_on(backend):
        assert_rotation_is_no_worse_than_by_operators(name, dtype, size, positions)


def of_projections(shape: tuple[int, ...]) -> Tensor:
    """Return one of three projections of the same vectors, computed together."""
    *batch, count, length, width = shape
    return torch.randn(*batch, length, 3, count, width).select(-3, 1).transpose(-2, -3)


MEMORY: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "in order": torch.randn,
    "tokens before heads": lambda shape: torch.randn(*shape[:-3], shape[-2], shape[-3], shape[-1]).transpose(-2, -3),
    "of three projections": of_projections,
    "an odd start": lambda shape: torch.randn(*shape[:-1], shape[-1] + 1)[..., 1:],
    "channels apart": lambda shape: torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2],
    "one head for all": lambda shape: torch.randn(*shape[:-3], 1, *shape[-2:]).expand(shape),
}


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@cases("memory, interleaved", MEMORY, [False, True])
def test_any_memory_is_read_and_nothing_is_written_to(backend, memory, interleaved) -> None:
    position = RotaryEmbedding(32, rotary_dim=24, interleaved=interleaved)
    for batch in ((2,), ()):
        with running_on(backend):
            position.to(torch.get_default_device())
            q, k = (MEMORY[memory]((*batch, count, 5, 32)) for count in (3, 2))
            before, at = (q.clone(), k.clone()), torch.arange(100, 105)
            grads = [MEMORY[memory](tuple(x.shape)) for x in (q, k)]
            ours = rotated(position, q, k, at, grads)
            with kernels_disabled():
                expected = rotated(position, q, k, at, grads)
            assert torch.equal(q, before[0])
            assert torch.equal(k, before[1])
            for found, plain in zip(ours, expected, strict=True):
                torch.testing.assert_close(found, plain, atol=2e-6, rtol=0)
                assert found.stride(-1) == 1


def launches_of(call: Callable[[], object]) -> list[Launched]:
    """Return the launches of rotary kernels in the interpreter."""
    seen: list[Launched] = []
    with interpreted(), launches_observed(seen.append):
        call()
    return [each for each in seen if each.module == "rotary"]


def test_queries_and_keys_may_differ_in_dtype_and_either_may_need_no_gradient() -> None:
    position, at = SCHEMES["plain"], torch.arange(7)
    q, k = heads(position)
    k = k.bfloat16().requires_grad_()
    with interpreted():
        ours = position.rotate(q, k, at)
        assert [x.dtype for x in ours] == [torch.float32, torch.bfloat16]
        (grad,) = torch.autograd.grad(ours[1].sum(), k)
    plain = position.rotate(q, k, at)
    (expected,) = torch.autograd.grad(plain[1].sum(), k)
    torch.testing.assert_close(ours, plain, atol=1e-6, rtol=2.0**-7)
    torch.testing.assert_close(grad, expected, atol=2.0**-6, rtol=0)  # torch operators round both terms of a sum


@pytest.mark.parametrize("name", some(["channels", "reversed, trailing"], ROTATED))
def test_the_backward_pass_can_be_derived_again(name) -> None:
    position, at = SCHEMES[name], torch.arange(7)
    q, k = (x.requires_grad_() for x in heads(position))
    grads = [torch.randn_like(x).requires_grad_() for x in (q, k)]

    def second() -> tuple[Tensor, ...]:
        first = torch.autograd.grad(position.rotate(q, k, at), (q, k), grads, create_graph=True)
        return torch.autograd.grad(first, grads, [q.detach(), k.detach()])

    with interpreted() as run:
        ours = second()
    assert [each.name for each in run.launches[-3:]] == ["rotate"] * 3
    torch.testing.assert_close(ours, second(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", some(["channels", "axial, within"], ROTATED))
def test_transforms_and_batched_gradients_take_torch_operators(name) -> None:
    position: Any = SCHEMES[name]
    at = torch.arange(7)
    q, k = (x.requires_grad_() for x in heads(position))
    grads, upstream = ([torch.randn(*batch, *x.shape) for x in (q, k)] for batch in ((3,), ()))
    upstream = [x.requires_grad_() for x in upstream]
    with interpreted():
        results = position.rotate(q, k, at)
        first = torch.autograd.grad(results, (q, k), upstream, create_graph=True)
        batched = torch.autograd.grad(results, (q, k), grads, is_grads_batched=True, retain_graph=True)
        second = torch.autograd.grad(first, upstream, grads, is_grads_batched=True)
        mapped = torch.func.vmap(lambda q, k: position.rotate(q[None], k[None], at)[0][0])(q.detach(), k.detach())
    torch.testing.assert_close(mapped, results[0].detach(), atol=1e-5, rtol=0)
    for place in range(3):
        each = [x[place] for x in grads]
        expected = torch.autograd.grad(results, (q, k), each, retain_graph=True)
        torch.testing.assert_close([x[place] for x in batched], list(expected), atol=1e-5, rtol=0)
        torch.testing.assert_close([x[place] for x in second], list(position.rotate(*each, at)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5, 8), (2, 4, 0, 8)])
def test_other_shapes_take_torch_operators_or_launch_nothing(shape) -> None:
    position, q = RotaryEmbedding(8), torch.randn(shape)
    at = torch.arange(shape[-2])
    prepared = position.prepare(at)
    results: list[tuple[Tensor, Tensor]] = []
    assert not launches_of(lambda: results.append(position.rotate(q, q, prepared)))
    torch.testing.assert_close(results[0], position.rotate(q, q, at))


def test_keys_that_do_not_fit_the_queries_are_refused_as_by_torch_operators(unchecked) -> None:
    position = RotaryEmbedding(8)
    with interpreted(), pytest.raises(RuntimeError, match="must match"):
        position.rotate(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 4, 8), torch.arange(5))


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_angles_are_exact_at_any_position_and_in_any_dtype_of_positions(backend) -> None:
    with running_on(backend):
        position = RotaryEmbedding(64, base=500_000.0).to(torch.get_default_device())
        for dtype, far in ((torch.int64, 2**40), (torch.int32, 2**31)):
            at = torch.randint(-far, far, (300,), device="cpu").to(torch.get_default_device(), dtype)
            at[:3] = torch.arange(3)
            prepared: Any = position.prepare(at)
            cos, sin = position.cos_sin(at, dtype=torch.float64)
            torch.testing.assert_close(prepared.cos[0, :, :32].double(), cos, atol=2.0**-23, rtol=0)
            torch.testing.assert_close(prepared.sin[0, :, 32:].double(), sin, atol=2.0**-23, rtol=0)
            assert (prepared.cos[0, 0] == 1).all()
            assert (prepared.sin[0, 0] == 0).all()


@pytest.mark.parametrize("name", some(OF_OTHER_LINES, ROTATED))
def test_prepared_angles_give_the_same_bits_and_cost_one_launch(name) -> None:
    position, (q, k), at = SCHEMES[name], heads(SCHEMES[name]), torch.arange(7)
    prepared: list[Any] = []
    results: list[tuple[Tensor, Tensor]] = []
    assert [each.name for each in launches_of(lambda: prepared.append(position.prepare(at)))] == ["angle_tables"]
    for positions, names in ((prepared[0], ["rotate"]), (at, ["angle_tables", "rotate"])):
        launches = launches_of(lambda positions=positions: results.append(position.rotate(q, k, positions)))
        assert [each.name for each in launches] == names
    assert all(map(torch.equal, *results))


def test_cached_keys_are_rotated_again_in_one_launch() -> None:
    position = RotaryEmbedding(16, scaling=DynamicNTKScaling(2.0, 4))
    keys, results = torch.randn(2, 3, 9, 16), []

    def rerotate() -> None:
        results.append(position.rerotate(keys, torch.arange(9), from_length=5, to_length=9))

    assert [each.name for each in launches_of(rerotate)] == ["angle_tables", "rotate"]
    rerotate()
    torch.testing.assert_close(*results, atol=1e-6, rtol=0)


def test_a_compiled_graph_has_torch_operators(unchecked) -> None:
    """Inductor fuses them with what precedes the rotation."""
    position, q = RotaryEmbedding(16), torch.randn(1, 2, 5, 16)
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    expected = position.rotate(q, q, torch.arange(5))
    with cpu_taken_for_cuda():
        found = torch.compile(position.rotate, fullgraph=True, backend=backend)(q, q, torch.arange(5))
    assert ["embedlayer" in graph for graph in graphs] == [False]
    torch.testing.assert_close(found, expected)
