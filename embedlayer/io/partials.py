"""Temporary folders beside the target of a write, and the operations that give their content the target's name.

What is written lies in a hidden folder beside its target, which is locked while its process lives. The next write to
the same target removes those that killed processes left.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from embedlayer.io.locks import is_still_at
from embedlayer.io.system_calls import NO_REPLACE, flock, rename

PARTIAL, OLD = ".partial", ".old"
"""Suffixes of hidden names: of what is being written, and of an old folder that is being replaced."""

LONGEST = 100
"""Bytes of a target's name that a hidden name repeats: both fit into every file system (ext4: 255, eCryptfs: 143)."""

_own_folders: deque[Path] = deque(maxlen=256)
"""The last folders of this process, most of which are removed."""


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """Context manager: yield a new, locked folder beside `target`, and remove it with its content in the end.

    Those that killed processes left for this target are removed first; where the file system has no locks, they stay.
    `target` must not be a link, so that the folder is in the same file system.
    """
    remove_free_partials(target)
    is_locked = False
    while not is_locked:
        folder = temporary_path(target, PARTIAL)
        _own_folders.append(folder)
        folder.mkdir(0o700)
        with suppress(FileNotFoundError):  # another process has just removed the folder, as it had no lock
            descriptor, is_locked = os.open(lock_path(folder, target), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), True
            with suppress(OSError):  # the file system has no locks
                is_locked = flock(descriptor) and is_still_at(descriptor, lock_path(folder, target))
            if not is_locked:
                os.close(descriptor)
    try:
        yield folder
    finally:
        _remove_partial(folder, target)
        os.close(descriptor)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Context manager: yield a new folder among the system's temporary files, and remove it when the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        _own_folders.append(Path(folder))
        yield Path(folder)


def remove_own_folders() -> None:
    """Delete the temporary folders of this process, because it ends without finishing what it writes."""
    for folder in [*_own_folders]:
        remove(folder)


def lock_path(folder: Path, target: Path) -> Path:
    """Return the lock file in a folder of `partial_folder`, whose name is not that of the target, whatever its case."""
    return folder / ("lock" if target.name.lower() != "lock" else "lock-")


def remove_free_partials(target: Path) -> None:
    """Remove the folders of `partial_folder(target)` whose processes have ended."""
    for folder in temporary_paths(target, PARTIAL):
        with suppress(OSError):
            folder.rmdir()  # empty: its process was killed before it made the lock, or will make another folder
            continue
        with suppress(OSError):
            descriptor = os.open(lock_path(folder, target), os.O_RDWR)
            try:
                if flock(descriptor):
                    _remove_partial(folder, target)
            finally:
                os.close(descriptor)


def _remove_partial(folder: Path, target: Path) -> None:
    """Delete a folder of `partial_folder(target)`, its lock file last: without it, no other process could do so."""
    lock = lock_path(folder, target)
    with suppress(OSError):
        for path in folder.iterdir():
            if path != lock:
                remove(path)
    remove(lock)
    with suppress(OSError):
        folder.rmdir()


def temporary_path(target: Path, suffix: str) -> Path:
    """Return a new hidden path beside `target`, with a random part and the ending `suffix`; nothing is created."""
    return target.parent / f".{_stem(target.name)}.{secrets.token_hex(4)}{suffix}"


def temporary_paths(target: Path, suffix: str) -> list[Path]:
    """List the temporary folders of `target` on disk, whose names end in `suffix` (`PARTIAL` or `OLD`), sorted."""
    names = re.compile(rf"\.{re.escape(_stem(target.name))}\.[0-9a-f]{{8}}{re.escape(suffix)}")
    try:
        with os.scandir(target.parent) as entries:
            entries_of_target = [entry.name for entry in entries if names.fullmatch(entry.name) and entry.is_dir()]
    except OSError:  # there is no such folder, or it cannot be listed: writing in it raises the error
        return []
    return [target.parent / name for name in sorted(entries_of_target)]


def _stem(name: str) -> str:
    """Return the name of a target for hidden names; of a long one, the beginning and a digest of the whole."""
    raw = os.fsencode(name)
    if len(raw) <= LONGEST:
        return name
    return f"{raw[: LONGEST - 9].decode(errors='ignore')}-{hashlib.sha256(raw).hexdigest()[:8]}"


def remove(path: Path) -> None:
    """Delete a file, a symbolic link, or a folder with its content; all errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def name_new_file(partial: Path, path: Path) -> None:
    """Rename the file `partial` to `path`, in one step with the check that nothing is there.

    Where neither such a rename nor hard links exist, an empty file at `path` takes the name first.
    """
    if rename(partial, path, NO_REPLACE):
        return
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # no hard links, as on FAT
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        partial.replace(path)
    else:
        partial.unlink()


def name_new_folder(partial: Path, path: Path) -> None:
    """Rename the folder `partial` to `path`, in one step with the check that nothing or an empty folder is there."""
    mode = None
    try:
        with suppress(FileNotFoundError):
            mode = stat.S_IMODE(path.lstat().st_mode)
            partial.chmod(mode | 0o700)  # a folder that is not writable cannot be moved
        partial.rename(path)
        if mode is not None:
            path.chmod(mode)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR, errno.EEXIST):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        raise
