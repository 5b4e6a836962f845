"""Which rows of a table are behind, and by how much: the ledger that a row-sparse table keeps for its optimizer.

`RowAdamW` writes to the rows of a batch only. The ledger remembers the last step of each row, and brings rows up to
date just before they are read. It stands on the parameter (`weight.row_ledger`): that is what an optimizer is given.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakValueDictionary, ref

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedlayer.errors import ShapeError, StaleRowsError
from embedlayer.files import JsonObject
from embedlayer.tables.catch_up import Betas, History
from embedlayer.tables.row_gradient import coalesced, row_sparse, run_as_stored, with_torch_functions

ROWS_AT_ONCE = 4096
NUMBERS_AT_ONCE = 1 << 18
"""Numbers in a chunk of rows: few enough for the cache, and so many that threads seldom wait for each other."""

TOLERANCES = {torch.float64: 1e-12}
TOLERANCE = 1e-7  # float32 resolves 6e-8

_handles = count()
_ledgers: WeakValueDictionary[int, "RowLedger"] = WeakValueDictionary()  # operators take numbers and tensors only


class Held(NamedTuple):
    """Rows that were caught up for a look-up, with their values and moments: a step on just these need not gather."""

    rows: Tensor
    numbers: list[Tensor]
    versions: list[int]


class RowLedger:
    """The last step of each row of one table, and what happened since.

    Args:
        padding_idx: A row that gets no gradient.

    Attributes:
        step: Steps that the optimizer made on this table.
        rows_at: The step after which each row's values are right.
        moments_at: The step after which each row's moments are right, 0 where it never had a gradient.
        replaced: Whether the table has another weight by now.
        applied_at: The step after which the values of all rows are right.
        raw: Whether readers of the weight get the rows as they are; see `raw_rows`.
        eager: How many `pending_updates_applied` blocks are open: every step then applies all pending updates.
        version: Version counter of the weight after the last write that the ledger knows of.
    """

    def __init__(self, padding_idx: int | None = None) -> None:
        self.padding_idx = padding_idx
        self.replaced = False
        self.raw = False
        self.eager = 0
        self.watched: ReferenceType[nn.Parameter] | None = None
        self.handle = next(_handles)
        _ledgers[self.handle] = self
        self.detach()

    def __reduce__(self) -> tuple[type["RowLedger"], tuple[int | None]]:
        return RowLedger, (self.padding_idx,)  # a copy of a table starts with rows that are right, and no optimizer

    def watch(self, weight: nn.Parameter) -> None:
        """Sum equal rows of each gradient of `weight` when it arrives, and let readers of `weight` see current rows."""
        if self.watched is not None and self.watched() is weight and ledger_of(weight) is self:
            return
        self.watched = ref(weight)
        wanted = weight.requires_grad

        def tidy(grad: Tensor) -> Tensor:
            tidied = coalesced(row_sparse(grad), drop=self.padding_idx)
            if tidied._values().data_ptr() == grad._values().data_ptr():
                tidied = tidied.clone()  # clipping works in place, and these numbers may be somebody else's
            return tidied

        def accept_clipping(parameter: Tensor) -> None:
            grad = parameter.grad
            if grad is not None and grad.layout is torch.sparse_coo and not hasattr(parameter, "shard_group"):
                with_torch_functions(grad)

        tidy.__torch_unserializable__ = True  # type: ignore[attr-defined]
        self.hooks = (
            weight.requires_grad_(True).register_hook(tidy),
            weight.register_post_accumulate_grad_hook(accept_clipping),
        )
        weight.requires_grad_(wanted)
        weight.row_ledger = self  # type: ignore[attr-defined]
        if type(weight) is nn.Parameter:  # a DTensor stays one: no row-sparse optimizer takes its gradients
            weight.__class__ = RowSparseParameter

    def release(self, weight: nn.Parameter) -> None:
        """Apply pending updates, and let `weight` be an ordinary parameter again, with dense gradients."""
        if getattr(weight, "row_ledger", None) is not self:
            return  # released already: several tables may share a weight
        self.flush(weight, moments=True)
        self.detach()
        for hook in self.hooks:
            hook.remove()
        del weight.row_ledger  # type: ignore[attr-defined]
        if type(weight) is RowSparseParameter:
            weight.__class__ = nn.Parameter  # type: ignore[assignment]

    @property
    def step(self) -> int:
        """Steps that the optimizer made on this table."""
        return self.history.step if self.history is not None else 0

    @property
    def attached(self) -> bool:
        """Whether an optimizer has made a step on this table."""
        return self.history is not None

    @property
    def pending(self) -> bool:
        """Whether the values of some rows wait for updates."""
        return self.applied_at < self.step

    def detach(self) -> None:
        """Forget the optimizer; call it when all rows are up to date."""
        self.history: History | None = None
        self.applied_at = 0
        self.version = 0
        self.held: Held | None = None
        self.rows_at = self.moments_at = self.exp_avg = self.exp_avg_sq = torch.empty(0)

    def attach(self, weight: Tensor, step: int, moments: tuple[Tensor, Tensor], betas: Betas) -> None:
        """Follow the optimizer that holds these moments, all right after `step`; a no-op if that is so already.

        Raises:
            ShapeError: The moments are of another size than the table.
        """
        exp_avg, exp_avg_sq = moments
        self.note_writes(weight)
        if self.history is not None and self.exp_avg is exp_avg and self.exp_avg_sq is exp_avg_sq:
            if self.history.betas == betas:
                return
            self.flush(weight, moments=True)
            self.history = History(step, betas)
            self.applied_at = step
            return
        if self.history is not None:
            self.flush(weight, moments=True)
        self.check_size(weight, exp_avg)
        history = History(step, betas)
        self.exp_avg, self.exp_avg_sq, self.history = exp_avg, exp_avg_sq, history
        self.applied_at, self.version = step, weight._version
        self.rows_at = torch.full(weight.shape[:1], step, dtype=torch.int32, device=weight.device)
        self.moments_at = self.rows_at.clone()

    def catch_up(self, weight: Tensor, ids: Tensor) -> None:
        """Bring the rows `ids`, which may repeat, up to date."""
        if self.history is None:
            return
        self.check_size(weight)
        self.note_writes(weight)
        if not self.pending:
            return
        ids = ids.flatten()
        behind = self.rows_at.index_select(0, ids) < self.step
        if not behind.any():
            return
        learns = weight.requires_grad and torch.is_grad_enabled()
        rows = torch.unique(ids if learns else ids[behind]).long()
        if learns and self.padding_idx is not None:
            padding = rows == self.padding_idx
            if padding.any():  # it has no gradient, but where it is not zero it decays
                self._bring(weight, rows[padding])
            rows = rows[~padding]
        self.held = None
        numbers = self._bring(weight, rows, keep=learns)
        if learns:
            self.held = Held(rows, numbers, self._versions(weight))

    def numbers(self, weight: Tensor, rows: Tensor) -> list[Tensor]:
        """Values of different rows, brought up to date, and both moments as they were last written: `(U, D)` each."""
        self.note_writes(weight)
        held, self.held = self.held, None
        if held is not None and held.versions == self._versions(weight) and torch.equal(held.rows, rows):
            return held.numbers
        return self._bring(weight, rows, keep=True)

    def _versions(self, weight: Tensor) -> list[int]:
        return [each._version for each in (weight, self.exp_avg, self.exp_avg_sq)]

    def begin_step(self, rows: Tensor, lr: float, weight_decay: float) -> list[Tensor]:
        """Note that the optimizer makes a step on `rows`, whose values are up to date.

        Returns:
            For both moments of these rows, by what they decay up to and with this step, `(U, 1)`.
        """
        assert self.history is not None
        moments_at = self.moments_at.index_select(0, rows)
        now = self.history.record(lr, weight_decay)
        self.rows_at.index_fill_(0, rows, now)
        self.moments_at.index_fill_(0, rows, now)
        return self._faded(now - moments_at)

    def end_step(self, weight: Tensor, rows: Tensor, numbers: list[Tensor]) -> None:
        """Store new values and moments of `rows`, each `(U, D)`; inside `pending_updates_applied`, move the others."""
        for whole, its in zip((as_stored(weight), self.exp_avg, self.exp_avg_sq), numbers, strict=True):
            whole.index_copy_(0, rows, its.to(whole.dtype))
        self.version = weight._version
        if self.eager:
            self.flush(weight)

    def note_writes(self, weight: Tensor) -> None:
        """Take note that somebody wrote to `weight` in place, which is right unless rows were pending then.

        The written values are kept and the updates that were pending are dropped, so that the table can be used again.

        Raises:
            StaleRowsError: Rows were pending.
        """
        if self.history is None:
            return
        found, self.version = self.version, weight._version
        if self.version == found or not self.pending:
            return
        missed = int((self.rows_at < self.step).sum())
        self.rows_at.fill_(self.step)
        self.applied_at, self.held = self.step, None
        raise StaleRowsError(
            f"The weight {tuple(weight.shape)} of a row-sparse table was written in place through an older tensor of "
            f"it while {missed} rows had pending updates, so what was written belongs to an earlier step. The written "
            f"values are kept and these updates dropped. Take `table.weight` anew after each step and write to that, "
            f"write inside `with embedlayer.pending_updates_applied(model):`, or use RowAdamW(apply_pending_every=1)."
        )

    def _faded(self, lag: Tensor) -> list[Tensor]:
        """What is left of both moments after `lag` steps, `(U, 1)`."""
        assert self.history is not None
        lag = lag.double().unsqueeze(1)
        return [torch.pow(beta, lag).to(compute_type(self.exp_avg)) for beta in self.history.betas[:2]]

    def flush(self, weight: Tensor, start: int = 0, stop: int | None = None, *, moments: bool = False) -> None:
        """Bring rows `start` to `stop - 1` up to date, in chunks; with `moments`, also the optimizer's state."""
        if self.history is None:
            return
        self.note_writes(weight)
        if not self.pending and not moments:
            return
        self.check_size(weight)
        stop = len(weight) if stop is None else min(stop, len(weight))
        for low in range(start, stop, ROWS_AT_ONCE):
            high = min(low + ROWS_AT_ONCE, stop)
            behind = (self.rows_at[low:high] < self.step).nonzero().squeeze(1) + low
            if len(behind):
                self._bring(weight, behind)
            if moments:
                self._decay_moments(low, high)
        if start == 0 and stop == len(weight):
            self.applied_at = self.step

    def state(self) -> tuple[dict[str, Tensor], JsonObject]:
        """The ledger as it is: tensors, and the rest as JSON. Rows stay behind."""
        if self.history is None:
            return {}, {}
        tensors = {
            "rows_at": self.rows_at,
            "moments_at": self.moments_at,
            "history": torch.from_numpy(self.history.lines),
        }
        return tensors, {"start": self.history.start, "betas": list(self.history.betas)}

    def load_state(
        self, weight: Tensor, moments: tuple[Tensor, Tensor], tensors: dict[str, Tensor], rest: JsonObject
    ) -> None:
        """Put in what `state()` gave, for rows and moments that were saved beside it."""
        self.detach()
        self.attach(weight, rest["start"], moments, Betas(*rest["betas"]))
        assert self.history is not None
        self.history.load(tensors["history"].cpu().numpy())
        self.rows_at.copy_(tensors["rows_at"])
        self.moments_at.copy_(tensors["moments_at"])
        self.applied_at = int(self.rows_at.min())

    def check_size(self, weight: Tensor, moments: Tensor | None = None) -> None:
        """Refuse a table whose size is not that of its moments.

        Raises:
            ShapeError: Naming both sizes.
        """
        moments = self.exp_avg if moments is None else moments
        if moments.shape != weight.shape:
            raise ShapeError(
                f"The table is {tuple(weight.shape)} and the optimizer's state for it {tuple(moments.shape)}: the "
                f"table was resized behind the optimizer's back, or the state is another table's. Build the optimizer "
                f"again after resizing."
            )

    @torch.no_grad()
    def _bring(self, weight: Tensor, rows: Tensor, *, keep: bool = False) -> list[Tensor]:
        """Bring different rows up to date.

        Returns:
            Their values and moments, where they were to be kept.
        """
        history = self.history
        assert history is not None
        parameter, weight = weight, as_stored(weight)
        rows_at = self.rows_at.index_select(0, rows).cpu().numpy().astype(np.int64)
        lag = rows_at - self.moments_at.index_select(0, rows).cpu().numpy()
        solved = history.gaps(rows_at, tolerance=TOLERANCES.get(weight.dtype, TOLERANCE))
        nodes, weights = solved.nodes, solved.weights
        if lag.any():  # values were caught up for a reader, moments were not
            beta1, beta2, _ = history.betas
            with np.errstate(over="ignore"):  # a node at infinity pushes nothing, as it should
                nodes = nodes * beta2 ** (-0.5 * lag)
            weights = weights * (beta1 / math.sqrt(beta2)) ** lag
        numbers = torch.from_numpy(np.concatenate([solved.kept[None], weights, nodes]))
        kept, *terms = numbers.to(weight.device, compute_type(weight)).unsqueeze(2)
        tables = (weight, self.exp_avg, self.exp_avg_sq)
        size = min(rows_at_once(weight), len(rows))
        room = [scratch(weight, len(rows) if keep else size) for _ in tables]
        below, pushed = scratch(weight, size), scratch(weight, size)
        for part in parts(rows, size):
            some = rows[part]
            low = part.start if keep else 0
            p, m, v = (gather(table, some, each[low:]) for table, each in zip(tables, room, strict=True))
            move(p, m, root(v, out=below[: len(some)]), kept[part], [each[part] for each in terms], pushed[: len(some)])
            if not keep:
                weight.index_copy_(0, some, p.to(weight.dtype))
        if keep:  # at once: a call costs as much as some hundred rows
            weight.index_copy_(0, rows, room[0].to(weight.dtype))
        self.rows_at.index_fill_(0, rows, history.step)
        self.version = parameter._version  # inside a custom operator `weight` has a counter of its own
        return room

    @torch.no_grad()
    def _decay_moments(self, low: int, high: int) -> None:
        assert self.history is not None
        at = self.moments_at[low:high]
        rows = ((at < self.step) & (at > 0)).nonzero().squeeze(1)
        factors = self._faded(self.step - at[rows])
        rows = rows + low
        for part in parts(rows, rows_at_once(self.exp_avg)):
            for moments, factor in zip((self.exp_avg, self.exp_avg_sq), factors, strict=True):
                faded = moments.index_select(0, rows[part]) * factor[part]
                moments.index_copy_(0, rows[part], faded.to(moments.dtype))
        self.moments_at.index_fill_(0, rows, self.step)


