"""Write files and folders atomically, and read JSON.

What is written lies in a hidden folder beside its target, is flushed to the disk, and gets the target's name in one
step. A full disk or a killed process leaves the target unchanged, and nothing else at its name is ever deleted:

| | target must be new | target may exist |
|---|---|---|
| file | `new_file`, `new_files` | `replace_file` |
| folder | `new_folder` | `replace_folder` |

A link to a target stays, and what it names is written. What is replaced keeps its permissions. A character device or a
pipe (`/dev/null`, a FIFO) is written to when the content is complete, and not atomically.
"""

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from embedlayer.core.errors import CheckpointError, FileError
from embedlayer.io.json_fields import check_fields, parse_json, printable
from embedlayer.io.partials import (
    OLD,
    name_new_file,
    name_new_folder,
    partial_folder,
    remove,
    remove_free_partials,
    temporary_path,
    temporary_paths,
)
from embedlayer.io.system_calls import EXCHANGE, flush, rename

JsonObject = dict[str, Any]

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
    """Context manager: turn an `OSError` in the block into the `FileError` "Cannot ACTION: REASON.ADVICE".

    `action` is what the block does, such as `"read config.json"`, and `advice` starts with white space. A `FileError`
    in the block passes unchanged, because its message is more precise.
    """
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"Cannot {action}: {error.strerror or error}.{advice}") from error


def named_path(path: Path | str) -> Path:
    """Return a path that a user names as a `Path`, before anything is read or written there."""
    # `Path` takes an empty name for the current folder
    if not os.fspath(path):
        raise FileError("The name of the file or folder is empty. For the current folder, pass a dot.")
    return Path(path)


@contextmanager
def replace_file(path: Path | str) -> Iterator[Path]:
    """Context manager: yield a temporary path to write to, and rename that file to `path` when the block ends.

    If the block raises an error, the temporary file is removed and `path` is unchanged. The file is flushed to the disk
    before it is renamed, and has the permissions of the file that it replaces. If `path` is a link, the file that it
    names is replaced. A character device or a pipe gets the content when the block ends, and is not replaced.
    """
    advice = "\nThe old file, if any, is unchanged. Free some space or choose a folder that can be written."
    with file_errors(f"write {path}", advice):
        target = _real_path(path)
        if is_stream(target):
            with _stream(target) as partial:
                yield partial
            return
        if target.is_dir():
            raise FileError(f"{path} is a folder, and a file is to be written. Choose another name.")
        with partial_folder(target) as folder:
            with _created(folder / _name(path, target), target) as partial:
                yield partial
            partial.replace(target)
            flush_to_disk(target.parent)


@contextmanager
def new_file(path: Path | str) -> Iterator[Path]:
    """Context manager: yield a temporary path to write to, and rename that file to `path`, which must be new."""
    with new_files(path) as (partial,):
        yield partial


@contextmanager
def new_files(path: Path | str, *beside: Path | str) -> Iterator[Sequence[Path]]:
    """Context manager: yield temporary paths to write to, and rename the files to new names when the block ends.

    The check that nothing is at a name and the renaming are one step: what is at one of the names stays, and none of
    the files is written. Missing folders above `path` are created. The names of further files, in the same folder, must
    follow from that of `path`.
    """
    check_new_files(path, *beside)
    with file_errors(f"write {path}"):
        targets = [_real_path(each) for each in (path, *beside)]
        if is_stream(targets[0]):
            with _stream(targets[0]) as partial:
                yield [partial]
            return
        targets[0].parent.mkdir(parents=True, exist_ok=True)
        with partial_folder(targets[0]) as folder:
            with ExitStack() as stack:
                names = [_name(each, target) for each, target in zip((path, *beside), targets, strict=True)]
                yield [stack.enter_context(_created(folder / name, None)) for name in names]
            named: list[Path] = []
            try:
                for name, target in zip(names, targets, strict=True):
                    name_new_file(folder / name, target)
                    named.append(target)
            except BaseException as error:
                for target in named:
                    target.unlink(missing_ok=True)
                if isinstance(error, FileExistsError):
                    raise _changed(targets[len(named)], "appeared") from error
                raise
            flush_to_disk(targets[0].parent)


