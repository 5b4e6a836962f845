"""DTensors in one process; `vocab/test_fsdp_edits.py` has them in two."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from embedlayer import SizeError, TokenEmbedding, clip_grad_norm_
from embedlayer.vocab import edit_vocabulary


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_parameter_takes_other_rows_and_stays_the_same_object(mesh) -> None:
    table = fully_shard(TokenEmbedding(4, 2), mesh=mesh)
    parameter, before = table.weight, table.weight.full_tensor()
    parameter.mark = "kept"
    edit_vocabulary(table, remove=[3])
    assert torch.equal(parameter.full_tensor(), before[:3])
    edit_vocabulary(table, add=2)
    assert table.weight is parameter
    assert isinstance(parameter, nn.Parameter)
    assert parameter.mark == "kept"
    rows = parameter.full_tensor().detach()
    assert torch.equal(rows[:3], before[:3])
    table(torch.tensor([0, 4])).square().sum().backward()
    torch.testing.assert_close(parameter.grad.full_tensor(), 2 * rows * torch.tensor([[1.0], [0], [0], [0], [1]]))


def test_a_parameter_in_use_is_refused_and_stays_as_it_is(mesh) -> None:
    table = nn.Module()
    table.weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    plain = TokenEmbedding(4, 2)
    plain.register_parameter("weight", table.weight)
    loss = plain.weight.square().sum()
    with pytest.raises(SizeError, match="delete what refers to it"):
        edit_vocabulary(plain, add=1)
    loss.backward()
    handle = plain.weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(SizeError, match="gradient hooks"):
        edit_vocabulary(plain, add=1)
    handle.remove()
    assert torch.equal(plain.weight.full_tensor(), torch.ones(4, 2))
    assert torch.equal(plain.weight.grad.full_tensor(), torch.full((4, 2), 2.0))


def test_rows_that_are_parts_of_a_sum_are_refused(mesh) -> None:
    table = TokenEmbedding(4, 2)
    table.register_parameter("weight", nn.Parameter(DTensor.from_local(torch.ones(4, 2), mesh, [Partial()])))
    with pytest.raises(SizeError, match=r"Partial.* before it is sharded"):
        edit_vocabulary(table, add=1)


def test_a_gradient_that_is_a_dtensor_is_clipped_with_a_plain_one(mesh) -> None:
    whole, plain = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5))
    sharded = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)]))
    whole.grad, plain.grad = torch.randn(4, 3), torch.randn(5)
    sharded.grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
    other = nn.Parameter(plain.detach().clone())
    other.grad = plain.grad.clone()
    norm = clip_grad_norm_([sharded, plain], 0.1)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_([whole, other], 0.1))
    torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)
    torch.testing.assert_close(plain.grad, other.grad)
