"""`embedlayer report`: a run as one page."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedlayer.cli.options import RUN

if TYPE_CHECKING:
    from embedlayer.training.run_directory import RunDirectory


@click.command()
@click.argument("directory", type=RUN)
def report(directory: Path) -> None:
    """Write the HTML report of a finished run.

    DIRECTORY is the folder of the run. "embedlayer train" writes the report too; this command replaces it. The report
    is one file that opens without a server.
    """
    from embedlayer.training.run_directory import RunDirectory

    run = RunDirectory(directory)
    make_report(run)
    click.echo(f"Written to {run.report}")


def make_report(run: "RunDirectory") -> dict[str, Any]:
    """Write the HTML report of a finished run, `report.html`, into its folder; an old report is replaced.

    Returns:
        The figures of the run, as `summarise` returns them; also the result of `neighbor_rows` as `neighbors`, that of
        `what_was_learned` as `learned`, and the names of the run's files as `files`.

    Raises:
        FileError: The run is not finished.
        TokenizerError: The tokenizer is missing.
    """
    from embedlayer.cli.run_summary import neighbor_rows, summarise, what_was_learned
    from embedlayer.explorer.export import write_page
    from embedlayer.opening.readers import open_model

    opened = open_model(run.path)
    model, tokenizer = opened.require_decoder(), opened.require_tokenizer()
    summary = {
        **summarise(run, model),
        "neighbors": neighbor_rows(run, model, tokenizer),
        "learned": what_was_learned(opened),
    }
    write_page(run.report, [opened])
    return {**summary, "files": run.files()}
