"""NumPy's `.npy`, with the tokens of its rows in a JSON file beside it."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from embedlayer.checkpoints.vector_formats.streams import (
    BYTES_AT_ONCE,
    NUMBERS_AT_ONCE,
    Row,
    VectorRows,
    reading,
    writing,
)
from embedlayer.core.errors import CheckpointError, FileError
from embedlayer.io.files import is_stream, read_bytes, replace_file
from embedlayer.io.json_fields import parse_json

_HEADER = re.compile(
    r"\s*\{\s*'descr':\s*'([<>|=]?f[248])',\s*'fortran_order':\s*(True|False),\s*'shape':\s*"
    r"\((\d{1,12}),\s*(\d{1,12})\),?\s*\}\s*"
)


def read_npy(path: Path) -> VectorRows:
    """Read a NumPy array as float32, and its tokens from the file `tokens_file(path)` beside it if there is one."""
    tokens_path = tokens_file(path)
    tokens = parse_json(read_bytes(tokens_path), tokens_path) if tokens_path.exists() else None
    if tokens is not None and not (isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)):
        raise CheckpointError(f"{tokens_path} is not a list of tokens.")
    with reading(path) as file:
        start = file.read(10)
        length = int.from_bytes(start[8:10], "little")
        header = file.read(length)
        fields = _HEADER.fullmatch(header.decode("latin-1"))
        if start[:8] != b"\x93NUMPY\x01\x00" or len(header) < length or not fields:
            raise CheckpointError(f"{path} is not an array (V, D) of floats in NumPy's format 1.0.")
        dtype, by_columns, count, width = np.dtype(fields[1]), fields[2] == "True", int(fields[3]), int(fields[4])
        if not count or not width:
            raise CheckpointError(f"{path} holds {count} x {width} numbers: there are no vectors in it.")
        if tokens is not None and count != len(tokens):
            raise CheckpointError(f"{path} has {count} rows, and {tokens_path.name} beside it {len(tokens)} tokens.")
        size = count * width * dtype.itemsize
        content = bytearray()
        while len(content) <= size and (more := file.read(BYTES_AT_ONCE)):
            content += more
        if len(content) != size:
            count_read = f"at least {len(content):,}" if len(content) > size else f"{len(content):,}"
            raise CheckpointError(f"{path}: its header states {size:,} bytes of numbers, and there are {count_read}.")
    array = np.frombuffer(content, dtype).reshape((width, count) if by_columns else (count, width))
    array = array.T if by_columns else array
    with np.errstate(over="ignore"):
        rows = array.astype(np.float32, copy=False)
    step = max(1, NUMBERS_AT_ONCE // width)
    blocks = (slice(start, start + step) for start in range(0, count if dtype.itemsize > 4 else 0, step))
    is_rounded = any(not np.array_equal(array[block], rows[block], equal_nan=True) for block in blocks)
    messages = [f"{path} holds float64, and its numbers are rounded to float32."] if is_rounded else []
    tokens = tokens or [str(row) for row in range(count)]
    return tokens, torch.from_numpy(rows), lambda row: f"row {row}", messages


def write_npy(path: Path, tokens: Sequence[str], blocks: Iterator[Row], width: int) -> None:
    """Write an array and the JSON file of its tokens; neither file is replaced before both are complete.

    An old file is replaced only when both new ones are complete.
    """
    if is_stream(path):
        raise FileError(f"{path} is a device or a pipe, and a .npy file has a file of tokens beside it: name a file.")
    with replace_file(tokens_file(path)) as partial, writing(path) as file:
        partial.write_text(json.dumps(list(tokens)) + "\n")
        header = {"descr": "<f4", "fortran_order": False, "shape": (len(tokens), width)}
        np.lib.format.write_array_header_1_0(file, header)
        file.writelines(block.astype("<f4").tobytes() for block in blocks)


def tokens_file(path: Path) -> Path:
    """Return the path of the JSON file with the tokens of a `.npy` file: `x.tokens.json` for `x.npy` and `x.npy.gz`."""
    return path.with_name(path.name.removesuffix(".gz").removesuffix(".npy") + ".tokens.json")
