"""Pending updates of a row are the steps of torch's AdamW without a gradient, one after the other."""

import numpy as np
import pytest
import torch
from covering import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from pending_rows import GAPS_AT, ROOTS, rates, recorded, replayed, with_pending

from embedlayer import SizeError
from embedlayer.row_sparse.history import Betas

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


@pytest.mark.usefixtures("both_paths")
@cases(
    "betas, decay, dtype",
    [(0.9, 0.999), (0.9, 0.95), (0.95, 0.99), (0.0, 0.9)],
    [0.0, 0.1, 50.0, 900.0],
    TOLERANCE,
    pairs=["decay, dtype"],
)
def test_they_are_the_loop_over_the_skipped_steps_for_every_mean_square(betas, decay, dtype) -> None:
    steps, betas = 1200, Betas(*betas, eps=1e-8)
    m, v = torch.ones(len(GAPS_AT), len(ROOTS)).double(), (ROOTS**2).expand(len(GAPS_AT), -1)
    table = with_pending(recorded(betas, rates(steps), decay), GAPS_AT, GAPS_AT, m, v.contiguous(), dtype=dtype)
    found = table.rows(0, len(GAPS_AT)).detach().double()
    for row, at in enumerate(GAPS_AT):
        exact = replayed(m[row], v[row].to(dtype).double(), at, rates(steps)[at:], decay, betas)
        least = 1e-300 if dtype == torch.float64 else 1e-37
        assert ((found[row] - exact).abs() <= 3 * TOLERANCE[dtype] * exact.abs() + least).all()


@pytest.mark.usefixtures("both_paths")
@settings(max_examples=30, deadline=None)
@given(
    lrs=st.lists(st.sampled_from([0.0, 1e-9, 1e-6, 1e-3, 0.1]), min_size=1, max_size=80),
    start=st.sampled_from([0, 1, 7, 40, 3000]),
    decay=st.sampled_from([0.0, 0.3, 8.0]),
    betas=st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.9, 0.82), (0.5, 0.9), (0.0, 0.9)]),
    lowest=st.integers(-12, 0),
    lag=st.integers(0, 30),
)
def test_they_are_right_whatever_the_rates_from_the_smallest_root_of_a_row_on(
    lrs, start, decay, betas, lowest, lag
) -> None:
    betas, steps = Betas(*betas, eps=1e-8), len(lrs)
    lag = min(lag, steps - 1)
    v = torch.logspace(2 * lowest, 2 * lowest + 8, 50).double()[None].contiguous()
    m, at = torch.ones_like(v), start + lag
    table = with_pending(recorded(betas, lrs, decay, start), [at], [start], m, v)
    exact = replayed(m, v, at, lrs[lag:], decay, betas, moments_at=start)
    torch.testing.assert_close(table.rows(0, 1).detach(), exact, rtol=3e-12, atol=1e-300)


def test_with_usual_betas_two_nodes_are_enough_past_a_thousand_steps() -> None:
    history = recorded(Betas(0.9, 0.999, 1e-8), rates(3000), 0.1)
    _, nodes, _ = history.skipped_steps(np.arange(1100, 2990, 30), tolerance=1e-7)
    assert len(nodes) == 2


def test_rows_that_are_right_do_not_move() -> None:
    history = recorded(Betas(0.9, 0.999, 1e-8), [], 0.1)
    for step in range(300):
        decay, _, weights = history.skipped_steps(np.array([step, step // 2, step]), tolerance=1e-7)
        assert decay[[0, 2]].tolist() == [1, 1]
        assert not weights[:, [0, 2]].any()
        history.record(1e-3, 0.1)


def test_a_step_that_would_turn_a_row_around_is_refused() -> None:
    with pytest.raises(SizeError):
        recorded(Betas(0.9, 0.999, 1e-8), [2.0], 1.0)
