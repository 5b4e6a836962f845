"""The command as a person meets it."""

import os
import subprocess
import sys

import pytest
from commands import run
from covering import LONG

from embedlayer import __version__
from embedlayer.cli.main import WAITING, cli


def test_help_lists_every_command_and_loads_no_torch() -> None:
    code = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))\n"
    code += "from embedlayer.cli.main import main; main(['--help'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in cli.commands:
        assert name in result.stdout
    assert result.stdout.endswith("\nFalse\n")


@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, pytest.param({"GOMP_SPINCOUNT": "7"}, marks=LONG)])
def test_idle_threads_of_torch_soon_leave_their_core_unless_the_user_chose(own) -> None:
    code = "import atexit, os; atexit.register(lambda: print({n: os.environ.get(n) for n in WAITING}))\n"
    code += "from embedlayer.cli.main import WAITING, main; main(['--version'])"
    environment = {name: value for name, value in os.environ.items() if name not in WAITING} | own
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.splitlines()[-1] == str({name: (own or WAITING).get(name) for name in WAITING})


def test_lines_of_the_log_are_printed_on_standard_error() -> None:
    code = "import atexit, logging; from embedlayer.cli.main import main\n"
    code += (
        "atexit.register(lambda: [logging.getLogger(name).info('%s waits', name) for name in ('embedlayer', 'other')])"
    )
    result = subprocess.run([sys.executable, "-c", f"{code}\nmain(['--version'])"], capture_output=True, text=True)
    assert result.stderr.splitlines() == ["embedlayer waits"]


def test_a_worker_of_torchrun_exits_without_finalising_the_interpreter() -> None:
    code = "import atexit; atexit.register(print, 'finalised')\n"
    code += "from embedlayer.cli.main import main; main(['plan', '--vocab-size', '0'])"
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    alone, worker = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        for env in (None, environment)
    )
    assert worker.returncode == alone.returncode == 2
    assert worker.stderr == alone.stderr != ""
    assert alone.stdout == worker.stdout + "finalised\n"


def test_the_version_is_the_packages(capsys) -> None:
    assert run("--version") == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "-o", "{tmp}/run"], 2, "There is no text to train on"),
        (["train", "{tmp}/none.txt", "-o", "{tmp}/run"], 1, "none.txt"),
        (["train", "{tmp}/empty.txt", "-o", "{tmp}/run", "--steps", "1"], 2, "empty"),
        (
            ["train", "{tmp}/short.txt", "-o", "{tmp}/run", "--steps", "1", "--tokenizer", "byte"],
            2,
            "too small for a validation part",
        ),
        (["train", "{tmp}/latin1.txt", "-o", "{tmp}/run", "--steps", "1"], 2, "UTF-8"),
        (["train", "{tmp}/short.txt", "-o", "{tmp}/short.txt/run", "--steps", "1"], 1, "Cannot write into the folder"),
        (["train", "{tmp}/short.txt", "-o", "{tmp}/run", "--steps", "-1"], 2, "steps must be positive"),
        (
            ["train", "{tmp}/short.txt", "-o", "{tmp}/run", "--heads", "5", "--length", "4"],
            2,
            "not divisible by 5 heads",
        ),
        (["train", "-o", "{tmp}", "--resume"], 1, "holds no run"),
        (["train", "{tmp}/short.txt", "-o", "{tmp}", "--resume"], 2, "leave the files out"),
        (["train", "{tmp}/nowhere/run", "-o", "{tmp}/run"], 1, "does not exist; embedlayer train takes text files"),
        (["train", "-o", "{tmp}/nowhere", "--resume"], 1, "nowhere does not exist"),
        (["explore", "{tmp}/notes.md"], 1, "notes.md is a text file; embedlayer explore takes a run"),
        (["inspect", "{tmp}/notes.md"], 1, "A table is trained on it by embedlayer train {tmp}/notes.md -o DIR"),
        (["inspect", "{tmp}/short.txt"], 2, "a table is trained on it by embedlayer train {tmp}/short.txt -o DIR"),
        (["embed", "{tmp}", "hello"], 1, "holds no safetensors file"),
        (["neighbors", "{tmp}/nowhere", "hello"], 1, "nowhere does not exist; embedlayer neighbors takes a run"),
        (["report", "{tmp}"], 1, "is a folder; embedlayer report takes the folder of a run"),
        (["plan", "gtp2"], 2, "gpt2"),
        (["trian"], 2, "No such command"),
        (["train", "--steps", "many", "-o", "x"], 2, "'many' is not a valid integer"),
    ],
)
def test_bad_input_ends_with_a_sentence_and_a_code(tmp_path, capsys, arguments, code, message) -> None:
    (tmp_path / "notes.md").write_text("# Notes\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("a few words, fewer than a window")
    (tmp_path / "latin1.txt").write_bytes("naïve café".encode("latin-1") * 100)
    before = sorted(path.name for path in tmp_path.iterdir())
    found = run(*(argument.format(tmp=tmp_path) for argument in arguments))
    shown = capsys.readouterr()
    assert found == code, shown.err
    assert message.format(tmp=tmp_path) in shown.err
    assert "Traceback" not in shown.err
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "run") == before
