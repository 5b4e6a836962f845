"""Read and write safetensors files: one file, or several shards with an index.

The `safetensors` library parses and checks every header. Tensors are memory-mapped, so that tensors which are never
read cost nothing. Pickles are refused, with a command that converts them.
"""

import json
import math
import os
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from jaxtyping import Int, Shaped
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from embedlayer.errors import CheckpointError, FileError
from embedlayer.io.files import GGUF, file_errors, is_gguf, read_json, recover_folder, replace_file, require_file
from embedlayer.io.mapped_rows import MappedRows, ResidentLimit

ADAPTER_WEIGHTS = "adapter_model.safetensors"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CHUNK_BYTES = 1 << 24
"""Most bytes of a tensor that are in memory at a time where a tensor is written or sent in chunks."""

DTYPES = {
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
"""safetensors' name of each data type that embedlayer reads and writes."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The names by data type."""

_MAX_DIMENSIONS = 16
_FIRST_BYTES = 4096
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PICKLE_STARTS = (b"PK", b"\x80")  # a zip file by torch.save, or a bare pickle
_GENSIM_CLASS = re.compile(rb"gensim\.models\.(\w+)\W+(\w+)")


@dataclass(frozen=True)
class TensorInfo:
    """Data type, shape and byte range of one tensor in a safetensors file.

    Attributes:
        name: Name of the tensor in the file.
        dtype: safetensors' name of the data type, such as `"BF16"`.
        shape: Sizes of the tensor.
        file: Path of the safetensors file.
        start: Offset of the tensor's first byte, counted from the start of the file.
        stop: Offset of the byte after its last one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor in the file, in bytes."""
        return self.stop - self.start

    @property
    def torch_dtype(self) -> torch.dtype:
        """Data type of the tensor as a `torch.dtype`.

        Raises:
            CheckpointError: The data type is not in `DTYPES`.
        """
        if self.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.name} in {self.file} is stored as {self.dtype}; embedlayer reads {', '.join(DTYPES)}."
            )
        return DTYPES[self.dtype]

    def read_rows(self, rows: slice | Int[Tensor, " N"]) -> Shaped[Tensor, "N ..."]:
        """Read some rows of the tensor from the file and return a copy of them.

        Only the memory pages of these rows are read, so the file and the tensor may be larger than memory.

        Args:
            rows: A slice of the first dimension, or indices into it. A scalar tensor has one row.

        Returns:
            The rows on the CPU, in the data type of the file.

        Raises:
            FileError: The file cannot be mapped into memory.
            CheckpointError: The data type is not in `DTYPES`.
        """
        dtype, (count, *width) = self.torch_dtype, self.shape or (1,)
        if not self.nbytes:
            return torch.empty((count, *width), dtype=dtype)[rows]
        stored = self.map_rows()
        if not isinstance(rows, slice):
            copy = stored.read(rows.cpu().long())
        elif rows.step in (None, 1):
            start, stop, _ = rows.indices(count)
            copy = stored.read_slice(start, max(start, stop))
        else:
            copy = stored.read(torch.arange(*rows.indices(count)))
        return copy.flatten().view(dtype).view(-1, *width)

    def map_rows(self, *, writable: bool = False, limit: ResidentLimit | None = None) -> MappedRows:
        """Map the rows of the tensor into memory, one for each index of the first dimension. Nothing is read.

        Args:
            writable: Whether writing to the memory changes the file.
            limit: Limit of resident memory that several files share.

        Raises:
            FileError: The file cannot be mapped into memory.
            CheckpointError: The file is shorter than when its header was read.
        """
        count = (self.shape or (1,))[0]
        return MappedRows(self.file, self.start, count, self.nbytes // max(count, 1), writable=writable, limit=limit)


@dataclass(frozen=True)
class Header:
    """Header of a safetensors file: what it says about each tensor, and the metadata.

    Attributes:
        tensors: Every tensor of the file by name, sorted by offset.
        metadata: Strings that the file stores under `__metadata__`.
        size: Number of bytes before the data, including the 8 bytes of the header's length.
    """

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    size: int


@contextmanager
def open_safetensors(path: Path | str, device: str = "cpu", framework: str = "pt") -> Iterator[Any]:
    """Context manager: yield `safetensors.safe_open(path)`, and replace errors of safetensors by those of embedlayer.

    This applies to errors inside the block too.

    Args:
        path: The file.
        device: Device of the tensors that `get_tensor` returns.
        framework: `"pt"` maps the file copy-on-write, which fails for files larger than memory. `"np"` maps the file
            read-only.

    Raises:
        FileError: The file is missing or cannot be read.
        CheckpointError: The file is a pickle, a GGUF file, truncated, or not a safetensors file.
        RuntimeError: `framework` is `"pt"` and the file is larger than memory.
    """
    path = Path(path)
    require_file(path)
    try:
        with safe_open(path, framework=framework, device=device) as file:
            yield file
    except OSError as error:
        raise FileError(f"Cannot read {path}: {error.strerror or error}.") from error
    except SafetensorError as error:
        with path.open("rb") as opened:
            start = opened.read(9)
        if start.startswith(_PICKLE_STARTS) and not start.endswith(b"{"):  # 8 bytes of length, then a header in JSON
            raise pickle_error(path) from error
        if start.startswith(GGUF):
            raise CheckpointError(f"{path} is a GGUF file: pass this file itself.") from error
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}): it is damaged, cut short or another kind of file. "
            f"Copy it again or use an earlier checkpoint."
        ) from error


