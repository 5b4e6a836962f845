"""Kernels: the same numbers however the work is divided, and torch operators where a kernel cannot be compiled."""

import logging
import subprocess
import sys
import threading
import time

import pytest
import torch
from covering import some
from kernel_records import operation_of
from torch._subclasses.fake_tensor import FakeTensorMode

from embedlayer.kernels import kernel as kernels
from embedlayer.kernels.kernel import Kernel, kernels_disabled
from embedlayer.positions import apply_rotary
from embedlayer.positions.rotary.embedding import RotaryEmbedding

ROTATE = operation_of("rotary.rotate_half_split")

numba = pytest.importorskip("numba")


def rotation(tokens: int = 257) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries and angles of an odd size."""
    return torch.randn(2, 3, tokens, 16), *RotaryEmbedding(16).cos_sin(torch.arange(tokens))


@pytest.fixture
def other_failure(monkeypatch) -> kernels._Failure:
    """A record of failures of its own, so that a test's failure does not switch off the kernels of other tests."""
    failure = kernels._Failure()
    monkeypatch.setattr(kernels, "_failure", failure)
    return failure


@pytest.mark.usefixtures("kernels")
def test_concurrent_calls_do_not_disturb_each_other() -> None:
    torch.set_num_threads(2)
    inputs = [rotation() for _ in range(6)]
    expected = [apply_rotary(*each) for each in inputs]
    found: list[torch.Tensor | None] = [None] * 6

    def compute(number: int) -> None:
        for _ in range(20):
            x, cos, sin = inputs[number]
            x = x.clone().requires_grad_()
            result = ROTATE(x, cos, sin, False)
            result.backward(result.detach())  # the rotation back
            torch.testing.assert_close(x.grad, x.detach(), rtol=1e-5, atol=1e-5)
            found[number] = result.detach()

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6)


PROCESSES = """
import atexit
import multiprocessing
import sys
import torch
from embedlayer.kernels import kernel as kernels
from embedlayer.positions.rotary.rotation import ROTATE, apply_rotary

torch.manual_seed(0)
x, cos, sin = torch.randn(4, 8, 600, 64), torch.randn(600, 32), torch.randn(600, 32)

def error():
    torch.set_num_threads(2)
    found = ROTATE(x, cos, sin, False)
    torch.set_num_threads(1)  # GNU OpenMP, which torch's operators use, does not survive a fork
    difference = (found - expected).abs().max().item()
    assert kernels._failure.reason is None
    return difference

def in_a_child(queue):
    queue.put(error())

torch.set_num_threads(1)
expected = apply_rotary(x, cos, sin)
if __name__ == "__main__":
    found = [error()]
    for method, count in (("fork", 2), ("forkserver", 1))[: int(sys.argv[1])]:
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        children = [context.Process(target=in_a_child, args=(queue,)) for _ in range(count)]
        for child in children:
            child.start()
        found += [queue.get() for _ in children]
        for child in children:
            child.join()
            assert child.exitcode == 0
    assert max(found) < 1e-5, found
    atexit.register(lambda: print("at exit", error() < 1e-5, len(found)))
"""


@pytest.mark.parametrize("methods", some([1], [1, 2]), ids=["fork", "fork and forkserver"])
def test_kernels_survive_fork_and_forkserver_and_the_end_of_the_interpreter(tmp_path, methods) -> None:
    script = tmp_path / "processes.py"
    script.write_text(PROCESSES)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, str(methods)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["at", "exit", "True", str(2 + methods)], done.stderr


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "numba is not installed. For the kernels: pip install 'embedlayer[fast]'"),
        ("0.9.1", "numba 0.9.1 is older than"),
    ],
)
def test_torch_operators_are_used_after_one_line_in_the_log_where_numba_is_missing_or_too_old(
    version, reason, other_failure, caplog, monkeypatch
) -> None:
    if version is None:
        monkeypatch.setitem(sys.modules, "numba", None)
    else:
        monkeypatch.setattr(numba, "__version__", version)
    monkeypatch.setattr(ROTATE.cpu[0], "_compiled", set())
    x, cos, sin = torch.randn(1, 8, 600, 64), torch.randn(600, 32), torch.randn(600, 32)
    for each in (x, x, x.bfloat16()):
        assert torch.equal(ROTATE(each, cos, sin, False), apply_rotary(each, cos, sin))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith("Compiled CPU kernels are off, torch operators are used instead: ")
    assert reason in record.message
    assert other_failure.reason in record.message


def test_a_kernel_that_cannot_be_compiled_computes_nothing(other_failure, caplog) -> None:
    broken = Kernel(lambda start, stop, x: x.no_such_attribute, numba.njit)
    with caplog.at_level(logging.WARNING, "embedlayer"):
        assert not broken.run(3, torch.zeros(3), block=1)
        assert not broken.run(3, torch.zeros(3), block=1)
    assert other_failure.reason is not None
    assert len(caplog.records) == 1
    assert not ROTATE.applies(torch.zeros(3))
    x, cos, sin = rotation()
    torch.testing.assert_close(ROTATE(x, cos, sin, False), apply_rotary(x, cos, sin))


def test_waiting_for_kernels_is_said_once_in_the_log(monkeypatch, caplog) -> None:
    monkeypatch.setattr(kernels, "_wait", kernels._Wait())
    monkeypatch.setattr(kernels, "PATIENCE", 0.2)
    slow = Kernel(lambda start, stop, x: time.sleep(0.15 if start == stop else 0.0), lambda function: function)
    with caplog.at_level(logging.INFO, "embedlayer"):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
            assert slow.run(3, torch.zeros(3, dtype=dtype), block=1)
            assert len(caplog.records) == (dtype is not torch.float32)
    assert caplog.messages[0].startswith("Compiling or loading CPU kernels")


def test_a_kernel_applies_to_ordinary_tensors_on_the_cpu_only() -> None:
    x = torch.zeros(4)
    assert ROTATE.applies(x, x.bfloat16(), x.double(), x.int(), x.bool(), torch.nn.Parameter(x), None)
    assert not ROTATE.applies(x, x.half())
    assert not ROTATE.applies(x.to("meta"))
    assert not ROTATE.applies(x.to_sparse())
    assert not ROTATE.applies(x.as_subclass(type("Own", (torch.Tensor,), {})))
    with FakeTensorMode() as mode:
        assert not ROTATE.applies(x)
        assert not ROTATE.applies(mode.from_tensor(torch.zeros(3)))
    with kernels_disabled():
        assert not ROTATE.applies(x)
    assert not torch.func.vmap(lambda x: x + ROTATE.applies(x))(x).any()
    assert ROTATE.applies(x)


@pytest.mark.usefixtures("kernels")
def test_storage_of_tensors_that_a_kernel_read_can_still_be_resized() -> None:
    x, cos, sin = rotation()
    ROTATE(x, cos, sin, False)
    ROTATE(x[:, :, :0], cos[:0], sin[:0], False)
    x.untyped_storage().resize_(0)  # as FSDP frees memory
