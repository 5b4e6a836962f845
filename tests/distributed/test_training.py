"""`torchrun -m embedlayer train`: real processes, killed, stopped and continued."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from embedlayer import RunDirectory, load_run
from embedlayer.cli.demo import carried_text
from embedlayer.files import load_tensors

SECONDS = 120
SIZES = "--dim 16 --heads 2 --layers 1 --length 16 --batch-size 3 --vocab-size 301 --log-every 2".split()
TRAIN = ["-m", "embedlayer", "train"]


@contextlib.contextmanager
def started(*arguments: object, **environment: str) -> Iterator[subprocess.Popen]:
    """A Python process with all that it starts, gone when the block is left."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid in [*children(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def torchrun(ranks: int, restarts: int = 0) -> list[str]:
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*run, "--max-restarts", str(restarts), "--monitor-interval", "0.1"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "reference.txt"
    file.write_text(carried_text()[:30_000])
    return file


def test_workers_that_are_killed_in_a_run_and_in_a_save_go_on_from_the_last_checkpoint(text, tmp_path) -> None:
    arguments = [text, *SIZES, "--steps", 8, "--untied", "--row-sparse"]
    with started(*TRAIN, *arguments, "-o", tmp_path / "one") as process:
        assert process.wait(SECONDS) == 0, process.stderr.read()
    accidents = {"0": [[1, "step", 5]], "1": [[0, "save", 6]]}
    command = [*torchrun(2, restarts=2), Path(__file__).parent / "unlucky.py", "train", *arguments]
    with started(*command, "-o", tmp_path / "two", "--save-seconds", 0, ACCIDENTS=json.dumps(accidents)) as process:
        said, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
        assert said.count("Continuing at step 4") == 2
        assert not children(process.pid)
    assert not list((tmp_path / "two").glob(".*"))
    one, two = (load_tensors(tmp_path / name / "model.safetensors")[0] for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-5, rtol=1e-5, msg=name)
    lines = [RunDirectory(tmp_path / name).read_metrics() for name in ("one", "two")]
    for theirs, ours in zip(*lines, strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    load_run(tmp_path / "two")
    assert (tmp_path / "two" / "report.html").exists()


def test_ctrl_c_saves_after_the_same_step_of_all_and_one_process_can_go_on(text, tmp_path) -> None:
    directory = RunDirectory(tmp_path / "run")
    with started(*torchrun(2), *TRAIN, text, "-o", directory.path, *SIZES, "--steps", 100_000) as process:
        until = time.monotonic() + SECONDS
        while len(directory.read_metrics()) < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
        assert errors.count("everything is saved") == 1, errors
    trainer, _ = directory.open()
    assert trainer.step >= directory.read_metrics()[-1]["step"] >= 4
    assert next(trainer.run())["step"] > trainer.step - 2
