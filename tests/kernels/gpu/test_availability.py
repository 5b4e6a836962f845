"""Where Triton kernels may not run, torch operators compute, and one line in the log says why."""

import logging
from collections.abc import Iterator

import pytest
import torch
from kernel_paths import machine_unknown
from kernel_records import operation_of
from torch._subclasses.fake_tensor import FakeTensorMode

from embedlayer.core.devices import TAKEN_AS
from embedlayer.kernels.gpu import availability
from embedlayer.kernels.gpu.availability import triton_refusal
from embedlayer.kernels.kernel import kernels_disabled

triton = pytest.importorskip("triton")

STATISTICS = operation_of("statistics")


@pytest.fixture(autouse=True)
def meta_is_cuda(monkeypatch) -> None:
    """Take meta tensors for tensors on CUDA."""
    monkeypatch.setitem(TAKEN_AS, "meta", "cuda")


@pytest.fixture
def unknown() -> Iterator[None]:
    """Forget what is known of this machine, before and after a test."""
    with machine_unknown():
        yield


def on_meta(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor that is taken for one on CUDA."""
    return torch.empty(4, 3, dtype=dtype, device="meta")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_three_dtypes_have_kernels_on_cuda(dtype) -> None:
    assert STATISTICS.applies(on_meta(dtype), None, on_meta(torch.long))


def test_float64_and_other_tensors_have_none() -> None:
    class Tagged(torch.Tensor):
        pass

    x = on_meta()
    for other in (on_meta(torch.float64), on_meta(torch.complex64), torch.empty(4, 3), x.as_subclass(Tagged)):
        assert not STATISTICS.applies(x, other)
    assert not operation_of("softmax.add_bfloat16").applies(x)
    with kernels_disabled():
        assert not STATISTICS.applies(x)


def test_under_a_transform_they_do_not_run() -> None:
    seen = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        seen.append(STATISTICS.applies(x))
        return x.sum()

    torch.func.grad(loss)(on_meta())
    assert seen == [False]


def test_fake_tensors_are_taken_for_the_tensors_that_they_stand_for() -> None:
    with FakeTensorMode():
        assert STATISTICS.applies(torch.empty(4, 3, device="cuda"))
        assert not STATISTICS.applies(torch.empty(4, 3))


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize(
    ("compiler", "headers", "advice"),
    [("gcc", "include", ""), (None, "include", "apt-get install gcc"), ("gcc", "nowhere", "apt-get install gcc")],
)
def test_a_device_for_which_nothing_can_be_compiled_has_none(
    compiler, headers, advice, monkeypatch, caplog, tmp_path
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nMore.")

    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(availability, "which", lambda name: compiler)
    monkeypatch.setattr(availability.sysconfig, "get_path", lambda name: str(tmp_path / headers))
    monkeypatch.setattr(availability, "launch", failing)
    monkeypatch.setitem(TAKEN_AS, "cpu", "cuda")
    with caplog.at_level(logging.WARNING, "embedlayer"):
        for _ in range(2):
            reason = triton_refusal(torch.empty(3))
            assert reason.startswith("RuntimeError: Failed to find C compiler.")
            assert advice in reason
            assert ("apt-get" in reason) == bool(advice)
    assert caplog.text.count("RuntimeError: Failed to find C compiler.") == 1
    assert "More" not in caplog.text
