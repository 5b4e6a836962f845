"""Arithmetic on chunks of rows."""

import numpy as np
import pytest
import torch

from embedlayer.core.block_sizes import NUMBERS, block_size
from embedlayer.row_sparse.arithmetic import (
    apply_skipped_steps_,
    chunk_slices,
    compute_dtype,
    empty_rows,
    gather_rows,
    rows_at_once,
    square_root,
)
from embedlayer.row_sparse.history import Betas, StepHistory, replay


def test_skipped_steps_are_the_loop_over_steps_without_gradient() -> None:
    betas, rates = Betas(0.9, 0.999, 1e-8), [1e-2, 3e-3, 1e-3]
    history = StepHistory(5, betas)
    for lr in rates:
        history.record(lr, 0.1)
    p, m, v = torch.randn(4, 6).double(), torch.randn(4, 6).double(), torch.rand(4, 6).double()
    expected, _, _ = replay((p, m, v), 5, rates, [0.1] * 3, betas)
    skipped = history.skipped_steps(np.full(4, 5), tolerance=1e-12)
    terms = [torch.from_numpy(each).unsqueeze(1) for each in (*skipped.weights, *skipped.nodes)]
    decay, root = torch.from_numpy(skipped.decay).unsqueeze(1), square_root(v, out=torch.empty_like(v))
    apply_skipped_steps_(p, m, root, decay, terms, torch.empty_like(p))
    torch.testing.assert_close(p, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_are_gathered_into_a_buffer_of_the_dtype_of_updates(dtype) -> None:
    table, rows = torch.randn(9, 4).to(dtype), torch.tensor([7, 0])
    buffer = empty_rows(table, 3)
    found = gather_rows(table, rows, buffer)
    assert found.dtype == compute_dtype(table)
    assert found.data_ptr() == buffer.data_ptr()
    assert torch.equal(found, table[rows].to(found.dtype))


def test_chunks_cover_all_rows_once() -> None:
    rows = torch.arange(10)
    for size in (1, 3, 10, 99):
        assert torch.equal(torch.cat([rows[chunk] for chunk in chunk_slices(rows, size)]), rows)
    assert rows_at_once(torch.empty(5, 1 << 20)) == 1


def test_an_accelerator_without_sizes_of_its_own_has_those_of_cuda() -> None:
    assert block_size(NUMBERS, "xpu") == NUMBERS["cuda"] > block_size(NUMBERS, "cpu") == NUMBERS["cpu"]
    assert rows_at_once(torch.empty(5, 1 << 10, device="meta")) == NUMBERS["cuda"] >> 10
