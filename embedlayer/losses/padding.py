"""Rows of zeros behind those of tokens, with which the results of a token do not depend on the others.

See `batch_invariance`.
"""

import torch
from torch import Tensor

from embedlayer.losses.chunk_size import INVARIANT_MULTIPLES


def padded_states(rows: Tensor, multiple: int) -> Tensor:
    """Return a row of each token, `(N, ...)`, followed by rows of zeros up to a number of rows that is a multiple."""
    # Above a multiple of 1 all results are contiguous: products of rows with other strides are rounded differently.
    padding = -len(rows) % multiple
    if padding:
        return torch.cat([rows, rows.new_zeros(padding, *rows.shape[1:])])
    return rows if multiple == 1 else rows.contiguous()


def padded_tokens(hidden: Tensor) -> Tensor:
    """Return hidden states `(..., D)` as `(N, D)`, padded to a multiple of tokens with which results are invariant."""
    return padded_states(hidden.reshape(-1, hidden.shape[-1]), INVARIANT_MULTIPLES[-1])


def own_tokens(states: Tensor, hidden: Tensor) -> Tensor:
    """Return the results `(..., R)` of hidden states `(..., D)` from those of `padded_tokens`, `(N, R)`."""
    shape = hidden.shape[:-1]
    return states[: shape.numel()].view(*shape, states.shape[-1])
