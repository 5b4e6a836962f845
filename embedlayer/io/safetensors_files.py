"""Read and write safetensors files: headers, tensors, and their rows.

The `safetensors` library parses and checks every header. Tensors are memory-mapped, so that tensors which are never
read cost nothing. Pickles are refused.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from jaxtyping import Int, Shaped
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from embedlayer.core.errors import CheckpointError
from embedlayer.core.partitioned import is_sharded
from embedlayer.io.files import GGUF, file_errors, replace_file, require_file
from embedlayer.io.mapped_rows import MappedRows, ResidentLimit
from embedlayer.io.system_calls import allocate

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
    "U32": torch.uint32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' name of each data type that embedlayer reads and writes."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The names by data type."""

_MAX_DIMENSIONS = 16
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PICKLE_STARTS = (b"PK", b"\x80")  # a zip file by torch.save, or a bare pickle


@dataclass(frozen=True)
class TensorInfo:
    """Data type, shape and byte range of one tensor in a safetensors or GGUF file.

    `dtype` is safetensors' name of the data type, such as `"BF16"`; in a GGUF file GGUF's name, such as `"Q4_K"`.
    `start` and `stop` are offsets from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.dtype not in DTYPES:
            raise CheckpointError(f"{self.file}: {self.name} is stored as {self.dtype}; readable: {', '.join(DTYPES)}.")
        return DTYPES[self.dtype]

    def read_rows(self, rows: slice | Int[Tensor, " N"]) -> Shaped[Tensor, "N ..."]:
        """Read some rows of the tensor from the file and return a copy of them.

        Only the memory pages of these rows are read, so the file may be larger than memory. A scalar has one row.
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
        """Map the rows of the tensor into memory, one for each index of the first dimension. Nothing is read."""
        count = (self.shape or (1,))[0]
        return MappedRows(self.file, self.start, count, self.nbytes // max(count, 1), writable=writable, limit=limit)


@dataclass(frozen=True)
class Header:
    """Header of a safetensors file: what it says about each tensor, and the metadata."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    size: int


@contextmanager
def open_safetensors(path: Path | str, device: str = "cpu", framework: str = "pt") -> Iterator[Any]:
    """Context manager: yield `safetensors.safe_open(path)`, and turn safetensors' errors into ours.

    Errors inside the block are replaced too. The framework `"pt"` maps the file copy-on-write, which fails for files
    larger than memory; `"np"` maps it read-only.
    """
    path = Path(path)
    torch.device(device)  # safetensors' own error about it looks like one about the file
    require_file(path)
    try:
        with file_errors(f"read {path}"), safe_open(path, framework=framework, device=device) as file:
            yield file
    except SafetensorError as error:
        with path.open("rb") as opened:
            start = opened.read(9)
        if start.startswith(_PICKLE_STARTS) and not start.endswith(b"{"):  # 8 bytes of length, then a header in JSON
            raise pickle_error(path) from error
        if start.startswith(GGUF):
            raise CheckpointError(f"{path} is a GGUF file: pass this file itself.") from error
        message = f"{path} is not a whole safetensors file, or cut short ({error}): copy it again."
        raise CheckpointError(message) from error


def read_header(path: Path | str) -> Header:
    """Read and check the header of a safetensors file; no tensor is read, so the file may have any size."""
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
    """Read all tensors of a safetensors file, or those whose names begin with `prefix`, which is removed."""
    with open_safetensors(path, device) as file:
        names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
        return {name[len(prefix) :]: file.get_tensor(name) for name in names}, dict(file.metadata() or {})


def save_tensors(path: Path | str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write named tensors to one safetensors file, atomically; an existing file is replaced."""
    require_whole(tensors)
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with replace_file(path) as partial:
        try:
            save_file(contiguous, partial, metadata={"format": "pt", **(metadata or {})})
        except SafetensorError as error:  # how safetensors reports a full disk
            raise OSError(str(error)) from error


def require_whole(tensors: Mapping[str, Tensor]) -> None:
    """Raise a `CheckpointError` if a tensor is sharded, as a `DTensor` is."""
    if sharded := [name for name, tensor in tensors.items() if is_sharded(tensor)]:
        raise CheckpointError(
            f"{', '.join(sharded)}: sharded over several ranks. Save them with torch.distributed.checkpoint "
            f"(embedlayer.distributed.distributed_state), or gather them on all ranks first."
        )


def encode_header(
    tensors: Mapping[str, tuple[str | torch.dtype, Sequence[int], int]], metadata: Mapping[str, str], *, align: int = 8
) -> bytes:
    """Return the first bytes of a safetensors file: everything before the data of the tensors.

    The caller writes the data after it, without gaps, in the order of `tensors`. The result is padded to a multiple of
    `align` bytes, itself a multiple of 8.
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


def header_of_copy(
    file: BinaryIO, sizes: Mapping[str, tuple[Sequence[int], int]], metadata: Mapping[str, str]
) -> bytes:
    """Return the first bytes of a copy of a safetensors file in which tensors have other sizes.

    Order, spaces and padding are those of `file`, so that a copy with the old sizes again has the old bytes: MLX sorts
    names and keys and does not pad. `sizes` names every tensor of the file in the order of their offsets, and the
    caller writes the data after the header, without gaps, in this order.
    """
    length = int.from_bytes(file.read(8), "little")
    raw = file.read(length)
    entries: dict[str, Any] = json.loads(raw)
    styles = ((",", ":"), (", ", ": "))  # with the old sizes the copy has the old bytes: MLX does not pad
    own = (
        style for style in styles if json.dumps(entries, separators=style, ensure_ascii=False).encode() == raw.rstrip()
    )
    separators, offset = next(own, styles[0]), 0
    entries |= {"__metadata__": dict(metadata)} if metadata else {}
    for name, (shape, nbytes) in sizes.items():
        entries[name] |= {"shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(entries, separators=separators, ensure_ascii=False).encode()
    is_padded = length % 8 == 0
    text += b" " * (-len(text) % 8 if is_padded else len(text) % 8 == 0)  # one that is not padded never looks so
    return len(text).to_bytes(8, "little") + text


def create_tensor_file(path: Path | str, name: str, shape: Sequence[int], dtype: torch.dtype) -> TensorInfo:
    """Create a safetensors file with one tensor of zeros, and return where the tensor is in it.

    The rows start at a multiple of 4096 bytes.
    """
    path, nbytes = Path(path), math.prod(shape) * dtype.itemsize
    header = encode_header({name: (dtype, shape, nbytes)}, {"format": "pt"}, align=4096)
    info = TensorInfo(name, DTYPE_NAMES[dtype], tuple(shape), path, len(header), len(header) + nbytes)
    with file_errors(f"create {path} of {info.stop:,} bytes", " Free some space or choose another folder."):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            allocate(descriptor, info.stop)  # so that no write through a map finds the disk full
            os.pwrite(descriptor, header, 0)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
    return info


def byte_chunks(tensor: Tensor, dtype: torch.dtype | None = None) -> Iterator[Shaped[Tensor, " N"]]:
    """Yield the bytes of a tensor as uint8 tensors on the CPU, some rows at a time, for writing or sending them.

    A chunk has at most `CHUNK_BYTES` (16 MiB), or one row if a row is larger. Each is converted to `dtype` first, by
    default the tensor's own.
    """
    dtype = dtype or tensor.dtype
    rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    for chunk in rows.split(rows_per_chunk(rows, dtype)):
        if chunk.numel():
            yield chunk.to("cpu", dtype).contiguous().flatten().view(torch.uint8)


def write_tensor(file: BinaryIO, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
    """Write the bytes of a tensor to an open file, in the chunks of `byte_chunks`."""
    for chunk in byte_chunks(tensor, dtype):
        file.write(chunk.numpy().data)


def copy_bytes(old: BinaryIO, new: BinaryIO, info: TensorInfo) -> None:
    """Copy the bytes of a tensor of the file `old` to the present position of another file, in chunks."""
    old.seek(info.start)
    for left in range(info.nbytes, 0, -CHUNK_BYTES):
        new.write(old.read(min(left, CHUNK_BYTES)))
    if old.tell() != info.stop:
        raise CheckpointError(f"{info.file} ends inside {info.name}: it was cut short while it was copied.")


def rows_per_chunk(rows: Tensor, dtype: torch.dtype | None = None) -> int:
    """Return how many rows of a tensor, as `dtype`, fit into one chunk of `byte_chunks`; at least 1."""
    return max(CHUNK_BYTES // max(rows[:1].numel() * (dtype or rows.dtype).itemsize, 1), 1)


def pickle_error(path: Path) -> CheckpointError:
    """Create, but do not raise, the error for a pickle; the file is not unpickled."""
    return CheckpointError(f"{path} is a pickle, which can run any code when it is loaded: docs/errors.md, Pickles.")
