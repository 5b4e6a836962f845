"""Tables in the documentation: made by a command, put between two markers of a page."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from embedlayer.io.files import write_text


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with the same keys as a Markdown table."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(row.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def between_markers(page: Path, name: str, text: str, content: str | None = None) -> str:
    """The content of a page, by default that of its file, with `text` between `<!-- name: ... -->` and its end."""
    content = page.read_text(encoding="utf-8") if content is None else content
    head, begin, rest = content.partition(f"<!-- {name}:")
    comment, close, rest = rest.partition("-->\n")
    _, end, tail = rest.partition(f"<!-- end of {name} -->")
    if not (begin and close and end):
        raise SystemExit(f"{page} has no markers <!-- {name}: ... --> and <!-- end of {name} -->")
    return f"{head}{begin}{comment}{close}{text}{end}{tail}"


def write_between_markers(page: Path, name: str, text: str) -> None:
    """Write `text` into a page, see `between_markers`."""
    write_text(page, between_markers(page, name, text))
