"""Open a checkpoint: read its configuration, list its tensors, and read single tensors.

A checkpoint is a folder in Hugging Face's layout, a safetensors file, an index of several such files, a GGUF file, or a
name on the hub. From the hub, only the shards that contain a requested tensor are downloaded.
"""

import re
import socket
import warnings
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.core.errors import CheckpointError, EmbedLayerWarning, FileError, MissingExtraError, require
from embedlayer.families import GGUF_HEAD, LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, gguf_config
from embedlayer.formats.modelopt import METHOD, SCALE
from embedlayer.formats.recognition import recognise
from embedlayer.formats.stored import StoredFormat, StoredModule, StoredRows
from embedlayer.io.files import JsonObject, is_gguf, read_bytes, read_json
from embedlayer.io.gguf_files import GGUFFile, read_gguf
from embedlayer.io.json_fields import parse_json
from embedlayer.io.safetensors_files import Header, TensorInfo, byte_chunks
from embedlayer.io.weight_files import (
    CheckpointFolder,
    LocalFolder,
    WeightFiles,
    choose_weight_files,
    find_folder,
    is_plain_name,
    no_such_path,
)
from embedlayer.tokenization.ids import missing_rows_message
from embedlayer.tokenization.read import load_tokenizer

CONFIG = "config.json"
WEIGHT = ".weight"
SCHEMES = ("quantization_config", "quantization")
"""Keys under which transformers and MLX state how a model is quantised."""

MODELOPT_CONFIG = "hf_quant_config.json"
"""File in which ModelOpt states it under the second key, also where `config.json` says nothing."""

TOKENIZERS = (
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),
    *(("tokenizer.model",), ("spiece.model",), ("sentencepiece.bpe.model",), ("vocab.txt",)),
)
"""Files that `load_tokenizer` reads, preferred ones first."""

SECONDS_TO_CONNECT = 5.0
LONGEST_HUB_NAME = 96
ENDINGS = (
    *(".safetensors", ".json", ".jsonl", ".gz", ".txt", ".bin", ".vec", ".npy", ".tsv", ".gguf", ".model"),
    *(".pt", ".pth", ".ckpt", ".pkl"),
)
"""File name endings; a name with one of them is a mistyped path and no repository on the hub."""


class _Hub(CheckpointFolder):
    """The files of a repository on the hub, or of a folder in it; each is downloaded when it is requested.

    `online` says whether the hub can be reached; `None` tests this at the first call of `find`.
    """

    def __init__(self, repository: str, revision: str | None, folder: str = "", *, online: bool | None = None) -> None:
        self.name = f"{repository}/{folder}" if folder else repository
        self.repository, self.revision, self.folder, self.online = repository, revision, folder, online

    def find(self, file: str) -> Path | None:
        """Return the local path of a file, downloaded unless the cache has it; `None` if there is no such file.

        If the hub cannot be reached, the result is also `None` for a file that the cache does not have.
        """
        try:
            hub = require("huggingface_hub", extra="hf")
        except MissingExtraError as error:
            raise MissingExtraError(f"There is no {self.name!r} here. To search the hub: {error}") from error
        errors = require("huggingface_hub.errors", extra="hf")
        if self.online is None:
            self.online = self._is_online()
        try:
            path = hub.hf_hub_download(
                self.repository,
                file,
                subfolder=self.folder or None,
                revision=self.revision,
                local_files_only=not self.online,
            )
        except errors.EntryNotFoundError:  # also raised offline for a file that is not cached
            return None
        except (OSError, ValueError) as error:
            raise _hub_error(f"Cannot get {file} of {self.name!r} from the hub", error) from error
        return Path(path)

    def _is_online(self) -> bool:
        """Return whether files are requested from the hub; if not, only its cache on this machine is read.

        They are not if `HF_HUB_OFFLINE` is set, or if the hub cannot be reached and the cache has the repository.
        Without this check, the hub's client would retry each file for half a minute.
        """
        hub = require("huggingface_hub", extra="hf")
        errors = require("huggingface_hub.errors", extra="hf")
        constants = require("huggingface_hub.constants", extra="hf")
        if constants.HF_HUB_OFFLINE:
            return False
        target = urlsplit(constants.ENDPOINT)
        proxies = {} if proxy_bypass(target.hostname or "") else getproxies()
        proxy = proxies.get(target.scheme) or proxies.get("all")
        host = urlsplit(proxy if "//" in proxy else f"//{proxy}") if proxy else target
        port = host.port or {"http": 80, "socks5": 1080, "socks5h": 1080}.get(host.scheme, 443)
        try:
            socket.create_connection((host.hostname, port), SECONDS_TO_CONNECT).close()
        except OSError as error:
            try:
                hub.snapshot_download(self.repository, revision=self.revision, local_files_only=True)
            except (errors.EntryNotFoundError, OSError, ValueError):
                what = f"{self.name!r} is not in the hub's cache, and {constants.ENDPOINT} is unreachable"
                raise _hub_error(what, error) from error
            return False
        return True


