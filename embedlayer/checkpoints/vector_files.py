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

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.checkpoints.vector_formats import npy, projector, word2vec
from embedlayer.checkpoints.vector_formats.streams import NUMBERS_AT_ONCE, DecodeErrors, Row
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning, ShapeError, SizeError
from embedlayer.io.files import named_path
from embedlayer.tables.conversions import TableLike, as_rows
from embedlayer.tables.lookup import LookupTable

VectorFormat = Literal["word2vec", "word2vec-binary", "glove", "fasttext", "npy", "projector"]
NonfiniteRows = Literal["refuse", "keep"]

ROWS_SHOWN = 8

_BY_SUFFIX: dict[str, VectorFormat] = {
    ".bin": "word2vec-binary",
    ".vec": "fasttext",
    ".npy": "npy",
    ".tsv": "projector",
}
SUFFIXES = (".txt", *_BY_SUFFIX)
"""Suffixes of these files, before `.gz`."""


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
        format: Name of the format; by default by the suffix of the file, for a `.txt` or `.bin` also by its first
            lines, and `projector` for a folder.
        errors: Handling of tokens that are not UTF-8, as in `bytes.decode`: `"replace"` or `"ignore"` with a warning,
            or `"strict"` for a `CheckpointError`. word2vec's own tool cuts long tokens inside a character.
        nonfinite: Handling of rows with NaN, infinity or numbers too large for float32: `"refuse"` for a
            `CheckpointError`, or `"keep"` for a warning.

    Returns:
        The tokens, and their rows `(V, D)` in float32. A `.npy` without a file of tokens has the row numbers `"0"`,
        `"1"`, ... as tokens.

    Raises:
        SizeError: The format is unknown, or the file name does not determine it.
        FileError: The file cannot be read.
        CheckpointError: The file does not have this format, or has a token or a row that `errors` or `nonfinite` does
            not allow. The message names the line or the row.

    Warns:
        EmbedLayerWarning: There are duplicate tokens, tokens that are not UTF-8, or rows that are not finite and are
            kept; or numbers of a `.npy` are rounded to float32.

    Example:
        >>> write_vectors("cats.txt", ["cat", "dog"], torch.eye(2), format="word2vec")
        >>> read_vectors("cats.txt")
        (['cat', 'dog'], tensor([[1., 0.],
                [0., 1.]]))
    """
    path = Path(path)
    by_first_line = format is None and _suffix(path) == ".txt" and not path.is_dir()
    chosen = None if by_first_line else format_of(path, format)
    if format is None and chosen == "word2vec-binary" and word2vec.is_text(path):
        chosen = "word2vec"
    if chosen == "npy":
        vectors = npy.read_npy(path)
    elif chosen == "projector":
        vectors = projector.read_projector(path, errors)
    else:
        has_header = None if chosen is None else chosen != "glove"
        vectors = word2vec.read_words(path, errors, binary=chosen == "word2vec-binary", has_header=has_header)
    tokens, rows, place_of, messages = vectors
    for message in messages:
        warnings.warn(message, EmbedLayerWarning, stacklevel=2)
    if rows.sum().isfinite():  # a sum with NaN or infinity is not
        return tokens, rows
    chunks = rows.split(max(1, NUMBERS_AT_ONCE // rows.shape[1]))
    broken = torch.cat([~chunk.isfinite().all(1) for chunk in chunks]).nonzero().flatten().tolist()
    if broken:  # none if finite numbers have an infinite sum
        shown = "; ".join(f"{place_of(row)} ({tokens[row]!r})" for row in broken[:ROWS_SHOWN])
        more = "; ..." if len(broken) > ROWS_SHOWN else ""
        message = f"{path}: {len(broken):,} of {len(rows):,} rows hold NaN, infinity or overflow: {shown}{more}."
        if nonfinite == "refuse":
            raise CheckpointError(f'{message} Remove them, or read them with nonfinite="keep".')
        warnings.warn(message, EmbedLayerWarning, stacklevel=2)
    return tokens, rows


def write_vectors(path: Path | str, tokens: Sequence[str], rows: TableLike, format: VectorFormat | None = None) -> None:
    r"""Write a table and its tokens to a file of word vectors, in float32, atomically.

    Args:
        path: The file, or for `projector` a folder. A file with the suffix `.gz` is compressed.
        tokens: One for each row. The formats of word2vec, GloVe and fastText refuse tokens that are empty, duplicate or
            have white space. In `projector` tabs and line breaks become `\t`, `\n`, `\r`, and backslashes `\\`.
        rows: A tensor `(V, D)`, or a table; a table is read in chunks of rows, without its scale.
        format: Name of the format; by default by the suffix of the file, which must not be `.txt` then.

    Raises:
        ShapeError: The numbers of tokens and rows differ or are 0, or an array holds neither real numbers nor booleans.
        FileError: The file cannot be written.
        CheckpointError: The format cannot represent a token or a number; the message names the row.
    """
    path = named_path(path)
    chosen = format_of(path, format)
    rows = as_rows(rows)
    count = rows.vocab_size if isinstance(rows, LookupTable) else len(rows)
    width = rows.embed_dim if isinstance(rows, LookupTable) else rows.shape[-1]
    if (isinstance(rows, Tensor) and rows.dim() != 2) or count != len(tokens) or not count or not width:
        shape = tuple(rows.shape) if isinstance(rows, Tensor) else (count, width)
        raise ShapeError(f"{len(tokens)} tokens need as many rows (V, D), at least one, of some width: found {shape}.")
    blocks = _blocks(rows, count, width)
    if chosen == "projector":
        projector.write_projector(path, tokens, blocks)
    elif chosen == "npy":
        npy.write_npy(path, tokens, blocks, width)
    else:
        binary = chosen == "word2vec-binary"
        word2vec.write_words(path, tokens, blocks, width, has_header=chosen != "glove", binary=binary)


def _blocks(rows: Tensor | LookupTable, count: int, width: int) -> Iterator[Row]:
    """Yield the rows in order, in blocks: NumPy arrays of float32, `(N, D)`."""
    step = max(1, NUMBERS_AT_ONCE // width)
    for start in range(0, count, step):
        stop = min(count, start + step)
        part = rows.rows(start, stop) if isinstance(rows, LookupTable) else rows[start:stop]
        chunk: Row = part.detach().to("cpu", torch.float32).numpy()
        unsound = np.flatnonzero(~np.isfinite(chunk).all(axis=-1))
        if len(unsound):
            raise CheckpointError(f"Row {start + unsound[0]} holds NaN or infinity: replace it first.")
        yield chunk


def format_of(path: Path, format: str | None = None) -> VectorFormat:
    """Return `format` if it is passed, else the one that the suffix of `path` implies; `"projector"` for a folder."""
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


def files_of(path: Path, format: str) -> list[Path]:
    """Return the files that `write_vectors` writes for `path`; `path` alone for a format that it does not know."""
    if format == "projector":
        return [projector.folder_of(path) / name for name in projector.FILES]
    return [path, npy.tokens_file(path)] if format == "npy" else [path]
