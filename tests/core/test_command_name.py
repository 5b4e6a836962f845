"""A command that is printed can be typed: as the user started the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from embedlayer.core import command_name as module
from embedlayer.core.command_name import command_line, command_name


@pytest.fixture
def program(tmp_path, monkeypatch) -> Path:
    """An executable `embedlayer` in a folder of its own."""
    folder = tmp_path / "a place" / "bin"
    folder.mkdir(parents=True)
    for name in ("embedlayer", "python3"):
        (folder / name).touch(0o755)
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    return folder / "embedlayer"


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
def test_the_program_is_named_as_the_shell_finds_it(program, monkeypatch, path, place, name) -> None:
    monkeypatch.setenv("PATH", path.format(folder=program.parent))
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert command_name() == name.format(folder=program.parent)


@pytest.mark.parametrize(("path", "name"), [("{folder}", "python3"), ("/nowhere", "'a place/bin/python3'")])
def test_a_module_is_run_by_the_same_python(program, monkeypatch, path, name) -> None:
    monkeypatch.setenv("PATH", path.format(folder=program.parent))
    monkeypatch.setattr(sys, "argv", [str(Path(module.__file__).parents[1] / "__main__.py")])
    monkeypatch.setattr(sys, "executable", str(program.with_name("python3")))
    assert command_name() == f"{name} -m embedlayer"


def test_in_any_other_program_it_is_the_plain_name(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py", "explore"])
    assert command_name() == "embedlayer"


def test_arguments_are_quoted_except_what_the_reader_fills_in(program, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(program)])
    words = ("neighbors", Path("my run"), " class", "-n", 5, "-o", "...")
    assert command_line(*words) == "'a place/bin/embedlayer' neighbors 'my run' ' class' -n 5 -o ..."


def test_what_it_names_runs(tmp_path) -> None:
    code = "import sys; from embedlayer.core.command_name import command_name; print(command_name())"
    start = [
        sys.executable,
        "-c",
        f"import sys; sys.argv[0] = {str(Path(module.__file__).parents[1] / '__main__.py')!r}\n{code}",
    ]
    said = subprocess.run(start, capture_output=True, text=True, cwd=tmp_path, env=os.environ)
    assert said.returncode == 0, said.stderr
    version = subprocess.run(
        f"{said.stdout.strip()} --version", shell=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert "version" in version.stdout, version.stderr
