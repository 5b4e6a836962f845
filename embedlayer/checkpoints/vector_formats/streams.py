"""Open files of word vectors, compressed or not, and read and write their lines, numbers and tokens."""

import codecs
import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from embedlayer.core.errors import CheckpointError
from embedlayer.io.files import file_errors, replace_file, require_file

DecodeErrors = Literal["strict", "ignore", "replace"]
Row = npt.NDArray[np.float32]

LONGEST_LINE = 1 << 24
BYTES_AT_ONCE = 1 << 21
NUMBERS_AT_ONCE = 1 << 16

VectorRows = tuple[list[str], Tensor, Callable[[int], str], list[str]]
"""The rows of a file: their tokens, the rows, where a row is in the file, and warnings."""


class TokenDecoder:
    """Decode the tokens of a file as UTF-8, and count those that are not."""

    def __init__(self, path: Path, errors: DecodeErrors, place: str) -> None:
        self.path = path
        self.errors = errors
        self.place = place
        self.count = 0
        self.first = ""

    def decode(self, raw: bytes, number: int) -> str:
        """Return the text of the token at a line or row."""
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            place = f"{self.place} {number}"
            if self.errors == "strict":
                raise CheckpointError(
                    f'{self.path}, {place}: the token {raw[:40]!r} is not UTF-8: read it with errors="replace".'
                ) from error
            self.first = self.first or f"{raw[:40]!r} at {place}"
            self.count += 1
            return raw.decode(errors=self.errors)

    def warnings(self) -> list[str]:
        """Return the warning about tokens that are not UTF-8, or an empty list."""
        if not self.count:
            return []
        how = "replaced by U+FFFD" if self.errors == "replace" else "left out"
        what = f"{self.path} holds {self.count:,} tokens that are not UTF-8, first {self.first}"
        return [f"{what}: their other bytes are {how}."]


def skip_mark(file: BufferedIOBase) -> None:
    """Skip the byte-order mark at the start of a file of text, if there is one."""
    if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
        file.seek(0)


@contextmanager
def reading(path: Path) -> Iterator[BufferedIOBase]:
    """Open a file for reading in a `with` block; a file with the suffix `.gz` is decompressed."""
    require_file(path)
    with file_errors(f"read {path}"), path.open("rb") as file:
        if path.suffix != ".gz":
            yield file
            return
        try:
            with gzip.open(file) as content:
                yield content
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise CheckpointError(f"{path} is not a whole gzip file ({error}).") from error


@contextmanager
def writing(path: Path) -> Iterator[BufferedIOBase]:
    """Open a file for writing in a `with` block; a file with the suffix `.gz` is compressed.

    The file is replaced atomically at the end of the block; if the block fails, the old file stays. A device or a pipe
    is written to instead.
    """
    with replace_file(path) as partial, partial.open("wb") as file:
        if path.suffix != ".gz":
            yield file
            return
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as content:
            yield content


def lines(path: Path, file: BufferedIOBase, first: int) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line) for the rest of a file, from line `first`, without trailing white space."""
    empty = None
    number = first
    while line := file.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise CheckpointError(f"{path}, line {number}: it is longer than {LONGEST_LINE:,} bytes.")
        stripped = line.rstrip(b" \t\r\n")
        if stripped and empty is not None:
            raise CheckpointError(f"{path}, line {empty}: it is empty.")
        if stripped:
            yield number, stripped
        elif empty is None:
            empty = number
        number += 1


def is_number(field: bytes) -> bool:
    """Return whether a field is a number for Python's `float`, without the underscores that `float` allows (`1_0`)."""
    try:
        float(field)
    except ValueError:
        return False
    return b"_" not in field


def numbers(path: Path, line: int, fields: Sequence[bytes]) -> Row:
    """Convert the fields of a line to float32; numbers too large for float32 become infinity."""
    try:
        with np.errstate(over="ignore"):
            row = np.fromiter(map(float, fields), np.float64, len(fields)).astype(np.float32)
    except ValueError:
        row = None
    if row is None or b"_" in b"".join(fields):  # float() takes 1_0 for 10
        wrong = next(field for field in fields if not is_number(field))
        raise CheckpointError(f"{path}, line {line}: {wrong[:40]!r} is not a number.")
    return row


def decimals(chunk: Row, separator: str) -> Iterator[str]:
    """Yield each row as text, with `separator` between the shortest decimals that read back as the same float32."""
    return (separator.join(row) for row in chunk.astype(np.str_).tolist())


def check_utf8(token: str, row: int) -> str:
    """Return the token of a row unchanged, or raise a `CheckpointError` if UTF-8 cannot encode it."""
    try:
        token.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"Row {row}: the token {token!r} cannot be encoded in UTF-8.") from error
    return token
