"""What torch calls on the weight of a row-sparse table: hooks of its gradient, and functions that read or write it.

`watch` attaches `PendingUpdates` to a weight, which becomes a `RowSparseParameter`: torch functions apply the updates
that they would miss, and gradients arrive with each row once.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedlayer.core.errors import SizeError
from embedlayer.core.forks import HeldLocks
from embedlayer.core.torch_state import is_fake_mode_active, is_function_mode_active, outside_of_graphs
from embedlayer.row_sparse.gradient import (
    SUM_SEGMENTS,
    RowSparseGradient,
    Segments,
    SortedRows,
    coalesced,
    finished_gradient,
    require_row_sparse,
    rows_and_values,
    segments_of_equal_ids,
    sum_segments,
    summed_gradient,
    sums_on_device,
    with_torch_functions,
)
from embedlayer.row_sparse.pending_updates import GATHER, PendingUpdates, pending_updates_of, pending_updates_with
from embedlayer.row_sparse.storage import raw_weight

SMALL_NUMEL = 1 << 17  # numbers of a look-up below which torch's operator is faster than a kernel


class _RawReads(threading.local):
    """Handles of the tables whose weights this thread reads without their pending updates."""

    handles: frozenset[int] = frozenset()


_raw_reads = _RawReads()


def watch(weight: nn.Parameter, pending: PendingUpdates) -> None:
    """Attach the pending updates of a table to its weight, which becomes a `RowSparseParameter` in place.

    From then on its gradients are coalesced, and reading it applies pending updates. A DTensor keeps its class, so
    reading it applies none. Without effect if they are attached to `weight` already.
    """
    if pending.weight_ref is not None and pending.weight_ref() is weight and pending_updates_of(weight) is pending:
        return
    pending.weight_ref = ref(weight)
    requires_grad = weight.requires_grad
    arriving: list[tuple[Tensor, int | None]] = []  # `summed`: autograd stores a new tensor over the same memory

    def coalesce(grad: Tensor) -> Tensor:
        """Gradient hook: return the gradient with equal rows summed and without the padding row, in new memory.

        A gradient of `finished_gradient` is returned as it is.

        Raises:
            ShapeError: The gradient is dense.
        """
        if isinstance(grad, RowSparseGradient) and grad.finished:
            result: Tensor = grad
        else:
            result = coalesced(require_row_sparse(grad), drop=pending.padding_idx)
            if rows_and_values(result)[1].data_ptr() == rows_and_values(grad)[1].data_ptr():
                result = result.clone()  # clipping works in place, and the caller may still use these numbers
        arriving[:] = [result.summed] if isinstance(result, RowSparseGradient) and result.summed is not None else []
        return result

    def accept_clipping(parameter: Tensor) -> None:
        """Turn `parameter.grad` into a `RowSparseGradient` in place, which torch's clipping accepts.

        This is a post-accumulate-grad hook.
        """
        grad = parameter.grad
        if grad is not None and grad.layout is torch.sparse_coo:
            gradient = with_torch_functions(grad, parameter)
            assert isinstance(gradient, RowSparseGradient)
            gradient.summed = arriving.pop() if arriving else None

    coalesce.__torch_unserializable__ = True  # type: ignore[attr-defined]
    pending.hooks = (
        weight.requires_grad_(True).register_hook(coalesce),
        weight.register_post_accumulate_grad_hook(accept_clipping),
    )
    weight.requires_grad_(requires_grad)
    weight.pending_updates = pending  # type: ignore[attr-defined]
    if type(weight) is nn.Parameter:  # a DTensor stays one: no row-sparse optimizer takes its gradients
        weight.__class__ = RowSparseParameter


def release(weight: nn.Parameter) -> None:
    """Apply all pending updates, and make a weight an ordinary parameter with dense gradients again, in place.

    Without effect on other parameters: several tables may share a weight, and one released it.
    """
    pending = pending_updates_of(weight)
    if pending is None:
        return
    with pending.lock:
        pending.apply_all(weight, moments=True)
        pending.detach()
        for hook in pending.hooks:
            hook.remove()
        del weight.pending_updates  # type: ignore[attr-defined]
        if type(weight) is RowSparseParameter:
            weight.__class__ = nn.Parameter  # type: ignore[assignment]


class RowSparseParameter(nn.Parameter):
    """The weight of a row-sparse table: torch functions that read or write its values apply its pending updates first.

    Pending updates are AdamW steps that `RowAdamW` has delayed for rows without a gradient. `F.embedding` applies those
    of the rows that it looks up, and functions that read only shape, dtype or gradient apply none. All other functions
    apply all of them.

    Code that reads the memory without a torch function is not noticed: a kernel of its own,
    `torch.distributed.broadcast`, a tensor taken before the last step, or the weight itself in a compiled function. Use
    `pending_updates_applied` around such code.

    Reference: https://docs.pytorch.org/docs/stable/notes/extending.html, "Subclassing torch.Tensor".
    """

    pending_updates: PendingUpdates

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply those pending updates of weights among the arguments that `func` would miss, and then call `func`.

        Results are plain tensors. Inside a compiled function, and where a `FakeTensorMode` describes a weight for one,
        no updates are applied. Errors are also those of `PendingUpdates`.

        Raises:
            SizeError: `func` is `share_memory_`, and the weight has a sparse gradient.
        """
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling() and func not in READS_NO_ROWS and not is_fake_mode_active():
            weights = list(weights_among((args, kwargs)))
            if func is Tensor.share_memory_ and any(w.grad is not None and w.grad.is_sparse for w in weights):
                raise SizeError(
                    "Torch cannot share the sparse gradient of a row-sparse table: call optimizer.zero_grad() before "
                    "share_memory()."
                )
            with HeldLocks([weight.pending_updates.lock for weight in weights if _copies_rows(func, weight)]):
                for weight in weights:
                    if func is F.embedding and weight is args[1]:
                        weight.pending_updates.apply_to_ids(weight, args[0])
                    elif weight.pending_updates.handle not in _raw_reads.handles:
                        weight.pending_updates.apply_all(weight)
                return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # Dynamo traces it


