"""The ground under everything that touches a disk: nothing half-written is ever seen, nothing is unpickled.

A save goes to a temporary name beside its target, is flushed to the disk, and takes the target's name in one rename.
Whatever stops it on the way, a full disk or a killed process, leaves the old file as it was.
"""

import ctypes
import errno
import json
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from embedlayer.errors import CheckpointError, FileError
from embedlayer.io.json_fields import check_fields, parse_json

JsonObject = dict[str, Any]

PARTIAL, OLD = ".partial", ".old"
"""Endings of the hidden names that a save writes to, and to which an old folder is moved aside."""


@contextmanager
def replace_file(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on leaving without an error it becomes `path`, else it is removed.

    Raises:
        FileError: The folder cannot be written, or the disk is full. What stood at `path` before is still there.
    """
    path = Path(path)
    folder = _temporary(path)  # of its own: safetensors writes to another temporary file beside the one it is given
    partial = folder / path.name
    try:
        folder.mkdir()
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # the kernel applies the umask
        mode = partial.stat().st_mode
        yield partial
        if partial.stat().st_mode != mode:  # safetensors' own file is private
            partial.chmod(stat.S_IMODE(mode))
        _flush_to_disk(partial)
        partial.replace(path)
        _flush_to_disk(path.parent)
    except FileError:  # of another file that is written inside the block
        raise
    except OSError as error:
        raise FileError(
            f"Cannot write {path}: {error.strerror or error}.\n"
            f"What was there before is unchanged. Free some space or choose a folder that can be written."
        ) from error
    finally:
        _remove(folder)


@contextmanager
def replace_folder(path: Path | str) -> Iterator[Path]:
    """Like `replacing`, for a whole folder: it appears complete or not at all.

    An existing folder at `path` is replaced in one step where the system can exchange two names (Linux, macOS, on most
    file systems). Elsewhere there is a moment in which `path` is missing; if the process is killed in it, the next
    `recover_folder(path)` puts the old folder back.

    Raises:
        FileError: The parent folder cannot be written, or the disk is full.
    """
    path = Path(path)
    partial = _temporary(path)
    try:
        partial.mkdir()
        yield partial
        for file in (*partial.rglob("*"), partial):
            _flush_to_disk(file)
        recover_folder(path)
        if os.path.lexists(path):
            _replace_folder(partial, path)
        else:
            partial.rename(path)
        _flush_to_disk(path.parent)
    except FileError:  # raised by whoever fills the folder: it says better what went wrong
        raise
    except OSError as error:
        raise FileError(f"Cannot write the folder {path}: {error.strerror or error}.") from error
    finally:
        _remove(partial)


def _replace_folder(new: Path, path: Path) -> None:
    """Move the folder `new` to `path`, where another one is, and remove that."""
    if _exchange(new, path):
        _remove(new)
        return
    old = new.with_suffix(OLD)
    path.rename(old)
    try:
        new.rename(path)
    except BaseException:
        old.rename(path)
        raise
    _remove(old)


def recover_folder(path: Path | str) -> Path:
    """Return `path`; if a process was killed while it replaced this folder, put the old folder back first.

    Every reader and writer of a folder that `replace_folder` writes calls this before it looks.

    Raises:
        FileError: The folder cannot be looked into, or the old one cannot be moved back.

    Example:
        >>> recover_folder("corpus")
        PosixPath('corpus')
    """
    path = Path(path)
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            os.scandir(path).close()
        return path
    except (FileNotFoundError, NotADirectoryError):
        if os.path.lexists(path):  # a link to what is gone
            return path
    except ValueError:  # a zero byte in the name: opening it raises the error
        return path
    except OSError as error:
        raise FileError(f"Cannot read {path}: {error.strerror or error}.") from error
    for old in _left_by_replacing(path, OLD):
        try:
            old.rename(path)
        except OSError as error:
            if not os.path.lexists(path) and os.path.lexists(old):  # no other process has done it meanwhile
                raise FileError(
                    f"{path} is missing because a process was killed while it replaced it, and {old}, which is the "
                    f"folder as it was, cannot be renamed: {error.strerror or error}. Rename it to {path.name}."
                ) from error
        break
    return path


def remove_partials(path: Path | str) -> None:
    """Remove what a process that was killed while it replaced `path` has left. Nobody may be replacing it now.

    A folder that is missing because of that is put back first.
    """
    recover_folder(path)
    for suffix in (PARTIAL, OLD):
        for left in _left_by_replacing(Path(path), suffix):
            _remove(left)


def _temporary(path: Path) -> Path:
    """A fresh hidden name beside `path`."""
    return path.parent / f".{path.name}.{secrets.token_hex(4)}{PARTIAL}"


def _left_by_replacing(path: Path, suffix: str) -> list[Path]:
    """Temporary names of `path` that are there."""
    names = re.compile(rf"\.{re.escape(path.name)}\.[^.]+{re.escape(suffix)}")
    try:
        return sorted(file for file in path.parent.iterdir() if names.fullmatch(file.name))
    except OSError:  # there is no such folder, or it cannot be listed: reading in it raises the error
        return []


def _remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; return whether that was done, which needs the system's and the disk's help.

    Raises:
        OSError: It failed for another reason than that it is not supported.
    """
    if sys.platform not in ("linux", "darwin"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if hasattr(libc, "renameat2"):
        here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of <linux/fs.h>
        failed = libc.renameat2(here, names[0], here, names[1], ctypes.c_uint(exchange))
    elif hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(*names, ctypes.c_uint(2))  # RENAME_SWAP of <sys/stdio.h>
    else:
        return False
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(other))


def create_folder(path: Path | str) -> Path:
    """Create `path` if need be and make sure that it can be written to.

    Raises:
        FileError: It is a file, or cannot be created or written.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path, prefix="."):  # on NFS others see it
            return path
    except OSError as error:
        raise FileError(
            f"Cannot write into the folder {path}: {error.strerror or error}. Choose another folder."
        ) from error


def write_text(path: Path | str, text: str) -> None:
    """Write a UTF-8 text file, wholly or not at all."""
    with replace_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path | str, value: JsonObject) -> None:
    """Write a JSON object, wholly or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path | str) -> JsonObject:
    """Read a JSON object.

    Raises:
        FileError: There is no such file, or it cannot be read.
        CheckpointError: It is not a JSON object.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"Cannot read {path}: {error.strerror or error}.") from error
    value = parse_json(content, path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__} where an object is expected.")
    return value


def read_fields(path: Path | str, kind: type) -> JsonObject:
    """Read a JSON object whose fields are those of a `TypedDict`; it may have more.

    Raises:
        FileError: There is no such file, or it cannot be read.
        CheckpointError: It is not a JSON object, or a field is missing or wrong.
    """
    value = read_json(path)
    check_fields(value, kind, path)
    return value


def _flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
