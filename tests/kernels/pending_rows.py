"""Training of row-sparse tables, and tables whose rows have pending updates, with what these come to step by step."""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from comparison import assert_no_worse
from kernel_records import operation_of
from torch import Tensor

from embedlayer import RowAdamW, RowSparseEmbedding, clip_grad_norm_
from embedlayer.kernels import kernels_disabled
from embedlayer.optim import RowAdagrad, RowwiseSecondMoment
from embedlayer.row_sparse.history import Betas, StepHistory

ROOTS = torch.cat([torch.zeros(1), torch.logspace(-13, 1, 90)]).double()
"""Roots of second moments, from far below `eps` to far above."""

GAPS_AT = (0, 1, 5, 20, 50, 400, 1000, 1150, 1185, 1196, 1197, 1198, 1199)
"""Steps of a history of 1,200 at which rows were updated last."""


def rates(steps: int) -> list[float]:
    """Return the learning rates of some steps: warm-up and cosine."""
    return [1e-3 * min(1, t / 100) * (0.55 + 0.45 * math.cos(math.pi * t / steps)) for t in range(1, steps + 1)]


def recorded(betas: Betas, all_rates: list[float], decay: float, start: int = 0) -> StepHistory:
    """Return a history of steps with these learning rates and one weight decay."""
    history = StepHistory(start, betas)
    for lr in all_rates:
        history.record(lr, decay)
    return history


def with_pending(
    history: StepHistory, value_steps, moment_steps, m: Tensor, v: Tensor, *, dtype=torch.float64
) -> RowSparseEmbedding:
    """Return a table of zeros whose rows have the moments `m` and `v`, and include these steps."""
    table = RowSparseEmbedding(*m.shape, dtype=dtype)
    torch.nn.init.zeros_(table.weight)
    tensors = {
        "value_steps": torch.as_tensor(value_steps),
        "moment_steps": torch.as_tensor(moment_steps),
        "history": torch.from_numpy(history.lines),
    }
    rest = {"start": history.start, "betas": list(history.betas)}
    moments = tuple(each.to(table.weight.device, dtype, copy=True) for each in (m, v))
    table.weight.pending_updates.load_state(table.weight, moments, tensors, rest)
    return table


def replayed(
    m: Tensor, v: Tensor, at: int, all_rates: list[float], decay: float, betas: Betas, *, moments_at: int | None = None
) -> Tensor:
    """Return the values of a row of zeros after the steps that follow step `at`, without a gradient, by torch's AdamW.

    `all_rates` are those of the steps after `at`. The moments are of step `moments_at`, which is `at` by default.
    """
    lag = 0 if moments_at is None else at - moments_at
    row = torch.zeros_like(v, requires_grad=True)
    optimizer = torch.optim.AdamW([row], betas=betas[:2], eps=betas.eps, weight_decay=decay)
    state = {"step": torch.tensor(float(at)), "exp_avg": m * betas.beta1**lag, "exp_avg_sq": v * betas.beta2**lag}
    optimizer.state[row], row.grad = state, torch.zeros_like(v)
    for lr in all_rates:
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    return row.detach()


ROWS = 12
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLACK = {torch.float32: 3e-7, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}

Rule = Callable[[list[Tensor]], torch.optim.Optimizer]

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


def a_table(dtype: torch.dtype, width: int, padding_idx: int | None = None) -> RowSparseEmbedding:
    """Return a row-sparse table of a few drawn rows."""
    table = RowSparseEmbedding(ROWS, width, dtype=dtype, padding_idx=padding_idx)
    with torch.no_grad():
        table.weight.copy_(drawn(ROWS, width, seed=0))
        if padding_idx is not None:
            table.weight[padding_idx] = 0
    return table


def batch(step: int) -> Tensor:
    """Return the IDs of a step: of few rows, and at every fourth step of one row alone, so that the others wait."""
    generator = torch.Generator().manual_seed(step)
    high = 1 if step % 4 == 3 else ROWS
    return here(torch.randint(0, high, (2, 3), generator=generator, device="cpu"))


