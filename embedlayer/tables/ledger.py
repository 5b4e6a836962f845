"""Which rows of a table are behind, and by how much: the ledger that a row-sparse table keeps for its optimizer.

`RowAdamW` writes to the rows of a batch only. The ledger remembers the last step of each row, and brings rows up to
date just before they are read. It stands on the parameter (`weight.row_ledger`): that is what an optimizer is given.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from weakref import ReferenceType, WeakValueDictionary, ref

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedlayer.errors import ShapeError
from embedlayer.files import JsonObject
from embedlayer.tables.catch_up import Betas, History

ROWS_AT_ONCE = 4096
NUMBERS_AT_ONCE = 1 << 18
"""Numbers in a chunk of rows: few enough for the cache, and so many that threads seldom wait for each other."""

TOLERANCES = {torch.float64: 1e-12}
TOLERANCE = 1e-7  # float32 resolves 6e-8

_handles = count()
_ledgers: WeakValueDictionary[int, "RowLedger"] = WeakValueDictionary()  # operators take numbers and tensors only


class RowLedger:
    """The last step of each row of one table, and what happened since.

    Args:
        padding_idx: A row that gets no gradient.

    Attributes:
        step: Steps that the optimizer made on this table.
        rows_at: The step after which each row's values are right.
        moments_at: The step after which each row's moments are right, 0 where it never had a gradient.
        replaced: Whether the table has another weight by now.
        raw: Whether `state_dict()` takes the rows as they are; see `raw_rows`.
    """

    def __init__(self, padding_idx: int | None = None) -> None:
        self.padding_idx = padding_idx
        self.replaced = False
        self.raw = False
        self.watched: ReferenceType[nn.Parameter] | None = None
        self.handle = next(_handles)
        _ledgers[self.handle] = self
        self.detach()

    def __reduce__(self) -> tuple[type["RowLedger"], tuple[int | None]]:
        return RowLedger, (self.padding_idx,)  # a copy of a table starts with rows that are right, and no optimizer

    def watch(self, weight: nn.Parameter) -> None:
        """Let each gradient of `weight` be made tidy, or refused, when it arrives."""
        if self.watched is not None and self.watched() is weight:
            return
        self.watched = ref(weight)
        wanted = weight.requires_grad

        def tidy(grad: Tensor) -> Tensor:
            tidied = coalesced(row_sparse(grad), drop=self.padding_idx)
            if tidied._values().data_ptr() == grad._values().data_ptr():
                tidied = tidied.clone()  # clipping works in place, and these numbers may be somebody else's
            return tidied

        tidy.__torch_unserializable__ = True  # type: ignore[attr-defined]
        weight.requires_grad_(True).register_hook(tidy)
        weight.requires_grad_(wanted)
        weight.row_ledger = self  # type: ignore[attr-defined]

    @property
    def step(self) -> int:
        """Steps that the optimizer made on this table."""
        return self.history.step if self.history is not None else 0

    @property
    def attached(self) -> bool:
        """Whether an optimizer has made a step on this table."""
        return self.history is not None

    def detach(self) -> None:
        """Forget the optimizer; call it when all rows are up to date."""
        self.history: History | None = None
        self.rows_at = self.moments_at = self.exp_avg = self.exp_avg_sq = torch.empty(0)

    def attach(self, weight: Tensor, step: int, moments: tuple[Tensor, Tensor], betas: Betas) -> None:
        """Follow the optimizer that holds these moments, all right after `step`; a no-op if that is so already.

        Raises:
            ShapeError: The moments are of another size than the table.
        """
        exp_avg, exp_avg_sq = moments
        if self.history is not None and self.exp_avg is exp_avg and self.exp_avg_sq is exp_avg_sq:
            if self.history.betas == betas:
                return
            self.flush(weight, moments=True)
            self.history = History(step, betas)
            return
        if self.history is not None:
            self.flush(weight, moments=True)
        self.check_size(weight, exp_avg)
        history = History(step, betas)
        self.exp_avg, self.exp_avg_sq, self.history = exp_avg, exp_avg_sq, history
        self.rows_at = torch.full(weight.shape[:1], step, dtype=torch.int32, device=weight.device)
        self.moments_at = self.rows_at.clone()

    def catch_up(self, weight: Tensor, ids: Tensor) -> None:
        """Bring the rows `ids`, which may repeat, up to date."""
        if self.history is None:
            return
        self.check_size(weight)
        ids = ids.flatten()
        behind = ids[self.rows_at.index_select(0, ids) < self.step]
        if len(behind):
            self._bring(weight, torch.unique(behind).long())

    def begin_step(self, rows: Tensor, lr: float, weight_decay: float) -> list[Tensor]:
        """Note that the optimizer makes a step on `rows`, whose values are up to date.

        Returns:
            For both moments of these rows, by what they decay up to and with this step, `(U, 1)`.
        """
        assert self.history is not None
        moments_at = self.moments_at.index_select(0, rows)
        now = self.history.record(lr, weight_decay)
        lag = (now - moments_at).double().unsqueeze(1)
        self.rows_at[rows] = now
        self.moments_at[rows] = now
        return [torch.pow(beta, lag).to(compute_type(self.exp_avg)) for beta in self.history.betas[:2]]

    def flush(self, weight: Tensor, start: int = 0, stop: int | None = None, *, moments: bool = False) -> None:
        """Bring rows `start` to `stop - 1` up to date, in chunks; with `moments`, also the optimizer's state."""
        if self.history is None:
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
    def _bring(self, weight: Tensor, rows: Tensor) -> None:
        """Bring different rows, all of them behind, up to date."""
        history = self.history
        assert history is not None
        weight = weight.detach()
        moments_at = self.moments_at[rows]
        touched = moments_at > 0
        never = rows[~touched]
        if len(never) and history.decays:
            self._shrink(weight, never, history)
        rows, moments_at = rows[touched], moments_at[touched]
        self.rows_at[never] = history.step
        if not len(rows):
            return
        rows_at = self.rows_at[rows].cpu().numpy().astype(np.int64)
        gaps, inverse = np.unique(rows_at, return_inverse=True)
        solved = history.gaps(gaps, tolerance=TOLERANCES.get(weight.dtype, TOLERANCE))
        nodes, weights = solved.nodes[inverse], solved.weights[inverse]
        lag = (rows_at - moments_at.cpu().numpy())[:, None]  # values were caught up for a reader, moments were not
        if lag.any():
            beta1, beta2, _ = history.betas
            nodes, weights = nodes * beta2 ** (-0.5 * lag), weights * (beta1 / math.sqrt(beta2)) ** lag
        kept, nodes_q, weights_q = (
            torch.from_numpy(each).to(weight.device, compute_type(weight))
            for each in (solved.kept[inverse][:, None], nodes, weights)
        )
        chunks = RowChunks(rows, weight, self.exp_avg, self.exp_avg_sq)
        room = chunks.scratch()
        for part, (p, m, v) in chunks:
            move(p, m, root_(v), kept[part], nodes_q[part], weights_q[part], room[: len(p)])
            chunks.write(weight, p)
        self.rows_at[rows] = history.step

    def _shrink(self, weight: Tensor, rows: Tensor, history: History) -> None:
        """Rows that never had a gradient know weight decay only."""
        kept = torch.from_numpy(history.kept(self.rows_at[rows].cpu().numpy().astype(np.int64)))
        kept = kept.unsqueeze(1).to(weight.device, compute_type(weight))
        chunks = RowChunks(rows, weight)
        for part, (p,) in chunks:
            chunks.write(weight, p.mul_(kept[part]))

    @torch.no_grad()
    def _decay_moments(self, low: int, high: int) -> None:
        assert self.history is not None
        at = self.moments_at[low:high]
        rows = ((at < self.step) & (at > 0)).nonzero().squeeze(1)
        lag = (self.step - at[rows]).double().unsqueeze(1)
        rows = rows + low
        factors = [torch.pow(beta, lag).to(compute_type(self.exp_avg)) for beta in self.history.betas[:2]]
        chunks = RowChunks(rows, self.exp_avg, self.exp_avg_sq)
        for part, (m, v) in chunks:
            chunks.write(self.exp_avg, m.mul_(factors[0][part]))
            chunks.write(self.exp_avg_sq, v.mul_(factors[1][part]))
        self.moments_at[rows] = self.step


