"""The `embedlayer` command: its subcommands, and the printing of errors and warnings.

Subcommands import torch and the rest of the library inside their functions, so that `--help` answers at once.
"""

import logging
import os
import sys
import warnings
from functools import partial
from typing import Any, NoReturn

import click

from embedlayer import __version__
from embedlayer.cli.compress import compress
from embedlayer.cli.corpus import corpus
from embedlayer.cli.demo import demo
from embedlayer.cli.doctor import doctor
from embedlayer.cli.embed import embed
from embedlayer.cli.evaluate import evaluate
from embedlayer.cli.explore import explore
from embedlayer.cli.export import export
from embedlayer.cli.generate import generate
from embedlayer.cli.inspect import inspect
from embedlayer.cli.interrupts import INTERRUPTED, ending_on_interrupt
from embedlayer.cli.neighbors import neighbors
from embedlayer.cli.plan import plan
from embedlayer.cli.positions import positions
from embedlayer.cli.run_summary import report
from embedlayer.cli.streams import OutputError, safe_streams
from embedlayer.cli.train import train
from embedlayer.cli.vocab import vocab
from embedlayer.core.errors import EmbedLayerError, EmbedLayerWarning

SETTINGS = {"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "EMBEDLAYER", "show_default": True}

WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
"""Environment that OpenMP reads when torch is loaded: how long idle threads keep a core busy; see docs/kernels.md."""


@click.group(context_settings=SETTINGS)
@click.version_option(__version__)
def cli() -> None:
    """Train, inspect, edit, compress and plan the embedding layer of a language model.

    An option that is not on the command line is read from the environment: EMBEDLAYER_TRAIN_DIM=64 means train's
    --dim 64.
    """


COMMANDS = [train, corpus, embed, neighbors, inspect, evaluate, explore]
COMMANDS += [generate, export, report, plan, vocab, positions, compress, demo, doctor]
for _command in COMMANDS:
    cli.add_command(_command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit the process."""
    # Exit codes: 0, also if the reader of the output ends first (`head`); 1 for a file or the output that cannot be
    # read or written; 2 for input that cannot be used or a missing package; 130 for Ctrl-C.
    if not WAITING.keys() & os.environ.keys():
        os.environ |= WAITING
    shown: set[str] = set()
    warnings.showwarning = partial(_show_warning, shown)
    logging.basicConfig(format="%(message)s", handlers=[_EchoHandler()])
    logging.getLogger("embedlayer").setLevel(logging.INFO)
    warnings.simplefilter("always", EmbedLayerWarning)
    with safe_streams():
        code = _run(arguments, shown)
    _exit(code)


def _run(arguments: list[str] | None, shown: set[str]) -> int:
    """Run the command, print its error, and return the exit code; `shown` has the warnings that were printed."""
    try:
        with ending_on_interrupt():
            result = cli.main(arguments, prog_name="embedlayer", standalone_mode=False)
            sys.stdout.flush()
    except OutputError as error:
        if error.is_closed:
            return 0
        click.secho(f"FileError: {error}", fg="red", err=True)
        return 1
    except EmbedLayerError as error:
        is_shown = any(str(error) in warning for warning in shown)
        message = "the warning above says why this is not possible." if is_shown else str(error)
        click.secho(f"{type(error).__name__}: {message}", fg="red", err=True)
        return 1 if isinstance(error, OSError) else 2
    except OSError as error:  # an operation on a file that the library does not check, such as in an unreadable folder
        click.secho(f"FileError: {error}", fg="red", err=True)
        return 1
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Stopped.", err=True)
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def _exit(code: int) -> NoReturn:
    """Exit the process; a worker of torchrun exits without finalising the interpreter."""
    # A worker of torchrun skips the interpreter's finalisation: `DistributedDataParallel` keeps gloo's threads alive,
    # and one that frees a tensor meanwhile aborts the process, whereupon torchrun ends the other ranks of a finished
    # run.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        os._exit(code)
    sys.exit(code)


class _EchoHandler(logging.Handler):
    """Print log records on standard error, as the progress bar expects: on the stream that is there at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)


def _show_warning(shown: set[str], message: Warning | str, category: type[Warning], *place: Any, **_: Any) -> None:
    """Print a warning in yellow on standard error, without file and line; an equal one is not repeated."""
    if str(message) not in shown:
        shown.add(str(message))
        click.secho(f"Warning: {message}", fg="yellow", err=True)
