"""Paths that commands read: what is stored at each is looked at before anything is loaded.

A command states what it takes. A path that does not exist, cannot be read, or holds something else ends the command
with one sentence that says which.
"""

import os
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import click

from embedlayer.errors import FileError

FIRST_BYTES = 4096
FILES_WITH_STRUCTURE = (".json", ".tsv", ".jsonl", ".safetensors", ".gguf")


class Kind(StrEnum):
    """What is stored at a path."""

    MISSING = "nothing"
    UNREADABLE = "unreadable"
    EMPTY_FOLDER = "empty folder"
    EMPTY_FILE = "empty file"
    TEXT = "text"
    VECTORS = "vectors"
    CORPUS = "corpus"
    CORPUS_OF_RUN = "corpus of a run"
    MODEL = "model"
    FOLDER = "folder"
    FILE = "file"


class Found(NamedTuple):
    """What is stored at a path, for programs and for people."""

    kind: Kind
    description: str


def what_is_at(path: Path) -> Found:
    """Say what is stored at a path, by names and first bytes; nothing is loaded.

    Example:
        >>> what_is_at(Path("nothere")).kind.value
        'nothing'
    """
    try:
        path.stat()
        return _folder(path) if path.is_dir() else _file(path)
    except (FileNotFoundError, NotADirectoryError):
        return Found(Kind.MISSING, "nothing")
    except (OSError, ValueError) as error:
        return Found(Kind.UNREADABLE, getattr(error, "strerror", None) or str(error))


def _folder(path: Path) -> Found:
    names = set(os.listdir(path))
    if not names:
        return Found(Kind.EMPTY_FOLDER, "an empty folder")
    if "corpus.json" in names:
        return Found(Kind.CORPUS, "a corpus of token IDs")
    if {"ids.bin", "index.json"} <= names:
        return Found(Kind.CORPUS_OF_RUN, "the corpus of token IDs inside a run")
    if "run.json" in names:
        return Found(Kind.MODEL, "the folder of a run")
    if "config.json" in names or any(name.endswith(".safetensors") for name in names):
        return Found(Kind.MODEL, "the folder of a model")
    return Found(Kind.FOLDER, "a folder")


def _file(path: Path) -> Found:
    with path.open("rb") as file:
        start = file.read(FIRST_BYTES)
    if not start:
        return Found(Kind.EMPTY_FILE, "an empty file")
    if path.suffix in FILES_WITH_STRUCTURE:
        return Found(Kind.FILE, f"a {path.suffix} file")
    from embedlayer.checkpoints.tables import is_file_of_vectors

    if is_file_of_vectors(path):
        return Found(Kind.VECTORS, "a file of text or vectors")
    return Found(Kind.TEXT, "a text file") if _is_text(start) else Found(Kind.FILE, "a binary file")


def _is_text(start: bytes) -> bool:
    try:
        return "\0" not in start.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start > len(start) - 4 and b"\0" not in start  # a character cut by the end of what was read


class InputPath(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """A path that a command reads.

    Args:
        takes: What the command takes, for the message of an error.
        kinds: Which kinds it takes.
        hub: Whether a name that is no path here may be one on the hub.
        standard_input: Whether `-` stands for standard input.
    """

    name = "path"

    def __init__(self, takes: str, *kinds: Kind, hub: bool = False, standard_input: bool = False) -> None:
        self.takes = takes
        self.kinds = frozenset(kinds)
        self.hub = hub
        self.standard_input = standard_input

    def convert(self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path.

        Raises:
            FileError: It does not exist, cannot be read, or holds what the command does not take.
        """
        path = Path(value)
        if self.standard_input and str(value) == "-":
            return path
        found = what_is_at(path)
        if found.kind is Kind.MISSING:
            from embedlayer.checkpoints.reader import is_hub_name

            if self.hub and is_hub_name(str(value)):
                return path
            raise FileError(f"{path} does not exist; {self._taken(param, ctx)}.")
        if found.kind is Kind.UNREADABLE:
            raise FileError(f"{path} cannot be read: {found.description}.")
        if found.kind not in self.kinds:
            raise FileError(f"{path} is {found.description}; {self._taken(param, ctx)}.")
        return path

    def _taken(self, param: click.Parameter | None, ctx: click.Context | None) -> str:
        names = []
        while ctx is not None and ctx.parent is not None:
            names.append(ctx.info_name or "")
            ctx = ctx.parent
        option = [param.opts[-1]] if isinstance(param, click.Option) else []
        return f"{' '.join(['embedlayer', *reversed(names), *option])} takes {self.takes}"


_FOLDERS = (Kind.MODEL, Kind.FOLDER)

RUN = InputPath("a folder that embedlayer train wrote", *_FOLDERS)
MODEL = InputPath("a folder that embedlayer train wrote, or a checkpoint (a folder or a file)", *_FOLDERS, Kind.FILE)
TABLE = InputPath(
    "a folder that embedlayer train wrote, a checkpoint (a folder or a file), or a file of vectors",
    *_FOLDERS,
    Kind.FILE,
    Kind.VECTORS,
)
TABLE_OR_HUB_NAME = InputPath(
    "a folder that embedlayer train wrote, a checkpoint (a folder, a file, or owner/name on the hub), or a file of "
    "vectors",
    *_FOLDERS,
    Kind.FILE,
    Kind.VECTORS,
    hub=True,
)
EDITED = InputPath("a folder that embedlayer vocab wrote", *_FOLDERS)
TOKENIZER = InputPath(
    "a tokenizer: a file such as tokenizer.json, or a folder that holds one",
    *_FOLDERS,
    Kind.CORPUS,
    Kind.FILE,
    Kind.TEXT,
    Kind.VECTORS,
)
_TEXTS = (Kind.TEXT, Kind.VECTORS, Kind.FILE, Kind.EMPTY_FILE, Kind.FOLDER)
TEXT = InputPath("a text file", Kind.TEXT, Kind.VECTORS, Kind.FILE, Kind.EMPTY_FILE)
TEXTS = InputPath("text files (.gz too) and folders of them", *_TEXTS)
TEXTS_OR_CORPUS = InputPath(
    "text files (.gz too), folders of them, - for standard input, or a folder that embedlayer corpus build wrote",
    *_TEXTS,
    Kind.CORPUS,
    standard_input=True,
)
