"""Data parallelism: DDP with sharded tables, the mean of gradients over replicas of a shard, and FSDP2's methods.

N processes may shard a table over S of them (vocabulary parallelism). Then there are N / S data-parallel replicas of
each shard. A larger S means more network traffic for the loss, and less memory per process. Once per step the
gradients of the rows are averaged over the replicas.
"""

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from embedlayer.core.collectives import Collectives
from embedlayer.core.errors import SizeError
from embedlayer.core.partitioned import local_shard
from embedlayer.distributed.sharded import ROW_TENSORS, ShardedTable
from embedlayer.integrations.fsdp import gather_for
from embedlayer.row_sparse.gradient import coalesced, row_gradient
from embedlayer.saving import Pretrained

DATA_PARALLEL, VOCAB_PARALLEL = "data_parallel", "vocab_parallel"


def data_parallel_mesh(device: str, ranks: int, vocab_parallel_size: int | None) -> DeviceMesh:
    """Create the device mesh with the dimensions `data_parallel` and `vocab_parallel`, over all processes."""
    size = ranks if vocab_parallel_size is None else vocab_parallel_size
    if size < 1 or ranks % size:
        raise SizeError(
            f"{ranks} processes cannot hold replicas of a table sharded over {size}: pass a divisor of {ranks}."
        )
    # rank r stores shard `r % size` of replica `r // size`
    return init_device_mesh(device, (ranks // size, size), mesh_dim_names=(DATA_PARALLEL, VOCAB_PARALLEL))


def average_over_replicas(parameter: nn.Parameter, mesh: DeviceMesh) -> None:
    """Replace the gradient of this rank's rows by its mean over all replicas of the same rows."""
    replicas = Collectives(mesh.get_group(DATA_PARALLEL), mesh.device_type)
    if replicas.size > 1 and parameter.grad is not None:
        sum_gradient(parameter, replicas)
        parameter.grad /= replicas.size


def sum_gradient(parameter: nn.Parameter, ranks: Collectives) -> None:
    """Replace the gradient of a parameter by its sum over the ranks with the same rows; all of them must call it."""
    grad = cast(Tensor, parameter.grad)
    if grad.layout is not torch.sparse_coo:
        ranks.all_reduce(local_shard(grad))
        return
    own = coalesced(grad)
    counts = ranks.exchange_counts([own._nnz()] * ranks.size)
    ids, rows = (ranks.all_gather(each, counts) for each in (own._indices()[0], own._values()))
    joined = torch.sparse_coo_tensor(ids.unsqueeze(0), rows, grad.shape, check_invariants=False)
    parameter.grad = row_gradient(parameter, joined)


def distributed_data_parallel(
    model: nn.Module, *, forward_sync_buffers: bool = True, **options: Any
) -> DistributedDataParallel:
    """Wrap `model` in `DistributedDataParallel`, which then leaves the rows and buffers of sharded tables alone.

    Wrapped directly, a model with sharded tables would get the rows of rank 0 on every rank. The gradients of sharded
    rows are averaged by `ShardedTable`, those of all other parameters by `DistributedDataParallel`.

    Args:
        model: The module, on its device. Every rank must pass it.
        forward_sync_buffers: Whether each forward pass broadcasts the other buffers of the model from rank 0.
        **options: Further arguments of `DistributedDataParallel`.

    Example:
        >>> parallel = distributed_data_parallel(model, gradient_as_bucket_view=True)  # doctest: +SKIP
    """
    known = inspect.signature(DistributedDataParallel).parameters
    options["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = forward_sync_buffers
    tables = {module: dict(module.named_children()) for module in model.modules() if isinstance(module, ShardedTable)}
    try:
        for table, children in tables.items():  # hidden while DistributedDataParallel collects parameters and buffers
            table.refuses_ddp = False
            rows = ROW_TENSORS[type(table.local)]
            replicated = [parameter for name, parameter in table.local.named_parameters() if name not in rows]
            for name in children:
                setattr(table, name, nn.ParameterList(replicated if name == "local" else ()))
        return DistributedDataParallel(model, **options)
    finally:
        for table, children in tables.items():
            del table.refuses_ddp
            for name, child in children.items():
                setattr(table, name, child)


METHODS = (
    *("look_up", "rows", "raw_logits", "logits", "uncomputed_logits"),  # of tables and heads
    *("loss", "token_log_probs", "token_statistics", "multi_token_loss"),  # of tables and heads
    *("vectors", "bias"),  # of positions
    *("input", "hidden", "transform"),  # of layers, decoders and heads with a transform before the product
)
"""Methods that use parameters and that programs call directly."""


def register_fsdp_methods(model: nn.Module) -> nn.Module:
    """Make FSDP2 gather parameters for `loss`, `logits`, `rows` and the other `METHODS`, as it does for `forward`.

    These methods call each other. So a module keeps its gathered parameters from its first call until its backward pass
    (`set_reshard_after_forward(False)`). After a call without a backward pass, `module.reshard()` frees them.

    Args:
        model: The model, after `fully_shard` was called on it, on some of its submodules, or on both.

    Returns:
        The same model, changed in place.

    Raises:
        VersionError: With torch 2.9 to 2.11 one group has several modules, as after `fully_shard([norm, head])`: its
            backward pass would crash the process.

    Reference: `torch.distributed.fsdp.register_fsdp_forward_method`.
    """
    for module in model.modules():
        if isinstance(module, Pretrained) or hasattr(module, "transform"):
            # A head's `bias` is a parameter; a registered method is an attribute of the instance.
            methods = [name for name in METHODS if inspect.ismethod(getattr(module, name, None))]
            gather_for(module, [name for name in methods if name not in vars(module)])
    return model
