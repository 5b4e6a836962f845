"""The `embedlayer` command, as a person runs it."""

import pytest

from embedlayer.cli.main import main


def run(*arguments: object, whole_report: bool = False) -> int:
    """Run a command line in this process; its exit code.

    The report of a run that is trained, by `train` or `demo`, is whole, or has no answers of the explorer: they take
    more time than a small run, and are compared in tests/explorer.
    """
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        if arguments[0] in ("train", "demo") and not whole_report:
            patch.setattr("embedlayer.explorer.export.exported_answers", lambda *_: {})
        main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)
