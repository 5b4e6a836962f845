"""The `embedlayer` command: its subcommands, and how errors and warnings look to a person.

Subcommands import torch and the rest of the library inside their functions, so that `--help` answers at once.
"""

import sys
import warnings
from typing import Any

import click

from embedlayer import __version__
from embedlayer.cli.compress import compress
from embedlayer.cli.corpus import corpus
from embedlayer.cli.demo import demo
from embedlayer.cli.embed import embed
from embedlayer.cli.explore import explore
from embedlayer.cli.export import export
from embedlayer.cli.generate import generate
from embedlayer.cli.inspect import inspect
from embedlayer.cli.neighbors import neighbors
from embedlayer.cli.plan import plan
from embedlayer.cli.report import report
from embedlayer.cli.train import train
from embedlayer.cli.vocab import vocab
from embedlayer.errors import EmbedLayerError, EmbedLayerWarning


@click.group(context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "EMBEDLAYER"})
@click.version_option(__version__)
def cli() -> None:
    """The embedding layer of a language model: train it, look inside it, plan it.

    An option that is not given is read from the environment: EMBEDLAYER_TRAIN_DIM=64 is train's --dim 64.
    """


for _command in (
    train,
    corpus,
    embed,
    neighbors,
    inspect,
    explore,
    generate,
    export,
    report,
    plan,
    vocab,
    compress,
    demo,
):
    cli.add_command(_command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command; exit with 0, 2 for input that cannot be used, 1 for a file that cannot, 130 for Ctrl-C."""
    warnings.showwarning = _show_warning
    warnings.simplefilter("always", EmbedLayerWarning)
    try:
        result = cli.main(arguments, standalone_mode=False)
    except EmbedLayerError as error:
        click.secho(f"{type(error).__name__}: {error}", fg="red", err=True)
        sys.exit(1 if isinstance(error, OSError) else 2)
    except OSError as error:  # of a file that the library did not expect to fail, such as in a folder made unreadable
        click.secho(f"FileError: {error}".encode("utf-8", "backslashreplace").decode(), fg="red", err=True)
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Stopped.", err=True)
        sys.exit(130)
    sys.exit(result if isinstance(result, int) else 0)


def _show_warning(message: Warning | str, category: type[Warning], *place: Any, **_: Any) -> None:
    click.secho(f"Warning: {message}", fg="yellow", err=True)
