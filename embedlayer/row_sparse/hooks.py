"""What torch calls on the weight of a row-sparse table: hooks of its gradient, and operators that read or write it.

`watch` attaches `PendingUpdates` to a weight, which becomes a `RowSparseParameter`: operators apply the updates that
they would miss, and gradients arrive with each row once.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Self
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedlayer.core.devices import device_kind
from embedlayer.core.errors import SizeError
from embedlayer.core.forks import held_locks
from embedlayer.core.torch_state import (
    count_dispatch_modes,
    count_function_modes,
    is_fake_mode_active,
    outside_of_graphs,
    set_dispatch,
    tree_map,
    without_dispatch,
)
from embedlayer.row_sparse.gradient import (
    SUM_SEGMENTS,
    RowSparseGradient,
    Segments,
    coalesced,
    differentiable_rows,
    finished_gradient,
    require_row_sparse,
    segments_of_equal_ids,
    sort_rows,
    sum_segments,
    summed_gradient,
    sums_on_device,
    with_torch_functions,
)
from embedlayer.row_sparse.pending_updates import PendingUpdates, by_handle, pending_updates_of
from embedlayer.row_sparse.storage import raw_weight

_raw_reads: ContextVar[frozenset[int]] = ContextVar("raw_reads", default=frozenset())
"""Handles of the tables whose weights this thread reads without their pending updates."""


def watch(weight: nn.Parameter, pending: PendingUpdates) -> None:
    """Attach the pending updates of a table to its weight, which becomes a `RowSparseParameter` in place."""
    if pending.weight_ref is not None and pending.weight_ref() is weight and pending_updates_of(weight) is pending:
        return
    pending.weight_ref = ref(weight)
    arriving: list[tuple[Tensor, int | None] | None] = []  # `summed`: autograd stores a new tensor over the same memory

    def coalesce(grad: Tensor) -> Tensor:
        """Gradient hook: return the gradient with equal rows summed and without the padding row, in new memory."""
        is_summed = isinstance(grad, RowSparseGradient) and grad.is_summed(pending.padding_idx)
        if not is_summed and require_row_sparse(grad).requires_grad:
            return differentiable_rows(grad, drop=pending.padding_idx)
        # sums are in new memory, because clipping works in place; torch itself copies what something else refers to
        result: Any = grad if is_summed else coalesced(grad, drop=pending.padding_idx)
        arriving[:] = [result.summed]
        return result  # type: ignore[no-any-return]

    def accept_clipping(parameter: Tensor) -> None:
        """Turn `parameter.grad` into a `RowSparseGradient` in place, which torch's clipping accepts."""
        grad = parameter.grad
        if grad is not None and grad.layout is torch.sparse_coo:
            gradient = with_torch_functions(grad, parameter)
            assert isinstance(gradient, RowSparseGradient)
            gradient.summed = arriving.pop() if arriving else None

    coalesce.__torch_unserializable__ = True  # type: ignore[attr-defined]
    # A DTensor stays one: no row-sparse optimizer takes its gradients.
    if type(weight) in (nn.Parameter, RowSparseParameter):
        set_dispatch(weight, RowSparseParameter, run_operator)
    requires_grad = weight.requires_grad
    pending.hooks = (
        weight.requires_grad_(True).register_hook(coalesce),
        weight.register_post_accumulate_grad_hook(accept_clipping),
    )
    weight.requires_grad_(requires_grad)
    weight.pending_updates = pending  # type: ignore[attr-defined]


def release(weight: nn.Parameter) -> None:
    """Apply all pending updates, and make a weight an ordinary parameter with dense gradients again, in place."""
    pending = pending_updates_of(weight)
    if pending is None:
        return
    with pending.lock:
        pending.apply_all(weight, moments=True)
        pending.detach()
        pending.weight_ref = None
        for hook in pending.hooks:
            hook.remove()
        del weight.pending_updates  # type: ignore[attr-defined]
        if type(weight) is RowSparseParameter:
            set_dispatch(weight, nn.Parameter, None)