def look_up_rows(ids: Tensor, weight: Tensor) -> Tensor:
    """Return `F.embedding(ids, weight, sparse=True)` for the weight of a row-sparse table, by a kernel if one applies.

    Pending updates of the rows are applied first. Torch's operator waits for all of its threads, which takes long on a
    busy machine. On a CPU the row numbers, of any shape, have been checked.
    """
    pending = pending_updates_of(weight)
    learns = torch.is_grad_enabled() and weight.requires_grad
    if learns and type(weight) is RowSparseParameter and pending is not None and sums_on_device(raw_weight(weight)):
        looked_up: Tensor = _LookUpSortedRows.apply(weight, ids)  # type: ignore[no-untyped-call]
        return looked_up
    numbers = ids.numel() * weight.shape[1]
    if type(weight) is RowSparseParameter and pending is not None and numbers >= SMALL_NUMEL:
        plain = raw_weight(weight)
        if plain.is_contiguous() and GATHER.applies(plain, ids) and not is_function_mode_active():
            vectors: Tensor = _LookUpRows.apply(weight, ids)  # type: ignore[no-untyped-call]
            return vectors
    return F.embedding(ids, weight, sparse=True)


_look_up_rows_outside_of_graphs = outside_of_graphs(look_up_rows)


def look_up_rows_between_graphs(ids: Tensor, weight: Tensor) -> Tensor:
    """Return `look_up_rows(ids, weight)` in a function that `torch.compile` traces, with gradients on.

    The graph ends before the look-up, and another one begins after it. Inductor takes the sparse gradient for a dense
    tensor as soon as a pass changes a node beside it, or two gradients are added, so no graph may contain it.

    Raises:
        torch._dynamo.exc.Unsupported: The function is compiled with `fullgraph=True`.
    """
    torch._dynamo.graph_break(
        msg="A compiled function looks up a row-sparse table with gradients on, and its graph cannot contain the "
        "sparse gradient. Compile it without fullgraph=True, or only what follows the look-up; look up under "
        "torch.no_grad(); or build the table with row_sparse=False."
    )
    return _look_up_rows_outside_of_graphs(ids, weight)


