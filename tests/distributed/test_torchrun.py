"""`torchrun -m embedlayer train`: real processes, killed, stopped and continued."""

import signal
import time
from pydoc_data.topics import topics

import pytest
import torch
from commands import run
from covering import LONG
from launches import (
    HERE,
    SECONDS,
    SIZES,
    TRAIN,
    assert_same_run,
    children,
    free_port,
    machines,
    started,
    torchrun,
    unlucky,
)

from embedlayer import RunDirectory


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "reference.txt"
    file.write_text("\n\n".join(topics[name] for name in sorted(topics))[:30_000])
    return file


@pytest.fixture(scope="module")
def arguments(text):
    return [text, *SIZES, "--steps", 8, "--untied", "--row-sparse"]


@pytest.fixture(scope="module")
def alone(arguments, tmp_path_factory):
    """Return the run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    torch.set_num_threads(1)
    assert run("train", *arguments, "-o", folder) == 0
    return folder


@pytest.mark.long  # a run that is killed in a save goes on: training/test_run_directory.py
@pytest.mark.parametrize("step", [None, 5])
def test_workers_that_are_killed_in_a_run_and_in_a_save_go_on_from_the_last_checkpoint(
    arguments, alone, tmp_path, step
) -> None:
    accidents = [[0, "save", 6]] if step is None else [[1, "step", step], [0, "save", 6]]
    command, environment = unlucky(arguments, tmp_path / "two", accidents)
    with started(*torchrun(2, restarts=2), *command, **environment) as process:
        said, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
        assert said.count("Continuing at step 4") == len(accidents)
        assert not children(process.pid)
    assert_same_run(tmp_path / "two", alone)


@pytest.mark.long  # replicas in one group of processes: training/test_parallel.py
def test_two_machines_with_a_replica_each_train_as_one_process_does(arguments, alone, tmp_path) -> None:
    command = [*TRAIN, *arguments, "-o", tmp_path / "four", "--vocab-parallel-size", 2]
    first, second = (torchrun(2, meeting=meeting) for meeting in machines("2"))
    with started(*first, *command) as one, started(*second, *command) as other:
        for process in (one, other):
            _, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, errors
            assert not children(process.pid)
    assert_same_run(tmp_path / "four", alone)


@pytest.mark.long
def test_a_process_that_is_killed_on_one_machine_starts_both_again(arguments, alone, tmp_path) -> None:
    command, environment = unlucky(arguments, tmp_path / "two", [[1, "step", 5]])
    first, second = (torchrun(1, restarts=1, meeting=meeting) for meeting in machines("2"))
    with started(*first, *command, **environment) as one, started(*second, *command, **environment) as other:
        (said, errors), (_, others) = (process.communicate(timeout=SECONDS) for process in (one, other))
        assert one.returncode == other.returncode == 0, errors + others
        assert said.count("Continuing at step 4") == 1
        assert not children(one.pid) + children(other.pid)
    assert_same_run(tmp_path / "two", alone)


@pytest.mark.long
def test_a_machine_that_dies_leaves_the_run_to_the_other(arguments, alone, tmp_path) -> None:
    command, environment = unlucky(arguments, tmp_path / "two", [[1, "machine", 5]])
    quick = ",last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=3"
    first, second = (torchrun(1, restarts=1, meeting=meeting) for meeting in machines("1:2", conf=quick))
    with started(*first, *command, **environment) as one, started(*second, *command, **environment) as other:
        said, errors = one.communicate(timeout=SECONDS)
        assert one.returncode == 0, errors
        assert other.wait(SECONDS) == -signal.SIGKILL
        assert "PeerError: Rank 0 of 2 gave up: another process has ended" in errors
        assert said.count("Continuing at step 4") == 1
    assert_same_run(tmp_path / "two", alone)


def of_forks() -> list[object]:
    return [HERE / "distributed" / "forked.py", free_port(), "train"]


@pytest.mark.parametrize("train", [of_forks, pytest.param(lambda: [*torchrun(2), *TRAIN], marks=LONG)])
def test_ctrl_c_saves_after_the_same_step_of_all_and_one_process_can_go_on(text, tmp_path, train) -> None:
    directory = RunDirectory(tmp_path / "run")
    with started(*train(), text, "-o", directory.path, *SIZES, "--steps", 100_000) as process:
        until = time.monotonic() + SECONDS
        while len(directory.read_metrics()) < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
        assert errors.count("everything is saved") == 1, errors
    trainer, _ = directory.open()
    assert trainer.step >= directory.read_metrics()[-1]["step"] >= 4
    assert next(trainer.run())["step"] > trainer.step - 2