def check_new_files(path: Path | str, *beside: Path | str) -> None:
    """Check that files do not exist and can have their names, before the work of which they are the result."""
    for each in (path, *beside):
        with file_errors(f"write {each}"):
            target = _real_path(each)
            if is_stream(target):
                if not beside:
                    return
                raise FileError(f"{each} is a device or a pipe, and several files are written. Choose another name.")
            with suppress(FileNotFoundError, PermissionError):  # without permission it is found when it is made
                target.lstat()
                raise FileError(f"{each} exists. Remove it, or choose another name.")


@contextmanager
def _stream(path: Path) -> Iterator[Path]:
    """Context manager: yield a temporary path, and write the content of that file to a device or a pipe."""
    with tempfile.TemporaryDirectory() as folder:
        partial = Path(folder) / path.name
        partial.touch()
        yield partial
        with partial.open("rb") as content, path.open("wb") as stream:
            shutil.copyfileobj(content, stream)


def is_stream(path: Path | str) -> bool:
    """Return whether a character device or a pipe is at `path`, also through a link."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    if stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        what = "a block device" if stat.S_ISBLK(mode) else "a socket"
        raise FileError(f"{path} is {what}, to which no file is written. Choose another name.")
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def _real_path(path: Path | str) -> Path:
    """Return the path that a link at `path` names, or `path`; a link to a device or a pipe is not followed."""
    return named_path(path) if is_stream(path) else Path(os.path.realpath(named_path(path)))


def _name(path: Path | str, target: Path) -> str:
    """Return the file name with which `path` is written: that of a link, not of its target, as it says the format."""
    name = Path(path).name
    return target.name if name in ("", "..") else name


@contextmanager
def _created(partial: Path, old_file: Path | None) -> Iterator[Path]:
    """Context manager: create a file and yield its path; at the end set its permissions and flush it to the disk."""
    old = None if old_file is None or not old_file.exists() else stat.S_IMODE(old_file.stat().st_mode)
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if old is None else old | 0o600))
    mode = stat.S_IMODE(partial.stat().st_mode) if old is None else old  # the kernel applies the umask
    yield partial
    if stat.S_IMODE(partial.stat().st_mode) != mode:  # safetensors' own file is private
        partial.chmod(mode)
    flush_to_disk(partial)


@contextmanager
def replace_folder(path: Path | str) -> Iterator[Path]:
    """Context manager: yield a temporary folder to write to, and rename it to `path` when the block ends.

    If the block raises an error, the temporary folder is removed and `path` is unchanged. An existing folder at `path`
    is replaced atomically where the system can exchange two names (Linux and macOS, on most file systems). Elsewhere
    `path` is missing for a moment; after a kill in this moment, the next `recover_folder(path)` restores the old
    folder. A folder that has changed since the block began is not replaced.
    """
    with file_errors(f"write the folder {path}"):
        target = _real_path(recover_folder(path))
        _require_folder(target)
        before = _listing(target)
        with partial_folder(target) as folder:
            partial = folder / _name(path, target)
            partial.mkdir()
            yield partial
            _flush_folder(partial)
            recover_folder(target)
            if _listing(target) != before:
                raise _changed(target)
            if before:
                _keep_permissions(target, partial)
                _replace_folder(partial, target, before)
            else:
                _name_folder(partial, target)
            flush_to_disk(target.parent)
            for left in temporary_paths(target, OLD):
                remove(left)


@contextmanager
def new_folder(path: Path | str) -> Iterator[Path]:
    """Context manager: yield a temporary folder to write to, and rename it to `path`, which must be new."""
    check_new_folder(path)
    with file_errors(f"write the folder {path}"):
        target = _real_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial_folder(target) as folder:
            partial = folder / _name(path, target)
            partial.mkdir()
            yield partial
            _flush_folder(partial)
            _name_folder(partial, target)
            flush_to_disk(target.parent)


def check_new_folder(path: Path | str) -> None:
    """Check that a folder does not exist or is empty, before the work of which it is the result."""
    target = _real_path(path)
    _require_folder(target)
    with file_errors(f"write the folder {path}"), suppress(FileNotFoundError, PermissionError):  # found when it is made
        if os.listdir(target):
            raise FileError(f"{path} is not empty. Choose a folder that does not exist yet.")


def visible_names(folder: Path) -> list[str]:
    """Return the sorted names in a folder, without hidden ones: locks, and results that are not complete."""
    with file_errors(f"read the folder {folder}"), suppress(FileNotFoundError):
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    return []


def _require_folder(path: Path) -> None:
    """Raise a `FileError` if something else than a folder is at `path`."""
    if os.path.exists(path) and not os.path.isdir(path):
        what = "device or a pipe" if is_stream(path) else "file"
        raise FileError(f"{path} is a {what}, not a folder. Choose a folder that does not exist yet.")


def _name_folder(partial: Path, target: Path) -> None:
    """Give a new folder its name; raise a `FileError` if something else than an empty folder is there."""
    try:
        name_new_folder(partial, target)
    except FileExistsError as error:
        raise _changed(target, "appeared") from error


def _changed(path: Path, what: str = "has changed") -> FileError:
    """Return the error about a target that is not what it was when the work began."""
    return FileError(f"{path} {what} while this was computed. Choose another name, or start again.")


def _listing(folder: Path) -> dict[str, tuple[int, int, int]] | None:
    """Return inode, size and time of each file in a folder, by relative path; `None` if there is no folder."""
    listing: dict[str, tuple[int, int, int]] = {}
    places = [os.fspath(folder)]
    try:
        for place in places:  # grows by the folders in it
            with os.scandir(place) as entries:
                paths = [entry.path for entry in entries]
            for path in paths:
                facts = os.lstat(path)
                is_folder = stat.S_ISDIR(facts.st_mode)
                places += [path] if is_folder else []
                times = (0, 0) if is_folder else (facts.st_size, facts.st_mtime_ns)
                listing[os.path.relpath(path, folder)] = facts.st_ino, *times
    except FileNotFoundError:
        return None
    return listing


def _replace_folder(new: Path, path: Path, before: dict[str, tuple[int, int, int]]) -> None:
    """Rename the folder `new` to `path`, and what was at `path` to `new`, where it is deleted in the end.

    The two names are exchanged atomically if the system supports it. Otherwise the old folder is renamed first, so that
    `recover_folder` can restore it. A folder that turns out to have changed since `before` gets its name back, and an
    error is raised.
    """
    if rename(new, path, EXCHANGE):
        if _listing(new) != before:
            rename(new, path, EXCHANGE)
            raise _changed(path)
        return
    old = temporary_path(path, OLD)
    path.rename(old)
    try:
        if _listing(old) != before:
            raise _changed(path)
        new.rename(path)
    except BaseException:
        old.rename(path)
        raise
    remove(old)


def _keep_permissions(old: Path, new: Path) -> None:
    """Give a folder and its files the permissions of the folder that it replaces, and of files of the same names."""
    for file in (new, *new.rglob("*")):
        with suppress(FileNotFoundError):
            mode = (old / file.relative_to(new)).lstat().st_mode
            if stat.S_IFMT(mode) == stat.S_IFMT(file.lstat().st_mode) and not stat.S_ISLNK(mode):
                file.chmod(stat.S_IMODE(mode))


def recover_folder(path: Path | str) -> Path:
    """Restore the old folder at `path` after a kill during `replace_folder`; return `Path(path)`.

    Every reader and writer of a folder that `replace_folder` writes calls this function first. Without an interrupted
    replacement nothing changes, and `path` need not exist.
    """
    path = named_path(path)
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            os.scandir(path).close()
        return path
    except (FileNotFoundError, NotADirectoryError):
        target = Path(os.path.realpath(path))
        if os.path.lexists(target):  # links that name each other
            return path
    except ValueError:  # a zero byte in the name: opening it raises the error
        return path
    except OSError as error:
        raise FileError(f"Cannot read {path}: {error.strerror or error}.") from error
    for old in temporary_paths(target, OLD):
        try:
            old.rename(target)
        except OSError as error:
            if not os.path.lexists(target) and os.path.lexists(old):  # no other process has done it meanwhile
                raise FileError(f"A killed process left {old}: rename it to {target} ({error.strerror}).") from error
        break
    return path


def remove_partials(path: Path | str) -> None:
    """Delete the temporary folders that killed processes left when they wrote to `path`, as the next write does."""
    target = Path(os.path.realpath(recover_folder(path)))
    remove_free_partials(target)
    for left in temporary_paths(target, OLD):
        remove(left)


def create_folder(path: Path | str) -> Path:
    """Create a folder and its parents unless it exists, check that files can be written in it, and return its path."""
    path = named_path(path)
    with file_errors(f"write into the folder {path}", " Choose another folder."):
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path, prefix="."):  # on NFS others see it
            return path


def write_text(path: Path | str, text: str) -> None:
    """Write `text` to a UTF-8 file, atomically; an existing file is replaced."""
    with replace_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path | str, value: JsonObject) -> None:
    """Write an object to a JSON file, atomically and indented; an existing file is replaced."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def require_file(path: Path | str, *, most: int | None = None) -> None:
    """Check that a path leads to a regular file before it is opened: a pipe would wait, and a device never end."""
    with file_errors(f"read {path}"):
        facts = os.stat(path)
    if not stat.S_ISREG(facts.st_mode):
        kind = next((noun for test, noun in _KINDS_OF_PATH.items() if test(facts.st_mode)), "of another kind")
        raise FileError(f"Cannot read {path}: it is {kind}, and a file is expected. Copy its content into a file.")
    if most is not None and facts.st_size > most:
        raise FileError(f"Cannot read {path}: it has {facts.st_size:,} bytes, more than the {most:,} of such a file.")


