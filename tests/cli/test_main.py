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
