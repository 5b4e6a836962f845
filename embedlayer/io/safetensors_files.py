"""Tensors in safetensors files: in one, or in several that an index names.

Headers are checked against the sizes of their files before anything is allocated, and a tensor is mapped into memory,
so what is not asked for is never read. Pickles are refused, with the line that converts them.
"""

import json
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from embedlayer.errors import CheckpointError, FileError
from embedlayer.io.files import read_json, replacing, restored

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_HEADER_BYTES = 100_000_000
"""The safetensors format's own limit."""

BYTES_AT_ONCE = 1 << 24

_MOST_DIMENSIONS = 16
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies, without its numbers.

    Attributes:
        name: Its name in the checkpoint.
        dtype: The format's word for its type, such as `"BF16"`.
        shape: Its sizes.
        file: The file that holds it.
        start: Its first byte in that file.
        stop: The byte after its last.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes it takes in the file."""
        return self.stop - self.start

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its type in PyTorch.

        Raises:
            CheckpointError: This library does not read that type.
        """
        if self.dtype not in _DTYPES:
            raise CheckpointError(
                f"{self.name} in {self.file} is stored as {self.dtype}; embedlayer reads {', '.join(_DTYPES)}."
            )
        return _DTYPES[self.dtype]


@dataclass(frozen=True)
class Header:
    """What stands at the beginning of a safetensors file.

    Attributes:
        tensors: Every tensor of the file, by name, in the order in which their bytes lie.
        metadata: The file's own strings.
        size: Bytes of the header, the 8 of its length included: where the numbers begin.
    """

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    size: int


def read_header(path: Path | str) -> Header:
    """Read and check the header of a safetensors file; no number is read and nothing of a stated size is allocated.

    Raises:
        FileError: There is no such file, or it cannot be read.
        CheckpointError: It is a pickle, is cut short, or states sizes, offsets or types that cannot be.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = _header_bytes(file, path, path.stat().st_size)
        size = path.stat().st_size
    except OSError as error:
        raise FileError(f"Cannot read {path}: {error.strerror or error}.") from error
    try:
        entries = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON ({type(error).__name__})") from error
    if not isinstance(entries, dict):
        raise _damaged(path, f"its header is a JSON {type(entries).__name__}")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _damaged(path, "its metadata is no object")
    first = 8 + len(raw)
    tensors = sorted((_entry(path, name, entry, first, size) for name, entry in entries.items()), key=_place)
    for before, after in pairwise(tensors):
        if after.start < before.stop:
            raise _damaged(path, f"{before.name} and {after.name} overlap")
    strings = {str(key): str(value) for key, value in metadata.items()}
    return Header({tensor.name: tensor for tensor in tensors}, strings, first)


def _place(tensor: TensorInfo) -> tuple[int, int]:
    return tensor.start, tensor.stop


def _header_bytes(file: BinaryIO, path: Path, size: int) -> bytes:
    """The JSON, after its stated length was compared with the file's."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > size - 8:
        if start[:2] == b"PK" or start[:1] == b"\x80":  # torch.save's zip, or a bare pickle
            raise _pickle(path)
        raise _damaged(path, f"it has {size:,} bytes, of which the header should take {8 + length:,}")
    if length > MOST_HEADER_BYTES:
        raise _damaged(path, f"its header claims {length:,} bytes, the format allows {MOST_HEADER_BYTES:,}")
    return file.read(length)


def _entry(path: Path, name: str, entry: object, first: int, size: int) -> TensorInfo:
    """One tensor of the header, checked."""
    if not isinstance(entry, dict):
        raise _damaged(path, f"the entry of {name!r} is no object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets)):
        raise _damaged(path, f"the entry of {name!r} lacks a dtype, a shape, or offsets that are whole numbers")
    assert isinstance(shape, list)
    assert isinstance(offsets, list)
    if len(shape) > _MOST_DIMENSIONS or len(offsets) != 2:
        raise _damaged(path, f"{name!r} has {len(shape)} dimensions and {len(offsets)} offsets")
    start, stop = first + offsets[0], first + offsets[1]
    if not start <= stop <= size:
        raise _damaged(path, f"{name!r} should lie at bytes {start:,} to {stop:,} of {size:,}")
    if dtype in _DTYPES:
        stated = math.prod(shape) * _DTYPES[dtype].itemsize
        if stated != stop - start:
            raise _damaged(path, f"{name!r} {dtype} {shape} needs {stated:,} bytes and has {stop - start:,}")
    return TensorInfo(name, dtype, tuple(shape), path, start, stop)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a whole safetensors file: {what}. "
        f"It is damaged, cut short or another kind of file: copy it again."
    )


def _pickle(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a pickle, which can run any code when it is loaded: embedlayer reads safetensors only. "
        f"Convert it once, with torch and safetensors:\n"
        f'python -c "import sys, torch, safetensors.torch as s; t = torch.load(sys.argv[1], weights_only=True); '
        f"s.save_file({{k: v.contiguous().clone() for k, v in t.items()}}, sys.argv[2], {{'format': 'pt'}})\" "
        f"{path.name} {WEIGHTS}"
    )


