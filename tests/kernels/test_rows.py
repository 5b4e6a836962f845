"""Triton kernels on rows of a table: an optimizer's training and pending updates are those of the definition.

Those of numba are in `tests/kernels/cpu/test_rows.py`.
"""

from collections.abc import Callable

import pytest
import torch
from comparison import assert_no_worse
from covering import cases
from kernel_paths import GPU_BACKENDS, running_on
from pending_rows import GAPS_AT, ROOTS, rates, recorded, replayed, with_pending
from torch import Tensor, nn

from embedlayer import RowAdamW, StaleRowsError, TokenEmbedding, clip_grad_norm_
from embedlayer.kernels.gpu.launch import launches_observed
from embedlayer.kernels.kernel import kernels_disabled
from embedlayer.kernels.rows import update_rows
from embedlayer.optim import RowAdagrad, RowwiseSecondMoment
from embedlayer.row_sparse import pending_updates
from embedlayer.row_sparse.gradient import RowSparseGradient, SortedRows, summed_gradient
from embedlayer.row_sparse.history import Betas
from embedlayer.row_sparse.stochastic_rounding import StochasticRounding, round_rows

ROWS = 30
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLACK = {torch.float32: 3e-7, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}

Rule = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

RULES: dict[str, Rule] = {
    "two moments": lambda weights: RowAdamW(weights, weight_decay=0.1),
    "betas (0.9, 0.95)": lambda weights: RowAdamW(weights, betas=(0.9, 0.95), weight_decay=0.1),
    "no momentum": lambda weights: RowAdamW(weights, betas=(0.0, 0.9)),
    "float32 first moment": lambda weights: RowAdamW(weights, weight_decay=0.1, state=RowwiseSecondMoment()),
    "bfloat16 first moment": lambda weights: RowAdamW(weights, state=RowwiseSecondMoment(torch.bfloat16)),
    "no first moment": lambda weights: RowAdamW(weights, weight_decay=0.1, state=RowwiseSecondMoment(None)),
    "Adagrad": lambda weights: RowAdagrad(weights, weight_decay=0.1),
}


def here(x: Tensor) -> Tensor:
    """Return numbers of the CPU on the device where new tensors are."""
    return x.to(torch.empty(0).device)


