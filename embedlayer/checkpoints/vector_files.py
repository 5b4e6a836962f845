"""Tables in the files that word vectors travel in, read and written a row at a time.

| format | file | layout |
|---|---|---|
| `word2vec` | `.txt`, also `.gz` | a header `V D`, then a line for each token: itself and D numbers |
| `word2vec-binary` | `.bin`, also `.gz` | the same header, then each token, a space and D little-endian float32 |
| `glove` | `.txt`, also `.gz` | the lines of `word2vec` without the header |
| `fasttext` | `.vec`, also `.gz` | that of `word2vec` |
| `npy` | `.npy`, also `.gz` | NumPy's array, and beside it, if rows have names, `NAME.tokens.json`: a list of strings |
| `projector` | a folder | `tensors.tsv` and `metadata.tsv` of the Embedding Projector; its `projector_config.pbtxt` |

Numbers are written as the shortest decimals that read back as the same float32. Nothing is believed that a header says:
memory grows with what is really in the file.
"""

import gzip
import json
import re
import warnings
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.errors import CheckpointError, EmbedLayerWarning, FileError, ShapeError, SizeError
from embedlayer.io.files import create_folder, replace_file
from embedlayer.tables.dense import TableLike, as_rows
from embedlayer.tables.table import TokenTable

VectorFormat = Literal["word2vec", "word2vec-binary", "glove", "fasttext", "npy", "projector"]
DecodeErrors = Literal["strict", "ignore", "replace"]
NonfiniteRows = Literal["refuse", "keep"]

LONGEST_LINE = 1 << 24
LONGEST_TOKEN = 1 << 16
MOST_COLUMNS = 1 << 20
NUMBERS_AT_ONCE = 1 << 16
ROWS_SHOWN = 8
TENSORS, METADATA, PROJECTOR_CONFIG = "tensors.tsv", "metadata.tsv", "projector_config.pbtxt"

_BY_SUFFIX: dict[str, VectorFormat] = {
    ".bin": "word2vec-binary",
    ".vec": "fasttext",
    ".npy": "npy",
    ".tsv": "projector",
}
SUFFIXES = (".txt", *_BY_SUFFIX)
"""Endings of the files above, before `.gz`."""

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
    errors: DecodeErrors = "strict",
    nonfinite: NonfiniteRows = "refuse",
) -> tuple[list[str], Float[Tensor, "V D"]]:
    """Read a table and its tokens.

    In the word2vec family a token that comes twice counts once, with its first row, as in gensim, and with a warning. A
    token may hold spaces (GloVe's 840B file has such): the last D fields are the numbers.

    Args:
        path: The file, or for `projector` its folder.
        format: One of those above; by default what the name says, and for a `.txt` its first line.
        errors: What becomes of tokens that are not UTF-8: an error that names the line, or as in `bytes.decode`
            `"ignore"` or `"replace"` (word2vec's own tool cuts long tokens within a character).
        nonfinite: What becomes of rows with NaN, infinity or numbers too large for float32: an error that names the
            first, or with `"keep"` a warning that names some, and the rows as they are.

    Returns:
        The tokens, and their rows `(V, D)` in float32. The tokens of a `.npy` without a file of tokens beside it are
        the numbers of its rows, `"0"`, `"1"`, ...

    Raises:
        FileError: The file cannot be read.
        CheckpointError: It is not what the format says: the message names the line (or the row, where there are no
            lines) with too few numbers, one that is none, NaN or infinity, or a header that lies.
        SizeError: The format is unknown, or the name does not tell it.

    Warns:
        EmbedLayerWarning: Tokens come twice, or rows that are not finite are kept.

    Example:
        >>> write_vectors("cats.txt", ["cat", "dog"], torch.eye(2), format="word2vec")
        >>> read_vectors("cats.txt")
        (['cat', 'dog'], tensor([[1., 0.],
                [0., 1.]]))
    """
    path = Path(path)
    chosen = _format_of(path, format) or _sniffed(path)
    if chosen == "npy":
        tokens, rows, places = _read_npy(path)
    elif chosen == "projector":
        tokens, rows, places = _read_projector(path, errors)
    else:
        with _reading(path) as file:
            if chosen == "word2vec-binary":
                tokens, rows, places = _collected(path, _binary_rows(path, file), errors, place="row")
            else:
                found = _text_rows(path, file, has_header=chosen != "glove")
                tokens, rows, places = _collected(path, found, errors, place="line")
    _check_finite(path, tokens, rows, places, nonfinite)
    return tokens, rows


