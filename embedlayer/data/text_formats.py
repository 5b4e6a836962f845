"""Files that hold texts or token IDs and are not plain text: their formats by the first bytes, and what converts them.

Plain text is UTF-8 without zero bytes, whose first lines are not all JSON objects.
"""

import codecs
import json
import re
import shlex
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from embedlayer.core.errors import EmbedLayerWarning, TextError
from embedlayer.core.formatting import command_line

_TOKENS = "import numpy, sys, tokenizers; print(tokenizers.Tokenizer.from_file('tokenizer.json').decode(numpy."
_TEXTS = "If its texts are in another column, write its name in place of 'text'"
_ARROW = "import pyarrow, sys; [print(text) for batch in pyarrow.ipc."
_CONTROL = re.compile(rb"[\x00-\x07\x0e-\x1a\x1c-\x1f]")
_CUT_OBJECT = re.compile(rb'\{\s*"([\w.-]+)"\s*:\s*(")?')
_MAGIC_BYTES = 4  # that of a compression, or the first characters of UTF-16
_TAR_MAGIC = slice(257, 262)
_SHOWN_NAMES = 8
_OBJECTS_TO_A_DAMAGED_LINE = 10  # with fewer, the lines are text, such as code

COMPRESSIONS = {".gz": "gzip -dc < FILE", ".zst": "zstd -dc < FILE"}
"""Suffixes of compressed files that are read, and the shell command that decompresses each."""

COMPRESSED_STARTS = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
"""The first bytes of the files that `COMPRESSIONS` names, by suffix."""

STANDARD_INPUT = ".standard-input."
"""Start of the name of a temporary file with standard input, for what has to read it twice."""

TOKEN_SUFFIXES = (".npy", ".bin", ".idx")
"""Suffixes of files of token IDs."""

LINES_SUFFIXES = (".jsonl", ".ndjson")
"""Suffixes of files of JSON lines."""


@dataclass(frozen=True)
class TextFormat:
    """A format of files that hold texts or token IDs."""

    name: str
    matches: Callable[[Path, bytes], bool]
    command: str
    condition: str = "Write what it holds into a file of text"
    has_columns: bool = False
    has_ids: bool = False


def _starts(*magic: bytes) -> Callable[[Path, bytes], bool]:
    """Return a function for `TextFormat.matches`: whether the first bytes are one of `magic`."""
    return lambda path, start: start.startswith(magic)


TEXT_FORMATS = (
    TextFormat(
        "a Parquet file",
        _starts(b"PAR1"),
        'python -c "import pyarrow.parquet, sys; [print(text) for batch in pyarrow.parquet.ParquetFile(sys.argv[1])'
        ".iter_batches(columns=['text']) for text in batch['text'].to_pylist()]\" FILE > NEW_FILE",
        _TEXTS,
        has_columns=True,
    ),
    TextFormat(
        "an Arrow file",
        _starts(b"ARROW1\0\0"),
        f"python -c \"{_ARROW}open_file(sys.argv[1]).read_all().to_batches() for text in batch['text'].to_pylist()]\" "
        "FILE > NEW_FILE",
        _TEXTS,
        has_columns=True,
    ),
    TextFormat(
        "an Arrow stream",
        lambda path, start: start.startswith(b"\xff\xff\xff\xff") and start[6:8] == b"\0\0" and len(start) > 8,
        f"python -c \"{_ARROW}open_stream(sys.argv[1]) for text in batch['text'].to_pylist()]\" FILE > NEW_FILE",
        _TEXTS,
        has_columns=True,
    ),
    TextFormat(
        "compressed by Zstandard", _starts(COMPRESSED_STARTS[".zst"]), "zstd -dc < FILE > NEW_FILE", "Decompress it"
    ),
    TextFormat("compressed by gzip", _starts(COMPRESSED_STARTS[".gz"]), "gzip -dc < FILE > NEW_FILE", "Decompress it"),
    TextFormat("compressed by bzip2", _starts(b"BZh"), "bzip2 -dc < FILE > NEW_FILE", "Decompress it"),
    TextFormat("compressed by xz", _starts(b"\xfd7zXZ\0"), "xz -dc < FILE > NEW_FILE", "Decompress it"),
    TextFormat(
        "a zip archive",
        _starts(b"PK\x03\x04", b"PK\x05\x06"),
        "python -m zipfile -e FILE NEW_FOLDER",
        "Unpack it, and pass the folder",
    ),
    TextFormat(
        "a tar archive",
        lambda path, start: start[_TAR_MAGIC] == b"ustar",
        "mkdir NEW_FOLDER && tar -xf FILE -C NEW_FOLDER",
        "Unpack it, and pass the folder",
    ),
    TextFormat(
        "a NumPy array",
        _starts(b"\x93NUMPY"),
        f'python -c "{_TOKENS}load(sys.argv[1]).ravel().tolist(), skip_special_tokens=False))" FILE > NEW_FILE',
        "If its numbers are token IDs, decode them with their tokenizer.json",
        has_ids=True,
    ),
    TextFormat(
        "a binary file",
        lambda path, start: path.suffix == ".bin",
        f"python -c \"{_TOKENS}fromfile(sys.argv[1], 'uint16').tolist(), skip_special_tokens=False))\" FILE > NEW_FILE",
        "If its numbers are token IDs, decode them with their tokenizer.json",
        has_ids=True,
    ),
)
"""The formats whose first bytes are not plain text; the first one that matches is the format of a file."""