def drawn(*shape: int, seed: int) -> Tensor:
    """Return normal numbers that bfloat16 and float16 can hold."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return here(numbers.mul(16).round().div(16))


def a_table(dtype: torch.dtype, width: int, padding_idx: int | None = None) -> TokenEmbedding:
    """Return a row-sparse table of a few drawn rows."""
    table = TokenEmbedding(ROWS, width, row_sparse=True, dtype=dtype, padding_idx=padding_idx)
    with torch.no_grad():
        table.weight.copy_(drawn(ROWS, width, seed=0))
        if padding_idx is not None:
            table.weight[padding_idx] = 0
    return table


def batch(step: int) -> Tensor:
    """Return the IDs of a step: of few rows, and at every fourth step of one row alone, so that the others wait."""
    generator = torch.Generator().manual_seed(step)
    high = 1 if step % 4 == 3 else ROWS
    return here(torch.randint(0, high, (2, 4), generator=generator, device="cpu"))


def trained(rule: Rule, dtype: torch.dtype, *, width: int, steps: int = 9, padding_idx: int | None = None) -> Tensor:
    """Return the vectors of each step, then all rows and the optimizer's state at the end, as float64."""
    table = a_table(dtype, width, padding_idx)
    optimizer, results = rule([table.weight]), []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 + step % 3)
        vectors = table(batch(step))
        results.append(vectors.detach().flatten())
        vectors.backward(drawn(*vectors.shape, seed=step).to(dtype))
        if step % 3 == 1:
            clip_grad_norm_([table.weight], 3.0)
        optimizer.step()
        optimizer.zero_grad()
    results.append(table.rows(0, ROWS).detach().flatten())
    if padding_idx is not None:
        assert not table.rows(padding_idx, padding_idx + 1).any()
    state = optimizer.state_dict()["state"][0]
    results += [state[name].flatten() for name in state if name != "step"]
    return torch.cat([each.double() for each in results])


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@cases("rule, dtype, width, padding_idx", RULES, DTYPES, [24, 5], [None, 0])
def test_training_is_no_worse_than_by_torch_operators(backend, rule, dtype, width, padding_idx) -> None:
    with running_on(backend):
        launched: set[str] = set()
        with launches_observed(lambda launch: launched.add(launch.name)):
            found = trained(RULES[rule], dtype, width=width, padding_idx=padding_idx)
        assert launched >= {"sum_equal_rows"}
        assert any(name.endswith("step") for name in launched)
        assert any(name.startswith("apply_pending") for name in launched)
        exact = trained(RULES[rule], torch.float64, width=width, padding_idx=padding_idx)
        with kernels_disabled():
            plain = trained(RULES[rule], dtype, width=width, padding_idx=padding_idx)
        assert_no_worse(found, plain, exact, slack=SLACK[dtype] * float(exact.abs().max()))


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@cases("betas, decay", [(0.9, 0.999), (0.9, 0.95), (0.95, 0.99), (0.0, 0.9)], [0.0, 0.1, 40.0])
def test_pending_updates_are_the_loop_over_the_skipped_steps_for_every_mean_square(backend, betas, decay) -> None:
    steps, betas = 1200, Betas(*betas, eps=1e-8)
    with running_on(backend):
        m, v = torch.ones(len(GAPS_AT), len(ROOTS)).double(), here(ROOTS**2).expand(len(GAPS_AT), -1)
        history = recorded(betas, rates(steps), decay)
        table = with_pending(history, GAPS_AT, GAPS_AT, m, v, dtype=torch.float32)
        found = table.rows(0, len(GAPS_AT)).detach().double()
        for row, at in enumerate(GAPS_AT):
            exact = replayed(m[row], v[row].float().double(), at, rates(steps)[at:], decay, betas)
            assert ((found[row] - exact).abs() <= 3e-6 * exact.abs() + 1e-37).all()


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@cases("dtype, moments, rowwise", DTYPES, [False, True], [False, True])
def test_all_rows_at_once_are_those_of_torch_operators(backend, dtype, moments, rowwise) -> None:
    generator = torch.Generator().manual_seed(0)
    at = torch.randint(1, 301, (20,), generator=generator, dtype=torch.int32)
    before = torch.minimum(at, torch.randint(0, 301, (20,), generator=generator, dtype=torch.int32))
    history = recorded(Betas(0.9, 0.95, 1e-8), rates(300), 0.1)
    with running_on(backend):
        m, v = drawn(20, 33, seed=1), drawn(20, 1 if rowwise else 33, seed=2).square() + 0.01
        tables = []
        for _ in range(2):
            table = TokenEmbedding(20, 33, row_sparse=True, dtype=dtype)
            state = m.to(dtype), (v if rowwise else v.to(dtype)).clone()
            tensors = {"value_steps": at, "moment_steps": before, "history": torch.from_numpy(history.lines)}
            rest = {"start": 0, "betas": list(history.betas)}
            with torch.no_grad():
                table.weight.copy_(drawn(20, 33, seed=3))
            table.weight.pending_updates.load_state(table.weight, state, tensors, rest)
            tables.append(table)
        ours, plain = (table.weight.pending_updates for table in tables)
        ours.apply_all(tables[0].weight, 3, moments=moments)
        with kernels_disabled():
            plain.apply_all(tables[1].weight, 3, moments=moments)
        close = {"rtol": 4 * SLACK[dtype], "atol": 4 * SLACK[dtype]}
        torch.testing.assert_close(tables[0].weight.detach(), tables[1].weight.detach(), **close)
        torch.testing.assert_close(ours.moments, plain.moments, **close)
        for name in ("value_steps", "moment_steps"):
            assert torch.equal(getattr(ours.steps, name), getattr(plain.steps, name))


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_rows_are_rounded_at_random_by_the_bits_of_the_definition(backend) -> None:
    seed = (1 << 62) - 12345
    with running_on(backend):
        table = a_table(torch.bfloat16, 40)
        optimizer = RowAdamW([table.weight], lr=0.5, weight_decay=0.5, rounding=StochasticRounding(seed))
        before, ids = table.weight.detach().float(), here(torch.tensor([3, 29, 3]))
        table(ids).backward(torch.zeros(3, 40, dtype=torch.bfloat16))
        optimizer.step()
        stepped = round_rows(before[ids] * 0.75, ids, seed=seed, step=1)
        assert torch.equal(table(ids), stepped)
        others = here(torch.tensor([0, 7]))
        table(ids).backward(torch.zeros(3, 40, dtype=torch.bfloat16))
        optimizer.step()
        assert torch.equal(table(others), round_rows(before[others] * 0.5625, others, seed=seed, step=2))


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@cases("dtype, width", DTYPES, [24, 5])
def test_sums_of_equal_rows_are_at_their_first_places(backend, dtype, width) -> None:
    with running_on(backend):
        ids, values = here(torch.tensor([5, 2, 5, 0, 5, 2, 5, 5, 5, 5])), drawn(10, width, seed=0).to(dtype)
        gradient = summed_gradient(SortedRows.of(ids), values, (6, width), drop=0)
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
    table = TokenEmbedding(5, 4, row_sparse=True)
    optimizer = RowAdamW(table.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    before, steps = table.weight.detach().clone(), table.weight.pending_updates.step
    monkeypatch.setattr(pending_updates, "is_capturing", lambda x: True)
    for call in (optimizer.step, lambda: table(torch.tensor([1]))):
        with pytest.raises(StaleRowsError, match=r"A CUDA graph is captured.*\(5, 4\) at every replay"):
            call()
    monkeypatch.undo()
    assert torch.equal(table.weight, before)
    assert table.weight.pending_updates.step == steps


@pytest.mark.gpu
def test_a_training_step_does_not_wait_on_a_gpu() -> None:
    with running_on("cuda"):
        table = a_table(torch.float32, 64, 0)
        optimizer = RowAdamW(table.parameters())
        ids = batch(0)
        for step in range(4):
            if step == 2:
                torch.cuda.set_sync_debug_mode("error")
            try:
                table(ids).square().sum().backward()
                clip_grad_norm_(table.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            finally:
                torch.cuda.set_sync_debug_mode("default" if step == 3 else torch.cuda.get_sync_debug_mode())


@pytest.mark.gpu
def test_a_training_step_in_a_captured_graph_is_refused_on_a_gpu() -> None:
    with running_on("cuda"):
        table = a_table(torch.float32, 64)
        optimizer = RowAdamW(table.parameters())
        ids = batch(0)
        table(ids).square().sum().backward()
        optimizer.step()
        with pytest.raises(StaleRowsError, match="A CUDA graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
        optimizer.step()


FAR_ROWS, FAR_WIDTH = 1 << 20, 2056
assert (FAR_ROWS - 1) * FAR_WIDTH > 2**31


@pytest.mark.parametrize("rowwise", [False, True])
def test_rows_beyond_2_to_31_numbers_are_those_of_a_small_table(rowwise, tmp_path) -> None:
    step, numbers = 5, [0.1, 0.001, 0.9, 1e-8, 0.01]
    history = recorded(Betas(0.9, 0.99, 1e-8), rates(step), 0.1)
    results = []
    for num_rows in (3, FAR_ROWS):
        size = num_rows * FAR_WIDTH
        tables = [
            torch.from_file(str(tmp_path / f"{name}{num_rows}"), shared=True, size=size, dtype=torch.bfloat16).view(
                num_rows, FAR_WIDTH
            )
            for name in ("weight", "exp_avg", "exp_avg_sq")
        ]
        table, m, v = tables
        for place, each in enumerate(tables):
            each[-2:] = drawn(2, FAR_WIDTH, seed=place).square()
        v = torch.ones(num_rows, 1) if rowwise else v
        with running_on("triton"):
            rows, gradients = torch.tensor([num_rows - 2, num_rows - 1]), drawn(2, FAR_WIDTH, seed=4).bfloat16()
            steps = [torch.full((num_rows,), 2, dtype=torch.int32) for _ in range(2)]
            record = torch.from_numpy(history.lines_from(0))
            for made in (None, gradients):
                last = step - (made is None)
                update_rows(
                    rows, made, record, *steps, table, m, v, 0, num_rows, 0, last, step, None, False,
                    [] if made is None else numbers,
                )  # fmt: skip
            update_rows(None, None, record, *steps, table, m, v, num_rows - 2, num_rows, 0, step, step, 7, True, [])
        results.append([each[-2:].clone() for each in (table, m, v, *steps)])
    assert all(map(torch.equal, *results))
    assert results[0][0].any()
