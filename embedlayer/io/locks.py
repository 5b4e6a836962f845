"""One process at a time writes to a folder: an operating-system lock on a small file.

The kernel releases the lock when its process ends, however it ends, so that a run can be continued after a crash, and
by `torchrun` after a restart. Only a process that writes needs the lock; on several ranks that is rank 0.

The lock is `flock`, which Linux and macOS have on local disks and, between machines, on NFS. Where it is missing
(Windows, some network file systems) nothing is locked, and a warning says so.
"""

import os
import socket
import threading
import time
import warnings
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from embedlayer.errors import EmbedLayerWarning, FileError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
"""Name of the lock file in a folder that one process writes to for a long time."""


class FileLock:
    """The right to write to something on the disk, which one process has at a time.

    All objects of a process that name the same file share the lock; it is released when the last of them lets go, by
    `release`, at the end of a `with` block, or when it is garbage collected. Children made by `fork` do not hold it.

    Args:
        path: The lock file. It is created, and removed on release; one that a killed process left does no harm.
        what: What the lock protects, as errors call it.

    Example:
        >>> with FileLock(".lock", "This folder"):
        ...     Path(".lock").exists()
        True
        >>> Path(".lock").exists()
        False
    """

    def __init__(self, path: Path | str, what: str) -> None:
        self.path = Path(path)
        self.what = what
        self._release: weakref.finalize[[str], FileLock] | None = None

    def acquire(self, *, timeout_seconds: float = 0.0) -> None:
        """Take the lock; does nothing if this object has it.

        Args:
            timeout_seconds: How long to wait for another process that has it.

        Raises:
            FileError: Another process has it; the message says which. Or the lock file cannot be written.
        """
        if self._release is None:
            key = os.path.realpath(self.path)
            _held.take(key, self.what, timeout_seconds)
            self._release = weakref.finalize(self, _held.let_go, key)

    def release(self) -> None:
        """Let go of the lock; does nothing if this object does not have it."""
        if self._release is not None:
            self._release()
            self._release = None

    def check_unlocked(self) -> None:
        """Return if no other process has the lock, which a reader asks before and after it reads; writes nothing.

        Raises:
            FileError: Another process has it.
        """
        key = os.path.realpath(self.path)
        if fcntl is None or key in _held.locks:
            return
        try:
            descriptor = os.open(key, os.O_RDONLY)
        except OSError:  # no lock file that could be read: nobody who writes here
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _in_use(self.what, descriptor) from error
        except OSError:  # not supported here, as the warning of the writer has said
            return
        finally:
            os.close(descriptor)

    def __enter__(self) -> "FileLock":
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class _Lock(NamedTuple):
    descriptor: int
    users: int


class _Held:
    """The locks of this process, by the path of their file."""

    def __init__(self) -> None:
        self.locks: dict[str, _Lock] = {}
        self.guard = threading.RLock()  # a garbage collection inside the block may let go of another lock
        self.watches_forks = False

    def take(self, key: str, what: str, timeout_seconds: float) -> None:
        with self.guard:
            descriptor, users = self.locks.get(key) or (_locked(key, what, timeout_seconds), 0)
            self.locks[key] = _Lock(descriptor, users + 1)
            if not self.watches_forks and hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self.forget)
                self.watches_forks = True

    def let_go(self, key: str) -> None:
        with self.guard:
            if key not in self.locks:  # a child made by fork
                return
            descriptor, users = self.locks.pop(key)
            if users > 1:
                self.locks[key] = _Lock(descriptor, users - 1)
                return
            with suppress(OSError):  # the folder may be gone
                os.unlink(key)
            os.close(descriptor)

    def forget(self) -> None:
        """In a child made by `fork`: close the copies, so that the lock ends with the process that took it."""
        for descriptor, _ in self.locks.values():
            os.close(descriptor)
        self.locks.clear()
        self.guard = threading.RLock()


_held = _Held()


def _locked(path: str, what: str, timeout_seconds: float) -> int:
    """A descriptor of the lock file, locked."""
    until = time.monotonic() + timeout_seconds
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise FileError(f"Cannot write the lock file {path}: {error.strerror or error}.") from error
        try:
            if _try_to_lock(descriptor, what) and _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return descriptor
            if time.monotonic() >= until and _is_at(descriptor, path):
                raise _in_use(what, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(0.05)


def _try_to_lock(descriptor: int, what: str) -> bool:
    """Whether the lock could be taken, or there are none here."""
    reason = "this system has no flock"
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            reason = f"its file system has no locks ({error.strerror or error})"
    warnings.warn(
        f"{what} is not protected from a second process that writes to it: {reason}. Make sure that there is none.",
        EmbedLayerWarning,
        stacklevel=6,
    )
    return True


def _is_at(descriptor: int, path: str) -> bool:
    """Whether the file that was opened is still the one of that name: who held it before may have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _in_use(what: str, descriptor: int) -> FileError:
    holder = os.pread(descriptor, 300, 0).decode(errors="replace").strip() or "another process"
    return FileError(
        f"{what} is in use by {holder}: two processes would mix their files in it. "
        f"Wait until it ends, stop it, or choose another folder."
    )
