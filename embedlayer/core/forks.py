"""Locks and threads that survive a fork: the one place of the package that registers with `os.register_at_fork`.

A forked process has a copy of the memory, and of the threads only the one that forked. A lock that another thread held
would stay locked for ever there, what the lock protects could be half written, and a job of another thread would never
end.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import count
from threading import Lock, RLock
from types import MethodType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakMethod

Result = TypeVar("Result")

_numbers = count()
_locks: "WeakKeyDictionary[RLock, int]" = WeakKeyDictionary()
_creating = RLock()  # a garbage collection inside may create a lock
_callbacks: dict[int, Callable[[], Callable[[], None] | None]] = {}
_held: "list[RLock]" = []


def lock_held_at_forks() -> "RLock":
    """Return a new re-entrant lock. A fork waits until no other thread holds it, so in the forked process none does."""
    # A thread that holds it must not wait for one that may fork, as in a collective operation. Several are acquired
    # newest first, so a lock that is needed inside blocks of another one is created earlier.
    lock = RLock()
    with _creating:
        _locks[lock] = next(_numbers)
    return lock


def held_locks(locks: "Sequence[RLock]") -> AbstractContextManager[Any]:
    """Context manager: hold several locks of `lock_held_at_forks`. The order of `locks` does not matter."""
    return locks[0] if len(locks) == 1 else _all_held(sorted(locks, key=_locks.__getitem__, reverse=True))


@contextmanager
def _all_held(locks: "Sequence[RLock]") -> Iterator[None]:
    with ExitStack() as held:
        for lock in locks:
            held.enter_context(lock)
        yield


def call_in_forked_processes(callback: Callable[[], None]) -> None:
    """Let every forked process call `callback()` before `os.fork` returns there."""
    number = next(_numbers)
    if isinstance(callback, MethodType):  # does not keep its object alive, and is not called without it
        _callbacks[number] = WeakMethod(callback, lambda _: _callbacks.pop(number, None))
    else:
        _callbacks[number] = lambda: callback


class BackgroundThread:
    """One thread for jobs beside the program, which the first job starts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._executor: ThreadPoolExecutor | None = None
        self._forget()
        call_in_forked_processes(self._forget)

    def _forget(self) -> None:
        self._executor, self._starting = None, Lock()

    def submit(self, function: Callable[[], Result]) -> Callable[[], Result]:
        """Let the thread call `function()` after all earlier jobs, and return what waits for its result or error."""
        process = os.getpid()
        with self._starting:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, self.name)
            future = self._executor.submit(function)

        def result() -> Result:
            # in a forked process the future's own lock may be locked
            return future.result() if os.getpid() == process else function()

        return result

    def close(self) -> None:
        """Wait for all jobs and end the thread. A later job starts another one."""
        with self._starting:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()


def _before_fork() -> None:
    """Acquire all locks, the newest first."""
    _creating.acquire()
    _held.append(_creating)
    numbered = [(_locks.get(lock, -1), lock) for each in _locks.keyrefs() if (lock := each()) is not None]
    for _, lock in sorted(numbered, key=lambda pair: pair[0], reverse=True):
        lock.acquire()
        _held.append(lock)


def _after_fork(*, in_child: bool = False) -> None:
    """Release all locks. The forking thread has acquired them, in the forked process too, which calls all callbacks."""
    while _held:
        _held.pop().release()
    for each in list(_callbacks.values()) if in_child else ():
        if (callback := each()) is not None:
            callback()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=partial(_after_fork, in_child=True)
    )
