"""Nearest rows of a table by cosine similarity: exact top-k, and an approximate k-nearest-neighbour graph.

`cos(a, b) = a . b / (|a| |b|)`. A zero row has cosine 0 with every row. A row with NaN or infinity is never a
neighbour. Rows are read in chunks, so a factorised or quantised table is searched without being written out.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.analysis.row_reader import RowReader
from embedlayer.losses.largest import top_k
from embedlayer.tables.conversions import TableLike

CHUNK_NUMBERS = 1 << 19  # numbers of the table read at a time, 2 MB in float32: small enough to stay in a core's cache
SCORES_AT_ONCE = 1 << 22  # cosines held at a time
EXACT_TIES = 4  # for at most so many queries a cosine is a sum per row: equal rows get equal cosines
CELLS_SEARCHED = 24  # cells in which the neighbours of a row are searched, at least

ROWS_TIMES_CELLS = 1 << 21
"""A table of V rows is searched in `ROWS_TIMES_CELLS / V` cells if these are more: a small table can afford them."""

CLUSTERING_ROUNDS = 4
CLUSTERING_SHARE = 0.25  # share of the time of a neighbour graph that the clustering takes, about

RECALL_SAMPLE = 256


class Nearest(NamedTuple):
    """The K nearest rows of each of Q queries, nearest first.

    Attributes:
        ids: Row IDs `(Q, K)`; -1 where a query has fewer neighbours.
        cosines: Their cosines `(Q, K)` in float32; `-inf` where a query has fewer neighbours.
    """

    ids: Int[Tensor, "Q K"]
    cosines: Float[Tensor, "Q K"]


class NeighborGraph(NamedTuple):
    """For each of V rows about K of its nearest rows by cosine.

    Attributes:
        ids: Row IDs `(V, K)`, nearest first.
        cosines: Cosines of these rows with their row, `(V, K)`; -1, with ID 0, where fewer neighbours were found.
        recall: Share of the true K nearest rows that the graph contains, measured on a sample of rows; 1 if exact.
    """

    ids: Int[Tensor, "V K"]
    cosines: Float[Tensor, "V K"]
    recall: float


@torch.no_grad()
def cosines_with(rows: Float[Tensor, "rows D"], queries: Float[Tensor, "Q D"]) -> Float[Tensor, "Q rows"]:
    """Return the cosine of each query with each row, in float32 or wider, between -1 and 1.

    It is 0 if one of them is zero, and NaN if one holds NaN or infinity.

    For at most `EXACT_TIES` queries each cosine is a sum of its own, so equal rows get equal cosines. For more queries
    a matrix product is used, which may round equal rows differently.
    """
    dtype = torch.promote_types(rows.dtype, torch.float32)
    rows = rows.to(dtype)
    wide = queries.to(rows.device, torch.float64)
    lengths, norms = torch.linalg.vector_norm(wide, dim=1, keepdim=True), torch.linalg.vector_norm(rows, dim=1)
    units = (wide / lengths.where(lengths > 0, 1.0)).to(dtype)
    if len(units) <= EXACT_TIES:
        products = torch.stack([(rows * unit).sum(1) for unit in units]) if len(units) else rows.new_empty(0, len(rows))
    else:
        products = units @ rows.T
    cosines: Tensor = products.div_(norms.where(norms > 0, 1.0))
    return cosines.clamp_(-1.0, 1.0)


def table_cosines(
    rows: RowReader, queries: Float[Tensor, "Q D"], start: int = 0, stop: int | None = None
) -> Float[Tensor, "Q N"]:
    """Return the cosine of each query with rows `start` to `stop - 1` of a table, by default all, on the CPU."""
    step = max(1, CHUNK_NUMBERS // max(1, rows.embed_dim))
    return torch.cat([cosines_with(chunk, queries).cpu() for _, chunk in rows.chunks(step, start, stop)], dim=1)


@torch.no_grad()
def nearest_rows(
    table: TableLike,
    queries: Float[Tensor, "Q D"] | Int[Tensor, " Q"],
    count: int,
    *,
    candidates: Bool[Tensor, " V"] | None = None,
    exclude: Int[Tensor, "Q X"] | None = None,
) -> Nearest:
    """Return the rows with the largest cosine to each query: exact, nearest first, equal cosines by ID.

    Blocks of queries meet chunks of rows, so nothing of size `Q x V` is allocated.

    Args:
        table: A `LookupTable`, an `nn.Embedding`, or a tensor or array `(V, D)`.
        queries: Vectors `(Q, D)`; or IDs `(Q,)`: their rows are the queries, and no row is its own neighbour.
        count: Neighbours per query, K; fewer if the table has fewer candidates.
        candidates: Which rows may be neighbours; `None` for all.
        exclude: IDs that are not neighbours of their query; an ID outside the table excludes nothing.

    Returns:
        IDs and cosines `(Q, K)`, on the CPU. For a table on an accelerator the call waits for each chunk of rows.

    Raises:
        IndexError: An ID of `queries` is outside the table.

    Example:
        >>> nearest_rows(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), torch.tensor([0]), 2).ids
        tensor([[1, 2]])
    """
    rows = RowReader(table)
    by_id = not queries.is_floating_point()
    allowed = torch.ones(len(rows), dtype=torch.bool) if candidates is None else candidates.cpu()
    count = max(0, min(count, int(allowed.sum()) - (1 if by_id and candidates is None else 0)))
    if not count or not len(queries):
        empty = torch.empty(len(queries), count)
        return Nearest(empty.long(), empty)
    if by_id:
        own = queries.cpu()[:, None]
        exclude = own if exclude is None else torch.cat([own, exclude], dim=1)
    step = max(1, CHUNK_NUMBERS // max(1, rows.embed_dim))
    best = torch.full((len(queries), count), -math.inf)
    ids = torch.full((len(queries), count), -1)
    for block in torch.arange(len(queries)).split(max(1, SCORES_AT_ONCE // (step + count))):
        vectors = rows.take(queries[block]) if by_id else queries[block]
        for start, chunk in rows.chunks(step):
            cosines = cosines_with(chunk, vectors).cpu().float().nan_to_num_(nan=-math.inf)
            cosines[:, ~allowed[start : start + len(chunk)]] = -math.inf
            if exclude is not None:
                left_out = exclude[block] - start
                query, which = torch.nonzero((left_out >= 0) & (left_out < len(chunk)), as_tuple=True)
                cosines[query, left_out[query, which]] = -math.inf
            is_nearer = cosines.amax(1) > best[block, -1]  # of equal cosines the earlier ID is kept
            nearer, cosines = block[is_nearer], cosines[is_nearer]
            here = torch.arange(start, start + len(chunk)).expand(len(nearer), -1)
            scores, found = torch.cat([best[nearer], cosines], 1), torch.cat([ids[nearer], here], 1)
            best[nearer], columns = top_k(scores, count)
            ids[nearer] = found.gather(1, columns)
    return Nearest(ids.where(best > -math.inf, -1), best)


@torch.no_grad()
def neighbor_graph(
    rows: Float[Tensor, "V D"],
    count: int,
    generator: torch.Generator,
    *,
    on_progress: Callable[[float], None] = lambda share: None,
) -> NeighborGraph:
    """Return an approximate graph of the `count` nearest rows of each row, for the layout of large tables.

    k-means cuts the table into about sqrt(V) cells. The neighbours of a row are searched in the `CELLS_SEARCHED` cells
    whose centres are nearest to the centre of its own cell, or in more cells of a small table. The recall is measured
    on `RECALL_SAMPLE` rows against `nearest_rows`.

    Args:
        rows: V rows of width D.
        count: Neighbours per row, K, below V.
        generator: Draws the first centres and the sample.
        on_progress: Function that is called with the share of the work that is done, from 0 to 1.
    """
    units = F.normalize(rows.float().nan_to_num(posinf=0.0, neginf=0.0), dim=1)
    ids = torch.zeros(len(units), count, dtype=torch.int64)
    cosines = torch.full((len(units), count), -1.0)
    done = 0
    for members, nearby in _blocks(units, generator, on_progress):
        products = units[members] @ units[nearby].T
        products[members[:, None] == nearby] = -2.0
        best = products.topk(min(count, len(nearby)))
        ids[members, : best.indices.shape[1]] = nearby[best.indices]
        cosines[members, : best.indices.shape[1]] = best.values
        done += len(members)
        on_progress(CLUSTERING_SHARE + (1 - CLUSTERING_SHARE) * done / len(units))
    sample = torch.randperm(len(units), generator=generator)[:RECALL_SAMPLE]
    exact = nearest_rows(units, sample, count)
    farthest = exact.cosines[:, -1:] - 1e-6  # rows as near as the last true neighbour count as found
    return NeighborGraph(ids, cosines, float((cosines[sample] >= farthest).float().mean()))


def _blocks(
    units: Float[Tensor, "V D"], generator: torch.Generator, on_progress: Callable[[float], None]
) -> list[tuple[Int[Tensor, " M"], Int[Tensor, " N"]]]:
    """Cluster unit rows by k-means, and return blocks of rows together with the rows to search for their neighbours.

    A block is `(members, nearby)`: `members` are the rows of one cell (cluster), and each row is in one block; `nearby`
    are all rows of the cells nearest to it.
    """
    centres = units[torch.randperm(len(units), generator=generator)[: max(1, int(len(units) ** 0.5))]]
    step = max(1, SCORES_AT_ONCE // len(centres))
    chunks = units.split(step)
    for done in range(CLUSTERING_ROUNDS):
        nearest = []
        for number, chunk in enumerate(chunks):
            nearest.append((chunk @ centres.T).argmax(1))
            on_progress(CLUSTERING_SHARE * (done + number / len(chunks)) / CLUSTERING_ROUNDS)
        cell = torch.cat(nearest)
        centres = F.normalize(torch.zeros_like(centres).index_add_(0, cell, units), dim=1)
    order = cell.argsort(stable=True)
    cells = order.split(torch.bincount(cell, minlength=len(centres)).tolist())
    searched = max(CELLS_SEARCHED, ROWS_TIMES_CELLS // len(units))
    near = (centres @ centres.T).topk(min(searched, len(centres))).indices
    pairs = []
    for own, members in zip(near.tolist(), cells, strict=True):
        nearby = torch.cat([cells[other] for other in own])
        blocks = members.split(max(1, SCORES_AT_ONCE // max(1, len(nearby))))
        pairs += [(block, nearby) for block in blocks if len(block)]
    return pairs
