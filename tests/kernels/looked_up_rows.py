"""Laws of look-ups by Triton kernels, for the tests and for the mistakes on purpose."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from interpreted import interpreted
from torch import Tensor

from embedlayer.core.index_checks import clamp_and_record
from embedlayer.inputs.fused import gather_scale_add_drop, plain_scale_add_drop
from embedlayer.kernels.gpu.launch import launch, launches_observed
from embedlayer.kernels.index_check import IndexCheck
from embedlayer.kernels.input import Dropout, StoredRows

ROWS, PLACES, OFFSET = 11, 9, 2
ADDENDS = ["none", "(T,)", "(1, T)", "(B, T)", "positions (T,)", "positions (B, T)"]


def some_ids(shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
    """Return IDs of which two are outside if there are several, on the default device."""
    ids = torch.randint(ROWS, shape)
    if ids.numel() > 3:
        ids.view(-1)[2], ids.view(-1)[-1] = ROWS + 5, -3
    return ids.to(dtype)


def mask_of(dropout: float, shape: tuple[int, ...]) -> Tensor:
    """Return the factors 0 and 1 / (1 - dropout) of the CPU for the present seed, in float64, on the default device."""
    drawn = Dropout.drawn(dropout)
    like = torch.empty(0, shape[-1], dtype=torch.float64)
    return drawn.mask(0, math.prod(shape[:-1]), like).view(shape) * drawn.growth


def rows_of(weight: Tensor, ids: Tensor, size: int, padding_idx: int | None) -> Tensor:
    """Return the definition of a look-up that records bad IDs: zeros for them, and no gradient."""
    is_bad = (ids < 0) | (ids >= size)
    return F.embedding(ids.clamp(0, size - 1), weight, padding_idx).masked_fill(is_bad.unsqueeze(-1), 0)


def assert_no_worse_than_the_definition(
    dtype: torch.dtype,
    added: str,
    scale: float | str | None,
    dropout: float,
    shape: tuple[int, ...],
    width: int,
) -> None:
    """Compare values, gradients and records of a look-up by the kernel with those of plain operators in float64.

    Args:
        dtype: Dtype of the rows.
        added: What is added, one of `ADDENDS`.
        scale: Factor on rows, or `"tensor"`.
        dropout: Probability of a zero.
        shape: Shape of the IDs.
        width: Width of a row.
    """
    torch.manual_seed(3)
    padding_idx = 4 if dropout else None
    ids = some_ids(shape, torch.int32 if width == 7 else torch.int64)
    factor = torch.tensor(1.5, dtype=dtype) if scale == "tensor" else scale
    sizes = {"none": (), "(T,)": (5,), "(1, T)": (1, 5) if len(shape) == 2 else (5,), "(B, T)": shape}.get(
        added, (PLACES + OFFSET,)
    )
    weight = torch.randn(ROWS, width).to(dtype)
    addend = torch.randn(*sizes, width).to(dtype) if sizes else None
    positions = None
    if added.startswith("positions"):
        positions = torch.randint(-OFFSET, PLACES, shape if added.endswith("(B, T)") else (5,))
        positions.view(-1)[1] = PLACES
    grad = torch.randn(*shape, width).to(dtype)
    checks = IndexCheck(ROWS, "token id"), IndexCheck(PLACES, "position", offset=OFFSET)

    def kernel(weight: Tensor, addend: Tensor | None) -> Tensor:
        more = addend if positions is None or addend is None else StoredRows(positions, addend, check=checks[1])
        return gather_scale_add_drop(StoredRows(ids, weight, padding_idx, check=checks[0]), factor, more, dropout)

    def plain(weight: Tensor, addend: Tensor | None) -> Tensor:
        more = addend
        if positions is not None and addend is not None:
            more = rows_of(addend, positions + OFFSET, PLACES + OFFSET, None)
        scaled = factor.to(weight.dtype) if isinstance(factor, Tensor) else factor
        x = plain_scale_add_drop(rows_of(weight, ids.long(), ROWS, padding_idx), scaled, more, 0.0)
        return x * mask_of(dropout, tuple(x.shape)).to(x.dtype) if dropout else x

    def results(compute, dtype: torch.dtype) -> list[Tensor]:
        leaves = [each.detach().to(dtype).requires_grad_() for each in (weight, addend) if each is not None]
        torch.manual_seed(5)
        y = compute(leaves[0], leaves[1] if len(leaves) > 1 else None)
        y.backward(grad.to(dtype))
        return [each.detach().double() for each in (y, *(leaf.grad for leaf in leaves))]

    names: list[str] = []
    with launches_observed(lambda each: names.append(each.name)):
        ours = results(kernel, dtype)
    exact, usual = results(plain, torch.float64), results(plain, dtype)
    assert "gather_scale_add_drop" in names
    for found, theirs, right in zip(ours, usual, exact, strict=True):
        error, own = ((each - right).abs().max().item() for each in (found, theirs))
        assert error <= 1.5 * own + torch.finfo(dtype).eps * right.abs().max().item()
    first = (2, ROWS + 5, shape[-1])
    assert checks[0].first_bad_index.tolist() == list(first)
    if positions is not None:
        assert checks[1].first_bad_index.tolist() == [1, PLACES + OFFSET, 5]


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
        launch("input", "gather_scale_add_drop", x=weight, ids=ids, record=record, kept_ids=kept, out=out,
               scale=1.0, seed=0, growth=1.0, **none, **sizes, **more)  # fmt: skip
    assert torch.equal(out[-3:], weight[ids[-3:]])
    assert record.tolist() == [-1] * 3
