"""Hash rows, so that equal rows are found without comparing all pairs."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.analysis.row_reader import RowReader


@torch.no_grad()
def row_hashes(rows: RowReader) -> Int[Tensor, " V"]:
    """Return a random linear 64-bit hash of the bits of each row in float32 or float64; -0.0 counts as 0.0.

    The hash is the same in every call, so rows of two tables of the same width and dtype can be compared.
    """
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(1 << 62), 1 << 62, (2 * rows.embed_dim,), generator=generator) * 2 + 1
    hashes = [torch.empty(0, dtype=torch.int64)]
    for _, chunk in rows.chunks():
        wide = chunk.to("cpu", torch.promote_types(chunk.dtype, torch.float32)) + 0.0
        bits = wide.contiguous().view(torch.int32).long()
        hashes.append((bits * weights[: bits.shape[1]]).sum(1))
    return torch.cat(hashes)


def equal_rows(rows: RowReader, norms: Float[Tensor, " V"]) -> tuple[tuple[int, ...], ...]:
    """Return groups of IDs whose rows are equal (their hashes are), ordered by the first ID.

    Only rows with a positive norm are compared.
    """
    ids = torch.nonzero(norms > 0)[:, 0]
    if not len(ids):
        return ()
    _, group, sizes = row_hashes(rows)[ids].unique(return_inverse=True, return_counts=True)
    repeated = sizes[group] > 1
    groups: dict[int, list[int]] = {}
    for row, number in zip(ids[repeated].tolist(), group[repeated].tolist(), strict=True):
        groups.setdefault(number, []).append(row)
    return tuple(map(tuple, groups.values()))
