"""The files of the Embedding Projector: `tensors.tsv`, `metadata.tsv`, and the configuration that names them."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from embedlayer.checkpoints.vector_formats import streams
from embedlayer.checkpoints.vector_formats.streams import LONGEST_LINE, DecodeErrors, Row, TokenDecoder, VectorRows
from embedlayer.core.errors import CheckpointError
from embedlayer.io.files import create_folder, replace_file

TENSORS, METADATA, PROJECTOR_CONFIG = FILES = ("tensors.tsv", "metadata.tsv", "projector_config.pbtxt")
_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_UNESCAPES = {escape: character for character, escape in _ESCAPES.items()}


def read_projector(path: Path, errors: DecodeErrors) -> VectorRows:
    """Read vectors and labels; `path` is the folder of the files, or a `.tsv` file in it."""
    folder = folder_of(path)
    name = path.name if path.is_file() else TENSORS if (folder / TENSORS).exists() else "vectors.tsv"
    if name not in FILES and (folder / name).exists():
        raise CheckpointError(f"{folder / name}: rename it to {TENSORS}, and its labels to {METADATA}.")
    content = bytearray()
    count = width = 0
    tensors = folder / TENSORS
    with streams.reading(tensors) as file:
        streams.skip_mark(file)
        for number, line in streams.lines(tensors, file, first=1):
            fields = line.split(b"\t")
            width = width or len(fields)
            if len(fields) != width:
                raise CheckpointError(f"{tensors}, line {number}: found {len(fields)} numbers, not {width}.")
            content += streams.numbers(tensors, number, fields).astype("<f4").tobytes()
            count += 1
    if not count:
        raise CheckpointError(f"{tensors} holds no vectors.")
    rows = torch.frombuffer(content, dtype=torch.float32).view(count, width)
    labels, messages = _metadata(folder / METADATA, count, errors)
    return VectorRows(labels, rows, lambda row: f"{TENSORS}, line {row + 1}", messages)


def _metadata(path: Path, count: int, errors: DecodeErrors) -> tuple[list[str], list[str]]:
    """Read the labels of `count` vectors, and return them with a warning if some are not UTF-8."""
    decoder = TokenDecoder(path, errors, "line")
    with streams.reading(path) as file:
        streams.skip_mark(file)
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
            tokens.append(re.sub(r"\\[\\tnr]", lambda escape: _UNESCAPES[escape[0]], label))
    if len(tokens) != count:
        raise CheckpointError(f"{path} has {len(tokens)} labels, and {TENSORS} has {count} rows.")
    return tokens, decoder.warnings()


def write_projector(path: Path, tokens: Sequence[str], blocks: Iterator[Row]) -> None:
    """Write the three files into the folder of `path`, created if missing; none is replaced before all are complete."""
    labels = [re.sub(r"[\\\t\n\r]", lambda character: _ESCAPES[character[0]], token) for token in tokens]
    metadata = "".join(f"{streams.check_utf8(label, row)}\n" for row, label in enumerate(labels))
    fields = {"tensor_name": "table", "tensor_path": TENSORS, "metadata_path": METADATA}
    content = "".join(f'  {name}: "{value}"\n' for name, value in fields.items())
    folder = folder_of(path)
    create_folder(folder)
    with (
        replace_file(folder / METADATA) as labels_file,
        replace_file(folder / PROJECTOR_CONFIG) as config_file,  # what TensorBoard looks for
        streams.writing(folder / TENSORS) as file,
    ):
        labels_file.write_text(metadata, encoding="utf-8")
        config_file.write_text(f"embeddings {{\n{content}}}\n", encoding="utf-8")
        for block in blocks:
            file.writelines(f"{line}\n".encode() for line in streams.decimals(block, "\t"))


def folder_of(path: Path) -> Path:
    """Return the folder of the Embedding Projector's files; `path` is this folder or a `.tsv` file in it."""
    return path.parent if path.suffix == ".tsv" else path
