"""The row-sparse table: a training step reads and writes only the rows of the batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.errors import ShapeError
from embedlayer.core.index_checks import INTEGERS, raise_if_outside
from embedlayer.core.partitioned import gathers_weights, is_sharded
from embedlayer.core.shapes import Ids, Vectors
from embedlayer.core.torch_state import (
    fusible,
    is_transformed,
    plain_operators_only,
    without_dispatch,
)
from embedlayer.kernels.input import StoredRows
from embedlayer.row_sparse.hooks import (
    RowSparseParameter,
    look_up_rows,
    look_up_rows_between_graphs,
    release,
    watch,
    with_updates_applied,
)
from embedlayer.row_sparse.pending_updates import PendingUpdates, pending_updates_of
from embedlayer.tables.dense_table import DenseTable


class RowSparseEmbedding(DenseTable, checks_ids=True):
    """One learned row per token, `out[..., :] = scale * weight[ids]`, with gradients of the looked-up rows only.

    A backward pass gives a sparse gradient. Train such a table with `RowAdamW`, which has the results of dense AdamW.
    Between its steps, updates of the other rows are pending; they are applied when an operator reads or writes the
    weight (`RowSparseParameter`). Torch's gradient clipping works. A head cannot be tied to it. With gradients on,
    graphs of `torch.compile` end at the look-up, and with `fullgraph=True` torch raises
    `torch._dynamo.exc.Unsupported`. `torch.optim.AdamW` raises "Adam does not support sparse gradients, please consider
    SparseAdam instead", but `SparseAdam` has other results than AdamW.

    It is an `nn.Embedding` with `sparse=True` and the parameter `weight`, `(num_rows, D)`.

    Args:
        vocab_size: Number of tokens, V.
        embed_dim: Width of a row, D.
        padding_idx: As in `TokenEmbedding`, as all further arguments.

    Raises:
        SizeError: A size is below 1, or an argument is not supported.
        TypeError: A size is missing, passed under both names or not an integer, or an argument is unknown.

    Example:
        >>> table = RowSparseEmbedding(100, 8)
        >>> optimizer = RowAdamW(table.parameters(), lr=0.1)
        >>> table(torch.tensor([[1, 2, 3]])).sum().backward()
        >>> optimizer.step()
        >>> table.weight.grad.coalesce().indices()
        tensor([[1, 2, 3]])
    """

    row_sparse = True

    pending_updates: PendingUpdates | None = None
    """Optimizer steps that rows have not taken yet."""

    def look_up(self, ids: Ids) -> Vectors:
        """Return `weight[ids]` without `scale`, `(...)` to `(..., D)`. See `LookupTable.look_up` for the errors."""
        rows = self._parameters.get("weight")
        if (
            type(rows) is RowSparseParameter
            and type(ids) is Tensor
            and ids.dtype in INTEGERS
            and device_kind(ids) == "cpu"
            and not (rows.shape[0] == self._stated_rows != self._stated_vocab_size)
            and fusible(rows)
        ):
            try:  # the IDs are checked before updates are applied
                return look_up_rows(ids, rows)
            except IndexError:
                raise_if_outside(ids, rows.shape[0], "token id")
                raise
        weight = self._read_weight()
        ids, outside = self._current_check()(ids)
        if is_transformed(weight) or plain_operators_only():
            return self._looked_up(ids, weight, outside)
        compiling = torch.compiler.is_compiling()
        if not isinstance(weight, RowSparseParameter):
            if not compiling:
                self._refuse_divided_rows(weight)
            return self._looked_up(ids, weight, outside, sparse=not compiling)
        if not compiling:
            vectors = look_up_rows(ids, weight)
        elif torch.is_grad_enabled() and weight.requires_grad:
            vectors = look_up_rows_between_graphs(ids, weight)
        else:  # in eager mode the parameter applies updates
            vectors = F.embedding(with_updates_applied(ids, self._handle, True), weight)
        return vectors if outside is None else vectors.masked_fill(outside.unsqueeze(-1), 0)

    def stored(self, ids: Ids) -> StoredRows | None:
        """Return IDs and the weight, from which a kernel on a CPU gathers the vectors; see `LookupTable.stored`.

        Pending updates are not applied: read the rows in a block of `applied_rows`.
        """
        if device_kind(ids) != "cpu":
            return None
        weight = self._read_weight()
        self._refuse_divided_rows(weight)
        return StoredRows(ids, weight, self._current_check(), self.padding_idx, sparse=True)

    def apply_pending_updates(self, start: int = 0, stop: int | None = None) -> None:
        """Apply the AdamW steps that `RowAdamW` has delayed for rows `start` to `stop - 1`, in place.

        Afterwards these rows are those of dense AdamW.

        Torch functions that read `weight` do this themselves. Without effect inside a compiled function.

        Args:
            start: First row.
            stop: Last row + 1; `None` for all rows.

        Raises:
            StaleRowsError: The weight was written in place while updates were pending.
        """
        pending = None if torch.compiler.is_compiling() else pending_updates_of(self.weight)
        if pending is not None:
            pending.apply_all(self.weight, start, stop)

    def _current_rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows of the weight after applying their pending updates; in a compiled function a copy."""
        weight, in_memory = self._read_weight(), False
        if plain_operators_only():
            pass  # operators on the weight apply the updates, below all transforms
        elif not torch.compiler.is_compiling():
            if (pending := pending_updates_of(weight)) is not None:
                pending.apply_all(weight, start, stop)
            in_memory = isinstance(weight, RowSparseParameter)
        elif self.pending_updates is not None:
            if torch.is_grad_enabled() and weight.requires_grad:
                raise ShapeError("A graph with gradients reads all rows. See docs/errors.md, Row-sparse tables.")
            weight = with_updates_applied(weight.detach(), self._handle, False)
        if stop is None:
            return weight
        with without_dispatch() if in_memory else nullcontext():
            return weight[start:stop]

    def _refuse_divided_rows(self, weight: Tensor) -> None:
        """Raise `ShapeError` if the rows are divided between processes, in training."""
        if isinstance(weight, RowSparseParameter) or not (weight.requires_grad and torch.is_grad_enabled()):
            return
        gathered = pending_updates_of(weight) is None and gathers_weights(self)
        if gathered or is_sharded(weight):
            raise ShapeError(f"{self.num_rows} row-sparse rows are divided. See docs/errors.md, Row-sparse tables.")

    def _weight_assigned(self) -> None:
        """Attach `PendingUpdates` to a new weight, which starts without any."""
        weight = self._parameters.get("weight")
        if weight is None:
            return
        attached = pending_updates_of(weight)
        if self.pending_updates is not None and attached is self.pending_updates:
            return
        if self.pending_updates is not None:
            self.pending_updates.replaced = True
        self.pending_updates = attached or PendingUpdates(self.padding_idx)
        self._handle = self.pending_updates.handle
        watch(weight, self.pending_updates)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RowSparseEmbedding":
        """Move or cast the table, as in torch, and attach `PendingUpdates` to a new parameter."""
        with self._swappable_weight():
            super()._apply(fn, recurse)
        self._weight_assigned()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        with self._swappable_weight():
            super()._load_from_state_dict(*args)

    @contextmanager
    def _swappable_weight(self) -> Iterator[None]:
        """Context manager: let torch swap the weight with an ordinary parameter, and watch it again."""
        weight: Any = self._parameters.get("weight")
        swaps = (
            torch.__future__.get_swap_module_params_on_conversion()
            and pending_updates_of(weight) is not None
            and type(weight) is RowSparseParameter
        )
        if swaps:
            release(weight)
        try:
            yield
        finally:
            if swaps and self.pending_updates is not None:
                watch(weight, self.pending_updates)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("pending_updates", "_handle")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._weight_assigned()