class _LookUpRows(torch.autograd.Function):
    """Look up rows by kernels, with the gradient of `F.embedding`; see `look_up_rows`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        flat, pending = ids.flatten().contiguous(), pending_updates_of(weight)  # one axis is flattened as a view
        assert pending is not None
        segments = segments_of_equal_ids(flat)
        ctx.save_for_backward(ids, *segments)
        ctx.shape, ctx.padding_idx = weight.shape, pending.padding_idx
        return pending.look_up(weight, flat, segments).view(*ids.shape, weight.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ids, *segments = ctx.saved_tensors
        if torch.is_grad_enabled() or not SUM_SEGMENTS.applies(grad):
            return torch.ops.aten.embedding_sparse_backward(grad, ids, ctx.shape[0], -1, False), None
        places = Segments(*segments)
        if ctx.padding_idx is not None:
            places = segments_of_equal_ids(ids.flatten(), drop=ctx.padding_idx)
        values = sum_segments(grad.reshape(-1, ctx.shape[1]), places)
        return finished_gradient(places.rows, values, ctx.shape), None


class _LookUpSortedRows(torch.autograd.Function):
    """Look up rows on a CUDA device without a wait, and sum their gradients; see `look_up_rows`.

    The IDs are sorted once, for the pending updates, the sums and the optimizer's step.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        pending = pending_updates_of(weight)
        assert pending is not None
        places = SortedRows.of(ids)
        ctx.save_for_backward(ids, *places)
        ctx.shape, ctx.padding_idx = weight.shape, pending.padding_idx
        with pending.lock:
            pending.apply_to_ids(weight, ids, places)
            return torch.embedding(raw_weight(weight), ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ids, *places = ctx.saved_tensors
        if torch.is_grad_enabled() or not sums_on_device(grad):
            return torch.ops.aten.embedding_sparse_backward(grad, ids, ctx.shape[0], -1, False), None
        gradient = summed_gradient(SortedRows(*places), grad, tuple(ctx.shape), ctx.padding_idx)
        gradient.finished = True
        return gradient, None


_ATTRIBUTES = """shape dtype device layout ndim itemsize nbytes requires_grad is_leaf grad grad_fn _version _base
_backward_hooks _post_accumulate_grad_hooks retains_grad output_nr is_sparse is_cpu is_cuda is_meta is_quantized"""
_METHODS = """size dim ndimension numel nelement stride storage_offset element_size is_contiguous is_floating_point
is_complex get_device __len__ requires_grad_ register_hook register_post_accumulate_grad_hook new_empty new_zeros
new_ones new_full
new_tensor"""
_FUNCTIONS = "is_floating_point is_complex numel empty_like zeros_like ones_like full_like randn_like rand_like"
READS_NO_ROWS = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES.split()),
        *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad", "_backward_hooks")),
        *(getattr(Tensor, name) for name in _METHODS.split()),
        *(getattr(torch, name) for name in _FUNCTIONS.split()),
    ]
)
"""Functions that read the shape, dtype, device or gradient of a tensor, but none of its values."""

COPIES_ROWS = frozenset(
    [
        F.embedding,
        *(getattr(Tensor, name) for name in ("clone", "copy_", "index_select", "share_memory_")),
        *(getattr(torch, name) for name in ("clone", "index_select")),
    ]
)
"""Functions during which no other thread writes rows: they copy rows, and run no code of the user."""


def _copies_rows(func: Callable[..., Any], weight: nn.Parameter) -> bool:
    """Return whether to exclude other threads during `func`: whether it copies rows and records no graph.

    Where a graph is recorded, hooks of the user may run, during which no lock is held.
    """
    return func in COPIES_ROWS and not (torch.is_grad_enabled() and weight.requires_grad)


