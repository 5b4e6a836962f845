"""Operators on rows of a table on CUDA: sums of looked-up rows and of gradients, pending updates, optimizer steps.

`embedlayer.row_sparse.gradient`, `pending_updates` and `storage` define them, in plain operators, and call the numba
kernels of `embedlayer.kernels.cpu.rows`; `embedlayer.tables.sums` defines `sum_streams`. Nothing here waits for the
device.
"""

from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.kernels.gpu.launch import launch
from embedlayer.kernels.kernel import operator

LOW_BITS = 31
"""Bits of the lower half of a seed, so that both halves are positive numbers of 32 bits."""

RATES = ("add1", "add2", "factor", "addend", "update")
"""Names of the numbers of `embedlayer.row_sparse.history.StepRates` in kernels."""


@operator(
    "(Tensor x, Tensor ids, Tensor? starts, Tensor(a!) record, SymInt rows, SymInt streams, SymInt shared, "
    "SymInt ignored, SymInt length) -> (Tensor, Tensor, Tensor)",
    mutates=("record",),
)
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
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Compute the sums of `x[ids[..., k] + starts[k]]` over k, `(..., D)`; elsewhere than on CUDA return `None`.

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
    if device_kind(x) != "cuda":
        return None
    shape, width = ids.shape[:-1], x.shape[1]
    out, factors = (x.new_empty((*shape, last)) for last in (width, streams))
    kept_ids = ids.new_empty((*shape, streams))
    tensors = {"x": x, "ids": ids, "starts": starts, "record": record}
    tensors |= {"kept_ids": kept_ids, "factors": factors, "out": out}
    numbers = {"sums": shape.numel(), "columns": ids.shape[-1], "streams": streams, "rows": rows}
    numbers |= {"shared": shared, "ignored": ignored, "length": length}
    launch("sums", "sum_streams", **tensors, **numbers, **_columns(x))
    return out, kept_ids, factors


@operator("(Tensor rows, Tensor order, Tensor values, SymInt? drop) -> Tensor")
def sum_equal_rows(rows: Tensor, order: Tensor, values: Tensor, drop: int | None) -> Tensor:
    """Return the sum of the vectors of equal rows at the first place of each row, and zeros elsewhere, `(N, D)`.

    - `rows`: sorted row numbers, int64, `(N,)`.
    - `order`: their places in `values`, `(N,)`.
    - `drop`: row whose sum is 0, or `None`.
    """
    sums = values.new_empty(values.shape)
    arguments = {"rows": rows, "order": order, "values": values.contiguous(), "sums": sums, "places": len(rows)}
    launch("rows", "sum_equal_rows", **arguments, **_columns(sums), drop=-1 if drop is None else drop)
    return sums


@operator(
    "(Tensor? rows, Tensor? gradients, Tensor record, Tensor(a!) value_steps, Tensor(b!) moment_steps, "
    "Tensor(c!) weight, Tensor(d!)? exp_avg, Tensor(e!) exp_avg_sq, SymInt first_row, SymInt stop_row, SymInt start, "
    "SymInt step, SymInt most_terms, SymInt? seed, bool decay_moments, float[] rates) -> ()",
    mutates=("value_steps", "moment_steps", "weight", "exp_avg", "exp_avg_sq"),
)
def update_rows(
    rows: Tensor | None,
    gradients: Tensor | None,
    record: Tensor,
    value_steps: Tensor,
    moment_steps: Tensor,
    weight: Tensor,
    exp_avg: Tensor | None,
    exp_avg_sq: Tensor,
    first_row: int,
    stop_row: int,
    start: int,
    step: int,
    most_terms: int,
    seed: int | None,
    decay_moments: bool,
    rates: list[float],
) -> bool:
    """Apply pending updates of rows in place, and then make an optimizer's step on them if they have gradients.

    - `rows`: sorted row numbers, int64, `(N,)`, which may repeat; `None` for those from `first_row` to `stop_row - 1`.
    - `gradients`: sums of the gradients of equal rows at the first place of each, `(N, D)`; `None` for no step.
    - `record`: `RowSteps.record_on_device`.
    - `value_steps`: last step that each row's values include, `(V,)`.
    - `exp_avg_sq`: second moments, `(V, D)` or `(V, 1)`.
    - `first_row`: first row; 0 with `rows`.
    - `step`: number of the step, or of the last one if no step is made.
    - `most_terms`: number of skipped steps after which others are negligible.
    - `rates`: the numbers of `StepRates`; empty for no step.
    """
    rowwise = exp_avg_sq.shape[1] == 1
    name = ("apply_pending", "apply_pending_rowwise", "adamw_step", "rowwise_step")[rowwise + 2 * bool(rates)]
    halves = (None, None) if seed is None else (seed >> LOW_BITS, seed & ((1 << LOW_BITS) - 1))
    tensors = {"rows": rows, "gradients": gradients, "record": record, "weight": weight}
    tensors |= {"value_steps": value_steps, "moment_steps": moment_steps, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    numbers: dict[str, float | None] = dict(zip(("seed_high", "seed_low"), halves, strict=True))
    numbers |= {"first_row": first_row, "stop_row": stop_row, "start": start, "step": step, "most_terms": most_terms}
    numbers |= dict(zip(RATES, rates, strict=True)) if rates else dict.fromkeys(RATES)
    flags = {"ROWWISE": rowwise, "DECAY": decay_moments}
    launch("rows", name, **tensors, **_columns(weight), **numbers, **flags)
    return True


def _columns(table: Tensor) -> dict[str, int]:
    """Return the arguments of kernels that say how many columns a table has."""
    unit = 8 if table.shape[1] % 8 == 0 else 1
    return {"units": table.shape[1] // unit, "UNIT": unit}
