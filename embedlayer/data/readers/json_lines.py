"""JSON lines: each line is an object, one field of which is the document."""

import codecs
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from embedlayer.core.errors import TextError
from embedlayer.data.readers.documents import Document, Reader, RowOptions, chosen_field, document_of
from embedlayer.data.readers.text import is_compressed
from embedlayer.data.text_files import checked, opened
from embedlayer.data.text_formats import source_name

_READ_BYTES = 1 << 18


class JsonLines(Reader):
    """Reader of JSON lines, also compressed. Empty lines are skipped."""

    def __init__(self, source: str | Path, options: RowOptions) -> None:
        super().__init__(source)
        self.options = options
        self.field: str | None = options.text_field
        with opened(source) as (read, _):
            first = next(self._rows(read, 0), None)
        if first is not None:
            number, row = first
            self.field, self.has_weights = chosen_field(self._record(number, 0), row, options)

    def cut(self, place: int, size: int, tokenizer: Tokenizer) -> int:
        """Return the offset of the first line that begins at or after `place`."""
        if place in (0, size):
            return place
        if is_compressed(self.source):
            return size
        with opened(self.source, place - 1, size) as (read, position):
            while block := checked(self.source, read, _READ_BYTES):
                if (end := block.find(b"\n")) >= 0:
                    return place - 1 + position() - len(block) + end + 1
        return size

    def documents(self, begin: int = 0, end: int | None = None) -> Iterator[Document]:
        with opened(self.source, begin, end) as (read, position):
            for number, row in self._rows(read, begin):
                if position() != self.position:
                    self.position = position()
                yield document_of(self._record(number, begin), row, self.field, self.has_weights, self.options)
            self.position = position()

    def _rows(self, read: Callable[[int], bytes], begin: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the number of each line that is not empty, counted from 0 at `begin`, with its object."""
        for number, line in enumerate(self._lines(read, begin)):
            if not line or line.isspace():
                continue
            try:
                row = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                raise TextError(f"{self._record(number, begin)()} is not JSON: {error}.") from error
            if not isinstance(row, dict):
                raise TextError(f"{self._record(number, begin)()} is {type(row).__name__}, not a JSON object.")
            yield number, row

    def _lines(self, read: Callable[[int], bytes], begin: int) -> Iterator[bytes]:
        """Yield the lines, without line ends and without a byte-order mark at the start of the file."""
        rest: list[bytes] = []  # of a line that is longer than a block
        while block := checked(self.source, read, _READ_BYTES):
            if begin == 0 and not rest:
                block = block.removeprefix(codecs.BOM_UTF8)
            begin = -1
            first, *lines = block.split(b"\n")
            rest.append(first)
            if lines:
                yield b"".join(rest)
                yield from lines[:-1]
                rest = [lines[-1]]
        if any(rest):
            yield b"".join(rest)

    def _record(self, number: int, begin: int) -> Callable[[], str]:
        """Return a function that says which line of the file is meant: the lines before `begin` are counted then."""

        def name() -> str:
            before = 0
            if begin:
                with opened(self.source, 0, begin) as (read, _):
                    while block := checked(self.source, read, _READ_BYTES):
                        before += block.count(b"\n")
            return f"{source_name(self.source)}, line {before + number + 1},"

        return name
