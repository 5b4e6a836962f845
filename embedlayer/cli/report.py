"""`embedlayer report`: what a run looks like, as one page."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedlayer.cli.paths import RUN

if TYPE_CHECKING:
    from embedlayer.training.run_directory import RunDirectory


@click.command()
@click.argument("directory", type=RUN)
def report(directory: Path) -> None:
    """Write the report of a finished run again: its explorer page, as one file that opens without a server."""
    from embedlayer.training.run_directory import RunDirectory

    run = RunDirectory(directory)
    make_report(run)
    click.echo(f"Written to {run.report}")


def make_report(directory: "RunDirectory") -> dict[str, Any]:
    """Write `report.html`, the explorer's page about the run.

    Returns:
        What the run came to, as `summarise` gives it, and the names of its files.

    Raises:
        FileError: The run is not finished.
    """
    from embedlayer.cli.pipeline import neighbor_rows, summarise
    from embedlayer.explorer.export import write_page
    from embedlayer.explorer.source import source_of_run
    from embedlayer.training.run_directory import load_run

    model, tokenizer = load_run(directory.path)
    summary = summarise(directory, model, neighbor_rows(directory, model, tokenizer))
    write_page(directory.report, [source_of_run(directory, model, tokenizer)])
    return {**summary, "files": directory.files()}
