"""Read and write tables in the file formats of word vectors, a row at a time.

| format | file | layout |
|---|---|---|
| `word2vec` | `.txt`, also `.gz` | a header `V D`, then a line for each token: itself and D numbers |
| `word2vec-binary` | `.bin`, also `.gz` | the same header, then each token, a space and D little-endian float32 |
| `glove` | `.txt`, also `.gz` | the lines of `word2vec` without the header |
| `fasttext` | `.vec`, also `.gz` | that of `word2vec` |
| `npy` | `.npy`, also `.gz` | NumPy's array, and beside it, if rows have names, `NAME.tokens.json`: a list of strings |
| `projector` | a folder | `tensors.tsv` and `metadata.tsv` of the Embedding Projector; its `projector_config.pbtxt` |

Numbers are written as the shortest decimals that read back as the same float32. Sizes in a header are not trusted:
memory is allocated for the bytes that are read.
"""

import codecs
import gzip
import json
import re
import shlex
import warnings
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.errors import CheckpointError, EmbedLayerWarning, FileError, ShapeError, SizeError
from embedlayer.io.files import create_folder, is_stream, read_bytes, replace_file, require_file
from embedlayer.io.json_fields import parse_json
from embedlayer.io.safetensors_files import pickle_error
from embedlayer.tables.conversions import TableLike, as_rows
from embedlayer.tables.lookup import LookupTable

VectorFormat = Literal["word2vec", "word2vec-binary", "glove", "fasttext", "npy", "projector"]
DecodeErrors = Literal["strict", "ignore", "replace"]
NonfiniteRows = Literal["refuse", "keep"]

FIRST_BYTES = 1 << 16
LONGEST_LINE = 1 << 24
LONGEST_TOKEN = 1 << 16
MOST_COLUMNS = 1 << 20
NUMBERS_AT_ONCE = 1 << 16
BYTES_AT_ONCE = 1 << 21
ROWS_SHOWN = 8
FASTTEXT = (793712314).to_bytes(4, "little")
"""First bytes of a model of fastText."""

