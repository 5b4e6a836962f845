"""Data-parallel replicas of a sharded table: which rank stores what, and one mean of their gradients."""

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch import nn

from embedlayer import SizeError
from embedlayer.distributed.data_parallel import average_over_replicas, data_parallel_mesh


def gradients() -> list[torch.Tensor]:
    rank = dist.get_rank()
    mesh = data_parallel_mesh("cpu", 4, 2)
    found = [torch.tensor([mesh["data_parallel"].get_local_rank(), mesh["vocab_parallel"].get_local_rank()])]
    parameter = nn.Parameter(torch.zeros(3, 2))
    average_over_replicas(parameter, mesh)
    assert parameter.grad is None
    dense = torch.full((3, 2), float(rank))
    ids = torch.tensor([[0, 1, 0], [2, 0, 2]][rank // 2])
    for grad in (dense, torch.sparse_coo_tensor(ids.unsqueeze(0), torch.ones(3, 2), (3, 2), check_invariants=False)):
        parameter.grad = grad
        average_over_replicas(parameter, mesh)
        found.append(parameter.grad.to_dense())
    with pytest.raises(SizeError, match="4 processes cannot hold replicas of a table sharded over 3"):
        data_parallel_mesh("cpu", 4, 3)
    return found


def test_ranks_with_the_same_rows_get_the_mean_of_their_gradients() -> None:
    for rank, (place, dense, sparse) in enumerate(on_ranks(4, gradients)):
        assert place.tolist() == [rank // 2, rank % 2]
        assert dense.tolist() == [[rank % 2 + 1.0] * 2] * 3
        assert sparse.tolist() == [[1.5] * 2, [0.5] * 2, [1.0] * 2]
