"""Find rows that are equal, or nearly equal as those that a resize adds at the mean of the other rows.

Rows are hashed, so that not all pairs are compared.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.analysis.row_reader import RowReader

NEAR = 0.01  # rows are nearly equal if the norm of their difference is at most this share of the larger norm

CELL, PROJECTIONS, TRIES = 0.2, 8, 4
"""A row is projected on `PROJECTIONS` random directions and each result is rounded to a multiple of `CELL`."""


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
    """Return groups of IDs whose rows are equal (their hashes are), ordered by the first ID."""
    ids = torch.nonzero(norms > 0)[:, 0]
    if not len(ids):
        return ()
    _, group, sizes = row_hashes(rows)[ids].unique(return_inverse=True, return_counts=True)
    repeated = sizes[group] > 1
    groups: dict[int, list[int]] = {}
    for row, number in zip(ids[repeated].tolist(), group[repeated].tolist(), strict=True):
        groups.setdefault(number, []).append(row)
    return tuple(map(tuple, groups.values()))


@torch.no_grad()
def near_duplicates(rows: RowReader, norms: Float[Tensor, " V"]) -> tuple[tuple[int, ...], ...]:
    """Return groups of IDs whose rows are nearly equal (see `NEAR`) but not all equal, ordered by their first ID.

    Locality-sensitive hashing finds the candidates: rows of length 1 with equal rounded projections. Their distances
    are then measured. Only rows with a positive norm are compared.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.nonzero(norms > 0)[:, 0]
    parent: dict[int, int] = {}

    def root(row: int) -> int:
        while parent.setdefault(row, row) != row:
            parent[row] = row = parent[parent[row]]
        return row

    unequal: set[int] = set()
    # rows at the largest distance have no key in common with a probability of about 1 %, closer ones more rarely
    for keys in _keys(rows, norms, generator).T:
        # compare each row with the first one, in a random order, that has the same key
        order = ids[torch.randperm(len(ids), generator=generator)]
        _, group, counts = keys[order].unique(return_inverse=True, return_counts=True)
        first = torch.full((len(counts),), len(order)).scatter_reduce(0, group, torch.arange(len(order)), "amin")
        pairs = torch.stack([order[first[group]], order], 1)
        for one, other in (each.T for each in pairs[pairs[:, 0] != order].split(8192)):
            distances = torch.linalg.vector_norm(rows.take(one).double() - rows.take(other).double(), dim=1)
            near = distances <= NEAR * torch.maximum(norms[one], norms[other])
            for left, right, distance in zip(*(each[near].tolist() for each in (one, other, distances)), strict=True):
                low, high = sorted((root(left), root(right)))
                parent[high] = low
                if distance:
                    unequal |= {left, right}
    groups: dict[int, list[int]] = {}
    for row in sorted(parent):
        groups.setdefault(root(row), []).append(row)
    return tuple(tuple(group) for group in groups.values() if not unequal.isdisjoint(group))


def _keys(rows: RowReader, norms: Float[Tensor, " V"], generator: torch.Generator) -> Int[Tensor, "V T"]:
    """Return `TRIES` keys of each row: hashes of its rounded projections."""
    planes = torch.randn(rows.embed_dim, TRIES * PROJECTIONS, generator=generator)
    offsets = torch.rand(TRIES * PROJECTIONS, generator=generator)
    weights = torch.randint(-(1 << 62), 1 << 62, (TRIES, PROJECTIONS), generator=generator)
    parts = [torch.empty(0, TRIES, dtype=torch.int64)]
    for start, chunk in rows.chunks():
        lengths = norms[start : start + len(chunk), None].clamp_min(1e-30)
        units = (chunk.to("cpu", torch.float64) / lengths).float()
        cells = (units @ planes / CELL + offsets).nan_to_num().floor().long().unflatten(1, (TRIES, PROJECTIONS))
        parts.append((cells * weights).sum(-1))
    return torch.cat(parts)
