"""What follows from the record of an operation, with the operation of CONTRIBUTING.md, which is one file."""

import pytest
import torch
from compiled_code import compiled_code
from gated_sum import GATED_SUM, gated_sum, gated_sum_in_one_pass
from interpreted import interpreted
from kernel_paths import launched_kernels, runs_of_kernels
from test_operators import Calls
from torch import Tensor

from embedlayer.kernels import kernels_disabled

DTYPES = [torch.float32, torch.bfloat16]


def inputs(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors of an odd size."""
    a, gate, b = torch.randn(3, 5, 321, device=device).to(dtype).unbind()
    return a, gate, b


def assert_no_worse_than_the_definition(result: Tensor, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    exact = gated_sum(*(x.double() for x in tensors))
    error, own = ((x.double() - exact).abs().max() for x in (result, gated_sum(*tensors)))
    assert result.dtype == tensors[0].dtype
    assert error <= own + 2 * torch.finfo(result.dtype).eps


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_cpu_its_kernel_computes_and_without_kernels_its_definition(dtype) -> None:
    tensors = inputs(dtype)
    with runs_of_kernels() as names:
        assert_no_worse_than_the_definition(GATED_SUM(*tensors), tensors)
        assert names == ["add_gated"]
        with kernels_disabled():
            assert torch.equal(GATED_SUM(*tensors), gated_sum(*tensors))
        with Calls() as calls:  # a dispatch mode sees torch operators
            assert torch.equal(GATED_SUM(*tensors), gated_sum(*tensors))
        assert not calls.seen
        assert names == ["add_gated"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_cuda_its_triton_kernel_computes_and_a_dispatch_mode_sees_its_operator(dtype) -> None:
    pytest.importorskip("triton")
    tensors = inputs(dtype)
    with interpreted(GATED_SUM) as run, Calls() as calls:
        assert_no_worse_than_the_definition(GATED_SUM(*tensors), tensors)
    assert [each.name for each in run.launches] == ["add_gated_on_gpu"]
    assert [each._opname for each in calls.seen] == ["gated_sum_in_one_pass"]


@pytest.mark.usefixtures("kernels", "unchecked")
def test_a_graph_for_a_cpu_has_its_operator() -> None:
    tensors = inputs()
    compiled = torch.compile(lambda *tensors: GATED_SUM(*tensors) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), gated_sum(*tensors) * 2)
    with runs_of_kernels() as names:
        compiled(*tensors)
        assert names == ["add_gated"]
        with kernels_disabled():
            assert torch.equal(compiled(*tensors), gated_sum(*tensors) * 2)
        assert names == ["add_gated"]


@pytest.mark.usefixtures("kernels")
def test_its_operator_keeps_torchs_rules_and_its_fake_allocates_the_result() -> None:
    torch.library.opcheck(GATED_SUM.custom, inputs(), test_utils=("test_schema", "test_faketensor"))
    a, gate, b = inputs(torch.bfloat16, "meta")
    with launched_kernels() as names:
        found = GATED_SUM.custom(a.T, gate.T, b.T)
    assert (found.shape, found.dtype, found.is_meta, names) == (a.T.shape, torch.bfloat16, True, [])
    assert gated_sum_in_one_pass(*inputs()).shape == (5, 321)


def test_doctor_names_its_kernels() -> None:
    assert GATED_SUM.kernels == {"cpu": ("gated_sum.add_gated",), "cuda": ("add_gated_on_gpu",)}
    assert GATED_SUM.definition_name == "gated_sum:gated_sum"
    assert GATED_SUM.refusal(torch.zeros(1)) == ""
    assert GATED_SUM.refusal(torch.zeros(1).half()) == "no kernel takes Tensor of torch.float16"


def test_its_triton_kernel_is_compiled_ahead_of_time() -> None:
    pytest.importorskip("triton")
    code = compiled_code(GATED_SUM, "add_gated_on_gpu", "all", torch.bfloat16, 90)
    assert (code.stack, code.local, code.spills) == (0, 0, 0)
