"""A program that is forked is what Python would run."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import Program, run_program

FACTS = (
    "import os, sys; print(__name__, sys.argv[1:], os.getcwd(), os.environ.get('NEW'), sys.stdin.read()); "
    "print('one', file=sys.stderr); sys.exit(7)"
)


@pytest.mark.parametrize("way", ["-c", "-m", "path"])
def test_a_forked_program_has_the_arguments_streams_and_exit_code_of_a_started_one(tmp_path: Path, way: str) -> None:
    (tmp_path / "facts.py").write_text(FACTS)
    arguments = {"-c": ["-c", FACTS], "-m": ["-m", "facts"], "path": [str(tmp_path / "facts.py")]}[way]
    environment = {"NEW": "x", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, *arguments, "a", "b c"]
    theirs = subprocess.run(command, cwd=tmp_path, env=environment, input="", capture_output=True, text=True)
    assert run_program(*arguments, "a", "b c", cwd=tmp_path, **environment) == (7, theirs.stdout, theirs.stderr)


def test_ctrl_c_ends_a_forked_program_as_it_ends_an_interpreter() -> None:
    with Program("-c", "import time; print('ready'); time.sleep(60)") as program:
        assert program.stdout.readline() == "ready\n"
        program.send_signal(signal.SIGINT)
        assert program.wait() == -signal.SIGINT
        assert "KeyboardInterrupt" in program.stderr.read()
    assert run_program("-c", "raise SystemExit(130)")[0] == 130
