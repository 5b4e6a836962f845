"""Jobs in other processes: what they say comes back, and they are gone afterwards."""

import os
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from embedlayer.core.errors import EmbedLayerWarning, FileError, TextError
from embedlayer.data.process_pool import run_jobs

JOBS = """
import os, signal, sys, time, warnings
from pathlib import Path
from embedlayer.core.errors import EmbedLayerWarning, TextError

def prepare(folder):
    print("a line that is none of ours")
    (Path(folder) / f"{os.getpid()}.pid").touch()
    def do(job, report):
        report(1)
        if job == 15:
            (Path(folder) / "15.begun").touch()
        while job in (11, 12, 14) and not (Path(folder) / "15.begun").exists():
            time.sleep(0.01)  # the other process may still be importing
        if job == 11:
            raise TextError("job 11 has no text")
        if job == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        if job == 13:
            warnings.warn("job 13 is odd", EmbedLayerWarning)
        if job == 14:
            raise RuntimeError("a mistake of ours")
        if job == 15:
            try:
                time.sleep(600)
            except BaseException:
                (Path(folder) / "asked").touch()
                time.sleep(600)
        (Path(folder) / f"{job}.done").write_text(
            " ".join(os.environ[name] for name in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS"))
        )
        report(job * 10)
    return do
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "jobs_of_this_test.py").write_text(JOBS)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("jobs_of_this_test", None)


def run(folder: Path, jobs: list[int], cut_short: list[int]) -> dict[int, int]:
    told: dict[int, int] = {}
    prepare = import_module("jobs_of_this_test").prepare
    run_jobs(prepare, str(folder), jobs, 2, on_progress=told.__setitem__, on_interrupted=cut_short.append)
    return told


def assert_none_left(folder: Path) -> None:
    pids = [int(file.stem) for file in folder.glob("*.pid")]
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_every_job_is_done_by_as_many_processes_as_wanted(folder):
    cut_short: list[Any] = []
    with pytest.warns(EmbedLayerWarning, match="job 13 is odd"):
        told = run(folder, [1, 2, 3, 13, 4], cut_short)
    assert cut_short == []
    assert told == {job: 10 * job for job in (1, 2, 3, 13, 4)}
    assert sorted(file.read_text() for file in folder.glob("*.done")) == ["false 1"] * 5
    assert 1 <= len(list(folder.glob("*.pid"))) <= 2
    assert_none_left(folder)
    assert not any("ExecutorManager" in type(thread).__name__ for thread in threading.enumerate())


def test_fewer_jobs_than_workers_get_their_threads(folder):
    run(folder, [1], [])
    assert (folder / "1.done").read_text() == "true 2"


@pytest.mark.parametrize(
    ("job", "error", "words"),
    [
        (11, TextError, "^job 11 has no text$"),
        (12, FileError, "SIGKILL.* 15, 12"),
        (14, RuntimeError, "^a mistake of ours$"),
    ],
)
def test_what_ends_one_process_ends_them_all_and_is_told(folder, job, error, words):
    cut_short: list[int] = []
    with pytest.raises(error, match=words):
        run(folder, [15, job, 1], cut_short)
    assert cut_short == [15, job]
    assert_none_left(folder)
    assert not (folder / "asked").exists()  # to stop: an exception in the middle of an import comes out as another one
