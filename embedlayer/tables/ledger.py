"""Which rows of a table are behind, and by how much: the ledger that a row-sparse table keeps for its optimizer.

`RowAdamW` writes to the rows of a batch only. The ledger remembers the last step of each row, and brings rows up to date
just before they are read. It stands on the parameter (`weight.row_ledger`), because that is what an optimizer gets.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedlayer.errors import ShapeError, SizeError
from embedlayer.files import JsonObject
from embedlayer.tables.catch_up import Betas, History

ROWS_AT_ONCE = 4096
NUMBERS_AT_ONCE = 1 << 18
"""A chunk of rows of this many numbers stays in the processor's cache while it is worked on."""

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
        padding_idx = self.padding_idx

        def tidy(grad: Tensor) -> Tensor:
            return coalesced(row_sparse(grad), drop=padding_idx)

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

    def begin_step(self, rows: Tensor, lr: float, weight_decay: float) -> tuple[int, tuple[Tensor, Tensor] | None]:
        """Note that the optimizer makes a step on `rows`, which are up to date.

        Returns:
            The number of steps before, and by what the moments of these rows must be multiplied to be right after
            that step (`None` where they are).
        """
        assert self.history is not None
        before = self.step
        moments_at = self.moments_at.index_select(0, rows)
        lag = torch.where(moments_at > 0, before - moments_at, 0).double().unsqueeze(1)
        factors = None
        if lag.any():
            compute = torch.float64 if self.exp_avg.dtype == torch.float64 else torch.float32
            beta1, beta2, _ = self.history.betas
            factors = (torch.pow(beta1, lag).to(compute), torch.pow(beta2, lag).to(compute))
        now = self.history.record(lr, weight_decay)
        self.rows_at[rows] = now
        self.moments_at[rows] = now
        return before, factors

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
        tensors = {"rows_at": self.rows_at, "moments_at": self.moments_at, "history": self.history.lines}
        return tensors, {"start": self.history.start, "betas": list(self.history.betas)}

    def load_state(
        self, weight: Tensor, moments: tuple[Tensor, Tensor], tensors: dict[str, Tensor], rest: JsonObject
    ) -> None:
        """Put in what `state()` gave, for rows and moments that were saved beside it."""
        self.detach()
        self.attach(weight, rest["start"], moments, Betas(*rest["betas"]))
        assert self.history is not None
        self.history.load(tensors["history"])
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
                f"The table is {tuple(weight.shape)} and the optimizer's state for it {tuple(moments.shape)}: the table "
                f"was resized behind the optimizer's back, or the state is another table's. Build the optimizer again "
                f"after resizing."
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
        kept = history.kept(torch.tensor([history.start]))
        if len(never) and float(kept) != 1:
            self._shrink(weight, never, history)
        rows, moments_at = rows[touched], moments_at[touched]
        self.rows_at[never] = history.step
        if not len(rows):
            return
        rows_at = self.rows_at[rows]
        gaps, inverse = torch.unique(rows_at.cpu(), return_inverse=True)
        solved = history.gaps(gaps.long(), tolerance=TOLERANCES.get(weight.dtype, TOLERANCE))
        beta1, beta2, _ = history.betas
        lag = (rows_at - moments_at).double().cpu().unsqueeze(1)  # values caught up before, moments not
        nodes, weights = solved.nodes[inverse], solved.weights[inverse]
        if lag.any():
            growth = torch.pow(beta2, -0.5 * lag)
            nodes, weights = nodes * growth, weights * torch.pow(beta1 / beta2**0.5, lag)
        compute = torch.float64 if weight.dtype == torch.float64 else torch.float32
        kept, nodes, weights = (
            each.to(weight.device, compute) for each in (solved.kept[inverse].unsqueeze(1), nodes, weights)
        )
        for part in _chunks(len(rows), weight.shape[1]):
            self._move(weight, rows[part], kept[part], nodes[part], weights[part])
        self.rows_at[rows] = history.step

    def _move(self, weight: Tensor, rows: Tensor, kept: Tensor, nodes: Tensor, weights: Tensor) -> None:
        """`p * kept - m * sum_q weights_q / (sqrt(v) + nodes_q)`, for one chunk of rows."""
        p, m, root = (each.index_select(0, rows) for each in (weight, self.exp_avg, self.exp_avg_sq))
        p, m, root = p.to(kept.dtype), m.to(kept.dtype), root.to(kept.dtype).sqrt_()
        pushed = torch.div(weights[:, :1], root + nodes[:, :1])
        below = torch.empty_like(root)
        for q in range(1, nodes.shape[1]):
            torch.add(root, nodes[:, q : q + 1], out=below)
            pushed.addcdiv_(weights[:, q : q + 1], below)
        p.mul_(kept).addcmul_(m, pushed, value=-1)
        weight.index_copy_(0, rows, p.to(weight.dtype))

    def _shrink(self, weight: Tensor, rows: Tensor, history: History) -> None:
        """Rows that never had a gradient know weight decay only."""
        kept = history.kept(self.rows_at[rows].long().cpu()).unsqueeze(1).to(weight.device)
        for part in _chunks(len(rows), weight.shape[1]):
            values = weight.index_select(0, rows[part])
            weight.index_copy_(0, rows[part], (values * kept[part].to(values.dtype)))

    @torch.no_grad()
    def _decay_moments(self, low: int, high: int) -> None:
        assert self.history is not None
        at = self.moments_at[low:high]
        rows = ((at < self.step) & (at > 0)).nonzero().squeeze(1)
        lag = (self.step - at[rows]).double().unsqueeze(1)
        rows = rows + low
        for part in _chunks(len(rows), self.exp_avg.shape[1]):
            for moment, beta in ((self.exp_avg, self.history.betas.beta1), (self.exp_avg_sq, self.history.betas.beta2)):
                values = moment.index_select(0, rows[part])
                moment.index_copy_(0, rows[part], values * torch.pow(beta, lag[part]).to(values.dtype))
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
            f"A dense gradient {tuple(grad.shape)} arrived at a row-sparse table: something read all rows with gradients "
            f"on (a tied head, logits(), loss(), or weight itself). Read it under torch.no_grad(), give the model a head "
            f"of its own, or build the table with row_sparse=False."
        )
    return grad


