"""Columns that belong to other rows are found without a tokenizer."""

import pytest
import torch
from torch import Tensor

from embedlayer.analysis.column_blocks import column_blocks
from embedlayer.analysis.row_reader import RowReader


def related(count: int = 1200, width: int = 96) -> Tensor:
    """Rows around twenty directions, in random order."""
    centres = torch.randn(20, width)
    return centres[torch.randint(20, (count,))] + torch.randn(count, width)


ALL = torch.ones(1200, dtype=torch.bool)


@pytest.mark.parametrize("shift", [-3, -1, 1, 2])
@pytest.mark.parametrize(("start", "stop"), [(0, 48), (48, 96), (30, 62), (0, 32)])
def test_columns_that_hold_the_numbers_of_other_rows_are_named(start, stop, shift) -> None:
    rows = related()
    assert not column_blocks(RowReader(rows), ALL).is_fault
    shifted = rows.clone()
    shifted[:, start:stop] = rows.roll(-shift, 0)[:, start:stop]
    found = column_blocks(RowReader(shifted), ALL)
    assert found.is_fault
    if stop - start == 48:  # either half is the odd one
        assert (found.start, found.stop) in ((0, 48), (48, 96))
        assert abs(found.shift) == abs(shift)
    else:
        assert abs(found.start - start) + abs(found.stop - stop) <= 32
        assert found.shift == shift
    assert f"{found.start} to {found.stop - 1} belong to other rows" in found.sentence()
    assert f"ID {'+' if found.shift > 0 else '-'} {abs(shift)}" in found.sentence()


def test_permuted_columns_fit_no_other_row() -> None:
    rows = related()
    rows[:, 32:64] = rows[torch.randperm(1200)][:, 32:64]
    found = column_blocks(RowReader(rows), ALL)
    assert found.is_fault
    assert found.shift == 0
    assert "by chance 0.00" in found.sentence()


def test_random_few_and_narrow_rows_are_not_compared() -> None:
    assert column_blocks(RowReader(torch.randn(1200, 96)), ALL) is None
    assert column_blocks(RowReader(related(width=48)), ALL) is None
    assert column_blocks(RowReader(related(100)), ALL[:100]) is None
    assert column_blocks(RowReader(related()), torch.zeros(1200, dtype=torch.bool)) is None
