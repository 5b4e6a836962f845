"""Open a checkpoint: read its configuration, list its tensors, and read single tensors.

A checkpoint is a folder in Hugging Face's layout, a safetensors file, an index of several such files, a GGUF file, or a
name on the hub. From the hub, only the shards that contain a requested tensor are downloaded.
"""

import re
import socket
import warnings
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.core.errors import CheckpointError, EmbedLayerWarning, FileError, MissingExtraError, require
from embedlayer.families import GGUF_HEAD, LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, gguf_config
from embedlayer.io.files import JsonObject, is_gguf, read_bytes, read_json
from embedlayer.io.gguf_files import GGUFFile, read_gguf
from embedlayer.io.json_fields import parse_json
from embedlayer.io.safetensors_files import DTYPES, Header, byte_chunks
from embedlayer.io.weight_files import (
    CheckpointFolder,
    WeightFiles,
    choose_weight_files,
    find_folder,
    is_plain_name,
    no_such_path,
)
from embedlayer.tokenization.ids import missing_rows_message
from embedlayer.tokenization.read import load_tokenizer

CONFIG = "config.json"
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

    Args:
        repository: Name of the repository, `owner/name`.
        revision: Branch, tag or commit; `None` for the main branch.
        folder: Folder in the repository; empty for the repository itself.
        online: Whether the hub can be reached; `None` to test this at the first call of `find`.
    """

    def __init__(self, repository: str, revision: str | None, folder: str = "", *, online: bool | None = None) -> None:
        self.name = f"{repository}/{folder}" if folder else repository
        self.repository, self.revision, self.folder, self.online = repository, revision, folder, online

    def find(self, file: str) -> Path | None:
        """Return the local path of a file, downloaded unless the cache has it; `None` if there is no such file.

        If the hub cannot be reached, the result is also `None` for a file that the cache does not have.

        Raises:
            FileError: There is no such repository, or the hub cannot be reached and the cache has nothing of it.
            MissingExtraError: huggingface_hub is not installed.
        """
        try:
            hub = require("huggingface_hub", extra="hf")
        except MissingExtraError as error:
            raise MissingExtraError(
                f"There is no folder or file {self.name!r} here. To search the hub: {error}"
            ) from error
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

        The result is `False` if `HF_HUB_OFFLINE` is set, or if the hub cannot be reached and the cache has the
        repository. Without this check, the hub's client would retry each file for half a minute.

        Raises:
            FileError: The hub cannot be reached, and the cache does not have the repository.
        """
        hub = require("huggingface_hub", extra="hf")
        errors = require("huggingface_hub.errors", extra="hf")
        constants = require("huggingface_hub.constants", extra="hf")
        if constants.HF_HUB_OFFLINE:
            return False
        try:
            _connect_to(constants.ENDPOINT)
        except OSError as error:
            try:
                hub.snapshot_download(self.repository, revision=self.revision, local_files_only=True)
            except (errors.EntryNotFoundError, OSError, ValueError):
                what = (
                    f"{self.name!r} is not in the hub's cache on this machine, and {constants.ENDPOINT} is unreachable"
                )
                raise _hub_error(what, error) from error
            return False
        return True

    def list_files(self) -> None:
        """Return `None`: the files of a repository are not listed, they can only be requested by name."""
        return

    def subfolder(self, folder: str) -> "_Hub":
        """Return a folder of the same repository and revision; `folder` is its path in the repository."""
        return _Hub(self.repository, self.revision, folder, online=self.online)


def _hub_error(what: str, error: Exception) -> FileError:
    """Return, without raising it, the error of a failed access to the hub.

    `what` says what failed, without a full stop; the first line of the message of `error` follows in parentheses.
    """
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return FileError(f"{what} ({reason}). There is no folder or file of that name here either.")


def _connect_to(url: str) -> None:
    """Open and close a connection to a host, or to the proxy that is set for it, to test whether it answers.

    An `OSError` says that the connection failed, or took longer than `SECONDS_TO_CONNECT`.
    """
    target = urlsplit(url)
    proxies = {} if proxy_bypass(target.hostname or "") else getproxies()
    proxy = proxies.get(target.scheme) or proxies.get("all")
    host = urlsplit(proxy if "//" in proxy else f"//{proxy}") if proxy else target
    port = host.port or {"http": 80, "socks5": 1080, "socks5h": 1080}.get(host.scheme, 443)
    socket.create_connection((host.hostname, port), SECONDS_TO_CONNECT).close()


