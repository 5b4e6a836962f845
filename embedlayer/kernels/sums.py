"""Sums of K looked-up rows on a CUDA device in one launch, with the check of the IDs.

`embedlayer.tables.sums.sum_vectors` is the definition; `embedlayer.tables.sums` runs the kernel of the CPU.
"""

from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.kernels.gpu.launch import launch
from embedlayer.kernels.kernel import operator


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
    """Compute the sums of `x[ids[..., k] + starts[k]]` over k, `(..., D)`; elsewhere than on CUDA return `None`."""
    if device_kind(x) != "cuda":
        return None
    shape, width = ids.shape[:-1], x.shape[1]
    out, factors = (x.new_empty((*shape, last)) for last in (width, streams))
    kept_ids = ids.new_empty((*shape, streams))
    unit = 8 if width % 8 == 0 else 1
    launch(
        "sums",
        "sum_streams",
        x=x,
        ids=ids,
        starts=starts,
        record=record,
        kept_ids=kept_ids,
        factors=factors,
        out=out,
        sums=shape.numel(),
        units=width // unit,
        columns=ids.shape[-1],
        streams=streams,
        rows=rows,
        shared=shared,
        ignored=ignored,
        length=length,
        UNIT=unit,
    )
    return out, kept_ids, factors
