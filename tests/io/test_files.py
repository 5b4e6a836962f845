"""Nothing half-written is ever seen."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from covering import some
from hidden_calls import SYSTEMS
from processes import run_program

import embedlayer as el
from embedlayer.core.errors import CheckpointError, FileError
from embedlayer.io import files, system_calls

pytestmark = pytest.mark.usefixtures("system")


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("old")
    with pytest.raises(RuntimeError), files.replace_file(file) as partial:
        partial.write_text("new")
        raise RuntimeError
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


REPLACING = {"replace_file": files.replace_file, "replace_folder": files.replace_folder, "new_file": files.new_file}


@pytest.mark.parametrize("replace", ["replace_file", "replace_folder"])
def test_what_a_killed_process_left_of_a_save_is_cleared_away_and_nothing_else(tmp_path: Path, replace: str) -> None:
    others = {"a[1]", ".a[1]b.12345678.partial", ".a1.12345678.partial", ".a[1].1234567.partial"}
    for name in others:
        (tmp_path / name).mkdir()
    if replace == "replace_file":
        (tmp_path / "a[1]").rmdir()
        (tmp_path / "a[1]").write_text("stays")
    code = f"""
import os
from embedlayer.io import files
with files.{replace}({str(tmp_path / "a[1]")!r}):
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert len(os.listdir(tmp_path)) == 5
    with REPLACING[replace](tmp_path / "a[1]"):  # the next write
        assert len(os.listdir(tmp_path)) == 5
    assert set(os.listdir(tmp_path)) == others


@pytest.mark.parametrize("replace", REPLACING)
def test_a_write_leaves_those_alone_that_are_not_finished(tmp_path: Path, replace: str) -> None:
    path = tmp_path / "out"
    with REPLACING[replace](path) as one:
        files.remove_partials(path)
        with pytest.raises(RuntimeError), REPLACING[replace](path) as other:
            assert one != other
            raise RuntimeError
        assert one.exists()
        assert not path.exists()
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("links", ["links", "no links"])
def test_a_new_file_gets_a_name_that_nothing_has(tmp_path: Path, monkeypatch, links: str) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if links == "no links":
        monkeypatch.setattr(os, "link", fail)
    with files.new_file(tmp_path / "new") as partial:
        partial.write_text("new")
    assert (tmp_path / "new").read_text() == "new"
    takes = {"file": Path.touch, "folder": Path.mkdir, "link": lambda path: path.symlink_to("nothing")}
    for name, take in takes.items():
        with pytest.raises(FileError, match=f"{name} appeared while this was computed"):  # noqa: SIM117
            with files.new_file(tmp_path / name):
                take(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "link", "new"]


def test_hidden_names_are_short_and_of_one_target(tmp_path: Path) -> None:
    names = ["a", "a" * 250, "a" * 249 + "b", "ä" * 120, "ä" * 119 + "a", "\udcff" * 240, "lock", "Lock", ".lock"]
    left = {}
    for name in names:
        with files.replace_file(tmp_path / name) as partial:
            folder = partial.parent
            assert len(os.fsencode(folder.name)) <= 130
            # many file systems of macOS ignore the case
            assert [each.lower() for each in os.listdir(folder)].count(name.lower()) == 1
            shutil.copytree(folder, tmp_path / "kept")
            left[name] = folder
        (tmp_path / name).unlink()
        (tmp_path / "kept").rename(folder)  # as a killed process leaves it
    while left:
        name, folder = left.popitem()
        files.remove_partials(tmp_path / name)
        assert sorted(tmp_path.iterdir()) == sorted(left.values())


