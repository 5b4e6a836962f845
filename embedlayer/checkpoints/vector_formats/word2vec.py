"""The formats of word2vec, text and binary, and those of GloVe and fastText, which are like its text.

In all of them a row is a token and its numbers, and the first row of a duplicate token is kept.
"""

import codecs
import re
from array import array
from collections.abc import Iterator, Sequence
from io import BufferedIOBase
from pathlib import Path

import numpy as np
import torch

from embedlayer.checkpoints.vector_formats import streams
from embedlayer.checkpoints.vector_formats.streams import LONGEST_LINE, DecodeErrors, Row, TokenDecoder, VectorRows
from embedlayer.core.errors import CheckpointError
from embedlayer.core.formatting import command_line
from embedlayer.io.safetensors_files import pickle_error

FIRST_BYTES = 1 << 16
LONGEST_TOKEN = 1 << 16
MOST_COLUMNS = 1 << 20
FASTTEXT = (793712314).to_bytes(4, "little")
"""First bytes of a model of fastText."""

PICKLE = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of a pickle, by its protocol."""

_SPACES = re.compile(r"[ \t\n\r\v\f]")

_Block = tuple[Sequence[int], list[bytes], Row]
"""Line or row numbers, tokens and numbers `(N, D)` of some rows."""


def read_words(path: Path, errors: DecodeErrors, *, binary: bool = False, has_header: bool | None = None) -> VectorRows:
    """Read a file as text or in binary; without `has_header`, the first line of a text tells whether it has one."""
    with streams.reading(path) as file:
        if binary:
            return _collected(path, _binary_rows(path, file), errors, "row")
        first = _check_text(path, file.read(FIRST_BYTES))
        file.seek(first)
        if has_header is None:
            has_header = _header(file.readline(LONGEST_LINE)) is not None
            file.seek(first)
        return _collected(path, _text_rows(path, file, has_header=has_header), errors, "line")


def _check_text(path: Path, start: bytes) -> int:
    """Check the first bytes of a file of text, and return its start: behind a byte-order mark if there is one."""
    if start.startswith(PICKLE):
        raise pickle_error(path)
    rows = start.partition(b"\n")[2] if _header(start.partition(b"\n")[0]) else start
    if b"\r" in rows.strip(b"\r") and b"\n" not in rows:
        raise CheckpointError(f"{path} has lines that end in carriage returns alone: use tr '\\r' '\\n'.")
    return len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0


def write_words(
    path: Path, tokens: Sequence[str], blocks: Iterator[Row], width: int, *, has_header: bool, binary: bool
) -> None:
    """Write a file as text or in binary, one block of rows after another."""
    _check_tokens(tokens)
    words = iter(tokens)
    with streams.writing(path) as file:
        if has_header:
            file.write(f"{len(tokens)} {width}\n".encode())
        for block in blocks:
            if binary:
                file.writelines(f"{next(words)} ".encode() + row.astype("<f4").tobytes() for row in block)
            else:
                file.writelines(f"{next(words)} {line}\n".encode() for line in streams.decimals(block, " "))


def _check_tokens(tokens: Sequence[str]) -> None:
    """Check that the formats of word2vec, GloVe and fastText can represent all tokens."""
    seen: dict[str, int] = {}
    for row, token in enumerate(tokens):
        if not token or _SPACES.search(token):
            what = "has white space, where a token ends in this format" if token else "is empty"
            raise CheckpointError(f"Row {row}: the token {token!r} {what}. Choose the format npy or projector.")
        if seen.setdefault(streams.check_utf8(token, row), row) != row:
            raise CheckpointError(f"Row {row}: the token {token!r} is that of row {seen[token]} too.")


def is_text(path: Path) -> bool:
    """Return whether a `.bin` has the text format of word2vec: a header, and a line of a token and D numbers."""
    with streams.reading(path) as file:
        start = file.read(FIRST_BYTES).removeprefix(codecs.BOM_UTF8)
    first, _, rest = start.partition(b"\n")
    sizes, fields = _header(first), rest.partition(b"\n")[0].split()
    return sizes is not None and len(fields) > sizes[1] and all(map(streams.is_number, fields[-sizes[1] :]))


def _collected(path: Path, blocks: Iterator[_Block], errors: DecodeErrors, place: str) -> VectorRows:
    """Collect the first row of each token of a file. Memory grows with the bytes read, not with the header."""
    first: dict[str, None] = {}
    decoder = TokenDecoder(path, errors, place)
    content, places = bytearray(), array("q")
    duplicates: list[str] = []
    width = 0
    for block_places, raws, block in blocks:
        new_rows = []
        for row, (number, raw) in enumerate(zip(block_places, raws, strict=True)):
            token = decoder.decode(raw, number)
            if token in first:
                duplicates.append(f"{token!r} at {place} {number}")
            else:
                first[token] = None
                places.append(number)
                new_rows.append(row)
        width = block.shape[1]
        content += (block if len(new_rows) == len(block) else block[new_rows]).data
    if not first:
        raise CheckpointError(f"{path} holds no vectors.")
    messages = decoder.warnings()
    if duplicates:
        messages.append(
            f"{path} has rows whose token an earlier row has, {len(duplicates)} in all, first {duplicates[0]}: only "
            f"the first row of a token is kept."
        )
    rows = torch.frombuffer(content, dtype=torch.float32).view(len(first), width)
    return list(first), rows, lambda row: f"{place} {places[row]}", messages


def _header(line: bytes) -> tuple[int, int] | None:
    """Return `(V, D)` if a line consists of two whole numbers, as word2vec's header does; else `None`."""
    sizes = re.fullmatch(rb"\s*(\d{1,15})[ \t]+(\d{1,15})\s*", line)
    return (int(sizes[1]), int(sizes[2])) if sizes else None