JSON_LINES = TextFormat(
    "a file of JSON lines",
    lambda path, start: _is_json_lines(path, start),
    "python -c \"import json, sys; [print(json.loads(line)['KEY']) for line in sys.stdin if line.strip()]\" "
    "< FILE > NEW_FILE",
    "Write its texts into a file of text",
)
"""The format of a `.jsonl`: each line is a JSON object. Its first bytes are plain text."""

DATASET = TextFormat(
    "a data set that the library datasets saved",
    lambda path, start: _is_dataset(path),
    'python -c "import glob, pyarrow, sys; [print(text) for file in sorted(glob.glob(sys.argv[1] + '
    "'/**/data-*.arrow', recursive=True)) for batch in pyarrow.ipc.open_stream(file) "
    "for text in batch['text'].to_pylist()]\" FILE > NEW_FILE",
    _TEXTS,
)
"""The format of a folder that `save_to_disk` of the library `datasets` wrote."""


def format_of_text(source: str | Path, start: bytes) -> TextFormat | None:
    """Return which of `TEXT_FORMATS` a file has, or `JSON_LINES`; `None` for plain text and for any other file."""
    if is_plain(start):
        return JSON_LINES if JSON_LINES.matches(Path(source), start) else None
    return next((each for each in TEXT_FORMATS if each.matches(Path(source), start)), None)


def is_plain(start: bytes) -> bool:
    """Return whether the first bytes of a file are UTF-8 without zero bytes; its last character may be cut off."""
    try:
        codecs.utf_8_decode(start)
    except UnicodeDecodeError:
        return False
    return b"\0" not in start


def refuse_json_lines(source: str | Path, start: bytes) -> None:
    """Raise an error for a file of JSON lines, which would be read as one text with its escapes.

    The evidence is that at least two lines, and ten in eleven lines of `start`, are JSON objects, or a name that ends
    in `.jsonl` or `.ndjson`. A name that ends in `.txt` states that it is text: it is read, with a warning.
    """
    if not _is_json_lines(Path(source), start):
        return
    if text_suffix(Path(source)) == ".txt":
        warnings.warn(
            f"{source} has JSON lines, and its name ends in .txt: it is read as text, with its braces and escapes.",
            EmbedLayerWarning,
            stacklevel=4,
        )
        return
    objects, damaged = _objects(start)
    first = next(iter(objects), {})
    texts = {key: value for key, value in first.items() if isinstance(value, str) and re.fullmatch(r"[\w.-]+", key)}
    said = f"{source_name(source)} is {JSON_LINES.name}, and not plain text. "
    as_text = "To read the JSON itself, give the file a name that ends in .txt."
    if damaged and damaged[0] <= start.count(b"\n"):  # the last line of `start` may be cut off
        raise TextError(f"{said}Its line {damaged[0]} is no JSON object: repair or remove it first. {as_text}")
    if texts:
        key = max(texts, key=lambda name: len(texts[name]))
        command = command_for(JSON_LINES.command.replace("KEY", key), source)
        raise TextError(f"{said}{as_text} {JSON_LINES.condition}, each {key!r} of a line:\n{command}")
    names = ", ".join([*first][:_SHOWN_NAMES]) or "no fields"
    raise TextError(f"{said}{as_text} Its first line has no field that is a text ({names}).")


