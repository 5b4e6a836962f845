"""Sums of looked-up vectors: of K streams, or of bags of any size. No tensor of all vectors of a call is built.

`sum_vectors` is the definition, for vectors of any table. `summed_rows` computes it from stored rows by a kernel, with
one gradient of the rows; the K look-ups of the definition have K, each as large as the table if it is dense.
"""

from collections.abc import Callable
from functools import partial, reduce
from itertools import pairwise, repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embedlayer.core.block_sizes import TABLE_ROWS, block_size
from embedlayer.core.devices import device_kind
from embedlayer.core.errors import ShapeError
from embedlayer.core.index_checks import INTEGERS, check_integer_ids
from embedlayer.core.torch_state import (
    bag_gradient_of_rows,
    bag_gradient_of_weights,
    fusible,
    has_memory,
    is_transformed,
    plain_operators_only,
)
from embedlayer.kernels.cpu.sums import sum_rows
from embedlayer.kernels.gpu.launch import columns_of, imported_launches, launch
from embedlayer.kernels.index_check import IndexCheck, StreamCheck
from embedlayer.kernels.input import StoredRows
from embedlayer.kernels.kernel import EMPTY, LIKE
from embedlayer.kernels.operation import Operation
from embedlayer.row_sparse.gradient import (
    NUMBERS_IN_BLOCK,
    finished_gradient,
    segments_of_equal_ids,
    untouched_zeros,
)
from embedlayer.row_sparse.hooks import applied_rows
from embedlayer.row_sparse.storage import raw_weight


def check_bags(ids: Tensor, bounds: Tensor | None, weights: Tensor | None) -> None:
    """Check the arguments of `LookupTable.summed`: shapes, and on the CPU in eager mode the values of `bounds`."""
    check_integer_ids(ids)
    if weights is not None and weights.shape != ids.shape:
        raise ShapeError(f"Each ID has one weight: ids are {tuple(ids.shape)}, weights {tuple(weights.shape)}.")
    if bounds is None:
        if not ids.dim():
            raise ShapeError("The IDs of a sum are the last dimension, (..., K); found a single ID.")
        return
    if ids.dim() != 1 or bounds.dim() != 1 or not len(bounds) or bounds.dtype not in INTEGERS:
        found = f"{tuple(ids.shape)} and {tuple(bounds.shape)} of {bounds.dtype}"
        raise ShapeError(f"Bags are ids (M,) and integer bounds (N + 1,) or offsets (N,); found {found}.")
    if device_kind(bounds) != "cpu" or not fusible(bounds) or plain_operators_only():
        return
    if bounds[0] != 0 or bounds[-1] != len(ids) or not bool((bounds[1:] >= bounds[:-1]).all()):
        steps = pairwise([0, *bounds.tolist()])
        wrong = (k for k, (last, bound) in enumerate(steps) if not last <= bound <= (len(ids) if k else 0))
        place = next(wrong, len(bounds) - 1)
        raise ShapeError(f"Bounds of bags (offsets) ascend from 0 to {len(ids)}, not {bounds[place]} at place {place}.")


