"""The catch-up of a row beside its definition, a loop over the missed steps."""

import math

import numpy as np
import pytest
import torch
from covering import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from embedlayer import SizeError
from embedlayer.row_sparse.history import Betas, StepHistory, compress, replay, sums_of, two_nodes

STEPS = 1200
SPREAD = torch.cat([torch.zeros(1), torch.logspace(-13, 1, 60)]).double()  # sqrt(v), far below eps to far above


def rates(steps=STEPS) -> list[float]:
    return [1e-3 * min(1, t / 100) * (0.55 + 0.45 * math.cos(math.pi * t / steps)) for t in range(1, steps + 1)]


def recorded(betas: Betas, all_rates: list[float], decay: float) -> StepHistory:
    history = StepHistory(0, betas)
    for lr in all_rates:
        history.record(lr, decay)
    return history


def updated(skipped, index: int, p, m, v) -> torch.Tensor:
    nodes, weights = torch.from_numpy(skipped.nodes[:, index]), torch.from_numpy(skipped.weights[:, index])
    return p * skipped.decay[index] - m * (weights / (v.sqrt().unsqueeze(1) + nodes)).sum(1)


@cases("betas, decay, tolerance", [(0.9, 0.999), (0.9, 0.95), (0.95, 0.99), (0.0, 0.9)], [0.0, 0.1], [1e-7, 1e-12])
def test_it_equals_the_loop_over_the_missed_steps_for_every_mean_square(betas, decay, tolerance) -> None:
    betas = Betas(*betas, eps=1e-8)
    gaps_at = np.array([1, 2, 7, 50, 400, 1000, 1150, 1190, 1196, 1197, 1198, 1199])
    skipped = recorded(betas, rates(), decay).skipped_steps(gaps_at, tolerance=tolerance)
    p, m = torch.zeros(len(SPREAD)).double(), torch.ones(len(SPREAD)).double()
    for index, at in enumerate(gaps_at.tolist()):
        exact, _, _ = replay((p, m, SPREAD**2), at, rates()[at:], [decay] * (STEPS - at), betas)
        assert ((updated(skipped, index, p, m, SPREAD**2) - exact).abs() <= 3 * tolerance * exact.abs() + 1e-300).all()
    assert skipped.decay[0] == pytest.approx(math.prod(1 - lr * decay for lr in rates()[1:]), rel=1e-13)


@settings(max_examples=30, deadline=None)
@given(
    lrs=st.lists(st.sampled_from([0.0, 1e-6, 1e-3, 0.1]), min_size=1, max_size=80),
    at=st.integers(0, 3000),
    decay=st.sampled_from([0.0, 0.3]),
    square=st.sampled_from([0.0, 1e-30, 1e-16, 1e-8, 1.0]),
)
def test_it_equals_the_loop_whatever_the_learning_rates_do(lrs, at, decay, square) -> None:
    betas = Betas(0.9, 0.99, 1e-8)
    history = StepHistory(at, betas)
    for lr in lrs:
        history.record(lr, decay)
    p, m, v = (torch.tensor([value], dtype=torch.float64) for value in (0.5, 1e-3, square))
    exact, _, _ = replay((p, m, v), at, lrs, [decay] * len(lrs), betas)
    ours = updated(history.skipped_steps(np.array([at]), tolerance=1e-12), 0, p, m, v)
    assert torch.allclose(ours, exact, rtol=1e-10, atol=1e-12)


def test_with_usual_betas_two_nodes_are_enough_past_a_thousand_steps() -> None:
    skipped = recorded(Betas(0.9, 0.999, 1e-8), rates(3000), 0.1).skipped_steps(
        np.arange(1100, 2990, 30), tolerance=1e-7
    )
    assert len(skipped.nodes) == 2


def test_two_nodes_in_closed_form_are_those_of_lanczos() -> None:
    generator = np.random.default_rng(0)
    nodes, weights = 1 + generator.random((5, 40)), generator.random((5, 40))
    nodes[:, 0] = 1
    mine = two_nodes(nodes[:, 0], sums_of(nodes[:, :1], nodes, weights).sum(2))
    for closed, general in zip(mine, compress(nodes, weights, 2), strict=True):
        np.testing.assert_allclose(closed.T, general, rtol=1e-9)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.9)])
def test_a_history_that_was_loaded_is_the_one_that_was_saved(betas) -> None:
    history = recorded(Betas(*betas, eps=1e-8), rates(), 0.1)
    again = StepHistory(0, history.betas)
    again.load(history.lines)
    at = np.array([0, 3, 3, 400, 1000, 1150, 1190, 1198, 1199, 1200])
    for mine, loaded in zip(
        history.skipped_steps(at, tolerance=1e-7)[1:], again.skipped_steps(at, tolerance=1e-7)[1:], strict=True
    ):
        np.testing.assert_allclose(mine, loaded, rtol=1e-6)


def test_rows_that_are_right_do_not_move() -> None:
    history = StepHistory(0, Betas(0.9, 0.999, 1e-8))
    for step in range(300):
        right = history.skipped_steps(np.array([step, step // 2, step]), tolerance=1e-7)
        assert right.decay[[0, 2]].tolist() == [1, 1]
        assert not right.weights[:, [0, 2]].any()
        history.record(1e-3, 0.1)


@pytest.mark.parametrize("decay", [1.0, 50.0, 900.0])
def test_decay_that_outruns_the_momentum_is_right_too(decay) -> None:
    betas, lrs = Betas(0.9, 0.999, 1e-8), [1e-3] * 400
    p, m, v = (torch.full((1,), value, dtype=torch.float64) for value in (0.5, 1e-3, 1e-8))
    history = recorded(betas, lrs, decay)
    for at in (1, 200, 398):
        exact, _, _ = replay((p, m, v), at, lrs[at:], [decay] * (400 - at), betas)
        ours = updated(history.skipped_steps(np.array([at]), tolerance=1e-7), 0, p, m, v)
        assert torch.allclose(ours, exact, rtol=1e-6, atol=1e-300)


def test_a_rule_of_n_nodes_keeps_2n_moments() -> None:
    generator = np.random.default_rng(0)
    nodes, weights = 1 + generator.random((3, 50)), generator.random((3, 50))
    few, their = compress(nodes, weights, 4)
    u, short = (nodes[:, :1] / (each + nodes[:, :1]) for each in (nodes, few))
    for power in range(8):
        np.testing.assert_allclose((their * short**power).sum(1), (weights * u**power).sum(1), rtol=1e-10)


def test_a_step_that_would_turn_a_row_around_is_refused() -> None:
    with pytest.raises(SizeError, match=r"lr \* weight_decay 2 below 1"):
        StepHistory(0, Betas(0.9, 0.999, 1e-8)).record(2.0, 1.0)
