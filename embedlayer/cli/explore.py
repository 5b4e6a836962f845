"""`embedlayer explore`: look at tables, positions and runs in the browser."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

import embedlayer.explorer
from embedlayer.cli.interrupts import raise_interrupt
from embedlayer.cli.options import COLUMNS, NEW_FILE, SOURCE, tokenizer_option

if TYPE_CHECKING:
    from embedlayer.opening.opened_model import OpenedModel

VIEWS = sorted(file.stem for file in (Path(embedlayer.explorer.__file__).parent / "page" / "views").glob("*.js"))
"""Names of the page's views: each is a module of the page."""

NAMED = 5  # unknown tokens that are named


@click.command()
@click.argument("sources", nargs=-1, metavar="[SOURCE]...", type=SOURCE)
@click.option("--words", is_flag=True, help="Open the 4,000 words of MiniLM, too, which come with this package.")
@tokenizer_option
@click.option(
    "--columns",
    "columns_from",
    type=COLUMNS,
    help="Columns for the map of the first SOURCE: a .csv, .tsv or .parquet file with a column id or token.",
)
@click.option("--port", default=0, show_default="a free one", help="Port to serve on, on this machine only.")
@click.option("--view", type=click.Choice(VIEWS), help="View to open first; by default map, without SOURCE learn.")
@click.option("--no-browser", is_flag=True, help="Print the address and open no browser.")
@click.option("--export", "export_to", type=NEW_FILE, help="Write one new HTML file and serve nothing.")
def explore(
    sources: tuple[Path, ...],
    words: bool,
    tokenizer_from: Path | None,
    columns_from: Path | None,
    port: int,
    view: str | None,
    no_browser: bool,
    export_to: Path | None,
) -> None:
    """Look at tables in the browser.

    The views are learn, a story that explains embeddings, map, pipeline, positions, compare, health, and training.

    SOURCE is a run, a saved layer, a checkpoint (a folder, a file, or owner/name on the hub), or a file of vectors.
    Without SOURCE, the page shows 4,000 words of MiniLM, which come with this package. Nothing leaves this machine.
    """
    from embedlayer.explorer.server import serve
    from embedlayer.explorer.tokenization import open_word_table
    from embedlayer.opening.readers import open_model

    if view is not None and export_to is not None:
        raise click.UsageError(
            f"--view is for a page that is served. Open the exported file with #{view} behind its name."
        )
    if tokenizer_from is not None and not sources:
        raise click.UsageError("--tokenizer is for a SOURCE; the 4,000 words have a tokenizer.")
    opened = [open_model(source, tokenizer_from) for source in sources]
    if words or not sources:
        opened.append(open_word_table())
    if columns_from is not None:
        _add_columns(columns_from, opened[0])
    signal.signal(signal.SIGINT, raise_interrupt)  # a shell's background processes start with it ignored
    if export_to is not None:
        from embedlayer.cli.progress import exporting
        from embedlayer.explorer.export import write_page
        from embedlayer.io.files import is_stream, new_file

        with exporting() as show_progress, new_file(export_to) as page:
            write_page(page, opened, show_progress)
            size = page.stat().st_size
            show_progress(1.0, "done")
        click.echo(f"Wrote {export_to} ({size / 1e6:.1f} MB): it opens without a server.", err=is_stream(export_to))
        return

    first = view or ("" if sources else "learn")

    def show(address: str) -> None:
        address += f"#{first}" if first else ""
        click.echo(f"The page is at {address} (Ctrl-C ends it)")
        if not no_browser:
            import webbrowser

            webbrowser.open(address)

    serve(opened, port=port, on_start=show)


def _add_columns(path: Path, source: "OpenedModel") -> None:
    """Read the user's columns of a source, and say which they are."""
    from embedlayer.explorer.user_columns import add_user_columns, read_user_columns

    columns = read_user_columns(path, source)
    add_user_columns(source, columns)
    names = [
        f"{each.name} ({'numbers' if each.groups is None else f'{len(each.groups):,} values'})"
        for each in columns.columns
    ]
    click.echo(f"Columns for {columns.rows:,} of {source.table.vocab_size:,} rows: {', '.join(names) or 'none'}.")
    if columns.unknown:
        named = ", ".join(map(repr, columns.unknown[:NAMED])) + ", ..." * (len(columns.unknown) > NAMED)
        lines = "1 line is" if len(columns.unknown) == 1 else f"{len(columns.unknown):,} lines are"
        click.echo(f"{lines} skipped, since no token has the text: {named}.")
    if columns.left_out:
        click.echo(f"Left out, since they hold neither numbers nor texts: {', '.join(columns.left_out)}.")
