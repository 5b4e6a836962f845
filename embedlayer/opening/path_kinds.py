"""What a path holds, judged by file names and first bytes alone. Importing this module imports no torch."""

import codecs
import json
import os
from enum import StrEnum
from pathlib import Path

from embedlayer.core.errors import FileError
from embedlayer.io.files import read_bytes, require_file

CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer.json", "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
BLOCKS = "model"
"""Folder with the blocks of a model of transformers, in the folder of its compressed table."""

FIRST_BYTES = 4096
STRUCTURED_FILES = (".json", ".jsonl", ".safetensors")


class PathKind(StrEnum):
    """List the kinds of things that a path can contain; the value of each is a phrase for messages."""

    MISSING = "nothing"
    EMPTY_FOLDER = "an empty folder"
    EMPTY_FILE = "an empty file"
    RUN = "the folder of a run"
    SAVED = "the folder of a saved layer"
    CHECKPOINT = "the folder of a checkpoint"
    VECTORS = "a file of text or vectors"
    CORPUS = "a corpus of token IDs"
    CORPUS_ALONE = "a corpus of token IDs without its tokenizer"
    FOLDER = "a folder"
    TEXT = "a text file"
    DATA_FILE = "a JSON or safetensors file"
    GGUF = "a GGUF file"
    BINARY = "a binary file"


OWN_FOLDERS = (PathKind.RUN, PathKind.SAVED)
"""Folders that this library wrote."""


def path_kind(path: Path) -> PathKind:
    """Return what a path holds, judged by file names and first bytes; nothing is loaded.

    Raises:
        FileError: The path exists and cannot be read.

    Example:
        >>> path_kind(Path("nothere"))
        <PathKind.MISSING: 'nothing'>
    """
    try:
        path.stat()
        return _kind_of_folder(path) if path.is_dir() else _kind_of_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return PathKind.MISSING
    except FileError:
        raise
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def _kind_of_folder(path: Path) -> PathKind:
    names = set(os.listdir(path))
    if not names:
        return PathKind.EMPTY_FOLDER
    if "corpus.json" in names:
        return PathKind.CORPUS
    if {"ids.bin", "index.json"} <= names:
        return PathKind.CORPUS if TOKENIZER in names else PathKind.CORPUS_ALONE
    if "run.json" in names:
        return PathKind.RUN
    if CONFIG in names:
        try:
            content = json.loads(read_bytes(path / CONFIG))
        except (ValueError, RecursionError):
            return PathKind.CHECKPOINT
        # only `save_pretrained` of this library writes the key `kind`
        is_ours = isinstance(content, dict) and isinstance(content.get("kind"), str)
        return PathKind.SAVED if is_ours else PathKind.CHECKPOINT
    if "tensors.tsv" in names or {"vectors.tsv", "metadata.tsv"} <= names:
        return PathKind.VECTORS
    return PathKind.CHECKPOINT if any(name.endswith((".safetensors", ".gguf")) for name in names) else PathKind.FOLDER


def _kind_of_file(path: Path) -> PathKind:
    """Return the kind of a file, judged by its suffix and its first `FIRST_BYTES` bytes."""
    require_file(path)
    with path.open("rb") as file:
        start = file.read(FIRST_BYTES)
    if not start:
        return PathKind.EMPTY_FILE
    if path.suffix == ".gguf" or start.startswith(b"GGUF"):
        return PathKind.GGUF
    if path.suffix in STRUCTURED_FILES:
        return PathKind.DATA_FILE
    from embedlayer.checkpoints.vector_files import SUFFIXES

    if Path(path.name.removesuffix(".gz")).suffix in SUFFIXES and not path.name.startswith("pytorch_model"):
        return PathKind.VECTORS
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)  # the last character may be cut off
    except UnicodeDecodeError:
        return PathKind.BINARY
    return PathKind.BINARY if b"\0" in start else PathKind.TEXT


def folder_of(path: Path) -> Path:
    """Return `path` if it is a folder, else the folder that contains it."""
    return path if path.is_dir() else path.parent
