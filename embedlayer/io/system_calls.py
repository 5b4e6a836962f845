"""Calls that Linux and macOS name differently, and what is done where a system has neither.

No other module asks the C library. A system that lacks a call has no attribute of that name in Python's modules.
"""

import ctypes
import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

EXCHANGE, NO_REPLACE = (2, 2), (1, 4)
"""Flags of `renameat2` (<linux/fs.h>) and of `renamex_np` (<sys/stdio.h>)."""

_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)
_ZEROS = bytes(1 << 20)


def flock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file for this process without waiting; return `False` if another process has locked it.

    Processes with `shared` locks exclude only those without. An `OSError` says that the system or the file system has
    no locks.
    """
    if fcntl is None:
        raise OSError(errno.ENOSYS, "this system has no flock")
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def rename(one: Path, other: Path, flags: tuple[int, int]) -> bool:
    """Rename with `EXCHANGE` or `NO_REPLACE`, which Python's standard library lacks.

    The result is `False`, and nothing changed, if the system or the file system does not support the flag. Any other
    failure is an `OSError`.
    """
    names = os.fsencode(one), os.fsencode(other)
    if (function := _c_function("renameat2")) is not None:
        here = -100  # AT_FDCWD
        failed = function(here, names[0], here, names[1], ctypes.c_uint(flags[0]))
    elif (function := _c_function("renamex_np")) is not None:
        failed = function(*names, ctypes.c_uint(flags[1]))
    else:
        return False
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(other))


def flush(descriptor: int) -> None:
    """Write an open file or folder to the disk and wait for it, so that its content survives a power failure.

    On macOS `fsync` leaves the content in the disk's own cache; `F_FULLFSYNC`, on the file systems that have it, does
    not.
    """
    if hasattr(fcntl, "F_FULLFSYNC"):
        with suppress(OSError):  # not on this file system
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def allocate(descriptor: int, size: int) -> None:
    """Make an empty file `size` zeros long, with space on the disk for all of them.

    Without `posix_fallocate`, as on macOS, the zeros are written. An `OSError` says that the disk is full.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    while left := size - os.lseek(descriptor, 0, os.SEEK_CUR):
        os.write(descriptor, _ZEROS[:left])


def boot_id() -> str:
    """Return what identifies the present start of the machine; an empty string where the system does not tell."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    text = ctypes.create_string_buffer(64)
    size = ctypes.c_size_t(len(text))
    function = _c_function("sysctlbyname")  # its name is known to macOS alone
    if function is None or function(b"kern.bootsessionuuid", text, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return ""
    return text.value.decode()


def _c_function(name: str) -> Any:
    """Return a function of the C library, which sets `ctypes.get_errno()`; `None` where there is none of this name."""
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name, None)
    except (OSError, TypeError):  # Windows
        return None