class RowSparseParameter(nn.Parameter):
    """The weight of a row-sparse table: a function of torch that reads or writes it finds all updates applied.

    Updates of rows without a gradient are pending until somebody needs them. `F.embedding` applies those of the rows
    that it looks up, functions that only ask for shape, type or gradient apply none, and all others apply all. Code
    that gets at the memory without a function of torch (a kernel of its own, `torch.distributed.broadcast`, a tensor
    taken before the last step), or by the weight itself in a compiled function, is not noticed:
    `pending_updates_applied` is for that.

    Reference: https://docs.pytorch.org/docs/stable/notes/extending.html, "Subclassing torch.Tensor".
    """

    row_ledger: RowLedger

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply the pending updates that `func` would miss, then run it on the weight as a plain tensor."""
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling() and func not in READS_NO_ROWS:
            for weight in weights_among((args, kwargs)):
                if func is F.embedding and weight is args[1]:
                    weight.row_ledger.catch_up(weight, args[0])
                elif not weight.row_ledger.raw:
                    weight.row_ledger.flush(weight)
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # Dynamo traces it


READS_NO_ROWS = frozenset(
    [
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf"),
                *("grad", "grad_fn", "_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks"),
                *("retains_grad", "output_nr", "is_sparse", "is_cpu", "is_cuda", "is_meta", "is_quantized"),
            )
        ),
        *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad", "_backward_hooks")),
        *(
            getattr(Tensor, name)
            for name in (
                *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size"),
                *("is_contiguous", "is_floating_point", "is_complex", "get_device", "__len__", "requires_grad_"),
                *("register_hook", "register_post_accumulate_grad_hook"),
                *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"),
            )
        ),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
        *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.randn_like, torch.rand_like),
    ]
)
"""Functions that ask for what a tensor is and not for its numbers."""


def weights_among(values: Any) -> Iterator[RowSparseParameter]:
    """Yield the weights of row-sparse tables among the arguments of a function, lists of tensors included."""
    if isinstance(values, RowSparseParameter):
        if hasattr(values, "row_ledger"):  # a copy without its table has none
            yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from weights_among(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from weights_among(value)


def ledger_of(weight: Tensor | None) -> RowLedger | None:
    """Return the ledger of a row-sparse table's weight; `None` for any other tensor."""
    ledger: RowLedger | None = getattr(weight, "row_ledger", None)
    return ledger


