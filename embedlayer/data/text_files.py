"""Find text files in folders, and read their text: UTF-8, plain or compressed, block by block."""

import codecs
import gzip
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embedlayer.core.errors import FileError, TextError, require
from embedlayer.core.formatting import command_line
from embedlayer.data.corpus_files import INDEX_FILE, PLAN_FILE, is_corpus
from embedlayer.data.text_formats import (
    COMPRESSED_STARTS,
    STANDARD_INPUT,
    not_text,
    refuse_json_lines,
)
from embedlayer.io.files import file_errors, require_file

_Read = Callable[[int], bytes]
READ_BYTES = 1 << 16


def visible_files(folder: Path) -> list[Path]:
    """Return the files below a folder, sorted, without hidden files and corpora."""
    if is_corpus(folder):
        line = command_line("train", folder, "-o", "RUN")
        raise TextError(
            f"The folder {folder} is a corpus of token IDs. Train on it, without other files: {line}; in Python, open "
            f"it with TokenCorpus.open."
        )
    files = sorted(_files_below(folder))
    corpora = {file.parent for file in files if file.name in (PLAN_FILE, INDEX_FILE) and is_corpus(file.parent)}
    return [file for file in files if corpora.isdisjoint(file.parents)]


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that are not hidden; linked folders come last, unless they were read already."""
    read: set[tuple[int, int]] = set()
    starts = [os.fspath(folder)]
    for start in starts:
        for place, folders, files in os.walk(start, onerror=_cannot_list):
            facts = os.stat(place)
            if (facts.st_dev, facts.st_ino) in read:
                folders.clear()
                continue
            read.add((facts.st_dev, facts.st_ino))
            folders[:] = [name for name in folders if not name.startswith(".")]
            starts += [path for path in (os.path.join(place, name) for name in folders) if os.path.islink(path)]
            yield from (Path(place, name) for name in files if not name.startswith(".") and Path(place, name).is_file())


def _cannot_list(error: OSError) -> None:
    """Raise the error of a folder that `os.walk` cannot list."""
    raise FileError(f"Cannot read the folder {error.filename}: {error.strerror}.") from error


def start_of(file: Path) -> bytes:
    """Return the first 64 KiB of a file, decompressed if it is compressed."""
    # a file that cannot be read raises its error when its whole text is read
    try:
        with opened(file) as (read, _):
            return checked(file, read)
    except FileError:
        return b""


@contextmanager
def saved_standard_input(sources: Sequence[str | Path], folder: Path) -> Iterator[Sequence[str | Path]]:
    """Yield the sources with `-` replaced by a temporary file in `folder` that has the standard input.

    Standard input can be read only once, and a corpus reads its sources twice: to recognise them and to encode them.
    The file is deleted after the block.
    """
    if "-" not in map(str, sources):
        yield sources
        return
    start = sys.stdin.buffer.read(max(map(len, COMPRESSED_STARTS.values())))
    suffix = next((suffix for suffix, first in COMPRESSED_STARTS.items() if start.startswith(first)), "")
    with file_errors(f"write standard input into {folder}"):
        copy = tempfile.NamedTemporaryFile(dir=folder, prefix=STANDARD_INPUT, suffix=suffix)  # noqa: SIM115  closed below
    with copy:
        with file_errors(f"write standard input into {folder}"):
            copy.write(start)
            shutil.copyfileobj(sys.stdin.buffer, copy)
            copy.flush()
        yield [Path(copy.name) if str(source) == "-" else source for source in sources]


@contextmanager
def opened(source: str | Path, begin: int = 0, end: int | None = None) -> Iterator[tuple[_Read, Callable[[], int]]]:
    """Context manager: open a source of text and yield two functions, `read` and `position`.

    `read(size)` returns at most `size` bytes of the text, decompressed if the name ends in `.gz` or `.zst`.
    `position()` returns how many bytes of the file were read (compressed ones, if it is compressed), counted from
    `begin` if `end` applies; 0 for standard input. Standard input and compressed files are read whole: `begin` must be
    0.
    """
    if str(source) == "-":
        yield sys.stdin.buffer.read, lambda: 0
        return
    require_file(source)
    with file_errors(f"read {source}"):
        file = open(source, "rb")  # noqa: SIM115  closed below; errors of the block inside are not ours to explain
        file.seek(begin)
    with file:
        if str(source).endswith(".gz"):
            unzipped: Any
            with gzip.GzipFile(fileobj=file) as unzipped:
                yield unzipped.read, file.tell
        elif str(source).endswith(".zst"):
            arrow = require("pyarrow", extra="parquet")
            with arrow.CompressedInputStream(arrow.PythonFile(file), "zstd") as unzipped:
                yield unzipped.read, file.tell
        elif end is None:
            yield file.read, file.tell
        else:
            yield lambda size: file.read(min(size, end - file.tell())), lambda: file.tell() - begin


def checked(source: str | Path, read: _Read, size: int = READ_BYTES) -> bytes:
    """Return `read(size)`, and turn an error in it into a `FileError`."""
    try:
        return read(size)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FileError(f"Cannot read {source}: {error}. The file is damaged or not gzipped.") from error
    except OSError as error:
        is_damaged = error.errno is None and str(source).endswith(".zst")
        hint = " The file is damaged or not compressed by Zstandard." if is_damaged else ""
        raise FileError(f"Cannot read {source}: {error.strerror or str(error).rstrip('.')}.{hint}") from error


def decoded(source: str | Path, read: _Read, *, offset: int = 0) -> Iterator[str]:
    """Read UTF-8 text block by block and yield it as strings. Line ends are kept; a byte-order mark is left out."""
    rest, block, begins = b"", checked(source, read), not offset
    if begins and block.startswith(codecs.BOM_UTF8):
        offset, block = len(codecs.BOM_UTF8), block[len(codecs.BOM_UTF8) :] or checked(source, read)
    start = block
    if begins:
        refuse_json_lines(source, start)
    while block or rest:
        raw = rest + block
        try:
            text, used = codecs.utf_8_decode(raw, "strict", not block)
        except UnicodeDecodeError as error:
            raise TextError(not_text(source, start, offset + error.start, raw[error.start])) from error
        if "\0" in text:
            raise TextError(not_text(source, start, offset + raw.index(b"\0"), 0))
        yield text
        offset, rest, block = offset + used, raw[used:], checked(source, read)