class Place(ABC):
    """Where the files of a checkpoint are."""

    name: str

    @abstractmethod
    def find(self, file: str) -> Path | None:
        """The file on this machine, or `None` where the checkpoint has no such file."""

    @abstractmethod
    def files(self) -> Sequence[Path] | None:
        """All files at its top, or `None` where they cannot be listed."""

    @abstractmethod
    def below(self, folder: str) -> "Place":
        """A folder of it."""


class _Folder(Place):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = str(folder)

    def find(self, file: str) -> Path | None:
        path = self.folder / file
        return path if path.is_file() else None

    def files(self) -> Sequence[Path]:
        return sorted(path for path in self.folder.iterdir() if path.is_file())

    def below(self, folder: str) -> "_Folder":
        return _Folder(self.folder / folder)


class WeightFiles:
    """Tensors in one safetensors file or in several: their names, and each tensor when it is asked for.

    Args:
        place: Where the files are.
        files: The one file that holds all, or for each tensor the file that holds it.

    Attributes:
        name: What errors call it.
        bytes_read: Bytes of headers and tensors that were read so far.
    """

    def __init__(self, place: Place, files: str | Mapping[str, str]) -> None:
        self._place = place
        self._files = files
        self._headers: dict[str, Header] = {}
        self.bytes_read = 0
        self.name = f"{place.name}/{files}" if isinstance(files, str) and files != WEIGHTS else place.name

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor."""
        return tuple(self._header(self._files).tensors if isinstance(self._files, str) else self._files)

    @property
    def headers(self) -> dict[str, Header]:
        """The header of each file, by the file's name."""
        files = [self._files] if isinstance(self._files, str) else dict.fromkeys(self._files.values())
        return {file: self._header(file) for file in files}

    def find(self, *suffixes: str) -> list[str]:
        """Names that are one of the suffixes, or end in a dot and one; by suffix first, then the shortest first."""
        return [name for suffix in suffixes for name in sorted(self._ending_in(suffix), key=lambda n: (len(n), n))]

    def _ending_in(self, suffix: str) -> Iterator[str]:
        return (name for name in self.names if name == suffix or name.endswith(f".{suffix}"))

    def info(self, name: str) -> TensorInfo:
        """Type, shape and place of a tensor.

        Raises:
            CheckpointError: There is no such tensor, or the shard that should hold it is missing or damaged.
        """
        file = self._files if isinstance(self._files, str) else self._files.get(name)
        tensor = None if file is None else self._header(file).tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.name} has no tensor {name!r}{f' in {file}' if file else ''}.")
        return tensor

    def read(self, name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """A tensor, in its own type on the CPU mapped and not copied (writing to it does not change the file).

        Raises:
            CheckpointError: There is no such tensor, or its type is not known.
        """
        tensor = self.info(name)
        kind = tensor.torch_dtype
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=dtype or kind, device=device)
        self.bytes_read += tensor.nbytes
        return _mapped(tensor, kind).view(tensor.shape).to(device=device, dtype=dtype or kind)

    def _header(self, file: str) -> Header:
        if file not in self._headers:
            path = self._place.find(file)
            if path is None:
                raise CheckpointError(f"{self.name} lacks its shard {file}: copy or download it again.")
            self._headers[file] = read_header(path)
            self.bytes_read += self._headers[file].size
        return self._headers[file]


def open_weights(path: Path) -> WeightFiles:
    """Open what stands at `path`: a folder with safetensors files, one such file, or an index of several.

    Raises:
        FileError: There is nothing, or no safetensors file in the folder.
        CheckpointError: Pickles, an index that is damaged or leaves its folder, or several files and no index.
    """
    found = locate(path)
    if found is None:
        raise nothing_at(path)
    folder, file = found
    return WeightFiles(folder, files_in(folder, file))


def locate(path: Path) -> tuple[Place, str | None] | None:
    """The folder that a path means, and the file in it if it means one; `None` where there is nothing.

    Raises:
        FileError: No path can be called that.
    """
    try:
        if restored(path).is_dir():
            return _Folder(path), None
        return (_Folder(path.parent), path.name) if path.is_file() else None
    except (OSError, ValueError) as error:
        raise FileError(f"Cannot read {str(path)!r}: {error}.") from error


def nothing_at(path: Path | str) -> FileError:
    """What to raise where nothing stands."""
    return FileError(f"There is no folder or file {str(path)!r}.")


