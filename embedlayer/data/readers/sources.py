"""Sources of a corpus: which reader a file has, by its name and first bytes, and which files of a folder are read."""

import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from embedlayer.core.errors import EmbedLayerWarning, FileError, SizeError, TextError
from embedlayer.data.readers.columns import COLUMN_FORMATS, Columns
from embedlayer.data.readers.documents import Reader, RowOptions
from embedlayer.data.readers.json_lines import JsonLines
from embedlayer.data.readers.text import TextFile, is_compressed
from embedlayer.data.text_files import decoded, opened, start_of, visible_files
from embedlayer.data.text_formats import (
    DATASET,
    JSON_LINES,
    TOKEN_SUFFIXES,
    TextFormat,
    format_of_text,
    is_named_json_lines,
    is_other,
    is_plain,
    source_name,
    text_suffix,
)

_DATASET_FILES = ("state.json", "dataset_dict.json")


def find_sources(paths: Sequence[str | Path], options: RowOptions) -> list[Reader]:
    """Return the readers of the files that `paths` name, those in folders and their subfolders included.

    Text and JSON lines may be compressed (`.gz`, `.zst`). JSON lines are files named `.jsonl` or `.ndjson`, or 10 in 11
    lines of their first 64 KiB are objects; Parquet and Arrow are recognised by their first bytes. Hidden files,
    corpora and binary files in folders are left out. If a folder has both files of rows and text files, those with more
    bytes are read and the others are left out with a warning.
    """
    readers = readers_of(paths, options)
    require_rows(readers, options)
    # a corpus of white space alone would be no error of any later check
    texts = (text for reader in readers if str(reader.source) != "-" for text in reader.texts() if text)
    with suppress(FileError):  # what builds the corpus raises it
        if next(texts, "").isspace() and all(map(str.isspace, texts)):
            names = ", ".join(source_name(reader.source) for reader in readers)
            raise TextError(f"There is only white space in {names}. Pass a file with at least one word.")
    return readers


def find_text_files(paths: Sequence[str | Path]) -> list[str | Path]:
    """Return the text files that `paths` name: files themselves, and all text files in folders and their subfolders.

    `"-"`, for standard input, is returned as it is. The files of a folder are sorted. Hidden files in folders are left
    out, and so are corpora and binary files: those with a zero byte in their first 64 KiB, decompressed if compressed.
    Files of the formats in `embedlayer.data.text_formats` are left out of a folder with a warning, unless they have as
    many bytes as its text files. A file that cannot be read is returned: reading it raises the error.

    Raises:
        FileError: A path does not exist.
        TextError: A file that is passed by name is not plain text; a folder is a corpus or a saved data set, or has no
            text file, or at least as many bytes in files of those formats; or `paths` is empty.

    Warns:
        EmbedLayerWarning: Files of a folder are left out because of their format, or a file that is passed by name
            has JSON lines and ends in `.txt`.
    """
    return [reader.source for reader in readers_of(paths, None)]


def readers_of(paths: Sequence[str | Path], options: RowOptions | None) -> list[Reader]:
    """Return what `find_sources` does, also if `options` name a field and no source has rows; `None`: only texts."""
    readers: list[Reader] = []
    for name in paths:
        path = Path(name)
        if str(name) == "-":
            readers.append(TextFile("-"))
        elif path.is_dir():
            readers += _readers_below(path, options)
        elif path.exists():
            readers.append(reader_of(path, options))
        else:
            raise FileError(f"There is no file or folder {path}. Check the path, or pass - for standard input.")
    for reader in readers:
        if isinstance(reader, TextFile) and str(reader.source) != "-":
            with suppress(FileError), opened(reader.source) as (read, _):  # what reads the whole text raises it
                next(decoded(reader.source, read), "")  # refuses what is not plain text
    if not readers:
        raise TextError("No text was passed. Name files or folders, or - for standard input.")
    return readers


def require_rows(readers: Iterable[Reader], options: RowOptions) -> None:
    """Raise a `SizeError` if `options` name a field, and no source has rows."""
    if options.text_field is not None and not any(reader.has_rows for reader in readers):
        raise SizeError(f"There are no rows with a field {options.text_field!r}: none of the files has rows.")


