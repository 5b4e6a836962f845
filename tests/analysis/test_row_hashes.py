"""Equal rows are found by hashes of their bits."""

import pytest
import torch

from embedlayer.analysis.row_hashes import equal_rows, row_hashes
from embedlayer.analysis.row_reader import RowReader


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_equal_rows_and_only_these_have_equal_hashes(dtype) -> None:
    rows = torch.randn(200, 5).to(dtype)
    rows[50:60], rows[3] = rows[7].clone(), 0.0
    rows[4], rows[4, 0] = rows[3], -0.0
    hashes = row_hashes(RowReader(rows))
    equal = (rows[:, None] == rows[None]).all(-1)
    assert torch.equal(hashes[:, None] == hashes[None], equal)
    norms = rows.double().norm(dim=1)
    assert (7, *range(50, 60)) in equal_rows(RowReader(rows), norms)
    assert all(3 not in group for group in equal_rows(RowReader(rows), norms))  # zero rows are no duplicates
    assert equal_rows(RowReader(torch.zeros(0, 4)), torch.zeros(0)) == ()
    torch.testing.assert_close(row_hashes(RowReader(rows.clone())), hashes)