def sum_vectors(
    look_up: Callable[[Tensor], Tensor],
    ids: Tensor,
    bounds: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    block: int | None = None,
) -> Tensor:
    """Compute `LookupTable.summed` from a function that looks vectors up: the definition."""
    if bounds is None and not ids.shape[-1]:
        return look_up(ids).sum(-2)
    if bounds is None:
        in_graph = torch.compiler.is_compiling()  # a graph reads each vector where it is added
        vectors = look_up(ids).unbind(-2) if in_graph else (look_up(each.clone()) for each in ids.unbind(-1))
        factors = repeat(None) if weights is None else weights.unbind(-1)
        return reduce(torch.add, map(_weighted, vectors, factors))
    bags, block = bags_of(bounds, len(ids)), block or block_size(TABLE_ROWS, device_kind(ids))
    sums = torch.empty(0)
    for number in range(max(-(-len(ids) // block), 1)):  # a compiled graph serves each length of as many blocks
        part = slice(number * block, (number + 1) * block)
        term = _weighted(look_up(ids[part]), None if weights is None else weights[part])
        sums = term.new_zeros(len(bounds) - 1, term.shape[-1]) if number == 0 else sums
        add = Tensor.index_add if is_transformed(term) else Tensor.index_add_
        sums = add(sums, 0, bags[part], term)
    return sums


sum_launches = partial(imported_launches, "embedlayer.kernels.gpu.sums")

SUM_ROWS = Operation(
    "sums of looked-up rows, of K streams and of bags, and gradients of the rows",
    sum_vectors,
    cpu=[sum_rows],
    gpu=sum_launches,
    launches=["sum_streams"],
)


@SUM_ROWS.operator(mutates=("record",))
def sum_streams(
    x: Tensor,
    ids: Tensor,
    starts: Tensor | None,
    record: Tensor,
    rows: int,
    streams: int,
    shared: int,
    ignored: int,
    length: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the sums of `x[ids[..., k] + starts[k]]` over k, `(..., D)`, on CUDA.

    All tensors are contiguous, and indices int64.

    - `ids`: `(..., K)`. One outside of its stream adds nothing and is recorded.
    - `starts`: first row of each stream, `(K,)`; `None` where IDs are row numbers.
    - `record`: `IndexCheck.first_bad_index`: the flat place of the first bad ID, its value, and `length`.
    - `rows`: number of rows that IDs can name, over all streams.
    - `streams`: number of streams that are summed, the first ones.
    - `shared`: ID that is its own row in each stream; -1 for none.
    - `ignored`: row that gets no gradient; -1 for none.

    Returns:
        The sums, and what a backward pass needs: rows, int64, and their factors 0 or 1, both `(..., streams)`.
    """
    shape, width = ids.shape[:-1], x.shape[1]
    out, factors = (x.new_empty((*shape, last)) for last in (width, streams))
    kept_ids = ids.new_empty((*shape, streams))
    tensors = {"x": x, "ids": ids, "starts": starts, "record": record}
    tensors |= {"kept_ids": kept_ids, "factors": factors, "out": out}
    numbers = {"sums": shape.numel(), "columns": ids.shape[-1], "streams": streams, "rows": rows}
    numbers |= {"shared": shared, "ignored": ignored, "length": length}
    launch(sum_launches(), "sum_streams", **tensors, **numbers, **columns_of(x))
    return out, kept_ids, factors


def bags_of(bounds: Tensor, count: int) -> Tensor:
    """Return the number of the bag of each of `count` IDs, `(count,)`."""
    places = torch.arange(count, device=bounds.device, dtype=bounds.dtype)
    return torch.searchsorted(bounds, places, right=True).sub_(1).clamp_(0, max(0, len(bounds) - 2))


def _weighted(vectors: Tensor, weights: Tensor | None) -> Tensor:
    return vectors if weights is None else weights.unsqueeze(-1).to(vectors.dtype) * vectors


def is_summed_faster(stored: StoredRows, weights: Tensor | None) -> bool:
    """Return whether `summed_rows` takes these rows and is faster than `sum_vectors` of look-ups."""
    learns = weights is not None and weights.requires_grad and torch.is_grad_enabled()
    tensors = (raw_weight(stored.weight), stored.ids, *(() if weights is None else (weights,)))
    return fusible(stored.weight, weights) and all(map(has_memory, tensors)) and not (stored.sparse and learns)


def summed_rows(
    stored: StoredRows,
    bounds: Tensor | None,
    weights: Tensor | None,
    *,
    starts: Tensor | None = None,
    streams: int | None = None,
) -> Tensor:
    """Compute `sum_vectors` of the look-up `stored`, where `is_summed_faster`."""
    ids, weight, check, padding_idx, sparse = stored
    by_kernel = device_kind(ids) == "cuda" and SUM_ROWS.applies(weight, ids)
    if by_kernel and bounds is None and weights is None:
        shared = check.shared if isinstance(check, StreamCheck) else -1
        padding = -1 if padding_idx is None else padding_idx
        sizes = (check.size, streams or ids.shape[-1], shared, padding, ids.shape[-2] if ids.dim() > 1 else 1)
        of_streams: Tensor = _SumStreams.apply(weight, ids.long().contiguous(), starts, check, sizes)  # type: ignore[no-untyped-call]
        return of_streams
    if weights is not None:
        weights = weights.to(weight.dtype)
    ids, outside = check(ids)
    if outside is not None:
        ones = weight.new_ones(()) if weights is None else weights
        weights = torch.where(outside, 0, ones)
    sums: Tensor = _SumRows.apply(weight, weights, ids, bounds, padding_idx, sparse)  # type: ignore[no-untyped-call]
    return sums


class _SumRows(torch.autograd.Function):
    """Sum rows of a weight; see `summed_rows`."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        weights: Tensor | None,
        ids: Tensor,
        bounds: Tensor | None,
        padding_idx: int | None,
        sparse: bool,
    ) -> Tensor:
        needs_rows = ctx.needs_input_grad[1]
        ctx.save_for_backward(weight if needs_rows else None, weights, ids, bounds)
        ctx.shape, ctx.padding_idx, ctx.sparse = weight.shape, padding_idx, sparse
        terms, ends = _flat(ids, bounds)
        factors = None if weights is None else weights.detach().flatten().contiguous()
        with applied_rows(weight, terms) as rows:
            shape = (*(ids.shape[:-1] if bounds is None else (len(bounds) - 1,)), rows.shape[1])
            is_exact = weights is None and rows.dtype in (torch.float32, torch.float64)  # torch adds in the same order
            if device_kind(rows) == "cuda" or (bounds is not None and is_exact):
                return _bags(terms, rows, ends, factors).view(shape)
            out = rows.new_empty(shape)
            if _sum(rows, terms, ends, factors, None, out.view(-1, rows.shape[1]), rounds=bounds is None):
                return out
            return sum_vectors(partial(F.embedding, weight=rows), ids, bounds, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, weights, ids, bounds = ctx.saved_tensors
        terms, ends = _flat(ids, bounds)
        grad = grad.reshape(-1, ctx.shape[1])
        factors = None if weights is None else weights.flatten()
        by_weight = by_factor = None
        if torch.is_grad_enabled() or is_transformed(grad):  # second derivatives, batched gradients
            vectors = grad.index_select(0, bags_of(ends, len(terms)))
            if ctx.needs_input_grad[0]:
                padding_idx = -1 if ctx.padding_idx is None else ctx.padding_idx
                by_weight = torch.ops.aten.embedding_backward(
                    _weighted(vectors, factors), terms, ctx.shape[0], padding_idx, False, ctx.sparse
                )
            if ctx.needs_input_grad[1]:
                by_factor = (vectors * F.embedding(terms, weight)).sum(-1).view(ids.shape)
            return by_weight, by_factor, None, None, None, None
        if ctx.needs_input_grad[0]:
            by_weight = _gradient_of_rows(ctx, grad, terms, ends, factors)
        if ctx.needs_input_grad[1]:
            by_factor = bag_gradient_of_weights(grad, weight, terms, ends, bags_of(ends, len(terms)))
            by_factor = by_factor.view(ids.shape)
        return by_weight, by_factor, None, None, None, None


class _SumStreams(torch.autograd.Function):
    """Sum K rows of a weight on CUDA, which a kernel looks up and checks; see `summed_rows`."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        ids: Tensor,
        starts: Tensor | None,
        check: IndexCheck,
        sizes: tuple[int, ...],
    ) -> Tensor:
        sums: Tensor
        sums, *terms = sum_streams(weight.detach(), ids, starts, check.record_on(ids.device), *sizes)
        ctx.save_for_backward(*terms)
        ctx.num_rows = len(weight)
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, factors = ctx.saved_tensors
        width, count = grad.shape[-1], rows.shape[-1]
        if torch.is_grad_enabled() or is_transformed(grad):  # second derivatives, batched gradients
            vectors = (grad.unsqueeze(-2) * factors.unsqueeze(-1)).reshape(-1, width)
            by_row = torch.ops.aten.embedding_dense_backward(vectors, rows.flatten(), ctx.num_rows, -1, False)
        else:
            bags = torch.arange(rows.numel(), device=rows.device) // count
            by_row = bag_gradient_of_rows(
                grad.reshape(-1, width), rows.flatten(), bags, ctx.num_rows, factors.flatten()
            )
        return by_row, None, None, None, None


def _flat(ids: Tensor, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the IDs of all sums, `(M,)`, and the bounds of each, both int64 and contiguous."""
    if bounds is None:
        bounds = torch.arange(ids.shape[:-1].numel() + 1, device=ids.device) * ids.shape[-1]
    return ids.long().flatten().contiguous(), bounds.long().contiguous()


def _gradient_of_rows(ctx: Any, grad: Tensor, terms: Tensor, ends: Tensor, factors: Tensor | None) -> Tensor:
    """Return the gradient of the weight, dense or sparse, without the padding row; see `_SumRows`."""
    if device_kind(grad) == "cuda":
        bags = bags_of(ends, len(terms))
        if ctx.padding_idx is not None:
            factors = torch.where(terms == ctx.padding_idx, 0, grad.new_ones(()) if factors is None else factors)
        return bag_gradient_of_rows(grad, terms, bags, ctx.shape[0], factors)
    places, order, offsets = segments_of_equal_ids(terms, drop=ctx.padding_idx)
    bags = bags_of(ends, len(terms)).index_select(0, order)
    factors = None if factors is None else factors.index_select(0, order)
    if not ctx.sparse:
        dense = untouched_zeros(ctx.shape, grad.dtype)
        if not _sum(grad, bags, offsets, factors, places, dense):
            dense.index_copy_(0, places, _bags(bags, grad, offsets, factors))
        return dense
    values = untouched_zeros((len(places), ctx.shape[1]), grad.dtype)
    if not _sum(grad, bags, offsets, factors, None, values):
        values = _bags(bags, grad, offsets, factors)
    return finished_gradient(places, values, ctx.shape, ctx.padding_idx)


def _sum(
    rows: Tensor,
    ids: Tensor,
    bounds: Tensor,
    weights: Tensor | None,
    places: Tensor | None,
    out: Tensor,
    *,
    rounds: bool = False,
) -> bool:
    """Write the sums of rows to `out`, or to its rows `places`, by the kernel; return whether it could run."""
    if not SUM_ROWS.applies(rows, ids, bounds, weights, out):
        return False
    width, sums = rows.shape[1], len(bounds) - 1
    return sum_rows.run(
        *(sums, rows.contiguous(), ids, bounds),
        EMPTY[rows.dtype] if weights is None else weights.contiguous(),
        EMPTY[ids.dtype] if places is None else places,
        LIKE[rows.dtype if rounds or rows.dtype == torch.float64 else torch.float32],
        out,
        block=max(1, NUMBERS_IN_BLOCK * sums // max(1, len(ids) * width)),
    )


def _bags(ids: Tensor, rows: Tensor, bounds: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sums of rows by torch's operator, `(N, D)`, which rounds a sum once."""
    return F.embedding_bag(ids, rows, bounds, mode="sum", per_sample_weights=weights, include_last_offset=True)
