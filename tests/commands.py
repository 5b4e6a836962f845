"""The `embedlayer` command, as a person runs it."""

import io
import json
import runpy
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import click
import pytest

from embedlayer.cli.main import cli


def leaf_commands(group: click.Group = cli, *names: str) -> Iterator[tuple[str, click.Command]]:
    """Every command that is no group, with its whole name."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaf_commands(command, *names, name)
        else:
            yield " ".join([*names, name]), command


def leave_out_answers(patch: pytest.MonkeyPatch) -> None:
    """Give reports and exported pages no answers of the explorer: they are compared in tests/explorer."""
    patch.setattr("embedlayer.explorer.export.exported_answers", lambda *_: {})


def run(*arguments: object, whole_report: bool = False) -> int:
    """Run a command line in this process; its exit code.

    The report of a run that is trained, by `train` or `demo`, is whole, or has no answers of the explorer, which take
    more time than a small run.
    """
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        if arguments[0] in ("train", "demo") and not whole_report:
            leave_out_answers(patch)
        patch.setattr(sys, "argv", [sys.argv[0], *map(str, arguments)])
        runpy.run_module("embedlayer", run_name="__main__")
    return int(stop.value.code or 0)


def printed(*arguments: object) -> str:
    """Run a command line, and return what it prints."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with redirect_stdout(stream):
        assert run(*arguments) == 0
    return stream.buffer.getvalue().decode()


def answer(*arguments: object) -> Any:
    """Run a command line with `--json`, and return the object that it prints."""
    return json.loads(printed(*arguments, "--json"))


def refused(*arguments: object, code: int = 2) -> str:
    """Run a command line that ends with an error, and return what it says."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with redirect_stderr(stream):
        assert run(*arguments) == code
    return stream.buffer.getvalue().decode()