def files_in(place: Place, file: str | None = None) -> str | Mapping[str, str]:
    """Which files hold the tensors of a place, as `WeightFiles` wants to know; `file` is the one that was asked for.

    Raises:
        FileError: There is none.
        CheckpointError: Pickles, an index that is damaged or leaves its folder, or several files and no index.
    """
    if file is not None:
        path = place.find(file)
        assert path is not None
        if file.endswith(".index.json"):
            return _weight_map(path)
        if path.suffix in _PICKLES:
            raise _pickle(path)
        return file
    index = place.find(INDEX)
    if index is not None:
        return _weight_map(index)
    if place.find(WEIGHTS) is not None:
        return WEIGHTS
    files = place.files()
    if files is None:
        raise FileError(
            f"{place.name!r} has no {WEIGHTS} on the hub or, offline, in its cache; "
            f"there is no folder or file of that name here either."
        )
    found = [path for path in files if path.suffix == ".safetensors"]
    if len(found) == 1:
        return found[0].name
    if found:
        raise CheckpointError(
            f"{place.name} holds {len(found)} safetensors files and no {INDEX}: name the one that has the table, "
            f"or add the index."
        )
    pickles = [path for path in files if path.suffix in _PICKLES]
    if pickles:
        raise _pickle(pickles[0])
    raise FileError(f"{place.name} holds no safetensors file.")


def _mapped(tensor: TensorInfo, kind: torch.dtype) -> Tensor:
    """The numbers of a tensor, flat: only the pages that hold it are mapped, and a page is read when it is touched."""
    page_start = tensor.start - tensor.start % mmap.ALLOCATIONGRANULARITY
    try:
        with tensor.file.open("rb") as file:
            pages = mmap.mmap(file.fileno(), tensor.stop - page_start, access=mmap.ACCESS_COPY, offset=page_start)
    except (OSError, ValueError) as error:
        raise FileError(f"Cannot map {tensor.name} of {tensor.file} into memory: {error}.") from error
    offset = tensor.start - page_start
    if tensor.start % kind.itemsize:  # written before the format asked for aligned headers
        return torch.frombuffer(bytearray(pages[offset:]), dtype=kind)
    return torch.frombuffer(pages, dtype=kind, count=tensor.nbytes // kind.itemsize, offset=offset)


def is_plain_name(name: str) -> bool:
    """Whether a name that stands in a file stays in its folder."""
    return PurePosixPath(name).name == name and name not in ("", ".", "..") and not {"\0", "\\"} & set(name)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor to shard, from an index whose shards all lie beside it."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
        raise CheckpointError(
            f"{index} has no weight_map from tensors to files: it is damaged or another kind of file."
        )
    for file in set(shards.values()):
        if not is_plain_name(file):
            raise CheckpointError(f"{index} names the shard {file!r}, which is not a file beside it: refused.")
        if not file.endswith(".safetensors"):
            raise CheckpointError(f"{index} names the shard {file!r}, which is no safetensors file.")
    return shards


def pieces_of(tensor: Any) -> Iterator[Any]:
    """The bytes of a `torch.Tensor` on the CPU, a few rows at a time."""
    rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    for piece in rows.split(rows_at_once(rows)):
        if piece.numel():
            yield piece.cpu().contiguous().flatten().view(torch.uint8)


def rows_at_once(rows: Any) -> int:
    """How many rows of a `torch.Tensor` are a piece."""
    row_bytes: int = rows[:1].nbytes
    return max(BYTES_AT_ONCE // max(row_bytes, 1), 1)


def save_tensors(path: Path | str, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
    """Write named tensors as one safetensors file, wholly or not at all.

    Args:
        path: The file.
        tensors: Name to `torch.Tensor`. Tensors that share memory must be given once.
        metadata: Strings for the file's header, beside `{"format": "pt"}`.

    Raises:
        FileError: The folder cannot be written.
        CheckpointError: A tensor is divided among processes.
    """
    if divided := [name for name, tensor in tensors.items() if hasattr(tensor, "full_tensor")]:
        raise CheckpointError(
            f"{', '.join(divided)}: divided among processes, of which each has a part. Save them with "
            f"torch.distributed.checkpoint (embedlayer.distributed.state.distributed_state), or call full_tensor() on "
            f"all processes first."
        )
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as partial:
        try:
            save_file(contiguous, partial, metadata={"format": "pt", **(metadata or {})})
        except SafetensorError as error:  # its own I/O errors come as this type, a full disk among them
            raise OSError(str(error)) from error


def load_tensors(path: Path | str, device: str = "cpu") -> tuple[dict[str, Any], dict[str, str]]:
    """Read a safetensors file: its tensors by name, and its metadata.

    Raises:
        FileError: There is no such file, or it cannot be read.
        CheckpointError: It is truncated or not a safetensors file.
    """
    with opened_tensors(path, device) as file:
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})


@contextmanager
def opened_tensors(path: Path | str, device: str = "cpu") -> Iterator[Any]:
    """A safetensors file to read single tensors from; what goes wrong inside the block too is told as ours.

    Raises:
        FileError: There is no such file, or it cannot be read.
        CheckpointError: It is truncated or not a safetensors file.
    """
    try:
        with safe_open(Path(path), framework="pt", device=device) as file:
            yield file
    except OSError as error:
        raise FileError(f"Cannot read {path}: {error.strerror or error}.") from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}): it is damaged or was cut short. "
            f"Copy it again or use an earlier checkpoint."
        ) from error