class RowSparseParameter(nn.Parameter):
    """The weight of a row-sparse table: whatever reads or writes its values applies its pending updates first."""

    pending_updates: PendingUpdates

    def detach(self) -> Tensor:
        """Return a plain tensor over the memory, as in torch; `nn.Parameter(weight)` gets one of this class."""
        plain = super().detach()
        if torch.compiler.is_compiling():
            return plain
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:  # it accepts no other class, as of a subclass
            plain.__class__ = RowSparseParameter  # without pending updates it is an ordinary parameter
        return plain

    def numpy(self, *, force: bool = False) -> Any:
        return self.detach().requires_grad_(self.requires_grad).numpy(force=force)

    def tolist(self) -> Any:
        return self.detach().tolist()

    def data_ptr(self) -> int:
        self.untyped_storage()
        return super().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        if not is_fake_mode_active():  # it describes a weight for a compiled function
            self.detach()
        return super().untyped_storage()

    def __dlpack__(self, **options: Any) -> Any:
        return self.detach().requires_grad_(self.requires_grad).__dlpack__(**options)

    def share_memory_(self) -> Self:
        if self.grad is not None and self.grad.is_sparse:
            raise SizeError("Torch cannot share a sparse gradient: call optimizer.zero_grad() before share_memory().")
        with self.pending_updates.lock if hasattr(self, "pending_updates") else nullcontext():
            super().share_memory_()  # type: ignore[no-untyped-call]
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary parameter, so that `torch.load` needs no class of this library."""
        plain = nn.Parameter(self.data, self.requires_grad)
        ours = ("pending_updates", "__torch_dispatch__")
        vars(plain).update({name: value for name, value in vars(self).items() if name not in ours})
        return plain.__reduce_ex__(protocol)


EMBEDDING = torch.ops.aten.embedding.default


def run_operator(
    func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Apply the pending updates that the operator `func` would miss in its arguments, then run it."""
    kwargs = kwargs or {}
    is_ours, is_fake, name = func.namespace == "aten", is_fake_mode_active(), func.overloadpacket.__name__
    locks, weights = [], []
    if not is_fake and not (is_ours and (name.startswith("new_") or name.endswith("_like"))):  # reads shape and dtype
        for value in (*args, *kwargs.values()):
            for each in value if isinstance(value, list | tuple) else (value,):
                if type(each) is RowSparseParameter and hasattr(each, "pending_updates"):
                    weights.append(each)
                    if is_ours:  # other operators run code of users or collectives, during which no lock is held
                        locks.append(each.pending_updates.lock)
    with held_locks(locks):
        for weight in weights:
            if func is EMBEDDING and weight is args[0]:
                weight.pending_updates.apply_to_ids(weight, args[1])
            elif weight.pending_updates.handle not in _raw_reads.get():
                weight.pending_updates.apply_all(weight)
        if is_ours and not is_fake and len(types) == 1:
            with without_dispatch():
                return func(*args, **kwargs)
        plain = tree_map(lambda each: raw_weight(each) if type(each) is RowSparseParameter else each, (args, kwargs))
        return func(*plain[0], **plain[1])


def look_up_rows(ids: Tensor, weight: Tensor) -> Tensor:
    """Return `F.embedding(ids, weight, sparse=True)` for a row-sparse weight; on a CPU without `run_operator`."""
    pending = pending_updates_of(weight)
    if type(weight) is RowSparseParameter and pending is not None:
        kind = device_kind(weight)
        if kind == "cuda" and torch.is_grad_enabled() and weight.requires_grad and sums_on_device(raw_weight(weight)):
            looked_up: Tensor = _LookUpSortedRows.apply(weight, ids)  # type: ignore[no-untyped-call]
            return looked_up
        if kind == "cpu" and not count_dispatch_modes() and not count_function_modes():
            vectors: Tensor = _LookUpRows.apply(weight, ids)  # type: ignore[no-untyped-call]
            return vectors
    return F.embedding(ids, weight, sparse=True)


_look_up_rows_outside_of_graphs = outside_of_graphs(look_up_rows)


def look_up_rows_between_graphs(ids: Tensor, weight: Tensor) -> Tensor:
    """Return `look_up_rows(ids, weight)` in a function that `torch.compile` traces, with gradients on."""
    torch._dynamo.graph_break(
        msg="A compiled function looks up a row-sparse table with gradients on, and its graph cannot contain the "
        "sparse gradient. Compile it without fullgraph=True, or only what follows the look-up; look up under "
        "torch.no_grad(); or use a TokenEmbedding."
    )
    return _look_up_rows_outside_of_graphs(ids, weight)