class Checkpoint(WeightFiles):
    """An open checkpoint: its configuration and its tensors, which are read on request.

    Args:
        place: Folder or hub repository that has the files.
        file: Name of the safetensors file, GGUF file or index in `place` to read; `None` to find it by the usual names.
        is_static_embedding: Whether it is sentence-transformers' StaticEmbedding, a table without a model.

    Attributes:
        config: Content of `config.json`, or the same for the metadata of a GGUF file; empty if there is none.
        is_static_embedding: The argument of this name.
        gguf: Header of a GGUF file; `None` for other checkpoints.

    Raises:
        FileError: There is no safetensors file and no GGUF file.
        CheckpointError: A file is damaged; the weights are pickles, an adapter, or several files without an index; or a
            GGUF file has no tensors.
        MissingExtraError: A GGUF file needs `pip install 'embedlayer[gguf]'`.
    """

    def __init__(self, place: CheckpointFolder, file: str | None = None, *, is_static_embedding: bool = False) -> None:
        files = choose_weight_files(place, file)
        super().__init__(place, files)
        self.is_static_embedding = is_static_embedding
        path = place.find(files) if isinstance(files, str) else None
        self.gguf: GGUFFile | None = read_gguf(path) if path is not None and is_gguf(path) else None
        config = place.find(CONFIG) if self.gguf is None else None
        self.config: JsonObject = {} if config is None else read_json(config)
        if self.gguf is not None and isinstance(files, str):
            if not self.gguf.tensors:
                raise CheckpointError(f"{self.gguf.path} is a GGUF file without tensors, such as that of a tokenizer.")
            self.config = _config_of(self.gguf)
            self.bytes_read += self.gguf.size
            self._headers[files] = Header(self.gguf.tensors, {}, self.gguf.size)

    @classmethod
    def open(cls, source: Path | str, *, revision: str | None = None) -> "Checkpoint":
        """Open a folder, a safetensors file, an index, a GGUF file, or a hub name such as `"openai-community/gpt2"`.

        Args:
            source: Path or hub name. The hub needs the `hf` extra; with `HF_HUB_OFFLINE` set, only its cache on this
                machine is searched.
            revision: Branch, tag or commit on the hub; `None` for the main branch.

        Raises:
            FileError: There is no such file, folder or repository, or it contains no safetensors file and no GGUF file.
            CheckpointError: As in the constructor.
            MissingExtraError: There is no such path, and the hub needs `pip install 'embedlayer[hf]'`; or a GGUF file
                needs `'embedlayer[gguf]'`.

        Example:
            >>> from safetensors.torch import save_file
            >>> save_file({"wte.weight": torch.ones(10, 4)}, "model.safetensors")
            >>> Checkpoint.open("model.safetensors").info("wte.weight").shape
            (10, 4)
        """
        local = find_folder(Path(source))
        if local is not None and local[1] is not None:
            return cls(*local)
        if local is None and (isinstance(source, Path) or not is_hub_name(source)):
            if re.fullmatch(r"[\w.-]+", str(source)):
                raise FileError(f"{no_such_path(source)} A model on the hub is named with its owner: owner/{source}.")
            raise no_such_path(source)
        place = _Hub(str(source), revision) if local is None else local[0]
        folder, is_static = _first_module(place)
        return cls(place.subfolder(folder) if folder else place, is_static_embedding=is_static)

    def file(self, name: str) -> Path | None:
        """Return the local path of another file of the checkpoint, such as `tokenizer.json`; `None` if it is missing.

        From the hub, the file is downloaded first. A GGUF file has all it needs in itself: the result is `None`.
        """
        return None if self.gguf is not None else self._folder.find(name)

    def tokenizer_file(self) -> Path | None:
        """Return the path of the tokenizer file that this library prefers among those of the checkpoint, or `None`.

        For a GGUF file it is that file, if it has a tokenizer.
        """
        if self.gguf is not None:
            return self.gguf.path if self.gguf.get("tokenizer.ggml.model") is not None else None
        for names in TOKENIZERS:
            paths = [self.file(name) for name in names]
            if all(paths):
                return paths[0]
        return None

    def read_tokenizer(self, rows: int) -> Tokenizer | None:
        """Read the tokenizer of the checkpoint, and warn if it has IDs without a row in a table of `rows` rows.

        The result is `None` if there is no tokenizer file. The errors are those of `load_tokenizer`.
        """
        path = self.tokenizer_file()
        if path is None:
            return None
        tokenizer = load_tokenizer(path)
        if (mismatch := missing_rows_message(tokenizer, rows, path.parent)) is not None:
            warnings.warn(mismatch, EmbedLayerWarning, stacklevel=3)
        return tokenizer

    def read(self, name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Read one tensor and return it, as `WeightFiles.read` does.

        A quantised tensor of a GGUF file is dequantised, by default to float32. A `CheckpointError` says that there is
        no such tensor, or that it is damaged or of a type that cannot be read.
        """
        if self.gguf is None:
            return super().read(name, dtype=dtype, device=device)
        self.bytes_read += self.info(name).nbytes
        return self.gguf.read(name, dtype).to(device)

    def has_blocks(self, name: str) -> bool:
        """Return whether a tensor is one of a GGUF file whose numbers are quantised in blocks."""
        return self.gguf is not None and self.info(name).dtype not in DTYPES

    def stores(self, name: str, tensor: Tensor) -> bool:
        """Return whether the tensor `name` of the checkpoint equals `tensor` in shape and, bit for bit, in its numbers.

        `tensor` is converted to the stored dtype for this, one buffer at a time.
        """
        stored = self.read(name)
        pairs = zip(byte_chunks(stored), byte_chunks(tensor, stored.dtype), strict=True)
        return stored.shape == tensor.shape and all(torch.equal(old, new) for old, new in pairs)


def _config_of(file: GGUFFile) -> JsonObject:
    """Return the configuration of the model in a GGUF file, in the form that `config.json` has."""
    factors = {
        name: file.read(name).tolist() for name in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS) if name in file.tensors
    }
    values = {key: entry.value for key, entry in file.metadata.items()}
    return gguf_config(values, is_tied=GGUF_HEAD not in file.tensors, factors=factors)


def is_hub_name(source: str) -> bool:
    """Return whether a string is a hub name: `owner/name`, and nothing that looks like a path.

    A string is a path if it has no slash or more than one; if a part starts with a dot, or has other characters than
    ASCII letters, digits, `_`, `-` and `.`; if it ends like a file that this library reads, or is longer than 96
    characters; or if its first part is an existing folder. So a mistyped path reaches the hub only if it consists of
    two plain words.

    Example:
        >>> [is_hub_name(source) for source in ("openai-community/gpt2", "./runs/a", "runs", "runs/a.npy")]
        [True, False, False, False]
    """
    owner, _, name = source.partition("/")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source, re.ASCII) or len(source) > LONGEST_HUB_NAME:
        return False
    return not name.endswith(ENDINGS) and not Path(owner).is_dir()


def _first_module(place: CheckpointFolder) -> tuple[str, bool]:
    """Return `(folder, is_static)` of the first module that a sentence-transformers model lists in `modules.json`.

    `folder` is the module's folder in the checkpoint, empty for the checkpoint itself. `is_static` says whether the
    module is a StaticEmbedding. A checkpoint without `modules.json` gives `("", False)`.

    Raises:
        CheckpointError: `modules.json` is damaged, or names a folder that is not directly in the checkpoint.
    """
    path = place.find("modules.json")
    if path is None:
        return "", False
    try:
        first = parse_json(read_bytes(path), path)[0]
        folder, kind = first["path"], first["type"]
    except (LookupError, TypeError) as error:
        raise CheckpointError(f"{path} is no list of modules ({error!r}): it is damaged.") from error
    if not (isinstance(folder, str) and isinstance(kind, str) and (not folder or is_plain_name(folder))):
        raise CheckpointError(
            f"{path} puts its first module into {folder!r}, which is not a folder beside it: refused."
        )
    return folder, kind.endswith(".StaticEmbedding")
