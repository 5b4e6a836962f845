"""How many steps fit into a time."""

import pytest

from embedlayer.training.loop import READINGS, TimeBudget


def test_the_first_guess_is_replaced_by_what_was_measured() -> None:
    budget = TimeBudget(100.0)
    assert budget.last_step(0, used=20.0, guess=4.0) == 20
    assert budget.last_step(10, used=25.0) == 10 + 150


def test_the_speed_is_that_of_the_last_readings_alone() -> None:
    budget = TimeBudget(1000.0)
    for step in range(10):
        budget.last_step(step, used=10.0 * step)
    for step in range(10, 10 + READINGS):
        last = budget.last_step(step, used=90.0 + step - 9)
    assert last == step + (1000 - (90 + step - 9))


def test_time_for_a_validation_is_left_and_no_step_is_taken_back() -> None:
    assert TimeBudget(100.0, reserve=30.0).last_step(0, used=0.0, guess=1.0) == 70
    assert TimeBudget(100.0).last_step(7, used=150.0) == 7


def test_progress_is_the_share_of_time_used_and_ends_at_one() -> None:
    budget = TimeBudget(100.0)
    last = budget.last_step(10, used=40.0, guess=2.0)
    assert last == 40
    assert budget.progress(10, last_step=last) == pytest.approx(0.4)
    assert budget.progress(25, last_step=last) == pytest.approx(0.7)
    assert budget.progress(last, last_step=last) == 1.0
    budget.last_step(41, used=130.0)
    assert budget.progress(41, last_step=41) == 1.0


def test_a_smallest_number_of_steps_extends_the_time_and_the_schedule_with_it() -> None:
    budget = TimeBudget(100.0, min_steps=50)
    assert budget.last_step(0, used=20.0, guess=4.0) == 50
    assert budget.last_step(10, used=60.0) == 50
    assert budget.expected_seconds == 60.0 + 40 * 4.0
    assert budget.progress(10, last_step=50) == pytest.approx(60 / 220)
    assert budget.progress(30, last_step=50) == pytest.approx(140 / 220)
    assert budget.last_step(40, used=180.0) == 50
    assert budget.progress(50, last_step=50) == 1.0
    assert budget.last_step(60, used=230.0) == 60


def test_a_smallest_number_of_steps_that_fit_changes_nothing() -> None:
    plain, budget = TimeBudget(100.0), TimeBudget(100.0, min_steps=20)
    for step, used in ((0, 5.0), (10, 15.0), (20, 25.0)):
        assert budget.last_step(step, used=used) == plain.last_step(step, used=used)
        assert budget.progress(step + 5, last_step=95) == plain.progress(step + 5, last_step=95)
    assert budget.expected_seconds == budget.seconds
