"""Triton kernels on rows of a table: an optimizer's training and pending updates are those of the definition.

Those of numba are in `tests/kernels/cpu/test_rows.py`.
"""

import copy
from itertools import product

import pytest
import torch
from covering import cases, some
from interpreted import interpreted
from kernel_paths import GPU_BACKENDS, running_on
from kernel_records import operation_of
from pending_rows import (
    DTYPES,
    GAPS_AT,
    ROWS,
    RULES,
    SLACK,
    a_table,
    assert_pending_updates_are_the_loop_over_the_skipped_steps,
    assert_rows_beyond_2_to_31_numbers_are_those_of_a_small_table,
    assert_training_is_no_worse,
    drawn,
    here,
    rates,
    recorded,
    trained,
)
from torch import nn

from embedlayer import RowAdamW, RowSparseEmbedding, StaleRowsError, TokenEmbedding
from embedlayer.kernels.gpu.launch import launches_observed
from embedlayer.kernels.kernel import kernels_disabled
from embedlayer.optim import RowwiseSecondMoment
from embedlayer.row_sparse import pending_updates
from embedlayer.row_sparse.gradient import RowSparseGradient, sort_rows, summed_gradient
from embedlayer.row_sparse.history import Betas
from embedlayer.row_sparse.stochastic_rounding import StochasticRounding, round_rows


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize(
    ("rule", "dtype", "width", "padding_idx"),
    some(
        [
            ("two moments", torch.float32, 24, 0),
            ("bfloat16 first moment", torch.bfloat16, 5, None),
            ("Adagrad", torch.float16, 24, None),
        ],
        product(RULES, DTYPES, [24, 5], [None, 0]),
    ),
)
def test_training_is_no_worse_than_by_torch_operators(backend, rule, dtype, width, padding_idx) -> None:
    launched: set[str] = set()
    with running_on(backend), launches_observed(lambda launch: launched.add(launch.name)):
        assert_training_is_no_worse(rule, dtype, width, padding_idx)
    assert launched >= {"sum_equal_rows"}
    assert any(name.endswith("step") for name in launched)
    assert any(name.startswith("apply_pending") for name in launched)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize(
    ("betas", "decay", "gaps_at"),
    [
        ((0.9, 0.95), 0.1, GAPS_AT[::4]),
        *some([], product([(0.9, 0.999), (0.9, 0.95), (0.95, 0.99), (0.0, 0.9)], [0.0, 0.1, 40.0], [GAPS_AT])),
    ],
)
def test_pending_updates_are_the_loop_over_the_skipped_steps_for_every_mean_square(
    backend, betas, decay, gaps_at
) -> None:
    with running_on(backend):
        assert_pending_updates_are_the_loop_over_the_skipped_steps(betas, decay, gaps_at)


