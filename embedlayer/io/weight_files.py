"""The weights of a checkpoint folder: which files have them, and its tensors one by one."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from embedlayer.core.errors import CheckpointError, FileError
from embedlayer.io.files import is_gguf, read_json, recover_folder, require_file
from embedlayer.io.safetensors_files import (
    ADAPTER_WEIGHTS,
    INDEX,
    PICKLE_SUFFIXES,
    WEIGHTS,
    Header,
    TensorInfo,
    open_safetensors,
    pickle_error,
    read_header,
)


class CheckpointFolder(ABC):
    """Abstract base class: a folder with the files of a checkpoint, on this machine or on the hub."""

    name: str
    path: Path | None = None

    @abstractmethod
    def find(self, file: str) -> Path | None:
        """Return the local path of a file in the folder; `None` if there is no such file."""
        # a folder on the hub downloads the file first, unless it is in the cache


class LocalFolder(CheckpointFolder):
    """A checkpoint folder on this machine."""

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        self.name = str(path)

    def find(self, file: str) -> Path | None:
        path = self.path / file
        if not path.exists() or path.is_dir():
            return None
        require_file(path)
        return path


class WeightFiles:
    """The tensors of a checkpoint in one or several safetensors files, read one by one on request.

    `files` is the name of the only file, or a mapping from the name of each tensor to the name of its file.
    `bytes_read` counts the headers and tensors that were read so far.
    """

    def __init__(self, folder: CheckpointFolder, files: str | Mapping[str, str]) -> None:
        self._folder = folder
        self._files = files
        self._headers: dict[str, Header] = {}
        self.bytes_read = 0
        self.name = f"{folder.name}/{files}" if isinstance(files, str) and files != WEIGHTS else folder.name

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._header(self._files).tensors if isinstance(self._files, str) else self._files)

    @property
    def headers(self) -> dict[str, Header]:
        """Return the headers of all files, by file name. Headers that were not read before are read now."""
        files = [self._files] if isinstance(self._files, str) else dict.fromkeys(self._files.values())
        return {file: self._header(file) for file in files}

    def find(self, *suffixes: str) -> list[str]:
        """Return the dotted names of tensors that equal one of `suffixes` or end in a dot and the suffix.

        The names for the first suffix come first; among the names for one suffix, the shortest.
        """
        names = sorted(self.names, key=lambda name: (len(name), name))
        return [name for suffix in suffixes for name in names if f".{name}".endswith(f".{suffix}")]

    def info(self, name: str) -> TensorInfo:
        """Return the data type, shape and byte range of a tensor; only the header of its file is read."""
        file = self._files if isinstance(self._files, str) else self._files.get(name)
        tensor = None if file is None else self._header(file).tensors.get(name)
        if tensor is None:
            wrong = " The index and its shards do not belong together: copy them again." if file != self._files else ""
            raise CheckpointError(f"{self.name} has no tensor {name!r}{f' in {file}' if file else ''}.{wrong}")
        return tensor

    def read(self, name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Read one tensor and return it, in the data type `dtype` or in that of the file.

        On the CPU and in the data type of the file, the result is memory-mapped, not copied: writing to it does not
        change the file. The tensor is copied if the file is larger than memory, or if it is not aligned in the file.
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
        """Return the header of a file of this checkpoint; it is read and checked at the first call."""
        if file not in self._headers:
            path = self._folder.find(file)
            if path is None:
                raise CheckpointError(f"{self.name} lacks its shard {file}: copy or download it again.")
            header = read_header(path)
            index = {} if isinstance(self._files, str) else self._files
            twice = [name for name in header.tensors if index.get(name, file) != file]
            if twice:
                raise CheckpointError(f"{path} has {twice[0]!r}, which the index locates in {index[twice[0]]}.")
            self._headers[file] = header
            self.bytes_read += self._headers[file].size
        return self._headers[file]


def find_folder(path: Path) -> tuple[CheckpointFolder, str | None] | None:
    """Find the checkpoint folder that a local path names; `None` if nothing exists at `path`."""
    try:
        if recover_folder(path).is_dir():
            return LocalFolder(path), None
        if not path.exists():
            return None
        require_file(path)
        return LocalFolder(path.parent), path.name
    except FileError:
        raise
    except (OSError, ValueError) as error:
        raise FileError(f"Cannot read {str(path)!r}: {error}.") from error


def no_such_path(path: Path | str) -> FileError:
    """Create, but do not raise, the error for a path at which no folder or file exists."""
    return FileError(f"There is no folder or file {str(path)!r}.")


def choose_weight_files(folder: CheckpointFolder, file: str | None = None) -> str | Mapping[str, str]:
    """Choose the safetensors files, or the only GGUF file, from which the tensors of a folder are read.

    By default, it is the first that exists of `model.safetensors`, `model.safetensors.index.json`, the only safetensors
    file, and the only GGUF file. The result is the second argument of `WeightFiles`.
    """
    if file is not None:
        path = folder.find(file)
        assert path is not None
        if file == ADAPTER_WEIGHTS:
            raise _adapter_error(path)
        if file.endswith(".index.json"):
            return _read_weight_map(path)
        if path.suffix in PICKLE_SUFFIXES:
            raise pickle_error(path)
        return file
    if folder.find(WEIGHTS) is not None:  # before an index, as in transformers
        return WEIGHTS
    index = folder.find(INDEX)
    if index is not None:
        return _read_weight_map(index)
    if folder.path is None:
        raise FileError(f"{folder.name!r} has no {WEIGHTS} on the hub or in its cache, and is no folder here.")
    files = sorted(path for path in folder.path.iterdir() if path.is_file())
    safetensors = [path for path in files if path.suffix == ".safetensors"]
    if len(safetensors) == 1:
        if safetensors[0].name == ADAPTER_WEIGHTS:
            raise _adapter_error(safetensors[0])
        return safetensors[0].name
    if safetensors:
        raise CheckpointError(f"{folder.name} holds {len(safetensors)} safetensors files and no {INDEX}: name one.")
    pickles = [path for path in files if path.suffix in PICKLE_SUFFIXES]
    if pickles:
        raise pickle_error(pickles[0])
    others = [path for path in files if is_gguf(path)]
    if len(others) == 1:
        return others[0].name
    if others:
        raise CheckpointError(f"{folder.name} holds {len(others)} GGUF files: name one of them.")
    raise FileError(f"{folder.name} holds no safetensors file.")


def is_plain_name(name: str) -> bool:
    """Return whether a string is a safe name of a file directly in a folder."""
    return PurePosixPath(name).name == name and name not in ("", ".", "..") and not {"\0", "\\"} & set(name)


def _read_weight_map(index: Path) -> dict[str, str]:
    """Read an index of shards (`model.safetensors.index.json`) and return the file name of each tensor by its name."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
        raise CheckpointError(f"{index} has no weight_map: it is damaged or another kind of file.")
    for file in set(shards.values()):
        if not is_plain_name(file):
            raise CheckpointError(f"{index} names the shard {file!r}, which is not a file beside it: refused.")
        if not file.endswith(".safetensors"):
            raise CheckpointError(f"{index} names the shard {file!r}, which is no safetensors file.")
    return shards


def _adapter_error(path: Path) -> CheckpointError:
    """Create, but do not raise, the error for the weights of a PEFT adapter, which are changes of a model."""
    merge = f"embedlayer.vocab.merge_adapter(layer.table, {str(path.parent)!r})"
    return CheckpointError(f"{path} is an adapter, without a table: open its model, and {merge}.")
