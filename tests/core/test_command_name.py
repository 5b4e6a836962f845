"""A command that is printed can be typed: as the user started the process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import embedlayer as el
from embedlayer.data import find_text_files

MAIN = Path(el.__file__).with_name("__main__.py")


@pytest.fixture
def program(tmp_path, monkeypatch) -> Path:
    """An executable `embedlayer` in a folder of its own, and a corpus in `my run`."""
    folder = tmp_path / "a place" / "bin"
    folder.mkdir(parents=True)
    for name in ("embedlayer", "python3"):
        (folder / name).touch(0o755)
    (tmp_path / "other").mkdir()
    (tmp_path / "text.txt").write_text("dogs love naps")
    el.TokenCorpus.build([tmp_path / "text.txt"], el.train_tokenizer((), "byte"), tmp_path / "my run")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    return folder / "embedlayer"


def printed(corpus: Path) -> str:
    """The command in the error for a corpus in the place of text."""
    with pytest.raises(el.core.TextError, match="is a corpus") as caught:
        find_text_files([corpus])
    found = re.search(r"without other files: (.*); in Python", str(caught.value))
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("path", "place", "name"),
    [
        ("{folder}", ".", "embedlayer"),
        ("/nowhere", ".", "'a place/bin/embedlayer'"),
        ("/nowhere", "a place", "bin/embedlayer"),
        ("/nowhere", "other", "'{folder}/embedlayer'"),
    ],
    ids=["on the path", "below the working directory", "nearer", "elsewhere"],
)
def test_the_program_is_named_as_the_shell_finds_it(program, tmp_path, monkeypatch, path, place, name) -> None:
    monkeypatch.setenv("PATH", path.format(folder=program.parent))
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", [str(program)])
    command = name.format(folder=program.parent)
    assert printed(tmp_path / "my run") == f"{command} train '{tmp_path}/my run' -o RUN"


@pytest.mark.parametrize(("path", "name"), [("{folder}", "python3"), ("/nowhere", "'a place/bin/python3'")])
def test_a_module_is_run_by_the_same_python(program, monkeypatch, path, name) -> None:
    monkeypatch.setenv("PATH", path.format(folder=program.parent))
    monkeypatch.setattr(sys, "argv", [str(MAIN)])
    monkeypatch.setattr(sys, "executable", str(program.with_name("python3")))
    assert printed(Path("my run")) == f"{name} -m embedlayer train 'my run' -o RUN"


def test_in_any_other_program_it_is_the_plain_name(program, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py", "explore"])
    assert printed(Path("my run")) == "embedlayer train 'my run' -o RUN"


def test_what_is_printed_runs(program, tmp_path, monkeypatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", [str(MAIN)])
    command = printed(tmp_path / "my run").partition(" train ")[0] + " --version"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert "version" in done.stdout, done.stderr
