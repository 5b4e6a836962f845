"""Write files and folders atomically, and read JSON.

A file is written under a temporary name in the folder of its target, flushed to the disk, and renamed to the target.
A full disk or a killed process leaves the old file unchanged.
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
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from embedlayer.errors import CheckpointError, FileError
from embedlayer.io.json_fields import check_fields, parse_json, printable

JsonObject = dict[str, Any]

PARTIAL, OLD = ".partial", ".old"
"""Suffixes of hidden temporary names: of what is being written, and of an old folder that is being replaced."""

MOST_BYTES = 1 << 28
"""Most bytes of a file that is read at once, such as a configuration or a tokenizer: 256 MiB."""

_KINDS_OF_PATH = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}

GGUF = b"GGUF"
"""First bytes of a GGUF file and, in small letters, the end of its name."""


@contextmanager
def file_errors(action: str, advice: str = "") -> Iterator[None]:
    """Context manager: turn an `OSError` in the block into a `FileError` with the reason.

    A `FileError` in the block is not changed: its message is more precise.

    Args:
        action: What the block does, after "Cannot" in the message, such as `"read config.json"`.
        advice: End of the message, after the reason; it starts with white space.

    Raises:
        FileError: "Cannot ACTION: REASON.ADVICE"
    """
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"Cannot {action}: {error.strerror or error}.{advice}") from error


@contextmanager
def replace_file(path: Path | str) -> Iterator[Path]:
    """Context manager: yield a temporary path to write to, and rename that file to `path` when the block ends.

    If the block raises an error, the temporary file is removed and `path` is unchanged. The file is flushed to the
    disk before it is renamed.

    Raises:
        FileError: The folder cannot be written, or the disk is full. An old file at `path` is unchanged.
    """
    path = Path(path)
    folder = _temporary_path(
        path
    )  # of its own: safetensors writes to another temporary file beside the one it is given
    partial = folder / path.name
    advice = "\nThe old file, if any, is unchanged. Free some space or choose a folder that can be written."
    try:
        with file_errors(f"write {path}", advice):
            folder.mkdir()
            os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # the kernel applies the umask
            mode = partial.stat().st_mode
            yield partial
            if partial.stat().st_mode != mode:  # safetensors' own file is private
                partial.chmod(stat.S_IMODE(mode))
            _flush_to_disk(partial)
            partial.replace(path)
            _flush_to_disk(path.parent)
    finally:
        _remove(folder)


@contextmanager
def replace_folder(path: Path | str) -> Iterator[Path]:
    """Context manager: yield a temporary folder to write to, and rename it to `path` when the block ends.

    If the block raises an error, the temporary folder is removed and `path` is unchanged. An existing folder at `path`
    is replaced atomically where the system can exchange two names (Linux and macOS, on most file systems). Elsewhere
    `path` is missing for a moment; if the process is killed in this moment, the next `recover_folder(path)` restores
    the old folder.

    Raises:
        FileError: The parent folder cannot be written, or the disk is full.
    """
    path = Path(path)
    partial = _temporary_path(path)
    try:
        with file_errors(f"write the folder {path}"):
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
    finally:
        _remove(partial)


def _replace_folder(new: Path, path: Path) -> None:
    """Rename the folder `new` to `path`, and delete the folder that was at `path`.

    The two names are exchanged atomically if the system supports it. Otherwise the old folder is renamed first and
    deleted last, so that `recover_folder` can restore it.

    Raises:
        OSError: A folder cannot be renamed.
    """
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
    """Restore the old folder at `path` if a process was killed while `replace_folder` replaced it; return `Path(path)`.

    Without such an interrupted replacement nothing changes, and `path` need not exist. Every reader and writer of a
    folder that `replace_folder` writes calls this function first.

    Raises:
        FileError: The folder at `path` cannot be read, or the old folder cannot be renamed to `path`.

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
        if os.path.lexists(path):  # a broken link
            return path
    except ValueError:  # a zero byte in the name: opening it raises the error
        return path
    except OSError as error:
        raise FileError(f"Cannot read {path}: {error.strerror or error}.") from error
    for old in _temporary_paths(path, OLD):
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
    """Delete the temporary files and folders that `replace_file(path)` or `replace_folder(path)` left when killed.

    If `path` itself is missing because its replacement was interrupted, the old folder is restored first. The caller
    makes sure that no other process is writing to `path`.

    Raises:
        FileError: The folder at `path` cannot be read or restored.
    """
    recover_folder(path)
    for suffix in (PARTIAL, OLD):
        for left in _temporary_paths(Path(path), suffix):
            _remove(left)


_own_partials: deque[Path] = deque(maxlen=256)
"""The last temporary paths of this process, most of which are renamed or removed."""


def remove_own_partials() -> None:
    """Delete the temporary files and folders that this process has begun, because it ends without finishing them."""
    for partial in [*_own_partials]:
        _remove(partial)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Context manager: yield a new folder among the system's temporary files, and remove it when the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        _own_partials.append(Path(folder))
        yield Path(folder)