def as_stored(weight: Tensor) -> Tensor:
    """Return a plain tensor over the memory of `weight`, without gradient; rows may be pending."""
    stored: Tensor = run_as_stored(Tensor.detach, (), (weight,), {})
    return stored


@contextmanager
def pending_updates_applied(model: nn.Module) -> Iterator[None]:
    """Keep all rows of all row-sparse tables of `model` current inside the block, for every reader and writer.

    `RowAdamW` delays the updates of rows without a gradient. Functions of torch and everything that goes through
    `table.weight`, `state_dict()`, `copy.deepcopy` or a look-up find them applied. Code that keeps tensors of the
    weights over several steps, or gets at their memory without a function of torch, needs this block.

    On entering, pending updates are applied. A step inside applies all of its updates at once, so it takes about twice
    as long as one of dense AdamW. On leaving, nothing is written: later steps delay updates again.

    Args:
        model: A module with row-sparse tables at any depth.

    Example:
        >>> table = TokenEmbedding(100, 8, row_sparse=True)
        >>> rows = table.weight.detach()
        >>> with pending_updates_applied(table):
        ...     rows.clamp_(-0.01, 0.01)[0, 0].abs() <= 0.01
        tensor(True)
    """
    found = [(ledger, weight) for weight in model.parameters() if (ledger := ledger_of(weight)) is not None]
    ledgers = [ledger for ledger, _ in found]
    for ledger, weight in found:
        ledger.flush(weight)
    for ledger in ledgers:
        ledger.eager += 1
    try:
        yield
    finally:
        for ledger in ledgers:
            ledger.eager -= 1


