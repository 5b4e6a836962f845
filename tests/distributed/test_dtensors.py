"""DTensors in one process; `vocab/test_fsdp_edits.py` has them in two."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from embedlayer import SizeError, clip_grad_norm_
from embedlayer.core.collectives import SINGLE_PROCESS, Collectives, RowPartition
from embedlayer.distributed.dtensors import (
    as_dtensor,
    check_replaceable,
    dtensor_like,
    is_dtensor,
    local_columns,
    mesh_collectives,
    placements_of,
    replace_dtensor,
    row_collectives,
    rows_of_this_rank,
    shard_collectives,
    to_local,
)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_parameter_takes_other_rows_and_stays_the_same_object(mesh) -> None:
    values = torch.arange(8.0).view(4, 2)
    parameter = nn.Parameter(as_dtensor(values, mesh, 4))
    parameter.mark = "kept"
    for rows in (values + 1, values[:3], values):
        check_replaceable(parameter)
        replace_dtensor(parameter, dtensor_like(parameter, rows.clone(), len(rows)))
        assert isinstance(parameter, nn.Parameter)
        assert parameter.mark == "kept"
        assert torch.equal(parameter.full_tensor(), rows)
        assert torch.equal(rows_of_this_rank(parameter, mesh), rows)
        parameter.square().sum().backward()
        assert torch.equal(to_local(parameter.grad), 2 * rows)
        parameter.grad = None


def test_a_parameter_in_use_is_refused_and_stays_as_it_is(mesh) -> None:
    parameter = nn.Parameter(as_dtensor(torch.ones(4, 2), mesh, 4))
    loss = parameter.square().sum()
    with pytest.raises(SizeError, match="delete what refers to it"):
        check_replaceable(parameter)
    loss.backward()
    handle = parameter.register_post_accumulate_grad_hook(print)
    with pytest.raises(SizeError, match="gradient hooks"):
        check_replaceable(parameter)
    handle.remove()
    del loss
    check_replaceable(parameter)
    assert torch.equal(parameter.grad.full_tensor(), torch.full((4, 2), 2.0))


def test_ranks_over_which_rows_are_sharded(mesh) -> None:
    rows = torch.ones(4, 2)
    assert not is_dtensor(rows)
    assert placements_of(rows) is None
    assert row_collectives(rows) is SINGLE_PROCESS
    assert row_collectives(distribute_tensor(rows, mesh, [Replicate()])) is SINGLE_PROCESS
    assert isinstance(row_collectives(distribute_tensor(rows, mesh, [Shard(0)])), Collectives)
    columns = distribute_tensor(rows, mesh, [Shard(1)])
    assert row_collectives(columns) is SINGLE_PROCESS
    assert (local_columns(columns), local_columns(rows)) == (slice(0, 2), slice(None))
    assert shard_collectives(columns).partition(4) == RowPartition(4, levels=((1, 1),))
    assert mesh_collectives(distribute_tensor(rows, mesh, [Replicate()])).global_ranks == [0]
    for partial in (row_collectives, shard_collectives):
        with pytest.raises(SizeError, match=r"Partial.* before it is sharded"):
            partial(DTensor.from_local(rows, mesh, [Partial()]))


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
