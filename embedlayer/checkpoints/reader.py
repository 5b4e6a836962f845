"""Open a checkpoint: its configuration, and single tensors out of it.

A checkpoint is a folder in Hugging Face's layout, one safetensors file, an index of several, or a name on the hub,
where a shard that is not asked for is never downloaded.
"""

import json
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from embedlayer.errors import CheckpointError, FileError, MissingExtraError, require
from embedlayer.io.files import JsonObject, read_json
from embedlayer.io.safetensors_files import CheckpointFolder, WeightFiles, choose_weight_files, is_plain_name, find_folder, no_such_path

CONFIG = "config.json"
SECONDS_TO_CONNECT = 5.0
LONGEST_HUB_NAME = 96
ENDINGS = (
    *(".safetensors", ".json", ".jsonl", ".gz", ".txt", ".bin", ".vec", ".npy", ".tsv", ".gguf", ".model"),
    *(".pt", ".pth", ".ckpt", ".pkl"),
)
"""Ends of files; a repository on the hub is not called so."""


class _Hub(CheckpointFolder):
    def __init__(self, repository: str, revision: str | None, folder: str = "", *, online: bool | None = None) -> None:
        self.name = f"{repository}/{folder}" if folder else repository
        self.repository = repository
        self.revision = revision
        self.folder = folder
        self.online = online
        """Whether the hub answers; `None` before it was asked."""

    def find(self, file: str) -> Path | None:
        try:
            hub = require("huggingface_hub", extra="hf")
        except MissingExtraError as error:
            raise MissingExtraError(
                f"There is no folder or file {self.name!r} here. To ask the hub: {error}"
            ) from error
        errors = require("huggingface_hub.errors", extra="hf")
        if self.online is None:
            self._connect()
        try:
            found = hub.hf_hub_download(
                self.repository,
                file,
                subfolder=self.folder or None,
                revision=self.revision,
                local_files_only=not self.online,
            )
        except errors.EntryNotFoundError:  # also: not in the cache, and offline
            return None
        except (OSError, ValueError) as error:
            raise self._refused(f"Cannot get {file} of {self.name!r} from the hub", error) from error
        return Path(found)

    def _connect(self) -> None:
        """See whether the hub answers: its client tries each file for half a minute; what is cached needs no hub."""
        hub = require("huggingface_hub", extra="hf")
        errors = require("huggingface_hub.errors", extra="hf")
        constants = require("huggingface_hub.constants", extra="hf")
        try:
            if not constants.HF_HUB_OFFLINE:
                _call(constants.ENDPOINT)
            self.online = not constants.HF_HUB_OFFLINE
        except OSError as error:
            try:
                hub.snapshot_download(self.repository, revision=self.revision, local_files_only=True)
            except (errors.EntryNotFoundError, OSError, ValueError):
                raise self._refused(
                    f"{self.name!r} is not in the hub's cache on this machine, and {constants.ENDPOINT} cannot be "
                    f"reached",
                    error,
                ) from error
            self.online = False

    def _refused(self, what: str, error: Exception) -> FileError:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        return FileError(f"{what} ({reason}). There is no folder or file of that name here either.")

    def list_files(self) -> None:
        return None

    def subfolder(self, folder: str) -> "_Hub":
        return _Hub(self.repository, self.revision, folder, online=self.online)


def _call(url: str) -> None:
    """Connect to the host of a URL, or to the proxy for it, and hang up.

    Raises:
        OSError: It does not answer within `SECONDS_TO_CONNECT`.
    """
    asked = urlsplit(url)
    proxies = {} if proxy_bypass(asked.hostname or "") else getproxies()
    proxy = proxies.get(asked.scheme) or proxies.get("all")
    met = urlsplit(proxy if proxy is None or "//" in proxy else f"//{proxy}") if proxy else asked
    port = met.port or {"http": 80, "socks5": 1080, "socks5h": 1080}.get(met.scheme, 443)
    socket.create_connection((met.hostname, port), SECONDS_TO_CONNECT).close()


class Checkpoint(WeightFiles):
    """A checkpoint that is open: its configuration, the names of its tensors, and each tensor when it is asked for.

    Attributes:
        config: Its `config.json`, empty if there is none.
        is_static_embedding: Whether it is sentence-transformers' StaticEmbedding, a table without a model.
    """

    def __init__(self, place: CheckpointFolder, file: str | None = None, *, is_static_embedding: bool = False) -> None:
        super().__init__(place, choose_weight_files(place, file))
        self.is_static_embedding = is_static_embedding
        config = place.find(CONFIG)
        self.config: JsonObject = {} if config is None else read_json(config)

    @classmethod
    def open(cls, source: Path | str, *, revision: str | None = None) -> "Checkpoint":
        """Open a folder, a safetensors file, an index, or a name on the hub such as `"openai-community/gpt2"`.

        Args:
            source: What to open. A name on the hub needs the `hf` extra, and is looked up in its cache only if
                `HF_HUB_OFFLINE` is set.
            revision: Branch, tag or commit on the hub.

        Raises:
            FileError: There is nothing of that name.
            CheckpointError: It holds no safetensors, only pickles, or is damaged.
            MissingExtraError: There is nothing here, and the hub needs `pip install 'embedlayer[hf]'`.
        """
        found = find_folder(Path(source))
        if found is not None and found[1] is not None:
            return cls(*found)
        if found is None and (isinstance(source, Path) or not is_hub_name(source)):
            if re.fullmatch(r"[\w.-]+", str(source)):
                raise FileError(f"{no_such_path(source)} A model on the hub is named with its owner: owner/{source}.")
            raise no_such_path(source)
        place = _Hub(str(source), revision) if found is None else found[0]
        folder, is_static = _first_module(place)
        return cls(place.subfolder(folder) if folder else place, is_static_embedding=is_static)

    def file(self, name: str) -> Path | None:
        """Another file of the checkpoint, such as `tokenizer.json`; `None` if it has none."""
        return self._folder.find(name)


def is_hub_name(source: str) -> bool:
    """Whether a string names a repository on the hub: `owner/name`, and nothing that looks like a path.

    A path is what has no slash or several, starts with a dot, a slash or a tilde, ends like a file that this library
    reads, or begins with a folder that is here. So a mistyped path is never sent to the hub, with the exception of one
    that is two plain words.

    Example:
        >>> [is_hub_name(source) for source in ("openai-community/gpt2", "./runs/a", "runs", "runs/a.npy")]
        [True, False, False, False]
    """
    owner, _, name = source.partition("/")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source, re.ASCII) or len(source) > LONGEST_HUB_NAME:
        return False
    return not name.endswith(ENDINGS) and not Path(owner).is_dir()


def _first_module(place: CheckpointFolder) -> tuple[str, bool]:
    """Of a sentence-transformers model: the folder of its first module, and whether that is a StaticEmbedding."""
    path = place.find("modules.json")
    if path is None:
        return "", False
    try:
        first = json.loads(path.read_text(encoding="utf-8"))[0]
        folder, kind = first["path"], first["type"]
    except OSError as error:
        raise FileError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} is no list of modules ({error!r}): it is damaged.") from error
    if not (isinstance(folder, str) and isinstance(kind, str) and (not folder or is_plain_name(folder))):
        raise CheckpointError(
            f"{path} puts its first module into {folder!r}, which is not a folder beside it: refused."
        )
    return folder, kind.endswith(".StaticEmbedding")
