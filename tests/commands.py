"""The `embedlayer` command, as a person runs it."""

import pytest

from embedlayer.cli.main import main


def run(*arguments: object) -> int:
    """Run a command line in this process; its exit code."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)