def _hub_error(what: str, error: Exception) -> FileError:
    """Return, without raising it, the error of a failed access to the hub."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return FileError(f"{what} ({reason}). There is no folder or file of that name here either.")


class Checkpoint(WeightFiles):
    """An open checkpoint: its configuration and its tensors, which are read on request.

    `file` is the safetensors file, GGUF file or index in `place` to read; `None` finds it by the usual names.
    `is_static_embedding` says that it is sentence-transformers' StaticEmbedding, a table without a model. `config` is
    the content of `config.json`, or the same from the metadata of a GGUF file; empty if there is none.
    """

    def __init__(self, place: CheckpointFolder, file: str | None = None, *, is_static_embedding: bool = False) -> None:
        files = choose_weight_files(place, file)
        super().__init__(place, files)
        self.is_static_embedding = is_static_embedding
        self._formats: dict[str, tuple[StoredFormat, int] | None] = {}
        path = place.find(files) if isinstance(files, str) else None
        self.gguf: GGUFFile | None = read_gguf(path) if path is not None and is_gguf(path) else None
        config = place.find(CONFIG) if self.gguf is None else None
        self.config: JsonObject = {} if config is None else read_json(config)
        if self.gguf is not None and isinstance(files, str):
            if not self.gguf.tensors:
                raise CheckpointError(f"{self.gguf.path} is a GGUF file without tensors.")
            factors = (each for each in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS) if each in self.gguf.tensors)
            own_factors = {each: self.gguf.read(each).tolist() for each in factors}
            self.config = gguf_config(
                self.gguf.metadata, is_tied=GGUF_HEAD not in self.gguf.tensors, factors=own_factors
            )
            self.bytes_read += self.gguf.size
            self._headers[files] = Header(self.gguf.tensors, {}, self.gguf.size)

    @classmethod
    def open(cls, source: Path | str, *, revision: str | None = None) -> "Checkpoint":
        """Open a folder, a safetensors file, an index, a GGUF file, or a hub name such as `"openai-community/gpt2"`."""
        local = find_folder(Path(source))
        if local is not None and local[1] is not None:
            return cls(*local)
        if local is None and (isinstance(source, Path) or not is_hub_name(source)):
            if re.fullmatch(r"[\w.-]+", str(source)):
                raise FileError(f"{no_such_path(source)} A model on the hub is named with its owner: owner/{source}.")
            raise no_such_path(source)
        hub = _Hub(str(source), revision)
        place = hub if local is None else local[0]
        folder, is_static = _first_module(place)
        if folder and place.path is not None:
            place = LocalFolder(place.path / folder)
        elif folder:
            place = _Hub(hub.repository, revision, folder, online=hub.online)
        return cls(place, is_static_embedding=is_static)

    def file(self, name: str) -> Path | None:
        """Return the local path of another file of the checkpoint, such as `tokenizer.json`; `None` if missing."""
        return None if self.gguf is not None else self._folder.find(name)

    def tokenizer_file(self) -> Path | None:
        """Return the path of the preferred tokenizer file of the checkpoint, or `None`."""
        if self.gguf is not None:
            return self.gguf.path if self.gguf.metadata.get("tokenizer.ggml.model") is not None else None
        for names in TOKENIZERS:
            paths = [self.file(name) for name in names]
            if all(paths):
                return paths[0]
        return None

    def read_tokenizer(self, rows: int) -> Tokenizer | None:
        """Read the tokenizer of the checkpoint, and warn if it has IDs without a row in a table of `rows` rows."""
        path = self.tokenizer_file()
        if path is None:
            return None
        tokenizer = load_tokenizer(path)
        if (mismatch := missing_rows_message(tokenizer, rows, path.parent)) is not None:
            warnings.warn(mismatch, EmbedLayerWarning, stacklevel=3)
        return tokenizer

    def read(self, name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Read one tensor and return it, as `WeightFiles.read` does.

        A quantised tensor of a GGUF file is dequantised, by default to float32.
        """
        if self.gguf is None:
            return super().read(name, dtype=dtype, device=device)
        self.bytes_read += self.info(name).nbytes
        return self.gguf.read(name, dtype).to(device)

    @cached_property
    def quantisation(self) -> JsonObject | None:
        """Return what `config.json`, or else ModelOpt's file, states about the quantisation; `None` for nothing.

        MLX states it twice, for other readers; two statements that differ are a `CheckpointError`.
        """
        nested = self.config.get("text_config")
        for part in (self.config, nested) if isinstance(nested, dict) else (self.config,):
            schemes: list[JsonObject] = [part[key] for key in SCHEMES if isinstance(part.get(key), dict)]
            if not schemes:
                continue
            first, last = schemes[0], schemes[-1]
            for name in sorted(first.keys() & last.keys()):
                if first[name] != last[name] and not isinstance(first[name], dict):
                    raise CheckpointError(
                        f"{self.file(CONFIG)}: {name} is {first[name]} in {SCHEMES[0]}, {last[name]} in {SCHEMES[1]}."
                    )
            return first
        is_possible = any(name.endswith(f".{SCALE}") for name in self.names)  # a tensor may be of ModelOpt
        path = self.file(MODELOPT_CONFIG) if is_possible else None
        scheme = None if path is None else read_json(path).get(SCHEMES[1])
        return {"quant_method": METHOD, **scheme} if isinstance(scheme, dict) else None

    def find(self, *suffixes: str) -> list[str]:
        """Return the names of tensors that end in one of `suffixes`, as `WeightFiles.find` does, and of stored rows.

        Stored rows are named as the weight that they replace: `lm_head.weight` for a module with `lm_head.qweight`.
        """
        found: list[str] = []
        for suffix in suffixes:
            found += WeightFiles.find(self, suffix)
            if suffix.endswith(WEIGHT):  # weights that are only there as stored rows in other tensors
                end = f".{suffix.removesuffix(WEIGHT)}."
                starts = {f".{name}".partition(end)[0] for name in self.names if end in f".{name}"}
                weights = {f"{start}{end}weight"[1:] for start in starts} - {*self.names}
                ordered = sorted(weights, key=lambda name: (len(name), name))
                found += [name for name in ordered if self.stored(name) is not None]
        return found

    def module_tensors(self, weight: str) -> dict[str, str]:
        """Return the names of the tensors of the module of a weight, by the rest after the name of the module."""
        module = weight.rpartition(".")[0]
        if not module:
            return {name: name for name in self.names if "." not in name}
        return {name[len(module) + 1 :]: name for name in self.names if name.startswith(f"{module}.")}

    def stored(self, name: str) -> tuple[StoredFormat, int] | None:
        """Return the format of the stored rows that a module has for its weight `name`, and the number of rows V.

        The result is `None` for a weight in floating point, and for one that does not exist. Headers tell, and tensors
        of a few numbers.
        """
        if not f".{name}".endswith(WEIGHT):
            return None
        if name not in self._formats:
            with torch.device("cpu"):  # layers are built on the meta device
                module = self._module(name)
                self._formats[name] = recognise(module) if module.tensors else None
        return self._formats[name]

    def read_stored(self, name: str) -> StoredRows:
        """Return the stored rows of a weight for which `stored` returned a format, mapped to the file."""
        stored = self.stored(name)
        assert stored is not None
        with torch.device("cpu"):
            return stored[0].read(self._module(name), stored[1])

    def stored_tensors(self, name: str, rows: StoredRows) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the tensors that store new rows of a weight, by their names: the inverse of `read_stored`.

        The second result has the metadata of their files that change. A `CheckpointError` says that the format cannot
        store this number of rows.
        """
        module, names = self._module(name), self.module_tensors(name)
        with torch.device("cpu"):
            tensors, metadata = rows.format.write(rows, module), rows.format.metadata(rows, module)
        return {names[rest]: tensor for rest, tensor in tensors.items()}, metadata

    def matrix_info(self, name: str) -> TensorInfo:
        """Return `info(name)`; for stored rows shape `(V, D)`, name of the format and number of bytes of the matrix."""
        stored = self.stored(name)
        if stored is None:
            return self.info(name)
        record, count = stored
        infos = [self.info(each) for each in self.module_tensors(name).values()]
        size = sum(info.nbytes for info in infos)
        return replace(infos[0], name=name, dtype=record.name, shape=(count, record.embed_dim), start=0, stop=size)

    def _module(self, weight: str) -> StoredModule:
        """Return the tensors of the module of a weight, as the records of stored formats read them."""
        names = self.module_tensors(weight)
        infos = {rest: self.info(name) for rest, name in names.items()}
        headers = [header for header in self._headers.values() if {*names.values()} & header.tensors.keys()]
        metadata = {key: value for header in headers for key, value in header.metadata.items()}
        gguf = self.gguf

        def read(rest: str) -> Tensor:
            if gguf is None:
                return WeightFiles.read(self, names[rest])
            self.bytes_read += infos[rest].nbytes
            return gguf.stored_rows(names[rest])

        return StoredModule(weight.rpartition(".")[0], infos, read, self.quantisation or {}, metadata)

    def stores(self, name: str, tensor: Tensor) -> bool:
        """Return whether the tensor `name` of the checkpoint equals `tensor` in shape and, bit for bit, in its numbers.

        `tensor` is converted to the stored dtype for this, one buffer at a time.
        """
        stored = self.read(name)
        pairs = zip(byte_chunks(stored), byte_chunks(tensor, stored.dtype), strict=True)
        return stored.shape == tensor.shape and all(torch.equal(old, new) for old, new in pairs)

    def is_same(self, name: str, other: str) -> bool:
        """Return whether two tensors, by their full names, have the same shape, dtype and bits.

        Stored rows are compared by their own bits, codes and scales.
        """
        if self.stored(name) != self.stored(other):
            return False
        if self.stored(name) is None:
            return self.info(name).dtype == self.info(other).dtype and self.stores(name, self.read(other))
        rows, others = (self.read_stored(each) for each in (name, other))
        parts, other_parts = rows.rows | rows.shared, others.rows | others.shared
        pairs = (zip(byte_chunks(parts[part]), byte_chunks(other_parts[part]), strict=True) for part in parts)
        return all(torch.equal(own, other) for chunks in pairs for own, other in chunks)


def weight_beside(name: str) -> str:
    """Return the name of the weight of the module that has a tensor, such as `lm_head.weight` for `lm_head.scales`."""
    return f"{name.rpartition('.')[0]}{WEIGHT}".lstrip(".")


def is_hub_name(source: str) -> bool:
    """Return whether a string is a hub name: `owner/name`, and nothing that looks like a path.

    A string is a path if it has no slash or more than one; if a part starts with a dot, or has other characters than
    ASCII letters, digits, `_`, `-` and `.`; if it ends like a file that this library reads, or is longer than 96
    characters; or if its first part is an existing folder. So a mistyped path reaches the hub only if it consists of
    two plain words.
    """
    owner, _, name = source.partition("/")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source, re.ASCII) or len(source) > LONGEST_HUB_NAME:
        return False
    return not name.endswith(ENDINGS) and not Path(owner).is_dir()


def _first_module(place: CheckpointFolder) -> tuple[str, bool]:
    """Return `(folder, is_static)` of the first module that a sentence-transformers model lists in `modules.json`."""
    path = place.find("modules.json")
    if path is None:
        return "", False
    try:
        first = parse_json(read_bytes(path), path)[0]
        folder, kind = first["path"], first["type"]
        folder = "" if folder == "." else folder  # as model2vec writes it
    except (LookupError, TypeError) as error:
        raise CheckpointError(f"{path} is no list of modules ({error!r}): it is damaged.") from error
    if not (isinstance(folder, str) and isinstance(kind, str) and (not folder or is_plain_name(folder))):
        raise CheckpointError(f"{path} puts its first module into {folder!r}, which is not a folder beside it.")
    return folder, kind.endswith(".StaticEmbedding")
