"""Lock files, such that one process at a time writes to a folder.

The kernel releases a lock when its process ends for any reason. So a run can be continued after a crash, and by
`torchrun` after a restart. Only a process that writes needs the lock; among several ranks this is rank 0.

The lock is `flock`, which Linux and macOS have on local disks and, between machines, on NFS. Where `flock` is missing
(Windows, some network file systems), a warning is given and nothing is locked.
"""

import os
import socket
import threading
import time
import warnings
import weakref
from contextlib import suppress
from pathlib import Path

from embedlayer.core.errors import EmbedLayerWarning, FileError
from embedlayer.core.forks import call_in_forked_processes
from embedlayer.io.system_calls import flock

LOCK = ".lock"
"""Name of the lock file in a folder."""


class FileLock:
    """Lock file that lets one process at a time write to a folder or file.

    All objects of a process with the same path share the lock, which is released when the last of them releases it: by
    `release`, at the end of a `with` block, or by garbage collection. Child processes by `fork` do not have it. A file
    that a killed process left is harmless. Where the system has no `flock`, acquiring the lock warns and protects
    nothing. `what` is the subject of error messages, such as "The run folder DIR".
    """

    def __init__(self, path: Path | str, what: str) -> None:
        self.path = Path(path)
        self.what = what
        self._release: weakref.finalize[[str], FileLock] | None = None

    def acquire(self, *, timeout_seconds: float = 0.0) -> None:
        """Acquire the lock for this process; do nothing if this object has acquired it before."""
        if self._release is None:
            key = _key(self.path)
            with _guard:
                descriptor, users = _locks.get(key) or (_lock_file(key, self.what, timeout_seconds), 0)
                _locks[key] = descriptor, users + 1
            self._release = weakref.finalize(self, _release_share, key)

    def release(self) -> None:
        """Release this object's share of the lock; do nothing if this object does not have the lock."""
        if self._release is not None:
            self._release()
            self._release = None

    def check_unlocked(self) -> None:
        """Check that no other process has the lock. Nothing is written, and this object does not acquire it.

        A reader calls it before and after it reads, to notice a process that was writing meanwhile. Where the system
        has no `flock`, nothing is checked.
        """
        key = _key(self.path)
        if key in _locks:
            return
        try:
            descriptor = os.open(key, os.O_RDONLY)
        except OSError:  # there is no lock file that can be read, so no process writes
            return
        try:
            is_free = True
            with suppress(OSError):  # not supported; the writer was warned
                is_free = flock(descriptor, shared=True)
            if not is_free:
                raise _in_use(self.what, descriptor)
        finally:
            os.close(descriptor)

    def __enter__(self) -> "FileLock":
        """Acquire the lock and return this object; raise a `FileError` at once if another process has the lock."""
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock, also after an error in the block; see `release`."""
        self.release()


_locks: dict[str, tuple[int, int]] = {}
"""Locks of this process: by path, the descriptor of the locked file and the number of objects that share the lock."""

_guard = threading.RLock()  # a garbage collection inside a block with this guard may release another lock


def _release_share(key: str) -> None:
    """Give up one object's share of a lock of this process; after the last share, unlock and remove the lock file."""
    with _guard:
        descriptor, users = _locks.pop(key, (-1, 0))  # a child by fork has none
        if users > 1:
            _locks[key] = descriptor, users - 1
        elif users:
            with suppress(OSError):  # the folder may be gone
                os.unlink(key)
            os.close(descriptor)


def _close_copies() -> None:
    """Forget all locks in a child process after `fork`, which would keep them after its parent has ended."""
    global _guard
    _guard = threading.RLock()
    for descriptor, _ in _locks.values():
        os.close(descriptor)
    _locks.clear()


call_in_forked_processes(_close_copies)


def _lock_file(path: str, what: str, timeout_seconds: float) -> int:
    """Create a lock file unless it exists, lock it, and write the ID and host name of this process into it."""
    until = time.monotonic() + timeout_seconds
    while True:
        try:
            # not through a link, which may lead to another file: what it holds is replaced
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except OSError as error:
            raise FileError(f"Cannot write the lock file {path}: {error.strerror or error}.") from error
        try:
            try:
                is_locked = flock(descriptor)
            except OSError as error:
                is_locked, reason = True, error.strerror or error
                message = f"{what} is not protected from a second process that writes to it: no locks ({reason})."
                warnings.warn(message, EmbedLayerWarning, stacklevel=4)
            if is_locked and is_still_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return descriptor
            if time.monotonic() >= until and is_still_at(descriptor, path):
                raise _in_use(what, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(0.05)


def _key(path: Path) -> str:
    """Return one path for a lock file that is reached by several; the file itself must not be a link."""
    return os.path.join(os.path.realpath(path.parent), path.name)


def is_still_at(descriptor: int, path: str | Path) -> bool:
    """Return whether an open file is the file that `path` names now.

    It is not if the process that had the lock removed the file after this process opened it.
    """
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _in_use(what: str, descriptor: int) -> FileError:
    """Return the error which says that another process has a lock, with the name of that process."""
    holder = os.pread(descriptor, 300, 0).decode(errors="replace").strip() or "another process"
    return FileError(f"{what} is in use by {holder}: wait until it ends, stop it, or choose another folder.")
