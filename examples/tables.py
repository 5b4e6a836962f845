"""Tables in the documentation: made by a command, put between two markers of a page."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from embedlayer.io.files import write_text


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with the same keys as a Markdown table."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(row.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write_between_markers(page: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- name: ... -->` and `<!-- end of name -->`."""
    content = page.read_text(encoding="utf-8")
    head, begin, rest = content.partition(f"<!-- {name}:")
    comment, close, rest = rest.partition("-->\n")
    _, end, tail = rest.partition(f"<!-- end of {name} -->")
    if not (begin and close and end):
        raise SystemExit(f"{page} has no markers <!-- {name}: ... --> and <!-- end of {name} -->")
    write_text(page, f"{head}{begin}{comment}{close}{text}{end}{tail}")