def versions(tables: list[TokenEmbedding]) -> list[list[int]]:
    """Torch's counters of the writes to the rows and moments of tables."""
    return [[each._version for each in (t.weight, *t.weight.pending_updates.moments)] for t in tables]


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "moments", "rowwise"),
    some([(torch.float32, True, False), (torch.bfloat16, True, True)], product(DTYPES, [False, True], [False, True])),
)
def test_all_rows_at_once_are_those_of_torch_operators(backend, dtype, moments, rowwise) -> None:
    generator = torch.Generator().manual_seed(0)
    at = torch.randint(1, 301, (20,), generator=generator, dtype=torch.int32)
    before = torch.minimum(at, torch.randint(0, 301, (20,), generator=generator, dtype=torch.int32))
    history = recorded(Betas(0.9, 0.95, 1e-8), rates(300), 0.1)
    with running_on(backend):
        m, v = drawn(20, 33, seed=1), drawn(20, 1 if rowwise else 33, seed=2).square() + 0.01
        tables = []
        for _ in range(2):
            table = RowSparseEmbedding(20, 33, dtype=dtype)
            state = m.to(dtype, copy=True), (v if rowwise else v.to(dtype)).clone()
            tensors = {"value_steps": at, "moment_steps": before, "history": torch.from_numpy(history.lines)}
            rest = {"start": 0, "betas": list(history.betas)}
            with torch.no_grad():
                table.weight.copy_(drawn(20, 33, seed=3))
            table.weight.pending_updates.load_state(table.weight, state, tensors, rest)
            tables.append(table)
        ours, plain = (table.weight.pending_updates for table in tables)
        before_writes = versions(tables)
        ours.apply_all(tables[0].weight, 3, moments=moments)
        with kernels_disabled():
            plain.apply_all(tables[1].weight, 3, moments=moments)
        close = {"rtol": 4 * SLACK[dtype], "atol": 4 * SLACK[dtype]}
        torch.testing.assert_close(tables[0].weight.detach(), tables[1].weight.detach(), **close)
        torch.testing.assert_close(ours.moments, plain.moments, **close)
        by_kernel, by_operators = torch.tensor(versions(tables)) > torch.tensor(before_writes)
        assert by_kernel.equal(by_operators)
        for name in ("value_steps", "moment_steps"):
            assert torch.equal(getattr(ours.steps, name), getattr(plain.steps, name))


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_rows_are_rounded_at_random_by_the_bits_of_the_definition(backend) -> None:
    seed = (1 << 62) - 12345
    with running_on(backend):
        table = a_table(torch.bfloat16, 40)
        optimizer = RowAdamW([table.weight], lr=0.5, weight_decay=0.5, rounding=StochasticRounding(seed))
        before, ids = table.weight.detach().float(), here(torch.tensor([3, 11, 3]))
        table(ids).backward(torch.zeros(3, 40, dtype=torch.bfloat16))
        optimizer.step()
        stepped = round_rows(before[ids] * 0.75, ids, seed=seed, step=1)
        assert torch.equal(table(ids), stepped)
        others = here(torch.tensor([0, 7]))
        table(ids).backward(torch.zeros(3, 40, dtype=torch.bfloat16))
        optimizer.step()
        assert torch.equal(table(others), round_rows(before[others] * 0.5625, others, seed=seed, step=2))


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_moments_that_no_kernel_takes_are_stepped_by_torch_operators(backend) -> None:
    with running_on(backend):
        names: set[str] = set()
        with launches_observed(lambda launch: names.add(launch.name)):
            found = trained(lambda weights: RowAdamW(weights, state=RowwiseSecondMoment(torch.float64)), torch.float32)
        assert names & {*operation_of("adamw_step").gpu()} == {"sum_equal_rows"}
        exact = trained(lambda weights: RowAdamW(weights, state=RowwiseSecondMoment(torch.float64)), torch.float64)
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@cases("dtype, width", DTYPES, [24, 5])
def test_sums_of_equal_rows_are_at_their_first_places(backend, dtype, width) -> None:
    with running_on(backend):
        ids, values = here(torch.tensor([5, 2, 5, 0, 5, 2, 5, 5, 5, 5])), drawn(10, width, seed=0).to(dtype)
        gradient = summed_gradient(sort_rows(ids), values, (6, width), drop=0)
        assert gradient._indices().tolist() == [[0, 2, 2, *[5] * 7]]
        exact = torch.zeros(6, width).double().index_add_(0, ids, values.double())
        exact[0] = 0
        first = here(torch.tensor([0, 1, 3]))
        close = {"rtol": SLACK[dtype], "atol": SLACK[dtype]}
        torch.testing.assert_close(gradient._values()[first].double(), exact[[0, 2, 5]], **close)
        repeats = here(torch.tensor([2, *range(4, 10)]))
        assert not gradient._values()[repeats].any()
        torch.testing.assert_close(gradient.to_dense().double(), exact, **close)
        torch.testing.assert_close(torch.linalg.vector_norm(gradient).double(), exact.norm(), **close)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_a_gradient_stays_summed_through_scaling_and_is_summed_again_after_an_addition(backend) -> None:
    ids = torch.tensor([[1, 2, 1], [4, 0, 4]])
    with running_on(backend):
        table, dense = a_table(torch.float32, 8, 0), nn.Embedding(ROWS, 8, padding_idx=0)
        names: list[str] = []
        for times in (1, 2):
            for each in (table, dense):
                each(here(ids)).square().sum().backward()
            with launches_observed(lambda launch: names.append(launch.name)):
                norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (table, dense)]
            gradient = table.weight.grad
            assert isinstance(gradient, RowSparseGradient)
            assert gradient.is_summed(0) == (times == 1)
            assert names.count("sum_equal_rows") == times - 1
            del norms
        copied = gradient.clone()
        assert not copied.is_summed()
        assert torch.equal(copied.to_dense(), gradient.to_dense())


def test_an_optimizer_step_in_a_captured_graph_is_refused_before_anything_is_written(monkeypatch) -> None:
    table = RowSparseEmbedding(5, 4)
    optimizer = RowAdamW(table.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    before, steps, copied = table.weight.detach().clone(), table.weight.pending_updates.step, copy.deepcopy(table)
    monkeypatch.setattr(pending_updates, "is_capturing", lambda x: True)
    for call in (optimizer.step, lambda: table(torch.tensor([1]))):
        with pytest.raises(StaleRowsError, match=r"A CUDA graph is captured.*\(5, 4\) at every replay"):
            call()
    copied(torch.tensor([1]))
    monkeypatch.undo()
    assert torch.equal(table.weight, before)
    assert table.weight.pending_updates.step == steps


@pytest.mark.parametrize("rowwise", [False, True])
def test_rows_beyond_2_to_31_numbers_are_those_of_a_small_table(rowwise) -> None:
    with running_on("triton"):
        assert_rows_beyond_2_to_31_numbers_are_those_of_a_small_table(rowwise=rowwise)


@pytest.mark.parametrize("rowwise", [False, True])
def test_a_step_reads_and_writes_each_row_once(rowwise) -> None:
    rule = RULES["float32 first moment" if rowwise else "two moments"]
    with interpreted() as run:
        trained(rule, torch.float32, width=8, steps=3)
    by_name = [(launch, "gradients" in launch.read) for launch in run.launches if launch.name == "update_rows"]
    for launch, makes_step in by_name:
        assert launch.read["weight"] == launch.written["weight"] > 0
        if makes_step:
            assert launch.read["gradients"] == launch.read["weight"] * (1 + rowwise)
            assert launch.written["exp_avg"] == launch.read["exp_avg"] == launch.read["weight"]
    assert any(makes_step for _, makes_step in by_name)
    assert not all(makes_step for _, makes_step in by_name)
