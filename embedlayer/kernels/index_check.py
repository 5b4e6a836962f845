"""The check of token IDs and positions that a layer makes before a look-up.

`embedlayer.core.index_checks` says what a bad index is and how its error reads. On a CUDA device one Triton kernel
checks all indices; a kernel that looks rows up checks them itself and fills the same record.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from embedlayer.core.computed_buffers import apply_or_allocate
from embedlayer.core.devices import device_kind
from embedlayer.core.index_checks import (
    Kind,
    as_ids,
    check_integer_ids,
    check_integer_positions,
    clamp_and_record,
    length_of,
    outside_error,
    raise_recorded_target,
    rows_without_record,
    target_records,
)
from embedlayer.core.shapes import IdsLike
from embedlayer.kernels.gpu.launch import imported_launches, launch
from embedlayer.kernels.operation import Operation

check_launches = partial(imported_launches, "embedlayer.kernels.gpu.index_check")

CLAMP_AND_RECORD = Operation(
    "check of IDs or positions, for look-ups that do not make it",
    clamp_and_record,
    gpu=check_launches,
    launches=["clamp_and_record"],
)


@CLAMP_AND_RECORD.operator(mutates=("record",))
def clamp_and_record_indices(indices: Tensor, rows: int, record: Tensor) -> tuple[Tensor, Tensor]:
    """Clamp row numbers and record the first bad one, in one launch; the results are contiguous."""
    indices = indices.contiguous()
    clamped, outside = torch.empty_like(indices), torch.empty_like(indices, dtype=torch.bool)
    tensors = {"indices": indices, "record": record, "clamped": clamped, "outside": outside}
    sizes = {"count": indices.numel(), "rows": rows, "length": length_of(indices)}
    launch(check_launches(), "clamp_and_record", **tensors, **sizes)
    return clamped, outside


class IndexCheck(nn.Module):
    """Check token IDs or positions before a look-up; a layer calls this submodule in its `forward`.

    On the CPU an index outside the table raises an error at once. On an accelerator it is clamped and recorded, and
    `check` raises the error later. Under `torch.func` transforms and in `torch.export` values cannot be read, so it is
    clamped to the first or the last row without an error.

    Args:
        size: Number of valid indices, which count from 0.
        kind: What the indices are, for error messages: `"token id"`, `"position"` or `"token id of stream 3"`.
        offset: Number that is added to each index before the look-up. The table has `size + offset` rows, and
            indices from `-offset` on are accepted.
    """

    first_bad_index: Tensor
    """Flat position, value and length of the last dimension of the first bad index; -1s if there was none.

    It is not a buffer, because it is no state of the model, DistributedDataParallel would overwrite it with that of
    rank 0, and Opacus refuses trainable layers with buffers.
    """

    def __init__(self, size: int, kind: Kind, *, offset: int = 0) -> None:
        super().__init__()
        self.size = size
        self.offset = offset
        self.kind: Kind = kind
        self.first_bad_index = torch.full((3,), -1)

    def move_record(self, device: torch.device | str) -> None:
        """Move `first_bad_index`, the record of the first bad index, to `device`.

        A record on the meta device has no values, so it is replaced by an empty one.
        """
        lost = self.first_bad_index.is_meta
        self.first_bad_index = torch.full((3,), -1, device=device) if lost else self.first_bad_index.to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "IndexCheck":
        """Cast or move the module as torch does, and move its record of the first bad index to the same device."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.move_record(apply_or_allocate(fn, self.first_bad_index).device)
        return self

    def forward(self, indices: IdsLike) -> tuple[Tensor, Tensor | None]:
        """Return row numbers that are safe to look up, and a mask of the bad indices.

        Returns:
            The row numbers, `indices + offset`, and a boolean mask of the same shape that is `True` for bad indices.
            Only accelerators need the mask: it is `None` on the CPU and meta device, in exports and under `torch.func`
            transforms.

        Raises:
            ShapeError: `indices` are not int32 or int64, or `as_ids` cannot convert them.
            TokenIdError: A token ID is outside, on the CPU; the message names row, column, value and size.
            PositionError: A position is outside, on the CPU.
        """
        if self.kind == "position":
            check_integer_positions(indices)
        indices = indices if isinstance(indices, Tensor) else as_ids(indices, beside=self.first_bad_index)
        rows = rows_without_record(indices, self.size, self.kind, offset=self.offset)
        return (
            (rows, None)
            if rows is not None
            else self.clamp_and_record(indices + self.offset if self.offset else indices)
        )

    def clamp_and_record(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Clamp row numbers on an accelerator and record the first bad one, without waiting for the device.

        The record changes only if it is empty; `check` reads and clears it.

        Returns:
            The clamped row numbers, and a boolean mask of the same shape that is `True` for the bad ones.
        """
        results: tuple[Tensor, Tensor]
        results = CLAMP_AND_RECORD(indices, self.size + self.offset, self.record_on(indices.device))
        return results

    def require_integers(self, indices: Tensor) -> None:
        """Check the dtype of indices that a look-up kernel checks."""
        (check_integer_positions if self.kind == "position" else check_integer_ids)(indices)

    def record_on(self, device: torch.device) -> Tensor:
        """Return `first_bad_index` on the device of the indices, moved there if weights were moved one by one."""
        if self.first_bad_index.device != device:
            self.move_record(device)
        return self.first_bad_index

    def extra_repr(self) -> str:
        """Return the kind and the number of rows, for `print`: `"token id < 100"`."""
        return f"{self.kind} < {self.size}"

    def check(self) -> None:
        """Wait for the device, and raise the error of the first bad index since the last check, if there was one.

        The record of the bad index is cleared.
        """
        if device_kind(self.first_bad_index) != "meta":
            self.raise_recorded(self.first_bad_index.tolist())

    def raise_recorded(self, values: list[int]) -> None:
        """Empty the record of the first bad index and raise its error, if it holds one."""
        place, value, length = values
        if place >= 0:
            self.first_bad_index.fill_(-1)
            where = {"row": place // length, "column": place % length}
            raise outside_error(self.kind, value - self.offset, self.size, first=-self.offset, **where)


class StreamCheck(IndexCheck):
    """Record of the first bad ID of K streams, which one kernel on CUDA checks; see `kernels.rows.sum_streams`.

    Args:
        sizes: Number of rows of each stream, K numbers.
        shared: ID that is valid in each stream and has its own row; -1 for none.
    """

    def __init__(self, sizes: Sequence[int], shared: int) -> None:
        super().__init__(sum(sizes), "token id of a stream")
        self.sizes, self.shared = tuple(sizes), shared

    def raise_recorded(self, values: list[int]) -> None:
        """Empty the record and raise its error, if it holds one; the place is that among the K columns of IDs."""
        place, value, length = values
        if place >= 0:
            self.first_bad_index.fill_(-1)
            token, k = divmod(place, len(self.sizes))
            row, column = divmod(token, length)
            raise outside_error(f"token id of stream {k}", value, self.sizes[k], first=0, row=row, column=column)


def check_indices(module: nn.Module, *flags: Tensor) -> list[bool]:
    """Wait once for each device, and raise the error of a bad index that was recorded since the last check.

    These are the indices that the `IndexCheck`s of a module recorded, and the targets of all losses in this process
    that did not wait for the device. The next loss that waits raises the error of a target too. Of several recorded
    indices one raises its error here; the others stay recorded for the next call.

    - `*flags`: boolean scalars on one device, which are read with the indices there, without another wait.

    Returns:
        The values of the flags.

    Raises:
        TokenIdError: A token ID or a target was outside.
        PositionError: A position was outside.
        StaleRowsError: Weights of a patched model were changed before logits were read; see `DeferredLogits`.
    """
    records: list[tuple[Tensor, Callable[[list[int]], None]]]
    records = [(each.first_bad_index, each.raise_recorded) for each in module.modules() if isinstance(each, IndexCheck)]
    records += [(record, partial(raise_recorded_target, record)) for record in target_records.values()]
    read: list[int] = []
    records = [(flag.view(1).long(), read.extend) for flag in flags] + records
    for device in {record.device for record, _ in records if device_kind(record) != "meta"}:
        here = [(record, use) for record, use in records if record.device == device]
        values = torch.cat([record for record, _ in here]).tolist()
        for record, use in here:
            use(values[: len(record)])
            del values[: len(record)]
    return [value > 0 for value in read]
