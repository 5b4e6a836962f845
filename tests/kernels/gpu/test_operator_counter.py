"""The counter of operators: launches, bytes, FLOPs, waits and memory of calls on meta tensors."""

import torch
from memory import Memory
from torch import Tensor

from benchmarks.operator_counter import OperatorCounter
from embedlayer.core.devices import TAKEN_AS, device_kind

META = "meta"


def test_each_kernel_is_counted_with_its_bytes_and_flops() -> None:
    x, ids = torch.empty(64, 32, dtype=torch.bfloat16, device=META), torch.empty(10, dtype=torch.int64, device=META)
    sums = torch.zeros(64, 64, device=META)
    with OperatorCounter() as count:
        y = x.view(32, 64).T.exp()
        y.mul_(2.0)
        rows = x.index_select(0, ids)
        x.index_copy_(0, ids, rows)
        torch.addmm(sums, x, x.T, out_dtype=torch.float32)
        torch.addmm(sums, x, x.T, out_dtype=torch.float32, beta=0, out=sums)
        sums.addmm_(x.float(), x.T.float())
        x[:0].exp()
        x.expand(100, 64, 32).sum(0)
    size, row_bytes = x.nbytes, 10 * 32 * 2
    assert [(each.name, each.bytes, each.flops, each.dtype) for each in count.launches] == [
        ("exp", 2 * size, 0, x.dtype),
        ("mul_", 2 * size, 0, x.dtype),
        ("index_select", 2 * row_bytes + ids.nbytes, 0, ids.dtype),
        ("index_copy_", 2 * row_bytes + ids.nbytes, 0, x.dtype),
        ("addmm", 2 * size + 2 * sums.nbytes, 2 * 64 * 64 * 32, x.dtype),
        ("addmm", 2 * size + sums.nbytes, 2 * 64 * 64 * 32, x.dtype),
        ("_to_copy", 3 * size, 0, x.dtype),
        ("_to_copy", 3 * size, 0, x.dtype),
        ("addmm_", 4 * size + 2 * sums.nbytes, 2 * 64 * 64 * 32, torch.float32),
        ("sum", 2 * size, 0, x.dtype),
    ]
    assert (count.bytes, count.waits) == (sum(each.bytes for each in count.launches), [])


@torch.library.custom_op("embedlayer::counted_in_a_test", mutates_args=())
def counted_in_a_test(x: Tensor) -> Tensor:
    """A custom operator whose body depends on the kind of device, and whose backward pass is another one."""
    return torch.matmul(x, x.T).exp() if device_kind(x) == "cuda" else x.clone()


@counted_in_a_test.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(len(x), len(x))


counted_in_a_test.register_autograd(lambda ctx, grad: grad.sum(1, keepdim=True).expand(-1, 5))


def test_the_body_of_a_custom_operator_is_counted_as_on_cuda() -> None:
    x = torch.empty(3, 5, requires_grad=True, device=META)
    with OperatorCounter() as count:
        y = counted_in_a_test(x)
        assert y.requires_grad
        assert y.shape == (3, 3)
        y.sum().backward()
    assert [each.name for each in count.launches] == ["mm", "exp", "sum", "ones_like", "sum", "copy_"]
    assert x.grad is not None
    assert not TAKEN_AS


def test_each_wait_is_counted_and_its_read_answered() -> None:
    x, ids = torch.empty(6, 4, device=META), torch.empty(6, dtype=torch.int64, device=META)
    with OperatorCounter() as count:
        assert bool((ids < 7).all())
        assert not (ids < 0).any()
        assert x[ids > 0].shape == (*ids.unique(return_inverse=True)[1].shape, 4)
        assert ids.nonzero().shape == (6, 1)
        assert ids.tolist() == [-1] * 6
        assert x.cpu().sum() == 24
        torch.tensor([1, 2], device=META)
        x.new_tensor(3.0)
        torch.zeros(2).to("meta")
        x[1, 2] = torch.tensor(1.0)
    names = (
        "_local_scalar_dense _local_scalar_dense index _unique2 nonzero _to_copy _to_copy tensor new_tensor _to_copy"
    )
    assert [each.name for each in count.waits] == [*names.split(), "copy_"]
    with OperatorCounter() as count:
        torch.zeros(2).to("meta", non_blocking=True)
        x[ids > 0] = torch.tensor(1.0)
        x + torch.tensor(2.0)
    assert not count.waits


def test_memory_is_that_which_the_same_call_allocates_on_the_cpu() -> None:
    def call(x: Tensor) -> Tensor:
        y = x.softmax(1)
        return (y @ y.T).sum(0).add_(1.0)

    with Memory() as memory:
        on_cpu = call(torch.ones(50, 70))
    x = torch.ones(50, 70, device=META)
    with OperatorCounter() as count:
        on_meta = call(x)
    assert count.memory.peak == memory.peak - x.nbytes
    assert count.memory.now == on_cpu.nbytes == on_meta.nbytes