def not_text(source: str | Path, start: bytes, offset: int, byte: int) -> str:
    """Return the error message for a byte that plain text does not have, with a command that converts the file."""
    other = format_of_text(source, start)
    if other is not None:
        return is_other(source, other)
    encoding = _wide_encoding(start)
    if encoding is None and byte and not _CONTROL.search(start):
        encoding = "ISO-8859-1"
    what = "has a zero byte" if byte == 0 else f"is not UTF-8 text: byte 0x{byte:02X}"
    said = f"{source_name(source)} {what} at offset {offset}"
    if encoding is not None:
        command = command_for(f"iconv -f {encoding} -t UTF-8 < FILE > NEW_FILE", source)
        return f"{said}. If it is text in another encoding, convert it, for example:\n{command}"
    if byte == 0:
        command = command_for("tr -d '\\000' < FILE > NEW_FILE", source)
        return f"{said}, and plain text has none. If it is text all the same, remove its zero bytes:\n{command}"
    return f"{said}. It is a binary file of a format that is not known: pass files of text."


def is_other(source: str | Path, other: TextFormat) -> str:
    """Return the error message for a file or folder with the format `other`."""
    said = f"{source_name(source)} is {other.name}, and not plain text. "
    if other.has_ids and is_standard_input(source):
        build = command_line("corpus", "build", "FILE", "-o", "DIR", "--tokenizer", "TOKENIZER")
        return f"{said}Token IDs are read from files alone:\n{build}"
    return f"{said}{other.condition}:\n{command_for(other.command, source)}"


def command_for(command: str, source: str | Path) -> str:
    """Return a command of a `TextFormat` with the path of a file, quoted for a shell, in place of `FILE`."""
    unzip = next((line for suffix, line in COMPRESSIONS.items() if str(source).endswith(suffix)), None)
    if unzip is not None and "tar -xf" not in command:
        command = f"{unzip} | {command.replace('< FILE ', '')}" if "< FILE" in command else f"{unzip} > NEW_FILE"
    return re.sub(r"\bFILE\b", lambda _: "FILE" if is_standard_input(source) else shlex.quote(str(source)), command)


def is_standard_input(source: str | Path) -> bool:
    """Return whether a source is standard input, `-`, or the file that `saved_standard_input` writes from it."""
    return str(source) == "-" or Path(source).name.startswith(STANDARD_INPUT)


def source_name(source: str | Path) -> str:
    """Return how an error message names a file, or standard input."""
    return "Standard input" if is_standard_input(source) else str(source)


def is_named_json_lines(path: Path, start: bytes) -> bool:
    """Return whether a file is named as JSON lines, and its first bytes are not those of another kind."""
    return text_suffix(path) in LINES_SUFFIXES and is_plain(start[:_MAGIC_BYTES])


def text_suffix(path: Path) -> str:
    """Return the suffix of a file name in lower case, without that of a compression: `.txt` for `X.TXT`, `x.txt.gz`."""
    name = next((path.name.removesuffix(suffix) for suffix in COMPRESSIONS if path.name.endswith(suffix)), path.name)
    return Path(name).suffix.lower()


def _is_json_lines(path: Path, start: bytes) -> bool:
    """Return whether a file has JSON lines, by its name or the lines of its first bytes; see `refuse_json_lines`."""
    if is_named_json_lines(path, start):
        return bool(start.strip())
    if not start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
        return False
    objects, damaged = _objects(start)
    return len(damaged) * _OBJECTS_TO_A_DAMAGED_LINE <= len(objects) > 1


def _objects(start: bytes) -> tuple[list[dict[str, object]], list[int]]:
    """Return the JSON objects that are the lines of the first bytes of a file, and the numbers of the other lines.

    The last line may be cut off behind its first key; it then has only this key, with the value `""` for a text and
    `None` for any other.
    """
    objects: list[dict[str, object]] = []
    others: list[int] = []
    lines = start.removeprefix(codecs.BOM_UTF8).split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            cut = _CUT_OBJECT.match(line)
            value = {cut[1].decode(): cut[2] and ""} if number == len(lines) and cut else None
        if isinstance(value, dict):
            objects.append(value)
        else:
            others.append(number)
    return objects, others


def _is_dataset(folder: Path) -> bool:
    """Return whether the files of a folder say that `save_to_disk` wrote it, also if some of them are missing."""
    if any((folder / name).exists() for name in ("dataset_dict.json", "dataset_info.json")):
        return True
    try:
        return b'"_data_files"' in (folder / "state.json").read_bytes()
    except OSError:
        return False


def _wide_encoding(start: bytes) -> str | None:
    """Return the name of the encoding of text with two or four bytes a character, as `iconv` has it, or `None`."""
    if start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "UTF-32"
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    even, odd = (start[first::2] for first in (0, 1))
    for name, zeros, others in (("UTF-16LE", odd, even), ("UTF-16BE", even, odd)):
        if zeros.count(0) > len(zeros) // 2 and 0 not in others and len(start) > 3:
            return name
    return None
