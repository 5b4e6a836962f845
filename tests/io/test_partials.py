"""A name is given in one step, and what a process left is known by its lock."""

import os
from pathlib import Path

import pytest

from embedlayer.io import partials, system_calls

pytestmark = pytest.mark.usefixtures("system")


@pytest.mark.parametrize("links", ["links", "no links"])
def test_a_file_gets_a_name_that_nothing_has(tmp_path: Path, monkeypatch, links: str) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if links == "no links":
        monkeypatch.setattr(os, "link", fail)
    for taken in (None, "file", "folder", "link"):
        (tmp_path / "new").write_text("new")
        if taken == "file":
            (tmp_path / "a").write_text("mine")
        elif taken == "folder":
            (tmp_path / "a").mkdir()
        elif taken == "link":
            (tmp_path / "a").symlink_to("nothing")
        if taken is None:
            partials.name_new_file(tmp_path / "new", tmp_path / "a")
            assert (tmp_path / "a").read_text() == "new"
            (tmp_path / "a").unlink()
            continue
        with pytest.raises(FileExistsError):
            partials.name_new_file(tmp_path / "new", tmp_path / "a")
        assert sorted(os.listdir(tmp_path)) == ["a", "new"]
        partials.remove(tmp_path / "a")


def test_hidden_names_are_short_and_of_one_target(tmp_path: Path) -> None:
    names = ["a", "a" * 250, "a" * 249 + "b", "ä" * 120, "ä" * 119 + "a", "\udcff" * 240]
    for name in names:
        with partials.partial_folder(tmp_path / name) as folder:
            assert len(os.fsencode(folder.name)) <= 130
            assert [other for other in names if partials.temporary_paths(tmp_path / other, partials.PARTIAL)] == [name]


def test_where_there_are_no_locks_nothing_is_removed_but_what_is_empty(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(system_calls, "fcntl", None)
    (tmp_path / ".a.00000000.partial").mkdir()
    (tmp_path / ".a.00000001.partial").mkdir()
    (tmp_path / ".a.00000001.partial" / "lock").touch()
    with partials.partial_folder(tmp_path / "a") as folder:
        (folder / "a").touch()
        partials.remove_free_partials(tmp_path / "a")
        assert sorted(tmp_path.iterdir()) == sorted([tmp_path / ".a.00000001.partial", folder])
    assert os.listdir(tmp_path) == [".a.00000001.partial"]


@pytest.mark.parametrize("name", ["lock", "Lock", ".lock", "lock-"])
def test_the_lock_has_not_the_name_of_the_target(tmp_path: Path, name: str) -> None:
    with partials.partial_folder(tmp_path / name) as folder:
        assert os.listdir(folder)[0].lower() != name.lower()  # many file systems of macOS ignore the case