def _check_finite(path: Path, tokens: list[str], rows: Tensor, places: "Places", nonfinite: NonfiniteRows) -> None:
    """Refuse rows that are not finite, or warn of them."""
    step = max(1, NUMBERS_AT_ONCE // rows.shape[1])
    starts = range(0, len(rows), step)
    broken = [start + int(row) for start in starts for row in (~rows[start : start + step].isfinite().all(1)).nonzero()]
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
    r"""Write a table and its tokens, in float32, wholly or not at all.

    Args:
        path: The file; with the ending `.gz` it is compressed. For `projector` a folder.
        tokens: One for each row. The word2vec family ends a token at white space, so one that holds some, is empty or
            comes twice is refused; in `projector` tabs and line breaks become `\t`, `\n`, `\r`, backslashes `\\`.
        rows: A tensor `(V, D)`, or a table, which is read by chunks of rows, without its scale.
        format: One of those above; by default what the name says.

    Raises:
        FileError: The file cannot be written.
        ShapeError: There is not one row for each token, or none.
        CheckpointError: A token or number that the format cannot hold: the message names the row.
        SizeError: The format is unknown, or the name does not tell it.
    """
    path = Path(path)
    chosen = format_of(path, format)
    rows = as_rows(rows)
    count = rows.vocab_size if isinstance(rows, TokenTable) else len(rows)
    width = rows.embed_dim if isinstance(rows, TokenTable) else rows.shape[-1]
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
    """The format asked for, or what the name of a file says.

    Raises:
        SizeError: The format is unknown, or the name does not tell it.
    """
    chosen = _format_of(path, format)
    if chosen is None:
        raise SizeError(f"The name {path.name} does not tell the format: give one of {_listed()}.")
    return chosen


def _format_of(path: Path, format: str | None) -> VectorFormat | None:
    """The format asked for, or what the name says; `None` where that is open."""
    if format is not None:
        if format not in get_args(VectorFormat):
            raise SizeError(f"No format of tables is called {format!r}. Choose one of {_listed()}.")
        return format  # type: ignore[return-value]
    return "projector" if path.is_dir() else _BY_SUFFIX.get(Path(path.name.removesuffix(".gz")).suffix)


def _sniffed(path: Path) -> VectorFormat:
    """The format of a `.txt`, by its first line."""
    if Path(path.name.removesuffix(".gz")).suffix != ".txt":
        return format_of(path)
    with _reading(path) as file:
        return "word2vec" if _header(file.readline(LONGEST_LINE)) else "glove"


def _listed() -> str:
    return ", ".join(get_args(VectorFormat))


# Reading


@contextmanager
def _reading(path: Path) -> Iterator[BufferedIOBase]:
    try:
        with path.open("rb") as file:
            if path.suffix != ".gz":
                yield file
                return
            with gzip.open(file) as content:
                yield content
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CheckpointError(f"{path} is not a whole gzip file ({error}): it is damaged or was cut short.") from error
    except OSError as error:
        raise (
            error if isinstance(error, FileError) else FileError(f"Cannot read {path}: {error.strerror or error}.")
        ) from error


Found = tuple[int, bytes, Row]
"""Line or row number, token, numbers."""

Places = Callable[[int], str]
"""Where a row is in its file, for people."""


def _collected(
    path: Path, found: Iterator[Found], errors: DecodeErrors, *, place: str
) -> tuple[list[str], Float[Tensor, "V D"], Places]:
    """Tokens and rows as they come, each token once; memory grows with what was read."""
    first: dict[str, None] = {}
    numbers, at = bytearray(), array("q")
    twice: list[str] = []
    width = 0
    for number, raw, row in found:
        token = _decoded(path, f"{place} {number}", raw, errors)
        if token in first:
            twice.append(f"{token!r} at {place} {number}")
            continue
        first[token] = None
        at.append(number)
        width = len(row)
        numbers += row.astype("<f4").tobytes()
    if not first:
        raise CheckpointError(f"{path} holds no vectors.")
    if twice:
        warnings.warn(
            f"{path} holds {len(twice)} tokens twice, first {twice[0]}: only their first rows are kept.",
            EmbedLayerWarning,
            stacklevel=3,
        )
    rows = torch.frombuffer(numbers, dtype=torch.float32).view(len(first), width)
    return list(first), rows, lambda row: f"{place} {at[row]}"


def _decoded(path: Path, place: str, raw: bytes, errors: DecodeErrors) -> str:
    try:
        return raw.decode("utf-8", errors=errors)
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path}, {place}: the token {raw[:40]!r} is not UTF-8 ({error.reason}). "
            f'Read it with errors="replace" or errors="ignore".'
        ) from error