def trained(
    rule: Rule, dtype: torch.dtype, *, width: int = 8, steps: int = 6, padding_idx: int | None = None
) -> Tensor:
    """Return the vectors of each step, all rows midway and at the end, and the optimizer's state, as float64."""
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
        if step == 3:  # updates values, and not the moments
            results.append(table.rows(0, ROWS).detach().flatten())
    results.append(table.rows(0, ROWS).detach().flatten())
    if padding_idx is not None:
        assert not table.rows(padding_idx, padding_idx + 1).any()
    state = optimizer.state_dict()["state"][0]
    results += [state[name].flatten() for name in state if name != "step"]
    return torch.cat([each.double() for each in results])


def assert_training_is_no_worse(rule: str, dtype: torch.dtype, width: int, padding_idx: int | None) -> None:
    """Kernels miss the training in float64 by no more than torch operators in the same dtype do."""
    found = trained(RULES[rule], dtype, width=width, padding_idx=padding_idx)
    exact = trained(RULES[rule], torch.float64, width=width, padding_idx=padding_idx)
    with kernels_disabled():
        plain = trained(RULES[rule], dtype, width=width, padding_idx=padding_idx)
    slack = max(
        SLACK[dtype], SLACK[torch.float16] if "bfloat16" in rule else 0
    )  # a moment may be rounded the other way
    assert_no_worse(found, plain, exact, slack=slack * float(exact.abs().max()))


def assert_pending_updates_are_the_loop_over_the_skipped_steps(
    betas: tuple[float, float], decay: float, gaps_at: tuple[int, ...] = GAPS_AT
) -> None:
    """Rows of many ages and mean squares become what one skipped step after the other makes of them."""
    steps, of_adam = 1200, Betas(*betas, eps=1e-8)
    m, v = torch.ones(len(gaps_at), len(ROOTS)).double(), here(ROOTS**2).expand(len(gaps_at), -1)
    history = recorded(of_adam, rates(steps), decay)
    table = with_pending(history, gaps_at, gaps_at, m, v, dtype=torch.float32)
    found = table.rows(0, len(gaps_at)).detach().double()
    for row, at in enumerate(gaps_at):
        exact = replayed(m[row], v[row].float().double(), at, rates(steps)[at:], decay, of_adam)
        assert ((found[row] - exact).abs() <= 3e-6 * exact.abs() + 1e-37).all()


FAR_ROWS, FAR_WIDTH = 1 << 20, 2056
assert (FAR_ROWS - 1) * FAR_WIDTH > 2**31


def assert_rows_beyond_2_to_31_numbers_are_those_of_a_small_table(*, rowwise: bool) -> None:
    """The last rows of a table of more than 2^31 numbers become what those of a table of three rows become."""
    step, numbers = 5, [0.1, 0.001, 0.9, 1e-8, 0.01]
    history = recorded(Betas(0.9, 0.99, 1e-8), rates(step), 0.1)
    results = []
    with tempfile.TemporaryDirectory() as folder:  # files with a hole, which take no memory
        for num_rows in (3, FAR_ROWS):
            tables = [
                torch.from_file(
                    str(Path(folder) / f"{name}{num_rows}"),
                    shared=True,
                    size=num_rows * FAR_WIDTH,
                    dtype=torch.bfloat16,
                ).view(num_rows, FAR_WIDTH)
                for name in ("weight", "exp_avg", "exp_avg_sq")
            ]
            for place, each in enumerate(tables):
                each[-2:] = drawn(2, FAR_WIDTH, seed=place).square()
            if rowwise:
                tables[-1] = torch.ones(num_rows, 1)
            rows, gradients = torch.tensor([num_rows - 2, num_rows - 1]), drawn(2, FAR_WIDTH, seed=4).bfloat16()
            steps = [torch.full((num_rows,), 2, dtype=torch.int32) for _ in range(2)]
            stored = (torch.from_numpy(history.lines_from(0)), *steps, *tables)
            update_rows = operation_of("adamw_step").compute
            assert update_rows is not None
            update_rows(rows, None, *stored, 0, num_rows, 0, step - 1, step, None, False, [])
            update_rows(rows, gradients, *stored, 0, num_rows, 0, step, step, None, False, numbers)
            update_rows(None, None, *stored, num_rows - 2, num_rows, 0, step, step, 7, True, [])
            results.append([each[-2:].clone() for each in (*tables, *steps)])
    assert all(map(torch.equal, *results))
    assert results[0][0].any()
