"""Other systems: calls that this one has and they lack, hidden from the package.

"macOS" has what macOS has in place of them: `renamex_np`, `sysctlbyname` and `F_FULLFSYNC`, made of what is here.
"POSIX" has nothing of the kind. Locks (`flock`) are on both.
"""

import builtins
import ctypes
import errno
import fcntl
import io
import mmap
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from embedlayer.io import system_calls

SYSTEMS = ("Linux", "macOS", "POSIX")

NOT_ON_MACOS: dict[ModuleType, tuple[str, ...]] = {os: ("posix_fallocate", "sched_getaffinity")}
"""Names of Python's modules that the package uses, and that macOS lacks; `test_systems.py` finds what is not listed."""

NOT_EVERYWHERE: dict[ModuleType, tuple[str, ...]] = {
    os: ("pwritev", "register_at_fork", "fork"),
    mmap: ("MADV_DONTNEED", "MADV_RANDOM", "MADV_WILLNEED"),
}
"""Further names that only some systems have. Tests themselves may fork: `fork` is hidden from fresh interpreters."""

FULL_SYNC = 51

c_function = system_calls._c_function


def hide(system: str, patch: pytest.MonkeyPatch, *, keep: tuple[str, ...] = ("fork",)) -> None:
    """Hide what `system` lacks, except for the names in `keep`, until the patch is undone."""
    if system == "Linux":
        return
    hidden = [NOT_ON_MACOS] if system == "macOS" else [NOT_ON_MACOS, NOT_EVERYWHERE]
    for names in hidden:
        for module, attributes in names.items():
            for name in set(attributes) - {*keep}:
                patch.delattr(module, name, raising=False)
    for module in (builtins, io):
        patch.setattr(module, "open", without_proc(module.open))
    functions: dict[str, Callable[..., int]] = {}
    if system == "macOS":
        functions = {"renamex_np": renamex_np, "sysctlbyname": sysctlbyname}
        patch.setattr(fcntl, "F_FULLFSYNC", FULL_SYNC, raising=False)
        patch.setattr(fcntl, "fcntl", full_sync(fcntl.fcntl))
    patch.setattr(system_calls, "_c_function", functions.get)


def without_proc(opened: Callable[..., Any]) -> Callable[..., Any]:
    def open(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file).startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
        return opened(file, *arguments, **options)

    return open


def renamex_np(one: bytes, other: bytes, flags: ctypes.c_uint) -> int:
    """`int renamex_np(const char *from, const char *to, unsigned int flags)`: RENAME_SWAP is 2, RENAME_EXCL 4."""
    return int(c_function("renameat2")(-100, one, -100, other, ctypes.c_uint({2: 2, 4: 1}[flags.value])))


def sysctlbyname(name: bytes, text: Any, size: Any, new: None, new_size: ctypes.c_size_t) -> int:
    """`int sysctlbyname(const char *name, void *old, size_t *old_size, void *new, size_t new_size)`."""
    if name != b"kern.bootsessionuuid" or new is not None or new_size.value:
        ctypes.set_errno(errno.ENOENT)
        return -1
    text.value = b"00000000-1111-2222-3333-444444444444"
    size._obj.value = len(text.value) + 1
    return 0


def full_sync(real: Callable[..., Any]) -> Callable[..., Any]:
    def fcntl_(descriptor: int, command: int, argument: Any = 0) -> Any:
        return os.fsync(descriptor) if command == FULL_SYNC else real(descriptor, command, argument)

    return fcntl_
