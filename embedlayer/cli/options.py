"""Options that several commands share, and types of path parameters, which check a path before anything is loaded."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import click

from embedlayer.core.errors import FileError, SizeError
from embedlayer.core.formatting import command_line
from embedlayer.io.files import check_new_files, check_new_folder, is_stream, named_path
from embedlayer.opening.path_kinds import OWN_FOLDERS, PathKind, path_kind


class InputPath(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """Type of a click parameter: a path to read, which is checked before the command runs.

    Args:
        takes: What the command takes, as words for error messages.
        kinds: The kinds of paths that the command takes.
        hub: Whether a path that does not exist may be a name on the hub, such as `owner/name`.
        standard_input: Whether `-` is allowed, which means standard input.
    """

    name = "path"

    def __init__(self, takes: str, *kinds: PathKind, hub: bool = False, standard_input: bool = False) -> None:
        self.takes = takes
        self.kinds = frozenset(kinds)
        self.hub = hub
        self.standard_input = standard_input

    def convert(self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the value of a parameter as a path, after a check that the command takes this kind of path."""
        path = named_path(value)
        if self.standard_input and str(value) == "-":
            return path
        kind = path_kind(path)
        if kind is PathKind.MISSING and self.hub and str(value).count("/") == 1:  # the whole rule imports torch
            from embedlayer.checkpoints.reader import is_hub_name

            if is_hub_name(str(value)):
                return path
        if kind not in self.kinds:
            what = "does not exist" if kind is PathKind.MISSING else f"is {kind}"
            option = f" {param.opts[-1]}" if isinstance(param, click.Option) else ""
            takes = f"{click.get_current_context().command_path}{option} takes {self.takes}"
            if kind is PathKind.TEXT and PathKind.RUN in self.kinds:
                takes += f". A table is trained on it by {command_line('train', path, '-o', 'DIR')}"
            raise FileError(f"{path} {what}; {takes}.")
        return path


def token_or_id(value: str) -> str | int:
    """Type of a click parameter: a token, named by its text, or by its ID as in `#304`, which becomes an integer."""
    return int(value[1:]) if re.fullmatch("#[0-9]{1,18}", value) else value


class OutputPath(click.Path):
    """Type of a click parameter: a file or folder that the command writes, or creates if it must be new.

    Args:
        check: Function that raises a `FileError` if something is at the path; `None` if it need not be new. Nothing is
            created.
    """

    def __init__(self, check: Callable[[str | Path], None] | None = None) -> None:
        super().__init__(path_type=Path)
        self.check = check

    def convert(self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None) -> Path:  # type: ignore[override]
        """Return the value of a parameter as a path, after the check, which the command repeats when it is done."""
        path = named_path(value)
        if self.check is not None:
            self.check(path)
        return path


def _check_new_model(path: str | Path) -> None:
    """Raise a `FileError` unless the path of an edited model, a folder or a GGUF file, is new."""
    if is_stream(path):
        raise FileError(f"{path} is a device or a pipe. Choose a new folder or, for a GGUF file, a new file.")
    check_new_folder(path) if os.path.isdir(path) else check_new_files(path)


NEW_FILE, NEW_FOLDER = OutputPath(check_new_files), OutputPath(check_new_folder)

_FOLDERS = (*OWN_FOLDERS, PathKind.CHECKPOINT, PathKind.FOLDER)
_TEXT_FILES = (PathKind.TEXT, PathKind.VECTORS, PathKind.DATA_FILE, PathKind.BINARY, PathKind.EMPTY_FILE)

SOURCE = InputPath(
    "a run, a saved layer, a checkpoint (a folder, a file, or owner/name on the hub), or a file of vectors",
    *(*_FOLDERS, PathKind.DATA_FILE, PathKind.GGUF, PathKind.BINARY, PathKind.VECTORS),
    hub=True,
)
RUN = InputPath("the folder of a run, which embedlayer train wrote", PathKind.RUN)
FOLDER = InputPath(
    "a folder on this machine (a run, a saved layer, or a checkpoint) or a GGUF file", *_FOLDERS, PathKind.GGUF
)
INTO = InputPath("a GGUF file or the folder of a checkpoint", PathKind.GGUF, PathKind.CHECKPOINT, PathKind.FOLDER)
TOKENIZER = InputPath(
    "a tokenizer: a file such as tokenizer.json, or a folder that contains one",
    *(*_FOLDERS, PathKind.CORPUS, PathKind.DATA_FILE, PathKind.GGUF, PathKind.BINARY, PathKind.TEXT, PathKind.VECTORS),
)
TEXT = InputPath("a text file", *_TEXT_FILES)
TEXTS = InputPath("text files (.gz too) and folders of them", *_TEXT_FILES, PathKind.FOLDER)
COLUMNS = InputPath("a table of columns: a .csv, .tsv or .parquet file", *_TEXT_FILES)
TEXTS_OR_ROWS = InputPath(
    "text files, JSON lines, Parquet and Arrow files, folders of them, - for standard input, or files of token IDs",
    *_TEXT_FILES,
    PathKind.FOLDER,
    standard_input=True,
)
TEXTS_OR_CORPUS = InputPath(
    "text files, JSON lines, Parquet and Arrow files, folders of them, - for standard input, files of token IDs, or a "
    "folder that embedlayer corpus build wrote",
    *(*_TEXT_FILES, PathKind.FOLDER, PathKind.CORPUS, PathKind.CORPUS_ALONE),
    standard_input=True,
)

CORPUS = InputPath("a folder that embedlayer corpus build wrote", PathKind.CORPUS, PathKind.CORPUS_ALONE)


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else.")

text_field_option = click.option(
    "--text-field",
    metavar="NAME",
    help="Field of each row of JSON lines, Parquet and Arrow files that is the document.  [default: text]",
)

ID_TYPES = click.Choice(["uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"])
"""Types of numbers in files of token IDs: `IdType`, which needs NumPy."""

dtype_option = click.option(
    "--dtype", type=ID_TYPES, help="Type of the numbers in files of token IDs without a header, such as nanoGPT's .bin."
)

tokenizer_option = click.option(
    "--tokenizer", "tokenizer_from", type=TOKENIZER, help="Use this tokenizer (a file or folder) instead."
)

new_model_option = click.option(
    "-o", "--output", required=True, type=OutputPath(_check_new_model), help="New folder for the result."
)


def chosen_device(name: str) -> str:
    """Return the device to use for a name: for `auto` it is `cuda` if available, else `cpu`; any other as it is."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise SizeError(f"Device {name} is not available here; use --device cpu or auto.")
    return name