def _checked_header(path: Path, line: bytes) -> tuple[int, int]:
    """Return `(V, D)`, the numbers of rows and columns, from the first line of a file in a format with a header."""
    sizes = _header(line)
    if sizes is None:
        raise CheckpointError(f'{path}, line 1: {line[:40]!r} is no header. A text without one is format="glove".')
    if not 1 <= sizes[1] <= MOST_COLUMNS:
        raise CheckpointError(f"{path}, line 1: the header states {sizes[1]} columns: it is damaged.")
    return sizes


def _text_rows(path: Path, file: BufferedIOBase, *, has_header: bool) -> Iterator[_Block]:
    """Yield the rows of a text, one at a time. Without a header, the first line determines the number of columns."""
    count, width = _checked_header(path, file.readline(LONGEST_LINE)) if has_header else (None, 0)
    number = row = 0
    for number, line in streams.lines(path, file, first=1 + has_header):
        width = width or _width_of(path, line)
        row += 1
        if count is not None and row > count:
            raise CheckpointError(f"{path}, line {number}: the header states {count} rows, and here is one more.")
        token, *fields = line.rsplit(None, width)
        if len(fields) == width - 1 and line[:1].isspace():
            token, fields = b"", [token, *fields]
        if len(fields) < width or streams.is_number((token.split()[1:] or [b"-"])[-1]):
            raise CheckpointError(f"{path}, line {number}: found {len(line.split()) - 1} numbers, not {width}.")
        if not token:
            raise CheckpointError(f"{path}, line {number}: it has no token, only numbers.")
        yield (number,), [token], streams.numbers(path, number, fields)[None]
    if count is not None and row < count:
        raise CheckpointError(f"{path}: the header states {count} rows, and the file ends after {row}.")


def _width_of(path: Path, line: bytes) -> int:
    """Return the number of columns of a file without a header, from its first line.

    It is the number of fields at the end of the line that are numbers; the fields before them, at least the first one,
    are the token.
    """
    fields = line.split()
    width = 0
    while width < len(fields) - 1 and streams.is_number(fields[-1 - width]):
        width += 1
    if not width:
        train = command_line("train", path, "-o", "DIR")
        raise CheckpointError(f"{path}, line 1: {line[:40]!r} is not a token and its numbers. To train on it: {train}")
    return width


def _has_bytes_of_numbers(token: bytes) -> bool:
    """Return whether a token has control characters and bytes that are not UTF-8, and not just its end cut off."""
    if not any(byte < ord(" ") for byte in token):
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(token)
    except UnicodeDecodeError:
        return True
    return False


def _binary_rows(path: Path, file: BufferedIOBase) -> Iterator[_Block]:
    """Yield the rows of a file in word2vec's binary format, as many at a time as one read completes."""
    header = file.readline(LONGEST_TOKEN)
    if header.startswith(FASTTEXT):
        raise CheckpointError(f"{path} is a whole model of fastText. See docs/errors.md, Models of fastText.")
    if header.startswith(PICKLE):
        raise pickle_error(path)
    count, width = _checked_header(path, header)
    size = 4 * width
    buffer, number = b"", 1
    while number <= count:
        tokens: list[bytes] = []
        starts: list[int] = []
        token, at, end = b"", 0, -1
        while number + len(tokens) <= count:
            end = buffer.find(b" ", at)
            token = buffer[at:end].lstrip(b"\n")  # word2vec's own tool ends each row with one
            if end < 0 or len(buffer) - end <= size or not 0 < len(token) <= LONGEST_TOKEN:
                break
            if _has_bytes_of_numbers(token):
                raise CheckpointError(
                    f"{path}, row {number + len(tokens)}: the token {token[:40]!r} has bytes of numbers. The token "
                    f"before it may have a space, where a token ends in this format."
                )
            tokens.append(token)
            starts.append(end + 1)
            at = end + 1 + size
        if tokens:
            view = memoryview(buffer)
            block = np.frombuffer(b"".join([view[start : start + size] for start in starts]), "<f4")
            yield range(number, number + len(tokens)), tokens, block.reshape(-1, width)
            number += len(tokens)
            buffer = buffer[at:]
        elif max(len(token), 0 if end >= 0 else len(buffer)) > LONGEST_TOKEN:
            raise CheckpointError(f"{path}, row {number}: its token does not end: rows are not {width} numbers wide.")
        elif end >= 0 and not token:
            raise CheckpointError(f"{path}, row {number}: it has no token.")
        elif more := file.read(max(streams.BYTES_AT_ONCE, size)):
            buffer += more
        elif end < 0:
            raise CheckpointError(f"{path}: the header states {count} rows, and the file ends after {number - 1}.")
        else:
            raise CheckpointError(f"{path}, row {number}: the file ends within it.")
    rest = buffer + file.read(2)
    if rest.strip(b"\n"):
        raise CheckpointError(f"{path}: the header states {count} rows of {width} numbers, and the file goes on.")
