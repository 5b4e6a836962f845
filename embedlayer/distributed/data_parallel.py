"""Data parallelism with sharded tables: `DistributedDataParallel`, and the mean of gradients over replicas of a shard.

With N processes and a table sharded over S of them (vocabulary parallelism) there are N / S data-parallel replicas of
each shard. The network traffic of the loss grows with S, the memory of a process shrinks with S. Once per step the
gradients of the rows are averaged over the replicas.
"""

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from embedlayer.collectives import ProcessGroup
from embedlayer.distributed.sharded import ROW_TENSORS, ShardedTable
from embedlayer.errors import SizeError
from embedlayer.tables.sparse_gradient import coalesced

DATA_PARALLEL, VOCAB_PARALLEL = "data_parallel", "vocab_parallel"


def data_parallel_mesh(device: str, ranks: int, vocab_parallel_size: int | None) -> DeviceMesh:
    """Create the device mesh `(data_parallel, vocab_parallel)` over all processes.

    With S = `vocab_parallel_size`, rank r stores shard `r % S` of replica `r // S`.

    Args:
        device: `"cpu"` or `"cuda"`.
        ranks: Number of processes, N.
        vocab_parallel_size: Number of processes that share one table, S; `None` for all.

    Raises:
        SizeError: N is not a multiple of S.
    """
    size = ranks if vocab_parallel_size is None else vocab_parallel_size
    if size < 1 or ranks % size:
        raise SizeError(
            f"{ranks} processes cannot hold replicas of a table sharded over {size}: {ranks} must be a multiple of it."
        )
    return init_device_mesh(device, (ranks // size, size), mesh_dim_names=(DATA_PARALLEL, VOCAB_PARALLEL))


def average_over_replicas(parameter: nn.Parameter, mesh: DeviceMesh) -> None:
    """Replace the gradient of a shard's rows by its mean over the replicas of the shard.

    Of a row-sparse gradient only the IDs and rows are sent. Without a gradient, or with one replica, nothing happens.
    """
    replicas, grad = ProcessGroup(mesh.get_group(DATA_PARALLEL), mesh.device_type), parameter.grad
    if replicas.size == 1 or grad is None:
        return
    if grad.layout is not torch.sparse_coo:
        replicas.all_reduce(grad)
        grad /= replicas.size
        return
    own = coalesced(grad)
    ids, rows = replicas.all_gather(own._indices()[0]), replicas.all_gather(own._values())
    joined = torch.sparse_coo_tensor(ids.unsqueeze(0), rows / replicas.size, grad.shape, check_invariants=False)
    parameter.grad = coalesced(joined)


def distributed_data_parallel(
    model: nn.Module, *, forward_sync_buffers: bool = True, **options: Any
) -> DistributedDataParallel:
    """Wrap `model` in `DistributedDataParallel`, which leaves the rows and buffers of its sharded tables alone.

    Without this, `DistributedDataParallel` would overwrite the rows of every rank by those of rank 0. The gradients of
    sharded rows are averaged by `ShardedTable`, those of all other parameters by `DistributedDataParallel`.

    Args:
        model: The module on its device, on every rank.
        forward_sync_buffers: Broadcast the other buffers of the model from rank 0 in each forward pass.
        **options: Further arguments of `DistributedDataParallel`.

    Example:
        >>> parallel = distributed_data_parallel(model, gradient_as_bucket_view=True)  # doctest: +SKIP
    """
    known = inspect.signature(DistributedDataParallel).parameters
    options["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = forward_sync_buffers
    tables = {module: dict(module.named_children()) for module in model.modules() if isinstance(module, ShardedTable)}
    try:
        for table, children in tables.items():  # hidden while DistributedDataParallel collects parameters and buffers
            rows = ROW_TENSORS[type(table.local)]
            replicated = [parameter for name, parameter in table.local.named_parameters() if name not in rows]
            for name in children:
                setattr(table, name, nn.ParameterList(replicated if name == "local" else ()))
        return DistributedDataParallel(model, **options)
    finally:
        for table, children in tables.items():
            for name, child in children.items():
                setattr(table, name, child)