@contextmanager
def raw_rows(model: nn.Module) -> Iterator[None]:
    """Let `state_dict()` take rows that are behind as they are: for a checkpoint that keeps the ledger beside them."""
    ledgers = [each.row_ledger for each in model.parameters() if hasattr(each, "row_ledger")]
    for ledger in ledgers:
        ledger.raw = True
    try:
        yield
    finally:
        for ledger in ledgers:
            ledger.raw = False


def row_sparse(grad: Tensor) -> Tensor:
    """`grad`, if it is row-sparse.

    Raises:
        ShapeError: It is dense.
    """
    if grad.layout is not torch.sparse_coo:
        raise ShapeError(
            f"A dense gradient {tuple(grad.shape)} arrived at a row-sparse table: something read all rows with "
            f"gradients on (a tied head, logits(), loss(), or weight itself). Read it under torch.no_grad(), give the "
            f"model a head of its own, or build the table with row_sparse=False."
        )
    return grad


def coalesced(grad: Tensor, *, drop: int | None = None) -> Tensor:
    """A row-sparse gradient with each row once, in order: sorted, and summed in the order of the batch.

    Args:
        grad: Sparse COO, `(V, D)`, rows in any order.
        drop: A row to leave out.
    """
    rows, values = grad._indices()[0], grad._values()
    if not (rows[1:] > rows[:-1]).all():  # not `is_coalesced()`: autograd forgets that flag when it stores a gradient
        ids, order = torch.sort(rows, stable=True)
        rows, counts = torch.unique_consecutive(ids, return_counts=True)
        values = F.embedding_bag(order, values, counts.cumsum(0) - counts, mode="sum")
    if drop is not None:
        kept = rows != drop
        if not kept.all():
            rows, values = rows[kept], values[kept]
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, grad.shape, is_coalesced=True, check_invariants=False)