class _LookUpRows(torch.autograd.Function):
    """Look up rows on a CPU, with the gradient of `F.embedding`; see `look_up_rows`."""

    @staticmethod
    def forward(ctx: Any, weight: Any, ids: Tensor) -> Tensor:
        pending: PendingUpdates = weight.pending_updates
        learns = ctx.needs_input_grad[0]
        vectors, segments = pending.look_up(weight, ids, learns=learns)
        if learns:
            ctx.save_for_backward(ids, *(segments or ()))
            ctx.shape, ctx.padding_idx = tuple(weight.shape), pending.padding_idx
        return vectors

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ids, *segments = ctx.saved_tensors
        by_kernel = not torch.is_grad_enabled() and SUM_SEGMENTS.applies(grad)
        if not by_kernel:
            return torch.ops.aten.embedding_sparse_backward(grad, ids, ctx.shape[0], -1, False), None
        if segments and ctx.padding_idx is None:
            places = Segments(*segments)
        else:
            places = segments_of_equal_ids(ids.flatten(), drop=ctx.padding_idx, by_kernel=by_kernel)
        values = sum_segments(grad.reshape(-1, ctx.shape[1]), places, by_kernel=by_kernel)
        return finished_gradient(places.rows, values, ctx.shape, ctx.padding_idx), None


class _LookUpSortedRows(torch.autograd.Function):
    """Look up rows on a CUDA device without a wait, and sum their gradients; see `look_up_rows`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        pending = pending_updates_of(weight)
        assert pending is not None
        places = sort_rows(ids)
        ctx.save_for_backward(ids, *places)
        ctx.shape, ctx.padding_idx = weight.shape, pending.padding_idx
        with pending.lock:
            pending.apply_to_ids(weight, ids, places)
            return torch.embedding(raw_weight(weight), ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ids, rows, order = ctx.saved_tensors
        if torch.is_grad_enabled() or not sums_on_device(grad):
            return torch.ops.aten.embedding_sparse_backward(grad, ids, ctx.shape[0], -1, False), None
        return summed_gradient((rows, order), grad, tuple(ctx.shape), ctx.padding_idx), None


@contextmanager
def applied_rows(weight: Tensor, ids: Tensor) -> Iterator[Tensor]:
    """Context manager: yield the memory of a weight to read some rows, which no other thread writes in the block."""
    pending = pending_updates_of(weight)
    with nullcontext() if pending is None else pending.lock:
        if pending is not None:
            pending.apply_to_ids(weight, ids)
        yield raw_weight(weight)


@contextmanager
def pending_updates_applied(model: nn.Module) -> Iterator[None]:
    """Keep all rows of all row-sparse tables of `model` up to date inside a `with` block, for every reader and writer.

    `RowAdamW` delays the updates of rows without a gradient. Operators, `table.weight`, `state_dict()`,
    `copy.deepcopy` and look-ups apply them. This block is for code that keeps tensors of the weights over several
    steps, or reads their memory without an operator.

    On entering, pending updates are applied. Each optimizer step inside updates all rows at once. Without compiled
    kernels that takes about twice as long as a step of dense AdamW. On leaving, nothing is written, and later steps
    delay updates again.

    Args:
        model: A module with row-sparse tables at any depth.

    Raises:
        StaleRowsError: A weight was written in place while updates were pending.
        ShapeError: A table has another size than the optimizer's moments.

    Example:
        >>> table = RowSparseEmbedding(100, 8)
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
    """Let code inside a `with` block read the weights of `model` as stored, without applying their pending updates."""
    handles = [pending.handle for each in model.parameters() if (pending := pending_updates_of(each)) is not None]
    before = _raw_reads.set(_raw_reads.get().union(handles))
    try:
        yield
    finally:
        _raw_reads.reset(before)


@torch.library.custom_op("embedlayer::with_updates_applied", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def with_updates_applied(tensor: Tensor, handle: int, is_ids: bool) -> Tensor:
    """Apply the pending updates of a table as one node of a compiled graph, and return a copy of `tensor`."""
    pending = by_handle[handle]
    weight = pending.weight_ref() if pending.weight_ref is not None else None
    assert weight is not None
    if is_ids:
        pending.apply_to_ids(weight, tensor)
    else:
        pending.apply_all(weight)
    # A copy, so that what reads it runs later. The weight is no argument: AOTAutograd would copy all of it.
    return tensor.clone()


@with_updates_applied.register_fake
def _(tensor: Tensor, handle: int, is_ids: bool) -> Tensor:
    return torch.empty_like(tensor)