PICKLE = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of a pickle, by its protocol."""

TENSORS, METADATA, PROJECTOR_CONFIG = "tensors.tsv", "metadata.tsv", "projector_config.pbtxt"

_BY_SUFFIX: dict[str, VectorFormat] = {
    ".bin": "word2vec-binary",
    ".vec": "fasttext",
    ".npy": "npy",
    ".tsv": "projector",
}
SUFFIXES = (".txt", *_BY_SUFFIX)
"""Suffixes of these files, before `.gz`."""

_NPY_HEADER = re.compile(
    r"\s*\{\s*'descr':\s*'([<>|=]?f[248])',\s*'fortran_order':\s*(True|False),\s*'shape':\s*"
    r"\((\d{1,12}),\s*(\d{1,12})\),?\s*\}\s*"
)
_SPACES = re.compile(r"[ \t\n\r\v\f]")
_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_UNESCAPES = {escape: character for character, escape in _ESCAPES.items()}

Row = npt.NDArray[np.float32]


def read_vectors(
    path: Path | str,
    format: VectorFormat | None = None,
    *,
    errors: DecodeErrors = "replace",
    nonfinite: NonfiniteRows = "refuse",
) -> tuple[list[str], Float[Tensor, "V D"]]:
    """Read a table and its tokens from a file of word vectors.

    In the formats of word2vec, GloVe and fastText, the first row of a duplicate token is kept, as in gensim, with a
    warning. A token may have spaces, as in GloVe's 840B file: the last D fields of a line are the numbers.

    Args:
        path: The file, or for `projector` its folder.
        format: Name of the format; by default by the suffix of the file, and for a `.txt` by its first line.
        errors: Handling of tokens that are not UTF-8, as in `bytes.decode`: `"replace"` or `"ignore"` with a warning,
            or an error (`"strict"`). word2vec's own tool cuts long tokens inside a character.
        nonfinite: Handling of rows with NaN, infinity or numbers too large for float32: an error, or with `"keep"` a
            warning.

    Returns:
        The tokens, and their rows `(V, D)` in float32. A `.npy` without a file of tokens has the row numbers `"0"`,
        `"1"`, ... as tokens.

    Raises:
        FileError: The file cannot be read.
        CheckpointError: The file does not have this format, or has rows that are not finite. The message names the line
            or the row.
        SizeError: The format is unknown, or the file name does not determine it.

    Warns:
        EmbedLayerWarning: There are duplicate tokens, tokens that are not UTF-8, or rows that are not finite and are
            kept.

    Example:
        >>> write_vectors("cats.txt", ["cat", "dog"], torch.eye(2), format="word2vec")
        >>> read_vectors("cats.txt")
        (['cat', 'dog'], tensor([[1., 0.],
                [0., 1.]]))
    """
    path = Path(path)
    if format is None and _suffix(path) == ".txt" and not path.is_dir():
        with _reading(path) as file:
            format = "word2vec" if _header(_without_mark(path, file).readline(LONGEST_LINE)) else "glove"
    chosen = format_of(path, format)
    if format is None and chosen == "word2vec-binary" and _is_text(path):
        chosen = "word2vec"
    if chosen == "npy":
        tokens, rows, places = _read_npy(path)
    elif chosen == "projector":
        tokens, rows, places = _read_projector(path, errors)
    else:
        with _reading(path) as file:
            is_text = chosen != "word2vec-binary"
            if is_text:
                file = _without_mark(path, file)
            found = _text_rows(path, file, has_header=chosen != "glove") if is_text else _binary_rows(path, file)
            tokens, rows, places = _collected(path, found, errors, place="line" if is_text else "row")
    _check_finite(path, tokens, rows, places, nonfinite)
    return tokens, rows


def _check_finite(path: Path, tokens: list[str], rows: Tensor, places: "Places", nonfinite: NonfiniteRows) -> None:
    """Raise an error or warn if rows contain NaN or infinity.

    Args:
        path: The file that was read, for the message.
        tokens: Token of each row.
        rows: The rows, `(V, D)`.
        places: Function from a row number to its line or row in the file, for the message.
        nonfinite: `"refuse"` raises the error; `"keep"` warns.

    Raises:
        CheckpointError: A row is not finite and `nonfinite` is `"refuse"`.
    """
    if rows.sum().isfinite():  # a sum with NaN or infinity is not
        return
    chunks = rows.split(max(1, NUMBERS_AT_ONCE // rows.shape[1]))
    broken = torch.cat([~chunk.isfinite().all(1) for chunk in chunks]).nonzero().flatten().tolist()
    if not broken:
        return
    shown = "; ".join(f"{places(row)} ({tokens[row]!r})" for row in broken[:ROWS_SHOWN])
    what = (
        f"{path}: {len(broken):,} of {len(rows):,} rows hold NaN, infinity or numbers too large for float32: "
        f"{shown}{'; ...' if len(broken) > ROWS_SHOWN else ''}."
    )
    if nonfinite == "refuse":
        raise CheckpointError(f'{what} Remove them, or read them as they are with nonfinite="keep".')
    warnings.warn(what, EmbedLayerWarning, stacklevel=3)


def write_vectors(
    path: Path | str,
    tokens: Sequence[str],
    rows: TableLike,
    format: VectorFormat | None = None,
) -> None:
    r"""Write a table and its tokens to a file of word vectors, in float32, atomically.

    Args:
        path: The file, or for `projector` a folder. A file with the suffix `.gz` is compressed.
        tokens: One for each row. The formats of word2vec, GloVe and fastText refuse tokens that are empty, duplicate or
            have white space. In `projector` tabs and line breaks become `\t`, `\n`, `\r`, and backslashes `\\`.
        rows: A tensor `(V, D)`, or a table; a table is read in chunks of rows, without its scale.
        format: Name of the format; by default by the suffix of the file.

    Raises:
        FileError: The file cannot be written.
        ShapeError: The numbers of tokens and rows differ or are 0.
        CheckpointError: The format cannot represent a token or a number; the message names the row.
        SizeError: The format is unknown, or the file name does not determine it.
    """
    path = Path(path)
    chosen = format_of(path, format)
    rows = as_rows(rows)
    count = rows.vocab_size if isinstance(rows, LookupTable) else len(rows)
    width = rows.embed_dim if isinstance(rows, LookupTable) else rows.shape[-1]
    if count != len(tokens) or not count or not width:
        raise ShapeError(
            f"{len(tokens)} tokens need as many rows, at least one, of some width: found {count} x {width}."
        )
    chunks = _chunks(rows, count, width)
    if chosen == "projector":
        _write_projector(_folder_of(path), tokens, chunks)
    elif chosen == "npy":
        _write_npy(path, tokens, chunks, width)
    else:
        _write_words(path, tokens, chunks, width, chosen)


# Choosing


def format_of(path: Path, format: str | None = None) -> VectorFormat:
    """Return the format of a file: `format` if it is passed, else the one that the suffix of `path` implies.

    For an existing folder this is `"projector"`.

    Raises:
        SizeError: `format` is unknown, or it is `None` and the suffix implies no format.
    """
    names = get_args(VectorFormat)
    if format is not None and format not in names:
        raise SizeError(f"There is no file format {format!r}. Choose one of {', '.join(names)}.")
    chosen = format or ("projector" if path.is_dir() else _BY_SUFFIX.get(_suffix(path)))
    if chosen is None:
        raise SizeError(f"The name {path.name} does not tell the format: give one of {', '.join(names)}.")
    return chosen  # type: ignore[return-value]


def _suffix(path: Path) -> str:
    """Return the suffix of a file name without `.gz`: for `x.txt` and `x.txt.gz` it is `.txt`."""
    return Path(path.name.removesuffix(".gz")).suffix


# Reading


@contextmanager
def _reading(path: Path) -> Iterator[BufferedIOBase]:
    """Open a file for reading in a `with` block; a file with the suffix `.gz` is decompressed.

    Raises:
        FileError: The file cannot be opened, or reading it in the block fails.
        CheckpointError: The compressed data are damaged or truncated.
    """
    require_file(path)
    try:
        with path.open("rb") as file:
            if path.suffix != ".gz":
                yield file
                return
            with gzip.open(file) as content:
                yield content
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CheckpointError(f"{path} is not a whole gzip file ({error}): it is damaged or was cut short.") from error
    except FileError:  # of another file that is read inside the block
        raise
    except OSError as error:
        raise FileError(f"Cannot read {path}: {error.strerror or error}.") from error


def _without_mark(path: Path, file: BufferedIOBase) -> BufferedIOBase:
    """Return a file of text, which is at its start, behind a byte-order mark if there is one.

    Raises:
        CheckpointError: Its first lines end in carriage returns alone, if need be behind a header, or it is a pickle.
    """
    start = file.read(FIRST_BYTES)
    if start.startswith(PICKLE):
        raise pickle_error(path)
    rows = start.partition(b"\n")[2] if _header(start.partition(b"\n")[0]) else start
    if b"\r" in rows.strip(b"\r") and b"\n" not in rows:
        raise CheckpointError(
            f"{path} has lines that end in carriage returns alone, as old programs wrote them. Convert it:\n"
            f"tr -s '\\r' '\\n' < {shlex.quote(str(path))} > NEW_FILE{''.join(path.suffixes[:1])}"
        )
    file.seek(len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0)
    return file


def _is_text(path: Path) -> bool:
    """Return whether a `.bin` has the text format of word2vec: a header, and a line of a token and D numbers."""
    with _reading(path) as file:
        start = file.read(FIRST_BYTES).removeprefix(codecs.BOM_UTF8)
    sizes = _header(start.partition(b"\n")[0])
    fields = start.split(b"\n")[1].split() if sizes else []
    return sizes is not None and len(fields) > sizes[1] and all(map(_is_number, fields[-sizes[1] :]))


Found = tuple[Sequence[int], list[bytes], Row]
"""Line or row numbers, tokens and numbers `(N, D)` of some rows."""

Places = Callable[[int], str]
"""Function from a row number to its line or row in the file, for error messages."""


def _collected(
    path: Path, found: Iterator[Found], errors: DecodeErrors, *, place: str
) -> tuple[list[str], Float[Tensor, "V D"], Places]:
    """Collect the rows of a file in one tensor; only the first row of a duplicate token is kept, with a warning.

    Memory grows with the bytes that were read, not with the sizes that a header states.

    Args:
        path: The file, for messages.
        found: The rows in order, some at a time.
        errors: Handling of tokens that are not UTF-8, as in `read_vectors`.
        place: `"line"` or `"row"`: what the numbers in `found` count.

    Returns:
        Tokens, rows, and a function from a row number of the tensor to its line or row in the file, for messages.

    Raises:
        CheckpointError: There are no rows, or a token is not UTF-8.
    """
    first: dict[str, None] = {}
    decoder = _Decoder(path, errors, place)
    numbers, at = bytearray(), array("q")
    twice: list[str] = []
    width = 0
    for places, raws, block in found:
        kept = []
        for row, (number, raw) in enumerate(zip(places, raws, strict=True)):
            token = decoder.decode(raw, number)
            if token in first:
                twice.append(f"{token!r} at {place} {number}")
            else:
                first[token] = None
                at.append(number)
                kept.append(row)
        width = block.shape[1]
        numbers += (block if len(kept) == len(block) else block[kept]).data
    if not first:
        raise CheckpointError(f"{path} holds no vectors.")
    decoder.warn(stacklevel=4)
    if twice:
        warnings.warn(
            f"{path} has rows whose token an earlier row has, {len(twice)} in all, first {twice[0]}: only the first "
            f"row of a token is kept.",
            EmbedLayerWarning,
            stacklevel=3,
        )
    rows = torch.frombuffer(numbers, dtype=torch.float32).view(len(first), width)
    return list(first), rows, lambda row: f"{place} {at[row]}"


class _Decoder:
    """Decode the tokens of a file as UTF-8, and count those that are not.

    Args:
        path: The file, for messages.
        errors: Handling of tokens that are not UTF-8, as in `read_vectors`.
        place: `"line"` or `"row"`: what the numbers count that `decode` takes.
    """

    def __init__(self, path: Path, errors: DecodeErrors, place: str) -> None:
        self.path = path
        self.errors = errors
        self.place = place
        self.count = 0
        self.first = ""

    def decode(self, raw: bytes, number: int) -> str:
        """Return the text of a token.

        Args:
            raw: Bytes of the token.
            number: Its line or row, for messages.

        Raises:
            CheckpointError: The token is not UTF-8, and `errors` is `"strict"`.
        """
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            place = f"{self.place} {number}"
            if self.errors == "strict":
                raise CheckpointError(
                    f"{self.path}, {place}: the token {raw[:40]!r} is not UTF-8 ({error.reason}). "
                    f'Read it with errors="replace" or errors="ignore".'
                ) from error
            self.first = self.first or f"{raw[:40]!r} at {place}"
            self.count += 1
            return raw.decode(errors=self.errors)

    def warn(self, *, stacklevel: int) -> None:
        """Warn if there were tokens that are not UTF-8."""
        if self.count:
            how = "replaced by U+FFFD" if self.errors == "replace" else "left out"
            warnings.warn(
                f"{self.path} holds {self.count:,} tokens that are not UTF-8, first {self.first}: their other bytes "
                f"are {how}.",
                EmbedLayerWarning,
                stacklevel=stacklevel,
            )


def _header(line: bytes) -> tuple[int, int] | None:
    """Return `(V, D)` if a line consists of two whole numbers, as word2vec's header does; else `None`."""
    found = re.fullmatch(rb"\s*(\d{1,15})[ \t]+(\d{1,15})\s*", line)
    return (int(found[1]), int(found[2])) if found else None


