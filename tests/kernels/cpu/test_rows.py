"""Kernels on rows beside torch operators; pending updates of many rows are in `tests/row_sparse/test_history.py`."""

import pytest
import torch
import torch.nn.functional as F
from kernel_paths import runs_of_kernels
from pending_rows import rates, recorded, replayed, with_pending

from embedlayer import RowAdamW, RowSparseEmbedding
from embedlayer.kernels import kernels_disabled
from embedlayer.row_sparse.history import Betas

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", [False, True])
def test_all_rows_in_one_pass_are_those_of_torch_operators(dtype, moments) -> None:
    torch.manual_seed(0)
    history = recorded(Betas(0.9, 0.95, 1e-8), rates(300), 0.1)
    m, v = torch.randn(70, 33).double() * 1e-3, torch.rand(70, 33).double() ** 8 * 1e-7
    m[3], v[4] = 0, 0
    at = torch.randint(1, 301, (70,), dtype=torch.int32)
    before = torch.minimum(at, torch.randint(0, 301, (70,), dtype=torch.int32))
    tables = [with_pending(history, at, before, m, v, dtype=dtype) for _ in range(2)]
    for table, by_kernel in zip(tables, (True, False), strict=True):
        pending = table.weight.pending_updates
        if by_kernel:
            pending.apply_all(table.weight, moments=moments)
        else:
            with kernels_disabled():
                pending.apply_all(table.weight, moments=moments)
        assert pending.steps.value_steps.eq(300).all()
    ours, plain = (table.weight.pending_updates for table in tables)
    close = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=close, atol=0)
    for mine, expected in zip(ours.moments, plain.moments, strict=True):
        torch.testing.assert_close(mine, expected, rtol=close, atol=0)
    assert torch.equal(ours.steps.moment_steps, plain.steps.moment_steps)


@pytest.mark.parametrize("by_look_up", [False, True])
def test_rows_with_more_terms_than_a_kernel_computes_are_right_too(by_look_up) -> None:
    history, width = recorded(Betas(0.9, 0.95, 1e-8), rates(400), 0.1), 600
    m, v = torch.ones(3, width).double(), torch.full((3, width), 1e-18).double()
    v[1] = 1e-9
    table = with_pending(history, [10] * 3, [10] * 3, m, v, dtype=torch.float32)
    found = (table(torch.arange(300) % 3)[-3:] if by_look_up else table.rows(0, 3)).detach().double()
    for row in range(3):
        exact = replayed(m[row], v[row], 10, rates(400)[10:], 0.1, history.betas)
        torch.testing.assert_close(found[row], exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_a_look_up_by_kernels_has_the_rows_and_the_gradient_of_torch(dtype, padding_idx) -> None:
    table = RowSparseEmbedding(90, 130, padding_idx=padding_idx, dtype=dtype)
    optimizer = RowAdamW(table.parameters(), lr=1e-2)
    for step in range(3):
        ids, upstream = torch.randint(0, 90 - 40 * step, (4, 256)), torch.randn(4, 256, 130).to(dtype)
        vectors = table(ids)
        weight = table.weight.detach().double().requires_grad_()
        expected = F.embedding(ids, weight, padding_idx)
        assert torch.equal(vectors.double(), expected)
        version = table.weight._version
        assert torch.equal(table(ids).double(), expected)
        assert table.weight._version == version
        vectors.backward(upstream)
        expected.backward(upstream.double())
        close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.0**-8}[dtype]
        torch.testing.assert_close(table.weight.grad.to_dense().double(), weight.grad, rtol=close, atol=1e-5)
        optimizer.step()
        optimizer.zero_grad()


def test_ids_outside_the_table_are_refused_before_anything_is_written() -> None:
    table = RowSparseEmbedding(5, 4)
    optimizer = RowAdamW(table.parameters())
    for ids in ([0, 1, 2], [0]):
        table(torch.tensor(ids)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    steps = table.weight.pending_updates.steps.value_steps.clone()
    for bad in (5, -1):
        with pytest.raises((IndexError, RuntimeError)):
            torch.nn.functional.embedding(torch.tensor([1, bad]), table.weight)
    assert torch.equal(table.weight.pending_updates.steps.value_steps, steps)


def test_each_kernel_runs_in_a_training_step() -> None:
    table = RowSparseEmbedding(50, 4)
    optimizer = RowAdamW(table.parameters())
    with runs_of_kernels() as runs:
        for ids in ([1, 2, 3], [1], [2, 2, 3], [1] * (1 << 16)):
            runs.clear()
            table(torch.tensor(ids)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert runs == ["segments_of_equal_ids", "apply_pending", "sum_segments", "adamw_step"]
        runs.clear()
        table.weight.detach()
        assert runs == ["apply_pending"]