def read_header(path: Path | str) -> Header:
    """Read and check the header of a safetensors file; no tensor is read, so the file may have any size.

    Raises:
        FileError: The file is missing or cannot be read.
        CheckpointError: The file is a pickle, is truncated, or states impossible sizes, offsets or data types.
    """
    path = Path(path)
    with open_safetensors(path, framework="np"), path.open("rb") as file:  # safe_open does not tell the offsets
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    metadata = entries.pop("__metadata__", None) or {}
    infos = []
    for name, entry in entries.items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        if len(entry["shape"]) > _MAX_DIMENSIONS:
            raise CheckpointError(f"{path}: {name!r} has {len(entry['shape'])} dimensions: the file is damaged.")
        infos.append(TensorInfo(name, entry["dtype"], tuple(entry["shape"]), path, start, stop))
    infos.sort(key=lambda info: (info.start, info.stop))
    return Header({info.name: info for info in infos}, metadata, 8 + length)


def load_tensors(path: Path | str, device: str = "cpu", prefix: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors of a safetensors file, or those whose names begin with `prefix`, under the rest of their names.

    Returns:
        The tensors by name, and the metadata of the file: strings by name, empty if it has none.

    Raises:
        FileError: The file is missing or cannot be read.
        CheckpointError: The file is a pickle, a GGUF file, truncated, or not a safetensors file.
    """
    with open_safetensors(path, device) as file:
        names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
        return {name[len(prefix) :]: file.get_tensor(name) for name in names}, dict(file.metadata() or {})


def save_tensors(path: Path | str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write named tensors to one safetensors file, atomically; an existing file is replaced.

    Args:
        path: The file.
        tensors: Tensors by name; no two of them may share memory.
        metadata: Strings for the file's header, in addition to `{"format": "pt"}`.

    Raises:
        FileError: The folder cannot be written, or the disk is full.
        CheckpointError: A tensor is a sharded `DTensor`.
    """
    require_whole(tensors)
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with replace_file(path) as partial:
        try:
            save_file(contiguous, partial, metadata={"format": "pt", **(metadata or {})})
        except SafetensorError as error:  # how safetensors reports a full disk
            raise OSError(str(error)) from error


def require_whole(tensors: Mapping[str, Tensor]) -> None:
    """Check that no tensor is sharded.

    Raises:
        CheckpointError: A tensor is a sharded `DTensor`.
    """
    if sharded := [name for name, tensor in tensors.items() if hasattr(tensor, "full_tensor")]:
        raise CheckpointError(
            f"{', '.join(sharded)}: sharded over several ranks, each of which has some rows. Save them with "
            f"torch.distributed.checkpoint (embedlayer.distributed.state.distributed_state), or call full_tensor() on "
            f"all ranks first."
        )


def encode_header(
    tensors: Mapping[str, tuple[str | torch.dtype, Sequence[int], int]],
    metadata: Mapping[str, str],
    *,
    align: int = 8,
) -> bytes:
    """Return the first bytes of a safetensors file: everything before the data of the tensors.

    The caller writes the data after it, without gaps, in the order of `tensors`.

    Args:
        tensors: By name, the data type (safetensors' name or torch's), shape and number of bytes of each tensor.
        metadata: Strings for the file's header; may be empty.
        align: The result is padded to a multiple of this number of bytes, itself a multiple of 8.

    Example:
        >>> header = encode_header({"weight": (torch.float32, (2, 3), 24)}, {"format": "pt"})
        >>> len(header) % 8
        0
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        dtype = DTYPE_NAMES[dtype] if isinstance(dtype, torch.dtype) else dtype
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-(len(raw) + 8) % align)
    return len(raw).to_bytes(8, "little") + raw


def create_tensor_file(path: Path | str, name: str, shape: Sequence[int], dtype: torch.dtype) -> TensorInfo:
    """Create a safetensors file with one tensor of zeros, without writing them, and return where the tensor is in it.

    The disk space is allocated, so that later writes through a memory map cannot find the disk full. The rows start at
    a multiple of 4096 bytes.

    Args:
        path: The file, which must not exist.
        name: Name of the tensor.
        shape: Sizes of the tensor.
        dtype: Data type of the tensor.

    Raises:
        FileError: The file exists, cannot be written, or does not fit on the disk. Then there is no new file.
    """
    path, nbytes = Path(path), math.prod(shape) * dtype.itemsize
    header = encode_header({name: (dtype, shape, nbytes)}, {"format": "pt"}, align=4096)
    info = TensorInfo(name, DTYPE_NAMES[dtype], tuple(shape), path, len(header), len(header) + nbytes)
    with file_errors(f"create {path} of {info.stop:,} bytes", " Free some space or choose another folder."):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, info.stop)
            else:  # macOS
                os.ftruncate(descriptor, info.stop)
            os.pwrite(descriptor, header, 0)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
    return info


def byte_chunks(tensor: Tensor, dtype: torch.dtype | None = None) -> Iterator[Shaped[Tensor, " N"]]:
    """Yield the bytes of a tensor as uint8 tensors on the CPU, some rows at a time, for writing or sending them.

    A chunk has at most `CHUNK_BYTES` (16 MiB), or one row if a row is larger. An empty tensor has no chunks.

    Args:
        tensor: A tensor of any shape, on any device.
        dtype: Data type to which each chunk is converted first; by default the tensor's own.
    """
    dtype = dtype or tensor.dtype
    rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    for chunk in rows.split(rows_per_chunk(rows, dtype)):
        if chunk.numel():
            yield chunk.to("cpu", dtype).contiguous().flatten().view(torch.uint8)


def rows_per_chunk(rows: Tensor, dtype: torch.dtype | None = None) -> int:
    """Return how many rows of a tensor fit into one chunk of `byte_chunks`; at least 1.

    Args:
        rows: The tensor, with at least one dimension.
        dtype: Data type of the chunk; by default the tensor's own.
    """
    return max(CHUNK_BYTES // max(rows[:1].numel() * (dtype or rows.dtype).itemsize, 1), 1)


class CheckpointFolder(ABC):
    """Abstract base class: a folder with the files of a checkpoint, on this machine or on the hub.

    Attributes:
        name: Path of the folder or name of the repository, for error messages.
    """

    name: str

    @abstractmethod
    def find(self, file: str) -> Path | None:
        """Return the local path of a file in the folder; `None` if there is no such file.

        A folder on the hub downloads the file first, unless it is in the cache.
        """

    @abstractmethod
    def list_files(self) -> Sequence[Path] | None:
        """Return the local paths of all files directly in the folder; `None` for a folder on the hub."""

    @abstractmethod
    def subfolder(self, folder: str) -> "CheckpointFolder":
        """Return the folder with the name `folder` inside this one. It is not checked whether it exists."""


class _LocalFolder(CheckpointFolder):
    """A checkpoint folder on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = str(folder)

    def find(self, file: str) -> Path | None:
        """Return the path of a file in the folder; `None` if it does not exist, or is a folder.

        Raises:
            FileError: It is a named pipe, a socket or a device.
        """
        path = self.folder / file
        if not path.exists() or path.is_dir():
            return None
        require_file(path)
        return path

    def list_files(self) -> Sequence[Path]:
        """Return the paths of all files directly in the folder, sorted."""
        return sorted(path for path in self.folder.iterdir() if path.is_file())

    def subfolder(self, folder: str) -> "_LocalFolder":
        """Return the folder with the name `folder` inside this one, which need not exist."""
        return _LocalFolder(self.folder / folder)


class WeightFiles:
    """The tensors of a checkpoint in one or several safetensors files, read one by one on request.

    Args:
        folder: Folder with the files.
        files: Name of the only file, or a mapping from the name of each tensor to the name of its file.

    Attributes:
        name: Path or name of the checkpoint, for error messages.
        bytes_read: Bytes of headers and tensors that were read so far.
    """

    def __init__(self, folder: CheckpointFolder, files: str | Mapping[str, str]) -> None:
        self._folder = folder
        self._files = files
        self._headers: dict[str, Header] = {}
        self.bytes_read = 0
        self.name = f"{folder.name}/{files}" if isinstance(files, str) and files != WEIGHTS else folder.name

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors.

        Raises:
            FileError, CheckpointError: The only file cannot be read or is damaged.
        """
        return tuple(self._header(self._files).tensors if isinstance(self._files, str) else self._files)

    @property
    def headers(self) -> dict[str, Header]:
        """Headers of all files, by file name. Headers that were not read before are read now.

        Raises:
            FileError, CheckpointError: A file is missing, cannot be read or is damaged.
        """
        files = [self._files] if isinstance(self._files, str) else dict.fromkeys(self._files.values())
        return {file: self._header(file) for file in files}

    def find(self, *suffixes: str) -> list[str]:
        """Return the names of the tensors that equal one of `suffixes` or end in a dot and the suffix.

        The names for the first suffix come first; among the names for one suffix, the shortest.
        """
        return [
            name
            for suffix in suffixes
            for name in sorted(self.names, key=lambda name: (len(name), name))
            if f".{name}".endswith(f".{suffix}")
        ]

    def info(self, name: str) -> TensorInfo:
        """Return the data type, shape and byte range of a tensor; only the header of its file is read.

        Raises:
            CheckpointError: There is no such tensor, its file is missing or damaged, or has a tensor that the index
                locates in another file.
        """
        file = self._files if isinstance(self._files, str) else self._files.get(name)
        tensor = None if file is None else self._header(file).tensors.get(name)
        if tensor is None:
            wrong = " The index and its shards do not belong together: copy them again." if file != self._files else ""
            raise CheckpointError(f"{self.name} has no tensor {name!r}{f' in {file}' if file else ''}.{wrong}")
        return tensor

    def read(self, name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Read one tensor and return it.

        On the CPU and in the data type of the file, the result is memory-mapped, not copied: writing to it does not
        change the file. If the file is larger than memory, the tensor is copied.

        Args:
            name: Name of the tensor.
            dtype: Data type of the result; by default that of the file.
            device: Device of the result.

        Raises:
            CheckpointError: There is no such tensor, its file is missing or damaged, or its data type is not in
                `DTYPES`.
        """
        info = self.info(name)
        stored = info.torch_dtype
        self.bytes_read += info.nbytes
        try:
            with open_safetensors(info.file) as file:
                tensor: Tensor = file.get_tensor(name)
        except RuntimeError:  # torch cannot map a file larger than memory copy-on-write
            tensor = info.read_rows(slice(None)).view(info.shape)
        if tensor.data_ptr() % stored.itemsize:  # old files have headers of any length
            tensor = tensor.clone()
        return tensor.to(device=device, dtype=dtype or stored)

    def _header(self, file: str) -> Header:
        """Return the header of a file of this checkpoint; it is read at the first call and kept.

        Raises:
            CheckpointError: The file is missing or damaged.
        """
        if file not in self._headers:
            path = self._folder.find(file)
            if path is None:
                raise CheckpointError(f"{self.name} lacks its shard {file}: copy or download it again.")
            header = read_header(path)
            index = {} if isinstance(self._files, str) else self._files
            twice = [name for name in header.tensors if index.get(name, file) != file]
            if twice:
                raise CheckpointError(
                    f"{path} has a tensor {twice[0]!r}, and the index of {self.name} locates it in {index[twice[0]]}: "
                    f"which one counts is not known. Copy the checkpoint again, or remove it from one of them."
                )
            self._headers[file] = header
            self.bytes_read += self._headers[file].size
        return self._headers[file]


def find_folder(path: Path) -> tuple[CheckpointFolder, str | None] | None:
    """Find the checkpoint folder that a local path names.

    Returns:
        For a folder, this folder and `None`; for a file, its folder and its name; `None` if nothing exists at `path`.

    Raises:
        FileError: The path cannot be read, or is not a valid file name.
    """
    try:
        if recover_folder(path).is_dir():
            return _LocalFolder(path), None
        if not path.exists():
            return None
        require_file(path)
        return _LocalFolder(path.parent), path.name
    except FileError:
        raise
    except (OSError, ValueError) as error:
        raise FileError(f"Cannot read {str(path)!r}: {error}.") from error


def no_such_path(path: Path | str) -> FileError:
    """Create, but do not raise, the error for a path at which no folder or file exists."""
    return FileError(f"There is no folder or file {str(path)!r}.")


def choose_weight_files(folder: CheckpointFolder, file: str | None = None) -> str | Mapping[str, str]:
    """Choose the safetensors files, or the only GGUF file, from which the tensors of a folder are read.

    Args:
        folder: Folder of the checkpoint.
        file: Name of an existing safetensors file or index in the folder. By default, the first that exists of
            `model.safetensors`, `model.safetensors.index.json`, the only safetensors file, and the only GGUF file.

    Returns:
        The second argument of `WeightFiles`: the name of the only file, or the file name of each tensor by its name.

    Raises:
        FileError: There is no safetensors file.
        CheckpointError: The weights are pickles or an adapter of PEFT; the index is damaged or names files
            outside its folder; or there are several files and no index.
    """
    if file is not None:
        path = folder.find(file)
        assert path is not None
        if file == ADAPTER_WEIGHTS:
            raise _adapter_error(path)
        if file.endswith(".index.json"):
            return _read_weight_map(path)
        if path.suffix in _PICKLE_SUFFIXES:
            raise pickle_error(path)
        return file
    if folder.find(WEIGHTS) is not None:  # before an index, as in transformers
        return WEIGHTS
    index = folder.find(INDEX)
    if index is not None:
        return _read_weight_map(index)
    files = folder.list_files()
    if files is None:
        raise FileError(
            f"{folder.name!r} has no {WEIGHTS} on the hub or, offline, in its cache; "
            f"there is no folder or file of that name here either."
        )
    found = [path for path in files if path.suffix == ".safetensors"]
    if len(found) == 1:
        if found[0].name == ADAPTER_WEIGHTS:
            raise _adapter_error(found[0])
        return found[0].name
    if found:
        raise CheckpointError(
            f"{folder.name} holds {len(found)} safetensors files and no {INDEX}: name the file with the table, "
            f"or add the index."
        )
    pickles = [path for path in files if path.suffix in _PICKLE_SUFFIXES]
    if pickles:
        raise pickle_error(pickles[0])
    others = [path for path in files if is_gguf(path)]
    if len(others) == 1:
        return others[0].name
    if others:
        raise CheckpointError(f"{folder.name} holds {len(others)} GGUF files: name one of them.")
    raise FileError(f"{folder.name} holds no safetensors file.")


def is_plain_name(name: str) -> bool:
    """Return whether a string is a safe name of a file directly in a folder.

    It is not if it is empty, `.` or `..`, or contains a slash, a backslash or a zero byte.

    Example:
        >>> [is_plain_name(name) for name in ("one.safetensors", "../one.safetensors", "")]
        [True, False, False]
    """
    return PurePosixPath(name).name == name and name not in ("", ".", "..") and not {"\0", "\\"} & set(name)


def _read_weight_map(index: Path) -> dict[str, str]:
    """Read an index of shards (`model.safetensors.index.json`) and return the file name of each tensor by its name.

    Raises:
        FileError: The index cannot be read.
        CheckpointError: The index is damaged, names a file outside its folder, or a file that is not safetensors.
    """
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


def pickle_error(path: Path) -> CheckpointError:
    """Create, but do not raise, the error for a pickle; the file is not unpickled.

    Its message has a command that converts the file: to safetensors, or a file that gensim saved to text of word2vec.
    """
    with path.open("rb") as file:
        found = _GENSIM_CLASS.search(file.read(_FIRST_BYTES))
    module, name = ("", "") if found is None else (part.decode() for part in found.groups())
    if name.endswith("KeyedVectors") or name in ("Word2Vec", "FastText", "Doc2Vec"):
        vectors = "K.load(sys.argv[1])" + ".wv" * (not name.endswith("KeyedVectors"))
        return CheckpointError(
            f"{path} is a {name} that gensim saved: a pickle, which can run any code when it is loaded, so embedlayer "
            f"does not read it. If you trust it, convert it once, with gensim:\n"
            f'python -c "import sys; from gensim.models.{module} import {name} as K; '
            f'{vectors}.save_word2vec_format(sys.argv[2])" {shlex.quote(path.name)} {shlex.quote(path.stem)}.vec'
        )
    return CheckpointError(
        f"{path} is a pickle, which can run any code when it is loaded: embedlayer reads safetensors only. "
        f"Convert it once, with torch and safetensors:\n"
        f'python -c "import sys, torch, safetensors.torch as s; t = torch.load(sys.argv[1], weights_only=True); '
        f"s.save_file({{k: v.contiguous().clone() for k, v in t.items()}}, sys.argv[2], {{'format': 'pt'}})\" "
        f"{path.name} {WEIGHTS}"
    )


def _adapter_error(path: Path) -> CheckpointError:
    """Create, but do not raise, the error for the weights of a PEFT adapter, which are changes of a model."""
    return CheckpointError(
        f"{path} is an adapter of PEFT: it has changes of a model, and no table.\n"
        f"Open the model that it was trained on, and write the changes into its table: "
        f"embedlayer.vocab.merge_adapter(layer.table, {str(path.parent)!r})."
    )