def _header(line: bytes) -> tuple[int, int] | None:
    """`V D`, where a line is that."""
    found = re.fullmatch(rb"\s*(\d{1,15})[ \t]+(\d{1,15})\s*", line)
    return (int(found[1]), int(found[2])) if found else None


def _checked_header(path: Path, line: bytes) -> tuple[int, int]:
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
    """Numbered lines without white space at their end; empty ones may only come last."""
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
    count, width = _checked_header(path, file.readline(LONGEST_LINE)) if has_header else (None, 0)
    number = found = 0
    for number, line in _lines(path, file, first=1 + has_header):
        if not width:
            width = _width_of(path, line)
        found += 1
        if count is not None and found > count:
            raise CheckpointError(f"{path}, line {number}: the header states {count} rows, and here is one more.")
        token, *fields = line.rsplit(b" ", width)
        if len(fields) < width or (b" " in token and _is_number(token.rsplit(b" ", 1)[-1])):
            raise CheckpointError(
                f"{path}, line {number}: found {len(line.split(b' ')) - 1} numbers where there should be {width}."
            )
        if not token:
            raise CheckpointError(f"{path}, line {number}: it has no token, only numbers.")
        yield number, token, _numbers(path, number, fields)
    if count is not None and found < count:
        raise CheckpointError(f"{path}: the header states {count} rows, and the file ends after {found}.")


def _width_of(path: Path, line: bytes) -> int:
    """Columns of a file without a header: the numbers at the end of its first line, a token left over."""
    fields = line.split(b" ")
    width = 0
    while width < len(fields) - 1 and _is_number(fields[-1 - width]):
        width += 1
    if not width:
        raise CheckpointError(f"{path}, line 1: {line[:40]!r} is not a token and its numbers.")
    return width


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return b"_" not in field


def _numbers(path: Path, line: int, fields: Sequence[bytes]) -> Row:
    try:
        with np.errstate(over="ignore"):
            row = np.fromiter(map(float, fields), np.float64, len(fields)).astype(np.float32)
    except ValueError:
        row = None
    if row is None or any(b"_" in field for field in fields):  # float() takes 1_0 for 10
        wrong = next(field for field in fields if not _is_number(field))
        raise CheckpointError(f"{path}, line {line}: {wrong[:40]!r} is not a number.")
    return row


def _binary_rows(path: Path, file: BufferedIOBase) -> Iterator[Found]:
    count, width = _checked_header(path, file.readline(LONGEST_TOKEN))
    size = 4 * width
    buffer, at = b"", 0

    def more() -> bool:
        nonlocal buffer, at
        read = file.read(max(1 << 18, size))
        buffer, at = buffer[at:] + read, 0
        return bool(read)

    for number in range(1, count + 1):
        while (end := buffer.find(b" ", at)) < 0 and len(buffer) - at <= LONGEST_TOKEN:
            if not more():
                raise CheckpointError(f"{path}: the header states {count} rows, and the file ends after {number - 1}.")
        token = buffer[at:end].lstrip(b"\n")  # word2vec's own tool ends each row with one
        if end < 0 or len(token) > LONGEST_TOKEN:
            raise CheckpointError(f"{path}, row {number}: its token does not end: rows are not {width} numbers wide.")
        if not token:
            raise CheckpointError(f"{path}, row {number}: it has no token.")
        at = end + 1
        while len(buffer) - at < size:
            if not more():
                raise CheckpointError(f"{path}, row {number}: the file ends within it.")
        yield number, token, np.frombuffer(buffer, "<f4", width, at).astype(np.float32)
        at += size
    rest = buffer[at:] + file.read(2)
    if rest.strip(b"\n"):
        raise CheckpointError(f"{path}: the header states {count} rows of {width} numbers, and the file goes on.")


