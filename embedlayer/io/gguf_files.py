"""Read and write GGUF files, the format of llama.cpp: metadata, tensors of floating point, and tensors in blocks.

A block is 16 to 256 consecutive numbers of a row, which share scales. The `gguf` package knows the types of blocks and
dequantises them. The header is read here, with a check of every size. Metadata and tensors that do not change are
written back byte for byte.

Reference: ggml/docs/gguf.md.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from embedlayer.core.errors import CheckpointError, FileError, require
from embedlayer.io.files import GGUF, file_errors, replace_file, require_file
from embedlayer.io.safetensors_files import DTYPES, TensorInfo, copy_bytes, write_tensor

FALLBACK_TYPE = "Q8_0"
"""Type in which rows are written where `gguf` cannot quantise to the type of the file."""

_ALIGNMENT, _SPLITS = "general.alignment", "split.count"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_NUMBERS_AT_ONCE = 1 << 20


class NewTensor(NamedTuple):
    """A tensor to write into a GGUF file."""

    dtype: str  # such as "Q8_0"
    shape: tuple[int, ...]  # rows first
    data: Tensor  # its bytes, uint8, in a tensor of any shape


@dataclass(frozen=True)
class GGUFFile:
    """The header of a GGUF file.

    Shapes have the rows first; a `dtype` may be a type of blocks, such as `"Q4_K"`. Each tensor starts at a multiple of
    `alignment` bytes.
    """

    path: Path
    version: int
    metadata: dict[str, Any]
    stored_metadata: dict[str, bytes]
    tensors: dict[str, TensorInfo]
    alignment: int
    size: int

    def stored_rows(self, name: str) -> UInt8[Tensor, "N row_bytes"]:
        """Return the bytes of the rows of a tensor, mapped to the file: writing to them does not change the file."""
        info = self.tensors[name]
        count = prod(info.shape[:-1])
        try:
            stored = np.memmap(self.path, np.uint8, "c", info.start, (count, info.nbytes // count))
        except (OSError, ValueError) as error:
            raise FileError(f"Cannot map {name} of {self.path} into memory: {error}.") from error
        return torch.from_numpy(stored)

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor; quantised blocks are dequantised, a few rows at a time, by default to float32."""
        info, stored = self.tensors[name], self.stored_rows(name)
        if info.dtype in DTYPES:
            kind = DTYPES[info.dtype]
            stored = stored.clone() if stored.data_ptr() % kind.itemsize else stored
            return stored.view(kind).view(info.shape).to(dtype or kind)
        rows = torch.empty((len(stored), info.shape[-1]), dtype=dtype or torch.float32, device="cpu")
        step = max(1, _NUMBERS_AT_ONCE // rows.shape[1])
        for start in range(0, len(rows), step):
            rows[start : start + step] = dequantise(stored[start : start + step], info.dtype)
        return rows.view(info.shape)


# Types of blocks


def row_bytes(dtype: str, width: int) -> int:
    """Return the number of bytes of a row of `width` numbers in a type such as `"Q4_K"`."""
    gguf = require("gguf", extra="gguf")
    if dtype not in gguf.GGMLQuantizationType.__members__:
        raise CheckpointError(f"The package gguf knows no type {dtype!r}: pip install -U gguf.")
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    if width % block:
        raise CheckpointError(f"A row of {width:,} numbers is no whole number of {dtype} blocks, of {block} each.")
    return int(width // block * nbytes)


def dequantise(stored: UInt8[Tensor, "N row_bytes"], dtype: str) -> Float[Tensor, "N D"]:
    """Return the float32 numbers of rows that are stored in a type such as `"Q4_K"` or `"F16"`."""
    if dtype in DTYPES:
        return stored.contiguous().view(DTYPES[dtype]).float()
    gguf = require("gguf", extra="gguf")
    try:
        with np.errstate(all="ignore"):  # scales of a damaged file may be infinite
            rows = gguf.quants.dequantize(stored.cpu().numpy(), gguf.GGMLQuantizationType[dtype])
    except NotImplementedError as error:
        raise CheckpointError(f"The package gguf cannot dequantise {dtype} ({error}): pip install -U gguf.") from error
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32))