def reader_of(path: Path, options: RowOptions | None) -> Reader:
    """Return the reader of a file. The first record of a file of rows is checked, and nothing of a text."""
    if options is None:
        return TextFile(path)
    start = start_of(path)
    make = _rows_reader(path, start, options)
    if make is None and path.suffix in TOKEN_SUFFIXES and is_plain(start):
        raise TextError(f"{path} is named as a file of token IDs: pass its --dtype (map_token_files), or name it .txt.")
    return TextFile(path) if make is None else make(path, options)


def _rows_reader(path: Path, start: bytes, options: RowOptions) -> Callable[[Path, RowOptions], Reader] | None:
    """Return the class of readers for a file of rows, by its name and its first bytes; `None` for any other file."""
    suffix = text_suffix(path)
    if is_named_json_lines(path, start):
        return JsonLines
    if is_plain(start):
        if options.text_field is not None and start.lstrip().startswith(b"{"):
            return JsonLines
        return JsonLines if suffix != ".txt" and JSON_LINES.matches(path, start) else None
    return Columns if not is_compressed(path) and any(each.matches(path, start) for each in COLUMN_FORMATS) else None


def _readers_below(folder: Path, options: RowOptions | None) -> list[Reader]:
    """Return the readers of the files below a folder; see `find_text_files` for what is left out, and for errors."""
    if DATASET.matches(folder, b""):
        if options is None:
            raise TextError(is_other(folder, DATASET))
        return [Columns(file, options) for file in _dataset_files(folder)]
    texts: list[Path] = []
    rows: list[Path] = []
    others: dict[Path, TextFormat] = {}
    for file in (visible := visible_files(folder)):
        if options is not None and file.name in _DATASET_FILES and DATASET.matches(file.parent, b""):
            raise TextError(f"{file.parent} in {folder} is {DATASET.name}: pass this folder by itself.")
        start = start_of(file)
        if options is not None and _rows_reader(file, start, options) is not None:
            rows.append(file)
        elif (other := format_of_text(file, start)) is not None and (options is None or other is not JSON_LINES):
            others[file] = other
        elif b"\0" not in start:
            texts.append(file)
    sizes = [sum(file.stat().st_size for file in files) for files in (texts, rows)]
    chosen, left = (texts, rows) if sizes[0] > sizes[1] or not rows else (rows, texts)
    if texts and rows:
        warnings.warn(
            f"{len(left)} of the files in {folder} are left out, among them {left[0]}: the folder has text files "
            f"({sizes[0]:,} bytes) and files of rows ({sizes[1]:,} bytes), and those with more bytes are read. Name "
            f"the files to read others.",
            EmbedLayerWarning,
            stacklevel=4,
        )
    if others:
        first, other = next(iter(others.items()))
        if sum(file.stat().st_size for file in others) >= max(sizes):
            raise TextError(
                f"The folder {folder} holds {len(others)} files that are not plain text, with more bytes than its "
                f"{len(chosen)} texts: convert them, or name the texts. {is_other(first, other)}"
            )
        warnings.warn(
            f"{len(others)} files in {folder} are left out, which are not plain text: {first} is {other.name}"
            f"{', ...' if len(others) > 1 else ''}. Passed by its name, one is refused with a command to convert it.",
            EmbedLayerWarning,
            stacklevel=4,
        )
    if not chosen:
        raise TextError(f"The folder {folder} has no text files ({len(visible)} files are binary). Name files.")
    return [reader_of(file, options) for file in chosen]


def _dataset_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a folder that `save_to_disk` of the library `datasets` wrote, in order."""
    if (folder / "dataset_dict.json").exists():
        splits = sorted(path.parent for path in folder.glob("*/state.json"))
        if len(splits) != 1:
            names = ", ".join(split.name for split in splits) or "none"
            raise TextError(f"{folder} is a data set with several splits ({names}): pass the folder of one of them.")
        folder = splits[0]
    state = folder / "state.json"
    try:
        content = json.loads(state.read_bytes())
        files = [folder / each["filename"] for each in content["_data_files"]]
        selected = content.get("_indices_data_files")
    except OSError as error:
        raise FileError(f"Cannot read {state}: {error.strerror or error}.") from error
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise TextError(f"{state} is damaged: it does not name the files of the data set ({error!r}).") from error
    if selected:
        raise TextError(f"{folder} selects rows of its files by an index: save it again after flatten_indices().")
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None or not files:
        raise FileError(f"{folder} is not a whole data set: {missing or 'every data file'} is missing.")
    return files