def _checked_header(path: Path, line: bytes) -> tuple[int, int]:
    """Return `(V, D)`, the numbers of rows and columns, from the first line of a file in a format with a header.

    Raises:
        CheckpointError: The line is no header, or D is 0 or above `MOST_COLUMNS`.
    """
    sizes = _header(line)
    if sizes is None:
        raise CheckpointError(
            f"{path}, line 1: {line[:40]!r} is not the header of word2vec's formats, the numbers of rows and columns. "
            f'A text file without one is format="glove".'
        )
    if not 1 <= sizes[1] <= MOST_COLUMNS:
        raise CheckpointError(f"{path}, line 1: the header states {sizes[1]} columns: it is damaged.")
    return sizes


def _lines(path: Path, file: BufferedIOBase, first: int) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line) for the rest of a file, without the white space at the end of each line.

    Empty lines at the end of the file are skipped.

    Args:
        path: The file, for messages.
        file: The open file.
        first: Number of the line that is read first.

    Raises:
        CheckpointError: A line is too long, or an empty line is followed by other lines.
    """
    empty = None
    number = first
    while line := file.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise CheckpointError(
                f"{path}, line {number}: it is longer than {LONGEST_LINE:,} bytes: no text of vectors."
            )
        stripped = line.rstrip(b" \t\r\n")
        if stripped and empty is not None:
            raise CheckpointError(f"{path}, line {empty}: it is empty.")
        if stripped:
            yield number, stripped
        elif empty is None:
            empty = number
        number += 1


def _text_rows(path: Path, file: BufferedIOBase, *, has_header: bool) -> Iterator[Found]:
    """Yield the rows of a text file with one token a line, one at a time.

    Without a header, the first line determines the number of columns, D.

    Args:
        path: The file, for messages.
        file: The open file, at its start.
        has_header: Whether the first line is a header `V D`.

    Raises:
        CheckpointError: A line is not a token and D numbers, or the number of rows differs from the header.
    """
    count, width = _checked_header(path, file.readline(LONGEST_LINE)) if has_header else (None, 0)
    number = found = 0
    for number, line in _lines(path, file, first=1 + has_header):
        if not width:
            width = _width_of(path, line)
        found += 1
        if count is not None and found > count:
            raise CheckpointError(f"{path}, line {number}: the header states {count} rows, and here is one more.")
        token, *fields = line.rsplit(None, width)
        if len(fields) == width - 1 and line[:1].isspace():
            token, fields = b"", [token, *fields]
        if len(fields) < width or _is_number((token.split()[1:] or [b"-"])[-1]):
            raise CheckpointError(
                f"{path}, line {number}: found {len(line.split()) - 1} numbers where there should be {width}."
            )
        if not token:
            raise CheckpointError(f"{path}, line {number}: it has no token, only numbers.")
        yield (number,), [token], _numbers(path, number, fields)[None]
    if count is not None and found < count:
        raise CheckpointError(f"{path}: the header states {count} rows, and the file ends after {found}.")


def _width_of(path: Path, line: bytes) -> int:
    """Return the number of columns of a file without a header.

    It is the number of fields at the end of the first line that are numbers; the fields before them are the token.

    Args:
        path: The file, for the error message.
        line: Its first line.

    Raises:
        CheckpointError: The line is not a token and its numbers.
    """
    fields = line.split()
    width = 0
    while width < len(fields) - 1 and _is_number(fields[-1 - width]):
        width += 1
    if not width:
        raise CheckpointError(f"{path}, line 1: {line[:40]!r} is not a token and its numbers.")
    return width


def _is_number(field: bytes) -> bool:
    """Return whether a field is a number for Python's `float`, without the underscores that `float` allows (`1_0`)."""
    try:
        float(field)
    except ValueError:
        return False
    return b"_" not in field