def _read_npy(path: Path) -> tuple[list[str], Float[Tensor, "V D"], Places]:
    named = _tokens_file(path).exists()
    tokens = _json_tokens(_tokens_file(path)) if named else []
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
        if named and count != len(tokens):
            raise CheckpointError(
                f"{path} holds {count} rows, and {_tokens_file(path).name} beside it {len(tokens)} tokens: they do not "
                f"belong together."
            )
        wanted = count * width * dtype.itemsize
        content = bytearray()
        while chunk := file.read(min(1 << 22, wanted + 1 - len(content))):
            content += chunk
        if len(content) != wanted:
            raise CheckpointError(
                f"{path}: its header states {wanted:,} bytes of numbers, and the file "
                f"{'goes on' if len(content) > wanted else f'ends after {len(content):,}'}."
            )
    array = np.frombuffer(content, dtype).reshape((width, count) if by_columns else (count, width))
    with np.errstate(over="ignore"):
        rows = (array.T if by_columns else array).astype(np.float32)
    return tokens or [str(row) for row in range(count)], torch.from_numpy(rows), lambda row: f"row {row}"


def _json_tokens(path: Path) -> list[str]:
    try:
        tokens = json.loads(path.read_bytes())
    except OSError as error:
        raise FileError(f"Cannot read {path}, the tokens of the rows: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): it is damaged or another kind of file.") from error
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(f"{path} is not a list of tokens.")
    return tokens


def _read_projector(path: Path, errors: DecodeErrors) -> tuple[list[str], Float[Tensor, "V D"], Places]:
    folder = _folder_of(path)
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
    """The first column; where there are more, the first line names them."""
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
            label = _decoded(path, f"line {number}", fields[0], errors)
            tokens.append(re.sub(r"\\[\\tnr]", lambda found: _UNESCAPES[found[0]], label))
    if len(tokens) != count:
        raise CheckpointError(
            f"{path} has {len(tokens)} labels, and {TENSORS} has {count} rows. With one column it has no header."
        )
    return tokens


# Writing


def _write_words(path: Path, tokens: Sequence[str], chunks: Iterator[Row], width: int, format: VectorFormat) -> None:
    _check_words(tokens)
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
    """Write an array, and its tokens beside it; neither file is replaced before both are complete."""
    with replace_file(_tokens_file(path)) as partial, _writing(path) as file:
        partial.write_text(json.dumps(list(tokens)) + "\n")
        header = {"descr": "<f4", "fortran_order": False, "shape": (len(tokens), width)}
        np.lib.format.write_array_header_1_0(file, header)
        file.writelines(chunk.astype("<f4").tobytes() for chunk in chunks)


def _write_projector(folder: Path, tokens: Sequence[str], chunks: Iterator[Row]) -> None:
    """Write the three files of the Embedding Projector; none is replaced before all are complete."""
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
    with replace_file(path) as partial, partial.open("wb") as file:
        if path.suffix != ".gz":
            yield file
            return
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as content:
            yield content


def _chunks(rows: Tensor | TokenTable, count: int, width: int) -> Iterator[Row]:
    step = max(1, NUMBERS_AT_ONCE // width)
    for start in range(0, count, step):
        stop = min(count, start + step)
        part = rows.rows(start, stop) if isinstance(rows, TokenTable) else rows[start:stop]
        chunk: Row = part.detach().to("cpu", torch.float32).numpy()
        unsound = np.flatnonzero(~np.isfinite(chunk).all(axis=-1))
        if len(unsound):
            raise CheckpointError(
                f"Row {start + unsound[0]} holds NaN or infinity, which no reader takes: mend it first."
            )
        yield chunk


def _decimals(chunk: Row, separator: str) -> Iterator[str]:
    """The rows as the shortest decimals that read back as the same numbers."""
    return (separator.join(row) for row in chunk.astype(np.str_).tolist())


def _check_words(tokens: Sequence[str]) -> None:
    """Refuse tokens that a reader of the word2vec family would not read as they are."""
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
                f"Row {row}: the token {token!r} is that of row {seen[token]} too; it can stand once."
            )


def _check_utf8(token: str, row: int) -> str:
    """The token, if it can be written in UTF-8."""
    try:
        token.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"Row {row}: the token {token!r} is not text that UTF-8 can hold.") from error
    return token


def _folder_of(path: Path) -> Path:
    return path.parent if path.suffix == ".tsv" else path


def _tokens_file(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".gz").removesuffix(".npy") + ".tokens.json")