def read_bytes(path: Path | str, *, most: int = MOST_BYTES) -> bytes:
    require_file(path, most=most)
    with file_errors(f"read {path}"):
        return Path(path).read_bytes()


def is_gguf(path: Path) -> bool:
    """Return whether a file is a GGUF file, by the end of its name or its first bytes."""
    require_file(path)
    with file_errors(f"read {path}"), path.open("rb") as file:
        return path.suffix == f".{GGUF.decode().lower()}" or file.read(len(GGUF)) == GGUF


def read_json(path: Path | str) -> JsonObject:
    """Read a JSON file and return the object in it as a dictionary."""
    value = parse_json(read_bytes(path), path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__} where an object is expected.")
    return value


def read_fields(path: Path | str, kind: type, *, version: int | None = None) -> JsonObject:
    """Read a JSON file, check the object in it against a `TypedDict`, and return the object as a dictionary."""
    value = read_json(path)
    if version not in (None, value.get("format_version")):
        found = printable(value.get("format_version"))
        raise CheckpointError(f"{path} has format version {found}, and this embedlayer reads version {version}.")
    check_fields(value, kind, path)
    return value


def _flush_folder(path: Path) -> None:
    for file in (*path.rglob("*"), path):
        flush_to_disk(file)


def flush_to_disk(path: Path) -> None:
    """Write a file or a folder to the disk, so that its content survives a power failure.

    The content of a folder is its list of names; its files are not flushed.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        flush(handle)
    finally:
        os.close(handle)
