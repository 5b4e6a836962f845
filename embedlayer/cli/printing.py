"""Printing for people: facts, tables, and tokens with their spaces made visible."""

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from embedlayer.io.json_fields import finite_json

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod

WIDTH_IN_FILES = 120  # columns of a line where output goes to a file or pipe

LONGEST_TOKEN = 30


def make_console() -> "Console":
    """Return a console that is as wide as the terminal; in files and pipes, `WIDTH_IN_FILES` columns wide."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = WIDTH_IN_FILES
    return console


def print_line(console: "Console", text: str, indent: int = 0) -> None:
    """Print a paragraph of text, wrapped at the console's width."""
    from rich.padding import Padding
    from rich.text import Text

    style = "" if indent or not text.strip() else "bold"
    console.print(Padding(Text(text, style=style), (0, 0, 0, indent), expand=False))


def print_facts(console: "Console", facts: Iterable[tuple[str, str, str]]) -> None:
    """Print one line for each `(name, value, meaning)`, in three aligned columns, indented by two spaces."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=16)
    table.add_column(no_wrap=True, min_width=18)
    table.add_column(overflow="fold", style="dim")
    for cells in facts:
        table.add_row(*map(Text, cells))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))


def number_cell(value: float | None, form: str, absent: str = "-") -> str:
    """Return a number in the format `form`, such as `.1%`, as a cell of a table, or `absent` for `None`."""
    return absent if value is None else format(value, form)


def print_table(
    console: "Console",
    columns: Sequence[str],
    lines: Sequence[Sequence[str]],
    left: Sequence[int] = (0,),
    long: str | None = None,
    indent: int = 2,
    widest: int = LONGEST_TOKEN,
    wrap: bool = False,
) -> None:
    """Print a table with a line of headings and without rules between its cells."""
    from rich.cells import cell_len
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    remaining = console.width - indent
    for place, column in enumerate(columns):
        width = max(cell_len(cell) for cell in (column, *(line[place] for line in lines)))
        width = min(width, max(len(column), remaining) if column == long else widest)
        remaining -= width + 2
        justify: JustifyMethod = "left" if place in left or column == long else "right"
        no_wrap = not (wrap and column == long)
        table.add_column(column, justify=justify, no_wrap=no_wrap, overflow="ellipsis", width=width)
    for line in lines:
        table.add_row(*map(Text, line))
    with console.capture() as shown:
        console.print(Padding(table, (0, 0, 0, indent), expand=False))
    click.echo("\n".join(line.rstrip() for line in shown.get().splitlines()), color=console.is_terminal)


def print_json(value: object, indent: int | None = None) -> None:
    """Print a value as JSON; NaN and infinity, which JSON does not have, become `null`."""
    click.echo(json.dumps(finite_json(value), indent=indent, allow_nan=False))


def say(text: str, quiet: bool) -> None:
    """Print `text` as a line, unless `quiet`."""
    if not quiet:
        click.echo(text)
