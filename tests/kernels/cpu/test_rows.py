"""Kernels on rows: pending updates are the loop over the skipped steps, whatever the number of threads."""

from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from covering import some
from hypothesis import given, settings
from hypothesis import strategies as st
from pending_rows import GAPS_AT, ROOTS, rates, recorded, replayed, with_pending

from embedlayer import RowAdamW, TokenEmbedding
from embedlayer.kernels.kernel import Kernel, kernels_disabled
from embedlayer.row_sparse.gradient import segments_of_equal_ids, sum_segments
from embedlayer.row_sparse.history import Betas
from embedlayer.row_sparse.hooks import SMALL_NUMEL
from embedlayer.row_sparse.pending_updates import PendingUpdates

pytestmark = pytest.mark.usefixtures("kernels")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


@pytest.fixture
def left_out(monkeypatch) -> list[int]:
    """Numbers of rows that torch operators updated because the kernel left them out."""
    numbers: list[int] = []
    update_rows = PendingUpdates._update_rows

    def counted(self, weight, rows, **options):
        numbers.append(len(rows))
        return update_rows(self, weight, rows, **options)

    monkeypatch.setattr(PendingUpdates, "_update_rows", counted)
    return numbers


@pytest.mark.parametrize(
    ("betas", "decay", "dtype"),
    some(
        [((0.9, 0.95), 0.1, torch.float64), ((0.0, 0.9), 0.0, torch.float32)],
        product([(0.9, 0.999), (0.9, 0.95), (0.95, 0.99), (0.0, 0.9)], [0.0, 0.1], TOLERANCE),
    ),
)
def test_pending_updates_are_the_loop_over_the_skipped_steps_for_every_mean_square(
    betas, decay, dtype, left_out
) -> None:
    tolerance = TOLERANCE[dtype]
    steps, betas = 1200, Betas(*betas, eps=1e-8)
    m, v = torch.ones(len(GAPS_AT), len(ROOTS)).double(), (ROOTS**2).expand(len(GAPS_AT), -1)
    table = with_pending(recorded(betas, rates(steps), decay), GAPS_AT, GAPS_AT, m, v.contiguous(), dtype=dtype)
    found = table.rows(0, len(GAPS_AT)).detach().double()
    assert not left_out
    for row, at in enumerate(GAPS_AT):
        exact = replayed(m[row], v[row].to(dtype).double(), at, rates(steps)[at:], decay, betas)
        assert ((found[row] - exact).abs() <= 3 * tolerance * exact.abs() + 1e-300).all()


@settings(max_examples=60, deadline=None)
@given(
    lrs=st.lists(st.sampled_from([0.0, 1e-9, 1e-6, 1e-3, 0.1]), min_size=1, max_size=80),
    start=st.sampled_from([0, 1, 7, 40, 3000]),
    decay=st.sampled_from([0.0, 0.3, 8.0]),
    betas=st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.9, 0.82), (0.5, 0.9), (0.0, 0.9)]),
    lowest=st.integers(-12, 0),
    lag=st.integers(0, 30),
)
def test_the_rule_of_a_row_is_right_from_its_smallest_root_on(lrs, start, decay, betas, lowest, lag) -> None:
    betas, steps = Betas(*betas, eps=1e-8), len(lrs)
    lag = min(lag, steps - 1)
    v = torch.logspace(2 * lowest, 2 * lowest + 8, 50).double()[None].contiguous()
    m, at = torch.ones_like(v), start + lag
    table = with_pending(recorded(betas, lrs, decay, start), [at], [start], m, v)
    exact = replayed(m, v, at, lrs[lag:], decay, betas, moments_at=start)
    torch.testing.assert_close(table.rows(0, 1).detach(), exact, rtol=3e-12, atol=1e-300)


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
def test_rows_with_more_terms_than_a_kernel_computes_are_left_to_torch_operators(left_out, by_look_up) -> None:
    history, width = recorded(Betas(0.9, 0.95, 1e-8), rates(400), 0.1), 600
    m, v = torch.ones(3, width).double(), torch.full((3, width), 1e-18).double()
    v[1] = 1e-9
    table = with_pending(history, [10] * 3, [10] * 3, m, v, dtype=torch.float32)
    found = (table(torch.arange(300) % 3)[-3:] if by_look_up else table.rows(0, 3)).detach().double()
    assert left_out == [2]
    for row in range(3):
        exact = replayed(m[row], v[row], 10, rates(400)[10:], 0.1, history.betas)
        torch.testing.assert_close(found[row], exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_neither_threads_nor_repetitions_of_ids_change_the_result(dtype) -> None:
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        table = TokenEmbedding(500, 257, row_sparse=True, dtype=dtype)
        optimizer = RowAdamW(table.parameters(), lr=1e-2, betas=(0.9, 0.95))
        for _ in range(12):
            ids = torch.randint(0, 500, (700,))
            table(ids).backward(torch.randn(700, 257).to(dtype))
            optimizer.step()
            optimizer.zero_grad()
        results.append(table.weight.detach().clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_a_look_up_by_kernels_has_the_rows_and_the_gradient_of_torch(dtype, padding_idx) -> None:
    table = TokenEmbedding(90, 130, row_sparse=True, padding_idx=padding_idx, dtype=dtype)
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_of_segments_are_no_worse_than_those_of_torch(dtype) -> None:
    torch.manual_seed(0)
    ids, values = torch.randint(0, 9, (401,)), torch.randn(401, 37).to(dtype)
    segments = segments_of_equal_ids(ids, drop=4)
    assert segments.rows.tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    exact = torch.zeros(9, 37).double().index_add_(0, ids, values.double())[segments.rows]
    ours = (sum_segments(values, segments).double() - exact).abs().max()
    with kernels_disabled():
        plain = (sum_segments(values, segments).double() - exact).abs().max()
    assert ours <= plain * 1.01 + 1e-14


def test_ids_outside_the_table_are_refused_before_anything_is_written() -> None:
    table = TokenEmbedding(5, 4, row_sparse=True)
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


def test_each_kernel_runs_in_a_training_step(monkeypatch) -> None:
    runs, run = [], Kernel.run

    def counted(self, *arguments, **options):
        runs.append(self.name)
        return run(self, *arguments, **options)

    monkeypatch.setattr(Kernel, "run", counted)
    table = TokenEmbedding(50, 4, row_sparse=True)
    optimizer = RowAdamW(table.parameters())
    for ids in ([1, 2, 3], [1], [2, 2, 3], [1] * SMALL_NUMEL):
        runs.clear()
        table(torch.tensor(ids)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if len(ids) == 3:
            by_embedding = runs.copy()
    of_segments = ["segments_of_equal_ids", "sum_segments"]
    assert by_embedding == ["segments_of_equal_ids", "apply_pending", *of_segments, "adamw_step"]
    assert runs == ["segments_of_equal_ids", "apply_pending", "sum_segments", "adamw_step"]
    runs.clear()
    np.testing.assert_array_equal(table.weight.detach().shape, (50, 4))
    assert runs == ["apply_pending"]
