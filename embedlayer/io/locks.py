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

from embedlayer.errors import EmbedLayerWarning, FileError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
"""Name of the lock file in a folder."""


class FileLock:
    """Exclusive lock of a process on a file.

    All objects of a process with the same path share the lock. It is released when the last of them is released: by
    `release`, at the end of a `with` block, or by garbage collection. Child processes by `fork` do not have the lock.

    Args:
        path: The lock file. It is created, and removed on release. A file that a killed process left is harmless.
        what: What the lock protects, for error messages.

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
        """Acquire the lock; do nothing if this object has it.

        Args:
            timeout_seconds: How long to wait for another process to release the lock.

        Raises:
            FileError: Another process has the lock (the message names the process), or the lock file cannot be
                written.
        """
        if self._release is None:
            key = os.path.realpath(self.path)
            with _guard:
                descriptor, users = _locks.get(key) or (_lock_file(key, self.what, timeout_seconds), 0)
                _locks[key] = descriptor, users + 1
            self._release = weakref.finalize(self, _release_share, key)

    def release(self) -> None:
        """Release the lock; do nothing if this object does not have it."""
        if self._release is not None:
            self._release()
            self._release = None

    def check_unlocked(self) -> None:
        """Raise an error if another process has the lock; nothing is written.

        Readers call this before and after they read.

        Raises:
            FileError: Another process has the lock.
        """
        key = os.path.realpath(self.path)
        if fcntl is None or key in _locks:
            return
        try:
            descriptor = os.open(key, os.O_RDONLY)
        except OSError:  # there is no lock file that can be read, so no process writes
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _in_use(self.what, descriptor) from error
        except OSError:  # not supported; the writer was warned
            return
        finally:
            os.close(descriptor)

    def __enter__(self) -> "FileLock":
        """Acquire the lock and return this object.

        Raises:
            FileError: Another process has the lock; this call does not wait for it. See `acquire`.
        """
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        self.release()


_locks: dict[str, tuple[int, int]] = {}
"""Locks of this process: by path, the descriptor of the locked file and the number of objects that share the lock."""

_guard = threading.RLock()  # a garbage collection inside a block with this guard may release another lock


def _release_share(key: str) -> None:
    """Release one object's share of a lock of this process; the last share unlocks and removes the file.

    Args:
        key: Real path of the lock file. Nothing happens if this process has no lock there, as in a child by `fork`.
    """
    with _guard:
        descriptor, users = _locks.pop(key, (-1, 0))  # a child by fork has none
        if users > 1:
            _locks[key] = descriptor, users - 1
        elif users:
            with suppress(OSError):  # the folder may be gone
                os.unlink(key)
            os.close(descriptor)


def _close_copies() -> None:
    """Close the copies of the descriptors in a child by `fork`, so that the lock ends with the parent process."""
    global _guard
    _guard = threading.RLock()
    for descriptor, _ in _locks.values():
        os.close(descriptor)
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_copies)


def _lock_file(path: str, what: str, timeout_seconds: float) -> int:
    """Create and lock a file, write the process ID and host name into it, and return its descriptor.

    Raises:
        FileError: Another process still has the lock after `timeout_seconds`, or the file cannot be written.
    """
    until = time.monotonic() + timeout_seconds
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise FileError(f"Cannot write the lock file {path}: {error.strerror or error}.") from error
        try:
            if _try_to_lock(descriptor, what) and _is_still_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return descriptor
            if time.monotonic() >= until and _is_still_at(descriptor, path):
                raise _in_use(what, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(0.05)


def _try_to_lock(descriptor: int, what: str) -> bool:
    """Return whether the file could be locked; where locks are not supported, warn and return `True`."""
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
        stacklevel=5,
    )
    return True


def _is_still_at(descriptor: int, path: str) -> bool:
    """Return whether an open file is still the one at `path`; the process that had the lock may have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _in_use(what: str, descriptor: int) -> FileError:
    """Return the error for a lock of another process.

    Args:
        what: What the lock protects.
        descriptor: Descriptor of the lock file, which names the process.
    """
    holder = os.pread(descriptor, 300, 0).decode(errors="replace").strip() or "another process"
    return FileError(
        f"{what} is in use by {holder}: two processes would mix their files in it. "
        f"Wait until it ends, stop it, or choose another folder."
    )
