"""One process at a time writes to a folder."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from embedlayer.core.errors import EmbedLayerWarning, FileError
from embedlayer.io import system_calls
from embedlayer.io.locks import FileLock

pytestmark = pytest.mark.usefixtures("system")

HOLD = "import sys; from embedlayer.io.locks import FileLock; lock = FileLock(sys.argv[1], 'it'); lock.acquire(); "
WAIT = "print('held', flush=True); sys.stdin.read()"


@contextmanager
def held_elsewhere(
    path: Path, after: str = "print('held', flush=True); sys.stdin.read()"
) -> Iterator[subprocess.Popen]:
    """Another process that has the lock until the block ends."""
    command = [sys.executable, "-c", HOLD + after, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_second_process_is_refused_and_told_who_has_the_lock(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock", "The folder x")
    lock.check_unlocked()
    with held_elsewhere(tmp_path / "lock") as process:
        for ask in (lock.acquire, lock.check_unlocked):
            with pytest.raises(FileError, match=f"The folder x is in use by process {process.pid} on "):
                ask()
        assert process.communicate("")[0] == ""
    lock.acquire()
    lock.release()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path / "lock") as process:
        process.kill()
        process.wait()
        assert (tmp_path / "lock").exists()
        with FileLock(tmp_path / "lock", "it"):
            pass
    assert os.listdir(tmp_path) == []


def test_a_child_made_by_fork_does_not_keep_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    after = "import os, time; child = os.fork(); child or time.sleep(60); print(child); print('held', flush=True)"
    code = HOLD + f"{after}; sys.stdin.read()"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    child = int(parent.stdout.readline())
    assert parent.stdout.readline() == "held\n"
    parent.kill()
    parent.wait()
    try:
        FileLock(tmp_path / "lock", "it").acquire(timeout_seconds=30.0)  # the child may not have run yet
        os.kill(child, 0)
    finally:
        os.kill(child, 9)
        parent.stdin.close()
        parent.stdout.close()


def test_objects_of_one_process_share_the_lock_until_the_last_lets_go(tmp_path: Path) -> None:
    one, other = (FileLock(tmp_path / "lock", "it") for _ in range(2))
    one.acquire()
    one.acquire()
    with other:
        one.release()
        assert (tmp_path / "lock").exists()
        one.check_unlocked()
    assert not (tmp_path / "lock").exists()
    one.acquire()
    del one
    assert not (tmp_path / "lock").exists()


def test_a_process_that_waits_gets_the_lock_when_it_is_free(tmp_path: Path) -> None:
    after = "print('held', flush=True); import time; time.sleep(0.15); lock.release(); sys.stdin.read()"
    with held_elsewhere(tmp_path / "lock", after):
        lock = FileLock(tmp_path / "lock", "it")
        lock.acquire(timeout_seconds=60.0)
        lock.release()


@pytest.mark.parametrize("missing", ["system", "file system"])
def test_where_there_are_no_locks_a_warning_says_so(tmp_path: Path, monkeypatch, missing: str) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    if missing == "system":
        monkeypatch.setattr(system_calls, "fcntl", None)
    else:
        monkeypatch.setattr(system_calls.fcntl, "flock", refuse)
    with pytest.warns(EmbedLayerWarning, match="it is not protected from a second process"):
        lock = FileLock(tmp_path / "lock", "it").__enter__()
    lock.check_unlocked()
    lock.release()


def test_a_lock_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="Cannot write the lock file"):
        FileLock(tmp_path / "none" / "lock", "it").acquire()


def test_a_lock_is_not_opened_through_a_link(tmp_path: Path) -> None:
    """A folder from elsewhere may have a link in the place of the lock, whose target would be overwritten."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "lock").symlink_to(tmp_path / "mine")
    with pytest.raises(FileError, match="Cannot write the lock file"):
        FileLock(tmp_path / "lock", "The folder x").acquire()
    assert (tmp_path / "mine").read_text() == "mine"
