"""The gradients of a model, kept to a length: dense and row-sparse together."""

from collections.abc import Iterable

import torch
from torch import Tensor

from embedlayer.tables.ledger import coalesced


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients by `min(1, max_norm / (norm + 1e-6))`, where `norm` is taken over all of them together.

    Args:
        parameters: Whose gradients; dense, row-sparse, or none.
        max_norm: The length that they shall not exceed.
        norm_type: 2 for the Euclidean norm; any other that `torch.linalg.vector_norm` knows.
        error_if_nonfinite: Raise if the norm is infinite or no number.
        foreach: As in torch.

    Returns:
        The norm before clipping.

    Raises:
        RuntimeError: `error_if_nonfinite`, and the norm is not finite.

    Reference: `torch.nn.utils.clip_grad_norm_`, which refuses sparse gradients. For dense ones this is the same.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    holders = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.layout is torch.sparse_coo:
            parameter.grad = coalesced(parameter.grad)
            values = parameter.grad._values()
            holder = values.detach()  # the same numbers; torch scales what it finds under `grad`
            holder.grad = values
            holders.append(holder)
        else:
            holders.append(parameter)
    return torch.nn.utils.clip_grad_norm_(holders, max_norm, norm_type, error_if_nonfinite, foreach)
