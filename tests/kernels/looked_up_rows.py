"""Laws of look-ups by Triton kernels, for the tests and for the mistakes on purpose."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from interpreted import interpreted
from kernel_paths import launched_kernels
from kernel_records import launch_kernel
from torch import Tensor

from embedlayer import LearnedPositionalEmbedding, PositionError, TokenEmbedding, TokenIdError, TransformerEmbedding
from embedlayer.core.index_checks import clamp_and_record
from embedlayer.kernels.index_check import IndexCheck

ROWS, PLACES, OFFSET = 11, 9, 2
ADDENDS = ["none", "(T,)", "positions (T,)", "positions (B, T)"]


def rows_of(weight: Tensor, ids: Tensor, padding_idx: int | None = None) -> Tensor:
    """Return the definition of a look-up that records bad IDs: zeros for them, and no gradient."""
    is_bad = (ids < 0) | (ids >= len(weight))
    return F.embedding(ids.clamp(0, len(weight) - 1), weight, padding_idx).masked_fill(is_bad.unsqueeze(-1), 0)


def assert_no_worse_than_the_definition(
    dtype: torch.dtype, added: str, scale: float | str | None, dropout: float, shape: tuple[int, ...], width: int
) -> None:
    """Compare values, gradients and records of a layer by the kernel with those of plain operators in float64.

    Args:
        dtype: Dtype of the rows.
        added: What is added, one of `ADDENDS`.
        scale: Factor on rows, or `"rounded"`, a tensor.
        dropout: Probability of a zero.
        shape: Shape of the IDs.
        width: Width of a row.
    """
    padding_idx, device = 4 if dropout else None, torch.empty(0).device
    factor = {"scale": "sqrt_dim", "round_scale": True} if scale == "rounded" else {"scale": scale}
    table = TokenEmbedding(ROWS, width, padding_idx, init_std=1.0, **factor)
    position = None if added == "none" else LearnedPositionalEmbedding(PLACES, width, offset=OFFSET)
    layer = TransformerEmbedding(ROWS, width, PLACES, dropout, table=table, position=position or "none")
    layer.to(device, dtype)
    ids = torch.randint(ROWS, shape, dtype=torch.int32 if width == 7 else torch.int64)
    ids.view(-1)[2], ids.view(-1)[-1] = ROWS + 5, -3
    places = torch.arange(shape[-1])
    if added.startswith("positions"):
        places = torch.randint(0, PLACES, shape if added.endswith("(B, T)") else shape[-1:])
        places.view(-1)[1] = PLACES
    grad, leaves = torch.randn(*shape, width).to(dtype), list(layer.parameters())
    with launched_kernels() as names:
        y = layer(ids, positions=places if added.startswith("positions") else None)
    assert "gather_scale_add_drop" in names
    found = [y, *torch.autograd.grad(y, leaves, grad)]
    factors = (y != 0).double() / (1 - dropout)

    def plain(dtype: torch.dtype) -> list[Tensor]:
        copies = [each.detach().to(dtype).requires_grad_() for each in leaves]
        x = rows_of(copies[0], ids.long(), padding_idx) * (1.0 if table.factor is None else table.factor)
        if position is not None:
            x = x + rows_of(copies[1], places + OFFSET)
        x = x * factors.to(dtype)
        return [x, *torch.autograd.grad(x, copies, grad.to(dtype))]

    for ours, theirs, right in zip(found, plain(dtype), plain(torch.float64), strict=True):
        error, own = ((each.double() - right).abs().max() for each in (ours, theirs))
        assert error <= 1.5 * own + 4 * torch.finfo(dtype).eps * right.abs().max()
    row = 0 if len(shape) == 1 else 2 // shape[-1]
    with pytest.raises(TokenIdError, match=f"token id {ROWS + 5} at row {row}, column 2"):
        layer.check()
    if added.startswith("positions"):
        with pytest.raises(PositionError, match=f"position {PLACES} at row 0, column 1"):
            layer.check()
    layer.check()


def with_bad(places: list[int], shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices with bad ones at some places, a mask of these, and the record that the definition makes."""
    ids, record = torch.randint(10, shape, dtype=dtype), torch.full((3,), -1)
    for place in places:
        ids.view(-1)[place] = -place - 1 if place % 2 else 10 + place
    return ids, clamp_and_record(ids, 10, record)[1], record


def assert_the_first_is_recorded(bad: list[int], dtype: torch.dtype) -> None:
    """A check records the first bad index of a call if the record is empty."""
    ids, outside, record = with_bad(bad, (12, 100), dtype)
    check = IndexCheck(10, "position")
    for _ in range(2):  # the record is that of the first call
        found = check.clamp_and_record(ids)
        assert torch.equal(found[0], ids.clamp(0, 9))
        assert torch.equal(found[1], outside)
        assert torch.equal(check.first_bad_index, record)
        ids, outside = ids.flip(0), outside.flip(0)


def assert_rows_beyond_2_to_31_are_read(folder: Path) -> None:
    """The last rows of a table of more than 2^31 numbers are read, and the last vectors of as many written."""
    width, rows = 1032, 2**31 // 1032 + 9
    weight, out = (
        torch.from_file(str(folder / name), shared=True, size=rows * width, dtype=torch.bfloat16).view(rows, width)
        for name in ("weight", "out")
    )
    weight[-3:] = torch.randn(3, width)
    kept, record = torch.empty(rows, dtype=torch.int64), torch.full((3,), -1)
    ids = torch.zeros(rows, dtype=torch.int64)
    ids[-3:] = torch.tensor([rows - 1, rows - 3, rows - 2])
    none = dict.fromkeys(("factor", "addend", "places", "places_record", "kept_places", "threshold"))
    sizes = {"tokens": rows, "units": width // 8, "UNIT": 8, "rows": rows, "offset": 0, "length": 1, "ignored": -1}
    more = dict.fromkeys(("addends", "places_count", "places_offset", "places_length"), 1)
    with interpreted() as run:
        run.programs = lambda grid: [(n, i) for n in range(rows - 3, rows) for i in range(grid[1])]
        launch_kernel("gather_scale_add_drop", x=weight, ids=ids, record=record, kept_ids=kept, out=out,
               scale=1.0, seed=0, growth=1.0, **none, **sizes, **more)  # fmt: skip
    assert torch.equal(out[-3:], weight[ids[-3:]])
    assert record.tolist() == [-1] * 3
