"""Copies of a divided table: the ranks that hold the same rows bring their gradients to one mean.

With N processes and a table divided among S of them there are N / S copies. What crosses the network for the loss grows
with S, what each process holds with 1 / S; between copies the gradients of their rows cross once a step.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from embedlayer.distributed.exchange import gather_rows
from embedlayer.errors import SizeError
from embedlayer.tables.sparse_gradient import coalesced

COPIES, ROWS = "copies", "rows"


def mesh_of_copies(device: str, ranks: int, table_ranks: int | None) -> DeviceMesh:
    """All processes, `(copies, rows)`: rank r holds part `r % table_ranks` of copy `r // table_ranks`.

    Args:
        device: `"cpu"` or `"cuda"`.
        ranks: How many they are.
        table_ranks: Among how many each copy is divided; all, if `None`.

    Raises:
        SizeError: That many do not go into `ranks` without a rest.
    """
    each = ranks if table_ranks is None else table_ranks
    if each < 1 or ranks % each:
        raise SizeError(
            f"{ranks} processes cannot hold copies of a table divided among {each}: {ranks} must be a multiple."
        )
    return init_device_mesh(device, (ranks // each, each), mesh_dim_names=(COPIES, ROWS))


def mean_over_copies(parameter: nn.Parameter, mesh: DeviceMesh) -> None:
    """Let the gradient of rows be the mean over the copies; of a row-sparse one, IDs and rows cross the network."""
    group, size = mesh.get_group(COPIES), mesh[COPIES].size()
    grad = parameter.grad
    if size == 1 or grad is None:
        return
    if grad.layout is not torch.sparse_coo:
        dist.all_reduce(grad, group=group)
        grad /= size
        return
    own = coalesced(grad)
    ids, rows = (gather_rows(part, group)[0] for part in (own._indices()[0], own._values()))
    joined = torch.sparse_coo_tensor(ids.unsqueeze(0), rows / size, grad.shape, check_invariants=False)
    parameter.grad = coalesced(joined)
