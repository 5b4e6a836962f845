"""Report of what in the folder of a model follows the vocabulary, and what an edit does with it."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain, repeat
from typing import Any

from embedlayer.families.left_out_files import shown_files
from embedlayer.io.files import JsonObject

NAMES_AT = 11
"""Column of the names in the text of a report."""


@dataclass(frozen=True)
class CensusReport:
    """What follows the vocabulary in a folder; `print` shows it as a few lines."""

    # shapes of the tensors that an edit moves, by name; a second copy's name starts with its file
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    token_ids: JsonObject = field(default_factory=dict)  # entries that an edit moves, by file or module and dotted name
    files: tuple[str, ...] = ()  # other files that an edit writes again or removes: tokenizers and configurations
    left_out: Mapping[str, str] = field(default_factory=dict)  # what each file holds that an edit leaves out, by path
    notes: tuple[str, ...] = ()  # warnings that an edit would give about tensors
    refused: str = ""  # why the vocabulary of this folder is not edited

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes by name, as a dictionary that `json.dumps` can write."""
        return asdict(self)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield `(what, names)` for each attribute that is not empty."""
        sizes = {name: " x ".join(f"{size:,}" for size in shape) for name, shape in self.tensors.items()}
        names = {
            "tensors": [f"{name} ({size})" for name, size in sizes.items()],
            "files": list(self.files),
            "left out": [f"{path} ({what})" for path, what in self.left_out.items()],
        }
        by_file: dict[str, list[str]] = {}
        for name, value in self.token_ids.items():
            file, colon, key = name.rpartition(": ")
            by_file.setdefault(file + colon, []).append(f"{key} = {value}")
        wrapper = textwrap.TextWrapper(80 - NAMES_AT, break_long_words=False, break_on_hyphens=False)
        id_lines = [line for file, entries in by_file.items() for line in wrapper.wrap(file + ", ".join(entries))]
        for what, found in names.items():
            if found:
                yield what, shown_files(found)
            if what == "tensors":
                yield from zip(chain(["token IDs"], repeat("")), id_lines, strict=False)
        yield from (("note", note) for note in self.notes)
        if self.refused:
            yield "refused", self.refused

    def __str__(self) -> str:
        return "\n".join(f"{what:<{NAMES_AT}}{names}" for what, names in self.lines())
