"""What the systems call differently does the same on each, or says that it did nothing."""

import ctypes
import errno
import fcntl
import os
from pathlib import Path

import pytest
from hidden_calls import FULL_SYNC

from embedlayer.core.errors import CheckpointError, FileError
from embedlayer.io import system_calls
from embedlayer.io.files import replace_file
from embedlayer.io.system_calls import EXCHANGE, NO_REPLACE, rename
from embedlayer.tables import MappedEmbedding

pytestmark = pytest.mark.usefixtures("system")


def test_two_names_are_exchanged_or_nothing_changes(tmp_path: Path, system: str) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert rename(tmp_path / "one", tmp_path / "other", EXCHANGE) is (system != "POSIX")
    assert os.listdir(tmp_path / "one") == ["one" if system == "POSIX" else "other"]


def test_a_rename_fails_where_a_name_is_taken_and_where_the_file_system_cannot(tmp_path, monkeypatch, system) -> None:
    (tmp_path / "one").touch()
    (tmp_path / "other").touch()
    if system == "POSIX":
        assert not rename(tmp_path / "one", tmp_path / "other", NO_REPLACE)
        return
    with pytest.raises(FileExistsError):
        rename(tmp_path / "one", tmp_path / "other", NO_REPLACE)

    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.ENOTSUP)
        return -1

    monkeypatch.setattr(system_calls, "_c_function", lambda name: refuse)
    assert not rename(tmp_path / "one", tmp_path / "other", NO_REPLACE)
    assert sorted(os.listdir(tmp_path)) == ["one", "other"]


def test_the_start_of_the_machine_is_known_or_a_folder_that_was_left_open_is_refused(tmp_path, system, trained) -> None:
    if system != "POSIX":
        assert MappedEmbedding.resume(trained).weight.shape == (50, 4)
        return
    with pytest.raises(CheckpointError):
        MappedEmbedding.resume(trained)
    (trained / "open.json").unlink()
    assert MappedEmbedding.resume(trained).weight.shape == (50, 4)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A folder of a table as a killed process left it."""
    with MappedEmbedding.create(tmp_path / "rows", 50, 4) as table, table.checkpoint():
        mark = (tmp_path / "rows" / "open.json").read_text()
    (tmp_path / "rows" / "open.json").write_text(mark)
    return tmp_path / "rows"


def test_the_space_of_a_table_is_on_the_disk_before_it_is_written(tmp_path, monkeypatch, system) -> None:
    MappedEmbedding.create(tmp_path / "rows", 700, 600, init_std=0.0).close()
    (file,) = (tmp_path / "rows").glob("*.safetensors")
    assert 700 * 600 * 4 < file.stat().st_size <= file.stat().st_blocks * 512

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate" if system == "Linux" else "write", full)
    with pytest.raises(FileError, match="No space left"):
        MappedEmbedding.create(tmp_path / "other", 700, 600)


def test_content_is_flushed_to_the_disk_as_far_as_the_system_can(tmp_path, monkeypatch, system) -> None:
    requested: list[object] = []

    def full_sync(descriptor: int, command: int) -> None:
        requested.append(command)
        raise OSError(errno.ENOTSUP, "not on this file system")

    monkeypatch.setattr(os, "fsync", lambda descriptor: requested.append("fsync"))
    monkeypatch.setattr(fcntl, "fcntl", full_sync)
    with replace_file(tmp_path / "a"):
        pass
    one = [FULL_SYNC, "fsync"] if system == "macOS" else ["fsync"]
    assert requested == one * (len(requested) // len(one)) != []