def _numbers(path: Path, line: int, fields: Sequence[bytes]) -> Row:
    """Convert the fields of a line to float32; numbers too large for float32 become infinity.

    Args:
        path: The file, for the message.
        line: Number of the line, for the message.
        fields: The numbers as text, without the token.

    Raises:
        CheckpointError: A field is not a number.
    """
    try:
        with np.errstate(over="ignore"):
            row = np.fromiter(map(float, fields), np.float64, len(fields)).astype(np.float32)
    except ValueError:
        row = None
    if row is None or b"_" in b"".join(fields):  # float() takes 1_0 for 10
        wrong = next(field for field in fields if not _is_number(field))
        raise CheckpointError(f"{path}, line {line}: {wrong[:40]!r} is not a number.")
    return row


def _binary_rows(path: Path, file: BufferedIOBase) -> Iterator[Found]:
    """Yield the rows of a file in word2vec's binary format, as many at a time as one read completes.

    Raises:
        CheckpointError: The header or a row is damaged, or the number of rows differs from the header.
    """
    header = file.readline(LONGEST_TOKEN)
    if header.startswith(FASTTEXT):
        raise CheckpointError(
            f"{path} is a whole model of fastText, which also has rows of parts of words. Read the .vec file beside "
            f"it, or write one: gensim.models.fasttext.load_facebook_vectors({str(path)!r}).save_word2vec_format("
            f"{str(path.with_suffix('.vec'))!r})"
        )
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
        elif more := file.read(max(BYTES_AT_ONCE, size)):
            buffer += more
        elif end < 0:
            raise CheckpointError(f"{path}: the header states {count} rows, and the file ends after {number - 1}.")
        else:
            raise CheckpointError(f"{path}, row {number}: the file ends within it.")
    rest = buffer + file.read(2)
    if rest.strip(b"\n"):
        raise CheckpointError(f"{path}: the header states {count} rows of {width} numbers, and the file goes on.")