def coalesced(grad: Tensor, *, drop: int | None = None) -> Tensor:
    """A row-sparse gradient with each row once, in order: sorted, and summed in the order of the batch.

    Args:
        grad: Sparse COO, `(V, D)`, rows in any order.
        drop: A row to leave out.
    """
    if grad.is_coalesced() and drop is None:
        return grad
    ids, values = grad._indices()[0], grad._values()
    rows, order = torch.sort(ids, stable=True)
    rows, counts = torch.unique_consecutive(rows, return_counts=True)
    if not grad.is_coalesced():
        if len(rows) == len(ids):
            values = values.index_select(0, order)
        else:
            values = F.embedding_bag(order, values, counts.cumsum(0) - counts, mode="sum")
    if drop is not None:
        kept = rows != drop
        if not kept.all():
            rows, values = rows[kept], values[kept]
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, grad.shape, is_coalesced=True, check_invariants=False)


def _chunks(rows: int, width: int) -> list[slice]:
    size = max(1, NUMBERS_AT_ONCE // width)
    return [slice(start, start + size) for start in range(0, rows, size)]


@torch.library.custom_op("embedlayer::catch_up", mutates_args=("weight",))
def catch_up_operator(weight: Tensor, ids: Tensor, handle: int) -> None:
    """`RowLedger.catch_up` for torch.compile: one node of the graph."""
    _ledgers[handle].catch_up(weight, ids)


@catch_up_operator.register_fake
def _(weight: Tensor, ids: Tensor, handle: int) -> None:
    return None
