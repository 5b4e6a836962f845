"""Two threads in one order: the first is stopped in its middle until the second has ended or has to wait."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from embedlayer.core import forks
from embedlayer.row_sparse.row_steps import RowSteps

SECONDS = 60


class Watched:
    """A lock that says when a thread begins to wait for it."""

    waiting = threading.Event()

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def acquire(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.waiting.set()
            self.lock.acquire()

    def release(self) -> None:
        self.lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def watch_locks(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make the locks of new tables `Watched`, and return the event that a thread waits for one."""
    monkeypatch.setattr(forks, "RLock", Watched)
    monkeypatch.setattr(Watched, "waiting", threading.Event())
    return Watched.waiting


class Middle:
    """Stops a thread where it has changed a part of what belongs together: rows, steps of the rows, version."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.stopped, self.go_on = threading.Event(), threading.Event()
        self.thread: int | None = None
        watch_locks(monkeypatch)
        for owner, name in (
            (RowSteps, "skipped_terms"),  # torch operators: before the rows are written
            (RowSteps, "record"),  # their steps are recorded, their values not written
            (torch.autograd.graph, "increment_version"),  # kernels: rows are written, the version is not known
        ):
            self._stop_after(owner, name)

    def _stop_after(self, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def then_stop(*arguments: Any) -> Any:
            result = function(*arguments)
            if self.thread == threading.get_ident() and not self.stopped.is_set():
                self.stopped.set()
                assert self.go_on.wait(SECONDS)
            return result

        self.monkeypatch.setattr(owner, name, then_stop)

    def first(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """A function that is stopped in its middle."""

        def run() -> Any:
            self.thread = threading.get_ident()
            return function()

        return run

    def run(self, first: Callable[[], Any], second: Callable[[], Any]) -> list[Any]:
        """Call `first`, and `second` in its middle, in two threads; return both results, or errors."""
        results: list[Any] = [None, None]
        ended = [threading.Event(), threading.Event()]

        def call(place: int, function: Callable[[], Any]) -> None:
            try:
                results[place] = function()
            except Exception as error:  # noqa: BLE001  shown by the test
                results[place] = repr(error)
            finally:
                ended[place].set()

        threads = [threading.Thread(target=call, args=each) for each in ((0, self.first(first)), (1, second))]
        threads[0].start()
        wait_for_any(self.stopped, ended[0])
        threads[1].start()
        wait_for_any(Watched.waiting, ended[1])
        self.go_on.set()
        for each in threads:
            each.join()
        return results


def wait_for_any(*events: threading.Event) -> None:
    """Wait until one of the events is set. It takes no time that a busy machine could make too short."""
    until = time.monotonic() + SECONDS
    while not any(each.is_set() for each in events):
        assert time.monotonic() < until
        time.sleep(0.001)