def _read_npy(path: Path) -> tuple[list[str], Float[Tensor, "V D"], Places]:
    """Read a NumPy array, and its tokens from the JSON file in the same folder if there is one.

    Returns:
        Tokens, rows, and a function from a row number to its place in the file, for messages.

    Raises:
        FileError: A file cannot be read.
        CheckpointError: The file is not a two-dimensional array of floats, is truncated, or does not fit the tokens.
    """
    names = _tokens_file(path)
    tokens = parse_json(read_bytes(names), names) if names.exists() else None
    if tokens is not None and not (isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)):
        raise CheckpointError(f"{names} is not a list of tokens.")
    with _reading(path) as file:
        start = file.read(10)
        length = int.from_bytes(start[8:10], "little")
        header = file.read(length)
        found = _NPY_HEADER.fullmatch(header.decode("latin-1"))
        if start[:8] != b"\x93NUMPY\x01\x00" or len(header) < length or not found:
            raise CheckpointError(f"{path} is not an array (V, D) of floats in NumPy's format 1.0.")
        dtype, by_columns, count, width = np.dtype(found[1]), found[2] == "True", int(found[3]), int(found[4])
        if not count or not width:
            raise CheckpointError(f"{path} holds {count} x {width} numbers: there are no vectors in it.")
        if tokens is not None and count != len(tokens):
            raise CheckpointError(
                f"{path} has {count} rows, and {names.name} beside it {len(tokens)} tokens: they do not "
                f"belong together."
            )
        wanted = count * width * dtype.itemsize
        content = bytearray()
        while len(content) <= wanted and (more := file.read(BYTES_AT_ONCE)):
            content += more
        if len(content) != wanted:
            raise CheckpointError(
                f"{path}: its header states {wanted:,} bytes of numbers, and the file "
                f"{'goes on' if len(content) > wanted else f'ends after {len(content):,}'}."
            )
    array = np.frombuffer(content, dtype).reshape((width, count) if by_columns else (count, width))
    with np.errstate(over="ignore"):
        rows = (array.T if by_columns else array).astype(np.float32, copy=False)
    _warn_of_rounding(path, array.T if by_columns else array, rows)
    return tokens or [str(row) for row in range(count)], torch.from_numpy(rows), lambda row: f"row {row}"