@contextmanager
def raw_rows(model: nn.Module) -> Iterator[None]:
    """Let readers of a weight get rows with pending updates as they are: for a checkpoint that keeps the updates."""
    ledgers = [each.row_ledger for each in model.parameters() if hasattr(each, "row_ledger")]
    for ledger in ledgers:
        ledger.raw = True
    try:
        yield
    finally:
        for ledger in ledgers:
            ledger.raw = False


def rows_at_once(table: Tensor) -> int:
    """Rows in a chunk that fits the cache."""
    return max(1, NUMBERS_AT_ONCE // table.shape[1])


def parts(rows: Tensor, size: int) -> list[slice]:
    """Where chunks of `size` rows stand.

    Example:
        >>> parts(torch.arange(7), 3)
        [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None)]
    """
    return [slice(low, low + size) for low in range(0, len(rows), max(size, 1))]


def scratch(table: Tensor, rows: int) -> Tensor:
    """Room for as many rows, in the type that is computed in."""
    return table.new_empty((rows, table.shape[1]), dtype=compute_type(table))


def gather(table: Tensor, rows: Tensor, room: Tensor) -> Tensor:
    """`table[rows]`, in `room` and its type."""
    values = room[: len(rows)]
    if values.dtype == table.dtype:
        return torch.index_select(table, 0, rows, out=values)
    return values.copy_(table.index_select(0, rows))


def compute_type(table: Tensor) -> torch.dtype:
    """float32, or float64 for tables of that type."""
    return torch.float64 if table.dtype == torch.float64 else torch.float32


def root(squares: Tensor, *, out: Tensor) -> Tensor:
    """The square root: by the reciprocal one, which a CPU makes faster than `torch.sqrt`."""
    return torch.rsqrt(squares, out=out).reciprocal_()


def move(p: Tensor, m: Tensor, root: Tensor, kept: Tensor, terms: list[Tensor], room: Tensor) -> None:
    """`p = p * kept - m * sum_q weight_q / (root + node_q)` in place, in `room`'s memory too.

    Args:
        p: Values, `(U, D)`.
        m: Their means.
        root: The roots of their mean squares.
        kept: What weight decay has left, `(U, 1)`.
        terms: All weights, then all nodes, each `(U, 1)`.
        room: As large as `p`.
    """
    weights, nodes = terms[: len(terms) // 2], terms[len(terms) // 2 :]
    pushed = torch.add(root, nodes[0], out=room)
    torch.div(weights[0], pushed, out=pushed)
    for weight, node in zip(weights[1:], nodes[1:], strict=True):
        pushed.addcdiv_(weight, root + node)
    p.mul_(kept).addcmul_(m, pushed, value=-1)


@torch.library.custom_op("embedlayer::caught_up", mutates_args=())
def caught_up(ids: Tensor, handle: int) -> Tensor:
    """`RowLedger.catch_up` as one node of a compiled graph: a copy of `ids`, so that the look-up comes after it.

    The table is not an argument: AOTAutograd would copy all of it, and send a dense gradient through the change.
    """
    ledger = _ledgers[handle]
    weight = ledger.watched() if ledger.watched is not None else None
    assert weight is not None
    ledger.catch_up(weight, ids)
    return ids.clone()


@caught_up.register_fake
def _(ids: Tensor, handle: int) -> Tensor:
    return torch.empty_like(ids)


@torch.library.custom_op("embedlayer::all_caught_up", mutates_args=())
def all_caught_up(rows: Tensor, handle: int) -> Tensor:
    """`RowLedger.flush` as one node of a compiled graph: a copy of all rows, so that what reads them comes after it."""
    ledger = _ledgers[handle]
    weight = ledger.watched() if ledger.watched is not None else None
    assert weight is not None
    ledger.flush(weight)
    return rows.clone()


@all_caught_up.register_fake
def _(rows: Tensor, handle: int) -> Tensor:
    return torch.empty_like(rows)
