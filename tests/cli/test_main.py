"""The command as a person meets it."""

import os
import subprocess
import sys

import pytest
from commands import leaf_commands
from covering import LONG

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
MAIN = "import runpy, sys; sys.argv[1:] = {}; runpy.run_module('embedlayer', run_name='__main__')"
"""The program, in a process that has done something before."""


def test_help_lists_every_command_and_loads_no_torch() -> None:
    code = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))\n"
    code += MAIN.format(["--help"])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name, _ in leaf_commands():
        assert name.split()[0] in result.stdout
    assert result.stdout.endswith("\nFalse\n")


@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, pytest.param({"GOMP_SPINCOUNT": "7"}, marks=LONG)])
def test_idle_threads_of_torch_soon_leave_their_core_unless_the_user_chose(own) -> None:
    code = f"import atexit, os; atexit.register(lambda: print(*map(os.environ.get, {WAITING})))\n"
    code += MAIN.format(["--version"])
    environment = {name: value for name, value in os.environ.items() if name not in WAITING} | own
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    policy, count = result.stdout.split()[-2:]
    assert (policy, count != "None") == (own.get(WAITING[0], "None" if own else "PASSIVE"), own.keys() != {WAITING[0]})


def test_lines_of_the_log_are_printed_on_standard_error() -> None:
    code = "import atexit, logging\n"
    code += (
        "atexit.register(lambda: [logging.getLogger(name).info('%s waits', name) for name in ('embedlayer', 'other')])"
    )
    code += "\n" + MAIN.format(["--version"])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.splitlines() == ["embedlayer waits"]


def test_a_worker_of_torchrun_exits_without_finalising_the_interpreter() -> None:
    code = "import atexit; atexit.register(print, 'finalised')\n"
    code += MAIN.format(["plan", "--vocab-size", "0"])
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    alone, worker = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        for env in (None, environment)
    )
    assert worker.returncode == alone.returncode == 2
    assert worker.stderr == alone.stderr != ""
    assert alone.stdout == worker.stdout + "finalised\n"