def quantise(rows: Float[Tensor, "N D"], dtype: str) -> UInt8[Tensor, "N row_bytes"] | None:
    """Return the bytes of rows in a type such as `"Q8_0"` or `"F16"`; `None` if `gguf` cannot quantise to that type."""
    if dtype in DTYPES:
        return rows.to(DTYPES[dtype]).contiguous().view(torch.uint8)
    gguf = require("gguf", extra="gguf")
    kind = gguf.GGMLQuantizationType[dtype]
    parts = [torch.empty((0, row_bytes(dtype, rows.shape[1])), dtype=torch.uint8, device="cpu")]
    try:
        for chunk in rows.split(max(1, _NUMBERS_AT_ONCE // max(1, rows.shape[1]))):
            with np.errstate(all="ignore"):  # a row of zeros is divided by its scale
                parts.append(torch.from_numpy(gguf.quants.quantize(chunk.float().cpu().numpy(), kind)))
    except NotImplementedError:
        return None
    return torch.cat(parts)


def can_quantise(dtype: str) -> bool:
    """Return whether rows can be written in a type, such as `"Q8_0"`."""
    gguf = require("gguf", extra="gguf")
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]][0]
    return quantise(torch.zeros(1, block, device="cpu"), dtype) is not None


# Reading


def read_gguf(path: Path | str) -> GGUFFile:
    """Read and check the header of a GGUF file; no tensor is read."""
    path = Path(path)
    require_file(path)
    gguf = require("gguf", extra="gguf")
    with file_errors(f"read {path}"):
        if path.stat().st_size < 24:
            raise CheckpointError(f"{path} is no whole GGUF file: it has {path.stat().st_size} bytes. Copy it again.")
        data = np.memmap(path, np.uint8, "r")
    header = _Header(path, data)
    if (magic := bytes(header.take(4))) != GGUF:
        raise CheckpointError(f"{path} is no GGUF file: it starts with {magic!r}. Check the name of the file.")
    version = header.number("I")
    if version & 0xFFFF == 0:
        raise CheckpointError(f"{path} is a big-endian GGUF file: convert it with gguf-convert-endian {path} little.")
    if version not in _VERSIONS:
        raise CheckpointError(f"{path} is a GGUF file of version {version}; embedlayer reads versions 2 and 3.")
    num_tensors, num_values = header.count(24), header.count(13)
    metadata: dict[str, Any] = {}
    stored: dict[str, bytes] = {}
    for _ in range(num_values):
        key = header.string()
        if key in metadata:
            raise header.damaged(f"the key {key!r} is there twice")
        start = header.at
        metadata[key] = header.value()
        stored[key] = bytes(header.data[start : header.at])
    if (parts := metadata.get(_SPLITS)) is not None and parts != 1:
        raise CheckpointError(f"{path} is one of {parts} parts: join them with llama-gguf-split --merge.")
    alignment = metadata.get(_ALIGNMENT, gguf.GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise header.damaged(f"{_ALIGNMENT} is {alignment!r}, no power of two")
    entries = [header.tensor() for _ in range(num_tensors)]
    start, types = -(-header.at // alignment) * alignment, {kind.value: kind for kind in gguf.GGMLQuantizationType}
    tensors: dict[str, TensorInfo] = {}
    for name, kind, shape, offset in entries:
        if name in tensors:
            raise header.damaged(f"the tensor {name!r} is there twice")
        if kind not in types:
            raise CheckpointError(f"{path}: the package gguf does not know type {kind} of {name}: pip install -U gguf.")
        dtype, (block, _) = types[kind].name, gguf.GGML_QUANT_SIZES[types[kind]]
        if not shape or 0 in shape or shape[-1] % block:
            raise header.damaged(f"{name} of shape {list(shape)} is no whole number of {dtype} blocks, of {block} each")
        nbytes = row_bytes(dtype, shape[-1]) * int(np.prod(shape[:-1], dtype=object))
        tensors[name] = TensorInfo(name, dtype, shape, path, start + offset, start + offset + nbytes)
        if tensors[name].stop > len(data) or offset % alignment:
            raise header.damaged(f"{name} does not lie inside it")
    return GGUFFile(path, version, metadata, stored, tensors, alignment, header.at)


class _Header:
    """Reads the header of a GGUF file from its bytes; `path` is for error messages."""

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        self.path, self.data, self.at = path, data.data, 0

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is no whole GGUF file: {what}. It is damaged or cut short: copy it again.")

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.at:
            raise self.damaged(f"it ends at byte {len(self.data):,}, inside its header")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        """Return the next number; `code` is its format for `struct`."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, least: int) -> int:
        """Return the next number, which counts entries of at least `least` bytes each; the file must have so many."""
        count: int = self.number("Q")
        if count * least > len(self.data) - self.at:
            raise self.damaged(f"it states {count:,} entries and has {len(self.data):,} bytes")
        return count

    def string(self) -> str:
        """Return the next string; bytes that are not UTF-8 become lone surrogates."""
        return bytes(self.take(self.count(1))).decode(errors="surrogateescape")

    def value(self) -> Any:
        """Return the next value of the metadata, which starts with the number of its type."""
        if (kind := self.number("I")) != _ARRAY:
            return self._single(kind)
        if (kind := self.number("I")) not in _SCALARS:
            return [self._single(kind) for _ in range(self.count(8))]
        code = _SCALARS[kind]
        count = self.count(struct.calcsize(code))
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}"))))

    def _single(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind not in _SCALARS:
            raise self.damaged(f"a value has type {kind}")
        return self.number(_SCALARS[kind])

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        """Return name, number of the type, shape (rows first) and offset of the next tensor."""
        name, dimensions = self.string(), self.number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise self.damaged(f"{name!r} has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        return name, self.number("I"), shape, self.number("Q")


# Writing


def write_gguf(source: GGUFFile, path: Path, *, metadata: Mapping[str, Any], tensors: Mapping[str, NewTensor]) -> None:
    """Write a copy of a GGUF file, atomically, in which some metadata and some tensors are replaced.

    Order, alignment and all other bytes stay. New values have the type of the old ones, and keys that the file lacks
    are ignored; new tensors are named as those of the file. `path` must be another file than `source.path`.
    """
    if path.exists() and path.samefile(source.path):
        raise FileError(f"{path} is the file that is copied: name another one.")
    gguf = require("gguf", extra="gguf")
    stored = source.stored_metadata.items()
    values = {key: _encoded(old, metadata[key]) if key in metadata else old for key, old in stored}
    header = [GGUF, struct.pack("<IQQ", source.version, len(source.tensors), len(values))]
    for key, raw in values.items():
        header += [_string(key), raw]
    offset = 0
    for name, info in source.tensors.items():
        new = tensors.get(name)
        dtype, shape = (info.dtype, info.shape) if new is None else (new.dtype, new.shape)
        kind = gguf.GGMLQuantizationType[dtype].value
        header += [_string(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)]
        nbytes = info.nbytes if new is None else new.data.nbytes
        offset += nbytes + -nbytes % source.alignment
    with replace_file(path) as partial, source.path.open("rb") as old, partial.open("wb") as file:
        file.write(b"".join(header))
        for name, info in source.tensors.items():
            file.write(bytes(-file.tell() % source.alignment))
            if name in tensors:
                write_tensor(file, tensors[name].data)
            else:
                copy_bytes(old, file, info)
        file.write(bytes(-file.tell() % source.alignment))


def _string(text: str) -> bytes:
    """Return a string as a GGUF file stores it: its length, and its bytes."""
    content = text.encode(errors="surrogateescape")
    return struct.pack("<Q", len(content)) + content


def _encoded(old: bytes, value: Any) -> bytes:
    """Return a value of the metadata as a file stores it, in the type of the old value, whose bytes are `old`."""
    (kind,) = struct.unpack_from("<I", old)
    if kind != _ARRAY:
        return old[:4] + (_string(value) if kind == _STRING else struct.pack(f"<{_SCALARS[kind]}", value))
    (item,) = struct.unpack_from("<I", old, 4)
    start = old[:8] + struct.pack("<Q", len(value))
    if item == _STRING:
        return start + b"".join(map(_string, value))
    return start + struct.pack(f"<{len(value)}{_SCALARS[item]}", *value)
