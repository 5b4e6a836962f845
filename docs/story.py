"""Write the explorer's page with the story as one offline file: `python docs/story.py FILE`.

Its table is the one that comes with the package: 4,000 frequent English words of MiniLM.
"""

import sys
from pathlib import Path

from embedlayer.explorer.export import write_page
from embedlayer.explorer.tokenization import open_word_table


def write_story(path: Path, course: str | None = None) -> None:
    """Write the page to a file that opens without a server; `course` is the address of the course beside it."""
    write_page(path, [open_word_table()], course=course)


if __name__ == "__main__":
    write_story(Path(sys.argv[1]))