class RowChunks:
    """Rows of some tables, a chunk that fits the cache at a time, in the type that is computed in.

    Args:
        rows: Which.
        *tables: Of the same size; the copies that iterating gives are overwritten by the next chunk's.

    Example:
        >>> table = torch.ones(9, 2)
        >>> chunks = RowChunks(torch.tensor([2, 7]), table)
        >>> for part, (values,) in chunks:
        ...     chunks.write(table, values.mul_(3))
        >>> table[:, 0]
        tensor([1., 1., 3., 1., 1., 1., 1., 3., 1.])
    """

    def __init__(self, rows: Tensor, *tables: Tensor) -> None:
        self.rows = rows
        self.tables = tables
        self.size = max(1, min(len(rows), NUMBERS_AT_ONCE // tables[0].shape[1]))
        self.part = rows[:0]

    def scratch(self) -> Tensor:
        """Room for a chunk, in the type that is computed in."""
        table = self.tables[0]
        return table.new_empty((self.size, table.shape[1]), dtype=compute_type(table))

    def __iter__(self) -> Iterator[tuple[slice, list[Tensor]]]:
        room = [table.new_empty((self.size, table.shape[1])) for table in self.tables]
        for number, rows in enumerate(self.rows.split(self.size)):
            self.part, part = rows, slice(number * self.size, (number + 1) * self.size)
            found = [each[: len(self.part)] for each in room]
            for table, values in zip(self.tables, found, strict=True):
                torch.index_select(table, 0, self.part, out=values)
            yield part, [values.to(compute_type(values)) for values in found]

    def write(self, table: Tensor, values: Tensor) -> None:
        """Put the present chunk's rows of `table` back."""
        table.index_copy_(0, self.part, values.to(table.dtype))


def compute_type(table: Tensor) -> torch.dtype:
    """float32, or float64 for tables of that type."""
    return torch.float64 if table.dtype == torch.float64 else torch.float32


def root_(squares: Tensor) -> Tensor:
    """The square root, in place: by the reciprocal one, which a CPU makes faster than `torch.sqrt`."""
    return squares.rsqrt_().reciprocal_()


def move(p: Tensor, m: Tensor, root: Tensor, kept: Tensor, nodes: Tensor, weights: Tensor, room: Tensor) -> None:
    """`p = p * kept - m * sum_q weights[:, q] / (root + nodes[:, q])` in place, in `room` and `root`'s memory too."""
    pushed = torch.div(weights[:, :1], torch.add(root, nodes[:, :1], out=room))
    for q in range(1, nodes.shape[1]):
        pushed.addcdiv_(weights[:, q : q + 1], torch.add(root, nodes[:, q : q + 1], out=room))
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