def weights_among(values: Any) -> Iterator[RowSparseParameter]:
    """Yield the weights of row-sparse tables among the arguments of a torch function, also in nested containers."""
    if isinstance(values, RowSparseParameter):
        if hasattr(values, "pending_updates"):  # a copy without its table has none
            yield values
    elif isinstance(values, list | tuple | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from weights_among(value)


@contextmanager
def applied_rows(weight: Tensor, ids: Tensor) -> Iterator[Tensor]:
    """Context manager: yield the memory of a weight to read some rows, which no other thread writes in the block.

    Pending updates of these rows (row-sparse tables) are applied first. The row numbers were checked.
    """
    pending = pending_updates_of(weight)
    with nullcontext() if pending is None else pending.lock:
        if pending is not None:
            pending.apply_to_ids(weight, ids)
        yield raw_weight(weight)


@contextmanager
def pending_updates_applied(model: nn.Module) -> Iterator[None]:
    """Keep all rows of all row-sparse tables of `model` up to date inside a `with` block, for every reader and writer.

    `RowAdamW` delays the updates of rows without a gradient. Torch functions, `table.weight`, `state_dict()`,
    `copy.deepcopy` and look-ups apply them. This block is for code that keeps tensors of the weights over several
    steps, or reads their memory without a torch function.

    On entering, pending updates are applied. Each optimizer step inside updates all rows at once. Without compiled
    kernels that takes about twice as long as a step of dense AdamW. On leaving, nothing is written, and later steps
    delay updates again.

    Args:
        model: A module with row-sparse tables at any depth.

    Raises:
        StaleRowsError: A weight was written in place while updates were pending.
        ShapeError: A table has another size than the optimizer's moments.

    Example:
        >>> table = TokenEmbedding(100, 8, row_sparse=True)
        >>> rows = table.weight.detach()
        >>> with pending_updates_applied(table):
        ...     rows.clamp_(-0.01, 0.01)[0, 0].abs() <= 0.01
        tensor(True)
    """
    weights = [(pending, each) for each in model.parameters() if (pending := pending_updates_of(each)) is not None]
    for pending, weight in weights:
        with pending.lock:
            pending.apply_all(weight)
            pending.eager_blocks += 1
    try:
        yield
    finally:
        for pending, _ in weights:
            with pending.lock:
                pending.eager_blocks -= 1


@contextmanager
def without_applying_updates(model: nn.Module) -> Iterator[None]:
    """Let code inside a `with` block read the weights of `model` as stored, without applying their pending updates.

    A checkpoint uses it to save the raw rows beside `PendingUpdates.state()`. Look-ups still apply updates, and so do
    other threads.
    """
    handles = [pending.handle for each in model.parameters() if (pending := pending_updates_of(each)) is not None]
    before = _raw_reads.handles
    _raw_reads.handles = before.union(handles)
    try:
        yield
    finally:
        _raw_reads.handles = before


@torch.library.custom_op("embedlayer::with_updates_applied", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def with_updates_applied(tensor: Tensor, handle: int, is_ids: bool) -> Tensor:
    """Apply the pending updates of a table as one node of a compiled graph, and return a copy of `tensor`.

    The result is a copy so that the compiler runs the code that reads it after the update. The weight is updated in
    place, but for `is_ids` it is not an argument: AOTAutograd would copy all of it, and send a dense gradient through
    the change. `tensor` has the token IDs whose rows are updated if `is_ids`, else it is the weight, of which all rows
    are. `handle` is that of the `PendingUpdates` of the table.
    """
    pending, weight = pending_updates_with(handle)
    if is_ids:
        pending.apply_to_ids(weight, tensor)
    else:
        pending.apply_all(weight)
    return tensor.clone()


@with_updates_applied.register_fake
def _(tensor: Tensor, handle: int, is_ids: bool) -> Tensor:
    return torch.empty_like(tensor)