def _temporary_path(path: Path) -> Path:
    """Return a new hidden path beside `path`, with a random part and the ending `.partial`; nothing is created."""
    partial = path.parent / f".{path.name}.{secrets.token_hex(4)}{PARTIAL}"
    _own_partials.append(partial)
    return partial


def _temporary_paths(path: Path, suffix: str) -> list[Path]:
    """List the temporary files and folders of `path` on disk, with paths as from `_temporary_path`, sorted.

    Args:
        path: The file or folder that the temporary ones were to replace.
        suffix: Ending of the temporary names: `PARTIAL` or `OLD`.

    Returns:
        The paths; none if the folder of `path` does not exist or cannot be listed.
    """
    names = re.compile(rf"\.{re.escape(path.name)}\.[^.]+{re.escape(suffix)}")
    try:
        return sorted(file for file in path.parent.iterdir() if names.fullmatch(file.name))
    except OSError:  # there is no such folder, or it cannot be listed: reading in it raises the error
        return []


def _remove(path: Path) -> None:
    """Delete a file, a symbolic link, or a folder with its content; all errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two existing files or folders atomically, so that each has the other's name afterwards.

    Returns:
        Whether they were exchanged. `False`: nothing changed, as the system or the file system cannot exchange names.

    Raises:
        OSError: The exchange failed for another reason.
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
    """Create a folder and its parents unless it exists, check that files can be written in it, and return its path.

    Raises:
        FileError: `path` is a file, or the folder cannot be created or written.
    """
    path = Path(path)
    with file_errors(f"write into the folder {path}", " Choose another folder."):
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path, prefix="."):  # on NFS others see it
            return path


def write_text(path: Path | str, text: str) -> None:
    """Write `text` to a UTF-8 file, atomically; an existing file is replaced.

    Raises:
        FileError: The file cannot be written.
    """
    with replace_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path | str, value: JsonObject) -> None:
    """Write an object to a JSON file, atomically and indented; an existing file is replaced.

    Raises:
        FileError: The file cannot be written.
    """
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def require_file(path: Path | str, *, most: int | None = None) -> None:
    """Check that a path leads to a regular file, before anything opens it: a pipe would wait, and a device never end.

    Args:
        path: The path; a symbolic link is followed.
        most: Largest size in bytes; `None` for no limit.

    Raises:
        FileError: There is nothing at the path, it is a folder, a named pipe, a socket or a device, or the file is
            larger.
    """
    with file_errors(f"read {path}"):
        found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        kind = next((noun for test, noun in _KINDS_OF_PATH.items() if test(found.st_mode)), "of another kind")
        raise FileError(f"Cannot read {path}: it is {kind}, and a file is expected. Copy its content into a file.")
    if most is not None and found.st_size > most:
        raise FileError(
            f"Cannot read {path}: it has {found.st_size:,} bytes, and at most {most:,} are read at once: it is damaged "
            f"or another kind of file."
        )


def read_bytes(path: Path | str, *, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file.

    Args:
        path: The file.
        most: Largest size in bytes.

    Raises:
        FileError: There is no such file, it cannot be read, is no regular file, or is larger than `most`.
    """
    require_file(path, most=most)
    with file_errors(f"read {path}"):
        return Path(path).read_bytes()


def is_gguf(path: Path) -> bool:
    """Return whether a file is a GGUF file, by the end of its name or its first bytes.

    Raises:
        FileError: The file cannot be read.
    """
    require_file(path)
    with file_errors(f"read {path}"), path.open("rb") as file:
        return path.suffix == f".{GGUF.decode().lower()}" or file.read(len(GGUF)) == GGUF


def read_json(path: Path | str) -> JsonObject:
    """Read a JSON file and return the object in it as a dictionary.

    Raises:
        FileError: There is no such file, or it cannot be read.
        CheckpointError: The file is not JSON, or its top level is not an object.
    """
    value = parse_json(read_bytes(path), path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__} where an object is expected.")
    return value


def read_fields(path: Path | str, kind: type, *, version: int | None = None) -> JsonObject:
    """Read a JSON file, check the object in it against a `TypedDict`, and return the object as a dictionary.

    Args:
        path: The file.
        kind: The `TypedDict`. Fields that it does not name are allowed, and are returned too.
        version: Number that the field `format_version` must have; `None` if the file has no such field.

    Raises:
        FileError: There is no such file, or it cannot be read.
        CheckpointError: The file is not a JSON object, has another format version, or a field is missing or has
            another type or range.
    """
    value = read_json(path)
    if version not in (None, value.get("format_version")):
        raise CheckpointError(
            f"{path} has format version {printable(value.get('format_version'))}, and this embedlayer reads version "
            f"{version}. Use the version that wrote it, or create it again."
        )
    check_fields(value, kind, path)
    return value


def _flush_to_disk(path: Path) -> None:
    """Call `fsync` on a file or a folder, so that its content survives a power failure.

    The content of a folder is its list of names; its files are not flushed.

    Raises:
        OSError: It cannot be opened or flushed.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