def _warn_of_rounding(path: Path, array: npt.NDArray[np.floating[Any]], rows: Row) -> None:
    """Warn if the numbers of a float64 array `(V, D)` change in float32, `rows`."""
    if array.dtype.itemsize <= rows.dtype.itemsize:
        return
    step = max(1, NUMBERS_AT_ONCE // rows.shape[1])
    blocks = (slice(start, start + step) for start in range(0, len(rows), step))
    if not all(np.array_equal(array[block], rows[block], equal_nan=True) for block in blocks):
        warnings.warn(f"{path} holds float64, and its numbers are rounded to float32.", EmbedLayerWarning, stacklevel=4)


def _read_projector(path: Path, errors: DecodeErrors) -> tuple[list[str], Float[Tensor, "V D"], Places]:
    """Read vectors and labels of the Embedding Projector.

    Args:
        path: Folder of the files, or a `.tsv` file in it.
        errors: Handling of labels that are not UTF-8, as in `read_vectors`.

    Returns:
        Labels, rows, and a function from a row number to its place in the file, for messages.

    Raises:
        FileError: A file cannot be read.
        CheckpointError: A line is damaged, or the numbers of labels and rows differ.
    """
    folder = _folder_of(path)
    given = path.name if path.is_file() else TENSORS if (folder / TENSORS).exists() else "vectors.tsv"
    if given not in (TENSORS, METADATA, PROJECTOR_CONFIG) and (folder / given).exists():
        raise CheckpointError(
            f"{folder / given} is a table of the Embedding Projector under another name: rename it to {TENSORS}, and "
            f"the file of its labels to {METADATA}."
        )
    numbers = bytearray()
    count = width = 0
    tensors = folder / TENSORS
    with _reading(tensors) as file:
        for number, line in _lines(tensors, file, first=1):
            fields = line.split(b"\t")
            width = width or len(fields)
            if len(fields) != width:
                raise CheckpointError(
                    f"{tensors}, line {number}: found {len(fields)} numbers where there should be {width}."
                )
            numbers += _numbers(tensors, number, fields).astype("<f4").tobytes()
            count += 1
    if not count:
        raise CheckpointError(f"{tensors} holds no vectors.")
    rows = torch.frombuffer(numbers, dtype=torch.float32).view(count, width)
    return _metadata(folder / METADATA, count, errors), rows, lambda row: f"{TENSORS}, line {row + 1}"


def _metadata(path: Path, count: int, errors: DecodeErrors) -> list[str]:
    """Read the labels of the Embedding Projector, one for each vector, from its file `metadata.tsv`.

    The labels are the first column. A file with several columns starts with a line of column names, which is skipped;
    a file with one column does not.

    Args:
        path: The file.
        count: Number of vectors.
        errors: Handling of labels that are not UTF-8, as in `read_vectors`.

    Raises:
        CheckpointError: The number of labels is not `count`, or a line has another number of columns.
    """
    decoder = _Decoder(path, errors, "line")
    with _reading(path) as file:
        tokens = []
        columns = number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if number > count + 1 or len(line) > LONGEST_LINE:
                raise CheckpointError(f"{path}, line {number}: there are {count} rows, and here is one more label.")
            fields = line.removesuffix(b"\n").removesuffix(b"\r").split(b"\t")
            columns = columns or len(fields)
            if columns > 1 and number == 1:
                continue
            if len(fields) != columns:
                raise CheckpointError(f"{path}, line {number}: found {len(fields)} columns where there are {columns}.")
            label = decoder.decode(fields[0], number)
            tokens.append(re.sub(r"\\[\\tnr]", lambda found: _UNESCAPES[found[0]], label))
    if len(tokens) != count:
        raise CheckpointError(
            f"{path} has {len(tokens)} labels, and {TENSORS} has {count} rows. With one column it has no header."
        )
    decoder.warn(stacklevel=5)
    return tokens


# Writing


def _write_words(path: Path, tokens: Sequence[str], chunks: Iterator[Row], width: int, format: VectorFormat) -> None:
    """Write a file in a format of word2vec, GloVe or fastText.

    Args:
        path: The file; with the suffix `.gz` it is compressed.
        tokens: Token of each row.
        chunks: The rows in order, several at a time.
        width: Number of columns, D.
        format: Name of the format.

    Raises:
        CheckpointError: A token is empty, duplicate, has white space, or cannot be encoded in UTF-8.
    """
    _check_tokens(tokens)
    words = iter(tokens)
    with _writing(path) as file:
        if format != "glove":
            file.write(f"{len(tokens)} {width}\n".encode())
        for chunk in chunks:
            if format == "word2vec-binary":
                file.writelines(f"{next(words)} ".encode() + row.astype("<f4").tobytes() for row in chunk)
            else:
                file.writelines(f"{next(words)} {line}\n".encode() for line in _decimals(chunk, " "))


def _write_npy(path: Path, tokens: Sequence[str], chunks: Iterator[Row], width: int) -> None:
    """Write a NumPy array and the JSON file of its tokens; neither file is replaced before both are complete.

    Args:
        path: File of the array; with the suffix `.gz` it is compressed.
        tokens: Token of each row.
        chunks: The rows in order, several at a time.
        width: Number of columns, D.

    Raises:
        FileError: `path` is a device or a pipe, which has no file beside it.
    """
    if is_stream(path):
        raise FileError(f"{path} is a device or a pipe, and a .npy file has a file of tokens beside it: name a file.")
    with replace_file(_tokens_file(path)) as partial, _writing(path) as file:
        partial.write_text(json.dumps(list(tokens)) + "\n")
        header = {"descr": "<f4", "fortran_order": False, "shape": (len(tokens), width)}
        np.lib.format.write_array_header_1_0(file, header)
        file.writelines(chunk.astype("<f4").tobytes() for chunk in chunks)


def _write_projector(folder: Path, tokens: Sequence[str], chunks: Iterator[Row]) -> None:
    """Write the three files of the Embedding Projector; none is replaced before all are complete.

    Args:
        folder: Folder of the files, created if missing.
        tokens: Token of each row.
        chunks: The rows in order, several at a time.

    Raises:
        CheckpointError: A token cannot be encoded in UTF-8.
    """
    labels = [re.sub(r"[\\\t\n\r]", lambda found: _ESCAPES[found[0]], token) for token in tokens]
    metadata = "".join(f"{_check_utf8(label, row)}\n" for row, label in enumerate(labels))
    fields = {"tensor_name": "table", "tensor_path": TENSORS, "metadata_path": METADATA}
    content = "".join(f'  {name}: "{value}"\n' for name, value in fields.items())
    create_folder(folder)
    with (
        replace_file(folder / METADATA) as labels_file,
        replace_file(folder / PROJECTOR_CONFIG) as config_file,  # what TensorBoard looks for
        _writing(folder / TENSORS) as file,
    ):
        labels_file.write_text(metadata, encoding="utf-8")
        config_file.write_text(f"embeddings {{\n{content}}}\n", encoding="utf-8")
        for chunk in chunks:
            file.writelines(f"{line}\n".encode() for line in _decimals(chunk, "\t"))


@contextmanager
def _writing(path: Path) -> Iterator[BufferedIOBase]:
    """Open a file for writing in a `with` block; a file with the suffix `.gz` is compressed.

    The file is replaced atomically at the end of the block. If the block fails, the old file stays.

    Raises:
        FileError: The file cannot be written.
    """
    with replace_file(path) as partial, partial.open("wb") as file:
        if path.suffix != ".gz":
            yield file
            return
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as content:
            yield content


def _chunks(rows: Tensor | LookupTable, count: int, width: int) -> Iterator[Row]:
    """Yield the rows in order, in blocks: NumPy arrays of float32, `(N, D)`.

    A block has at most `NUMBERS_AT_ONCE` numbers, but at least one row.

    Args:
        rows: The table, or its rows.
        count: Number of rows, V.
        width: Number of columns, D.

    Raises:
        CheckpointError: A row contains NaN or infinity.
    """
    step = max(1, NUMBERS_AT_ONCE // width)
    for start in range(0, count, step):
        stop = min(count, start + step)
        part = rows.rows(start, stop) if isinstance(rows, LookupTable) else rows[start:stop]
        chunk: Row = part.detach().to("cpu", torch.float32).numpy()
        unsound = np.flatnonzero(~np.isfinite(chunk).all(axis=-1))
        if len(unsound):
            raise CheckpointError(
                f"Row {start + unsound[0]} holds NaN or infinity, which other readers refuse: replace it first."
            )
        yield chunk


def _decimals(chunk: Row, separator: str) -> Iterator[str]:
    """Yield each row as text, with `separator` between the shortest decimals that read back as the same float32."""
    return (separator.join(row) for row in chunk.astype(np.str_).tolist())


def _check_tokens(tokens: Sequence[str]) -> None:
    """Check that the formats of word2vec, GloVe and fastText can represent all tokens.

    Raises:
        CheckpointError: A token is empty, duplicate, has white space, or cannot be encoded in UTF-8.
    """
    seen: dict[str, int] = {}
    for row, token in enumerate(tokens):
        if not token or _SPACES.search(token):
            what = "holds white space, where readers of this format end a token" if token else "is empty"
            raise CheckpointError(
                f"Row {row}: the token {token!r} {what}. Write a mark in its place, as SentencePiece does with '▁', or "
                f"choose the format npy or projector."
            )
        if seen.setdefault(_check_utf8(token, row), row) != row:
            raise CheckpointError(
                f"Row {row}: the token {token!r} is that of row {seen[token]} too; each token may occur once."
            )


def _check_utf8(token: str, row: int) -> str:
    """Check that a token can be encoded in UTF-8, and return it unchanged.

    Args:
        token: The token, which may contain lone surrogates.
        row: Number of its row, for the message.

    Raises:
        CheckpointError: UTF-8 cannot encode the token.
    """
    try:
        token.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"Row {row}: the token {token!r} cannot be encoded in UTF-8.") from error
    return token


def _folder_of(path: Path) -> Path:
    """Return the folder of the Embedding Projector's files; `path` is this folder or a `.tsv` file in it."""
    return path.parent if path.suffix == ".tsv" else path


def files_of(path: Path, format: str) -> list[Path]:
    """Return the files that `write_vectors` writes for `path`; `path` alone for a format that is not its own."""
    if format == "projector":
        return [_folder_of(path) / name for name in (TENSORS, METADATA, PROJECTOR_CONFIG)]
    return [path, _tokens_file(path)] if format == "npy" else [path]


def _tokens_file(path: Path) -> Path:
    """Return the path of the JSON file with the tokens of a `.npy` file: `x.tokens.json` for `x.npy` and `x.npy.gz`."""
    return path.with_name(path.name.removesuffix(".gz").removesuffix(".npy") + ".tokens.json")