def test_where_there_are_no_locks_nothing_is_removed_but_what_is_empty(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(system_calls, "fcntl", None)
    (tmp_path / ".a.00000000.partial").mkdir()
    (tmp_path / ".a.00000001.partial").mkdir()
    (tmp_path / ".a.00000001.partial" / "lock").touch()
    with files.replace_file(tmp_path / "a") as partial:
        files.remove_partials(tmp_path / "a")
        assert sorted(tmp_path.iterdir()) == sorted([tmp_path / ".a.00000001.partial", partial.parent])
    assert sorted(os.listdir(tmp_path)) == [".a.00000001.partial", "a"]


def test_new_files_and_folders_have_the_permissions_of_any_other(tmp_path: Path) -> None:
    code = f"""
import os, pathlib
import embedlayer as el
os.umask(0o027)
def umask(mask):
    raise AssertionError("the umask is that of all threads")
os.umask = umask
path = pathlib.Path({str(tmp_path)!r})
(path / "plain").write_text("text")
(path / "plain folder").mkdir()
el.TokenEmbedding(4, 2).save_pretrained(path / "plain folder")
for _ in range(2):
    el.TokenCorpus.build([path / "plain"], el.train_tokenizer((), "byte"), path / "folder")
"""
    exit_code, _, errors = run_program("-c", code)
    assert exit_code == 0, errors
    modes = {str(file.relative_to(tmp_path)): file.stat().st_mode for file in tmp_path.rglob("*")}
    written = ("plain folder/config.json", "plain folder/model.safetensors", "folder/ids.bin", "folder/index.json")
    assert {modes[name] for name in written} == {modes["plain"]}
    assert modes["folder"] == modes["plain folder"]


KILLS = """
import os, pathlib, sys, tempfile
import pytest
from hidden_calls import hide
from embedlayer.io import files

def watch(stop_at):
    # ends this process at its so-many-th operation on the file system, before it is carried out
    count = 0
    def hook(event, arguments):
        nonlocal count
        if event.partition(".")[0] in ("open", "os", "shutil", "ctypes"):
            count += 1
            if count == stop_at:
                os._exit(9)
    sys.addaudithook(hook)

def contents(path):
    return {str(file.relative_to(path)): file.read_text() for file in path.rglob("*") if file.is_file()}

def replace(path):
    if "folder" not in kind:
        with (files.new_file if kind == "new file" else files.replace_file)(path) as partial:
            partial.write_text("new" * 10_000)
        return
    with (files.new_folder if kind == "new folder" else files.replace_folder)(path) as partial:
        for name in ("new", "both"):
            (partial / name).write_text("new " + name)
        (partial / "inner").mkdir()
        (partial / "inner" / "deep").write_text("new")

system, *kinds = sys.argv[1:]
hide(system, pytest.MonkeyPatch())
old = {"old": "old", "both": "old both"}
new = {"new": "new new", "both": "new both", "inner/deep": "new"}
for kind in kinds:
    seen, ended, stop_at = set(), False, 0
    while not ended:
        stop_at += 1
        with tempfile.TemporaryDirectory() as name:
            path = pathlib.Path(name) / "out.x"
            if kind == "file":
                path.write_text("old")
            elif kind == "folder":
                path.mkdir()
                for name, content in old.items():
                    (path / name).write_text(content)
            child = os.fork()
            if not child:
                watch(stop_at)
                replace(path)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code in (0, 9), code
            ended = code == 0
            missing = not path.exists()
            files.recover_folder(path)
            if missing and kind.startswith("new"):
                found = "old"
            elif "folder" not in kind:
                found = path.read_text()
                assert found in ("old", "new" * 10_000), found
                found = found[:3]
            else:
                found = contents(path)
                assert found == new or (found == old and kind == "folder"), found
                found = "old" if found == old else "new"
            assert not ended or found == "new"
            files.remove_partials(path)
            assert os.listdir(path.parent) == ["out.x"] * path.exists()
            seen.add((found, missing))
    print(stop_at, sorted(seen))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each kill is of a process made by fork")
@pytest.mark.parametrize("system", some(["Linux", "POSIX"], SYSTEMS), indirect=True)
def test_a_process_killed_at_any_operation_leaves_the_old_or_the_new_whole(system: str) -> None:
    kinds = ["file", "folder", "new file", "new folder"]
    code = [sys.executable, "-c", KILLS, system, *kinds]
    paths = os.pathsep.join((str(Path(__file__).parents[1]), *sys.path))
    result = subprocess.run(code, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": paths})
    for kind, line in zip(kinds, result.stdout.splitlines(), strict=True):
        kills, seen = line.split(" ", 1)
        assert int(kills) > 8
        if kind == "folder" and system == "POSIX":
            assert "('old', True)" in seen  # it was missing, and is put back
        elif not kind.startswith("new"):
            assert "True" not in seen


def test_an_old_folder_that_cannot_be_put_back_is_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / ".a.12345678.old").mkdir()
    (tmp_path / ".a.b.12345678.old").mkdir()  # of another folder
    monkeypatch.setattr(os, "rename", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(FileError, match="Permission denied"):
        files.recover_folder(tmp_path / "a")
    monkeypatch.undo()
    assert files.recover_folder(tmp_path / "a").is_dir()
    assert os.listdir(tmp_path / ".a.b.12345678.old") == []


def test_what_is_missing_or_no_json_or_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError):
        el.TokenEmbedding.from_pretrained(tmp_path)
    for content in ("{", "[1]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match="config.json"):
            el.TokenEmbedding.from_pretrained(tmp_path)
    with pytest.raises(FileError):
        el.TokenEmbedding(2, 2).save_pretrained(tmp_path / "config.json" / "inner")


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    with files.replace_folder(folder) as partial:
        (partial / "ids").write_text("old")
        assert not folder.exists()
    with pytest.raises(KeyboardInterrupt), files.replace_folder(folder) as partial:
        (partial / "ids").write_text("new")
        raise KeyboardInterrupt
    assert (folder / "ids").read_text() == "old"
    assert os.listdir(tmp_path) == ["corpus"]
    with files.replace_folder(folder) as partial:
        (partial / "ids").write_text("new")
    assert (folder / "ids").read_text() == "new"
